"""What several folders of tests share: a real Postgres, a fresh database for each test, and the waiting for something."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from orca_infra.config import parse_config
from orca_infra.db import embedded
from orca_infra.db.connection import Database, Session
from orca_infra.db.migrate import migrate
from orca_infra.errors import SetupError, Transient
from orca_infra.loop.leader import Leader
from orca_infra.loop.passes import MachinePasses, PassResult, configure_providers
from orca_infra.machines.observe import machine_stack
from orca_infra.machines.providers.local_cloud import LocalCloud
from orca_infra.process import ProcessId, boot_id, end_session, is_alive
from orca_infra.settings import read_settings
from orca_infra.stack.engine import Engine
from orca_infra.stack.tools import require_tool
from orca_infra.surroundings import Surroundings, open_surroundings

_ROOT = Path(__file__).parents[1]
_POLL_SECONDS = 0.02
_SLOWNESS = 10
_PATIENCE_SECONDS = 240
_TEMPLATE = "orca_migrated"
# Nothing of these tests has to survive a loss of power.
_QUICK = ("fsync = off", "synchronous_commit = off", "full_page_writes = off")


def pytest_configure() -> None:
    """Told to end, as by `timeout`, pytest ends what its fixtures started."""

    def leave(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, leave)


def wait_until(predicate: Callable[[], object], seconds: float = 10.0, what: str = "") -> None:
    """Returns as soon as the predicate holds; fails the test when it does not within the time.

    `seconds` is what it takes at most on a machine that does nothing else; one that is busy may take many times as long.
    """
    patience_seconds = max(seconds, min(_SLOWNESS * seconds, _PATIENCE_SECONDS))
    deadline = time.monotonic() + patience_seconds
    while not predicate():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {patience_seconds:g} s: {what or predicate}")
        time.sleep(_POLL_SECONDS)


@pytest.fixture(name="wait_until", scope="session")
def _wait_until() -> Callable[..., None]:
    return wait_until


@dataclass(frozen=True)
class PostgresServer:
    """A server of this session. `url` is that of its own database, in which nobody writes."""

    url: str
    numbers: Iterator[int]

    def new_database(self, template: str = "template1") -> str:
        """The connection string of a new database."""
        name = f"test_{next(self.numbers)}"
        self.command(f"create database {name} template {template}")
        return make_conninfo(self.url, dbname=name)

    def drop(self, url: str) -> None:
        """Drop a database, whoever is connected still."""
        self.command(f"drop database if exists {_name_of(url)} with (force)")

    def command(self, text: str) -> None:
        session = Session(self.url)
        try:
            session.row(text)
        finally:
            session.close()


def _name_of(url: str) -> str:
    return str(conninfo_to_dict(url)["dbname"])


class Background:
    """A call on a thread of its own, with its result or its error."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.result: object = None
        self.error: BaseException | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except BaseException as error:  # noqa: BLE001  (it is the caller's to look at)
            self.error = error

    def join(self) -> None:
        """Wait for its end."""
        self._thread.join(_PATIENCE_SECONDS)
        assert self.ended, f"not within {_PATIENCE_SECONDS} s: {self._call}"

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()


@pytest.fixture(scope="session")
def background() -> type[Background]:
    return Background


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A real Postgres, the embedded one, with a migrated database as template; stopped at the end of the session.

    Not in pytest's own folder: that is closed to others, and under root the server runs as another user.
    """
    folder = Path(tempfile.mkdtemp(prefix="orca-test-pg-", dir="/tmp"))
    folder.chmod(0o755)
    try:
        server = PostgresServer(embedded.start(folder / "postgres"), itertools.count(1))
        for setting in _QUICK:
            server.command(f"alter system set {setting}")
        server.command("select pg_reload_conf()")
        server.command(f"create database {_TEMPLATE}")
        database = Database(make_conninfo(server.url, dbname=_TEMPLATE))
        migrate(database, with_orca_tables=True)
        database.close()
        yield server
    finally:
        embedded.stop(folder / "postgres")
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def empty_database_url(postgres_server: PostgresServer) -> Iterator[str]:
    """A fresh database in which nothing was migrated."""
    url = postgres_server.new_database()
    yield url
    postgres_server.drop(url)


@pytest.fixture
def database_url(postgres_server: PostgresServer) -> Iterator[str]:
    """A fresh database of its own, migrated, with orca's own tables."""
    url = postgres_server.new_database(_TEMPLATE)
    yield url
    postgres_server.drop(url)


@pytest.fixture
def namespace(cluster: Any) -> Iterator[str]:
    """A namespace of the test's own on its folder's cluster; its deletion is not waited for."""
    name = f"test-{secrets.token_hex(4)}"
    cluster.api.call("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    yield name
    cluster.api.call("DELETE", f"/api/v1/namespaces/{name}")


# The product on that database: everything in a folder of the test's own, nothing of which may outlive the test.

TOML = """
[pools.p]
provider = "local"
image = "registry.example/orca-worker:1"
max_machines = 3
idle_seconds = "1h"
types = [{ type = "small", locations = ["a"] }]
"""
TOKEN_KEY = "a key of the tests, 32 bytes long"
# Durations that suit a test; what it is about, it sets itself.
_ENVIRONMENT = {
    "ORCA_STACK": "test",
    "ORCA_TOKEN_KEY": TOKEN_KEY,
    "ORCA_POOL_GROW_AFTER": "0",
    "ORCA_POOL_TRY_SECONDS": "0.01",
    "ORCA_POOL_SCALE_SECONDS": "0.3",
    "ORCA_HEARTBEAT_SECONDS": "0.5",
    "ORCA_STRAY_GRACE_SECONDS": "0.01",
    "ORCA_ENGINE_SECONDS": "180",
}


@pytest.fixture
def home() -> Iterator[Path]:
    """An ORCA_HOME with a passphrase and an orca.toml; whatever process still belongs to it at the end fails the test."""
    folder = Path(tempfile.mkdtemp(prefix="orca-test-home-", dir="/tmp"))
    folder.chmod(0o755)
    (folder / "state").mkdir()
    (folder / "passphrase").write_text("a passphrase of the tests\n")
    (folder / "orca.toml").write_text(TOML)
    yield folder
    try:
        end_machines(LocalCloud(folder / "cloud"))
        # The engine's plugins notice their engine's end a moment later; a machine's launcher that of its machine.
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not processes_of(folder), 3)
        left = {process: _command_line(process.pid) for process in processes_of(folder)}
        for process in left:
            _kill(process)
        assert not left, f"processes outlived the test: {left}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def checkout(home: Path) -> Path:
    """The project as a person has it, in `home`: pulumi writes the salt of a passphrase into its `stacks`."""
    folder = home / "checkout"
    for name in ("Pulumi.yaml", "__main__.py", "stacks/orca.toml", "tools/plugins/pulumi-resource-orca"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(_ROOT / name, folder / name)
    (folder / ".venv").symlink_to(_ROOT / ".venv")
    return folder


def environment(home: Path, database_url: str, state: str = "file", **more: str) -> dict[str, str]:
    """The variables of a product in `home`; `state` is where the engine keeps its state, `file` or `postgres`."""
    values = {
        **_ENVIRONMENT,
        "ORCA_HOME": str(home),
        "ORCA_DB": database_url,
        "ORCA_CONFIG": str(home / "orca.toml"),
        "PULUMI_CONFIG_PASSPHRASE_FILE": str(home / "passphrase"),
    }
    if state == "file":
        values["PULUMI_BACKEND_URL"] = f"file://{home / 'state'}"
    return {**values, **more}


@pytest.fixture
def surroundings(home: Path, database_url: str) -> Iterator[Callable[..., Surroundings]]:
    """Opens the surroundings: `surroundings("postgres", ORCA_STRAY_MAX="2")`; fails the test when pulumi is missing."""
    need_pulumi()
    opened: list[Surroundings] = []

    def open_one(state: str = "file", **more: str) -> Surroundings:
        settings = read_settings(environment(home, database_url, state, **more))
        opened.append(open_surroundings(settings, say=lambda _: None))
        return opened[-1]

    yield open_one
    end_engines(database_url)
    for one in opened:
        one.close()


def need_pulumi() -> None:
    """Without pulumi the tests that need it fail, and say how to get it; skipped, nobody would notice."""
    try:
        require_tool("pulumi")
    except SetupError as error:
        pytest.fail(str(error), pytrace=False)


class RecordedLog:
    """A log that keeps what it was told."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def info(self, event: str, **particulars: object) -> None:
        self.lines.append((event, particulars))

    warning = info

    def events(self) -> list[str]:
        return [event for event, _ in self.lines]


class World:
    """The pool autoscaler with all that it acts on: a leading loop's passes, its cloud and its database."""

    def __init__(self, surroundings: Surroundings) -> None:
        self.surroundings = surroundings
        self.engine = Engine(surroundings.engine)
        self.cloud = LocalCloud(surroundings.cloud_folder)
        self.log = RecordedLog()
        self.leader = Leader(surroundings.url)
        self.stack = machine_stack(surroundings.settings.stack, "p")
        assert self.leader.acquire()
        self.passes = MachinePasses(surroundings, self.engine, self.leader.verify, self.log)
        self.configure()

    def configure(self, toml: str = TOML) -> None:
        """The orca.toml of the passes from now on; its cloud is there at once."""
        self.config = parse_config(toml, "orca.toml")
        configure_providers(self.config, self.surroundings)

    def run_pass(self) -> PassResult:
        return self.passes.run(self.config)

    def pass_until(self, predicate: Callable[[], object], seconds: float = 20) -> None:
        """Make passes, one after the other, until the predicate holds after one."""

        def after_a_pass() -> object:
            self.run_pass()
            return predicate()

        wait_until(after_a_pass, seconds, "passes did not come to it")

    def hold(self, verb: str) -> None:
        """Have the cloud's next answer to this verb come at `cloud.hurry()` and not before."""
        self.cloud.arm(verb, "", seconds=3600)

    def run_pass_until_slow(self, verb: str = "create") -> tuple[Background, ProcessId]:
        """Begin a pass whose next `verb` has no answer until `cloud.hurry()`; it is at it when this returns.

        Gives the engine's process, too.
        """
        self.hold(verb)
        background = Background(self.run_pass)
        return background, self.engine_at_fault()

    def engine_at_fault(self) -> ProcessId:
        """Wait until the armed fault is used up; gives the process of the newest operation."""
        wait_until(lambda: not (self.cloud.folder / "faults.json").exists(), 20, "the engine met no fault")
        newest = self.operations()[-1]
        return ProcessId(newest["pid"], newest["process_started"])

    def give_run(self, worker: str) -> int:
        """Queue a run and have it running on a worker, of which the worker's process knows nothing; gives its id."""
        move = "select orca.move_run(%(run)s, 0, 'queued', 'running', 'worker', %(worker)s, null)"
        self.queue(0)
        with self.surroundings.database.transaction() as transaction:  # one: or the worker itself would take it
            run = int(transaction.value("insert into orca.runs (pipeline) values ('work') returning id"))
            assert transaction.value(move, {"run": run, "worker": worker})
        return run

    def run_of(self, run: int) -> dict[str, Any]:
        return self.rows("select * from orca.runs where id = %(id)s", id=run)[0]

    def machine_with_worker(self) -> str:
        """Make one machine for a run, which is then canceled; gives its name once its worker has shown up."""
        self.queue()
        self.run_pass()
        self.execute("update orca.runs set state = 'canceled' where state in ('queued', 'running')")
        [name] = self.living()
        wait_until(
            lambda: self.rows("select from orca.workers where name = %(name)s", name=name), 15, "the worker's hello"
        )
        return name

    def rows(self, query: str, **parameters: object) -> list[dict[str, Any]]:
        """What a statement gives, committed."""
        with self.surroundings.database.transaction() as transaction:
            return transaction.dicts(query, parameters)

    def execute(self, statement: str, **parameters: object) -> None:
        with self.surroundings.database.transaction() as transaction:
            transaction.run(statement, parameters)

    def queue(self, runs: int = 1) -> None:
        """Queue runs of pipeline `work`, which is placed on pool p."""
        self.execute("insert into orca.pipelines (name, placement) values ('work', 'worker:p') on conflict do nothing")
        self.execute("insert into orca.runs (pipeline) select 'work' from generate_series(1, %(n)s::int)", n=runs)

    def machine(self, name: str) -> dict[str, Any]:
        """The row of a machine."""
        return self.rows("select * from orca.pool_machines where name = %(name)s", name=name)[0]

    def reasons(self) -> dict[str, str | None]:
        """Every machine that ever had a row, with the reason of its end."""
        rows = self.rows("select name, reason from orca.pool_machines order by pool, number")
        return {row["name"]: row["reason"] for row in rows}

    def living(self) -> list[str]:
        """The machines whose row has no end."""
        return [name for name, reason in self.reasons().items() if reason is None]

    def listed(self) -> list[str]:
        """The machines that exist."""
        return [machine.name for machine in self.cloud.list()]

    def operations(self) -> list[dict[str, Any]]:
        return self.rows("select * from orca.engine_operations order by id")

    def count(self, table: str) -> int:
        return int(self.rows(f"select count(*) as n from {table}")[0]["n"])

    def close(self) -> None:
        self.leader.release()


@pytest.fixture
def passes(surroundings: Callable[..., Surroundings]) -> Iterator[Callable[..., World]]:
    """Makes a world whose passes run on a real engine: `passes("postgres", ORCA_STRAY_MAX="2")`."""
    worlds: list[World] = []

    def make(state: str = "file", **more: str) -> World:
        worlds.append(World(surroundings(state, **more)))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


# Ends, by identity.


def end_machines(cloud: LocalCloud) -> None:
    """Delete every machine of a cloud, whatever faults are armed."""
    if cloud.folder.is_dir():
        (cloud.folder / "faults.json").unlink(missing_ok=True)
        for machine in cloud.list():
            cloud.delete(machine.name)


def end_engines(database_url: str) -> None:
    """End every engine that the ledger knows of."""
    session = Session(database_url)
    try:
        row = session.row(
            "select coalesce(json_agg(json_build_array(pid, process_started)), '[]') from orca.engine_operations "
            "where pid is not null and boot_id = %(boot)s",
            {"boot": boot_id()},
        )
    finally:
        session.close()
    for pid, started in row[0] if row else []:
        end_session(ProcessId(pid, started), 0.2)


def processes_of(folder: Path) -> list[ProcessId]:
    """Every living process that has to do with a folder: by its working folder, its arguments or its environment."""
    mark = str(folder).encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError, Transient):
            texts = (bytes((entry / "cwd").readlink()), *((entry / n).read_bytes() for n in ("cmdline", "environ")))
            if any(mark in text for text in texts):
                process = ProcessId.of(int(entry.name))
                if is_alive(process):
                    found.append(process)
    return found


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "gone"


def _kill(process: ProcessId) -> None:
    if is_alive(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
