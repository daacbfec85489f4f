"""The two CustomResourceDefinitions, as the base stack applies them. Plain dicts, pure.

Unknown fields are kept, so that an object that a newer version wrote loses nothing here.
"""

from __future__ import annotations

from typing import Any

from orca_infra.runtimes.core_types import AFFINITY, NODE_SELECTOR, RESOURCES, TOLERATIONS, VARIABLES, structure
from orca_infra.runtimes.model import BURNING_RATE_MAX, CULL_SECONDS_MAX, POOL_SIZE_MAX

GROUP = "datalayer.io"
_NAME = {"type": "string", "minLength": 1, "maxLength": 253}
_TEXT = {"type": "string"}
_KEPT = {"x-kubernetes-preserve-unknown-fields": True}
_OPEN: dict[str, Any] = {"type": "object", **_KEPT}
# A server-side apply that takes the last key out of a map leaves null there.
_NULL = {"nullable": True}

_POOL_SPEC = {
    **_OPEN,
    "description": "What is kept warm, and where. A change reaches Pods that are born afterwards.",
    "required": ["environment", "size"],
    "properties": {
        "environment": {**_NAME, "description": "The RuntimeEnvironment of its Pods, by name."},
        "size": {
            "type": "integer",
            "format": "int32",
            "minimum": 0,
            "maximum": POOL_SIZE_MAX,
            "description": "How many Pods are kept warm.",
        },
        "burningRate": {
            "type": "number",
            "minimum": 0,
            "maximum": BURNING_RATE_MAX,
            "description": "Credits a second that a runtime of this pool burns.",
        },
        "resources": {
            **RESOURCES,
            **_NULL,
            "description": "The Pods' requests and limits; they override the environment's resourcesRanges.default.",
        },
        "cull": {
            **_OPEN,
            **_NULL,
            "description": "When its runtimes are culled; left out: never.",
            "properties": {
                "seconds": {
                    "type": "number",
                    "minimum": 0,
                    "exclusiveMinimum": True,
                    "maximum": CULL_SECONDS_MAX,
                    "description": "How long a runtime of this pool lives before it is culled.",
                }
            },
        },
        "affinity": {**AFFINITY, "description": "Where its Pods are scheduled, as in a Pod."},
        "nodeSelector": {**NODE_SELECTOR, "description": "Labels of the nodes that its Pods may be on, as in a Pod."},
        "tolerations": {**TOLERATIONS, "description": "Which taints of nodes its Pods bear, as in a Pod."},
    },
}
_POOL_STATUS = {
    **_OPEN,
    "description": "What there is, and why not more.",
    "properties": {
        "warm": {"type": "integer", "description": "Pods that a launch can take."},
        "assigned": {"type": "integer", "description": "Runtimes of this pool's Pods."},
        "message": {**_TEXT, "description": "Why fewer Pods than wanted are warm."},
        "observedGeneration": {
            "type": "integer",
            "format": "int64",
            "description": "The metadata.generation that this status speaks of.",
        },
        "conditions": {
            "type": "array",
            "description": "Ready: as many Pods as wanted are warm. Provisioned: the nodes can hold what all pools ask for.",
            "items": structure(
                {
                    "type": {**_TEXT, "description": "Ready or Provisioned."},
                    "status": {
                        "type": "string",
                        "enum": ["True", "False", "Unknown"],
                        "description": "Whether it is so.",
                    },
                    "reason": {**_TEXT, "description": "Why, in one word for programs."},
                    "message": {**_TEXT, "description": "Why, for people."},
                    "lastTransitionTime": {
                        "type": "string",
                        "format": "date-time",
                        "description": "Since when its status is as it is.",
                    },
                },
                "type",
                "status",
            ),
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["type"],
        },
    },
}
_ENVIRONMENT_SPEC = {
    **_OPEN,
    "description": "What runs in a Pod. A change reaches Pods that are born afterwards.",
    "required": ["dockerImage"],
    "properties": {
        "dockerImage": {"type": "string", "minLength": 1, "description": "The image of its Pods."},
        "title": {**_TEXT, "description": "Its name for people."},
        "language": {**_TEXT, "description": "What is programmed in."},
        "description": {**_TEXT, "description": "What it is for, for people."},
        "resourcesRanges": {
            **_OPEN,
            "description": "What its Pods are given, unless their pool has resources of its own.",
            "properties": {"default": {**RESOURCES, "description": "The requests and limits of its Pods."}},
        },
        "env": {
            **VARIABLES,
            "description": "Variables, as in a Pod. No secrets: those are given to a runtime when it is assigned.",
        },
        "snippets": {**_KEPT, "description": "Code that a front end offers; kept as it is."},
        "kernel": {
            **_OPEN,
            "description": "Of its kernels, for a front end; kept as it is.",
            "properties": {"givenNameTemplate": {**_TEXT, "description": "How a kernel is named."}},
        },
        "example": {**_TEXT, "description": "What a front end shows as an example; kept as it is."},
        "icon": {**_TEXT, "description": "What a front end shows; kept as it is."},
    },
}


def runtime_pool_crd() -> dict[str, Any]:
    """RuntimePool, with subresources status and scale: `kubectl scale rtp <pool> --replicas 5` changes its size."""
    names = {
        "kind": "RuntimePool",
        "plural": "runtime-pools",
        "singular": "runtime-pool",
        "shortNames": ["rtp", "rp", "rps", "rpool", "rpools"],
    }
    columns = [
        _column("Environment", "string", ".spec.environment"),
        _column("Size", "integer", ".spec.size"),
        _column("Warm", "integer", ".status.warm"),
        _column("Assigned", "integer", ".status.assigned"),
        _column("Burning Rate", "number", ".spec.burningRate"),
        _column("Message", "string", ".status.message"),
        _column("Age", "date", ".metadata.creationTimestamp"),
    ]
    scale = {"specReplicasPath": ".spec.size", "statusReplicasPath": ".status.warm"}
    return _crd(
        names,
        columns,
        {"spec": _POOL_SPEC, "status": _POOL_STATUS},
        "Pods of one RuntimeEnvironment that are kept warm, so that a launch takes one instead of waiting for it.",
        subresources={"status": {}, "scale": scale},
    )


def runtime_environment_crd() -> dict[str, Any]:
    """RuntimeEnvironment: what runs in a Pod, apart from where and how many."""
    names = {
        "kind": "RuntimeEnvironment",
        "plural": "runtime-environments",
        "singular": "runtime-environment",
        "shortNames": ["rte", "re", "res", "renv", "renvs"],
    }
    columns = [
        _column("Title", "string", ".spec.title"),
        _column("Language", "string", ".spec.language"),
        _column("Image", "string", ".spec.dockerImage"),
        _column("Age", "date", ".metadata.creationTimestamp"),
    ]
    said = "What runs in a runtime's Pod: its image, variables and resources. RuntimePools keep Pods of it warm."
    return _crd(names, columns, {"spec": _ENVIRONMENT_SPEC}, said)


def _column(name: str, type_: str, path: str) -> dict[str, str]:
    return {"name": name, "type": type_, "jsonPath": path}


def _crd(
    names: dict[str, Any],
    columns: list[dict[str, str]],
    properties: dict[str, Any],
    description: str,
    *,
    subresources: dict[str, Any] | None = None,
) -> dict[str, Any]:
    version = {
        "name": "v1",
        "served": True,
        "storage": True,
        "schema": {
            "openAPIV3Schema": {
                "type": "object",
                "description": description,
                "required": ["spec"],
                "properties": properties,
            }
        },
        "additionalPrinterColumns": columns,
        **({"subresources": subresources} if subresources else {}),
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{names['plural']}.{GROUP}"},
        "spec": {"group": GROUP, "scope": "Namespaced", "names": names, "versions": [version]},
    }
