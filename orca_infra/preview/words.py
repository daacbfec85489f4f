"""A preview's numbers in words, the same in every form. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from orca_infra.preview.model import Cost, Preview, Price, StackPreview

_DONE = {
    "create": "to create",
    "update": "to update",
    "replace": "to replace",
    "delete": "to delete",
    "import": "to import",
}


def counts(preview: Preview) -> list[tuple[str, str]]:
    """What there is to say in a line each: of what, and how much."""
    base = [one for one in preview.stacks if one.stack == preview.stack]
    machines = [one for one in preview.stacks if one.stack != preview.stack]
    lines = [("Base stack", _of_stacks(base))] if base else []
    if machines:
        lines.append((f"Machine stacks ({len(machines)})", _of_stacks(machines)))
    decisions = preview.decisions
    if decisions is not None:
        acting = sum(one.acts for one in decisions.decided)
        said = f"{acting} to act on" if acting else "nothing to do"
        if decisions.made or decisions.removed:
            said += f": machines +{decisions.made} -{decisions.removed}"
        lines.append(("Decisions", "**failed**" if decisions.error else said))
    if preview.breaches or any(not one.error and not one.note for one in preview.stacks):
        mandatory = sum(breach.mandatory for _, breach in preview.breaches)
        advisory = len(preview.breaches) - mandatory
        said = ", ".join(f"{count} {what}" for count, what in ((mandatory, "broken"), (advisory, "advisory")) if count)
        lines.append(("Policies", said or "kept"))
    return lines + costs(preview.cost)


def costs(cost: Cost) -> list[tuple[str, str]]:
    """What it costs an hour, before and after."""
    lines = []
    if cost.now is not None and cost.after is not None:
        lines.append(("Machines an hour, by the decisions", f"{price(cost.now)} → {price(cost.after)}"))
    if cost.most is not None:
        before = f"{price(cost.most_before)} → " if cost.most_before is not None else ""
        lines.append(("Machines an hour, at most", f"{before}{price(cost.most)}"))
    return lines


def price(found: Price) -> str:
    """`0.34`, with how many machines have none; at least two decimals, at most four."""
    text = f"{found.per_hour:,.4f}"
    whole, _, decimals = text.partition(".")
    text = f"{whole}.{decimals[:2]}{decimals[2:].rstrip('0')}"
    if found.unpriced:
        many = "s" if found.unpriced > 1 else ""
        text += f" or more: {found.unpriced} machine{many} of types without a price"
    return text


def _of_stacks(stacks: list[StackPreview]) -> str:
    total: dict[str, int] = {}
    for one in stacks:
        for op, count in one.counts().items():
            total[op] = total.get(op, 0) + count
    failed = sum(bool(one.error) for one in stacks)
    left_out = sum(bool(one.note) and not one.error for one in stacks)
    said = [f"{failed} failed" if len(stacks) > 1 else "**failed**"] if failed else []
    said += [f"{count} {_DONE[op]}" for op, count in _ordered(total)]
    if left_out:
        said.append("not previewed" if left_out == len(stacks) else f"{left_out} not previewed")
    return ", ".join(said) or "no change"


def _ordered(total: Mapping[str, int]) -> list[tuple[str, int]]:
    return [(op, total[op]) for op in _DONE if total.get(op)]
