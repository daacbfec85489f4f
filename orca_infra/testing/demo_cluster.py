"""The demo's second half: what the loop does on Kubernetes, on a real API server.

By default that is a control plane of its own, with a real node where this machine can have one (node.py): its driver, head,
workers and runtimes are containers that run (images_orca.py), and the demo's database is one that they reach. Elsewhere the
node is kwok's (Pods without containers). With `--use-cluster` it is the cluster that KUBECONFIG names, in namespaces of the
demo's own, which it removes.
"""

from __future__ import annotations

import base64
import os
import secrets
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orca_infra.db.connection import Database
from orca_infra.db.migrate import migrate
from orca_infra.errors import OrcaError, SetupError
from orca_infra.kube.client import Kube
from orca_infra.kube.kinds import CRD, NAMESPACE, POD, RUNTIME_POOL, SECRET, Ref
from orca_infra.log import make_log
from orca_infra.runtimes.launch import LaunchHands, LaunchRequest, launch
from orca_infra.runtimes.living import end_runtime
from orca_infra.stack.engine import Engine, engine_environment
from orca_infra.stack.tools import require_tool
from orca_infra.testing.cluster import TestCluster
from orca_infra.testing.cluster_files import write_private
from orca_infra.testing.node import IMAGE, RealNode
from orca_infra.testing.node_postgres import NodePostgres
from orca_infra.testing.node_secrets import wait_for_secrets
from orca_infra.testing.node_surroundings import check_surroundings

if TYPE_CHECKING:
    from orca_infra.testing.demo import Stage

POOL_SIZE = 2
_PROJECT = """name: orca-infra
runtime: python
plugins:
  providers: []
"""
_PROGRAM = "from orca_infra.stack.base import main\n\nmain()\n"
# A real node has this machine's cores, and its driver shows itself for a moment.
_SMALL = {
    "ORCA_DRIVER_CPU": "50m",
    "ORCA_HEAD_CPU": "50m",
    "ORCA_WORKER_CPU": "50m",
    "ORCA_POD_MEMORY": "32Mi",
    "ORCA_RUN_ENV": "ORCA_STAND_IN_STEP_SECONDS",
    "ORCA_STAND_IN_STEP_SECONDS": "1",
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
    """The cluster of one demo: its own, or the one that KUBECONFIG names.

    Attributes:
        node: its real node, if it has one.
        database: of the demo where containers have to reach it; elsewhere it is the embedded one.

    """

    def __init__(self, *, use_cluster: bool) -> None:
        """Raises SetupError when there is no cluster to be had."""
        self._own: TestCluster | None = None
        self.node: RealNode | None = None
        self.database: NodePostgres | None = None
        self._why_kwok = ""
        if use_cluster:
            given = os.environ.get("KUBECONFIG")
            if not given:
                raise SetupError("--use-cluster needs KUBECONFIG: it names the cluster that the demo may use")
            self.kubeconfig = Path(given).absolute()
        else:
            self._own = self._with_real_node() or TestCluster.start(nodes=1)
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
        if self.node is not None:
            return "a control plane of its own, with a real node: what runs there are containers of this machine"
        return f"a control plane of its own, with a kwok node (Pods without containers), because {self._why_kwok}"

    @property
    def image(self) -> str:
        return IMAGE if self.node is not None else "registry.example/stand-in:1"

    def environment(self) -> dict[str, str]:
        """The settings that make the loop use this cluster."""
        more: dict[str, str] = {}
        if self.node is not None and self.database is not None:
            passphrase = self.node.folder / "passphrase"
            if not passphrase.exists():
                write_private(passphrase, secrets.token_hex(32))
            more = {
                **_SMALL,
                "ORCA_DB": self.database.url,
                "ORCA_TOKEN_KEY": secrets.token_hex(32),
                "PULUMI_CONFIG_PASSPHRASE_FILE": str(passphrase),
            }
        return {
            **more,
            "KUBECONFIG": str(self.kubeconfig),
            "ORCA_RUNNER": "kubernetes",
            "ORCA_RUNS_NAMESPACE": self.runs,
            "ORCA_RUNTIMES_NAMESPACE": self.runtimes,
        }

    def _with_real_node(self) -> TestCluster | None:
        """A cluster with a real node and a database that its containers reach; None, and why, where there can be none."""
        own = None
        try:
            check_surroundings()
            own = TestCluster.start(nodes=0)
            self.node = RealNode.start(own)
            self.database = NodePostgres(self.node)
            database = Database(self.database.url)
            try:
                migrate(database, with_orca_tables=True)
            finally:
                database.close()
        except BaseException as error:
            self._end_node()
            if own is not None:
                own.stop()
            if not isinstance(error, SetupError):
                raise
            self._why_kwok = str(error).splitlines()[0]
            return None
        return own

    def _end_node(self) -> None:
        node, self.node, self.database = self.node, None, None
        if node is not None:
            node.stop()

    def close(self) -> None:
        """End the cluster, or remove from a given one what the demo made there."""
        with suppress(OrcaError):
            if self._own is None:
                for namespace in (self.runs, self.runtimes):
                    self.kube.delete(Ref(kind=NAMESPACE, namespace=None, name=namespace))
                for name in set(self._crds()) - self._had_crds:
                    self.kube.delete(Ref(kind=CRD, namespace=None, name=name))
        self.kube.close()
        self._end_node()
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
    # In the demo's folder, not in the person's.
    environment["PULUMI_HOME"] = str(Engine(stage.surroundings.engine).home)
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
    if cluster.database is not None:
        url = cluster.database.container_url("postgres")
        metadata = {"name": "orca-db", "namespace": cluster.runs}
        data = {"url": base64.b64encode(url.encode()).decode()}
        cluster.kube.create({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data})
    with stage.surroundings.database.transaction() as transaction:
        pipeline = "insert into orca.pipelines (name, image, workers) values ('trains', %(image)s, 2)"
        transaction.run(pipeline, {"image": cluster.image})
        run = transaction.value("insert into orca.runs (pipeline) values ('trains') returning id")

    def pods() -> list[dict[str, Any]]:
        listed = cluster.kube.list(POD, namespace=cluster.runs, labels={"orca.run": str(run)}).items
        return [pod for pod in listed if pod.get("status", {}).get("phase") == "Running"]

    running = stage.until("the run's four Pods", lambda: pods() if len(pods()) == 4 else None)
    roles = sorted(pod["metadata"]["labels"]["orca.role"] for pod in running)
    stage.checked("running", f"{', '.join(roles)} of orca-{run}-1")
    if cluster.node is None:  # nothing runs there: the demo says what a driver would
        with stage.surroundings.database.transaction() as transaction:
            transaction.run("select set_config('orca.writer', 'driver', true)")
            done = "update orca.runs set state = 'succeeded', ended_at = now() where id = %(run)s"
            transaction.run(done, {"run": run})
    ended = "select reason from orca.run_clusters where run = %(run)s and ended_at is not null"
    row = stage.until("the run cluster's end", lambda: stage.query(ended, run=run))[0]
    log = stage.surroundings.logs_folder / str(run) / "driver.log"
    stage.until(
        "all Pods to be gone and the driver's log to be saved",
        lambda: log.is_file() and not cluster.kube.list(POD, namespace=cluster.runs).items,
    )
    stage.checked("its driver wrote that it succeeded; the cluster", f"ended {row['reason']}, no Pod left")
    said = log.read_text(errors="replace").splitlines()
    if cluster.node is None:
        stage.checked("driver.log begins", said[0])
        return
    if said[-1] != f"driver: run {run} succeeded":
        raise stage.failed(f"the driver's last words were to be that its run succeeded, and are {said[-1]!r}")
    stage.checked("driver.log has its driver's words", next((line for line in said if "the head at" in line), said[-1]))


def warm_pod_is_taken(stage: Stage, cluster: DemoCluster) -> None:
    """A pool of warm Pods, a launch that takes one with the user's secret, and the refill."""
    stage.tell(f"A runtime pool of {POOL_SIZE} is applied; then jane launches a runtime with a secret.")
    environment: dict[str, Any] = {
        "apiVersion": "datalayer.io/v1",
        "kind": "RuntimeEnvironment",
        "metadata": {"name": "python"},
        "spec": {"dockerImage": cluster.image, "title": "Python"},
    }
    for manifest in (environment, _POOL):
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
        started, called = stage.clock(), time.time()
        taken = launch(hands, LaunchRequest(environment="python", user="jane", secrets={"TOKEN": "s3cr3t"}))
        seconds = stage.clock() - started
        secret = cluster.kube.get(Ref(kind=SECRET, namespace=cluster.runtimes, name=taken.pod))
        if not taken.warm or secret is None or secret["metadata"]["ownerReferences"][0]["name"] != taken.pod:
            raise stage.failed(f"a warm Pod was to be taken and given its Secret, and this came: {taken}")
        stage.checked("launch", f"took {taken.pod}, warm, with its Secret, in {seconds * 1000:.0f} ms")
        if cluster.node is not None:
            read = wait_for_secrets(cluster.kube, cluster.runtimes, taken.pod, seconds=20)
            if read.values != {"TOKEN": "s3cr3t"}:
                raise stage.failed(f"the container was to read jane's secret, and read {sorted(read.values)}")
            stage.checked("her secret was read in the container", f"{(read.at - called) * 1000:.0f} ms after the call")
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
