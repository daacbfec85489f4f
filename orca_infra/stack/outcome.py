"""What an engine operation came to, read from its exit code, its words and its event log: one function each.

The words are the engine's own (3.274); recorded samples of each are tests/unit/samples/engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from orca_infra.errors import (
    EngineFailed,
    OrcaError,
    OutcomeUnknown,
    ResourceFailure,
    SetupError,
    StackLock,
    StackLocked,
    StateBroken,
    Transient,
)
from orca_infra.stack.command import Completed

# Exit codes of the engine's own taxonomy (sdk/go/common/util/cmdutil/exit.go).
STACK_NOT_FOUND = 6
_CANCELLED = 8
# An interrupted operation ends with exit code 1 and these words, whether or not its last step was carried out.
_INTERRUPTED = re.compile(r"(?:update|destroy|refresh|preview) cancell?ed")

# The state could not be written before or after a resource's step; the resource's own failure it is not.
_STATE_TROUBLE = re.compile(r"(?:pre|post)-step event returned an error")

_LOCK = re.compile(
    r"(?P<key>\.pulumi/locks/\S+?\.json)\S*: created by \S+?@(?P<host>\S+) \(pid (?P<pid>\d+)\)(?: at (?P<at>\S+))?",
    re.MULTILINE,
)
# A worker's token, which a cloud may quote from the request that it refuses; a digest has its algorithm before it.
_TOKEN = re.compile(r"(?<![0-9a-z:])[0-9a-f]{64}(?![0-9a-z])")
# A state that the engine reads and refuses (a long report that quotes the environment), and one that it cannot read.
_BROKEN = re.compile(
    r"snapshot integrity failure[^\n]*"
    r"|failed to load checkpoint: [^\n]*(?:invalid character|unexpected end of JSON|cannot unmarshal)[^\n]*"
    r"|^(?:error: )?place \d+: (?:invalid character|unexpected end of JSON)[^\n]*"  # as `stack rm` says it
    r"|failed to load checkpoint: EOF$",  # of an empty one; a connection that ends says more than that
    re.MULTILINE,
)
# What the Kubernetes provider puts before the API server's words: they are cut in some places, and say the cause.
_BEFORE_WORDS = re.compile(r'\Aresource "urn:[^"]*" was not successfully \w+ by the Kubernetes API server: ')
# A lock that is not whole; of anything else that the engine reads before an operation it says what it was.
_TORN_LOCK = re.compile(
    r"error: (?:could not [^:\n]+: )?"
    r"(?P<why>unexpected end of JSON input|invalid character [^\n]*|json: cannot unmarshal [^\n]*)"
)
# What the engine adds to every failure and which says nothing of its cause.
_NOISE = ("update failed", "destroy failed", "refresh failed", "preview failed", "Resource monitor has terminated")
_TROUBLE: tuple[tuple[re.Pattern[str], Callable[[str], OrcaError]], ...] = (
    (
        re.compile(r"incorrect passphrase|passphrase must be set", re.IGNORECASE),
        lambda text: SetupError(f"{text}; PULUMI_CONFIG_PASSPHRASE_FILE has to name the file this state was made with"),
    ),
    (
        re.compile(
            r"no resource plugin|could not (?:load|find) plugin|failed to load plugin|language plugin", re.IGNORECASE
        ),
        lambda text: SetupError(f"{text}; `orca-infra doctor` says what is missing and how to get it"),
    ),
    (
        re.compile(r"unable to open state directory"),
        lambda text: SetupError(f"{text}; mount or make that folder, or set PULUMI_BACKEND_URL to where the state is"),
    ),
    (
        re.compile(
            r"connection refused|no such host|the database system is|too many clients|i/o timeout"
            r"|failed to ping PostgreSQL|failed to create table",
            re.IGNORECASE,
        ),
        lambda text: Transient(f"the engine could not reach its state or its provider: {text}"),
    ),
    (_STATE_TROUBLE, lambda text: OutcomeUnknown(f"the engine could not write its state: {text}")),
    (
        re.compile(r"no space left on device|disk quota exceeded", re.IGNORECASE),
        lambda text: Transient(f"the disk of the engine's state or of its work folder is full: {text}"),
    ),
)


class StackMissing(OrcaError):
    """The stack does not exist in the backend yet; the caller makes it and tries again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceChange:
    """One resource that an operation made, changed, read or deleted.

    Attributes:
        op: the engine's word: create, update, delete, same, refresh, replace, discard.
        outputs: as the event log has them, secrets masked; empty for a deleted one.

    """

    op: str
    urn: str
    type: str
    id: str
    outputs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.urn.rpartition("::")[2]


@dataclass(frozen=True, slots=True)
class Events:
    """The parts of an event log that matter here."""

    changes: tuple[ResourceChange, ...]
    failures: tuple[ResourceFailure, ...]
    errors: tuple[str, ...]


NO_EVENTS = Events((), (), ())


def read_events(lines: Iterable[str]) -> Events:
    """Read an event log: one JSON object a line; the last may be cut off when the engine was killed."""
    changes: list[ResourceChange] = []
    failures: list[ResourceFailure] = []
    errors: list[str] = []
    for line in lines:
        # Most lines are neither, and cost more to parse than all the rest. What a line is cannot be told from any word in
        # it: a resource's own values are in there, too.
        if '"resOutputsEvent"' not in line and '"error"' not in line:
            continue
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if "resOutputsEvent" in event:
            changes.append(_change(event["resOutputsEvent"]["metadata"]))
        elif event.get("diagnosticEvent", {}).get("severity") == "error":
            diagnostic = event["diagnosticEvent"]
            message = _plain(diagnostic["message"])
            if message.startswith(_NOISE):
                continue
            if _is_resource(diagnostic.get("urn", "")) and not _STATE_TROUBLE.match(message):
                failures.append(ResourceFailure(urn=diagnostic["urn"], message=_BEFORE_WORDS.sub("", message)))
            else:
                errors.append(message)
    return Events(tuple(changes), tuple(failures), tuple(errors))


def _is_resource(urn: str) -> bool:
    """Whether a URN names something that was to be made; the stack and its plugins are the operation's own trouble."""
    return bool(urn) and "::pulumi:pulumi:Stack::" not in urn and "::pulumi:providers:" not in urn


def _change(metadata: dict[str, Any]) -> ResourceChange:
    state = metadata.get("new") or metadata.get("old") or {}
    return ResourceChange(
        op=metadata["op"],
        urn=metadata["urn"],
        type=metadata["type"],
        id=state.get("id", ""),
        outputs=state.get("outputs") or {},
    )


def uid_of(outputs: Mapping[str, Any]) -> str:
    """The provider's own id of this very machine among its resource's outputs; empty while there is none.

    It is `uid` with our own provider and `instanceId` with Google Cloud's.
    """
    return str(outputs.get("uid") or outputs.get("instanceId") or "")


def raise_for(completed: Completed, events: Events, what: str) -> None:
    """Raise what a failed operation means; return when it succeeded.

    Raises StackMissing, StackLocked, StateBroken, SetupError, Transient, OutcomeUnknown, or EngineFailed with its failures.
    """
    if completed.code == 0:
        return
    text = _plain(completed.stderr) or _plain(completed.stdout)
    if completed.code == STACK_NOT_FOUND:
        raise StackMissing(f"{what}: {_last_line(text)}")
    if "currently locked by" in text:
        locks = tuple(
            StackLock(key=m["key"], host=m["host"], pid=int(m["pid"]), taken_at=instant(m["at"]))
            for m in _LOCK.finditer(text)
        )
        raise StackLocked(f"{what}: another operation holds the stack's lock", locks)
    if events == NO_EVENTS and (torn := _TORN_LOCK.fullmatch(text)):
        raise StackLocked(f"{what}: a lock of the stack is not whole ({torn['why']})")
    broken = next((found for said in (*events.errors, text) if (found := _BROKEN.search(said))), None)
    if broken:
        raise StateBroken(f"{what}: {broken[0]}")
    if completed.code == _CANCELLED or any(_INTERRUPTED.match(error) for error in events.errors):
        raise OutcomeUnknown(f"{what}: cancelled")
    if events.failures:
        first = events.failures[0]
        raise EngineFailed(f"{what}: {first.urn.rpartition('::')[2]}: {first.message}", events.failures, events.changes)
    said = events.errors[0] if events.errors else _last_line(text)
    for pattern, error in _TROUBLE:
        if pattern.search(said) or pattern.search(text):
            raise error(f"{what}: {said}")
    raise EngineFailed(f"{what}: {said}")


def _plain(text: str) -> str:
    """Without colour marks, without the blank ends and without tokens."""
    return _TOKEN.sub("[token]", re.sub(r"<\{%[^%]*%\}>|\x1b\[[0-9;]*m", "", text)).strip()


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    panic = [
        line for line in lines if line.startswith("panic: ")
    ]  # what follows is a trace, and perhaps the environment
    return (panic or lines)[-1].removeprefix("error: ") if lines else "the engine gave no reason"


def instant(text: str | None) -> datetime | None:
    """The time that the engine wrote; None for none."""
    try:
        return datetime.fromisoformat(text) if text else None
    except ValueError:
        return None
