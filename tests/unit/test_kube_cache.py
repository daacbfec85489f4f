"""The cache over a follow: what it shows when, and that it never shows too little or too old."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from orca_infra.errors import Transient
from orca_infra.kube import cache
from orca_infra.kube.cache import Watched
from orca_infra.kube.client import Kube
from orca_infra.kube.kinds import POD
from orca_infra.kube.watching import Change, Gone, Heard, Relisted, Seen, Trouble


class Scripted(Kube):
    """A cluster of which only a follow is asked, whose changes the test tells one by one."""

    def __init__(self) -> None:
        self.server = "https://scripted"
        self.changes: queue.Queue[Change | Exception] = queue.Queue()

    def follow(self, *_: object, stop: threading.Event, **__: object) -> Iterator[Change]:
        while not stop.is_set():
            try:
                change = self.changes.get(timeout=0.01)
            except queue.Empty:
                continue
            if isinstance(change, Exception):
                raise change
            yield change
            self.changes.task_done()

    def tell(self, *changes: Change) -> None:
        """Returns when the cache has taken them in."""
        for change in changes:
            self.changes.put(change)
        self.changes.join()


class Clock:
    seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def kube() -> Scripted:
    return Scripted()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def changed() -> list[int]:
    return []


@pytest.fixture
def pods(kube: Scripted, clock: Clock, changed: list[int]) -> Iterator[Watched]:
    with Watched(
        kube, POD, namespace="runs", labels={"orca.stack": "s"}, changed=lambda: changed.append(1), clock=clock
    ) as watched:
        yield watched


def pod(name: str, version: int, *, uid: str = "", labels: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    metadata = {
        "name": name,
        "namespace": "runs",
        "uid": uid or f"uid-{name}",
        "resourceVersion": str(version),
        "labels": {"orca.stack": "s"} if labels is None else labels,
        "managedFields": [{}],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def listed(version: int, *items: dict[str, Any]) -> Relisted:
    return Relisted(items=items, vanished=(), resource_version=str(version))


def heard(version: int) -> Heard:
    return Heard(resource_version=str(version))


def shown(pods: Watched) -> list[tuple[str, str]]:
    return [(obj["metadata"]["name"], obj["metadata"]["resourceVersion"]) for obj in pods.snapshot()]


def test_before_the_first_list_there_is_no_answer(kube: Scripted, pods: Watched) -> None:
    kube.tell(Trouble(error=Transient("refused"), wait_seconds=1.0))
    assert not pods.synced
    assert pods.age_seconds == math.inf
    for ask in (pods.snapshot, pods.by_uid, lambda: pods.get("a", namespace="runs")):
        with pytest.raises(Transient, match="no list of pods at https://scripted was had yet: refused"):
            ask()


def test_it_shows_what_the_follow_tells(kube: Scripted, pods: Watched) -> None:
    kube.tell(listed(10, pod("b", 3), pod("a", 4)))
    assert pods.wait_synced(1)
    assert shown(pods) == [("a", "4"), ("b", "3")]
    kube.tell(Seen(object=pod("a", 11)), Seen(object=pod("c", 12)), Gone(object=pod("b", 13)))
    assert shown(pods) == [("a", "11"), ("c", "12")]
    assert set(pods.by_uid()) == {"uid-a", "uid-c"}
    assert "managedFields" not in pods.snapshot()[0]["metadata"]
    kube.tell(listed(20, pod("c", 12)))
    assert shown(pods) == [("c", "12")]
    assert pods.get("a", namespace="runs") is None


def test_trouble_takes_nothing_away_and_lets_it_age(kube: Scripted, pods: Watched, clock: Clock) -> None:
    kube.tell(listed(10, pod("a", 4)))
    clock.seconds += 40
    kube.tell(Trouble(error=Transient("refused"), wait_seconds=1.0))
    assert shown(pods) == [("a", "4")]
    assert pods.age_seconds == 40
    assert str(pods.error) == "refused"
    with pytest.raises(Transient, match="for 40 s: refused"):
        pods.snapshot(max_age_seconds=30)
    kube.tell(heard(11))
    assert pods.age_seconds == 0
    assert pods.error is None


def test_it_says_when_something_changed(kube: Scripted, pods: Watched, changed: list[int]) -> None:
    kube.tell(listed(10, pod("a", 4)))
    assert len(changed) == 1
    kube.tell(heard(11), listed(12, pod("a", 4)), Trouble(error=Transient("x"), wait_seconds=0.1))
    assert len(changed) == 1
    kube.tell(Seen(object=pod("a", 13)), Gone(object=pod("a", 14)), Gone(object=pod("a", 15)))
    assert len(changed) == 3
    assert pods.synced


def test_a_write_is_shown_at_once_and_nothing_older_after_it(kube: Scripted, pods: Watched) -> None:
    kube.tell(listed(10, pod("a", 4)))
    pods.note_write(pod("a", 30))
    pods.note_write(pod("new", 31))
    assert shown(pods) == [("a", "30"), ("new", "31")]
    kube.tell(Seen(object=pod("a", 20)))
    assert shown(pods) == [("a", "30"), ("new", "31")]
    kube.tell(listed(25, pod("a", 20)))  # a list that lags behind the write
    assert shown(pods) == [("a", "30"), ("new", "31")]
    kube.tell(Seen(object=pod("a", 30)), Seen(object=pod("new", 31)), Seen(object=pod("a", 32)))
    assert shown(pods) == [("a", "32"), ("new", "31")]
    kube.tell(listed(40))
    assert shown(pods) == []


def test_a_write_that_the_watch_has_passed_brings_nothing_back(kube: Scripted, pods: Watched) -> None:
    kube.tell(listed(10, pod("a", 4)), Seen(object=pod("a", 12)), Gone(object=pod("a", 13)))
    pods.note_write(pod("a", 12))
    assert shown(pods) == []


def test_a_deletion_after_a_write_is_believed(kube: Scripted, pods: Watched) -> None:
    kube.tell(listed(10, pod("a", 4)))
    pods.note_write(pod("a", 12))
    kube.tell(Gone(object=pod("a", 13)))
    assert shown(pods) == []


def test_what_a_write_takes_out_of_the_selection_is_not_shown(kube: Scripted, pods: Watched) -> None:
    kube.tell(listed(10, pod("a", 4)))
    pods.note_write(pod("a", 12, labels={}))
    assert shown(pods) == []
    kube.tell(Seen(object=pod("a", 11)), listed(11, pod("a", 11)))
    assert shown(pods) == []
    kube.tell(Gone(object=pod("a", 12)), Seen(object=pod("a", 14)))
    assert shown(pods) == [("a", "14")]


def test_the_late_end_of_an_earlier_object_does_not_touch_its_successor(kube: Scripted, pods: Watched) -> None:
    kube.tell(listed(10, pod("a", 4, uid="one")))
    pods.note_write(pod("a", 30, uid="two"))
    kube.tell(Gone(object=pod("a", 20, uid="one")))
    assert set(pods.by_uid()) == {"two"}


def test_a_write_that_is_never_seen_is_waited_for_a_bounded_time(kube: Scripted, pods: Watched, clock: Clock) -> None:
    """A cluster that was restored from a backup counts from an earlier version."""
    kube.tell(listed(10, pod("a", 4)))
    pods.note_write(pod("a", 900))
    clock.seconds += 61
    kube.tell(listed(20, pod("a", 15)))
    assert shown(pods) == [("a", "15")]


def test_a_bug_is_seen_and_does_not_end_the_thread(
    kube: Scripted, pods: Watched, wait_until: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_AFTER_BUG_SECONDS", 0.01)
    kube.tell(listed(10, pod("a", 4)))
    kube.changes.put(ZeroDivisionError("a bug"))
    wait_until(lambda: pods.error is not None)
    assert "a bug" in str(pods.error)
    kube.changes.task_done()
    kube.tell(listed(11, pod("a", 5)))
    assert shown(pods) == [("a", "5")]


def test_close_ends_the_thread_and_what_it_had_ages(kube: Scripted, clock: Clock) -> None:
    watched = Watched(kube, POD, clock=clock).start()
    kube.tell(listed(10, pod("a", 4)))
    watched.close()
    watched.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "watch-pods" and thread.is_alive()]
    clock.seconds += 7
    assert watched.age_seconds == 7
    assert shown(watched) == [("a", "4")]
