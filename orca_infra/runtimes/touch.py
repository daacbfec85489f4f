"""Make a Pod's kubelet look at once: an annotation of the Pod is changed, and changed again a second later.

The second time is for a kubelet that synced before it heard of the Secret. It gives way to launches that are under way in
this process, for a few seconds at the most: nobody waits for it, and at its worst it saves the kubelet's own period.
"""

from __future__ import annotations

import contextlib
import heapq
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from uuid import UUID

from orca_infra.errors import Conflict, OrcaError
from orca_infra.kube.client import Kube
from orca_infra.kube.kinds import POD, Ref
from orca_infra.runtimes.observe import read_object
from orca_infra.runtimes.render import RUNTIME_ANNOTATION, TOUCHED_ANNOTATION

AGAIN_SECONDS = 1.0
#: How long launches under way may put it off.
GIVES_WAY_SECONDS = 4.0
#: More than these waiting means that the API server does not answer: the oldest are let go, and the kubelet's period serves.
_WAITING_MOST = 10_000


class PodLost(Exception):
    """The Pod that was claimed died, or is going away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Touch:
    """Which Pod, and for which runtime."""

    kube: Kube
    namespace: str
    pod: str
    uid: str | None
    runtime: UUID


def touch(one: Touch) -> None:
    """Change an annotation of that very Pod.

    Raises PodLost when it is gone, another has its name, or it cannot serve; else what patching raises.
    """
    ref = Ref(kind=POD, namespace=one.namespace, name=one.pod)
    annotations = {RUNTIME_ANNOTATION: str(one.runtime), TOUCHED_ANNOTATION: datetime.now(UTC).isoformat()}
    try:
        found = one.kube.patch(ref, {"metadata": {"annotations": annotations}}, uid=one.uid)
    except Conflict as error:
        raise PodLost(str(error)) from None
    pod = read_object({"kind": "Pod", **found})
    if not pod.can_serve:
        raise PodLost(f"its Pod is {pod.problem}")


class Touches:
    """The second touches of one process: one thread, and only while there are any."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[tuple[float, int, Touch]] = []
        self._order = count()
        self._launches = 0
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def launching(self) -> Iterator[None]:
        """A launch is under way in the block."""
        with self._changed:
            self._launches += 1
        try:
            yield
        finally:
            with self._changed:
                self._launches -= 1
                if not self._launches:
                    self._changed.notify_all()

    def again(self, one: Touch) -> None:
        """Have it touched once more, in a second."""
        with self._changed:
            heapq.heappush(self._waiting, (time.monotonic() + AGAIN_SECONDS, next(self._order), one))
            if len(self._waiting) > _WAITING_MOST:
                heapq.heappop(self._waiting)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="touches", daemon=True)
                self._thread.start()

    def finish(self, timeout_seconds: float = AGAIN_SECONDS + GIVES_WAY_SECONDS) -> None:
        """Wait for those that wait; for a process that is about to end."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_seconds)

    def _run(self) -> None:
        while (one := self._next()) is not None:
            with contextlib.suppress(OrcaError, PodLost):
                touch(one)

    def _next(self) -> Touch | None:
        """The next whose time has come; None when none is left, and the thread is over."""
        with self._changed:
            while self._waiting:
                due_seconds = self._waiting[0][0]
                wait_seconds = due_seconds - time.monotonic()
                if wait_seconds <= 0 and self._launches:
                    wait_seconds += GIVES_WAY_SECONDS
                if wait_seconds <= 0:
                    return heapq.heappop(self._waiting)[2]
                self._changed.wait(wait_seconds)
            self._thread = None
            return None


#: Of this process.
TOUCHES = Touches()
