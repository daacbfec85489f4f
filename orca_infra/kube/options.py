"""What goes with a request beside the object, in the API server's own form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orca_infra.kube.kinds import Object


def with_conditions(patch: Mapping[str, Any], **conditions: str | None) -> Object:
    """The patch, with what has to hold: the API server takes the metadata that it states for that."""
    stated = {key: value for key, value in conditions.items() if value is not None}
    return {**patch, "metadata": {**patch.get("metadata", {}), **stated}} if stated else dict(patch)


def delete_options(*, propagation: str, grace_seconds: int | None, **conditions: str | None) -> Object:
    """A DeleteOptions: what becomes of those that the object owns, how long a Pod gets to end, and what has to hold."""
    found: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": propagation}
    stated = {key: value for key, value in conditions.items() if value is not None}
    if stated:
        found["preconditions"] = stated
    if grace_seconds is not None:
        found["gracePeriodSeconds"] = grace_seconds
    return found


def log_params(**wanted: str | int | None) -> dict[str, str]:
    """A log's query; what is off is left out."""
    return {
        key: "true" if value is True else str(value)
        for key, value in wanted.items()
        if value is not None and value is not False
    }
