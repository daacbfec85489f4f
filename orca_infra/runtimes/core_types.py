"""Schemas of the core types that a pool has, as the API server checks them in a Pod. Plain dicts, pure.

A value that a Pod could never have is refused when the pool is applied, not when its Pods are made. What a newer Kubernetes
adds to these types is kept. Source: k8s.io/api, core/v1/types.go.
"""

from __future__ import annotations

from typing import Any

_KEPT = {"x-kubernetes-preserve-unknown-fields": True}
# A server-side apply that takes the last key out of a map leaves null there.
_NULL = {"nullable": True}
_TEXT = {"type": "string"}
# k8s.io/apimachinery, pkg/api/resource; without a sign, since no request is negative.
_QUANTITY_PATTERN = (
    r"^\+?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$"
)


def structure(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    """An object with these fields, of which some are required; others are kept."""
    return {
        "type": "object",
        **_KEPT,
        "properties": properties,
        **({"required": list(required)} if required else {}),
        **more,
    }


def _list(items: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


def _choice(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(values)}


def _integer(least: int, most: int) -> dict[str, Any]:
    return {"type": "integer", "format": "int32", "minimum": least, "maximum": most}


_QUANTITIES = {
    "type": "object",
    **_NULL,
    "additionalProperties": {
        "anyOf": [{"type": "integer"}, {"type": "string"}],
        "minimum": 0,
        "pattern": _QUANTITY_PATTERN,
        "x-kubernetes-int-or-string": True,
    },
}
RESOURCES = structure({"requests": _QUANTITIES, "limits": _QUANTITIES})

_NODE_REQUIREMENT = structure(
    {
        "key": _TEXT,
        "operator": _choice("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"),
        "values": _list(_TEXT, **_NULL),
    },
    "key",
    "operator",
)
_NODE_TERM = structure({"matchExpressions": _list(_NODE_REQUIREMENT), "matchFields": _list(_NODE_REQUIREMENT)})
_NODE_AFFINITY = structure(
    {
        "requiredDuringSchedulingIgnoredDuringExecution": structure(
            {"nodeSelectorTerms": _list(_NODE_TERM, minItems=1)}, "nodeSelectorTerms", **_NULL
        ),
        "preferredDuringSchedulingIgnoredDuringExecution": _list(
            structure({"weight": _integer(1, 100), "preference": _NODE_TERM}, "weight", "preference"), **_NULL
        ),
    },
    **_NULL,
)
_LABEL_REQUIREMENT = structure(
    {"key": _TEXT, "operator": _choice("In", "NotIn", "Exists", "DoesNotExist"), "values": _list(_TEXT, **_NULL)},
    "key",
    "operator",
)
_LABEL_SELECTOR = structure(
    {
        "matchLabels": {"type": "object", **_NULL, "additionalProperties": _TEXT},
        "matchExpressions": _list(_LABEL_REQUIREMENT, **_NULL),
    },
    **_NULL,
)
_POD_TERM = structure(
    {
        "labelSelector": _LABEL_SELECTOR,
        "namespaceSelector": _LABEL_SELECTOR,
        "namespaces": _list(_TEXT, **_NULL),
        "topologyKey": {"type": "string", "minLength": 1},
    },
    "topologyKey",
)
_POD_AFFINITY = structure(
    {
        "requiredDuringSchedulingIgnoredDuringExecution": _list(_POD_TERM, **_NULL),
        "preferredDuringSchedulingIgnoredDuringExecution": _list(
            structure({"weight": _integer(1, 100), "podAffinityTerm": _POD_TERM}, "weight", "podAffinityTerm"), **_NULL
        ),
    },
    **_NULL,
)
AFFINITY = structure(
    {"nodeAffinity": _NODE_AFFINITY, "podAffinity": _POD_AFFINITY, "podAntiAffinity": _POD_AFFINITY}, **_NULL
)
TOLERATIONS = _list(
    structure(
        {
            "key": _TEXT,
            "operator": _choice("", "Exists", "Equal", "Lt", "Gt"),
            "value": _TEXT,
            "effect": _choice("", "NoSchedule", "PreferNoSchedule", "NoExecute"),
            "tolerationSeconds": {"type": "integer", "format": "int64", **_NULL},
        }
    ),
    **_NULL,
)
#: Of an environment, for everybody who launches it: what is one user's own is given at assignment, and nothing secret is in
#: a Pod's environment, where every child process and every `describe` has it.
VARIABLES = _list(
    structure(
        {
            "name": {"type": "string", "minLength": 1, "maxLength": 253},
            "value": _TEXT,
            "valueFrom": structure(
                {"secretKeyRef": {"type": "object", **_KEPT}},
                **{
                    "x-kubernetes-validations": [
                        {
                            "rule": "!has(self.secretKeyRef)",
                            "message": (
                                "no Secret goes into an environment's variables: label it datalayer.io/user=<user>, and that "
                                "user's runtimes have it as files in /var/run/secrets/orca"
                            ),
                        }
                    ]
                },
            ),
        },
        "name",
    ),
    maxItems=500,
)
