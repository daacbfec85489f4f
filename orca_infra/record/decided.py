"""What one pass knew and what it decided, for each scope: enough to decide again. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from orca_infra.machines import decide as machines_decide
from orca_infra.machines import model as machines
from orca_infra.runs import decide as runs_decide
from orca_infra.runs import model as runs
from orca_infra.runtimes import decide as runtimes_decide
from orca_infra.runtimes import model as runtimes


class Scope(StrEnum):
    """What a pass is about."""

    MACHINES = "machines"
    RUNS = "runs"
    RUNTIMES = "runtimes"


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinesDecided:
    """A pass over the machine pools: all that `decide` was given, and its plan."""

    snapshot: machines.Snapshot
    pools: tuple[machines.Pool, ...]
    limits: machines.Limits
    plan: machines.Plan

    @property
    def scope(self) -> Scope:
        return Scope.MACHINES

    @property
    def now(self) -> datetime:
        return self.snapshot.now

    def again(self) -> machines.Plan:
        """The plan that this version of the program makes of the same."""
        return machines_decide.decide(self.snapshot, self.pools, self.limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsDecided:
    """A pass over the run clusters."""

    snapshot: runs.RunSnapshot
    limits: runs.RunLimits
    plan: runs.RunPlan

    @property
    def scope(self) -> Scope:
        return Scope.RUNS

    @property
    def now(self) -> datetime:
        return self.snapshot.now

    def again(self) -> runs.RunPlan:
        """The plan that this version of the program makes of the same."""
        return runs_decide.decide(self.snapshot, self.limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimesDecided:
    """A pass over the runtime pools."""

    snapshot: runtimes.RuntimeSnapshot
    limits: runtimes.RuntimeLimits
    plan: runtimes.RuntimePlan

    @property
    def scope(self) -> Scope:
        return Scope.RUNTIMES

    @property
    def now(self) -> datetime:
        return self.snapshot.now

    def again(self) -> runtimes.RuntimePlan:
        """The plan that this version of the program makes of the same."""
        return runtimes_decide.decide(self.snapshot, self.limits)


Decided = MachinesDecided | RunsDecided | RuntimesDecided
