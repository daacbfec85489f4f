"""Run clusters thin on a real API server, with the real engine: admission, the five objects, the sweep, adoption, strays."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING

import pytest

from orca_infra.errors import OrcaError, SetupError
from orca_infra.kube.kinds import JOB, NAMESPACE, POD, SERVICE, Ref
from orca_infra.kube.labels import ROLE_LABEL, RUN_LABEL, STACK_LABEL, field_manager
from orca_infra.runs.apply import apply
from orca_infra.runs.model import RunPlan
from orca_infra.testing.cluster import TestCluster

if TYPE_CHECKING:
    from tests.cluster.runs.conftest import Room


def test_a_queued_run_gets_its_driver_head_and_workers(room: Room) -> None:
    room.queue()
    room.passes.run()
    run = room.rows("select * from orca.runs")[0]
    assert (run["state"], run["start"]) == ("running", 1)
    found = {
        (o["kind"], o["metadata"]["name"]): o for o in [{**o, "kind": o.get("kind") or ""} for o in room.objects()]
    }
    names = {name for _, name in found}
    base = f"orca-{run['id']}-1"
    assert {base, f"{base}-head", f"{base}-worker-0", f"{base}-worker-1"} <= names
    job = room.kube.get(Ref(kind=JOB, namespace=room.namespace, name=base))
    head = room.kube.get(Ref(kind=POD, namespace=room.namespace, name=f"{base}-head"))
    worker = room.kube.get(Ref(kind=POD, namespace=room.namespace, name=f"{base}-worker-1"))
    assert job
    assert head
    assert worker
    owner = head["metadata"]["ownerReferences"][0]
    assert owner["uid"] == job["metadata"]["uid"]
    assert not owner.get("controller")
    assert worker["metadata"]["labels"][ROLE_LABEL] == "worker"
    assert worker["metadata"]["labels"][RUN_LABEL] == str(run["id"])
    variables = {v["name"]: v.get("value") for v in worker["spec"]["containers"][0]["env"]}
    assert variables["DISTA_HEAD"] == f"{base}-head:6390"
    assert variables["GREETING"] == "hello"
    assert "ORCA_DB" not in variables
    driver = job["spec"]["template"]["spec"]["containers"][0]
    assert driver["command"] == ["orca", "resume", str(run["id"])]
    assert {"name": "orca-db", "key": "url"} in [
        v["valueFrom"]["secretKeyRef"] for v in driver["env"] if "valueFrom" in v
    ]
    assert {m["manager"] for m in job["metadata"]["managedFields"] if m["operation"] == "Apply"} == {
        field_manager(room.surroundings.stack_id)
    }


def test_a_run_without_tasks_gets_a_driver_alone(room: Room) -> None:
    room.queue(workers=0)
    room.passes.run()
    assert len(room.kube.list(JOB, namespace=room.namespace).items) == 1
    assert not room.kube.list(SERVICE, namespace=room.namespace).items


def test_a_pass_with_nothing_to_make_runs_no_engine(room: Room) -> None:
    room.queue()
    room.passes.run()
    before = room.rows("select count(*) as n from orca.engine_operations")
    assert room.passes.run() == 0
    assert room.rows("select count(*) as n from orca.engine_operations") == before


def test_an_ended_run_is_swept_with_its_log_and_its_cohort_is_dropped(room: Room) -> None:
    room.queue()
    room.passes.run()
    run = room.rows("select id from orca.runs")[0]["id"]
    room.wait_until(
        lambda: [
            p
            for p in room.kube.list(POD, namespace=room.namespace).items
            if p["metadata"]["labels"][ROLE_LABEL] == "driver"
        ],
        20,
    )
    room.end(run)
    room.until(lambda: not room.objects() and not room.rows("select * from orca.cohorts"))
    row = room.rows("select reason, log_saved_at from orca.run_clusters")[0]
    assert row["reason"] == "Ended"
    assert row["log_saved_at"] is not None
    log = (room.surroundings.logs_folder / str(run) / "driver.log").read_text()
    assert log.startswith(f"--- run {run} start 1, Pod orca-{run}-1-")
    assert room.rows("select * from orca.kube_objects") == []
    assert room.engine.state("dev.runs.1").resources == ()


def test_the_budget_admits_oldest_first_and_says_what_waits(room: Room) -> None:
    room.queue("small", runs=30, workers=2)  # 2,750m each: 36 fit 100 cores
    room.queue("huge", runs=1, workers=200)
    room.queue("late", runs=10, workers=2)
    plan = room.passes.plan()
    assert len(plan.admit) == 36
    assert any("more than the whole budget" in why for why in plan.waiting.values())
    assert any("of the budget is free" in why for why in plan.waiting.values())


def test_a_killed_up_is_adopted_by_the_next_cohort_with_all_uids(room: Room) -> None:
    """At 20 random moments of ups of 8 run clusters the engine is killed: the next pass makes the rest."""
    random = Random(20261129)
    adopted = [_kill_and_adopt(room, number, random.randrange(39)) for number in range(20)]
    assert any(0 < made < 40 for made in adopted), "no kill came while objects were being made"
    room.until(lambda: not room.rows("select * from orca.cohorts"))


def _kill_and_adopt(room: Room, number: int, objects: int) -> int:
    """One kill, once so many objects are there, and one recovery; gives how many had been made by then."""
    room.queue(f"killed-{number}", runs=8)
    over = threading.Event()
    killer = threading.Thread(target=_kill_engine, args=(room, objects, over))
    killer.start()
    with suppress(OrcaError):
        room.passes.run()
    over.set()
    killer.join()
    before = room.uids()
    heir = room.again()
    heir.until(lambda: not heir.rows("select 1 as x from orca.kube_objects where uid is null"))
    assert before <= heir.uids(), "an object that was made before the kill was replaced"
    for run in heir.rows("select id from orca.runs where state = 'running'"):
        heir.end(run["id"])
    heir.until(lambda: not heir.objects(), 60)
    return len(before)


def _kill_engine(room: Room, objects: int, over: threading.Event) -> None:
    while not over.is_set():
        engines = room.rows("select pid from orca.engine_operations where ended_at is null and pid is not null")
        if engines and len(room.uids()) >= objects:
            for row in engines:
                with suppress(ProcessLookupError):  # it came to its end meanwhile
                    os.kill(row["pid"], signal.SIGKILL)
            return


def test_one_refused_object_stops_no_other_and_ends_its_start_in_the_servers_words(room: Room) -> None:
    room.queue("good", runs=2, workers=0)
    room.queue("bad", runs=1, workers=0)
    with room.database.transaction() as transaction:
        transaction.run("update orca.pipelines set image = '' where name = 'bad'")
    room.passes.run()
    assert len(room.kube.list(JOB, namespace=room.namespace).items) == 2
    refused = room.rows("select refused, tries, next_try_at from orca.kube_objects where uid is null")[0]
    assert "image" in refused["refused"]
    assert refused["tries"] == 1
    with room.database.transaction() as transaction:
        transaction.run("update orca.run_clusters set created_at = created_at - interval '11 minutes'")
    room.until(lambda: room.rows("select * from orca.run_clusters where reason = 'Refused'"))
    row = room.rows(
        "select c.ending_detail, r.reason from orca.run_clusters c join orca.runs r on r.id = c.run"
        " where c.pipeline = 'bad' and c.reason is not null"
    )[0]
    assert "image" in row["ending_detail"]
    assert row["reason"] == "Refused"


def test_a_lost_head_ends_the_start_and_queues_the_run_again(room: Room) -> None:
    room.queue()
    room.passes.run()
    run = room.rows("select id from orca.runs")[0]["id"]
    head = Ref(kind=POD, namespace=room.namespace, name=f"orca-{run}-1-head")
    assert room.kube.delete(head)
    room.wait_until(lambda: room.kube.get(head) is None, 20)
    room.until(lambda: room.rows("select * from orca.run_clusters where reason = 'HeadLost'"))
    row = room.rows("select state, start, reason from orca.runs")[0]
    # Queued again by then, or already admitted at its next start.
    assert (row["state"], row["start"]) in {("queued", 1), ("running", 2)}
    room.until(lambda: room.rows("select * from orca.runs where state = 'running' and start = 2"))


def test_a_job_deleted_by_hand_is_vanished_and_never_declared_again(room: Room) -> None:
    room.queue(workers=0, max_starts=1)
    room.passes.run()
    run = room.rows("select id from orca.runs")[0]["id"]
    job = Ref(kind=JOB, namespace=room.namespace, name=f"orca-{run}-1")
    room.kube.delete(job)
    room.wait_until(lambda: room.kube.get(job) is None, 20)
    room.until(lambda: room.rows("select * from orca.run_clusters where reason = 'Vanished'"))
    assert room.kube.get(job) is None
    assert room.rows("select state, reason from orca.runs")[0] == {"state": "failed", "reason": "Vanished"}


def test_strays_go_and_those_that_others_have_or_have_taken_back_stay(room: Room) -> None:
    mine = {STACK_LABEL: room.surroundings.stack_id, ROLE_LABEL: "driver"}
    planted = {
        "stray": mine,
        "taken-back": mine,
        "foreign": {STACK_LABEL: "another", ROLE_LABEL: "driver"},
        "unlabelled": {},
        "without-role": {STACK_LABEL: room.surroundings.stack_id},
    }
    for name, labels in planted.items():
        room.kube.create(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name, "namespace": room.namespace, "labels": labels},
                "spec": {"containers": [{"name": "c", "image": "x"}]},
            }
        )
    taken_back = Ref(kind=POD, namespace=room.namespace, name="taken-back")
    room.wait_until(lambda: "taken-back" in {stray.name for stray in room.passes.plan().strays}, 20)
    seen = room.passes.plan().strays
    room.kube.patch(taken_back, {"metadata": {"labels": {ROLE_LABEL: None}}})  # just before what was decided is done
    apply(RunPlan(strays=seen), room.passes._hands)
    room.until(lambda: room.kube.get(Ref(kind=POD, namespace=room.namespace, name="stray")) is None)
    left = {
        pod["metadata"]["name"]
        for pod in room.kube.list(POD, namespace=room.namespace).items
        if "deletionTimestamp" not in pod["metadata"]
    }
    assert left == {"taken-back", "foreign", "unlabelled", "without-role"}


def test_a_desired_object_that_nobody_owns_is_adopted_and_not_deleted(room: Room) -> None:
    """The loop died between making a driver and recording it: the running driver survives its controller."""
    room.queue(workers=0)
    room.passes.run()
    before = room.uids()
    with room.database.transaction() as transaction:
        transaction.run("update orca.kube_objects set uid = null, confirmed_at = null, cohort = null")
    room = room.again()
    room.until(lambda: not room.rows("select 1 as x from orca.kube_objects where uid is null"))
    assert before <= room.uids()


def test_a_namespace_of_another_stack_is_refused(room: Room) -> None:
    room.kube.patch(
        Ref(kind=NAMESPACE, namespace=None, name=room.namespace), {"metadata": {"labels": {STACK_LABEL: "another"}}}
    )
    room.queue()
    with pytest.raises(SetupError, match="belongs to stack id another"):
        room.passes.run()
    assert room.rows("select state from orca.runs")[0]["state"] == "queued"


def test_an_unreachable_cluster_is_never_an_empty_one(room: Room, cluster: TestCluster) -> None:
    room.queue()
    room.passes.run()
    before = room.uids()
    cluster.stop_server()
    try:
        with pytest.raises(OrcaError):
            room.passes.run()
        assert room.rows("select ending_reason from orca.run_clusters")[0]["ending_reason"] is None
    finally:
        cluster.start_server()
    room.until(lambda: True)
    assert before <= room.uids()
