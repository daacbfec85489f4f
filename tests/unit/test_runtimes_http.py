"""The HTTP face without servers: what is read from a request, who may what, and how errors are said."""

from __future__ import annotations

import asyncio
import io
import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest

from orca_infra.errors import AuthFailed, OrcaError, QuotaExceeded, Refused, Transient
from orca_infra.kube.errors import Busy
from orca_infra.log import make_log
from orca_infra.runtimes import http
from orca_infra.runtimes.callers import Caller
from orca_infra.runtimes.launch import Launch, LaunchHands, LaunchRequest
from orca_infra.runtimes.living import Runtime, UsageLine
from orca_infra.runtimes.openapi import LAUNCH_FIELDS, openapi

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)
ID = UUID(int=7)
CALLERS = {"jane-token": Caller(user="jane"), "hub-token": Caller(user="hub", launcher=True)}


class Tokens:
    def find(self, token: str) -> Caller | None:
        if token == "away":
            raise Transient("the cluster does not review tokens now")
        return CALLERS.get(token)


@dataclass
class Answer:
    code: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def message(self) -> str:
        return str(self.json["error"]["message"])


@dataclass
class Face:
    """The application with what is behind it replaced."""

    logged: io.StringIO
    hands: Any = None
    app: Any = None
    asked: list[Any] = field(default_factory=list)
    launched: Launch | Exception | None = None
    found: list[Runtime | None] = field(default_factory=list)

    def call(
        self, method: str, path: str, body: Any = None, *, token: str | None = "jane-token", **headers: str
    ) -> Answer:
        answer = Answer()
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        given = {name.replace("_", "-").lower(): value for name, value in headers.items()}
        if token is not None:
            given["authorization"] = f"Bearer {token}"
        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        }

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": content, "more_body": False}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                answer.code = message["status"]
                answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            else:
                answer.body += message.get("body", b"")

        asyncio.run(self.app(scope, receive, send))
        _check_described(method, path, answer)
        return answer


def _check_described(method: str, path: str, answer: Answer) -> None:
    """That the document says of this answer what it is: nothing is ever answered that it does not have."""
    described = openapi()["paths"].get(path.replace(str(ID), "{id}"), {}).get(method.lower())
    if described is None or answer.code == 500:
        return
    said = described["responses"][str(answer.code)]
    if "content" in said:
        _check_shape(said["content"]["application/json"]["schema"], answer.json)


def _check_shape(schema: dict[str, Any], value: Any) -> None:
    if "$ref" in schema:
        schema = openapi()["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    kinds: dict[str, Any] = {"string": str, "number": (int, float), "integer": int, "boolean": bool, "null": type(None)}
    kinds |= {"object": dict, "array": list}
    stated = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    assert any(isinstance(value, kinds[kind]) for kind in stated), (schema, value)
    if schema.get("format") == "date-time" and value is not None:
        assert "T" in value
    for one in value if isinstance(value, list) else ():
        _check_shape(schema["items"], one)
    if isinstance(value, dict):
        for name, one in value.items():
            _check_shape(schema["properties"][name], one)
        assert set(schema.get("required", ())) <= set(value)


class NoDatabase:
    def snapshot(self) -> Any:
        raise Transient("the database is away: no password")


@pytest.fixture
def face(monkeypatch: pytest.MonkeyPatch) -> Face:
    made = Face(logged=io.StringIO())
    hands = LaunchHands(
        database=NoDatabase(),  # type: ignore[arg-type]
        kube=None,  # type: ignore[arg-type]
        namespace="n",
        stack_id="s",
        log=make_log(made.logged, form="json"),
    )
    made.hands = hands
    made.app = http.make_app(hands, Tokens())

    def launch(_: LaunchHands, request: LaunchRequest) -> Launch:
        made.asked.append(request)
        if isinstance(made.launched, Exception):
            raise made.launched
        return made.launched or warm()

    def find(_: object, id_: UUID, user: str | None = None) -> Runtime | None:
        made.asked.append((id_, user))
        return made.found.pop(0) if len(made.found) > 1 else made.found[0] if made.found else None

    def listed(_: object, user: str | None = None) -> list[Runtime]:
        made.asked.append(user)
        return [runtime()]

    monkeypatch.setattr(http, "launch", launch)
    monkeypatch.setattr(http, "find_runtime", find)
    monkeypatch.setattr(http, "list_runtimes", listed)
    monkeypatch.setattr(http, "end_runtime", lambda *_: True)
    monkeypatch.setattr(
        http, "extend_runtime", lambda _, id_, seconds, within_cull: runtime(credits=seconds, warm=within_cull)
    )
    monkeypatch.setattr(http, "read_usage", lambda _, user: [line(user), line(user, ended_at=NOW)])
    monkeypatch.setattr(http, "_POLL_SECONDS", 0.001)
    return made


def warm(**more: Any) -> Launch:
    given: dict[str, Any] = {
        "id": ID,
        "pod": "p",
        "namespace": "n",
        "warm": True,
        "expires_at": NOW,
        "address": "10.0.0.1",
        "pool": "small",
        "burning_rate": 0.5,
        "assigned_at": NOW,
        "credits": 0.25,
    }
    return Launch(**{**given, **more})


def runtime(**more: Any) -> Runtime:
    given: dict[str, Any] = {
        "id": ID,
        "pod": "p",
        "namespace": "n",
        "pool": "small",
        "user": "jane",
        "environment": "e",
        "warm": True,
        "burning_rate": 0.5,
        "assigned_at": NOW,
        "expires_at": None,
        "ready_at": NOW,
        "address": None,
        "problem": "",
        "refused": "",
        "ending_reason": None,
        "ending_detail": "",
        "ended_at": None,
        "credits": 1.5,
    }
    return Runtime(**{**given, **more})


def line(user: str, **more: Any) -> UsageLine:
    given: dict[str, Any] = {
        "runtime": ID,
        "user": user,
        "environment": "e",
        "pool": None,
        "warm": True,
        "assigned_at": NOW,
        "ended_at": None,
        "seconds": 3.0,
        "burning_rate": 0.5,
        "credits": 1.5,
        "reason": "",
    }
    return UsageLine(**{**given, **more})


def test_a_launch_is_what_the_body_asks_for(face: Face) -> None:
    body = {
        "environment": "e",
        "user": "jane",
        "resources": {"cpu": "1"},
        "node_selector": {},
        "pool": "small",
        "secrets": {"A": "s3cr3t"},
        "idempotency_key": "k",
    }
    answer = face.call("POST", "/v1/runtimes", body)
    assert (answer.code, answer.headers["location"]) == (201, f"/v1/runtimes/{ID}")
    assert answer.json == {
        "id": str(ID),
        "user": "jane",
        "environment": "e",
        "pod": "p",
        "namespace": "n",
        "address": "10.0.0.1",
        "warm": True,
        "state": "ready",
        "expires_at": NOW.isoformat(),
        "pool": "small",
        "assigned_at": NOW.isoformat(),
        "ended_at": None,
        "burning_rate": 0.5,
        "credits": 0.25,
        "message": "",
    }
    assert list(answer.json) == list(http.show(runtime()))  # what `GET` would say of it
    [asked] = face.asked
    assert asked == LaunchRequest(
        environment="e",
        user="jane",
        requests={"cpu": "1"},
        node_selector={},
        pool="small",
        secrets={"A": "s3cr3t"},
        idempotency_key="k",
    )
    assert "s3cr3t" not in repr(asked)
    assert set(body) == set(LAUNCH_FIELDS)


def test_left_out_means_the_tokens_own_user_and_no_wish(face: Face) -> None:
    face.call("POST", "/v1/runtimes", {"environment": "e", "pool": None}, Idempotency_Key="h")
    assert face.asked == [LaunchRequest(environment="e", user="jane", idempotency_key="h")]


def test_resources_are_numbers_or_texts_as_in_a_manifest(face: Face) -> None:
    face.call("POST", "/v1/runtimes", {"environment": "e", "resources": {"cpu": 2, "memory": "1Gi", "x/y": 0.5}})
    assert face.asked[0].requests == {"cpu": "2", "memory": "1Gi", "x/y": "0.5"}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "'environment' is missing"),
        ({"environment": ""}, "'environment' must be a text that is not empty"),
        ({"environment": 3}, "'environment' must be a text"),
        ({"environment": "e\0"}, "'environment' must be a text"),
        (b'{"environment": "\\ud800"}', "'environment' must be a text"),
        ({"environment": "e", "secret": {}}, "'secret' is no field of a launch; did you mean 'secrets'?"),
        ({"environment": "e", "zzz": 1}, "'zzz' is no field of a launch; there are environment, user, "),
        ({"environment": "e", "secrets": {"A": 1}}, "'secrets' must be an object whose values are texts"),
        ({"environment": "e", "resources": "cpu=1"}, "'resources' must be an object"),
        ({"environment": "e", "resources": {"cpu": True}}, "'resources' must be an object whose values are quantities"),
        ({"environment": "e", "idempotency_key": "other"}, "'idempotency_key' and the header Idempotency-Key are not"),
        ([], "the body must be a JSON object"),
        (b"{", "the body is no JSON"),
        (b"[" * 100_000, "the body is no JSON"),
        (b"\xff", "the body is no JSON"),
    ],
)
def test_a_bad_body_is_refused_in_words(face: Face, body: Any, said: str) -> None:
    answer = face.call("POST", "/v1/runtimes", body, Idempotency_Key="h")
    assert (answer.code, face.asked) == (400, [])
    assert answer.message.startswith(said)


def test_a_body_that_is_too_large_is_refused(face: Face) -> None:
    assert face.call("POST", "/v1/runtimes", b" " * (http.BODY_BYTES + 1)).code == 413


@pytest.mark.parametrize("wait", ["-1", "x", "nan", "301", "1e9", "inf"])
def test_a_wait_that_is_none_is_refused(face: Face, wait: str) -> None:
    answer = face.call("POST", f"/v1/runtimes?wait={wait}", {"environment": "e"})
    assert (answer.code, answer.message) == (400, "wait must be seconds, from 0 to 300")


def test_a_cold_start_is_waited_for(face: Face) -> None:
    starting, ready = runtime(ready_at=None, warm=False, problem="starting"), runtime(warm=False)
    face.launched = warm(warm=False)
    face.found = [starting, starting, ready]
    answer = face.call("POST", "/v1/runtimes?wait=20", {"environment": "e"})
    assert (answer.code, answer.json["state"]) == (201, "ready")
    face.found = [starting]
    answer = face.call("POST", "/v1/runtimes?wait=0.01", {"environment": "e"})
    assert (answer.code, answer.json["state"], answer.json["message"]) == (201, "starting", "starting")
    face.found = [runtime(warm=False, ready_at=None, ending_reason="Refused", ending_detail="no such image")]
    answer = face.call("POST", "/v1/runtimes?wait=20", {"environment": "e"})
    assert (answer.json["state"], answer.json["message"]) == ("ending", "Refused: no such image")


def test_a_process_that_is_stopped_answers_whoever_waits_with_what_there_is(face: Face) -> None:
    starting = runtime(ready_at=None, warm=False, problem="starting")

    def is_stopping() -> bool:
        return len(face.asked) > 1  # it has looked once more

    face.app = http.make_app(face.hands, Tokens(), is_stopping=is_stopping)
    face.found = [starting]
    answer = face.call("GET", f"/v1/runtimes/{ID}?wait=300")
    assert (answer.code, answer.json["state"], len(face.asked)) == (200, "starting", 2)


@pytest.mark.parametrize("token", [None, "", "nobodys", "jane-token "[:-2]])
@pytest.mark.parametrize("path", ["/v1/runtimes", f"/v1/runtimes/{ID}", "/v1/usage", "/v1/me"])
def test_without_a_known_token_nothing_is_said(face: Face, path: str, token: str | None) -> None:
    answer = face.call("GET", path, token=token)
    assert (answer.code, answer.headers["www-authenticate"], face.asked) == (401, "Bearer", [])


def test_a_token_that_cannot_be_checked_now_is_not_called_bad(face: Face) -> None:
    answer = face.call("GET", "/v1/me", token="away")
    assert (answer.code, answer.headers["retry-after"]) == (503, "1")


def test_a_user_reaches_only_its_own_and_a_launcher_everybodys(face: Face) -> None:
    assert face.call("POST", "/v1/runtimes", {"environment": "e", "user": "john"}).code == 403
    assert face.call("GET", "/v1/runtimes?user=john").code == 403
    assert face.call("GET", "/v1/usage?user=john").code == 403
    assert face.asked == []
    face.call("GET", "/v1/runtimes")
    face.call("GET", "/v1/runtimes", token="hub-token")
    face.call("GET", "/v1/runtimes?user=john", token="hub-token")
    assert face.asked == ["jane", None, "john"]
    face.asked.clear()
    assert face.call("POST", "/v1/runtimes", {"environment": "e", "user": "john"}, token="hub-token").code == 201
    assert face.asked[0].user == "john"
    face.asked.clear()
    for method, path, body in (("GET", "", None), ("DELETE", "", None), ("POST", "/extend", {"seconds": 1})):
        assert face.call(method, f"/v1/runtimes/{ID}{path}", body).code == 404
        face.call(method, f"/v1/runtimes/{ID}{path}", body, token="hub-token")
    assert face.asked == [(ID, "jane"), (ID, None)] * 3
    assert face.call("GET", "/v1/runtimes/none").message == "there is no runtime none"


def test_look_stop_extend_usage_and_me(face: Face) -> None:
    face.found = [runtime()]
    assert face.call("GET", f"/v1/runtimes/{ID}").json["state"] == "ready"
    assert face.call("DELETE", f"/v1/runtimes/{ID}").code == 204
    assert face.call("POST", f"/v1/runtimes/{ID}/extend", {"seconds": 60}).json["warm"] is True
    assert face.call("POST", f"/v1/runtimes/{ID}/extend", {"seconds": 60}, token="hub-token").json["warm"] is False
    for bad in ({}, {"seconds": "1"}, {"seconds": True}, b'{"seconds": NaN}', {"seconds": 10**400}, {"second": 1}):
        assert face.call("POST", f"/v1/runtimes/{ID}/extend", bad).code == 400
    usage = face.call("GET", "/v1/usage").json
    assert (usage["user"], usage["credits"], usage["seconds"], usage["running"]) == ("jane", 3.0, 6.0, 1)
    assert face.call("GET", "/v1/me").json == {
        "user": "jane",
        "launcher": False,
        "secret_label": "datalayer.io/user=jane",
    }


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Refused("never"), 422),
        (QuotaExceeded("full"), 429),
        (AuthFailed("no rights"), 503),
        (Transient("later"), 503),
        (OrcaError("other"), 500),
    ],
)
def test_an_error_is_said_by_its_meaning(face: Face, error: OrcaError, code: int) -> None:
    face.launched = error
    answer = face.call("POST", "/v1/runtimes", {"environment": "e"})
    assert (answer.code, answer.json) == (code, {"error": {"kind": type(error).__name__, "message": str(error)}})
    face.launched = Busy("busy", 7.2)
    assert face.call("POST", "/v1/runtimes", {"environment": "e"}).headers["retry-after"] == "8"


def test_a_fault_is_said_without_its_words(face: Face) -> None:
    face.launched = RuntimeError("s3cr3t")
    answer = face.call("POST", "/v1/runtimes", {"environment": "e"})
    assert answer.code == 500
    assert b"s3cr3t" not in answer.body
    assert "s3cr3t" not in face.logged.getvalue()
    assert "test_runtimes_http.py" in face.logged.getvalue()


def test_the_document_has_every_path_and_no_other(face: Face) -> None:
    answer = face.call("GET", "/openapi.json", token=None)
    assert answer.json == json.loads(json.dumps(openapi()))
    described = {(method.upper(), path) for path, methods in openapi()["paths"].items() for method in methods}
    served = {
        (method, route.path)
        for route in face.app.routes
        for method in route.methods - {"HEAD"}
        if route.path.startswith("/v1/")
    }
    assert described == served
    body = face.call("POST", "/v1/runtimes", {"environment": "e"}).json
    assert set(body) <= set(openapi()["components"]["schemas"]["Runtime"]["properties"])
    assert set(http.show(runtime())) == set(openapi()["components"]["schemas"]["Runtime"]["properties"])


def test_health_and_what_is_not_served(face: Face) -> None:
    assert face.call("GET", "/healthz", token=None).code == 200
    assert face.call("GET", "/readyz", token=None).code == 503
    assert 'orca_infra_claim_seconds_count{start="warm"}' in face.call("GET", "/metrics", token=None).body.decode()
    assert face.call("GET", "/v2", token=None).message == "there is nothing here; /openapi.json says what there is"
    answer = face.call("PUT", "/v1/runtimes", {})
    assert (answer.code, answer.headers["allow"]) == (405, "GET, POST")
