"""What of a pass is as it was in an earlier one, its frame: kept once, and referred to.

A pass over thousands of machines of which one is made knows nothing new of the others. What is written down for it is what
differs from its frame, so that this costs what has changed and not what there is. A frame is a whole pass; another is taken
when so much has changed since that referring to it is dearer.

Heartbeats change all the time and decide nothing as long as they come: of a machine that is as it was and was heard lately,
the instant is left out, and reads as the pass's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from operator import attrgetter
from typing import Any

from orca_infra.machines.model import MachineRow, SeenMachine
from orca_infra.record.decided import Decided, MachinesDecided, Scope
from orca_infra.runs import model as runs
from orca_infra.runtimes import model as runtimes

Json = dict[str, Any]
#: More than this part of the lost time ago is not lately.
_LATELY = 0.5
_HEARD = "seen_at"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Series:
    """A long field of a snapshot: what tells its items apart, and all by which two of the same key differ."""

    field: str
    key: Callable[[Any], Hashable]
    content: Callable[[Any], Any]


def _content(kind: type[Any], *, but: str = "") -> Callable[[Any], Any]:
    return attrgetter(*(one.name for one in fields(kind) if one.name != but))


_seen_content = _content(SeenMachine)
_SERIES: Mapping[Scope, tuple[_Series, ...]] = {
    Scope.MACHINES: (
        _Series(field="machines", key=attrgetter("name"), content=_content(MachineRow, but=_HEARD)),
        _Series(field="seen", key=lambda one: one[1].uid, content=lambda one: (one[0], _seen_content(one[1]))),
    ),
    Scope.RUNS: (
        _Series(field="rows", key=attrgetter("run", "start"), content=_content(runs.ClusterRow)),
        _Series(field="objects", key=attrgetter("uid"), content=_content(runs.SeenObject, but="resource_version")),
    ),
    Scope.RUNTIMES: (
        _Series(field="rows", key=attrgetter("name"), content=_content(runtimes.PodRow)),
        _Series(field="objects", key=attrgetter("uid"), content=_content(runtimes.SeenObject, but="resource_version")),
    ),
}
#: Fields that are sets, or sets by name.
_SETS: Mapping[Scope, tuple[str, ...]] = {
    Scope.MACHINES: ("owned",),
    Scope.RUNS: ("known", "desired"),
    Scope.RUNTIMES: (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinned:
    """A pass without what its frame has.

    Attributes:
        decided: the pass; of its long fields, what the frame lacks.
        lacks: by long field, what it takes to put the rest back, as JSON.
        changed: how many items differ.

    """

    decided: Decided
    lacks: Json
    changed: int


class Frame:
    """A pass that was kept whole, for those after it to refer to."""

    def __init__(self, decided: Decided) -> None:
        self._scope = decided.scope
        self._known = {
            one.field: {
                one.key(item): (position, one.content(item))
                for position, item in enumerate(getattr(decided.snapshot, one.field))
            }
            for one in _SERIES[self._scope]
        }
        self._lengths = {one.field: len(getattr(decided.snapshot, one.field)) for one in _SERIES[self._scope]}
        self._sets = {name: _by_name(getattr(decided.snapshot, name)) for name in _SETS[self._scope]}
        size = sum(self._lengths.values())
        #: With more than so many items that differ, another frame is cheaper: it costs as much as it has, once for this many.
        self.changed_most = 16 + math.isqrt(2 * size)

    def thin(self, decided: Decided) -> Thinned:
        """The pass without what this frame has."""
        lacks: Json = {}
        thin: dict[str, Any] = {}
        changed = 0
        fresh = _heard_lately(decided)
        for series in _SERIES[self._scope]:
            items = getattr(decided.snapshot, series.field)
            known = self._known[series.field]
            new: list[int] = []
            taken: list[int] = []
            for position, item in enumerate(items):
                found = known.get(series.key(item))
                # Compared one by one, and not gathered before: thousands of tuples would have the garbage collector at work.
                if found is not None and found[1] == series.content(item) and fresh(item):
                    taken.append(found[0])
                else:
                    new.append(position)
            if taken != sorted(set(taken)):  # in another order, or one twice: then it is kept as it is
                continue
            left = sorted(set(range(self._lengths[series.field])).difference(taken))
            lacks[series.field] = {"new": new, "left": left}
            thin[series.field] = tuple(items[position] for position in new)
            changed += len(new) + len(left)
        for name, known_sets in self._sets.items():
            value = getattr(decided.snapshot, name)
            sets = _by_name(value)
            added = {key: one - known_sets.get(key, frozenset()) for key, one in sets.items()}
            gone = {key: known_sets[key] - one for key, one in sets.items() if key in known_sets}
            lacks[name] = {"gone": {key: sorted(one) for key, one in gone.items() if one}}
            thin[name] = added if isinstance(value, Mapping) else added[""]
            changed += sum(map(len, added.values())) + sum(map(len, gone.values()))
        thinned = replace(decided, snapshot=replace(decided.snapshot, **thin))  # type: ignore[arg-type]
        return Thinned(decided=thinned, lacks=lacks, changed=changed)


def whole(snapshot: Json, frame: Json, lacks: Json) -> Json:
    """A snapshot as JSON, with what its frame's snapshot has put back."""
    found = dict(snapshot)
    for name, lack in lacks.items():
        if "new" in lack:
            left = set(lack["left"])
            kept = [item for position, item in enumerate(frame[name]) if position not in left]
            found[name] = _merged(map(_heard_at(snapshot["now"]), kept), snapshot[name], lack["new"])
        elif isinstance(snapshot[name], dict):
            gone = {key: _hashable(items) for key, items in lack["gone"].items()}
            found[name] = {
                key: [*_without(frame[name].get(key, ()), gone.get(key, set())), *added]
                for key, added in snapshot[name].items()
            }
        else:
            found[name] = [*_without(frame[name], _hashable(lack["gone"].get("", ()))), *snapshot[name]]
    return found


def _merged(kept: Iterable[Any], new: Sequence[Any], positions: Sequence[int]) -> list[Any]:
    """The new items at their positions, and what was kept around them."""
    items = list(kept)
    for position, item in zip(positions, new, strict=True):
        items.insert(position, item)
    return items


def _heard_at(now: str) -> Callable[[Any], Any]:
    return lambda item: {**item, _HEARD: now} if isinstance(item, dict) and item.get(_HEARD) else item


def _heard_lately(decided: Decided) -> Callable[[Any], bool]:
    """Whether an item's heartbeat may be left out; only machines' rows have any."""
    if not isinstance(decided, MachinesDecided):
        return lambda _: True
    since = decided.now - timedelta(seconds=decided.limits.lost_seconds * _LATELY)
    return lambda item: not isinstance(item, MachineRow) or item.seen_at is None or item.seen_at > since


def _by_name(value: Any) -> Mapping[str, frozenset[Any]]:
    return value if isinstance(value, Mapping) else {"": value}


def _hashable(items: Iterable[Any]) -> set[Any]:
    return {tuple(item) if isinstance(item, list) else item for item in items}


def _without(items: Iterable[Any], gone: set[Any]) -> list[Any]:
    return [item for item in items if (tuple(item) if isinstance(item, list) else item) not in gone]
