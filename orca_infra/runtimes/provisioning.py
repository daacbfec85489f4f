"""Whether the nodes can hold what the pools ask for. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from orca_infra.runtimes.model import Condition, Environment, Node, Pool
from orca_infra.runtimes.resources import placement_of, requests_of, text_of

PROVISIONED = "Provisioned"
_THOUSANDTHS = 1000


def provisioned(
    pool: Pool, pools: Iterable[Pool], environments: Mapping[str, Environment], nodes: Sequence[Node] | None
) -> Condition:
    """Compare the sum of requests with what the nodes can allocate.

    Counted are the nodes that have the labels which this pool asks for, and every pool whose Pods can be on such nodes alone,
    at its full size. More than fits cannot all be warm; that everything fits node by node, this does not say.
    """
    if nodes is None:
        return Condition(type=PROVISIONED, status="Unknown", reason="NodesUnseen", message="the nodes cannot be listed")
    labels = _labels_of(pool)
    asked: dict[str, int] = {}
    for other in pools:
        if other.deleting or not labels.items() <= _labels_of(other).items():
            continue
        for resource, amount in _requests_of(other, environments).items():
            asked[resource] = asked.get(resource, 0) + amount * other.size
    there: dict[str, int] = {}
    for node in nodes:
        if labels.items() <= node.labels.items():
            for resource, amount in node.allocatable.items():
                there[resource] = there.get(resource, 0) + amount
    short = [resource for resource, amount in sorted(asked.items()) if amount > there.get(resource, 0)]
    if not short:
        return Condition(type=PROVISIONED, status="True", reason="NodesSuffice")
    words = ", ".join(
        f"{resource} {text_of(resource, asked[resource])} of {text_of(resource, there.get(resource, 0))}"
        for resource in short
    )
    where = " with " + ", ".join(f"{key}={value}" for key, value in sorted(labels.items())) if labels else ""
    message = f"the pools ask for more than the nodes{where} can allocate: {words}"
    return Condition(type=PROVISIONED, status="False", reason="NodesTooFew", message=message)


def _labels_of(pool: Pool) -> dict[str, str]:
    labels: dict[str, str] = placement_of(pool.node_selector, pool.affinity)["labels"]
    return labels


def _requests_of(pool: Pool, environments: Mapping[str, Environment]) -> dict[str, int]:
    environment = environments.get(pool.environment)
    resources = pool.resources or (environment.resources if environment is not None else {})
    try:
        return {**requests_of(resources), "pods": _THOUSANDTHS}
    except ValueError:  # nothing is born of it
        return {}
