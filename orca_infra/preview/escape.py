"""Text from outside in Markdown: names of people's making that must not become markup, links or mentions. Pure.

Characters that GitHub's Markdown gives a meaning to are written as entities, which it shows and never reads as markup
(https://spec.commonmark.org/0.31.2/#entity-and-numeric-character-references); mentions (@name, #number) are found in the
finished page, so they are taken apart with a character of no width, or stand in `<code>`, where GitHub looks for none.
"""

from __future__ import annotations

import re

from orca_infra.printable import printable

_MARKUP = frozenset("&<>\"'`|*_[]~#!\\$")
_ADDRESS = re.compile(r"(?i)(\w)://|\bwww\.")
_LONGEST_CELL = 300
_FENCE = re.compile(r"`{3,}")


def prose(text: str, longest: int = _LONGEST_CELL) -> str:
    """The text in a sentence or in a table's cell; one line."""
    return _entities(_one_line(text, longest)).replace("@", "@\u200b").replace("&#35;", "&#35;\u200b")


def code(text: str, longest: int = _LONGEST_CELL) -> str:
    """The text as code in a table's cell or in a heading; one line. Empty: nothing."""
    line = _one_line(text, longest)
    return f"<code>{_entities(line).replace('@', '&#64;')}</code>" if line else ""


def fence_for(lines: list[str]) -> str:
    """A fence that none of the lines closes."""
    longest = max((len(run) for line in lines for run in _FENCE.findall(line)), default=2)
    return "`" * (longest + 1)


def _one_line(text: str, longest: int) -> str:
    return shortened(printable(" ".join(text.split())), longest)


def shortened(line: str, longest: int) -> str:
    """The line, or its beginning with a mark, in `longest` characters."""
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def _entities(line: str) -> str:
    encoded = "".join(f"&#{ord(c)};" if c in _MARKUP else c for c in line)
    # GitHub makes links of addresses by themselves, also of www. ones.
    return _ADDRESS.sub(lambda found: f"{found[1]}&#58;//" if found[1] else f"{found[0][:3]}&#46;", encoded)
