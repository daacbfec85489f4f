"""What operators reported of run clusters elsewhere, on a real API server: a head that is lost, and capacity that comes late."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from orca_infra.errors import Transient
from orca_infra.kube.client import Kube
from orca_infra.kube.kinds import JOB, NODE, POD, Object, Ref
from orca_infra.kube.labels import ROLE_LABEL, RUN_LABEL
from orca_infra.runs.model import PodPlacement
from orca_infra.testing.cluster import TestCluster
from orca_infra.testing.cluster_faults import FaultyServer

if TYPE_CHECKING:
    from tests.cluster.runs.conftest import Room

_CAPACITY = "orca.testing/capacity-of"


class Hooked:
    """The Kubernetes port of the passes; something happens just before its first delete."""

    def __init__(self, kube: Kube, before_delete: Any) -> None:
        self._kube, self._before_delete = kube, before_delete

    def delete(self, ref: Ref, **more: Any) -> bool:
        hook, self._before_delete = self._before_delete, lambda: None
        hook()
        return self._kube.delete(ref, **more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kube, name)


def pod_of(room: Room, role: str) -> Object | None:
    found = room.kube.list(POD, namespace=room.namespace, labels={ROLE_LABEL: role}).items
    return found[0] if found else None


def phase_of(room: Room, role: str) -> str:
    pod = pod_of(room, role)
    return str(pod["status"].get("phase", "")) if pod else ""


def test_a_driver_that_exits_0_as_its_head_goes_has_lost_its_head_and_all_its_objects_go(room: Room) -> None:
    """R1: the driver said nothing of its run's end, so its exit code says nothing either."""
    room.queue(workers=1, max_starts=1)
    room.until(lambda: phase_of(room, "driver") == phase_of(room, "head") == "Running")
    driver, head = pod_of(room, "driver"), pod_of(room, "head")
    assert driver
    assert head
    room.kube.delete(Ref(kind=POD, namespace=room.namespace, name=head["metadata"]["name"]))
    room.kube.patch(
        Ref(kind=POD, namespace=room.namespace, name=driver["metadata"]["name"]),
        {"metadata": {"annotations": {"orca.testing/complete-after": "0"}}},
    )
    job = Ref(kind=JOB, namespace=room.namespace, name=driver["metadata"]["labels"]["job-name"])

    def is_complete() -> bool:
        found = room.kube.get(job)
        conditions = ((found or {}).get("status") or {}).get("conditions") or []
        return any(c["type"] == "Complete" and c["status"] == "True" for c in conditions)

    room.wait_until(lambda: is_complete() and pod_of(room, "head") is None, 30)
    room.until(lambda: room.rows("select * from orca.run_clusters where ended_at is not null"))
    assert room.rows("select reason from orca.run_clusters") == [{"reason": "HeadLost"}]
    assert room.rows("select state, start, reason from orca.runs") == [
        {"state": "failed", "start": 1, "reason": "HeadLost"}
    ]
    room.wait_until(lambda: not room.objects(), 30)


@contextmanager
def capacity(room: Room) -> Iterator[Any]:
    """Gives what makes the one node fit the Pods that wait for it."""
    [node] = room.kube.list(NODE).items
    ref = Ref(kind=NODE, namespace=None, name=node["metadata"]["name"])
    key = f"{_CAPACITY}-{room.namespace}"
    yield lambda: room.kube.patch(ref, {"metadata": {"labels": {key: "yes"}}})
    room.kube.patch(ref, {"metadata": {"labels": {key: None}}})


def waiting_for_capacity(room: Room) -> tuple[Room, Any]:
    """A run, at its last start, whose driver no node fits; and what makes the passes over it, with other settings."""

    def again(**more: Any) -> Room:
        placement = PodPlacement(node_selector={f"{_CAPACITY}-{room.namespace}": "yes"})
        return room.with_settings(placements=lambda: {"reports": placement}, **more)

    patient = again()
    patient.queue(workers=0, max_starts=1)
    patient.until(lambda: patient.rows("select * from orca.run_clusters where waiting like '%%Unschedulable%%'"))
    assert patient.rows("select ending_reason from orca.run_clusters") == [{"ending_reason": None}]
    return patient, again


def test_capacity_that_comes_as_a_start_is_ended_has_no_driver_run_after_it_was_called_failed(room: Room) -> None:
    """R4: what is there is deleted first, and only once that is confirmed the run is moved."""
    _, again = waiting_for_capacity(room)
    ran: list[str] = []
    with capacity(room) as comes:

        def before_delete() -> None:
            assert room.rows("select state from orca.runs") == [{"state": "running"}], "it was called failed too early"
            comes()
            room.wait_until(lambda: phase_of(room, "driver") == "Running", 30)
            ran.append("it runs, and is to be deleted")

        impatient = again(kube=Hooked(room.kube, before_delete), ORCA_RUN_START_SECONDS="1")

        def has_ended() -> bool:
            state = str(room.rows("select state from orca.runs")[0]["state"])
            assert state == "running" or phase_of(room, "driver") in {"", "Succeeded", "Failed"}
            return state != "running"

        impatient.until(has_ended)
        assert ran
        room.wait_until(lambda: not room.objects(), 30)
        for _ in range(2):
            impatient.passes.run()
        assert room.objects() == []
    assert room.rows("select state, start, reason from orca.runs") == [
        {"state": "failed", "start": 1, "reason": "NeverStarted"}
    ]


def test_a_driver_that_came_to_run_after_its_time_is_left_alone_and_silence_is_no_failure(
    room: Room, cluster: TestCluster, tmp_path: Path
) -> None:
    """R4: its time is over, but not seen to be before it runs; and who hears nothing ends nothing."""
    _, again = waiting_for_capacity(room)
    with (
        FaultyServer(cluster, tmp_path, seed=20261129) as server,
        Kube.connect(kubeconfig=server.kubeconfig) as kube,
        capacity(room) as comes,
    ):
        impatient = again(kube=kube, ORCA_RUN_START_SECONDS="1")
        server.away = True
        with pytest.raises(Transient):
            impatient.passes.run()
        comes()
        room.wait_until(lambda: phase_of(room, "driver") == "Running", 30)
        server.heal()
        for _ in range(2):
            impatient.passes.run()
    assert room.rows("select ending_reason, ended_at, waiting from orca.run_clusters") == [
        {"ending_reason": None, "ended_at": None, "waiting": ""}
    ]
    assert room.rows("select state, start from orca.runs") == [{"state": "running", "start": 1}]
    driver = pod_of(room, "driver")
    assert driver
    assert driver["metadata"]["labels"][RUN_LABEL] == str(room.rows("select id from orca.runs")[0]["id"])
