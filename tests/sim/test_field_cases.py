"""The field cases of machine pools (M1-M8, M10), on the simulation's clock. M6 is in tests/engine, M9 in tests/unit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest

from orca_infra.config import Config
from orca_infra.errors import QuotaExceeded, Refused
from orca_infra.machines.model import MachineState, MachineType, Pool
from orca_infra.machines.providers.local_config import LocalCloud
from orca_infra.testing.fake_cloud import STOCK_OUTS, WORDS, Effect, Fault
from orca_infra.testing.simulation import Simulation, World

pytestmark = pytest.mark.postgres


def config(**more: Any) -> Config:
    values = {"max_machines": 3, "idle_seconds": 60.0, "max_booting": 1, **more}
    kind = MachineType(type="small", locations=("a", "b"))
    pool = Pool(name="p", provider="one", image="worker:1", types=(kind,), **values)
    return Config(pools=(pool,), max_machines_total=None, local=LocalCloud())


class Scene:
    """A world in which nothing happens that the test doesn't say."""

    def __init__(self, simulation: Simulation, config: Config) -> None:
        self.world: World = simulation.new_world(0, config)
        self.cloud = self.world.clouds["one"]

    def queue(self, runs: int) -> None:
        self.world.execute("insert into orca.runs (pipeline) select 'w1' from generate_series(1, %(n)s::int)", n=runs)

    def passes(self, seconds: float) -> None:
        """Make passes for so long."""
        until = self.world.clock.now + timedelta(seconds=seconds)
        while self.world.clock.now < until:
            self.world.make_pass()

    def until(self, predicate: Any, passes: int = 60) -> None:
        for _ in range(passes):
            if predicate():
                return
            self.world.make_pass()
        raise AssertionError("\n".join(self.world.lines))

    def reasons(self) -> dict[str, str | None]:
        rows = self.world.rows("select name, reason from orca.pool_machines order by number")
        return {row["name"]: row["reason"] for row in rows}

    def places(self) -> dict[str, str]:
        return {machine.name: machine.location for machine in self.world.ours()}

    def states(self) -> dict[str, str]:
        rows = self.world.rows("select coalesce(worker, '') as worker, state from orca.runs order by id")
        return {row["worker"]: row["state"] for row in rows}

    def attempt(self) -> str:
        return str(self.world.rows("select last_attempt from orca.pool_status")[0]["last_attempt"])

    def kill_in(self, seconds: float) -> None:
        self.world.clock.kill_at = self.world.clock.now + timedelta(seconds=seconds)

    def dies(self, *, finishes: bool) -> bool:
        """The loop's end; `finishes`: its engine ends its step all the same."""
        self.world.is_dead = True
        return finishes

    def life(self, name: str) -> Any:
        return next(life for life in self.world.workers.lives.values() if life.machine.name == name)


@pytest.fixture
def scenes(simulation: Simulation) -> Iterator[Any]:
    with ExitStack() as stack:

        def begin(**more: Any) -> Scene:
            scene = Scene(simulation, config(**more))
            stack.enter_context(scene.world.processes())
            return scene

        yield begin


@pytest.mark.parametrize("words", STOCK_OUTS)
def test_m1_each_spelling_of_a_stock_out_goes_on_to_the_next_location(scenes: Any, words: str) -> None:
    scene = scenes()
    scene.cloud.arm("create", Fault(says=words, effect=Effect.NONE))
    scene.queue(1)
    scene.until(lambda: "orca-p-2" in scene.reasons())
    assert scene.reasons() == {"orca-p-1": "NoCapacity", "orca-p-2": None}
    assert scene.places() == {"orca-p-2": "b"}


@pytest.mark.parametrize("meaning", [QuotaExceeded, Refused])
def test_m1_a_quota_and_a_bad_request_are_said_as_what_they_are_and_go_on_to_nothing(scenes: Any, meaning: Any) -> None:
    scene = scenes()
    scene.cloud.arm("create", Fault(says=WORDS[meaning], effect=Effect.NONE))
    scene.queue(1)
    scene.until(lambda: scene.reasons() == {"orca-p-1": "Failed"})
    assert scene.attempt() == f"small in a: {meaning.__name__}: {WORDS[meaning]}"
    [offer] = scene.world.rows("select class, location, times from orca.pool_offers")
    assert offer == {"class": meaning.__name__, "location": "a", "times": 1}


def test_m2_a_create_without_capacity_is_no_capacity_coming(scenes: Any) -> None:
    scene = scenes(max_booting=3)
    scene.cloud.room["a", "small"] = 0
    scene.queue(3)
    scene.until(scene.reasons)
    assert scene.reasons() == {"orca-p-1": "NoCapacity", "orca-p-2": None, "orca-p-3": None, "orca-p-4": None}
    assert set(scene.places().values()) == {"b"}


@pytest.mark.parametrize("finishes", [False, True])
def test_m3_a_create_in_which_the_loop_was_killed_is_never_both_kept_and_replaced(
    scenes: Any, monkeypatch: pytest.MonkeyPatch, finishes: bool
) -> None:
    scene = scenes()
    scene.cloud.lag_seconds = lambda: 2.0
    scene.queue(1)
    scene.world.make_pass()
    monkeypatch.setattr(scene.world, "goes_on", lambda: scene.dies(finishes=finishes))
    scene.kill_in(1)  # the run is due now, and the create takes 2 s
    assert scene.world.make_pass() is None
    scene.until(lambda: "succeeded" in scene.states().values())
    scene.passes(120)
    if finishes:
        assert scene.reasons() == {"orca-p-1": "Idle"}
    else:
        assert scene.reasons() == {"orca-p-1": "Interrupted", "orca-p-2": "Idle"}
    assert scene.places() == {}


def test_m4_a_machine_without_a_worker_is_no_stray_before_its_boot_timeout(
    scenes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = scenes()
    monkeypatch.setattr(scene.world.workers.rng, "uniform", lambda low, high: 85 if (low, high) == (3, 30) else low)
    scene.queue(1)
    scene.passes(80)
    assert scene.reasons() == {"orca-p-1": None}
    scene.until(lambda: "orca-p-1" in scene.states())
    assert scene.reasons() == {"orca-p-1": None}


def test_m5_idleness_counts_from_the_workers_first_sight(scenes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = scenes(idle_seconds=30.0)
    monkeypatch.setattr(scene.world.workers.rng, "uniform", lambda low, high: 80 if (low, high) == (3, 30) else low)
    scene.queue(1)
    scene.until(scene.places)
    scene.world.execute("update orca.runs set state = 'canceled'")
    scene.until(lambda: scene.life("orca-p-1").first_hello_at)
    seen_at = scene.life("orca-p-1").first_hello_at
    scene.until(lambda: scene.reasons() == {"orca-p-1": "Idle"})
    [row] = scene.world.rows("select revoked_at from orca.pool_machines")
    assert 30 <= (row["revoked_at"] - seen_at).total_seconds() <= 30 + 15


def test_m7_a_preempted_machine_is_removed_and_replaced_at_once(scenes: Any) -> None:
    scene = scenes()
    scene.queue(1)
    scene.until(lambda: scene.states().get("orca-p-1") == "running")
    life = scene.life("orca-p-1")
    life.taken = dict.fromkeys(life.taken, scene.world.clock.now + timedelta(hours=1))
    life.excuses.add("Preempted")
    scene.passes(30)
    scene.cloud.halt(life.machine, MachineState.PREEMPTED)
    at = scene.world.clock.now
    scene.until(lambda: "orca-p-2" in scene.places())
    assert scene.reasons() == {"orca-p-1": "Preempted", "orca-p-2": None}
    assert (scene.world.clock.now - at).total_seconds() < 30
    assert list(scene.places()) == ["orca-p-2"]


@pytest.mark.parametrize("seconds", [50, 65, 75, 80, 85, 89, 92, 100, 120, 300])
def test_m8_nobody_is_judged_by_a_silence_that_could_not_be_heard(scenes: Any, seconds: int) -> None:
    scene = scenes(idle_seconds=10000.0)
    scene.queue(1)
    scene.until(lambda: "succeeded" in scene.states().values())
    before = scene.reasons()
    # The worker was last heard almost a whole heartbeat before the database goes away, and the loop read just then.
    life = scene.life("orca-p-1")
    scene.world.clock.pass_until(life.last_hello_at + timedelta(seconds=14))
    scene.world.make_pass()
    scene.world.away_until = scene.world.clock.now + timedelta(seconds=seconds)
    life.is_silent = True
    scene.world.clock.pass_until(scene.world.away_until)
    scene.world.make_pass()
    assert scene.reasons() == before


def test_m8_an_outage_within_one_long_operation_is_no_silence_either(
    scenes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = scenes()
    monkeypatch.setattr(scene.world.workers.rng, "uniform", lambda low, high: {30: 10, 45: 10000}.get(high, low))
    scene.queue(1)
    scene.until(lambda: scene.states() == {"orca-p-1": "running"})
    scene.passes(30)
    life = scene.life("orca-p-1")
    scene.queue(1)
    scene.world.clock.pass_until(life.last_hello_at + timedelta(seconds=14))
    scene.cloud.arm("create", Fault(seconds=78, effect=Effect.DONE))
    life.is_silent = True  # until after the next pass, at the latest
    scene.world.clock.after(
        0.5, lambda: setattr(scene.world, "away_until", scene.world.clock.now + timedelta(seconds=78))
    )
    began_at = scene.world.clock.now
    scene.until(lambda: (scene.world.clock.now - began_at).total_seconds() > 80, passes=2)
    scene.world.make_pass()
    assert scene.reasons() == {"orca-p-1": None, "orca-p-2": None}


def test_m8_after_the_outage_who_stays_silent_is_lost_in_time(scenes: Any) -> None:
    scene = scenes(idle_seconds=10000.0)
    scene.queue(1)
    scene.until(lambda: "succeeded" in scene.states().values())
    life = scene.life("orca-p-1")
    scene.world.away_until = scene.world.clock.now + timedelta(seconds=300)
    scene.passes(290)
    life.is_silent = True
    scene.passes(60)
    assert scene.reasons() == {"orca-p-1": None}
    scene.until(lambda: scene.reasons() == {"orca-p-1": "Lost"})


def test_m10_only_the_idle_machine_goes_and_its_number_is_not_used_again(
    scenes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = scenes(max_booting=3, idle_seconds=30.0)
    monkeypatch.setattr(scene.world.workers.rng, "uniform", lambda low, high: {30: 10, 45: 10000}.get(high, low))
    scene.queue(3)
    scene.until(lambda: sorted(scene.states()) == ["orca-p-1", "orca-p-2", "orca-p-3"])
    uids = {machine.name: machine.uid for machine in scene.world.ours()}
    life = scene.life("orca-p-2")
    life.taken = dict.fromkeys(life.taken, scene.world.clock.now)
    scene.until(lambda: scene.reasons()["orca-p-2"] == "Idle")
    assert scene.reasons() == {"orca-p-1": None, "orca-p-2": "Idle", "orca-p-3": None}
    del uids["orca-p-2"]
    assert {machine.name: machine.uid for machine in scene.world.ours()} == uids
    scene.queue(1)
    scene.until(lambda: len(scene.places()) == 3)
    assert sorted(scene.places()) == ["orca-p-1", "orca-p-3", "orca-p-4"]
