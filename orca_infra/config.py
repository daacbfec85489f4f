"""orca.toml: read strictly, every mistake reported at its line, handed on as frozen dataclasses.

pydantic checks the shape and stays in this module; what it says is put in plain words (`_words`), and what needs more
than one key (`_pool_problems`) is checked on the raw document, so that it is reported beside errors of shape.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date, time
from pathlib import Path
from typing import Annotated, Literal, NotRequired, TypedDict, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from orca_infra.errors import ConfigError
from orca_infra.machines.boot import SECRET
from orca_infra.machines.model import MachineType, Pool
from orca_infra.machines.providers.gcp_config import COS, COS_ARM64, ZONE, GcpCloud
from orca_infra.machines.providers.local_config import LocalCloud
from orca_infra.names import derived_stack, machine_name
from orca_infra.quantity import seconds_of
from orca_infra.runs.model import PodPlacement
from orca_infra.toml_lines import KeyPath, key_lines

PROVIDERS = ("gcp", "local")

_LARGEST_BYTES = 1024 * 1024
_MOST_REPORTED = 20
_MOST_EXPLAINED = 1000  # a file of nothing but mistakes must not take minutes
_MOST_MACHINES = 1_000_000
_LONGEST_NAME = 200
_LONGEST_SHOWN = 60
# https://cloud.google.com/resource-manager/docs/creating-managing-projects, with the old form of domains
_PROJECT = re.compile(r"(?:[a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_TOML_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What orca.toml says.

    Attributes:
        pools: in the order of the file; names, machine names and stack names are all different.
        max_machines_total: the most machines over all pools; None for no such limit.
        local: the make-believe cloud of the provider `local`.
        gcp: the project of the provider `gcp`; None when the file has no [gcp].
        pipelines: where the Pods of a pipeline's run clusters go, for pipelines that have a table.

    """

    pools: tuple[Pool, ...]
    max_machines_total: int | None
    local: LocalCloud
    gcp: GcpCloud | None = None
    pipelines: Mapping[str, PodPlacement] = field(default_factory=dict)


def load_config(path: Path) -> Config:
    """Read orca.toml from a file.

    Raises:
        ConfigError: the file cannot be read or used; the caller shows the message alone, and on a reload keeps the
            configuration it has.

    """
    source = str(path)
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_BYTES + 1)
    except FileNotFoundError as error:
        raise ConfigError(f"{source}: no such file; write it, or name another with ORCA_CONFIG") from error
    except IsADirectoryError as error:
        raise ConfigError(f"{source}: is a folder; name the file itself, such as {path / 'orca.toml'}") from error
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{source}: cannot be read ({why}); check the path and its permissions") from error
    _refuse_large(len(content), source)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{source}:{line}: the text is not UTF-8; save the file as UTF-8") from error
    return parse_config(text, source)


def parse_config(text: str, source: str) -> Config:
    """Read the text of an orca.toml; `source` is what messages call it.

    A text that says nothing at all is refused: it is what a file that is being written looks like, and a pool that is
    gone from the file is drained. `[pools]` alone says that there are no pools.

    Raises:
        ConfigError: one line for each mistake, in the file's order, at most 20 and how many more there are.

    """
    _refuse_large(len(text), source)
    text = text.removeprefix("\ufeff")  # some editors write a byte order mark
    document = _read_toml(text, source)
    if not document:
        raise ConfigError(f"{source}: says nothing; a file without pools says so with [pools]")
    problems = [problem for name, pool in _raw_pools(document) for problem in _pool_problems(name, pool)]
    problems += _name_problems([name for name, _ in _raw_pools(document)])
    problems += _gcp_problems(document)
    file, unread = None, 0
    try:
        file = _File.model_validate(document)
    except ValidationError as error:
        found = error.errors(include_url=False)
        problems += [_problem_of(details) for details in found[:_MOST_EXPLAINED]]
        unread = len(found[_MOST_EXPLAINED:])
    if file is None or problems:
        raise ConfigError(_report(_placed(problems, document, key_lines(text)), source, unread))
    return Config(
        pools=tuple(pool.freeze(name) for name, pool in file.pools.items()),
        max_machines_total=file.max_machines_total,
        local=file.local.freeze(),
        gcp=file.gcp.freeze() if file.gcp else None,
        pipelines={name: pipeline.freeze() for name, pipeline in file.pipelines.items()},
    )


def _refuse_large(size: int, source: str) -> None:
    if size > _LARGEST_BYTES:
        raise ConfigError(f"{source}: is larger than 1 MiB; name the right file, or make it smaller")


def _read_toml(text: str, source: str) -> dict[str, object]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        what = str(error)
        place = _TOML_PLACE.search(what)
        what = what[:1].lower() + (what[1 : place.start()] if place else what[1:])
        if place is None:
            raise ConfigError(f"{source}: is not TOML: {what}") from error
        if place[1] is None:
            line = text.rstrip().count("\n") + 1
            raise ConfigError(f"{source}:{line}: is not TOML: {what} at the end; is the file cut short?") from error
        raise ConfigError(f"{source}:{place[1]}: is not TOML: {what} (column {place[2]}); mend this line") from error
    except RecursionError as error:
        raise ConfigError(f"{source}: is nested too deeply; orca.toml needs no such lists or tables") from error
    except ValueError as error:
        # tomllib lets through what int() says of a number of thousands of digits.
        raise ConfigError(f"{source}: holds a number with too many digits; write a shorter one") from error


# The shape. Every field here is a key of the file.


def _text(value: str) -> str:
    if not value.strip():
        raise ValueError("must not be empty")
    if len(value) > _LONGEST_NAME:
        raise ValueError(f"must have at most {_LONGEST_NAME} characters, not {len(value)}")
    if not value.isprintable():
        raise ValueError("must not hold control characters or other invisible ones")
    return value


def _image(value: str) -> str:
    if any(character.isspace() for character in value):
        raise ValueError("must not hold spaces; write an image such as registry.example/orca-worker:1")
    return value


def _provider(value: str) -> str:
    if value not in PROVIDERS:
        near = _nearest(value, PROVIDERS)
        what_next = f"did you mean {near}?" if near else f"the providers are {', '.join(PROVIDERS)}"
        raise ValueError(f"unknown provider {_quoted(value)}; {what_next}")
    return value


def _project(value: str) -> str:
    if not _PROJECT.fullmatch(value):
        raise ValueError("must be a project's id, such as my-project-123")
    return value


def _secret(value: str) -> str:
    if value and not SECRET.fullmatch(value):
        raise ValueError("must be a secret's name, such as projects/my-project-123/secrets/orca-db")
    return value


def _different(values: list[str]) -> list[str]:
    if not values:
        raise ValueError("must name at least one location")
    seen: set[str] = set()
    for value in values:
        if value in seen:
            raise ValueError(f"names {_quoted(value)} twice; remove one of them")
        seen.add(value)
    return values


def _some_seconds(value: float) -> float:
    if value <= 0:
        raise ValueError("must be more than 0")
    return value


_Text = Annotated[str, AfterValidator(_text)]
_Locations = Annotated[list[_Text], AfterValidator(_different)]
_Seconds = Annotated[float, BeforeValidator(seconds_of)]
_Count = Annotated[int, Field(ge=0, le=_MOST_MACHINES)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class _Type(_Table):
    type: _Text
    wait: _Seconds = 0
    locations: _Locations | None = None
    price_per_hour: Annotated[float, Field(ge=0)] | None = None
    spot: bool = False

    def freeze(self, pool_locations: list[str] | None) -> MachineType:
        return MachineType(
            type=self.type,
            locations=tuple(self.locations or pool_locations or ()),
            wait_seconds=self.wait,
            price_per_hour=self.price_per_hour,
            spot=self.spot,
        )


class _Pool(_Table):
    provider: Annotated[str, AfterValidator(_provider)]
    image: Annotated[_Text, AfterValidator(_image)]
    locations: _Locations | None = None
    max_machines: _Count
    idle_seconds: Annotated[_Seconds, AfterValidator(_some_seconds)]
    max_booting: Annotated[int, Field(ge=1, le=_MOST_MACHINES)] = 1
    types: Annotated[list[_Type], Field(min_length=1)]

    def freeze(self, name: str) -> Pool:
        return Pool(
            name=name,
            provider=self.provider,
            image=self.image,
            max_machines=self.max_machines,
            idle_seconds=self.idle_seconds,
            max_booting=self.max_booting,
            types=tuple(entry.freeze(self.locations) for entry in self.types),
        )


class _LocalType(_Table):
    architecture: _Text


class _Local(_Table):
    locations: dict[str, dict[str, _Count]] = {}
    create_seconds: _Seconds = 0
    types: dict[str, _LocalType] = {}

    def freeze(self) -> LocalCloud:
        return LocalCloud(
            locations=self.locations,
            create_seconds=self.create_seconds,
            architectures={name: kind.architecture for name, kind in self.types.items()},
        )


class _GcpType(_Table):
    architecture: _Text


class _Gcp(_Table):
    project: Annotated[str, AfterValidator(_project)]
    network: str = ""
    subnetwork: str = ""
    service_account: str = ""
    boot_image: _Text = COS
    boot_image_arm64: _Text = COS_ARM64
    disk_gb: Annotated[int, Field(ge=10, le=65536)] = 30
    disk_type: str = ""
    external_address: bool = False
    secure_boot: bool = True
    environment: dict[str, str] = {}
    database_secret: Annotated[str, AfterValidator(_secret)] = ""
    types: dict[str, _GcpType] = {}

    def freeze(self) -> GcpCloud:
        return GcpCloud(
            project=self.project,
            network=self.network,
            subnetwork=self.subnetwork,
            service_account=self.service_account,
            boot_image=self.boot_image,
            boot_image_arm64=self.boot_image_arm64,
            disk_gb=self.disk_gb,
            disk_type=self.disk_type,
            external_address=self.external_address,
            secure_boot=self.secure_boot,
            environment=self.environment,
            database_secret=self.database_secret,
            architectures={name: kind.architecture for name, kind in self.types.items()},
        )


class _Toleration(_Table):
    key: _Text | None = None
    operator: Literal["Exists", "Equal"] = "Equal"
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    toleration_seconds: Annotated[int, Field(ge=0)] | None = None

    def freeze(self) -> dict[str, object]:
        said = {
            "key": self.key,
            "operator": self.operator,
            "value": self.value,
            "effect": self.effect,
            "tolerationSeconds": self.toleration_seconds,
        }
        return {name: value for name, value in said.items() if value is not None}


class _Pipeline(_Table):
    image_pull_secrets: list[_Text] = []
    node_selector: dict[str, str] = {}
    tolerations: list[_Toleration] = []
    priority_class: _Text | None = None
    non_root: bool = False

    def freeze(self) -> PodPlacement:
        return PodPlacement(
            image_pull_secrets=tuple(self.image_pull_secrets),
            node_selector=dict(self.node_selector),
            tolerations=tuple(toleration.freeze() for toleration in self.tolerations),
            priority_class=self.priority_class,
            non_root=self.non_root,
        )


class _File(_Table):
    max_machines_total: _Count | None = None
    pools: dict[str, _Pool] = {}
    pipelines: dict[str, _Pipeline] = {}
    local: _Local = _Local()
    gcp: _Gcp | None = None


_EXAMPLES = {
    "type": 'type = "small"',
    "provider": 'provider = "local"',
    "image": 'image = "registry.example/orca-worker:1"',
    "locations": 'locations = ["east"], here or in each of its types',
    "max_machines": "max_machines = 5",
    "idle_seconds": 'idle_seconds = "10m"',
    "architecture": 'architecture = "arm64"',
    "project": 'project = "my-project-123"',
    "types": 'at least one [[…types]] with type = "small"',
}


def _table_of(path: KeyPath) -> type[_Table] | None:
    """Say which table stands at a path; None where names are free."""
    match path:
        case ():
            return _File
        case ("pools", str()):
            return _Pool
        case ("pools", str(), "types", int()):
            return _Type
        case ("local",):
            return _Local
        case ("local", "types", str()):
            return _LocalType
        case ("gcp",):
            return _Gcp
        case ("gcp", "types", str()):
            return _GcpType
        case ("pipelines", str()):
            return _Pipeline
        case ("pipelines", str(), "tolerations", int()):
            return _Toleration
    return None


_HOMES: Mapping[type[_Table], str] = {
    _File: "to the top of the file, before the first [table]",
    _Pool: "to a pool, [pools.NAME]",
    _Type: "to a pool's type, [[pools.NAME.types]]",
    _Local: "to [local]",
    _LocalType: "to a type of the local cloud, [local.types.NAME]",
    _Gcp: "to [gcp]",
    _GcpType: "to a type of Google Cloud, [gcp.types.NAME]",
    _Pipeline: "to a pipeline, [pipelines.NAME]",
    _Toleration: "to a pipeline's toleration, [[pipelines.NAME.tolerations]]",
}


# What is wrong, in plain words.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    """One mistake. `missing` is for a key that is not there; `instead` names the key that an unknown one stands for."""

    path: KeyPath
    says: str
    missing: bool = False
    instead: str | None = None


class _Context(TypedDict):
    ge: NotRequired[float]
    le: NotRequired[float]
    error: NotRequired[ValueError]
    expected: NotRequired[str]


_WANTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
}
_KINDS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (bool, "true or false"),  # before int: a bool is one
    (int, "a whole number"),
    (float, "a number with a fraction"),
    (str, "text"),
    (list, "a list"),
    (dict, "a table"),
    ((date, time), "a date or a time"),
)


def _words(details: ErrorDetails) -> str:
    kind, context = details["type"], cast("_Context", details.get("ctx", {}))
    if kind in _WANTED:
        found = next((name for of, name in _KINDS if isinstance(details["input"], of)), "something else")
        return f"must be {_WANTED[kind]}, not {found}"
    if kind == "value_error" and "error" in context:
        return str(context["error"])
    if kind == "greater_than_equal" and "ge" in context:
        return f"must be at least {context['ge']:g}"
    if kind == "less_than_equal" and "le" in context:
        return f"must be at most {context['le']:.0f}"
    if kind == "too_short":
        return f"must not be empty; add {_EXAMPLES['types']}"
    if kind == "literal_error" and "expected" in context:
        return f"must be {context['expected']}"
    if kind == "finite_number":
        return "must be a finite number"
    return "cannot be used"


def _problem_of(details: ErrorDetails) -> _Problem:
    path = details["loc"]
    if details["type"] == "missing":
        return _missing(path)
    if details["type"] != "extra_forbidden":
        return _Problem(path=path, says=_words(details))
    key, table = str(path[-1]), _table_of(path[:-1])
    known = sorted(table.model_fields) if table else []
    what = "table" if isinstance(details["input"], dict) else "key"
    near = _nearest(key, known)
    homes = [home for other, home in _HOMES.items() if key in other.model_fields]
    if homes:
        return _Problem(path=path, says=f"unknown {what} here; it belongs {homes[0]}")
    if near:
        return _Problem(path=path, says=f"unknown {what}; did you mean {near}?", instead=near)
    return _Problem(path=path, says=f"unknown {what}; the keys here are {', '.join(known)}")


def _missing(path: KeyPath) -> _Problem:
    return _Problem(path=path, says=f"missing; add {_EXAMPLES.get(str(path[-1]), 'it')}", missing=True)


def _nearest(name: str, known: tuple[str, ...] | list[str]) -> str | None:
    if not 2 < len(name) <= _LONGEST_NAME:
        return None
    close = difflib.get_close_matches(name.lower(), known, n=1)
    begins_alike = [other for other in known if other.startswith(name) or name.startswith(other)]
    return next(iter(close + begins_alike), None)


# What needs more than one key: on the raw document, of which nothing is sure yet.


def _raw_pools(document: Mapping[str, object]) -> list[tuple[str, dict[str, object]]]:
    pools = document.get("pools")
    return [(name, pool) for name, pool in pools.items() if isinstance(pool, dict)] if isinstance(pools, dict) else []


def _name_problems(names: list[str]) -> Iterator[_Problem]:
    makers: tuple[tuple[str, Callable[[str], str]], ...] = (
        ("machines", lambda name: machine_name(name, 1)),
        ("stack", lambda name: derived_stack("family", "machines", name)),
    )
    holders: dict[tuple[str, str], str] = {}
    for name in names:
        try:
            _text(name)
        except ValueError as error:
            yield _Problem(path=("pools", name), says=f"a pool's name {error}; rename the pool")
            continue
        taken = {what: holders.setdefault((what, make(name)), name) for what, make in makers}
        clash = next(((what, holder) for what, holder in taken.items() if holder != name), None)
        if clash:
            says = f"its {clash[0]} would have the name of pool {_quoted(clash[1])}'s; rename one of the two pools"
            yield _Problem(path=("pools", name), says=says)


def _gcp_problems(document: Mapping[str, object]) -> Iterator[_Problem]:
    """A pool on Google Cloud needs to know the project, and its locations are zones."""
    for name, pool in _raw_pools(document):
        if pool.get("provider") != "gcp":
            continue
        if "gcp" not in document:
            says = 'needs [gcp] with project = "my-project-123", in which its machines are made'
            yield _Problem(path=("pools", name, "provider"), says=says)
        types = pool.get("types")
        entries = [(("types", number), entry) for number, entry in enumerate(types if isinstance(types, list) else [])]
        for path, table in [((), pool), *entries]:
            locations = table.get("locations") if isinstance(table, dict) else None
            for zone in locations if isinstance(locations, list) else []:
                if isinstance(zone, str) and not ZONE.fullmatch(zone):
                    says = f"{_quoted(zone)} is no zone of Google Cloud; write one such as us-central1-a"
                    yield _Problem(path=("pools", name, *path, "locations"), says=says)


def _pool_problems(name: str, pool: Mapping[str, object]) -> Iterator[_Problem]:
    types = pool.get("types")
    entries = types if isinstance(types, list) else []
    seen: dict[tuple[str, bool, frozenset[str]], int] = {}
    lacking = False
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict):
            continue
        locations = entry.get("locations", pool.get("locations"))
        lacking = lacking or locations is None
        if not isinstance(entry.get("type"), str) or not isinstance(locations, list):
            continue
        # A spot and a lasting machine of one type are two offers.
        key = (entry["type"], entry.get("spot") is True, frozenset(map(str, locations)))
        first = seen.setdefault(key, number)
        if first != number:
            says = f"the same type and locations as #{first + 1}, which is tried before; remove one of the two"
            yield _Problem(path=("pools", name, "types", number), says=says)
    if lacking:
        yield _missing(("pools", name, "locations"))


# How it is reported.


def _placed(
    problems: list[_Problem], document: Mapping[str, object], lines: Mapping[KeyPath, int]
) -> list[tuple[int, str]]:
    """Give each problem its line and its place in words, in the file's order."""
    # `idle_sec` says already that idle_seconds is not there.
    meant = {(*problem.path[:-1], problem.instead) for problem in problems if problem.instead}
    placed = [
        (_line_of(problem.path, lines), f"{_where(problem.path, document)}: {problem.says}")
        for problem in problems
        if not (problem.missing and problem.path in meant)
    ]
    return sorted(placed, key=lambda one: one[0])


def _report(placed: list[tuple[int, str]], source: str, unread: int) -> str:
    shown = [f"{source}:{line}: {says}" for line, says in placed[:_MOST_REPORTED]]
    more = len(placed[_MOST_REPORTED:]) + unread
    return "\n".join([*shown, f"{source}: and {more} more; mend these first"] if more else shown)


def _line_of(path: KeyPath, lines: Mapping[KeyPath, int]) -> int:
    return next((lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in lines), 1)


def _where(path: KeyPath, document: Mapping[str, object]) -> str:
    """Name the place as the file would write it: `[pools.gpu] image`, `[[pools.gpu.types]] #2 wait`."""
    tables, value = 0, cast("object", document)
    for depth, key in enumerate(path, 1):
        value = _inside(value, key)
        if isinstance(value, dict):
            tables = depth
    table, rest = path[:tables], path[tables:]
    words = [_key_text(key) if isinstance(key, str) else f"#{key + 1}" for key in rest]
    return " ".join(([_header(table)] if table else []) + words)


def _inside(value: object, key: str | int) -> object:
    if isinstance(value, dict):
        return value.get(key)
    return value[key] if isinstance(value, list) and isinstance(key, int) and key < len(value) else None


def _header(table: KeyPath) -> str:
    dotted = ".".join(_key_text(key) for key in table if isinstance(key, str))
    number = table[-1]
    return f"[[{dotted}]] #{number + 1}" if isinstance(number, int) else f"[{dotted}]"


def _key_text(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) and len(key) <= _LONGEST_SHOWN else _quoted(key)


def _quoted(text: str) -> str:
    short = text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "…"
    return json.dumps(short, ensure_ascii=not short.isprintable()).replace("\x7f", "\\u007f")
