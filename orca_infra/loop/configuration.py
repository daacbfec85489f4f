"""orca.toml as the loop sees it: read anew when it changed; a bad file keeps the last good one."""

from __future__ import annotations

import time
from pathlib import Path

from orca_infra.config import Config, load_config
from orca_infra.errors import ConfigError

_Stamp = tuple[int, int, int]


class LiveConfig:
    """The last configuration that parsed.

    Attributes:
        config: never replaced by a file that does not parse.
        loaded_at: when it was read, in Unix time.
        error: why the file as it is now cannot be used, or empty.

    """

    def __init__(self, path: Path) -> None:
        """Raises ConfigError when the file cannot be used at the start: there is no last good one then."""
        self._path = path
        self._stamp = self._read_stamp()
        self.config: Config = load_config(path)
        self.loaded_at = time.time()
        self.error = ""

    def reload(self) -> bool:
        """Read the file anew if it changed; gives whether `config` or `error` did."""
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        before = (self.config, self.error)
        try:
            self.config, self.error, self.loaded_at = load_config(self._path), "", time.time()
        except ConfigError as error:
            self.error = str(error)
        return (self.config, self.error) != before

    def _read_stamp(self) -> _Stamp | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino
