"""The whole loop beside a real API server: machines, runs and runtimes keep out of each other's way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orca_infra.kube.client import Kube
from orca_infra.kube.kinds import JOB, NAMESPACE, Ref
from orca_infra.kube.labels import STACK_LABEL
from orca_infra.log import make_log
from orca_infra.loop.run import Loop
from orca_infra.machines.providers.local_cloud import LocalCloud
from orca_infra.settings import read_settings
from orca_infra.surroundings import Surroundings, open_surroundings
from orca_infra.testing.cluster import TestCluster

TOML = """
[pools.p]
provider = "local"
image = "registry.example/orca-worker:1"
max_machines = 3
idle_seconds = "1h"
types = [{ type = "small", locations = ["a"] }]
"""


@pytest.fixture
def surroundings(cluster: TestCluster, namespace: str, database_url: str, home: Path) -> Iterator[Surroundings]:
    opened = open_surroundings(
        read_settings(
            {
                "ORCA_STACK": "test",
                "ORCA_DB": database_url,
                "ORCA_HOME": str(home),
                "ORCA_CONFIG": str(home / "orca.toml"),
                "ORCA_TOKEN_KEY": "0123456789abcdef0123456789abcdef",
                "PULUMI_BACKEND_URL": (home / "state").as_uri(),
                "PULUMI_CONFIG_PASSPHRASE_FILE": str(home / "passphrase"),
                "ORCA_POOL_GROW_AFTER": "0",
                "ORCA_RUNNER": "kubernetes",
                "ORCA_RUNS_NAMESPACE": namespace,
                "KUBECONFIG": str(cluster.kubeconfig),
            }
        ),
        say=lambda _: None,
    )
    (home / "orca.toml").write_text(TOML)
    with Kube.connect(kubeconfig=cluster.kubeconfig) as kube:
        kube.patch(
            Ref(kind=NAMESPACE, namespace=None, name=namespace),
            {"metadata": {"labels": {STACK_LABEL: opened.stack_id}}},
        )
    yield opened
    opened.close()


def test_a_cloud_that_takes_its_time_delays_no_run_and_a_stop_ends_all(
    surroundings: Surroundings, cluster: TestCluster, namespace: str, wait_until: Callable[..., None]
) -> None:
    cloud = LocalCloud(surroundings.cloud_folder)
    loop = Loop(surroundings, make_log(form="text"))
    thread = threading.Thread(target=loop.run)
    thread.start()
    database = surroundings.database

    def rows(query: Any) -> list[dict[str, Any]]:
        with database.snapshot() as transaction:
            return transaction.dicts(query)

    try:
        wait_until(lambda: rows("select from orca.pool_status"), 20, "the first pass over the machines")
        cloud.arm("create", "", seconds=3600)
        with database.transaction() as transaction:
            transaction.script(
                "insert into orca.pipelines (name, placement, image) values ('on-machines', 'worker:p', 'i'), "
                "('on-cluster', null, 'registry.example/reports:1'); insert into orca.runs (pipeline) values ('on-machines')"
            )
        wait_until(lambda: not (cloud.folder / "faults.json").exists(), 30, "the create that has no answer")
        with database.transaction() as transaction:
            transaction.script("insert into orca.runs (pipeline) values ('on-cluster')")
        with Kube.connect(kubeconfig=cluster.kubeconfig) as kube:
            wait_until(lambda: kube.list(JOB, namespace=namespace).items, 25, "the run's driver")
        [machines] = [one for one in rows("select * from orca.engine_operations") if one["stack"] == "test.machines.p"]
        assert machines["ended_at"] is None, "the create was over already"
    finally:
        loop.stop()
        cloud.hurry()  # what the engine is at is waited for
        thread.join(240)
    assert not thread.is_alive()
    assert rows("select from orca.engine_operations where ended_at is null") == []
