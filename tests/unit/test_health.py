"""Whether the loop lives and is ready, and how that is served."""

from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from orca_infra.errors import NotLeader, SetupError, Transient
from orca_infra.health.server import HealthServer, serving
from orca_infra.health.state import ROUND_SECONDS, Health
from orca_infra.log import Log
from orca_infra.settings import read_settings
from orca_infra.testing.ports import free_port

PASS_SECONDS = 1800.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class End:
    changed: int = 0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def health(clock: Clock) -> Health:
    return Health(pass_seconds=PASS_SECONDS, clock=clock)


def lead(health: Health) -> None:
    health.leading({"machines": 15.0, "runs": 5.0})
    for scope in ("machines", "runs"):
        health.watched(scope, End)()


def fail(error: Exception) -> End:
    raise error


def test_a_loop_that_starts_lives_and_is_not_ready(health: Health) -> None:
    assert health.alive().good
    assert health.ready().why == ("it is not known yet who leads",)
    health.starting("the database is away: refused")
    assert health.alive().good
    assert health.ready().why == ("the database is away: refused",)


def test_a_follower_is_ready_as_long_as_it_looks(health: Health, clock: Clock) -> None:
    health.following()
    assert health.ready().good
    assert health.ready().details["role"] == "follower"
    clock.now += ROUND_SECONDS + 1
    assert not health.ready().good
    assert not health.alive().good
    health.following()
    assert health.ready().good
    assert health.alive().good


def test_a_leader_is_ready_once_a_pass_of_each_scope_has_ended(health: Health) -> None:
    health.leading({"machines": 15.0, "runs": 5.0})
    health.watched("machines", End)()
    assert health.ready().why == ("no pass over runs has ended yet",)
    health.watched("runs", End)()
    assert health.ready().good


def test_a_pass_that_was_given_up_makes_a_leader_unready_until_the_next_and_alive(health: Health) -> None:
    lead(health)
    with pytest.raises(Transient):
        health.watched("runs", lambda: fail(Transient("the cluster is away")))()
    assert health.ready().why == ("the last pass over runs was given up: Transient: the cluster is away",)
    assert health.alive().good
    health.watched("runs", End)()
    assert health.ready().good


def test_a_pass_past_its_deadline_is_no_life(health: Health, clock: Clock) -> None:
    health.leading({"machines": 15.0})

    def slow() -> End:
        clock.now += PASS_SECONDS - 1
        health.comes_round()
        assert health.alive().good
        clock.now += 2
        assert health.alive().why == (f"a pass over machines is under way for {PASS_SECONDS + 1:.0f} s",)
        assert health.alive().details["passes"]["machines"]["under_way_seconds"] == PASS_SECONDS + 1
        return End(1)

    health.watched("machines", slow)()
    health.comes_round()
    assert health.alive().good


def test_what_is_made_beside_passes_past_their_deadline_is_no_life(health: Health, clock: Clock) -> None:
    since: list[float | None] = [None]
    health.leading({"runtimes": 15.0}, {"runtimes": lambda: since[0]})
    since[0] = clock.now
    clock.now += PASS_SECONDS + 1
    health.comes_round()
    health.watched("runtimes", End)()
    assert health.alive().why == (f"an up beside the passes over runtimes is under way for {PASS_SECONDS + 1:.0f} s",)
    since[0] = None
    assert health.alive().good


def test_no_pass_for_long_is_no_life(health: Health, clock: Clock) -> None:
    lead(health)
    clock.now += 301
    health.comes_round()
    health.watched("runs", End)()
    assert health.alive().why == ("there has been no pass over machines for 301 s",)


def test_a_main_thread_that_stands_still_is_no_life(health: Health, clock: Clock) -> None:
    lead(health)
    clock.now += ROUND_SECONDS + 1
    assert "its main thread has not come round" in health.alive().why[0]


def test_what_was_told_to_end_is_alive_and_not_ready_and_stays_so(health: Health, clock: Clock) -> None:
    lead(health)
    health.stopping()
    health.starting("the lead was lost")
    clock.now += 10 * ROUND_SECONDS
    assert health.alive().good
    assert health.ready().why == ("it was told to end",)


def test_who_lost_the_lead_is_judged_by_what_it_is_then(health: Health) -> None:
    lead(health)
    with pytest.raises(NotLeader):
        health.watched("runs", lambda: fail(NotLeader("another leads")))()
    health.following()
    assert health.ready().good
    assert health.ready().details["passes"] == {}


@pytest.fixture
def server(health: Health) -> Iterator[HealthServer]:
    serving_one = HealthServer(health, host="127.0.0.1", port=0)
    serving_one.start()
    yield serving_one
    serving_one.stop()


def get(server: HealthServer | int, path: str, method: str = "GET") -> tuple[int, str, str]:
    port = server if isinstance(server, int) else server.port
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=240) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read().decode()


def test_probes_are_answered_with_what_is_wrong(server: HealthServer, health: Health) -> None:
    assert get(server, "/healthz")[:2] == (200, "application/json")
    code, _, body = get(server, "/readyz?verbose")
    assert code == 503
    assert json.loads(body) == {
        "status": "failed", "why": ["it is not known yet who leads"], "role": "starting", "passes": {},
    }  # fmt: skip
    health.following()
    code, _, body = get(server, "/readyz")
    assert (code, json.loads(body)["status"]) == (200, "ok")
    assert get(server, "/readyz", "HEAD")[::2] == (200, "")


def test_metrics_are_served_and_nothing_else(server: HealthServer) -> None:
    code, content_type, body = get(server, "/metrics")
    assert code == 200
    assert content_type.startswith("text/plain")
    assert "orca_infra_build_info{" in body
    assert "process_resident_memory_bytes" in body
    assert get(server, "/")[0] == 404
    assert get(server, "/healthz", "POST")[0] == 501


def test_clients_that_say_nothing_keep_no_others_from_their_answer(server: HealthServer) -> None:
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(7)]
    try:
        assert get(server, "/healthz")[0] == 200
    finally:
        for one in silent:
            one.close()


def test_a_port_that_is_taken_is_said(server: HealthServer, health: Health) -> None:
    with pytest.raises(SetupError, match=f"ORCA_HEALTH_PORT: port {server.port} on 127.0.0.1 cannot be opened"):
        HealthServer(health, host="127.0.0.1", port=server.port)
    with pytest.raises(SetupError, match="ORCA_HEALTH_PORT"):
        HealthServer(health, host="no.such.host.invalid", port=0)


def test_nothing_is_served_unless_a_port_is_set(health: Health, recorded: list[str]) -> None:
    before = threading.active_count()
    with serving(health, read_settings({"HOME": "/nowhere"}), Recorder(recorded)):
        assert threading.active_count() <= before
    port = free_port()
    settings = read_settings({"HOME": "/", "ORCA_HEALTH_PORT": str(port), "ORCA_HEALTH_HOST": "127.0.0.1"})
    with serving(health, settings, Recorder(recorded)):
        assert get(port, "/healthz")[0] == 200
    assert recorded == ["serving health and metrics"]


@pytest.fixture
def recorded() -> list[str]:
    return []


class Recorder(Log):
    def __init__(self, events: list[str]) -> None:
        self.events = events

    def info(self, event: str, **_particulars: object) -> None:
        self.events.append(event)

    warning = info
