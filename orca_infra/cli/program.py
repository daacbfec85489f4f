"""Arguments -> one call. Exit codes: 0 well, 1 it did not work out, 2 something the caller has to mend."""

from __future__ import annotations

import errno
import io
import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from orca_infra import __version__
from orca_infra.cli import drain, explain, machines, preview
from orca_infra.cli.command import (
    EXIT_FAILED,
    EXIT_USER,
    Json,
    open_for_command,
    plain,
    print_json,
    read_environment,
    say,
)
from orca_infra.cli.database import db_app
from orca_infra.cli.runs import runs_app
from orca_infra.cli.runtimes import runtimes_app
from orca_infra.cli.strays import strays_app
from orca_infra.errors import NotLeader, OrcaError, UserError

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


def main() -> None:
    """The console script. A user's mistake is one sentence, never a traceback."""
    _prepare_outputs()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # here, where an error can be said
    except UserError as error:
        _fail(str(error), EXIT_USER)
    except OrcaError as error:
        _fail(str(error), EXIT_FAILED)
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        if error.errno not in {errno.EPIPE, errno.ENOSPC}:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.ENOSPC:
            say("orca-infra: no space is left on the device where the output goes")
        sys.exit(EXIT_FAILED)


def _prepare_outputs() -> None:
    """An output that was closed takes nothing; one in an encoding of its own shows as `?` what that cannot say."""
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (it stays open)
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # as standard error does by itself, in its way


def _fail(message: str, code: int) -> None:
    say(f"orca-infra: {message}")
    sys.exit(code)


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

    settings = read_environment()
    path = file or settings.config_path
    config = load_config(path)
    refused = list(refused_pools(config.pools, settings.allowed))
    if refused:
        raise UserError("\n".join(f"{path}: {sentence}" for sentence in refused))
    if as_json:
        print_json({"file": str(path), "pools": [asdict(pool) for pool in config.pools]})
        return
    print(f"{plain(str(path))}: good; {len(config.pools)} pool{'' if len(config.pools) == 1 else 's'}")
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

    surroundings = open_for_command(secrets=True)
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
        "ORCA_TOKEN_KEY": surroundings.token_key.decode(errors="surrogateescape"),
    }
    if os.environ.get("ORCA_CONFIG") or settings.config_path.exists():  # a file that is named has to be there
        values["ORCA_CONFIG"] = str(settings.config_path.absolute())
    if "PULUMI_CONFIG_PASSPHRASE" in os.environ:  # it would win over the file
        print("unset PULUMI_CONFIG_PASSPHRASE")
    for name, value in values.items():
        print(f"export {name}={shlex.quote(value)}")
    surroundings.close()


def _warn_of_foreign_salt(path: Path, salt: str) -> None:
    """Say it when the stack's file was written for another state: pulumi would only say that the passphrase is wrong."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    if "encryptionsalt:" in text and salt not in text:
        say(
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
    if surroundings.settings.drift_is_reported:
        machines = machines.without_relabels()
    others = list(decide_on_cluster(demand, surroundings.settings.allowed))
    if as_json:
        print_json({**plan_for_programs(machines), "others": [asdict(one) for one in others]})
    else:
        plan_for_people(machines, demand.machines)
        for one in others:
            print(plain(f"{one.scope}: {one.sentence}"))
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

    surroundings = open_for_command(secrets=True)
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
    """Show pools and machines: demand, states, what the last try came to, and why nothing is being made; runs and runtimes.

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


@app.command(rich_help_panel=SETUP)
def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Go on until Ctrl-C, and say how to look around.")] = False,
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


explain.register(app, panel=LOOK)
preview.register(app, LOOK)
machines.register(app, looking=LOOK, steering=STEER)
app.add_typer(runs_app, name="runs", rich_help_panel=LOOK)
app.add_typer(strays_app, name="strays", rich_help_panel=LOOK)
app.add_typer(runtimes_app, name="runtimes", rich_help_panel=SERVE)
drain.register(app, steering=STEER)
app.add_typer(db_app, name="db", rich_help_panel=SETUP)
