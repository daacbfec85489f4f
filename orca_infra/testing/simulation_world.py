"""What the simulated loop lives in: a clock, a database that runs on it, clouds, workers, and people, all from one seed.

The database is a real Postgres. Its time is the simulation's: `prepare_database` puts a function `now()` of its own before
Postgres's in the search path, before anything is migrated, so that every statement, function and default of the product takes
its time from there, and the product knows nothing of it.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, LiteralString

from orca_infra.db.connection import Database, Session, Transaction
from orca_infra.db.migrate import migrate
from orca_infra.machines.model import MachineState
from orca_infra.testing.fake_cloud import FakeMachine, token_of
from orca_infra.testing.simulation_engine import Killed

START = datetime(2026, 1, 1, tzinfo=UTC)
HEARTBEAT_SECONDS = 15.0
_TABLES = (
    *(
        "pool_machines",
        "pool_status",
        "pool_offers",
        "pool_pauses",
        "owned",
        "engine_operations",
        "attention",
        "hearing",
        "passes",
    ),
    *("runs", "workers", "pipelines"),
)
_CLOCK = """
create schema if not exists sim;
create or replace function sim.now() returns timestamptz language sql stable as $$
    select coalesce(nullif(current_setting('orca.sim_now', true), '')::timestamptz, pg_catalog.now())
$$;
do $$ begin
    execute format('alter database %I set search_path = sim, pg_catalog, public', current_database());
    execute format('alter database %I set synchronous_commit = off', current_database());  -- nothing has to survive here
end $$;
"""


def prepare_database(url: str) -> None:
    """Give an empty database the simulation's clock, then the product's schema."""
    for step in (
        lambda database: _run_script(database, _CLOCK),
        lambda database: migrate(database, with_orca_tables=True),
    ):
        database = Database(url)
        step(database)
        database.close()


def _run_script(database: Database, text: str) -> None:
    with database.transaction() as transaction:
        transaction.script(text)


class SimulatedClock:
    """Time that passes only when somebody sleeps; events happen on the way."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin anew: nothing is going to happen."""
        self.now = START
        self.kill_at: datetime | None = None
        self._events: list[tuple[datetime, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + timedelta(seconds=max(0, seconds)), next(self._numbers), event))

    def sleep(self, seconds: float) -> None:
        """Raises Killed when the loop's end comes meanwhile."""
        until = self.now + timedelta(seconds=max(0, seconds))
        if self.kill_at is not None and self.kill_at <= until:
            self.pass_until(self.kill_at)
            self.kill_at = None
            raise Killed
        self.pass_until(until)

    def pass_until(self, until: datetime) -> None:
        """Let everybody but the loop go on until then."""
        while self._events and self._events[0][0] <= until:
            at, _, event = heapq.heappop(self._events)
            self.now = max(self.now, at)
            event()
        self.now = max(self.now, until)


class ClockedDatabase(Database):
    """The database of one process, on one connection; `entering` and `leaving` are called around each transaction."""

    def __init__(
        self,
        url: str,
        clock: SimulatedClock,
        entering: Callable[[], None] = lambda: None,
        leaving: Callable[[], None] = lambda: None,
    ) -> None:
        self.url = url
        self.is_open = False
        self._clock = clock
        self._session = Session(url)
        self._entering = entering
        self._leaving = leaving

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Transaction]:
        with self._begun("begin") as transaction:
            yield transaction

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[Transaction]:
        with self._begun("begin isolation level repeatable read read only") as transaction:
            yield transaction

    @contextlib.contextmanager
    def _begun(self, begin: str) -> Iterator[Transaction]:
        assert not self.is_open, "a transaction within a transaction"
        self._entering()
        transaction = Transaction(self._session._connection)  # noqa: SLF001  (one connection instead of the pool's)
        transaction.script(f"{begin}; set local orca.sim_now = '{self._clock.now.isoformat()}'")
        self.is_open = True
        try:
            yield transaction
        except BaseException:
            transaction.script("rollback")
            raise
        else:
            transaction.script("commit")
        finally:
            self.is_open = False
        self._leaving()

    def read(self, query: LiteralString, parameters: Mapping[str, object]) -> list[dict[str, Any]]:
        """One look at what is there, in which time does not matter: a third of a transaction's cost."""
        return Transaction(self._session._connection).dicts(query, parameters)  # noqa: SLF001

    def clear(self) -> None:
        """Empty every table but the identity."""
        text = "\n".join(f"delete from orca.{table};" for table in _TABLES)
        Transaction(self._session._connection).script(text)  # noqa: SLF001

    def close(self) -> None:
        self._session.close()


@dataclass(slots=True)
class Life:
    """What is really so of one machine, whatever anybody believes.

    Attributes:
        excuses: why the loop may take its runs away.
        taken: run and start -> when it ends.

    """

    machine: FakeMachine
    pool: str
    first_hello_at: datetime | None = None
    last_hello_at: datetime | None = None
    last_end_at: datetime | None = None
    excuses: set[str] = field(default_factory=set)
    taken: dict[tuple[int, int], datetime] = field(default_factory=dict)
    is_silent: bool = False


@dataclass(slots=True)
class Workers:
    """The workers of all machines: they say hello, take runs and end them through the SQL functions, with their tokens."""

    clock: SimulatedClock
    database: ClockedDatabase
    rng: random.Random
    stack_id: str
    say: Callable[[str], None]
    is_away: Callable[[], bool]
    exists: Callable[[FakeMachine], bool]
    never_boots: float = 0
    slots_of: Callable[[FakeMachine], int] = lambda machine: 1 + machine.created_at.second % 2
    lives: dict[str, Life] = field(default_factory=dict)
    takers: dict[int, Life] = field(default_factory=dict)

    def boot(self, machine: FakeMachine) -> None:
        """A machine is there: if it is ours its worker comes up after a while, or never."""
        if machine.labels.get("orca-stack") != self.stack_id or not machine.startup:
            return
        life = self.lives[machine.uid] = Life(machine, str(machine.labels["orca-pool"]))
        self.say(f"    {machine.name} is there, in {machine.location}")
        if self.rng.random() >= self.never_boots:
            self.clock.after(self.rng.uniform(3, 30), lambda: self._step(life))

    def _step(self, life: Life) -> None:
        machine = life.machine
        if machine.state is not MachineState.RUNNING or not self.exists(machine) or life.is_silent:
            return
        wait = HEARTBEAT_SECONDS
        if not self.is_away():
            try:
                wait = self._work(life)
            except Exception as error:
                if getattr(error, "sqlstate", None) != "28000":
                    raise
                self.say(f"    {machine.name}: token revoked")
                return
        self.clock.after(wait, lambda: self._step(life))

    def _work(self, life: Life) -> float:
        """Hello, ends, takes; gives the seconds until the next step."""
        now, machine = self.clock.now, life.machine
        slots = self.slots_of(machine)
        me = {"worker": machine.name, "token": token_of(machine.startup), "slots": slots}
        with self.database.transaction() as transaction:
            transaction.value("select orca.worker_hello(%(worker)s, %(token)s, %(slots)s)", me)
            life.first_hello_at = life.first_hello_at or now
            life.last_hello_at = now
            for (run, start), ends_at in list(life.taken.items()):
                if ends_at <= now:
                    del life.taken[run, start]
                    transaction.value(
                        "select orca.worker_end(%(worker)s, %(token)s, %(run)s, %(start)s, 'succeeded', null)",
                        {**me, "run": run, "start": start},
                    )
                    life.last_end_at = now
                    self.say(f"    {machine.name} ended run {run}")
            while len(life.taken) < slots:
                taken = transaction.dicts("select run_id, start from orca.worker_take(%(worker)s, %(token)s)", me)
                if not taken:
                    break
                run, start = taken[0]["run_id"], taken[0]["start"]
                life.taken[run, start] = now + timedelta(seconds=self.rng.uniform(5, 45))
                self.takers[run] = life
                self.say(f"    {machine.name} took run {run}")
        next_end = min((ends_at for ends_at in life.taken.values()), default=now + timedelta(seconds=HEARTBEAT_SECONDS))
        return max(0.5, min(HEARTBEAT_SECONDS, (next_end - now).total_seconds()))
