"""Read what the run clusters' decision needs. Nothing is decided here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from orca_infra.db.connection import Database, Transaction, load_queries
from orca_infra.errors import OrcaError
from orca_infra.kube.answers import Refusal, refusal_of
from orca_infra.kube.client import Kube
from orca_infra.kube.kinds import JOB, POD, SECRET, SERVICE, Object, Ref
from orca_infra.kube.labels import ROLE_LABEL, RUN_LABEL, STACK_LABEL, START_LABEL
from orca_infra.runs.decide import STARTS_MAX, why_barred
from orca_infra.runs.model import ClusterRow, PodPhase, QueuedRun, RunLimits, RunSnapshot, SeenObject

SQL = load_queries("runs")
_KINDS = (JOB, POD, SERVICE, SECRET)
#: Queued runs read in one pass; admission takes fewer.
QUEUED_MAX = 1000
#: How many objects that no list shows are asked for by name in one pass.
ASKED_BY_NAME_MAX = 50
#: Of so many Jobs without a Pod it is asked in one pass why, once they are this old.
ASKED_WHY_MAX = 20
ASKED_WHY_SECONDS = 10.0
_ROLES = ("driver", "head", "worker")
_SAID_CHARACTERS = 500


def observe(database: Database, kube: Kube, limits: RunLimits, *, stack_id: str, namespace: str) -> RunSnapshot:
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
        snapshot = read_rows(transaction, limits)
        known = transaction.dicts(SQL["known_objects"])
    gone, unlabelled = _ask_by_name(kube, snapshot.rows, known, {item.uid for item in objects})
    objects = [*_told_apart(objects, known), *unlabelled]
    return replace(
        snapshot,
        objects=tuple(_with_reasons(kube, objects, snapshot.now)),
        known=frozenset(row["uid"] for row in known if row["uid"]),
        desired=frozenset((row["kind"], row["namespace"], row["name"]) for row in known),
        gone=gone,
        unlabelled=unlabelled,
    )


def _told_apart(objects: Sequence[SeenObject], known: Sequence[dict[str, Any]]) -> list[SeenObject]:
    """The objects; those that only carry a start's labels are no start's.

    A start's are what its rows name and what its Job owns. Labels are anybody's to write, and must neither end a run nor
    have something deleted with it.
    """
    places = {(row["kind"], row["namespace"], row["name"]): row["uid"] for row in known}

    def is_named(item: SeenObject) -> bool:
        uid = places.get((item.kind, item.namespace, item.name), "")
        return uid is None or uid == item.uid

    jobs = {item.uid for item in objects if item.kind == "Job" and is_named(item)}
    jobs |= {row["uid"] for row in known if row["kind"] == "Job" and row["uid"]}
    return [
        item if is_named(item) or not item.owners.isdisjoint(jobs) else replace(item, run=None, start=None)
        for item in objects
    ]


def read_rows(transaction: Transaction, limits: RunLimits, *, asked: int | None = None) -> RunSnapshot:
    """The database's part of a snapshot: what is queued (run `asked` in any case), what runs, and the starts that live."""
    pipelines = transaction.dicts(SQL["pipelines_with_clusters"])
    barred = [row["name"] for row in pipelines if why_barred(row["image"], row["workers"], limits)]
    parameters = {"limit": QUEUED_MAX, "barred": barred, "starts_max": STARTS_MAX, "asked": asked}
    return RunSnapshot(
        now=transaction.value("select now()"),
        queued=tuple(transaction.rows(QueuedRun, SQL["queued_runs"], parameters)),
        running={row["pipeline"]: row["running"] for row in transaction.dicts(SQL["running_runs"])},
        rows=tuple(_with_meaning(row) for row in transaction.rows(ClusterRow, SQL["live_clusters"])),
    )


def _with_meaning(row: ClusterRow) -> ClusterRow:
    """The row with what the API server's words in it mean."""
    said = row.ending_detail if row.ending_reason else row.refused
    if not said:
        return row
    meaning = refusal_of(said)
    final = meaning in {Refusal.FINAL, Refusal.QUOTA}
    return replace(row, refused_for_good=final, quota_full=meaning is Refusal.QUOTA)


def _ask_by_name(
    kube: Kube, rows: Sequence[ClusterRow], known: Sequence[dict[str, Any]], seen: set[str]
) -> tuple[frozenset[str], tuple[SeenObject, ...]]:
    """Of confirmed Jobs and heads that no list shows: which are gone, and which are there without their labels.

    A list alone proves nothing.
    """
    places = {row["uid"]: row for row in known if row["uid"]}
    wanted = {uid for row in rows if row.ending_reason is None for uid in (row.job_uid, row.head_uid) if uid}
    gone: set[str] = set()
    unlabelled: list[SeenObject] = []
    for uid in sorted(wanted - seen)[:ASKED_BY_NAME_MAX]:
        place = places[uid]
        kind = JOB if place["kind"] == "Job" else POD
        found = kube.get(Ref(kind=kind, namespace=place["namespace"], name=place["name"]))
        if found is None or found["metadata"]["uid"] != uid:
            gone.add(uid)
            continue
        item = read_object({"kind": kind.kind, **found})
        role = "driver" if kind is JOB else "head"
        unlabelled.append(replace(item, run=place["run"], start=place["start"], role=role))
    return frozenset(gone), tuple(unlabelled)


def _with_reasons(kube: Kube, objects: Sequence[SeenObject], now: datetime) -> list[SeenObject]:
    """The objects; a Job that has had no Pod for a while with what its controller says of that."""
    drivers = {(item.run, item.start) for item in objects if item.kind == "Pod" and item.role == "driver"}
    asked = 0
    result = []
    for item in objects:
        alone = item.kind == "Job" and not item.finished and not item.deleting and (item.run, item.start) not in drivers
        if alone and asked < ASKED_WHY_MAX and now - item.created_at > timedelta(seconds=ASKED_WHY_SECONDS):
            asked += 1
            result.append(_with_reason(kube, item))
        else:
            result.append(item)
    return result


def _with_reason(kube: Kube, job: SeenObject) -> SeenObject:
    try:
        said = [event for event in kube.events(job.namespace, job.uid) if event.get("reason") == "FailedCreate"]
    except OrcaError:  # who may not read events is told less, and nothing else
        return job
    if not said:
        return job
    last = max(said, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""))
    return replace(job, waiting="FailedCreate", said=str(last.get("message", ""))[:_SAID_CHARACTERS])


def read_object(item: Object) -> SeenObject:
    """What matters of an object as the API server shows it."""
    metadata, status = item["metadata"], item.get("status") or {}
    labels = metadata.get("labels") or {}
    phase = status.get("phase") if item["kind"] == "Pod" else None
    waiting = said = failed = ""
    exit_code = None
    if item["kind"] == "Pod":
        waiting, said = _waiting(status)
        failed, exit_code = _ended(status)
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
        owners=frozenset(str(owner.get("uid")) for owner in metadata.get("ownerReferences") or ()),
        deleting="deletionTimestamp" in metadata,
        resource_version=metadata.get("resourceVersion", ""),
        phase=PodPhase(phase) if phase else None,
        node=(item.get("spec") or {}).get("nodeName", ""),
        waiting=waiting,
        said=said[:_SAID_CHARACTERS],
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


def _waiting(status: Object) -> tuple[str, str]:
    """Why a Pod's container does not run yet: in a word and in a sentence."""
    reason = said = ""
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            reason, said = condition.get("reason", ""), condition.get("message", "")
    for container in status.get("containerStatuses") or []:
        waits = (container.get("state") or {}).get("waiting") or {}
        if waits.get("reason"):
            reason, said = waits["reason"], waits.get("message", "")
    return reason, said


def _ended(status: Object) -> tuple[str, int | None]:
    """Why a Pod's container ended, and its exit code."""
    for container in status.get("containerStatuses") or []:
        ended = (container.get("state") or {}).get("terminated")
        if ended:
            return ended.get("reason", ""), ended.get("exitCode")
    return "", None


def _number(text: str | None) -> int | None:
    """A label's whole number; labels are anybody's to write."""
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 19 else None
