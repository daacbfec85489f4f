"""Everything that a command works with: the database, the stack's identity, the state's backend and the secret keys.

Without ORCA_DB all of it is made once in ORCA_HOME, and said. With ORCA_DB nothing is made up: what is missing is refused.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from orca_infra.db import embedded
from orca_infra.db.connection import Database, backend_url, check_reachable
from orca_infra.db.migrate import check_schema, migrate
from orca_infra.errors import SetupError
from orca_infra.settings import Settings
from orca_infra.stack.engine import EngineConfig
from orca_infra.stack.identity import ensure_identity


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What commands share. `url` is the database's connection string and may hold a password."""

    settings: Settings
    database: Database
    url: str = field(repr=False)
    stack_id: str
    engine: EngineConfig
    token_key: bytes = field(repr=False)

    @property
    def cloud_folder(self) -> Path:
        """Where the local provider's make-believe cloud is."""
        return self.settings.home / "cloud"

    @property
    def logs_folder(self) -> Path:
        """Where the runs' logs are, and what machines said last."""
        return self.settings.logs or self.settings.home / "logs"

    def close(self) -> None:
        self.database.close()


def database_url(settings: Settings, say: Callable[[str], None]) -> str:
    """The database's connection string; starts the embedded Postgres when ORCA_DB is unset. Raises SetupError."""
    if settings.db is not None:
        check_reachable(settings.db)
        return settings.db
    folder = settings.home / "postgres"
    if not embedded.is_running(folder):
        say(f"ORCA_DB is not set: starting the embedded Postgres in {folder} (`orca-infra db stop` ends it)")
    return embedded.start(folder)


def open_surroundings(
    settings: Settings, *, say: Callable[[str], None], with_passphrase: bool = True, with_token_key: bool = True
) -> Surroundings:
    """Put everything together. Raises SetupError naming the first thing that is missing, with nothing half-made.

    Without the passphrase nothing can be done with the engine, without the token key no machine be made: for a process that
    does neither, and then should not have them.
    """
    _make_home(settings.home)
    passphrase = settings.passphrase_file
    token_key = settings.token_key
    if settings.db is not None:
        if passphrase is None and with_passphrase:
            raise SetupError(
                "PULUMI_CONFIG_PASSPHRASE_FILE is not set: it names the file whose passphrase protects the secrets in the "
                "engine's state; make one with `openssl rand -hex 32 > FILE` and keep it safe"
            )
        if token_key is None and with_token_key:
            raise SetupError(
                "ORCA_TOKEN_KEY is not set: workers' tokens are made from it; `openssl rand -hex 32` makes a good one"
            )
    if passphrase is None:
        passphrase = settings.home / "passphrase"
        if settings.db is None:
            _secret_file(passphrase)
    elif not _has_text(passphrase) and with_passphrase:
        raise SetupError(f"PULUMI_CONFIG_PASSPHRASE_FILE names {passphrase}, which is missing or empty")
    if token_key is None and settings.db is not None:
        token_key = b""
    elif token_key is None:
        token_key = _secret_file(settings.home / "token-key").read_bytes().strip()

    url = database_url(settings, say)
    database = Database(url)
    try:
        if settings.db is None:
            migrate(database, with_orca_tables=True)
        else:
            check_schema(database)
        stack_id = ensure_identity(database, settings.stack)
        state = settings.backend_url or backend_url(url)
    except BaseException:
        database.close()
        raise
    engine = EngineConfig(backend_url=state, passphrase_file=passphrase.absolute(), folder=settings.home / "engine")
    return Surroundings(
        settings=settings, database=database, url=url, stack_id=stack_id, engine=engine, token_key=token_key
    )


def _make_home(home: Path) -> None:
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SetupError(
            f"the folder {home} cannot be made ({error.strerror}); set ORCA_HOME to one that can be written"
        ) from error


def _secret_file(path: Path) -> Path:
    """Make the file with a random secret unless it is there; whoever comes first makes it."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        if not path.exists():
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(secrets.token_hex(32) + "\n")
            # A link is made whole or not at all, and never over one that is there.
            try:
                os.link(temporary, path)
            except FileExistsError:
                pass
            finally:
                temporary.unlink()
    except OSError as error:
        raise SetupError(f"the file {path} cannot be written: {error.strerror}") from error
    return path


def _has_text(path: Path) -> bool:
    try:
        return bool(path.read_bytes().strip())
    except OSError:
        return False
