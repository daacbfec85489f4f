"""What an operator has to look at: a sentence a topic, shown by `orca-infra status` until it is no longer so."""

from __future__ import annotations

from collections.abc import Collection

from orca_infra.db.connection import Database, Transaction, load_queries

SQL = load_queries("attention")
SCOPES = ("machines", "runs", "runtimes")
_OF_A_SCOPE = ("pass {scope}", "up {scope}", "labels of {scope}", "strays objects of {scope}")


def note(database: Database, topic: str, message: str) -> bool:
    """Say it, or with an empty message that it is over; gives whether that is news."""
    with database.transaction() as transaction:
        return note_in(transaction, topic, message)


def clear_outdated(database: Database, *, scopes: Collection[str], drift_is_reported: bool) -> None:
    """Forget what a loop with other settings said: of scopes that are not among these, and of drift unless it is reported."""
    gone = [scope for scope in SCOPES if scope not in scopes]
    topics = [topic.format(scope=scope) for scope in gone for topic in _OF_A_SCOPE]
    with database.transaction() as transaction:
        transaction.run(SQL["clear_outdated"], {"topics": topics, "drift_is_reported": drift_is_reported})


def note_in(transaction: Transaction, topic: str, message: str) -> bool:
    """The same beside other writes."""
    return bool(transaction.run(SQL["note" if message else "clear"], {"topic": topic, "message": message}))
