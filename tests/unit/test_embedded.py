"""db/embedded.py, what needs no server."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

from orca_infra.db import embedded
from orca_infra.errors import SetupError


def test_the_librarys_lock_is_this_users_own_and_temporary_files_are_where_they_were() -> None:
    """It is one for the whole machine, and where root made it, nobody else can open it."""
    before = tempfile.gettempdir()
    lock = embedded._library().PostgresServer.lock_path
    assert lock.parent == Path(before) / f"orca-infra-{os.getuid()}"
    assert tempfile.gettempdir() == before


def test_a_folder_of_another_user_in_its_place_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
    monkeypatch.delitem(sys.modules, "grpc", raising=False)  # another test's; with it, a fresh process is who starts it
    with pytest.raises(SetupError, match="orca-infra-4000000 belongs to another user"):
        embedded._start(tmp_path / "home" / "postgres")  # here, also where gRPC is loaded


@pytest.mark.parametrize("odd", [" ", "$", "'", '"', ";", "&"])
def test_a_path_that_a_shell_would_read_otherwise_is_refused_in_a_sentence(tmp_path: Path, odd: str) -> None:
    with pytest.raises(SetupError, match=r"cannot be in .*: there is .* in the path; set ORCA_HOME to another folder"):
        embedded.start(tmp_path / f"my{odd}home" / "postgres")
    assert list(tmp_path.iterdir()) == []
