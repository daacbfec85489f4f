"""Resources and node selections, made comparable. Standard library only, pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

# k8s.io/apimachinery, pkg/api/resource: a decimal number with a decimal exponent, or a decimal or binary suffix.
_QUANTITY = re.compile(
    r"(?P<number>\d+(?:\.\d*)?|\.\d+)(?:[eE](?P<exponent>[+-]?\d{1,2})|(?P<suffix>[KMGTPE]i|[numkMGTPE]))?", re.ASCII
)
# More than any machine has, and few enough for a float and a column of the database.
_DIGITS_MAX = 40
_SHOWN = 60
_DECIMAL = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}


def amount_of(quantity: object) -> int:
    """A resource quantity in thousandths, rounded up: `500m` is 500, `1Ki` 1024000, the numbers 2 and 0.5 too.

    Raises:
        ValueError: it is none, or is negative; the message completes "cpu ...".

    """
    match = None
    if isinstance(quantity, str | int | float) and not isinstance(quantity, bool):
        match = _QUANTITY.fullmatch(str(quantity).strip())
    if match is None:
        raise ValueError("must be a quantity such as 500m, 2 or 1.5Gi")
    suffix = match["suffix"] or ""
    if len(match["number"]) > _DIGITS_MAX:
        raise ValueError("must be a quantity such as 500m, 2 or 1.5Gi, and of fewer digits")
    factor = Fraction(2) ** _BINARY[suffix] if suffix in _BINARY else Fraction(10) ** _DECIMAL.get(suffix, 0)
    return math.ceil(Fraction(match["number"]) * Fraction(10) ** int(match["exponent"] or 0) * factor * 1000)


def text_of(resource: str, thousandths: int) -> str:
    """An amount for people: `1500m` of CPU, `1.5Gi` of memory, a plain number of anything else."""
    if resource == "cpu":
        return f"{thousandths}m" if thousandths % 1000 else str(thousandths // 1000)
    amount = thousandths / 1000
    if resource == "memory" or resource.endswith("-storage"):
        for suffix, power in reversed(_BINARY.items()):
            if amount >= 2**power:
                return f"{amount / 2**power:.4g}{suffix}"
    return f"{amount:g}" if thousandths % 1000 else str(thousandths // 1000)


def amounts_of(quantities: Mapping[str, Any]) -> dict[str, int]:
    """Each resource's amount in thousandths.

    Raises:
        ValueError: one is no quantity; the message names its resource.

    """
    amounts = {}
    for resource, quantity in quantities.items():
        try:
            amounts[resource] = amount_of(quantity)
        except ValueError as error:
            raise ValueError(f"{resource} {error}, not {_short(quantity)}") from None
    return amounts


def requests_of(resources: Mapping[str, Any]) -> dict[str, int]:
    """What a Pod with these resources requests, in thousandths: a limit without a request is requested, as Kubernetes has it.

    Raises:
        ValueError: one of them is no quantity.

    """
    return amounts_of({**(resources.get("limits") or {}), **(resources.get("requests") or {})})


def size_of(requests: Mapping[str, int]) -> tuple[float, float, float]:
    """By what Pods are ordered, the smallest first: resources other than CPU and memory (devices), CPU, memory."""
    others = sum(amount for resource, amount in requests.items() if resource not in {"cpu", "memory"})
    return float(others), float(requests.get("cpu", 0)), float(requests.get("memory", 0))


def raised_to(resources: Mapping[str, Any], asked: Mapping[str, str]) -> dict[str, Any]:
    """These resources with the requests that are asked for instead; a limit below a request is raised to it.

    What is not CPU or memory of the node but a device (`nvidia.com/gpu`) has to have a limit that is its request.
    """
    requests = {**(resources.get("requests") or {}), **asked}
    limits = dict(resources.get("limits") or {})
    for resource, quantity in asked.items():
        below = resource in limits and amount_of(limits[resource]) < amount_of(quantity)
        if below or "/" in resource:
            limits[resource] = quantity
    return {**resources, "requests": requests, **({"limits": limits} if limits else {})}


def placement_of(node_selector: Mapping[str, str], affinity: Mapping[str, Any]) -> dict[str, Any]:
    """A node selection in one form: the labels that a node must have, and whatever says more than that.

    A required node affinity of one term with one value for each label says the same as a nodeSelector, so a launch that
    asks for these labels asks for such a pool. Any other affinity is kept as it is, and equals only itself.
    """
    labels = dict(node_selector)
    same = _labels_of(affinity)
    if same is not None and all(labels.get(key, value) == value for key, value in same.items()):
        return {"labels": {**labels, **same}}
    return {"labels": labels, "affinity": dict(affinity)}


def _labels_of(affinity: Mapping[str, Any]) -> dict[str, str] | None:
    """The labels that an affinity amounts to, or None when it says anything else."""
    if not affinity:
        return {}
    node = affinity.get("nodeAffinity") or {}
    if set(affinity) != {"nodeAffinity"} or set(node) != {"requiredDuringSchedulingIgnoredDuringExecution"}:
        return None
    terms = node["requiredDuringSchedulingIgnoredDuringExecution"].get("nodeSelectorTerms") or []
    if len(terms) != 1 or set(terms[0]) != {"matchExpressions"}:
        return None
    labels: dict[str, str] = {}
    for expression in terms[0]["matchExpressions"]:
        values = expression.get("values") or []
        if expression.get("operator") != "In" or len(values) != 1 or expression["key"] in labels:
            return None
        labels[expression["key"]] = values[0]
    return labels


def _short(quantity: object) -> str:
    text = repr(quantity)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
