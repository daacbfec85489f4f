"""Image architectures asked of a real registry server, Debian's docker-registry: open, with a password, and with tokens."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from orca_infra.errors import AuthFailed, Refused
from orca_infra.machines.image_credentials import Login, login_for
from orca_infra.machines.image_registry import RegistryArchitectures
from orca_infra.testing.node_programs import inside, unpacked
from orca_infra.testing.node_surroundings import NodeImpossible
from orca_infra.testing.ports import free_port

LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER = "application/vnd.docker.distribution.manifest.v2+json"
OCI = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX = "application/vnd.oci.image.index.v1+json"
LOGIN = Login("jane", "pass:word")
# bcrypt of the password above, as htpasswd -B writes it
HTPASSWD = "jane:$2b$05$abcdefghijklmnopqrstuuDIEddBSuRWBBEY6g5zv60IAP5bSSfki\n"
SERVICE = "the-registry-of-the-tests"


def digest_of(body: bytes) -> str:
    return f"sha256:{hashlib.sha256(body).hexdigest()}"


class Registry:
    """A registry server; `authorization` is what pushes carry."""

    def __init__(self, host: str, authorization: Callable[[], str] = lambda: "") -> None:
        self.host = host
        self.authorization = authorization

    def push(self, path: str, body: bytes, kind: str, method: str = "PUT") -> str:
        headers = {"Content-Type": kind, "Authorization": self.authorization()}
        request = urllib.request.Request(
            f"http://{self.host}{path}", body, {key: value for key, value in headers.items() if value}, method=method
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(answer.headers.get("Location", ""))

    def push_blob(self, body: bytes) -> str:
        place = urlsplit(self.push("/v2/worker/blobs/uploads/", b"", "application/octet-stream", "POST"))
        self.push(f"{place.path}?{place.query}&digest={digest_of(body)}", body, "application/octet-stream")
        return digest_of(body)

    def push_image(self, architecture: str, tag: str, kind: str = DOCKER) -> dict[str, Any]:
        """Push an image without layers; gives its entry in a list."""
        config = json.dumps(
            {"architecture": architecture, "os": "linux", "rootfs": {"type": "layers", "diff_ids": []}}
        ).encode()
        value = {
            "schemaVersion": 2,
            "mediaType": kind,
            "config": {
                "mediaType": "application/vnd.docker.container.image.v1+json",
                "size": len(config),
                "digest": self.push_blob(config),
            },
            "layers": [],
        }
        body = json.dumps(value).encode()
        self.push(f"/v2/worker/manifests/{tag}", body, kind)
        return {
            "mediaType": kind,
            "size": len(body),
            "digest": digest_of(body),
            "platform": {"os": "linux", "architecture": architecture},
        }

    def ask(self, reference: str, login: Login | None = None) -> Any:
        return RegistryArchitectures(logins=lambda _: login)(f"{self.host}/worker{reference}")


@pytest.fixture(scope="session")
def program() -> Path:
    """Debian's registry, installed or unpacked from its package."""
    found = shutil.which("docker-registry")
    if found:
        return Path(found)
    try:
        path = inside(unpacked("docker-registry"), "docker-registry")
    except NodeImpossible as error:
        pytest.fail(str(error), pytrace=False)  # skipped, nobody would notice
    assert path is not None
    return path


@pytest.fixture
def start(program: Path, tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """Starts a registry with this authentication in its configuration; gives its host."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(auth: str) -> str:
        host = f"127.0.0.1:{free_port()}"
        config = tmp_path / "registry.yml"
        config.write_text(
            f"version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {tmp_path}/data}}}}\n"
            f"http: {{addr: '{host}'}}\n{auth}"
        )
        log = (tmp_path / "registry.log").open("wb")
        started.append(subprocess.Popen([program, "serve", str(config)], stdout=log, stderr=log))
        log.close()
        while not _answers(host):
            assert started[-1].poll() is None, (tmp_path / "registry.log").read_text(errors="replace")
            time.sleep(0.05)
        return host

    yield begin
    for process in started:
        process.terminate()
        process.wait()


def _answers(host: str) -> bool:
    try:
        urllib.request.urlopen(f"http://{host}/v2/", timeout=2).close()
    except urllib.error.HTTPError:
        return True  # it asks for a login
    except OSError:
        return False
    return True


def test_single_images_and_lists_of_both_kinds_by_tag_and_by_digest(start: Callable[[str], str]) -> None:
    registry = Registry(start(""))
    entries = [registry.push_image(architecture, architecture) for architecture in ("amd64", "arm64")]
    body = json.dumps({"schemaVersion": 2, "mediaType": LIST, "manifests": entries}).encode()
    registry.push("/v2/worker/manifests/both", body, LIST)
    statement = {
        **registry.push_image("unknown", "statement", OCI),
        "platform": {"os": "unknown", "architecture": "unknown"},
        "annotations": {"vnd.docker.reference.type": "attestation-manifest"},
    }
    index = {
        "schemaVersion": 2,
        "mediaType": OCI_INDEX,
        "manifests": [registry.push_image("arm64", "oci", OCI), statement],
    }
    registry.push("/v2/worker/manifests/index", json.dumps(index).encode(), OCI_INDEX)
    assert registry.ask(":arm64") == {"arm64"}
    assert registry.ask(":oci") == {"arm64"}
    assert registry.ask(":both") == {"amd64", "arm64"}
    assert registry.ask(f"@{digest_of(body)}") == {"amd64", "arm64"}
    assert registry.ask(":index") == {"arm64"}
    with pytest.raises(Refused, match="404"):
        registry.ask(":none")


def test_a_password_that_docker_login_kept_is_given_and_without_it_nothing_is(
    start: Callable[[str], str], tmp_path: Path
) -> None:
    (tmp_path / "htpasswd").write_text(HTPASSWD)
    registry = Registry(
        start(f"auth: {{htpasswd: {{realm: tests, path: {tmp_path}/htpasswd}}}}\n"), lambda: LOGIN.basic
    )
    registry.push_image("arm64", "1")
    login = base64.b64encode(b"jane:pass:word").decode()
    (tmp_path / "config.json").write_text(json.dumps({"auths": {registry.host: {"auth": login}}}))
    assert registry.ask(":1", login_for(registry.host, {"DOCKER_CONFIG": str(tmp_path)})) == {"arm64"}
    with pytest.raises(AuthFailed, match=f"docker login {registry.host}"):
        registry.ask(":1")
    with pytest.raises(AuthFailed):
        registry.ask(":1", Login("jane", "another"))


class TokenServer:
    """Where a registry gets tokens from: it signs for whoever has the password what is asked for.

    https://distribution.github.io/distribution/spec/auth/jwt/; openssl makes the key and the signatures.
    """

    def __init__(self, folder: Path) -> None:
        self.key, self.certificate = folder / "key.pem", folder / "certificate.pem"
        new_key = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=tests"]
        subprocess.run(
            [*new_key, "-keyout", str(self.key), "-out", str(self.certificate)], check=True, capture_output=True
        )
        self.scopes: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None: ...

            def do_GET(self) -> None:
                query = parse_qs(urlsplit(self.path).query)
                good = self.headers.get("Authorization") == LOGIN.basic and query["service"] == [SERVICE]
                outer.scopes += query["scope"]
                body = json.dumps({"token": outer.token(query["scope"][0])} if good else {}).encode()
                self.send_response(200 if good else 401)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def realm(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/token"

    def token(self, scope: str) -> str:
        kind, name, actions = scope.split(":")
        now = int(time.time())
        header = {"typ": "JWT", "alg": "RS256", "x5c": ["".join(self.certificate.read_text().splitlines()[1:-1])]}
        claims = {
            "iss": "tests",
            "sub": LOGIN.name,
            "aud": SERVICE,
            "exp": now + 300,
            "nbf": now - 10,
            "iat": now,
            "jti": f"{now}",
            "access": [{"type": kind, "name": name, "actions": actions.split(",")}],
        }
        signed = ".".join(_url64(json.dumps(part).encode()) for part in (header, claims))
        signature = subprocess.run(
            ["openssl", "dgst", "-sha256", "-sign", str(self.key)],
            input=signed.encode(),
            check=True,
            capture_output=True,
        ).stdout
        return f"{signed}.{_url64(signature)}"


def _url64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


@pytest.fixture
def tokens(tmp_path: Path) -> Iterator[TokenServer]:
    server = TokenServer(tmp_path)
    yield server
    server.server.shutdown()
    server.server.server_close()


def test_a_registry_that_wants_a_token_gets_the_one_for_reading_this_image_alone(
    start: Callable[[str], str], tokens: TokenServer
) -> None:
    auth = (
        f"auth: {{token: {{realm: '{tokens.realm}', service: {SERVICE}, issuer: tests, "
        f"rootcertbundle: '{tokens.certificate}'}}}}\n"
    )
    registry = Registry(start(auth), lambda: f"Bearer {tokens.token('repository:worker:pull,push')}")
    registry.push_image("arm64", "1")
    assert registry.ask(":1", LOGIN) == {"arm64"}
    assert tokens.scopes == ["repository:worker:pull"]
    with pytest.raises(AuthFailed):
        registry.ask(":1")
    with pytest.raises(AuthFailed):
        registry.ask(":1", Login("jane", "another"))
