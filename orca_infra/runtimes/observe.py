"""Read what the runtime pools' decision needs. Nothing is decided here."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from orca_infra.db.connection import Database, load_queries
from orca_infra.errors import AuthFailed
from orca_infra.kube.client import Kube
from orca_infra.kube.kinds import NODE, POD, RUNTIME_ENVIRONMENT, RUNTIME_POOL, SECRET, Object, Ref
from orca_infra.kube.labels import ROLE_LABEL, STACK_LABEL
from orca_infra.runtimes.model import (
    BURNING_RATE_MAX,
    CULL_SECONDS_MAX,
    FAILURES,
    POOL_SIZE_MAX,
    Condition,
    Environment,
    Failures,
    LostNode,
    Node,
    PodRow,
    Pool,
    PoolStatus,
    RuntimeSnapshot,
    SeenObject,
)
from orca_infra.runtimes.render import ROLE, pod_number
from orca_infra.runtimes.resources import amounts_of

SQL = load_queries("runtimes")
#: How many Pods that no list shows are asked for by name in one pass.
ASKED_BY_NAME_MAX = 50


def observe(database: Database, kube: Kube, *, stack_id: str, namespace: str) -> RuntimeSnapshot:
    """One consistent snapshot: the cluster's objects first, then the rows.

    Raises Transient, AuthFailed or Refused when the cluster cannot be read (KindMissing while the CRDs are not installed),
    and Transient for the database: an unreachable cluster is never an empty one.
    """
    labels = {STACK_LABEL: stack_id, ROLE_LABEL: ROLE}
    # Asked before the cluster is: what an `up` made that ends meanwhile may be missing in the lists.
    with database.snapshot() as transaction:
        began: datetime = transaction.value("select now()")
        being_made = {row["pod"] for row in transaction.dicts(SQL["being_made"])}
    # What the API server's cache does not show yet is asked for by name, and nothing is judged by its absence.
    objects = [
        read_object({"kind": kind.kind, **item})
        for kind, metadata_only in ((POD, False), (SECRET, True))  # the loop never sees what is secret
        for item in kube.list(
            kind, namespace=namespace, labels=labels, from_cache=True, metadata_only=metadata_only
        ).items
    ]
    pools = sorted((read_pool(i) for i in kube.list(RUNTIME_POOL, namespace=namespace).items), key=lambda p: p.name)
    environments = [read_environment(item) for item in kube.list(RUNTIME_ENVIRONMENT, namespace=namespace).items]
    with database.snapshot() as transaction:
        transaction.join_many()
        now: datetime = transaction.value("select now()")
        rows = tuple(_with_doubts(row, being_made, began) for row in transaction.rows(PodRow, SQL["live_pods"]))
        if transaction.value(SQL["is_family_paused"]):  # nothing is kept warm, and what is goes
            pools = [replace(pool, size=0, asked_size=pool.size) for pool in pools]
        failures = transaction.rows(Failures, SQL["recent_failures"], {"reasons": [str(one) for one in FAILURES]})
    gone, unlisted = _ask(kube, rows, {item.uid for item in objects}, labels)
    nodes, lost_nodes = _nodes(kube, {item.node for item in (*objects, *unlisted) if item.node})
    return RuntimeSnapshot(
        now=now,
        pools=tuple(pools),
        environments={environment.name: environment for environment in environments},
        rows=rows,
        objects=(*objects, *unlisted),
        gone=gone,
        failures={one.pool: one for one in failures},
        highest_number=max((pod_number(item.name) for item in objects), default=0),
        nodes=nodes,
        lost_nodes=lost_nodes,
    )


def _with_doubts(row: PodRow, being_made: set[str], began: datetime) -> PodRow:
    """The row with what keeps a list that was begun then from being believed of its Pod."""
    ready_later = row.ready_at is not None and row.ready_at >= began
    if not ready_later and row.name not in being_made:
        return row
    return replace(row, being_made=row.name in being_made, ready_later=ready_later)


def _nodes(kube: Kube, used: set[str]) -> tuple[tuple[Node, ...] | None, tuple[LostNode, ...]]:
    """The nodes that take Pods, and those of the `used` that are lost. None, and none, when this program may not list them.

    How they were a moment ago is good enough; but what no list of the present shows is gone.
    """
    try:
        listed = {item["metadata"]["name"]: item for item in kube.list(NODE, from_cache=True).items}
        if used - set(listed):
            listed = {item["metadata"]["name"]: item for item in kube.list(NODE).items}
    except AuthFailed:
        return None, ()
    unready = {name: since for name, item in listed.items() if (since := _unready_since(item)) is not None}
    taking = [n for name, n in listed.items() if name not in unready and not n["spec"].get("unschedulable")]
    lost = [LostNode(name=name, unready_since=unready.get(name)) for name in used - (set(listed) - set(unready))]
    return (
        tuple(sorted((read_node(item) for item in taking), key=lambda node: node.name)),
        tuple(sorted(lost, key=lambda node: node.name)),
    )


def _unready_since(node: Object) -> datetime | None:
    """Since when it is not Ready; None: it is, or says nothing of it yet."""
    for one in (node.get("status") or {}).get("conditions") or []:
        if one.get("type") == "Ready" and one.get("status") != "True" and one.get("lastTransitionTime"):
            return datetime.fromisoformat(one["lastTransitionTime"])
    return None


def _ask(
    kube: Kube, rows: tuple[PodRow, ...], seen: set[str], labels: dict[str, str]
) -> tuple[frozenset[str], list[SeenObject]]:
    """Of the Pods that no list shows: those that the server, asked by name, does not have, and those that it has."""
    gone: set[str] = set()
    unlisted: list[SeenObject] = []
    for row in [row for row in rows if row.uid is not None and row.uid not in seen][:ASKED_BY_NAME_MAX]:
        assert row.uid is not None
        found = kube.get(Ref(kind=POD, namespace=row.namespace, name=row.name))
        if found is None or found["metadata"]["uid"] != row.uid:
            gone.add(row.uid)
        else:  # its label was taken off, or it is in a namespace that was used before
            stated = found["metadata"].get("labels") or {}
            labelled = all(stated.get(key) == value for key, value in labels.items())
            unlisted.append(replace(read_object({"kind": "Pod", **found}), labelled=labelled))
    return frozenset(gone), unlisted


def read_object(item: Object) -> SeenObject:
    """What matters of a Pod or Secret as the API server shows it; never a Secret's values."""
    metadata = item["metadata"]
    seen = {
        "kind": item["kind"],
        "namespace": metadata.get("namespace", ""),
        "name": metadata["name"],
        "uid": metadata["uid"],
        "created_at": datetime.fromisoformat(metadata["creationTimestamp"]),
        "owned": bool(metadata.get("ownerReferences")),
        "deleting": "deletionTimestamp" in metadata,
        "resource_version": metadata.get("resourceVersion", ""),
    }
    if item["kind"] != "Pod":
        return SeenObject(**seen)
    status = item.get("status") or {}
    conditions = {condition.get("type"): condition for condition in status.get("conditions") or []}
    held = conditions.get("PodScheduled", {}).get("status") == "False"
    waiting, message = "", ""
    if held:
        waiting = conditions["PodScheduled"].get("reason", "") or "Unscheduled"
        message = conditions["PodScheduled"].get("message", "")
    failed = ""
    for container in status.get("containerStatuses") or []:
        state = container.get("state") or {}
        if state.get("waiting"):
            waiting, message = state["waiting"].get("reason", ""), state["waiting"].get("message", "")
        if state.get("terminated"):
            failed = state["terminated"].get("reason", "")
    if status.get("phase") == "Failed" and conditions.get("DisruptionTarget", {}).get("status") == "True":
        failed = "Evicted"  # through the API, by a taint or by its kubelet, whatever its container made of it
    elif status.get("phase") == "Failed":  # the Pod's own reason says more than its container's end (Error)
        failed = status.get("reason", "") or failed
    return SeenObject(
        **seen,
        phase=status.get("phase", ""),
        ready=conditions.get("Ready", {}).get("status") == "True",
        held=held,
        waiting=waiting,
        waiting_message=message,
        failed=failed,
        address=status.get("podIP") or None,
        node=(item.get("spec") or {}).get("nodeName") or "",
    )


def read_pool(item: Object) -> Pool:
    """A RuntimePool from what the API server shows, which its schema has checked."""
    metadata, spec = item["metadata"], item["spec"]
    status = item.get("status")
    cull_seconds = (spec.get("cull") or {}).get("seconds")
    return Pool(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        environment=spec["environment"],
        # The definition says the same limits, unless somebody else's is installed.
        size=min(int(spec["size"]), POOL_SIZE_MAX),
        asked_size=int(spec["size"]) if spec["size"] > POOL_SIZE_MAX else None,
        burning_rate=min(max(float(spec.get("burningRate") or 0), 0.0), BURNING_RATE_MAX),
        cull_seconds=None if cull_seconds is None else min(max(float(cull_seconds), 0.0), CULL_SECONDS_MAX),
        resources=spec.get("resources") or None,
        affinity=spec.get("affinity") or {},
        node_selector=spec.get("nodeSelector") or {},
        tolerations=tuple(spec.get("tolerations") or ()),
        status=_read_status(status) if status else None,
        generation=int(metadata.get("generation") or 0),
        deleting="deletionTimestamp" in metadata,
    )


def _read_status(status: Object) -> PoolStatus:
    return PoolStatus(
        warm=int(status.get("warm", 0)),
        assigned=int(status.get("assigned", 0)),
        message=str(status.get("message", "")),
        generation=int(status.get("observedGeneration") or 0),
        conditions=tuple(
            Condition(
                type=one["type"],
                status=one["status"],
                reason=one.get("reason", ""),
                message=one.get("message", ""),
                since=datetime.fromisoformat(one["lastTransitionTime"]) if one.get("lastTransitionTime") else None,
            )
            for one in status.get("conditions") or []
        ),
    )


def read_node(item: Object) -> Node:
    """What of a node says whether Pods fit there."""
    metadata = item["metadata"]
    try:
        allocatable = amounts_of((item.get("status") or {}).get("allocatable") or {})
    except ValueError:
        allocatable = {}
    return Node(name=metadata["name"], labels=metadata.get("labels") or {}, allocatable=allocatable)


def read_environment(item: Object) -> Environment:
    """A RuntimeEnvironment from what the API server shows."""
    spec = item["spec"]
    return Environment(
        namespace=item["metadata"]["namespace"],
        name=item["metadata"]["name"],
        image=spec["dockerImage"],
        env=tuple(spec.get("env") or ()),
        resources=(spec.get("resourcesRanges") or {}).get("default") or {},
    )
