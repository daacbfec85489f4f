"""Strays that wait for an operator: too many at once, or any after the database may have lost rows."""

from __future__ import annotations

from collections.abc import Sequence

from orca_infra.attention import note
from orca_infra.db.connection import Database, load_queries
from orca_infra.log import Log

SQL = load_queries("lead")
_NAMES_SHOWN = 3
_NAMES_LOGGED = 50


def strays_held(database: Database) -> str:
    """Why an operator has to agree before any stray is deleted, or empty.

    What looks like nobody's after a failover that lost rows may be in use.
    """
    with database.snapshot() as transaction:
        return str(transaction.value(SQL["strays_held"]) or "")


def release_strays(database: Database) -> bool:
    """An operator agrees; gives whether strays had been held."""
    with database.transaction() as transaction:
        return bool(transaction.run(SQL["release_strays"]))


def say_strays_held(database: Database, log: Log, what: str, names: Sequence[str], rows_lost: str) -> None:
    """Have status say which `what` are held and why, and what to do; nothing when none is."""
    message = why = ""
    if names:
        shown = ", ".join(names[:_NAMES_SHOWN]) + (", …" if len(names) > _NAMES_SHOWN else "")
        count = f"{len(names)} {what} that nobody owns"
        why = (
            f"{count} are kept ({shown}), because {rows_lost} and rows may be lost"
            if rows_lost
            else f"{count} are more than ORCA_STRAY_MAX, and none is deleted ({shown})"
        )
        message = f"{why}: see `orca-infra strays`, then `orca-infra strays delete`"
    is_news = note(database, f"strays {what}", message)
    if names and is_news:
        log.warning("strays held: an operator has to look", scope=what, strays=list(names[:_NAMES_LOGGED]), why=why)
