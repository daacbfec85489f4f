"""What the loop would decide for a demand, by the same pure functions, and what that costs. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from orca_infra.allowed import Allowed
from orca_infra.config import Config
from orca_infra.machines import decide as machines_decide
from orca_infra.machines.model import Limits, Make, Remove
from orca_infra.preview.cost import price_after, price_at_most, price_now
from orca_infra.preview.demand import Demand
from orca_infra.preview.model import Cost, Decided, Decisions
from orca_infra.record.decided import MachinesDecided, RunsDecided, RuntimesDecided
from orca_infra.record.words import Decision, decisions_of
from orca_infra.runs import decide as runs_decide
from orca_infra.runtimes import decide as runtimes_decide

#: Runs, machines and Pods that are named one by one; more are counted.
_NAMED_MOST = 20


def decide_all(demand: Demand, config: Config, source: str, allowed: Allowed | None) -> tuple[Decisions, Cost]:
    """The decisions and the cost. `allowed`: what this shell's policies say; None: what they said where the file was made."""
    limits = replace(
        demand.limits, max_machines_total=config.max_machines_total, allowed=allowed or demand.limits.allowed
    )
    plan = machines_decide.decide(demand.machines, config.pools, limits)
    of_machines = MachinesDecided(snapshot=demand.machines, pools=config.pools, limits=limits, plan=plan)
    decided = [*_said("machines", decisions_of(of_machines)), *decide_on_cluster(demand, limits.allowed)]
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
        runs = runs_decide.decide(demand.runs, run_limits)
        yield from _said("runs", decisions_of(RunsDecided(snapshot=demand.runs, limits=run_limits, plan=runs)))
    if demand.runtimes is not None and demand.runtime_limits is not None:
        runtime_limits = replace(demand.runtime_limits, allowed=allowed)
        runtimes = runtimes_decide.decide(demand.runtimes, runtime_limits)
        of_runtimes = RuntimesDecided(snapshot=demand.runtimes, limits=runtime_limits, plan=runtimes)
        yield from _said("runtimes", decisions_of(of_runtimes))


def cost_at_most(config: Config, limits: Limits) -> Cost:
    """Without any demand: what there could be at most."""
    return Cost(most=price_at_most(config.pools, limits, config.max_machines_total))


def _said(scope: str, decisions: Iterable[Decision]) -> Iterator[Decided]:
    """What changes something and why else nothing is changed; of many of a kind the first are named, the others counted.

    What only writes down what was seen is no change; where it has a reason, it is worth being read.
    """
    of_a_kind: Counter[str] = Counter()
    more: Counter[tuple[str, str]] = Counter()
    for one in decisions:
        acts = one.acts and not one.notes
        verb = one.decided.partition(" ")[0]
        of_a_kind[verb] += acts
        if acts and of_a_kind[verb] > _NAMED_MOST:
            more[verb, one.about[-1] if len(one.about) == 2 else ""] += 1
        elif acts or one.why:
            yield Decided(scope=scope, sentence=one.sentence, acts=acts)
    for (verb, group), count in more.items():
        yield Decided(scope=scope, sentence=f"{verb} {count} more{f' of {group}' if group else ''}", acts=True)
