"""What the settings say of run clusters: to decide, what restrains them, and to render, what every run's objects share."""

from __future__ import annotations

from collections.abc import Mapping

from orca_infra.errors import SettingError
from orca_infra.quantity import cpu_millis
from orca_infra.runs.model import RunLimits, Sizes
from orca_infra.runs.render import RunSettings
from orca_infra.settings import Settings


def run_limits(settings: Settings) -> RunLimits:
    """The settings' part that decide works with."""
    return RunLimits(
        sizes=_sizes(settings),
        start_seconds=settings.run_start_seconds,
        stray_grace_seconds=settings.stray_grace_seconds,
        stray_max=settings.stray_max,
        budget_millis=None if settings.vcpu_budget is None else cpu_millis(settings.vcpu_budget),
        ttl_seconds=settings.run_ttl_seconds,
        allowed=settings.allowed,
        puts_labels_back=not settings.drift_is_reported,
    )


def run_settings(settings: Settings, environ: Mapping[str, str]) -> RunSettings:
    """The settings' part that a run's objects are rendered with. Raises SettingError for a value that no Pod can have."""
    names = settings.run_environment_names
    for name in names:
        if name in environ and not _is_text(environ[name]):
            raise SettingError(
                f"{name}, which ORCA_RUN_ENV names, is no text in UTF-8, and no Pod can have it: mend its value"
            )
    return RunSettings(
        namespace=settings.runs_namespace,
        binary=settings.run_binary,
        secret=settings.run_secret,
        dista_port=settings.dista_port,
        deadline_seconds=int(settings.run_deadline_seconds),
        ttl_seconds=int(settings.run_ttl_seconds),
        non_root=settings.run_non_root,
        sizes=_sizes(settings),
        environment={name: environ[name] for name in names if name in environ},
    )


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _sizes(settings: Settings) -> Sizes:
    return Sizes(
        driver_cpu=settings.driver_cpu,
        head_cpu=settings.head_cpu,
        worker_cpu=settings.worker_cpu,
        driver_millis=cpu_millis(settings.driver_cpu),
        head_millis=cpu_millis(settings.head_cpu),
        worker_millis=cpu_millis(settings.worker_cpu),
        memory=settings.pod_memory,
    )
