"""`orca-infra drain --all` on the real engine and a real API server: all ends, the loop looks on, and `pulumi destroy` works."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orca_infra.kube.client import Kube
from orca_infra.kube.kinds import JOB, NAMESPACE, POD, RUNTIME_POOL, Ref
from orca_infra.loop.leader import holder
from orca_infra.machines.decide import STACK_LABEL
from orca_infra.machines.providers.local_cloud import LocalCloud, MachineRequest
from orca_infra.stack.engine import PROJECT, Engine, engine_environment
from orca_infra.stack.tools import require_tool
from orca_infra.surroundings import Surroundings
from orca_infra.testing.cluster import TestCluster

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]


class Family:
    """A stack with a machine, a run cluster and a runtime, as people work with it: by commands."""

    def __init__(self, surroundings: Surroundings, home: Path, kube: Kube, environment: dict[str, str]) -> None:
        self.surroundings, self.home, self.kube = surroundings, home, kube
        self.environment = {**os.environ, **environment, **engine_environment(surroundings.engine)}
        self.environment["PULUMI_HOME"] = str(surroundings.settings.home / "pulumi")
        self.project = home / "project"
        self.project.mkdir()
        (self.project / "Pulumi.yaml").write_text("name: orca-infra\nruntime: python\n")
        (self.project / "__main__.py").write_text("from orca_infra.stack.base import main\nmain()\n")

    def orca(self, *arguments: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "orca_infra.cli", *arguments],
            env=self.environment, capture_output=True, text=True, check=False, timeout=500,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def pulumi(self, *arguments: str, code: int = 0) -> str:
        done = subprocess.run(
            [str(require_tool("pulumi")), "--non-interactive", *arguments, "--stack", "test"],
            cwd=self.project, env=self.environment, capture_output=True, text=True, check=False, timeout=500,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def start_loop(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "orca_infra.cli", "run"],
            env=self.environment,
            stderr=(self.home / "loop.log").open("wb"),
        )

    def rows(self, query: Any) -> list[dict[str, Any]]:
        with self.surroundings.database.snapshot() as transaction:
            return transaction.dicts(query)

    def execute(self, *statements: Any) -> None:
        with self.surroundings.database.transaction() as transaction:
            for statement in statements:
                transaction.run(statement)

    def leave_locks(self, dead: int) -> None:
        """As engines leave them that are killed in dropping a stack and in unprotecting the base."""
        Engine(self.surroundings.engine).init("test.machines.q")
        said = json.dumps({"pid": dead, "username": "root", "hostname": socket.gethostname()})
        for stack in ("test", "test.machines.q"):
            lock = f".pulumi/locks/organization/{PROJECT}/{stack}/dead.json"
            self.execute(
                "insert into pulumi_state (key, data) select left(key, strpos(key, '/')) || "
                f"'{lock}', json_build_object('data', encode(convert_to('{said}', 'utf8'), 'base64'))"
                " from pulumi_state where key like '%%/meta.yaml'"
            )

    def is_full(self) -> bool:
        """One of each is there."""
        return bool(
            self.rows("select from orca.workers")
            and self.rows("select from orca.kube_objects where kind = 'Job' and uid is not null")
            and self.rows("select from orca.runtime_pods where ready_at is not null")
        )


@pytest.fixture
def family(
    surroundings: Callable[..., Surroundings], home: Path, cluster: TestCluster, database_url: str
) -> Iterator[Family]:
    tail = home.name.rpartition("-")[2].replace("_", "").lower()
    environment = {
        "ORCA_STACK": "test",
        "ORCA_DB": database_url,
        "ORCA_HOME": str(home),
        "ORCA_CONFIG": str(home / "orca.toml"),
        "ORCA_TOKEN_KEY": "a key of the tests, 32 bytes long",
        "ORCA_RUNNER": "kubernetes",
        "ORCA_RUNS_NAMESPACE": f"drain-{tail}-runs",
        "ORCA_RUNTIMES_NAMESPACE": f"drain-{tail}-runtimes",
        "KUBECONFIG": str(cluster.kubeconfig),
        "ORCA_POOL_GROW_AFTER": "0",
        "ORCA_POOL_TRY_SECONDS": "0.1",
        "ORCA_POOL_SCALE_SECONDS": "0.5",
        "ORCA_HEARTBEAT_SECONDS": "0.5",
        "ORCA_STRAY_GRACE_SECONDS": "0.5",
    }
    opened = surroundings("postgres", **environment)
    with Kube.connect(kubeconfig=cluster.kubeconfig) as kube:
        yield Family(opened, home, kube, environment)
        for name in ("ORCA_RUNS_NAMESPACE", "ORCA_RUNTIMES_NAMESPACE"):
            kube.delete(Ref(kind=NAMESPACE, name=environment[name]))


def test_drain_ends_everything_beside_a_loop_that_looks_on_and_destroy_works(
    family: Family, wait_until: Callable[..., None]
) -> None:
    subprocess.run(
        [str(require_tool("pulumi")), "--non-interactive", "stack", "init", "test"],
        cwd=family.project, env=family.environment, check=True, capture_output=True,
    )  # fmt: skip
    family.pulumi("up", "--yes", "--skip-preview")
    runs, runtimes = (family.environment[f"ORCA_{name}_NAMESPACE"] for name in ("RUNS", "RUNTIMES"))
    metadata = {"name": "python", "namespace": runtimes}
    spec = {"dockerImage": "registry.example/r:1", "title": "R", "language": "python"}
    pool = {"environment": "python", "size": 1, "resources": {"requests": {"cpu": "100m"}}}
    family.kube.create(
        {"apiVersion": "datalayer.io/v1", "kind": "RuntimeEnvironment", "metadata": metadata, "spec": spec}
    )
    family.kube.create({"apiVersion": "datalayer.io/v1", "kind": "RuntimePool", "metadata": metadata, "spec": pool})
    family.execute(
        "insert into orca.pipelines (name, placement) values ('work', 'worker:p')",
        "insert into orca.pipelines (name, image, workers) values ('thin', 'registry.example/t:1', 0)",
        "insert into orca.runs (pipeline) values ('work'), ('thin')",
    )
    loop = family.start_loop()
    try:
        wait_until(family.is_full, 90, "a machine, a run cluster and a runtime")
        family.execute("insert into orca.runs (pipeline) select 'work' from generate_series(1, 5)")

        # A person who is asked and says no has changed nothing.
        refused = subprocess.run(
            [sys.executable, "-m", "orca_infra.cli", "drain", "--all"],
            env=family.environment, input="n\n", capture_output=True, text=True, check=False, timeout=500,
        )  # fmt: skip
        assert refused.returncode == 1
        assert "1 run clusters, 1 runtime Pods" in refused.stdout
        assert not family.rows("select from orca.pool_pauses")

        # Killed in the middle, it has paused the family at least, and goes on when it is called again.
        first = subprocess.Popen(
            [sys.executable, "-m", "orca_infra.cli", "drain", "--all", "--yes"],
            env=family.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        wait_until(lambda: family.rows("select from orca.pool_pauses"), 30)
        first.send_signal(signal.SIGKILL)
        first.wait()
        family.leave_locks(first.pid)
        # Of another stack that has its machines in the same place.
        cloud = LocalCloud(family.surroundings.cloud_folder)
        labels = {STACK_LABEL: "anotherstacksid2"}
        cloud.create(
            MachineRequest(name="orca-p-900", location="a", type="small", argv=("sleep", "900"), labels=labels)
        )

        said = family.orca("drain", "--all", "--yes")
        assert [machine.name for machine in cloud.list()] == ["orca-p-900"]
        cloud.delete("orca-p-900")
        assert "dropped stack test.machines.p" in said
        assert "dropped stack test.machines.q" in said
        assert "pulumi destroy -s test" in said
        assert loop.poll() is None
        # The loop leads again, and makes nothing.
        wait_until(lambda: holder(family.surroundings.url), 20)
        for table in ("pool_machines", "run_clusters", "runtime_pods"):
            assert not family.rows(f"select from orca.{table} where ended_at is null"), table
        assert not family.kube.list(POD, namespace=runs).items
        assert not family.kube.list(JOB, namespace=runs).items
        assert not family.kube.list(POD, namespace=runtimes).items
        assert family.kube.list(RUNTIME_POOL, namespace=runtimes).items, "what people applied is theirs"
        tokens = family.rows("select revoked_at from orca.pool_machines")
        assert all(row["revoked_at"] for row in tokens)
        assert {row["state"] for row in family.rows("select state from orca.runs where pipeline = 'thin'")} == {
            "queued"
        }
        stacks = subprocess.run(
            [str(require_tool("pulumi")), "stack", "ls", "--json"],
            cwd=family.project, env=family.environment, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        assert "test.machines" not in stacks
        assert "test.runs" not in stacks
        family.pulumi("destroy", "--yes", "--skip-preview")
        assert family.kube.get(Ref(kind=NAMESPACE, name=runs)) is not None

        # Resumed, with the base again, it works as before.
        family.pulumi("up", "--yes", "--skip-preview")
        family.orca("resume")
        wait_until(lambda: family.kube.list(POD, namespace=runtimes).items, 60, "the pool is filled again")
        family.orca("drain", "--all", "--yes")
    finally:
        loop.terminate()
        assert loop.wait() == 0, (family.home / "loop.log").read_text()[-3000:]


def test_without_all_it_asks_for_it(family: Family) -> None:
    assert "drain --all" in family.orca("drain", code=2)
