"""The make-believe cloud behind provider `local`: a folder, and process groups on this machine.

It behaves as a cloud does where that matters to us: capacity for each location and type, errors with a code word, a uid for
each machine, a serial console, preemption, slow answers. Whoever calls it may be killed at any instant: then either nothing
was made, or a machine that `list` shows and `delete` removes. A create answers late, after `create_seconds`, while the
machine boots already; so a caller that dies in between leaves a machine that nobody recorded, as with a real cloud.

How the folder looks is told in `local_machine`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TypedDict
from uuid import uuid4

from orca_infra.errors import AuthFailed, Conflict, NoCapacity, OrcaError, QuotaExceeded, Refused, Transient
from orca_infra.machines.model import MachineState, SeenMachine
from orca_infra.machines.providers.local_machine import (
    BOOT_SECONDS,
    CONSOLE,
    RECORD,
    Record,
    age_seconds,
    locked,
    read_process,
    read_record,
    write_json,
)
from orca_infra.process import boot_id, end_session, is_alive

CODES: Mapping[str, type[OrcaError]] = {
    "LOCATION_OUT_OF_CAPACITY": NoCapacity,
    "QUOTA_EXCEEDED": QuotaExceeded,
    "INVALID_REQUEST": Refused,
    "ALREADY_EXISTS": Conflict,
    "PERMISSION_DENIED": AuthFailed,
    "UNAVAILABLE": Transient,
}
"""The code word with which a message begins, and what it means."""

NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
VERBS = ("create", "list", "get", "delete", "label")

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_INHERITED = ("PATH", "LANG", "HOME", "PYTHONPATH")
_GRACE_SECONDS = 2.0
_HURRIED = "hurried"
_DELETE_PASSES = 20

_children: list[subprocess.Popen[bytes]] = []  # kept until they end, so that each is waited for and leaves no zombie


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRequest:
    """A machine as it is asked for.

    Attributes:
        name: 1 to 63 of a-z, 0-9 and `-`, beginning with a letter and not ending with `-`.
        argv: what it boots; `python` as the first means the Python that runs this.
        environment: what it finds around it besides the cloud's own; has its token, so it is secret.

    """

    name: str
    location: str
    type: str
    argv: tuple[str, ...]
    labels: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)


class _Fault(TypedDict):
    verb: str
    code: str
    message: str
    location: str | None
    times: int
    seconds: float


_FaultList = list[_Fault]  # named here: inside the class below, `list` is its verb
_SeenList = list[SeenMachine]


class _Configuration(TypedDict):
    locations: dict[str, dict[str, int]]
    create_seconds: float
    environment: dict[str, str]


class LocalCloud:
    """One such cloud; any number of processes may use one folder at once.

    Every verb raises `Transient` when the folder is missing, the disk is full or a fault says so, and what else an armed
    fault means. No message ever has a value of an environment in it.
    """

    def __init__(self, folder: Path) -> None:
        """Args: folder: the cloud's; made by `configure`, and not here, since a missing one is not an empty one."""
        self.folder = folder.absolute()
        self._machines = self.folder / "machines"

    def configure(
        self, locations: Mapping[str, Mapping[str, int]], create_seconds: float, environment: Mapping[str, str]
    ) -> None:
        """Makes the cloud, or says anew what it has; machines that exist stay as they are.

        Args:
            locations: how many machines each location has of each type. A type that a location does not name has none
                there, a location that is not named does not exist; none named at all means no limit anywhere.
            create_seconds: how long a create takes to answer.
            environment: what every machine finds around it. It is kept here alone, out of Pulumi's state.

        """
        _check_environment(environment)
        value: _Configuration = {
            "locations": {location: dict(types) for location, types in locations.items()},
            "create_seconds": create_seconds,
            "environment": dict(environment),
        }
        with self._translated():
            self._machines.mkdir(mode=0o700, parents=True, exist_ok=True)
            with locked(self.folder):
                write_json(self.folder / "cloud.json", value)

    def create(self, request: MachineRequest) -> SeenMachine:
        """Makes a machine, which boots at once.

        Raises:
            NoCapacity: the location has none of this type free; go on to the next.
            Conflict: a machine of this name exists.
            Refused: a bad name, location, argv or environment; the same request never succeeds.

        """
        with self._translated():
            self._meet_fault("create", request.location)
            _check_request(request)
            configuration = self._configuration()
            if configuration["locations"] and request.location not in configuration["locations"]:
                named = ", ".join(sorted(configuration["locations"]))
                raise Refused(f"INVALID_REQUEST: no such location: {request.location}; there are {named}")
            try:
                record = self._make(request, configuration)
            finally:
                time.sleep(configuration["create_seconds"])
            return self._seen(record, MachineState.RUNNING)

    def list(self) -> list[SeenMachine]:
        """Everything that exists, whatever its labels, by name."""
        with self._translated():
            self._meet_fault("list", None)
            short = {fault["location"] for fault in self._faults() if fault["verb"] == "list"} - {None}
            return [machine for machine in self._list() if machine.location not in short]

    def get(self, name: str) -> SeenMachine | None:
        """The machine of this name, or None when there is none."""
        with self._translated():
            record = read_record(self._path(name))
            self._meet_fault("get", record["location"] if record else None)
            return self._seen(record, self._state(record, boot_id())) if record else None

    def delete(self, name: str, uid: str | None = None) -> None:
        """Ends the machine's whole session, then removes the machine. A machine that is gone, or has another uid, is fine.

        The record goes last and under the lock, so that a machine can't come up, or be forgotten, in between.
        """
        with self._translated():
            machine = self._path(name)
            record = read_record(machine)
            self._meet_fault("delete", record["location"] if record else None)
            for _ in range(_DELETE_PASSES):
                record = read_record(machine)
                if record is None or uid not in (None, record["uid"]):
                    return
                process = read_process(machine, boot_id())
                if process is not None:
                    end_session(process, _GRACE_SECONDS)
                if self._forget(record, started=process is not None):
                    return
            raise Transient(f"UNAVAILABLE: machine {name} is made again as fast as it is deleted")

    def console(self, name: str, last_bytes: int = 65536) -> str:
        """The end of what the machine printed; empty when it printed nothing or there is no such machine."""
        with self._translated():
            try:
                with open(self._path(name) / CONSOLE, "rb") as file:
                    file.seek(max(0, file.seek(0, os.SEEK_END) - last_bytes))
                    return file.read(last_bytes).decode("utf-8", errors="replace")
            except FileNotFoundError:
                return ""

    def preempt(self, name: str) -> None:
        """Takes the machine away without a warning; it stays listed, as preempted.

        Raises:
            Refused: there is no such machine.

        """
        with self._translated():
            self._halt(name, MachineState.PREEMPTED, signal.SIGKILL)

    def stop(self, name: str) -> None:
        """Stops the machine; it stays listed, as stopped.

        Raises:
            Refused: there is no such machine.

        """
        with self._translated():
            self._halt(name, MachineState.STOPPED, signal.SIGTERM)

    def relabel(self, name: str, labels: Mapping[str, str]) -> SeenMachine:
        """Gives the machine these labels in place of those it has.

        Raises:
            Refused: there is no such machine.

        """
        with self._translated():
            record = self._change(name, labels=labels)
            return self._seen(record, self._state(record, boot_id()))

    def put_labels(self, name: str, uid: str, labels: Mapping[str, str]) -> None:
        """Gives this very machine these labels besides those it has; one that is gone, or has another uid, is left alone."""
        with self._translated():
            machine = self._path(name)
            record = read_record(machine)
            self._meet_fault("label", record["location"] if record else None)
            with locked(self.folder):
                record = read_record(machine)
                if record is not None and record["uid"] == uid:
                    write_json(machine / RECORD, {**record, "labels": {**record["labels"], **labels}})

    def arm(
        self,
        verb: str,
        code: str,
        message: str = "",
        *,
        location: str | None = None,
        times: int = 1,
        seconds: float = 0.0,
    ) -> None:
        """Has the next calls of a verb fail, in whichever process they come.

        Args:
            verb: one of `VERBS`.
            code: one of `CODES`, or empty for an answer that is slow only.
            message: what the cloud says after the code.
            location: only calls that concern this location (of the request, or of the machine that is named). A list
                says nothing of it for as long as this is armed, as when a cloud's zone does not answer.
            times: how many calls.
            seconds: how long the answer takes.

        Raises:
            Refused: no such verb or code.

        """
        if verb not in VERBS or (code and code not in CODES):
            raise Refused(f"INVALID_REQUEST: no fault {code!r} of {verb!r}; verbs {VERBS}, codes {tuple(CODES)}")
        fault: _Fault = {
            "verb": verb,
            "code": code,
            "message": message or "a fault that was armed",
            "location": location,
            "times": times,
            "seconds": seconds,
        }
        with self._translated(), locked(self.folder):
            (self.folder / _HURRIED).unlink(missing_ok=True)
            write_json(self.folder / "faults.json", [*self._faults(), fault])

    def hurry(self) -> None:
        """Has the slow answers that are under way come now, in whichever process they are waited for."""
        with self._translated():
            (self.folder / _HURRIED).touch()

    # What follows is on disk.

    def _path(self, name: str) -> Path:
        if not NAME.fullmatch(name):
            raise Refused(f"INVALID_REQUEST: {name!r} is no machine's name ({NAME.pattern})")
        return self._machines / name

    def _configuration(self) -> _Configuration:
        try:
            value: _Configuration = json.loads((self.folder / "cloud.json").read_bytes())
        except FileNotFoundError:
            return {"locations": {}, "create_seconds": 0.0, "environment": {}}
        return value

    def _list(self) -> _SeenList:
        boot = boot_id()
        names = sorted(entry.name for entry in os.scandir(self._machines) if not entry.name.startswith("."))
        records = (read_record(self._machines / name) for name in names)
        return [self._seen(record, self._state(record, boot)) for record in records if record is not None]

    def _seen(self, record: Record, state: MachineState) -> SeenMachine:
        return SeenMachine(
            name=record["name"],
            uid=record["uid"],
            location=record["location"],
            type=record["type"],
            state=state,
            created_at=datetime.fromisoformat(record["created_at"]),
            labels=record["labels"],
        )

    def _state(self, record: Record, boot: str) -> MachineState:
        if record["state"]:
            return MachineState(record["state"])
        process = read_process(self._machines / record["name"], boot)
        running = age_seconds(record) <= BOOT_SECONDS if process is None else is_alive(process)
        return MachineState.RUNNING if running else MachineState.STOPPED

    def _make(self, request: MachineRequest, configuration: _Configuration) -> Record:
        record: Record = {
            "name": request.name,
            "uid": uuid4().hex,
            "location": request.location,
            "type": request.type,
            "labels": dict(request.labels),
            "argv": list(request.argv),
            "created_at": datetime.now(UTC).isoformat(),
            "state": "",
        }
        machine = self._machines / request.name
        with locked(self.folder):
            for leftover in self._machines.glob(".*"):  # of a maker that died, or being removed anyway
                shutil.rmtree(leftover, ignore_errors=True)
            if machine.exists():
                raise Conflict(f"ALREADY_EXISTS: a machine named {request.name} exists; it is not made again")
            self._check_capacity(request, configuration)
            draft = self._machines / f".new-{record['uid']}"
            draft.mkdir(mode=0o700)
            write_json(draft / RECORD, record)
            console = os.open(draft / CONSOLE, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                draft.rename(machine)
            except BaseException:
                os.close(console)
                raise
        try:
            self._boot(record, console, _environment(configuration["environment"], request.environment))
        finally:
            os.close(console)
        return record

    def _check_capacity(self, request: MachineRequest, configuration: _Configuration) -> None:
        if not configuration["locations"]:
            return
        total = configuration["locations"][request.location].get(request.type, 0)
        used = sum(
            seen.state is MachineState.RUNNING
            for seen in (self._list() if total else ())
            if (seen.location, seen.type) == (request.location, request.type)
        )
        if used >= total:
            raise NoCapacity(
                f"LOCATION_OUT_OF_CAPACITY: no {request.type} is free in {request.location} ({used} of {total} in use)"
            )

    def _boot(self, record: Record, console: int, environment: Mapping[str, str]) -> None:
        _children[:] = [child for child in _children if child.poll() is None]
        machine = self._machines / record["name"]
        launcher = "orca_infra.machines.providers.local_machine"
        try:
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", launcher, str(machine), record["uid"]],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                env=environment,
                cwd=self.folder,
                start_new_session=True,
            )
        except OSError:
            self._forget(record, started=False)
            raise
        _children.append(child)

    def _forget(self, record: Record, *, started: bool) -> bool:
        """Removes the record, unless the machine has come up meanwhile (then its session has to be ended first)."""
        machine = self._machines / record["name"]
        gone = self._machines / f".gone-{uuid4().hex}"
        with locked(self.folder):
            now = read_record(machine)
            if now is not None and now["uid"] == record["uid"]:
                if not started and read_process(machine, boot_id()) is not None:
                    return False
                machine.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
        return True

    def _halt(self, name: str, state: MachineState, first_signal: signal.Signals) -> None:
        self._change(name, state=state)  # first: what has not booted yet sees it and does not
        process = read_process(self._path(name), boot_id())
        if process is not None:
            end_session(process, _GRACE_SECONDS, first_signal)

    def _change(
        self, name: str, *, labels: Mapping[str, str] | None = None, state: MachineState | None = None
    ) -> Record:
        machine = self._path(name)
        with locked(self.folder):
            record = read_record(machine)
            if record is None:
                raise Refused(f"INVALID_REQUEST: there is no machine named {name}")
            if labels is not None:
                record["labels"] = dict(labels)
            if state is not None:
                record["state"] = state.value
            write_json(machine / RECORD, record)
        return record

    def _faults(self) -> _FaultList:
        try:
            faults: _FaultList = json.loads((self.folder / "faults.json").read_bytes())
        except FileNotFoundError:
            return []
        return faults

    def _meet_fault(self, verb: str, location: str | None) -> None:
        """Uses up one armed fault that fits, and does what it says. Without any, no lock is taken."""
        if not self.folder.is_dir():
            raise Transient(f"UNAVAILABLE: the local cloud's folder {self.folder} does not exist; `configure` makes it")
        if not (self.folder / "faults.json").exists():
            return
        with locked(self.folder):
            faults = self._faults()
            fitting = [f for f in faults if f["verb"] == verb and f["location"] in (None, location)]
            if not fitting:
                return
            fault = fitting[0]
            fault["times"] -= 1
            left = [f for f in faults if f["times"] > 0]
            if left:
                write_json(self.folder / "faults.json", left)
            else:
                (self.folder / "faults.json").unlink()
        self._wait(fault["seconds"])
        if fault["code"]:
            raise CODES[fault["code"]](f"{fault['code']}: {fault['message']}")

    def _wait(self, seconds: float) -> None:
        answers_at = time.monotonic() + seconds
        while (left := answers_at - time.monotonic()) > 0 and not (self.folder / _HURRIED).exists():
            time.sleep(min(left, 0.02))

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except json.JSONDecodeError:  # its cause would carry the file's text, which may be secret
            raise Transient(f"UNAVAILABLE: a file of the local cloud in {self.folder} is not JSON; mend it") from None
        except PermissionError as error:
            raise AuthFailed(f"PERMISSION_DENIED: the local cloud in {self.folder}: {error.strerror}") from error
        except OSError as error:
            raise Transient(
                f"UNAVAILABLE: the local cloud in {self.folder} cannot be used now: {error.strerror}"
            ) from error


def _check_request(request: MachineRequest) -> None:
    if not NAME.fullmatch(request.name):
        raise Refused(f"INVALID_REQUEST: {request.name!r} is no machine's name ({NAME.pattern})")
    if not request.location or not request.type:
        raise Refused(f"INVALID_REQUEST: machine {request.name} needs a location and a type")
    if not request.argv or any("\0" in word for word in request.argv):
        raise Refused(f"INVALID_REQUEST: machine {request.name} needs an argv of words to boot")
    _check_environment(request.environment)


def _check_environment(environment: Mapping[str, str]) -> None:
    for name, value in environment.items():
        if not _VARIABLE.fullmatch(name):
            raise Refused(f"INVALID_REQUEST: {name!r} is no environment variable's name")
        if "\0" in value:
            raise Refused(f"INVALID_REQUEST: the value of environment variable {name} has a NUL in it")


def _environment(cloud: Mapping[str, str], request: Mapping[str, str]) -> dict[str, str]:
    """What a machine finds around it: little of ours, then the cloud's, then its own; the later wins."""
    inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    return {**inherited, **cloud, **request}
