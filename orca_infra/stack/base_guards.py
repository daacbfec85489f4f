"""What keeps Pods of a stack's namespaces apart and within bounds: network policies, quotas, limits. Standard library only.

Policies are additive and per direction: a Pod that a policy selects for a direction has of it only what policies allow.
"""

from __future__ import annotations

from typing import Any

from orca_infra.kube.labels import ROLE_LABEL, STACK_LABEL
from orca_infra.stack.base_model import API, API_PORT, HEALTH_PORT, LOOP, Base, BaseObject, Manifest, named

#: Where clouds tell a machine's own credentials to whoever asks; code of users has no business there.
_METADATA_SERVERS = ("169.254.169.254/32", "169.254.170.2/32", "169.254.170.23/32")
_METADATA_SERVERS_6 = ("fd00:ec2::254/128", "fd00:ec2::23/128")


def guard_objects(base: Base) -> list[BaseObject]:
    """All of it that is configured."""
    return [*_quotas(base), *(_policies(base) if base.network_policies else [])]


def _quotas(base: Base) -> list[BaseObject]:
    objects = []
    for namespace, hard in base.quotas.items():
        metadata = base.metadata("orca", namespace)
        objects.append(
            named({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": metadata, "spec": {"hard": dict(hard)}})
        )
    for namespace, limits in base.limits.items():
        spec = {"limits": [{"type": "Container", **{kind: dict(table) for kind, table in limits.items()}}]}
        metadata = base.metadata("orca", namespace)
        objects.append(named({"apiVersion": "v1", "kind": "LimitRange", "metadata": metadata, "spec": spec}))
    return objects


def _policies(base: Base) -> list[BaseObject]:
    objects: list[BaseObject] = []
    if base.runs_namespace:
        objects += _of_runs(base, base.runs_namespace)
    if base.runtimes_namespace:
        objects.append(_of_runtimes(base, base.runtimes_namespace))
    if base.system_namespace:
        objects += _of_the_system(base, base.system_namespace)
    return objects


def _of_runs(base: Base, namespace: str) -> list[BaseObject]:
    """Drivers and workers listen to nobody; a head to drivers and workers, on dista's port."""
    asks_heads = [{"podSelector": _role_in(base, "driver", "worker")}]
    head_port = [{"protocol": "TCP", "port": base.dista_port}]
    return [
        _policy(base, namespace, "orca-driver", _role_in(base, "driver"), []),
        _policy(base, namespace, "orca-worker", _role_in(base, "worker"), []),
        _policy(base, namespace, "orca-head", _role_in(base, "head"), [{"from": asks_heads, "ports": head_port}]),
    ]


def _of_runtimes(base: Base, namespace: str) -> BaseObject:
    """Users' runtimes are reached from outside their own kind only, so that one user's code never reaches another's."""
    if base.runtimes_from:
        callers: list[dict[str, Any]] = [
            {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}} for name in base.runtimes_from
        ]
    else:
        others = {"matchExpressions": [{"key": ROLE_LABEL, "operator": "NotIn", "values": ["runtime"]}]}
        callers = [{"namespaceSelector": {}, "podSelector": others}]
    return _policy(base, namespace, "orca-runtime", _role_in(base, "runtime"), [{"from": callers}])


def _of_the_system(base: Base, namespace: str) -> list[BaseObject]:
    """The loop answers about its health, the API its callers; where they go is theirs, the cloud's own server among it."""
    objects = []
    for name, port in ((LOOP, HEALTH_PORT), (API, API_PORT)):
        selector = {"matchLabels": {STACK_LABEL: base.stack_id, "app.kubernetes.io/name": name}}
        ingress = [{"ports": [{"protocol": "TCP", "port": port}]}]
        objects.append(_policy(base, namespace, name, selector, ingress, egress=False))
    return objects


def _role_in(base: Base, *roles: str) -> Manifest:
    expressions = [{"key": ROLE_LABEL, "operator": "In", "values": list(roles)}]
    return {"matchLabels": {STACK_LABEL: base.stack_id}, "matchExpressions": expressions}


def _policy(
    base: Base, namespace: str, name: str, selector: Manifest, ingress: list[dict[str, Any]], *, egress: bool = True
) -> BaseObject:
    spec: Manifest = {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": ingress}
    if egress:
        spec["policyTypes"].append("Egress")
        everywhere = [
            {"ipBlock": {"cidr": "0.0.0.0/0", "except": list(_METADATA_SERVERS)}},
            {"ipBlock": {"cidr": "::/0", "except": list(_METADATA_SERVERS_6)}},
            # Some network plugins do not take Pods for addresses.
            {"namespaceSelector": {}},
        ]
        spec["egress"] = [{"to": everywhere}]
    manifest = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": base.metadata(name, namespace),
        "spec": spec,
    }
    return named(manifest)
