"""What a pass costs as everything grows: 100,000 queued runs, 2,000 machines, 2,000 warm Pods, 1,000 run clusters.

Measured is the loop itself: the database is real, the machines' cloud is in memory, the API server's face is a process that
answers from a dictionary (kube_memory.py), and the engine is a stand-in that makes at once what it is told; what an `up`
costs is measured by the benches pass, engine_path and warm_pool. Each figure is taken at four sizes; docs/figures has the
curves.
"""

from __future__ import annotations

import gc
import itertools
import os
import time
import tracemalloc
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from harness import progress, report, surroundings
from kube_memory import KubeMemory, kube_memory
from plots import plot

from orca_infra.config import Config, parse_config
from orca_infra.kube.client import Kube
from orca_infra.log import make_log
from orca_infra.loop.cluster_passes import RunPasses, RuntimePasses
from orca_infra.loop.passes import MachinePasses
from orca_infra.machines.decide import POOL_LABEL, STACK_LABEL
from orca_infra.machines.observe import SQL
from orca_infra.process import ProcessId
from orca_infra.runs.limits import run_settings
from orca_infra.runs.logs import DriverLogs
from orca_infra.runs.model import RunSpec
from orca_infra.runs.observe import SQL as RUNS
from orca_infra.runs.render import render
from orca_infra.runtimes.launch import LaunchHands, LaunchRequest, launch
from orca_infra.runtimes.model import Environment, Pool
from orca_infra.runtimes.render import render_warm
from orca_infra.runtimes.rows import record_pod
from orca_infra.stack.engine import Engine
from orca_infra.stack.operations import RecordedEngine
from orca_infra.stack.outcome import ResourceChange
from orca_infra.surroundings import Surroundings
from orca_infra.testing.fake_cloud import FakeCloud, FakeProvider
from orca_infra.testing.simulation_engine import FakeBackend, FakeEngine
from orca_infra.testing.simulation_world import SimulatedClock

SCALE = float(os.environ.get("ORCA_BENCH_SCALE", "1"))  # 0.1 for a try
TIMES = 5
QUEUED, MACHINES, WARM, CLUSTERS = (int(most * SCALE) for most in (100_000, 2_000, 2_000, 1_000))
STEPS = (0, 0.25, 0.5, 1)
FIGURES = Path(__file__).parents[1] / "docs" / "figures"
NOW = f"{datetime.now(UTC):%FT%TZ}"
_POOLS = """
[pools.full]
provider = "local"
image = "registry.example/orca-worker:1"
max_machines = 100000
idle_seconds = "10h"
types = [{ type = "small", locations = ["a"] }]
[pools.more]
provider = "local"
image = "registry.example/orca-worker:1"
max_machines = 100000
max_booting = 1000
idle_seconds = "10h"
types = [{ type = "small", locations = ["a"] }]
"""
Curve = list[tuple[float, float]]


def main() -> None:
    figures: dict[str, float] = {}
    with surroundings({"ORCA_POOL_TRY_SECONDS": "0.001", "ORCA_POOL_GROW_AFTER": "0"}) as here:
        machines(here, figures)
    cluster = {"ORCA_RUNNER": "kubernetes", "ORCA_RUNTIMES_NAMESPACE": "runtimes"}
    with (
        surroundings(cluster) as here,
        kube_memory(here.settings.home) as (memory, kubeconfig),
        Kube.connect(kubeconfig=kubeconfig) as kube,
    ):
        prepare(here, memory)
        run_clusters(here, memory, kube, figures)
        warm_pods(here, memory, kube, figures)
    report(
        "load",
        figures=figures,
        floors={},
        targets={
            "machines_no_change_seconds": 2.0,
            "machines_growth_with_queued": 1.5,
            # It grows with the machines all the same: a pass that changes something is kept whole, for `orca-infra explain`.
            "one_more_machine_seconds": 0.5,
            "runs_no_change_seconds": 4.0,
            "one_more_run_growth_over_no_change": 1.5,
            "runtimes_no_change_seconds": 3.0,
            "one_more_launch_growth": 1.5,
            "memory_mib_for_each_pass_of_all": 200.0,
        }
        if SCALE == 1
        else {},
        load=os.getloadavg()[0],
    )


def measured(call: Callable[[], Any], times: int = TIMES) -> float:
    """The best of some calls, in seconds: other work on the machine only adds. The first warms caches and is not counted."""
    call()
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def peak_mib(call: Callable[[], Any]) -> float:
    """What one call allocates at its highest, in MiB of Python's memory."""
    gc.collect()
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()


def sizes(most: int) -> list[int]:
    return [int(most * step) for step in STEPS]


def growth(curve: Curve) -> float:
    """The last value over the first: 1 is flat."""
    return curve[-1][1] / max(curve[0][1], 1e-3)


# Machines.


def machines(here: Surroundings, figures: dict[str, float]) -> None:
    clock = SimulatedClock()
    clock.now = datetime.now(UTC)
    uids = (f"uid-{number}" for number in itertools.count())
    cloud = FakeCloud(clock=clock, new_uid=lambda: next(uids))
    engine = cast("Engine", FakeEngine(FakeBackend(clock=clock, clouds={"a": cloud})))
    passes = MachinePasses(
        here, engine, lambda: None, quiet(), providers=lambda _: {"local": FakeProvider(cloud)}
    )  # fmt: skip
    config = parse_config(_POOLS, "bench")
    execute(
        here,
        "insert into orca.pipelines (name, placement, max_runs) "
        "values ('held', 'worker:full', 0), ('w', 'worker:more', null)",
    )
    still: Curve = []
    one_more: Curve = []
    memory: Curve = []
    made = 0
    for size in sizes(MACHINES):
        add_machines(here, cloud, range(made + 1, size + 1))
        made = size
        progress(f"machines: {size}")
        still.append((size, measured(lambda: no_change(here, passes, config))))
        memory.append((size, peak_mib(lambda: no_change(here, passes, config))))
        one_more.append((size, measured(lambda: make_one(here, passes, config)) - still[-1][1]))
    figures["machines_no_change_seconds"] = still[-1][1]
    figures["machines_no_change_mib"] = memory[-1][1]
    figures["one_more_machine_seconds"] = one_more[-1][1]
    figures["one_more_machine_growth"] = growth(one_more)
    plot(
        FIGURES / "load-machines.svg",
        "A pass over the machine pools",
        "machines",
        "seconds",
        {"nothing to do": still, "one machine more, added": one_more},
    )
    plot(
        FIGURES / "load-machines-memory.svg",
        "A pass over the machine pools",
        "machines",
        "MiB at its highest",
        {"nothing to do": memory},
    )
    with_queued: Curve = []
    queued = 0
    for size in sizes(QUEUED):
        execute(here, "insert into orca.runs (pipeline) select 'held' from generate_series(1, %(n)s)", n=size - queued)
        execute(here, "analyze orca.runs")
        queued = size
        progress(f"queued runs: {size}")
        with_queued.append((size, measured(lambda: no_change(here, passes, config))))
    figures["machines_growth_with_queued"] = growth(with_queued)
    plot(
        FIGURES / "load-queued.svg",
        f"A pass over {MACHINES:,} machines",
        "queued runs",
        "seconds",
        {"nothing to do": with_queued},
    )


def add_machines(here: Surroundings, cloud: FakeCloud, numbers: range) -> None:
    with here.database.transaction() as transaction:
        for number in numbers:
            name = f"orca-full-{number}"
            machine = cloud.plant(name, "a", {STACK_LABEL: here.stack_id, POOL_LABEL: "full"})
            given = {
                "name": name,
                "pool": "full",
                "number": number,
                "provider": "local",
                "type": "small",
                "location": "a",
                "spot": False,
            }
            transaction.run(SQL["record_machine"], {**given, "rendered": "{}", "token_hash": b"-"})
            transaction.run(SQL["confirm_machine"], {"name": name, "uid": machine.uid})
            transaction.run("insert into orca.workers (name, pool) values (%(n)s, 'full')", {"n": name})
            transaction.run(
                "insert into orca.owned (stack, urn, type, name, id, uid) values (%(s)s, %(n)s, 't', %(n)s, %(n)s, %(u)s)",
                {"s": f"{here.settings.stack}.machines.full", "n": name, "u": machine.uid},
            )
    execute(here, "analyze")


def no_change(here: Surroundings, passes: MachinePasses, config: Config) -> None:
    execute(here, "update orca.workers set seen_at = now()")
    result = passes.run(config)
    assert not result.plan.actions, result.plan.actions[:3]


def make_one(here: Surroundings, passes: MachinePasses, config: Config) -> None:
    """A run is queued, and the pass makes a machine for it, on which it then runs."""
    execute(here, "insert into orca.runs (pipeline) values ('w')")
    result = passes.run(config)
    assert result.changed == 1, result.plan
    with here.database.transaction() as transaction:
        transaction.run(
            "insert into orca.workers (name, pool) select name, pool from orca.pool_machines where pool = 'more' "
            "on conflict do nothing"
        )
        transaction.run("select set_config('orca.writer', 'worker', true)")
        transaction.run(
            "update orca.runs set state = 'running', worker = (select max(name) from orca.pool_machines m "
            "where pool = 'more' and not exists (select from orca.runs r where r.worker = m.name)) "
            "where pipeline = 'w' and state = 'queued'"
        )


# Kubernetes.


class Maker:
    """Stands in for the engine below its ledger: what a cohort's program declares is there at once."""

    def __init__(self, memory: KubeMemory) -> None:
        self._memory = memory
        self._uids = itertools.count(1)
        self.changes: list[ResourceChange] = []

    def up_new(
        self, _stack: str, program: Any, *, on_start: Callable[[ProcessId], None], **_: Any
    ) -> tuple[ResourceChange, ...]:
        del on_start
        self.changes = []
        program(self)
        return tuple(self.changes)

    def register(self, kind: str, name: str, properties: Any, **_: Any) -> Any:
        uid = f"made-{next(self._uids)}"
        metadata = {**(properties.get("metadata") or {"name": name}), "uid": uid, "creationTimestamp": NOW}
        outputs = {**properties, "metadata": metadata}
        if not kind.startswith("pulumi:"):
            plural = kind.rpartition(":")[2].lower() + "s"
            self._memory.fill([(plural, seen(outputs, uid))])
            urn = f"urn:pulumi:s::p::{kind}::{name}"
            self.changes.append(ResourceChange(op="create", urn=urn, type=kind, id=name, outputs=outputs))
        return Made(outputs)

    def drop(self, _stack: str) -> None: ...

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the loop asked the engine for {name}")


class Made:
    def __init__(self, outputs: Any) -> None:
        self.outputs = outputs
        self.urn = self.id = "made"

    def result(self) -> Made:
        return self


def seen(manifest: Any, uid: str) -> dict[str, Any]:
    """An object as the API server would show it."""
    metadata = {**manifest["metadata"], "uid": uid, "creationTimestamp": NOW, "resourceVersion": "1"}
    shown = {**manifest, "metadata": metadata}
    if manifest["kind"] == "Pod":
        ready = {"type": "Ready", "status": "True"}
        shown["status"] = {"phase": "Running", "podIP": "10.0.0.1", "conditions": [ready]}
    return shown


def prepare(here: Surroundings, memory: KubeMemory) -> None:
    namespaces = [
        ("namespaces", {"metadata": {"name": name, "uid": name, "labels": {"orca.stack": here.stack_id}}})
        for name in ("kube-system", "runtimes", here.settings.runs_namespace)
    ]
    memory.fill([(plural, {"apiVersion": "v1", "kind": "Namespace", **item}) for plural, item in namespaces])


def run_clusters(here: Surroundings, memory: KubeMemory, kube: Kube, figures: dict[str, float]) -> None:
    passes = RunPasses(here, kube, recorded(here, memory), environ={}, verify=lambda: None, log=quiet())
    DriverLogs.follow = lambda *_: None  # type: ignore[method-assign,assignment]  # nothing here has a log
    execute(
        here,
        "insert into orca.pipelines (name, image, workers, max_runs) values ('held', 'i', 2, 0), ('c', 'i', 2, null)",
    )
    still: Curve = []
    one_more: Curve = []
    peaks: Curve = []
    made = 0
    for size in sizes(CLUSTERS):
        add_clusters(here, memory, size - made)
        made = size
        progress(f"run clusters: {size}")
        still.append((size, measured(passes.run)))
        peaks.append((size, peak_mib(passes.run)))
        one_more.append((size, measured(lambda: admit_one(here, passes)) - still[-1][1]))
    figures["runs_no_change_seconds"] = still[-1][1]
    figures["runs_no_change_mib"] = peaks[-1][1]
    figures["one_more_run_seconds"] = one_more[-1][1]
    figures["one_more_run_growth_over_no_change"] = (still[-1][1] + one_more[-1][1]) / still[-1][1]
    plot(
        FIGURES / "load-run-clusters.svg",
        "A pass over the run clusters",
        "run clusters",
        "seconds",
        {"nothing to do": still, "one run more, added": one_more},
    )
    plot(
        FIGURES / "load-run-clusters-memory.svg",
        "A pass over the run clusters",
        "run clusters",
        "MiB at its highest",
        {"nothing to do": peaks},
    )
    with_queued: Curve = []
    queued = 0
    for size in sizes(QUEUED):
        execute(here, "insert into orca.runs (pipeline) select 'held' from generate_series(1, %(n)s)", n=size - queued)
        execute(here, "analyze orca.runs")
        queued = size
        progress(f"queued runs: {size}")
        with_queued.append((size, measured(passes.run)))
    figures["runs_queued_added_seconds"] = with_queued[-1][1] - with_queued[0][1]
    plot(
        FIGURES / "load-runs-queued.svg",
        f"A pass over {CLUSTERS:,} run clusters",
        "queued runs",
        "seconds",
        {"nothing to do": with_queued},
    )
    execute(here, "delete from orca.runs where state = 'queued'")


def add_clusters(here: Surroundings, memory: KubeMemory, count: int) -> None:
    """Rows and objects of so many starts that run, as a cohort leaves them; each with the Pod that its Job made."""
    settings = run_settings(here.settings, {})
    objects = []
    with here.database.transaction() as transaction:
        for _ in range(count):
            run = int(transaction.value("insert into orca.runs (pipeline) values ('c') returning id"))
            assert transaction.value(RUNS["admit"], {"run": run, "start": 0})
            spec = RunSpec(run=run, start=1, pipeline="c", image="registry.example/c:1", workers=2)
            transaction.run(
                RUNS["record_cluster"], {"run": run, "start": 1, "pipeline": "c", "cpu_millis": 1, "fill": False}
            )
            for position, manifest in enumerate(render(spec, settings, here.stack_id)):
                uid = f"run-{run}-{position}"
                metadata = manifest["metadata"]
                place = {"namespace": metadata["namespace"], "kind": manifest["kind"], "name": metadata["name"]}
                transaction.run(
                    RUNS["record_object"], {**place, "position": position, "run": run, "start": 1, "rendered": "{}"}
                )
                transaction.run(
                    "update orca.kube_objects set uid = %(uid)s, confirmed_at = now() "
                    "where name = %(name)s and kind = %(kind)s",
                    {**place, "uid": uid},
                )
                objects.append((f"{manifest['kind'].lower()}s", seen(manifest, uid)))
                if position == 0:
                    objects.append(("pods", driver_of(manifest, uid)))
    memory.fill(objects)
    execute(here, "analyze")


def driver_of(job: Any, uid: str) -> dict[str, Any]:
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": job["metadata"]["name"], "uid": uid, "controller": True}
    metadata = {**job["metadata"], "name": f"{job['metadata']['name']}-x8k2p", "ownerReferences": [owner]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": job["spec"]["template"]["spec"]}
    return seen(pod, f"{uid}-driver")


def admit_one(here: Surroundings, passes: RunPasses) -> None:
    execute(here, "insert into orca.runs (pipeline) values ('c')")
    assert passes.run() >= 1


def warm_pods(here: Surroundings, memory: KubeMemory, kube: Kube, figures: dict[str, float]) -> None:
    passes = RuntimePasses(here, kube, recorded(here, memory), verify=lambda: None, log=quiet())
    hands = LaunchHands(database=here.database, kube=kube, namespace="runtimes", stack_id=here.stack_id, log=quiet())
    spec: dict[str, Any] = {
        "environment": "python",
        "size": 0,
        "resources": {"requests": {"cpu": "1", "memory": "1Gi"}},
    }
    environment = Environment(namespace="runtimes", name="python", image="registry.example/python:1")
    place = {"name": "python", "namespace": "runtimes", "uid": "python", "generation": 1, "resourceVersion": "1"}
    memory.fill(
        [
            (
                "runtime-environments",
                {
                    "apiVersion": "datalayer.io/v1",
                    "kind": "RuntimeEnvironment",
                    "metadata": place,
                    "spec": {"dockerImage": "i"},
                },
            )
        ]
    )
    still: Curve = []
    launches: Curve = []
    peaks: Curve = []
    made = 0
    for size in sizes(WARM):
        goal = max(size, 3 * TIMES)  # something to take
        pool = Pool(
            namespace="runtimes", name="warm", uid="warm", environment="python", size=goal, resources=spec["resources"]
        )
        add_warm(here, memory, pool, environment, range(made + 1, goal + 1))
        made = goal
        place = {"name": "warm", "namespace": "runtimes", "uid": "warm", "generation": 1, "resourceVersion": "1"}
        memory.fill(
            [
                (
                    "runtime-pools",
                    {
                        "apiVersion": "datalayer.io/v1",
                        "kind": "RuntimePool",
                        "metadata": place,
                        "spec": {**spec, "size": goal},
                    },
                )
            ]
        )
        passes.run()  # writes the pool's new status
        progress(f"warm Pods: {goal}")
        still.append((goal, measured(passes.run)))
        peaks.append((goal, peak_mib(passes.run)))
        launches.append((goal, measured(lambda: launch(hands, LaunchRequest(environment="python", user="jane")))))
        passes.run()
        made += refilled(here) - made
    figures["runtimes_no_change_seconds"] = still[-1][1]
    figures["runtimes_no_change_mib"] = peaks[-1][1]
    figures["one_more_launch_seconds"] = launches[-1][1]
    figures["one_more_launch_growth"] = growth(launches)
    figures["memory_mib_for_each_pass_of_all"] = max(
        figures[name] for name in figures if name.endswith("no_change_mib")
    )
    plot(
        FIGURES / "load-warm-pods.svg",
        "A pass over a pool of warm Pods",
        "warm Pods",
        "seconds",
        {"nothing to do": still},
    )
    plot(
        FIGURES / "load-launch.svg",
        "A launch from a pool of warm Pods",
        "warm Pods",
        "seconds",
        {"one launch": launches},
    )
    plot(
        FIGURES / "load-warm-pods-memory.svg",
        "A pass over a pool of warm Pods",
        "warm Pods",
        "MiB at its highest",
        {"nothing to do": peaks},
    )


def add_warm(here: Surroundings, memory: KubeMemory, pool: Pool, environment: Environment, numbers: range) -> None:
    objects = []
    with here.database.transaction() as transaction:
        for _ in numbers:
            pod = render_warm(
                pool, environment, int(transaction.value("select nextval('orca.runtime_numbers')")), here.stack_id
            )
            record_pod(transaction, pod, taken=False)
            uid = f"warm-{pod.name}"
            values = {"name": pod.name, "uid": uid}
            transaction.run(
                "update orca.runtime_pods set uid = %(uid)s, ready_at = now(), address = '10.0.0.1' where name = %(name)s",
                values,
            )
            transaction.run(
                "update orca.kube_objects set uid = %(uid)s, confirmed_at = now() where name = %(name)s", values
            )
            objects.append(("pods", seen(pod.manifest, uid)))
    memory.fill(objects)
    execute(here, "analyze")


def refilled(here: Surroundings) -> int:
    with here.database.snapshot() as transaction:
        return int(
            transaction.value("select count(*) from orca.runtime_pods where taken_at is null and ended_at is null")
        )


def recorded(here: Surroundings, memory: KubeMemory) -> RecordedEngine:
    return RecordedEngine(
        cast("Engine", Maker(memory)),
        here.database,
        backend_url="file:///nowhere",
        verify=lambda: None,
        deadline_seconds=60,
    )


def execute(here: Surroundings, statement: str, **parameters: object) -> None:
    with here.database.transaction() as transaction:
        transaction.run(statement, parameters)  # type: ignore[arg-type]


def quiet() -> Any:
    return make_log(open(os.devnull, "w", encoding="utf-8"), form="json")


main()
