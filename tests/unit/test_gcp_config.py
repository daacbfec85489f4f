"""`[gcp]` of orca.toml, and pools that need it."""

from __future__ import annotations

import pytest

from orca_infra.config import parse_config
from orca_infra.errors import ConfigError
from orca_infra.machines.providers.gcp_config import GcpCloud

POOL = """
[pools.p]
provider = "gcp"
image = "registry.example/worker:1"
locations = ["us-central1-a"]
max_machines = 1
idle_seconds = "10m"
types = [{ type = "e2-small" }]
"""
GCP = '[gcp]\nproject = "my-project-123"\n'


def mistakes(text: str) -> str:
    with pytest.raises(ConfigError) as raised:
        parse_config(text, "orca.toml")
    return str(raised.value)


def test_a_project_is_enough() -> None:
    assert parse_config(GCP + POOL, "orca.toml").gcp == GcpCloud(project="my-project-123")
    assert parse_config("[pools]", "orca.toml").gcp is None


def test_every_key_reaches_the_provider() -> None:
    text = """
[gcp]
project = "example.com:my-project"
network = "n"
subnetwork = "s"
service_account = "a@b"
boot_image = "debian-cloud/debian-13"
boot_image_arm64 = "debian-cloud/debian-13-arm64"
disk_gb = 50
disk_type = "pd-ssd"
external_address = true
secure_boot = false
environment = { ORCA_HEAD = "10.0.0.3:7" }
database_secret = "projects/p/secrets/orca-db"
[gcp.types.z99-future]
architecture = "arm64"
"""
    assert parse_config(text, "orca.toml").gcp == GcpCloud(
        project="example.com:my-project",
        network="n",
        subnetwork="s",
        service_account="a@b",
        boot_image="debian-cloud/debian-13",
        boot_image_arm64="debian-cloud/debian-13-arm64",
        disk_gb=50,
        disk_type="pd-ssd",
        external_address=True,
        secure_boot=False,
        environment={"ORCA_HEAD": "10.0.0.3:7"},
        database_secret="projects/p/secrets/orca-db",
        architectures={"z99-future": "arm64"},
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (POOL, "[pools.p] provider: needs [gcp] with project"),
        ("[gcp]\n" + POOL, 'orca.toml:1: [gcp] project: missing; add project = "my-project-123"'),
        (GCP.replace("my-project-123", "My Project") + POOL, "[gcp] project: must be a project's id"),
        (GCP + 'database_secret = "orca-db"\n' + POOL, "must be a secret's name"),
        (GCP + POOL.replace("us-central1-a", "us-central1"), 'locations: "us-central1" is no zone of Google Cloud'),
        (GCP + POOL.replace('"e2-small"', '"e2-small", locations = ["x"]'), '"x" is no zone of Google Cloud'),
        (GCP + 'proyect = "x"\n' + POOL, "did you mean project?"),
        (GCP + "disk_gb = 1\n" + POOL, "must be at least 10"),
    ],
)
def test_a_mistake_is_named_at_its_key(text: str, says: str) -> None:
    assert says in mistakes(text)


def test_a_pool_of_another_provider_needs_no_zones() -> None:
    assert parse_config(POOL.replace('"gcp"', '"local"').replace("us-central1-a", "east"), "orca.toml").gcp is None
