"""Google's client library against the fake cloud's HTTP face: what is read, what is not, and what is deleted."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from orca_infra.errors import AuthFailed, OrcaError, QuotaExceeded, Refused, Transient
from orca_infra.machines.model import MachineState
from orca_infra.machines.providers.gcp_api import ComputeApi
from orca_infra.testing.fake_gcp import PROJECT, ApiError, FakeGcp, Fault
from orca_infra.testing.fake_gcp_http import FakeGcpServer, serve

OURS = {"orca-stack": "abc", "orca-pool": "p"}
A, B = "us-central1-a", "us-central1-b"


@pytest.fixture(scope="module")
def server() -> Iterator[FakeGcpServer]:
    with serve(FakeGcp()) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: FakeGcpServer) -> ComputeApi:
    return ComputeApi(PROJECT, server.endpoint)


@pytest.fixture
def cloud(server: FakeGcpServer) -> FakeGcp:
    """A new cloud behind the same face."""
    cloud = FakeGcp()
    server._server.RequestHandlerClass.cloud = cloud  # type: ignore[attr-defined]
    return cloud


@pytest.fixture
def api(client: ComputeApi, cloud: FakeGcp) -> ComputeApi:
    return client


def test_an_instance_is_seen_as_it_is(api: ComputeApi, cloud: FakeGcp) -> None:
    instance = cloud.plant("orca-p-1", B, OURS)
    [seen] = api.list()
    assert seen == api.get("orca-p-1", B)
    assert (seen.name, seen.uid, seen.location, seen.type) == ("orca-p-1", str(instance.id), B, "e2-small")
    assert seen.state is MachineState.RUNNING
    assert seen.labels == OURS
    assert abs(seen.created_at - datetime.now(UTC)) < timedelta(seconds=5)


def test_what_carries_no_stacks_label_is_not_listed(api: ComputeApi, cloud: FakeGcp) -> None:
    cloud.plant("somebody-s")
    cloud.plant("orca-p-2", labels={"orca-stack": "another"})
    assert [seen.name for seen in api.list()] == ["orca-p-2"]


def test_all_pages_of_all_zones_are_read(api: ComputeApi, cloud: FakeGcp) -> None:
    cloud.page_size = 3
    for number in range(5):
        cloud.plant(f"orca-p-{number}", A, OURS)
        cloud.plant(f"orca-q-{number}", B, OURS)
    assert len(api.list()) == 10
    assert cloud.calls == [("list", "")] * 4


def test_a_zone_that_cannot_be_reached_is_not_empty(api: ComputeApi, cloud: FakeGcp) -> None:
    cloud.plant("orca-p-1", A, OURS)
    cloud.unreachable = {B}
    with pytest.raises(Transient, match=B):
        api.list()
    with pytest.raises(Transient, match=B):
        api.list({A, B})
    assert [seen.name for seen in api.list({A})] == ["orca-p-1"]  # nothing is made there, so nothing can be missed


@pytest.mark.parametrize("on_page", [1, 2])
def test_a_list_that_breaks_off_gives_nothing(api: ComputeApi, cloud: FakeGcp, on_page: int) -> None:
    cloud.page_size = 1
    for number in range(3):
        cloud.plant(f"orca-p-{number}", A, OURS)
    if on_page == 2:
        cloud.arm("list", Fault(seconds=0))  # the first page comes as it should
    cloud.arm("list", Fault(status=503, reason="backendError", message="Backend Error"))
    with pytest.raises(Transient, match="Backend Error"):
        api.list()
    assert cloud.calls == [("list", "")] * on_page


def test_a_list_that_fails_as_a_whole_for_one_zone_is_transient(api: ComputeApi, cloud: FakeGcp) -> None:
    cloud.unreachable, cloud.lists_are_whole = {B}, True
    with pytest.raises(Transient):
        api.list()


@pytest.mark.parametrize(
    ("fault", "meaning"),
    [
        (
            Fault(status=403, reason="rateLimitExceeded", message="Quota exceeded for quota metric 'Queries'"),
            QuotaExceeded,
        ),
        (Fault(status=403, reason="forbidden", message="Required 'compute.instances.list' permission"), AuthFailed),
        (
            Fault(
                status=403, reason="accessNotConfigured", message="Compute Engine API has not been used in project 42"
            ),
            Refused,
        ),
        (Fault(status=500, reason="backendError", message="Internal"), Transient),
        (Fault(status=429, reason="rateLimitExceeded", message="Too many requests"), QuotaExceeded),
    ],
)
def test_a_call_that_fails_is_said_by_meaning_and_never_empty(
    api: ComputeApi, cloud: FakeGcp, fault: Fault, meaning: type[OrcaError]
) -> None:
    cloud.plant("orca-p-1", A, OURS)
    for verb, call in (
        ("list", api.list),
        ("get", lambda: api.get("orca-p-1", A)),
        ("serial", lambda: api.console("orca-p-1", A)),
        ("delete", lambda: api.delete("7", A, wait_seconds=1)),
    ):
        cloud.arm(verb, fault)
        with pytest.raises(OrcaError) as raised:
            call()
        assert type(raised.value) is meaning, verb
    assert cloud.names() == ["orca-p-1"]


def test_a_get_is_none_only_when_google_says_404_of_the_instance(api: ComputeApi, cloud: FakeGcp) -> None:
    assert api.get("orca-p-1", A) is None
    with pytest.raises(Refused, match="zones list"):
        api.get("orca-p-1", "moon-east1-a")


def test_another_project_is_said_and_not_taken_for_empty(server: FakeGcpServer, cloud: FakeGcp) -> None:
    other = ComputeApi("another", server.endpoint)
    with pytest.raises(Refused):
        other.list()
    with pytest.raises(Refused):
        other.get("orca-p-1", A)


def test_a_cloud_that_is_away_is_transient() -> None:
    with pytest.raises(Transient, match="could not be reached"):
        ComputeApi(PROJECT, "http://127.0.0.1:9/compute/v1/").list()


def test_without_credentials_it_says_how_to_get_some(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with pytest.raises(AuthFailed, match="gcloud auth application-default login"):
        ComputeApi(PROJECT)


def test_a_delete_takes_this_very_instance_and_no_other_of_its_name(api: ComputeApi, cloud: FakeGcp) -> None:
    old = cloud.plant("orca-p-1", A, OURS)
    cloud.remove("orca-p-1")
    cloud.plant("orca-p-1", A, {"orca-stack": "another"})
    api.delete(str(old.id), A, wait_seconds=1)
    assert cloud.names() == ["orca-p-1"]
    api.delete(str(cloud.named("orca-p-1").id), A, wait_seconds=1)
    assert cloud.names() == []


def test_a_delete_that_fails_late_is_an_error_and_one_that_is_slow_is_not_waited_for(
    api: ComputeApi, cloud: FakeGcp
) -> None:
    uid = str(cloud.plant("orca-p-1", A, OURS).id)
    cloud.arm("delete", Fault(reason="RESOURCE_IN_USE_BY_ANOTHER_RESOURCE", message="INTERNAL_ERROR"))
    with pytest.raises(Transient, match="RESOURCE_IN_USE"):
        api.delete(uid, A, wait_seconds=5)
    assert api.get("orca-p-1", A).state is MachineState.RUNNING  # type: ignore[union-attr]
    cloud.delete_seconds = 60
    api.delete(uid, A, wait_seconds=0)
    assert api.get("orca-p-1", A).state is MachineState.STOPPED  # type: ignore[union-attr]


def test_a_stopped_spot_instance_is_preempted_and_another_stopped(api: ComputeApi, cloud: FakeGcp) -> None:
    cloud.plant("orca-p-1", A, OURS)
    spot = cloud.plant("orca-p-2", A, OURS)
    spot.body["scheduling"] = {"provisioningModel": "SPOT", "instanceTerminationAction": "STOP"}
    for name in ("orca-p-1", "orca-p-2"):
        cloud.stop(name)
    assert [seen.state for seen in api.list()] == [MachineState.STOPPED, MachineState.PREEMPTED]


def test_the_console_is_what_the_serial_port_said_last(api: ComputeApi, cloud: FakeGcp) -> None:
    cloud.plant("orca-p-1", A, OURS)
    cloud.consoles["orca-p-1"] = "x" * 100_000 + "the end\n"
    said = api.console("orca-p-1", A)
    assert len(said) == 65536
    assert said.endswith("the end\n")
    assert api.console("orca-p-2", A) == ""


def test_everything_broken_is_said_with_its_remedy(api: ComputeApi, cloud: FakeGcp) -> None:
    cloud.broken = ApiError(403, "accessNotConfigured", "Compute Engine API has not been used in project 42 before")
    with pytest.raises(Refused, match="gcloud services enable"):
        api.list()
