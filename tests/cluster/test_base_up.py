"""`pulumi up` of a base stack on a real API server, with the vendor's CLI alone, as a person or a deploy job runs it."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from orca_infra.stack.tools import require_tool, search_path
from orca_infra.testing.cluster import TestCluster
from orca_infra.testing.cluster_http import ApiError

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

KEY = "a key of the tests, 32 bytes long"
IMAGE = "registry.example/orca-infra@sha256:" + "0" * 64
SECRET = {"db", "tokenKey", "backendUrl"}
URL = "postgresql://orca:a-password-of-the-tests@db.example:5432/orca"


@dataclass
class Project:
    """A person's checkout with a state of its own, and a shell in it: nothing is set but where state and database are."""

    folder: Path
    environment: dict[str, str]
    stack: str = "test"

    def pulumi(self, *arguments: str, code: int = 0) -> str:
        """What pulumi says, both outputs together; fails the test for another exit code."""
        done = subprocess.run(
            [str(require_tool("pulumi")), "--non-interactive", *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        said = done.stdout + done.stderr
        assert done.returncode == code, said
        return said

    def up(self, code: int = 0) -> str:
        return self.pulumi("up", "--yes", "--skip-preview", "--stack", self.stack, code=code)

    def configure(self, **config: Any) -> None:
        """The stack's file, with these keys and those that are secret encrypted; what it had before is gone."""
        path = self.folder / "stacks" / f"Pulumi.{self.stack}.yaml"
        salt = [line for line in path.read_text().splitlines() if line.startswith("encryptionsalt")]
        plain = {key: value for key, value in config.items() if key not in SECRET}
        lines = [*salt, "config:", *(f"  orca-infra:{key}: {json.dumps(value)}" for key, value in plain.items())]
        path.write_text("\n".join(lines) + "\n")
        secrets = [f"--secret={key}={value}" for key, value in config.items() if key in SECRET]
        if secrets:
            self.pulumi("config", "set-all", "--stack", self.stack, *secrets)

    def outputs(self) -> Any:
        said = subprocess.run(
            [str(require_tool("pulumi")), "stack", "output", "--json", "--show-secrets", "--stack", self.stack],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        return json.loads(said.stdout)


@pytest.fixture
def project(home: Path, checkout: Path, database_url: str, cluster: TestCluster, namespaces: dict[str, str]) -> Project:
    kept = ("HOME", "LANG", "TMPDIR")
    environment = {
        **{name: os.environ[name] for name in kept if name in os.environ},
        "PATH": search_path(),
        "PULUMI_BACKEND_URL": f"file://{home / 'state'}",
        "PULUMI_CONFIG_PASSPHRASE": "a passphrase of the tests",
        "PULUMI_SKIP_UPDATE_CHECK": "true",
        "PULUMI_HOME": str(home / "pulumi"),
        "ORCA_DB": database_url,
        "ORCA_HOME": str(home / "orca"),
        "KUBECONFIG": str(cluster.kubeconfig),
    }
    one = Project(checkout, environment)
    one.pulumi("stack", "init", "test")
    return one


@pytest.fixture
def namespaces(cluster: TestCluster, database_url: str) -> Iterator[dict[str, str]]:
    """Names that no other test has; what was made of them is deleted."""
    tail = database_url.rpartition("test_")[2].partition(" ")[0][:8].strip("'")
    names = {place: f"base-{tail}-{place}" for place in ("runs", "runtimes", "system")}
    yield names
    for name in names.values():
        try:
            cluster.api.call("DELETE", f"/api/v1/namespaces/{name}")
        except ApiError as error:
            assert error.code == 404, error


def everything(names: dict[str, str]) -> dict[str, Any]:
    """A stack's file with all of it."""
    return {
        "orcaToml": "stacks/orca.toml",
        "runner": "kubernetes",
        "runsNamespace": names["runs"],
        "runtimesNamespace": names["runtimes"],
        "systemNamespace": names["system"],
        "db": URL,
        "tokenKey": KEY,
        "backendUrl": "gs://a-bucket",
        "loop": True,
        "api": True,
        "image": IMAGE,
        "networkPolicies": True,
        "runsQuota": {"pods": "500", "requests.cpu": "64"},
        "runtimesLimits": {"max": {"cpu": "8"}},
        "settings": {"ORCA_VCPU_BUDGET": "64", "ORCA_POOL_SCALE_SECONDS": 5},
    }


def test_up_makes_all_that_is_configured_and_a_second_up_changes_nothing(
    project: Project, cluster: TestCluster, namespaces: dict[str, str], wait_until: Callable[..., None]
) -> None:
    project.configure(**everything(namespaces))
    said = project.up()
    assert "created" in said
    stack_id = project.outputs()["id"]
    system = namespaces["system"]

    def get(path: str) -> Any:
        return cluster.api.call("GET", path)

    def items(path: str) -> dict[str, Any]:
        return {item["metadata"]["name"]: item for item in get(path)["items"]}

    for name in namespaces.values():
        assert get(f"/api/v1/namespaces/{name}")["metadata"]["labels"]["orca.stack"] == stack_id
    # The Secrets have what was configured, where it is needed and nowhere else.
    for name in (namespaces["runs"], system):
        secret = get(f"/api/v1/namespaces/{name}/secrets/orca-db")
        assert base64.b64decode(secret["data"]["url"]).decode() == URL
    assert "orca-db" not in items(f"/api/v1/namespaces/{namespaces['runtimes']}/secrets")
    of_loop = get(f"/api/v1/namespaces/{system}/secrets/orca-infra")["data"]
    assert base64.b64decode(of_loop["token-key"]).decode() == KEY
    assert base64.b64decode(of_loop["passphrase"]).decode() == "a passphrase of the tests"
    # The Deployments have come up: their Pods are Running, with every restriction.
    deployments = items(f"/apis/apps/v1/namespaces/{system}/deployments")
    assert {name: d["status"]["readyReplicas"] for name, d in deployments.items()} == {"orca-loop": 2, "orca-api": 2}
    pods = items(f"/api/v1/namespaces/{system}/pods").values()
    assert {pod["status"]["phase"] for pod in pods} == {"Running"}
    for pod in pods:
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        for container in [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["resources"]["limits"]["memory"]
        variables = {v["name"]: v.get("value") for v in pod["spec"]["containers"][0]["env"]}
        assert variables["ORCA_VCPU_BUDGET"] == "64"
        if pod["metadata"]["labels"]["app.kubernetes.io/name"] == "orca-api":
            assert not {"ORCA_TOKEN_KEY", "PULUMI_CONFIG_PASSPHRASE_FILE"} & set(variables)
    budgets = items(f"/apis/policy/v1/namespaces/{system}/poddisruptionbudgets")
    assert set(budgets) == {"orca-loop", "orca-api"}
    wait_until(
        lambda: (
            items(f"/apis/policy/v1/namespaces/{system}/poddisruptionbudgets")["orca-loop"]["status"][
                "disruptionsAllowed"
            ]
            == 1
        ),
        20,
    )
    policies = items(f"/apis/networking.k8s.io/v1/namespaces/{namespaces['runs']}/networkpolicies")
    assert set(policies) == {"orca-driver", "orca-head", "orca-worker"}
    assert get(f"/api/v1/namespaces/{namespaces['runs']}/resourcequotas/orca")["spec"]["hard"]["pods"] == "500"
    assert get(f"/api/v1/namespaces/{namespaces['runtimes']}/limitranges/orca")["spec"]["limits"][0]["max"] == {
        "cpu": "8"
    }
    toml = get(f"/api/v1/namespaces/{system}/configmaps/orca-loop")["data"]["orca.toml"]
    assert toml == (project.folder / "stacks" / "orca.toml").read_text()
    assert project.outputs()["namespaces"] == namespaces
    assert project.outputs()["api"] == f"http://orca-api.{system}.svc"

    said = project.up()
    assert "unchanged" in said
    for word in ("created", "updated", "replaced", "deleted"):
        assert word not in said, said

    # What somebody changed by hand is put back; what is secret is in no output of pulumi's.
    cluster.api.call("PATCH", f"/apis/apps/v1/namespaces/{system}/deployments/orca-loop", {"spec": {"replicas": 0}})
    said = project.pulumi("preview", "--diff", "--refresh", "--stack", project.stack)
    assert "1 to update" in said
    for secret in (KEY, "a-password-of-the-tests", base64.b64encode(KEY.encode()).decode()):
        assert secret not in said
    project.pulumi("up", "--yes", "--skip-preview", "--refresh", "--stack", project.stack)
    assert get(f"/apis/apps/v1/namespaces/{system}/deployments/orca-loop")["spec"]["replicas"] == 2

    # Before a drain a destroy removes nothing at all. After it, namespaces and definitions are forgotten and stay.
    said = project.pulumi("destroy", "--yes", "--skip-preview", "--stack", project.stack, code=1)
    assert "protected" in said
    assert "drained-first" in said
    assert " deleted (" not in said
    project.pulumi("state", "unprotect", "--all", "--yes", "--stack", project.stack)
    project.pulumi("destroy", "--yes", "--skip-preview", "--stack", project.stack)
    assert get(f"/api/v1/namespaces/{namespaces['runs']}")["status"]["phase"] == "Active"
    assert "runtime-pools.datalayer.io" in items("/apis/apiextensions.k8s.io/v1/customresourcedefinitions")
    assert not items(f"/apis/apps/v1/namespaces/{system}/deployments")
    assert not items(f"/api/v1/namespaces/{namespaces['runs']}/secrets")


def test_a_base_without_a_cluster_contacts_none(project: Project) -> None:
    project.configure(orcaToml="stacks/orca.toml", tokenKey=KEY)
    project.environment["KUBECONFIG"] = "/nonexistent/kubeconfig"
    assert "3 created" in project.up()  # the stack itself, its identity, and what holds a destroy up
    assert set(project.outputs()) == {"id", "family"}


def test_what_is_missing_or_wrong_is_said_in_one_sentence_and_nothing_is_made(
    project: Project, cluster: TestCluster, namespaces: dict[str, str]
) -> None:
    good = everything(namespaces)

    def refused(**config: Any) -> str:
        project.configure(**config)
        said = project.up(code=1)
        assert "Traceback" not in said, said
        assert "orca:index:Identity" not in said, said
        return said

    assert "orca-infra:image is not set" in refused(**{**good, "image": ""})
    assert "must be of type 'integer'" in refused(**{**good, "loopReplicas": "two"})
    assert "orca-infra:runnr is no key of a base stack; did you mean runner?" in refused(**good, runnr="kubernetes")
    assert "must be kubernetes, or unset" in refused(**{**good, "runner": "nomad"})
    assert "must be 1 to 20" in refused(**{**good, "loopReplicas": 0})
    said = refused(**{**good, "settings": {"ORCA_VCPU_BUDGET": "much", "ORCA_DB": "x"}})
    assert "orca-infra:settings has ORCA_DB, which is secret: set orca-infra:db" in said
    unencrypted = project.folder / "stacks" / "Pulumi.test.yaml"
    project.configure(orcaToml="stacks/orca.toml")
    unencrypted.write_text(unencrypted.read_text() + f"  orca-infra:tokenKey: {KEY}\n")
    assert "stands unencrypted" in project.up(code=1)
    assert "nope.toml" in refused(**{**good, "orcaToml": "stacks/nope.toml"})
    assert 'cpu = "64"' in refused(**{**good, "runsQuota": {"pods": "many"}})
    without = {key: value for key, value in good.items() if key != "tokenKey"}
    assert "ORCA_TOKEN_KEY is not set" in refused(**without)
    project.environment["ORCA_RUNNER"] = "kubernetes"
    project.environment["ORCA_RUNS_NAMESPACE"] = "elsewhere"
    assert "sets orca-infra:runsNamespace and this shell sets ORCA_RUNS_NAMESPACE to something else" in refused(**good)
    del project.environment["ORCA_RUNS_NAMESPACE"]
    label = {"metadata": {"name": namespaces["runs"], "labels": {"orca.stack": "another"}}}
    cluster.api.call("POST", "/api/v1/namespaces", label)
    assert "belongs to stack id another" in refused(**good)


def test_what_the_server_refuses_is_said_in_its_words_and_the_next_up_makes_it(
    project: Project, cluster: TestCluster, namespaces: dict[str, str]
) -> None:
    runs = {
        "orcaToml": "stacks/orca.toml",
        "tokenKey": KEY,
        "runner": "kubernetes",
        "runsNamespace": namespaces["runs"],
    }
    project.configure(**runs, runsLimits={"max": {"cpu": "1"}, "default": {"cpu": "2"}})
    said = project.up(code=1)
    assert "default value 2 is greater than max value 1" in said or "must be less than or equal" in said, said
    assert "Traceback" not in said
    project.configure(**runs, runsLimits={"max": {"cpu": "2"}, "default": {"cpu": "1"}})
    assert "limitrange:" in project.up()
    path = f"/api/v1/namespaces/{namespaces['runs']}/limitranges/orca"
    assert cluster.api.call("GET", path)["spec"]["limits"][0]["default"] == {"cpu": "1"}
    # With the database a local one, there is no Secret for drivers that could not use it.
    assert not cluster.api.call("GET", f"/api/v1/namespaces/{namespaces['runs']}/secrets")["items"]
