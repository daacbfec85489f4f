"""The contract suite of the machine providers, run against `gcp` over the fake cloud's HTTP face.

The suite's places `a` and `b` and its type `small` are a zone, another and an ARM type here. The real project that
ORCA_TEST_GCP_PROJECT names, if any, is only read: its list, and a name that nobody has.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orca_infra.errors import AuthFailed, Conflict, NoCapacity, OrcaError, QuotaExceeded, Refused, Transient
from orca_infra.machines.model import MachineState, SeenMachine
from orca_infra.machines.providers.gcp import GcpProvider
from orca_infra.machines.providers.gcp_config import GcpCloud
from orca_infra.machines.providers.port import Birth, Declaration
from orca_infra.testing.fake_gcp import PROJECT, STOCK_OUTS, ApiError, FakeGcp, Fault
from orca_infra.testing.fake_gcp_http import FakeGcpServer

PLACES = {"a": "us-central1-a", "b": "us-central1-b"}
KIND = "t2a-standard-1"
# As Pulumi's provider words what Google says.
WORDS: Mapping[type[OrcaError], tuple[int, str, str]] = {
    QuotaExceeded: (403, "quotaExceeded", "Quota 'CPUS' exceeded.  Limit: 24.0 in region us-central1."),
    Refused: (400, "invalid", "Invalid value for field 'resource.labels': 'X'."),
    AuthFailed: (403, "forbidden", "Required 'compute.instances.create' permission for 'projects/p'"),
    Transient: (503, "backendError", "Backend Error"),
    Conflict: (409, "alreadyExists", "The resource 'projects/p/zones/z/instances/orca-p-1' already exists"),
}


class Translated(GcpProvider):
    """The provider with the suite's names for places and types."""

    def render(self, birth: Birth) -> Declaration:
        place = PLACES[birth.location]
        declared = super().render(replace(birth, location=place, type=KIND))
        return {**declared, "machineType": birth.type}

    def list(self) -> list[SeenMachine]:
        return [_back(machine) for machine in super().list()]

    def get(self, name: str, location: str) -> SeenMachine | None:
        machine = super().get(name, PLACES[location])
        return None if machine is None else _back(machine)

    def delete(self, machine: SeenMachine) -> None:
        super().delete(replace(machine, location=PLACES[machine.location]))

    def relabel(self, machine: SeenMachine, labels: Mapping[str, str]) -> None:
        super().relabel(replace(machine, location=PLACES[machine.location]), labels)

    def console(self, name: str, location: str) -> str:
        return super().console(name, PLACES[location])

    def architectures(self) -> Mapping[str, str]:
        return {"small" if kind == KIND else kind: value for kind, value in super().architectures().items()}


def _back(machine: SeenMachine) -> SeenMachine:
    [place] = [place for place, zone in PLACES.items() if zone == machine.location]
    return replace(machine, location=place, type="small")


class GcpHarness:
    def __init__(self) -> None:
        self.cloud = FakeGcp(capacity={})
        self.server = FakeGcpServer(self.cloud)
        self.provider = Translated(
            GcpCloud(project=PROJECT), endpoint=self.server.endpoint, types=[KIND, "unheard-of-1"]
        )

    def make(self, name: str, location: str = "a", labels: Mapping[str, str] | None = None) -> None:
        labels = {"orca-stack": "mystackmystackid", "orca-pool": "p"} if labels is None else labels
        zone = PLACES[location]
        body = {"name": name, "machineType": f"zones/{zone}/machineTypes/{KIND}", "labels": dict(labels)}
        try:
            operation = self.cloud.insert(zone, body)
        except ApiError as error:
            raise self.provider.classify(f"googleapi: Error {error.status}: {error}, {error.reason}") from error
        if operation.failed:
            raise self.provider.classify(f"Error waiting for instance to create: {operation.message}")

    def sell_out(self, location: str) -> None:
        self.cloud.capacity[PLACES[location], KIND] = 0

    def fail(self, verb: str, meaning: type[OrcaError]) -> None:
        status, reason, message = WORDS[meaning]
        self.cloud.arm(verb, Fault(status=status, reason=reason, message=message))

    def halt(self, name: str, state: MachineState) -> None:
        if state is MachineState.PREEMPTED:
            self.cloud.named(name).body["scheduling"] = {"provisioningModel": "SPOT"}
        self.cloud.stop(name)

    def words(self, meaning: type[OrcaError]) -> list[str]:
        if meaning is NoCapacity:
            said = [f"Error waiting for instance to create: {message}" for _, message in STOCK_OUTS]
        else:
            status, reason, message = WORDS[meaning]
            said = [f"Error creating instance: googleapi: Error {status}: {message}, {reason}"]
        return [*said, *(f"1 error occurred:\n\t* {words}\n\n" for words in said)]


def _suite() -> dict[str, Any]:
    path = Path(__file__).parents[1] / "contract" / "test_providers.py"
    spec = importlib.util.spec_from_file_location("orca_contract_of_providers", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses of it look themselves up
    spec.loader.exec_module(module)
    return {name: value for name, value in vars(module).items() if name.startswith("test_")}


SUITE = _suite()
# Google's list is asked for machines with a stack's label: nobody else's has a name that could collide with ours.
del SUITE["test_machines_of_others_are_listed_too"]
globals().update(SUITE)


@pytest.fixture
def harness() -> Iterator[GcpHarness]:
    harness = GcpHarness()
    yield harness
    harness.server.close()


def test_machines_of_other_stacks_are_listed_and_those_of_nobody_are_not(harness: GcpHarness) -> None:
    harness.make("orca-p-1", labels={"orca-stack": "anotherstacksids"})
    harness.make("somebody-s", labels={})
    assert [machine.name for machine in harness.provider.list()] == ["orca-p-1"]


@pytest.mark.skipif("ORCA_TEST_GCP_PROJECT" not in os.environ, reason="ORCA_TEST_GCP_PROJECT names no real project")
def test_a_real_project_is_read() -> None:
    provider = GcpProvider(GcpCloud(project=os.environ["ORCA_TEST_GCP_PROJECT"]))
    assert isinstance(provider.list(), list)
    assert provider.get("orca-nobody-has-this-name-1", "us-central1-a") is None
