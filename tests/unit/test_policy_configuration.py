"""The policies' configuration: one file for the engine's pack and for what the loop may make."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orca_infra.allowed import Allowed, repository_of
from orca_infra.errors import Refused, Transient
from orca_infra.log import make_log
from orca_infra.machines.decide import decide
from orca_infra.machines.model import Demand, Limits, MachineRow, MachineType, Make, Plan, Pool, Snapshot
from orca_infra.policy.configuration import parse_policies, read_policy_file
from orca_infra.runs.decide import decide as decide_runs
from orca_infra.runs.model import QueuedRun, RunLimits, RunSnapshot, Sizes
from orca_infra.runtimes import launch
from orca_infra.runtimes.decide import decide as decide_runtimes
from orca_infra.runtimes.model import Environment, RuntimeLimits, RuntimeSnapshot
from orca_infra.runtimes.model import Pool as RuntimePool

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)


def read(document: object) -> Allowed:
    return parse_policies(json.dumps(document))


def test_what_it_allows() -> None:
    assert read({}) == Allowed()
    assert read(
        {
            "machine-types": {"allowed": ["e2-*"]},
            "machine-locations": {"allowed": ["us-*"], "enforcementLevel": "mandatory"},
            "machine-counts": {"mostPerPool": 2, "most": 0},
            "image-registries": {"registries": ["registry.example"]},
            "no-open-firewall": "disabled",
        }
    ) == Allowed(types=("e2-*",), locations=("us-*",), registries=("registry.example",), machines_per_pool=2)


@pytest.mark.parametrize("level", ["advisory", "disabled"])
def test_a_rule_that_is_only_advice_restrains_nothing(level: str) -> None:
    assert read({"machine-types": {"allowed": ["e2-*"], "enforcementLevel": level}}) == Allowed()
    assert read({"all": level, "machine-types": {"allowed": ["e2-*"]}}) == Allowed()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not JSON: "),
        ("[]", "must be a table of rules, such as "),
        ('{"machine-type": {}}', "'machine-type' is no rule; did you mean machine-types?"),
        ('{"machine-types": {"alowed": []}}', "'alowed' is no key of machine-types; did you mean allowed?"),
        ('{"machine-types": {"allowed": "e2-*"}}', "machine-types.allowed must be a list of texts"),
        ('{"machine-types": {"allowed": [1]}}', "machine-types.allowed must be a list of texts"),
        ('{"machine-counts": {"most": true}}', "machine-counts.most must be a whole number from 0"),
        ('{"machine-counts": {"most": -1}}', "machine-counts.most must be a whole number from 0"),
        ('{"identity-labels": {"id": 7}}', "identity-labels.id must be text"),
        ('{"machine-types": "strict"}', "machine-types must be a table or one of advisory, mandatory, "),
        (
            '{"machine-types": {"enforcementLevel": "strict"}}',
            "machine-types.enforcementLevel must be one of advisory, ",
        ),
        ('{"machine-types": 7}', "machine-types must be a table or one of advisory, "),
    ],
)
def test_a_mistake_is_one_sentence(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(says)}"):
        parse_policies(text)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot be read \(No such file"):
        read_policy_file(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("image", "repository"),
    [
        ("python", "docker.io/library/python"),
        ("python:3", "docker.io/library/python"),
        ("team/a:1", "docker.io/team/a"),
        ("localhost/a", "localhost/a"),
        ("registry.example:5000/a/b:1@sha256:0", "registry.example:5000/a/b"),
    ],
)
def test_the_whole_repository_of_an_image(image: str, repository: str) -> None:
    assert repository_of(image) == repository


# decide keeps within it.

LIMITS = Limits(try_seconds=60, boot_seconds=900, lost_seconds=300, stray_grace_seconds=60, stray_max=2, lost_max=2)
POOL = Pool(
    name="p",
    provider="local",
    image="registry.example/worker:1",
    max_machines=5,
    idle_seconds=300,
    max_booting=5,
    types=(
        MachineType(type="a3-huge", locations=("us-a", "asia-b"), wait_seconds=60),
        MachineType(type="e2-small", locations=("asia-b", "us-a"), wait_seconds=60),
        MachineType(type="e2-large", locations=("asia-b",)),
    ),
)


def plan(existing: int = 0, total: int | None = None, **allowed: Any) -> Plan:
    rows = tuple(
        MachineRow(
            name=f"orca-p-{n}",
            pool="p",
            number=n,
            provider="local",
            type="e2-small",
            location="us-a",
            created_at=NOW - timedelta(hours=1),
            uid=str(n),
            confirmed_at=NOW - timedelta(hours=1),
            first_seen_at=NOW - timedelta(hours=1),
            seen_at=NOW,
            slots=1,
            running=1,
        )
        for n in range(existing)
    )
    snapshot = Snapshot(
        now=NOW, stack_id="s", hearing_since=NOW, demand={"p": Demand(aged=9, waiting=9)}, machines=rows
    )
    return decide(snapshot, [POOL], replace(LIMITS, max_machines_total=total, allowed=Allowed(**allowed)))


def made(found: Plan) -> list[tuple[str, str]]:
    return [(c.type, c.location) for action in found.actions if isinstance(action, Make) for c in action.candidates]


def test_without_policies_the_first_type_is_tried_everywhere() -> None:
    assert made(plan()) == [("a3-huge", "us-a"), ("a3-huge", "asia-b")]


def test_a_type_that_the_policies_do_not_allow_is_skipped_and_the_report_says_so() -> None:
    found = plan(types=("e2-*",))
    assert made(found) == [("e2-small", "asia-b"), ("e2-small", "us-a")]
    assert found.reports[0].skipped == "skipped: a3-huge: the policies (machine-types) do not allow it"


def test_a_location_that_the_policies_do_not_allow_is_skipped() -> None:
    found = plan(types=("e2-*",), locations=("us-*",))
    assert made(found) == [("e2-small", "us-a")]
    assert "asia-b: the policies (machine-locations) do not allow it" in found.reports[0].skipped


def test_a_pool_of_which_nothing_is_allowed_makes_nothing_and_says_why() -> None:
    found = plan(types=("n2-*",))
    assert made(found) == []
    assert found.reports[0].message == (
        "the policies (machine-types, machine-locations) allow none of its types where it would have them"
    )


def test_a_worker_image_of_a_registry_that_is_not_allowed() -> None:
    found = plan(registries=("other.example",))
    assert made(found) == []
    assert found.reports[0].message == (
        "the policies (image-registries) do not allow its image registry.example/worker:1"
    )


def test_no_more_machines_than_allowed() -> None:
    [make] = [one for one in plan(existing=1, machines_per_pool=3).actions if isinstance(one, Make)]
    assert make.count == 2
    full = plan(existing=3, machines_per_pool=3)
    assert made(full) == []
    assert full.reports[0].message == "the pool has 3 of 3 machines (machine-counts of the policies)"
    together = plan(existing=3, total=9, machines=3)
    assert together.reports[0].message == "all pools together have 3 of 3 machines (machine-counts of the policies)"


def test_what_exists_already_stays() -> None:
    assert plan(existing=2, types=("n2-*",), locations=("eu-*",)).actions == ()


def test_a_run_whose_image_is_not_allowed_waits_and_is_passed_over() -> None:
    def queued(run: int, image: str) -> QueuedRun:
        return QueuedRun(
            run=run,
            start=0,
            pipeline="p",
            image=image,
            workers=0,
            allow_new_code=False,
            fill=False,
            max_runs=None,
            queued_at=NOW,
        )

    limits = RunLimits(
        sizes=Sizes(),
        start_seconds=600,
        stray_grace_seconds=60,
        stray_max=3,
        allowed=Allowed(registries=("registry.example",)),
    )
    found = decide_runs(RunSnapshot(now=NOW, queued=(queued(1, "python:3"), queued(2, "registry.example/a"))), limits)
    assert [run.run for run in found.admit] == [2]
    assert found.waiting == {1: "the policies (image-registries) do not allow its image python:3"}


def test_no_runtime_is_born_of_an_image_that_is_not_allowed() -> None:
    pool = RuntimePool(namespace="n", name="p", uid="u", environment="e", size=1)
    environment = Environment(namespace="n", name="e", image="python:3")
    snapshot = RuntimeSnapshot(now=NOW, pools=(pool,), environments={"e": environment})
    limits = RuntimeLimits(stray_grace_seconds=60, stray_max=3)
    assert len(decide_runtimes(snapshot, limits).births) == 1
    found = decide_runtimes(snapshot, replace(limits, allowed=Allowed(registries=("registry.example",))))
    assert found.births == ()
    assert "the policies (image-registries) do not allow image python:3" in found.statuses[0].status.message


class OneEnvironment:
    """A cluster with one environment and one pool of it; no database is asked before they are judged."""

    def get(self, _ref: object) -> dict[str, Any]:
        return {"metadata": {"namespace": "n", "name": "e"}, "spec": {"dockerImage": "python:3"}}

    def list(self, _kind: object, **_more: object) -> Any:
        metadata = {"namespace": "n", "name": "p", "uid": "u"}
        return SimpleNamespace(items=[{"metadata": metadata, "spec": {"environment": "e", "size": 0}}])


class NoDatabase:
    def transaction(self) -> Any:
        raise Transient("the database is asked")

    snapshot = statement = transaction


def test_no_runtime_is_started_cold_of_an_image_that_is_not_allowed() -> None:
    def hands(*registries: str) -> launch.LaunchHands:
        return launch.LaunchHands(
            database=NoDatabase(),  # type: ignore[arg-type]
            kube=OneEnvironment(),  # type: ignore[arg-type]
            namespace="n",
            stack_id="s",
            log=make_log(io.StringIO(), form="json"),
            allowed=Allowed(registries=registries),
        )

    request = launch.LaunchRequest(user="jane", environment="e")
    with pytest.raises(
        Refused, match=r"the policies \(image-registries\) do not allow image python:3 of environment e"
    ):
        launch._start_cold(hands("registry.example"), request)
    with pytest.raises(Transient, match="the database is asked"):
        launch._start_cold(hands(), request)
