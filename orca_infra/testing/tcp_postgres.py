"""A Postgres over TCP, as one on another host is: its connections can fall silent, and a copy of it can take over."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import struct
import subprocess
import time
from contextlib import suppress
from ctypes import addressof, create_string_buffer
from pathlib import Path

from orca_infra.db.connection import Database, Session
from orca_infra.db.migrate import migrate
from orca_infra.errors import OrcaError, SetupError
from orca_infra.testing.node_postgres import postgres_programs
from orca_infra.testing.ports import free_port


class TcpPostgres:
    """A Postgres that listens on 127.0.0.1.

    Attributes:
        url: as its superuser, without a password.
        data: its folder, which lies in `folder` beside its log and its socket.

    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.data = folder / "data"
        self._drop: list[str] = []
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            os.chown(folder, nobody.pw_uid, nobody.pw_gid)
            self._drop = ["setpriv", f"--reuid={nobody.pw_uid}", f"--regid={nobody.pw_gid}", "--clear-groups"]
        self._programs = postgres_programs(self._drop, folder / "programs")
        options = ["--username=postgres", "--auth=trust", "--no-sync", "--locale=C", "--encoding=UTF8"]
        self._run("initdb", "-D", self.data, *options)
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        places = ["-D", str(self.data), "-h", "127.0.0.1", "-p", str(self.port), "-k", str(self.folder)]
        command = [str(self._programs / "postgres"), *places, "-c", "fsync=off", "-c", "shared_buffers=16MB"]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*self._drop, "--pdeathsig=INT", *command] if self._drop else command, stdout=log, stderr=log
            )
        while not self._answers():
            if self._process.poll() is not None:
                raise SetupError((self.folder / "log").read_text())
            time.sleep(0.05)

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait()
            self._process = None

    def copy(self) -> Path:
        """A copy of the stopped server's data, as a standby that lags behind has it."""
        copied = self.folder / "copy"
        shutil.copytree(self.data, copied)
        self._own(copied)
        return copied

    def take_over(self, copied: Path) -> None:
        """Have the copy take over: it recovers what it has, and begins a new timeline."""
        shutil.rmtree(self.data)
        copied.rename(self.data)
        (self.data / "recovery.signal").touch()
        with (self.data / "postgresql.auto.conf").open("a") as file:
            file.write("restore_command = 'false'\n")
        self._own(self.data)
        self.start()

    def database(self) -> Database:
        database = Database(self.url)
        migrate(database, with_orca_tables=True)
        return database

    def _own(self, folder: Path) -> None:
        if self._drop:
            nobody = pwd.getpwnam("nobody")
            for path in (folder, *folder.rglob("*")):
                os.chown(path, nobody.pw_uid, nobody.pw_gid)

    def _run(self, program: str, *arguments: object) -> None:
        command = [*self._drop, str(self._programs / program), *map(str, arguments)]
        subprocess.run(command, check=True, capture_output=True)

    def _answers(self) -> bool:
        with suppress(OrcaError):
            session = Session(self.url)
            try:
                return session.row("select pg_is_in_recovery()") == (False,)
            finally:
                session.close()
        return False


def silence(descriptor: int) -> None:
    """Have the kernel drop what comes in for this connection: its host looks as if it were gone."""
    drop_all = create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF_RET | BPF_K, 0 bytes
    program = struct.pack("HL", 1, addressof(drop_all))
    so_attach_filter = 26
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, so_attach_filter, program)
