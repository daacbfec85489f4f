"""Drivers' logs: followed while they run, and kept in `<logs>/<run>/driver.log`.

Each driver Pod is written to a part file of its own, with its position beside it, so that a controller that was away goes on
where it was: nothing twice, and nothing lost of what the node still has. When the start is swept the part, which begins with
a header line, is appended to `driver.log`. Memory is bounded whatever the log's size. A log that cannot be had, or cannot be
written, is tried again for a while and then noted; meanwhile nothing else waits for it, and what was written stays.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, TypedDict

from orca_infra.errors import Conflict, OrcaError, Refused
from orca_infra.kube.client import Kube
from orca_infra.log import Log
from orca_infra.runs.model import PodPhase, SeenObject
from orca_infra.runs.readers import Readers

#: Drivers whose logs are held open; those of more are read in turn, each so often.
FOLLOWERS_MAX = 64
IN_TURN_SECONDS = 60.0
#: A log that could not be followed is tried again after this, and one that is to be kept after that.
RETRY_SECONDS = 30.0
KEEP_RETRY_SECONDS = 2.0
#: Logs read at once, beside those that are followed: of starts that end, those of them that were not had at the first try,
#: and in turn.
KEEPERS = 16
SLOW_KEEPERS = 4
IN_TURN_READERS = 2
#: A log of which as much was kept as can be is not looked at again for so long.
_FULL_SECONDS = 3600.0
#: A line longer than this is written in pieces.
_LINE_MAX = 2**20
_POSITION_SECONDS = 1.0
_FULL = {errno.ENOSPC, errno.EDQUOT}
_PROBE_BYTES = 2**16
_PART = re.compile(r"\.driver-(?P<start>\d+)-(?P<uid>.+)\.part")


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
    return sorted(_parts_in(logs / str(run)), key=lambda path: int(path.name.split("-")[1]))


def _parts_in(folder: Path) -> Iterator[Path]:
    return folder.glob(".driver-*.part")


@dataclass(slots=True)
class _Follower:
    """One driver's log being read. `done` ends with it, however it ended."""

    stop: threading.Event
    done: Future[None]


@dataclass(slots=True)
class _Keeping:
    """The logs of one start on their way into driver.log. `problem` is why they are not there yet."""

    since: float
    done: Future[None]
    problem: str = ""
    retry_at: float = 0.0
    tries: int = 0
    kept: set[str] = field(default_factory=set)


class DriverLogs:
    """The logs of this family's drivers, each read by one thread at a time.

    Attributes:
        trouble: what keeps logs from being written now, for an operator; empty when nothing does.

    """

    def __init__(
        self, kube: Kube, logs: Path, log: Log, *, give_up_seconds: float = 60.0, bytes_max: int = 2**30
    ) -> None:
        """A log that cannot be kept is given up `give_up_seconds` after the first try; of one Pod's, `bytes_max` are kept."""
        self._bytes_max = bytes_max
        self._kube, self._logs, self._log = kube, logs, log
        self._give_up_seconds = give_up_seconds
        self._followers: dict[str, _Follower] = {}
        self._read_at: dict[str, float] = {}
        self._retry_at: dict[str, float] = {}
        self._keeping: dict[tuple[int, int], _Keeping] = {}
        self._silent_nodes: dict[str, float] = {}
        self._lock = threading.Lock()  # of _retry_at: every other dictionary is the caller's thread's alone
        self._keepers = Readers("keep-log", KEEPERS)
        self._slow_keepers = Readers("keep-log-again", SLOW_KEEPERS)
        self._in_turn = Readers("read-log", IN_TURN_READERS)
        self.trouble = ""
        self._disk_is_full = False

    def follow(self, drivers: Collection[SeenObject]) -> None:
        """Hear those that run: as many as may be open at once without a pause, the others in turn; called by each pass."""
        if self._disk_is_full and _has_room(self._logs):
            self._disk_is_full, self.trouble = False, ""  # a log that is being heard may not say so for hours
        self._followers = {uid: f for uid, f in self._followers.items() if not f.done.done()}
        now = time.monotonic()
        with self._lock:
            self._retry_at = {uid: at for uid, at in self._retry_at.items() if at > now}
            later = set(self._retry_at)
        there = {driver.uid for driver in drivers}
        self._read_at = {uid: at for uid, at in self._read_at.items() if uid in there}
        for driver in drivers:
            uid = driver.uid
            if driver.phase is not PodPhase.RUNNING or uid in self._followers or uid in later:
                continue
            stop = threading.Event()
            if len(self._followers) < FOLLOWERS_MAX:
                done = _in_a_thread(lambda d=driver, s=stop: self._hear(d, s, follow=True), f"log-{driver.name}")  # type: ignore[misc]
            elif now - self._read_at.setdefault(uid, now) >= IN_TURN_SECONDS:
                self._read_at[uid] = now
                done = self._in_turn.submit(lambda d=driver, s=stop: self._hear(d, s, follow=False))  # type: ignore[misc]
            else:
                continue
            self._followers[uid] = _Follower(stop, done)

    def keep(self, run: int, start: int, drivers: Iterable[SeenObject]) -> None:
        """Begin to read what is left of a start's logs and to append all to driver.log; `is_kept` says when it is there."""
        keeping = self._keeping.get((run, start))
        now = time.monotonic()
        if keeping is None:
            keeping = self._keeping[run, start] = _Keeping(since=now, done=Future())
        elif not keeping.done.done() or not keeping.problem or now < keeping.retry_at:
            return
        keeping.problem, keeping.tries = "", keeping.tries + 1
        last = now - keeping.since >= self._give_up_seconds
        those = tuple(drivers)
        followers = [f for f in (self._followers.pop(driver.uid, None) for driver in those) if f is not None]
        for follower in followers:
            follower.stop.set()
        silent = any(self._silent_nodes.get(driver.node, 0.0) > now for driver in those)
        # A node that does not answer, or a log that is tried again, holds up none of the others.
        keepers = self._slow_keepers if silent or keeping.tries > 1 else self._keepers
        keeping.done = keepers.submit(lambda: self._keep(keeping, those, followers, last=last))

    def wait_kept(self, seconds: float) -> None:
        """Wait for what `keep` began, for so long at the most."""
        wait([keeping.done for keeping in self._keeping.values() if not keeping.problem], timeout=seconds)

    @property
    def is_keeping(self) -> bool:
        """Whether logs are still on their way into driver.log, so that a pass has to look soon."""
        return bool(self._keeping)

    def is_kept(self, run: int, start: int) -> bool:
        """Whether the start's logs are in driver.log, or were given up. Then it is forgotten here."""
        keeping = self._keeping.get((run, start))
        if keeping is None or not keeping.done.done() or keeping.problem:
            return False
        error = keeping.done.exception()
        if error is not None:
            self._log.warning("driver's log not kept: a defect of this program", run=run, start=start, said=repr(error))
        del self._keeping[run, start]
        return True

    def append_leftovers(self, starts: Collection[tuple[int, int]]) -> None:
        """Append what was heard of these starts, of which no Pod is left to be read."""
        for run, start in starts:
            for part in parts(self._logs, run):
                found = _PART.fullmatch(part.name)
                if found and int(found["start"]) == start:
                    with self._noticing_a_full_disk():
                        _append(driver_log(self._logs, run), part, "--- the rest of the log was gone with its Pod\n")

    def append_forgotten(self, live: Collection[tuple[int, int]]) -> None:
        """Append parts that stayed of starts that have ended: when they did, there was no room."""
        for part in self._logs.glob("*/.driver-*.part") if self._logs.is_dir() else ():
            found = _PART.fullmatch(part.name)
            run = int(part.parent.name) if part.parent.name.isdecimal() else None
            if found and run is not None and (run, int(found["start"])) not in live:
                with self._noticing_a_full_disk():
                    _append(driver_log(self._logs, run), part, "--- the rest of the log could not be kept\n")

    def delete_old(self, before: datetime) -> int:
        """Delete the logs to which nothing was added since then, those of drivers that may still be heard excepted."""
        deleted = 0
        for whole in self._logs.glob("*/driver.log"):
            with contextlib.suppress(OSError):  # gone already, or not ours to delete: the next time, then
                if (
                    whole.parent.name.isdecimal()
                    and whole.stat().st_mtime < before.timestamp()
                    and not any(_parts_in(whole.parent))
                ):
                    whole.unlink()
                    deleted += 1
                    whole.parent.rmdir()  # unless somebody else has something there
        return deleted

    def close(self) -> None:
        """Stop following; what was read stays in its parts."""
        for follower in self._followers.values():
            follower.stop.set()

    def _hear(self, driver: SeenObject, stop: threading.Event, *, follow: bool) -> None:
        try:
            with self._noticing_a_full_disk(again=True):
                self._read(driver, follow=follow, final=False, stop=stop)
        except (OrcaError, OSError) as error:
            self._not_soon(driver, RETRY_SECONDS)
            if not stop.is_set():
                self._log.info("driver's log not followed", run=driver.run, pod=driver.name, said=str(error))

    def _not_soon(self, driver: SeenObject, seconds: float) -> None:
        with self._lock:
            self._retry_at[driver.uid] = time.monotonic() + seconds

    def _keep(
        self, keeping: _Keeping, drivers: Iterable[SeenObject], followers: Iterable[_Follower], *, last: bool
    ) -> None:
        """One try for a start's logs; what keeps it from being the last is its `problem`."""
        for follower in followers:  # one thread at a time reads a log
            if not follower.done.cancel():
                wait([follower.done], timeout=RETRY_SECONDS)
        for driver in drivers:
            if driver.uid in keeping.kept:
                continue
            problem = self._keep_one(driver, last=last)
            if problem:
                keeping.retry_at = time.monotonic() + KEEP_RETRY_SECONDS
                keeping.problem = problem
            else:
                keeping.kept.add(driver.uid)

    def _keep_one(self, driver: SeenObject, *, last: bool) -> str:
        """Read what is left and append it; gives why that is to be tried again, or nothing."""
        note = ""
        try:
            with self._noticing_a_full_disk(again=True):
                self._read(driver, follow=False, final=True, stop=threading.Event())
        except OrcaError as error:
            # What the same request would get again is no reason to wait.
            if not last and not isinstance(error, Refused | Conflict) and driver.phase is not PodPhase.PENDING:
                self._silent_nodes[driver.node] = time.monotonic() + RETRY_SECONDS
                return str(error)
            note = f"--- the rest of the log cannot be had: {error}\n"
        except OSError as error:
            if not last:
                return str(error)
            note = f"--- the rest of the log could not be written: {error.strerror}\n"
        try:
            with self._noticing_a_full_disk(again=True):
                part = _begun(self._logs, driver)
                _append(driver_log(self._logs, driver.run or 0), part, note)
        except OSError as error:
            if not last:
                return str(error)
            self._log.warning("driver's log not kept whole", run=driver.run, pod=driver.name, said=error.strerror)
        return ""

    @contextlib.contextmanager
    def _noticing_a_full_disk(self, *, again: bool = False) -> Iterator[None]:
        """Say what cannot be written, and no longer once something can; `again`: the error goes on to the caller."""
        try:
            yield
            self._disk_is_full, self.trouble = False, ""
        except OSError as error:
            self._disk_is_full = error.errno in _FULL
            self.trouble = f"drivers' logs cannot be written to {self._logs}: {error.strerror or error}"
            if again:
                raise

    def _read(self, driver: SeenObject, *, follow: bool, final: bool, stop: threading.Event) -> None:
        """Write the Pod's log from where its part ends; the beginning of a line only when nothing more will come."""
        part = _begun(self._logs, driver)
        if _intent_of(part).exists():
            return  # it was read to its end before it was appended
        position = _load(part)
        if position["size"] >= self._bytes_max:
            self._not_soon(driver, _FULL_SECONDS)
            return
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
                if not _write_lines(
                    _lines(chunks, final=final, heard=file.flush), file, part, position, self._bytes_max
                ):
                    self._log.warning(
                        "driver's log is too long: the rest is not kept",
                        run=driver.run,
                        pod=driver.name,
                        kept_bytes=self._bytes_max,
                    )
            finally:
                with contextlib.suppress(OSError):
                    _save(part, file, position)


def _has_room(folder: Path) -> bool:
    """Whether something can be written there; nothing is left of it."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(_PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError:
        return False
    return True


def _in_a_thread(work: Callable[[], None], name: str) -> Future[None]:
    """A thread of its own, for what lasts as long as a driver runs."""
    readers = Readers(name, 1)
    return readers.submit(work)


def _begun(logs: Path, driver: SeenObject) -> Path:
    """The driver's part; it begins with the header under which it will stand."""
    part = _part(logs, driver)
    part.parent.mkdir(parents=True, exist_ok=True)
    if not part.exists() and not _intent_of(part).exists():
        header = f"--- run {driver.run} start {driver.start}, Pod {driver.name}, uid {driver.uid}\n"
        whole = driver_log(logs, driver.run or 0)
        if _has_line(whole, header.encode()):  # a loop was killed when it had appended it, and before it could say so
            _write_whole(_intent_of(part), str(whole.stat().st_size))
        else:
            _write_whole(part, header)
    return part


def _has_line(path: Path, line: bytes) -> bool:
    if not path.exists():
        return False
    with path.open("rb") as file:
        return any(found == line for found in iter(lambda: file.readline(_LINE_MAX), b""))


def _append(whole: Path, part: Path, note: str) -> None:
    """Append a part to the run's log, once: what a crash left half appended is cut off and appended anew."""
    intent = _intent_of(part)
    if intent.exists() and not part.exists():
        intent.unlink()  # appended, and only this mark was left
        return
    with whole.open("ab") as file:
        if intent.exists():
            file.truncate(int(intent.read_text(encoding="ascii")))
        else:
            _write_whole(intent, str(file.seek(0, os.SEEK_END)))
        with part.open("rb") as piece:
            shutil.copyfileobj(piece, file)
        if not _ends_a_line(part):
            file.write(b"\n")
        file.write(note.encode())
    for leftover in (part, _position_of(part), intent):
        leftover.unlink(missing_ok=True)


def _write_whole(path: Path, text: str) -> None:
    """A small file that is there whole or not at all, whatever happens in between."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _write_lines(
    lines: Iterator[tuple[str, bytes]], file: BinaryIO, part: Path, position: _Position, bytes_max: int
) -> bool:
    """Write each line without its timestamp, leaving out those that the part has already; gives whether all had room."""
    size = file.tell()
    resumed, skip = position["time"], position["same"]
    saved_at = time.monotonic()
    for stamp, text in lines:
        if stamp and stamp < resumed:
            continue
        if stamp and stamp == resumed and skip:
            skip -= 1
            continue
        if size + len(text) > bytes_max:
            file.write(text[: bytes_max - size])  # now it is as long as can be, and nothing more is read into it
            file.write(f"\n--- the log has more than {bytes_max} bytes: the rest is not kept\n".encode())
            return False
        file.write(text)
        size += len(text)
        if stamp:
            position["same"] = position["same"] + 1 if stamp == position["time"] else 1
            position["time"] = stamp
        if time.monotonic() - saved_at >= _POSITION_SECONDS:
            _save(part, file, position)
            saved_at = time.monotonic()
    return True


def _lines(chunks: Iterator[bytes], *, final: bool, heard: Callable[[], None]) -> Iterator[tuple[str, bytes]]:
    """The log's lines with their times; the pieces of an overlong line after the first have none.

    `heard` is called when all lines of what came so far were taken: a driver may be silent for long after them.
    """
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
        heard()
    if buffer and final:
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


def _intent_of(part: Path) -> Path:
    """Stands from before a part is appended until it was; holds how long driver.log was before."""
    return part.with_suffix(".append")


def _load(part: Path) -> _Position:
    """Where to go on; from the beginning when nothing that can be relied on is there."""
    try:
        found = json.loads(_position_of(part).read_text(encoding="utf-8"))
        if part.stat().st_size >= found["size"]:
            return _Position(size=found["size"], time=found["time"], same=found["same"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    with part.open("rb") as file:  # the header stays
        return _Position(size=len(file.readline()), time="", same=0)


def _save(part: Path, file: BinaryIO, position: _Position) -> None:
    file.flush()
    position["size"] = file.tell()
    _write_whole(_position_of(part), json.dumps(position))


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
