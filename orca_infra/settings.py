"""Environment variables: what each means, read once into a frozen `Settings`.

`SETTINGS` is the one place that says of every variable its meaning, unit, default, why that default, and what unset
does; the reference page is made from it. A variable that is set to nothing counts as unset, as Compose files write it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from orca_infra.allowed import Allowed
from orca_infra.errors import SettingError
from orca_infra.machines.model import Limits
from orca_infra.policy.configuration import PolicyFile, read_policy_file
from orca_infra.quantity import cpu_millis, duration_text, memory_bytes, seconds_of

if TYPE_CHECKING:
    from orca_infra.config import Config

_FAMILY = re.compile(r"[A-Za-z0-9_-]{1,40}")
_COUNT = re.compile(r"[0-9]{1,6}")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://.*", re.ASCII | re.DOTALL)
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_OURS = frozenset({"ORCA_DB", "DISTA_HEAD", "DISTA_PORT"})
_LEAST_KEY_BYTES = 16
_HEARTBEATS_BEFORE_LOST = 3
_LONGEST_SHOWN = 100
_CORES_MOST = 1_000_000
_WHOLE_SECONDS_MOST = 2**31 - 1
_CORES = "cores"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of one process; `SETTINGS` says what each means. Durations are seconds, secrets not in the repr."""

    stack: str
    config_path: Path
    db: str | None = field(repr=False)
    home: Path
    token_key: bytes | None = field(repr=False)
    backend_url: str | None = field(repr=False)
    passphrase_file: Path | None
    scale_seconds: float
    runs_scale_seconds: float
    runtimes_scale_seconds: float
    pass_seconds: float
    grow_after_seconds: float
    try_seconds: float
    boot_seconds: float
    image_seconds: float
    heartbeat_seconds: float
    lost_seconds: float
    lost_max: int
    stray_grace_seconds: float
    stray_max: int
    engine_seconds: float
    engine_parallel: int
    drift_is_reported: bool
    drift_seconds: float
    ended_row_seconds: float
    runner: str | None
    runs_namespace: str
    runtimes_namespace: str | None
    runtimes_start_seconds: float
    runtimes_pull_seconds: float
    runtimes_backoff_seconds: float
    runtimes_backoff_most_seconds: float
    runtimes_abandoned_seconds: float
    runtimes_births_max: int
    runtimes_tokens: Path | None
    runtimes_audience: str | None
    runtimes_launchers: tuple[str, ...]
    kubeconfig: Path | None
    run_binary: str
    run_secret: str
    run_environment_names: tuple[str, ...]
    run_deadline_seconds: float
    run_ttl_seconds: float
    run_log_seconds: float
    run_log_mib: int
    run_start_seconds: float
    dista_port: int
    driver_cpu: str
    head_cpu: str
    worker_cpu: str
    pod_memory: str
    vcpu_budget: str | None
    logs: Path | None
    policies: PolicyFile | None
    log_form: str | None
    record_passes: int
    record_seconds: float
    health_port: int | None
    health_host: str

    @property
    def uses_cluster(self) -> bool:
        """Whether a Kubernetes cluster is contacted at all."""
        return self.runner is not None or self.runtimes_namespace is not None

    @property
    def allowed(self) -> Allowed:
        """What the policies let the loop make."""
        return self.policies.allowed if self.policies else Allowed()

    def limits(self, config: Config) -> Limits:
        """Put together what restrains every pool: the settings' part and the file's."""
        return Limits(
            try_seconds=self.try_seconds,
            boot_seconds=self.boot_seconds,
            lost_seconds=self.lost_seconds,
            stray_grace_seconds=self.stray_grace_seconds,
            stray_max=self.stray_max,
            lost_max=self.lost_max,
            max_machines_total=config.max_machines_total,
            allowed=self.allowed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One environment variable.

    Attributes:
        name: of the variable.
        field: of `Settings`.
        meaning: what it decides; a sentence.
        unit: how its value is written.
        default: what unset means, written as a value would be; None when there is no value for it.
        why: why that default.
        unset: what happens when it is not set.
        read: turns the text into the value; its ValueError completes "NAME ...".
        secret: the value is never shown.

    """

    name: str
    field: str
    meaning: str
    unit: str
    default: str | None
    why: str
    unset: str
    read: Callable[[str], object]
    secret: bool = False


# How values are read: each ValueError is a sentence without its subject.


def _read_family(text: str) -> str:
    if not _FAMILY.fullmatch(text):
        raise ValueError('must be 1 to 40 letters, digits, "-" or "_"; a dot would split the names of its stacks')
    return text


def _read_seconds(text: str) -> float:
    seconds = seconds_of(text)
    if seconds == 0:
        raise ValueError("must be more than 0")
    return seconds


def _read_count(text: str) -> int:
    if not _COUNT.fullmatch(text.strip()):
        raise ValueError("must be a whole number from 0 to 999999")
    return int(text)


def _read_parallel(text: str) -> int:
    if text.strip() == _CORES:
        return len(os.sched_getaffinity(0))
    count = _read_count(text)
    if count == 0:
        raise ValueError("must be at least 1")
    return count


def _read_drift(text: str) -> bool:
    if text not in {"repair", "report"}:
        raise ValueError("must be repair or report")
    return text == "report"


def _read_path(text: str) -> Path:
    path = Path(text)
    # A shell would have replaced ~; a Compose file or a systemd unit does not.
    return path.expanduser() if path.parts[:1] == ("~",) else path


def _read_key(text: str) -> bytes:
    key = os.fsencode(text)  # the very bytes of the environment, whatever their encoding
    if len(key) < _LEAST_KEY_BYTES:
        raise ValueError(f"must have at least {_LEAST_KEY_BYTES} bytes; `openssl rand -hex 32` makes a good one")
    return key


def _read_runner(text: str) -> str:
    if text != "kubernetes":
        raise ValueError("must be kubernetes, or unset for no run clusters")
    return text


def _read_log_form(text: str) -> str:
    if text not in {"json", "text"}:
        raise ValueError("must be json or text, or unset for text on a terminal and JSON elsewhere")
    return text


def _read_policies(text: str) -> PolicyFile:
    return read_policy_file(_read_path(text))


def _read_label(text: str) -> str:
    if not _LABEL.fullmatch(text):
        raise ValueError("must be a name as Kubernetes takes it: at most 63 lower-case letters, digits and -")
    return text


def _read_names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if not _VARIABLE.fullmatch(name):
            raise ValueError(f"must be names of variables with commas between them, and {name!r} is none")
        if name in _OURS:
            raise ValueError(f"must not have {name}, which every driver gets from this program")
    return names


def _read_users(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _read_port(text: str) -> int:
    if not _COUNT.fullmatch(text.strip()) or not 0 < int(text) < 65536:
        raise ValueError("must be a port, 1 to 65535")
    return int(text)


def _read_cpu(text: str) -> str:
    if cpu_millis(text) == 0:
        raise ValueError("must be more than 0")
    return text.strip()


def _read_request(text: str) -> str:
    """What one Pod asks for; a node of so many cores there is not."""
    if cpu_millis(text) >= _CORES_MOST * 1000:
        raise ValueError(f"must be less than {_CORES_MOST} cores")
    return _read_cpu(text)


def _read_memory(text: str) -> str:
    if memory_bytes(text) == 0:
        raise ValueError("must be more than 0")
    return text.strip()


def _read_whole_seconds(text: str) -> float:
    seconds = seconds_of(text)
    if not 1 <= seconds <= _WHOLE_SECONDS_MOST or seconds != int(seconds):
        raise ValueError(f"must be whole seconds, 1 to {_WHOLE_SECONDS_MOST}: it is a field of a Job")
    return seconds


def _read_conninfo(text: str) -> str:
    if not text.strip():
        raise ValueError("must be a connection URL such as postgresql://user:password@host:5432/orca")
    return text


def _read_url(text: str) -> str:
    if not _URL.fullmatch(text):
        raise ValueError("must be a URL such as postgres://…, file://…, s3://… or gs://…")
    return text


def _seconds(name: str, field: str, default: str, *, meaning: str, why: str) -> Setting:
    unit = "seconds, or text such as 10m"
    unset = f"{duration_text(seconds_of(default))}."
    return Setting(
        name=name, field=field, meaning=meaning, unit=unit, default=default, why=why, unset=unset, read=_read_seconds
    )


def _count(name: str, field: str, default: str, *, meaning: str, why: str) -> Setting:
    unit = "whole number from 0"
    return Setting(
        name=name,
        field=field,
        meaning=meaning,
        unit=unit,
        default=default,
        why=why,
        unset=f"{default}.",
        read=_read_count,
    )


def _cpu(name: str, field: str, default: str, *, meaning: str) -> Setting:
    return Setting(
        name=name,
        field=field,
        meaning=meaning,
        unit="CPU quantity such as 500m, 2 or 1.5",
        default=default,
        why="It is counted against ORCA_VCPU_BUDGET, and what the scheduler of the cluster reserves.",
        unset=f"{default}.",
        read=_read_request,
    )


SETTINGS: tuple[Setting, ...] = (
    Setting(
        name="ORCA_STACK",
        field="stack",
        meaning="The stack family: its base stack has this name, and derived stacks begin with it and a dot.",
        unit='1 to 40 letters, digits, "-" or "_"',
        default="dev",
        why="A trial on one's own machine needs no choice; anything shared should be named.",
        unset="dev.",
        read=_read_family,
    ),
    Setting(
        name="ORCA_CONFIG",
        field="config_path",
        meaning="The file that declares the pools.",
        unit="path",
        default="orca.toml",
        why="It stands in the checkout's root, where commands are run.",
        unset="orca.toml in the current folder.",
        read=_read_path,
    ),
    Setting(
        name="ORCA_DB",
        field="db",
        meaning="How to reach Postgres, where orca keeps its runs and orca-infra its rows and state.",
        unit="connection URL or conninfo",
        default=None,
        why="A trial needs no database of its own.",
        unset="The embedded Postgres in ORCA_HOME is started and used.",
        read=_read_conninfo,
        secret=True,
    ),
    Setting(
        name="ORCA_HOME",
        field="home",
        meaning="The folder for the embedded database, the passphrase, the token key and the local cloud.",
        unit="path",
        default=None,
        why="It is where programs keep a user's data (XDG base directories); one folder for each stack family.",
        unset="$XDG_DATA_HOME/orca-infra/<stack>, or ~/.local/share/orca-infra/<stack>; as root /var/lib/orca-infra/<stack>.",
        read=_read_path,
    ),
    Setting(
        name="ORCA_TOKEN_KEY",
        field="token_key",
        meaning="The key from which each machine's token is made. A new key reaches only later machines.",
        unit="text of at least 16 bytes",
        default=None,
        why="A key that everybody knows would be none.",
        unset="Made once beside the embedded database; refused with a database of one's own.",
        read=_read_key,
        secret=True,
    ),
    Setting(
        name="PULUMI_BACKEND_URL",
        field="backend_url",
        meaning="Where the engine keeps its state.",
        unit="URL, as Pulumi takes it",
        default=None,
        why="State and rows then share one backup and one fate.",
        unset="Beside the database.",
        read=_read_url,
        secret=True,  # a postgres:// URL holds a password
    ),
    Setting(
        name="PULUMI_CONFIG_PASSPHRASE_FILE",
        field="passphrase_file",
        meaning="The file with the passphrase that encrypts secrets in the engine's state.",
        unit="path",
        default=None,
        why="A passphrase that everybody knows would be none.",
        unset="Made once beside the embedded database; refused with a database of one's own.",
        read=_read_path,
    ),
    _seconds(
        "ORCA_POOL_SCALE_SECONDS",
        "scale_seconds",
        "15",
        meaning="How long after one pass over the pools the next is made, when nothing hastens it.",
        why="Well under the time that a machine takes to boot, and cheap when nothing is to be done.",
    ),
    _seconds(
        "ORCA_RUNS_SCALE_SECONDS",
        "runs_scale_seconds",
        "5",
        meaning="How long after one pass over the run clusters the next is made, when nothing hastens it.",
        why="A run that nobody announced with a NOTIFY should not wait longer.",
    ),
    _seconds(
        "ORCA_RUNTIMES_SCALE_SECONDS",
        "runtimes_scale_seconds",
        "15",
        meaning="How long after one pass over the runtime pools the next is made, when nothing hastens it.",
        why="Watches hasten it whenever something happens to a Pod, a pool or an environment.",
    ),
    _seconds(
        "ORCA_PASS_SECONDS",
        "pass_seconds",
        "1800",
        meaning="The deadline of one pass. One that is under way for longer is said in log and status and cut short; "
        "when it still does not end within a minute, the process ends with code 1, to be started anew.",
        why="Twice the deadline of one operation of the engine: only what hangs takes longer.",
    ),
    Setting(
        name="ORCA_POOL_GROW_AFTER",
        field="grow_after_seconds",
        meaning="How long a run must have been queued before a machine is made for it.",
        unit="seconds, or text such as 10m; 0 for at once",
        default="20",
        why="A worker that is about to be free takes the run sooner than a new machine could.",
        unset="20 s.",
        read=seconds_of,
    ),
    _seconds(
        "ORCA_POOL_TRY_SECONDS",
        "try_seconds",
        "60",
        meaning="A pool makes at most one try to get machines in this time.",
        why="Providers that lack capacity lack it for minutes, and count requests.",
    ),
    _seconds(
        "ORCA_POOL_BOOT_SECONDS",
        "boot_seconds",
        "900",
        meaning="A machine whose worker has not shown up in this time is removed.",
        why="Pulling a large image on a slow type takes minutes; a quarter of an hour is no boot any more.",
    ),
    _seconds(
        "ORCA_POOL_IMAGE_SECONDS",
        "image_seconds",
        "600",
        meaning="How long the architectures of a worker image, read from its registry, are kept.",
        why="A tag can be pushed again, and registries count requests.",
    ),
    _seconds(
        "ORCA_HEARTBEAT_SECONDS",
        "heartbeat_seconds",
        "10",
        meaning="How often a worker says that it is alive.",
        why="orca's own default; it has to be what the workers use.",
    ),
    _seconds(
        "ORCA_POOL_LOST_SECONDS",
        "lost_seconds",
        "300",
        meaning="A worker that was silent for this long is lost: its machine is removed, its runs are queued again. "
        "At least three times ORCA_HEARTBEAT_SECONDS.",
        why="Longer than a restart of the database or a short loss of network; a run that is begun again costs more.",
    ),
    _count(
        "ORCA_POOL_LOST_MAX",
        "lost_max",
        "3",
        meaning="How many machines one pass may remove for their workers' silence.",
        why="Many falling silent at once is more likely a fault of what they talk to than of each.",
    ),
    _seconds(
        "ORCA_STRAY_GRACE_SECONDS",
        "stray_grace_seconds",
        "60",
        meaning="How old an object has to be before it can be called a stray, or a machine vanished.",
        why="Lists of a cloud lag behind what was made by seconds.",
    ),
    _count(
        "ORCA_STRAY_MAX",
        "stray_max",
        "20",
        meaning="More strays than this at once are taken for a mistake: none is deleted and an operator is asked.",
        why="What a crash leaves is few; many strays mean that rows or state were lost.",
    ),
    _seconds(
        "ORCA_ENGINE_SECONDS",
        "engine_seconds",
        "900",
        meaning="The deadline of one operation of the engine, after which it is interrupted.",
        why="Longer than any create that still succeeds; a hung provider must not hold a stack's lock for ever.",
    ),
    Setting(
        name="ORCA_ENGINE_PARALLEL",
        field="engine_parallel",
        meaning="How many operations of the engine on machine stacks may be under way at the same time. Runs and runtimes "
        "have one each besides, which never waits for a machine's.",
        unit="whole number from 1, or cores",
        default=_CORES,
        why="An operation's own work is a second or two of one core; the rest of it waits for the cloud.",
        unset="As many as this process has cores.",
        read=_read_parallel,
    ),
    Setting(
        name="ORCA_DRIFT",
        field="drift_is_reported",
        meaning="What becomes of a change that somebody made by hand: repair puts labels back and has the state follow what "
        "is there; report only says it, in log and status. What is gone ends in both cases.",
        unit="repair or report",
        default="repair",
        why="Without its label a machine is found by nobody, and costs on.",
        unset="repair.",
        read=_read_drift,
    ),
    _seconds(
        "ORCA_DRIFT_SECONDS",
        "drift_seconds",
        "1h",
        meaning="How often each machine stack is refreshed although nothing was seen; the stacks are spread over this time.",
        why="It takes seconds of the engine, and what matters is seen by each pass anyway.",
    ),
    _seconds(
        "ORCA_ENDED_ROW_SECONDS",
        "ended_row_seconds",
        "30d",
        meaning="How long the rows of what has ended are kept.",
        why="A month answers what happened and what it cost; the tables stay small.",
    ),
    Setting(
        name="ORCA_RUNNER",
        field="runner",
        meaning="Where runs that are placed on no worker pool go: kubernetes gives each a run cluster.",
        unit="kubernetes",
        default=None,
        why="Without it no cluster is contacted for runs.",
        unset="No run clusters.",
        read=_read_runner,
    ),
    Setting(
        name="ORCA_RUNS_NAMESPACE",
        field="runs_namespace",
        meaning="The namespace of run clusters. It belongs to one stack.",
        unit="name",
        default="orca-runs",
        why="Runs are kept apart from everything else.",
        unset="orca-runs.",
        read=_read_label,
    ),
    Setting(
        name="ORCA_RUNTIMES_NAMESPACE",
        field="runtimes_namespace",
        meaning="The namespace of runtime pools. It belongs to one stack.",
        unit="name",
        default=None,
        why="Without it no cluster is contacted for runtimes.",
        unset="No runtime pools.",
        read=_read_label,
    ),
    _seconds(
        "ORCA_RUNTIMES_START_SECONDS",
        "runtimes_start_seconds",
        "600",
        meaning="A runtime's Pod that is not Ready, or is refused, for this long is given up. Unschedulable ones are held.",
        why="Longer than a node takes to come and a large image to be pulled.",
    ),
    _seconds(
        "ORCA_RUNTIMES_PULL_SECONDS",
        "runtimes_pull_seconds",
        "60",
        meaning="How long a waiting Pod's image or configuration may be in trouble before the Pod is replaced.",
        why="The kubelet tries a few times within a minute by itself.",
    ),
    _seconds(
        "ORCA_RUNTIMES_BACKOFF_SECONDS",
        "runtimes_backoff_seconds",
        "10",
        meaning="How long after one Pod of a pool that cannot become Ready was replaced the next is; doubled each time.",
        why="One bad image must not keep the cluster busy.",
    ),
    _seconds(
        "ORCA_RUNTIMES_BACKOFF_MOST_SECONDS",
        "runtimes_backoff_most_seconds",
        "300",
        meaning="What the doubling of ORCA_RUNTIMES_BACKOFF_SECONDS ends at.",
        why="An image that was mended is noticed within minutes; an edit of the pool is in any case.",
    ),
    _seconds(
        "ORCA_RUNTIMES_ABANDONED_SECONDS",
        "runtimes_abandoned_seconds",
        "300",
        meaning="A launch whose process died in the middle is ended after this, unless its key is used again before.",
        why="Longer than a client goes on trying.",
    ),
    _count(
        "ORCA_RUNTIMES_BIRTHS_MAX",
        "runtimes_births_max",
        "250",
        meaning="How many Pods are born in one pass, of all pools together, those that lack few first.",
        why="More make more Pods a second, and fewer a shorter pass: what is taken meanwhile waits for the next.",
    ),
    Setting(
        name="ORCA_RUNTIMES_TOKENS",
        field="runtimes_tokens",
        meaning="A file with a line TOKEN,USER for each token that `orca-infra runtimes serve` takes.",
        unit="path",
        default=None,
        why="It is for a trial; a cluster knows its users itself.",
        unset="Tokens are the cluster's own, and it is asked whose they are (TokenReview).",
        read=_read_path,
    ),
    Setting(
        name="ORCA_RUNTIMES_AUDIENCE",
        field="runtimes_audience",
        meaning="For whom a cluster's token has to be made to be taken by `orca-infra runtimes serve`.",
        unit="name",
        default=None,
        why="Whoever has no audience of its own set up still has tokens for the API server.",
        unset="For the API server.",
        read=str,
    ),
    Setting(
        name="ORCA_RUNTIMES_LAUNCHERS",
        field="runtimes_launchers",
        meaning="Users whose tokens may launch, see and stop runtimes of anybody.",
        unit="names as the token has them, with commas between them",
        default="",
        why="A user's token is for that user's runtimes.",
        unset="None.",
        read=_read_users,
    ),
    Setting(
        name="KUBECONFIG",
        field="kubeconfig",
        meaning="How to reach the cluster.",
        unit="path",
        default=None,
        why="kubectl and the engine's provider read the same variable.",
        unset="In a Pod its service account, elsewhere ~/.kube/config.",
        read=_read_path,
    ),
    Setting(
        name="ORCA_RUN_BINARY",
        field="run_binary",
        meaning="orca's program inside the pipelines' images.",
        unit="name or path",
        default="orca",
        why="It is what the images have on their PATH.",
        unset="orca.",
        read=str,
    ),
    Setting(
        name="ORCA_RUN_SECRET",
        field="run_secret",
        meaning="The Secret in the runs' namespace whose key url is the driver's database. Only the driver gets it.",
        unit="name",
        default="orca-db",
        why="The base stack makes it under this name.",
        unset="orca-db.",
        read=_read_label,
    ),
    Setting(
        name="ORCA_RUN_ENV",
        field="run_environment_names",
        meaning="Variables of this program's environment that every Pod of a run gets.",
        unit="names with commas between them",
        default="",
        why="What a Pod sees is stated, never inherited.",
        unset="None.",
        read=_read_names,
    ),
    replace(
        _seconds(
            "ORCA_RUN_DEADLINE",
            "run_deadline_seconds",
            "86400",
            meaning="A driver is ended after this.",
            why="A day ends what was forgotten, and few runs last longer.",
        ),
        read=_read_whole_seconds,
    ),
    replace(
        _seconds(
            "ORCA_RUN_TTL_SECONDS",
            "run_ttl_seconds",
            "600",
            meaning="A Job that has finished is deleted after this by Kubernetes itself, if no loop was there to do it.",
            why="Long enough for a loop that was restarted to read the end of its log.",
        ),
        read=_read_whole_seconds,
    ),
    _seconds(
        "ORCA_RUN_LOG_SECONDS",
        "run_log_seconds",
        "60",
        meaning="A driver's log that cannot be read or written when its start ends is given up after so long.",
        why="A kubelet or a disk that comes back soon loses nothing, and a node that is gone keeps no start for ever.",
    ),
    _count(
        "ORCA_RUN_LOG_MIB",
        "run_log_mib",
        "1024",
        meaning="How many MiB of one driver Pod's log are kept; `driver.log` says where the rest is left out.",
        why="More than anybody reads, and one endless log does not take the disk from all others.",
    ),
    _seconds(
        "ORCA_RUN_START_SECONDS",
        "run_start_seconds",
        "600",
        meaning="A start whose Pods cannot start, or whose objects are refused, for this long is ended.",
        why="Longer than a node takes to come and a large image to be pulled.",
    ),
    Setting(
        name="DISTA_PORT",
        field="dista_port",
        meaning="The port of a run's dista head.",
        unit="port",
        default="6390",
        why="dista's own default.",
        unset="6390.",
        read=_read_port,
    ),
    _cpu("ORCA_DRIVER_CPU", "driver_cpu", "500m", meaning="The driver's CPU request."),
    _cpu("ORCA_HEAD_CPU", "head_cpu", "250m", meaning="The head's CPU request."),
    _cpu("ORCA_WORKER_CPU", "worker_cpu", "1", meaning="Each run worker's CPU request."),
    Setting(
        name="ORCA_POD_MEMORY",
        field="pod_memory",
        meaning="The memory request of each Pod of a run.",
        unit="memory quantity such as 512Mi or 1.5Gi",
        default="512Mi",
        why="Room for a driver and its libraries.",
        unset="512Mi.",
        read=_read_memory,
    ),
    Setting(
        name="ORCA_VCPU_BUDGET",
        field="vcpu_budget",
        meaning="CPU that all run clusters together may request; runs wait for what is free of it.",
        unit="CPU quantity such as 64 or 1500m",
        default=None,
        why="What a cluster may cost is its owner's to say.",
        unset="No limit.",
        read=_read_cpu,
    ),
    Setting(
        name="ORCA_LOGS",
        field="logs",
        meaning="The folder of the runs' logs: a driver's is <run>/driver.log in it.",
        unit="path",
        default=None,
        why="It is the scheduler's own folder for them where there is one.",
        unset="ORCA_HOME/logs.",
        read=_read_path,
    ),
    Setting(
        name="ORCA_POLICY_CONFIG",
        field="policies",
        meaning="The policies' configuration, as `pulumi preview --policy-pack-config` takes it. The loop keeps within its "
        "machine types, locations, counts and registries.",
        unit="path of a JSON file; docs/reference/policies.md",
        default=None,
        why="What may be made is its owner's to say.",
        unset="The policies' defaults, which restrain no type, location, count or registry.",
        read=_read_policies,
    ),
    Setting(
        name="ORCA_LOG",
        field="log_form",
        meaning="The form of the program's own log on standard error, a line for each action.",
        unit="json or text",
        default=None,
        why="People read terminals, programs read what is kept.",
        unset="text on a terminal, JSON elsewhere.",
        read=_read_log_form,
    ),
    _count(
        "ORCA_RECORD_PASSES",
        "record_passes",
        "1000",
        meaning="How many passes that changed something are kept for `orca-infra explain`, of machines, of runs and of "
        "runtimes. 0: none.",
        why="Days of a quiet stack and hours of a busy one. A pass takes a few kilobytes, and 100 with 1,000 run clusters.",
    ),
    _seconds(
        "ORCA_RECORD_SECONDS",
        "record_seconds",
        "7d",
        meaning="How long a pass is kept for `orca-infra explain` at the most.",
        why="What went wrong over a long weekend can still be asked.",
    ),
    Setting(
        name="ORCA_HEALTH_PORT",
        field="health_port",
        meaning="The port on which `orca-infra run` serves /healthz, /readyz and /metrics over HTTP.",
        unit="port",
        default=None,
        why="Two loops on one machine would want the same one; in a container nothing else does, and its manifest sets it.",
        unset="Nothing is served.",
        read=_read_port,
    ),
    Setting(
        name="ORCA_HEALTH_HOST",
        field="health_host",
        meaning="The address that ORCA_HEALTH_PORT is opened on.",
        unit="host name or address",
        default="0.0.0.0",  # noqa: S104  (as `why` says)
        why="A kubelet and a Prometheus come from outside the container. What is served holds no secret and changes nothing.",
        unset="Every IPv4 address of the machine; `::` is every address.",
        read=str,
    ),
)


def read_settings(environ: Mapping[str, str], *, as_root: bool | None = None) -> Settings:
    """Read every setting from the environment.

    What only some commands need (a token key or a passphrase, with a database of one's own) is not refused here but
    where it is needed. `as_root` says for whom the home folder is chosen; None: for the user of this process.

    Raises:
        SettingError: one line for each variable that cannot be used; the caller shows the message alone.

    """
    values: dict[str, object] = {}
    wrong: list[str] = []
    for setting in SETTINGS:
        text = environ.get(setting.name) or setting.default
        try:
            values[setting.field] = None if text is None else setting.read(text)
        except (ValueError, RuntimeError) as error:  # RuntimeError: no home folder is known for ~
            wrong.append(_sentence(setting, text or "", error))
    if not wrong:
        wrong += _wrong_together(values)
    if not wrong and values["home"] is None:
        try:
            values["home"] = _default_home(
                environ, str(values["stack"]), as_root=os.geteuid() == 0 if as_root is None else as_root
            )
        except RuntimeError:
            wrong.append("ORCA_HOME is not set and no home folder is known; set ORCA_HOME to a folder for its data")
    if wrong:
        raise SettingError("\n".join(wrong))
    return Settings(**values)  # type: ignore[arg-type]  # the test of SETTINGS checks each field's type


def _sentence(setting: Setting, text: str, error: Exception) -> str:
    if setting.secret:
        return f"{setting.name} {error} (its value is secret and not shown)"
    shown = text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "…"
    return f"{setting.name}={ascii(shown)[1:-1] if not shown.isprintable() else shown}: {error}"


def _wrong_together(values: Mapping[str, object]) -> list[str]:
    lost, heartbeat = values["lost_seconds"], values["heartbeat_seconds"]
    assert isinstance(lost, float)
    assert isinstance(heartbeat, float)
    least = _HEARTBEATS_BEFORE_LOST * heartbeat
    if lost >= least:
        return []
    return [
        (
            f"ORCA_POOL_LOST_SECONDS={lost:g}: must be at least three heartbeats, {least:g} seconds with "
            f"ORCA_HEARTBEAT_SECONDS={heartbeat:g}; a worker would be lost for one late heartbeat"
        )
    ]


def _default_home(environ: Mapping[str, str], stack: str, *, as_root: bool) -> Path:
    data = environ.get("XDG_DATA_HOME", "")
    if data.startswith("/"):  # the specification has others ignored
        return Path(data) / "orca-infra" / stack
    if as_root:
        # The embedded Postgres does not run as root: its own user has to get there, and /root is for root alone.
        return Path("/var/lib/orca-infra") / stack
    home = environ.get("HOME")
    return (Path(home) if home else Path.home()) / ".local" / "share" / "orca-infra" / stack


def unknown_settings(environ: Mapping[str, str]) -> list[str]:
    """Say which variables look like a misspelt setting: a sentence for each, to be logged as a warning.

    Other parts of orca have `ORCA_` variables of their own, so only what is a slip or two away from a setting's name,
    or differs from it by the ending `_SECONDS`, is named.
    """
    known = [setting.name for setting in SETTINGS]
    sentences = []
    for name in sorted(environ):
        if not name.upper().startswith("ORCA_") or name in known:
            continue
        near = next((other for other in known if _is_slip(name.upper(), other)), None)
        if near:
            sentences.append(f"{name} is not a setting and has no effect; did you mean {near}?")
    return sentences


def _is_slip(name: str, known: str) -> bool:
    if name == known:  # in lower case
        return True
    if name.count("_") > 1 and name.removesuffix("_SECONDS") == known.removesuffix("_SECONDS"):
        return True
    most = 2 if len(known) > len("ORCA_CONFIG") else 1
    return abs(len(name) - len(known)) <= most and _slips(name, known) <= most


def _slips(one: str, other: str) -> int:
    """Count the letters to add, leave out, change or swap with the next (optimal string alignment)."""
    before: list[int] = []
    last = list(range(len(other) + 1))
    for row, letter in enumerate(one, 1):
        now = [row]
        for column, wanted in enumerate(other, 1):
            cost = min(last[column] + 1, now[-1] + 1, last[column - 1] + (letter != wanted))
            if before and column > 1 and letter == other[column - 2] and one[row - 2] == wanted:
                cost = min(cost, before[column - 2] + 1)
            now.append(cost)
        before, last = last, now
    return last[-1]
