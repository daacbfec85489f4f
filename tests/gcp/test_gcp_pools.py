"""Pools on Google Cloud, from a run's demand to a machine's end: the real engine over a fake cloud."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from orca_infra.testing.fake_gcp import PROJECT, STOCK_OUTS, ApiError, Fault

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

A, B = "us-central1-a", "us-central1-b"
Gcp = Callable[..., Any]
Toml = Callable[..., str]


def status(w: Any, pool: str = "p") -> str:
    [row] = w.rows("select last_attempt from orca.pool_status where pool = %(pool)s", pool=pool)
    return str(row["last_attempt"])


def settled(w: Any, *machines: str) -> bool:
    """Exactly these machines exist, are wanted and are owned, and nothing is pending."""
    state = w.engine.state(w.stack)
    return (
        w.listed() == sorted(machines)
        and w.living() == list(machines)
        and sorted(resource.name for resource in state.resources) == sorted(machines)
        and state.pending == ()
    )


def pool(name: str, locations: str) -> str:
    return f"""
[pools.{name}]
provider = "gcp"
image = "registry.example/worker:1"
locations = {locations}
max_machines = 1
idle_seconds = "1h"
types = [{{ type = "e2-small" }}]
"""


def test_a_run_gets_an_instance_as_declared_whose_worker_is_known_and_which_goes_when_idle(
    gcp: Gcp, toml: Toml
) -> None:
    w = gcp()
    w.configure(toml(idle='"1s"'))
    w.queue()
    assert w.run_pass().changed == 1
    instance, row = w.cloud.named("orca-p-1"), w.machine("orca-p-1")
    assert (row["uid"], row["location"], row["type"]) == (str(instance.id), A, "e2-small")
    assert row["confirmed_at"]
    stack_id = w.surroundings.stack_id
    assert instance.labels["orca-stack"] == stack_id
    assert instance.labels["orca-pool"] == "p"
    body = instance.body
    assert body["shieldedInstanceConfig"]["enableSecureBoot"]
    assert body["networkInterfaces"][0]["accessConfigs"] == []
    assert body["networkInterfaces"][0]["subnetwork"] == (
        f"projects/{PROJECT}/regions/us-central1/subnetworks/orca-{stack_id}"
    )
    assert body["serviceAccounts"][0]["email"] == f"orca-{stack_id}@{PROJECT}.iam.gserviceaccount.com"
    assert instance.metadata["serial-port-enable"] == "true"
    w.hello("orca-p-1")
    w.execute("update orca.runs set state = 'canceled' where state = 'queued'")
    w.pass_until(lambda: w.reasons() == {"orca-p-1": "Idle"}, 60)
    assert settled(w)


def test_every_spelling_of_a_stock_out_goes_on_and_a_quota_or_a_bad_request_is_none(gcp: Gcp) -> None:
    """Field case M1."""
    w = gcp()
    made = 0
    for code, message in STOCK_OUTS[:3]:
        w.cloud.arm("insert", Fault(reason=code, message=message, zone=A))
        w.queue()
        assert w.run_pass().changed == 1, message
        made += 2
        assert w.machine(f"orca-p-{made}")["location"] == B
        assert w.reasons()[f"orca-p-{made - 1}"] == "NoCapacity"
        assert status(w) == f"no capacity for e2-small in {A}; made orca-p-{made} (e2-small in {B})"

    w.queue()
    for fault, meaning, remedy in (
        (
            Fault(reason="QUOTA_EXCEEDED", message="Quota 'CPUS' exceeded.  Limit: 8.0 in region us-central1."),
            "QuotaExceeded",
            "iam-admin/quotas",
        ),
        (
            Fault(status=400, reason="invalid", message="Invalid value for field 'resource.labels': 'x'"),
            "Refused",
            "orca.toml",
        ),
    ):
        w.cloud.arm("insert", fault)
        time.sleep(0.05)  # or the next try is not due
        assert w.run_pass().changed == 0
        made += 1
        assert w.reasons()[f"orca-p-{made}"] == "Failed"
        said = status(w)
        assert said.startswith(f"e2-small in {A}: {meaning}: ")
        assert remedy in said
    assert len(w.listed()) == 3


def test_a_stock_out_late_in_the_operation_leaves_nothing_and_the_next_zone_is_tried(gcp: Gcp) -> None:
    w = gcp()
    w.cloud.capacity[A, "e2-small"] = 0
    w.cloud.create_seconds = 1
    w.queue()
    assert w.run_pass().changed == 1
    assert w.reasons() == {"orca-p-1": "NoCapacity", "orca-p-2": None}
    assert settled(w, "orca-p-2")


def test_an_engine_killed_in_a_slow_create_that_lists_hide_is_neither_forgotten_nor_kept_beside_another(
    gcp: Gcp, background: Any, end_engine: Any
) -> None:
    """Field case M3, with the engine killed by SIGKILL in mid create."""
    w = gcp(ORCA_STRAY_GRACE_SECONDS="1")
    w.cloud.list_lag_seconds = 2
    w.cloud.arm("insert", Fault(seconds=3600))
    w.queue()
    one = background(w.run_pass)
    end_engine(w.engine_at("insert"))
    w.cloud.hurry()
    one.join()
    assert w.cloud.names() == ["orca-p-1"]  # the cloud goes on with it, whoever asked
    w.pass_until(lambda: "orca-p-2" in w.reasons(), 60)
    assert w.reasons()["orca-p-1"] == "Interrupted"
    w.pass_until(lambda: w.listed() == ["orca-p-2"], 60)
    assert settled(w, "orca-p-2")
    assert "stray deleted" in w.log.events()


def test_a_spot_machine_that_is_stopped_is_no_capacity_however_young_its_heartbeat_and_is_replaced(
    gcp: Gcp, toml: Toml
) -> None:
    """Field case M7."""
    w = gcp()
    w.configure(toml(spot="true"))
    w.queue()
    w.run_pass()
    assert w.cloud.named("orca-p-1").body["scheduling"]["instanceTerminationAction"] == "DELETE"
    w.hello("orca-p-1")
    w.execute("update orca.runs set state = 'canceled'")
    run = w.give_run("orca-p-1")
    w.cloud.stop("orca-p-1")
    w.pass_until(lambda: w.listed() == ["orca-p-2"], 60)
    assert w.reasons() == {"orca-p-1": "Preempted", "orca-p-2": None}
    assert w.run_of(run)["state"] == "queued"

    w.hello("orca-p-2")
    w.execute("update orca.runs set state = 'canceled'")
    run = w.give_run("orca-p-2")
    w.cloud.preempt("orca-p-2")  # deleted, as it was declared
    w.pass_until(lambda: w.listed() == ["orca-p-3"], 60)
    assert w.reasons()["orca-p-2"] == "Vanished"
    assert w.run_of(run)["state"] == "queued"
    assert settled(w, "orca-p-3")


def test_a_stray_made_in_the_console_goes_and_what_is_anothers_stays(gcp: Gcp) -> None:
    w = gcp(ORCA_STRAY_GRACE_SECONDS="1")
    w.cloud.plant("orca-p-7", labels={"orca-stack": w.surroundings.stack_id, "orca-pool": "p"})
    w.cloud.plant("orca-p-8", labels={"orca-stack": "anotherstacksids", "orca-pool": "p"})
    w.cloud.plant("somebody-s")
    w.cloud.arm("delete", Fault(reason="INTERNAL_ERROR", message="Internal error"))  # the first delete leaves it there
    w.pass_until(lambda: w.listed() == ["orca-p-8", "somebody-s"], 30)
    assert "stray not deleted yet" in w.log.events()
    assert w.operations() == []
    w.queue()
    w.run_pass()
    assert w.reasons() == {"orca-p-9": None}  # above every number that Google lists


def test_a_name_that_another_stack_took_is_not_deleted_with_the_machine_that_had_it(gcp: Gcp, toml: Toml) -> None:
    """The engine deletes by name; a machine that is gone is only forgotten by the state."""
    w = gcp()
    w.configure(toml(spot="true"))
    w.queue(2)
    w.run_pass()
    w.hello("orca-p-1", "orca-p-2")
    w.execute("update orca.runs set state = 'canceled'")
    assert settled(w, "orca-p-1", "orca-p-2")
    operations = w.operations()

    w.cloud.preempt("orca-p-1")
    w.cloud.plant("orca-p-1", labels={"orca-stack": "anotherstacksids", "orca-pool": "p"})
    w.pass_until(lambda: w.reasons()["orca-p-1"] == "Vanished", 30)
    assert w.listed() == ["orca-p-1", "orca-p-2"]
    assert [resource.name for resource in w.engine.state(w.stack).resources] == ["orca-p-2"]
    assert w.rows("select name from orca.owned") == [{"name": "orca-p-2"}]
    assert {one["kind"] for one in w.operations()[len(operations) :]} <= {"refresh"}

    # Taken between the decision to remove it for another reason and the removal.
    w.execute("update orca.pool_machines set drain_at = now() where name = 'orca-p-2'")
    real_list = w.provider.list

    def then_it_is_taken() -> Any:
        seen = real_list()
        w.cloud.preempt("orca-p-2")
        w.cloud.plant("orca-p-2", labels={"orca-stack": "anotherstacksids", "orca-pool": "p"})
        w.provider.list = real_list
        return seen

    w.provider.list = then_it_is_taken
    w.run_pass()
    assert w.reasons()["orca-p-2"] == "Drained"
    assert w.listed() == ["orca-p-1", "orca-p-2"]
    assert w.engine.state(w.stack).resources == ()
    assert w.run_pass().changed == 0


def test_labels_that_were_taken_off_by_hand_are_put_back(gcp: Gcp) -> None:
    w = gcp()
    w.queue()
    w.run_pass()
    w.hello("orca-p-1")
    before = w.cloud.named("orca-p-1").labels
    operations = w.operations()
    w.cloud.unlabel("orca-p-1")
    assert w.provider.list() == []  # Google's list is asked for the label: the machine is not in it
    w.cloud.arm("label", Fault(status=412, reason="conditionNotMet", message="Labels fingerprint either invalid"))
    assert w.run_pass().changed == 0
    assert "labels not put back yet" in w.log.events()
    w.run_pass()
    assert w.cloud.named("orca-p-1").labels == {key: before[key] for key in ("orca-stack", "orca-pool")}
    assert w.reasons() == {"orca-p-1": None}
    assert w.run_pass().changed == 0
    assert {one["kind"] for one in w.operations()[len(operations) :]} <= {"refresh"}


def test_a_delete_that_fails_leaves_the_machine_which_is_deleted_later(gcp: Gcp) -> None:
    w = gcp()
    w.queue()
    w.run_pass()
    w.hello("orca-p-1")
    w.cloud.arm("delete", Fault(reason="INTERNAL_ERROR", message="Internal error"))
    w.configure("[pools]")
    w.execute("update orca.runs set state = 'canceled'")
    w.run_pass()
    assert w.listed() == ["orca-p-1"]
    assert w.machine("orca-p-1")["revoked_at"]
    w.pass_until(lambda: w.listed() == [], 60)
    assert w.reasons() == {"orca-p-1": "PoolGone"}


def test_a_list_that_is_not_whole_decides_nothing(gcp: Gcp) -> None:
    w = gcp()
    w.queue()
    w.run_pass()
    rate = Fault(status=429, reason="rateLimitExceeded", message="Too many requests")
    for unreachable, faults in ((B, 0), ("", 1)):
        w.cloud.unreachable.update({unreachable} - {""})
        w.cloud.arm("list", rate, faults)
        w.queue()
        result = w.run_pass()
        assert (result.changed, list(result.plan.actions)) == (0, [])
        assert "could not be read" in result.plan.reports[0].message
        w.cloud.unreachable.clear()
    assert w.listed() == ["orca-p-1"]


@pytest.mark.parametrize(
    ("bad", "remedy"),
    [
        ("zone", "gcloud compute zones list"),
        ("type", "gcloud compute machine-types list"),
        ("image", "boot_image"),
        ("network", "`pulumi up` makes the stack's own"),
    ],
)
def test_bad_input_is_said_with_its_remedy_and_other_pools_go_on(gcp: Gcp, bad: str, remedy: str) -> None:
    w = gcp()
    zones = '["europe-west9-a"]' if bad == "zone" else f'["{A}"]'
    w.configure(f'[gcp]\nproject = "{PROJECT}"\n' + pool("p", zones) + pool("q", f'["{B}"]'))
    w.execute("insert into orca.pipelines (name, placement) values ('other', 'worker:q')")
    w.execute("insert into orca.runs (pipeline) values ('other')")
    w.queue()
    field = "Invalid value for field 'resource."
    words = {
        "type": f"{field}machineType': 'zones/{A}/machineTypes/e2-small'. The referenced resource does not exist.",
        "image": f"{field}disks[0].initializeParams.sourceImage': 'projects/cos-cloud/global/images/family/none'",
        "network": f"{field}networkInterfaces[0].network': 'global/networks/none'. The network cannot be found.",
    }
    if bad in words:
        w.cloud.arm("insert", Fault(status=400, reason="invalid", message=words[bad], zone=A))
    w.run_pass()
    assert "Refused" in status(w)
    assert remedy in status(w)
    assert w.living() == ["orca-q-1"]


@pytest.mark.parametrize(
    ("broken", "remedy"),
    [
        (
            ApiError(403, "accessNotConfigured", "Compute Engine API has not been used in project 42"),
            "gcloud services enable",
        ),
        (ApiError(401, "authError", "Invalid Credentials"), "gcloud auth application-default login"),
        (ApiError(403, "forbidden", "Required 'compute.instances.list' permission"), "roles/compute.instanceAdmin.v1"),
    ],
)
def test_a_project_that_cannot_be_read_is_said_with_its_remedy_and_no_engine_is_started(
    gcp: Gcp, broken: ApiError, remedy: str
) -> None:
    w = gcp()
    w.cloud.broken = broken
    w.queue()
    for _ in range(3):
        assert w.run_pass().changed == 0
    [row] = w.rows("select message from orca.pool_status where pool = 'p'")
    assert remedy in row["message"]
    assert w.operations() == []
    assert w.cloud.calls == [("list", "")] * 3


def test_an_engine_that_alone_is_killed_in_mid_create_leaves_nothing_behind(gcp: Gcp, background: Any) -> None:
    """Its provider outlives it by a moment; the state knows nothing of the machine, and demand gets a new number."""
    w = gcp()
    w.cloud.arm("insert", Fault(seconds=3600))
    w.queue()
    one = background(w.run_pass)
    process = w.engine_at("insert")
    os.kill(process.pid, signal.SIGKILL)
    w.cloud.hurry()
    one.join()
    w.pass_until(lambda: len(w.listed()) == 1 and w.listed() != ["orca-p-1"], 60)
    assert settled(w, w.listed()[0])


@pytest.mark.timeout(1800)
def test_many_machines_up_and_down(gcp: Gcp) -> None:
    count = int(os.environ.get("ORCA_TEST_GCP_MACHINES", "50"))  # at most; 2 s each
    w = gcp()
    w.cloud.capacity[A, "e2-small"] = count * 3 // 5
    w.queue(count)
    w.run_pass()
    w.pass_until(lambda: len(w.listed()) == count, 900)
    living = w.living()
    assert settled(w, *living)
    assert len({w.cloud.named(name).id for name in living}) == count
    w.hello(*living)
    w.configure("[pools]")
    w.execute("update orca.runs set state = 'canceled'")
    w.pass_until(lambda: w.listed() == [], 300)
    assert settled(w)
