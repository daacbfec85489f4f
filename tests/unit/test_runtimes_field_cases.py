"""Field cases W1 to W3, and what must hold whatever happens: passes over a small world, one after the other."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import count, pairwise
from uuid import UUID

import pytest

from orca_infra.runtimes.decide import decide
from orca_infra.runtimes.model import (
    FAILURES,
    Environment,
    Failures,
    PodRow,
    Pool,
    RuntimeLimits,
    RuntimePlan,
    RuntimeSnapshot,
    SeenObject,
)

LIMITS = RuntimeLimits(stray_grace_seconds=60, stray_max=20)
ENVIRONMENT = Environment(namespace="n", name="e", image="image:1")
PULLING: dict[str, object] = {"phase": "Pending", "waiting": "ImagePullBackOff"}
HELD: dict[str, object] = {"phase": "Pending", "held": True, "waiting": "Unschedulable"}
NEW: dict[str, object] = {"phase": "Pending"}
READY: dict[str, object] = {"phase": "Running", "ready": True}


@dataclass
class World:
    """Rows and Pods, as a loop and a cluster would have them. New Pods come to be in the state `fate`."""

    pool: Pool
    fate: dict[str, object]
    now: datetime = datetime(2026, 5, 1, 12, tzinfo=UTC)
    environment: Environment = ENVIRONMENT
    rows: dict[str, PodRow] = field(default_factory=dict)
    pods: dict[str, SeenObject] = field(default_factory=dict)
    images: dict[str, str] = field(default_factory=dict)
    ended: list[tuple[datetime, str]] = field(default_factory=list)
    numbers: count[int] = field(default_factory=lambda: count(1))
    hidden: set[str] = field(default_factory=set)

    def run_pass(self, seconds: float = 15) -> RuntimePlan:
        """One pass, whose list does not show what is `hidden`; then time goes by."""
        uids = {pod.uid for pod in self.pods.values()}
        gone = frozenset(row.uid for row in self.rows.values() if row.uid and row.uid not in uids)
        recent = [(at, reason) for at, reason in self.ended if reason in FAILURES]
        failures = {}
        if recent:
            failures["p"] = Failures(pool="p", failures=len(recent), last_at=max(at for at, _ in recent))
        snapshot = RuntimeSnapshot(
            now=self.now,
            pools=(self.pool,),
            environments={"e": self.environment},
            rows=tuple(self.rows.values()),
            objects=tuple(pod for name, pod in self.pods.items() if name not in self.hidden),
            gone=gone,
            failures=failures,
        )
        plan = decide(snapshot, LIMITS)
        for ending in plan.endings:
            row = self.rows[ending.name]
            if not ending.only_waiting or row.waiting:
                self.rows[ending.name] = replace(row, ending_reason=ending.reason, ending_detail=ending.detail)
        for mark in plan.marks:
            row = self.rows[mark.name]
            at = self.now if mark.ready else None
            self.rows[mark.name] = replace(row, uid=row.uid or mark.uid, seen=True, ready_at=at, problem=mark.problem)
        for birth in plan.births:
            for _ in range(birth.count):
                name = f"orca-runtime-p-{next(self.numbers)}"
                self.rows[name] = PodRow(
                    name=name, namespace="n", environment="e", created_at=self.now, pool="p", uid=f"u-{name}"
                )
                self.pods[name] = SeenObject(
                    kind="Pod",
                    namespace="n",
                    name=name,
                    uid=f"u-{name}",
                    created_at=self.now,
                    **self.fate,  # type: ignore[arg-type]
                )
                self.images[name] = birth.environment.image
        for sweep in plan.sweeps:
            self.pods.pop(sweep.name, None)
        for name in plan.finishes:
            self.ended.append((self.now, str(self.rows.pop(name).ending_reason or "Vanished")))
        self.now += timedelta(seconds=seconds)
        return plan

    def unassigned(self) -> int:
        """Pods that exist and that nobody has."""
        return sum(1 for name in self.pods if name not in self.rows or self.rows[name].runtime is None)

    def take(self) -> str | None:
        """As a launch does: claimed by the rows alone, and given up when the Pod itself says that it cannot serve."""
        for row in list(self.rows.values()):
            if row.waiting and row.ready_at and row.ending_reason is None:
                pod = self.pods.get(row.name)
                if pod is None or not pod.can_serve:
                    self.rows[row.name] = replace(row, taken_at=self.now, ending_reason="Discarded")
                    continue
                taken = {"taken_at": self.now, "runtime": UUID(int=len(self.images)), "secret_made": True}
                self.rows[row.name] = replace(row, **taken)  # type: ignore[arg-type]
                return row.name
        return None


def world(**fate: object) -> World:
    return World(Pool(namespace="n", name="p", uid="pool", environment="e", size=3), fate)


def test_w1_a_list_that_lags_bears_no_second_pod() -> None:
    here = world(**READY)
    here.run_pass()
    here.hidden = set(here.pods)
    for _ in range(5):
        plan = here.run_pass()
        assert (plan.births, plan.endings, plan.strays) == ((), (), ())
    assert len(here.pods) == 3


def test_w2_an_image_that_never_pulls_is_replaced_one_at_a_time_with_backoff() -> None:
    here = world(**PULLING)
    replaced_at: list[datetime] = []
    for _ in range(60):
        before = here.now
        plan = here.run_pass()
        assert here.unassigned() <= 3
        assert len(plan.endings) <= 1
        replaced_at += [before] * len(plan.endings)
        assert here.take() is None
    waits = [(later - sooner).total_seconds() for sooner, later in pairwise(replaced_at)]
    assert waits == sorted(waits)
    assert 4 <= len(replaced_at) <= 8
    assert {reason for _, reason in here.ended} == {"ImagePull"}


def test_w2_pods_that_cannot_be_scheduled_are_held_and_the_status_says_why() -> None:
    here = world(**HELD)
    first = here.run_pass()
    assert first.births[0].count == 3
    for _ in range(20):
        plan = here.run_pass(seconds=900)
        assert (plan.births, plan.endings) == ((), ())
        assert plan.statuses[0].status.message == "3 of 3 cannot become Ready: Unschedulable"
    assert here.take() is None
    assert here.ended == []


def test_w3_a_launch_takes_what_was_born_before_and_only_what_stays() -> None:
    here = world(**READY)
    here.run_pass()
    here.run_pass()
    sitting = here.take()
    here.environment = replace(ENVIRONMENT, image="image:2")
    leaving = min(set(here.pods) - {sitting})
    here.pods[leaving] = replace(here.pods[leaving], deleting=True)
    here.run_pass()
    taken = here.take()
    assert taken is not None
    assert taken not in {leaving, sitting}
    del here.pods[leaving]
    for _ in range(4):
        here.run_pass()
    assert here.images[taken] == "image:1"
    waiting = [name for name, row in here.rows.items() if row.waiting]
    assert sorted(here.images[name] for name in waiting) == ["image:2"] * 3
    assert here.run_pass().endings == ()


@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5, 6, 7, 8])
def test_whatever_happens_never_more_than_size_wait_and_nothing_taken_is_lost(seed: int) -> None:
    draw = random.Random(seed)
    here = world(**READY)
    taken: set[str] = set()
    for step in range(150):
        here.fate = draw.choice([READY, READY, READY, PULLING, HELD, NEW])
        here.hidden = {name for name in here.pods if draw.random() < 0.1}
        before = here.pool.size
        if draw.random() < 0.1:
            here.pool = replace(here.pool, size=draw.randint(0, 6))
        plan = here.run_pass(seconds=draw.choice([0.2, 5, 15, 120]))
        live = sum(1 for row in here.rows.values() if row.waiting)
        assert live <= max(here.pool.size, before) or not plan.births, f"seed {seed}, step {step}"
        assert all(here.pods[name].uid for name in taken), f"seed {seed}, step {step}"
        if draw.random() < 0.5 and (name := here.take()) is not None:
            assert name not in taken
            taken.add(name)
        for name, pod in list(here.pods.items()):
            if name not in taken and draw.random() < 0.05:
                here.pods[name] = replace(pod, phase="Failed", ready=False)
            elif pod.phase == "Pending" and draw.random() < 0.3:
                here.pods[name] = replace(pod, phase="Running", ready=True, held=False, waiting="")
    here.fate, here.hidden = READY, set()
    for name, pod in list(here.pods.items()):
        if pod.phase == "Pending":
            here.pods[name] = replace(pod, phase="Running", ready=True, held=False, waiting="")
    for _ in range(40):
        here.run_pass(seconds=300)
    warm = [name for name, row in here.rows.items() if row.waiting and row.ready_at]
    assert len(warm) == here.pool.size, f"seed {seed}"
    assert taken <= set(here.rows)
