"""A world in which something of everything stands, kept by a real loop, of which any part can be taken away.

One machine that is busy, one run cluster, one warm runtime. The loop is a process of its own; the ways to its database and to
its API server lead through proxies, its disk is a small one, its database's clock can be shifted, and its cloud is provider
`local`'s. Who tests it has ways of its own to all of them.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, LiteralString, Self

from orca_infra.db.connection import Database, backend_url
from orca_infra.db.migrate import migrate
from orca_infra.kube.client import Kube
from orca_infra.kube.kinds import JOB, POD, SERVICE
from orca_infra.kube.labels import STACK_LABEL
from orca_infra.log import make_log
from orca_infra.machines.providers.local_cloud import LocalCloud
from orca_infra.machines.providers.local_machine import read_process
from orca_infra.process import boot_id
from orca_infra.runtimes.launch import Launch, LaunchHands, LaunchRequest, launch
from orca_infra.runtimes.living import end_runtime, find_runtime
from orca_infra.settings import read_settings
from orca_infra.surroundings import Surroundings, open_surroundings
from orca_infra.testing.cluster import TestCluster
from orca_infra.testing.cluster_faults import FaultyServer
from orca_infra.testing.definitions import define_runtimes
from orca_infra.testing.ports import free_port
from orca_infra.testing.postgres_proxy import PostgresProxy, with_parameters

LOST_SECONDS = 12.0
_SCOPES = {"machines", "runs", "runtimes"}
_DISK = "size=48m"
_POLL_SECONDS = 0.05
_LOG_SHOWN = 6000
_STOP_SECONDS = 40.0
#: A machine; a Job, its driver's Pod is not the loop's own, a head, its Service and a worker; a runtime.
_STANDING = 6
_TOML = """
[pools.p]
provider = "local"
image = "registry.example/orca-worker:1"
max_machines = 4
idle_seconds = 3
types = [{ type = "small", locations = ["a", "b"] }]
"""
_ENVIRONMENT = {
    "ORCA_STACK": "test",
    "ORCA_TOKEN_KEY": "a key of the tests, 32 bytes long",
    "ORCA_LOG": "json",
    "ORCA_HEALTH_HOST": "127.0.0.1",
    "ORCA_POOL_GROW_AFTER": "0",
    "ORCA_POOL_TRY_SECONDS": "0.5",
    "ORCA_POOL_SCALE_SECONDS": "1",
    "ORCA_RUNS_SCALE_SECONDS": "1",
    "ORCA_RUNTIMES_SCALE_SECONDS": "1",
    "ORCA_POOL_LOST_SECONDS": f"{LOST_SECONDS:g}",
    "ORCA_HEARTBEAT_SECONDS": "1",
    "ORCA_STRAY_GRACE_SECONDS": "1",
    "ORCA_RUN_LOG_SECONDS": "5",
    "ORCA_ENGINE_SECONDS": "60",
    "ORCA_RUNNER": "kubernetes",
}
# As this database's every statement and every default of a column sees it: `now()` is found in the schema `clock` first.
_CLOCK = """
create schema clock;
create table clock.shift (seconds double precision not null);
insert into clock.shift values (0);
create function clock.now() returns timestamptz language sql stable as $$
    select pg_catalog.now() + make_interval(secs => (select seconds from clock.shift))
$$;
do $$ begin
    execute format('alter database %I set search_path = clock, pg_catalog, public', current_database());
end $$;
"""
_GIVE_RUN: LiteralString = "select orca.move_run(%(run)s, 0, 'queued', 'running', 'worker', %(worker)s, null)"


class StandingWorld:
    """See above; `with StandingWorld(cluster, url) as world:`, where `url` is an empty database's.

    Another world that a loop is in has other class attributes, and another `_make_stand`.

    `state` is where the engine keeps its state: `file`, or `postgres`, beside the loop's tables.

    Attributes:
        toml, variables, disk: the loop's orca.toml, its environment, and its home's mount options; None: no disk of its own.
        postgres, server: the proxies before the database and the API server.
        state_postgres: the one before the same database as the engine's state.
        cloud: provider `local`'s.
        home: the loop's ORCA_HOME, on a disk of its own when `has_small_disk`.
        log: the loop's, a JSON object a line.

    """

    toml = _TOML
    variables: Mapping[str, str] = _ENVIRONMENT
    disk: str | None = _DISK

    def __init__(self, cluster: TestCluster, url: str, *, state: str = "file") -> None:
        self._exits = ExitStack()
        self._cluster = cluster
        self._plain_url = url
        self._state = state
        self._url = with_parameters(url, options="-c default_transaction_read_only=off")
        self.folder = Path(tempfile.mkdtemp(prefix="orca-test-home-", dir="/tmp"))
        self.folder.chmod(0o755)
        self.home = self.folder / "home"
        self.log = self.folder / "loop.log"
        self.cloud = LocalCloud(self.folder / "cloud")
        mark = secrets.token_hex(4)
        self.runs_namespace, self.runtimes_namespace = f"runs-{mark}", f"runtimes-{mark}"
        self._port = free_port()
        self.busy = ""

    def __enter__(self) -> Self:
        try:
            self._prepare()
            self._start_loop()
            self._make_stand()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the loop as SIGTERM does, then everything else."""
        self._exits.close()

    def _prepare(self) -> None:
        self._exits.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self.home.mkdir()
        self.has_small_disk = self.disk is not None and self._mount(self.disk)
        (self.home / "state").mkdir()
        (self.home / "passphrase").write_text("a passphrase of the tests\n")
        (self.home / "orca.toml").write_text(self.toml)
        (self.folder / "cloud").mkdir()
        (self.home / "cloud").symlink_to(self.folder / "cloud")  # a cloud is on no disk of the loop's
        for step in (_run_clock, lambda database: migrate(database, with_orca_tables=True)):
            database = Database(self._url)
            step(database)
            database.close()
        self.postgres = self._exits.enter_context(PostgresProxy(self._plain_url))
        self.state_postgres = self._exits.enter_context(PostgresProxy(self._plain_url))
        self.server = self._exits.enter_context(FaultyServer(self._cluster, self.folder, seed=1))
        self.kube = self._exits.enter_context(Kube.connect(kubeconfig=self._cluster.kubeconfig))
        opened = open_surroundings(read_settings(self._environment(direct=True)), say=lambda _: None)
        self._exits.callback(opened.close)
        self.surroundings: Surroundings = opened
        self._prepare_cluster()

    def _mount(self, options: str) -> bool:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.home)]
        is_mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
        if is_mounted:
            self._exits.callback(subprocess.run, ["umount", "-l", str(self.home)], check=False)
        return is_mounted

    def _prepare_cluster(self) -> None:
        define_runtimes(self.kube)
        for namespace in (self.runs_namespace, self.runtimes_namespace):
            metadata = {"name": namespace, "labels": {STACK_LABEL: self.surroundings.stack_id}}
            self.kube.create({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
            self._exits.callback(self._cluster.api.call, "DELETE", f"/api/v1/namespaces/{namespace}")

    def _environment(self, *, direct: bool) -> dict[str, str]:
        in_postgres = self._url if direct else self.state_postgres.url
        return {
            **self.variables,
            "ORCA_HOME": str(self.home),
            "ORCA_DB": self._url if direct else self.postgres.url,
            "ORCA_CONFIG": str(self.home / "orca.toml"),
            "ORCA_HEALTH_PORT": str(self._port),
            "PULUMI_BACKEND_URL": (self.home / "state").as_uri() if self._state == "file" else backend_url(in_postgres),
            "PULUMI_CONFIG_PASSPHRASE_FILE": str(self.home / "passphrase"),
            "ORCA_RUNS_NAMESPACE": self.runs_namespace,
            "ORCA_RUNTIMES_NAMESPACE": self.runtimes_namespace,
            "KUBECONFIG": str(self._cluster.kubeconfig if direct else self.server.kubeconfig),
        }

    def _start_loop(self) -> None:
        program = shutil.which("orca-infra", path=str(Path(sys.executable).parent))
        assert program is not None
        with self.log.open("w") as log:
            self._loop = subprocess.Popen(
                [program, "run"],
                env={**os.environ, **self._environment(direct=False)},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )
        self._exits.callback(self._end_loop)

    def _end_loop(self) -> None:
        self._loop.send_signal(signal.SIGTERM)
        try:
            self._loop.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._loop.kill()
            self._loop.wait()
        (self.cloud.folder / "faults.json").unlink(missing_ok=True)
        for machine in self.cloud.list():
            self.cloud.delete(machine.name)

    def _make_stand(self) -> None:
        self.execute("insert into orca.pipelines (name, placement) values ('work', 'worker:p')")
        self.execute(
            "insert into orca.pipelines (name, image, workers) values "
            "('reports', 'registry.example/reports:1', 1), ('short', 'registry.example/reports:1', 0)"
        )
        self.run_of("reports")
        first = self.run_of("work")
        namespace = self.runtimes_namespace
        default = {"requests": {"cpu": "500m", "memory": "1Gi"}}
        spec = {"dockerImage": "registry.example/runtime:1", "resourcesRanges": {"default": default}}
        for kind, name, one in (
            ("RuntimeEnvironment", "python", spec),
            (
                "RuntimePool",
                "small",
                {"environment": "python", "size": 1, "burningRate": 0.1, "cull": {"seconds": 36000}},
            ),
        ):
            metadata = {"name": name, "namespace": namespace}
            item = {"apiVersion": "datalayer.io/v1", "kind": kind, "metadata": metadata, "spec": one}
            self.kube.apply(item, manager="test", force=True)
        self.until(lambda: self.state_of(first)["worker"], 60, "the first machine's worker takes a run")
        worker = str(self.state_of(first)["worker"])
        self.until(lambda: self.state_of(first)["state"] == "succeeded", 30, "the first run")
        with self.surroundings.database.transaction() as transaction:  # one: or the worker itself would take it
            run = int(transaction.value("insert into orca.runs (pipeline) values ('work') returning id"))
            assert transaction.value(_GIVE_RUN, {"run": run, "worker": worker})
        self.busy = worker
        self.until(lambda: len(self.standing()) == _STANDING, 60, "everything stands")

    # What comes meanwhile.

    def launch(self) -> Launch:
        """Launch a runtime that fits no warm Pod: the loop has to make one of its own."""
        request = LaunchRequest(environment="python", user="ada", requests={"cpu": "2"})
        return launch(self.launch_hands(), request)

    def state_of_runtime(self, launched: Launch) -> str:
        """`starting`, `ready`, or what came after."""
        found = find_runtime(self.surroundings.database, launched.id)
        return found.state if found else "gone"

    def end_runtime(self, launched: Launch) -> None:
        end_runtime(self.launch_hands(), launched.id)

    def launch_hands(self) -> LaunchHands:
        """What launches from this world's pools are made with."""
        return LaunchHands(
            database=self.surroundings.database,
            kube=self.kube,
            namespace=self.runtimes_namespace,
            stack_id=self.surroundings.stack_id,
            log=make_log(form="json"),
        )

    # What there is.

    def run_of(self, pipeline: str) -> int:
        """Queue a run; gives its id."""
        with self.surroundings.database.transaction() as transaction:
            return int(
                transaction.value("insert into orca.runs (pipeline) values (%(p)s) returning id", {"p": pipeline})
            )

    def state_of(self, run: int) -> dict[str, Any]:
        return self.rows("select state, start, worker, reason from orca.runs where id = %(id)s", id=run)[0]

    def rows(self, query: Any, **parameters: object) -> list[dict[str, Any]]:
        with self.surroundings.database.transaction() as transaction:
            return transaction.dicts(query, parameters)

    def execute(self, statement: Any, **parameters: object) -> None:
        with self.surroundings.database.transaction() as transaction:
            transaction.run(statement, parameters)

    def end_connections(self) -> None:
        """End every connection to the database but the one that says so."""
        self.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity "
            "where datname = current_database() and pid <> pg_backend_pid()"
        )

    def end(self, run: int) -> None:
        """What a driver writes when it is done."""
        with self.surroundings.database.transaction() as transaction:
            transaction.run("select set_config('orca.writer', 'driver', true)")
            transaction.run("update orca.runs set state = 'succeeded', ended_at = now() where id = %(id)s", {"id": run})

    def standing(self) -> dict[str, str]:
        """The uid of each thing that stands as it should, by what it is."""
        found = {f"machine {m.name}": m.uid for m in self.cloud.list() if m.name == self.busy and m.state == "running"}
        names = {
            row["name"]
            for row in self.rows(
                "select o.name from orca.kube_objects o join orca.runs r on r.id = o.run and r.start = o.start "
                "where r.pipeline = 'reports' and r.state = 'running' and o.uid is not null"
            )
        }
        for kind in (JOB, POD, SERVICE):
            for item in self.kube.list(kind, namespace=self.runs_namespace).items:
                name, metadata = item["metadata"]["name"], item["metadata"]
                if name in names and "deletionTimestamp" not in metadata:
                    found[f"{kind.kind} of a run {name}"] = metadata["uid"]
        warm = {
            row["uid"]: row["name"]
            for row in self.rows(
                "select uid, name from orca.runtime_pods where ready_at is not null and taken_at is null and ended_at is null"
            )
        }
        for item in self.kube.list(POD, namespace=self.runtimes_namespace).items:
            if item["metadata"]["uid"] in warm and "deletionTimestamp" not in item["metadata"]:
                found[f"runtime {item['metadata']['name']}"] = item["metadata"]["uid"]
        return found

    def passed_since(self, at_seconds: float) -> bool:
        """Whether a pass over each scope ended well since then, and nothing is said to be wrong."""
        try:
            text = self._get("/metrics")
            self._get("/readyz")
        except OSError:
            return False
        last = re.findall(r'^orca_infra_last_pass_timestamp_seconds\{scope="(\w+)"\} (\S+)$', text, re.MULTILINE)
        return {scope for scope, at in last if float(at) > at_seconds} >= _SCOPES and not self.attention()

    def attention(self) -> list[str]:
        """What status asks an operator to look at."""
        return [row["message"] for row in self.rows("select message from orca.attention")]

    def said(self, offset: int) -> str:
        """What the loop has logged since its log was this long, and what status says."""
        pools = [row["message"] for row in self.rows("select message from orca.pool_status")]
        return "\n".join([self.log.read_text()[offset:], *self.attention(), *pools])

    def stop_worker(self, number: signal.Signals) -> None:
        """Send the busy machine's processes a signal."""
        process = read_process(self.cloud.folder / "machines" / self.busy, boot_id())
        assert process is not None
        os.killpg(process.pid, number)

    @property
    def is_running(self) -> bool:
        return self._loop.poll() is None

    def until(self, predicate: Callable[[], object], seconds: float, what: str) -> None:
        """Returns once it is true. Raises AssertionError with the log's end."""
        deadline = time.monotonic() + seconds
        while not predicate():
            if time.monotonic() > deadline:
                log = self.said(max(self.log.stat().st_size - _LOG_SHOWN, 0)) if self.log.exists() else ""
                raise AssertionError(f"not within {seconds:g} s: {what}\n{log}")
            time.sleep(_POLL_SECONDS)

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=5) as answer:
            return str(answer.read().decode())


def _run_clock(database: Database) -> None:
    with database.transaction() as transaction:
        transaction.script(_CLOCK)
