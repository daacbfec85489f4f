"""Stands in for orca in the containers of tests and of the demo: `orca resume RUN`, `orca dista head`, `orca dista worker`.

Nothing here is orca's own code. It does what this program relies on: the driver reads Postgres through ORCA_DB, finds the
head by the name in DISTA_HEAD, writes its log to its output, says in Postgres that its run succeeded, and ends; what its
pipeline is called makes it misbehave instead (`_MISBEHAVIOURS`). `orca runtime` stands in for a runtime: it waits, and says
when it could read its secrets. Put into an image by images.py; standard library and psycopg only, no import of this package.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

_SECRETS = Path("/var/run/secrets/orca")
_PATIENCE_SECONDS = 60.0
_POLL_SECONDS = 0.1
_READ_POLL_SECONDS = 0.005
_DISK_BYTES = 64 << 20
_BLOCK = 1 << 20
_IGNORED_SECONDS = 60.0
_HEAD_CODE = 7


def say(line: str) -> None:
    print(line, flush=True)


def resume(run: int) -> int:
    """The driver of one run."""
    # The image's, and never this package's: db/connection.py and the worker are the only ones here that import it. And only
    # now: the head and the workers have no use for it, and are quicker without.
    psycopg = importlib.import_module("psycopg")

    with psycopg.connect(os.environ["ORCA_DB"], connect_timeout=20, autocommit=True) as database:
        found = database.execute("select pipeline, start from orca.runs where id = %s", (run,)).fetchone()
        if found is None:
            say(f"driver: there is no run {run}")
            return 4
        pipeline, start = found
        say(f"driver: run {run}, start {start}, pipeline {pipeline}; Postgres {database.info.server_version // 10000}")
        head = os.environ.get("DISTA_HEAD")
        if head:
            say(f"driver: the head at {head} answers: {ask_head(head, 'driver')}")
        misbehave = _MISBEHAVIOURS.get(pipeline.partition(".")[0])
        if misbehave is not None:
            say(f"driver: it is to misbehave ({pipeline})")
            return misbehave()
        for step in (1, 2, 3):
            say(f"driver: step {step} of 3")
            time.sleep(float(os.environ.get("ORCA_STAND_IN_STEP_SECONDS", "0")))
        with database.transaction():
            database.execute("select set_config('orca.writer', 'driver', true)")
            database.execute(
                "update orca.runs set state = 'succeeded', ended_at = now()"
                " where id = %s and start = %s and state = 'running'",
                (run, start),
            )
    say(f"driver: run {run} succeeded")
    return 0


def ask_head(head: str, question: str) -> str:
    """What the head answers; its Pod, or its name, may come later than the driver."""
    host, _, port = head.rpartition(":")
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            with socket.create_connection((host, int(port)), timeout=10) as connection:
                connection.sendall(f"{question}\n".encode())
                return connection.makefile().readline().strip()
        except OSError as error:
            if time.monotonic() > deadline:
                return f"nothing ({error})"
            time.sleep(_POLL_SECONDS)


def _eat_memory() -> int:
    eaten = bytearray()
    while True:
        eaten += b"x" * _BLOCK


def _fill_disk() -> int:
    with Path("/tmp/filled").open("wb") as file:  # noqa: S108 - the container's own
        file.writelines(b"x" * _BLOCK for _ in range(_DISK_BYTES // _BLOCK))
    return _wait_for_the_end()


def _ignore_term() -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(_IGNORED_SECONDS)
    return 0


def _end_head() -> int:
    ask_head(os.environ["DISTA_HEAD"], "end")
    return _wait_for_the_end()


def _wait_for_the_end() -> int:
    while True:
        signal.pause()


#: What a driver does instead of its work, by its pipeline's name up to a dot.
_MISBEHAVIOURS: dict[str, Callable[[], int]] = {
    "eats-memory": _eat_memory,
    "fills-disk": _fill_disk,
    "never-ends": _wait_for_the_end,
    "ignores-term": _ignore_term,
    "exits-3": lambda: 3,
    "ends-its-head": _end_head,
}


def head() -> int:
    """Answers the driver, counts the workers that are connected."""
    workers: set[str] = set()
    server = socket.create_server(("", int(os.environ["DISTA_PORT"])))
    say(f"head: listens on {server.getsockname()[1]}")

    def serve(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection, connection.makefile() as lines:
            word, _, name = lines.readline().strip().partition(" ")
            say(f"head: {word} {name} is here")
            if word == "end":
                os._exit(_HEAD_CODE)
            if word == "worker":
                workers.add(name)
                connection.sendall(b"welcome\n")
                lines.readline()  # returns when the worker is gone
                workers.discard(name)
                return
            deadline = time.monotonic() + _PATIENCE_SECONDS / 2
            while not workers and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            connection.sendall(f"a head with {len(workers)} worker(s)\n".encode())

    while True:
        threading.Thread(target=serve, args=[server.accept()[0]], daemon=True).start()


def worker() -> int:
    """Holds a connection to the head, and takes a new one when that is lost."""
    host, _, port = os.environ["DISTA_HEAD"].rpartition(":")
    while True:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.settimeout(None)
            connection.sendall(f"worker {socket.gethostname()}\n".encode())
            for line in connection.makefile():
                say(f"worker: the head says {line.strip()}")
        time.sleep(_POLL_SECONDS)


def runtime() -> int:
    """Waits, and says once when its secrets became readable."""
    say("runtime: it waits")
    values: dict[str, str] = {}
    while not values:
        time.sleep(_READ_POLL_SECONDS)
        # The kubelet changes the whole directory in one step; its own names in it begin with two dots.
        values = {path.name: path.read_text() for path in _SECRETS.glob("*") if not path.name.startswith(".")}
    at = time.time()
    say("secrets: " + json.dumps({"at": at, "values": values}))
    return _wait_for_the_end()


def main(arguments: list[str]) -> int:
    # As PID 1 of a container it has no default reaction to a signal.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
    match arguments:
        case ["resume", run, *_]:
            return resume(int(run))
        case ["dista", "head"]:
            return head()
        case ["dista", "worker"]:
            return worker()
        case ["runtime"]:
            return runtime()
    say(f"this stand-in for orca does not know {arguments}")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
