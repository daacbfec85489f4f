"""Runtime Pods and Secrets as they are declared, and what makes launches and Pods comparable."""

from __future__ import annotations

from typing import Any

import pytest

from orca_infra.runtimes.model import Environment, Pool
from orca_infra.runtimes.render import pod_name, pod_number, render_cold, render_secret, render_warm, user_label
from orca_infra.runtimes.resources import amount_of, placement_of, requests_of, size_of

POOL = Pool(
    namespace="n",
    name="p",
    uid="u",
    environment="e",
    size=3,
    burning_rate=0.5,
    cull_seconds=60,
    node_selector={"disk": "ssd"},
    tolerations=({"key": "gpu", "operator": "Exists"},),
)
ENVIRONMENT = Environment(
    namespace="n",
    name="e",
    image="image:1",
    env=({"name": "A", "value": "1"},),
    resources={"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"cpu": 1}},
)


def container(pod: Any) -> dict[str, Any]:
    return dict(pod.manifest["spec"]["containers"][0])


def test_a_warm_pod() -> None:
    pod = render_warm(POOL, ENVIRONMENT, 7, "stackid")
    assert pod.manifest == {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "orca-runtime-p-7",
            "namespace": "n",
            "labels": {"orca.stack": "stackid", "orca.role": "runtime", "orca.environment": "e", "orca.pool": "p"},
            "annotations": {"pulumi.com/patchFieldManager": "orca-infra-stackid", "pulumi.com/skipAwait": "true"},
        },
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {
                    "name": "runtime",
                    "image": "image:1",
                    "env": [{"name": "A", "value": "1"}],
                    "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"cpu": 1}},
                    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                    "volumeMounts": [{"name": "secrets", "mountPath": "/var/run/secrets/orca", "readOnly": True}],
                }
            ],
            "volumes": [{"name": "secrets", "secret": {"secretName": "orca-runtime-p-7", "optional": True}}],
            "nodeSelector": {"disk": "ssd"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
        },
    }
    assert (pod.pool, pod.environment, pod.burning_rate, pod.cull_seconds) == ("p", "e", 0.5, 60)
    assert pod.requests == {"cpu": 500, "memory": 1024**3 * 1000}
    assert pod.placement == {"labels": {"disk": "ssd"}}


def test_the_pools_resources_override_the_environments() -> None:
    pool = Pool(namespace="n", name="p", uid="u", environment="e", size=1, resources={"limits": {"memory": "2Gi"}})
    pod = render_warm(pool, ENVIRONMENT, 1, "stackid")
    assert container(pod)["resources"] == {"limits": {"memory": "2Gi"}}
    assert pod.requests == {"memory": 2 * 1024**3 * 1000}


def test_a_cold_start_has_the_placement_and_the_resources_that_were_asked_for() -> None:
    asked = {"cpu": "4", "nvidia.com/gpu": "1"}
    pod = render_cold(POOL, ENVIRONMENT, 8, "stackid", requests=asked, node_selector={"disk": "hdd"})
    assert (pod.name, pod.pool, pod.burning_rate) == ("orca-runtime-e-8", None, 0.5)
    assert container(pod)["resources"] == {
        "requests": {"cpu": "4", "memory": "1Gi", "nvidia.com/gpu": "1"},
        "limits": {"cpu": "4", "nvidia.com/gpu": "1"},
    }
    assert pod.manifest["spec"]["nodeSelector"] == {"disk": "hdd"}
    assert "orca.pool" not in pod.manifest["metadata"]["labels"]
    like_the_pool = render_cold(POOL, ENVIRONMENT, 9, "stackid", requests={}, node_selector=None)
    assert like_the_pool.manifest["spec"]["nodeSelector"] == {"disk": "ssd"}


def test_a_secret_is_owned_by_its_pod_once_there_is_one_and_is_no_source_of_a_users_secrets() -> None:
    secret = render_secret("orca-runtime-p-7", "n", {"K": "dg=="}, stack_id="stackid", owner_uid="u7")
    assert secret["metadata"]["ownerReferences"] == [
        {"apiVersion": "v1", "kind": "Pod", "name": "orca-runtime-p-7", "uid": "u7"}
    ]
    assert secret["metadata"]["labels"] == {"orca.stack": "stackid", "orca.role": "runtime"}
    assert secret["data"] == {"K": "dg=="}
    assert "ownerReferences" not in render_secret("p", "n", {}, stack_id="s", owner_uid=None)["metadata"]


@pytest.mark.parametrize("of", ["p", "a" * 80, "Jane.Doe", "a-1", "1"])
def test_a_name_is_valid_and_its_number_can_be_read_back(of: str) -> None:
    name = pod_name(of, 2**31)
    assert len(name) <= 63
    assert name == name.lower()
    assert "." not in name
    assert pod_number(name) == 2**31


@pytest.mark.parametrize(
    "name", ["orca-runtime-p", "orca-7-1", "other", "orca-runtime-p-12345678901", "orca-runtime-p-x"]
)
def test_other_names_have_no_number(name: str) -> None:
    assert pod_number(name) == 0


def test_users_whose_names_are_no_label_values_get_one_of_their_own() -> None:
    for user in ("jane", "Jane.Doe_1", "a" * 63):
        assert user_label(user) == user
    made = user_label("jane@example.com")
    others = ["jane", "jane-example-com", made, "jane@example,com", "jane@example.com,b=c", "a" * 64, "-a"]
    labels = [made, *(user_label(user) for user in others)]
    assert len(set(labels)) == len(labels)
    assert all("," not in label and "=" not in label and len(label) <= 63 for label in labels)


# Resources.


@pytest.mark.parametrize(
    ("quantity", "thousandths"),
    [("500m", 500), ("2", 2000), (2, 2000), (0.5, 500), ("1.5", 1500), ("1Ki", 1024000), ("1.5Gi", 1610612736000)]
    + [("1k", 10**6), ("1e3", 10**6), ("1E", 10**21), ("100n", 1), ("0", 0), (".5", 500), ("1E2", 100000)],
)
def test_quantities_are_exact(quantity: object, thousandths: int) -> None:
    assert amount_of(quantity) == thousandths


@pytest.mark.parametrize("quantity", ["", "-1", "1x", "1 G", "Ki", True, None, [], "1mi", "\u0661", "inf"])
def test_what_is_no_quantity_is_refused(quantity: object) -> None:
    with pytest.raises(ValueError, match="must be a quantity"):
        amount_of(quantity)


def test_a_limit_without_a_request_is_requested() -> None:
    assert requests_of({"limits": {"cpu": 2, "memory": "1k"}, "requests": {"cpu": "1"}}) == {
        "cpu": 1000,
        "memory": 10**6,
    }
    assert requests_of({}) == {}


def test_a_pod_with_a_device_is_larger_than_any_without_one() -> None:
    sizes = [{"nvidia.com/gpu": 1000}, {"cpu": 10**6}, {"cpu": 1000, "memory": 9}, {"cpu": 1000, "memory": 10}, {}]
    assert sorted(sizes, key=size_of) == [sizes[4], sizes[2], sizes[3], sizes[1], sizes[0]]


# Placement.


def required(*terms: dict[str, Any]) -> dict[str, Any]:
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": list(terms)}}}


def has(**labels: list[str]) -> dict[str, Any]:
    return {"matchExpressions": [{"key": key, "operator": "In", "values": values} for key, values in labels.items()]}


def test_an_affinity_that_says_no_more_than_a_node_selector_equals_one() -> None:
    assert placement_of({}, {}) == {"labels": {}}
    assert placement_of({"a": "1"}, required(has(b=["2"]))) == placement_of({"a": "1", "b": "2"}, {})


@pytest.mark.parametrize(
    "affinity",
    [
        required(has(a=["1", "2"])),
        required(has(a=["1"]), has(b=["1"])),
        required({"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["1"]}]}),
        required({"matchFields": []}),
        required(),
        {"podAffinity": {}},
        {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        required(has(a=["other"])),
    ],
)
def test_any_other_affinity_equals_only_itself(affinity: dict[str, Any]) -> None:
    assert placement_of({"a": "1"}, affinity) == {"labels": {"a": "1"}, "affinity": affinity}
