"""`pulumi up` of the base with a pool on Google Cloud, and `pulumi preview` of its machines, as a person runs them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orca_infra.errors import SetupError
from orca_infra.loop.passes import configure_providers
from orca_infra.loop.run import Loop
from orca_infra.machines.tokens import worker_token
from orca_infra.stack.engine import engine_environment
from orca_infra.stack.tools import require_tool
from orca_infra.testing.fake_gcp import PROJECT

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

Gcp = Callable[..., Any]
Toml = Callable[..., str]
#: A rule that is broken fails the command.
POLICIES = ("--policy-pack", str(Path(__file__).parents[2] / "policies"))
PROGRAM = "from orca_infra.stack.base import main\nmain()\n"


@pytest.fixture
def pulumi(home: Path, database_url: str) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs pulumi in a project of its own with a world's state; fails the test when it fails."""
    project = home / "project"
    project.mkdir()
    (project / "Pulumi.yaml").write_text("name: orca-infra\nruntime: python\n")
    (project / "__main__.py").write_text(PROGRAM)

    def run(w: Any, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "ORCA_STACK": "test",
            "ORCA_HOME": str(home),
            "ORCA_DB": database_url,
            "ORCA_CONFIG": str(home / "orca.toml"),
            "ORCA_TOKEN_KEY": w.surroundings.token_key.decode(),
            **engine_environment(w.surroundings.engine),
            "PULUMI_HOME": str(home / "pulumi"),
        }
        done = subprocess.run(
            [str(require_tool("pulumi")), "--non-interactive", *arguments],
            cwd=project,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return run


def test_the_base_makes_what_machines_need_and_a_second_up_changes_nothing(
    gcp: Gcp, toml: Toml, home: Path, pulumi: Callable[..., Any]
) -> None:
    w = gcp()
    (home / "orca.toml").write_text(toml())
    pulumi(w, "stack", "init", "test")
    pulumi(w, "up", "--yes", "--skip-preview", "--stack", "test", *POLICIES)
    made = w.cloud.others
    name = f"orca-{w.surroundings.stack_id}"
    assert list(made["gcp:compute/network:Network"]) == [name]
    [subnetwork] = made["gcp:compute/subnetwork:Subnetwork"].values()
    assert (subnetwork["name"], subnetwork["region"]) == (name, "us-central1")
    [account] = made["gcp:serviceaccount/account:Account"].values()
    assert account["accountId"] == name
    assert "compute.googleapis.com" in str(made["gcp:projects/service:Service"])
    said = pulumi(w, "up", "--yes", "--skip-preview", "--stack", "test").stdout
    assert "unchanged" in said
    assert "created" not in said

    # A machine is declared to be in that network, under that account.
    w.queue()
    w.run_pass()
    body = w.cloud.named("orca-p-1").body
    assert body["networkInterfaces"][0]["subnetwork"].endswith(f"/{name}")
    assert body["serviceAccounts"][0]["email"].startswith(f"{name}@")

    # The preview of its machines shows no difference, and no token.
    said = pulumi(w, "preview", "--diff", "--stack", w.stack, *POLICIES)
    token = worker_token(w.surroundings.token_key, w.surroundings.stack_id, "orca-p-1")
    assert token not in said.stdout + said.stderr
    assert "1 unchanged" in said.stdout or "unchanged" in said.stdout


def test_a_mistake_in_the_file_is_one_sentence(gcp: Gcp, home: Path, pulumi: Callable[..., Any]) -> None:
    w = gcp()
    (home / "orca.toml").write_text("[gcp]\n")
    pulumi(w, "stack", "init", "test")
    said = pulumi(w, "up", "--yes", "--skip-preview", "--stack", "test", code=1)
    assert "[gcp] project: missing" in said.stdout + said.stderr
    assert "Traceback" not in said.stdout + said.stderr
    assert w.engine.state("test").resources == ()  # nothing half-made


def test_the_project_is_kept_from_the_first_up_on_and_another_is_refused_by_program_and_loop(
    gcp: Gcp, toml: Toml, home: Path, pulumi: Callable[..., Any]
) -> None:
    w = gcp()
    other = toml().replace(f'project = "{PROJECT}"', 'project = "another-project"')
    pulumi(w, "stack", "init", "test")
    (home / "orca.toml").write_text(other)
    pulumi(w, "preview", "--stack", "test")
    assert w.count("orca.cloud_identity") == 0  # a look keeps nothing
    (home / "orca.toml").write_text(toml())
    pulumi(w, "up", "--yes", "--skip-preview", "--stack", "test")
    assert [row["account"] for row in w.rows("select account from orca.cloud_identity")] == [PROJECT]

    made = json.dumps(w.cloud.others)
    (home / "orca.toml").write_text(other)
    for command in (["preview"], ["up", "--yes", "--skip-preview"]):
        said = pulumi(w, *command, "--stack", "test", code=1)
        assert f"this stack's machines on gcp are in {PROJECT}" in said.stdout + said.stderr
        assert "Traceback" not in said.stdout + said.stderr
    assert json.dumps(w.cloud.others) == made

    with pytest.raises(SetupError, match="orca.toml says another-project: set it back"):
        Loop(w.surroundings, w.log)
    w.cloud.calls.clear()
    w.passes._providers = lambda config: configure_providers(config, w.surroundings)
    w.configure(other)
    w.queue()
    assert w.run_pass().changed == 0
    [row] = w.rows("select message from orca.pool_status where pool = 'p'")
    assert "orca.toml says another-project: set it back" in row["message"]
    assert (w.cloud.calls, w.operations()) == ([], [])
    w.configure(toml())
    w.queue(0)
    assert w.run_pass().changed == 1
