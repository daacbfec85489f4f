"""Passes over what the loop has on Kubernetes: run clusters and runtime pools."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from time import monotonic

from orca_infra.attention import note
from orca_infra.errors import SetupError, Transient
from orca_infra.health.facts import gauges_of
from orca_infra.kube.claim import check_namespace, claim_cluster
from orca_infra.kube.client import Kube
from orca_infra.kube.kinds import JOB, POD, RUNTIME_ENVIRONMENT, RUNTIME_POOL
from orca_infra.kube.labels import STACK_LABEL
from orca_infra.log import Log
from orca_infra.loop.clocks import mend_clocks
from orca_infra.loop.drift import say_labels_lost
from orca_infra.loop.strays import say_strays_held, strays_held
from orca_infra.loop.watches import Edits, Watch
from orca_infra.metrics import METRICS
from orca_infra.record.decided import RunsDecided, RuntimesDecided, Scope
from orca_infra.record.passes import PassRecord
from orca_infra.runs import apply as hands_of_runs
from orca_infra.runs.decide import decide
from orca_infra.runs.limits import run_limits, run_settings
from orca_infra.runs.logs import KEEP_RETRY_SECONDS, DriverLogs
from orca_infra.runs.model import PodPlacement, RunPlan
from orca_infra.runs.model import SeenObject as SeenRunObject
from orca_infra.runs.observe import SQL, observe
from orca_infra.runtimes import apply as hands_of_runtimes
from orca_infra.runtimes.decide import decide as decide_runtimes
from orca_infra.runtimes.model import RuntimeLimits
from orca_infra.runtimes.model import SeenObject as SeenRuntimeObject
from orca_infra.runtimes.observe import observe as observe_runtimes
from orca_infra.runtimes.rows import PodNotes
from orca_infra.runtimes.rows import prune as prune_runtimes
from orca_infra.settings import Settings
from orca_infra.stack.beside import CohortsBeside
from orca_infra.stack.cohorts import Cohorts
from orca_infra.stack.operations import RecordedEngine
from orca_infra.surroundings import Surroundings


class RunPasses:
    """The run clusters of one family."""

    scope = "runs"
    #: When the next pass has to be made at the latest, as of the last; None: a whole period later.
    next_in_seconds: float | None = None

    def __init__(
        self,
        surroundings: Surroundings,
        kube: Kube,
        recorded: RecordedEngine,
        *,
        environ: Mapping[str, str],
        verify: Callable[[], None],
        log: Log,
        placements: Callable[[], Mapping[str, PodPlacement]] = dict,
    ) -> None:
        """Raises SetupError when the cluster or the namespace belongs to another stack."""
        settings = surroundings.settings
        self._surroundings = surroundings
        self._kube = kube
        self._limits = run_limits(settings)
        self._noted: dict[str, str] = {}
        self._record = PassRecord.of(Scope.RUNS, surroundings.database, settings, log)
        for name in settings.run_environment_names:
            if name not in environ:
                log.warning("a variable that runs are to get is not set", variable=name)
        self._hands = hands_of_runs.RunHands(
            database=surroundings.database,
            kube=kube,
            cohorts=Cohorts(
                "runs", settings.stack, surroundings.stack_id, database=surroundings.database, engine=recorded, log=log
            ),
            settings=run_settings(settings, environ),
            placements=placements,
            stack_id=surroundings.stack_id,
            logs=DriverLogs(
                kube,
                surroundings.logs_folder,
                log,
                give_up_seconds=settings.run_log_seconds,
                bytes_max=settings.run_log_mib * 2**20,
            ),
            verify=verify,
            log=log,
        )

    def run(self) -> int:
        """Make one pass; gives how many actions changed something.

        Raises what `observe` raises (nothing was decided then), SetupError for a foreign or missing namespace, OutcomeUnknown
        for a cohort whose `up` was cut short, and NotLeader.
        """
        _begin(self.scope, self._hands, self._surroundings, self._hands.settings.namespace)
        rows_lost = strays_held(self._surroundings.database)
        decided = self.decide(rows_lost=rows_lost)
        plan = decided.plan
        _say_held(self._surroundings, self._hands.log, "objects of runs", plan.strays_held, rows_lost)
        METRICS.set(self.scope, gauges_of(decided, METRICS.pool))
        if self._surroundings.settings.drift_is_reported:
            say_labels_lost(self._surroundings.database, "runs", [f"{one.kind} {one.name}" for one in plan.unlabelled])
            plan = replace(plan, unlabelled=())
        try:
            with METRICS.phase(self.scope, "apply"), self._record.keeping(decided) as kept:
                kept.changed = hands_of_runs.apply(plan, self._hands)
            return kept.changed
        finally:
            self._note("drivers' logs", self._hands.logs.trouble)
            with suppress(Transient):
                self.next_in_seconds = self._next_in_seconds()

    def _next_in_seconds(self) -> float | None:
        """When something that was refused, or a log, is to be tried again."""
        again = self._hands.cohorts.next_try_seconds()
        if not self._hands.logs.is_keeping:
            return again
        return KEEP_RETRY_SECONDS if again is None else min(again, KEEP_RETRY_SECONDS)

    def _note(self, topic: str, message: str) -> None:
        """Have the status say it, when it is news; a database that is away cannot be told, and needs not."""
        if self._noted.get(topic) == message:
            return
        with suppress(Transient):
            note(self._surroundings.database, topic, message)
            self._noted[topic] = message

    def watches(self, wake: Callable[[], None]) -> list[Watch]:
        """What hastens the next pass: the stack's Jobs and Pods."""
        labels = {STACK_LABEL: self._surroundings.stack_id}
        namespace = self._hands.settings.namespace
        return [
            Watch(self._kube, kind, namespace=namespace, labels=labels, wake=wake, log=self._hands.log)
            for kind in (JOB, POD)
        ]

    def prune(self) -> None:
        """Delete the rows and logs of what ended long ago; append what no room was there for when its start ended."""
        settings = self._surroundings.settings
        kept = {"kept_seconds": settings.ended_row_seconds}
        with self._surroundings.database.transaction() as transaction:
            transaction.run(SQL["prune_clusters"], kept)
            live = {(row["run"], row["start"]) for row in transaction.dicts(SQL["live_starts"])}
            now: datetime = transaction.value("select now()")
        self._hands.logs.append_forgotten(live)
        if settings.run_log_kept_seconds is not None:
            deleted = self._hands.logs.delete_old(now - timedelta(seconds=settings.run_log_kept_seconds))
            if deleted:
                self._hands.log.info("drivers' logs deleted", logs=deleted, why="ORCA_RUN_LOG_KEPT_SECONDS has passed")
        self._record.prune()

    def plan(self) -> RunPlan:
        """What a pass would do now."""
        return self.decide().plan

    def decide(self, *, rows_lost: str = "") -> RunsDecided:
        """What there is now, and what a pass would do about it; `rows_lost`: why no stray may go, when none may."""
        limits = replace(self._limits, stray_max=0) if rows_lost else self._limits
        with METRICS.phase(self.scope, "observe"):
            snapshot = observe(
                self._surroundings.database,
                self._kube,
                self._limits,
                stack_id=self._surroundings.stack_id,
                namespace=self._hands.settings.namespace,
            )
        with METRICS.phase(self.scope, "decide"):
            plan = decide(snapshot, limits)
        return RunsDecided(snapshot=snapshot, limits=limits, plan=plan)


class RuntimePasses:
    """The runtime pools of one family."""

    scope = "runtimes"

    def __init__(
        self, surroundings: Surroundings, kube: Kube, recorded: RecordedEngine, *, verify: Callable[[], None], log: Log
    ) -> None:
        settings = surroundings.settings
        if settings.runtimes_namespace is None:
            raise SetupError("ORCA_RUNTIMES_NAMESPACE is not set: there are no runtime pools")
        self._surroundings = surroundings
        self._kube = kube
        self._namespace = settings.runtimes_namespace
        self._limits = runtime_limits(settings)
        self._record = PassRecord.of(Scope.RUNTIMES, surroundings.database, settings, log)
        #: When the next pass has to be made at the latest, as of the last; None: a whole period later.
        self.next_in_seconds: float | None = None
        cohorts = Cohorts(
            "runtimes", settings.stack, surroundings.stack_id, database=surroundings.database, engine=recorded, log=log
        )
        #: What makes cohorts while passes go on, as those of `run_beside` do.
        self.beside = CohortsBeside(cohorts)
        self._is_passing = self._pods_changed = False
        self._hands = hands_of_runtimes.RuntimeHands(
            database=surroundings.database,
            kube=kube,
            cohorts=cohorts,
            stack_id=surroundings.stack_id,
            verify=verify,
            log=log,
        )

    def run(self) -> int:
        """Make one pass; gives how many actions changed something. Raises as RunPasses.run does."""
        return self._run(self._hands)

    def run_beside(self) -> int:
        """Make one pass that waits for no cohort: it begins one, and a later pass gives or raises what that came to."""
        self._is_passing, self._pods_changed = True, False
        try:
            return self._run(replace(self._hands, cohorts=self.beside))
        finally:
            self._is_passing = False
            if self._pods_changed and self.beside.under_way_since() is None:
                self.next_in_seconds = 0.0

    def _run(self, hands: hands_of_runtimes.RuntimeHands) -> int:
        self.next_in_seconds = None
        _begin(self.scope, hands, self._surroundings, self._namespace)
        with METRICS.phase(self.scope, "observe"):
            snapshot = observe_runtimes(
                self._surroundings.database, self._kube, stack_id=self._surroundings.stack_id, namespace=self._namespace
            )
        read_at = monotonic()
        rows_lost = strays_held(self._surroundings.database)
        limits = replace(self._limits, stray_max=0) if rows_lost else self._limits
        with METRICS.phase(self.scope, "decide"):
            plan = decide_runtimes(snapshot, limits)
        decided = RuntimesDecided(snapshot=snapshot, limits=limits, plan=plan)
        METRICS.set(self.scope, gauges_of(decided, METRICS.pool))
        _say_held(self._surroundings, self._hands.log, "objects of runtimes", plan.strays_held, rows_lost)
        if self._surroundings.settings.drift_is_reported:
            say_labels_lost(self._surroundings.database, "runtimes", [f"Pod {pod.name}" for pod in plan.relabels])
            plan = replace(plan, relabels=())
        try:
            with METRICS.phase(self.scope, "apply"), self._record.keeping(decided) as kept:
                kept.changed = hands_of_runtimes.apply(plan, hands, highest_number=snapshot.highest_number)
            return kept.changed
        finally:
            if plan.next_due_at is not None:
                self.next_in_seconds = (plan.next_due_at - snapshot.now).total_seconds() - (monotonic() - read_at)

    def watches(self, wake: Callable[[], None]) -> list[Watch]:
        """What hastens the next pass. A Pod that is seen Ready is noted at once: it can be taken while an `up` still runs.

        Pods by the hundred then hasten no pass, which would take its CPU from the `up`: its end does, and one comes soon by
        itself. So those that change during a pass wait for whether it begins an `up`.
        """
        labels = {STACK_LABEL: self._surroundings.stack_id}

        def wake_of_pods() -> None:
            self._pods_changed = True  # before the question, or a pass that just ends would not know
            if not self._is_passing and self.beside.under_way_since() is None:
                wake()

        watch = partial(Watch, self._kube, namespace=self._namespace, log=self._hands.log)
        notes = PodNotes(self._surroundings.database)
        return [
            watch(POD, labels=labels, wake=wake_of_pods, note=notes.note, write=notes.write),
            watch(RUNTIME_POOL, labels={}, wake=wake, note=Edits().note),
            watch(RUNTIME_ENVIRONMENT, labels={}, wake=wake, note=Edits().note),
        ]

    def prune(self) -> None:
        """Delete the rows of what ended long ago."""
        prune_runtimes(self._surroundings.database, self._surroundings.settings.ended_row_seconds)
        self._record.prune()


def _begin(
    scope: str,
    hands: hands_of_runs.RunHands | hands_of_runtimes.RuntimeHands,
    surroundings: Surroundings,
    namespace: str,
) -> None:
    """What every pass begins with: the lead, sane times, the right cluster and namespace, no cohort thought under way."""
    hands.verify()
    mend_clocks(scope, surroundings.database, hands.log)
    claim_cluster(hands.kube, surroundings.database)
    check_namespace(hands.kube, namespace, surroundings.stack_id, surroundings.settings.stack)
    hands.cohorts.abandon()


def _say_held(
    surroundings: Surroundings,
    log: Log,
    what: str,
    held: Iterable[SeenRunObject | SeenRuntimeObject],
    rows_lost: str,
) -> None:
    names = [f"{stray.kind} {stray.name}" for stray in held]
    say_strays_held(surroundings.database, log, what, names, rows_lost)


def runtime_limits(settings: Settings) -> RuntimeLimits:
    """The settings' part that decide works with."""
    return RuntimeLimits(
        stray_grace_seconds=settings.stray_grace_seconds,
        stray_max=settings.stray_max,
        start_seconds=settings.runtimes_start_seconds,
        pull_seconds=settings.runtimes_pull_seconds,
        backoff_seconds=settings.runtimes_backoff_seconds,
        backoff_most_seconds=settings.runtimes_backoff_most_seconds,
        abandoned_seconds=settings.runtimes_abandoned_seconds,
        node_lost_seconds=settings.runtimes_node_lost_seconds,
        births_max=settings.runtimes_births_max,
        allowed=settings.allowed,
        puts_labels_back=not settings.drift_is_reported,
    )
