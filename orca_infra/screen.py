"""Tables for people; the only importer of rich. Colours appear on a terminal only."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from orca_infra.machines.model import NEXT_TRY, Action, Plan, Snapshot
from orca_infra.printable import printable
from orca_infra.quantity import duration_text
from orca_infra.record.words import of_action

_WIDTH_OF_A_FILE = 1000
_NARROW = 150
_WAITING_SHOWN = 5
_NAME_MOST = 80
_STATE_STYLES = {"making": "cyan", "booting": "cyan", "busy": "green", "idle": "yellow", "removing": "red"}


def console() -> Console:
    """What tables are printed on. What is no terminal has no width: a line that `grep` or a file gets is whole."""
    piped = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _WIDTH_OF_A_FILE
    return Console(highlight=False, width=piped)


def status_tables(status: Mapping[str, Any]) -> RenderableType:
    """Pools and machines as two tables, a line of runs, and one of each runtime pool."""
    now = status["now"]
    no_pools = _text("pools: none that a pass has seen; `orca-infra run` makes passes over those of orca.toml")
    parts: list[RenderableType] = [
        _pool_table(status["pools"], status["machines"], now) if status["pools"] else no_pools
    ]
    if status["machines"]:
        parts.append(_machine_table(status["machines"], now))
    runs = ", ".join(f"{count} {state}" for state, count in status["runs"].items())
    parts.append(_text(f"runs: {runs or 'none'}"))
    for row in status["unknown_pools"]:
        runs = "1 run waits" if row["runs"] == 1 else f"{row['runs']} runs wait"
        parts.append(_text(f"  {runs} for pool {row['pool'][:_NAME_MOST]}, and no pass has seen such a pool"))
    waiting = status["waiting"]
    for row in waiting[:_WAITING_SHOWN]:
        start = f" start {row['start']}" if row.get("start") else ""
        parts.append(_text(f"  run {row['run']}{start} of {row['pipeline']} waits: {row['waiting']}"))
    if len(waiting) > _WAITING_SHOWN:
        parts.append(_text(f"  and {len(waiting) - _WAITING_SHOWN} more: `orca-infra runs list`"))
    for row in status["runtimes"]:
        place = f"pool {row['pool']}" if row["pool"] else "no pool"
        counts = ", ".join(f"{row[state]} {state}" for state in ("warm", "assigned", "starting"))
        problem = f": {row['problem']}" if row["problem"] else ""
        parts.append(_text(f"runtimes of {place}: {counts}{problem}"))
    return Group(*parts)


def status_for_people(status: Mapping[str, Any]) -> None:
    out = console()
    now = status["now"]
    out.print(_text(f"stack {status['stack']} (id {status['id']})"))
    for matter in status["attention"]:
        out.print(_text(f"look at this ({ago(matter['since'], now)}): {matter['message']}"), style="bold red")
    out.print(status_tables(status))
    for pool in status["pools"]:
        for offer in pool["refused"]:
            times = f"{offer['times']} times" if offer["times"] > 1 else "once"
            place = f"{kind_of(offer)} in {offer['location']}"
            out.print(
                _text(
                    f"{pool['pool']}: {place}: {offer['class']} {times} since {offer['since'][:19]}: {offer['message']}"
                )
            )
    if status["ended"]:
        table = Table("ended", "type", "location", "ago", "reason", box=None, pad_edge=False)
        for row in status["ended"]:
            table.add_row(
                _text(row["name"]),
                _text(kind_of(row)),
                _text(row["location"]),
                ago(row["ended_at"], now),
                _text(row["reason"]),
            )
        out.print(table)
    for last in status["passes"]:
        out.print(_text(f"last change: {last['id']}, {ago(last['at'], now)} ago: {last['decided']}"))


def is_narrow() -> bool:
    """Whether a table has no room for what can be left out."""
    return console().width < _NARROW


def say(sentence: str) -> None:
    """A line of its own."""
    console().print(_text(sentence), soft_wrap=True)


def rows_for_people(
    headings: Sequence[str], rows: Sequence[Sequence[object]], nothing: str, *, unbroken: Collection[str] = ()
) -> None:
    """A plain table; `nothing` is said when there are no rows.

    What is too long for its column goes on in the next line, and nothing is cut off: names are there to be copied.
    The columns `unbroken`, by their headings, are as wide as they have to be.
    """
    out = console()
    if not rows:
        if nothing:
            out.print(_text(nothing))
        return
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold", no_wrap=heading in unbroken)
    for row in rows:
        table.add_row(*(_text(_words(cell)) for cell in row))
    out.print(table)


def _words(cell: object) -> str:
    if isinstance(cell, timedelta):
        return duration_text(max(0.0, round(cell.total_seconds())))
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    return str(cell)


def plan_for_people(plan: Plan, snapshot: Snapshot) -> None:
    out = console()
    for report in plan.reports:
        more = f" (next try in {_seconds(report.next_try_at, snapshot.now)})" if report.next_try_at else ""
        out.print(_text(f"pool {report.pool}: demand {report.demand}: {report.message}{more}"))
    for action in plan.actions:
        out.print(_text(f"  {describe(action)}"))
    for stray in plan.strays_held:
        out.print(_text(f"  held, since there are so many: stray {stray.name} in {stray.location}"))
    for why in snapshot.unreadable.values():
        out.print(_text(why))
    if not plan.actions:
        out.print(_text("nothing to do"))


def plan_for_programs(plan: Plan) -> dict[str, Any]:
    """The plan as JSON has it; each action says its kind."""
    return {
        "actions": [{"kind": type(action).__name__, **asdict(action)} for action in plan.actions],
        "reports": [asdict(report) for report in plan.reports],
        "next_due_at": plan.next_due_at,
        "strays_held": [asdict(stray) for stray in plan.strays_held],
    }


def describe(action: Action) -> str:
    """One printable line: what is done, and why."""
    return printable(of_action(action).sentence)


def kind_of(row: Mapping[str, Any]) -> str:
    """A machine's or an offer's type, and whether its provider may take it away."""
    return f"{row['type']}{_spot(spot=row['spot'])}"


def _spot(*, spot: bool) -> str:
    return " (spot)" if spot else ""


def ago(then: datetime | None, now: datetime) -> str:
    if then is None:
        return "-"
    return duration_text(max(0.0, round((now - then).total_seconds())))


def _pool_table(pools: list[dict[str, Any]], machines: list[dict[str, Any]], now: datetime) -> Table:
    table = Table("pool", "demand", "machines", "at the last pass", "last try", box=None, pad_edge=False)
    for pool in pools:
        states = [machine["state"] for machine in machines if machine["pool"] == pool["pool"]]
        counted = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) or "none"
        message = pool["message"]
        if pool["next_try_at"] and pool["next_try_at"] > now:
            due = f"{NEXT_TRY} in {_seconds(pool['next_try_at'], now)}"
            message = message.replace(NEXT_TRY, due, 1)
        elif pool["observed_at"]:
            message += f" ({ago(pool['observed_at'], now)} ago)"
        attempt = f"{pool['last_attempt']} ({ago(pool['tried_at'], now)} ago)" if pool["tried_at"] else "-"
        table.add_row(_text(pool["pool"]), str(pool["demand"]), _text(counted), _text(message), _text(attempt))
    return table


def _machine_table(machines: list[dict[str, Any]], now: datetime) -> Table:
    table = Table("machine", "type", "location", "state", "runs", "age", "heard", box=None, pad_edge=False)
    for machine in machines:
        table.add_row(
            _text(machine["name"]),
            _text(kind_of(machine)),
            _text(machine["location"]),
            _text(machine["state"], style=_STATE_STYLES.get(machine["state"], "")),
            f"{machine['running']}/{machine['slots']}",
            ago(machine["created_at"], now),
            f"{ago(machine['seen_at'], now)} ago" if machine["seen_at"] else "-",
        )
    return table


def _text(value: object, style: str = "") -> Text:
    """Names and messages come from outside: no markup, and no control characters for the terminal."""
    return Text(printable(str(value)), style=style)


def _seconds(then: datetime, now: datetime) -> str:
    return f"{max(0, (then - now).total_seconds()):.0f} s"
