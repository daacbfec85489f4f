"""The commands about the database."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from orca_infra.cli.command import read_environment, say
from orca_infra.errors import UserError

db_app = typer.Typer(help="The database's schema, and the embedded Postgres.", no_args_is_help=True)


@db_app.command("migrate")
def db_migrate(
    standalone: Annotated[
        bool, typer.Option("--standalone", help="Make orca's own tables too; without it they are required.")
    ] = False,
) -> None:
    """Bring schema orca to this program's version.

    Example: orca-infra db migrate
    """
    from orca_infra.db.connection import Database
    from orca_infra.db.migrate import migrate
    from orca_infra.surroundings import database_url

    settings = read_environment()
    database = Database(database_url(settings, say))
    try:
        applied = migrate(database, with_orca_tables=standalone or settings.db is None)
    finally:
        database.close()
    for name in applied:
        print(f"applied {name}")
    print("the database is up to date")


@db_app.command("stop")
def db_stop() -> None:
    """Stop the embedded Postgres of this stack.

    Example: orca-infra db stop
    """
    from orca_infra.db import embedded

    settings = read_environment()
    # A shell that ran `eval "$(orca-infra env)"` has the embedded server's own address in ORCA_DB.
    if settings.db is not None and str(settings.home.absolute() / "postgres") not in settings.db:
        raise UserError("ORCA_DB is set: that database is not this program's to stop")
    stopped = embedded.stop(settings.home / "postgres")
    print("stopped" if stopped else "it was not running")


@db_app.command("psql", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def db_psql(context: typer.Context) -> None:
    """Open psql on this stack's database; what follows goes to psql as it is.

    Example: orca-infra db psql -c "select pool, message from orca.pool_status"
    """
    from orca_infra.db.connection import libpq_environment
    from orca_infra.db.embedded import psql
    from orca_infra.surroundings import database_url

    program = psql()
    url = database_url(read_environment(), lambda _said: None)
    sys.stdout.flush()
    os.execve(program, ["psql", *context.args], {**os.environ, **libpq_environment(url)})  # noqa: S606  (it becomes psql)
