"""What goes wrong in a soak: faults of the cloud, of people, of processes, and outages, which last a moment."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from orca_infra.errors import OrcaError
from orca_infra.kube.kinds import JOB, POD, Kind, Object, Ref
from orca_infra.kube.labels import STACK_LABEL
from orca_infra.process import boot_id
from orca_infra.testing.standing import StandingWorld

_SECONDS = (0.5, 3.0)
_CHANCE = 0.25
_ENGINES: Any = (
    "select pid from orca.engine_operations where ended_at is null and pid is not null and boot_id = %(boot)s"
)


class Faults:
    """One fault after the other, of a seed's choice; at most one outage at a time.

    Attributes:
        met: how often each came.
        touched: runs to which something was done that may end a start.

    """

    def __init__(self, world: StandingWorld, rng: random.Random) -> None:
        self.met: Counter[str] = Counter()
        self.touched: set[int] = set()
        self._world = world
        self._rng = rng
        self._end: Callable[[], object] | None = None
        self._end_at = 0.0

    def come_and_go(self) -> None:
        """Perhaps begin one, or end the outage whose time is over."""
        if self._end is not None:
            if time.monotonic() > self._end_at:
                self._end_outage()
        elif self._rng.random() < _CHANCE:
            fault = self._rng.choice(self.kinds)
            self.met[fault.__name__] += 1
            with contextlib.suppress(OrcaError):
                fault()

    def heal(self) -> None:
        """No more faults."""
        self._end_outage()
        self._world.postgres.heal()
        self._world.server.heal()
        (self._world.cloud.folder / "faults.json").unlink(missing_ok=True)

    @property
    def kinds(self) -> tuple[Callable[[], None], ...]:
        return (
            *(self.stock_out, self.quota, self.refusal, self.cloud_away, self.slow_create, self.delete_fails),
            *(self.preempted, self.stopped, self.labels_lost),
            *(self.connections_end, self.engine_killed, self.database_hangs, self.database_slow),
            *(self.pod_deleted, self.job_deleted, self.driver_fails, self.pool_paused),
            *(self.server_away, self.server_throttles, self.server_fails, self.answers_lost),
            *(self.server_refuses, self.lists_cut, self.watches_silent, self.server_hangs_up),
        )

    def stock_out(self) -> None:
        self._world.cloud.arm("create", "LOCATION_OUT_OF_CAPACITY", location=self._rng.choice("ab"), times=2)

    def quota(self) -> None:
        self._world.cloud.arm("create", "QUOTA_EXCEEDED")

    def refusal(self) -> None:
        self._world.cloud.arm("create", "INVALID_REQUEST")

    def cloud_away(self) -> None:
        self._world.cloud.arm("list", "UNAVAILABLE", times=2)

    def slow_create(self) -> None:
        self._world.cloud.arm("create", "", seconds=1.0)

    def delete_fails(self) -> None:
        self._world.cloud.arm("delete", "UNAVAILABLE")

    def preempted(self) -> None:
        self._to_a_machine(self._world.cloud.preempt)

    def stopped(self) -> None:
        self._to_a_machine(self._world.cloud.stop)

    def labels_lost(self) -> None:
        self._to_a_machine(lambda name: self._world.cloud.relabel(name, {}))

    def _to_a_machine(self, act: Callable[[str], object]) -> None:
        if machines := self._world.cloud.list():
            name = self._rng.choice(machines).name
            runs = "select id from orca.runs where worker = %(name)s"
            before = self._world.rows(runs, name=name)
            act(name)
            self.touched |= {row["id"] for row in [*before, *self._world.rows(runs, name=name)]}

    def connections_end(self) -> None:
        """Every connection ends, that of the lead among them."""
        self._world.end_connections()

    def engine_killed(self) -> None:
        """The engines' processes are killed a moment later, if there are any then."""
        delay = self._rng.uniform(0.1, 1.5)

        def kill() -> None:
            time.sleep(delay)
            with contextlib.suppress(OrcaError, ProcessLookupError):
                for row in self._world.rows(_ENGINES, boot=boot_id()):
                    os.killpg(row["pid"], signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()

    def pool_paused(self) -> None:
        self._world.execute("insert into orca.pool_pauses (pool) values ('east') on conflict do nothing")
        self._begin_outage(lambda: self._world.execute("delete from orca.pool_pauses"))

    def pod_deleted(self) -> None:
        """A head, a worker, a driver's Pod or a runtime, by somebody's kubectl."""
        self._delete_one(POD, self._rng.choice((self._world.runs_namespace, self._world.runtimes_namespace)))

    def job_deleted(self) -> None:
        self._delete_one(JOB, self._world.runs_namespace)

    def _delete_one(self, kind: Kind, namespace: str) -> None:
        if items := self._ours(kind, namespace):
            metadata = self._rng.choice(items)["metadata"]
            if run := metadata["labels"].get("orca.run"):
                self.touched.add(int(run))
            with contextlib.suppress(OrcaError):
                self._world.kube.delete(Ref(kind=kind, namespace=namespace, name=metadata["name"]))

    def driver_fails(self) -> None:
        """A driver's Pod ends with code 1, and its run says nothing."""
        drivers = [
            pod
            for pod in self._ours(POD, self._world.runs_namespace)
            if pod["metadata"]["labels"].get("orca.role") == "driver" and "deletionTimestamp" not in pod["metadata"]
        ]
        if drivers:
            metadata = self._rng.choice(drivers)["metadata"]
            self.touched.add(int(metadata["labels"]["orca.run"]))
            annotations = {"orca.testing/complete-after": "0", "orca.testing/exit-code": "1"}
            ref = Ref(kind=POD, namespace=self._world.runs_namespace, name=metadata["name"])
            self._world.kube.patch(ref, {"metadata": {"annotations": annotations}})

    def database_hangs(self) -> None:
        self._set(self._world.postgres, hangs=True)

    def database_slow(self) -> None:
        self._set(self._world.postgres, delay_seconds=0.02)

    def server_away(self) -> None:
        self._set(self._world.server, away=True)
        self._world.server.hang_up()

    def server_throttles(self) -> None:
        self._set(self._world.server, throttled=0.3)

    def server_fails(self) -> None:
        self._set(self._world.server, failing=0.3)

    def answers_lost(self) -> None:
        self._set(self._world.server, cut=0.3)

    def server_refuses(self) -> None:
        self._set(self._world.server, refuses=self._rng.choice((401, 403)))

    def lists_cut(self) -> None:
        self._set(self._world.server, halves=True)

    def watches_silent(self) -> None:
        self._set(self._world.server, silent=True)

    def server_hangs_up(self) -> None:
        self._world.server.hang_up()

    def _set(self, proxy: object, **faults: Any) -> None:
        def end() -> None:
            for name, value in faults.items():
                setattr(proxy, name, type(value)())

        for name, value in faults.items():
            setattr(proxy, name, value)
        self._begin_outage(end)

    def _begin_outage(self, end: Callable[[], object]) -> None:
        self._end = end
        self._end_at = time.monotonic() + self._rng.uniform(*_SECONDS)

    def _end_outage(self) -> None:
        if self._end is not None:
            self._end()
        self._end = None

    def _ours(self, kind: Kind, namespace: str) -> list[Object]:
        labels = {STACK_LABEL: self._world.surroundings.stack_id}
        return list(self._world.kube.list(kind, namespace=namespace, labels=labels).items)
