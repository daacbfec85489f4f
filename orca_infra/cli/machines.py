"""The commands about machines: list, drain and logs, and the pause of pools."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from orca_infra.cli.command import Json, open_for_command, print_json
from orca_infra.errors import UserError
from orca_infra.printable import printable

if TYPE_CHECKING:
    from orca_infra.surroundings import Surroundings

machines_app = typer.Typer(help="Worker machines: list them, drain one, read what it says.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="The machine, as `orca-infra machines list` shows it.")]


def _pool_names(begun: str) -> list[str]:
    """Complete a pool's name from orca.toml. What is wrong there is said by `orca-infra check`, not while one types."""
    from orca_infra.config import load_config
    from orca_infra.settings import read_settings

    try:
        pools = load_config(read_settings(os.environ).config_path).pools
    except UserError:
        return []
    return [pool.name for pool in pools if pool.name.startswith(begun)]


PoolName = Annotated[
    str | None, typer.Argument(help="The pool; all pools when it is left off.", autocompletion=_pool_names)
]


def register(app: typer.Typer, *, looking: str, steering: str) -> None:
    """Add these commands to the program's, under its headings."""
    app.add_typer(machines_app, name="machines", rich_help_panel=looking)
    app.command("pause", rich_help_panel=steering)(pause)
    app.command("resume", rich_help_panel=steering)(resume)


@machines_app.command("list")
def machines_list(
    as_json: Json = False,
    all_rows: Annotated[bool, typer.Option("--all", help="Those that ended, too, the newest 100.")] = False,
) -> None:
    """Show every machine with its state: making, booting, idle, busy, draining or removing.

    Example: orca-infra machines list --all
    """
    from orca_infra.screen import is_narrow, kind_of, rows_for_people
    from orca_infra.status import read_machines

    surroundings = open_for_command()
    live, ended, now = read_machines(surroundings, ended_limit=100 if all_rows else 0)
    if as_json:
        print_json({"machines": live, "ended": ended})
    else:
        uid = () if is_narrow() else ("uid",)
        rows_for_people(
            ("machine", "pool", "type", "location", "state", "runs", "age", "heard", *uid),
            [
                (
                    row["name"],
                    row["pool"],
                    kind_of(row),
                    row["location"],
                    row["state"],
                    f"{row['running']}/{row['slots']}",
                    now - row["created_at"],
                    now - row["seen_at"] if row["seen_at"] else "-",
                    *((row["uid"] or "-",) if uid else ()),
                )
                for row in live
            ],
            "no machines",
            unbroken=("machine",),
        )
        rows_for_people(
            ("ended", "pool", "type", "location", "ago", "reason"),
            [
                (row["name"], row["pool"], kind_of(row), row["location"], now - row["ended_at"], row["reason"])
                for row in ended
            ],
            "",
            unbroken=("ended",),
        )
    surroundings.close()


@machines_app.command("drain")
def machines_drain(
    name: Name,
    at_once: Annotated[
        bool, typer.Option("--now", help="Do not wait for its runs: they are queued again, and it goes.")
    ] = False,
) -> None:
    """Have a machine take no more runs and go once it is idle; the loop does it, also while its pool is paused.

    With demand left, the pool makes another in its place.

    Example: orca-infra machines drain orca-gpu-7
    """
    from orca_infra.machines.observe import SQL

    surroundings = open_for_command()
    with surroundings.database.transaction() as transaction:
        drained = transaction.run(SQL["drain"], {"name": name, "at_once": at_once})
    if not drained:
        raise UserError(f"there is no machine {name}; `orca-infra machines list` shows those that there are")
    _wake(surroundings)
    when = "at once; what runs there is queued again" if at_once else "once it is idle; it takes no more runs"
    print(f"{name} goes {when}")
    surroundings.close()


@machines_app.command("logs")
def machines_logs(name: Name) -> None:
    """Print the end of what a machine's serial console said; for one that never came up, what was saved of it.

    Example: orca-infra machines logs orca-gpu-7
    """
    from orca_infra.loop.configuration import LiveConfig
    from orca_infra.loop.passes import make_providers
    from orca_infra.machines.consoles import console_path
    from orca_infra.machines.observe import SQL

    surroundings = open_for_command()
    config = LiveConfig(surroundings.settings.config_path).config
    with surroundings.database.snapshot() as transaction:
        rows = transaction.dicts(SQL["machines_named"], {"names": [name]})
    if not rows:
        raise UserError(f"there is no machine {name}; `orca-infra machines list --all` shows those that there were")
    provider = make_providers(surroundings, config).get(rows[0]["provider"])
    saved = console_path(surroundings.logs_folder, name)
    said = provider.console(name, rows[0]["location"]) if provider and rows[0]["ended_at"] is None else ""
    if not said and saved.is_file():
        said = saved.read_text(encoding="utf-8", errors="replace")
    if not said:
        raise UserError(f"{name} said nothing that is kept: a machine that ended has its log only if it never came up")
    print(printable(said, keep="\n\t"), end="" if said.endswith("\n") else "\n")
    surroundings.close()


def pause(pool: PoolName = None) -> None:
    """Make no machine and remove none for being idle, in one pool or in all, until `orca-infra resume`.

    What runs goes on. What is lost, preempted, stopped, never came up, or is drained still goes.

    Example: orca-infra pause gpu
    """
    from orca_infra.machines.model import EVERY_POOL
    from orca_infra.machines.observe import SQL

    surroundings = open_for_command()
    if pool is not None:
        _check_known(pool, surroundings)
    with surroundings.database.transaction() as transaction:
        transaction.run(SQL["pause"], {"pool": EVERY_POOL if pool is None else pool})
    _wake(surroundings)
    print(f"paused: {_whom(pool)}; `orca-infra resume{f' {shlex.quote(pool)}' if pool else ''}` ends it")
    surroundings.close()


def resume(pool: PoolName = None) -> None:
    """End the pause of one pool; without a pool, every pause.

    While all pools are paused, one of them alone cannot be resumed.

    Example: orca-infra resume gpu
    """
    from orca_infra.machines.model import EVERY_POOL
    from orca_infra.machines.observe import SQL

    surroundings = open_for_command()
    if pool is not None:
        _check_known(pool, surroundings)
    with surroundings.database.transaction() as transaction:
        paused = {row["pool"] for row in transaction.dicts(SQL["paused"])}
        if pool is not None and EVERY_POOL in paused:
            raise UserError(
                "all pools are paused: `orca-infra resume` ends that, then `orca-infra pause POOL` the others"
            )
        ended = transaction.run(SQL["resume"], {"pool": EVERY_POOL if pool is None else pool})
    _wake(surroundings)
    print(f"resumed: {_whom(pool)}" if ended else f"not paused: {_whom(pool)}")
    surroundings.close()


def _whom(pool: str | None) -> str:
    return "all pools" if pool is None else f"pool {pool}"


def _check_known(pool: str, surroundings: Surroundings) -> None:
    """Raises UserError for a pool that neither the database nor orca.toml knows: a slip would pause nothing, unseen.

    The file is read only for a pool that no pass has seen: a brake has to work while the file is bad.
    """
    from orca_infra.config import load_config
    from orca_infra.machines.observe import SQL

    with surroundings.database.snapshot() as transaction:
        known = {row["pool"] for row in transaction.dicts(SQL["progress"])}
    if pool in known:
        return
    known |= {one.name for one in load_config(surroundings.settings.config_path).pools}
    if pool not in known:
        raise UserError(f'there is no pool "{pool}"; there are {", ".join(sorted(known)) or "none"}')


def _wake(surroundings: Surroundings) -> None:
    """Have a loop that runs make its next pass now."""
    with surroundings.database.transaction() as transaction:
        transaction.run("select pg_notify('orca_demand', '')")
