"""Locks that a dead engine left in the state's backend: broken one by one, by their exact key, and only with proof."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from orca_infra.errors import StackLock
from orca_infra.process import ProcessId, boot_id, is_alive
from orca_infra.stack.backend import Backend, open_backend
from orca_infra.stack.command import INTERRUPT_GRACE_SECONDS
from orca_infra.stack.engine import PROJECT

#: What two hosts' clocks may differ by, and what a deadline may be kept late by.
_MARGIN_SECONDS = 60.0


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
    end: datetime = row["started_at"] + timedelta(seconds=row["deadline_seconds"] + INTERRUPT_GRACE_SECONDS)
    return bool(row["started_at"] - margin <= lock.taken_at <= end and row["now"] > end + margin)


def break_lock(backend_url: str, lock: StackLock) -> None:
    """Delete exactly this lock. Raises Conflict for a backend where that is not known how, Transient when it is away."""
    with open_backend(backend_url) as backend:
        backend.delete(lock.key)


def free_dead_locks(backend: Backend, stack: str, operations: list[dict[str, Any]]) -> bool:
    """Delete the stack's locks whose holders are proven to be gone; gives whether none is left."""
    is_free = True
    for key, lock in _locks(backend, stack):
        if lock is not None and holder_is_dead(lock, operations):
            backend.delete(key)
        else:
            is_free = False
    return is_free


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
            yield key, StackLock(key=key, host=str(holder["hostname"]), pid=int(holder["pid"]), taken_at=None)
        except (ValueError, KeyError, TypeError):
            yield key, None
