"""The test cluster itself: what tests may rely on, and that nothing of it is ever left behind."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from orca_infra.errors import Refused, SetupError, Transient
from orca_infra.process import is_alive
from orca_infra.testing.cluster import FLAGS, NODE_CAPACITY, TestCluster
from orca_infra.testing.cluster_files import PREFIX, remove_leftovers

WaitUntil = Callable[..., None]

HOLDER = """
import json, time
from orca_infra.testing.cluster import TestCluster
cluster = TestCluster.start()
print(json.dumps({"folder": str(cluster.folder), "pids": [p.pid for p in cluster.pids().values()]}), flush=True)
time.sleep(600)
"""


def pod(name: str, **annotations: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "annotations": marks(annotations), "labels": {"app": name}}, "spec": pod_spec()}


def pod_spec() -> dict[str, Any]:
    return {"restartPolicy": "Never", "containers": [{"name": "main", "image": "registry.example/image:1"}]}


def job(name: str, **annotations: str) -> dict[str, Any]:
    template = {"metadata": {"annotations": marks(annotations)}, "spec": pod_spec()}
    return {"metadata": {"name": name}, "spec": {"backoffLimit": 0, "template": template}}


def marks(annotations: dict[str, str]) -> dict[str, str]:
    return {f"orca.testing/{name.replace('_', '-')}": value for name, value in annotations.items()}


def conditions(item: dict[str, Any]) -> dict[str, str]:
    return {condition["type"]: condition["status"] for condition in item["status"].get("conditions", ())}


def is_ready(item: dict[str, Any]) -> bool:
    return conditions(item).get("Ready") == "True"


def processes_of(folder: str) -> list[int]:
    """The living processes that name this folder in their command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if folder.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


@pytest.fixture(scope="module")
def own_cluster() -> Iterator[TestCluster]:
    """One that a test may break; started in a thread that is over at once."""
    started: list[TestCluster] = []
    thread = threading.Thread(target=lambda: started.append(TestCluster.start()))
    thread.start()
    thread.join()
    yield started[0]
    started[0].stop()


# What tests may rely on.


def test_it_comes_up_with_a_node_that_takes_pods(cluster: TestCluster, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\nthe cluster was ready in {cluster.ready_seconds:.1f} s; CPU so far: {cluster.cpu_seconds()}")
    assert cluster.api.text("GET", "/readyz") == "ok"
    node = cluster.api.call("GET", "/api/v1/nodes/node-1")
    assert is_ready(node)
    assert node["status"]["allocatable"] == NODE_CAPACITY
    assert set(cluster.pids()) == set(FLAGS)
    assert all(is_alive(process) for process in cluster.pids().values())


def test_a_pod_becomes_ready_and_stays(objects: Any, wait_until: WaitUntil, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    objects.create("pods", pod("p"))
    wait_until(lambda: is_ready(objects.get("pods", "p")), 10)
    with capsys.disabled():
        print(f"\na Pod was Ready in {1000 * (time.monotonic() - began):.0f} ms")
    status = objects.get("pods", "p")["status"]
    assert status["phase"] == "Running"
    assert status["podIP"]
    assert status["containerStatuses"][0]["ready"] is True


def test_a_pod_that_is_to_wait_is_not_ready_before_its_time(objects: Any, wait_until: WaitUntil) -> None:
    objects.create("pods", pod("late", ready_after="3"))
    wait_until(lambda: is_ready(objects.get("pods", "late")))
    late = objects.get("pods", "late")
    [since] = [one["lastTransitionTime"] for one in late["status"]["conditions"] if one["type"] == "Ready"]
    waited = datetime.fromisoformat(since) - datetime.fromisoformat(late["metadata"]["creationTimestamp"])
    assert waited >= timedelta(seconds=2)  # both are whole seconds


def test_a_deleted_pod_goes_at_once_whatever_its_grace_period(objects: Any, wait_until: WaitUntil) -> None:
    patient = pod("p")
    patient["spec"]["terminationGracePeriodSeconds"] = 3600
    objects.create("pods", patient)
    wait_until(lambda: is_ready(objects.get("pods", "p")), 10)
    objects.delete("pods", "p")
    wait_until(lambda: objects.find("pods", "p") is None, 5)


def test_a_job_ends_only_when_its_pod_is_told_to(objects: Any, wait_until: WaitUntil) -> None:
    objects.create("jobs", job("stays"))
    objects.create("jobs", job("ends", complete_after="0.2"))
    wait_until(lambda: conditions(objects.get("jobs", "ends")).get("Complete") == "True", 20)
    assert objects.get("jobs", "stays")["status"]["active"] == 1
    phases = {item["metadata"]["labels"]["job-name"]: item["status"]["phase"] for item in objects.list("pods")}
    assert phases == {"stays": "Running", "ends": "Succeeded"}


def test_a_job_whose_pod_is_told_to_fail_fails(objects: Any, wait_until: WaitUntil) -> None:
    objects.create("jobs", job("fails", complete_after="0", exit_code="3"))
    wait_until(lambda: conditions(objects.get("jobs", "fails")).get("Failed") == "True", 20)
    (failed,) = objects.list("pods")
    assert failed["status"]["phase"] == "Failed"
    assert failed["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 3


def test_a_secret_and_a_service_with_its_endpoints_can_be_made(objects: Any, wait_until: WaitUntil) -> None:
    objects.create("secrets", {"metadata": {"name": "s"}, "stringData": {"key": "value"}})
    assert objects.get("secrets", "s")["data"] == {"key": "dmFsdWU="}
    objects.create("pods", pod("p"))
    spec = {"selector": {"app": "p"}, "ports": [{"port": 80}]}
    assert objects.create("services", {"metadata": {"name": "s"}, "spec": spec})["spec"]["clusterIP"].startswith(
        "10.0."
    )
    wait_until(lambda: any(item["endpoints"] for item in objects.list("endpointslices")), 10)
    addresses = objects.list("endpointslices")[0]["endpoints"][0]["addresses"]
    assert addresses == [objects.get("pods", "p")["status"]["podIP"]]


def test_rights_are_those_of_rbac(cluster: TestCluster, objects: Any) -> None:
    path = objects.path("serviceaccounts")
    cluster.api.call("POST", path, {"metadata": {"name": "nobody"}})
    token = cluster.api.call("POST", f"{path}/nobody/token", {"spec": {}})["status"]["token"]
    with pytest.raises(Refused, match="Forbidden"):
        cluster.kubectl("get", f"--token={token}", "secrets", "-n", objects.namespace)


def test_kubectl_speaks_to_it(cluster: TestCluster, objects: Any) -> None:
    manifest = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"a": "b"}}
    cluster.kubectl("apply", "-n", objects.namespace, "-f", "-", stdin=json.dumps(manifest))
    assert objects.get("configmaps", "c")["data"] == {"a": "b"}
    assert cluster.kubectl("get", "nodes", "-o", "name") == "node/node-1\n"


def test_its_access_files_are_its_owners_alone(cluster: TestCluster) -> None:
    assert cluster.folder.stat().st_mode & 0o777 == 0o700
    assert cluster.kubeconfig.stat().st_mode & 0o777 == 0o600
    for process in cluster.pids().values():
        assert cluster.token.encode() not in Path(f"/proc/{process.pid}/cmdline").read_bytes()


# Outages, and ends.


def test_the_server_comes_back_with_its_data_on_the_same_port(own_cluster: TestCluster, wait_until: WaitUntil) -> None:
    server, cpu_seconds = own_cluster.server, own_cluster.cpu_seconds()["kube-apiserver"]
    own_cluster.api.call("POST", "/api/v1/namespaces/default/configmaps", {"metadata": {"name": "kept"}})
    own_cluster.stop_server()
    assert "kube-apiserver" not in own_cluster.pids()
    with pytest.raises(Transient, match="refused"):
        own_cluster.api.text("GET", "/readyz")
    port = int(server.rpartition(":")[2])
    with socket.socket() as other, pytest.raises(OSError) as taken:
        other.bind(("127.0.0.1", port))
    assert taken.value.errno == errno.EADDRINUSE
    own_cluster.start_server()
    assert own_cluster.server == server
    own_cluster.api.call("GET", "/api/v1/namespaces/default/configmaps/kept")
    assert own_cluster.cpu_seconds()["kube-apiserver"] > cpu_seconds
    # The others got over it: a new Pod is bound by the scheduler and run by kwok.
    own_cluster.api.call("POST", "/api/v1/namespaces/default/pods", pod("after"))
    wait_until(lambda: is_ready(own_cluster.api.call("GET", "/api/v1/namespaces/default/pods/after")), 60)


def test_a_second_one_is_apart_and_leaves_nothing(cluster: TestCluster) -> None:
    with TestCluster.start(nodes=3) as second:
        assert second.server != cluster.server
        listed = second.api.call("GET", "/api/v1/nodes")["items"]
        assert [node["metadata"]["name"] for node in listed] == ["node-1", "node-2", "node-3"]
        assert len(cluster.api.call("GET", "/api/v1/nodes")["items"]) == 1
        processes = list(second.pids().values())
        assert len(processes) == len(FLAGS)
    assert not second.folder.exists()
    assert not any(is_alive(process) for process in processes)
    assert processes_of(str(second.folder)) == []
    second.stop()  # again, to no effect
    assert cluster.api.text("GET", "/readyz") == "ok"


def test_a_process_that_ends_at_once_is_reported_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(SetupError, match=r"(?s)kube-scheduler ended by itself.*unknown flag: --no-such-flag"):
        TestCluster.start(more_flags={"kube-scheduler": ["--no-such-flag"]})
    assert list(tmp_path.iterdir()) == []
    assert processes_of(str(tmp_path)) == []


def test_an_owner_that_is_killed_leaves_no_process_and_the_next_start_removes_its_folder(wait_until: WaitUntil) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            held = json.loads(holder.stdout.readline())
            assert set(held["pids"]) <= set(processes_of(held["folder"]))
            remove_leftovers()
            assert Path(held["folder"]).exists()  # its owner lives
        finally:
            holder.kill()
    wait_until(lambda: processes_of(held["folder"]) == [], 5)
    assert Path(held["folder"]) in remove_leftovers()
    assert not Path(held["folder"]).exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_runs_one_until_it_is_told_to_end(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "orca_infra.testing.cluster", "--nodes", "2"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            printed = [process.stdout.readline() for _ in range(3)]
            kubeconfig = Path(printed[-1].strip().removeprefix("export KUBECONFIG="))
            assert kubeconfig.parent.name.startswith(PREFIX)
            assert json.loads(kubeconfig.read_text())["current-context"] == "test"
            process.send_signal(number)
            assert process.wait() == 0
        finally:
            process.kill()
    assert list(tmp_path.iterdir()) == []
    assert processes_of(str(tmp_path)) == []
