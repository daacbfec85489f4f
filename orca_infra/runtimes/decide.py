"""Which runtime Pods are born, which end and why, and what each pool's status says: a pure function."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from orca_infra.runtimes.model import (
    FAILURES,
    Adoption,
    Birth,
    Ending,
    EndReason,
    Environment,
    Failures,
    LostNode,
    Mark,
    PodRow,
    Pool,
    PoolStatus,
    RuntimeLimits,
    RuntimePlan,
    RuntimeSnapshot,
    SeenObject,
    StatusChange,
    Sweep,
)
from orca_infra.runtimes.provisioning import provisioned
from orca_infra.runtimes.resources import requests_of
from orca_infra.runtimes.status import PAUSED, QUOTA_FULL, pool_events, pool_status, with_conditions

_PULL_TROUBLE = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"}
)
_CONFIG_TROUBLE = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
_MESSAGE_LIMIT = 500
_DELETED = "its Pod is gone and was not deleted by this program"


@dataclass(frozen=True, slots=True)
class _Case:
    """A row with the Pod that it stands for. `gone`: the server, asked by name, has it no more; `node`: its own, if lost."""

    row: PodRow
    pod: SeenObject | None
    objects: tuple[SeenObject, ...]
    gone: bool
    node: LostNode | None = None

    @property
    def warm(self) -> bool:
        return self.pod is not None and self.pod.can_serve and not (self.node and self.node.is_gone)

    @property
    def is_nobodys(self) -> bool:
        """Whether nobody is in there: it waits, or the launch that took it was given up."""
        return self.row.waiting or self.row.runtime is None

    @property
    def could_serve(self) -> bool:
        """Whether it was Ready once."""
        return self.row.ready_at is not None or self.row.unready_at is not None

    @property
    def is_stuck(self) -> bool:
        """Whether it waits for a node, or for the API server to take it: more of its kind would wait beside it."""
        if not self.row.waiting:
            return False
        return self.pod.held if self.pod is not None else bool(self.row.refused)

    @property
    def problem(self) -> str:
        """Why it is not Ready, as its Pod, its node's end or the API server's refusal says."""
        if self.node is not None and not self.warm:
            return self.node.problem
        if self.pod is not None:
            return self.pod.problem
        # Without its own name: all that are refused for one reason say the same.
        refused = self.row.refused.replace(f'"{self.row.name}" ', "")
        return f"refused: {refused}"[:_MESSAGE_LIMIT] if refused else ""


def decide(snapshot: RuntimeSnapshot, limits: RuntimeLimits) -> RuntimePlan:
    """The plan of one pass over the runtime pools."""
    cases = _cases(snapshot)
    endings = [ending for case in cases if (ending := _ending(case, snapshot, limits))]
    ending_names = {ending.name for ending in endings} | {c.row.name for c in cases if c.row.ending_reason}
    wanted: list[Birth] = []
    statuses: list[StatusChange] = []
    due: list[datetime] = [c.row.expires_at for c in cases if c.row.expires_at and c.row.name not in ending_names]
    due += [at for case in cases if case.node and (at := _lost_at(case.node, limits)) > snapshot.now]
    for pool in snapshot.pools:
        place = (pool.namespace, pool.name)
        all_mine = [case for case in cases if (case.row.namespace, case.row.pool) == place]
        mine = [case for case in all_mine if not case.gone]
        environment = snapshot.environments.get(pool.environment)
        missing = _why_none(pool, environment, limits)
        chosen: Sequence[Ending] = ()
        if not pool.deleting:
            chosen, next_at = _of_pool(pool, all_mine, ending_names, snapshot, limits)
            endings += chosen
            due += [next_at] if next_at else []
            # What ends still exists: it is replaced once it is gone, so that there never are more than `size`.
            count = pool.size - sum(1 for case in mine if case.is_nobodys)
            count = min(count, limits.births_max - sum(1 for case in mine if case.is_stuck))
            if count > 0 and not missing and environment is not None:
                wanted.append(Birth(pool=pool, environment=environment, count=count))
        capacity = provisioned(pool, snapshot.pools, snapshot.environments, snapshot.nodes)
        status = _status(pool, mine, ending_names, missing, limits)
        status = with_conditions(pool, status, capacity, now=snapshot.now)
        if status != pool.status:
            statuses.append(StatusChange(pool=pool, status=status))
    births = _shared(wanted, limits.births_max)
    ending_names |= {ending.name for ending in endings}
    unwanted = _unwanted(snapshot)
    strays = tuple(s for s in unwanted if _seconds_since(s.created_at, snapshot.now) > limits.stray_grace_seconds)
    # The young count: they must not slip through one by one as each comes of age.
    too_many = bool(strays) and len(unwanted) > limits.stray_max
    return RuntimePlan(
        births=births,
        endings=tuple(endings),
        marks=tuple(mark for case in cases if case.row.name not in ending_names and (mark := _mark(case))),
        sweeps=tuple(
            sweep
            for sweep in (_sweep(case, snapshot.now, limits) for case in cases if case.row.name in ending_names)
            if any(map(sweep.is_left, sweep.objects))
        ),
        adoptions=tuple(
            adoption for case in cases if case.row.name not in ending_names and (adoption := _adoption(case))
        ),
        relabels=tuple(
            case.pod for case in cases if case.pod is not None and not case.pod.labelled and not case.pod.deleting
        ),
        finishes=tuple(case.row.name for case in cases if case.row.name in ending_names and _is_finished(case)),
        strays=() if too_many else strays,
        strays_held=unwanted if too_many else (),
        statuses=tuple(statuses),
        events=pool_events(births, _of_pools(endings, cases, snapshot.pools), statuses),
        next_due_at=min(due, default=None),
    )


def _shared(wanted: Iterable[Birth], room: int) -> tuple[Birth, ...]:
    """As many births as there is room for; the smaller wishes first, so that no large pool keeps others waiting."""
    births = []
    for birth in sorted(wanted, key=lambda birth: (birth.count, birth.pool.name)):
        count = min(room, birth.count)
        if count > 0:
            births.append(replace(birth, count=count))
            room -= count
    return tuple(births)


def _of_pools(endings: Iterable[Ending], cases: Iterable[_Case], pools: Iterable[Pool]) -> list[tuple[Pool, Ending]]:
    """The endings of Pods that waited, each with its pool; those of a pool that is gone have nobody to be told to."""
    by_place = {(pool.namespace, pool.name): pool for pool in pools}
    of_rows = {case.row.name: (case.row.namespace, case.row.pool or "") for case in cases if case.row.waiting}
    return [(by_place[of_rows[ending.name]], ending) for ending in endings if of_rows.get(ending.name) in by_place]


def _cases(snapshot: RuntimeSnapshot) -> list[_Case]:
    objects: dict[tuple[str, str], list[SeenObject]] = {}
    for item in snapshot.objects:
        objects.setdefault((item.namespace, item.name), []).append(item)
    lost = {node.name: node for node in snapshot.lost_nodes}
    cases = []
    for row in snapshot.rows:
        mine = tuple(objects.get((row.namespace, row.name), ()))
        pod = next((item for item in mine if item.kind == "Pod" and row.uid in {None, item.uid}), None)
        gone = row.uid is not None and row.uid in snapshot.gone
        cases.append(_Case(row, pod, mine, gone, lost.get(pod.node) if pod is not None else None))
    return cases


def _lost_at(node: LostNode, limits: RuntimeLimits) -> datetime:
    """From when on nothing is expected of a node any more."""
    if node.unready_since is None:
        return datetime.min.replace(tzinfo=UTC)
    return node.unready_since + timedelta(seconds=limits.node_lost_seconds)


def _lost(case: _Case, now: datetime, limits: RuntimeLimits) -> LostNode | None:
    """Its Pod's node, when nothing is expected of that any more."""
    return case.node if case.node is not None and _lost_at(case.node, limits) <= now else None


def _sweep(case: _Case, now: datetime, limits: RuntimeLimits) -> Sweep:
    """A Pod that nobody is in gets no time to end; nobody is there to end one whose node is lost."""
    unlost = 1 if case.is_nobodys else None
    grace_seconds = unlost if _lost(case, now, limits) is None else 0
    return Sweep(name=case.row.name, objects=case.objects, grace_seconds=grace_seconds)


def _ending(case: _Case, snapshot: RuntimeSnapshot, limits: RuntimeLimits) -> Ending | None:
    """Why this one ends by itself, whatever its pool has beside it; None when it does not, or ends already."""
    row, pod = case.row, case.pod
    if row.ending_reason is not None:
        return None

    def end(reason: EndReason, detail: str) -> Ending:
        return Ending(name=row.name, reason=reason, detail=detail, only_waiting=row.waiting)

    if case.gone:
        return end(EndReason.VANISHED, _DELETED)
    lost = _lost(case, snapshot.now, limits)
    lost_for_good = lost is not None and (lost.is_gone or (pod is not None and pod.deleting))
    if row.waiting:
        pool = next((p for p in snapshot.pools if (p.namespace, p.name) == (row.namespace, row.pool)), None)
        if pool is None or pool.deleting:
            return end(EndReason.POOL_DELETED, f"pool {row.pool} is deleted")
        # Those that could serve failed through no fault of their own: all of a node's are replaced at once.
        if lost is not None and (lost_for_good or case.could_serve):
            return end(EndReason.NODE_LOST, lost.problem)
        if pod is not None and pod.is_evicted and case.could_serve:
            return end(EndReason.EVICTED, f"its Pod had to leave its node ({pod.failed})")
        return None
    if row.runtime is None:
        return end(EndReason.DISCARDED, "its launch was given up")
    if row.expires_at is not None and row.expires_at <= snapshot.now:
        return end(EndReason.CULLED, "its time is over")
    if pod is not None and pod.is_over:
        return end(*_of_over(pod))
    # Somebody is in there, and a node that is only silent may be back: that its Pods are lost is for Kubernetes to say.
    if lost is not None and lost_for_good:
        return end(EndReason.NODE_LOST, lost.problem)
    if not row.secret_made and _seconds_since(row.taken_at, snapshot.now) >= limits.abandoned_seconds:
        return end(EndReason.ABANDONED, "its launch never came to its end")
    if row.ready_at is None and not case.warm and _is_late(case, snapshot.now, limits):  # a cold start
        return end(*_of_late(case))
    return None


def _of_over(pod: SeenObject) -> tuple[EndReason, str]:
    if pod.is_evicted:
        return EndReason.EVICTED, f"its Pod had to leave its node ({pod.failed})"
    # A kubelet that ends what somebody deleted calls that failed for a moment, before the Pod is gone.
    return (EndReason.VANISHED, _DELETED) if pod.deleting else (EndReason.FAILED, pod.problem)


def _is_late(case: _Case, now: datetime, limits: RuntimeLimits) -> bool:
    """Whether it was given its time; one that nobody has tried to make, or that is being made just now, was not."""
    was_tried = case.pod is not None or case.row.tried_at is not None or bool(case.row.refused)
    begun_at = _begun_at(case, case.row.taken_at, case.row.tried_at)
    return was_tried and not case.row.being_made and _seconds_since(begun_at, now) >= limits.start_seconds


def _begun_at(case: _Case, *moments: datetime | None) -> datetime | None:
    """From when on its time counts: one that an outage, or a clock, had made late is not ended as it comes."""
    created_at = case.pod.created_at if case.pod is not None else None
    return max((moment for moment in (*moments, created_at) if moment is not None), default=None)


def _of_late(case: _Case) -> tuple[EndReason, str]:
    if case.pod is None and case.row.refused:
        return EndReason.REFUSED, case.row.refused
    if case.pod is not None and case.pod.waiting in _PULL_TROUBLE:
        return EndReason.IMAGE_PULL, case.problem
    return EndReason.NEVER_READY, case.problem or "its Pod was never seen"


def _of_pool(
    pool: Pool, cases: Iterable[_Case], ending_names: set[str], snapshot: RuntimeSnapshot, limits: RuntimeLimits
) -> tuple[Sequence[Ending], datetime | None]:
    """The waiting Pods of a pool that end: what is too many, else one that cannot become Ready; and when the next may."""
    waiting = [case for case in cases if case.row.waiting and case.row.name not in ending_names]
    surplus = sorted(waiting, key=lambda case: (case.warm, case.row.created_at, case.row.name))
    surplus = surplus[: max(0, len(waiting) - pool.size)]
    if surplus:
        detail = f"pool {pool.name} keeps {pool.size}"
        return [
            Ending(name=case.row.name, reason=EndReason.SURPLUS, detail=detail, only_waiting=True) for case in surplus
        ], None
    failing = [
        Ending(name=case.row.name, reason=trouble[0], detail=trouble[1], only_waiting=True)
        for case in waiting
        if (trouble := _trouble(case, snapshot.now, limits))
    ]
    if not failing or any(case.row.waiting and case.row.ending_reason in FAILURES for case in cases):
        return (), None
    next_at = _next_replacement(snapshot.failures.get(pool.name), limits)
    if next_at is not None and next_at > snapshot.now:
        return (), next_at
    return failing[:1], None


def _trouble(case: _Case, now: datetime, limits: RuntimeLimits) -> tuple[EndReason, str] | None:
    """Why a waiting Pod can never become Ready; None when it is, may be soon, or replacing it would not help."""
    row, pod = case.row, case.pod
    if pod is None:
        refused = row.refused and QUOTA_FULL not in row.refused
        return (EndReason.REFUSED, row.refused) if refused else None
    if pod.can_serve or pod.deleting or (pod.held and not pod.is_over):
        return None
    if pod.is_over:
        return EndReason.FAILED, case.problem
    unready_seconds = _seconds_since(_begun_at(case, row.created_at, row.unready_at), now)
    if pod.waiting in _PULL_TROUBLE and unready_seconds >= limits.pull_seconds:
        return EndReason.IMAGE_PULL, case.problem
    if pod.waiting in _CONFIG_TROUBLE and unready_seconds >= limits.pull_seconds:
        return EndReason.NEVER_READY, case.problem
    if unready_seconds >= limits.start_seconds:
        return EndReason.NEVER_READY, case.problem
    return None


def _next_replacement(failures: Failures | None, limits: RuntimeLimits) -> datetime | None:
    """When a pool's next failing Pod may be replaced; None: at once."""
    if failures is None or failures.failures <= 0:
        return None
    doublings = min(failures.failures - 1, 20)
    wait = min(limits.backoff_most_seconds, limits.backoff_seconds * 2**doublings)
    return failures.last_at + timedelta(seconds=wait)


def _mark(case: _Case) -> Mark | None:
    """What of a Pod is not in its row yet. A taken one stays noted as Ready."""
    row, pod = case.row, case.pod
    ready = case.warm
    problem = case.problem
    if pod is None and row.seen:
        return None  # a list that lacks it proves nothing
    if row.ready_later and not ready:
        return None  # nor does one that shows it as it was before
    address = pod.address if pod is not None and pod.address else row.address
    noted_ready = row.ready_at is not None
    changed = ready != noted_ready if row.waiting else ready and not noted_ready
    if not changed and problem == row.problem and address == row.address and (pod is None or row.seen):
        return None
    return Mark(
        namespace=row.namespace,
        name=row.name,
        uid=pod.uid if pod is not None else None,
        ready=ready,
        address=address,
        problem=problem,
    )


def _adoption(case: _Case) -> Adoption | None:
    if case.pod is None or case.pod.deleting or case.row.waiting:
        return None
    secret = next((item for item in case.objects if item.kind == "Secret"), None)
    if secret is None or secret.owned or secret.deleting:
        return None
    return Adoption(secret=secret, pod=case.pod)


def _is_finished(case: _Case) -> bool:
    """Nothing is left of it, and nothing comes: no object has its name, and a Pod that was confirmed is proven gone.

    A row whose `up` is under way stays until that has ended: the Pod may come yet, or come once more, and would be nobody's.
    """
    known_to_end = case.row.ending_reason is not None or case.gone
    return known_to_end and not case.row.being_made and not case.objects and (case.row.uid is None or case.gone)


def _why_none(pool: Pool, environment: Environment | None, limits: RuntimeLimits) -> tuple[str, str] | None:
    """Why nothing can be born for this pool, as a reason and in words."""
    if pool.asked_size and not pool.size:
        return PAUSED, "the stack is paused and keeps no Pod warm, until `orca-infra resume`"
    if environment is None:
        return "EnvironmentMissing", f"environment {pool.environment} is missing: no Pod is born"
    if not limits.allowed.has_image(environment.image):
        words = f"the policies (image-registries) do not allow image {environment.image}: no Pod is born"
        return "ImageNotAllowed", words
    for variable in environment.env:
        if (variable.get("valueFrom") or {}).get("secretKeyRef") is not None:  # its CRD was not applied by this program
            words = f"environment {environment.name} takes {variable.get('name')} from a Secret: no Pod is born"
            return "SecretInEnvironment", words
    try:
        requests_of(pool.resources or environment.resources)
    except ValueError as error:
        return "BadResources", f"no Pod is born: in its resources, {error}"
    return None


def _status(
    pool: Pool,
    cases: Iterable[_Case],
    ending_names: set[str],
    missing: tuple[str, str] | None,
    limits: RuntimeLimits,
) -> PoolStatus:
    cases = [case for case in cases if case.row.name not in ending_names]
    waiting = [case for case in cases if case.row.waiting]
    said = []
    if pool.asked_size is not None:
        said.append(f"size {pool.asked_size} is more than a pool can have: {pool.size} Pods are kept")
    stuck = sum(1 for case in waiting if case.is_stuck)
    if stuck >= limits.births_max and len(waiting) < pool.size:
        said.append(f"no more are born while {stuck} wait for a node or are refused")
    return pool_status(
        pool,
        warm=sum(1 for case in waiting if case.warm),
        assigned=len(cases) - len(waiting),
        problems=[case.problem for case in waiting],
        missing=missing,
        limited=said,
    )


def _unwanted(snapshot: RuntimeSnapshot) -> tuple[SeenObject, ...]:
    """What carries this stack's identity and role, is owned by nothing and wanted by no row, however young."""
    desired: Mapping[tuple[str, str], PodRow] = {(row.namespace, row.name): row for row in snapshot.rows}
    return tuple(
        item
        for item in snapshot.objects
        if not item.owned and not item.deleting and (item.namespace, item.name) not in desired
    )


def _seconds_since(moment: datetime | None, now: datetime) -> float:
    return (now - moment).total_seconds() if moment is not None else 0.0
