"""What goes wrong around run clusters, on a real API server: the rest goes on, no run is lost or doubled, status says what for."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from orca_infra.errors import OrcaError, SetupError, Transient
from orca_infra.kube.client import Kube
from orca_infra.kube.kinds import JOB, NAMESPACE, POD, Ref
from orca_infra.kube.labels import PIPELINE_LABEL, RUN_LABEL, START_LABEL
from orca_infra.loop.cluster_strays import ClusterStrays
from orca_infra.runs.status import read_queued, read_waiting_starts
from orca_infra.status import read_status
from orca_infra.testing.cluster import TestCluster
from orca_infra.testing.cluster_faults import FaultyServer
from orca_infra.testing.cluster_http import Api

if TYPE_CHECKING:
    from tests.cluster.runs.conftest import Room

_ADMISSION = "/apis/admissionregistration.k8s.io/v1"


def waits(room: Room) -> list[str]:
    with room.database.snapshot() as transaction:
        return [row["waiting"] for row in read_waiting_starts(transaction)]


def age(room: Room, pipeline: str) -> None:
    """Let its starts have been admitted, and their objects refused, eleven minutes ago."""
    with room.database.transaction() as transaction:
        parameters = {"p": pipeline}
        transaction.run(
            "update orca.run_clusters set created_at = created_at - interval '11 minutes' where pipeline = %(p)s",
            parameters,
        )
        transaction.run("update orca.kube_objects set next_try_at = now()")


def doubled(room: Room) -> list[Any]:
    """Starts of which there is more than one Job or one running driver."""
    jobs = room.kube.list(JOB, namespace=room.namespace).items
    drivers = [
        pod
        for pod in room.kube.list(POD, namespace=room.namespace).items
        if pod["metadata"]["labels"].get("orca.role") == "driver" and pod["status"].get("phase") == "Running"
    ]
    found = []
    for items in (jobs, drivers):
        counted = Counter(item["metadata"]["labels"][RUN_LABEL] for item in items)
        found += [run for run, count in counted.items() if count > 1]
    return found


def is_whole(room: Room, runs: int) -> bool:
    """Whether so many run, each with everything that it is to have."""
    open_ = room.rows("select count(*) as n from orca.kube_objects where uid is null")[0]["n"]
    running = room.rows("select count(*) as n from orca.runs where state = 'running' and start = 1")[0]["n"]
    return bool(open_ == 0 and running == runs)


def test_without_its_namespace_nothing_is_admitted_and_it_goes_on_when_that_is_back(room: Room) -> None:
    room.kube.delete(Ref(kind=NAMESPACE, namespace=None, name=room.namespace))
    room.queue(workers=0)
    with pytest.raises(SetupError, match=r"is being deleted|is missing"):
        room.passes.run()
    assert room.rows("select state, start from orca.runs") == [{"state": "queued", "start": 0}]
    assert room.rows("select count(*) as n from orca.engine_operations")[0]["n"] == 0
    room.wait_until(lambda: room.kube.get(Ref(kind=NAMESPACE, namespace=None, name=room.namespace)) is None, 30)
    with pytest.raises(SetupError, match=f"the namespace {room.namespace} is missing"):
        room.passes.run()
    labels = {"orca.stack": room.surroundings.stack_id}
    room.kube.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": room.namespace, "labels": labels}})
    room.until(lambda: is_whole(room, 1))


@contextmanager
def quota(api: Api, namespace: str, **hard: str) -> Iterator[None]:
    path = f"/api/v1/namespaces/{namespace}/resourcequotas"
    api.call("POST", path, {"metadata": {"name": "q"}, "spec": {"hard": hard}})
    yield
    api.call("DELETE", f"{path}/q")


def test_a_full_quota_keeps_out_what_it_must_is_said_and_queues_the_run_again(room: Room, cluster: TestCluster) -> None:
    """The Job fits, its head does not; a run of the same moment without a head goes on. Even at its last start it is queued."""
    room.passes.run()
    with quota(cluster.api, room.namespace, **{"count/services": "0"}):
        room.wait_until(
            lambda: cluster.api.call("GET", f"/api/v1/namespaces/{room.namespace}/resourcequotas/q")["status"].get(
                "hard"
            ),
            20,
        )
        room.queue("alone", workers=0)
        room.queue("headed", workers=1, max_starts=1)
        room.passes.run()
        room.passes.run()
        assert any("exceeded quota: q" in waiting for waiting in waits(room))
        assert not room.rows("select * from orca.kube_objects where uid is null and name not like '%%-head'")
        age(room, "headed")
        room.until(
            lambda: room.rows("select * from orca.run_clusters where pipeline = 'headed' and ended_at is not null")
        )
    row = room.rows("select c.reason, c.ending_detail from orca.run_clusters c where c.ended_at is not null")[0]
    assert row["reason"] == "Refused"
    assert "exceeded quota: q" in row["ending_detail"]
    assert room.rows("select state from orca.runs where pipeline = 'alone'")[0]["state"] == "running"
    room.until(
        lambda: room.rows("select * from orca.runs where pipeline = 'headed' and state = 'running' and start = 2")
    )
    room.until(lambda: not room.rows("select * from orca.kube_objects where uid is null"))
    assert doubled(room) == []


def test_a_quota_that_the_jobs_own_pod_does_not_fit_is_told_by_the_jobs_events(
    room: Room, cluster: TestCluster
) -> None:
    with quota(cluster.api, room.namespace, pods="0"):
        room.wait_until(
            lambda: cluster.api.call("GET", f"/api/v1/namespaces/{room.namespace}/resourcequotas/q")["status"].get(
                "hard"
            ),
            20,
        )
        room.queue("alone", workers=0, max_starts=1)
        room.until(lambda: any("exceeded quota: q" in waiting for waiting in waits(room)), 40)
        impatient = room.with_settings(ORCA_RUN_START_SECONDS="1")
        impatient.until(lambda: room.rows("select * from orca.run_clusters where reason = 'Refused'"))
        assert room.rows("select * from orca.runs where state = 'failed'") == []


@contextmanager
def policy(api: Api, name: str, namespace: str, expression: str) -> Iterator[None]:
    """A ValidatingAdmissionPolicy: the API server's own admission, by an expression of an operator."""
    rules = [{"apiGroups": ["batch"], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["jobs"]}]
    spec: dict[str, Any] = {
        "failurePolicy": "Fail",
        "matchConstraints": {"resourceRules": rules},
        "validations": [{"expression": expression, "message": "this pipeline is not welcome"}],
    }
    where = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
    binding = {"policyName": name, "validationActions": ["Deny"], "matchResources": where}
    policies, bindings = f"{_ADMISSION}/validatingadmissionpolicies", f"{_ADMISSION}/validatingadmissionpolicybindings"
    api.call("POST", policies, {"metadata": {"name": name}, "spec": spec})
    api.call("POST", bindings, {"metadata": {"name": name}, "spec": binding})
    yield
    api.call("DELETE", f"{bindings}/{name}")
    api.call("DELETE", f"{policies}/{name}")


def test_admission_that_refuses_one_run_stops_no_other_and_its_words_are_kept(room: Room, cluster: TestCluster) -> None:
    unwelcome = f"object.metadata.labels['{PIPELINE_LABEL}'] != 'unwelcome'"
    with policy(cluster.api, room.namespace, room.namespace, unwelcome):
        room.wait_until(lambda: refuses(room, "unwelcome"), 30)
        room.queue("welcome", runs=2, workers=1)
        room.queue("unwelcome", workers=1, max_starts=1)
        room.passes.run()
        room.passes.run()
        [waiting] = waits(room)
        assert "this pipeline is not welcome" in waiting
        assert len(room.kube.list(JOB, namespace=room.namespace).items) == 2
        age(room, "unwelcome")
        room.until(
            lambda: room.rows("select * from orca.run_clusters where pipeline = 'unwelcome' and reason = 'Refused'")
        )
    run = room.rows("select state, reason from orca.runs where pipeline = 'unwelcome'")[0]
    assert run == {"state": "failed", "reason": "Refused"}
    assert room.rows("select count(*) as n from orca.runs where state = 'running' and start = 1")[0]["n"] == 2


def refuses(room: Room, pipeline: str) -> bool:
    """Whether admission is in force: an API server takes a moment to know of it."""
    template = {"spec": {"restartPolicy": "Never", "containers": [{"name": "c", "image": "i"}]}}
    metadata = {"name": "probe", "namespace": room.namespace, "labels": {PIPELINE_LABEL: pipeline}}
    try:
        room.kube.create(
            {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": {"template": template}}
        )
    except OrcaError:
        return True
    room.kube.delete(Ref(kind=JOB, namespace=room.namespace, name="probe"))
    return False


def test_a_webhook_that_cannot_be_reached_ends_no_start_however_long_it_lasts(room: Room, cluster: TestCluster) -> None:
    """It is an outage (500), and no refusal: tried again until it is over."""
    rules = [{"apiGroups": ["batch"], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["jobs"]}]
    hook = {
        "name": "away.example.com",
        "clientConfig": {"url": "https://127.0.0.1:1/nobody"},
        "rules": rules,
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": room.namespace}},
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        "failurePolicy": "Fail",
        "timeoutSeconds": 1,
    }
    path = f"{_ADMISSION}/validatingwebhookconfigurations"
    cluster.api.call("POST", path, {"metadata": {"name": room.namespace}, "webhooks": [hook]})
    try:
        room.wait_until(lambda: refuses(room, "p"), 30)
        room.queue(workers=0, max_starts=1)
        room.passes.run()
        age(room, "reports")
        room.passes.run()
        room.passes.run()
        assert any("away.example.com" in waiting for waiting in waits(room))
        assert room.rows("select ending_reason from orca.run_clusters") == [{"ending_reason": None}]
    finally:
        cluster.api.call("DELETE", f"{path}/{room.namespace}")
    with room.database.transaction() as transaction:
        transaction.run("update orca.kube_objects set next_try_at = now() where uid is null")
    room.until(lambda: is_whole(room, 1))


@pytest.mark.parametrize("fault", [{"delay_seconds": 0.1}, {"throttled": 0.3}, {"failing": 0.2}, {"cut": 0.3}])
def test_a_slow_throttling_or_failing_api_server_loses_and_doubles_nothing(
    room: Room, cluster: TestCluster, tmp_path: Path, fault: dict[str, float]
) -> None:
    with FaultyServer(cluster, tmp_path, seed=20261129) as server, Kube.connect(kubeconfig=server.kubeconfig) as kube:
        faulty = room.with_settings(kube=kube, KUBECONFIG=str(server.kubeconfig))
        room.queue(runs=3, workers=1)
        for name, value in fault.items():
            setattr(server, name, value)
        for _ in range(3):
            with suppress(OrcaError):
                faulty.passes.run()
        assert doubled(room) == []
        server.heal()
        faulty.until(lambda: is_whole(room, 3), 60)
        assert server.faults or server.delay_seconds == 0
    assert doubled(room) == []
    assert len(room.kube.list(JOB, namespace=room.namespace).items) == 3
    for row in room.rows("select id from orca.runs"):
        room.end(row["id"])
    room.until(lambda: not room.objects(), 60)
    room.until(lambda: not room.rows("select * from orca.run_clusters where ended_at is null"))
    assert {row["reason"] for row in room.rows("select reason from orca.run_clusters")} == {"Ended"}


def test_an_api_server_that_is_away_ends_nothing_and_the_passes_go_on_when_it_is_back(
    room: Room, cluster: TestCluster
) -> None:
    room.queue(runs=2, workers=1)
    room.passes.run()
    before = room.uids()
    room.queue("later", runs=1, workers=0)
    cluster.stop_server()
    try:
        for _ in range(3):
            with pytest.raises(Transient):
                room.passes.run()
    finally:
        cluster.start_server()
    room.until(lambda: is_whole(room, 3), 60)
    assert before <= room.uids()
    assert doubled(room) == []


def test_a_job_that_its_ttl_took_while_no_loop_was_there_is_not_made_again(room: Room) -> None:
    """The `up` ended unknown; by the time of the next pass the driver may have run and gone."""
    room.queue(workers=1, max_starts=1)
    room.passes.run()
    run = room.rows("select id from orca.runs")[0]["id"]
    with room.database.transaction() as transaction:
        transaction.run(
            "update orca.kube_objects set uid = null, confirmed_at = null, declared_at = now() - interval '11 minutes'"
        )
    job = Ref(kind=JOB, namespace=room.namespace, name=f"orca-{run}-1")
    room.kube.delete(job)
    room.wait_until(lambda: not room.objects(), 30)
    room.again().until(lambda: room.rows("select * from orca.run_clusters where reason = 'Vanished'"))
    assert room.kube.get(job) is None
    assert room.rows("select state, start, reason from orca.runs")[0] == {
        "state": "failed",
        "start": 1,
        "reason": "Vanished",
    }


def is_heard(logs: Path) -> bool:
    """Whether what a driver said has come into its part, though it has been silent since."""
    return any("nothing to say" in part.read_text() for part in logs.glob("*/.driver-*.part"))


def test_what_was_heard_of_a_driver_whose_job_its_ttl_took_is_in_its_log(room: Room) -> None:
    room.queue(workers=0)
    room.until(lambda: is_heard(room.surroundings.logs_folder), 30)
    run = room.rows("select id from orca.runs")[0]["id"]
    job = Ref(kind=JOB, namespace=room.namespace, name=f"orca-{run}-1")
    room.kube.delete(job)
    room.wait_until(lambda: not room.objects(), 30)
    room.end(run)
    room.until(lambda: room.rows("select * from orca.run_clusters where ended_at is not null"))
    log = (room.surroundings.logs_folder / str(run) / "driver.log").read_text()
    assert log.startswith(f"--- run {run} start 1, Pod orca-{run}-1-")
    assert "a fake container has nothing to say" in log


def test_labels_that_somebody_took_off_are_put_back_and_no_driver_is_left_behind(room: Room) -> None:
    room.queue(workers=0)
    room.passes.run()
    run = room.rows("select id from orca.runs")[0]["id"]
    job = Ref(kind=JOB, namespace=room.namespace, name=f"orca-{run}-1")
    bare = {"metadata": {"labels": {"orca.stack": None, "orca.run": None, START_LABEL: None, "orca.role": None}}}
    room.kube.patch(job, bare)
    room.passes.run()
    found = room.kube.get(job)
    assert found
    assert found["metadata"]["labels"][RUN_LABEL] == str(run)
    room.kube.patch(job, bare)
    room.end(run)
    room.until(lambda: room.rows("select * from orca.run_clusters where ended_at is not null"))
    room.wait_until(lambda: room.kube.get(job) is None, 20)
    room.wait_until(lambda: not room.kube.list(POD, namespace=room.namespace).items, 20)


def test_strays_that_are_too_many_wait_for_an_operator_who_sees_and_deletes_them(room: Room) -> None:
    few = room.with_settings(ORCA_STRAY_MAX="2", ORCA_STRAY_GRACE_SECONDS="0.1")
    labels = {"orca.stack": room.surroundings.stack_id, "orca.role": "driver"}
    for number in range(3):
        metadata = {"name": f"planted-{number}", "namespace": room.namespace, "labels": labels}
        spec = {"containers": [{"name": "c", "image": "x"}]}
        room.kube.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    few.until(
        lambda: room.rows("select * from orca.attention where message like '3 objects of runs that nobody owns%%'"), 20
    )
    strays = ClusterStrays(few.surroundings, room.kube)
    found = strays.find()
    assert {stray.name for stray in found} == {"planted-0", "planted-1", "planted-2"}
    for stray in found:
        strays.delete(stray)
    room.wait_until(lambda: not room.kube.list(POD, namespace=room.namespace).items, 20)
    few.until(lambda: not room.rows("select * from orca.attention"), 10)


def test_a_sweep_leaves_the_successor_alone_and_never_are_there_two_drivers(room: Room) -> None:
    """R3: the scheduler takes a run back, and its next start is made as the earlier one goes."""
    room.queue(workers=1)
    room.passes.run()
    run = room.rows("select id from orca.runs")[0]["id"]
    first = room.uids()
    with room.database.transaction() as transaction:
        transaction.run("update orca.runs set state = 'queued'")

    def second_is_whole() -> bool:
        assert doubled(room) == []
        open_ = room.rows("select * from orca.kube_objects where uid is null")
        return not open_ and bool(room.rows("select * from orca.runs where state = 'running' and start = 2"))

    room.until(second_is_whole)
    second = {
        row["uid"] for row in room.rows("select uid from orca.kube_objects where run = %(r)s and start = 2", r=run)
    }
    for _ in range(3):
        room.passes.run()
    room.wait_until(lambda: not first & room.uids(), 20)
    assert second <= room.uids()
    assert {o["metadata"]["labels"][START_LABEL] for o in room.objects()} == {"2"}


def test_what_is_queued_says_what_it_waits_for(room: Room) -> None:
    room.queue("held", runs=2, workers=0, max_runs=1)
    room.passes.run()
    with room.database.snapshot() as transaction:
        [row] = read_queued(transaction, room.settings)
    assert row["waiting"] == "its pipeline runs max_runs (1) already"
    assert [row["waiting"] for row in read_status(room.surroundings)["waiting"]] == [row["waiting"]]


def test_a_log_folder_on_a_full_disk_is_said_and_holds_up_nothing_for_ever(room: Room, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        small = room.with_settings(ORCA_LOGS=str(disk), ORCA_RUN_LOG_SECONDS="3")
        small.queue(workers=0)
        small.until(lambda: is_heard(disk), 30)
        filler = disk / "filler"
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(b"x" * 512):
                pass
        run = small.rows("select id from orca.runs")[0]["id"]
        small.end(run)
        small.until(
            lambda: small.rows(
                "select * from orca.attention where topic = 'drivers'' logs' and message like '%%No space%%'"
            ),
            20,
        )
        small.until(lambda: small.rows("select * from orca.run_clusters where ended_at is not null"), 40)
        filler.unlink()
        small.passes.prune()
        log = (disk / str(run) / "driver.log").read_text()
        assert "a fake container has nothing to say" in log
        small.passes.run()
        assert not small.rows("select * from orca.attention where topic = 'drivers'' logs'")
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
