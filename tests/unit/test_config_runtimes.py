"""Environments and runtime pools in orca.toml: what is taken, how it comes out, and what is said of mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from orca_infra.config import parse_config
from orca_infra.errors import ConfigError
from orca_infra.runtimes.declared import declared_objects

SHARED_POOL = Path(__file__).parents[1] / "data" / "runtime-pool.yaml"
WHOLE = """\
[pools]

[environments.python-simple-env]
docker_image = "registry.example/python:1"
title = "Python"
language = "python"
description = "Plain"
example = "print(1)"
icon = "data:,"
snippets = [{ title = "Hello", code = "print()" }]
env = { LANG = "C.UTF-8" }
kernel.given_name_template = "Python {n}"

[environments.python-simple-env.resources_ranges.default]
requests = { cpu = "500m", memory = "1Gi" }
limits = { memory = "1Gi", "nvidia.com/gpu" = 1 }

[environments.bare]
docker_image = "bare"

[runtime_pools.python-simple-pool]
environment = "python-simple-env"
size = 3
burning_rate = 0.01
cull.seconds = 999999
resources.requests.cpu = 2

[[runtime_pools.python-simple-pool.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms]]
matchExpressions = [
    { key = "role.datalayer.io/runtime", operator = "In", values = ["true"] },
    { key = "node.datalayer.io/variant", operator = "In", values = ["medium"] },
    { key = "node.datalayer.io/xpu", operator = "In", values = ["cpu"] },
]

[runtime_pools.empty]
environment = "bare"
size = 0
cull.seconds = "1h"
resources.requests = { cpu = 0.5 }
node_selector = { disk = "fast" }
tolerations = [{ key = "gpu", operator = "Exists", effect = "NoExecute", toleration_seconds = 5 }]
"""


def test_tables_become_the_objects_that_kubectl_would_apply() -> None:
    config = parse_config(WHOLE, "orca.toml")
    objects = declared_objects(config.environments, config.runtime_pools, namespace="runtimes", stack_id="abc")
    by_name = {(item["kind"], item["metadata"]["name"]): item for item in objects}
    assert [item["kind"] for item in objects] == ["RuntimeEnvironment"] * 2 + ["RuntimePool"] * 2
    assert all(item["apiVersion"] == "datalayer.io/v1" for item in objects)
    assert all(item["metadata"]["namespace"] == "runtimes" for item in objects)
    assert all(item["metadata"]["labels"] == {"orca.stack": "abc"} for item in objects)
    assert by_name["RuntimeEnvironment", "python-simple-env"]["spec"] == {
        "dockerImage": "registry.example/python:1",
        "title": "Python",
        "language": "python",
        "description": "Plain",
        "example": "print(1)",
        "icon": "data:,",
        "snippets": [{"title": "Hello", "code": "print()"}],
        "env": [{"name": "LANG", "value": "C.UTF-8"}],
        "kernel": {"givenNameTemplate": "Python {n}"},
        "resourcesRanges": {
            "default": {
                "requests": {"cpu": "500m", "memory": "1Gi"},
                "limits": {"memory": "1Gi", "nvidia.com/gpu": 1},
            }
        },
    }
    assert by_name["RuntimeEnvironment", "bare"]["spec"] == {"dockerImage": "bare"}
    spec = dict(by_name["RuntimePool", "python-simple-pool"]["spec"])
    assert spec.pop("resources") == {"requests": {"cpu": 2}}
    assert spec == yaml.safe_load(SHARED_POOL.read_text())["spec"]
    assert by_name["RuntimePool", "empty"]["spec"] == {
        "environment": "bare",
        "size": 0,
        "cull": {"seconds": 3600.0},
        "resources": {"requests": {"cpu": "0.5"}},  # no number: the definitions take whole ones alone
        "nodeSelector": {"disk": "fast"},
        "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5}],
    }
    json.dumps([dict(item) for item in objects])  # a date of TOML would not be JSON


def test_a_file_without_them_declares_none() -> None:
    config = parse_config("[pools]\n", "orca.toml")
    assert (config.environments, config.runtime_pools) == ({}, {})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[environments.A_b]\ndocker_image = "x"', "orca.toml:1: [environments.A_b]: its name must be a name of Kubernetes"),
        ("[environments.p]", '[environments.p] docker_image: missing; add docker_image = "registry.example/python:1"'),
        ('[environments.p]\ndockerImage = "x"', "orca.toml:2: [environments.p] dockerImage: unknown key; did you mean docker_image?"),
        ('[environments.p]\ndocker_image = "a b"', "orca.toml:2: [environments.p] docker_image: must not hold spaces"),
        ('[environments.p]\ndocker_image = "x"\nsnippets = [1979-05-27]', "orca.toml:3: [environments.p] snippets: must hold no"),
        ('[environments.p]\ndocker_image = "x"\nkernel = {name = "k"}', "[environments.p.kernel] name: unknown key"),
        ('[runtime_pools.p]\nenvironment = "e"', "orca.toml:1: [runtime_pools.p] size: missing; add size = 3"),
        ('[runtime_pools.p]\nenvironment = "E e"\nsize = 1', "orca.toml:2: [runtime_pools.p] environment: must be a name of Kub"),
        ('[runtime_pools.p]\nenvironment = "e"\nsize = -1', "orca.toml:3: [runtime_pools.p] size: must be at least 0"),
        ('[runtime_pools.p]\nenvironment = "e"\nsize = 10001', "orca.toml:3: [runtime_pools.p] size: must be at most 10000"),
        ('[runtime_pools.p]\nenvironment = "e"\nsize = 1\nburning_rate = -1', "burning_rate: must be at least 0"),
        ('[runtime_pools.p]\nenvironment = "e"\nsize = 1\ncull.seconds = 0', "[runtime_pools.p.cull] seconds: must be more than 0"),
        ('[runtime_pools.p]\nenvironment = "e"\nsize = 1\ncull.secs = 5', "secs: unknown key; did you mean seconds?"),
        (
            '[runtime_pools.p]\nenvironment = "e"\nsize = 1\nresources.requests.cpu = "5x"',
            "orca.toml:4: [runtime_pools.p.resources.requests] cpu: must be a quantity such as 500m, 2 or 1.5Gi",
        ),
        (
            '[runtime_pools.p]\nenvironment = "e"\nsize = 1\nresources = {requests = {cpu = 2}, limits = {cpu = "1500m"}}',
            "orca.toml:4: [runtime_pools.p.resources]: requests more cpu (2) than its limit (1500m)",
        ),
        (
            '[runtime_pools.p]\nenvironment = "e"\nsize = 1\naffinity.x = 1979-05-27',
            "orca.toml:4: [runtime_pools.p.affinity]: must hold no dates",
        ),
        ("[runtime_pool.p]\nsize = 1", "[runtime_pool]: unknown table; did you mean runtime_pools?"),
        ("[pools.p]\nburning_rate = 1", "burning_rate: unknown key here; it belongs to a runtime pool, [runtime_pools.NAME]"),
    ],
)  # fmt: skip
def test_a_mistake_is_said_at_its_line(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "orca.toml")
    assert says in str(caught.value)
