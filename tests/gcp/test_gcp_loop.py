"""The whole program on Google Cloud: `orca-infra run` as a process, with `[gcp]` in its orca.toml, real workers, and SIGKILL."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orca_infra.process import is_alive
from orca_infra.testing.fake_gcp import Fault

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

A, B = "us-central1-a", "us-central1-b"
Gcp = Callable[..., Any]
Toml = Callable[..., str]
Start = Callable[..., subprocess.Popen[bytes]]
WaitUntil = Callable[..., None]


@pytest.fixture
def start(home: Path, database_url: str) -> Iterator[Start]:
    """Starts a program of this checkout with a world's variables; ended by the test, or here."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(arguments: list[str], **variables: str) -> subprocess.Popen[bytes]:
        program = shutil.which(arguments[0], path=str(Path(sys.executable).parent))
        assert program is not None
        log = home / f"process-{len(started) + 1}.log"
        with open(log, "wb") as output:
            process = subprocess.Popen(
                [program, *arguments[1:]],
                env={**os.environ, **variables},
                cwd=home,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    for log in sorted(home.glob("process-*.log")):
        print(f"--- {log.name}\n{log.read_text(errors='replace')}")  # pytest shows it when the test failed


def variables(home: Path, database_url: str) -> dict[str, str]:
    return {
        "ORCA_STACK": "test",
        "ORCA_HOME": str(home),
        "ORCA_DB": database_url,
        "ORCA_CONFIG": str(home / "orca.toml"),
        "ORCA_TOKEN_KEY": "a key of the tests, 32 bytes long",
        "ORCA_LOG": "json",
        "ORCA_POOL_GROW_AFTER": "0",
        "ORCA_POOL_TRY_SECONDS": "0.01",
        "ORCA_POOL_SCALE_SECONDS": "0.3",
        "ORCA_HEARTBEAT_SECONDS": "0.5",
        "ORCA_STRAY_GRACE_SECONDS": "1",
        "PULUMI_CONFIG_PASSPHRASE_FILE": str(home / "passphrase"),
        "PULUMI_BACKEND_URL": f"file://{home / 'state'}",
    }


def boot_environment(w: Any, name: str) -> dict[str, str]:
    """What the machine's own script gives its worker."""
    script = w.boot_script(name)
    lines = script.partition("<<'ORCA_END'\n")[2].partition("\nORCA_END\n")[0].splitlines()
    return dict(line.partition("=")[::2] for line in lines)


def test_the_demos_story_a_stock_out_a_machine_a_run_idleness_and_nothing_left(
    gcp: Gcp, toml: Toml, start: Start, wait_until: WaitUntil, home: Path, database_url: str
) -> None:
    w = gcp()
    w.leader.release()
    w.cloud.capacity[A, "e2-small"] = 0
    (home / "orca.toml").write_text(toml(idle='"2s"'))
    start(["orca-infra", "run"], **variables(home, database_url))
    w.queue()
    wait_until(lambda: w.reasons() == {"orca-p-1": "NoCapacity", "orca-p-2": None}, 60, "the machine in the next zone")
    wait_until(lambda: w.machine("orca-p-2")["confirmed_at"], 60, "its confirmation")
    assert w.cloud.named("orca-p-2").zone == B
    found = boot_environment(w, "orca-p-2")
    assert set(found) == {"ORCA_WORKER", "ORCA_POOL", "ORCA_TOKEN"}
    worker = start(["python", "-m", "orca_infra.machines.worker"], ORCA_DB=database_url, **found)
    wait_until(lambda: w.rows("select from orca.runs where state = 'succeeded'"), 60, "the run's end")
    wait_until(lambda: w.reasons()["orca-p-2"] == "Idle", 90, "the machine's end")
    assert w.listed() == []
    assert worker.wait() == 0  # its token is revoked


def test_a_loop_killed_in_a_slow_create_that_lists_hide_is_followed_by_one_that_converges(
    gcp: Gcp, toml: Toml, start: Start, wait_until: WaitUntil, home: Path, database_url: str
) -> None:
    """Field case M3, with the loop itself killed by SIGKILL."""
    w = gcp()
    w.leader.release()
    w.cloud.list_lag_seconds = 2
    w.cloud.arm("insert", Fault(seconds=3600))
    (home / "orca.toml").write_text(toml())
    w.queue()
    loop = start(["orca-infra", "run"], **variables(home, database_url))
    engine = w.engine_at("insert")
    loop.kill()
    loop.wait()
    w.cloud.hurry()
    start(["orca-infra", "run"], **variables(home, database_url))
    wait_until(lambda: not is_alive(engine), 30, "the engine's end")

    def converged() -> bool:
        living = w.living()
        return len(living) == 1 and w.listed() == living and bool(w.machine(living[0])["confirmed_at"])

    wait_until(converged, 90, "one machine, wanted and confirmed")
    assert set(w.reasons().values()) <= {None, "Interrupted"}


def test_a_pool_on_google_cloud_is_seen_by_the_commands(
    gcp: Gcp, toml: Toml, start: Start, home: Path, database_url: str
) -> None:
    w = gcp()
    w.leader.release()
    (home / "orca.toml").write_text(toml())
    w.cloud.plant("orca-p-7", labels={"orca-stack": w.surroundings.stack_id, "orca-pool": "p"})
    w.cloud.consoles["orca-p-7"] = "the kernel says hello\n"
    found = {**variables(home, database_url), "ORCA_STRAY_GRACE_SECONDS": "0.01"}
    assert start(["orca-infra", "strays"], **found).wait() == 0
    assert "orca-p-7" in (home / "process-1.log").read_text()
