"""Many passes with seeded demand and faults against the real engine: does anything grow, and does everything go at the end?

    make bench BENCH=soak ARGS="--passes 100 --seed 7"

The passes of the machine pools are the product's, over the real engine, a real Postgres and the provider `local`, whose
machines are processes with real workers. Half of the passes meet a fault: a location that is full, a quota, a refusal, a
cloud that does not answer or not in time, a create that ends as nobody expected, database connections that are ended, an
engine that is killed. Durations are those of a quick test, so that many lives fit into little time. Every so many passes it
is measured what the process and its surroundings hold; the slope of each, over the latter two thirds, has a bound.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import linear_regression, median
from typing import Any, LiteralString

from harness import progress, report, surroundings

from orca_infra.config import Config, parse_config
from orca_infra.errors import NotLeader, OrcaError, Transient
from orca_infra.log import make_log
from orca_infra.loop.leader import Leader
from orca_infra.loop.passes import MachinePasses, configure_providers
from orca_infra.machines.providers.local_cloud import LocalCloud
from orca_infra.process import boot_id
from orca_infra.stack.engine import Engine
from orca_infra.surroundings import Surroundings

_TOML = """
[pools.east]
provider = "local"
image = "registry.example/orca-worker:1"
max_machines = 3
max_booting = 2
idle_seconds = 2
types = [{ type = "small", locations = ["a", "b"] }]
[pools.west]
provider = "local"
image = "registry.example/orca-worker:1"
max_machines = 3
idle_seconds = 2
types = [{ type = "small", locations = ["b", "a"], wait = 3 }, { type = "large", locations = ["a"] }]
"""
_ENVIRONMENT = {
    "ORCA_POOL_GROW_AFTER": "0",
    "ORCA_POOL_TRY_SECONDS": "0.2",
    "ORCA_POOL_SCALE_SECONDS": "1",
    "ORCA_POOL_BOOT_SECONDS": "30",
    "ORCA_POOL_LOST_SECONDS": "10",
    "ORCA_HEARTBEAT_SECONDS": "1",
    "ORCA_STRAY_GRACE_SECONDS": "1",
    "ORCA_ENDED_ROW_SECONDS": "30",
    "ORCA_ENGINE_SECONDS": "60",
    "ORCA_RECORD_PASSES": "20",
}
_PRUNE_PASSES = 20
_CALM_PASSES = 200
_SAMPLES_LEAST = 6
#: What each may grow by in 1,000 passes, over what there is of it when the first third is over.
BOUNDS = {
    "memory_mib": 16.0,
    "threads": 2.0,
    "descriptors": 4.0,
    "disk_mib": 8.0,
    "state_kib": 64.0,
    "rows": 100.0,
    "pass_seconds": 0.5,
}
_TABLES: tuple[LiteralString, ...] = (
    "orca.pool_machines",
    "orca.engine_operations",
    "orca.owned",
    "orca.workers",
    "orca.pool_offers",
    "orca.attention",
    "orca.passes",
)
_FORGET_RUNS: LiteralString = """
delete from orca.runs
where state in ('succeeded', 'failed', 'canceled') and ended_at < now() - interval '10 seconds'"""
_STATE_BYTES: LiteralString = "select coalesce(sum(octet_length(data::text)), 0) from pulumi_state"
_ENGINES: LiteralString = """
select pid from orca.engine_operations where ended_at is null and pid is not null and boot_id = %(boot)s"""
Sample = dict[str, float]


class Soak:
    """One soak: the loop's passes, the demand, the faults and the samples."""

    def __init__(self, here: Surroundings, seed: int) -> None:
        self.here = here
        self.rng = random.Random(seed)
        self.config: Config = parse_config(_TOML, "soak")
        configure_providers(self.config, here)
        self.cloud = LocalCloud(here.cloud_folder)
        self.leader = Leader(here.url)
        assert self.leader.acquire()
        self.log = make_log((here.settings.home / "soak.log").open("w", encoding="utf-8"), form="json")
        self.passes = MachinePasses(here, Engine(here.engine), self.leader.verify, self.log)
        self.samples: list[Sample] = []
        self.met: Counter[str] = Counter()
        self.failed = 0
        self.idle_operations = 0
        self.names: set[str] = set()
        self.execute(
            "insert into orca.pipelines (name, placement, max_starts) "
            "values ('e', 'worker:east', 50), ('w', 'worker:west', 50)"
        )

    def run(self, count: int, seconds: float) -> None:
        """So many passes, half of which meet a fault; fewer when the time is over."""
        step = max(1, count // 60)
        began = time.monotonic()
        for number in range(1, count + 1):
            if time.monotonic() - began > seconds:
                progress(f"the time is over after {number - 1} passes")
                return
            self.demand()
            fault = self.rng.choice(self.faults) if self.rng.random() < 0.5 else None
            took = self.one_pass(fault)
            if number % _PRUNE_PASSES == 0:
                self.guarded(self.passes.prune)
                # What orca itself keeps of its runs is orca's to delete.
                self.execute(_FORGET_RUNS)
            if number % step == 0:
                self.samples.append({"passes": number, **self.sample(), "pass_seconds": took})
            if number % max(1, count // 10) == 0:
                left = (time.monotonic() - began) / number * (count - number)
                progress(
                    f"pass {number} of {count}, {self.failed} given up, {len(self.names)} machines so far, {left:.0f} s left"
                )

    def one_pass(self, fault: Callable[[], None] | None = None) -> float:
        if fault is not None:
            self.met[fault.__name__] += 1
            fault()
        before = self.operations()
        started = time.monotonic()
        try:
            result = self.passes.run(self.config)
            if not result.plan.actions:
                self.idle_operations += self.operations() - before
        except NotLeader:
            self.lead_again()
        except OrcaError as error:
            self.failed += 1
            self.log.warning("pass given up", kind=type(error).__name__, why=str(error))
        seconds = time.monotonic() - started
        self.names |= {row["name"] for row in self.rows("select name from orca.pool_machines")}
        return seconds

    def demand(self) -> None:
        """Runs come in bursts; now and then none for a while, so that machines go."""
        if self.rng.random() < 0.3:
            pipeline, runs = self.rng.choice("ew"), self.rng.randint(1, 4)
            self.execute(
                "insert into orca.runs (pipeline) select %(p)s from generate_series(1, %(n)s)", p=pipeline, n=runs
            )
        if self.rng.random() < 0.05:
            self.execute("update orca.runs set state = 'canceled' where state = 'queued'")
        time.sleep(self.rng.choice((0, 0, 0.1, 0.5)))

    # Faults.

    @property
    def faults(self) -> Sequence[Callable[[], None]]:
        return (
            self.stock_out,
            self.quota,
            self.refusal,
            self.cloud_away,
            self.slow_create,
            self.preempted,
            self.connections_end,
            self.engine_killed,
            self.delete_fails,
        )

    def stock_out(self) -> None:
        self.cloud.arm("create", "LOCATION_OUT_OF_CAPACITY", location=self.rng.choice("ab"), times=2)

    def quota(self) -> None:
        self.cloud.arm("create", "QUOTA_EXCEEDED")

    def refusal(self) -> None:
        self.cloud.arm("create", "INVALID_REQUEST")

    def cloud_away(self) -> None:
        self.cloud.arm("list", "UNAVAILABLE")

    def slow_create(self) -> None:
        self.cloud.arm("create", "", seconds=1.0)

    def delete_fails(self) -> None:
        self.cloud.arm("delete", "UNAVAILABLE")

    def preempted(self) -> None:
        for machine in self.cloud.list()[:1]:
            self.cloud.preempt(machine.name)

    def connections_end(self) -> None:
        """Every connection of the passes ends, that of the lead among them."""
        with contextlib.suppress(Transient):
            self.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() "
                "and application_name like 'orca-infra%%' and pid <> pg_backend_pid()"
            )

    def engine_killed(self) -> None:
        """The engine's process is killed a moment after it begins, if one begins at all."""
        delay = self.rng.uniform(0.1, 1.5)

        def kill() -> None:
            time.sleep(delay)
            with contextlib.suppress(OrcaError, ProcessLookupError):
                for row in self.rows(_ENGINES, boot=boot_id()):
                    os.killpg(row["pid"], signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()

    # What there is.

    def sample(self) -> Sample:
        with self.here.database.snapshot() as transaction:
            rows = sum(int(transaction.value(f"select count(*) from {table}")) for table in _TABLES)
            has_state = transaction.value("select to_regclass('pulumi_state') is not null")
            state = transaction.value(_STATE_BYTES) if has_state else 0
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        home = self.here.settings.home
        disk = sum(
            size_of(path) for path in home.rglob("*") if "postgres" not in path.parts and path.name != "soak.log"
        )
        return {
            "memory_mib": resident / 2**20,
            "threads": threading.active_count(),
            "descriptors": len(list(Path("/proc/self/fd").iterdir())),
            "disk_mib": disk / 2**20,
            "state_kib": float(state) / 1024,
            "rows": rows,
        }

    def slopes(self) -> dict[str, float]:
        """Growth in 1,000 passes, by a line through the latter two thirds of the samples; of pass times, of their medians."""
        later = self.samples[len(self.samples) // 3 :]
        slopes: dict[str, float] = {}
        if len(later) < _SAMPLES_LEAST:
            return slopes
        for name in BOUNDS:
            values = [sample[name] for sample in later]
            if name == "pass_seconds":
                half = len(values) // 2
                apart = later[half + half // 2]["passes"] - later[half // 2]["passes"]
                slopes[name] = (median(values[half:]) - median(values[:half])) * 1000 / max(apart, 1)
                continue
            slopes[name] = linear_regression([sample["passes"] for sample in later], values).slope * 1000
        return slopes

    # The end.

    def end(self) -> list[str]:
        """No more demand and no more faults: passes until nothing is left. Gives what is left, or does not hold."""
        with contextlib.suppress(FileNotFoundError):
            (self.here.cloud_folder / "faults.json").unlink()
        self.guarded(lambda: self.execute("update orca.runs set state = 'canceled' where state = 'queued'"))
        for _ in range(_CALM_PASSES):
            self.one_pass()
            if not self.cloud.list() and not self.rows("select from orca.pool_machines where ended_at is null"):
                break
            self.execute("update orca.runs set state = 'canceled' where state in ('queued', 'running')")
            time.sleep(0.3)
        return [says for says, query in _AT_THE_END.items() if self.rows(query)] + [
            f"machine {machine.name} is still there" for machine in self.cloud.list()
        ]

    def operations(self) -> int:
        """How many times the engine was told to make or remove something; not what it was asked to look at."""
        return int(
            self.rows("select coalesce(max(id), 0) as n from orca.engine_operations where kind <> 'refresh'")[0]["n"]
        )

    def lead_again(self) -> None:
        self.failed += 1
        self.leader.release()
        deadline = time.monotonic() + 30
        while not self.guarded(self.leader.acquire):
            assert time.monotonic() < deadline, "the lead cannot be had again"
            time.sleep(0.1)

    def guarded(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except OrcaError:
            return None

    def rows(self, query: LiteralString, **parameters: object) -> list[dict[str, Any]]:
        for _ in range(5):  # connections are ended now and then
            with contextlib.suppress(Transient), self.here.database.snapshot() as transaction:
                return transaction.dicts(query, parameters)
        raise Transient("the database stays away")

    def execute(self, statement: LiteralString, **parameters: object) -> None:
        with self.here.database.transaction() as transaction:
            transaction.run(statement, parameters)


#: What must not be there at the end, each as a query that then finds nothing.
_AT_THE_END: dict[str, LiteralString] = {
    "a machine's row has not ended": "select from orca.pool_machines where ended_at is null",
    "a stack still owns a machine": "select from orca.owned",
    "an operation has no known end": "select from orca.engine_operations "
    "where ended_at is null or outcome = 'OutcomeUnknown'",
    "a worker outlived its machine": "select from orca.workers",
    "a run runs on a machine that is gone": "select from orca.runs where state = 'running'",
    "a machine's token was never revoked": "select from orca.pool_machines where revoked_at is null",
    "two machines had one number": "select pool, number from orca.pool_machines group by 1, 2 having count(*) > 1",
}


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0


def soak(count: int, seconds: float, seed: int) -> dict[str, Any]:
    """Run it; gives slopes, what was met, and what was left."""
    with surroundings(_ENVIRONMENT) as here:
        one = Soak(here, seed)
        began = time.monotonic()
        try:
            one.run(count, seconds)
            left = one.end()
        finally:
            one.leader.release()
        return {
            "slopes": one.slopes(),
            "samples": [one.samples[0], one.samples[-1]],
            "left": left,
            "met": dict(one.met),
            "given_up": one.failed,
            "machines": len(one.names),
            "idle_operations": one.idle_operations,
            "seconds": time.monotonic() - began,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no more passes after this")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    arguments = parser.parse_args()
    progress(f"soak: {arguments.passes} passes, seed {arguments.seed}")
    result = soak(arguments.passes, arguments.seconds, arguments.seed)
    slopes = result.pop("slopes")
    figures = {f"{name}_slope": slope for name, slope in slopes.items()}
    figures |= {"left": len(result["left"]), "idle_operations": result["idle_operations"]}
    report(
        "soak",
        figures=figures,
        floors={},
        targets={**{f"{name}_slope": BOUNDS[name] for name in slopes}, "left": 0, "idle_operations": 0},
        seed=arguments.seed,
        passes=arguments.passes,
        **{key: value for key, value in result.items() if key != "idle_operations"},
    )
    sys.exit(1 if result["left"] else 0)


if __name__ == "__main__":
    main()
