"""Hostile and broken rows on a real database: bounded, said, and nothing else suffers. No engine, a cloud in memory."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from orca_infra.config import Config, parse_config
from orca_infra.db.connection import Database
from orca_infra.db.moments import FIRST, LAST
from orca_infra.loop.clocks import mend_clocks
from orca_infra.loop.passes import MachinePasses, PassResult
from orca_infra.machines.decide import POOL_LABEL, STACK_LABEL
from orca_infra.machines.model import Make, Reason, Remove
from orca_infra.machines.observe import SQL
from orca_infra.runs.decide import decide as decide_runs
from orca_infra.runs.limits import run_limits
from orca_infra.runs.observe import read_rows
from orca_infra.stack.cohorts import SQL as COHORTS
from orca_infra.stack.engine import Engine
from orca_infra.status import read_status
from orca_infra.surroundings import Surroundings
from orca_infra.testing.fake_cloud import FakeCloud, FakeProvider
from orca_infra.testing.simulation_engine import FakeBackend, FakeEngine
from orca_infra.testing.simulation_world import SimulatedClock

pytestmark = pytest.mark.postgres

TOML = """
[pools.p]
provider = "local"
image = "registry.example/orca-worker:1"
max_machines = 3
idle_seconds = "10m"
types = [{ type = "small", locations = ["a"] }]
[pools.q]
provider = "local"
image = "registry.example/orca-worker:1"
max_machines = 3
idle_seconds = "10m"
types = [{ type = "small", locations = ["a"] }]
"""
#: What somebody may write into a column of times: one hour and a day ahead, past Python's last year, past Postgres' last.
FUTURES = ["now() + interval '1 day'", "timestamptz '9999-12-31 23:59:59+00'", "timestamptz '294276-12-31 00:00:00+00'"]
FUTURES += ["timestamptz 'infinity'"]
#: Text of every kind that Postgres takes.
NAMES = [
    'it\'s "quoted"; drop table orca.runs; --',
    "two\nlines\r\n\ttabbed",
    "\u202eright to left\u202c שלום مرحبا",
    "n" * 10_000,
    "\x1b[31mred\x1b[0m\x07",
    "%s %(name)s {name} {{}} $1 \\",
    "🐋" * 100,
    " ",
]


class Log:
    """Keeps what is said."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, object]]] = []

    def info(self, event: str, **particulars: object) -> None:
        self.lines.append((event, particulars))

    warning = info


@dataclass
class Room:
    """The machines' passes on a database, over a cloud in memory; `plan` decides and acts on nothing."""

    here: Surroundings
    cloud: FakeCloud
    passes: MachinePasses
    config: Config
    log: Log = field(default_factory=Log)

    @property
    def database(self) -> Database:
        return self.here.database

    def execute(self, statement: str, **parameters: object) -> None:
        with self.database.transaction() as transaction:
            transaction.run(statement, parameters)

    def value(self, query: str, **parameters: object) -> Any:
        with self.database.snapshot() as transaction:
            return transaction.value(query, parameters)

    def pipeline(self, name: str, placement: str | None = "worker:p") -> None:
        self.execute("insert into orca.pipelines (name, placement) values (%(n)s, %(p)s)", n=name, p=placement)

    def queue(self, pipeline: str, queued_at: str = "now() - interval '1 minute'") -> None:
        self.execute(f"insert into orca.runs (pipeline, queued_at) values (%(p)s, {queued_at})", p=pipeline)

    def machine(self, number: int, pool: str = "p") -> str:
        """A confirmed machine that exists, whose worker was just seen."""
        name = f"orca-{pool}-{number}"
        machine = self.cloud.plant(name, "a", {STACK_LABEL: self.here.stack_id, POOL_LABEL: pool})
        parameters = {
            "name": name,
            "pool": pool,
            "number": number,
            "type": "small",
            "location": "a",
            "provider": "local",
            "spot": False,
        }
        with self.database.transaction() as transaction:
            transaction.run(SQL["record_machine"], {**parameters, "rendered": "{}", "token_hash": b"-"})
            transaction.run(SQL["confirm_machine"], {"name": name, "uid": machine.uid})
            transaction.run("insert into orca.workers (name, pool) values (%(n)s, %(p)s)", {"n": name, "p": pool})
            transaction.run(
                "insert into orca.owned (stack, urn, type, name, id, uid) values (%(s)s, %(n)s, 't', %(n)s, %(n)s, %(u)s)",
                {"s": f"{self.here.settings.stack}.machines.{pool}", "n": name, "u": machine.uid},
            )
        return name

    def plan(self) -> PassResult:
        """What a pass comes to that must not act; its own first writes are made."""
        self.passes.stop()
        return self.passes.run(self.config)

    def makes(self) -> set[str]:
        return {action.pool for action in self.plan().plan.actions if isinstance(action, Make)}

    def removals(self) -> dict[str, Reason]:
        return {action.name: action.reason for action in self.plan().plan.actions if isinstance(action, Remove)}

    def attention(self) -> str:
        return str(self.value("select coalesce(string_agg(message, ' '), '') from orca.attention"))


@pytest.fixture
def room(surroundings: Callable[..., Surroundings]) -> Room:
    here = surroundings(ORCA_POOL_GROW_AFTER="20", ORCA_STRAY_GRACE_SECONDS="60", ORCA_HEARTBEAT_SECONDS="15")
    clock = SimulatedClock()
    clock.now = datetime.now(UTC)
    uids = (f"uid-{number}" for number in itertools.count())
    cloud = FakeCloud(clock=clock, new_uid=lambda: next(uids))
    log = Log()
    passes = MachinePasses(
        here,
        cast("Engine", FakeEngine(FakeBackend(clock=clock, clouds={"a": cloud}))),
        lambda: None,
        log,
        providers=lambda _: {"local": FakeProvider(cloud)},
    )
    return Room(here, cloud, passes, parse_config(TOML, "orca.toml"), log)


# Clocks.


@pytest.mark.parametrize(
    "text", ["infinity", "-infinity", "294276-12-31", "4713-01-01 BC", "9999-12-31 23:59:59.999999"]
)
def test_a_time_that_python_does_not_know_is_read_as_the_first_or_the_last(room: Room, text: str) -> None:
    read = room.value("select %(t)s::timestamptz", t=text)
    assert read in {FIRST, LAST}
    assert (read == FIRST) == ("-inf" in text or "BC" in text)
    assert read + timedelta(days=36500) > read > read - timedelta(days=36500)  # there is room to calculate


@pytest.mark.parametrize("queued_at", [*FUTURES, "timestamptz '-infinity'"])
def test_a_run_that_was_queued_at_no_possible_time_counts_as_due_and_holds_up_no_other(
    room: Room, queued_at: str
) -> None:
    room.pipeline("odd")
    room.queue("odd", queued_at)
    room.pipeline("even", "worker:q")
    room.queue("even")
    assert room.makes() == {"p", "q"}
    assert ("queued_at that is ahead" in room.attention()) == ("-inf" not in queued_at)
    assert read_status(room.here)["attention"] or "-inf" in queued_at
    room.execute("update orca.runs set queued_at = now()")
    room.plan()
    assert "queued_at" not in room.attention()


def test_a_clock_a_little_ahead_delays_a_run_by_no_more_than_its_own_wait(room: Room) -> None:
    room.pipeline("odd")
    room.queue("odd", "now() + interval '10 seconds'")
    result = room.plan()
    assert result.plan.actions == ()
    assert 20 < (result.next_in_seconds or 0) <= 30  # 20 from what it says, and not from now
    room.execute("update orca.runs set queued_at = now() + interval '10 minutes'")
    assert room.makes() == {"p"}


@pytest.mark.parametrize("future", FUTURES)
def test_a_worker_that_was_seen_in_the_future_is_lost_like_any_other_and_not_at_once(room: Room, future: str) -> None:
    odd, well = room.machine(1), room.machine(2)
    room.plan()
    room.execute("update orca.hearing set since = now() - interval '1 day'")
    room.execute(
        "update orca.pool_machines set created_at = now() - interval '1 day', confirmed_at = now() - interval '1 day'"
    )
    room.execute(f"update orca.workers set seen_at = {future}, first_seen_at = {future} where name = %(n)s", n=odd)
    assert room.removals() == {}  # it may have been heard just now
    assert (
        "times far ahead of the database's clock: they count from now on",
        {"rows": [f"worker {odd}"], "count": 1},
    ) in (
        room.passes._log.lines  # type: ignore[attr-defined]
    )
    lost = room.here.settings.lost_seconds + 1
    room.execute(
        "update orca.workers set seen_at = seen_at - make_interval(secs => %(s)s) where name = %(n)s", s=lost, n=odd
    )
    assert room.removals() == {odd: Reason.LOST}
    assert well not in room.removals()


@pytest.mark.parametrize("future", ["now() + interval '1 hour'", *FUTURES])
def test_a_run_that_ends_in_the_future_keeps_no_machine_for_ever(room: Room, future: str) -> None:
    name = room.machine(1)
    room.execute("update orca.workers set first_seen_at = now() - interval '1 hour'")
    room.pipeline("work", None)
    room.execute("insert into orca.runs (pipeline, worker) values ('work', %(n)s)", n=name)

    room.execute(f"update orca.runs set state = 'canceled', ended_at = {future}")
    assert room.removals() == {name: Reason.IDLE}


@pytest.mark.parametrize("future", ["now() + interval '1 hour'", *FUTURES])
def test_what_this_program_wrote_with_a_wrong_clock_counts_from_now_on(room: Room, future: str) -> None:
    name = room.machine(1)
    room.execute("delete from orca.workers")
    room.execute(f"update orca.pool_machines set created_at = {future}, confirmed_at = {future}")
    room.execute(
        f"insert into orca.pool_status (pool, tried_at, trying_type, trying_since) values ('q', {future}, 'small', {future})"
    )
    room.execute(
        "insert into orca.pool_offers (pool, location, type, class, message, since, last_at) "
        f"values ('q', 'a', 'small', 'NoCapacity', '', {future}, {future})"
    )
    room.execute(f"insert into orca.hearing (since, read_at) values ({future}, {future})")
    room.pipeline("work", "worker:q")
    room.queue("work")
    assert room.makes() == {"q"}  # tried at once, and not in a thousand years
    assert room.value("select since <= now() and read_at <= now() from orca.hearing")
    assert room.value("select created_at <= now() and confirmed_at <= now() from orca.pool_machines")
    room.execute("update orca.hearing set since = now() - interval '1 day'")
    room.execute("update orca.pool_machines set confirmed_at = now() - interval '1 day'")
    assert room.removals() == {name: Reason.BOOT_TIMEOUT}


def test_a_pass_in_which_no_clock_is_wrong_says_nothing_of_clocks(room: Room) -> None:
    room.machine(1)
    room.plan()
    for scope in ("machines", "runs", "runtimes"):
        assert mend_clocks(scope, room.database, room.log) == 0
    assert room.log.lines == []
    assert room.attention() == ""


@pytest.mark.parametrize("future", FUTURES)
def test_rows_of_runs_and_runtimes_from_the_future_count_from_now_on_and_a_culls_time_stays(
    room: Room, future: str
) -> None:
    room.execute(
        f"insert into orca.run_clusters (run, start, pipeline, cpu_millis, created_at) values (1, 1, 'w', 1, {future})"
    )
    room.execute(
        "insert into orca.runtime_pods (name, namespace, environment, created_at, ready_at, taken_at) "
        f"values ('pod', 'n', 'e', {future}, {future}, {future})"
    )
    room.execute(
        f"insert into orca.runtimes (pod, user_name, environment, warm, assigned_at, expires_at) values "
        f"('pod', 'jane', 'e', true, {future}, {future})"
    )
    for scope, owner in (("runs", "run, start) select 1, 1"), ("runtimes", "pod) select 'pod'")):
        columns = "insert into orca.kube_objects (scope, namespace, kind, name, rendered, next_try_at, "
        room.execute(
            f"{columns}{owner.partition(')')[0]}) select %(s)s, 'n', 'Pod', %(s)s, '{{}}', {future}, {owner.partition('select ')[2]}",
            s=scope,
        )
    assert mend_clocks("runs", room.database, room.log) == 2
    assert mend_clocks("runtimes", room.database, room.log) == 3
    assert room.value("select created_at <= now() from orca.run_clusters")
    assert room.value("select created_at <= now() and ready_at <= now() and taken_at <= now() from orca.runtime_pods")
    assert room.value("select bool_and(next_try_at <= now()) from orca.kube_objects")
    assert room.value("select expires_at > now() + interval '2 hours' and assigned_at <= now() from orca.runtimes")


# Names.


def test_names_of_every_kind_are_placed_queued_and_counted_like_any_other(room: Room) -> None:
    for name in NAMES[:3] + NAMES[4:]:  # a primary key of 10 kB is for orca's own tables to refuse
        room.pipeline(name)
        room.queue(name)
    room.pipeline("lost", f"worker:{NAMES[3]}")  # a pool that no file has
    room.queue("lost")
    result = room.plan()
    assert result.snapshot.demand["p"].aged == len(NAMES) - 1
    assert [report.demand for report in result.plan.reports if report.pool == "p"] == [len(NAMES) - 1]
    assert [type(action) for action in result.plan.actions] == [Make]


def test_a_machine_with_a_foreign_origin_and_a_huge_number_does_not_end_the_pools_numbers(room: Room) -> None:
    room.pipeline("work")
    room.queue("work")
    room.cloud.plant("orca-p-9999999999", "a", {STACK_LABEL: room.here.stack_id, POOL_LABEL: "p"})
    room.cloud.plant("orca-p-2147483647", "b", {STACK_LABEL: room.here.stack_id, POOL_LABEL: "p"})
    assert room.passes.run(room.config).changed == 1
    assert room.value("select name from orca.pool_machines where confirmed_at is not null") == "orca-p-1"


def test_a_hundred_thousand_foreign_machines_with_our_labels_are_held_and_named_in_few_words(room: Room) -> None:
    clock = cast("SimulatedClock", room.cloud.clock)
    clock.now -= timedelta(hours=1)  # past their grace
    for number in range(100_000):
        room.cloud.plant(f"theirs-{number}", "a", {STACK_LABEL: room.here.stack_id, POOL_LABEL: "p"})
    clock.now += timedelta(hours=1)
    room.pipeline("work")
    room.queue("work")
    room.passes.run(room.config)
    assert room.value("select count(*) from orca.pool_machines where confirmed_at is not null") == 1
    assert len(room.cloud.machines) == 100_001
    assert "100000 machines that nobody owns are more than ORCA_STRAY_MAX, and none is deleted" in room.attention()
    assert len(json.dumps(room.log.lines, default=str)) < 20_000
    assert room.value("select sum(pg_column_size(p)) from orca.passes p") < 10 * 2**20


# What is refused again and again.


def test_what_is_refused_again_and_again_keeps_nothing_else_from_being_made(room: Room) -> None:
    """A pool under a full quota has more to try again than one cohort takes; launches and younger pools come before it."""
    room.execute(
        "insert into orca.runtime_pods (name, namespace, pool, environment, created_at) "
        "select 'huge-' || n, 'n', 'huge', 'e', now() - interval '1 hour' from generate_series(1, 600) n"
    )
    room.execute(
        "insert into orca.runtime_pods (name, namespace, pool, environment, taken_at) values "
        "('cold', 'n', null, 'e', now()), ('small', 'n', 'small', 'e', null)"
    )
    room.execute(
        "insert into orca.kube_objects (scope, namespace, kind, name, pod, rendered, tries, next_try_at) "
        "select 'runtimes', namespace, 'Pod', name, name, '{}', case when pool = 'huge' then 3 else 0 end, now() "
        "from orca.runtime_pods"
    )
    with room.database.snapshot() as transaction:
        rows = transaction.dicts(COHORTS["open_objects"], {"scope": "runtimes", "limit": 500, "only_awaited": False})
    names = [row["name"] for row in rows]
    assert len(names) == 500
    assert {"cold", "small"} <= set(names)


@pytest.mark.parametrize(("workers", "start"), [(2**31 - 1, 0), (2, 2**31 - 1)])
def test_a_run_that_no_column_could_count_is_read_and_left_queued(room: Room, workers: int, start: int) -> None:
    room.execute(
        "insert into orca.pipelines (name, image, workers) values ('huge', 'i', %(w)s), ('good', 'i', 2)", w=workers
    )
    room.queue("huge")
    room.execute("update orca.runs set start = %(s)s", s=start)
    room.queue("good")
    limits = run_limits(room.here.settings)
    with room.database.snapshot() as transaction:
        snapshot = read_rows(transaction, limits)
    plan = decide_runs(snapshot, limits)
    assert [run.pipeline for run in plan.admit] == ["good"]
    assert len(plan.waiting) == 1
