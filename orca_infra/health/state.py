"""Whether the loop lives, and whether it is ready: what its threads tell it, judged when somebody asks.

It lives as long as its threads come round and no pass is past its deadline; a database or a cluster that is away is no reason
to restart it. It is ready when it does its part of the work: a leader whose last pass of each scope was not given up, or a
follower that saw a moment ago that another leads, and so could take over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TypeVar

from orca_infra.metrics import METRICS

#: The loop's main thread comes round every second or two; what it calls meanwhile ends within a minute.
ROUND_SECONDS = 120.0
#: So many periods without a pass are too many.
PERIODS_MOST = 20


class Role(StrEnum):
    """What the loop is."""

    STARTING = "starting"
    LEADER = "leader"
    FOLLOWER = "follower"
    STOPPING = "stopping"


class Made(Protocol):
    """What making a pass gives."""

    @property
    def changed(self) -> int: ...


End = TypeVar("End", bound=Made)


@dataclass(slots=True)
class _Scope:
    """The passes of one scope since this loop leads. Times are of the clock; None: not yet, or none is under way."""

    period_seconds: float
    beside: Callable[[], float | None] = lambda: None
    began_at: float | None = None
    ended_at: float | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """An answer. `why`: what is wrong, empty when all is well."""

    why: tuple[str, ...]
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        return not self.why


class Health:
    """Told by the loop's threads, asked by whoever probes it."""

    def __init__(self, *, pass_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`pass_seconds`: a pass's deadline."""
        self._clock = clock
        self._pass_seconds = pass_seconds
        self._lock = threading.Lock()
        self._role = Role.STARTING
        self._trouble = ""
        self._round_at = self._leading_since = clock()
        self._scopes: dict[str, _Scope] = {}

    # What the loop tells.

    def starting(self, trouble: str = "") -> None:
        """It neither leads nor follows yet, or no more; `trouble` says why."""
        self._become(Role.STARTING, trouble)

    def following(self) -> None:
        """It saw just now that another leads."""
        self._become(Role.FOLLOWER)

    def leading(
        self, period_seconds: Mapping[str, float], beside: Mapping[str, Callable[[], float | None]] | None = None
    ) -> None:
        """It leads from now on, and makes passes over these scopes, each with its period.

        `beside`: of some, since when something is under way beside their passes.
        """
        with self._lock:
            self._scopes = {scope: _Scope(period_seconds=seconds) for scope, seconds in period_seconds.items()}
            for scope, since in (beside or {}).items():
                self._scopes[scope].beside = since
            self._leading_since = self._clock()
        self._become(Role.LEADER)

    def comes_round(self) -> None:
        """The main thread goes on as it was."""
        with self._lock:
            self._round_at = self._clock()

    def stopping(self) -> None:
        """It was told to end."""
        self._become(Role.STOPPING)

    def watched(self, scope: str, make: Callable[[], End]) -> Callable[[], End]:
        """The same call, of which it is known when it is under way and what it came to."""

        def make_watched() -> End:
            self._begin(scope)
            outcome, error = "failed", ""
            try:
                end = make()
                outcome = "changed" if end.changed else "unchanged"
            except Exception as failure:
                error = f"{type(failure).__name__}: {failure}"
                raise
            finally:
                self._end(scope, error)
                METRICS.pass_ended(scope, outcome)
            return end

        return make_watched

    # What is asked.

    def alive(self) -> Verdict:
        """Whether its threads come round."""
        with self._lock:
            now = self._clock()
            why = [] if self._role is Role.STOPPING else self._not_round(now)
            for name, one in self._scopes.items() if self._role is Role.LEADER else ():
                if one.began_at is not None and now - one.began_at > self._pass_seconds:
                    why.append(f"a pass over {name} is under way for {now - one.began_at:.0f} s")
                since = one.beside()
                if since is not None and now - since > self._pass_seconds:
                    why.append(f"an up beside the passes over {name} is under way for {now - since:.0f} s")
                silent = now - (one.ended_at or self._leading_since)
                if one.began_at is None and silent > max(ROUND_SECONDS, PERIODS_MOST * one.period_seconds):
                    why.append(f"there has been no pass over {name} for {silent:.0f} s")
            return Verdict(why=tuple(why), details=self._details(now))

    def ready(self) -> Verdict:
        """Whether it does its part."""
        with self._lock:
            now = self._clock()
            why = self._not_round(now)
            if self._role is Role.STOPPING:
                why = ["it was told to end"]
            elif self._role is Role.STARTING:
                why.append(self._trouble or "it is not known yet who leads")
            for name, one in self._scopes.items() if self._role is Role.LEADER else ():
                if one.error:
                    why.append(f"the last pass over {name} was given up: {one.error}")
                elif one.ended_at is None:
                    why.append(f"no pass over {name} has ended yet")
            return Verdict(why=tuple(why), details=self._details(now))

    def _not_round(self, now: float) -> list[str]:
        silent = now - self._round_at
        return [f"its main thread has not come round for {silent:.0f} s"] if silent > ROUND_SECONDS else []

    def _become(self, role: Role, trouble: str = "") -> None:
        with self._lock:
            changed = role is not self._role
            if self._role is not Role.STOPPING:
                self._role, self._trouble = role, trouble
            self._round_at = self._clock()
        if changed and role is not Role.STOPPING:
            METRICS.lead(leading=role is Role.LEADER)

    def _begin(self, scope: str) -> None:
        with self._lock:
            self._scopes[scope].began_at = self._clock()

    def _end(self, scope: str, error: str) -> None:
        with self._lock:
            one = self._scopes[scope]
            one.began_at, one.ended_at, one.error = None, self._clock(), error

    def _details(self, now: float) -> dict[str, Any]:
        def since(then: float | None) -> float | None:
            return None if then is None else round(now - then, 1)

        passes = {
            name: {"under_way_seconds": since(one.began_at), "ended_seconds_ago": since(one.ended_at)}
            for name, one in self._scopes.items()
        }
        return {"role": str(self._role), "passes": passes if self._role is Role.LEADER else {}}
