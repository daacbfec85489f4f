"""The engine's state goes away: the folder that it is in, or the database; before a loop starts, and in mid-up.

To the engine an empty folder is one in which nothing was ever made: what it held would be made twice, or be nobody's.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from orca_infra.db.connection import backend_url
from orca_infra.errors import SetupError
from orca_infra.stack.engine import PROJECT, Engine
from orca_infra.stack.presence import claim_state, missing_state, place_of
from orca_infra.stack.program import Registrar
from orca_infra.testing.postgres_proxy import PostgresProxy

pytestmark = pytest.mark.engine

Passes = Callable[..., Any]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def unmount(home: Path) -> Callable[[], None]:
    """An empty folder stands where the state's folder was, and then that again: a disk that is not mounted."""

    def switch() -> None:
        state, away = home / "state", home / "state.away"
        if away.exists():
            shutil.rmtree(state)
            away.rename(state)
        else:
            state.rename(away)
            state.mkdir()

    return switch


def claim(w: Any) -> None:
    """As a loop does when it starts."""
    surroundings = w.surroundings
    claim_state(w.engine, surroundings.database, surroundings.engine.backend_url, surroundings.settings.stack)


def test_any_number_of_loops_start_at_once_on_a_new_state(surroundings: Callable[..., Any]) -> None:
    """A Deployment's replicas do, and a first `orca-infra env` beside them; also after one was killed in making it."""
    begin_anew = "drop table pulumi_state; delete from orca.state_identity"
    leave_lock = f"""
        update pulumi_state set key = left(key, strpos(key, '/')) || '.pulumi/locks/organization/{PROJECT}/test/one.json',
            data = json_build_object('data', encode(convert_to('{dead_holder()}', 'utf8'), 'base64'))
        where key like '%/stacks/%/test.json';
        delete from orca.state_identity
    """
    for left_behind in (begin_anew, leave_lock, ""):
        claims = [surroundings("postgres") for _ in range(4)]
        with ThreadPoolExecutor(len(claims)) as threads:
            begun = [threads.submit(claim_one, one) for one in claims]
            assert [future.result(timeout=120) for future in begun] == [None] * len(claims)
        with claims[0].database.transaction() as transaction:
            assert transaction.dicts("select key from pulumi_state where key like '%%/locks/%%'") == []
            transaction.script(left_behind)


def test_a_lock_that_an_engine_left_when_it_was_killed_in_making_the_state_is_broken(
    surroundings: Callable[..., Any], home: Path
) -> None:
    """It says whose it was, or was not written to its end."""
    locks = home / "state" / ".pulumi" / "locks" / "organization" / PROJECT / "test"
    locks.mkdir(parents=True)
    (locks / "one.json").write_text(dead_holder())
    (locks / "two.json.18ecd078dfb5ba99.tmp").write_text("")
    claim_one(surroundings())
    assert [*locks.iterdir()] == []


def dead_holder() -> str:
    """What a lock says whose engine is gone."""
    process = subprocess.Popen(["true"])
    process.wait()
    return json.dumps({"pid": process.pid, "username": "root", "hostname": socket.gethostname()})


def claim_one(one: Any) -> None:
    claim_state(Engine(one.engine), one.database, one.engine.backend_url, one.settings.stack)


def attention(w: Any) -> str:
    return "\n".join(row["message"] for row in w.rows("select message from orca.attention"))


def owned(w: Any) -> dict[str, str]:
    rows = w.rows("select name, uid from orca.owned where type like 'orca:%%'")
    return {row["name"]: row["uid"] for row in rows}


def comes_to_own_all_that_there_is(w: Any) -> None:
    """What was made in a state that was away went, or is owned; whether its run was done there or is done again."""
    w.pass_until(lambda: not w.passes.recorded.unsettled() and owned(w).keys() == set(w.listed()), 60)
    w.execute("update orca.runs set state = 'canceled' where state in ('queued', 'running')")
    for name in w.listed():
        w.give_run(name)
    before = set(w.listed())
    w.queue()
    w.pass_until(lambda: owned(w).keys() == set(w.listed()) > before, 60)
    assert {machine.name: machine.uid for machine in w.cloud.list()} == owned(w)


def stacks_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob(".pulumi/stacks/**/*.json"))


def test_a_state_that_is_not_mounted_is_taken_for_no_empty_one(
    passes: Passes, home: Path, unmount: Callable[[], None]
) -> None:
    """Nothing is made there, nothing removed, and status says why; when it is back all goes on."""
    w = passes(ORCA_POOL_LOST_SECONDS="3600")
    claim(w)
    name = w.machine_with_worker()
    uid = w.machine(name)["uid"]
    unmount()
    w.cloud.stop(name)
    w.queue()
    for _ in range(3):
        w.run_pass()
    assert w.listed() == [name], "nothing was made or removed"
    assert w.cloud.get(name).uid == uid
    assert w.reasons()[name] is None
    assert stacks_in(home / "state") == [], "nothing was begun anew"
    assert "does not hold stack 'test'" in attention(w)
    assert "mount the folder" in attention(w)

    unmount()
    w.pass_until(lambda: w.reasons()[name] == "Stopped" and w.listed() not in ([name], []), 60)
    assert attention(w) == ""
    assert owned(w).keys() == set(w.listed())


def test_a_state_that_goes_in_mid_up_leaves_one_machine_that_is_owned(
    passes: Passes, unmount: Callable[[], None]
) -> None:
    """The engine ends well, in a folder that is nobody's: what it made is not taken for owned."""
    w = passes()
    claim(w)
    w.queue()
    background, _ = w.run_pass_until_slow()
    unmount()
    w.cloud.hurry()
    background.join()
    assert background.error is None
    assert w.operations()[-1]["outcome"] == "OutcomeUnknown"
    assert len(w.listed()) == 1
    w.run_pass()
    assert len(w.listed()) == 1, "nothing more is made as long as nobody knows"

    unmount()
    comes_to_own_all_that_there_is(w)


def test_a_database_of_the_state_that_goes_in_mid_up_leaves_one_machine_that_is_owned(
    passes: Passes, database_url: str
) -> None:
    with PostgresProxy(database_url) as proxy:
        w = passes("elsewhere", PULUMI_BACKEND_URL=backend_url(proxy.url), ORCA_ENGINE_SECONDS="60")
        claim(w)
        w.queue()
        background, _ = w.run_pass_until_slow()
        proxy.away = True
        w.cloud.hurry()
        background.join()
        assert w.operations()[-1]["outcome"] == "OutcomeUnknown"
        with_state_away = len(w.listed())
        assert with_state_away <= 1
        with pytest.raises(Exception, match="the database is away"):
            w.run_pass()
        assert len(w.listed()) == with_state_away

        proxy.heal()
        comes_to_own_all_that_there_is(w)


def test_another_database_is_taken_for_no_empty_state(
    passes: Passes, database_url: str, empty_database_url: str
) -> None:
    w = passes("postgres")
    claim(w)
    database = w.surroundings.database
    assert missing_state(database, w.surroundings.engine.backend_url) == ""
    said = missing_state(database, backend_url(empty_database_url))
    assert said is not None
    assert "does not hold stack 'test'" in said


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["run", "--once"], 2),
        (["env"], 2),
        (["drain", "--all", "--yes"], 2),
        (["preview", "--project", str(ROOT)], 1),  # 2 says that there are changes
        (["doctor"], 1),
    ],
)
def test_commands_refuse_a_state_that_is_not_there(
    passes: Passes, home: Path, unmount: Callable[[], None], command: list[str], code: int, product: Any
) -> None:
    w = passes()
    claim(w)
    w.close()
    unmount()
    ended = product(*command)
    assert ended.returncode == code, ended.stderr
    assert "does not hold stack 'test'" in ended.stderr + ended.stdout
    assert "Traceback" not in ended.stderr
    assert stacks_in(home / "state") == []


def test_a_state_that_is_lost_for_good_is_begun_anew_and_its_machines_are_kept_and_end_by_their_rows(
    passes: Passes, unmount: Callable[[], None]
) -> None:
    w = passes()
    claim(w)
    name = w.machine_with_worker()
    unmount()
    with pytest.raises(SetupError, match="delete from orca.state_identity"):
        claim(w)
    w.execute("delete from orca.state_identity")
    claim(w)
    w.run_pass()
    assert w.listed() == [name]
    w.cloud.stop(name)
    w.pass_until(lambda: w.reasons()[name] == "Stopped", 60)
    assert w.listed() == []
    assert owned(w) == {}


class Stating:
    """The engine's monitor, told by a program which version of a provider its resources need."""

    def __init__(self, monitor: Any, version: str) -> None:
        self._monitor, self._version = monitor, version

    @property
    def RegisterResource(self) -> Any:  # noqa: N802  (the protocol's name)
        return self

    def future(self, request: Any) -> Any:
        request.version = self._version
        return self._monitor.RegisterResource.future(request)


@pytest.mark.parametrize("state", ["file", "postgres"])
def test_a_providers_version_that_changes_leaves_the_state_readable_and_every_machine_removable(
    passes: Passes, monkeypatch: pytest.MonkeyPatch, wait_until: Any, state: str
) -> None:
    """From one `up` to the next, as an upgrade brings it, with machines of earlier versions in the same stack."""
    w = passes(state)
    plain = Registrar.register
    for number, version in enumerate(["1.0.0", "2.0.0", ""], 1):

        def register(self: Registrar, *args: Any, _version: str = version, **more: Any) -> Any:
            stating = Registrar(cast("Any", Stating(self._monitor, _version)), self._stack_urn)
            return plain(stating, *args, **more)

        monkeypatch.setattr(Registrar, "register", register)
        before = set(w.listed())
        w.queue()
        w.pass_until(lambda: len(w.listed()) == number, 60)  # noqa: B023  (called before the next)
        [new] = set(w.listed()) - before
        wait_until(lambda: w.rows("select from orca.workers where name = %(name)s", name=new), 60)  # noqa: B023
        w.execute("update orca.runs set state = 'canceled' where state = 'queued' or worker = %(name)s", name=new)
        w.give_run(new)  # so that the next run needs another machine
        assert w.engine.check(w.stack)
        assert {one.name for one in w.engine.state(w.stack).resources} == set(w.listed())
    exported = json.dumps(w.engine._export(w.stack))
    assert "default_1_0_0" in exported, "or no version was ever stated"
    assert "default_2_0_0" in exported
    w.passes.recorded.refresh(w.stack)
    w.execute("update orca.runs set state = 'canceled' where state in ('queued', 'running')")
    for name in w.listed():
        w.cloud.stop(name)
    w.pass_until(lambda: w.listed() == [], 60)
    assert w.engine.check(w.stack)
    assert w.engine.state(w.stack).resources == ()
    assert {row["outcome"] for row in w.operations()} == {"Done"}


def test_a_place_is_shown_without_its_password() -> None:
    assert place_of("postgres://orca:s3cr3t@db.example:5432/orca?sslmode=require") == "postgres://db.example:5432/orca"
    assert place_of("postgres://orca:s3cr3t@/orca?host=%2Ftmp") == "postgres:///orca"
    assert place_of("file:///var/lib/orca/state") == "file:///var/lib/orca/state"
    assert place_of("gs://bucket/folder") == "gs://bucket/folder"
