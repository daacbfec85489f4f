"""A database's troubles at will: a proxy before a Postgres server that is away, hangs or is slow."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from typing import Self

from orca_infra.db.connection import libpq_environment

_PIECE = 2**16
_POLL_SECONDS = 0.05
_CONNECT_SECONDS = 10
_PARAMETERS = {"PGHOST": "host", "PGPORT": "port", "PGUSER": "user", "PGPASSWORD": "password", "PGDATABASE": "dbname"}


def with_parameters(url: str, **parameters: object) -> str:
    """The connection string with other parameters; of those that it has, the address, user and database stay."""
    had = {name: value for variable, value in libpq_environment(url).items() if (name := _PARAMETERS.get(variable))}
    return " ".join(f"{name}='{value}'" for name, value in {**had, **parameters}.items() if value != "")


class PostgresProxy:
    """Passes connections on to a server, with the faults that are set at the moment.

    Attributes:
        url: where clients connect, over TCP.
        hangs: nothing passes, and nothing is closed; what was on its way passes once this is over.
        delay_seconds: each piece waits so long, in both directions.

    """

    def __init__(self, url: str) -> None:
        self.hangs = False
        self.delay_seconds = 0.0
        self._away = False
        self._stopped = False
        self._target = libpq_environment(url)
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        address = self._listener.getsockname()
        self.url = with_parameters(url, host=address[0], port=address[1], connect_timeout=_CONNECT_SECONDS)

    @property
    def away(self) -> bool:
        """Whether every connection is cut, and new ones are closed at once."""
        return self._away

    @away.setter
    def away(self, value: bool) -> None:
        self._away = value
        if value:
            self._cut()

    def heal(self) -> None:
        """No more faults."""
        self._away = self.hangs = False
        self.delay_seconds = 0.0

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, name="postgres-proxy", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self.heal()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._cut()

    def _accept(self) -> None:
        while not self._stopped:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        if self._away:
            client.close()
            return
        try:
            server = self._connect()
        except OSError:
            client.close()
            return
        with self._lock:
            self._open |= {client, server}
        back = threading.Thread(target=self._pass_on, args=(server, client), daemon=True)
        back.start()
        self._pass_on(client, server)
        back.join()
        with self._lock:
            self._open -= {client, server}
        client.close()
        server.close()

    def _connect(self) -> socket.socket:
        host, port = str(self._target.get("PGHOST") or "127.0.0.1"), int(self._target.get("PGPORT") or 5432)
        if not host.startswith("/"):
            return socket.create_connection((host, port), timeout=_CONNECT_SECONDS)
        server = socket.socket(socket.AF_UNIX)
        server.connect(f"{host}/.s.PGSQL.{port}")
        return server

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while piece := source.recv(_PIECE):
                while self.hangs and not self._away:
                    time.sleep(_POLL_SECONDS)
                time.sleep(self.delay_seconds)
                target.sendall(piece)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _cut(self) -> None:
        with self._lock:
            for one in self._open:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
