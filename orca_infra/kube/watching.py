"""Watches: what happens in one connection's life, and for ever.

What the API promises (kubernetes.io, API concepts): a watch from a list's version misses nothing, or says 410. A connection
that died without a word looks like one in which nothing happens, so each has a deadline of ours; bookmarks, and the API
server's own end of the connection, make sure that a healthy one is heard within it.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from orca_infra.errors import OrcaError, Transient
from orca_infra.kube.answers import Call, error_of_status
from orca_infra.kube.decoding import decode
from orca_infra.kube.errors import Expired
from orca_infra.kube.kinds import Object
from orca_infra.kube.reading import Selection, checked, read_list

if TYPE_CHECKING:
    from orca_infra.kube.transport import Transport

_LIFE_SECONDS = 300  # how long a watch is asked for
_BOOKMARKS_WITHIN_SECONDS = 90.0  # the API server sends one a minute
_LINE_BYTES = 32 << 20  # etcd takes objects of 1.5 MiB
_PAGE = 500
_BACKOFF_SECONDS = 0.25
_BACKOFF_MOST_SECONDS = 15.0
_QUICK_SECONDS = 1.0
_FAILURES_UNTIL_RELIST = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of a watch. A BOOKMARK's object has nothing but a version; a DELETED one may just have left the selection."""

    what: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]
    object: Object

    @property
    def resource_version(self) -> str:
        """From where a later watch goes on."""
        return str(self.object["metadata"]["resourceVersion"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Relisted:
    """All that is there now.

    Attributes:
        items: the selected objects.
        vanished: those that were seen before and are not among them any more, by uid, as last seen.
        resource_version: the moment.

    """

    items: tuple[Object, ...]
    vanished: tuple[Object, ...]
    resource_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """An object is new, or was changed, or came into the selection."""

    object: Object


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """An object was deleted or left the selection (its labels changed), as last seen."""

    object: Object


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """Nothing happened, and the API server said so; everything up to this version is known."""

    resource_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """The API server cannot be heard now; what was seen before stands.

    Attributes:
        error: why.
        wait_seconds: when it is tried again.

    """

    error: OrcaError
    wait_seconds: float


Change = Relisted | Seen | Gone | Heard | Trouble


def watch(
    transport: Transport, selection: Selection, *, version: str, silence_seconds: float, stop: threading.Event
) -> Iterator[Event]:
    """The events after a version, until the connection ends or `stop` is set. See Kube.watch."""
    call = Call(verb="watch", kind=selection.kind, namespace=selection.namespace)
    params = {
        **selection.params,
        "watch": "1",
        "allowWatchBookmarks": "true",
        "resourceVersion": version,
        "timeoutSeconds": str(_life_seconds(silence_seconds)),
    }
    pieces = transport.stream(call, selection.path, params=params, silence_seconds=silence_seconds, stop=stop)
    with closing(pieces):  # type: ignore[type-var]  # it is a generator
        for line in _lines(call, pieces, stop):
            yield _event(call, line)


def follow(
    transport: Transport, selection: Selection, *, silence_seconds: float, stop: threading.Event
) -> Iterator[Change]:
    """What is there (Relisted, first of all) and what happens to it, until `stop` is set; no fault ends it.

    A closed or broken watch goes on where it was; one whose version expired, or that failed three times in a row, begins with
    a new list. While the API server cannot be heard nothing is said of any object.

    Args:
        transport: to the API server.
        selection: which objects.
        silence_seconds: a connection in which nothing was heard for so long is given up.
        stop: ends it within 0.1 s, or, while it connects, within the connection's deadline.

    """
    following = _Following(transport, selection, silence_seconds, stop)
    while not stop.is_set():
        wait = 0.0
        try:
            yield from following.once()
        except OrcaError as error:
            wait = following.failed(error)
            if stop.is_set():
                return
            if wait:
                yield Trouble(error=error, wait_seconds=wait)
        stop.wait(wait)


class _Following:
    """Where a follow is: what it has seen, up to which version, and how often it failed since it last heard something."""

    def __init__(
        self, transport: Transport, selection: Selection, silence_seconds: float, stop: threading.Event
    ) -> None:
        self._transport = transport
        self._selection = selection
        self._silence_seconds = silence_seconds
        self._stop = stop
        self._known: dict[str, Object] = {}
        self._version = ""
        self._listed = -math.inf
        self._failures = 0

    def once(self) -> Iterator[Change]:
        """A list when there is need for one, and one connection's life."""
        if not self._version:
            yield self._relist()
        began = time.monotonic()
        heard = False
        with closing(self._watch()) as events:  # type: ignore[type-var]  # it is a generator
            for event in events:
                heard, self._failures = True, 0
                yield self._change(event)
        if self._stop.is_set():
            return
        if not heard and time.monotonic() - began < _QUICK_SECONDS:
            raise Transient(f"a watch of {self._selection.kind.plural} at {self._transport.server} ended at once")
        self._failures = 0
        yield Heard(resource_version=self._version)

    def failed(self, error: OrcaError) -> float:
        """Notes a failure and says for how many seconds to wait."""
        self._failures += 1
        if isinstance(error, Expired) or self._failures >= _FAILURES_UNTIL_RELIST:
            self._version = ""
        if isinstance(error, Expired) and self._failures == 1 and time.monotonic() - self._listed > _QUICK_SECONDS:
            return 0.0  # it is the usual thing after a while away
        wait = min(_BACKOFF_MOST_SECONDS, _BACKOFF_SECONDS * 2.0 ** min(self._failures - 1, 16))
        asked = getattr(error, "retry_after_seconds", None) or 0.0
        spread = random.uniform(0.75, 1.25)  # noqa: S311 - so that many do not come back at once
        return max(wait * spread, min(asked, 4 * _BACKOFF_MOST_SECONDS))

    def _relist(self) -> Relisted:
        listing = read_list(self._transport, self._selection, page=_PAGE)
        now = {str(item["metadata"]["uid"]): item for item in listing.items}
        vanished = tuple(item for uid, item in self._known.items() if uid not in now)
        self._known = now
        self._version, self._listed = listing.resource_version, time.monotonic()
        return Relisted(items=listing.items, vanished=vanished, resource_version=self._version)

    def _watch(self) -> Iterator[Event]:
        return watch(
            self._transport,
            self._selection,
            version=self._version,
            silence_seconds=self._silence_seconds,
            stop=self._stop,
        )

    def _change(self, event: Event) -> Change:
        self._version = event.resource_version
        if event.what == "BOOKMARK":
            return Heard(resource_version=self._version)
        uid = str(event.object["metadata"]["uid"])
        if event.what == "DELETED":
            self._known.pop(uid, None)
            return Gone(object=event.object)
        self._known[uid] = event.object
        return Seen(object=event.object)


def _life_seconds(silence_seconds: float) -> int:
    """For how long to ask for a watch, so that its end is heard in time where bookmarks would come too late."""
    return _LIFE_SECONDS if silence_seconds >= _BOOKMARKS_WITHIN_SECONDS else max(1, int(silence_seconds * 0.8))


def _lines(call: Call, pieces: Iterator[bytes], stop: threading.Event) -> Iterator[bytes]:
    """Whole lines. They end at a newline only; httpx's own splitting also takes U+0085, which JSON may hold."""
    rest = bytearray()
    for piece in pieces:
        start = len(rest)
        rest += piece
        if len(rest) > _LINE_BYTES:
            raise Transient(f"cannot {call}: a line is longer than {_LINE_BYTES} bytes")
        if rest.find(b"\n", start) < 0:
            continue
        *lines, last = bytes(rest).split(b"\n")
        rest = bytearray(last)
        for line in lines:
            if line.strip():
                yield line
    if rest.strip() and not stop.is_set():
        raise Transient(f"cannot {call}: it was cut short in the middle of an event")


def _event(call: Call, line: bytes) -> Event:
    try:
        found = decode(line)
        what, obj = found["type"], found["object"]
    except (ValueError, KeyError, TypeError):
        raise Transient(f"cannot {call}: something that is no event") from None
    if what == "ERROR" and isinstance(obj, dict):
        code = obj.get("code")
        raise error_of_status(call, code if isinstance(code, int) else 500, obj)
    if what not in ("ADDED", "MODIFIED", "DELETED", "BOOKMARK") or not isinstance(obj, dict):
        raise Transient(f"cannot {call}: an event of an unknown kind")
    metadata = checked(call, obj)["metadata"]
    if not metadata.get("resourceVersion") or (
        what != "BOOKMARK" and not (metadata.get("uid") and metadata.get("name"))
    ):
        raise Transient(f"cannot {call}: an event without a version, a uid or a name")
    return Event(what=what, object=obj)
