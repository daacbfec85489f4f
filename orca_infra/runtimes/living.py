"""The runtimes that live: who has which, and how one is stopped."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from orca_infra.db.connection import Database
from orca_infra.errors import OrcaError
from orca_infra.kube.kinds import POD, SECRET, Ref
from orca_infra.runtimes.launch import LaunchHands
from orca_infra.runtimes.model import EndReason
from orca_infra.runtimes.observe import SQL


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """A runtime that has not ended.

    Attributes:
        pool: that its Pod waited in; None for a cold start.
        burning_rate: credits a second.
        ready_at: since when its Pod is Ready; None: it still starts.
        problem, refused: why it is not Ready yet.
        ending_reason: why it ends, once that is written down.

    """

    id: UUID
    pod: str
    namespace: str
    pool: str | None
    user: str
    environment: str
    warm: bool
    burning_rate: float
    assigned_at: datetime
    expires_at: datetime | None
    ready_at: datetime | None
    address: str | None
    problem: str
    refused: str
    ending_reason: str | None


def list_runtimes(database: Database, user: str | None = None) -> list[Runtime]:
    """All runtimes that have not ended, or one user's, the oldest first."""
    with database.snapshot() as transaction:
        return transaction.rows(Runtime, SQL["live_runtimes"], {"user": user})


def end_runtime(hands: LaunchHands, id: UUID, reason: str = EndReason.STOPPED) -> bool:  # noqa: A002 - its name everywhere
    """Stop a runtime, from any process. False: there is none that lives.

    From the moment that its end is written down it burns no credits. Its Secret and its Pod are deleted here, so that a
    person waits for no pass; the loop deletes what is left and ends the rows once both are gone.
    """
    with hands.database.transaction() as transaction:
        rows = transaction.dicts(SQL["pod_of_runtime"], {"id": id})
        if not rows:
            return False
        row = rows[0]
        transaction.run(
            SQL["begin_ending"],
            {"name": row["name"], "reason": str(reason), "detail": "it was stopped", "only_waiting": False},
        )
    hands.log.info("runtime ends", id=str(id), pod=row["name"], reason=str(reason))
    try:
        # No uid: the name is never used twice, and the API process does not know the Secret's.
        hands.kube.delete(Ref(kind=SECRET, namespace=row["namespace"], name=row["name"]))
        if row["uid"] is not None:
            hands.kube.delete(Ref(kind=POD, namespace=row["namespace"], name=row["name"]), uid=row["uid"])
    except OrcaError as error:
        hands.log.warning("runtime not deleted yet: the loop does it", id=str(id), said=str(error))
    return True
