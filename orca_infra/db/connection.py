"""The database: connections, transactions, snapshots and named queries. The only importer of psycopg.

(The worker that the local provider boots is a program of its own and has its own import.) Everything else that talks to
Postgres does so through this module. No transaction is held open across a call to anything else: callers leave the
`with` before they act.
"""

from __future__ import annotations

import contextlib
import copy
import re
import select
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.resources import files
from typing import Any, LiteralString, TypeVar
from urllib.parse import quote, urlencode

import psycopg
from psycopg import conninfo, pq
from psycopg.rows import class_row, dict_row
from psycopg_pool import ConnectionPool, PoolTimeout

import orca_infra.db.moments  # noqa: F401  (times that only Postgres knows)
from orca_infra.errors import SetupError, Transient

CONNECT_SECONDS = 10
#: Three scopes' threads, what they do side by side, and the watches' notes.
_POOL_SIZE = 10
#: A server whose host is gone is noticed within 10 s, whether or not something is being sent to it.
_NOTICE_DEAD_SERVERS: Mapping[str, Any] = {
    "keepalives_idle": 3,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 9000,
}
#: The same the other way round, so that what a dead client holds is free within 10 s; nothing on a local socket.
_NOTICE_DEAD_CLIENTS = """
select set_config('tcp_keepalives_idle', '3', false), set_config('tcp_keepalives_interval', '2', false),
       set_config('tcp_keepalives_count', '3', false), set_config('tcp_user_timeout', '9000', false)"""
#: How long after its last use a connection is taken to work, as long as nothing came from the server.
_FRESH_SECONDS = 5.0
_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)

Row = TypeVar("Row")
Parameters = Mapping[str, Any]


def load_queries(module: str) -> dict[str, LiteralString]:
    """The statements of `db/queries/<module>.sql`, by the names that their comments give."""
    text = files("orca_infra.db").joinpath("queries", f"{module}.sql").read_text(encoding="utf-8")
    parts = _NAME.split(text)
    return {name: body.strip() for name, body in zip(parts[1::2], parts[2::2], strict=True)}


class Transaction:
    """One open transaction: the queries that run in it."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection

    def rows(self, kind: type[Row], query: LiteralString, parameters: Parameters | None = None) -> list[Row]:
        """All rows as `kind`, a dataclass with the columns' names."""
        with self._connection.cursor(row_factory=class_row(kind)) as cursor:
            return cursor.execute(query, parameters).fetchall()

    def dicts(self, query: LiteralString, parameters: Parameters | None = None) -> list[dict[str, Any]]:
        with self._connection.cursor(row_factory=dict_row) as cursor:
            return cursor.execute(query, parameters).fetchall()

    def value(self, query: LiteralString, parameters: Parameters | None = None) -> Any:
        """The first column of the first row, or None."""
        row = self._connection.execute(query, parameters).fetchone()
        return row[0] if row else None

    def run(self, query: LiteralString, parameters: Parameters | None = None) -> int:
        """Run a statement; gives how many rows it touched."""
        return self._connection.execute(query, parameters).rowcount

    def join_many(self) -> None:
        """Until its end, join as suits many rows.

        A table that a thousand were just written to is planned for as if it had few: its statistics come a minute later, and
        each row would be compared with each until then.
        """
        self._connection.execute("set local enable_nestloop = off")

    def script(self, text: str) -> None:
        """Run many statements without parameters, as migrations have them."""
        self._connection.execute(text.encode())


class _Connection(psycopg.Connection[Any]):
    """A connection that knows when it was last used, on the process's own clock."""

    used_at: float = float("-inf")

    def note_use(self) -> None:
        self.used_at = time.monotonic()

    def check(self) -> None:
        """Raises unless it works. One that was just in use is asked only when the server said something unasked."""
        if time.monotonic() - self.used_at < _FRESH_SECONDS:
            waiting = select.poll()
            waiting.register(self.fileno(), select.POLLIN)
            if not waiting.poll(0):
                return
        ConnectionPool.check_connection(self)


class Database:
    """A bounded pool of connections to one database.

    Every use raises Transient when the database is away. Connections that went bad while idle are replaced unseen.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._pool = ConnectionPool(
            url,
            min_size=0,
            max_size=_POOL_SIZE,
            open=True,
            timeout=CONNECT_SECONDS,
            reconnect_timeout=CONNECT_SECONDS,
            connection_class=_Connection,
            check=self._check,
            reset=_Connection.note_use,
            configure=_notice_dead_clients,
            kwargs={
                "application_name": "orca-infra",
                "connect_timeout": CONNECT_SECONDS,
                **_NOTICE_DEAD_SERVERS,
                # Server-side statements would outlive a pooler's connection.
                "prepare_threshold": None,
            },
        )
        self._guard: Callable[[Transaction], None] | None = None

    def _check(self, connection: _Connection) -> None:
        """Raises unless the connection works. A dead one is seldom alone, and the pool waits longer after each."""
        try:
            connection.check()
        except psycopg.Error:
            self._pool.drain()
            raise

    def guarded(self, guard: Callable[[Transaction], None]) -> Database:
        """The same database, in which every read-write transaction begins with `guard`; what that raises ends it."""
        guarded = copy.copy(self)
        guarded._guard = guard  # noqa: SLF001  (its own)
        return guarded

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """A read-write transaction; committed when the block ends well."""
        with _away_is_transient(), self._pool.connection() as connection, connection.transaction():
            transaction = Transaction(connection)
            if self._guard is not None:
                self._guard(transaction)
            yield transaction

    @contextlib.contextmanager
    def statement(self) -> Iterator[Transaction]:
        """For one statement, which is a transaction of its own: it takes one way to the server and back instead of three."""
        if self._guard is not None:  # which is a statement more
            with self.transaction() as transaction:
                yield transaction
            return
        with _away_is_transient(), self._pool.connection() as connection:
            connection.autocommit = True
            try:
                yield Transaction(connection)
            finally:
                if not connection.closed:
                    connection.autocommit = False

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[Transaction]:
        """A read-only transaction in which every query sees the same instant."""
        with _away_is_transient(), self._pool.connection() as connection:
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            connection.read_only = True
            try:
                with connection.transaction():
                    yield Transaction(connection)
            finally:
                if not connection.closed:
                    connection.isolation_level = None
                    connection.read_only = None

    def close(self) -> None:
        self._pool.close()


class Session:
    """One connection of its own, outside the pool, each statement a transaction; for locks that live as long as it does.

    Raises Transient when the database is away, or the connection was lost.
    """

    def __init__(self, url: str, application_name: str = "orca-infra") -> None:
        with _away_is_transient():
            self._connection = psycopg.connect(
                url,
                autocommit=True,
                connect_timeout=CONNECT_SECONDS,
                application_name=application_name,
                **_NOTICE_DEAD_SERVERS,
            )
            self._connection.execute(_NOTICE_DEAD_CLIENTS)

    def row(self, query: LiteralString, parameters: Parameters | None = None) -> tuple[Any, ...] | None:
        """Run a statement and give its first row, when it has rows."""
        with _away_is_transient():
            cursor = self._connection.execute(query, parameters)
            return cursor.fetchone() if cursor.description else None

    def listen(self, channel: LiteralString) -> None:
        self.row(f"listen {channel}")

    def notified(self, seconds: float) -> set[str]:
        """Wait up to `seconds` for notifications on the channels that are listened to; gives their payloads, each once."""
        with _away_is_transient():
            return {found.payload for found in self._connection.notifies(timeout=seconds, stop_after=1)}

    def close(self) -> None:
        with contextlib.suppress(psycopg.Error):
            self._connection.close()


def _notice_dead_clients(connection: psycopg.Connection[Any]) -> None:
    connection.execute(_NOTICE_DEAD_CLIENTS)
    connection.commit()


@contextlib.contextmanager
def _away_is_transient() -> Iterator[None]:
    try:
        yield
    except psycopg.errors.LockNotAvailable as error:
        raise Transient(f"the database keeps something locked for another: {first_line(error)}") from error
    except psycopg.errors.ReadOnlySqlTransaction as error:  # a replica, or a disk that an operator protects
        raise Transient(f"the database is read-only: {first_line(error)}") from error
    except (psycopg.OperationalError, psycopg.errors.AdminShutdown, PoolTimeout) as error:
        raise Transient(f"the database is away: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """The first line of a driver's message; later ones repeat it or quote the statement."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def check_reachable(url: str) -> None:
    """Connect once. Raises SetupError that says why it cannot be done, without the password."""
    try:
        with psycopg.connect(url, connect_timeout=CONNECT_SECONDS) as connection:
            connection.execute("select 1")
    except psycopg.ProgrammingError:
        # What libpq says of it quotes it, password and all.
        raise SetupError(
            "ORCA_DB is not a connection string that Postgres understands (its value is secret and not shown): "
            "write postgresql://user:password@host:5432/orca, with %40 for an @ in the password"
        ) from None
    except psycopg.OperationalError as error:
        raise SetupError(
            f"the database {describe(url)} cannot be reached: {first_line(error)}; "
            "mend ORCA_DB, or unset it to use the embedded Postgres"
        ) from None


def describe(url: str) -> str:
    """The database's place for people: host, port and name, never the password."""
    parts = conninfo.conninfo_to_dict(url)
    host = parts.get("host") or parts.get("hostaddr") or "local socket"
    port = f":{parts['port']}" if parts.get("port") else ""
    return f"{parts.get('dbname') or parts.get('user') or 'postgres'} on {host}{port}"


def libpq_environment(url: str) -> dict[str, str]:
    """The connection string as variables of libpq, for a program that must not have a password among its arguments.

    Raises SetupError for a parameter that no variable stands for.
    """
    variables = {one.keyword.decode(): one.envvar.decode() for one in pq.Conninfo.get_defaults() if one.envvar}
    said = {name: str(value) for name, value in conninfo.conninfo_to_dict(url).items() if value is not None}
    for name in said:
        if name not in variables:
            raise SetupError(f"ORCA_DB has the parameter {name}, which psql takes from no variable; call psql yourself")
    return {variables[name]: value for name, value in said.items()}


def is_local(url: str) -> bool:
    """Whether the database's address means something on this machine alone: a socket, or its own loopback."""
    parts = conninfo.conninfo_to_dict(url)
    hosts = str(parts.get("hostaddr") or parts.get("host") or "").split(",")
    return all(not h or h[0] in "/@" or h in {"localhost", "::1"} or h.startswith("127.") for h in hosts)


def backend_url(url: str) -> str:
    """The same database as the URL of Pulumi's Postgres state backend.

    The engine's driver knows no `sslmode=prefer` (libpq's default): what a connection of ours came to is stated instead.
    """
    with psycopg.connect(url, connect_timeout=CONNECT_SECONDS) as connection:
        info = connection.info
        encrypted = bool(connection.pgconn.ssl_in_use)
        host, port, user, database, password = info.host, info.port, info.user, info.dbname, info.password
    given = conninfo.conninfo_to_dict(url)
    mode = str(given.get("sslmode") or "prefer")
    if mode in {"prefer", "allow"}:
        mode = "require" if encrypted else "disable"
    options = {"host": host, "port": str(port), "sslmode": mode}
    options |= {key: str(given[key]) for key in ("sslrootcert", "sslcert", "sslkey") if given.get(key)}
    return (
        f"postgres://{quote(user, safe='')}:{quote(password, safe='')}@/{quote(database, safe='')}?{urlencode(options)}"
    )
