"""The nouns of a preview, frozen. Standard library only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime

#: Exit codes of `orca-infra preview`.
NO_CHANGE, FAILED, CHANGES = 0, 1, 2
#: Ops of the engine that change something, in the order in which they are counted.
OPS = ("create", "update", "replace", "delete", "import")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A resource that an `up` would change. `diff`: a line for each property, beginning with +, - or a blank."""

    op: str
    type: str
    name: str
    diff: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Breach:
    """A policy that a resource breaks; `message` names the resource, the rule and the remedy."""

    rule: str
    resource: str
    message: str
    mandatory: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StackPreview:
    """What the engine says of one stack.

    Attributes:
        error: why it could not be previewed, or empty.
        note: why there is nothing to say, or empty.

    """

    stack: str
    changes: tuple[Change, ...] = ()
    breaches: tuple[Breach, ...] = ()
    error: str = ""
    note: str = ""

    def counts(self) -> dict[str, int]:
        """How many resources, by op."""
        counted = Counter(change.op for change in self.changes)
        return {op: counted[op] for op in OPS if counted[op]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """One decision of the loop, or why none was taken. `scope`: machines, runs or runtimes."""

    scope: str
    sentence: str
    acts: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """What the loop would decide.

    Attributes:
        source: where the demand is from, in words.
        made, removed: how many machines.
        error: why the decisions could not be taken, or empty.

    """

    source: str
    taken_at: datetime | None = None
    decided: tuple[Decided, ...] = ()
    made: int = 0
    removed: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What machines cost an hour, and how many there are among them of which no price is stated."""

    per_hour: float = 0.0
    unpriced: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What worker machines cost an hour, where types carry `price_per_hour`; None: not known or not asked.

    Attributes:
        now, after: the machines that exist, and those after the decisions.
        most_before, most: what there could be at most, with the configuration of before and with this one.

    """

    now: Price | None = None
    after: Price | None = None
    most_before: Price | None = None
    most: Price | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """All that a preview says."""

    stack: str
    stacks: tuple[StackPreview, ...] = ()
    decisions: Decisions | None = None
    cost: Cost = field(default_factory=Cost)
    notes: tuple[str, ...] = ()

    @property
    def breaches(self) -> list[tuple[str, Breach]]:
        """Each with its stack; the mandatory ones first."""
        found = [(one.stack, breach) for one in self.stacks for breach in one.breaches]
        return sorted(found, key=lambda pair: not pair[1].mandatory)

    @property
    def errors(self) -> list[str]:
        found = [f"stack {one.stack}: {one.error}" for one in self.stacks if one.error]
        return found + ([f"decisions: {self.decisions.error}"] if self.decisions and self.decisions.error else [])

    @property
    def exit_code(self) -> int:
        """0 no change, 1 error (also a mandatory policy that is broken), 2 changes."""
        if self.errors or any(breach.mandatory for _, breach in self.breaches):
            return FAILED
        acts = self.decisions is not None and any(one.acts for one in self.decisions.decided)
        return CHANGES if acts or any(one.changes for one in self.stacks) else NO_CHANGE
