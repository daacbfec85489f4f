"""What a person or a program wants to know of pools, machines, runs and runtimes: read from the database alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from datetime import datetime
from typing import Any

from orca_infra.attention import SQL as ATTENTION
from orca_infra.db.connection import Transaction
from orca_infra.machines.model import MachineRow
from orca_infra.machines.observe import SQL
from orca_infra.record.history import last_passes
from orca_infra.runs.status import read_queued, read_waiting_starts
from orca_infra.runtimes.observe import SQL as RUNTIMES
from orca_infra.surroundings import Surroundings

_ENDED_SHOWN = 10
_UNKNOWN_SHOWN = 5


def read_status(surroundings: Surroundings) -> dict[str, Any]:
    """Pools (demand, message, last attempt, next try, refusals), machines with their state, what ended last, runs, passes.

    Also the pools for which most runs wait of those that no pass has seen.
    With run clusters also what starts and queued runs wait for, the oldest first; of each runtime pool how many Pods are
    warm, assigned or starting, and a problem. Raises Transient.
    """
    with surroundings.database.snapshot() as transaction:
        machines = _live(transaction)
        return {
            "stack": surroundings.settings.stack,
            "id": surroundings.stack_id,
            "now": transaction.value(SQL["now"]),
            "pools": [_for_people(pool, machines) for pool in transaction.dicts(SQL["pools_for_people"])],
            "machines": machines,
            "ended": transaction.dicts(SQL["ended_machines"], {"limit": _ENDED_SHOWN}),
            "passes": last_passes(transaction),
            "attention": transaction.dicts(ATTENTION["all"]),
            "runs": {row["state"]: row["count"] for row in transaction.dicts(SQL["runs_by_state"])},
            "unknown_pools": transaction.dicts(SQL["runs_of_unknown_pools"], {"limit": _UNKNOWN_SHOWN}),
            "waiting": _waiting(surroundings, transaction),
            "runtimes": transaction.dicts(RUNTIMES["for_people"]),
        }


def _waiting(surroundings: Surroundings, transaction: Transaction) -> list[dict[str, Any]]:
    if surroundings.settings.runner is None:
        return []
    return read_waiting_starts(transaction) + read_queued(transaction, surroundings.settings)


def read_machines(
    surroundings: Surroundings, *, ended_limit: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], datetime]:
    """The machines with their state, the newest ones that ended, and the database's time. Raises Transient."""
    with surroundings.database.snapshot() as transaction:
        ended = transaction.dicts(SQL["ended_machines"], {"limit": ended_limit})
        return _live(transaction), ended, transaction.value(SQL["now"])


def _live(transaction: Transaction) -> list[dict[str, Any]]:
    return [{**asdict(row), "state": row.state} for row in transaction.rows(MachineRow, SQL["live_machines"])]


def _for_people(pool: dict[str, Any], machines: list[dict[str, Any]]) -> dict[str, Any]:
    """A pool's row with the machines as they are now, and one sentence that says all that a person asks."""
    counts = Counter(machine["state"] for machine in machines if machine["pool"] == pool["pool"])
    said = [pool["message"]]
    if pool["paused"] and not pool["message"].startswith("paused"):
        said.insert(0, "paused")  # since the last pass
    if pool["skipped"] and pool["skipped"] not in pool["message"]:
        said.append(pool["skipped"])
    return {**pool, "machines": dict(counts), "message": "; ".join(sentence for sentence in said if sentence)}
