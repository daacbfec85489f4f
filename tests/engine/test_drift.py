"""What somebody deletes, stops or edits by hand is noticed within one pass, and the state follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.engine

Passes = Callable[..., Any]
WaitUntil = Callable[..., None]
TWO = """
[pools.p]
provider = "local"
image = "registry.example/orca-worker:1"
max_machines = 2
max_booting = 2
idle_seconds = "1h"
types = [{ type = "small", locations = ["a"] }]
"""


def two_machines(w: Any) -> None:
    w.configure(TWO)
    w.queue(2)  # at once: a worker that is there already may be quicker than the pass
    w.run_pass()
    w.pass_until(lambda: w.count("orca.workers") == 2)
    w.execute("update orca.runs set state = 'canceled' where state in ('queued', 'running')")


def edit(w: Any, name: str) -> None:
    [machine] = [machine for machine in w.cloud.list() if machine.name == name]
    w.cloud.relabel(name, {**machine.labels, "team": "somebody-s"})


def labels_in_state(w: Any, name: str) -> dict[str, str]:
    [resource] = [resource for resource in w.engine.state(w.stack).resources if resource.name == name]
    return dict(resource.outputs["labels"])


def refreshes(w: Any) -> list[str]:
    return [one["outcome"] for one in w.operations() if one["kind"] == "refresh"]


def test_what_is_deleted_or_stopped_by_hand_ends_in_one_pass_and_its_stack_is_looked_at(passes: Passes) -> None:
    w = passes()
    two_machines(w)
    assert refreshes(w) == []
    edit(w, "orca-p-2")
    w.cloud.delete("orca-p-1")
    w.run_pass()
    assert w.reasons() == {"orca-p-1": "Vanished", "orca-p-2": None}
    assert refreshes(w) == ["Done"]
    assert labels_in_state(w, "orca-p-2")["team"] == "somebody-s"
    assert [particulars["machine"] for event, particulars in w.log.lines if event == "drift"] == ["orca-p-2"]
    w.run_pass()
    assert refreshes(w) == ["Done"], "nothing was seen"
    w.cloud.stop("orca-p-2")
    w.run_pass()
    assert w.reasons() == {"orca-p-1": "Vanished", "orca-p-2": "Stopped"}
    assert w.engine.state(w.stack).resources == ()


def test_each_machine_stack_is_looked_at_once_in_its_time_although_nothing_was_seen(
    passes: Passes, wait_until: WaitUntil
) -> None:
    w = passes(ORCA_DRIFT_SECONDS="2")
    two_machines(w)
    edit(w, "orca-p-1")
    w.pass_until(lambda: labels_in_state(w, "orca-p-1").get("team"))
    first = len(refreshes(w))
    w.pass_until(lambda: len(refreshes(w)) > first)
    assert set(refreshes(w)) == {"Done"}
    assert w.reasons() == {"orca-p-1": None, "orca-p-2": None}


def test_with_report_drift_is_said_and_nothing_is_changed_until_it_is_over(passes: Passes) -> None:
    w = passes(ORCA_DRIFT="report", ORCA_DRIFT_SECONDS="1")
    two_machines(w)
    before = labels_in_state(w, "orca-p-1")
    edit(w, "orca-p-1")

    def said() -> str:
        return " ".join(row["message"] for row in w.rows("select * from orca.attention where topic like 'drift%%'"))

    w.pass_until(said)
    assert said() == "test.machines.p: orca-p-1 was changed by hand (ORCA_DRIFT=report: nothing is mended)"
    assert labels_in_state(w, "orca-p-1") == before
    w.cloud.relabel("orca-p-1", before)
    w.pass_until(lambda: not said())
    w.cloud.delete("orca-p-2")
    w.pass_until(lambda: w.reasons()["orca-p-2"] == "Vanished")
    edit(w, "orca-p-1")
    w.pass_until(said)
    w.cloud.delete("orca-p-1")
    w.pass_until(lambda: w.reasons()["orca-p-1"] == "Vanished")
    w.run_pass()
    assert not said(), "its stack has nothing any more, and is not looked at again"
