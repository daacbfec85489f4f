"""One structured line an action, with its reason; the only importer of structlog.

For people on a terminal the line is coloured; elsewhere it is JSON (ORCA_LOG=json or text decides otherwise).
"""

from __future__ import annotations

import sys
from logging import INFO, WARNING
from typing import Protocol, TextIO, cast

import structlog


class Log(Protocol):
    """What a module needs to say what it did: an event in plain words, and its particulars as keys."""

    def info(self, event: str, **particulars: object) -> None: ...

    def warning(self, event: str, **particulars: object) -> None: ...


def make_log(stream: TextIO | None = None, *, form: str | None = None, warnings_only: bool = False) -> Log:
    """A log that writes to `stream` (standard error). `form` is `json` or `text`; None: by whether it is a terminal.

    `warnings_only` is for a command that says itself what it did.
    """
    stream = stream or sys.stderr
    form = form or ("text" if stream.isatty() else "json")
    renderer: structlog.types.Processor = (
        structlog.dev.ConsoleRenderer(colors=stream.isatty())
        if form == "text"
        else structlog.processors.JSONRenderer(default=str)
    )
    logger = structlog.wrap_logger(
        structlog.PrintLogger(stream),
        wrapper_class=structlog.make_filtering_bound_logger(WARNING if warnings_only else INFO),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            renderer,
        ],
    )
    return cast("Log", logger)
