"""What a real API server and a real kubelet showed of each end (tests/node records it) gets its typed reason."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from orca_infra.runs.decide import decide
from orca_infra.runs.model import ClusterRow, EndReason, RunLimits, RunPlan, RunSnapshot, SeenObject, Sizes
from orca_infra.runs.observe import read_object

SAMPLES = Path(__file__).parent / "samples" / "kubernetes"
LIMITS = RunLimits(sizes=Sizes(), start_seconds=600, stray_grace_seconds=60, stray_max=20)


def objects_of(sample: str) -> list[dict[str, Any]]:
    return list(json.loads((SAMPLES / f"{sample}.json").read_text()))


def plan_of(objects: list[dict[str, Any]], *, age_seconds: float) -> RunPlan:
    """What decide makes of these objects of a start that was admitted so long ago, and says that it runs."""
    seen = [read_object(item) for item in objects]
    job = next(item for item in seen if item.kind == "Job")
    head = next((item for item in seen if item.kind == "Pod" and item.role == "head"), None)
    now = max(item.created_at for item in seen) + timedelta(seconds=age_seconds)
    assert job.run is not None
    assert job.start is not None
    row = ClusterRow(
        run=job.run,
        start=job.start,
        pipeline="p",
        cpu_millis=100,
        created_at=now - timedelta(seconds=age_seconds),
        run_state="running",
        run_start=job.start,
        job_uid=job.uid,
        head_uid=head.uid if head else None,
    )
    known = frozenset(item.uid for item in seen)
    return decide(RunSnapshot(now=now, rows=(row,), objects=tuple(seen), known=known), LIMITS)


@pytest.mark.parametrize(
    ("sample", "reason", "detail"),
    [
        ("DriverFailed", EndReason.DRIVER_FAILED, "exit code 3"),
        ("OOMKilled", EndReason.OOM_KILLED, "used more memory than it may"),
        ("DeadlineExceeded", EndReason.DEADLINE_EXCEEDED, "at its deadline"),
        ("HeadLost", EndReason.HEAD_LOST, "its head is gone or over: Error"),
        ("Evicted", EndReason.EVICTED, "Evicted"),
        ("Evicted-by-api", EndReason.EVICTED, "EvictionByEvictionAPI"),
    ],
)
def test_what_the_server_showed_gets_its_reason_at_once(sample: str, reason: EndReason, detail: str) -> None:
    [ending] = plan_of(objects_of(sample), age_seconds=5).endings
    assert ending.reason == reason
    assert detail in ending.detail


def test_an_image_that_cannot_be_pulled_ends_its_start_when_it_may_not_wait_any_longer() -> None:
    objects = objects_of("ImagePull")
    assert plan_of(objects, age_seconds=599).endings == ()
    [ending] = plan_of(objects, age_seconds=600).endings
    assert ending.reason == EndReason.IMAGE_PULL
    assert ": ErrImagePull: " in ending.detail or ": ImagePullBackOff: " in ending.detail


def test_a_start_that_ends_loses_all_its_objects_the_driver_last() -> None:
    [sweep] = plan_of(objects_of("HeadLost"), age_seconds=5).sweeps
    assert [item.kind for item in sweep.objects] == ["Service", "Pod", "Pod", "Job", "Pod"]
    assert [item.role for item in sweep.drivers] == ["driver"]


@pytest.mark.parametrize("sample", sorted(path.stem for path in SAMPLES.glob("*.json")))
def test_every_object_of_a_sample_is_read(sample: str) -> None:
    for item in objects_of(sample):
        seen = read_object(item)
        assert isinstance(seen, SeenObject)
        assert seen.created_at < datetime(2100, 1, 1, tzinfo=UTC)
        assert seen.role in {"driver", "head", "worker"}
        assert seen.deleting == ("deletionTimestamp" in item["metadata"])
