"""One leader among any number of loops: a session-level advisory lock on a connection of its own."""

from __future__ import annotations

import threading

from orca_infra.db.connection import Session
from orca_infra.errors import NotLeader, Transient

# A bigint key stands in pg_locks as two halves, with objsubid 1.
_IS_OURS = """
    l.locktype = 'advisory' and l.granted and l.objsubid = 1
    and ((l.classid::bigint << 32) | l.objid::bigint) = hashtextextended('orca.leader', 0)"""
_ACQUIRE = "select pg_try_advisory_lock(hashtextextended('orca.leader', 0))"
# Asked of the server each time: behind a pooler in transaction mode another session answers, and does not hold the lock.
_HELD = f"select exists (select from pg_locks l where {_IS_OURS} and l.pid = pg_backend_pid())"
_HOLDER = f"""
select a.pid, coalesce(host(a.client_addr), 'this host'), to_char(a.backend_start, 'YYYY-MM-DD HH24:MI:SS')
from pg_locks l join pg_stat_activity a on a.pid = l.pid where {_IS_OURS}"""


class Leader:
    """Holds the lead of this database's stack family from `acquire` until `release` or the connection's end.

    Any number of threads may verify it at the same time.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._session: Session | None = None
        self._lock = threading.Lock()

    def acquire(self) -> bool:
        """Try to become leader; False when another is. Raises Transient when the database is away."""
        session = Session(self._url, "orca-infra leader")
        row = session.row(_ACQUIRE)
        if row is None or not row[0]:
            session.close()
            return False
        self._session = session
        return True

    def verify(self) -> None:
        """Raises NotLeader unless the lock is held at this moment; called before every write and engine start."""
        with self._lock:
            if self._session is None:
                raise NotLeader("this process does not lead")
            try:
                row = self._session.row(_HELD)
            except Transient as error:
                self._close()
                raise NotLeader(f"the lead was lost with its connection: {error}") from error
            if row is None or not row[0]:
                self._close()
                raise NotLeader(
                    "the lead was lost: its lock is no longer held (is ORCA_DB a pooler in transaction mode?)"
                )

    def release(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None


def holder(url: str) -> str:
    """Who leads now, for people; empty when nobody does."""
    session = Session(url)
    row = session.row(_HOLDER)
    session.close()
    return "" if row is None else f"server process {row[0]}, connected from {row[1]} since {row[2]}"
