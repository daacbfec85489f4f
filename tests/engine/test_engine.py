"""stack/engine.py on the real Pulumi engine, its state in files and in Postgres."""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orca_infra.db.connection import Session
from orca_infra.errors import (
    AuthFailed,
    Conflict,
    EngineFailed,
    NoCapacity,
    OrcaError,
    OutcomeUnknown,
    QuotaExceeded,
    Refused,
    SetupError,
    StackLocked,
    Transient,
)
from orca_infra.machines.program import machine_program
from orca_infra.machines.providers.local import LocalProvider
from orca_infra.machines.providers.local_cloud import LocalCloud, MachineRequest
from orca_infra.process import ProcessId, end_session, is_alive
from orca_infra.stack import command
from orca_infra.stack.engine import PROJECT, Engine, EngineConfig
from orca_infra.stack.outcome import ResourceChange, StackMissing, read_events
from orca_infra.stack.program import Registrar
from orca_infra.surroundings import Surroundings

pytestmark = pytest.mark.engine

STATES = pytest.mark.parametrize("state", ["file", "postgres"])
STACK = "test.machines.p"
TYPE = "orca:index:Machine"
TOKEN = 's3cr3t"x'


class Bench:
    """An engine, a cloud and the processes that the engine started."""

    def __init__(self, surroundings: Surroundings, background: Callable[..., Any]) -> None:
        self.background = background
        self.config = surroundings.engine
        self.url = surroundings.url
        self.home = surroundings.settings.home
        self.engine = Engine(self.config)
        self.cloud = LocalCloud(surroundings.cloud_folder)
        self.cloud.configure({}, 0.0, {})
        self.started: list[ProcessId] = []

    def up(
        self,
        name: str = "m-1",
        /,
        *,
        stack: str = STACK,
        token: str = TOKEN,
        engine: Engine | None = None,
        deadline: float = 180,
        **more: Any,
    ) -> tuple[ResourceChange, ...]:
        """Make one machine, which sleeps."""
        declaration = {
            "folder": str(self.cloud.folder),
            "name": name,
            "location": "a",
            "type": "small",
            "labels": {},
            "argv": ["/bin/sleep", "600"],
            "environment": {"ORCA_TOKEN": "{{orca-token}}"},
            **more,
        }
        return (engine or self.engine).up(
            stack,
            machine_program(TYPE, {name: (declaration, token)}),
            targets=(urn(name, stack),),
            deadline_seconds=deadline,
            on_start=self.started.append,
        )

    def destroy(self, name: str = "m-1", stack: str = STACK) -> tuple[ResourceChange, ...]:
        return self.engine.destroy(
            stack, targets=(urn(name, stack),), deadline_seconds=180, on_start=self.started.append
        )

    def slow_up(self, name: str = "m-1", **more: Any) -> Any:
        """An up whose create has no answer until `cloud.hurry()`; it is at it when this returns."""
        self.cloud.arm("create", "", seconds=3600)
        background = self.background(lambda: self.up(name, **more))
        # The fault is used up when the create begins.
        while (self.cloud.folder / "faults.json").exists():
            assert not background.ended, background.error
            time.sleep(0.02)
        return background

    def process_of(self, name: str) -> ProcessId:
        process = json.loads((self.cloud.folder / "machines" / name / "process.json").read_text())
        return ProcessId(process["pid"], process["started"])


def urn(name: str, stack: str = STACK) -> str:
    return f"urn:pulumi:{stack}::{PROJECT}::{TYPE}::{name}"


@pytest.fixture
def bench(surroundings: Callable[..., Surroundings], background: Callable[..., Any]) -> Iterator[Callable[..., Bench]]:
    """Makes a bench, with its state where asked; its engines are ended afterwards."""
    made: list[Bench] = []

    def make(state: str = "file") -> Bench:
        made.append(Bench(surroundings(state), background))
        return made[-1]

    yield make
    for one in made:
        for process in one.started:
            end_session(process, 0.2)


def lock_keys(bench: Bench) -> list[str]:
    """The locks that the state's backend holds."""
    if bench.config.backend_url.startswith("file:"):
        locks = bench.home / "state" / ".pulumi" / "locks"
        return [str(path) for path in locks.rglob("*.json")] if locks.exists() else []
    session = Session(bench.url)
    row = session.row("select coalesce(array_agg(key), '{}') from pulumi_state where key like '%/locks/%.json'")
    session.close()
    return list(row[0]) if row else []


def session_members(leader: ProcessId) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(stat[3]) == leader.pid and stat[0] != "Z":
                found.append(int(entry.name))
    return found


@STATES
def test_up_makes_and_reports_the_resource_with_its_uid_and_destroy_removes_it(
    bench: Callable[..., Bench], state: str
) -> None:
    b = bench(state)
    changes = b.up()
    [machine] = b.cloud.list()
    [made] = [change for change in changes if change.type == TYPE]
    assert (made.op, made.name, made.id) == ("create", "m-1", "m-1")
    assert made.outputs["uid"] == machine.uid

    held = b.engine.state(STACK)
    [owned] = held.resources
    assert (owned.urn, owned.id, owned.outputs["uid"], held.pending) == (urn("m-1"), "m-1", machine.uid, ())

    [removed] = [change for change in b.destroy() if change.type == TYPE]
    assert (removed.op, removed.urn) == ("delete", urn("m-1"))
    assert b.cloud.list() == []
    assert b.engine.state(STACK).resources == ()
    assert lock_keys(b) == []
    assert [*b.home.rglob("*.attrs")] == [], (
        "written in place: an engine killed at it leaves a stack that none can read"
    )
    assert all(session_members(process) == [] for process in b.started)


def test_an_up_of_one_target_leaves_the_others_that_the_program_no_longer_declares(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.up("m-1")
    before = b.cloud.get("m-1")
    b.up("m-2")
    assert {resource.name for resource in b.engine.state(STACK).resources} == {"m-1", "m-2"}
    assert b.cloud.get("m-1") == before


def test_a_stack_that_is_missing_or_half_made_owns_nothing_and_making_it_twice_is_harmless(
    bench: Callable[..., Bench],
) -> None:
    b = bench()
    assert b.engine.state(STACK).resources == ()
    with pytest.raises(StackMissing):
        b.destroy()
    assert not b.engine.check(STACK)
    b.engine.clear_pending(STACK)
    b.engine.drop(STACK)
    b.engine.init(STACK)
    b.engine.init(STACK)
    # As an engine leaves it that is killed in making it, having written it for the first of two times.
    key = b.home / "state" / ".pulumi" / "stacks" / PROJECT / f"{STACK}.json"
    key.write_text(json.dumps({"version": 0, "checkpoint": {"stack": f"organization/{PROJECT}/{STACK}"}}))
    assert b.engine.state(STACK).resources == ()
    assert b.engine.salt(STACK) == ""
    b.engine.clear_pending(STACK)
    b.up()
    b.engine.init(STACK)
    assert [resource.name for resource in b.engine.state(STACK).resources] == ["m-1"]


def test_a_dropped_stack_is_forgotten_and_what_it_made_stays(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.up()
    b.engine.drop(STACK)
    assert b.engine.state(STACK).resources == ()
    assert [machine.name for machine in b.cloud.list()] == ["m-1"]


def test_a_failed_resource_comes_back_with_its_urn_and_its_providers_words_and_classified_by_meaning(
    bench: Callable[..., Bench],
) -> None:
    b = bench()
    b.engine.init(STACK)
    taken = b.cloud.create(MachineRequest(name="m-9", location="a", type="small", argv=("/bin/sleep", "600")))
    provider = LocalProvider(b.cloud.folder)
    cases: list[tuple[type[OrcaError], str, dict[str, Any]]] = [
        (NoCapacity, "LOCATION_OUT_OF_CAPACITY", {}),
        (QuotaExceeded, "QUOTA_EXCEEDED", {}),
        (AuthFailed, "PERMISSION_DENIED", {}),
        (Refused, "INVALID_REQUEST", {}),
        (Transient, "UNAVAILABLE", {}),
        (Conflict, "ALREADY_EXISTS", {"name": taken.name}),
    ]
    for kind, code, declaration in cases:
        words = f"{code}: the words of the provider"
        if not declaration:
            b.cloud.arm("create", code, "the words of the provider")
        else:
            words = f"{code}: a machine named m-9 exists; it is not made again"
        with pytest.raises(EngineFailed) as caught:
            b.up("m-2", **declaration)
        [failure] = caught.value.failures
        assert (failure.urn, failure.message) == (urn("m-2"), words)
        assert words in str(caught.value)
        meaning = provider.classify(failure.message)
        assert type(meaning) is kind
        assert str(meaning) == words
        assert b.engine.state(STACK).pending == ()
    assert b.cloud.list() == [taken]


@STATES
def test_a_stack_that_is_being_worked_on_is_locked_and_says_by_whom(bench: Callable[..., Bench], state: str) -> None:
    b = bench(state)
    first = b.slow_up("m-1")
    holder = b.started[-1]
    with pytest.raises(StackLocked) as caught:
        b.up("m-2")
    [lock] = caught.value.locks
    assert (lock.host, lock.pid) == (os.uname().nodename, holder.pid)
    [key] = lock_keys(b)
    assert key.endswith(lock.key)

    end_session(holder, 0)
    first.join()
    assert isinstance(first.error, OutcomeUnknown)


def test_a_wrong_passphrase_is_a_sentence_that_names_the_variable(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.engine.init(STACK)
    wrong = b.home / "wrong"
    wrong.write_text("another passphrase\n")
    other = Engine(
        EngineConfig(backend_url=b.config.backend_url, passphrase_file=wrong, folder=b.home / "engine-of-another")
    )
    with pytest.raises(SetupError, match=r"incorrect passphrase.*; PULUMI_CONFIG_PASSPHRASE_FILE has to name"):
        b.up(engine=other)
    assert b.cloud.list() == []


def test_a_plugin_that_is_missing_is_said_at_once_and_never_looked_for_on_the_network(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A proxy that nobody serves: whoever asks the network fails with other words.
    for name in ("HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    b = bench()

    def program(registrar: Registrar) -> None:
        registrar.register("nosuch:index:Thing", "thing", {}).result()

    with pytest.raises(SetupError, match=r"no resource plugin 'pulumi-resource-nosuch'.*orca-infra doctor"):
        b.engine.up(STACK, program, targets=(), deadline_seconds=180, on_start=b.started.append)


@STATES
def test_past_its_deadline_an_operation_is_ended_whole_and_its_outcome_is_unknown(
    bench: Callable[..., Bench], state: str, monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., None]
) -> None:
    monkeypatch.setattr(command, "INTERRUPT_GRACE_SECONDS", 0.2)
    b = bench(state)
    b.engine.init(STACK)
    b.cloud.arm("create", "", seconds=60)
    with pytest.raises(OutcomeUnknown, match=r"after its deadline of 2\.5 s"):
        b.up(deadline=2.5)
    assert session_members(b.started[-1]) == []
    begun = not (b.cloud.folder / "faults.json").exists()  # on a very busy machine it may not have come to the create
    held = b.engine.state(STACK)
    assert (held.resources, held.pending) == ((), (urn("m-1"),) if begun else ())


def test_interrupted_twice_the_engine_gets_one_signal_ends_its_step_frees_the_lock_and_starts_no_more(
    bench: Callable[..., Bench],
) -> None:
    b = bench()
    up = b.slow_up()
    b.engine.interrupt()
    b.engine.interrupt()
    b.cloud.hurry()
    up.join()
    assert isinstance(up.error, OutcomeUnknown)
    # Two signals would have made it leave at once: the machine made, and the state not knowing it.
    other = Engine(b.config)
    [owned] = other.state(STACK).resources
    [machine] = b.cloud.list()
    assert owned.outputs["uid"] == machine.uid
    assert lock_keys(b) == []
    assert session_members(b.started[-1]) == []
    with pytest.raises(OutcomeUnknown, match="not started"):
        b.up("m-2")


@STATES
def test_a_token_is_nowhere_but_in_its_machine(
    bench: Callable[..., Bench], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def read(lines: Any) -> Any:
        kept = list(lines)
        events.extend(kept)
        return read_events(kept)

    monkeypatch.setattr("orca_infra.stack.engine.read_events", read)
    b = bench(state)
    changes = b.up()
    b.cloud.arm("create", "INVALID_REQUEST", "refused")
    with pytest.raises(EngineFailed) as failed:
        b.up("m-2")
    with pytest.raises(EngineFailed) as unchecked:
        b.up("m-3", type="")
    refreshed = b.engine.refresh(STACK, targets=(), deadline_seconds=180, on_start=b.started.append)
    held = b.engine.state(STACK)
    said = repr((changes, refreshed, held, str(failed.value), str(unchecked.value)))
    for secret in forms(TOKEN):
        assert secret not in said
        assert secret not in "".join(events)
        assert files_with(b.home, secret) == []
        if state == "postgres":
            assert table_with(b.url, secret) == 0
    environ = Path(f"/proc/{b.process_of('m-1').pid}/environ").read_bytes()
    assert f"ORCA_TOKEN={TOKEN}".encode() in environ.split(b"\0")


def forms(secret: str) -> list[str]:
    """The secret as it would stand in a file: raw, escaped, base64."""
    return [
        secret,
        secret.replace('"', '\\"'),
        secret.replace('"', "\\u0022"),
        base64.b64encode(secret.encode()).decode(),
    ]


def files_with(folder: Path, text: str) -> list[str]:
    return [str(path) for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def table_with(url: str, text: str) -> int:
    session = Session(url)
    row = session.row("select count(*) from pulumi_state where strpos(data::text, %(text)s) > 0", {"text": text})
    session.close()
    return int(row[0]) if row else 0


@STATES
def test_two_stacks_upped_at_once_from_two_threads_do_not_mix(bench: Callable[..., Bench], state: str) -> None:
    b = bench(state)
    b.engine.init("test.machines.other")  # the state's table is there
    both = {
        name: b.background(
            lambda name=name: b.up(
                name, stack=f"test.machines.{name}", token=f"token of {name}", labels={"orca-pool": name}
            )
        )
        for name in ("m-1", "m-2")
    }
    for up in both.values():
        up.join()
        assert up.error is None
    for name in both:
        [owned] = b.engine.state(f"test.machines.{name}").resources
        assert (owned.name, owned.outputs["labels"]) == (name, {"orca-pool": name})
        environ = Path(f"/proc/{b.process_of(name).pid}/environ").read_bytes()
        assert f"ORCA_TOKEN=token of {name}".encode() in environ.split(b"\0")


def test_a_preview_changes_nothing(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.engine.init(STACK)
    declaration = {
        "folder": str(b.cloud.folder),
        "name": "m-1",
        "location": "a",
        "type": "small",
        "labels": {},
        "argv": ["/bin/sleep", "600"],
        "environment": {},
    }
    changes = b.engine.preview(STACK, machine_program(TYPE, {"m-1": (declaration, TOKEN)}), deadline_seconds=180)
    assert [change.op for change in changes if change.type == TYPE] == ["create"]
    assert b.cloud.list() == []
    assert b.engine.state(STACK).resources == ()


def test_a_refresh_forgets_a_machine_that_is_gone(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.up()
    b.cloud.delete("m-1")
    b.engine.refresh(STACK, targets=(urn("m-1"),), deadline_seconds=180, on_start=b.started.append)
    assert b.engine.state(STACK).resources == ()


def test_a_killed_engine_takes_its_plugins_along(bench: Callable[..., Bench]) -> None:
    b = bench()
    up = b.slow_up()
    holder = b.started[-1]
    assert len(session_members(holder)) > 1
    os.kill(holder.pid, 9)
    up.join()
    assert isinstance(up.error, OutcomeUnknown)
    assert not is_alive(holder)
    assert session_members(holder) == []


def test_a_project_file_that_a_full_disk_left_empty_and_plugins_that_moved_stop_no_stack(
    bench: Callable[..., Bench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench("file")
    b.up()
    (tmp_path / "plugins").mkdir()
    monkeypatch.setenv("PULUMI_HOME", str(tmp_path))
    link = b.config.folder / "home" / "plugins"
    link.unlink(missing_ok=True)
    link.symlink_to(tmp_path / "where-they-were")
    b.engine = Engine(b.config)
    assert link.resolve() == tmp_path / "plugins"
    (b.config.folder / "stacks" / STACK / "Pulumi.yaml").write_text("")
    b.engine.drop(STACK)
    assert b.engine.stacks() == ()
