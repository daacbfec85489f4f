"""Whose lock may be broken: a holder that is proven dead, and no other."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from orca_infra.errors import Conflict, StackLock
from orca_infra.process import ProcessId, boot_id
from orca_infra.stack import locks
from orca_infra.stack.backend import open_backend
from orca_infra.stack.locks import free_dead_locks, free_own_locks, holder_is_dead, lock_folder

BEGUN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
HERE = socket.gethostname()


def lock(host: str = "elsewhere", pid: int = 4242, taken_after_seconds: float = 2) -> StackLock:
    return StackLock(key="k", host=host, pid=pid, taken_at=BEGUN + timedelta(seconds=taken_after_seconds))


def operation(now_after_seconds: float = 10_000, **more: Any) -> dict[str, Any]:
    return {
        "pid": 4242,
        "process_started": 12.5,
        "host": "elsewhere",
        "boot_id": "another",
        "outcome": None,
        "started_at": BEGUN,
        "deadline_seconds": 900.0,
        "now": BEGUN + timedelta(seconds=now_after_seconds),
        **more,
    }


@pytest.mark.parametrize(("now_after_seconds", "dead"), [(60, False), (900 + 20 + 59, False), (900 + 20 + 61, True)])
def test_on_another_host_an_engine_is_dead_once_its_deadline_and_its_grace_are_over(
    now_after_seconds: float, dead: bool
) -> None:
    assert holder_is_dead(lock(), [operation(now_after_seconds)]) is dead


@pytest.mark.parametrize(
    "operations",
    [
        [],
        [operation(pid=4243)],
        [operation(host="a third")],
        [operation(outcome="Done")],
        [operation(deadline_seconds=None)],
    ],
)
def test_on_another_host_a_holder_that_the_ledger_does_not_know_may_be_alive(operations: list[dict[str, Any]]) -> None:
    assert not holder_is_dead(lock(), operations)


def test_a_lock_that_was_taken_after_that_operation_was_over_is_another_process_s() -> None:
    assert not holder_is_dead(lock(taken_after_seconds=5000), [operation()])
    assert not holder_is_dead(StackLock(key="k", host="elsewhere", pid=4242), [operation()])


def test_on_this_host_the_very_process_is_looked_at() -> None:
    me = ProcessId.of(os.getpid())
    mine: dict[str, Any] = {"host": HERE, "pid": me.pid, "boot_id": boot_id()}
    alive = operation(**mine, process_started=me.started)
    assert not holder_is_dead(lock(HERE, me.pid), [alive])
    assert holder_is_dead(lock(HERE, me.pid), [operation(**mine, process_started=me.started - 1)])
    assert holder_is_dead(lock(HERE, me.pid), [{**alive, "boot_id": "an earlier one"}])
    assert not holder_is_dead(lock(HERE, me.pid), [])


def test_what_our_own_dead_engine_held_is_freed_and_nothing_else(tmp_path: Path) -> None:
    ended = subprocess.Popen(["/bin/sleep", "60"])
    process = ProcessId.of(ended.pid)
    folder = tmp_path / ".pulumi/locks/organization/orca-infra/prod.machines.p"
    folder.mkdir(parents=True)
    held = {"own": (ended.pid, HERE), "by-hand": (1, HERE), "elsewhere": (ended.pid, "elsewhere")}
    for name, (pid, host) in held.items():
        (folder / f"{name}.json").write_text(f'{{"pid": {pid}, "hostname": "{host}"}}')
    (folder / "cut-off.json").write_text("{")

    def left() -> set[str]:
        return {path.stem for path in folder.iterdir()}

    free_own_locks(f"file://{tmp_path}", "prod.machines.p", process)
    assert left() == {*held, "cut-off"}, "it lives"
    ended.kill()
    ended.wait()
    free_own_locks(f"file://{tmp_path}", "prod.machines.q", process)
    assert left() == {*held, "cut-off"}, "another stack"
    free_own_locks(f"file://{tmp_path}", "prod.machines.p", process)
    assert left() == {"by-hand", "elsewhere", "cut-off"}


TORN = ("", "{", '{"pid": 1}', "[]")


def torn_locks(root: Path, name: str) -> Path:
    folder = root / lock_folder("prod.machines.p")
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(TORN):
        (folder / f"{number}{name}").write_text(text)
    return folder


def test_a_lock_that_was_never_written_to_its_end_is_nobodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a full disk leaves, or an engine that was killed in writing it; one that is just being written is left alone."""
    monkeypatch.setattr(locks, "_WRITING_SECONDS", 0)
    me = ProcessId.of(os.getpid())
    mine = operation(host=HERE, pid=me.pid, boot_id=boot_id(), process_started=me.started)
    folder = torn_locks(tmp_path, ".json.18ecc628.tmp")
    with open_backend(f"file://{tmp_path}") as backend:
        assert free_dead_locks(backend, "prod.machines.p", [mine])
        assert list(folder.iterdir()) == []

        whole = f'{{"pid": {me.pid}, "hostname": "{HERE}", "timestamp": "2026-01-02T03:04:07.123456789Z"}}'
        (folder / "1.json.18.tmp").touch()
        monkeypatch.setattr(locks, "_WRITING_SECONDS", 0.01)
        monkeypatch.setattr(time, "sleep", lambda _: (folder / "1.json.18.tmp").write_text(whole))
        assert not free_dead_locks(backend, "prod.machines.p", [mine])
        assert free_dead_locks(backend, "prod.machines.p", [{**mine, "process_started": 1.0}]), "its writer was killed"


def test_a_lock_that_lost_its_content_is_freed_once_no_engine_that_is_known_can_be_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "_WRITING_SECONDS", 0)
    me = ProcessId.of(os.getpid())
    mine = operation(host=HERE, pid=me.pid, boot_id=boot_id(), process_started=me.started)
    never_started = operation(60, host=HERE, pid=None, boot_id=boot_id(), process_started=None)
    folder = torn_locks(tmp_path, ".json")
    with open_backend(f"file://{tmp_path}") as backend:
        for maybe_alive in (mine, operation(60), never_started, operation(deadline_seconds=None)):
            assert not free_dead_locks(backend, "prod.machines.p", [operation(), maybe_alive])
            assert len(list(folder.iterdir())) == len(TORN)
        gone = [operation(), operation(60, outcome="Done"), {**mine, "process_started": 1.0}, {**mine, "boot_id": "-"}]
        assert free_dead_locks(backend, "prod.machines.p", gone)
        assert list(folder.iterdir()) == []


def test_a_backend_of_another_kind_is_left_to_the_engine_s_own_commands() -> None:
    with pytest.raises(Conflict, match="in a s3 backend is for `pulumi cancel`"), open_backend("s3://bucket"):
        pass
