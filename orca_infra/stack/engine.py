"""The engine: up, destroy, refresh, preview, what a stack owns, and drop. The only caller of the pulumi program.

Each operation is one call of it, as the SDK's Automation API makes four (about 0.2 s each) and has no deadline; see
docs/adr/0001 for what was measured.

Every stack gets a work folder of its own under `folder`; the engine's home, with its logs, is there too, so that all
that is written besides the state is in one bounded place.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orca_infra.errors import SetupError
from orca_infra.process import ProcessId
from orca_infra.stack.command import Completed, PulumiCommand
from orca_infra.stack.outcome import NO_EVENTS, ResourceChange, StackMissing, raise_for, read_events
from orca_infra.stack.program import Program, serve
from orca_infra.stack.tools import pulumi_home, require_tool, search_path

PROJECT = "orca-infra"
#: One CLI call that only reads or writes the state.
STATE_SECONDS = 60.0

OnStart = Callable[[ProcessId], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedResource:
    """A resource as a stack's state holds it. `outputs` has secrets as ciphertext."""

    urn: str
    type: str
    id: str
    outputs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.urn.rpartition("::")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class StackState:
    """What a stack's state holds; `pending` are the URNs of operations that were begun and never ended."""

    resources: tuple[OwnedResource, ...] = ()
    pending: tuple[str, ...] = ()
    outputs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Where the engine keeps its state and its secrets' key.

    Attributes:
        backend_url: `file://`, `postgres://` or a bucket's URL; may hold a password, so it goes by environment only.
        passphrase_file: protects the secrets in the state.
        folder: private to this process's engine operations.

    """

    backend_url: str = field(repr=False)
    passphrase_file: Path
    folder: Path


def engine_environment(config: EngineConfig) -> dict[str, str]:
    """The environment that makes a pulumi program use this state and never the network for itself.

    A person's shell gets the same (`orca-infra env`), so that a CLI and the loop never mean two different states.
    """
    return {
        "PULUMI_BACKEND_URL": _without_attributes(config.backend_url),
        "PULUMI_CONFIG_PASSPHRASE_FILE": str(config.passphrase_file),
        # A fresh work folder has no salt of its own: the state's secrets manager is used.
        "PULUMI_FALLBACK_TO_STATE_SECRETS_MANAGER": "true",
        "PULUMI_DIY_BACKEND_DISABLE_CHECKPOINT_BACKUPS": "true",
        "PULUMI_SKIP_UPDATE_CHECK": "true",
        "PULUMI_DISABLE_AUTOMATIC_PLUGIN_ACQUISITION": "true",
        "PATH": search_path(),
    }


def _without_attributes(backend_url: str) -> str:
    """In a folder, no file of attributes beside each file of the state.

    The engine's library writes those in place, and an engine that is killed at it leaves one empty: its stack can then be
    neither read nor removed ("failed to load checkpoint: EOF"). https://pkg.go.dev/gocloud.dev/blob/fileblob#Options
    """
    if not backend_url.startswith("file:") or "metadata=" in backend_url:
        return backend_url
    return f"{backend_url}{'&' if '?' in backend_url else '?'}metadata=skip"


class Engine:
    """Runs operations on stacks; any number of threads may, on different stacks.

    Every operation raises, besides what it names: StackLocked, EngineFailed, OutcomeUnknown, Transient, SetupError.
    """

    def __init__(self, config: EngineConfig, environment: Mapping[str, str] | None = None) -> None:
        """`environment`: what providers need besides, such as KUBECONFIG."""
        self._folder = config.folder
        self.home = config.folder / "home"
        self._make_home()
        environment = {
            **os.environ,
            **(environment or {}),
            **engine_environment(config),
            "PULUMI_HOME": str(self.home),
            "PULUMI_AUTOMATION_API": "true",
            "PULUMI_DEBUG_COMMANDS": "true",  # or there is no --event-log
            # Short-lived and in a hurry: collecting garbage less often takes a fifth off the CPU (docs/adr/0007).
            "GOGC": "400",
        }
        # The file is the one source; a passphrase in this process's environment would win over it.
        environment.pop("PULUMI_CONFIG_PASSPHRASE", None)
        self._command = PulumiCommand(require_tool("pulumi"), environment)

    def up(
        self, stack: str, program: Program, *, targets: tuple[str, ...], deadline_seconds: float, on_start: OnStart
    ) -> tuple[ResourceChange, ...]:
        """Make what `program` declares, for `targets` (URNs) alone when there are any; makes the stack when missing."""
        arguments = ["up", "--yes", "--skip-preview", *_targets(targets)]
        with serve(program) as address:
            try:
                return self._operate([*arguments, f"--client={address}"], stack, deadline_seconds, on_start)
            except StackMissing:
                self.init(stack)
                return self._operate([*arguments, f"--client={address}"], stack, deadline_seconds, on_start)

    def up_new(
        self, stack: str, program: Program, *, deadline_seconds: float, on_start: OnStart
    ) -> tuple[ResourceChange, ...]:
        """Make a stack and all that `program` declares, once: state is saved at the end only, and one failure stops no other.

        An operation that is cut short leaves objects that the state lacks. EngineFailed has the changes beside the failures.
        """
        self.init(stack)
        with serve(program) as address:
            arguments = ["up", "--yes", "--skip-preview", "--continue-on-error", f"--client={address}"]
            return self._operate(arguments, stack, deadline_seconds, on_start, {"PULUMI_SKIP_CHECKPOINTS": "true"})

    def destroy(
        self, stack: str, *, targets: tuple[str, ...], deadline_seconds: float, on_start: OnStart
    ) -> tuple[ResourceChange, ...]:
        """Remove `targets` (URNs); no program runs. Raises StackMissing, too."""
        arguments = ["destroy", "--yes", "--skip-preview", *_targets(targets)]
        return self._operate(arguments, stack, deadline_seconds, on_start)

    def refresh(
        self,
        stack: str,
        *,
        targets: tuple[str, ...],
        deadline_seconds: float,
        on_start: OnStart,
        only_look: bool = False,
    ) -> tuple[ResourceChange, ...]:
        """Bring the state of `targets` (of all, without any) up to what their provider says; `only_look`: only say it."""
        how = ["--preview-only"] if only_look else ["--yes", "--skip-preview"]
        arguments = ["refresh", *how, *_targets(targets)]
        return self._operate(arguments, stack, deadline_seconds, on_start)

    def preview(self, stack: str, program: Program, *, deadline_seconds: float) -> tuple[ResourceChange, ...]:
        """What an `up` would change; nothing is changed."""
        with serve(program) as address:
            return self._operate(["preview", f"--client={address}"], stack, deadline_seconds, None)

    def preview_project(
        self, stack: str, project: Path, options: Sequence[str], *, deadline_seconds: float
    ) -> tuple[Completed, str]:
        """What an `up` of the program in a folder with a Pulumi.yaml would change: how it ended, and its event log.

        `options` are the engine's own, such as `--policy-pack`. Nothing is raised for a preview that fails.
        """
        with tempfile.NamedTemporaryFile(dir=self._stack_folder(stack), prefix="events-", suffix=".json") as log:
            arguments = ["preview", "--stack", stack, "--event-log", log.name, *options]
            completed = self._command.run(arguments, project, deadline_seconds=deadline_seconds)
            return completed, Path(log.name).read_text(encoding="utf-8", errors="replace")

    def init(self, stack: str) -> None:
        """Make the stack in the backend; nothing happens when it is there."""
        completed = self._run(["stack", "init", stack], stack)
        if "already exists" not in completed.stderr:
            raise_for(completed, NO_EVENTS, f"stack init {stack}")

    def state(self, stack: str) -> StackState:
        """Read the stack's state; an absent stack owns nothing."""
        exported = self._export(stack)
        deployment = exported.get("deployment", {})
        resources = deployment.get("resources") or []
        outputs = next((r.get("outputs") or {} for r in resources if r["type"] == "pulumi:pulumi:Stack"), {})
        owned = tuple(
            OwnedResource(urn=r["urn"], type=r["type"], id=r["id"], outputs=r.get("outputs") or {})
            for r in resources
            if r.get("custom") and r.get("id") and not r["type"].startswith("pulumi:")
        )
        pending = tuple(p["resource"]["urn"] for p in deployment.get("pending_operations") or [])
        return StackState(resources=owned, pending=pending, outputs=outputs)

    def check(self, stack: str) -> bool:
        """Read the state as an operation would; gives whether there is one. Raises StateBroken when it would be refused."""
        # Unlike an export, this looks whether it fits together.
        completed = self._run(["stack", "--stack", stack], stack)
        try:
            raise_for(completed, NO_EVENTS, f"stack {stack}")
        except StackMissing:
            return False
        return True

    def keep_aside(self, stack: str, content: bytes) -> Path:
        """Keep a state that cannot be used where nothing overwrites it; the same one is kept once."""
        digest = hashlib.sha256(content).hexdigest()[:12]
        path = self._folder / "broken" / f"{stack}-{digest}.json"
        with _no_space_is_said(path.parent):
            path.parent.mkdir(mode=0o700, exist_ok=True)
            if not path.exists():
                temporary = path.with_suffix(".part")
                temporary.write_bytes(content)
                temporary.rename(path)
        return path

    def salt(self, stack: str) -> str:
        """The salt of the passphrase that this state was made with; empty when the stack is absent."""
        deployment = self._export(stack).get("deployment", {})
        return str(deployment.get("secrets_providers", {}).get("state", {}).get("salt", ""))

    def clear_pending(self, stack: str) -> None:
        """Forget operations that were begun and never ended. What they may have made is found by its labels."""
        exported = self._export(stack)
        if not exported.get("deployment", {}).get("pending_operations"):
            return
        exported["deployment"]["pending_operations"] = []
        completed = self._run(["stack", "import", "--stack", stack], stack, stdin=json.dumps(exported))
        raise_for(completed, NO_EVENTS, f"stack import {stack}")

    def forget(self, stack: str, *, targets: tuple[str, ...]) -> None:
        """Take `targets` (URNs) out of the state; no provider is asked. One that the state does not hold is an error."""
        completed = self._run(["state", "delete", "--yes", "--stack", stack, *targets], stack)
        raise_for(completed, NO_EVENTS, f"state delete {stack}")

    def drop(self, stack: str) -> None:
        """Forget the stack with its history, whatever its state holds; no provider is asked."""
        completed = self._run(["stack", "rm", "--yes", "--force", "--remove-backups", "--stack", stack], stack)
        with contextlib.suppress(StackMissing):
            raise_for(completed, NO_EVENTS, f"stack rm {stack}")
        folder = (self._folder / "stacks" / stack).resolve()
        shutil.rmtree(folder, ignore_errors=True)
        # Which stack is selected in that folder, by the hash of its path; the engine leaves it where the stack was gone.
        selection = hashlib.sha1(str(folder / "Pulumi.yaml").encode(), usedforsecurity=False).hexdigest()
        (self.home / "workspaces" / f"{PROJECT}-{selection}-workspace.json").unlink(missing_ok=True)

    def stacks(self) -> tuple[str, ...]:
        """The names of this project's stacks."""
        completed = self._run(["stack", "ls", "--json"], "stacks")
        raise_for(completed, NO_EVENTS, "stack ls")
        return tuple(str(one["name"]).rpartition("/")[2] for one in json.loads(completed.stdout))

    def unprotect(self, stack: str) -> None:
        """Let a `destroy` of the stack remove what its program protects; the next `up` protects it again."""
        completed = self._run(["state", "unprotect", "--all", "--yes", "--stack", stack], stack)
        with contextlib.suppress(StackMissing):
            raise_for(completed, NO_EVENTS, f"state unprotect {stack}")

    def interrupt(self, *, for_good: bool = True) -> None:
        """Ask what runs to stop after its current step, once; `for_good`: and start no more."""
        self._command.interrupt(for_good=for_good)

    def _operate(
        self,
        arguments: list[str],
        stack: str,
        deadline_seconds: float,
        on_start: OnStart | None,
        environment: Mapping[str, str] | None = None,
    ) -> tuple[ResourceChange, ...]:
        with self._event_log(stack) as log:
            completed = self._run(
                [*arguments, "--stack", stack, "--exec-kind", "auto.inline", "--event-log", log.name],
                stack,
                deadline_seconds=deadline_seconds,
                on_start=on_start,
                environment=environment,
            )
            with open(log.name, encoding="utf-8", errors="replace") as lines:
                events = read_events(lines)
        raise_for(completed, events, f"{arguments[0]} {stack}")
        return events.changes

    def _event_log(self, stack: str) -> contextlib.AbstractContextManager[Any]:
        folder = self._stack_folder(stack)
        with _no_space_is_said(folder):
            return tempfile.NamedTemporaryFile(dir=folder, prefix="events-", suffix=".json")

    def _export(self, stack: str) -> dict[str, Any]:
        completed = self._run(["stack", "export", "--stack", stack], stack)
        try:
            raise_for(completed, NO_EVENTS, f"stack export {stack}")
        except StackMissing:
            return {}
        exported: dict[str, Any] = json.loads(completed.stdout)
        # It is null in a stack whose `init` was killed before it had written whose secrets they are.
        return {**exported, "deployment": exported.get("deployment") or {}}

    def _run(
        self,
        arguments: list[str],
        stack: str,
        *,
        deadline_seconds: float = STATE_SECONDS,
        on_start: OnStart | None = None,
        stdin: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Completed:
        return self._command.run(
            arguments,
            self._stack_folder(stack),
            deadline_seconds=deadline_seconds,
            on_start=on_start,
            stdin=stdin,
            environment=environment,
        )

    def _stack_folder(self, stack: str) -> Path:
        folder = self._folder / "stacks" / stack
        project = folder / "Pulumi.yaml"
        text = f"name: {PROJECT}\nruntime: python\n"
        with _no_space_is_said(folder):
            # One that a full disk, or a lost machine, left empty would stop this stack for ever.
            if not project.exists() or project.stat().st_size != len(text):
                folder.mkdir(parents=True, exist_ok=True)
                draft = _draft_of(project)
                draft.write_text(text)
                draft.replace(project)
        return folder

    def _make_home(self) -> None:
        with _no_space_is_said(self.home):
            self.home.mkdir(parents=True, exist_ok=True, mode=0o700)
            plugins = pulumi_home() / "plugins"
            link = self.home / "plugins"
            if plugins.is_dir() and not link.exists():
                # Another process may do the same just now, or it may be there and lead nowhere any more.
                draft = _draft_of(link)
                draft.symlink_to(plugins)
                draft.replace(link)
            # The engine writes a debug log of each call into a folder of this name: a tenth of its CPU, a disk that fills,
            # and one place more where a secret could be. Where a file stands, it goes on without.
            (self.home / "logs").touch()


def _draft_of(path: Path) -> Path:
    """Where a file is made before it gets its name: no other thread's, of this process or another."""
    return path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.draft")


def _targets(urns: tuple[str, ...]) -> list[str]:
    return [argument for urn in urns for argument in ("--target", urn)]


@contextlib.contextmanager
def _no_space_is_said(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SetupError(f"the engine's work folder {folder} cannot be written: {error.strerror}") from error
