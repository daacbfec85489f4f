"""The nouns of the runtime pools, frozen. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

from orca_infra.allowed import Allowed

Manifest = Mapping[str, Any]

#: Problems that pass by themselves.
STARTING = "starting"
GOING_AWAY = "going away"
#: What a problem of a Pod's node begins with.
NODE_TROUBLE = "its node"
_PROBLEM_LIMIT = 500
#: What a pool can say at the most, whoever installed its definition.
POOL_SIZE_MAX = 10_000
BURNING_RATE_MAX = 1e9
CULL_SECONDS_MAX = 100 * 365 * 86400
# Why a kubelet ends a Pod that has done nothing wrong (kubernetes 1.36: pkg/kubelet/eviction, preemption, nodeshutdown).
_EVICTIONS = frozenset({"Evicted", "Preempting", "Terminated", "NodeShutdown", "Shutdown"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A condition of a pool, as Kubernetes writes them. `status` is True, False or Unknown; `since` when it came to that."""

    type: str
    status: str
    reason: str
    message: str = ""
    since: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    """What a pool's `.status` says. `generation` is that of the spec that it speaks of."""

    warm: int = 0
    assigned: int = 0
    message: str = ""
    generation: int = 0
    conditions: tuple[Condition, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """A RuntimePool as the cluster has it.

    Attributes:
        size: how many Pods are kept warm.
        asked_size: what its spec says, where that is more than can be, or than is kept while the stack is paused.
        burning_rate: credits a second.
        cull_seconds: how long its runtimes live; None: until they are stopped.
        resources: of its Pods; None: the environment's.
        status: what its status says now; None: nothing yet.
        deleting: its deletion has begun.

    """

    namespace: str
    name: str
    uid: str
    environment: str
    size: int
    asked_size: int | None = None
    burning_rate: float = 0.0
    cull_seconds: float | None = None
    resources: Mapping[str, Any] | None = None
    affinity: Mapping[str, Any] = field(default_factory=dict)
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    status: PoolStatus | None = None
    generation: int = 0
    deleting: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node that takes Pods. `allocatable` is in thousandths, `pods` among them."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    allocatable: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LostNode:
    """A node that Pods were bound to. `unready_since`: when its kubelet was last heard of; None: there is no such node."""

    name: str
    unready_since: datetime | None = None

    @property
    def is_gone(self) -> bool:
        return self.unready_since is None

    @property
    def problem(self) -> str:
        return f"{NODE_TROUBLE} {self.name} is {'gone' if self.is_gone else 'not Ready'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A RuntimeEnvironment: what runs in a Pod. `resources` is its resourcesRanges.default."""

    namespace: str
    name: str
    image: str
    env: tuple[Mapping[str, Any], ...] = ()
    resources: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeLimits:
    """What restrains the runtime pools.

    Attributes:
        start_seconds: a Pod that is not Ready, or an object that is refused, for this long is given up.
        pull_seconds: how long a waiting Pod's image or configuration may be in trouble before it is replaced.
        backoff_seconds: between one replacement and the next of a pool, doubling up to `backoff_most_seconds`.
        abandoned_seconds: a launch that has not come to its end in this time never will.
        node_lost_seconds: a waiting Pod whose node has not been Ready for so long is given up.
        births_max: Pods born in one pass at the most, and of one pool on their way to Ready.
        puts_labels_back: whether what a plan says of labels is done, or only said (ORCA_DRIFT).

    """

    stray_grace_seconds: float
    stray_max: int
    start_seconds: float = 600.0
    pull_seconds: float = 60.0
    backoff_seconds: float = 10.0
    backoff_most_seconds: float = 300.0
    abandoned_seconds: float = 300.0
    node_lost_seconds: float = 60.0
    births_max: int = 500
    allowed: Allowed = field(default_factory=Allowed)
    puts_labels_back: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PodRow:
    """A runtime Pod that this program wrote down and has not ended.

    Attributes:
        pool: None for a cold start.
        uid: of the Pod, once it was seen, or made by a cohort.
        seen: whether the row itself has the uid, and so a launch can take it.
        ready_at, unready_at: since when it is Ready, or is not any more.
        problem: why it is not Ready, as written down.
        taken_at: a launch has taken it.
        tried_at: since when it has been tried to make it; None: nobody has.
        refused: what the API server says of it when it does not take it.
        runtime: what it is taken for; None also for a Pod whose launch was given up.
        expires_at: when its runtime is culled.
        secret_made: whether its launch came to its end.
        being_made: its `up` was under way when the cluster was looked at, so that its Pod may be there though none was seen.
        ready_later: a watch showed it Ready while the cluster was looked at, or later.

    """

    name: str
    namespace: str
    environment: str
    created_at: datetime
    pool: str | None = None
    uid: str | None = None
    seen: bool = False
    ready_at: datetime | None = None
    unready_at: datetime | None = None
    address: str | None = None
    problem: str = ""
    taken_at: datetime | None = None
    tried_at: datetime | None = None
    refused: str = ""
    ending_reason: str | None = None
    ending_detail: str = ""
    runtime: UUID | None = None
    expires_at: datetime | None = None
    secret_made: bool = False
    being_made: bool = False
    ready_later: bool = False

    @property
    def waiting(self) -> bool:
        """Whether no launch has taken it."""
        return self.taken_at is None


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenObject:
    """A Pod or Secret of the cluster that carries this stack's identity and the role of a runtime.

    Attributes:
        owned: whether it has owner references, and so goes with its owner.
        deleting: its deletion has begun.
        phase: of a Pod, as Kubernetes has it.
        ready: whether a Pod's containers are.
        held: the scheduler finds no place for the Pod.
        waiting: why it waits, in Kubernetes' words (ImagePullBackOff, Unschedulable), with `waiting_message`.
        failed: why it ended (OOMKilled, Evicted, Error, Completed).
        address: of the Pod.
        node: that the Pod is bound to.
        labelled: whether it has the labels by which lists find it.
        resource_version: as of which all this was seen; by nothing else of it do two differ.

    """

    kind: str
    namespace: str
    name: str
    uid: str
    created_at: datetime
    owned: bool = False
    deleting: bool = False
    phase: str = ""
    ready: bool = False
    held: bool = False
    waiting: str = ""
    waiting_message: str = ""
    failed: str = ""
    address: str | None = None
    node: str = ""
    labelled: bool = True
    resource_version: str = field(default="", compare=False)

    @property
    def is_over(self) -> bool:
        """Whether a Pod has ended."""
        return self.phase in {"Succeeded", "Failed"}

    @property
    def is_evicted(self) -> bool:
        """Whether a Pod ended through no fault of its own."""
        return self.is_over and self.failed in _EVICTIONS

    @property
    def can_serve(self) -> bool:
        """Whether a Pod is Ready and stays."""
        return self.ready and not self.deleting and not self.is_over

    @property
    def problem(self) -> str:
        """Why a Pod cannot serve, in words that stay the same from pass to pass; empty when it can."""
        if self.can_serve:
            return ""
        if self.deleting:
            return GOING_AWAY
        if self.is_over:
            return f"ended: {self.failed or self.phase}"
        words = ": ".join(text for text in (self.waiting, self.waiting_message) if text)
        return words[:_PROBLEM_LIMIT] or STARTING


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """How many waiting Pods of a pool could not become Ready of late, and when the last of them ended."""

    pool: str
    failures: int
    last_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeSnapshot:
    """All that one pass over the runtime pools knows.

    Attributes:
        environments: by name.
        rows: Pods that have not ended, the oldest first.
        gone: uids that the server, asked by name, says are gone.
        failures: by pool.
        highest_number: that a name in the cluster ends with.
        nodes: that take Pods; None: this program may not see them.
        lost_nodes: that have Pods of these rows, and are not Ready or not there any more.

    """

    now: datetime
    pools: tuple[Pool, ...] = ()
    environments: Mapping[str, Environment] = field(default_factory=dict)
    rows: tuple[PodRow, ...] = ()
    objects: tuple[SeenObject, ...] = ()
    gone: frozenset[str] = frozenset()
    failures: Mapping[str, Failures] = field(default_factory=dict)
    highest_number: int = 0
    nodes: tuple[Node, ...] | None = None
    lost_nodes: tuple[LostNode, ...] = ()


class EndReason(StrEnum):
    """Why a runtime Pod ends."""

    CULLED = "Culled"
    STOPPED = "Stopped"
    VANISHED = "Vanished"
    FAILED = "Failed"
    EVICTED = "Evicted"
    NODE_LOST = "NodeLost"
    IMAGE_PULL = "ImagePull"
    NEVER_READY = "NeverReady"
    REFUSED = "Refused"
    SURPLUS = "Surplus"
    POOL_DELETED = "PoolDeleted"
    ABANDONED = "Abandoned"
    DISCARDED = "Discarded"


#: The ends of waiting Pods that could not become Ready: they are replaced one at a time, with backoff.
FAILURES = (EndReason.FAILED, EndReason.IMAGE_PULL, EndReason.NEVER_READY, EndReason.REFUSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Birth:
    """Pods to be born for a pool."""

    pool: Pool
    environment: Environment
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """A Pod that has to end; written down before anything is deleted. `only_waiting`: not when a launch just took it."""

    name: str
    reason: EndReason
    detail: str
    only_waiting: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What is new of a Pod, to be written in its row."""

    namespace: str
    name: str
    uid: str | None
    ready: bool
    address: str | None
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Objects of a Pod's row that ends, to be deleted by uid.

    `grace_seconds`: that the Pod has to end; None: those that it asked for. With 0 it is deleted without its kubelet's word,
    even if its deletion has begun.
    """

    name: str
    objects: tuple[SeenObject, ...]
    grace_seconds: int | None = None

    def is_left(self, item: SeenObject) -> bool:
        """Whether it is still to be deleted."""
        return not item.deleting or (item.kind == "Pod" and self.grace_seconds == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """A Secret that was made before its Pod, and is to be owned by it now."""

    secret: SeenObject
    pod: SeenObject


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusChange:
    """A pool's status that is to be written."""

    pool: Pool
    status: PoolStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolEvent:
    """Something that happened to a pool, for `kubectl describe`."""

    pool: Pool
    reason: str
    message: str
    warning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimePlan:
    """What decide came to.

    Attributes:
        relabels: Pods whose labels somebody took off: they are put back.
        finishes: rows of which nothing is left, by name.
        next_due_at: when a pass has something to do, though nothing else happens.

    """

    births: tuple[Birth, ...] = ()
    endings: tuple[Ending, ...] = ()
    marks: tuple[Mark, ...] = ()
    sweeps: tuple[Sweep, ...] = ()
    adoptions: tuple[Adoption, ...] = ()
    relabels: tuple[SeenObject, ...] = ()
    finishes: tuple[str, ...] = ()
    strays: tuple[SeenObject, ...] = ()
    strays_held: tuple[SeenObject, ...] = ()
    statuses: tuple[StatusChange, ...] = ()
    events: tuple[PoolEvent, ...] = ()
    next_due_at: datetime | None = None
