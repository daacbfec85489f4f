"""The API server's JSON, also where it is nested deeper than Python's own reader goes.

The API server takes objects that are nested 10,000 deep, wherever a definition keeps unknown fields, and lists them together
with all others: one of them must not make the rest unreadable.
"""

from __future__ import annotations

import json
import re
from typing import Any

#: Deeper than anything that Kubernetes itself has, and than anything that is read here.
DEPTH_MOST = 100
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)


def decode(content: bytes) -> Any:
    """The value; what is nested deeper than DEPTH_MOST in one that is nested too deeply is null. Raises ValueError."""
    try:
        return json.loads(content)
    except RecursionError:
        return json.loads(_shallow(content))


def _shallow(content: bytes) -> bytes:
    kept: list[bytes] = []
    depth = begin = 0
    for token in _TOKEN.finditer(content):
        match token[0]:
            case b"[" | b"{":
                depth += 1
                if depth == DEPTH_MOST + 1:
                    kept += content[begin : token.start()], b"null"
            case b"]" | b"}":
                if depth == DEPTH_MOST + 1:
                    begin = token.end()
                depth -= 1
            case _:
                pass
    return b"".join([*kept, content[begin:] if depth <= DEPTH_MOST else b""])
