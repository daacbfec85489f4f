from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import psycopg
import pytest

from orca_infra.db.connection import Database
from orca_infra.db.migrate import REQUIRED_COLUMNS, check_schema, migrate, migrations
from orca_infra.errors import SetupError
from orca_infra.stack.identity import ensure_identity

pytestmark = pytest.mark.postgres
NAMES = [migration.name for migration in migrations()]


@pytest.fixture
def empty(empty_database_url: str) -> Iterator[Database]:
    database = Database(empty_database_url)
    yield database
    database.close()


def script(database: Database, text: str) -> None:
    with database.transaction() as transaction:
        transaction.script(text)


def at_once(*calls: Callable[[], object]) -> list[object]:
    """What calls that are made at the same time return or raise."""
    together = Barrier(len(calls))

    def run(call: Callable[[], object]) -> object:
        together.wait(120)
        try:
            return call()
        except SetupError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as executor:
        return list(executor.map(run, calls))


def test_migrations_apply_once_and_are_found_done_the_second_time(empty: Database) -> None:
    assert migrate(empty, with_orca_tables=True) == NAMES
    check_schema(empty)
    assert migrate(empty, with_orca_tables=True) == []
    assert migrate(empty, with_orca_tables=False) == []


def test_a_migration_that_was_left_out_is_noticed_whatever_came_after_it(database: Database) -> None:
    script(database, f"delete from orca.schema_versions where version = {migrations()[-2].version}")
    with pytest.raises(SetupError, match="run `orca-infra db migrate`"):
        check_schema(database)


def test_no_two_migrations_have_one_number() -> None:
    versions = [migration.version for migration in migrations()]
    assert versions == sorted(set(versions))


def test_every_table_column_and_function_says_what_it_means(database: Database) -> None:
    with database.snapshot() as transaction:
        silent = transaction.dicts(
            """
            select c.relname || coalesce('.' || a.attname, '') as name
            from pg_class c left join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
            where c.relnamespace = 'orca'::regnamespace and c.relkind in ('r', 'v')
              and c.relname not in ('pipelines', 'runs', 'workers')
              and (col_description(c.oid, a.attnum) is null or obj_description(c.oid, 'pg_class') is null)
            union all
            select p.proname || '()' from pg_proc p
            where p.pronamespace = 'orca'::regnamespace and p.prorettype <> 'trigger'::regtype and obj_description(p.oid, 'pg_proc') is null
            order by name
            """
        )
    assert [row["name"] for row in silent] == [], "write them in orca_infra/db/comments.sql"


def test_several_migrating_at_once_apply_each_migration_once(empty: Database) -> None:
    applied = at_once(*[lambda: migrate(empty, with_orca_tables=True)] * 4)
    # Each migration is a turn of its own: any of them may be the one that applies the next.
    assert sorted(name for names in applied if isinstance(names, list) for name in names) == NAMES
    check_schema(empty)
    assert all(isinstance(names, list) for names in applied)


def test_an_empty_database_is_refused_with_the_command_that_migrates_it(empty: Database) -> None:
    with pytest.raises(SetupError, match="orca-infra db migrate"):
        check_schema(empty)


def test_an_older_schema_is_refused_with_the_command_that_migrates_it(database: Database) -> None:
    script(database, "delete from orca.schema_versions")
    with pytest.raises(SetupError, match=r"older version.*db migrate"):
        check_schema(database)


def test_a_newer_schema_is_refused_and_left_as_it_is(database: Database) -> None:
    script(database, "insert into orca.schema_versions (version, name) values (999, 'from the future')")
    for refused in (lambda: check_schema(database), lambda: migrate(database, with_orca_tables=True)):
        with pytest.raises(SetupError, match=r"version 999.*newer"):
            refused()


def test_orcas_own_tables_are_required_and_what_is_missing_is_named(empty: Database) -> None:
    with pytest.raises(SetupError, match=r"orca\.pipelines\.name.*and more.*--standalone"):
        migrate(empty, with_orca_tables=False)
    with empty.snapshot() as transaction:
        assert transaction.value("select to_regclass('orca.pool_machines')") is None, "it migrated half-way"


def test_one_missing_column_is_named(empty: Database) -> None:
    script(empty, "create schema orca")
    make_tables_as_orca_might(empty)
    script(empty, "alter table orca.workers drop column seen_at")
    with pytest.raises(SetupError, match=r"missing: orca\.workers\.seen_at\)"):
        migrate(empty, with_orca_tables=False)


def test_a_column_that_went_missing_later_is_found_at_the_start(database: Database) -> None:
    script(database, "alter table orca.pipelines drop column max_starts")
    with pytest.raises(SetupError, match=r"orca\.pipelines\.max_starts"):
        check_schema(database)


def make_tables_as_orca_might(database: Database) -> None:
    """The documented columns and nothing else: no defaults, no constraints."""
    kinds = {"paused": "boolean", "fill": "boolean", "max_runs": "integer", "max_starts": "integer", "start": "integer"}
    kinds |= {"slots": "integer", "id": "bigint"}
    for table, columns in REQUIRED_COLUMNS.items():
        listed = ", ".join(f'"{c}" {kinds.get(c, "timestamptz" if c.endswith("_at") else "text")}' for c in columns)
        script(database, f"create table orca.{table} ({listed})")


def test_orcas_own_tables_may_be_updatable_views(empty: Database) -> None:
    """The names of orca's own columns differ, and nothing has a default: all the worker functions need is in the views."""
    script(
        empty,
        """
        create schema orca;
        create schema theirs;
        create table theirs.pipeline (pname text, where_to text, off boolean, par integer, tries integer,
            img text, n integer, fresh boolean, extra text);
        create table theirs.run (n bigint, of text, st text, bf boolean, starts integer, w text,
            q timestamptz, s timestamptz, e timestamptz, why text, extra text);
        create table theirs.worker (wname text, pl text, sl integer, first timestamptz, last timestamptz, extra text);
        create view orca.pipelines as select pname as name, where_to as placement, off as paused, par as max_runs,
            tries as max_starts, img as image, n as workers, fresh as allow_new_code from theirs.pipeline;
        create view orca.runs as select n as id, of as pipeline, st as state, bf as fill, starts as start, w as worker,
            q as queued_at, s as started_at, e as ended_at, why as reason from theirs.run;
        create view orca.workers as select wname as name, pl as pool, sl as slots, first as first_seen_at,
            last as seen_at from theirs.worker;
        insert into theirs.pipeline values ('work', 'worker:p', false, 1, 2);
        insert into theirs.run values (7, 'work', 'queued', false, 0, null, now());
        insert into theirs.run values (8, 'work', 'queued', false, 0, null, now());
        """,
    )
    assert migrate(empty, with_orca_tables=False) == NAMES
    check_schema(empty)
    script(
        empty,
        "insert into orca.pool_machines (name, pool, number, provider, type, location, rendered, token_hash, uid, "
        "confirmed_at) values ('orca-p-1', 'p', 1, 'local', 't', 'a', '{}', sha256('token'), 'u', now())",
    )
    with psycopg.connect(empty.url, autocommit=True) as connection:
        me = ("orca-p-1", "token")
        connection.execute("select orca.worker_hello(%s, %s, 2)", me)
        assert connection.execute("select sl, first = last from theirs.worker").fetchall() == [(2, True)]
        take = "select * from orca.worker_take(%s, %s)"
        assert connection.execute(take, me).fetchall() == [(7, 1, "work")]
        assert connection.execute(take, me).fetchall() == [], "max_runs is 1"
        assert connection.execute("select orca.worker_end(%s, %s, 7, 1, 'failed', 'it broke')", me).fetchone() == (
            True,
        )
        assert connection.execute(take, me).fetchall() == [(8, 1, "work")]
        assert connection.execute("select orca.revoke_machine('orca-p-1', 'Lost', true)").fetchone() == (False,)
        assert connection.execute("select orca.revoke_machine('orca-p-1', 'Lost', false)").fetchone() == (True,)
        runs = connection.execute("select n, st, starts, w, why from theirs.run order by n").fetchall()
        assert runs == [(7, "failed", 1, "orca-p-1", "it broke"), (8, "queued", 1, None, "Lost")]


def test_the_identity_is_made_once_however_many_come_at_once(database: Database) -> None:
    ids = at_once(*[lambda: ensure_identity(database, "prod")] * 6)
    assert len(set(ids)) == 1
    assert ensure_identity(database, "prod") == ids[0]


def test_two_families_at_once_one_is_refused(database: Database) -> None:
    results = at_once(lambda: ensure_identity(database, "prod"), lambda: ensure_identity(database, "dev"))
    refused = [result for result in results if isinstance(result, SetupError)]
    assert len(refused) == 1
    assert "belongs to stack" in str(refused[0])
