"""Drivers' logs: followed while they run, and kept in `<logs>/<run>/driver.log`.

Each driver Pod is written to a part file of its own, with its position beside it, so that a controller that was away goes on
where it was: nothing twice, and nothing lost of what the node still has. When the start is swept the part is appended to
`driver.log` under a header line. Memory is bounded whatever the log's size; a log that cannot be had is noted, and holds up
neither its own sweep for ever nor anything else.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypedDict

from orca_infra.errors import OrcaError
from orca_infra.kube.client import Kube
from orca_infra.log import Log
from orca_infra.runs.model import PodPhase, SeenObject

#: Drivers followed at once; the logs of more are read when they end.
FOLLOWERS_MAX = 64
#: A log that could not be followed is tried again after this.
RETRY_SECONDS = 30.0
#: A line longer than this is written in pieces.
_LINE_MAX = 2**20
_POSITION_SECONDS = 1.0


class _Position(TypedDict):
    """How far a part has come: its size, the last line's time, and how many lines had exactly that time."""

    size: int
    time: str
    same: int


def driver_log(logs: Path, run: int) -> Path:
    """Where a run's drivers are heard, all starts one after the other."""
    return logs / str(run) / "driver.log"


def parts(logs: Path, run: int) -> list[Path]:
    """What is heard of drivers that have not been swept yet, the oldest start first."""
    return sorted((logs / str(run)).glob(".driver-*.part"), key=lambda path: int(path.name.split("-")[1]))


@dataclass(slots=True)
class _Follower:
    stop: threading.Event
    thread: threading.Thread


class DriverLogs:
    """The logs of this family's drivers. One thread a driver that is followed; `finish` and `close` end them."""

    def __init__(self, kube: Kube, logs: Path, log: Log) -> None:
        self._kube, self._logs, self._log = kube, logs, log
        self._followers: dict[str, _Follower] = {}
        self._retry_at: dict[str, float] = {}

    def follow(self, drivers: Iterable[SeenObject]) -> None:
        """Follow those that run and are not followed yet."""
        self._followers = {uid: f for uid, f in self._followers.items() if f.thread.is_alive()}
        now = time.monotonic()
        self._retry_at = {uid: at for uid, at in self._retry_at.items() if at > now}
        for driver in drivers:
            if len(self._followers) >= FOLLOWERS_MAX:
                return
            if (
                driver.phase is PodPhase.RUNNING
                and driver.uid not in self._followers
                and driver.uid not in self._retry_at
            ):
                stop = threading.Event()
                thread = threading.Thread(
                    target=self._follow, args=(driver, stop), name=f"log-{driver.name}", daemon=True
                )
                self._followers[driver.uid] = _Follower(stop, thread)
                thread.start()

    def finish(self, driver: SeenObject) -> None:
        """Read what is left, and append all of it to the run's driver.log under a header line."""
        follower = self._followers.pop(driver.uid, None)
        if follower is not None:
            follower.stop.set()
            follower.thread.join(timeout=RETRY_SECONDS)
        note = ""
        try:
            self._read(driver, follow=False, stop=threading.Event())
        except OrcaError as error:
            note = f"--- the rest of the log cannot be had: {error}\n"
        except OSError as error:
            note = f"--- the log could not be written: {error.strerror}\n"
        header = f"--- run {driver.run} start {driver.start}, Pod {driver.name}, uid {driver.uid}\n"
        try:
            _append(driver_log(self._logs, driver.run or 0), _part(self._logs, driver), header, note)
        except OSError as error:
            self._log.warning("driver's log not kept whole", run=driver.run, pod=driver.name, said=error.strerror)

    def close(self) -> None:
        """Stop following; what was read stays in its parts."""
        for follower in self._followers.values():
            follower.stop.set()

    def _follow(self, driver: SeenObject, stop: threading.Event) -> None:
        try:
            self._read(driver, follow=True, stop=stop)
        except (OrcaError, OSError) as error:
            self._retry_at[driver.uid] = time.monotonic() + RETRY_SECONDS
            if not stop.is_set():
                self._log.info("driver's log not followed", run=driver.run, pod=driver.name, said=str(error))

    def _read(self, driver: SeenObject, *, follow: bool, stop: threading.Event) -> None:
        """Write the Pod's log from where its part ends."""
        part = _part(self._logs, driver)
        part.parent.mkdir(parents=True, exist_ok=True)
        if part.with_suffix(".append").exists():
            return  # it was read to its end before it was appended
        position = _load(part)
        with part.open("ab") as file:
            file.truncate(position["size"])
            file.seek(position["size"])
            chunks = self._kube.logs(
                driver.namespace,
                driver.name,
                follow=follow,
                timestamps=True,
                since_time=position["time"] or None,
                stop=stop,
            )
            try:
                _write_lines(chunks, file, part, position)
            finally:
                with contextlib.suppress(OSError):
                    _save(part, file, position)


def _append(whole: Path, part: Path, header: str, note: str) -> None:
    """Append a part to the run's log, once: what a crash left half appended is cut off and appended anew."""
    intent = part.with_suffix(".append")
    if intent.exists() and not part.exists():
        intent.unlink()  # appended, and only this mark was left
        return
    with whole.open("ab") as file:
        if intent.exists():
            file.truncate(int(intent.read_text(encoding="ascii")))
        else:
            intent.write_text(str(file.seek(0, os.SEEK_END)), encoding="ascii")
        file.write(header.encode())
        if part.exists():
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, file)
            if not _ends_a_line(part):
                file.write(b"\n")
        file.write(note.encode())
    for leftover in (part, _position_of(part), intent):
        leftover.unlink(missing_ok=True)


def _write_lines(chunks: Iterator[bytes], file: BinaryIO, part: Path, position: _Position) -> None:
    """Write each line without its timestamp, leaving out those that the part has already."""
    resumed, skip = position["time"], position["same"]
    saved_at = time.monotonic()
    for stamp, text in _lines(chunks):
        if stamp and stamp < resumed:
            continue
        if stamp and stamp == resumed and skip:
            skip -= 1
            continue
        file.write(text)
        if stamp:
            position["same"] = position["same"] + 1 if stamp == position["time"] else 1
            position["time"] = stamp
        if time.monotonic() - saved_at >= _POSITION_SECONDS:
            _save(part, file, position)
            saved_at = time.monotonic()


def _lines(chunks: Iterator[bytes]) -> Iterator[tuple[str, bytes]]:
    """The log's lines with their times; the pieces of an overlong line after the first have none."""
    buffer = b""
    within = False
    for chunk in chunks:
        buffer += chunk
        *whole, buffer = buffer.split(b"\n")
        for line in whole:
            yield _stamped(line + b"\n", within=within)
            within = False
        if len(buffer) > _LINE_MAX:
            yield _stamped(buffer, within=within)
            buffer, within = b"", True
    if buffer:
        yield _stamped(buffer, within=within)


def _stamped(line: bytes, *, within: bool) -> tuple[str, bytes]:
    """A line's time, so written that later is greater, and its text."""
    head, space, text = line.partition(b" ")
    if within or not space or not head.endswith(b"Z") or b"T" not in head:
        return "", line
    seconds, _, fraction = head.decode("ascii", errors="replace").removesuffix("Z").partition(".")
    return f"{seconds}.{fraction:0<9}Z", text


def _part(logs: Path, driver: SeenObject) -> Path:
    return logs / str(driver.run or 0) / f".driver-{driver.start or 0}-{driver.uid}.part"


def _position_of(part: Path) -> Path:
    return part.with_suffix(".position")


def _load(part: Path) -> _Position:
    """Where to go on; from the beginning when nothing that can be relied on is there."""
    try:
        found = json.loads(_position_of(part).read_text(encoding="utf-8"))
        if part.stat().st_size >= found["size"]:
            return _Position(size=found["size"], time=found["time"], same=found["same"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return _Position(size=0, time="", same=0)


def _save(part: Path, file: BinaryIO, position: _Position) -> None:
    file.flush()
    position["size"] = file.tell()
    temporary = part.with_suffix(f".position.{os.getpid()}")
    temporary.write_text(json.dumps(position), encoding="utf-8")
    temporary.replace(_position_of(part))


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
