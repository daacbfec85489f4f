"""Who may write which transition of a run, by move_run and by the trigger; what workers may do; revocation."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import psycopg
import pytest

from orca_infra.machines.tokens import token_hash, worker_token

pytestmark = pytest.mark.postgres
KEY = b"a key of these tests"
T = TypeVar("T")
Rows = list[tuple[Any, ...]]


@dataclass(frozen=True)
class Orca:
    """One migrated database. Every statement is a transaction of its own."""

    url: str
    connection: psycopg.Connection[Any]

    def rows(self, query: str, **parameters: object) -> Rows:
        cursor = self.connection.execute(query.encode(), parameters)
        return cursor.fetchall() if cursor.description else []

    def value(self, query: str, **parameters: object) -> Any:
        return self.rows(query, **parameters)[0][0]

    def session(self) -> psycopg.Connection[Any]:
        """Another connection, whose transactions the caller ends."""
        return psycopg.connect(self.url)

    def machine(self, name: str = "orca-p-1", pool: str = "p", *, slots: int | None = 1) -> str:
        """A confirmed machine, its worker seen unless `slots` is None; gives its token."""
        token = worker_token(KEY, "stack", name)
        self.rows(
            "insert into orca.pool_machines (name, pool, number, provider, type, location, rendered, token_hash, uid, "
            "confirmed_at) values (%(name)s, %(pool)s, %(number)s, 'local', 'small', 'a', '{}', %(hash)s, 'uid', now())",
            name=name,
            pool=pool,
            number=int(name.rpartition("-")[2]),
            hash=token_hash(token),
        )
        if slots is not None:
            self.rows("select orca.worker_hello(%(n)s, %(t)s, %(s)s::int)", n=name, t=token, s=slots)
        return token

    def pipeline(self, name: str = "work", placement: str | None = "worker:p", **more: object) -> None:
        values = {"name": name, "placement": placement, **more}
        columns = ", ".join(values)
        self.rows(f"insert into orca.pipelines ({columns}) values ({', '.join(f'%({c})s' for c in values)})", **values)

    def run(self, pipeline: str = "work", *, fill: bool = False, age: float = 0) -> int:
        """Queue a run, `age` seconds ago."""
        return int(
            self.value(
                "insert into orca.runs (pipeline, fill, queued_at) "
                "values (%(p)s, %(f)s, now() - make_interval(secs => %(age)s)) returning id",
                p=pipeline,
                f=fill,
                age=age,
            )
        )

    def take(self, name: str, token: str) -> tuple[int, int, str] | None:
        rows = self.rows("select * from orca.worker_take(%(n)s, %(t)s)", n=name, t=token)
        return cast("tuple[int, int, str]", rows[0]) if rows else None

    def end(self, name: str, token: str, run: int, start: int, state: str = "succeeded") -> bool:
        return bool(
            self.value(
                "select orca.worker_end(%(n)s, %(t)s, %(r)s, %(s)s, %(state)s, null)",
                n=name,
                t=token,
                r=run,
                s=start,
                state=state,
            )
        )

    def revoke(self, name: str, reason: str = "Idle", *, only_idle: bool = False) -> bool:
        return bool(self.value("select orca.revoke_machine(%(n)s, %(r)s, %(o)s)", n=name, r=reason, o=only_idle))

    def state(self, run: int) -> tuple[str, int, str | None]:
        """A run's state, start and worker."""
        rows = self.rows("select state, start, worker from orca.runs where id = %(r)s", r=run)
        return cast("tuple[str, int, str | None]", rows[0])

    def waits_for_a_lock(self, pid: int) -> bool:
        return bool(self.value("select cardinality(pg_blocking_pids(%(pid)s)) > 0", pid=pid))

    def blocked(self, session: psycopg.Connection[Any], query: str, **parameters: object) -> Waiting:
        """Run a statement in another thread, and return once it waits for a lock."""
        waiting = Waiting(session, query, parameters)
        while not self.waits_for_a_lock(session.info.backend_pid):
            assert waiting.thread.is_alive(), f"it did not wait: {waiting.outcome}"
            time.sleep(0.01)
        return waiting


class Waiting:
    """A statement that waits in a thread of its own."""

    def __init__(self, session: psycopg.Connection[Any], query: str, parameters: dict[str, object]) -> None:
        self.outcome: Rows | psycopg.Error | None = None
        self._call: Callable[[], Rows] = lambda: session.execute(query.encode(), parameters).fetchall()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.outcome = self._call()
        except psycopg.Error as error:
            self.outcome = error

    def result(self) -> Rows | psycopg.Error:
        self.thread.join(120)
        assert self.outcome is not None, "it still waits"
        return self.outcome


@pytest.fixture
def orca(database_url: str) -> Iterator[Orca]:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("set lock_timeout = '2min'")
        yield Orca(database_url, connection)


def in_threads(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Make all calls at the same time, each in a thread of its own."""
    together = threading.Barrier(len(calls))

    def run(call: Callable[[], T]) -> T:
        together.wait(120)
        return call()

    with ThreadPoolExecutor(len(calls)) as executor:
        return list(executor.map(run, calls))


# Transitions.

STATES = ("queued", "running", "succeeded", "failed", "canceled")
WRITERS = ("scheduler", "worker", "driver", "orca-infra")
EVERY = [(f, t, w) for f, t, w in itertools.product(STATES, STATES, WRITERS) if f != t]
#: The table of docs/reference/run-transitions.md once more, by hand: who writes what.
ALLOWED = {
    ("queued", "running"): {"worker", "orca-infra"},
    ("queued", "canceled"): {"scheduler"},
    ("queued", "failed"): {"scheduler"},
    ("running", "succeeded"): {"worker", "driver", "scheduler"},
    ("running", "failed"): {"worker", "driver", "scheduler", "orca-infra"},
    ("running", "canceled"): {"scheduler"},
    ("running", "queued"): {"scheduler", "orca-infra"},
    ("failed", "queued"): {"scheduler"},
    ("canceled", "queued"): {"scheduler"},
}
MOVE = "select orca.move_run(%(run)s, %(start)s, %(from)s, %(to)s, %(writer)s, %(worker)s, 'why')"


def put(orca: Orca, run: int, state: str, worker: str | None = None) -> None:
    """Put a run into a state behind the trigger's back."""
    orca.rows("alter table orca.runs disable trigger guard_run")
    orca.rows("update orca.runs set state = %(s)s, worker = %(w)s where id = %(r)s", s=state, w=worker, r=run)
    orca.rows("alter table orca.runs enable trigger guard_run")


def test_the_table_of_transitions_is_the_documented_one(orca: Orca) -> None:
    rows = orca.rows("select from_state, to_state, writer from orca.run_transitions")
    assert sorted(rows) == sorted((f, t, w) for (f, t), writers in ALLOWED.items() for w in writers)


def test_move_run_allows_every_row_of_the_table_and_refuses_every_other(orca: Orca) -> None:
    orca.pipeline()
    run = orca.run()
    for before, after, writer in [*EVERY, *((s, s, w) for s in STATES for w in WRITERS)]:
        put(orca, run, before)
        start = orca.state(run)[1]
        values = {"run": run, "start": start, "from": before, "to": after, "writer": writer, "worker": None}
        if writer in ALLOWED.get((before, after), ()):
            assert orca.rows(MOVE, **values) == [(True,)]
            assert orca.state(run)[:2] == (after, start + (after == "running"))
        else:
            with pytest.raises(psycopg.errors.CheckViolation, match=f"{writer} may not write {before} -> {after}"):
                orca.rows(MOVE, **values)
            assert orca.state(run)[:2] == (before, start)


def test_the_trigger_allows_every_row_of_the_table_and_refuses_every_other(orca: Orca) -> None:
    orca.pipeline()
    run = orca.run()
    for before, after, writer in EVERY:
        put(orca, run, before)
        orca.rows("select set_config('orca.writer', %(w)s, false)", w="" if writer == "scheduler" else writer)
        update = "update orca.runs set state = %(to)s where id = %(run)s"
        if writer in ALLOWED.get((before, after), ()):
            orca.rows(update, to=after, run=run)
        else:
            with pytest.raises(psycopg.errors.CheckViolation, match=f"{writer} may not write {before} -> {after}"):
                orca.rows(update, to=after, run=run)


@pytest.mark.parametrize("state", [state for state in STATES if state != "queued"])
def test_a_run_begins_as_queued(orca: Orca, state: str) -> None:
    orca.pipeline()
    with pytest.raises(psycopg.errors.CheckViolation, match="begins as queued"):
        orca.rows("insert into orca.runs (pipeline, state) values ('work', %(s)s)", s=state)


def test_nobody_is_left_as_the_writer_after_move_run(orca: Orca) -> None:
    orca.pipeline()
    run = orca.run()
    with orca.session() as session:
        session.execute("select orca.move_run(%s, 0, 'queued', 'running', 'worker', 'w', null)", (run,))
        # A worker may not cancel; the scheduler, who is nobody in particular, may.
        session.execute("update orca.runs set state = 'canceled' where id = %s", (run,))
    assert orca.state(run)[0] == "canceled"


@pytest.mark.parametrize(
    ("change", "value"), [("start", 5), ("from", "running"), ("worker", "another")], ids=["start", "state", "worker"]
)
def test_move_run_is_compare_and_set(orca: Orca, change: str, value: object) -> None:
    orca.pipeline()
    run = orca.run()
    if change != "from":
        put(orca, run, "running", "mine")
    values: dict[str, object] = {"run": run, "start": 0, "from": "running", "to": "failed", "writer": "orca-infra"}
    before = orca.state(run)
    assert orca.rows(MOVE, **{**values, "worker": "mine", change: value}) == [(False,)]
    assert orca.state(run) == before


def test_what_a_transition_writes_beside_the_state(orca: Orca) -> None:
    orca.pipeline()
    run = orca.run(age=100)
    look = (
        "select start, worker, started_at is null, ended_at is null, reason, now() - queued_at > '90s' from orca.runs"
    )

    def move(**values: object) -> object:
        return orca.rows(MOVE, run=run, **values)[0][0] and orca.rows(look)[0]

    assert move(start=0, to="running", writer="worker", worker="w", **{"from": "queued"}) == (
        *(1, "w", False, True, "why", True),
    )
    assert move(start=1, to="queued", writer="orca-infra", worker="w", **{"from": "running"}) == (
        *(1, None, True, True, "why", True),
    )
    assert move(start=1, to="running", writer="worker", worker="v", **{"from": "queued"}) == (
        *(2, "v", False, True, "why", True),
    )
    assert move(start=2, to="succeeded", writer="worker", worker="v", **{"from": "running"}) == (
        *(2, "v", False, False, "why", True),
    )


# Tokens.

CALLS = {
    "hello": "select orca.worker_hello(%(n)s, %(t)s, 1)",
    "take": "select orca.worker_take(%(n)s, %(t)s)",
    "end": "select orca.worker_end(%(n)s, %(t)s, %(run)s, 1, 'succeeded', null)",
}
NOT_VALID = psycopg.errors.InvalidAuthorizationSpecification


@pytest.mark.parametrize("call", CALLS)
def test_a_worker_function_takes_its_own_machines_token_and_no_other(orca: Orca, call: str) -> None:
    orca.pipeline()
    run = orca.run()
    token = orca.machine("orca-p-1")
    other = orca.machine("orca-p-2")
    for wrong in (other, token.upper(), token[:-1], "", "x", None):
        with pytest.raises(NOT_VALID, match="not valid, or was revoked"):
            orca.rows(CALLS[call], n="orca-p-1", t=wrong, run=run)
    with pytest.raises(NOT_VALID):
        orca.rows(CALLS[call], n="orca-p-9", t=token, run=run)
    assert orca.state(run)[0] == "queued"
    orca.rows(CALLS[call], n="orca-p-1", t=token, run=run)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("how", ["revoked", "ended"])
def test_the_token_of_a_machine_that_is_revoked_or_ended_is_worth_nothing(orca: Orca, call: str, how: str) -> None:
    orca.pipeline()
    run = orca.run()
    token = orca.machine()
    assert orca.revoke("orca-p-1")
    if how == "ended":
        orca.rows("update orca.pool_machines set ended_at = now(), reason = 'Idle'")
    with pytest.raises(NOT_VALID):
        orca.rows(CALLS[call], n="orca-p-1", t=token, run=run)
    assert orca.state(run)[0] == "queued"


def test_no_token_and_no_key_is_stored_anywhere(orca: Orca) -> None:
    token = orca.machine()
    orca.pipeline()
    orca.run()
    orca.take("orca-p-1", token)
    tables = orca.rows("select table_name from information_schema.tables where table_schema = 'orca'")
    stored = "".join(str(orca.rows(f"select t::text from orca.{table} t")) for (table,) in tables)
    assert "orca-p-1" in stored
    assert token not in stored
    assert KEY.decode() not in stored


def test_a_worker_that_says_hello_again_keeps_its_first_sight(orca: Orca) -> None:
    token = orca.machine()
    orca.rows("update orca.workers set first_seen_at = now() - interval '1h', seen_at = now() - interval '1h'")
    orca.rows("select orca.worker_hello('orca-p-1', %(t)s, 3)", t=token)
    look = "select slots, pool, now() - first_seen_at > '59m', now() - seen_at < '1m' from orca.workers"
    assert orca.rows(look) == [(3, "p", True, True)]


# Taking.


def test_runs_are_taken_oldest_first_and_of_its_own_pool_only(orca: Orca) -> None:
    token = orca.machine(slots=9)
    orca.pipeline("work")
    orca.pipeline("other", "worker:other")
    orca.pipeline("cluster", None)
    young, old, oldest = orca.run(age=1), orca.run(age=50), orca.run(age=99)
    same = [orca.run(age=1_000_000) for _ in range(1)]
    for name in ("other", "cluster"):
        orca.run(name, age=5_000_000)
    taken = [orca.take("orca-p-1", token) for _ in range(5)]
    assert taken == [(run, 1, "work") for run in (*same, oldest, old, young)] + [None]
    assert orca.state(young) == ("running", 1, "orca-p-1")


def test_runs_queued_at_the_same_time_are_taken_by_their_number(orca: Orca) -> None:
    token = orca.machine(slots=9)
    orca.pipeline()
    orca.rows(
        "insert into orca.runs (id, pipeline, queued_at) values (9, 'work', now()), (3, 'work', now()), (5, 'work', now())"
    )
    orca.rows("update orca.runs set queued_at = '2026-01-01'")
    assert [orca.take("orca-p-1", token) for _ in range(3)] == [(n, 1, "work") for n in (3, 5, 9)]


def test_no_run_of_a_paused_pipeline_is_taken(orca: Orca) -> None:
    token = orca.machine()
    orca.pipeline(paused=True)
    run = orca.run()
    assert orca.take("orca-p-1", token) is None
    orca.rows("update orca.pipelines set paused = false")
    assert orca.take("orca-p-1", token) == (run, 1, "work")


def test_no_more_than_slots_run_at_once_on_a_worker(orca: Orca) -> None:
    token = orca.machine(slots=2)
    orca.pipeline()
    runs = [orca.run() for _ in range(3)]
    assert [orca.take("orca-p-1", token) is not None for _ in range(3)] == [True, True, False]
    assert orca.end("orca-p-1", token, runs[0], 1)
    assert orca.take("orca-p-1", token) == (runs[2], 1, "work")


def test_a_worker_that_has_not_said_hello_takes_nothing(orca: Orca) -> None:
    token = orca.machine(slots=None)
    orca.pipeline()
    orca.run()
    assert orca.take("orca-p-1", token) is None


def test_fill_runs_neither_count_against_max_runs_nor_are_held_by_it(orca: Orca) -> None:
    token = orca.machine(slots=9)
    orca.pipeline(max_runs=1)
    plain, held = orca.run(age=90), orca.run(age=80)
    fills = [orca.run(fill=True, age=age) for age in (95, 70, 60)]
    taken = [orca.take("orca-p-1", token) for _ in range(5)]
    assert [one and one[0] for one in taken] == [fills[0], plain, fills[1], fills[2], None]
    assert orca.end("orca-p-1", token, plain, 1)
    assert orca.take("orca-p-1", token) == (held, 1, "work")


def test_one_pipelines_max_runs_holds_up_no_other(orca: Orca) -> None:
    token = orca.machine(slots=9)
    orca.pipeline("first", max_runs=0)
    orca.pipeline("second")
    orca.run("first", age=99)
    run = orca.run("second")
    assert orca.take("orca-p-1", token) == (run, 1, "second")


def test_workers_at_once_never_take_one_run_nor_pass_max_runs_or_slots(orca: Orca) -> None:
    orca.pipeline("limited", max_runs=3)
    orca.pipeline("free")
    for _ in range(20):
        orca.run("limited")
        orca.run("limited", fill=True)
        orca.run("free")
    names = [f"orca-p-{number}" for number in range(1, 9)]
    tokens = {name: orca.machine(name, slots=4) for name in names}
    failures: list[str] = []
    counts = (
        "select count(*) filter (where pipeline = 'limited' and not fill), count(*), count(distinct worker), "
        "(select max(n) from (select count(*) n from orca.runs where state = 'running' group by worker) s) "
        "from orca.runs where state = 'running'"
    )

    def work(name: str) -> list[tuple[int, int]]:
        taken = []
        with psycopg.connect(orca.url, autocommit=True) as connection:
            mine = Orca(orca.url, connection)
            for _ in range(12):
                run = mine.take(name, tokens[name])
                if run is not None:
                    taken.append(run[:2])
                limited, _, _, most = mine.rows(counts)[0]
                if limited > 3 or (most or 0) > 4:
                    failures.append(f"{limited} of 3 plain runs, {most} of 4 slots")
                if run is not None and len(taken) % 2:
                    assert mine.end(name, tokens[name], *run[:2])
        return taken

    taken = [one for worker in in_threads([lambda name=name: work(name) for name in names]) for one in worker]  # type: ignore[misc]
    assert not failures
    assert len(taken) == len(set(taken)) >= 40
    assert {start for _, start in taken} == {1}


def test_two_workers_that_take_at_the_same_time_wait_for_each_other(orca: Orca) -> None:
    one, two = orca.machine("orca-p-1"), orca.machine("orca-p-2")
    orca.pipeline(max_runs=1)
    first, _ = orca.run(age=9), orca.run(age=8)
    take = "select run_id from orca.worker_take(%(n)s, %(t)s)"
    with orca.session() as here, orca.session() as there:
        assert here.execute(take, {"n": "orca-p-1", "t": one}).fetchall() == [(first,)]
        waiting = orca.blocked(there, take, n="orca-p-2", t=two)
        here.commit()
        assert waiting.result() == [], "max_runs is 1, and the first worker has it"


def test_a_run_that_somebody_cancels_at_that_moment_is_passed_over(orca: Orca) -> None:
    token = orca.machine()
    orca.pipeline()
    first, second = orca.run(age=9), orca.run(age=8)
    with orca.session() as person:
        person.execute("update orca.runs set state = 'canceled' where id = %s", (first,))
        assert orca.take("orca-p-1", token) == (second, 1, "work")


# Ending.


def test_an_end_counts_once_and_only_for_the_start_and_the_worker_that_has_the_run(orca: Orca) -> None:
    mine, other = orca.machine("orca-p-1"), orca.machine("orca-p-2")
    orca.pipeline()
    run = orca.run()
    orca.take("orca-p-1", mine)
    assert not orca.end("orca-p-2", other, run, 1)
    assert not orca.end("orca-p-1", mine, run, 0)
    assert not orca.end("orca-p-1", mine, run, 2)
    assert orca.end("orca-p-1", mine, run, 1, "failed")
    assert not orca.end("orca-p-1", mine, run, 1)
    assert orca.state(run) == ("failed", 1, "orca-p-1")


def test_the_end_of_a_run_that_was_canceled_changes_nothing(orca: Orca) -> None:
    token = orca.machine()
    orca.pipeline()
    run = orca.run()
    orca.take("orca-p-1", token)
    orca.rows("update orca.runs set state = 'canceled'")
    assert not orca.end("orca-p-1", token, run, 1)
    assert orca.state(run)[0] == "canceled"


@pytest.mark.parametrize("state", ["queued", "canceled", "running", "nonsense"])
def test_a_worker_may_end_a_run_as_succeeded_or_failed_only(orca: Orca, state: str) -> None:
    token = orca.machine()
    orca.pipeline()
    run = orca.run()
    orca.take("orca-p-1", token)
    with pytest.raises(psycopg.errors.CheckViolation):
        orca.end("orca-p-1", token, run, 1, state)
    assert orca.state(run) == ("running", 1, "orca-p-1")


# Revoking.

TAKE = "select run_id from orca.worker_take('orca-p-1', %(t)s)"
REVOKE = "select orca.revoke_machine('orca-p-1', 'Idle', true)"


def test_a_revoked_machines_runs_are_queued_again_and_fail_past_max_starts(orca: Orca) -> None:
    token = orca.machine(slots=9)
    orca.pipeline("twice", max_starts=2)
    orca.pipeline("for-ever")
    runs = [orca.run("twice"), orca.run("for-ever"), orca.run("twice")]
    orca.rows("update orca.runs set start = 1 where id = %(r)s", r=runs[2])
    ended = orca.run("twice", age=500)
    assert orca.take("orca-p-1", token) == (ended, 1, "twice")
    assert orca.end("orca-p-1", token, ended, 1)
    for _ in runs:
        assert orca.take("orca-p-1", token)
    assert orca.revoke("orca-p-1", "Lost")
    assert [orca.state(run) for run in (*runs, ended)] == [
        ("queued", 1, None),
        ("queued", 1, None),
        ("failed", 2, "orca-p-1"),
        ("succeeded", 1, "orca-p-1"),
    ]
    assert orca.rows("select distinct reason from orca.runs where id = any(%(r)s)", r=runs) == [("Lost",)]


def test_nothing_of_another_machine_is_touched(orca: Orca) -> None:
    orca.machine("orca-p-1")
    token = orca.machine("orca-p-2")
    orca.pipeline()
    run = orca.run()
    orca.take("orca-p-2", token)
    assert orca.revoke("orca-p-1", "Lost")
    assert orca.state(run) == ("running", 1, "orca-p-2")
    assert orca.end("orca-p-2", token, run, 1)


def test_revoking_again_keeps_the_first_reason_and_time(orca: Orca) -> None:
    orca.machine()
    assert orca.revoke("orca-p-1", "Idle")
    first = orca.rows("select revoked_at, removal_reason from orca.pool_machines")
    assert orca.revoke("orca-p-1", "Lost")
    assert orca.rows("select revoked_at, removal_reason from orca.pool_machines") == first
    assert not orca.revoke("orca-p-9")


def test_a_machine_that_worked_since_it_was_looked_at_keeps_its_token(orca: Orca) -> None:
    token = orca.machine()
    orca.pipeline()
    revoke = "select orca.revoke_machine('orca-p-1', 'Idle', true, %(since)s)"
    looked_at = orca.value("select now()")
    run = orca.run()
    orca.take("orca-p-1", token)
    assert orca.end("orca-p-1", token, run, 1)
    assert not orca.value(revoke, since=looked_at)
    assert orca.take("orca-p-1", token) is None, "its token is good still, and nothing waits"
    assert orca.value(revoke, since=orca.value("select now()"))


@pytest.mark.parametrize("ahead", ["now() + interval '1 hour'", "timestamptz 'infinity'"])
def test_a_run_that_ended_while_the_clock_was_ahead_keeps_no_machine(orca: Orca, ahead: str) -> None:
    token = orca.machine()
    orca.pipeline()
    run = orca.run()
    orca.take("orca-p-1", token)
    assert orca.end("orca-p-1", token, run, 1)
    orca.value(f"update orca.runs set ended_at = {ahead} returning true")
    assert orca.value("select orca.revoke_machine('orca-p-1', 'Idle', true, now())")


def test_with_only_idle_a_machine_that_works_keeps_its_token(orca: Orca) -> None:
    token = orca.machine()
    orca.pipeline()
    run = orca.run()
    orca.take("orca-p-1", token)
    assert not orca.revoke("orca-p-1", only_idle=True)
    assert orca.end("orca-p-1", token, run, 1), "its token is good still"
    assert orca.revoke("orca-p-1", only_idle=True)


def test_a_run_that_lands_before_the_removal_makes_it_give_up(orca: Orca) -> None:
    token = orca.machine()
    orca.pipeline()
    run = orca.run()
    with orca.session() as worker, orca.session() as loop:
        assert worker.execute(TAKE, {"t": token}).fetchall() == [(run,)]
        waiting = orca.blocked(loop, REVOKE)
        worker.commit()
        assert waiting.result() == [(False,)]
    assert orca.state(run) == ("running", 1, "orca-p-1")
    assert orca.rows("select revoked_at from orca.pool_machines") == [(None,)]


def test_a_take_after_the_removal_began_takes_nothing(orca: Orca) -> None:
    token = orca.machine()
    orca.pipeline()
    run = orca.run()
    with orca.session() as worker, orca.session() as loop:
        assert loop.execute(REVOKE).fetchall() == [(True,)]
        waiting = orca.blocked(worker, TAKE, t=token)
        loop.commit()
        assert isinstance(waiting.result(), NOT_VALID)
    assert orca.state(run) == ("queued", 0, None)


def test_a_take_that_is_rolled_back_lets_the_removal_go_on(orca: Orca) -> None:
    token = orca.machine()
    orca.pipeline()
    run = orca.run()
    with orca.session() as worker, orca.session() as loop:
        worker.execute(TAKE, {"t": token})
        waiting = orca.blocked(loop, REVOKE)
        worker.rollback()
        assert waiting.result() == [(True,)]
        loop.commit()
    assert orca.state(run) == ("queued", 0, None)


def test_an_end_and_a_revocation_at_once_end_the_run_once(orca: Orca) -> None:
    token = orca.machine()
    orca.pipeline()
    run = orca.run()
    orca.take("orca-p-1", token)
    end = "select orca.worker_end('orca-p-1', %(t)s, %(r)s, 1, 'succeeded', null)"
    with orca.session() as worker, orca.session() as loop:
        assert worker.execute(end, {"t": token, "r": run}).fetchall() == [(True,)]
        waiting = orca.blocked(loop, "select orca.revoke_machine('orca-p-1', 'Lost', false)")
        worker.commit()
        assert waiting.result() == [(True,)]
        loop.commit()
    assert orca.state(run) == ("succeeded", 1, "orca-p-1")


def test_two_machines_revoked_while_both_take_do_not_deadlock(orca: Orca) -> None:
    names = [f"orca-p-{number}" for number in range(1, 5)]
    tokens = {name: orca.machine(name, slots=5) for name in names}
    orca.pipeline()
    for _ in range(20):
        orca.run()

    def work(name: str) -> str:
        with psycopg.connect(orca.url, autocommit=True) as connection:
            mine = Orca(orca.url, connection)
            try:
                while mine.take(name, tokens[name]):
                    pass
            except NOT_VALID:
                return "revoked"
            return "no more"

    def revoke(name: str) -> str:
        with psycopg.connect(orca.url, autocommit=True) as connection:
            return str(Orca(orca.url, connection).revoke(name, "Lost"))

    calls = [lambda name=name: work(name) for name in names] + [lambda name=name: revoke(name) for name in names]
    assert in_threads(calls)[4:] == ["True"] * 4
    assert orca.value("select count(*) from orca.runs where state = 'running'") == 0
