"""Killed at each step of each scope, the next loop converges: docs/explanation/crash-matrix.md is what these tests found.

Each row is a loop that makes one pass and kills itself with SIGKILL at a step of it (die_at.py), on the real engine, a real
Postgres and a real API server, with the engine's state in Postgres; then another loop makes three passes. `ORCA_CRASH_MATRIX=write`
writes the page anew.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from orca_infra.db.connection import Database
from orca_infra.kube.client import Kube
from orca_infra.kube.kinds import CRD, JOB, NAMESPACE, POD, SECRET, SERVICE, Object, Ref
from orca_infra.kube.labels import ROLE_LABEL, RUN_LABEL, STACK_LABEL
from orca_infra.log import make_log
from orca_infra.loop.leader import holder
from orca_infra.loop.passes import PassResult
from orca_infra.loop.run import Loop
from orca_infra.machines.providers.local_cloud import LocalCloud, MachineRequest
from orca_infra.process import ProcessId, boot_id, is_alive
from orca_infra.runtimes.crds import runtime_environment_crd, runtime_pool_crd
from orca_infra.settings import read_settings
from orca_infra.surroundings import Surroundings, open_surroundings
from orca_infra.testing.cluster import TestCluster

pytestmark = pytest.mark.engine

PAGE = Path(__file__).parents[3] / "docs" / "explanation" / "crash-matrix.md"
PROGRAM = Path(__file__).parent / "die_at.py"
PASSES_MOST = 3
TOML = """
[pools.p]
provider = "local"
image = "registry.example/orca-worker:1"
max_machines = 3
idle_seconds = "1h"
types = [{ type = "small", locations = ["a"] }]
"""


@dataclass(frozen=True)
class Row:
    """One row of the matrix.

    Attributes:
        step: where the loop is killed.
        left: what there is at that moment.
        then: what there is once the next loop has made its passes.
        begin: what is there before, and what the pass is to do.

    """

    scope: str
    step: str
    left: str
    then: str
    begin: str


MADE = "one machine, confirmed"
ANEW = "that row ended Interrupted, its token revoked; one machine of the next number"
DONE = "that row ended Interrupted, its token revoked; no machine, as its worker had done the run meanwhile"
GONE = "no machine, its token revoked"
RUNS = "every object once, confirmed"
SWEPT = "no object; the start's row ended"
WARM = "two warm Pods, confirmed"
ONE = "one warm Pod"
MATRIX = (
    Row("machines", "before the row", "nothing", MADE, "make"),
    Row("machines", "between token and machine", "a row, not confirmed; no machine", ANEW, "make"),
    Row("machines", "in the up", "a row, not confirmed; no machine", f"{MADE} / {ANEW} / {DONE}", "make"),
    Row("machines", "before the confirmation", "a row, not confirmed; its machine", MADE, "make"),
    Row("machines", "between the token's revocation and the deletion", "a revoked token; its machine", GONE, "remove"),
    Row("machines", "in the deletion", "a revoked token; its machine", GONE, "remove"),
    Row("machines", "before the row's end", "a revoked token; no machine", GONE, "remove"),
    Row("machines", "before a stray's delete", "a stray", "no machine", "stray"),
    Row("machines", "after a stray's delete", "nothing", "no machine", "stray"),
    Row("runs", "before the row", "nothing", RUNS, "make"),
    Row("runs", "after the row", "rows, not confirmed; no object", RUNS, "make"),
    Row("runs", "in the up", "rows, not confirmed; objects", RUNS, "make"),
    Row("runs", "before the confirmation", "rows, not confirmed; objects", RUNS, "make"),
    Row("runs", "in a log", "the reason of its end; objects", SWEPT, "remove"),
    Row("runs", "before the sweep", "the reason of its end; objects", SWEPT, "remove"),
    Row("runs", "in the sweep", "the reason of its end; objects / the reason of its end; no object", SWEPT, "remove"),
    Row("runs", "before the run's end is written", "the reason of its end; no object", SWEPT, "finish"),
    Row("runs", "in a stray's delete", "nothing", "no stray", "stray"),
    Row("runtimes", "before the row", "nothing", WARM, "make"),
    Row("runtimes", "after the row", "rows, not confirmed; no object", WARM, "make"),
    Row("runtimes", "in the up", "rows, not confirmed; objects", WARM, "make"),
    Row("runtimes", "before the confirmation", "rows, not confirmed; objects", WARM, "make"),
    Row("runtimes", "before the sweep", "the reason of its end; objects", ONE, "remove"),
    Row("runtimes", "in the sweep", "the reason of its end; no object", ONE, "remove"),
    Row("runtimes", "before the row's end", "the reason of its end; no object", ONE, "finish"),
    Row("runtimes", "in a stray's delete", "nothing", "no stray", "stray"),
)


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
        """One pass, once the engines of earlier loops have ended and nothing on the cluster is going away."""
        self.wait_until(self.is_quiet, 60, "engines and deletions to end")
        self.wait_until(lambda: not holder(self.surroundings.url), 10, "Postgres to notice the loop's end")
        return loop.run_once()

    def settle(self, loop: Loop, until: Callable[[], object]) -> None:
        self.wait_until(lambda: self.pass_with(loop) and until(), 60, "what is there before")

    def die(self, row: Row) -> None:
        standing = len(self.seen(JOB, self.runs) if row.scope == "runs" else self.seen(POD, self.pods))
        environment = {**os.environ, **self.environment, "STANDING": str(standing)}
        command = [sys.executable, str(PROGRAM), row.scope, row.step]
        process = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120, check=False, start_new_session=True
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
        items = [
            item for kind in (JOB, POD) for namespace in (self.runs, self.pods) for item in self.seen(kind, namespace)
        ]
        return not any("deletionTimestamp" in item["metadata"] for item in items)

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

    def operations(self) -> int:
        return int(self.rows("select count(*) as n from orca.engine_operations")[0]["n"])


@pytest.fixture(scope="module")
def kube(cluster: TestCluster, wait_until: Callable[..., None]) -> Iterator[Kube]:
    with Kube.connect(kubeconfig=cluster.kubeconfig) as kube:
        for crd in (runtime_pool_crd(), runtime_environment_crd()):
            kube.apply(crd, manager="test", force=True)
            ref = Ref(kind=CRD, name=crd["metadata"]["name"])

            def established(ref: Ref = ref) -> bool:
                conditions = ((kube.get(ref) or {}).get("status") or {}).get("conditions") or []
                return any(one["type"] == "Established" and one["status"] == "True" for one in conditions)

            wait_until(established, 20)
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


# What there is before, and what the pass that is killed has to do.


def begin_machines(w: World, row: Row, loop: Loop) -> None:
    w.pass_with(loop)  # the cloud is there from the first pass on
    if row.begin == "stray":
        labels = {"orca-stack": w.surroundings.stack_id, "orca-pool": "p"}
        w.cloud.create(
            MachineRequest(name="orca-p-7", location="a", type="small", labels=labels, argv=("/bin/sleep", "600"))
        )
        time.sleep(0.1)  # past its grace
        return
    w.queue("work", "worker:p")
    if row.begin == "make":
        if row.step == "in the up":
            w.cloud.arm("create", "", seconds=2)
        return
    w.settle(loop, w.cloud.list)
    w.wait_until(lambda: w.rows("select from orca.runs where state = 'succeeded'"), 30, "the run's end")
    w.execute("update orca.pool_machines set drain_at = now(), drain_now = true")
    if row.step == "in the deletion":
        w.cloud.arm("delete", "", seconds=2)


def left_of_machines(w: World, _row: Row) -> str:
    rows = w.rows("select * from orca.pool_machines where ended_at is null")
    listed = w.cloud.list()
    if not rows:
        return "a stray" if listed else "nothing"
    machine = "its machine" if listed else "no machine"
    return f"a revoked token; {machine}" if rows[0]["revoked_at"] else f"a row, not confirmed; {machine}"


def then_of_machines(w: World, row: Row) -> str:
    rows = w.rows("select * from orca.pool_machines order by number")
    lives = [one["name"] for one in rows if one["ended_at"] is None]
    assert [machine.name for machine in w.cloud.list()] == lives, "machines without a row, or rows without a machine"
    assert all(one["revoked_at"] for one in rows if one["ended_at"]), "a token that nobody needs any more is good still"
    assert len(lives) <= 1, "a machine that nobody needs"
    if row.begin == "stray":
        assert not lives
        return "no machine"
    if row.begin == "remove":
        assert [(one["reason"]) for one in rows] == ["Drained"]
        return GONE
    found = {(None,): MADE, ("Interrupted", None): ANEW, ("Interrupted",): DONE}[tuple(one["reason"] for one in rows)]
    assert found != DONE or w.rows("select from orca.runs where state = 'succeeded'")
    return found


def begin_runs(w: World, row: Row, loop: Loop) -> None:
    w.queue("target", None, workers=1) if row.begin != "stray" else w.stray(w.runs, "driver")
    if row.begin in {"make", "stray"}:
        time.sleep(1.1 if row.begin == "stray" else 0)  # past its grace; creation times are whole seconds
        return
    [run] = w.rows("select id from orca.runs where pipeline = 'target'")
    w.settle(loop, lambda: len(w.seen(POD, w.runs, **{RUN_LABEL: str(run["id"])})) == 3)
    with w.database.transaction() as transaction:
        transaction.run("select set_config('orca.writer', 'driver', true)")
        transaction.run(
            "update orca.runs set state = 'succeeded', ended_at = now() where id = %(id)s", {"id": run["id"]}
        )
    if row.begin == "finish":
        w.settle(loop, lambda: is_gone_soon(w))
        assert w.rows("select from orca.run_clusters where run = %(id)s and ended_at is null", id=run["id"])


def is_gone_soon(w: World) -> bool:
    """Whether the objects go without another pass; they do not while the driver's log is kept."""
    with contextlib.suppress(AssertionError):
        w.wait_until(lambda: not objects_of_target(w), 5)
    return not objects_of_target(w)


def objects_of_target(w: World) -> list[Object]:
    [run] = w.rows("select id from orca.runs where pipeline = 'target'")
    labels = {RUN_LABEL: str(run["id"])}
    found = [item for kind in (JOB, POD, SERVICE) for item in w.seen(kind, w.runs, **labels)]
    return [item for item in found if "deletionTimestamp" not in item["metadata"]]


def left_of_runs(w: World, row: Row) -> str:
    if row.begin == "stray":
        return "a stray" if w.seen(POD, w.runs, **{ROLE_LABEL: "driver"})[1:] else "nothing"
    objects = "objects" if objects_of_target(w) else "no object"
    rows = w.rows(
        "select ending_reason from orca.run_clusters c join orca.runs r on r.id = c.run where r.pipeline = 'target'"
    )
    if not rows:
        return "nothing"
    return f"the reason of its end; {objects}" if rows[0]["ending_reason"] else f"rows, not confirmed; {objects}"


def then_of_runs(w: World, row: Row) -> str:
    if row.begin == "stray":
        assert w.kube.get(Ref(kind=POD, namespace=w.runs, name="stray")) is None
        return "no stray"
    [cluster] = w.rows(
        "select c.* from orca.run_clusters c join orca.runs r on r.id = c.run where r.pipeline = 'target'"
    )
    if row.begin == "make":
        kinds = sorted(
            item["metadata"]["name"].removeprefix(f"orca-{cluster['run']}-1") for item in objects_of_target(w)
        )
        assert len(kinds) == 5, kinds  # Job, its Pod, the head and its Service, a worker
        assert not w.rows("select from orca.kube_objects where uid is null")
        return RUNS
    assert objects_of_target(w) == []
    assert cluster["reason"] == "Ended"
    assert len(w.rows("select from orca.cohorts where scope = 'runs'")) == 1, "the cohort that nobody needs"
    return SWEPT


def begin_runtimes(w: World, row: Row, loop: Loop) -> None:
    if row.begin == "stray":
        w.stray(w.pods, "runtime")
        time.sleep(1.1)
        return
    warm = "select name from orca.runtime_pods where ready_at is not null and ended_at is null"
    w.environment_of_runtimes()
    w.pool(1 if row.begin == "make" else 2)
    w.settle(loop, lambda: len(w.rows(warm)) == (1 if row.begin == "make" else 2))
    w.pool(2 if row.begin == "make" else 1)
    if row.begin == "finish":
        w.settle(
            loop, lambda: w.rows("select from orca.runtime_pods where ending_reason is not null and ended_at is null")
        )


def left_of_runtimes(w: World, row: Row) -> str:
    live = [item for item in w.seen(POD, w.pods) if "deletionTimestamp" not in item["metadata"]]
    if row.begin == "stray":
        return "a stray" if live else "nothing"
    rows = w.rows("select * from orca.runtime_pods where ended_at is null")
    objects = "objects" if len(live) > 1 else "no object"
    if any(one["ending_reason"] for one in rows):
        return f"the reason of its end; {objects}"
    return f"rows, not confirmed; {objects}" if len(rows) > 1 else "nothing"


def then_of_runtimes(w: World, row: Row) -> str:
    live = {item["metadata"]["name"] for item in w.seen(POD, w.pods)}
    if row.begin == "stray":
        assert live == set()
        return "no stray"
    rows = w.rows("select name from orca.runtime_pods where ended_at is null and ready_at is not null")
    assert live == {one["name"] for one in rows}
    assert len(live) == (2 if row.begin == "make" else 1)
    assert not w.rows("select from orca.kube_objects where uid is null")
    return WARM if row.begin == "make" else ONE


SCOPES: dict[
    str, tuple[Callable[[World, Row, Loop], None], Callable[[World, Row], str], Callable[[World, Row], str]]
] = {
    "machines": (begin_machines, left_of_machines, then_of_machines),
    "runs": (begin_runs, left_of_runs, then_of_runs),
    "runtimes": (begin_runtimes, left_of_runtimes, then_of_runtimes),
}


def check(w: World, row: Row) -> None:
    begin, left, then = SCOPES[row.scope]
    before = w.loop()
    if row.scope == "runs":  # a driver that runs the whole time
        w.queue("standing", None)
        w.settle(before, lambda: w.seen(POD, w.runs))
    standing = {item["metadata"]["uid"] for item in (*w.seen(JOB, w.runs), *w.seen(POD, w.runs))}
    begin(w, row, before)
    warm = {item["metadata"]["uid"] for item in w.seen(POD, w.pods)} if row.scope == "runtimes" else set()
    w.die(row)
    assert left(w, row) in row.left.split(" / ")

    loop = w.loop()
    for _ in range(PASSES_MOST):
        w.pass_with(loop)
    came = then(w, row)
    assert came in row.then.split(" / ")
    assert w.rows("select from orca.engine_operations where ended_at is null or outcome = 'OutcomeUnknown'") == []
    uids = {item["metadata"]["uid"] for item in (*w.seen(JOB, w.runs), *w.seen(POD, w.runs))}
    assert standing <= uids, "a driver that ran was replaced"
    if row.begin == "make":
        assert warm <= {item["metadata"]["uid"] for item in w.seen(POD, w.pods)}, "a warm Pod was replaced"
    assert w.seen(SECRET, w.pods) == []
    operations = w.operations()
    assert w.pass_with(loop).changed == 0
    assert w.operations() == operations, "an engine with nothing to do"


@pytest.mark.parametrize("row", MATRIX, ids=lambda row: f"{row.scope}, {row.step}")
def test_the_next_loop_converges_in_three_passes(world: Callable[..., World], row: Row) -> None:
    check(world(row.scope), row)


@pytest.mark.parametrize("scope", SCOPES)
def test_so_it_does_with_the_engines_state_in_files(world: Callable[..., World], scope: str) -> None:
    check(world(scope, "file"), next(row for row in MATRIX if (row.scope, row.step) == (scope, "in the up")))


def page() -> str:
    lines = [
        "# Crash matrix",
        "",
        "<!-- Made by tests/cluster/crash/test_crash_matrix.py; a change by hand is lost. -->",
        "",
        (
            "A loop makes a pass and is killed (SIGKILL) at a step of it; then another loop makes three passes. This is with the "
            "real engine, its state in Postgres, and a real API server; *in the up* also with the state in files. After each, "
            "besides what the table says: a driver that ran the whole time, or a warm Pod, is the same by its uid; no operation "
            "of the engine is open; nothing belongs to nobody; a fourth pass changes nothing and runs no engine. Where it "
            "depends on the instant, the cases are told apart with a slash."
        ),
        "",
        "| scope | killed | there is then | after three passes |",
        "|---|---|---|---|",
        *(f"| {row.scope} | {row.step} | {row.left} | {row.then} |" for row in MATRIX),
    ]
    return "\n".join(lines) + "\n"


def test_the_page_says_the_same() -> None:
    if os.environ.get("ORCA_CRASH_MATRIX") == "write":
        PAGE.write_text(page(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page()
