"""What the crash matrix is tried in: one stack with its loops, one of which dies at a step, and all that they act on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orca_infra.db.connection import Database
from orca_infra.kube.client import Kube
from orca_infra.kube.kinds import JOB, NAMESPACE, POD, SERVICE, Object, Ref
from orca_infra.kube.labels import ROLE_LABEL, STACK_LABEL
from orca_infra.log import make_log
from orca_infra.loop.leader import holder
from orca_infra.loop.passes import PassResult
from orca_infra.loop.run import Loop
from orca_infra.machines.providers.local_cloud import LocalCloud
from orca_infra.process import ProcessId, boot_id, is_alive
from orca_infra.settings import read_settings
from orca_infra.surroundings import Surroundings, open_surroundings
from orca_infra.testing.cluster import TestCluster
from orca_infra.testing.definitions import define_runtimes

PROGRAM = Path(__file__).parent / "die_at.py"
TOML = """
[pools.p]
provider = "local"
image = "registry.example/orca-worker:1"
max_machines = 3
idle_seconds = "1h"
types = [{ type = "small", locations = ["a"] }]
"""


class World:
    """One stack with its loops, its clouds and what is to survive."""

    def __init__(
        self, environment: dict[str, str], kube: Kube, namespaces: tuple[str, str], wait_until: Callable[..., None]
    ) -> None:
        """The namespaces are that of the runs and that of the runtimes."""
        self.environment = environment
        self.surroundings: Surroundings = open_surroundings(read_settings(environment), say=lambda _: None)
        self.kube = kube
        self.wait_until = wait_until
        self.cloud = LocalCloud(self.surroundings.cloud_folder)
        self.runs, self.pods = namespaces

    @property
    def database(self) -> Database:
        return self.surroundings.database

    def rows(self, query: Any, **parameters: Any) -> list[dict[str, Any]]:
        with self.database.transaction() as transaction:
            return transaction.dicts(query, parameters)

    def execute(self, statement: Any, **parameters: Any) -> None:
        with self.database.transaction() as transaction:
            transaction.run(statement, parameters)

    def loop(self) -> Loop:
        """A new one, which remembers nothing."""
        return Loop(self.surroundings, make_log(form="json"))

    def pass_with(self, loop: Loop) -> PassResult:
        """One pass, once the engines of earlier loops have ended, and nothing on the cluster is coming or going away."""
        self.wait_until(self.is_quiet, 60, "engines and deletions to end")
        self.wait_until(lambda: not holder(self.surroundings.url), 10, "Postgres to notice the loop's end")
        return loop.run_once()

    def settle(self, loop: Loop, until: Callable[[], object]) -> None:
        self.wait_until(lambda: self.pass_with(loop) and until(), 60, "what is there before")

    def die(self, scope: str, step: str) -> None:
        standing = len(self.seen(JOB, self.runs) if scope == "runs" else self.seen(POD, self.pods))
        environment = {**os.environ, **self.environment, "STANDING": str(standing)}
        command = [sys.executable, str(PROGRAM), scope, step]
        process = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=500, check=False, start_new_session=True
        )
        assert process.returncode == -signal.SIGKILL, f"it never came to that step:\n{process.stderr}"

    def is_quiet(self) -> bool:
        open_operations = self.rows(
            "select pid, process_started, boot_id from orca.engine_operations where pid is not null"
        )
        if any(
            row["boot_id"] == boot_id() and is_alive(ProcessId(row["pid"], row["process_started"]))
            for row in open_operations
        ):
            return False
        kinds, namespaces = (JOB, POD, SERVICE), (self.runs, self.pods)
        jobs, pods, services = ([item for name in namespaces for item in self.seen(kind, name)] for kind in kinds)
        owners = {item["metadata"]["uid"] for item in (*jobs, *pods)}
        if not all(owner_of(item) in {None, *owners} for item in (*pods, *services)):
            return False  # it goes with its owner, which is gone already
        return not any(is_changing(item) for item in (*jobs, *pods))

    def seen(self, kind: Any, namespace: str, **labels: str) -> list[Object]:
        return list(self.kube.list(kind, namespace=namespace, labels=labels).items)

    def queue(self, pipeline: str, placement: str | None, *, workers: int = 0) -> int:
        self.execute(
            "insert into orca.pipelines (name, placement, image, workers) values (%(name)s, %(to)s, 'registry.example/r:1', %(n)s)",
            name=pipeline,
            to=placement,
            n=workers,
        )
        return int(self.rows("insert into orca.runs (pipeline) values (%(name)s) returning id", name=pipeline)[0]["id"])

    def pool(self, size: int) -> None:
        spec = {"environment": "e", "size": size}
        self._apply("RuntimePool", "runtime-pools.datalayer.io/v1", "p", spec)

    def environment_of_runtimes(self) -> None:
        default = {"requests": {"cpu": "100m"}}
        spec = {"dockerImage": "registry.example/runtime:1", "title": "E", "resourcesRanges": {"default": default}}
        self._apply("RuntimeEnvironment", "runtime-environments.datalayer.io/v1", "e", spec)

    def _apply(self, kind: str, _group: str, name: str, spec: dict[str, Any]) -> None:
        metadata = {"name": name, "namespace": self.pods}
        item = {"apiVersion": "datalayer.io/v1", "kind": kind, "metadata": metadata, "spec": spec}
        self.kube.apply(item, manager="test", force=True)

    def stray(self, namespace: str, role: str) -> None:
        labels = {STACK_LABEL: self.surroundings.stack_id, ROLE_LABEL: role}
        spec = {"containers": [{"name": "c", "image": "x"}]}
        self.kube.create(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "stray", "namespace": namespace, "labels": labels},
                "spec": spec,
            }
        )

    def locks(self) -> int:
        """How many locks the state's backend holds."""
        if self.surroundings.engine.backend_url.startswith("file:"):
            return sum(1 for _ in (self.surroundings.settings.home / "state" / ".pulumi" / "locks").rglob("*.json"))
        found = self.rows("select count(*) as n from pulumi_state where key like '%%/locks/%%.json'")
        return int(found[0]["n"])

    def operations(self) -> int:
        return int(self.rows("select count(*) as n from orca.engine_operations")[0]["n"])


def owner_of(item: Object) -> str | None:
    """Its owner's uid."""
    owners: list[Object] = item["metadata"].get("ownerReferences") or []
    return str(owners[0]["uid"]) if owners else None


def is_changing(item: Object) -> bool:
    """Whether it is going away, or a Pod that does not run yet, or a Job that has no Pod yet."""
    status = item.get("status") or {}
    if "deletionTimestamp" in item["metadata"]:
        return True
    if "containers" in item["spec"]:
        return bool(status.get("phase") == "Pending")
    return not any(status.get(count) for count in ("ready", "succeeded", "failed"))


@pytest.fixture(scope="module")
def kube(cluster: TestCluster) -> Iterator[Kube]:
    with Kube.connect(kubeconfig=cluster.kubeconfig) as kube:
        define_runtimes(kube)
        yield kube


@pytest.fixture
def world(
    cluster: TestCluster, kube: Kube, namespace: str, home: Path, database_url: str, wait_until: Callable[..., None]
) -> Iterator[Callable[..., World]]:
    """Makes the world, with the engine's state in Postgres or in files."""
    (home / "orca.toml").write_text(TOML)
    runtimes = f"{namespace}-pods"
    kube.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": runtimes}})
    made: list[World] = []

    def make(scope: str, state: str = "postgres") -> World:
        environment = {
            "ORCA_STACK": "test",
            "ORCA_HOME": str(home),
            "ORCA_DB": database_url,
            "ORCA_CONFIG": str(home / "orca.toml"),
            "ORCA_TOKEN_KEY": "a key of the tests, 32 bytes long",
            "PULUMI_CONFIG_PASSPHRASE_FILE": str(home / "passphrase"),
            "ORCA_POOL_GROW_AFTER": "0",
            "ORCA_POOL_TRY_SECONDS": "0.01",
            "ORCA_HEARTBEAT_SECONDS": "0.5",
            "ORCA_STRAY_GRACE_SECONDS": "0.01",
            "ORCA_RUNS_NAMESPACE": namespace,
            "KUBECONFIG": str(cluster.kubeconfig),
            **{
                "machines": {},
                "runs": {"ORCA_RUNNER": "kubernetes"},
                "runtimes": {"ORCA_RUNTIMES_NAMESPACE": runtimes},
                "launches": {"ORCA_RUNTIMES_NAMESPACE": runtimes, "ORCA_RUNTIMES_ABANDONED_SECONDS": "1"},
            }[scope],
        }
        if state == "file":
            environment["PULUMI_BACKEND_URL"] = (home / "state").as_uri()
        made.append(World(environment, kube, (namespace, runtimes), wait_until))
        for name in (namespace, runtimes):
            labels = {STACK_LABEL: made[0].surroundings.stack_id}
            kube.patch(Ref(kind=NAMESPACE, namespace=None, name=name), {"metadata": {"labels": labels}})
        return made[0]

    yield make
    for one in made:
        one.surroundings.close()
    kube.delete(Ref(kind=NAMESPACE, namespace=None, name=runtimes))
