"""What people read: names and messages come from outside, and must not write on the terminal what they like."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from rich.console import Console

from orca_infra import screen
from orca_infra.machines.model import (
    Action,
    Candidate,
    DeleteStray,
    DestroyOwned,
    EndInterrupted,
    MachineState,
    Make,
    Plan,
    PoolReport,
    Reason,
    Relabel,
    Remove,
    SeenMachine,
    Snapshot,
)
from orca_infra.quantity import duration_text

NOW = datetime(2026, 1, 1, tzinfo=UTC)
#: Colour, a link, a bell, an erased screen, a carriage return, a line of its own, a bidirectional override, a lone surrogate.
EVIL = "[red]x[/] [link=http://e]y[/link] \x1b[31m \x07 \x1b[2J \r \n \u202e \ud800 [/nothing]"
SHOWN = "[red]x[/] [link=http://e]y[/link] ?[31m ? ?[2J ? ? ? ? [/nothing]"
STRAY = SeenMachine(name=EVIL, uid=EVIL, location=EVIL, type=EVIL, state=MachineState.RUNNING, created_at=NOW)
ACTIONS: tuple[Action, ...] = (
    Make(
        pool=EVIL,
        count=2,
        candidates=(Candidate(type=EVIL, location="a"), Candidate(type="large", location=EVIL)),
        then_type="large",
        then_since=NOW,
        why=EVIL,
    ),
    Remove(pool="p", name=EVIL, reason=Reason.IDLE, only_idle=True, why=EVIL),
    EndInterrupted(pool="p", name=EVIL, why=EVIL),
    DestroyOwned(pool="p", name=EVIL, why=EVIL),
    DeleteStray(provider="local", machine=STRAY, why=EVIL),
    Relabel(pool="p", provider="local", machine=STRAY, labels={EVIL: EVIL}, why=EVIL),
)
SNAPSHOT = Snapshot(now=NOW, stack_id="s", hearing_since=NOW, unreadable={"gcp": f"provider gcp: {EVIL}"})


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Console:
    """A wide terminal with colours, recorded."""
    console = Console(highlight=False, force_terminal=True, width=5000, record=True, color_system="truecolor")
    monkeypatch.setattr(screen, "console", lambda: console)
    return console


def check(terminal: Console, capsys: pytest.CaptureFixture[str], *, lines: int) -> str:
    """Nothing of the evil text acted: what it says is there, letter by letter, and rich styled none of it."""
    written = capsys.readouterr().out
    said = terminal.export_text(styles=False)
    assert SHOWN in said
    assert "\x1b[31m" not in written
    assert "\x1b[2J" not in written
    assert "\x1b]8" not in written, "a link"
    assert not set(said) & set("\x1b\x07\r\u202e\ud800")
    assert len(said.splitlines()) == lines
    return said


def test_a_plan_shows_what_comes_from_outside_as_plain_text(
    terminal: Console, capsys: pytest.CaptureFixture[str]
) -> None:
    report = PoolReport(pool=EVIL, demand=3, message=EVIL, next_try_at=NOW + timedelta(seconds=12))
    screen.plan_for_people(Plan(actions=ACTIONS, reports=(report,), strays_held=(STRAY,)), SNAPSHOT)
    said = check(terminal, capsys, lines=1 + len(ACTIONS) + 1 + 1)
    assert "(next try in 12 s)" in said


def test_a_status_shows_what_comes_from_outside_as_plain_text(
    terminal: Console, capsys: pytest.CaptureFixture[str]
) -> None:
    screen.status_for_people(status(EVIL))
    # The stack; pools, machines, what ended, each with a heading; runs, what waits for no pool, what waits;
    # runtimes; a refusal; the last pass.
    check(terminal, capsys, lines=1 + 2 + 2 + 1 + 1 + 6 + 1 + 1 + 2 + 1)


def status(text: str) -> dict[str, Any]:
    """A status in which every text is this one."""
    machine = {
        "name": text,
        "pool": text,
        "type": text,
        "location": text,
        "state": text,
        "running": 1,
        "slots": 2,
        "spot": True,
    }
    offer = {
        "type": text,
        "location": text,
        "spot": True,
        "class": text,
        "times": 3,
        "since": "2026-01-01T00:00:00.1",
        "message": text,
    }
    waits = {"run": 3, "pipeline": text, "waiting": text}
    return {
        "stack": text,
        "id": text,
        "now": NOW,
        "pools": [
            {
                "pool": text,
                "demand": 1,
                "message": text,
                "next_try_at": NOW + timedelta(seconds=5),
                "tried_at": NOW,
                "last_attempt": text,
                "refused": [offer],
            }
        ],
        "machines": [{**machine, "created_at": NOW, "seen_at": None}],
        "ended": [{"name": text, "type": text, "location": text, "spot": False, "ended_at": NOW, "reason": text}],
        "passes": [{"id": "machines-1", "at": NOW, "decided": text}],
        "attention": [],
        "runs": {text: 1},
        "unknown_pools": [{"pool": text, "runs": 2}],
        "waiting": [{"run": 1, "start": 2, "pipeline": text, "waiting": text}, *[waits] * 6],
        "runtimes": [{"pool": text, "warm": 1, "assigned": 0, "starting": 2, "problem": text}],
    }


def test_a_plan_without_actions_says_so(terminal: Console, capsys: pytest.CaptureFixture[str]) -> None:
    screen.plan_for_people(Plan(), replace(SNAPSHOT, unreadable={}))
    assert capsys.readouterr().out.strip() == "nothing to do"


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: type(action).__name__)
def test_every_action_describes_itself_in_one_printable_line(action: Action) -> None:
    line = screen.describe(action)
    assert line.isprintable()
    assert SHOWN in line


def test_a_description_says_what_is_done_to_what_and_why() -> None:
    two = (Candidate(type="small", location="a"), Candidate(type="large", location="b"))
    make = Make(pool="p", count=1, candidates=two, then_type="large", then_since=NOW, why="1 run waits")
    assert screen.describe(make) == "make 1 machine for p: 1 run waits; tried in turn: small in a, large in b"
    assert screen.describe(replace(make, count=2)).startswith("make 2 machines for p")
    remove = Remove(pool="p", name="orca-p-1", reason=Reason.LOST, only_idle=False, why="silent")
    assert screen.describe(remove) == "remove orca-p-1 (Lost): silent"
    assert (
        screen.describe(replace(remove, only_idle=True)) == "remove orca-p-1 (Lost), if it is still idle then: silent"
    )


def test_a_plan_for_programs_is_json_that_says_each_actions_kind() -> None:
    value = json.loads(json.dumps(screen.plan_for_programs(Plan(actions=ACTIONS)), default=str))
    assert [action["kind"] for action in value["actions"]] == [type(action).__name__ for action in ACTIONS]
    assert value["actions"][1]["reason"] == "Idle"
    assert value["actions"][4]["machine"]["name"] == EVIL


def test_ago_is_a_duration_in_whole_seconds_and_never_negative() -> None:
    assert screen.ago(NOW - timedelta(seconds=90.4), NOW) == duration_text(90)
    assert screen.ago(NOW + timedelta(seconds=5), NOW) == duration_text(0)


def test_ago_of_never_is_a_dash() -> None:
    assert screen.ago(None, NOW) == "-"
