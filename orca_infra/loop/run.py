"""The automation loop: lead or follow, pass after pass, until told to stop."""

from __future__ import annotations

import signal
import threading
from types import FrameType

from orca_infra.errors import NotLeader, OrcaError, SetupError, Transient
from orca_infra.log import Log
from orca_infra.loop.configuration import LiveConfig
from orca_infra.loop.leader import Leader, holder
from orca_infra.loop.passes import MachinePasses, PassResult, check_base
from orca_infra.stack.engine import Engine
from orca_infra.surroundings import Surroundings

#: How soon a follower looks again whether the lead is free, and a leader whether a database that was away is back.
RETRY_SECONDS = 2.0
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
        self._engine = Engine(surroundings.engine)
        self._leader = Leader(surroundings.url)
        self._stop = threading.Event()
        self._passes = MachinePasses(surroundings, self._engine, self._leader.verify, log)
        check_base(surroundings, self._engine)

    def run_once(self) -> PassResult:
        """One pass. Raises NotLeader when another loop leads."""
        if not self._leader.acquire():
            raise NotLeader(
                f"another loop leads this stack ({holder(self._surroundings.url)}); "
                "it makes its passes by itself, or stop it first"
            )
        try:
            return self._passes.run(self._live.config)
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
                self._log.info("leading", stack=self._surroundings.settings.stack, id=self._surroundings.stack_id)
                self._lead()
            except (NotLeader, Transient) as error:
                self._log.warning("not leading", why=str(error))
                self._stop.wait(RETRY_SECONDS)
            finally:
                self._leader.release()

    def stop(self) -> None:
        """Begin no new work; what the engine is at is interrupted once, and waited for."""
        self._stop.set()
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

    def _lead(self) -> None:
        count = 0
        while not self._stop.is_set():
            if self._live.reload():
                if self._live.error:
                    self._log.warning("orca.toml is bad: the last good one stays in force", why=self._live.error)
                else:
                    self._log.info("orca.toml was read anew", pools=[pool.name for pool in self._live.config.pools])
            try:
                result = self._passes.run(self._live.config)
                if count % _PRUNE_EVERY_PASSES == 0:
                    self._passes.prune()
                count += 1
                wait = self._surroundings.settings.scale_seconds
                if result.next_in_seconds is not None:
                    wait = min(wait, result.next_in_seconds)
            except NotLeader:
                raise
            except (SetupError, OrcaError) as error:
                if self._stop.is_set():
                    return
                self._log.warning("pass given up", kind=type(error).__name__, why=str(error))
                wait = RETRY_SECONDS
            self._stop.wait(max(wait, _LEAST_SECONDS))
