"""A cloud in memory, with its machine provider: as Google's where that matters here, on a clock that a test moves.

Names are unique in a location only; lists lag behind what is so; answers come late, and what they say may not be what
happened. Each call meets at most one `Fault`: one that was armed, or one that `chance` gives.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Protocol, TypeVar

from orca_infra.errors import AuthFailed, Conflict, NoCapacity, OrcaError, QuotaExceeded, Refused, Transient
from orca_infra.machines.model import MachineState, SeenMachine
from orca_infra.machines.providers.port import TOKEN_PLACEHOLDER, Birth, Declaration

#: Every way in which a stock-out is said (field case M1): a code, a longer one, and a sentence alone.
STOCK_OUTS = (
    "ZONE_RESOURCE_POOL_EXHAUSTED: the zone has no such machine left",
    "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS: the zone has no such machine left (resource type: compute)",
    "The zone 'a' does not have enough resources available to fulfill the request. Try a different zone.",
)
#: What else a cloud says, by what it means.
WORDS: Mapping[type[OrcaError], str] = {
    QuotaExceeded: "QUOTA_EXCEEDED: Quota 'CPUS' exceeded. Limit: 8.0",
    Refused: "INVALID_USAGE: Error 400: Invalid value for field 'resource.machineType'",
    AuthFailed: "FORBIDDEN: Error 403: Required 'compute.instances.create' permission",
    Transient: "RATE_LIMIT_EXCEEDED: Error 429: Too many requests",
    Conflict: "ALREADY_EXISTS: Error 409: The resource already exists",
}
_MEANINGS: tuple[tuple[re.Pattern[str], type[OrcaError]], ...] = (
    (re.compile(r"ZONE_RESOURCE_POOL_EXHAUSTED|does not have enough resources available"), NoCapacity),
    (re.compile(r"QUOTA_EXCEEDED"), QuotaExceeded),
    (re.compile(r"ALREADY_EXISTS"), Conflict),
    (re.compile(r"FORBIDDEN"), AuthFailed),
    (re.compile(r"INVALID_USAGE"), Refused),
)

Answer = TypeVar("Answer")


class Clock(Protocol):
    """Time as the cloud has it."""

    @property
    def now(self) -> datetime: ...

    def sleep(self, seconds: float) -> None: ...

    def after(self, seconds: float, event: Callable[[], None]) -> None: ...


class Effect(StrEnum):
    """What becomes of what was asked for."""

    NONE = "none"
    DONE = "done"
    LATE = "late"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """How one call goes wrong.

    Attributes:
        says: the error's words; empty: the answer is that all went well.
        seconds: how much longer the answer takes.
        effect: whether it is done all the same, or only `late_seconds` after the answer. Nothing said and nothing done is
            a lie; nothing said and done is only slow.

    """

    says: str = ""
    seconds: float = 0
    effect: Effect = Effect.NONE
    late_seconds: float = 0


@dataclass(slots=True, kw_only=True)
class FakeMachine:
    """A machine and what is known of it where; `listed_at` and `shown_at` are when lists and gets begin to show it."""

    name: str
    uid: str
    location: str
    type: str
    labels: Mapping[str, str]
    startup: str
    created_at: datetime
    listed_at: datetime
    shown_at: datetime
    state: MachineState = MachineState.RUNNING
    state_listed_at: datetime
    unlisted_at: datetime | None = None

    def seen(self, *, listed: datetime | None = None) -> SeenMachine:
        stale = listed is not None and listed < self.state_listed_at
        return SeenMachine(
            name=self.name,
            uid=self.uid,
            location=self.location,
            type=self.type,
            state=MachineState.RUNNING if stale else self.state,
            created_at=self.created_at,
            labels=self.labels,
        )


class CloudError(Exception):
    """The cloud's own words; what they mean is the provider's `classify`."""


def classify(message: str) -> OrcaError:
    """What the cloud's words mean."""
    return next((meaning(message) for pattern, meaning in _MEANINGS if pattern.search(message)), Transient(message))


_Machines = list[FakeMachine]  # named here: inside the class below, `list` is its verb
_Armed = list[tuple[str, Fault]]


@dataclass(slots=True)
class FakeCloud:
    """One such cloud.

    Attributes:
        room: how many machines of a type a location has room for; one that is not named has room for any number.
        lag_seconds: how long after this change lists show it.
        chance: gives the fault that a call of this verb meets, if any.
        booted: told of each machine that is there from now on.
        late: how many changes are still to come after their answer.
        lied: the uids of machines that were said to be deleted and were not.

    """

    clock: Clock
    new_uid: Callable[[], str]
    create_seconds: float = 0
    delete_seconds: float = 0
    room: dict[tuple[str, str], int] = field(default_factory=dict)
    machines: dict[tuple[str, str], FakeMachine] = field(default_factory=dict)
    lag_seconds: Callable[[], float] = lambda: 0.0
    chance: Callable[[str], Fault | None] = lambda _: None
    booted: Callable[[FakeMachine], None] = lambda _: None
    armed: _Armed = field(default_factory=list)
    ghosts: _Machines = field(default_factory=list)
    late: int = 0
    lied: set[str] = field(default_factory=set)

    def arm(self, verb: str, fault: Fault, times: int = 1) -> None:
        """Have the next calls of `create`, `list`, `get`, `label` or `delete` go wrong so."""
        self.armed += [(verb, fault)] * times

    def begin_create(self, properties: Mapping[str, object]) -> Operation:
        """Ask for a machine; what became of it is the operation's result once it is due."""
        fault = self._fault("create")
        location, name, kind = (str(properties[key]) for key in ("location", "name", "type"))
        if (location, name) in self.machines:
            return Operation(self.clock.now, says=WORDS[Conflict])
        due_at = self.clock.now + timedelta(seconds=self.create_seconds + (fault.seconds if fault else 0))
        used = sum(
            (m.location, m.type, m.state) == (location, kind, MachineState.RUNNING) for m in self.machines.values()
        )
        if used >= self.room.get((location, kind), used + 1):
            return Operation(due_at, says=STOCK_OUTS[used % len(STOCK_OUTS)])
        if fault is None or fault.effect is Effect.DONE:
            return Operation(due_at, machine=self._make(properties), says=fault.says if fault else "")
        if fault.effect is Effect.LATE:
            late = due_at - self.clock.now + timedelta(seconds=fault.late_seconds)
            self._later(late, lambda: self._make_late(properties))
            return Operation(due_at, says=fault.says or WORDS[Transient])
        return Operation(due_at, machine=self._machine(properties), says=fault.says)

    def begin_delete(self, location: str, name: str, uid: str) -> Operation:
        """Ask for the end of this very machine; one that is gone, or another of its name, is fine."""
        fault = self._fault("delete")
        due_at = self.clock.now + timedelta(seconds=self.delete_seconds + (fault.seconds if fault else 0))
        if fault is None or fault.effect is Effect.DONE:
            self.remove(location, name, uid)
        elif not fault.says:
            self.lied.add(uid)
        if fault is not None and fault.effect is Effect.LATE:
            late = due_at - self.clock.now + timedelta(seconds=fault.late_seconds)
            self._later(late, lambda: self.remove(location, name, uid))
        return Operation(due_at, says=fault.says if fault else "")

    def list(self) -> list[SeenMachine]:
        """What lists show by now, by location and name."""
        self._meet("list")
        now = self.clock.now
        self.ghosts = [ghost for ghost in self.ghosts if ghost.unlisted_at is not None and ghost.unlisted_at > now]
        living = [machine for machine in self.machines.values() if machine.listed_at <= now]
        every = [machine.seen(listed=now) for machine in (*living, *self.ghosts)]
        return sorted(every, key=lambda machine: (machine.location, machine.name, machine.uid))

    def get(self, location: str, name: str) -> SeenMachine | None:
        if self._meet("get"):
            return None
        machine = self.machines.get((location, name))
        return machine.seen() if machine is not None and machine.shown_at <= self.clock.now else None

    def put_labels(self, location: str, name: str, uid: str, labels: Mapping[str, str]) -> None:
        """Give this very machine these labels besides those it has."""
        if self._meet("label"):
            return
        machine = self.machines.get((location, name))
        if machine is not None and machine.uid == uid:
            machine.labels = {**machine.labels, **labels}

    def plant(self, name: str, location: str, labels: Mapping[str, str]) -> FakeMachine:
        """Make a machine behind everybody's back; lists show it when their lag is over."""
        return self._make({"name": name, "location": location, "type": "planted", "labels": labels, "startup": ""})

    def halt(self, machine: FakeMachine, state: MachineState) -> None:
        """Stop or preempt a machine; it stays listed."""
        machine.state = state
        machine.state_listed_at = self.clock.now + timedelta(seconds=self.lag_seconds())

    def remove(self, location: str, name: str, uid: str) -> None:
        """The end of a machine; lists go on to show it for their lag."""
        machine = self.machines.get((location, name))
        if machine is None or machine.uid != uid:
            return
        del self.machines[location, name]
        ghost = replace(machine, unlisted_at=self.clock.now + timedelta(seconds=self.lag_seconds()))
        if machine.listed_at <= self.clock.now:
            self.ghosts.append(ghost)

    def named(self, name: str) -> _Machines:
        """Every machine of this name, wherever it is."""
        return [machine for machine in self.machines.values() if machine.name == name]

    def _make(self, properties: Mapping[str, object]) -> FakeMachine:
        machine = self._machine(properties)
        self.machines[machine.location, machine.name] = machine
        self.booted(machine)
        return machine

    def _make_late(self, properties: Mapping[str, object]) -> None:
        if (str(properties["location"]), str(properties["name"])) not in self.machines:
            self._make(properties)

    def _later(self, delay: timedelta, change: Callable[[], None]) -> None:
        def happen() -> None:
            self.late -= 1
            change()

        self.late += 1
        self.clock.after(delay.total_seconds(), happen)

    def _machine(self, properties: Mapping[str, object]) -> FakeMachine:
        labels = properties["labels"]
        lag = self.lag_seconds()
        now = self.clock.now
        return FakeMachine(
            name=str(properties["name"]),
            uid=self.new_uid(),
            location=str(properties["location"]),
            type=str(properties["type"]),
            labels=dict(labels) if isinstance(labels, Mapping) else {},
            startup=str(properties["startup"]),
            created_at=now,
            listed_at=now + timedelta(seconds=lag),
            shown_at=now + timedelta(seconds=lag / 2),
            state_listed_at=now,
        )

    def _fault(self, verb: str) -> Fault | None:
        for position, (armed, fault) in enumerate(self.armed):
            if armed == verb:
                del self.armed[position]
                return fault
        return self.chance(verb)

    def _meet(self, verb: str) -> bool:
        """Whether the answer is a lie."""
        fault = self._fault(verb)
        if fault is None:
            return False
        self.clock.sleep(fault.seconds)
        if fault.says:
            raise CloudError(fault.says)
        return fault.effect is Effect.NONE


@dataclass(frozen=True, slots=True)
class Operation:
    """What was asked of the cloud: when it answers, and what it says then."""

    due_at: datetime
    machine: FakeMachine | None = None
    says: str = ""

    def result(self) -> FakeMachine | None:
        """Raises CloudError with the cloud's words."""
        if self.says:
            raise CloudError(self.says)
        return self.machine


class FakeProvider:
    """The port to such a cloud. `acting` is called before it changes anything, as a place to look, or to die at."""

    resource_type = "fake:index:Machine"

    def __init__(self, cloud: FakeCloud, acting: Callable[[str, FakeMachine | None], None] = lambda *_: None) -> None:
        self.cloud = cloud
        self.stated: dict[str, str] = {}
        self._acting = acting

    def render(self, birth: Birth) -> Declaration:
        return {
            "name": birth.name,
            "location": birth.location,
            "type": birth.type,
            "labels": dict(birth.labels),
            "startup": f"#!/bin/sh\nexport ORCA_TOKEN={TOKEN_PLACEHOLDER}\nexec worker {birth.name}\n",
        }

    def list(self) -> Sequence[SeenMachine]:
        return self._translated(self.cloud.list)

    def get(self, name: str, location: str) -> SeenMachine | None:
        return self._translated(lambda: self.cloud.get(location, name))

    def delete(self, machine: SeenMachine) -> None:
        self._acting("delete", self._this(machine))

        def delete() -> None:
            operation = self.cloud.begin_delete(machine.location, machine.name, machine.uid)
            self.cloud.clock.sleep((operation.due_at - self.cloud.clock.now).total_seconds())
            operation.result()

        self._translated(delete)

    def relabel(self, machine: SeenMachine, labels: Mapping[str, str]) -> None:
        self._acting("label", self._this(machine))
        self._translated(lambda: self.cloud.put_labels(machine.location, machine.name, machine.uid, labels))

    def console(self, name: str, location: str) -> str:
        machine = self.cloud.machines.get((location, name))
        return f"{name} booted\n" if machine else ""

    def architectures(self) -> Mapping[str, str]:
        return self.stated

    def classify(self, message: str) -> OrcaError:
        return classify(message)

    def _this(self, machine: SeenMachine) -> FakeMachine | None:
        """This very machine, not another of its name."""
        there = self.cloud.machines.get((machine.location, machine.name))
        return there if there is not None and there.uid == machine.uid else None

    @staticmethod
    def _translated(call: Callable[[], Answer]) -> Answer:
        try:
            return call()
        except CloudError as error:
            raise classify(str(error)) from error


def token_of(startup: str) -> str:
    """The token that a machine finds where it was rendered."""
    found = re.search(r"ORCA_TOKEN=([0-9a-f]{64})\n", startup)
    return found[1] if found else ""
