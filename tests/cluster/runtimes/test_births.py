"""Pods that change, go away or cannot become Ready, and what the pool says of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from orca_infra.kube.kinds import NODE, POD, RESOURCE_QUOTA, RUNTIME_POOL, Ref
from orca_infra.runtimes.living import end_runtime
from orca_infra.runtimes.model import RuntimeLimits, RuntimePlan

if TYPE_CHECKING:
    from tests.cluster.runtimes.conftest import Room


def test_a_changed_image_reaches_only_what_is_born_afterwards(room: Room) -> None:
    room.fill(image="registry.example/runtime:1")
    old = room.pods()
    first = room.launch("sits")
    room.until(lambda: len(room.warm()) == 3)
    room.make_environment("registry.example/runtime:2")
    # One of the old Pods is being deleted, and no pass has seen it yet: it is discarded and the next one taken.
    leaving = min(room.warm())
    ref = Ref(kind=POD, namespace=room.namespace, name=leaving)
    room.kube.patch(ref, {"metadata": {"finalizers": ["orca.testing/stay"]}})
    room.kube.delete(ref)
    taken = room.launch()
    assert taken.pod != leaving
    assert taken.warm
    pod = room.pod(taken.pod)
    assert pod is not None
    assert room.image(pod) == "registry.example/runtime:1"
    room.run_pass()
    assert leaving not in room.warm()
    room.kube.patch(ref, {"metadata": {"finalizers": None}})
    room.until(lambda: len(room.warm()) == 3)
    room.until(lambda: room.reason(leaving) == "Discarded")
    now = room.pods()
    assert set(old) - set(now) <= {leaving}
    assert {name: pod["metadata"]["uid"] for name, pod in old.items() if name in now} == {
        name: now[name]["metadata"]["uid"] for name in old if name in now
    }
    born = {name for name in room.warm() if room.image(now[name]) == "registry.example/runtime:2"}
    assert len(born) == 2
    assert room.image(now[first.pod]) == "registry.example/runtime:1"
    assert room.run_pass() == RuntimePlan(next_due_at=room.run_pass().next_due_at)


def test_a_pod_deleted_by_hand_ends_as_vanished_and_is_replaced_by_a_new_number(room: Room) -> None:
    room.fill()
    [gone, lost, kept] = sorted(room.warm())
    taken = room.launch()
    assert taken.pod == gone
    for name in (gone, lost):
        room.kube.delete(Ref(kind=POD, namespace=room.namespace, name=name))
        room.wait_until(lambda name=name: room.pod(name) is None)
    room.until(lambda: room.reason(gone) == room.reason(lost) == "Vanished")
    assert room.runtime(taken.id)["reason"] == "Vanished"
    room.until(lambda: len(room.warm()) == 3)
    assert kept in room.warm()
    assert {gone, lost}.isdisjoint(room.pods())
    assert room.secret(gone) is None
    # The cohorts that declare nothing any more are dropped; those of the living stay.
    assert room.rows("select count(*) as n from orca.kube_objects where name = any(%(g)s)", g=[gone, lost]) == [
        {"n": 0}
    ]


def test_a_label_taken_off_by_hand_is_put_back_and_loses_nothing(room: Room) -> None:
    room.fill(size=1)
    [name] = room.warm()
    room.kube.patch(Ref(kind=POD, namespace=room.namespace, name=name), {"metadata": {"labels": {"orca.role": None}}})
    assert [item.name for item in room.run_pass().relabels] == [name]
    pod = room.pod(name)
    assert pod is not None
    assert pod["metadata"]["labels"]["orca.role"] == "runtime"
    assert room.run_pass() == RuntimePlan()
    taken = room.launch()
    assert taken.pod == name
    end_runtime(room.launching, taken.id)
    room.until(lambda: room.reason(name) == "Stopped")


def test_a_full_quota_holds_what_is_missing_and_the_status_says_so(room: Room) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q", "namespace": room.namespace}}
    room.kube.create({**quota, "spec": {"hard": {"pods": "2"}}})
    ref = Ref(kind=RESOURCE_QUOTA, namespace=room.namespace, name="q")
    room.wait_until(lambda: ((room.kube.get(ref) or {}).get("status") or {}).get("hard"))
    room.make_environment()
    room.make_pool()
    room.until(lambda: len(room.warm()) == 2 and "exceeded quota" in room.counts()[2])
    assert room.counts()[2].startswith("1 of 3 cannot become Ready: refused: ")
    assert room.condition("Ready") == ("False", "QuotaFull")
    assert "exceeded quota" in room.events()["QuotaFull"]
    for _ in range(3):
        room.run_pass()
    assert room.rows("select reason from orca.runtime_pods where ended_at is not null") == []
    room.kube.patch(ref, {"spec": {"hard": {"pods": "9"}}})
    with room.database.transaction() as transaction:  # as if the minute until the next try were over
        transaction.run("update orca.kube_objects set next_try_at = null")
    room.until(lambda: len(room.warm()) == 3)


def test_the_pool_says_when_the_nodes_cannot_hold_it(room: Room) -> None:
    room.make_environment()
    room.make_pool(size=0, resources={"requests": {"cpu": "600"}})
    room.run_pass()
    assert room.condition("Provisioned") == ("True", "NodesSuffice")
    room.make_pool(size=2, resources={"requests": {"cpu": "600"}})
    room.run_pass()
    assert room.condition("Provisioned") == ("False", "NodesTooFew")
    [said] = [one["message"] for one in room.status()["conditions"] if one["type"] == "Provisioned"]
    assert said.endswith("can allocate: cpu 1200 of 1000")
    assert room.events()["NodesTooFew"] == said
    assert room.status()["observedGeneration"] == 2


def test_pods_that_cannot_be_scheduled_are_held_and_the_status_says_why(room: Room) -> None:
    room.make_environment()
    room.make_pool(nodeSelector={"no": "such-node"})
    room.until(lambda: "Unschedulable" in room.status().get("message", ""))
    held = set(room.pods())
    assert len(held) == 3
    for _ in range(3):
        room.run_pass()
    assert set(room.pods()) == held
    assert room.warm() == set()
    assert "3 of 3 cannot become Ready: Unschedulable: 0/1 nodes are available" in room.status()["message"]
    assert room.condition("Ready") == ("False", "Unschedulable")
    assert room.condition("Provisioned") == ("False", "NodesTooFew")
    assert {"Born", "Unschedulable", "NodesTooFew"} <= set(room.events())
    room.make_pool(size=1, nodeSelector={"no": "such-node"})
    room.until(lambda: len(room.pods()) == 1)
    cluster_pool = Ref(kind=RUNTIME_POOL, namespace=room.namespace, name="python-simple-pool")
    room.kube.delete(cluster_pool)
    room.until(lambda: not room.rows("select from orca.runtime_pods where ended_at is null"))
    assert room.pods() == {}
    ended = room.rows("select reason, count(*) as n from orca.runtime_pods group by reason order by reason")
    assert ended == [{"reason": "PoolDeleted", "n": 1}, {"reason": "Surplus", "n": 2}]


def test_pods_that_fail_are_replaced_one_at_a_time_with_backoff(room: Room) -> None:
    room.fill()
    room.limits = RuntimeLimits(stray_grace_seconds=1, stray_max=20, backoff_seconds=3600)
    for name in room.warm():
        status = {"status": {"phase": "Failed", "reason": "Broken", "conditions": []}}
        room.kube.patch(Ref(kind=POD, namespace=room.namespace, name=name), status, subresource="status")
    most = 0

    def replaced() -> bool:
        nonlocal most
        most = max(most, len(room.pods()))
        return len(room.warm()) == 1 and most == 3

    room.until(replaced)
    for _ in range(3):
        room.run_pass()
    assert most == len(room.pods()) == 3
    assert len(room.warm()) == 1
    assert room.rows("select count(*) as n from orca.runtime_pods where reason = 'Failed'") == [{"n": 1}]
    assert "2 of 3 cannot become Ready: ended" in room.status()["message"]


def test_pods_that_are_evicted_are_replaced_at_once(room: Room) -> None:
    room.fill()
    room.limits = RuntimeLimits(stray_grace_seconds=1, stray_max=20, backoff_seconds=3600)
    taken = room.launch()
    room.until(lambda: len(room.warm()) == 3)
    first = {*room.warm(), taken.pod}
    evicted = {"status": {"phase": "Failed", "reason": "Evicted", "conditions": []}}
    for name in first:
        room.kube.patch(Ref(kind=POD, namespace=room.namespace, name=name), evicted, subresource="status")
    room.until(lambda: len(room.warm() - first) == 3)
    room.until(lambda: {room.reason(name) for name in first} == {"Evicted"})
    assert room.runtime(taken.id)["reason"] == "Evicted"
    assert "Evicted" in room.events()


def test_pods_of_a_node_that_is_lost_are_replaced_at_once(room: Room, nodes: Callable[[str], None]) -> None:
    def on(node: str) -> set[str]:
        return {name for name, pod in room.pods().items() if pod["spec"].get("nodeName") == node}

    nodes("lost-1")
    room.make_environment()
    room.make_pool(size=2, nodeSelector={"of": room.namespace}, affinity={})
    room.until(lambda: len(room.warm()) == 2)
    taken = room.launch()
    room.until(lambda: len(room.warm()) == 2)
    first = {*room.warm(), taken.pod}
    assert on("lost-1") == first
    # The node goes: Kubernetes itself would call its Pods Ready for a minute yet.
    nodes("lost-2")
    room.kube.delete(Ref(kind=NODE, name="lost-1"))
    room.until(lambda: {room.reason(name) for name in first} == {"NodeLost"} and len(room.warm()) == 2)
    assert room.runtime(taken.id)["reason"] == "NodeLost"
    assert on("lost-2") == room.warm() == set(room.pods())
    assert "its node lost-1 is gone" in room.events()["NodeLost"]
    # The next one falls silent: its Pods are not Ready any more, and nobody is there to end them.
    second = room.warm()
    nodes("lost-3")
    silence(room, "lost-2")
    room.run_pass()
    assert room.warm() == second - {name for name in second if not room.is_ready(room.pod(name))}
    room.limits = replace(room.limits, node_lost_seconds=1)
    room.until(lambda: {room.reason(name) for name in second} == {"NodeLost"} and len(room.warm()) == 2)
    assert on("lost-3") == room.warm() == set(room.pods())


def silence(room: Room, node: str) -> None:
    """As when its kubelet dies: kwok lets go of it, and what the node controller then says is said at once."""
    ref = Ref(kind=NODE, name=node)
    room.kube.patch(ref, {"metadata": {"annotations": {"kwok.x-k8s.io/node": None}}})
    unknown = {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}
    moment = f"{datetime.now(UTC):%FT%TZ}"
    condition = {**unknown, "lastHeartbeatTime": moment, "lastTransitionTime": moment}
    room.kube.patch(ref, {"status": {"conditions": [condition]}}, subresource="status")
    unready = {"status": {"conditions": [{"type": "Ready", "status": "False"}]}}
    for name in room.warm():
        room.kube.patch(Ref(kind=POD, namespace=room.namespace, name=name), unready, subresource="status")


def test_a_pod_that_the_api_server_refuses_is_said_and_rendered_anew(room: Room) -> None:
    room.make_environment()
    room.make_pool(size=1, tolerations=[{"key": "not a key", "operator": "Exists"}])
    room.until(lambda: "refused" in room.status().get("message", ""))
    assert room.counts()[2].startswith("1 of 1 cannot become Ready: refused: Pod is invalid: spec.tolerations")
    room.make_pool(size=1, tolerations=[])
    room.until(lambda: len(room.warm()) == 1)
    assert {row["reason"] for row in room.rows("select reason from orca.runtime_pods")} >= {"Refused", None}
