"""While a cohort's `up` is under way passes go on: what they answer, cull, stop and start, and how what is made meanwhile ends.

The API server lies behind a proxy that keeps the engine's requests for as long as a test wants, so that an `up` has not ended,
however slow or quick the machine is.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from orca_infra.errors import OutcomeUnknown
from orca_infra.kube.kinds import POD, RUNTIME_POOL, Ref
from orca_infra.loop.leader import holder, oust
from orca_infra.runtimes.living import end_runtime, find_runtime
from orca_infra.stack.beside import CohortsBeside
from orca_infra.stack.cohorts import Cohorts
from orca_infra.testing.cluster import TestCluster
from orca_infra.testing.cluster_faults import FaultyServer

if TYPE_CHECKING:
    from tests.cluster.runtimes.conftest import Room

POOL = "python-simple-pool"
#: The engine's requests for the pool's Pods: it applies them by name.
REFILL = rf"^PATCH \S+/pods/orca-runtime-{POOL}-"
ANY_POD = r"^PATCH \S+/pods/orca-runtime-"


@pytest.fixture
def server(cluster: TestCluster, tmp_path: Path) -> Iterator[FaultyServer]:
    with FaultyServer(cluster, tmp_path, seed=1) as server:
        yield server
        server.heal()


def under_way(room: Room) -> int:
    return len(room.rows("select from orca.cohorts where ended_at is null"))


def pool_ref(room: Room) -> Ref:
    return Ref(kind=RUNTIME_POOL, namespace=room.namespace, name=POOL)


def is_seen(room: Room) -> bool:
    """Whether the pool's status speaks of its present spec."""
    pool = room.kube.get(pool_ref(room))
    assert pool is not None
    return bool((pool.get("status") or {}).get("observedGeneration") == pool["metadata"]["generation"])


# The loop as a process.


@pytest.fixture
def loop(room: Room, server: FaultyServer) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts `orca-infra run` on this room, whose API server is the proxy."""
    # Whatever is nobody's would be deleted, and said, at once.
    with room.loops(ORCA_STRAY_GRACE_SECONDS="0.01", KUBECONFIG=str(server.kubeconfig)) as start:
        yield start
    server.heal()


def said(room: Room) -> list[dict[str, Any]]:
    lines = [line for log in sorted(room.folder.glob("loop-*.log")) for line in log.read_text().splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_while_a_large_refill_is_under_way_edits_are_seen_and_runtimes_culled_stopped_and_started(
    room: Room, server: FaultyServer, loop: Callable[[], subprocess.Popen[bytes]]
) -> None:
    running = loop()

    def comes(state: Callable[[], object]) -> None:
        def look() -> object:
            assert running.poll() is None, (room.folder / "loop-0.log").read_text()
            return state()

        room.wait_until(look, 60)

    room.make_environment()
    room.make_pool(size=2)
    comes(lambda: len(room.warm()) == 2 and not under_way(room))
    expiring, stopped = room.launch("jane"), room.launch("john")
    comes(lambda: len(room.warm()) == 2 and not under_way(room))
    before = set(room.pods())

    server.held = REFILL
    room.make_pool(size=60)
    comes(lambda: under_way(room) == 1 and server.faults > 0)
    [large] = [row["stack"] for row in room.rows("select stack from orca.cohorts where ended_at is null")]
    [made] = room.rows("select count(*) as n from orca.kube_objects where cohort = %(stack)s", stack=large)
    assert made["n"] == 58

    room.make_pool(size=60, burningRate=5)
    comes(lambda: is_seen(room))
    with room.database.transaction() as transaction:
        transaction.run("update orca.runtimes set expires_at = now() where id = %(id)s", {"id": expiring.id})
    comes(lambda: room.reason(expiring.pod) == "Culled" and room.pod(expiring.pod) is None)
    end_runtime(room.launching, stopped.id)
    comes(lambda: room.reason(stopped.pod) == "Stopped")
    cold = room.launch("jim", requests={"cpu": "600m"}, secrets={"A": "1"})
    assert not cold.warm
    comes(lambda: (one := find_runtime(room.database, cold.id)) is not None and one.state == "ready")
    comes(lambda: (room.secret(cold.pod) or {})["metadata"].get("ownerReferences"))
    end_runtime(room.launching, cold.id)
    comes(lambda: room.reason(cold.pod) == "Stopped")
    # And a pool that is made smaller: what is being made ends once that is known.
    room.make_pool(size=50, burningRate=5)
    surplus = "select name from orca.runtime_pods where ending_reason = 'Surplus'"
    comes(lambda: is_seen(room) and len(room.rows(surplus)) == 10)
    assert room.rows(surplus + " and ended_at is not null and name <> all(%(before)s)", before=list(before)) == []
    [still] = room.rows("select ended_at from orca.cohorts where stack = %(stack)s", stack=large)
    assert still["ended_at"] is None, "the refill was over already"

    server.held = ""
    comes(lambda: not under_way(room) and not room.rows(surplus + " and ended_at is null"))
    comes(lambda: set(room.pods()) == room.warm() and len(room.warm()) == 50)
    events = [line["event"] for line in said(room)]
    assert "stray deleted" not in events
    assert "strays held: an operator has to look" not in events
    assert not [line for line in said(room) if "Traceback" in str(line)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, None], ids=["told to stop", "killed", "ousted"])
def test_of_a_loop_that_ends_in_mid_up_the_next_goes_on_and_one_that_is_told_to_waits_for_its_engine(
    room: Room, server: FaultyServer, loop: Callable[[], subprocess.Popen[bytes]], number: signal.Signals | None
) -> None:
    first = loop()
    room.make_environment()
    room.make_pool(size=1)
    room.wait_until(lambda: len(room.warm()) == 1 and not under_way(room), 60)
    [old] = room.warm()
    uid = room.pods()[old]["metadata"]["uid"]
    server.held = REFILL
    room.make_pool(size=4)
    room.wait_until(lambda: under_way(room) == 1 and server.faults > 0, 60)
    [lead] = room.rows("select epoch from orca.lead")
    if number is None:
        oust(room.database.url)
        room.wait_until(lambda: not holder(room.database.url), 20)
        assert room.rows("select epoch from orca.lead") == [lead], "it leads beside what is under way still"
        server.held = ""
        room.wait_until(lambda: room.rows("select epoch from orca.lead") != [lead], 60)
        assert first.poll() is None
    elif number == signal.SIGTERM:
        first.send_signal(number)
        room.wait_until(lambda: any(line["event"] == "stopping" for line in said(room)), 20)
        assert first.poll() is None, "it left its engine behind"
        server.held = ""
        assert first.wait() == 0
        assert under_way(room) == 0
        assert room.rows("select from orca.engine_operations where ended_at is null") == []
        loop()
    else:
        first.send_signal(number)
        first.wait()
        loop()
        unknown = "select from orca.cohorts where outcome = 'OutcomeUnknown'"
        room.wait_until(lambda: room.rows(unknown) and under_way(room) == 1, 60)  # its own, beside what ends alone
        server.held = ""
    room.wait_until(lambda: len(room.warm()) == 4 and set(room.pods()) == room.warm() and not under_way(room), 60)
    assert room.pods()[old]["metadata"]["uid"] == uid
    assert "stray deleted" not in [line["event"] for line in said(room)]


# Pass by pass.


@dataclass
class Beside:
    """A room whose passes wait for no cohort, and whose engine reaches the API server through the proxy."""

    room: Room
    server: FaultyServer
    cohorts: CohortsBeside
    engine: Any

    def begin(self, pattern: str, *, answers_late: bool = False) -> None:
        """A pass begins a cohort, and the engine's requests for it are kept back from now on."""
        name = "late" if answers_late else "held"
        setattr(self.server, name, pattern)
        faults = self.server.faults
        self.room.run_pass()
        self.room.wait_until(lambda: self.server.faults > faults, 60)

    def end(self) -> None:
        """The server answers, and the cohorts end."""
        self.server.heal()
        assert self.cohorts.join(240)


@pytest.fixture
def beside(room: Room, server: FaultyServer) -> Iterator[Beside]:
    recorded = room.hands.cohorts._engine  # type: ignore[union-attr]
    recorded._engine._command._environment["KUBECONFIG"] = str(server.kubeconfig)
    assert isinstance(room.hands.cohorts, Cohorts)
    cohorts = CohortsBeside(room.hands.cohorts)
    room.hands = replace(room.hands, cohorts=cohorts)
    yield Beside(room, server, cohorts, recorded)
    server.heal()
    recorded._engine.interrupt()
    cohorts.join(60)


def only_living(room: Room, *, reasons: set[str]) -> None:
    """Passes until no cohort is under way and the cluster has just the Pods of the rows that live."""

    def settled() -> bool:
        living = {row["name"] for row in room.rows("select name from orca.runtime_pods where ended_at is null")}
        ending = room.rows("select from orca.runtime_pods where ending_reason is not null and ended_at is null")
        return not under_way(room) and not ending and set(room.pods()) == living == room.warm()

    room.until(settled, 60)
    ended = room.rows("select distinct reason from orca.runtime_pods where ended_at is not null")
    assert {row["reason"] for row in ended} == reasons
    assert "stray deleted" not in room.logged.getvalue()


LATE = pytest.mark.parametrize(
    "answers_late", [False, True], ids=["before they are there", "before their answers come"]
)


@LATE
@pytest.mark.parametrize("deleted", [False, True], ids=["smaller", "deleted"])
def test_pods_of_a_pool_that_is_made_smaller_or_deleted_in_mid_up_all_go(
    beside: Beside, answers_late: bool, deleted: bool
) -> None:
    room = beside.room
    room.make_environment()
    room.make_pool(size=5)
    beside.begin(REFILL, answers_late=answers_late)
    if answers_late:
        room.wait_until(room.pods)
    if deleted:
        room.kube.delete(pool_ref(room))
    else:
        room.make_pool(size=1)
    for _ in range(4):  # they end, are swept where they are there, and stay rows
        room.run_pass()
    rows = room.rows("select ending_reason, ended_at from orca.runtime_pods order by ending_reason")
    reason = "PoolDeleted" if deleted else "Surplus"
    assert [row["ending_reason"] for row in rows] == ([reason] * 5 if deleted else [reason] * 4 + [None])
    assert {row["ended_at"] for row in rows} == {None}
    assert under_way(room) == 1
    beside.end()
    only_living(room, reasons={reason})
    assert len(room.warm()) == (0 if deleted else 1)


@LATE
@pytest.mark.parametrize("reason", ["Stopped", "Culled"])
def test_a_cold_start_that_is_stopped_or_expires_in_mid_up_goes_with_its_secret(
    beside: Beside, answers_late: bool, reason: str
) -> None:
    room = beside.room
    room.make_environment()
    room.make_pool(size=0)
    cold = room.launch(secrets={"A": "1"})
    beside.begin(ANY_POD, answers_late=answers_late)
    if answers_late:
        room.wait_until(room.pods)
    if reason == "Stopped":
        end_runtime(room.launching, cold.id)
    else:
        with room.database.transaction() as transaction:
            transaction.run("update orca.runtimes set expires_at = now()")
    for _ in range(4):
        room.run_pass()
    [row] = room.rows("select ending_reason, ended_at from orca.runtime_pods")
    assert (row["ending_reason"], row["ended_at"]) == (reason, None)
    room.wait_until(lambda: room.secret(cold.pod) is None)
    assert room.runtime(cold.id)["ended_at"] is None
    beside.end()
    only_living(room, reasons={reason})
    assert room.runtime(cold.id)["reason"] == reason


def test_a_pod_deleted_by_hand_in_mid_up_ends_once_the_up_has_ended_though_that_made_it_again(beside: Beside) -> None:
    """Its answer is lost, too, so that the provider tries again: what comes of that is nobody's else."""
    room = beside.room
    room.make_environment()
    room.make_pool(size=1)
    beside.server.cut = 1.0
    beside.begin(REFILL, answers_late=True)
    room.wait_until(room.pods)
    [name] = room.pods()
    room.until(lambda: room.rows("select from orca.runtime_pods where uid is not null"))
    room.kube.delete(Ref(kind=POD, namespace=room.namespace, name=name))
    room.wait_until(lambda: room.pod(name) is None)
    for _ in range(3):
        room.run_pass()
    rows = room.rows("select ending_reason, ended_at from orca.runtime_pods order by created_at")
    # Another number is born in its place, and waits for a cohort.
    assert [(row["ending_reason"], row["ended_at"]) for row in rows] == [("Vanished", None), (None, None)]
    assert under_way(room) == 1
    beside.end()
    only_living(room, reasons={"Vanished"})
    assert name not in room.warm()
    assert len(room.warm()) == 1


def test_an_up_past_its_deadline_is_interrupted_and_every_pass_says_so_until_one_ends_well(
    beside: Beside, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orca_infra.stack.command.INTERRUPT_GRACE_SECONDS", 1.0)
    room = beside.room
    room.make_environment()
    room.make_pool(size=2)
    beside.engine._deadline_seconds = 1.0  # at which it may be anywhere: nothing is asked for before it is over
    beside.server.held = REFILL
    room.run_pass()
    assert beside.cohorts.join(240)
    assert room.rows("select distinct outcome from orca.cohorts") == [{"outcome": "OutcomeUnknown"}]
    room.make_pool(size=3)
    beside.engine._deadline_seconds = 300.0
    with pytest.raises(OutcomeUnknown, match=re.escape("after its deadline of 1 s")):
        room.run_pass()  # which begins another
    assert is_seen(room)
    assert under_way(room) == 1
    with pytest.raises(OutcomeUnknown):
        room.run_pass()
    beside.end()
    room.run_pass()
    only_living(room, reasons=set())
    assert len(room.warm()) == 3
