"""`orca-infra runtimes list | show | usage | extend | stop`, as people and programs call them, on a real Postgres."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from uuid import UUID

import pytest

from orca_infra.db.connection import Database
from orca_infra.errors import UserError
from orca_infra.runtimes.model import Environment, Pool
from orca_infra.runtimes.observe import SQL
from orca_infra.runtimes.render import render_warm
from orca_infra.runtimes.rows import record_pods

Run = Callable[..., str]
FIRST, SECOND = UUID("6f1c0a52-3a0e-4c39-9d0f-0b4c1d2e3f40"), UUID("6f1c1111-3a0e-4c39-9d0f-0b4c1d2e3f40")
WORDS = "Unschedulable: 0/1 nodes are available: 1 Insufficient cpu."
# No API server answers there; whoever contacts it says so.
KUBECONFIG = {
    "apiVersion": "v1",
    "kind": "Config",
    "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
    "users": [{"name": "u", "user": {"token": "t"}}],
    "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
    "current-context": "x",
}


@pytest.fixture
def run(command: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """What `orca-infra runtimes ...` prints, on a terminal of 80 columns."""
    (tmp_path / "kubeconfig").write_text(json.dumps(KUBECONFIG))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setenv("ORCA_RUNTIMES_NAMESPACE", "n")
    monkeypatch.setenv("COLUMNS", "80")
    return partial(command, "runtimes")


@pytest.fixture
def runtimes(database: Database) -> None:
    """Jane has one that is ready and costs, and one whose Pod finds no node."""
    pool = Pool(
        namespace="n",
        name="python-simple-pool",
        uid="u",
        environment="python-simple-env",
        size=2,
        burning_rate=0.01,
        cull_seconds=3600,
    )
    environment = Environment(namespace="n", name="python-simple-env", image="i")
    with database.transaction() as transaction:
        for number, id_ in enumerate((FIRST, SECOND), 1):
            pod = render_warm(pool, environment, number, "astackoftests234")
            record_pods(transaction, [pod], taken=True)
            transaction.value(SQL["record_runtime"], {"user": "jane", "key": None, "name": pod.name, "namespace": "n"})
            transaction.run(
                "update orca.runtimes set id = %(id)s, assigned_at = now() - interval '100 s' where pod = %(pod)s",
                {"id": id_, "pod": pod.name},
            )
        transaction.run("update orca.runtime_pods set ready_at = now() - interval '100 s' where name like '%%-1'")
        transaction.run("update orca.runtime_pods set problem = %(w)s where name like '%%-2'", {"w": WORDS})


def test_the_status_says_what_there_is_of_each_pool(command: Run, runtimes: None, database: Database) -> None:
    with database.transaction() as transaction:
        transaction.run("update orca.runtime_pods set taken_at = null where name like '%%-1'")
        transaction.run(
            "insert into orca.runtime_pods (name, namespace, environment, taken_at) values ('cold', 'n', 'e', now())"
        )
    lines = command("status").splitlines()
    assert f"runtimes of pool python-simple-pool: 1 warm, 1 assigned, 0 starting: {WORDS}" in lines
    assert "runtimes of no pool: 0 warm, 1 assigned, 0 starting" in lines
    [pool, cold] = json.loads(command("status", "--json"))["runtimes"]
    assert (pool["pool"], pool["warm"], pool["assigned"], pool["problem"]) == ("python-simple-pool", 1, 1, WORDS)
    assert (cold["pool"], cold["assigned"]) == (None, 1)


def test_what_people_read_fits_a_terminal_and_can_be_copied(run: Run, runtimes: None, database: Database) -> None:
    listed = run("list")
    table = listed[: listed.index("6f1c1111 starting: ")].splitlines()
    assert all(len(line) <= 80 for line in table)
    assert [line.split()[:4] for line in table[1:]] == [
        ["6f1c0a52", "jane", "python-simple-env", "ready"],
        ["6f1c1111", "jane", "python-simple-env", "starting"],
    ]
    assert WORDS in " ".join(listed.split())
    with database.transaction() as transaction:
        transaction.run("update orca.runtimes set user_name = 'jane-' || repeat('x', 60) || '@example.com'")
    listed = run("list")
    assert all(len(line) <= 80 for line in listed[: listed.index("6f1c1111 starting: ")].splitlines())
    assert re.search(r"6f1c0a52 .* ready +\d{4}-\d\d-\d\d \d\d:\d\d +1\.", listed)
    with database.transaction() as transaction:
        transaction.run("update orca.runtimes set user_name = 'jane'")
    usage = run("usage", "--user", "jane").splitlines()
    assert all(len(line) <= 80 for line in usage)
    assert usage[-1].startswith("1.0")
    assert usage[-1].endswith("credits, 2 running")


def test_what_is_no_terminal_and_programs_get_everything(
    run: Run, runtimes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    for text in (run("list"), run("usage", "--user", "jane")):
        assert str(FIRST) in text
        assert "python-simple-pool" in text
    shown = json.loads(run("list", "--json"))
    assert [(one["id"], one["state"], one["message"]) for one in shown] == [
        (str(FIRST), "ready", ""),
        (str(SECOND), "starting", WORDS),
    ]
    assert json.loads(run("show", str(FIRST), "--json"))["state"] == "ready"


def test_the_beginning_of_an_id_is_enough_while_it_is_one_runtimes(
    run: Run, runtimes: None, database: Database
) -> None:
    assert run("show", "6F1C0").startswith(
        f"{FIRST}\n  user         jane\n  environment  python-simple-env, from pool "
    )
    with pytest.raises(UserError, match="more than one runtime's id begins with 6f1c; write more"):
        run("show", "6f1c")
    assert f"{FIRST} lives until " in run("extend", "6f1c0", "--for", "2h")
    with pytest.raises(UserError, match="extended by more than 0"):
        run("extend", "6f1c0", "--for", "0")
    assert f"stopped {FIRST}\n" in run("stop", "6f1c0")
    assert "state        ending: Stopped" in run("show", str(FIRST))
    with database.transaction() as transaction:
        transaction.run(
            "update orca.runtimes set ended_at = now(), reason = 'Stopped', credits = 1 where id = %(i)s", {"i": FIRST}
        )
    for gone in ("6f1c0", str(FIRST)):
        with pytest.raises(UserError, match=f"no runtime {gone} lives; `orca-infra runtimes list`"):
            run("stop", gone)
    assert "ended: Stopped" in run("show", "6f1c0")
    for bad, said in (("", "is not a runtime's id"), ("%%%%", "is not a runtime's id"), ("12345", "begins with 12345")):
        with pytest.raises(UserError, match=said):
            run("show", bad)
