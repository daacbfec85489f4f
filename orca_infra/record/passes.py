"""Keep what a pass decided: written before anything is done, so that a pass that was cut short is told about, too.

A pass that has nothing to do costs nothing here, unless it says something else of why than the one before; and one that does
something costs what has changed (frames.py).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from orca_infra import __version__
from orca_infra.db.connection import Database, Transaction, load_queries
from orca_infra.errors import NotLeader
from orca_infra.log import Log
from orca_infra.machines.model import Make
from orca_infra.record.codec import encode
from orca_infra.record.decided import Decided, MachinesDecided, RuntimesDecided, Scope
from orca_infra.record.frames import Frame, Thinned
from orca_infra.record.words import Decision, decisions_of
from orca_infra.settings import Settings

SQL = load_queries("record")
_MESSAGE_LIMIT = 2000

Result = TypeVar("Result")
#: What was decided, and what it came to when that was an error.
_Came = tuple[tuple[Decision, ...], str, str]


@dataclass(slots=True)
class Kept:
    """What the pass under way came to; its maker fills it in."""

    changed: int = 0


class PassRecord:
    """The record of one scope's passes. For one thread, the one that makes them."""

    def __init__(self, database: Database, scope: Scope, *, passes: int, seconds: float, log: Log) -> None:
        """At most so many passes are kept, none longer than `seconds`; 0 passes: nothing is."""
        self._database = database
        self._scope = scope
        self._bounds = {"scope": scope, "passes": passes, "seconds": seconds}
        self._log = log
        self._last: _Came | None = None
        self._frame: tuple[int, Frame] | None = None
        self._standing: frozenset[tuple[tuple[str, ...], str]] | None = None

    @classmethod
    def of(cls, scope: Scope, database: Database, settings: Settings, log: Log) -> PassRecord:
        """The record that the settings ask for."""
        return cls(database, scope, passes=settings.record_passes, seconds=settings.record_seconds, log=log)

    @contextlib.contextmanager
    def keeping(self, decided: Decided) -> Iterator[Kept]:
        """Keep a pass: what it decided, when the block begins, and what came of it, when it ends.

        What keeps it from being written is logged and no more, but for NotLeader. Errors of the block go on; after NotLeader
        nothing is written.
        """
        kept = Kept()
        if not self._bounds["passes"]:
            yield kept
            return
        decisions = decisions_of(decided)
        number = self._begin(decided, decisions) if self._is_news(decisions) else None
        try:
            yield kept
        except NotLeader:
            raise
        except Exception as error:
            came = (decisions, type(error).__name__, str(error)[:_MESSAGE_LIMIT])
            if number is None and came != self._last:  # of what an earlier pass has begun
                number = self._begin(decided, decisions)
            self._end(number, decided, kept, came)
            raise
        if number is None and kept.changed:  # what was open from before was done
            number = self._begin(decided, decisions)
        self._end(number, decided, kept, (decisions, "Done", ""))

    def prune(self) -> None:
        """Delete what is older than its time."""
        with self._database.transaction() as transaction:
            self._bound(transaction)

    def _bound(self, transaction: Transaction) -> None:
        transaction.run(SQL["bound_passes"], self._bounds)
        transaction.run(SQL["forget_frames"], {"scope": self._scope})

    def _is_news(self, decisions: Sequence[Decision]) -> bool:
        """Whether anything is to be done, or the reasons for doing nothing are others than at the last pass."""
        if self._standing is None:
            self._remember()
        before, self._standing = self._standing, _standing(decisions)
        return any(one.acts for one in decisions) or (before is not None and before != self._standing)

    def _remember(self) -> None:
        """What the loop before this one said last."""

        def read() -> list[dict[str, Any]]:
            with self._database.snapshot() as transaction:
                return transaction.dicts(SQL["last_decisions"], {"scope": self._scope})

        for row in self._guarded(read) or []:
            decisions = tuple(Decision(**{**one, "about": tuple(one["about"])}) for one in row["decisions"])
            self._standing = _standing(decisions)

    def _begin(self, decided: Decided, decisions: Sequence[Decision]) -> int | None:
        def write() -> int:
            with self._database.transaction() as transaction:
                frame, thinned = self._thinned(transaction, decided)
                number = transaction.value(
                    SQL["begin_pass"],
                    {
                        "scope": self._scope,
                        "decided_at": decided.now,
                        "version": __version__,
                        **_columns(decisions),
                        "record": encode(thinned.decided, thinned.lacks),
                        "frame": frame[0],
                    },
                )
                self._bound(transaction)
            self._frame = frame
            return int(number)

        return self._guarded(write)

    def _thinned(self, transaction: Transaction, decided: Decided) -> tuple[tuple[int, Frame], Thinned]:
        """The pass without what its frame has, and the frame: that of the passes before, or this pass, kept whole."""
        if self._frame is not None and transaction.dicts(SQL["hold_frame"], {"frame": self._frame[0]}):
            thinned = self._frame[1].thin(decided)
            if thinned.changed <= self._frame[1].changed_most:
                return self._frame, thinned
        frame = Frame(decided)
        number = transaction.value(SQL["begin_frame"], {"scope": self._scope, "record": encode(decided)})
        return (int(number), frame), frame.thin(decided)

    def _end(self, number: int | None, decided: Decided, kept: Kept, came: _Came) -> None:
        before, self._last = self._last, came
        if number is None:
            return

        def write() -> None:
            with self._database.transaction() as transaction:
                if came == before and not kept.changed:  # the same as the last time, again in vain
                    transaction.run(SQL["forget_pass"], {"id": number})
                    return
                made = _made(transaction, decided)
                parameters = {"id": number, "outcome": came[1], "message": came[2], "changed": kept.changed}
                transaction.run(SQL["end_pass"], {**parameters, **_columns(made)})

        self._guarded(write)

    def _guarded(self, act: Callable[[], Result]) -> Result | None:
        try:
            return act()
        except NotLeader:
            raise
        except Exception as error:  # noqa: BLE001  (no pass is worth less than its record; the fault is not hidden)
            self._log.warning("pass not recorded", scope=self._scope, kind=type(error).__name__, why=str(error))
            return None


def _standing(decisions: Sequence[Decision]) -> frozenset[tuple[tuple[str, ...], str]]:
    return frozenset((one.about, one.why) for one in decisions if not one.acts)


def _columns(decisions: Sequence[Decision]) -> dict[str, object]:
    return {
        "about": sorted({name for one in decisions for name in one.about}),
        "decisions": json.dumps([asdict(one) for one in decisions]),
    }


def _made(transaction: Transaction, decided: Decided) -> list[Decision]:
    """What the pass made: names are given only in it. The reason is that of the decision to make some."""
    since = {"since": decided.now}
    if isinstance(decided, MachinesDecided):
        reasons = {one.pool: one.why for one in decided.plan.actions if isinstance(one, Make)}
        return [_tried(row, reasons) for row in transaction.dicts(SQL["machines_tried"], since)] if reasons else []
    if not isinstance(decided, RuntimesDecided) or not decided.plan.births:
        return []
    sizes = {birth.pool.name: birth.pool.size for birth in decided.plan.births}
    born: dict[str, list[str]] = {}
    for row in transaction.dicts(SQL["pods_born"], since):
        born.setdefault(row["pool"], []).append(row["name"])
    return [
        Decision(
            about=(*names, pool),
            decided=f"{names[0]} was born for {pool}" + (f", and {len(names) - 1} more" if len(names) > 1 else ""),
            why=f"it keeps {sizes.get(pool, 0)} Pods",
        )
        for pool, names in born.items()
    ]


def _tried(row: dict[str, Any], reasons: dict[str, str]) -> Decision:
    came = "was made" if row["made"] else f"was not made ({row['reason'] or 'its end is not known yet'})"
    return Decision(
        about=(row["name"], row["pool"]),
        decided=f"{row['name']} {came}: {row['type']} in {row['location']}",
        why=reasons.get(row["pool"], ""),
    )
