"""Launches on a real API server, with the real engine: the issue's own words, keys, fits and colds."""

from __future__ import annotations

import base64
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml  # type: ignore[import-untyped]
from typer.testing import CliRunner

from orca_infra.cli import app
from orca_infra.errors import OrcaError, Refused, UserError
from orca_infra.runtimes.launch import Launch, LaunchRequest, launch
from orca_infra.runtimes.living import end_runtime, list_runtimes
from orca_infra.runtimes.model import RuntimePlan
from orca_infra.runtimes.rows import prune
from orca_infra.testing.cluster import TestCluster

if TYPE_CHECKING:
    from tests.cluster.runtimes.conftest import Room
    from tests.conftest import Background


def test_the_shared_pool_applied_unchanged_keeps_three_warm_pods_and_a_launch_takes_one(
    cluster: TestCluster, shared_room: Room, capsys: pytest.CaptureFixture[str]
) -> None:
    room = shared_room
    cluster.kubectl("apply", "-f", str(room.pool_file))
    room.run_pass()
    assert room.status()["message"] == "environment python-simple-env is missing: no Pod is born"
    assert room.pods() == {}

    room.make_environment()
    room.until(lambda: len(room.warm()) == 3)
    room.run_pass()
    pods = room.pods()
    assert sorted(pods) == [f"orca-runtime-python-simple-pool-{number}" for number in (1, 2, 3)]
    assert all(room.is_ready(pod) for pod in pods.values())
    assert room.counts() == (3, 0, "")
    before = room.rows("select * from orca.engine_operations")
    assert room.run_pass() == RuntimePlan()
    assert room.rows("select * from orca.engine_operations") == before

    room.user_secret("b-second", "jane", TOKEN="from b", B="b")
    room.user_secret("a-first", "jane", TOKEN="from a", A="a")
    room.user_secret("other", "john", JOHN="john's")
    began = time.monotonic()
    taken = room.launch(secrets={"SENT": "s3cr3t-sent", "B": "sent wins"})
    launch_seconds = time.monotonic() - began
    assert (taken.warm, taken.namespace, taken.pod in pods) == (True, "datalayer-runtimes", True)
    assert taken.address == pods[taken.pod]["status"]["podIP"]
    assert taken.expires_at is not None
    assert room.secret_values(taken.pod) == {"A": "a", "B": "sent wins", "TOKEN": "from b", "SENT": "s3cr3t-sent"}
    secret = room.secret(taken.pod)
    assert secret is not None
    [owner] = secret["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("Pod", pods[taken.pod]["metadata"]["uid"])

    def touched() -> str:
        pod = room.pod(taken.pod)
        assert pod is not None
        annotations = pod["metadata"]["annotations"]
        assert annotations["orca.runtime"] == str(taken.id)
        return str(annotations["orca.touched"])

    first = touched()
    room.wait_until(lambda: touched() != first, 5)

    room.until(lambda: len(room.warm()) == 3)
    room.run_pass()
    assert max(room.pods()) == "orca-runtime-python-simple-pool-4"
    assert room.counts() == (3, 1, "")
    shown = cluster.kubectl("get", "rtp", "-n", room.namespace).splitlines()
    assert shown[0].split() == ["NAME", "ENVIRONMENT", "SIZE", "WARM", "ASSIGNED", "BURNING", "RATE", "MESSAGE", "AGE"]
    assert shown[1].split()[:6] == ["python-simple-pool", "python-simple-env", "3", "3", "1", "0.01"]

    tables = room.rows("select table_name as t from information_schema.tables where table_schema = 'orca'")
    stored = "".join(str(room.rows(f"select x::text from orca.{table['t']} x")) for table in tables)
    assert taken.pod in stored
    for value in ("s3cr3t-sent", "from b", base64.b64encode(b"s3cr3t-sent").decode()):
        assert value not in stored

    assert end_runtime(room.launching, taken.id)
    assert not any(runtime.ending_reason is None for runtime in list_runtimes(room.database))
    room.until(lambda: room.runtime(taken.id)["ended_at"])
    assert room.pod(taken.pod) is None
    assert room.secret(taken.pod) is None
    ended = room.runtime(taken.id)
    assert ended["reason"] == room.reason(taken.pod) == "Stopped"
    lived = (ended["ended_at"] - ended["assigned_at"]).total_seconds()
    assert ended["credits"] == pytest.approx(0.01 * lived)
    assert not end_runtime(room.launching, taken.id)
    assert list_runtimes(room.database) == []
    prune(room.database, 0)
    assert room.rows("select from orca.runtimes") == []
    with capsys.disabled():
        passes = ", ".join(f"{seconds:.2f}" for seconds in room.passes_made)
        print(f"\na warm launch took {1000 * launch_seconds:.0f} ms; passes took {passes} s")


def test_twenty_launches_at_once_never_take_one_pod_twice_and_the_rest_start_cold(room: Room) -> None:
    room.fill()
    warm = room.warm()
    barrier = threading.Barrier(20)

    def one(number: int) -> Launch:
        barrier.wait()
        return room.launch(f"user-{number}", secrets={"WHO": str(number)})

    with ThreadPoolExecutor(20) as threads:
        launches = list(threads.map(one, range(20)))
    assert len({one.pod for one in launches}) == len({one.id for one in launches}) == 20
    assert {one.pod for one in launches if one.warm} == warm
    for number, made in enumerate(launches):
        assert room.secret_values(made.pod) == {"WHO": str(number)}

    cold = [one for one in launches if not one.warm]
    room.until(lambda: all(room.is_ready(room.pod(one.pod)) for one in cold))
    room.until(lambda: all((room.secret(one.pod) or {})["metadata"].get("ownerReferences") for one in cold))
    room.until(lambda: len(room.warm()) == 3)
    for made in cold:
        pod, secret = room.pod(made.pod), room.secret(made.pod)
        assert pod is not None
        assert secret is not None
        assert secret["metadata"]["ownerReferences"][0]["uid"] == pod["metadata"]["uid"]
        assert "orca.pool" not in pod["metadata"]["labels"]
        row = room.runtime(made.id)
        assert (row["warm"], row["burning_rate"]) == (False, 0.01)
    assert len(list_runtimes(room.database)) == 20
    [mine] = list_runtimes(room.database, "user-7")
    assert mine.pod == launches[7].pod
    time.sleep(room.limits.stray_grace_seconds)
    assert room.run_pass().strays == ()


def test_one_key_gives_one_runtime_however_often_and_to_its_user_alone(room: Room) -> None:
    room.fill()
    barrier = threading.Barrier(8)

    def one(_: int) -> Launch:
        barrier.wait()
        return room.launch(idempotency_key="k", secrets={"A": "1"})

    with ThreadPoolExecutor(8) as threads:
        launches = set(threads.map(one, range(8)))
    [first] = launches
    assert room.launch(idempotency_key="k") == first
    other = room.launch("john", idempotency_key="k")
    assert (other.id, other.pod) != (first.id, first.pod)
    assert len(room.warm()) == 1
    with pytest.raises(Refused, match="stands for a runtime of environment python-simple-env"):
        launch(room.launching, LaunchRequest(environment="x", user="jane", idempotency_key="k"))
    cold = room.launch("jo", idempotency_key="c", requests={"cpu": "2"})
    assert room.launch("jo", idempotency_key="c", requests={"cpu": "2"}) == cold
    misfits: list[dict[str, Any]] = [{"requests": {"cpu": "501m"}}, {"node_selector": {"a": "b"}}, {"pool": "x"}]
    for misfit in misfits:
        with pytest.raises(Refused, match=f"'k' stands for runtime {first.id} already, which has not the resources"):
            room.launch(idempotency_key="k", **misfit)
    fits: dict[str, Any] = {
        "requests": {"cpu": "500m"},
        "node_selector": room.node_labels,
        "pool": "python-simple-pool",
    }
    assert room.launch(idempotency_key="k", **fits) == first
    end_runtime(room.launching, first.id)
    with pytest.raises(Refused, match=f"runtime {first.id} has ended: Stopped"):
        room.launch(idempotency_key="k")


def test_a_person_launches_at_the_command_line_and_waits(
    room: Room, monkeypatch: pytest.MonkeyPatch, background: type[Background]
) -> None:
    room.fill(size=1)
    for name, value in room.product_environment(TOKEN="s3cr3t", COLUMNS="80").items():
        monkeypatch.setenv(name, value)

    def run(*arguments: str) -> str:
        command = ("runtimes", "launch", "python-simple-env", "--user", "jane", *arguments)
        result = CliRunner().invoke(app, command, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout

    warm = run("--secret", "TOKEN", "--wait", "1m")
    assert "warm" in warm
    assert "state        ready" in warm
    [pod] = room.pods()
    assert room.secret_values(pod) == {"TOKEN": "s3cr3t"}
    assert "state        starting" in run("--request", "cpu=1")
    with pytest.raises(OrcaError, match="is not ready after --wait 0.1"):
        run("--request", "cpu=1", "--wait", "0.1")
    is_over = threading.Event()
    passes = background(lambda: room.until(is_over.is_set, 300))
    cold = run("--request", "cpu=1", "--node-selector", "role.datalayer.io/runtime=true", "--wait", "5m")
    is_over.set()
    passes.join()
    assert "state        ready" in cold
    for bad, said in (
        (["--pool", "nowhere"], "it has: python-simple-pool"),
        (["--request", "cpu=lots"], "cpu must be a quantity"),
        (["--request", "cpu=1", "--request", "cpu=2"], "cpu was given before, as 1"),
        (["--node-selector", "x"], "must be NAME=VALUE"),
        (["--secret", "NOT_THERE"], "no such environment variable"),
        (["--wait", "soon"], "--wait soon: .* is not a duration"),
    ):
        with pytest.raises(UserError, match=said):
            run(*bad)


def test_the_guides_python_launches_shows_and_stops(
    room: Room, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    guide = (Path(__file__).parents[3] / "docs" / "howto" / "runtimes.md").read_text(encoding="utf-8")
    code = textwrap.dedent(guide.partition("```python\n")[2].partition("```")[0])
    room.make_environment(name="python")
    room.make_pool(environment="python")
    for name, value in room.product_environment().items():
        monkeypatch.setenv(name, value)
    names: dict[str, Any] = {}
    exec(code, names)
    names["hands"].kube.close()
    names["surroundings"].close()
    [runtime] = room.rows("select * from orca.runtimes")
    assert capsys.readouterr().out.splitlines()[-1] == "starting"
    assert (runtime["user_name"], runtime["idempotency_key"]) == ("jane", "4b1f")
    assert room.rows("select ending_reason from orca.runtime_pods") == [{"ending_reason": "Stopped"}]


def test_a_launch_takes_what_fits_the_smallest_first_and_else_starts_cold(room: Room) -> None:
    room.fill(size=1)
    pool = yaml.safe_load(room.pool_file.read_text())
    pool["metadata"] = {"name": "large", "namespace": room.namespace}
    pool["spec"] |= {"size": 2, "burningRate": 5, "resources": {"requests": {"cpu": "4"}}, "cull": {"seconds": 50}}
    room.kube.create(pool)
    room.until(lambda: len(room.warm()) == 3)
    assert room.launch(requests={"cpu": "500m"}).pod.startswith("orca-runtime-python-simple-pool-")
    large = room.launch(requests={"cpu": "3500m"}, node_selector=room.node_labels)
    assert large.pod.startswith("orca-runtime-large-")
    assert room.runtime(large.id)["burning_rate"] == 5
    for misfit in ({"requests": {"memory": "2Gi"}}, {"node_selector": {"a": "b"}}, {"pool": "python-simple-pool"}):
        assert not room.launch(**misfit).warm
    named = room.launch(pool="large", requests={"cpu": "8"})
    assert not named.warm
    assert room.runtime(named.id)["burning_rate"] == 5
    with pytest.raises(Refused, match="has no pool nowhere; it has: large, python-simple-pool"):
        room.launch(pool="nowhere")
    with pytest.raises(Refused, match="no environment x in namespace .*; there are: python-simple-env"):
        launch(room.launching, LaunchRequest(environment="x", user="jane"))
    room.make_environment(name="lonely")
    with pytest.raises(Refused, match="lonely has no pool"):
        launch(room.launching, LaunchRequest(environment="lonely", user="jane"))
    with pytest.raises(Refused, match="cpu must be a quantity"):
        room.launch(requests={"cpu": "lots"})
    room.run_pass()
    pod = room.pod(named.pod)
    assert pod is not None
    assert pod["spec"]["containers"][0]["resources"]["requests"]["cpu"] == "8"


def test_secrets_that_are_too_much_or_misnamed_are_refused_before_anything_is_taken(room: Room) -> None:
    room.fill(size=1)
    room.user_secret("half", "jane", A="x" * (1 << 19))
    for sent in ({"B": "y" * (1 << 19) + "z"}, {"not a key": "v"}, {"..": "v"}, {"": "v"}):
        with pytest.raises(Refused) as refused:
            room.launch(secrets=sent)
        assert "yyy" not in str(refused.value)
    assert len(room.warm()) == 1
    taken = room.launch(secrets={"B": "y" * (1 << 19)})
    assert taken.warm
    assert len(room.secret_values(taken.pod)["B"]) == 1 << 19
