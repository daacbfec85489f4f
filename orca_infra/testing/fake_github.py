"""A pull request's comments as GitHub serves them: listed by pages, made, patched, and answers that fail."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

REPOSITORY = "acme/infra"
NUMBER = 41
TOKEN = "ghs_a-token-of-the-tests"  # noqa: S105  (it opens nothing)
LIMIT = 65_536


@dataclass
class FakeGitHub:
    """The comments of one pull request. `failures` are answered first, one a call: status, headers, message."""

    url: str = ""
    comments: list[dict[str, Any]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    failures: list[tuple[int, dict[str, str], str]] = field(default_factory=list)
    #: The failures are for these calls only, such as "PATCH".
    failing: str = ""
    #: How long whoever calls was told to wait, for a test that waits by this.
    waits: list[float] = field(default_factory=list)

    def add(self, body: str, *, user: str = "Bot", association: str = "NONE") -> int:
        """A comment that is there already; gives its number."""
        number = len(self.comments) + 1
        one = {"id": number, "body": body, "user": {"type": user}, "author_association": association}
        self.comments.append({**one, "html_url": f"https://github.example/c/{number}"})
        return number

    def answer(self, method: str, path: str, authorization: str, content: Any) -> tuple[int, dict[str, str], Any]:
        self.calls.append(f"{method} {path}")
        if self.failures and method.startswith(self.failing):
            status, headers, message = self.failures.pop(0)
            return status, headers, {"message": message}
        if authorization != f"Bearer {TOKEN}":
            return 401, {}, {"message": "Bad credentials"}
        parts = urlsplit(path)
        issues = f"/repos/{REPOSITORY}/issues"
        if content is not None and len(content.get("body", "")) > LIMIT:
            return 422, {}, {"message": f"Body is too long (maximum is {LIMIT} characters)"}
        if parts.path == f"{issues}/{NUMBER}/comments" and method == "GET":
            query = {key: int(values[0]) for key, values in parse_qs(parts.query).items()}
            size, page = query.get("per_page", 30), query.get("page", 1)
            return 200, {}, self.comments[(page - 1) * size : page * size]
        if parts.path == f"{issues}/{NUMBER}/comments" and method == "POST":
            self.add(content["body"])
            return 201, {}, self.comments[-1]
        if parts.path.startswith(f"{issues}/comments/") and method == "PATCH":
            found = [one for one in self.comments if str(one["id"]) == parts.path.rpartition("/")[2]]
            if found:
                found[0]["body"] = content["body"]
                return 200, {}, found[0]
        return 404, {}, {"message": "Not Found"}


@contextmanager
def fake_github() -> Iterator[FakeGitHub]:
    """Serve one on a free port of this machine."""
    github = FakeGitHub()

    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            content = json.loads(self.rfile.read(length)) if length else None
            status, headers, answer = github.answer(
                self.command, self.path, self.headers.get("Authorization", ""), content
            )
            text = json.dumps(answer).encode()
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(text))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PATCH = _serve  # noqa: N815  (the server's names)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        github.url = f"http://127.0.0.1:{server.server_port}"
        yield github
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
