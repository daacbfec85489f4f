"""Serve the HTTP face in this process. The only importer of uvicorn."""

from __future__ import annotations

import signal
import socket
import ssl
from pathlib import Path

import uvicorn

from orca_infra.errors import SetupError
from orca_infra.runtimes.callers import Callers
from orca_infra.runtimes.http import make_app
from orca_infra.runtimes.launch import LaunchHands
from orca_infra.runtimes.touch import TOUCHES

_KEEP_ALIVE_SECONDS = 75
_STOP_SECONDS = 30


def serve(
    hands: LaunchHands,
    callers: Callers,
    *,
    host: str,
    port: int,
    certificate: Path | None = None,
    key: Path | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; requests under way are answered first. What is launched and stopped is logged.

    Raises SetupError when the certificate cannot be used, or nothing can listen there.
    """
    _check_certificate(certificate, key)
    config = uvicorn.Config(
        make_app(hands, callers, is_stopping=lambda: server.should_exit),
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_STOP_SECONDS,
        ssl_certfile=str(certificate) if certificate else None,
        ssl_keyfile=str(key) if key else None,
    )
    server = uvicorn.Server(config)
    listener = _listen(host, port)
    hands.log.info("serving runtimes", host=host, port=port, tls=certificate is not None)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # uvicorn raises what it was stopped by once more, after it has ended
    server.run(sockets=[listener])
    TOUCHES.finish()
    hands.log.info("served")


def _check_certificate(certificate: Path | None, key: Path | None) -> None:
    if certificate is None:
        if key is not None:
            raise SetupError("--key needs --certificate: the file with the certificate that it belongs to")
        return
    try:
        # No password: nobody is there to be asked for one.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except OSError as error:  # SSLError is one
        files = f"--certificate {certificate}" + (f" with --key {key}" if key else "")
        why = "they are no PEM certificate with its key" if isinstance(error, ssl.SSLError) else error.strerror
        raise SetupError(f"{files} cannot be used: {why}") from None


def _listen(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # Of a name that has both, as localhost may: what a client tries that knows of no other.
        family, kind, number, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
        listener = socket.socket(family, kind, number)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise SetupError(
            f"cannot listen on {host}, port {port}: {error.strerror}; --host and --port say where"
        ) from None
    return listener
