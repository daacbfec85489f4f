"""The commands for pull requests: preview and snapshot."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from orca_infra.cli.command import open_for_command, print_json, say
from orca_infra.errors import OrcaError

if TYPE_CHECKING:
    from orca_infra.preview.gather import Asked
    from orca_infra.preview.model import Preview

#: Of `preview`: what is wrong with its call or its configuration; 2 says that there are changes.
EXIT_ERROR = 1
_USAGE = 2


class Form(StrEnum):
    """How a preview is printed."""

    TEXT = "text"
    MARKDOWN = "markdown"
    JSON = "json"


class PreviewCommand(TyperCommand):
    """A command whose exit code 2 has a meaning of its own: a wrong call is 1."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Raises what the caller did wrong, with the exit code of an error."""
        try:
            return super().make_context(info_name, args, parent, **extra)
        except Exception as error:
            if getattr(error, "exit_code", None) == _USAGE:
                setattr(error, "exit_code", EXIT_ERROR)  # noqa: B010  (its type is private to typer)
            raise


def register(app: typer.Typer, panel: str) -> None:
    """Add these commands to the program's."""
    app.command("preview", cls=PreviewCommand, rich_help_panel=panel)(preview)
    app.command("snapshot", rich_help_panel=panel)(snapshot)


def snapshot() -> None:
    """Print what the loop's decisions are taken from now, as JSON without secrets, for a preview elsewhere.

    Example: orca-infra snapshot > demand.json
    """
    from orca_infra.config import load_config
    from orca_infra.preview.demand import write_demand
    from orca_infra.preview.gather import redactor, take

    surroundings = open_for_command()
    try:
        settings = replace(surroundings.settings, db=surroundings.url)
        demand = take(surroundings, load_config(settings.config_path))
        sys.stdout.write(write_demand(demand, redactor(settings, os.environ)))
    finally:
        surroundings.close()


def preview(  # noqa: PLR0917  (each is an option)
    demand: Annotated[
        str, typer.Option(help="What runs wait: live (the database), none, or the file of `orca-infra snapshot`.")
    ] = "live",
    form: Annotated[Form, typer.Option("--format", help="How it is printed.")] = Form.TEXT,
    stacks: Annotated[
        bool | None,
        typer.Option(
            "--stacks/--no-stacks",
            help="Whether the engine previews the base and the machine stacks. Unset: unless --demand is a file and ORCA_DB "
            "is not set.",
        ),
    ] = None,
    before: Annotated[
        Path | None, typer.Option(help="The orca.toml of before: then what machines could cost at most is compared.")
    ] = None,
    project: Annotated[Path, typer.Option(help="The folder with Pulumi.yaml.")] = Path(),
    comment: Annotated[
        bool, typer.Option("--comment", help="Comment the pull request on GitHub, in the place of the comment before.")
    ] = False,
    pull_request: Annotated[
        int | None, typer.Option(help="Its number; unset: that of the workflow's event.", min=1)
    ] = None,
) -> None:
    """Show what a change would do: the stacks' diffs, the loop's decisions, broken policies, the cost. Nothing is changed.

    Exit codes: 0 no change, 2 changes, 1 error, which is also a broken policy, a wrong call or a bad configuration.

    Example: orca-infra preview --demand demand.json --format markdown
    """
    from orca_infra.preview.gather import Asked

    asked = Asked(demand=demand, stacks=stacks, before=before, project=project)
    try:
        code = _preview(asked, form, comment=comment, number=pull_request)
    except OrcaError as error:
        say(f"orca-infra: {error}")
        code = EXIT_ERROR
    raise typer.Exit(code)


def _preview(asked: Asked, form: Form, *, comment: bool, number: int | None) -> int:
    from orca_infra.preview.gather import gather
    from orca_infra.preview.github import pull_request_of
    from orca_infra.settings import read_settings, unknown_settings

    for sentence in unknown_settings(os.environ):
        say(f"warning: {sentence}")
    settings = read_settings(os.environ)
    # Before the work, and not after minutes of it.
    where = pull_request_of(os.environ, number) if comment else None
    found = gather(asked, settings, say)
    _show(found, form)
    if where is not None:
        from orca_infra.preview import markdown
        from orca_infra.preview.github import put_comment

        what, address = put_comment(where, markdown.marker(found.stack), markdown.comment(found))
        say(f"comment {what}: {address}")
    return found.exit_code


def _show(found: Preview, form: Form) -> None:
    from orca_infra.preview import markdown, text

    match form:
        case Form.JSON:
            print_json(text.as_json(found))
        case Form.MARKDOWN:
            sys.stdout.write(markdown.comment(found))
        case Form.TEXT:
            sys.stdout.write(text.plain(found))
    sys.stdout.flush()
