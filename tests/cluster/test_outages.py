"""Whatever goes away under a loop, alone and in pairs: nothing is removed for it, nothing made twice, and everything comes back.

By default a few of them are tried, chosen by a seed. ORCA_TEST_OUTAGES=all tries each, ="80 pairs" so many of the pairs,
=pairs all of those, or it names some (words of theirs, with commas); ORCA_TEST_SEED is another seed. With =all,
ORCA_WRITE_OUTAGES=1 writes the table of docs/explanation/outages.md.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from orca_infra.runtimes.launch import Launch
from orca_infra.stack.engine import PROJECT, Engine
from orca_infra.testing.cluster import TestCluster
from orca_infra.testing.outages import OUTAGES, Outage
from orca_infra.testing.standing import LOST_SECONDS, StandingWorld

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "outages.md"
SEED = int(os.environ.get("ORCA_TEST_SEED", "20261130"))
WHICH = os.environ.get("ORCA_TEST_OUTAGES", "")
NORMAL_SECONDS = 120.0
#: The first of the table lasts so long when all are tried.
MINUTE_SECONDS = 60.0
ALONE, PAIRED = 3, 2
ROW = re.compile(r"^\| (?P<name>[^|]+) \| (?P<said>[^|]+) \| (?P<seconds>[\d.]+ s) \|$", re.MULTILINE)

measured: dict[str, float] = {}


def chosen() -> list[tuple[Outage, ...]]:
    """What is tried, in an order of the seed's."""
    chance = random.Random(SEED)
    alone = [(one,) for one in OUTAGES]
    pairs = [pair for pair in itertools.permutations(OUTAGES, 2) if len(states_of(pair)) < 2]
    if some := re.fullmatch(r"(\d+) pairs", WHICH):
        return chance.sample(pairs, int(some[1]))
    if WHICH in {"all", "pairs"}:
        return chance.sample(alone, len(alone)) if WHICH == "all" else chance.sample(pairs, len(pairs))
    if WHICH:
        return [(one,) for one in OUTAGES if any(word.strip() in one.name for word in WHICH.split(","))]
    return [alone[0], *chance.sample(alone[1:], ALONE), *chance.sample(pairs, PAIRED)]


def states_of(outages: tuple[Outage, ...]) -> set[str]:
    """Where they need the engine's state to be."""
    return {one.state for one in outages if one.state}


def named(outages: tuple[Outage, ...]) -> str:
    return " and ".join(one.name for one in outages)


@pytest.fixture(scope="module")
def worlds(
    cluster: TestCluster, postgres_server: Any, request: pytest.FixtureRequest
) -> Iterator[Callable[[str], StandingWorld]]:
    """The worlds by where the engine's state is, each begun when it is first needed, and anew after a test that failed."""
    print(f"ORCA_TEST_SEED={SEED}")
    made: dict[str, StandingWorld] = {}
    failed = 0
    with ExitStack() as exits:

        def give(state: str) -> StandingWorld:
            nonlocal failed
            if request.session.testsfailed > failed:  # what it left behind is no other's fault
                failed = request.session.testsfailed
                for world in made.values():
                    world.close()
                made.clear()
            if state not in made:
                url = postgres_server.new_database()
                exits.callback(postgres_server.drop, url)
                made[state] = exits.enter_context(StandingWorld(cluster, url, state=state))
            return made[state]

        yield give


@pytest.fixture
def world(worlds: Callable[[str], StandingWorld]) -> StandingWorld:
    return worlds("file")


@dataclass
class Work:
    """What is to be begun during an outage, and exactly once."""

    on_machine: int
    on_cluster: int
    runtime: Launch

    def is_begun(self, world: StandingWorld) -> bool:
        return (
            world.state_of(self.on_machine)["state"] == "succeeded"
            and world.state_of(self.on_cluster)["state"] == "running"
            and world.state_of_runtime(self.runtime) == "ready"
        )


def held(world: StandingWorld, outages: tuple[Outage, ...], offset: int) -> Work:
    """Let them last, with new work coming meanwhile; of one alone until it was seen."""

    def give_work() -> Work:
        return Work(world.run_of("work"), world.run_of("short"), world.launch())

    work = None
    for outage in outages:
        if "up" in outage.name:  # it waits for one
            work = work or give_work()
        outage.begin(world)
        time.sleep(0.5)
    work = work or give_work()
    time.sleep(MINUTE_SECONDS if WHICH == "all" and outages == OUTAGES[:1] else max(one.seconds for one in outages))
    if len(outages) == 1:
        world.until(lambda: outages[0].says in world.said(offset), NORMAL_SECONDS, "it is said")
    return work


@pytest.mark.parametrize("outages", chosen(), ids=named)
def test_nothing_is_removed_or_made_twice_and_everything_comes_back(
    worlds: Callable[[str], StandingWorld], outages: tuple[Outage, ...]
) -> None:
    print(f"ORCA_TEST_SEED={SEED}: {named(outages)}")
    world = worlds(next(iter(states_of(outages)), "file"))
    if any("disk" in one.name for one in outages) and not world.has_small_disk:
        pytest.skip("no tmpfs can be mounted here")
    before, harmed = world.standing(), harm(world)
    offset = len(world.log.read_text())
    try:
        work = held(world, outages, offset)
    finally:
        for outage in reversed(outages):
            outage.end(world)
    ended, ended_at = time.monotonic(), time.time()
    world.until(lambda: world.passed_since(ended_at) and work.is_begun(world), NORMAL_SECONDS, "all is as it was")
    seconds = time.monotonic() - ended
    world.end(work.on_cluster)
    world.end_runtime(work.runtime)
    print(f"{seconds:.1f} s until all was normal")
    if len(outages) == 1:
        measured[outages[0].name] = seconds
    assert world.is_running
    assert world.standing() == before
    assert [world.state_of(run)["start"] for run in (work.on_machine, work.on_cluster)] == [1, 1]
    assert harm(world) == harmed
    assert "defect" not in world.said(offset)


def harm(world: StandingWorld) -> list[list[dict[str, Any]]]:
    """What no outage may lead to; another test of this world may have meant some of it."""
    return [
        world.rows("select id, start from orca.runs where state = 'failed' or start > 1 order by id"),
        world.rows("select name from orca.pool_machines where reason = 'Lost' order by name"),
        world.rows("select name from orca.runtime_pods where pool is null and reason <> 'Stopped' order by name"),
    ]


def test_an_api_server_that_hangs_then_refuses_then_cuts_its_lists_is_no_empty_one(world: StandingWorld) -> None:
    """E5: without a healthy moment in between; the passes fail, nothing is made or swept, and the state stays as it is."""
    before = world.standing()
    made = "select name, uid, cohort from orca.kube_objects where uid is not null order by name"
    folder = world.home / "state" / ".pulumi" / "stacks" / PROJECT
    known, run = None, 0
    for words in ("does not answer", "401", "403", "cut short"):
        [outage] = [one for one in OUTAGES if words in one.name and "API" in one.name]
        world.server.heal()
        offset = len(world.log.read_text())
        outage.begin(world)
        if known is None:
            run, known = world.run_of("short"), world.rows(made)
            states = {row["cohort"]: (folder / f"{row['cohort']}.json").read_bytes() for row in known}
        time.sleep(outage.seconds)
        world.until(lambda: outage.says in world.said(offset), NORMAL_SECONDS, "the passes fail")  # noqa: B023
        assert not world.passed_since(time.time() - outage.seconds), "no pass ended well"
        assert [row for row in world.rows(made) if row not in known] == []
        assert [row for row in known if row not in world.rows(made)] == []
        assert states == {stack: (folder / f"{stack}.json").read_bytes() for stack in states}
    world.server.heal()
    healed_at = time.time()
    world.until(
        lambda: world.passed_since(healed_at) and world.state_of(run)["state"] == "running", NORMAL_SECONDS, "normal"
    )
    assert world.standing() == before
    assert world.state_of(run)["start"] == 1
    world.end(run)


def test_of_ten_objects_nine_are_made_and_a_state_that_is_cut_off_then_holds_up_nothing_else(
    world: StandingWorld, cluster: TestCluster
) -> None:
    """E4: a quota refuses one of ten in one `up`; later that stack's state is cut off."""
    before = world.standing()
    namespace = f"/api/v1/namespaces/{world.runs_namespace}"
    jobs = f"/apis/batch/v1/namespaces/{world.runs_namespace}/jobs"
    world.until(lambda: len(cluster.api.call("GET", jobs)["items"]) == 1, 30, "earlier runs are swept")
    quota = {"metadata": {"name": "q"}, "spec": {"hard": {"count/jobs.batch": "10"}}}
    cluster.api.call("POST", f"{namespace}/resourcequotas", quota)
    world.until(
        lambda: cluster.api.call("GET", f"{namespace}/resourcequotas/q")["status"].get("used"), 20, "the quota counts"
    )
    runs = world.rows("insert into orca.runs (pipeline) select 'short' from generate_series(1, 10) returning id")
    made = "select cohort from orca.kube_objects where uid is not null and run = any(%(runs)s)"
    ids = [row["id"] for row in runs]
    world.until(lambda: len(world.rows(made, runs=ids)) == 9, 40, "nine drivers")
    [refused] = world.rows("select refused from orca.kube_objects where uid is null and run = any(%(r)s)", r=ids)
    assert "exceeded quota: q" in refused["refused"]
    engine = Engine(world.surroundings.engine)
    stacks = {row["cohort"] for row in world.rows(made, runs=ids)}  # one, unless the quota itself was written meanwhile
    assert sum(len(engine.state(stack).resources) for stack in stacks) == 9
    cluster.api.call("DELETE", f"{namespace}/resourcequotas/q")
    world.until(lambda: len(world.rows(made, runs=ids)) == 10, 40, "the tenth")

    (world.home / "state" / ".pulumi" / "stacks" / PROJECT / f"{min(stacks)}.json").write_text('{"version": 3, "check')
    for run in ids:
        world.end(run)
    world.until(lambda: len(cluster.api.call("GET", jobs)["items"]) == 1, 40, "all ten are swept")
    later = world.run_of("short")
    world.until(lambda: world.state_of(later)["state"] == "running", 30, "other stacks go on")
    assert world.standing() == before


def test_a_worker_that_falls_silent_after_all_that_is_lost_and_its_run_queued_again(world: StandingWorld) -> None:
    """Or the loop would be deaf for good."""
    [run] = world.rows("select id from orca.runs where worker = %(w)s and state = 'running'", w=world.busy)
    world.stop_worker(signal.SIGSTOP)
    world.until(
        lambda: world.rows("select from orca.pool_machines where name = %(n)s and reason = 'Lost'", n=world.busy),
        4 * LOST_SECONDS,
        "the machine is lost",
    )
    world.until(lambda: world.state_of(run["id"])["start"] == 2, 30, "its run on another machine")


def test_the_page_has_a_row_for_each_outage() -> None:
    """With ORCA_WRITE_OUTAGES, the rows are what was just seen."""
    text = PAGE.read_text()
    if os.environ.get("ORCA_WRITE_OUTAGES") and len(measured) == len(OUTAGES):
        rows = [f"| {one.name} | {words(one)} | {measured[one.name]:.1f} s |" for one in OUTAGES]
        head, _, rest = text.partition("|---|---|---|\n")
        PAGE.write_text(head + "|---|---|---|\n" + "\n".join(rows) + "\n\n" + ROW.sub("", rest).lstrip())
        text = PAGE.read_text()
    found = {row["name"]: row["said"] for row in ROW.finditer(text)}
    assert found == {one.name: words(one) for one in OUTAGES}


def words(outage: Outage) -> str:
    return f"`{outage.says}`" if outage.says else "nothing"
