"""The pool autoscaler, the real one, in a world that goes wrong: `python -m orca_infra.testing.simulation SEED`.

observe, decide and apply, the loop's pass around them, the engine's ledger and every SQL statement are the product's, on a
real Postgres. The clock, the clouds, the engine below its ledger, the workers and the people are simulated, from one seed. So
a seed and a commit reproduce a failure, whatever the day.

    ... SEED                    one seed, with all that happened in it
    ... --first N --count N     many, without a word unless one fails; --database URL: in this prepared database
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, LiteralString, cast
from unittest import mock

from orca_infra.config import Config
from orca_infra.db import embedded
from orca_infra.errors import NotLeader, OrcaError, Transient
from orca_infra.loop.passes import MachinePasses, PassResult
from orca_infra.machines.model import EVERY_POOL, Pool
from orca_infra.record.decided import Scope
from orca_infra.record.passes import PassRecord
from orca_infra.settings import read_settings
from orca_infra.stack.engine import Engine, EngineConfig
from orca_infra.surroundings import Surroundings
from orca_infra.testing.fake_cloud import FakeCloud, FakeMachine, FakeProvider
from orca_infra.testing.simulation_chaos import Chaos
from orca_infra.testing.simulation_checks import Checks
from orca_infra.testing.simulation_engine import FakeBackend, FakeEngine, Killed
from orca_infra.testing.simulation_events import PIPELINES, PLACES, Events
from orca_infra.testing.simulation_world import ClockedDatabase, SimulatedClock, Workers, prepare_database

STACK_ID = "simulatedstackid"
CHAOTIC_PASSES = 18
#: After the faults stop: so many passes at most until one does nothing (boot and lost times are 90 s, passes 15 s apart).
CALM_PASSES = 60
_SETTINGS = {
    "ORCA_STACK": "sim",
    "ORCA_TOKEN_KEY": "a key of the simulation, long enough",
    "ORCA_POOL_GROW_AFTER": "5",
    "ORCA_POOL_TRY_SECONDS": "20",
    "ORCA_POOL_SCALE_SECONDS": "15",
    "ORCA_POOL_BOOT_SECONDS": "90",
    "ORCA_POOL_LOST_SECONDS": "90",
    "ORCA_HEARTBEAT_SECONDS": "15",
    "ORCA_STRAY_GRACE_SECONDS": "40",
    "ORCA_STRAY_MAX": "6",
    "ORCA_ENGINE_SECONDS": "60",
    "ORCA_RECORD_PASSES": "0",
    "PULUMI_BACKEND_URL": "file:///nowhere",
}


class _Log:
    """Has the world say what the loop logs."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def info(self, event: str, **particulars: object) -> None:
        self._say(f"  {event} {' '.join(f'{key}={value}' for key, value in particulars.items())}")

    warning = info


class World:
    """One seed's world, and the loop in it."""

    #: Whether its passes are recorded.
    keeps_record = False

    def __init__(
        self,
        seed: int,
        databases: tuple[ClockedDatabase, ClockedDatabase, SimulatedClock],
        folder: Path,
        config: Config | None = None,
    ) -> None:
        """With `config` nothing goes wrong by itself, nobody does anything, and these are the pools."""
        self._folder = folder
        self.rng = random.Random(seed)  # noqa: S311  (no secret is made of it)
        self.database, self.watcher, self.clock = databases
        self.lines: list[str] = []
        self.stack_id = STACK_ID
        self.chaos = Chaos.of(self.rng)
        self.checks = Checks(self)
        self.events = Events(self)
        self.in_pass = False
        self.is_dead = False
        self.began_at = self.clock.now
        self.away_until = self.clock.now
        self.pools_once_gone: set[str] = set()
        self._idle_seconds: dict[str, set[float]] = {}
        self.settings = read_settings({**_SETTINGS, "ORCA_DB": self.database.url, "ORCA_HOME": str(folder)})
        lag = self.rng.choice([0.0, 2.0, 30.0]) if "lists lag" in self.chaos.rates and config is None else 0.0
        uids = (f"uid{number:06}" for number in range(10**6))
        self.clouds = {
            name: FakeCloud(
                clock=self.clock,
                new_uid=lambda: next(uids),
                create_seconds=2,
                delete_seconds=1,
                lag_seconds=lambda: self.rng.uniform(0, lag),
                chance=self.chaos.fault,
            )
            for name in PLACES
        }
        self.backend = FakeBackend(
            clock=self.clock,
            clouds={place: self.clouds[name] for name, places in PLACES.items() for place in places},
            around=self,
        )
        self.workers = Workers(
            self.clock, self.watcher, self.rng, STACK_ID, self.say, lambda: self.is_away, self.exists
        )
        self.workers.never_boots = self.chaos.rates.get("never boots", 0)
        for cloud in self.clouds.values():
            cloud.booted = self.workers.boot
        self.config = config or self.events.new_config()
        self.note_idle_seconds()
        if config is not None:
            self.chaos.end()
            self.workers.never_boots = 0
            self.workers.slots_of = lambda _: 1
        self._populate(limited=config is None)
        self.passes = self._new_loop()

    # What there is.

    def say(self, line: str) -> None:
        self.lines.append(f"{(self.clock.now.timestamp() % 86400):8.1f} {line}")

    def rows(self, query: LiteralString, **parameters: object) -> list[dict[str, Any]]:
        return self.watcher.read(query, parameters)

    def cloud_of(self, location: str) -> FakeCloud:
        return self.backend.clouds[location]

    def exists(self, machine: FakeMachine) -> bool:
        return self.cloud_of(machine.location).machines.get((machine.location, machine.name)) is machine

    def ours(self) -> list[FakeMachine]:
        """This stack's machines, less one that only its labels could find, and that has lost them in a lie of its cloud."""
        return [
            machine
            for cloud in self.clouds.values()
            for machine in cloud.machines.values()
            if self.is_ours(machine) and (machine.labels.get("orca-stack") == STACK_ID or machine.uid not in cloud.lied)
        ]

    def is_ours(self, machine: FakeMachine) -> bool:
        """Whether this stack made it, whatever labels it has now."""
        return machine.labels.get("orca-stack") == STACK_ID or machine.uid in self.workers.lives

    def pool(self, name: str) -> Pool:
        return next(pool for pool in self.config.pools if pool.name == name)

    def idle_seconds(self, pool: str) -> set[float]:
        """Every idle time that the pool was ever declared with."""
        return self._idle_seconds[pool]

    def may_wait(self, pipeline: str) -> bool:
        """Whether at the end runs of a pipeline have a reason to wait."""
        pool = dict(PIPELINES)[pipeline]
        [row] = self.rows("select paused, max_runs from orca.pipelines where name = %(name)s", name=pipeline)
        paused = self.rows("select pool from orca.pool_pauses where pool in (%(pool)s, '')", pool=pool)
        declared = [one for one in self.config.pools if one.name == pool and one.max_machines > 0]
        return bool(row["paused"] or row["max_runs"] == 0 or paused or not declared or self._is_starved())

    def _is_starved(self) -> bool:
        """Whether machines that a pause keeps, though they are idle, are as many as there may be in all."""
        total = self.config.max_machines_total
        kept = self.rows(
            "select from orca.pool_machines m where m.ended_at is null and exists "
            "(select from orca.pool_pauses p where p.pool in (m.pool, ''))"
        )
        return total is not None and len(kept) >= total

    def note_idle_seconds(self) -> None:
        for pool in self.config.pools:
            self._idle_seconds.setdefault(pool.name, set()).add(pool.idle_seconds)

    @property
    def is_away(self) -> bool:
        return self.clock.now < self.away_until

    def _populate(self, *, limited: bool) -> None:
        with self.watcher.transaction() as transaction:
            for name, pool in PIPELINES:
                transaction.run(
                    "insert into orca.pipelines (name, placement, max_runs, max_starts) "
                    "values (%(name)s, %(to)s, %(n)s, %(m)s)",
                    {
                        "name": name,
                        "to": f"worker:{pool}",
                        "n": self.rng.choice([None, None, 1, 3]) if limited else None,
                        "m": self.rng.choice([None, None, 3]) if limited else None,
                    },
                )

    def _new_loop(self) -> MachinePasses:
        """A loop that remembers nothing."""
        providers = {name: FakeProvider(cloud, self._act) for name, cloud in self.clouds.items()}
        surroundings = Surroundings(
            settings=self.settings,
            database=self.database,
            url=self.database.url,
            stack_id=STACK_ID,
            engine=EngineConfig(backend_url="file:///nowhere", passphrase_file=self._folder, folder=self._folder),
            token_key=self.settings.token_key or b"",
        )
        passes = MachinePasses(
            surroundings,
            cast("Engine", FakeEngine(self.backend)),
            self._verify,
            _Log(self.say),
            providers=lambda _: providers,
            seconds=self._seconds,
        )
        if self.keeps_record:  # beside what goes wrong: a seed's history is the same with and without
            passes.record = PassRecord(self.watcher, Scope.MACHINES, passes=10**6, seconds=10.0**9, log=_Log(self.say))
        return passes

    # What the loop meets.

    def entering(self) -> None:
        """Before each transaction of the loop."""
        if self.is_dead:
            raise Killed
        if self.is_away:
            raise Transient("the database is away: simulated")
        self.point("before a transaction")

    def leaving(self) -> None:
        self.point("after a transaction")

    def point(self, label: str) -> None:
        if self.in_pass and self.chaos.happens("killed at a point"):
            self.say(f"  KILLED {label}")
            self.is_dead = True
        if self.is_dead:
            raise Killed

    def goes_on(self) -> bool:
        self.is_dead = True
        return self.rng.random() < 0.5

    def trouble(self, kind: str, stack: str) -> OrcaError | None:
        if self.is_dead:
            raise Killed
        return self.chaos.trouble(kind, stack)

    def acting(self, kind: str, machine: FakeMachine | None, name: str) -> None:
        self.say(f"  engine: {kind} {name}")
        if kind == "create":
            self.checks.before_create(name)
        else:
            self.checks.before_delete(machine, name)

    def _act(self, kind: str, machine: FakeMachine | None) -> None:
        if self.is_dead:
            raise Killed
        self.say(f"  {kind} {machine.name if machine else 'what is gone'} through the provider")
        if machine is not None and kind == "delete":
            self.checks.before_delete(machine, machine.name)
            self.checks.nobodys(machine)

    def _seconds(self) -> float:
        return self.clock.now.timestamp()

    def _verify(self) -> None:
        if self.is_dead:
            raise Killed
        if self.is_away or (self.in_pass and self.chaos.happens("lead lost")):
            raise NotLeader("the lead was lost: simulated")

    # What happens.

    def run(self) -> None:
        """Chaos, then calm, in which a bounded number of passes comes to one that does nothing."""
        with self.processes():
            for _ in range(CHAOTIC_PASSES):
                self.events.people()
                self.events.clouds()
                self.make_pass(may_be_killed=True)
            self._calm_down()
            quiet, unsettled = 0, ""
            for _ in range(CALM_PASSES):
                result = self.make_pass()
                does_nothing = result is not None and not result.plan.actions and not result.changed
                unsettled = self._unsettled() if does_nothing else "it still acts"
                quiet = 0 if unsettled else quiet + 1
                if quiet == 2:
                    break
            self.checks.that(quiet == 2, f"no fixpoint within {CALM_PASSES} passes: {unsettled}")
            self.checks.at_the_end(self.config.pools)

    def processes(self) -> contextlib.AbstractContextManager[object]:
        """Within this, the ledger asks the simulation which engine processes live."""
        return mock.patch("orca_infra.stack.operations.is_alive", self.backend.is_alive)

    def _unsettled(self) -> str:
        """What still works, waits, boots, lags or is within its grace, so that a later pass has to act; or nothing."""
        left = self.rows("select id, pipeline, state from orca.runs where state in ('queued', 'running') order by id")
        left = [row for row in left if row["state"] == "running" or not self.may_wait(row["pipeline"])]
        if left:
            return f"runs are left: {left}"
        if any(cloud.late for cloud in self.clouds.values()):
            return "a cloud has yet to do what it was asked for"
        rows = self.rows("select name, uid, pool from orca.pool_machines where ended_at is null order by name")
        if {row["uid"] for row in rows} != {machine.uid for machine in self.ours()}:
            return f"rows {[row['name'] for row in rows]}, machines {[machine.name for machine in self.ours()]}"
        paused = {row["pool"] for row in self.rows("select pool from orca.pool_pauses")}
        idle = [row["name"] for row in rows if paused.isdisjoint((row["pool"], EVERY_POOL))]
        return f"machines are left: {idle}" if idle else ""

    def execute(self, statement: LiteralString, **parameters: object) -> None:
        with self.watcher.transaction() as transaction:
            transaction.run(statement, parameters)

    def make_pass(self, *, may_be_killed: bool = False) -> PassResult | None:
        """One pass, checked, and the time until the next; None when it was cut short or given up."""
        if may_be_killed and self.chaos.happens("killed in a sleep"):
            self.clock.kill_at = self.clock.now + timedelta(seconds=self.rng.uniform(0, 60))
        self.checks.begin_pass()
        self.in_pass = True
        result = None
        self.say("pass")
        self.began_at = self.clock.now
        try:
            result = self.passes.run(self.config)
        except Killed:
            self.say("  the loop was killed; another begins")
            self.is_dead = False
            self.passes = self._new_loop()
        except NotLeader as error:
            self.say(f"  {error}")
            self.passes = self._new_loop()
        except OrcaError as error:
            self.say(f"  given up: {error}")
        finally:
            self.in_pass = False
            self.clock.kill_at = None
        self._note_excuses()
        self.checks.after_pass(result)
        self.clock.pass_until(self.clock.now + timedelta(seconds=self._wait(result)))
        self._note_excuses()
        return result

    def _wait(self, result: PassResult | None) -> float:
        if self.is_away:  # the interesting moment is the return
            left = (self.away_until - self.clock.now).total_seconds()
            return self.rng.choice([left / 2, left, left + self.rng.uniform(0, 5)])
        if result is None:
            return 2.0
        if result.changed:
            return 0.2
        due = self.settings.scale_seconds if result.next_in_seconds is None else result.next_in_seconds
        return max(0.2, min(due, self.settings.scale_seconds))

    def _note_excuses(self) -> None:
        """What may be believed of machines from now on."""
        lied, self.chaos.get_lies = self.chaos.get_lies > 0, 0
        lost_seconds = self.settings.lost_seconds - 2
        for life in self.workers.lives.values():
            if lied or not self.exists(life.machine):
                life.excuses.add("Vanished")
            heard_at = life.last_hello_at or life.machine.created_at
            if life.is_silent and (self.clock.now - heard_at).total_seconds() >= lost_seconds:
                life.excuses.add("Lost")

    def _calm_down(self) -> None:
        self.say("CALM")
        self.chaos.end()
        self.workers.never_boots = 0
        self.away_until = self.clock.now
        with self.watcher.transaction() as transaction:
            if self.rng.random() < 0.8:
                transaction.run("delete from orca.pool_pauses")
            # What is left to do is bounded, or so is nothing.
            transaction.run(
                "update orca.runs set state = 'canceled' where state = 'queued' and id not in "
                "(select id from orca.runs where state = 'queued' order by id limit 5)"
            )


class Simulation:
    """Runs seeds in one database."""

    def __init__(self, url: str) -> None:
        """`url`: a database that `prepare_database` prepared."""
        self._folder = Path(tempfile.mkdtemp(prefix="orca-sim-home-"))
        self._world: World | None = None
        self._clock = SimulatedClock()
        self._database = ClockedDatabase(url, self._clock, self._entering, self._leaving)
        self._watcher = ClockedDatabase(url, self._clock)

    def new_world(self, seed: int, config: Config | None = None) -> World:
        """An empty world; what was in the database is gone."""
        self._world = None
        self._clock.reset()
        self._watcher.clear()
        self._world = World(seed, (self._database, self._watcher, self._clock), self._folder, config)
        return self._world

    def run(self, seed: int) -> World:
        """Run one seed. Raises whatever broke, with what happened and the command that runs it again as a note."""
        world = self.new_world(seed)
        try:
            world.run()
        except BaseException as error:
            error.add_note("\n".join([*world.lines[-80:], f"seed {seed} broke", command_of(seed)]))
            raise
        return world

    def close(self) -> None:
        self._database.close()
        self._watcher.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _entering(self) -> None:
        if self._world is not None:
            self._world.entering()

    def _leaving(self) -> None:
        if self._world is not None:
            self._world.leaving()


def command_of(seed: int) -> str:
    """What runs this seed again."""
    return f"run it again: .venv/bin/python -m orca_infra.testing.simulation {seed}"


def main(arguments: list[str] | None = None) -> int:
    """Exit code 1 when a seed broke something; it says which, and how to run it again."""
    parser = argparse.ArgumentParser(prog="python -m orca_infra.testing.simulation", description=__doc__)
    parser.add_argument("seed", nargs="?", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--database", default="")
    options = parser.parse_args(arguments)
    folder = None
    url = options.database
    try:
        if not url:
            folder = Path(tempfile.mkdtemp(prefix="orca-sim-", dir="/tmp"))
            folder.chmod(0o755)
            url = embedded.start(folder / "postgres")
            prepare_database(url)
        with contextlib.closing(Simulation(url)) as simulation:
            if options.seed is not None:
                print("\n".join(simulation.run(options.seed).lines))
            for seed in range(options.first, options.first + options.count):
                simulation.run(seed)
    finally:
        if folder is not None:
            embedded.stop(folder / "postgres")
            shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
