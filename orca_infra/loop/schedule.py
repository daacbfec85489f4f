"""When passes are made: each scope (machines, runtimes, runs) on a thread and a cadence of its own.

A slow cloud so never delays a run's start. A scope's passes follow one another on its one thread, and none overlaps itself.
What hastens a pass is one flag a scope: however much happens, at most one pass is waiting to be made.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from orca_infra.errors import NotLeader, OrcaError
from orca_infra.log import Log
from orca_infra.process import traceback_of_thread

#: How soon a pass that was given up is made again.
RETRY_SECONDS = 2.0
#: Two passes of a scope are never closer than this, whatever comes due.
LEAST_SECONDS = 0.2
#: While something is made beside them, what passes change hastens none, and they take this part of the time at the most: what
#: happens meanwhile is seen soon, and the CPU is left to what is made. An edit, a stop and a cull hasten one as ever.
BESIDE_SHARE = 0.1
BESIDE_SECONDS = 1.0
#: How long after its deadline a pass that was told to end may take for it, before the process is given up.
END_SECONDS = 60.0
#: The rows of what ended long ago are deleted so often at the least.
PRUNE_SECONDS = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PassEnd:
    """What a pass came to.

    Attributes:
        changed: how many actions changed something.
        next_in_seconds: when the next has to be made at the latest; None: a whole period later.

    """

    changed: int = 0
    next_in_seconds: float | None = None


class Beside(Protocol):
    """What is under way beside a scope's passes, on threads of its own. They begin it, and raise what it came to."""

    def start(self, wake: Callable[[], None]) -> None:
        """A lead begins; `wake` is called at each end."""

    def under_way_since(self) -> float | None:
        """Since when the oldest is under way, by time.monotonic; None: none is."""

    def where(self) -> str:
        """What its threads are at, as tracebacks."""

    def join(self, seconds: float) -> bool:
        """Wait for the ends of all; gives whether they came within this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What passes are made over.

    Attributes:
        name: machines, runtimes or runs.
        period_seconds: from one pass's end to the next, when nothing hastens it.
        make: makes one pass; raises OrcaError when it is given up, NotLeader when nothing may be written any more.
        prune: deletes the rows of what ended long ago.
        cut_short: has the pass that is under way end after the action that it is at, and the engine's operations with it.
        beside: what is under way beside its passes.

    """

    name: str
    period_seconds: float
    make: Callable[[], PassEnd]
    prune: Callable[[], None]
    cut_short: Callable[[], None]
    beside: Beside | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PassReport:
    """A pass that ended, for whoever counts and says them. `error` is why it was given up, or None."""

    scope: str
    seconds: float
    changed: int
    error: Exception | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """A pass that is under way past its deadline: for how long, and where its thread is at this moment, as a traceback.

    `beside`: it is what is made beside the scope's passes.
    """

    scope: str
    seconds: float
    where: str
    beside: bool = False


class Schedule:
    """The passes of one lead, from `start` until `stop` and `join`.

    `lost` is why no thread makes any more passes: the first NotLeader that one of them met.
    """

    def __init__(
        self,
        scopes: Sequence[Scope],
        *,
        log: Log,
        report: Callable[[PassReport], None] = lambda _: None,
        seconds: Callable[[], float] = time.monotonic,
        prune_seconds: float = PRUNE_SECONDS,
    ) -> None:
        """`report` is called on the scope's thread after each pass; it raises NotLeader or nothing."""
        self.log = log
        self.report = report
        self.seconds = seconds
        self.prune_seconds = prune_seconds
        self.over = threading.Event()
        self._threads = [_ScopeThread(scope, self) for scope in scopes]
        self.lost: NotLeader | None = None

    def start(self) -> None:
        for thread in self._threads:
            if thread.scope.beside is not None:
                thread.scope.beside.start(thread.wake.set)
            thread.start()

    def hasten(self, *names: str) -> None:
        """Have the next pass of these scopes (of all, without any) made at once."""
        for thread in self._threads:
            if not names or thread.scope.name in names:
                thread.wake.set()

    def stop(self) -> None:
        """Begin no more passes, and cut short those that are under way."""
        self.over.set()
        self.hasten()
        for thread in self._threads:
            thread.scope.cut_short()

    def join(self, seconds: float) -> list[str]:
        """Wait for the threads' ends; gives the scopes of which something is still under way after that time."""
        deadline = self.seconds() + seconds
        left = []
        for thread in self._threads:
            thread.join(max(deadline - self.seconds(), 0))
            beside = thread.scope.beside  # a pass that has ended begins nothing more there
            if thread.is_alive() or (beside is not None and not beside.join(max(deadline - self.seconds(), 0))):
                left.append(thread.scope.name)
        return left

    def late(self, deadline_seconds: float) -> list[Late]:
        """What has been under way for longer than this; each is cut short."""
        found = []
        for thread in self._threads:
            beside = thread.scope.beside
            for since, is_beside in (
                (thread.under_way_since, False),
                (beside.under_way_since() if beside is not None else None, True),
            ):
                if since is None or self.seconds() - since <= deadline_seconds:
                    continue
                where = beside.where() if beside is not None and is_beside else traceback_of_thread(thread.ident)
                seconds = self.seconds() - since
                found.append(Late(scope=thread.scope.name, seconds=seconds, where=where, beside=is_beside))
                thread.scope.cut_short()
        return found

    @property
    def is_over(self) -> bool:
        return self.over.is_set()

    def lose(self, error: NotLeader) -> None:
        self.lost = self.lost or error
        self.stop()


class _ScopeThread(threading.Thread):
    """One scope's passes, one after the other."""

    def __init__(self, scope: Scope, schedule: Schedule) -> None:
        super().__init__(name=scope.name, daemon=True)
        self.scope = scope
        self.wake = threading.Event()
        self.under_way_since: float | None = None
        self._schedule = schedule
        self._pruned_at: float | None = None

    def run(self) -> None:
        schedule = self._schedule
        try:
            while True:
                self.wake.clear()
                if schedule.is_over:  # asked after the flag was cleared: a stop sets both, this one first
                    return
                wait = self._one_pass()
                self._prune_sometimes()
                # However much happens, one pass is never right behind another.
                schedule.over.wait(LEAST_SECONDS)
                self.wake.wait(max(wait - LEAST_SECONDS, 0))
        except NotLeader as error:
            schedule.lose(error)

    def _one_pass(self) -> float:
        """Make a pass; one that fails is said and keeps no other from being made. Gives the seconds until the next.

        A pass that changed something is followed by another at once: what it reports is then current, and what its changes
        make possible is not kept waiting.
        """
        schedule = self._schedule
        begun_at = self.under_way_since = schedule.seconds()
        end, error = PassEnd(), None
        try:
            end = self.scope.make()
        except NotLeader:
            raise
        except Exception as given_up:  # noqa: BLE001  (a defect in one pass keeps no other from its work; it is not hidden)
            error = given_up
            self._say(given_up)
        finally:
            self.under_way_since = None
        seconds = schedule.seconds() - begun_at
        schedule.report(PassReport(scope=self.scope.name, seconds=seconds, changed=end.changed, error=error))
        if error is not None:
            return RETRY_SECONDS
        period = self.scope.period_seconds
        if self.scope.beside is not None and self.scope.beside.under_way_since() is not None:
            period = min(period, max(BESIDE_SECONDS, seconds / BESIDE_SHARE))
        elif end.changed:
            return LEAST_SECONDS
        return period if end.next_in_seconds is None else min(period, end.next_in_seconds)

    def _prune_sometimes(self) -> None:
        now = self._schedule.seconds()
        if self._pruned_at is not None and now - self._pruned_at < self._schedule.prune_seconds:
            return
        self._pruned_at = now
        try:
            self.scope.prune()
        except NotLeader:
            raise
        except Exception as error:  # noqa: BLE001  (as above)
            self._say(error)

    def _say(self, error: Exception) -> None:
        log, scope = self._schedule.log, self.scope.name
        if isinstance(error, OrcaError):
            if not self._schedule.is_over:
                log.warning("pass given up", scope=scope, kind=type(error).__name__, why=str(error))
            return
        where = "".join(traceback.format_exception(error))
        log.warning("pass failed: a defect of this program", scope=scope, kind=type(error).__name__, traceback=where)
