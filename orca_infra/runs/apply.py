"""Carry out the run clusters' plan: rows first, then the cohort, then what has to go."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from orca_infra.db.connection import Database
from orca_infra.errors import NotLeader, OrcaError
from orca_infra.kube.client import Kube
from orca_infra.kube.kinds import JOB, POD, SECRET, SERVICE, Ref
from orca_infra.log import Log
from orca_infra.runs.logs import DriverLogs
from orca_infra.runs.model import EndReason, Finish, PodPlacement, QueuedRun, RunPlan, RunSpec, SeenObject, Sweep
from orca_infra.runs.observe import SQL
from orca_infra.runs.render import RunSettings, render
from orca_infra.stack.cohorts import Cohorts

#: Starts swept side by side: each is a handful of short requests, one after the other.
SWEEPS_PARALLEL = 8
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
    done = _admit(plan.admit, hands)
    failure: OrcaError | None = None
    try:
        cohort = hands.cohorts.up()
        done += cohort.made if cohort else 0
    except NotLeader:
        raise
    except OrcaError as error:  # an engine that cannot make anything keeps no start from its end
        failure = error
    hands.verify()
    with ThreadPoolExecutor(SWEEPS_PARALLEL, thread_name_prefix="sweep") as threads:
        done += sum(threads.map(lambda sweep: _sweep(sweep, hands), plan.sweeps))
    for finish in plan.finishes:
        done += _finish(finish, hands)
    for stray in plan.strays:
        done += _delete(stray, hands, "stray deleted")
    for stray in plan.strays_held:
        hands.log.warning("strays held: too many at once, an operator has to look", object=stray.name, kind=stray.kind)
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
    admitted = 0
    placements = hands.placements()
    with hands.database.transaction() as transaction:
        for run in runs:
            if not transaction.value(SQL["admit"], {"run": run.run, "start": run.start}):
                continue
            admitted += 1
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
    hands.log.info("runs admitted", runs=admitted)
    return admitted


def _sweep(sweep: Sweep, hands: RunHands) -> int:
    """Save the drivers' logs, once, then delete what is there by its uid."""
    key = {"run": sweep.run, "start": sweep.start}
    with hands.database.snapshot() as transaction:
        saved = transaction.value(SQL["logs_saved"], key)
    if not saved and sweep.drivers:
        for driver in sweep.drivers:
            hands.logs.finish(driver)
        with hands.database.transaction() as transaction:
            transaction.run(SQL["save_logs"], key)
    return sum(_delete(item, hands, "object deleted") for item in sweep.objects)


def _delete(item: SeenObject, hands: RunHands, event: str) -> int:
    ref = Ref(kind=_KINDS[item.kind], namespace=item.namespace, name=item.name)
    try:
        deleted = hands.kube.delete(ref, uid=item.uid, propagation="Background")
    except OrcaError as error:
        hands.log.warning("object not deleted yet", kind=item.kind, object=item.name, said=str(error))
        return 0
    if deleted:
        hands.log.info(event, kind=item.kind, object=item.name, uid=item.uid)
    return int(deleted)


def _finish(finish: Finish, hands: RunHands) -> int:
    """Nothing is left: the run is moved and the row ends, in one transaction."""
    key = {"run": finish.run, "start": finish.start}
    with hands.database.transaction() as transaction:
        if finish.to_state is not None:
            transaction.value(SQL["move"], {**key, "to_state": finish.to_state, "reason": finish.reason})
        transaction.run(SQL["end_cluster"], {**key, "reason": finish.reason})
        transaction.run(SQL["forget_objects"], key)
    level = hands.log.info if finish.reason is EndReason.ENDED else hands.log.warning
    level("start ended", **key, reason=finish.reason, run_is_now=finish.to_state or "as it was", why=finish.detail)
    return 1
