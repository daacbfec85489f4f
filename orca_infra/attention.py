"""What an operator has to look at: a sentence a topic, shown by `orca-infra status` until it is no longer so."""

from __future__ import annotations

from orca_infra.db.connection import Database, Transaction, load_queries

SQL = load_queries("attention")


def note(database: Database, topic: str, message: str) -> bool:
    """Say it, or with an empty message that it is over; gives whether that is news."""
    with database.transaction() as transaction:
        return note_in(transaction, topic, message)


def note_in(transaction: Transaction, topic: str, message: str) -> bool:
    """The same beside other writes."""
    return bool(transaction.run(SQL["note" if message else "clear"], {"topic": topic, "message": message}))
