"""The commands about run clusters."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orca_infra.errors import UserError

if TYPE_CHECKING:
    from datetime import datetime

    from orca_infra.surroundings import Surroundings

runs_app = typer.Typer(help="Run clusters on Kubernetes (ORCA_RUNNER=kubernetes).", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of a table for people.")]
Run = Annotated[int, typer.Argument(help="The run's number.", min=0)]
_POLL_SECONDS = 1.0
_QUEUED_SHOWN = 30
_ENDED_SHOWN = 20


@runs_app.command("list")
def runs_list(as_json: Json = False) -> None:
    """Show the run clusters that live, what waits for what, and the last that ended.

    Example: orca-infra runs list --json
    """
    from orca_infra.cli import open_for_command, print_json
    from orca_infra.runs.observe import SQL
    from orca_infra.runs.status import read_queued
    from orca_infra.screen import rows_for_people

    surroundings = open_for_command()
    with surroundings.database.snapshot() as transaction:
        live = transaction.dicts(SQL["clusters_for_people"])
        queued = read_queued(transaction, surroundings.settings)
        queued_runs = transaction.value(SQL["queued_count"])
        ended = transaction.dicts(SQL["ended_clusters"], {"limit": _ENDED_SHOWN})
        now: datetime = transaction.value("select now()")
    surroundings.close()
    if as_json:
        print_json({"live": live, "queued": queued, "queued_runs": queued_runs, "ended": ended})
        return
    rows_for_people(
        ("run", "start", "pipeline", "objects made", "age", "why it ends, or what it waits for"),
        [
            (
                row["run"],
                row["start"],
                row["pipeline"],
                f"{row['made']}/{row['objects']}",
                now - row["created_at"],
                "; ".join(text for text in (row["ending_detail"], row["waiting"] or row["refused"]) if text),
            )
            for row in live
        ],
        "no run clusters live",
    )
    rows_for_people(
        ("queued", "pipeline", "for", "waits for"),
        [(row["run"], row["pipeline"], now - row["queued_at"], row["waiting"]) for row in queued[:_QUEUED_SHOWN]],
        "",
    )
    if queued_runs > min(len(queued), _QUEUED_SHOWN):
        print(
            f"{queued_runs} runs are queued; of many that one thing holds, the oldest of each pipeline stands for all"
        )
    rows_for_people(
        ("ended", "start", "pipeline", "ago", "reason", "detail"),
        [
            (row["run"], row["start"], row["pipeline"], now - row["ended_at"], row["reason"], row["ending_detail"])
            for row in ended
        ],
        "",
    )


@runs_app.command("show")
def runs_show(run: Run, as_json: Json = False) -> None:
    """Show one run: its state, its starts and why each ended, and the objects of the one that lives.

    Example: orca-infra runs show 41
    """
    from orca_infra.cli import open_for_command, print_json
    from orca_infra.screen import rows_for_people

    surroundings = open_for_command()
    found = _read_run(surroundings, run)
    surroundings.close()
    if as_json:
        print_json(found)
        return
    now = found["now"]
    starts = {0: "never started", 1: "started once"}.get(
        found["run"]["start"], f"started {found['run']['start']} times"
    )
    print(f"run {run} of {found['run']['pipeline']}: {found['run']['state']}, {starts}")
    if found["run"]["reason"]:
        print(f"reason: {found['run']['reason']}")
    if found["waiting"]:
        print(f"waits for: {found['waiting']}")
    rows_for_people(
        ("start", "age", "ended", "why, or what it waits for"),
        [
            (s["start"], now - s["created_at"], s["reason"] or "lives", s["ending_detail"] or s["waiting"])
            for s in found["starts"]
        ],
        "it has had no run cluster",
    )
    rows_for_people(
        ("object", "name", "uid", "refused"),
        [(o["kind"], o["name"], o["uid"] or "not made yet", o["refused"]) for o in found["objects"]],
        "",
    )


@runs_app.command("logs")
def runs_logs(
    run: Run, follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run has ended.")] = False
) -> None:
    """Print what the run's drivers said, all starts one after the other.

    Example: orca-infra runs logs 41 -f
    """
    from orca_infra.cli import open_for_command
    from orca_infra.runs.heard import Heard

    surroundings = open_for_command()
    _read_run(surroundings, run)
    heard = Heard(surroundings.logs_folder, run)
    if heard.is_empty() and not follow:
        raise UserError(f"nothing was heard of run {run} yet: no log in {surroundings.logs_folder / str(run)}")
    while True:
        # Asked before the files are read: what a driver that has ended by now said is in them.
        over = _is_over(surroundings, run)
        for piece in heard.news():
            sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
        if not follow or over:
            break
        time.sleep(_POLL_SECONDS)
    surroundings.close()


@runs_app.command("remove")
def runs_remove(run: Run, yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False) -> None:
    """Take away the run cluster that the run has now; the run is queued again, or fails past its pipeline's max_starts.

    Example: orca-infra runs remove 41
    """
    from orca_infra.cli import open_for_command
    from orca_infra.runs.observe import SQL

    surroundings = open_for_command()
    found = _read_run(surroundings, run)
    live = [start for start in found["starts"] if start["ended_at"] is None]
    if not live:
        raise UserError(f"run {run} has no run cluster now")
    if not yes and not typer.confirm(f"End start {live[0]['start']} of run {run} and delete its objects?"):
        raise typer.Exit(1)
    with surroundings.database.transaction() as transaction:
        transaction.run(
            SQL["begin_ending"],
            {"run": run, "start": live[0]["start"], "reason": "Removed", "detail": "a person removed it"},
        )
        transaction.run("select pg_notify('orca_demand', '')")
    surroundings.close()
    print(f"run {run} start {live[0]['start']} ends; the loop deletes its objects and then moves the run")


def _read_run(surroundings: Surroundings, run: int) -> dict[str, Any]:
    """The run with its starts and objects. Raises UserError when there is none."""
    from orca_infra.runs.observe import SQL
    from orca_infra.runs.status import read_queued

    with surroundings.database.snapshot() as transaction:
        runs = transaction.dicts(SQL["run"], {"run": run})
        if not runs:
            raise UserError(f"there is no run {run}; `orca-infra runs list` shows those with a run cluster")
        queued = {row["run"]: row["waiting"] for row in read_queued(transaction, surroundings.settings, asked=run)}
        return {
            "waiting": queued.get(run, ""),
            "now": transaction.value("select now()"),
            "run": runs[0],
            "starts": transaction.dicts(SQL["starts_of_run"], {"run": run}),
            "objects": transaction.dicts(SQL["objects_of_run"], {"run": run}),
        }


def _is_over(surroundings: Surroundings, run: int) -> bool:
    """Whether the run has ended and nothing of it is left to be heard."""
    found = _read_run(surroundings, run)
    return found["run"]["state"] not in {"queued", "running"} and all(start["ended_at"] for start in found["starts"])
