"""How mistakes in orca.toml are reported: each at its line, in the file's own notation, in the file's order."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from orca_infra.config.lines import KeyPath

_MOST_REPORTED = 20
_LONGEST_NAME = 200
_LONGEST_SHOWN = 60
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One mistake. `missing` is for a key that is not there; `instead` names the key that an unknown one stands for."""

    path: KeyPath
    says: str
    missing: bool = False
    instead: str | None = None


def placed(
    problems: list[Problem], document: Mapping[str, object], lines: Mapping[KeyPath, int]
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


def report(placed: list[tuple[int, str]], source: str, unread: int) -> str:
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
    return key if _BARE_KEY.fullmatch(key) and len(key) <= _LONGEST_SHOWN else quoted(key)


def quoted(text: str) -> str:
    short = text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "…"
    return json.dumps(short, ensure_ascii=not short.isprintable()).replace("\x7f", "\\u007f")


def nearest(name: str, known: tuple[str, ...] | list[str]) -> str | None:
    if not 2 < len(name) <= _LONGEST_NAME:
        return None
    close = difflib.get_close_matches(name.lower(), known, n=1)
    begins_alike = [other for other in known if other.startswith(name) or name.startswith(other)]
    return next(iter(close + begins_alike), None)
