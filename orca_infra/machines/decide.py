"""What to make and what to remove, of worker machines: a pure function of the snapshot, the pools and the limits.

No clock, no I/O, no randomness: the same arguments always give the same plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from orca_infra.machines.model import (
    EVERY_POOL,
    NEXT_TRY,
    Action,
    Candidate,
    DeleteStray,
    Demand,
    DestroyOwned,
    EndInterrupted,
    Limits,
    MachineRow,
    MachineState,
    MachineType,
    Make,
    Plan,
    Pool,
    PoolReport,
    Progress,
    Reason,
    Refusal,
    Relabel,
    Remove,
    Snapshot,
)
from orca_infra.names import label_value

#: The labels that say which stack made a machine, and for which pool.
STACK_LABEL = "orca-stack"
POOL_LABEL = "orca-pool"
_NOTHING = Demand(aged=0, waiting=0)


@dataclass(frozen=True, slots=True)
class _View:
    """The snapshot with what is asked of it again and again, worked out once.

    `facts` are the machines of which the provider says that they are no capacity any more, whatever their workers said last.
    """

    snapshot: Snapshot
    limits: Limits
    rows: Mapping[str, tuple[MachineRow, ...]]
    room: Mapping[str, int]
    facts: Mapping[str, tuple[Reason, str]]
    sold_out: frozenset[tuple[str, Candidate]]

    @classmethod
    def of(cls, snapshot: Snapshot, by_pool: Mapping[str, Pool], limits: Limits) -> _View:
        rows: dict[str, list[MachineRow]] = {}
        for row in snapshot.machines:
            rows.setdefault(row.pool, []).append(row)
        facts = _facts(snapshot, limits)
        room = {
            pool: sum(
                max(0, row.slots - row.running)
                for row in members
                if row.revoked_at is None
                and row.drain_at is None
                and row.name not in facts
                and _silence(row, snapshot) < limits.lost_seconds
            )
            for pool, members in rows.items()
        }
        frozen_rows = {pool: tuple(members) for pool, members in rows.items()}
        return cls(snapshot, limits, frozen_rows, room, facts, _sold_out(snapshot, by_pool, limits))

    def is_paused(self, pool: str) -> bool:
        return not self.snapshot.paused.isdisjoint((pool, EVERY_POOL))

    def left(self, pool: str, *, aged: bool) -> int:
        """The runs that wait after the pool's workers took what they have room for; `aged`: only those that are due."""
        demand = self.snapshot.demand.get(pool, _NOTHING)
        return max(0, (demand.aged if aged else demand.waiting) - self.room.get(pool, 0))


def decide(snapshot: Snapshot, pools: Sequence[Pool], limits: Limits) -> Plan:
    """The plan of one pass.

    A pool whose provider could not be read, or that an engine operation holds, gets a report and nothing else.
    """
    by_pool = {pool.name: pool for pool in pools}
    view = _View.of(snapshot, by_pool, limits)
    removals = _removals(view, by_pool)
    leaving = frozenset(action.name for action in removals)
    actions: list[Action] = [*_relabels(snapshot), *removals]
    unexplained, unwanted = _unexplained(snapshot), _owned_by_no_row(snapshot, by_pool)
    strays = [s for s in unexplained if _since(s.machine.created_at, snapshot.now) > limits.stray_grace_seconds]
    # So many at once mean that rows or ownership were lost, not that machines went astray. Young ones count: they must not
    # slip through one by one as each comes of age.
    too_many = bool(strays or unwanted) and len(unexplained) + len(unwanted) > limits.stray_max
    if not too_many:
        actions += [*unwanted, *strays]

    reports: list[PoolReport] = []
    total = _total(limits)
    spare = None if total is None else total - len(snapshot.machines)
    for pool in pools:
        report, make = _grow(pool, view, spare, leaving)
        reports.append(report)
        if make is not None:
            actions.append(make)
            spare = None if spare is None else spare - make.count
    reports += _reports_of_gone_pools(view, by_pool)
    return Plan(
        actions=tuple(actions),
        reports=tuple(reports),
        next_due_at=_next_due(view, reports, leaving),
        strays_held=tuple(stray.machine for stray in unexplained) if too_many else (),
        owned_held=tuple(action.name for action in unwanted) if too_many else (),
    )


def machine_labels(stack_id: str, pool: str) -> dict[str, str]:
    """What each machine of a pool carries from its birth to its end."""
    return {STACK_LABEL: stack_id, POOL_LABEL: label_value(pool)}


def _relabels(snapshot: Snapshot) -> list[Relabel]:
    """Wanted machines without their labels; also those that are leaving, since one whose deletion fails is found by them."""
    wanted = {pool: machine_labels(snapshot.stack_id, pool) for pool in {row.pool for row in snapshot.machines}}
    rows = {(row.provider, row.name, row.uid): row for row in snapshot.machines if row.pool not in snapshot.held}
    actions = []
    for provider, machine in snapshot.seen:
        row = rows.get((provider, machine.name, machine.uid))
        if row is None or provider in snapshot.unreadable:
            continue
        labels = {key: value for key, value in wanted[row.pool].items() if machine.labels.get(key) != value}
        if labels:
            why = f"somebody took off or changed {' and '.join(labels)}"
            actions.append(Relabel(pool=row.pool, provider=provider, machine=machine, labels=labels, why=why))
    return actions


def _removals(view: _View, by_pool: Mapping[str, Pool]) -> list[Remove | EndInterrupted]:
    snapshot = view.snapshot
    actions: list[Remove | EndInterrupted] = []
    lost: list[Remove | EndInterrupted] = []
    for row in snapshot.machines:
        if row.pool in snapshot.held or row.provider in snapshot.unreadable:
            continue
        action = _judge(row, by_pool.get(row.pool), view)
        if isinstance(action, Remove) and action.reason is Reason.LOST and row.revoked_at is None:
            lost.append(action)
        elif action is not None:
            actions.append(action)
    # A mass of silent workers is more likely the loop's own deafness than a mass of dead machines.
    return actions + lost[: view.limits.lost_max]


def _judge(row: MachineRow, pool: Pool | None, view: _View) -> Remove | EndInterrupted | None:
    """What becomes of one machine; the reasons in the order in which they count."""
    now, limits = view.snapshot.now, view.limits
    if row.confirmed_at is None:
        return EndInterrupted(pool=row.pool, name=row.name, why="its creation was interrupted before it was confirmed")
    if row.revoked_at is not None:
        # A person may have revoked it with words of their own.
        reason = next((reason for reason in Reason if reason == row.removal_reason), Reason.FAILED)
        return _remove(row, reason, "its removal has begun and is not finished")
    if row.name in view.facts:
        return _remove(row, *view.facts[row.name])
    if row.drain_now:
        return _remove(row, Reason.DRAINED, "a person had it drained at once")
    silence = _silence(row, view.snapshot)
    # What runs something was seen once, even if its worker's row was deleted since.
    was_seen = row.first_seen_at is not None or row.running > 0
    # A worker that came up while the database was away could not say so.
    booting_since = max(row.confirmed_at, view.snapshot.hearing_since)
    if not was_seen and _since(booting_since, now) >= limits.boot_seconds:
        why = f"its worker did not show up within {limits.boot_seconds:g} s"
        return _remove(row, Reason.BOOT_TIMEOUT, why, only_idle=True)
    if was_seen and silence >= limits.lost_seconds:
        return _remove(row, Reason.LOST, f"its worker has been silent for {silence:.0f} s")
    if row.running:
        return None
    if row.drain_at is not None:
        return _remove(row, Reason.DRAINED, "a person had it drained, and it is idle", only_idle=True)
    if view.is_paused(row.pool):
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


def _facts(snapshot: Snapshot, limits: Limits) -> dict[str, tuple[Reason, str]]:
    """By name, the machines of which their provider says that they are gone, stopped or preempted."""
    # By uid, too: in another place another's machine may have the same name.
    seen = {(provider, machine.name, machine.uid): machine for provider, machine in snapshot.seen}
    facts: dict[str, tuple[Reason, str]] = {}
    for row in snapshot.machines:
        machine = seen.get((row.provider, row.name, row.uid or ""))
        if row.name in snapshot.gone:
            # A young machine may not be shown yet: clouds' reads lag behind their writes.
            if _since(row.created_at, snapshot.now) >= limits.stray_grace_seconds:
                facts[row.name] = (Reason.VANISHED, "its provider says that there is no such machine")
        elif machine is None:
            continue
        elif machine.state is MachineState.PREEMPTED:
            facts[row.name] = (Reason.PREEMPTED, "its provider preempted it")
        elif machine.state is MachineState.STOPPED:
            facts[row.name] = (Reason.STOPPED, "its provider says that it is stopped")
    return facts


def _owned_by_no_row(snapshot: Snapshot, by_pool: Mapping[str, Pool]) -> list[DestroyOwned]:
    live = {row.name for row in snapshot.machines}
    return [
        DestroyOwned(pool=pool, name=name, why="its stack owns it and no row wants it")
        for pool, names in sorted(snapshot.owned.items())
        if pool not in snapshot.held and not (pool in by_pool and by_pool[pool].provider in snapshot.unreadable)
        for name in sorted(names - live)
    ]


def _unexplained(snapshot: Snapshot) -> list[DeleteStray]:
    """Machines with this stack's identity that nobody owns or wants, however young, and that did not end just now.

    While a pool is held it is not known what its stack owns: only machines that are known to be of another pool are judged.
    """
    known = {row.name for row in snapshot.machines}.union(*snapshot.owned.values())
    judged = {*snapshot.owned, *snapshot.progress, *(row.pool for row in snapshot.machines)} - {*snapshot.held}
    return [
        DeleteStray(provider=provider, machine=machine, why="it carries this stack's identity and nobody owns it")
        for provider, machine in snapshot.seen
        if machine.labels.get(STACK_LABEL) == snapshot.stack_id
        and machine.name not in known
        and provider not in snapshot.unreadable
        and (not snapshot.held or machine.labels.get(POOL_LABEL) in judged)
        and (machine.name, machine.uid) not in snapshot.ended_lately
    ]


def _grow(pool: Pool, view: _View, spare: int | None, leaving: frozenset[str]) -> tuple[PoolReport, Make | None]:
    """Whether this pool makes machines now, and the sentence that says why or why not."""
    demand = view.left(pool.name, aged=True)
    rows = view.rows.get(pool.name, ())
    progress = view.snapshot.progress.get(pool.name, Progress())
    booting = sum(row.is_booting and row.name not in leaving for row in rows)
    steps, skipped = _usable(pool, view)
    message = _why_not(pool, view, booting, spare) or ("" if steps else _why_no_type(pool, view))
    next_try_at = None
    if not message and progress.tried_at is not None:
        next_try_at = progress.tried_at + timedelta(seconds=view.limits.try_seconds)
        if view.snapshot.now < next_try_at:
            message = NEXT_TRY
        else:
            next_try_at = None
    if message:
        report = PoolReport(
            pool=pool.name,
            demand=demand,
            message=message,
            next_try_at=next_try_at,
            # A search that a person paused begins anew: what it waited for meanwhile it did not try.
            in_search=demand > 0 and not view.is_paused(pool.name),
            skipped=skipped,
        )
        return report, None
    # What boots already will take a run each.
    room = min(pool.max_booting - booting, _most(pool, view.limits) - len(rows), demand - booting)
    count = room if spare is None else min(room, spare)
    why = f"{demand} run{'s wait' if demand > 1 else ' waits'}"
    make = _search(pool, view, steps, count=count, why=why)
    return PoolReport(pool=pool.name, demand=demand, message=why, in_search=True, skipped=skipped), make


def _why_not(pool: Pool, view: _View, booting: int, spare: int | None) -> str:
    """What keeps the pool from growing, or nothing."""
    snapshot = view.snapshot
    demand = view.left(pool.name, aged=True)
    if pool.provider in snapshot.unreadable:
        return f"nothing is decided: {snapshot.unreadable[pool.provider]}"
    if pool.name in snapshot.held:
        return f"nothing is decided: {snapshot.held[pool.name]}"
    if view.is_paused(pool.name):
        return "paused by a person: nothing is made, and nothing removed for being idle, until `orca-infra resume`"
    if demand == 0:
        return "runs wait, none is due yet" if view.left(pool.name, aged=False) else "no demand"
    if booting >= min(pool.max_booting, demand):
        return f"{booting} machine{'s are' if booting > 1 else ' is'} still booting"
    most = _most(pool, view.limits)
    have = len(view.rows.get(pool.name, ()))
    if have >= most:
        said = "max_machines" if most == pool.max_machines else "machine-counts of the policies"
        return f"the pool has {have} of {most} machines ({said})"
    total = _total(view.limits)
    if total is not None and spare is not None and spare <= 0:
        said = "max_machines_total" if total == view.limits.max_machines_total else "machine-counts of the policies"
        return f"all pools together have {total - spare} of {total} machines ({said})"
    return ""


def _most(pool: Pool, limits: Limits) -> int:
    """The most machines that a pool may have, by itself and by the policies."""
    most = limits.allowed.machines_per_pool
    return pool.max_machines if most is None else min(pool.max_machines, most)


def _total(limits: Limits) -> int | None:
    """The most machines of all pools; None for no such limit."""
    stated = [most for most in (limits.max_machines_total, limits.allowed.machines) if most is not None]
    return min(stated, default=None)


def _why_no_type(pool: Pool, view: _View) -> str:
    if not view.limits.allowed.has_image(pool.image):
        return f"the policies (image-registries) do not allow its image {pool.image}"
    if not any(_is_allowed(kind, view.limits) for kind in pool.types):
        return "the policies (machine-types, machine-locations) allow none of its types where it would have them"
    return "no type of the pool can run its image"


def _is_allowed(kind: MachineType, limits: Limits) -> bool:
    return limits.allowed.has_type(kind.type) and any(limits.allowed.has_location(place) for place in kind.locations)


def _offers(pool: Pool) -> tuple[str, ...]:
    """What each entry of `types` is called in the pool's progress: its type, numbered from the second of one type on.

    A pool may list a type as spot and as lasting, or with other locations: each is a step of its own.
    """
    names = [kind.type for kind in pool.types]
    times = [names[: position + 1].count(name) for position, name in enumerate(names)]
    return tuple(name if time == 1 else f"{name}#{time}" for name, time in zip(names, times, strict=True))


def _usable(pool: Pool, view: _View) -> tuple[list[int], str]:
    """The entries of `types` that the policies allow and the image has a variant for, and a sentence about the others.

    What the provider or the registry does not say is no reason to leave a type out.
    """
    allowed = view.limits.allowed
    if not allowed.has_image(pool.image):
        return [], f"skipped: every type: the policies (image-registries) do not allow image {pool.image}"
    variants = view.snapshot.image_architectures.get(pool.image)
    stated = view.snapshot.type_architectures.get(pool.provider, {}) if variants is not None else {}
    unfit = {
        kind.type: stated[kind.type] for kind in pool.types if stated.get(kind.type, "") not in {"", *(variants or ())}
    }
    steps = [
        position
        for position, kind in enumerate(pool.types)
        if kind.type not in unfit and _is_allowed(kind, view.limits)
    ]
    said = []
    if unfit:
        types = ", ".join(f"{kind} ({architecture})" for kind, architecture in unfit.items())
        has = f"is for {', '.join(sorted(variants or ()))} only" if variants else "has no variant for a machine"
        said.append(f"{types}: image {pool.image} {has}")
    types = ", ".join(dict.fromkeys(kind.type for kind in pool.types if not allowed.has_type(kind.type)))
    if types:
        said.append(f"{types}: the policies (machine-types) do not allow it")
    places = {place for kind in pool.types for place in kind.locations if not allowed.has_location(place)}
    if places:
        said.append(f"{', '.join(sorted(places))}: the policies (machine-locations) do not allow it")
    return steps, f"skipped: {'; '.join(said)}" if said else ""


def _sold_out(snapshot: Snapshot, by_pool: Mapping[str, Pool], limits: Limits) -> frozenset[tuple[str, Candidate]]:
    """By provider, what another pool found out of capacity less than one try ago."""
    return frozenset(
        (by_pool[refusal.pool].provider, Candidate(type=refusal.type, location=refusal.location, spot=refusal.spot))
        for refusal in snapshot.refusals
        if refusal.kind == "NoCapacity"
        and refusal.pool in by_pool
        and _since(refusal.last_at, snapshot.now) < limits.try_seconds
    )


def _search(pool: Pool, view: _View, steps: Sequence[int], *, count: int, why: str) -> Make:
    """The candidates of one try: the type it is on in each of its locations, and the types after it whose turn has come.

    A location that was out of this type a moment ago is left out, unless the type is the last or nothing else would be left.
    """
    now = view.snapshot.now
    offers = _offers(pool)
    at, since = _step(pool, steps, view.snapshot.progress.get(pool.name, Progress()), now)
    last = len(steps) - 1
    candidates: list[Candidate] = []
    left_out: list[Candidate] = []
    while True:
        kind = pool.types[steps[at]]
        for location in filter(view.limits.allowed.has_location, kind.locations):
            candidate = Candidate(type=kind.type, location=location, spot=kind.spot)
            is_sold_out = at < last and (pool.provider, candidate) in view.sold_out
            (left_out if is_sold_out else candidates).append(candidate)
        if at == last or _since(since, now) < kind.wait_seconds:
            break
        at, since = at + 1, now
    if not candidates:
        candidates, left_out = left_out, []
    if left_out:
        places = ", ".join(
            f"{candidate.type}{_spot(spot=candidate.spot)} in {candidate.location}" for candidate in left_out
        )
        why += f"; left out, as another pool found no capacity there just now: {places}"
    return Make(
        pool=pool.name,
        count=count,
        candidates=tuple(candidates),
        then_type=offers[steps[at]],
        then_since=since,
        why=why + _remembered(pool, view.snapshot),
    )


def _step(pool: Pool, steps: Sequence[int], progress: Progress, now: datetime) -> tuple[int, datetime]:
    """Where in `steps` the search is, and since when."""
    offers = _offers(pool)
    if progress.trying_type not in offers or progress.trying_since is None:
        return 0, now
    position = offers.index(progress.trying_type)
    at = next((at for at, step in enumerate(steps) if step >= position), 0)
    if steps[at] != position:
        return at, now  # the type it was on is left out now
    wait_is_over = _since(progress.trying_since, now) >= pool.types[position].wait_seconds
    return (at + 1, now) if at < len(steps) - 1 and wait_is_over else (at, progress.trying_since)


def _remembered(pool: Pool, snapshot: Snapshot) -> str:
    """What could not be had lately, in words."""
    said = [_refusal_words(refusal, snapshot.now) for refusal in snapshot.refusals if refusal.pool == pool.name]
    return f"; refused so far: {', '.join(said)}" if said else ""


def _refusal_words(refusal: Refusal, now: datetime) -> str:
    times = "once" if refusal.times == 1 else f"{refusal.times} times"
    spot = _spot(spot=refusal.spot)
    ago = _since(refusal.last_at, now)
    return f"{refusal.type}{spot} in {refusal.location} ({refusal.kind} {times}, {ago:.0f} s ago)"


def _spot(*, spot: bool) -> str:
    return " (spot)" if spot else ""


def _reports_of_gone_pools(view: _View, by_pool: Mapping[str, Pool]) -> list[PoolReport]:
    reports = []
    for pool in sorted({*view.rows, *view.snapshot.progress} - {*by_pool}):
        left = len(view.rows.get(pool, ()))
        message = "gone from orca.toml" + (f"; machines still to remove: {left}" if left else "")
        if left and view.is_paused(pool):
            message += ", which wait until `orca-infra resume`"
        reports.append(PoolReport(pool=pool, demand=view.left(pool, aged=True), message=message))
    return reports


def _next_due(view: _View, reports: Iterable[PoolReport], leaving: frozenset[str]) -> datetime | None:
    """The earliest instant at which a decision could differ because of time alone and must not wait for a whole period.

    That is at once when a machine is found gone or stopped: its runs are queued again, and its place is free.
    """
    snapshot = view.snapshot
    due = [demand.next_due_at for demand in snapshot.demand.values() if demand.next_due_at is not None]
    due += [report.next_try_at for report in reports if report.next_try_at is not None]
    found = leaving & view.facts.keys()
    due += [snapshot.now for row in snapshot.machines if row.revoked_at is None and row.name in found]
    return min(due, default=None)


def _silence(row: MachineRow, snapshot: Snapshot) -> float:
    """Seconds in which the worker could have been heard and was not."""
    heard_at = row.seen_at or row.first_seen_at or row.created_at
    return _since(max(heard_at, snapshot.hearing_since), snapshot.now)


def _since(then: datetime, now: datetime) -> float:
    return (now - then).total_seconds()
