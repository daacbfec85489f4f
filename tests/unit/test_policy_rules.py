"""Every policy, with what breaks it and what passes; and what this program itself declares passes all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from orca_infra.machines.providers.gcp import GcpProvider
from orca_infra.machines.providers.gcp_config import GcpCloud
from orca_infra.machines.providers.port import Birth
from orca_infra.policy.model import UNKNOWN, Resource, Rule, Violation
from orca_infra.policy.rules import RULES
from orca_infra.runs.model import RunSpec, Sizes
from orca_infra.runs.render import RunSettings
from orca_infra.runs.render import render as render_run
from orca_infra.runtimes.model import Environment, Pool
from orca_infra.runtimes.render import render_warm
from orca_infra.stack.base_model import Base, BaseSecrets, Deployed
from orca_infra.stack.base_program import base_objects

ID = "mystackmystackid"
OTHER = "otherotherotheri"
LABELS = {"orca.stack": ID}
SIZES = {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "1Gi"}}
DIGEST = "sha256:" + "0" * 64


def rule(name: str) -> Rule:
    return next(rule for rule in RULES if rule.name == name)


def violations(name: str, *resources: Resource, **config: Any) -> list[Violation]:
    found = rule(name)
    values = found.values(config)
    if found.check is not None:
        return [violation for resource in resources for violation in found.check(resource, values)]
    assert found.check_stack is not None
    return list(found.check_stack(resources, values))


def sentence(name: str, *resources: Resource, **config: Any) -> str:
    [one] = violations(name, *resources, **config)
    return one.sentence(name)


def instance(name: str = "orca-p-1", **props: Any) -> Resource:
    given = {"machineType": "e2-small", "zone": "us-central1-a", "labels": {"orca-stack": ID, "orca-pool": "p"}}
    return Resource(type="gcp:compute/instance:Instance", name=name, urn=f"urn:{name}", props={**given, **props})


def machine(**props: Any) -> Resource:
    given = {"type": "small", "location": "east", "labels": {"orca-stack": ID, "orca-pool": "p"}}
    return Resource(type="orca:index:Machine", name="orca-p-1", props={**given, **props})


def kube(kind: str, group: str = "core/v1", *, metadata: Any = None, **props: Any) -> Resource:
    given = {"name": "x", "namespace": "orca-runs", "labels": LABELS} if metadata is None else metadata
    return Resource(type=f"kubernetes:{group}:{kind}", name="x", props={"metadata": given, **props})


def container(**more: Any) -> dict[str, Any]:
    return {"name": "main", "image": f"registry.example/a@{DIGEST}", "resources": SIZES, **more}


def pod(spec: Mapping[str, Any] | None = None, **more: Any) -> Resource:
    return kube("Pod", spec={"containers": [container(**more)], **(spec or {})})


def deployment(**more: Any) -> Resource:
    return kube("Deployment", "apps/v1", spec={"template": {"spec": {"containers": [container(**more)]}}})


def as_kind(kind: str, of: Resource) -> Resource:
    return replace(of, type=of.type.replace(f":{of.kind}", f":{kind}"))


def listed(kind: str, *of: Resource) -> Resource:
    return replace(as_kind(kind, of[0]), props={"items": [one.props for one in of]})


def cron_job(spec: Mapping[str, Any]) -> Resource:
    template = {"spec": {"containers": [container()], **spec}}
    return kube("CronJob", "batch/v1", spec={"jobTemplate": {"spec": {"template": template}}})


def firewall(**more: Any) -> Resource:
    props = {"name": f"orca-{ID}", "direction": "INGRESS", "allows": [{"protocol": "tcp"}], **more}
    return Resource(type="gcp:compute/firewall:Firewall", name="fw", props=props)


def policy(*sources: Mapping[str, Any]) -> Resource:
    return kube("NetworkPolicy", "networking.k8s.io/v1", spec={"ingress": [{"from": list(sources)}]})


def service(**spec: Any) -> Resource:
    return kube("Service", spec=spec)


def named(kind: str, **props: Any) -> Resource:
    return Resource(type=f"gcp:{kind}", name="n", props=props)


IDENTITY = Resource(type="orca:index:Identity", name="identity", props={"id": ID, "stack": "dev"})

BROKEN: list[tuple[str, Sequence[Resource], dict[str, Any]]] = [
    ("identity-labels", [kube("Pod", metadata={"name": "x"})], {}),
    ("identity-labels", [kube("Pod", metadata={"name": "x", "labels": {"orca.stack": ""}})], {}),
    ("identity-labels", [kube("Namespace", metadata={"name": "x", "labels": {"orca.stack": "prod"}})], {}),
    ("identity-labels", [kube("ConfigMap")], {"id": OTHER}),
    ("identity-labels", [instance(labels={"orca-pool": "p"})], {}),
    ("identity-labels", [machine(labels=None)], {}),
    ("identity-labels", [named("compute/network:Network", name="default")], {}),
    ("identity-labels", [named("serviceaccount/account:Account", accountId="builder")], {}),
    ("identity-labels", [named("pubsub/topic:Topic", labels={"team": "a"})], {}),
    ("one-identity", [IDENTITY, kube("Pod", metadata={"labels": {"orca.stack": OTHER}})], {}),
    ("one-identity", [kube("Pod"), instance(labels={"orca-stack": OTHER})], {}),
    ("family-namespaces", [kube("Secret", metadata={"namespace": "kube-system"})], {}),
    ("family-namespaces", [kube("Pod", metadata={"name": "x"})], {}),
    ("family-namespaces", [kube("Namespace", metadata={"name": "default"})], {}),
    ("family-namespaces", [kube("Pod")], {"namespaces": ["other"]}),
    ("machine-types", [instance(machineType="zones/us-central1-a/machineTypes/a3-megagpu-8g")], {"allowed": ["e2-*"]}),
    ("machine-types", [machine(type="huge")], {"allowed": ["small", "large"]}),
    ("machine-locations", [instance(zone="asia-east1-a")], {"allowed": ["us-*", "europe-west1-b"]}),
    ("machine-locations", [machine(location="moon")], {"allowed": ["east"]}),
    ("machine-counts", [instance("orca-p-1"), instance("orca-p-2")], {"mostPerPool": 1}),
    ("machine-counts", [instance("a", labels={"orca-pool": "q"}), instance("b")], {"most": 1, "mostPerPool": 1}),
    ("no-external-address", [instance(networkInterfaces=[{}, {"accessConfigs": [{}]}])], {}),
    ("no-external-address", [instance(networkInterfaces=[{"ipv6AccessConfigs": [{}]}])], {"allow": ["other"]}),
    ("no-external-address", [named("compute/address:Address", name="a")], {}),
    ("no-external-address", [service(type="LoadBalancer")], {}),
    ("no-external-address", [service(type="NodePort")], {}),
    ("no-external-address", [service(externalIPs=["192.0.2.1"])], {}),
    ("no-open-firewall", [firewall(sourceRanges=["10.0.0.0/8", "0.0.0.0/0"])], {}),
    ("no-open-firewall", [firewall(sourceRanges=["::/0"])], {"allow": ["other-*"]}),
    ("no-open-firewall", [firewall()], {}),
    ("no-open-firewall", [policy({"podSelector": {}}, {"ipBlock": {"cidr": "0.0.0.0/0"}})], {}),
    ("no-open-firewall", [policy({"ipBlock": {"cidr": "10.0.0.0/0"}})], {}),
    ("no-open-firewall", [firewall(sourceRanges=["0.0.0.0/1", "128.0.0.0/1"])], {}),
    ("no-open-firewall", [firewall(sourceRanges=["0::/0"])], {}),
    ("container-resources", [pod(resources={"requests": SIZES["requests"]})], {}),
    ("container-resources", [pod(resources={"limits": SIZES["limits"]})], {}),
    ("container-resources", [pod(resources=None)], {}),
    ("container-resources", [pod({"initContainers": [{"name": "init", "image": "i"}]})], {}),
    ("container-resources", [deployment(resources={})], {}),
    ("container-resources", [deployment()], {"limits": ["cpu"]}),
    ("container-resources", [kube("RuntimeEnvironment", "datalayer.io/v1", spec={"dockerImage": "i"})], {}),
    ("container-resources", [kube("RuntimePool", "datalayer.io/v1", spec={"resources": {"requests": {}}})], {}),
    ("pod-privileges", [pod(securityContext={"privileged": True})], {}),
    ("pod-privileges", [pod({"hostNetwork": True})], {}),
    ("pod-privileges", [cron_job({"hostPID": True})], {}),
    ("pod-privileges", [cron_job({"volumes": [{"name": "v", "hostPath": {"path": "/"}}]})], {"allow": ["y"]}),
    ("pod-privileges", [pod(securityContext={"capabilities": {"add": ["NET_BIND_SERVICE", "SYS_ADMIN"]}})], {}),
    ("pod-privileges", [deployment(ports=[{"containerPort": 80, "hostPort": 80}])], {}),
    ("pod-privileges", [as_kind("PodPatch", pod({"hostNetwork": True}))], {}),
    ("pod-privileges", [listed("PodList", pod(), pod({"hostNetwork": True}))], {}),
    ("image-registries", [as_kind("DeploymentPatch", deployment(image="python:3"))], {"registries": ["r.example"]}),
    ("container-resources", [listed("DeploymentList", deployment(), deployment(resources={}))], {}),
    ("image-registries", [pod(image="python:3")], {"registries": ["registry.example"]}),
    ("image-registries", [pod(image="registry.example.evil.example/a")], {"registries": ["registry.example"]}),
    ("image-registries", [pod(image="registry.example/team-b/a:1")], {"registries": ["registry.example/team"]}),
    ("image-digests", [pod(image="registry.example/a:1")], {}),
    ("image-digests", [kube("RuntimeEnvironment", "datalayer.io/v1", spec={"dockerImage": "i:1"})], {}),
]
PASSES: list[tuple[str, Sequence[Resource], dict[str, Any]]] = [
    ("identity-labels", [kube("Pod"), instance(), machine(), IDENTITY], {}),
    ("identity-labels", [kube("Pod"), instance()], {"id": ID}),
    ("identity-labels", [kube("CustomResourceDefinition", "apiextensions.k8s.io/v1", metadata={"name": "x"})], {}),
    ("identity-labels", [kube("ClusterRole", metadata={"name": "x"})], {"exempt": ["ClusterRole"]}),
    ("identity-labels", [named("compute/network:Network", name=f"orca-{ID}")], {"id": ID}),
    ("identity-labels", [named("projects/service:Service", service="compute.googleapis.com")], {}),
    ("identity-labels", [kube("Pod", metadata=UNKNOWN), kube("Pod", metadata={"labels": UNKNOWN})], {}),
    ("one-identity", [IDENTITY, kube("Pod"), instance(), named("compute/network:Network", name=f"orca-{ID}")], {}),
    ("family-namespaces", [kube("Pod"), kube("ClusterRole", metadata={"name": "x"})], {}),
    ("family-namespaces", [kube("Pod", metadata={"namespace": "other"})], {"namespaces": ["other"]}),
    ("family-namespaces", [kube("Pod", metadata={"namespace": UNKNOWN})], {}),
    (
        "family-namespaces",
        [kube("Namespace", metadata={"name": "new", "labels": LABELS}), kube("Pod", metadata={"namespace": "new"})],
        {},
    ),
    ("machine-types", [instance(), machine()], {}),
    ("machine-types", [instance(), instance(machineType=UNKNOWN)], {"allowed": ["e2-*"]}),
    ("machine-locations", [instance(), machine(location="east")], {"allowed": ["us-*", "east"]}),
    ("machine-counts", [instance("a"), instance("b")], {"mostPerPool": 2, "most": 2}),
    ("machine-counts", [instance("a"), instance("b", labels={"orca-pool": "q"})], {"mostPerPool": 1}),
    ("no-external-address", [instance(networkInterfaces=[{"network": "n"}]), service(type="ClusterIP"), service()], {}),
    (
        "no-external-address",
        [instance("bastion-1", networkInterfaces=[{"accessConfigs": [{}]}])],
        {"allow": ["bastion-*"]},
    ),
    ("no-external-address", [named("compute/address:Address", addressType="INTERNAL")], {}),
    ("no-open-firewall", [firewall(sourceRanges=["10.0.0.0/8"]), firewall(sourceTags=["a"])], {}),
    ("no-open-firewall", [firewall(sourceRanges=["fc00::/7", "no address"])], {}),
    ("no-open-firewall", [firewall(allows=[], denies=[{"protocol": "all"}], sourceRanges=["0.0.0.0/0"])], {}),
    ("no-open-firewall", [firewall(direction="EGRESS"), firewall(disabled=True), firewall(sourceRanges=UNKNOWN)], {}),
    ("no-open-firewall", [firewall(sourceRanges=["0.0.0.0/0"])], {"allow": ["fw"]}),
    ("no-open-firewall", [policy({"podSelector": {}}), policy({"ipBlock": {"cidr": "10.0.0.0/8"}})], {}),
    ("container-resources", [pod(), deployment(), cron_job({})], {}),
    ("container-resources", [pod(resources=UNKNOWN)], {}),
    ("container-resources", [pod(resources={})], {"requests": [], "limits": []}),
    ("container-resources", [kube("RuntimePool", "datalayer.io/v1", spec={"environment": "e", "size": 1})], {}),
    ("pod-privileges", [pod(), deployment(), cron_job({"hostNetwork": False}), service()], {}),
    ("pod-privileges", [pod({"hostNetwork": True})], {"allow": ["x"]}),
    ("pod-privileges", [as_kind("PodPatch", pod()), listed("PodList", pod())], {}),
    ("container-resources", [as_kind("PodPatch", pod(resources={}))], {}),
    ("pod-privileges", [pod({"volumes": [{"name": "v", "emptyDir": {}}]})], {}),
    ("image-registries", [pod(image="python:3")], {}),
    ("image-registries", [pod(image="python:3")], {"registries": ["docker.io/library"]}),
    (
        "image-registries",
        [pod(image="registry.example:5000/team/a:1")],
        {"registries": ["registry.example:5000/team/"]},
    ),
    ("image-digests", [pod(), pod(image=UNKNOWN)], {}),
    ("image-digests", [pod(image="registry.example/a:1")], {"exempt": ["registry.example/*"]}),
]


@pytest.mark.parametrize(("name", "resources", "config"), BROKEN)
def test_it_is_broken_by(name: str, resources: Sequence[Resource], config: dict[str, Any]) -> None:
    said = sentence(name, *resources, **config)
    assert said.startswith(f"{name}: ")
    assert ". Remedy: " in said


@pytest.mark.parametrize(("name", "resources", "config"), PASSES)
def test_it_is_passed_by(name: str, resources: Sequence[Resource], config: dict[str, Any]) -> None:
    assert violations(name, *resources, **config) == []


def test_each_rule_has_a_case_that_breaks_it_and_one_that_passes_and_each_of_its_keys_is_used() -> None:
    for cases in (BROKEN, PASSES):
        assert {name for name, _, _ in cases} == {rule.name for rule in RULES}
    used = {(name, key) for name, _, config in BROKEN + PASSES for key in config}
    keys = {(rule.name, key) for rule in RULES for key in rule.properties}
    assert keys - used == {("family-namespaces", "exempt"), ("container-resources", "limitsExemptRoles")}


def test_a_violation_names_the_resource_the_rule_and_the_remedy() -> None:
    assert sentence("machine-types", instance(machineType="a3-megagpu-8g"), allowed=["e2-*"]) == (
        "machine-types: Instance orca-p-1: machines of type a3-megagpu-8g are not allowed (e2-*). Remedy: take that type out "
        "of the pool's `types` in orca.toml, or add it to `allowed` of machine-types."
    )


def test_only_the_digest_is_advice() -> None:
    assert [rule.name for rule in RULES if rule.advisory] == ["image-digests"]


def test_a_machine_that_the_loop_declares_passes() -> None:
    birth = Birth(
        name="orca-p-1",
        pool="p",
        type="e2-small",
        location="us-central1-a",
        spot=False,
        image="registry.example/worker:1",
        labels={"orca-stack": ID, "orca-pool": "p"},
    )
    declared = GcpProvider(GcpCloud(project="my-project-123")).render(birth)
    assert broken([Resource(type=GcpProvider.resource_type, name="orca-p-1", props=declared)]) == set()
    outside = GcpProvider(GcpCloud(project="my-project-123", external_address=True)).render(birth)
    assert broken([Resource(type=GcpProvider.resource_type, name="orca-p-1", props=outside)]) == {"no-external-address"}


def test_a_run_cluster_passes_but_for_the_advice_on_digests() -> None:
    settings = RunSettings(
        namespace="orca-runs", binary="orca", secret="orca-db", dista_port=6390, deadline_seconds=60, sizes=Sizes()
    )
    spec = RunSpec(run=7, start=1, pipeline="reports", image="registry.example/reports:1", workers=2)
    objects = render_run(spec, settings, ID)
    assert broken([as_resource(one) for one in objects]) == {"image-digests"}


def test_without_its_role_a_drivers_container_would_need_limits() -> None:
    """The exemption is of the roles, and can be taken away."""
    settings = RunSettings(
        namespace="orca-runs", binary="orca", secret="orca-db", dista_port=6390, deadline_seconds=60, sizes=Sizes()
    )
    driver = as_resource(render_run(RunSpec(run=7, start=1, pipeline="p", image="i"), settings, ID)[0])
    assert violations("container-resources", driver) == []
    assert "limits.memory" in sentence("container-resources", driver, limitsExemptRoles=[])


def test_a_warm_runtime_passes_when_its_environment_states_its_resources() -> None:
    pool = Pool(namespace="orca-runs", name="p", uid="u", environment="e", size=1)
    sized = Environment(namespace="orca-runs", name="e", image=f"registry.example/e@{DIGEST}", resources=SIZES)
    assert broken([as_resource(render_warm(pool, sized, 1, ID).manifest)]) == set()
    unsized = Environment(namespace="orca-runs", name="e", image=f"registry.example/e@{DIGEST}")
    assert broken([as_resource(render_warm(pool, unsized, 1, ID).manifest)]) == {"container-resources"}


def test_a_base_with_everything_in_it_passes() -> None:
    base = Base(
        stack_id=ID,
        family="prod",
        runs_namespace="orca-runs",
        runtimes_namespace="warm",
        system_namespace="orca-system",
        deployed=Deployed(image=f"registry.example/orca@{DIGEST}", loop_replicas=2, api_replicas=2, toml="x"),
        secrets=BaseSecrets(database_url="postgresql://db/orca", token_key="k", passphrase="p", backend_url="s3://b"),
        network_policies=True,
        quotas={"orca-runs": {"pods": "5"}},
        limits={"orca-runs": {"default": {"memory": "1Gi"}}},
    )
    resources = [as_resource(one.manifest) for group in base_objects(base) for one in group]
    assert {"Deployment", "NetworkPolicy", "RoleBinding", "Secret"} <= {one.kind for one in resources}
    assert broken([IDENTITY, *resources]) == set()


def as_resource(manifest: Mapping[str, Any]) -> Resource:
    version = manifest["apiVersion"]
    group = version if "/" in version else f"core/{version}"
    return Resource(type=f"kubernetes:{group}:{manifest['kind']}", name=manifest["metadata"]["name"], props=manifest)


def broken(resources: Sequence[Resource]) -> set[str]:
    return {rule.name for rule in RULES if violations(rule.name, *resources)}


def test_what_is_anywhere_may_be_exempt_from_the_namespaces() -> None:
    role = kube("Role", "rbac.authorization.k8s.io/v1", metadata={"name": "x", "namespace": "kube-system"})
    assert violations("family-namespaces", role)
    assert violations("family-namespaces", role, exempt=["Role*"]) == []


def test_the_namespaces_are_those_of_this_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    there = kube("Pod", metadata={"name": "x", "namespace": "warm", "labels": LABELS})
    assert violations("family-namespaces", there)
    monkeypatch.setenv("ORCA_RUNTIMES_NAMESPACE", "warm")
    assert violations("family-namespaces", there) == []
    monkeypatch.setenv("ORCA_RUNS_NAMESPACE", "elsewhere")
    assert violations("family-namespaces", kube("Pod"))
