"""Run the pulumi program: in a session of its own, with a deadline, and with a clean end.

The SDK's own runner has neither a deadline nor a handle, and leaves plugins behind when it is stopped.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from orca_infra.errors import OutcomeUnknown, SetupError
from orca_infra.process import ProcessId, end_session
from orca_infra.stack.guard import Guard

#: How long an interrupted engine may take to write its state before its session is killed.
INTERRUPT_GRACE_SECONDS = 20.0
_GUARD = Guard(INTERRUPT_GRACE_SECONDS)
#: How soon a wait notices that its limit was moved.
_LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """What a command that ran to its end came to."""

    code: int
    stdout: str
    stderr: str


class PulumiCommand:
    """The pulumi program with one environment; any number of threads may run it at the same time."""

    def __init__(self, program: Path, environment: Mapping[str, str]) -> None:
        self._program = program
        self._environment = dict(environment)
        self._lock = threading.Lock()
        #: Until when each may run, by the monotonic clock.
        self._running: dict[subprocess.Popen[bytes], float] = {}
        self._interrupted: set[subprocess.Popen[bytes]] = set()
        self._stopping = False

    def run(
        self,
        arguments: list[str],
        folder: Path,
        *,
        deadline_seconds: float,
        on_start: Callable[[ProcessId], None] | None = None,
        stdin: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Completed:
        """Run to the end, or until the deadline or `interrupt`.

        `on_start` is told the process before it is waited for; if it raises, the process is ended and the error goes on.
        An interrupted one has INTERRUPT_GRACE_SECONDS to end. Raises OutcomeUnknown when the command was cut short,
        SetupError when it cannot be started.
        """
        # Files and not pipes: a plugin that outlives its engine would hold a pipe open, and keep this waiting.
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            limit = time.monotonic() + deadline_seconds
            process = self._start(
                arguments, folder, stdin=stdin, outputs=(out, err), environment=environment or {}, limit=limit
            )
            identity = ProcessId.of(process.pid)
            _GUARD.begin(identity)
            try:
                if on_start is not None:
                    on_start(identity)
                if not self._wait(process):
                    late = process not in self._interrupted
                    self._interrupt(process)
                    self._wait(process)
                    raise OutcomeUnknown(
                        f"the engine was ended after its deadline of {deadline_seconds:g} s"
                        if late
                        else f"the engine was ended {INTERRUPT_GRACE_SECONDS:g} s after it was told to stop"
                    )
            finally:
                # Whatever happened, nothing of this session stays: plugins do not always notice that their engine is gone.
                end_session(identity, 0.5)
                process.wait()
                _GUARD.end(identity)
                with self._lock:
                    self._running.pop(process)
                    self._interrupted.discard(process)
            if process.returncode < 0:
                raise OutcomeUnknown(f"the engine was ended by signal {-process.returncode}")
            return Completed(code=process.returncode, stdout=_text(out), stderr=_text(err))

    def interrupt(self, *, for_good: bool = True) -> None:
        """Ask every running command once to stop after the step it is at; `for_good`: and start no more."""
        with self._lock:
            self._stopping = self._stopping or for_good
            running = list(self._running)
        for process in running:
            self._interrupt(process)

    def _interrupt(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            # A second interrupt would make the engine leave at once, with its step half recorded.
            if process not in self._running or process in self._interrupted:
                return
            self._interrupted.add(process)
            self._running[process] = time.monotonic() + INTERRUPT_GRACE_SECONDS
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)

    def _wait(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait for the process until its limit, which an interrupt moves; gives whether it ended."""
        while (left := self._running[process] - time.monotonic()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=min(left, _LOOK_SECONDS))
                return True
        return False

    def _start(
        self,
        arguments: list[str],
        folder: Path,
        *,
        stdin: str | None,
        outputs: tuple[IO[bytes], IO[bytes]],
        environment: Mapping[str, str],
        limit: float,
    ) -> subprocess.Popen[bytes]:
        command = [str(self._program), "--non-interactive", *arguments]
        guard = shutil.which("setpriv")
        if guard:
            # An engine must not go on alone when the loop was killed: interrupted, it still writes its state.
            command = [guard, "--pdeathsig", "INT", *command]
        with _source(stdin) as source, self._lock:
            if self._stopping:
                raise OutcomeUnknown("the engine was not started: this process is stopping")
            try:
                process = subprocess.Popen(
                    command,
                    cwd=folder,
                    env={**self._environment, **environment},
                    stdin=source,
                    stdout=outputs[0],
                    stderr=outputs[1],
                    start_new_session=True,
                )
            except OSError as error:
                raise SetupError(f"pulumi could not be started from {self._program}: {error.strerror}") from error
            self._running[process] = limit
        return process


@contextlib.contextmanager
def _source(text: str | None) -> Iterator[IO[bytes] | int]:
    if text is None:
        yield subprocess.DEVNULL
        return
    with tempfile.TemporaryFile() as file:
        file.write(text.encode())
        file.seek(0)
        yield file


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", errors="replace")
