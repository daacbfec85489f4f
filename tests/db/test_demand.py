"""The demand query against what system.md says, in plain Python."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orca_infra.machines.observe import SQL

pytestmark = pytest.mark.postgres
GROW_AFTER = 20.0


@dataclass(frozen=True)
class Run:
    pipeline: int
    state: str
    fill: bool
    age: int


@dataclass(frozen=True)
class Pipeline:
    placement: str | None
    paused: bool
    max_runs: int | None


PIPELINES = st.builds(
    Pipeline,
    placement=st.sampled_from(["worker:p", "worker:p", "worker:q", "worker:a.b", None, "cluster"]),
    paused=st.sampled_from([False, False, True]),
    max_runs=st.none() | st.integers(0, 4),
)
RUNS = st.builds(
    Run,
    pipeline=st.integers(0, 3),
    state=st.sampled_from(["queued", "queued", "queued", "running", "succeeded", "failed", "canceled"]),
    fill=st.sampled_from([False, False, True]),
    age=st.sampled_from([0, 1, 5, 19, 20, 21, 60, 3600]),
)


def expected(pipelines: list[Pipeline], runs: list[Run]) -> dict[str, tuple[int, int, float | None]]:
    """By pool: the runs that are due, those that wait, and in how many seconds the next one comes due.

    A worker could start, of each pipeline that is not paused, as many queued runs as max_runs leaves free, and every fill
    run. Which of the queued ones is free to choose: the oldest first.
    """
    pools: dict[str, tuple[int, int, list[float]]] = {}
    for number, pipeline in enumerate(pipelines):
        if pipeline.paused or pipeline.placement is None or not pipeline.placement.startswith("worker:"):
            continue
        mine = [run for run in runs if run.pipeline == number]
        queued = sorted((run for run in mine if run.state == "queued" and not run.fill), key=lambda run: -run.age)
        running = sum(run.state == "running" and not run.fill for run in mine)
        free = len(queued) if pipeline.max_runs is None else max(0, pipeline.max_runs - running)
        startable = queued[:free] + [run for run in mine if run.state == "queued" and run.fill]
        if not any(run.state == "queued" for run in mine):
            continue
        aged, waiting, due = pools.get(pipeline.placement.removeprefix("worker:"), (0, 0, []))
        young = [run for run in startable if run.age < GROW_AFTER]
        pools[pipeline.placement.removeprefix("worker:")] = (
            aged + len(startable) - len(young),
            waiting + len(startable),
            due + [GROW_AFTER - run.age for run in young],
        )
    return {pool: (aged, waiting, min(due, default=None)) for pool, (aged, waiting, due) in pools.items()}


@pytest.fixture(scope="module")
def connection(postgres_server: Any) -> Iterator[psycopg.Connection[Any]]:
    """One database for all examples: each is rolled back."""
    url = postgres_server.new_database("orca_migrated")
    with psycopg.connect(url) as connection:
        yield connection
    postgres_server.drop(url)


def found(
    connection: psycopg.Connection[Any], pipelines: list[Pipeline], runs: list[Run]
) -> dict[str, tuple[int, int, float | None]]:
    with connection.transaction(force_rollback=True):
        connection.execute("alter table orca.runs disable trigger guard_run")
        cursor = connection.cursor()
        cursor.executemany(
            "insert into orca.pipelines (name, placement, paused, max_runs) values (%s, %s, %s, %s)",
            [(f"n{n}", p.placement, p.paused, p.max_runs) for n, p in enumerate(pipelines)],
        )
        cursor.executemany(
            "insert into orca.runs (pipeline, state, fill, queued_at) "
            "values (%s, %s, %s, now() - make_interval(secs => %s))",
            [(f"n{run.pipeline}", run.state, run.fill, run.age) for run in runs],
        )
        rows = connection.execute(SQL["demand"], {"grow_after": GROW_AFTER}).fetchall()
        now = connection.execute(SQL["now"]).fetchall()[0][0]
    return {pool: (aged, waiting, due and (due - now).total_seconds()) for pool, aged, waiting, due in rows}


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pipelines=st.lists(PIPELINES, min_size=4, max_size=4), runs=st.lists(RUNS, max_size=14))
def test_the_query_finds_what_a_plain_reading_of_the_rules_finds(
    connection: psycopg.Connection[Any], pipelines: list[Pipeline], runs: list[Run]
) -> None:
    assert found(connection, pipelines, runs) == expected(pipelines, runs)


def test_max_runs_holds_back_plain_runs_and_no_fill_runs(connection: psycopg.Connection[Any]) -> None:
    pipelines = [Pipeline("worker:p", paused=False, max_runs=2)]
    runs = [Run(0, "running", fill=False, age=99), Run(0, "running", fill=True, age=99)]
    runs += [Run(0, "queued", fill=False, age=50)] * 3 + [Run(0, "queued", fill=True, age=50)] * 2
    assert found(connection, pipelines, runs) == {"p": (3, 3, None)}


def test_the_next_due_is_that_of_a_run_that_could_start(connection: psycopg.Connection[Any]) -> None:
    # The plain run of 19 s is held by max_runs; only the fill run, 15 s from now, can ask for a machine.
    pipelines = [Pipeline("worker:p", paused=False, max_runs=0)]
    runs = [Run(0, "queued", fill=False, age=19), Run(0, "queued", fill=True, age=5)]
    assert found(connection, pipelines, runs) == {"p": (0, 1, 15.0)}


def test_no_next_due_when_nothing_young_waits(connection: psycopg.Connection[Any]) -> None:
    assert found(connection, [Pipeline("worker:p", paused=False, max_runs=None)], []) == {}
    aged = [Run(0, "queued", fill=False, age=20)]
    assert found(connection, [Pipeline("worker:p", paused=False, max_runs=None)], aged) == {"p": (1, 1, None)}
