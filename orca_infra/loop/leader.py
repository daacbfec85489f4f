"""One leader among any number of loops: a session-level advisory lock on a connection of its own, and an epoch.

The lock says who leads. The epoch, a number that rises with each lead, fences whoever led before: every transaction in which
a leader writes asks the server first, in that same transaction, whether its epoch is still the last and its lock still held.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass

from orca_infra.db.connection import Session, Transaction, load_queries
from orca_infra.errors import NotLeader, SetupError, Transient

SQL = load_queries("lead")
_POOLER = (
    "ORCA_DB leads through a pooler in transaction mode, in which no loop can hold the lock that makes it the leader: "
    "give the loop a direct connection, or a pooler in session mode"
)


@dataclass(frozen=True, slots=True)
class _Lead:
    """A lead: its epoch, and the server process whose session holds its lock."""

    epoch: int
    pid: int


class Leader:
    """Holds the lead of this database's stack family from `acquire` until `release` or the connection's end.

    Any number of threads may use it at the same time. A loop that follows keeps its connection from one try to the next.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._session: Session | None = None
        self._pid = 0
        self._lead: _Lead | None = None
        self._lock = threading.Lock()

    def connect(self) -> None:
        """Make the connection that the lock will be held on; nothing happens when there is one.

        Raises SetupError behind a pooler in transaction mode, Transient when the database is away.
        """
        with self._lock:
            self._connect()

    def acquire(self) -> bool:
        """Try to become leader; False when another is. Raises what `connect` does."""
        with self._lock:
            session = self._connect()
            try:
                is_ours, is_held = session.row(SQL["acquire"], {"pid": self._pid}) or (False, False)
                if not is_ours:
                    raise SetupError(_POOLER)
                if not is_held:
                    return False
                begun = session.row(SQL["begin_lead"], {"holder": f"pid {os.getpid()} on {socket.gethostname()}"})
            except BaseException:
                self._close()
                raise
            assert begun is not None
            self._lead = _Lead(int(begun[0]), self._pid)
            return True

    @property
    def epoch(self) -> int | None:
        """The number of this lead; None while this loop does not lead."""
        return self._lead.epoch if self._lead else None

    def verify(self) -> None:
        """Raises NotLeader unless this loop leads at this moment; called before every write and engine start."""
        with self._lock:
            lead, session = self._lead, self._session
            if lead is None or session is None:
                raise NotLeader("this process does not lead")
            try:
                is_ours, leads = session.row(SQL["leads_here"], {"pid": lead.pid, "epoch": lead.epoch}) or (True, False)
            except Transient as error:
                self._close()
                raise NotLeader(f"the lead was lost with its connection: {error}") from error
            if is_ours and leads:
                return
            self._close()
            if not is_ours:
                raise NotLeader(f"the lead was lost: {_POOLER}")
            raise NotLeader("the lead was lost: its lock is no longer held, or another loop has led since")

    def guard(self, transaction: Transaction) -> None:
        """The same as a transaction's first statement; no later leader begins before that transaction has ended."""
        lead = self._lead
        if lead is None:
            raise NotLeader("this process does not lead")
        if not transaction.value(SQL["leads"], {"epoch": lead.epoch, "pid": lead.pid}):
            raise NotLeader("the lead was lost: its lock is no longer held, or another loop has led since")

    def release(self) -> None:
        """Let go of the lead; when this returns, another may have it. With the database away, it is free once it notices."""
        with self._lock:
            if self._lead is not None and self._session is not None:
                with suppress(Transient):
                    self._session.row(SQL["release"])
            self._close()

    def _connect(self) -> Session:
        if self._session is None:
            session = Session(self._url, "orca-infra leader")
            try:
                session.row(SQL["wait_little"])
                self._pid = _own_server_process(self._url, session)
            except BaseException:
                session.close()
                raise
            self._session = session
        return self._session

    def _close(self) -> None:
        self._lead = None
        if self._session is not None:
            self._session.close()
            self._session = None


def _own_server_process(url: str, session: Session) -> int:
    """The process that serves this session; raises SetupError when sessions have none of their own.

    A pooler in transaction mode gives the process of an idle session to whoever has a transaction to make.
    """

    def pid_of(one: Session) -> int:
        row = one.row(SQL["server_process"])
        assert row is not None
        return int(row[0])

    mine = pid_of(session)
    other = Session(url, "orca-infra look at poolers")
    try:
        other.row("begin")
        if pid_of(other) == mine or pid_of(session) != mine:
            raise SetupError(_POOLER)
        other.row("rollback")
    finally:
        other.close()
    return mine


def oust(url: str) -> None:
    """End the session of whoever leads. It notices at its next write, stops what it is at, and follows.

    Raises Transient when the database is away, or does not let this user do it.
    """
    session = Session(url)
    session.row(SQL["oust"])
    session.close()


def holder(url: str) -> str:
    """Who leads now, for people; empty when nobody does."""
    session = Session(url)
    row = session.row(SQL["holder"])
    session.close()
    return "" if row is None else f"server process {row[0]}, connected from {row[1]} since {row[2]}"
