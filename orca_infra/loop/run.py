"""The automation loop: lead or follow, until told to stop. What is done while leading is loop/schedule.py's."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import FrameType

from orca_infra.attention import clear_outdated, note
from orca_infra.db.connection import Session
from orca_infra.errors import NotLeader, OrcaError, StateBroken, Transient
from orca_infra.health.server import serving
from orca_infra.health.started import StartedRuns
from orca_infra.health.state import Health
from orca_infra.log import Log
from orca_infra.loop.configuration import LiveConfig
from orca_infra.loop.leader import Leader, holder
from orca_infra.loop.passes import PassResult, check_account, check_base
from orca_infra.loop.schedule import END_SECONDS, PRUNE_SECONDS, RETRY_SECONDS, Late, PassReport, Schedule
from orca_infra.loop.scopes import Scopes
from orca_infra.metrics import METRICS
from orca_infra.stack.engine import Engine
from orca_infra.stack.presence import claim_state
from orca_infra.stack.program import load
from orca_infra.surroundings import Surroundings

#: orca notifies this channel when a run was queued; its embedded tables do so by a trigger. The payload may name a scope.
DEMAND_CHANNEL = "orca_demand"
#: What a notification without a payload hastens.
_DEMAND_SCOPES = ("machines", "runs")
#: How often a leader looks after its passes: that it leads still, that none hangs, that orca.toml is as it was.
_TEND_SECONDS = 1.0
#: From SIGTERM to this process's end at the latest; Kubernetes kills after 30 s unless it is told otherwise.
STOP_SECONDS = 26.0
_EXIT_HANGING = 1


class Loop:
    """One loop of any number; at any time at most one of them leads."""

    def __init__(self, surroundings: Surroundings, log: Log, *, leave: Callable[[int], object] = os._exit) -> None:
        """Raises SetupError and ConfigError when it could never make a pass, Transient when the database is away.

        `leave` ends this process with a code when a pass does not end by any other means: a thread cannot be ended.
        """
        self._log = log
        self._leave = leave
        self._live = LiveConfig(surroundings.settings.config_path)
        check_account(surroundings, self._live.config)
        self._leader = Leader(surroundings.url)
        self._leader.connect()
        # All that this loop writes is fenced: a leader of the past writes nothing.
        unguarded = surroundings.database
        surroundings = replace(surroundings, database=unguarded.guarded(self._leader.guard))
        self._surroundings = surroundings
        self._stop = threading.Event()
        self._scopes = Scopes(surroundings, lambda: self._live.config, self._leader.verify, log)
        self._health = Health(pass_seconds=surroundings.settings.pass_seconds)
        self._started = StartedRuns(surroundings.database)
        #: Scopes of which status may say that something is wrong, and topics of what was said to hang.
        self._unwell: set[str] = set()
        self._hanging: set[str] = set()
        _check_state_soon(replace(surroundings, database=unguarded), self._scopes.engine, log)

    def run_once(self) -> PassResult:
        """One pass of every scope, in turn. Raises NotLeader when another loop leads."""
        if not self._leader.acquire():
            raise NotLeader(
                f"another loop leads this stack ({holder(self._surroundings.url)}); "
                "it makes its passes by itself, or stop it first"
            )
        try:
            self._forget_outdated()
            return self._scopes.run_once()
        finally:
            self._leader.release()

    def run(self) -> None:
        """Passes until `stop`. Errors are said and the next pass tries again; only a stop ends it.

        Raises SetupError when ORCA_HEALTH_PORT cannot be opened.
        """
        threading.Thread(target=load, name="load").start()  # before anybody waits for it
        with serving(self._health, self._surroundings.settings, self._log):
            self._run()

    def _run(self) -> None:
        following = False
        while not self._stop.is_set():
            try:
                if not self._leader.acquire():
                    if not following:
                        self._log.info("following", leader=holder(self._surroundings.url))
                    following = True
                    self._health.following()
                    self._stop.wait(RETRY_SECONDS)
                    continue
                following = False
                self._log.info("leading", family=self._surroundings.settings.stack, id=self._surroundings.stack_id)
                self._lead()
            except (NotLeader, Transient) as error:
                self._log.warning("not leading", why=str(error))
                self._health.starting(str(error))
                self._stop.wait(RETRY_SECONDS)
            finally:
                self._leader.release()

    def stop(self) -> None:
        """Begin no new work; what the engine is at is interrupted once, and waited for."""
        self._stop.set()
        self._health.stopping()
        self._scopes.stop()

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
        """Raises NotLeader when the lead was lost."""
        self._live.reload()
        self._forget_outdated()
        self._note_configuration()
        self._unwell = {scope.name for scope in self._scopes.scopes}  # what an earlier leader noted is looked at anew
        self._hanging.clear()
        scopes = self._scopes.scopes
        beside = {scope.name: scope.beside for scope in scopes if scope.beside is not None}
        self._health.leading(
            {scope.name: scope.period_seconds for scope in scopes},
            {name: one.under_way_since for name, one in beside.items()},
        )
        for name in beside:
            self._note(f"up {name}", "")
        watched = [replace(scope, make=self._health.watched(scope.name, scope.make)) for scope in scopes]
        schedule = Schedule(
            watched,
            log=self._log,
            report=self._report,
            # What is kept for less than an hour goes when its time is over, and not when the hour is.
            prune_seconds=min(PRUNE_SECONDS, self._surroundings.settings.ended_row_seconds),
        )
        over = threading.Event()
        listener = threading.Thread(target=self._listen, args=(schedule, over), name="listen", daemon=True)
        watches = self._scopes.watches(schedule.hasten)
        listener.start()
        for watch in watches:
            watch.start()
        schedule.start()
        try:
            while not self._stop.wait(_TEND_SECONDS) and schedule.lost is None:
                self._leader.verify()
                self._tend(schedule)
        finally:
            over.set()
            for watch in watches:
                watch.stop()
            self._end(schedule)
        if schedule.lost is not None:
            raise schedule.lost

    def _tend(self, schedule: Schedule) -> None:
        self._health.comes_round()
        if self._live.reload():
            self._note_configuration()
            if self._live.error:
                self._log.warning("orca.toml is bad: the last good one stays in force", why=self._live.error)
            else:
                self._log.info("orca.toml was read anew", pools=[pool.name for pool in self._live.config.pools])
            schedule.hasten(*_DEMAND_SCOPES)
        late = schedule.late(self._surroundings.settings.pass_seconds)
        for one in late:
            self._say_late(one)
        for topic in [topic for topic in self._hanging if topic.startswith("up ")]:
            if topic not in {_topic(one) for one in late}:
                self._hanging.discard(topic)
                self._note(topic, "")

    def _say_late(self, late: Late) -> None:
        deadline_seconds, topic = self._surroundings.settings.pass_seconds, _topic(late)
        if topic not in self._hanging:
            self._hanging.add(topic)
            if not late.beside:
                self._unwell.add(late.scope)
            what = f"an up beside the passes over {late.scope}" if late.beside else f"a pass over {late.scope}"
            event = "up hangs: cut short" if late.beside else "pass hangs: cut short"
            self._log.warning(event, scope=late.scope, seconds=round(late.seconds), at=late.where)
            self._note(
                topic,
                f"{what} is under way for more than {deadline_seconds:g} s (ORCA_PASS_SECONDS) and was cut short; the log "
                "says where it is",
            )
        if late.seconds > deadline_seconds + END_SECONDS:
            self._give_up([late.scope])

    def _end(self, schedule: Schedule) -> None:
        """Have every pass end, since none may be under way when this or another loop leads next."""
        schedule.stop()
        seconds = STOP_SECONDS if self._stop.is_set() else END_SECONDS
        until = time.monotonic() + seconds
        while (left := schedule.join(_TEND_SECONDS)) and time.monotonic() < until:
            if self._stop.is_set():
                until = min(until, time.monotonic() + STOP_SECONDS)
        if left:
            self._give_up(left)

    def _give_up(self, scopes: list[str]) -> None:
        """Leave what hangs by leaving altogether; whatever supervises this process starts it anew."""
        self._log.warning("a pass does not end: this process leaves it", scopes=scopes)
        self._leave(_EXIT_HANGING)

    def _report(self, report: PassReport) -> None:
        """Have status say which passes are given up, and why, until one is made."""
        self._hanging.discard(f"pass {report.scope}")
        if report.scope == "machines" and report.error is None:
            with contextlib.suppress(Transient):
                self._started.look()
        if report.error is not None and not self._stop.is_set():
            self._unwell.add(report.scope)
            self._note(f"pass {report.scope}", f"the last pass over {report.scope} was given up: {report.error}")
        elif report.scope in self._unwell:
            self._unwell.discard(report.scope)
            self._note(f"pass {report.scope}", "")

    def _note(self, topic: str, message: str) -> None:
        """Raises NotLeader only: without the database, the log has to do."""
        try:
            note(self._surroundings.database, topic, message)
        except NotLeader:
            raise
        except OrcaError as error:
            self._log.warning("status could not be told", topic=topic, why=str(error))

    def _forget_outdated(self) -> None:
        scopes = [scope.name for scope in self._scopes.scopes]
        reported = self._surroundings.settings.drift_is_reported
        with contextlib.suppress(Transient):
            clear_outdated(self._surroundings.database, scopes=scopes, drift_is_reported=reported)

    def _note_configuration(self) -> None:
        error = self._live.error
        METRICS.configured(loaded_at=self._live.loaded_at, good=not error)
        self._note("orca.toml", error and f"orca.toml is bad, and the last good one stays in force: {error}")

    def _listen(self, schedule: Schedule, over: threading.Event) -> None:
        """Have a NOTIFY hasten the next pass, and nothing more: without it the pass comes in its period."""
        while not over.is_set():
            try:
                session = Session(self._surroundings.url, "orca-infra listener")
                session.listen(DEMAND_CHANNEL)
                while not over.is_set():
                    for payload in session.notified(RETRY_SECONDS):
                        schedule.hasten(*([payload] if payload else _DEMAND_SCOPES))
                session.close()
            except Transient:
                over.wait(RETRY_SECONDS)


def _topic(late: Late) -> str:
    """Under which status says it. Passes that go by do not clear what is said of an up beside them."""
    return f"{'up' if late.beside else 'pass'} {late.scope}"


def _check_state_soon(surroundings: Surroundings, engine: Engine, log: Log) -> None:
    """Check that the state is there, and whose it is; once more after a moment when another loop is only just making it.

    A base's state that cannot be read stops its stack alone, which the loop never ups.
    """

    def check() -> None:
        claim_state(engine, surroundings.database, surroundings.engine.backend_url, surroundings.settings.stack)
        check_base(surroundings, engine)

    try:
        check()
    except Transient:
        time.sleep(RETRY_SECONDS)
        check()
    except StateBroken as error:
        log.warning("the base's state cannot be read: whose it is was not checked", why=str(error))
