"""The raw keys of a state's backend, where that is known how: a folder, or Pulumi's table in Postgres.

The engine offers no way to read a state that it refuses, nor to look at locks without an operation; and in a folder it leaves
the empty folders of every stack that was ever dropped.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from orca_infra.db.connection import Session
from orca_infra.errors import Conflict, Transient

#: What the engine keeps beside each file, with this at the end of its name.
_ATTRIBUTES = ".attrs"
#: The end of the name of a file that the engine has not written to its end; in a folder only.
ASIDE = ".tmp"


class _Folder:
    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, key: str) -> bytes | None:
        path = self._root / key
        return path.read_bytes() if path.is_file() else None

    def has(self, key: str) -> bool:
        return (self._root / key).exists()

    def keys(self, prefix: str) -> list[str]:
        folder, _, begin = prefix.rpartition("/")
        found = sorted(path for path in (self._root / folder).glob("*") if path.name.startswith(begin))
        return [str(path.relative_to(self._root)) for path in found if path.suffix in {".json", ASIDE}]

    def delete(self, key: str) -> None:
        for path in (self._root / key, self._root / f"{key}{_ATTRIBUTES}"):
            path.unlink(missing_ok=True)

    def forget(self, prefix: str) -> None:
        folder = self._root / prefix
        with suppress(OSError):  # there is something in it, or none
            folder.rmdir()


class _Table:
    """Keys in Postgres. The engine puts the URL's path, which is the database's name, before every key."""

    def __init__(self, session: Session, prefixes: set[str]) -> None:
        self._session = session
        self._prefixes = sorted(prefixes)

    def read(self, key: str) -> bytes | None:
        row = self._session.row(
            "select data->>'data' from pulumi_state where key = any(%(keys)s)", {"keys": self._full(key)}
        )
        return base64.b64decode(row[0]) if row else None

    def has(self, key: str) -> bool:
        if not self._is_there():
            return False
        found = self._session.row("select 1 from pulumi_state where key = any(%(keys)s)", {"keys": self._full(key)})
        return found is not None

    def keys(self, prefix: str) -> list[str]:
        found: list[str] = []
        for full in self._full(prefix) if self._is_there() else ():
            row = self._session.row(
                "select array_agg(key order by key) from pulumi_state where starts_with(key, %(prefix)s)",
                {"prefix": full},
            )
            found += [
                key[len(full) - len(prefix) :] for key in (row[0] if row and row[0] else []) if key.endswith(".json")
            ]
        return found

    def delete(self, key: str) -> None:
        self._session.row("delete from pulumi_state where key = any(%(keys)s)", {"keys": self._full(key)})

    def forget(self, prefix: str) -> None:
        """Nothing: where there are no folders, none is left empty."""

    def _is_there(self) -> bool:
        """Whether an engine was ever here; the first one makes the table."""
        return self._session.row("select 1 from pg_class where oid = to_regclass('pulumi_state')") is not None

    def _full(self, key: str) -> list[str]:
        return [f"{prefix}/{key}" for prefix in self._prefixes]


Backend = _Folder | _Table


@contextmanager
def open_backend(url: str) -> Iterator[Backend]:
    """The backend of this URL. Raises Conflict for one of another kind, Transient when it is away."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        try:
            yield _Folder(Path(unquote(parts.netloc + parts.path)).expanduser())
        except OSError as error:
            raise Transient(f"the folder of the engine's state cannot be used: {error.strerror}") from error
    elif parts.scheme in {"postgres", "postgresql"}:
        session = Session(url)
        try:
            yield _Table(session, {parts.path.strip("/"), unquote(parts.path).strip("/")})
        finally:
            session.close()
    else:
        raise Conflict(f"what is in a {parts.scheme} backend is for `pulumi cancel` and `pulumi state repair` to mend")
