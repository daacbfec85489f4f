"""What run clusters wait for, for people: from the database alone."""

from __future__ import annotations

from typing import Any

from orca_infra.attention import SQL as ATTENTION
from orca_infra.db.connection import Transaction
from orca_infra.runs.decide import why_queued
from orca_infra.runs.limits import run_limits
from orca_infra.runs.model import RunLimits
from orca_infra.runs.observe import SQL, read_rows
from orca_infra.settings import Settings

_QUEUED_SHOWN = 1000
#: Under what the loop says that passes over the runs are given up (loop/run.py).
_PASSES = "pass runs"
_OFF = "ORCA_RUNNER is not set: no run gets a cluster"


def read_queued(transaction: Transaction, settings: Settings, *, asked: int | None = None) -> list[dict[str, Any]]:
    """Queued runs that are for a run cluster, with what each waits for; the oldest first.

    Of many that one and the same thing holds (max_runs, the whole budget), the first of each pipeline stands for all. The
    run `asked` is among them, if it is such a run.
    """
    queued = what_queued_wait_for(transaction, run_limits(settings), asked=asked)
    return [{**row, "waiting": _OFF} for row in queued] if settings.runner is None else queued


def what_queued_wait_for(
    transaction: Transaction, limits: RunLimits, *, asked: int | None = None
) -> list[dict[str, Any]]:
    """The same where there are run clusters: what the next pass would say, since admission needs nothing of the cluster."""
    snapshot = read_rows(transaction, limits, asked=asked)
    given_up = transaction.value(ATTENTION["message"], {"topic": _PASSES})
    why = why_queued(snapshot, limits, given_up=given_up or "")
    queued = [
        {"run": run.run, "pipeline": run.pipeline, "queued_at": run.queued_at, "waiting": why[run.run]}
        for run in snapshot.queued
    ]
    queued += transaction.dicts(SQL["queued_without_cluster"], {"limit": _QUEUED_SHOWN, "asked": asked})
    return sorted(queued, key=lambda row: (row["queued_at"], row["run"]))


def read_waiting_starts(transaction: Transaction) -> list[dict[str, Any]]:
    """Starts that live and of which something is not there yet, or not gone yet, with what that is."""
    rows = transaction.dicts(SQL["clusters_for_people"])
    return [
        {"run": row["run"], "start": row["start"], "pipeline": row["pipeline"], "waiting": row["waiting"]}
        for row in rows
        if row["waiting"]
    ]
