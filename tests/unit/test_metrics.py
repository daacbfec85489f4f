"""What Prometheus is told: the right numbers, few labels, and nothing of who does not lead."""

from __future__ import annotations

import ast
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import pytest

from orca_infra import metrics
from orca_infra.health.facts import gauges_of
from orca_infra.machines.decide import decide
from orca_infra.machines.model import Demand, Limits, MachineRow, MachineState, MachineType, Pool, SeenMachine, Snapshot
from orca_infra.metrics import DEFINITIONS, OTHER, POOLS_MOST, Kind, Metrics
from orca_infra.record.decided import MachinesDecided, RunsDecided, RuntimesDecided
from orca_infra.runs import model as runs
from orca_infra.runtimes import model as runtimes

PACKAGE = Path(metrics.__file__).parent
NOW = datetime(2026, 1, 1, tzinfo=UTC)
LIMITS = Limits(try_seconds=60, boot_seconds=900, lost_seconds=300, stray_grace_seconds=60, stray_max=1, lost_max=3)
POOL = Pool(
    name="p",
    provider="local",
    image="i",
    max_machines=4,
    idle_seconds=60,
    types=(MachineType(type="small", locations=("a",)),),
)


def shown(one: Metrics) -> dict[str, float]:
    """Every sample by its name and labels, but those of the process and of when a series began."""
    text = one.exposition()[0].decode()
    samples = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {
        name.removeprefix("orca_infra_"): float(value)
        for name, _, value in samples
        if name.startswith("orca_infra_") and "_created" not in name
    }


@pytest.fixture
def fresh() -> Metrics:
    return Metrics()


def machine(name: str, **more: object) -> MachineRow:
    given = {"created_at": NOW, "confirmed_at": NOW, "uid": name, "number": 1, "type": "small", "location": "a", **more}
    return MachineRow(**{"name": name, "pool": "p", "provider": "local", **given})  # type: ignore[arg-type]


def test_a_pass_over_machines_as_gauges(fresh: Metrics) -> None:
    rows = (
        machine("orca-p-1"),
        machine("orca-p-2", first_seen_at=NOW, seen_at=NOW, slots=1, running=1),
        machine("orca-p-3", revoked_at=NOW, removal_reason="Idle"),
        machine("orca-p-4", revoked_at=NOW, removal_reason="somebody's own words"),
    )
    strays = tuple(
        SeenMachine(
            name=f"orca-p-{number}", uid=f"x{number}", location="a", type="small", state=MachineState.RUNNING,
            created_at=NOW - timedelta(hours=1), labels={"orca-stack": "s", "orca-pool": "p"},
        )
        for number in (7, 8)
    )  # fmt: skip
    snapshot = Snapshot(
        now=NOW,
        stack_id="s",
        hearing_since=NOW,
        demand={"p": Demand(aged=3, waiting=3)},
        machines=rows,
        seen=tuple(("local", stray) for stray in strays),
        unreadable={"gcp": "away"},
    )
    plan = decide(snapshot, (POOL,), LIMITS)
    decided = MachinesDecided(snapshot=snapshot, pools=(POOL,), limits=LIMITS, plan=plan)
    fresh.set("machines", gauges_of(decided, fresh.pool))
    found = shown(fresh)
    assert found['machines{pool="p",reason="",state="booting"}'] == 1
    assert found['machines{pool="p",reason="",state="busy"}'] == 1
    assert found['machines{pool="p",reason="Idle",state="removing"}'] == 1
    assert found[f'machines{{pool="p",reason="{OTHER}",state="removing"}}'] == 1
    assert found['pool_demand_runs{pool="p"}'] == 3
    assert found['pool_max_machines{pool="p"}'] == 4
    assert found['strays{scope="machines"}'] == found['strays_held{scope="machines"}'] == 2
    assert found['unreadable{provider="gcp"}'] == 1


def test_passes_over_runs_and_runtimes_as_gauges(fresh: Metrics) -> None:
    limits = runs.RunLimits(sizes=runs.Sizes(), start_seconds=1, stray_grace_seconds=1, stray_max=1)
    rows = tuple(
        runs.ClusterRow(
            run=number, start=1, pipeline="secret-pipeline", cpu_millis=1500, created_at=NOW, run_state="running",
            run_start=1, open_objects=number % 2, ending_reason="Ended" if number == 4 else None,
        )
        for number in (1, 2, 4)
    )  # fmt: skip
    seen = RunsDecided(snapshot=runs.RunSnapshot(now=NOW, rows=rows), limits=limits, plan=runs.RunPlan())
    fresh.set("runs", gauges_of(seen, fresh.pool))
    pods = tuple(
        runtimes.PodRow(name=f"r{n}", namespace="n", environment="e", created_at=NOW, **more)  # type: ignore[arg-type]
        for n, more in enumerate(
            [
                {"pool": "q", "ready_at": NOW},
                {"pool": "q"},
                {"pool": "q", "taken_at": NOW, "runtime": UUID(int=1)},
                {"taken_at": NOW, "ending_reason": "Culled"},
            ]
        )
    )
    pool = runtimes.Pool(namespace="n", name="q", uid="u", environment="e", size=3)
    snapshot = runtimes.RuntimeSnapshot(now=NOW, rows=pods, pools=(pool,))
    plan = runtimes.RuntimePlan()
    limits_of_runtimes = runtimes.RuntimeLimits(stray_grace_seconds=1, stray_max=1)
    fresh.set(
        "runtimes", gauges_of(RuntimesDecided(snapshot=snapshot, limits=limits_of_runtimes, plan=plan), fresh.pool)
    )
    found = shown(fresh)
    assert [found[f'run_clusters{{state="{state}"}}'] for state in ("making", "running", "ending")] == [1, 1, 1]
    assert found["run_cpu_cores"] == 4.5
    assert [found[f'runtime_pods{{pool="q",state="{state}"}}'] for state in ("warm", "starting", "assigned")] == [
        1,
        1,
        1,
    ]
    assert found['runtime_pods{pool="cold",state="ending"}'] == 1
    assert found['runtime_pool_size{pool="q"}'] == 3
    assert "secret-pipeline" not in fresh.exposition()[0].decode()


def test_who_leads_no_more_knows_nothing_of_what_there_is_and_keeps_its_counts(fresh: Metrics) -> None:
    fresh.lead(leading=True)
    fresh.configured(loaded_at=0.0, good=True)
    fresh.set("machines", {"pool_demand_runs": {("p",): 3.0}})
    fresh.machine_attempt("p", "NoCapacity")
    fresh.pass_ended("machines", "changed")
    assert shown(fresh)["leader"] == 1
    assert shown(fresh)['last_pass_timestamp_seconds{scope="machines"}'] > 0
    fresh.lead(leading=False)
    found = shown(fresh)
    assert found["leader"] == 0
    assert 'pool_demand_runs{pool="p"}' not in found
    assert 'last_pass_timestamp_seconds{scope="machines"}' not in found
    assert found['machine_attempts_total{outcome="NoCapacity",pool="p"}'] == 1
    assert found["config_last_reload_successful"] == 1


def test_the_configurations_age_goes_on_by_itself_and_a_bad_file_is_told(
    fresh: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh.configured(loaded_at=1000.0, good=False)
    monkeypatch.setattr("orca_infra.metrics.time.time", lambda: 1250.0)
    found = shown(fresh)
    assert found["config_age_seconds"] == 250
    assert found["config_loaded_timestamp_seconds"] == 1000
    assert found["config_last_reload_successful"] == 0


def test_an_operation_of_the_engine_counts_for_its_scope(fresh: Metrics) -> None:
    fresh.engine_operation("prod.machines.gpu", "up", "Done", 2.0)
    fresh.engine_operation("prod.runs.17", "up", "OutcomeUnknown", 9.0)
    fresh.engine_operation("prod", "refresh", "Done", 1.0)
    found = shown(fresh)
    assert found['engine_operations_total{kind="up",outcome="Done",scope="machines"}'] == 1
    assert found['engine_operations_total{kind="up",outcome="OutcomeUnknown",scope="runs"}'] == 1
    assert found['engine_operations_total{kind="refresh",outcome="Done",scope="base"}'] == 1
    assert found['engine_operation_seconds_sum{kind="up",scope="runs"}'] == 9


def test_claims_are_there_before_the_first_and_by_how_they_start(fresh: Metrics) -> None:
    assert shown(fresh)['claim_seconds_count{start="cold"}'] == 0
    fresh.claimed(0.03, warm=True)
    found = shown(fresh)
    assert found['claim_seconds_bucket{le="0.03",start="warm"}'] == 1
    assert found['claim_seconds_bucket{le="0.02",start="warm"}'] == 0


def test_pools_after_the_first_share_a_label(fresh: Metrics) -> None:
    for number in range(POOLS_MOST + 5):
        fresh.machine_attempt(f"p{number}", "Made")
    found = shown(fresh)
    assert found[f'machine_attempts_total{{outcome="Made",pool="{OTHER}"}}'] == 5
    assert sum(name.startswith("machine_attempts_total") for name in found) == POOLS_MOST + 1
    assert fresh.pool("p0") == "p0"


def test_a_phase_that_fails_is_measured_too(fresh: Metrics) -> None:
    with pytest.raises(ZeroDivisionError), fresh.phase("runs", "observe"):
        _ = 1 / 0
    assert shown(fresh)['pass_seconds_count{phase="observe",scope="runs"}'] == 1


def test_both_forms_are_spoken(fresh: Metrics) -> None:
    assert fresh.exposition()[1].startswith("text/plain")
    text, content_type = fresh.exposition("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert text.endswith(b"# EOF\n")


def test_names_follow_the_conventions_of_prometheus() -> None:
    for one in DEFINITIONS:
        assert re.fullmatch(r"[a-z_]+", one.name)
        assert one.meaning.endswith(".")
        assert not one.name.endswith("_total")
        assert bool(one.buckets) == (one.kind is Kind.HISTOGRAM)
        assert not {"pipeline", "user", "run", "machine", "name", "id"}.intersection(one.labels), one.name


def log_calls(path: Path) -> list[ast.Call]:
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    return [
        call
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in {"info", "warning"}
        and ast.unparse(call.func.value).endswith(("log", "_log"))
    ]


@pytest.mark.parametrize("scope", ["machines", "runs", "runtimes"])
def test_each_line_about_an_action_has_its_reason(scope: str) -> None:
    """`why` is this program's reason, `said` another's words."""
    lines = [
        call for call in log_calls(PACKAGE / scope / "apply.py") if isinstance(call.args[0], ast.Constant | ast.Name)
    ]
    without = [
        ast.unparse(call)
        for call in lines
        if not {"why", "said"}.intersection(keyword.arg or "" for keyword in call.keywords)
        and not ast.unparse(call.args[0]).strip("'").startswith(("strays held", "console saved"))
    ]
    assert len(lines) > 4
    assert without == []
