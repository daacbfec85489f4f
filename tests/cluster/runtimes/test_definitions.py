"""The two definitions, and what the API server refuses by them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from orca_infra.errors import Refused
from orca_infra.kube.client import Kube
from orca_infra.kube.kinds import CRD, RUNTIME_POOL, Ref
from orca_infra.runtimes.crds import runtime_environment_crd, runtime_pool_crd
from orca_infra.testing.cluster import TestCluster

if TYPE_CHECKING:
    from tests.cluster.runtimes.conftest import Room


def test_the_api_server_takes_both_definitions_with_all_their_short_names(cluster: TestCluster, kube: Kube) -> None:
    for crd in (runtime_pool_crd(), runtime_environment_crd()):
        found = kube.get(Ref(kind=CRD, name=crd["metadata"]["name"]))
        assert found is not None
        conditions = {one["type"]: one["status"] for one in found["status"]["conditions"]}
        assert conditions["NamesAccepted"] == conditions["Established"] == "True"
        assert conditions.get("NonStructuralSchema", "False") == "False"
        assert found["status"]["acceptedNames"]["shortNames"] == crd["spec"]["names"]["shortNames"]
        for short in (*crd["spec"]["names"]["shortNames"], crd["spec"]["names"]["singular"]):
            cluster.kubectl("get", short, "--all-namespaces")


@pytest.mark.parametrize(
    "spec",
    [
        {"size": 10001},
        {"size": -1},
        {"size": 1.5},
        {"size": None},
        {"environment": ""},
        {"environment": None},
        {"burningRate": -0.1},
        {"cull": {"seconds": 0}},
        {"resources": {"requests": {"cpu": "much"}}},
        {"resources": {"limits": {"memory": "-1Gi"}}},
        {"resources": {"limits": {"memory": -1}}},
        {"nodeSelector": {"a": 1}},
        {"tolerations": [{"operator": "Is"}]},
        {"tolerations": [{"effect": "NoRun"}]},
        {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}}},
        {"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": ""}]}}},
    ],
)
def test_a_pool_that_cannot_be_is_refused(room: Room, spec: dict[str, Any]) -> None:
    pool = {"environment": "e", "size": 1, **spec}
    pool = {key: value for key, value in pool.items() if value is not None}
    metadata = {"name": "p", "namespace": room.namespace}
    with pytest.raises(Refused, match="Invalid value|Required value|Unsupported value|should have at least"):
        room.kube.create({"apiVersion": "datalayer.io/v1", "kind": "RuntimePool", "metadata": metadata, "spec": pool})


REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
QUANTITY = "each must be a quantity of 0 or more, such as 500m, 2 or 1.5Gi"
LABEL = "each must be a node's label"


def _requirement(**more: Any) -> dict[str, Any]:
    return {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": [{"key": "a", **more}]}]}}}


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"resources": {"requests": {"memory": "1GB"}}}, QUANTITY),
        ({"resources": {"requests": {"cpu": "-1"}}}, QUANTITY),
        ({"resources": {"requests": {"cpu": 2}, "limits": {"cpu": "1500m"}}}, "no request may be more than the limit"),
        ({"nodeSelector": {"not a key": "x"}}, LABEL),
        ({"nodeSelector": {"a": "no value!"}}, LABEL),
        ({"tolerations": [{"effect": "NoSchedule"}]}, "without a key, the operator must be Exists"),
        ({"tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]}, "Exists takes no value"),
        ({"tolerations": [{"key": "a", "tolerationSeconds": 5}]}, "tolerationSeconds needs the effect NoExecute"),
        ({"affinity": _requirement(operator="In")}, "In and NotIn need values"),
        ({"affinity": _requirement(operator="Exists", values=["x"])}, "Exists and DoesNotExist take no values"),
        ({"affinity": _requirement(operator="Gt", values=["1", "2"])}, "Gt and Lt need one value, a whole number"),
    ],
)
def test_what_a_pod_could_never_have_is_refused_in_words(room: Room, spec: dict[str, Any], says: str) -> None:
    metadata = {"name": "p", "namespace": room.namespace}
    pool = {"environment": "e", "size": 1, **spec}
    with pytest.raises(Refused, match=says):
        room.kube.create({"apiVersion": "datalayer.io/v1", "kind": "RuntimePool", "metadata": metadata, "spec": pool})


def test_every_field_is_explained(cluster: TestCluster) -> None:
    said = [
        cluster.kubectl("explain", what) for what in ("rp", "rp.spec", "rp.spec.cull", "rp.status", "rte", "rte.spec")
    ]
    assert "Pods of one RuntimeEnvironment that are kept warm" in said[0]
    for text in said:
        assert "<no description>" not in text
    for kind in (said[0], said[4]):
        assert "<empty>" not in kind


def test_unknown_fields_are_kept_and_a_pool_can_be_scaled(cluster: TestCluster, room: Room) -> None:
    # As kubectl applies it: strict checking refuses nothing, since a newer version's fields are no slips.
    room.make_pool(size=0, later={"a": 1}, tolerations=[{"key": "k", "operator": "Exists"}])
    ref = Ref(kind=RUNTIME_POOL, namespace=room.namespace, name="python-simple-pool")
    pool = room.kube.get(ref)
    assert pool is not None
    assert pool["spec"]["later"] == {"a": 1}
    cluster.kubectl("scale", "rtp", "python-simple-pool", "--replicas=2", "-n", room.namespace)
    scaled = room.kube.get(ref)
    assert scaled is not None
    assert scaled["spec"]["size"] == 2
    found = cluster.kubectl("get", "rtp", "-n", room.namespace).split()
    assert found[found.index("python-simple-pool") + 2] == "2"
    room.make_environment()
    room.until(lambda: len(room.warm()) == 2)
    cluster.kubectl("scale", "rp", "python-simple-pool", "--replicas=5", "-n", room.namespace)
    room.until(lambda: len(room.warm()) == 5)
    scale = cluster.kubectl("get", "--raw", f"{ref.path}/scale")
    assert '"spec":{"replicas":5}' in scale


def test_core_types_as_kubernetes_writes_them_are_taken(room: Room) -> None:
    term = {"matchExpressions": [{"key": "a", "operator": "Exists"}], "later": 1}
    pods = {"labelSelector": {"matchLabels": {"a": "b"}}, "topologyKey": "kubernetes.io/hostname"}
    room.make_pool(
        size=0,
        affinity={
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]},
                "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "preference": term}],
            },
            "podAntiAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": pods}]
            },
        },
        tolerations=[{"key": "a", "operator": "Equal", "value": "b", "effect": "NoExecute", "tolerationSeconds": 9}],
        resources={"requests": {"cpu": 1, "memory": "1.5Gi", "nvidia.com/gpu": "2"}, "limits": {"cpu": "1e3"}},
    )
    pool = room.kube.get(Ref(kind=RUNTIME_POOL, namespace=room.namespace, name="python-simple-pool"))
    assert pool is not None
    [kept] = pool["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    assert kept["later"] == 1


def test_no_secret_goes_into_the_variables_of_an_environment(room: Room) -> None:
    def apply(variable: dict[str, Any]) -> None:
        metadata = {"name": "e", "namespace": room.namespace}
        spec = {"dockerImage": "i", "env": [variable]}
        room.kube.apply(
            {"apiVersion": "datalayer.io/v1", "kind": "RuntimeEnvironment", "metadata": metadata, "spec": spec},
            manager="test",
        )

    with pytest.raises(Refused, match="no Secret goes into an environment's variables"):
        apply({"name": "T", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}})
    apply({"name": "T", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}})
