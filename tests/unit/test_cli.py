"""The command line: what a user has to mend is one sentence and exit code 2, never a traceback. Nothing here has a server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import typer.main

from orca_infra import __version__, cli
from orca_infra.cli import program
from orca_infra.cli.command import print_json
from orca_infra.errors import NoCapacity, SetupError, Transient
from orca_infra.quantity import duration_text
from orca_infra.screen import rows_for_people
from orca_infra.stack import tools

ROOT = Path(__file__).parents[2]
GOOD = """
[pools.gpu]
provider = "local"
image = "registry.example/worker:1"
max_machines = 2
idle_seconds = 600
types = [{ type = "small", wait = "5m", locations = ["east", "west"] }, { type = "large", spot = true, locations = ["east"] }]

[pools.empty]
provider = "local"
image = "registry.example/worker:1"
max_machines = 0
idle_seconds = 600
types = [{ type = "small", locations = ["east"] }]
"""
#: Nobody listens on port 1; the password must not be shown.
AWAY = "postgresql://orca:s3cr3t@127.0.0.1:1/orca"
COMMANDS_WITH_DATABASE = ["plan", "run", "run --once", "status", "status --json", "strays", "strays delete", "env"]


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """The one line on standard error, of a program that said nothing else."""
        assert self.out == ""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("orca-infra: ")
        return lines[0].removeprefix("orca-infra: ")


Run = Callable[..., Said]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs the console script in this process, in an empty folder, with no setting but those given."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith(("ORCA_", "PULUMI_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("ORCA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "120")

    def run_one(*arguments: str, **environment: str) -> Said:
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            patch.setattr(sys, "argv", ["orca-infra", *arguments])
            code = 0
            try:
                cli.main()
            except SystemExit as leave:
                code = int(leave.code or 0)
            return Said(code, *capfd.readouterr())

    return run_one


@pytest.fixture
def complete(tmp_path: Path) -> dict[str, str]:
    """All that a database of one's own needs beside it."""
    (tmp_path / "passphrase").write_text("a passphrase")
    return {
        "ORCA_DB": AWAY,
        "PULUMI_CONFIG_PASSPHRASE_FILE": str(tmp_path / "passphrase"),
        "ORCA_TOKEN_KEY": "0123456789abcdef",
    }


def test_the_version(run: Run) -> None:
    assert run("--version") == Said(0, f"orca-infra {__version__}\n", "")


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_the_help_lists_every_command(run: Run, flag: str) -> None:
    said = run(flag)
    assert said.code == 0
    for command in ("check", "doctor", "env", "plan", "run", "status", "strays", "db", "demo"):
        assert f" {command} " in said.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [("db", ("migrate", "stop")), ("strays", ("delete",)), ("run", ("--once",)), ("db migrate", ("--standalone",))],
)
def test_the_help_of_a_command_says_what_it_takes(run: Run, arguments: str, words: tuple[str, ...]) -> None:
    said = run(*arguments.split(), "--help")
    assert said.code == 0
    assert all(word in said.out for word in words)


def test_check_says_what_a_good_file_declares(run: Run, tmp_path: Path) -> None:
    (tmp_path / "orca.toml").write_text(GOOD)
    said = run("check")
    assert said == Said(
        0,
        "orca.toml: good; 2 pools\n"
        f"  gpu (local, at most 2): small in east, west for {duration_text(300)}, then large (spot) in east\n"
        "  empty (local, at most 0): small in east\n",
        "",
    )
    assert not (tmp_path / "home").exists(), "check makes nothing"


def test_check_takes_a_file_by_argument_or_by_setting(run: Run, tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text("[pools]\n")
    assert run("check", "other.toml").out == "other.toml: good; 0 pools\n"
    assert run("check", ORCA_CONFIG="other.toml").out == "other.toml: good; 0 pools\n"


def test_the_example_configuration_is_good(run: Run) -> None:
    assert run("check", str(ROOT / "stacks" / "orca.toml")).code == 0


def test_a_missing_file(run: Run) -> None:
    said = run("check")
    assert said.code == 2
    assert said.sentence == "orca.toml: no such file; write it, or name another with ORCA_CONFIG"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[pools.gpu\n", "orca.toml:1: is not TOML"),
        (
            "[pools.gpu]\nidle_sec = 3\n" + GOOD.partition("]")[2].partition("[pools.empty]")[0],
            "did you mean idle_seconds",
        ),
        (GOOD.replace("max_machines = 2", 'max_machines = "two"'), "must be a whole number"),
        ("", "says nothing"),
        ("\x00", "is not TOML"),
    ],
    ids=["toml", "key", "value", "empty", "nul"],
)
def test_a_broken_file(run: Run, tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "orca.toml").write_text(text)
    said = run("check")
    assert said.code == 2
    assert words in said.err
    assert said.err.startswith("orca-infra: orca.toml")
    assert "Traceback" not in said.err
    assert said.out == ""


def test_a_folder_is_no_file(run: Run, tmp_path: Path) -> None:
    said = run("check", str(tmp_path))
    assert said.code == 2
    assert str(tmp_path) in said.sentence


@pytest.mark.parametrize("command", ["check", "check good.toml", "status", "run", "db migrate", "db stop"])
def test_a_bad_setting_is_named(run: Run, tmp_path: Path, command: str) -> None:
    (tmp_path / "good.toml").write_text(GOOD)
    said = run(*command.split(), ORCA_POOL_LOST_MAX="many")
    assert said.code == 2
    assert said.sentence == "ORCA_POOL_LOST_MAX=many: must be a whole number from 0 to 999999"
    assert not (tmp_path / "home").exists()


def test_a_misspelt_setting_is_warned_of_and_no_more(run: Run, tmp_path: Path) -> None:
    (tmp_path / "orca.toml").write_text(GOOD)
    said = run("check", ORCA_POOL_SCALE_SECOND="5")
    assert said.code == 0
    assert (
        said.err
        == "warning: ORCA_POOL_SCALE_SECOND is not a setting and has no effect; did you mean ORCA_POOL_SCALE_SECONDS?\n"
    )


@pytest.mark.parametrize("command", [*COMMANDS_WITH_DATABASE, "db migrate", "db migrate --standalone"])
def test_a_database_that_cannot_be_reached(run: Run, complete: dict[str, str], command: str) -> None:
    said = run(*command.split(), **complete)
    assert said.code == 2
    assert said.sentence.startswith("the database orca on 127.0.0.1:1 cannot be reached: ")
    assert said.sentence.endswith("mend ORCA_DB, or unset it to use the embedded Postgres")
    assert "s3cr3t" not in said.err


@pytest.mark.parametrize("url", ["nonsense", "postgresql://u:s3cr3t@[/x", "host=127.0.0.1 prot=1 password=s3cr3t"])
def test_a_database_that_is_no_connection_string(run: Run, complete: dict[str, str], url: str) -> None:
    said = run("status", **{**complete, "ORCA_DB": url})
    assert said.code == 2
    assert "ORCA_DB" in said.sentence
    assert "s3cr3t" not in said.err


@pytest.mark.parametrize("command", ["env", "run", "run --once", "drain --all"])
@pytest.mark.parametrize("name", ["PULUMI_CONFIG_PASSPHRASE_FILE", "ORCA_TOKEN_KEY"])
def test_with_a_database_of_ones_own_no_secret_is_made_up(
    run: Run, complete: dict[str, str], tmp_path: Path, command: str, name: str
) -> None:
    said = run(*command.split(), **{**complete, name: ""})
    assert said.code == 2
    assert said.sentence.startswith(f"{name} is not set: ")
    assert "openssl rand -hex 32" in said.sentence
    assert not list((tmp_path / "home").glob("*")), "nothing is half-made"


def test_what_only_looks_needs_neither_passphrase_nor_token_key(run: Run, complete: dict[str, str]) -> None:
    without = {**complete, "PULUMI_CONFIG_PASSPHRASE_FILE": "", "ORCA_TOKEN_KEY": ""}
    for command in ("status", "plan", "explain", "machines list", "runs list", "pause", "resume", "strays"):
        assert "the database orca on 127.0.0.1:1 cannot be reached" in run(*command.split(), **without).sentence, (
            command
        )


def test_a_passphrase_file_that_is_not_there_or_empty(run: Run, complete: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for name in ("missing", "empty"):
        said = run("env", **{**complete, "PULUMI_CONFIG_PASSPHRASE_FILE": str(tmp_path / name)})
        assert said.code == 2
        assert said.sentence == f"PULUMI_CONFIG_PASSPHRASE_FILE names {tmp_path / name}, which is missing or empty"


def test_a_token_key_that_is_too_short_is_not_shown(run: Run, complete: dict[str, str]) -> None:
    said = run("status", **{**complete, "ORCA_TOKEN_KEY": "s3cr3t"})
    assert said.code == 2
    assert said.sentence.startswith("ORCA_TOKEN_KEY must have at least 16 bytes")
    assert "s3cr3t" not in said.err


def test_a_home_that_cannot_be_made(run: Run) -> None:
    said = run("status", ORCA_HOME="/proc/no/such")
    assert said.code == 2
    assert said.sentence.startswith("the folder /proc/no/such cannot be made")


def test_somebody_elses_database_is_not_stopped(run: Run, complete: dict[str, str]) -> None:
    said = run("db", "stop", **complete)
    assert said.code == 2
    assert said.sentence == "ORCA_DB is set: that database is not this program's to stop"


def test_an_embedded_database_that_does_not_run_is_not_started_to_be_stopped(run: Run, tmp_path: Path) -> None:
    assert run("db", "stop") == Said(0, "it was not running\n", "")
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("arguments", ["nonsense", "db nonsense", "strays nonsense", "run --twice", "status surplus"])
def test_an_unknown_command_or_option_is_refused(run: Run, arguments: str) -> None:
    said = run(*arguments.split())
    assert said.code == 2
    assert "Traceback" not in said.err
    assert said.out == ""


@pytest.mark.parametrize(
    ("error", "code"), [(SetupError("mend it"), 2), (Transient("mend it"), 1), (NoCapacity("mend it"), 1)], ids=str
)
def test_exit_codes_tell_what_the_user_has_to_mend_from_what_did_not_work_out(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(program, "open_for_command", fail)
    said = run("status")
    assert (said.code, said.sentence) == (code, "mend it")


def test_ctrl_c_is_130_without_a_word(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "open_for_command", interrupt)
    said = run("status")
    assert said.code == 130
    assert "Traceback" not in said.err


def test_what_an_error_quotes_does_not_act_on_the_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise Transient("the cloud said \x1b[2J\x07\r\udc80 [red]no[/]")

    monkeypatch.setattr(program, "open_for_command", fail)
    assert run("status").sentence == "the cloud said ?[2J??? [red]no[/]"


def test_an_orca_toml_that_is_a_pipe_is_not_waited_for(run: Run, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "orca.toml")
    said = run("check")
    assert said.code == 2
    assert said.sentence == "orca.toml: is a pipe or a device; write it to a file, and name that"


def test_a_file_name_that_is_no_text_can_be_checked(run: Run, tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff.toml")
    Path(path).write_text("[pools]\n")
    assert run("check", path).out.endswith("/bad?.toml: good; 0 pools\n")


@pytest.mark.parametrize(
    "how", [["-m", "orca_infra.cli"], [str(Path(sys.executable).parent / "orca-infra")]], ids=["-m", "script"]
)
def test_the_program_itself_says_one_sentence_and_leaves(tmp_path: Path, how: list[str]) -> None:
    command = [sys.executable, *how] if how[0] == "-m" else how
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    result = subprocess.run(
        [*command, "check"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "orca-infra: orca.toml: no such file; write it, or name another with ORCA_CONFIG\n"
    assert not list(tmp_path.iterdir())


def test_a_reader_that_leaves_early_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "orca.toml").write_text(GOOD)
    reading, writing = os.pipe()
    os.close(reading)
    try:
        result = subprocess.run(
            [sys.executable, "-u", "-m", "orca_infra.cli", "check"],
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=240,
        )
    finally:
        os.close(writing)
    assert result.returncode == 1
    assert result.stderr == ""


def _commands() -> dict[str, Any]:
    """Every command that does something by itself, with its whole name."""

    def below(group: Any, name: str) -> Iterator[tuple[str, Any]]:
        for word, command in group.commands.items():
            if hasattr(command, "commands"):
                yield from below(command, f"{name} {word}")
            if not hasattr(command, "commands") or command.invoke_without_command:
                yield f"{name} {word}", command

    return dict(below(typer.main.get_command(cli.app), "orca-infra"))


@pytest.mark.parametrize("name", sorted(_commands()))
def test_every_command_has_an_example_that_calls_it(name: str) -> None:
    command = _commands()[name]
    if hasattr(command, "commands"):  # its help is the group's
        return
    examples = [line.strip() for line in (command.help or "").splitlines() if line.strip().startswith("Example: ")]
    assert examples, "its help shows no example"
    assert all(f"{name.removeprefix('orca-infra ')}" in example for example in examples)


def test_check_for_programs(run: Run, tmp_path: Path) -> None:
    (tmp_path / "orca.toml").write_text(GOOD)
    said = json.loads(run("check", "--json").out)
    assert [pool["name"] for pool in said["pools"]] == ["gpu", "empty"]
    assert said["pools"][0]["types"][0]["wait_seconds"] == 300


def test_doctor_for_programs(run: Run) -> None:
    found = json.loads(run("doctor", "--json", ORCA_CONFIG="missing.toml").out)
    assert {"orca-infra", "pulumi"} <= {one["what"] for one in found}
    assert any("missing.toml" in one["found"] for one in found)


def test_doctor_says_that_the_embedded_database_cannot_be_made(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = json.loads(run("doctor", "--json", ORCA_HOME=str(tmp_path / "file" / "home")).out)
    [database] = [one for one in found if one["what"] == "database"]
    assert database["found"].endswith(f"{tmp_path / 'file'} cannot be written")
    assert database["remedy"] == "set ORCA_HOME to a folder that can be written"


def test_what_is_not_pulumis_is_not_had_from_its_vendor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "_CHECKOUT", tmp_path)  # as where the wheel is installed
    assert "its vendor" in tools.remedy("pulumi-language-python")
    assert "`make tools` builds it" in tools.remedy("etcd")


def test_doctor_looks_for_the_provider_of_each_cloud_that_is_used(run: Run, tmp_path: Path) -> None:
    of_gcp = (
        GOOD.replace('"local"', '"gcp"')
        .replace('"east", "west"', '"europe-west1-b"')
        .replace('"east"', '"europe-west1-b"')
    )
    (tmp_path / "orca.toml").write_text(f'[gcp]\nproject = "a-project-1"\n{of_gcp}')
    looked = {"ORCA_RUNTIMES_NAMESPACE": "r", "KUBECONFIG": str(tmp_path / "none"), "PATH": "/nowhere"}
    plugin = tmp_path / "pulumi/plugins/resource-gcp-v9.1.0/pulumi-resource-gcp"
    for is_there in (False, True):
        found = json.loads(run("doctor", "--json", PULUMI_HOME=str(tmp_path / "pulumi"), **looked).out)
        of_cloud = {one["what"]: one for one in found if one["what"].startswith("pulumi-resource-")}
        assert "pulumi-resource-kubernetes" in of_cloud
        assert of_cloud["pulumi-resource-gcp"]["found"] == (str(plugin) if is_there else "not found")
        plugin.parent.mkdir(parents=True, exist_ok=True)
        plugin.touch(mode=0o755)


def test_pool_names_are_completed(run: Run, tmp_path: Path) -> None:
    (tmp_path / "orca.toml").write_text(GOOD)
    asked = {"_ORCA_INFRA_COMPLETE": "complete_bash", "COMP_CWORD": "2"}
    assert run(**asked, COMP_WORDS="orca-infra pause g").out.split() == ["gpu"]
    assert run(**asked, COMP_WORDS="orca-infra pause x").out.split() == []
    (tmp_path / "orca.toml").write_text("[pools")
    assert run(**asked, COMP_WORDS="orca-infra pause g") == Said(0, "\n", "")


def test_a_table_in_a_pipe_keeps_its_lines_whole(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    rows_for_people(("machine", "why"), [("orca-gpu-1", "a long sentence " * 12)], "")
    assert len(capfd.readouterr().out.splitlines()) == 2


def test_the_form_of_the_log_is_checked(run: Run, tmp_path: Path) -> None:
    (tmp_path / "orca.toml").write_text(GOOD)
    said = run("check", ORCA_LOG="yaml")
    assert said.code == 2
    assert said.sentence.startswith("ORCA_LOG=yaml: must be json or text")


def test_check_refuses_what_the_policies_do_not_allow(run: Run, tmp_path: Path) -> None:
    (tmp_path / "orca.toml").write_text(GOOD)
    policies = tmp_path / "policies.json"
    policies.write_text('{"machine-types": {"allowed": ["small"]}, "machine-counts": {"mostPerPool": 1}}')
    said = run("check", ORCA_POLICY_CONFIG=str(policies))
    assert said.code == 2
    assert said.err.splitlines() == [
        "orca-infra: orca.toml: pool gpu: machine-types allows small, and not large",
        "orca.toml: pool gpu: machine-counts allows 1 machines, and max_machines is 2",
    ]
    policies.write_text('{"machine-types": {"alowed": ["small"]}}')
    assert run("check", ORCA_POLICY_CONFIG=str(policies)).sentence.startswith(
        f"ORCA_POLICY_CONFIG={policies}: 'alowed' is no key of machine-types"
    )
    policies.write_text('{"machine-types": {"allowed": ["*"]}}')
    assert run("check", ORCA_POLICY_CONFIG=str(policies)).code == 0


def test_times_for_programs_are_iso_8601(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"at": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)})
    assert json.loads(capsys.readouterr().out) == {"at": "2026-01-02T03:04:05+00:00"}


def test_a_command_starts_without_what_only_others_need() -> None:
    heavy = [
        "google",
        "grpc",
        "lightkube",
        "prometheus_client",
        "psycopg",
        "pulumi",
        "rich.console",
        "starlette",
        "urllib3",
    ]
    code = f"import sys, orca_infra.cli; print(*[name for name in {heavy!r} if name in sys.modules])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert said.stdout.split() == []


def test_output_that_cannot_be_written_is_a_sentence() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "orca_infra.cli", "--version"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (
        1,
        "orca-infra: no space is left on the device where the output goes",
    )


def test_an_output_that_is_closed_or_in_an_old_encoding_is_no_traceback(tmp_path: Path) -> None:
    pool = {"provider": '"local"', "image": '"r.example/w:1"', "locations": '["east"]', "max_machines": "1"}
    pool |= {"idle_seconds": "1", "types": '[{type = "small", price_per_hour = 1}]'}
    (tmp_path / "orca.toml").write_text("[pools.p]\n" + "".join(f"{key} = {value}\n" for key, value in pool.items()))
    preview = [sys.executable, "-m", "orca_infra.cli", "preview", "--demand=none", "--no-stacks", "--before=orca.toml"]
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "PYTHONIOENCODING": "ascii"}
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", *preview]
    for command, said in ((preview, b"stack dev\n  Machines an hour, at most: 1.00 ? 1.00\n"), (closed, b"")):
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False, timeout=240)
        assert (done.returncode, done.stdout, done.stderr) == (0, said, b"")


def test_a_loop_loads_beforehand_all_that_its_first_engine_operation_needs() -> None:
    code = (
        "import sys; from orca_infra.stack.program import load, serve; load(); before = set(sys.modules)\n"
        "with serve(lambda _: None): print(*sorted(set(sys.modules) - before))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert [name for name in said.stdout.split() if not name.startswith("grpc.")] == []
