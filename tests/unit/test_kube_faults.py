"""The Kubernetes client against a server that does what a real one cannot be made to do on demand."""

from __future__ import annotations

import http.server
import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from orca_infra.errors import AuthFailed, Conflict, OrcaError, QuotaExceeded, Refused, Transient
from orca_infra.kube import reading, watching
from orca_infra.kube.client import Kube
from orca_infra.kube.deadlines import Deadlines
from orca_infra.kube.errors import Busy, ContainerWaiting, Expired, KindMissing, NamespaceMissing, ObjectMissing, Silent
from orca_infra.kube.kinds import JOB, POD, RUNTIME_POOL, SECRET, Ref
from orca_infra.kube.watching import Gone, Heard, Relisted, Seen, Trouble

#: Those of the tests that are not about deadlines: no machine is that slow.
PATIENT = Deadlines(connect_seconds=60.0, read_seconds=60.0, whole_seconds=120.0)
#: A server that hangs is not waited for; one that answers on a busy machine is.
HASTY = Deadlines(connect_seconds=60.0, read_seconds=1.5, whole_seconds=60.0)
X = Ref(kind=POD, namespace="runs", name="x")

Answer = Callable[["Handler"], None]


@dataclass(frozen=True)
class Asked:
    query: dict[str, str]
    body: dict[str, Any]


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def _any(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else {}
        self.query = {key: values[0] for key, values in parse_qs(urlsplit(self.path).query).items()}
        self.server.asked.append(Asked(query=self.query, body=body))
        try:
            next(self.server.script)(self)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    do_GET = do_POST = do_PATCH = do_DELETE = _any  # noqa: N815

    def reply(self, code: int, content: bytes, kind: str = "application/json", **headers: str) -> None:
        self.send_response(code)
        for key, value in {"Content-Type": kind, "Content-Length": str(len(content)), **headers}.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)

    def begin(self, kind: str = "application/json") -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def chunk(self, content: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256
    script: Iterator[Answer] = iter(())

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[Asked] = []
        self.over = threading.Event()  # what hangs hangs until then

    def answer(self, *answers: Answer, then: Answer | None = None) -> None:
        self.script = itertools.chain(answers, itertools.repeat(then) if then else ())


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as started:
        threading.Thread(target=started.serve_forever, args=(0.01,), daemon=True).start()
        yield started
        started.over.set()
        started.shutdown()


@pytest.fixture
def kube(server: Server, tmp_path: Path) -> Iterator[Kube]:
    with connect(f"http://127.0.0.1:{server.server_address[1]}", tmp_path) as connected:
        yield connected


@pytest.fixture
def hasty(server: Server, tmp_path: Path) -> Iterator[Kube]:
    with connect(f"http://127.0.0.1:{server.server_address[1]}", tmp_path, deadlines=HASTY) as connected:
        yield connected


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter waits between tries; how they grow stays as it is."""
    monkeypatch.setattr(watching, "_BACKOFF_SECONDS", 0.03)
    monkeypatch.setattr(watching, "_QUICK_SECONDS", 0.2)
    monkeypatch.setattr(reading, "_WAIT_SECONDS", 0.01)


def connect(url: str, folder: Path, token: str = "t0ken", deadlines: Deadlines = PATIENT) -> Kube:
    config = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": token}}],
    }
    (folder / "kubeconfig").write_text(json.dumps(config))
    return Kube.connect(kubeconfig=folder / "kubeconfig", deadlines=deadlines)


def json_of(content: object, code: int = 200, **headers: str) -> Answer:
    return lambda handler: handler.reply(code, json.dumps(content).encode(), **headers)


def status(code: int, message: str, reason: str = "", **details: Any) -> dict[str, Any]:
    return {"kind": "Status", "code": code, "reason": reason, "message": message, "details": details}


def fails(
    code: int, message: str, reason: str = "", *, headers: dict[str, str] | None = None, **details: Any
) -> Answer:
    return json_of(status(code, message, reason, **details), code, **(headers or {}))


def hang(handler: Handler) -> None:
    handler.server.over.wait(240)
    handler.close_connection = True


def pod(name: str, version: int, **metadata: Any) -> dict[str, Any]:
    stated = {"name": name, "namespace": "runs", "uid": f"uid-{name}", "resourceVersion": str(version), **metadata}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": stated}


def page(*names: str, version: int = 10, token: str = "") -> Answer:
    items = [{"metadata": pod(name, 1)["metadata"]} for name in names]  # as real ones: no kind in a list's items
    return json_of(
        {"kind": "PodList", "metadata": {"resourceVersion": str(version), "continue": token}, "items": items}
    )


def stream(*pieces: bytes | Callable[[Handler], None], whole: bool = True) -> Answer:
    def answer(handler: Handler) -> None:
        handler.begin()
        for piece in pieces:
            if callable(piece):
                piece(handler)
            else:
                handler.chunk(piece)
        if whole:
            handler.chunk(b"")
        else:
            handler.close_connection = True

    return answer


def line(what: str, obj: dict[str, Any]) -> bytes:
    return json.dumps({"type": what, "object": obj}).encode() + b"\n"


def bookmark(version: int) -> bytes:
    return line("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": str(version)}})


def watch(kube: Kube, silence_seconds: float = 60.0, stop: threading.Event | None = None) -> list[tuple[str, str]]:
    events = kube.watch(
        POD,
        namespace="runs",
        resource_version="10",
        silence_seconds=silence_seconds,
        stop=stop or threading.Event(),
    )
    return [(event.what, event.resource_version) for event in events]


def follow(kube: Kube, enough: int, silence_seconds: float = 60.0) -> list[Any]:
    """The first changes of a follow, which is then stopped."""
    stop = threading.Event()
    changes = []
    for change in kube.follow(POD, namespace="runs", silence_seconds=silence_seconds, stop=stop):
        changes.append(change)
        if len(changes) == enough:
            stop.set()
    return changes


RBAC = 'pods "x" is forbidden: User "u" cannot get resource "pods" in API group "" in the namespace "runs"'
QUOTA = 'pods "x" is forbidden: exceeded quota: q, requested: pods=1, used: pods=1, limited: pods=1'


@pytest.mark.parametrize(
    ("code", "message", "details", "meaning"),
    [
        (401, "the API server does not take the credentials", {}, AuthFailed),
        (403, RBAC, {}, AuthFailed),
        (403, 'x is forbidden: user "u" is attempting to grant RBAC permissions not currently held: …', {}, AuthFailed),
        (403, QUOTA, {}, QuotaExceeded),
        (403, 'pods "x" is forbidden: failed quota: q: must specify cpu', {}, Refused),
        (403, 'pods "x" is forbidden: status unknown for quota: q, resources: pods', {}, Transient),
        (403, 'pods "x" is forbidden: violates PodSecurity "restricted:latest": …', {}, Refused),
        (403, f'admission webhook "w" denied the request: {RBAC}; {QUOTA}', {}, Refused),
        (
            403,
            'pods "x" is forbidden: unable to create new content in namespace runs because it is being terminated',
            {"causes": [{"reason": "NamespaceTerminating"}]},
            NamespaceMissing,
        ),
        (404, 'namespaces "runs" not found', {"kind": "namespaces", "name": "runs"}, NamespaceMissing),
        (404, "the server could not find the requested resource", {}, KindMissing),
        (404, 'pods "x" not found', {"kind": "pods", "name": "x"}, ObjectMissing),
        (404, 'secrets "y" not found', {"kind": "secrets", "name": "y"}, Refused),
        (400, "bad", {}, Refused),
        (405, "bad", {}, Refused),
        (409, "Operation cannot be fulfilled", {}, Conflict),
        (410, "too old", {}, Expired),
        (422, "is invalid", {}, Refused),
        (429, "slow down", {}, Busy),
        (500, "failed calling webhook", {}, Transient),
        (503, "etcd is away", {}, Busy),
        (504, "Timeout", {}, Transient),
    ],
)
def test_an_answer_becomes_an_error_by_its_meaning(
    server: Server, kube: Kube, code: int, message: str, details: dict[str, Any], meaning: type[OrcaError]
) -> None:
    server.answer(fails(code, message, "Some", **details))
    with pytest.raises(OrcaError) as caught:
        kube.patch(X, {"metadata": {"labels": {"a": "b"}}})
    assert type(caught.value) is meaning
    assert "patch Pod runs/x" in str(caught.value)
    if meaning is not KindMissing:
        assert message[:60] in str(caught.value)


def test_a_long_message_is_cut_and_stays_on_one_line(server: Server, kube: Kube) -> None:
    server.answer(fails(422, "a\nb\x1b[31m" + "long " * 1000))
    with pytest.raises(Refused) as caught:
        kube.create(pod("x", 1))
    assert len(str(caught.value)) < 600
    assert str(caught.value).isprintable()


def test_busy_says_for_how_long(server: Server, kube: Kube) -> None:
    server.answer(fails(429, "slow down", headers={"Retry_After": "7"}), fails(503, "away", retryAfterSeconds=9))
    with pytest.raises(Busy) as caught:
        kube.delete(X)
    assert caught.value.retry_after_seconds == 7
    with pytest.raises(Busy) as caught:
        kube.delete(X)
    assert caught.value.retry_after_seconds == 9


@pytest.mark.parametrize("code", [400, 403, 409, 422, 500])
def test_a_secret_is_in_no_message(server: Server, kube: Kube, code: int) -> None:
    value = 's3cr3t"x'
    causes = [{"field": "data[key]", "reason": "FieldValueInvalid", "message": value}]
    server.answer(fails(code, f'Secret "x" is invalid: data[key]: Invalid value: {json.dumps(value)}', causes=causes))
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "x", "namespace": "runs"}}
    with pytest.raises(OrcaError) as caught:
        kube.apply({**secret, "stringData": {"key": value}}, manager="m")
    assert "s3cr3t" not in str(caught.value)
    assert "data[key]" in str(caught.value)


def test_a_full_quota_is_told_of_secrets_too(server: Server, kube: Kube) -> None:
    server.answer(fails(403, 'secrets "x" is forbidden: exceeded quota: q, requested: secrets=1'))
    with pytest.raises(QuotaExceeded, match="exceeded quota: q"):
        kube.create({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "x", "namespace": "runs"}})


@pytest.mark.usefixtures("_soon")
@pytest.mark.parametrize(
    ("code", "content", "meaning"),
    [
        (401, b"<html>log in</html>", AuthFailed),
        (403, b"<html>log in</html>", AuthFailed),
        (404, b"<html>nothing here</html>", Transient),
        (404, b"404 page not found\n", KindMissing),
        (302, b"", Transient),
        (502, b"<html>bad gateway</html>", Transient),
        (200, b"<html>hello</html>", Transient),
        (200, b"[]", Transient),
        (200, b"{}", Transient),
        (200, b'{"kind":"Pod"}', Transient),
    ],
)
def test_what_something_else_answers_is_never_taken_for_the_api_servers_word(
    server: Server, kube: Kube, code: int, content: bytes, meaning: type[OrcaError]
) -> None:
    server.answer(then=lambda handler: handler.reply(code, content, "text/html", Location="http://127.0.0.1:1/login"))
    with pytest.raises(OrcaError) as caught:
        kube.get(X)
    assert type(caught.value) is meaning
    assert "html" not in str(caught.value)


def test_get_is_none_only_for_this_very_object(server: Server, kube: Kube) -> None:
    server.answer(fails(404, 'pods "x" not found', "NotFound", kind="pods", name="x"))
    assert kube.get(X) is None
    server.answer(fails(404, 'pods "y" not found', "NotFound", kind="pods", name="y"))
    with pytest.raises(Refused):
        kube.get(X)
    server.answer(fails(404, 'jobs.other.io "x" not found', "NotFound", group="other.io", kind="jobs", name="x"))
    with pytest.raises(Refused):
        kube.get(Ref(kind=JOB, namespace="runs", name="x"))


def test_reads_are_tried_again_and_writes_are_not(server: Server, kube: Kube) -> None:
    server.answer(fails(500, "once"), fails(500, "twice"), json_of(pod("x", 3)))
    found = kube.get(X)
    assert found is not None
    assert found["metadata"]["name"] == "x"
    server.answer(fails(500, "once"), json_of(pod("x", 3)))
    with pytest.raises(Transient, match="once"):
        kube.patch(X, {})
    assert len(server.asked) == 4


def test_reads_are_given_up_after_a_bounded_number_of_tries(server: Server, kube: Kube) -> None:
    server.answer(then=fails(500, "always"))
    with pytest.raises(Transient, match="always"):
        kube.get(X)
    assert len(server.asked) <= 3


def test_reads_are_given_up_after_a_bounded_time(server: Server, hasty: Kube) -> None:
    server.answer(then=hang)
    with pytest.raises(Transient, match="did not answer in time"):
        hasty.list(POD)


def test_a_trickling_answer_has_a_deadline(server: Server, tmp_path: Path) -> None:
    def trickle(handler: Handler) -> None:
        handler.begin()
        while not handler.server.over.wait(0.2):
            handler.chunk(b" ")

    server.answer(then=trickle)
    url = f"http://127.0.0.1:{server.server_address[1]}"
    deadlines = Deadlines(connect_seconds=60.0, read_seconds=60.0, whole_seconds=1.0)
    with (
        connect(url, tmp_path, deadlines=deadlines) as kube,
        pytest.raises(Transient, match="not whole after 1 s"),
    ):
        kube.get(X)


def test_a_cut_answer_is_a_fault(server: Server, kube: Kube) -> None:
    def cut(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        handler.wfile.write(json.dumps(pod("x", 1)).encode())
        handler.close_connection = True

    server.answer(then=cut)
    with pytest.raises(Transient):
        kube.get(X)
    with pytest.raises(Transient):
        kube.create(pod("x", 1))


@pytest.mark.usefixtures("_soon")
def test_an_unreachable_server_is_a_fault_and_never_empty(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        with connect(f"http://127.0.0.1:{taken.getsockname()[1]}", tmp_path) as kube:
            with pytest.raises(Transient, match=r"http://127.0.0.1:\d+: Failed to .*refused"):
                kube.list(POD)
            with pytest.raises(Transient, match="refused"):
                kube.delete(X)
            changes = follow(kube, 4)
    assert [type(change) for change in changes] == [Trouble] * 4
    assert changes[0].wait_seconds < changes[3].wait_seconds < 20


def test_something_that_speaks_no_tls_is_a_fault(server: Server, tmp_path: Path) -> None:
    with (
        connect(f"https://127.0.0.1:{server.server_address[1]}", tmp_path) as kube,
        pytest.raises(Transient, match="SSL"),
    ):
        kube.get(X)


def test_no_message_quotes_the_token(server: Server, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{server.server_address[1]}"
    with connect(url, tmp_path, "s3cr3t\x00tail") as kube, pytest.raises(AuthFailed) as caught:
        kube.get(X)
    assert "s3cr3t" not in repr(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_after_close_everything_fails_at_once(server: Server, kube: Kube) -> None:
    kube.close()
    with pytest.raises(Transient, match="closed here"):
        kube.get(X)


def test_a_delete_that_conflicts_is_false_only_for_another_uid(server: Server, kube: Kube) -> None:
    conflict = fails(409, "Precondition failed: UID in precondition", "Conflict")
    server.answer(conflict, json_of(pod("x", 1)))
    assert kube.delete(X, uid="another") is False
    server.answer(conflict, fails(404, "", "NotFound", kind="pods", name="x"))
    assert kube.delete(X, uid="another") is False
    server.answer(conflict, json_of(pod("x", 1)))
    with pytest.raises(Conflict):
        kube.delete(X, uid="uid-x")
    server.answer(conflict)
    with pytest.raises(Conflict):
        kube.delete(X)
    assert server.asked[0].body["preconditions"] == {"uid": "another"}
    assert server.asked[0].body["propagationPolicy"] == "Background"


def test_what_was_changed_since_it_was_seen_is_not_deleted_and_not_asked_for(server: Server, kube: Kube) -> None:
    server.answer(fails(409, "Precondition failed: ResourceVersion in precondition", "Conflict"))
    with pytest.raises(Conflict, match="ResourceVersion"):
        kube.delete(X, uid="uid-x", resource_version="7")
    [asked] = server.asked  # who may delete a Secret need not be one who may read it
    assert asked.body["preconditions"] == {"uid": "uid-x", "resourceVersion": "7"}


def test_a_name_cannot_lead_elsewhere(server: Server, kube: Kube) -> None:
    for name in ("", ".", "..", "a/b", "a%2fb"):
        with pytest.raises(Refused):
            Ref(kind=POD, namespace="runs", name=name)
        with pytest.raises(Refused):
            kube.list(POD, namespace=name)
    with pytest.raises(Refused):
        Ref(kind=POD, name="x")
    assert not server.asked


# ---- lists


def test_a_list_is_read_page_by_page_and_its_objects_say_what_they_are(server: Server, kube: Kube) -> None:
    server.answer(page("a", "b", token="t1"), page("c", token="t2"), page("d"))
    listing = kube.list(POD, namespace="runs", labels={"orca.stack": "s"}, label_exists=["orca.role"], page=2)
    assert [item["metadata"]["name"] for item in listing.items] == ["a", "b", "c", "d"]
    assert {(item["apiVersion"], item["kind"]) for item in listing.items} == {("v1", "Pod")}
    assert listing.resource_version == "10"
    assert [asked.query.get("continue") for asked in server.asked] == [None, "t1", "t2"]
    assert {asked.query["labelSelector"] for asked in server.asked} == {"orca.stack=s,orca.role"}
    assert {asked.query["limit"] for asked in server.asked} == {"2"}


def test_a_list_whose_continuation_expires_begins_anew(server: Server, kube: Kube) -> None:
    server.answer(page("a", token="t1"), fails(410, "expired", "Expired"), page("b", token="t2"), page("c"))
    assert [item["metadata"]["name"] for item in kube.list(POD).items] == ["b", "c"]


def test_a_list_that_always_expires_is_read_in_one_piece_at_last(server: Server, kube: Kube) -> None:
    expired = fails(410, "expired", "Expired")
    server.answer(page("a", token="t"), expired, page("a", token="t"), expired, page("a", "b"))
    assert len(kube.list(POD).items) == 2
    assert "limit" not in server.asked[-1].query
    server.answer(then=expired)
    with pytest.raises(Expired):
        kube.list(POD)


def test_pages_of_two_moments_are_no_list(server: Server, kube: Kube) -> None:
    server.answer(page("a", version=10, token="t1"), page("b", version=11), page("c", version=12))
    assert [item["metadata"]["name"] for item in kube.list(POD).items] == ["c"]


@pytest.mark.usefixtures("_soon")
@pytest.mark.parametrize(
    "last",
    [
        fails(500, "away"),
        fails(403, RBAC),
        lambda handler: handler.reply(200, b'{"kind":"PodList","metadata":{"resourceVersion":"10"},"items":[{"met'),
        json_of({"kind": "PodList", "metadata": {"resourceVersion": "10"}}),
        json_of({"kind": "PodList", "metadata": {}, "items": []}),
        json_of({"kind": "Pod", "metadata": {"resourceVersion": "10"}, "items": []}),
        json_of({"kind": "PodList", "metadata": {"resourceVersion": "10"}, "items": [7]}),
    ],
)
def test_a_part_is_never_the_whole(server: Server, kube: Kube, last: Answer) -> None:
    server.answer(page("a", token="t1"), then=last)
    with pytest.raises((Transient, AuthFailed)):
        kube.list(POD)


def test_an_empty_list_as_go_writes_it(server: Server, kube: Kube) -> None:
    server.answer(json_of({"kind": "RuntimePoolList", "metadata": {"resourceVersion": "10"}, "items": None}))
    assert kube.list(RUNTIME_POOL).items == ()


# ---- watches


def test_a_watch_gives_what_happens_and_ends_with_its_connection(server: Server, kube: Kube) -> None:
    content = line("ADDED", pod("a", 11)) + line("MODIFIED", pod("a", 12, annotations={"odd": "\u0085\u2028"}))
    server.answer(stream(content[:30], content[30:200], content[200:], bookmark(15), line("DELETED", pod("a", 16))))
    found = watch(kube, silence_seconds=50.0)
    assert found == [("ADDED", "11"), ("MODIFIED", "12"), ("BOOKMARK", "15"), ("DELETED", "16")]
    query = server.asked[0].query
    assert (query["resourceVersion"], query["allowWatchBookmarks"], query["timeoutSeconds"]) == ("10", "true", "40")


def test_a_line_is_not_split_at_what_json_may_hold(server: Server, kube: Kube) -> None:
    raw = json.dumps({"type": "ADDED", "object": pod("a", 11, annotations={"odd": "\u0085"})}, ensure_ascii=False)
    server.answer(stream(raw.encode() + b"\n"))
    assert watch(kube) == [("ADDED", "11")]


def test_a_silent_watch_ends_by_our_own_deadline(server: Server, kube: Kube) -> None:
    server.answer(stream(bookmark(11), hang))
    began = time.monotonic()
    with pytest.raises(Silent, match="nothing heard for 0.7 s"):
        watch(kube, silence_seconds=0.7)
    assert time.monotonic() - began > 0.6


def test_a_watch_may_be_quiet_for_longer_than_an_answer_may_take(server: Server, hasty: Kube) -> None:
    server.answer(stream(lambda handler: time.sleep(1.5 * HASTY.read_seconds), bookmark(11)))
    assert watch(hasty) == [("BOOKMARK", "11")]


@pytest.mark.parametrize("by", ["stop", "close"])
def test_a_watch_that_waits_is_ended_from_outside(server: Server, kube: Kube, by: str) -> None:
    server.answer(stream(bookmark(11), hang))
    stop = threading.Event()
    act = stop.set if by == "stop" else kube.close
    threading.Timer(0.3, act).start()
    if by == "stop":
        assert watch(kube, silence_seconds=240.0, stop=stop) == [("BOOKMARK", "11")]
    else:
        with pytest.raises(Transient) as ended:
            watch(kube, silence_seconds=240.0, stop=stop)
        assert not isinstance(ended.value, Silent)


@pytest.mark.parametrize(
    ("pieces", "whole", "meaning"),
    [
        ([line("ERROR", status(410, "too old resource version", "Expired"))], True, Expired),
        ([line("ERROR", status(500, "etcd is away"))], True, Transient),
        ([line("ERROR", status(403, RBAC))], True, AuthFailed),
        ([line("ADDED", pod("a", 11))[:40]], True, Transient),
        ([line("ADDED", pod("a", 11))], False, Transient),
        ([b"what?\n"], True, Transient),
        ([line("STRANGE", pod("a", 11))], True, Transient),
        ([line("ADDED", {"metadata": {}})], True, Transient),
    ],
)
def test_a_watch_that_goes_wrong_says_so(
    server: Server, kube: Kube, pieces: list[bytes], whole: bool, meaning: type[OrcaError]
) -> None:
    server.answer(stream(*pieces, whole=whole))
    with pytest.raises(meaning):
        watch(kube)


def test_a_watch_that_is_refused_says_so(server: Server, kube: Kube) -> None:
    server.answer(fails(410, "too old", "Expired"), fails(403, RBAC))
    with pytest.raises(Expired):
        watch(kube)
    with pytest.raises(AuthFailed):
        watch(kube)


# ---- following


@pytest.mark.usefixtures("_soon")
def test_a_closed_watch_goes_on_where_it_was(server: Server, kube: Kube) -> None:
    def later(handler: Handler) -> None:
        time.sleep(0.3)

    server.answer(
        page("a"),
        stream(line("ADDED", pod("b", 11)), bookmark(20), whole=False),
        stream(line("DELETED", pod("a", 21)), later),
        stream(later, bookmark(30)),
    )
    changes = follow(kube, 8)
    expected = [Relisted, Seen, Heard, Trouble, Gone, Heard, Heard, Heard]
    assert [type(change) for change in changes] == expected
    assert [asked.query.get("resourceVersion") for asked in server.asked] == [None, "10", "20", "21"]


@pytest.mark.usefixtures("_soon")
def test_an_expired_watch_lists_anew_and_says_what_vanished_meanwhile(server: Server, kube: Kube) -> None:
    def later(handler: Handler) -> None:
        time.sleep(0.3)

    server.answer(
        page("a", "b"),
        stream(line("ADDED", pod("c", 11)), later, line("ERROR", status(410, "too old", "Expired"))),
        page("b", version=50),
        stream(bookmark(51)),
    )
    changes = follow(kube, 4)
    assert [type(change) for change in changes] == [Relisted, Seen, Relisted, Heard]
    assert changes[0].vanished == ()
    assert [obj["metadata"]["name"] for obj in changes[2].vanished] == ["a", "c"]
    assert server.asked[-1].query["resourceVersion"] == "50"


def test_a_server_that_always_forgets_is_not_asked_in_a_tight_loop(server: Server, kube: Kube) -> None:
    def forgets(handler: Handler) -> None:
        listing = "watch" not in handler.query
        (page("a") if listing else stream(bookmark(11), line("ERROR", status(410, "too old"))))(handler)

    server.answer(then=forgets)
    stop = threading.Event()
    troubles = 0
    for change in kube.follow(POD, namespace="runs", silence_seconds=60.0, stop=stop):
        troubles += isinstance(change, Trouble)
        if troubles == 3:
            stop.set()
    assert len(server.asked) < 20


def test_a_watch_that_always_ends_at_once_is_not_asked_in_a_tight_loop(server: Server, kube: Kube) -> None:
    server.answer(page("a"), then=stream())
    stop = threading.Event()
    threading.Timer(1.0, stop.set).start()
    list(kube.follow(POD, namespace="runs", silence_seconds=60.0, stop=stop))
    assert len(server.asked) < 6


@pytest.mark.usefixtures("_soon")
def test_no_fault_of_the_server_empties_a_follow(server: Server, kube: Kube) -> None:
    server.answer(
        page("a"),
        stream(bookmark(11), whole=False),
        fails(500, "away"),
        fails(401, "Unauthorized"),
        fails(403, RBAC),
        page("a", version=60),
        stream(bookmark(61)),
    )
    changes = follow(kube, 8)
    assert [type(change) for change in changes] == [Relisted, Heard, *[Trouble] * 4, Relisted, Heard]
    assert [type(change.error) for change in changes if isinstance(change, Trouble)][2:] == [AuthFailed, AuthFailed]
    assert changes[6].vanished == ()


@pytest.mark.usefixtures("_soon")
def test_a_silent_follow_connects_anew(server: Server, kube: Kube) -> None:
    server.answer(page("a"), stream(hang), stream(bookmark(12)))
    changes = follow(kube, 3, silence_seconds=1.5)
    assert [type(change) for change in changes] == [Relisted, Trouble, Heard]
    assert isinstance(changes[1].error, Silent)


# ---- logs


def test_a_followed_log_may_be_quiet_and_is_whole_only_when_it_ends_well(server: Server, hasty: Kube) -> None:
    server.answer(
        stream(b"one\n", lambda handler: time.sleep(1.5 * HASTY.read_seconds), b"two \xff\n"),
        stream(b"one\n", whole=False),
    )
    assert b"".join(hasty.logs("runs", "x", follow=True, container="c")) == b"one\ntwo \xff\n"
    assert server.asked[0].query == {"follow": "true", "container": "c"}
    pieces = hasty.logs("runs", "x", follow=True)
    assert next(pieces) == b"one\n"
    with pytest.raises(Transient):
        next(pieces)


def test_a_quiet_log_is_ended_by_stop(server: Server, kube: Kube) -> None:
    server.answer(stream(b"one\n", hang))
    stop = threading.Event()
    pieces = kube.logs("runs", "x", follow=True, stop=stop)
    assert next(pieces) == b"one\n"
    threading.Timer(0.3, stop.set).start()
    assert list(pieces) == []


def test_a_log_that_cannot_be_had_says_why(server: Server, kube: Kube) -> None:
    waiting = 'container "c" in pod "x" is waiting to start: ContainerCreating'
    server.answer(
        fails(400, waiting, "BadRequest"),
        fails(404, 'pods "x" not found', kind="pods", name="x"),
        fails(400, 'previous terminated container "c" in pod "x" not found', "BadRequest"),
    )
    for meaning in (ContainerWaiting, ObjectMissing, Refused):
        with pytest.raises(meaning):
            list(kube.logs("runs", "x", previous=meaning is Refused))


@pytest.mark.usefixtures("_soon")
def test_no_fault_keeps_a_requests_connection(server: Server, tmp_path: Path) -> None:
    def cut_short(handler: Handler) -> None:
        handler.begin()
        handler.chunk(b'{"kind":')
        handler.close_connection = True

    with connect(f"http://127.0.0.1:{server.server_address[1]}", tmp_path) as kube:
        for fault in (fails(403, RBAC), fails(401, "Unauthorized"), cut_short, json_of([1]), fails(500, "away")):
            server.answer(then=fault)
            for _ in range(25):
                with pytest.raises(OrcaError):
                    kube.create(pod("x", 1))
        server.answer(json_of(pod("x", 1)))
        assert kube.get(X) is not None


def test_many_streams_are_open_at_once(server: Server, kube: Kube) -> None:
    server.answer(then=stream(bookmark(11), hang))
    stop = threading.Event()
    heard = threading.Semaphore(0)

    def one() -> None:
        for _ in kube.watch(POD, resource_version="1", silence_seconds=240.0, stop=stop):
            heard.release()

    threads = [threading.Thread(target=one, daemon=True) for _ in range(120)]
    for thread in threads:
        thread.start()
    assert all(heard.acquire(timeout=120) for _ in threads)
    stop.set()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)


def test_what_is_no_known_kind_is_refused(kube: Kube) -> None:
    with pytest.raises(Refused, match="does not know"):
        kube.create({"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "x", "namespace": "runs"}})
    assert SECRET.path("runs") == "/api/v1/namespaces/runs/secrets"
