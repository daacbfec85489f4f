"""One environment variable, and how its text becomes a value: each ValueError is a sentence without its subject."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from orca_infra.policy.configuration import PolicyFile, read_policy_file
from orca_infra.quantity import cpu_millis, duration_text, memory_bytes, seconds_of

_FAMILY = re.compile(r"[A-Za-z0-9_-]{1,40}")
_COUNT = re.compile(r"[0-9]{1,6}")
#: What the engine keeps its state at; it takes any other scheme for its vendor's service, and asks for an account there.
_STATE_URL = re.compile(r"(postgres|file|s3|gs|azblob|https?)://.*", re.ASCII | re.DOTALL)
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_OURS = frozenset({"ORCA_DB", "DISTA_HEAD", "DISTA_PORT"})
_LEAST_KEY_BYTES = 16
_CORES_MOST = 1_000_000
_WHOLE_SECONDS_MOST = 2**31 - 1
CORES = "cores"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One environment variable.

    Attributes:
        name: of the variable.
        field: of `Settings`.
        meaning: what it decides; a sentence.
        unit: how its value is written.
        default: what unset means, written as a value would be; None when there is no value for it.
        why: why that default.
        unset: what happens when it is not set.
        read: turns the text into the value; its ValueError completes "NAME ...".
        secret: the value is never shown.

    """

    name: str
    field: str
    meaning: str
    unit: str
    default: str | None
    why: str
    unset: str
    read: Callable[[str], object]
    secret: bool = False


def read_family(text: str) -> str:
    if not _FAMILY.fullmatch(text):
        raise ValueError('must be 1 to 40 letters, digits, "-" or "_"; a dot would split the names of its stacks')
    return text


def read_seconds(text: str) -> float:
    seconds = seconds_of(text)
    if seconds == 0:
        raise ValueError("must be more than 0")
    return seconds


def read_count(text: str) -> int:
    if not _COUNT.fullmatch(text.strip()):
        raise ValueError("must be a whole number from 0 to 999999")
    return int(text)


def read_parallel(text: str) -> int:
    if text.strip() == CORES:
        return len(os.sched_getaffinity(0))
    count = read_count(text)
    if count == 0:
        raise ValueError("must be at least 1")
    return count


def read_drift(text: str) -> bool:
    if text not in {"repair", "report"}:
        raise ValueError("must be repair or report")
    return text == "report"


def read_flag(text: str) -> bool:
    if text not in {"true", "false"}:
        raise ValueError("must be true or false")
    return text == "true"


def read_path(text: str) -> Path:
    path = Path(text)
    # A shell would have replaced ~; a Compose file or a systemd unit does not.
    return path.expanduser() if path.parts[:1] == ("~",) else path


def read_key(text: str) -> bytes:
    key = os.fsencode(text)  # the very bytes of the environment, whatever their encoding
    if len(key) < _LEAST_KEY_BYTES:
        raise ValueError(f"must have at least {_LEAST_KEY_BYTES} bytes; `openssl rand -hex 32` makes a good one")
    return key


def read_runner(text: str) -> str:
    if text != "kubernetes":
        raise ValueError("must be kubernetes, or unset for no run clusters")
    return text


def read_log_form(text: str) -> str:
    if text not in {"json", "text"}:
        raise ValueError("must be json or text, or unset for text on a terminal and JSON elsewhere")
    return text


def read_policies(text: str) -> PolicyFile:
    return read_policy_file(read_path(text))


def read_label(text: str) -> str:
    if not _LABEL.fullmatch(text):
        raise ValueError("must be a name as Kubernetes takes it: at most 63 lower-case letters, digits and -")
    return text


def read_names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if not _VARIABLE.fullmatch(name):
            raise ValueError(f"must be names of variables with commas between them, and {name!r} is none")
        if name in _OURS:
            raise ValueError(f"must not have {name}, which every driver gets from this program")
    return names


def read_users(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def read_port(text: str) -> int:
    if not _COUNT.fullmatch(text.strip()) or not 0 < int(text) < 65536:
        raise ValueError("must be a port, 1 to 65535")
    return int(text)


def read_cpu(text: str) -> str:
    if cpu_millis(text) == 0:
        raise ValueError("must be more than 0")
    return text.strip()


def read_request(text: str) -> str:
    """What one Pod asks for; a node of so many cores there is not."""
    if cpu_millis(text) >= _CORES_MOST * 1000:
        raise ValueError(f"must be less than {_CORES_MOST} cores")
    return read_cpu(text)


def read_memory(text: str) -> str:
    if memory_bytes(text) == 0:
        raise ValueError("must be more than 0")
    return text.strip()


def read_whole_seconds(text: str) -> float:
    seconds = seconds_of(text)
    if not 1 <= seconds <= _WHOLE_SECONDS_MOST or seconds != int(seconds):
        raise ValueError(f"must be whole seconds, 1 to {_WHOLE_SECONDS_MOST}: it is a field of a Job")
    return seconds


def read_conninfo(text: str) -> str:
    if not text.strip():
        raise ValueError("must be a connection URL such as postgresql://user:password@host:5432/orca")
    return text


def read_url(text: str) -> str:
    if not _STATE_URL.fullmatch(text):
        raise ValueError("must be a URL such as postgres://…, file://…, s3://… or gs://…")
    return text


def seconds(name: str, field: str, default: str, *, meaning: str, why: str) -> Setting:
    unit = "seconds, or text such as 10m"
    unset = f"{duration_text(seconds_of(default))}."
    return Setting(
        name=name, field=field, meaning=meaning, unit=unit, default=default, why=why, unset=unset, read=read_seconds
    )


def count(name: str, field: str, default: str, *, meaning: str, why: str) -> Setting:
    unit = "whole number from 0"
    return Setting(
        name=name,
        field=field,
        meaning=meaning,
        unit=unit,
        default=default,
        why=why,
        unset=f"{default}.",
        read=read_count,
    )


def cpu(name: str, field: str, default: str, *, meaning: str) -> Setting:
    return Setting(
        name=name,
        field=field,
        meaning=meaning,
        unit="CPU quantity such as 500m, 2 or 1.5",
        default=default,
        why="It is counted against ORCA_VCPU_BUDGET, and what the scheduler of the cluster reserves.",
        unset=f"{default}.",
        read=read_request,
    )
