"""What `[gcp]` of orca.toml says of Google Cloud. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

COS = "projects/cos-cloud/global/images/family/cos-stable"
COS_ARM64 = "projects/cos-cloud/global/images/family/cos-arm64-stable"

ZONE = re.compile(r"[a-z]+(?:-[a-z]+)+[0-9]+-[a-z]")

# Families by https://cloud.google.com/compute/docs/machine-resource; a name that is in none is not stated.
_ARM64 = frozenset({"a4x", "c4a", "n4a", "t2a"})
_AMD64 = frozenset(
    "a2 a3 a4 c2 c2d c3 c3d c4 c4d custom e2 f1 g1 g2 g4 h3 h4d m1 m2 m3 m4 n1 n2 n2d n4 n4d t2d x4 z3".split()  # noqa: SIM905
)
# They take no persistent disks, only hyperdisks.
_HYPERDISK = frozenset({"a4", "a4x", "c4", "c4a", "c4d", "g4", "h4d", "m4", "n4", "n4a", "n4d", "x4"})
#: Machines with accelerators or of one whole host: they stop for their host's maintenance.
CANNOT_MIGRATE = frozenset({"a2", "a3", "a4", "a4x", "g2", "g4", "h3", "h4d", "m4", "x4", "z3"})


@dataclass(frozen=True, slots=True, kw_only=True)
class GcpCloud:
    """Where machines are made on Google Cloud, and what all of them have.

    Attributes:
        project: the project's id.
        network, subnetwork: names or self links; empty for the stack's own, which the base makes.
        service_account: the e-mail address that machines run as; empty for the stack's own.
        boot_image, boot_image_arm64: by the type's architecture. Of project cos-cloud or ubuntu-os-cloud: cloud-init boots
            them; any other by its startup script.
        disk_gb, disk_type: of the boot disk; no type: what suits the machine's family.
        external_address: whether machines have an address of their own on the internet.
        secure_boot: whether machines refuse unsigned kernels and drivers.
        environment: what workers find around them; no secrets.
        database_secret: `projects/P/secrets/S` of Secret Manager, whose value workers find as ORCA_DB.
        architectures: by type, for types whose family this version does not know.

    """

    project: str
    network: str = ""
    subnetwork: str = ""
    service_account: str = ""
    boot_image: str = COS
    boot_image_arm64: str = COS_ARM64
    disk_gb: int = 30
    disk_type: str = ""
    external_address: bool = False
    secure_boot: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)
    database_secret: str = ""
    architectures: Mapping[str, str] = field(default_factory=dict)

    def architecture(self, machine_type: str) -> str:
        """As Go names it; empty when nothing states it."""
        family = family_of(machine_type)
        known = "arm64" if family in _ARM64 else "amd64" if family in _AMD64 else ""
        return self.architectures.get(machine_type, known)

    def disk_type_of(self, machine_type: str) -> str:
        """The boot disk's type for a machine of this type."""
        return self.disk_type or ("hyperdisk-balanced" if family_of(machine_type) in _HYPERDISK else "pd-balanced")


def family_of(machine_type: str) -> str:
    """`n2d` of `n2d-standard-4`."""
    return machine_type.partition("-")[0]


def region_of(zone: str) -> str:
    """`us-central1` of `us-central1-a`."""
    return zone.rpartition("-")[0]


def own_name(stack_id: str) -> str:
    """What the stack's own network, subnetworks, firewalls and service account are called: they have no labels."""
    return f"orca-{stack_id}"


def own_account(stack_id: str, project: str) -> str:
    """The e-mail address of the stack's own service account; a project of a domain has its parts turned round."""
    domain, _, name = project.rpartition(":")
    return f"{own_name(stack_id)}@{name}{'.' + domain if domain else ''}.iam.gserviceaccount.com"
