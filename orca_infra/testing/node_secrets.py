"""When a runtime on a real node could read its secrets, in the words of the container itself (images_orca.py)."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from orca_infra.errors import OrcaError, Transient
from orca_infra.kube.client import Kube

_SAID = "secrets: "
_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class SecretsRead:
    """What the container read, and when by this machine's clock, which is its clock, too."""

    at: float
    values: dict[str, str]


def wait_for_secrets(kube: Kube, namespace: str, pod: str, *, seconds: float = 90) -> SecretsRead:
    """Ask for the container's log until it says so. Raises Transient when it does not come within the time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for line in _log(kube, namespace, pod):
            if line.startswith(_SAID):
                said = json.loads(line.removeprefix(_SAID))
                return SecretsRead(float(said["at"]), dict(said["values"]))
        time.sleep(_POLL_SECONDS)
    raise Transient(f"the container of {pod} read no secret within {seconds:.0f} s")


def percentile(values: Sequence[float], part: float) -> float:
    """The smallest value that at least this part of all are at most."""
    ordered = sorted(values)
    return ordered[max(0, -int(-part * len(ordered) // 1) - 1)]


def _log(kube: Kube, namespace: str, pod: str) -> list[str]:
    try:
        return b"".join(kube.logs(namespace, pod)).decode(errors="replace").splitlines()
    except OrcaError:  # the container does not run yet
        return []
