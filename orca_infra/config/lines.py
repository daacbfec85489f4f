"""Where each key of a TOML file stands, so that an error can name its line.

`tomllib` gives values without positions. This reads only the outline (headers, keys, where values end) of text that
`tomllib` has already accepted, so it checks nothing and, should it lose its way, ends early instead of raising.
"""

from __future__ import annotations

import bisect
import re
import tomllib
from contextlib import suppress

KeyPath = tuple[str | int, ...]
"""The way to a value: keys of tables and numbers (from 0) of array entries, such as `("pools", "gpu", "types", 0)`."""

# Deeper places than any configuration has are not kept; an error there gets the line of the part above.
_DEEPEST = 8
_BLANK = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
_DOT = re.compile(r"[ \t]*\.[ \t]*")
_KEY = re.compile(r"""[A-Za-z0-9_-]+|"(?:\\.|[^"\\\n])*"|'[^'\n]*'""")
_STRING = re.compile(
    r'"""(?:\\[\s\S]|[^\\])*?"""(?!")'  # up to two quotes may stand before the closing three
    r"|'''[\s\S]*?'''(?!')"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'"
)
_BARE = re.compile(r"[^,\]}\n#]+")


def key_lines(text: str) -> dict[KeyPath, int]:
    """Find the line (from 1) of every table, key and array entry of valid TOML.

    A table has the line of its own header; one that is only implied has that of its first mention.
    """
    outline = _Outline(text.replace("\r\n", "\n"))
    with suppress(_LostError, RecursionError):
        outline.read()
    return outline.lines


class _LostError(Exception):
    """The text is not what was expected here; what was found so far is kept."""


class _Outline:
    def __init__(self, text: str) -> None:
        self.lines: dict[KeyPath, int] = {}
        self._text = text
        self._at = 0
        self._table: KeyPath = ()
        self._last_entry: dict[KeyPath, int] = {}  # of each array of tables
        self._newlines = [match.start() for match in re.finditer("\n", text)]

    def read(self) -> None:
        """Read the whole text: headers, and the keys below each."""
        self._skip(_BLANK)
        while self._at < len(self._text):
            if self._text[self._at] == "[":
                self._header()
            else:
                self._pair(self._table)
            self._skip(_BLANK)

    def _header(self) -> None:
        is_array = self._text.startswith("[[", self._at)
        line = self._line()
        self._at += 2 if is_array else 1
        *parents, last = self._keys()
        path: KeyPath = ()
        for key in parents:
            path = (*path, key)
            self._keep(path, line)
            if path in self._last_entry:
                path = (*path, self._last_entry[path])
        path = (*path, last)
        if is_array:
            self._keep(path, line)
            self._last_entry[path] = self._last_entry.get(path, -1) + 1
            path = (*path, self._last_entry[path])
        if len(path) <= _DEEPEST:
            self.lines[path] = line  # its own header wins over an earlier mention
        self._table = path
        self._at += 2 if is_array else 1

    def _pair(self, path: KeyPath) -> None:
        line = self._line()
        for key in self._keys():
            path = (*path, key)
            self._keep(path, line)
        self._expect("=")
        self._skip(_BLANK)
        self._value(path)

    def _keys(self) -> list[str]:
        """Read a dotted key; of one that is too deep only so much as matters."""
        keys: list[str] = []
        while True:
            self._skip(_BLANK)
            token = self._skip(_KEY)
            if len(keys) <= _DEEPEST:
                keys.append(_plain_key(token))
            if not self._skip(_DOT, optional=True):
                self._skip(_BLANK)
                return keys

    def _value(self, path: KeyPath) -> None:
        first = self._text[self._at : self._at + 1]
        if first == "[":
            self._array(path)
        elif first == "{":
            self._inline_table(path)
        else:
            self._skip(_STRING if first in {'"', "'"} else _BARE)

    def _array(self, path: KeyPath) -> None:
        self._at += 1
        number = 0
        while not self._closes("]"):
            entry = (*path, number)
            self._keep(entry, self._line())
            self._value(entry)
            number += 1

    def _inline_table(self, path: KeyPath) -> None:
        self._at += 1
        while not self._closes("}"):
            self._pair(path)

    def _closes(self, bracket: str) -> bool:
        """Step over blanks and a comma; whether the closing bracket is there, which is stepped over too."""
        self._skip(_BLANK)
        if self._text.startswith(",", self._at):
            self._at += 1
            self._skip(_BLANK)
        if self._text.startswith(bracket, self._at):
            self._at += 1
            return True
        return False

    def _expect(self, character: str) -> None:
        if not self._text.startswith(character, self._at):
            raise _LostError
        self._at += len(character)

    def _skip(self, pattern: re.Pattern[str], *, optional: bool = False) -> str:
        match = pattern.match(self._text, self._at)
        if match is None:
            if optional:
                return ""
            raise _LostError
        self._at = match.end()
        return match.group()

    def _keep(self, path: KeyPath, line: int) -> None:
        if len(path) <= _DEEPEST:
            self.lines.setdefault(path, line)

    def _line(self) -> int:
        return bisect.bisect_left(self._newlines, self._at) + 1


def _plain_key(token: str) -> str:
    if token[0] not in {'"', "'"}:
        return token
    try:
        value = tomllib.loads(f"key = {token}")["key"]  # the escapes of a quoted key are those of a string
    except tomllib.TOMLDecodeError as error:
        raise _LostError from error
    return str(value)
