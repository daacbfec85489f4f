"""What decide makes of a snapshot: each case is named after a sentence of docs' *Machines* and *Strays*.

`machines/<case>/input.toml` is what was seen, `plan.json` what decide has to say, compared exactly. Times are seconds from
now, negative in the past; everything that a case leaves out has the defaults below. `ORCA_GOLDEN=write` writes the plans
anew: read the difference, a wrong plan is a bug.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from orca_infra.machines.decide import decide
from orca_infra.machines.model import (
    Demand,
    Limits,
    MachineRow,
    MachineState,
    MachineType,
    Plan,
    Pool,
    Progress,
    Refusal,
    SeenMachine,
    Snapshot,
)
from orca_infra.record.codec import decode, encode
from orca_infra.record.decided import MachinesDecided
from orca_infra.record.frames import Frame
from orca_infra.record.words import decisions_of

FOLDER = Path(__file__).parent / "machines"
CASES = sorted(path.parent.name for path in FOLDER.glob("*/input.toml"))
NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
STACK_ID = "mystackmystackid"

LIMITS = {
    "try_seconds": 60,
    "boot_seconds": 900,
    "lost_seconds": 300,
    "stray_grace_seconds": 60,
    "stray_max": 3,
    "lost_max": 2,
}
POOL = {
    "provider": "local",
    "image": "worker:1",
    "max_machines": 3,
    "idle_seconds": 300,
    "types": [{"type": "small", "locations": ["a", "b"]}],
}
WORKER = {"first_seen": -3000, "seen": -5, "slots": 1, "running": 0}
INPUT_KEYS = {
    *("about", "hearing", "limits", "pools", "demand", "progress", "machines", "seen", "owned"),
    *("gone", "held", "unreadable", "paused", "refused", "ended_lately", "type_architectures", "image_architectures"),
}
MACHINE_KEYS = {
    *("name", "provider", "created", "confirmed", "revoked", "removal_reason", "worker", "listed", "owned"),
    *("drain", "drain_now"),
}


def at(seconds: float | bool | None) -> datetime | None:
    """False stands for never: TOML has no null."""
    return None if seconds is None or seconds is False else NOW + timedelta(seconds=seconds)


def sure(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def pool_of(name: str) -> str:
    return name.removeprefix("orca-").rpartition("-")[0]


def read_input(path: Path) -> tuple[Snapshot, tuple[Pool, ...], Limits]:
    """The arguments of decide; a key that no case may have is refused, so that a slip is not a passing test."""
    case = tomllib.loads(path.read_text(encoding="utf-8"))
    assert case.keys() <= INPUT_KEYS, case.keys() - INPUT_KEYS
    pools = tuple(read_pool(name, more) for name, more in case.get("pools", {"p": {}}).items())
    machines = [read_machine(one) for one in case.get("machines", [])]
    owned = {name: set(names) for name, names in case.get("owned", {}).items()}
    for one, row in zip(case.get("machines", []), machines, strict=True):
        if one.get("owned", row.confirmed_at is not None):
            owned.setdefault(row.pool, set()).add(row.name)
    listed = [read_listed(one, row) for one, row in zip(case.get("machines", []), machines, strict=True)]
    snapshot = Snapshot(
        now=NOW,
        stack_id=STACK_ID,
        hearing_since=sure(case.get("hearing", -86400)),
        demand={name: read_demand(one) for name, one in case.get("demand", {}).items()},
        progress={name: read_progress(one) for name, one in case.get("progress", {}).items()},
        machines=tuple(machines),
        seen=tuple(one for one in listed if one) + tuple(read_seen(one) for one in case.get("seen", [])),
        gone=frozenset(case.get("gone", [])),
        owned={pool: frozenset(names) for pool, names in owned.items()},
        held=case.get("held", {}),
        unreadable=case.get("unreadable", {}),
        paused=frozenset(case.get("paused", [])),
        refusals=tuple(read_refusal(one) for one in case.get("refused", [])),
        ended_lately=frozenset((name, f"uid-{name}") for name in case.get("ended_lately", [])),
        type_architectures=case.get("type_architectures", {}),
        image_architectures={
            image: frozenset(variants) for image, variants in case.get("image_architectures", {}).items()
        },
    )
    return snapshot, pools, Limits(**{**LIMITS, **case.get("limits", {})})


def read_pool(name: str, more: Mapping[str, Any]) -> Pool:
    values = {**POOL, **more}
    types = tuple(
        MachineType(
            type=one["type"],
            locations=tuple(one["locations"]),
            wait_seconds=one.get("wait", 0),
            spot=one.get("spot", False),
        )
        for one in values["types"]
    )
    return Pool(**{**values, "name": name, "types": types})


def read_demand(one: Mapping[str, Any]) -> Demand:
    aged = one.get("aged", 0)
    return Demand(aged=aged, waiting=one.get("waiting", aged), next_due_at=at(one.get("next_due")))


def read_progress(one: Mapping[str, Any]) -> Progress:
    return Progress(
        last_number=one.get("last_number", 9),
        trying_type=one.get("type"),
        trying_since=at(one.get("since")),
        tried_at=at(one.get("tried")),
    )


def read_refusal(one: Mapping[str, Any]) -> Refusal:
    """A stock-out in pool p ten seconds ago, the first."""
    last_at = sure(one.get("last", -10))
    return Refusal(
        pool=one.get("pool", "p"),
        type=one["type"],
        location=one["location"],
        spot=one.get("spot", False),
        kind=one.get("kind", "NoCapacity"),
        since=last_at,
        last_at=last_at,
        times=one.get("times", 1),
    )


def read_machine(one: Mapping[str, Any]) -> MachineRow:
    """A machine that was made an hour ago; with `worker`, even an empty one, its worker was seen."""
    assert one.keys() <= MACHINE_KEYS, one.keys() - MACHINE_KEYS
    name, created = one["name"], one.get("created", -3600)
    confirmed = one.get("confirmed", created)
    worker = {**WORKER, **one["worker"]} if "worker" in one else {}
    assert worker.keys() <= {*WORKER, "last_ended"}
    return MachineRow(
        name=name,
        pool=pool_of(name),
        number=int(name.rpartition("-")[2]),
        provider=one.get("provider", "local"),
        type="small",
        location="a",
        created_at=sure(created),
        uid=None if confirmed is False else f"uid-{name}",
        confirmed_at=at(confirmed),
        revoked_at=at(one.get("revoked")),
        removal_reason=one.get("removal_reason"),
        first_seen_at=at(worker.get("first_seen")),
        seen_at=at(worker.get("seen")),
        slots=worker.get("slots", 0),
        running=worker.get("running", 0),
        last_run_ended_at=at(worker.get("last_ended")),
        drain_at=at(one.get("drain")),
        drain_now=one.get("drain_now", False),
    )


def read_listed(one: Mapping[str, Any], row: MachineRow) -> tuple[str, SeenMachine] | None:
    """What the provider lists of a row: the machine, running, unless the case says otherwise."""
    state = one.get("listed", "running" if row.uid else False)
    if state is False:
        return None
    return read_seen({"name": row.name, "provider": row.provider, "created": one.get("created", -3600), "state": state})


def read_seen(one: Mapping[str, Any]) -> tuple[str, SeenMachine]:
    machine = SeenMachine(
        name=one["name"],
        uid=one.get("uid", f"uid-{one['name']}"),
        location="a",
        type="small",
        state=MachineState(one.get("state", "running")),
        created_at=sure(one.get("created", -3600)),
        labels=one.get("labels", {"orca-stack": STACK_ID, "orca-pool": pool_of(one["name"])}),
    )
    return one.get("provider", "local"), machine


def shown(plan: Plan) -> dict[str, Any]:
    """The plan for people and for git: times as seconds from now, what is empty left out."""
    return {
        "actions": [{"do": type(action).__name__, **short(asdict(action))} for action in plan.actions],
        "reports": [short(asdict(report)) for report in plan.reports],
        "next_due": seconds(plan.next_due_at),
        "strays_held": [stray.name for stray in plan.strays_held],
    }


def short(values: dict[str, Any]) -> dict[str, Any]:
    given = {key: value for key, value in values.items() if value not in (None, "")}
    for key, value in given.items():
        if isinstance(value, datetime):
            given[key] = seconds(value)
        elif key == "machine":
            given[key] = f"{value['name']} {value['uid']}"
        elif key == "candidates":
            given[key] = [f"{c['type']} in {c['location']}" + (" (spot)" if c["spot"] else "") for c in value]
    return given


def seconds(time: datetime | None) -> float | None:
    return None if time is None else (time - NOW).total_seconds()


@pytest.mark.parametrize("case", CASES)
def test_the_plan_is_the_expected_one(case: str) -> None:
    snapshot, pools, limits = read_input(FOLDER / case / "input.toml")
    plan = shown(decide(snapshot, pools, limits))
    expected = FOLDER / case / "plan.json"
    if os.environ.get("ORCA_GOLDEN") == "write":
        expected.write_text(json.dumps(plan, indent=1) + "\n", encoding="utf-8")
    assert plan == json.loads(expected.read_text(encoding="utf-8")), f"{expected} says otherwise"


def test_there_are_cases_and_each_says_what_it_is_about() -> None:
    assert len(CASES) >= 40
    for case in CASES:
        assert tomllib.loads((FOLDER / case / "input.toml").read_text(encoding="utf-8"))["about"], case


@pytest.mark.parametrize("case", CASES)
def test_read_back_from_its_record_the_case_is_decided_the_same_and_told_in_words(case: str) -> None:
    snapshot, pools, limits = read_input(FOLDER / case / "input.toml")
    decided = MachinesDecided(snapshot=snapshot, pools=pools, limits=limits, plan=decide(snapshot, pools, limits))
    read = decode(encode(decided))
    assert read == decided
    assert read.again() == decided.plan
    words = decisions_of(decided)
    assert sum(one.acts for one in words) == len(decided.plan.actions)
    told = {name for one in words for name in one.about}
    assert {report.pool for report in decided.plan.reports} <= told
    assert all(one.why for one in words)
    # With ORCA_DRIFT=report no record says that labels are put back.
    only_said = decisions_of(replace(decided, limits=replace(limits, puts_labels_back=False)))
    assert sum(one.acts for one in only_said) == len(decided.plan.without_relabels().actions)
    assert all("labels of" not in one.decided or one.decided.startswith("do not put back") for one in only_said)


@pytest.mark.parametrize("case", CASES)
def test_told_against_another_case_the_case_is_decided_the_same(case: str) -> None:
    """All that is left out is when a machine was heard that was heard lately."""
    snapshot, pools, limits = read_input(FOLDER / case / "input.toml")
    decided = MachinesDecided(snapshot=snapshot, pools=pools, limits=limits, plan=decide(snapshot, pools, limits))
    earlier, *_ = read_input(FOLDER / CASES[CASES.index(case) - 1] / "input.toml")
    for before in (snapshot, earlier):
        frame = replace(decided, snapshot=before)
        thinned = Frame(frame).thin(decided)
        read = decode(encode(thinned.decided, thinned.lacks), encode(frame))
        assert isinstance(read, MachinesDecided)
        assert read.again() == decided.plan
        assert with_no_heartbeats(read) == with_no_heartbeats(decided)


def with_no_heartbeats(decided: MachinesDecided) -> MachinesDecided:
    machines = tuple(replace(row, seen_at=None) for row in decided.snapshot.machines)
    return replace(decided, snapshot=replace(decided.snapshot, machines=machines))
