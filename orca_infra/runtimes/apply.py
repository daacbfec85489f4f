"""Carry out the runtime pools' plan: rows first, then the cohort, then what has to go."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from orca_infra.db.connection import Database
from orca_infra.errors import NotLeader, OrcaError
from orca_infra.kube.client import Kube
from orca_infra.kube.kinds import EVENT, POD, RUNTIME_POOL, SECRET, Ref
from orca_infra.kube.labels import ROLE_LABEL, STACK_LABEL
from orca_infra.log import Log
from orca_infra.metrics import METRICS
from orca_infra.runtimes.model import (
    Adoption,
    Birth,
    PoolEvent,
    PoolStatus,
    RuntimePlan,
    SeenObject,
    StatusChange,
    Sweep,
)
from orca_infra.runtimes.observe import SQL
from orca_infra.runtimes.render import ROLE, render_warm
from orca_infra.runtimes.rows import lock_pods, mark_pods, next_numbers, record_pods
from orca_infra.stack.beside import CohortsBeside
from orca_infra.stack.cohorts import Cohorts

_KINDS = {kind.kind: kind for kind in (POD, SECRET)}
_DETAIL_LIMIT = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeHands:
    """What acting needs: everything that can change the world, and nothing that decides."""

    database: Database
    kube: Kube
    cohorts: Cohorts | CohortsBeside
    stack_id: str
    verify: Callable[[], None]
    log: Log


def apply(plan: RuntimePlan, hands: RuntimeHands, *, highest_number: int = 0) -> int:
    """Do what the plan says; gives how many actions changed something.

    What fails for one Pod is logged and left for a later pass. Raises NotLeader, what the cohort's `up` raised (once all else
    is done), and Transient when the database is away.

    Args:
        plan: of one snapshot.
        hands: what to do it with.
        highest_number: of that snapshot; no Pod is born with a number up to it.

    """
    hands.verify()
    # Before all that takes long: whoever edited a pool looks whether it was seen.
    done = sum(_write_status(change, hands) for change in plan.statuses)
    _write_rows(plan, hands)
    done += _bear(plan.births, hands, highest_number)
    for event in plan.events:
        _say(event, hands)
    failure: OrcaError | None = None
    try:
        done += hands.cohorts.up()
    except NotLeader:
        raise
    except OrcaError as error:  # an engine that cannot make Pods keeps no runtime alive past its time
        failure = error
    for sweep in plan.sweeps:
        done += _sweep(sweep, hands)
    for adoption in plan.adoptions:
        done += _adopt(adoption, hands)
    for pod in plan.relabels:
        done += _relabel(pod, hands)
    for name in plan.finishes:
        done += _finish(name, hands)
    for stray in plan.strays:
        deleted = _delete_stray(stray, hands)
        METRICS.stray_deleted("runtimes", deleted)
        done += deleted
    if failure is not None:
        raise failure
    return done + hands.cohorts.drop_empty()


def _write_rows(plan: RuntimePlan, hands: RuntimeHands) -> None:
    if not plan.endings and not plan.marks:
        return
    begun = []
    with hands.database.transaction() as transaction:
        lock_pods(transaction, [*(one.name for one in plan.endings), *(one.name for one in plan.marks)])
        for ending in plan.endings:
            parameters = {**asdict(ending), "detail": ending.detail[:_DETAIL_LIMIT]}
            if transaction.run(SQL["begin_ending"], parameters):
                begun.append(ending)
        mark_pods(transaction, plan.marks)
    for ending in begun:
        METRICS.runtime_pod_ends(ending.reason)
        hands.log.info("runtime Pod ends", pod=ending.name, reason=ending.reason, why=ending.detail)


def _bear(births: tuple[Birth, ...], hands: RuntimeHands, highest_number: int) -> int:
    if not births:
        return 0
    wanted = [birth for birth in births for _ in range(birth.count)]
    with hands.database.transaction() as transaction:
        transaction.run(SQL["skip_numbers"], {"seen": highest_number})
        numbers = next_numbers(transaction, len(wanted))
        pods = [
            render_warm(birth.pool, birth.environment, number, hands.stack_id)
            for birth, number in zip(wanted, numbers, strict=True)
        ]
        record_pods(transaction, pods, taken=False)
    for birth in births:
        why = f"the pool keeps {birth.pool.size}"
        hands.log.info("runtime Pods wanted", pool=birth.pool.name, pods=birth.count, why=why)
    return len(pods)


def _sweep(sweep: Sweep, hands: RuntimeHands) -> int:
    """Delete what is there, by its uid; not of a Pod that was taken before its end could be written down."""
    hands.verify()
    with hands.database.snapshot() as transaction:
        if not transaction.value(SQL["is_ending"], {"name": sweep.name}):
            return 0
    left = [item for item in sweep.objects if sweep.is_left(item)]
    why = f"{sweep.name} ends"
    return sum(_delete(item, hands, "object deleted", why, grace_seconds=sweep.grace_seconds) for item in left)


def _delete_stray(stray: SeenObject, hands: RuntimeHands) -> int:
    """As it was seen: of one that somebody has changed since, such as by taking its labels off, the next pass judges anew."""
    why = "it carries this stack's identity and nobody owns it"
    return _delete(stray, hands, "stray deleted", why, resource_version=stray.resource_version)


def _delete(
    item: SeenObject,
    hands: RuntimeHands,
    event: str,
    why: str,
    *,
    grace_seconds: int | None = None,
    resource_version: str | None = None,
) -> int:
    ref = Ref(kind=_KINDS[item.kind], namespace=item.namespace, name=item.name)
    grace_seconds = grace_seconds if item.kind == "Pod" else None
    try:
        deleted = hands.kube.delete(ref, uid=item.uid, grace_seconds=grace_seconds, resource_version=resource_version)
    except OrcaError as error:
        hands.log.warning("object not deleted yet", kind=item.kind, object=item.name, said=str(error))
        return 0
    if deleted:
        hands.log.info(event, kind=item.kind, object=item.name, uid=item.uid, why=why)
    return int(deleted)


def _adopt(adoption: Adoption, hands: RuntimeHands) -> int:
    """A cold start's Secret was made before its Pod: from now on it goes with it."""
    pod, secret = adoption.pod, adoption.secret
    owner = {"apiVersion": "v1", "kind": "Pod", "name": pod.name, "uid": pod.uid}
    ref = Ref(kind=SECRET, namespace=secret.namespace, name=secret.name)
    try:
        hands.kube.patch(ref, {"metadata": {"ownerReferences": [owner]}}, uid=secret.uid)
    except OrcaError as error:
        hands.log.warning("Secret not owned by its Pod yet", object=secret.name, said=str(error))
        return 0
    hands.log.info("Secret given to its Pod", object=secret.name, why="it was made before its Pod was there")
    return 1


def _relabel(pod: SeenObject, hands: RuntimeHands) -> int:
    ref = Ref(kind=POD, namespace=pod.namespace, name=pod.name)
    labels = {STACK_LABEL: hands.stack_id, ROLE_LABEL: ROLE}
    try:
        hands.kube.patch(ref, {"metadata": {"labels": labels}}, uid=pod.uid)
    except OrcaError as error:
        hands.log.warning("labels not put back yet", pod=pod.name, said=str(error))
        return 0
    hands.log.warning("labels put back", pod=pod.name, why="somebody took them off")
    return 1


def _finish(name: str, hands: RuntimeHands) -> int:
    """Nothing is left: the runtime ends with its credits, and the Pod's row, in one transaction."""
    hands.verify()
    with hands.database.transaction() as transaction:
        transaction.run(SQL["end_runtime"], {"name": name})
        reason = transaction.value(SQL["end_pod"], {"name": name})
        if reason is not None:
            transaction.run(SQL["forget_objects"], {"name": name})
    if reason is None:
        return 0
    hands.log.info("runtime Pod ended", pod=name, reason=reason, why="nothing is left of it")
    return 1


def _write_status(change: StatusChange, hands: RuntimeHands) -> int:
    pool = change.pool
    ref = Ref(kind=RUNTIME_POOL, namespace=pool.namespace, name=pool.name)
    try:
        hands.kube.patch(ref, {"status": status_manifest(change.status)}, uid=pool.uid, subresource="status")
    except OrcaError as error:
        hands.log.warning("pool's status not written", pool=pool.name, said=str(error))
        return 0
    status = change.status
    why = status.message or "it is no longer what was said"
    hands.log.info("pool's status written", pool=pool.name, warm=status.warm, assigned=status.assigned, why=why)
    return 1


def status_manifest(status: PoolStatus) -> dict[str, Any]:
    """A pool's `.status` as the API server takes it."""
    return {
        "warm": status.warm,
        "assigned": status.assigned,
        "message": status.message,
        "observedGeneration": status.generation,
        "conditions": [
            {
                "type": one.type,
                "status": one.status,
                "reason": one.reason,
                "message": one.message,
                "lastTransitionTime": f"{one.since.astimezone(UTC):%FT%TZ}" if one.since else None,
            }
            for one in status.conditions
        ],
    }


def _say(event: PoolEvent, hands: RuntimeHands) -> None:
    """Write an event beside its pool; one that cannot be written is no reason to stop."""
    pool, now = event.pool, f"{datetime.now(UTC):%FT%TZ}"
    manifest = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{pool.name[:200]}.{secrets.token_hex(8)}", "namespace": pool.namespace},
        "involvedObject": {
            "apiVersion": RUNTIME_POOL.api_version,
            "kind": RUNTIME_POOL.kind,
            "namespace": pool.namespace,
            "name": pool.name,
            "uid": pool.uid,
        },
        "type": "Warning" if event.warning else "Normal",
        "reason": event.reason,
        "message": event.message,
        "source": {"component": "orca-infra"},
        "reportingComponent": "orca-infra",
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
    try:
        hands.kube.create(manifest, kind=EVENT)
    except OrcaError as error:
        hands.log.warning("event not written", pool=pool.name, reason=event.reason, said=str(error))
