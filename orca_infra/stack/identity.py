"""The stack's id: made once, unguessable, kept in Postgres, carried by everything that the stack makes."""

from __future__ import annotations

from orca_infra.db.connection import Database
from orca_infra.errors import SetupError
from orca_infra.names import new_stack_id


def ensure_identity(database: Database, family: str) -> str:
    """The stack's id, made by whoever comes first.

    Raises SetupError when the database serves another family: one database serves one.
    """
    with database.transaction() as transaction:
        transaction.run(
            "insert into orca.stack_identity (id, family) values (%(id)s, %(family)s) on conflict do nothing",
            {"id": new_stack_id(), "family": family},
        )
        row = transaction.dicts("select id, family from orca.stack_identity")[0]
    if row["family"] != family:
        raise SetupError(
            f"this database belongs to stack {row['family']!r}, not to {family!r}: "
            "set ORCA_STACK to that stack, or ORCA_DB to this stack's own database"
        )
    return str(row["id"])
