"""`orca-infra machines`, `pause`, `resume` and what `status` says of a pool, on a real database; no engine, no machine."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orca_infra.attention import clear_outdated, note
from orca_infra.db.connection import Database
from orca_infra.errors import UserError
from orca_infra.machines.model import NEXT_TRY
from orca_infra.machines.observe import SQL
from orca_infra.settings import read_settings
from orca_infra.status import read_status
from orca_infra.surroundings import Surroundings, open_surroundings

pytestmark = pytest.mark.postgres

TOML = """
[pools.p]
provider = "local"
image = "registry.example/orca-worker:1"
max_machines = 3
idle_seconds = "1h"
types = [{ type = "small", locations = ["a"] }]
"""
Run = Callable[..., Any]


@pytest.fixture
def here(environment: dict[str, str], tmp_path: Path) -> Iterator[Surroundings]:
    (tmp_path / "orca.toml").write_text(TOML)
    opened = open_surroundings(read_settings(environment), say=lambda _: None)
    yield opened
    opened.close()


@pytest.fixture
def run(command: Run) -> Run:
    return command


def plant(database: Database, name: str, *, seen: bool = True, ended: str | None = None) -> None:
    with database.transaction() as transaction:
        values = {
            "pool": "p",
            "provider": "local",
            "type": "small",
            "location": "a",
            "spot": name.endswith("-2"),
            "rendered": "{}",
            "token_hash": b"-",
        }
        transaction.run(SQL["record_machine"], {"name": name, "number": int(name.rpartition("-")[2]), **values})
        transaction.run(SQL["confirm_machine"], {"name": name, "uid": f"uid-{name}"})
        if seen:
            transaction.run("insert into orca.workers (name, pool) values (%(name)s, 'p')", {"name": name})
        if ended:
            transaction.run(SQL["end_machine"], {"name": name, "reason": ended})


def report(database: Database, **more: Any) -> None:
    values = {"pool": "p", "demand": 0, "message": "no demand", "next_try_at": None, "in_search": False}
    with database.transaction() as transaction:
        transaction.run(SQL["report"], {**values, "skipped": "", "machines": "{}", **more})


def test_machines_are_listed_with_their_states_and_those_that_ended_on_demand(here: Surroundings, run: Run) -> None:
    assert "no machines" in run("machines", "list")
    plant(here.database, "orca-p-1")
    plant(here.database, "orca-p-2", seen=False)
    plant(here.database, "orca-p-3", ended="Idle")
    lines = run("machines", "list").splitlines()
    assert [line.split()[:5] for line in lines[1:]] == [
        ["orca-p-1", "p", "small", "a", "idle"],
        ["orca-p-2", "p", "small", "(spot)", "a"],
    ]
    assert "Idle" in run("machines", "list", "--all")
    listed = json.loads(run("machines", "list", "--all", "--json"))
    assert [(m["name"], m["state"]) for m in listed["machines"]] == [("orca-p-1", "idle"), ("orca-p-2", "booting")]
    assert [(m["name"], m["reason"]) for m in listed["ended"]] == [("orca-p-3", "Idle")]


def test_on_a_narrow_terminal_a_machines_name_stays_whole(
    here: Surroundings, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    plant(here.database, "orca-a-pool-with-a-longer-name-1")
    plant(here.database, "orca-a-pool-with-a-longer-name-2", ended="Idle")
    said = run("machines", "list", "--all")
    assert "orca-a-pool-with-a-longer-name-1" in said
    assert "orca-a-pool-with-a-longer-name-2" in said
    assert "uid" not in said


def test_a_drained_machine_says_so_and_takes_no_more_runs(here: Surroundings, run: Run) -> None:
    plant(here.database, "orca-p-1")
    with here.database.transaction() as transaction:
        transaction.run("update orca.pool_machines set token_hash = sha256('t')")
        transaction.run("insert into orca.pipelines (name, placement) values ('w', 'worker:p')")
        transaction.run("insert into orca.runs (pipeline) values ('w'), ('w')")
    with here.database.transaction() as transaction:
        assert transaction.dicts("select * from orca.worker_take('orca-p-1', 't')")
        transaction.run("update orca.workers set slots = 2")
    assert run("machines", "drain", "orca-p-1") == "orca-p-1 goes once it is idle; it takes no more runs\n"
    with here.database.transaction() as transaction:
        assert transaction.dicts("select * from orca.worker_take('orca-p-1', 't')") == []
    assert json.loads(run("machines", "list", "--json"))["machines"][0]["state"] == "draining"
    assert run("machines", "drain", "orca-p-1", "--now").startswith("orca-p-1 goes at once")
    [row] = _rows(here, "select drain_now from orca.pool_machines")
    assert row["drain_now"]
    run("machines", "drain", "orca-p-1")
    [row] = _rows(here, "select drain_now from orca.pool_machines")
    assert row["drain_now"], "what was asked for is not taken back"


@pytest.mark.parametrize("arguments", [("machines", "drain"), ("machines", "logs")])
def test_a_machine_that_does_not_exist_is_named(here: Surroundings, run: Run, arguments: tuple[str, ...]) -> None:
    plant(here.database, "orca-p-9", ended="Idle")
    with pytest.raises(UserError, match="there is no machine orca-p-1"):
        run(*arguments, "orca-p-1")
    with pytest.raises(UserError, match=r"no machine orca-p-9|said nothing that is kept"):
        run(*arguments, "orca-p-9")


def test_what_was_saved_of_a_machine_is_printed_without_acting_on_the_terminal(here: Surroundings, run: Run) -> None:
    plant(here.database, "orca-p-1", ended="BootTimeout")
    here.logs_folder.mkdir(parents=True)
    (here.logs_folder / "orca-p-1.console.log").write_text("kernel\x1b[2J panic\n")
    assert run("machines", "logs", "orca-p-1") == "kernel?[2J panic\n"


def test_a_pool_or_all_of_them_are_paused_and_resumed_and_status_says_so_at_once(here: Surroundings, run: Run) -> None:
    report(here.database)
    assert run("pause", "p") == "paused: pool p; `orca-infra resume p` ends it\n"
    run("pause", "p")
    [pool] = read_status(here)["pools"]
    assert (pool["paused"], pool["message"]) == (True, "paused; no demand")
    assert run("resume", "p") == "resumed: pool p\n"
    assert run("resume", "p") == "not paused: pool p\n"
    assert run("pause") == "paused: all pools; `orca-infra resume` ends it\n"
    with pytest.raises(UserError, match="all pools are paused"):
        run("resume", "p")
    run("pause", "p")
    assert run("resume") == "resumed: all pools\n"
    assert _rows(here, "select * from orca.pool_pauses") == []


def test_a_pool_that_nobody_knows_is_not_paused_or_resumed(here: Surroundings, run: Run) -> None:
    run("pause", "p")
    for command, name in itertools.product(("pause", "resume"), ("q", "", "*")):
        with pytest.raises(UserError, match=re.escape(f'there is no pool "{name}"; there are p')):
            run(command, name)
    assert [row["pool"] for row in _rows(here, "select pool from orca.pool_pauses")] == ["p"]
    report(here.database, pool="gone on")
    assert "`orca-infra resume 'gone on'` ends it" in run("pause", "gone on")
    run("resume", "gone on")


def test_a_pool_that_a_pass_has_seen_is_paused_while_the_file_is_bad(here: Surroundings, run: Run) -> None:
    report(here.database)
    here.settings.config_path.write_text("[pools.p")
    assert run("pause", "p") == "paused: pool p; `orca-infra resume p` ends it\n"
    assert run("resume", "p") == "resumed: pool p\n"
    with pytest.raises(UserError, match="is not TOML"):
        run("pause", "q")


def test_status_and_the_table_say_the_same_of_a_pool(here: Surroundings, run: Run) -> None:
    plant(here.database, "orca-p-1")
    plant(here.database, "orca-p-2", seen=False)
    report(
        here.database,
        demand=3,
        message="1 machine is still booting",
        skipped="skipped: large (arm64): image w is for amd64 only",
        machines='{"idle": 1, "booting": 1}',
    )
    [pool] = json.loads(run("status", "--json"))["pools"]
    [row] = _rows(here, "select demand, message, machines, skipped, paused_since from orca.pool_status")
    assert row["machines"] == pool["machines"] == {"idle": 1, "booting": 1}
    assert (row["demand"], row["paused_since"]) == (pool["demand"], None) == (3, None)
    assert pool["message"] == f"{row['message']}; {row['skipped']}"
    shown = run("status")
    assert "1 idle, 1 booting" in shown
    assert "1 machine is still booting; skipped: large (arm64): image w is for amd64 only" in shown


def test_status_says_when_the_next_try_is_before_what_is_skipped(here: Surroundings, run: Run) -> None:
    with here.database.transaction() as transaction:
        due: Any = transaction.value("select now() + interval '50 minutes'")
    report(here.database, demand=3, message=NEXT_TRY, next_try_at=due, skipped="skipped: large (arm64)")
    assert re.search(rf"{NEXT_TRY} in \d+ s; skipped: large \(arm64\)", run("status"))


def test_runs_of_a_pool_that_no_pass_has_seen_are_said(here: Surroundings, run: Run) -> None:
    report(here.database)
    with here.database.transaction() as transaction:
        transaction.run(
            "insert into orca.pipelines (name, placement, paused) values ('good', 'worker:p', false),"
            " ('slip', 'worker:pp', false), ('held', 'worker:ppp', true), ('long', 'worker:' || repeat('x', 10000), false)"
        )
        transaction.run("insert into orca.runs (pipeline) values ('good'), ('slip'), ('slip'), ('held'), ('long')")
    [slip, long] = json.loads(run("status", "--json"))["unknown_pools"]
    assert (slip, long["runs"]) == ({"pool": "pp", "runs": 2}, 1)
    said = run("status")
    assert "2 runs wait for pool pp, and no pass has seen such a pool\n" in said
    assert f"1 run waits for pool {'x' * 80}, and" in said


def test_what_a_loop_with_other_settings_said_is_forgotten_by_the_next(here: Surroundings) -> None:
    def left(*scopes: str, drift_is_reported: bool) -> set[str]:
        for topic in topics:
            note(here.database, topic, "look")
        clear_outdated(here.database, scopes=scopes, drift_is_reported=drift_is_reported)
        return {row["topic"] for row in _rows(here, "select topic from orca.attention")}

    drift = {"drift s.machines.p", "labels of machines", "labels of runs"}
    of_runs = {"pass runs", "up runs", "strays objects of runs"}
    topics = {*drift, *of_runs, "pass machines", "orca.toml"}
    assert left("machines", "runs", "runtimes", drift_is_reported=True) == topics
    assert left("machines", "runs", "runtimes", drift_is_reported=False) == topics - drift
    assert left("machines", drift_is_reported=True) == topics - of_runs - {"labels of runs"}


def _rows(here: Surroundings, query: Any) -> list[dict[str, Any]]:
    with here.database.snapshot() as transaction:
        return transaction.dicts(query)
