"""What a person or a program wants to know of pools and machines: read from the database alone."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from orca_infra.attention import SQL as ATTENTION
from orca_infra.machines.model import MachineRow
from orca_infra.machines.observe import SQL
from orca_infra.surroundings import Surroundings

_ENDED_SHOWN = 10


def machine_state(row: MachineRow) -> str:
    """One word for where a machine is in its life."""
    if row.confirmed_at is None:
        return "making"
    if row.revoked_at is not None:
        return "removing"
    if row.first_seen_at is None:
        return "booting"
    return "busy" if row.running else "idle"


def read_status(surroundings: Surroundings) -> dict[str, Any]:
    """Pools (demand, message, last attempt, next try, refusals), machines with their state, the last ones that ended, runs.

    Raises Transient.
    """
    with surroundings.database.snapshot() as transaction:
        rows = transaction.rows(MachineRow, SQL["live_machines"])
        return {
            "stack": surroundings.settings.stack,
            "id": surroundings.stack_id,
            "now": transaction.value(SQL["now"]),
            "pools": transaction.dicts(SQL["pools_for_people"]),
            "machines": [{**asdict(row), "state": machine_state(row)} for row in rows],
            "ended": transaction.dicts(SQL["ended_machines"], {"limit": _ENDED_SHOWN}),
            "attention": transaction.dicts(ATTENTION["all"]),
            "runs": {row["state"]: row["count"] for row in transaction.dicts(SQL["runs_by_state"])},
        }
