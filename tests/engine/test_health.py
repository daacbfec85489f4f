"""Health and metrics of real loops, as processes of their own: one that leads, and one that follows."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orca_infra.testing.ports import free_port

pytestmark = pytest.mark.engine

Passes = Callable[..., Any]
StartLoop = Callable[..., subprocess.Popen[str]]
WaitUntil = Callable[..., None]


class Probe:
    """What a kubelet and a Prometheus get from one loop."""

    def __init__(self, port: int) -> None:
        self.port = port

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=20) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def ready_as(self, role: str) -> bool:
        code, body = self.get("/readyz")
        return code == 200 and json.loads(body)["role"] == role

    def sample(self, name: str) -> float | None:
        found = re.search(rf"^orca_infra_{re.escape(name)} (\S+)$", self.get("/metrics")[1], re.MULTILINE)
        return float(found[1]) if found else None


def test_a_leader_and_a_follower_say_what_they_are_and_what_they_did(
    passes: Passes, start_loop: StartLoop, wait_until: WaitUntil, home: Path
) -> None:
    w = passes()
    w.leader.release()
    ports = [free_port(), free_port()]
    leader, follower = (Probe(port) for port in ports)
    loops = []
    for probe, role in ((leader, "leader"), (follower, "follower")):
        loops.append(start_loop(ORCA_HEALTH_PORT=str(probe.port), ORCA_HEALTH_HOST="127.0.0.1"))
        wait_until(lambda p=probe, r=role: p.ready_as(r), 60, f"a {role} that is ready")
        assert probe.get("/healthz")[0] == 200
    assert (leader.sample("leader"), follower.sample("leader")) == (1, 0)

    w.queue()
    succeeded = "select from orca.runs where state = 'succeeded'"
    wait_until(lambda: w.rows(succeeded), 60, "the run's end")
    wait_until(lambda: leader.sample('pool_demand_runs{pool="p"}') == 0, 20, "no demand")
    assert leader.sample('machine_attempts_total{outcome="Made",pool="p"}') == 1
    assert leader.sample('engine_operations_total{kind="up",outcome="Done",scope="machines"}') == 1
    assert leader.sample('passes_total{outcome="changed",scope="machines"}') == 1
    phases = [
        leader.sample(f'pass_seconds_count{{phase="{one}",scope="machines"}}') for one in ("observe", "decide", "apply")
    ]
    assert all(count and count >= 2 for count in phases)
    assert (leader.sample("config_age_seconds") or -1) > 0
    # The follower knows nothing of what there is.
    assert follower.sample('pool_demand_runs{pool="p"}') is None
    assert follower.sample('passes_total{outcome="changed",scope="machines"}') is None

    good = (home / "orca.toml").read_text()
    (home / "orca.toml").write_text(good.replace("idle_seconds", "idle_sec"))
    wait_until(lambda: leader.sample("config_last_reload_successful") == 0, 20, "the bad orca.toml to be told")
    assert leader.ready_as("leader")
    (home / "orca.toml").write_text(good)
    wait_until(lambda: leader.sample("config_last_reload_successful") == 1, 20, "the good orca.toml to be told")

    loops[0].send_signal(signal.SIGTERM)
    assert loops[0].wait() == 0
    assert leader.get("/healthz")[0] == 0
    wait_until(lambda: follower.ready_as("leader"), 30, "the follower to lead")
    assert follower.sample("leader") == 1
    loops[1].send_signal(signal.SIGTERM)
    assert loops[1].wait() == 0


def test_a_port_that_is_taken_is_a_sentence_and_exit_code_2(start_loop: StartLoop, home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        loop = start_loop(ORCA_HEALTH_PORT=port, ORCA_HEALTH_HOST="127.0.0.1")
        assert loop.wait() == 2
    said = (home / "loop-1.log").read_text().splitlines()
    assert said[-1].startswith(f"orca-infra: ORCA_HEALTH_PORT: port {port} on 127.0.0.1 cannot be opened")
