"""The fake Google Cloud's HTTP face: what Google's client library and the fake Pulumi provider ask of the compute API."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from orca_infra.testing.fake_gcp import PROJECT, ZONES, ApiError, FakeGcp, Instance, Operation

_BASE = "/compute/v1"
_API = f"https://www.googleapis.com{_BASE}/projects/{PROJECT}"
_ZONE = rf"{_BASE}/projects/(?P<project>[^/]+)/zones/(?P<zone>[^/]+)"


class FakeGcpServer:
    """Serves one fake cloud on a port of its own."""

    def __init__(self, cloud: FakeGcp) -> None:
        self.cloud = cloud
        handler = type("Handler", (_Handler,), {"cloud": cloud})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def endpoint(self) -> str:
        """What GOOGLE_COMPUTE_CUSTOM_ENDPOINT names."""
        return f"http://127.0.0.1:{self._server.server_port}{_BASE}/"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def serve(cloud: FakeGcp) -> Iterator[FakeGcpServer]:
    """Serve it as long as the block runs."""
    server = FakeGcpServer(cloud)
    try:
        yield server
    finally:
        server.close()


class _Handler(BaseHTTPRequestHandler):
    """One request. Its routes are the few of the compute API that are needed; any other is a 404 of the server itself."""

    cloud: FakeGcp
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Say nothing: requests have tokens in their bodies."""

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_DELETE(self) -> None:
        self._answer("DELETE")

    def _answer(self, method: str) -> None:
        url = urlsplit(self.path)
        query = {key: values[-1] for key, values in parse_qs(url.query).items()}
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else {}
        try:
            status, answer = 200, self._route(method, url.path, query, body)
        except ApiError as error:
            status, answer = error.status, _error(error)
        text = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        with contextlib.suppress(OSError):  # whoever asked may have been killed
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    def _route(self, method: str, path: str, query: dict[str, str], body: dict[str, Any]) -> Any:
        cloud = self.cloud
        routes: list[tuple[str, str, Callable[[dict[str, str]], Any]]] = [
            (
                "GET",
                rf"{_BASE}/projects/(?P<project>[^/]+)/aggregated/instances",
                lambda _: _aggregated(cloud, query),
            ),
            ("POST", rf"{_ZONE}/instances", lambda at: _operation(cloud.insert(at["zone"], body))),
            (
                "GET",
                rf"{_ZONE}/instances/(?P<name>[^/]+)/serialPort",
                lambda at: _serial(cloud.serial(at["zone"], at["name"]), int(query.get("start", "0"))),
            ),
            ("GET", rf"{_ZONE}/instances/(?P<name>[^/]+)", lambda at: _instance(cloud.get(at["zone"], at["name"]))),
            (
                "DELETE",
                rf"{_ZONE}/instances/(?P<name>[^/]+)",
                lambda at: _operation(cloud.delete(at["zone"], at["name"])),
            ),
            (
                "POST",
                rf"{_ZONE}/instances/(?P<name>[^/]+)/setLabels",
                lambda at: _operation(cloud.set_labels(at["zone"], at["name"], body)),
            ),
            (
                "POST",
                rf"{_ZONE}/instances/(?P<name>[^/]+)/stop",
                lambda at: _operation(cloud.begin_stop(at["zone"], at["name"])),
            ),
            (
                "GET",
                rf"{_ZONE}/operations/(?P<name>[^/]+)",
                lambda at: _operation(cloud.operation(at["zone"], at["name"])),
            ),
            ("POST", r"/fake/resources", lambda _: _record(cloud, body)),
        ]
        for wanted, pattern, call in routes:
            found = re.fullmatch(pattern, unquote(path))
            if wanted == method and found:
                at = found.groupdict()
                if at.get("project", PROJECT) != PROJECT:
                    raise ApiError(404, "notFound", f"The resource 'projects/{at['project']}' was not found")
                return call(at)
        raise ApiError(404, "notFound", f"the fake has no {method} {path}")


def _aggregated(cloud: FakeGcp, query: dict[str, str]) -> dict[str, Any]:
    found = cloud.listed(query.get("filter", ""))
    first = int(query.get("pageToken") or 0)
    size = min(int(query.get("maxResults") or 500), cloud.page_size)
    page = found[first : first + size]
    if cloud.unreachable and cloud.lists_are_whole and query.get("returnPartialSuccess") != "true":
        raise ApiError(503, "backendError", "Zones are unreachable")
    items: dict[str, Any] = {}
    for zone in ZONES:
        here = [_instance(instance) for instance in page if instance.zone == zone]
        code = "UNREACHABLE" if zone in cloud.unreachable else "NO_RESULTS_ON_PAGE"
        items[f"zones/{zone}"] = (
            {"instances": here} if here else {"warning": {"code": code, "message": f"nothing for zones/{zone}"}}
        )
    answer: dict[str, Any] = {"kind": "compute#instanceAggregatedList", "items": items}
    if cloud.unreachable:
        answer["unreachables"] = [f"projects/{PROJECT}/zones/{zone}" for zone in sorted(cloud.unreachable)]
    if first + size < len(found):
        answer["nextPageToken"] = str(first + size)
    return answer


def _instance(instance: Instance) -> dict[str, Any]:
    return {
        **instance.body,
        "kind": "compute#instance",
        "id": str(instance.id),
        "labels": instance.labels,
        "labelFingerprint": instance.label_fingerprint,
        "creationTimestamp": instance.created_at.isoformat(timespec="milliseconds"),
        "status": instance.status,
        "zone": f"{_API}/zones/{instance.zone}",
        "machineType": f"{_API}/zones/{instance.zone}/machineTypes/{instance.type}",
        "selfLink": f"{_API}/zones/{instance.zone}/instances/{instance.name}",
    }


def _operation(operation: Operation) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "kind": "compute#operation",
        "name": operation.name,
        "operationType": operation.kind,
        "status": "DONE" if operation.is_done else "RUNNING",
        "targetId": str(operation.instance.id),
        "zone": f"{_API}/zones/{operation.zone}",
    }
    if operation.is_done and operation.failed:
        answer["error"] = {"errors": [{"code": operation.code, "message": operation.message}]}
    return answer


def _serial(said: str, start: int) -> dict[str, Any]:
    return {"contents": said[start:], "start": "0", "next": str(len(said))}


def _record(cloud: FakeGcp, body: dict[str, Any]) -> dict[str, Any]:
    """What the fake Pulumi provider made besides instances, or removed."""
    with cloud.locked():
        kept = cloud.others.setdefault(str(body["type"]), {})
        if body.get("removed"):
            kept.pop(str(body["id"]), None)
        else:
            kept[str(body["id"])] = body["inputs"]
    return {}


def _error(error: ApiError) -> dict[str, Any]:
    item = {"domain": "global", "reason": error.reason, "message": str(error)}
    return {"error": {"code": error.status, "message": str(error), "errors": [item]}}
