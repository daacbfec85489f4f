"""The commands about run clusters."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orca_infra.errors import UserError

if TYPE_CHECKING:
    from datetime import datetime
    from pathlib import Path

    from orca_infra.surroundings import Surroundings

runs_app = typer.Typer(help="Run clusters on Kubernetes (ORCA_RUNNER=kubernetes).", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of a table for people.")]
Run = Annotated[int, typer.Argument(help="The run's number.", min=0)]
_PIECE = 2**16
_POLL_SECONDS = 1.0


@runs_app.command("list")
def runs_list(as_json: Json = False) -> None:
    """Show the run clusters that live, and the last that ended.

    Example: orca-infra runs list --json
    """
    from orca_infra.cli import open_for_command, print_json
    from orca_infra.runs.observe import SQL
    from orca_infra.screen import rows_for_people

    surroundings = open_for_command()
    with surroundings.database.snapshot() as transaction:
        live = transaction.dicts(SQL["clusters_for_people"])
        ended = transaction.dicts(SQL["ended_clusters"], {"limit": 20})
        now: datetime = transaction.value("select now()")
    surroundings.close()
    if as_json:
        print_json({"live": live, "ended": ended})
        return
    rows_for_people(
        ("run", "start", "pipeline", "objects made", "age", "why it ends or waits"),
        [
            (
                row["run"],
                row["start"],
                row["pipeline"],
                f"{row['made']}/{row['objects']}",
                now - row["created_at"],
                row["ending_detail"] or row["refused"],
            )
            for row in live
        ],
        "no run clusters live",
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
    print(f"run {run} of {found['run']['pipeline']}: {found['run']['state']}, started {found['run']['start']} times")
    if found["run"]["reason"]:
        print(f"reason: {found['run']['reason']}")
    rows_for_people(
        ("start", "age", "ended", "detail"),
        [(s["start"], now - s["created_at"], s["reason"] or "lives", s["ending_detail"]) for s in found["starts"]],
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
    from orca_infra.runs.logs import driver_log, parts

    surroundings = open_for_command()
    _read_run(surroundings, run)
    logs = surroundings.logs_folder
    whole = driver_log(logs, run)
    if not whole.exists() and not parts(logs, run) and not follow:
        raise UserError(f"nothing was heard of run {run} yet: no log in {whole.parent}")
    printed = _print_from(whole, 0)
    shown: dict[Path, int] = {}
    while True:
        for part in parts(logs, run):
            shown[part] = _print_from(part, shown.get(part, 0))
        if not follow:
            break
        state = _read_run(surroundings, run)
        if state["run"]["state"] not in {"queued", "running"} and not parts(logs, run):
            break
        time.sleep(_POLL_SECONDS)
    if follow and not shown:
        _print_from(whole, printed)
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

    with surroundings.database.snapshot() as transaction:
        runs = transaction.dicts(SQL["run"], {"run": run})
        if not runs:
            raise UserError(f"there is no run {run}; `orca-infra runs list` shows those with a run cluster")
        return {
            "now": transaction.value("select now()"),
            "run": runs[0],
            "starts": transaction.dicts(SQL["starts_of_run"], {"run": run}),
            "objects": transaction.dicts(SQL["objects_of_run"], {"run": run}),
        }


def _print_from(path: Path, offset: int) -> int:
    """Print a file from an offset on; gives where it ended."""
    if not path.exists():
        return offset
    with path.open("rb") as file:
        file.seek(offset)
        while piece := file.read(_PIECE):
            sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
        return file.tell()
