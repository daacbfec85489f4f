"""Read the record: which passes there were, and what was decided about a machine, a run, a Pod or a pool, and why."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from orca_infra.db.connection import Database, Transaction
from orca_infra.errors import UserError
from orca_infra.quantity import duration_text
from orca_infra.record.codec import as_json
from orca_infra.record.decided import Scope
from orca_infra.record.now import about_now
from orca_infra.record.passes import SQL
from orca_infra.runs.model import RunLimits

_PASS = re.compile(rf"({'|'.join(Scope)})-([0-9]{{1,18}})", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,18}", re.ASCII)
#: A run cluster's objects: the Job, its Pod, the head, the workers.
_OF_RUN = re.compile(r"orca-([0-9]{1,18})-[0-9]{1,9}(?:-.*)?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One decision about what was asked for, with the pass that took it."""

    id: str
    at: datetime
    decided: str
    why: str
    came_to: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What is known of something. `now` are sentences; `history` is the newest first."""

    about: str
    at: datetime
    now: tuple[str, ...]
    history: tuple[Line, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A pass that was kept.

    Attributes:
        id: `<scope>-<number>`.
        decisions: as they were written down.
        came_to: in words.
        record: snapshot, limits and plan; only where one pass was asked for.
        packed, frame: what that is read from.

    """

    id: str
    scope: str
    decided_at: datetime
    ended_at: datetime | None
    outcome: str | None
    changed: int
    version: str
    decisions: tuple[dict[str, Any], ...]
    came_to: str
    record: dict[str, Any] = field(default_factory=dict)
    packed: bytes = field(default=b"", repr=False)
    frame: bytes = field(default=b"", repr=False)


def newest_passes(database: Database, limit: int) -> tuple[datetime, list[Pass]]:
    """The newest passes of all scopes that were kept, and the database's time. Raises Transient."""
    with database.snapshot() as transaction:
        rows = transaction.dicts(SQL["newest_passes"], {"limit": limit})
        now: datetime = transaction.value("select now()")
    return now, [_pass(row) for row in rows]


def last_passes(transaction: Transaction) -> list[dict[str, Any]]:
    """The newest pass of each scope that was kept: its id, when it was, and what it decided, in short."""
    return [
        {"id": _id(row), "at": row["decided_at"], "decided": summary(row["decisions"])}
        for row in transaction.dicts(SQL["last_passes"])
    ]


def summary(decisions: Sequence[Mapping[str, Any]]) -> str:
    """The first thing that a pass did and how much more; of one that did nothing, the first reason."""
    acts = [str(one["decided"]) for one in decisions if one["acts"]]
    if acts:
        return acts[0] + (f", and {len(acts) - 1} more" if len(acts) > 1 else "")
    return f"{decisions[0]['decided']}: {decisions[0]['why']}" if decisions else "nothing"


def explain(database: Database, name: str, *, limits: RunLimits | None, limit: int) -> Pass | Explanation:
    """What is known of a pass, a run, a machine, a Pod, a runtime or a pool, by its name.

    A bare number is a run's; a pass's only when there is no such run. `limits` are those of the run clusters; None: there are
    none. Raises UserError when nothing is known of it.
    """
    with database.snapshot() as transaction:
        asked = _PASS.fullmatch(name)
        if asked is not None:
            found = _find_pass(transaction, int(asked[2]))
            if found is None or found.scope != asked[1]:
                raise UserError(f"no pass {name} is kept; `orca-infra explain` lists those that are")
            return found
        names = [name]
        if (of_run := _OF_RUN.fullmatch(name)) is not None:
            names.append(of_run[1])
        at: datetime = transaction.value("select now()")
        now = about_now(transaction, name, limits=limits, at=at)
        rows = transaction.dicts(SQL["passes_about"], {"names": names, "limit": limit})
        if not now and not rows:
            if _NUMBER.fullmatch(name) and (found := _find_pass(transaction, int(name))) is not None:
                return found
            raise UserError(
                f"nothing is known of {name}: it is no run, machine, Pod, runtime or pool that this stack has or lately had, "
                "and no pass; `orca-infra explain` lists the passes that are kept"
            )
    wanted = frozenset(names)
    return Explanation(about=name, at=at, now=tuple(now), history=tuple(_lines(rows, wanted)))


def _lines(rows: Sequence[dict[str, Any]], wanted: frozenset[str]) -> list[Line]:
    return [
        Line(id=_id(row), at=row["decided_at"], decided=one["decided"], why=one["why"], came_to=_came_to(row))
        for row in rows
        for one in row["decisions"]
        if wanted.intersection(one["about"])
    ]


def _find_pass(transaction: Transaction, number: int) -> Pass | None:
    rows = transaction.dicts(SQL["pass"], {"id": number})
    return _pass(rows[0]) if rows else None


def _pass(row: dict[str, Any]) -> Pass:
    packed, frame = (bytes(row.get(name) or b"") for name in ("record", "frame"))
    return Pass(
        id=_id(row),
        scope=row["scope"],
        decided_at=row["decided_at"],
        ended_at=row["ended_at"],
        outcome=row["outcome"],
        changed=row["changed"],
        version=row["version"],
        decisions=tuple(row["decisions"]),
        came_to=_came_to(row),
        record=as_json(packed, frame) if packed else {},
        packed=packed,
        frame=frame,
    )


def _id(row: dict[str, Any]) -> str:
    return f"{row['scope']}-{row['id']}"


def _came_to(row: dict[str, Any]) -> str:
    if row["ended_at"] is None:
        return "cut short: the loop ended in it" if row["is_past"] else "under way"
    took = duration_text(max(0.0, round((row["ended_at"] - row["decided_at"]).total_seconds(), 1)))
    if row["outcome"] != "Done":
        return f"{row['outcome']} after {took}: {row['message']}"
    return f"changed {row['changed']} in {took}" if row["changed"] else f"changed nothing in {took}"
