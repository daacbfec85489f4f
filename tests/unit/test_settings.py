import dataclasses
import os
import re
import types
import typing
from pathlib import Path
from typing import get_type_hints

import pytest

from orca_infra.allowed import Allowed
from orca_infra.config import Config
from orca_infra.errors import SettingError
from orca_infra.machines.model import Limits
from orca_infra.machines.providers.local_config import LocalCloud
from orca_infra.policy.configuration import PolicyFile
from orca_infra.settings import SETTINGS, Settings, read_settings, unknown_settings

POLICIES = Path(__file__).parents[1] / "data" / "policies.json"
HOME = {"HOME": "/home/jane"}
KEY = "0123456789abcdef"
EVERY = {
    "ORCA_STACK": "prod",
    "ORCA_CONFIG": "/etc/orca.toml",
    "ORCA_DB": "postgresql://u:hidden@db/orca",
    "ORCA_HOME": "/var/lib/orca",
    "ORCA_TOKEN_KEY": KEY,
    "PULUMI_BACKEND_URL": "postgres://u:hidden@db/state",
    "PULUMI_CONFIG_PASSPHRASE_FILE": "/run/secrets/passphrase",
    "ORCA_POOL_SCALE_SECONDS": "1",
    "ORCA_RUNS_SCALE_SECONDS": "2",
    "ORCA_RUNTIMES_SCALE_SECONDS": "3",
    "ORCA_PASS_SECONDS": "1h",
    "ORCA_POOL_GROW_AFTER": "0",
    "ORCA_POOL_TRY_SECONDS": "2m",
    "ORCA_POOL_BOOT_SECONDS": "1h",
    "ORCA_POOL_IMAGE_SECONDS": "60",
    "ORCA_HEARTBEAT_SECONDS": "5",
    "ORCA_POOL_LOST_SECONDS": "15",
    "ORCA_POOL_LOST_MAX": "0",
    "ORCA_STRAY_GRACE_SECONDS": "90",
    "ORCA_STRAY_MAX": "7",
    "ORCA_ENGINE_SECONDS": "10m",
    "ORCA_ENGINE_PARALLEL": "3",
    "ORCA_DRIFT": "report",
    "ORCA_DRIFT_SECONDS": "2h",
    "ORCA_ENDED_ROW_SECONDS": "1d",
    "ORCA_RUNNER": "kubernetes",
    "ORCA_RUNS_NAMESPACE": "runs",
    "ORCA_RUNTIMES_NAMESPACE": "runtimes",
    "ORCA_RUNTIMES_START_SECONDS": "90",
    "ORCA_RUNTIMES_PULL_SECONDS": "30",
    "ORCA_RUNTIMES_BACKOFF_SECONDS": "5",
    "ORCA_RUNTIMES_BACKOFF_MOST_SECONDS": "1m",
    "ORCA_RUNTIMES_ABANDONED_SECONDS": "2m",
    "ORCA_RUNTIMES_NODE_LOST_SECONDS": "30",
    "ORCA_RUNTIMES_BIRTHS_MAX": "50",
    "ORCA_RUNTIMES_TOKENS": "/run/secrets/tokens",
    "ORCA_RUNTIMES_AUDIENCE": "orca",
    "ORCA_RUNTIMES_LAUNCHERS": "hub, system:serviceaccount:a:b",
    "KUBECONFIG": "/etc/kubeconfig",
    "ORCA_RUN_BINARY": "/opt/orca",
    "ORCA_RUN_SECRET": "db",
    "ORCA_RUN_ENV": "ORCA_SCHEDULER_URL, TZ",
    "ORCA_RUN_NON_ROOT": "true",
    "ORCA_RUN_DEADLINE": "1h",
    "ORCA_RUN_START_SECONDS": "60",
    "ORCA_RUN_TTL_SECONDS": "5m",
    "ORCA_RUN_LOG_SECONDS": "20",
    "ORCA_RUN_LOG_MIB": "8",
    "ORCA_RUN_LOG_KEPT_SECONDS": "90d",
    "DISTA_PORT": "6391",
    "ORCA_DRIVER_CPU": "1",
    "ORCA_HEAD_CPU": "0.1",
    "ORCA_WORKER_CPU": "1500m",
    "ORCA_POD_MEMORY": "1Gi",
    "ORCA_VCPU_BUDGET": "64",
    "ORCA_LOGS": "/var/log/orca",
    "ORCA_POLICY_CONFIG": str(POLICIES),
    "ORCA_LOG": "json",
    "ORCA_RECORD_PASSES": "50",
    "ORCA_RECORD_SECONDS": "1d",
    "ORCA_HEALTH_PORT": "8080",
    "ORCA_HEALTH_HOST": "::",
}


def refusal(environ: dict[str, str]) -> str:
    with pytest.raises(SettingError) as caught:
        read_settings({**HOME, **environ})
    return str(caught.value)


def test_an_empty_environment_gives_the_defaults() -> None:
    assert read_settings(HOME, as_root=False) == Settings(
        stack="dev",
        config_path=Path("orca.toml"),
        db=None,
        home=Path("/home/jane/.local/share/orca-infra/dev"),
        token_key=None,
        backend_url=None,
        passphrase_file=None,
        scale_seconds=15,
        runs_scale_seconds=5,
        runtimes_scale_seconds=15,
        pass_seconds=1800,
        grow_after_seconds=20,
        try_seconds=60,
        boot_seconds=900,
        image_seconds=600,
        heartbeat_seconds=10,
        lost_seconds=300,
        lost_max=3,
        stray_grace_seconds=60,
        stray_max=20,
        engine_seconds=900,
        engine_parallel=len(os.sched_getaffinity(0)),
        drift_is_reported=False,
        drift_seconds=3600,
        ended_row_seconds=30 * 86400,
        runner=None,
        runs_namespace="orca-runs",
        runtimes_namespace=None,
        runtimes_start_seconds=600,
        runtimes_pull_seconds=60,
        runtimes_backoff_seconds=10,
        runtimes_backoff_most_seconds=300,
        runtimes_abandoned_seconds=300,
        runtimes_node_lost_seconds=60,
        runtimes_births_max=1000,
        runtimes_tokens=None,
        runtimes_audience=None,
        runtimes_launchers=(),
        kubeconfig=None,
        run_binary="orca",
        run_secret="orca-db",
        run_environment_names=(),
        run_non_root=False,
        run_deadline_seconds=86400,
        run_start_seconds=600,
        run_ttl_seconds=600,
        run_log_seconds=60,
        run_log_mib=1024,
        run_log_kept_seconds=None,
        dista_port=6390,
        driver_cpu="500m",
        head_cpu="250m",
        worker_cpu="1",
        pod_memory="512Mi",
        vcpu_budget=None,
        logs=None,
        policies=None,
        log_form=None,
        record_passes=1000,
        record_seconds=7 * 86400,
        health_port=None,
        health_host="0.0.0.0",
    )


def test_every_setting_is_read_from_its_variable() -> None:
    assert set(EVERY) == {setting.name for setting in SETTINGS}
    assert read_settings(EVERY) == Settings(
        stack="prod",
        config_path=Path("/etc/orca.toml"),
        db="postgresql://u:hidden@db/orca",
        home=Path("/var/lib/orca"),
        token_key=KEY.encode(),
        backend_url="postgres://u:hidden@db/state",
        passphrase_file=Path("/run/secrets/passphrase"),
        scale_seconds=1,
        runs_scale_seconds=2,
        runtimes_scale_seconds=3,
        pass_seconds=3600,
        grow_after_seconds=0,
        try_seconds=120,
        boot_seconds=3600,
        image_seconds=60,
        heartbeat_seconds=5,
        lost_seconds=15,
        lost_max=0,
        stray_grace_seconds=90,
        stray_max=7,
        engine_seconds=600,
        engine_parallel=3,
        drift_is_reported=True,
        drift_seconds=7200,
        ended_row_seconds=86400,
        runner="kubernetes",
        runs_namespace="runs",
        runtimes_namespace="runtimes",
        runtimes_start_seconds=90,
        runtimes_pull_seconds=30,
        runtimes_backoff_seconds=5,
        runtimes_backoff_most_seconds=60,
        runtimes_abandoned_seconds=120,
        runtimes_node_lost_seconds=30,
        runtimes_births_max=50,
        runtimes_tokens=Path("/run/secrets/tokens"),
        runtimes_audience="orca",
        runtimes_launchers=("hub", "system:serviceaccount:a:b"),
        kubeconfig=Path("/etc/kubeconfig"),
        run_binary="/opt/orca",
        run_secret="db",
        run_environment_names=("ORCA_SCHEDULER_URL", "TZ"),
        run_non_root=True,
        run_deadline_seconds=3600,
        run_start_seconds=60,
        run_ttl_seconds=300,
        run_log_seconds=20,
        run_log_mib=8,
        run_log_kept_seconds=90 * 86400.0,
        dista_port=6391,
        driver_cpu="1",
        head_cpu="0.1",
        worker_cpu="1500m",
        pod_memory="1Gi",
        vcpu_budget="64",
        logs=Path("/var/log/orca"),
        policies=PolicyFile(path=POLICIES, allowed=Allowed(types=("e2-*",), machines=20)),
        log_form="json",
        record_passes=50,
        record_seconds=86400,
        health_port=8080,
        health_host="::",
    )


def test_a_variable_set_to_nothing_counts_as_unset() -> None:
    assert read_settings({**HOME, **dict.fromkeys(EVERY, "")}) == read_settings(HOME)


def test_the_table_describes_each_field_once_with_a_value_of_its_type() -> None:
    hints = get_type_hints(Settings, localns={"Config": Config})
    assert [setting.field for setting in SETTINGS] == [field.name for field in dataclasses.fields(Settings)]
    for setting in SETTINGS:
        kind = typing.get_origin(hints[setting.field]) or hints[setting.field]
        assert isinstance(setting.read(EVERY[setting.name]), hints[setting.field] if kind is types.UnionType else kind)
        assert all([setting.meaning, setting.unit, setting.why, setting.unset]), setting.name
        assert setting.meaning.endswith(".")
        assert setting.unset.endswith(".")


def test_secrets_are_not_in_the_repr() -> None:
    shown = repr(read_settings(EVERY))
    assert "hidden" not in shown
    assert KEY not in shown
    secret = {setting.field for setting in SETTINGS if setting.secret}
    assert secret == {field.name for field in dataclasses.fields(Settings) if not field.repr}


@pytest.mark.parametrize(
    ("environ", "home"),
    [
        ({"XDG_DATA_HOME": "/data", "ORCA_STACK": "prod"}, "/data/orca-infra/prod"),
        ({"XDG_DATA_HOME": "relative"}, "/home/jane/.local/share/orca-infra/dev"),
        ({"XDG_DATA_HOME": ""}, "/home/jane/.local/share/orca-infra/dev"),
        ({"XDG_DATA_HOME": "/data", "ORCA_HOME": "/x"}, "/x"),
    ],
)
def test_the_home_folder_follows_the_xdg_base_directories(environ: dict[str, str], home: str) -> None:
    assert read_settings({**HOME, **environ}, as_root=False).home == Path(home)


def test_roots_home_folder_is_where_the_databases_own_user_gets_to() -> None:
    assert read_settings(HOME, as_root=True).home == Path("/var/lib/orca-infra/dev")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("ORCA_RUNNER", "docker", "must be kubernetes"),
        ("ORCA_RUNS_NAMESPACE", "Orca Runs", "must be a name as Kubernetes takes it"),
        ("ORCA_RUN_ENV", "A B", "must be names of variables"),
        ("ORCA_RUN_NON_ROOT", "1", "must be true or false"),
        ("ORCA_RUN_ENV", "TZ,DISTA_HEAD", "must not have DISTA_HEAD"),
        ("DISTA_PORT", "70000", "must be a port"),
        ("ORCA_DRIVER_CPU", "0", "must be more than 0"),
        ("ORCA_WORKER_CPU", "-1", "must be a CPU quantity"),
        ("ORCA_HEAD_CPU", "0.0001", "is finer than a thousandth"),
        ("ORCA_WORKER_CPU", "1E", "must be less than 1000000 cores"),
        ("ORCA_DRIVER_CPU", "nan", "must be a CPU quantity"),
        ("ORCA_POD_MEMORY", "512MB", "must be a memory quantity"),
        ("ORCA_POD_MEMORY", "0", "must be more than 0"),
        ("ORCA_POD_MEMORY", "-1Gi", "must be a memory quantity"),
        ("ORCA_POD_MEMORY", "0.5", "is finer than a byte"),
        ("ORCA_POD_MEMORY", "16E", "is more than Kubernetes can count"),
        ("ORCA_RUN_DEADLINE", "0.5", "must be whole seconds"),
        ("ORCA_RUN_DEADLINE", "2147483648", "must be whole seconds"),
        ("ORCA_RUN_TTL_SECONDS", "0", "must be whole seconds"),
        ("ORCA_VCPU_BUDGET", "many", "must be a CPU quantity"),
    ],
)
def test_a_value_for_run_clusters_that_cannot_be_is_refused_naming_the_variable(
    name: str, value: str, said: str
) -> None:
    with pytest.raises(SettingError, match=f"{name}={re.escape(value)}: {said}"):
        read_settings({**HOME, name: value})


def test_a_tilde_that_no_shell_replaced_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/jane")
    assert read_settings({"ORCA_HOME": "~/orca"}).home == Path("/home/jane/orca")
    assert read_settings({"ORCA_HOME": "/x", "ORCA_CONFIG": "~me.toml"}).config_path == Path("~me.toml")


@pytest.mark.parametrize("value", ["a.b", "a b", "a/b", "é", "x" * 41, "dev\n", "."])
def test_a_stack_family_that_would_not_name_stacks_is_refused(value: str) -> None:
    assert 'must be 1 to 40 letters, digits, "-" or "_"; a dot would split' in refusal({"ORCA_STACK": value})


HOW = "write seconds (90) or text such as 45s, 10m, 1h30m, 2d or 500ms"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ORCA_POOL_SCALE_SECONDS", "soon", f'ORCA_POOL_SCALE_SECONDS=soon: "soon" is not a duration; {HOW}'),
        ("ORCA_POOL_SCALE_SECONDS", "0", "ORCA_POOL_SCALE_SECONDS=0: must be more than 0"),
        ("ORCA_POOL_GROW_AFTER", "-1", f"ORCA_POOL_GROW_AFTER=-1: must not be negative; {HOW}"),
        ("ORCA_STRAY_MAX", "-1", "ORCA_STRAY_MAX=-1: must be a whole number from 0 to 999999"),
        ("ORCA_STRAY_MAX", "2.5", "ORCA_STRAY_MAX=2.5: must be a whole number from 0 to 999999"),
        ("ORCA_STRAY_MAX", "٣", "ORCA_STRAY_MAX=٣: must be a whole number from 0 to 999999"),
        ("ORCA_STRAY_MAX", "1\n\x1b", "ORCA_STRAY_MAX=1\\n\\x1b: must be a whole number from 0 to 999999"),
    ],
)
def test_a_wrong_value_is_refused_with_the_name_and_what_is_right(name: str, value: str, message: str) -> None:
    assert refusal({name: value}) == message


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ORCA_TOKEN_KEY", "hush", "ORCA_TOKEN_KEY must have at least 16 bytes"),
        ("ORCA_DB", "  ", "ORCA_DB must be a connection URL"),
        ("PULUMI_BACKEND_URL", "hush", "PULUMI_BACKEND_URL must be a URL such as"),
        ("PULUMI_BACKEND_URL", "postgresql://u:hush@h/x", "PULUMI_BACKEND_URL must be a URL such as postgres://"),
        ("PULUMI_BACKEND_URL", "ftp://hush", "PULUMI_BACKEND_URL must be a URL such as"),
    ],
)
def test_a_wrong_secret_is_refused_without_its_value(name: str, value: str, message: str) -> None:
    text = refusal({name: value})
    assert text.startswith(message)
    assert text.endswith("(its value is secret and not shown)")
    assert "hush" not in text


def test_a_token_key_keeps_the_very_bytes_of_the_environment() -> None:
    key = b"\xff" * 16
    assert read_settings({**HOME, "ORCA_TOKEN_KEY": key.decode("utf-8", "surrogateescape")}).token_key == key


def test_a_lost_time_under_three_heartbeats_is_refused() -> None:
    assert refusal({"ORCA_POOL_LOST_SECONDS": "29"}) == (
        "ORCA_POOL_LOST_SECONDS=29: must be at least three heartbeats, 30 seconds with "
        "ORCA_HEARTBEAT_SECONDS=10; a worker would be lost for one late heartbeat"
    )
    assert read_settings({**HOME, "ORCA_POOL_LOST_SECONDS": "30"}).lost_seconds == 30


def test_all_wrong_variables_are_reported_one_a_line() -> None:
    lines = refusal({"ORCA_STACK": "a.b", "ORCA_STRAY_MAX": "x", "ORCA_TOKEN_KEY": "short"}).split("\n")
    assert [line.replace("=", " ").split()[0] for line in lines] == ["ORCA_STACK", "ORCA_TOKEN_KEY", "ORCA_STRAY_MAX"]


def test_limits_join_the_settings_and_the_file() -> None:
    config = Config(pools=(), max_machines_total=9, local=LocalCloud())
    assert read_settings(EVERY).limits(config) == Limits(
        try_seconds=120,
        boot_seconds=3600,
        lost_seconds=15,
        stray_grace_seconds=90,
        stray_max=7,
        lost_max=0,
        max_machines_total=9,
        allowed=Allowed(types=("e2-*",), machines=20),
        puts_labels_back=False,
    )


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("ORCA_STCAK", "ORCA_STACK"),
        ("ORCA_STACKS", "ORCA_STACK"),
        ("orca_stack", "ORCA_STACK"),
        ("ORCA_POOL_TRY_SECOND", "ORCA_POOL_TRY_SECONDS"),
        ("ORCA_POOL_TRY", "ORCA_POOL_TRY_SECONDS"),
        ("ORCA_POOL_GROW_AFTER_SECONDS", "ORCA_POOL_GROW_AFTER"),
        ("ORCA_POOL_BOTO_SECNDS", "ORCA_POOL_BOOT_SECONDS"),
    ],
)
def test_a_misspelt_variable_is_named_with_the_right_one(name: str, near: str) -> None:
    assert unknown_settings({name: "1"}) == [f"{name} is not a setting and has no effect; did you mean {near}?"]


# Every other variable of docs and of orca itself: a warning about one of them would be wrong.
@pytest.mark.parametrize(
    "name",
    ["ORCA_RUNNER", "ORCA_RUNTIMES_NAMESPACE", "ORCA_RUNS_NAMESPACE", "ORCA_POOL_IMAGE_SECONDS", "ORCA_RUN_DEADLINE"]
    + ["ORCA_RUN_SECRET", "ORCA_RUN_ENV", "ORCA_DRIVER_CPU", "ORCA_HEAD_CPU", "ORCA_WORKER_CPU", "ORCA_POD_MEMORY"]
    + ["ORCA_VCPU_BUDGET", "ORCA_LOGS", "ORCA_RUN_START_SECONDS", "ORCA_HOST", "ORCA_PORT", "ORCA_UI", "ORCA_TOKEN"]
    + ["ORCA_ENGINE", "ORCA_URL", "HOME", "OTHER_STACK", *EVERY],
)
def test_variables_of_other_parts_are_left_alone(name: str) -> None:
    assert unknown_settings({name: "1"}) == []
