"""The base stack from its configuration: what is read, what is refused, and what is declared; no engine, no cluster."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from orca_infra.db.connection import is_local
from orca_infra.errors import ConfigError, SettingError, SetupError
from orca_infra.kube.labels import ROLE_LABEL, STACK_LABEL
from orca_infra.policy.model import Resource
from orca_infra.policy.rules import RULES
from orca_infra.settings import read_settings
from orca_infra.stack.base import read_pools
from orca_infra.stack.base_config import merged_environment, pod_settings, read_values
from orca_infra.stack.base_keys import KEYS
from orca_infra.stack.base_model import Base, BaseSecrets, Deployed
from orca_infra.stack.base_program import base_objects, base_outputs, base_program, sealed
from orca_infra.stack.base_rights import CLUSTER, RIGHTS
from orca_infra.stack.program import Registered

CHECKOUT = Path(__file__).parents[2]
SECRETS = BaseSecrets(
    database_url="postgresql://orca:word@db.example/orca", token_key="k" * 32, passphrase="p" * 32, backend_url=""
)
FULL = Base(
    stack_id="abcdefghijklmnop",
    family="prod",
    runs_namespace="runs",
    runtimes_namespace="runtimes",
    system_namespace="system",
    deployed=Deployed(image="r.example/orca-infra:1", loop_replicas=2, api_replicas=2, toml="[pools]\n"),
    secrets=SECRETS,
    network_policies=True,
    quotas={"runs": {"pods": "10"}},
    limits={"runtimes": {"max": {"cpu": "4"}}},
)


def manifests(base: Base = FULL) -> dict[tuple[str, str], dict[str, Any]]:
    """Every object by kind and name."""
    found = [item.manifest for group in base_objects(base) for item in group]
    return {(one["kind"], f"{one['metadata'].get('namespace', '')}/{one['metadata']['name']}"): one for one in found}


def values(**config: Any) -> dict[str, Any]:
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in config.items()}
    return read_values({f"orca-infra:{key}": text for key, text in texts.items()}, "dev")


def test_the_config_block_of_the_project_is_what_the_program_reads() -> None:
    block = yaml.safe_load((CHECKOUT / "Pulumi.yaml").read_text())["config"]
    assert list(block) == [key.name for key in KEYS]
    for key in KEYS:
        stated = block[key.name]
        assert (stated["type"], stated["description"], stated["default"]) == (key.type, key.meaning, key.default)


@pytest.mark.parametrize("stack", ["dev", "prod"])
def test_the_stacks_of_the_checkout_have_good_configuration(stack: str) -> None:
    config = yaml.safe_load((CHECKOUT / "stacks" / f"Pulumi.{stack}.yaml").read_text())
    given = (config or {}).get("config") or {}
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in given.items()}
    if stack == "prod":
        with pytest.raises(SetupError, match="image is not set") as refused:
            read_values(texts, stack)
        assert "\n" not in str(refused.value)
        texts["orca-infra:image"] = "registry.example/orca-infra:1"
    read_values(texts, stack)


def test_what_is_left_off_has_its_default_and_other_programs_keys_are_not_looked_at() -> None:
    assert read_values({"gcp:project": "p"}, "dev") == {key.name: key.default for key in KEYS}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"runnr": "kubernetes"}, "orca-infra:runnr is no key of a base stack; did you mean runner?"),
        ({"loop": "yes"}, "orca-infra:loop (yes): must be true or false; `pulumi config set -s dev loop …` sets it"),
        ({"loopReplicas": "2.5"}, "must be a whole number"),
        ({"loopReplicas": "0"}, "must be 1 to 20"),
        ({"imagePullSecrets": "one"}, "must be a list of names"),
        ({"settings": "[]"}, "must be a table of keys and values"),
        ({"loop": "true"}, "orca-infra:image is not set"),
        ({"image": "not an image"}, "is no image reference"),
        ({"systemNamespace": "Big"}, "must be a namespace's name"),
        ({"runsQuota": {"cpu": "a lot"}}, "cpu = 'a lot' is no amount"),
        ({"runsLimits": {"maximum": {}}}, "it takes tables called default"),
    ],
)
def test_what_cannot_be_used_is_said_with_its_key(config: dict[str, Any], said: str) -> None:
    with pytest.raises(SetupError) as refused:
        values(**config)
    assert said in str(refused.value)


def test_the_value_of_a_secret_key_is_in_no_message() -> None:
    with pytest.raises(SetupError) as refused:
        merged_environment(values(tokenKey="a-secret-of-the-file"), {"ORCA_TOKEN_KEY": "a-secret-of-the-shell"}, "dev")
    assert "sets orca-infra:tokenKey and this shell sets ORCA_TOKEN_KEY" in str(refused.value)
    assert "a-secret" not in str(refused.value)


def test_a_secret_that_stands_unencrypted_in_the_stacks_file_is_refused() -> None:
    config = {"orca-infra:db": "postgresql://orca:word@db/orca"}
    assert read_values(config, "dev", {"orca-infra:db"})["db"]
    with pytest.raises(SetupError, match=r"stands unencrypted in stacks/Pulumi.dev.yaml") as refused:
        read_values(config, "dev", set())
    assert "word" not in str(refused.value)


def test_file_and_shell_say_the_same_or_are_refused() -> None:
    read = values(runner="kubernetes", runsNamespace="runs", db="postgresql://pods", orcaToml="stacks/orca.toml")
    merged = merged_environment(read, {"ORCA_RUNNER": "kubernetes", "ORCA_DB": "postgresql://shell"}, "dev.machines.p")
    assert (merged["ORCA_STACK"], merged["ORCA_RUNS_NAMESPACE"]) == ("dev", "runs")
    # The shell's database is the one that the program works on; the file's is for Pods, unless there is no other.
    assert merged["ORCA_DB"] == "postgresql://shell"
    assert merged_environment(read, {}, "dev")["ORCA_DB"] == "postgresql://pods"
    # One file under two names is one file.
    absolute = str(Path("stacks/orca.toml").resolve())
    assert merged_environment(read, {"ORCA_CONFIG": absolute}, "dev")["ORCA_CONFIG"] == absolute
    with pytest.raises(SetupError, match="runsNamespace and this shell sets ORCA_RUNS_NAMESPACE to something else"):
        merged_environment(read, {"ORCA_RUNS_NAMESPACE": "other"}, "dev")


def test_an_orca_toml_that_is_named_and_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pools, `up` would remove the network and the runtime pools that the file had declared."""
    monkeypatch.chdir(tmp_path)
    assert read_pools(Path("orca.toml"), {}) is None  # a trial begins without
    for named in (values(orcaToml="stacks/orca.tmol"), values()):
        merged = merged_environment(named, {} if named["orcaToml"] else {"ORCA_CONFIG": "stacks/orca.tmol"}, "dev")
        with pytest.raises(ConfigError, match=r"stacks/orca.tmol: no such file"):
            read_pools(read_settings(merged).config_path, merged)


def test_pulumi_install_makes_the_environment_that_the_program_needs() -> None:
    """The vendor's host makes `.venv` from requirements.txt alone, also at the first `up` of a fresh clone."""
    runtime = yaml.safe_load((CHECKOUT / "Pulumi.yaml").read_text())["runtime"]["options"]
    assert runtime == {"virtualenv": ".venv", "toolchain": "pip"}
    lines = [line for line in (CHECKOUT / "requirements.txt").read_text().splitlines() if not line.startswith("#")]
    assert lines == ["-e ."]


def test_settings_of_the_pods_are_settings_or_what_runs_are_given() -> None:
    read = values(settings={"ORCA_POOL_SCALE_SECONDS": 5, "ORCA_RUN_ENV": "GREETING", "GREETING": "hello"})
    assert pod_settings(read, "dev") == {
        "ORCA_POOL_SCALE_SECONDS": "5",
        "ORCA_RUN_ENV": "GREETING",
        "GREETING": "hello",
    }
    for name, said in (
        ("ORCA_DB", "which is secret: set orca-infra:db"),
        ("ORCA_RUNNER", "set orca-infra:runner"),
        ("GREETING", "which is no setting"),
    ):
        with pytest.raises(SetupError, match=said):
            pod_settings(values(settings={name: "x"}), "dev")
    with pytest.raises(SettingError, match="ORCA_VCPU_BUDGET"):
        pod_settings(values(settings={"ORCA_VCPU_BUDGET": "much"}), "dev")


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("postgresql://orca@db.example/orca", False),
        ("postgresql://orca@10.0.0.7:5432/orca", False),
        ("postgresql://orca@localhost/orca", True),
        ("postgresql://orca@127.0.0.1/orca", True),
        ("postgresql:///orca?host=/run/postgres", True),
        ("dbname=orca", True),
    ],
)
def test_a_database_that_only_this_machine_reaches_is_known_as_such(url: str, local: bool) -> None:
    assert is_local(url) is local


def test_every_object_carries_the_stacks_id_and_none_can_be_a_stray() -> None:
    for (kind, name), manifest in manifests().items():
        labels = manifest["metadata"].get("labels") or {}
        assert ROLE_LABEL not in labels, name
        if kind != "CustomResourceDefinition":  # those are every stack's
            assert labels[STACK_LABEL] == FULL.stack_id, name


def test_every_container_is_held_to_its_own_and_bounded() -> None:
    pods = [m["spec"]["template"]["spec"] for (kind, _), m in manifests().items() if kind == "Deployment"]
    assert len(pods) == 2
    for pod in pods:
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert set(container["resources"]["requests"]) == {"cpu", "memory"}
            assert "memory" in container["resources"]["limits"]
        assert {"startupProbe", "livenessProbe", "readinessProbe"} <= set(pod["containers"][0])


def test_the_api_has_neither_the_token_key_nor_the_passphrase() -> None:
    api = manifests()["Deployment", "system/orca-api"]
    assert "orca-infra" not in json.dumps(api["spec"]["template"]["spec"]["volumes"])
    names = {variable["name"] for variable in api["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert not names & {"ORCA_TOKEN_KEY", "PULUMI_CONFIG_PASSPHRASE_FILE", "PULUMI_BACKEND_URL"}


def test_no_secret_stands_in_anything_but_a_secret_and_to_the_engine_it_is_one() -> None:
    for (kind, name), manifest in manifests().items():
        text = json.dumps(manifest)
        for word in ("word@db.example", "k" * 32, "p" * 32):
            assert word not in text, name
        if kind == "Secret":
            assert all(isinstance(value, dict) for value in sealed(manifest)["data"].values())
    assert all(word not in repr(FULL) for word in ("word@db.example", "k" * 32, "p" * 32))


def test_a_new_secret_restarts_what_has_it_and_a_new_file_does_not() -> None:
    def template(base: Base) -> Any:
        return manifests(base)["Deployment", "system/orca-loop"]["spec"]["template"]

    assert FULL.deployed is not None
    assert template(replace(FULL, secrets=replace(SECRETS, passphrase="q" * 32))) != template(FULL)
    changed = replace(FULL, deployed=replace(FULL.deployed, toml="max_machines_total = 1\n[pools]\n"))
    assert template(changed) == template(FULL)
    assert manifests(changed)["ConfigMap", "system/orca-loop"] != manifests()["ConfigMap", "system/orca-loop"]


def test_only_what_is_configured_is_declared() -> None:
    nothing = Base(stack_id="abcdefghijklmnop", family="dev")
    assert not any(base_objects(nothing))
    assert base_outputs(nothing) == {"id": "abcdefghijklmnop", "family": "dev"}
    runs = replace(nothing, runs_namespace="runs")
    assert set(manifests(runs)) == {("Namespace", "/runs")}
    loop = replace(FULL, deployed=Deployed(image="i", loop_replicas=1, api_replicas=None))
    assert not [name for _, name in manifests(loop) if "orca-api" in name and "networkpolic" not in name][1:]


def test_namespaces_are_protected_and_they_and_definitions_stay_when_the_stack_goes() -> None:
    kept = {item.manifest["kind"] for group in base_objects(FULL) for item in group if item.retain}
    protected = {item.manifest["kind"] for group in base_objects(FULL) for item in group if item.protect}
    assert kept == {"Namespace", "CustomResourceDefinition"}
    assert protected == {"Namespace"}


def test_pulumis_names_are_all_different_and_those_of_earlier_versions_stay() -> None:
    names = [item.resource for group in base_objects(FULL) for item in group]
    assert len(names) == len(set(names))
    assert {"runs", "runtimes", "runtime-pools.datalayer.io"} <= set(names)


def test_no_right_is_for_everything_and_none_over_secrets_is_for_all_namespaces() -> None:
    for right in RIGHTS:
        assert "*" not in right.verbs
        assert right.resource != "*"
        assert all(len(reason) > 15 for reason in right.verbs.values())
        if right.place == CLUSTER:
            assert right.resource in {"namespaces", "nodes", "tokenreviews"}


def test_the_whole_base_keeps_within_the_policies() -> None:
    image = "registry.example/orca-infra@sha256:" + "0" * 64
    assert FULL.deployed is not None
    base = replace(FULL, deployed=replace(FULL.deployed, image=image))
    resources = [
        Resource(type=item.type, name=item.resource, urn=item.resource, props=item.manifest)
        for group in base_objects(base)
        for item in group
    ]
    for rule in RULES:
        values = rule.values({})
        said = [] if rule.check is None else [v for one in resources for v in rule.check(one, values)]
        said += [] if rule.check_stack is None else list(rule.check_stack(resources, values))
        assert [violation.sentence(rule.name) for violation in said] == []


class Recorder:
    """Takes everything for made; of one kind nothing."""

    def __init__(self, broken: str = "") -> None:
        self.broken, self.names, self.outputs = broken, list[str](), dict[str, Any]()
        self.made, self.options = list[Registered](), dict[str, dict[str, Any]]()

    def register(self, kind: str, name: str, properties: Any, **options: Any) -> Any:
        self.names.append(name)
        self.options[name] = options
        recorder = self

        class Pending:
            def result(self) -> Registered | None:
                if kind == recorder.broken:
                    return None
                recorder.made.append(Registered(urn=name, id=name, outputs={}))
                return recorder.made[-1]

        return Pending()


def test_the_program_declares_in_order_and_goes_on_without_what_failed() -> None:
    recorder: Any = Recorder(broken="kubernetes:core/v1:Secret")
    base_program(FULL, [lambda registrar, identity: registrar.register("gcp", identity.urn, {})])(recorder)
    assert recorder.names[:2] == ["identity", "cluster"]
    assert recorder.names.index("runs") < recorder.names.index("secret:runs:orca-db")
    assert recorder.names.index("secret:runs:orca-db") < recorder.names.index("deployment:system:orca-loop")
    # What a destroy would begin with stands on everything, and is protected.
    assert recorder.names[-2:] == ["identity", "drained-first"]
    assert recorder.options["drained-first"]["protect"] is True
    assert len(recorder.options["drained-first"]["depends_on"]) > 20
    assert recorder.outputs["api"] == "http://orca-api.system.svc"


def test_without_its_identity_nothing_else_of_the_base_is_declared() -> None:
    recorder: Any = Recorder(broken="orca:index:Identity")
    base_program(FULL)(recorder)
    assert recorder.names == ["identity"]
