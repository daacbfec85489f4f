"""Snapshots and plans as compressed JSON, and back. The only importer of pydantic beside orca.toml's reading.

What is not the decision's business is left out: the values of an environment's variables, which may be anything, and by which
nothing is decided.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter

from orca_infra.errors import UserError
from orca_infra.machines import model as machines
from orca_infra.record.decided import Decided, MachinesDecided, RunsDecided, RuntimesDecided, Scope
from orca_infra.record.frames import whole
from orca_infra.runtimes.model import Environment

Kind = TypeVar("Kind")

#: Raised whenever a record of before could be read wrongly; what only lacks a field that has a default is still read.
FORM = 2
#: A record of form 1 is always whole.
_READ = frozenset({1, FORM})
LEFT_OUT = "left out of the record"
_LEVEL = 1  # several times quicker than the default, for a few more bytes
_KINDS: Mapping[Scope, type[Decided]] = {
    Scope.MACHINES: MachinesDecided,
    Scope.RUNS: RunsDecided,
    Scope.RUNTIMES: RuntimesDecided,
}
# Two of them have the same fields, so that each says its kind.
_ADAPTERS: dict[type[object], TypeAdapter[Any]] = {}
_ACTIONS: Mapping[str, type[machines.Action]] = {
    kind.__name__: kind
    for kind in (
        machines.Make,
        machines.Remove,
        machines.EndInterrupted,
        machines.DestroyOwned,
        machines.DeleteStray,
        machines.Relabel,
    )
}


class RecordUnreadable(UserError):
    """A record of another version of this program; what it says in words can still be read."""


def encode(decided: Decided, lacks: Mapping[str, Any] | None = None) -> bytes:
    """A pass's record; the order within sets is not fixed. `lacks`: of one that was thinned (frames.py)."""
    actions: list[dict[str, Any]] = []
    waits: list[tuple[int, int, str]] = []
    if isinstance(decided, RuntimesDecided):
        decided = _without_values(decided)
    elif isinstance(decided, MachinesDecided):
        actions = [
            {"kind": type(one).__name__, **_adapter(type(one)).dump_python(one, mode="json")}
            for one in decided.plan.actions
        ]
        decided = replace(decided, plan=replace(decided.plan, actions=()))
    elif isinstance(decided, RunsDecided):  # JSON has no keys of two parts
        waits = [(run, start, said) for (run, start), said in decided.plan.waits.items()]
        decided = replace(decided, plan=replace(decided.plan, waits={}))
    head = json.dumps({"form": FORM, "scope": decided.scope, "actions": actions, "waits": waits, "lacks": lacks or {}})
    text = b'{"head":%b,"decided":%b}' % (head.encode(), _adapter(type(decided)).dump_json(decided))
    return zlib.compress(text, _LEVEL)


def as_json(record: bytes, frame: bytes = b"") -> dict[str, Any]:
    """A record as JSON for programs, of whatever form; `frame`: the record that it was thinned against."""
    found = _whole(record, frame)
    head, decided = found["head"], found["decided"]
    own = {key: head[key] for key in ("actions", "waits") if head[key]}
    return {"form": head["form"], "scope": head["scope"], **decided, "plan": {**decided["plan"], **own}}


def decode(record: bytes, frame: bytes = b"") -> Decided:
    """What was encoded, but for what is left out; `frame`: as `as_json` has it.

    Raises RecordUnreadable for a record of another form.
    """
    found = _whole(record, frame)
    head = found["head"]
    if head["form"] not in _READ:
        raise RecordUnreadable(f"the record has form {head['form']}, and this version reads form {FORM}")
    try:
        decided = _read(_KINDS[Scope(head["scope"])], found["decided"])
        if isinstance(decided, MachinesDecided):
            actions = tuple(_read(_ACTIONS[one["kind"]], one) for one in head["actions"])
            decided = replace(decided, plan=replace(decided.plan, actions=actions))
        elif isinstance(decided, RunsDecided):
            waits = {(run, start): said for run, start, said in head["waits"]}
            decided = replace(decided, plan=replace(decided.plan, waits=waits))
    except (ValueError, KeyError) as error:
        raise RecordUnreadable(f"the record is of another version of this program: {error}") from error
    return decided


def _whole(record: bytes, frame: bytes) -> dict[str, Any]:
    """A record's JSON, with what its frame has put back."""
    found: dict[str, Any] = json.loads(zlib.decompress(record))
    if lacks := found["head"].get("lacks"):
        snapshot, base = found["decided"]["snapshot"], json.loads(zlib.decompress(frame))["decided"]["snapshot"]
        found["decided"]["snapshot"] = whole(snapshot, base, lacks)
    return found


def _read(kind: type[Kind], found: Mapping[str, Any]) -> Kind:
    return cast("Kind", _adapter(kind).validate_json(json.dumps(found)))


def _adapter(kind: type[object]) -> TypeAdapter[Any]:
    """Made at the first use: that takes a tenth of a second."""
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def _without_values(decided: RuntimesDecided) -> RuntimesDecided:
    """The same without what variables are set to."""

    def masked(environment: Environment) -> Environment:
        env = tuple({**one, "value": LEFT_OUT} if "value" in one else one for one in environment.env)
        return replace(environment, env=env)

    snapshot, plan = decided.snapshot, decided.plan
    births = tuple(replace(birth, environment=masked(birth.environment)) for birth in plan.births)
    environments = {name: masked(one) for name, one in snapshot.environments.items()}
    return replace(decided, snapshot=replace(snapshot, environments=environments), plan=replace(plan, births=births))
