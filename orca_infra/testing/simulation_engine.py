"""The Pulumi engine over a fake cloud, under the real ledger (`stack/operations.py`): same verbs, same errors, no process.

What an engine is known to do is done here: it writes a pending operation before each step and its result after it, holds the
stack's lock while it works, and may be killed in between, or go on for a while when its caller was killed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol, cast

from orca_infra.errors import EngineFailed, OrcaError, OutcomeUnknown, ResourceFailure, StackLocked
from orca_infra.process import ProcessId
from orca_infra.stack.engine import PROJECT, OnStart, OwnedResource, StackState
from orca_infra.stack.outcome import ResourceChange, StackMissing
from orca_infra.stack.program import Program, Registrar
from orca_infra.testing.fake_cloud import Clock, CloudError, FakeCloud, FakeMachine, Operation

#: No process of this machine has such a number (proc(5): at most 4194304).
_FIRST_PID = 2**24
INTERRUPT_GRACE_SECONDS = 20.0


class Killed(BaseException):
    """The loop's process is gone: nothing more happens in it, no handler, no clean-up."""


@dataclass(slots=True)
class FakeStack:
    """A stack's state; `locked_until` is that of whoever is at work on it (the process `pid`), or of a person."""

    resources: dict[str, OwnedResource] = field(default_factory=dict)
    pending: list[str] = field(default_factory=list)
    locked_until: datetime | None = None
    pid: int = 0


class Surroundings(Protocol):
    """What the engine finds around it; a test has things happen there."""

    def trouble(self, kind: str, stack: str) -> OrcaError | None:
        """What keeps an operation from beginning, or from being written down."""

    def acting(self, kind: str, machine: FakeMachine | None, name: str) -> None:
        """Called right before a machine is asked for (create) or deleted."""

    def point(self, label: str) -> None:
        """A place to be killed at. Raises Killed."""

    def goes_on(self) -> bool:
        """Whether an engine whose loop was just killed ends its step all the same."""


class Quiet:
    """Surroundings in which nothing happens."""

    def trouble(self, kind: str, stack: str) -> OrcaError | None:  # noqa: ARG002
        return None

    def acting(self, kind: str, machine: FakeMachine | None, name: str) -> None: ...

    def point(self, label: str) -> None: ...

    def goes_on(self) -> bool:
        return True


@dataclass(slots=True)
class FakeBackend:
    """The states of all stacks and the engine's processes: what outlives a loop."""

    clock: Clock
    clouds: Mapping[str, FakeCloud]
    around: Surroundings = field(default_factory=Quiet)
    stacks: dict[str, FakeStack] = field(default_factory=dict)
    alive_until: dict[int, datetime] = field(default_factory=dict)

    def is_alive(self, process: ProcessId) -> bool:
        """Whether an engine's process still runs."""
        return self.alive_until.get(process.pid, self.clock.now) > self.clock.now


class _Registrar:
    """Keeps what a program declares."""

    def __init__(self) -> None:
        self.declared: list[tuple[str, str, Mapping[str, Any]]] = []

    def register(self, kind: str, name: str, properties: Mapping[str, Any], **_: object) -> _Registrar:
        self.declared.append((kind, name, _opened(properties)))
        return self

    def result(self) -> None:
        """The program waits for it; what became of it is told when the program ended."""


class FakeEngine:
    """The engine of one loop, as RecordedEngine uses it. `clouds` of the backend are by location."""

    def __init__(self, backend: FakeBackend) -> None:
        self._backend = backend
        self._clock = backend.clock
        self._around = backend.around

    def init(self, stack: str) -> None:
        self._backend.stacks.setdefault(stack, FakeStack())

    def up(
        self, stack: str, program: Program, *, targets: tuple[str, ...], deadline_seconds: float, on_start: OnStart
    ) -> tuple[ResourceChange, ...]:
        self.init(stack)
        state = self._begin("up", stack, on_start)
        registrar = _Registrar()
        program(cast("Registrar", registrar))
        changes: list[ResourceChange] = []
        failures: list[ResourceFailure] = []
        for kind, name, properties in registrar.declared:
            urn = f"urn:pulumi:{stack}::{PROJECT}::{kind}::{name}"
            if urn in targets and urn not in state.resources:
                self._around.acting("create", None, name)
                step = _Step(state, urn, self._clouds(properties).begin_create(properties), kind, properties)
                self._carry_out(step, deadline_seconds, changes, failures)
        self._end("up", stack, state, changes, failures)
        return tuple(changes)

    def destroy(
        self, stack: str, *, targets: tuple[str, ...], deadline_seconds: float, on_start: OnStart
    ) -> tuple[ResourceChange, ...]:
        if stack not in self._backend.stacks:
            raise StackMissing(f"destroy {stack}: no stack named {stack!r} found")
        state = self._begin("destroy", stack, on_start)
        changes: list[ResourceChange] = []
        failures: list[ResourceFailure] = []
        missing = [urn for urn in targets if urn not in state.resources]
        if missing:
            self._leave(state)
            raise EngineFailed(f"destroy {stack}: no resource named {missing[0]} found")
        for urn in targets:
            resource = state.resources[urn]
            cloud, outputs = self._clouds(resource.outputs), resource.outputs
            self._around.acting("delete", cloud.machines.get((outputs["location"], resource.name)), resource.name)
            # By its name, as clouds' own providers do: whoever has the name by now is deleted.
            there = cloud.machines.get((outputs["location"], resource.name))
            operation = cloud.begin_delete(outputs["location"], resource.name, there.uid if there else outputs["uid"])
            self._carry_out(_Step(state, urn, operation, resource.type, None), deadline_seconds, changes, failures)
        self._end("destroy", stack, state, changes, failures)
        return tuple(changes)

    def refresh(
        self,
        stack: str,
        *,
        targets: tuple[str, ...],
        deadline_seconds: float,  # noqa: ARG002  (a read takes no time here)
        on_start: OnStart,
        only_look: bool = False,
    ) -> tuple[ResourceChange, ...]:
        if stack not in self._backend.stacks:
            raise StackMissing(f"refresh {stack}: no stack named {stack!r} found")
        state = self._begin("refresh", stack, on_start)
        changes: list[ResourceChange] = []
        failures: list[ResourceFailure] = []
        for urn, resource in sorted(state.resources.items()):
            if targets and urn not in targets:
                continue
            location = str(resource.outputs["location"])
            try:
                seen = self._backend.clouds[location].get(location, resource.name)
            except CloudError as error:
                failures.append(ResourceFailure(urn=urn, message=str(error)))
                continue
            gone = seen is None or seen.uid != resource.outputs["uid"]
            if gone and not only_look:
                del state.resources[urn]
            outputs = {} if gone else resource.outputs
            op = "delete" if gone else "same"
            changes.append(ResourceChange(op=op, urn=urn, type=resource.type, id=resource.id, outputs=outputs))
        self._end("refresh", stack, state, changes, failures)
        return tuple(changes)

    def state(self, stack: str) -> StackState:
        trouble = self._around.trouble("state", stack)
        if trouble is not None:
            raise trouble
        state = self._backend.stacks.get(stack, FakeStack())
        return StackState(resources=tuple(state.resources.values()), pending=tuple(state.pending))

    def clear_pending(self, stack: str) -> None:
        self._check_lock(self._backend.stacks.get(stack, FakeStack()), stack)
        if stack in self._backend.stacks:
            self._backend.stacks[stack].pending.clear()

    def forget(self, stack: str, *, targets: tuple[str, ...]) -> None:
        trouble = self._around.trouble("forget", stack)
        if trouble is not None:
            raise trouble
        state = self._backend.stacks.get(stack, FakeStack())
        self._check_lock(state, stack)
        missing = [urn for urn in targets if urn not in state.resources]
        if missing:
            raise EngineFailed(f"state delete {stack}: no such resource {missing[0]}")
        for urn in targets:
            del state.resources[urn]
        self._around.point("engine forgot")

    def drop(self, stack: str) -> None:
        self._backend.stacks.pop(stack, None)

    def _clouds(self, properties: Mapping[str, Any]) -> FakeCloud:
        return self._backend.clouds[str(properties["location"])]

    def _begin(self, kind: str, stack: str, on_start: OnStart) -> FakeStack:
        state = self._backend.stacks[stack]
        trouble = self._around.trouble(kind, stack)
        if trouble is not None:
            raise trouble
        self._check_lock(state, stack)
        pid = _FIRST_PID + len(self._backend.alive_until)
        self._backend.alive_until[pid] = datetime.max.replace(tzinfo=self._clock.now.tzinfo)
        try:
            on_start(ProcessId(pid, float(pid)))
            self._around.point(f"engine {kind} started")
        except BaseException:
            self._backend.alive_until[pid] = self._clock.now
            raise
        state.locked_until, state.pid = self._backend.alive_until[pid], pid
        return state

    def _check_lock(self, state: FakeStack, stack: str) -> None:
        if state.locked_until is not None and state.locked_until > self._clock.now:
            raise StackLocked(f"{stack}: another operation holds the stack's lock")

    def _carry_out(
        self,
        step: _Step,
        deadline_seconds: float,
        changes: list[ResourceChange],
        failures: list[ResourceFailure],
    ) -> None:
        """Wait for one step's answer and write it down."""
        step.state.pending.append(step.urn)
        takes = (step.operation.due_at - self._clock.now).total_seconds()
        try:
            self._clock.sleep(min(takes, deadline_seconds + INTERRUPT_GRACE_SECONDS))
        except Killed:
            self._left_alone(step)
            raise
        if takes > deadline_seconds + INTERRUPT_GRACE_SECONDS:
            self._leave(step.state)
            raise OutcomeUnknown(f"the engine was ended after its deadline of {deadline_seconds:g} s")
        try:
            changes.append(step.write_down())
        except CloudError as error:
            failures.append(ResourceFailure(urn=step.urn, message=str(error)))
        if takes > deadline_seconds:
            self._leave(step.state)
            raise OutcomeUnknown(f"the engine was ended after its deadline of {deadline_seconds:g} s")
        try:
            self._around.point("engine step written down")
        except Killed:
            self._leave(step.state)
            raise

    def _left_alone(self, step: _Step) -> None:
        """The loop was killed in mid-step: its engine is killed with it, or ends the step and then itself."""
        if not self._around.goes_on():
            self._leave(step.state)
            return
        self._leave(step.state, step.operation.due_at)

        def finish() -> None:
            try:
                step.write_down()
            except CloudError:
                return

        self._clock.after((step.operation.due_at - self._clock.now).total_seconds(), finish)

    def _end(
        self, kind: str, stack: str, state: FakeStack, changes: list[ResourceChange], failures: list[ResourceFailure]
    ) -> None:
        self._leave(state)
        trouble = self._around.trouble(f"{kind} ended", stack)
        if trouble is not None:
            raise trouble
        if failures:
            first = failures[0]
            raise EngineFailed(f"{kind} {stack}: {first.message}", tuple(failures), tuple(changes))

    def _leave(self, state: FakeStack, at: datetime | None = None) -> None:
        """The process that is at work on this stack ends, now or then, and its lock with it."""
        self._backend.alive_until[state.pid] = at or self._clock.now
        state.locked_until = at


@dataclass(slots=True)
class _Step:
    """One resource's create (with its properties) or delete (without)."""

    state: FakeStack
    urn: str
    operation: Operation
    kind: str
    properties: Mapping[str, Any] | None

    def write_down(self) -> ResourceChange:
        """The state after the step. Raises CloudError when it failed."""
        if self.urn in self.state.pending:
            self.state.pending.remove(self.urn)
        machine = self.operation.result()
        name = self.urn.rpartition("::")[2]
        if self.properties is None:
            self.state.resources.pop(self.urn, None)
            return ResourceChange(op="delete", urn=self.urn, type=self.kind, id=name)
        uid = machine.uid if machine else ""
        outputs = {"uid": uid, "location": self.properties["location"]}
        self.state.resources[self.urn] = OwnedResource(urn=self.urn, type=self.kind, id=name, outputs=outputs)
        return ResourceChange(op="create", urn=self.urn, type=self.kind, id=name, outputs=outputs)


def _opened(value: Any) -> Any:
    """The properties with their secrets opened, as a provider gets them."""
    if isinstance(value, Mapping):
        if "value" in value and len(value) == 2:
            return value["value"]
        return {key: _opened(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_opened(inner) for inner in value]
    return value
