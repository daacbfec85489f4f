"""No secret leaves in a preview: what is known to be one is taken out, in whatever spelling."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable
from urllib.parse import quote, unquote, urlsplit

SECRET = "[secret]"  # noqa: S105  (what stands instead of one)
#: Shorter ones would be found in everything.
_SHORTEST = 5
_PASSWORD = re.compile(r"(?:^|\s)password\s*=\s*('(?:[^'\\]|\\.)*'|\S+)")
# A worker's token; a digest has its algorithm before it.
_TOKEN = re.compile(r"(?<![0-9a-z:])[0-9a-f]{64}(?![0-9a-z])")


class Redactor:
    """Takes values out of texts: as they are, in base64, in a URL and escaped."""

    def __init__(self, values: Iterable[str]) -> None:
        spelled = {form for value in values for form in _spellings(value)}
        # The longest first, since one may hold another.
        ordered = sorted((form for form in spelled if len(form) >= _SHORTEST), key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, ordered))) if ordered else None

    def __call__(self, text: str) -> str:
        text = self._known.sub(SECRET, text) if self._known else text
        return _TOKEN.sub(SECRET, text)


def passwords_of(url: str) -> list[str]:
    """The password of a connection URL or of a conninfo, as it stands and decoded."""
    found = [match.strip("'") for match in _PASSWORD.findall(url)]
    try:
        password = urlsplit(url).password
    except ValueError:
        password = None
    return [*found, *([password, unquote(password)] if password else [])]


def _spellings(value: str) -> set[str]:
    stripped = value.strip()
    raw = stripped.encode(errors="surrogateescape")
    encoded = {base64.b64encode(raw + end).decode() for end in (b"", b"\n")}
    urls = {base64.urlsafe_b64encode(raw).decode(), quote(stripped, safe="", errors="replace")}
    # The whole last group of an encoded text depends on what follows it.
    escaped = {json.dumps(stripped, ensure_ascii=ascii_only)[1:-1] for ascii_only in (True, False)}
    return {stripped, repr(stripped)[1:-1], *escaped, *encoded, *urls}
