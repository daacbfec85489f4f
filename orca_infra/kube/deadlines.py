"""How long requests to the API server may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """How long a request may take, in seconds.

    Attributes:
        connect_seconds: for the connection, and again for TLS.
        read_seconds: for the answer's first byte, and between any two.
        whole_seconds: for the whole answer, however it trickles.

    """

    connect_seconds: float = 5.0
    read_seconds: float = 15.0
    whole_seconds: float = 60.0
