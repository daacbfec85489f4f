"""The history that the engine keeps of every operation in the state's backend: bounded here, since nothing else does."""

from __future__ import annotations

import re

from orca_infra.errors import Conflict
from orca_infra.stack.backend import open_backend
from orca_infra.stack.engine import PROJECT

#: Operations of a stack that stay in its history.
KEPT = 20
_ENTRY = re.compile(r".*-(?P<number>\d+)\.(?:history|checkpoint)\.json")


def history_folder(stack: str) -> str:
    """What the keys of the stack's history begin with."""
    return f".pulumi/history/{PROJECT}/{stack}/"


def prune_history(backend_url: str, stack: str, kept: int = KEPT) -> int:
    """Delete all but the newest entries of a stack's history; gives how many keys went.

    Raises Transient when the backend is away; one of a kind that is not known here keeps its history.
    """
    try:
        with open_backend(backend_url) as backend:
            entries: dict[int, list[str]] = {}
            for key in backend.keys(history_folder(stack)):
                if found := _ENTRY.fullmatch(key):
                    entries.setdefault(int(found["number"]), []).append(key)
            old = [key for number in sorted(entries)[: max(0, len(entries) - kept)] for key in entries[number]]
            for key in old:
                backend.delete(key)
    except Conflict:
        return 0
    return len(old)
