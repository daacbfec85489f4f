"""A runtime Pod and its Secret as they are declared: rendered once, the Pod kept in its row. Standard library only, pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orca_infra.kube.labels import ROLE_LABEL, STACK_LABEL, object_annotations
from orca_infra.names import fit_name, label_value
from orca_infra.runtimes.model import Environment, Manifest, Pool
from orca_infra.runtimes.resources import placement_of, raised_to, requests_of

ROLE = "runtime"
POOL_LABEL = "orca.pool"
ENVIRONMENT_LABEL = "orca.environment"
RUNTIME_ANNOTATION = "orca.runtime"
TOUCHED_ANNOTATION = "orca.touched"
USER_LABEL = "datalayer.io/user"
SECRETS_PATH = "/var/run/secrets/orca"

_PREFIX = "orca-runtime-"
_NUMBER_DIGITS = 10
_PART_LIMIT = 63 - len(_PREFIX) - len("-") - _NUMBER_DIGITS
_NUMBERED = re.compile(r"orca-runtime-.*-(\d{1,10})", re.ASCII | re.DOTALL)
_LABEL_VALUE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", re.ASCII)
_HASHED = re.compile(r".*-[0-9a-f]{8}", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedPod:
    """A Pod to be born, with what its row says of it: what a launch compares itself with."""

    name: str
    namespace: str
    pool: str | None
    environment: str
    manifest: Manifest
    requests: Mapping[str, int]
    placement: Mapping[str, Any]
    burning_rate: float
    cull_seconds: float | None


def pod_name(of: str, number: int) -> str:
    """`orca-runtime-<pool>-<n>`; of a cold start, its environment's name. `number` is of one sequence for all."""
    return f"{_PREFIX}{fit_name(of, limit=_PART_LIMIT)}-{number}"


def pod_number(name: str) -> int:
    """The number that a runtime Pod's name ends with; 0 when it is none."""
    match = _NUMBERED.fullmatch(name)
    return int(match[1]) if match else 0


def user_label(user: str) -> str:
    """The value of label `datalayer.io/user` for a user: the name itself where Kubernetes takes it, else made valid.

    What only looks like a name that was made valid is changed, too: no user gets what is labelled for another.
    """
    return user if _LABEL_VALUE.fullmatch(user) and not _HASHED.fullmatch(user) else fit_name(user)


def render_warm(pool: Pool, environment: Environment, number: int, stack_id: str) -> RenderedPod:
    """A Pod that waits in its pool.

    Raises:
        ValueError: its resources cannot be read; decide lets no such pool have births.

    """
    resources = pool.resources or environment.resources
    return _render(pool, environment, stack_id, name=pod_name(pool.name, number), resources=resources, own=pool.name)


def render_cold(
    pool: Pool,
    environment: Environment,
    number: int,
    stack_id: str,
    *,
    requests: Mapping[str, str],
    node_selector: Mapping[str, str] | None,
) -> RenderedPod:
    """A Pod of its own for one launch, with the rate and the time of a pool and the placement that was asked for.

    Raises:
        ValueError: resources cannot be read.

    """
    resources = raised_to(pool.resources or environment.resources, requests)
    return _render(
        pool,
        environment,
        stack_id,
        name=pod_name(environment.name, number),
        resources=resources,
        own=None,
        node_selector=node_selector,
    )


def render_secret(
    name: str, namespace: str, data: Mapping[str, str], *, stack_id: str, owner_uid: str | None
) -> Manifest:
    """The Secret that a Pod was born with a place for. `data` is base64. It never carries a user's label: it is no source."""
    owner = {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": owner_uid}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {STACK_LABEL: stack_id, ROLE_LABEL: ROLE},
            **({"ownerReferences": [owner]} if owner_uid else {}),
        },
        "data": dict(data),
    }


def _render(
    pool: Pool,
    environment: Environment,
    stack_id: str,
    *,
    name: str,
    resources: Mapping[str, Any],
    own: str | None,
    node_selector: Mapping[str, str] | None = None,
) -> RenderedPod:
    # A launch that asks for a node selection gets that one, and not the pool's.
    selector = pool.node_selector if node_selector is None else node_selector
    affinity = pool.affinity if node_selector is None else {}
    labels = {STACK_LABEL: stack_id, ROLE_LABEL: ROLE, ENVIRONMENT_LABEL: label_value(environment.name)}
    if own is not None:
        labels[POOL_LABEL] = label_value(own)
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [
            {
                "name": ROLE,
                "image": environment.image,
                "env": [dict(variable) for variable in environment.env],
                "resources": dict(resources),
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                "volumeMounts": [{"name": "secrets", "mountPath": SECRETS_PATH, "readOnly": True}],
            }
        ],
        # The whole directory, and optional: the kubelet fills it in a running container once the Secret is there.
        "volumes": [{"name": "secrets", "secret": {"secretName": name, "optional": True}}],
    }
    if affinity:
        spec["affinity"] = dict(affinity)
    if selector:
        spec["nodeSelector"] = dict(selector)
    if pool.tolerations:
        spec["tolerations"] = [dict(toleration) for toleration in pool.tolerations]
    metadata = {
        "name": name,
        "namespace": pool.namespace,
        "labels": labels,
        "annotations": object_annotations(stack_id),
    }
    return RenderedPod(
        name=name,
        namespace=pool.namespace,
        pool=own,
        environment=environment.name,
        manifest={"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec},
        requests=requests_of(resources),
        placement=placement_of(selector, affinity),
        burning_rate=pool.burning_rate,
        cull_seconds=pool.cull_seconds,
    )
