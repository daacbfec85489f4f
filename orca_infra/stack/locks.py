"""Locks that a dead engine left in the state's backend: broken one by one, by their exact key, and only with proof."""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.parse import unquote, urlsplit

from orca_infra.db.connection import Session
from orca_infra.errors import Conflict, StackLock
from orca_infra.process import ProcessId, boot_id, is_alive


def holder_is_dead(lock: StackLock, operations: list[dict[str, object]]) -> bool:
    """Whether the process that took this lock is proven to be gone.

    `operations` are the ledger's rows of the stack (pid, process_started, host, boot_id). A holder on another host, or one
    that the ledger does not know and whose pid is in use, may be alive: False.
    """
    if lock.host != socket.gethostname():
        return False
    known = [row for row in operations if row["pid"] == lock.pid and row["host"] == lock.host]
    if known:
        row = known[0]
        if row["boot_id"] != boot_id():
            return True
        return not is_alive(ProcessId(lock.pid, float(str(row["process_started"]))))
    return not Path(f"/proc/{lock.pid}").exists()


def break_lock(backend_url: str, lock: StackLock) -> None:
    """Delete exactly this lock. Raises Conflict for a backend where that is not known how, Transient when it is away."""
    parts = urlsplit(backend_url)
    if parts.scheme == "file":
        (Path(unquote(parts.netloc + parts.path)).expanduser() / lock.key).unlink(missing_ok=True)
    elif parts.scheme in {"postgres", "postgresql"}:
        # The engine puts the URL's path, which is the database's name, before every key.
        prefixes = {parts.path.strip("/"), unquote(parts.path).strip("/")}
        session = Session(backend_url)
        session.row(
            "delete from pulumi_state where key = any(%(keys)s)",
            {"keys": [f"{prefix}/{lock.key}" for prefix in prefixes]},
        )
        session.close()
    else:
        raise Conflict(
            f"a dead engine's lock {lock.key} is left in a {parts.scheme} backend: delete it with `pulumi cancel`"
        )
