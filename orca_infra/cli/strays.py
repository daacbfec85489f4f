"""The commands about what carries this stack's identity and nobody owns."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orca_infra.cli.command import EXIT_FAILED, Json, open_for_command, plain, print_json

if TYPE_CHECKING:
    from orca_infra.surroundings import Surroundings

strays_app = typer.Typer(help="What carries this stack's identity and nobody owns.", no_args_is_help=False)


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
        print(plain(f"{machine.name}  {machine.type} in {machine.location}, made {made}, uid {machine.uid}"))
    for stray in objects:
        made = f"{stray.created_at:%F %T}"
        print(plain(f"{stray.kind} {stray.namespace}/{stray.name}, made {made}, uid {stray.uid}"))
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
