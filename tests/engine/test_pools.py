"""The machine pools from a run's demand to a machine's end, on the real engine, a real Postgres and the local cloud."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from orca_infra.errors import StackLocked
from orca_infra.loop.passes import configure_providers, look
from orca_infra.machines import apply as hands_of_machines
from orca_infra.machines.decide import decide
from orca_infra.machines.hands import MachineHands
from orca_infra.machines.model import MachineState, Make, Plan, Remove, Snapshot
from orca_infra.machines.providers.local_cloud import MachineRequest

pytestmark = pytest.mark.engine

STATES = pytest.mark.parametrize("state", ["file", "postgres"])
Passes = Callable[..., Any]
WaitUntil = Callable[..., None]


def toml(*, idle: str = '"1h"', image: str = "worker:1", types: str = 'type = "small"', more: str = "") -> str:
    return f"""
[pools.p]
provider = "local"
image = "registry.example/{image}"
locations = ["a", "b"]
max_machines = 3
idle_seconds = {idle}
types = [{{ {types} }}]
{more}
"""


def plan_of(world: Any) -> tuple[Plan, Snapshot, MachineHands]:
    """A pass as far as its decision."""
    providers = configure_providers(world.config, world.surroundings)
    hands = world.passes._hands(world.config, providers)
    snapshot = look(world.surroundings, providers, held=hands_of_machines.settle(hands))
    limits = world.surroundings.settings.limits(world.config)
    return decide(snapshot, world.config.pools, limits), snapshot, hands


def plant(world: Any, name: str, labels: dict[str, str]) -> None:
    """Make a machine behind the back of every stack."""
    world.cloud.create(MachineRequest(name=name, location="a", type="small", labels=labels, argv=("/bin/sleep", "600")))


@STATES
def test_a_run_gets_a_machine_which_works_is_idle_loses_its_token_and_is_removed(
    passes: Passes, wait_until: WaitUntil, state: str
) -> None:
    w = passes(state)
    w.configure(toml(idle="0.5"))
    w.queue()
    assert w.run_pass().changed == 1
    row = w.machine("orca-p-1")
    [machine] = w.cloud.list()
    assert (machine.name, machine.uid, machine.location) == ("orca-p-1", row["uid"], "a")
    assert machine.labels == {"orca-stack": w.surroundings.stack_id, "orca-pool": "p"}
    assert row["confirmed_at"]
    assert not row["revoked_at"]

    wait_until(lambda: w.rows("select from orca.runs where state = 'succeeded' and worker = 'orca-p-1'"))
    ups = len(w.operations())
    w.pass_until(lambda: w.reasons() == {"orca-p-1": "Idle"})

    ended = w.machine("orca-p-1")
    [destroy] = w.operations()[ups:]
    assert destroy["kind"] == "destroy"
    assert ended["revoked_at"] <= destroy["started_at"] <= destroy["ended_at"] <= ended["ended_at"]
    assert w.listed() == []
    assert w.engine.state(w.stack).resources == ()
    assert (w.count("orca.owned"), w.count("orca.workers")) == (0, 0)


def test_a_pass_in_which_nothing_is_to_be_made_starts_no_engine(passes: Passes) -> None:
    w = passes()
    for _ in range(3):
        assert w.run_pass().changed == 0
    assert w.operations() == []
    w.machine_with_worker()
    before = w.operations()
    for _ in range(3):
        assert w.run_pass().changed == 0
    assert w.operations() == before


def test_a_location_without_capacity_is_passed_over_for_the_next_in_the_same_pass(passes: Passes) -> None:
    w = passes()
    w.configure(toml(more="[local.locations.a]\nsmall = 0\n[local.locations.b]\nsmall = 1"))
    w.queue()
    assert w.run_pass().changed == 1
    assert w.reasons() == {"orca-p-1": "NoCapacity", "orca-p-2": None}
    assert w.machine("orca-p-2")["location"] == "b"
    [offer] = w.rows("select location, type, class, message, times from orca.pool_offers")
    assert offer == {
        "location": "a",
        "type": "small",
        "class": "NoCapacity",
        "message": "LOCATION_OUT_OF_CAPACITY: no small is free in a (0 of 0 in use)",
        "times": 1,
    }
    [status] = w.rows("select last_attempt from orca.pool_status")
    assert status["last_attempt"] == "no capacity for small in a; made orca-p-2 (small in b)"
    w.configure(toml(types='type = "small", spot = true'))
    w.run_pass()
    assert w.count("orca.pool_offers") == 0, "what orca.toml does not name any more is forgotten"


def test_a_quota_is_told_as_a_quota_tries_no_other_location_and_is_remembered_until_the_offering_is_had(
    passes: Passes,
) -> None:
    w = passes()
    w.configure(toml())
    w.cloud.arm("create", "QUOTA_EXCEEDED", "8 of 8 CPUs")
    w.queue()
    assert w.run_pass().changed == 0
    assert w.reasons() == {"orca-p-1": "Failed"}
    [offer] = w.rows("select location, class, message from orca.pool_offers")
    assert offer == {"location": "a", "class": "QuotaExceeded", "message": "QUOTA_EXCEEDED: 8 of 8 CPUs"}
    [status] = w.rows("select last_attempt from orca.pool_status")
    assert status["last_attempt"] == "small in a: QuotaExceeded: QUOTA_EXCEEDED: 8 of 8 CPUs"
    w.pass_until(lambda: w.reasons() == {"orca-p-1": "Failed", "orca-p-2": None})
    assert w.machine("orca-p-2")["location"] == "a"
    assert w.count("orca.pool_offers") == 0


def test_a_preempted_machine_is_removed_its_run_queued_again_and_with_demand_it_is_replaced(passes: Passes) -> None:
    w = passes()
    name = w.machine_with_worker()
    run = w.give_run(name)
    assert w.run_pass().changed == 0
    w.cloud.preempt(name)
    w.run_pass()
    assert w.reasons()[name] == "Preempted"
    assert (w.run_of(run)["state"], w.run_of(run)["worker"], w.run_of(run)["reason"]) == ("queued", None, "Preempted")
    w.pass_until(lambda: w.listed() == ["orca-p-2"])
    assert w.reasons() == {"orca-p-1": "Preempted", "orca-p-2": None}


def test_a_stopped_machine_is_removed_however_young_its_last_heartbeat(passes: Passes) -> None:
    w = passes()
    name = w.machine_with_worker()
    w.cloud.stop(name)
    assert w.cloud.get(name).state is MachineState.STOPPED
    w.run_pass()
    assert w.reasons() == {name: "Stopped"}
    assert w.listed() == []


def test_a_machine_deleted_behind_the_back_ends_vanished_after_the_grace_and_is_never_declared_again(
    passes: Passes,
) -> None:
    w = passes(ORCA_STRAY_GRACE_SECONDS="1h")
    name = w.machine_with_worker()
    run = w.give_run(name)
    operations = len(w.operations())
    w.cloud.delete(name)
    assert w.run_pass().changed == 0  # a cloud may not show yet what is young
    assert w.reasons() == {name: None}
    assert len(w.operations()) == operations
    w.execute("update orca.pool_machines set created_at = created_at - interval '2 hours'")
    w.run_pass()
    assert w.reasons()[name] == "Vanished"
    assert w.run_of(run)["state"] == "queued"
    w.pass_until(lambda: w.listed() == ["orca-p-2"])
    assert w.reasons() == {"orca-p-1": "Vanished", "orca-p-2": None}
    assert [resource.name for resource in w.engine.state(w.stack).resources] == ["orca-p-2"]
    ups = [operation for operation in w.operations() if operation["kind"] == "up"]
    assert [up["targets"][0].rpartition("::")[2] for up in ups] == ["orca-p-1", "orca-p-2"]


def test_a_stray_goes_after_the_grace_and_what_is_not_this_stacks_stays(passes: Passes) -> None:
    w = passes(ORCA_STRAY_GRACE_SECONDS="1h")
    plant(w, "orca-p-7", {"orca-stack": w.surroundings.stack_id, "orca-pool": "p"})
    plant(w, "orca-p-8", {"orca-stack": "anotherstacksids", "orca-pool": "p"})
    plant(w, "somebody-s", {})
    w.run_pass()
    assert w.listed() == ["orca-p-7", "orca-p-8", "somebody-s"]
    w.close()
    w = passes()
    w.pass_until(lambda: w.listed() == ["orca-p-8", "somebody-s"])
    for _ in range(2):
        w.run_pass()
    assert w.listed() == ["orca-p-8", "somebody-s"]
    assert w.operations() == []  # the engine knows nothing of them

    w.queue()
    w.run_pass()
    assert w.reasons() == {"orca-p-9": None}  # above every number that the provider lists


def test_labels_that_were_taken_off_by_hand_are_put_back_and_the_state_is_looked_at(passes: Passes) -> None:
    w = passes()
    name = w.machine_with_worker()
    labels = w.cloud.get(name).labels
    operations = w.operations()
    w.cloud.relabel(name, {"team": "red"})
    assert w.run_pass().changed == 1
    assert w.cloud.get(name).labels == {**labels, "team": "red"}
    assert w.run_pass().changed == 0
    assert w.reasons() == {name: None}
    assert [one["kind"] for one in w.operations()[len(operations) :]] == ["refresh"]


def test_too_many_strays_are_taken_for_a_mistake_and_none_is_deleted(passes: Passes, wait_until: WaitUntil) -> None:
    w = passes(ORCA_STRAY_MAX="2")
    names = ["orca-p-1", "orca-p-2", "orca-p-3"]
    for name in names:
        plant(w, name, {"orca-stack": w.surroundings.stack_id})
    youngest = max(machine.created_at for machine in w.cloud.list())
    wait_until(lambda: datetime.now(UTC) - youngest > timedelta(seconds=0.1))
    assert len(w.run_pass().plan.strays_held) == 3
    assert w.listed() == names
    [said] = [particulars for event, particulars in w.log.lines if "strays held" in event]
    assert all(name in str(said) for name in names)
    w.cloud.delete("orca-p-1")
    w.run_pass()
    assert w.listed() == []


def test_a_removal_is_given_up_when_a_run_lands_after_the_decision(passes: Passes, wait_until: WaitUntil) -> None:
    w = passes()
    w.configure(toml(idle="0.1"))
    w.queue()
    w.run_pass()
    wait_until(lambda: w.rows("select from orca.runs where state = 'succeeded'"))
    wait_until(lambda: [type(action) for action in plan_of(w)[0].actions] == [Remove])
    plan, snapshot, hands = plan_of(w)
    run = w.give_run("orca-p-1")
    operations = w.operations()
    assert hands_of_machines.apply(plan, snapshot, hands) == 0
    assert w.run_of(run)["state"] == "running"
    assert w.machine("orca-p-1")["revoked_at"] is None
    assert w.listed() == ["orca-p-1"]
    assert w.operations() == operations
    assert "removal given up: a run landed on it" in w.log.events()


def test_a_name_that_another_stack_takes_after_the_decision_is_passed_over(passes: Passes) -> None:
    w = passes()
    w.queue()
    plan, snapshot, hands = plan_of(w)
    assert [type(action) for action in plan.actions] == [Make]
    plant(w, "orca-p-1", {"orca-stack": "anotherstacksids"})
    before = w.cloud.get("orca-p-1")
    assert hands_of_machines.apply(plan, snapshot, hands) == 1
    assert w.reasons() == {"orca-p-1": "Failed", "orca-p-2": None}
    assert w.count("orca.pool_offers") == 0  # a name that is taken says nothing of the offering
    for _ in range(2):
        w.run_pass()
    assert w.cloud.get("orca-p-1") == before
    assert w.listed() == ["orca-p-1", "orca-p-2"]


def test_a_machine_whose_worker_never_shows_up_is_removed_and_its_console_kept(
    passes: Passes, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    (home / "sitecustomize.py").write_text(
        "import sys, time\n"
        "if 'orca_infra.machines.worker' in sys.orig_argv:\n"
        "    print('the worker image is broken', flush=True)\n"
        "    time.sleep(600)\n"
    )
    w = passes()
    w.engine.stacks()  # this process's guard begins with its first engine, and keeps the environment of then
    w.close()
    monkeypatch.setenv("PYTHONPATH", str(home))
    w = passes()
    w.queue()
    w.run_pass()
    monkeypatch.delenv("PYTHONPATH")
    assert w.run_pass().plan.reports[0].message == "1 machine is still booting"
    w.close()
    w = passes(ORCA_POOL_BOOT_SECONDS="1")
    w.pass_until(lambda: w.reasons()["orca-p-1"] == "BootTimeout")
    assert "the worker image is broken" in (w.surroundings.logs_folder / "orca-p-1.console.log").read_text()
    # Demand gets a new number; how long that one lives depends on how long passes take, since its worker is broken, too.
    w.pass_until(lambda: "orca-p-2" in w.reasons() and "orca-p-1" not in w.listed())


def test_the_machines_of_a_pool_that_is_gone_from_the_file_go_once_they_are_idle(passes: Passes) -> None:
    w = passes()
    name = w.machine_with_worker()
    run = w.give_run(name)
    w.configure("[pools]")
    w.run_pass()
    assert (w.reasons(), w.listed()) == ({name: None}, [name])
    w.rows("select orca.move_run(%(run)s, 1, 'running', 'succeeded', 'worker', %(name)s, null)", run=run, name=name)
    w.run_pass()
    assert (w.reasons(), w.listed()) == ({name: "PoolGone"}, [])


def test_a_machine_is_born_once_and_no_later_change_of_anything_reaches_it(
    passes: Passes, wait_until: WaitUntil
) -> None:
    w = passes()
    name = w.machine_with_worker()
    row, machine, operations = w.machine(name), w.cloud.get(name), w.operations()
    w.close()

    later = passes(ORCA_TOKEN_KEY="another key, of a later day", ORCA_HEARTBEAT_SECONDS="0.4")
    later.configure(toml(image="worker:2", types='type = "large", spot = true'))
    for _ in range(2):
        assert later.run_pass().changed == 0
    assert later.operations() == operations

    # A new machine in the same stack is declared alone: the old one is not even looked at.
    later.give_run(name)
    later.queue()
    later.pass_until(lambda: "orca-p-2" in later.reasons())
    assert later.machine(name) == row
    assert later.cloud.get(name) == machine
    assert (later.cloud.get("orca-p-2").type, later.machine("orca-p-2")["type"]) == ("large", "large")

    # Its worker's token is still good.
    [before] = later.rows("select seen_at from orca.workers where name = %(name)s", name=name)
    wait_until(
        lambda: later.rows(
            "select from orca.workers where name = %(name)s and seen_at > %(at)s", name=name, at=before["seen_at"]
        )
    )


def test_the_token_stands_in_no_row(passes: Passes) -> None:
    w = passes()
    name = w.machine_with_worker()
    console = w.cloud.folder / "machines" / name / "process.json"
    pid = json.loads(console.read_text())["pid"]
    environ = dict(
        item.split(b"=", 1) for item in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if b"=" in item
    )
    token = environ[b"ORCA_TOKEN"].decode()
    assert len(token) == 64
    for table in ("pool_machines", "engine_operations", "owned", "pool_status", "pool_offers", "workers", "runs"):
        assert token not in repr(w.rows(f"select * from orca.{table}"))
    assert token not in repr(w.log.lines)


def test_a_machine_that_the_state_has_lost_is_kept_and_removed_later_all_the_same(
    passes: Passes, wait_until: WaitUntil
) -> None:
    w = passes()
    w.configure(toml(idle="0.5"))
    name = w.machine_with_worker()
    w.engine.drop(w.stack)
    w.execute("delete from orca.owned")
    if w.run_pass().changed == 0:
        assert w.listed() == [name]
    w.pass_until(lambda: w.reasons() == {name: "Idle"})
    assert w.listed() == []


def test_a_locked_stack_burns_no_number(passes: Passes, monkeypatch: pytest.MonkeyPatch) -> None:
    w = passes()
    w.queue()

    def locked(*_: object, **__: object) -> None:
        raise StackLocked("another operation holds the stack's lock")

    with monkeypatch.context() as patch:
        patch.setattr(w.passes.recorded, "up", locked)
        for _ in range(3):
            w.execute("update orca.pool_status set tried_at = null")
            w.run_pass()
    assert w.reasons() == {}
    assert "StackLocked" in w.rows("select last_attempt from orca.pool_status")[0]["last_attempt"]
    w.pass_until(lambda: w.reasons() == {"orca-p-1": None})
    assert w.listed() == ["orca-p-1"]


def test_a_pass_that_is_told_to_stop_begins_no_further_action(passes: Passes) -> None:
    w = passes()
    w.queue()
    plan, snapshot, hands = plan_of(w)
    assert plan.actions
    w.passes.stop()
    assert hands_of_machines.apply(plan, snapshot, hands) == 0
    assert (w.reasons(), w.operations(), w.listed()) == ({}, [], [])


def test_a_paused_pool_makes_nothing_and_keeps_what_is_idle_until_it_is_resumed(passes: Passes) -> None:
    w = passes()
    w.configure(toml(idle="0.1"))
    name = w.machine_with_worker()
    w.execute("insert into orca.pool_pauses (pool) values ('p')")
    w.queue(0)
    for _ in range(3):
        assert w.run_pass().changed == 0
    assert w.listed() == [name]
    [status] = w.rows("select message, machines, paused_since from orca.pool_status")
    assert status["message"].startswith("paused by a person")
    assert status["machines"] == {"idle": 1}
    assert status["paused_since"]
    w.execute("delete from orca.pool_pauses")
    w.pass_until(lambda: w.reasons() == {name: "Idle"})


def test_a_drained_machine_goes_once_its_run_has_ended_and_at_once_when_told_so(passes: Passes) -> None:
    w = passes()
    name = w.machine_with_worker()
    run = w.give_run(name)
    w.execute("update orca.pool_machines set drain_at = now()")
    assert w.run_pass().changed == 0
    w.rows("select orca.move_run(%(run)s, 1, 'running', 'succeeded', 'worker', %(name)s, null)", run=run, name=name)
    w.run_pass()
    assert (w.reasons(), w.listed()) == ({name: "Drained"}, [])

    second = w.machine_with_worker()
    run = w.give_run(second)
    w.execute("update orca.pool_machines set drain_at = now(), drain_now = true where ended_at is null")
    w.run_pass()
    assert w.reasons()[second] == "Drained"
    assert (w.run_of(run)["state"], w.run_of(run)["reason"]) == ("queued", "Drained")


def test_a_type_that_the_image_has_no_variant_for_is_left_out(passes: Passes) -> None:
    w = passes()
    w.configure(toml(types='type = "arm" }, { type = "small"', more='[local.types.arm]\narchitecture = "arm64"\n'))
    w.passes._images = lambda _: frozenset({"amd64"})
    w.queue()
    w.run_pass()
    assert w.machine("orca-p-1")["type"] == "small"
    [status] = w.rows("select skipped from orca.pool_status")
    assert status["skipped"] == "skipped: arm (arm64): image registry.example/worker:1 is for amd64 only"
