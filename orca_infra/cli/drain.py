"""`orca-infra drain --all`: before a stack is destroyed."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from orca_infra.cli.command import open_for_command
from orca_infra.errors import UserError
from orca_infra.printable import printable


def register(app: typer.Typer, *, steering: str) -> None:
    """Add the command to the program's, in this panel of its help."""
    app.command("drain", rich_help_panel=steering)(drain_all)


def drain_all(
    everything: Annotated[
        bool, typer.Option("--all", help="All that the stack's loop has made; there is no less.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """End all machines, run clusters and runtimes of the stack, so that `pulumi destroy` works; paused until `resume`.

    Runs that are under way are queued again, users' runtimes end. Interrupted, it goes on when it is called again.

    Example: orca-infra drain --all, then pulumi destroy -s prod
    """
    from orca_infra.loop.drain import drain, left_of

    if not everything:
        raise UserError(
            "say `orca-infra drain --all` to end all that the stack has; for one machine: `orca-infra machines drain NAME`"
        )

    def say(text: str) -> None:
        print(printable(text), file=sys.stderr, flush=True)

    surroundings = open_for_command(secrets=True)
    family = surroundings.settings.stack
    left = left_of(surroundings.database)
    if not yes and not typer.confirm(
        f"End everything of stack {family} ({left}), and make nothing anew until resumed?"
    ):
        raise typer.Exit(1)
    try:
        drain(surroundings, say)
    except KeyboardInterrupt:
        say("interrupted: call it again to go on; the family stays paused until `orca-infra resume`")
        raise
    finally:
        surroundings.close()
    print(f"drained; `pulumi destroy -s {family}` removes the base, `orca-infra resume` ends the pause")
