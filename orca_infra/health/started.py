"""How long runs were queued that workers took: the loop has no part in it, so that it looks."""

from __future__ import annotations

from datetime import datetime

from orca_infra.db.connection import Database, load_queries
from orca_infra.metrics import METRICS

_SQL = load_queries("measure")


class StartedRuns:
    """Looks now and then. A run that starts and ends between two looks is not seen."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._since: datetime | None = None

    def look(self) -> None:
        """Measure what was started since the last look; the first only marks the time. Raises Transient."""
        with self._database.snapshot() as transaction:
            now: datetime = transaction.value("select now()")
            found = transaction.dicts(_SQL["started_on_workers"], {"since": self._since}) if self._since else []
        self._since = now
        for row in found:
            METRICS.run_started("worker", row["queued_seconds"])
