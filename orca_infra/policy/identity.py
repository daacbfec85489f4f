"""The policies of identity: whose everything is, and where on a cluster."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence

from orca_infra.kube.labels import STACK_LABEL
from orca_infra.machines.decide import STACK_LABEL as CLOUD_LABEL
from orca_infra.policy.machines import MACHINES
from orca_infra.policy.model import UNKNOWN, Resource, Rule, Values, Violation, matches, table, texts

_ID = re.compile(r"(?<![a-z0-9])[a-z][a-z2-7]{15}(?![a-z0-9])")
_IDENTITY = "orca:index:Identity"
#: On Google Cloud: what has labels, and what carries the id in its name (its property) since it has none.
_LABELLED = (
    *MACHINES,
    "gcp:compute/disk:Disk",
    "gcp:compute/address:Address",
    "gcp:secretmanager/secret:Secret",
    "gcp:storage/bucket:Bucket",
)
_NAMED = {
    "gcp:compute/network:Network": "name",
    "gcp:compute/subnetwork:Subnetwork": "name",
    "gcp:compute/firewall:Firewall": "name",
    "gcp:compute/router:Router": "name",
    "gcp:compute/routerNat:RouterNat": "name",
    "gcp:serviceaccount/account:Account": "accountId",
}
#: Two stacks of one cluster share them, so they belong to neither.
_SHARED = ("CustomResourceDefinition",)
#: Kinds that are in no namespace, so that a missing one is right.
_CLUSTER_WIDE = frozenset(
    "ClusterRole ClusterRoleBinding CustomResourceDefinition IngressClass MutatingWebhookConfiguration Namespace Node "  # noqa: SIM905
    "PersistentVolume PriorityClass RuntimeClass StorageClass ValidatingAdmissionPolicy ValidatingAdmissionPolicyBinding "
    "ValidatingWebhookConfiguration CSIDriver FlowSchema PriorityLevelConfiguration APIService".split()
)


def check_labels(resource: Resource, values: Values) -> Iterator[Violation]:
    """Everything that has labels carries the stack's id in one; what has none carries it in its name."""
    if matches(resource.kind, values["exempt"]) or matches(resource.type, values["exempt"]):
        return
    place, identity = _identity(resource)
    if place is None or identity is UNKNOWN:
        return
    wanted = values["id"]
    found = identity if isinstance(identity, str) else ""
    if wanted and found != wanted:
        said = f"carries {found!r} and not this stack's id {wanted!r}" if found else "does not carry the stack's id"
        yield Violation(resource=resource, what=f"it {said} in {place}", remedy=f"set {place} to the stack's id")
    elif not _ID.fullmatch(found):
        yield Violation(
            resource=resource,
            what=f"it does not carry the stack's id in {place}" + (f" ({found!r} is none)" if found else ""),
            remedy=f"set {place} to the stack's id, which `orca-infra status` shows",
        )


def check_one_identity(resources: Sequence[Resource], _values: Values) -> Iterator[Violation]:
    """All that a stack declares carries one and the same id: that of its identity, where it declares one."""
    own = next((str(one.props.get("id")) for one in resources if one.type == _IDENTITY and "id" in one.props), "")
    first: Resource | None = None
    for resource in resources:
        place, identity = _identity(resource)
        if place is None or not isinstance(identity, str) or not _ID.fullmatch(identity):
            continue
        if not own:
            own, first = identity, resource
        elif identity != own:
            other = f"{first.kind} {first.name}" if first else "the stack's identity"
            yield Violation(
                resource=resource,
                what=f"it carries the id {identity} in {place}, and {other} carries {own}",
                remedy="give everything in one stack the same id; what is another stack's belongs into that one's program",
            )


def _identity(resource: Resource) -> tuple[str | None, object]:
    """Where a resource carries an identity, and what it carries; no place for what carries none."""
    if resource.type.startswith("kubernetes:"):
        if resource.kind in _SHARED or ("metadata" not in resource.props and resource.kind.endswith("List")):
            return None, None
        if resource.props.get("metadata") is UNKNOWN or resource.metadata.get("labels") is UNKNOWN:
            return STACK_LABEL, UNKNOWN
        return f"label {STACK_LABEL}", table(resource.metadata.get("labels")).get(STACK_LABEL)
    if resource.type in _LABELLED or (resource.type.startswith("gcp:") and resource.props.get("labels")):
        labels = resource.props.get("labels")
        return f"label {CLOUD_LABEL}", labels if labels is UNKNOWN else table(labels).get(CLOUD_LABEL)
    if resource.type in _NAMED:
        name = resource.props.get(_NAMED[resource.type])
        found = _ID.search(name) if isinstance(name, str) else None
        return f"its {_NAMED[resource.type]}", UNKNOWN if name is UNKNOWN else found and found[0]
    return None, None


def check_namespaces(resources: Sequence[Resource], values: Values) -> Iterator[Violation]:
    """Objects of a cluster are in the family's namespaces alone."""
    objects = [
        one for one in resources if one.type.startswith("kubernetes:") and not matches(one.kind, values["exempt"])
    ]
    allowed = list(values["namespaces"]) or [*family_namespaces(), *_declared(objects)]
    for one in objects:
        if one.props.get("metadata") is UNKNOWN or one.kind in _CLUSTER_WIDE - {"Namespace"}:
            continue
        is_one = one.kind == "Namespace"
        namespace = one.metadata.get("name", one.name) if is_one else one.metadata.get("namespace", "default")
        if namespace is UNKNOWN or namespace in allowed:
            continue
        yield Violation(
            resource=one,
            what=f"{'it is' if is_one else 'it is in'} namespace {namespace}, which is not of this family "
            f"({', '.join(dict.fromkeys(allowed))})",
            remedy="set its metadata.namespace to one of them, or add that one to `namespaces` of family-namespaces",
        )


def _declared(objects: Iterable[Resource]) -> list[str]:
    """The namespaces that a stack declares itself, with its id on them."""
    return [
        str(one.metadata.get("name", one.name))
        for one in objects
        if one.kind == "Namespace" and table(one.metadata.get("labels")).get(STACK_LABEL)
    ]


def family_namespaces() -> list[str]:
    """What this shell's settings say: the namespaces of runs and of runtimes."""
    names = [os.environ.get("ORCA_RUNS_NAMESPACE") or "orca-runs", os.environ.get("ORCA_RUNTIMES_NAMESPACE") or ""]
    return [name for name in names if name]


RULES = (
    Rule(
        name="identity-labels",
        description="Everything carries the stack's id: in a label, or in its name where there are no labels.",
        check=check_labels,
        properties={
            "id": {
                "type": "string",
                "default": "",
                "description": "The stack's id, as `orca-infra status` shows it. Empty: any id.",
            },
            "exempt": texts("Kinds or types that need none; * stands for anything."),
        },
    ),
    Rule(
        name="one-identity",
        description="All that a stack declares carries one and the same id.",
        check_stack=check_one_identity,
    ),
    Rule(
        name="family-namespaces",
        description="Objects on a cluster are in the namespaces of the stack's family only.",
        check_stack=check_namespaces,
        properties={
            "namespaces": texts(
                "The namespaces. Empty: those that the stack declares, ORCA_RUNS_NAMESPACE and ORCA_RUNTIMES_NAMESPACE."
            ),
            "exempt": texts("Kinds that may be anywhere; * stands for anything."),
        },
    ),
)
