"""The whole loop as a process of its own, for tests on the real engine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def start_loop(
    home: Path, database_url: str, surroundings: Callable[..., Any]
) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `orca-infra run` with the surroundings' variables; ended by the test, or here."""
    started: list[subprocess.Popen[str]] = []
    program = shutil.which("orca-infra", path=str(Path(sys.executable).parent))
    assert program is not None

    def start(*arguments: str, state: str = "file", **more: str) -> subprocess.Popen[str]:
        opened = surroundings(state, **more)  # makes cloud and home as the loop will find them
        log = home / f"loop-{len(started) + 1}.log"
        variables = {**os.environ, "ORCA_LOG": "json", **_environment_of(opened, home, database_url), **more}
        started.append(
            subprocess.Popen(
                [program, "run", *arguments],
                env=variables,
                cwd=home,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=open(log, "w"),  # noqa: SIM115  (the loop's; a pipe would stop it once it is full)
                text=True,
                start_new_session=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
    for log in sorted(home.glob("loop-*.log")):
        print(f"--- {log.name}\n{log.read_text()}")  # pytest shows it when the test failed


@pytest.fixture
def product(home: Path, database_url: str, surroundings: Callable[..., Any]) -> Callable[..., Any]:
    """Runs an `orca-infra` command with the surroundings' variables to its end: `product("run", "--once")`."""
    program = shutil.which("orca-infra", path=str(Path(sys.executable).parent))
    assert program is not None

    def run(*arguments: str, state: str = "file", **more: str) -> subprocess.CompletedProcess[str]:
        variables = {**os.environ, **_environment_of(surroundings(state, **more), home, database_url), **more}
        command = [program, *arguments]
        return subprocess.run(
            command, env=variables, cwd=home, capture_output=True, text=True, timeout=120, check=False
        )

    return run


def _environment_of(opened: Any, home: Path, database_url: str) -> dict[str, str]:
    settings = opened.settings
    values = {
        "ORCA_STACK": settings.stack,
        "ORCA_HOME": str(home),
        "ORCA_DB": database_url,
        "ORCA_CONFIG": str(home / "orca.toml"),
        "ORCA_TOKEN_KEY": settings.token_key.decode(),
        "PULUMI_CONFIG_PASSPHRASE_FILE": str(settings.passphrase_file),
        "ORCA_POOL_GROW_AFTER": f"{settings.grow_after_seconds:g}",
        "ORCA_POOL_TRY_SECONDS": f"{settings.try_seconds:g}",
        "ORCA_POOL_SCALE_SECONDS": f"{settings.scale_seconds:g}",
        "ORCA_HEARTBEAT_SECONDS": f"{settings.heartbeat_seconds:g}",
        "ORCA_STRAY_GRACE_SECONDS": f"{settings.stray_grace_seconds:g}",
    }
    if settings.backend_url:
        values["PULUMI_BACKEND_URL"] = settings.backend_url
    return values
