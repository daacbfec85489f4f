"""The comment on a pull request, against a server that answers as GitHub does; and the workflow's own scripts."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from orca_infra.errors import AuthFailed, OrcaError, Refused, Transient, UserError
from orca_infra.preview.github import PullRequest, pull_request_of, put_comment
from orca_infra.preview.markdown import marker
from orca_infra.testing import fake_github as fake
from orca_infra.testing.fake_github import FakeGitHub

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / "deploy" / "github" / "orca-infra.yml"
MARKER = marker("prod")
BODY = f"{MARKER}\nnew"


@pytest.fixture
def github() -> Iterator[FakeGitHub]:
    with fake.fake_github() as one:
        yield one


def put(github: FakeGitHub, body: str = BODY, token: str = "") -> tuple[str, str]:
    where = PullRequest(api=github.url, repository=fake.REPOSITORY, number=fake.NUMBER, token=token or fake.TOKEN)
    return put_comment(where, MARKER, body, sleep=github.waits.append)


def test_the_first_is_made_and_each_later_one_takes_its_place(github: FakeGitHub) -> None:
    github.add("a person's comment", user="User")
    assert put(github) == ("created", "https://github.example/c/2")
    assert put(github, f"{MARKER}\nnewer") == ("updated", "https://github.example/c/2")
    assert [one["body"] for one in github.comments] == ["a person's comment", f"{MARKER}\nnewer"]


def test_it_is_found_on_a_later_page(github: FakeGitHub) -> None:
    for number in range(250):
        github.add(f"comment {number}", user="User")
    github.add(f"{MARKER}\nold")
    for number in range(100):
        github.add(f"more {number}", user="User")
    assert put(github)[0] == "updated"
    assert len(github.comments) == 351
    assert [call.partition("page=100&")[2] for call in github.calls[:-1]] == ["page=1", "page=2", "page=3"]


def test_with_pages_that_are_just_full_there_is_one_call_more_and_a_new_comment(github: FakeGitHub) -> None:
    for number in range(100):
        github.add(f"comment {number}", user="User")
    assert put(github)[0] == "created"


def test_another_stacks_comment_stays(github: FakeGitHub) -> None:
    github.add(f"{marker('dev')}\nof dev")
    assert put(github)[0] == "created"


@pytest.mark.parametrize("body", [f"{MARKER}\nours?", f"quoted: {MARKER}"])
def test_a_strangers_comment_with_the_marker_is_not_taken_for_ours(github: FakeGitHub, body: str) -> None:
    github.add(body, user="User", association="CONTRIBUTOR")
    assert put(github)[0] == "created"
    assert github.comments[0]["body"] == body


def test_that_of_a_colleague_with_a_token_of_their_own_is(github: FakeGitHub) -> None:
    github.add(f"{MARKER}\nold", user="User", association="MEMBER")
    assert put(github)[0] == "updated"


def test_one_that_somebody_deleted_meanwhile_is_made_anew(github: FakeGitHub) -> None:
    github.add(f"{MARKER}\nold")
    github.failures, github.failing = [(404, {}, "Not Found")], "PATCH"
    assert put(github)[0] == "created"


@pytest.mark.parametrize(
    ("status", "headers", "error", "says"),
    [
        (401, {}, AuthFailed, "the job needs `permissions: pull-requests: write`"),
        (403, {}, AuthFailed, "Resource not accessible by integration"),
        (404, {}, OrcaError, "is GITHUB_REPOSITORY right"),
        (422, {}, Refused, "GitHub refuses the comment (422: "),
    ],
)
def test_a_refusal_says_what_to_do(
    github: FakeGitHub, status: int, headers: dict[str, str], error: type[OrcaError], says: str
) -> None:
    github.failures = [(status, headers, "Resource not accessible by integration")] * 9
    with pytest.raises(error) as caught:
        put(github)
    assert says in str(caught.value)
    assert fake.TOKEN not in str(caught.value)
    assert len(github.calls) == 1


def test_a_wrong_token_is_told_apart_and_never_shown(github: FakeGitHub) -> None:
    with pytest.raises(AuthFailed, match="Bad credentials") as caught:
        put(github, token="ghs_wrong-wrong")
    assert "ghs_wrong" not in str(caught.value)


def test_a_token_with_a_lines_end_is_used_without_it_and_one_that_can_be_none_is_not_quoted() -> None:
    environ = {"GITHUB_TOKEN": "ghs_planted\n", "GITHUB_REPOSITORY": "a/b"}
    assert pull_request_of(environ, 1).token == "ghs_planted"
    for token in ("ghs_planted\nx", "ghs_plantedé", "ghs planted"):
        with pytest.raises(UserError, match="a character that no token has") as caught:
            pull_request_of({**environ, "GITHUB_TOKEN": token}, 1)
        assert "planted" not in str(caught.value)


def test_it_waits_when_github_asks_for_it(github: FakeGitHub) -> None:
    github.failures = [
        (429, {"Retry-After": "7"}, "slow down"),
        (403, {"Retry-After": "3000"}, "You have exceeded a secondary rate limit"),
        (502, {}, "Bad gateway"),
    ]
    assert put(github)[0] == "created"
    assert github.waits == [7.0, 60.0, 8.0]


def test_it_gives_up_in_the_end(github: FakeGitHub) -> None:
    github.failures = [(503, {}, "away")] * 9
    with pytest.raises(Transient, match="run the job again"):
        put(github)
    assert len(github.calls) == 4


def test_a_comment_of_which_nobody_knows_whether_it_was_made_is_not_made_twice(github: FakeGitHub) -> None:
    github.failures, github.failing = [(502, {}, "Bad gateway")], "POST"
    with pytest.raises(Transient):
        put(github)
    assert [call.partition(" ")[0] for call in github.calls] == ["GET", "POST"]
    # But one that was surely not made is.
    github.failures, github.failing = [(429, {"Retry-After": "1"}, "slow down")], "POST"
    assert put(github)[0] == "created"
    assert len(github.comments) == 1


def test_nobody_there_is_no_traceback() -> None:
    where = PullRequest(api="http://127.0.0.1:1", repository="a/b", number=1, token="t")
    with pytest.raises(Transient, match="GitHub is not to be reached now"):
        put_comment(where, MARKER, BODY, sleep=lambda _seconds: None)


def test_which_pull_request_it_is(tmp_path: Path) -> None:
    event = tmp_path / "event.json"
    event.write_text(json.dumps({"pull_request": {"number": 7}}))
    environ = {"GITHUB_TOKEN": "t", "GITHUB_REPOSITORY": "a/b", "GITHUB_EVENT_PATH": str(event)}
    assert pull_request_of(environ, None) == PullRequest(
        api="https://api.github.com", repository="a/b", number=7, token="t"
    )
    assert pull_request_of(environ, 8).number == 8
    assert "t" not in repr(pull_request_of(environ, None)).replace("https", "").partition("token")[2]
    for name, says in [
        ("GITHUB_TOKEN", "GITHUB_TOKEN"),
        ("GITHUB_REPOSITORY", "GITHUB_REPOSITORY"),
        ("GITHUB_EVENT_PATH", "--pull-request NUMBER"),
    ]:
        with pytest.raises(UserError, match=re.escape(says)):
            pull_request_of({**environ, name: ""}, None)
    event.write_text("{}")
    with pytest.raises(UserError, match="--pull-request NUMBER"):
        pull_request_of(environ, None)
    with pytest.raises(UserError, match="must be a URL"):
        pull_request_of({**environ, "GITHUB_API_URL": "file:///etc/passwd"}, 1)


# The workflow.

EXPRESSION = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")


@pytest.fixture(scope="module")
def workflow() -> dict[Any, Any]:
    loaded: dict[Any, Any] = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    return loaded


def steps(workflow: Mapping[Any, Any], job: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = workflow["jobs"][job]["steps"]
    return found


def test_its_rights_are_the_least_and_two_never_run_at_once(workflow: dict[Any, Any]) -> None:
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["jobs"]["preview"]["permissions"] == {"contents": "read", "pull-requests": "write"}
    assert "permissions" not in workflow["jobs"]["check"]
    assert workflow["concurrency"]["cancel-in-progress"] is True
    assert "pull_request.number" in workflow["concurrency"]["group"]
    # `on`, which YAML 1.1 reads as true. pull_request_target would run a fork's code with the secrets.
    assert set(workflow[True]) == {"pull_request"}


def test_a_fork_gets_the_check_and_no_secret(workflow: dict[Any, Any]) -> None:
    assert set(workflow["jobs"]) == {"check", "preview"}
    assert "if" not in workflow["jobs"]["check"]
    condition = workflow["jobs"]["preview"]["if"]
    assert "github.event.pull_request.head.repo.full_name == github.repository" in condition
    without_preview = {**workflow, "jobs": {"check": workflow["jobs"]["check"]}}
    assert "secrets." not in json.dumps({str(key): value for key, value in without_preview.items()})
    assert "github.token" not in json.dumps(workflow["jobs"]["check"])


def test_actions_are_pinned_to_a_commit_and_leave_no_token_behind(workflow: dict[Any, Any]) -> None:
    used = [step for job in workflow["jobs"] for step in steps(workflow, job) if "uses" in step]
    assert len(used) == 5
    for step in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"])
        if step["uses"].startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


def test_no_script_has_an_expression_in_it(workflow: dict[Any, Any]) -> None:
    """What a pull request says (its title, its branch) would be run as a script."""
    for job in workflow["jobs"].values():
        assert "timeout-minutes" in job
        for step in job["steps"]:
            assert "${{" not in step.get("run", "")


class Runner:
    """Runs a job's scripts as GitHub does, in a checkout of the test whose HEAD merges a change of orca.toml."""

    def __init__(self, folder: Path, workflow: dict[Any, Any], github: FakeGitHub) -> None:
        self.workflow, self.folder = workflow, folder / "checkout"
        self.temporary = folder / "temp"
        self.temporary.mkdir()
        self.tools = folder / "tools"
        self.tools.mkdir()
        self.github = github
        self._program("orca-infra", f'exec {sys.executable} -m orca_infra.cli "$@"')
        # Installing is pip's own business: what it is asked for is what counts.
        self._program("python", f'echo "$@" >> {folder / "pip.log"}')
        self.installed = folder / "pip.log"
        event = folder / "event.json"
        event.write_text(json.dumps({"pull_request": {"number": fake.NUMBER}}))
        self.base = {
            "PATH": f"{self.tools}:{os.environ['PATH']}",
            "HOME": "/dev/null",
            "RUNNER_TEMP": str(self.temporary),
            "GITHUB_REPOSITORY": fake.REPOSITORY,
            "GITHUB_EVENT_PATH": str(event),
            "GITHUB_API_URL": github.url,
        }
        self.values = {"github.token": fake.TOKEN, "vars.ORCA_DEMAND || 'live'": "demand.json"}

    def _program(self, name: str, script: str) -> None:
        path = self.tools / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def commit(self, toml: str) -> None:
        self.folder.mkdir(exist_ok=True)
        (self.folder / "orca.toml").write_text(toml)
        who = ["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "init.defaultBranch=main"]
        for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "c"]):
            subprocess.run(
                ["git", *who, *command], cwd=self.folder, check=True, env={**os.environ, "HOME": "/dev/null"}
            )

    def run(self, job: str) -> tuple[int, str]:
        """The exit code of the first step that fails, else 0; and all that was said."""
        said = ""
        for step in steps(self.workflow, job):
            if "run" not in step:
                continue
            environment = {**self.workflow["env"], **self.workflow["jobs"][job].get("env", {}), **step.get("env", {})}
            filled = {name: self._fill(str(value)) for name, value in environment.items()}
            done = subprocess.run(
                ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
                cwd=self.folder,
                env={**self.base, **filled},
                capture_output=True,
                text=True,
                timeout=240,
                check=False,
            )
            said += done.stdout + done.stderr
            if done.returncode:
                return done.returncode, said
        return 0, said

    def _fill(self, text: str) -> str:
        return EXPRESSION.sub(lambda found: self.values.get(found[1], ""), text)


TOML = """
[pools.gpu]
provider = "local"
image = "registry.example/worker:1"
locations = ["east"]
max_machines = 4
idle_seconds = "10m"
types = [{ type = "large", price_per_hour = 2.5 }]
"""
SNAPSHOT = {
    "form": 1,
    "stack": "prod",
    "taken_at": "2026-11-29T12:00:00Z",
    "machines": {
        "now": "2026-11-29T12:00:00Z",
        "stack_id": "mystackmystackid",
        "hearing_since": "2026-11-29T12:00:00Z",
        "demand": {"gpu": {"aged": 3, "waiting": 3}},
    },
    "limits": {
        "try_seconds": 60,
        "boot_seconds": 900,
        "lost_seconds": 300,
        "stray_grace_seconds": 60,
        "stray_max": 20,
        "lost_max": 3,
    },
}


@pytest.fixture
def runner(tmp_path: Path, workflow: dict[Any, Any], github: FakeGitHub) -> Runner:
    one = Runner(tmp_path, workflow, github)
    one.commit(TOML.replace("max_machines = 4", "max_machines = 2"))
    (one.folder / "demand.json").write_text(json.dumps(SNAPSHOT))
    one.commit(TOML)
    return one


def test_the_check_of_a_good_and_of_a_bad_file(runner: Runner) -> None:
    code, said = runner.run("check")
    assert code == 0, said
    assert "orca.toml: good; 1 pool" in said
    assert runner.installed.read_text() == "-m pip install --quiet .\n"
    (runner.folder / "orca.toml").write_text(TOML.replace("idle_seconds", "idle_sec"))
    code, said = runner.run("check")
    assert code == 2
    assert "idle_sec: unknown key; did you mean idle_seconds?" in said
    assert runner.github.calls == []


def test_the_preview_comments_and_comments_again_in_the_same_place(runner: Runner) -> None:
    code, said = runner.run("preview")
    assert code == 0, said
    [comment] = runner.github.comments
    assert comment["body"].startswith(marker("prod"))
    assert "| Decisions | 1 to act on: machines +1 -0 |" in comment["body"]
    assert "| Machines an hour, at most | 5.00 → 10.00 |" in comment["body"]
    # Everything is in the log, too.
    assert "! machines: make 1 machine for gpu: 3 runs wait" in said
    assert "comment created: https://github.example/c/1" in said
    runner.commit(TOML.replace("max_machines = 4", "max_machines = 8"))
    code, said = runner.run("preview")
    assert code == 0, said
    assert "| Machines an hour, at most | 10.00 → 20.00 |" in comment["body"]
    assert len(runner.github.comments) == 1


def test_the_preview_fails_when_it_failed_and_when_it_cannot_comment(runner: Runner) -> None:
    runner.github.failures = [(403, {}, "Resource not accessible by integration")] * 9
    code, said = runner.run("preview")
    assert code == 1
    assert "the job needs `permissions: pull-requests: write`" in said
    assert fake.TOKEN not in said
    runner.github.failures = []
    (runner.folder / "demand.json").write_text("{}")
    code, said = runner.run("preview")
    assert code == 1
    assert "is no demand snapshot of this version" in said
    assert runner.github.comments == []


def test_the_passphrase_goes_into_a_file_of_its_own(runner: Runner) -> None:
    runner.values["secrets.PULUMI_CONFIG_PASSPHRASE"] = "a passphrase that is secret"
    code, said = runner.run("preview")
    assert code == 0, said
    file = runner.temporary / "passphrase"
    assert file.read_text() == "a passphrase that is secret\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "a passphrase" not in said + runner.github.comments[0]["body"]


def test_a_file_that_is_new_has_nothing_to_be_compared_with(runner: Runner) -> None:
    (runner.folder / ".git").rename(runner.folder.parent / "gone")
    code, said = runner.run("preview")
    assert code == 0, said
    assert "| Machines an hour, at most | 10.00 |" in runner.github.comments[0]["body"]
