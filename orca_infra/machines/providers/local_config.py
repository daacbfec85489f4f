"""The make-believe cloud of the local provider, as `[local]` of orca.toml describes it. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCloud:
    """What the local provider's cloud has room for, and how long it takes to make a machine.

    Attributes:
        locations: for each location, how many machines of each type it has room for. Empty: every location has room
            for every type, without limit.
        create_seconds: how long one create takes; 0 or more.
        architectures: of the types for which one is stated; the machines are what this machine is, whatever it says.

    """

    locations: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    create_seconds: float = 0
    architectures: Mapping[str, str] = field(default_factory=dict)
