"""Requests to the API server over HTTP: deadlines, streams that can be stopped, and errors by their meaning.

The only user of the HTTP client. httpx knows a deadline for each read only: the one for a whole answer is kept here, and so
is the ending of a stream from outside, since a thread that waits in a socket hears of nothing else.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import httpx2
from lightkube.core.exceptions import ConfigError as KubeConfigError

from orca_infra.errors import AuthFailed, OrcaError, Transient
from orca_infra.kube.answers import Call, error_of, words
from orca_infra.kube.credentials import Login
from orca_infra.kube.deadlines import Deadlines
from orca_infra.kube.errors import Silent
from orca_infra.kube.kinds import Object

_AGENT = "orca-infra"
_ANSWER_BYTES = 256 << 20
_ERROR_BYTES = 1 << 20
_IDLE_CONNECTIONS = 20
_IDLE_SECONDS = 60.0
_STOP_POLL_SECONDS = 0.1
# A peer that vanished without a word is noticed within 60 s, also in a stream in which silence is no fault.
_KEEPALIVE = (
    (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
    (socket.IPPROTO_TCP, "TCP_KEEPIDLE", 30),
    (socket.IPPROTO_TCP, "TCP_KEEPINTVL", 10),
    (socket.IPPROTO_TCP, "TCP_KEEPCNT", 3),
)


class Transport:
    """One API server's connections, for any number of threads."""

    def __init__(self, login: Login, deadlines: Deadlines) -> None:
        self.server = _without_credentials(login.server)
        self.deadlines = deadlines
        self._extensions: dict[str, Any] = {"sni_hostname": login.tls_name} if login.tls_name else {}
        self._stops = _Stops()
        # Its line for each request at INFO is noise to whoever configures the root logger.
        logging.getLogger("httpx2").setLevel(logging.WARNING)
        self._client = httpx2.Client(
            base_url=login.server,
            verify=login.tls,
            auth=login.credentials,
            headers=[*login.headers, ("User-Agent", _AGENT), ("Accept", "application/json")],
            proxy=login.proxy,
            # Every watch and every followed log holds a connection: a limit would be a deadlock.
            limits=httpx2.Limits(
                max_connections=None, max_keepalive_connections=_IDLE_CONNECTIONS, keepalive_expiry=_IDLE_SECONDS
            ),
            timeout=httpx2.Timeout(deadlines.read_seconds, connect=deadlines.connect_seconds),
            follow_redirects=False,  # the API server never does; a login page in between does
        )

    def request(
        self,
        call: Call,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
    ) -> Object:
        """The object that the API server answers with.

        Raises:
            OrcaError: by what the answer, or its absence, means (answers.py).

        """
        content = None if body is None else json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
        headers = {} if content is None else {"Content-Type": content_type}
        request = self._client.build_request(
            method, path, params=params, content=content, headers=headers, extensions=dict(self._extensions)
        )
        with self._translated(call):
            response = self._client.send(request, stream=True)
            try:
                code, answer = response.status_code, self._read(call, response)
            finally:
                response.close()
        if not 200 <= code < 300:
            raise error_of(call, code, answer, response.headers.get("Retry-After"))
        try:
            found = json.loads(answer)
        except ValueError:
            raise Transient(f"cannot {call}: the answer is no JSON, or was cut short") from None
        if not isinstance(found, dict) or not found.get("kind"):
            raise Transient(f"cannot {call}: the answer is no object of the API server")
        return found

    def stream(
        self,
        call: Call,
        path: str,
        *,
        params: Mapping[str, str],
        silence_seconds: float | None,
        stop: threading.Event | None,
    ) -> Iterator[bytes]:
        """The pieces of an answer as they come.

        Args:
            call: for messages.
            path: of the URL.
            params: its query.
            silence_seconds: after so long without a byte it is Silent; None: never, only a peer that is gone is noticed.
            stop: ends it within 0.1 s, early and without an error.

        Raises:
            OrcaError: by what the answer, or its absence, means.

        """
        stop = stop or threading.Event()
        headers = {"Accept": "*/*", "Accept-Encoding": "identity"}
        request = self._client.build_request(
            "GET", path, params=params, headers=headers, extensions=dict(self._extensions)
        )
        try:
            with self._translated(call):
                response = self._client.send(request, stream=True)
            try:
                yield from self._pieces(call, response, stop, silence_seconds)
            finally:
                with suppress(httpx2.HTTPError, OSError):
                    response.close()
        except OrcaError:
            if not stop.is_set():
                raise

    def close(self) -> None:
        """Ends what is open, streams too, and every connection."""
        self._stops.cut_all()
        self._client.close()

    def _pieces(
        self, call: Call, response: httpx2.Response, stop: threading.Event, silence_seconds: float | None
    ) -> Iterator[bytes]:
        if response.status_code != 200:
            with self._translated(call):
                answer = self._read(call, response, _ERROR_BYTES)
            raise error_of(call, response.status_code, answer, response.headers.get("Retry-After"))
        # From here on another deadline holds than for the headers; it is looked up when the first piece is read.
        response.request.extensions["timeout"]["read"] = silence_seconds
        connection = response.extensions["network_stream"].get_extra_info("socket")
        _keep_alive(connection)
        with self._stops.guarded(connection, stop), self._translated(call, silence_seconds):
            for piece in response.iter_raw():
                if stop.is_set():
                    return
                yield piece

    def _read(self, call: Call, response: httpx2.Response, most: int = _ANSWER_BYTES) -> bytes:
        deadline = time.monotonic() + self.deadlines.whole_seconds
        pieces, size = [], 0
        for piece in response.iter_bytes():
            pieces.append(piece)
            size += len(piece)
            if size > most:
                raise Transient(f"cannot {call}: the answer is larger than {most} bytes")
            if time.monotonic() > deadline:
                raise Transient(f"cannot {call}: the answer was not whole after {self.deadlines.whole_seconds:g} s")
        return b"".join(pieces)

    @contextmanager
    def _translated(self, call: Call, silence_seconds: float | None = None) -> Iterator[None]:
        """The HTTP client's errors by their meaning. What it says is quoted only where no header can be in it."""
        try:
            yield
        except httpx2.ReadTimeout as error:
            if silence_seconds is not None:
                raise Silent(f"nothing heard for {silence_seconds:g} s in {call} at {self.server}") from error
            raise Transient(f"cannot {call}: {self.server} did not answer in time") from error
        except httpx2.TimeoutException as error:
            raise Transient(f"cannot {call}: {self.server} could not be reached in time") from error
        except httpx2.LocalProtocolError:  # a header that cannot be sent, and it quotes it
            raise AuthFailed(f"cannot {call}: the credentials cannot be sent as a header") from None
        except (httpx2.HTTPError, httpx2.StreamError, OSError) as error:
            raise Transient(f"cannot {call}: {self.server}: {words(str(error)) or type(error).__name__}") from error
        except KubeConfigError as error:
            raise AuthFailed(f"cannot {call}: {words(str(error))}") from error
        except RuntimeError as error:
            if self._client.is_closed:
                raise Transient(f"cannot {call}: the connection to {self.server} was closed here") from error
            raise


class _Stops:
    """Ends the sockets of streams that are to stop; one thread for all of them, and only while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, tuple[socket.socket, threading.Event]] = {}
        self._thread: threading.Thread | None = None

    @contextmanager
    def guarded(self, connection: socket.socket, stop: threading.Event) -> Iterator[None]:
        with self._lock:
            self._open[id(connection)] = (connection, stop)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kube-streams", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                del self._open[id(connection)]

    def cut_all(self) -> None:
        with self._lock:
            for connection, _ in self._open.values():
                _cut(connection)

    def _run(self) -> None:
        while True:
            time.sleep(_STOP_POLL_SECONDS)
            with self._lock:
                if not self._open:
                    self._thread = None
                    return
                for connection, stop in self._open.values():
                    if stop.is_set():
                        _cut(connection)


def _cut(connection: socket.socket) -> None:
    """Wakes the thread that reads; the plain socket's own method, since an SSLSocket's would pull the rug from under it."""
    with suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _keep_alive(connection: socket.socket) -> None:
    for level, name, value in _KEEPALIVE:
        if hasattr(socket, name):  # not every system has all of them
            with suppress(OSError):
                connection.setsockopt(level, getattr(socket, name), value)


def _without_credentials(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
