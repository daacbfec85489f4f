"""The policy pack that the engine runs; the only importer of pulumi_policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from pulumi_policy import (
    EnforcementLevel,
    Policy,
    PolicyConfigSchema,
    PolicyPack,
    ResourceValidationArgs,
    ResourceValidationPolicy,
    StackValidationArgs,
    StackValidationPolicy,
)
from pulumi_policy.proxy import UnknownValueError

from orca_infra.policy.model import UNKNOWN, Resource, Rule
from orca_infra.policy.rules import RULES

NAME = "orca-infra"


def serve() -> None:
    """Serve the pack to the engine that started this process; returns when it is over."""
    PolicyPack(name=NAME, enforcement_level=EnforcementLevel.MANDATORY, policies=[_policy(rule) for rule in RULES])


def _policy(rule: Rule) -> Policy:
    schema = None
    if rule.properties:
        schema = PolicyConfigSchema(properties={name: dict(one) for name, one in rule.properties.items()})
    level = EnforcementLevel.ADVISORY if rule.advisory else EnforcementLevel.MANDATORY
    if rule.check is not None:
        check = partial(_check_resource, rule)
        return ResourceValidationPolicy(rule.name, rule.description, check, level, schema)
    return StackValidationPolicy(rule.name, rule.description, partial(_check_stack, rule), level, schema)


def _check_resource(rule: Rule, args: ResourceValidationArgs, report: Callable[..., None]) -> None:
    assert rule.check is not None
    resource = Resource(type=args.resource_type, name=args.name, urn=args.urn, props=_plain_table(args.props))
    for violation in rule.check(resource, rule.values(args.get_config())):
        report(violation.sentence(rule.name))


def _check_stack(rule: Rule, args: StackValidationArgs, report: Callable[..., None]) -> None:
    assert rule.check_stack is not None
    resources = [
        Resource(type=one.resource_type, name=one.name, urn=one.urn, props=_plain_table(one.props))
        for one in args.resources
    ]
    for violation in rule.check_stack(resources, rule.values(args.get_config())):
        report(violation.sentence(rule.name), violation.resource.urn if violation.resource else None)


def _plain(value: Any) -> Any:
    """Plain JSON of what the SDK gives, whose tables raise where a value is not known yet."""
    if isinstance(value, Mapping):
        return _plain_table(value)
    if isinstance(value, str | bytes) or not hasattr(value, "__getitem__"):
        return value
    return [_get(value, position) for position in range(len(value))]


def _plain_table(value: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _get(value, key) for key in value}


def _get(holder: Any, key: Any) -> Any:
    try:
        return _plain(holder[key])
    except UnknownValueError:
        return UNKNOWN
