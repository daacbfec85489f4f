"""The nouns of the machine pools, frozen. Standard library only: `decide` works on these alone.

Times are aware datetimes from the database's clock; durations are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum

from orca_infra.allowed import Allowed

#: What a pause of all pools is kept under; no pool has this name.
EVERY_POOL = ""
#: Stands beside it while all of the family is paused, runs and runtimes too (loop/drain.py); no pool can be called so.
FAMILY = "*"
#: How a pool's message says that its next try comes later; when, its report says.
NEXT_TRY = "waiting for the next try"


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineType:
    """One entry of a pool's `types`, in the order of preference.

    Attributes:
        type: the provider's name of the type.
        wait_seconds: how long to keep trying this type before going to the next; the last type has no use for it.
        locations: where it is tried, in order.
        price_per_hour: for previews only; None when not stated.
        spot: whether the machine may be preempted by its provider.

    """

    type: str
    locations: tuple[str, ...]
    wait_seconds: float = 0
    price_per_hour: float | None = None
    spot: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """A pool as `orca.toml` declares it.

    Attributes:
        name: the pool's name, as pipelines name it in `worker:<pool>`.
        provider: `local` or `gcp`.
        image: the worker image; its architectures restrict the types.
        max_machines: the most machines that may exist at once.
        idle_seconds: how long a machine without runs is kept.
        max_booting: how many machines may be booting at once.
        types: what is tried, in order; never empty.

    """

    name: str
    provider: str
    image: str
    max_machines: int
    idle_seconds: float
    types: tuple[MachineType, ...]
    max_booting: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What restrains every pool; seconds, from the settings (see settings.py for meaning and defaults).

    Attributes:
        puts_labels_back: whether what a plan says of labels is done, or only said (ORCA_DRIFT).

    """

    try_seconds: float
    boot_seconds: float
    lost_seconds: float
    stray_grace_seconds: float
    stray_max: int
    lost_max: int
    max_machines_total: int | None = None
    allowed: Allowed = field(default_factory=Allowed)
    puts_labels_back: bool = True


class MachineState(StrEnum):
    """What a provider says of a machine."""

    RUNNING = "running"
    STOPPED = "stopped"
    PREEMPTED = "preempted"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenMachine:
    """A machine as its provider lists it: the fact, whoever made it.

    Attributes:
        uid: the provider's own id of this very machine; a later one of the same name has another.
        created_at: when the provider made it, by the provider's clock.
        labels: all labels it carries.

    """

    name: str
    uid: str
    location: str
    type: str
    state: MachineState
    created_at: datetime
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What waits for one pool, before the room of its workers is counted.

    Attributes:
        aged: runs that could start and have been queued long enough to ask for a machine.
        waiting: runs that could start, however young.
        next_due_at: when the next of the young ones comes due; None when there is none.

    """

    aged: int
    waiting: int
    next_due_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRow:
    """A machine that this program wrote down and has not ended, with what its worker was last seen doing."""

    name: str
    pool: str
    number: int
    provider: str
    type: str
    location: str
    created_at: datetime
    uid: str | None = None
    confirmed_at: datetime | None = None
    revoked_at: datetime | None = None
    removal_reason: str | None = None
    first_seen_at: datetime | None = None
    seen_at: datetime | None = None
    spot: bool = False
    slots: int = 0
    running: int = 0
    last_run_ended_at: datetime | None = None
    drain_at: datetime | None = None
    drain_now: bool = False

    @property
    def state(self) -> str:
        """One word for where it is in its life: making, booting, idle, busy, draining or removing."""
        if self.confirmed_at is None:
            return "making"
        if self.revoked_at is not None:
            return "removing"
        if self.drain_at is not None:
            return "draining"
        if self.first_seen_at is None:
            return "booting"
        return "busy" if self.running else "idle"

    @property
    def is_booting(self) -> bool:
        """Made, and its worker not yet seen."""
        return self.confirmed_at is not None and self.revoked_at is None and self.first_seen_at is None

    @property
    def idle_since(self) -> datetime | None:
        """From its last run's end, or from its worker's first sight; None while it boots or works."""
        if self.running or self.first_seen_at is None:
            return None
        return max(self.first_seen_at, self.last_run_ended_at or self.first_seen_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a pool's search for a machine has come; kept in Postgres.

    Attributes:
        last_number: the highest machine number ever used.
        trying_type: the type it is on, once that was tried without success; None: the first, not begun.
        trying_since: when it started on that type.
        tried_at: the last try.
        last_attempt: what that came to, in words.

    """

    last_number: int = 0
    trying_type: str | None = None
    trying_since: datetime | None = None
    tried_at: datetime | None = None
    last_attempt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An offering that could not be had, remembered until it can be.

    Attributes:
        kind: what it was, by meaning: NoCapacity, QuotaExceeded, Refused, AuthFailed or Transient.
        since, times: refusals of this kind in a row.

    """

    pool: str
    type: str
    location: str
    spot: bool
    kind: str
    since: datetime
    last_at: datetime
    times: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All that one pass knows; nothing is looked up later.

    Attributes:
        now: the database's clock.
        hearing_since: since when the loop has been able to hear workers without a gap.
        demand: by pool; a pool that is missing has none.
        machines: every row that has not ended.
        seen: what providers list, and what they answered when asked for one machine by name.
        gone: confirmed machines of which the provider said, asked by name, that there is none of that uid.
        owned: by pool, the machines in its stack's state.
        held: pools that nothing may be decided for in this pass, with the reason (an engine operation still runs).
        unreadable: providers that could not be read, with the reason.
        paused: pools that a person paused; EVERY_POOL among them means all.
        refusals: what could not be had.
        ended_lately: name and uid of machines whose removal ended within the grace; a list may still show them.
        type_architectures: by provider, the types of which it states an architecture.
        image_architectures: the variants that worker images have; one that is missing is not known.

    """

    now: datetime
    stack_id: str
    hearing_since: datetime
    demand: Mapping[str, Demand] = field(default_factory=dict)
    progress: Mapping[str, Progress] = field(default_factory=dict)
    machines: tuple[MachineRow, ...] = ()
    seen: tuple[tuple[str, SeenMachine], ...] = ()
    gone: frozenset[str] = frozenset()
    owned: Mapping[str, frozenset[str]] = field(default_factory=dict)
    held: Mapping[str, str] = field(default_factory=dict)
    unreadable: Mapping[str, str] = field(default_factory=dict)
    paused: frozenset[str] = frozenset()
    refusals: tuple[Refusal, ...] = ()
    ended_lately: frozenset[tuple[str, str]] = frozenset()
    type_architectures: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    image_architectures: Mapping[str, frozenset[str]] = field(default_factory=dict)


class Reason(StrEnum):
    """Why a machine's row ends."""

    IDLE = "Idle"
    POOL_GONE = "PoolGone"
    BOOT_TIMEOUT = "BootTimeout"
    LOST = "Lost"
    STOPPED = "Stopped"
    PREEMPTED = "Preempted"
    VANISHED = "Vanished"
    DRAINED = "Drained"
    INTERRUPTED = "Interrupted"
    NO_CAPACITY = "NoCapacity"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One offering to try."""

    type: str
    location: str
    spot: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Make:
    """Try to make up to `count` machines: each candidate in turn until one says something else than no capacity.

    Attributes:
        then_type, then_since: the type that the pool is on if every candidate is out of capacity.

    """

    pool: str
    count: int
    candidates: tuple[Candidate, ...]
    then_type: str
    then_since: datetime
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Remove:
    """Revoke the token, delete the machine, end the row; with `only_idle` given up when a run landed on it meanwhile."""

    pool: str
    name: str
    reason: Reason
    only_idle: bool
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndInterrupted:
    """End the row of a creation that never came to a confirmed machine; what may exist of it goes as a stray."""

    pool: str
    name: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DestroyOwned:
    """Delete through the engine a machine that the stack's state holds and no row wants."""

    pool: str
    name: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteStray:
    """Delete a machine that carries this stack's identity, which no stack owns and no row wants."""

    provider: str
    machine: SeenMachine
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Relabel:
    """Put back the labels of a wanted machine that somebody took off, or changed, by hand."""

    pool: str
    provider: str
    machine: SeenMachine
    labels: Mapping[str, str]
    why: str


Action = Make | Remove | EndInterrupted | DestroyOwned | DeleteStray | Relabel


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolReport:
    """What a person wants to know of a pool after the decision.

    Attributes:
        demand: runs that wait for a machine, after free room.
        message: why something is made now, or why nothing is.
        in_search: False when the search for a machine starts again from the first type.
        skipped: the types that are left out, with the reason.

    """

    pool: str
    demand: int
    message: str
    next_try_at: datetime | None = None
    in_search: bool = False
    skipped: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What decide came to: actions in no particular order, a report for each pool, and when to look again at the latest.

    Attributes:
        strays_held: strays, the young among them, that are so many that a mistake is more likely; an operator has to look.
        owned_held: likewise, machines that a stack owns and no row wants.

    """

    actions: tuple[Action, ...] = ()
    reports: tuple[PoolReport, ...] = ()
    next_due_at: datetime | None = None
    strays_held: tuple[SeenMachine, ...] = ()
    owned_held: tuple[str, ...] = ()

    def without_relabels(self) -> Plan:
        """What is left of it where labels are not put back (ORCA_DRIFT=report)."""
        return replace(self, actions=tuple(action for action in self.actions if not isinstance(action, Relabel)))
