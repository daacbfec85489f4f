"""Drivers' logs: resumed without loss or repetition, bounded, kept apart, appended once. (Real ones: tests/node.)"""

from __future__ import annotations

import errno
import io
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from orca_infra.errors import Transient
from orca_infra.kube.errors import ObjectMissing
from orca_infra.log import make_log
from orca_infra.runs import logs as room
from orca_infra.runs.logs import DriverLogs, driver_log, parts
from orca_infra.runs.model import PodPhase, SeenObject


def stamp(number: int, fraction: str = "") -> str:
    return f"2026-11-29T20:00:{number:02d}{fraction}Z"


class Node:
    """Answers as a kubelet does: whole log, or from a second on, in pieces of any size, then perhaps a fault."""

    def __init__(self, *lines: tuple[str, str], piece: int = 7) -> None:
        self.lines = list(lines)
        self.piece = piece
        self.fault: Exception | None = None
        self.asked: list[str | None] = []
        self.ends = True
        self.cut = 0  # bytes that its last piece lacks

    def logs(
        self, _namespace: str, _pod: str, *, follow: bool, since_time: str | None, stop: threading.Event, **_: Any
    ) -> Iterator[bytes]:
        self.asked.append(since_time)
        since = since_time[:19] if since_time else ""
        text = "".join(f"{time} {line}\n" for time, line in self.lines if time[:19] >= since).encode()
        text = text[: -self.cut] if self.cut else text
        for start in range(0, len(text), self.piece):
            yield text[start : start + self.piece]
        if self.fault:
            raise self.fault
        if follow and not self.ends:
            stop.wait(240)


def driver(uid: str = "u1", start: int = 1, phase: PodPhase = PodPhase.RUNNING) -> SeenObject:
    return SeenObject(
        kind="Pod",
        namespace="runs",
        name=f"orca-7-{start}-{uid}",
        uid=uid,
        created_at=datetime(2026, 11, 29, tzinfo=UTC),
        role="driver",
        run=7,
        start=start,
        phase=phase,
    )


def keeper(node: Node, folder: Path) -> DriverLogs:
    return DriverLogs(node, folder, make_log(io.StringIO(), form="text"))  # type: ignore[arg-type]


def keep(logs: DriverLogs, *drivers: SeenObject, tries: int = 1) -> bool:
    """So many tries, one right after the other, for the logs of one start."""
    for _ in range(tries):
        for keeping in logs._keeping.values():
            keeping.retry_at = 0.0
        logs.keep(7, drivers[0].start or 0, drivers)
        logs.wait_kept(120)
    return logs.is_kept(7, drivers[0].start or 0)


def test_a_loop_that_died_when_it_had_appended_a_log_and_not_said_so_has_the_next_append_nothing(
    tmp_path: Path,
) -> None:
    node = Node((stamp(1), "one"), (stamp(2), "two"))
    assert keep(keeper(node, tmp_path), driver())
    once = driver_log(tmp_path, 7).read_bytes()
    heir = keeper(node, tmp_path)
    heir.follow([driver()])  # it may run still, for a moment
    assert keep(heir, driver())
    assert driver_log(tmp_path, 7).read_bytes() == once
    assert [path.name for path in (tmp_path / "7").iterdir()] == ["driver.log"]
    assert keep(heir, driver("u2"))
    assert driver_log(tmp_path, 7).read_bytes().count(b"--- run 7") == 2


def hear(logs: DriverLogs, uid: str = "u1") -> None:
    """Follow one driver until its log ends."""
    logs.follow([driver(uid)])
    logs._followers[uid].done.result(120)


def whole(folder: Path) -> str:
    return driver_log(folder, 7).read_text(encoding="utf-8")


def test_a_log_is_kept_without_its_timestamps_under_a_header(tmp_path: Path) -> None:
    node = Node((stamp(1), "begin"), (stamp(2, ".5"), "grün 日本"), (stamp(3), ""))
    assert keep(keeper(node, tmp_path), driver())
    assert whole(tmp_path) == "--- run 7 start 1, Pod orca-7-1-u1, uid u1\nbegin\ngrün 日本\n\n"
    assert parts(tmp_path, 7) == []
    assert [p.name for p in (tmp_path / "7").iterdir()] == ["driver.log"]


@pytest.mark.parametrize("piece", [1, 2, 3, 50, 4096])
def test_characters_and_lines_that_come_in_halves_are_put_together(tmp_path: Path, piece: int) -> None:
    node = Node(*[(stamp(n), "æ" * n) for n in range(1, 20)], piece=piece)
    assert keep(keeper(node, tmp_path), driver())
    assert whole(tmp_path).splitlines()[1:] == ["æ" * n for n in range(1, 20)]


def test_a_controller_that_was_away_goes_on_where_it_was_with_nothing_twice(tmp_path: Path) -> None:
    node = Node((stamp(1, ".1"), "a"), (stamp(1, ".12"), "b"), (stamp(1, ".12"), "b"))
    node.fault = Transient("the controller is killed here")
    hear(keeper(node, tmp_path))
    node.fault = None
    node.lines += [(stamp(1, ".12"), "b again"), (stamp(2), "c")]
    assert keep(keeper(node, tmp_path), driver())
    assert whole(tmp_path).splitlines()[1:] == ["a", "b", "b", "b again", "c"]
    assert node.asked == [None, stamp(1, ".120000000")]


def test_what_was_written_after_the_last_position_is_cut_off_and_read_again(tmp_path: Path) -> None:
    node = Node((stamp(1), "a"))
    hear(keeper(node, tmp_path))
    part = parts(tmp_path, 7)[0]
    part.write_bytes(part.read_bytes() + b"half a li")
    node.lines.append((stamp(2), "b"))
    assert keep(keeper(node, tmp_path), driver())
    assert whole(tmp_path).splitlines()[1:] == ["a", "b"]


def test_what_the_node_rotated_away_meanwhile_is_kept_from_before(tmp_path: Path) -> None:
    node = Node((stamp(1), "early"))
    hear(keeper(node, tmp_path))
    node.lines = [(stamp(9), "late")]
    assert keep(keeper(node, tmp_path), driver())
    assert whole(tmp_path).splitlines()[1:] == ["early", "late"]


def test_two_pods_of_a_run_are_kept_apart(tmp_path: Path) -> None:
    one = keeper(Node((stamp(1), "first")), tmp_path)
    assert keep(one, driver("u1", 1))
    assert keep(keeper(Node((stamp(1), "second")), tmp_path), driver("u2", 2))
    assert whole(tmp_path).splitlines() == [
        "--- run 7 start 1, Pod orca-7-1-u1, uid u1",
        "first",
        "--- run 7 start 2, Pod orca-7-2-u2, uid u2",
        "second",
    ]


def test_a_log_that_cannot_be_had_is_tried_again_and_then_noted_after_what_was_read(tmp_path: Path) -> None:
    node = Node((stamp(1), "a"))
    node.fault = Transient("the node does not answer")
    logs = keeper(node, tmp_path)
    assert not keep(logs, driver())
    logs._give_up_seconds = 0
    assert keep(logs, driver())
    assert whole(tmp_path).splitlines()[1:] == ["a", "--- the rest of the log cannot be had: the node does not answer"]


def test_a_node_that_answers_again_in_time_loses_nothing(tmp_path: Path) -> None:
    node = Node((stamp(1), "a"))
    node.fault = Transient("the node does not answer")
    logs = keeper(node, tmp_path)
    assert not keep(logs, driver())
    node.fault = None
    node.lines.append((stamp(2), "b"))
    assert keep(logs, driver())
    assert whole(tmp_path).splitlines()[1:] == ["a", "b"]


def test_a_pod_that_is_not_there_is_not_tried_again(tmp_path: Path) -> None:
    node = Node((stamp(1), "a"))
    node.fault = ObjectMissing("it is not there")
    assert keep(keeper(node, tmp_path), driver())
    assert whole(tmp_path).endswith("--- the rest of the log cannot be had: it is not there\n")


def test_one_silent_node_holds_up_no_log_of_another(tmp_path: Path) -> None:
    """More starts on it than logs are read at once, and none of them answers before the end."""
    node = Node((stamp(1), "a"))
    silent = threading.Event()

    class Nodes:
        def logs(self, namespace: str, pod: str, **more: Any) -> Iterator[bytes]:
            if pod.endswith("silent"):
                silent.wait(240)
                raise Transient("the node does not answer")
            return node.logs(namespace, pod, **more)

    logs = keeper(Nodes(), tmp_path)  # type: ignore[arg-type]
    logs._silent_nodes["n"] = time.monotonic() + 3600  # it was found to be silent just before
    for start in range(1, 3 * room.KEEPERS):
        logs.keep(7, start, [replace(driver("silent", start), node="n")])
    logs.keep(8, 1, [replace(driver(), run=8)])
    logs._keeping[8, 1].done.result(120)
    assert logs.is_kept(8, 1)
    silent.set()


def test_what_a_full_disk_had_no_room_for_is_kept_when_there_is_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(A disk that is really full: tests/cluster.)"""
    node = Node((stamp(1), "a"), (stamp(2), "b"))
    logs = keeper(node, tmp_path)
    hear(logs)
    full = True

    def append(*arguments: Any) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*arguments)

    real = room._append
    monkeypatch.setattr(room, "_append", append)
    assert not keep(logs, driver())
    assert "No space left on device" in logs.trouble
    logs._give_up_seconds = 0
    assert keep(logs, driver()), "it holds up the sweep for ever"
    full = False
    logs.append_forgotten({(7, 1)})
    assert not driver_log(tmp_path, 7).exists(), "a start that lives is not forgotten"
    logs.append_forgotten(set())
    assert whole(tmp_path).splitlines()[1:3] == ["a", "b"]
    assert logs.trouble == ""
    assert parts(tmp_path, 7) == []


def test_that_a_disk_was_full_is_said_no_longer_than_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_until: Any
) -> None:
    """A driver may run for days before the next log is written to its end, and there may be none at all."""
    node = Node((stamp(1), "a"))
    node.ends = False
    logs = keeper(node, tmp_path)

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    has_room = room._has_room
    assert has_room(tmp_path)
    assert not has_room(tmp_path / "none")
    with monkeypatch.context() as full:
        full.setattr(room, "_begun", fail)
        full.setattr(room, "_has_room", lambda _: False)
        logs.follow([driver()])
        wait_until(lambda: "No space left on device" in logs.trouble, 5)
        logs.follow([driver()])
        assert "No space left on device" in logs.trouble
    logs.follow([])
    assert logs.trouble == ""
    assert list(tmp_path.iterdir()) == []
    logs.close()


def test_a_line_that_was_heard_in_half_is_kept_whole(tmp_path: Path) -> None:
    node = Node((stamp(1), "a"), (stamp(2), "a long line"))
    node.cut = 6
    hear(keeper(node, tmp_path))
    node.cut = 0
    assert keep(keeper(node, tmp_path), driver())
    assert whole(tmp_path).splitlines()[1:] == ["a", "a long line"]


def test_more_drivers_than_are_held_open_are_read_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "FOLLOWERS_MAX", 1)
    monkeypatch.setattr(room, "IN_TURN_SECONDS", 0.0)
    node = Node((stamp(1), "a"))
    node.ends = False
    logs = keeper(node, tmp_path)
    logs.follow([driver("u1"), driver("u2", 2)])
    logs._followers["u2"].done.result(120)
    assert any(part.read_text().endswith("a\n") for part in parts(tmp_path, 7) if "u2" in part.name)
    logs.close()


def test_what_was_heard_of_a_pod_that_is_gone_is_appended(tmp_path: Path) -> None:
    """The Job's TTL took it while no loop was there."""
    hear(keeper(Node((stamp(1), "a")), tmp_path))
    keeper(Node(), tmp_path).append_leftovers([(7, 1)])
    assert whole(tmp_path).splitlines()[1:] == ["a", "--- the rest of the log was gone with its Pod"]
    assert parts(tmp_path, 7) == []


@pytest.mark.parametrize("left", ["append", "half", "mark"])
def test_an_append_that_was_cut_short_is_done_once(tmp_path: Path, left: str) -> None:
    node = Node((stamp(1), "a"))
    hear(keeper(node, tmp_path))
    part = parts(tmp_path, 7)[0]
    log = driver_log(tmp_path, 7)
    log.write_text("earlier\n")
    part.with_suffix(".append").write_text(str(len("earlier\n")))
    done = "earlier\n--- run 7 start 1, Pod orca-7-1-u1, uid u1\na\n"
    if left == "half":
        log.write_text("earlier\n--- run 7 st")
    if left == "mark":
        log.write_text(done)
        part.unlink()
    assert keep(keeper(node, tmp_path), driver())
    assert log.read_text() == done


def test_an_endless_line_is_written_in_pieces_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_LINE_MAX", 1000)
    node = Node((stamp(1), "x" * 50_000), (stamp(2), "after"), piece=512)
    assert keep(keeper(node, tmp_path), driver())
    assert whole(tmp_path).splitlines()[1:] == ["x" * 50_000, "after"]


def test_a_running_driver_is_followed_once_and_its_part_can_be_read_meanwhile(tmp_path: Path, wait_until: Any) -> None:
    node = Node((stamp(1), "a"))
    node.ends = False
    logs = keeper(node, tmp_path)
    logs.follow([driver(), driver("u2", phase=PodPhase.PENDING)])
    logs.follow([driver()])
    wait_until(lambda: node.asked == [None], 5)
    assert keep(logs, driver())
    assert whole(tmp_path).splitlines()[1:] == ["a"]
    assert len(node.asked) == 2
    logs.close()


def test_what_a_driver_said_before_it_fell_silent_can_be_read_at_once(tmp_path: Path, wait_until: Any) -> None:
    node = Node((stamp(1), "a"), (stamp(1), "b"), (stamp(1), "c"), piece=4096)
    node.ends = False
    logs = keeper(node, tmp_path)
    logs.follow([driver()])
    wait_until(lambda: parts(tmp_path, 7) and parts(tmp_path, 7)[0].read_text().endswith("a\nb\nc\n"), 5)
    logs.close()


def test_a_log_that_cannot_be_followed_is_not_asked_for_in_a_tight_loop(tmp_path: Path, wait_until: Any) -> None:
    node = Node()
    node.fault = Transient("not now")
    logs = keeper(node, tmp_path)
    logs.follow([driver()])
    logs._followers["u1"].done.result(120)
    for _ in range(5):
        logs.follow([driver()])
    assert len(node.asked) == 1


def test_a_folder_that_cannot_be_written_holds_nothing_up_for_ever_and_is_said(tmp_path: Path) -> None:
    (tmp_path / "7").write_text("a file where the folder should be")
    logs = keeper(Node((stamp(1), "a")), tmp_path)
    assert not keep(logs, driver())
    assert str(tmp_path) in logs.trouble
    logs.follow([])
    assert str(tmp_path) in logs.trouble, "that there is room on the disk does not mend it"
    logs._give_up_seconds = 0
    assert keep(logs, driver())


def test_old_logs_are_deleted_but_not_those_that_may_go_on_nor_what_is_somebody_elses(tmp_path: Path) -> None:
    for name in ("7/driver.log", "8/driver.log", "8/notes", "9/driver.log", "9/.driver-2-u1.part", "theirs/driver.log"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("said long ago")
        os.utime(path, (1e9, 1e9))
    young = driver_log(tmp_path, 10)
    young.parent.mkdir()
    young.write_text("said just now")
    logs = keeper(Node(), tmp_path)
    assert logs.delete_old(datetime.now(UTC) - timedelta(hours=1)) == 2
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert left == [
        *(
            "10",
            "10/driver.log",
            "8",
            "8/notes",
            "9",
            "9/.driver-2-u1.part",
            "9/driver.log",
            "theirs",
            "theirs/driver.log",
        )
    ]
    assert keeper(Node(), tmp_path / "none").delete_old(datetime.now(UTC) - timedelta(hours=1)) == 0
