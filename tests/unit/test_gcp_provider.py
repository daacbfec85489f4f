"""Provider `gcp`: what it declares of a machine. What it reads and deletes: test_gcp_api and tests/gcp."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca_infra.errors import Refused
from orca_infra.machines.program import with_token
from orca_infra.machines.providers.gcp import GcpProvider
from orca_infra.machines.providers.gcp_config import COS, COS_ARM64, GcpCloud, own_account, region_of
from orca_infra.machines.providers.port import TOKEN_PLACEHOLDER, Birth
from orca_infra.names import label_value, machine_name, new_stack_id

ID = "abcdefghijklmnop"
NAME = re.compile(r"[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?")
LABEL = re.compile(r"[a-z0-9_-]{0,63}")


def birth(**more: Any) -> Birth:
    values: dict[str, Any] = {
        "name": "orca-p-1",
        "pool": "p",
        "type": "e2-small",
        "location": "us-central1-a",
        "spot": False,
        "image": "registry.example/worker:1",
        "labels": {"orca-stack": ID, "orca-pool": "p"},
    }
    return Birth(**{**values, **more})


def render(config: GcpCloud | None = None, **more: Any) -> dict[str, Any]:
    declared = GcpProvider(config or GcpCloud(project="p")).render(birth(**more))
    return dict(json.loads(json.dumps(declared)))


def test_a_machine_is_shielded_has_no_address_of_its_own_and_its_console_is_on() -> None:
    declared = render()
    assert declared["shieldedInstanceConfig"] == {
        "enableSecureBoot": True,
        "enableVtpm": True,
        "enableIntegrityMonitoring": True,
    }
    [interface] = declared["networkInterfaces"]
    assert "accessConfigs" not in interface
    assert declared["metadata"]["serial-port-enable"] == "true"
    assert declared["bootDisk"]["autoDelete"] is True
    assert declared["deletionProtection"] is False
    assert (declared["zone"], declared["machineType"], declared["project"]) == ("us-central1-a", "e2-small", "p")


def test_network_and_account_are_the_stacks_own_unless_named() -> None:
    own = render()
    [interface] = own["networkInterfaces"]
    assert interface["network"] == f"projects/p/global/networks/orca-{ID}"
    assert interface["subnetwork"] == f"projects/p/regions/us-central1/subnetworks/orca-{ID}"
    assert own["serviceAccount"]["email"] == f"orca-{ID}@p.iam.gserviceaccount.com"
    named = render(GcpCloud(project="p", network="n", subnetwork="s", service_account="a@b", external_address=True))
    [interface] = named["networkInterfaces"]
    assert (interface["network"], interface["subnetwork"]) == ("n", "s")
    assert len(interface["accessConfigs"]) == 1
    assert named["serviceAccount"]["email"] == "a@b"


def test_a_spot_machine_is_deleted_when_it_is_preempted() -> None:
    spot = render(spot=True)["scheduling"]
    assert (spot["provisioningModel"], spot["instanceTerminationAction"]) == ("SPOT", "DELETE")
    assert spot["automaticRestart"] is False
    assert "instanceTerminationAction" not in render()["scheduling"]


@pytest.mark.parametrize(
    ("kind", "architecture", "image", "disk", "maintenance"),
    [
        ("e2-small", "amd64", COS, "pd-balanced", "MIGRATE"),
        ("t2a-standard-1", "arm64", COS_ARM64, "pd-balanced", "MIGRATE"),
        ("c4a-standard-4", "arm64", COS_ARM64, "hyperdisk-balanced", "MIGRATE"),
        ("n4-standard-2", "amd64", COS, "hyperdisk-balanced", "MIGRATE"),
        ("a2-highgpu-1g", "amd64", COS, "pd-balanced", "TERMINATE"),
        ("custom-4-8192", "amd64", COS, "pd-balanced", "MIGRATE"),
        ("z99-future", "", COS, "pd-balanced", "MIGRATE"),
    ],
)
def test_image_disk_and_maintenance_suit_the_type(
    kind: str, architecture: str, image: str, disk: str, maintenance: str
) -> None:
    declared = render(type=kind)
    assert declared["bootDisk"]["initializeParams"]["image"] == image
    assert declared["bootDisk"]["initializeParams"]["type"] == disk
    assert declared["scheduling"]["onHostMaintenance"] == maintenance
    stated = GcpProvider(GcpCloud(project="p"), types=[kind]).architectures()
    assert stated == ({kind: architecture} if architecture else {})


def test_an_architecture_of_the_configuration_counts() -> None:
    config = GcpCloud(project="p", architectures={"z99-future": "arm64"})
    assert GcpProvider(config, types=["z99-future"]).architectures() == {"z99-future": "arm64"}
    assert render(config, type="z99-future")["bootDisk"]["initializeParams"]["image"] == COS_ARM64


def test_the_token_stands_in_one_place_and_is_sealed_at_the_create() -> None:
    declared = render()
    assert json.dumps(declared).count(TOKEN_PLACEHOLDER) == 1
    sealed: list[str] = []

    def seal(value: str) -> str:
        sealed.append(value)
        return "sealed"

    made = with_token(declared, seal, "t" * 64)
    assert made["metadata"]["user-data"] == "sealed"
    assert "t" * 64 in sealed[0]
    assert "t" * 64 not in json.dumps(made)


@pytest.mark.parametrize(
    ("image", "key"),
    [
        (COS, "user-data"),
        ("ubuntu-os-cloud/ubuntu-2404-lts-amd64", "user-data"),
        ("projects/debian-cloud/global/images/family/debian-12", "startup-script"),
        ("debian-cloud/debian-13", "startup-script"),
        ("projects/mine/global/images/cos-cloud-like", "startup-script"),
    ],
)
def test_an_image_boots_by_what_it_has(image: str, key: str) -> None:
    metadata = render(GcpCloud(project="p", boot_image=image))["metadata"]
    assert {name for name in metadata if TOKEN_PLACEHOLDER in metadata[name]} == {key}


@pytest.mark.parametrize("zone", ["a", "us-central1", "US-CENTRAL1-A", "us-central1-a/../x", ""])
def test_what_is_no_zone_is_refused_in_a_sentence(zone: str) -> None:
    with pytest.raises(Refused, match="no zone of Google Cloud"):
        render(location=zone)


@given(st.text(min_size=1, max_size=200).filter(str.isprintable), st.integers(min_value=0, max_value=10**10 - 1))
def test_names_and_labels_are_valid_for_every_pool_and_stack(pool: str, number: int) -> None:
    """Field case M9."""
    stack = new_stack_id()
    labels = {"orca-stack": stack, "orca-pool": label_value(pool)}
    declared = GcpProvider(GcpCloud(project="p")).render(
        birth(name=machine_name(pool, number), pool=pool, labels=labels)
    )
    assert NAME.fullmatch(declared["name"])
    assert all(LABEL.fullmatch(text) for item in declared["labels"].items() for text in item)
    assert all(NAME.fullmatch(tag) for tag in declared["tags"])


def test_regions_and_accounts_are_made_of_names() -> None:
    assert region_of("us-central1-a") == "us-central1"
    assert region_of("northamerica-northeast1-b") == "northamerica-northeast1"
    assert own_account(ID, "example.com:p") == f"orca-{ID}@p.example.com.iam.gserviceaccount.com"
