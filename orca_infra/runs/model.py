"""The nouns of the run clusters, frozen. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from orca_infra.allowed import Allowed

Manifest = Mapping[str, Any]


class Role(StrEnum):
    """What a Pod of a run is, in label `orca.role`."""

    DRIVER = "driver"
    HEAD = "head"
    WORKER = "worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """One start of a run, as its cluster is made from it.

    Attributes:
        start: the run's start count after this start.
        workers: how many dista workers; 0: the driver alone.

    """

    run: int
    start: int
    pipeline: str
    image: str
    workers: int = 0
    allow_new_code: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PodPlacement:
    """What a pipeline's own table in `orca.toml` says of its runs' Pods.

    Attributes:
        image_pull_secrets: names of Secrets in the runs' namespace.
        tolerations: as Kubernetes has them.
        non_root: whether the containers must not run as root (images that do are refused by the kubelet); None: as for all.

    """

    image_pull_secrets: tuple[str, ...] = ()
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    priority_class: str | None = None
    non_root: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """CPU requests as Kubernetes quantities with their thousandths, and the memory request of each Pod."""

    driver_cpu: str = "500m"
    head_cpu: str = "250m"
    worker_cpu: str = "1"
    driver_millis: int = 500
    head_millis: int = 250
    worker_millis: int = 1000
    memory: str = "512Mi"

    def cpu_of(self, workers: int) -> int:
        """A run's total CPU request in thousandths."""
        return self.driver_millis + ((self.head_millis + workers * self.worker_millis) if workers else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """What restrains the run clusters; see settings.py.

    Attributes:
        start_seconds: a Pod that cannot start, or an object that is refused, for this long ends its start.
        budget_millis: CPU that all run clusters may request together; None: no limit.
        ttl_seconds: for how long a finished Job is kept.
        admit_max: runs admitted in one pass at the most, and admit_objects_max their objects (one run at least).
        workers_max: a run with more of them gets no cluster.
        puts_labels_back: whether what a plan says of labels is done, or only said (ORCA_DRIFT).

    """

    sizes: Sizes
    start_seconds: float
    stray_grace_seconds: float
    stray_max: int
    budget_millis: int | None = None
    ttl_seconds: float = 600
    admit_max: int = 100
    admit_objects_max: int = 2000
    workers_max: int = 1000
    allowed: Allowed = field(default_factory=Allowed)
    puts_labels_back: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedRun:
    """A run that waits for a cluster, with what its pipeline allows.

    Attributes:
        earlier: a start of it that still has a cluster.

    """

    run: int
    start: int
    pipeline: str
    image: str
    workers: int
    allow_new_code: bool
    fill: bool
    max_runs: int | None
    queued_at: datetime
    earlier: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRow:
    """A start that this program wrote down and has not ended.

    Attributes:
        start: of this row; `run_start` is what the run says of itself now.
        job_uid, head_uid: once they were confirmed.
        job_declared_at: since when an `up` of unknown end may have made the Job, while it is not confirmed.
        open_objects: how many of its objects are still to be made.
        refused: what the API server says of one that it does not take, or empty.
        refused_for_good: whether the same request would get the same answer again, as far as its words tell.
        quota_full: whether that, or what it ends of, is a full quota.
        waiting: what it waits for, as it was last written down.
        ending_reason: why it ends, once that was written down.
        logs_saved: whether its drivers' logs are where they are to stay.

    """

    run: int
    start: int
    pipeline: str
    cpu_millis: int
    created_at: datetime
    run_state: str
    run_start: int
    max_starts: int | None = None
    job_uid: str | None = None
    job_declared_at: datetime | None = None
    head_uid: str | None = None
    open_objects: int = 0
    refused: str = ""
    refused_for_good: bool = False
    quota_full: bool = False
    waiting: str = ""
    ending_reason: str | None = None
    ending_detail: str = ""
    logs_saved: bool = False

    @property
    def key(self) -> tuple[int, int]:
        return self.run, self.start


class PodPhase(StrEnum):
    """A Pod's phase, as Kubernetes has it."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNKNOWN = "Unknown"

    @property
    def is_terminal(self) -> bool:
        return self in {PodPhase.SUCCEEDED, PodPhase.FAILED}


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenObject:
    """An object of the cluster that carries this stack's identity and a role.

    Attributes:
        run, start: whose it is; None when it is no start's, whatever its labels say.
        owned: whether it has owner references, and so goes with its owner.
        owners: the uids of its owners.
        deleting: its deletion has begun.
        phase: of a Pod.
        node: where a Pod is.
        waiting: why a Pod's container does not run, in Kubernetes' words (ImagePullBackOff, Unschedulable); of a Job, why it
            has no Pod (FailedCreate).
        said: the sentence that Kubernetes has to that.
        failed: why a Pod failed or a container ended (OOMKilled, Evicted, Error); of a Job, its Failed condition's reason.
        finished: a Job that completed or failed.
        resource_version: as of which all this was seen; by nothing else of it do two differ.

    """

    kind: str
    namespace: str
    name: str
    uid: str
    created_at: datetime
    role: str
    run: int | None = None
    start: int | None = None
    owned: bool = False
    owners: frozenset[str] = frozenset()
    deleting: bool = False
    phase: PodPhase | None = None
    node: str = ""
    waiting: str = ""
    said: str = ""
    failed: str = ""
    exit_code: int | None = None
    finished: bool = False
    resource_version: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """All that one pass over the run clusters knows.

    Attributes:
        queued: runs that wait for a cluster, oldest first; those of paused pipelines and without an image are not among them.
        running: by pipeline, its running runs, fill runs not counted.
        known: uids of objects that rows name.
        desired: (kind, namespace, name) of objects that rows want.
        gone: uids that the server, asked by name, says are gone.
        unlabelled: objects that it still has, though no list shows them: somebody took their labels off. Among `objects` too.

    """

    now: datetime
    queued: tuple[QueuedRun, ...] = ()
    running: Mapping[str, int] = field(default_factory=dict)
    rows: tuple[ClusterRow, ...] = ()
    objects: tuple[SeenObject, ...] = ()
    known: frozenset[str] = frozenset()
    desired: frozenset[tuple[str, str, str]] = frozenset()
    gone: frozenset[str] = frozenset()
    unlabelled: tuple[SeenObject, ...] = ()


class EndReason(StrEnum):
    """Why a start's row ends. All but ENDED are ends without a word: the run itself did not say that it ended."""

    ENDED = "Ended"
    DRIVER_FAILED = "DriverFailed"
    OOM_KILLED = "OOMKilled"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    IMAGE_PULL = "ImagePull"
    HEAD_LOST = "HeadLost"
    EVICTED = "Evicted"
    NEVER_STARTED = "NeverStarted"
    VANISHED = "Vanished"
    REFUSED = "Refused"
    REMOVED = "Removed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """A start that has to end; written down before anything is deleted."""

    run: int
    start: int
    reason: EndReason
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Objects of a start that ends, to be deleted by uid after the drivers' logs were saved."""

    run: int
    start: int
    drivers: tuple[SeenObject, ...]
    objects: tuple[SeenObject, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """A start of which nothing runs any more: the run is moved (for an end without a word) and the row ends.

    Attributes:
        job_uid: of a Job that no list shows; it is asked for by name before anything is written.

    """

    run: int
    start: int
    reason: EndReason
    to_state: str | None
    detail: str = ""
    job_uid: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What decide came to.

    Attributes:
        follow: driver Pods whose logs are to be followed.
        waiting: why queued runs were not admitted, by run.
        waits: what starts wait for, by run and start, where that is something else than what is written.
        unlabelled: objects whose labels are to be put back.

    """

    admit: tuple[QueuedRun, ...] = ()
    endings: tuple[Ending, ...] = ()
    sweeps: tuple[Sweep, ...] = ()
    finishes: tuple[Finish, ...] = ()
    strays: tuple[SeenObject, ...] = ()
    strays_held: tuple[SeenObject, ...] = ()
    follow: tuple[SeenObject, ...] = ()
    waiting: Mapping[int, str] = field(default_factory=dict)
    waits: Mapping[tuple[int, int], str] = field(default_factory=dict)
    unlabelled: tuple[SeenObject, ...] = ()
