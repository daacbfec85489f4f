"""The policy pack with the real engine and the real providers: `pulumi preview --policy-pack policies`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orca_infra.policy.rules import RULES
from orca_infra.stack.engine import Engine, EngineConfig
from orca_infra.stack.tools import require_tool

PACK = Path(__file__).parents[2] / "policies"
ID = "mystackmystackid"
HEAD = """
import pulumi
kube = pulumi.ProviderResource("kubernetes", "cluster", {"renderYamlToDirectory": "yaml"})
opts = pulumi.ResourceOptions(provider=kube)
def machine(name, **more):
    given = {"name": name, "type": "small", "location": "east", "folder": ".", "argv": ["true"], "environment": {}}
    return pulumi.CustomResource("orca:index:Machine", name, {**given, **more})
def pod(name, metadata, spec):
    manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, **metadata}, "spec": spec}
    return pulumi.CustomResource("kubernetes:core/v1:Pod", name, manifest, opts)
identity = pulumi.CustomResource("orca:index:Identity", "identity", {"id": "mystackmystackid", "stack": "dev"})
"""
BAD = (
    HEAD
    + """
machine("orca-p-1", labels={"orca-stack": "otherotherotheri", "orca-pool": "p"})
machine("orca-p-2", labels={"orca-pool": "p"}, location=identity.id.apply(str))
container = {"name": "c", "image": "python:3", "securityContext": {"privileged": True}}
pod("bad", {"namespace": "kube-system"}, {"containers": [container], "hostNetwork": True})
service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s", "namespace": "orca-runs"}}
pulumi.CustomResource("kubernetes:core/v1:Service", "s", {**service, "spec": {"type": "LoadBalancer"}}, opts)
network = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "n", "namespace": "orca-runs"}}
everybody = {"ingress": [{"from": [{"ipBlock": {"cidr": "0.0.0.0/0"}}]}], "podSelector": {}}
pulumi.CustomResource("kubernetes:networking.k8s.io/v1:NetworkPolicy", "n", {**network, "spec": everybody}, opts)
"""
)
GOOD = (
    HEAD
    + """
machine("orca-p-1", labels={"orca-stack": "mystackmystackid", "orca-pool": "p"})
resources = {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "1Gi"}}
container = {"name": "c", "image": "registry.example/a@sha256:" + 64 * "0", "resources": resources}
pod("good", {"namespace": "orca-runs", "labels": {"orca.stack": "mystackmystackid"}}, {"containers": [container]})
"""
)
#: What the loop itself declares: a run's cluster and a warm runtime.
LOOP = (
    HEAD
    + """
from orca_infra.runs.model import RunSpec, Sizes
from orca_infra.runs.render import RunSettings, render
from orca_infra.runtimes.model import Environment, Pool
from orca_infra.runtimes.render import render_warm
settings = RunSettings(
    namespace="orca-runs", binary="orca", secret="orca-db", dista_port=6390, deadline_seconds=60, sizes=Sizes()
)
image = "registry.example/a@sha256:" + 64 * "0"
objects = [*render(RunSpec(run=7, start=1, pipeline="p", image=image, workers=1), settings, "mystackmystackid")]
resources = {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "1Gi"}}
pool = Pool(namespace="orca-runs", name="p", uid="u", environment="e", size=1, resources=resources)
objects.append(render_warm(pool, Environment(namespace="orca-runs", name="e", image=image), 1, "mystackmystackid").manifest)
for manifest in objects:
    version = manifest["apiVersion"]
    kind = f"kubernetes:{version if '/' in version else 'core/' + version}:{manifest['kind']}"
    pulumi.CustomResource(kind, manifest["metadata"]["name"], manifest, opts)
"""
)
STRICT = {
    "machine-types": {"allowed": ["e2-*"]},
    "machine-locations": {"allowed": ["us-*"]},
    "machine-counts": {"mostPerPool": 1},
    "image-registries": {"registries": ["registry.example"]},
}


class Project:
    """A Pulumi project of the test, and the engine."""

    def __init__(self, folder: Path) -> None:
        require_tool("pulumi")
        (folder / "state").mkdir()
        (folder / "passphrase").write_text("a passphrase\n")
        self.folder = folder / "project"
        self.folder.mkdir()
        (self.folder / "Pulumi.yaml").write_text("name: orca-infra\nruntime: python\n")
        config = EngineConfig(
            backend_url=f"file://{folder / 'state'}", passphrase_file=folder / "passphrase", folder=folder / "engine"
        )
        self.engine = Engine(config)
        self.engine.init("dev")

    def preview(self, program: str, config: dict[str, Any] | None = None) -> tuple[int, dict[str, list[str]]]:
        """The exit code, and by rule what was said of each violation."""
        (self.folder / "__main__.py").write_text(program)
        options = ["--policy-pack", str(PACK)]
        if config is not None:
            (self.folder / "policies.json").write_text(json.dumps(config))
            options += ["--policy-pack-config", "policies.json"]
        completed, log = self.engine.preview_project("dev", self.folder, options, deadline_seconds=120)
        found: dict[str, list[str]] = {}
        for line in log.splitlines():
            event = json.loads(line).get("policyEvent")
            if event:
                found.setdefault(event["policyName"], []).append(event["message"].strip())
        assert found or completed.code == 0, completed.stdout + completed.stderr
        return completed.code, found


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_what_breaks_the_rules_fails_and_each_violation_names_resource_rule_and_remedy(project: Project) -> None:
    code, found = project.preview(BAD, STRICT)
    assert code != 0
    assert set(found) == {rule.name for rule in RULES}
    for name, messages in found.items():
        for message in messages:
            assert f"\n{name}: " in message
            assert ". Remedy: " in message
    # A location that is known after the `up` only is not judged.
    assert [message.partition(": ")[2].partition(":")[0] for message in found["machine-locations"]] == [
        "Machine orca-p-1"
    ]


def test_by_default_what_is_well_made_passes_and_only_advice_is_no_failure(project: Project) -> None:
    assert project.preview(GOOD) == (0, {})
    assert project.preview(LOOP) == (0, {})
    code, found = project.preview(GOOD.replace("@sha256:", ":"))
    assert (code, list(found)) == (0, ["image-digests"])


def test_a_rule_can_be_taken_away_and_a_mistake_in_the_configuration_is_refused(project: Project) -> None:
    code, found = project.preview(BAD, {"all": "disabled"})
    assert (code, found) == (0, {})
    strict = {**STRICT, "image-digests": "mandatory"}
    code, found = project.preview(GOOD.replace("@sha256:", ":"), strict)
    assert code != 0
    assert {"machine-types", "machine-locations", "image-digests"} <= set(found)
