"""The demo's second half: what the loop does on Kubernetes, on a real API server.

By default that is a control plane of its own with a kwok node (Pods without containers); with `--use-cluster` the one that
KUBECONFIG names, in namespaces of the demo's own, which it removes.
"""

from __future__ import annotations

import os
import secrets
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orca_infra.errors import OrcaError, SetupError
from orca_infra.kube.client import Kube
from orca_infra.kube.kinds import CRD, NAMESPACE, POD, RUNTIME_POOL, SECRET, Ref
from orca_infra.log import make_log
from orca_infra.runtimes.launch import LaunchHands, LaunchRequest, launch
from orca_infra.runtimes.living import end_runtime
from orca_infra.stack.engine import engine_environment
from orca_infra.stack.tools import require_tool
from orca_infra.testing.cluster import TestCluster

if TYPE_CHECKING:
    from orca_infra.testing.demo import Stage

POOL_SIZE = 2
_PROJECT = """name: orca-infra
runtime: python
plugins:
  providers: []
"""
_PROGRAM = "from orca_infra.stack.base import main\n\nmain()\n"
_ENVIRONMENT: dict[str, Any] = {
    "apiVersion": "datalayer.io/v1",
    "kind": "RuntimeEnvironment",
    "metadata": {"name": "python"},
    "spec": {"dockerImage": "registry.example/python:1", "title": "Python"},
}
_POOL: dict[str, Any] = {
    "apiVersion": "datalayer.io/v1",
    "kind": "RuntimePool",
    "metadata": {"name": "python"},
    "spec": {"environment": "python", "size": POOL_SIZE, "burningRate": 0.01, "cull": {"seconds": 3600}},
}

_WARM = """
select count(*) as n from orca.runtime_pods p
where p.ready_at is not null and p.ended_at is null and p.ending_reason is null
  and not exists (select from orca.runtimes r where r.pod = p.name)
"""


class DemoCluster:
    """The cluster of one demo: its own, or the one that KUBECONFIG names."""

    def __init__(self, *, use_cluster: bool) -> None:
        """Raises SetupError when there is no cluster to be had."""
        self._own: TestCluster | None = None
        if use_cluster:
            given = os.environ.get("KUBECONFIG")
            if not given:
                raise SetupError("--use-cluster needs KUBECONFIG: it names the cluster that the demo may use")
            self.kubeconfig = Path(given).absolute()
        else:
            self._own = TestCluster.start(nodes=1)
            self.kubeconfig = self._own.kubeconfig
        suffix = secrets.token_hex(3)
        self.runs = f"orca-demo-{suffix}-runs"
        self.runtimes = f"orca-demo-{suffix}-runtimes"
        self.kube = Kube.connect(kubeconfig=self.kubeconfig)
        self._had_crds = {name for name in self._crds() if self.kube.get(Ref(kind=CRD, namespace=None, name=name))}

    @property
    def description(self) -> str:
        if self._own is None:
            return f"the cluster at {self.kube.server}, in namespaces of the demo's own"
        return "a control plane of its own, with a kwok node (Pods without containers)"

    def environment(self) -> dict[str, str]:
        """The settings that make the loop use this cluster."""
        return {
            "KUBECONFIG": str(self.kubeconfig),
            "ORCA_RUNNER": "kubernetes",
            "ORCA_RUNS_NAMESPACE": self.runs,
            "ORCA_RUNTIMES_NAMESPACE": self.runtimes,
        }

    def close(self) -> None:
        """End the cluster, or remove from a given one what the demo made there."""
        with suppress(OrcaError):
            if self._own is None:
                for namespace in (self.runs, self.runtimes):
                    self.kube.delete(Ref(kind=NAMESPACE, namespace=None, name=namespace))
                for name in set(self._crds()) - self._had_crds:
                    self.kube.delete(Ref(kind=CRD, namespace=None, name=name))
        self.kube.close()
        if self._own is not None:
            self._own.stop()

    @staticmethod
    def _crds() -> tuple[str, str]:
        return "runtime-pools.datalayer.io", "runtime-environments.datalayer.io"


def base_is_upped(stage: Stage, cluster: DemoCluster) -> None:
    """`pulumi up` of the base stack, as a person does it."""
    stage.tell("`pulumi up -s demo` makes the base: the identity, two namespaces, the runtime pools' definitions.")
    project = stage.folder / "project"
    project.mkdir()
    (project / "Pulumi.yaml").write_text(_PROJECT, encoding="utf-8")
    (project / "__main__.py").write_text(_PROGRAM, encoding="utf-8")
    environment = {**stage.environment, **engine_environment(stage.surroundings.engine)}
    environment["ORCA_DB"] = stage.surroundings.url
    environment["ORCA_TOKEN_KEY"] = stage.surroundings.token_key.decode()
    pulumi = str(require_tool("pulumi"))
    for arguments in (["stack", "init", "demo"], ["up", "--yes", "--skip-preview", "--stack", "demo"]):
        done = subprocess.run(
            [pulumi, "--non-interactive", *arguments],
            cwd=project,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        if done.returncode:
            raise stage.failed(f"pulumi {arguments[0]}: {(done.stdout + done.stderr)[-1500:]}")
    made = [line.strip() for line in done.stdout.splitlines() if line.strip().endswith("created")]
    stage.checked("pulumi", made[-1] if made else "up to date")
    for name in (cluster.runs, cluster.runtimes):
        namespace = cluster.kube.get(Ref(kind=NAMESPACE, namespace=None, name=name))
        if namespace is None or namespace["metadata"]["labels"].get("orca.stack") != stage.surroundings.stack_id:
            raise stage.failed(f"the namespace {name} was to carry the stack's id")
    stage.checked("namespaces that carry the stack's id", f"{cluster.runs}, {cluster.runtimes}")


def run_cluster_comes_and_goes(stage: Stage, cluster: DemoCluster) -> None:
    """A run on Kubernetes: driver, head, two workers; it ends, and all of it goes, its log first."""
    stage.tell("A run of a pipeline with an image is queued: it gets a cluster of its own.")
    with stage.surroundings.database.transaction() as transaction:
        transaction.run(
            "insert into orca.pipelines (name, image, workers) values ('trains', 'registry.example/trains:1', 2)"
        )
        run = transaction.value("insert into orca.runs (pipeline) values ('trains') returning id")

    def pods() -> list[dict[str, Any]]:
        listed = cluster.kube.list(POD, namespace=cluster.runs, labels={"orca.run": str(run)}).items
        return [pod for pod in listed if pod.get("status", {}).get("phase") == "Running"]

    running = stage.until("the run's four Pods", lambda: pods() if len(pods()) == 4 else None)
    roles = sorted(pod["metadata"]["labels"]["orca.role"] for pod in running)
    stage.checked("running", f"{', '.join(roles)} of orca-{run}-1")
    with stage.surroundings.database.transaction() as transaction:
        transaction.run("select set_config('orca.writer', 'driver', true)")
        transaction.run("update orca.runs set state = 'succeeded', ended_at = now() where id = %(run)s", {"run": run})
    ended = "select reason from orca.run_clusters where run = %(run)s and ended_at is not null"
    row = stage.until("the run cluster's end", lambda: stage.query(ended, run=run))[0]
    log = stage.surroundings.logs_folder / str(run) / "driver.log"
    if not log.is_file() or cluster.kube.list(POD, namespace=cluster.runs).items:
        raise stage.failed("all Pods were to be gone and the driver's log saved")
    stage.checked("its driver wrote that it succeeded; the cluster", f"ended {row['reason']}, no Pod left")
    stage.checked("driver.log begins", log.read_text(errors="replace").splitlines()[0])


def warm_pod_is_taken(stage: Stage, cluster: DemoCluster) -> None:
    """A pool of warm Pods, a launch that takes one with the user's secret, and the refill."""
    stage.tell(f"A runtime pool of {POOL_SIZE} is applied; then jane launches a runtime with a secret.")
    for manifest in (_ENVIRONMENT, _POOL):
        metadata = {**manifest["metadata"], "namespace": cluster.runtimes}
        cluster.kube.apply({**manifest, "metadata": metadata}, manager="orca-demo")
    stage.until("the pool to be warm", lambda: stage.query(_WARM)[0]["n"] == POOL_SIZE)
    stage.checked("warm", f"{POOL_SIZE} Pods")
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        hands = LaunchHands(
            database=stage.surroundings.database,
            kube=cluster.kube,
            namespace=cluster.runtimes,
            stack_id=stage.surroundings.stack_id,
            log=make_log(nowhere),
        )
        started = stage.clock()
        taken = launch(hands, LaunchRequest(environment="python", user="jane", secrets={"TOKEN": "s3cr3t"}))
        seconds = stage.clock() - started
        secret = cluster.kube.get(Ref(kind=SECRET, namespace=cluster.runtimes, name=taken.pod))
        if not taken.warm or secret is None or secret["metadata"]["ownerReferences"][0]["name"] != taken.pod:
            raise stage.failed(f"a warm Pod was to be taken and given its Secret, and this came: {taken}")
        stage.checked("launch", f"took {taken.pod}, warm, with its Secret, in {seconds * 1000:.0f} ms")
        stage.until("the refill", lambda: stage.query(_WARM)[0]["n"] == POOL_SIZE)
        stage.checked("the pool is refilled", f"{POOL_SIZE} warm")
        end_runtime(hands, taken.id)
        stage.until(
            "the runtime's end",
            lambda: stage.query("select 1 as x from orca.runtimes where ended_at is not null"),
        )
    ended = stage.query("select credits from orca.runtimes")[0]
    stage.checked("stopped; its Pod and Secret are gone, credits", f"{ended['credits']:.4f}")
    cluster.kube.patch(Ref(kind=RUNTIME_POOL, namespace=cluster.runtimes, name="python"), {"spec": {"size": 0}})
    stage.until("the pool to be empty", lambda: not cluster.kube.list(POD, namespace=cluster.runtimes).items)
    stage.checked("size 0", "no Pod left")
