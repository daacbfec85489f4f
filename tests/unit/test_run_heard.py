"""What a run's drivers said, printed while it is written: every line once, whatever happens to the files meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from orca_infra.kube.answers import Refusal, refusal_of
from orca_infra.runs import logs as room
from orca_infra.runs.heard import Heard
from orca_infra.runs.logs import driver_log


def header(start: int, uid: str) -> str:
    return f"--- run 7 start {start}, Pod orca-7-{start}-x, uid {uid}\n"


def begin(folder: Path, start: int, uid: str, text: str) -> Path:
    part = folder / "7" / f".driver-{start}-{uid}.part"
    part.parent.mkdir(exist_ok=True)
    part.write_text(header(start, uid) + text)
    return part


def say(part: Path, text: str) -> None:
    with part.open("a") as file:
        file.write(text)


def news(heard: Heard) -> str:
    return b"".join(heard.news()).decode()


def test_what_is_said_between_two_looks_is_printed_though_its_part_was_appended_meanwhile(tmp_path: Path) -> None:
    part = begin(tmp_path, 1, "a-b", "one\n")
    heard = Heard(tmp_path, 7)
    assert news(heard) == header(1, "a-b") + "one\n"
    say(part, "two\n")
    room._append(driver_log(tmp_path, 7), part, "--- a note\n")
    assert news(heard) == "two\n--- a note\n"
    assert news(heard) == ""


def test_starts_that_follow_one_another_are_all_printed_once(tmp_path: Path) -> None:
    first = begin(tmp_path, 1, "u1", "one\n")
    heard = Heard(tmp_path, 7)
    text = news(heard)
    room._append(driver_log(tmp_path, 7), first, "")
    second = begin(tmp_path, 2, "u2", "begin\n")
    text += news(heard)
    say(second, "end\n")
    room._append(driver_log(tmp_path, 7), second, "")
    third = begin(tmp_path, 3, "u3", "quick\n")
    room._append(driver_log(tmp_path, 7), third, "")
    text += news(heard)
    assert text == driver_log(tmp_path, 7).read_text()


def test_nothing_is_printed_of_what_is_not_there(tmp_path: Path) -> None:
    heard = Heard(tmp_path, 7)
    assert heard.is_empty()
    assert news(heard) == ""


@pytest.mark.parametrize(
    ("words", "meaning"),
    [
        (
            'services "s" is forbidden: exceeded quota: q, requested: count/services=1, used: 0, limited: 0',
            Refusal.QUOTA,
        ),
        ('jobs.batch is forbidden: User "u" cannot create resource "jobs" in API group "batch"', Refusal.RIGHTS),
        (
            "jobs.batch \"j\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied request: no",
            Refusal.FINAL,
        ),
        ('admission webhook "w.example.com" denied the request: no', Refusal.FINAL),
        ('Job.batch "j" is invalid: spec.template.spec.containers[0].image: Required value', Refusal.FINAL),
        (
            'Internal error occurred: failed calling webhook "w": failed to call webhook: connection refused',
            Refusal.ABSENT,
        ),
        ('Internal error occurred: failed calling webhook "w": context deadline exceeded', Refusal.UNKNOWN),
        ("configured Kubernetes cluster is unreachable", Refusal.ABSENT),
        (
            'pods "p" is forbidden: unable to create new content in namespace n because it is being terminated',
            Refusal.ABSENT,
        ),
        ("http2: client connection lost", Refusal.UNKNOWN),
        ("the server has received too many requests and has asked us to try again later", Refusal.UNKNOWN),
        ('Apply failed with 1 conflict: conflict with "kubectl": .spec', Refusal.FINAL),
    ],
)
def test_what_the_words_of_a_failed_create_mean(words: str, meaning: Refusal) -> None:
    assert refusal_of(words) is meaning
