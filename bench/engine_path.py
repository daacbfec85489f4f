"""The engine's path on Kubernetes: 500 objects (100 run clusters) in one up, and a small up of one run cluster.

The floor is the same objects made by 8 threads of raw API calls in the same run, on the same cluster. Pods are not waited
for: that is bench/run_clusters. CPU is by process: ours is this process, the engine and its provider.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

from harness import progress, report, surroundings

from orca_infra.kube.client import Kube
from orca_infra.kube.kinds import JOB, NAMESPACE, POD, SERVICE, Object, Ref
from orca_infra.kube.labels import field_manager
from orca_infra.runs.model import RunSpec, Sizes
from orca_infra.runs.render import RunSettings, render
from orca_infra.stack.cohorts import OpenObject, cohort_program, fill
from orca_infra.stack.engine import Engine
from orca_infra.testing.cluster import FLAGS, TestCluster

CLUSTERS = 100
WORKERS = 2
SMALL = 7
THREADS = 8
ROUNDS = 3
_IMAGE = "registry.example/reports:1"


def main() -> None:
    figures: dict[str, float] = {}
    floors: dict[str, float] = {}
    environment = {"PULUMI_BACKEND_URL": ""}
    with surroundings(environment) as here, TestCluster.start(nodes=1) as cluster:
        engine = Engine(here.engine, {"KUBECONFIG": str(cluster.kubeconfig)})
        with Kube.connect(kubeconfig=cluster.kubeconfig) as kube:
            # What the first call pays alone (imports, the provider's file in memory) is no part of the path.
            one_up(engine, objects_of(kube, "warm", 1, here.stack_id), "bench.runs.0", here.stack_id)
            rounds = [one_round(engine, kube, cluster, here.stack_id, number) for number in range(ROUNDS)]
            best = sorted(rounds, key=lambda r: r["seconds"])[len(rounds) // 2]
            figures |= {f"up_500_{name}": value for name, value in best.items() if not name.startswith("raw_")}
            floors |= {f"raw_500_{name.removeprefix('raw_')}": v for name, v in best.items() if name.startswith("raw_")}
            figures["up_500_to_floor"] = best["seconds"] / best["raw_seconds"]
            figures["small_up_seconds"] = small_ups(engine, kube, here.stack_id)
    report(
        "engine_path",
        figures=figures,
        floors=floors,
        targets={"up_500_seconds": 10.5, "up_500_our_cpu_seconds": 6.0, "small_up_seconds": 1.5},
        flags={name: " ".join(flags) for name, flags in FLAGS.items()},
    )


def one_round(engine: Engine, kube: Kube, cluster: TestCluster, stack_id: str, number: int) -> dict[str, float]:
    progress(f"round {number + 1}: {CLUSTERS * (WORKERS + 3)} objects in one up")
    objects = objects_of(kube, f"up-{number}", CLUSTERS, stack_id)
    before, ours = cluster.cpu_seconds(), own_cpu()
    started = time.perf_counter()
    one_up(engine, objects, f"bench.runs.up-{number}", stack_id)
    seconds = time.perf_counter() - started
    after, ours_after = cluster.cpu_seconds(), own_cpu()
    result = {
        "seconds": seconds,
        "our_cpu_seconds": sum(ours_after) - sum(ours),
        "python_cpu_seconds": ours_after[0] - ours[0],
        "engine_and_provider_cpu_seconds": ours_after[1] - ours[1],
        **{f"{name}_cpu_seconds": after[name] - before[name] for name in before},
    }
    settle(kube, cluster)
    progress(f"  {seconds:.1f} s; now the floor: the same objects by {THREADS} threads of raw calls")
    result["raw_seconds"] = raw(kube, objects_of(kube, f"raw-{number}", CLUSTERS, stack_id), stack_id)
    settle(kube, cluster)
    return result


def own_cpu() -> tuple[float, float]:
    """This process, and the children it waited for: the engine and its provider."""
    mine = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return mine.ru_utime + mine.ru_stime, children.ru_utime + children.ru_stime


def objects_of(kube: Kube, name: str, clusters: int, stack_id: str) -> list[OpenObject]:
    """Run clusters in a namespace of their own."""
    namespace = f"bench-{name}"
    kube.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    settings = RunSettings(
        namespace=namespace, binary="orca", secret="orca-db", dista_port=6390, deadline_seconds=86400, sizes=Sizes()
    )
    objects = []
    for run in range(1, clusters + 1):
        spec = RunSpec(run=run, start=1, pipeline="reports", image=_IMAGE, workers=WORKERS)
        objects += [
            OpenObject(
                namespace=namespace,
                kind=manifest["kind"],
                name=manifest["metadata"]["name"],
                rendered=manifest,
                run=run,
                start=1,
                pod=None,
                job_uid=None,
            )
            for manifest in render(spec, settings, stack_id)
        ]
    return objects


def one_up(engine: Engine, objects: Sequence[OpenObject], stack: str, stack_id: str) -> None:
    changes = engine.up_new(stack, cohort_program(objects, stack_id), deadline_seconds=300, on_start=lambda _: None)
    made = sum(1 for change in changes if change.outputs.get("metadata", {}).get("uid"))
    if made != len(objects):
        sys.exit(f"{made} of {len(objects)} objects were made")


def raw(kube: Kube, objects: Sequence[OpenObject], stack_id: str) -> float:
    """The floor: server-side apply of each object, each run's Job first."""
    by_run: dict[Any, list[OpenObject]] = {}
    for item in objects:
        by_run.setdefault(item.run, []).append(item)

    def make(items: list[OpenObject]) -> None:
        manager = field_manager(stack_id)
        job = kube.apply(dict(items[0].rendered), manager=manager)
        for item in items[1:]:
            manifest: Object = fill(item.rendered, job["metadata"]["uid"])
            kube.apply(manifest, manager=manager)

    started = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(make, by_run.values()))
    return time.perf_counter() - started


def settle(kube: Kube, cluster: TestCluster) -> None:
    """Delete what there is and wait until the control plane is quiet, so that no round pays for the one before."""
    for namespace in kube.list(NAMESPACE).items:
        name = namespace["metadata"]["name"]
        if name.startswith("bench-"):
            for kind in (JOB, POD, SERVICE):
                for item in kube.list(kind, namespace=name).items:
                    kube.delete(Ref(kind=kind, namespace=name, name=item["metadata"]["name"]), grace_seconds=0)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        before = sum(cluster.cpu_seconds().values())
        time.sleep(1)
        if sum(cluster.cpu_seconds().values()) - before < 0.15:
            return
    sys.exit("the control plane did not become quiet within two minutes")


def small_ups(engine: Engine, kube: Kube, stack_id: str) -> float:
    progress("small ups: one run cluster each")
    seconds = []
    for number in range(SMALL):
        objects = objects_of(kube, f"small-{number}", 1, stack_id)
        started = time.perf_counter()
        one_up(engine, objects, f"bench.runs.small-{number}", stack_id)
        seconds.append(time.perf_counter() - started)
    return median(seconds)


main()
