"""What a worker image has variants for: asked of real registries over HTTP, with and without logins, honest and not."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from orca_infra.errors import AuthFailed, OrcaError, QuotaExceeded, Refused, Transient
from orca_infra.machines.image_credentials import Login, login_for
from orca_infra.machines.image_registry import RegistryArchitectures, parse_image

INDEX = "application/vnd.oci.image.index.v1+json"
LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
DOCKER = "application/vnd.docker.distribution.manifest.v2+json"
LOGIN = Login("jane", "pass:word")


def digest_of(body: bytes) -> str:
    return f"sha256:{hashlib.sha256(body).hexdigest()}"


class Images:
    """What a registry of a test holds, by path: status, body, headers."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, bytes, dict[str, str]]] = {}
        self.asked: list[tuple[str, str]] = []
        self.auth = ""
        self.host = ""
        self.hook: Callable[[Any], bool] = lambda _: False

    def put(self, path: str, body: bytes, kind: str, status: int = 200, **headers: str) -> str:
        self.answers[path] = (status, body, {"Content-Type": kind, **headers})
        return digest_of(body)

    def manifest(self, name: str, value: object, kind: str = MANIFEST, tag: str = "1") -> str:
        body = json.dumps(value).encode()
        digest = self.put(f"/v2/{name}/manifests/{tag}", body, kind)
        self.put(f"/v2/{name}/manifests/{digest}", body, kind)
        return digest

    def image(self, name: str, architecture: str, tag: str = "1", kind: str = MANIFEST, system: str = "linux") -> str:
        config = json.dumps({"architecture": architecture, "os": system}).encode()
        digest = self.put(f"/v2/{name}/blobs/{digest_of(config)}", config, "application/octet-stream")
        value = {"schemaVersion": 2, "mediaType": kind, "config": {"digest": digest}, "layers": []}
        return self.manifest(name, value, kind, tag)


@pytest.fixture
def registry() -> Iterator[Images]:
    """A registry on this machine; `auth` has it ask for a token or for a name and its password."""
    images = Images()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            authorization = self.headers.get("Authorization", "")
            images.asked.append((url.path, authorization))
            if images.hook(self):
                return
            status, body, headers = images.answers.get(url.path, (404, b"{}", {}))
            if url.path == "/token":
                query = parse_qs(url.query)
                good = authorization == LOGIN.basic and query["scope"] == ["repository:worker:pull"]
                status, body, headers = (200, b'{"token":"t0ken"}', {}) if good else (401, b"{}", {})
            elif images.auth == "token" and authorization != "Bearer t0ken":
                realm = f'Bearer realm="http://{images.host}/token",service="registry",scope="repository:worker:pull"'
                status, body, headers = 401, b"{}", {"WWW-Authenticate": realm}
            elif images.auth == "basic" and authorization != LOGIN.basic:
                status, body, headers = 401, b"{}", {"WWW-Authenticate": 'Basic realm="registry"'}
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    images.host = f"127.0.0.1:{server.server_port}"
    yield images
    server.shutdown()
    server.server_close()


def ask(registry: Images, name: str = "worker:1", login: Login | None = None, seconds: float = 20) -> Any:
    return RegistryArchitectures(logins=lambda _: login, whole_seconds=seconds)(f"{registry.host}/{name}")


def variants(*architectures: str) -> list[dict[str, Any]]:
    return [
        {"digest": digest_of(each.encode()), "platform": {"os": "linux", "architecture": each}}
        for each in architectures
    ]


@pytest.mark.parametrize("kind", [INDEX, LIST])
def test_an_index_gives_its_linux_variants_and_no_attestations(registry: Images, kind: str) -> None:
    entries = variants("amd64", "arm64")
    entries.append({"digest": "sha256:" + "0" * 64, "platform": {"os": "windows", "architecture": "amd64"}})
    entries.append({"digest": "sha256:" + "1" * 64, "platform": {"os": "unknown", "architecture": "unknown"}})
    entries.append(
        {
            "digest": "sha256:" + "2" * 64,
            "platform": {"os": "linux", "architecture": "riscv64"},
            "annotations": {"vnd.docker.reference.type": "attestation-manifest"},
        }
    )
    registry.manifest("worker", {"schemaVersion": 2, "mediaType": kind, "manifests": entries}, kind)
    assert ask(registry) == {"amd64", "arm64"}


@pytest.mark.parametrize("kind", [MANIFEST, DOCKER])
def test_a_single_manifest_is_what_its_configuration_says(registry: Images, kind: str) -> None:
    registry.image("team/worker", "arm64", kind=kind)
    assert ask(registry, "team/worker:1") == {"arm64"}


def test_a_variant_that_states_no_platform_is_looked_into(registry: Images) -> None:
    digest = registry.image("worker", "arm64", tag="child")
    registry.manifest("worker", {"mediaType": INDEX, "manifests": [{"digest": digest}]}, INDEX)
    assert ask(registry) == {"arm64"}


def test_an_image_is_asked_for_by_its_digest_which_has_to_fit(registry: Images) -> None:
    digest = registry.image("worker", "amd64")
    assert ask(registry, f"worker:1@{digest}") == {"amd64"}
    registry.answers[f"/v2/worker/manifests/{digest}"] = registry.answers["/v2/worker/manifests/1"][:1] + (
        b'{"mediaType": "' + MANIFEST.encode() + b'"}',
        {},
    )
    with pytest.raises(Refused, match="digest"):
        ask(registry, f"worker@{digest}")


def test_a_configuration_or_a_header_with_another_digest_is_refused(registry: Images) -> None:
    registry.image("worker", "amd64")
    [blob] = [path for path in registry.answers if "/blobs/" in path]
    registry.put(blob, b'{"architecture": "arm64", "os": "linux"}', "application/json")
    with pytest.raises(Refused, match="digest"):
        ask(registry)
    registry.image("worker", "amd64", tag="2")
    status, body, headers = registry.answers["/v2/worker/manifests/2"]
    registry.answers["/v2/worker/manifests/2"] = (
        status,
        body,
        {**headers, "Docker-Content-Digest": "sha256:" + "0" * 64},
    )
    with pytest.raises(Refused, match="digest"):
        ask(registry, "worker:2")


@pytest.mark.parametrize("auth", ["token", "basic"])
def test_a_registry_that_asks_for_a_login_gets_it(registry: Images, auth: str) -> None:
    registry.auth = auth
    registry.image("worker", "amd64")
    assert ask(registry, login=LOGIN) == {"amd64"}
    with pytest.raises(AuthFailed, match="docker login"):
        ask(registry)
    with pytest.raises(AuthFailed) as raised:
        ask(registry, login=Login("jane", "wrong"))
    assert "wrong" not in str(raised.value)


def test_a_redirect_elsewhere_carries_no_login(registry: Images) -> None:
    registry.auth = "basic"
    registry.image("worker", "amd64")
    [blob] = [path for path in registry.answers if "/blobs/" in path]
    body = registry.answers[blob][1]
    elsewhere: list[str] = []

    class Store(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            elsewhere.append(self.headers.get("Authorization", ""))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

    store = ThreadingHTTPServer(("127.0.0.1", 0), Store)
    threading.Thread(target=store.serve_forever, args=(0.02,), daemon=True).start()
    registry.answers[blob] = (307, b"", {"Location": f"http://127.0.0.1:{store.server_port}/x?signature=s3cret"})
    try:
        assert ask(registry, login=LOGIN) == {"amd64"}
        assert elsewhere == [""]
    finally:
        store.shutdown()
        store.server_close()
    with pytest.raises(Transient) as raised:
        ask(registry, login=LOGIN)
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize(
    ("status", "meaning"),
    [(404, Refused), (403, AuthFailed), (429, QuotaExceeded), (500, Transient), (503, Transient), (400, Refused)],
)
def test_an_answer_that_is_an_error_is_said_by_meaning(registry: Images, status: int, meaning: type[OrcaError]) -> None:
    registry.put("/v2/worker/manifests/1", b"<html>", "text/html", status)
    with pytest.raises(OrcaError) as raised:
        ask(registry)
    assert type(raised.value) is meaning
    assert registry.host in str(raised.value)


HOSTILE: list[bytes] = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff\xfe",
    b'{"mediaType": 7}',
    b'{"mediaType": "' + INDEX.encode() + b'"}',
    b'{"mediaType": "' + INDEX.encode() + b'", "manifests": 7}',
    b'{"mediaType": "' + INDEX.encode() + b'", "manifests": [7]}',
    b'{"mediaType": "' + INDEX.encode() + b'", "manifests": [{"digest": "../../x"}, {"digest": 7}]}',
    b'{"mediaType": "' + MANIFEST.encode() + b'", "config": {"digest": "../../../token"}}',
    b'{"mediaType": "' + MANIFEST.encode() + b'", "config": []}',
    b"[" * 100_000,
    b"{" + b" " * (5 * 1024 * 1024) + b"}",
]


@pytest.mark.parametrize("body", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_or_broken_answer_is_an_error_and_nothing_else(registry: Images, body: bytes) -> None:
    registry.put("/v2/worker/manifests/1", body, MANIFEST)
    with pytest.raises(OrcaError):
        ask(registry)


def test_an_index_of_itself_and_a_hundred_thousand_variants_come_to_an_end(registry: Images) -> None:
    body = json.dumps(
        {"mediaType": INDEX, "manifests": [{"digest": digest_of(str(n).encode())} for n in range(20_000)]}
    )
    registry.put("/v2/worker/manifests/1", body.encode(), INDEX)
    registry.hook = lambda handler: _answer(handler, body.encode()) if "sha256" in handler.path else False
    with pytest.raises(OrcaError):
        ask(registry)
    assert len(registry.asked) < 100


def _answer(handler: Any, body: bytes) -> bool:
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)
    return True


def test_redirects_come_to_an_end(registry: Images) -> None:
    registry.put("/v2/worker/manifests/1", b"", "", 302, Location="/v2/worker/manifests/1")
    with pytest.raises(Refused, match="from one place to the next"):
        ask(registry)


def test_a_registry_that_drips_its_answer_is_not_waited_for(registry: Images) -> None:
    def drip(handler: Any) -> bool:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000000")
        handler.end_headers()
        with suppress(OSError):
            while True:
                handler.wfile.write(b" ")
                time.sleep(0.1)
        return True

    registry.hook = drip
    with pytest.raises(Transient):
        ask(registry, seconds=0.5)


def test_a_registry_that_is_away_is_transient() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(Transient, match="could not be reached"):
            RegistryArchitectures(logins=lambda _: None)(f"127.0.0.1:{port}/worker:1")


def test_an_answer_is_kept_for_its_time_and_an_error_for_less(registry: Images) -> None:
    now = [0.0]
    ask_again: Any = RegistryArchitectures(kept_seconds=600, logins=lambda _: None, clock=lambda: now[0])
    image = f"{registry.host}/worker:1"
    with pytest.raises(Refused):
        ask_again(image)
    registry.image("worker", "amd64")
    now[0] = 59
    with pytest.raises(Refused):
        ask_again(image)
    assert len(registry.asked) == 1
    now[0] = 61
    assert ask_again(image) == {"amd64"}
    registry.image("worker", "arm64")
    now[0] = 660
    asked = len(registry.asked)
    assert ask_again(image) == {"amd64"}
    assert len(registry.asked) == asked
    now[0] = 662
    assert ask_again(image) == {"arm64"}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("worker", ("registry-1.docker.io", "library/worker", "latest")),
        ("team/worker:2", ("registry-1.docker.io", "team/worker", "2")),
        ("docker.io/worker:2", ("registry-1.docker.io", "library/worker", "2")),
        ("registry.example/a/b/worker:1", ("registry.example", "a/b/worker", "1")),
        ("localhost/worker", ("localhost", "worker", "latest")),
        (
            "us-docker.pkg.dev/p/orca/worker:1@sha256:" + "a" * 64,
            ("us-docker.pkg.dev", "p/orca/worker", "sha256:" + "a" * 64),
        ),
        ("registry.example:5000/worker", ("registry.example:5000", "worker", "latest")),
    ],
)
def test_an_images_name_has_its_parts(text: str, parts: tuple[str, str, str]) -> None:
    image = parse_image(text)
    assert (image.host, image.repository, image.reference) == parts


@pytest.mark.parametrize(
    "text", ["", "UPPER/case", "x@sha256:12", "a b", "registry.example/../x", "x:", "a.b/c?d=e", "a.b@evil/c"]
)
def test_what_is_no_images_name_is_refused(text: str) -> None:
    with pytest.raises(Refused):
        parse_image(text)


def test_only_this_very_machine_is_spoken_to_in_plain_text() -> None:
    assert parse_image("127.0.0.1:5000/x").base.startswith("http://")
    assert parse_image("localhost:5000/x").base.startswith("http://")
    for image in ("registry.example/x", "127.0.0.1.evil.example/x", "localhost.example/x", "10.0.0.1:5000/x"):
        assert parse_image(image).base.startswith("https://")


# Logins.


def docker_config(folder: Path, value: object) -> dict[str, str]:
    (folder / "config.json").write_text(json.dumps(value))
    return {"DOCKER_CONFIG": str(folder), "PATH": f"{folder}:{os.environ['PATH']}"}


def test_a_docker_configuration_gives_the_login_of_its_registry_alone(tmp_path: Path) -> None:
    auth = base64.b64encode(b"jane:pass:word").decode()
    environment = docker_config(
        tmp_path,
        {
            "auths": {
                "registry.example": {"auth": auth},
                "https://index.docker.io/v1/": {"username": "u", "password": "p"},
            }
        },
    )
    assert login_for("registry.example", environment) == LOGIN
    assert login_for("registry-1.docker.io", environment) == Login("u", "p")
    assert login_for("registry.example.evil", environment) is None
    assert "pass" not in repr(login_for("registry.example", environment))


def test_a_credential_helper_is_asked_by_its_input_alone(tmp_path: Path) -> None:
    helper = tmp_path / "docker-credential-mine"
    helper.write_text(
        '#!/bin/sh\nread server\n[ "$server" = registry.example ] && echo \'{"Username": "jane", "Secret": "pass:word"}\'\n'
    )
    helper.chmod(0o755)
    environment = docker_config(tmp_path, {"credHelpers": {"registry.example": "mine"}, "credsStore": "missing"})
    assert login_for("registry.example", environment) == LOGIN
    assert login_for("another.example", environment) is None


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"auths": 7}', '{"auths": {"registry.example": {"auth": "%%%"}}}', '{"credsStore": "../x"}'],
)
def test_a_broken_configuration_has_no_login(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert login_for("registry.example", {"DOCKER_CONFIG": str(tmp_path)}) is None
    assert login_for("registry.example", {"DOCKER_CONFIG": str(tmp_path / "none")}) is None
