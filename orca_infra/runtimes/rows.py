"""Writes to the runtimes' rows that need no engine, for the API process and the loop alike."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields

from orca_infra.db.connection import Database, Transaction
from orca_infra.kube.kinds import Object
from orca_infra.runtimes.model import STARTING, Mark, SeenObject
from orca_infra.runtimes.observe import SQL, read_object
from orca_infra.runtimes.render import RUNTIME_ANNOTATION, RenderedPod
from orca_infra.runtimes.resources import size_of


class PodNotes:
    """Writes in its row that a Pod is Ready, or is not any more, as soon as a watch shows it. For the leader only.

    All else is left to the passes, which also see whatever is left out here: of a Pod that was never Ready nothing is
    written, nor of one without a row, or that ends. What they are to see soon is news: a Pod in trouble, and a launch's
    first touch, since its pool then lacks one. Most is no news, as the second touch.

    `note` and `write` may be called by two threads.
    """

    _KEPT_MOST = 50_000

    def __init__(self, database: Database) -> None:
        self._database = database
        self._last: dict[str, tuple[Mark, str | None]] = {}
        self._unwritten: dict[str, Mark] = {}
        self._lock = threading.Lock()

    def note(self, item: Object) -> bool:
        """Keep what is to be written of it for `write`; gives whether it is news already."""
        seen = read_object({"kind": "Pod", **item})
        mark = _mark_of(seen)
        runtime = (item["metadata"].get("annotations") or {}).get(RUNTIME_ANNOTATION)
        with self._lock:
            before, taken_by = self._last.get(mark.name, (None, None))
            if len(self._last) >= self._KEPT_MOST:  # names are never used twice
                self._last.clear()
            self._last[mark.name] = (mark, runtime)
            # Nothing is known of one that was shown to no watch of this lead: it was not Ready as long as it is Pending.
            was_ready = seen.phase not in {"", "Pending"} if before is None else before.ready
            if mark != before and (mark.ready or was_ready):
                self._unwritten[mark.name] = mark
            elif mark != before and mark.problem != STARTING:
                return True
        return runtime != taken_by

    def write(self) -> bool:
        """Write all that was kept, at one go; gives whether anything was new.

        What cannot be written is left to the next pass, or to when its Pod is shown again.
        """
        with self._lock:
            marks, self._unwritten = list(self._unwritten.values()), {}
        if not marks:
            return False
        try:
            with self._database.transaction() as transaction:
                lock_pods(transaction, [mark.name for mark in marks])
                return mark_pods(transaction, marks) > 0
        except BaseException:
            with self._lock:
                for mark in marks:
                    self._last.pop(mark.name, None)
            raise


def _mark_of(seen: SeenObject) -> Mark:
    return Mark(
        namespace=seen.namespace,
        name=seen.name,
        uid=seen.uid,
        ready=seen.can_serve,
        address=seen.address,
        problem=seen.problem,
    )


def lock_pods(transaction: Transaction, names: Iterable[str]) -> None:
    """First of all in whatever writes several Pods' rows: in one order, so that no two wait for each other for ever."""
    transaction.run(SQL["lock_pods"], {"names": list(names)})


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
