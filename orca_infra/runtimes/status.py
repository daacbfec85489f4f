"""What a pool's status and its events say. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime

from orca_infra.runtimes.model import (
    FAILURES,
    GOING_AWAY,
    NODE_TROUBLE,
    STARTING,
    Birth,
    Condition,
    Ending,
    EndReason,
    Pool,
    PoolEvent,
    PoolStatus,
    StatusChange,
)

READY = "Ready"
FILLING = "Filling"
PAUSED = "Paused"
QUOTA_FULL = "exceeded quota"
# What is said of a Pod on its way, by this program and by the kubelet (kubernetes 1.36: pkg/kubelet/kubelet_pods.go).
_PASSING = frozenset({"", STARTING, GOING_AWAY, "ContainerCreating", "PodInitializing"})
_MESSAGE_LIMIT = 500
_EVENT_LIMIT = 1024  # k8s.io/kubernetes, pkg/apis/core/validation: NoteLengthLimit


def pool_status(
    pool: Pool,
    *,
    warm: int,
    assigned: int,
    problems: Sequence[str],
    missing: tuple[str, str] | None,
    limited: Sequence[str] = (),
) -> PoolStatus:
    """The counts, and why fewer Pods than wanted are warm. Conditions have no times yet.

    Args:
        pool: whose.
        warm: Pods that a launch can take.
        assigned: runtimes of its Pods.
        problems: why each Pod that is not Ready is not.
        missing: why nothing can be born, as a reason and in words.
        limited: why fewer are born than its spec asks for.

    """
    counted: dict[str, int] = {}
    for problem in problems:
        if problem not in _PASSING:
            counted[problem] = counted.get(problem, 0) + 1
    said = [missing[1]] if missing else [*limited]
    said += [f"{count} of {pool.size} cannot become Ready: {problem}" for problem, count in sorted(counted.items())]
    message = "; ".join(said)[:_MESSAGE_LIMIT]
    ready = warm >= pool.size and not (missing and missing[0] == PAUSED)
    condition = Condition(
        type=READY,
        status="True" if ready else "False",
        reason="AllWarm" if ready else _reason(counted, missing),
        message=message,
    )
    return PoolStatus(
        warm=warm, assigned=assigned, message=message, generation=pool.generation, conditions=(condition,)
    )


def _reason(problems: Iterable[str], missing: tuple[str, str] | None) -> str:
    if missing:
        return missing[0]
    reason = FILLING
    for problem in problems:
        if QUOTA_FULL in problem:
            return "QuotaFull"
        if problem.startswith(NODE_TROUBLE):
            return EndReason.NODE_LOST
        reason = "Unschedulable" if problem.startswith(("Unschedulable", "Unscheduled")) else "PodsFail"
    return reason


def with_conditions(pool: Pool, status: PoolStatus, *more: Condition, now: datetime) -> PoolStatus:
    """The status with all conditions, each with the time since when it is as it is."""
    before = {one.type: one for one in (pool.status.conditions if pool.status else ())}

    def dated(condition: Condition) -> Condition:
        old = before.get(condition.type)
        since = old.since if old is not None and old.status == condition.status and old.since else now
        return replace(condition, since=since)

    return replace(status, conditions=tuple(dated(one) for one in (*status.conditions, *more)))


def _pods(count: int) -> str:
    return "1 Pod is" if count == 1 else f"{count} Pods are"


def pool_events(
    births: Iterable[Birth],
    endings: Iterable[tuple[Pool, Ending]],
    statuses: Iterable[StatusChange],
) -> tuple[PoolEvent, ...]:
    """What `kubectl describe` shows: one event for each reason of each pool in a pass, however many Pods it is about."""
    events = [
        PoolEvent(pool=birth.pool, reason="Born", message=f"{_pods(birth.count)} born of {birth.environment.image}")
        for birth in births
    ]
    grouped: dict[tuple[str, str], list[tuple[Pool, Ending]]] = {}
    for pool, ending in endings:
        grouped.setdefault((pool.name, ending.reason), []).append((pool, ending))
    for (_, reason), group in grouped.items():
        pool, first = group[0]
        more = f" and {len(group) - 1} more" if len(group) > 1 else ""
        warning = first.reason in (*FAILURES, EndReason.VANISHED, EndReason.EVICTED, EndReason.NODE_LOST)
        events.append(
            PoolEvent(pool=pool, reason=reason, message=f"{first.name}{more}: {first.detail}", warning=warning)
        )
    for change in statuses:
        before = {one.type: one for one in (change.pool.status.conditions if change.pool.status else ())}
        for one in change.status.conditions:
            old = before.get(one.type)
            news = one.status == "False" and (old is None or (old.status, old.reason) != (one.status, one.reason))
            if news and one.reason != FILLING:
                events.append(PoolEvent(pool=change.pool, reason=one.reason, message=one.message, warning=True))
    return tuple(replace(event, message=event.message[:_EVENT_LIMIT]) for event in events)
