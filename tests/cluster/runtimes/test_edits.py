"""Edits with kubectl, and the loop as a process of its own: what is edited is seen at once, and the status says so."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from orca_infra.kube.kinds import RUNTIME_POOL, Ref
from orca_infra.runtimes import apply
from orca_infra.runtimes.rows import record_pods
from orca_infra.testing.cluster import TestCluster

if TYPE_CHECKING:
    from tests.cluster.runtimes.conftest import Room

POOL = "python-simple-pool"


@pytest.fixture
def loop(room: Room) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts `orca-infra run` on this room. Its passes are an hour apart: only what it hears makes one sooner."""
    with room.loops() as start:
        yield start


def seen(room: Room) -> bool:
    """Whether the pool's status speaks of its present spec."""
    pool = room.kube.get(Ref(kind=RUNTIME_POOL, namespace=room.namespace, name=POOL))
    assert pool is not None
    return bool((pool.get("status") or {}).get("observedGeneration") == pool["metadata"]["generation"])


def is_settled(room: Room, *, warm: int, assigned: int) -> bool:
    return seen(room) and room.counts()[:2] == (warm, assigned) and len(room.pods()) == warm + assigned


def test_what_is_edited_with_kubectl_is_seen_by_the_loop_that_leads(
    room: Room, cluster: TestCluster, loop: Callable[[], subprocess.Popen[bytes]]
) -> None:
    """With field case W1 on the way: two loops, quick requests with one key, and one Pod for the launch."""
    taken: set[str] = set()
    running = [loop(), loop()]  # of which one leads
    room.make_environment("registry.example/runtime:1")
    room.make_pool(size=2)

    def comes(state: Callable[[], object]) -> None:
        def look() -> object:
            for process in running:
                assert process.poll() is None, "".join(log.read_text() for log in room.folder.glob("loop-*.log"))
            assert len([name for name in room.pods() if name not in taken]) <= 3
            return state()

        room.wait_until(look, 180)

    comes(lambda: seen(room) and room.counts()[:2] == (2, 0) and len(room.warm()) == 2)
    cluster.kubectl("scale", "rp", POOL, "--replicas=3", "-n", room.namespace)
    comes(lambda: seen(room) and room.counts()[:2] == (3, 0))
    # As `kubectl edit` sends it. An environment's edit reaches what is born afterwards.
    environment = json.dumps({"spec": {"dockerImage": "registry.example/runtime:2"}})
    cluster.kubectl("patch", "re", "python-simple-env", "--type=merge", "-p", environment, "-n", room.namespace)
    with ThreadPoolExecutor(2) as threads:
        launches = list(threads.map(lambda key: room.launch(idempotency_key=key), ["k", "k"]))
    taken |= {one.pod for one in launches}
    assert len(taken) == 1
    comes(lambda: room.counts()[:2] == (3, 1))
    images = sorted(room.image(pod) for pod in room.pods().values())
    assert images == ["registry.example/runtime:1"] * 3 + ["registry.example/runtime:2"]
    # They die without a word, one after the other; another goes on, and nothing is lost or made twice.
    for size in (1, 2):
        process = running.pop(0)
        process.kill()
        process.wait()
        spec = json.dumps({"spec": {"size": size, "burningRate": 3}})
        cluster.kubectl("patch", "rp", POOL, "--type=merge", "-p", spec, "-n", room.namespace)
        running.append(loop())
        comes(partial(is_settled, room, warm=size, assigned=1))
        assert room.launch(idempotency_key="k").pod in taken
    cluster.kubectl("delete", "rp", POOL, "-n", room.namespace)
    comes(lambda: set(room.pods()) == taken)


def test_an_edit_is_said_to_be_seen_before_what_it_asks_for_is_born_and_made(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    room.make_environment()
    room.make_pool(size=1)
    at_births: list[dict[str, Any]] = []

    def looked(*given: Any, **more: Any) -> Any:
        at_births.append(room.status())
        return record_pods(*given, **more)

    monkeypatch.setattr(apply, "record_pods", looked)
    room.run_pass()
    assert at_births[0]["observedGeneration"] == 1
    assert "Born" in room.events()
