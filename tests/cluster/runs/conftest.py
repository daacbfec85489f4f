"""What tests of run clusters on a real API server share: passes over a namespace of their own, with the real engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from orca_infra.db.connection import Database
from orca_infra.kube.client import Kube
from orca_infra.kube.kinds import JOB, NAMESPACE, POD, SERVICE, Ref
from orca_infra.kube.labels import STACK_LABEL
from orca_infra.log import make_log
from orca_infra.loop.cluster_passes import RunPasses
from orca_infra.record.codec import decode
from orca_infra.runs.model import PodPlacement
from orca_infra.settings import Settings, read_settings
from orca_infra.stack.engine import Engine
from orca_infra.stack.operations import RecordedEngine
from orca_infra.surroundings import Surroundings, open_surroundings
from orca_infra.testing.cluster import TestCluster

KINDS = (JOB, POD, SERVICE)
Placements = Callable[[], Mapping[str, PodPlacement]]


@dataclass
class Room:
    """What a test works with: passes over a namespace of its own."""

    passes: RunPasses
    surroundings: Surroundings
    kube: Kube
    namespace: str
    environment: dict[str, str]
    engine: Engine
    wait_until: Callable[..., None]

    def queue(self, pipeline: str = "reports", *, runs: int = 1, workers: int = 2, **columns: Any) -> None:
        with self.database.transaction() as transaction:
            transaction.run(
                "insert into orca.pipelines (name, image, workers, max_runs, max_starts)"
                " values (%(p)s, 'registry.example/reports:1', %(w)s, %(max_runs)s, %(max_starts)s) on conflict do nothing",
                {"p": pipeline, "w": workers, "max_runs": None, "max_starts": None, **columns},
            )
            transaction.run(
                "insert into orca.runs (pipeline) select %(p)s from generate_series(1, %(n)s)",
                {"p": pipeline, "n": runs},
            )

    @property
    def database(self) -> Database:
        return self.surroundings.database

    def rows(self, query: Any, **parameters: Any) -> list[dict[str, Any]]:
        with self.database.snapshot() as transaction:
            return transaction.dicts(query, parameters)

    def objects(self) -> list[dict[str, Any]]:
        labels = {STACK_LABEL: self.surroundings.stack_id}
        return [o for kind in KINDS for o in self.kube.list(kind, namespace=self.namespace, labels=labels).items]

    def uids(self) -> set[str]:
        return {o["metadata"]["uid"] for o in self.objects()}

    def end(self, run: int, state: str = "succeeded") -> None:
        with self.database.transaction() as transaction:
            transaction.run("select set_config('orca.writer', 'driver', true)")
            transaction.run(
                "update orca.runs set state = %(s)s, ended_at = now() where id = %(r)s", {"s": state, "r": run}
            )

    def until(self, predicate: Callable[[], object], seconds: float = 30) -> None:
        """Make passes until something is true."""

        def pass_and_look() -> object:
            self.passes.run()
            return predicate()

        self.wait_until(pass_and_look, seconds)

    def again(self) -> Room:
        """The same stack with passes of a new process: nothing is remembered but what is written."""
        return self.with_settings()

    def with_settings(self, *, kube: Kube | None = None, placements: Placements = dict, **more: str) -> Room:
        """The same stack, with passes of other settings, or through another way to the API server."""
        environment = {**self.environment, **more}
        surroundings = replace(self.surroundings, settings=read_settings(environment))
        return _room(surroundings, kube or self.kube, environment, self.wait_until, placements=placements)

    @property
    def settings(self) -> Settings:
        return self.surroundings.settings


def _room(
    surroundings: Surroundings,
    kube: Kube,
    environment: dict[str, str],
    wait_until: Callable[..., None],
    *,
    placements: Placements = dict,
) -> Room:
    engine = Engine(surroundings.engine, {"KUBECONFIG": environment["KUBECONFIG"]})
    recorded = RecordedEngine(
        engine,
        surroundings.database,
        backend_url=surroundings.engine.backend_url,
        verify=lambda: None,
        deadline_seconds=300,
    )
    passes = RunPasses(
        surroundings,
        kube,
        recorded,
        environ=environment,
        verify=lambda: None,
        log=make_log(form="text"),
        placements=placements,
    )
    return Room(passes, surroundings, kube, environment["ORCA_RUNS_NAMESPACE"], environment, engine, wait_until)


@pytest.fixture
def room(
    cluster: TestCluster, namespace: str, database_url: str, tmp_path: Path, wait_until: Callable[..., None]
) -> Iterator[Room]:
    (tmp_path / "passphrase").write_text("a passphrase for tests")
    (tmp_path / "state").mkdir()
    environment = {
        "ORCA_DB": database_url,
        "ORCA_HOME": str(tmp_path / "home"),
        "ORCA_TOKEN_KEY": "0123456789abcdef0123456789abcdef",
        "PULUMI_BACKEND_URL": (tmp_path / "state").as_uri(),
        "PULUMI_CONFIG_PASSPHRASE_FILE": str(tmp_path / "passphrase"),
        "ORCA_RUNNER": "kubernetes",
        "ORCA_RUNS_NAMESPACE": namespace,
        "ORCA_STRAY_GRACE_SECONDS": "0.5",
        "ORCA_VCPU_BUDGET": "100",
        "ORCA_RUN_ENV": "GREETING",
        "GREETING": "hello",
        "KUBECONFIG": str(cluster.kubeconfig),
    }
    surroundings = open_surroundings(read_settings(environment), say=lambda _: None)
    with Kube.connect(kubeconfig=cluster.kubeconfig) as kube:
        kube.patch(
            Ref(kind=NAMESPACE, namespace=None, name=namespace),
            {"metadata": {"labels": {STACK_LABEL: surroundings.stack_id}}},
        )
        room = _room(surroundings, kube, environment, wait_until)
        yield room
        for row in room.rows(
            "select p.id, p.record, f.record as whole from orca.passes p join orca.pass_frames f on f.id = p.frame"
        ):
            decided = decode(row["record"], row["whole"])
            assert decided.again() == decided.plan, f"pass {row['id']} is decided otherwise from its record"
    surroundings.close()
