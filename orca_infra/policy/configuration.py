"""The policies' configuration: the file that `pulumi preview --policy-pack-config` takes, and what it allows `decide`.

One file for both, so that the loop never makes what a preview would refuse.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orca_infra.allowed import Allowed
from orca_infra.machines.model import Pool
from orca_infra.policy.model import Rule
from orca_infra.policy.rules import RULES

LEVELS = ("advisory", "mandatory", "remediate", "disabled")
#: Those that hold up nothing.
_LENIENT = ("advisory", "disabled")
_LEVEL_KEY = "enforcementLevel"
_ALL = "all"
_WORDS = {"array": "a list of texts", "integer": "a whole number from 0", "string": "text"}
_FITS: Mapping[str, Callable[[Any], bool]] = {
    "array": lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 0,
    "string": lambda value: isinstance(value, str),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFile:
    """A configuration that was read. `allowed`: what of it restrains the loop's decisions."""

    path: Path
    allowed: Allowed = field(default_factory=Allowed)


def read_policy_file(path: Path) -> PolicyFile:
    """Read the file and check it against what the rules can be configured with.

    Raises:
        ValueError: it cannot be read or used; the message completes "FILE ...".

    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ValueError(f"cannot be read ({why}); name the policies' configuration, a JSON file") from error
    return PolicyFile(path=path.absolute(), allowed=parse_policies(text))


def parse_policies(text: str) -> Allowed:
    """What a configuration allows the loop; rules that are disabled or advisory restrain nothing. Raises ValueError."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(  # noqa: TRY004  (the file's fault, as all else here)
            'must be a table of rules, such as {"machine-types": {"allowed": ["e2-*"]}}'
        )
    wrong = list(_wrong(document))
    if wrong:
        raise ValueError("; ".join(wrong))

    def values(name: str) -> Mapping[str, Any]:
        rule = next(rule for rule in RULES if rule.name == name)
        said = document.get(name, {})
        own = said if isinstance(said, str) else said.get(_LEVEL_KEY)
        level = own or document.get(_ALL) or ("advisory" if rule.advisory else "mandatory")
        return rule.values({} if level in _LENIENT or isinstance(said, str) else said)

    counts = values("machine-counts")
    return Allowed(
        types=tuple(values("machine-types")["allowed"]),
        locations=tuple(values("machine-locations")["allowed"]),
        registries=tuple(values("image-registries")["registries"]),
        machines_per_pool=counts["mostPerPool"] or None,
        machines=counts["most"] or None,
    )


def refused_pools(pools: Iterable[Pool], allowed: Allowed) -> Iterator[str]:
    """What of the pools the policies do not allow, a sentence each; the loop leaves it out."""
    for pool in pools:
        types = dict.fromkeys(kind.type for kind in pool.types if not allowed.has_type(kind.type))
        places = dict.fromkeys(p for kind in pool.types for p in kind.locations if not allowed.has_location(p))
        if types:
            yield f"pool {pool.name}: machine-types allows {', '.join(allowed.types)}, and not {', '.join(types)}"
        if places:
            yield f"pool {pool.name}: machine-locations allows {', '.join(allowed.locations)}, and not {', '.join(places)}"
        if not allowed.has_image(pool.image):
            yield f"pool {pool.name}: image-registries allows {', '.join(allowed.registries)}, and not {pool.image}"
        most = allowed.machines_per_pool
        if most is not None and pool.max_machines > most:
            yield f"pool {pool.name}: machine-counts allows {most} machines, and max_machines is {pool.max_machines}"


def _wrong(document: Mapping[str, Any]) -> Iterator[str]:
    by_name = {rule.name: rule for rule in RULES}
    for name, said in document.items():
        if isinstance(said, str):
            if said not in LEVELS:
                yield f"{name} must be a table or one of {', '.join(LEVELS)}, not {said!r}"
            if name != _ALL and name not in by_name:
                yield _unknown("rule", name, [*by_name, _ALL])
        elif name not in by_name:
            yield _unknown("rule", name, [*by_name, _ALL])
        elif not isinstance(said, dict):
            yield f"{name} must be a table or one of {', '.join(LEVELS)}"
        else:
            yield from _wrong_values(by_name[name], said)


def _wrong_values(rule: Rule, said: Mapping[str, Any]) -> Iterator[str]:
    for key, value in said.items():
        if key == _LEVEL_KEY:
            if value not in LEVELS:
                yield f"{rule.name}.{key} must be one of {', '.join(LEVELS)}"
            continue
        schema = rule.properties.get(key)
        if schema is None:
            yield _unknown(f"key of {rule.name}", key, [*rule.properties, _LEVEL_KEY])
            continue
        if not _FITS[schema["type"]](value):
            yield f"{rule.name}.{key} must be {_WORDS[schema['type']]}"


def _unknown(what: str, name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"{name!r} is no {what}; " + (f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}")
