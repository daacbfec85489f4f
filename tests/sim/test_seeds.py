"""The pool autoscaler against everything that goes wrong, many times over; each failure is one seed's."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from orca_infra.testing.simulation import Simulation
from orca_infra.testing.simulation_world import prepare_database

pytestmark = pytest.mark.postgres

SEEDS = int(os.environ.get("ORCA_SIM_SEEDS", "2000"))
PROCESSES = 2
#: Seeds that once failed, and what of.
FAILED = {
    1927: "another stack's machine elsewhere was taken by the check for a second one of ours",
    1516: "a machine did a run between being found idle and being removed, and went all the same",
    6039: "a young machine that its stack's state had lost was not shown yet, and taken for gone",
    1624: "runs waited for a pool, and machines that a pause kept were as many as there may be in all",
    101: "a deletion that failed in part left what the database says is owned out of date, and the pass was given up",
    178: "a worker was quicker than its machine's creation",
    5: "a try was counted from the end of the pass, not of the try",
    83: "a creation that was interrupted had a worker already, which was quick",
    1200: "a removal that had begun was finished while its pool was paused",
    119: "a run came and went between the decision and the revocation",
}


@pytest.mark.timeout(1800)
def test_many_seeds(postgres_server: Any) -> None:
    """ORCA_SIM_SEEDS says how many (2000)."""
    share = -(-SEEDS // PROCESSES)
    running = []
    for number in range(PROCESSES):
        url = postgres_server.new_database()
        prepare_database(url)
        arguments = [f"--first={number * share}", f"--count={share}", f"--database={url}"]
        command = [sys.executable, "-m", "orca_infra.testing.simulation", *arguments]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    said = [process.communicate()[0] for process in running]
    broken = [text for process, text in zip(running, said, strict=True) if process.returncode != 0]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("seed", FAILED)
def test_a_seed_that_failed_once(simulation: Simulation, seed: int) -> None:
    simulation.run(seed)


def test_a_seed_is_the_same_history_each_time(simulation: Simulation) -> None:
    first = [line for line in simulation.run(3).lines if " run " not in line]  # runs' ids go on counting
    again = [line for line in simulation.run(3).lines if " run " not in line]
    assert len(first) > 40
    assert first == again


def test_what_broke_is_told_with_the_command_that_runs_it_again(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orca_infra.testing.simulation.CALM_PASSES", 1)
    with pytest.raises(AssertionError, match="no fixpoint within 1 passes") as caught:
        simulation.run(7)
    assert "python -m orca_infra.testing.simulation 7" in "".join(caught.value.__notes__)
