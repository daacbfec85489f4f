"""Each scope's passes: on their own thread and cadence, never two at once, hastened, late, lost."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from orca_infra.errors import NotLeader, Transient
from orca_infra.health.state import Health
from orca_infra.log import make_log
from orca_infra.loop.run import Loop
from orca_infra.loop.schedule import (
    BESIDE_SECONDS,
    END_SECONDS,
    LEAST_SECONDS,
    RETRY_SECONDS,
    Late,
    PassEnd,
    PassReport,
    Schedule,
    Scope,
    _ScopeThread,
)

WaitUntil = Callable[..., None]
FOREVER = 3600.0


class Work:
    """What is under way beside a scope's passes, for as long as the test says."""

    def __init__(self) -> None:
        self.since: float | None = None
        self.wake: Callable[[], None] = lambda: None

    def start(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    def under_way_since(self) -> float | None:
        return self.since

    def where(self) -> str:
        return "in an up"

    def join(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.since is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.since is None


@dataclass
class Passes:
    """A scope whose passes do what the test says, and which counts them."""

    name: str = "machines"
    result: PassEnd | Exception = field(default_factory=PassEnd)
    gate: threading.Event = field(default_factory=threading.Event)
    made: int = 0
    under_way: int = 0
    most_under_way: int = 0
    cut_short: int = 0
    pruned: int = 0
    ends_when_cut: bool = True
    beside: Work | None = None

    def __post_init__(self) -> None:
        self.gate.set()

    def scope(self, period_seconds: float = FOREVER) -> Scope:
        def make() -> PassEnd:
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
            self.gate.wait(240)
            self.under_way -= 1
            self.made += 1
            if isinstance(self.result, Exception):
                raise self.result
            return self.result

        def prune() -> None:
            self.pruned += 1

        def cut_short() -> None:
            self.cut_short += 1
            if self.ends_when_cut:
                self.gate.set()

        return Scope(
            name=self.name,
            period_seconds=period_seconds,
            make=make,
            prune=prune,
            cut_short=cut_short,
            beside=self.beside,
        )


@pytest.fixture
def start() -> Iterator[Callable[..., Schedule]]:
    """Starts a schedule over passes; stopped at the test's end."""
    started: list[tuple[Schedule, tuple[Passes, ...]]] = []

    def start_one(*passes: Passes, period_seconds: float = FOREVER, **more: Any) -> Schedule:
        schedule = Schedule(
            [one.scope(period_seconds) for one in passes], log=make_log(io.StringIO(), form="text"), **more
        )
        started.append((schedule, passes))
        schedule.start()
        return schedule

    yield start_one
    for schedule, passes in started:
        for one in passes:
            one.ends_when_cut = True
        schedule.stop()
        assert schedule.join(120) == []


def wait_after(result: PassEnd | Exception, period_seconds: float = 15.0) -> float:
    passes = Passes(result=result)
    scope = passes.scope(period_seconds)
    return _ScopeThread(scope, Schedule([scope], log=make_log(io.StringIO(), form="text")))._one_pass()


@pytest.mark.parametrize(
    ("changed", "next_in_seconds", "wait"),
    [
        (0, None, 15.0),
        (0, 60.0, 15.0),
        (0, 2.5, 2.5),
        (0, -1.0, -1.0),
        (3, None, LEAST_SECONDS),
        (3, 2.5, LEAST_SECONDS),
    ],
)
def test_the_next_pass_comes_when_something_comes_due_and_after_a_period_at_the_latest(
    changed: int, next_in_seconds: float | None, wait: float
) -> None:
    assert wait_after(PassEnd(changed=changed, next_in_seconds=next_in_seconds)) == wait


def test_a_pass_that_was_given_up_is_made_again_soon() -> None:
    assert wait_after(Transient("the database is away")) == RETRY_SECONDS


def test_a_defect_in_a_pass_ends_no_loop() -> None:
    assert wait_after(ZeroDivisionError()) == RETRY_SECONDS


def test_a_scope_that_hangs_delays_no_other(start: Callable[..., Schedule], wait_until: WaitUntil) -> None:
    machines, runs = Passes("machines"), Passes("runs")
    machines.gate.clear()
    start(machines, runs, period_seconds=0.01)
    wait_until(lambda: runs.made >= 3)
    assert (machines.made, machines.under_way) == (0, 1)


def test_no_pass_overlaps_itself_and_much_that_happens_in_one_makes_one_more(
    start: Callable[..., Schedule], wait_until: WaitUntil
) -> None:
    machines, runs = Passes("machines"), Passes("runs")
    machines.gate.clear()
    schedule = start(machines, runs)
    wait_until(lambda: machines.under_way == 1 and runs.made == 1)
    for _ in range(1000):
        schedule.hasten("machines")
    machines.gate.set()
    wait_until(lambda: machines.made == 2)
    time.sleep(2 * LEAST_SECONDS)  # for a third that must not come
    assert (machines.made, machines.most_under_way) == (2, 1)
    assert runs.made == 1, "what happened to machines hastened another scope"


def test_a_pass_past_its_deadline_is_late_cut_short_and_said_with_the_place_it_is_at(
    start: Callable[..., Schedule], wait_until: WaitUntil
) -> None:
    now = 100.0
    passes, quick = Passes(), Passes("runs")
    passes.gate.clear()
    schedule = start(passes, quick, seconds=lambda: now)
    wait_until(lambda: passes.under_way == 1 and quick.made == 1)
    now = 160.0
    assert schedule.late(60) == []
    assert passes.cut_short == 0
    now = 160.5
    [late] = schedule.late(60)
    assert (late.scope, late.seconds) == ("machines", 60.5)
    assert "self.gate.wait(240)" in late.where
    assert passes.cut_short == 1
    wait_until(lambda: passes.made == 1)
    assert schedule.late(60) == []


def test_beside_work_passes_come_soon_without_being_hastened_by_their_own_changes() -> None:
    def wait(result: PassEnd | Exception, since: float | None) -> float:
        work = Work()
        work.since = since
        scope = Passes(result=result, beside=work).scope(15.0)
        return _ScopeThread(scope, Schedule([scope], log=make_log(io.StringIO(), form="text")))._one_pass()

    assert wait(PassEnd(), 1.0) == wait(PassEnd(changed=3), 1.0) == BESIDE_SECONDS
    assert wait(PassEnd(next_in_seconds=0.5), 1.0) == 0.5
    assert wait(PassEnd(), None) == 15.0
    assert wait(PassEnd(changed=3), None) == LEAST_SECONDS
    assert wait(Transient("away"), 1.0) == RETRY_SECONDS


def test_the_end_of_work_beside_passes_hastens_the_next(start: Callable[..., Schedule], wait_until: WaitUntil) -> None:
    work = Work()
    passes = Passes(beside=work)
    start(passes)
    wait_until(lambda: passes.made == 1)
    work.wake()
    wait_until(lambda: passes.made == 2)


def test_work_beside_passes_past_its_deadline_is_late_and_cut_short_though_passes_go_by(
    start: Callable[..., Schedule], wait_until: WaitUntil
) -> None:
    now = 100.0
    work = Work()
    passes = Passes("runtimes", beside=work)
    work.since = now
    schedule = start(passes, seconds=lambda: now)
    wait_until(lambda: passes.made >= 1 and passes.under_way == 0)
    assert schedule.late(60) == []
    now = 160.5
    assert schedule.late(60) == [Late(scope="runtimes", seconds=60.5, where="in an up", beside=True)]
    assert passes.cut_short == 1
    work.since = None
    assert schedule.late(60) == []


def test_a_stop_waits_for_what_is_under_way_beside_passes(
    start: Callable[..., Schedule], wait_until: WaitUntil
) -> None:
    work = Work()
    work.since = 1.0
    passes = Passes("runtimes", beside=work)
    schedule = start(passes)
    wait_until(lambda: passes.made >= 1)
    schedule.stop()
    assert passes.cut_short == 1
    assert schedule.join(0.5) == ["runtimes"]
    work.since = None
    assert schedule.join(240) == []


def test_a_lead_that_one_scope_finds_lost_ends_the_passes_of_all(
    start: Callable[..., Schedule], wait_until: WaitUntil
) -> None:
    lost = NotLeader("lost")
    machines, runs = Passes("machines"), Passes("runs", result=lost)
    machines.gate.clear()
    schedule = start(machines, runs, period_seconds=0.01)
    assert schedule.join(120) == []
    assert schedule.lost is lost
    assert machines.cut_short == 1
    assert machines.made == 1


def test_a_stop_ends_what_waits_at_once_and_names_what_does_not_end(
    start: Callable[..., Schedule], wait_until: WaitUntil
) -> None:
    waiting, hanging = Passes("runs"), Passes("machines", ends_when_cut=False)
    hanging.gate.clear()
    schedule = start(waiting, hanging)
    wait_until(lambda: waiting.made == 1 and hanging.under_way == 1)
    schedule.stop()
    wait_until(lambda: schedule.join(0.01) == ["machines"])
    hanging.gate.set()
    assert schedule.join(120) == []


def test_each_pass_is_reported_and_the_first_is_followed_by_a_pruning(
    start: Callable[..., Schedule], wait_until: WaitUntil
) -> None:
    reports: list[PassReport] = []
    failure = Transient("away")
    passes = Passes(result=failure)
    schedule = start(passes, report=reports.append)
    wait_until(lambda: passes.pruned == 1)
    passes.result = PassEnd(changed=2)
    schedule.hasten()
    wait_until(lambda: len(reports) >= 2)
    assert [(one.scope, one.changed, one.error) for one in reports[:2]] == [
        ("machines", 0, failure),
        ("machines", 2, None),
    ]
    assert passes.pruned == 1


def test_what_is_kept_for_less_than_an_hour_goes_when_its_time_is_over(
    start: Callable[..., Schedule], wait_until: WaitUntil
) -> None:
    seconds = iter(range(10**6))
    passes = Passes()
    schedule = start(passes, seconds=lambda: float(next(seconds)), prune_seconds=4)
    for made in range(2, 6):
        schedule.hasten()
        wait_until(lambda made=made: passes.made >= made)
    wait_until(lambda: passes.pruned >= 2)


class HungSchedule:
    """A schedule of which one pass is late by so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def late(self, deadline_seconds: float) -> list[Late]:
        return [Late(scope="machines", seconds=self.seconds, where="in a call")]


def bare_loop(monkeypatch: pytest.MonkeyPatch, said: io.StringIO) -> tuple[Loop, list[tuple[str, str]], list[int]]:
    """A loop without anything around it; what it notes, and the codes with which it left."""
    loop = object.__new__(Loop)
    loop._health = Health(pass_seconds=600.0)
    loop._started = SimpleNamespace(look=lambda: None)  # type: ignore[assignment]
    notes: list[tuple[str, str]] = []
    left: list[int] = []
    monkeypatch.setattr(loop, "_note", lambda *note: notes.append(note), raising=False)
    loop._surroundings = SimpleNamespace(settings=SimpleNamespace(pass_seconds=600.0))  # type: ignore[assignment]
    loop._live = SimpleNamespace(reload=lambda: False)  # type: ignore[assignment]
    loop._log = make_log(said, form="json")
    loop._unwell, loop._hanging, loop._leave = set(), set(), left.append
    loop._stop = threading.Event()
    return loop, notes, left


def test_a_hanging_pass_is_said_once_and_when_it_does_not_end_the_process_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = io.StringIO()
    loop, notes, left = bare_loop(monkeypatch, said)

    for seconds in (601.0, 602.0, 600 + END_SECONDS):
        loop._tend(HungSchedule(seconds))  # type: ignore[arg-type]
    [(topic, message)] = notes
    assert topic == "pass machines"
    assert "under way for more than 600 s (ORCA_PASS_SECONDS)" in message
    assert said.getvalue().count("pass hangs") == 1
    assert "in a call" in said.getvalue()
    assert left == []

    loop._tend(HungSchedule(601 + END_SECONDS))  # type: ignore[arg-type]
    assert left == [1]

    loop._report(PassReport(scope="machines", seconds=1, changed=0, error=None))
    assert notes[-1] == ("pass machines", "")


def test_an_up_that_hangs_is_said_until_it_has_ended_whatever_passes_go_by(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, notes, left = bare_loop(monkeypatch, io.StringIO())
    late = [Late(scope="runtimes", seconds=601.0, where="in an up", beside=True)]
    schedule: Any = SimpleNamespace(late=lambda _: late)

    for _ in range(2):
        loop._tend(schedule)
        loop._report(PassReport(scope="runtimes", seconds=1, changed=0, error=None))
    [(topic, message)] = notes
    assert topic == "up runtimes"
    assert "an up beside the passes over runtimes is under way for more than 600 s" in message
    late = [Late(scope="runtimes", seconds=601 + END_SECONDS, where="in an up", beside=True)]
    loop._tend(schedule)
    assert left == [1]
    late = []
    loop._tend(schedule)
    assert notes[1:] == [("up runtimes", "")]
