"""The policies of worker machines and of networks on Google Cloud."""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from orca_infra.policy.model import UNKNOWN, Resource, Rule, Values, Violation, matches, rows, table, texts

GCP_MACHINE = "gcp:compute/instance:Instance"
#: A machine's type, and where each of its resources says what kind it is and where.
MACHINES = {GCP_MACHINE: ("machineType", "zone"), "orca:index:Machine": ("type", "location")}
POOL_LABEL = "orca-pool"

_ADDRESSES = ("gcp:compute/address:Address", "gcp:compute/globalAddress:GlobalAddress")
#: Prefixes shorter than those of the largest private networks, 10.0.0.0/8 and fc00::/7: half the world is no smaller door.
_SHORTEST_PREFIX = {4: 8, 6: 7}
_SERVICES_TO_OUTSIDE = ("LoadBalancer", "NodePort")


def check_types(resource: Resource, values: Values) -> Iterator[Violation]:
    """Machines are of types that are allowed."""
    if resource.type not in MACHINES or not values["allowed"]:
        return
    kind = resource.props.get(MACHINES[resource.type][0])
    if isinstance(kind, str) and not matches(_last(kind), values["allowed"]):
        yield Violation(
            resource=resource,
            what=f"machines of type {_last(kind)} are not allowed ({', '.join(values['allowed'])})",
            remedy="take that type out of the pool's `types` in orca.toml, or add it to `allowed` of machine-types",
        )


def check_locations(resource: Resource, values: Values) -> Iterator[Violation]:
    """Machines are in locations that are allowed."""
    if resource.type not in MACHINES or not values["allowed"]:
        return
    location = resource.props.get(MACHINES[resource.type][1])
    if isinstance(location, str) and not matches(_last(location), values["allowed"]):
        yield Violation(
            resource=resource,
            what=f"machines in {_last(location)} are not allowed ({', '.join(values['allowed'])})",
            remedy="take it out of `locations` in orca.toml, or add it to `allowed` of machine-locations",
        )


def check_counts(resources: Sequence[Resource], values: Values) -> Iterator[Violation]:
    """A pool, and a stack, has at most so many machines; 0 is no limit."""
    machines = [resource for resource in resources if resource.type in MACHINES]
    pools = Counter(str(table(machine.props.get("labels")).get(POOL_LABEL, "")) for machine in machines)
    for pool, count in sorted(pools.items()):
        if 0 < values["mostPerPool"] < count:
            yield Violation(
                resource=next(m for m in machines if str(table(m.props.get("labels")).get(POOL_LABEL, "")) == pool),
                what=f"pool {pool or '(without a label)'} has {count} machines, more than {values['mostPerPool']:g}",
                remedy="lower the pool's max_machines in orca.toml, or raise mostPerPool of machine-counts",
            )
    if 0 < values["most"] < len(machines):
        yield Violation(
            resource=None,
            what=f"it has {len(machines)} machines, more than {values['most']:g}",
            remedy="lower max_machines_total in orca.toml, or raise `most` of machine-counts",
        )


def check_addresses(resource: Resource, values: Values) -> Iterator[Violation]:
    """Nothing has an address outside, but what is named in `allow`."""
    if matches(resource.name, values["allow"]):
        return
    allow = "or name it in `allow` of no-external-address"
    if resource.type == GCP_MACHINE:
        faces = rows(resource.props.get("networkInterfaces"))
        if any(face.get("accessConfigs") or face.get("ipv6AccessConfigs") for face in faces):
            yield Violation(
                resource=resource,
                what="it has an external address",
                remedy=f"set external_address = false in [gcp] of orca.toml, {allow}",
            )
    elif resource.type in _ADDRESSES and resource.props.get("addressType", "EXTERNAL") == "EXTERNAL":
        yield Violation(
            resource=resource, what="it is an external address", remedy=f"set addressType to INTERNAL, {allow}"
        )
    elif resource.kind == "Service" and resource.type.startswith("kubernetes:"):
        spec = table(resource.props.get("spec"))
        if spec.get("type") in _SERVICES_TO_OUTSIDE or spec.get("externalIPs"):
            yield Violation(
                resource=resource,
                what=f"it can be reached from outside the cluster (type {spec.get('type', 'ClusterIP')})",
                remedy=f"make it of type ClusterIP without externalIPs, {allow}",
            )


def check_firewalls(resource: Resource, values: Values) -> Iterator[Violation]:
    """No rule lets everybody in, but what is named in `allow`."""
    if matches(resource.name, values["allow"]) or not _lets_everybody_in(resource):
        return
    yield Violation(
        resource=resource,
        what="it lets in from everywhere",
        remedy="narrow its sources to the addresses that need it, or name it in `allow` of no-open-firewall",
    )


def _lets_everybody_in(resource: Resource) -> bool:
    props = resource.props
    if resource.type == "gcp:compute/firewall:Firewall":
        if props.get("disabled") is True or not props.get("allows") or props.get("direction", "INGRESS") != "INGRESS":
            return False
        sources = props.get("sourceRanges")
        if sources is UNKNOWN:
            return False
        # Without any source a rule of Google Cloud is for all of them.
        stated = sources or props.get("sourceTags") or props.get("sourceServiceAccounts")
        return not stated or any(map(_is_everywhere, sources or []))
    if resource.type == "kubernetes:networking.k8s.io/v1:NetworkPolicy":
        entrances = rows(table(props.get("spec")).get("ingress"))
        sources = [source for entrance in entrances for source in rows(entrance.get("from"))]
        return any(_is_everywhere(table(source.get("ipBlock")).get("cidr")) for source in sources)
    return False


def _is_everywhere(source: object) -> bool:
    try:
        network = ipaddress.ip_network(str(source), strict=False)
    except ValueError:
        return False
    return network.prefixlen < _SHORTEST_PREFIX[network.version]


def _last(path: str) -> str:
    """The name at the end of a self link: `zones/us-central1-a/machineTypes/e2-small` is e2-small."""
    return re.split(r"/", path)[-1]


RULES = (
    Rule(
        name="machine-types",
        description="Worker machines are of allowed types.",
        check=check_types,
        properties={"allowed": texts("The machine types that are allowed; * stands for anything. Empty: all.")},
    ),
    Rule(
        name="machine-locations",
        description="Worker machines are in allowed locations.",
        check=check_locations,
        properties={"allowed": texts("The locations that are allowed; * stands for anything. Empty: all.")},
    ),
    Rule(
        name="machine-counts",
        description="There are no more worker machines than allowed.",
        check_stack=check_counts,
        properties={
            "mostPerPool": {
                "type": "integer",
                "minimum": 0,
                "default": 0,
                "description": "The most machines of one pool. 0: what orca.toml says.",
            },
            "most": {
                "type": "integer",
                "minimum": 0,
                "default": 0,
                "description": "The most machines of all pools. 0: what orca.toml says.",
            },
        },
    ),
    Rule(
        name="no-external-address",
        description="Machines and Services have no address outside.",
        check=check_addresses,
        properties={"allow": texts("Resources that may have one, by name; * stands for anything.")},
    ),
    Rule(
        name="no-open-firewall",
        description="No firewall lets everybody in.",
        check=check_firewalls,
        properties={"allow": texts("Firewalls and network policies that may, by name; * stands for anything.")},
    ),
)
