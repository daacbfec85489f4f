"""The machine pools with provider `gcp`: the real engine, Google's real client library, and a fake cloud behind both."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orca_infra.loop.passes import MachinePasses
from orca_infra.machines.providers.gcp import GcpProvider
from orca_infra.machines.providers.gcp_config import GcpCloud
from orca_infra.process import ProcessId, end_session
from orca_infra.testing.fake_gcp import PROJECT, FakeGcp, Instance
from orca_infra.testing.fake_gcp_http import serve
from orca_infra.testing.fake_gcp_plugin import install

A, B = "us-central1-a", "us-central1-b"


def gcp_toml(*, locations: str = f'["{A}", "{B}"]', more: str = "", spot: str = "false", idle: str = '"1h"') -> str:
    return f"""
[gcp]
project = "{PROJECT}"
[pools.p]
provider = "gcp"
image = "127.0.0.1:9/orca/worker:1"
locations = {locations}
max_machines = 50
max_booting = 50
idle_seconds = {idle}
types = [{{ type = "e2-small", spot = {spot} }}]
{more}
"""


class GcpWorld:
    """A world of tests/conftest.py whose machines are the fake cloud's; what it does not have itself is that world's."""

    def __init__(self, world: Any, cloud: FakeGcp, endpoint: str) -> None:
        self._world = world
        self.cloud = cloud
        self.provider = GcpProvider(GcpCloud(project=PROJECT), endpoint=endpoint)
        world.passes = MachinePasses(
            world.surroundings,
            world.engine,
            world.leader.verify,
            world.log,
            providers=lambda _: {"gcp": self.provider},
        )
        world.listed = cloud.names
        world.configure(gcp_toml())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)

    def queue(self, runs: int = 1) -> None:
        """Queue runs, at a time when the next try is due."""
        time.sleep(0.05)
        self._world.queue(runs)

    def hello(self, *names: str) -> None:
        """The workers of these machines show up, with the tokens that their machines have."""
        for name in names:
            token = token_of(self.cloud.named(name))
            self.execute("select orca.worker_hello(%(name)s::text, %(token)s::text, 1)", name=name, token=token)

    def boot_script(self, name: str) -> str:
        """The script that this machine runs, as it is on the machine."""
        return boot_script_of(self.cloud.named(name))

    def engine_at(self, verb: str) -> ProcessId:
        """Wait until the cloud is at what the engine's provider asked for; gives the engine's process."""
        wait_for(lambda: self.cloud.is_at(verb), f"nothing met the fault of {verb}")
        wait_for(lambda: self.operations() and self.operations()[-1]["pid"], "no engine was started")
        newest = self.operations()[-1]
        return ProcessId(newest["pid"], newest["process_started"])


def wait_for(predicate: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 240
    while not predicate():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def boot_script_of(instance: Instance) -> str:
    """The script that the machine runs."""
    user_data = instance.metadata["user-data"]
    assert user_data.startswith("#cloud-config\n")
    return str(json.loads(user_data.partition("\n")[2])["write_files"][0]["content"])


def token_of(instance: Instance) -> str:
    found = re.search(r"^ORCA_TOKEN=([0-9a-f]{64})$", boot_script_of(instance), re.MULTILINE)
    assert found
    return found[1]


@pytest.fixture
def gcp(
    passes: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., GcpWorld]]:
    """Makes a world with provider `gcp`: `gcp("postgres", ORCA_STRAY_MAX="2")`."""
    cloud = FakeGcp()
    with serve(cloud) as server:
        plugins = install(tmp_path / "plugins")
        monkeypatch.setenv("PATH", f"{plugins}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("GOOGLE_COMPUTE_CUSTOM_ENDPOINT", server.endpoint)
        yield lambda *args, **more: GcpWorld(passes(*args, **more), cloud, server.endpoint)


@pytest.fixture
def toml() -> Callable[..., str]:
    """Writes an orca.toml with a pool `p` on Google Cloud."""
    return gcp_toml


@pytest.fixture
def end_engine() -> Callable[[ProcessId], None]:
    """SIGKILL to an engine with all that belongs to it."""
    return lambda process: end_session(process, 0.1, signal.SIGKILL)
