"""Bring schema `orca` to this program's version: numbered SQL files, each in a transaction, one caller at a time."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

from orca_infra.db.connection import Database, Transaction
from orca_infra.errors import SetupError

_LOCK = "select pg_advisory_xact_lock(hashtextextended('orca.migrations', 0))"
_VERSIONS = """
create schema if not exists orca;
create table if not exists orca.schema_versions (
    version     integer primary key,
    name        text not null,
    applied_at  timestamptz not null default now()
)
"""
#: What this program reads and writes of orca's own tables.
REQUIRED_COLUMNS: dict[str, tuple[str, ...]] = {
    "pipelines": (
        "name",
        "placement",
        "paused",
        "max_runs",
        "max_starts",
        "image",
        "workers",
        "allow_new_code",
    ),
    "runs": (
        "id",
        "pipeline",
        "state",
        "fill",
        "start",
        "worker",
        "queued_at",
        "started_at",
        "ended_at",
        "reason",
    ),
    "workers": ("name", "pool", "slots", "first_seen_at", "seen_at"),
}


@dataclass(frozen=True, slots=True)
class Migration:
    version: int
    name: str
    text: str


def migrations() -> list[Migration]:
    """This program's migrations in order."""
    folder = files("orca_infra.db").joinpath("migrations")
    found = [
        Migration(int(entry.name.partition("_")[0]), entry.name, entry.read_text(encoding="utf-8"))
        for entry in folder.iterdir()
        if entry.name.endswith(".sql")
    ]
    return sorted(found, key=lambda migration: migration.version)


def migrate(database: Database, *, with_orca_tables: bool) -> list[str]:
    """Apply what is missing, and give its names; nothing happens when all is there.

    `with_orca_tables` makes orca's own tables; otherwise they are required. Raises SetupError when they are missing, or
    when the database is of a newer version than this program.
    """
    applied: list[str] = []
    for migration in migrations():
        with database.transaction() as transaction:
            transaction.run(_LOCK)
            transaction.script(_VERSIONS)
            refuse_newer(transaction)
            if _is_applied(transaction, migration.version):
                continue
            if with_orca_tables:
                transaction.script(files("orca_infra.db").joinpath("orca_tables.sql").read_text(encoding="utf-8"))
            require_orca_tables(transaction)
            transaction.script(migration.text)
            transaction.run(
                "insert into orca.schema_versions (version, name) values (%(version)s, %(name)s)",
                {"version": migration.version, "name": migration.name},
            )
            applied.append(migration.name)
    if applied:
        with database.transaction() as transaction:
            transaction.run(_LOCK)
            transaction.script(files("orca_infra.db").joinpath("comments.sql").read_text(encoding="utf-8"))
    return applied


def _is_applied(transaction: Transaction, version: int) -> bool:
    return bool(
        transaction.value("select true from orca.schema_versions where version = %(version)s", {"version": version})
    )


def refuse_newer(transaction: Transaction) -> None:
    """Raises SetupError when a newer program has migrated this database."""
    newest = migrations()[-1].version
    found = transaction.value("select max(version) from orca.schema_versions") or 0
    if found > newest:
        raise SetupError(
            f"the database has schema version {found}, and this program knows {newest}: install a newer orca-infra"
        )


def check_schema(database: Database) -> None:
    """Raises SetupError unless the database is at exactly this program's version."""
    with database.snapshot() as transaction:
        if transaction.value("select to_regclass('orca.schema_versions')") is None:
            raise SetupError("the database has no schema of orca-infra yet: run `orca-infra db migrate`")
        refuse_newer(transaction)
        applied = {row["version"] for row in transaction.dicts("select version from orca.schema_versions")}
        if not applied.issuperset(migration.version for migration in migrations()):
            raise SetupError("the database is of an older version: run `orca-infra db migrate`")
        require_orca_tables(transaction)


def require_orca_tables(transaction: Transaction) -> None:
    """Raises SetupError naming what is missing of orca's own tables."""
    found = {
        (row["table_name"], row["column_name"])
        for row in transaction.dicts(
            "select table_name, column_name from information_schema.columns where table_schema = 'orca'"
        )
    }
    missing = [
        f"orca.{table}.{column}"
        for table, columns in REQUIRED_COLUMNS.items()
        for column in columns
        if (table, column) not in found
    ]
    if missing:
        listed = ", ".join(missing[:8]) + (" and more" if len(missing) > 8 else "")
        raise SetupError(
            f"orca's own tables are not all there (missing: {listed}): install orca's schema first, "
            "or let `orca-infra db migrate --standalone` make them"
        )
