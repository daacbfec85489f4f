"""Reads: one object, or a whole list page by page, tried a few times where a fault may pass."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orca_infra.errors import Transient
from orca_infra.kube.answers import Call
from orca_infra.kube.errors import Busy, Expired
from orca_infra.kube.kinds import Kind, Object

if TYPE_CHECKING:
    from orca_infra.kube.transport import Transport

_TRIES = 3
_WAIT_SECONDS = 0.1
_WAIT_MOST_SECONDS = 2.0
_STARTS = 3
_PAGES_MOST = 100_000
# kubernetes.io, API concepts: metadata-only fetches
_METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """A whole list, as it was at one moment.

    Attributes:
        items: the objects, each with its apiVersion and kind.
        resource_version: the moment; a watch goes on from here.

    """

    items: tuple[Object, ...]
    resource_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which objects are meant.

    Attributes:
        kind: of what.
        namespace: where; None: everywhere.
        labels: what their labels are; None: whatever.
        label_exists: which labels they have, whatever the value.
        metadata_only: nothing is read of them but their metadata, whatever their kind.

    """

    kind: Kind
    namespace: str | None = None
    labels: Mapping[str, str] | None = None
    label_exists: Collection[str] = ()
    metadata_only: bool = False

    @property
    def path(self) -> str:
        """The collection's path."""
        return self.kind.path(self.namespace)

    @property
    def params(self) -> dict[str, str]:
        """The query that selects by labels."""
        terms = [f"{key}={value}" for key, value in (self.labels or {}).items()] + list(self.label_exists)
        return {"labelSelector": ",".join(terms)} if terms else {}

    def holds(self, obj: Object) -> bool:
        """Whether an object of this kind is among them."""
        metadata = obj["metadata"]
        stated = metadata.get("labels") or {}
        return (
            (self.namespace is None or metadata.get("namespace") == self.namespace)
            and all(stated.get(key) == value for key, value in (self.labels or {}).items())
            and all(key in stated for key in self.label_exists)
        )


def read(
    transport: Transport, call: Call, path: str, params: Mapping[str, str] | None = None, *, accept: str | None = None
) -> Object:
    """What a GET answers with; what may pass is tried again for as long as one answer may take at most.

    Raises:
        OrcaError: by its meaning, of the last try.

    """
    began = time.monotonic()
    for left in reversed(range(_TRIES)):
        try:
            return checked(call, transport.request(call, "GET", path, params=params, accept=accept))
        except Expired:  # will not pass
            raise
        except Transient as error:
            wait = _WAIT_SECONDS * 3.0 ** (_TRIES - 1 - left)
            if isinstance(error, Busy):
                wait = max(wait, error.retry_after_seconds or 0)
            late = time.monotonic() + wait - began > transport.deadlines.read_seconds
            if not left or late or wait > _WAIT_MOST_SECONDS:
                raise
        time.sleep(wait)
    raise AssertionError


def read_list(transport: Transport, selection: Selection, *, page: int, from_cache: bool = False) -> Listing:
    """All selected objects at one moment. What has expired on the way is begun anew, the last time in one piece.

    `from_cache`: of whatever moment the API server's cache has come to; it is always one piece.

    Raises:
        OrcaError: by its meaning; never is a part taken for the whole.

    """
    call = Call(verb="list", kind=selection.kind, namespace=selection.namespace)
    for left in reversed(range(_STARTS)):
        try:
            return _pages(
                transport, call, selection, page if left else 0, {"resourceVersion": "0"} if from_cache else {}
            )
        except Expired:
            if not left:
                raise
    raise AssertionError


def checked(call: Call, answer: Object) -> Object:
    """The answer, which has metadata.

    Raises:
        Transient: it has not; something else than the API server answered.

    """
    if not isinstance(answer.get("metadata"), dict):
        raise Transient(f"cannot {call}: the answer has no metadata")
    return answer


def _pages(transport: Transport, call: Call, selection: Selection, limit: int, moment: Mapping[str, str]) -> Listing:
    kind, items, version, token = selection.kind, list[Object](), "", ""
    for _ in range(_PAGES_MOST):
        params = {
            **selection.params,
            **({"limit": str(limit)} if limit and not moment else {}),
            **({"continue": token} if token else moment),
        }
        answer = read(transport, call, selection.path, params, accept=_METADATA if selection.metadata_only else None)
        items += _items(call, answer)
        found, token = str(answer["metadata"].get("resourceVersion") or ""), answer["metadata"].get("continue") or ""
        if not found:
            raise Transient(f"cannot {call}: the answer is no list")
        if version and found != version:
            raise Expired(f"cannot {call}: its pages are of two moments ({version} and {found})")
        version = found
        if not token:
            for item in items:  # a list of a built-in kind leaves them out, and one of metadata has its own
                item["apiVersion"], item["kind"] = kind.api_version, kind.kind
            return Listing(items=tuple(items), resource_version=version)
    raise Transient(f"cannot {call}: it has no end after {_PAGES_MOST} pages")


def _items(call: Call, answer: Object) -> list[Object]:
    items = answer.get("items")
    if items is None and "items" in answer:  # how Go writes an empty list
        return []
    if not str(answer["kind"]).endswith("List") or not isinstance(items, list):
        raise Transient(f"cannot {call}: the answer is no list")
    for item in items:
        if not isinstance(item, dict):
            raise Transient(f"cannot {call}: the list holds something that is no object")
        checked(call, item)
    return items
