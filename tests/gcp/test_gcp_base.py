"""What the base declares on Google Cloud: as it is registered with the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any

import pytest

from orca_infra.errors import Refused
from orca_infra.machines.providers.gcp_base import gcp_base, regions_of, subnet_ranges
from orca_infra.machines.providers.gcp_config import GcpCloud
from orca_infra.stack.program import Registered

ID = "abcdefghijklmnop"
ZONES = ("us-central1-a", "us-central1-b", "europe-west4-a")


class Recorder:
    """Takes every resource for made, and keeps what it was declared as."""

    def __init__(self) -> None:
        self.declared: dict[str, tuple[str, dict[str, Any]]] = {}
        self.outputs: dict[str, Any] = {}

    def register(self, kind: str, name: str, properties: Mapping[str, Any], **_: Any) -> Any:
        self.declared[name] = (kind, dict(properties))
        return self

    def result(self) -> Registered:
        return Registered(urn="urn", id="id", outputs={})


@pytest.fixture
def declared() -> Callable[..., dict[str, tuple[str, dict[str, Any]]]]:
    """Declares the base of a configuration and gives what came to the engine: name -> (type, inputs)."""

    def declare(config: GcpCloud, zones: tuple[str, ...] = ZONES) -> dict[str, tuple[str, dict[str, Any]]]:
        recorder: Any = Recorder()
        gcp_base(ID, config, zones)(recorder, Registered(urn="urn", id=ID, outputs={}))
        return dict(recorder.declared)

    return declare


Declared = Callable[..., dict[str, tuple[str, dict[str, Any]]]]


def test_a_project_alone_gets_services_a_closed_network_and_an_account_with_few_rights(declared: Declared) -> None:
    made = declared(GcpCloud(project="p"))
    kinds = sorted(kind for kind, _ in made.values())
    assert kinds.count("gcp:projects/service:Service") == 3
    assert made["network"][1]["name"] == f"orca-{ID}"
    assert made["network"][1]["autoCreateSubnetworks"] is False
    for region in ("us-central1", "europe-west4"):
        subnetwork = made[f"subnetwork-{region}"][1]
        assert (subnetwork["name"], subnetwork["region"]) == (f"orca-{ID}", region)
        assert subnetwork["privateIpGoogleAccess"] is True
    firewall = made["firewall"][1]
    assert firewall["name"] == f"orca-{ID}-deny"
    assert firewall["denies"] == [{"protocol": "all"}]
    assert "allows" not in firewall
    assert made["machines"][1]["accountId"] == f"orca-{ID}"
    roles = [inputs["role"] for kind, inputs in made.values() if "IAMMember" in kind]
    assert roles == ["roles/artifactregistry.reader"]
    assert all(inputs.get("project", "p") == "p" for _, inputs in made.values())


def test_what_the_configuration_names_is_not_made(declared: Declared) -> None:
    made = declared(GcpCloud(project="p", network="shared", service_account="workers@p.iam.gserviceaccount.com"))
    assert {kind for kind, _ in made.values()} == {"gcp:projects/service:Service"}


def test_a_database_secret_is_readable_by_the_machines_and_by_that_right_alone(declared: Declared) -> None:
    made = declared(GcpCloud(project="p", database_secret="projects/q/secrets/orca-db"))
    kind, inputs = made["database-secret"]
    assert "secretmanager" in kind
    assert (inputs["project"], inputs["secretId"]) == ("q", "orca-db")
    assert inputs["member"] == f"serviceAccount:orca-{ID}@p.iam.gserviceaccount.com"


def test_a_regions_addresses_are_the_same_whatever_other_regions_there_are() -> None:
    assert regions_of(ZONES) == ["europe-west4", "us-central1"]
    alone = subnet_ranges(["us-central1"])
    assert subnet_ranges(["europe-west4", "us-central1"])["us-central1"] == alone["us-central1"]


def test_regions_whose_addresses_would_be_the_same_are_refused() -> None:
    names = [f"land-place{n}" for n in range(200)]
    pairs = [
        pair
        for pair in combinations(names, 2)
        if subnet_ranges([pair[0]])[pair[0]] == subnet_ranges([pair[1]])[pair[1]]
    ]
    assert pairs
    with pytest.raises(Refused, match="same addresses"):
        subnet_ranges(pairs[0])
