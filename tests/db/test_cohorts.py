"""What the database knows of cohorts when the engine will not have one."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any, cast

import pytest

from orca_infra.db.connection import Database
from orca_infra.errors import OutcomeUnknown, SetupError, StateBroken
from orca_infra.log import make_log
from orca_infra.runtimes.observe import SQL as RUNTIMES
from orca_infra.stack.cohorts import Begun, Cohorts
from orca_infra.stack.operations import RecordedEngine


class Engine:
    """Refuses the state of one stack, and has lost all states."""

    def __init__(self) -> None:
        self.dropped: list[str] = []

    def require_state(self) -> None:
        raise SetupError("the state is not there")

    def drop(self, stack: str, **_: object) -> None:
        self.dropped.append(stack)
        if stack == "test.runs.1":
            raise StateBroken("its state is cut off")


def test_a_cohort_whose_state_is_broken_is_tried_once_and_keeps_no_other_from_being_dropped(database_url: str) -> None:
    database = Database(database_url)
    with database.transaction() as transaction:
        for number in (1, 2):
            transaction.run(
                "insert into orca.cohorts (stack, number, scope, ended_at, outcome) "
                "values ('test.runs.' || %(n)s::text, %(n)s, 'runs', now(), 'Done')",
                {"n": number},
            )
    engine = Engine()
    log = make_log(io.StringIO(), form="text")
    cohorts = Cohorts("runs", "test", "id", database=database, engine=cast("RecordedEngine", engine), log=log)
    assert cohorts.drop_empty() == 1
    assert engine.dropped == ["test.runs.1", "test.runs.2"]
    assert cohorts.drop_empty() == 0
    assert engine.dropped == ["test.runs.1", "test.runs.2"]
    with database.snapshot() as transaction:
        left: list[dict[str, Any]] = transaction.dicts("select stack, outcome from orca.cohorts")
    assert left == [{"stack": "test.runs.1", "outcome": "StateBroken"}]
    database.close()


def test_what_a_drop_left_that_was_cut_short_goes_with_the_stack_and_a_living_holders_lock_stays(
    database_url: str, tmp_path: Path
) -> None:
    """Such a drop lost the backend in the middle of it; nothing else comes upon the stack again."""
    database = Database(database_url)
    locks = tmp_path / ".pulumi" / "locks" / "organization" / "orca-infra" / "test.runs.1"
    history = tmp_path / ".pulumi" / "history" / "orca-infra"
    locks.mkdir(parents=True)
    for folder in (history / "test.runs.1", history / "test.runs.2"):
        folder.mkdir(parents=True)
        (folder / "1.history.json").write_text("{}")
    ended = subprocess.Popen(["true"])
    ended.wait()

    class Leaving:
        def drop(self, _: str) -> None:
            for name, pid in (("dead", ended.pid), ("alive", os.getpid())):
                holder = {"pid": pid, "username": "u", "hostname": socket.gethostname()}
                (locks / f"{name}.json").write_text(json.dumps(holder))

    engine = RecordedEngine(
        cast("Any", Leaving()), database, backend_url=tmp_path.as_uri(), verify=lambda: None, deadline_seconds=60
    )
    engine.drop("test.runs.1")
    assert [path.name for path in locks.iterdir()] == ["alive.json"]
    assert [path.name for path in (history / "test.runs.2").iterdir()] == ["1.history.json"]
    assert list((history / "test.runs.1").iterdir()) == []
    database.close()


class Cut:
    """An engine of which every `up` is cut short."""

    def require_state(self) -> None:
        """It is there."""

    def up_new(self, stack: str, _: object) -> None:
        raise OutcomeUnknown(f"{stack} was cut short")


def test_what_is_being_made_goes_with_no_other_cohort_and_only_the_books_of_others_are_closed(
    database_url: str,
) -> None:
    database = Database(database_url)
    log = make_log(io.StringIO(), form="text")
    cohorts = Cohorts("runtimes", "test", "id", database=database, engine=cast("RecordedEngine", Cut()), log=log)

    def want(name: str, *, taken: bool = False) -> None:
        with database.transaction() as transaction:
            transaction.run(
                "insert into orca.runtime_pods (name, namespace, environment, taken_at) "
                "values (%(name)s, 'n', 'e', case when %(taken)s then now() end)",
                {"name": name, "taken": taken},
            )
            transaction.run(
                "insert into orca.kube_objects (scope, namespace, kind, name, pod, rendered) "
                "values ('runtimes', 'n', 'Pod', %(name)s, %(name)s, '{}')",
                {"name": name},
            )

    def rows(query: Any) -> list[dict[str, Any]]:
        with database.snapshot() as transaction:
            return transaction.dicts(query)

    def names(begun: Begun | None) -> list[str]:
        return sorted(item.name for item in begun.objects) if begun is not None else []

    def outcomes() -> dict[str, str]:
        return {row["stack"]: row["outcome"] for row in rows("select stack, outcome from orca.cohorts")}

    want("a")
    first = cohorts.begin()
    assert first is not None
    with database.transaction() as transaction:  # of a loop that was killed
        transaction.run("insert into orca.cohorts (stack, number, scope) values ('test.runtimes.99', 99, 'runtimes')")
    cohorts.abandon()
    assert outcomes() == {first.stack: None, "test.runtimes.99": "OutcomeUnknown"}
    assert cohorts.begin() is None
    want("c")
    want("d", taken=True)
    second = cohorts.begin(only_awaited=True)
    assert second is not None
    assert (names(first), names(second)) == (["a"], ["d"])
    assert {row["pod"] for row in rows(RUNTIMES["being_made"])} == {"a", "d"}
    with pytest.raises(OutcomeUnknown):
        cohorts.make(first)
    assert {row["pod"] for row in rows(RUNTIMES["being_made"])} == {"d"}
    third = cohorts.begin()
    assert third is not None
    assert names(third) == ["a", "c"]
    cohorts.forsake(third)
    assert rows("select name from orca.kube_objects where declared_at is null") == [{"name": "c"}]
    cohorts.abandon()
    assert outcomes()[third.stack] == "SetupError"
    assert outcomes()[second.stack] is None
    database.close()


def test_no_cohort_is_begun_while_the_state_is_not_there(database_url: str) -> None:
    """Or each try would leave one that has to be dropped some day."""
    database = Database(database_url)
    with database.transaction() as transaction:
        transaction.run("insert into orca.run_clusters (run, start, pipeline, cpu_millis) values (1, 1, 'w', 1)")
        transaction.run(
            "insert into orca.kube_objects (scope, namespace, kind, name, rendered, run, start) "
            "values ('runs', 'n', 'Job', 'j', '{}', 1, 1)"
        )
    log = make_log(io.StringIO(), form="text")
    cohorts = Cohorts("runs", "test", "id", database=database, engine=cast("RecordedEngine", Engine()), log=log)
    with pytest.raises(SetupError, match="the state is not there"):
        cohorts.up()
    with database.snapshot() as transaction:
        assert transaction.value("select count(*) from orca.cohorts") == 0
        assert transaction.value("select count(*) from orca.kube_objects where cohort is null") == 1
    database.close()
