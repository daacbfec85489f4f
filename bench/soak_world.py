"""The world of the soak: a real loop with real machines, runs and runtimes, what people and drivers do in it, and its faults.

Demand comes in tides. In between, all demand is taken away and everything faulty is healed: what is then still there after
a while stays for ever.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from soak_faults import Faults

from orca_infra.config import Config, parse_config
from orca_infra.errors import OrcaError, Transient
from orca_infra.kube.kinds import JOB, POD, RUNTIME_POOL, SECRET, SERVICE, Kind, Ref
from orca_infra.kube.labels import STACK_LABEL
from orca_infra.log import make_log
from orca_infra.runtimes.launch import LaunchRequest, launch
from orca_infra.testing import invariants
from orca_infra.testing.cluster import TestCluster
from orca_infra.testing.standing import StandingWorld

_TOML = """
[pools.east]
provider = "local"
image = "registry.example/orca-worker:1"
max_machines = 3
max_booting = 2
idle_seconds = 2
types = [{ type = "small", locations = ["a", "b"] }]
[pools.west]
provider = "local"
image = "registry.example/orca-worker:1"
max_machines = 3
idle_seconds = 2
types = [{ type = "small", locations = ["b", "a"], wait = 3 }, { type = "large", locations = ["a"] }]
"""
#: Durations of a quick test, so that many lives fit into little time; what has ended is forgotten at once, or nothing could
#: be told from what is kept for a month.
_VARIABLES = {
    "ORCA_STACK": "soak",
    "ORCA_TOKEN_KEY": "a key of the soak, 32 bytes long and more",
    "ORCA_LOG": "json",
    "ORCA_HEALTH_HOST": "127.0.0.1",
    "ORCA_POOL_GROW_AFTER": "0",
    "ORCA_POOL_TRY_SECONDS": "0.2",
    "ORCA_POOL_SCALE_SECONDS": "0.4",
    "ORCA_RUNS_SCALE_SECONDS": "0.4",
    "ORCA_RUNTIMES_SCALE_SECONDS": "0.4",
    "ORCA_POOL_BOOT_SECONDS": "120",
    "ORCA_POOL_LOST_SECONDS": "60",
    "ORCA_HEARTBEAT_SECONDS": "1",
    "ORCA_STRAY_GRACE_SECONDS": "2",
    "ORCA_DRIFT_SECONDS": "30",
    "ORCA_ENDED_ROW_SECONDS": "5",
    "ORCA_ENGINE_SECONDS": "60",
    "ORCA_RECORD_PASSES": "20",
    "ORCA_RUN_LOG_SECONDS": "5",
    "ORCA_RUNTIMES_ABANDONED_SECONDS": "5",
    "ORCA_RUNNER": "kubernetes",
}
Result = TypeVar("Result")
_TRIES = 4
_OF_COHORT = re.compile(r"\.(runs|runtimes)\.\d")
_WARM = 2
_CULL_SECONDS = 3
#: What has to be over before everything is at rest, beside the clouds and the cluster.
_REST: Mapping[str, str] = {
    "runs": "select from orca.runs",
    "machines' rows": "select from orca.pool_machines",
    "what stacks own": "select from orca.owned",
    "workers": "select from orca.workers",
    "run clusters' rows": "select from orca.run_clusters",
    "runtime Pods' rows": "select from orca.runtime_pods",
    "runtimes' rows": "select from orca.runtimes",
    "objects' rows": "select from orca.kube_objects",
    "cohorts": "select from orca.cohorts",
    "engine operations": "select from orca.engine_operations",
    "what status asks somebody to look at": "select from orca.attention",
}


class SoakWorld(StandingWorld):
    """`with SoakWorld(cluster, url, rng) as world:`; `tide` is what happens in one moment, `ebb` takes it all away."""

    toml = _TOML
    variables = _VARIABLES
    disk = None

    def __init__(self, cluster: TestCluster, url: str, rng: random.Random, *, state: str) -> None:
        """`state`: where the engine's is, `postgres` (beside the rows, as it is unless somebody says otherwise) or `file`."""
        super().__init__(cluster, url, state=state)
        self.rng = rng
        self.config: Config = parse_config(self.toml, "soak")
        #: How much of what was wanted.
        self.wanted: Counter[str] = Counter()
        self.faults = Faults(self, rng)

    def _environment(self, *, direct: bool) -> dict[str, str]:
        variables = super()._environment(direct=direct)
        if self._state == "postgres":
            del variables["PULUMI_BACKEND_URL"]
        return variables

    def _make_stand(self) -> None:
        self.execute(
            "insert into orca.pipelines (name, placement, image, workers, max_starts) values "
            "('east', 'worker:east', null, 0, null), ('west', 'worker:west', null, 0, null), "
            "('reports', null, 'registry.example/reports:1', 1, 20), ('short', null, 'registry.example/reports:1', 0, 20)"
        )
        default = {"requests": {"cpu": "500m", "memory": "1Gi"}}
        specs = {
            "RuntimeEnvironment": {
                "dockerImage": "registry.example/runtime:1",
                "resourcesRanges": {"default": default},
            },
            "RuntimePool": {
                "environment": "python",
                "size": 0,
                "burningRate": 0.1,
                "cull": {"seconds": _CULL_SECONDS},
            },
        }
        for kind, spec in specs.items():
            metadata = {"name": "python", "namespace": self.runtimes_namespace}
            item = {"apiVersion": "datalayer.io/v1", "kind": kind, "metadata": metadata, "spec": spec}
            self.kube.apply(item, manager="soak", force=True)
        nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (as long as the process)
        self._hands = replace(self.launch_hands(), log=make_log(nowhere, form="json"))
        self._plant_foreign()
        self.until(lambda: self.passes() and min(self.passes().values()) > 0, 120, "the loop's first passes")

    def _plant_foreign(self) -> None:
        """What is another stack's, beside ours: nobody may touch it."""
        metadata = {"name": "foreign", "labels": {STACK_LABEL: "another", "orca.role": "driver"}}
        spec = {"containers": [{"name": "c", "image": "registry.example/other:1"}]}
        for namespace in (self.runs_namespace, self.runtimes_namespace):
            self.kube.create(
                {"apiVersion": "v1", "kind": "Pod", "metadata": {**metadata, "namespace": namespace}, "spec": spec}
            )
        self.foreign = self._foreign()

    def _foreign(self) -> dict[str, str]:
        return {
            pod["metadata"]["namespace"]: pod["metadata"]["uid"]
            for namespace in (self.runs_namespace, self.runtimes_namespace)
            for pod in self.kube.list(POD, namespace=namespace).items
            if pod["metadata"]["name"] == "foreign"
        }

    # The loop.

    def rows(self, query: Any, **parameters: object) -> list[dict[str, Any]]:
        return _again(lambda: super(SoakWorld, self).rows(query, **parameters))

    def execute(self, statement: Any, **parameters: object) -> None:
        _again(lambda: super(SoakWorld, self).execute(statement, **parameters))

    @property
    def pid(self) -> int:
        return int(self._loop.pid)

    def metrics(self) -> dict[str, float]:
        """The loop's counters; nothing while it does not answer."""
        with contextlib.suppress(OSError):
            return {
                name: float(value)
                for name, value in re.findall(r"^(\w+\{.*?\}) (\S+)$", self._get("/metrics"), re.MULTILINE)
            }
        return {}

    def passes(self) -> dict[str, int]:
        """How many passes were made of each scope, those that were given up among them."""
        counted: Counter[str] = Counter()
        for name, value in self.metrics().items():
            if found := re.fullmatch(r'orca_infra_passes_total\{.*scope="(\w+)".*\}', name):
                counted[found[1]] += int(value)
        return dict(counted)

    def operations(self) -> int:
        """How many times the engine was told to make or remove something; not what it was asked to look at."""
        return sum(
            int(value)
            for name, value in self.metrics().items()
            if name.startswith("orca_infra_engine_operations_total{") and 'kind="refresh"' not in name
        )

    # What happens.

    def flood(self) -> None:
        """What a tide begins with: a pool that is warm again."""
        self._size(_WARM)

    def tide(self) -> None:
        """One moment: some demand, perhaps a fault, perhaps the end of one."""
        self.demand()
        self.faults.come_and_go()

    def demand(self) -> None:
        chance = self.rng.random
        if chance() < 0.09:
            pipeline, runs = self.rng.choice(("east", "west", "reports", "short")), self.rng.randint(1, 2)
            self.execute(
                "insert into orca.runs (pipeline) select %(p)s from generate_series(1, %(n)s)", p=pipeline, n=runs
            )
            self.wanted["runs"] += runs
        if chance() < 0.02:
            self.execute("update orca.runs set state = 'canceled' where state = 'queued'")
        if chance() < 0.4:
            self._end_some_runs(1)
        if chance() < 0.05:
            self._size(self.rng.randint(0, _WARM))
        if chance() < 0.08:
            self._launch()

    def _launch(self) -> None:
        name = f"user-{self.rng.randint(1, 9)}"
        request = LaunchRequest(
            environment="python", user=name, secrets={"TOKEN": "x"} if self.rng.random() < 0.5 else {}
        )
        with contextlib.suppress(OrcaError):
            self.wanted["launches, warm" if launch(self._hands, request).warm else "launches, cold"] += 1

    def _end_some_runs(self, most: int) -> None:
        """What drivers write when they are done; those of runs that were just queued again write it to no row."""

        def end() -> None:
            with self.surroundings.database.transaction() as transaction:
                transaction.run("select set_config('orca.writer', 'driver', true)")
                transaction.run(
                    "update orca.runs set state = 'succeeded', ended_at = now() where id in (select id from orca.runs "
                    "where state = 'running' and worker is null order by id limit %(most)s)",
                    {"most": most},
                )

        _again(end)

    def _size(self, size: int) -> None:
        ref = Ref(kind=RUNTIME_POOL, namespace=self.runtimes_namespace, name="python")
        self.kube.patch(ref, {"spec": {"size": size}})

    # Between the tides.

    def ebb(self) -> None:
        """No more faults and no more demand; called again and again until `unrest` is silent."""
        self.faults.heal()
        self.execute("update orca.runs set state = 'canceled' where state = 'queued'")
        self._end_some_runs(10**6)
        self._size(0)
        self._forget_ended_runs()

    def _forget_ended_runs(self) -> None:
        """What orca keeps of its runs is orca's to delete: their rows, and their logs."""
        for row in self.rows(
            "delete from orca.runs r where state in ('succeeded', 'failed', 'canceled') "
            "and not exists (select from orca.run_clusters c where c.run = r.id and c.ended_at is null) returning id"
        ):
            shutil.rmtree(self.surroundings.logs_folder / str(row["id"]), ignore_errors=True)

    def unrest(self) -> list[str]:
        """What is still there or under way, though nobody wants it."""
        if not self.passed_since(time.time() - 10):
            return ["the loop's passes"]
        left = [f"{what}: {rows[:3]}" for what, query in _REST.items() if (rows := self._some(query))]
        left += [f"machine {machine.name}" for machine in self.cloud.list()]
        for namespace in (self.runs_namespace, self.runtimes_namespace):
            for kind in (JOB, POD, SERVICE, SECRET):
                left += [f"{kind.kind} {item['metadata']['name']}" for item in self.ours(kind, namespace)]
        return [*left, *(f"state {key}" for key in self.state() if _OF_COHORT.search(key))]

    def _some(self, query: str) -> list[dict[str, Any]]:
        return self.rows(query.replace("select from", "select * from", 1) + " limit 3")

    def ours(self, kind: Kind, namespace: str) -> list[dict[str, Any]]:
        """This stack's objects, as the API server has them."""
        return list(self.kube.list(kind, namespace=namespace, labels={STACK_LABEL: self.surroundings.stack_id}).items)

    def state(self) -> dict[str, int]:
        """What the engine's backend holds, empty folders too, and the bytes of each."""
        if self._state == "file":
            folder = self.home / "state"
            return {str(path.relative_to(folder)): size_of(path) for path in folder.rglob("*")}
        rows = self.rows("select key, octet_length(data::text) as bytes from pulumi_state")
        return {row["key"]: row["bytes"] for row in rows}

    # What has to hold.

    def broken(self) -> Iterator[str]:
        """What does not hold at this moment, whatever is under way."""
        for what, query in invariants.AT_EVERY_INSTANT.items():
            if rows := self.rows(query):
                yield f"{what}: {rows}"
        yield from invariants.too_many(self.rows(invariants.LIVE), self.config.pools)
        drivers = Counter(
            pod["metadata"]["labels"]["orca.run"]
            for pod in self.ours(POD, self.runs_namespace)
            if pod["metadata"]["labels"].get("orca.role") == "driver"
            and "deletionTimestamp" not in pod["metadata"]
            and pod.get("status", {}).get("phase") not in {"Succeeded", "Failed"}
        )
        yield from (f"run {run} has {count} drivers" for run, count in drivers.items() if count > 1)
        for row in self.rows("select id, reason, state, start from orca.runs where reason is not null"):
            # A machine whose creation was not seen to end well is given up, even if its worker was quick.
            if row["id"] not in self.faults.touched and row["reason"] not in {"Interrupted", "Failed", "NoCapacity"}:
                yield f"run {row['id']} was ended, and nothing was done to it: {row}"
        if self._foreign() != self.foreign:
            yield f"another stack's Pods were {self.foreign}, and are {self._foreign()}"
        if not self.is_running:
            yield "the loop's process has ended"

    def broken_at_rest(self) -> Iterator[str]:
        """As the simulation's end has it: the cloud, the states and the rows agree."""
        owned, pending = [], []
        for pool in self.config.pools:
            state = self._engine_state(pool.name)
            owned += [resource.name for resource in state.resources]
            pending += list(state.pending)
        found = invariants.Found(
            rows=self.rows(invariants.LIVE),
            machines=self.cloud.list(),
            owned=owned,
            noted=[row["name"] for row in self.rows("select name from orca.owned")],
            pending=pending,
        )
        yield from invariants.disagreements(found, self.surroundings.stack_id, self.config.pools)
        yield from self.broken()

    def _engine_state(self, pool: str) -> Any:
        from orca_infra.machines.observe import machine_stack
        from orca_infra.stack.engine import Engine

        return Engine(self.surroundings.engine).state(machine_stack(self.surroundings.settings.stack, pool))


def size_of(path: Path) -> int:
    """The bytes of a file; 0 of what is none, or is gone."""
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0


def _again(act: Callable[[], Result]) -> Result:
    """Connections are ended now and then, ours among them."""
    for _ in range(_TRIES):
        with contextlib.suppress(Transient):
            return act()
    return act()
