"""A thousand passes, half of which fail: nothing is made when nothing changed, and nothing grows. A cloud in memory."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import threading
import time
import tracemalloc
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pytest

from orca_infra.config import parse_config
from orca_infra.errors import NotLeader, OrcaError, Transient
from orca_infra.loop.passes import MachinePasses
from orca_infra.machines.consoles import console_path
from orca_infra.stack.engine import Engine
from orca_infra.surroundings import Surroundings
from orca_infra.testing.fake_cloud import FakeCloud, FakeProvider
from orca_infra.testing.simulation_engine import FakeBackend, FakeEngine
from orca_infra.testing.simulation_world import SimulatedClock

pytestmark = pytest.mark.postgres
PASSES = 1000
SEED = 20261130
TOML = """
[pools.p]
provider = "local"
image = "registry.example/orca-worker:1"
max_machines = 2
idle_seconds = "1h"
types = [{ type = "small", locations = ["a"] }]
"""
TABLES = ("pool_machines", "engine_operations", "owned", "workers", "pool_offers", "attention", "passes")


class Quiet:
    def info(self, event: str, **particulars: object) -> None: ...

    warning = info


class AwayProvider(FakeProvider):
    """A cloud that cannot be listed while `away` says so."""

    away = False

    def list(self) -> Any:
        if self.away:
            raise Transient("the cloud is away")
        return super().list()


def test_a_thousand_passes_of_which_half_fail_make_nothing_and_grow_nothing(
    surroundings: Callable[..., Surroundings],
) -> None:
    here = surroundings(ORCA_ENDED_ROW_SECONDS="1", ORCA_RECORD_PASSES="20")
    clock = SimulatedClock()
    clock.now = datetime.now(UTC)
    uids = (f"uid-{number}" for number in itertools.count())
    cloud = FakeCloud(clock=clock, new_uid=lambda: next(uids))
    provider = AwayProvider(cloud)
    engine = cast("Engine", FakeEngine(FakeBackend(clock=clock, clouds={"a": cloud})))
    lead = {"lost": False}

    def verify() -> None:
        if lead["lost"]:
            raise NotLeader("another loop leads")

    passes = MachinePasses(here, engine, verify, Quiet(), providers=lambda _: {"local": provider})
    config = parse_config(TOML, "orca.toml")
    rng = random.Random(SEED)

    def execute(statement: Any) -> None:
        for _ in range(20):  # a server process that was ended takes a moment to be gone
            with contextlib.suppress(Transient), here.database.transaction() as transaction:
                transaction.run(statement)
                return

    def value(query: Any) -> int:
        with here.database.snapshot() as transaction:
            return int(transaction.value(query))

    def one_pass(number: int) -> tuple[bool, float]:
        """Gives whether it was given up, and the seconds of this thread's own work, however busy the machine is."""
        trouble = rng.choice(["cloud", "lead", "connections"]) if number % 2 else ""
        provider.away, lead["lost"] = trouble == "cloud", trouble == "lead"
        if trouble == "connections":
            execute(
                "select pg_terminate_backend(pid) from pg_stat_activity "
                "where datname = current_database() and pid <> pg_backend_pid()"
            )
        execute("update orca.workers set seen_at = now()")
        began = time.thread_time()
        try:
            result = passes.run(config)
        except OrcaError:
            return True, time.thread_time() - began
        assert result.changed == 0
        return bool(result.snapshot.unreadable), time.thread_time() - began

    def held() -> dict[str, int]:
        gc.collect()
        passes.prune()
        return {
            "memory": tracemalloc.get_traced_memory()[0],
            "threads": threading.active_count(),
            "descriptors": len(list(Path("/proc/self/fd").iterdir())),
            "rows": sum(value(f"select count(*) from orca.{table}") for table in TABLES),
        }

    execute("insert into orca.pipelines (name, placement) values ('work', 'worker:p')")
    execute("insert into orca.runs (pipeline) values ('work')")
    assert passes.run(config).changed == 1
    execute("insert into orca.workers (name, pool) select name, pool from orca.pool_machines")
    execute("update orca.runs set state = 'canceled'")
    operations = value("select last_value from orca.engine_operations_id_seq")

    tracemalloc.start()
    try:
        given_up, seconds = 0, list[float]()
        for number in range(PASSES):
            failed, took = one_pass(number)
            given_up += failed
            if not failed:
                seconds.append(took)
            if number == PASSES // 4:
                before = held()
        provider.away, lead["lost"] = False, False
        after = held()
    finally:
        tracemalloc.stop()

    assert PASSES * 0.3 < given_up < PASSES * 0.6  # the pool of connections mends itself, unseen
    assert value("select last_value from orca.engine_operations_id_seq") == operations
    assert [machine.name for machine in cloud.list()] == ["orca-p-1"]
    assert after["memory"] - before["memory"] < 2**20
    assert after["threads"] <= before["threads"] + 2
    assert after["descriptors"] <= before["descriptors"] + 4
    assert after["rows"] <= before["rows"] + 3
    quarter = len(seconds) // 4
    first, last = sorted(seconds[:quarter])[quarter // 4], sorted(seconds[-quarter:])[quarter // 4]
    assert last < 3 * first + 0.05  # a machine that is busy with other things is no growth


def test_what_a_machine_said_last_goes_with_its_row(surroundings: Callable[..., Surroundings]) -> None:
    here = surroundings(ORCA_ENDED_ROW_SECONDS="3600")
    passes = MachinePasses(here, cast("Engine", None), lambda: None, Quiet())
    ended = {"orca-p-1": "2 hours", "orca-p-2": "1 minute"}
    with here.database.transaction() as transaction:
        for number, (name, ago) in enumerate(ended.items(), 1):
            transaction.run(
                "insert into orca.pool_machines (name, pool, number, provider, type, location, rendered, token_hash, revoked_at, "
                "ended_at, reason) values (%(name)s, 'p', %(n)s, 'local', 'small', 'a', '{}', '', now(), "
                "now() - %(ago)s::interval, 'BootTimeout')",
                {"name": name, "n": number, "ago": ago},
            )
    log = here.logs_folder / "7" / "driver.log"
    log.parent.mkdir(parents=True)
    for path in (log, *(console_path(here.logs_folder, name) for name in ended)):
        path.write_text("said\n")
    passes.prune()
    assert [console_path(here.logs_folder, name).exists() for name in ended] == [False, True]
    assert log.exists()
