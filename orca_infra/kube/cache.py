"""What a cluster holds of one kind, kept in memory by a thread that follows it.

Two things are never shown: nothing, when the cluster could not be heard yet, and an object that is older than what this
program itself has written to it (a watch lags behind a write's answer).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Self

from orca_infra.errors import OrcaError, Transient
from orca_infra.kube.client import Kube
from orca_infra.kube.kinds import Kind, Object
from orca_infra.kube.reading import Selection
from orca_infra.kube.watching import Change, Gone, Heard, Relisted, Seen, Trouble

_WRITES_KEPT_SECONDS = (
    60.0  # a cluster restored from a backup counts from an earlier version: no write is waited for so long
)
_AFTER_BUG_SECONDS = 1.0
_JOIN_SECONDS = 10.0

_Key = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Write:
    """A write of our own that the watch has not come to yet. `object` is None where it left the selection."""

    version: int
    object: Object | None
    noted_seconds: float


class Watched:
    """The objects of one kind as the watch has them, in one thread of its own.

    The objects are shared: whoever gets one reads it and never changes it. `managedFields`, a third of it, is left out.

    Attributes:
        changed: called, without a lock held, whenever an object is new, changed or gone; `Event.set`, say.

    """

    def __init__(
        self,
        kube: Kube,
        kind: Kind,
        *,
        namespace: str | None = None,
        labels: Mapping[str, str] | None = None,
        label_exists: Collection[str] = (),
        silence_seconds: float = 90.0,
        changed: Callable[[], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is asked for before `start`.

        Args:
            kube: the cluster.
            kind: of what.
            namespace: where; None: everywhere.
            labels: what the objects' labels are.
            label_exists: which labels they have, whatever the value.
            silence_seconds: a connection in which nothing was heard for so long is given up; the API server says
                something once a minute, and below 90 it is asked to end the connection in time.
            changed: called whenever an object is new, changed or gone.
            clock: monotonic seconds.

        """
        self.changed = changed
        self._kube = kube
        self._selection = Selection(kind=kind, namespace=namespace, labels=labels, label_exists=label_exists)
        self._silence_seconds = silence_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._synced = threading.Event()
        self._objects: dict[_Key, Object] = {}
        self._writes: dict[_Key, _Write] = {}
        self._position = 0  # the version up to which the watch has come
        self._heard_seconds = -math.inf
        self._error: OrcaError | None = None
        self._thread = threading.Thread(target=self._run, name=f"watch-{kind.plural}", daemon=True)

    def start(self) -> Self:
        """Begins to follow; `wait_synced` waits for the first list."""
        self._thread.start()
        return self

    def close(self) -> None:
        """Ends the thread. What it had stays readable, and ages."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def synced(self) -> bool:
        """Whether a whole list was ever had."""
        return self._synced.is_set()

    def wait_synced(self, timeout_seconds: float) -> bool:
        """Waits for the first whole list; False when the time is over."""
        return self._synced.wait(timeout_seconds)

    @property
    def age_seconds(self) -> float:
        """How long since the API server was last heard (an event, a bookmark, a list); infinite before the first time."""
        with self._lock:
            return self._clock() - self._heard_seconds

    @property
    def error(self) -> OrcaError | None:
        """Why the API server cannot be heard now; None when it can."""
        with self._lock:
            return self._error

    def snapshot(self, *, max_age_seconds: float = math.inf) -> tuple[Object, ...]:
        """All objects that are there, in the order of namespace and name.

        Args:
            max_age_seconds: how long ago the API server may have been heard last.

        Raises:
            Transient: no list was had yet, or the last word is too old; the pass is given up.

        """
        with self._lock:
            self._require(max_age_seconds)
            return tuple(self._objects[key] for key in sorted(self._objects))

    def get(self, name: str, *, namespace: str | None = None) -> Object | None:
        """One object by name. None is no proof that it is gone: that is a `Kube.get`'s to say.

        Raises:
            Transient: no list was had yet.

        """
        with self._lock:
            self._require(math.inf)
            return self._objects.get((namespace or "", name))

    def by_uid(self) -> dict[str, Object]:
        """All objects that are there, by uid.

        Raises:
            Transient: no list was had yet.

        """
        return {str(obj["metadata"]["uid"]): obj for obj in self.snapshot()}

    def note_write(self, obj: Object) -> None:
        """Shows at once what a create, apply or patch answered with; nothing older of this name is shown after it."""
        version = _version(obj)
        with self._lock:
            held = self._writes.get(_key(obj))
            if version <= self._position or (held is not None and version <= held.version):
                return  # what the watch has come to it shows already, or it is gone since
            kept = _lean(obj) if self._selection.holds(obj) else None
            self._writes[_key(obj)] = _Write(version=version, object=kept, noted_seconds=self._clock())
            self._put(_key(obj), kept)

    def _require(self, max_age_seconds: float) -> None:
        what = f"{self._selection.kind.plural} at {self._kube.server}"
        why = f": {self._error}" if self._error else ""
        if not self._synced.is_set():
            raise Transient(f"no list of {what} was had yet{why}")
        age = self._clock() - self._heard_seconds
        if age > max_age_seconds:
            raise Transient(f"nothing was heard of {what} for {age:.0f} s{why}")

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._follow()
            except Exception as error:  # noqa: BLE001 - a bug must be seen in `error` and as age, not as a dead thread
                with self._lock:
                    self._error = Transient(f"the watch of {self._selection.kind.plural} stumbled: {error!r}")
                self._stop.wait(_AFTER_BUG_SECONDS)

    def _follow(self) -> None:
        selection = self._selection
        for change in self._kube.follow(
            selection.kind,
            namespace=selection.namespace,
            labels=selection.labels,
            label_exists=selection.label_exists,
            silence_seconds=self._silence_seconds,
            stop=self._stop,
        ):
            with self._lock:
                told = self._take(change)
            if isinstance(change, Relisted):
                self._synced.set()
            if told and self.changed is not None:
                self.changed()

    def _take(self, change: Change) -> bool:
        """Takes a change in; says whether any object is new, changed or gone by it."""
        if isinstance(change, Trouble):
            self._error = change.error
            return False
        self._error, self._heard_seconds = None, self._clock()
        if isinstance(change, Relisted):
            return self._take_list(change)
        if isinstance(change, Heard):
            self._come_to(_number(change.resource_version))
            return False
        return self._take_event(change)

    def _take_event(self, change: Seen | Gone) -> bool:
        key, version = _key(change.object), _version(change.object)
        held, known = self._writes.get(key), self._objects.get(key)
        stale = held is not None and version < held.version
        self._come_to(version)
        if stale or (known is not None and version < _version(known)):  # the latter: of one that had the name before
            return False
        if isinstance(change, Seen):
            self._objects[key] = _lean(change.object)
            return known is None or _version(known) != version
        return self._objects.pop(key, None) is not None

    def _take_list(self, change: Relisted) -> bool:
        before = {key: _version(obj) for key, obj in self._objects.items()}
        self._come_to(_number(change.resource_version))
        self._objects = {_key(item): _lean(item) for item in change.items}
        for key, held in self._writes.items():  # later than the list
            self._put(key, held.object)
        return before != {key: _version(obj) for key, obj in self._objects.items()}

    def _put(self, key: _Key, obj: Object | None) -> None:
        if obj is None:
            self._objects.pop(key, None)
        else:
            self._objects[key] = obj

    def _come_to(self, version: int) -> None:
        """Forgets the writes that the watch has come to, and those that it should have come to long ago."""
        self._position = version
        before = self._clock() - _WRITES_KEPT_SECONDS
        passed = [key for key, held in self._writes.items() if held.version <= version or held.noted_seconds < before]
        for key in passed:
            del self._writes[key]


def _key(obj: Object) -> _Key:
    metadata = obj["metadata"]
    return str(metadata.get("namespace") or ""), str(metadata["name"])


def _version(obj: Object) -> int:
    return _number(str(obj["metadata"].get("resourceVersion") or ""))


def _number(version: str) -> int:
    """A resource version in its order: since kubernetes 1.35 they compare as whole numbers by contract (KEP-5504)."""
    return int(version) if version.isdecimal() else 0


def _lean(obj: Object) -> Object:
    obj["metadata"].pop("managedFields", None)
    return obj
