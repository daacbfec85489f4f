"""Cohorts beside the passes: which are begun, what a pass is told of those that ended, and what a failure leaves said."""

from __future__ import annotations

import contextlib
import io
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from orca_infra.errors import NotLeader, OutcomeUnknown
from orca_infra.kube.client import Kube
from orca_infra.kube.kinds import POD
from orca_infra.kube.watching import Seen
from orca_infra.log import make_log
from orca_infra.loop.watches import Edits, Watch
from orca_infra.stack.beside import CohortsBeside
from orca_infra.stack.cohorts import DROPS_MAX, Begun, Cohorts

WaitUntil = Callable[..., None]


class Work:
    """Cohorts of a number of objects, which are made once the test lets them."""

    def __init__(self) -> None:
        self.open = self.awaited = 0
        self.begun: list[tuple[str, bool]] = []
        self.forsaken: list[str] = []
        self.drops: list[int] = []
        self.gates: dict[str, threading.Event] = {}
        self.errors: dict[str, Exception] = {}

    def begin(self, *, only_awaited: bool = False) -> Begun | None:
        if not (self.awaited if only_awaited else self.open + self.awaited):
            return None
        stack = str(len(self.begun))
        self.begun.append((stack, only_awaited))
        self.gates[stack] = threading.Event()
        self.open, self.awaited = self.open if only_awaited else 0, 0
        return Begun(stack=stack, objects=())

    def make(self, begun: Begun) -> int:
        self.gates[begun.stack].wait(240)
        if begun.stack in self.errors:
            raise self.errors[begun.stack]
        return 7

    def forsake(self, begun: Begun) -> None:
        self.forsaken.append(begun.stack)

    def drop_empty(self, most: int) -> int:
        self.drops.append(most)
        return 0

    def end(self, beside: CohortsBeside, *stacks: str) -> None:
        for stack in stacks:
            self.gates[stack].set()
        assert beside.join(240)


@pytest.fixture
def work() -> Work:
    return Work()


@pytest.fixture
def beside(work: Work) -> CohortsBeside:
    return CohortsBeside(cast("Cohorts", work))


def test_a_pass_waits_for_none_and_the_one_after_its_end_is_told_what_it_made(
    work: Work, beside: CohortsBeside
) -> None:
    woken = threading.Event()
    beside.start(woken.set)
    assert (beside.up(), beside.under_way_since()) == (0, None)
    work.open = 3
    assert beside.up() == 0
    assert beside.under_way_since() is not None
    assert "self.gates[begun.stack].wait(240)" in beside.where()
    assert not beside.join(0)
    assert not woken.is_set()
    work.end(beside, "0")
    assert woken.is_set()
    assert (beside.under_way_since(), beside.where()) == (None, "")
    assert (beside.up(), beside.up()) == (7, 0)


def test_beside_one_only_what_somebody_waits_for_is_begun_and_beside_two_nothing(
    work: Work, beside: CohortsBeside
) -> None:
    work.open = 500
    beside.up()
    work.open = 500
    beside.up()
    assert work.begun == [("0", False)]
    work.awaited = 1
    beside.up()
    assert work.begun[1:] == [("1", True)]
    work.awaited = 1
    beside.up()
    assert len(work.begun) == 2
    work.gates["0"].set()
    work.gates["1"].set()
    beside.join(240)
    assert beside.up() == 14
    assert work.begun[2:] == [("2", False)]
    work.end(beside, "2")


def test_while_others_are_made_a_pass_drops_one_at_the_most(work: Work, beside: CohortsBeside) -> None:
    beside.drop_empty()
    work.open = 1
    beside.up()
    beside.drop_empty()
    work.end(beside, "0")
    assert work.drops == [DROPS_MAX, 1]


def test_what_one_raised_is_raised_by_each_pass_until_one_ends_well(work: Work, beside: CohortsBeside) -> None:
    work.errors["0"] = OutcomeUnknown("cut short")
    work.open = 1
    beside.up()
    work.end(beside, "0")
    work.open = 1
    for _ in range(3):  # the first begins another, and as long as nobody knows what that comes to nothing looks well
        with pytest.raises(OutcomeUnknown, match="cut short"):
            beside.up()
    assert len(work.begun) == 2
    work.end(beside, "1")
    assert beside.up() == 7


def test_one_that_failed_is_not_hidden_by_another_that_ended_well_beside_it(work: Work, beside: CohortsBeside) -> None:
    work.errors["0"] = OutcomeUnknown("cut short")
    work.open = 1
    beside.up()
    work.awaited = 1
    beside.up()
    work.end(beside, "0", "1")
    with pytest.raises(OutcomeUnknown):
        beside.up()


def test_once_nothing_is_to_be_made_any_more_a_failure_is_said_once(work: Work, beside: CohortsBeside) -> None:
    work.errors["0"] = OutcomeUnknown("cut short")
    work.open = 1
    beside.up()
    work.end(beside, "0")
    with pytest.raises(OutcomeUnknown):
        beside.up()
    assert beside.up() == 0


@pytest.mark.parametrize("error", [NotLeader("the lead was lost"), ValueError("a defect")])
def test_a_lost_lead_and_a_defect_are_raised_once_and_a_new_lead_knows_nothing_of_the_last(
    work: Work, beside: CohortsBeside, error: Exception
) -> None:
    work.errors["0"] = work.errors["1"] = error
    work.open = 1
    beside.up()
    work.end(beside, "0")
    with pytest.raises(type(error)):
        beside.up()
    work.open = 1
    assert beside.up() == 0
    work.end(beside, "1")
    beside.start(lambda: None)
    assert beside.up() == 0


def test_a_cohort_without_a_thread_is_given_up(
    work: Work, beside: CohortsBeside, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    work.open = 1
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", broken)
        with pytest.raises(RuntimeError):
            beside.up()
    assert work.forsaken == ["0"]
    assert beside.under_way_since() is None
    assert beside.join(0)


def test_a_status_that_was_written_is_no_edit() -> None:
    edits = Edits()
    pool: dict[str, Any] = {"metadata": {"name": "p", "uid": "u", "generation": 1, "resourceVersion": "1"}}
    assert edits.note(pool)
    pool["metadata"]["resourceVersion"] = "2"
    assert not edits.note(pool)
    for change in ({"generation": 2}, {"deletionTimestamp": "2026-01-01T00:00:00Z"}, {"uid": "another"}):
        pool = {"metadata": {**pool["metadata"], **change}}
        assert edits.note(pool)
        assert not edits.note(pool)


class Shown:
    """A cluster of which one watch is followed: what it shows is put in by the test."""

    def __init__(self) -> None:
        self.changes: queue.Queue[Seen] = queue.Queue()

    def follow(self, *_: object, stop: threading.Event, **__: object) -> Iterator[Seen]:
        while not stop.is_set():
            with contextlib.suppress(queue.Empty):
                yield self.changes.get(timeout=0.01)

    def show(self, name: str) -> None:
        self.changes.put(Seen(object={"metadata": {"name": name}}))


def test_what_a_watch_noted_is_written_soon_and_a_write_that_fails_keeps_none_after_it(wait_until: WaitUntil) -> None:
    shown, log = Shown(), io.StringIO()
    noted: list[str] = []
    written: list[str] = []
    wakes: list[int] = []

    def write() -> bool:
        names = noted[len(written) :]
        written.extend(names)
        if "bad" in names:
            raise RuntimeError("cannot be written")
        return "news" in names

    watch = Watch(
        cast("Kube", shown),
        POD,
        namespace="n",
        labels={},
        wake=lambda: wakes.append(len(written)),
        log=make_log(log),
        note=lambda item: noted.append(item["metadata"]["name"]),
        write=write,
    )
    watch.start()
    for name, woken in (("old", 0), ("news", 1), ("bad", 2), ("old", 2), ("news", 3)):
        shown.show(name)
        wait_until(lambda name=name: written and len(written) == len(noted) and written[-1] == name)
        wait_until(lambda woken=woken: len(wakes) >= woken)
        assert len(wakes) == woken
    assert "cannot be written" in log.getvalue()
    watch.stop()
    wait_until(lambda: not any(thread.name == "notes-pods" for thread in threading.enumerate()))
