"""Decisions from a file alone: what `orca-infra snapshot` writes is read anywhere, holds no secret, and decides the same."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from orca_infra import cli
from orca_infra.allowed import Allowed
from orca_infra.config import Config, parse_config
from orca_infra.errors import UserError
from orca_infra.machines.decide import decide
from orca_infra.machines.model import Demand as Waiting
from orca_infra.machines.model import Limits, MachineRow, MachineState, Progress, Refusal, SeenMachine, Snapshot
from orca_infra.preview.cost import price_at_most
from orca_infra.preview.decisions import decide_all
from orca_infra.preview.demand import FORM, Demand, read_demand, write_demand
from orca_infra.preview.model import Price
from orca_infra.preview.secrets import Redactor
from orca_infra.runs.model import ClusterRow, PodPhase, QueuedRun, RunLimits, RunSnapshot, Sizes
from orca_infra.runs.model import SeenObject as RunObject
from orca_infra.runtimes.model import Condition, Environment, Node, PodRow, PoolStatus, RuntimeLimits, RuntimeSnapshot
from orca_infra.runtimes.model import Pool as RuntimePool

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
OLD = NOW - timedelta(hours=1)
TOML = """
max_machines_total = 5

[pools.gpu]
provider = "local"
image = "registry.example/worker:1"
locations = ["east"]
max_machines = 4
max_booting = 2
idle_seconds = "10m"
types = [{ type = "large", wait = "5m", price_per_hour = 2.5 }, { type = "small", price_per_hour = 0.5 }]

[pools.cpu]
provider = "local"
image = "registry.example/worker:1"
locations = ["east"]
max_machines = 3
idle_seconds = "10m"
types = [{ type = "tiny", price_per_hour = 0.1 }]
"""
LIMITS = Limits(try_seconds=60, boot_seconds=900, lost_seconds=300, stray_grace_seconds=60, stray_max=2, lost_max=2)
HIDDEN = "hunter2hunter2"


def row(pool: str, number: int, kind: str, **more: Any) -> MachineRow:
    given: dict[str, Any] = {
        "name": f"orca-{pool}-{number}",
        "pool": pool,
        "number": number,
        "provider": "local",
        "type": kind,
        "location": "east",
        "created_at": OLD,
        "uid": f"{pool}{number}",
        "confirmed_at": OLD,
        "first_seen_at": OLD,
        "seen_at": NOW,
        "slots": 1,
    }
    return MachineRow(**{**given, **more})


MACHINES = Snapshot(
    now=NOW,
    stack_id="mystackmystackid",
    hearing_since=OLD,
    demand={"gpu": Waiting(aged=3, waiting=4, next_due_at=NOW)},
    progress={"gpu": Progress(last_number=3, tried_at=OLD, last_attempt=f"refused: {HIDDEN}")},
    machines=(row("gpu", 1, "large", running=1), row("cpu", 1, "tiny"), row("cpu", 2, "unknown", running=1)),
    seen=(
        (
            "local",
            SeenMachine(
                name="orca-gpu-1",
                uid="gpu1",
                location="east",
                type="large",
                state=MachineState.RUNNING,
                created_at=OLD,
                labels={"orca-stack": "mystackmystackid", "orca-pool": "gpu", "note": HIDDEN},
            ),
        ),
    ),
    owned={"gpu": frozenset({"orca-gpu-1"})},
    refusals=(
        Refusal(
            pool="gpu", type="large", location="west", spot=False, kind="NoCapacity", since=OLD, last_at=OLD, times=2
        ),
    ),
    ended_lately=frozenset({("orca-cpu-0", "x")}),
    image_architectures={"registry.example/worker:1": frozenset({"amd64"})},
)
RUNS = RunSnapshot(
    now=NOW,
    queued=(
        QueuedRun(
            run=7,
            start=0,
            pipeline="reports",
            image="registry.example/r:1",
            workers=2,
            allow_new_code=False,
            fill=False,
            max_runs=None,
            queued_at=OLD,
        ),
    ),
    rows=(
        ClusterRow(run=6, start=1, pipeline="old", cpu_millis=500, created_at=OLD, run_state="succeeded", run_start=1),
    ),
    objects=(
        RunObject(
            kind="Pod",
            namespace="orca-runs",
            name="orca-6-1-x",
            uid="u",
            created_at=OLD,
            role="driver",
            owned=True,
            phase=PodPhase.RUNNING,
            run=6,
            start=1,
        ),
    ),
    desired=frozenset({("Job", "orca-runs", "orca-6-1")}),
)
ENVIRONMENT = Environment(
    namespace="n", name="e", image="registry.example/e:1", env=({"name": "PASSWORD", "value": HIDDEN},)
)
POOL = RuntimePool(
    namespace="n",
    name="warm",
    uid="u",
    environment="e",
    size=2,
    status=PoolStatus(conditions=(Condition(type="Ready", status="True", reason="x", since=OLD),)),
)
RUNTIMES = RuntimeSnapshot(
    now=NOW,
    pools=(POOL,),
    environments={"e": ENVIRONMENT},
    rows=(
        PodRow(
            name="orca-runtime-warm-1", namespace="n", environment="e", created_at=OLD, pool="warm", runtime=UUID(int=7)
        ),
    ),
    nodes=(Node(name="node", labels={"a": "b"}, allocatable={"cpu": 1000}),),
)
DEMAND = Demand(
    form=FORM,
    stack="prod",
    taken_at=NOW,
    machines=MACHINES,
    limits=LIMITS,
    runs=RUNS,
    run_limits=RunLimits(sizes=Sizes(), start_seconds=600, stray_grace_seconds=60, stray_max=3, budget_millis=64000),
    runtimes=RUNTIMES,
    runtime_limits=RuntimeLimits(stray_grace_seconds=60, stray_max=3),
)


@pytest.fixture
def config() -> Config:
    return parse_config(TOML, "orca.toml")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "demand.json"
    path.write_text(write_demand(DEMAND, Redactor([HIDDEN])))
    return path


def test_what_is_written_is_read_and_decides_the_same(file: Path, config: Config) -> None:
    read = read_demand(file)
    assert read.machines.demand == MACHINES.demand
    assert read.machines.machines == MACHINES.machines
    assert read.machines.ended_lately == MACHINES.ended_lately
    assert decide(read.machines, config.pools, LIMITS) == decide(MACHINES, config.pools, LIMITS)
    assert (read.runs, read.run_limits, read.runtime_limits) == (RUNS, DEMAND.run_limits, DEMAND.runtime_limits)
    assert read.runtimes == replace(RUNTIMES, environments={"e": replace(ENVIRONMENT, env=({"name": "PASSWORD"},))})
    for source in (DEMAND, read):
        assert decide_all(source, config, "x", None)[1].after == Price(per_hour=7.5, unpriced=1)


def test_it_holds_no_secret(file: Path) -> None:
    text = file.read_text()
    assert HIDDEN not in text
    assert "note" not in text
    # Known or not: the value of a variable is left out.
    assert HIDDEN not in json.dumps(json.loads(write_demand(DEMAND, lambda text: text))["runtimes"])


def test_the_decisions_of_machines_runs_and_runtimes(config: Config) -> None:
    decisions, cost = decide_all(DEMAND, config, "x", None)
    said = [(one.scope, one.acts, one.sentence) for one in decisions.decided]
    assert (decisions.made, decisions.removed) == (2, 1)
    assert any(scope == "machines" and acts and "make 2 machines for gpu" in text for scope, acts, text in said)
    assert any(scope == "machines" and acts and "remove orca-cpu-1 (Idle)" in text for scope, acts, text in said)
    start = "start run 7 of reports, start 1 with 2 workers: it has been queued for 3600 s, and nothing holds it"
    assert ("runs", True, start) in said
    assert any(scope == "runs" and text.startswith("end start 1 of run 6 (Ended)") for scope, _, text in said)
    assert any(scope == "runtimes" and acts and text.startswith("bear 1 Pod for warm") for scope, acts, text in said)
    assert ("runtimes", False, "say of warm that 0 of 2 are warm and 0 assigned: Filling") in said
    assert cost.now == Price(per_hour=2.5 + 0.1, unpriced=1)
    # Four of 2.5, and of max_machines_total one more of 0.1.
    assert cost.most == Price(per_hour=10.1)


def test_of_many_decisions_of_a_kind_the_first_are_named_and_the_others_counted(config: Config) -> None:
    [run] = RUNS.queued
    many = replace(RUNS, queued=tuple(replace(run, run=number) for number in range(100, 125)))
    assert DEMAND.run_limits is not None
    limits = replace(DEMAND.run_limits, budget_millis=None)
    decisions, _ = decide_all(replace(DEMAND, runs=many, run_limits=limits), config, "x", None)
    started = [one.sentence for one in decisions.decided if one.sentence.startswith("start ")]
    assert started[19].startswith("start run 119 of reports")
    assert started[20:] == ["start 5 more of reports"]


def test_the_policies_of_here_hold_or_else_those_of_where_the_file_was_made(config: Config) -> None:
    strict = replace(DEMAND, limits=replace(LIMITS, allowed=Allowed(types=("small", "tiny"))))
    decisions, cost = decide_all(strict, config, "x", None)
    assert any("large: the policies (machine-types) do not allow it" in one.sentence for one in decisions.decided)
    assert cost.most == Price(per_hour=2.1)
    assert decide_all(strict, config, "x", Allowed())[1].most == Price(per_hour=10.1)


def test_a_price_that_is_not_stated_is_said_and_not_guessed() -> None:
    toml = TOML.replace(", price_per_hour = 0.5", "")
    found = price_at_most(parse_config(toml, "orca.toml").pools, None, None)
    assert found == Price(per_hour=10.3, unpriced=4)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is not JSON"),
        ("[]", "is no demand snapshot of this version (form None, and 1 is read)"),
        ('{"form": 2}', "(form 2, and 1 is read)"),
        ('{"form": 1, "stack": "prod"}', "taken_at: Field required"),
        ("\xff\xfe", "is not JSON"),
    ],
)
def test_a_file_that_is_none_is_one_sentence(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "demand.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(UserError) as caught:
        read_demand(path)
    assert says in str(caught.value)
    assert "`orca-infra snapshot > demand.json` makes it" in str(caught.value)
    with pytest.raises(UserError, match="cannot be read"):
        read_demand(tmp_path / "none.json")


# The command: nothing but the file and orca.toml.


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


Call = Callable[..., Done]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """Runs `orca-infra preview` in this process and a folder, with no setting but those given."""
    for name in [name for name in os.environ if name.startswith(("ORCA_", "PULUMI_", "GITHUB_"))]:
        monkeypatch.delenv(name)
    # A home that cannot be made: whatever asked for a database would fail.
    monkeypatch.setenv("ORCA_HOME", "/dev/null/home")
    monkeypatch.setenv("ORCA_STACK", "prod")

    def call_in(folder: Path, *arguments: str, **environment: str) -> Done:
        with monkeypatch.context() as patch:
            patch.chdir(folder)
            for name, value in environment.items():
                patch.setenv(name, value)
            patch.setattr(sys, "argv", ["orca-infra", "preview", *arguments])
            with pytest.raises(SystemExit) as left:
                cli.main()
            return Done(int(left.value.code or 0), *capfd.readouterr())

    return call_in


def test_with_a_file_neither_database_nor_engine_is_asked(call: Call, file: Path) -> None:
    (file.parent / "orca.toml").write_text(TOML)
    (file.parent / "before.toml").write_text(TOML.replace("max_machines = 4", "max_machines = 1"))
    done = call(file.parent, "--demand", "demand.json", "--format", "markdown", "--before", "before.toml")
    assert done.returncode == 2, done.stderr
    assert done.stderr == ""
    assert "| Decisions | 6 to act on: machines +2 -1 |" in done.stdout
    assert (
        "| Machines an hour, by the decisions | 2.60 or more: 1 machine of types without a price → 7.50 or more"
        in done.stdout
    )
    assert "| Machines an hour, at most | 2.80 → 10.10 |" in done.stdout
    assert "The stacks are not previewed: ORCA&#95;DB is not set" in done.stdout


def test_a_wrong_call_or_configuration_is_an_error_and_not_changes(call: Call, file: Path) -> None:
    (file.parent / "orca.toml").write_text(TOML)
    good = ("--demand", "demand.json")
    cases: list[tuple[tuple[str, ...], dict[str, str], str]] = [
        (("--demnad", "x"), {}, "No such option"),
        ((*good, "--format", "xml"), {}, "xml"),
        (("--demand", ""), {}, "--demand is empty: say live, none, or the file of `orca-infra snapshot`"),
        (("--demand", "none.json"), {}, "none.json: cannot be read (No such file or directory)"),
        (good, {"ORCA_STACK": "dev"}, "demand.json is of stack 'prod', and ORCA_STACK is 'dev'"),
        (good, {"ORCA_CONFIG": "none.toml"}, "none.toml: no such file"),
        (good, {"ORCA_STRAY_MAX": "x"}, "ORCA_STRAY_MAX=x: must be a whole number"),
        ((*good, "--before", "none.toml"), {}, "none.toml: no such file"),
        ((*good, "--stacks"), {}, "has no Pulumi.yaml"),
        ((*good, "--comment"), {}, "--comment needs GITHUB_TOKEN"),
    ]
    for arguments, environment, says in cases:
        done = call(file.parent, *arguments, **environment)
        assert (done.returncode, done.stdout) == (1, ""), arguments
        assert says in done.stderr
        assert "Traceback" not in done.stderr


def test_without_demand_only_the_most_is_said(call: Call, tmp_path: Path) -> None:
    (tmp_path / "orca.toml").write_text(TOML)
    done = call(tmp_path, "--demand", "none", "--no-stacks", "--format", "json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["decisions"] is None
    assert found["cost"]["most"] == {"per_hour": 10.1, "unpriced": 0}
