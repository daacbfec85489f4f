"""The image: built as a deploy job builds it, and the base's own Deployment of it on a real node leads and answers its probes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orca_infra.db.connection import Database
from orca_infra.kube.client import Kube
from orca_infra.kube.kinds import NAMESPACE, Ref
from orca_infra.loop.leader import holder
from orca_infra.stack.base_model import Base, BaseSecrets, Deployed
from orca_infra.stack.base_program import base_program
from orca_infra.stack.engine import Engine, EngineConfig
from orca_infra.stack.identity import ensure_identity
from orca_infra.testing.cluster import TestCluster
from orca_infra.testing.image_builder import ImageBuilder
from orca_infra.testing.node import RealNode
from orca_infra.testing.node_surroundings import NodeImpossible

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

CHECKOUT = Path(__file__).parents[2]
NAME = "localhost/orca-infra:test"
TOML = """
[pools.p]
provider = "local"
image = "registry.example/orca-worker:1"
max_machines = 1
idle_seconds = "10m"
types = [{ type = "s", locations = ["a"] }]
"""


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageBuilder]:
    folder = tmp_path_factory.mktemp("builder")
    try:
        yield ImageBuilder.find(folder)
    except NodeImpossible as error:
        pytest.skip(str(error))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def archive(builder: ImageBuilder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The image, built from the context that `make image` prepares."""
    context = tmp_path_factory.mktemp("context")
    prepared = subprocess.run(
        [sys.executable, str(CHECKOUT / "tools" / "image.py"), str(context)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert prepared.returncode == 0, prepared.stderr
    builder.base("localhost/base")
    return builder.build(context, NAME, BASE="localhost/base")


def test_the_image_is_of_a_user_without_rights_and_has_the_engine_with_its_plugins(
    builder: ImageBuilder, archive: Path
) -> None:
    said = json.loads(builder.run("inspect", "--type=image", NAME))
    config = said["OCIv1"]["config"]
    assert config["User"] == "10001:10001"
    assert (config["Entrypoint"], config["Cmd"]) == (["orca-infra"], ["run"])
    # Two layers: the base, and what the product adds; the stage that pip was in is none of them.
    assert len(said["OCIv1"]["rootfs"]["diff_ids"]) == 2
    container = builder.run("from", "--pull-never", NAME).split()[-1]
    policy = ["--isolation=chroot", container, "--"]
    assert builder.run("run", *policy, "id", "-u").strip() == "10001"
    for command in (["pulumi", "version"], ["orca-infra", "--version"], ["orca-infra", "db", "migrate", "--help"]):
        assert builder.run("run", *policy, *command).strip()
    # Exit code 1 when anything that is needed is missing.
    assert "/opt/orca-infra/bin/pulumi" in builder.run("run", *policy, "orca-infra", "doctor", "--json")
    for program in ("pulumi-resource-kubernetes", "pulumi-resource-orca", "pulumi"):
        assert builder.run("run", *policy, "sh", "-c", f"command -v {program}").startswith("/opt/orca-infra/bin/")
    with pytest.raises(subprocess.CalledProcessError):
        builder.run("run", *policy, "touch", "/opt/orca-infra/bin/anything")
    builder.run("rm", container)


def test_the_deployed_loop_leads_and_its_probes_pass(
    archive: Path,
    node: RealNode,
    cluster: TestCluster,
    postgres_server: Any,
    database_url: str,
    tmp_path: Path,
    wait_until: Callable[..., None],
) -> None:
    node._ctr("images", "import", "--snapshotter=overlayfs", str(archive))
    database = Database(database_url)
    base = Base(
        stack_id=ensure_identity(database, "test"),
        family="test",
        system_namespace="image-system",
        deployed=Deployed(image=NAME, loop_replicas=2, api_replicas=None, toml=TOML),
        secrets=BaseSecrets(
            database_url=postgres_server.container_url(database_url),
            token_key="a key of the tests, 32 bytes long",
            passphrase="a passphrase of the tests",
        ),
    )
    database.close()
    (tmp_path / "passphrase").write_text("a passphrase of the tests")
    (tmp_path / "state").mkdir()
    config = EngineConfig(
        backend_url=(tmp_path / "state").as_uri(), passphrase_file=tmp_path / "passphrase", folder=tmp_path / "engine"
    )
    engine = Engine(config, {"KUBECONFIG": str(cluster.kubeconfig)})
    with Kube.connect(kubeconfig=cluster.kubeconfig) as kube:
        try:
            # The provider waits for the Deployment: both Pods started, and passed their probes.
            engine.up("test", base_program(base), targets=(), deadline_seconds=300, on_start=lambda _: None)
        except Exception as error:
            raise AssertionError(_why(cluster, base.system_namespace or "")) from error
        assert "connected from" in holder(database_url)
        pods = cluster.api.call("GET", f"/api/v1/namespaces/{base.system_namespace}/pods")["items"]
        assert len(pods) == 2
        for pod in pods:
            [status] = pod["status"]["containerStatuses"]
            assert (status["ready"], status["restartCount"]) == (True, 0), _why(cluster, base.system_namespace or "")
        _change_configuration(cluster, pods)
        wait_until(
            lambda: "orca.toml was read anew" in _said(cluster, pods), 60, "the new orca.toml, without a restart"
        )
        kube.delete(Ref(kind=NAMESPACE, name=base.system_namespace or ""))
        wait_until(lambda: not holder(database_url), 90, "the loops have ended")


def _change_configuration(cluster: TestCluster, pods: list[dict[str, Any]]) -> None:
    """What the next `up` would do to the ConfigMap; a touched Pod has its kubelet look at once, and not within a minute."""
    folder = f"/api/v1/namespaces/{pods[0]['metadata']['namespace']}"
    toml = TOML.replace("max_machines = 1", "max_machines = 2")
    cluster.api.call("PATCH", f"{folder}/configmaps/orca-loop", {"data": {"orca.toml": toml}})
    for pod in pods:
        touched = {"metadata": {"annotations": {"touched": "yes"}}}
        cluster.api.call("PATCH", f"{folder}/pods/{pod['metadata']['name']}", touched)


def _said(cluster: TestCluster, pods: list[dict[str, Any]]) -> str:
    namespace = pods[0]["metadata"]["namespace"]
    names = [pod["metadata"]["name"] for pod in pods]
    return "".join(cluster.kubectl("logs", "-n", namespace, name, "-c", "orca-loop") for name in names)


def _why(cluster: TestCluster, namespace: str) -> str:
    """What Kubernetes and the containers say of Pods that do not come up."""
    pods = cluster.api.call("GET", f"/api/v1/namespaces/{namespace}/pods")["items"]
    said = []
    for pod in pods:
        name = pod["metadata"]["name"]
        said.append(json.dumps(pod["status"].get("containerStatuses") or pod["status"], indent=1)[-1500:])
        for arguments in (["migrate"], ["orca-loop"], ["orca-loop", "--previous"]):
            try:
                said.append(cluster.kubectl("logs", "-n", namespace, name, "--tail=20", "-c", *arguments))
            except Exception as error:  # noqa: BLE001  (whatever there is to be had)
                said.append(str(error))
    return "\n".join(said)
