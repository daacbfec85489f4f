"""A preview of a stack with run clusters and runtime pools, against a real API server, with the default policies."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orca_infra.db.connection import Database
from orca_infra.testing.cluster import TestCluster


@pytest.fixture
def environment(cluster: TestCluster, home: Path, database_url: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ORCA_", "PULUMI_"))}
    name = f"test-{secrets.token_hex(4)}"
    return {
        **kept,
        "ORCA_STACK": "test",
        "ORCA_HOME": str(home),
        "ORCA_DB": database_url,
        "ORCA_CONFIG": str(home / "orca.toml"),
        "ORCA_TOKEN_KEY": "a key of the tests, 32 bytes long",
        "ORCA_RUNNER": "kubernetes",
        "ORCA_RUNS_NAMESPACE": name,
        "PULUMI_BACKEND_URL": f"file://{home / 'state'}",
        "PULUMI_CONFIG_PASSPHRASE_FILE": str(home / "passphrase"),
        "KUBECONFIG": str(cluster.kubeconfig),
    }


def call(checkout: Path, environment: dict[str, str], *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "orca_infra.cli", *arguments],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, done.stdout


def test_the_base_passes_the_default_policies_and_runs_are_decided_live_and_from_the_file(
    checkout: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    database = Database(environment["ORCA_DB"])
    with database.transaction() as transaction:
        transaction.run(
            "insert into orca.pipelines (name, image, workers) values ('reports', 'registry.example/reports:1', 2)"
        )
        transaction.run("insert into orca.runs (pipeline) select 'reports' from generate_series(1, 2)")
    database.close()
    code, out = call(checkout, environment, "preview", "--format", "json")
    found: dict[str, Any] = json.loads(out)
    assert code == 2, out
    [base] = found["stacks"]
    assert (base["error"], base["breaches"]) == ("", [])
    namespaces = [change["name"] for change in base["changes"] if change["type"] == "kubernetes:core/v1:Namespace"]
    assert any(environment["ORCA_RUNS_NAMESPACE"] in name for name in namespaces)
    runs = [one["sentence"] for one in found["decisions"]["decided"] if one["scope"] == "runs" and one["acts"]]
    assert [said.partition(":")[0] for said in runs] == [
        "start run 1 of reports, start 1 with 2 workers",
        "start run 2 of reports, start 1 with 2 workers",
    ]
    code, text = call(checkout, environment, "plan")
    assert code == 0
    assert "runs: start run 1 of reports, start 1 with 2 workers: it has been queued" in text
    code, text = call(checkout, environment, "snapshot")
    assert code == 0
    (tmp_path / "demand.json").write_text(text)
    # Neither the database nor the cluster is asked.
    without = {**environment, "ORCA_DB": "", "KUBECONFIG": "/dev/null/none"}
    code, out = call(checkout, without, "preview", "--format", "json", "--demand", str(tmp_path / "demand.json"))
    assert code == 2
    again = [one["sentence"] for one in json.loads(out)["decisions"]["decided"] if one["scope"] == "runs"]
    assert [said.partition(":")[0] for said in again] == [said.partition(":")[0] for said in runs]
