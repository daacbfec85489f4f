"""Hostile names and labels around run clusters, on a real API server with the real engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orca_infra.kube.kinds import POD, Ref
from orca_infra.kube.labels import PIPELINE_LABEL, ROLE_LABEL, RUN_LABEL, STACK_LABEL, START_LABEL
from orca_infra.names import label_value

if TYPE_CHECKING:
    from tests.cluster.runs.conftest import Room

PIPELINES = [
    'it\'s "quoted"; drop table orca.runs; --',
    "two\nlines\r\n",
    "\u202eright to left\u202c שלום",
    "%s %(name)s {name} ${HOME} \\",
    "../../secrets",
    "n" * 2000,
]


def test_pipelines_of_every_name_get_their_clusters_and_one_that_is_refused_keeps_no_other_waiting(room: Room) -> None:
    room.queue("bad image", workers=0)
    with room.database.transaction() as transaction:
        transaction.run("update orca.pipelines set image = 'no image\nat all' where name = 'bad image'")
    for name in PIPELINES:
        room.queue(name, workers=0)
    room.passes.run()
    jobs = [item for item in room.objects() if item["kind"] == "Job"]
    found = {job["metadata"]["labels"][PIPELINE_LABEL] for job in jobs}
    assert {label_value(name) for name in PIPELINES} <= found
    assert len({label_value(name) for name in PIPELINES}) == len(PIPELINES)
    states = room.rows("select pipeline, state from orca.runs")
    assert {row["pipeline"] for row in states if row["state"] == "running"} >= set(PIPELINES)


def test_foreign_objects_with_a_runs_labels_neither_end_it_nor_go_with_it(room: Room) -> None:
    room.queue(workers=1)
    room.passes.run()
    [run] = [row["id"] for row in room.rows("select id from orca.runs")]
    labels = {STACK_LABEL: room.surroundings.stack_id, RUN_LABEL: str(run), START_LABEL: "1"}
    for role in ("head", "driver", "worker"):
        plant(room, f"theirs-{role}", {**labels, ROLE_LABEL: role})
    # One of theirs that has failed is no head that was lost.
    room.kube.patch(
        Ref(kind=POD, namespace=room.namespace, name="theirs-head"),
        {"status": {"phase": "Failed"}},
        subresource="status",
    )
    plan = room.passes.decide().plan
    assert plan.endings == ()
    assert {item.name for item in plan.follow} & {"theirs-driver"} == set()
    room.end(run)
    swept = room.passes.decide().plan.sweeps
    assert swept
    assert not [item.name for sweep in swept for item in sweep.objects if item.name.startswith("theirs")]


def plant(room: Room, name: str, labels: dict[str, str]) -> dict[str, Any]:
    """Somebody's own Pod."""
    return room.kube.create(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": room.namespace, "labels": labels},
            "spec": {"containers": [{"name": "c", "image": "x"}]},
        }
    )
