"""Record what the real engine says: `.venv/bin/python tests/engine/record_samples.py` renews tests/unit/samples/engine.

Each sample is one run of pulumi: its exit code, its words and the lines of its event log that are not noise. What names
this machine or this day is replaced; the rest is the engine's.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from orca_infra.errors import OrcaError
from orca_infra.machines.program import machine_program
from orca_infra.machines.providers.local_cloud import LocalCloud
from orca_infra.process import ProcessId, end_session
from orca_infra.stack import engine as engine_module
from orca_infra.stack.command import Completed
from orca_infra.stack.engine import Engine, EngineConfig
from orca_infra.stack.outcome import Events, raise_for, read_events
from orca_infra.stack.program import Program, Registrar

SAMPLES = Path(__file__).parents[1] / "unit" / "samples" / "engine"
STACK = "test.machines.p"
TYPE = "orca:index:Machine"
_NOISE = (
    "preludeEvent",
    "cancelEvent",
    "stdoutEvent",
    "resourcePreEvent",
    "progressEvent",
    "policyEvent",
    "summaryEvent",
)
_BULKY = ("inputs", "detailedDiff", "provider", "protect", "retainOnDelete", "initErrors", "keys", "diffs", "logical")


class Recorder:
    """The engine in a folder of its own, with what each run said."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cloud = LocalCloud(folder / "cloud")
        self.cloud.configure({}, 0.0, {})
        (folder / "state").mkdir()
        self.passphrase = folder / "passphrase"
        self.passphrase.write_text("one passphrase\n")
        self.engine = self.make_engine(f"file://{folder / 'state'}")
        self.lines: list[str] = []
        self.said: list[tuple[Completed, list[str]]] = []
        self.processes: list[ProcessId] = []

    def make_engine(self, backend_url: str, passphrase: Path | None = None) -> Engine:
        """An engine; with a passphrase of its own also in a folder of its own, since that keeps the other's salt."""
        folder = self.folder / ("engine" if passphrase is None else "engine-of-another")
        return Engine(
            EngineConfig(backend_url=backend_url, passphrase_file=passphrase or self.passphrase, folder=folder)
        )

    def watch(self) -> None:
        """Look over the engine's shoulder: at what it reads of each run of pulumi."""

        def reading(lines: Iterable[str]) -> Events:
            self.lines = list(lines)
            return read_events(self.lines)

        def raising(completed: Completed, events: Events, what: str) -> None:
            self.said.append((completed, self.lines))
            self.lines = []
            raise_for(completed, events, what)

        vars(engine_module).update(read_events=reading, raise_for=raising)

    def up(self, name: str, engine: Engine | None = None, stack: str = STACK, /, **more: str) -> None:
        declaration = {
            "folder": str(self.cloud.folder),
            "name": name,
            "location": "a",
            "type": "small",
            "labels": {},
            "argv": ["/bin/sleep", "60"],
            "environment": {"ORCA_TOKEN": "{{orca-token}}"},
            **more,
        }
        self.run(engine or self.engine, machine_program(TYPE, {name: (declaration, 's3cr3t"x')}), name, stack)

    def run(self, engine: Engine, program: Program, name: str, stack: str = STACK) -> None:
        urn = f"urn:pulumi:{stack}::orca-infra::{TYPE}::{name}"
        engine.up(stack, program, targets=(urn,), deadline_seconds=60, on_start=self.started)

    def started(self, process: ProcessId) -> None:
        self.processes.append(process)

    def record(self, name: str, act: Callable[[], object]) -> None:
        """Do it and keep what the last run of pulumi said."""
        self.said.clear()
        try:
            act()
        except OrcaError as error:
            print(f"{name}: {type(error).__name__}: {self.plain(str(error))}")
        else:
            print(f"{name}: well")
        if not self.said:
            print(f"{name}: NOT RECORDED")
            return
        completed, lines = self.said[-1]
        sample = {
            "code": completed.code,
            "stdout": self.plain(completed.stdout),
            "stderr": self.plain(completed.stderr),
            "events": [self.plain(line) for line in map(shorten, lines) if line],
        }
        (SAMPLES / f"{name}.json").write_text(json.dumps(sample, indent=1, ensure_ascii=False) + "\n")

    def plain(self, text: str) -> str:
        """Without what names this machine or this day."""
        text = text.replace(str(self.folder), "/tmp/home").replace(str(Path.cwd()), "/tmp/checkout")
        text = text.replace(socket.gethostname(), "host-1").replace(f"{os.environ.get('USER', 'root')}@", "user@")
        text = re.sub(r"/[^\s\"]+/(\w+\.py)", r"/tmp/\1", text)
        text = re.sub(r"/\S+/(?:pulumi-resource-orca|pulumi)\b", "/tmp/bin/pulumi", text)
        text = re.sub(r"\(pid \d+\)", "(pid 4242)", text)
        text = re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d)", "2026-01-02T03:04:05Z", text)
        return re.sub(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", "lock-uuid", text)


def shorten(line: str) -> str:
    """The line without what nobody reads; empty when all of it is."""
    event = json.loads(line)
    if any(kind in event for kind in _NOISE) or '"debug"' in line or '"warning"' in line:
        return ""
    event.pop("timestamp", None)
    metadata = event.get("resOutputsEvent", event.get("resOpFailedEvent", {})).get("metadata", {})
    if metadata.get("type", "").startswith("pulumi:providers:"):
        return ""
    for state in (metadata, metadata.get("old") or {}, metadata.get("new") or {}):
        for key in _BULKY:
            state.pop(key, None)
    return json.dumps(event)


def slow(recorder: Recorder, name: str) -> threading.Thread:
    """An up whose create takes long; returns once it is at it."""
    recorder.cloud.arm("create", "", seconds=8)
    thread = threading.Thread(target=recorder.record, args=(name, lambda: recorder.up("m-slow")))
    thread.start()
    while (recorder.cloud.folder / "faults.json").exists():
        thread.join(0.05)
    return thread


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="orca-samples-", dir="/tmp"))
    recorder = Recorder(folder)
    recorder.watch()
    SAMPLES.mkdir(parents=True, exist_ok=True)
    engine, cloud = recorder.engine, recorder.cloud
    never = {"deadline_seconds": 60.0, "on_start": lambda _: None}
    try:
        recorder.record(
            "stack-missing",
            lambda: engine.refresh("test.machines.none", targets=(), **never),  # type: ignore[arg-type]
        )
        recorder.record("up-made", lambda: recorder.up("m-1"))
        recorder.record("up-same", lambda: recorder.up("m-1"))
        for code in ("LOCATION_OUT_OF_CAPACITY", "QUOTA_EXCEEDED"):
            cloud.arm("create", code, "none of small here")
            recorder.record(f"up-{code.lower().replace('_', '-')}", lambda: recorder.up("m-2"))
        recorder.record("up-already-exists", lambda: recorder.up("m-2", name="m-1"))
        recorder.record("up-check-failed", lambda: recorder.up("m-2", location=""))
        recorder.record("plugin-missing", lambda: recorder.run(engine, thing, "m-3"))
        recorder.record("program-raised", lambda: recorder.run(engine, raising, "m-3"))
        wrong = folder / "wrong"
        wrong.write_text("another passphrase\n")
        elsewhere = recorder.make_engine(f"file://{folder / 'state'}", wrong)
        engine.init("test.machines.empty")
        recorder.record("passphrase-wrong-in-a-step", lambda: recorder.up("m-1", elsewhere, "test.machines.empty"))
        recorder.record("passphrase-wrong", lambda: recorder.up("m-1", elsewhere))
        closed = recorder.make_engine("postgres://nobody:s3cr3t@127.0.0.1:1/none?sslmode=disable")
        recorder.record("state-unreachable", lambda: recorder.up("m-1", closed))
        closed = recorder.make_engine("postgres://nobody:s3cr3t@/none?sslmode=disable&host=%2Ftmp%2Fno&port=5432")
        recorder.record("state-socket-gone", lambda: recorder.up("m-1", closed))

        thread = slow(recorder, "interrupted")
        holder = recorder.processes[-1]
        recorder.record("locked", lambda: recorder.up("m-4"))
        os.kill(holder.pid, signal.SIGINT)
        thread.join()
        cloud.arm("delete", "UNAVAILABLE", "try later")
        targets = (f"urn:pulumi:{STACK}::orca-infra::{TYPE}::m-1",)
        recorder.record("destroy-failed", lambda: engine.destroy(STACK, targets=targets, **never))  # type: ignore[arg-type]
        cloud.delete("m-1")
        recorder.record("refresh-gone", lambda: engine.refresh(STACK, targets=targets, **never))  # type: ignore[arg-type]
        recorder.up("m-5")
        targets = (f"urn:pulumi:{STACK}::orca-infra::{TYPE}::m-5",)
        recorder.record("destroy-done", lambda: engine.destroy(STACK, targets=targets, **never))  # type: ignore[arg-type]
        record_broken_states(recorder)
        record_lock_of_postgres(recorder)
    finally:
        for process in recorder.processes:
            end_session(process, 0.5)
        (cloud.folder / "faults.json").unlink(missing_ok=True)
        for machine in cloud.list():
            cloud.delete(machine.name)
        shutil.rmtree(folder)


def record_broken_states(recorder: Recorder) -> None:
    """A state that does not fit together, and one that is cut off."""
    stack = "test.machines.broken"
    recorder.engine.init(stack)
    path = recorder.folder / "state" / ".pulumi" / "stacks" / engine_module.PROJECT / f"{stack}.json"
    whole = json.loads(path.read_text())
    orphan = {"urn": f"urn:pulumi:{stack}::orca-infra::{TYPE}::m-1", "custom": True, "id": "m-1", "type": TYPE}
    whole["checkpoint"]["latest"]["resources"] = [{**orphan, "parent": f"urn:pulumi:{stack}::orca-infra::{TYPE}::m-0"}]
    path.write_text(json.dumps(whole))
    recorder.record("state-broken", lambda: recorder.up("m-1", recorder.engine, stack))
    recorder.record("state-broken-seen", lambda: recorder.engine.check(stack))
    path.write_text(json.dumps(whole)[:100])
    recorder.record("state-cut-off", lambda: recorder.up("m-1", recorder.engine, stack))


def record_lock_of_postgres(recorder: Recorder) -> None:
    """The same lock with the state in Postgres."""
    from orca_infra.db import embedded
    from orca_infra.db.connection import backend_url

    recorder.folder.chmod(0o755)
    try:
        engine = recorder.make_engine(backend_url(embedded.start(recorder.folder / "postgres")))
        recorder.cloud.arm("create", "", seconds=4)
        thread = threading.Thread(target=lambda: recorder.up("m-6", engine))
        thread.start()
        while (recorder.cloud.folder / "faults.json").exists():
            thread.join(0.05)
        recorder.record("locked-postgres", lambda: recorder.up("m-7", engine))
        thread.join()
    finally:
        embedded.stop(recorder.folder / "postgres")


def thing(registrar: Registrar) -> None:
    registrar.register("nosuch:index:Thing", "m-3", {}).result()


def raising(_registrar: Registrar) -> None:
    raise ZeroDivisionError("a mistake of the program")


if __name__ == "__main__":
    main()
