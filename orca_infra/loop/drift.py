"""What was changed by hand: machine stacks are looked at when something was seen, and once an hour.

What a refresh finds is stored, so that the state says what is there. That a machine is gone or stopped is for the pass, which
asks the provider; here it is only the reason to look at what else may have changed.
"""

from __future__ import annotations

from collections.abc import Iterable

from orca_infra.attention import SQL as ATTENTION
from orca_infra.attention import note
from orca_infra.db.connection import Database, load_queries
from orca_infra.errors import NotLeader, OrcaError
from orca_infra.log import Log
from orca_infra.machines.model import Plan, Reason, Relabel, Remove, Snapshot
from orca_infra.machines.observe import machine_stack
from orca_infra.settings import Settings
from orca_infra.stack.operations import RecordedEngine
from orca_infra.stack.outcome import ResourceChange

_SQL = load_queries("drift")
#: Stacks whose turn has come, looked at in one pass: each takes seconds, and machines that are needed wait for it.
_STACKS_MAX = 1
_SEEN = frozenset({Reason.VANISHED, Reason.STOPPED, Reason.PREEMPTED})
_UNCHANGED = frozenset({"same", "refresh", "read"})
_NAMES_SHOWN = 5


def say_labels_lost(database: Database, scope: str, names: Iterable[str]) -> None:
    """With ORCA_DRIFT=report: have status say of what the labels were taken off, until they are there again."""
    listed = sorted(names)
    shown = ", ".join(listed[:_NAMES_SHOWN]) + (", …" if len(listed) > _NAMES_SHOWN else "")
    message = f"somebody took labels off {shown}, and they are not put back (ORCA_DRIFT=report)" if listed else ""
    note(database, f"labels of {scope}", message)


class MachineDrift:
    """Looks at the machine stacks of one family, after a pass."""

    def __init__(self, settings: Settings, database: Database, engine: RecordedEngine, log: Log) -> None:
        self._settings = settings
        self._database = database
        self._engine = engine
        self._log = log

    def look(self, plan: Plan, snapshot: Snapshot) -> None:
        """Refresh what the pass saw something of, and what is due; with ORCA_DRIFT=report only say what differs.

        A stack that cannot be looked at is said and left for its next turn. Raises NotLeader.
        """
        left_alone = self._left_alone(snapshot)
        for stack in self._stacks(plan):
            if stack in left_alone:
                continue
            try:
                changes = self._engine.refresh(stack, only_look=self._settings.drift_is_reported)
            except NotLeader:
                raise
            except OrcaError as error:
                self._log.warning("stack not refreshed", pulumi_stack=stack, why=str(error))
                continue
            self._say(stack, [change for change in changes if change.op not in _UNCHANGED])

    def _stacks(self, plan: Plan) -> list[str]:
        """Stacks that own something: those of which the pass saw something, and the first whose turn has come."""
        seen = {
            machine_stack(self._settings.stack, action.pool)
            for action in plan.actions
            if isinstance(action, Relabel) or (isinstance(action, Remove) and action.reason in _SEEN)
        }
        parameters = {
            "prefix": machine_stack(self._settings.stack, "x").removesuffix("x"),
            "period_seconds": self._settings.drift_seconds,
        }
        with self._database.snapshot() as transaction:
            rows = transaction.dicts(_SQL["stacks"], parameters)
        if self._settings.drift_is_reported:  # else nothing is said of any: a pass that does nothing writes nothing
            with self._database.transaction() as transaction:
                transaction.run(ATTENTION["clear_drift"], {"stacks": [row["stack"] for row in rows]})
        due = [row["stack"] for row in rows if row["due"] and row["stack"] not in seen]
        return [row["stack"] for row in rows if row["stack"] in seen] + due[:_STACKS_MAX]

    def _left_alone(self, snapshot: Snapshot) -> frozenset[str]:
        """Stacks with an operation that is under way, or with a machine so young that its cloud may not show it yet."""
        grace = self._settings.stray_grace_seconds
        young = {row.pool for row in snapshot.machines if (snapshot.now - row.created_at).total_seconds() < grace}
        return frozenset(machine_stack(self._settings.stack, pool) for pool in young | {*snapshot.held})

    def _say(self, stack: str, changes: Iterable[ResourceChange]) -> None:
        words = []
        for change in changes:
            what = "is gone" if change.op == "delete" else "was changed by hand"
            words.append(f"{change.name} {what}")
            self._log.warning("drift", pulumi_stack=stack, machine=change.name, op=change.op, what=what)
        if not self._settings.drift_is_reported:
            return  # the state holds it now
        shown = ", ".join(words[:_NAMES_SHOWN]) + (", …" if len(words) > _NAMES_SHOWN else "")
        note(self._database, f"drift {stack}", shown and f"{stack}: {shown} (ORCA_DRIFT=report: nothing is mended)")
