"""A pass that is read back from its record decides the same, whatever it saw."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_infra.record.codec import LEFT_OUT, RecordUnreadable, as_json, decode, encode
from orca_infra.record.decided import RunsDecided, RuntimesDecided, Scope
from orca_infra.record.frames import Frame
from orca_infra.record.words import decisions_of
from orca_infra.runs import decide as runs_decide
from orca_infra.runs import model as runs
from orca_infra.runtimes import decide as runtimes_decide
from orca_infra.runtimes import model as runtimes

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)
RUN_LIMITS = runs.RunLimits(
    sizes=runs.Sizes(), start_seconds=600, stray_grace_seconds=60, stray_max=2, budget_millis=4000, admit_max=2
)
RUNTIME_LIMITS = runtimes.RuntimeLimits(stray_grace_seconds=60, stray_max=2, pull_seconds=0, births_max=4)

# Few names, so that rows, objects and runs meet.
TIMES = st.integers(-4000, 0).map(lambda seconds: NOW + timedelta(seconds=seconds))
WORDS = st.sampled_from(
    ["", "ErrImagePull", "OOMKilled", "Evicted", 'a "quoted" \x00 word', "Unschedulable", "ä\u2028"]
)
NUMBERS = st.integers(1, 3)
UIDS = st.sampled_from([f"u{number}" for number in range(5)])
MAYBE = st.booleans()


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


def some(strategy: st.SearchStrategy[Any], key: Any) -> st.SearchStrategy[Any]:
    return st.lists(strategy, max_size=4, unique_by=key).map(tuple)


RUN_OBJECTS = st.builds(
    runs.SeenObject,
    kind=st.sampled_from(["Job", "Pod", "Service"]),
    namespace=st.just("orca-runs"),
    name=st.sampled_from(["a", "b", "c", "d"]),
    uid=UIDS,
    created_at=TIMES,
    role=st.sampled_from(["driver", "head", "worker"]),
    run=maybe(NUMBERS),
    start=maybe(st.just(1)),
    owned=MAYBE,
    deleting=MAYBE,
    phase=maybe(st.sampled_from(runs.PodPhase)),
    waiting=WORDS,
    failed=WORDS,
    exit_code=maybe(NUMBERS),
    finished=MAYBE,
)
CLUSTER_ROWS = st.builds(
    runs.ClusterRow,
    run=NUMBERS,
    start=st.just(1),
    pipeline=st.sampled_from(["p", "q"]),
    cpu_millis=st.sampled_from([500, 1500]),
    created_at=TIMES,
    run_state=st.sampled_from(["running", "running", "failed"]),
    run_start=st.sampled_from([1, 1, 2]),
    max_starts=maybe(NUMBERS),
    job_uid=maybe(UIDS),
    head_uid=maybe(UIDS),
    refused=WORDS,
    ending_reason=maybe(st.sampled_from([str(one) for one in runs.EndReason])),
    job_declared_at=maybe(TIMES),
    refused_for_good=MAYBE,
    waiting=WORDS,
    logs_saved=MAYBE,
)
QUEUED = st.builds(
    runs.QueuedRun,
    run=st.integers(10, 20),
    start=st.just(0),
    pipeline=st.sampled_from(["p", "q"]),
    image=st.just("image:1"),
    workers=st.integers(0, 5),
    allow_new_code=MAYBE,
    fill=MAYBE,
    max_runs=maybe(NUMBERS),
    queued_at=TIMES,
)
RUN_SNAPSHOTS = st.builds(
    runs.RunSnapshot,
    now=st.just(NOW),
    queued=some(QUEUED, lambda one: one.run),
    running=st.dictionaries(st.sampled_from(["p", "q"]), NUMBERS),
    rows=some(CLUSTER_ROWS, lambda one: one.key),
    objects=some(RUN_OBJECTS, lambda one: one.name),
    known=st.frozensets(UIDS, max_size=2),
    desired=st.frozensets(st.tuples(st.just("Pod"), st.just("orca-runs"), st.sampled_from(["a", "b"])), max_size=2),
    gone=st.frozensets(UIDS, max_size=2),
    unlabelled=some(RUN_OBJECTS, lambda one: one.name),
)


def through_a_frame(decided: Any, earlier: Any) -> Any:
    """Read back, where what the earlier pass had as well is kept with that one."""
    thinned = Frame(earlier).thin(decided)
    return decode(encode(thinned.decided, thinned.lacks), encode(earlier))


@settings(max_examples=60, deadline=None)
@given(RUN_SNAPSHOTS, RUN_SNAPSHOTS)
def test_a_pass_over_run_clusters_is_read_back_as_it_was_and_decides_the_same(
    snapshot: runs.RunSnapshot, before: runs.RunSnapshot
) -> None:
    decided = RunsDecided(snapshot=snapshot, limits=RUN_LIMITS, plan=runs_decide.decide(snapshot, RUN_LIMITS))
    earlier = RunsDecided(snapshot=before, limits=RUN_LIMITS, plan=runs_decide.decide(before, RUN_LIMITS))
    read = decode(encode(decided))
    assert read == decided
    assert through_a_frame(decided, earlier) == through_a_frame(decided, decided) == decided
    assert read.again() == decided.plan
    check_words(decided)


ENVIRONMENTS = st.builds(
    runtimes.Environment,
    namespace=st.just("n"),
    name=st.just("e"),
    image=st.just("image:2"),
    env=st.lists(
        st.sampled_from(
            [
                {"name": "PLAIN", "value": "s3cr3t"},
                {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
            ]
        ),
        max_size=1,
    ).map(tuple),
    resources=st.sampled_from([{}, {"requests": {"cpu": "1", "memory": "1Gi"}}, {"requests": {"cpu": "much"}}]),
)
STATUSES = st.builds(
    runtimes.PoolStatus,
    warm=NUMBERS,
    message=WORDS,
    conditions=st.lists(
        st.builds(
            runtimes.Condition,
            type=st.sampled_from(["Ready", "Provisioned"]),
            status=st.sampled_from(["True", "False"]),
            reason=WORDS,
            since=maybe(TIMES),
        ),
        max_size=2,
        unique_by=lambda one: one.type,
    ).map(tuple),
)
POOLS = st.builds(
    runtimes.Pool,
    namespace=st.just("n"),
    name=st.sampled_from(["p", "q"]),
    uid=UIDS,
    environment=st.sampled_from(["e", "missing"]),
    size=st.integers(0, 3),
    burning_rate=st.floats(0, 5),
    cull_seconds=maybe(st.floats(1, 100)),
    affinity=st.sampled_from([{}, {"nodeAffinity": {"required": [{"weight": 1, "key": None}]}}]),
    tolerations=st.sampled_from([(), ({"key": "k", "operator": "Exists"},)]),
    status=maybe(STATUSES),
    deleting=MAYBE,
)
POD_ROWS = st.builds(
    runtimes.PodRow,
    name=st.sampled_from(["r1", "r2", "r3"]),
    namespace=st.just("n"),
    environment=st.just("e"),
    created_at=TIMES,
    pool=maybe(st.sampled_from(["p", "q"])),
    uid=maybe(UIDS),
    seen=MAYBE,
    ready_at=maybe(TIMES),
    taken_at=maybe(TIMES),
    refused=WORDS,
    ending_reason=maybe(st.sampled_from([str(one) for one in runtimes.EndReason])),
    runtime=maybe(st.uuids()),
    expires_at=maybe(TIMES),
    secret_made=MAYBE,
)
POD_OBJECTS = st.builds(
    runtimes.SeenObject,
    kind=st.sampled_from(["Pod", "Secret"]),
    namespace=st.just("n"),
    name=st.sampled_from(["r1", "r2", "r3", "r4"]),
    uid=UIDS,
    created_at=TIMES,
    owned=MAYBE,
    deleting=MAYBE,
    phase=st.sampled_from(["", "Running", "Failed"]),
    ready=MAYBE,
    held=MAYBE,
    waiting=WORDS,
    labelled=MAYBE,
)
RUNTIME_SNAPSHOTS = st.builds(
    runtimes.RuntimeSnapshot,
    now=st.just(NOW),
    pools=some(POOLS, lambda one: one.name),
    environments=ENVIRONMENTS.map(lambda one: {"e": one}),
    rows=some(POD_ROWS, lambda one: one.name),
    objects=some(POD_OBJECTS, lambda one: (one.kind, one.name)),
    gone=st.frozensets(UIDS, max_size=2),
    nodes=maybe(
        st.just((runtimes.Node(name="a", labels={"x": "y"}, allocatable={"cpu": 4000, "memory": 2**40, "pods": 9000}),))
    ),
)


@settings(max_examples=60, deadline=None)
@given(RUNTIME_SNAPSHOTS, RUNTIME_SNAPSHOTS)
def test_a_pass_over_runtime_pools_is_read_back_and_decides_the_same(
    snapshot: runtimes.RuntimeSnapshot, before: runtimes.RuntimeSnapshot
) -> None:
    plan = runtimes_decide.decide(snapshot, RUNTIME_LIMITS)
    decided = RuntimesDecided(snapshot=snapshot, limits=RUNTIME_LIMITS, plan=plan)
    earlier = RuntimesDecided(
        snapshot=before, limits=RUNTIME_LIMITS, plan=runtimes_decide.decide(before, RUNTIME_LIMITS)
    )
    record = encode(decided)
    read = decode(record)
    assert isinstance(read, RuntimesDecided)
    assert through_a_frame(decided, earlier) == through_a_frame(decided, decided) == read
    assert read.again() == read.plan
    # All of it but what variables are set to.
    assert (read.snapshot.rows, read.snapshot.pools, read.plan.endings) == (snapshot.rows, snapshot.pools, plan.endings)
    assert [(one.pool, one.count) for one in read.plan.births] == [(one.pool, one.count) for one in plan.births]
    assert b"s3cr3t" not in zlib.decompress(record)
    check_words(decided)


def check_words(decided: RunsDecided | RuntimesDecided) -> None:
    """Whatever the plan holds is told in words, and found by the names in it."""
    plan = decided.plan
    found = {name for one in decisions_of(decided) for name in one.about}
    told = {one.name for one in (*plan.strays, *plan.strays_held)}
    if isinstance(plan, runs.RunPlan):
        told |= {str(one.run) for one in plan.endings} | {str(one.run) for one in plan.admit}
        told |= {str(run) for run in (*plan.waiting, *(run for run, _ in plan.waits))}
        told |= {item.name for item in plan.unlabelled}
    else:
        told |= {ending.name for ending in plan.endings}
    assert told <= found
    for one in decisions_of(decided):
        assert one.decided
        assert one.about
    with_report = replace(decided, limits=replace(decided.limits, puts_labels_back=False))  # type: ignore[arg-type]
    of_labels = [one for one in decisions_of(with_report) if "labels of" in one.decided]
    assert all(one.decided.startswith("do not put") and not one.acts for one in of_labels)
    unlabelled = plan.unlabelled if isinstance(plan, runs.RunPlan) else plan.relabels
    assert len(of_labels) == len(unlabelled)


def test_what_an_environment_sets_is_left_out_and_its_name_stays() -> None:
    environment = runtimes.Environment(namespace="n", name="e", image="i", env=({"name": "KEY", "value": "s3cr3t"},))
    pool = runtimes.Pool(namespace="n", name="p", uid="u", environment="e", size=1)
    snapshot = runtimes.RuntimeSnapshot(now=NOW, pools=(pool,), environments={"e": environment})
    plan = runtimes_decide.decide(snapshot, RUNTIME_LIMITS)
    found = as_json(encode(RuntimesDecided(snapshot=snapshot, limits=RUNTIME_LIMITS, plan=plan)))
    assert found["snapshot"]["environments"]["e"]["env"] == [{"name": "KEY", "value": LEFT_OUT}]
    assert found["plan"]["births"][0]["environment"]["env"] == [{"name": "KEY", "value": LEFT_OUT}]


def an_empty_pass() -> bytes:
    snapshot = runs.RunSnapshot(now=NOW)
    return encode(RunsDecided(snapshot=snapshot, limits=RUN_LIMITS, plan=runs.RunPlan()))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"head": {"form": 3, "scope": "runs", "actions": [], "waits": []}}, "form 3, and this version reads form 2"),
        ({"head": {"form": 1, "scope": "ships", "actions": [], "waits": []}}, "of another version"),
        ({"decided": {"snapshot": {"now": "yesterday"}}}, "of another version"),
    ],
)
def test_a_record_of_another_version_is_said_to_be_one(change: dict[str, Any], said: str) -> None:
    whole = json.loads(zlib.decompress(an_empty_pass()))
    record = zlib.compress(json.dumps({**whole, **change}).encode())
    with pytest.raises(RecordUnreadable, match=said):
        decode(record)


def test_a_record_that_lacks_what_has_a_default_is_read() -> None:
    whole = json.loads(zlib.decompress(an_empty_pass()))
    del whole["decided"]["snapshot"]["gone"]
    assert decode(zlib.compress(json.dumps(whole).encode())).snapshot.now == NOW


def test_a_record_of_the_form_before_frames_is_read() -> None:
    whole = json.loads(zlib.decompress(an_empty_pass()))
    del whole["head"]["lacks"]
    whole["head"]["form"] = 1
    assert decode(zlib.compress(json.dumps(whole).encode())).snapshot.now == NOW


def test_a_pass_over_many_clusters_is_kept_in_little_room_and_against_its_frame_in_next_to_none() -> None:
    rows = tuple(
        runs.ClusterRow(
            run=run,
            start=1,
            pipeline="p",
            cpu_millis=1,
            created_at=NOW,
            run_state="running",
            run_start=1,
            job_uid=f"u{run}",
        )
        for run in range(500)
    )
    decided = RunsDecided(snapshot=runs.RunSnapshot(now=NOW, rows=rows), limits=RUN_LIMITS, plan=runs.RunPlan())
    assert decided.scope is Scope.RUNS
    assert len(encode(decided)) < 20_000
    more = replace(rows[0], run=500)
    later = replace(decided, snapshot=replace(decided.snapshot, rows=(*rows[1:], more)))
    thinned = Frame(decided).thin(later)
    assert thinned.changed == 2
    assert len(encode(thinned.decided, thinned.lacks)) < 1_000
    assert through_a_frame(later, decided) == later
