"""An API server's troubles at will: a proxy before a test cluster that is away, slow, throttles, refuses or cuts short."""

from __future__ import annotations

import http.client
import http.server
import json
import random
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from orca_infra.testing.cluster import TestCluster
from orca_infra.testing.cluster_files import kubeconfig, write_private

_PIECE = 2**16
_HOP = {"connection", "transfer-encoding", "content-length", "keep-alive"}
_SECONDS = 240
_POLL_SECONDS = 0.05


class FaultyServer:
    """Passes requests on to a cluster's API server, with the faults that are set at the moment.

    Attributes:
        kubeconfig: a file for clients; plain HTTP.
        delay_seconds: each request waits so long.
        throttled: the part of requests that are answered with 429 and Retry-After, 0 to 1.
        failing: the part of requests that are answered with 500.
        cut: the part of writes that are carried out, and whose answer is lost.
        refuses: every request is answered with this status; 0: none.
        away: every connection is closed without an answer.
        hangs: no request is answered for as long as this holds.
        held: requests in whose method and path this is found (a regular expression) wait for as long as it is set; "": none.
        late: the same, but they are carried out, and their answers wait.
        halves: half of each list comes, then its connection ends.
        silent: watches stay open and say nothing.
        faults: how many requests had one.

    """

    def __init__(self, cluster: TestCluster, folder: Path, *, seed: int) -> None:
        self.heal()
        self.faults = 0
        self.chance = random.Random(seed)  # noqa: S311  (which requests meet a fault)
        self.upstream = urlsplit(cluster.server)
        self.token = cluster.token
        self.tls = ssl.create_default_context(cafile=str(cluster.ca_file))
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.faulty = self
        self.kubeconfig = folder / "faulty-kubeconfig"
        address = f"http://127.0.0.1:{self._server.server_address[1]}"
        write_private(self.kubeconfig, kubeconfig(address, cluster.token, cluster.ca_file.read_text()))

    def heal(self) -> None:
        """No more faults."""
        self.delay_seconds = 0.0
        self.throttled = self.failing = self.cut = 0.0
        self.refuses = 0
        self.held = self.late = ""
        self.away = self.hangs = self.halves = self.silent = False

    def hang_up(self) -> None:
        """End every connection that is open now, watches too."""
        for connection in list(self._server.open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="faulty-server", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 256
    faulty: FaultyServer

    def __init__(self, address: tuple[str, int], handler: type[_Handler]) -> None:
        self.open: set[socket.socket] = set()
        super().__init__(address, handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing: that a client goes away is no error of the proxy's."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.server.open.add(self.connection)

    def finish(self) -> None:
        self.server.open.discard(self.connection)
        with suppress(OSError):
            super().finish()

    def _any(self) -> None:
        faulty = self.server.faulty
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if faulty.delay_seconds:
            time.sleep(faulty.delay_seconds)
        if faulty.hangs:
            faulty.faults += 1
        while faulty.hangs:
            time.sleep(_POLL_SECONDS)
        self._wait_while(lambda: faulty.held)
        draw = faulty.chance.random()
        if faulty.away:
            faulty.faults += 1
            self.close_connection = True
        elif faulty.refuses:
            self._status(faulty.refuses, http.HTTPStatus(faulty.refuses).phrase.replace(" ", ""), {})
        elif draw < faulty.throttled:
            self._status(429, "TooManyRequests", {"Retry-After": "1"})
        elif draw < faulty.throttled + faulty.failing:
            self._status(500, "InternalError", {})
        else:
            cut = self.command != "GET" and draw > 1 - faulty.cut
            self._pass_on(body, cut=cut)

    def _wait_while(self, pattern: Callable[[], str]) -> None:
        faulty = self.server.faulty
        is_first = True
        while (words := pattern()) and re.search(words, f"{self.command} {self.path}"):
            faulty.faults += is_first
            is_first = False
            time.sleep(_POLL_SECONDS)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _any  # noqa: N815

    def _status(self, code: int, reason: str, headers: dict[str, str]) -> None:
        """The API server's own way to say so."""
        self.server.faulty.faults += 1
        content = json.dumps(
            {
                "kind": "Status",
                "apiVersion": "v1",
                "status": "Failure",
                "reason": reason,
                "message": f"a fault of this test: {reason}",
                "code": code,
            }
        ).encode()
        self.send_response(code)
        for key, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(content)),
            **headers,
        }.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(content)

    def _pass_on(self, body: bytes, *, cut: bool) -> None:
        faulty = self.server.faulty
        upstream = http.client.HTTPSConnection(
            str(faulty.upstream.hostname), faulty.upstream.port, context=faulty.tls, timeout=_SECONDS
        )
        try:
            headers = {key: value for key, value in self.headers.items() if key.lower() != "host"}
            headers["Authorization"] = f"Bearer {faulty.token}"  # Go's clients keep theirs from plain HTTP
            upstream.request(self.command, self.path, body or None, headers)
            answer = upstream.getresponse()
            self._wait_while(lambda: faulty.late)
            if cut:
                faulty.faults += 1
                answer.read()
                self.close_connection = True
                return
            self.send_response(answer.status)
            for key, value in answer.getheaders():
                if key.lower() not in _HOP:
                    self.send_header(key, value)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self._pass_back(answer)
        except (OSError, http.client.HTTPException):
            self.close_connection = True
        finally:
            upstream.close()

    def _pass_back(self, answer: http.client.HTTPResponse) -> None:
        """The answer's body. A watch that was silent ends at its next event: what it kept to itself it can't say later."""
        faulty, was_silent = self.server.faulty, False
        is_watch = "watch=" in self.path
        may_be_list = self.command == "GET" and not is_watch and "/log" not in self.path
        while piece := answer.read() if may_be_list else answer.read1(_PIECE):
            if is_watch and faulty.silent:
                faulty.faults += not was_silent
                was_silent = True
                continue
            halved = faulty.halves and may_be_list and b'List"' in piece[:200]
            if halved:
                piece = piece[: len(piece) // 2]
            if not was_silent:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                self.wfile.flush()
            if halved or was_silent:
                faulty.faults += halved
                self.close_connection = True
                return
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        """Nothing: the tests say what they saw."""
