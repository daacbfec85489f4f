"""What holds of every plan, whatever was seen. Single rules are pinned in tests/golden/machines."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orca_infra.machines.decide import POOL_LABEL, STACK_LABEL, decide
from orca_infra.machines.model import (
    EVERY_POOL,
    Action,
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
    Progress,
    Reason,
    Refusal,
    Relabel,
    Remove,
    SeenMachine,
    Snapshot,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
STACK_ID = "ours"
NAMES = ("p", "q", "r")
LIMITS = Limits(try_seconds=60, boot_seconds=900, lost_seconds=300, stray_grace_seconds=60, stray_max=2, lost_max=2)
FORCED = {Reason.LOST, Reason.STOPPED, Reason.PREEMPTED, Reason.VANISHED}
QUICK = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


#: Around every limit, so that both sides of each comparison are common.
AGES = st.sampled_from([0, 1, 59, 60, 61, 299, 300, 301, 899, 900, 901, 5000]).map(ago)
MAYBE_AGES = st.none() | AGES


@st.composite
def pools(draw: st.DrawFn, name: str) -> Pool:
    kinds = draw(st.lists(st.sampled_from(["small", "large", "spare"]), min_size=1, max_size=4))
    return Pool(
        name=name,
        provider=draw(st.sampled_from(["local", "gcp"])),
        image="worker:1",
        max_machines=draw(st.integers(0, 5)),
        idle_seconds=draw(st.sampled_from([0.5, 60, 300])),
        max_booting=draw(st.integers(1, 4)),
        types=tuple(
            MachineType(type=kind, locations=("a", "b"), wait_seconds=draw(st.sampled_from([0, 60, 300])))
            for kind in kinds
        ),
    )


@st.composite
def rows(draw: st.DrawFn, pool: str, number: int) -> MachineRow:
    confirmed = draw(MAYBE_AGES)
    revoked = draw(st.none() | st.none() | AGES)
    first_seen = None if confirmed is None else draw(MAYBE_AGES)
    return MachineRow(
        name=f"orca-{pool}-{number}",
        pool=pool,
        number=number,
        provider=draw(st.sampled_from(["local", "gcp"])),
        type="small",
        location="a",
        created_at=draw(AGES),
        uid=None if confirmed is None else "uid",
        confirmed_at=confirmed,
        revoked_at=revoked,
        removal_reason=draw(st.sampled_from([*Reason, "a person's words", None])) if revoked else None,
        first_seen_at=first_seen,
        seen_at=draw(AGES) if first_seen else None,
        slots=draw(st.integers(1, 3)) if first_seen else 0,
        running=draw(st.integers(0, 3)) if confirmed else 0,
        last_run_ended_at=draw(MAYBE_AGES),
        drain_at=draw(st.none() | st.none() | AGES),
        drain_now=draw(st.integers(0, 9)) == 0,
    )


@st.composite
def refusals(draw: st.DrawFn) -> Refusal:
    return Refusal(
        pool=draw(st.sampled_from(NAMES)),
        type=draw(st.sampled_from(["small", "large"])),
        location=draw(st.sampled_from(["a", "b"])),
        spot=False,
        kind=draw(st.sampled_from(["NoCapacity", "NoCapacity", "QuotaExceeded"])),
        since=draw(AGES),
        last_at=draw(AGES),
        times=draw(st.integers(1, 3)),
    )


@st.composite
def seen_machines(draw: st.DrawFn, name: str, pool: str) -> SeenMachine:
    labels = {STACK_LABEL: draw(st.sampled_from([STACK_ID, STACK_ID, "theirs"])), POOL_LABEL: pool}
    return SeenMachine(
        name=name,
        uid=draw(st.sampled_from(["uid", "uid", "another"])),
        location="a",
        type="small",
        state=draw(st.sampled_from(MachineState)),
        created_at=draw(AGES),
        labels=draw(st.sampled_from([labels, labels, {}])),
    )


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    aged, young = draw(st.integers(0, 6)), draw(st.integers(0, 6))
    return Demand(aged=aged, waiting=aged + young, next_due_at=ago(-7) if young else None)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Snapshot, tuple[Pool, ...], Limits]:
    """Any snapshot, also such as can hardly come about: rows, lists and ownership contradict each other at will."""
    declared = tuple(draw(pools(name)) for name in NAMES if draw(st.booleans()))
    machines = [draw(rows(pool, number)) for pool in NAMES for number in range(1, draw(st.integers(0, 4)) + 1)]
    every = [(f"orca-{pool}-{number}", pool) for pool in NAMES for number in range(1, 7)]
    seen = [
        (draw(st.sampled_from(["local", "gcp"])), draw(seen_machines(name, pool)))
        for name, pool in draw(st.lists(st.sampled_from(every), max_size=10, unique=True))
    ]
    some = st.dictionaries(st.sampled_from(NAMES), st.just("an operation still runs"), max_size=2)
    snapshot = Snapshot(
        now=NOW,
        stack_id=STACK_ID,
        hearing_since=draw(AGES),
        demand=draw(st.dictionaries(st.sampled_from([*NAMES, "unknown"]), demands())),
        progress={
            pool: Progress(
                trying_type=draw(st.sampled_from(["small", "large", "small#2", "gone", None])),
                trying_since=draw(MAYBE_AGES),
                tried_at=draw(MAYBE_AGES),
            )
            for pool in NAMES
            if draw(st.booleans())
        },
        machines=tuple(machines),
        seen=tuple(seen),
        gone=frozenset(draw(st.lists(st.sampled_from([name for name, _ in every]), max_size=3))),
        owned={
            pool: frozenset(draw(st.lists(st.sampled_from([n for n, of in every if of == pool]), max_size=4)))
            for pool in NAMES
            if draw(st.booleans())
        },
        held=draw(some) if draw(st.integers(0, 3)) == 0 else {},
        unreadable=draw(st.sampled_from([{}, {}, {}, {"gcp": "503"}])),
        paused=draw(st.sampled_from([frozenset(), frozenset(), frozenset({"p"}), frozenset({EVERY_POOL})])),
        refusals=tuple(draw(st.lists(refusals(), max_size=4))),
        ended_lately=frozenset(
            (name, "uid") for name in draw(st.lists(st.sampled_from([n for n, _ in every]), max_size=2))
        ),
        type_architectures={"local": {"large": "arm64"}} if draw(st.booleans()) else {},
        image_architectures={"worker:1": frozenset({"amd64"})} if draw(st.booleans()) else {},
    )
    total = draw(st.none() | st.integers(0, 8))
    return snapshot, declared, replace(LIMITS, max_machines_total=total)


World = tuple[Snapshot, tuple[Pool, ...], Limits]


def removals(plan: Plan) -> list[Remove]:
    return [action for action in plan.actions if isinstance(action, Remove)]


def makes(plan: Plan) -> list[Make]:
    return [action for action in plan.actions if isinstance(action, Make)]


def pool_and_provider(action: Action, snapshot: Snapshot, declared: tuple[Pool, ...]) -> tuple[str, str | None]:
    """Whom an action concerns."""
    if isinstance(action, DeleteStray):
        return action.machine.labels[POOL_LABEL], action.provider
    if isinstance(action, Relabel):
        return action.pool, action.provider
    if isinstance(action, Remove | EndInterrupted):
        return action.pool, next(row.provider for row in snapshot.machines if row.name == action.name)
    return action.pool, next((pool.provider for pool in declared if pool.name == action.pool), None)


@QUICK
@given(worlds())
def test_no_limit_on_machines_is_ever_passed(world: World) -> None:
    snapshot, declared, limits = world
    plan = decide(*world)
    removed = {action.name for action in plan.actions if isinstance(action, Remove | EndInterrupted)}
    by_pool = {pool.name: pool for pool in declared}
    for make in makes(plan):
        pool = by_pool[make.pool]
        mine = [row for row in snapshot.machines if row.pool == make.pool]
        booting = [row for row in mine if row.is_booting and row.name not in removed]
        assert make.count >= 1
        assert make.candidates
        assert len(mine) + make.count <= pool.max_machines
        assert len(booting) + make.count <= pool.max_booting
        assert make.count <= snapshot.demand[make.pool].aged
    made = sum(make.count for make in makes(plan))
    if limits.max_machines_total is not None and made:
        assert len(snapshot.machines) + made <= limits.max_machines_total


@QUICK
@given(worlds())
def test_what_runs_something_goes_only_when_it_is_lost_stopped_preempted_or_vanished(world: World) -> None:
    snapshot, _, _ = world
    working = {row.name for row in snapshot.machines if row.running and row.revoked_at is None and row.confirmed_at}
    at_once = {row.name for row in snapshot.machines if row.drain_now}
    for action in removals(decide(*world)):
        if action.reason is Reason.DRAINED and action.name in at_once:
            continue
        if action.name in working:
            assert action.reason in FORCED
        if action.reason not in FORCED and action.name not in {r.name for r in snapshot.machines if r.revoked_at}:
            assert action.only_idle, "a run may land on it until then"


@QUICK
@given(worlds())
def test_in_a_paused_pool_nothing_is_made_and_nothing_goes_for_being_idle(world: World) -> None:
    snapshot, declared, _ = world
    begun = {row.name for row in snapshot.machines if row.revoked_at is not None}
    plan = decide(*world)
    for action in plan.actions:
        if isinstance(action, Make | Remove) and (action.pool in snapshot.paused or EVERY_POOL in snapshot.paused):
            assert isinstance(action, Remove)
            assert action.name in begun or action.reason not in {Reason.IDLE, Reason.POOL_GONE}
    for report in plan.reports[: len(declared)]:
        if report.pool in snapshot.paused:
            assert not report.in_search, "the search begins anew when the pause is over"


@QUICK
@given(worlds())
def test_no_candidate_is_of_an_architecture_that_the_image_lacks_and_the_last_type_keeps_every_location(
    world: World,
) -> None:
    snapshot, declared, _ = world
    by_pool = {pool.name: pool for pool in declared}
    for make in makes(decide(*world)):
        pool = by_pool[make.pool]
        variants = snapshot.image_architectures.get(pool.image)
        stated = snapshot.type_architectures.get(pool.provider, {})
        usable = [kind for kind in pool.types if variants is None or stated.get(kind.type, "amd64") in variants]
        assert {candidate.type for candidate in make.candidates} <= {kind.type for kind in usable}
        tried_last = make.then_type.partition("#")[0] == usable[-1].type
        if len(usable) == 1 or (tried_last and all(k.type != usable[-1].type for k in usable[:-1])):
            locations = [c.location for c in make.candidates if c.type == usable[-1].type]
            assert locations == list(usable[-1].locations)


@QUICK
@given(worlds())
def test_few_removals_for_silence_and_none_for_one_that_was_not_heard(world: World) -> None:
    snapshot, declared, limits = world
    begun = {row.name for row in snapshot.machines if row.revoked_at is not None}

    def lost(plan: Plan) -> list[str]:
        return [a.name for a in removals(plan) if a.reason is Reason.LOST and a.name not in begun]

    assert len(lost(decide(*world))) <= limits.lost_max
    assert not lost(decide(replace(snapshot, hearing_since=snapshot.now), declared, limits))


@QUICK
@given(worlds())
def test_the_same_snapshot_gives_the_same_plan_in_whatever_order_its_parts_come(world: World) -> None:
    snapshot, declared, limits = world

    def turned(mapping: Mapping[str, Any]) -> dict[str, Any]:
        return dict(reversed(list(mapping.items())))

    other = replace(
        snapshot,
        demand=turned(snapshot.demand),
        progress=turned(snapshot.progress),
        owned={pool: frozenset(sorted(names)) for pool, names in turned(snapshot.owned).items()},
        held=turned(snapshot.held),
    )
    assert decide(other, declared, limits) == decide(snapshot, declared, limits)


@QUICK
@given(worlds())
def test_a_stray_is_ours_old_owned_by_nobody_and_wanted_by_nobody(world: World) -> None:
    snapshot, _, limits = world
    plan = decide(*world)
    deleted = [action.machine for action in plan.actions if isinstance(action, DeleteStray)]
    assert not snapshot.ended_lately & {(machine.name, machine.uid) for machine in deleted}
    for machine in [*deleted, *plan.strays_held]:
        assert machine.labels[STACK_LABEL] == STACK_ID
        assert machine.name not in {row.name for row in snapshot.machines}
        assert not any(machine.name in names for names in snapshot.owned.values())
    assert all((snapshot.now - machine.created_at).total_seconds() > limits.stray_grace_seconds for machine in deleted)
    assert len(deleted) <= limits.stray_max
    assert not (deleted and plan.strays_held)


@QUICK
@given(worlds())
def test_nothing_is_decided_for_what_is_held_or_cannot_be_read(world: World) -> None:
    snapshot, declared, _ = world
    for action in decide(*world).actions:
        pool, provider = pool_and_provider(action, snapshot, declared)
        assert pool not in snapshot.held
        assert provider not in snapshot.unreadable


@QUICK
@given(worlds())
def test_each_machine_has_one_fate_and_each_declared_pool_one_report(world: World) -> None:
    _, declared, _ = world
    plan = decide(*world)
    fates = [a.name for a in plan.actions if isinstance(a, Remove | EndInterrupted | DestroyOwned)]
    assert max(Counter(fates).values(), default=1) == 1
    reported = [report.pool for report in plan.reports]
    assert reported[: len(declared)] == [pool.name for pool in declared]
    assert len(reported) == len(set(reported))
    assert all(report.message for report in plan.reports)


@QUICK
@given(worlds())
def test_what_waits_for_a_time_is_looked_at_when_it_comes(world: World) -> None:
    snapshot, _, _ = world
    plan = decide(*world)
    for report in plan.reports:
        if report.next_try_at is not None:
            assert report.next_try_at > snapshot.now
            assert plan.next_due_at is not None
            assert plan.next_due_at <= report.next_try_at


@st.composite
def quiet_worlds(draw: st.DrawFn) -> World:
    """Nothing waits beyond the room there is, and every machine boots in time, works, or has not been idle for long."""
    declared = tuple(draw(pools(name)) for name in NAMES)
    machines = []
    for pool in declared:
        for number in range(1, draw(st.integers(0, 3)) + 1):
            kind = draw(st.sampled_from(["boots", "works", "rests"]))
            created = ago(draw(st.integers(100, 899)))
            seen = kind != "boots"
            machines.append(
                MachineRow(
                    name=f"orca-{pool.name}-{number}",
                    pool=pool.name,
                    number=number,
                    provider=pool.provider,
                    type="small",
                    location="a",
                    created_at=created,
                    uid="uid",
                    confirmed_at=created,
                    first_seen_at=ago(80) if seen else None,
                    seen_at=ago(draw(st.integers(0, 79))) if seen else None,
                    slots=1 if seen else 0,
                    running=1 if kind == "works" else 0,
                    last_run_ended_at=ago(pool.idle_seconds - 0.1) if kind == "rests" else None,
                )
            )
    room = Counter(row.pool for row in machines if row.slots > row.running)
    snapshot = Snapshot(
        now=NOW,
        stack_id=STACK_ID,
        hearing_since=draw(AGES),
        demand={pool: Demand(aged=draw(st.integers(0, free)), waiting=free) for pool, free in room.items()},
        machines=tuple(machines),
        seen=tuple(
            (
                row.provider,
                replace(
                    draw(seen_machines(row.name, row.pool).filter(lambda m: m.state is MachineState.RUNNING)),
                    labels={STACK_LABEL: STACK_ID, POOL_LABEL: row.pool},
                ),
            )
            for row in machines
            if draw(st.booleans())
        ),
        owned={pool.name: frozenset(row.name for row in machines if row.pool == pool.name) for pool in declared},
    )
    return snapshot, declared, LIMITS


@QUICK
@given(quiet_worlds())
def test_when_nothing_is_wanted_and_nothing_is_wrong_nothing_is_done(world: World) -> None:
    plan = decide(*world)
    assert plan.actions == ()
    assert plan.strays_held == ()
    assert plan.next_due_at is None


@QUICK
@given(quiet_worlds(), st.sampled_from(["", "theirs"]), st.sampled_from([STACK_LABEL, POOL_LABEL]))
def test_of_wanted_machines_exactly_those_without_their_labels_get_them_back(
    world: World, instead: str, label: str
) -> None:
    snapshot, pools, limits = world
    kept = {key: value for key, value in {label: instead}.items() if value}
    changed = tuple(
        (provider, replace(machine, labels={**machine.labels, label: "", **kept}))
        for provider, machine in snapshot.seen
    )
    plan = decide(replace(snapshot, seen=changed), pools, limits)
    wanted = [machine.name for _, machine in snapshot.seen if machine.uid == "uid"]
    assert [action.machine.name for action in plan.actions if isinstance(action, Relabel)] == wanted
    assert len(plan.actions) == len(wanted)
    for action in plan.actions:
        assert isinstance(action, Relabel)
        assert action.labels == {label: STACK_ID if label == STACK_LABEL else action.pool}


# The search for a machine, driven over time as apply drives it: every candidate is out of capacity.


def search(pool: Pool, *, tries: int, demand: Callable[[int], int] = lambda _: 1) -> list[str]:
    """What each try, one a minute, asks for."""
    progress, asked = Progress(), []
    for number in range(tries):
        now = NOW + timedelta(seconds=60 * number)
        waiting = demand(number)
        snapshot = Snapshot(
            now=now,
            stack_id=STACK_ID,
            hearing_since=NOW,
            demand={"p": Demand(aged=waiting, waiting=waiting)},
            progress={"p": progress},
        )
        plan = decide(snapshot, (pool,), LIMITS)
        if not plan.reports[0].in_search:
            progress = replace(progress, trying_type=None, trying_since=None)
        for make in makes(plan):
            progress = Progress(trying_type=make.then_type, trying_since=make.then_since, tried_at=now)
        asked.append(" ".join(f"{c.type}{'*' * c.spot}@{c.location}" for make in makes(plan) for c in make.candidates))
    return asked


def pool_of(*types: MachineType) -> Pool:
    return Pool(name="p", provider="local", image="worker:1", max_machines=3, idle_seconds=300, types=types)


WALK = pool_of(
    MachineType(type="a", locations=("x", "y"), wait_seconds=120),
    MachineType(type="b", locations=("x",)),
    MachineType(type="c", locations=("z",), wait_seconds=180),
    MachineType(type="d", locations=("y", "x"), wait_seconds=60),
)


def test_the_search_walks_through_the_types_in_order_waits_and_stays_on_the_last() -> None:
    assert search(WALK, tries=8) == ["a@x a@y", "a@x a@y", "b@x c@z", "c@z", "c@z", "d@y d@x", "d@y d@x", "d@y d@x"]
    assert set(search(WALK, tries=500)[5:]) == {"d@y d@x"}


def test_the_search_begins_anew_once_the_demand_was_gone() -> None:
    asked = search(WALK, tries=6, demand=lambda number: 0 if number == 3 else 1)
    assert asked == ["a@x a@y", "a@x a@y", "b@x c@z", "", "a@x a@y", "a@x a@y"]


def test_a_type_as_spot_and_as_lasting_are_two_steps_of_the_search() -> None:
    pool = pool_of(
        MachineType(type="gpu", locations=("x",), wait_seconds=60, spot=True),
        MachineType(type="gpu", locations=("x",), wait_seconds=120),
        MachineType(type="gpu", locations=("far",)),
    )
    assert search(pool, tries=6) == ["gpu*@x", "gpu@x", "gpu@x", "gpu@far", "gpu@far", "gpu@far"]


@settings(max_examples=50, deadline=None)
@given(pools("p"), st.integers(1, 30))
def test_the_search_never_goes_back_and_comes_to_the_last_type(pool: Pool, tries: int) -> None:
    pool = replace(
        pool, max_machines=1, types=tuple(replace(t, locations=(f"{i:02}",)) for i, t in enumerate(pool.types))
    )
    steps = [try_.split("@") for one in search(pool, tries=tries) for try_ in one.split()]
    positions = [int(step[1]) for step in steps]
    assert positions == sorted(positions)
    waits = sum(kind.wait_seconds for kind in pool.types[:-1])
    if 60 * (tries - 1) >= waits:
        assert positions[-1] == len(pool.types) - 1


def test_the_machine_that_was_made_ends_the_search_and_the_next_begins_with_the_first_type() -> None:
    # apply writes no type then; a pool that tried long ago and is on none starts with the first.
    snapshot = Snapshot(
        now=NOW,
        stack_id=STACK_ID,
        hearing_since=NOW,
        demand={"p": Demand(aged=1, waiting=1)},
        progress={"p": Progress(last_number=3, tried_at=ago(60))},
    )
    assert [c.type for make in makes(decide(snapshot, (WALK,), LIMITS)) for c in make.candidates] == ["a", "a"]


# How much work a decision is.


class CountedName(str):
    """Counts its hashes and comparisons, which happen out of a tracer's sight."""

    __slots__ = ()
    uses = 0

    def __hash__(self) -> int:
        CountedName.uses += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        CountedName.uses += 1
        return super().__eq__(other)


def operations_of(count: int, kind: str) -> int:
    """Bytecodes and name look-ups of one decision on so many machines."""
    names = [CountedName(f"orca-p-{number}") for number in range(count)]
    machines = tuple(
        MachineRow(
            name=name,
            pool="p",
            number=number,
            provider="local",
            type="small",
            location="a",
            created_at=ago(5000),
            uid="uid",
            confirmed_at=ago(5000),
            first_seen_at=ago(4900),
            seen_at=ago(400 if kind == "silent" else 5),
            slots=1,
            running=int(kind == "busy"),
        )
        for number, name in enumerate(names)
        if kind != "strays"
    )
    state = MachineState.STOPPED if kind == "stopped" else MachineState.RUNNING
    seen = tuple(
        (
            "local",
            SeenMachine(
                name=name,
                uid="uid",
                location="a",
                type="small",
                state=state,
                created_at=ago(5000),
                labels={STACK_LABEL: STACK_ID},
            ),
        )
        for name in names
    )
    snapshot = Snapshot(
        now=NOW,
        stack_id=STACK_ID,
        hearing_since=ago(5000),
        machines=machines,
        seen=seen,
        owned={"p": frozenset(names)} if kind != "strays" else {},
        gone=frozenset(names) if kind == "gone" else frozenset(),
    )
    pool = replace(WALK, max_machines=count)
    CountedName.uses = bytecodes = 0

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal bytecodes
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        bytecodes += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        decide(snapshot, (pool,), LIMITS)
    finally:
        sys.settrace(before)
    return bytecodes + CountedName.uses


@pytest.mark.parametrize("kind", ["busy", "idle", "silent", "stopped", "gone", "strays"])
def test_a_decision_on_a_thousand_machines_is_linear_work(kind: str) -> None:
    few, many = operations_of(250, kind), operations_of(1000, kind)
    assert many > 3 * few, "nothing was counted"
    assert many < 4.3 * few
    assert many < 1000 * 1000
