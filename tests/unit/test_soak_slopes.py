"""A soak tells what grows from what sways."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from soak_slopes import BOUNDS, slopes  # type: ignore[import-not-found]

CHANCE = random.Random(7)


def samples(*, first: int = 0, count: int = 24, leak: float = 0.0) -> list[dict[str, Any]]:
    """A world at rest every 40 passes, in which everything sways a little, and grows by `leak` bounds in 1,000 passes."""
    return [
        {
            "passes": first + 40 * number,
            **{name: 100 + bound * (CHANCE.uniform(-0.2, 0.2) + leak * number / 25) for name, bound in BOUNDS.items()},
        }
        for number in range(1, count + 1)
    ]


def test_what_only_sways_is_within_its_bound_and_what_grows_is_not() -> None:
    assert all(slope < BOUNDS[name] for name, slope in slopes([samples()]).items())
    assert all(slope > BOUNDS[name] for name, slope in slopes([samples(leak=2)]).items())


def test_a_few_samples_that_were_disturbed_change_nothing() -> None:
    disturbed = samples()
    for position in (-1, -4, -9):
        disturbed[position] = {**disturbed[position], "pass_seconds": 1000.0}
    assert slopes([disturbed])["pass_seconds"] < BOUNDS["pass_seconds"]


def test_each_worlds_growth_is_its_own() -> None:
    """A soak that went on in a new world has two beginnings; what lies between them is no growth, and hides none."""
    leaking = [samples(count=12, leak=2), samples(first=480, count=12, leak=2)]
    assert all(slope > BOUNDS[name] for name, slope in slopes(leaking).items())


@pytest.mark.parametrize("count", [0, 1, 3])
def test_too_few_samples_say_nothing(count: int) -> None:
    assert slopes([samples(count=count)]) == {}
