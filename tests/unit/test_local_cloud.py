"""The make-believe cloud, with real processes in a folder of the test's own."""

from __future__ import annotations

import json
import os
import random
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from orca_infra.errors import AuthFailed, Conflict, NoCapacity, OrcaError, QuotaExceeded, Refused, Transient
from orca_infra.machines.model import MachineState, SeenMachine
from orca_infra.machines.providers.local_cloud import LocalCloud, MachineRequest
from orca_infra.machines.providers.local_machine import BOOT_SECONDS

SLEEP = ("/bin/sleep", "60")
CREATOR = """
import sys
from pathlib import Path
from orca_infra.machines.providers.local_cloud import LocalCloud, MachineRequest
cloud = LocalCloud(Path(sys.argv[1]))
request = MachineRequest(name=sys.argv[2], location="here", type="small", argv=("/bin/sleep", "60"))
print("ready", flush=True)
sys.stdin.readline()
try:
    cloud.create(request)
except Exception as error:
    print(error, flush=True)
else:
    print("made", flush=True)
"""


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[LocalCloud]:
    """A cloud without limits; its machines are ended afterwards."""
    made = LocalCloud(tmp_path / "cloud")
    made.configure({}, 0.0, {})
    yield made
    if made.folder.is_dir():
        (made.folder / "faults.json").unlink(missing_ok=True)
        for machine in made.list():
            made.delete(machine.name)
    wait_until(lambda: not sessions_in(tmp_path))  # a launcher that finds its machine gone is about to leave


def request(
    name: str = "m-1",
    *,
    location: str = "here",
    type: str = "small",
    argv: tuple[str, ...] = SLEEP,
    environment: Mapping[str, str] | None = None,
) -> MachineRequest:
    return MachineRequest(
        name=name, location=location, type=type, argv=argv, labels={"pool": "p"}, environment=environment or {}
    )


def sessions_in(folder: Path) -> list[int]:
    """The processes that work in this folder, as a machine's do."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and Path(os.readlink(entry / "cwd")).is_relative_to(folder):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def creator(cloud: LocalCloud, name: str) -> subprocess.Popen[str]:
    """A process that is about to make a machine, and does it when told to."""
    process = subprocess.Popen(
        [sys.executable, "-c", CREATOR, str(cloud.folder), name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def close(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


def wait_until(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that in time"
        time.sleep(0.01)


def prints(cloud: LocalCloud, name: str, text: str) -> Callable[[], bool]:
    return lambda: text in cloud.console(name)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def only(machines: list[SeenMachine]) -> SeenMachine:
    assert len(machines) == 1
    return machines[0]


def test_a_machine_boots_with_little_but_the_clouds_and_its_own_environment(
    cloud: LocalCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_CALLER", "x")
    cloud.configure({}, 0.0, {"ORCA_DB": "cloud's", "BOTH": "cloud's"})
    code = "import os, json; print(json.dumps(dict(os.environ)), flush=True); import time; time.sleep(60)"
    made = cloud.create(request(argv=("python", "-c", code), environment={"ORCA_TOKEN": "its own", "BOTH": "its own"}))
    wait_until(prints(cloud, "m-1", "}"))
    found = json.loads(cloud.console("m-1"))
    assert found["ORCA_DB"] == "cloud's"
    assert found["ORCA_TOKEN"] == found["BOTH"] == "its own"
    assert "OF_THE_CALLER" not in found
    assert cloud.get("m-1") == made == only(cloud.list())
    assert made.state is MachineState.RUNNING
    assert made.labels == {"pool": "p"}


def test_no_value_of_an_environment_is_in_argv_or_in_a_file_that_others_can_read(cloud: LocalCloud) -> None:
    cloud.configure({}, 0.0, {"ORCA_DB": "sesame-1"})
    wanted = request(environment={"ORCA_TOKEN": "sesame-2"})
    assert "sesame" not in repr(wanted)
    cloud.create(wanted)
    wait_until(lambda: bool(sessions_in(cloud.folder / "machines")))
    for pid in sessions_in(cloud.folder / "machines"):
        assert b"sesame" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    for path in (path for path in cloud.folder.rglob("*") if path.is_file()):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        assert b"sesame-2" not in path.read_bytes()
    with pytest.raises(Refused) as caught:
        cloud.create(request("m-2", environment={"ORCA_TOKEN": "sesame\0"}))
    assert "ORCA_TOKEN" in str(caught.value)
    assert "sesame" not in str(caught.value)


def test_a_location_has_what_it_is_configured_with(cloud: LocalCloud) -> None:
    cloud.configure({"here": {"small": 1}, "there": {}}, 0.0, {})
    cloud.create(request("m-1"))
    with pytest.raises(NoCapacity, match=r"^LOCATION_OUT_OF_CAPACITY: .*small.*here.*1 of 1"):
        cloud.create(request("m-2"))
    with pytest.raises(NoCapacity, match="^LOCATION_OUT_OF_CAPACITY: "):
        cloud.create(request("m-2", location="there"))
    with pytest.raises(NoCapacity, match="^LOCATION_OUT_OF_CAPACITY: "):
        cloud.create(request("m-2", type="large"))
    with pytest.raises(Refused, match="^INVALID_REQUEST: no such location: nowhere"):
        cloud.create(request("m-2", location="nowhere"))
    cloud.preempt("m-1")
    assert cloud.create(request("m-2")).name == "m-2"


@pytest.mark.parametrize("name", ["", "1a", "A", "a-", "a_b", "a" * 64, "../x", "a\n"])
def test_a_bad_name_is_refused(cloud: LocalCloud, name: str) -> None:
    with pytest.raises(Refused, match="^INVALID_REQUEST: "):
        cloud.create(request(name))
    with pytest.raises(Refused, match="^INVALID_REQUEST: "):
        cloud.delete(name)


def test_a_name_is_taken_once(cloud: LocalCloud) -> None:
    first = cloud.create(request("a" * 63))
    with pytest.raises(Conflict, match="^ALREADY_EXISTS: "):
        cloud.create(request("a" * 63))
    assert only(cloud.list()).uid == first.uid


def test_two_processes_that_want_the_last_machine_get_it_once(cloud: LocalCloud) -> None:
    for attempt in range(4):
        cloud.configure({"here": {"small": 1}}, 0.0, {})
        pair = [creator(cloud, f"m-{attempt}-{which}") for which in range(2)]
        for process in pair:
            go(process)
        answers = sorted(process.communicate()[0].strip() for process in pair)
        assert answers[0].startswith("LOCATION_OUT_OF_CAPACITY: ")
        assert answers[1] == "made"
        cloud.delete(only(cloud.list()).name)


def test_whenever_its_maker_is_killed_there_is_no_machine_or_one_that_can_be_removed(cloud: LocalCloud) -> None:
    seed = int(os.environ.get("ORCA_TEST_SEED", random.randrange(2**32)))
    print(f"ORCA_TEST_SEED={seed}")
    rng = random.Random(seed)
    cloud.configure({"here": {"small": 1}}, 0.05, {})
    process = creator(cloud, "m-1")
    began = time.monotonic()
    go(process)
    wait_until(lambda: bool(cloud.list()))
    making_seconds = time.monotonic() - began  # on this machine, at this moment
    process.communicate()
    cloud.delete("m-1")
    for attempt in range(20):
        process = creator(cloud, "m-1")
        go(process)
        if attempt == 0:  # as late as it may be
            wait_until(lambda: bool(cloud.list()))
        time.sleep(rng.uniform(0, 3 * making_seconds) if attempt % 4 else 0)
        process.kill()
        process.wait()
        close(process)
        seen = cloud.list()
        time.sleep(rng.choice([0, 0, 0.05, 0.2]))  # a launcher that comes up during, before or after the delete
        if seen:
            assert seen[0].state is MachineState.RUNNING
            cloud.delete("m-1", seen[0].uid)
        assert cloud.list() == []
    wait_until(lambda: not sessions_in(cloud.folder))
    assert cloud.create(request()).state is MachineState.RUNNING  # its capacity is free, its name too
    assert not list((cloud.folder / "machines").glob(".*"))


def test_a_record_without_a_process_counts_as_booting_and_then_as_stopped(cloud: LocalCloud) -> None:
    cloud.create(request())
    cloud.stop("m-1")
    folder = cloud.folder / "machines" / "m-1"
    (folder / "process.json").unlink(missing_ok=True)
    record = json.loads((folder / "record.json").read_text())
    for age, state in ((BOOT_SECONDS - 5, MachineState.RUNNING), (BOOT_SECONDS + 1, MachineState.STOPPED)):
        record |= {"state": "", "created_at": (datetime.now(UTC) - timedelta(seconds=age)).isoformat()}
        (folder / "record.json").write_text(json.dumps(record))
        assert only(cloud.list()).state is state
    cloud.delete("m-1")
    assert cloud.list() == []


def test_a_launcher_that_comes_after_the_delete_does_not_come_up(cloud: LocalCloud) -> None:
    for _ in range(5):
        cloud.create(request())
        cloud.delete("m-1")
        assert cloud.list() == []
    wait_until(lambda: not sessions_in(cloud.folder))


def test_delete_ends_the_whole_session_and_is_done_twice_gladly(cloud: LocalCloud) -> None:
    inner = "import subprocess; print('grandchild', subprocess.Popen(['/bin/sleep', '60']).pid, flush=True)"
    code = f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {inner!r}]); time.sleep(60)"
    cloud.create(request(argv=("python", "-c", code)))
    wait_until(prints(cloud, "m-1", "\n"))
    grandchild = int(cloud.console("m-1").split()[1])
    assert runs(grandchild)
    cloud.delete("m-1")
    assert not runs(grandchild)
    assert not sessions_in(cloud.folder)
    cloud.delete("m-1")
    assert cloud.get("m-1") is None
    assert cloud.console("m-1") == ""


def test_what_a_machine_whose_leader_died_left_running_goes_with_the_machine(cloud: LocalCloud) -> None:
    code = "import subprocess; print(subprocess.Popen(['/bin/sleep', '60']).pid, flush=True)"
    cloud.create(request(argv=("python", "-c", code)))
    wait_until(lambda: only(cloud.list()).state is MachineState.STOPPED)
    left = int(cloud.console("m-1"))
    assert runs(left)
    cloud.delete("m-1")
    assert not runs(left)


def test_delete_of_another_uid_does_nothing(cloud: LocalCloud) -> None:
    made = cloud.create(request())
    cloud.delete("m-1", "0" * 32)
    assert cloud.get("m-1") == made
    cloud.delete("m-1", made.uid)
    assert cloud.get("m-1") is None


def test_a_machine_whose_program_ended_is_stopped_and_its_console_stays(cloud: LocalCloud) -> None:
    cloud.create(request(argv=("python", "-c", "print('a' * 100); raise SystemExit('bad end')")))
    wait_until(lambda: only(cloud.list()).state is MachineState.STOPPED)
    assert "bad end\n" in cloud.console("m-1")
    assert len(cloud.console("m-1", 7)) == 7


def test_a_program_that_is_not_there_is_said_on_the_console(cloud: LocalCloud) -> None:
    cloud.create(request(argv=("no-such-program",)))
    wait_until(lambda: only(cloud.list()).state is MachineState.STOPPED)
    assert "no-such-program: No such file" in cloud.console("m-1")


@pytest.mark.parametrize("booted", [False, True])
def test_a_preempted_machine_is_listed_so_and_does_not_run(cloud: LocalCloud, booted: bool) -> None:
    cloud.create(request())
    if booted:
        wait_until(lambda: bool(sessions_in(cloud.folder / "machines")))
    cloud.preempt("m-1")
    assert only(cloud.list()).state is MachineState.PREEMPTED
    wait_until(lambda: not sessions_in(cloud.folder))
    with pytest.raises(Refused, match="no machine named m-2"):
        cloud.preempt("m-2")


def test_a_stopped_machine_is_listed_so(cloud: LocalCloud) -> None:
    cloud.create(request())
    cloud.stop("m-1")
    assert only(cloud.list()).state is MachineState.STOPPED
    wait_until(lambda: not sessions_in(cloud.folder))


def test_labels_can_be_changed_and_nothing_else_changes(cloud: LocalCloud) -> None:
    made = cloud.create(request())
    changed = cloud.relabel("m-1", {"other": "label"})
    assert changed.labels == {"other": "label"}
    assert (changed.uid, changed.created_at, changed.state) == (made.uid, made.created_at, made.state)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("LOCATION_OUT_OF_CAPACITY", NoCapacity),
        ("QUOTA_EXCEEDED", QuotaExceeded),
        ("INVALID_REQUEST", Refused),
        ("ALREADY_EXISTS", Conflict),
        ("PERMISSION_DENIED", AuthFailed),
        ("UNAVAILABLE", Transient),
    ],
)
def test_an_armed_fault_comes_once_with_its_meaning(cloud: LocalCloud, code: str, error: type[OrcaError]) -> None:
    cloud.arm("create", code, "as armed")
    with pytest.raises(error, match=f"^{code}: as armed$"):
        LocalCloud(cloud.folder).create(request())
    assert cloud.list() == []
    cloud.create(request())


def test_faults_keep_to_their_verb_location_and_number(cloud: LocalCloud) -> None:
    cloud.arm("create", "UNAVAILABLE", location="there", times=2)
    cloud.arm("list", "UNAVAILABLE")
    cloud.arm("delete", "UNAVAILABLE")
    cloud.arm("get", "PERMISSION_DENIED")
    cloud.create(request("m-1"))
    for _ in range(2):
        with pytest.raises(Transient):
            cloud.create(request("m-2", location="there"))
    cloud.create(request("m-2", location="there"))
    with pytest.raises(Transient):
        cloud.list()
    with pytest.raises(AuthFailed):
        cloud.get("m-1")
    with pytest.raises(Transient):
        cloud.delete("m-1")
    assert [seen.name for seen in cloud.list()] == ["m-1", "m-2"]
    assert not (cloud.folder / "faults.json").exists()
    with pytest.raises(Refused):
        cloud.arm("create", "NO_SUCH_CODE")


def test_an_answer_can_be_slow(cloud: LocalCloud) -> None:
    cloud.arm("list", "", seconds=0.3)
    began = time.monotonic()
    assert cloud.list() == []
    assert time.monotonic() - began >= 0.3


def test_a_create_answers_late_and_so_does_its_refusal(cloud: LocalCloud) -> None:
    cloud.configure({"here": {"small": 1}}, 0.3, {})
    for name, error in (("m-1", None), ("m-2", NoCapacity)):
        began = time.monotonic()
        if error is None:
            cloud.create(request(name))
        else:
            with pytest.raises(error):
                cloud.create(request(name))
        assert time.monotonic() - began >= 0.3


def test_a_missing_folder_is_a_fault_and_not_an_empty_cloud(tmp_path: Path) -> None:
    missing = LocalCloud(tmp_path / "nowhere")
    for call in (
        missing.list,
        lambda: missing.get("m-1"),
        lambda: missing.delete("m-1"),
        lambda: missing.create(request()),
    ):
        with pytest.raises(Transient, match="^UNAVAILABLE: .*nowhere"):
            call()
    assert not (tmp_path / "nowhere").exists()


def test_a_full_disk_leaves_no_machine(cloud: LocalCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(Transient, match="^UNAVAILABLE: .*No space left on device"):
        cloud.create(request())
    monkeypatch.undo()
    assert cloud.list() == []
    cloud.create(request())
    assert not list((cloud.folder / "machines").glob(".*"))


def test_a_maker_that_is_terminated_is_as_good_as_killed(cloud: LocalCloud) -> None:
    cloud.configure({}, 5.0, {})
    process = creator(cloud, "m-1")
    go(process)
    wait_until(lambda: bool(sessions_in(cloud.folder / "machines")))
    process.send_signal(signal.SIGTERM)
    process.wait()
    close(process)
    assert only(cloud.list()).state is MachineState.RUNNING
    cloud.delete("m-1")
    assert not sessions_in(cloud.folder)
