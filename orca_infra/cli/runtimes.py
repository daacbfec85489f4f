"""The commands about runtimes."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer

from orca_infra.cli.command import Json, open_for_command, print_json
from orca_infra.errors import OrcaError, Refused, UserError

if TYPE_CHECKING:
    from orca_infra.db.connection import Database
    from orca_infra.runtimes.launch import LaunchHands
    from orca_infra.runtimes.living import Runtime
    from orca_infra.surroundings import Surroundings

runtimes_app = typer.Typer(
    help="Runtimes: take a warm Pod, list, extend, stop, and what they cost (ORCA_RUNTIMES_NAMESPACE).",
    no_args_is_help=True,
)

RuntimeId = Annotated[str, typer.Argument(help="Its id, or how that begins.")]


@runtimes_app.command("launch")
def runtimes_launch(  # noqa: PLR0917  (options, as typer reads them)
    environment: Annotated[str, typer.Argument(help="The RuntimeEnvironment, by name.")],
    user: Annotated[str, typer.Option(help="For whom, and whose secrets it is given.")],
    pool: Annotated[str | None, typer.Option(help="Only from this pool.")] = None,
    request: Annotated[
        list[str] | None, typer.Option(help="A resource that the Pod has at least, e.g. cpu=500m; may be repeated.")
    ] = None,
    node_selector: Annotated[
        list[str] | None,
        typer.Option(help="A label of the node, e.g. disk=ssd; may be repeated. Left out: whatever the pool has."),
    ] = None,
    secret: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME of an environment variable whose value is given as a secret of that name; may be repeated."
        ),
    ] = None,
    key: Annotated[str | None, typer.Option(help="The same key gives the same runtime.")] = None,
    wait: Annotated[
        str,
        typer.Option(help="How long to wait until it is ready: seconds, or text such as 2m. Not ready then: exit 1."),
    ] = "0",
    as_json: Json = False,
) -> None:
    """Take a warm Pod that fits, with the user's secrets; without one, have a Pod made.

    Example: TOKEN=… orca-infra runtimes launch python-simple-env --user jane --secret TOKEN --wait 2m
    """
    from orca_infra.runtimes.launch import LaunchRequest, launch
    from orca_infra.runtimes.living import wait_for_runtime
    from orca_infra.runtimes.touch import TOUCHES

    wait_seconds = _seconds("--wait", wait)
    asked = LaunchRequest(
        environment=environment,
        user=user,
        pool=pool,
        requests=_pairs("--request", request, "cpu=500m"),
        node_selector=_pairs("--node-selector", node_selector, "disk=ssd"),
        secrets=_secrets_of(secret or ()),
        idempotency_key=key,
    )
    with _hands() as hands:
        made = launch(hands, asked)
        found = wait_for_runtime(hands.database, made.id, wait_seconds)
        if as_json:
            print_json({**asdict(made), **(_shown(found) if found else {})})
        elif found is not None:
            _print(found)
        sys.stdout.flush()  # nobody waits for what only hastens
        TOUCHES.finish()
    if wait_seconds and found is not None and found.state != "ready":
        raise OrcaError(f"runtime {made.id} is not ready after --wait {wait}; it is {found.state}")


@runtimes_app.command("list")
def runtimes_list(
    user: Annotated[str | None, typer.Option(help="Only this user's.")] = None, as_json: Json = False
) -> None:
    """Show the runtimes that live.

    Example: orca-infra runtimes list --user jane
    """
    from orca_infra.runtimes.living import list_runtimes
    from orca_infra.screen import is_narrow, rows_for_people, say

    surroundings = open_for_command()
    runtimes = list_runtimes(surroundings.database, user)
    surroundings.close()
    if as_json:
        print_json([_shown(runtime) for runtime in runtimes])
        return
    pods = () if is_narrow() else ("pod",)
    rows_for_people(
        ("runtime", "user", "environment", *pods, "state", "expires (UTC)", "credits"),
        [
            (
                *(_short(r.id), r.user, r.environment, *((r.pod,) if pods else ())),
                *(r.state, f"{r.expires_at.astimezone(UTC):%F %H:%M}" if r.expires_at else "never", f"{r.credits:.4f}"),
            )
            for r in runtimes
        ],
        "no runtimes live",
        unbroken=("runtime", "pod", "state", "expires (UTC)", "credits"),
    )
    for runtime in runtimes:
        if runtime.message:
            say(f"{_short(runtime.id)} {runtime.state}: {runtime.message}")


@runtimes_app.command("show")
def runtimes_show(runtime: RuntimeId, as_json: Json = False) -> None:
    """Show a runtime, also for a while after its end.

    Example: orca-infra runtimes show 6f1c0a52
    """
    from orca_infra.runtimes.living import find_runtime

    surroundings = open_for_command()
    found = find_runtime(surroundings.database, _runtime_id(surroundings.database, runtime, ended=True))
    surroundings.close()
    if found is None:
        raise UserError(f"there is no runtime {runtime}; `orca-infra runtimes list` shows those that live")
    if as_json:
        print_json(_shown(found))
    else:
        _print(found)


@runtimes_app.command("stop")
def runtimes_stop(runtime: RuntimeId) -> None:
    """Stop a runtime: its Pod and its Secret go, and it burns no credits from now on.

    Example: orca-infra runtimes stop 6f1c0a52
    """
    from orca_infra.runtimes.living import end_runtime

    with _hands() as hands:
        wanted = _runtime_id(hands.database, runtime)
        if not end_runtime(hands, wanted):
            raise _none_lives(runtime)
    print(f"stopped {wanted}")


@runtimes_app.command("extend")
def runtimes_extend(
    runtime: RuntimeId,
    seconds: Annotated[str, typer.Option("--for", help="How long from now on: seconds, or text such as 2h.")],
) -> None:
    """Have a runtime live at least so long from now on; never shorter than before.

    Example: orca-infra runtimes extend 6f1c0a52 --for 2h
    """
    from orca_infra.runtimes.living import extend_runtime

    more = _seconds("--for", seconds)
    with _hands() as hands:
        wanted = _runtime_id(hands.database, runtime)
        extended = extend_runtime(hands, wanted, more)
    if extended is None:
        raise _none_lives(runtime)
    print(f"{wanted} lives until {_moment(extended.expires_at) or 'it is stopped'}")


@runtimes_app.command("usage")
def runtimes_usage(user: Annotated[str, typer.Option(help="Whose.")], as_json: Json = False) -> None:
    """Show what a user's runtimes have cost: exactly where they have ended, up to now where they run.

    Example: orca-infra runtimes usage --user jane
    """
    from orca_infra.runtimes.living import read_usage
    from orca_infra.screen import is_narrow, rows_for_people

    surroundings = open_for_command()
    lines = read_usage(surroundings.database, user)
    surroundings.close()
    credits_sum = sum(line.credits for line in lines)
    if as_json:
        print_json({"user": user, "credits": credits_sum, "runtimes": [asdict(line) for line in lines]})
        return
    wide = not is_narrow()
    rows_for_people(
        ("runtime", "environment", *(("pool", "rate") if wide else ()), "from (UTC)", "seconds", "credits", "end"),
        [
            (
                *(_short(line.runtime), line.environment),
                *((line.pool or "none", f"{line.burning_rate:g}") if wide else ()),
                *(f"{line.assigned_at.astimezone(UTC):%F %H:%M}", f"{line.seconds:.1f}", f"{line.credits:.4f}"),
                line.reason or "it runs",
            )
            for line in lines
        ],
        f"{user} had no runtimes",
        unbroken=("runtime", "from (UTC)", "seconds", "credits", "end"),
    )
    print(f"{credits_sum:.4f} credits, {sum(line.ended_at is None for line in lines)} running")


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


def launch_hands(surroundings: Surroundings, *, warnings_only: bool = False) -> LaunchHands:
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
        log=make_log(form=settings.log_form, warnings_only=warnings_only),
        allowed=settings.allowed,
    )


@contextmanager
def _hands() -> Iterator[LaunchHands]:
    """What a command launches, stops and extends with. What is refused is something that its caller has to mend."""
    surroundings = open_for_command()
    hands = launch_hands(surroundings, warnings_only=True)
    try:
        yield hands
    except Refused as error:
        raise UserError(str(error)) from error
    finally:
        _close(surroundings, hands)


def _close(surroundings: Surroundings, hands: LaunchHands) -> None:
    hands.kube.close()
    surroundings.close()


def _runtime_id(database: Database, text: str, *, ended: bool = False) -> UUID:
    """The runtime whose id this is, or begins so. Raises UserError when there is none, or more than one."""
    from orca_infra.runtimes.living import find_ids

    try:
        return UUID(text)
    except ValueError:
        pass
    if not re.fullmatch(r"[0-9a-f-]{4,36}", text.lower(), re.ASCII):
        raise UserError(f"{text!r} is not a runtime's id; `orca-infra runtimes list` shows them")
    found = find_ids(database, text.lower(), ended=ended)
    if len(found) > 1:
        raise UserError(f"more than one runtime's id begins with {text}; write more of it")
    if not found:
        raise _none_lives(text) if not ended else UserError(f"there is no runtime whose id begins with {text}")
    return found[0]


def _none_lives(text: str) -> UserError:
    return UserError(f"no runtime {text} lives; `orca-infra runtimes list` shows those that do")


def _short(id_: UUID) -> str:
    """So much of an id as a table has room for, which commands take as well."""
    from orca_infra.screen import is_narrow

    return str(id_)[:8] if is_narrow() else str(id_)


def _shown(runtime: Runtime) -> dict[str, object]:
    return {**asdict(runtime), "state": runtime.state, "message": runtime.message}


def _print(runtime: Runtime) -> None:
    """A runtime for people, its id first."""
    from orca_infra.screen import say

    kind = "warm" if runtime.warm else "cold: a Pod of its own"
    rows = {
        "user": runtime.user,
        "environment": f"{runtime.environment}, from pool {runtime.pool}" if runtime.pool else runtime.environment,
        "pod": f"{runtime.namespace}/{runtime.pod}",
        "address": runtime.address,
        "start": kind,
        "state": ": ".join(filter(None, (runtime.state, runtime.message))),
        "launched": _moment(runtime.assigned_at),
        "expires": _moment(runtime.expires_at) or "never",
        "ended": _moment(runtime.ended_at),
        "credits": f"{runtime.credits:.4f}, {runtime.burning_rate:g} a second",
    }
    say(str(runtime.id))
    for name, value in rows.items():
        if value:
            say(f"  {name:<12} {value}")
    if runtime.state == "starting":
        say(f"`orca-infra runtimes show {runtime.id}` says when it is ready")


def _moment(moment: datetime | None) -> str:
    return f"{moment.astimezone(UTC):%F %T} UTC" if moment is not None else ""


def _seconds(option: str, text: str) -> float:
    from orca_infra.quantity import seconds_of

    try:
        return seconds_of(text)
    except ValueError as error:
        raise UserError(f"{option} {text}: {error}") from None


def _secrets_of(names: Iterable[str]) -> dict[str, str]:
    secrets = {}
    for name in names:
        if name not in os.environ:
            raise UserError(f"--secret {name}: there is no such environment variable (a value is never an argument)")
        secrets[name] = os.environ[name]
    return secrets


def _pairs(option: str, texts: Sequence[str] | None, example: str) -> dict[str, str] | None:
    """NAME=VALUE each; None when there are none."""
    pairs: dict[str, str] = {}
    for text in texts or ():
        name, sign, value = text.partition("=")
        if not sign or not name or not value:
            raise UserError(f"{option} {text}: must be NAME=VALUE, e.g. {example}")
        if name in pairs:
            raise UserError(f"{option} {text}: {name} was given before, as {pairs[name]}")
        pairs[name] = value
    return pairs or None
