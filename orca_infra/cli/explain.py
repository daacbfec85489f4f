"""The command that says why: the record of the passes in a person's words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orca_infra.cli.command import open_for_command, print_json

if TYPE_CHECKING:
    from datetime import datetime

    from orca_infra.record.history import Explanation, Pass

_SHOWN_MOST = 10_000


def register(app: typer.Typer, *, panel: str) -> None:
    """Add the command to the program's, in this panel of its help."""
    app.command("explain", rich_help_panel=panel)(explain)


def explain(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A pass (machines-12), a run's number, or the name of a machine, a Pod, a pool or a runtime; "
            "the latest passes when it is left off."
        ),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Of a pass: decide again, with this version, and say whether it agrees.")
    ] = False,
    limit: Annotated[
        int, typer.Option("--limit", help="How many passes are looked at, the newest first.", min=1, max=_SHOWN_MOST)
    ] = 20,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON for programs; of a pass with its snapshot and plan.")
    ] = False,
) -> None:
    """Say why: what passes that changed something decided, or what was decided about one thing, and why nothing is.

    Example: orca-infra explain orca-gpu-3
    """
    from orca_infra.errors import UserError
    from orca_infra.record import history
    from orca_infra.runs.limits import run_limits

    surroundings = open_for_command()
    try:
        if name is None:
            if again:
                raise UserError("--again needs the pass to decide again: `orca-infra explain` lists them")
            now, passes = history.newest_passes(surroundings.database, limit)
            print_json([_for_programs(one) for one in passes]) if as_json else _show_passes(passes, now)
            return
        limits = run_limits(surroundings.settings) if surroundings.settings.runner else None
        found = history.explain(surroundings.database, name, limits=limits, limit=limit)
    finally:
        surroundings.close()
    if isinstance(found, history.Pass):
        shown = _for_programs(found)
        if again:
            shown["agrees"] = _agrees(found)
        print_json(shown) if as_json else _show_pass(found, shown)
        if not shown.get("agrees", True):
            raise typer.Exit(1)
        return
    if again:
        raise UserError(f"--again is for passes, and {name} is none")
    print_json(asdict(found)) if as_json else _show(found)


def _agrees(found: Pass) -> bool:
    from orca_infra.record.codec import decode

    decided = decode(found.packed, found.frame)
    return bool(decided.again() == decided.plan)


def _for_programs(found: Pass) -> dict[str, Any]:
    return {key: value for key, value in asdict(found).items() if key not in {"packed", "frame"} and value != {}}


def _show_passes(passes: list[Pass], now: datetime) -> None:
    from orca_infra.record.history import summary
    from orca_infra.screen import rows_for_people

    rows = [(one.id, now - one.decided_at, summary(one.decisions), one.came_to) for one in passes]
    rows_for_people(("pass", "ago", "decided", "came to"), rows, "no pass that changed something is kept")


def _show_pass(found: Pass, shown: Mapping[str, Any]) -> None:
    from orca_infra.screen import rows_for_people

    print(f"pass {found.id} decided at {found.decided_at:%F %T%z}, by version {found.version}; {found.came_to}")
    rows = [("does" if one["acts"] else "leaves", one["decided"], one["why"]) for one in found.decisions]
    rows_for_people(("", "decided", "why"), rows, "it decided nothing")
    if "agrees" in shown:
        print("this version decides the same" if shown["agrees"] else "this version decides otherwise")


def _show(found: Explanation) -> None:
    from orca_infra.screen import rows_for_people, say

    for sentence in found.now:
        say(sentence)
    rows = [(line.id, found.at - line.at, line.decided, line.why, line.came_to) for line in found.history]
    nothing = f"no pass that is kept decided anything about {found.about}"
    rows_for_people(("pass", "ago", "decided", "why", "came to"), rows, nothing)
