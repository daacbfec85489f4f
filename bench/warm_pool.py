"""Launches on warm pools: how long the call takes, how many a second, in a burst, with refill on, and over HTTP.

A control plane of its own with a kwok node; what the loop does is done by the real `orca-infra run`. The floor of the refill
is the same Pods made by 8 threads of raw API calls in the same run. Latencies count from when a call was due, not from when
a thread was free.
`ARGS=calls,burst` runs some of the parts only: refill, calls, rate, burst, http, steady.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import progress, report, surroundings

from orca_infra.db.connection import Database
from orca_infra.kube.client import Kube
from orca_infra.kube.kinds import CRD, POD, RUNTIME_POOL, SECRET, Ref
from orca_infra.kube.labels import STACK_LABEL, field_manager
from orca_infra.log import make_log
from orca_infra.runtimes.crds import runtime_environment_crd, runtime_pool_crd
from orca_infra.runtimes.launch import Launch, LaunchHands, LaunchRequest, launch
from orca_infra.runtimes.model import Environment, Pool
from orca_infra.runtimes.render import render_warm
from orca_infra.runtimes.rows import next_numbers, record_pods
from orca_infra.surroundings import Surroundings
from orca_infra.testing.cluster import FLAGS, TestCluster
from orca_infra.testing.ports import free_port

PARTS = ("refill", "calls", "rate", "burst", "http", "steady")
NAMESPACE = "runtimes"
POOL = Ref(kind=RUNTIME_POOL, namespace=NAMESPACE, name="p")
SIZE = 1000
REFILL_EDITS = 3
RATE_PER_SECOND, RATE_SECONDS = 45, 10
PROCESSES, PROCESS_THREADS, PROCESS_SECONDS = 4, 3, 3
BURST = 100
HTTP_CALLS = 150
STEADY_SIZE, STEADY_PER_SECOND, STEADY_SECONDS = 100, 20, 60
FLOOR_THREADS = 8
SECRET_VALUE = "a token of a user, as long as such tokens are"
TARGETS = {
    "call_p50_ms": 15.0,
    "call_p99_ms": 60.0,
    "call_cold": 0,
    "rate_ms_per_claim": 1000 / 150,
    "taken_twice": 0,
    "burst_seconds": 1.0,
    "burst_cold": 0,
    "http_adds_p50_ms": 5.0,
    "steady_cold": 0,
    "edit_seen_ms": 1000.0,
    "edit_seen_in_refill_ms": 1000.0,
    "refill_times_floor": 2.0,
}
_LIMIT_SECONDS = 900
_WARM = """
select count(*) from orca.runtime_pods
where ready_at is not null and taken_at is null and ending_reason is null and ended_at is null
"""
_COHORTS = """
select count(*) as n, percentile_cont(0.5) within group (order by extract(epoch from ended_at - started_at)) as seconds
from orca.engine_operations where stack like '%.runtimes.%' and ended_at is not null
"""


class Bench:
    """The cluster, the database and the passes that all parts share."""

    def __init__(self, here: Surroundings, kube: Kube, cluster: TestCluster) -> None:
        self.here, self.kube, self.cluster = here, kube, cluster
        self.figures: dict[str, float] = {}
        self.floors: dict[str, float] = {}
        self.taken: list[str] = []
        self.hands = hands_for(here.database, kube, here.stack_id)

    @contextmanager
    def loop(self) -> Iterator[None]:
        """The real loop in its own process, once it has made its first pass over the pools."""
        command = [str(Path(sys.executable).with_name("orca-infra")), "run"]
        with (self.here.settings.home / "loop.log").open("wb") as output:
            process = subprocess.Popen(command, env=product_environment(self), stdout=output, stderr=output)
        try:
            until(lambda: is_seen(self.kube.get(POOL)))
            yield
        finally:
            process.terminate()
            process.wait(60)

    def warm(self) -> int:
        with self.here.database.snapshot() as transaction:
            return int(transaction.value(_WARM))

    def resize(self, size: int) -> None:
        self.kube.patch(POOL, {"spec": {"size": size}})

    def edit_seen_seconds(self, spec: dict[str, Any]) -> float:
        """From a pool's edit until its status says that the loop has seen it."""
        started = time.perf_counter()
        self.kube.patch(POOL, {"spec": spec})
        until(lambda: is_seen(self.kube.get(POOL)), every_seconds=0.01)
        return time.perf_counter() - started

    def fill(self, size: int) -> None:
        """Warm Pods at once, past the engine: rows as the loop writes them, Pods by raw calls."""
        missing = size - self.warm()
        if missing <= 0:
            return
        progress(f"  {missing} Pods made for this part")
        pool = Pool(namespace=NAMESPACE, name="p", uid="x", environment="python", size=size, cull_seconds=3600)
        environment = Environment(namespace=NAMESPACE, name="python", image="registry.example/python:1")
        with self.here.database.transaction() as transaction:
            numbers = next_numbers(transaction, missing)
            pods_made = [render_warm(pool, environment, number, self.here.stack_id) for number in numbers]
            record_pods(transaction, pods_made, taken=False)
        make_all(self.kube, [dict(pod.manifest) for pod in pods_made], field_manager(self.here.stack_id))
        until(lambda: ready(self.kube, NAMESPACE, self.here.stack_id) >= size)
        pods = self.kube.list(POD, namespace=NAMESPACE).items
        columns = {
            "names": [pod["metadata"]["name"] for pod in pods],
            "uids": [pod["metadata"]["uid"] for pod in pods],
            "addresses": [pod["status"].get("podIP") for pod in pods],
        }
        with self.here.database.transaction() as transaction:
            transaction.run(
                "update orca.runtime_pods p set uid = s.uid, address = s.address, ready_at = now() from unnest("
                "%(names)s::text[], %(uids)s::text[], %(addresses)s::text[]) s(name, uid, address) "
                "where p.name = s.name and p.uid is null",
                columns,
            )

    def launch(self, user: str = "jane") -> Launch:
        made = launch(self.hands, LaunchRequest(environment="python", user=user, secrets={"TOKEN": SECRET_VALUE}))
        self.taken.append(made.pod)
        return made


def main() -> None:
    if sys.argv[1:2] == ["claims"]:
        claims_of_one_process(*sys.argv[2:])
        return
    parts = set(sys.argv[1].split(",")) if len(sys.argv) > 1 else set(PARTS)
    began_load = os.getloadavg()[0]
    with TestCluster.start(nodes=1) as cluster:
        variables = {"ORCA_RUNTIMES_NAMESPACE": NAMESPACE, "KUBECONFIG": str(cluster.kubeconfig)}
        with surroundings(variables) as here, Kube.connect(kubeconfig=cluster.kubeconfig) as kube:
            prepare(kube, here.stack_id)
            bench = Bench(here, kube, cluster)
            for name, part in (
                ("refill", refill),
                ("calls", calls),
                ("rate", rate),
                ("burst", burst),
                ("http", http),
                ("steady", steady),
            ):
                if name in parts:
                    part(bench)
    bench.figures["taken_twice"] = len(bench.taken) - len(set(bench.taken))
    report(
        "warm_pool",
        figures=bench.figures,
        floors=bench.floors,
        targets={name: most for name, most in TARGETS.items() if name in bench.figures},
        load={"before": round(began_load, 2), "after": round(os.getloadavg()[0], 2)},
        flags={name: " ".join(flags) for name, flags in FLAGS.items()},
    )


def prepare(kube: Kube, stack_id: str) -> None:
    for crd in (runtime_pool_crd(), runtime_environment_crd()):
        kube.apply(crd, manager="bench", force=True)
    for name in (NAMESPACE, "raw"):
        metadata = {"name": name, "labels": {STACK_LABEL: stack_id}}
        kube.create({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    for crd in (runtime_pool_crd(), runtime_environment_crd()):
        until(lambda crd=crd: established(kube, crd["metadata"]["name"]))
    api = {"apiVersion": "datalayer.io/v1"}
    spec: dict[str, Any] = {"dockerImage": "registry.example/python:1"}
    kube.create(
        {**api, "kind": "RuntimeEnvironment", "metadata": {"name": "python", "namespace": NAMESPACE}, "spec": spec}
    )
    spec = {"environment": "python", "size": 0, "burningRate": 0.01, "cull": {"seconds": 3600}}
    kube.create({**api, "kind": "RuntimePool", "metadata": {"name": "p", "namespace": NAMESPACE}, "spec": spec})
    for user in ("jane", "john"):
        metadata = {"name": user, "namespace": NAMESPACE, "labels": {"datalayer.io/user": user}}
        kube.create({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"KEY": SECRET_VALUE}})


def refill(bench: Bench) -> None:
    """A pool of 1,000 from nothing, by the real loop, with edits of it in between; then the floor."""
    progress(f"refill: {SIZE} Pods by cohorts of the engine, until all are warm")
    edited = []
    with bench.loop():
        started = time.perf_counter()
        bench.resize(SIZE)
        for part in range(1, REFILL_EDITS + 1):
            until(lambda part=part: bench.warm() >= part * SIZE // (REFILL_EDITS + 1))
            edited.append(bench.edit_seen_seconds({"burningRate": 0.01 + part / 1000}))
        until(lambda: bench.warm() >= SIZE)
        seconds = time.perf_counter() - started
    bench.figures["edit_seen_in_refill_ms"] = 1000 * max(edited)
    progress(f"  an edit in it is seen within {', '.join(f'{1000 * one:.0f}' for one in edited)} ms")
    bench.figures["refill_pods_per_second"] = SIZE / seconds
    progress(f"  {SIZE / seconds:.1f} a second; now the floor: the same by {FLOOR_THREADS} threads of raw calls")
    pool = Pool(namespace="raw", name="p", uid="x", environment="python", size=SIZE)
    environment = Environment(namespace="raw", name="python", image="registry.example/python:1")
    manifests = [dict(render_warm(pool, environment, n, "raw").manifest) for n in range(1, SIZE + 1)]
    started = time.perf_counter()
    make_all(bench.kube, manifests, "bench")
    until(lambda: ready(bench.kube, "raw", "raw") >= SIZE)
    floor = SIZE / (time.perf_counter() - started)
    bench.floors["raw_pods_per_second"] = floor
    bench.figures["refill_times_floor"] = floor / bench.figures["refill_pods_per_second"]
    progress(f"  {floor:.1f} a second")
    with ThreadPoolExecutor(FLOOR_THREADS) as threads:
        list(threads.map(lambda m: bench.kube.delete(ref_of_pod(m), grace_seconds=0), manifests))
    until(lambda: not bench.kube.list(POD, namespace="raw").items)


def calls(bench: Bench) -> None:
    """The Python call at 45 a second, Poisson; nothing is refilled."""
    bench.fill(SIZE)
    warm_up(bench)
    progress(f"calls: {RATE_PER_SECOND} a second for {RATE_SECONDS} s on a pool of {SIZE}")
    made, seconds = at_rate(bench.launch, RATE_PER_SECOND, RATE_SECONDS)
    figures_of(bench, "call", seconds)
    bench.figures["call_cold"] = sum(not one.warm for one in made)


def rate(bench: Bench) -> None:
    """Several processes at the same time, each as fast as it can."""
    bench.fill(SIZE)
    progress(f"rate: {PROCESSES} processes for {PROCESS_SECONDS} s")
    environment = {**os.environ, "BENCH_DB": bench.here.url}
    command = [sys.executable, __file__, "claims", str(bench.cluster.kubeconfig), bench.here.stack_id]
    processes = [
        subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(PROCESSES)
    ]
    for process in processes:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "ready":
            sys.exit("a claiming process did not start")
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    results = [json.loads(process.communicate()[0]) for process in processes]
    pods = [pod for result in results for pod in result["pods"]]
    rate = sum(len(result["pods"]) / result["seconds"] for result in results)
    bench.taken += pods
    bench.figures["rate_claims_per_second"] = rate
    bench.figures["rate_ms_per_claim"] = 1000 / rate
    bench.figures["rate_cold"] = sum(result["cold"] for result in results)
    progress(f"  {rate:.0f} a second")


def claims_of_one_process(kubeconfig: str, stack_id: str) -> None:
    """Take Pods in a closed loop of few threads; told when to begin by a line."""
    database = Database(os.environ["BENCH_DB"])
    with Kube.connect(kubeconfig=Path(kubeconfig)) as kube:
        hands = hands_for(database, kube, stack_id)
        made: list[Launch] = []

        def one(until_seconds: float) -> None:
            while time.perf_counter() < until_seconds:
                request = LaunchRequest(environment="python", user="jane", secrets={"TOKEN": SECRET_VALUE})
                made.append(launch(hands, request))

        one(time.perf_counter() + 0.001)  # connections, as in a process that has been running
        print("ready", flush=True)
        sys.stdin.readline()
        made_before, started = len(made), time.perf_counter()
        with ThreadPoolExecutor(PROCESS_THREADS) as threads:
            list(threads.map(one, [started + PROCESS_SECONDS] * PROCESS_THREADS))
        seconds = time.perf_counter() - started
        counted = made[made_before:]
        warm = [one.pod for one in counted if one.warm]
        print(json.dumps({"pods": warm, "cold": len(counted) - len(warm), "seconds": seconds}))
    sys.stdout.flush()
    os._exit(0)  # its second touches are no part of the figure


def burst(bench: Bench) -> None:
    """A hundred at the same moment."""
    bench.fill(300)
    warm_up(bench)
    progress(f"burst: {BURST} at once")
    barrier = threading.Barrier(BURST + 1)

    def one(_: int) -> Launch:
        barrier.wait()
        return bench.launch()

    with ThreadPoolExecutor(BURST) as threads:
        futures = [threads.submit(one, number) for number in range(BURST)]
        barrier.wait()
        started = time.perf_counter()
        made = [future.result() for future in futures]
        bench.figures["burst_seconds"] = time.perf_counter() - started
    bench.figures["burst_cold"] = sum(not one.warm for one in made)
    progress(f"  {bench.figures['burst_seconds']:.2f} s")


def http(bench: Bench) -> None:
    """The same call directly and over HTTP, in turn, so that both meet the same machine."""
    bench.fill(2 * HTTP_CALLS + 150)
    warm_up(bench)
    progress(f"http: {HTTP_CALLS} calls each way in turn")
    with serving(bench) as call:
        for _ in range(20):
            call()
        direct, over = [], []
        for _ in range(HTTP_CALLS):
            direct.append(timed(bench.launch))
            over.append(timed(call))
    figures_of(bench, "direct", direct)
    figures_of(bench, "http", over)
    bench.figures["http_adds_p50_ms"] = bench.figures["http_p50_ms"] - bench.figures["direct_p50_ms"]


@contextmanager
def serving(bench: Bench) -> Any:
    """`orca-infra runtimes serve` in a process of its own; gives a call that launches over one kept connection."""
    import http.client

    tokens = bench.here.settings.home / "tokens.csv"
    tokens.write_text("bench-token,jane\n")
    tokens.chmod(0o600)
    environment = product_environment(bench) | {"ORCA_RUNTIMES_TOKENS": str(tokens)}
    port = free_port()
    command = [str(Path(sys.executable).with_name("orca-infra")), "runtimes", "serve", "--port", str(port)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: answers(port))
        connection = http.client.HTTPConnection("127.0.0.1", port)
        body = json.dumps({"environment": "python", "user": "jane", "secrets": {"TOKEN": SECRET_VALUE}})
        headers = {"Authorization": "Bearer bench-token", "Content-Type": "application/json"}

        def call() -> None:
            connection.request("POST", "/v1/runtimes", body, headers)
            answer = connection.getresponse()
            text = answer.read()
            if answer.status != 201:
                sys.exit(f"HTTP {answer.status}: {text.decode()}")
            bench.taken.append(json.loads(text)["pod"])

        yield call
    finally:
        process.terminate()
        process.wait(20)


def steady(bench: Bench) -> None:
    """A pool that is taken from and refilled at the same time, by the real loop in its own process."""
    bench.resize(STEADY_SIZE)
    forget_pods(bench)
    with bench.loop():
        until(lambda: bench.warm() >= STEADY_SIZE)
        time.sleep(3)
        edits(bench)
        progress(f"steady: {STEADY_PER_SECOND} a second for {STEADY_SECONDS} s, a pool of {STEADY_SIZE} refilled")
        lowest = Lowest(bench.warm)
        with lowest:
            made, seconds = at_rate(bench.launch, STEADY_PER_SECOND, STEADY_SECONDS)
    with bench.here.database.snapshot() as transaction:
        cohorts = transaction.dicts(_COHORTS)[0]
    progress(f"  cohorts: {cohorts['n']}, an up took {cohorts['seconds'] or 0:.2f} s (median)")
    bench.figures["steady_up_seconds"] = float(cohorts["seconds"] or 0)
    figures_of(bench, "steady", seconds)
    bench.figures["steady_cold"] = sum(not one.warm for one in made)
    bench.figures["steady_lowest_warm"] = lowest.value
    progress(f"  {bench.figures['steady_cold']:.0f} cold, at the lowest {lowest.value} warm")


def edits(bench: Bench) -> None:
    """The longest of a few, while the loop rests."""
    seconds = []
    for size in (STEADY_SIZE + 1, STEADY_SIZE) * 3:
        seconds.append(bench.edit_seen_seconds({"size": size}))
        until(lambda size=size: bench.warm() == size)
        time.sleep(2)  # the loop rests again
    bench.figures["edit_seen_ms"] = 1000 * max(seconds)
    progress(f"  an edit is seen within {', '.join(f'{1000 * one:.0f}' for one in seconds)} ms")


def is_seen(pool: dict[str, Any] | None) -> bool:
    return pool is not None and pool.get("status", {}).get("observedGeneration") == pool["metadata"]["generation"]


class Lowest:
    """The lowest value that something has while the block runs."""

    def __init__(self, read: Callable[[], int]) -> None:
        self._read, self.value = read, sys.maxsize
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._over.wait(0.25):
            self.value = min(self.value, self._read())

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def forget_pods(bench: Bench) -> None:
    """Begin anew: the Pods of the parts before go, with their rows."""
    pods = bench.kube.list(POD, namespace=NAMESPACE).items
    with ThreadPoolExecutor(FLOOR_THREADS) as threads:
        list(threads.map(lambda pod: bench.kube.delete(ref_of_pod(pod), grace_seconds=0), pods))
    until(lambda: not bench.kube.list(POD, namespace=NAMESPACE).items)
    for secret in bench.kube.list(SECRET, namespace=NAMESPACE, labels={STACK_LABEL: bench.here.stack_id}).items:
        bench.kube.delete(Ref(kind=SECRET, namespace=NAMESPACE, name=secret["metadata"]["name"]))
    with bench.here.database.transaction() as transaction:
        for table in ("runtimes", "kube_objects", "runtime_pods", "cohorts"):
            transaction.run(f"delete from orca.{table}")  # type: ignore[arg-type]


def hands_for(database: Database, kube: Kube, stack_id: str) -> LaunchHands:
    return LaunchHands(database=database, kube=kube, namespace=NAMESPACE, stack_id=stack_id, log=make_log(nowhere()))


def nowhere() -> Any:
    return open(os.devnull, "w")


def product_environment(bench: Bench) -> dict[str, str]:
    settings = bench.here.settings
    return {
        **os.environ,
        "ORCA_HOME": str(settings.home),
        "ORCA_CONFIG": str(settings.config_path),
        "ORCA_RUNTIMES_NAMESPACE": NAMESPACE,
        "KUBECONFIG": str(settings.kubeconfig),
    }


def warm_up(bench: Bench) -> None:
    """Connections and caches, as in a process that has been running."""
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: bench.launch(), range(40)))
    time.sleep(1.5)  # the second touches


def at_rate(call: Callable[[], Launch], per_second: float, seconds: float) -> tuple[list[Launch], list[float]]:
    """Open loop: arrivals are drawn (Poisson, a fixed seed), and a call that waits for a thread counts as waiting."""
    draw = random.Random(20260501)
    due, at = [], 0.0
    while (at := at + draw.expovariate(per_second)) < seconds:
        due.append(at)
    began = time.perf_counter() + 0.1

    def one(at_seconds: float) -> tuple[Launch, float]:
        made = call()
        return made, time.perf_counter() - (began + at_seconds)

    with ThreadPoolExecutor(64) as threads:
        futures = []
        for moment in due:
            time.sleep(max(0.0, began + moment - time.perf_counter()))
            futures.append(threads.submit(one, moment))
        results = [future.result() for future in futures]
    return [made for made, _ in results], [elapsed for _, elapsed in results]


def figures_of(bench: Bench, name: str, seconds: list[float]) -> None:
    ordered = sorted(seconds)
    for percent in (50, 90, 99):
        bench.figures[f"{name}_p{percent}_ms"] = 1000 * ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]
    shown = ", ".join(f"p{p} {bench.figures[f'{name}_p{p}_ms']:.1f}" for p in (50, 90, 99))
    progress(f"  {name}: {len(ordered)} calls, {shown} ms, at most {1000 * ordered[-1]:.0f}")


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def make_all(kube: Kube, manifests: list[dict[str, Any]], manager: str) -> None:
    with ThreadPoolExecutor(FLOOR_THREADS) as threads:
        list(threads.map(lambda manifest: kube.apply(manifest, manager=manager), manifests))


def ready(kube: Kube, namespace: str, stack_id: str) -> int:
    return sum(
        any(c["type"] == "Ready" and c["status"] == "True" for c in pod.get("status", {}).get("conditions", []))
        for pod in kube.list(POD, namespace=namespace, labels={STACK_LABEL: stack_id}).items
    )


def ref_of_pod(pod: dict[str, Any]) -> Ref:
    return Ref(kind=POD, namespace=pod["metadata"]["namespace"], name=pod["metadata"]["name"])


def established(kube: Kube, name: str) -> bool:
    found = kube.get(Ref(kind=CRD, name=name)) or {}
    conditions = (found.get("status") or {}).get("conditions") or []
    return any(c["type"] == "Established" and c["status"] == "True" for c in conditions)


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=1) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def until(done: Callable[[], object], *, every_seconds: float = 0.1) -> None:
    started = time.perf_counter()
    while time.perf_counter() - started < _LIMIT_SECONDS:
        if done():
            return
        time.sleep(every_seconds)
    sys.exit(f"not within {_LIMIT_SECONDS} s")


main()
