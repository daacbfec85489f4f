"""What a run's drivers said, read while it is being written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from orca_infra.runs.logs import driver_log, parts

_PIECE = 2**16
_HEADER = re.compile(rb"--- run \d+ start \d+, Pod \S+, uid (?P<uid>\S+)\n")
_UID = re.compile(r"\.driver-\d+-(?P<uid>.+)\.part")


class Heard:
    """A run's log, each byte once, whether it is read from a driver's part or after that was appended to driver.log."""

    def __init__(self, logs: Path, run: int) -> None:
        self._logs, self._run = logs, run
        self._whole_read = 0
        self._part_read: dict[str, int] = {}  # by the Pod's uid; both begin with the same header

    def is_empty(self) -> bool:
        """Whether there is nothing yet."""
        return not driver_log(self._logs, self._run).exists() and not parts(self._logs, self._run)

    def news(self) -> Iterator[bytes]:
        """What has come since the last time, in pieces."""
        # The parts' names first: one that is appended meanwhile is then found in driver.log, here or the next time.
        found = parts(self._logs, self._run)
        yield from self._news_of_whole()
        for part in found:
            uid = _UID.fullmatch(part.name)
            if uid is None or part.with_suffix(".append").exists():
                continue  # it is just being appended
            try:
                with part.open("rb") as file:
                    yield from self._rest(file, uid["uid"])
            except FileNotFoundError:
                continue

    def _rest(self, file: BinaryIO, uid: str) -> Iterator[bytes]:
        file.seek(self._part_read.get(uid, 0))
        while piece := file.read(_PIECE):
            yield piece
        self._part_read[uid] = file.tell()

    def _news_of_whole(self) -> Iterator[bytes]:
        """What was appended, less what its part had said before."""
        try:
            file = driver_log(self._logs, self._run).open("rb")
        except FileNotFoundError:
            return
        with file:
            file.seek(self._whole_read)
            skip = 0
            while line := file.readline(_PIECE):
                header = _HEADER.fullmatch(line)
                if header:
                    skip = self._part_read.pop(header["uid"].decode(), 0)
                if len(line) > skip:
                    yield line[skip:]
                skip = max(0, skip - len(line))
            self._whole_read = file.tell()
