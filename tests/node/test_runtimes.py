"""Runtime pools on a real node: a taken warm Pod's secret is read in its container, and a culled runtime's container is gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from orca_infra.kube.client import Kube
from orca_infra.kube.kinds import EVENT, NAMESPACE, NODE, POD, RUNTIME_POOL, Ref
from orca_infra.kube.labels import STACK_LABEL
from orca_infra.log import make_log
from orca_infra.loop.cluster_passes import RuntimePasses
from orca_infra.runtimes.launch import LaunchHands, LaunchRequest, launch
from orca_infra.settings import read_settings
from orca_infra.stack.engine import Engine
from orca_infra.stack.operations import RecordedEngine
from orca_infra.surroundings import open_surroundings
from orca_infra.testing.cluster import TestCluster
from orca_infra.testing.definitions import define_runtimes
from orca_infra.testing.node import IMAGE, RealNode
from orca_infra.testing.node_secrets import percentile, wait_for_secrets

LAUNCHES = 30
#: The kubelet syncs within its period (a minute, and up to half as much again) whatever happens: of so many launches one
#: would be read later than this if none were hastened.
READ_SECONDS = 40.0
BACKOFF_SECONDS = 2


@dataclass
class Room:
    passes: RuntimePasses
    launching: LaunchHands
    kube: Kube
    namespace: str
    wait: Callable[..., None]

    def make_pool(self, name: str, **spec: Any) -> None:
        """An environment of that name, too, and its Pods are warm when this returns."""
        self.apply_pool(name, **spec)
        self.until(lambda: self.warm(name) == spec["size"], 90)

    def apply_pool(self, name: str, image: str = IMAGE, **spec: Any) -> None:
        resources = {"default": {"requests": {"cpu": "1m", "memory": "1Mi"}}}
        environment = {"dockerImage": image, "title": name, "resourcesRanges": resources}
        pool = {"environment": name, "burningRate": 1.0, **spec}
        for kind, given in (("RuntimeEnvironment", environment), ("RuntimePool", pool)):
            metadata = {"name": name, "namespace": self.namespace}
            item = {"apiVersion": "datalayer.io/v1", "kind": kind, "metadata": metadata, "spec": given}
            self.kube.apply(item, manager="test")

    def message(self, pool: str) -> str:
        found = self.kube.get(Ref(kind=RUNTIME_POOL, namespace=self.namespace, name=pool))
        return str(((found or {}).get("status") or {}).get("message", ""))

    def uids(self) -> set[str]:
        """Of the Pods that exist."""
        return {item["metadata"]["uid"] for item in self.kube.list(POD, namespace=self.namespace).items}

    def warm(self, pool: str) -> int:
        query = (
            "select count(*)::int as n from orca.runtime_pods"
            " where pool = %(p)s and ready_at is not null and taken_at is null and ending_reason is null"
        )
        return int(self.rows(query, p=pool)[0]["n"])

    def rows(self, query: Any, **parameters: Any) -> list[dict[str, Any]]:
        with self.launching.database.snapshot() as transaction:
            return transaction.dicts(query, parameters)

    def until(self, predicate: Callable[[], object], seconds: float = 60) -> None:
        def pass_and_look() -> object:
            self.passes.run()
            return predicate()

        self.wait(pass_and_look, seconds, "passes did not come to it")

    def container_of(self, pod: str) -> str:
        found = self.kube.get(Ref(kind=POD, namespace=self.namespace, name=pod))
        assert found is not None
        return str(found["status"]["containerStatuses"][0]["containerID"]).removeprefix("containerd://")


@pytest.fixture
def room(
    cluster: TestCluster,
    node: RealNode,
    namespace: str,
    database_url: str,
    tmp_path: Any,
    wait_until: Callable[..., None],
) -> Iterator[Room]:
    (tmp_path / "passphrase").write_text("a passphrase for tests")
    (tmp_path / "state").mkdir()
    environment = {
        "ORCA_DB": database_url,
        "ORCA_HOME": str(tmp_path / "home"),
        "ORCA_TOKEN_KEY": "0123456789abcdef0123456789abcdef",
        "PULUMI_BACKEND_URL": (tmp_path / "state").as_uri(),
        "PULUMI_CONFIG_PASSPHRASE_FILE": str(tmp_path / "passphrase"),
        "ORCA_RUNTIMES_NAMESPACE": namespace,
        "ORCA_RUNTIMES_PULL_SECONDS": "1",
        "ORCA_RUNTIMES_BACKOFF_SECONDS": str(BACKOFF_SECONDS),
        "KUBECONFIG": str(cluster.kubeconfig),
    }
    surroundings = open_surroundings(read_settings(environment), say=lambda _: None)
    log = make_log(form="text")
    recorded = RecordedEngine(
        Engine(surroundings.engine, {"KUBECONFIG": str(cluster.kubeconfig)}),
        surroundings.database,
        backend_url=surroundings.engine.backend_url,
        verify=lambda: None,
        deadline_seconds=300,
    )
    with Kube.connect(kubeconfig=cluster.kubeconfig) as kube:
        define_runtimes(kube)
        labels = {STACK_LABEL: surroundings.stack_id}
        kube.patch(Ref(kind=NAMESPACE, name=namespace), {"metadata": {"labels": labels}})
        passes = RuntimePasses(surroundings, kube, recorded, verify=lambda: None, log=log)
        launching = LaunchHands(
            database=surroundings.database, kube=kube, namespace=namespace, stack_id=surroundings.stack_id, log=log
        )
        yield Room(passes, launching, kube, namespace, wait_until)
    surroundings.close()


def test_a_taken_pods_secret_is_read_in_its_container_at_once(room: Room, capsys: pytest.CaptureFixture[str]) -> None:
    room.make_pool("python", size=LAUNCHES)
    from_call, from_answer = [], []
    for number in range(LAUNCHES):
        token = f"secret number {number}"
        called = time.time()
        taken = launch(
            room.launching, LaunchRequest(environment="python", user=f"user-{number}", secrets={"TOKEN": token})
        )
        answered = time.time()
        assert taken.warm
        read = wait_for_secrets(room.kube, room.namespace, taken.pod)
        assert read.values == {"TOKEN": token}
        from_call.append(read.at - called)
        from_answer.append(read.at - answered)
    with capsys.disabled():
        print(f"\nsecret read in the container, {LAUNCHES} launches on warm Pods of a real node:")
        for name, seconds in (("from the call", from_call), ("from its answer", from_answer)):
            figures = [f"{what} {percentile(seconds, part) * 1000:.0f} ms" for what, part in PARTS.items()]
            print(f"  {name}: {', '.join(figures)}")
    assert max(from_call) < READ_SECONDS


PARTS = {"p50": 0.5, "p99": 0.99, "maximum": 1.0}


def test_a_culled_runtimes_container_is_gone(room: Room, node: RealNode) -> None:
    room.make_pool("brief", size=1, cull={"seconds": 3})
    told = [one["message"] for one in room.kube.list(EVENT, namespace=room.namespace).items]
    assert any("born" in message for message in told)
    assert not any("ContainerCreating" in message for message in told)  # that is no failure
    taken = launch(room.launching, LaunchRequest(environment="brief", user="jane", secrets={"TOKEN": "t"}))
    container = room.container_of(taken.pod)
    assert container in node.containers()
    ended = "select reason, credits, extract(epoch from ended_at - assigned_at) as seconds from orca.runtimes where ended_at is not null"
    room.until(lambda: room.rows(ended))
    [row] = room.rows(ended)
    assert row["reason"] == "Culled"
    assert 3 <= row["credits"] < 10
    assert container not in node.containers()
    assert room.kube.get(Ref(kind=POD, namespace=room.namespace, name=taken.pod)) is None
    room.kube.patch(Ref(kind=RUNTIME_POOL, namespace=room.namespace, name="brief"), {"spec": {"size": 0}})


def test_what_somebody_deletes_has_not_failed_though_its_kubelet_says_so_first(room: Room) -> None:
    room.make_pool("kept", size=2)
    taken = launch(room.launching, LaunchRequest(environment="kept", user="jane"))
    room.until(lambda: room.warm("kept") == 2)
    for pod in room.kube.list(POD, namespace=room.namespace).items:
        ref = Ref(kind=POD, namespace=room.namespace, name=pod["metadata"]["name"])
        assert room.kube.delete(ref, grace_seconds=1)
    ended = "select name, reason from orca.runtime_pods where ended_at is not null"
    room.until(lambda: len(room.rows(ended)) == 3)
    assert {row["reason"] for row in room.rows(ended)} == {"Vanished"}
    assert room.rows("select reason from orca.runtimes where id = %(i)s", i=taken.id) == [{"reason": "Vanished"}]
    room.until(lambda: room.warm("kept") == 2)


def test_an_image_that_never_pulls_is_replaced_one_at_a_time_and_what_finds_no_node_is_held(room: Room) -> None:
    """Field case W2, with a kubelet that really cannot pull and a scheduler that really finds no node."""
    room.apply_pool("w2", "registry.invalid/none:1", size=3)
    failed = "select ending_at, ended_at from orca.runtime_pods where reason = 'ImagePull' order by ending_at"

    def looks() -> bool:
        assert len(room.uids()) <= 3
        assert room.warm("w2") == 0
        ending = "select from orca.runtime_pods where ending_reason is not null and ended_at is null"
        assert len(room.rows(ending)) <= 1
        return len(room.rows(failed)) == 2

    room.until(looks, 180)
    assert "of 3 cannot become Ready: ErrImagePull" in room.message("w2") or "ImagePullBackOff" in room.message("w2")
    first, second = room.rows(failed)
    assert (second["ending_at"] - first["ended_at"]).total_seconds() >= BACKOFF_SECONDS
    # Now Pods that could run, if there were a node for them.
    room.apply_pool("w2", size=0, nodeSelector={"of": room.namespace})
    room.until(lambda: not room.uids(), 180)
    room.apply_pool("w2", size=3, nodeSelector={"of": room.namespace})
    room.until(lambda: "3 of 3 cannot become Ready: Unschedulable" in room.message("w2"), 180)
    held = room.uids()
    for _ in range(20):
        room.passes.run()
    assert room.uids() == held
    assert len(held) == 3
    [name] = [item["metadata"]["name"] for item in room.kube.list(NODE).items]
    room.kube.patch(Ref(kind=NODE, name=name), {"metadata": {"labels": {"of": room.namespace}}})
    room.until(lambda: room.warm("w2") == 3, 180)
    assert room.uids() == held
    room.kube.patch(Ref(kind=RUNTIME_POOL, namespace=room.namespace, name="w2"), {"spec": {"size": 0}})
    room.until(lambda: not room.uids(), 180)
