"""Provider `local`: machines are process groups on this machine, so that the whole of it can be seen on a laptop."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from orca_infra.errors import AuthFailed, Conflict, NoCapacity, OrcaError, QuotaExceeded, Refused, Transient
from orca_infra.machines.model import SeenMachine
from orca_infra.machines.providers.local_cloud import LocalCloud
from orca_infra.machines.providers.local_config import LocalCloud as LocalCloudConfig
from orca_infra.machines.providers.port import TOKEN_PLACEHOLDER, Birth, Declaration

_CODES: dict[str, type[OrcaError]] = {
    "LOCATION_OUT_OF_CAPACITY": NoCapacity,
    "QUOTA_EXCEEDED": QuotaExceeded,
    "INVALID_REQUEST": Refused,
    "PERMISSION_DENIED": AuthFailed,
    "UNAVAILABLE": Transient,
    "ALREADY_EXISTS": Conflict,
}
_CODE = re.compile(rf"({'|'.join(_CODES)}): ?([^\n]*)")


class LocalProvider:
    """The port to the make-believe cloud in `folder`; made anew for each configuration that was read."""

    resource_type = "orca:index:Machine"

    def __init__(self, folder: Path, config: LocalCloudConfig | None = None) -> None:
        """`config`: what orca.toml says of the cloud, for what is not asked of the cloud itself."""
        self._folder = folder
        self._cloud = LocalCloud(folder)
        self._architectures = config.architectures if config else {}

    def configure(self, config: LocalCloudConfig, environment: Mapping[str, str]) -> None:
        """Say what the cloud has, and what its machines find around them (the database, kept out of every declaration)."""
        self._cloud.configure(config.locations, config.create_seconds, environment)

    def render(self, birth: Birth) -> Declaration:
        return {
            "folder": str(self._folder),
            "name": birth.name,
            "location": birth.location,
            "type": birth.type,
            "labels": dict(birth.labels),
            "argv": ["python", "-m", "orca_infra.machines.worker"],
            "environment": {"ORCA_WORKER": birth.name, "ORCA_POOL": birth.pool, "ORCA_TOKEN": TOKEN_PLACEHOLDER},
        }

    def list(self) -> Sequence[SeenMachine]:
        # A cloud that no loop has configured yet has no machines; one that lost its folder is found out by `get`.
        return self._cloud.list() if self._folder.exists() else []

    def get(self, name: str, location: str) -> SeenMachine | None:  # noqa: ARG002
        return self._cloud.get(name)

    def delete(self, machine: SeenMachine) -> None:
        self._cloud.delete(machine.name, uid=machine.uid)

    def relabel(self, machine: SeenMachine, labels: Mapping[str, str]) -> None:
        self._cloud.put_labels(machine.name, machine.uid, labels)

    def console(self, name: str, location: str) -> str:  # noqa: ARG002
        return self._cloud.console(name)

    def architectures(self) -> Mapping[str, str]:
        return self._architectures

    def classify(self, message: str) -> OrcaError:
        match = _CODE.search(message)
        if match is None:
            return Transient(message)
        return _CODES[match[1]](f"{match[1]}: {match[2]}".strip())
