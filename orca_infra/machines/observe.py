"""Read what the machine pools' decision needs. Nothing is decided here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from orca_infra.db.connection import Database, Transaction, load_queries
from orca_infra.errors import OrcaError
from orca_infra.machines.model import Demand, MachineRow, Pool, Progress, Refusal, SeenMachine, Snapshot
from orca_infra.machines.providers.port import MachineProvider
from orca_infra.machines.registry import ImageArchitectures, unknown_architectures
from orca_infra.names import derived_stack

SQL = load_queries("machines")
#: How many machines that a list lacks are asked for by name in one pass; the rest wait for the next.
ASKED_BY_NAME_MAX = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _DemandRow:
    pool: str
    aged: int
    waiting: int
    next_due_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _ProgressRow:
    pool: str
    last_number: int
    trying_type: str | None
    trying_since: datetime | None
    tried_at: datetime | None
    last_attempt: str


def machine_stack(family: str, pool: str) -> str:
    """The stack that owns a pool's machines."""
    return derived_stack(family, "machines", pool)


def observe(
    database: Database,
    providers: Mapping[str, MachineProvider],
    *,
    family: str,
    stack_id: str,
    grow_after_seconds: float,
    stray_grace_seconds: float,
    hearing_since: datetime | None,
    held: Mapping[str, str],
    pools: Sequence[Pool] = (),
    images: ImageArchitectures = unknown_architectures,
) -> Snapshot:
    """One consistent snapshot.

    The providers are listed first: what they show and no later row explains is really nobody's. A provider that cannot be
    read is noted and never taken for empty; so is one that `pools` name and that does not exist. What a worker image has
    variants for (`images`) is asked for pools with demand only.

    Raises Transient when the database cannot be read.
    """
    seen, unreadable = _list(providers)
    with database.snapshot() as transaction:
        now: datetime = transaction.value(SQL["now"])
        machines = tuple(transaction.rows(MachineRow, SQL["live_machines"]))
        demand = _demand(transaction, grow_after_seconds)
        progress = _progress(transaction)
        owned = _owned(transaction, family)
        paused = frozenset(row["pool"] for row in transaction.dicts(SQL["paused"]))
        refusals = tuple(transaction.rows(Refusal, SQL["refusals"]))
        ended = transaction.dicts(SQL["ended_lately"], {"seconds": stray_grace_seconds})
        hearing_since = hearing_since or transaction.value(SQL["hearing_since"])
    for name in {row.provider for row in machines}.union(pool.provider for pool in pools) - providers.keys():
        unreadable[name] = f"provider {name} does not exist in this version"
    asking = [pool for pool in pools if demand.get(pool.name) and pool.provider in providers]
    architectures = {name: providers[name].architectures() for name in {pool.provider for pool in asking}}
    # Where a provider states nothing, as with machines that are processes here, the image's variants decide nothing.
    stated = [pool for pool in asking if architectures[pool.provider]]
    gone, asked = _ask_by_name(machines, seen, providers, unreadable)
    return Snapshot(
        now=now,
        stack_id=stack_id,
        hearing_since=hearing_since or now,
        demand=demand,
        progress=progress,
        machines=machines,
        seen=tuple(seen + asked),
        gone=gone,
        owned={
            pool: owned.get(machine_stack(family, pool), frozenset())
            for pool in _pools_of(owned, machines, progress, family)
        },
        held=held,
        unreadable=unreadable,
        paused=paused,
        refusals=refusals,
        ended_lately=frozenset((row["name"], row["uid"]) for row in ended),
        type_architectures=architectures,
        image_architectures=_image_architectures(stated, images),
    )


def _list(providers: Mapping[str, MachineProvider]) -> tuple[list[tuple[str, SeenMachine]], dict[str, str]]:
    """What there is, each with its provider's name; and by provider why it could not be read."""
    seen: list[tuple[str, SeenMachine]] = []
    unreadable: dict[str, str] = {}
    for name, provider in providers.items():
        try:
            seen += [(name, machine) for machine in provider.list()]
        except OrcaError as error:
            unreadable[name] = f"provider {name} could not be read: {error}"
    return seen, unreadable


def _image_architectures(pools: Sequence[Pool], images: ImageArchitectures) -> dict[str, frozenset[str]]:
    """What is known of the pools' images; a registry that cannot be asked keeps no machine from being made."""
    known: dict[str, frozenset[str]] = {}
    for image in dict.fromkeys(pool.image for pool in pools):
        try:
            variants = images(image)
        except OrcaError:
            continue
        if variants is not None:
            known[image] = variants
    return known


def _demand(transaction: Transaction, grow_after_seconds: float) -> dict[str, Demand]:
    rows = transaction.rows(_DemandRow, SQL["demand"], {"grow_after": grow_after_seconds})
    return {row.pool: Demand(aged=row.aged, waiting=row.waiting, next_due_at=row.next_due_at) for row in rows}


def _progress(transaction: Transaction) -> dict[str, Progress]:
    return {
        row.pool: Progress(
            last_number=row.last_number,
            trying_type=row.trying_type,
            trying_since=row.trying_since,
            tried_at=row.tried_at,
            last_attempt=row.last_attempt,
        )
        for row in transaction.rows(_ProgressRow, SQL["progress"])
    }


def _owned(transaction: Transaction, family: str) -> dict[str, frozenset[str]]:
    owned: dict[str, set[str]] = {}
    pattern = derived_stack(family, "machines", "x").removesuffix("x").replace("_", r"\_") + "%"
    for row in transaction.dicts(SQL["owned_machines"], {"pattern": pattern}):
        owned.setdefault(row["stack"], set()).add(row["name"])
    return {stack: frozenset(names) for stack, names in owned.items()}


def _pools_of(
    owned: Mapping[str, frozenset[str]],
    machines: tuple[MachineRow, ...],
    progress: Mapping[str, Progress],
    family: str,
) -> list[str]:
    """Every pool that has, or ever had, machines here."""
    known = dict.fromkeys([*progress, *(row.pool for row in machines)])
    return [pool for pool in known if machine_stack(family, pool) in owned]


def _ask_by_name(
    machines: tuple[MachineRow, ...],
    seen: list[tuple[str, SeenMachine]],
    providers: Mapping[str, MachineProvider],
    unreadable: dict[str, str],
) -> tuple[frozenset[str], list[tuple[str, SeenMachine]]]:
    """Ask for confirmed machines that no list shows: lists lag, and labels get lost."""
    listed = {(provider, machine.name, machine.uid) for provider, machine in seen}
    missing = [
        row
        for row in machines
        if row.uid is not None and row.provider not in unreadable and (row.provider, row.name, row.uid) not in listed
    ]
    gone: set[str] = set()
    asked: list[tuple[str, SeenMachine]] = []
    for row in missing[:ASKED_BY_NAME_MAX]:
        try:
            machine = providers[row.provider].get(row.name, row.location)
        except OrcaError as error:
            unreadable[row.provider] = f"provider {row.provider} could not be read: {error}"
            continue
        if machine is None or machine.uid != row.uid:
            gone.add(row.name)
        else:
            asked.append((row.provider, machine))
    return frozenset(gone), asked
