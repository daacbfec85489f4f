"""A test cluster's folder, port, access files and processes, without the cluster."""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orca_infra.errors import SetupError
from orca_infra.process import is_alive
from orca_infra.testing import cluster_files
from orca_infra.testing.cluster_files import OwnedFolder, authority_of, kubeconfig, remove_leftovers
from orca_infra.testing.cluster_process import ServerProcess, Starter, find_program
from orca_infra.testing.ports import reserve_port

MAKE_AND_SLEEP = """
import sys, time
from pathlib import Path
from orca_infra.testing.cluster_files import OwnedFolder
print(OwnedFolder.make(Path(sys.argv[1])).path, flush=True)
time.sleep(60)
"""


def test_the_folder_of_a_living_owner_stays_and_that_of_a_killed_one_goes(tmp_path: Path) -> None:
    ours = OwnedFolder.make(tmp_path)
    with subprocess.Popen([sys.executable, "-c", MAKE_AND_SLEEP, tmp_path], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            theirs = Path(other.stdout.readline().strip())
            assert remove_leftovers(tmp_path) == []
        finally:
            other.kill()
    assert remove_leftovers(tmp_path) == [theirs]
    assert [*tmp_path.iterdir()] == [ours.path]
    ours.remove()
    assert [*tmp_path.iterdir()] == []


def test_a_folder_without_a_lock_goes_only_when_nobody_can_be_making_it(tmp_path: Path) -> None:
    folder = tmp_path / f"{cluster_files.PREFIX}half"
    folder.mkdir()
    assert remove_leftovers(tmp_path) == []
    long_ago = time.time() - 3600
    os.utime(folder, (long_ago, long_ago))
    assert remove_leftovers(tmp_path) == [folder]


def test_other_folders_are_never_touched(tmp_path: Path) -> None:
    other = tmp_path / "another"
    other.mkdir()
    os.utime(other, (0, 0))
    assert remove_leftovers(tmp_path) == []
    assert other.exists()


def test_what_still_runs_in_a_left_folder_is_ended_and_what_only_reads_in_it_is_not(tmp_path: Path) -> None:
    folder = OwnedFolder.make(tmp_path)
    os.close(folder.lock)
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    with (
        subprocess.Popen([*sleeper, f"--data-dir={folder.path}/etcd"]) as left,
        subprocess.Popen([*sleeper, f"{folder.path}/etcd.log"]) as reader,
    ):
        try:
            # The first look at a new process can come before its exec.
            deadline = time.monotonic() + 120
            while b"--data-dir" not in Path(f"/proc/{left.pid}/cmdline").read_bytes() and time.monotonic() < deadline:
                time.sleep(0.01)
            assert remove_leftovers(tmp_path) == [folder.path]
            assert left.wait() == -signal.SIGKILL
            assert reader.poll() is None
        finally:
            left.kill()
            reader.kill()


def test_a_reserved_port_refuses_clients_and_is_given_only_to_who_shares() -> None:
    with reserve_port() as reserved, reserve_port() as second:
        address = reserved.getsockname()
        assert address != second.getsockname()
        with socket.socket() as client:
            assert client.connect_ex(address) == errno.ECONNREFUSED
        with socket.socket() as other, pytest.raises(OSError):
            other.bind(address)
        with socket.socket() as server, socket.socket() as client:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            server.bind(address)
            server.listen()
            assert client.connect_ex(address) == 0


def test_the_authority_is_the_last_certificate(tmp_path: Path) -> None:
    def certificate(text: str) -> str:
        return f"-----BEGIN CERTIFICATE-----\n{text}\n-----END CERTIFICATE-----\n"

    chain = tmp_path / "chain.crt"
    chain.write_text(certificate("server") + certificate("authority"))
    assert authority_of(chain) == certificate("authority")
    chain.write_text("")
    with pytest.raises(SetupError, match=r"chain\.crt holds no certificate"):
        authority_of(chain)


def test_a_kubeconfig_needs_no_other_file() -> None:
    read = json.loads(kubeconfig("https://127.0.0.1:1", "a token", "an authority"))
    cluster = read["clusters"][0]["cluster"]
    assert cluster["server"] == "https://127.0.0.1:1"
    assert base64.b64decode(cluster["certificate-authority-data"]) == b"an authority"
    assert read["users"][0]["user"] == {"token": "a token"}


def test_a_private_file_is_its_owners_alone(tmp_path: Path) -> None:
    cluster_files.write_private(tmp_path / "f", "text")
    assert (tmp_path / "f").read_text() == "text"
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o600


def test_the_kubebuilder_assets_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "etcd"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path))
    assert find_program("etcd") == program


def test_a_missing_program_is_named_with_the_command_that_gets_it() -> None:
    with pytest.raises(SetupError, match=r"'no-such-program' was not found; .*build\.py no-such-program"):
        find_program("no-such-program")


@pytest.fixture
def starter() -> Iterator[Starter]:
    starter = Starter()
    yield starter
    starter.close()


def wait_for_end(process: ServerProcess) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        process.check()
        time.sleep(0.01)


def test_a_process_that_ended_is_reported_with_the_last_lines_of_its_log(starter: Starter, tmp_path: Path) -> None:
    process = ServerProcess("p", ["sh", "-c", "seq 20; echo why >&2; exit 3"], tmp_path)
    process.start(starter)
    with pytest.raises(SetupError) as error:
        wait_for_end(process)
    assert str(error.value) == "p ended by itself (code 3); its last words:\n16\n17\n18\n19\n20\nwhy"


def test_a_program_that_cannot_be_started_is_reported(
    starter: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)  # without setpriv it is started as it is
    with pytest.raises(SetupError, match="p could not be started from /no/such/program: No such file"):
        ServerProcess("p", ["/no/such/program"], tmp_path).start(starter)


def test_a_process_gets_nothing_of_the_callers_environment(
    starter: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", "of the caller")
    process = ServerProcess("p", ["env"], tmp_path)
    process.start(starter)
    with contextlib.suppress(SetupError):
        wait_for_end(process)
    assert "SECRET" not in process.log.read_text()
    assert f"HOME={tmp_path}" in process.log.read_text()


def test_the_cpu_time_of_earlier_lives_counts(starter: Starter, tmp_path: Path) -> None:
    process = ServerProcess("p", ["sh", "-c", "while :; do :; done"], tmp_path)
    process.start(starter)
    first = process.identity()
    assert first is not None
    while process.cpu_seconds() < 0.05:
        time.sleep(0.01)
    process.kill()
    assert not is_alive(first)
    assert process.identity() is None
    used = process.cpu_seconds()
    assert used >= 0.05
    process.start(starter)
    assert process.identity() != first
    assert process.cpu_seconds() >= used
    process.kill()


def test_processes_end_with_their_starter(tmp_path: Path) -> None:
    starter = Starter()
    process = ServerProcess("p", ["sleep", "60"], tmp_path)
    process.start(starter)
    identity = process.identity()
    assert identity is not None
    deadline = time.monotonic() + 120
    while Path(f"/proc/{identity.pid}/comm").read_text() != "sleep\n":  # setpriv is past its prctl
        assert time.monotonic() < deadline
        time.sleep(0.01)
    starter.close()
    with pytest.raises(SetupError, match="p ended by itself"):
        wait_for_end(process)
