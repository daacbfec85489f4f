"""The runtimes' two definitions on a test cluster."""

from __future__ import annotations

import time

from orca_infra.errors import SetupError
from orca_infra.kube.client import Kube
from orca_infra.kube.kinds import CRD, Ref
from orca_infra.runtimes.crds import runtime_environment_crd, runtime_pool_crd

_WAIT_SECONDS = 240.0
_POLL_SECONDS = 0.05


def define_runtimes(kube: Kube) -> None:
    """Apply both, and return once the API server serves them. Raises SetupError when it never does."""
    for crd in (runtime_pool_crd(), runtime_environment_crd()):
        kube.apply(crd, manager="test", force=True)
        deadline = time.monotonic() + _WAIT_SECONDS
        while not _is_served(kube, crd["metadata"]["name"]):
            if time.monotonic() > deadline:
                raise SetupError(f"{crd['metadata']['name']} is not served after {_WAIT_SECONDS:.0f} s")
            time.sleep(_POLL_SECONDS)


def _is_served(kube: Kube, name: str) -> bool:
    found = kube.get(Ref(kind=CRD, name=name)) or {}
    conditions = (found.get("status") or {}).get("conditions") or ()
    return any(one["type"] == "Established" and one["status"] == "True" for one in conditions)
