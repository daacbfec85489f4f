"""What a pass saw, as gauges. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from orca_infra.machines.model import DeleteStray, DestroyOwned, Reason
from orca_infra.metrics import OTHER, Series
from orca_infra.record.decided import Decided, MachinesDecided, RunsDecided, RuntimesDecided
from orca_infra.runtimes.model import PodRow

_REASONS = frozenset(str(reason) for reason in Reason)
#: The pool of Pods that have none.
COLD = "cold"

Label = Callable[[str], str]


def gauges_of(decided: Decided, pool_label: Label) -> dict[str, Series]:
    """By metric, its series. `pool_label` gives the label of a pool, which bounds how many there are."""
    match decided:
        case MachinesDecided():
            return _of_machines(decided, pool_label)
        case RunsDecided():
            return _of_runs(decided)
        case RuntimesDecided():
            return _of_runtimes(decided, pool_label)


def _of_machines(decided: MachinesDecided, pool_label: Label) -> dict[str, Series]:
    machines: Counter[tuple[str, ...]] = Counter()
    for row in decided.snapshot.machines:
        said = row.removal_reason or ""
        reason = said if said in _REASONS or not said else OTHER  # a person may have revoked it with words of their own
        machines[pool_label(row.pool), row.state, reason] += 1
    demand: Counter[tuple[str, ...]] = Counter()
    for report in decided.plan.reports:
        demand[pool_label(report.pool),] += report.demand
    most: Counter[tuple[str, ...]] = Counter()
    for pool in decided.pools:
        most[pool_label(pool.name),] += pool.max_machines
    plan = decided.plan
    held = len(plan.strays_held) + len(plan.owned_held)
    strays = sum(isinstance(action, DeleteStray | DestroyOwned) for action in plan.actions)
    return {
        "machines": machines,
        "pool_demand_runs": demand,
        "pool_max_machines": most,
        "strays": {(decided.scope,): strays + held},
        "strays_held": {(decided.scope,): held},
        "unreadable": {(provider,): 1.0 for provider in decided.snapshot.unreadable},
    }


def _of_runs(decided: RunsDecided) -> dict[str, Series]:
    states = Counter(
        "ending" if row.ending_reason else "making" if row.open_objects else "running" for row in decided.snapshot.rows
    )
    held = len(decided.plan.strays_held)
    return {
        "run_clusters": {(state,): states[state] for state in ("making", "running", "ending")},
        "runs_queued": {(): len(decided.snapshot.queued)},
        "run_cpu_cores": {(): sum(row.cpu_millis for row in decided.snapshot.rows) / 1000},
        "strays": {(decided.scope,): len(decided.plan.strays) + held},
        "strays_held": {(decided.scope,): held},
    }


def _of_runtimes(decided: RuntimesDecided, pool_label: Label) -> dict[str, Series]:
    pods: Counter[tuple[str, ...]] = Counter()
    for row in decided.snapshot.rows:
        pods[pool_label(row.pool) if row.pool else COLD, _pod_state(row)] += 1
    sizes: Counter[tuple[str, ...]] = Counter()
    for pool in decided.snapshot.pools:
        sizes[pool_label(pool.name),] += pool.size
    held = len(decided.plan.strays_held)
    return {
        "runtime_pods": pods,
        "runtime_pool_size": sizes,
        "strays": {(decided.scope,): len(decided.plan.strays) + held},
        "strays_held": {(decided.scope,): held},
    }


def _pod_state(row: PodRow) -> str:
    if row.ending_reason is not None:
        return "ending"
    if row.taken_at is not None:
        return "assigned"
    return "warm" if row.ready_at is not None else "starting"
