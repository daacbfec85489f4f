"""The loop as a service: taking over, reading its file anew, and a newer version in place of an older one."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orca_infra.loop.passes import MachinePasses
from orca_infra.machines.observe import machine_stack
from orca_infra.machines.program import machine_program
from orca_infra.machines.providers.local import LocalProvider

pytestmark = pytest.mark.engine

Passes = Callable[..., Any]
WaitUntil = Callable[..., None]
StartLoop = Callable[..., subprocess.Popen[str]]


def test_a_follower_leads_once_the_leader_is_dead_and_not_before(
    passes: Passes, start_loop: StartLoop, wait_until: WaitUntil, home: Path
) -> None:
    w = passes()
    w.leader.release()
    [before] = w.rows("select epoch from orca.lead")

    def epoch() -> int:
        return int(w.rows("select epoch from orca.lead")[0]["epoch"]) - int(before["epoch"])

    first = start_loop()
    wait_until(lambda: epoch() == 1, 20, "the first loop to lead")
    second = start_loop()
    wait_until(lambda: '"following"' in (home / "loop-2.log").read_text(), 20, "the second loop to follow")
    wait_until(lambda: w.rows("select from orca.pool_status"), 20)
    assert epoch() == 1
    first.kill()
    wait_until(lambda: epoch() == 2, 20, "the second loop to lead")
    w.queue()
    wait_until(lambda: w.listed() == ["orca-p-1"], 20)
    second.send_signal(signal.SIGTERM)
    assert second.wait() == 0


def test_a_changed_orca_toml_is_read_anew_and_of_a_bad_one_status_says_so_until_it_is_mended(
    passes: Passes, start_loop: StartLoop, wait_until: WaitUntil, home: Path
) -> None:
    w = passes()
    outdated = "'labels of machines', 'pass runs'"  # of a loop with ORCA_DRIFT=report and with run clusters
    w.execute(f"insert into orca.attention (topic, message) select unnest(array[{outdated}]), 'look'")
    w.leader.release()
    good = (home / "orca.toml").read_text()
    loop = start_loop()
    wait_until(lambda: w.rows("select from orca.pool_status where pool = 'p'"), 20, "the first pass")
    assert w.rows("select from orca.attention") == []

    def said() -> str:
        rows = w.rows("select message from orca.attention where topic = 'orca.toml'")
        return rows[0]["message"] if rows else ""

    for bad, words in [
        (good.replace("idle_seconds", "idle_sec"), r"idle_sec.*did you mean `?idle_seconds"),
        (good.replace("[pools.p]", "[pool.p]"), r"pool.*did you mean `?pools"),
        (good[: len(good) // 2], r"orca\.toml:\d+: is not TOML"),
    ]:
        (home / "orca.toml").write_text(bad)
        wait_until(lambda words=words: re.search(words, said()), 10, words)
        assert "the last good one stays in force" in said()
    w.queue()
    wait_until(lambda: w.listed() == ["orca-p-1"], 20, "a machine of the last good configuration")
    (home / "orca.toml").write_text(good.replace("[pools.p]", "[pools.q]"))
    wait_until(lambda: said() == "" and w.rows("select from orca.pool_status where pool = 'q'"), 10)
    loop.send_signal(signal.SIGTERM)
    assert loop.wait() == 0


def test_a_new_version_takes_over_a_running_family_and_makes_no_diff_to_anything(
    passes: Passes, monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> None:
    """What is new renders machines otherwise, has other settings and another orca.toml."""
    old = passes()
    old.queue()
    old.pass_until(lambda: old.count("orca.workers") >= 1)
    before = old.rows("select name, uid, rendered, token_hash from orca.pool_machines order by name")
    operations = old.operations()
    old.leader.release()

    render = LocalProvider.render
    monkeypatch.setattr(
        LocalProvider, "render", lambda self, birth: {**render(self, birth), "argv": ["/bin/sleep", "1234"]}
    )
    new = passes(
        ORCA_TOKEN_KEY="another key of the tests, 32 bytes", ORCA_HEARTBEAT_SECONDS="2", ORCA_ENGINE_SECONDS="30"
    )
    new.configure(
        '[pools.p]\nprovider = "local"\nimage = "registry.example/orca-worker:2"\nmax_machines = 3\nidle_seconds = "2h"\n'
        'types = [{ type = "large", locations = ["b"] }]\n'
    )
    for _ in range(3):
        new.run_pass()
    assert new.rows("select name, uid, rendered, token_hash from orca.pool_machines order by name") == before
    assert new.operations() == operations
    rows = {row["name"]: (row["rendered"], "") for row in before}
    stack = machine_stack("test", "p")
    changes = new.engine.preview(stack, machine_program("orca:index:Machine", rows), deadline_seconds=300)
    assert {change.op for change in changes if change.type == "orca:index:Machine"} == {"same"}


FIVE_POOLS = "".join(
    f'[pools.p{number}]\nprovider = "local"\nimage = "registry.example/orca-worker:1"\nmax_machines = 3\n'
    'idle_seconds = "1h"\ntypes = [{ type = "small", locations = ["a"] }]\n'
    for number in range(5)
)


def test_pools_are_worked_on_side_by_side_up_to_the_limit_and_nothing_mixes(passes: Passes) -> None:
    w = passes(ORCA_ENGINE_PARALLEL="2")
    w.passes = MachinePasses(w.surroundings, w.engine, w.leader.verify, w.log, parallel=2)
    w.configure(FIVE_POOLS)
    for number in range(5):
        w.execute("insert into orca.pipelines (name, placement) values (%(n)s, 'worker:' || %(n)s)", n=f"p{number}")
        w.execute("insert into orca.runs (pipeline) values (%(n)s)", n=f"p{number}")
    w.run_pass()
    names = [f"orca-p{number}-1" for number in range(5)]
    assert w.listed() == names
    owned = w.rows("select stack, name from orca.owned order by name")
    assert [(row["stack"], row["name"]) for row in owned] == [(f"test.machines.p{n}", f"orca-p{n}-1") for n in range(5)]
    spans = [(one["started_at"], one["ended_at"]) for one in w.operations()]
    assert {one["outcome"] for one in w.operations()} == {"Done"}
    at_once = [sum(begun <= instant < ended for begun, ended in spans) for instant, _ in spans]
    assert max(at_once) == 2
