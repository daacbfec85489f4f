"""The commands about what is on Kubernetes: runs and runtimes."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer

from orca_infra.errors import UserError

if TYPE_CHECKING:
    from orca_infra.runtimes.launch import LaunchHands
    from orca_infra.surroundings import Surroundings

runs_app = typer.Typer(help="Run clusters on Kubernetes (ORCA_RUNNER=kubernetes).", no_args_is_help=True)
runtimes_app = typer.Typer(
    help="Runtimes: take a warm Pod, list, stop (ORCA_RUNTIMES_NAMESPACE).", no_args_is_help=True
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of a table for people.")]


@runs_app.command("list")
def runs_list(as_json: Json = False) -> None:
    """Show the run clusters that live, and the last that ended."""
    from orca_infra.cli import open_for_command, print_json
    from orca_infra.runs.observe import SQL
    from orca_infra.screen import rows_for_people

    surroundings = open_for_command()
    with surroundings.database.snapshot() as transaction:
        live = transaction.dicts(SQL["clusters_for_people"])
        ended = transaction.dicts(SQL["ended_clusters"], {"limit": 20})
        now = transaction.value("select now()")
    if as_json:
        print_json({"live": live, "ended": ended})
    else:
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
            ("ended", "start", "pipeline", "ago", "reason"),
            [(row["run"], row["start"], row["pipeline"], now - row["ended_at"], row["reason"]) for row in ended],
            "",
        )
    surroundings.close()


@runtimes_app.command("launch")
def runtimes_launch(  # noqa: PLR0917  (options, as typer reads them)
    environment: Annotated[str, typer.Argument(help="The RuntimeEnvironment, by name.")],
    user: Annotated[str, typer.Option(help="For whom, and whose secrets it is given.")],
    pool: Annotated[str | None, typer.Option(help="Only from this pool.")] = None,
    request: Annotated[
        list[str] | None, typer.Option(help="A resource that the Pod has at least, e.g. cpu=500m; may be repeated.")
    ] = None,
    secret: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME of an environment variable whose value is given as a secret of that name; may be repeated."
        ),
    ] = None,
    key: Annotated[str | None, typer.Option(help="The same key gives the same runtime.")] = None,
    as_json: Json = False,
) -> None:
    """Take a warm Pod that fits, with the user's secrets; without one, have a Pod made.

    Example: TOKEN=… orca-infra runtimes launch python-simple-env --user jane --secret TOKEN
    """
    from orca_infra.cli import open_for_command, print_json
    from orca_infra.runtimes.launch import LaunchRequest, launch

    secrets = {}
    for name in secret or []:
        if name not in os.environ:
            raise UserError(f"--secret {name}: there is no such environment variable (a value is never an argument)")
        secrets[name] = os.environ[name]
    requests = dict(_pair(text) for text in request) if request else None
    surroundings = open_for_command()
    hands = launch_hands(surroundings)
    made = launch(
        hands,
        LaunchRequest(
            environment=environment, user=user, pool=pool, requests=requests, secrets=secrets, idempotency_key=key
        ),
    )
    if as_json:
        print_json(asdict(made))
    else:
        kind = "warm" if made.warm else "cold: its Pod is being made"
        until = f", until {made.expires_at:%F %T %Z}" if made.expires_at else ""
        print(f"{made.id}  {made.namespace}/{made.pod}  {kind}{until}")
    _close(surroundings, hands)


@runtimes_app.command("list")
def runtimes_list(
    user: Annotated[str | None, typer.Option(help="Only this user's.")] = None, as_json: Json = False
) -> None:
    """Show the runtimes that live."""
    from orca_infra.cli import open_for_command, print_json
    from orca_infra.runtimes.living import list_runtimes
    from orca_infra.screen import rows_for_people

    surroundings = open_for_command()
    runtimes = list_runtimes(surroundings.database, user)
    if as_json:
        print_json([asdict(runtime) for runtime in runtimes])
    else:
        rows_for_people(
            ("runtime", "user", "environment", "pod", "ready", "expires"),
            [
                (r.id, r.user, r.environment, r.pod, r.problem or bool(r.ready_at), r.expires_at or "never")
                for r in runtimes
            ],
            "no runtimes live",
        )
    surroundings.close()


@runtimes_app.command("stop")
def runtimes_stop(runtime: Annotated[str, typer.Argument(help="Its id.")]) -> None:
    """Stop a runtime: its Pod and its Secret go, and it burns no credits from now on."""
    from orca_infra.cli import open_for_command
    from orca_infra.runtimes.living import end_runtime

    try:
        wanted = UUID(runtime)
    except ValueError:
        raise UserError(f"{runtime!r} is not a runtime's id; `orca-infra runtimes list` shows them") from None
    surroundings = open_for_command()
    hands = launch_hands(surroundings)
    stopped = end_runtime(hands, wanted)
    _close(surroundings, hands)
    if not stopped:
        raise UserError(f"no runtime {wanted} lives; `orca-infra runtimes list` shows those that do")
    print(f"stopped {wanted}")


def launch_hands(surroundings: Surroundings) -> LaunchHands:
    """What a launch works with. Raises UserError when no namespace for runtimes is set, SetupError without a cluster."""
    from orca_infra.kube.client import Kube
    from orca_infra.log import make_log
    from orca_infra.runtimes.launch import LaunchHands

    settings = surroundings.settings
    if settings.runtimes_namespace is None:
        raise UserError("ORCA_RUNTIMES_NAMESPACE is not set: it names the namespace of the runtime pools")
    return LaunchHands(
        database=surroundings.database,
        kube=Kube.connect(kubeconfig=settings.kubeconfig),
        namespace=settings.runtimes_namespace,
        stack_id=surroundings.stack_id,
        log=make_log(form=os.environ.get("ORCA_LOG") or None),
    )


def _close(surroundings: Surroundings, hands: LaunchHands) -> None:
    hands.kube.close()
    surroundings.close()


def _pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name or not value:
        raise UserError(f"--request {text}: must be NAME=QUANTITY, e.g. cpu=500m")
    return name, value
