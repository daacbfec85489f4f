"""Three runs a second for five minutes, each of a random duration, with the loop as it ships in a process of its own.

Measured: the time from the INSERT of a queued run to the sight of its Job by a watch of the bench's own, the loop's memory,
the engine's state, and what is left when all have ended. `ARGS="--seconds 60 --rate 3 --seed 1"` makes it another. The bench
plays the drivers: it writes that a run has succeeded.
"""

from __future__ import annotations

import argparse
import heapq
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from harness import progress, report, surroundings

from orca_infra.kube.client import Kube
from orca_infra.kube.kinds import JOB, POD, SERVICE
from orca_infra.kube.labels import RUN_LABEL, STACK_LABEL
from orca_infra.kube.watching import Relisted, Seen
from orca_infra.surroundings import Surroundings
from orca_infra.testing.cluster import FLAGS, TestCluster

WORKERS = 2
DURATION_SECONDS = (2.0, 30.0)
_END_SECONDS = 180
_TARGETS = {
    "queued_to_job_p50_seconds": 3.0,
    "loop_peak_memory_mib": 400.0,
    "cohorts_left": 0,
    "objects_left": 0,
    "runs_not_succeeded": 0,
    "runs_started_twice": 0,
}


class Steady:
    """The runs of one bench: queued, seen, ended."""

    def __init__(self, here: Surroundings, kube: Kube, chance: random.Random) -> None:
        self.here, self.kube, self.chance = here, kube, chance
        self.namespace = here.settings.runs_namespace
        self.queued_at: dict[int, float] = {}
        self.seen_at: dict[int, float] = {}
        self.to_end: list[tuple[float, int]] = []
        self.stop = threading.Event()
        self.state_mib = 0.0
        self.cohorts_most = 0

    def watch_jobs(self) -> None:
        """Note when each run's Job is seen first."""
        for change in self.kube.follow(JOB, namespace=self.namespace, silence_seconds=90, stop=self.stop):
            now = time.perf_counter()
            items = (
                change.items if isinstance(change, Relisted) else (change.object,) if isinstance(change, Seen) else ()
            )
            for item in items:
                run = int(item["metadata"]["labels"][RUN_LABEL])
                if run not in self.seen_at:
                    self.seen_at[run] = now
                    heapq.heappush(self.to_end, (now + self.chance.uniform(*DURATION_SECONDS), run))

    def queue_one(self) -> None:
        now = time.perf_counter()
        with self.here.database.transaction() as transaction:
            self.queued_at[transaction.value("insert into orca.runs (pipeline) values ('steady') returning id")] = now

    def end_due(self) -> None:
        due = []
        while self.to_end and self.to_end[0][0] <= time.perf_counter():
            due.append(heapq.heappop(self.to_end)[1])
        if due:
            with self.here.database.transaction() as transaction:
                transaction.run("select set_config('orca.writer', 'driver', true)")
                transaction.run(
                    "update orca.runs set state = 'succeeded', ended_at = now() where id = any(%(due)s)"
                    " and state = 'running'",
                    {"due": due},
                )

    def sample(self) -> None:
        self.cohorts_most = max(self.cohorts_most, self.value("select count(*) from orca.cohorts"))
        size = self.value(
            "select coalesce(sum(pg_total_relation_size(oid)), 0) from pg_class"
            " where relname like 'pulumi%%' and relkind = 'r'"
        )
        self.state_mib = max(self.state_mib, float(size) / 2**20)

    def value(self, query: Any) -> Any:
        with self.here.database.snapshot() as transaction:
            return transaction.value(query)

    def objects_left(self) -> int:
        return sum(len(self.kube.list(kind, namespace=self.namespace).items) for kind in (JOB, POD, SERVICE))

    def rows_left(self) -> int:
        return int(
            self.value(
                "select (select count(*) from orca.cohorts) + (select count(*) from orca.run_clusters where ended_at is null)"
                " + (select count(*) from orca.runs where state in ('queued', 'running'))"
            )
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--rate", type=float, default=3)
    parser.add_argument("--seed", type=int, default=20261129)
    options = parser.parse_args()
    with TestCluster.start(nodes=2) as cluster:
        variables = {"ORCA_RUNNER": "kubernetes", "KUBECONFIG": str(cluster.kubeconfig)}
        with surroundings(variables) as here, Kube.connect(kubeconfig=cluster.kubeconfig) as kube:
            metadata = {"name": here.settings.runs_namespace, "labels": {STACK_LABEL: here.stack_id}}
            kube.create({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
            with here.database.transaction() as transaction:
                transaction.run(
                    "insert into orca.pipelines (name, image, workers) values ('steady', 'registry.example/i:1', %(w)s)",
                    {"w": WORKERS},
                )
            steady = Steady(here, kube, random.Random(options.seed))
            threading.Thread(target=steady.watch_jobs, daemon=True).start()
            loop = start_loop(here, variables)
            try:
                run(steady, options)
                figures = {**figures_of(steady), "loop_peak_memory_mib": peak_memory_mib(loop.pid)}
            finally:
                steady.stop.set()
                loop.send_signal(signal.SIGTERM)
                loop.wait(60)
    report(
        "runs_steady",
        figures=figures,
        floors={},
        targets=_TARGETS,
        rate=options.rate,
        seconds=options.seconds,
        seed=options.seed,
        flags={name: " ".join(flags) for name, flags in FLAGS.items()},
    )


def run(steady: Steady, options: argparse.Namespace) -> None:
    """Queue at the rate, end what is due, and wait for the end of all."""
    progress(f"{options.rate:g} runs a second for {options.seconds:g} s, seed {options.seed}")
    started = time.perf_counter()
    sampled = 0.0
    while (passed := time.perf_counter() - started) < options.seconds:
        while len(steady.queued_at) < passed * options.rate:
            steady.queue_one()
        steady.end_due()
        if passed - sampled > 5:
            sampled = passed
            steady.sample()
        time.sleep(0.05)
    progress(f"  {len(steady.queued_at)} queued; waiting for their end")
    deadline = time.perf_counter() + _END_SECONDS
    while (steady.rows_left() or steady.objects_left()) and time.perf_counter() < deadline:
        steady.end_due()
        time.sleep(0.5)


def figures_of(steady: Steady) -> dict[str, float]:
    waited = sorted(steady.seen_at[run] - at for run, at in steady.queued_at.items() if run in steady.seen_at)
    return {
        "runs": len(steady.queued_at),
        "queued_to_job_p50_seconds": statistics.median(waited),
        "queued_to_job_p99_seconds": waited[int(len(waited) * 0.99)],
        "cohorts_made": steady.value("select coalesce(max(last_value), 0) from orca.cohort_numbers"),
        "cohorts_at_once_most": steady.cohorts_most,
        "cohorts_left": steady.value("select count(*) from orca.cohorts"),
        "objects_left": steady.objects_left(),
        "runs_not_succeeded": steady.value("select count(*) from orca.runs where state <> 'succeeded'"),
        "runs_started_twice": steady.value("select count(*) from orca.runs where start > 1"),
        "engine_state_most_mib": steady.state_mib,
    }


def start_loop(here: Surroundings, variables: dict[str, str]) -> subprocess.Popen[bytes]:
    """`orca-infra run` over the bench's database and cluster."""
    own = {"ORCA_HOME": str(here.settings.home), "ORCA_CONFIG": str(here.settings.config_path)}
    with (here.settings.home / "loop.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "orca_infra.cli", "run"],
            env={**os.environ, **variables, **own},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def peak_memory_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


main()
