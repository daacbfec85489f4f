"""Requests to the API server over HTTP: deadlines, streams that can be stopped, and errors by their meaning.

The only user of the HTTP client, which is urllib3: a launch makes three requests, and a richer client takes longer over one
than the API server. It knows a deadline for each read only: the one for a whole answer is kept here, and so is the ending of
a stream from outside, since a thread that waits in a socket hears of nothing else.
"""

from __future__ import annotations

import json
import logging
import math
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple
from urllib.parse import unquote, urlencode, urlsplit
from urllib.request import getproxies, proxy_bypass

import urllib3
from urllib3 import exceptions as faults
from urllib3.connection import HTTPConnection, HTTPSConnection

from orca_infra.errors import AuthFailed, OrcaError, SetupError, Transient
from orca_infra.kube.answers import Call, error_of, words
from orca_infra.kube.credentials import Login
from orca_infra.kube.deadlines import Deadlines
from orca_infra.kube.decoding import decode
from orca_infra.kube.errors import Silent
from orca_infra.kube.kinds import Object

_AGENT = "orca-infra"
_ANSWER_BYTES = 256 << 20
_ERROR_BYTES = 1 << 20
_PIECE_BYTES = 64 << 10
#: Of requests, at the same time: with more, each only takes longer.
_CONNECTIONS = 20
_STOP_POLL_SECONDS = 0.1
# What urllib3 puts before some of its words: the object, as Python shows it.
_CONNECTION_OBJECT = re.compile(r"\A\w+\(host=[^)]*\): ")
# A peer that vanished without a word is noticed within 60 s, also in a stream in which silence is no fault.
_SOCKET_OPTIONS = [
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
        if hasattr(socket, name)  # not every system has all of them
    ),
]


class _Asked(NamedTuple):
    """A request; `path` with its query."""

    method: str
    path: str
    headers: Mapping[str, str]
    content: bytes | None


class Transport:
    """One API server's connections, for any number of threads."""

    def __init__(self, login: Login, deadlines: Deadlines) -> None:
        """Raises SetupError for a server or proxy that cannot be spoken to."""
        self.server = _without_credentials(login.server)
        self.deadlines = deadlines
        self._credentials = login.credentials
        self._headers = urllib3.HTTPHeaderDict({"User-Agent": _AGENT, "Accept": "application/json"})
        for name, value in login.headers:  # groups to impersonate are a line each
            self._headers.add(name, value)
        self._stops = _Stops()
        # It says at WARNING that a stream's connection was not kept, which is as it should be.
        logging.getLogger("urllib3").setLevel(logging.ERROR)
        self._pool, self._prefix = _connections(login, maxsize=_CONNECTIONS, block=True)
        # Every watch and every followed log holds a connection: a limit would be a deadlock.
        self._streams, _ = _connections(login, maxsize=1, block=False)
        self._timeout = urllib3.Timeout(connect=deadlines.connect_seconds, read=deadlines.read_seconds)

    def request(
        self,
        call: Call,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
        accept: str | None = None,
    ) -> Object:
        """The object that the API server answers with; `accept`: in which form, when not as it is.

        Raises:
            OrcaError: by what the answer, or its absence, means (answers.py).

        """
        content = None if body is None else json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
        headers = {} if content is None else {"Content-Type": content_type}
        if accept is not None:
            headers["Accept"] = accept
        with self._translated(call):
            response = self._send(self._pool, _Asked(method, _with(path, params), headers, content))
            code, answer = response.status, self._read(call, response)
        if not 200 <= code < 300:
            raise error_of(call, code, answer, response.headers.get("Retry-After"))
        try:
            found = decode(answer)
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
        try:
            with self._translated(call):
                response = self._send(self._streams, _Asked("GET", _with(path, params), {"Accept": "*/*"}, None))
            try:
                yield from self._pieces(call, response, stop, silence_seconds)
            finally:
                with suppress(faults.HTTPError, OSError):
                    response.close()
        except OrcaError:
            if not stop.is_set():
                raise

    def close(self) -> None:
        """Ends what is open, streams too, and every connection."""
        self._stops.cut_all()
        self._streams.close()
        self._pool.close()

    def _send(self, pool: urllib3.HTTPConnectionPool, asked: _Asked) -> urllib3.BaseHTTPResponse:
        """The answer, of which nothing but the headers is read. Credentials that are refused are renewed once."""
        said = self._headers.copy()
        said.update(asked.headers)
        if self._credentials is None:
            return self._open(pool, asked, said)
        said["Authorization"] = shown = self._credentials.header()
        if not shown.isprintable():
            raise ValueError  # nothing of it may be quoted
        response = self._open(pool, asked, said)
        if response.status != 401:
            return response
        try:
            other = self._credentials.header(refused=shown)
        except OrcaError:
            _let_go(response)
            raise
        if other == shown:
            return response
        _let_go(response)
        said["Authorization"] = other
        return self._open(pool, asked, said)

    def _open(
        self, pool: urllib3.HTTPConnectionPool, asked: _Asked, headers: urllib3.HTTPHeaderDict
    ) -> urllib3.BaseHTTPResponse:
        return pool.urlopen(
            asked.method,
            self._prefix + asked.path,
            body=asked.content,
            headers=headers,
            timeout=self._timeout,
            pool_timeout=math.ceil(self.deadlines.read_seconds),
            retries=False,
            redirect=False,  # the API server never does; a login page in between does
            preload_content=False,
            decode_content=False,
        )

    def _pieces(
        self, call: Call, response: urllib3.BaseHTTPResponse, stop: threading.Event, silence_seconds: float | None
    ) -> Iterator[bytes]:
        if response.status != 200:
            with self._translated(call):
                answer = self._read(call, response, _ERROR_BYTES)
            raise error_of(call, response.status, answer, response.headers.get("Retry-After"))
        connection = _socket_of(response)
        if connection is None:  # the whole answer is here already
            yield from iter(lambda: response.read1(_PIECE_BYTES), b"")
            return
        # From here on another deadline holds than for the headers.
        connection.settimeout(silence_seconds)
        with self._stops.guarded(connection, stop), self._translated(call, silence_seconds):
            while piece := response.read1(_PIECE_BYTES):
                if stop.is_set():
                    return
                yield piece

    def _read(self, call: Call, response: urllib3.BaseHTTPResponse, most: int = _ANSWER_BYTES) -> bytes:
        deadline = time.monotonic() + self.deadlines.whole_seconds
        pieces, size = [], 0
        try:
            while piece := response.read1(_PIECE_BYTES):
                pieces.append(piece)
                size += len(piece)
                if size > most:
                    raise Transient(f"cannot {call}: the answer is larger than {most} bytes")
                if time.monotonic() > deadline:
                    raise Transient(f"cannot {call}: the answer was not whole after {self.deadlines.whole_seconds:g} s")
        except BaseException:
            _let_go(response)
            raise
        response.release_conn()
        return b"".join(pieces)

    @contextmanager
    def _translated(self, call: Call, silence_seconds: float | None = None) -> Iterator[None]:
        """The HTTP client's errors by their meaning. What it says is quoted only where no header can be in it."""
        try:
            yield
        except (faults.ReadTimeoutError, TimeoutError) as error:
            if silence_seconds is not None:
                raise Silent(f"nothing heard for {silence_seconds:g} s in {call} at {self.server}") from error
            raise Transient(f"cannot {call}: {self.server} did not answer in time") from error
        except faults.EmptyPoolError as error:
            raise Transient(
                f"cannot {call}: {_CONNECTIONS} requests to {self.server} are under way, and none ends"
            ) from error
        except faults.ClosedPoolError as error:
            raise Transient(f"cannot {call}: the connection to {self.server} was closed here") from error
        except (faults.HTTPError, OSError) as error:
            if isinstance(error, faults.ConnectTimeoutError) and not isinstance(error, faults.NewConnectionError):
                raise Transient(f"cannot {call}: {self.server} could not be reached in time") from error
            said = words(_CONNECTION_OBJECT.sub("", str(error))) or type(error).__name__
            raise Transient(f"cannot {call}: {self.server}: {said}") from error
        except ValueError:  # a header that cannot be sent, and it quotes it
            raise AuthFailed(f"cannot {call}: the credentials cannot be sent as a header") from None


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


def _with(path: str, params: Mapping[str, str] | None) -> str:
    return f"{path}?{urlencode(params)}" if params else path


def _let_go(response: urllib3.BaseHTTPResponse) -> None:
    """End its connection, and have another take its place: those of requests are counted."""
    with suppress(faults.HTTPError, OSError):
        response.close()
    response.release_conn()


class _OnePiece:
    """Sends a request's head and body in one piece: two wake the API server twice, for nothing the first time."""

    _held: list[bytes] | None = None

    def request(self, *args: Any, **kwargs: Any) -> None:
        self._held = []
        try:
            super().request(*args, **kwargs)  # type: ignore[misc]
            whole = b"".join(self._held)
        finally:
            self._held = None
        self.send(whole)

    def send(self, data: Any) -> None:
        if self._held is None:
            super().send(data)  # type: ignore[misc]
        else:
            self._held.append(data)


class _PlainConnection(_OnePiece, HTTPConnection):
    pass


class _TlsConnection(_OnePiece, HTTPSConnection):
    pass


def _connections(login: Login, *, maxsize: int, block: bool) -> tuple[urllib3.HTTPConnectionPool, str]:
    """The server's connections, and what stands before every path: through a proxy without TLS the whole URL."""
    where = urlsplit(login.server)
    host, port = where.hostname or "", where.port
    options: dict[str, Any] = {
        "ssl_context": login.tls,
        "maxsize": maxsize,
        "block": block,
        "socket_options": _SOCKET_OPTIONS,
        **({"server_hostname": login.tls_name} if login.tls_name else {}),
    }
    proxy = login.proxy or _proxy_of(where.scheme, host)
    try:
        if proxy:
            options["proxy_headers"] = _proxy_headers(proxy)
            pools: urllib3.PoolManager = urllib3.ProxyManager(_without_credentials(proxy), **options)
        else:
            pools = urllib3.PoolManager(**options)
        pool = pools.connection_from_host(host, port, where.scheme)
    except (faults.HTTPError, ValueError):
        raise SetupError(
            f"the cluster's server {_without_credentials(login.server)} cannot be spoken to"
            f"{f' through the proxy {_without_credentials(proxy)}' if proxy else ''}: both have to be http:// or https://"
        ) from None
    pool.ConnectionCls = _TlsConnection if where.scheme == "https" else _PlainConnection
    prefix = where.path.rstrip("/")
    return (
        pool,
        f"{where.scheme}://{where.netloc.rpartition('@')[2]}{prefix}" if proxy and where.scheme == "http" else prefix,
    )


def _proxy_of(scheme: str, host: str) -> str | None:
    """The proxy that the environment names for a host (HTTPS_PROXY, ALL_PROXY, NO_PROXY)."""
    if proxy_bypass(host):
        return None
    found = getproxies()
    return found.get(scheme) or found.get("all")


def _proxy_headers(proxy: str) -> dict[str, str]:
    parts = urlsplit(proxy)
    if parts.username is None:
        return {}
    named = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return dict(urllib3.make_headers(proxy_basic_auth=named))


def _socket_of(response: urllib3.BaseHTTPResponse) -> socket.socket | None:
    connection = response.connection
    found = getattr(connection, "sock", None)
    return found if isinstance(found, socket.socket) else None


def _without_credentials(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
