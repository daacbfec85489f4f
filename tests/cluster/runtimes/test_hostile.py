"""Hostile input on a real API server: what a pool may say, users of every name, and labels on what is not ours."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from orca_infra.errors import OrcaError, Refused
from orca_infra.kube.kinds import POD, SECRET, Ref
from orca_infra.kube.labels import ROLE_LABEL, STACK_LABEL
from orca_infra.runtimes.launch import LaunchRequest, launch
from orca_infra.runtimes.render import user_label
from orca_infra.testing.cluster import TestCluster

from .conftest import STACK_ID, Room

OURS = {STACK_LABEL: STACK_ID, ROLE_LABEL: "runtime"}
USERS = [
    'it\'s "quoted"; drop table orca.runtimes; --',
    "two\nlines",
    "\u202eright to left\u202c שלום",
    "%s %(name)s {name} \\",
    "../../secrets",
    "a,datalayer.io/user!=a",
    "n" * 1000,
]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"size": 10**9}, "should be less than or equal to 10000"),
        ({"size": -1}, "should be greater than or equal to 0"),
        ({"burningRate": 1e300}, "should be less than or equal to 1e+09"),
        ({"cull": {"seconds": 1e300}}, "should be less than or equal to"),
    ],
)
def test_a_pool_that_asks_for_what_cannot_be_is_refused_by_the_api_server(room: Room, spec: Any, says: str) -> None:
    with pytest.raises(OrcaError) as refused:
        room.make_pool(**spec)
    assert says in str(refused.value)


def test_users_of_every_name_get_a_runtime_with_their_own_secrets(room: Room) -> None:
    room.fill(size=len(USERS))
    for number, user in enumerate(USERS):
        room.user_secret(f"of-{number}", user_label(user), mine=str(number))
    taken = [room.launch(user=user, idempotency_key=user[:400]) for user in USERS]
    assert len({one.pod for one in taken}) == len(USERS)
    for number, one in enumerate(taken):
        assert one.warm
        assert room.secret_values(one.pod) == {"mine": str(number)}
        assert room.runtime(one.id)["user_name"] == USERS[number]
    with pytest.raises(Refused, match="has 10000 bytes, more than 1000"):
        room.launch(user="n" * 10_000)
    with pytest.raises(Refused, match="cannot be the name of an object"):
        launch(room.launching, LaunchRequest(environment="../../secrets/x", user="jane"))


def test_an_environment_that_is_nested_thousands_deep_keeps_no_other_from_being_read(
    room: Room, cluster: TestCluster
) -> None:
    """Nobody checks what a definition keeps; Python's reader gives up at a thousand."""
    deep = b'{"a":' * 3000 + b"1" + b"}" * 3000
    head = b'{"apiVersion":"datalayer.io/v1","kind":"RuntimeEnvironment","metadata":{"name":"deep"},"spec":{"dockerImage":"x"'
    path = f"/apis/datalayer.io/v1/namespaces/{room.namespace}/runtime-environments"
    cluster.api.text("POST", path, head + b',"snippets":' + deep + b"}}")
    room.fill(size=1)
    assert room.launch().warm


def plant(room: Room, name: str, labels: dict[str, str], **metadata: Any) -> str:
    """Somebody's own Pod; gives its uid."""
    container = {"name": "main", "image": "registry.example/their:1"}
    made = room.kube.create(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": room.namespace, "labels": labels, **metadata},
            "spec": {"containers": [container], "terminationGracePeriodSeconds": 0},
        }
    )
    return str(made["metadata"]["uid"])


def test_labels_on_many_foreign_objects_get_none_of_them_deleted_and_are_held_for_an_operator(room: Room) -> None:
    room.limits = replace(room.limits, stray_max=3)
    room.fill(size=2)
    theirs = {name: plant(room, name, OURS) for name in ("a", "b", "c")}
    theirs |= {
        name: plant(room, name, {**OURS, "orca.pool": "python-simple-pool"}) for name in ("orca-runtime-x-7", "e")
    }
    owner = {"apiVersion": "v1", "kind": "Pod", "name": "a", "uid": theirs["a"]}
    others = {
        "no-role": plant(room, "no-role", {STACK_LABEL: STACK_ID}),
        "another-stack": plant(room, "another-stack", {**OURS, STACK_LABEL: "anotherstackof22"}),
        "owned": plant(room, "owned", OURS, ownerReferences=[owner]),
    }
    time.sleep(room.limits.stray_grace_seconds + 1)
    for _ in range(3):
        plan = room.run_pass()
        assert plan.strays == ()
    assert {stray.name for stray in plan.strays_held} == set(theirs)
    # (That the pass says so in log and status is the loop's: loop/strays.py.)
    # Nothing else suffers: a launch takes one of ours, the pool is filled again, and none of theirs counts in it.
    assert room.launch().pod not in theirs
    room.until(lambda: len(room.warm()) == 2)
    assert room.counts()[:2] == (2, 1)
    assert {
        name: pod["metadata"]["uid"] for name, pod in room.pods().items() if name in theirs | others
    } == theirs | others
    # Few enough to be strays, they go, once the passes see that both labels are off; what only looks alike stays.
    for name in ("a", "b"):
        room.kube.patch(
            Ref(kind=POD, namespace=room.namespace, name=name), {"metadata": {"labels": {ROLE_LABEL: None}}}
        )
    room.until(lambda: not {"c", "e", "orca-runtime-x-7"} & room.pods().keys())
    assert {"a", "b", *others} <= room.pods().keys()


def test_a_secret_that_carries_our_labels_and_the_name_of_a_pod_is_no_ones_to_be_given(room: Room) -> None:
    """Whoever can write Secrets here could give one the name of the next Pod: its launch notices that it is another's."""
    room.fill(size=2)
    first, second = sorted(room.warm())
    room.kube.create(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": first, "namespace": room.namespace},
            "stringData": {"x": "1"},
        }
    )
    assert room.launch(secrets={"mine": "2"}).pod == second
    assert room.secret_values(second) == {"mine": "2"}
    assert room.kube.get(Ref(kind=SECRET, namespace=room.namespace, name=first)) is not None
