"""Rows with times far ahead of the database's clock: set right, and said.

A clock that went wrong for a while, or a row that somebody wrote by hand, must not keep a dead worker alive, a pool from
trying or a Pod from its end for ever. What such a time was meant to be nobody knows: it counts from now on.
"""

from __future__ import annotations

from orca_infra.attention import note_in
from orca_infra.db.connection import Database, Transaction, load_queries
from orca_infra.log import Log

_SQL = load_queries("clocks")
_MEND = {"machines": _SQL["mend_machines"], "runs": _SQL["mend_runs"], "runtimes": _SQL["mend_runtimes"]}
_NAMED = 5


def mend_clocks(scope: str, database: Database, log: Log) -> int:
    """Set right what of a scope's rows is more than five minutes ahead; gives how many there were.

    Queued runs are orca's own and stay as they are: that there are some ahead is said where an operator looks.
    """
    with database.transaction() as transaction:
        rows = [row["row"] for row in transaction.dicts(_MEND[scope])]
        note_in(transaction, "clocks", _of_queued(transaction))
    if rows:
        log.warning(
            "times far ahead of the database's clock: they count from now on", rows=rows[:_NAMED], count=len(rows)
        )
    return len(rows)


def _of_queued(transaction: Transaction) -> str:
    queued = transaction.dicts(_SQL["queued_ahead"])[0]
    if not queued["runs"]:
        return ""
    return (
        f"{queued['runs']} queued runs (the first is {queued['first']}) carry a queued_at that is ahead of the database's "
        "clock; they count as due: look at the clock of whatever queues them"
    )
