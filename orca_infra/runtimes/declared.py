"""Environments and pools that orca.toml declares, as the base stack applies them. Standard library only, pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orca_infra.kube.kinds import RUNTIME_ENVIRONMENT, RUNTIME_POOL
from orca_infra.kube.labels import STACK_LABEL, object_annotations

Specs = Mapping[str, Mapping[str, object]]


def declared_objects(environments: Specs, pools: Specs, *, namespace: str, stack_id: str) -> list[dict[str, Any]]:
    """The RuntimeEnvironments, then the RuntimePools, from their specs by name.

    Fields that somebody changed with kubectl are taken back when the file changes them (base objects are forced); `kubectl
    scale` holds until then.
    """
    return [
        {
            "apiVersion": kind.api_version,
            "kind": kind.kind,
            "metadata": {
                "name": name,
                "namespace": namespace,
                "labels": {STACK_LABEL: stack_id},
                "annotations": {**object_annotations(stack_id), "pulumi.com/patchForce": "true"},
            },
            "spec": dict(spec),
        }
        for kind, specs in ((RUNTIME_ENVIRONMENT, environments), (RUNTIME_POOL, pools))
        for name, spec in specs.items()
    ]
