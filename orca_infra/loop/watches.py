"""Watches that hasten the loop: what happens on the cluster wakes the next pass, and nothing more depends on them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from orca_infra.kube.client import Kube
from orca_infra.kube.kinds import Kind, Object
from orca_infra.kube.watching import Gone, Relisted, Seen, Trouble
from orca_infra.log import Log

_SILENCE_SECONDS = 90.0
#: What is shown within this time after a write is written at one go: one by one, a hundred Pods take more CPU than a pass.
_GATHER_SECONDS = 0.08


class Edits:
    """Tells what was edited, or begins to be deleted, from what had its status written, as the loop does all the time."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[object, ...]] = {}

    def note(self, item: Object) -> bool:
        """Gives whether it is news."""
        metadata = item["metadata"]
        now = (metadata["uid"], metadata.get("generation"), metadata.get("deletionTimestamp"))
        before, self._seen[metadata["name"]] = self._seen.get(metadata["name"]), now
        return now != before


class Watch:
    """One kind of object in one namespace, followed by a thread of its own from `start` until `stop`, and one that writes."""

    def __init__(
        self,
        kube: Kube,
        kind: Kind,
        *,
        namespace: str,
        labels: Mapping[str, str],
        wake: Callable[[], None],
        log: Log,
        note: Callable[[Object], object] | None = None,
        write: Callable[[], object] | None = None,
    ) -> None:
        """`note` is given each object as it is seen, and says whether it was news; `wake` is called after any news.

        `write` writes down what `note` kept for it, soon after and on another thread, and says whether that was news.
        """
        self._kube, self._kind, self._namespace, self._labels = kube, kind, namespace, labels
        self._wake, self._log, self._note, self._write = wake, log, note, write
        self._stop = threading.Event()
        self._noted = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"watch-{kind.plural}", daemon=True)
        self._writer = threading.Thread(target=self._write_on, name=f"notes-{kind.plural}", daemon=True)

    def start(self) -> None:
        self._thread.start()
        if self._write is not None:
            self._writer.start()

    def stop(self) -> None:
        self._stop.set()
        self._noted.set()

    def _run(self) -> None:
        changes = self._kube.follow(
            self._kind,
            namespace=self._namespace,
            labels=self._labels,
            silence_seconds=_SILENCE_SECONDS,
            stop=self._stop,
        )
        for change in changes:
            match change:
                case Relisted():
                    self._see(*change.items)
                    self._wake()
                case Seen():
                    self._see(change.object)
                case Gone():
                    self._wake()
                case Trouble():
                    self._log.warning("watch in trouble", kind=self._kind.kind, why=str(change.error))
                case _:
                    pass

    def _see(self, *objects: Object) -> None:
        news = self._note is None
        if self._note is not None:
            for item in objects:
                news = bool(self._note(item)) or news
        self._noted.set()
        if news:
            self._wake()

    def _write_on(self) -> None:
        assert self._write is not None
        while not self._stop.is_set():
            try:
                news = bool(self._write())
            except Exception as error:  # noqa: BLE001  (a defect in one write keeps no later one from being made)
                news = True  # a pass sees what was not written
                self._log.warning("what a watch showed was not noted", kind=self._kind.kind, why=str(error))
            if news:
                self._wake()
            self._stop.wait(_GATHER_SECONDS)
            self._noted.wait()
            self._noted.clear()
