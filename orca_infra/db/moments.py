"""Times as Postgres has them and Python has not: infinite ones, and those of years that a datetime does not know.

One row with such a time must not keep every other from being read, so they become the first or the last moment that
calculations have room beside. Imported for its effect, by orca_infra.db.connection alone.
"""

from __future__ import annotations

from datetime import UTC, datetime

import psycopg
from psycopg.abc import Buffer
from psycopg.types.datetime import TimestamptzLoader

FIRST = datetime(1000, 1, 1, tzinfo=UTC)
LAST = datetime(9000, 1, 1, tzinfo=UTC)


class _BoundedLoader(TimestamptzLoader):
    """Reads what it can, as psycopg does but faster by much, and the rest as FIRST or LAST."""

    def load(self, data: Buffer) -> datetime:
        text = bytes(data)
        try:
            return min(max(datetime.fromisoformat(text.decode()), FIRST), LAST)
        except ValueError:  # another date style, perhaps
            pass
        try:
            return min(max(super().load(data), FIRST), LAST)
        except (psycopg.DataError, OverflowError):
            return FIRST if text.startswith(b"-") or text.endswith(b"BC") else LAST


psycopg.adapters.register_loader("timestamptz", _BoundedLoader)
