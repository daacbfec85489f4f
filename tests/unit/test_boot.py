"""What a machine does when it comes up: the script is run for real, with stand-ins for docker, curl and systemctl."""

from __future__ import annotations

import base64
import json
import subprocess
from pathlib import Path

import pytest

from orca_infra.errors import Refused
from orca_infra.machines.boot import Boot, cloud_config, startup_script
from orca_infra.machines.providers.port import TOKEN_PLACEHOLDER

IMAGE = "us-docker.pkg.dev/p/orca/worker:1"


def boot(**more: object) -> Boot:
    return Boot(**{"image": IMAGE, "worker": "orca-p-1", "pool": "p", **more})  # type: ignore[arg-type]


class Machine:
    """A folder of stand-ins, first on the script's PATH; each call of one is a line of `calls`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.calls_path = folder / "calls"
        self.calls_path.touch()
        for name in ("docker", "curl", "systemctl", "sleep", "apt-get"):
            self.program(name, "")

    def program(self, name: str, body: str) -> None:
        path = self.bin / name
        path.write_text(f'#!/bin/bash\necho "{name} $*" >>{self.calls_path}\n{body}\n')
        path.chmod(0o755)

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": f"{self.bin}:/usr/bin:/bin", "ORCA_BOOT_FOLDER": str(self.folder / "run")}
        return subprocess.run(
            ["/bin/bash", "-c", script], env=environment, capture_output=True, text=True, timeout=240, check=False
        )

    @property
    def calls(self) -> list[str]:
        return self.calls_path.read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


# What the stand-in for docker does at each of its calls; the worker's ends come from a file.
DOCKER = """
case "$1" in
  login) cat >>{folder}/logins ;;
  pull) [ ! -e {folder}/pulls ] || { head -1 {folder}/pulls; code=$(head -1 {folder}/pulls); sed -i 1d {folder}/pulls; exit "${code:-0}"; } ;;
  run) cp "$HOME/worker.env" {folder}/seen.env; stat -c %a "$HOME/worker.env" >{folder}/mode
       code=$(head -1 {folder}/ends); sed -i 1d {folder}/ends; exit "${code:-0}" ;;
esac
"""
CURL = """
case "$*" in
  *metadata.google.internal*) echo '{"access_token":"ya29.machine","expires_in":3599}' ;;
  *secretmanager*) cat >{folder}/config; echo '{ "payload": {'; echo '"data": "{secret}" } }' ;;
esac
"""


def prepare(machine: Machine, *, ends: str = "0\n", pulls: str = "", secret: str = "") -> None:
    folder = str(machine.folder)
    (machine.folder / "ends").write_text(ends)
    (machine.folder / "pulls").write_text(pulls)
    machine.program("docker", DOCKER.replace("{folder}", folder))
    machine.program("curl", CURL.replace("{folder}", folder).replace("{secret}", secret))


def test_the_worker_runs_with_its_token_in_its_environment_and_its_end_powers_the_machine_off(machine: Machine) -> None:
    prepare(machine)
    token = "a" * 64
    done = machine.run(
        startup_script(boot(environment={"ORCA_HEAD": "10.0.0.3:7 $HOME `x` \"q\" 'r'"})).replace(
            TOKEN_PLACEHOLDER, token
        )
    )
    assert done.returncode == 0, done.stderr
    assert (machine.folder / "seen.env").read_text() == (
        f"ORCA_HEAD=10.0.0.3:7 $HOME `x` \"q\" 'r'\nORCA_WORKER=orca-p-1\nORCA_POOL=p\nORCA_TOKEN={token}\n"
    )
    assert (machine.folder / "mode").read_text() == "600\n"
    assert machine.calls[-1] == "systemctl poweroff"
    assert not (machine.folder / "run" / "worker.env").exists()
    assert not any(token in call for call in machine.calls)
    assert token not in done.stdout + done.stderr


def test_the_machines_account_logs_in_to_googles_registries_without_an_argument_that_has_its_token(
    machine: Machine,
) -> None:
    prepare(machine)
    machine.run(startup_script(boot()))
    assert (machine.folder / "logins").read_text() == "ya29.machine"
    assert "docker login -u oauth2accesstoken --password-stdin https://us-docker.pkg.dev" in machine.calls
    assert not any("ya29" in call for call in machine.calls)


def test_another_registry_gets_no_login(machine: Machine) -> None:
    prepare(machine)
    machine.run(startup_script(boot(image="registry.example/pkg.dev/worker:1")))
    assert not any("login" in call for call in machine.calls)
    assert "docker pull -q registry.example/pkg.dev/worker:1" in machine.calls


def test_a_pull_that_fails_is_said_and_tried_again(machine: Machine) -> None:
    prepare(machine, pulls="1\n1\n0\n")
    done = machine.run(startup_script(boot()))
    assert done.returncode == 0
    assert done.stdout.count("orca: pull failed; again in") == 2
    assert [call for call in machine.calls if call.startswith("sleep")] == ["sleep 2", "sleep 4"]


def test_a_worker_that_fails_is_started_again_and_only_a_good_end_powers_off(machine: Machine) -> None:
    prepare(machine, ends="1\n137\n0\n")
    done = machine.run(startup_script(boot()))
    assert "the worker ended with code 137" in done.stdout
    assert sum(call.startswith("docker run") for call in machine.calls) == 3
    assert sum(call == "systemctl poweroff" for call in machine.calls) == 1


def test_the_databases_url_comes_from_secret_manager_and_stands_in_no_argument(machine: Machine) -> None:
    url = "postgres://orca:pass word@10.0.0.5/orca?sslmode=require"
    prepare(machine, secret=base64.b64encode(url.encode()).decode())
    script = startup_script(boot(database_secret="projects/p/secrets/orca-db"))
    assert url not in script
    done = machine.run(script)
    assert done.returncode == 0, done.stderr
    assert f"ORCA_DB={url}\n" in (machine.folder / "seen.env").read_text()
    assert (machine.folder / "config").read_text() == 'header = "Authorization: Bearer ya29.machine"\n'
    asked = [call for call in machine.calls if "secretmanager" in call]
    assert asked == [
        "curl -sfm 20 -K - https://secretmanager.googleapis.com/v1/projects/p/secrets/orca-db/versions/latest:access"
    ]
    assert not any("pass word" in call or "ya29" in call for call in machine.calls)


def test_docker_is_installed_where_it_is_missing(machine: Machine) -> None:
    prepare(machine)
    docker = machine.bin / "docker"
    docker.rename(machine.folder / "docker")
    machine.program("apt-get", f'[ "$1" = install ] && cp {machine.folder}/docker {docker}; exit 0')
    script = startup_script(boot())
    done = machine.run(script) if not Path("/usr/bin/docker").exists() else None
    if done is not None:
        assert done.returncode == 0
        assert any(call.startswith("apt-get install -qy --no-install-recommends docker.io") for call in machine.calls)


@pytest.mark.parametrize(
    "image", ["x'; touch /tmp/orca-owned; '", "$(touch /tmp/orca-owned)", "a`touch /tmp/orca-owned`b"]
)
def test_no_image_name_is_run_as_a_command(machine: Machine, image: str) -> None:
    prepare(machine)
    machine.run(startup_script(boot(image=image, pool=image, worker=image)))
    assert not Path("/tmp/orca-owned").exists()
    assert any(call == f"docker pull -q {image}" for call in machine.calls)


def test_what_stands_in_the_image_is_not_filled_in_again() -> None:
    assert "@ENVIRONMENT@" in startup_script(boot(image="x/@ENVIRONMENT@"))


@pytest.mark.parametrize(
    "more",
    [
        {"environment": {"A B": "x"}},
        {"environment": {"A": "x\nORCA_TOKEN=y"}},
        {"environment": {"A": "x\0"}},
        {"database_secret": "orca-db"},
        {"database_secret": "projects/p/secrets/x$(id)"},
    ],
)
def test_what_cannot_stand_in_an_environment_is_refused(more: dict[str, object]) -> None:
    with pytest.raises(Refused):
        startup_script(boot(**more))


def test_the_cloud_config_writes_the_same_script_for_root_alone_and_starts_it() -> None:
    text = cloud_config(boot())
    head, _, rest = text.partition("\n")
    assert head == "#cloud-config"
    config = json.loads(rest)
    script, unit = config["write_files"]
    assert script["content"] == startup_script(boot())
    assert (script["path"], script["permissions"], script["owner"]) == ("/var/lib/orca/boot.sh", "0600", "root")
    assert f"ExecStart=/bin/bash {script['path']}" in unit["content"]
    assert "StandardOutput=journal+console" in unit["content"]
    assert config["runcmd"][-1] == ["systemctl", "start", "--no-block", "orca-worker.service"]
    assert text.count(TOKEN_PLACEHOLDER) == 1
    yaml = pytest.importorskip("yaml")
    assert yaml.safe_load(text) == config


@pytest.mark.parametrize("character", ["\U0001f600", "\x7f", "\x85", "\u2028", "\u00e9", "\x01"])
def test_the_cloud_config_is_yaml_whatever_the_environment_says(character: str) -> None:
    yaml = pytest.importorskip("yaml")
    read = yaml.safe_load(cloud_config(boot(environment={"GREETING": f"a{character}b"})))
    assert f"\nGREETING=a{character}b\n" in read["write_files"][0]["content"].encode().decode()
