"""How runtimes end, what they cost, and what nobody wants."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest

from orca_infra.errors import OutcomeUnknown, Refused
from orca_infra.kube.client import Kube
from orca_infra.kube.kinds import NAMESPACE, POD, RUNTIME_POOL, SECRET, Kind, Ref
from orca_infra.kube.reading import Listing
from orca_infra.loop.cluster_passes import RuntimePasses
from orca_infra.runtimes.apply import apply
from orca_infra.runtimes.living import end_runtime, extend_runtime, list_runtimes, read_usage
from orca_infra.runtimes.model import RuntimePlan
from orca_infra.runtimes.observe import observe
from orca_infra.runtimes.rows import PodNotes, prune
from orca_infra.settings import read_settings
from orca_infra.surroundings import open_surroundings

if TYPE_CHECKING:
    from tests.cluster.runtimes.conftest import Room


def test_a_runtime_is_culled_at_its_time_though_its_pool_is_gone(room: Room) -> None:
    room.make_environment()
    room.make_pool(size=1, burningRate=2, cull={"seconds": 1})
    room.until(lambda: len(room.warm()) == 1)
    taken = room.launch(secrets={"A": "1"})
    room.kube.delete(Ref(kind=RUNTIME_POOL, namespace=room.namespace, name="python-simple-pool"))
    due = room.run_pass().next_due_at
    assert due is None or due == taken.expires_at
    room.until(lambda: room.reason(taken.pod) == "Culled")
    ended = room.runtime(taken.id)
    assert ended["credits"] == pytest.approx(2.0)
    assert room.pod(taken.pod) is None
    assert room.secret(taken.pod) is None


def test_a_loop_that_was_away_culls_what_expired_meanwhile_and_charges_no_more_than_the_expiry(room: Room) -> None:
    room.make_environment()
    room.make_pool(size=2, burningRate=2, cull={"seconds": 60})
    room.until(lambda: len(room.warm()) == 2)
    expired, other = room.launch("jane"), room.launch("john")
    with room.database.transaction() as transaction:  # an hour passes, and nobody makes passes
        transaction.run(
            "update orca.runtimes set assigned_at = assigned_at - interval '1 hour', "
            "expires_at = expires_at - interval '1 hour'"
        )
        transaction.run(
            "update orca.runtime_pods set ready_at = ready_at - interval '1 hour' where taken_at is not null"
        )
        transaction.run("update orca.runtimes set expires_at = now() + interval '50 s' where user_name = 'john'")
    assert [line.credits for line in read_usage(room.database, "jane")] == [pytest.approx(120)]
    with pytest.raises(Refused, match="the time of runtime .* is over"):
        extend_runtime(room.launching, expired.id, 60)
    plan = room.run_pass()
    assert [(ending.name, ending.reason) for ending in plan.endings] == [(expired.pod, "Culled")]
    assert plan.next_due_at == list_runtimes(room.database, "john")[0].expires_at
    room.until(lambda: room.reason(expired.pod) == "Culled")
    [line] = read_usage(room.database, "jane")
    assert line.credits == pytest.approx(120)
    assert line.seconds == pytest.approx(60)
    assert line.reason == "Culled"
    prune(room.database, 0)
    assert read_usage(room.database, "jane") == [line]

    extended = extend_runtime(room.launching, other.id, 600)
    assert extended is not None
    again = extend_runtime(room.launching, other.id, 60)
    assert again is not None
    assert again.expires_at == extended.expires_at
    kept = extend_runtime(room.launching, other.id, 99999, within_cull=True)
    assert kept is not None
    assert kept.expires_at == extended.expires_at
    end_runtime(room.launching, other.id)
    assert extend_runtime(room.launching, other.id, 60) is None


def test_a_pass_says_when_the_next_has_to_be_made(room: Room) -> None:
    here = open_surroundings(read_settings(room.product_environment()), say=lambda _: None)
    ref = Ref(kind=NAMESPACE, name=room.namespace)
    room.kube.patch(ref, {"metadata": {"labels": {"orca.stack": room.stack_id}}})
    recorded = room.hands.cohorts._engine  # type: ignore[union-attr]
    passes = RuntimePasses(here, room.kube, recorded, verify=lambda: None, log=room.hands.log)
    try:
        room.make_environment()
        room.make_pool(size=1, cull={"seconds": 3600})
        room.wait_until(lambda: passes.run() >= 0 and room.warm(), 20)
        due = [passes.next_in_seconds]
        room.launch()
        passes.run()
        due.append(passes.next_in_seconds)
        assert due[0] is None
        assert due[1] is not None
        assert 0 < due[1] <= 3600
    finally:
        here.close()


def test_a_cold_start_costs_nothing_before_its_pod_is_ready(room: Room) -> None:
    room.make_environment()
    room.make_pool(size=0, burningRate=2)
    cold = room.launch()
    [before] = read_usage(room.database, "jane")
    assert (before.credits, before.ended_at) == (0, None)
    room.until(lambda: list_runtimes(room.database)[0].state == "ready")
    with room.database.transaction() as transaction:
        transaction.run("update orca.runtimes set assigned_at = assigned_at - interval '1 hour'")
    [line] = read_usage(room.database, "jane")
    assert 0 < line.credits < 2 * 1800  # not for the hour
    end_runtime(room.launching, cold.id)
    room.until(lambda: room.reason(cold.pod) == "Stopped")
    [line] = read_usage(room.database, "jane")
    assert line.credits == pytest.approx(2 * line.seconds)
    assert line.seconds < 1800


def test_a_launch_whose_process_died_is_completed_by_its_retry_or_else_abandoned(room: Room) -> None:
    room.fill(size=2)
    for user in ("jane", "john"):
        room.launch(user, idempotency_key="k", secrets={"A": "first"})
    with room.database.transaction() as transaction:
        transaction.run("update orca.runtimes set secret_made_at = null")
        transaction.run("update orca.runtime_pods set taken_at = now() - interval '1 hour' where taken_at is not null")
    again = room.launch("jane", idempotency_key="k", secrets={"B": "second"})
    assert room.secret_values(again.pod) == {"B": "second"}
    room.until(lambda: room.rows("select from orca.runtimes where reason = 'Abandoned' and user_name = 'john'"))
    assert [runtime.user for runtime in list_runtimes(room.database)] == ["jane"]


class Behind:
    """The cluster as it was before any Pod was Ready; what happens once Pods were listed."""

    def __init__(self, kube: Kube, *, then: Callable[[], object]) -> None:
        self._kube, self._then = kube, then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kube, name)

    def list(self, kind: Kind, **selected: Any) -> Listing:
        found = self._kube.list(kind, **selected)
        if kind != POD:
            return found
        self._then()
        return replace(found, items=tuple({**item, "status": {"phase": "Pending"}} for item in found.items))


def test_what_no_row_wants_is_a_stray_and_what_a_watch_shows_can_be_taken_at_once(room: Room) -> None:
    room.make_environment()
    room.make_pool(size=1)
    room.run_pass()
    room.wait_until(lambda: any(room.is_ready(pod) for pod in room.pods().values()))
    assert room.warm() == set()
    [pod] = room.pods().values()
    notes = [PodNotes(room.database), PodNotes(room.database)]
    for each in notes:
        each.note(pod)
    behind = cast("Kube", Behind(room.kube, then=notes[0].write))
    listed = observe(room.database, behind, stack_id=room.stack_id, namespace=room.namespace)
    assert [(item.ready, row.ready_later) for item, row in zip(listed.objects, listed.rows, strict=True)] == [
        (False, True)
    ]
    assert not notes[1].write()
    assert room.launch().warm
    labels = {"orca.stack": room.stack_id, "orca.role": "runtime"}
    for labelled in (labels, {"orca.stack": room.stack_id}, {**labels, "orca.stack": "another"}):
        metadata = {"name": f"s-{len(room.kube.list(SECRET, namespace=room.namespace).items)}", "labels": labelled}
        room.kube.create({"apiVersion": "v1", "kind": "Secret", "metadata": {**metadata, "namespace": room.namespace}})
    before = len(room.kube.list(SECRET, namespace=room.namespace).items)
    # One that its owner takes back after it was seen stays.
    metadata = {"name": "taken-back", "namespace": room.namespace, "labels": labels}
    room.kube.create({"apiVersion": "v1", "kind": "Secret", "metadata": metadata})
    room.wait_until(lambda: "taken-back" in {stray.name for stray in room.plan().strays}, 20)
    seen = room.plan().strays
    taken_back = Ref(kind=SECRET, namespace=room.namespace, name="taken-back")
    room.kube.patch(taken_back, {"metadata": {"labels": {"orca.role": None}}})
    apply(RuntimePlan(strays=seen), room.hands)
    assert room.kube.get(taken_back) is not None
    room.kube.delete(taken_back)
    room.until(lambda: len(room.kube.list(SECRET, namespace=room.namespace).items) == before - 1, 10)
    time.sleep(1)
    assert room.run_pass().strays == ()


def test_runtimes_end_though_the_engine_cannot_make_pods(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    room.fill(size=1)
    taken = room.launch()

    def broken() -> None:
        raise OutcomeUnknown("the engine is broken")

    monkeypatch.setattr(room.hands.cohorts, "up", broken)
    end_runtime(room.launching, taken.id)

    def pass_and_look() -> bool:
        with pytest.raises(OutcomeUnknown, match="the engine is broken"):
            room.run_pass()
        return room.reason(taken.pod) == "Stopped"

    room.wait_until(pass_and_look)
    assert room.pod(taken.pod) is None
    monkeypatch.undo()
    room.until(lambda: len(room.warm()) == 1)
