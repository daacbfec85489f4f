"""The runtime pools' decision, case by case: snapshot in, plan out."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from orca_infra.runtimes.decide import decide
from orca_infra.runtimes.model import (
    Condition,
    Environment,
    Failures,
    LostNode,
    Node,
    PodRow,
    Pool,
    PoolStatus,
    RuntimeLimits,
    RuntimePlan,
    RuntimeSnapshot,
    SeenObject,
    Sweep,
)
from orca_infra.runtimes.observe import read_object

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)
LIMITS = RuntimeLimits(stray_grace_seconds=60, stray_max=3)
POOL = Pool(namespace="n", name="p", uid="pool", environment="e", size=3)
ENVIRONMENT = Environment(namespace="n", name="e", image="image:2")
RUNTIME = UUID(int=7)


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def row(number: int, **more: Any) -> PodRow:
    given: dict[str, Any] = {"pool": "p", "uid": f"u{number}", "seen": True, "ready_at": ago(50)}
    name = f"orca-runtime-p-{number}"
    return PodRow(
        **{**given, "name": name, "namespace": "n", "environment": "e", "created_at": ago(100 - number), **more}
    )


def taken(number: int, **more: Any) -> PodRow:
    return row(number, **{"taken_at": ago(40), "runtime": RUNTIME, "secret_made": True, **more})


def pod(number: int, **more: Any) -> SeenObject:
    given: dict[str, Any] = {"uid": f"u{number}", "created_at": ago(100), "phase": "Running", "ready": True}
    name = f"orca-runtime-p-{number}"
    return SeenObject(**{**given, "kind": "Pod", "namespace": "n", "name": name, **more})


def pulling(number: int, **more: Any) -> SeenObject:
    return pod(number, ready=False, phase="Pending", waiting="ImagePullBackOff", **more)


def secret(number: int, **more: Any) -> SeenObject:
    given: dict[str, Any] = {"kind": "Secret", "uid": f"s{number}", "phase": "", "ready": False}
    return pod(number, **{**given, **more})


def plan(**snapshot: Any) -> RuntimePlan:
    given: dict[str, Any] = {"pools": (POOL,), "environments": {"e": ENVIRONMENT}}
    return decide(RuntimeSnapshot(now=NOW, **{**given, **snapshot}), LIMITS)


def born(made: RuntimePlan) -> int:
    return sum(birth.count for birth in made.births)


def ended(made: RuntimePlan) -> dict[str, str]:
    return {ending.name.rpartition("-")[2]: ending.reason.value for ending in made.endings}


def status(made: RuntimePlan) -> PoolStatus:
    """Without its conditions."""
    return replace(made.statuses[0].status, conditions=())


def condition(made: RuntimePlan, type_: str = "Ready") -> Condition:
    [found] = [one for one in made.statuses[0].status.conditions if one.type == type_]
    return found


# Birth.


def test_a_pod_whose_launch_was_given_up_is_replaced_once_it_is_gone() -> None:
    """Nobody has it, and never do more than `size` such Pods exist; nobody is in it, so it gets no time to end."""
    given_up = row(1, taken_at=ago(1), ending_reason="Discarded")
    others = (row(2), row(3), taken(4))
    pods = tuple(pod(number) for number in (1, 2, 3, 4))
    made = plan(rows=(given_up, *others), objects=pods)
    assert born(made) == 0
    assert [(sweep.name, sweep.grace_seconds) for sweep in made.sweeps] == [("orca-runtime-p-1", 1)]
    going = (pod(1, deleting=True), *pods[1:])
    assert born(plan(rows=(given_up, *others), objects=going)) == 0
    assert born(plan(rows=(given_up, *others), objects=pods[1:], gone=frozenset({"u1"}))) == 1


def test_an_empty_pool_is_filled_to_its_size() -> None:
    made = plan()
    assert (born(made), ended(made)) == (3, {})
    assert made.births[0].environment is ENVIRONMENT
    assert status(made) == PoolStatus()


@pytest.mark.parametrize(
    ("rows", "count"),
    [
        ([row(1), row(2), row(3)], 0),
        ([row(1), row(2), taken(3)], 1),
        ([row(1, ready_at=None, uid=None, seen=False), row(2), row(3)], 0),  # not made yet
        ([row(1, ending_reason="Surplus"), row(2), row(3)], 0),  # still there: it is replaced once it is gone
        ([taken(1, ending_reason="Culled"), row(2), row(3)], 1),
    ],
)
def test_what_is_taken_is_refilled_and_what_waits_counts_until_it_is_gone(rows: list[PodRow], count: int) -> None:
    objects = tuple(pod(int(one.name[-1])) for one in rows if one.uid)
    assert born(plan(rows=tuple(rows), objects=objects)) == count


def test_without_its_environment_nothing_is_born_and_the_status_says_so() -> None:
    made = plan(environments={})
    assert born(made) == 0
    assert status(made).message == "environment e is missing: no Pod is born"


def test_resources_that_cannot_be_read_bear_nothing_and_the_status_says_so() -> None:
    made = plan(pools=(replace(POOL, resources={"requests": {"cpu": "much"}}),))
    assert born(made) == 0
    assert "cpu must be a quantity such as 500m, 2 or 1.5Gi, not 'much'" in status(made).message


def test_one_pass_bears_no_more_than_its_share() -> None:
    pools = tuple(replace(POOL, name=name, size=size) for name, size in (("a", 200), ("b", 900), ("c", 3)))
    made = plan(pools=pools)
    # The one that is filled anew holds up no refill of the others.
    assert [(birth.pool.name, birth.count) for birth in made.births] == [("c", 3), ("a", 200), ("b", 297)]


def test_a_changed_environment_or_pool_is_no_reason_to_end_a_waiting_pod() -> None:
    pool = replace(POOL, environment="other", resources={"requests": {"cpu": "9"}})
    rows = tuple(row(number) for number in (1, 2, 3))
    made = plan(
        pools=(pool,),
        environments={"other": replace(ENVIRONMENT, name="other", image="image:3")},
        rows=rows,
        objects=tuple(pod(number) for number in (1, 2, 3)),
    )
    assert (born(made), ended(made)) == (0, {})


# Surplus and deleted pools.


def test_a_smaller_pool_ends_the_unready_first_then_the_oldest() -> None:
    rows = (row(1), row(2), row(3, ready_at=None), row(4))
    objects = (pod(1), pod(2), pod(3, ready=False, phase="Pending"), pod(4))
    made = plan(pools=(replace(POOL, size=2),), rows=rows, objects=objects)
    assert ended(made) == {"3": "Surplus", "1": "Surplus"}
    assert all(ending.only_waiting for ending in made.endings)
    assert sorted(sweep.name[-1] for sweep in made.sweeps) == ["1", "3"]
    assert {sweep.grace_seconds for sweep in made.sweeps} == {1}


@pytest.mark.parametrize("pools", [(), (replace(POOL, deleting=True),), (replace(POOL, namespace="other"),)])
def test_when_its_pool_is_deleted_a_waiting_pod_ends_and_a_taken_one_lives_on(pools: tuple[Pool, ...]) -> None:
    made = plan(pools=pools, environments={}, rows=(row(1), taken(2)), objects=(pod(1), pod(2)))
    assert ended(made) == {"1": "PoolDeleted"}
    assert born(made) == 0


# What is gone, going or has failed.


def test_a_pod_proven_gone_ends_as_vanished_at_once_and_is_replaced() -> None:
    made = plan(rows=(row(1), row(2), row(3)), objects=(pod(2), pod(3)), gone=frozenset({"u1"}))
    assert ended(made) == {"1": "Vanished"}
    assert made.finishes == ("orca-runtime-p-1",)
    assert born(made) == 1


def test_a_pod_that_a_list_lacks_is_neither_gone_nor_marked() -> None:
    made = plan(rows=(row(1), row(2), row(3)), objects=(pod(2), pod(3)))
    assert (ended(made), made.finishes, made.marks, born(made)) == ({}, (), (), 0)


def test_another_pod_under_its_name_is_not_it_and_goes_with_the_rows_end() -> None:
    made = plan(rows=(row(1), row(2), row(3)), objects=(pod(1, uid="x"), pod(2), pod(3)), gone=frozenset({"u1"}))
    assert ended(made) == {"1": "Vanished"}
    assert [item.uid for sweep in made.sweeps for item in sweep.objects] == ["x"]
    assert made.finishes == ()


def test_a_pod_that_is_going_away_is_not_warm_and_still_counts_as_there() -> None:
    made = plan(rows=(row(1), row(2), row(3)), objects=(pod(1, deleting=True), pod(2), pod(3)))
    assert (ended(made), born(made)) == ({}, 0)
    assert [(mark.name[-1], mark.ready, mark.problem) for mark in made.marks] == [("1", False, "going away")]
    assert status(made) == PoolStatus(warm=2)


def test_a_waiting_pod_that_failed_is_not_warm_and_is_ended_to_be_replaced() -> None:
    made = plan(rows=(row(1), row(2), row(3)), objects=(pod(1, phase="Failed", failed="Error"), pod(2), pod(3)))
    assert ended(made) == {"1": "Failed"}
    assert made.endings[0].detail == "ended: Error"
    assert status(made).warm == 2


def test_evicted_pods_that_could_serve_are_all_replaced_at_once_and_others_are_not() -> None:
    evicted = tuple(pod(number, ready=False, phase="Failed", failed="Evicted") for number in (1, 2, 3))
    rows = (row(1), row(2, ready_at=None, unready_at=ago(1)), row(3, ready_at=None))
    failures = {"p": Failures(pool="p", failures=4, last_at=ago(1))}
    made = plan(rows=rows, objects=evicted, failures=failures)
    assert ended(made) == {"1": "Evicted", "2": "Evicted"}  # the third never was Ready: it waits for its turn


def test_a_waiting_pod_that_somebody_deletes_is_no_failure_though_its_kubelet_says_so_for_a_moment() -> None:
    going = pod(1, ready=False, phase="Failed", failed="Error", deleting=True)
    made = plan(rows=(row(1), row(2), row(3)), objects=(going, pod(2), pod(3)))
    assert (made.endings, made.statuses[0].status.message) == ((), "")
    assert ended(plan(rows=(row(1), row(2), row(3)), objects=(pod(2), pod(3)), gone=frozenset({"u1"}))) == {
        "1": "Vanished"
    }


def test_an_evicted_pod_is_told_from_one_whose_program_failed() -> None:
    metadata = {"name": "p", "namespace": "n", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"}
    ended_with = {"state": {"terminated": {"reason": "Error", "exitCode": 137}}}
    status: dict[str, Any] = {"phase": "Failed", "containerStatuses": [ended_with]}
    disrupted = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
    assert read_object({"kind": "Pod", "metadata": metadata, "status": status}).failed == "Error"
    seen = read_object({"kind": "Pod", "metadata": metadata, "status": {**status, "conditions": [disrupted]}})
    assert (seen.failed, seen.is_evicted) == ("Evicted", True)
    said = read_object({"kind": "Pod", "metadata": metadata, "status": {**status, "reason": "NodeShutdown"}})
    assert (said.failed, said.is_evicted) == ("NodeShutdown", True)


LOST = LostNode(name="one", unready_since=ago(60))
SILENT = LostNode(name="one", unready_since=ago(59))
GONE = LostNode(name="one")


def test_waiting_pods_of_a_lost_node_are_replaced_at_once_without_their_kubelets_word() -> None:
    rows = (row(1), row(2, ready_at=None, unready_at=ago(1)), row(3, ready_at=None), row(4))
    objects = (
        *(pod(number, ready=False, node="one") for number in (1, 3)),
        pod(2, ready=False, node="one", deleting=True),
        pod(4, node="two"),
    )
    pool = replace(POOL, size=4)
    failures = {"p": Failures(pool="p", failures=4, last_at=ago(1))}
    made = plan(pools=(pool,), rows=rows, objects=objects, lost_nodes=(LOST,), failures=failures)
    assert ended(made) == {"1": "NodeLost", "2": "NodeLost"}  # the third never was Ready: it waits for its turn
    assert all(ending.only_waiting for ending in made.endings)
    assert [(sweep.name[-1], sweep.grace_seconds) for sweep in made.sweeps] == [("1", 0), ("2", 0)]
    assert "its node one is not Ready" in {event.message.partition(": ")[2] for event in made.events}
    # What ended already, and hangs there, is deleted the same way; and then replaced.
    ending = tuple(replace(one, ending_reason="Surplus") for one in rows)
    made = plan(pools=(pool,), rows=ending, objects=objects, lost_nodes=(LOST,))
    assert [(sweep.name[-1], sweep.grace_seconds) for sweep in made.sweeps] == [("1", 0), ("2", 0), ("3", 0), ("4", 1)]


def test_a_node_that_is_silent_for_a_moment_loses_nothing_and_the_status_names_it() -> None:
    made = plan(
        rows=(row(1), row(2), row(3)), objects=(pod(1, ready=False, node="one"), pod(2), pod(3)), lost_nodes=(SILENT,)
    )
    assert (made.endings, made.sweeps) == ((), ())
    assert made.next_due_at == NOW + timedelta(seconds=1)
    assert status(made).message == "1 of 3 cannot become Ready: its node one is not Ready"
    [ready] = [one for one in made.statuses[0].status.conditions if one.type == "Ready"]
    assert (ready.status, ready.reason) == ("False", "NodeLost")


def test_what_is_on_a_node_that_is_gone_ends_though_kubernetes_still_calls_it_ready() -> None:
    rows = (row(1), taken(2))
    made = plan(rows=rows, objects=(pod(1, node="one"), pod(2, node="one"), secret(2)), lost_nodes=(GONE,))
    assert ended(made) == {"1": "NodeLost", "2": "NodeLost"}
    assert [(sweep.name[-1], sweep.grace_seconds) for sweep in made.sweeps] == [("1", 0), ("2", 0)]
    assert made.marks == ()


def test_a_runtime_on_a_silent_node_ends_once_kubernetes_gives_its_pod_up() -> None:
    """A node that is only silent may be back, with the user's work."""
    silent = LostNode(name="one", unready_since=ago(3600))
    assert (
        plan(pools=(), rows=(taken(1),), objects=(pod(1, ready=False, node="one"),), lost_nodes=(silent,)).endings == ()
    )
    deleting = pod(1, ready=False, node="one", deleting=True)
    made = plan(pools=(), rows=(taken(1),), objects=(deleting,), lost_nodes=(silent,))
    assert ended(made) == {"1": "NodeLost"}
    assert made.sweeps == (Sweep(name="orca-runtime-p-1", objects=(deleting,), grace_seconds=0),)


def test_pods_whose_image_cannot_be_pulled_are_replaced_one_at_a_time() -> None:
    rows = tuple(row(number, ready_at=None) for number in (1, 2, 3))
    objects = tuple(pulling(number) for number in (1, 2, 3))
    made = plan(rows=rows, objects=objects)
    assert ended(made) == {"1": "ImagePull"}
    assert born(made) == 0
    assert status(made) == PoolStatus(message="3 of 3 cannot become Ready: ImagePullBackOff")
    ending = (replace(rows[0], ending_reason="ImagePull"), *rows[1:])
    assert ended(plan(rows=ending, objects=objects)) == {}
    made = plan(rows=ending, objects=objects[1:], gone=frozenset({"u1"}))  # its end does not count as a failure yet
    assert (ended(made), made.finishes, born(made)) == ({}, ("orca-runtime-p-1",), 1)


@pytest.mark.parametrize(("failures", "wait"), [(1, 10), (2, 20), (5, 160), (6, 300), (500, 300)])
def test_the_next_replacement_waits_twice_as_long_each_time(failures: int, wait: int) -> None:
    rows = tuple(row(number, ready_at=None) for number in (1, 2, 3))
    objects = tuple(pulling(number) for number in (1, 2, 3))

    def after(seconds: float) -> RuntimePlan:
        failed = Failures(pool="p", failures=failures, last_at=ago(seconds))
        return plan(rows=rows, objects=objects, failures={"p": failed})

    assert ended(after(wait - 1)) == {}
    assert after(wait - 1).next_due_at == NOW + timedelta(seconds=1)
    assert ended(after(wait)) == {"1": "ImagePull"}


def test_a_pull_that_only_just_went_wrong_is_left_to_the_kubelet() -> None:
    rows = (row(1, ready_at=None, created_at=ago(59)), row(2), row(3))
    assert ended(plan(rows=rows, objects=(pulling(1), pod(2), pod(3)))) == {}


def test_a_pod_that_was_ready_gets_its_time_anew() -> None:
    rows = (row(1, ready_at=None, created_at=ago(9000), unready_at=ago(599)), row(2), row(3))
    objects = (pod(1, ready=False, created_at=ago(9000)), pod(2), pod(3))
    assert ended(plan(rows=rows, objects=objects)) == {}
    rows = (replace(rows[0], unready_at=ago(600)), *rows[1:])
    assert ended(plan(rows=rows, objects=objects)) == {"1": "NeverReady"}


def test_a_waiting_pod_that_was_made_late_gets_its_time() -> None:
    rows = (row(1, ready_at=None, created_at=ago(9000)), row(2), row(3))
    assert ended(plan(rows=rows, objects=(pending(1, created_at=ago(599)), pod(2), pod(3)))) == {}
    assert ended(plan(rows=rows, objects=(pending(1, created_at=ago(600)), pod(2), pod(3)))) == {"1": "NeverReady"}


def test_pods_that_cannot_be_scheduled_are_held_and_the_status_says_why() -> None:
    rows = tuple(row(number, ready_at=None, created_at=ago(99999)) for number in (1, 2, 3))
    held = {
        "ready": False,
        "held": True,
        "phase": "Pending",
        "waiting": "Unschedulable",
        "waiting_message": "0/1 nodes",
    }
    made = plan(rows=rows, objects=tuple(pod(number, **held) for number in (1, 2, 3)))
    assert (ended(made), born(made)) == ({}, 0)
    assert status(made).message == "3 of 3 cannot become Ready: Unschedulable: 0/1 nodes"


@pytest.mark.parametrize(
    ("said", "reasons"), [("Invalid value", {"1": "Refused"}), ("forbidden: exceeded quota: q", {})]
)
def test_a_refused_pod_is_rendered_anew_but_one_without_quota_is_held(said: str, reasons: dict[str, str]) -> None:
    rows = (row(1, ready_at=None, uid=None, seen=False, refused=said), row(2), row(3))
    made = plan(rows=rows, objects=(pod(2), pod(3)))
    assert ended(made) == reasons
    assert said in status(made).message


# Marks.


@pytest.mark.parametrize("waiting", ["", "ContainerCreating", "PodInitializing"])
def test_pods_on_their_way_are_no_trouble(waiting: str) -> None:
    rows = tuple(row(number, ready_at=None) for number in (1, 2, 3))
    made = plan(rows=rows, objects=tuple(pod(number, ready=False, waiting=waiting) for number in (1, 2, 3)))
    [change] = made.statuses
    ready = change.status.conditions[0]
    assert (change.status.message, ready.status, ready.reason) == ("", "False", "Filling")
    assert made.events == ()


def test_pods_that_are_refused_for_one_reason_are_said_to_be_so_once() -> None:
    rows = tuple(
        row(n, ready_at=None, uid=None, seen=False, refused=f'Pod "{row(n).name}" is invalid: no label') for n in (1, 2)
    )
    [change] = plan(rows=rows).statuses
    assert change.status.message == "2 of 3 cannot become Ready: refused: Pod is invalid: no label"


def test_what_is_new_of_a_pod_is_marked_once() -> None:
    rows = (row(1, ready_at=None, uid=None, seen=False), row(2), row(3))
    objects = (pod(1, address="10.0.0.1"), pod(2), pod(3))
    (mark,) = plan(rows=rows, objects=objects).marks
    assert (mark.name, mark.uid, mark.ready, mark.address) == ("orca-runtime-p-1", "u1", True, "10.0.0.1")
    assert plan(rows=(row(1, address="10.0.0.1"), *rows[1:]), objects=objects).marks == ()


def pending(number: int, **more: Any) -> SeenObject:
    return pod(number, ready=False, phase="Pending", **more)


UNMADE = {"ready_at": None, "uid": None, "seen": False}


def test_a_list_that_shows_a_pod_as_it_was_before_it_was_noted_as_ready_marks_nothing() -> None:
    behind, ready = pod(1, ready=False), pod(1)
    assert plan(rows=(row(1, ready_later=True),), objects=(behind,)).marks == ()
    assert [mark.ready for mark in plan(rows=(row(1),), objects=(behind,)).marks] == [False]
    assert [mark.ready for mark in plan(rows=(row(1, ready_at=None),), objects=(ready,)).marks] == [True]


def test_a_taken_pod_stays_noted_as_ready() -> None:
    assert plan(rows=(taken(1),), objects=(pod(1, ready=False),)).marks[0].problem == "starting"
    assert plan(rows=(taken(1, problem="starting"),), objects=(pod(1, ready=False),)).marks == ()


# Runtimes.


def test_a_runtime_is_culled_at_its_time_pool_or_no_pool() -> None:
    rows = (taken(1, expires_at=NOW), taken(2, expires_at=NOW + timedelta(seconds=5)), taken(3))
    made = plan(pools=(), rows=rows, objects=(pod(1), secret(1), pod(2), pod(3)))
    assert ended(made) == {"1": "Culled"}
    assert [item.kind for sweep in made.sweeps for item in sweep.objects] == ["Pod", "Secret"]
    assert made.next_due_at == NOW + timedelta(seconds=5)


@pytest.mark.parametrize(
    ("more", "objects", "reason"),
    [
        ({}, [pod(1, phase="Failed", failed="OOMKilled")], "Failed"),
        ({}, [pod(1, phase="Failed", failed="Evicted")], "Evicted"),
        ({}, [pod(1, phase="Failed", failed="Evicted", deleting=True)], "Evicted"),
        ({}, [pod(1, phase="Failed", failed="Error", deleting=True)], "Vanished"),
        ({}, [pod(1, ready=False, deleting=True)], None),  # it may take its time
        ({"secret_made": False, "taken_at": ago(300)}, [pod(1)], "Abandoned"),
        ({"secret_made": False, "taken_at": ago(299)}, [pod(1)], None),
        ({"ready_at": None, "taken_at": ago(600)}, [pulling(1, created_at=ago(600))], "ImagePull"),
        ({"ready_at": None, "taken_at": ago(600), "refused": "bad", "uid": None, "seen": False}, [], "Refused"),
        ({"ready_at": None, "taken_at": ago(600)}, [pending(1, created_at=ago(600))], "NeverReady"),
        ({"ready_at": None, "taken_at": ago(599)}, [pulling(1, created_at=ago(599))], None),
        # It was launched while a clock was wrong, or nothing could be made.
        ({"ready_at": None, "taken_at": ago(9999), "tried_at": ago(9999)}, [pending(1, created_at=ago(599))], None),
        ({**UNMADE, "taken_at": ago(9999)}, [], None),
        ({**UNMADE, "taken_at": ago(9999), "tried_at": ago(599)}, [], None),
        ({**UNMADE, "taken_at": ago(9999), "tried_at": ago(600)}, [], "NeverReady"),
        ({**UNMADE, "taken_at": ago(9999), "tried_at": ago(9999), "being_made": True}, [], None),
        ({"taken_at": ago(600)}, [pod(1, ready=False)], None),
        ({"ready_at": None, "taken_at": ago(600)}, [pod(1)], None),  # just Ready
        ({"runtime": None}, [pod(1)], "Discarded"),
    ],
)
def test_a_runtime_ends_for_a_reason(more: dict[str, Any], objects: list[SeenObject], reason: str | None) -> None:
    made = plan(pools=(), rows=(taken(1, **more),), objects=tuple(objects))
    assert ended(made) == ({"1": reason} if reason else {})


def test_an_ending_row_is_finished_only_when_nothing_of_it_is_left() -> None:
    ending = taken(1, ending_reason="Stopped")
    gone = frozenset({"u1"})
    assert plan(rows=(ending,), objects=(secret(1),), gone=gone).finishes == ()
    assert plan(rows=(ending,)).finishes == ()  # a list alone proves nothing
    assert plan(rows=(ending,), gone=gone).finishes == ("orca-runtime-p-1",)
    assert plan(rows=(replace(ending, uid=None, seen=False),)).finishes == ("orca-runtime-p-1",)


@pytest.mark.parametrize("reason", [None, "Surplus", "PoolDeleted", "Stopped", "Culled", "Vanished"])
def test_a_row_whose_up_is_under_way_is_not_finished_and_its_pod_no_stray(reason: str | None) -> None:
    gone = frozenset({"u1"})
    made = taken(1, ending_reason=reason, being_made=True)
    unseen = replace(made, uid=None, seen=False)
    assert plan(rows=(unseen,)).finishes == ()
    assert plan(rows=(made,), gone=gone).finishes == ()
    seen = plan(rows=(unseen,), objects=(pod(1),))
    assert (seen.finishes, seen.strays) == ((), ())
    assert bool(seen.sweeps) == (reason is not None)
    if reason is not None:
        assert plan(rows=(replace(made, being_made=False),), gone=gone).finishes == ("orca-runtime-p-1",)


def test_what_ends_while_it_is_made_is_replaced_once_it_is_gone() -> None:
    rows = tuple(row(n, ending_reason="Surplus", being_made=True, uid=None, seen=False) for n in (1, 2, 3))
    assert plan(rows=rows).births == ()


def test_a_secret_made_before_its_pod_is_adopted_once_the_pod_is_seen() -> None:
    rows = (taken(1, pool=None),)
    assert plan(rows=rows, objects=(secret(1),)).adoptions == ()
    (adoption,) = plan(rows=rows, objects=(pod(1), secret(1))).adoptions
    assert (adoption.secret.uid, adoption.pod.uid) == ("s1", "u1")
    assert plan(rows=rows, objects=(pod(1), secret(1, owned=True))).adoptions == ()


def test_the_status_counts_and_is_written_only_when_it_changed() -> None:
    rows = (row(1), row(2), taken(3), taken(4, ending_reason="Stopped"))
    objects = tuple(pod(number) for number in (1, 2, 3, 4))
    first = plan(rows=rows, objects=objects).statuses[0].status
    assert replace(first, conditions=()) == PoolStatus(warm=2, assigned=1)
    again = plan(pools=(replace(POOL, status=first),), rows=rows, objects=objects)
    assert again.statuses == ()


# Strays.


def test_a_stray_has_our_labels_no_owner_no_row_and_is_past_the_grace() -> None:
    rows = (taken(1),)
    objects = (
        pod(1),
        secret(1),  # of a row
        pod(5),
        secret(6),
        secret(7, owned=True),
        pod(8, deleting=True),
        pod(9, created_at=ago(59)),
    )
    made = plan(rows=rows, objects=objects)
    assert [item.uid for item in made.strays] == ["u5", "s6"]
    many = plan(rows=rows, objects=tuple(pod(number) for number in range(2, 6)))
    assert (many.strays, len(many.strays_held)) == ((), 4)


def test_young_strays_count_so_that_none_slips_through_as_it_comes_of_age() -> None:
    young = tuple(pod(number, created_at=ago(1)) for number in range(3, 6))
    assert plan(objects=(pod(2), *young)).strays_held == (pod(2), *young)
    assert plan(objects=(pod(2), *young[:2])).strays == (pod(2),)
    assert plan(objects=young * 2).strays_held == ()


# Conditions and events.


def test_ready_says_why_it_is_not_and_keeps_the_time_of_its_last_change() -> None:
    assert condition(plan()).reason == "Filling"
    assert condition(plan(environments={})) == Condition(
        type="Ready",
        status="False",
        reason="EnvironmentMissing",
        message="environment e is missing: no Pod is born",
        since=NOW,
    )
    rows, objects = (row(1), row(2), row(3)), (pod(1), pod(2), pod(3))
    assert condition(plan(rows=rows, objects=objects)).status == "True"
    refused = (row(1, ready_at=None, uid=None, seen=False, refused="exceeded quota: q"), *rows[1:])
    assert condition(plan(rows=refused, objects=objects[1:])).reason == "QuotaFull"
    held = pod(1, ready=False, held=True, phase="Pending", waiting="Unschedulable")
    assert condition(plan(rows=rows, objects=(held, *objects[1:]))).reason == "Unschedulable"
    old = PoolStatus(conditions=(Condition(type="Ready", status="False", reason="x", since=ago(99)),))
    made = plan(pools=(replace(POOL, status=old, generation=4),))
    assert (condition(made).since, made.statuses[0].status.generation) == (ago(99), 4)


def test_a_stack_that_is_paused_keeps_nothing_warm_and_the_status_says_so() -> None:
    made = plan(pools=(replace(POOL, size=0, asked_size=3),), rows=(row(1), row(2)), objects=(pod(1), pod(2)))
    assert ended(made) == {"1": "Surplus", "2": "Surplus"}
    assert made.statuses[0].status.message == "the stack is paused and keeps no Pod warm, until `orca-infra resume`"
    ready = made.statuses[0].status.conditions[0]
    assert (ready.status, ready.reason) == ("False", "Paused")


def test_a_variable_from_a_secret_bears_nothing() -> None:
    variable = {"name": "T", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
    made = plan(environments={"e": replace(ENVIRONMENT, env=(variable,))})
    assert (born(made), condition(made).reason) == (0, "SecretInEnvironment")
    assert status(made).message == "environment e takes T from a Secret: no Pod is born"


def test_the_nodes_are_compared_with_the_sum_of_all_pools_that_can_only_be_there() -> None:
    asks = {"requests": {"cpu": "1500m", "memory": "1Gi"}}
    pools = (
        replace(POOL, resources=asks),
        replace(POOL, name="gpu", size=1, resources={"limits": {"nvidia.com/gpu": 2}}, node_selector={"xpu": "gpu"}),
    )
    plain = Node(name="a", allocatable={"cpu": 4000, "memory": (8 << 30) * 1000, "pods": 110_000})
    gpu = Node(name="b", labels={"xpu": "gpu"}, allocatable={"cpu": 4000, "nvidia.com/gpu": 1000, "pods": 110_000})

    def said(*nodes: Node) -> list[tuple[str, str]]:
        made = decide(
            RuntimeSnapshot(now=NOW, pools=pools, environments={"e": ENVIRONMENT}, nodes=nodes or None), LIMITS
        )
        found = [one for change in made.statuses for one in change.status.conditions if one.type == "Provisioned"]
        return [(one.status, one.message) for one in found]

    assert said() == [("Unknown", "the nodes cannot be listed")] * 2
    over = "the pools ask for more than the nodes can allocate: "
    gpus = "the pools ask for more than the nodes with xpu=gpu can allocate: nvidia.com/gpu 2 of 1"
    assert said(plain, gpu) == [("False", over + "nvidia.com/gpu 2 of 1"), ("False", gpus)]
    more = replace(gpu, name="c", allocatable={"nvidia.com/gpu": 2000, "pods": 110_000})
    assert said(plain, gpu, more) == [("True", ""), ("True", "")]
    assert said(replace(plain, allocatable={"cpu": 2500, "pods": 2000}), more)[0] == (
        "False",
        over + "cpu 4500m of 2500m, memory 3Gi of 0",
    )


def test_events_tell_what_happened_once_for_each_reason() -> None:
    made = plan(environments={})
    assert [(event.reason, event.warning) for event in made.events] == [("EnvironmentMissing", True)]
    again = plan(environments={}, pools=(replace(POOL, status=made.statuses[0].status),))
    assert (again.statuses, again.events) == ((), ())
    assert [(event.reason, event.message) for event in plan().events] == [("Born", "3 Pods are born of image:2")]
    [event] = plan(pools=(replace(POOL, size=1),)).events
    assert event.message == "1 Pod is born of image:2"
    rows = tuple(row(number) for number in range(1, 6))
    made = plan(rows=rows, objects=tuple(pod(number) for number in range(1, 6)))
    [surplus] = made.events
    assert (surplus.reason, surplus.message, surplus.warning) == (
        "Surplus",
        "orca-runtime-p-1 and 1 more: pool p keeps 3",
        False,
    )
    gone = plan(rows=(row(1), row(2), row(3)), objects=(pod(2), pod(3)), gone=frozenset({"u1"}))
    assert {event.reason: event.warning for event in gone.events} == {"Born": False, "Vanished": True}


def test_labels_taken_off_by_hand_are_put_back() -> None:
    rows = (row(1), row(2), row(3))
    made = plan(rows=rows, objects=(pod(2), pod(3), pod(1, labelled=False)))
    assert [item.uid for item in made.relabels] == ["u1"]
    assert plan(rows=rows, objects=(pod(2), pod(3), pod(1, labelled=False, deleting=True))).relabels == ()
