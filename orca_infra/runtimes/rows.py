"""Writes to the runtimes' rows that need no engine, for the API process and the loop alike."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields

from orca_infra.db.connection import Database, Transaction
from orca_infra.kube.kinds import Object
from orca_infra.runtimes.model import Mark
from orca_infra.runtimes.observe import SQL, read_object
from orca_infra.runtimes.render import RUNTIME_ANNOTATION, RenderedPod
from orca_infra.runtimes.resources import size_of


class PodNotes:
    """Writes what a watch shows of a Pod in its row, so that it can be taken as soon as it is Ready. For the leader only.

    A Pod without a row, or that ends, is nobody's to note. The database is asked only about what was not shown before:
    most of what happens to a Pod is no news, since every launch touches its Pod twice. The first touch is, since its pool
    then lacks one.
    """

    _KEPT_MOST = 50_000

    def __init__(self, database: Database) -> None:
        self._database = database
        self._last: dict[str, tuple[Mark, str | None]] = {}

    def note(self, item: Object) -> bool:
        """Gives whether anything was new."""
        mark = _mark_of(item)
        runtime = (item["metadata"].get("annotations") or {}).get(RUNTIME_ANNOTATION)
        before, taken_by = self._last.get(mark.name, (None, None))
        new = mark != before and _note(self._database, mark)
        if len(self._last) >= self._KEPT_MOST:  # names are never used twice
            self._last.clear()
        self._last[mark.name] = (mark, runtime)
        return new or runtime != taken_by


def _mark_of(item: Object) -> Mark:
    seen = read_object({"kind": "Pod", **item})
    return Mark(
        namespace=seen.namespace,
        name=seen.name,
        uid=seen.uid,
        ready=seen.can_serve,
        address=seen.address,
        problem=seen.problem,
    )


def _note(database: Database, mark: Mark) -> bool:
    with database.statement() as statement:
        return mark_pods(statement, [mark]) > 0


def mark_pods(transaction: Transaction, marks: Sequence[Mark]) -> int:
    """Write down what is new of Pods; gives of how many something was."""
    return transaction.run(SQL["mark_pods"], {"marks": json.dumps([asdict(mark) for mark in marks])})


def next_numbers(transaction: Transaction, count: int) -> list[int]:
    """Numbers for so many Pods, which no other Pod ever has."""
    return [row["number"] for row in transaction.dicts(SQL["next_numbers"], {"count": count})]


def record_pods(transaction: Transaction, pods: Iterable[RenderedPod], *, taken: bool) -> None:
    """Write the rows of Pods with their objects: from here on a cohort makes them."""
    names = [field.name for field in fields(RenderedPod)]
    rows = [{**{name: getattr(pod, name) for name in names}, "size": size_of(pod.requests)} for pod in pods]
    transaction.run(SQL["record_pods"], {"pods": json.dumps(rows), "taken": taken})


def prune(database: Database, kept_seconds: float) -> None:
    """Delete the rows of what ended long ago."""
    with database.transaction() as transaction:
        transaction.run(SQL["prune_runtimes"], {"kept_seconds": kept_seconds})
        transaction.run(SQL["prune_pods"], {"kept_seconds": kept_seconds})
