"""Which account of a cloud a family's machines are in: kept from the base's first `up` on, and another one is refused.

In another project machines would be looked for where they are not: those that there are would count as gone, and be paid for
by nobody's knowledge.
"""

from __future__ import annotations

from orca_infra.db.connection import Database
from orca_infra.errors import SetupError
from orca_infra.machines.observe import SQL


def claim_account(database: Database, provider: str, account: str, *, remember: bool) -> None:
    """Check the account, and with `remember` keep it at the first sight. Raises SetupError when it is another one."""
    if remember:
        with database.transaction() as transaction:
            transaction.run(SQL["remember_account"], {"provider": provider, "account": account})
    said = foreign_account(database, provider, account)
    if said:
        raise SetupError(said)


def foreign_account(database: Database, provider: str, account: str) -> str:
    """One sentence when the family's machines are in another account; empty when they are not, or are nowhere yet."""
    with database.snapshot() as transaction:
        rows = transaction.dicts(SQL["known_account"], {"provider": provider})
    if not rows or rows[0]["account"] == account:
        return ""
    return (
        f"this stack's machines on {provider} are in {rows[0]['account']} (since {rows[0]['first_seen']:%Y-%m-%d}), and "
        f"orca.toml says {account}: set it back; to move, have all machines go first (take the pools out of orca.toml), then "
        f"delete what keeps it: `delete from orca.cloud_identity where provider = '{provider}'`"
    )
