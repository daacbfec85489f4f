"""The lead on servers of its own: a pooler in between, a host that is gone without a word, a failover that lost rows."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from orca_infra.db.connection import Database, Session
from orca_infra.errors import NotLeader, SetupError, Transient
from orca_infra.loop.leader import Leader
from orca_infra.loop.strays import release_strays, strays_held
from orca_infra.testing.node_programs import unpacked
from orca_infra.testing.node_surroundings import NodeImpossible
from orca_infra.testing.ports import free_port
from orca_infra.testing.tcp_postgres import TcpPostgres, silence

pytestmark = pytest.mark.postgres

WaitUntil = Callable[..., None]
#: It takes 10 s, and what a busy machine adds; without the settings of db/connection.py it were hours.
NOTICED_SECONDS = 120
_POOLER_LIBRARIES = ("libevent-2.1-7", "libc-ares2")


@pytest.fixture
def server() -> Iterator[TcpPostgres]:
    folder = Path(tempfile.mkdtemp(prefix="orca-test-server-", dir="/tmp"))
    folder.chmod(0o755)
    server = TcpPostgres(folder)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


class Pooler:
    """Debian's pgbouncer before a server."""

    def __init__(self, server: TcpPostgres, mode: str, *, size: int = 4) -> None:
        try:
            program = unpacked("pgbouncer") / "usr/sbin/pgbouncer"
            libraries = [str(next((unpacked(name) / "usr/lib").glob("*-linux-*"))) for name in _POOLER_LIBRARIES]
        except NodeImpossible as error:
            pytest.skip(str(error))
        self.server, self.size, self.port = server, size, free_port()
        self.folder = server.folder / "pooler"
        self.folder.mkdir()
        self.configure(mode)
        user = ["-u", "nobody"] if os.geteuid() == 0 else []
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [program, *user, self.folder / "pgbouncer.ini"],
                env={"LD_LIBRARY_PATH": ":".join(libraries)},
                stdout=log,
                stderr=log,
            )
        self.url = f"postgresql://postgres@127.0.0.1:{self.port}/postgres"
        while not self._answers():
            assert self._process.poll() is None, (self.folder / "log").read_text()
            time.sleep(0.05)

    def configure(self, mode: str) -> None:
        (self.folder / "pgbouncer.ini").write_text(
            f"[databases]\npostgres = host=127.0.0.1 port={self.server.port} user=postgres\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {self.port}\nunix_socket_dir =\nauth_type = any\n"
            f"pool_mode = {mode}\ndefault_pool_size = {self.size}\nadmin_users = postgres\n"
        )

    def switch(self, mode: str) -> None:
        self.configure(mode)
        self._process.send_signal(signal.SIGHUP)
        while self._mode() != mode:
            time.sleep(0.05)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answers(self) -> bool:
        with suppress(psycopg.OperationalError):
            psycopg.connect(self.url).close()
            return True
        return False

    def _mode(self) -> str:
        """The mode that it works in by now, as its own console says."""
        # The console knows neither transactions nor anything but simple queries.
        console = psycopg.ClientCursor
        with psycopg.connect(
            make_conninfo(self.url, dbname="pgbouncer"), autocommit=True, cursor_factory=console
        ) as one:
            rows = one.execute("show config").fetchall()
        return next(str(row[1]) for row in rows if row[0] == "pool_mode")


@pytest.fixture
def pooler(server: TcpPostgres) -> Iterator[Callable[..., Pooler]]:
    started: list[Pooler] = []

    def start(mode: str, **more: Any) -> Pooler:
        started.append(Pooler(server, mode, **more))
        return started[-1]

    yield start
    for one in started:
        one.end()


TRANSACTION_MODE = r"ORCA_DB leads through a pooler in transaction mode.*give the loop a direct connection"


@pytest.mark.parametrize("size", [1, 4])
def test_a_pooler_in_transaction_mode_is_refused_and_keeps_no_lock(
    server: TcpPostgres, pooler: Callable[..., Pooler], size: int
) -> None:
    server.database().close()
    leader = Leader(pooler("transaction", size=size).url)
    for begin in (leader.connect, leader.acquire):
        with pytest.raises(SetupError, match=TRANSACTION_MODE):
            begin()
    direct = Leader(server.url)
    assert direct.acquire(), "the refused one left its lock with the pooler"
    direct.release()


def test_a_loop_behind_a_pooler_in_transaction_mode_refuses_to_start_in_one_sentence(
    server: TcpPostgres, pooler: Callable[..., Pooler], home: Path
) -> None:
    server.database().close()
    program = Path(sys.executable).with_name("orca-infra")
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "ORCA_HOME": str(home),
        "ORCA_STACK": "test",
        "ORCA_DB": pooler("transaction").url,
        "ORCA_CONFIG": str(home / "orca.toml"),
        "ORCA_TOKEN_KEY": "a key of the tests, 32 bytes long",
        "PULUMI_CONFIG_PASSPHRASE_FILE": str(home / "passphrase"),
        "PULUMI_BACKEND_URL": f"file://{home / 'state'}",
    }
    done = subprocess.run([program, "run"], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert "a pooler in transaction mode" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_pooler_in_session_mode_serves_and_one_that_is_switched_later_ends_the_lead(
    server: TcpPostgres, pooler: Callable[..., Pooler]
) -> None:
    database = server.database()
    between = pooler("session")
    leader = Leader(between.url)
    assert leader.acquire()
    leader.verify()
    between.switch("transaction")
    leader.verify()  # its server process is given back at this transaction's end
    other = Session(between.url)
    other.row("begin")
    other.row("select 1")  # and taken by another session
    with pytest.raises(NotLeader, match=TRANSACTION_MODE):
        leader.verify()
    other.row("rollback")
    other.close()
    with pytest.raises(SetupError, match=TRANSACTION_MODE):
        leader.acquire()
    database.close()


def test_a_new_epoch_fences_the_writes_of_whoever_led_before(server: TcpPostgres) -> None:
    database = server.database()
    old, new = Leader(server.url), Leader(server.url)
    assert old.acquire()
    fenced = database.guarded(old.guard)
    note(fenced, "a")
    end_sessions(database, "orca-infra leader")
    with pytest.raises(NotLeader):
        note(fenced, "the lock is gone, and nobody leads")
    assert new.acquire()
    assert new.epoch == 2
    with pytest.raises(NotLeader, match="another loop has led since"):
        note(fenced, "the epoch moved on")
    with pytest.raises(NotLeader, match="the lead was lost with its connection"):
        old.verify()
    with pytest.raises(NotLeader, match="does not lead"):
        old.verify()
    note(database.guarded(new.guard), "b")
    assert notes(database) == ["a", "b"]
    assert not old.acquire()
    new.release()
    assert old.acquire()
    with database.snapshot() as transaction:
        assert transaction.value("select epoch from orca.lead") == 3
    old.release()
    database.close()


def test_a_leader_begins_only_after_the_transactions_of_the_one_before_have_ended(
    server: TcpPostgres, background: Callable[..., Any]
) -> None:
    database = server.database()
    old, new = Leader(server.url), Leader(server.url)
    assert old.acquire()
    with database.guarded(old.guard).transaction() as transaction:
        end_sessions(database, "orca-infra leader")
        taking_over = background(new.acquire)
        time.sleep(0.5)
        assert not taking_over.ended
        transaction.run("insert into orca.attention (topic, message) values ('x', 'x')")
    taking_over.join()
    assert (taking_over.error, taking_over.result) == (None, True)
    assert notes(database) == ["x"]
    new.release()
    database.close()


def test_a_transaction_of_an_earlier_leader_that_hangs_keeps_the_next_waiting_and_says_so(server: TcpPostgres) -> None:
    database = server.database()
    old, new = Leader(server.url), Leader(server.url)
    assert old.acquire()
    with database.guarded(old.guard).transaction():
        end_sessions(database, "orca-infra leader")
        with pytest.raises(Transient, match="keeps something locked for another"):
            new.acquire()
        assert new.epoch is None
    assert new.acquire()
    new.release()
    database.close()


def test_the_lead_is_free_soon_after_a_host_is_gone_without_a_word(server: TcpPostgres) -> None:
    """Half open: the leader's host answers nothing any more, not even that the connection is over."""
    database = server.database()
    old, new = Leader(server.url), Leader(server.url)
    assert old.acquire()
    fenced = database.guarded(old.guard)
    assert old._session is not None
    with fenced.transaction() as transaction:
        transaction.value("select 1")
        try:
            silence(old._session._connection.fileno())
        except PermissionError as error:
            pytest.skip(f"who is not root may not have the kernel drop what comes in here ({error})")
        silence(transaction._connection.fileno())
        silenced_at = time.monotonic()
        while True:
            with suppress(Transient):
                if new.acquire():
                    break
            assert time.monotonic() - silenced_at < NOTICED_SECONDS
            time.sleep(2)  # as a follower looks
        assert new.epoch == 2
        started_at = time.monotonic()
        with pytest.raises(NotLeader, match="the lead was lost with its connection"):
            old.verify()
        assert time.monotonic() - started_at < NOTICED_SECONDS, "the old leader waited long for an answer"
        transaction._connection.close()
    new.release()
    database.close()


def test_after_a_failover_that_lost_rows_strays_are_held_until_an_operator_agrees(server: TcpPostgres) -> None:
    database = server.database()
    leader = Leader(server.url)
    assert leader.acquire()
    leader.release()
    assert leader.acquire()
    leader.release()
    assert strays_held(database) == "", "an ordinary change of leaders holds nothing"
    database.close()
    server.stop()
    behind = server.copy()
    server.start()
    database = Database(server.url)
    note(database, "lost")
    database.close()
    server.stop()
    server.take_over(behind)

    database = Database(server.url)
    assert notes(database) == []
    assert leader.acquire()
    leader.release()
    why = "the database failed over or was restored (timeline 2, before 1)"
    assert strays_held(database) == why
    assert leader.acquire()
    assert strays_held(database) == why, "the next lead forgot it"
    assert release_strays(database)
    assert not release_strays(database)
    leader.release()
    assert leader.acquire()
    assert strays_held(database) == ""
    leader.release()
    database.close()


def test_a_role_without_any_rights_over_the_server_leads_too(server: TcpPostgres) -> None:
    database = server.database()
    with database.transaction() as transaction:
        transaction.script(
            "create role small login; grant usage on schema orca to small; "
            "grant select, insert, update, delete on all tables in schema orca to small"
        )
    leader = Leader(make_conninfo(server.url, user="small"))
    assert leader.acquire()
    leader.verify()
    with database.snapshot() as transaction:
        [lead] = transaction.dicts("select * from orca.lead")
    assert (lead["epoch"], lead["timeline"]) == (1, 1)
    assert lead["system_identifier"].isdigit()
    leader.release()
    database.close()


def note(database: Database, message: str) -> None:
    with database.transaction() as transaction:
        transaction.run("insert into orca.attention (topic, message) values (%(m)s, %(m)s)", {"m": message})


def notes(database: Database) -> list[str]:
    with database.snapshot() as transaction:
        return [row["message"] for row in transaction.dicts("select message from orca.attention order by topic")]


def end_sessions(database: Database, name: str) -> None:
    with database.transaction() as transaction:
        transaction.run(
            "select pg_terminate_backend(pid, 5000) from pg_stat_activity where application_name = %(name)s",
            {"name": name},
        )
