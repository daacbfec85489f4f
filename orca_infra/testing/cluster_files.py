"""What a test cluster has outside its processes: a folder of its own, a port of its own, and its access files."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from orca_infra.errors import SetupError

PREFIX = "orca-cluster-"
_OWNER = "owner.lock"
# A folder without its lock is one that is being made just now, or whose maker died before it was.
_UNOWNED_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class OwnedFolder:
    """A temporary folder that others can tell to be in use: its owner holds a lock on a file in it.

    A lock, rather than the owner's pid: the kernel gives it back at the owner's death, and it holds across a boot and
    across containers that share /tmp, where pids mean nothing.
    """

    path: Path
    lock: int  # the file descriptor whose lock is held

    @classmethod
    def make(cls, parent: Path | None = None, *, prefix: str = PREFIX) -> OwnedFolder:
        """A new folder that only this user can enter."""
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        unlocked = path / "owner.new"
        lock = os.open(unlocked, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        unlocked.rename(path / _OWNER)  # under its name it is locked from the first moment on
        return cls(path, lock)

    def remove(self) -> None:
        """Remove the folder with all that is in it, and give the lock back."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def remove_leftovers(parent: Path | None = None) -> list[Path]:
    """Remove the folders of clusters whose owners are dead, and end what still runs in them; gives those folders.

    The processes are ended by the kernel when their owner dies. One is missed only when the owner was killed in the
    millisecond in which it was being started.
    """
    removed = []
    for path in Path(parent or tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or removed by another session at this moment
            if path.stat().st_uid == os.getuid() and is_left(path):
                _kill_processes_of(path)
                shutil.rmtree(path)
                removed.append(path)
    return removed


def is_left(path: Path) -> bool:
    """Whether the folder's owner is dead."""
    try:
        lock = os.open(path / _OWNER, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return time.time() - path.stat().st_mtime > _UNOWNED_SECONDS
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def _kill_processes_of(path: Path) -> None:
    """Kill what has this folder in its command line: the name is random, nothing else has it by chance."""
    mark = f"{path}/".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            program, *arguments = (entry / "cmdline").read_bytes().split(b"\0")
            # Not an editor or a `tail` on one of its logs: a cluster's programs name it in flags only.
            if any(argument.startswith(b"--") and mark in argument for argument in arguments) and program:
                os.kill(int(entry.name), signal.SIGKILL)


def authority_of(certificates: Path) -> str:
    """The certificate of the authority, the last of the chain that an API server with --cert-dir makes for itself."""
    found = re.findall(
        r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----\n?", certificates.read_text(), re.DOTALL
    )
    if not found:
        raise SetupError(f"{certificates} holds no certificate; the API server should have made one")
    return str(found[-1])


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user can read, from its first moment on."""
    with os.fdopen(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


def kubeconfig(server: str, token: str, authority: str) -> str:
    """A kubeconfig that needs no other file. JSON, which every reader of YAML takes."""
    cluster = {
        "server": server,
        "certificate-authority-data": base64.b64encode(authority.encode()).decode(),
    }
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "admin", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin", "namespace": "default"}}],
            "current-context": "test",
        },
        indent=1,
    )
