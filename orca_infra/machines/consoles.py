"""What machines said whose worker never showed up: a file each, kept for as long as the machine's row.

A broken image has one saved every quarter of an hour, for as long as it is broken.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

_SUFFIX = ".console.log"


def console_path(logs: Path, name: str) -> Path:
    """Where the console of a machine is kept."""
    return logs / f"{name}{_SUFFIX}"


def saved_consoles(logs: Path) -> list[str]:
    """The machines of which one is kept."""
    return [path.name.removesuffix(_SUFFIX) for path in logs.glob(f"*{_SUFFIX}")]


def delete_consoles(logs: Path, names: Collection[str]) -> None:
    """Forget what these machines said; a file that cannot be deleted now is deleted another time."""
    for name in names:
        with suppress(OSError):
            console_path(logs, name).unlink()
