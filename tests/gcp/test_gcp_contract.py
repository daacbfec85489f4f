"""The contract suite of the machine providers, run against `gcp` over the fake cloud's HTTP face.

The suite's places `a` and `b` and its type `small` are a zone, another and an ARM type here. It runs against the real project that
ORCA_TEST_GCP_PROJECT names, too, if it names one; of what can only be armed in a fake its cases say so and are skipped there.
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
from orca_infra.testing.fake_gcp import PROJECT, STOCK_OUTS, FakeGcp, Fault
from orca_infra.testing.fake_gcp_http import FakeGcpServer
from orca_infra.testing.fake_gcp_plugin import instance_body

PLACES = {"a": "us-central1-a", "b": "us-central1-b"}
KIND = "t2a-standard-1"
LABELS = {"orca-stack": "mystackmystackid", "orca-pool": "p"}
#: Every name that the suite gives.
NAMES = ("orca-p-1", "orca-p-2", "somebody-s")
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
    """Machines are made by Google's own call, from what the provider declares."""

    def __init__(self, config: GcpCloud, endpoint: str = "", change_wait_seconds: float = 5.0) -> None:
        self.provider = Translated(
            config, endpoint=endpoint, types=[KIND, "unheard-of-1"], change_wait_seconds=change_wait_seconds
        )

    def make(self, name: str, location: str = "a", labels: Mapping[str, str] | None = None) -> None:
        labels = LABELS if labels is None else labels
        zone = PLACES[location]
        birth = Birth(name=name, pool="p", type="small", location=location, spot=False, image="worker:1", labels=LABELS)
        body = instance_body({**self.provider.render(birth), "machineType": KIND})
        # Pulumi adds a label of its own.
        self.done(zone, self.call("POST", f"/zones/{zone}/instances", body={**body, "labels": dict(labels)}))

    def call(self, method: str, path: str, **more: Any) -> Any:
        return self.provider._api()._call(method, path, **more)

    def done(self, zone: str, operation: Any) -> None:
        self.provider._api()._wait(zone, operation, 300)

    def words(self, meaning: type[OrcaError]) -> list[str]:
        if meaning is NoCapacity:
            said = [f"Error waiting for instance to create: {message}" for _, message in STOCK_OUTS]
        else:
            status, reason, message = WORDS[meaning]
            said = [f"Error creating instance: googleapi: Error {status}: {message}, {reason}"]
        return [*said, *(f"1 error occurred:\n\t* {words}\n\n" for words in said)]


class FakeHarness(GcpHarness):
    def __init__(self) -> None:
        self.cloud = FakeGcp(capacity={})
        self.server = FakeGcpServer(self.cloud)
        super().__init__(GcpCloud(project=PROJECT), self.server.endpoint)

    def sell_out(self, location: str) -> None:
        self.cloud.capacity[PLACES[location], KIND] = 0

    def fail(self, verb: str, meaning: type[OrcaError]) -> None:
        status, reason, message = WORDS[meaning]
        self.cloud.arm(verb, Fault(status=status, reason=reason, message=message))

    def halt(self, name: str, state: MachineState) -> None:
        if state is MachineState.PREEMPTED:
            self.cloud.named(name).body["scheduling"] = {"provisioningModel": "SPOT"}
        self.cloud.stop(name)

    def close(self) -> None:
        self.server.close()


class RealHarness(GcpHarness):
    """A real project, of which these tests are the only user: what they make has fixed names, and is deleted at their end."""

    def __init__(self, project: str, endpoint: str = "") -> None:
        network = os.environ.get("ORCA_TEST_GCP_NETWORK", "global/networks/default")
        super().__init__(GcpCloud(project=project, network=network, service_account="default"), endpoint, 300)

    def sell_out(self, location: str) -> None:
        pytest.skip("a real cloud cannot be sold out at will")

    def fail(self, verb: str, meaning: type[OrcaError]) -> None:
        pytest.skip("a real cloud cannot be told to fail")

    def halt(self, name: str, state: MachineState) -> None:
        if state is MachineState.PREEMPTED:
            pytest.skip("a real cloud cannot be told to preempt")
        zone = PLACES["a"]
        self.done(zone, self.call("POST", f"/zones/{zone}/instances/{name}/stop"))

    def close(self) -> None:
        for zone in PLACES.values():
            for name in NAMES:
                machine = GcpProvider.get(self.provider, name, zone)
                if machine is not None:
                    GcpProvider.delete(self.provider, machine)


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


@pytest.fixture(params=["fake", "real"] if "ORCA_TEST_GCP_PROJECT" in os.environ else ["fake"])
def harness(request: pytest.FixtureRequest) -> Iterator[GcpHarness]:
    """Of the fake, and of the real project that ORCA_TEST_GCP_PROJECT names, if it names one."""
    harness = FakeHarness() if request.param == "fake" else RealHarness(os.environ["ORCA_TEST_GCP_PROJECT"])
    try:
        yield harness
    finally:
        harness.close()


def test_machines_of_other_stacks_are_listed_and_those_of_nobody_are_not(harness: GcpHarness) -> None:
    harness.make("orca-p-1", labels={"orca-stack": "anotherstacksids"})
    harness.make("somebody-s", labels={})
    assert [machine.name for machine in harness.provider.list()] == ["orca-p-1"]


def test_the_harness_of_a_real_project_makes_stops_and_deletes_what_it_names() -> None:
    cloud = FakeGcp(capacity={})
    server = FakeGcpServer(cloud)
    real = RealHarness(PROJECT, server.endpoint)
    try:
        real.make("orca-p-1")
        real.make("somebody-s", "b", labels={})
        body = cloud.named("orca-p-1").body
        assert body["networkInterfaces"][0]["network"] == "global/networks/default"
        assert body["serviceAccounts"][0]["email"] == "default"
        real.halt("orca-p-1", MachineState.STOPPED)
        assert [machine.state for machine in real.provider.list()] == [MachineState.STOPPED]
        cloud.plant("a-project-of-somebody")
    finally:
        real.close()
    assert cloud.names() == ["a-project-of-somebody"]
    server.close()
