"""The nouns of the policies. Standard library only, so that rules are plain functions that any test can call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

Values = Mapping[str, Any]


class _Unknown:
    """Stands where a value is only known after the `up`; no rule judges it."""

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN = _Unknown()


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """A resource as a program declares it.

    Attributes:
        type: Pulumi's, such as `kubernetes:core/v1:Pod` or `gcp:compute/instance:Instance`.
        name: in the program.
        props: its inputs, plain JSON, with UNKNOWN where a value is not known yet.

    """

    type: str
    name: str
    urn: str = ""
    props: Values = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The type's last part: `Pod`, `Instance`."""
        return self.type.rpartition(":")[2]

    @property
    def metadata(self) -> Values:
        """Of an object on Kubernetes; empty elsewhere."""
        return table(self.props.get("metadata"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """What is wrong with one resource, and what to do about it. `resource` is None for what is wrong with the whole stack."""

    resource: Resource | None
    what: str
    remedy: str

    def sentence(self, rule: str) -> str:
        """Names the resource, the rule and the remedy."""
        about = "the stack" if self.resource is None else f"{self.resource.kind} {self.resource.name}"
        return f"{rule}: {about}: {self.what}. Remedy: {self.remedy}."


OfResource = Callable[[Resource, Values], Iterable[Violation]]
OfStack = Callable[[Sequence[Resource], Values], Iterable[Violation]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One policy.

    Attributes:
        description: one sentence: what has to be so.
        check: looks at each resource by itself; or `check_stack` at all of a stack together.
        properties: its configuration as JSON schema, each with a default.
        advisory: whether a violation is only said.

    """

    name: str
    description: str
    check: OfResource | None = None
    check_stack: OfStack | None = None
    properties: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    advisory: bool = False

    def values(self, configured: Values | None) -> dict[str, Any]:
        """The configuration with the defaults of what is not said."""
        said = configured or {}
        return {name: said.get(name, schema["default"]) for name, schema in self.properties.items()}


def table(value: object) -> Values:
    """The value as a table; an empty one for what is none (absent, null, not known)."""
    return value if isinstance(value, Mapping) else {}


def rows(value: object) -> list[Values]:
    """The value as a list of tables; empty for what is none."""
    return [table(one) for one in value] if isinstance(value, list | tuple) else []


def matches(value: str, patterns: Iterable[str]) -> bool:
    """Whether a value is one of the patterns, in which `*` stands for anything."""
    return any(fnmatchcase(value, pattern) for pattern in patterns)


def texts(description: str, default: Sequence[str] = ()) -> dict[str, Any]:
    """The schema of a list of texts."""
    return {"type": "array", "items": {"type": "string"}, "default": list(default), "description": description}
