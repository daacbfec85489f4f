"""The pool's connections: what a statement is, and what becomes of connections that the server ended."""

from __future__ import annotations

import contextlib
from typing import LiteralString

import pytest

from orca_infra.db.connection import Database, Session
from orca_infra.errors import Transient

pytestmark = pytest.mark.postgres


def ask(url: str, query: LiteralString, **parameters: object) -> object:
    session = Session(url)
    row = session.row(query, parameters)
    session.close()
    return row and row[0]


def test_a_statement_is_a_transaction_of_its_own_and_leaves_none_behind(database_url: str) -> None:
    database = Database(database_url)
    with database.statement() as statement:
        assert statement.run("create table one (n integer)") == -1
    with database.statement() as statement:
        assert statement.run("insert into one values (1), (2)") == 2
    with database.transaction() as transaction:  # the same connection, and not in autocommit any more
        transaction.run("insert into one values (3)")
        assert transaction.value("select count(*) from one") == 3
        assert ask(database_url, "select count(*) from one") == 2
    assert ask(database_url, "select count(*) from one") == 3
    database.close()


def test_a_connection_that_the_server_ended_is_replaced_unseen_however_short_ago_it_was_used(database_url: str) -> None:
    database = Database(database_url)
    for _ in range(3):
        with database.statement() as statement:
            backend = statement.value("select pg_backend_pid()")
        ask(database_url, "select pg_terminate_backend(%(pid)s, 5000)", pid=backend)
        with database.transaction() as transaction:
            assert transaction.value("select pg_backend_pid()") != backend
    database.close()


def test_when_all_connections_were_ended_nobody_waits_longer_after_each(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("psycopg_pool.pool.sleep", slept.append)
    database = Database(database_url)
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(database.transaction())
    others = "select count(pg_terminate_backend(pid, 5000)) from pg_stat_activity where application_name = 'orca-infra' and pid <> pg_backend_pid() and datname = current_database()"
    session = Session(database_url, "somebody else")
    assert session.row(others) == (4,)
    session.close()
    with database.transaction() as transaction:
        assert transaction.value("select 1") == 1
    assert set(slept) <= {0.0}
    database.close()


def test_a_database_that_is_read_only_is_a_fault_that_may_pass(database_url: str) -> None:
    """A replica, or what an operator protects: neither a pass nor the loop itself may end on it as on a defect."""
    name = ask(database_url, "select current_database()")
    database = Database(database_url)
    with database.transaction() as transaction:
        transaction.script(f"alter database {name} set default_transaction_read_only = on")
    database.close()
    database = Database(database_url)
    with pytest.raises(Transient, match="^the database is read-only: "), database.transaction() as transaction:
        transaction.run("create table one (n integer)")
    database.close()
    with pytest.raises(Transient, match="^the database is read-only: "):
        ask(database_url, "create table one (n integer)")
