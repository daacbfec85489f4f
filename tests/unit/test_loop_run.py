"""How long the loop waits for its next pass over the pools."""

from __future__ import annotations

import io
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from orca_infra.errors import Transient
from orca_infra.log import make_log
from orca_infra.loop.run import _LEAST_SECONDS, RETRY_SECONDS, Loop


def loop_whose_pass(result: Any) -> Loop:
    """A loop with nothing in it but the pass that it makes."""

    def run(_config: object) -> Any:
        if isinstance(result, Exception):
            raise result
        return result

    loop = object.__new__(Loop)
    loop._surroundings = SimpleNamespace(settings=SimpleNamespace(scale_seconds=15.0))  # type: ignore[assignment]
    loop._live = SimpleNamespace(config=None)  # type: ignore[assignment]
    loop._passes = SimpleNamespace(run=run)  # type: ignore[assignment]
    loop._log = make_log(io.StringIO(), form="text")
    loop._stop = threading.Event()
    return loop


@pytest.mark.parametrize(
    ("changed", "next_in_seconds", "wait"),
    [
        (0, None, 15.0),
        (0, 60.0, 15.0),
        (0, 2.5, 2.5),
        (0, -1.0, -1.0),
        (3, None, _LEAST_SECONDS),
        (3, 2.5, _LEAST_SECONDS),
    ],
)
def test_the_next_pass_comes_when_something_comes_due_and_after_a_period_at_the_latest(
    changed: int, next_in_seconds: float | None, wait: float
) -> None:
    result = SimpleNamespace(changed=changed, next_in_seconds=next_in_seconds)
    assert loop_whose_pass(result)._machines_once() == wait


def test_a_pass_that_was_given_up_is_made_again_soon() -> None:
    assert loop_whose_pass(Transient("the database is away"))._machines_once() == RETRY_SECONDS


def test_a_defect_in_a_pass_ends_no_loop() -> None:
    assert loop_whose_pass(ZeroDivisionError())._machines_once() == RETRY_SECONDS
