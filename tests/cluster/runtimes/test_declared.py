"""Environments and pools of orca.toml on a cluster that has never seen them, by `pulumi` as a person runs it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orca_infra.kube.client import Kube
from orca_infra.kube.kinds import RUNTIME_ENVIRONMENT, RUNTIME_POOL, Ref
from orca_infra.settings import read_settings
from orca_infra.stack.engine import engine_environment
from orca_infra.stack.tools import require_tool
from orca_infra.surroundings import open_surroundings
from orca_infra.testing.cluster import TestCluster

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

FILE = """\
[pools]

[environments.python]
docker_image = "registry.example/python:1"

[runtime_pools.small]
environment = "python"
size = 2
burning_rate = 0.01
cull.seconds = "1h"
"""
POOL = Ref(kind=RUNTIME_POOL, namespace="declared", name="small")


@pytest.fixture
def fresh() -> Iterator[TestCluster]:
    """A cluster without our definitions."""
    with TestCluster.start(nodes=0) as started:
        yield started


@pytest.fixture
def pulumi(tmp_path: Path, database_url: str, fresh: TestCluster) -> Callable[..., str]:
    """Runs pulumi in a project of its own; gives what it says."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "Pulumi.yaml").write_text("name: orca-infra\nruntime: python\n")
    (project / "__main__.py").write_text("from orca_infra.stack.base import main\nmain()\n")
    variables = {
        "ORCA_STACK": "test",
        "ORCA_HOME": str(tmp_path / "home"),
        "ORCA_DB": database_url,
        "ORCA_CONFIG": str(tmp_path / "orca.toml"),
        "ORCA_TOKEN_KEY": "a key of the tests, 32 bytes long",
        "ORCA_RUNTIMES_NAMESPACE": "declared",
        "KUBECONFIG": str(fresh.kubeconfig),
        "PULUMI_CONFIG_PASSPHRASE_FILE": str(tmp_path / "passphrase"),
        "PULUMI_BACKEND_URL": (tmp_path / "state").as_uri(),
    }
    (tmp_path / "passphrase").write_text("a passphrase of the tests\n")
    (tmp_path / "state").mkdir()
    opened = open_surroundings(read_settings(variables), say=print)
    environment = {**os.environ, **variables, **engine_environment(opened.engine)}
    environment["PULUMI_HOME"] = str(opened.settings.home / "pulumi")
    opened.close()

    def run(*arguments: str, code: int = 0, **more: str) -> str:
        done = subprocess.run(
            [str(require_tool("pulumi")), "--non-interactive", *arguments],
            cwd=project,
            env={**environment, **more},
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


def test_the_file_declares_what_kubectl_sees_and_scales(
    tmp_path: Path, fresh: TestCluster, pulumi: Callable[..., str]
) -> None:
    file = tmp_path / "orca.toml"
    file.write_text(FILE)
    pulumi("stack", "init", "test")
    up = ("up", "--yes", "--stack", "test")
    assert "ORCA_RUNTIMES_NAMESPACE is not set" in pulumi(*up, "--skip-preview", code=1, ORCA_RUNTIMES_NAMESPACE="")
    pulumi(*up)  # its preview first, which meets no definitions yet
    with Kube.connect(kubeconfig=fresh.kubeconfig) as kube:
        environment = kube.get(Ref(kind=RUNTIME_ENVIRONMENT, namespace="declared", name="python"))
        assert environment is not None
        assert environment["spec"] == {"dockerImage": "registry.example/python:1"}
        pool = kube.get(POOL)
        assert pool is not None
        assert pool["spec"] == {"environment": "python", "size": 2, "burningRate": 0.01, "cull": {"seconds": 3600}}

        fresh.kubectl("scale", "rp", "small", "--replicas", "5", "-n", "declared")
        assert "unchanged" in pulumi(*up, "--skip-preview")
        assert (kube.get(POOL) or {})["spec"]["size"] == 5  # nobody asked for another

        file.write_text(FILE.replace("size = 2", "size = 3"))
        pulumi(*up, "--skip-preview")
        assert (kube.get(POOL) or {})["spec"]["size"] == 3

        file.write_text("[pools]\n[environments.python]\ndocker_image = 'registry.example/python:2'\n")
        pulumi(*up, "--skip-preview")
        assert kube.get(POOL) is None
        environment = kube.get(Ref(kind=RUNTIME_ENVIRONMENT, namespace="declared", name="python"))
        assert environment is not None
        assert environment["spec"] == {"dockerImage": "registry.example/python:2"}
