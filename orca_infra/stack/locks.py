"""Locks that a dead engine left in the state's backend: broken one by one, by their exact key, and only with proof.

In a folder the engine writes a file aside, at the same place with `.tmp` at the end of its name, and renames it. On a full
disk, or when it is killed just then, that file stays, often empty; and the engine takes it for a lock, of nobody.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from orca_infra.errors import StackLock
from orca_infra.process import ProcessId, boot_id, is_alive
from orca_infra.stack.backend import ASIDE, Backend, open_backend
from orca_infra.stack.command import INTERRUPT_GRACE_SECONDS
from orca_infra.stack.engine import PROJECT
from orca_infra.stack.outcome import instant

#: What two hosts' clocks may differ by, and what a deadline may be kept late by.
_MARGIN_SECONDS = 60.0
#: A lock is written in far less.
_WRITING_SECONDS = 1.0


def holder_is_dead(lock: StackLock, operations: list[dict[str, Any]]) -> bool:
    """Whether the process that took this lock is proven to be gone.

    `operations` are the ledger's rows of the stack (pid, process_started, host, boot_id, started_at, now, outcome,
    deadline_seconds). Of this host, a process can be looked at. Of another, the operation has to be over: whatever became of
    its loop, no engine outlives its deadline and the grace that it is given then. A holder that the ledger does not know may
    be alive as long as its pid is in use here, and for ever elsewhere.
    """
    known = [row for row in operations if row["pid"] == lock.pid and row["host"] == lock.host]
    if lock.host != socket.gethostname():
        return any(_is_over(lock, row) for row in known)
    if known:
        row = known[0]
        if row["boot_id"] != boot_id():
            return True
        return not is_alive(ProcessId(lock.pid, float(str(row["process_started"]))))
    return not Path(f"/proc/{lock.pid}").exists()


def _is_over(lock: StackLock, row: dict[str, Any]) -> bool:
    """Whether the lock is that operation's, and the operation can't be under way any more."""
    if row["deadline_seconds"] is None or row["outcome"] == "Done" or lock.taken_at is None:
        return False
    margin = timedelta(seconds=_MARGIN_SECONDS)
    end = _latest_end(row)
    return bool(row["started_at"] - margin <= lock.taken_at <= end and row["now"] > end + margin)


def _latest_end(row: dict[str, Any]) -> datetime:
    began: datetime = row["started_at"]
    return began + timedelta(seconds=row["deadline_seconds"] + INTERRUPT_GRACE_SECONDS)


def _engine_is_gone(row: dict[str, Any]) -> bool:
    """Whether no engine of this operation can be alive."""
    if row["outcome"] == "Done":
        return True
    if row["host"] == socket.gethostname() and row["boot_id"] != boot_id():
        return True
    if row["host"] == socket.gethostname() and row["pid"] is not None:
        return not is_alive(ProcessId(row["pid"], float(row["process_started"])))
    return row["deadline_seconds"] is not None and row["now"] > _latest_end(row) + timedelta(seconds=_MARGIN_SECONDS)


def free_dead_locks(backend: Backend, stack: str, operations: list[dict[str, Any]]) -> bool:
    """Delete the stack's locks whose holders are proven to be gone; gives whether none is left."""
    is_free = True
    for key, lock in _locks(backend, stack):
        if holder_is_dead(lock, operations) if lock else _was_left_torn(backend, key, operations):
            backend.delete(key)
        else:
            is_free = False
    return is_free


def _was_left_torn(backend: Backend, key: str, operations: list[dict[str, Any]]) -> bool:
    """Whether nobody holds this lock that does not say whose it is.

    Nobody holds one that has not got its name yet: should its engine live after all, it fails to give it, and does nothing.
    One that has it lost its content with the host that wrote it; still, no engine that the ledger knows may be alive.
    """
    before = backend.read(key)
    time.sleep(_WRITING_SECONDS)
    is_still = backend.read(key) in {before, None}
    return is_still and (key.endswith(ASIDE) or all(map(_engine_is_gone, operations)))


def free_own_locks(backend_url: str, stack: str, process: ProcessId) -> None:
    """Delete the locks that an engine of ours left when it was ended; nothing happens while it lives.

    Raises what break_lock does.
    """
    if is_alive(process):
        return
    with open_backend(backend_url) as backend:
        for key, lock in _locks(backend, stack):
            if lock is not None and (lock.pid, lock.host) == (process.pid, socket.gethostname()):
                backend.delete(key)


def lock_folder(stack: str) -> str:
    """What the keys of the stack's locks begin with."""
    return f".pulumi/locks/organization/{PROJECT}/{stack}/"


def _locks(backend: Backend, stack: str) -> Iterator[tuple[str, StackLock | None]]:
    """The stack's locks by their keys; None for one that does not say whose it is."""
    for key in backend.keys(lock_folder(stack)):
        try:
            holder = json.loads(backend.read(key) or b"{}")
            host, pid = str(holder["hostname"]), int(holder["pid"])
            yield key, StackLock(key=key, host=host, pid=pid, taken_at=instant(holder.get("timestamp")))
        except (ValueError, KeyError, TypeError):
            yield key, None
