"""The second touch: a second later, after launches under way, and before the process ends."""

from __future__ import annotations

import time
from typing import Any
from uuid import UUID

import pytest

from orca_infra.errors import Conflict, Transient
from orca_infra.runtimes import touch as module
from orca_infra.runtimes.touch import PodLost, Touch, Touches, touch

POD: dict[str, Any] = {
    "metadata": {"name": "p", "namespace": "n", "uid": "u", "creationTimestamp": "2026-05-01T12:00:00Z"},
    "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
}


class Cluster:
    def __init__(self, answer: dict[str, Any] | Exception = POD) -> None:
        self.answer = answer
        self.patched: list[tuple[str, str | None, float]] = []

    def patch(self, ref: Any, patch: dict[str, Any], *, uid: str | None) -> dict[str, Any]:
        self.patched.append((ref.name, uid, time.monotonic()))
        assert patch["metadata"]["annotations"]["orca.runtime"] == str(UUID(int=7))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def of(cluster: Cluster, pod: str = "p") -> Touch:
    return Touch(kube=cluster, namespace="n", pod=pod, uid="u", runtime=UUID(int=7))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AGAIN_SECONDS", 0.05)


@pytest.mark.parametrize(
    "answer",
    [
        Conflict("another has its name"),
        {**POD, "metadata": {**POD["metadata"], "deletionTimestamp": "2026-05-01T12:00:00Z"}},
        {**POD, "status": {"phase": "Failed"}},
        {**POD, "status": {"phase": "Running"}},
    ],
)
def test_a_pod_that_cannot_serve_is_lost(answer: Any) -> None:
    with pytest.raises(PodLost):
        touch(of(Cluster(answer)))


def test_it_comes_after_its_time_and_the_thread_ends() -> None:
    touches, cluster = Touches(), Cluster()
    began = time.monotonic()
    for pod in ("a", "b"):
        touches.again(of(cluster, pod))
    touches.finish(120)
    assert [(name, uid) for name, uid, _ in cluster.patched] == [("a", "u"), ("b", "u")]
    assert cluster.patched[0][2] - began >= 0.05
    touches.again(of(cluster, "c"))
    touches.finish(120)
    assert cluster.patched[-1][0] == "c"


def test_launches_under_way_put_it_off_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GIVES_WAY_SECONDS", 3600)
    touches, cluster = Touches(), Cluster()
    with touches.launching():
        touches.again(of(cluster))
        time.sleep(0.15)
        assert cluster.patched == []
    touches.finish(120)
    assert len(cluster.patched) == 1
    monkeypatch.setattr(module, "GIVES_WAY_SECONDS", 0.3)
    began = time.monotonic()
    with touches.launching():
        touches.again(of(cluster))
        touches.finish(120)
    assert len(cluster.patched) == 2
    assert cluster.patched[1][2] - began >= 0.3


@pytest.mark.parametrize("error", [Transient("away"), Conflict("gone")])
def test_one_that_fails_stops_no_other(error: Exception) -> None:
    touches, cluster = Touches(), Cluster(error)
    touches.again(of(cluster, "a"))
    touches.again(of(cluster, "b"))
    touches.finish(120)
    assert len(cluster.patched) == 2
