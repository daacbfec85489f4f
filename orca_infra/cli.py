"""Arguments -> one call. Exit codes: 0 well, 1 it did not work out, 2 something the caller has to mend."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orca_infra import __version__
from orca_infra.cli_cluster import runtimes_app
from orca_infra.cli_drain import register as register_drain
from orca_infra.cli_explain import register as register_explain
from orca_infra.cli_machines import register as register_machines
from orca_infra.cli_preview import register as register_preview
from orca_infra.cli_runs import runs_app
from orca_infra.errors import NotLeader, OrcaError, UserError
from orca_infra.printable import printable

if TYPE_CHECKING:
    from orca_infra.settings import Settings
    from orca_infra.surroundings import Surroundings

EXIT_FAILED = 1
EXIT_USER = 2
# The headings of the help.
LOOK = "Look"
STEER = "Steer"
SERVE = "Serve"
SETUP = "Set up and try"

app = typer.Typer(
    name="orca-infra",
    help="Makes and removes what orca's runs need, through Pulumi: worker machines, run clusters, warm runtimes.\n\n"
    "Settings come from the environment (docs/reference/settings.md), pools from orca.toml. "
    "Exit codes: 0 well, 1 it did not work out, 2 something to mend, said in one sentence; "
    "of preview: 0 no change, 1 error, 2 changes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
db_app = typer.Typer(help="The database's schema, and the embedded Postgres.", no_args_is_help=True)
strays_app = typer.Typer(help="What carries this stack's identity and nobody owns.", no_args_is_help=False)
app.add_typer(db_app, name="db", rich_help_panel=SETUP)
app.add_typer(strays_app, name="strays", rich_help_panel=LOOK)
app.add_typer(runs_app, name="runs", rich_help_panel=LOOK)
app.add_typer(runtimes_app, name="runtimes", rich_help_panel=SERVE)
register_machines(app, looking=LOOK, steering=STEER)
register_preview(app, LOOK)
register_explain(app, panel=LOOK)
register_drain(app, steering=STEER)

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of tables for people.")]


def main() -> None:
    """The console script. A user's mistake is one sentence, never a traceback."""
    try:
        app()
    except UserError as error:
        _fail(str(error), EXIT_USER)
    except OrcaError as error:
        _fail(str(error), EXIT_FAILED)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FAILED)


def _fail(message: str, code: int) -> None:
    print(f"orca-infra: {_plain(message)}", file=sys.stderr)
    sys.exit(code)


def _plain(text: str) -> str:
    """Names and messages come from outside: no control characters for the terminal but the end of a line."""
    return printable(text, keep="\n")


def _say(message: str) -> None:
    print(_plain(message), file=sys.stderr)


def _settings() -> Settings:
    from orca_infra.settings import read_settings, unknown_settings

    for sentence in unknown_settings(os.environ):
        _say(f"warning: {sentence}")
    return read_settings(os.environ)


def open_for_command(say: Callable[[str], None] = _say, *, secrets: bool = True) -> Surroundings:
    """`secrets`: with passphrase and token key; what runs no engine and makes no machine should not have them."""
    from orca_infra.surroundings import open_surroundings

    return open_surroundings(_settings(), say=say, with_passphrase=secrets, with_token_key=secrets)


def print_json(value: Any) -> None:
    """Print a value for programs; times as ISO 8601."""
    print(json.dumps(value, indent=2, default=lambda one: one.isoformat() if isinstance(one, datetime) else str(one)))


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.", is_eager=True)] = False,
) -> None:
    if version:
        print(f"orca-infra {__version__}")
        raise typer.Exit


@app.command(rich_help_panel=SETUP)
def check(
    file: Annotated[Path | None, typer.Argument(help="The file; ORCA_CONFIG or orca.toml by default.")] = None,
    as_json: Json = False,
) -> None:
    """Validate orca.toml and the settings, also against the policies (ORCA_POLICY_CONFIG); nothing is contacted.

    Example: orca-infra check stacks/orca.toml
    """
    from orca_infra.config import load_config
    from orca_infra.policy.configuration import refused_pools
    from orca_infra.quantity import duration_text

    settings = _settings()
    path = file or settings.config_path
    config = load_config(path)
    refused = list(refused_pools(config.pools, settings.allowed))
    if refused:
        raise UserError("\n".join(f"{path}: {sentence}" for sentence in refused))
    if as_json:
        print_json({"file": str(path), "pools": [asdict(pool) for pool in config.pools]})
        return
    print(f"{_plain(str(path))}: good; {len(config.pools)} pool{'' if len(config.pools) == 1 else 's'}")
    for pool in config.pools:
        types = ", then ".join(
            f"{t.type}{' (spot)' if t.spot else ''} in {', '.join(t.locations)}"
            + (f" for {duration_text(t.wait_seconds)}" if t.wait_seconds else "")
            for t in pool.types
        )
        print(f"  {pool.name} ({pool.provider}, at most {pool.max_machines}): {types}")


@app.command(rich_help_panel=SETUP)
def doctor(as_json: Json = False) -> None:
    """Say which tools and services were found, in which version, and for what is missing the command that gets it.

    Exit code 1 when something that is needed is missing.

    Example: orca-infra doctor
    """
    from orca_infra.doctor import all_is_there, examine, show

    findings = examine(os.environ)
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        show(findings)
    if not all_is_there(findings):
        raise typer.Exit(EXIT_FAILED)


@app.command(rich_help_panel=SETUP)
def env() -> None:
    """Print shell lines that give a person's pulumi the same state, passphrase and database as the loop.

    Example: eval "$(orca-infra env)"; pulumi preview -s dev
    """
    from orca_infra.stack.engine import Engine, engine_environment
    from orca_infra.stack.presence import claim_state

    surroundings = open_for_command()
    settings = surroundings.settings
    # The base's stack is made here, where the passphrase is known to be the right one, so that `pulumi up -s dev` finds it.
    engine = Engine(surroundings.engine)
    claim_state(engine, surroundings.database, surroundings.engine.backend_url, settings.stack)
    _warn_of_foreign_salt(Path("stacks") / f"Pulumi.{settings.stack}.yaml", engine.salt(settings.stack))
    values = {
        **engine_environment(surroundings.engine),
        "ORCA_STACK": settings.stack,
        "ORCA_DB": surroundings.url,
        "ORCA_HOME": str(settings.home.absolute()),
        "ORCA_CONFIG": str(settings.config_path.absolute()),
        "ORCA_TOKEN_KEY": surroundings.token_key.decode(errors="surrogateescape"),
    }
    for name, value in values.items():
        print(f"export {name}={shlex.quote(value)}")
    surroundings.close()


def _warn_of_foreign_salt(path: Path, salt: str) -> None:
    """Say it when the stack's file was written for another state: pulumi would only say that the passphrase is wrong."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    if "encryptionsalt:" in text and salt not in text:
        _say(
            f"warning: {path} holds the salt of another state's passphrase: "
            "remove its line encryptionsalt, or use the ORCA_HOME or PULUMI_CONFIG_PASSPHRASE_FILE that it belongs to"
        )


@app.command(rich_help_panel=LOOK)
def plan(as_json: Json = False) -> None:
    """Print what a pass would do now and why, also why nothing; nothing is changed.

    Example: orca-infra plan --json
    """
    from orca_infra.loop.configuration import LiveConfig
    from orca_infra.machines.decide import decide
    from orca_infra.preview.decisions import decide_on_cluster
    from orca_infra.preview.gather import take
    from orca_infra.screen import plan_for_people, plan_for_programs

    surroundings = open_for_command()
    config = LiveConfig(surroundings.settings.config_path).config
    demand = take(surroundings, config)
    machines = decide(demand.machines, config.pools, surroundings.settings.limits(config))
    others = list(decide_on_cluster(demand, surroundings.settings.allowed))
    if as_json:
        print_json({**plan_for_programs(machines), "others": [asdict(one) for one in others]})
    else:
        plan_for_people(machines, demand.machines)
        for one in others:
            print(_plain(f"{one.scope}: {one.sentence}"))
    surroundings.close()


@app.command(rich_help_panel=SERVE)
def run(
    once: Annotated[bool, typer.Option("--once", help="Make one pass and leave.")] = False,
) -> None:
    """Run the automation loop: decide and act, pass after pass, until told to stop (SIGTERM or Ctrl-C).

    Any number may run; one leads, and another takes over within seconds of its end.

    Example: ORCA_DB=postgresql://orca@db/orca orca-infra run
    """
    from orca_infra.log import make_log
    from orca_infra.loop.run import Loop

    surroundings = open_for_command()
    log = make_log(form=surroundings.settings.log_form)
    loop = Loop(surroundings, log)
    try:
        loop.stop_on_signals()
        if once:
            result = loop.run_once()
            log.info("pass made", changed=result.changed, actions=len(result.plan.actions))
        else:
            loop.run()
    except NotLeader as error:
        raise UserError(str(error)) from error
    finally:
        surroundings.close()


@app.command(rich_help_panel=LOOK)
def status(as_json: Json = False) -> None:
    """Show pools and machines: demand, states, what the last try came to, and why nothing is being made.

    Example: orca-infra status --json
    """
    from orca_infra.screen import status_for_people
    from orca_infra.status import read_status

    surroundings = open_for_command()
    current = read_status(surroundings)
    if as_json:
        print_json(current)
    else:
        status_for_people(current)
    surroundings.close()


@strays_app.callback(invoke_without_command=True)
def strays(context: typer.Context, as_json: Json = False) -> None:
    """List what carries this stack's identity, nobody owns, and is past its grace: machines, and objects on Kubernetes.

    Example: orca-infra strays
    """
    from orca_infra.loop.cluster_strays import open_strays

    if context.invoked_subcommand is not None:
        return
    surroundings = open_for_command()
    machines = [action.machine for _, action in _find_strays(surroundings)]
    with open_strays(surroundings) as cluster:
        objects = cluster.find() if cluster else []
    surroundings.close()
    if as_json:
        print_json(
            [{"name": m.name, "uid": m.uid, "location": m.location, "created_at": m.created_at} for m in machines]
            + [asdict(stray) for stray in objects]
        )
        return
    for machine in machines:
        made = f"{machine.created_at:%F %T}"
        print(_plain(f"{machine.name}  {machine.type} in {machine.location}, made {made}, uid {machine.uid}"))
    for stray in objects:
        made = f"{stray.created_at:%F %T}"
        print(_plain(f"{stray.kind} {stray.namespace}/{stray.name}, made {made}, uid {stray.uid}"))
    count = len(machines) + len(objects)
    print(f"{count} stray{'' if count == 1 else 's'}")


@strays_app.command("delete")
def strays_delete(
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete all strays: for when the loop holds them, since they are so many or since the database may have lost rows.

    Example: orca-infra strays delete --yes
    """
    from orca_infra.loop.cluster_strays import open_strays
    from orca_infra.loop.strays import release_strays

    surroundings = open_for_command()
    machines = _find_strays(surroundings)
    with open_strays(surroundings) as cluster:
        objects = cluster.find() if cluster else []
        count = len(machines) + len(objects)
        what = f"{len(machines)} machines" + (f" and {len(objects)} objects on Kubernetes" if cluster else "")
        if count and not yes and not typer.confirm(f"Delete {what}?"):
            raise typer.Exit(EXIT_FAILED)
        for provider, action in machines:
            provider.delete(action.machine)
            print(f"deleted {action.machine.name}")
        for stray in objects:
            assert cluster is not None
            cluster.delete(stray)
            print(f"deleted {stray.kind} {stray.namespace}/{stray.name}")
    print(f"{count} deleted")
    if release_strays(surroundings.database):
        print("the loop deletes strays by itself again")
    surroundings.close()


def _find_strays(surroundings: Surroundings) -> list[tuple[Any, Any]]:
    from dataclasses import replace

    from orca_infra.loop.configuration import LiveConfig
    from orca_infra.loop.passes import look, make_providers
    from orca_infra.machines.decide import decide
    from orca_infra.machines.model import DeleteStray

    config = LiveConfig(surroundings.settings.config_path).config
    providers = make_providers(surroundings, config)
    unlimited = replace(surroundings.settings.limits(config), stray_max=sys.maxsize)
    decided = decide(look(surroundings, providers), config.pools, unlimited)
    return [(providers[a.provider], a) for a in decided.actions if isinstance(a, DeleteStray)]


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

    settings = _settings()
    database = Database(database_url(settings, _say))
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

    settings = _settings()
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
    url = database_url(_settings(), lambda _said: None)
    sys.stdout.flush()
    os.execve(program, ["psql", *context.args], {**os.environ, **libpq_environment(url)})  # noqa: S606  (it becomes psql)


@app.command(rich_help_panel=SETUP)
def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Leave it running, and print how to look around.")] = False,
    use_cluster: Annotated[
        bool,
        typer.Option(
            "--use-cluster", help="Use the cluster that KUBECONFIG names, in namespaces that are removed again."
        ),
    ] = False,
) -> None:
    """Show the main job live, on the real engine and a real Postgres, in a folder of its own; under 90 seconds.

    Exit code 1 if anything that it tells did not happen. Ctrl-C leaves nothing.

    Example: orca-infra demo --keep
    """
    from orca_infra.testing.demo import run_demo

    if not run_demo(keep=keep, use_cluster=use_cluster):
        raise typer.Exit(EXIT_FAILED)


if __name__ == "__main__":
    main()
