"""Provider `gcp`: machines are instances of Google's Compute Engine, made by Pulumi's provider for Google Cloud."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from orca_infra.errors import OrcaError, Refused
from orca_infra.machines.boot import Boot, cloud_config, startup_script
from orca_infra.machines.model import SeenMachine
from orca_infra.machines.providers.gcp_api import ComputeApi, compute_api
from orca_infra.machines.providers.gcp_config import (
    CANNOT_MIGRATE,
    ZONE,
    GcpCloud,
    family_of,
    own_account,
    own_name,
    region_of,
)
from orca_infra.machines.providers.gcp_errors import classify
from orca_infra.machines.providers.port import Birth, Declaration

_STACK_LABEL = "orca-stack"
#: Projects whose images boot by cloud-init; others get a startup script, which Google's guest agent runs.
_CLOUD_INIT = ("cos-cloud", "ubuntu-os-cloud")
_SCOPE = "https://www.googleapis.com/auth/cloud-platform"


class GcpProvider:
    """The port to one project. It remembers nothing; its client is shared (`compute_api`)."""

    resource_type = "gcp:compute/instance:Instance"

    def __init__(
        self,
        config: GcpCloud,
        *,
        endpoint: str = "",
        types: Collection[str] = (),
        zones: Collection[str] = (),
        change_wait_seconds: float = 5.0,
        refuses: str = "",
    ) -> None:
        """`endpoint`: GOOGLE_COMPUTE_CUSTOM_ENDPOINT, which Pulumi's provider reads too.

        Args:
            config: what orca.toml says.
            endpoint: another than Google's; empty for Google's.
            types: whose architecture to state: those of the pools.
            zones: where pools make machines; one that cannot be read holds back the pass. None named: any that cannot.
            change_wait_seconds: how long a deletion or a change is looked at; a longer one goes on at Google.
            refuses: why this project is not to be asked, if so; every call is refused then.

        """
        self._config = config
        self._endpoint = endpoint
        self._types = types
        self._zones = frozenset(zones)
        self._change_wait_seconds = change_wait_seconds
        self._refuses = refuses

    def render(self, birth: Birth) -> Declaration:
        """Raises Refused when the location is no zone's name, or a value cannot stand in a worker's environment."""
        config = self._config
        if not ZONE.fullmatch(birth.location):
            raise Refused(
                f"{birth.location!r} is no zone of Google Cloud, such as us-central1-a; mend `locations` of pool {birth.pool}"
            )
        is_arm = config.architecture(birth.type) == "arm64"
        image = config.boot_image_arm64 if is_arm else config.boot_image
        return {
            "project": config.project,
            "name": birth.name,
            "zone": birth.location,
            "machineType": birth.type,
            "labels": dict(birth.labels),
            "tags": [own_name(birth.labels[_STACK_LABEL])],
            "bootDisk": {
                "autoDelete": True,
                "initializeParams": {
                    "image": image,
                    "size": config.disk_gb,
                    "type": config.disk_type_of(birth.type),
                    "labels": dict(birth.labels),
                },
            },
            "networkInterfaces": [self._interface(birth)],
            "serviceAccount": {"email": self._account(birth), "scopes": [_SCOPE]},
            "scheduling": _scheduling(birth),
            "shieldedInstanceConfig": {
                "enableSecureBoot": config.secure_boot,
                "enableVtpm": True,
                "enableIntegrityMonitoring": True,
            },
            "metadata": {
                "serial-port-enable": "true",
                "block-project-ssh-keys": "true",
                **self._boot(birth, image),
            },
            "allowStoppingForUpdate": False,
            "deletionProtection": False,
        }

    def list(self) -> Sequence[SeenMachine]:
        return self._api().list(self._zones)

    def get(self, name: str, location: str) -> SeenMachine | None:
        return self._api().get(name, location)

    def delete(self, machine: SeenMachine) -> None:
        """Raises by meaning when Google says at once, or within a few seconds, that it cannot."""
        self._api().delete(machine.uid, machine.location, wait_seconds=self._change_wait_seconds)

    def relabel(self, machine: SeenMachine, labels: Mapping[str, str]) -> None:
        """Raises by meaning; Transient when somebody else changed its labels at the same time."""
        self._api().relabel(machine.uid, machine.location, labels, wait_seconds=self._change_wait_seconds)

    def console(self, name: str, location: str) -> str:
        return self._api().console(name, location)

    def architectures(self) -> Mapping[str, str]:
        stated = {kind: self._config.architecture(kind) for kind in self._types}
        return {kind: architecture for kind, architecture in stated.items() if architecture}

    def classify(self, message: str) -> OrcaError:
        return classify(message)

    def _api(self) -> ComputeApi:
        if self._refuses:
            raise Refused(self._refuses)
        return compute_api(self._config.project, self._endpoint)

    def _interface(self, birth: Birth) -> Mapping[str, object]:
        config = self._config
        own = own_name(birth.labels[_STACK_LABEL])
        interface: dict[str, object] = {}
        if config.network or config.subnetwork:
            interface.update({"network": config.network} if config.network else {})
            interface.update({"subnetwork": config.subnetwork} if config.subnetwork else {})
        else:
            region = region_of(birth.location)
            interface["network"] = f"projects/{config.project}/global/networks/{own}"
            interface["subnetwork"] = f"projects/{config.project}/regions/{region}/subnetworks/{own}"
        if config.external_address:
            interface["accessConfigs"] = [{"networkTier": "PREMIUM"}]
        return interface

    def _account(self, birth: Birth) -> str:
        return self._config.service_account or own_account(birth.labels[_STACK_LABEL], self._config.project)

    def _boot(self, birth: Birth, image: str) -> Mapping[str, str]:
        boot = Boot(
            image=birth.image,
            worker=birth.name,
            pool=birth.pool,
            environment=self._config.environment,
            database_secret=self._config.database_secret,
        )
        parts = image.split("/")
        if any(project in parts for project in _CLOUD_INIT):
            return {"user-data": cloud_config(boot)}
        return {"startup-script": startup_script(boot)}


def _scheduling(birth: Birth) -> Mapping[str, object]:
    """A spot machine goes when it is preempted, so that no stopped one is left to pay a disk for."""
    stays = "MIGRATE" if family_of(birth.type) not in CANNOT_MIGRATE else "TERMINATE"
    if not birth.spot:
        return {"provisioningModel": "STANDARD", "automaticRestart": True, "onHostMaintenance": stays}
    return {
        "provisioningModel": "SPOT",
        "preemptible": True,
        "automaticRestart": False,
        "onHostMaintenance": "TERMINATE",
        "instanceTerminationAction": "DELETE",
    }
