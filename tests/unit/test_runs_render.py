"""The objects of a run's cluster, as they are declared."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from orca_infra.kube.labels import JOB_UID_PLACEHOLDER, ROLE_LABEL, STACK_LABEL
from orca_infra.runs.model import PodPlacement, RunSpec, Sizes
from orca_infra.runs.render import RunSettings, cluster_name, render
from orca_infra.stack.cohorts import fill

SETTINGS = RunSettings(
    namespace="orca-runs",
    binary="orca",
    secret="orca-db",
    dista_port=6390,
    deadline_seconds=86400,
    sizes=Sizes(),
    environment={"TZ": "UTC"},
)
LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")


def objects(**more: Any) -> list[dict[str, Any]]:
    spec = RunSpec(**{"run": 7, "start": 2, "pipeline": "reports", "image": "i:1", "workers": 2, **more})
    return [dict(manifest) for manifest in render(spec, SETTINGS, "stackid")]


def test_a_run_with_tasks_has_a_driver_a_head_with_its_service_and_workers() -> None:
    assert [(o["kind"], o["metadata"]["name"]) for o in objects()] == [
        ("Job", "orca-7-2"),
        ("Service", "orca-7-2-head"),
        ("Pod", "orca-7-2-head"),
        ("Pod", "orca-7-2-worker-0"),
        ("Pod", "orca-7-2-worker-1"),
    ]


def test_a_run_without_tasks_has_its_driver_alone_and_no_head_to_look_for() -> None:
    (job,) = objects(workers=0)
    names = [v["name"] for v in job["spec"]["template"]["spec"]["containers"][0]["env"]]
    assert names == ["TZ", "ORCA_DB"]


def test_everything_carries_the_stack_the_run_its_start_its_pipeline_and_its_role() -> None:
    for item in objects():
        labels = item["metadata"]["labels"]
        assert labels[STACK_LABEL] == "stackid"
        assert (labels["orca.run"], labels["orca.start"], labels["orca.pipeline"]) == ("7", "2", "reports")
    roles = [item["metadata"]["labels"][ROLE_LABEL] for item in objects()]
    assert roles == ["driver", "head", "head", "worker", "worker"]
    assert objects()[0]["spec"]["template"]["metadata"]["labels"][ROLE_LABEL] == "driver"


def test_what_the_job_owns_names_it_by_uid_and_not_as_its_controller() -> None:
    job, *owned = objects()
    assert "ownerReferences" not in job["metadata"]
    for item in owned:
        (owner,) = item["metadata"]["ownerReferences"]
        assert owner == {"apiVersion": "batch/v1", "kind": "Job", "name": "orca-7-2", "uid": JOB_UID_PLACEHOLDER}
        assert fill(item, "u-1")["metadata"]["ownerReferences"][0]["uid"] == "u-1"


def test_the_driver_alone_gets_the_database_and_only_through_the_secret() -> None:
    text = json.dumps(objects())
    assert text.count('"ORCA_DB"') == 1
    driver = objects()[0]["spec"]["template"]["spec"]["containers"][0]
    reference = next(v for v in driver["env"] if v["name"] == "ORCA_DB")
    assert reference == {"name": "ORCA_DB", "valueFrom": {"secretKeyRef": {"name": "orca-db", "key": "url"}}}


def test_driver_and_workers_find_the_head_and_every_pod_gets_the_schedulers_variables() -> None:
    job, _, head, worker, _ = objects()
    pods = [job["spec"]["template"]["spec"], head["spec"], worker["spec"]]
    environments = [{v["name"]: v.get("value") for v in pod["containers"][0]["env"]} for pod in pods]
    assert [e.get("DISTA_HEAD") for e in environments] == ["orca-7-2-head:6390", None, "orca-7-2-head:6390"]
    assert [e["TZ"] for e in environments] == ["UTC"] * 3
    assert environments[1]["DISTA_PORT"] == "6390"


def test_a_job_has_its_deadline_and_never_two_drivers_at_a_time() -> None:
    spec = objects()[0]["spec"]
    assert (spec["activeDeadlineSeconds"], spec["ttlSecondsAfterFinished"], spec["backoffLimit"]) == (86400, 600, 0)
    assert spec["podReplacementPolicy"] == "Failed"
    assert spec["template"]["spec"]["restartPolicy"] == "Never"


@pytest.mark.parametrize(("allowed", "more"), [(True, ["--allow-new-code"]), (False, [])])
def test_new_code_is_allowed_to_the_driver_alone(allowed: bool, more: list[str]) -> None:
    job, _, head, worker, _ = objects(allow_new_code=allowed)
    assert job["spec"]["template"]["spec"]["containers"][0]["command"] == ["orca", "resume", "7", *more]
    assert "--allow-new-code" not in json.dumps([head, worker])


def test_every_container_has_requests_and_no_more_rights_than_it_needs() -> None:
    job, _, head, worker, _ = objects()
    requests = []
    for pod in (job["spec"]["template"]["spec"], head["spec"], worker["spec"]):
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        (container,) = pod["containers"]
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        requests.append(container["resources"]["requests"])
    assert requests == [
        {"cpu": "500m", "memory": "512Mi"},
        {"cpu": "250m", "memory": "512Mi"},
        {"cpu": "1", "memory": "512Mi"},
    ]
    assert Sizes().cpu_of(2) == 500 + 250 + 2 * 1000
    assert Sizes().cpu_of(0) == 500


@pytest.mark.parametrize("pipeline", ["Jane.Doe", "gpu_A100", "a" * 300, "קבוצה", 'quo"te\nline', "", "a b"])
def test_names_and_labels_are_valid_for_every_pipeline(pipeline: str) -> None:
    for item in objects(pipeline=pipeline or "p"):
        assert all(LABEL.fullmatch(value) for value in item["metadata"]["labels"].values())
        assert len(item["metadata"]["name"]) <= 63


def test_names_are_valid_for_the_largest_run() -> None:
    assert len(cluster_name(2**63 - 1, 2**31 - 1) + "-worker-9999") <= 63


def test_a_pipelines_own_table_says_where_its_pods_go_and_nothing_else_does() -> None:
    plain = json.dumps(objects())
    for key in ("imagePullSecrets", "nodeSelector", "tolerations", "priorityClassName", "runAsNonRoot"):
        assert key not in plain
    placement = PodPlacement(
        image_pull_secrets=("registry",), node_selector={"disk": "ssd"}, tolerations=({"key": "gpu"},),
        priority_class="low", non_root=True,
    )  # fmt: skip
    spec = RunSpec(run=7, start=1, pipeline="p", image="i", workers=1)
    job, _, head, worker = render(spec, SETTINGS, "stackid", placement)
    for pod in (job["spec"]["template"]["spec"], head["spec"], worker["spec"]):
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
        assert pod["nodeSelector"] == {"disk": "ssd"}
        assert pod["tolerations"] == [{"key": "gpu"}]
        assert pod["priorityClassName"] == "low"
        assert pod["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}, "runAsNonRoot": True}


@pytest.mark.parametrize(
    ("for_all", "stated", "non_root"),
    [(False, None, None), (True, None, True), (True, False, None), (False, True, True), (False, False, None)],
)
def test_root_is_kept_out_where_the_setting_says_so_and_its_pipelines_table_does_not_say_otherwise(
    *, for_all: bool, stated: bool | None, non_root: bool | None
) -> None:
    spec = RunSpec(run=7, start=1, pipeline="p", image="i", workers=1)
    settings = replace(SETTINGS, non_root=for_all)
    job, _, *pods = render(spec, settings, "stackid", PodPlacement(non_root=stated))
    for pod in (job["spec"]["template"], *pods):
        assert pod["spec"]["securityContext"].get("runAsNonRoot") is non_root
