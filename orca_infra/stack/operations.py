"""Engine operations with a record: written down before, confirmed after, settled when their end is not known.

What every stack owns is kept in Postgres (`orca.owned`), so that a pass in which nothing is to be made runs no engine.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from orca_infra.attention import note
from orca_infra.db.connection import Database, Transaction, load_queries
from orca_infra.errors import (
    Conflict,
    EngineFailed,
    OrcaError,
    OutcomeUnknown,
    StackLocked,
    StateBroken,
    Transient,
)
from orca_infra.metrics import METRICS
from orca_infra.process import ProcessId, boot_id, is_alive
from orca_infra.stack.backend import ASIDE, open_backend
from orca_infra.stack.engine import Engine, OwnedResource, StackState
from orca_infra.stack.history import history_folder, prune_history
from orca_infra.stack.locks import free_dead_locks, free_own_locks, holder_is_dead, lock_folder
from orca_infra.stack.outcome import ResourceChange, StackMissing, uid_of
from orca_infra.stack.presence import missing_state, require_state, state_key
from orca_infra.stack.program import Program

_SQL = load_queries("engine")
_MESSAGE_LIMIT = 2000
_GONE = frozenset({"delete", "discard", "delete-replaced", "discard-replaced"})

Result = TypeVar("Result")
Changes = tuple[ResourceChange, ...]
Operate = Callable[[Callable[[ProcessId], None]], Changes]


class RecordedEngine:
    """The engine as the loop uses it. Raises what Engine raises, and NotLeader from `verify`. Threads may share it.

    `verify` is called before each engine start and before its end is written down.
    """

    def __init__(
        self,
        engine: Engine,
        database: Database,
        *,
        backend_url: str,
        verify: Callable[[], None],
        deadline_seconds: float,
        parallel: int | None = None,
    ) -> None:
        """`parallel`: how many operations may be under way at the same time; None: as many as there are threads."""
        self._slots = threading.BoundedSemaphore(parallel) if parallel else contextlib.nullcontext()
        self._engine = engine
        self._database = database
        self._backend_url = backend_url
        self._verify = verify
        self._deadline_seconds = deadline_seconds

    def up(self, stack: str, program: Program, *, targets: tuple[str, ...]) -> Changes:
        """Make `targets` of what the program declares, and store what the stack owns now."""
        return self._record(
            "up",
            stack,
            targets,
            lambda on_start: self._engine.up(
                stack, program, targets=targets, deadline_seconds=self._deadline_seconds, on_start=on_start
            ),
        )

    def destroy(self, stack: str, *, targets: tuple[str, ...]) -> Changes:
        """Remove `targets` and store what the stack owns now."""
        return self._record(
            "destroy",
            stack,
            targets,
            lambda on_start: self._engine.destroy(
                stack, targets=targets, deadline_seconds=self._deadline_seconds, on_start=on_start
            ),
        )

    def refresh(self, stack: str, *, only_look: bool = False) -> Changes:
        """Have the state follow what is there, and store what the stack owns now; `only_look`: say what differs."""
        return self._record(
            "refresh",
            stack,
            (),
            lambda on_start: self._engine.refresh(
                stack, targets=(), deadline_seconds=self._deadline_seconds, on_start=on_start, only_look=only_look
            ),
            store=not only_look,
        )

    def up_new(self, stack: str, program: Program) -> Changes:
        """Make a stack that is upped this once; what it owns is for the caller to store. Raises EngineFailed with changes."""
        return self._record(
            "up",
            stack,
            (),
            lambda on_start: self._engine.up_new(
                stack, program, deadline_seconds=self._deadline_seconds, on_start=on_start
            ),
            store=False,
        )

    def drop(self, stack: str, *, even_torn: bool = False) -> None:
        """Forget the stack, whatever its state holds. Locks of dead engines are broken first.

        `even_torn`: a state that was cut off as well, as an engine leaves it that was killed in writing it to a file. It is
        for stacks of which everything is known without their state.
        """
        self._verify()

        def drop() -> None:
            try:
                self._engine.drop(stack)
            except StateBroken:
                if not even_torn or not self._forget_torn(stack):
                    raise
                self._engine.drop(stack)

        self._unlocked(stack, drop)
        self._clear_away(stack)
        with self._database.transaction() as transaction:
            transaction.run(_SQL["settle_stack"], {"stack": stack})

    def forget(self, stack: str, *, targets: tuple[str, ...]) -> None:
        """Have the state forget `targets`, which are known to be gone; no provider is asked, and nothing is deleted.

        A destroy goes by name, and by then the name may be another's.
        """
        self._verify()
        held = {resource.urn for resource in self._unlocked(stack, lambda: self._engine.state(stack)).resources}
        present = tuple(urn for urn in targets if urn in held)
        if present:
            self._verify()
            self._unlocked(stack, lambda: self._engine.forget(stack, targets=present))
        self._verify()
        with self._database.transaction() as transaction:
            for urn in targets:
                transaction.run(_SQL["disown"], {"stack": stack, "urn": urn})

    def unprotect(self, stack: str) -> None:
        """Let a `destroy` of the stack remove what its program protects. Locks of dead engines are broken first."""
        self._verify()
        self._unlocked(stack, lambda: self._engine.unprotect(stack))

    def require_state(self) -> None:
        """Raises SetupError while the state that was there is not, Transient when that cannot be told."""
        require_state(self._database, self._backend_url)

    def say_whether_state_is_there(self) -> None:
        """Have status say it when the state is missing, until it is back: what needs it raises meanwhile."""
        with contextlib.suppress(Transient):
            note(self._database, "the engine's state", missing_state(self._database, self._backend_url) or "")

    def unsettled(self) -> list[str]:
        """Stacks of which an operation's end is not known; `settle` each before deciding anything about it."""
        with self._database.snapshot() as transaction:
            return [row["stack"] for row in transaction.dicts(_SQL["unsettled_stacks"])]

    def settle(self, stack: str) -> StackState:
        """Learn from the state what the stack owns, forget pending operations, and store it.

        Raises Conflict while the engine process of an earlier loop is still at work on the stack, and StateBroken until a
        state that the engine refused was mended.
        """
        operations = self._operations_of(stack)
        for row in operations:
            mine = row["host"] == socket.gethostname() and row["boot_id"] == boot_id() and row["pid"] is not None
            if mine and not row["ended"] and is_alive(ProcessId(row["pid"], row["process_started"])):
                raise Conflict(f"an engine operation (pid {row['pid']}) still runs on {stack}")
        self._verify()
        was_broken = any(row["outcome"] == StateBroken.__name__ for row in operations)
        if was_broken:
            self._unlocked(stack, lambda: self._engine.check(stack))
        state = self._unlocked(stack, lambda: self._engine.state(stack))
        if state.pending:
            self._unlocked(stack, lambda: self._engine.clear_pending(stack))
        with self._database.transaction() as transaction:
            transaction.run(_SQL["disown_all"], {"stack": stack})
            for resource in state.resources:
                _own(transaction, stack, resource)
            transaction.run(_SQL["settle_stack"], {"stack": stack})
        if was_broken:
            note(self._database, _topic(stack), "")
        return state

    def prune(self, kept_seconds: float) -> None:
        """Delete ended operations from the ledger after their time, and what the engine keeps of them beyond the last few."""
        with self._database.snapshot() as transaction:
            stacks = [row["stack"] for row in transaction.dicts(_SQL["machine_stacks"])]
        for stack in stacks:
            prune_history(self._backend_url, stack)
        with self._database.transaction() as transaction:
            transaction.run(_SQL["prune_operations"], {"kept_seconds": kept_seconds})

    def _record(
        self,
        kind: str,
        stack: str,
        targets: tuple[str, ...],
        operate: Operate,
        *,
        store: bool = True,
    ) -> Changes:
        """Operate, with the intent written down before it and the end after it, once there is a free slot."""
        with self._slots:
            return self._record_at_once(kind, stack, targets, operate, store=store)

    def _record_at_once(
        self, kind: str, stack: str, targets: tuple[str, ...], operate: Operate, *, store: bool
    ) -> Changes:
        self._verify()
        with self._database.transaction() as transaction:
            operation = transaction.value(
                _SQL["begin_operation"],
                {
                    "stack": stack,
                    "kind": kind,
                    "targets": list(targets),
                    "host": socket.gethostname(),
                    "boot_id": boot_id(),
                    "deadline_seconds": self._deadline_seconds,
                },
            )
        started: list[ProcessId] = []

        def on_start(process: ProcessId) -> None:
            started.append(process)
            with self._database.transaction() as transaction:
                transaction.run(
                    _SQL["operation_started"],
                    {"id": operation, "pid": process.pid, "process_started": process.started},
                )

        try:
            changes = self._unlocked(stack, lambda: operate(on_start))
        except (StackMissing, Transient) as error:
            # The engine lost its state or its provider, at which step nobody knows; or the state has lost this stack.
            self._end(operation, OutcomeUnknown.__name__, str(error))
            raise OutcomeUnknown(str(error)) from error
        except OutcomeUnknown as error:
            self._free_locks(stack, started)
            self._end(operation, OutcomeUnknown.__name__, str(error))
            raise
        except OrcaError as error:
            # A failure that names no resource may have come after its step: the state is read before it is believed.
            vague = isinstance(error, EngineFailed) and not error.failures
            outcome = OutcomeUnknown.__name__ if vague else type(error).__name__
            done = _changes_of(error) if store else ()
            self._end(operation, outcome, str(error), lambda transaction: _store(transaction, stack, done))
            raise
        except BaseException as error:
            self._end(operation, OutcomeUnknown.__name__, type(error).__name__)
            raise
        self._end(operation, "Done", "", lambda transaction: _store(transaction, stack, changes if store else ()))
        return changes

    def _end(
        self, operation: int, outcome: str, message: str, also: Callable[[Transaction], None] = lambda _: None
    ) -> None:
        """Write down the end; when the lead was lost meanwhile the operation stays open, for the new leader to settle."""
        self._verify()
        with self._database.transaction() as transaction:
            also(transaction)
            ended = transaction.dicts(
                _SQL["end_operation"], {"id": operation, "outcome": outcome, "message": message[:_MESSAGE_LIMIT]}
            )
        for row in ended:
            METRICS.engine_operation(**row)

    def _unlocked(self, stack: str, operate: Callable[[], Result]) -> Result:
        """Operate on a state that is there, before and after.

        Raises SetupError when it is not there, and OutcomeUnknown when it went meanwhile.
        """
        self.require_state()
        try:
            return self._without_dead_locks(stack, operate)
        finally:
            if said := missing_state(self._database, self._backend_url):
                raise OutcomeUnknown(f"what was done to {stack} was written elsewhere: {said}")

    def _without_dead_locks(self, stack: str, operate: Callable[[], Result]) -> Result:
        """Operate; if only locks of dead engines are in the way, break those and operate once more."""
        try:
            return operate()
        except StateBroken as error:
            raise self._broken(stack, error) from error
        except StackLocked as locked:
            if not self._free_dead_locks(stack, locked):
                raise
        return operate()

    def _free_dead_locks(self, stack: str, locked: StackLocked) -> bool:
        """Break the locks that are in the way; False: one of them may be a living engine's."""
        operations = self._operations_of(stack)
        if not all(holder_is_dead(lock, operations) for lock in locked.locks):
            return False
        with open_backend(self._backend_url) as backend:
            return free_dead_locks(backend, stack, operations)

    def _operations_of(self, stack: str) -> list[dict[str, Any]]:
        with self._database.snapshot() as transaction:
            return transaction.dicts(_SQL["operations_of"], {"stack": stack})

    def _free_locks(self, stack: str, engines: Iterable[ProcessId]) -> None:
        """Free what our own engines held that had to be killed; where it can't be done the next operation does it."""
        for engine in engines:
            with contextlib.suppress(Conflict, Transient):
                free_own_locks(self._backend_url, stack, engine)

    def _forget_torn(self, stack: str) -> bool:
        """Delete a state that is no JSON, unless a living engine may be writing it; False: it is something else."""
        key = state_key(stack)
        operations = self._operations_of(stack)
        with contextlib.suppress(Conflict), open_backend(self._backend_url) as backend:
            if not free_dead_locks(backend, stack, operations):
                return False
            content = backend.read(key)
            if content is None or _is_json(content):
                return False
            backend.delete(key)
            return True
        return False

    def _clear_away(self, stack: str) -> None:
        """Delete what a drop left that lost the backend in the middle of it: nothing else would ever come upon it again."""
        with contextlib.suppress(Conflict), open_backend(self._backend_url) as backend:
            aside = [key for key in backend.keys(f"{state_key(stack)}.") if key.endswith(ASIDE)]
            for key in (*backend.keys(history_folder(stack)), *aside, f"{state_key(stack)}.bak"):
                backend.delete(key)
            if free_dead_locks(backend, stack, self._operations_of(stack)):
                for folder in (lock_folder(stack), history_folder(stack)):
                    backend.forget(folder)

    def _broken(self, stack: str, error: StateBroken) -> StateBroken:
        """Keep a copy of a state that the engine refuses, have status say so, and give the error that says all of it."""
        try:
            with open_backend(self._backend_url) as backend:
                content = backend.read(state_key(stack))
            kept = (
                f"a copy is kept in {self._engine.keep_aside(stack, content)}" if content else "no copy could be made"
            )
        except OrcaError as failure:
            kept = f"no copy could be made ({failure})"
        message = (
            f"the engine refuses the state of {stack} ({error}); {kept}; nothing is done to this stack until the state "
            "is mended, with `pulumi state repair` or from a backup"
        )
        note(self._database, _topic(stack), message)
        return StateBroken(message)


def _is_json(content: bytes) -> bool:
    try:
        json.loads(content)
    except ValueError:
        return False
    return True


def _topic(stack: str) -> str:
    return f"state {stack}"


def _changes_of(error: OrcaError) -> Changes:
    """What a failed operation made or removed all the same."""
    done = error.changes if isinstance(error, EngineFailed) else ()
    return tuple(change for change in done if isinstance(change, ResourceChange))


def _store(transaction: Transaction, stack: str, changes: Iterable[ResourceChange]) -> None:
    for change in changes:
        if change.op in _GONE:
            transaction.run(_SQL["disown"], {"stack": stack, "urn": change.urn})
        elif change.id and not change.type.startswith("pulumi:"):
            _own(transaction, stack, change)


def _own(transaction: Transaction, stack: str, resource: OwnedResource | ResourceChange) -> None:
    transaction.run(
        _SQL["own"],
        {
            "stack": stack,
            "urn": resource.urn,
            "type": resource.type,
            "name": resource.name,
            "id": resource.id,
            "uid": uid_of(resource.outputs),
        },
    )
