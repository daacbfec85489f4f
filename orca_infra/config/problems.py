"""What is wrong with an orca.toml, in plain words: what pydantic says of its shape, and what needs more than one key.

The latter is checked on the raw document, of which nothing is sure yet, so that it is reported beside errors of shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import date, time
from typing import NotRequired, TypedDict, cast

from pydantic_core import ErrorDetails

from orca_infra.config.lines import KeyPath
from orca_infra.config.report import Problem, nearest, quoted
from orca_infra.config.shape import EXAMPLES, HOMES, object_name, table_of, text_of_a_name
from orca_infra.machines.model import FAMILY
from orca_infra.machines.providers.gcp_config import ZONE
from orca_infra.names import derived_stack, machine_name


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
        return f"must not be empty; add {EXAMPLES['types']}"
    if kind == "literal_error" and "expected" in context:
        return f"must be {context['expected']}"
    if kind == "finite_number":
        return "must be a finite number"
    return "cannot be used"


def problem_of(details: ErrorDetails) -> Problem:
    path = details["loc"]
    if details["type"] == "missing":
        return _missing(path)
    if details["type"] != "extra_forbidden":
        return Problem(path=path, says=_words(details))
    key, table = str(path[-1]), table_of(path[:-1])
    known = sorted(table.model_fields) if table else []
    what = "table" if isinstance(details["input"], dict) else "key"
    near = nearest(key, known)
    homes = [home for other, home in HOMES.items() if key in other.model_fields]
    if homes:
        return Problem(path=path, says=f"unknown {what} here; it belongs {homes[0]}")
    if near:
        return Problem(path=path, says=f"unknown {what}; did you mean {near}?", instead=near)
    return Problem(path=path, says=f"unknown {what}; the keys here are {', '.join(known)}")


def _missing(path: KeyPath) -> Problem:
    return Problem(path=path, says=f"missing; add {EXAMPLES.get(str(path[-1]), 'it')}", missing=True)


# What needs more than one key: on the raw document, of which nothing is sure yet.


def raw_pools(document: Mapping[str, object]) -> list[tuple[str, dict[str, object]]]:
    pools = document.get("pools")
    return [(name, pool) for name, pool in pools.items() if isinstance(pool, dict)] if isinstance(pools, dict) else []


def text_problems(document: Mapping[str, object]) -> Iterator[Problem]:
    """What the file says is kept in the database and given to programs, and neither takes a NUL character."""
    left: list[tuple[KeyPath, object]] = [((), document)]
    while left:
        path, value = left.pop()
        if isinstance(value, dict):
            left += [((*path, key), inner) for key, inner in value.items()]
        elif isinstance(value, list):
            left += [((*path, number), inner) for number, inner in enumerate(value)]
        if (isinstance(value, str) and "\0" in value) or (path and "\0" in str(path[-1])):
            yield Problem(path=path, says="must not hold a NUL character")


def name_problems(names: list[str]) -> Iterator[Problem]:
    makers: tuple[tuple[str, Callable[[str], str]], ...] = (
        ("machines", lambda name: machine_name(name, 1)),
        ("stack", lambda name: derived_stack("family", "machines", name)),
    )
    holders: dict[tuple[str, str], str] = {}
    for name in names:
        try:
            _pool_name(name)
        except ValueError as error:
            yield Problem(path=("pools", name), says=f"a pool's name {error}; rename the pool")
            continue
        taken = {what: holders.setdefault((what, make(name)), name) for what, make in makers}
        clash = next(((what, holder) for what, holder in taken.items() if holder != name), None)
        if clash:
            says = f"its {clash[0]} would have the name of pool {quoted(clash[1])}'s; rename one of the two pools"
            yield Problem(path=("pools", name), says=says)


def _pool_name(name: str) -> None:
    text_of_a_name(name)
    if name == FAMILY:
        raise ValueError(f"must not be {FAMILY}, under which the pause of the whole stack is kept")


def object_name_problems(document: Mapping[str, object]) -> Iterator[Problem]:
    """What a table of the runtimes is called is what its object on Kubernetes is called."""
    for kind in ("environments", "runtime_pools"):
        tables = document.get(kind)
        for name in tables if isinstance(tables, dict) else ():
            try:
                object_name(name)
            except ValueError as error:
                yield Problem(path=(kind, name), says=f"its name {error}; rename it")


def gcp_problems(document: Mapping[str, object]) -> Iterator[Problem]:
    """A pool on Google Cloud needs to know the project, and its locations are zones."""
    for name, pool in raw_pools(document):
        if pool.get("provider") != "gcp":
            continue
        if "gcp" not in document:
            says = 'needs [gcp] with project = "my-project-123", in which its machines are made'
            yield Problem(path=("pools", name, "provider"), says=says)
        types = pool.get("types")
        entries = [(("types", number), entry) for number, entry in enumerate(types if isinstance(types, list) else [])]
        for path, table in [((), pool), *entries]:
            locations = table.get("locations") if isinstance(table, dict) else None
            for zone in locations if isinstance(locations, list) else []:
                if isinstance(zone, str) and not ZONE.fullmatch(zone):
                    says = f"{quoted(zone)} is no zone of Google Cloud; write one such as us-central1-a"
                    yield Problem(path=("pools", name, *path, "locations"), says=says)


def pool_problems(name: str, pool: Mapping[str, object]) -> Iterator[Problem]:
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
            yield Problem(path=("pools", name, "types", number), says=says)
    if lacking:
        yield _missing(("pools", name, "locations"))
