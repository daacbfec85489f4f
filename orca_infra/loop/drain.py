"""End everything that the loop has made, so that a stack can be destroyed: paused first, and not before `resume` made anew.

The drain takes the lead and makes the loop's own passes, so that machines are removed and clusters swept by the same rules as
ever: token first, logs first, rows last. It can be interrupted at any moment and called again: what it wants is in Postgres.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from orca_infra.config import Config, load_config
from orca_infra.db.connection import Database
from orca_infra.errors import NotLeader, OrcaError, SetupError, UserError
from orca_infra.loop.leader import Leader, holder, oust
from orca_infra.loop.scopes import Scopes
from orca_infra.machines.decide import STACK_LABEL
from orca_infra.machines.model import EVERY_POOL, FAMILY
from orca_infra.machines.observe import SQL as MACHINES
from orca_infra.machines.providers.local_config import LocalCloud
from orca_infra.runs.observe import SQL as RUNS
from orca_infra.runtimes.observe import SQL as RUNTIMES
from orca_infra.stack.presence import require_state
from orca_infra.surroundings import Surroundings

_PAUSE_SECONDS = 1.0
#: A loop whose lead was taken tries again after 2 s: until then the lead is there to be had.
_LEAD_SECONDS = 10.0
_DETAIL = "the stack is drained"


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """How much is left of what the loop made."""

    machines: int
    run_clusters: int
    runtimes: int

    def __bool__(self) -> bool:
        return bool(self.machines or self.run_clusters or self.runtimes)

    def __str__(self) -> str:
        return f"{self.machines} machines, {self.run_clusters} run clusters, {self.runtimes} runtime Pods"


def pause_family(database: Database) -> None:
    """No machine, run cluster or runtime is made any more, until `orca-infra resume`."""
    with database.transaction() as transaction:
        for pool in (EVERY_POOL, FAMILY):
            transaction.run(MACHINES["pause"], {"pool": pool})
        transaction.run("select pg_notify('orca_demand', '')")


def left_of(database: Database) -> Left:
    """What the rows say."""
    with database.snapshot() as transaction:
        return Left(
            machines=len(transaction.dicts(MACHINES["live_machines"])),
            run_clusters=len(transaction.dicts(RUNS["live_clusters"])),
            runtimes=len(transaction.dicts(RUNTIMES["live_pods"])),
        )


def drain(surroundings: Surroundings, say: Callable[[str], None]) -> None:
    """Pause the family, end all that it has, drop its derived stacks, and take the protection off the base.

    Raises:
        SetupError: there is no engine, or no cluster where there is something to be ended on it.
        ConfigError: orca.toml does not parse, which says where machines are.
        UserError: another process took the lead meanwhile.

    """
    database = surroundings.database
    config = _config(surroundings)
    pause_family(database)
    say("paused: nothing is made any more, until `orca-infra resume`")
    leader = Leader(surroundings.url)
    scopes = Scopes(surroundings, lambda: config, leader.verify, _Said(say))
    _lead(leader, surroundings.url, say)
    try:
        _end_all(surroundings, scopes, say)
        _drop_stacks(surroundings, scopes, say)
        scopes.recorded.unprotect(surroundings.settings.stack)
    except NotLeader as error:
        raise UserError(f"another process took the lead ({error}): call it again; the family stays paused") from error
    finally:
        leader.release()
    say("the base stack is unprotected")


def _config(surroundings: Surroundings) -> Config:
    path = surroundings.settings.config_path
    if path.exists() or left_of(surroundings.database).machines:
        return load_config(path)
    return Config(pools=(), max_machines_total=None, local=LocalCloud())


def _lead(leader: Leader, url: str, say: Callable[[str], None]) -> None:
    """Take the lead, from a loop that has it: what it is at ends, and it follows until the drain is over."""
    deadline = time.monotonic() + _LEAD_SECONDS
    while not leader.acquire():
        who = holder(url)
        if time.monotonic() > deadline:
            raise SetupError(f"the lead cannot be had from {who}: stop that loop, and call it again")
        if who:
            say(f"taking the lead from {who}")
            oust(url)
        time.sleep(_PAUSE_SECONDS / 10)


def _end_all(surroundings: Surroundings, scopes: Scopes, say: Callable[[str], None]) -> None:
    """Passes until nothing is left. What fails is said, once, and tried again."""
    shown, trouble = "", ""
    while True:
        _mark_all(surroundings.database)
        try:
            result = scopes.run_once()
            # What another stack has in the same project is listed too, and none of this one's business.
            identity = (STACK_LABEL, result.snapshot.stack_id)
            strays = sum(identity in machine.labels.items() for _, machine in result.snapshot.seen)
            changed = result.changed
            unread = "; ".join(result.snapshot.unreadable.values())
            trouble = _say_once(unread and f"not read: {unread}", trouble, say)
            done = not strays and not unread
        except NotLeader:
            raise
        except OrcaError as error:
            trouble = _say_once(str(error), trouble, say)
            changed, strays, done = 0, 0, False
        left = left_of(surroundings.database)
        nobodys = f", and {strays} machines that nobody owns" if strays and not left.machines else ""
        shown = _say_once(f"left: {left}{nobodys}", shown, say)
        if done and not left and not changed:
            return
        if not changed:
            time.sleep(_PAUSE_SECONDS)


def _say_once(text: str, before: str, say: Callable[[str], None]) -> str:
    if text and text != before:
        say(text)
    return text


def _mark_all(database: Database) -> None:
    """Write down that everything has to go; what is marked already stays as it is."""
    with database.transaction() as transaction:
        for row in transaction.dicts(MACHINES["live_machines"]):
            transaction.run(MACHINES["drain"], {"name": row["name"], "at_once": True})
        for row in transaction.dicts(RUNS["live_clusters"]):
            if row["ending_reason"] is None:
                transaction.run(
                    RUNS["begin_ending"],
                    {"run": row["run"], "start": row["start"], "reason": "Removed", "detail": _DETAIL},
                )
        for row in transaction.dicts(RUNTIMES["live_pods"]):
            transaction.run(
                RUNTIMES["begin_ending"],
                {"name": row["name"], "reason": "Stopped", "detail": _DETAIL, "only_waiting": False},
            )


def _drop_stacks(surroundings: Surroundings, scopes: Scopes, say: Callable[[str], None]) -> None:
    """Forget the derived stacks, which own nothing any more.

    Raises SetupError for one whose state still has a machine: nobody would find it again; and when the state is not there.
    """
    engine = scopes.engine
    require_state(surroundings.database, surroundings.engine.backend_url, engine)
    prefix = f"{surroundings.settings.stack}."
    for stack in [name for name in engine.stacks() if name.startswith(prefix)]:
        machines = [one.name for one in engine.state(stack).resources if not one.type.startswith("kubernetes:")]
        if machines:
            raise SetupError(
                f"stack {stack} still owns {', '.join(machines[:3])}, and no row does: `pulumi stack -s {stack}` shows it"
            )
        scopes.recorded.drop(stack)
        with surroundings.database.transaction() as transaction:
            transaction.run("delete from orca.cohorts where stack = %(stack)s", {"stack": stack})
        say(f"dropped stack {stack}")


class _Said:
    """The passes' log, of which a person who waits sees what went wrong."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def info(self, event: str, **particulars: object) -> None:
        """What went well shows in what is left."""

    def warning(self, event: str, **particulars: object) -> None:
        told = ", ".join(f"{key} {value}" for key, value in particulars.items())
        self._say(f"{event}{f': {told}' if told else ''}")
