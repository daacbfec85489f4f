"""What the bench load has on Kubernetes: objects and rows as passes leave them, and an engine that makes things at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, cast

from kube_memory import KubeMemory

from orca_infra.process import ProcessId
from orca_infra.runs.limits import run_settings
from orca_infra.runs.model import RunSpec
from orca_infra.runs.observe import SQL as RUNS
from orca_infra.runs.render import render
from orca_infra.runtimes.model import Environment, Pool
from orca_infra.runtimes.render import render_warm
from orca_infra.runtimes.rows import next_numbers, record_pods
from orca_infra.stack.engine import Engine
from orca_infra.stack.operations import RecordedEngine
from orca_infra.stack.outcome import ResourceChange
from orca_infra.surroundings import Surroundings

NOW = f"{datetime.now(UTC):%FT%TZ}"


class Maker:
    """Stands in for the engine below its ledger: what a cohort's program declares is there at once."""

    def __init__(self, memory: KubeMemory) -> None:
        self._memory = memory
        self._uids = itertools.count(1)
        self.changes: list[ResourceChange] = []

    def up_new(
        self, _stack: str, program: Any, *, on_start: Callable[[ProcessId], None], **_: Any
    ) -> tuple[ResourceChange, ...]:
        del on_start
        self.changes = []
        program(self)
        return tuple(self.changes)

    def register(self, kind: str, name: str, properties: Any, **_: Any) -> Any:
        uid = f"made-{next(self._uids)}"
        metadata = {**(properties.get("metadata") or {"name": name}), "uid": uid, "creationTimestamp": NOW}
        outputs = {**properties, "metadata": metadata}
        if not kind.startswith("pulumi:"):
            plural = kind.rpartition(":")[2].lower() + "s"
            objects = [(plural, seen(outputs, uid))]
            if plural == "jobs":  # or each pass would ask why the Job has no Pod
                objects.append(("pods", driver_of(outputs, uid)))
            self._memory.fill(objects)
            urn = f"urn:pulumi:s::p::{kind}::{name}"
            self.changes.append(ResourceChange(op="create", urn=urn, type=kind, id=name, outputs=outputs))
        return Made(outputs)

    def drop(self, _stack: str) -> None: ...

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the loop asked the engine for {name}")


class Made:
    def __init__(self, outputs: Any) -> None:
        self.outputs = outputs
        self.urn = self.id = "made"

    def result(self) -> Made:
        return self


def seen(manifest: Any, uid: str) -> dict[str, Any]:
    """An object as the API server would show it."""
    metadata = {**manifest["metadata"], "uid": uid, "creationTimestamp": NOW, "resourceVersion": "1"}
    shown = {**manifest, "metadata": metadata}
    if manifest["kind"] == "Pod":
        ready = {"type": "Ready", "status": "True"}
        shown["status"] = {"phase": "Running", "podIP": "10.0.0.1", "conditions": [ready]}
    return shown


def prepare(here: Surroundings, memory: KubeMemory) -> None:
    namespaces = [
        ("namespaces", {"metadata": {"name": name, "uid": name, "labels": {"orca.stack": here.stack_id}}})
        for name in ("kube-system", "runtimes", here.settings.runs_namespace)
    ]
    memory.fill([(plural, {"apiVersion": "v1", "kind": "Namespace", **item}) for plural, item in namespaces])


def add_clusters(here: Surroundings, memory: KubeMemory, count: int) -> None:
    """Rows and objects of so many starts that run, as a cohort leaves them; each with the Pod that its Job made."""
    settings = run_settings(here.settings, {})
    objects = []
    with here.database.transaction() as transaction:
        for _ in range(count):
            run = int(transaction.value("insert into orca.runs (pipeline) values ('c') returning id"))
            assert transaction.value(RUNS["admit"], {"run": run, "start": 0})
            spec = RunSpec(run=run, start=1, pipeline="c", image="registry.example/c:1", workers=2)
            transaction.run(
                RUNS["record_cluster"], {"run": run, "start": 1, "pipeline": "c", "cpu_millis": 1, "fill": False}
            )
            for position, manifest in enumerate(render(spec, settings, here.stack_id)):
                uid = f"run-{run}-{position}"
                metadata = manifest["metadata"]
                place = {"namespace": metadata["namespace"], "kind": manifest["kind"], "name": metadata["name"]}
                transaction.run(
                    RUNS["record_object"], {**place, "position": position, "run": run, "start": 1, "rendered": "{}"}
                )
                transaction.run(
                    "update orca.kube_objects set uid = %(uid)s, confirmed_at = now() "
                    "where name = %(name)s and kind = %(kind)s",
                    {**place, "uid": uid},
                )
                objects.append((f"{manifest['kind'].lower()}s", seen(manifest, uid)))
                if position == 0:
                    objects.append(("pods", driver_of(manifest, uid)))
    memory.fill(objects)
    execute(here, "analyze")


def driver_of(job: Any, uid: str) -> dict[str, Any]:
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": job["metadata"]["name"], "uid": uid, "controller": True}
    metadata = {**job["metadata"], "name": f"{job['metadata']['name']}-x8k2p", "ownerReferences": [owner]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": job["spec"]["template"]["spec"]}
    return seen(pod, f"{uid}-driver")


def add_warm(here: Surroundings, memory: KubeMemory, pool: Pool, environment: Environment, numbers: range) -> None:
    objects = []
    with here.database.transaction() as transaction:
        pods = [
            render_warm(pool, environment, number, here.stack_id) for number in next_numbers(transaction, len(numbers))
        ]
        record_pods(transaction, pods, taken=False)
        for pod in pods:
            uid = f"warm-{pod.name}"
            values = {"name": pod.name, "uid": uid}
            transaction.run(
                "update orca.runtime_pods set uid = %(uid)s, ready_at = now(), address = '10.0.0.1' where name = %(name)s",
                values,
            )
            transaction.run(
                "update orca.kube_objects set uid = %(uid)s, confirmed_at = now() where name = %(name)s", values
            )
            objects.append(("pods", seen(pod.manifest, uid)))
    memory.fill(objects)
    execute(here, "analyze")


def recorded(here: Surroundings, memory: KubeMemory) -> RecordedEngine:
    return RecordedEngine(
        cast("Engine", Maker(memory)),
        here.database,
        backend_url="file:///nowhere",
        verify=lambda: None,
        deadline_seconds=60,
    )


def execute(here: Surroundings, statement: str, **parameters: object) -> None:
    with here.database.transaction() as transaction:
        transaction.run(statement, parameters)  # type: ignore[arg-type]
