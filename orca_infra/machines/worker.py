"""A stand-in for orca's own worker, which the local provider's machines boot: `python -m orca_infra.machines.worker`.

orca's worker is a program of its own and not part of this package. This one does as much of it as the pools need to be seen
and tested: it says hello, takes runs, lets some time pass for each and ends them, through the same SQL functions and with
the same token. It runs no pipeline.

    ORCA_DB                    the database's connection URL
    ORCA_WORKER                its name, which is its machine's
    ORCA_TOKEN                 its token; once revoked, it shuts down
    ORCA_WORKER_SLOTS          how many runs at once (1)
    ORCA_HEARTBEAT_SECONDS     how often it says that it lives (10)
    ORCA_STANDIN_RUN_SECONDS   how long each run takes (1)
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FrameType

import psycopg
from psycopg.rows import TupleRow

_POLL_SECONDS = 0.2
_BACKOFF_SECONDS = 5.0

_Connection = psycopg.Connection[TupleRow]


class _Revoked(Exception):
    """The token is not, or no longer, good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the environment says; seconds."""

    database: str = field(repr=False)
    worker: str
    token: str = field(repr=False)
    slots: int
    heartbeat_seconds: float
    run_seconds: float

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Settings:
        """Reads the environment.

        Raises:
            KeyError: a variable that has no default is missing.
            ValueError: a number is none.

        """
        return cls(
            database=environment["ORCA_DB"],
            worker=environment["ORCA_WORKER"],
            token=environment["ORCA_TOKEN"],
            slots=int(environment.get("ORCA_WORKER_SLOTS", "1")),
            heartbeat_seconds=float(environment.get("ORCA_HEARTBEAT_SECONDS", "10")),
            run_seconds=float(environment.get("ORCA_STANDIN_RUN_SECONDS", "1")),
        )


class Worker:
    """Works on one connection, one step at a time; waiting for a run's end holds up nothing else."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._connection: _Connection | None = None
        self._running: dict[tuple[int, int], float] = {}  # run and start -> when it ends, monotonic
        self._next_heartbeat = 0.0
        self._backoff = _POLL_SECONDS

    def step(self) -> float:
        """Does what is due and returns how many seconds to wait until the next step.

        Raises:
            _Revoked: the token is not good.

        """
        try:
            connection = self._connected()
            self._hello(connection)
            self._end_due(connection)
            self._take(connection)
        except psycopg.Error as error:
            return self._away(error)
        self._backoff = _POLL_SECONDS
        return _POLL_SECONDS

    def _connected(self) -> _Connection:
        if self._connection is None:
            self._connection = psycopg.connect(
                self._settings.database,
                autocommit=True,
                connect_timeout=5,
                application_name=f"orca stand-in worker {self._settings.worker}"[:63],
            )
            self._connection.execute("set statement_timeout = '10s'")
            self._next_heartbeat = 0.0
            say("database reached")
        return self._connection

    def _hello(self, connection: _Connection) -> None:
        now = time.monotonic()
        if now >= self._next_heartbeat:
            _call(
                connection, "select orca.worker_hello(%s::text, %s::text, %s::int)", *self._me(), self._settings.slots
            )
            self._next_heartbeat = now + self._settings.heartbeat_seconds

    def _take(self, connection: _Connection) -> None:
        while len(self._running) < self._settings.slots:
            rows = _call(
                connection, "select run_id, start, pipeline from orca.worker_take(%s::text, %s::text)", *self._me()
            )
            if not rows:
                return
            run, start, pipeline = rows[0]
            self._running[run, start] = time.monotonic() + self._settings.run_seconds
            say(f"run {run} start {start} of {pipeline}: takes {self._settings.run_seconds:g} s")

    def _end_due(self, connection: _Connection) -> None:
        due = [key for key, ends in self._running.items() if ends <= time.monotonic()]
        for run, start in due:
            query = "select orca.worker_end(%s::text, %s::text, %s::bigint, %s::int, 'succeeded', null)"
            try:
                _call(connection, query, *self._me(), run, start)
                say(f"run {run} start {start}: succeeded")
            except (psycopg.OperationalError, psycopg.InterfaceError):
                raise  # ended once the database is back
            except psycopg.Error as error:
                say(f"run {run} start {start}: its end is not accepted: {_first_line(error)}")
            del self._running[run, start]

    def _away(self, error: psycopg.Error) -> float:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        wait = self._backoff
        self._backoff = min(_BACKOFF_SECONDS, self._backoff * 2)
        say(f"database away: {_first_line(error)}; next try in {wait:g} s")
        return wait

    def _me(self) -> tuple[str, str]:
        return self._settings.worker, self._settings.token


def say(line: str) -> None:
    """One line for the serial console, at once."""
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def main() -> int:
    """Works until the token is revoked or SIGTERM comes; either way it exits with 0."""
    signal.signal(signal.SIGTERM, _leave)
    say("stand-in for orca's own worker: it takes and ends runs, and runs no pipeline")
    try:
        settings = Settings.read(os.environ)
    except (KeyError, ValueError) as error:
        say(f"the environment is not complete: {type(error).__name__} {error}")
        return 2
    say(f"worker {settings.worker}, {settings.slots} slots")
    worker = Worker(settings)
    try:
        while True:
            time.sleep(worker.step())
    except _Revoked:
        say("token revoked: shutting down")
        return 0


def _call(connection: _Connection, query: str, *values: object) -> list[TupleRow]:
    """Calls one of orca's functions; only here does 28000 mean the token (at a connect it is the server's own refusal)."""
    try:
        return connection.execute(query.encode(), values).fetchall()
    except psycopg.errors.InvalidAuthorizationSpecification as error:
        raise _Revoked from error


def _first_line(error: psycopg.Error) -> str:
    """What may be shown of a database's error. That of a URL which cannot be parsed may quote it, password and all."""
    if isinstance(error, psycopg.ProgrammingError) and error.sqlstate is None:
        return "ORCA_DB is no connection URL"
    return (str(error).splitlines() or [type(error).__name__])[0]


def _leave(_number: int, _frame: FrameType | None) -> None:
    os.write(1, b"SIGTERM: leaving; what runs here is queued again by the loop\n")
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
