"""Which runs get a cluster, which starts end and why: snapshot -> plan, one sentence each."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca_infra.runs.decide import decide
from orca_infra.runs.model import (
    ClusterRow,
    EndReason,
    PodPhase,
    QueuedRun,
    RunLimits,
    RunPlan,
    RunSnapshot,
    SeenObject,
    Sizes,
)

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
LIMITS = RunLimits(sizes=Sizes(), start_seconds=600, stray_grace_seconds=60, stray_max=3)


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def queued(run: int, **more: Any) -> QueuedRun:
    values = {
        "run": run,
        "start": 0,
        "pipeline": "p",
        "image": "i",
        "workers": 2,
        "allow_new_code": False,
        "fill": False,
        "max_runs": None,
        "queued_at": ago(100 - run),
        **more,
    }
    return QueuedRun(**values)


def row(run: int = 7, **more: Any) -> ClusterRow:
    values = {
        "run": run,
        "start": 1,
        "pipeline": "p",
        "cpu_millis": 2750,
        "created_at": ago(30),
        "run_state": "running",
        "run_start": 1,
        "job_uid": "job",
        "head_uid": "head",
        **more,
    }
    return ClusterRow(**values)


def seen(kind: str, role: str, uid: str, **more: Any) -> SeenObject:
    values = {
        "kind": kind,
        "namespace": "runs",
        "name": f"{kind}-{uid}".lower(),
        "uid": uid,
        "created_at": ago(20),
        "role": role,
        "run": 7,
        "start": 1,
        "owned": kind != "Job",
        **more,
    }
    return SeenObject(**values)


JOB = seen("Job", "driver", "job")
DRIVER = seen("Pod", "driver", "driver", phase=PodPhase.RUNNING)
HEAD = seen("Pod", "head", "head", phase=PodPhase.RUNNING)
WORKER = seen("Pod", "worker", "worker", phase=PodPhase.RUNNING)
SERVICE = seen("Service", "head", "service")
ALL = (JOB, DRIVER, HEAD, WORKER, SERVICE)


def plan(
    *objects: SeenObject, rows: tuple[ClusterRow, ...] = (row(),), gone: tuple[str, ...] = (), **more: Any
) -> RunPlan:
    known = frozenset({"job", "head", "worker", "service"})
    return decide(RunSnapshot(now=NOW, rows=rows, objects=objects, known=known, gone=frozenset(gone), **more), LIMITS)


def reason(result: RunPlan) -> EndReason | None:
    return result.endings[0].reason if result.endings else None


def test_a_start_that_runs_is_left_alone_and_its_driver_is_followed() -> None:
    result = plan(*ALL)
    assert result == RunPlan(follow=(DRIVER,))


@pytest.mark.parametrize("state", ["succeeded", "failed", "canceled", "queued"])
def test_the_objects_of_a_run_that_does_not_run_at_that_start_are_swept(state: str) -> None:
    result = plan(*ALL, rows=(row(run_state=state),))
    assert reason(result) is EndReason.ENDED
    assert [item.uid for item in result.sweeps[0].objects] == ["service", "head", "worker", "job", "driver"]
    assert result.sweeps[0].drivers == (DRIVER,)


def test_the_sweep_of_one_start_leaves_its_successor_alone() -> None:
    """R3."""
    successor = replace(JOB, uid="job2", start=2, name="job2")
    rows = (row(run_start=2), row(start=2, run_start=2, job_uid="job2", head_uid=None))
    result = plan(*ALL, successor, rows=rows)
    assert [(s.run, s.start) for s in result.sweeps] == [(7, 1)]
    assert "job2" not in {item.uid for item in result.sweeps[0].objects}


def test_what_is_going_away_already_is_not_deleted_again() -> None:
    result = plan(replace(JOB, deleting=True), DRIVER, rows=(row(run_state="failed"),))
    assert [item.uid for item in result.sweeps[0].objects] == ["driver"]


def test_a_row_ends_only_once_nothing_of_it_is_seen_and_its_reason_is_written_down() -> None:
    assert plan(rows=(row(run_state="succeeded"),)).finishes == ()
    ended = plan(rows=(row(run_state="succeeded", ending_reason="Ended"),))
    assert (ended.finishes[0].reason, ended.finishes[0].to_state) == (EndReason.ENDED, None)


@pytest.mark.parametrize(
    ("max_starts", "start", "state"), [(None, 9, "queued"), (3, 2, "queued"), (3, 3, "failed"), (1, 1, "failed")]
)
def test_an_end_without_a_word_queues_the_run_or_fails_it_past_max_starts(
    max_starts: int | None, start: int, state: str
) -> None:
    finish = plan(
        rows=(row(start=start, run_start=start, max_starts=max_starts, ending_reason="DriverFailed"),)
    ).finishes[0]
    assert (finish.reason, finish.to_state) == (EndReason.DRIVER_FAILED, state)


def test_nothing_is_recorded_as_ended_while_a_pod_of_it_is_seen() -> None:
    """R4: deleted first, confirmed, then recorded."""
    assert plan(replace(DRIVER, deleting=True), rows=(row(ending_reason="NeverStarted"),)).finishes == ()


@pytest.mark.parametrize(
    ("job", "driver", "wanted"),
    [
        ({"finished": True}, {"phase": PodPhase.SUCCEEDED, "exit_code": 0, "failed": "Completed"}, EndReason.DRIVER_FAILED),
        ({"finished": True, "failed": "BackoffLimitExceeded"}, {"phase": PodPhase.FAILED, "exit_code": 3, "failed": "Error"}, EndReason.DRIVER_FAILED),
        ({"finished": True, "failed": "BackoffLimitExceeded"}, {"phase": PodPhase.FAILED, "exit_code": 137, "failed": "OOMKilled"}, EndReason.OOM_KILLED),
        ({"finished": True, "failed": "DeadlineExceeded"}, {"phase": PodPhase.FAILED}, EndReason.DEADLINE_EXCEEDED),
        ({"finished": True, "failed": "BackoffLimitExceeded"}, {"phase": PodPhase.FAILED, "failed": "Evicted"}, EndReason.EVICTED),
    ],
)  # fmt: skip
def test_a_job_that_ended_while_its_run_still_runs_has_a_typed_reason(
    job: dict[str, Any], driver: dict[str, Any], wanted: EndReason
) -> None:
    assert reason(plan(replace(JOB, **job), replace(DRIVER, **driver), HEAD, rows=(row(),))) is wanted


def test_losing_the_head_ends_the_start_even_if_its_driver_succeeds_meanwhile() -> None:
    """R1."""
    assert reason(plan(JOB, DRIVER, gone=("head",))) is EndReason.HEAD_LOST
    over = replace(HEAD, phase=PodPhase.FAILED, failed="Error")
    assert reason(plan(replace(JOB, finished=True), DRIVER, over)) is EndReason.HEAD_LOST
    assert reason(plan(JOB, DRIVER, replace(HEAD, deleting=True))) is EndReason.HEAD_LOST


def test_a_head_that_no_list_shows_is_not_lost_yet() -> None:
    assert plan(JOB, DRIVER).endings == ()


def test_a_job_that_is_gone_is_vanished_and_one_that_no_list_shows_is_not() -> None:
    assert reason(plan(gone=("job",))) is EndReason.VANISHED
    assert plan().endings == ()


@pytest.mark.parametrize(
    ("age", "pod", "refused", "wanted"),
    [
        (599, {"phase": PodPhase.PENDING, "waiting": "ImagePullBackOff"}, "", None),
        (600, {"phase": PodPhase.PENDING, "waiting": "ImagePullBackOff"}, "", EndReason.IMAGE_PULL),
        (600, {"phase": PodPhase.PENDING, "waiting": "Unschedulable"}, "", EndReason.NEVER_STARTED),
        (600, {"phase": PodPhase.PENDING, "waiting": "CreateContainerConfigError"}, "", EndReason.NEVER_STARTED),
        (600, {"phase": PodPhase.RUNNING}, "", None),
        (600, {"phase": PodPhase.RUNNING}, "image: Required value", EndReason.REFUSED),
        (599, {"phase": PodPhase.RUNNING}, "image: Required value", None),
    ],
)
def test_a_start_that_cannot_start_ends_within_its_time_and_not_before(
    age: float, pod: dict[str, Any], refused: str, wanted: EndReason | None
) -> None:
    rows = (row(created_at=ago(age), refused=refused, refused_for_good=bool(refused)),)
    assert reason(plan(JOB, replace(DRIVER, created_at=ago(age), **pod), HEAD, rows=rows)) is wanted


def test_runs_are_admitted_oldest_first_until_one_does_not_fit_what_is_free() -> None:
    limits = replace(LIMITS, budget_millis=6000)
    snapshot = RunSnapshot(now=NOW, queued=tuple(queued(n) for n in (1, 2, 3, 4)), rows=(row(cpu_millis=500),))
    result = decide(snapshot, limits)
    assert [run.run for run in result.admit] == [1, 2]
    assert result.waiting == {
        3: "it needs 2750m of CPU, and 0m of the budget is free",
        4: "run 3 is before it and does not fit what is free of the budget",
    }


def test_a_run_that_was_taken_back_waits_until_its_earlier_start_is_gone() -> None:
    """R2: never two drivers of one run at a time. Others go on."""
    result = decide(RunSnapshot(now=NOW, queued=(queued(1, start=1, earlier=1), queued(2))), LIMITS)
    assert [run.run for run in result.admit] == [2]
    assert result.waiting == {1: "its start 1 is still going away"}


DECLARED: dict[str, Any] = {"job_uid": None, "head_uid": None, "created_at": ago(2000)}


def test_a_start_whose_up_ended_unknown_before_its_jobs_ttl_is_vanished_if_nothing_is_found() -> None:
    """It may have run and gone: to make its Job again would be a second driver for one start."""
    assert reason(plan(rows=(row(**DECLARED, job_declared_at=ago(601)),))) is EndReason.VANISHED
    assert plan(rows=(row(**DECLARED, job_declared_at=ago(599)),)).endings == ()
    assert plan(JOB, rows=(row(**DECLARED, job_declared_at=ago(601)),)).endings == ()
    assert plan(rows=(row(**DECLARED),)).endings == (), "it was never declared, or the server said that it is not there"


def test_each_pod_has_its_own_time_to_start() -> None:
    """An outage had it made late: it is not ended as it comes."""
    rows = (row(created_at=ago(3600)),)
    young = replace(DRIVER, phase=PodPhase.PENDING, waiting="Unschedulable", created_at=ago(599))
    assert plan(JOB, young, HEAD, rows=rows).endings == ()
    assert reason(plan(JOB, replace(young, created_at=ago(600)), HEAD, rows=rows)) is EndReason.NEVER_STARTED


def test_a_job_that_can_make_no_pod_ends_its_start_in_the_servers_words() -> None:
    alone = replace(JOB, created_at=ago(600))
    assert reason(plan(alone, HEAD)) is EndReason.NEVER_STARTED
    refused = plan(replace(alone, waiting="FailedCreate", said="denied the request: no"), HEAD)
    assert reason(refused) is EndReason.REFUSED
    assert "denied the request: no" in refused.endings[0].detail
    assert plan(replace(alone, created_at=ago(599)), HEAD).endings == ()


def test_what_may_pass_and_our_own_missing_rights_end_no_start() -> None:
    rows = (row(created_at=ago(5000), refused="it could not be reached", refused_for_good=False),)
    result = plan(JOB, DRIVER, HEAD, rows=rows)
    assert result.endings == ()
    assert result.waits == {(7, 1): "it could not be reached"}


def test_a_full_quota_always_goes_back_to_queued() -> None:
    rows = (row(ending_reason="Refused", max_starts=1, quota_full=True),)
    assert plan(rows=rows).finishes[0].to_state == "queued"


def test_a_terminal_pod_that_somebody_holds_does_not_keep_its_run_from_going_on() -> None:
    held = replace(DRIVER, deleting=True, phase=PodPhase.FAILED)
    assert plan(held, rows=(row(ending_reason="DriverFailed"),)).finishes == (), "its log comes first"
    rows = (row(ending_reason="DriverFailed", logs_saved=True),)
    assert plan(held, rows=rows).finishes[0].to_state == "queued"
    assert plan(replace(held, phase=PodPhase.RUNNING), rows=rows).finishes == ()


def test_a_job_that_no_list_shows_is_asked_for_by_name_before_its_start_ends() -> None:
    rows = (row(run_state="succeeded", ending_reason="Ended", logs_saved=True),)
    assert plan(rows=rows).finishes[0].job_uid == "job"
    assert plan(replace(JOB, deleting=True), rows=rows).finishes[0].job_uid is None


def test_what_a_start_waits_for_is_said_once() -> None:
    pending = replace(DRIVER, phase=PodPhase.PENDING, waiting="Unschedulable", said="0/1 nodes are available")
    says = "pod-driver: Unschedulable: 0/1 nodes are available"
    assert plan(JOB, pending, HEAD).waits == {(7, 1): says}
    assert plan(JOB, pending, HEAD, rows=(row(waiting=says),)).waits == {}
    assert plan(JOB, DRIVER, HEAD, rows=(row(waiting=says),)).waits == {(7, 1): ""}
    assert plan(JOB, replace(pending, waiting="ContainerCreating"), HEAD).waits == {}


def test_an_ending_start_says_which_pod_keeps_it() -> None:
    """A Pod on a node that is lost is going away until the node is back or gone."""
    stuck = replace(DRIVER, deleting=True, node="node-9")
    assert plan(stuck, rows=(row(ending_reason="Removed"),)).waits == {
        (7, 1): "pod-driver is going away on node node-9"
    }


def test_one_larger_than_the_whole_budget_is_passed_over_and_said() -> None:
    result = decide(
        RunSnapshot(now=NOW, queued=(queued(1, workers=100), queued(2))), replace(LIMITS, budget_millis=6000)
    )
    assert [run.run for run in result.admit] == [2]
    assert result.waiting == {1: "it needs 100750m of CPU, more than the whole budget of 6000m"}


def test_one_that_its_pipeline_holds_is_passed_over_and_fill_runs_do_not_count() -> None:
    runs = (queued(1, max_runs=1), queued(2, max_runs=1), queued(3, max_runs=1, fill=True), queued(4, pipeline="q"))
    result = decide(RunSnapshot(now=NOW, queued=runs), LIMITS)
    assert [run.run for run in result.admit] == [1, 3, 4]
    assert result.waiting == {2: "its pipeline runs max_runs (1) already"}
    assert [r.run for r in decide(RunSnapshot(now=NOW, queued=runs, running={"p": 1}), LIMITS).admit] == [3, 4]


def test_without_a_budget_there_is_no_limit_but_that_of_one_pass() -> None:
    result = decide(RunSnapshot(now=NOW, queued=tuple(queued(n) for n in range(150))), LIMITS)
    assert len(result.admit) == LIMITS.admit_max


def stray(number: int = 0, **more: Any) -> SeenObject:
    values = {"run": 99, "start": 1, "owned": False, "created_at": ago(61), "name": f"s{number}", **more}
    return seen("Job", "driver", f"stray-{number}", **values)


@pytest.mark.parametrize(
    ("more", "is_stray"),
    [({}, True), ({"owned": True}, False), ({"created_at": ago(60)}, False), ({"deleting": True}, False)],
)
def test_a_stray_is_owned_by_nothing_named_by_no_row_and_past_the_grace(more: dict[str, Any], is_stray: bool) -> None:
    assert bool(decide(RunSnapshot(now=NOW, objects=(stray(**more),)), LIMITS).strays) is is_stray


def test_what_a_row_wants_or_knows_is_never_a_stray() -> None:
    item = stray()
    assert not decide(RunSnapshot(now=NOW, objects=(item,), known=frozenset({item.uid})), LIMITS).strays
    wanted = frozenset({("Job", "runs", item.name)})
    assert not decide(RunSnapshot(now=NOW, objects=(item,), desired=wanted), LIMITS).strays


def test_too_many_strays_are_held() -> None:
    items = tuple(stray(n) for n in range(4))
    result = decide(RunSnapshot(now=NOW, objects=items), LIMITS)
    assert (result.strays, result.strays_held) == ((), items)


def test_young_strays_count_so_that_none_slips_through_as_it_comes_of_age() -> None:
    old, *young = (stray(n, created_at=NOW - timedelta(seconds=61 if n == 0 else 1)) for n in range(4))
    assert decide(RunSnapshot(now=NOW, objects=(old, *young)), LIMITS).strays_held == (old, *young)
    assert decide(RunSnapshot(now=NOW, objects=(old, *young[:2])), LIMITS).strays == (old,)
    assert decide(RunSnapshot(now=NOW, objects=(*young, *young)), LIMITS).strays_held == ()


@given(
    st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.none() | st.integers(0, 3)), max_size=20),
    st.none() | st.integers(0, 20_000),
)
def test_admission_never_passes_the_budget_or_a_pipelines_max_runs(
    runs: list[tuple[int, bool, int | None]], budget: int | None
) -> None:
    asked = tuple(queued(n, workers=w, fill=f, max_runs=m, pipeline=f"p{m}") for n, (w, f, m) in enumerate(runs))
    result = decide(RunSnapshot(now=NOW, queued=asked), replace(LIMITS, budget_millis=budget))
    if budget is not None:
        assert sum(LIMITS.sizes.cpu_of(run.workers) for run in result.admit) <= budget
    for pipeline in {run.pipeline for run in result.admit}:
        plain = [run for run in result.admit if run.pipeline == pipeline and not run.fill]
        assert not plain or plain[0].max_runs is None or len(plain) <= plain[0].max_runs
    assert [run.run for run in result.admit] == sorted(run.run for run in result.admit)
