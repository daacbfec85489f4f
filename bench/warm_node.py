"""From a launch to its secret readable inside the container, on warm Pods of a real node; one after the other.

A control plane of its own with one real node (root on Linux; elsewhere it says why not). The floor is the same Secret and the
same touch made by hand on Pods of the same pool: what the API server and the kubelet take without this program.
`ARGS=60` makes that many launches instead of 30.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from harness import progress, report, surroundings

from orca_infra.errors import SetupError
from orca_infra.kube.client import Kube
from orca_infra.kube.kinds import CRD, POD, Ref
from orca_infra.kube.labels import STACK_LABEL
from orca_infra.log import make_log
from orca_infra.loop.cluster_passes import RuntimePasses
from orca_infra.loop.leader import Leader
from orca_infra.runtimes.crds import runtime_environment_crd, runtime_pool_crd
from orca_infra.runtimes.launch import LaunchHands, LaunchRequest, launch
from orca_infra.stack.engine import Engine
from orca_infra.stack.operations import RecordedEngine
from orca_infra.surroundings import Surroundings
from orca_infra.testing.cluster import TestCluster
from orca_infra.testing.node import IMAGE, RealNode
from orca_infra.testing.node_secrets import percentile, wait_for_secrets
from orca_infra.testing.node_surroundings import NodeImpossible

FLOOR = 10
NAMESPACE = "runtimes"
_LIMIT_SECONDS = 180
_WARM = """
select name from orca.runtime_pods
where ready_at is not null and taken_at is null and ending_reason is null and ended_at is null order by name
"""


def main() -> None:
    launches = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    with TestCluster.start(nodes=0) as cluster:
        try:
            node = RealNode.start(cluster)
        except NodeImpossible as error:
            sys.exit(f"no real node here: {error}")
        variables = {"ORCA_RUNTIMES_NAMESPACE": NAMESPACE, "KUBECONFIG": str(cluster.kubeconfig)}
        with node, surroundings(variables) as here, Kube.connect(kubeconfig=cluster.kubeconfig) as kube:
            progress(f"a real node, ready in {node.ready_seconds:.1f} s")
            labels = {STACK_LABEL: here.stack_id}
            kube.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}})
            figures = {"node_ready_seconds": node.ready_seconds, **fill(here, kube, launches + FLOOR)}
            from_call, calls = take(here, kube, launches)
            figures |= {
                "call_p50_ms": percentile(calls, 0.5) * 1000,
                **{f"readable_{name}_ms": percentile(from_call, part) * 1000 for name, part in PARTS.items()},
            }
            by_hand = touch_by_hand(here, kube)
            floors = {f"by_hand_{name}_ms": percentile(by_hand, part) * 1000 for name, part in PARTS.items()}
    report(
        "warm_node",
        figures=figures,
        floors=floors,
        targets={"readable_p50_ms": 500.0, "readable_max_ms": 3000.0},
        launches=launches,
    )


PARTS = {"p50": 0.5, "p99": 0.99, "max": 1.0}


def fill(here: Surroundings, kube: Kube, size: int) -> dict[str, float]:
    """A pool of that size, warm."""
    for crd in (runtime_pool_crd(), runtime_environment_crd()):
        kube.apply(crd, manager="bench")
        ref = Ref(kind=CRD, name=crd["metadata"]["name"])
        until(lambda: None, lambda ref=ref: is_established(kube.get(ref)))
    resources = {"default": {"requests": {"cpu": "1m", "memory": "1Mi"}}}
    specs = {
        "RuntimeEnvironment": {"dockerImage": IMAGE, "title": "Python", "resourcesRanges": resources},
        "RuntimePool": {"environment": "python", "size": size, "burningRate": 0.01, "cull": {"seconds": 3600}},
    }
    for kind, spec in specs.items():
        metadata = {"name": "python", "namespace": NAMESPACE}
        kube.apply({"apiVersion": "datalayer.io/v1", "kind": kind, "metadata": metadata, "spec": spec}, manager="bench")
    progress(f"{size} warm Pods, from the pool's declaration to all Ready")
    leader = Leader(here.url)
    if not leader.acquire():
        sys.exit("the bench does not lead its own database")
    engine = Engine(here.engine, {"KUBECONFIG": str(here.settings.kubeconfig)})
    recorded = RecordedEngine(
        engine,
        here.database,
        backend_url=here.engine.backend_url,
        verify=leader.verify,
        deadline_seconds=here.settings.engine_seconds,
    )
    passes = RuntimePasses(here, kube, recorded, verify=leader.verify, log=quiet())
    seconds = until(passes.run, lambda: len(warm(here)) >= size)
    leader.release()
    progress(f"  {seconds:.1f} s")
    return {"warm_seconds": seconds}


def take(here: Surroundings, kube: Kube, launches: int) -> tuple[list[float], list[float]]:
    """Seconds from each call to its secret readable in the container, and to its answer."""
    hands = LaunchHands(database=here.database, kube=kube, namespace=NAMESPACE, stack_id=here.stack_id, log=quiet())
    readable, calls = [], []
    progress(f"{launches} launches")
    for number in range(launches):
        request = LaunchRequest(environment="python", user=f"user-{number}", secrets={"TOKEN": f"value {number}"})
        called = time.time()
        taken = launch(hands, request)
        calls.append(time.time() - called)
        read = wait_for_secrets(kube, NAMESPACE, taken.pod)
        if not taken.warm or read.values != {"TOKEN": f"value {number}"}:
            sys.exit(f"launch {number} came to {taken}, and its container read {sorted(read.values)}")
        readable.append(read.at - called)
    return readable, calls


def touch_by_hand(here: Surroundings, kube: Kube) -> list[float]:
    """The floor: a Secret made and an annotation touched, on Pods that still wait."""
    progress(f"{FLOOR} by hand")
    seconds = []
    for name in warm(here)[:FLOOR]:
        began = time.time()
        metadata = {"name": name, "namespace": NAMESPACE}
        kube.create({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"TOKEN": "t"}})
        touched: dict[str, Any] = {"metadata": {"annotations": {"touched": str(began)}}}
        kube.patch(Ref(kind=POD, namespace=NAMESPACE, name=name), touched)
        seconds.append(wait_for_secrets(kube, NAMESPACE, name).at - began)
    return seconds


def warm(here: Surroundings) -> list[str]:
    with here.database.snapshot() as transaction:
        return [row["name"] for row in transaction.dicts(_WARM)]


def is_established(crd: Any) -> bool:
    conditions = ((crd or {}).get("status") or {}).get("conditions") or []
    return any(one["type"] == "Established" and one["status"] == "True" for one in conditions)


def quiet() -> Any:
    return make_log(open(os.devnull, "w"))


def until(act: Any, done: Any) -> float:
    started = time.perf_counter()
    while time.perf_counter() - started < _LIMIT_SECONDS:
        act()
        if done():
            return time.perf_counter() - started
        time.sleep(0.1)
    sys.exit(f"not within {_LIMIT_SECONDS} s")


try:
    main()
except SetupError as error:
    sys.exit(str(error))
