"""What the loop would decide for a demand, by the same pure functions, and what that costs. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from orca_infra.allowed import Allowed
from orca_infra.config import Config
from orca_infra.machines import decide as machines_decide
from orca_infra.machines.model import Limits, Make, Plan, Remove
from orca_infra.preview.cost import price_after, price_at_most, price_now
from orca_infra.preview.demand import Demand
from orca_infra.preview.model import Cost, Decided, Decisions
from orca_infra.quantity import duration_text
from orca_infra.runs import decide as runs_decide
from orca_infra.runs.model import RunPlan, RunSnapshot
from orca_infra.runtimes import decide as runtimes_decide
from orca_infra.runtimes.model import RuntimePlan
from orca_infra.screen import describe

#: Runs and Pods that are named one by one; more are counted.
_NAMED_MOST = 20


def decide_all(demand: Demand, config: Config, source: str, allowed: Allowed | None) -> tuple[Decisions, Cost]:
    """The decisions and the cost. `allowed`: what this shell's policies say; None: what they said where the file was made."""
    limits = replace(
        demand.limits, max_machines_total=config.max_machines_total, allowed=allowed or demand.limits.allowed
    )
    plan = machines_decide.decide(demand.machines, config.pools, limits)
    decided = [*_of_machines(plan), *decide_on_cluster(demand, limits.allowed)]
    machines = demand.machines.machines
    decisions = Decisions(
        source=source,
        taken_at=demand.taken_at,
        decided=tuple(decided),
        made=sum(action.count for action in plan.actions if isinstance(action, Make)),
        removed=sum(isinstance(action, Remove) for action in plan.actions),
    )
    cost = Cost(
        now=price_now(machines, config.pools),
        after=price_after(machines, plan, config.pools),
        most=price_at_most(config.pools, limits, config.max_machines_total),
    )
    return decisions, cost


def decide_on_cluster(demand: Demand, allowed: Allowed) -> Iterator[Decided]:
    """What is decided of run clusters and runtimes."""
    if demand.runs is not None and demand.run_limits is not None:
        run_limits = replace(demand.run_limits, allowed=allowed)
        yield from _of_runs(runs_decide.decide(demand.runs, run_limits), demand.runs)
    if demand.runtimes is not None and demand.runtime_limits is not None:
        runtime_limits = replace(demand.runtime_limits, allowed=allowed)
        yield from _of_runtimes(runtimes_decide.decide(demand.runtimes, runtime_limits))


def cost_at_most(config: Config, limits: Limits) -> Cost:
    """Without any demand: what there could be at most."""
    return Cost(most=price_at_most(config.pools, limits, config.max_machines_total))


def _of_machines(plan: Plan) -> Iterator[Decided]:
    for action in plan.actions:
        yield Decided(scope="machines", sentence=describe(action), acts=True)
    made_for = {action.pool for action in plan.actions if isinstance(action, Make)}
    for report in plan.reports:
        more = f"; {report.skipped}" if report.skipped else ""
        if report.pool not in made_for:
            said = f"pool {report.pool}: demand {report.demand}: {report.message}{more}"
            yield Decided(scope="machines", sentence=said, acts=False)
        elif more:
            yield Decided(scope="machines", sentence=f"pool {report.pool}: {report.skipped}", acts=False)
    held = [*(stray.name for stray in plan.strays_held), *plan.owned_held]
    if held:
        said = f"{len(held)} strays are left, since so many at once are more likely a mistake"
        yield Decided(scope="machines", sentence=said, acts=False)


def _of_runs(plan: RunPlan, snapshot: RunSnapshot) -> Iterator[Decided]:
    for run in plan.admit[:_NAMED_MOST]:
        workers = f" with {run.workers} workers" if run.workers else ""
        waited = duration_text(max(0.0, round((snapshot.now - run.queued_at).total_seconds())))
        said = f"start run {run.run} of {run.pipeline}{workers}, queued for {waited}"
        yield Decided(scope="runs", sentence=said, acts=True)
    yield from _more("runs", "start", [run.pipeline for run in plan.admit[_NAMED_MOST:]], "runs of")
    for ending in plan.endings:
        said = f"end start {ending.start} of run {ending.run} ({ending.reason}): {ending.detail}"
        yield Decided(scope="runs", sentence=said, acts=True)
    for finish in plan.finishes:
        after = f", and the run is {finish.to_state}" if finish.to_state else ""
        said = f"close start {finish.start} of run {finish.run} ({finish.reason}){after}"
        yield Decided(scope="runs", sentence=said, acts=True)
    for stray in plan.strays:
        yield Decided(scope="runs", sentence=f"delete stray {stray.kind} {stray.name}", acts=True)
    for number, why in list(plan.waiting.items())[:_NAMED_MOST]:
        yield Decided(scope="runs", sentence=f"run {number} stays queued: {why}", acts=False)


def _of_runtimes(plan: RuntimePlan) -> Iterator[Decided]:
    for birth in plan.births:
        said = f"bear {birth.count} Pod{'s' if birth.count > 1 else ''} for runtime pool {birth.pool.name}"
        yield Decided(scope="runtimes", sentence=said, acts=True)
    for ending in plan.endings[:_NAMED_MOST]:
        said = f"end {ending.name} ({ending.reason}): {ending.detail}"
        yield Decided(scope="runtimes", sentence=said, acts=True)
    yield from _more("runtimes", "end", [ending.reason for ending in plan.endings[_NAMED_MOST:]], "Pods,")
    for stray in plan.strays:
        yield Decided(scope="runtimes", sentence=f"delete stray {stray.kind} {stray.name}", acts=True)
    for change in plan.statuses:
        if change.status.message:
            said = f"runtime pool {change.pool.name}: {change.status.message}"
            yield Decided(scope="runtimes", sentence=said, acts=False)


def _more(scope: str, verb: str, groups: Iterable[str], what: str) -> Iterator[Decided]:
    for group, count in Counter(groups).items():
        yield Decided(scope=scope, sentence=f"{verb} {count} more {what} {group}", acts=True)
