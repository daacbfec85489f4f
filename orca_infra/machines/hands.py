"""What acting on machines needs: everything that can change the world, and nothing that decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from orca_infra.db.connection import Database
from orca_infra.log import Log
from orca_infra.machines.model import Pool
from orca_infra.machines.providers.port import MachineProvider
from orca_infra.stack.operations import RecordedEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineHands:
    """One pass's: with the providers and the pools of the configuration that it reads."""

    database: Database
    engine: RecordedEngine
    providers: Mapping[str, MachineProvider]
    pools: Mapping[str, Pool]
    family: str
    stack_id: str
    token_key: bytes = field(repr=False)
    logs: Path
    verify: Callable[[], None]
    log: Log
    stopping: Callable[[], bool] = lambda: False
    grace_seconds: float = 0
    parallel: int = 1
