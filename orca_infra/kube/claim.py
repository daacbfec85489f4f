"""Whose cluster and whose namespaces: refuse what belongs to another stack before anything is made in it."""

from __future__ import annotations

from orca_infra.db.connection import Database, load_queries
from orca_infra.errors import SetupError
from orca_infra.kube.client import Kube
from orca_infra.kube.kinds import NAMESPACE, Ref
from orca_infra.kube.labels import STACK_LABEL

_SQL = load_queries("cohorts")


def claim_cluster(kube: Kube, database: Database, *, remember: bool = True) -> None:
    """Remember the cluster at the first sight. Raises SetupError when the database belongs to another one."""
    uid = kube.cluster_uid()
    with database.transaction() as transaction:
        if remember:
            transaction.run(_SQL["cluster_identity"], {"uid": uid, "server": kube.server})
        known = transaction.dicts(_SQL["cluster_known"])
    row = known[0] if known else {"uid": uid}
    if row["uid"] != uid:
        raise SetupError(
            f"this stack's cluster is the one first seen at {row['server']}, and {kube.server} is another: "
            "point KUBECONFIG to the right one"
        )


def refuse_foreign(kube: Kube, namespace: str, stack_id: str) -> None:
    """Raises SetupError when the namespace is there and another stack's; one of nobody's may become this stack's."""
    found = kube.get(Ref(kind=NAMESPACE, namespace=None, name=namespace))
    owner = (found["metadata"].get("labels") or {}).get(STACK_LABEL) if found else None
    if owner not in {None, stack_id}:
        raise SetupError(
            f"the namespace {namespace} belongs to stack id {owner}, and this stack's id is {stack_id}: choose another one"
        )


def check_namespace(kube: Kube, namespace: str, stack_id: str, family: str) -> None:
    """Raises SetupError unless the namespace is there to stay and carries this stack's id.

    What it says to do has --refresh: an `up` alone believes its state, in which a namespace that somebody deleted still is.
    """
    found = kube.get(Ref(kind=NAMESPACE, namespace=None, name=namespace))
    if found is None:
        raise SetupError(f"the namespace {namespace} is missing: `pulumi up --refresh -s {family}` makes it")
    if "deletionTimestamp" in found["metadata"]:
        raise SetupError(
            f"the namespace {namespace} is being deleted: wait until it is gone, then "
            f"`pulumi up --refresh -s {family}` makes it anew"
        )
    owner = (found["metadata"].get("labels") or {}).get(STACK_LABEL)
    if owner != stack_id:
        whose = f"to stack id {owner}" if owner else "to no stack"
        raise SetupError(
            f"the namespace {namespace} belongs {whose}, and this stack's id is {stack_id}: choose another namespace, "
            f"or let `pulumi up --refresh -s {family}` make it"
        )
