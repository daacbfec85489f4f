"""Read what the run clusters' decision needs. Nothing is decided here."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from orca_infra.db.connection import Database, load_queries
from orca_infra.kube.client import Kube
from orca_infra.kube.kinds import JOB, POD, SECRET, SERVICE, Object, Ref
from orca_infra.kube.labels import ROLE_LABEL, RUN_LABEL, STACK_LABEL, START_LABEL
from orca_infra.runs.model import ClusterRow, PodPhase, QueuedRun, RunSnapshot, SeenObject

SQL = load_queries("runs")
_KINDS = (JOB, POD, SERVICE, SECRET)
#: Queued runs read in one pass; admission takes fewer.
QUEUED_MAX = 1000
#: How many objects that no list shows are asked for by name in one pass.
ASKED_BY_NAME_MAX = 50
_ROLES = ("driver", "head", "worker")


def observe(database: Database, kube: Kube, *, stack_id: str, namespace: str) -> RunSnapshot:
    """One consistent snapshot: the cluster's objects first, then the rows.

    Raises Transient, AuthFailed or Refused when the cluster cannot be read, and Transient for the database: an unreachable
    cluster is never an empty one.
    """
    objects: list[SeenObject] = []
    for kind in _KINDS:
        listing = kube.list(kind, namespace=namespace, labels={STACK_LABEL: stack_id}, label_exists=(ROLE_LABEL,))
        objects += [read_object({"kind": kind.kind, **item}) for item in listing.items]
    objects = [item for item in objects if item.role in _ROLES]
    with database.snapshot() as transaction:
        now: datetime = transaction.value("select now()")
        queued = tuple(transaction.rows(QueuedRun, SQL["queued_runs"], {"limit": QUEUED_MAX}))
        running = {row["pipeline"]: row["running"] for row in transaction.dicts(SQL["running_runs"])}
        rows = tuple(transaction.rows(ClusterRow, SQL["live_clusters"]))
        known = transaction.dicts(SQL["known_objects"])
    return RunSnapshot(
        now=now,
        queued=queued,
        running=running,
        rows=rows,
        objects=tuple(objects),
        known=frozenset(row["uid"] for row in known if row["uid"]),
        desired=frozenset((row["kind"], row["namespace"], row["name"]) for row in known),
        gone=_gone(kube, rows, known, {item.uid for item in objects}),
    )


def _gone(kube: Kube, rows: tuple[ClusterRow, ...], known: list[dict[str, Any]], seen: set[str]) -> frozenset[str]:
    """Uids of confirmed Jobs and heads that the server, asked by name, does not have: a list alone proves nothing."""
    places = {row["uid"]: row for row in known if row["uid"]}
    wanted = {uid for row in rows if row.ending_reason is None for uid in (row.job_uid, row.head_uid) if uid}
    gone: set[str] = set()
    for uid in sorted(wanted - seen)[:ASKED_BY_NAME_MAX]:
        place = places[uid]
        kind = JOB if place["kind"] == "Job" else POD
        found = kube.get(Ref(kind=kind, namespace=place["namespace"], name=place["name"]))
        if found is None or found["metadata"]["uid"] != uid:
            gone.add(uid)
    return frozenset(gone)


def read_object(item: Object) -> SeenObject:
    """What matters of an object as the API server shows it."""
    metadata, status = item["metadata"], item.get("status") or {}
    labels = metadata.get("labels") or {}
    phase = status.get("phase") if item["kind"] == "Pod" else None
    waiting, failed, exit_code = _container(status) if item["kind"] == "Pod" else ("", "", None)
    if item["kind"] == "Pod":
        failed = _of_pod(status) or failed
    finished = ""
    if item["kind"] == "Job":
        for condition in status.get("conditions") or []:
            if condition.get("status") == "True" and condition["type"] in {"Complete", "Failed"}:
                finished = condition["type"]
                failed = condition.get("reason", "") if finished == "Failed" else ""
    return SeenObject(
        kind=item["kind"],
        namespace=metadata.get("namespace", ""),
        name=metadata["name"],
        uid=metadata["uid"],
        created_at=datetime.fromisoformat(metadata["creationTimestamp"]),
        role=labels.get(ROLE_LABEL, ""),
        run=_number(labels.get(RUN_LABEL)),
        start=_number(labels.get(START_LABEL)),
        owned=bool(metadata.get("ownerReferences")),
        deleting="deletionTimestamp" in metadata,
        phase=PodPhase(phase) if phase else None,
        waiting=waiting,
        failed=failed,
        exit_code=exit_code,
        finished=bool(finished),
    )


def _of_pod(status: Object) -> str:
    """Why a Pod as a whole ended or is going to: its containers then only say how they answered the signal (Error, 143)."""
    for condition in status.get("conditions") or []:
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            return str(condition.get("reason", ""))
    return str(status.get("reason", "")) if status.get("phase") == "Failed" else ""


def _container(status: Object) -> tuple[str, str, int | None]:
    """Why a Pod's container waits, why it ended, and its exit code."""
    waiting = failed = ""
    exit_code = None
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            waiting = condition.get("reason", "")
    for container in status.get("containerStatuses") or []:
        state = container.get("state") or {}
        waiting = (state.get("waiting") or {}).get("reason", "") or waiting
        ended = state.get("terminated")
        if ended:
            failed, exit_code = ended.get("reason", ""), ended.get("exitCode")
    return waiting, failed, exit_code


def _number(text: str | None) -> int | None:
    """A label's whole number; labels are anybody's to write."""
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 19 else None
