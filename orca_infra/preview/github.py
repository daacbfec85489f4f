"""The comment on a pull request: made, or put in the place of the one before. GitHub's REST API, version 2022-11-28.

https://docs.github.com/en/rest/issues/comments: a pull request's conversation is its issue's. The standard library's client
is enough for three calls.
"""

from __future__ import annotations

import http.client
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orca_infra.errors import AuthFailed, OrcaError, Refused, Transient, UserError

_VERSION = "2022-11-28"
_PAGE = 100
_MOST_PAGES = 100
_TRIES = 4
_LONGEST_WAIT_SECONDS = 60.0
_TIMEOUT_SECONDS = 30.0
#: Whose comments can be ours: a workflow's token is a bot, a person's belongs to somebody with rights here.
_OURS = ("OWNER", "MEMBER", "COLLABORATOR")


@dataclass(frozen=True, slots=True, kw_only=True)
class PullRequest:
    """Which pull request, where, and as whom."""

    api: str
    repository: str
    number: int
    token: str = field(repr=False)


def pull_request_of(environ: Mapping[str, str], number: int | None) -> PullRequest:
    """From what GitHub Actions sets for every job. Raises UserError naming what is missing."""
    token = (environ.get("GITHUB_TOKEN") or environ.get("GH_TOKEN") or "").strip()
    repository = environ.get("GITHUB_REPOSITORY") or ""
    if not token:
        raise UserError("--comment needs GITHUB_TOKEN: in a workflow, `env: GITHUB_TOKEN: ${{ github.token }}`")
    if not re.fullmatch(r"[!-~]+", token):  # refused later, it would be in words that quote it
        raise UserError("GITHUB_TOKEN has a character that no token has (it is not shown): set it to the token alone")
    if repository.count("/") != 1:
        raise UserError("--comment needs GITHUB_REPOSITORY, such as owner/name")
    found = number or _number_of_event(environ)
    if not found:
        raise UserError(
            "--comment needs the pull request: run it for a pull_request event, or say --pull-request NUMBER"
        )
    api = (environ.get("GITHUB_API_URL") or "https://api.github.com").rstrip("/")
    if not api.startswith(("https://", "http://")):
        raise UserError(f"GITHUB_API_URL={api}: must be a URL such as https://api.github.com")
    return PullRequest(api=api, repository=repository, number=found, token=token)


def _number_of_event(environ: Mapping[str, str]) -> int | None:
    path = environ.get("GITHUB_EVENT_PATH")
    if not path:
        return None
    try:
        event = json.loads(Path(path).read_text(encoding="utf-8"))
        return int(event["pull_request"]["number"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def put_comment(
    where: PullRequest, marker: str, body: str, *, sleep: Callable[[float], None] = time.sleep
) -> tuple[str, str]:
    """Replace this program's comment, or make it when there is none; gives `updated` or `created`, and its address.

    Raises AuthFailed, Refused or Transient, each with the next step.
    """
    client = _Client(where, sleep)
    issue = f"/repos/{where.repository}/issues"
    before = next((one for one in client.comments(f"{issue}/{where.number}/comments") if _is_ours(one, marker)), None)
    if before is not None:
        try:
            made = client.call("PATCH", f"{issue}/comments/{int(before['id'])}", {"body": body})
        except _Gone:
            pass  # somebody deleted it meanwhile
        else:
            return "updated", str(made.get("html_url", ""))
    made = client.call("POST", f"{issue}/{where.number}/comments", {"body": body})
    return "created", str(made.get("html_url", ""))


def _is_ours(comment: Mapping[str, Any], marker: str) -> bool:
    """By its first line, and by who wrote it: anybody can write a marker into a comment."""
    user = comment.get("user") or {}
    trusted = user.get("type") == "Bot" or comment.get("author_association") in _OURS
    return trusted and str(comment.get("body") or "").startswith(marker)


class _Gone(OrcaError):
    """What was asked for is not there."""


class _Client:
    def __init__(self, where: PullRequest, sleep: Callable[[float], None]) -> None:
        self._where = where
        self._sleep = sleep

    def comments(self, path: str) -> Iterator[Mapping[str, Any]]:
        """Every comment, page by page."""
        for page in range(1, _MOST_PAGES + 1):
            found = self.call("GET", f"{path}?per_page={_PAGE}&page={page}")
            if not isinstance(found, list):
                raise Transient("GitHub answered something else than a list of comments; try again")
            yield from found
            if len(found) < _PAGE:
                return

    def call(self, method: str, path: str, content: Mapping[str, Any] | None = None) -> Any:
        """One call, tried again when GitHub asks for it or is away; a comment is never made twice."""
        for attempt in range(1, _TRIES + 1):
            try:
                return self._once(method, path, content)
            except _Busy as busy:
                if attempt == _TRIES or (method == "POST" and not busy.was_not_done):
                    raise Transient(f"GitHub is not to be reached now ({busy}); run the job again") from busy
                self._sleep(min(busy.wait_seconds or 2.0**attempt, _LONGEST_WAIT_SECONDS))
        raise AssertionError

    def _once(self, method: str, path: str, content: Mapping[str, Any] | None) -> Any:
        request = urllib.request.Request(  # noqa: S310  (http or https, as checked above)
            self._where.api + path,
            method=method,
            data=None if content is None else json.dumps(content).encode(),
            headers={
                "Accept": "application/vnd.github+json",
                "Authorization": f"Bearer {self._where.token}",
                "Content-Type": "application/json",
                "User-Agent": "orca-infra",
                "X-GitHub-Api-Version": _VERSION,
            },
        )
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:  # noqa: S310
                return json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            raise self._meaning(error, method, path) from error
        except ConnectionRefusedError as error:
            raise _Busy(str(error), was_not_done=True) from error
        except urllib.error.URLError as error:
            refused = isinstance(error.reason, ConnectionRefusedError | OSError) and not isinstance(
                error.reason, TimeoutError
            )
            raise _Busy(str(error.reason), was_not_done=refused) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _Busy(str(error) or type(error).__name__) from error

    def _meaning(self, error: urllib.error.HTTPError, method: str, path: str) -> OrcaError:
        said = _message(error)
        wait = error.headers.get("Retry-After") or ""
        limited = error.code in {403, 429} and (wait or error.headers.get("X-RateLimit-Remaining") == "0")
        if limited or error.code == 429:
            return _Busy(said, wait_seconds=float(wait) if wait.isdigit() else None, was_not_done=True)
        if error.code >= 500:
            return _Busy(f"{error.code}: {said}")
        if error.code in {401, 403}:
            return AuthFailed(
                f"GitHub refuses {method} {path} ({error.code}: {said}): the job needs `permissions: pull-requests: write`; "
                "a fork's pull request has no token that may comment"
            )
        if error.code in {404, 410}:
            return _Gone(
                f"GitHub has no {path} ({error.code}: {said}): is GITHUB_REPOSITORY right, and may the token see it?"
            )
        return Refused(f"GitHub refuses the comment ({error.code}: {said})")


class _Busy(OrcaError):
    """Try again. `was_not_done`: it is certain that nothing was changed."""

    def __init__(self, said: str, *, wait_seconds: float | None = None, was_not_done: bool = False) -> None:
        super().__init__(said)
        self.wait_seconds = wait_seconds
        self.was_not_done = was_not_done


def _message(error: urllib.error.HTTPError) -> str:
    try:
        found = json.loads(error.read(10_000))
        return " ".join(str(found.get("message", "")).split())[:300] or str(error.reason)
    except (ValueError, OSError, AttributeError):
        return str(error.reason)
