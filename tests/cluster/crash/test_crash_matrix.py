"""Killed at each step of each scope, the next loop converges: docs/explanation/crash-matrix.md is what these tests found.

Each row is a loop that makes one pass and kills itself with SIGKILL at a step of it (die_at.py), on the real engine, a real
Postgres and a real API server, with the engine's state in Postgres; then another loop makes three passes. `ORCA_CRASH_MATRIX=write`
writes the page anew.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from orca_infra.cli.runtimes import launch_hands
from orca_infra.kube.kinds import JOB, POD, SECRET, SERVICE, Object, Ref
from orca_infra.kube.labels import ROLE_LABEL, RUN_LABEL
from orca_infra.loop.run import Loop
from orca_infra.machines.providers.local_cloud import MachineRequest
from orca_infra.runtimes.launch import LaunchRequest, launch

if TYPE_CHECKING:
    from tests.cluster.crash.conftest import World

pytestmark = pytest.mark.engine

PAGE = Path(__file__).parents[3] / "docs" / "explanation" / "crash-matrix.md"
PASSES_MOST = 3
SAID = "a fake container has nothing to say"


@dataclass(frozen=True)
class Row:
    """One row of the matrix.

    Attributes:
        step: where the loop is killed.
        left: what there is at that moment.
        then: what there is once the next loop has made its passes.
        begin: what is there before, and what the pass is to do.

    """

    scope: str
    step: str
    left: str
    then: str
    begin: str


MADE = "one machine, confirmed"
ANEW = "that row ended Interrupted, its token revoked; one machine of the next number"
DONE = "that row ended Interrupted, its token revoked; no machine, as its worker had done the run meanwhile"
GONE = "no machine, its token revoked"
RUNS = "every object once, confirmed"
SWEPT = "no object; the start's row ended"
WARM = "two warm Pods, confirmed"
ONE = "one warm Pod"
UNTOLD = "rows, not confirmed; objects / rows, not confirmed; no object"
AGAIN = "asked again with its key, the same Pod taken once, with its Secret; one warm Pod"
ABANDONED = "its Pod ended Abandoned, its Secret gone; one warm Pod"
MATRIX = (
    Row("machines", "before the row", "nothing", MADE, "make"),
    Row("machines", "between token and machine", "a row, not confirmed; no machine", ANEW, "make"),
    Row(
        "machines",
        "before it is written down which process the engine is",
        "a row, not confirmed; no machine",
        f"{MADE} / {ANEW} / {DONE}",
        "make",
    ),
    Row("machines", "in the up", "a row, not confirmed; no machine", f"{MADE} / {ANEW} / {DONE}", "make"),
    Row("machines", "before the up's end is written", "a row, not confirmed; its machine", MADE, "make"),
    Row("machines", "before the confirmation", "a row, not confirmed; its machine", MADE, "make"),
    Row("machines", "between the token's revocation and the deletion", "a revoked token; its machine", GONE, "remove"),
    Row("machines", "in the deletion", "a revoked token; its machine", GONE, "remove"),
    Row("machines", "before the deletion's end is written", "a revoked token; no machine", GONE, "remove"),
    Row("machines", "before the row's end", "a revoked token; no machine", GONE, "remove"),
    Row("machines", "before a stray's delete", "a stray", "no machine", "stray"),
    Row("machines", "after a stray's delete", "nothing", "no machine", "stray"),
    Row("runs", "before the row", "nothing", RUNS, "make"),
    Row("runs", "after the row", "rows, not confirmed; no object", RUNS, "make"),
    Row("runs", "before it is written down which process the engine is", UNTOLD, RUNS, "make"),
    Row("runs", "in the up", "rows, not confirmed; objects", RUNS, "make"),
    Row("runs", "before the up's end is written", "rows, not confirmed; objects", RUNS, "make"),
    Row("runs", "before the confirmation", "rows, not confirmed; objects", RUNS, "make"),
    Row("runs", "in a log", "the reason of its end; objects", SWEPT, "remove"),
    Row("runs", "in the middle of what is appended to a log", "the reason of its end; objects", SWEPT, "remove"),
    Row("runs", "after a log was appended", "the reason of its end; objects", SWEPT, "remove"),
    Row("runs", "before the sweep", "the reason of its end; objects", SWEPT, "remove"),
    Row("runs", "in the sweep", "the reason of its end; objects / the reason of its end; no object", SWEPT, "remove"),
    Row("runs", "before the run's end is written", "the reason of its end; no object", SWEPT, "finish"),
    Row("runs", "after a cohort's drop", "the reason of its end; no object", SWEPT, "finish"),
    Row("runs", "in a stray's delete", "nothing", "no stray", "stray"),
    Row("runtimes", "before the row", "nothing", WARM, "make"),
    Row("runtimes", "after the row", "rows, not confirmed; no object", WARM, "make"),
    Row("runtimes", "before it is written down which process the engine is", UNTOLD, WARM, "make"),
    Row("runtimes", "in the up", "rows, not confirmed; objects", WARM, "make"),
    Row("runtimes", "before the up's end is written", "rows, not confirmed; objects", WARM, "make"),
    Row("runtimes", "before the confirmation", "rows, not confirmed; objects", WARM, "make"),
    Row("runtimes", "before the sweep", "the reason of its end; objects", ONE, "remove"),
    Row("runtimes", "in the sweep", "the reason of its end; no object", ONE, "remove"),
    Row("runtimes", "before the row's end", "the reason of its end; no object", ONE, "finish"),
    Row("runtimes", "in a stray's delete", "nothing", "no stray", "stray"),
    Row("launches", "before the claim", "no claim", AGAIN, "retry"),
    Row("launches", "between claim and Secret", "a claim; no Secret", AGAIN, "retry"),
    Row("launches", "after the Secret", "a claim; its Secret", AGAIN, "retry"),
    Row("launches", "between claim and Secret, and nobody asks again", "a claim; no Secret", ABANDONED, "leave"),
    Row("launches", "after the Secret, and nobody asks again", "a claim; its Secret", ABANDONED, "leave"),
)


# What there is before, and what the pass that is killed has to do.


def begin_machines(w: World, row: Row, loop: Loop) -> None:
    w.pass_with(loop)  # the cloud is there from the first pass on
    if row.begin == "stray":
        labels = {"orca-stack": w.surroundings.stack_id, "orca-pool": "p"}
        w.cloud.create(
            MachineRequest(name="orca-p-7", location="a", type="small", labels=labels, argv=("/bin/sleep", "600"))
        )
        time.sleep(0.1)  # past its grace
        return
    w.queue("work", "worker:p")
    if row.begin == "make":
        if row.step == "in the up":
            w.cloud.arm("create", "", seconds=3600)
        return
    w.settle(loop, w.cloud.list)
    w.wait_until(lambda: w.rows("select from orca.runs where state = 'succeeded'"), 30, "the run's end")
    w.execute("update orca.pool_machines set drain_at = now(), drain_now = true")
    if row.step == "in the deletion":
        w.cloud.arm("delete", "", seconds=3600)


def left_of_machines(w: World, _row: Row) -> str:
    rows = w.rows("select * from orca.pool_machines where ended_at is null")
    listed = w.cloud.list()
    if not rows:
        return "a stray" if listed else "nothing"
    machine = "its machine" if listed else "no machine"
    return f"a revoked token; {machine}" if rows[0]["revoked_at"] else f"a row, not confirmed; {machine}"


def then_of_machines(w: World, row: Row) -> str:
    rows = w.rows("select * from orca.pool_machines order by number")
    lives = [one["name"] for one in rows if one["ended_at"] is None]
    assert [machine.name for machine in w.cloud.list()] == lives, "machines without a row, or rows without a machine"
    assert all(one["revoked_at"] for one in rows if one["ended_at"]), "a token that nobody needs any more is good still"
    assert len(lives) <= 1, "a machine that nobody needs"
    if row.begin == "stray":
        assert not lives
        return "no machine"
    if row.begin == "remove":
        assert [(one["reason"]) for one in rows] == ["Drained"]
        return GONE
    found = {(None,): MADE, ("Interrupted", None): ANEW, ("Interrupted",): DONE}[tuple(one["reason"] for one in rows)]
    assert found != DONE or w.rows("select from orca.runs where state = 'succeeded'")
    return found


def begin_runs(w: World, row: Row, loop: Loop) -> None:
    w.queue("target", None, workers=1) if row.begin != "stray" else w.stray(w.runs, "driver")
    if row.begin in {"make", "stray"}:
        time.sleep(1.1 if row.begin == "stray" else 0)  # past its grace; creation times are whole seconds
        return
    [run] = w.rows("select id from orca.runs where pipeline = 'target'")
    w.settle(loop, lambda: len(w.seen(POD, w.runs, **{RUN_LABEL: str(run["id"])})) == 3)
    with w.database.transaction() as transaction:
        transaction.run("select set_config('orca.writer', 'driver', true)")
        transaction.run(
            "update orca.runs set state = 'succeeded', ended_at = now() where id = %(id)s", {"id": run["id"]}
        )
    if row.begin == "finish":
        w.settle(loop, lambda: is_swept(w))
        assert w.rows("select from orca.run_clusters where run = %(id)s and ended_at is null", id=run["id"])


def is_swept(w: World) -> bool:
    """Whether the objects go without another pass; they do not while the driver's log is kept."""
    if any(item["kind"] == "Job" for item in objects_of_target(w)):
        return False
    w.wait_until(lambda: not objects_of_target(w), 20, "what the Job owned goes with it")
    return True


def objects_of_target(w: World) -> list[Object]:
    [run] = w.rows("select id from orca.runs where pipeline = 'target'")
    labels = {RUN_LABEL: str(run["id"])}
    found = [item for kind in (JOB, POD, SERVICE) for item in w.seen(kind, w.runs, **labels)]
    return [item for item in found if is_staying(item)]


def is_staying(item: Object) -> bool:
    """Whether it was not told to go; its node takes a moment to let go of it."""
    return "deletionTimestamp" not in item["metadata"]


def left_of_runs(w: World, row: Row) -> str:
    if row.begin == "stray":
        drivers = [item for item in w.seen(POD, w.runs, **{ROLE_LABEL: "driver"}) if is_staying(item)]
        return "a stray" if drivers[1:] else "nothing"
    objects = "objects" if objects_of_target(w) else "no object"
    rows = w.rows(
        "select ending_reason from orca.run_clusters c join orca.runs r on r.id = c.run where r.pipeline = 'target'"
    )
    if not rows:
        return "nothing"
    return f"the reason of its end; {objects}" if rows[0]["ending_reason"] else f"rows, not confirmed; {objects}"


def then_of_runs(w: World, row: Row) -> str:
    if row.begin == "stray":
        assert w.kube.get(Ref(kind=POD, namespace=w.runs, name="stray")) is None
        return "no stray"
    [cluster] = w.rows(
        "select c.* from orca.run_clusters c join orca.runs r on r.id = c.run where r.pipeline = 'target'"
    )
    if row.begin == "make":
        kinds = sorted(
            item["metadata"]["name"].removeprefix(f"orca-{cluster['run']}-1") for item in objects_of_target(w)
        )
        assert len(kinds) == 5, kinds  # Job, its Pod, the head and its Service, a worker
        assert not w.rows("select from orca.kube_objects where uid is null")
        return RUNS
    assert objects_of_target(w) == []
    assert cluster["reason"] == "Ended"
    log = (w.surroundings.logs_folder / str(cluster["run"]) / "driver.log").read_text()
    assert (log.count("--- run"), log.count(SAID)) == (1, 1), log
    assert len(w.rows("select from orca.cohorts where scope = 'runs'")) == 1, "the cohort that nobody needs"
    return SWEPT


def begin_runtimes(w: World, row: Row, loop: Loop) -> None:
    if row.begin == "stray":
        w.stray(w.pods, "runtime")
        time.sleep(1.1)
        return
    warm = "select name from orca.runtime_pods where ready_at is not null and ended_at is null"
    w.environment_of_runtimes()
    w.pool(1 if row.begin == "make" else 2)
    w.settle(loop, lambda: len(w.rows(warm)) == (1 if row.begin == "make" else 2))
    w.pool(2 if row.begin == "make" else 1)
    if row.begin == "finish":
        w.settle(
            loop, lambda: w.rows("select from orca.runtime_pods where ending_reason is not null and ended_at is null")
        )


def left_of_runtimes(w: World, row: Row) -> str:
    live = [item for item in w.seen(POD, w.pods) if is_staying(item)]
    if row.begin == "stray":
        return "a stray" if live else "nothing"
    rows = w.rows("select * from orca.runtime_pods where ended_at is null")
    objects = "objects" if len(live) > 1 else "no object"
    if any(one["ending_reason"] for one in rows):
        return f"the reason of its end; {objects}"
    return f"rows, not confirmed; {objects}" if len(rows) > 1 else "nothing"


def then_of_runtimes(w: World, row: Row) -> str:
    live = {item["metadata"]["name"] for item in w.seen(POD, w.pods)}
    if row.begin == "stray":
        assert live == set()
        return "no stray"
    rows = w.rows("select name from orca.runtime_pods where ended_at is null and ready_at is not null")
    assert live == {one["name"] for one in rows}
    assert len(live) == (2 if row.begin == "make" else 1)
    assert not w.rows("select from orca.kube_objects where uid is null")
    return WARM if row.begin == "make" else ONE


def begin_launches(w: World, _row: Row, loop: Loop) -> None:
    w.environment_of_runtimes()
    w.pool(1)
    w.settle(loop, lambda: w.rows("select from orca.runtime_pods where ready_at is not null and ended_at is null"))


def left_of_launches(w: World, row: Row) -> str:
    """What the launch left; then, in most rows, whoever asked for it asks again with the same key."""
    claims = w.rows("select id, pod from orca.runtimes where ended_at is null")
    secrets = [item["metadata"]["name"] for item in w.seen(SECRET, w.pods)]
    assert secrets in ([], [claim["pod"] for claim in claims])
    if row.begin == "retry":
        request = LaunchRequest(environment="e", user="jane", secrets={"GREETING": "hello"}, idempotency_key="once")
        hands = launch_hands(w.surroundings)
        again = launch(hands, request)
        hands.kube.close()
        assert again.warm
        assert not claims or (again.id, again.pod) == (claims[0]["id"], claims[0]["pod"])
    else:
        time.sleep(1.1)  # past the time that a launch may take
    return f"a claim; {'its Secret' if secrets else 'no Secret'}" if claims else "no claim"


def then_of_launches(w: World, row: Row) -> str:
    pods = w.rows("select name, reason, taken_at is not null as taken, ended_at from orca.runtime_pods order by name")
    taken = [one for one in pods if one["taken"]]
    warm = [one for one in pods if not one["taken"] and one["ended_at"] is None]
    assert (len(taken), len(warm)) == (1, 1), pods
    live = {one["name"] for one in pods if one["ended_at"] is None}
    assert {item["metadata"]["name"] for item in w.seen(POD, w.pods)} == live
    w.wait_until(lambda: {item["metadata"]["name"] for item in w.seen(SECRET, w.pods)} <= live, 20)
    if row.begin == "retry":
        [runtime] = w.rows("select pod, secret_made_at, ended_at from orca.runtimes")
        assert (runtime["pod"], runtime["ended_at"], taken[0]["ended_at"]) == (taken[0]["name"], None, None)
        assert runtime["secret_made_at"] is not None
        [secret] = w.seen(SECRET, w.pods)
        assert (secret["metadata"]["name"], list(secret["data"])) == (runtime["pod"], ["GREETING"])
        return AGAIN
    assert taken[0]["reason"] == "Abandoned"
    assert w.seen(SECRET, w.pods) == []
    return ABANDONED


SCOPES: dict[
    str, tuple[Callable[[World, Row, Loop], None], Callable[[World, Row], str], Callable[[World, Row], str]]
] = {
    "machines": (begin_machines, left_of_machines, then_of_machines),
    "runs": (begin_runs, left_of_runs, then_of_runs),
    "runtimes": (begin_runtimes, left_of_runtimes, then_of_runtimes),
    "launches": (begin_launches, left_of_launches, then_of_launches),
}


def check(w: World, row: Row) -> None:
    begin, left, then = SCOPES[row.scope]
    before = w.loop()
    if row.scope == "runs":  # a driver that runs the whole time
        w.queue("standing", None)
        w.settle(before, lambda: w.seen(POD, w.runs))
    standing = {item["metadata"]["uid"] for item in (*w.seen(JOB, w.runs), *w.seen(POD, w.runs))}
    begin(w, row, before)
    warm = {item["metadata"]["uid"] for item in w.seen(POD, w.pods)} if row.scope == "runtimes" else set()
    w.die(row.scope, row.step.partition(", and")[0])
    assert left(w, row) in row.left.split(" / ")
    if row.scope == "machines":
        w.cloud.hurry()

    loop = w.loop()
    for _ in range(PASSES_MOST):
        w.pass_with(loop)
    came = then(w, row)
    assert came in row.then.split(" / ")
    assert w.rows("select from orca.engine_operations where ended_at is null or outcome = 'OutcomeUnknown'") == []
    uids = {item["metadata"]["uid"] for item in (*w.seen(JOB, w.runs), *w.seen(POD, w.runs))}
    assert standing <= uids, "a driver that ran was replaced"
    if row.begin == "make":
        assert warm <= {item["metadata"]["uid"] for item in w.seen(POD, w.pods)}, "a warm Pod was replaced"
    assert row.scope == "launches" or w.seen(SECRET, w.pods) == []
    assert w.locks() == 0
    operations = w.operations()
    assert w.pass_with(loop).changed == 0
    assert w.operations() == operations, "an engine with nothing to do"


@pytest.mark.parametrize("row", MATRIX, ids=lambda row: f"{row.scope}, {row.step}")
def test_the_next_loop_converges_in_three_passes(world: Callable[..., World], row: Row) -> None:
    check(world(row.scope), row)


@pytest.mark.parametrize("scope", ["machines", "runs", "runtimes"])
def test_so_it_does_with_the_engines_state_in_files(world: Callable[..., World], scope: str) -> None:
    check(world(scope, "file"), next(row for row in MATRIX if (row.scope, row.step) == (scope, "in the up")))


def page() -> str:
    lines = [
        "# Crash matrix",
        "",
        "<!-- Made by tests/cluster/crash/test_crash_matrix.py; a change by hand is lost. -->",
        "",
        (
            "A loop makes a pass and is killed (SIGKILL) at a step of it; then another loop makes three passes. This is with the "
            "real engine, its state in Postgres, and a real API server; *in the up* also with the state in files. After each, "
            "besides what the table says: a driver that ran the whole time, or a warm Pod, is the same by its uid; no operation "
            "of the engine is open and no lock is held; a driver's log is there once and whole; nothing belongs to nobody; a fourth pass changes nothing and runs no engine. Where it "
            "depends on the instant, the cases are told apart with a slash."
        ),
        "",
        "| scope | killed | there is then | after three passes |",
        "|---|---|---|---|",
        *(f"| {row.scope} | {row.step} | {row.left} | {row.then} |" for row in MATRIX),
    ]
    return "\n".join(lines) + "\n"


def test_the_page_says_the_same() -> None:
    if os.environ.get("ORCA_CRASH_MATRIX") == "write":
        PAGE.write_text(page(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page()
