"""The record of the passes and `orca-infra explain`, on a real database; no engine, no cluster."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from typer.testing import CliRunner

from orca_infra.cli import app
from orca_infra.db.connection import Database
from orca_infra.errors import NotLeader, Refused, UserError
from orca_infra.machines.decide import decide
from orca_infra.machines.model import Demand, Limits, MachineRow, MachineType, Pool, Snapshot
from orca_infra.record.codec import decode
from orca_infra.record.decided import MachinesDecided, Scope
from orca_infra.record.passes import PassRecord

pytestmark = pytest.mark.postgres

LIMITS = Limits(try_seconds=60, boot_seconds=900, lost_seconds=300, stray_grace_seconds=60, stray_max=20, lost_max=3)
POOL = Pool(
    name="p",
    provider="local",
    image="worker:1",
    max_machines=3,
    idle_seconds=60,
    types=(MachineType(type="small", locations=("a",)),),
)


class Log:
    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, object]]] = []

    def info(self, event: str, **particulars: object) -> None:
        self.lines.append((event, particulars))

    warning = info


def rows(
    database: Database, query: Any = "select * from orca.passes order by id", **parameters: Any
) -> list[dict[str, Any]]:
    with database.snapshot() as transaction:
        return transaction.dicts(query, parameters)


def execute(database: Database, statement: Any, **parameters: Any) -> None:
    with database.transaction() as transaction:
        transaction.run(statement, parameters)


def now(database: Database) -> datetime:
    at: datetime = rows(database, "select now() as now")[0]["now"]
    return at


def decided(
    *, runs: int = 0, at: datetime | None = None, pools: tuple[Pool, ...] = (POOL,), **more: Any
) -> MachinesDecided:
    """A pass over pool p, for which so many runs wait."""
    at = at or datetime.now(UTC)
    demand = {"p": Demand(aged=runs, waiting=runs)} if runs else {}
    snapshot = Snapshot(now=at, stack_id="s", hearing_since=at - timedelta(hours=1), demand=demand, **more)
    return MachinesDecided(snapshot=snapshot, pools=pools, limits=LIMITS, plan=decide(snapshot, pools, LIMITS))


def recorder(database: Database, log: Log | None = None, *, passes: int = 100, seconds: float = 1e6) -> PassRecord:
    return PassRecord(database, Scope.MACHINES, passes=passes, seconds=seconds, log=log or Log())


def keep(record: PassRecord, one: MachinesDecided, *, changed: int = 0) -> None:
    with record.keeping(one) as kept:
        kept.changed = changed


def test_a_pass_that_acts_is_written_down_before_it_acts_and_ended_after(database: Database) -> None:
    one = decided(runs=1)
    with recorder(database).keeping(one) as kept:
        [row] = rows(database)
        assert (row["ended_at"], row["outcome"], row["about"]) == (None, None, ["p"])
        assert row["decisions"][0]["decided"] == "make 1 machine for p"
        [frame] = rows(database, "select record from orca.pass_frames")
        assert decode(row["record"], frame["record"]) == one
        kept.changed = 1
    [row] = rows(database)
    assert (row["outcome"], row["changed"], row["decided_at"]) == ("Done", 1, one.snapshot.now)


def test_a_pass_with_nothing_to_do_keeps_nothing_and_asks_the_database_nothing(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = recorder(database)
    keep(record, decided())
    monkeypatch.delattr(Database, "transaction")
    monkeypatch.delattr(Database, "snapshot")
    for _ in range(3):
        keep(record, decided())
    monkeypatch.undo()
    assert rows(database) == []


def test_what_was_open_from_before_and_is_done_now_is_kept(database: Database) -> None:
    keep(recorder(database), decided(), changed=2)
    [row] = rows(database)
    assert (row["changed"], row["outcome"]) == (2, "Done")


def test_another_reason_for_doing_nothing_is_kept_once(database: Database) -> None:
    record = recorder(database)
    keep(record, decided())
    full = replace(POOL, max_machines=0)
    for runs in (1, 1, 2):
        keep(record, decided(runs=runs, pools=(full,)))
    [row] = rows(database)
    assert [(one["decided"], one["why"], one["acts"]) for one in row["decisions"]] == [
        (
            "make nothing for p, where 1 run waits for a machine",
            "the pool has 0 of 0 machines (max_machines)",
            False,
        )
    ]
    keep(recorder(database), decided(runs=1, pools=(full,)))  # the next loop knows what the last one said
    assert len(rows(database)) == 1
    keep(recorder(database), decided())
    assert len(rows(database)) == 2


def test_what_is_done_again_in_vain_is_kept_once(database: Database) -> None:
    record = recorder(database)
    for _ in range(3):
        keep(record, decided(runs=1))
    assert len(rows(database)) == 1


def test_an_error_is_kept_with_its_words_and_goes_on(database: Database) -> None:
    record = recorder(database)
    for _ in range(2):
        with pytest.raises(Refused, match="the API server"), record.keeping(decided(runs=1)):
            raise Refused("no, says the API server")
    [row] = rows(database)
    assert (row["outcome"], row["message"]) == ("Refused", "no, says the API server")


def test_an_error_of_what_an_earlier_pass_has_begun_is_kept_once(database: Database) -> None:
    record = recorder(database)
    keep(record, decided())
    for _ in range(3):
        with pytest.raises(Refused), record.keeping(decided()):
            raise Refused("no, says the API server")
    [row] = rows(database)
    assert (row["outcome"], [one["acts"] for one in row["decisions"]]) == ("Refused", [False])
    keep(record, decided())
    with pytest.raises(Refused), record.keeping(decided()):
        raise Refused("no, says the API server")
    assert len(rows(database)) == 2


def test_who_leads_no_more_writes_nothing_more(database: Database) -> None:
    with pytest.raises(NotLeader), recorder(database).keeping(decided(runs=1)):
        raise NotLeader("another does")
    [row] = rows(database)
    assert row["outcome"] is None


def test_what_cannot_be_written_down_is_done_all_the_same_and_said(database: Database) -> None:
    log = Log()
    execute(database, "alter table orca.passes rename to elsewhere")
    done = False
    with recorder(database, log).keeping(decided(runs=1)) as kept:
        done = True
        kept.changed = 1
    execute(database, "alter table orca.elsewhere rename to passes")
    assert done
    assert [event for event, _ in log.lines] == ["pass not recorded"] * len(log.lines)
    assert log.lines
    assert rows(database) == []


def test_the_number_of_passes_kept_is_bounded(database: Database) -> None:
    record = recorder(database, passes=3)
    for _ in range(6):
        keep(record, decided(runs=1), changed=1)
    execute(
        database,
        "insert into orca.passes (scope, decided_at, version, about, decisions, record) "
        "values ('runs', now(), '', '{}', '[]', '')",
    )
    keep(record, decided(runs=1), changed=1)
    assert [row["scope"] for row in rows(database)] == ["machines", "machines", "runs", "machines"]
    assert rows(database, "select id from orca.passes where scope = 'machines' order by id")[0]["id"] == 5


def test_a_pass_is_kept_no_longer_than_its_time(database: Database) -> None:
    record = recorder(database, seconds=3600)
    keep(record, decided(runs=1, at=datetime.now(UTC) - timedelta(hours=2)), changed=1)
    keep(record, decided(runs=1), changed=1)
    assert len(rows(database)) == 1
    execute(database, "update orca.passes set decided_at = now() - interval '2 hours'")
    record.prune()
    assert rows(database) == []


def row_of(number: int, at: datetime) -> MachineRow:
    made_at = at - timedelta(hours=1)
    return MachineRow(
        name=f"orca-p-{number}", pool="p", number=number, provider="local", type="small", location="a",
        created_at=made_at, uid=f"u{number}", confirmed_at=made_at, first_seen_at=made_at, seen_at=at, slots=1, running=1,
    )  # fmt: skip


def test_passes_over_many_machines_are_kept_against_a_few_whole_ones_and_decide_the_same(database: Database) -> None:
    record = recorder(database, passes=12)
    machines = [row_of(number, datetime.now(UTC)) for number in range(400)]
    for number in range(400, 500):
        at = datetime.now(UTC)
        machines = [replace(row, seen_at=at) for row in machines] + [row_of(number, at)]
        keep(
            record,
            decided(at=at, runs=1, machines=tuple(machines), pools=(replace(POOL, max_machines=999),)),
            changed=1,
        )
    kept = rows(
        database, "select p.record, f.record as whole from orca.passes p join orca.pass_frames f on f.id = p.frame"
    )
    assert len(kept) == 12
    for row in kept:
        one = decode(row["record"], row["whole"])
        assert isinstance(one, MachinesDecided)
        assert one.again() == one.plan
        assert len(one.snapshot.machines) >= 488
        assert len(row["record"]) < len(row["whole"]) / 2
    frames = rows(database, "select id from orca.pass_frames order by id")
    assert 1 <= len(frames) <= 2
    assert frames[-1]["id"] > 1  # so much had changed that another was taken


def test_a_whole_pass_that_is_gone_is_missed_by_no_later_one(database: Database) -> None:
    record = recorder(database)
    keep(record, decided(runs=1), changed=1)
    execute(database, "truncate orca.passes, orca.pass_frames")
    one = decided(runs=1)
    keep(record, one, changed=1)
    [row] = rows(database, "select p.*, f.record as whole from orca.passes p join orca.pass_frames f on f.id = p.frame")
    assert decode(row["record"], row["whole"]) == one


def test_nothing_is_kept_when_no_pass_shall_be(database: Database) -> None:
    keep(recorder(database, passes=0), decided(runs=1), changed=1)
    assert rows(database) == []


# What a person asks.

Run = Callable[..., str]


@pytest.fixture
def run(command: Run) -> Run:
    """What `orca-infra explain ...` prints."""
    return partial(command, "explain")


def insert_machine(database: Database, name: str, number: int, *, ended: str | None = None) -> None:
    execute(
        database,
        "insert into orca.pool_machines (name, pool, number, provider, type, location, rendered, token_hash, uid, confirmed_at, "
        "revoked_at, ended_at, reason) values (%(name)s, 'p', %(number)s, 'local', 'small', 'a', '{}', '', %(name)s, now(), "
        "case when %(ended)s::text is not null then now() end, case when %(ended)s::text is not null then now() end, %(ended)s)",
        name=name,
        number=number,
        ended=ended,
    )


def made_one(database: Database, name: str = "orca-p-1") -> MachinesDecided:
    """A pass that makes a machine."""
    one = decided(runs=1, at=now(database))
    with recorder(database).keeping(one) as kept:
        insert_machine(database, name, int(name.rpartition("-")[2]))
        kept.changed = 1
    return one


def test_the_latest_passes_in_a_table(database: Database, run: Run) -> None:
    assert run() == "no pass that changed something is kept\n"
    made_one(database)
    with pytest.raises(Refused), recorder(database).keeping(decided(runs=1)):
        raise Refused("no")
    head, failed, made = run().splitlines()
    assert head.split() == ["pass", "ago", "decided", "came", "to"]
    assert failed.startswith("machines-2 ")
    assert "Refused after" in failed
    assert made.startswith("machines-1 ")
    assert "make 1 machine for p" in made
    assert "changed 1 in" in made
    assert [one["id"] for one in json.loads(run("--json", "--limit", "1"))] == ["machines-2"]


def test_status_names_the_last_pass_of_each_scope(database: Database, run: Run) -> None:
    made_one(database)
    made_one(database, "orca-p-2")
    result = CliRunner().invoke(app, ["status"], catch_exceptions=False)
    assert re.search(
        r"^last change: machines-2, .* ago: make 1 machine for p, and 1 more$", result.output, re.MULTILINE
    )
    shown = json.loads(CliRunner().invoke(app, ["status", "--json"], catch_exceptions=False).output)
    assert [one["id"] for one in shown["passes"]] == ["machines-2"]


def test_one_pass_with_its_reasons_and_for_programs_with_what_it_knew(database: Database, run: Run) -> None:
    one = made_one(database)
    said = run("machines-1")
    assert "by version 0.1.0; changed 1 in" in said
    assert "1 run waits; tried in turn: small in a" in said
    assert "orca-p-1 was made: small in a" in said
    shown = json.loads(run("machines-1", "--json"))
    assert shown["record"]["limits"]["try_seconds"] == LIMITS.try_seconds
    assert shown["record"]["plan"]["actions"][0]["kind"] == "Make"
    assert datetime.fromisoformat(shown["record"]["snapshot"]["now"]) == one.snapshot.now


def test_a_pass_is_decided_again(database: Database, run: Run) -> None:
    made_one(database)
    assert run("machines-1", "--again").endswith("this version decides the same\n")
    other = decided(runs=1)
    keep(recorder(database), replace(other, plan=replace(other.plan, reports=())), changed=1)
    assert run("machines-2", "--again", code=1).endswith("this version decides otherwise\n")
    assert json.loads(run("machines-2", "--again", "--json", code=1))["agrees"] is False


def test_a_pass_that_was_cut_short_is_told_from_one_under_way(database: Database, run: Run) -> None:
    with pytest.raises(NotLeader), recorder(database).keeping(decided(runs=1)):
        raise NotLeader("killed")
    assert "under way" in run("machines-1")
    made_one(database)
    assert "cut short: the loop ended in it" in run("machines-1")


def test_a_machines_history_from_its_making_to_its_end(database: Database, run: Run) -> None:
    made_one(database)
    assert re.match(r"orca-p-1 \(small in a\) is booting, made \d+ m?s ago\n", run("orca-p-1"))
    at = now(database)
    made = MachineRow(
        name="orca-p-1", pool="p", number=1, provider="local", type="small", location="a",
        created_at=at - timedelta(hours=1), uid="u", confirmed_at=at - timedelta(hours=1),
        first_seen_at=at - timedelta(minutes=5), seen_at=at, slots=1,
    )  # fmt: skip
    with recorder(database).keeping(decided(at=at, machines=(made,))) as kept:
        execute(database, "update orca.pool_machines set revoked_at = now(), ended_at = now(), reason = 'Idle'")
        kept.changed = 1
    said = run("orca-p-1").splitlines()
    assert re.fullmatch(r"orca-p-1 \(small in a\) ended .* ago: Idle", said[0])
    assert "remove orca-p-1 (Idle), if it is still idle then" in said[2]
    assert "it has run nothing for 300 s, and the pool has no demand" in said[2]
    assert "orca-p-1 was made: small in a" in said[3]
    assert "1 run waits" in said[3]
    about = json.loads(run("orca-p-1", "--json"))
    assert [line["id"] for line in about["history"]] == ["machines-2", "machines-1"]
    assert about["history"][0]["why"].startswith("it has run nothing")


def test_why_a_pool_makes_nothing(database: Database, run: Run) -> None:
    execute(
        database,
        "insert into orca.pool_status (pool, demand, message, next_try_at, tried_at, last_attempt) values "
        "('p', 2, 'waiting for the next try', now() + interval '50 s', now(), 'no capacity for small in a')",
    )
    made_one(database)
    said = run("p").splitlines()
    assert said[0] == "pool p: 2 runs wait for a machine: waiting for the next try"
    assert said[1].startswith("its next try comes in ")
    assert re.fullmatch(r"its last try, .* ago: no capacity for small in a", said[2])
    assert any("make 1 machine for p" in line for line in said)


def queue(database: Database, pipeline: str, **columns: Any) -> int:
    values = {"placement": None, "paused": False, "max_runs": None, "image": "image:1", "workers": 0, **columns}
    execute(
        database,
        "insert into orca.pipelines (name, placement, paused, max_runs, image, workers) values "
        "(%(name)s, %(placement)s, %(paused)s, %(max_runs)s, %(image)s, %(workers)s) on conflict do nothing",
        name=pipeline,
        **values,
    )
    with database.transaction() as transaction:
        return int(
            transaction.value("insert into orca.runs (pipeline) values (%(name)s) returning id", {"name": pipeline})
        )


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"paused": True}, "its pipeline is paused"),
        ({"placement": "worker:p", "max_runs": 0}, "its pipeline runs max_runs (0) already"),
        ({"placement": "worker:q"}, "it waits for pool q, and no pass has seen such a pool"),
        ({"placement": "worker:p"}, "pool p: 1 run waits for a machine: 1 machine is still booting"),
        ({"image": None}, "its pipeline has no image"),
        ({"workers": 9}, "it needs 9750m of CPU, more than the whole budget of 1000m"),
        ({"max_runs": 0}, "its pipeline runs max_runs (0) already"),
        ({}, "nothing holds it: the next pass starts it"),
    ],
)
def test_why_a_run_waits(
    database: Database, run: Run, monkeypatch: pytest.MonkeyPatch, columns: dict[str, Any], said: str
) -> None:
    monkeypatch.setenv("ORCA_RUNNER", "kubernetes")
    monkeypatch.setenv("ORCA_VCPU_BUDGET", "1")
    execute(
        database, "insert into orca.pool_status (pool, demand, message) values ('p', 1, '1 machine is still booting')"
    )
    number = queue(database, "reports", **columns)
    about, why, *_ = run(str(number)).splitlines()
    assert about.startswith(f"run {number} of reports is queued since ")
    assert why == said


def test_a_run_behind_another_and_a_run_without_a_runner(
    database: Database, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (queue(database, name) for name in ("a", "b", "c"))
    assert "ORCA_RUNNER is not set" in run(str(first))
    monkeypatch.setenv("ORCA_RUNNER", "kubernetes")
    monkeypatch.setenv("ORCA_VCPU_BUDGET", "750m")
    assert "nothing holds it" in run(str(first))
    assert "it needs 500m of CPU, and 250m of the budget is free" in run(str(second))
    assert f"run {second} is before it and does not fit what is free of the budget" in run(str(third))


def test_what_nobody_knows_is_said_in_one_sentence(database: Database, run: Run) -> None:
    for name in ("orca-p-9", "77", "runs-1"):
        with pytest.raises(UserError, match="`orca-infra explain`"):
            run(name)
    made_one(database)
    with pytest.raises(UserError, match="--again is for passes"):
        run("orca-p-1", "--again")
    assert "make 1 machine for p" in run("1")  # no run has this number, and a pass has
    assert "is queued" in run(str(queue(database, "reports")))
    with pytest.raises(UserError, match="no pass runs-1"):
        run("runs-1")
