"""The commands about runtimes."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer

from orca_infra.cli.command import Json, open_for_command, print_json
from orca_infra.errors import UserError

if TYPE_CHECKING:
    from orca_infra.runtimes.launch import LaunchHands
    from orca_infra.surroundings import Surroundings

runtimes_app = typer.Typer(
    help="Runtimes: take a warm Pod, list, extend, stop, and what they cost (ORCA_RUNTIMES_NAMESPACE).",
    no_args_is_help=True,
)


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
    from orca_infra.runtimes.launch import LaunchRequest, launch
    from orca_infra.runtimes.touch import TOUCHES

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
        where = f"  {made.address}" if made.address else ""
        print(f"{made.id}  {made.namespace}/{made.pod}{where}  {kind}{until}", flush=True)
    TOUCHES.finish()
    _close(surroundings, hands)


@runtimes_app.command("list")
def runtimes_list(
    user: Annotated[str | None, typer.Option(help="Only this user's.")] = None, as_json: Json = False
) -> None:
    """Show the runtimes that live.

    Example: orca-infra runtimes list --user jane
    """
    from orca_infra.runtimes.living import list_runtimes
    from orca_infra.screen import rows_for_people

    surroundings = open_for_command()
    runtimes = list_runtimes(surroundings.database, user)
    if as_json:
        print_json([asdict(runtime) for runtime in runtimes])
    else:
        rows_for_people(
            ("runtime", "user", "environment", "pod", "state", "expires", "credits", "why"),
            [
                (
                    *(r.id, r.user, r.environment, r.pod, r.state, r.expires_at or "never", f"{r.credits:.4f}"),
                    r.ending_detail or r.refused or r.problem,
                )
                for r in runtimes
            ],
            "no runtimes live",
        )
    surroundings.close()


@runtimes_app.command("stop")
def runtimes_stop(runtime: Annotated[str, typer.Argument(help="Its id.")]) -> None:
    """Stop a runtime: its Pod and its Secret go, and it burns no credits from now on.

    Example: orca-infra runtimes stop 6f1c0a52-3a0e-4c39-9d0f-0b4c1d2e3f40
    """
    from orca_infra.runtimes.living import end_runtime

    wanted = _runtime_id(runtime)
    surroundings = open_for_command()
    hands = launch_hands(surroundings)
    stopped = end_runtime(hands, wanted)
    _close(surroundings, hands)
    if not stopped:
        raise UserError(f"no runtime {wanted} lives; `orca-infra runtimes list` shows those that do")
    print(f"stopped {wanted}")


@runtimes_app.command("extend")
def runtimes_extend(
    runtime: Annotated[str, typer.Argument(help="Its id.")],
    seconds: Annotated[str, typer.Option("--for", help="How long from now on: seconds, or text such as 2h.")],
) -> None:
    """Have a runtime live at least so long from now on; never shorter than before.

    Example: orca-infra runtimes extend 6f1c0a52-3a0e-4c39-9d0f-0b4c1d2e3f40 --for 2h
    """
    from orca_infra.quantity import seconds_of
    from orca_infra.runtimes.living import extend_runtime

    wanted = _runtime_id(runtime)
    try:
        more = seconds_of(seconds)
    except ValueError as error:
        raise UserError(f"--for {seconds}: {error}") from None
    surroundings = open_for_command()
    hands = launch_hands(surroundings)
    extended = extend_runtime(hands, wanted, more)
    _close(surroundings, hands)
    if extended is None:
        raise UserError(f"no runtime {wanted} lives; `orca-infra runtimes list` shows those that do")
    print(f"{wanted} lives until {extended.expires_at or 'it is stopped'}")


@runtimes_app.command("usage")
def runtimes_usage(user: Annotated[str, typer.Option(help="Whose.")], as_json: Json = False) -> None:
    """Show what a user's runtimes have cost: exactly where they have ended, up to now where they run.

    Example: orca-infra runtimes usage --user jane
    """
    from orca_infra.runtimes.living import read_usage
    from orca_infra.screen import rows_for_people

    surroundings = open_for_command()
    lines = read_usage(surroundings.database, user)
    credits_sum = sum(line.credits for line in lines)
    if as_json:
        print_json({"user": user, "credits": credits_sum, "runtimes": [asdict(line) for line in lines]})
    else:
        rows_for_people(
            ("runtime", "environment", "pool", "from", "until", "seconds", "a second", "credits", "reason"),
            [
                (
                    *(line.runtime, line.environment, line.pool or "none", line.assigned_at),
                    *(line.ended_at or "now", f"{line.seconds:.1f}", f"{line.burning_rate:g}", f"{line.credits:.4f}"),
                    line.reason,
                )
                for line in lines
            ],
            f"{user} had no runtimes",
        )
        print(f"{credits_sum:.4f} credits, {sum(line.ended_at is None for line in lines)} running")
    surroundings.close()


@runtimes_app.command("serve")
def runtimes_serve(
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="On which port.", min=1, max=65535)] = 8470,
    certificate: Annotated[
        Path | None, typer.Option(help="A file: serve TLS with it. Else something before it has to.")
    ] = None,
    key: Annotated[Path | None, typer.Option(help="The certificate's key.")] = None,
) -> None:
    """Serve runtimes over HTTP: launch, look, list, extend, stop, usage. Any number of such processes may run.

    Tokens are the cluster's own, or from the file that ORCA_RUNTIMES_TOKENS names.

    Example: orca-infra runtimes serve --host 0.0.0.0 --certificate tls.crt --key tls.key
    """
    from orca_infra.runtimes.callers import Callers, FileTokens, ReviewedTokens
    from orca_infra.runtimes.serve import serve

    surroundings = open_for_command()
    hands = launch_hands(surroundings)
    settings = surroundings.settings
    callers: Callers
    if settings.runtimes_tokens is not None:
        callers = FileTokens(settings.runtimes_tokens, settings.runtimes_launchers)
    else:
        callers = ReviewedTokens(hands.kube, settings.runtimes_launchers, audience=settings.runtimes_audience)
    try:
        serve(hands, callers, host=host, port=port, certificate=certificate, key=key)
    finally:
        _close(surroundings, hands)


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
        log=make_log(form=settings.log_form),
        allowed=settings.allowed,
    )


def _close(surroundings: Surroundings, hands: LaunchHands) -> None:
    hands.kube.close()
    surroundings.close()


def _runtime_id(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise UserError(f"{text!r} is not a runtime's id; `orca-infra runtimes list` shows them") from None


def _pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name or not value:
        raise UserError(f"--request {text}: must be NAME=QUANTITY, e.g. cpu=500m")
    return name, value
