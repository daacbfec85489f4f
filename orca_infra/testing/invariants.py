"""What holds of machines whatever goes wrong, told of simulated worlds and of real ones by the same words.

Each is judged by what is really so, in the clouds, the states and the rows, and not by what a loop believes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import LiteralString, Protocol

from orca_infra.machines.model import MachineState, Pool

#: What no transaction ever sees, each as a query that finds nothing.
AT_EVERY_INSTANT: Mapping[str, LiteralString] = {
    "a run runs on a machine that is revoked or ended": """
        select r.id, r.worker from orca.runs r left join orca.pool_machines m
            on m.name = r.worker and m.ended_at is null and m.revoked_at is null
        where r.state = 'running' and r.worker is not null and m.name is null""",
    "a machine has ended, and its token is good": """
        select name from orca.pool_machines where ended_at is not null and revoked_at is null""",
    "two machines had one number": """
        select pool, number from orca.pool_machines group by 1, 2 having count(*) > 1""",
}
LIVE: LiteralString = "select name, pool, uid, revoked_at from orca.pool_machines where ended_at is null"


class Machine(Protocol):
    """A machine that exists."""

    @property
    def name(self) -> str: ...
    @property
    def uid(self) -> str: ...
    @property
    def state(self) -> MachineState: ...
    @property
    def labels(self) -> Mapping[str, str]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What there is of one stack's machines.

    Attributes:
        rows: what LIVE gives.
        machines: those that this stack made, whatever labels they have now.
        owned: the machines' names in the states.
        noted: those that the database says are in the states.
        pending: operations that a state has as not ended.

    """

    rows: Sequence[Mapping[str, object]]
    machines: Sequence[Machine]
    owned: Sequence[str]
    noted: Sequence[str]
    pending: Sequence[str] = ()


def too_many(rows: Iterable[Mapping[str, object]], pools: Iterable[Pool]) -> Iterator[str]:
    """Pools with more machines than they may have; at every instant."""
    of_pools = [row["pool"] for row in rows]
    for pool in pools:
        if (count := of_pools.count(pool.name)) > pool.max_machines:
            yield f"{pool.name} has {count} machines, max {pool.max_machines}"


def disagreements(found: Found, stack_id: str, pools: Sequence[Pool]) -> Iterator[str]:
    """What is not as it has to be once nothing is under way: the clouds, the states and the rows agree."""
    rows = {str(row["name"]): row for row in found.rows}
    machines = {machine.name: machine for machine in found.machines}
    if len(machines) < len(found.machines):
        yield f"two machines of one name: {sorted(machine.name for machine in found.machines)}"
    if {name: row["uid"] for name, row in rows.items()} != {name: one.uid for name, one in machines.items()}:
        yield f"rows {sorted(rows)} and machines {sorted(machines)} differ"
    if sorted(found.owned) != sorted(found.noted):
        yield f"the states own {sorted(found.owned)}, the database says {sorted(found.noted)}"
    if not_wanted := set(found.owned) - set(rows):
        yield f"owned and not wanted: {not_wanted}"
    if found.pending:
        yield f"pending operations are left: {list(found.pending)}"
    for name in rows.keys() & machines.keys():
        machine, row = machines[name], rows[name]
        if dict(machine.labels) != {"orca-stack": stack_id, "orca-pool": row["pool"]}:
            yield f"{name} has the labels {dict(machine.labels)}"
        if row["revoked_at"] is not None:
            yield f"{name} is still being removed"
        if machine.state is not MachineState.RUNNING:
            yield f"{name} does not run"
    yield from too_many(found.rows, pools)
