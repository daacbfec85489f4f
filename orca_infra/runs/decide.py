"""Which runs get a cluster, which starts end and why, and what is swept: a pure function of the snapshot and the limits."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from orca_infra.runs.model import (
    ClusterRow,
    Ending,
    EndReason,
    Finish,
    QueuedRun,
    Role,
    RunLimits,
    RunPlan,
    RunSnapshot,
    SeenObject,
    Sweep,
)

# What every container waits for on its way, and no trouble.
_ON_ITS_WAY = ("ContainerCreating", "PodInitializing")
_IMAGE_TROUBLE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError")
# A Pod's condition DisruptionTarget (k8s.io/api/core/v1, PodReasonPreemptionByScheduler and the constants after it, and the
# reasons that others give it in Kubernetes' page on disruptions). It is there before the Pod ends.
_DISRUPTIONS = (
    "PreemptionByScheduler",
    "DeletionByTaintManager",
    "EvictionByEvictionAPI",
    "DeletionByPodGC",
    "TerminationByKubelet",
)
#: What a column of starts holds.
STARTS_MAX = 2**31 - 1
# And what a Pod that the kubelet ended says of itself.
_EVICTIONS = ("Evicted", "Preempting", "NodeLost", "Shutdown", "Terminated", "NodeShutdown", *_DISRUPTIONS)


def decide(snapshot: RunSnapshot, limits: RunLimits) -> RunPlan:
    """The plan of one pass over the run clusters."""
    seen: dict[tuple[int, int], list[SeenObject]] = {}
    for item in snapshot.objects:
        if item.run is not None and item.start is not None:
            seen.setdefault((item.run, item.start), []).append(item)
    endings: list[Ending] = []
    sweeps: list[Sweep] = []
    finishes: list[Finish] = []
    follow: list[SeenObject] = []
    waits: dict[tuple[int, int], str] = {}
    for row in snapshot.rows:
        objects = seen.get(row.key, [])
        drivers = tuple(item for item in objects if item.kind == "Pod" and item.role == Role.DRIVER)
        ending = _ending(row, objects, snapshot, limits)
        waiting = _waits_for(row, objects) if ending is None else _keeps_up(objects)
        if waiting != row.waiting:
            waits[row.key] = waiting
        if ending is None:
            follow += drivers
            continue
        if row.ending_reason is None:
            endings.append(ending)
        unsaved = () if row.logs_saved else drivers
        to_delete = _to_delete(objects)
        if to_delete or unsaved:
            sweeps.append(Sweep(run=row.run, start=row.start, drivers=unsaved, objects=to_delete))
        elif row.ending_reason is not None and not any(_may_run(item) for item in objects):
            finishes.append(_finish(row, ending, objects))
    unwanted = _unwanted(snapshot)
    strays = _past_grace(unwanted, snapshot, limits)
    # The young count: they must not slip through one by one as each comes of age.
    too_many = bool(strays) and len(unwanted) > limits.stray_max
    admit, waiting_runs = _admit(snapshot, limits)
    return RunPlan(
        admit=admit,
        endings=tuple(endings),
        sweeps=tuple(sweeps),
        finishes=tuple(finishes),
        strays=() if too_many else strays,
        strays_held=unwanted if too_many else (),
        follow=tuple(follow),
        waiting=waiting_runs,
        waits=waits,
        unlabelled=snapshot.unlabelled,
    )


def why_queued(snapshot: RunSnapshot, limits: RunLimits, *, given_up: str = "") -> dict[int, str]:
    """What each queued run waits for, in a sentence; of what a snapshot of the rows alone says.

    `given_up`: why passes are given up now, which holds those that nothing else does.
    """
    admit, waiting = _admit(snapshot, limits)
    next_pass = {run.run: given_up or "nothing holds it: the next pass starts it" for run in admit}
    more = {run.run: given_up or "more runs wait before it than one pass starts" for run in snapshot.queued}
    return {**more, **next_pass, **waiting}


def why_barred(image: str, workers: int, limits: RunLimits) -> str:
    """Why no run of such a pipeline is ever admitted, whatever is free; empty when it can be."""
    budget, cost = limits.budget_millis, limits.sizes.cpu_of(workers)
    if not limits.allowed.has_image(image):
        return f"the policies (image-registries) do not allow its image {image}"
    if workers > limits.workers_max:
        return f"it has {workers} workers, more than a run can have ({limits.workers_max})"
    if budget is not None and cost > budget:
        return f"it needs {cost}m of CPU, more than the whole budget of {budget}m"
    return ""


def _ending(row: ClusterRow, objects: Iterable[SeenObject], snapshot: RunSnapshot, limits: RunLimits) -> Ending | None:
    """Why this start ends, or None; the reasons in the order in which they count."""

    def end(reason: EndReason, detail: str) -> Ending:
        return Ending(run=row.run, start=row.start, reason=reason, detail=detail)

    if row.ending_reason is not None:
        return end(EndReason(row.ending_reason), row.ending_detail)
    if row.run_state != "running" or row.run_start != row.start:
        return end(EndReason.ENDED, f"the run is {row.run_state} at start {row.run_start}")
    objects = list(objects)
    job = next((o for o in objects if o.kind == "Job"), None)
    pods = [o for o in objects if o.kind == "Pod"]
    if row.job_uid is not None and row.job_uid in snapshot.gone:
        return end(EndReason.VANISHED, "its Job is gone and was not deleted by this program")
    head = next((p for p in pods if p.role == Role.HEAD), None)
    if row.head_uid is not None and (row.head_uid in snapshot.gone or (head and (head.deleting or _over(head)))):
        return end(EndReason.HEAD_LOST, f"its head is gone or over{_because(head)}")
    # Said while it is seen: once the Job has failed of it, its Pod is gone, and with it the reason.
    disrupted = next((p for p in pods if p.role == Role.DRIVER and p.deleting and p.failed in _DISRUPTIONS), None)
    if disrupted is not None:
        return end(EndReason.EVICTED, f"{disrupted.name}: {disrupted.failed}")
    if job is not None and job.finished:
        return end(*_of_finished(job, [p for p in pods if p.role == Role.DRIVER]))
    return _never_started(row, job, pods, snapshot.now, limits)


def _never_started(
    row: ClusterRow, job: SeenObject | None, pods: list[SeenObject], now: datetime, limits: RunLimits
) -> Ending | None:
    """What was given its time and has not come to run."""

    def end(reason: EndReason, detail: str) -> Ending:
        return Ending(run=row.run, start=row.start, reason=reason, detail=detail)

    def over(since: datetime) -> bool:
        return (now - since).total_seconds() >= limits.start_seconds

    declared = row.job_declared_at
    if row.job_uid is None and job is None and not pods and declared is not None:
        unknown_seconds = (now - declared).total_seconds()
        if unknown_seconds > limits.ttl_seconds:
            # It may have been made, have run, and be gone by its TTL: to make it again would be a second driver.
            return end(
                EndReason.VANISHED, f"its `up` ended unknown {unknown_seconds:.0f} s ago, and nothing of it is there"
            )
    if row.refused_for_good and over(row.created_at):
        return end(EndReason.REFUSED, row.refused)
    if job is not None and over(job.created_at) and not any(pod.role == Role.DRIVER for pod in pods):
        if job.said:
            return end(EndReason.REFUSED, f"its Job can make no Pod: {job.said}")
        return end(EndReason.NEVER_STARTED, "its Job has made no Pod")
    # Each Pod has its own time: one that an outage had made late is not ended as it comes.
    for pod in pods:
        if pod.waiting in _IMAGE_TROUBLE and over(pod.created_at):
            return end(EndReason.IMAGE_PULL, _said_of(pod))
        if pod.phase == "Pending" and over(pod.created_at):
            return end(EndReason.NEVER_STARTED, _said_of(pod))
    return None


def _waits_for(row: ClusterRow, objects: Iterable[SeenObject]) -> str:
    """What keeps a start from running as a whole, in a sentence; empty when nothing does."""
    if row.refused:
        return row.refused
    for item in objects:
        if item.waiting and item.waiting not in _ON_ITS_WAY:
            return _said_of(item)
    return ""


def _keeps_up(objects: Iterable[SeenObject]) -> str:
    """What an ending start still waits for."""
    left = [item for item in objects if item.deleting and _may_run(item)]
    return f"{left[0].name} is going away{f' on node {left[0].node}' if left[0].node else ''}" if left else ""


def _said_of(item: SeenObject) -> str:
    return f"{item.name}: {item.waiting or item.phase}{f': {item.said}' if item.said else ''}"


def _may_run(item: SeenObject) -> bool:
    """Whether something may still come of it: it is not going away, or is a Pod whose containers have not ended."""
    return not item.deleting or (item.kind == "Pod" and not _over(item))


def _of_finished(job: SeenObject, drivers: list[SeenObject]) -> tuple[EndReason, str]:
    """The typed reason of a Job that is over while its run says that it runs."""
    if job.failed == "DeadlineExceeded":
        return EndReason.DEADLINE_EXCEEDED, "its Job was ended at its deadline"
    for driver in drivers:
        if driver.failed == "OOMKilled":
            return EndReason.OOM_KILLED, f"{driver.name} used more memory than it may"
        if driver.failed in _EVICTIONS:
            return EndReason.EVICTED, f"{driver.name}: {driver.failed}"
    codes = [f"exit code {d.exit_code}{_because(d)}" for d in drivers if d.exit_code is not None]
    return (
        EndReason.DRIVER_FAILED,
        f"its driver ended without a word ({codes[0] if codes else job.failed or 'no Pod left'})",
    )


def _over(pod: SeenObject) -> bool:
    return pod.phase is not None and pod.phase.is_terminal


def _because(pod: SeenObject | None) -> str:
    return f": {pod.failed}" if pod is not None and pod.failed else ""


def _to_delete(objects: Iterable[SeenObject]) -> tuple[SeenObject, ...]:
    """Everything that is not going away yet: what the Job owns before the Job, its own Pod after it.

    The Service before the head, or the controllers of endpoints would write down of each that the head has left it.
    Once a Job is gone the garbage collector looks at everything that it owned: what is going away already costs it nothing.
    But the Job's Pod may be made anew by the Job's controller as long as the Job is there.
    """
    left = [item for item in objects if not item.deleting]

    def place(item: SeenObject) -> tuple[int, bool, str]:
        return 2 * (item.role == Role.DRIVER) - (item.kind == "Job"), item.kind != "Service", item.name

    return tuple(sorted(left, key=place))


def _finish(row: ClusterRow, ending: Ending, objects: Iterable[SeenObject]) -> Finish:
    """Nothing of the start runs any more. A run that still says that it runs at this start is queued again, or fails."""
    to_state = None
    if ending.reason is not EndReason.ENDED:
        # Nothing is wrong with a run that a full quota keeps out.
        out = row.max_starts is not None and row.start >= row.max_starts and not row.quota_full
        to_state = "failed" if out else "queued"
    listed = any(item.kind == "Job" for item in objects)
    return Finish(
        run=row.run,
        start=row.start,
        reason=ending.reason,
        to_state=to_state,
        detail=ending.detail,
        job_uid=None if listed else row.job_uid,
    )


def _unwanted(snapshot: RunSnapshot) -> tuple[SeenObject, ...]:
    """What carries this stack's identity and a role, is owned by nothing and named by no row, however young."""
    return tuple(
        item
        for item in snapshot.objects
        if not item.owned
        and not item.deleting
        and item.uid not in snapshot.known
        and (item.kind, item.namespace, item.name) not in snapshot.desired
    )


def _past_grace(items: Iterable[SeenObject], snapshot: RunSnapshot, limits: RunLimits) -> tuple[SeenObject, ...]:
    return tuple(
        item for item in items if (snapshot.now - item.created_at).total_seconds() > limits.stray_grace_seconds
    )


def _objects_of(run: QueuedRun) -> int:
    """Its Job, and with workers its Service, its head and them."""
    return 1 + (2 + run.workers if run.workers else 0)


def _admit(snapshot: RunSnapshot, limits: RunLimits) -> tuple[tuple[QueuedRun, ...], dict[int, str]]:
    """Admit oldest first.

    One whose earlier start is still there, that its pipeline holds, or that is larger than the whole budget is passed over;
    the first that does not fit what is free ends the pass's admission.
    """
    budget = limits.budget_millis
    free = None if budget is None else budget - sum(row.cpu_millis for row in snapshot.rows)
    running = dict(snapshot.running)
    admit: list[QueuedRun] = []
    objects = 0
    waiting: dict[int, str] = {}
    too_large: int | None = None
    for run in snapshot.queued:
        cost = limits.sizes.cpu_of(run.workers)
        held = not run.fill and run.max_runs is not None and running.get(run.pipeline, 0) >= run.max_runs
        if run.earlier is not None:  # never two drivers of one run at a time
            waiting[run.run] = f"its start {run.earlier} is still going away"
        elif held:
            waiting[run.run] = f"its pipeline runs max_runs ({run.max_runs}) already"
        elif barred := why_barred(run.image, run.workers, limits):
            waiting[run.run] = barred
        elif run.start >= STARTS_MAX:
            waiting[run.run] = f"it was started {run.start} times, and cannot be counted further"
        elif too_large is not None:
            waiting[run.run] = f"run {too_large} is before it and does not fit what is free of the budget"
        elif free is not None and cost > free:
            waiting[run.run] = f"it needs {cost}m of CPU, and {max(0, free)}m of the budget is free"
            too_large = run.run
        elif len(admit) >= limits.admit_max or (admit and objects + _objects_of(run) > limits.admit_objects_max):
            break
        else:
            admit.append(run)
            objects += _objects_of(run)
            free = None if free is None else free - cost
            if not run.fill:
                running[run.pipeline] = running.get(run.pipeline, 0) + 1
    return tuple(admit), waiting
