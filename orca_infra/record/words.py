"""Plans in a person's words: what was decided about what, and why. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from orca_infra.machines import model as machines
from orca_infra.record.decided import Decided, MachinesDecided, RunsDecided, RuntimesDecided
from orca_infra.runs import model as runs
from orca_infra.runtimes import model as runtimes

#: How many names a sentence has at the most.
_NAMES_MOST = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One thing that a pass decided.

    Attributes:
        about: names of pools, machines, objects and Pods, and numbers of runs, by which it is found.
        decided: what; a clause.
        why: the reason; a clause, or empty where `decided` says it.
        acts: whether it changes something; else it says why nothing is done.
        notes: whether all that it changes is what is written down of what was seen.

    """

    about: tuple[str, ...]
    decided: str
    why: str = ""
    acts: bool = True
    notes: bool = False

    @property
    def sentence(self) -> str:
        return f"{self.decided}: {self.why}" if self.why else self.decided


def decisions_of(decided: Decided) -> tuple[Decision, ...]:
    """Everything that a pass decided, also not to do something."""
    match decided:
        case MachinesDecided():
            return tuple(_of_machines(decided))
        case RunsDecided():
            return tuple(_of_runs(decided))
        case RuntimesDecided():
            return tuple(_of_runtimes(decided))


def of_action(action: machines.Action) -> Decision:
    """What one action on machines does, and why."""
    match action:
        case machines.Make():
            offers = ", ".join(f"{c.type}{' (spot)' if c.spot else ''} in {c.location}" for c in action.candidates)
            number = "1 machine" if action.count == 1 else f"{action.count} machines"
            return Decision(
                about=(action.pool,),
                decided=f"make {number} for {action.pool}",
                why=f"{action.why}; tried in turn: {offers}",
            )
        case machines.Remove():
            idle = ", if it is still idle then" if action.only_idle else ""
            about = (action.name, action.pool)
            return Decision(about=about, decided=f"remove {action.name} ({action.reason}){idle}", why=action.why)
        case machines.EndInterrupted():
            return Decision(about=(action.name, action.pool), decided=f"end {action.name}", why=action.why)
        case machines.DestroyOwned():
            return Decision(about=(action.name, action.pool), decided=f"destroy {action.name}", why=action.why)
        case machines.Relabel():
            labels = ", ".join(f"{key}={value}" for key, value in action.labels.items())
            return Decision(
                about=(action.machine.name, action.pool),
                decided=f"put back the labels of {action.machine.name} ({labels})",
                why=action.why,
            )
        case machines.DeleteStray():
            name = action.machine.name
            return Decision(about=(name,), decided=f"delete stray {name} in {action.machine.location}", why=action.why)


def _of_machines(decided: MachinesDecided) -> Iterator[Decision]:
    plan = decided.plan
    made_for = {action.pool for action in plan.actions if isinstance(action, machines.Make)}
    for action in plan.actions:
        is_done = decided.limits.puts_labels_back or not isinstance(action, machines.Relabel)
        yield of_action(action) if is_done else _only_said(of_action(action))
    for report in plan.reports:
        if report.pool not in made_for:
            said = [report.message, *([report.skipped] if report.skipped else [])]
            nothing = f"make nothing for {report.pool}, where {_runs(report.demand)} for a machine"
            yield Decision(about=(report.pool,), decided=nothing, why="; ".join(said), acts=False)
        elif report.skipped:
            left_out = f"leave some types of {report.pool} out"
            yield Decision(about=(report.pool,), decided=left_out, why=report.skipped, acts=False)
    held = (*(stray.name for stray in plan.strays_held), *plan.owned_held)
    if held:
        yield Decision(
            about=held, decided=f"leave {len(held)} strays", why="so many at once are more likely a mistake", acts=False
        )
    for provider, why in decided.snapshot.unreadable.items():
        yield Decision(about=(), decided=f"judge no machine of provider {provider}", why=why, acts=False)


def _only_said(decision: Decision) -> Decision:
    """What would be done, and is not with ORCA_DRIFT=report."""
    why = f"{decision.why} (ORCA_DRIFT=report)"
    return replace(decision, decided=f"do not {decision.decided}", why=why, acts=False)


def _runs(count: int) -> str:
    return "1 run waits" if count == 1 else f"{count or 'no'} run{'s wait' if count else ' waits'}"


def _of_runs(judged: RunsDecided) -> Iterator[Decision]:
    plan, snapshot = judged.plan, judged.snapshot
    for run in plan.admit:
        workers = f" with {run.workers} workers" if run.workers else ""
        waited = (snapshot.now - run.queued_at).total_seconds()
        yield Decision(
            about=(str(run.run), run.pipeline),
            decided=f"start run {run.run} of {run.pipeline}, start {run.start + 1}{workers}",
            why=f"it has been queued for {waited:.0f} s, and nothing holds it",
        )
    for ending in plan.endings:
        yield Decision(
            about=(str(ending.run),),
            decided=f"end start {ending.start} of run {ending.run} ({ending.reason})",
            why=ending.detail,
        )
    reasons = {row.key: row.ending_reason for row in snapshot.rows if row.ending_reason}
    reasons |= {(ending.run, ending.start): ending.reason for ending in plan.endings}
    for sweep in plan.sweeps:
        if sweep.objects:
            names = tuple(item.name for item in sweep.objects)
            yield Decision(
                about=(str(sweep.run), *names),
                decided=f"delete what start {sweep.start} of run {sweep.run} has: {_names(names)}",
                why=f"the start ends ({reasons.get((sweep.run, sweep.start), 'unknown')})",
            )
    for finish in plan.finishes:
        after = f", and queue the run {'again' if finish.to_state == 'queued' else ''}".rstrip()
        if finish.to_state != "queued":
            after = f", and have the run {finish.to_state}" if finish.to_state else ""
        yield Decision(
            about=(str(finish.run),),
            decided=f"close start {finish.start} of run {finish.run} ({finish.reason}){after}",
            why=finish.detail,
        )
    for (number, start), waiting in plan.waits.items():
        decided = f"note what start {start} of run {number} waits for"
        yield Decision(about=(str(number),), decided=decided, why=waiting or "it waits no more", notes=True)
    for item in plan.unlabelled:
        back = Decision(
            about=(item.name,), decided=f"put the labels of {item.kind} {item.name} back", why="somebody took them off"
        )
        yield back if judged.limits.puts_labels_back else _only_said(back)
    yield from _of_strays(plan.strays, plan.strays_held)
    grouped: dict[str, list[str]] = {}
    for waits, why in plan.waiting.items():
        grouped.setdefault(why, []).append(str(waits))
    for why, numbers in grouped.items():
        one = f"leave run {numbers[0]} queued"
        decided = one if len(numbers) == 1 else f"leave runs {_names(numbers)} queued"
        yield Decision(about=tuple(numbers), decided=decided, why=why, acts=False)


def _of_strays(
    strays: Iterable[runs.SeenObject | runtimes.SeenObject], held: Iterable[runs.SeenObject | runtimes.SeenObject]
) -> Iterator[Decision]:
    for stray in strays:
        yield Decision(
            about=(stray.name,),
            decided=f"delete stray {stray.kind} {stray.name}",
            why="it carries this stack's identity and nobody owns it",
        )
    names = tuple(stray.name for stray in held)
    if names:
        why = "so many at once are more likely a mistake"
        yield Decision(about=names, decided=f"leave {len(names)} strays", why=why, acts=False)


def _of_runtimes(judged: RuntimesDecided) -> Iterator[Decision]:
    plan, snapshot = judged.plan, judged.snapshot
    rows = {row.name: row for row in snapshot.rows}
    for birth in plan.births:
        waiting = sum(row.waiting and row.pool == birth.pool.name for row in snapshot.rows)
        yield Decision(
            about=(birth.pool.name,),
            decided=f"bear {birth.count} Pod{'s' if birth.count > 1 else ''} for {birth.pool.name}",
            why=f"it keeps {birth.pool.size} and has {waiting}",
        )
    for ending in plan.endings:
        yield Decision(
            about=(ending.name, *_pool_of(ending.name, rows)),
            decided=f"end {ending.name} ({ending.reason}){', if no launch takes it first' if ending.only_waiting else ''}",
            why=ending.detail,
        )
    reasons = {row.name: row.ending_reason for row in snapshot.rows if row.ending_reason}
    reasons |= {ending.name: ending.reason for ending in plan.endings}
    for sweep in plan.sweeps:
        kinds = " and ".join(item.kind for item in sweep.objects if not item.deleting)
        yield Decision(
            about=(sweep.name,), decided=f"delete the {kinds} of {sweep.name}", why=f"it ends ({reasons[sweep.name]})"
        )
    for adoption in plan.adoptions:
        why = "it was made before its Pod was there"
        yield Decision(about=(adoption.pod.name,), decided=f"give Secret {adoption.secret.name} to its Pod", why=why)
    for pod in plan.relabels:
        back = Decision(about=(pod.name,), decided=f"put the labels of {pod.name} back", why="somebody took them off")
        yield back if judged.limits.puts_labels_back else _only_said(back)
    for name in plan.finishes:
        yield Decision(
            about=(name, *_pool_of(name, rows)),
            decided=f"close the row of {name}",
            why=f"nothing is left of it ({reasons.get(name) or rows[name].ending_reason})",
            notes=True,
        )
    yield from _of_strays(plan.strays, plan.strays_held)
    yield from _of_marks(plan.marks)
    for change in plan.statuses:
        ready = next((one for one in change.status.conditions if one.type == "Ready"), None)
        yield Decision(
            about=(change.pool.name,),
            decided=f"say of {change.pool.name} that {change.status.warm} of {change.pool.size} are warm and "
            f"{change.status.assigned} assigned",
            why=change.status.message or (ready.reason if ready and ready.status != "True" else ""),
            notes=True,
        )


def _of_marks(marks: Iterable[runtimes.Mark]) -> Iterator[Decision]:
    """One for all Pods of which the same is noted."""
    grouped: dict[str, list[str]] = {}
    for mark in marks:
        state = "Ready" if mark.ready else f"not Ready: {mark.problem or 'not seen'}"
        grouped.setdefault(state, []).append(mark.name)
    for state, names in grouped.items():
        yield Decision(about=tuple(names), decided=f"note {_names(names)} as {state}", notes=True)


def _pool_of(name: str, rows: Mapping[str, runtimes.PodRow]) -> tuple[str, ...]:
    pool = rows[name].pool if name in rows else None
    return (pool,) if pool else ()


def _names(names: Iterable[str]) -> str:
    listed = list(names)
    more = len(listed) - _NAMES_MOST
    return ", ".join(listed[:_NAMES_MOST]) + (f" and {more} more" if more > 0 else "")
