"""The CustomResourceDefinitions; that a real API server takes them is shown in tests/cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from orca_infra.kube.kinds import RUNTIME_ENVIRONMENT, RUNTIME_POOL, Kind
from orca_infra.runtimes.crds import runtime_environment_crd, runtime_pool_crd


@pytest.mark.parametrize(
    ("crd", "kind", "short"),
    [
        (runtime_pool_crd(), RUNTIME_POOL, "rtp rp rps rpool rpools"),
        (runtime_environment_crd(), RUNTIME_ENVIRONMENT, "rte re res renv renvs"),
    ],
)
def test_names_are_those_that_the_client_uses(crd: dict[str, Any], kind: Kind, short: str) -> None:
    spec = crd["spec"]
    assert crd["metadata"]["name"] == f"{kind.plural}.{spec['group']}"
    assert (spec["names"]["kind"], spec["names"]["plural"], spec["scope"]) == (kind.kind, kind.plural, "Namespaced")
    assert f"{spec['group']}/{spec['versions'][0]['name']}" == kind.api_version
    assert spec["names"]["shortNames"] == short.split()
    assert json.loads(json.dumps(crd)) == crd


def test_a_pool_has_status_scale_and_its_columns() -> None:
    (version,) = runtime_pool_crd()["spec"]["versions"]
    assert version["subresources"] == {
        "status": {},
        "scale": {"specReplicasPath": ".spec.size", "statusReplicasPath": ".status.warm"},
    }
    columns = [column["name"] for column in version["additionalPrinterColumns"]]
    assert columns == ["Environment", "Size", "Warm", "Assigned", "Burning Rate", "Message", "Age"]


@pytest.mark.parametrize("crd", [runtime_pool_crd(), runtime_environment_crd()])
def test_unknown_fields_are_kept_in_every_object_that_is_not_a_map(crd: dict[str, Any]) -> None:
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for part in schema["properties"].values():
        for path, node in _nodes(part, ()):
            if node.get("type") == "object" and "additionalProperties" not in node:
                assert node.get("x-kubernetes-preserve-unknown-fields"), path


def _nodes(node: dict[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    yield path, node
    for name, inner in node.get("properties", {}).items():
        yield from _nodes(inner, (*path, name))
    if "items" in node:
        yield from _nodes(node["items"], (*path, "[]"))
