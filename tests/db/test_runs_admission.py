"""Which queued runs are looked at, and starts whose run or pipeline somebody deleted: on a real Postgres."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from orca_infra.attention import note
from orca_infra.db.connection import Database
from orca_infra.log import make_log
from orca_infra.runs.apply import apply
from orca_infra.runs.decide import decide
from orca_infra.runs.limits import run_limits
from orca_infra.runs.model import RunLimits, RunPlan
from orca_infra.runs.observe import SQL, read_rows
from orca_infra.runs.status import read_queued
from orca_infra.settings import Settings, read_settings

SETTINGS = read_settings({"ORCA_RUNNER": "kubernetes", "ORCA_VCPU_BUDGET": "50", "ORCA_HOME": "/nonexistent"})
LIMITS = replace(run_limits(SETTINGS), admit_max=10)


def run(database: Database, statement: Any, **parameters: Any) -> None:
    with database.transaction() as transaction:
        transaction.run(statement, parameters)


def queue(database: Database, pipeline: str, runs: int = 1, **columns: Any) -> None:
    values = {
        "p": pipeline,
        "n": runs,
        "workers": 0,
        "max_runs": None,
        "image": "registry.example/i",
        "paused": False,
        **columns,
    }
    run(
        database,
        "insert into orca.pipelines (name, image, workers, max_runs, paused)"
        " values (%(p)s, %(image)s, %(workers)s, %(max_runs)s, %(paused)s) on conflict do nothing",
        **values,
    )
    run(database, "insert into orca.runs (pipeline) select %(p)s from generate_series(1, %(n)s)", **values)


def decided(database: Database, limits: RunLimits = LIMITS) -> RunPlan:
    with database.snapshot() as transaction:
        return decide(read_rows(transaction, limits), limits)


HELD = pytest.mark.parametrize(
    ("held", "why"),
    [
        ({"max_runs": 0}, "max_runs (0)"),
        ({"workers": 50}, "the whole budget of 50000m"),
        ({"workers": 1001}, "more than a run can have"),
        ({"image": "evil.example/i"}, "(image-registries) do not allow its image"),
        ({"paused": True}, "is paused"),
        ({"image": None}, "has no image"),
    ],
)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "policies.json").write_text('{"image-registries": {"registries": ["registry.example"]}}')
    policies = {"ORCA_POLICY_CONFIG": str(tmp_path / "policies.json")}
    return read_settings(
        {"ORCA_RUNNER": "kubernetes", "ORCA_VCPU_BUDGET": "50", "ORCA_HOME": "/nonexistent", **policies}
    )


@HELD
def test_however_many_runs_are_held_they_hide_no_other_and_each_says_why(
    database: Database, settings: Settings, held: dict[str, Any], why: str
) -> None:
    queue(database, "held", 1500, **held)
    queue(database, "free", 3)
    assert [r.pipeline for r in decided(database, run_limits(settings)).admit] == ["free"] * 3
    with database.snapshot() as transaction:
        last = transaction.value("select max(id) from orca.runs where pipeline = 'held'")
        waiting = {row["run"]: row for row in read_queued(transaction, settings, asked=last)}
    assert why in next(row["waiting"] for row in waiting.values() if row["pipeline"] == "held")
    assert why in waiting[last]["waiting"]


@HELD
def test_however_many_pipelines_are_held_they_hide_no_other(
    database: Database, settings: Settings, held: dict[str, Any], why: str
) -> None:
    values = {"image": "registry.example/i", "workers": 0, "max_runs": None, "paused": False, **held}
    run(
        database,
        "insert into orca.pipelines (name, image, workers, max_runs, paused)"
        " select 'held-' || n, %(image)s, %(workers)s, %(max_runs)s, %(paused)s from generate_series(1, 1100) n",
        **values,
    )
    run(database, "insert into orca.runs (pipeline) select name from orca.pipelines")
    queue(database, "free", 3)
    assert [r.pipeline for r in decided(database, run_limits(settings)).admit] == ["free"] * 3


def test_however_many_runs_still_have_an_earlier_start_they_hide_no_other(
    database: Database, settings: Settings
) -> None:
    queue(database, "taken-back", 1100)
    run(
        database,
        "insert into orca.run_clusters (run, start, pipeline, cpu_millis, fill) select id, 0, pipeline, 0, false from orca.runs",
    )
    queue(database, "free", 3)
    plan = decided(database, run_limits(settings))
    assert [r.pipeline for r in plan.admit] == ["free"] * 3
    assert set(plan.waiting.values()) == {"its start 0 is still going away"}


def test_while_everything_is_paused_each_run_says_so(database: Database, settings: Settings) -> None:
    queue(database, "p", 2)
    run(database, "insert into orca.pool_pauses (pool) values ('*')")
    assert decided(database).admit == ()
    with database.snapshot() as transaction:
        waiting = [row["waiting"] for row in read_queued(transaction, settings)]
    assert waiting == ["everything is paused: no run is started until `orca-infra resume`"] * 2


def test_while_passes_are_given_up_what_nothing_else_holds_says_why(database: Database, settings: Settings) -> None:
    queue(database, "free")
    queue(database, "held", max_runs=0)
    with database.snapshot() as transaction:
        before = {row["pipeline"]: row["waiting"] for row in read_queued(transaction, settings)}
    note(database, "pass machines", "that of the machines")
    note(database, "pass runs", "the namespace is missing")
    with database.snapshot() as transaction:
        after = {row["pipeline"]: row["waiting"] for row in read_queued(transaction, settings)}
    assert before["free"] == "nothing holds it: the next pass starts it"
    assert after == {**before, "free": "the namespace is missing"}


def test_a_run_whose_driver_says_how_it_ended_as_its_start_ends_is_not_said_to_be_queued_again(
    database: Database,
) -> None:
    queue(database, "p", 2)
    with database.transaction() as transaction:
        for one in (1, 2):
            assert transaction.value(SQL["admit"], {"run": one, "start": 0})
            key = {"run": one, "start": 1}
            transaction.run(SQL["record_cluster"], {**key, "pipeline": "p", "cpu_millis": 500, "fill": False})
            transaction.run(SQL["begin_ending"], {**key, "reason": "NeverStarted", "detail": "its head is Pending"})
    plan = decided(database)
    assert [finish.to_state for finish in plan.finishes] == ["queued", "queued"]
    with database.transaction() as transaction:
        transaction.run("select set_config('orca.writer', 'driver', true)")
        transaction.run("update orca.runs set state = 'succeeded', ended_at = now() where id = 1")
    written = io.StringIO()
    hands = MagicMock(database=database, log=make_log(written, form="json"))
    hands.cohorts.up.return_value = hands.cohorts.drop_empty.return_value = 0
    assert apply(replace(plan, admit=()), hands) == 2
    said = {line["run"]: line["run_is_now"] for line in map(json.loads, written.getvalue().splitlines())}
    assert said == {1: "as it was", 2: "queued"}
    with database.snapshot() as transaction:
        states = transaction.dicts("select id, state from orca.runs order by id")
    assert states == [{"id": 1, "state": "succeeded"}, {"id": 2, "state": "queued"}]


def test_of_what_max_runs_lets_through_all_is_admitted(database: Database) -> None:
    queue(database, "some", 20, max_runs=7)
    plan = decided(database)
    assert len(plan.admit) == 7
    assert list(plan.waiting.values()) == ["its pipeline runs max_runs (7) already"]


def test_two_loops_never_start_one_run_twice(database: Database) -> None:
    queue(database, "p")
    [queued] = decided(database).admit
    key = {"run": queued.run, "start": queued.start}
    with database.transaction() as one:
        assert one.value(SQL["admit"], key)
    with database.transaction() as other:
        assert not other.value(SQL["admit"], key)


def test_a_run_that_the_scheduler_took_back_is_not_started_beside_its_earlier_start(database: Database) -> None:
    queue(database, "p")
    [queued] = decided(database).admit
    with database.transaction() as transaction:
        assert transaction.value(SQL["admit"], {"run": queued.run, "start": 0})
        transaction.run(
            SQL["record_cluster"], {"run": queued.run, "start": 1, "pipeline": "p", "cpu_millis": 500, "fill": False}
        )
    run(database, "update orca.runs set state = 'queued'")
    plan = decided(database)
    assert plan.admit == ()
    assert plan.waiting == {queued.run: "its start 1 is still going away"}
    with database.transaction() as transaction:
        assert not transaction.value(SQL["admit"], {"run": queued.run, "start": 1})
        transaction.run(SQL["end_cluster"], {"run": queued.run, "start": 1, "reason": "Ended"})
        assert transaction.value(SQL["admit"], {"run": queued.run, "start": 1})


def test_a_start_whose_run_was_deleted_is_swept(database: Database) -> None:
    queue(database, "p")
    [queued] = decided(database).admit
    key = {"run": queued.run, "start": queued.start}
    with database.transaction() as transaction:
        transaction.value(SQL["admit"], key)
        transaction.run(
            SQL["record_cluster"], {"run": queued.run, "start": 1, "pipeline": "p", "cpu_millis": 2**40, "fill": False}
        )
    run(database, "delete from orca.runs")
    run(database, "delete from orca.pipelines")
    [ending] = decided(database).endings
    assert (ending.reason, ending.detail) == ("Ended", "the run is deleted at start 0")
