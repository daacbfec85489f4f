"""What the simulation's passes recorded, read back from Postgres, is decided again the same."""

from __future__ import annotations

from typing import Any

import pytest

from orca_infra.machines.model import DeleteStray, Make, Plan, Remove
from orca_infra.record.codec import decode
from orca_infra.record.decided import MachinesDecided
from orca_infra.testing.simulation import Simulation, World

pytestmark = pytest.mark.postgres

SEEDS = range(40, 60)


@pytest.fixture(autouse=True)
def _records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "keeps_record", True)


def kept(world: World) -> list[dict[str, Any]]:
    return world.rows(
        "select p.*, f.record as whole from orca.passes p join orca.pass_frames f on f.id = p.frame order by p.id"
    )


def test_deciding_again_from_the_record_agrees(simulation: Simulation) -> None:
    actions: set[type] = set()
    for seed in SEEDS:
        world = simulation.run(seed)
        assert not [line for line in world.lines if "not recorded" in line], f"seed {seed}"
        for row in kept(world):
            decided = decode(row["record"], row["whole"])
            assert decided.again() == decided.plan, f"seed {seed}, pass {row['id']}: {row['decisions']}"
            if isinstance(decided.plan, Plan):
                actions |= {type(action) for action in decided.plan.actions}
    assert {Make, Remove, DeleteStray} <= actions, "the seeds came to too little"


def test_a_seed_has_the_same_history_with_and_without_its_record(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_record = [line for line in simulation.run(3).lines if " run " not in line]  # runs' ids go on counting
    monkeypatch.setattr(World, "keeps_record", False)
    assert [line for line in simulation.run(3).lines if " run " not in line] == with_record


def test_every_machine_that_ever_was_is_told_of_with_the_reason_of_its_end(simulation: Simulation) -> None:
    world = simulation.run(52)
    told = {name for row in kept(world) for name in row["about"]}
    made = [row["name"] for row in world.rows("select name from orca.pool_machines where confirmed_at is not null")]
    cut_short = {row["id"] for row in kept(world) if row["ended_at"] is None}
    assert made
    assert len(set(made) - told) <= len(cut_short)  # the names that a pass gives are written down at its end
    ends = {
        name: one["decided"]
        for row in kept(world)
        for one in row["decisions"]
        for name in one["about"]
        if one["decided"].startswith(("remove ", "end "))
    }
    for row in world.rows(
        "select name, reason from orca.pool_machines where revoked_at is not null and uid is not null"
    ):
        if row["reason"] not in {"NoCapacity", "Failed", "Interrupted"}:
            assert f"({row['reason']})" in ends[row["name"]]


def test_a_record_that_says_otherwise_would_be_noticed(simulation: Simulation) -> None:
    world = simulation.run(52)
    passes = [decode(row["record"], row["whole"]) for row in kept(world)]
    decided = next(one for one in passes if isinstance(one, MachinesDecided) and one.plan.actions)
    otherwise = MachinesDecided(snapshot=decided.snapshot, pools=(), limits=decided.limits, plan=decided.plan)
    assert otherwise.again() != decided.plan
