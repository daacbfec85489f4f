"""The engine's event log of a preview -> changes with their diffs, and policies that are broken. Pure.

The events are the engine's own (sdk/go/common/apitype/events.go): `resourcePreEvent` has a step with the inputs before and
after, secrets masked; `policyEvent` a violation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from orca_infra.preview.model import OPS, Breach, Change
from orca_infra.preview.secrets import SECRET

_SIGNATURE = "4dabf18193072939515e22adb298388d"
_SECRET_MARK = "1b47061264138c4ac30d75fd1eb44270"  # noqa: S105  (a public constant of the protocol)
_UNKNOWN = re.compile(
    "04da6b54-80e4-46f7-96ec-b56ff0331ba9|1c4a061d-8072-4f0a-a4cb-0ff528b18fe7|3eeb2bf0-c639-47a8-9e75-3b44932eb421"
    "|6a19a0b0-7e62-4c92-b797-7f8e31da9cc2|dd056dcd-154b-4c76-9bd3-c8f88648b5ff"
)
_COLOURS = re.compile(r"<\{%[^%]*%\}>|\x1b\[[0-9;]*m")
# A property that is called so is not shown, whether or not the program said that it is secret.
_SECRET_NAME = re.compile(
    r"pass(?:word|wd|phrase)|secret|token|credential|(?:api|access|private|signing|encryption)[-_]?key|^pwd$",
    re.IGNORECASE,
)
# What such words name besides: objects, references, folders, flags.
_NO_SECRET_NAME = re.compile(r"(?:name|names|ref|path|file|seconds|class|type|namespace|audience)$", re.IGNORECASE)
_SECRET_TABLES = ("data", "stringData")
_LONGEST_VALUE = 300
_MOST_LINES = 2000


@dataclass(frozen=True, slots=True)
class Read:
    """What an event log says. `errors`: in the engine's words, the first is the cause."""

    changes: tuple[Change, ...]
    breaches: tuple[Breach, ...]
    errors: tuple[str, ...]


def read_preview(log: str, redact: Callable[[str], str]) -> Read:
    """Read the log of a preview; a line that is cut off is passed over."""
    changes: dict[tuple[str, str], Change] = {}
    breaches: dict[tuple[str, str], Breach] = {}
    errors: list[str] = []
    for event in _events(log):
        if "resourcePreEvent" in event:
            metadata = event["resourcePreEvent"]["metadata"]
            if metadata["op"] in OPS and not _is_default_provider(metadata):
                changes.setdefault((metadata["urn"], metadata["op"]), _change(metadata, redact))
        elif "policyEvent" in event:
            breach = _breach(event["policyEvent"], redact)
            breaches.setdefault((breach.rule, breach.message), breach)
        elif event.get("diagnosticEvent", {}).get("severity") == "error":
            message = redact(_COLOURS.sub("", event["diagnosticEvent"]["message"])).strip()
            if message and message not in errors and not message.startswith(("preview failed", "Resource monitor has")):
                errors.append(message)
    return Read(tuple(changes.values()), tuple(breaches.values()), tuple(errors))


def _events(log: str) -> Iterator[dict[str, Any]]:
    for line in log.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            yield event


def _is_default_provider(metadata: Mapping[str, Any]) -> bool:
    """What the engine declares by itself, and neither counts nor shows."""
    name = str(metadata["urn"]).rpartition("::")[2]
    return str(metadata["type"]).startswith("pulumi:providers:") and name.startswith("default")


def _breach(event: Mapping[str, Any], redact: Callable[[str], str]) -> Breach:
    urn = str(event.get("resourceUrn") or "")
    # The first line is the rule's description, which the message itself makes clear.
    message = _COLOURS.sub("", str(event.get("message", ""))).strip()
    _, _, own = message.partition("\n")
    return Breach(
        rule=str(event.get("policyName", "")),
        resource=redact(urn.rpartition("::")[2]),
        message=redact(own or message),
        mandatory=event.get("enforcementLevel") == "mandatory",
    )


def _change(metadata: Mapping[str, Any], redact: Callable[[str], str]) -> Change:
    kind, urn = str(metadata["type"]), str(metadata["urn"])
    before = _leaves(_inputs(metadata.get("old")), kind, redact)
    after = _leaves(_inputs(metadata.get("new")), kind, redact)
    touched = [*(metadata.get("diffs") or ()), *(metadata.get("detailedDiff") or ())]
    if metadata["op"] in {"create", "import"}:
        before = {}
    elif metadata["op"] == "delete":
        after = {}
    lines = [redact(line) for line in _lines(before, after, touched)]
    if len(lines) > _MOST_LINES:
        lines = [*lines[:_MOST_LINES], f"  … and {len(lines) - _MOST_LINES} lines more"]
    return Change(op=metadata["op"], type=kind, name=redact(urn.rpartition("::")[2]), diff=tuple(lines))


def _inputs(state: object) -> Mapping[str, Any]:
    found = state.get("inputs") if isinstance(state, Mapping) else None
    return found if isinstance(found, Mapping) else {}


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A property that is no table itself: as it is shown, and what it is compared by; None when the engine masked it."""

    shown: str
    value: object


def _lines(before: Mapping[str, _Leaf], after: Mapping[str, _Leaf], touched: list[str]) -> Iterable[str]:
    for path in dict.fromkeys([*before, *after]):
        old, new = before.get(path), after.get(path)
        if old is not None and new is not None:
            masked = old.value is None and new.value is None
            # Whether a masked value differs only the engine knows; it may name a property around it.
            if not any(_is_about(path, one) for one in touched) if masked else old == new:
                continue
        if old is not None:
            yield f"- {path}: {old.shown}"
        if new is not None:
            yield f"+ {path}: {new.shown}"


def _is_about(path: str, touched: str) -> bool:
    return path == touched or any(path.startswith(f"{touched}{separator}") for separator in (".", "["))


def _leaves(inputs: Mapping[str, Any], kind: str, redact: Callable[[str], str]) -> dict[str, _Leaf]:
    """Every property that is no table itself, by its path."""
    found: dict[str, _Leaf] = {}
    is_secret = kind.startswith("kubernetes:") and kind.endswith(":Secret")
    for key, value in inputs.items():
        _walk(
            value, _step("", key), found, masked=(is_secret and key in _SECRET_TABLES) or _is_secret(inputs, key, value)
        )
    # Before a long one is cut, which could go through a secret.
    return {path: replace(leaf, shown=_shortened(redact(leaf.shown))) for path, leaf in found.items()}


def _walk(value: object, path: str, found: dict[str, _Leaf], *, masked: bool) -> None:
    if isinstance(value, Mapping):
        if value.get(_SIGNATURE) == _SECRET_MARK:
            found[path] = _Leaf(SECRET, None)
            return
        for key, inner in value.items():
            _walk(inner, _step(path, key), found, masked=masked or _is_secret(value, key, inner))
        if not value:
            found[path] = _Leaf("{}", "{}")
    elif isinstance(value, list):
        for position, inner in enumerate(value):
            _walk(inner, f"{path}[{position}]", found, masked=masked)
        if not value:
            found[path] = _Leaf("[]", "[]")
    else:
        # Compared by what it is, and not by what is shown: of a long one that is only the beginning.
        found[path] = _Leaf(SECRET if masked else _shown(value), json.dumps(value))


def _is_secret(holder: Mapping[str, Any], key: str, value: object) -> bool:
    """Whether a property is secret by its name; of a variable, `{name, value}`, by the variable's."""
    name = str(holder.get("name", "")) if key == "value" else key
    is_text = isinstance(value, str | list | Mapping) and bool(value)
    if not is_text or (isinstance(value, Mapping | list) and key != "value"):
        return False
    return bool(_SECRET_NAME.search(name)) and not _NO_SECRET_NAME.search(name)


def _step(path: str, key: str) -> str:
    plain = re.fullmatch(r"[\w-]+", key)
    if not plain:
        return f"{path}[{json.dumps(key, ensure_ascii=False)}]"
    return f"{path}.{key}" if path else key


def _shown(value: object) -> str:
    if isinstance(value, str) and _UNKNOWN.fullmatch(value):
        return "(known after the up)"
    return json.dumps(value, ensure_ascii=False)


def _shortened(text: str) -> str:
    if len(text) > _LONGEST_VALUE:
        return f"{text[:_LONGEST_VALUE]}… ({len(text)} characters)"
    return text
