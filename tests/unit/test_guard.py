"""What the loop leaves behind when it is killed is ended by its guard."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orca_infra.process import ProcessId, end_session, is_alive
from orca_infra.stack.guard import watch

WaitUntil = Callable[..., None]


@pytest.fixture
def sleeper() -> Iterator[Callable[[], ProcessId]]:
    """Starts a process that sleeps in a session of its own."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> ProcessId:
        started.append(subprocess.Popen(["/bin/sleep", "600"], start_new_session=True))
        return ProcessId.of(started[-1].pid)

    yield start
    for process in started:
        process.kill()
        process.wait()


def line(sign: str, process: ProcessId) -> str:
    return f"{sign} {process.pid} {process.started!r}\n"


def test_sessions_that_are_left_at_the_loops_end_are_ended_after_their_grace(sleeper: Callable[[], ProcessId]) -> None:
    left, ended, another = sleeper(), sleeper(), sleeper()
    of_that_pid_before = ProcessId(another.pid, another.started - 1)
    watch([line("+", left), line("+", ended), line("-", ended), line("+", of_that_pid_before)], 0.1)
    assert not is_alive(left)
    assert is_alive(ended)
    assert is_alive(another)


def test_the_guard_of_a_process_that_is_killed_ends_what_it_began(tmp_path: Path, wait_until: WaitUntil) -> None:
    told = tmp_path / "told"
    program = textwrap.dedent(
        f"""
        import subprocess, sys, time
        from orca_infra.process import ProcessId
        from orca_infra.stack.guard import Guard
        guard = Guard(0.1)
        session = ProcessId.of(subprocess.Popen(["/bin/sleep", "600"], start_new_session=True).pid)
        guard.begin(session)
        open({str(told)!r}, "w").write(f"{{session.pid}} {{session.started!r}} {{guard._process.pid}}\\n")
        time.sleep(600)
        """
    )
    loop = subprocess.Popen([sys.executable, "-c", program])
    try:
        wait_until(lambda: told.exists() and told.read_text().endswith("\n"))
        pid, started, guard = told.read_text().split()
        session = ProcessId(int(pid), float(started))
        guarding = ProcessId.of(int(guard))
        wait_until(lambda: ignores(guarding, signal.SIGTERM))
        os.kill(guarding.pid, signal.SIGTERM)  # as a supervisor sends it to all that it started
        loop.kill()
        loop.wait()
        wait_until(lambda: not is_alive(session) and not is_alive(guarding))
    finally:
        loop.kill()
        loop.wait()
        if told.exists():
            end_session(session, 0)


def ignores(process: ProcessId, number: signal.Signals) -> bool:
    """Whether the process ignores a signal (proc(5), SigIgn)."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    [mask] = [int(line.split()[1], 16) for line in lines if line.startswith("SigIgn:")]
    return bool(mask >> (number - 1) & 1)
