"""Run clusters on a real node: drivers that run, log, and end in every way; what the API server shows of each end.

`ORCA_RECORD_SAMPLES=1` renews tests/unit/samples/kubernetes with what the API server showed.
"""

from __future__ import annotations

import base64
import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from orca_infra.errors import OrcaError
from orca_infra.kube.client import Kube
from orca_infra.kube.kinds import JOB, NAMESPACE, POD, SERVICE, Ref
from orca_infra.kube.labels import ROLE_LABEL, RUN_LABEL, STACK_LABEL
from orca_infra.log import make_log
from orca_infra.loop.cluster_passes import RunPasses
from orca_infra.process import ProcessId, end_session
from orca_infra.runs.model import EndReason
from orca_infra.settings import read_settings
from orca_infra.stack.engine import Engine
from orca_infra.stack.operations import RecordedEngine
from orca_infra.surroundings import Surroundings, open_surroundings
from orca_infra.testing.cluster import TestCluster
from orca_infra.testing.cluster_http import Api
from orca_infra.testing.node import IMAGE, RealNode

SAMPLES = Path(__file__).parents[1] / "unit" / "samples" / "kubernetes"
KINDS = (JOB, POD, SERVICE)
#: Of each container: what a driver that eats memory, or fills its disk, meets. The rendered Pods have requests alone.
LIMITS = {"memory": "96Mi", "ephemeral-storage": "24Mi"}
DEADLINE_SECONDS = 4


class RecordingKube:
    """The Kubernetes port of the passes, which keeps what a pass saw."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self.seen: dict[str, Sequence[dict[str, Any]]] = {}

    def list(self, kind: Any, **selection: Any) -> Any:
        listing = self._kube.list(kind, **selection)
        if selection.get("label_exists"):  # of an observation
            self.seen[kind.kind] = [{"kind": kind.kind, **item} for item in listing.items]
        return listing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kube, name)

    def objects_of(self, run: int) -> Sequence[dict[str, Any]]:
        found = [item for items in self.seen.values() for item in items]
        return [item for item in found if item["metadata"]["labels"].get(RUN_LABEL) == str(run)]


@dataclass
class Room:
    """What a test works with: passes over a namespace of its own."""

    passes: RunPasses
    surroundings: Surroundings
    kube: Kube
    api: Api
    seen: RecordingKube
    namespace: str
    environment: dict[str, str]
    wait: Callable[..., None]
    samples: dict[int, Sequence[dict[str, Any]]] = field(default_factory=dict)

    def queue(self, pipeline: str, *, workers: int = 0, image: str = IMAGE, max_starts: int = 1) -> int:
        """Queue one run; its pipeline fails with its last start."""
        with self.surroundings.database.transaction() as transaction:
            transaction.run(
                "insert into orca.pipelines (name, image, workers, max_starts) values (%(p)s, %(i)s, %(w)s, %(m)s)"
                " on conflict do nothing",
                {"p": pipeline, "w": workers, "i": image, "m": max_starts},
            )
            parameters = {"p": pipeline}
            return int(transaction.value("insert into orca.runs (pipeline) values (%(p)s) returning id", parameters))

    def rows(self, query: Any, **parameters: Any) -> list[dict[str, Any]]:
        with self.surroundings.database.snapshot() as transaction:
            return transaction.dicts(query, parameters)

    def cluster_of(self, run: int) -> dict[str, Any]:
        return self.rows("select * from orca.run_clusters where run = %(r)s", r=run)[0]

    def run_of(self, run: int) -> dict[str, Any]:
        return self.rows("select state, start, reason from orca.runs where id = %(r)s", r=run)[0]

    def run_pass(self) -> None:
        """One pass; what it saw of a start that it found to end is kept."""
        open_before = {row["run"] for row in self.rows("select run from orca.run_clusters where ending_reason is null")}
        self.passes.run()
        for row in self.rows("select run from orca.run_clusters where ending_reason is not null"):
            if row["run"] in open_before:
                self.samples[row["run"]] = self.seen.objects_of(row["run"])

    def until(self, predicate: Callable[[], object], seconds: float = 60) -> None:
        """Make passes until something is true."""

        def pass_and_look() -> object:
            self.run_pass()
            return predicate()

        self.wait(pass_and_look, seconds, "passes did not come to it")

    def pod(self, run: int, role: str) -> dict[str, Any] | None:
        """The newest of that role."""
        labels = {RUN_LABEL: str(run), ROLE_LABEL: role}
        found = self.kube.list(POD, namespace=self.namespace, labels=labels).items
        return max(found, key=lambda pod: str(pod["metadata"]["creationTimestamp"]), default=None)

    def is_running(self, run: int, role: str = "driver") -> bool:
        pod = self.pod(run, role)
        return pod is not None and pod["status"].get("phase") == "Running"

    def nothing_runs(self, run: int) -> None:
        """No container of it runs now, and its Pods go: the kubelet takes a moment to say so of the last one."""
        pods = self.kube.list(POD, namespace=self.namespace, labels={RUN_LABEL: str(run)}).items
        assert {pod["status"].get("phase") for pod in pods} <= {"Succeeded", "Failed"}
        self.wait(lambda: self.pod(run, "driver") is None and self.pod(run, "worker") is None, 40, "its Pods go")

    def log_of(self, run: int) -> str:
        return (self.surroundings.logs_folder / str(run) / "driver.log").read_text()

    def misbehaves(self, run: int) -> bool:
        """Whether its driver has come to that, by its log."""
        pod = self.pod(run, "driver")
        with suppress(OrcaError):  # its container does not run yet
            return pod is not None and b"it is to misbehave" in b"".join(
                self.kube.logs(self.namespace, pod["metadata"]["name"])
            )
        return False

    def evict(self, run: int) -> None:
        """Have the driver evicted, as `kubectl drain` does it."""
        pod = self.pod(run, "driver")
        assert pod is not None
        name = pod["metadata"]["name"]
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
        self.api.call("POST", f"/api/v1/namespaces/{self.namespace}/pods/{name}/eviction", eviction)

    def delete_driver(self, run: int, grace_seconds: int | None = None) -> None:
        """As `kubectl delete pod` does it, without waiting."""
        pod = self.pod(run, "driver")
        assert pod is not None
        ref = Ref(kind=POD, namespace=self.namespace, name=pod["metadata"]["name"])
        self.kube.delete(ref, grace_seconds=grace_seconds)

    def cancel(self, run: int) -> None:
        """As the scheduler does it for a person."""
        with self.surroundings.database.transaction() as transaction:
            transaction.run("select set_config('orca.writer', 'scheduler', true)")
            transaction.run("update orca.runs set state = 'canceled', ended_at = now() where id = %(r)s", {"r": run})

    def with_settings(self, **more: str) -> Room:
        """The same stack, with passes of other settings; what those find to end is kept in the same place."""
        made = make_room(self.surroundings, self.kube, self.api, {**self.environment, **more}, self.wait)
        return replace(made, samples=self.samples)


def make_room(
    surroundings: Surroundings, kube: Kube, api: Api, environment: dict[str, str], wait: Callable[..., None]
) -> Room:
    settings = read_settings(environment)
    engine = Engine(surroundings.engine, {"KUBECONFIG": environment["KUBECONFIG"]})
    recorded = RecordedEngine(
        engine,
        surroundings.database,
        backend_url=surroundings.engine.backend_url,
        verify=lambda: None,
        deadline_seconds=300,
    )
    seen = RecordingKube(kube)
    passes = RunPasses(
        replace(surroundings, settings=settings),
        seen,  # type: ignore[arg-type]
        recorded,
        environ=environment,
        verify=lambda: None,
        log=make_log(form="text"),
    )
    return Room(passes, surroundings, kube, api, seen, environment["ORCA_RUNS_NAMESPACE"], environment, wait)


@pytest.fixture(scope="module")
def room(
    cluster: TestCluster,
    node: RealNode,
    postgres_server: Any,
    tmp_path_factory: pytest.TempPathFactory,
    wait_until: Callable[..., None],
) -> Iterator[Room]:
    """A namespace with the database's Secret and limits, and passes over it."""
    folder = tmp_path_factory.mktemp("runs")
    url = postgres_server.new_database("orca_migrated")
    namespace = f"test-{secrets.token_hex(4)}"
    (folder / "passphrase").write_text("a passphrase for tests")
    (folder / "orca.toml").write_text("[pools]\n")
    (folder / "state").mkdir()
    environment = {
        "ORCA_STACK": "test",
        "ORCA_DB": url,
        "ORCA_HOME": str(folder / "home"),
        "ORCA_CONFIG": str(folder / "orca.toml"),
        "ORCA_TOKEN_KEY": "0123456789abcdef0123456789abcdef",
        "PULUMI_BACKEND_URL": (folder / "state").as_uri(),
        "PULUMI_CONFIG_PASSPHRASE_FILE": str(folder / "passphrase"),
        "ORCA_RUNNER": "kubernetes",
        "ORCA_RUNS_NAMESPACE": namespace,
        "ORCA_DRIVER_CPU": "20m",
        "ORCA_HEAD_CPU": "20m",
        "ORCA_WORKER_CPU": "20m",
        "ORCA_POD_MEMORY": "48Mi",
        "ORCA_STRAY_GRACE_SECONDS": "1",
        "ORCA_HEARTBEAT_SECONDS": "0.5",
        "ORCA_POOL_SCALE_SECONDS": "1",
        "KUBECONFIG": str(cluster.kubeconfig),
    }
    surroundings = open_surroundings(read_settings(environment), say=lambda _: None)
    with Kube.connect(kubeconfig=cluster.kubeconfig) as kube:
        labels = {STACK_LABEL: surroundings.stack_id}
        kube.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace, "labels": labels}})
        metadata = {"namespace": namespace}
        database_url = base64.b64encode(postgres_server.container_url(url).encode()).decode()
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {**metadata, "name": "orca-db"}}
        kube.create({**secret, "data": {"url": database_url}})
        limits = [{"type": "Container", "default": LIMITS, "defaultRequest": {"ephemeral-storage": "1Mi"}}]
        path = f"/api/v1/namespaces/{namespace}/limitranges"
        cluster.api.call("POST", path, {"metadata": {"name": "limits"}, "spec": {"limits": limits}})
        yield make_room(surroundings, kube, cluster.api, environment, wait_until)
        kube.delete(Ref(kind=NAMESPACE, namespace=None, name=namespace))
    surroundings.close()
    postgres_server.drop(url)


@dataclass(frozen=True)
class Ends:
    """One run for each way to end, all of them started at the same time; `runs` by their pipelines' names."""

    room: Room
    runs: dict[str, int]

    def reach(self, pipeline: str, seconds: float = 60) -> dict[str, Any]:
        """Make passes until this run's start has ended and nothing is left of it; gives its row."""
        run = self.runs[pipeline]
        self.room.until(lambda: self.room.cluster_of(run)["ended_at"], seconds)
        self.room.nothing_runs(run)
        return self.room.cluster_of(run)


@pytest.fixture(scope="module")
def ends(room: Room) -> Ends:
    runs = {"never-ends": room.queue("never-ends")}
    room.with_settings(ORCA_RUN_DEADLINE=str(DEADLINE_SECONDS)).run_pass()  # born with that deadline
    for pipeline in ("eats-memory", "fills-disk", "exits-3", "ignores-term", "ignores-term.evicted"):
        runs[pipeline] = room.queue(pipeline)
    runs["ends-its-head"] = room.queue("ends-its-head", workers=1)
    runs["no-image"] = room.queue("no-image", image="registry.invalid/nothing:1")
    runs["work"] = room.queue("work", workers=1)
    runs["ignores-term.deleted"] = room.queue("ignores-term.deleted", max_starts=2)
    for pipeline in ("ignores-term", "ignores-term.evicted", "ignores-term.deleted"):
        room.until(partial(room.misbehaves, runs[pipeline]))
    room.cancel(runs["ignores-term"])
    room.evict(runs["ignores-term.evicted"])
    room.delete_driver(runs["ignores-term.deleted"])
    return Ends(room, runs)


def test_a_driver_reads_postgres_reaches_the_head_by_name_logs_and_finishes(ends: Ends) -> None:
    row = ends.reach("work")
    run = ends.runs["work"]
    assert row["reason"] == "Ended"
    assert ends.room.run_of(run) == {"state": "succeeded", "start": 1, "reason": None}
    header, *lines = ends.room.log_of(run).splitlines()
    assert re.match(rf"--- run {run} start 1, Pod orca-{run}-1-\w+", header)
    assert lines == [
        f"driver: run {run}, start 1, pipeline work; Postgres 18",
        f"driver: the head at orca-{run}-1-head:6390 answers: a head with 1 worker(s)",
        "driver: step 1 of 3",
        "driver: step 2 of 3",
        "driver: step 3 of 3",
        f"driver: run {run} succeeded",
    ]


@pytest.mark.parametrize(
    ("pipeline", "reason", "sample", "seconds"),
    [
        ("exits-3", EndReason.DRIVER_FAILED, "", 30),
        ("eats-memory", EndReason.OOM_KILLED, "", 30),
        ("ends-its-head", EndReason.HEAD_LOST, "", 75),
        ("never-ends", EndReason.DEADLINE_EXCEEDED, "", 75),
        ("fills-disk", EndReason.EVICTED, "", 90),
        ("ignores-term.evicted", EndReason.EVICTED, "-by-api", 60),
    ],
)
def test_what_ends_a_driver_is_its_runs_reason(
    ends: Ends, pipeline: str, reason: EndReason, sample: str, seconds: float
) -> None:
    row = ends.reach(pipeline, seconds)
    run = ends.runs[pipeline]
    record(f"{reason}{sample}", ends.room.samples[run])
    assert row["reason"] == reason, row["ending_detail"]
    assert ends.room.run_of(run) == {"state": "failed", "start": 1, "reason": reason}


# The loop itself.


def start_loop(room: Room, folder: Path) -> subprocess.Popen[bytes]:
    """The loop as it ships, in a process of its own."""
    with (folder / "loop.log").open("ab") as log:
        return subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", "orca_infra.cli", "run"],
            env={**os.environ, **room.environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def end_loop(loop: subprocess.Popen[bytes]) -> None:
    with suppress(Exception):
        end_session(ProcessId.of(loop.pid), 10)
    loop.kill()
    loop.wait()


def test_a_driver_survives_the_sudden_death_of_its_loop(room: Room, tmp_path: Path) -> None:
    """SIGKILL of the loop: after the next leader's passes it is the same container, started at the same time."""
    run = room.queue("never-ends.survivor")
    loops = [start_loop(room, tmp_path)]
    try:
        room.wait(lambda: room.is_running(run), 40, "the driver runs")
        before = container_of(room.pod(run, "driver"))
        loops[0].kill()
        loops[0].wait()
        loops.append(start_loop(room, tmp_path))
        # Another run, from queued to its end: the next leader makes passes over all of them.
        other = room.queue("work-alone")
        room.wait(lambda: room.run_of(other)["state"] == "succeeded", 40, "the next leader makes passes")
        room.wait(lambda: room.cluster_of(other)["ended_at"], 40, "the next leader sweeps")
        assert container_of(room.pod(run, "driver")) == before
        assert room.run_of(run) == {"state": "running", "start": 1, "reason": None}
    finally:
        for loop in loops:
            end_loop(loop)
    room.cancel(run)
    room.until(lambda: room.cluster_of(run)["ended_at"])


def container_of(pod: dict[str, Any] | None) -> tuple[str, str, str, int]:
    """Which Pod and which container it is, since when, and how often it was started again."""
    assert pod is not None
    [container] = pod["status"]["containerStatuses"]
    started = container["state"]["running"]["startedAt"]
    return pod["metadata"]["uid"], container["containerID"], started, container["restartCount"]


def test_a_driver_that_ignores_its_end_is_killed_and_its_start_ends_only_then(ends: Ends) -> None:
    """Canceled by the scheduler (above), it got SIGTERM and, 30 s later, SIGKILL."""
    row = ends.reach("ignores-term")
    run = ends.runs["ignores-term"]
    assert row["reason"] == "Ended"
    assert ends.room.run_of(run)["state"] == "canceled"
    canceled = ends.room.rows("select ended_at from orca.runs where id = %(r)s", r=run)[0]["ended_at"]
    assert (row["ended_at"] - canceled).total_seconds() > 28


def test_a_driver_that_outlives_its_deleted_pod_is_alone_and_its_successor_is_heard_apart(ends: Ends) -> None:
    """Its Pod got SIGTERM and ignores it: the next start is made once it was killed, 30 s later, and not beside it."""
    room, run = ends.room, ends.runs["ignores-term.deleted"]

    def next_one_runs() -> bool:
        pods = room.kube.list(POD, namespace=room.namespace, labels={RUN_LABEL: str(run), ROLE_LABEL: "driver"}).items
        assert sum(pod["status"].get("phase") == "Running" for pod in pods) <= 1, "two drivers"
        return room.run_of(run)["start"] == 2 and room.misbehaves(run)

    room.until(next_one_runs, 90)
    [first] = room.rows("select reason from orca.run_clusters where run = %(r)s and start = 1", r=run)
    assert first == {"reason": "DriverFailed"}
    room.delete_driver(run, grace_seconds=1)
    room.until(lambda: room.run_of(run)["state"] == "failed")
    sections = room.log_of(run).split(f"--- run {run} start ")
    assert len(sections) == 3
    for start, section in ((1, sections[1]), (2, sections[2])):
        header, *lines = section.splitlines()
        assert header.startswith(f"{start}, Pod orca-{run}-{start}-")
        assert [line for line in lines if not line.startswith("--- ")] == [
            f"driver: run {run}, start {start}, pipeline ignores-term.deleted; Postgres 18",
            "driver: it is to misbehave (ignores-term.deleted)",
        ]


def test_an_image_that_cannot_be_pulled_ends_its_start_as_such(ends: Ends) -> None:
    """The last of these: a loop that is impatient with its start would be with any other that is just being made."""
    room, run = ends.room, ends.runs["no-image"]

    def waits() -> object:
        pod = room.pod(run, "driver")
        states = ((pod or {}).get("status") or {}).get("containerStatuses") or []
        return states and states[0]["state"].get("waiting", {}).get("reason") in {"ErrImagePull", "ImagePullBackOff"}

    room.until(waits)
    assert room.cluster_of(run)["ending_reason"] is None
    impatient = room.with_settings(ORCA_RUN_START_SECONDS="1")
    impatient.until(lambda: room.cluster_of(run)["ended_at"])
    record(str(EndReason.IMAGE_PULL), impatient.samples[run])
    row = room.cluster_of(run)
    assert row["reason"] == "ImagePull"
    assert room.run_of(run)["reason"] == "ImagePull"


def record(name: str, objects: Sequence[dict[str, Any]]) -> None:
    """Keep what the API server showed when a start was found to end, less what says nothing about it."""
    assert objects
    if os.environ.get("ORCA_RECORD_SAMPLES"):
        SAMPLES.mkdir(parents=True, exist_ok=True)
        kept = [trimmed(item) for item in sorted(objects, key=lambda item: (item["kind"], item["metadata"]["name"]))]
        (SAMPLES / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")


def trimmed(item: dict[str, Any]) -> dict[str, Any]:
    """Without what names this machine, and without the fields that nobody reads."""
    kept = ("name", "namespace", "uid", "creationTimestamp", "deletionTimestamp", "labels", "ownerReferences")
    metadata = {key: item["metadata"][key] for key in kept if key in item["metadata"]}
    status = {key: value for key, value in (item.get("status") or {}).items() if not key.endswith(("IP", "IPs"))}
    text = json.dumps({"kind": item["kind"], "metadata": metadata, "status": status})
    cleaned: dict[str, Any] = json.loads(re.sub(r"\b\d+\.\d+\.\d+\.\d+\b", "192.0.2.1", text))
    return cleaned
