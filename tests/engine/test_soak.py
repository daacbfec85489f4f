"""A short soak against the real engine, as the bench makes it at full length: half of the passes meet a fault."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine
ROOT = Path(__file__).parents[2]
SECONDS = 60


@pytest.fixture(scope="module")
def soak() -> dict[str, Any]:
    """What the bench says at its end. It ends what it began, whatever happens to it."""
    command = [sys.executable, "bench/soak.py", "--passes", "60", "--seconds", str(SECONDS), "--seed", "20261130"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=840, check=False)
    assert made.stdout.strip(), made.stderr[-3000:]
    return dict(json.loads(made.stdout.splitlines()[-1]))


def test_at_the_end_the_cloud_is_empty_and_every_row_and_operation_has_its_end(soak: dict[str, Any]) -> None:
    assert soak["left"] == []
    assert soak["machines"] >= 1  # or nothing was tried
    assert soak["met"]


def test_the_engine_makes_and_removes_nothing_when_nothing_changed(soak: dict[str, Any]) -> None:
    assert soak["figures"]["idle_operations"] == 0


def test_threads_and_descriptors_stay_what_they_were(soak: dict[str, Any]) -> None:
    """The slopes of the other things need the bench's own length."""
    first, last = soak["samples"]
    assert last["threads"] <= first["threads"] + 4
    assert last["descriptors"] <= first["descriptors"] + 8
    assert last["disk_mib"] <= first["disk_mib"] + 8
