"""What tests on a database share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orca_infra.cli import app
from orca_infra.db.connection import Database


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    opened = Database(database_url)
    yield opened
    opened.close()


@pytest.fixture
def environment(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of a command on that database; its home is `home` in `tmp_path`."""
    (tmp_path / "passphrase").write_text("x\n")
    values = {
        "ORCA_DB": database_url,
        "ORCA_HOME": str(tmp_path / "home"),
        "ORCA_CONFIG": str(tmp_path / "orca.toml"),
        "ORCA_TOKEN_KEY": "a key of the tests, 32 bytes long",
        "PULUMI_CONFIG_PASSPHRASE_FILE": str(tmp_path / "passphrase"),
        "PULUMI_BACKEND_URL": f"file://{tmp_path}",
        "COLUMNS": "400",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return values


@pytest.fixture
def command(environment: dict[str, str]) -> Callable[..., str]:
    """Runs `orca-infra` with these arguments, `environment` around it; gives what it prints. What it raises goes on."""

    def run(*arguments: str, code: int = 0, answer: str | None = None) -> str:
        result = CliRunner().invoke(app, list(arguments), input=answer, catch_exceptions=False)
        assert result.exit_code == code, result.output
        return result.output

    return run
