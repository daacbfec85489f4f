"""/healthz, /readyz and /metrics over HTTP, from a thread of its own. It answers whatever the loop is at."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from orca_infra.errors import SetupError
from orca_infra.health.state import Health, Verdict
from orca_infra.log import Log
from orca_infra.metrics import METRICS
from orca_infra.settings import Settings

_REQUEST_SECONDS = 10
#: More at once than probes and a few scrapers ever are; others wait in the socket's queue.
_ANSWERS_MOST = 8
_TEXT = "text/plain; charset=utf-8"


class HealthServer:
    """Serves from `start` until `stop`. `port` is the one that it got: 0 chooses a free one."""

    def __init__(self, health: Health, *, host: str, port: int) -> None:
        """Raises SetupError when the address cannot be opened."""
        try:
            self._server = _Server(health, host, port)
        except OSError as error:
            raise SetupError(
                f"ORCA_HEALTH_PORT: port {port} on {host} cannot be opened ({error.strerror or error}); "
                "choose another, or unset it to serve nothing"
            ) from error
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="health", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def serving(health: Health, settings: Settings, log: Log) -> Iterator[None]:
    """Serve while the block runs, where ORCA_HEALTH_PORT says so. Raises SetupError when that cannot be opened."""
    if settings.health_port is None:
        yield
        return
    server = HealthServer(health, host=settings.health_host, port=settings.health_port)
    server.start()
    log.info("serving health and metrics", host=settings.health_host, port=server.port)
    try:
        yield
    finally:
        server.stop()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 16

    def __init__(self, health: Health, host: str, port: int) -> None:
        self.health = health
        self._answers = threading.BoundedSemaphore(_ANSWERS_MOST)
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._answers.acquire()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._answers.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _REQUEST_SECONDS
    server_version = "orca-infra"
    sys_version = ""

    def do_GET(self) -> None:
        answers: dict[str, Callable[[], None]] = {
            "/healthz": lambda: self._say(self.server.health.alive()),
            "/readyz": lambda: self._say(self.server.health.ready()),
            "/metrics": self._measure,
        }
        answer = answers.get(self.path.partition("?")[0])
        if answer is None:
            self._send(404, _TEXT, f"there are {', '.join(answers)}\n".encode())
        else:
            answer()

    do_HEAD = do_GET  # noqa: N815  (the same)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  (probes are no news)
        """Say nothing."""

    def _say(self, verdict: Verdict) -> None:
        body = {"status": "ok" if verdict.good else "failed", "why": verdict.why, **verdict.details}
        self._send(200 if verdict.good else 503, "application/json", (json.dumps(body) + "\n").encode())

    def _measure(self) -> None:
        body, content_type = METRICS.exposition(self.headers.get("Accept", ""))
        self._send(200, content_type, body)

    def _send(self, code: int, content_type: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
