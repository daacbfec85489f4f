"""What a process works with, on a database of its owner's."""

from __future__ import annotations

from pathlib import Path

import pytest

from orca_infra.errors import SetupError
from orca_infra.settings import read_settings
from orca_infra.surroundings import open_surroundings

pytestmark = pytest.mark.postgres


def test_what_runs_no_engine_and_makes_no_machine_needs_neither_passphrase_nor_token_key(
    database_url: str, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    settings = read_settings({"ORCA_STACK": "test", "ORCA_DB": database_url, "ORCA_HOME": str(home)})
    opened = open_surroundings(settings, say=lambda _: None, with_passphrase=False, with_token_key=False)
    assert (opened.token_key, opened.settings.db) == (b"", database_url)
    opened.close()
    assert list(home.iterdir()) == [], "nothing is made up in their place"
    with pytest.raises(SetupError, match="PULUMI_CONFIG_PASSPHRASE_FILE is not set"):
        open_surroundings(settings, say=lambda _: None)
