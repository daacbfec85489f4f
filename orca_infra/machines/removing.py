"""Delete machines: through the engine what the stack owns, through its provider what the state has lost.

The engine deletes by name. So each machine is asked for first, and of one that is gone, whose name may be another's by now,
the state only forgets that it was there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from orca_infra.errors import NotLeader, OrcaError, Transient
from orca_infra.machines.hands import MachineHands
from orca_infra.machines.model import SeenMachine
from orca_infra.machines.observe import SQL, machine_stack

Row = Mapping[str, Any]


def destroy_names(pool: str, names: Sequence[str], hands: MachineHands) -> set[str]:
    """Delete these machines; gives those that are left, for a later pass.

    Raises NotLeader, and Transient when the database is away.
    """
    stack = machine_stack(hands.family, pool)
    with hands.database.snapshot() as transaction:
        owned = {row["name"]: row for row in transaction.dicts(SQL["owned_of_stack"], {"stack": stack})}
        rows = {row["name"]: row for row in transaction.dicts(SQL["machines_named"], {"names": [*names]})}
    left: set[str] = set()
    there: list[str] = []
    gone: list[str] = []
    for name in names:
        if name not in rows:  # its stack alone knows it
            there.append(name)
            continue
        try:
            machine = _look_up(rows[name], owned.get(name), hands)
            if name in owned:
                (there if machine else gone).append(name)
            elif machine is not None:
                hands.providers[rows[name]["provider"]].delete(machine)
        except OrcaError as error:
            left.add(name)
            hands.log.warning("machine not deleted yet", machine=name, said=str(error))
    for operate, group in ((hands.engine.destroy, there), (hands.engine.forget, gone)):
        urns = {name: owned[name]["urn"] for name in group if name in owned}
        if urns:
            left |= _operate(operate, stack, urns, hands)
    return left


def _look_up(row: Row, owned: Row | None, hands: MachineHands) -> SeenMachine | None:
    """This very machine, or None when it is gone.

    Raises Transient when that is not known: a young one may not be shown yet, as clouds' reads lag behind their writes.
    """
    provider = hands.providers.get(row["provider"])
    if provider is None:
        raise Transient(
            f"there is no provider {row['provider']}; [{row['provider']}] of orca.toml has to outlive the machines"
        )
    machine = provider.get(row["name"], row["location"])
    if machine is None and row["age_seconds"] < hands.grace_seconds:
        raise Transient("it is not shown, and too young to be taken for gone")
    uid = row["uid"] or (owned["uid"] if owned else None)
    return machine if machine is not None and machine.uid == uid else None


def _operate(operate: Callable[..., object], stack: str, urns: Mapping[str, str], hands: MachineHands) -> set[str]:
    """Destroy or forget; gives the machines that the stack still owns.

    What a failed operation did all the same is stored. Of one whose end is not known all are left, until it is settled.
    """
    try:
        operate(stack, targets=tuple(urns.values()))
    except NotLeader:
        raise
    except OrcaError as error:
        with hands.database.snapshot() as transaction:
            left = {row["name"] for row in transaction.dicts(SQL["owned_of_stack"], {"stack": stack})} & urns.keys()
        hands.log.warning("machines not deleted yet", pulumi_stack=stack, left=sorted(left), said=str(error))
        return left
    return set()
