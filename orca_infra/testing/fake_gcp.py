"""A Google Cloud in memory: its compute API's instances and operations, as far as machine pools meet them.

It keeps real time. A create shows its instance at once, as PROVISIONING, and ends late: then the instance runs, or it is
gone and the operation says why (a stock-out). Lists lag behind what is so. Deletes may fail and leave the instance. Each
call meets at most one armed `Fault`. `fake_gcp_http` serves it as REST, for Google's client library and for
`fake_gcp_plugin`, which answers the Pulumi engine as `gcp`.

Two packages were looked at first: drongo 0.8 has no compute API; gcplocal 0.1 has one in which every operation is done
at once, without capacity, quotas, lag, filters or partial lists, so nothing that matters here could be armed in it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

PROJECT = "orca-test"
ZONES = ("us-central1-a", "us-central1-b", "us-central1-c", "europe-west4-a")

_SENTENCE = (
    "The zone 'projects/orca-test/zones/{zone}' does not have enough resources available to fulfill the request."
    "  Try a different zone, or try again later."
)
#: Every way in which a stock-out is said (field case M1): a code, a longer one, and sentences alone. (code, message)
STOCK_OUTS = (
    ("ZONE_RESOURCE_POOL_EXHAUSTED", f"ZONE_RESOURCE_POOL_EXHAUSTED: {_SENTENCE}"),
    (
        "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS",
        "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS: '(resource type:compute)' (state:STOCKOUT)",
    ),
    ("", _SENTENCE),
    (
        "",
        "A e2-small VM instance is currently unavailable in the {zone} zone. Alternatively, you can try your request again.",
    ),
)
_NAME = re.compile(r"[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?")
_LABEL = re.compile(r"[a-z0-9_-]{0,63}")
_FILTER = re.compile(r"labels\.([a-z0-9_-]+):\*")


class ApiError(Exception):
    """An answer that is an error: its HTTP status, reason and words."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """How one call goes wrong.

    Attributes:
        status: the HTTP status of the answer; 0: the call is taken and its operation ends with the error.
        reason: the code or reason.
        message: the words; `{zone}` stands for the zone. Neither reason nor message: it is slow only.
        seconds: how much longer the answer (`status`) or the operation takes.
        zone: only calls that concern this zone.

    """

    status: int = 0
    reason: str = ""
    message: str = ""
    seconds: float = 0
    zone: str = ""


@dataclass(slots=True, kw_only=True)
class Instance:
    """An instance; `listed_at` is when lists begin to show it, by time.monotonic."""

    id: int
    zone: str
    body: dict[str, Any]
    created_at: datetime
    listed_at: float
    status: str = "PROVISIONING"

    @property
    def name(self) -> str:
        return str(self.body["name"])

    @property
    def type(self) -> str:
        return str(self.body["machineType"]).rpartition("/")[2]

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.body.get("labels") or {})

    @property
    def label_fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self.labels, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def metadata(self) -> dict[str, str]:
        return {item["key"]: item["value"] for item in self.body.get("metadata", {}).get("items", [])}

    @property
    def is_spot(self) -> bool:
        return bool(self.body.get("scheduling", {}).get("provisioningModel") == "SPOT")


@dataclass(slots=True, kw_only=True)
class Operation:
    """What was begun: when it ends, what is done then, and the error it ends with."""

    name: str
    zone: str
    kind: str
    instance: Instance
    due_at: float
    code: str = ""
    message: str = ""
    is_done: bool = False

    @property
    def failed(self) -> bool:
        return bool(self.code or self.message)


@dataclass(slots=True)
class FakeGcp:
    """One project.

    Attributes:
        capacity: how many instances of a type a zone has room for; one that is not named has room for any number.
        stock_outs_late: whether a stock-out is found out at the operation's end, as mostly, or at once.
        quotas: how many instances a region, or `global`, may have.
        list_lag_seconds: how long lists do not show a new instance.
        unreachable: zones that lists cannot look into.
        lists_are_whole: whether a list then fails, unless it is asked for what there is (returnPartialSuccess).
        types: the machine types that exist; empty: all.
        missing: words; what names one of them (an image, a network, a service account) does not exist.
        broken: what every call answers, if anything: an API that is off, credentials that are missing.
        page_size: the most instances on a page of a list.
        booted: told of each instance that begins to run.

    """

    capacity: dict[tuple[str, str], int] = field(default_factory=dict)
    stock_outs_late: bool = True
    quotas: dict[str, int] = field(default_factory=dict)
    create_seconds: float = 0
    delete_seconds: float = 0
    list_lag_seconds: float = 0
    unreachable: set[str] = field(default_factory=set)
    lists_are_whole: bool = False
    types: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
    broken: ApiError | None = None
    page_size: int = 500
    booted: Callable[[Instance], None] = lambda _: None
    instances: dict[tuple[str, str], Instance] = field(default_factory=dict)
    operations: dict[str, Operation] = field(default_factory=dict)
    consoles: dict[str, str] = field(default_factory=dict)
    others: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    calls: list[tuple[str, str]] = field(default_factory=list)
    _armed: list[tuple[str, Fault]] = field(default_factory=list)
    _ids: Iterator[int] = field(default_factory=lambda: itertools.count(7_000_000_000_000_000_000))
    _lock: threading.RLock = field(default_factory=threading.RLock)

    # What tests do.

    def arm(self, verb: str, fault: Fault, times: int = 1) -> None:
        """Have the next calls of `insert`, `delete`, `label`, `list`, `get` or `serial` go wrong so."""
        with self._lock:
            self._armed += [(verb, fault)] * times

    def hurry(self) -> None:
        """Have every operation that is under way end now."""
        with self._lock:
            for operation in self.operations.values():
                operation.due_at = min(operation.due_at, time.monotonic())

    def is_at(self, verb: str) -> bool:
        """Whether an operation of this verb is under way."""
        with self._lock:
            self._settle()
            return any(operation.kind == verb and not operation.is_done for operation in self.operations.values())

    def plant(self, name: str, zone: str = ZONES[0], labels: Mapping[str, str] | None = None) -> Instance:
        """Make an instance by hand, as in Google's console."""
        with self._lock:
            instance = self._new(zone, {"name": name, "machineType": "e2-small", "labels": dict(labels or {})})
            instance.status = "RUNNING"
            return instance

    def names(self) -> list[str]:
        """Every instance that exists, whatever its status."""
        with self._lock:
            self._settle()
            return sorted(instance.name for instance in self.instances.values())

    def named(self, name: str) -> Instance:
        """The instance of this name, in whichever zone."""
        with self._lock:
            self._settle()
            return next(instance for instance in self.instances.values() if instance.name == name)

    def preempt(self, name: str) -> None:
        """Take a spot instance away: it goes, or stops, by its own termination action."""
        with self._lock:
            instance = self.named(name)
            if instance.body.get("scheduling", {}).get("instanceTerminationAction") == "DELETE":
                del self.instances[instance.zone, name]
            instance.status = "TERMINATED"

    def stop(self, name: str) -> None:
        with self._lock:
            self.named(name).status = "TERMINATED"

    def unlabel(self, name: str) -> None:
        """Take every label off by hand."""
        with self._lock:
            self.named(name).body["labels"] = {}

    def remove(self, name: str) -> None:
        """Delete an instance by hand, at once."""
        with self._lock:
            del self.instances[self.named(name).zone, name]

    # What the API does.

    def insert(self, zone: str, body: dict[str, Any]) -> Operation:
        """Begin to make an instance."""
        fault = self._meet("insert", zone)
        with self._lock:
            self._check(zone, body)
            self._check_quota(zone)
            instance = Instance(
                id=0, zone=zone, body=body, created_at=datetime.now(UTC), listed_at=0
            )  # only its type is looked at
            words = self._stock_out(instance)
            if words is not None and not self.stock_outs_late:
                raise ApiError(503, words[0] or "backendError", words[1])
            instance = self._new(zone, body)
            code, message = words or ((fault.reason, fault.message.replace("{zone}", zone)) if fault else ("", ""))
            return self._begin("insert", instance, self.create_seconds + (fault.seconds if fault else 0), code, message)

    def delete(self, zone: str, wanted: str) -> Operation:
        """Begin to delete an instance, named or by its id."""
        fault = self._meet("delete", zone)
        with self._lock:
            instance = self._find(zone, wanted)
            instance.status = "STOPPING"
            code, message = (fault.reason, fault.message) if fault else ("", "")
            return self._begin("delete", instance, self.delete_seconds + (fault.seconds if fault else 0), code, message)

    def set_labels(self, zone: str, wanted: str, body: dict[str, Any]) -> Operation:
        """Change an instance's labels, if `labelFingerprint` is of those it has."""
        fault = self._meet("label", zone)
        with self._lock:
            instance = self._find(zone, wanted)
            if body.get("labelFingerprint") != instance.label_fingerprint:
                raise ApiError(
                    412, "conditionNotMet", "Labels fingerprint either invalid or resource labels have changed"
                )
            if fault is None:
                instance.body["labels"] = dict(body.get("labels") or {})
            code, message = (fault.reason, fault.message) if fault else ("", "")
            return self._begin("setLabels", instance, fault.seconds if fault else 0, code, message)

    def begin_stop(self, zone: str, wanted: str) -> Operation:
        """Begin to stop an instance, as its owner does."""
        self._meet("stop", zone)
        with self._lock:
            instance = self._find(zone, wanted)
            instance.status = "TERMINATED"
            return self._begin("stop", instance, 0, "", "")

    def get(self, zone: str, wanted: str) -> Instance:
        self._meet("get", zone)
        with self._lock:
            return self._find(zone, wanted)

    def operation(self, zone: str, name: str) -> Operation:
        self._meet("operation", zone)
        with self._lock:
            self._settle()
            if name not in self.operations:
                raise _not_found(f"zones/{zone}/operations/{name}")
            return self.operations[name]

    def listed(self, words: str) -> list[Instance]:
        """What lists show by now of what a filter asks for, by zone and name."""
        self._meet("list", "")
        found = _FILTER.fullmatch(words)
        if words and found is None:
            raise ApiError(
                400, "invalid", f"Invalid value for field 'filter': '{words}'. Invalid list filter expression."
            )
        with self._lock:
            self._settle()
            now = time.monotonic()
            return sorted(
                (
                    instance
                    for instance in self.instances.values()
                    if instance.listed_at <= now
                    and instance.zone not in self.unreachable
                    and (found is None or found[1] in instance.labels)
                ),
                key=lambda instance: (instance.zone, instance.name),
            )

    def serial(self, zone: str, name: str) -> str:
        self._meet("serial", zone)
        with self._lock:
            return self.consoles.get(self._find(zone, name).name, "")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nothing happens meanwhile."""
        with self._lock:
            yield

    def _meet(self, verb: str, zone: str) -> Fault | None:
        """The fault of this call, if its operation is to fail. Raises ApiError when the call itself is."""
        with self._lock:
            self._settle()
            self.calls.append((verb, zone))
            fault = None
            for position, (armed, one) in enumerate(self._armed):
                if armed == verb and one.zone in {"", zone}:
                    fault = one
                    del self._armed[position]
                    break
        if self.broken is not None:
            raise self.broken
        if fault is None or not fault.status:
            return fault
        time.sleep(fault.seconds)
        raise ApiError(fault.status, fault.reason, fault.message.replace("{zone}", zone))

    def _check(self, zone: str, body: dict[str, Any]) -> None:
        name = str(body.get("name", ""))
        if zone not in ZONES:
            raise _not_found(f"zones/{zone}")
        if not _NAME.fullmatch(name):
            raise _invalid("name", name, f"Must be a match of regex '{_NAME.pattern}'")
        for key, value in (body.get("labels") or {}).items():
            if not _LABEL.fullmatch(key) or not _LABEL.fullmatch(value):
                raise _invalid("labels", f"{key}={value}", "Label values are lower-case letters, digits, _ and -.")
        kind = str(body.get("machineType", "")).rpartition("/")[2]
        if self.types and kind not in self.types:
            raise _invalid(
                "machineType", f"zones/{zone}/machineTypes/{kind}", "The referenced resource does not exist."
            )
        for where in ("disks", "networkInterfaces", "serviceAccounts"):
            said = str(body.get(where, ""))
            for word in self.missing:
                if word in said:
                    raise _invalid(f"{where}[0]", word, "The referenced resource does not exist.")
        if (zone, name) in self.instances:
            resource = f"projects/{PROJECT}/zones/{zone}/instances/{name}"
            raise ApiError(409, "alreadyExists", f"The resource '{resource}' already exists")

    def _check_quota(self, zone: str) -> None:
        region = zone.rpartition("-")[0]
        for place, metric in ((region, "CPUS"), ("global", "CPUS_ALL_REGIONS")):
            used = sum(place in {"global", i.zone.rpartition("-")[0]} for i in self.instances.values())
            if used >= self.quotas.get(place, used + 1):
                where = "globally" if place == "global" else f"in region {place}"
                raise ApiError(
                    403, "quotaExceeded", f"Quota '{metric}' exceeded.  Limit: {self.quotas[place]}.0 {where}."
                )

    def _stock_out(self, wanted: Instance) -> tuple[str, str] | None:
        kind = (wanted.zone, wanted.type)
        used = sum((i.zone, i.type) == kind and i.status != "TERMINATED" for i in self.instances.values())
        if used < self.capacity.get(kind, used + 1):
            return None
        code, message = STOCK_OUTS[len(self.calls) % len(STOCK_OUTS)]
        return code, message.replace("{zone}", wanted.zone)

    def _new(self, zone: str, body: dict[str, Any]) -> Instance:
        instance = Instance(
            id=next(self._ids),
            zone=zone,
            body=body,
            created_at=datetime.now(UTC),
            listed_at=time.monotonic() + self.list_lag_seconds,
        )
        self.instances[zone, instance.name] = instance
        return instance

    def _begin(self, kind: str, instance: Instance, seconds: float, code: str, message: str) -> Operation:
        operation = Operation(
            name=f"operation-{next(self._ids)}",
            zone=instance.zone,
            kind=kind,
            instance=instance,
            due_at=time.monotonic() + seconds,
            code=code,
            message=message,
        )
        self.operations[operation.name] = operation
        self._settle()
        return operation

    def _find(self, zone: str, wanted: str) -> Instance:
        if zone not in ZONES:
            raise _not_found(f"zones/{zone}")
        for instance in self.instances.values():
            if instance.zone == zone and wanted in {instance.name, str(instance.id)}:
                return instance
        raise _not_found(f"zones/{zone}/instances/{wanted}")

    def _settle(self) -> None:
        """End the operations whose time has come; whoever asked for them may be dead by now."""
        now = time.monotonic()
        for operation in list(self.operations.values()):
            if operation.is_done or operation.due_at > now:
                continue
            operation.is_done = True
            if operation.kind in {"setLabels", "stop"}:
                continue
            instance = operation.instance
            key = (instance.zone, instance.name)
            is_there = self.instances.get(key) is instance
            if operation.failed == (operation.kind == "insert"):  # an insert that failed, a delete that did not
                if is_there:
                    del self.instances[key]
            elif is_there:
                instance.status = "RUNNING"
                if operation.kind == "insert":
                    self.booted(instance)


def _not_found(resource: str) -> ApiError:
    return ApiError(404, "notFound", f"The resource 'projects/{PROJECT}/{resource}' was not found")


def _invalid(name: str, value: str, why: str) -> ApiError:
    return ApiError(400, "invalid", f"Invalid value for field 'resource.{name}': '{value}'. {why}")
