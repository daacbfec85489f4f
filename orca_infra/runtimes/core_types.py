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
# Rules say what a pattern would not: the API server quotes their messages. What they cost at most is known by these limits,
# which are far from what anybody writes.
_MANY = 64
_QUANTITY_CHARACTERS = 64


def structure(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    """An object with these fields, of which some are required; others are kept."""
    return {
        "type": "object",
        **_KEPT,
        "properties": properties,
        **({"required": list(required)} if required else {}),
        **more,
    }


def _rules(*rules: tuple[str, str]) -> dict[str, Any]:
    return {"x-kubernetes-validations": [{"rule": rule, "message": message} for rule, message in rules]}


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
        "maxLength": _QUANTITY_CHARACTERS,
        "x-kubernetes-int-or-string": True,
    },
    "maxProperties": _MANY,
    **_rules(
        (
            "self.all(what, isQuantity(string(self[what])) && !quantity(string(self[what])).isLessThan(quantity('0')))",
            "each must be a quantity of 0 or more, such as 500m, 2 or 1.5Gi",
        )
    ),
}
_NO_LESS = (
    "!has(self.requests) || !has(self.limits) || self.requests.all(what, !(what in self.limits) || "
    "!isQuantity(string(self.requests[what])) || !isQuantity(string(self.limits[what])) || "
    "!quantity(string(self.limits[what])).isLessThan(quantity(string(self.requests[what]))))"
)
RESOURCES = structure(
    {
        "requests": {
            **_QUANTITIES,
            "description": "What a node must have free; of what has a limit alone, that limit.",
        },
        "limits": {**_QUANTITIES, "description": "What a Pod may use at the most."},
    },
    **_rules(
        (
            _NO_LESS,
            "no request may be more than the limit of the same resource",
        )
    ),
)

_VALUES_RULES = (
    ("!(self.operator in ['In', 'NotIn']) || (has(self.values) && size(self.values) > 0)", "In and NotIn need values"),
    (
        "!(self.operator in ['Exists', 'DoesNotExist']) || !has(self.values) || size(self.values) == 0",
        "Exists and DoesNotExist take no values",
    ),
)
_NODE_REQUIREMENT = structure(
    {
        "key": _TEXT,
        "operator": _choice("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"),
        "values": _list(_TEXT, **_NULL),
    },
    "key",
    "operator",
    **_rules(
        *_VALUES_RULES,
        (
            "!(self.operator in ['Gt', 'Lt']) || (has(self.values) && size(self.values) == 1)",
            "Gt and Lt need one value, a whole number",
        ),
    ),
)
_NODE_TERM = structure(
    {
        "matchExpressions": _list(_NODE_REQUIREMENT, maxItems=_MANY),
        "matchFields": _list(_NODE_REQUIREMENT, maxItems=_MANY),
    }
)
_NODE_AFFINITY = structure(
    {
        "requiredDuringSchedulingIgnoredDuringExecution": structure(
            {"nodeSelectorTerms": _list(_NODE_TERM, minItems=1, maxItems=_MANY)}, "nodeSelectorTerms", **_NULL
        ),
        "preferredDuringSchedulingIgnoredDuringExecution": _list(
            structure({"weight": _integer(1, 100), "preference": _NODE_TERM}, "weight", "preference"),
            maxItems=_MANY,
            **_NULL,
        ),
    },
    **_NULL,
)
_LABEL_REQUIREMENT = structure(
    {"key": _TEXT, "operator": _choice("In", "NotIn", "Exists", "DoesNotExist"), "values": _list(_TEXT, **_NULL)},
    "key",
    "operator",
    **_rules(*_VALUES_RULES),
)
_LABEL_SELECTOR = structure(
    {
        "matchLabels": {"type": "object", **_NULL, "additionalProperties": _TEXT},
        "matchExpressions": _list(_LABEL_REQUIREMENT, maxItems=_MANY, **_NULL),
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
        "requiredDuringSchedulingIgnoredDuringExecution": _list(_POD_TERM, maxItems=_MANY, **_NULL),
        "preferredDuringSchedulingIgnoredDuringExecution": _list(
            structure({"weight": _integer(1, 100), "podAffinityTerm": _POD_TERM}, "weight", "podAffinityTerm"),
            maxItems=_MANY,
            **_NULL,
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
        },
        **_rules(
            (
                "(has(self.key) && self.key != '') || (has(self.operator) && self.operator == 'Exists')",
                "without a key, the operator must be Exists",
            ),
            (
                "!has(self.operator) || self.operator != 'Exists' || !has(self.value) || self.value == ''",
                "Exists takes no value",
            ),
            (
                "!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
                "tolerationSeconds needs the effect NoExecute",
            ),
        ),
    ),
    maxItems=_MANY,
    **_NULL,
)
# k8s.io/apimachinery, util/validation: a prefix of names with dots, and a name.
_LABEL_KEY = r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
_LABEL_VALUE = r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$"
NODE_SELECTOR = {
    "type": "object",
    **_NULL,
    "additionalProperties": {"type": "string", "maxLength": 63},
    "maxProperties": _MANY,
    **_rules(
        (
            f"self.all(key, size(key) <= 317 && key.matches(r'{_LABEL_KEY}') && self[key].matches(r'{_LABEL_VALUE}'))",
            "each must be a node's label: of letters, digits, '-', '_' and '.', the key perhaps after a domain and '/'",
        )
    ),
}
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
