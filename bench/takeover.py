"""How soon another loop leads: after the leader's process was killed, and after its host went without a word.

Two real loops on a Postgres over TCP. The host that is gone is a leader whose connection the kernel drops all packets of, so
that the server has to notice by itself. The floor is an orderly end (SIGTERM), where the lead is handed back.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median

from harness import progress, report

from orca_infra.db.connection import Database, libpq_environment
from orca_infra.testing.tcp_postgres import TcpPostgres, silence

ROUNDS = 5
_LIMIT_SECONDS = 60.0


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="orca-bench-", dir="/tmp"))
    folder.chmod(0o755)
    (folder / "postgres").mkdir()
    (folder / "passphrase").write_text("a passphrase of the bench", encoding="utf-8")
    server = TcpPostgres(folder / "postgres")
    try:
        server.start()
        database = server.database()
        (folder / "orca.toml").write_text("[pools]\n", encoding="utf-8")
        killed = [after_signal(folder, server.url, database, signal.SIGKILL) for _ in range(ROUNDS)]
        ended = [after_signal(folder, server.url, database, signal.SIGTERM) for _ in range(ROUNDS)]
        gone = [after_silence(folder, server.url, database) for _ in range(ROUNDS)]
        database.close()
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)
    report(
        "takeover",
        figures={
            "death_seconds": median(killed),
            "death_most_seconds": max(killed),
            "silent_host_seconds": median(gone),
            "silent_host_most_seconds": max(gone),
        },
        floors={"orderly_end_seconds": median(ended)},
        targets={"death_most_seconds": 5.0, "silent_host_most_seconds": 15.0},
    )


def after_signal(folder: Path, url: str, database: Database, number: signal.Signals) -> float:
    """From the signal to the leader until the follower leads."""
    return after(lambda leader: leader.send_signal(number), folder, url, database, number.name)


def after_silence(folder: Path, url: str, database: Database) -> float:
    """From the last packet that the leader's host took until the follower leads."""
    port = int(libpq_environment(url)["PGPORT"])
    return after(lambda leader: silence_process(leader.pid, port), folder, url, database, "silent host")


def after(
    event: Callable[[subprocess.Popen[bytes]], None], folder: Path, url: str, database: Database, what: str
) -> float:
    with loop(folder, url, "leader") as leader:
        wait(lambda: leads(database, leader))
        with loop(folder, url, "follower") as follower:
            wait(lambda: b"following" in (folder / "follower.log").read_bytes())
            started = time.perf_counter()
            event(leader)
            wait(lambda: leads(database, follower))
            seconds = time.perf_counter() - started
    progress(f"{what}: {seconds:.1f} s")
    return seconds


@contextmanager
def loop(folder: Path, url: str, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """A real loop with a home of its own, killed at the end."""
    (folder / name).mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "ORCA_HOME": str(folder / name),
        "ORCA_DB": url,
        "ORCA_CONFIG": str(folder / "orca.toml"),
        "ORCA_TOKEN_KEY": "a key of the bench, 32 bytes long",
        "PULUMI_CONFIG_PASSPHRASE_FILE": str(folder / "passphrase"),
    }
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [Path(sys.executable).parent / "orca-infra", "run"], env=environment, stdout=log, stderr=log
        )
    try:
        yield process
    except TimeoutError as error:
        error.add_note(f"the {name} said: {(folder / f'{name}.log').read_text()[-1000:]}")
        raise
    finally:
        process.kill()
        process.wait()


def leads(database: Database, process: subprocess.Popen[bytes]) -> bool:
    with database.snapshot() as transaction:
        holder = str(transaction.value("select holder from orca.lead"))
    return holder.startswith(f"pid {process.pid} on ")


def silence_process(pid: int, port: int) -> None:
    """Silence every connection that a process has to this port, by copies of its descriptors."""
    pidfd_getfd = 438
    process = os.pidfd_open(pid)
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        copy = ctypes.CDLL(None, use_errno=True).syscall(pidfd_getfd, process, int(entry.name), 0)
        with suppress(OSError), socket.socket(fileno=copy) as connection:
            if connection.getpeername()[1] == port:
                silence(connection.fileno())
    os.close(process)


def wait(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + _LIMIT_SECONDS
    while not is_so():
        if time.monotonic() > until:
            raise TimeoutError(f"nobody took over in {_LIMIT_SECONDS:.0f} s")
        time.sleep(0.02)


if __name__ == "__main__":
    main()
