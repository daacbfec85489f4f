"""`orca-infra runtimes serve` as a process, on a real API server; and that what is secret is nowhere but in the Pod's Secret."""

from __future__ import annotations

import base64
import gzip
import http.client
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from orca_infra.errors import Refused
from orca_infra.kube.kinds import EVENT, Kind
from orca_infra.runtimes.living import end_runtime
from orca_infra.testing.ports import free_port

if TYPE_CHECKING:
    from tests.cluster.runtimes.conftest import Room

SERVICE_ACCOUNT = Kind(api_version="v1", kind="ServiceAccount", plural="serviceaccounts")
PROGRAM = Path(sys.executable).with_name("orca-infra")


class Served:
    """A serving process, asked over HTTP."""

    def __init__(self, port: int, log: Path) -> None:
        self.port, self.log = port, log
        self.answers: list[bytes] = []

    def call(self, method: str, path: str, body: Any = None, *, token: str = "jane-token") -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        content = None if body is None else json.dumps(body)
        connection.request(method, path, content, {"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        text = answer.read()
        self.answers.append(text + str(answer.headers).encode())
        connection.close()
        return answer.status, json.loads(text) if text else None


@contextmanager
def serving(room: Room, wait_until: Callable[..., None], **more: str) -> Iterator[Served]:
    port = free_port()
    log = room.folder / "serve.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [PROGRAM, "runtimes", "serve", "--port", str(port)],
            env=room.product_environment(**more),
            stdout=output,
            stderr=output,
        )
    served = Served(port, log)

    def answers() -> bool:
        assert process.poll() is None, log.read_text()
        with suppress(OSError):
            return served.call("GET", "/readyz")[0] == 200
        return False

    try:
        wait_until(answers, 30)
        yield served
        process.terminate()
        assert process.wait() == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.csv"
    path.write_text("jane-token,jane\njohn-token,john\nhub-token,hub\n")
    return path


def test_a_user_launches_looks_extends_and_stops_over_http(
    room: Room, wait_until: Callable[..., None], tokens: Path
) -> None:
    room.fill(size=2)
    more = {"ORCA_RUNTIMES_TOKENS": str(tokens), "ORCA_RUNTIMES_LAUNCHERS": "hub"}
    with serving(room, wait_until, **more) as served, serving(room, wait_until, **more) as second:
        body = {"environment": "python-simple-env", "secrets": {"A": "1"}, "idempotency_key": "k"}
        code, made = served.call("POST", "/v1/runtimes", body)
        assert (code, made["warm"], made["state"], made["user"]) == (201, True, "ready", "jane")
        assert room.secret_values(made["pod"]) == {"A": "1"}
        pod = room.pod(made["pod"])
        assert pod is not None
        assert made["address"] == pod["status"]["podIP"]
        again = second.call("POST", "/v1/runtimes", body)[1]
        path = f"/v1/runtimes/{made['id']}"
        code, shown = second.call("GET", path)
        assert [{**one, "credits": 0} for one in (made, again)] == [{**shown, "credits": 0}] * 2
        assert 0 <= made["credits"] < again["credits"] < shown["credits"]
        assert (code, shown["state"], shown["pool"], shown["burning_rate"]) == (
            200,
            "ready",
            "python-simple-pool",
            0.01,
        )
        assert [one["id"] for one in second.call("GET", "/v1/runtimes")[1]["runtimes"]] == [made["id"]]
        for method, there in (("GET", path), ("DELETE", path)):
            assert served.call(method, there, token="john-token")[0] == 404
        assert served.call("GET", "/v1/runtimes", token="john-token")[1] == {"runtimes": []}
        assert served.call("GET", path, token="nobody")[0] == 401
        assert served.call("POST", "/v1/runtimes", {**body, "user": "john"})[0] == 403
        code, his = served.call("POST", "/v1/runtimes", {**body, "user": "john"}, token="hub-token")
        assert (code, his["user"], his["warm"]) == (201, "john", True)
        assert len(served.call("GET", "/v1/runtimes", token="hub-token")[1]["runtimes"]) == 2

        cold = {"environment": "python-simple-env", "resources": {"cpu": "2"}}
        code, starting = served.call("POST", "/v1/runtimes", cold)
        assert (code, starting["warm"], starting["state"]) == (201, False, "starting")
        room.run_pass()
        room.wait_until(lambda: room.is_ready(room.pod(starting["pod"])))
        room.run_pass()
        code, ready = served.call("GET", f"/v1/runtimes/{starting['id']}?wait=20")
        assert (code, ready["state"]) == (200, "ready")

        assert served.call("POST", f"{path}/extend", {"seconds": 60})[1]["expires_at"] == shown["expires_at"]
        assert served.call("DELETE", path)[0] == 204
        assert served.call("DELETE", path)[0] == 204
        room.until(lambda: room.reason(made["pod"]) == "Stopped")
        assert served.call("DELETE", path)[0] == 404
        code, ended = served.call("GET", path)
        assert (code, ended["state"], ended["message"]) == (200, "ended", "Stopped: it was stopped")
        usage = served.call("GET", "/v1/usage")[1]
        assert (usage["user"], len(usage["runtimes"]), usage["running"]) == ("jane", 2, 1)
        assert usage["credits"] >= ended["credits"] > 0
        assert served.call("POST", "/v1/runtimes", body)[0] == 422
        assert served.call("POST", "/v1/runtimes", {"environment": "none"})[1]["error"]["kind"] == "Refused"
        assert served.call("GET", "/openapi.json")[1]["openapi"] == "3.1.0"


def test_the_cluster_says_whose_a_token_is(room: Room, wait_until: Callable[..., None]) -> None:
    room.fill(size=1)
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "jane", "namespace": room.namespace}}
    room.kube.create(account, kind=SERVICE_ACCOUNT)
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"audiences": ["orca"]}}
    request["metadata"] = {"name": "jane", "namespace": room.namespace}
    of_account = Kind(api_version="v1", kind="TokenRequest", plural="serviceaccounts/jane/token")
    token = room.kube.create(request, kind=of_account)["status"]["token"]
    with serving(room, wait_until, ORCA_RUNTIMES_AUDIENCE="orca") as served:
        code, me = served.call("GET", "/v1/me", token=token)
        user = f"system:serviceaccount:{room.namespace}:jane"
        assert (code, me["user"], me["launcher"]) == (200, user, False)
        name, _, value = me["secret_label"].partition("=")
        room.make_secret("mine", {name: value}, {"MINE": "yes"})
        code, made = served.call("POST", "/v1/runtimes", {"environment": "python-simple-env"}, token=token)
        assert (code, made["user"], made["warm"]) == (201, user, True)
        room.wait_until(lambda: room.secret_values(made["pod"]) == {"MINE": "yes"})
        assert served.call("GET", "/v1/me", token="no" + token)[0] == 401
    with serving(room, wait_until) as served:
        assert served.call("GET", "/v1/me", token=token)[0] == 401


CORE = "PLANTEDvalue7f3"
SENT = f'sent-{CORE}"x\\'
OWN = f"own-{CORE}"
TOKEN = f"token-{CORE}"


def traces(core: str) -> list[bytes]:
    """How a value that has this in it looks raw, escaped or quoted, and in base64 at each of its three alignments."""
    found = [core.encode()]
    for before in range(3):
        encoded = base64.b64encode(b"x" * before + core.encode() + b"x" * 3)
        found.append(encoded[4 if before else 0 : -8])
    return found


def test_what_is_secret_is_in_the_pods_secret_and_nowhere_else(room: Room, wait_until: Callable[..., None]) -> None:
    tokens = room.folder.parent / "secret-tokens.csv"
    tokens.write_text(f"{TOKEN},jane\n")
    room.fill(size=2)
    room.user_secret("own", "jane", OWN=OWN)
    everything: dict[str, bytes] = {}
    with serving(room, wait_until, ORCA_RUNTIMES_TOKENS=str(tokens)) as served:
        asked = {"environment": "python-simple-env", "secrets": {"SENT": SENT}}
        warm = served.call("POST", "/v1/runtimes", asked, token=TOKEN)[1]
        cold = served.call("POST", "/v1/runtimes", {**asked, "resources": {"cpu": "3"}}, token=TOKEN)[1]
        for bad in ({**asked, "environment": "none"}, {**asked, "zzz": SENT}, {**asked, "secrets": {"a b": SENT}}):
            assert served.call("POST", "/v1/runtimes", bad, token=TOKEN)[0] in {400, 422}
        served.call("POST", "/v1/runtimes", {**asked, "user": "john"}, token=TOKEN)
        for path in (f"/v1/runtimes/{warm['id']}", "/v1/runtimes", "/v1/usage", "/v1/me"):
            served.call("GET", path, token=TOKEN)
        with pytest.raises(Refused):
            room.launch(secrets={"not a key": SENT})
        made = room.launch(secrets={"SENT": SENT})
        command = [
            str(PROGRAM),
            "runtimes",
            "launch",
            "python-simple-env",
            "--user",
            "jane",
            "--secret",
            "SENT",
            "--json",
        ]
        done = subprocess.run(
            command, env=room.product_environment(SENT=SENT), capture_output=True, check=True, timeout=300
        )
        everything["the command's output"] = done.stdout + done.stderr
        room.until(lambda: room.is_ready(room.pod(cold["pod"])))
        for process in Path("/proc").iterdir():
            with suppress(OSError):
                everything[f"the arguments of {process.name}"] = (process / "cmdline").read_bytes()
        end_runtime(room.launching, made.id)
        room.run_pass()
        everything["the answers"] = b"".join(served.answers)
    for pod in (warm["pod"], cold["pod"]):
        assert room.secret_values(pod) == {"OWN": OWN, "SENT": SENT}
    everything["the log"] = room.logged.getvalue().encode()
    everything["the serving process's log"] = served.log.read_bytes()
    for table in room.rows("select table_name as t from information_schema.tables where table_schema = 'orca'"):
        rows = room.rows(f"select x::text from orca.{table['t']} x")
        everything[f"the table {table['t']}"] = str(rows).encode()
    everything["the events"] = json.dumps(room.kube.list(EVENT).items).encode()
    everything["the Pods"] = json.dumps(room.pods()).encode()
    everything["the pool"] = json.dumps(room.status()).encode()
    for file in room.folder.rglob("*"):
        if file.is_file() and not file.is_symlink():
            content = file.read_bytes()
            everything[str(file)] = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    assert len([name for name in everything if "/state/" in name]) > 1
    assert warm["pod"].encode() in everything["the table runtimes"]
    wrong = [name for name, content in everything.items() for trace in traces(CORE) if trace in content]
    assert wrong == []


def test_the_search_for_planted_values_would_find_them() -> None:
    for value in (SENT, OWN, TOKEN):
        for form in (value.encode(), json.dumps(value).encode(), base64.b64encode(value.encode())):
            assert any(trace in form for trace in traces(CORE)), form
