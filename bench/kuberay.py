"""KubeRay's operator on the bench's cluster: RayClusters of head and workers, made until Ready and deleted until gone.

It is built from its Go module when it is asked for (tools/build.py ray-operator), and runs as it ships but for the client's
rate, which is raised as that of the control plane's programs is, and the init container of workers, which would wait for a
real Ray. A RayCluster has no driver: a Pod and a Job less than a run cluster.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness import Pods, progress

from orca_infra.errors import OrcaError
from orca_infra.kube.client import Kube
from orca_infra.kube.kinds import SERVICE, Kind, Ref
from orca_infra.stack.tools import require_tool
from orca_infra.testing.cluster import TestCluster

FLAGS = (
    "--enable-leader-election=false",
    "--health-probe-bind-address=127.0.0.1:0",
    "--metrics-addr=127.0.0.1:0",
)
RATES = ("--qps=1000", "--burst=2000")
NAMESPACE = "kuberay"
_HERE = Path(__file__).resolve().parents[1]
_MODULE = "github.com/ray-project/kuberay/ray-operator"
_RAY_CLUSTER = Kind(api_version="ray.io/v1", kind="RayCluster", plural="rayclusters")


def measure(cluster: TestCluster, kube: Kube, clusters: int, workers: int, flags: Sequence[str]) -> dict[str, float]:
    """Seconds until all Pods are Ready, until all that was deleted is gone, and the operator's peak memory."""
    subprocess.run([sys.executable, _HERE / "tools" / "build.py", "ray-operator"], check=True)
    folder = subprocess.run(
        ["go", "list", "-m", "-f", "{{.Dir}}", _MODULE],
        cwd=_HERE / "tools" / "kuberay",
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    cluster.kubectl("create", "-f", f"{folder}/config/crd/bases")  # too large for apply's annotation
    kube.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    with (cluster.folder / "ray-operator.log").open("wb") as log:
        operator = subprocess.Popen(
            [require_tool("ray-operator"), *flags],
            env={**os.environ, "KUBECONFIG": str(cluster.kubeconfig), "ENABLE_INIT_CONTAINER_INJECTION": "false"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    pods = Pods(kube, NAMESPACE)
    try:
        _make_one(kube, 0, workers)
        _until(lambda: pods.ready >= workers + 1, operator)  # it has listed and watches
        progress(f"the peer: {clusters} RayClusters of head and {workers} workers")
        started = time.perf_counter()
        for number in range(1, clusters):
            _make_one(kube, number, workers)
        _until(lambda: pods.ready >= clusters * (workers + 1), operator)
        made = time.perf_counter() - started
        progress(f"  {made:.1f} s; now all of them are deleted")
        started = time.perf_counter()
        for number in range(clusters):
            kube.delete(Ref(kind=_RAY_CLUSTER, namespace=NAMESPACE, name=_name(number)))
        _until(lambda: not pods.there and not kube.list(SERVICE, namespace=NAMESPACE).items, operator)
        gone = time.perf_counter() - started
        progress(f"  {gone:.1f} s")
        return {
            "peer_all_pods_ready_seconds": made,
            "peer_gone_seconds": gone,
            "peer_memory_mib": _peak_memory_mib(operator.pid),
        }
    finally:
        pods.close()
        operator.terminate()
        operator.wait(30)


def _make_one(kube: Kube, number: int, workers: int) -> None:
    template = {
        "spec": {
            "containers": [
                {
                    "name": "ray",
                    "image": "registry.example/ray:1",
                    "resources": {"requests": {"cpu": "1", "memory": "512Mi"}},
                }
            ]
        }
    }
    group = {"groupName": "w", "replicas": workers, "minReplicas": workers, "maxReplicas": workers}
    spec: dict[str, Any] = {
        "rayVersion": "2.46.0",
        "headGroupSpec": {"rayStartParams": {}, "template": template},
        "workerGroupSpecs": [{**group, "rayStartParams": {}, "template": template}],
    }
    metadata = {"namespace": NAMESPACE, "name": _name(number)}
    manifest = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": metadata, "spec": spec}
    kube.create(manifest, kind=_RAY_CLUSTER)


def _name(number: int) -> str:
    return f"ray-{number}"


def _until(done: Callable[[], bool], operator: subprocess.Popen[bytes], limit_seconds: float = 1800) -> None:
    deadline = time.monotonic() + limit_seconds
    while not done():
        if operator.poll() is not None or time.monotonic() > deadline:
            raise OrcaError("the peer's operator ended, or took too long; its log is ray-operator.log")
        time.sleep(0.1)


def _peak_memory_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))
