"""Whose a bearer token is: from a file, or as the cluster says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orca_infra.errors import Refused, SetupError, Transient
from orca_infra.runtimes.callers import REVIEW_SECONDS, Caller, FileTokens, ReviewedTokens


def test_a_file_says_whose_a_token_is_and_is_read_anew_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "tokens.csv"
    path.write_text('# comment\nt1,jane\nt2,"hub",7,"group"\n\n')
    tokens = FileTokens(path, launchers=["hub"])
    assert tokens.find("t1") == Caller(user="jane")
    assert tokens.find("t2") == Caller(user="hub", launcher=True)
    assert tokens.find("t3") is tokens.find("") is tokens.find("# comment") is None
    path.write_text("t3,john\n")
    assert tokens.find("t3") == Caller(user="john")
    assert tokens.find("t1") is None
    path.write_text("no user in this line\n")
    assert tokens.find("t3") == Caller(user="john")
    path.unlink()
    assert tokens.find("t3") == Caller(user="john")


@pytest.mark.parametrize("text", ["s3cr3t\n", ",jane\n", "s3cr3t,\n", "s3cr3t, ,x\n"])
def test_a_bad_file_is_refused_without_its_tokens(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokens.csv"
    path.write_text("ok,jane\n" + text)
    with pytest.raises(SetupError, match=r"tokens.csv:2: must be TOKEN,USER") as refused:
        FileTokens(path)
    assert "s3cr3t" not in str(refused.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="ORCA_RUNTIMES_TOKENS names .*nowhere"):
        FileTokens(tmp_path / "nowhere")


class Cluster:
    """Reviews tokens, as a Kube does."""

    def __init__(self, answer: dict[str, Any] | Exception) -> None:
        self.answer = answer
        self.asked: list[dict[str, Any]] = []

    def create(self, review: dict[str, Any], **_: object) -> dict[str, Any]:
        self.asked.append(review["spec"])
        if isinstance(self.answer, Exception):
            raise self.answer
        return {"status": self.answer}


def reviewed(answer: dict[str, Any] | Exception, **more: Any) -> tuple[ReviewedTokens, Cluster, list[float]]:
    cluster, now = Cluster(answer), [0.0]
    return ReviewedTokens(cluster, clock=lambda: now[0], **more), cluster, now  # type: ignore[arg-type]


JANE = {"authenticated": True, "user": {"username": "jane"}}


def test_the_clusters_word_holds_for_seconds() -> None:
    tokens, cluster, now = reviewed(JANE, launchers=["jane"])
    assert tokens.find("t") == tokens.find("t") == Caller(user="jane", launcher=True)
    assert cluster.asked == [{"token": "t"}]
    now[0] = REVIEW_SECONDS
    cluster.answer = {"authenticated": False}
    assert tokens.find("t") is None
    assert tokens.find("t") is None
    assert len(cluster.asked) == 2


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"authenticated": False, "user": {"username": "jane"}},
        {"authenticated": True},
        {**JANE, "audiences": ["other"]},
        JANE,
    ],
)
def test_a_token_for_somebody_else_is_nobodys(answer: dict[str, Any]) -> None:
    tokens, cluster, _ = reviewed(answer, audience="orca")
    assert tokens.find("t") is None
    assert cluster.asked == [{"token": "t", "audiences": ["orca"]}]


def test_a_token_for_us_is_taken() -> None:
    tokens, _, _ = reviewed({**JANE, "audiences": ["orca"]}, audience="orca")
    assert tokens.find("t") == Caller(user="jane")


def test_a_cluster_that_does_not_answer_is_no_reason_to_call_a_token_bad() -> None:
    tokens, cluster, _ = reviewed(Refused("it quotes s3cr3t"))
    with pytest.raises(Transient, match=r"does not review tokens now \(Refused\)") as error:
        tokens.find("s3cr3t")
    assert "s3cr3t" not in str(error.value)
    cluster.answer = JANE
    assert tokens.find("s3cr3t") == Caller(user="jane")
    assert tokens.find("x" * 20_000) is None
    assert len(cluster.asked) == 2
