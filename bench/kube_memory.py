"""An API server's face over a dictionary, as a process of its own: lists by label, gets, creates, merge patches, deletes.

For benches of what the loop itself costs at sizes that a control plane on two cores takes minutes to fill. What it answers
comes through the product's own client, over HTTP and as JSON, as from a real one. Everything is filled in by PUT /fill.
"""

from __future__ import annotations

import http.server
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit
from urllib.request import Request, urlopen

_KINDS = {
    "pods": ("v1", "PodList"),
    "secrets": ("v1", "SecretList"),
    "services": ("v1", "ServiceList"),
    "jobs": ("batch/v1", "JobList"),
    "nodes": ("v1", "NodeList"),
    "namespaces": ("v1", "NamespaceList"),
    "events": ("v1", "EventList"),
    "runtimepools": ("datalayer.io/v1", "RuntimePoolList"),
    "runtimeenvironments": ("datalayer.io/v1", "RuntimeEnvironmentList"),
    "runtime-pools": ("datalayer.io/v1", "RuntimePoolList"),
    "runtime-environments": ("datalayer.io/v1", "RuntimeEnvironmentList"),
}
_VERSIONS = itertools.count(1000)


class _Face(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a head's body would wait 40 ms for the head to be acknowledged
    #: By plural, then by name.
    store: ClassVar[dict[str, dict[str, dict[str, Any]]]] = {}

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        plural, name = self._place(url.path)
        objects = self.store.get(plural, {})
        if name:
            self._reply(objects[name]) if name in objects else self._missing(name)
            return
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        chosen = [item for item in objects.values() if _matches(item, query.get("labelSelector", ""))]
        begin, limit = int(query.get("continue", "0")), int(query.get("limit", "0"))
        page = chosen[begin : begin + limit] if limit else chosen[begin:]
        metadata = {"resourceVersion": "1"}
        if limit and begin + limit < len(chosen):
            metadata["continue"] = str(begin + limit)
        version, kind = _KINDS[plural]
        self._reply({"apiVersion": version, "kind": kind, "metadata": metadata, "items": page})

    def do_PUT(self) -> None:
        for plural, name, item in self._body():
            self.store.setdefault(plural, {})[name] = item
        self._reply({"kind": "Status", "metadata": {}})

    def do_POST(self) -> None:
        plural, _ = self._place(urlsplit(self.path).path)
        item = self._body()
        item["metadata"] |= {"uid": f"u{next(_VERSIONS)}", "resourceVersion": str(next(_VERSIONS))}
        item["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
        self.store.setdefault(plural, {})[item["metadata"]["name"]] = item
        self._reply(item, 201)

    def do_PATCH(self) -> None:
        plural, name = self._place(urlsplit(self.path).path)
        item = self.store[plural][name]
        patch = self._body()
        annotations = (patch.get("metadata") or {}).get("annotations") or {}
        item["metadata"].setdefault("annotations", {}).update(annotations)
        item["status"] = patch.get("status", item.get("status"))
        self._reply(item)

    def do_DELETE(self) -> None:
        self._body()
        plural, name = self._place(urlsplit(self.path).path)
        found = self.store.get(plural, {}).pop(name, None)
        self._reply(found) if found else self._missing(name)

    def _place(self, path: str) -> tuple[str, str]:
        """The plural and the name of a path, /api/v1/namespaces/<ns>/pods/<name>."""
        parts = path.strip("/").split("/")
        at = next(i for i in reversed(range(len(parts))) if parts[i] in _KINDS)
        return parts[at], "/".join(parts[at + 1 : at + 2])

    def _body(self) -> Any:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return json.loads(content) if content else {}

    def _reply(self, item: Any, code: int = 200) -> None:
        content = json.dumps(item).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _missing(self, name: str) -> None:
        details = {"name": name}
        self._reply({"kind": "Status", "metadata": {}, "code": 404, "reason": "NotFound", "details": details}, 404)

    def log_message(self, *_: object) -> None:
        pass


def _matches(item: dict[str, Any], selector: str) -> bool:
    labels = item["metadata"].get("labels") or {}
    for term in filter(None, selector.split(",")):
        key, equals, value = term.partition("=")
        if key not in labels or (equals and labels[key] != value):
            return False
    return True


class KubeMemory:
    """The process, for whoever fills it."""

    def __init__(self, url: str) -> None:
        self.url = url

    def fill(self, objects: list[tuple[str, dict[str, Any]]]) -> None:
        """Put objects in, each with its plural."""
        body = json.dumps([(plural, item["metadata"]["name"], item) for plural, item in objects]).encode()
        with urlopen(Request(f"{self.url}/fill", data=body, method="PUT")) as answer:
            answer.read()


@contextmanager
def kube_memory(folder: Path) -> Iterator[tuple[KubeMemory, Path]]:
    """A process that answers until the block ends, and a kubeconfig that names it."""
    process = subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        kubeconfig = folder / "kubeconfig"
        kubeconfig.write_text(
            json.dumps(
                {
                    "current-context": "c",
                    "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                    "clusters": [{"name": "c", "cluster": {"server": url}}],
                    "users": [{"name": "u", "user": {"token": "t"}}],
                }
            )
        )
        yield KubeMemory(url), kubeconfig
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Face)
    server.daemon_threads = True
    print(server.server_address[1], flush=True)
    server.serve_forever()
