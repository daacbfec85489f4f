"""The automation loop: lead or follow, pass after pass, until told to stop."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from types import FrameType

from orca_infra.db.connection import Session
from orca_infra.errors import NotLeader, OrcaError, Transient
from orca_infra.kube.client import Kube
from orca_infra.log import Log
from orca_infra.loop.cluster_passes import RunPasses, RuntimePasses
from orca_infra.loop.configuration import LiveConfig
from orca_infra.loop.leader import Leader, holder
from orca_infra.loop.passes import MachinePasses, PassResult, check_base
from orca_infra.machines.image_registry import RegistryArchitectures
from orca_infra.stack.engine import Engine
from orca_infra.surroundings import Surroundings

#: How soon a follower looks again whether the lead is free, and a leader whether a database that was away is back.
RETRY_SECONDS = 2.0
#: orca notifies this channel when a run was queued; its embedded tables do so by a trigger.
DEMAND_CHANNEL = "orca_demand"
_PRUNE_EVERY_PASSES = 240
#: Two passes are never closer than this, whatever comes due.
_LEAST_SECONDS = 0.2


class Loop:
    """One loop of any number; at any time at most one of them leads."""

    def __init__(self, surroundings: Surroundings, log: Log) -> None:
        """Raises SetupError and ConfigError when it could never make a pass."""
        self._surroundings = surroundings
        self._log = log
        self._live = LiveConfig(surroundings.settings.config_path)
        kubeconfig = surroundings.settings.kubeconfig
        # The provider reads the same file as this program's own client.
        self._engine = Engine(surroundings.engine, {"KUBECONFIG": str(kubeconfig)} if kubeconfig else {})
        self._leader = Leader(surroundings.url)
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._passes = MachinePasses(
            surroundings,
            self._engine,
            self._leader.verify,
            log,
            images=RegistryArchitectures(kept_seconds=surroundings.settings.image_seconds),
        )
        self._cluster = self._cluster_passes() if surroundings.settings.uses_cluster else []
        _check_base_soon(surroundings, self._engine)

    def run_once(self) -> PassResult:
        """One pass. Raises NotLeader when another loop leads."""
        if not self._leader.acquire():
            raise NotLeader(
                f"another loop leads this stack ({holder(self._surroundings.url)}); "
                "it makes its passes by itself, or stop it first"
            )
        try:
            result = self._passes.run(self._live.config)
            return replace(result, changed=result.changed + sum(passes.run() for passes in self._cluster))
        finally:
            self._leader.release()

    def run(self) -> None:
        """Passes until `stop`. Errors are said and the next pass tries again; only a stop ends it."""
        following = False
        while not self._stop.is_set():
            try:
                if not self._leader.acquire():
                    if not following:
                        self._log.info("following", leader=holder(self._surroundings.url))
                    following = True
                    self._stop.wait(RETRY_SECONDS)
                    continue
                following = False
                self._log.info("leading", family=self._surroundings.settings.stack, id=self._surroundings.stack_id)
                self._lead()
            except (NotLeader, Transient) as error:
                self._log.warning("not leading", why=str(error))
                self._stop.wait(RETRY_SECONDS)
            finally:
                self._leader.release()

    def stop(self) -> None:
        """Begin no new work; what the engine is at is interrupted once, and waited for."""
        self._stop.set()
        self._wake.set()
        self._engine.interrupt()

    def stop_on_signals(self) -> None:
        """SIGTERM and SIGINT stop the loop; a second one changes nothing, since the engine is already ending."""

        def on_signal(number: int, _frame: FrameType | None) -> None:
            if not self._stop.is_set():
                self._log.info("stopping", signal=signal.Signals(number).name)
                # Not in the handler's own stack: the locks it needs may be held by the code it interrupted.
                threading.Thread(target=self.stop, name="stop").start()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, on_signal)

    def _cluster_passes(self) -> list[RunPasses | RuntimePasses]:
        """The passes over what is on Kubernetes. Raises SetupError when there is no cluster to be had."""
        settings = self._surroundings.settings
        kube = Kube.connect(kubeconfig=settings.kubeconfig)
        recorded = self._passes.recorded
        passes: list[RunPasses | RuntimePasses] = []
        if settings.runner is not None:
            passes.append(
                RunPasses(
                    self._surroundings,
                    kube,
                    recorded,
                    environ=os.environ,
                    verify=self._leader.verify,
                    log=self._log,
                    placements=lambda: self._live.config.pipelines,
                )
            )
        if settings.runtimes_namespace is not None:
            passes.append(RuntimePasses(self._surroundings, kube, recorded, verify=self._leader.verify, log=self._log))
        return passes

    def _lead(self) -> None:
        over = threading.Event()
        threading.Thread(target=self._listen, args=(over,), name="listen", daemon=True).start()
        watches = [watch for passes in self._cluster for watch in passes.watches(self._wake.set)]
        for watch in watches:
            watch.start()
        try:
            self._passes_in_turn()
        finally:
            over.set()
            for watch in watches:
                watch.stop()

    def _passes_in_turn(self) -> None:
        count = 0
        while not self._stop.is_set():
            self._wake.clear()
            self._reload()
            wait = self._machines_once()
            for passes in self._cluster:
                wait = min(wait, self._given_up_alone(passes.run))
                if passes.next_in_seconds is not None:
                    wait = min(wait, passes.next_in_seconds)
            if count % _PRUNE_EVERY_PASSES == 0:
                self._given_up_alone(self._prune)
            count += 1
            if not self._stop.is_set():
                # However much happens, one pass is never right behind another.
                self._stop.wait(_LEAST_SECONDS)
                self._wake.wait(max(wait - _LEAST_SECONDS, 0))

    def _machines_once(self) -> float:
        """One pass over the pools; gives the seconds until the next at the latest."""
        wait = self._surroundings.settings.scale_seconds

        def make() -> int:
            nonlocal wait
            result = self._passes.run(self._live.config)
            if result.next_in_seconds is not None:
                wait = min(wait, result.next_in_seconds)
            return result.changed

        until_next = self._given_up_alone(make)  # first: it is what says how long to wait
        return min(wait, until_next)

    def _given_up_alone(self, make: Callable[[], int]) -> float:
        """Make a pass; one that fails is said and keeps no other from being made. Gives the seconds until the next.

        A pass that changed something is followed by another at once: what it reports is then current, and what its changes
        make possible is not kept waiting.
        """
        try:
            return _LEAST_SECONDS if make() else self._surroundings.settings.scale_seconds
        except NotLeader:
            raise
        except OrcaError as error:
            if not self._stop.is_set():
                self._log.warning("pass given up", kind=type(error).__name__, why=str(error))
            return RETRY_SECONDS
        except Exception as error:  # noqa: BLE001  (a defect in one pass keeps no other from its work; it is not hidden)
            self._log.warning(
                "pass failed: a defect of this program", kind=type(error).__name__, traceback=traceback.format_exc()
            )
            return RETRY_SECONDS

    def _reload(self) -> None:
        if not self._live.reload():
            return
        if self._live.error:
            self._log.warning("orca.toml is bad: the last good one stays in force", why=self._live.error)
        else:
            self._log.info("orca.toml was read anew", pools=[pool.name for pool in self._live.config.pools])

    def _prune(self) -> int:
        for passes in (self._passes, *self._cluster):
            passes.prune()
        return 0

    def _listen(self, over: threading.Event) -> None:
        """Have a NOTIFY hasten the next pass, and nothing more: without it the pass comes in its period."""
        while not over.is_set():
            try:
                session = Session(self._surroundings.url, "orca-infra listener")
                session.listen(DEMAND_CHANNEL)
                while not over.is_set():
                    if session.notified(RETRY_SECONDS):
                        self._wake.set()
                session.close()
            except Transient:
                over.wait(RETRY_SECONDS)


def _check_base_soon(surroundings: Surroundings, engine: Engine) -> None:
    """Check the base's state; once more after a moment when the state's backend is only just being made by another loop."""
    try:
        check_base(surroundings, engine)
    except Transient:
        time.sleep(RETRY_SECONDS)
        check_base(surroundings, engine)
