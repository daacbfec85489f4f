"""What the base of a stack makes on Google Cloud for its machines: API services, a network, a service account.

Only what `[gcp]` of orca.toml does not name itself. Networks and accounts have no labels: the stack's id is in their names.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from orca_infra.errors import Refused
from orca_infra.machines.providers.gcp_config import GcpCloud, own_account, own_name, region_of
from orca_infra.stack.program import Registered, Registrar

#: Subnetworks are cut from here, by their region's name, so that another region never moves one.
_RANGE = ipaddress.ip_network("10.128.0.0/9")
_PREFIX = 20
#: What machines may do: pull images, and no more.
_ROLES = ("roles/artifactregistry.reader",)


def regions_of(zones: Iterable[str]) -> list[str]:
    """The regions of these zones, each once."""
    return sorted({region_of(zone) for zone in zones})


def subnet_ranges(regions: Sequence[str]) -> Mapping[str, str]:
    """By region, the addresses of its subnetwork; the same whatever other regions there are.

    Raises Refused when two regions would have the same, which one in a thousand pairs has.
    """
    slots = 2 ** (_PREFIX - _RANGE.prefixlen)
    ranges: dict[str, str] = {}
    for region in regions:
        slot = int.from_bytes(hashlib.sha256(region.encode()).digest()[:4], "big") % slots
        first = int(_RANGE.network_address) + slot * 2 ** (32 - _PREFIX)
        ranges[region] = f"{ipaddress.ip_address(first)}/{_PREFIX}"
        others = [other for other in ranges if other != region and ranges[other] == ranges[region]]
        if others:
            raise Refused(
                f"the subnetworks of {region} and {others[0]} would have the same addresses; "
                "name a network of your own in [gcp], or leave one region out"
            )
    return ranges


def gcp_base(stack_id: str, config: GcpCloud, zones: Iterable[str]) -> Callable[[Registrar, Registered], None]:
    """What declares that which machines in these zones need and `config` does not name. Raises Refused (`subnet_ranges`)."""
    own_network = not config.network and not config.subnetwork
    ranges = subnet_ranges(regions_of(zones)) if own_network else {}

    def declare(registrar: Registrar, identity: Registered) -> None:
        enabled = _declare_services(registrar, config, identity)
        pending = _Pending(registrar, [identity, *enabled])
        if own_network:
            _declare_network(pending, stack_id, config, ranges)
        if not config.service_account:
            _declare_account(pending, stack_id, config)
        pending.wait()
        registrar.outputs["gcp"] = {
            "project": config.project,
            "network": config.network or config.subnetwork or _network(stack_id, config),
            "serviceAccount": config.service_account or own_account(stack_id, config.project),
        }

    return declare


class _Pending:
    """Registrations that stand side by side after others, and are waited for together."""

    def __init__(self, registrar: Registrar, after: Sequence[Registered]) -> None:
        self._registrar, self._after, self._calls = registrar, list(after), list[Any]()

    def register(self, kind: str, name: str, properties: Mapping[str, Any], *after: Registered) -> None:
        call = self._registrar.register(kind, name, properties, depends_on=[*self._after, *after])
        self._calls.append(call)

    def made(self, kind: str, name: str, properties: Mapping[str, Any]) -> list[Registered]:
        """What was made of one that others stand on; nothing when it failed."""
        made = self._registrar.register(kind, name, properties, depends_on=self._after).result()
        return [made] if made else []

    def wait(self) -> None:
        for call in self._calls:
            call.result()


def _declare_services(registrar: Registrar, config: GcpCloud, identity: Registered) -> list[Registered]:
    services = ["compute.googleapis.com", "artifactregistry.googleapis.com", "iam.googleapis.com"]
    services += ["secretmanager.googleapis.com"] if config.database_secret else []
    # Others may use them: they stay on when the stack goes.
    calls = [
        registrar.register(
            "gcp:projects/service:Service",
            f"service-{service.partition('.')[0]}",
            {"project": config.project, "service": service, "disableOnDestroy": False},
            depends_on=[identity],
        )
        for service in services
    ]
    return [made for made in (call.result() for call in calls) if made is not None]


def _network(stack_id: str, config: GcpCloud) -> str:
    return f"projects/{config.project}/global/networks/{own_name(stack_id)}"


def _declare_network(pending: _Pending, stack_id: str, config: GcpCloud, ranges: Mapping[str, str]) -> None:
    name = own_name(stack_id)
    network = pending.made(
        "gcp:compute/network:Network",
        "network",
        {
            "name": name,
            "project": config.project,
            "autoCreateSubnetworks": False,
            "description": f"orca-infra's machines of stack {stack_id}",
        },
    )
    for region, addresses in ranges.items():
        pending.register(
            "gcp:compute/subnetwork:Subnetwork",
            f"subnetwork-{region}",
            {
                "name": name,
                "project": config.project,
                "region": region,
                "network": _network(stack_id, config),
                "ipCidrRange": addresses,
                # Without an address of its own a machine reaches Google's services by this: registries, Secret Manager.
                "privateIpGoogleAccess": True,
            },
            *network,
        )
    # A network of one's own lets nothing in as it is; this keeps it so when somebody adds a rule that is less strict.
    pending.register(
        "gcp:compute/firewall:Firewall",
        "firewall",
        {
            "name": f"{name}-deny",
            "project": config.project,
            "network": _network(stack_id, config),
            "direction": "INGRESS",
            "priority": 900,
            "denies": [{"protocol": "all"}],
            "sourceRanges": ["0.0.0.0/0"],
            "targetTags": [name],
        },
        *network,
    )


def _declare_account(pending: _Pending, stack_id: str, config: GcpCloud) -> None:
    account = pending.made(
        "gcp:serviceaccount/account:Account",
        "machines",
        {"accountId": own_name(stack_id), "project": config.project, "displayName": "orca-infra's machines"},
    )
    member = f"serviceAccount:{own_account(stack_id, config.project)}"
    for role in _ROLES:
        pending.register(
            "gcp:projects/iAMMember:IAMMember",
            f"role-{role.rpartition('/')[2]}",
            {"project": config.project, "role": role, "member": member},
            *account,
        )
    if config.database_secret:
        parts = config.database_secret.split("/")
        pending.register(
            "gcp:secretmanager/secretIamMember:SecretIamMember",
            "database-secret",
            {
                "project": parts[1],
                "secretId": parts[3],
                "role": "roles/secretmanager.secretAccessor",
                "member": member,
            },
            *account,
        )
