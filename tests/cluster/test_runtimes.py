"""Runtime pools on a real API server, with the real engine: warm Pods, launches, secrets, refills and ends."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import yaml  # type: ignore[import-untyped]

from orca_infra.db.connection import Database
from orca_infra.errors import OutcomeUnknown, Refused
from orca_infra.kube.client import Kube
from orca_infra.kube.kinds import (
    CRD,
    NODE,
    POD,
    RUNTIME_POOL,
    SECRET,
    Object,
    Ref,
)
from orca_infra.log import make_log
from orca_infra.runtimes.apply import RuntimeHands, apply
from orca_infra.runtimes.crds import runtime_environment_crd, runtime_pool_crd
from orca_infra.runtimes.decide import decide
from orca_infra.runtimes.launch import Launch, LaunchHands, LaunchRequest, launch
from orca_infra.runtimes.living import end_runtime, list_runtimes
from orca_infra.runtimes.model import Environment, Pool, RuntimeLimits, RuntimePlan
from orca_infra.runtimes.observe import SQL, observe
from orca_infra.runtimes.render import render_warm
from orca_infra.runtimes.rows import note_pod, prune, record_pod
from orca_infra.stack.cohorts import Cohorts
from orca_infra.stack.engine import Engine, EngineConfig
from orca_infra.stack.operations import RecordedEngine
from orca_infra.testing.cluster import TestCluster

POOL_FILE = Path(__file__).parents[3] / "shared" / "data" / "runtime-pool.yaml"
STACK_ID = "astackoftests234"
NODE_LABELS = {
    "role.datalayer.io/runtime": "true",
    "node.datalayer.io/variant": "medium",
    "node.datalayer.io/xpu": "cpu",
}
SELECTOR = NODE_LABELS
LIMITS = RuntimeLimits(stray_grace_seconds=1, stray_max=20, start_seconds=60, pull_seconds=0, backoff_seconds=0.2)


@dataclass
class Room:
    """What a test works with: the passes and the launches of one namespace."""

    hands: RuntimeHands
    kube: Kube
    namespace: str
    database: Database
    wait_until: Callable[..., None]
    limits: RuntimeLimits = LIMITS
    passes_made: list[float] = field(default_factory=list)

    @property
    def launching(self) -> LaunchHands:
        return LaunchHands(
            database=self.database,
            kube=self.kube,
            namespace=self.namespace,
            stack_id=STACK_ID,
            log=self.hands.log,
        )

    def run_pass(self) -> RuntimePlan:
        began = time.monotonic()
        snapshot = observe(self.database, self.kube, stack_id=STACK_ID, namespace=self.namespace)
        plan = decide(snapshot, self.limits)
        apply(plan, self.hands, highest_number=snapshot.highest_number)
        self.passes_made.append(time.monotonic() - began)
        return plan

    def until(self, predicate: Callable[[], object], seconds: float = 30) -> None:
        """Make passes until something is true."""

        def pass_and_look() -> object:
            self.run_pass()
            return predicate()

        self.wait_until(pass_and_look, seconds)

    def fill(self, *, image: str = "registry.example/runtime:1", size: int = 3) -> None:
        """The pool of the shared file in this namespace, its environment, and its Pods Ready."""
        self.make_environment(image)
        self.make_pool(size=size)
        self.until(lambda: len(self.warm()) == size)

    def make_pool(self, **spec: Any) -> None:
        pool = yaml.safe_load(POOL_FILE.read_text())
        pool["metadata"]["namespace"] = self.namespace
        pool["spec"].update(spec)
        self.kube.apply(pool, manager="test", force=True)

    def make_environment(self, image: str = "registry.example/runtime:1", name: str = "python-simple-env") -> None:
        default = {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"memory": "1Gi"}}
        spec = {"dockerImage": image, "title": "Python", "resourcesRanges": {"default": default}}
        metadata = {"name": name, "namespace": self.namespace}
        self.kube.apply(
            {"apiVersion": "datalayer.io/v1", "kind": "RuntimeEnvironment", "metadata": metadata, "spec": spec},
            manager="test",
            force=True,
        )

    def user_secret(self, name: str, user: str, **values: str) -> None:
        metadata = {"name": name, "namespace": self.namespace, "labels": {"datalayer.io/user": user}}
        self.kube.create({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": values})

    def launch(self, user: str = "jane", **more: Any) -> Launch:
        return launch(self.launching, LaunchRequest(environment="python-simple-env", user=user, **more))

    def rows(self, query: Any, **parameters: Any) -> list[dict[str, Any]]:
        with self.database.snapshot() as transaction:
            return transaction.dicts(query, parameters)

    def warm(self) -> set[str]:
        """Pods that a launch could take, by their rows."""
        found = self.rows(
            "select name from orca.runtime_pods where ready_at is not null and taken_at is null and ending_reason is null"
        )
        return {row["name"] for row in found}

    def reason(self, pod: str) -> str | None:
        [row] = self.rows("select reason from orca.runtime_pods where name = %(n)s", n=pod)
        return None if row["reason"] is None else str(row["reason"])

    def runtime(self, id_: UUID) -> dict[str, Any]:
        return self.rows("select * from orca.runtimes where id = %(i)s", i=id_)[0]

    def pod(self, name: str) -> Object | None:
        return self.kube.get(Ref(kind=POD, namespace=self.namespace, name=name))

    def pods(self) -> dict[str, Object]:
        found = self.kube.list(POD, namespace=self.namespace).items
        return {item["metadata"]["name"]: item for item in found}

    def secret(self, name: str) -> Object | None:
        return self.kube.get(Ref(kind=SECRET, namespace=self.namespace, name=name))

    def secret_values(self, name: str) -> dict[str, str]:
        secret = self.secret(name)
        assert secret is not None
        return {key: base64.b64decode(value).decode() for key, value in (secret.get("data") or {}).items()}

    def status(self) -> dict[str, Any]:
        pool = self.kube.get(Ref(kind=RUNTIME_POOL, namespace=self.namespace, name="python-simple-pool"))
        assert pool is not None
        return dict(pool.get("status") or {})


def ready(pod: Object | None) -> bool:
    conditions = ((pod or {}).get("status") or {}).get("conditions") or []
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def image(pod: Object) -> str:
    return str(pod["spec"]["containers"][0]["image"])


@pytest.fixture(scope="module")
def kube(cluster: TestCluster, wait_until: Callable[..., None]) -> Iterator[Kube]:
    """The cluster with the two CRDs, and with the labels on its node that the pool's affinity asks for."""
    with Kube.connect(kubeconfig=cluster.kubeconfig) as kube:
        for crd in (runtime_pool_crd(), runtime_environment_crd()):
            kube.apply(crd, manager="test", force=True)
        for crd in (runtime_pool_crd(), runtime_environment_crd()):
            ref = Ref(kind=CRD, name=crd["metadata"]["name"])
            wait_until(lambda ref=ref: conditions_of(kube.get(ref)).get("Established") == "True", 20)
        label_node(kube, NODE_LABELS)
        yield kube


def conditions_of(item: Object | None) -> dict[str, str]:
    return {one["type"]: one["status"] for one in ((item or {}).get("status") or {}).get("conditions") or []}


def label_node(kube: Kube, labels: dict[str, str] | dict[str, None]) -> None:
    kube.patch(Ref(kind=NODE, name="node-1"), {"metadata": {"labels": labels}})


@contextmanager
def room_in(namespace: str, cluster: TestCluster, kube: Kube, url: str, folder: Path, wait: Any) -> Iterator[Room]:
    (folder / "passphrase").write_text("a passphrase for tests")
    (folder / "state").mkdir()
    backend_url = (folder / "state").as_uri()
    config = EngineConfig(backend_url=backend_url, passphrase_file=folder / "passphrase", folder=folder / "engine")
    database = Database(url)
    log = make_log(form="text")
    recorded = RecordedEngine(
        Engine(config, {"KUBECONFIG": str(cluster.kubeconfig)}),
        database,
        backend_url=backend_url,
        verify=lambda: None,
        deadline_seconds=60,
    )
    cohorts = Cohorts("runtimes", "test", STACK_ID, database=database, engine=recorded, log=log)
    hands = RuntimeHands(database=database, kube=kube, cohorts=cohorts, stack_id=STACK_ID, verify=lambda: None, log=log)
    try:
        yield Room(hands, kube, namespace, database, wait)
    finally:
        database.close()


@pytest.fixture
def room(
    cluster: TestCluster, kube: Kube, namespace: str, database_url: str, tmp_path: Path, wait_until: Callable[..., None]
) -> Iterator[Room]:
    with room_in(namespace, cluster, kube, database_url, tmp_path, wait_until) as made:
        yield made


@pytest.fixture
def shared_room(
    cluster: TestCluster, kube: Kube, database_url: str, tmp_path: Path, wait_until: Callable[..., None]
) -> Iterator[Room]:
    """The namespace that the shared file names."""
    name = yaml.safe_load(POOL_FILE.read_text())["metadata"]["namespace"]
    kube.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    with room_in(name, cluster, kube, database_url, tmp_path, wait_until) as made:
        yield made
    cluster.kubectl("delete", "namespace", name, "--wait=false")


# The definitions.


def test_the_api_server_takes_both_definitions_with_all_their_short_names(cluster: TestCluster, kube: Kube) -> None:
    for crd in (runtime_pool_crd(), runtime_environment_crd()):
        found = kube.get(Ref(kind=CRD, name=crd["metadata"]["name"]))
        assert found is not None
        conditions = conditions_of(found)
        assert conditions["NamesAccepted"] == conditions["Established"] == "True"
        assert conditions.get("NonStructuralSchema", "False") == "False"
        assert found["status"]["acceptedNames"]["shortNames"] == crd["spec"]["names"]["shortNames"]
        for short in (*crd["spec"]["names"]["shortNames"], crd["spec"]["names"]["singular"]):
            cluster.kubectl("get", short, "--all-namespaces")


@pytest.mark.parametrize(
    "spec",
    [
        {"size": 10001},
        {"size": -1},
        {"size": 1.5},
        {"size": None},
        {"environment": ""},
        {"environment": None},
        {"burningRate": -0.1},
        {"cull": {"seconds": 0}},
    ],
)
def test_a_pool_that_cannot_be_is_refused(room: Room, spec: dict[str, Any]) -> None:
    pool = {"environment": "e", "size": 1, **spec}
    pool = {key: value for key, value in pool.items() if value is not None}
    metadata = {"name": "p", "namespace": room.namespace}
    with pytest.raises(Refused, match="Invalid value|Required value"):
        room.kube.create({"apiVersion": "datalayer.io/v1", "kind": "RuntimePool", "metadata": metadata, "spec": pool})


def test_unknown_fields_are_kept_and_a_pool_can_be_scaled(cluster: TestCluster, room: Room) -> None:
    # As kubectl applies it: strict checking refuses nothing, since a newer version's fields are no slips.
    room.make_pool(size=0, later={"a": 1}, tolerations=[{"key": "k", "operator": "Exists"}])
    ref = Ref(kind=RUNTIME_POOL, namespace=room.namespace, name="python-simple-pool")
    pool = room.kube.get(ref)
    assert pool is not None
    assert pool["spec"]["later"] == {"a": 1}
    cluster.kubectl("scale", "rtp", "python-simple-pool", "--replicas=2", "-n", room.namespace)
    scaled = room.kube.get(ref)
    assert scaled is not None
    assert scaled["spec"]["size"] == 2


# The issue's own words.


def test_the_shared_pool_applied_unchanged_keeps_three_warm_pods_and_a_launch_takes_one(
    cluster: TestCluster, shared_room: Room, capsys: pytest.CaptureFixture[str]
) -> None:
    room = shared_room
    cluster.kubectl("apply", "-f", str(POOL_FILE))
    room.run_pass()
    assert room.status()["message"] == "environment python-simple-env is missing: no Pod is born"
    assert room.pods() == {}

    room.make_environment()
    room.until(lambda: len(room.warm()) == 3)
    room.run_pass()
    pods = room.pods()
    assert sorted(pods) == [f"orca-runtime-python-simple-pool-{number}" for number in (1, 2, 3)]
    assert all(ready(pod) for pod in pods.values())
    assert room.status() == {"warm": 3, "assigned": 0, "message": ""}
    before = room.rows("select * from orca.engine_operations")
    assert room.run_pass() == RuntimePlan()
    assert room.rows("select * from orca.engine_operations") == before

    room.user_secret("b-second", "jane", TOKEN="from b", B="b")
    room.user_secret("a-first", "jane", TOKEN="from a", A="a")
    room.user_secret("other", "john", JOHN="john's")
    began = time.monotonic()
    taken = room.launch(secrets={"SENT": "s3cr3t-sent", "B": "sent wins"})
    launch_seconds = time.monotonic() - began
    assert (taken.warm, taken.namespace, taken.pod in pods) == (True, "datalayer-runtimes", True)
    assert taken.address == pods[taken.pod]["status"]["podIP"]
    assert taken.expires_at is not None
    assert room.secret_values(taken.pod) == {"A": "a", "B": "sent wins", "TOKEN": "from b", "SENT": "s3cr3t-sent"}
    secret = room.secret(taken.pod)
    assert secret is not None
    [owner] = secret["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("Pod", pods[taken.pod]["metadata"]["uid"])

    def touched() -> str:
        pod = room.pod(taken.pod)
        assert pod is not None
        annotations = pod["metadata"]["annotations"]
        assert annotations["orca.runtime"] == str(taken.id)
        return str(annotations["orca.touched"])

    first = touched()
    room.wait_until(lambda: touched() != first, 5)

    room.until(lambda: len(room.warm()) == 3)
    room.run_pass()
    assert max(room.pods()) == "orca-runtime-python-simple-pool-4"
    assert room.status() == {"warm": 3, "assigned": 1, "message": ""}
    shown = cluster.kubectl("get", "rtp", "-n", room.namespace).splitlines()
    assert shown[0].split() == ["NAME", "ENVIRONMENT", "SIZE", "WARM", "ASSIGNED", "BURNING", "RATE", "MESSAGE", "AGE"]
    assert shown[1].split()[:6] == ["python-simple-pool", "python-simple-env", "3", "3", "1", "0.01"]

    tables = room.rows("select table_name as t from information_schema.tables where table_schema = 'orca'")
    stored = "".join(str(room.rows(f"select x::text from orca.{table['t']} x")) for table in tables)
    assert taken.pod in stored
    for value in ("s3cr3t-sent", "from b", base64.b64encode(b"s3cr3t-sent").decode()):
        assert value not in stored

    assert end_runtime(room.launching, taken.id)
    assert not any(runtime.ending_reason is None for runtime in list_runtimes(room.database))
    room.until(lambda: room.runtime(taken.id)["ended_at"])
    assert room.pod(taken.pod) is None
    assert room.secret(taken.pod) is None
    ended = room.runtime(taken.id)
    assert ended["reason"] == room.reason(taken.pod) == "Stopped"
    lived = (ended["ended_at"] - ended["assigned_at"]).total_seconds()
    assert ended["credits"] == pytest.approx(0.01 * lived)
    assert not end_runtime(room.launching, taken.id)
    assert list_runtimes(room.database) == []
    prune(room.database, 0)
    assert room.rows("select from orca.runtimes") == []
    with capsys.disabled():
        passes = ", ".join(f"{seconds:.2f}" for seconds in room.passes_made)
        print(f"\na warm launch took {1000 * launch_seconds:.0f} ms; passes took {passes} s")


# Launches.


def test_twenty_launches_at_once_never_take_one_pod_twice_and_the_rest_start_cold(room: Room) -> None:
    room.fill()
    warm = room.warm()
    barrier = threading.Barrier(20)

    def one(number: int) -> Launch:
        barrier.wait()
        return room.launch(f"user-{number}", secrets={"WHO": str(number)})

    with ThreadPoolExecutor(20) as threads:
        launches = list(threads.map(one, range(20)))
    assert len({one.pod for one in launches}) == len({one.id for one in launches}) == 20
    assert {one.pod for one in launches if one.warm} == warm
    for number, made in enumerate(launches):
        assert room.secret_values(made.pod) == {"WHO": str(number)}

    cold = [one for one in launches if not one.warm]
    room.until(lambda: all(ready(room.pod(one.pod)) for one in cold))
    room.until(lambda: all((room.secret(one.pod) or {})["metadata"].get("ownerReferences") for one in cold))
    room.until(lambda: len(room.warm()) == 3)
    for made in cold:
        pod, secret = room.pod(made.pod), room.secret(made.pod)
        assert pod is not None
        assert secret is not None
        assert secret["metadata"]["ownerReferences"][0]["uid"] == pod["metadata"]["uid"]
        assert "orca.pool" not in pod["metadata"]["labels"]
        row = room.runtime(made.id)
        assert (row["warm"], row["burning_rate"]) == (False, 0.01)
    assert len(list_runtimes(room.database)) == 20
    [mine] = list_runtimes(room.database, "user-7")
    assert mine.pod == launches[7].pod
    time.sleep(LIMITS.stray_grace_seconds)
    assert room.run_pass().strays == ()


def test_one_key_gives_one_runtime_however_often_and_to_its_user_alone(room: Room) -> None:
    room.fill()
    barrier = threading.Barrier(8)

    def one(_: int) -> Launch:
        barrier.wait()
        return room.launch(idempotency_key="k", secrets={"A": "1"})

    with ThreadPoolExecutor(8) as threads:
        launches = set(threads.map(one, range(8)))
    [first] = launches
    assert room.launch(idempotency_key="k") == first
    other = room.launch("john", idempotency_key="k")
    assert (other.id, other.pod) != (first.id, first.pod)
    assert len(room.warm()) == 1
    with pytest.raises(Refused, match="stands for a runtime of environment python-simple-env"):
        launch(room.launching, LaunchRequest(environment="x", user="jane", idempotency_key="k"))
    cold = room.launch("jo", idempotency_key="c", requests={"cpu": "2"})
    assert room.launch("jo", idempotency_key="c", requests={"cpu": "2"}) == cold
    end_runtime(room.launching, first.id)
    with pytest.raises(Refused, match=f"runtime {first.id} has ended: Stopped"):
        room.launch(idempotency_key="k")


def test_a_launch_takes_what_fits_the_smallest_first_and_else_starts_cold(room: Room) -> None:
    room.fill(size=1)
    pool = yaml.safe_load(POOL_FILE.read_text())
    pool["metadata"] = {"name": "large", "namespace": room.namespace}
    pool["spec"] |= {"size": 2, "burningRate": 5, "resources": {"requests": {"cpu": "4"}}, "cull": {"seconds": 50}}
    room.kube.create(pool)
    room.until(lambda: len(room.warm()) == 3)
    assert room.launch(requests={"cpu": "500m"}).pod.startswith("orca-runtime-python-simple-pool-")
    large = room.launch(requests={"cpu": "3500m"}, node_selector=SELECTOR)
    assert large.pod.startswith("orca-runtime-large-")
    assert room.runtime(large.id)["burning_rate"] == 5
    for misfit in ({"requests": {"memory": "2Gi"}}, {"node_selector": {"a": "b"}}, {"pool": "python-simple-pool"}):
        assert not room.launch(**misfit).warm
    named = room.launch(pool="large", requests={"cpu": "8"})
    assert not named.warm
    assert room.runtime(named.id)["burning_rate"] == 5
    with pytest.raises(Refused, match="no pool that is called nowhere"):
        room.launch(pool="nowhere")
    with pytest.raises(Refused, match="no environment x"):
        launch(room.launching, LaunchRequest(environment="x", user="jane"))
    room.make_environment(name="lonely")
    with pytest.raises(Refused, match="lonely has no pool"):
        launch(room.launching, LaunchRequest(environment="lonely", user="jane"))
    with pytest.raises(Refused, match="cpu must be a quantity"):
        room.launch(requests={"cpu": "lots"})
    room.run_pass()
    pod = room.pod(named.pod)
    assert pod is not None
    assert pod["spec"]["containers"][0]["resources"]["requests"]["cpu"] == "8"


def test_secrets_that_are_too_much_or_misnamed_are_refused_before_anything_is_taken(room: Room) -> None:
    room.fill(size=1)
    room.user_secret("half", "jane", A="x" * (1 << 19))
    for sent in ({"B": "y" * (1 << 19) + "z"}, {"not a key": "v"}, {"..": "v"}, {"": "v"}):
        with pytest.raises(Refused) as refused:
            room.launch(secrets=sent)
        assert "yyy" not in str(refused.value)
    assert len(room.warm()) == 1
    taken = room.launch(secrets={"B": "y" * (1 << 19)})
    assert taken.warm
    assert len(room.secret_values(taken.pod)["B"]) == 1 << 19


# Pods that change, go away or cannot become Ready.


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
    assert image(pod) == "registry.example/runtime:1"
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
    born = {name for name in room.warm() if image(now[name]) == "registry.example/runtime:2"}
    assert len(born) == 2
    assert image(now[first.pod]) == "registry.example/runtime:1"
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


def test_a_label_taken_off_by_hand_loses_nothing(room: Room) -> None:
    room.fill(size=1)
    [name] = room.warm()
    room.kube.patch(Ref(kind=POD, namespace=room.namespace, name=name), {"metadata": {"labels": {"orca.role": None}}})
    assert room.run_pass() == RuntimePlan()
    taken = room.launch()
    assert taken.pod == name
    end_runtime(room.launching, taken.id)
    room.until(lambda: room.reason(name) == "Stopped")


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
        status = {"status": {"phase": "Failed", "reason": "Evicted", "conditions": []}}
        room.kube.patch(Ref(kind=POD, namespace=room.namespace, name=name), status, subresource="status")
    most = 0
    for _ in range(6):
        room.run_pass()
        most = max(most, len(room.pods()))
    assert most == 3
    assert len(room.warm()) == 1
    assert room.rows("select count(*) as n from orca.runtime_pods where reason = 'Failed'") == [{"n": 1}]
    assert "2 of 3 cannot become Ready: ended" in room.status()["message"]


def test_a_pod_that_the_api_server_refuses_is_said_and_rendered_anew(room: Room) -> None:
    room.make_environment()
    room.make_pool(size=1, nodeSelector={"not a label": "x"})
    room.until(lambda: "refused" in room.status().get("message", ""))
    room.make_pool(size=1, nodeSelector={})
    room.until(lambda: len(room.warm()) == 1)
    assert {row["reason"] for row in room.rows("select reason from orca.runtime_pods")} >= {"Refused", None}


# Ends.


def test_a_runtime_is_culled_at_its_time_though_its_pool_is_gone(room: Room) -> None:
    room.make_environment()
    room.make_pool(size=1, burningRate=2, cull={"seconds": 1})
    room.until(lambda: len(room.warm()) == 1)
    taken = room.launch(secrets={"A": "1"})
    room.kube.delete(Ref(kind=RUNTIME_POOL, namespace=room.namespace, name="python-simple-pool"))
    due = room.run_pass().next_due_at
    assert due is None or due == taken.expires_at
    room.until(lambda: room.reason(taken.pod) == "Culled")
    ended = room.runtime(taken.id)
    assert ended["credits"] == pytest.approx(2.0)
    assert room.pod(taken.pod) is None
    assert room.secret(taken.pod) is None


def test_a_launch_whose_process_died_is_completed_by_its_retry_or_else_abandoned(room: Room) -> None:
    room.fill(size=2)
    for user in ("jane", "john"):
        room.launch(user, idempotency_key="k", secrets={"A": "first"})
    with room.database.transaction() as transaction:
        transaction.run("update orca.runtimes set secret_made_at = null")
        transaction.run("update orca.runtime_pods set taken_at = now() - interval '1 hour' where taken_at is not null")
    again = room.launch("jane", idempotency_key="k", secrets={"B": "second"})
    assert room.secret_values(again.pod) == {"B": "second"}
    room.until(lambda: room.rows("select from orca.runtimes where reason = 'Abandoned' and user_name = 'john'"))
    assert [runtime.user for runtime in list_runtimes(room.database)] == ["jane"]


def test_what_no_row_wants_is_a_stray_and_what_a_watch_shows_can_be_taken_at_once(room: Room) -> None:
    room.make_environment()
    room.make_pool(size=1)
    room.run_pass()
    room.wait_until(lambda: any(ready(pod) for pod in room.pods().values()))
    assert room.warm() == set()
    [pod] = room.pods().values()
    assert note_pod(room.database, pod)
    assert not note_pod(room.database, pod)
    assert room.launch().warm
    labels = {"orca.stack": STACK_ID, "orca.role": "runtime"}
    for labelled in (labels, {"orca.stack": STACK_ID}, {**labels, "orca.stack": "another"}):
        metadata = {"name": f"s-{len(room.kube.list(SECRET, namespace=room.namespace).items)}", "labels": labelled}
        room.kube.create({"apiVersion": "v1", "kind": "Secret", "metadata": {**metadata, "namespace": room.namespace}})
    before = len(room.kube.list(SECRET, namespace=room.namespace).items)
    room.until(lambda: len(room.kube.list(SECRET, namespace=room.namespace).items) == before - 1, 10)
    time.sleep(1)
    assert room.run_pass().strays == ()


def test_runtimes_end_though_the_engine_cannot_make_pods(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    room.fill(size=1)
    taken = room.launch()

    def broken() -> None:
        raise OutcomeUnknown("the engine is broken")

    monkeypatch.setattr(room.hands.cohorts, "up", broken)
    end_runtime(room.launching, taken.id)
    for _ in range(2):
        with pytest.raises(OutcomeUnknown, match="the engine is broken"):
            room.run_pass()
        room.wait_until(lambda: room.pod(taken.pod) is None)
    assert room.reason(taken.pod) == "Stopped"
    monkeypatch.undo()
    room.until(lambda: len(room.warm()) == 1)


# Claims, at the same moment as something else.

CLAIM = {
    "namespace": "n",
    "environment": "e",
    "user": "u",
    "key": None,
    "pool": None,
    "requests": "{}",
    "placement": None,
}


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    database = Database(database_url)
    yield database
    database.close()


def wait_in_pool(database: Database, number: int, **pool: Any) -> str:
    """A Pod that waits Ready, by its row alone."""
    given: dict[str, Any] = {"namespace": "n", "name": "p", "uid": "u", "environment": "e", "size": 3}
    environment = Environment(namespace="n", name="e", image="i")
    pod = render_warm(Pool(**{**given, **pool}), environment, number, STACK_ID)
    with database.transaction() as transaction:
        record_pod(transaction, pod, taken=False)
        transaction.run(
            "update orca.runtime_pods set ready_at = now(), uid = %(n)s where name = %(n)s", {"n": pod.name}
        )
    return pod.name


def claim(database: Database, **more: Any) -> str | None:
    with database.transaction() as transaction:
        found = transaction.dicts(SQL["claim"], {**CLAIM, **more})
    return str(found[0]["pod"]) if found else None


def end_waiting(database: Database, name: str) -> int:
    with database.transaction() as transaction:
        return transaction.run(
            SQL["begin_ending"], {"name": name, "reason": "Surplus", "detail": "", "only_waiting": True}
        )


def test_a_pod_taken_at_the_moment_that_it_was_to_end_lives_on(
    database: Database, background: Any, wait_until: Callable[..., None]
) -> None:
    name = wait_in_pool(database, 1)
    with database.transaction() as launching:
        assert launching.dicts(SQL["claim"], CLAIM)[0]["pod"] == name
        ending = background(lambda: end_waiting(database, name))
        wait_until(lambda: blocked(database) == 1)
    ending.join()
    assert ending.result == 0


def test_a_pod_that_ends_at_the_moment_that_it_was_to_be_taken_is_passed_over(database: Database) -> None:
    first, second = wait_in_pool(database, 1), wait_in_pool(database, 2)
    with database.transaction() as passing:
        passing.run(SQL["begin_ending"], {"name": first, "reason": "Surplus", "detail": "", "only_waiting": True})
        assert claim(database) == second
    assert claim(database) is None


def blocked(database: Database) -> int:
    with database.snapshot() as transaction:
        return int(
            transaction.value(
                "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
            )
        )


@pytest.mark.parametrize(
    ("asked", "taken"),
    [
        ({}, "small"),
        ({"requests": '{"cpu": 1000}'}, "small"),
        ({"requests": '{"cpu": 1001}'}, "large"),
        ({"requests": '{"memory": 1}'}, "large"),
        ({"requests": '{"cpu": 4001}'}, None),
        ({"requests": '{"nvidia.com/gpu": 1000}'}, None),
        ({"placement": '{"labels": {"disk": "ssd"}}'}, "large"),
        ({"placement": '{"labels": {}}'}, "small"),
        ({"placement": '{"labels": {"disk": "ssd", "a": "b"}}'}, None),
        ({"pool": "large"}, "large"),
        ({"pool": "large", "requests": '{"cpu": 5000}'}, None),
        ({"environment": "other"}, None),
        ({"namespace": "other"}, None),
    ],
)
def test_what_fits_a_pod(database: Database, asked: dict[str, str], taken: str | None) -> None:
    large = {"requests": {"cpu": "4", "memory": "8Gi"}}
    names = {
        "large": wait_in_pool(database, 1, name="large", resources=large, node_selector={"disk": "ssd"}),
        "small": wait_in_pool(database, 2, name="small", resources={"requests": {"cpu": "1"}}),
    }
    assert claim(database, **asked) == (names[taken] if taken else None)


def test_numbers_go_on_above_what_the_cluster_shows(database: Database) -> None:
    def next_number(seen: int) -> int:
        with database.transaction() as transaction:
            transaction.run(SQL["skip_numbers"], {"seen": seen})
            return int(transaction.value(SQL["next_number"]))

    assert [next_number(seen) for seen in (1, 0, 3, 4, 9, 2)] == [2, 3, 4, 5, 10, 11]
