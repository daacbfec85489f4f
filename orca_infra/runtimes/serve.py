"""Serve the HTTP face in this process. The only importer of uvicorn."""

from __future__ import annotations

import signal
from pathlib import Path

import uvicorn

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
    """Serve until SIGTERM or SIGINT; requests under way are answered first. What is launched and stopped is logged."""
    config = uvicorn.Config(
        make_app(hands, callers),
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
    hands.log.info("serving runtimes", host=host, port=port, tls=certificate is not None)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # uvicorn raises what it was stopped by once more, after it has ended
    uvicorn.Server(config).run()
    TOUCHES.finish()
    hands.log.info("served")
