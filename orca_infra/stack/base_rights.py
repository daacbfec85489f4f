"""What the loop and the API may do in the cluster: the least that works, each right with its reason.

`RIGHTS` is the one place; the base's RBAC objects and the reference page are made from it, and a test on a real API server
takes each right away and sees what it is for fail. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from orca_infra.stack.base_model import API, LOOP, Base, BaseObject, Manifest, named

#: Where a right holds.
RUNS, RUNTIMES, CLUSTER = "runs", "runtimes", "cluster"
_RBAC = "rbac.authorization.k8s.io/v1"

_LIST = "each pass begins with what is there"
_WATCH = "what happens to one hastens the next pass"
_READ = "whether one that no list shows is gone is asked by its name"
_CREATE = "a server-side apply makes what is not there"
_APPLY = "making one is a server-side apply, so that what a killed engine left is adopted"
_SWEEP = "what has ended, and strays, are deleted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Right:
    """What one account may do with one kind of object in one place; `verbs` gives the reason for each.

    Attributes:
        names: only the objects of these names; `{namespaces}` stands for those that the account works in.

    """

    account: str
    place: str
    resource: str
    verbs: Mapping[str, str]
    group: str = ""
    names: tuple[str, ...] = field(default=())


RIGHTS = (
    Right(
        account=LOOP,
        place=RUNS,
        group="batch",
        resource="jobs",
        verbs={"list": _LIST, "watch": _WATCH, "get": _READ, "create": _CREATE, "patch": _APPLY, "delete": _SWEEP},
    ),
    Right(
        account=LOOP,
        place=RUNS,
        resource="pods",
        verbs={"list": _LIST, "watch": _WATCH, "get": _READ, "create": _CREATE, "patch": _APPLY, "delete": _SWEEP},
    ),
    Right(
        account=LOOP,
        place=RUNS,
        resource="pods/log",
        verbs={"get": "a driver's log is saved before its Pod is deleted"},
    ),
    Right(
        account=LOOP,
        place=RUNS,
        resource="services",
        verbs={"list": _LIST, "create": _CREATE, "patch": _APPLY, "delete": _SWEEP},
    ),
    Right(
        account=LOOP,
        place=RUNS,
        resource="secrets",
        verbs={"list": "a Secret that carries the stack's id and a role can be a stray", "delete": _SWEEP},
    ),
    Right(
        account=LOOP,
        place=RUNTIMES,
        resource="pods",
        verbs={
            "list": _LIST,
            "watch": "a Pod can be taken as soon as it is seen Ready",
            "get": _READ,
            "create": _CREATE,
            "patch": _APPLY,
            "delete": "a culled runtime's Pod goes",
        },
    ),
    Right(
        account=LOOP,
        place=RUNTIMES,
        resource="secrets",
        verbs={
            "list": _LIST,
            "patch": "a cold start's Secret is owned by its Pod once that is there",
            "delete": "a culled runtime's Secret goes at once",
        },
    ),
    Right(
        account=LOOP,
        place=RUNTIMES,
        group="datalayer.io",
        resource="runtime-pools",
        verbs={"list": _LIST, "watch": _WATCH, "get": "a status is written to the very pool that was read"},
    ),
    Right(
        account=LOOP,
        place=RUNTIMES,
        group="datalayer.io",
        resource="runtime-pools/status",
        verbs={"patch": "a pool's status says how many Pods are warm, and why not all are"},
    ),
    Right(
        account=LOOP,
        place=RUNTIMES,
        group="datalayer.io",
        resource="runtime-environments",
        verbs={"list": _LIST, "watch": _WATCH},
    ),
    Right(
        account=LOOP,
        place=RUNTIMES,
        resource="events",
        verbs={"create": "what a pool's owner should know is an event of it"},
    ),
    Right(
        account=LOOP,
        place=CLUSTER,
        resource="namespaces",
        names=("{namespaces}", "kube-system"),
        verbs={"get": "a namespace has to be this stack's, and the cluster (kube-system's uid) the one first seen"},
    ),
    Right(
        account=LOOP,
        place=CLUSTER,
        resource="nodes",
        verbs={"list": "a pool's status says what the nodes lack; Pods of a node that is lost are replaced"},
    ),
    Right(
        account=API,
        place=RUNTIMES,
        resource="secrets",
        verbs={
            "list": "a launch gives the user's own Secrets to the runtime",
            "create": "a launch makes the runtime's Secret",
            "get": "a launch that is tried again finds the Secret that its first try made",
            "patch": "a launch that is tried again fills the Secret of its first try",
            "delete": "a runtime that is stopped loses its Secret at once",
        },
    ),
    Right(
        account=API,
        place=RUNTIMES,
        resource="pods",
        verbs={
            "patch": "an annotation makes the kubelet read the new Secret at once",
            "delete": "a runtime that is stopped loses its Pod at once",
        },
    ),
    Right(
        account=API,
        place=RUNTIMES,
        group="datalayer.io",
        resource="runtime-environments",
        verbs={"get": "a launch is of an environment that is there"},
    ),
    Right(
        account=API,
        place=RUNTIMES,
        group="datalayer.io",
        resource="runtime-pools",
        verbs={"list": "a launch is of a pool that fits, and burns what that says"},
    ),
    Right(
        account=API,
        place=CLUSTER,
        group="authentication.k8s.io",
        resource="tokenreviews",
        verbs={"create": "whose a token is, the cluster says"},
    ),
)


def rights_objects(base: Base, rights: Iterable[Right] = RIGHTS) -> list[BaseObject]:
    """The accounts, their roles and bindings; of places that the stack does not have, nothing."""
    assert base.deployed is not None
    places = {RUNS: base.runs_namespace, RUNTIMES: base.runtimes_namespace}
    accounts = [account for account in (LOOP, API) if _is_deployed(base, account)]
    objects = [named(_account(base, account)) for account in accounts]
    rights = [right for right in rights if _is_of_use(right, base)]
    for account in accounts:
        for place, namespace in places.items():
            mine = [right for right in rights if right.account == account and right.place == place]
            if namespace and mine:
                objects += _role(base, account, mine, namespace)
        mine = [right for right in rights if right.account == account and right.place == CLUSTER]
        if mine and base.uses_cluster:
            objects += _role(base, account, mine, None)
    return objects


def _is_deployed(base: Base, account: str) -> bool:
    assert base.deployed is not None
    return (base.deployed.loop_replicas if account == LOOP else base.deployed.api_replicas) is not None


def _is_of_use(right: Right, base: Base) -> bool:
    if right.place == CLUSTER:
        return (right.resource != "nodes" or base.runtimes_namespace is not None) and bool(
            base.runs_namespace or base.runtimes_namespace
        )
    return True


def _account(base: Base, account: str) -> Manifest:
    metadata = base.metadata(account, base.system_namespace)
    if account == LOOP and base.deployed is not None:
        metadata["annotations"] |= dict(base.deployed.account_annotations)
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata,
        # Only the container that needs it mounts its token.
        "automountServiceAccountToken": False,
    }


def _role(base: Base, account: str, rights: list[Right], namespace: str | None) -> list[BaseObject]:
    # Without a namespace its name has to tell two stacks of one cluster apart.
    name = account if namespace else f"{account}-{base.stack_id}"
    kind = "Role" if namespace else "ClusterRole"
    role: Manifest = {
        "apiVersion": _RBAC,
        "kind": kind,
        "metadata": base.metadata(name, namespace),
        "rules": [_rule(right, base) for right in rights],
    }
    binding: Manifest = {
        "apiVersion": _RBAC,
        "kind": f"{kind}Binding",
        "metadata": base.metadata(name, namespace),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": base.system_namespace}],
    }
    return [named(role), named(binding)]


def _rule(right: Right, base: Base) -> Manifest:
    rule: Manifest = {"apiGroups": [right.group], "resources": [right.resource], "verbs": list(right.verbs)}
    if right.names:
        worked_in = [name for name in (base.runs_namespace, base.runtimes_namespace) if name]
        rule["resourceNames"] = [*dict.fromkeys(worked_in), *(n for n in right.names if n != "{namespaces}")]
    return rule
