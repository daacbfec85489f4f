"""Hostile input that needs no server to be met: bounded, said, and nothing else suffers."""

from __future__ import annotations

import io
import itertools
import json
import os
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from orca_infra.config import load_config, parse_config
from orca_infra.errors import ConfigError, Refused, SettingError, SetupError, Transient, UserError
from orca_infra.kube.decoding import DEPTH_MOST, decode
from orca_infra.log import make_log
from orca_infra.loop.configuration import LiveConfig
from orca_infra.machines.image_registry import RegistryArchitectures
from orca_infra.policy.configuration import parse_policies
from orca_infra.preview.demand import read_demand
from orca_infra.runs.decide import decide as decide_runs
from orca_infra.runs.limits import run_settings
from orca_infra.runs.logs import DriverLogs, driver_log
from orca_infra.runs.model import PodPhase, QueuedRun, RunLimits, RunSnapshot, Sizes
from orca_infra.runs.model import SeenObject as RunObject
from orca_infra.runs.observe import _told_apart
from orca_infra.runtimes.callers import Caller
from orca_infra.runtimes.crds import runtime_pool_crd
from orca_infra.runtimes.decide import decide
from orca_infra.runtimes.http import launch_request
from orca_infra.runtimes.launch import LaunchRequest, _checked
from orca_infra.runtimes.model import (
    BURNING_RATE_MAX,
    CULL_SECONDS_MAX,
    POOL_SIZE_MAX,
    Environment,
    PodRow,
    Pool,
    RuntimeLimits,
    RuntimeSnapshot,
    SeenObject,
)
from orca_infra.runtimes.observe import read_pool
from orca_infra.runtimes.render import render_warm
from orca_infra.runtimes.resources import amounts_of, size_of
from orca_infra.settings import read_settings
from orca_infra.stack.base_config import read_values

GOOD = """
[pools.p]
provider = "local"
image = "registry.example/orca-worker:1"
max_machines = 3
idle_seconds = "10m"
types = [{ type = "small", locations = ["a"] }]
"""
NOW = datetime(2026, 1, 1, tzinfo=UTC)
LIMITS = RuntimeLimits(stray_grace_seconds=60, stray_max=20, births_max=500)
ENVIRONMENT = Environment(namespace="n", name="e", image="i")


# orca.toml.


def test_an_orca_toml_of_50_mb_is_refused_without_being_read_and_the_last_good_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "orca.toml"
    path.write_text(GOOD)
    live = LiveConfig(path)
    live.reload()
    with path.open("r+b") as file:
        file.truncate(50 * 1024 * 1024)
    os.utime(path, (time.time() + 5, time.time() + 5))
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match="is larger than 1 MiB"):
            load_config(path)
        live.reload()
        assert tracemalloc.get_traced_memory()[1] < 4 * 1024 * 1024
    finally:
        tracemalloc.stop()
    assert "is larger than 1 MiB" in live.error
    assert [pool.name for pool in live.config.pools] == ["p"]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (os.mkfifo, "is a pipe or a device; write it to a file, and name that"),
        (lambda path: path.symlink_to("/dev/zero"), "is a pipe or a device; write it to a file, and name that"),
        (Path.mkdir, "is a folder; name the file itself, such as "),
    ],
    ids=["pipe", "device", "folder"],
)
def test_an_orca_toml_that_is_no_file_is_not_waited_for_and_the_last_good_one_stays(
    tmp_path: Path, make: Callable[[Path], object], said: str
) -> None:
    path = tmp_path / "orca.toml"
    path.write_text(GOOD)
    live = LiveConfig(path)
    path.unlink()
    make(path)
    assert live.reload()
    assert live.error.startswith(f"{path}: {said}")
    assert [pool.name for pool in live.config.pools] == ["p"]
    assert not live.reload()
    with pytest.raises(ConfigError, match="; "):
        LiveConfig(path)
    path.rename(tmp_path / "away")
    path.write_text(GOOD)
    assert live.reload()
    assert live.error == ""


@pytest.mark.parametrize(
    "text",
    [
        "a" + ".a" * 500_000 + " = 1",
        "[" + "'a' . " * 150_000 + "a]",
        'x = {"a"' + '."a"' * 250_000 + " = 1}",
        GOOD + "\n[pools." + "b." * 21 + "c]\n",
    ],
)
def test_a_key_of_many_parts_is_refused_at_once(text: str) -> None:
    started = time.thread_time()
    with pytest.raises(ConfigError, match=r"orca.toml:\d+: a key of more than 20 parts"):
        parse_config(text, "orca.toml")
    assert time.thread_time() - started < 5


def test_no_file_of_the_allowed_size_takes_long_to_read() -> None:
    """The worst that is left: lines of the longest keys that are read at all, and pools as many as fit."""
    lines = "\n".join("[" + ".".join(["a"] * 18) + f".b{number}]" for number in range(25_000))[: 1024 * 1024]
    started = time.thread_time()
    with pytest.raises(ConfigError):
        parse_config(lines.rpartition("\n")[0], "orca.toml")
    assert time.thread_time() - started < 60  # it takes 3 s of CPU where little else runs


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ('[pipelines.w]\nnode_selector = { zone = "a\\u0000b" }', "orca.toml:9: [pipelines.w.node_selector] zone: "),
        ('[pipelines."a\\u0000b"]', 'orca.toml:8: [pipelines."a\\u0000b"]: '),
        ('[pipelines.w]\ntolerations = [{ key = "x", value = "\\u0000" }]', "orca.toml:9: [[pipelines.w.tolerations]] #1 value: "),
    ],
)  # fmt: skip
def test_a_nul_which_the_database_would_refuse_at_every_admission_is_refused_at_load(line: str, place: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config(f"{GOOD}{line}\n", "orca.toml")
    assert f"{place}must not hold a NUL character" in str(refused.value)


def test_pools_with_names_of_every_kind_are_taken_or_refused_by_name() -> None:
    for name in ("שלום", "it's", 'say \\"hi\\"', "%s {x} $1", "🐋", "a.b", "a b"):
        assert len(parse_config(GOOD.replace("[pools.p]", f'[pools."{name}"]'), "orca.toml").pools) == 1
    for name in ("two\\nlines", "\\u202Ebackwards", "x" * 10_000, "", "\\u001B[31m"):
        with pytest.raises(ConfigError) as refused:
            parse_config(GOOD.replace("[pools.p]", f'[pools."{name}"]'), "orca.toml")
        said = str(refused.value)
        assert said.isprintable(), said
        assert len(said) < 500


# Runtime pools.


def pool(**spec: Any) -> Pool:
    metadata = {"name": "huge", "namespace": "n", "uid": "u"}
    return read_pool({"metadata": metadata, "spec": {"environment": "e", "size": 1, **spec}})


def plan_of(*pools: Pool, rows: tuple[PodRow, ...] = (), objects: tuple[SeenObject, ...] = ()) -> Any:
    snapshot = RuntimeSnapshot(now=NOW, pools=pools, environments={"e": ENVIRONMENT}, rows=rows, objects=objects)
    return decide(snapshot, LIMITS)


def births(plan: Any) -> dict[str, int]:
    return {birth.pool.name: birth.count for birth in plan.births}


def message(plan: Any) -> str:
    return str(plan.statuses[0].status.message)


def waiting_rows(count: int, **more: Any) -> tuple[PodRow, ...]:
    return tuple(
        PodRow(name=f"orca-runtime-huge-{n}", namespace="n", environment="e", created_at=NOW, pool="huge", **more)
        for n in range(count)
    )


def test_a_pool_of_a_thousand_million_is_kept_to_the_most_that_a_pool_can_have_and_its_status_says_so() -> None:
    huge = pool(size=10**9)
    plan = plan_of(huge)
    assert births(plan) == {"huge": 500}
    assert message(plan) == "size 1000000000 is more than a pool can have: 10000 Pods are kept"
    full = plan_of(huge, rows=waiting_rows(POOL_SIZE_MAX))
    assert births(full) == {}
    [size] = [
        runtime_pool_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"][
            "size"
        ]
    ]
    assert size["maximum"] == POOL_SIZE_MAX


def test_a_huge_pool_keeps_no_small_one_waiting() -> None:
    huge, small = pool(size=10**9), replace(pool(size=2), name="small", uid="v")
    assert births(plan_of(huge, small)) == {"small": 2, "huge": 498}


@pytest.mark.parametrize("refused", ["pods exceeded quota", ""])
def test_no_more_are_born_while_many_of_the_pool_are_refused_or_find_no_node(refused: str) -> None:
    rows = waiting_rows(500, refused=refused)
    held = [
        SeenObject(kind="Pod", namespace="n", name=row.name, uid=f"u{n}", created_at=NOW, held=True, waiting="Unschedulable")
        for n, row in enumerate(rows)
    ]  # fmt: skip
    plan = plan_of(pool(size=10**9), rows=rows, objects=() if refused else tuple(held))
    assert births(plan) == {}
    assert "no more are born while 500 wait for a node or are refused" in message(plan)


def test_rates_and_times_past_all_sense_are_bounded_before_they_are_calculated_with() -> None:
    odd = pool(burningRate=1e308, cull={"seconds": 1e300})
    assert (odd.burning_rate, odd.cull_seconds) == (BURNING_RATE_MAX, CULL_SECONDS_MAX)
    properties = runtime_pool_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"][
        "properties"
    ]
    assert properties["burningRate"]["maximum"] == BURNING_RATE_MAX
    assert properties["cull"]["properties"]["seconds"]["maximum"] == CULL_SECONDS_MAX


@pytest.mark.parametrize("quantity", ["9" * 400, "1" + "0" * 5000, "0." + "1" * 400])
def test_a_quantity_of_hundreds_of_digits_stops_its_own_pool_and_no_pass(quantity: str) -> None:
    plan = plan_of(pool(resources={"requests": {"cpu": quantity}}), replace(pool(size=2), name="small", uid="v"))
    assert births(plan) == {"small": 2}
    assert "no Pod is born: in its resources, cpu must be a quantity" in message(plan)
    assert len(message(plan)) < 300
    with pytest.raises(Refused, match="in the resources asked for, cpu must be a quantity"):
        _checked(LaunchRequest(environment="e", user="jane", requests={"cpu": quantity}))


def test_the_largest_quantity_that_is_taken_fits_every_column() -> None:
    requests = amounts_of({"cpu": f"{'9' * 40}Ei", "memory": "9" * 40})
    assert all(amount < 1e300 for amount in size_of(requests))
    assert json.loads(json.dumps(requests)) == requests
    rendered = render_warm(pool(), ENVIRONMENT, 10**9, "s")
    assert len(rendered.name) <= 63


# Launches.


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("user", "x" * 10_000, "the user of a launch has 10000 bytes, more than 1000"),
        ("idempotency_key", "é" * 501, "the idempotency key of a launch has 1002 bytes, more than 1000"),
        ("environment", "x" * 10_000, "the environment of a launch has 10000 bytes, more than 1000"),
        ("pool", "x" * 10_000, "the pool of a launch has 10000 bytes, more than 1000"),
        ("user", "a\0b", "the user of a launch holds a NUL character"),
        ("user", "\ud800", "the user of a launch holds halves of characters"),
    ],
)
def test_a_launch_that_no_row_could_keep_is_refused_in_a_sentence(field: str, value: str, says: str) -> None:
    given: dict[str, Any] = {"environment": "e", "user": "jane", field: value}
    with pytest.raises(Refused) as refused:
        _checked(LaunchRequest(**given))
    assert str(refused.value) == says


@pytest.mark.parametrize("user", ['it\'s "x"', "two\nlines", "\u202eright to left", "\x1b[31m", "%s {x} $1"])
def test_a_user_of_any_name_launches(user: str) -> None:
    asked = launch_request({"environment": "e", "user": user}, Caller(user="me", launcher=True))
    assert _checked(asked) == {}
    assert asked.user == user


# Run clusters.


def queued_run(run: int, **more: Any) -> QueuedRun:
    given: dict[str, Any] = {
        "start": 0,
        "pipeline": "p",
        "image": "i",
        "workers": 0,
        "max_runs": None,
        "queued_at": NOW,
    }
    return QueuedRun(run=run, allow_new_code=False, fill=False, **{**given, **more})


def test_a_run_that_no_cluster_could_hold_stays_queued_says_so_and_holds_up_no_other() -> None:
    limits = RunLimits(sizes=Sizes(), start_seconds=600, stray_grace_seconds=60, stray_max=20)
    huge, worn, good = queued_run(1, workers=2**31 - 1), queued_run(2, start=2**31 - 1), queued_run(3, workers=2)
    plan = decide_runs(RunSnapshot(now=NOW, queued=(huge, worn, good)), limits)
    assert plan.admit == (good,)
    assert plan.waiting == {
        1: "it has 2147483647 workers, more than a run can have (1000)",
        2: "it was started 2147483647 times, and cannot be counted further",
    }
    many = tuple(queued_run(number, workers=1000) for number in range(10))
    assert len(decide_runs(RunSnapshot(now=NOW, queued=many), limits).admit) == 1  # and the others in later passes


def seen_pod(uid: str, **more: Any) -> RunObject:
    given: dict[str, Any] = {"name": uid, "role": "driver", "run": 7, "start": 1, "created_at": NOW}
    return RunObject(kind=more.pop("kind", "Pod"), namespace="runs", uid=uid, **{**given, **more})


def test_what_only_carries_a_starts_labels_is_no_starts() -> None:
    known: list[dict[str, Any]] = [
        {"kind": "Job", "namespace": "runs", "name": "orca-7-1", "uid": "job", "run": 7, "start": 1},
        {"kind": "Pod", "namespace": "runs", "name": "orca-7-1-head", "uid": None, "run": 7, "start": 1},
        {"kind": "Pod", "namespace": "runs", "name": "orca-7-1-worker-0", "uid": "w0", "run": 7, "start": 1},
    ]
    ours = [
        seen_pod("job", kind="Job", name="orca-7-1"),
        seen_pod("driver", name="orca-7-1-x8k2p", owned=True, owners=frozenset({"job"})),
        seen_pod("head", name="orca-7-1-head", role="head"),  # made, and not confirmed yet
        seen_pod("w0", name="orca-7-1-worker-0", role="worker"),
    ]
    theirs = [
        seen_pod("job2", kind="Job", name="theirs"),
        seen_pod("p1", name="theirs"),
        seen_pod("p2", name="theirs-too", owned=True, owners=frozenset({"job2"})),
        seen_pod("w1", name="orca-7-1-worker-0", role="worker"),  # of another uid
    ]
    told = _told_apart([*ours, *theirs], known)
    assert told[: len(ours)] == ours
    assert [(item.run, item.start) for item in told[len(ours) :]] == [(None, None)] * len(theirs)


class Spring:
    """A Pod whose log has 10 GB, or no end at all."""

    def __init__(self, piece: bytes) -> None:
        self.piece = piece
        self.given = 0

    def logs(self, *_: Any, **__: Any) -> Iterator[bytes]:
        while self.given < 10 * 10**9:
            self.given += len(self.piece)
            yield self.piece


@pytest.mark.parametrize(
    "piece", [b"2026-01-01T00:00:00Z " + b"x" * 99 + b"\n", b"x" * 65536, b"\n" * 65536, b"\x00\xff\r" * 20000]
)
def test_a_pod_log_of_10_gb_is_kept_up_to_its_bound_in_little_memory_and_says_so(tmp_path: Path, piece: bytes) -> None:
    bound = 2**18 if piece[:1] == b"\n" else 4 * 2**20
    spring = Spring(piece)
    said = io.StringIO()
    logs = DriverLogs(spring, tmp_path, make_log(said, form="json"), bytes_max=bound)  # type: ignore[arg-type]
    driver = seen_pod("u1", phase=PodPhase.RUNNING)
    tracemalloc.start()
    try:
        logs.keep(7, 1, [driver])
        logs.wait_kept(60)
        assert logs.is_kept(7, 1)
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()
    assert spring.given < 2 * bound + 2**20
    kept = driver_log(tmp_path, 7)
    assert bound <= kept.stat().st_size < bound + 1000
    with kept.open("rb") as file:
        file.seek(-200, os.SEEK_END)
        assert f"--- the log has more than {bound} bytes: the rest is not kept".encode() in file.read()
    assert "the rest is not kept" in said.getvalue()
    assert sorted(path.name for path in kept.parent.iterdir()) == ["driver.log"]


def test_a_log_that_is_full_is_not_read_again_while_its_driver_runs(tmp_path: Path, wait_until: Any) -> None:
    spring = Spring(b"x" * 65536)
    logs = DriverLogs(spring, tmp_path, make_log(io.StringIO(), form="json"), bytes_max=2**20)  # type: ignore[arg-type]
    driver = seen_pod("u1", phase=PodPhase.RUNNING)
    for _ in range(5):
        logs.follow([driver])
        wait_until(lambda: all(follower.done.done() for follower in logs._followers.values()))
    assert spring.given < 4 * 2**20


def test_a_variable_that_is_no_text_is_refused_at_the_start_and_not_at_every_admission(tmp_path: Path) -> None:
    settings = read_settings({"ORCA_RUN_ENV": "TOKEN", "ORCA_HOME": str(tmp_path)})
    with pytest.raises(SettingError, match="TOKEN, which ORCA_RUN_ENV names, is no text in UTF-8"):
        run_settings(settings, {"TOKEN": "caf\udce9"})
    assert run_settings(settings, {"TOKEN": "café"}).environment == {"TOKEN": "café"}


# A registry.


@pytest.mark.parametrize(
    "way", ["endless body", "endless header", "a byte now and then", "informational answers for ever"]
)
def test_a_registry_that_never_ends_its_answer_is_given_up_in_its_time_and_asked_by_one_thread(
    way: str, wait_until: Callable[..., None]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=_never_end, args=(listening, way), daemon=True).start()
        image = f"127.0.0.1:{listening.getsockname()[1]}/worker:1"
        clock = itertools.count(0, 3600)  # no answer is kept
        asked = RegistryArchitectures(whole_seconds=0.5, logins=lambda _: None, clock=lambda: next(clock))
        before = threading.active_count()
        for _ in range(3):
            with pytest.raises((Transient, Refused)):
                asked(image)
        wait_until(lambda: threading.active_count() <= before + 2, 10, "one that asks, one that answers")


def _never_end(listening: socket.socket, way: str) -> None:
    with suppress(OSError):
        while True:
            connection, _ = listening.accept()
            threading.Thread(target=_answer_without_end, args=(connection, way), daemon=True).start()


def _answer_without_end(connection: socket.socket, way: str) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
    with suppress(OSError), connection:
        connection.recv(65536)
        if way == "endless body":
            connection.sendall(head + b"\r\n")
        elif way != "informational answers for ever":
            connection.sendall(head + b"X-Long: ")
        while True:
            if way == "a byte now and then":
                time.sleep(0.05)
                connection.sendall(b"x")
            elif way == "informational answers for ever":
                time.sleep(0.01)
                connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            else:
                connection.sendall(b"x" * 65536)


# An API server that shows what others wrote.


def nested(depth: int) -> str:
    return '{"a":[' * (depth // 2) + "1" + "]}" * (depth // 2)


def test_an_object_that_is_nested_too_deeply_leaves_the_others_of_its_list_readable() -> None:
    """The API server takes 10,000 levels wherever a definition keeps unknown fields."""
    text = r"a \"quoted\" [{ and a \\"
    whole = f'{{"kind":"List","items":[{{"deep":{nested(9000)},"said":"{text}"}},{{"name":"other"}}],"after":[[]]}}'
    with pytest.raises(RecursionError):
        json.loads(whole)
    found = decode(whole.encode())
    deep, other = found["items"]
    assert other == {"name": "other"}
    assert deep["said"] == json.loads(f'"{text}"')
    assert found["after"] == [[]]
    levels, inner = 3, deep["deep"]
    while inner is not None:
        levels, inner = levels + 1, (inner[0] if isinstance(inner, list) else inner["a"])
    assert levels == DEPTH_MOST
    shallow = f"[{nested(DEPTH_MOST - 2)}]"
    assert decode(shallow.encode()) == json.loads(shallow)


@pytest.mark.parametrize("cut", [1, 500, 20_000])
def test_what_is_nested_too_deeply_and_cut_short_is_no_value(cut: int) -> None:
    with pytest.raises(ValueError):
        decode(nested(9000).encode()[:-cut])


def test_files_of_a_person_that_are_nested_too_deeply_are_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "demand.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match="is not JSON"):
        read_demand(tmp_path / "demand.json")
    with pytest.raises(ValueError, match="is not JSON"):
        parse_policies("[" * 100_000)
    with pytest.raises(SetupError, match="must be a table"):
        read_values({"orca-infra:serviceAccountAnnotations": "[" * 100_000}, "dev")
