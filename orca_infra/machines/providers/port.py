"""What a machine provider has to do. Adding one: docs/howto/add-a-provider.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from orca_infra.errors import OrcaError
from orca_infra.machines.model import SeenMachine

#: Stands in a rendered declaration where the token goes at the create.
TOKEN_PLACEHOLDER = "{{orca-token}}"  # noqa: S105  (it only stands where the token goes)

Declaration = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Birth:
    """What a machine is to be. `labels` carry the pool and the stack's identity."""

    name: str
    pool: str
    type: str
    location: str
    spot: bool
    image: str
    labels: Mapping[str, str]


class MachineProvider(Protocol):
    """One cloud.

    Every verb raises the errors of orca_infra.errors by meaning: NoCapacity, QuotaExceeded, Refused, AuthFailed, Transient,
    Conflict (the name is taken).
    """

    @property
    def resource_type(self) -> str:
        """The Pulumi type of a machine, as URNs have it."""

    def render(self, birth: Birth) -> Declaration:
        """The machine's declaration, JSON all through, with TOKEN_PLACEHOLDER for the token. Made once, kept in the row."""

    def list(self) -> Sequence[SeenMachine]:
        """Every machine whose identity could be one of ours, and every other whose name could collide, if it can be had."""

    def get(self, name: str, location: str) -> SeenMachine | None:
        """This very name, asked for directly: None only when the provider says that there is none."""

    def delete(self, machine: SeenMachine) -> None:
        """Delete a stray; one that is gone, or another of the same name, is left alone."""

    def relabel(self, machine: SeenMachine, labels: Mapping[str, str]) -> None:
        """Give this very machine these labels besides those it has; one that is gone is fine, and another is left alone."""

    def console(self, name: str, location: str) -> str:
        """The end of what its serial console said; empty when there is none."""

    def architectures(self) -> Mapping[str, str]:
        """By type, its architecture as Go names it (amd64, arm64); a type that is not stated is never left out."""

    def classify(self, message: str) -> OrcaError:
        """What the engine's report of a failed create or delete means."""
