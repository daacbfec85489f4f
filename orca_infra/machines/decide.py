"""What to make and what to remove, of worker machines: a pure function of the snapshot, the pools and the limits.

No clock, no I/O, no randomness: the same arguments always give the same plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from math import inf

from orca_infra.machines.model import (
    Action,
    Candidate,
    DeleteStray,
    Demand,
    DestroyOwned,
    EndInterrupted,
    Limits,
    MachineRow,
    MachineState,
    Make,
    Plan,
    Pool,
    PoolReport,
    Progress,
    Reason,
    Remove,
    SeenMachine,
    Snapshot,
)

#: The label that says which stack made a machine.
STACK_LABEL = "orca-stack"
_NOTHING = Demand(aged=0, waiting=0)


@dataclass(frozen=True, slots=True)
class _View:
    """The snapshot with what is asked of it again and again, worked out once."""

    snapshot: Snapshot
    limits: Limits
    rows: Mapping[str, tuple[MachineRow, ...]]
    room: Mapping[str, int]

    @classmethod
    def of(cls, snapshot: Snapshot, limits: Limits) -> _View:
        rows: dict[str, list[MachineRow]] = {}
        for row in snapshot.machines:
            rows.setdefault(row.pool, []).append(row)
        room = {
            pool: sum(
                max(0, row.slots - row.running)
                for row in members
                if row.revoked_at is None and _silence(row, snapshot) < limits.lost_seconds
            )
            for pool, members in rows.items()
        }
        return cls(snapshot, limits, {pool: tuple(members) for pool, members in rows.items()}, room)

    def left(self, pool: str, *, aged: bool) -> int:
        """The runs that wait after the pool's workers took what they have room for; `aged`: only those that are due."""
        demand = self.snapshot.demand.get(pool, _NOTHING)
        return max(0, (demand.aged if aged else demand.waiting) - self.room.get(pool, 0))


def decide(snapshot: Snapshot, pools: Sequence[Pool], limits: Limits) -> Plan:
    """The plan of one pass.

    A pool whose provider could not be read, or that an engine operation holds, gets a report and nothing else.
    """
    view = _View.of(snapshot, limits)
    by_pool = {pool.name: pool for pool in pools}
    actions: list[Action] = [*_removals(view, by_pool), *_owned_by_no_row(snapshot)]
    strays = _strays(snapshot, limits)
    held = tuple(stray.machine for stray in strays) if len(strays) > limits.stray_max else ()
    if not held:
        actions += strays

    reports: list[PoolReport] = []
    total = limits.max_machines_total
    spare = None if total is None else total - len(snapshot.machines)
    for pool in pools:
        report, make = _grow(pool, view, spare)
        reports.append(report)
        if make is not None:
            actions.append(make)
            spare = None if spare is None else spare - make.count
    reports += _reports_of_gone_pools(view, by_pool)
    return Plan(
        actions=tuple(actions),
        reports=tuple(reports),
        next_due_at=_next_due(snapshot, reports),
        strays_held=held,
    )


def _removals(view: _View, by_pool: Mapping[str, Pool]) -> list[Action]:
    snapshot = view.snapshot
    seen = {(provider, machine.name): machine for provider, machine in snapshot.seen}
    actions: list[Action] = []
    lost: list[Action] = []
    for row in snapshot.machines:
        if row.pool in snapshot.held or row.provider in snapshot.unreadable:
            continue
        action = _judge(row, by_pool.get(row.pool), seen.get((row.provider, row.name)), view)
        if isinstance(action, Remove) and action.reason is Reason.LOST and row.revoked_at is None:
            lost.append(action)
        elif action is not None:
            actions.append(action)
    # A mass of silent workers is more likely the loop's own deafness than a mass of dead machines.
    return actions + lost[: view.limits.lost_max]


def _judge(row: MachineRow, pool: Pool | None, seen: SeenMachine | None, view: _View) -> Remove | EndInterrupted | None:
    """What becomes of one machine; the reasons in the order in which they count."""
    now, limits = view.snapshot.now, view.limits
    if row.confirmed_at is None:
        return EndInterrupted(pool=row.pool, name=row.name, why="its creation was interrupted before it was confirmed")
    if row.revoked_at is not None:
        reason = Reason(row.removal_reason or Reason.FAILED)
        return _remove(row, reason, "its removal has begun and is not finished")
    fact = _gone_or_stopped(row, seen, view)
    if fact is not None:
        return _remove(row, *fact)
    silence = _silence(row, view.snapshot)
    if row.first_seen_at is None and _since(row.confirmed_at, now) >= limits.boot_seconds:
        return _remove(row, Reason.BOOT_TIMEOUT, f"its worker did not show up within {limits.boot_seconds:g} s")
    if row.first_seen_at is not None and silence >= limits.lost_seconds:
        return _remove(row, Reason.LOST, f"its worker has been silent for {silence:.0f} s")
    if row.running:
        return None
    if pool is None:
        return _remove(row, Reason.POOL_GONE, "its pool is gone from orca.toml", only_idle=True)
    if row.idle_since is not None and view.left(pool.name, aged=False) == 0:
        idle = _since(row.idle_since, now)
        if idle >= pool.idle_seconds:
            why = f"it has run nothing for {idle:.0f} s, and the pool has no demand"
            return _remove(row, Reason.IDLE, why, only_idle=True)
    return None


def _remove(row: MachineRow, reason: Reason, why: str, *, only_idle: bool = False) -> Remove:
    return Remove(pool=row.pool, name=row.name, reason=reason, only_idle=only_idle, why=why)


def _gone_or_stopped(row: MachineRow, seen: SeenMachine | None, view: _View) -> tuple[Reason, str] | None:
    if row.name in view.snapshot.gone:
        # A young machine may not be shown yet: clouds' reads lag behind their writes.
        if _since(row.created_at, view.snapshot.now) < view.limits.stray_grace_seconds:
            return None
        return Reason.VANISHED, "its provider says that there is no such machine"
    if seen is None or seen.uid != row.uid:
        return None
    if seen.state is MachineState.PREEMPTED:
        return Reason.PREEMPTED, "its provider preempted it"
    if seen.state is MachineState.STOPPED:
        return Reason.STOPPED, "its provider says that it is stopped"
    return None


def _owned_by_no_row(snapshot: Snapshot) -> list[DestroyOwned]:
    live = {row.name for row in snapshot.machines}
    return [
        DestroyOwned(pool=pool, name=name, why="its stack owns it and no row wants it")
        for pool, names in sorted(snapshot.owned.items())
        if pool not in snapshot.held
        for name in sorted(names - live)
    ]


def _strays(snapshot: Snapshot, limits: Limits) -> list[DeleteStray]:
    """Machines with this stack's identity that nobody owns or wants, and that are past the grace."""
    known = {row.name for row in snapshot.machines}.union(*snapshot.owned.values())
    return [
        DeleteStray(provider=provider, machine=machine, why="it carries this stack's identity and nobody owns it")
        for provider, machine in snapshot.seen
        if machine.labels.get(STACK_LABEL) == snapshot.stack_id
        and machine.name not in known
        and _since(machine.created_at, snapshot.now) > limits.stray_grace_seconds
    ]


def _grow(pool: Pool, view: _View, spare: int | None) -> tuple[PoolReport, Make | None]:
    """Whether this pool makes machines now, and the sentence that says why or why not."""
    demand = view.left(pool.name, aged=True)
    rows = view.rows.get(pool.name, ())
    progress = view.snapshot.progress.get(pool.name, Progress())
    message = _why_not(pool, view, rows, demand, spare)
    next_try_at = None
    if not message and progress.tried_at is not None:
        next_try_at = progress.tried_at + timedelta(seconds=view.limits.try_seconds)
        if view.snapshot.now < next_try_at:
            message = "waiting for the next try"
        else:
            next_try_at = None
    if message:
        report = PoolReport(
            pool=pool.name, demand=demand, message=message, next_try_at=next_try_at, in_search=demand > 0
        )
        return report, None
    room = min(pool.max_booting - sum(row.is_booting for row in rows), pool.max_machines - len(rows), demand)
    count = room if spare is None else min(room, spare)
    make = _search(pool, progress, view.snapshot.now, count, f"{demand} run{'s wait' if demand > 1 else ' waits'}")
    return PoolReport(pool=pool.name, demand=demand, message=make.why, in_search=True), make


def _why_not(pool: Pool, view: _View, rows: Sequence[MachineRow], demand: int, spare: int | None) -> str:
    """What keeps the pool from growing, or nothing."""
    snapshot = view.snapshot
    booting = sum(row.is_booting for row in rows)
    if pool.provider in snapshot.unreadable:
        return f"nothing is decided: {snapshot.unreadable[pool.provider]}"
    if pool.name in snapshot.held:
        return f"nothing is decided: {snapshot.held[pool.name]}"
    if demand == 0:
        return "runs wait, none is due yet" if view.left(pool.name, aged=False) else "no demand"
    if booting >= pool.max_booting:
        return f"{booting} machine{'s are' if booting > 1 else ' is'} still booting"
    if len(rows) >= pool.max_machines:
        return f"the pool has all of its {pool.max_machines} machines (max_machines)"
    if spare is not None and spare <= 0:
        return f"all pools together have {view.limits.max_machines_total} machines (max_machines_total)"
    return ""


def _search(pool: Pool, progress: Progress, now: datetime, count: int, why: str) -> Make:
    """The candidates of one try: the type it is on in each of its locations, and the types after it whose turn has come."""
    position = next((i for i, t in enumerate(pool.types) if t.type == progress.trying_type), 0)
    begun = progress.trying_type == pool.types[position].type and progress.trying_since is not None
    since = progress.trying_since if begun and progress.trying_since is not None else now
    last = len(pool.types) - 1
    if begun and position < last and _since(since, now) >= pool.types[position].wait_seconds:
        position, since = position + 1, now
    candidates: list[Candidate] = []
    while True:
        kind = pool.types[position]
        candidates += [Candidate(type=kind.type, location=location, spot=kind.spot) for location in kind.locations]
        if position == last or _since(since, now) < kind.wait_seconds:
            break
        position, since = position + 1, now
    return Make(
        pool=pool.name,
        count=count,
        candidates=tuple(candidates),
        then_type=pool.types[position].type,
        then_since=since,
        why=why,
    )


def _spare_total(snapshot: Snapshot, limits: Limits) -> int | None:
    if limits.max_machines_total is None:
        return None
    return limits.max_machines_total - len(snapshot.machines)


def _reports_of_gone_pools(view: _View, by_pool: Mapping[str, Pool]) -> list[PoolReport]:
    return [
        PoolReport(pool=pool, demand=0, message=f"gone from orca.toml; machines still to remove: {len(rows)}")
        for pool, rows in sorted(view.rows.items())
        if pool not in by_pool
    ]


def _next_due(snapshot: Snapshot, reports: Iterable[PoolReport]) -> datetime | None:
    """The earliest instant at which a decision could differ because of time alone and must not wait for a whole period."""
    due = [demand.next_due_at for demand in snapshot.demand.values() if demand.next_due_at is not None]
    due += [report.next_try_at for report in reports if report.next_try_at is not None]
    return min(due, default=None)


def _silence(row: MachineRow, snapshot: Snapshot) -> float:
    """Seconds in which the worker could have been heard and was not; endless for one that was never seen."""
    if row.first_seen_at is None:
        return inf
    return _since(max(row.seen_at or row.first_seen_at, snapshot.hearing_since), snapshot.now)


def _since(then: datetime, now: datetime) -> float:
    return (now - then).total_seconds()
