"""A process beside the loop that ends what engines leave behind when the loop was killed. Nothing else outlives it.

A killed loop's engine is interrupted by the kernel (command.py) and ends after the step that it is at; with a provider that
hangs it never would. The guard reads from its standard input which sessions there are; when that ends, so has the loop, and
it gives them the time that a stopping loop would give.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable

from orca_infra.errors import OrcaError
from orca_infra.process import ProcessId, end_session, is_alive

_POLL_SECONDS = 0.2


class Guard:
    """The loop's side. Started with the first engine; any number of threads may use it."""

    def __init__(self, grace_seconds: float) -> None:
        self._grace_seconds = grace_seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._sessions: set[ProcessId] = set()

    def begin(self, session: ProcessId) -> None:
        """This session is to be ended should this process be killed."""
        with self._lock:
            self._sessions.add(session)
            if self._process is None or self._process.poll() is not None:
                self._start()
            else:
                self._tell("+", session)

    def end(self, session: ProcessId) -> None:
        """It has ended."""
        with self._lock:
            self._sessions.discard(session)
            self._tell("-", session)

    def _start(self) -> None:
        command = [sys.executable, "-m", "orca_infra.stack.guard", f"{self._grace_seconds:g}"]
        # Without a guard the engine still ends by itself unless its provider hangs: that is no reason to make nothing.
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # or Ctrl-C on a terminal would end it together with the loop
            )
            for session in self._sessions:
                self._tell("+", session)

    def _tell(self, sign: str, session: ProcessId) -> None:
        if self._process is None or self._process.stdin is None:
            return
        with contextlib.suppress(OSError):  # it was killed; the next one starts anew
            self._process.stdin.write(f"{sign} {session.pid} {session.started!r}\n".encode())
            self._process.stdin.flush()


def watch(lines: Iterable[str], grace_seconds: float) -> None:
    """Read sessions until the lines end, then end those that are left after the grace."""
    sessions: set[ProcessId] = set()
    for line in lines:
        sign, pid, started = line.split()
        session = ProcessId(int(pid), float(started))
        (sessions.add if sign == "+" else sessions.discard)(session)
    deadline = time.monotonic() + grace_seconds
    while time.monotonic() < deadline and any(is_alive(session) for session in sessions):
        time.sleep(_POLL_SECONDS)
    for session in sessions:
        with contextlib.suppress(OrcaError):
            end_session(session, 0.5)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    watch(sys.stdin, float(sys.argv[1]))


if __name__ == "__main__":
    main()
