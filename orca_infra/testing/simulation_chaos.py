"""How things go wrong in a simulation: which faults a seed has, and how often; and what people and clouds do in between."""

from __future__ import annotations

import random
from dataclasses import dataclass

from orca_infra.errors import (
    AuthFailed,
    EngineFailed,
    OrcaError,
    OutcomeUnknown,
    QuotaExceeded,
    Refused,
    StackLocked,
    Transient,
)
from orca_infra.testing.fake_cloud import STOCK_OUTS, WORDS, Effect, Fault

_RATES = {
    # of each call
    "create: stock-out": 0.3,
    "create: quota": 0.1,
    "create: refused": 0.05,
    "create: forbidden": 0.03,
    "create: rate limit": 0.1,
    "create: made, and said to have failed": 0.1,
    "create: late": 0.1,
    "create: slow": 0.3,
    "create: a lie": 0.05,
    "list: fails": 0.1,
    "list: slow": 0.1,
    "get: fails": 0.2,
    "get: a lie": 0.1,
    "label: fails": 0.2,
    "delete: fails": 0.3,
    "delete: a lie": 0.2,
    "delete: late": 0.2,
    "delete: slow": 0.3,
    "engine: locked": 0.15,
    "engine: state away": 0.1,
    "engine: program": 0.05,
    "engine: post-step": 0.1,
    "lead lost": 0.01,
    "killed at a point": 0.02,
    # of each pass
    "killed in a sleep": 0.25,
    "database away": 0.1,
    "preempted": 0.1,
    "stopped": 0.07,
    "deleted behind": 0.07,
    "worker silent": 0.07,
    "state lost": 0.05,
    "label lost": 0.05,
    "name taken": 0.3,
    "foreign": 0.1,
    "pause": 0.1,
    "resume": 0.3,
    "drain": 0.1,
    "pool gone": 0.06,
    "pool changed": 0.08,
    "pipeline paused": 0.06,
    "run canceled": 0.1,
    # of the seed
    "lists lag": 1.0,
    "never boots": 0.2,
}


@dataclass(slots=True)
class Chaos:
    """The faults of one seed: each kind is there in half of the seeds, so that few mask others."""

    rng: random.Random
    rates: dict[str, float]
    get_lies: int = 0

    @classmethod
    def of(cls, rng: random.Random) -> Chaos:
        scale = rng.choice([0.5, 1.0, 1.5])
        return cls(rng, {kind: rate * scale for kind, rate in _RATES.items() if rng.random() < 0.5})

    def happens(self, kind: str) -> bool:
        rate = self.rates.get(kind, 0)
        return rate > 0 and self.rng.random() < rate

    def end(self) -> None:
        """From now on nothing goes wrong."""
        self.rates.clear()

    def fault(self, verb: str) -> Fault | None:
        """What a call of the cloud meets."""
        match verb:
            case "create":
                return self._create()
            case "delete":
                return self._delete()
            case "get" if self.happens("get: a lie"):
                self.get_lies += 1
                return Fault(effect=Effect.NONE)
        if self.happens(f"{verb}: fails"):
            return Fault(says=WORDS[Transient], effect=Effect.NONE)
        return Fault(seconds=self.rng.uniform(1, 20), effect=Effect.DONE) if self.happens(f"{verb}: slow") else None

    def trouble(self, kind: str, stack: str) -> OrcaError | None:
        """What keeps the engine from beginning an operation, or from writing its end down."""
        if kind.endswith(" ended"):
            if not self.happens("engine: post-step"):
                return None
            said = f"{stack}: post-step event returned an error"
            return self.rng.choice([OutcomeUnknown(said), EngineFailed(said)])
        if kind != "state" and self.happens("engine: locked"):
            return StackLocked(f"{stack}: another operation holds the stack's lock")
        if self.happens("engine: state away"):
            return Transient(f"{stack}: connection refused")
        if kind != "state" and self.happens("engine: program"):
            return EngineFailed(f"{stack}: the program failed")
        return None

    def _create(self) -> Fault | None:
        rng = self.rng
        kinds = {
            "create: quota": Fault(says=WORDS[QuotaExceeded], effect=Effect.NONE, seconds=rng.uniform(0, 5)),
            "create: refused": Fault(says=WORDS[Refused], effect=Effect.NONE),
            "create: forbidden": Fault(says=WORDS[AuthFailed], effect=Effect.NONE),
            "create: rate limit": Fault(says=WORDS[Transient], effect=Effect.NONE),
            "create: stock-out": Fault(says=rng.choice(STOCK_OUTS), effect=Effect.NONE, seconds=rng.uniform(0, 60)),
            "create: made, and said to have failed": Fault(
                says=rng.choice([WORDS[Transient], STOCK_OUTS[0]]), effect=Effect.DONE, seconds=rng.uniform(0, 30)
            ),
            "create: late": Fault(says=WORDS[Transient], effect=Effect.LATE, late_seconds=rng.uniform(1, 90)),
            "create: slow": Fault(effect=Effect.DONE, seconds=rng.uniform(5, 120)),
            "create: a lie": Fault(effect=Effect.NONE),
        }
        return next((fault for kind, fault in kinds.items() if self.happens(kind)), None)

    def _delete(self) -> Fault | None:
        rng = self.rng
        kinds = {
            "delete: fails": Fault(says=WORDS[Transient], effect=Effect.NONE),
            "delete: a lie": Fault(effect=Effect.NONE),
            "delete: late": Fault(effect=Effect.LATE, late_seconds=rng.uniform(1, 60)),
            "delete: slow": Fault(effect=Effect.DONE, seconds=rng.uniform(5, 90)),
        }
        return next((fault for kind, fault in kinds.items() if self.happens(kind)), None)
