"""Run clusters from queued to all Pods Ready, and from ended to all objects gone, with the loop's own passes.

The floor is the same objects made by 8 threads of raw API calls on the same cluster, until their Pods are Ready, and deleted
by as many, until they are gone. `ARGS=1000` makes that many clusters instead of 100; `ARGS="100 --peer"` has KubeRay's
operator make and delete as many RayClusters on the same control plane afterwards (kuberay.py). With `--shipped-rates` the
control plane's programs and the operator ask no more often than they do where nobody has raised that.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import itemgetter
from typing import Any

import kuberay
from harness import Pods, progress, report, surroundings

from orca_infra.kube.client import Kube
from orca_infra.kube.kinds import JOB, POD, SERVICE, Ref
from orca_infra.kube.labels import ROLE_LABEL, RUN_LABEL, STACK_LABEL, field_manager
from orca_infra.log import make_log
from orca_infra.loop.cluster_passes import RunPasses
from orca_infra.loop.leader import Leader
from orca_infra.runs.limits import run_settings
from orca_infra.runs.model import RunSpec
from orca_infra.runs.render import render
from orca_infra.stack.cohorts import fill
from orca_infra.stack.engine import Engine
from orca_infra.stack.operations import RecordedEngine
from orca_infra.surroundings import Surroundings
from orca_infra.testing.cluster import FLAGS, TestCluster

WORKERS = 2
KINDS = (SERVICE, POD, JOB)
PODS = WORKERS + 2
THREADS = 8
SINGLES = 5
_LIMIT_SECONDS = 1800
#: What the programs have without our flags: as the garbage collector, it takes its time.
_SHIPPED_RATES = {
    "kube-controller-manager": ("--kube-api-qps=20", "--kube-api-burst=30"),
    "kube-scheduler": ("--kube-api-qps=50", "--kube-api-burst=100"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clusters", type=int, nargs="?", default=100)
    parser.add_argument("--peer", action="store_true", help="compare with KubeRay's operator")
    parser.add_argument("--shipped-rates", action="store_true", help="leave the control plane's clients at their rates")
    options = parser.parse_args()
    clusters: int = options.clusters
    rates = _SHIPPED_RATES if options.shipped_rates else {}
    peer_flags = kuberay.FLAGS if options.shipped_rates else (*kuberay.FLAGS, *kuberay.RATES)
    figures: dict[str, float] = {}
    floors: dict[str, float] = {}
    with TestCluster.start(nodes=1 + clusters * 3 // 1000, more_flags=rates) as cluster:
        variables = {"ORCA_RUNNER": "kubernetes", "KUBECONFIG": str(cluster.kubeconfig)}
        with surroundings(variables) as here, Kube.connect(kubeconfig=cluster.kubeconfig) as kube:
            namespace = here.settings.runs_namespace
            for name in (namespace, "raw"):
                metadata = {"name": name, "labels": {STACK_LABEL: here.stack_id}}
                kube.create({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
            leader = Leader(here.url)
            if not leader.acquire():
                sys.exit("the bench does not lead its own database")
            passes = make_passes(here, kube, leader)
            pods = Pods(kube, namespace)
            figures["one_run_queued_to_job_seconds"] = singles(here, kube, passes, namespace)
            progress(f"{clusters} run clusters of head and {WORKERS} workers: queued to all Pods Ready")
            queue(here, clusters)
            figures["all_pods_ready_seconds"] = until(passes.run, lambda: pods.ready >= clusters * PODS)
            progress(f"  {figures['all_pods_ready_seconds']:.1f} s; now all of them end")
            end_all(here)
            figures["swept_seconds"] = until(passes.run, lambda: not pods.there and not objects(kube, namespace))
            pods.close()
            figures["cohorts_left"] = finish(here, passes)
            figures["peak_memory_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            progress(f"  {figures['swept_seconds']:.1f} s; now the floor: the same objects by {THREADS} raw threads")
            floors["raw_all_pods_ready_seconds"], floors["raw_swept_seconds"] = raw(here, kube, clusters)
            figures["ready_to_floor"] = figures["all_pods_ready_seconds"] / floors["raw_all_pods_ready_seconds"]
            figures["swept_to_floor"] = figures["swept_seconds"] / floors["raw_swept_seconds"]
            leader.release()
            if options.peer:
                figures |= peer(cluster, kube, clusters, figures, peer_flags)
    scale = clusters / 100
    report(
        "run_clusters",
        figures=figures,
        floors=floors,
        targets={
            "one_run_queued_to_job_seconds": 3.0,
            "all_pods_ready_seconds": 12.0 * scale,
            "swept_seconds": 6.0 * scale,
            "cohorts_left": 0,
            "peak_memory_mib": 400.0,
        },
        clusters=clusters,
        flags={
            **{name: " ".join((*flags, *rates.get(name, ()))) for name, flags in FLAGS.items()},
            **({"ray-operator": " ".join(peer_flags)} if options.peer else {}),
        },
    )


def peer(
    cluster: TestCluster, kube: Kube, clusters: int, ours: dict[str, float], flags: Sequence[str]
) -> dict[str, float]:
    """The peer's figures, and ours as a part of its."""
    figures = kuberay.measure(cluster, kube, clusters, WORKERS, flags)
    return {
        **figures,
        "made_to_peer": ours["all_pods_ready_seconds"] / figures["peer_all_pods_ready_seconds"],
        "swept_to_peer": ours["swept_seconds"] / figures["peer_gone_seconds"],
    }


def make_passes(here: Surroundings, kube: Kube, leader: Leader) -> RunPasses:
    engine = Engine(here.engine, {"KUBECONFIG": str(here.settings.kubeconfig)})
    recorded = RecordedEngine(
        engine,
        here.database,
        backend_url=here.engine.backend_url,
        verify=leader.verify,
        deadline_seconds=here.settings.engine_seconds,
    )
    log = make_log(open(os.devnull, "w"))  # noqa: SIM115  (open as long as the process)
    return RunPasses(here, kube, recorded, environ={}, verify=leader.verify, log=log)


def queue(here: Surroundings, runs: int) -> None:
    with here.database.transaction() as transaction:
        transaction.run(
            "insert into orca.pipelines (name, image, workers) values ('reports', 'registry.example/reports:1', %(w)s)"
            " on conflict do nothing",
            {"w": WORKERS},
        )
        transaction.run(
            "insert into orca.runs (pipeline) select 'reports' from generate_series(1, %(runs)s)", {"runs": runs}
        )


def singles(here: Surroundings, kube: Kube, passes: RunPasses, namespace: str) -> float:
    """One run alone, from queued to its Job; the median. The pass comes at once, as a NOTIFY has it in the loop."""
    progress("one run alone: queued to Job")
    seconds = []
    for _ in range(SINGLES):
        queue(here, 1)
        started = time.perf_counter()
        passes.run()
        if not kube.list(JOB, namespace=namespace).items:
            sys.exit("the pass made no Job")
        seconds.append(time.perf_counter() - started)
        end_all(here)
        until(passes.run, lambda: not objects(kube, namespace))
    return sorted(seconds)[len(seconds) // 2]


def end_all(here: Surroundings) -> None:
    with here.database.transaction() as transaction:
        transaction.run("select set_config('orca.writer', 'driver', true)")
        transaction.run("update orca.runs set state = 'succeeded', ended_at = now() where state = 'running'")


def finish(here: Surroundings, passes: RunPasses) -> int:
    """Passes until every row has ended and every cohort was dropped; gives what is left."""
    left = 1
    for _ in range(60):
        passes.run()
        with here.database.snapshot() as transaction:
            left = transaction.value(
                "select (select count(*) from orca.cohorts) + (select count(*) from orca.run_clusters where ended_at is null)"
            )
        if not left:
            break
    return left


def until(act: Any, done: Any) -> float:
    started = time.perf_counter()
    while time.perf_counter() - started < _LIMIT_SECONDS:
        act()
        if done():
            return time.perf_counter() - started
        time.sleep(0.1)
    sys.exit(f"not within {_LIMIT_SECONDS} s")


def objects(kube: Kube, namespace: str) -> int:
    return sum(len(kube.list(kind, namespace=namespace).items) for kind in KINDS)


def raw(here: Surroundings, kube: Kube, clusters: int) -> tuple[float, float]:
    """Seconds until all that is made is Ready, and until all that is deleted is gone."""
    settings = run_settings(here.settings, {})
    manager = field_manager(here.stack_id)

    def make(run: int) -> None:
        spec = RunSpec(run=run, start=1, pipeline="reports", image="registry.example/reports:1", workers=WORKERS)
        manifests = [
            dict(m, metadata={**m["metadata"], "namespace": "raw"}) for m in render(spec, settings, here.stack_id)
        ]
        job = kube.apply(manifests[0], manager=manager)
        for manifest in manifests[1:]:
            kube.apply(fill(manifest, job["metadata"]["uid"]), manager=manager)

    pods = Pods(kube, "raw")
    started = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(make, range(1, clusters + 1)))
    until(lambda: None, lambda: pods.ready >= clusters * PODS)
    made = time.perf_counter() - started
    started = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(partial(raw_delete, kube), raw_runs(kube)))
    until(lambda: None, lambda: not pods.there and not objects(kube, "raw"))
    gone = time.perf_counter() - started
    pods.close()
    return made, gone


def raw_runs(kube: Kube) -> list[list[tuple[Ref, str]]]:
    """Of each run, its objects in the order in which a sweep deletes them, with their uids."""
    runs: dict[str, list[tuple[int, Ref, str]]] = {}
    for place, kind in enumerate(KINDS):
        for item in kube.list(kind, namespace="raw").items:
            metadata = item["metadata"]
            last = len(KINDS) if kind is POD and metadata["labels"][ROLE_LABEL] == "driver" else place
            ref = Ref(kind=kind, namespace="raw", name=metadata["name"])
            runs.setdefault(metadata["labels"][RUN_LABEL], []).append((last, ref, metadata["uid"]))
    return [[(ref, uid) for _, ref, uid in sorted(of_run, key=itemgetter(0))] for of_run in runs.values()]


def raw_delete(kube: Kube, of_run: list[tuple[Ref, str]]) -> None:
    for ref, uid in of_run:
        kube.delete(ref, uid=uid)


main()
