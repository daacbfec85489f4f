"""The layers of docs/architecture, by import-linter; and that a violation is noticed, tried on copies."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "orca_infra"
VIOLATIONS = {
    "decide reads the database": ("machines/decide.py", "from orca_infra.db.connection import Database"),
    "decide looks at the engine": ("machines/decide.py", "from orca_infra.stack.engine import Engine"),
    "decide logs": ("machines/decide.py", "import structlog"),
    "model validates": ("machines/model.py", "import pydantic"),
    "model knows decide": ("machines/model.py", "from orca_infra.machines import decide"),
    "decide reads": ("machines/decide.py", "from orca_infra.machines.observe import observe"),
    "an effect knows the loop": ("machines/apply.py", "from orca_infra.loop import passes"),
    "the loop knows the cli": ("loop/run.py", "from orca_infra import cli"),
}


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the contracts of pyproject.toml on the package in a folder."""
    return subprocess.run(
        [sys.executable, "-c", "import sys; from importlinter.cli import lint_imports_command as c; sys.exit(c())"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("layers")
    shutil.copytree(PACKAGE, folder / "orca_infra", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    yield folder
    shutil.rmtree(folder)


def test_every_layer_imports_only_what_is_below_it(copy: Path) -> None:
    result = lint(copy)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


@pytest.mark.parametrize("violation", VIOLATIONS)
def test_a_violation_is_noticed(copy: Path, violation: str) -> None:
    name, line = VIOLATIONS[violation]
    module = copy / "orca_infra" / name
    before = module.read_text(encoding="utf-8")
    module.write_text(f"{before}\n{line}\n", encoding="utf-8")
    try:
        result = lint(copy)
    finally:
        module.write_text(before, encoding="utf-8")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "BROKEN" in result.stdout
    assert f"orca_infra.{name.removesuffix('.py').replace('/', '.')}" in result.stdout


def test_decide_and_model_import_the_standard_library_alone() -> None:
    # In a fresh interpreter, by what is loaded in the end: a contract names only packages that somebody thought of.
    code = (
        "import sys; before = set(sys.modules); import orca_infra.machines.decide; "
        "print(*sorted({m.partition('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=240
    )
    assert result.stdout.split() == ["orca_infra"]
