"""Claims of warm Pods, at the same moment as something else, by their rows alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, LiteralString

import pytest

from orca_infra.db.connection import Database
from orca_infra.errors import Transient
from orca_infra.runtimes.model import Environment, Pool
from orca_infra.runtimes.observe import SQL
from orca_infra.runtimes.render import render_warm
from orca_infra.runtimes.rows import PodNotes, lock_pods, next_numbers, record_pods
from orca_infra.stack.cohorts import SQL as COHORTS

STACK_ID = "astackoftests234"
CLAIM = {
    "namespace": "n",
    "environment": "e",
    "user": "u",
    "key": None,
    "pool": None,
    "requests": "{}",
    "placement": None,
}


def wait_in_pool(database: Database, number: int, **pool: Any) -> str:
    """A Pod that waits Ready, by its row alone."""
    given: dict[str, Any] = {"namespace": "n", "name": "p", "uid": "u", "environment": "e", "size": 3}
    environment = Environment(namespace="n", name="e", image="i")
    pod = render_warm(Pool(**{**given, **pool}), environment, number, STACK_ID)
    with database.transaction() as transaction:
        record_pods(transaction, [pod], taken=False)
        transaction.run(
            "update orca.runtime_pods set ready_at = now(), uid = %(n)s where name = %(n)s", {"n": pod.name}
        )
    return pod.name


def claim(database: Database, **more: Any) -> str | None:
    with database.transaction() as transaction:
        found = transaction.dicts(SQL["claim"], {**CLAIM, **more})
    return str(found[0]["pod"]) if found else None


def end_waiting(database: Database, name: str) -> int:
    with database.transaction() as transaction:
        return transaction.run(
            SQL["begin_ending"], {"name": name, "reason": "Surplus", "detail": "", "only_waiting": True}
        )


def test_a_pod_taken_at_the_moment_that_it_was_to_end_lives_on(
    database: Database, background: Any, wait_until: Callable[..., None]
) -> None:
    name = wait_in_pool(database, 1)
    with database.transaction() as launching:
        assert launching.dicts(SQL["claim"], CLAIM)[0]["pod"] == name
        ending = background(lambda: end_waiting(database, name))
        wait_until(lambda: blocked(database) == 1)
    ending.join()
    assert ending.result == 0


def test_a_pod_that_ends_at_the_moment_that_it_was_to_be_taken_is_passed_over(database: Database) -> None:
    first, second = wait_in_pool(database, 1), wait_in_pool(database, 2)
    with database.transaction() as passing:
        passing.run(SQL["begin_ending"], {"name": first, "reason": "Surplus", "detail": "", "only_waiting": True})
        assert claim(database) == second
    assert claim(database) is None


def blocked(database: Database) -> int:
    with database.snapshot() as transaction:
        return int(
            transaction.value(
                "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
            )
        )


@pytest.mark.parametrize(
    ("asked", "taken"),
    [
        ({}, "small"),
        ({"requests": '{"cpu": 1000}'}, "small"),
        ({"requests": '{"cpu": 1001}'}, "large"),
        ({"requests": '{"memory": 1}'}, "large"),
        ({"requests": '{"cpu": 4001}'}, None),
        ({"requests": '{"nvidia.com/gpu": 1000}'}, None),
        ({"placement": '{"labels": {"disk": "ssd"}}'}, "large"),
        ({"placement": '{"labels": {}}'}, "small"),
        ({"placement": '{"labels": {"disk": "ssd", "a": "b"}}'}, None),
        ({"pool": "large"}, "large"),
        ({"pool": "large", "requests": '{"cpu": 5000}'}, None),
        ({"environment": "other"}, None),
        ({"namespace": "other"}, None),
    ],
)
def test_what_fits_a_pod(database: Database, asked: dict[str, str], taken: str | None) -> None:
    large = {"requests": {"cpu": "4", "memory": "8Gi"}}
    names = {
        "large": wait_in_pool(database, 1, name="large", resources=large, node_selector={"disk": "ssd"}),
        "small": wait_in_pool(database, 2, name="small", resources={"requests": {"cpu": "1"}}),
    }
    assert claim(database, **asked) == (names[taken] if taken else None)


def test_numbers_go_on_above_what_the_cluster_shows(database: Database) -> None:
    def next_number(seen: int) -> int:
        with database.transaction() as transaction:
            transaction.run(SQL["skip_numbers"], {"seen": seen})
            return next_numbers(transaction, 1)[0]

    assert [next_number(seen) for seen in (1, 0, 3, 4, 9, 2)] == [2, 3, 4, 5, 10, 11]


def seen(name: str, *, phase: str = "Running", ready: bool = True, **more: Any) -> dict[str, Any]:
    """A Pod as a watch shows it."""
    metadata = {"name": name, "namespace": "n", "uid": name, "creationTimestamp": "2026-05-01T12:00:00Z"}
    status = {"phase": phase, "conditions": [{"type": "Ready", "status": str(ready)}]}
    return {"metadata": {**metadata, **more}, "status": status}


def unready(database: Database, *names: str) -> None:
    with database.transaction() as transaction:
        transaction.run(
            "update orca.runtime_pods set ready_at = null, uid = null where name = any(%(names)s)",
            {"names": list(names)},
        )


def test_a_touch_is_news_once_and_asks_the_database_nothing(database: Database) -> None:
    name = wait_in_pool(database, 1)
    notes = PodNotes(database)

    def note(item: dict[str, Any]) -> bool:
        return any([notes.note(item), notes.write()])

    assert not note(seen(name))
    assert note(seen(name, deletionTimestamp="2026-05-01T12:00:00Z"))
    assert note(seen(name))
    database.close()
    touched = {"orca.runtime": "r", "orca.touched": "1"}
    assert note(seen(name, annotations=touched))
    assert not note(seen(name, annotations={**touched, "orca.touched": "2"}))
    with pytest.raises(Exception, match="closed"):
        note(seen(name, deletionTimestamp="2026-05-01T12:00:00Z"))


def test_pods_on_their_way_to_ready_ask_the_database_nothing_and_those_that_are_can_all_be_taken(
    database: Database,
) -> None:
    names = [wait_in_pool(database, number) for number in (1, 2, 3)]
    unready(database, *names)
    closed = Database(database.url)
    closed.close()
    notes = PodNotes(closed)
    for name in names:
        for item in (seen(name, phase="Pending", ready=False), seen(name, ready=False)):
            assert not notes.note(item)
            assert not notes.write()
    notes = PodNotes(database)
    for name in names:
        notes.note(seen(name))
    assert notes.write()
    assert not notes.write()
    assert [claim(database) for _ in range(4)] == [*names, None]


def test_a_pod_that_was_ready_before_anybody_watched_can_not_be_taken_once_it_is_seen_that_it_is_not(
    database: Database,
) -> None:
    notes = PodNotes(database)
    notes.note(seen(wait_in_pool(database, 1), ready=False))
    assert notes.write()
    assert claim(database) is None


def test_a_pod_in_trouble_is_news_though_it_was_never_ready(database: Database) -> None:
    notes = PodNotes(database)
    item = seen(wait_in_pool(database, 1), phase="Pending", ready=False)
    assert not notes.note(item)
    waiting = {"state": {"waiting": {"reason": "ImagePullBackOff"}}}
    item["status"]["containerStatuses"] = [waiting]
    assert notes.note(item)
    assert not notes.note(item)


def test_what_could_not_be_written_is_written_when_it_is_shown_again(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = wait_in_pool(database, 1)
    unready(database, name)
    notes = PodNotes(database)
    notes.note(seen(name))
    with monkeypatch.context() as patch:
        patch.setattr(Database, "transaction", lambda _: (_ for _ in ()).throw(Transient("away")))
        with pytest.raises(Transient):
            notes.write()
    assert not notes.write()
    notes.note(seen(name))
    assert notes.write()
    assert claim(database) == name


def test_writers_of_many_pods_wait_for_each_other_and_not_for_ever(
    database: Database, wait_until: Callable[..., None]
) -> None:
    first, last = sorted(wait_in_pool(database, number) for number in (1, 2))
    with database.transaction() as mine:
        lock_pods(mine, [first])

        def write() -> None:
            with database.transaction() as theirs:
                lock_pods(theirs, [last, first])

        other = threading.Thread(target=write)
        other.start()
        wait_until(lambda: waits_for_a_lock(database))
        mine.run("set local lock_timeout = '1s'")
        lock_pods(mine, [last])
    other.join()


def waits_for_a_lock(database: Database) -> bool:
    with database.snapshot() as transaction:
        return bool(transaction.value("select exists (select from pg_locks where not granted)"))


def test_a_claim_reads_the_first_pod_that_fits_and_none_beside_it(database: Database) -> None:
    for number in range(1, 31):
        wait_in_pool(database, number)
    reads = "select seq_tup_read, idx_tup_fetch from pg_stat_xact_user_tables where relname = 'runtime_pods'"
    with database.transaction() as transaction:
        [before] = transaction.dicts(reads)  # what this connection has read since its last report
        assert len(transaction.dicts(SQL["claim"], CLAIM)) == 1
        [after] = transaction.dicts(reads)
    assert after["seq_tup_read"] == before["seq_tup_read"]
    assert after["idx_tup_fetch"] - before["idx_tup_fetch"] < 10


@pytest.mark.parametrize(
    ("query", "parameters"),
    [
        (SQL["live_pods"], {}),
        (COHORTS["open_objects"], {"scope": "runtimes", "limit": 1000, "only_awaited": False}),
    ],
)
def test_of_many_pods_that_were_just_born_none_is_compared_with_each_other(
    database: Database, query: LiteralString, parameters: dict[str, Any]
) -> None:
    environment = Environment(namespace="n", name="e", image="i")
    pool = Pool(namespace="n", name="p", uid="u", environment="e", size=300)
    with database.transaction() as transaction:
        record_pods(transaction, [render_warm(pool, environment, n, STACK_ID) for n in range(1, 301)], taken=False)
    with database.snapshot() as transaction:
        transaction.join_many()
        [found] = transaction.value("explain (analyze, format json) " + query, parameters)

    def compared_in_vain(node: dict[str, Any]) -> float:
        below = sum(compared_in_vain(one) for one in node.get("Plans", []))
        return float(node.get("Rows Removed by Join Filter", 0)) * float(node["Actual Loops"]) + below

    assert found["Plan"]["Actual Rows"] == 300
    assert compared_in_vain(found["Plan"]) < 300


def test_credits_are_the_seconds_since_it_could_be_used_and_never_past_its_time(database: Database) -> None:
    def seconds(assigned: int, ready: int | None, until: int, expires: int | None) -> float:
        parameters = {"a": assigned, "r": ready, "u": until, "e": expires}
        moments = ", ".join(f"to_timestamp(%({key})s::int)" for key in parameters)
        with database.snapshot() as transaction:
            return float(transaction.value(f"select orca.runtime_seconds({moments})", parameters))

    assert seconds(10, 5, 30, None) == seconds(10, 5, 30, 40) == 20
    assert seconds(10, 5, 30, 25) == 15
    assert seconds(10, 15, 30, 25) == 10
    assert seconds(10, None, 30, 25) == seconds(10, 40, 30, 25) == seconds(10, 5, 9, None) == 0
