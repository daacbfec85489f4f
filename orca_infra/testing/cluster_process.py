"""The processes of a test cluster: started so that they never outlive their owner, with a log and a count of their CPU."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

from orca_infra.errors import SetupError
from orca_infra.process import ProcessId
from orca_infra.stack.tools import LINKS, remedy, search_path

_KILL_WAIT_SECONDS = 60.0
_LOG_LINES = 6
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


def find_program(name: str) -> Path:
    """The program: of $KUBEBUILDER_ASSETS, of what tools/build.py found good enough, or of PATH.

    Raises SetupError naming the command that gets it.
    """
    folders = [os.environ.get("KUBEBUILDER_ASSETS", ""), str(LINKS), search_path()]
    found = shutil.which(name, path=os.pathsep.join(folder for folder in folders if folder))
    if found is None:
        raise SetupError(f"the program {name!r} was not found; {remedy(name)}")
    return Path(found)


class Starter:
    """The thread that starts the processes.

    The kernel ends them when the thread that started them ends (prctl(2), PR_SET_PDEATHSIG), so it is one that lives as
    long as the cluster, whoever asks.
    """

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[
            tuple[Future[subprocess.Popen[bytes]], Callable[[], subprocess.Popen[bytes]]] | None
        ]
        self._asked = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="cluster-starter", daemon=True)
        self._thread.start()

    def start(self, command: Sequence[str], folder: Path, log: Path) -> subprocess.Popen[bytes]:
        """Start a command in a session of its own; it gets SIGKILL when this process ends, however that comes."""
        guard = shutil.which("setpriv")
        guarded = [guard, "--pdeathsig", "KILL", *command] if guard else list(command)

        def start() -> subprocess.Popen[bytes]:
            with log.open("ab") as output:
                return subprocess.Popen(
                    guarded,
                    cwd=folder,
                    # Nothing of the caller's: no KWOK_ setting, no proxy, no kubeconfig, none of its secrets.
                    env={"PATH": os.environ.get("PATH", os.defpath), "HOME": str(folder)},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )

        result: Future[subprocess.Popen[bytes]] = Future()
        self._asked.put((result, start))
        return result.result()

    def close(self) -> None:
        """End the thread, and with it whatever it started and still runs."""
        self._asked.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (asked := self._asked.get()) is not None:
            result, start = asked
            try:
                result.set_result(start())
            except OSError as error:
                result.set_exception(error)


class ServerProcess:
    """One program of the cluster, which can be ended and started again."""

    def __init__(self, name: str, command: Sequence[str], folder: Path) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._command = list(command)
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._cpu_seconds = 0.0  # of the ended ones

    def start(self, starter: Starter) -> None:
        """Start it, if it does not run. Raises SetupError when it cannot be."""
        if self._process is not None:
            return
        try:
            self._process = starter.start(self._command, self._folder, self.log)
        except OSError as error:
            raise SetupError(f"{self.name} could not be started from {self._command[0]}: {error.strerror}") from error

    def kill(self, first_signal: signal.Signals = signal.SIGKILL) -> None:
        """End it and wait until it is gone: at once, since its data are a test's, or by a signal that it is to hear first."""
        process, self._process = self._process, None
        if process is not None:
            self._cpu_seconds += _cpu_seconds(process.pid)
            process.send_signal(first_signal)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_KILL_WAIT_SECONDS)
                return
            process.kill()
            process.wait(_KILL_WAIT_SECONDS)

    def check(self) -> None:
        """Raises SetupError with the last lines of the log when it ended by itself."""
        if self._process is not None and self._process.poll() is not None:
            lines = self.log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
            raise SetupError(
                f"{self.name} ended by itself (code {self._process.returncode}); its last words:\n" + "\n".join(lines)
            )

    def identity(self) -> ProcessId | None:
        """Which process it is, or None while it is ended."""
        return None if self._process is None else ProcessId.of(self._process.pid)

    def cpu_seconds(self) -> float:
        """The user and system CPU time that it used so far, with that of its earlier lives."""
        return self._cpu_seconds + (0.0 if self._process is None else _cpu_seconds(self._process.pid))


def _cpu_seconds(pid: int) -> float:
    """Utime and stime of proc(5), /proc/pid/stat; a process that is gone counts nothing."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_A_SECOND
