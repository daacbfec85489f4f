"""Cohorts beside the passes: an `up` takes seconds, and no pass of the standing loop waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from orca_infra.errors import NotLeader, OrcaError
from orca_infra.process import traceback_of_thread
from orca_infra.stack.cohorts import DROPS_MAX, Begun, Cohorts

#: Under way at the same time at the most: a large refill and, beside it, what somebody waits for.
UPS_MOST = 2


@dataclass(slots=True, kw_only=True, eq=False)
class _Up:
    """An `up` and its thread. What it came to is there once it has `ended`."""

    since: float = field(default_factory=time.monotonic)
    thread: threading.Thread | None = None
    made: int = 0
    error: Exception | None = None
    ended: bool = False


class CohortsBeside:
    """A scope's cohorts, each made on a thread of its own. A pass begins them and learns what earlier ones came to.

    For the scope's one thread, but for `under_way_since`, `where` and `join`. What an `up` raised is raised again by each
    pass until an `up` ends well or nothing is to be made any more: passes that go by hide no engine that makes nothing.
    """

    def __init__(self, cohorts: Cohorts) -> None:
        self._cohorts = cohorts
        self._ups: tuple[_Up, ...] = ()
        self._failure: OrcaError | None = None
        self._wake: Callable[[], None] = lambda: None

    def start(self, wake: Callable[[], None]) -> None:
        """A new lead begins, with none under way: what those of the last came to is forgotten. `wake` is told of each end."""
        self._ups, self._failure, self._wake = (), None, wake

    def abandon(self) -> None:
        """Close the books of cohorts whose `up` was cut short."""
        self._cohorts.abandon()

    def up(self) -> int:
        """Begin to make what is open; gives how many objects those made that have ended since the last call.

        Beside another, only what somebody waits for is begun: many small ones would waste what an engine takes to start.
        Raises what the last of them raised.
        """
        ended = sorted((one for one in self._ups if one.ended), key=lambda one: one.error is not None)
        self._ups = tuple(one for one in self._ups if one not in ended)
        for one in ended:  # one that failed last
            if isinstance(one.error, NotLeader) or not isinstance(one.error, OrcaError | None):
                raise one.error
            self._failure = one.error
        begun = self._cohorts.begin(only_awaited=bool(self._ups)) if len(self._ups) < UPS_MOST else None
        if begun is not None:
            self._start(begun)
        elif not self._ups and not ended:
            self._failure = None
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        return sum(one.made for one in ended)

    def drop_empty(self) -> int:
        """Forget cohorts that declare nothing any more; while others are made only one, since the pass waits for it."""
        return self._cohorts.drop_empty(1 if self._ups else DROPS_MAX)

    def under_way_since(self) -> float | None:
        """Since when the oldest is under way, by time.monotonic; None: none is."""
        return min((one.since for one in self._ups if not one.ended), default=None)

    def where(self) -> str:
        """What the threads are at, as tracebacks."""
        threads = [one.thread.ident for one in self._ups if one.thread is not None and not one.ended]
        return "\n".join(filter(None, map(traceback_of_thread, threads)))

    def join(self, seconds: float) -> bool:
        """Wait for the ends of all; gives whether they came within this time."""
        deadline = time.monotonic() + seconds
        for one in self._ups:
            if one.thread is not None:
                one.thread.join(max(deadline - time.monotonic(), 0))
        return all(one.ended for one in self._ups)

    def _start(self, begun: Begun) -> None:
        one = _Up()
        one.thread = threading.Thread(target=self._run, args=(one, begun), name=begun.stack, daemon=True)
        self._ups = (*self._ups, one)
        try:
            one.thread.start()
        except RuntimeError:
            self._ups = tuple(up for up in self._ups if up is not one)
            self._cohorts.forsake(begun)
            raise

    def _run(self, one: _Up, begun: Begun) -> None:
        try:
            one.made = self._cohorts.make(begun)
        except Exception as error:  # noqa: BLE001  (the next pass raises it)
            one.error = error
        finally:
            one.ended = True
            self._wake()
