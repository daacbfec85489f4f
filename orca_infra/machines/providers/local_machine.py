"""Boots one machine of the local cloud: writes down which process it is, then becomes what the machine runs.

    python -P -m orca_infra.machines.providers.local_machine <the machine's folder> <uid>

The machine's process writes this itself, because whoever made it may be killed at any instant. It does so under the cloud's
lock and only while its record is there, so that a machine that was deleted meanwhile never comes up. Here is also how a
cloud's folder looks on disk, which `local_cloud` shares:

    cloud.json, faults.json, hurried, lock
    machines/<name>/record.json    what was asked for and what was given; there from the machine's first instant
                    process.json   pid, start and boot; there once it boots
                    console.log    what it prints
    machines/.new-*, .gone-*       what an interrupted create or delete left; nothing runs of it
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TypedDict
from uuid import uuid4

from orca_infra.errors import Transient
from orca_infra.process import ProcessId, boot_id

RECORD = "record.json"
PROCESS = "process.json"
CONSOLE = "console.log"

BOOT_SECONDS = 60.0
"""A record that has no process after this is a machine that is stopped, and its launcher, should it still come, gives up."""

_LOCK_SECONDS = 30.0


class Record(TypedDict):
    """A machine on disk. `state` is empty, or what it was made to be (`stopped`, `preempted`)."""

    name: str
    uid: str
    location: str
    type: str
    labels: dict[str, str]
    argv: list[str]
    created_at: str
    state: str


class Process(TypedDict):
    """The machine's process on disk, see `ProcessId`."""

    pid: int
    started: float
    boot: str


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the cloud's lock; whoever dies lets go of it.

    Raises:
        Transient: somebody held it for 30 s.
        OSError: the folder is missing.

    """
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise Transient(f"UNAVAILABLE: {folder}/lock was held for {_LOCK_SECONDS:.0f} s") from None
                time.sleep(0.005)
        yield
    finally:
        os.close(handle)


def write_json(path: Path, value: object) -> None:
    """Writes the file whole or not at all, readable by its owner only."""
    draft = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump(value, file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def read_record(machine: Path) -> Record | None:
    """The machine's record, or None when there is no such machine (or not any more)."""
    try:
        record: Record = json.loads((machine / RECORD).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    return record


def read_process(machine: Path, boot: str) -> ProcessId | None:
    """The machine's process, dead or alive; None when it has none yet, or had it before this boot."""
    try:
        process: Process = json.loads((machine / PROCESS).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    return ProcessId(process["pid"], process["started"]) if process["boot"] == boot else None


def age_seconds(record: Record) -> float:
    """How long ago the machine was made, by this machine's clock."""
    return (datetime.now(UTC) - datetime.fromisoformat(record["created_at"])).total_seconds()


def main(arguments: Sequence[str]) -> int:
    """Boots the machine of this folder and uid; returns only when it does not come up."""
    machine, uid = Path(arguments[0]), arguments[1]
    with locked(machine.parent.parent):
        record = read_record(machine)
        if record is None or record["uid"] != uid or record["state"]:
            print(f"machine {machine.name} was removed or stopped before it booted", flush=True)
            return 1
        if age_seconds(record) > BOOT_SECONDS:
            print(f"machine {machine.name} did not boot within {BOOT_SECONDS:.0f} s and counts as stopped", flush=True)
            return 1
        me = ProcessId.of(os.getpid())
        process: Process = {"pid": me.pid, "started": me.started, "boot": boot_id()}
        write_json(machine / PROCESS, process)
    os.chdir(machine)
    program = sys.executable if record["argv"][0] == "python" else record["argv"][0]
    try:
        os.execvp(program, [program, *record["argv"][1:]])  # noqa: S606  (the machine boots what it was told to)
    except OSError as error:
        print(f"machine {machine.name} cannot boot: {program}: {error.strerror}", flush=True)
        return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
