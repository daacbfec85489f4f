"""Machine pools at scale: a decision, the demand query, a pass in which nothing is to be done, and how fast it fails over.

The floors are the same work without this program around it: a walk over the snapshot's parts, a count of the same rows, the
provider's list and the snapshot's queries alone, and one call of the engine that does nothing but begin and end.
"""

from __future__ import annotations

import itertools
import os
import time
from datetime import UTC, datetime, timedelta
from statistics import median
from typing import Any

from harness import progress, report, surroundings

from orca_infra.config import Config, parse_config
from orca_infra.log import make_log
from orca_infra.loop.leader import Leader
from orca_infra.loop.passes import MachinePasses, configure_providers, look
from orca_infra.machines.decide import POOL_LABEL, STACK_LABEL, decide
from orca_infra.machines.model import (
    Demand,
    Limits,
    MachineRow,
    MachineState,
    MachineType,
    Pool,
    Refusal,
    SeenMachine,
    Snapshot,
)
from orca_infra.machines.observe import SQL, machine_stack
from orca_infra.machines.providers.local_config import LocalCloud as LocalConfig
from orca_infra.stack.engine import Engine
from orca_infra.surroundings import Surroundings
from orca_infra.testing.fake_cloud import FakeCloud, FakeProvider
from orca_infra.testing.simulation_world import SimulatedClock

MACHINES = 1000
POOLS = 10
OFFERINGS = 50
QUEUED_FOR_DECIDE = 20_000
QUEUED_FOR_DEMAND = 100_000
TIMES = 9
STOCK_OUTS = 3
_FAILOVER = """
[pools.default]
provider = "local"
image = "registry.example/orca-worker:1"
locations = ["l1", "l2", "l3", "l4"]
max_machines = 4
idle_seconds = "1h"
types = [{ type = "small" }]
[local.locations]
l1 = { small = 0 }
l2 = { small = 0 }
l3 = { small = 0 }
l4 = { small = 1 }
"""


def main() -> None:
    figures: dict[str, float] = {}
    floors: dict[str, float] = {}
    decision(figures, floors)
    with surroundings() as here:
        passes_at_scale(here, figures, floors)
    with surroundings({"ORCA_POOL_GROW_AFTER": "0", "ORCA_POOL_TRY_SECONDS": "1"}) as here:
        failover(here, figures, floors)
    report(
        "pool_scale",
        figures=figures,
        floors=floors,
        targets={
            "decide_seconds": 0.05,
            "demand_query_seconds": 0.05,
            "no_change_pass_seconds": 1.0,
            "next_candidate_seconds": 3.0,
        },
        load=os.getloadavg()[0],
    )


def the_pools() -> tuple[Pool, ...]:
    """Ten pools of five offerings each."""
    places = tuple(f"l{number}" for number in range(OFFERINGS // POOLS))
    types = (MachineType(type="small", locations=places, wait_seconds=300), MachineType(type="large", locations=places))
    return tuple(
        Pool(
            name=f"pool{number}",
            provider="fake",
            image="worker:1",
            max_machines=MACHINES,
            idle_seconds=3600,
            max_booting=5,
            types=types,
        )
        for number in range(POOLS)
    )


def decision(figures: dict[str, float], floors: dict[str, float]) -> None:
    progress(f"decide: {MACHINES} machines, {OFFERINGS} offerings refused, {QUEUED_FOR_DECIDE} runs queued")
    now = datetime.now(UTC)
    rows = tuple(machine_row(number, now) for number in range(MACHINES))
    pools = the_pools()
    refusals = tuple(
        Refusal(
            pool=pool.name,
            type="small",
            location=place,
            spot=False,
            kind="NoCapacity",
            since=now - timedelta(minutes=5),
            last_at=now - timedelta(seconds=30),
            times=5,
        )
        for pool in pools
        for place in pool.types[0].locations
    )
    waiting = QUEUED_FOR_DECIDE // POOLS
    snapshot = Snapshot(
        now=now,
        stack_id="bench",
        hearing_since=now - timedelta(hours=1),
        demand={pool.name: Demand(aged=waiting, waiting=waiting) for pool in pools},
        machines=rows,
        seen=tuple(("fake", seen_of(row, now)) for row in rows),
        owned={pool.name: frozenset(row.name for row in rows if row.pool == pool.name) for pool in pools},
        refusals=refusals,
    )
    limits = Limits(
        try_seconds=60, boot_seconds=900, lost_seconds=300, stray_grace_seconds=60, stray_max=20, lost_max=3
    )
    plan = decide(snapshot, pools, limits)
    assert len(plan.actions) == POOLS, plan.actions[:3]
    figures["decide_seconds"] = timed(lambda: decide(snapshot, pools, limits))
    floors["walk_seconds"] = timed(lambda: [(row.name, row.pool) for row in rows] + [m.name for _, m in snapshot.seen])


def machine_row(number: int, now: datetime) -> MachineRow:
    pool = f"pool{number % POOLS}"
    return MachineRow(
        name=f"orca-{pool}-{number + 1}",
        pool=pool,
        number=number + 1,
        provider="fake",
        type="small",
        location="l0",
        created_at=now - timedelta(hours=1),
        uid=f"uid-{number}",
        confirmed_at=now - timedelta(hours=1),
        first_seen_at=now - timedelta(minutes=55),
        seen_at=now - timedelta(seconds=4),
        slots=1,
        running=1,
    )


def seen_of(row: MachineRow, now: datetime) -> SeenMachine:
    return SeenMachine(
        name=row.name,
        uid=str(row.uid),
        location=row.location,
        type=row.type,
        state=MachineState.RUNNING,
        created_at=now - timedelta(hours=1),
        labels={STACK_LABEL: "bench", POOL_LABEL: row.pool},
    )


def passes_at_scale(here: Surroundings, figures: dict[str, float], floors: dict[str, float]) -> None:
    progress(f"demand: {QUEUED_FOR_DEMAND} runs queued; pass: {MACHINES} machines in a cloud in memory, each works")
    clock = SimulatedClock()
    clock.now = datetime.now(UTC)
    cloud = FakeCloud(clock=clock, new_uid=iter(f"uid-{n}" for n in range(MACHINES)).__next__)
    config = Config(pools=the_pools(), max_machines_total=None, local=LocalConfig())
    provider = FakeProvider(cloud)
    fill(here, cloud)
    with here.database.snapshot() as transaction:
        grow = {"grow_after": 20.0}
        figures["demand_query_seconds"] = timed(lambda: transaction.dicts(SQL["demand"], grow))
        count = "select count(*), count(*) filter (where fill) from orca.runs where state = 'queued'"
        floors["count_seconds"] = timed(lambda: transaction.dicts(count))
        found = transaction.dicts(SQL["demand"], grow)
        assert sum(row["aged"] for row in found) == QUEUED_FOR_DEMAND, found
    with here.database.transaction() as transaction:
        # Nothing may be wanted: what waits is held by its pipelines' max_runs.
        transaction.run("update orca.pipelines set max_runs = 0")
        transaction.run("update orca.runs set fill = false where fill")
    leader = Leader(here.url)
    assert leader.acquire()
    passes = MachinePasses(here, Engine(here.engine), leader.verify, make_log(), providers=lambda _: {"fake": provider})
    try:
        seconds = []
        for _ in range(TIMES):
            with here.database.transaction() as transaction:
                transaction.run("update orca.workers set seen_at = now()")
            started = time.perf_counter()
            result = passes.run(config)
            seconds.append(time.perf_counter() - started)
            assert not result.plan.actions, result.plan.actions[:3]
            assert len(result.snapshot.machines) == len(result.snapshot.seen) == MACHINES
        figures["no_change_pass_seconds"] = median(seconds)
        figures["no_change_pass_max_seconds"] = max(seconds)
        floors["observe_seconds"] = timed(lambda: look(here, {"fake": provider}, pools=config.pools))
    finally:
        leader.release()


def fill(here: Surroundings, cloud: FakeCloud) -> None:
    """Machines, each with a worker that works, and runs that wait."""
    with here.database.transaction() as transaction:
        transaction.run(
            "insert into orca.pipelines (name, placement) "
            "select 'w' || n, 'worker:pool' || n from generate_series(0, %(n)s) n",
            {"n": POOLS - 1},
        )
        transaction.run(
            "insert into orca.runs (pipeline, fill, queued_at) "
            "select 'w' || n %% %(pools)s, n %% 7 = 0, now() - interval '1 minute' from generate_series(1, %(runs)s) n",
            {"pools": POOLS, "runs": QUEUED_FOR_DEMAND},
        )
        for number in range(MACHINES):
            pool = f"pool{number % POOLS}"
            name = f"orca-{pool}-{number + 1}"
            machine = cloud.plant(name, "l0", {STACK_LABEL: here.stack_id, POOL_LABEL: pool})
            transaction.run(
                SQL["record_machine"],
                {
                    "name": name,
                    "pool": pool,
                    "number": number + 1,
                    "provider": "fake",
                    "type": "small",
                    "location": "l0",
                    "spot": False,
                    "rendered": "{}",
                    "token_hash": b"-",
                },
            )
            transaction.run(SQL["confirm_machine"], {"name": name, "uid": machine.uid})
        transaction.run("insert into orca.workers (name, pool) select name, pool from orca.pool_machines")
        transaction.run(
            "insert into orca.owned (stack, urn, type, name, id, uid) "
            "select %(family)s || '.machines.' || pool, name, 't', name, name, uid from orca.pool_machines",
            {"family": here.settings.stack},
        )
    assert machine_stack(here.settings.stack, "pool1") == f"{here.settings.stack}.machines.pool1"
    with here.database.transaction() as transaction:
        transaction.run("select set_config('orca.writer', 'worker', true)")
        transaction.run(
            "insert into orca.runs (pipeline, worker) select 'w' || substr(pool, 5), name from orca.pool_machines"
        )
        transaction.run("update orca.runs set state = 'running', started_at = now() where worker is not null")
    with here.database.transaction() as transaction:
        transaction.run("analyze orca.runs")


def failover(here: Surroundings, figures: dict[str, float], floors: dict[str, float]) -> None:
    progress(f"failover: {STOCK_OUTS} locations are sold out, the fourth has room; the real engine")
    config = parse_config(_FAILOVER, "bench")
    configure_providers(config, here)
    engine = Engine(here.engine)
    leader = Leader(here.url)
    assert leader.acquire()
    passes = MachinePasses(here, engine, leader.verify, make_log())
    try:
        with here.database.transaction() as transaction:
            transaction.run("insert into orca.pipelines (name, placement) values ('w', 'worker:default')")
            transaction.run("insert into orca.runs (pipeline) values ('w')")
        started = time.perf_counter()
        assert passes.run(config).changed == 1
        took = time.perf_counter() - started
        with here.database.snapshot() as transaction:
            rows = transaction.dicts("select started_at, ended_at, outcome from orca.engine_operations order by id")
        assert [row["outcome"] for row in rows] == ["EngineFailed"] * STOCK_OUTS + ["Done"], rows
        # From an operation's start to the next one's lies a whole attempt; the provider here answers at once. So this is
        # more than what lies between the provider's no and its being asked again.
        gaps = [
            (after["started_at"] - before["started_at"]).total_seconds() for before, after in itertools.pairwise(rows)
        ]
        progress("  from one attempt to the next: " + ", ".join(f"{gap:.2f} s" for gap in gaps))
        figures["next_candidate_seconds"] = max(gaps)
        figures["failover_pass_seconds"] = took
        floors["engine_call_seconds"] = timed(lambda: engine.state("bench.machines.default"), times=3)
    finally:
        leader.release()


def timed(call: Any, times: int = TIMES) -> float:
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return median(seconds)


main()
