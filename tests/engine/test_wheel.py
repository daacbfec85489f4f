"""The wheel in an empty environment: commands, migrations, definitions and policies are in it, and nothing of the checkout is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from orca_infra.db.connection import Database
from orca_infra.db.migrate import check_schema, migrations

pytestmark = pytest.mark.timeout(1200)

CHECKOUT = Path(__file__).parents[2]
Run = Callable[..., str]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment that has the wheel and what it asks for, as locked, and nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    sys.path.insert(0, str(CHECKOUT / "tools"))
    try:
        from setup import find_uv  # type: ignore[import-not-found]
    finally:
        sys.path.pop(0)
    uv = str(find_uv())
    environment = {**os.environ, "UV_PYTHON_DOWNLOADS": "never"}
    environment.pop("VIRTUAL_ENV", None)

    def run(*arguments: str) -> None:
        done = subprocess.run([uv, *arguments], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    run("build", "--wheel", "--out-dir", str(folder), str(CHECKOUT))
    locked = folder / "requirements.txt"
    project = ["--frozen", "--no-dev", "--no-emit-project", "--project", str(CHECKOUT)]
    run("export", "--quiet", *project, "--output-file", str(locked))
    run("venv", "--python", sys.executable, str(folder / "venv"))
    python = ["--python", str(folder / "venv" / "bin" / "python")]
    run("pip", "install", *python, "--require-hashes", "-r", str(locked))
    [wheel] = folder.glob("*.whl")
    run("pip", "install", *python, "--no-deps", str(wheel))
    return folder / "venv" / "bin"


@pytest.fixture
def run(installed: Path, tmp_path: Path) -> Run:
    """Runs a program of that environment, in a folder of its own."""

    def run_one(*command: str, code: int = 0, **variables: str) -> str:
        kept = {"PATH": f"{installed}:/usr/bin:/bin", "HOME": str(tmp_path), "LANG": "C.UTF-8"}
        done = subprocess.run(
            [str(installed / command[0]), *command[1:]],
            cwd=tmp_path,
            env={**kept, **variables},
            capture_output=True,
            text=True,
            check=False,
            timeout=800,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run_one


def test_its_commands_run_without_the_checkout(run: Run, tmp_path: Path, installed: Path) -> None:
    assert run("orca-infra", "--version").startswith("orca-infra ")
    where = run("python", "-c", "import orca_infra; print(orca_infra.__file__)")
    assert where.startswith(str(installed.parent))
    (tmp_path / "orca.toml").write_text((CHECKOUT / "stacks" / "orca.toml").read_text())
    assert "good; 1 pool" in run("orca-infra", "check", "orca.toml")
    assert "drain" in run("orca-infra", "--help")
    found = json.loads(run("orca-infra", "doctor", "--json", code=1, ORCA_HOME=str(tmp_path / "home")))
    assert "pulumi-resource-orca" in json.dumps(found)
    said = run("orca-infra", "run", code=2, ORCA_DB="postgresql://localhost:1/none", ORCA_HOME=str(tmp_path / "home"))
    assert "Traceback" not in said


def test_its_migrations_make_the_schema(run: Run, empty_database_url: str, tmp_path: Path) -> None:
    said = run(
        "orca-infra", "db", "migrate", "--standalone", ORCA_DB=empty_database_url, ORCA_HOME=str(tmp_path / "home")
    )
    assert all(f"applied {migration.name}" in said for migration in migrations())
    database = Database(empty_database_url)
    check_schema(database)
    database.close()


def test_it_has_the_runtime_pools_definitions_and_the_policy_pack(run: Run) -> None:
    crds = "from orca_infra.runtimes.crds import runtime_pool_crd as p, runtime_environment_crd as e"
    assert "runtime-pools" in run("python", "-c", f"{crds}; print(p()['metadata']['name'], e()['metadata']['name'])")
    pack = "from orca_infra.policy.folder import pack_folder; print(sorted(p.name for p in pack_folder().iterdir()))"
    assert "PulumiPolicy.yaml" in run("python", "-c", pack)
    # The language host of the engine and the base's program are importable, which is all that a project's __main__.py needs.
    assert run("python", "-c", "from orca_infra.stack.base import main; print(main.__name__)").strip() == "main"
