"""What the tests of runtimes share: the two definitions on the test cluster, and a namespace with its passes and launches."""

from __future__ import annotations

import base64
import io
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import yaml  # type: ignore[import-untyped]

from orca_infra.db.connection import Database
from orca_infra.kube.client import Kube
from orca_infra.kube.kinds import EVENT, NAMESPACE, NODE, POD, RUNTIME_POOL, SECRET, Object, Ref
from orca_infra.log import make_log
from orca_infra.record.codec import decode, encode
from orca_infra.record.decided import RuntimesDecided
from orca_infra.runtimes.apply import RuntimeHands, apply
from orca_infra.runtimes.decide import decide
from orca_infra.runtimes.launch import Launch, LaunchHands, LaunchRequest, launch
from orca_infra.runtimes.model import RuntimeLimits, RuntimePlan
from orca_infra.runtimes.observe import observe
from orca_infra.stack.cohorts import Cohorts
from orca_infra.stack.engine import Engine, EngineConfig
from orca_infra.stack.operations import RecordedEngine
from orca_infra.testing.cluster import TestCluster
from orca_infra.testing.definitions import define_runtimes

POOL_FILE = Path(__file__).parents[2] / "data" / "runtime-pool.yaml"
STACK_ID = "astackoftests234"
NODE_LABELS = {
    "role.datalayer.io/runtime": "true",
    "node.datalayer.io/variant": "medium",
    "node.datalayer.io/xpu": "cpu",
}
LIMITS = RuntimeLimits(stray_grace_seconds=1, stray_max=20, start_seconds=60, pull_seconds=0, backoff_seconds=0.2)


@dataclass
class Room:
    """What a test works with: the passes and the launches of one namespace."""

    hands: RuntimeHands
    kube: Kube
    namespace: str
    database: Database
    wait_until: Callable[..., None]
    folder: Path
    kubeconfig: Path
    logged: io.StringIO = field(default_factory=io.StringIO)
    pool_file: Path = POOL_FILE
    node_labels: dict[str, str] = field(default_factory=NODE_LABELS.copy)
    stack_id: str = STACK_ID
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
        kept = decode(encode(RuntimesDecided(snapshot=snapshot, limits=self.limits, plan=plan)))
        assert kept.again() == kept.plan
        apply(plan, self.hands, highest_number=snapshot.highest_number)
        self.passes_made.append(time.monotonic() - began)
        return plan

    def plan(self) -> RuntimePlan:
        """What a pass would do now."""
        snapshot = observe(self.database, self.kube, stack_id=STACK_ID, namespace=self.namespace)
        return decide(snapshot, self.limits)

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
        self.make_secret(name, {"datalayer.io/user": user}, values)

    def make_secret(self, name: str, labels: dict[str, str], values: dict[str, str]) -> None:
        """Returns when a launch sees it, too, which reads Secrets as the API server's cache has them."""
        metadata = {"name": name, "namespace": self.namespace, "labels": labels}
        self.kube.create({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": values})

        def is_cached() -> bool:
            listed = self.kube.list(SECRET, namespace=self.namespace, labels=labels, from_cache=True)
            return any(item["metadata"]["name"] == name for item in listed.items)

        self.wait_until(is_cached, 10)

    def product_environment(self, **more: str) -> dict[str, str]:
        """The variables with which a process of the product works on this very room."""
        with self.database.transaction() as transaction:
            transaction.run(
                "insert into orca.stack_identity (id, family) values (%(id)s, 'test') on conflict do nothing",
                {"id": STACK_ID},
            )
        return {
            **os.environ,
            "ORCA_STACK": "test",
            "ORCA_HOME": str(self.folder / "home"),
            "ORCA_DB": self.database.url,
            "ORCA_TOKEN_KEY": "a key of the tests, 32 bytes long",
            "PULUMI_CONFIG_PASSPHRASE_FILE": str(self.folder / "passphrase"),
            "PULUMI_BACKEND_URL": (self.folder / "state").as_uri(),
            "ORCA_RUNTIMES_NAMESPACE": self.namespace,
            "KUBECONFIG": str(self.kubeconfig),
            **more,
        }

    @contextmanager
    def loops(self, **more: str) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
        """Starts `orca-infra run` on this room, as often as it is called. Passes are an hour apart, unless something hastens them.

        Each loop says what it does in `loop-N.log` of the room's folder; they are killed at the end.
        """
        labels = {"orca.stack": self.stack_id}
        self.kube.patch(Ref(kind=NAMESPACE, name=self.namespace), {"metadata": {"labels": labels}})
        config = self.folder / "orca.toml"
        config.write_text("[pools]\n")
        own = {"ORCA_CONFIG": str(config), "ORCA_RUNTIMES_SCALE_SECONDS": "3600", "ORCA_LOG": "json"}
        environment = self.product_environment(**own, **more)
        command = [str(Path(sys.executable).with_name("orca-infra")), "run"]
        started: list[subprocess.Popen[bytes]] = []

        def start() -> subprocess.Popen[bytes]:
            with (self.folder / f"loop-{len(started)}.log").open("wb") as log:
                started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            return started[-1]

        try:
            yield start
        finally:
            for process in started:
                process.kill()
                process.wait()

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

    @staticmethod
    def is_ready(pod: Object | None) -> bool:
        conditions = ((pod or {}).get("status") or {}).get("conditions") or []
        return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)

    @staticmethod
    def image(pod: Object) -> str:
        return str(pod["spec"]["containers"][0]["image"])

    def counts(self) -> tuple[int, int, str]:
        """What the pool's status says: warm, assigned, message."""
        status = self.status()
        return status.get("warm", 0), status.get("assigned", 0), status.get("message", "")

    def condition(self, type_: str) -> tuple[str, str]:
        """A condition's status and reason."""
        [found] = [one for one in self.status().get("conditions", []) if one["type"] == type_]
        return found["status"], found["reason"]

    def events(self) -> dict[str, str]:
        """The pool's events: the message of each reason."""
        found = self.kube.list(EVENT, namespace=self.namespace).items
        return {one["reason"]: one["message"] for one in found if one["involvedObject"]["kind"] == "RuntimePool"}

    def status(self) -> dict[str, Any]:
        pool = self.kube.get(Ref(kind=RUNTIME_POOL, namespace=self.namespace, name="python-simple-pool"))
        assert pool is not None
        return dict(pool.get("status") or {})


@pytest.fixture(scope="module")
def kube(cluster: TestCluster) -> Iterator[Kube]:
    """The cluster with the two CRDs, and with the labels on its node that the pool's affinity asks for."""
    with Kube.connect(kubeconfig=cluster.kubeconfig) as kube:
        define_runtimes(kube)
        label_node(kube, NODE_LABELS)
        yield kube


def label_node(kube: Kube, labels: dict[str, str] | dict[str, None]) -> None:
    kube.patch(Ref(kind=NODE, name="node-1"), {"metadata": {"labels": labels}})


@pytest.fixture
def nodes(kube: Kube, namespace: str) -> Iterator[Callable[[str], None]]:
    """Makes further nodes, on which only Pods are that ask for `of: <namespace>`."""
    made = []

    def make(name: str) -> None:
        made.append(name)
        first = kube.get(Ref(kind=NODE, name="node-1"))
        assert first is not None
        metadata = {
            "name": name,
            "annotations": {"kwok.x-k8s.io/node": "fake"},
            "labels": {"kubernetes.io/hostname": name, "of": namespace},
        }
        status = {key: first["status"][key] for key in ("capacity", "allocatable", "addresses", "nodeInfo")}
        kube.create({"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": status}, kind=NODE)

    yield make
    for name in made:
        kube.delete(Ref(kind=NODE, name=name))


@contextmanager
def room_in(namespace: str, cluster: TestCluster, kube: Kube, url: str, folder: Path, wait: Any) -> Iterator[Room]:
    (folder / "passphrase").write_text("a passphrase for tests")
    (folder / "state").mkdir()
    backend_url = (folder / "state").as_uri()
    config = EngineConfig(backend_url=backend_url, passphrase_file=folder / "passphrase", folder=folder / "engine")
    database = Database(url)
    logged = io.StringIO()
    log = make_log(logged, form="json")
    recorded = RecordedEngine(
        Engine(config, {"KUBECONFIG": str(cluster.kubeconfig)}),
        database,
        backend_url=backend_url,
        verify=lambda: None,
        deadline_seconds=300,
    )
    cohorts = Cohorts("runtimes", "test", STACK_ID, database=database, engine=recorded, log=log)
    hands = RuntimeHands(database=database, kube=kube, cohorts=cohorts, stack_id=STACK_ID, verify=lambda: None, log=log)
    try:
        yield Room(hands, kube, namespace, database, wait, folder, cluster.kubeconfig, logged)
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
