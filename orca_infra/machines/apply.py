"""Carry out the machine pools' plan: rows first, then the engine, then the confirmation.

Each action is safe to do twice, and may be left undone, half done or done by a crash: the next pass begins with what the
stacks' states hold (`settle`) and decides anew.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from orca_infra.errors import (
    Conflict,
    EngineFailed,
    NoCapacity,
    NotLeader,
    OrcaError,
    OutcomeUnknown,
    SetupError,
    StackLocked,
)
from orca_infra.machines.consoles import console_path
from orca_infra.machines.decide import machine_labels
from orca_infra.machines.hands import MachineHands
from orca_infra.machines.model import (
    Action,
    Candidate,
    DeleteStray,
    DestroyOwned,
    EndInterrupted,
    Make,
    Plan,
    Pool,
    Reason,
    Relabel,
    Remove,
    Snapshot,
)
from orca_infra.machines.observe import SQL, machine_stack
from orca_infra.machines.program import machine_program
from orca_infra.machines.providers.port import Birth
from orca_infra.machines.removing import destroy_names
from orca_infra.machines.tokens import token_hash, worker_token
from orca_infra.metrics import METRICS
from orca_infra.names import machine_name, machine_number
from orca_infra.stack.engine import PROJECT
from orca_infra.stack.outcome import uid_of

Kind = TypeVar("Kind", bound=Action)

#: How many names held by others are passed over in one try.
_NAMES_MAX = 5
#: No pool ever came so far: a listed machine with a higher number was named by somebody else, to use the numbers up.
_LISTED_NUMBER_MAX = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What one attempt came to: the machine's name and uid, or the error."""

    name: str = ""
    uid: str = ""
    error: OrcaError | None = None


def settle(hands: MachineHands) -> dict[str, str]:
    """Learn the end of every operation that has none; gives the pools that cannot be judged yet, with the reason.

    A machine that the state holds as made is confirmed from there.
    """
    held: dict[str, str] = {}
    by_stack = {machine_stack(hands.family, pool): pool for pool in _pools_ever(hands)}
    for stack in hands.engine.unsettled():
        pool = by_stack.get(stack)
        if pool is None:
            continue
        try:
            state = hands.engine.settle(stack)
        except (Conflict, EngineFailed, OutcomeUnknown, SetupError) as error:
            held[pool] = str(error)
            continue
        why = "the end of its last operation was not known"
        pending, owned = len(state.pending), len(state.resources)
        hands.log.info("stack settled", pulumi_stack=stack, pending=pending, owned=owned, why=why)
    judged = [stack for stack, pool in by_stack.items() if pool not in held]
    with hands.database.transaction() as transaction:
        for row in transaction.dicts(SQL["confirm_owned"], {"stacks": judged}):
            why = "its creation ended well, and a crash kept that from being written down"
            hands.log.info("machine confirmed from the state", machine=row["name"], pool=row["pool"], why=why)
    return held


def apply(plan: Plan, snapshot: Snapshot, hands: MachineHands) -> int:
    """Do what the plan says; gives how many actions changed something.

    An action that fails is logged and left for a later pass; so is every one that is not begun when the loop is told to stop.
    Raises NotLeader, and Transient when the database is away.
    """
    hands.verify()
    _write_reports(plan, snapshot, hands)
    parts = _by_pool(plan) if hands.parallel > 1 else [plan]
    if len(parts) <= 1:
        return _in_turn(plan, snapshot, hands)
    with ThreadPoolExecutor(hands.parallel, thread_name_prefix="pool") as threads:
        begun = [threads.submit(_in_turn, part, snapshot, hands) for part in parts]
    errors = [error for one in begun if (error := one.exception()) is not None]
    if errors:
        raise next((error for error in errors if isinstance(error, NotLeader)), errors[0])
    return sum(one.result() for one in begun)


def _by_pool(plan: Plan) -> list[Plan]:
    """The plan of each pool, whose stack is its own; of what belongs to no pool there is a part, too."""
    actions: dict[str, list[Action]] = {}
    for action in plan.actions:
        actions.setdefault("" if isinstance(action, DeleteStray) else action.pool, []).append(action)
    return [replace(plan, actions=tuple(part)) for part in actions.values()]


def _in_turn(plan: Plan, snapshot: Snapshot, hands: MachineHands) -> int:
    done = 0
    for step in _steps(plan, snapshot, hands):
        if hands.stopping():
            break
        done += step()
    return done


def _steps(plan: Plan, snapshot: Snapshot, hands: MachineHands) -> Iterator[Callable[[], int]]:
    """The plan in the order in which it is carried out: what ends, what is made, what is removed, what is nobody's.

    Labels come before all that could leave a machine that only its labels find.
    """
    yield from (partial(_relabel, action, hands) for action in _of(plan, Relabel))
    yield from (partial(_end_interrupted, action, hands) for action in _of(plan, EndInterrupted))
    yield from (partial(_make, action, snapshot, hands) for action in _of(plan, Make))
    removals: dict[str, list[Remove]] = {}
    for removal in _of(plan, Remove):
        removals.setdefault(removal.pool, []).append(removal)
    yield from (partial(_remove, of_pool, snapshot.now, hands) for of_pool in removals.values())
    unwanted: dict[str, list[str]] = {}
    for owned in _of(plan, DestroyOwned):
        unwanted.setdefault(owned.pool, []).append(owned.name)
    yield from (partial(_destroy_owned, pool, names, hands) for pool, names in unwanted.items())
    yield from (partial(_delete_stray, action, hands) for action in _of(plan, DeleteStray))


def _of(plan: Plan, kind: type[Kind]) -> list[Kind]:
    return [action for action in plan.actions if isinstance(action, kind)]


def _write_reports(plan: Plan, snapshot: Snapshot, hands: MachineHands) -> None:
    states: dict[str, Counter[str]] = {}
    for row in snapshot.machines:
        states.setdefault(row.pool, Counter())[row.state] += 1
    declared = {
        (pool.name, kind.type, location, kind.spot)
        for pool in hands.pools.values()
        for kind in pool.types
        for location in kind.locations
    }
    with hands.database.transaction() as transaction:
        for one in snapshot.refusals:
            # What orca.toml does not name any more is never tried again, so nothing else would end its refusal.
            if (one.pool, one.type, one.location, one.spot) not in declared:
                offer = {"pool": one.pool, "type": one.type, "location": one.location, "spot": one.spot}
                transaction.run(SQL["forget_refusal"], offer)
        for report in plan.reports:
            transaction.run(
                SQL["report"],
                {
                    "pool": report.pool,
                    "demand": report.demand,
                    "message": report.message,
                    "next_try_at": report.next_try_at,
                    "in_search": report.in_search,
                    "skipped": report.skipped,
                    "machines": json.dumps(states.get(report.pool, {})),
                },
            )


def _end_interrupted(action: EndInterrupted, hands: MachineHands) -> int:
    hands.verify()
    with hands.database.transaction() as transaction:
        transaction.value(SQL["revoke"], {"name": action.name, "reason": Reason.INTERRUPTED, "only_idle": False})
        transaction.run(SQL["end_machine"], {"name": action.name, "reason": Reason.INTERRUPTED})
    METRICS.machine_ended(action.pool, Reason.INTERRUPTED)
    hands.log.warning("creation was interrupted", machine=action.name, pool=action.pool, why=action.why)
    return 1


def _relabel(action: Relabel, hands: MachineHands) -> int:
    hands.verify()
    try:
        hands.providers[action.provider].relabel(action.machine, action.labels)
    except OrcaError as error:
        hands.log.warning("labels not put back yet", machine=action.machine.name, said=str(error))
        return 0
    hands.log.warning("labels put back", machine=action.machine.name, labels=dict(action.labels), why=action.why)
    return 1


def _make(action: Make, snapshot: Snapshot, hands: MachineHands) -> int:
    """Try the candidates in turn; one that has room is asked again until the count is reached."""
    pool = hands.pools[action.pool]
    made: list[str] = []
    attempts: list[str] = []
    failure: OrcaError | None = None
    candidates = list(action.candidates)
    while candidates and len(made) < action.count and failure is None and not hands.stopping():
        candidate = candidates[0]
        spot = " (spot)" if candidate.spot else ""
        place = f"{candidate.type}{spot} in {candidate.location}"
        result = _make_one(pool, candidate, snapshot, hands)
        METRICS.machine_attempt(pool.name, type(result.error).__name__ if result.error else "Made")
        if result.error is None:
            made.append(result.name)
            where = {"type": candidate.type, "location": candidate.location, "uid": result.uid}
            hands.log.info("machine made", machine=result.name, pool=pool.name, **where, why=action.why)
            attempts.append(f"made {result.name} ({place})")
        elif isinstance(result.error, NoCapacity):
            candidates.pop(0)
            attempts.append(f"no capacity for {place}")
        else:
            failure = result.error
            attempts.append(f"{place}: {type(failure).__name__}: {failure}")
    hands.verify()
    with hands.database.transaction() as transaction:
        transaction.run(
            SQL["tried"],
            {
                "pool": pool.name,
                "type": None if made else action.then_type,
                "since": None if made else action.then_since,
                # A quota or a refusal is no answer to the question whether the type is to be had: the search stays put.
                "keep": failure is not None and not made,
                "attempt": "; ".join(attempts)[:2000],
            },
        )
    return len(made)


def _make_one(pool: Pool, candidate: Candidate, snapshot: Snapshot, hands: MachineHands) -> Made:
    """One attempt: the row, the engine's targeted up, and the confirmation or the row's end."""
    provider = hands.providers[pool.provider]
    error: OrcaError | None = None
    for _ in range(_NAMES_MAX):
        hands.verify()
        name, declaration, token = _record(pool, candidate, snapshot, hands)
        try:
            uid = _up(pool, name, declaration, token, hands)
        except NotLeader:
            raise  # whoever leads now settles the operation
        except OutcomeUnknown as unknown:
            # The row stays as it is: the next pass reads the state and confirms or ends it.
            return Made(name=name, error=unknown)
        except EngineFailed as failed:
            words = failed.failures[0].message if failed.failures else str(failed)
            error = provider.classify(words)
        except OrcaError as other:
            error = other
        else:
            with hands.database.transaction() as transaction:
                transaction.run(SQL["confirm_machine"], {"name": name, "uid": uid})
                transaction.run(SQL["forget_refusal"], {"pool": pool.name, **asdict(candidate)})
            return Made(name=name, uid=uid)
        hands.verify()
        if isinstance(error, StackLocked):
            # The engine began nothing, so the name was never heard of outside this database.
            with hands.database.transaction() as transaction:
                transaction.run(SQL["unrecord_machine"], {"name": name})
            break
        _end_failed(pool, candidate, name, error, hands)
        if not isinstance(error, Conflict):
            break  # only a name that is taken is a reason for another
    return Made(error=error)


def _record(
    pool: Pool, candidate: Candidate, snapshot: Snapshot, hands: MachineHands
) -> tuple[str, Mapping[str, Any], str]:
    """Take the next number, render the machine and write its row. From here on it is declared from that row alone."""
    counted = {row.name for row in snapshot.machines}  # what has a row had its number from here
    listed = (machine_number(pool.name, one.name) or 0 for _, one in snapshot.seen if one.name not in counted)
    above = max((number for number in listed if number <= _LISTED_NUMBER_MAX), default=0)
    with hands.database.transaction() as transaction:
        number = transaction.value(SQL["next_number"], {"pool": pool.name, "above": above})
        name = machine_name(pool.name, number)
        token = worker_token(hands.token_key, hands.stack_id, name)
        declaration = hands.providers[pool.provider].render(
            Birth(
                name=name,
                pool=pool.name,
                type=candidate.type,
                location=candidate.location,
                spot=candidate.spot,
                image=pool.image,
                labels=machine_labels(hands.stack_id, pool.name),
            )
        )
        transaction.run(
            SQL["record_machine"],
            {
                "name": name,
                "pool": pool.name,
                "number": number,
                "provider": pool.provider,
                "type": candidate.type,
                "location": candidate.location,
                "spot": candidate.spot,
                "rendered": json.dumps(declaration),
                "token_hash": token_hash(token),
            },
        )
    return name, declaration, token


def _up(pool: Pool, name: str, declaration: Mapping[str, Any], token: str, hands: MachineHands) -> str:
    """Make the machine through the engine; gives its uid."""
    stack = machine_stack(hands.family, pool.name)
    resource_type = hands.providers[pool.provider].resource_type
    program = machine_program(resource_type, {name: (declaration, token)})
    changes = hands.engine.up(stack, program, targets=(_urn(stack, resource_type, name),))
    for change in changes:
        if change.name == name and uid_of(change.outputs):
            return uid_of(change.outputs)
    raise OutcomeUnknown(f"up {stack}: the engine ended well and did not say that it made {name}")


def _end_failed(pool: Pool, candidate: Candidate, name: str, error: OrcaError, hands: MachineHands) -> None:
    """The provider said no: the row ends, and the refusal is remembered."""
    reason = Reason.NO_CAPACITY if isinstance(error, NoCapacity) else Reason.FAILED
    known = {"NoCapacity", "QuotaExceeded", "Refused", "AuthFailed", "Transient"}
    kind = type(error).__name__
    with hands.database.transaction() as transaction:
        transaction.value(SQL["revoke"], {"name": name, "reason": reason, "only_idle": False})
        transaction.run(SQL["end_machine"], {"name": name, "reason": reason})
        if not isinstance(error, Conflict):
            transaction.run(
                SQL["refused"],
                {
                    "pool": pool.name,
                    **asdict(candidate),
                    "class": kind if kind in known else "Transient",
                    "message": str(error)[:2000],
                },
            )
    hands.log.warning(
        "machine not made", machine=name, type=candidate.type, location=candidate.location, why=kind, said=str(error)
    )


def _remove(removals: list[Remove], decided_at: datetime, hands: MachineHands) -> int:
    """Revoke each token in a transaction of its own, delete the pool's machines in one operation, then end the rows."""
    group: list[Remove] = []
    for removal in removals:
        hands.verify()
        with hands.database.transaction() as transaction:
            revoked = transaction.value(
                SQL["revoke_unless_worked"],
                {
                    "name": removal.name,
                    "reason": removal.reason,
                    "only_idle": removal.only_idle,
                    "since": decided_at if removal.reason is Reason.IDLE else None,
                },
            )
        if not revoked:
            event = "removal given up: a run landed on it"
            hands.log.info(event, machine=removal.name, pool=removal.pool, reason=removal.reason, why=removal.why)
            continue
        if removal.reason is Reason.BOOT_TIMEOUT:
            _save_console(removal, hands)
        group.append(removal)
    return _destroy(removals[0].pool, group, hands) if group else 0


def _destroy(pool: str, removals: list[Remove], hands: MachineHands) -> int:
    """Delete machines whose tokens are revoked, and end the rows of those that are gone."""
    names = {removal.name: removal for removal in removals}
    left = destroy_names(pool, list(names), hands)
    for name, removal in names.items():
        if name in left:
            continue
        with hands.database.transaction() as transaction:
            transaction.run(SQL["end_machine"], {"name": name, "reason": removal.reason})
            transaction.run(SQL["forget_worker"], {"name": name})
        METRICS.machine_ended(pool, removal.reason)
        hands.log.info("machine removed", machine=name, pool=pool, reason=removal.reason, why=removal.why)
    return len(names) - len(left)


def _destroy_owned(pool: str, names: list[str], hands: MachineHands) -> int:
    hands.verify()
    left = destroy_names(pool, names, hands)
    METRICS.stray_deleted("machines", len(names) - len(left))
    why = "the stack owns them and no row wants them"
    hands.log.warning(
        "machines of no row destroyed", pool=pool, machines=sorted({*names} - left), left=sorted(left), why=why
    )
    return len(names) - len(left)


def _delete_stray(action: DeleteStray, hands: MachineHands) -> int:
    hands.verify()
    try:
        hands.providers[action.provider].delete(action.machine)
    except OrcaError as error:
        hands.log.warning("stray not deleted yet", machine=action.machine.name, said=str(error))
        return 0
    METRICS.stray_deleted("machines")
    hands.log.warning("stray deleted", machine=action.machine.name, uid=action.machine.uid, why=action.why)
    return 1


def _save_console(removal: Remove, hands: MachineHands) -> None:
    """Keep what a machine that never came up said; failing to is no reason to keep paying for it."""
    try:
        with hands.database.snapshot() as transaction:
            row = transaction.dicts(SQL["machines_named"], {"names": [removal.name]})[0]
        said = hands.providers[row["provider"]].console(removal.name, row["location"])
        hands.logs.mkdir(parents=True, exist_ok=True)
        path = console_path(hands.logs, removal.name)
        path.write_text(said, encoding="utf-8")
        hands.log.info("console saved", machine=removal.name, path=str(path))
    except (OrcaError, OSError, IndexError) as error:
        hands.log.warning("console not saved", machine=removal.name, said=str(error))


def _pools_ever(hands: MachineHands) -> list[str]:
    with hands.database.snapshot() as transaction:
        return [*hands.pools, *(row["pool"] for row in transaction.dicts(SQL["progress"]))]


def _urn(stack: str, resource_type: str, name: str) -> str:
    return f"urn:pulumi:{stack}::{PROJECT}::{resource_type}::{name}"
