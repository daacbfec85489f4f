"""Whether the engine's state is there at all: a folder that is not mounted is to the engine one in which nothing was made.

It would begin there anew, and what it owned before would be nobody's. So the stack of the base, which is made when a loop
first starts, is looked for before and after each operation; Postgres knows since when it has to be there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from orca_infra.db.connection import Database, load_queries
from orca_infra.errors import Conflict, SetupError, StateBroken
from orca_infra.stack.backend import open_backend
from orca_infra.stack.engine import PROJECT, Engine
from orca_infra.stack.locks import free_dead_locks

_SQL = load_queries("engine")


def claim_state(engine: Engine, database: Database, backend_url: str, stack: str) -> None:
    """Make the base's stack at the first sight of a state, and remember that it is there.

    Raises SetupError when it was there and is not any more, and what the engine raises.
    """
    if require_state(database, backend_url, engine):
        return
    # Of two loops that start at once, either would have the other's half-made stack for an error. The lock is a
    # transaction's, held open for the second that it takes, once in a state's life: behind a pooler it ends with it, too.
    with database.transaction() as transaction:
        transaction.run(_SQL["state_lock"])
        # One that was killed in making it left its lock, which no ledger knows; `pulumi cancel` wants the stack to be there.
        with contextlib.suppress(Conflict), open_backend(backend_url) as backend:
            free_dead_locks(backend, stack, [])
        if not _holds(backend_url, stack, engine):  # to make it takes its lock, which a deploy job may hold
            engine.init(stack)
        transaction.run(_SQL["state_identity"], {"stack": stack, "place": place_of(backend_url)})


def require_state(database: Database, backend_url: str, engine: Engine | None = None) -> bool:
    """Gives whether there is a state yet. Raises SetupError when it was there and is not any more, and as `missing_state`."""
    if said := missing_state(database, backend_url, engine):
        raise SetupError(said)
    return said is not None


def missing_state(database: Database, backend_url: str, engine: Engine | None = None) -> str | None:
    """A sentence when the state was there and is not any more, empty when it is there; None when there was none yet.

    Without an engine nothing is said of a backend that only the engine knows, such as a bucket. Raises Transient.
    """
    with database.snapshot() as transaction:
        known = transaction.dicts(_SQL["state_known"])
    if not known:
        return None
    return "" if _holds(backend_url, known[0]["stack"], engine) else _sentence(known[0], backend_url)


def _holds(backend_url: str, stack: str, engine: Engine | None) -> bool:
    """Whether the state holds the stack, whatever may be wrong with it; True when only an engine could say that."""
    key = state_key(stack)
    try:
        with open_backend(backend_url) as backend:
            return backend.has(key) or backend.has(f"{key}.gz")
    except Conflict:
        try:
            return engine is None or engine.check(stack)
        except StateBroken:
            return True


def state_key(stack: str) -> str:
    """Where the backend keeps a stack's state, unless it is compressed."""
    return f".pulumi/stacks/{PROJECT}/{stack}.json"


def place_of(backend_url: str) -> str:
    """The backend for people, without what its URL may hold of secrets."""
    parts = urlsplit(backend_url)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"


def _sentence(known: Mapping[str, Any], backend_url: str) -> str:
    place = place_of(backend_url)
    before = "" if known["place"] == place else f" (at {known['place']} then)"
    return (
        f"the engine's state at {place} does not hold stack {known['stack']!r}, which was there on "
        f"{known['first_seen']:%Y-%m-%d}{before}: mount the folder, or set PULUMI_BACKEND_URL back; until then nothing is "
        "made or removed through it. When it is lost for good, have it begun anew: "
        "`orca-infra db psql -c 'delete from orca.state_identity'`"
    )
