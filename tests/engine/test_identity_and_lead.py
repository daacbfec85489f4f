"""One id for each stack and one leader for each database, on a real Postgres and, for the base's state, the real engine."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from orca_infra.db.connection import Database, Session
from orca_infra.db.migrate import migrate
from orca_infra.errors import EngineFailed, NotLeader, SetupError
from orca_infra.loop.leader import Leader, holder
from orca_infra.loop.passes import check_base
from orca_infra.stack.engine import Engine
from orca_infra.stack.identity import ensure_identity
from orca_infra.stack.program import Registrar

pytestmark = pytest.mark.engine


def test_first_starts_at_the_same_time_agree_on_one_id(database_url: str, background: Callable[..., Any]) -> None:
    def start() -> str:
        database = Database(database_url)
        try:
            return ensure_identity(database, "test")
        finally:
            database.close()

    starts = [background(start) for _ in range(8)]
    for one in starts:
        one.join()
    assert [one.error for one in starts] == [None] * 8
    [identity] = {one.result for one in starts}
    assert re.fullmatch(r"[a-z][a-z2-7]{15}", identity)
    assert start() == identity


def test_a_database_of_another_family_is_refused_and_stays_as_it_is(surroundings: Callable[..., Any]) -> None:
    first = surroundings()
    with pytest.raises(SetupError, match=r"this database belongs to stack 'test', not to 'other': set ORCA_STACK"):
        surroundings(ORCA_STACK="other")
    assert surroundings().stack_id == first.stack_id


def test_a_base_whose_state_carries_another_id_is_refused_by_loop_and_program(
    surroundings: Callable[..., Any],
) -> None:
    opened = surroundings()
    engine = Engine(opened.engine)
    check_base(opened, engine)  # no base yet: nothing to say against it

    def up(stack_id: str) -> None:
        def base(registrar: Registrar) -> None:
            registrar.register("orca:index:Identity", "identity", {"id": stack_id, "stack": "test"}).result()

        engine.up("test", base, targets=(), deadline_seconds=300, on_start=lambda _: None)

    other = "a" * 16
    up(other)
    with pytest.raises(SetupError, match=rf"belongs to stack id {other}, and the database to {opened.stack_id}"):
        check_base(opened, engine)
    with pytest.raises(EngineFailed, match=rf"this state belongs to stack id {other}, and the database says"):
        up(opened.stack_id)
    engine.drop("test")
    up(opened.stack_id)
    check_base(opened, engine)
    up(opened.stack_id)


def test_of_two_loops_one_leads_and_the_other_follows_at_once_when_it_ends(database_url: str) -> None:
    first, second = Leader(database_url), Leader(database_url)
    assert first.acquire()
    first.verify()
    assert not second.acquire()
    with pytest.raises(NotLeader, match="does not lead"):
        second.verify()
    assert re.fullmatch(r"server process \d+, connected from this host since [\d: -]+", holder(database_url))
    first.release()
    with pytest.raises(NotLeader):
        first.verify()
    assert second.acquire()
    second.verify()
    second.release()
    assert holder(database_url) == ""


def test_a_leader_whose_connection_was_ended_knows_it_at_the_next_write(database_url: str) -> None:
    leader, other = Leader(database_url), Leader(database_url)
    assert leader.acquire()
    session = Session(database_url)
    session.row(
        "select pg_terminate_backend(pid, 60000) from pg_stat_activity "
        "where application_name = 'orca-infra leader' and datname = current_database()"
    )
    session.close()
    with pytest.raises(NotLeader, match="the lead was lost with its connection"):
        leader.verify()
    assert other.acquire()
    with pytest.raises(NotLeader):
        leader.verify()
    assert not leader.acquire()
    other.release()


def test_a_leader_whose_lock_is_gone_while_its_connection_lives_knows_it_too(database_url: str) -> None:
    leader = Leader(database_url)
    assert leader.acquire()
    assert leader._session is not None
    leader._session.row("select pg_advisory_unlock_all()")
    with pytest.raises(NotLeader, match="its lock is no longer held"):
        leader.verify()


def test_two_databases_of_one_server_have_a_leader_each(database_url: str, empty_database_url: str) -> None:
    database = Database(empty_database_url)
    migrate(database, with_orca_tables=True)
    database.close()
    one, other = Leader(database_url), Leader(empty_database_url)
    assert one.acquire()
    assert other.acquire()
    one.verify()
    other.verify()
    one.release()
    other.verify()
    other.release()
