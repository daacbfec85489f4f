"""A short soak, as the bench makes it at full length: machines, runs and runtimes, demand and faults in tides."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def soak() -> dict[str, Any]:
    """What the bench says at its end, after the second tide. It ends what it began, whatever happens to it."""
    command = [sys.executable, "bench/soak.py", "--passes", "16", "--seconds", "30", "--seed", "20261130"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=840, check=False)
    assert made.stdout.strip(), made.stderr[-3000:]
    return dict(json.loads(made.stdout.splitlines()[-1]))


def test_whatever_was_met_everything_goes_again_and_what_has_to_hold_holds(soak: dict[str, Any]) -> None:
    assert soak["broken"] == []
    assert soak["samples"]  # or it never came to rest
    assert soak["faults_and_demand"].get("runs"), "nothing was tried"


def test_the_engine_makes_and_removes_nothing_while_nothing_changes(soak: dict[str, Any]) -> None:
    assert soak["figures"]["idle_operations"] == 0


def test_of_threads_descriptors_and_rows_there_are_few(soak: dict[str, Any]) -> None:
    """How fast they grow takes the bench's own length to see."""
    last = soak["samples"][-1]
    assert last["threads"] <= 60
    assert last["descriptors"] <= 100
    assert last["rows"] <= 300
    assert last["disk_mib"] <= 4
