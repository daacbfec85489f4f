"""Carry out the run clusters' plan: rows first, then the cohort, then what has to go."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from orca_infra.db.connection import Database, load_queries
from orca_infra.errors import NotLeader, OrcaError
from orca_infra.kube.client import Kube
from orca_infra.kube.kinds import JOB, POD, SECRET, SERVICE, Ref
from orca_infra.log import Log
from orca_infra.metrics import METRICS
from orca_infra.runs.logs import DriverLogs
from orca_infra.runs.model import EndReason, Finish, PodPlacement, QueuedRun, RunPlan, RunSpec, SeenObject, Sweep
from orca_infra.runs.observe import SQL
from orca_infra.runs.render import RunSettings, cluster_name, render
from orca_infra.stack.cohorts import Cohorts

MEASURE = load_queries("measure")
#: Starts swept side by side: each is a handful of short requests, one after the other.
SWEEPS_PARALLEL = 8
#: How long a pass waits for the logs of what it sweeps; what has not come by then goes with a later pass.
LOGS_WAIT_SECONDS = 2.0
_KINDS = {kind.kind: kind for kind in (JOB, POD, SERVICE, SECRET)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHands:
    """What acting needs: everything that can change the world, and nothing that decides."""

    database: Database
    kube: Kube
    cohorts: Cohorts
    settings: RunSettings
    placements: Callable[[], Mapping[str, PodPlacement]]
    stack_id: str
    logs: DriverLogs
    verify: Callable[[], None]
    log: Log


def apply(plan: RunPlan, hands: RunHands) -> int:
    """Do what the plan says; gives how many actions changed something.

    What fails for one run is logged and left for a later pass. Raises NotLeader, what the cohort's `up` raised (once all else
    is done), and Transient when the database is away.
    """
    hands.verify()
    hands.logs.follow(plan.follow)
    _write_endings(plan, hands)
    _write_waits(plan, hands)
    for sweep in plan.sweeps:
        if sweep.drivers:
            hands.logs.keep(sweep.run, sweep.start, sweep.drivers)
    for item in plan.unlabelled:
        _label(item, hands)
    done = _admit(plan.admit, hands)
    failure: OrcaError | None = None
    try:
        done += hands.cohorts.up()
    except NotLeader:
        raise
    except OrcaError as error:  # an engine that cannot make anything keeps no start from its end
        failure = error
    hands.verify()
    if any(sweep.drivers for sweep in plan.sweeps):
        hands.logs.wait_kept(LOGS_WAIT_SECONDS)
    with ThreadPoolExecutor(SWEEPS_PARALLEL, thread_name_prefix="sweep") as threads:
        done += sum(threads.map(lambda sweep: _sweep(sweep, hands), plan.sweeps))
        done += sum(threads.map(lambda finish: _finish(finish, hands), plan.finishes))
    for stray in plan.strays:
        deleted = _delete_stray(stray, hands)
        METRICS.stray_deleted("runs", deleted)
        done += deleted
    if failure is not None:
        raise failure
    return done + hands.cohorts.drop_empty()


def _write_endings(plan: RunPlan, hands: RunHands) -> None:
    if not plan.endings:
        return
    with hands.database.transaction() as transaction:
        for ending in plan.endings:
            transaction.run(
                SQL["begin_ending"],
                {"run": ending.run, "start": ending.start, "reason": ending.reason, "detail": ending.detail[:2000]},
            )
    for ending in plan.endings:
        hands.log.info("start ends", run=ending.run, start=ending.start, reason=ending.reason, why=ending.detail)


def _admit(runs: tuple[QueuedRun, ...], hands: RunHands) -> int:
    """Runs become running and their clusters wanted, all in one transaction; one that moved meanwhile is left out."""
    if not runs:
        return 0
    admitted: list[QueuedRun] = []
    placements = hands.placements()
    with hands.database.transaction() as transaction:
        for run in runs:
            if not transaction.value(SQL["admit"], {"run": run.run, "start": run.start}):
                continue
            admitted.append(run)
            spec = RunSpec(
                run=run.run,
                start=run.start + 1,
                pipeline=run.pipeline,
                image=run.image,
                workers=run.workers,
                allow_new_code=run.allow_new_code,
            )
            transaction.run(
                SQL["record_cluster"],
                {
                    "run": spec.run,
                    "start": spec.start,
                    "pipeline": spec.pipeline,
                    "cpu_millis": hands.settings.sizes.cpu_of(spec.workers),
                    "fill": run.fill,
                },
            )
            for position, manifest in enumerate(
                render(spec, hands.settings, hands.stack_id, placements.get(spec.pipeline))
            ):
                transaction.run(
                    SQL["record_object"],
                    {
                        "namespace": hands.settings.namespace,
                        "kind": manifest["kind"],
                        "name": manifest["metadata"]["name"],
                        "position": position,
                        "run": spec.run,
                        "start": spec.start,
                        "rendered": json.dumps(manifest),
                    },
                )
        queued = transaction.dicts(MEASURE["queued_seconds"], {"runs": [run.run for run in admitted]})
    for run in admitted:
        why = "it was queued, and nothing holds it"
        hands.log.info("run admitted", run=run.run, start=run.start + 1, pipeline=run.pipeline, why=why)
    for row in queued:
        METRICS.run_started("kubernetes", row["queued_seconds"])
    return len(admitted)


def _write_waits(plan: RunPlan, hands: RunHands) -> None:
    if not plan.waits:
        return
    with hands.database.transaction() as transaction:
        for (run, start), waiting in plan.waits.items():
            transaction.run(SQL["say_waiting"], {"run": run, "start": start, "waiting": waiting[:2000]})


def _label(item: SeenObject, hands: RunHands) -> None:
    """Put back the labels that somebody took off: lists would never show the object again."""
    ref = Ref(kind=_KINDS[item.kind], namespace=item.namespace, name=item.name)
    key = {"namespace": item.namespace, "kind": item.kind, "name": item.name}
    with hands.database.snapshot() as transaction:
        labels = transaction.value(SQL["labels_of"], key)
    try:
        hands.kube.patch(ref, {"metadata": {"labels": labels}}, uid=item.uid)
    except OrcaError as error:
        hands.log.warning("labels not put back yet", kind=item.kind, object=item.name, said=str(error))
    else:
        hands.log.warning("labels put back", kind=item.kind, object=item.name, why="somebody took them off")


def _sweep(sweep: Sweep, hands: RunHands) -> int:
    """Once the drivers' logs were saved, delete what is there by its uid."""
    if sweep.drivers:
        if not hands.logs.is_kept(sweep.run, sweep.start):
            return 0
        with hands.database.transaction() as transaction:
            transaction.run(SQL["save_logs"], {"run": sweep.run, "start": sweep.start})
    why = f"start {sweep.start} of run {sweep.run} ends"
    return sum(_delete(item, hands, "object deleted", why) for item in sweep.objects)


def _delete_stray(stray: SeenObject, hands: RunHands) -> int:
    """As it was seen: of one that somebody has changed since, such as by taking its labels off, the next pass judges anew."""
    why = "it carries this stack's identity and nobody owns it"
    return _delete(stray, hands, "stray deleted", why, resource_version=stray.resource_version)


def _delete(item: SeenObject, hands: RunHands, event: str, why: str, *, resource_version: str | None = None) -> int:
    ref = Ref(kind=_KINDS[item.kind], namespace=item.namespace, name=item.name)
    try:
        deleted = hands.kube.delete(ref, uid=item.uid, resource_version=resource_version, propagation="Background")
    except OrcaError as error:
        hands.log.warning("object not deleted yet", kind=item.kind, object=item.name, said=str(error))
        return 0
    if deleted:
        hands.log.info(event, kind=item.kind, object=item.name, uid=item.uid, why=why)
    return int(deleted)


def _finish(finish: Finish, hands: RunHands) -> int:
    """Nothing runs any more: the run is moved and the row ends, in one transaction."""
    if finish.job_uid is not None and not _is_gone(finish, finish.job_uid, hands):
        return 0
    key = {"run": finish.run, "start": finish.start}
    hands.logs.append_leftovers([(finish.run, finish.start)])
    moved_to = None
    with hands.database.transaction() as transaction:
        # Not when its driver has said meanwhile how it ended: it was heard after its start had begun to end.
        if finish.to_state is not None and transaction.value(
            SQL["move"], {**key, "to_state": finish.to_state, "reason": finish.reason}
        ):
            moved_to = finish.to_state
        transaction.run(SQL["end_cluster"], {**key, "reason": finish.reason})
        transaction.run(SQL["forget_objects"], key)
    METRICS.start_ended(finish.reason)
    level = hands.log.info if finish.reason is EndReason.ENDED else hands.log.warning
    level("start ended", **key, reason=finish.reason, run_is_now=moved_to or "as it was", why=finish.detail)
    return 1


def _is_gone(finish: Finish, job_uid: str, hands: RunHands) -> bool:
    """Whether the Job is gone or going: what the server says when it is asked by name, for a list may not show it."""
    name = cluster_name(finish.run, finish.start)
    ref = Ref(kind=JOB, namespace=hands.settings.namespace, name=name)
    try:
        found = hands.kube.get(ref)
        if found is None or found["metadata"]["uid"] != job_uid or "deletionTimestamp" in found["metadata"]:
            return True
        hands.kube.delete(ref, uid=job_uid, propagation="Background")
    except OrcaError as error:
        hands.log.warning("start not ended yet", run=finish.run, start=finish.start, said=str(error))
    return False
