"""What a stack's file (stacks/Pulumi.STACK.yaml) says, and how it goes together with the environment.

The engine checks the types where Pulumi.yaml has the `config:` block; here they are checked again, as a project of one's own
may lack it.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from orca_infra.errors import SetupError
from orca_infra.settings import SETTINGS, read_settings
from orca_infra.stack.base_keys import KEYS, NAMESPACE, Key

_BY_NAME = {key.name: key for key in KEYS}
_INTEGER = re.compile(r"-?\d{1,9}", re.ASCII)
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)
_IMAGE = re.compile(r"[a-z0-9][\w.\-:/]*[\w](@sha256:[0-9a-f]{64})?", re.ASCII)
_QUANTITY = re.compile(r"\d+(\.\d+)?([eE]\d+|m|[kMGTPE]|[KMGTPE]i)?", re.ASCII)
_RESOURCE = re.compile(r"[a-z0-9][-a-z0-9./]*", re.ASCII)
_LIMIT_KINDS = frozenset({"default", "defaultRequest", "max", "min", "maxLimitRequestRatio"})
_OF_THE_BASE = {"ORCA_DB": "db", "ORCA_TOKEN_KEY": "tokenKey", "PULUMI_BACKEND_URL": "backendUrl"}
_MOST_REPLICAS = 20


def read_values(config: Mapping[str, str], stack: str, encrypted: Collection[str] | None = None) -> dict[str, Any]:
    """Every key's value; `config` is as the engine has it, `orca-infra:NAME` to text, JSON for arrays and objects.

    `encrypted` are the keys whose values the stack's file has encrypted; None: not known.

    Raises:
        SetupError: a sentence for each key that is unknown or cannot be used.

    """
    values = {key.name: key.default for key in KEYS}
    wrong = []
    for full, text in sorted(config.items()):
        space, _, name = full.rpartition(":")
        if space != NAMESPACE:
            continue  # a provider's, such as gcp:project
        key = _BY_NAME.get(name)
        if key is None:
            near = difflib.get_close_matches(name, _BY_NAME, 1)
            meant = f"; did you mean {near[0]}?" if near else ""
            wrong.append(f"{full} is no key of a base stack{meant}")
            continue
        if key.secret and text and encrypted is not None and full not in encrypted:
            wrong.append(
                f"{full} stands unencrypted in stacks/Pulumi.{stack}.yaml: `pulumi config set --secret {name} …`"
            )
        try:
            values[name] = _read(key, text)
        except ValueError as error:
            shown = "" if key.secret else f" ({text[:80]})"
            wrong.append(f"{full}{shown}: {error}; `pulumi config set -s {stack} {name} …` sets it")
    wrong += _wrong_values(values)
    if wrong:
        raise SetupError("\n".join(wrong))
    return values


def merged_environment(values: Mapping[str, Any], environ: Mapping[str, str], stack: str) -> dict[str, str]:
    """The environment with what the stack's file says, for read_settings.

    Raises:
        SetupError: file and shell say different things, or `settings` has what does not belong there.

    """
    merged = dict(environ)
    wrong = []
    for key in KEYS:
        if key.variable is None or values[key.name] == "":
            continue
        there = environ.get(key.variable) or ""
        if there and not _same(key, there, values[key.name]):
            what = "" if key.secret else f" ({values[key.name]!r} and {there!r})"
            wrong.append(
                f"stacks/Pulumi.{stack}.yaml sets {NAMESPACE}:{key.name} and this shell sets {key.variable} to something "
                f"else{what}: unset one of them"
            )
        merged[key.variable] = there or values[key.name]
    if values["db"] and not environ.get("ORCA_DB"):
        merged["ORCA_DB"] = values["db"]
    if wrong:
        raise SetupError("\n".join(wrong))
    return {**merged, "ORCA_STACK": stack.partition(".")[0]}


def pod_settings(values: Mapping[str, Any], stack: str) -> dict[str, str]:
    """What `settings` adds to the environment of the loop and the API. Raises SetupError, SettingError."""
    given = {str(name): _plain(value) for name, value in values["settings"].items()}
    passed_on = {name.strip() for name in given.get("ORCA_RUN_ENV", "").split(",")}
    known = {setting.name for setting in SETTINGS} | {"ORCA_LOG"}
    wrong = []
    for name in given:
        if name in _OF_THE_BASE:
            wrong.append(f"{NAMESPACE}:settings has {name}, which is secret: set {NAMESPACE}:{_OF_THE_BASE[name]}")
        elif any(key.variable == name for key in KEYS):
            own = next(key.name for key in KEYS if key.variable == name)
            wrong.append(f"{NAMESPACE}:settings has {name}: set {NAMESPACE}:{own}, which the base itself needs")
        elif name not in known | passed_on:
            wrong.append(f"{NAMESPACE}:settings has {name}, which is no setting and which ORCA_RUN_ENV does not name")
    if wrong:
        raise SetupError("\n".join(wrong))
    read_settings({"ORCA_STACK": stack, "HOME": "/", **given})
    return given


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else json.dumps(value)


def _same(key: Key, one: str, other: str) -> bool:
    if key.name == "orcaToml":
        return Path(one).resolve() == Path(other).resolve()
    return one == other


def _read(key: Key, text: str) -> Any:
    if key.type == "string":
        return text
    if key.type == "boolean":
        if text not in {"true", "false"}:
            raise ValueError("must be true or false")
        return text == "true"
    if key.type == "integer":
        if not _INTEGER.fullmatch(text):
            raise ValueError("must be a whole number")
        return int(text)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if key.type == "array":
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ValueError("must be a list of names")
        return value
    if isinstance(value, dict):
        return value
    raise ValueError("must be a table of keys and values")


def _wrong_values(values: Mapping[str, Any]) -> list[str]:
    labels = ("systemNamespace", *(["runtimesNamespace"] if values["runtimesNamespace"] else []))
    wrong = [
        f"{NAMESPACE}:{name} ({values[name][:80]}): must be a namespace's name: a-z, 0-9 and -, at most 63"
        for name in labels
        if not _LABEL.fullmatch(values[name])
    ]
    wrong += [
        f"{NAMESPACE}:{name} ({values[name]}): must be 1 to {_MOST_REPLICAS}"
        for name in ("loopReplicas", "apiReplicas")
        if not 1 <= values[name] <= _MOST_REPLICAS
    ]
    image = values["image"]
    if (values["loop"] or values["api"]) and not image:
        wrong.append(
            f"{NAMESPACE}:image is not set: the loop and the API are run from it (docs/howto/deploy.md builds one); "
            "`pulumi config set image REGISTRY/orca-infra@sha256:…`"
        )
    if image and not _IMAGE.fullmatch(image):
        wrong.append(f"{NAMESPACE}:image ({image[:80]}): is no image reference such as registry.example/orca-infra:1")
    wrong += _wrong_quantities(values)
    return wrong


def _wrong_quantities(values: Mapping[str, Any]) -> list[str]:
    tables = {f"{name}Quota": values[f"{name}Quota"] for name in ("runs", "runtimes")}
    wrong = []
    for name in ("runsLimits", "runtimesLimits"):
        for kind, table in values[name].items():
            if kind not in _LIMIT_KINDS or not isinstance(table, dict):
                wrong.append(
                    f"{NAMESPACE}:{name}: has {kind!r}; it takes tables called {', '.join(sorted(_LIMIT_KINDS))}"
                )
            else:
                tables[f"{name}.{kind}"] = table
    for name, table in tables.items():
        for resource, amount in table.items():
            if not _RESOURCE.fullmatch(resource) or not _QUANTITY.fullmatch(str(amount)):
                wrong.append(f'{NAMESPACE}:{name}: {resource} = {amount!r} is no amount such as cpu = "64"')
    return wrong
