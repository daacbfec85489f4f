"""What goes wrong below the loop: states that can't be used, providers that die or hang, full disks. Nothing is left over."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from orca_infra.db.connection import Session
from orca_infra.errors import NotLeader, StackLocked, StateBroken
from orca_infra.process import ProcessId, is_alive
from orca_infra.stack import command
from orca_infra.stack.backend import open_backend
from orca_infra.stack.engine import PROJECT

pytestmark = pytest.mark.engine

Passes = Callable[..., Any]
WaitUntil = Callable[..., None]

TWO_POOLS = """
[pools.p]
provider = "local"
image = "registry.example/orca-worker:1"
max_machines = 3
idle_seconds = "1h"
types = [{ type = "small", locations = ["a"] }]
[pools.q]
provider = "local"
image = "registry.example/orca-worker:1"
max_machines = 3
idle_seconds = "1h"
types = [{ type = "small", locations = ["a"] }]
"""


def state_key(stack: str) -> str:
    return f".pulumi/stacks/{PROJECT}/{stack}.json"


def read_state(w: Any, stack: str) -> bytes:
    with open_backend(w.surroundings.engine.backend_url) as backend:
        content = backend.read(state_key(stack))
    assert content is not None
    return content


def write_state(w: Any, stack: str, content: bytes) -> None:
    url = w.surroundings.engine.backend_url
    if url.startswith("file:"):
        (w.surroundings.settings.home / "state" / state_key(stack)).write_bytes(content)
        return
    session = Session(url)
    session.row(
        "update pulumi_state set data = jsonb_build_object('data', encode(%(content)s, 'base64')) "
        "where key like '%%/' || %(key)s",
        {"content": content, "key": state_key(stack)},
    )
    session.close()


def broken(content: bytes) -> bytes:
    """The state with a resource whose parent is not there."""
    whole = json.loads(content)
    for resource in whole["checkpoint"]["latest"]["resources"]:
        if resource["type"] == "orca:index:Machine":
            resource["parent"] = resource["parent"] + "-lost"
    return json.dumps(whole).encode()


@pytest.mark.parametrize(("state", "harm"), [("file", "integrity"), ("postgres", "cut off")])
def test_a_state_that_the_engine_refuses_is_kept_aside_and_stops_its_stack_alone_until_it_is_mended(
    passes: Passes, state: str, harm: str
) -> None:
    w = passes(state)
    w.configure(TWO_POOLS)
    w.queue()
    w.run_pass()
    assert w.listed() == ["orca-p-1"]
    whole = read_state(w, w.stack)
    harmed = broken(whole) if harm == "integrity" else whole[: len(whole) // 2]
    write_state(w, w.stack, harmed)

    w.execute("update orca.runs set state = 'canceled' where state in ('queued', 'running')")
    w.execute("insert into orca.pipelines (name, placement) values ('more', 'worker:q')")
    w.execute("insert into orca.runs (pipeline) values ('more')")
    w.cloud.stop("orca-p-1")
    for _ in range(3):
        w.run_pass()
    assert "orca-q-1" in w.listed(), "the rest goes on"
    assert w.reasons()["orca-p-1"] is None
    assert read_state(w, w.stack) == harmed, "the state was written, and so begun anew"
    [topic] = [row for row in w.rows("select * from orca.attention") if row["topic"] == f"state {w.stack}"]
    assert "the engine refuses the state of test.machines.p" in topic["message"]
    kept = list((w.surroundings.engine.folder / "broken").iterdir())
    assert [path.read_bytes() for path in kept] == [harmed], "one copy, however many passes"
    assert str(kept[0]) in topic["message"]
    reports = {report.pool: report.message for report in w.run_pass().plan.reports}
    assert "the engine refuses the state" in reports["p"]

    write_state(w, w.stack, whole)  # a person mends it
    w.pass_until(lambda: w.reasons()["orca-p-1"] == "Stopped")
    assert w.rows("select from orca.attention where topic like 'state %%'") == []
    assert "orca-p-1" not in w.listed()


@pytest.mark.parametrize("state", ["file", "postgres"])
def test_a_stack_whose_state_was_cut_off_is_dropped_where_nothing_is_lost_with_it(passes: Passes, state: str) -> None:
    """An engine that is killed in writing it leaves half a file, or an empty one."""
    w = passes(state)
    for stack, part in (("test.runs.1", 0), ("test.runs.2", 0.5)):
        w.engine.init(stack)
        whole = read_state(w, stack)
        write_state(w, stack, whole[: int(len(whole) * part)])
        with pytest.raises(StateBroken):
            w.passes.recorded.drop(stack)
        w.passes.recorded.drop(stack, even_torn=True)
        assert stack not in w.engine.stacks()
        left = [path for path in w.surroundings.settings.home.rglob(f"*{stack}*") if path.parent.name != "broken"]
        assert left == []  # not even an empty folder
        selections = (w.surroundings.engine.folder / "home" / "workspaces").iterdir()
        assert not [path for path in selections if stack in path.read_text()]


def test_a_state_that_an_engine_may_be_writing_is_not_taken_for_cut_off(passes: Passes) -> None:
    w = passes("file")
    stack = "test.runs.1"
    w.engine.init(stack)
    write_state(w, stack, b"")
    lock = w.surroundings.settings.home / "state" / ".pulumi/locks/organization" / PROJECT / stack / "held.json"
    lock.parent.mkdir(parents=True, exist_ok=True)
    holder = {"pid": 1, "username": "somebody", "hostname": socket.gethostname(), "timestamp": "2026-11-29T00:00:00Z"}
    lock.write_text(json.dumps(holder))
    with pytest.raises(StackLocked):
        w.passes.recorded.drop(stack, even_torn=True)
    assert read_state(w, stack) == b""
    assert lock.exists()

    dead = subprocess.Popen(["/bin/true"])
    dead.wait()
    lock.write_text(json.dumps({**holder, "pid": dead.pid}))
    w.passes.recorded.drop(stack, even_torn=True)
    assert stack not in w.engine.stacks()
    assert not lock.exists()


@pytest.mark.parametrize("text", ["", '{"pid": 12'], ids=["empty", "half"])
def test_a_lock_that_a_full_disk_left_unwritten_holds_up_nothing(passes: Passes, text: str) -> None:
    """To the engine it is a lock, of nobody; it says no more than that some JSON ends too soon."""
    w = passes("file")
    cohort = "test.runs.1"
    w.engine.init(cohort)
    state: Path = w.surroundings.settings.home / "state" / ".pulumi"

    def leave_torn(stack: str) -> Path:
        lock = state / "locks/organization" / PROJECT / stack / "1b2c.json.18ecc628d178aa53.tmp"
        lock.parent.mkdir(parents=True, exist_ok=True)
        lock.write_text(text)
        return lock

    left = leave_torn(w.stack)
    w.queue()
    w.run_pass()
    assert w.listed() == ["orca-p-1"], "a stack that is not there yet"
    leave_torn(w.stack)
    w.queue()
    w.pass_until(lambda: len(w.listed()) == 2)
    assert not left.exists()

    leave_torn(cohort)
    for folder in ("stacks", "history"):
        aside = state / folder / PROJECT / f"{cohort}.json.18ecc628d178aa53.tmp"
        if folder == "history":
            aside = aside.parent / cohort / aside.name
        aside.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(text)
    w.passes.recorded.drop(cohort)
    assert list(w.surroundings.settings.home.rglob(f"*{cohort}*")) == []


def providers_of(engine: ProcessId) -> list[psutil.Process]:
    """The plugins of an engine; not a machine that one of them started."""
    children = psutil.Process(engine.pid).children(recursive=True)
    return [child for child in children if any("pulumi-resource-orca" in word for word in child.cmdline())]


def test_a_provider_that_dies_in_a_create_fails_that_create_and_the_next_pass_goes_on(passes: Passes) -> None:
    w = passes()
    w.queue()
    interrupted, engine = w.run_pass_until_slow()
    for provider in providers_of(engine):
        provider.kill()
    interrupted.join()
    assert interrupted.error is None
    assert not is_alive(engine)
    w.pass_until(lambda: w.rows("select from orca.runs where state = 'succeeded'"))
    assert len(w.living()) == 1
    assert w.listed() == w.living()
    assert w.engine.state(w.stack).pending == ()


def test_a_provider_that_hangs_is_ended_at_the_deadline_and_holds_no_other_pool(
    passes: Passes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "INTERRUPT_GRACE_SECONDS", 1.0)
    w = passes(ORCA_ENGINE_SECONDS="15")
    w.queue()
    stuck, engine = w.run_pass_until_slow()
    for provider in providers_of(engine):
        provider.send_signal(signal.SIGSTOP)  # it does not even end when it is told to
    stuck.join()
    assert stuck.error is None
    assert not is_alive(engine)
    assert providers_left(w) == []
    w.close()
    w = passes()
    w.pass_until(lambda: w.rows("select from orca.runs where state = 'succeeded'"))
    assert w.listed() == w.living()


def providers_left(w: Any) -> list[int]:
    mark = str(w.surroundings.engine.folder)
    return [
        process.pid
        for process in psutil.process_iter(["cwd", "status"])
        if str(process.info["cwd"]).startswith(mark) and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def test_told_to_stop_twice_in_a_create_of_a_minute_the_loop_leaves_in_time_and_frees_what_it_held(
    passes: Passes, start_loop: Callable[..., subprocess.Popen[str]]
) -> None:
    w = passes()
    w.leader.release()
    w.hold("create")
    w.queue()
    loop = start_loop()
    engine = w.engine_at_fault()
    loop.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    loop.send_signal(signal.SIGTERM)
    assert loop.wait(300) == 0  # not at the operation's own deadline, which is three times as long
    assert not is_alive(engine)
    assert providers_left(w) == []
    [operation] = w.operations()
    assert operation["outcome"] == "OutcomeUnknown"
    with open_backend(w.surroundings.engine.backend_url) as backend:
        assert backend.keys(f".pulumi/locks/organization/{PROJECT}/{w.stack}/") == []

    assert w.leader.acquire()
    w.pass_until(lambda: w.rows("select from orca.runs where state = 'succeeded'"))
    assert w.listed() == w.living()
    assert w.engine.state(w.stack).pending == ()


def test_a_killed_loop_leaves_no_process_even_if_its_provider_hangs(
    passes: Passes, start_loop: Callable[..., subprocess.Popen[str]], wait_until: WaitUntil
) -> None:
    w = passes()
    w.leader.release()
    w.hold("create")
    w.queue()
    loop = start_loop()
    engine = w.engine_at_fault()
    loop.kill()
    loop.wait()
    wait_until(lambda: not is_alive(engine) and providers_left(w) == [], 40, "the guard to end what is left")


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A disk of 1 MiB."""
    folder = Path(tempfile.mkdtemp(prefix="orca-test-disk-", dir="/tmp"))
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], capture_output=True, check=False
    ).returncode
    try:
        if mounted:
            pytest.skip("only root can mount a small disk")
        yield folder
    finally:
        if not mounted:
            subprocess.run(["umount", "-l", folder], check=True)
        folder.rmdir()


def test_a_disk_that_is_full_when_the_state_is_to_be_written_is_said_and_once_there_is_room_the_work_goes_on(
    passes: Passes, small_disk: Path
) -> None:
    state = small_disk / "state"
    state.mkdir()
    w = passes(PULUMI_BACKEND_URL=f"file://{state}")
    w.queue()
    pass_, _ = w.run_pass_until_slow()
    filler = small_disk / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:  # until there is no space left
            file.write(b"x" * 4096)
    w.cloud.hurry()
    pass_.join()
    assert pass_.error is None
    [operation] = w.operations()
    assert operation["outcome"] == "OutcomeUnknown"
    assert "no space left on device" in operation["message"]
    filler.unlink()
    w.pass_until(lambda: w.rows("select from orca.runs where state = 'succeeded'"))
    w.pass_until(lambda: w.listed() == w.living())
    assert w.engine.state(w.stack).pending == ()


def test_no_transaction_is_open_across_an_operation_however_long(passes: Passes, database_url: str) -> None:
    session = Session(database_url)
    session.row(
        "do $$ begin execute format('alter database %I set idle_in_transaction_session_timeout = 2000', current_database()); end $$"
    )
    session.close()
    w = passes("postgres")
    w.queue()
    slow, _ = w.run_pass_until_slow()
    time.sleep(3)  # longer than what ends a transaction that is open
    w.cloud.hurry()
    slow.join()
    assert slow.error is None
    assert w.machine("orca-p-1")["confirmed_at"] is not None
    assert w.operations()[-1]["outcome"] == "Done"


def test_idle_connections_that_were_dropped_are_replaced_unseen_and_the_locks_connection_is_not(passes: Passes) -> None:
    w = passes()
    w.run_pass()
    end = "select pg_terminate_backend(pid, 60000) from pg_stat_activity where application_name = %(name)s and pid <> pg_backend_pid()"
    w.execute(end, name="orca-infra")
    w.queue()
    w.run_pass()
    assert w.listed() == ["orca-p-1"]
    w.execute(end, name="orca-infra leader")
    with pytest.raises(NotLeader):
        w.run_pass()


def test_a_database_that_is_away_is_no_demand_of_zero(passes: Passes) -> None:
    """A read that failed removes nothing, although nothing would seem to be wanted."""
    w = passes()
    w.configure(TWO_POOLS.replace('"1h"', '"0.01"'))
    w.queue()
    w.run_pass()
    w.execute("alter table orca.runs rename to runs_away")
    try:
        with pytest.raises(Exception, match="runs"):
            w.run_pass()
        assert w.listed() == ["orca-p-1"]
        assert w.reasons() == {"orca-p-1": None}
    finally:
        w.execute("alter table orca.runs_away rename to runs")
