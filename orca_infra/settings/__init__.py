"""Environment variables: what each means, read once into a frozen `Settings`.

`SETTINGS` is the one place that says of every variable its meaning, unit, default, why that default, and what unset
does; the reference page is made from it. A variable that is set to nothing counts as unset, as Compose files write it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from orca_infra.allowed import Allowed
from orca_infra.errors import SettingError
from orca_infra.machines.model import Limits
from orca_infra.policy.configuration import PolicyFile
from orca_infra.settings.kubernetes import KUBERNETES
from orca_infra.settings.pools import POOLS
from orca_infra.settings.service import SERVICE
from orca_infra.settings.values import Setting

if TYPE_CHECKING:
    from orca_infra.config import Config

_HEARTBEATS_BEFORE_LOST = 3
_LONGEST_SHOWN = 100


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
    runtimes_node_lost_seconds: float
    runtimes_births_max: int
    runtimes_tokens: Path | None
    runtimes_audience: str | None
    runtimes_launchers: tuple[str, ...]
    kubeconfig: Path | None
    run_binary: str
    run_secret: str
    run_environment_names: tuple[str, ...]
    run_non_root: bool
    run_deadline_seconds: float
    run_ttl_seconds: float
    run_log_seconds: float
    run_log_mib: int
    run_log_kept_seconds: float | None
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
            puts_labels_back=not self.drift_is_reported,
        )


SETTINGS: tuple[Setting, ...] = (*POOLS, *KUBERNETES, *SERVICE)


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
