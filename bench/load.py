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
from functools import partial
from pathlib import Path
from typing import Any, cast

from harness import progress, report, surroundings
from kube_memory import KubeMemory, kube_memory
from load_kube import add_clusters, add_warm, execute, prepare, recorded
from plots import plot

from orca_infra.config import Config, parse_config
from orca_infra.kube.client import Kube
from orca_infra.log import make_log
from orca_infra.loop.cluster_passes import RunPasses, RuntimePasses
from orca_infra.loop.passes import MachinePasses
from orca_infra.machines.decide import POOL_LABEL, STACK_LABEL
from orca_infra.machines.observe import SQL
from orca_infra.runs.logs import DriverLogs
from orca_infra.runtimes.launch import LaunchHands, LaunchRequest, launch
from orca_infra.runtimes.model import Environment, Pool
from orca_infra.stack.engine import Engine
from orca_infra.surroundings import Surroundings
from orca_infra.testing.fake_cloud import FakeCloud, FakeProvider
from orca_infra.testing.simulation_engine import FakeBackend, FakeEngine
from orca_infra.testing.simulation_world import SimulatedClock

SCALE = float(os.environ.get("ORCA_BENCH_SCALE", "1"))  # 0.1 for a try
TIMES = 7
QUEUED, MACHINES, WARM, CLUSTERS = (int(most * SCALE) for most in (100_000, 2_000, 2_000, 1_000))
STEPS = (0, 0.25, 0.5, 1)
FIGURES = Path(__file__).parents[1] / "docs" / "figures"
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
_STILL = "nothing to do"


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
            "one_more_machine_cpu_seconds": 0.05,
            "one_more_machine_mib": 8.0,
            "runs_no_change_seconds": 4.0,
            "one_more_run_growth_over_no_change": 1.2,
            "one_more_run_mib": 8.0,
            "runtimes_no_change_seconds": 3.0,
            "one_more_launch_cpu_seconds": 0.05,
            "one_more_launch_mib": 8.0,
            "memory_mib_for_each_pass_of_all": 200.0,
        }
        if SCALE == 1
        else {},
        load=os.getloadavg()[0],
    )


def measured(call: Callable[[], Any], seconds: Callable[[], float] = time.perf_counter) -> float:
    """The best of some calls, in seconds: other work on the machine only adds. The first warms caches and is not counted."""
    call()
    took = []
    for _ in range(TIMES):
        started = seconds()
        call()
        took.append(seconds() - started)
    return min(took)


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


class Curves:
    """Of a pass with nothing to do and of one thing more, what each takes and allocates as what is there grows.

    The one thing more is told in CPU seconds of the loop's process: beside a whole pass it is so little that other work on
    the machine would hide it.
    """

    def __init__(self, more: str, *, alone: bool = False) -> None:
        """`more`: what the one thing is called; `alone`: it is measured by itself, and not as a pass that makes it."""
        self._more, self._alone = more, alone
        self._seconds: Curve = []
        self._cpu: dict[str, Curve] = {_STILL: [], more: []}
        self._mib: dict[str, Curve] = {_STILL: [], more: []}

    def take(self, size: int, still: Callable[[], Any], more: Callable[[], Any]) -> None:
        self._seconds.append((size, measured(still)))
        for curves, measure in ((self._cpu, partial(measured, seconds=time.process_time)), (self._mib, peak_mib)):
            without = measure(still)
            curves[_STILL].append((size, without))
            curves[self._more].append((size, max(measure(more) - (0 if self._alone else without), 0)))

    def figures(self, scope: str, more: str) -> dict[str, float]:
        cpu = self._cpu[self._more]
        return {
            f"{scope}_no_change_seconds": self._seconds[-1][1],
            f"{scope}_no_change_cpu_seconds": self._cpu[_STILL][-1][1],
            f"{scope}_no_change_mib": self._mib[_STILL][-1][1],
            f"{more}_cpu_seconds": cpu[-1][1],
            f"{more}_cpu_seconds_at_first": cpu[0][1],
            f"{more}_growth_over_no_change": (self._cpu[_STILL][-1][1] + cpu[-1][1]) / self._cpu[_STILL][-1][1],
            f"{more}_mib": self._mib[self._more][-1][1],
        }

    def draw(self, name: str, title: str, x_label: str) -> None:
        """Figures of what a pass takes, of what one thing more takes, and of the memory of both."""
        plot(FIGURES / f"{name}.svg", title, x_label, "seconds", {_STILL: self._seconds})
        alone = {self._more: self._cpu[self._more]}
        more, cpu = (self._more.capitalize(), alone) if self._alone else (title, self._cpu)
        plot(FIGURES / f"{name}-more.svg", more, x_label, "seconds of CPU", cpu)
        plot(FIGURES / f"{name}-memory.svg", title, x_label, "MiB at its highest", self._mib)


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
    curves = Curves("one machine more, added")
    made = 0
    for size in sizes(MACHINES):
        add_machines(here, cloud, range(made + 1, size + 1))
        made = size
        progress(f"machines: {size}")
        curves.take(size, lambda: no_change(here, passes, config), lambda: make_one(here, passes, config))
    figures |= curves.figures("machines", "one_more_machine")
    curves.draw("load-machines", "A pass over the machine pools", "machines")
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


def run_clusters(here: Surroundings, memory: KubeMemory, kube: Kube, figures: dict[str, float]) -> None:
    passes = RunPasses(here, kube, recorded(here, memory), environ={}, verify=lambda: None, log=quiet())
    DriverLogs.follow = lambda *_: None  # type: ignore[method-assign,assignment]  # nothing here has a log
    execute(
        here,
        "insert into orca.pipelines (name, image, workers, max_runs) values ('held', 'i', 2, 0), ('c', 'i', 2, null)",
    )
    curves = Curves("one run more, added")
    made = 0
    for size in sizes(CLUSTERS):
        add_clusters(here, memory, size - made)
        made = size
        progress(f"run clusters: {size}")
        curves.take(size, passes.run, lambda: admit_one(here, passes))
    figures |= curves.figures("runs", "one_more_run")
    curves.draw("load-run-clusters", "A pass over the run clusters", "run clusters")
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
    curves = Curves("one launch", alone=True)
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
        curves.take(goal, passes.run, lambda: launch(hands, LaunchRequest(environment="python", user="jane")))
        passes.run()
        made += refilled(here) - made
    figures |= curves.figures("runtimes", "one_more_launch")
    figures["memory_mib_for_each_pass_of_all"] = max(
        figures[name] for name in figures if name.endswith("no_change_mib")
    )
    curves.draw("load-warm-pods", "A pass over a pool of warm Pods", "warm Pods")


def refilled(here: Surroundings) -> int:
    with here.database.snapshot() as transaction:
        return int(
            transaction.value("select count(*) from orca.runtime_pods where taken_at is null and ended_at is null")
        )


def quiet() -> Any:
    return make_log(open(os.devnull, "w", encoding="utf-8"), form="json")


main()
