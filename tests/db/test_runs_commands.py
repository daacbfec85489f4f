"""`orca-infra runs list | show | logs | remove`, as people and programs call them, on a real Postgres."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from orca_infra.db.connection import Database
from orca_infra.errors import UserError
from orca_infra.runs.decide import decide
from orca_infra.runs.limits import run_limits
from orca_infra.runs.observe import SQL, read_rows
from orca_infra.settings import read_settings

Run = Callable[..., str]


@pytest.fixture
def run(command: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """What `orca-infra runs ...` prints."""
    monkeypatch.setenv("ORCA_RUNNER", "kubernetes")
    return partial(command, "runs")


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    return tmp_path / "home" / "logs"


def queue(database: Database, pipeline: str, runs: int = 1, max_runs: int | None = None) -> None:
    parameters = {"p": pipeline, "n": runs, "m": max_runs}
    with database.transaction() as transaction:
        transaction.run("insert into orca.pipelines (name, image, max_runs) values (%(p)s, 'i', %(m)s)", parameters)
        transaction.run("insert into orca.runs (pipeline) select %(p)s from generate_series(1, %(n)s)", parameters)


def start(database: Database, number: int) -> None:
    """As a pass admits it; its Job was made."""
    key = {"run": number, "start": 1}
    with database.transaction() as transaction:
        assert transaction.value(SQL["admit"], {"run": number, "start": 0})
        transaction.run(SQL["record_cluster"], {**key, "pipeline": "p", "cpu_millis": 500, "fill": False})
        name = f"orca-{number}-1"
        item = {**key, "namespace": "orca-runs", "kind": "Job", "name": name, "position": 0, "rendered": "{}"}
        transaction.run(SQL["record_object"], item)
        transaction.run("update orca.kube_objects set uid = 'uid-of-the-job', confirmed_at = now()")


def end(database: Database, number: int) -> None:
    with database.transaction() as transaction:
        transaction.run("select set_config('orca.writer', 'driver', true)")
        transaction.run("update orca.runs set state = 'succeeded', ended_at = now() where id = %(r)s", {"r": number})
        transaction.run(SQL["end_cluster"], {"run": number, "start": 1, "reason": "Ended"})


def test_list_shows_what_lives_what_is_queued_and_why_and_what_ended(database: Database, run: Run) -> None:
    assert run("list") == "no run clusters live\n"
    queue(database, "p", 2)
    queue(database, "held", 5, max_runs=0)
    start(database, 1)
    text = run("list")
    assert "1/1" in text
    assert "its pipeline runs max_runs (0) already" in text
    assert text.endswith(
        "6 runs are queued; of many that one thing holds, the oldest of each pipeline stands for all\n"
    )
    end(database, 1)
    found = json.loads(run("list", "--json"))
    assert found["live"] == []
    assert [(row["run"], row["waiting"]) for row in found["queued"]] == [
        (2, "nothing holds it: the next pass starts it"),
        (3, "its pipeline runs max_runs (0) already"),
    ]
    assert found["queued_runs"] == 6
    assert [(row["run"], row["reason"]) for row in found["ended"]] == [(1, "Ended")]


def test_show_says_of_any_queued_run_what_it_waits_for_and_of_a_start_what_it_has(database: Database, run: Run) -> None:
    queue(database, "p", 1)
    queue(database, "held", 5, max_runs=0)
    assert run("show", "6").splitlines()[:2] == [
        "run 6 of held: queued, never started",
        "waits for: its pipeline runs max_runs (0) already",
    ]
    start(database, 1)
    text = run("show", "1")
    assert text.startswith("run 1 of p: running, started once\n")
    assert "uid-of-the-job" in text
    found = json.loads(run("show", "1", "--json"))
    assert found["run"]["state"] == "running"
    assert [item["name"] for item in found["objects"]] == ["orca-1-1"]


def test_a_run_that_is_not_there_is_one_sentence(run: Run) -> None:
    for command in (["show", "7"], ["logs", "7"], ["remove", "7", "--yes"]):
        with pytest.raises(UserError, match="there is no run 7; `orca-infra runs list` shows"):
            run(*command)


def test_logs_prints_all_starts_and_what_is_being_heard_each_once(database: Database, run: Run, logs: Path) -> None:
    queue(database, "p", 1)
    with pytest.raises(UserError, match="nothing was heard of run 1 yet"):
        run("logs", "1")
    (logs / "1").mkdir(parents=True)
    (logs / "1" / "driver.log").write_text("--- run 1 start 1, Pod a, uid u1\none\n")
    (logs / "1" / ".driver-2-u2.part").write_text("--- run 1 start 2, Pod b, uid u2\ntwo\n")
    assert run("logs", "1") == "--- run 1 start 1, Pod a, uid u1\none\n--- run 1 start 2, Pod b, uid u2\ntwo\n"


def test_logs_f_goes_on_until_the_run_has_ended(database: Database, run: Run, logs: Path) -> None:
    queue(database, "p", 1)
    start(database, 1)
    (logs / "1").mkdir(parents=True)
    log = logs / "1" / "driver.log"

    def drive() -> None:
        log.write_text("--- run 1 start 1, Pod a, uid u1\none\n")
        end(database, 1)

    driver = threading.Timer(0.5, drive)
    driver.start()
    assert run("logs", "1", "-f") == "--- run 1 start 1, Pod a, uid u1\none\n"
    driver.join()


def test_remove_asks_and_has_the_start_end_and_its_run_queued_again(database: Database, run: Run) -> None:
    queue(database, "p", 2)
    with pytest.raises(UserError, match="run 1 has no run cluster now"):
        run("remove", "1", "--yes")
    start(database, 1)
    run("remove", "1", answer="n\n", code=1)
    assert ending(database) is None
    assert "run 1 start 1 ends" in run("remove", "1", "--yes")
    assert ending(database) == "Removed"
    limits = run_limits(read_settings({"ORCA_HOME": "/nonexistent"}))
    with database.snapshot() as transaction:
        [finish] = decide(read_rows(transaction, limits), limits).finishes
    assert (finish.run, finish.reason, finish.to_state) == (1, "Removed", "queued")


def ending(database: Database) -> Any:
    with database.snapshot() as transaction:
        return transaction.value("select ending_reason from orca.run_clusters where run = 1")
