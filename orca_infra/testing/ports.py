"""Ports of 127.0.0.1 for servers that tests start."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

from orca_infra.errors import SetupError

#: Below those that the kernel gives to whoever asks for any, a server or the near end of a connection.
_PORTS = range(20_000, 32_000)
_TRIES = 100


def free_port() -> int:
    """A port that is free now, for a server that can be given a number only.

    The kernel gives it to nobody else in the time until it is bound; somebody who asks for this very number gets it.
    """
    for port in random.sample(_PORTS, _TRIES):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise SetupError(f"no free port on 127.0.0.1 among {_PORTS}; end what holds them and try again")


def reserve_port() -> socket.socket:
    """A free port of 127.0.0.1 that stays ours until the socket is closed, whether somebody listens on it or not.

    Choosing a free port and binding it later leaves a time in which another process gets it, and so does a server's
    restart; a client that tries a closed port of the ephemeral range may even connect to itself. This socket is bound, never
    listens (a connection is refused), and shares its port with sockets of this user that ask for sharing, as the API server
    does under --permit-port-sharing; the kernel gives it to nobody who asks for any free port (socket(7), SO_REUSEPORT).
    """
    reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
    except OSError as error:
        reserved.close()
        raise SetupError(f"no free port on 127.0.0.1 ({error.strerror}); end what holds them and try again") from error
    return reserved
