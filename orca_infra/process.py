"""Which process is meant, whether it still lives, and how a whole session of processes is ended.

A pid alone names nobody: it is given again after the process is gone. The one that is meant here is the pid together with
its start, counted from the machine's boot. psutil's `create_time()` is not kept as it is, because it adds the boot's
wall-clock time, which moves when the clock is set (`/proc/stat` btime); a living process would then look like another one.
The price is that an identity is good for one boot only: what outlives a boot stores `boot_id()` beside it.

The only importer of psutil.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from orca_infra.errors import Refused, Transient

_POLL_SECONDS = 0.02
_KILL_WAIT_SECONDS = 10.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_STABLE_READS = 10


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One very process of this boot.

    Attributes:
        pid: its number, which a later process may get again.
        started: seconds from the machine's boot to its start, to a hundredth; the same whatever happens to the clock.

    """

    pid: int
    started: float

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """The process that has this pid now.

        Raises:
            Transient: there is none; the caller takes it for gone.

        """
        try:
            return cls(pid, _started(psutil.Process(pid)))
        except psutil.Error as error:
            raise Transient(f"process {pid} is not there or cannot be looked at ({type(error).__name__})") from error


def is_alive(process: ProcessId) -> bool:
    """Whether this very process still runs. A zombie is dead, and a later process of the same pid is not it."""
    return _state(process) == "alive"


def end_session(leader: ProcessId, grace_seconds: float, first_signal: signal.Signals = signal.SIGTERM) -> None:
    """Ends every process whose session is the leader's, and returns once none is left.

    The leader may be dead already: as long as a session has members, the kernel gives its number to nobody else. When
    another process has the leader's pid now, the session is therefore over, and nothing is touched. Processes that made a
    session of their own (`setsid`) are not members.

    Args:
        leader: the session's leader; its pid is the session's number.
        grace_seconds: how long after the first signal the rest gets SIGKILL.
        first_signal: what is sent first.

    Raises:
        Refused: it is our own session, or pid 1's.
        Transient: members are left even after SIGKILL (a hanging disk); try again later.

    """
    if leader.pid <= 1 or leader.pid == os.getsid(0):
        raise Refused(f"session {leader.pid} is our own or the system's; it is not ended")
    if _state(leader) == "another":
        return
    _signal_all(leader.pid, first_signal)
    if _wait_until_empty(leader.pid, grace_seconds):
        return
    deadline = time.monotonic() + _KILL_WAIT_SECONDS
    while time.monotonic() < deadline:  # again each time: a member may have made another one just before its end
        _signal_all(leader.pid, signal.SIGKILL)
        if _wait_until_empty(leader.pid, 0.2):
            return
    left = ", ".join(map(str, _members(leader.pid)))
    raise Transient(f"session {leader.pid} is not over {_KILL_WAIT_SECONDS:.0f} s after SIGKILL; left: {left}")


def boot_id() -> str:
    """This boot of this machine, unguessable and never the same again (proc(5), random/boot_id)."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def die_with_parent(death_signal: signal.Signals, parent_pid: int | None = None) -> None:
    """Has the kernel send us this signal when our parent dies, and sends it at once when the parent is gone already.

    The kernel means the parent's *thread* that started us (prctl(2), PR_SET_PDEATHSIG): a parent in Python has to start us
    from a thread that outlives us. Our own children do not inherit it.

    Args:
        death_signal: what is sent.
        parent_pid: who the parent has to be, where the caller knows it; without it a parent that died before this call
            goes unnoticed.

    Raises:
        Transient: the kernel refused; the caller goes on without, or ends.

    """
    parent = os.getppid() if parent_pid is None else parent_pid
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(int(death_signal)), 0, 0, 0) != 0:
        raise Transient(f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        os.kill(os.getpid(), death_signal)


def _started(process: psutil.Process) -> float:
    """Seconds from the boot to the process's start; read between two equal looks at the boot's time, which may move."""
    for _ in range(_STABLE_READS):
        booted = psutil.boot_time()
        created = psutil.Process(process.pid).create_time()
        if psutil.boot_time() == booted:
            return round(float(created) - float(booted), 2)
    raise Transient("the clock is being set all the time; no process can be told from another")


def _state(process: ProcessId) -> str:
    """`alive`, `zombie` (dead, but its pid is still taken), `gone`, or `another` (that has its pid now)."""
    try:
        os.kill(process.pid, 0)  # 30 times faster than a look at /proc, and most that are asked for are gone
    except ProcessLookupError:
        return "gone"
    except PermissionError:
        pass
    try:
        found = psutil.Process(process.pid)
        if _started(found) != process.started:
            return "another"
        return "zombie" if found.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else "alive"
    except psutil.Error:
        return "gone"


def _members(session: int) -> list[int]:
    """The pids of the session's living members."""
    members = []
    for pid in psutil.pids():
        with suppress(OSError, psutil.Error):
            if os.getsid(pid) == session and psutil.Process(pid).status() not in (
                psutil.STATUS_ZOMBIE,
                psutil.STATUS_DEAD,
            ):
                members.append(pid)
    return members


def _signal_all(session: int, number: signal.Signals) -> None:
    for pid in _members(session):
        with suppress(ProcessLookupError):
            if os.getsid(pid) == session:
                os.kill(pid, number)


def _wait_until_empty(session: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while _members(session):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def traceback_of_thread(thread_id: int | None) -> str:
    """What a thread of this process is at; empty when it has ended."""
    frame = sys._current_frames().get(thread_id or 0)  # noqa: SLF001  (documented, for just this)
    return "".join(traceback.format_stack(frame)) if frame else ""
