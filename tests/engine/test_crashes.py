"""Killed at any instant, the next pass converges: engines and whole loops killed, interrupted or left without the lead."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orca_infra.errors import NotLeader
from orca_infra.machines.program import machine_program
from orca_infra.process import ProcessId, end_session, is_alive
from orca_infra.stack.engine import PROJECT, Engine

pytestmark = pytest.mark.engine

STATES = pytest.mark.parametrize("state", ["file", "postgres"])
TYPE = "orca:index:Machine"
Passes = Callable[..., Any]
WaitUntil = Callable[..., None]


def lock_keys(w: Any) -> list[str]:
    """The locks that the state's backend holds."""
    if w.surroundings.engine.backend_url.startswith("file:"):
        locks = w.surroundings.settings.home / "state" / ".pulumi" / "locks"
        return sorted(str(path) for path in locks.rglob("*.json"))
    if w.rows("select to_regclass('pulumi_state') as there")[0]["there"] is None:
        return []
    return [row["key"] for row in w.rows("select key from pulumi_state where key like '%%/locks/%%.json' order by key")]


def create_seconds(seconds: float) -> str:
    """An orca.toml of which a create answers late, while the machine boots already."""
    return f"""
[pools.p]
provider = "local"
image = "registry.example/worker:1"
locations = ["a"]
max_machines = 3
idle_seconds = "1h"
types = [{{ type = "small" }}]
[local]
create_seconds = {seconds}
"""


def assert_converged(w: Any, *, machines: list[str]) -> None:
    """Exactly these machines exist, are wanted and are owned; nothing is open, nothing is locked."""
    assert w.listed() == machines
    assert w.living() == machines
    state = w.engine.state(w.stack)
    assert ([resource.name for resource in state.resources], state.pending) == (machines, ())
    assert [row["name"] for row in w.rows("select name from orca.owned order by name")] == machines
    assert w.rows("select from orca.engine_operations where ended_at is null or outcome = 'OutcomeUnknown'") == []
    assert lock_keys(w) == []
    before = w.operations()
    assert w.run_pass().changed == 0
    assert w.operations() == before


@STATES
def test_of_an_engine_killed_before_its_machine_was_made_the_lock_is_freed_and_the_row_ends_interrupted(
    passes: Passes, state: str
) -> None:
    w = passes(state)
    w.queue()
    interrupted, engine = w.run_pass_until_slow()
    os.kill(engine.pid, signal.SIGKILL)
    interrupted.join()
    assert interrupted.error is None
    assert w.reasons() == {"orca-p-1": None}
    assert lock_keys(w) == []
    assert w.operations()[-1]["outcome"] == "OutcomeUnknown"

    w.pass_until(lambda: "orca-p-2" in w.reasons())
    assert w.reasons() == {"orca-p-1": "Interrupted", "orca-p-2": None}
    assert_converged(w, machines=["orca-p-2"])


@STATES
def test_an_engine_killed_after_its_machine_was_made_leaves_a_stray_and_demand_gets_a_new_number(
    passes: Passes, background: Callable[..., Any], wait_until: WaitUntil, state: str
) -> None:
    w = passes(state, ORCA_STRAY_GRACE_SECONDS="1h")
    w.configure(create_seconds(60))
    w.queue()
    # Its worker comes up while the create has no answer yet, and takes the run, as on a real cloud.
    pass_ = background(w.run_pass)
    wait_until(lambda: w.count("orca.workers") == 1, 20)
    newest = w.operations()[-1]
    engine = ProcessId(newest["pid"], newest["process_started"])
    os.kill(engine.pid, signal.SIGKILL)
    pass_.join()
    assert w.listed() == ["orca-p-1"]
    w.execute("update orca.runs set state = 'canceled' where state in ('queued', 'running')")

    w.configure()
    w.run_pass()
    assert w.reasons() == {"orca-p-1": "Interrupted"}
    assert w.listed() == ["orca-p-1"]  # until the grace is over: the list may be late
    w.close()
    w = passes(state)
    w.queue()
    w.pass_until(lambda: w.listed() == ["orca-p-2"])
    assert w.reasons() == {"orca-p-1": "Interrupted", "orca-p-2": None}
    assert "stray deleted" in w.log.events()
    assert_converged(w, machines=["orca-p-2"])
    wait_until(lambda: w.rows("select from orca.runs where state = 'succeeded' and worker = 'orca-p-2'"), 15)


def test_an_engine_killed_in_a_removal_is_settled_and_the_removal_goes_on(passes: Passes) -> None:
    w = passes()
    name = w.machine_with_worker()
    w.cloud.stop(name)
    interrupted, engine = w.run_pass_until_slow("delete")
    os.kill(engine.pid, signal.SIGKILL)
    interrupted.join()
    assert interrupted.error is None
    assert (w.reasons(), w.listed()) == ({name: None}, [name])
    w.run_pass()
    assert w.reasons() == {name: "Stopped"}
    assert_converged(w, machines=[])


def test_a_machine_that_the_state_holds_as_made_is_confirmed_from_there(passes: Passes) -> None:
    """The loop dies between the engine's end and the confirmation."""
    w = passes()
    w.queue()
    w.run_pass()
    uid = w.machine("orca-p-1")["uid"]
    w.execute("update orca.pool_machines set uid = null, confirmed_at = null")
    w.execute("update orca.engine_operations set ended_at = null, outcome = null")
    w.execute("delete from orca.owned")
    w.run_pass()
    assert (w.machine("orca-p-1")["uid"], w.reasons()) == (uid, {"orca-p-1": None})
    assert len(w.operations()) == 1
    assert_converged(w, machines=["orca-p-1"])


def test_a_row_without_any_operation_ends_interrupted(passes: Passes) -> None:
    """The loop dies between the row and the operation."""
    w = passes()
    w.execute(
        "insert into orca.pool_machines (name, pool, number, provider, type, location, rendered, token_hash) "
        "values ('orca-p-1', 'p', 1, 'local', 'small', 'a', '{}', '')"
    )
    w.execute("insert into orca.pool_status (pool, last_number) values ('p', 1)")
    w.queue()
    w.run_pass()
    assert w.reasons() == {"orca-p-1": "Interrupted", "orca-p-2": None}
    assert_converged(w, machines=["orca-p-2"])


@STATES
def test_the_lock_of_a_living_engine_that_somebody_started_by_hand_is_never_broken(
    passes: Passes, background: Callable[..., Any], wait_until: WaitUntil, state: str
) -> None:
    w = passes(state)
    by_hand: list[ProcessId] = []
    w.hold("create")
    up = background(lambda: _up_by_hand(w, by_hand))
    wait_until(lambda: not (w.cloud.folder / "faults.json").exists(), 20)
    [key] = lock_keys(w)
    try:
        w.queue()
        for tries in (1, 2):
            w.pass_until(lambda tries=tries: len(w.operations()) >= tries)
            assert lock_keys(w) == [key]
            assert is_alive(by_hand[-1])
        assert w.reasons() == {}, "a try that began nothing used a number up"
        assert w.listed() == []
        assert {operation["outcome"] for operation in w.operations()} == {"StackLocked"}
        [status] = w.rows("select last_attempt from orca.pool_status")
        assert "another operation holds the stack's lock" in status["last_attempt"]
    finally:
        os.kill(by_hand[-1].pid, signal.SIGKILL)
        up.join()
        end_session(by_hand[-1], 0.2)
    # It is dead now and nobody wrote down who it was: no process has its number, and that is proof.
    assert lock_keys(w) == [key]
    w.pass_until(lambda: len(w.listed()) == 1)
    assert lock_keys(w) == []


def _up_by_hand(w: Any, started: list[ProcessId]) -> None:
    declaration = {
        "folder": str(w.cloud.folder),
        "name": "by-hand",
        "location": "a",
        "type": "small",
        "labels": {},
        "argv": ["/bin/sleep", "600"],
        "environment": {},
    }
    urn = f"urn:pulumi:{w.stack}::{PROJECT}::{TYPE}::by-hand"
    Engine(w.surroundings.engine).up(
        w.stack,
        machine_program(TYPE, {"by-hand": (declaration, "")}),
        targets=(urn,),
        deadline_seconds=300,
        on_start=started.append,
    )


def test_with_its_lock_connection_ended_in_mid_up_a_loop_writes_nothing_more_and_the_next_leader_confirms(
    passes: Passes,
) -> None:
    w = passes()
    w.queue()
    pass_, _ = w.run_pass_until_slow()
    before = _all_rows(w)
    w.execute(
        "select pg_terminate_backend(pid, 60000) from pg_stat_activity where application_name = 'orca-infra leader'"
    )
    w.cloud.hurry()
    pass_.join()
    assert isinstance(pass_.error, NotLeader)
    assert _all_rows(w) == before
    [operation] = w.operations()
    assert (operation["ended_at"], w.machine("orca-p-1")["confirmed_at"]) == (None, None)

    later = passes()
    later.run_pass()
    assert later.reasons() == {"orca-p-1": None}
    assert later.machine("orca-p-1")["uid"] == later.cloud.get("orca-p-1").uid
    assert len(later.operations()) == 1
    assert_converged(later, machines=["orca-p-1"])


def _all_rows(w: Any) -> str:
    tables = ("pool_machines", "engine_operations", "owned", "pool_status", "pool_offers")
    return repr([w.rows(f"select * from orca.{table}") for table in tables])


# The whole loop as a process of its own.


@STATES
def test_a_loop_killed_in_mid_up_takes_its_engine_along_and_the_next_one_converges(
    passes: Passes, start_loop: Callable[..., subprocess.Popen[str]], wait_until: WaitUntil, state: str
) -> None:
    w = passes(state)
    w.leader.release()
    w.hold("create")
    w.queue()
    loop = start_loop(state=state)
    engine = w.engine_at_fault()
    loop.kill()
    loop.wait()

    # While that engine ends its step, nothing is decided for its pool.
    wait_until(w.leader.acquire, 5, "Postgres to notice the loop's end")
    result = w.run_pass()
    assert is_alive(engine)
    assert re.search(r"still runs on test\.machines\.p", result.plan.reports[0].message)
    assert (result.changed, w.reasons()) == (0, {"orca-p-1": None})

    w.cloud.hurry()
    # Interrupted, not killed: it ends by itself, and nothing is left of it. Without its program, the engine may or may not
    # come to writing down its step; so the machine is either confirmed from the state or goes as a stray, and the run
    # gets another one.
    wait_until(lambda: not is_alive(engine), 10, "the engine's end")
    assert lock_keys(w) == []
    w.pass_until(lambda: w.rows("select from orca.runs where state = 'succeeded'") and w.listed() == w.living())
    assert set(w.reasons().values()) <= {None, "Interrupted"}
    assert len(w.listed()) <= 1
    assert_converged(w, machines=w.listed())


@STATES
def test_of_a_loop_that_is_killed_with_its_engine_the_next_one_breaks_the_lock(
    passes: Passes, start_loop: Callable[..., subprocess.Popen[str]], wait_until: WaitUntil, state: str
) -> None:
    w = passes(state)
    w.leader.release()
    w.hold("create")
    w.queue()
    loop = start_loop(state=state)
    engine = w.engine_at_fault()
    loop.kill()
    os.kill(engine.pid, signal.SIGKILL)
    loop.wait()
    assert len(lock_keys(w)) == 1

    wait_until(w.leader.acquire, 5, "Postgres to notice the loop's end")
    w.pass_until(lambda: "orca-p-2" in w.reasons())
    assert w.reasons() == {"orca-p-1": "Interrupted", "orca-p-2": None}
    assert_converged(w, machines=["orca-p-2"])


def test_a_loop_that_is_told_to_stop_twice_in_mid_up_waits_for_the_step_and_leaves_with_0(
    passes: Passes, start_loop: Callable[..., subprocess.Popen[str]]
) -> None:
    w = passes()
    w.leader.release()
    w.hold("create")
    w.queue()
    loop = start_loop()
    engine = w.engine_at_fault()
    loop.send_signal(signal.SIGTERM)
    loop.send_signal(signal.SIGTERM)
    w.cloud.hurry()
    assert loop.wait() == 0
    assert not is_alive(engine)
    assert lock_keys(w) == []
    assert w.listed() == ["orca-p-1"]

    assert w.leader.acquire()
    w.run_pass()
    assert_converged(w, machines=["orca-p-1"])


def test_an_idle_loop_that_is_told_to_stop_leaves_with_0_and_another_takes_over(
    passes: Passes, start_loop: Callable[..., subprocess.Popen[str]], wait_until: WaitUntil
) -> None:
    w = passes()
    w.leader.release()
    first = start_loop()
    wait_until(lambda: w.rows("select from orca.pool_status"), 10, "the first loop's first pass")
    second = start_loop()
    first.send_signal(signal.SIGTERM)
    assert first.wait() == 0
    w.queue()
    wait_until(lambda: w.rows("select from orca.runs where state = 'succeeded'"), 20, "the second loop's machine")
    second.send_signal(signal.SIGTERM)
    assert second.wait() == 0
    w.leader.acquire()
    assert_converged(w, machines=["orca-p-1"])


def test_one_pass_of_the_command_line_makes_a_machine_and_is_refused_beside_a_leader(
    passes: Passes, start_loop: Callable[..., subprocess.Popen[str]], home: Path
) -> None:
    w = passes()
    w.queue()
    assert start_loop("--once").wait() == 2
    assert "another loop leads this stack" in (home / "loop-1.log").read_text()
    w.leader.release()
    assert start_loop("--once").wait() == 0
    assert w.leader.acquire()
    assert_converged(w, machines=["orca-p-1"])
