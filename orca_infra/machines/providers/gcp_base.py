"""What the base of a stack makes on Google Cloud for its machines: API services, a network, a service account.

Only what `[gcp]` of orca.toml does not name itself. Networks and accounts have no labels: the stack's id is in their names.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Iterable, Mapping, Sequence

import pulumi

from orca_infra.errors import Refused
from orca_infra.machines.providers.gcp_config import GcpCloud, own_account, own_name, region_of

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


def declare_gcp_base(
    stack_id: str, config: GcpCloud, zones: Iterable[str], *, depends_on: Sequence[pulumi.Resource] = ()
) -> None:
    """Declare what machines in these zones need and `config` does not name. Raises Refused (`subnet_ranges`)."""
    # Imported here: it is heavy, and only stacks on Google Cloud need it.
    from pulumi_gcp import projects

    services = ["compute.googleapis.com", "artifactregistry.googleapis.com", "iam.googleapis.com"]
    services += ["secretmanager.googleapis.com"] if config.database_secret else []
    # Others may use them: they stay on when the stack goes.
    enabled = [
        projects.Service(
            f"service-{service.partition('.')[0]}",
            project=config.project,
            service=service,
            disable_on_destroy=False,
            opts=pulumi.ResourceOptions(depends_on=list(depends_on)),
        )
        for service in services
    ]
    options = pulumi.ResourceOptions(depends_on=[*depends_on, *enabled])
    if not config.network and not config.subnetwork:
        _declare_network(stack_id, config, regions_of(zones), options)
    if not config.service_account:
        _declare_account(stack_id, config, options)


def _declare_network(stack_id: str, config: GcpCloud, regions: Sequence[str], options: pulumi.ResourceOptions) -> None:
    from pulumi_gcp import compute

    name = own_name(stack_id)
    ranges = subnet_ranges(regions)
    network = compute.Network(
        "network",
        name=name,
        project=config.project,
        auto_create_subnetworks=False,
        description=f"orca-infra's machines of stack {stack_id}",
        opts=options,
    )
    for region in regions:
        compute.Subnetwork(
            f"subnetwork-{region}",
            name=name,
            project=config.project,
            region=region,
            network=network.self_link,
            ip_cidr_range=ranges[region],
            # Without an address of its own a machine reaches Google's services by this: registries, Secret Manager.
            private_ip_google_access=True,
            opts=options,
        )
    # A network of one's own lets nothing in as it is; this keeps it so when somebody adds a rule that is less strict.
    compute.Firewall(
        "firewall",
        name=f"{name}-deny",
        project=config.project,
        network=network.self_link,
        direction="INGRESS",
        priority=900,
        denies=[compute.FirewallDenyArgs(protocol="all")],
        source_ranges=["0.0.0.0/0"],
        target_tags=[name],
        opts=options,
    )


def _declare_account(stack_id: str, config: GcpCloud, options: pulumi.ResourceOptions) -> None:
    from pulumi_gcp import projects, secretmanager, serviceaccount

    account = serviceaccount.Account(
        "machines",
        account_id=own_name(stack_id),
        project=config.project,
        display_name="orca-infra's machines",
        opts=options,
    )
    member = f"serviceAccount:{own_account(stack_id, config.project)}"
    after = pulumi.ResourceOptions.merge(options, pulumi.ResourceOptions(depends_on=[account]))
    for role in _ROLES:
        projects.IAMMember(
            f"role-{role.rpartition('/')[2]}", project=config.project, role=role, member=member, opts=after
        )
    if config.database_secret:
        parts = config.database_secret.split("/")
        secretmanager.SecretIamMember(
            "database-secret",
            project=parts[1],
            secret_id=parts[3],
            role="roles/secretmanager.secretAccessor",
            member=member,
            opts=after,
        )
