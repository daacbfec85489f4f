"""The runtimes: who has which, what they cost, and how one is extended or stopped."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from orca_infra.db.connection import Database
from orca_infra.errors import OrcaError, Refused
from orca_infra.kube.kinds import POD, SECRET, Ref
from orca_infra.runtimes.launch import LaunchHands
from orca_infra.runtimes.model import EndReason
from orca_infra.runtimes.observe import SQL

_EXTEND_MOST_SECONDS = 10 * 366 * 86400
_POLL_SECONDS = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """A runtime.

    Attributes:
        pool: that its Pod waited in; None for a cold start.
        burning_rate: credits a second.
        ready_at: since when its Pod is Ready; None: it still starts.
        problem, refused: why it is not Ready yet.
        ending_reason, ending_detail: why it ends, once that is written down.
        ended_at: when its end began; None until nothing is left of it.
        credits: what it has cost up to now.

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
    ending_detail: str
    ended_at: datetime | None
    credits: float

    @property
    def state(self) -> str:
        """`starting`, then `ready`, `ending` and `ended`."""
        if self.ended_at is not None:
            return "ended"
        if self.ending_reason is not None:
            return "ending"
        return "ready" if self.ready_at is not None else "starting"

    @property
    def message(self) -> str:
        """Why it is not ready yet, or why it ended; empty when there is nothing to say."""
        if self.ending_reason is not None:
            return f"{self.ending_reason}: {self.ending_detail}" if self.ending_detail else self.ending_reason
        return self.refused or self.problem


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageLine:
    """What one runtime has cost: exactly once it has ended, up to now while it runs (`ended_at` is None then)."""

    runtime: UUID
    user: str
    environment: str
    pool: str | None
    warm: bool
    assigned_at: datetime
    ended_at: datetime | None
    seconds: float
    burning_rate: float
    credits: float
    reason: str


def list_runtimes(database: Database, user: str | None = None) -> list[Runtime]:
    """All runtimes that have not ended, or one user's, the oldest first."""
    with database.snapshot() as transaction:
        return transaction.rows(Runtime, SQL["runtimes"], {"user": user, "id": None})


def find_runtime(database: Database, id: UUID, user: str | None = None) -> Runtime | None:  # noqa: A002 - its name everywhere
    """One runtime, also one that has ended not too long ago; None when there is none, or it is not this user's."""
    with database.snapshot() as transaction:
        found = transaction.rows(Runtime, SQL["runtimes"], {"user": user, "id": id})
    return found[0] if found else None


def find_ids(database: Database, beginning: str, *, ended: bool = False) -> list[UUID]:
    """Up to two runtimes whose ids begin so, of those that live; with `ended` of all that are kept."""
    with database.snapshot() as transaction:
        rows = transaction.dicts(SQL["ids_beginning"], {"beginning": f"{beginning}%", "ended": ended})
    return [row["id"] for row in rows]


def wait_for_runtime(database: Database, id: UUID, seconds: float) -> Runtime | None:  # noqa: A002
    """The runtime, as soon as it is no longer starting or the time is over; None when there is none."""
    until = time.monotonic() + seconds
    while True:
        found = find_runtime(database, id)
        left = until - time.monotonic()
        if found is None or found.state != "starting" or left <= 0:
            return found
        time.sleep(min(_POLL_SECONDS, left))


def read_usage(database: Database, user: str) -> list[UsageLine]:
    """What each of a user's runtimes has cost, the newest first."""
    with database.snapshot() as transaction:
        return transaction.rows(UsageLine, SQL["usage"], {"user": user})


def extend_runtime(
    hands: LaunchHands,
    id: UUID,  # noqa: A002
    seconds: float,
    *,
    within_cull: bool = False,
) -> Runtime | None:
    """Have a runtime live at least so long from now on; never shorter than before. None: there is none that lives.

    Args:
        hands: what to do it with.
        id: of the runtime.
        seconds: from now on.
        within_cull: at most what its pool gave it at first (`cull.seconds`); for its user, who shall come back and say that
            it is still needed.

    Raises:
        Refused: the seconds are none, or its time is over already.

    """
    if not 0 < seconds <= _EXTEND_MOST_SECONDS:
        raise Refused(
            f"a runtime is extended by more than 0 and at most {_EXTEND_MOST_SECONDS} seconds, not {seconds:g}"
        )
    with hands.database.transaction() as transaction:
        transaction.run(SQL["extend_runtime"], {"id": id, "seconds": seconds, "within_cull": within_cull})
        found = transaction.rows(Runtime, SQL["runtimes"], {"user": None, "id": id})
        now: datetime = transaction.value("select now()")
    if not found or found[0].state in {"ending", "ended"}:
        return None
    if found[0].expires_at is not None and found[0].expires_at <= now:
        raise Refused(f"the time of runtime {id} is over, and it is about to be culled: launch another")
    hands.log.info("runtime extended", id=str(id), until=str(found[0].expires_at))
    return found[0]


def end_runtime(hands: LaunchHands, id: UUID, reason: str = EndReason.STOPPED) -> bool:  # noqa: A002
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
