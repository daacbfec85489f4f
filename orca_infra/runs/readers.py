"""A few threads that read logs, and that keep no process from ending."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future


class Readers:
    """At most so many daemon threads, made as they are needed; unlike an executor's they are not waited for at the exit."""

    def __init__(self, name: str, most: int) -> None:
        self._name, self._most = name, most
        self._queue: queue.SimpleQueue[tuple[Future[None], Callable[[], None]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Have it done after what was there before."""
        done: Future[None] = Future()
        with self._lock:
            self._queue.put((done, work))
            if self._threads < self._most:
                self._threads += 1
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
        return done

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._queue.empty():
                    self._threads -= 1
                    return
                done, work = self._queue.get()
            if not done.set_running_or_notify_cancel():
                continue
            try:
                work()
            except BaseException as error:  # noqa: BLE001  (whoever waits for it is told)
                done.set_exception(error)
            else:
                done.set_result(None)
