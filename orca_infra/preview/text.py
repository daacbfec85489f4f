"""A preview for a terminal, and for programs. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from orca_infra.preview.model import Preview
from orca_infra.preview.words import counts
from orca_infra.printable import printable

_SIGNS = {"create": "+", "update": "~", "replace": "±", "delete": "-", "import": "="}


def plain(preview: Preview) -> str:
    """The preview as text, with every diff."""
    return "\n".join(_lines(preview)) + "\n"


def as_json(preview: Preview) -> dict[str, Any]:
    """The preview for programs."""
    return {
        **asdict(preview),
        "counts": {one.stack: one.counts() for one in preview.stacks},
        "errors": preview.errors,
        "exit_code": preview.exit_code,
    }


def _lines(preview: Preview) -> Iterator[str]:
    yield f"stack {preview.stack}"
    for name, said in counts(preview):
        yield f"  {name}: {said.replace('**', '')}"
    for error in preview.errors:
        yield from (f"failed: {printable(line)}" for line in error.splitlines())
    for note in preview.notes:
        yield f"note: {printable(note)}"
    for stack, breach in preview.breaches:
        yield f"{'broken' if breach.mandatory else 'advisory'}, stack {stack}: {_one_line(breach.message)}"
    for one in preview.stacks:
        if one.note:
            yield f"stack {one.stack}: {printable(one.note)}"
        for change in one.changes:
            yield printable(f"{_SIGNS[change.op]} {change.type} {change.name} ({change.op}, stack {one.stack})")
            yield from (f"    {printable(line)}" for line in change.diff)
    if preview.decisions is not None and not preview.decisions.error:
        yield f"decisions for {printable(preview.decisions.source)}:"
        for decided in preview.decisions.decided:
            yield f"{'!' if decided.acts else ' '} {decided.scope}: {_one_line(decided.sentence)}"
        if not preview.decisions.decided:
            yield "  nothing"


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))
