"""Identity and end of processes, with real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orca_infra.errors import Refused, Transient
from orca_infra.process import ProcessId, boot_id, end_session, is_alive

SLEEP = "import time; time.sleep(60)"

Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts Python code in a session of its own; what is left of each is killed in the end."""
    started: list[subprocess.Popen[str]] = []

    def begin(code: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        end_session_anyway(process.pid)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def end_session_anyway(session: int) -> None:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getsid(int(entry.name)) == session:
                    os.kill(int(entry.name), signal.SIGKILL)
            except OSError:
                pass


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that in time"
        time.sleep(0.01)


def test_a_running_process_is_alive_and_its_identity_does_not_change(start: Start) -> None:
    process = start(SLEEP)
    identity = ProcessId.of(process.pid)
    assert is_alive(identity)
    assert ProcessId.of(process.pid) == identity


def test_a_zombie_is_dead(start: Start) -> None:
    process = start(SLEEP)
    identity = ProcessId.of(process.pid)
    process.kill()
    wait_until(lambda: not runs(process.pid))
    assert Path(f"/proc/{process.pid}").exists()  # not waited for yet
    assert not is_alive(identity)


def test_a_reused_pid_is_not_the_process(start: Start) -> None:
    process = start(SLEEP)
    earlier = ProcessId(process.pid, ProcessId.of(process.pid).started - 0.01)
    assert not is_alive(earlier)
    end_session(earlier, 0)
    assert runs(process.pid)


def test_a_process_that_is_gone_has_no_identity(start: Start) -> None:
    process = start("pass")
    process.wait()
    with pytest.raises(Transient, match=str(process.pid)):
        ProcessId.of(process.pid)


def test_ending_a_session_ends_grandchildren_and_nothing_else(start: Start) -> None:
    other = start(SLEEP)
    process = start(
        "import subprocess, sys\n"
        f"code = '''import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {SLEEP!r}]); "
        "print(p.pid, flush=True); p.wait()'''\n"
        "subprocess.run([sys.executable, '-c', code])"
    )
    grandchild = int(line_of(process))
    end_session(ProcessId.of(process.pid), 2)
    assert not runs(process.pid)
    assert not runs(grandchild)
    assert runs(other.pid)


def test_what_ignores_the_first_signal_is_killed_after_the_grace(start: Start) -> None:
    process = start(
        f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); {SLEEP}"
    )
    line_of(process)
    began = time.monotonic()
    end_session(ProcessId.of(process.pid), 0.3)
    assert time.monotonic() - began >= 0.3
    assert process.wait() == -signal.SIGKILL


def test_the_first_signal_is_the_callers(start: Start) -> None:
    process = start(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(7))\n"
        "print('ready', flush=True); time.sleep(60)"
    )
    line_of(process)
    end_session(ProcessId.of(process.pid), 120, signal.SIGINT)
    assert process.wait() == 7


@pytest.mark.parametrize("waited_for", [False, True])
def test_a_session_whose_leader_is_dead_is_ended_all_the_same(start: Start, waited_for: bool) -> None:
    process = start(
        "import subprocess, sys, time\n"
        f"print(subprocess.Popen([sys.executable, '-c', {SLEEP!r}]).pid, flush=True); time.sleep(60)"
    )
    child = int(line_of(process))
    leader = ProcessId.of(process.pid)
    process.kill()
    if waited_for:
        process.wait()
    wait_until(lambda: not is_alive(leader))
    assert runs(child)
    end_session(leader, 2)
    assert not runs(child)


def test_our_own_session_is_refused() -> None:
    with pytest.raises(Refused, match="our own"):
        end_session(ProcessId(os.getsid(0), 0.0), 0)


def test_the_boot_has_an_id_that_stays() -> None:
    assert boot_id() == boot_id()
    assert len(boot_id()) == 36


def test_a_process_dies_with_its_parent(start: Start) -> None:
    child = (
        "import signal, time\n"
        "from orca_infra.process import die_with_parent\n"
        "die_with_parent(signal.SIGTERM); print('ready', flush=True); time.sleep(60)"
    )
    parent = start(
        "import subprocess, sys, time\n"
        f"p = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE, text=True)\n"
        "p.stdout.readline(); print(p.pid, flush=True); time.sleep(60)"
    )
    pid = int(line_of(parent))
    assert runs(pid)
    parent.kill()
    wait_until(lambda: not runs(pid))


def test_a_process_whose_parent_is_gone_already_gets_the_signal_at_once(start: Start) -> None:
    process = start(
        "import signal\n"
        "from orca_infra.process import die_with_parent\n"
        "die_with_parent(signal.SIGTERM, parent_pid=2**22 + 1)"
    )
    assert process.wait() == -signal.SIGTERM


def test_die_with_parent_is_quiet_while_the_parent_lives(start: Start) -> None:
    process = start(
        "import os, signal\n"
        "from orca_infra.process import die_with_parent\n"
        "die_with_parent(signal.SIGTERM, parent_pid=os.getppid()); print('alive', flush=True)"
    )
    assert line_of(process) == "alive"
    assert process.wait() == 0
