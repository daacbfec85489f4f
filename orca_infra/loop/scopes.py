"""What the loop makes passes over: the machines always, runs and runtimes where they are set up."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from orca_infra.config import Config
from orca_infra.kube.client import Kube
from orca_infra.log import Log
from orca_infra.loop.cluster_passes import RunPasses, RuntimePasses
from orca_infra.loop.passes import MachinePasses, PassResult
from orca_infra.loop.schedule import PassEnd, Scope
from orca_infra.loop.watches import Watch
from orca_infra.machines.image_registry import RegistryArchitectures
from orca_infra.stack.engine import Engine
from orca_infra.stack.operations import RecordedEngine
from orca_infra.surroundings import Surroundings

Verify = Callable[[], None]


class Scopes:
    """Everything that passes are made over. Each scope has an engine of its own, so that one can be cut short alone."""

    def __init__(self, surroundings: Surroundings, config: Callable[[], Config], verify: Verify, log: Log) -> None:
        """Raises SetupError when there is no engine, or no cluster where one is to be used."""
        settings = surroundings.settings
        self._surroundings = surroundings
        self._config = config
        self._verify = verify
        self._log = log
        self._engines: list[Engine] = []
        self.engine = self._new_engine()
        images = RegistryArchitectures(kept_seconds=settings.image_seconds)
        self._machines = MachinePasses(
            surroundings, self.engine, verify, log, images=images, parallel=settings.engine_parallel
        )
        self.recorded = self._machines.recorded
        self._cluster: list[RunPasses | RuntimePasses] = []
        self.scopes = [_scope_of_machines(self._machines, self.engine, config, settings.scale_seconds)]
        if settings.uses_cluster:
            self._add_cluster(Kube.connect(kubeconfig=settings.kubeconfig))

    def run_once(self) -> PassResult:
        """One pass of each, in turn. Raises what a pass raises."""
        result = self._machines.run(self._config())
        return replace(result, changed=result.changed + sum(passes.run() for passes in self._cluster))

    def stop(self) -> None:
        """Begin no further action, ever; what the engines are at is interrupted once."""
        self._machines.stop()
        for engine in self._engines:
            engine.interrupt()

    def watches(self, hasten: Callable[[str], None]) -> list[Watch]:
        """What hastens a scope when something happens on the cluster."""
        return [watch for passes in self._cluster for watch in passes.watches(partial(hasten, passes.scope))]

    def _add_cluster(self, kube: Kube) -> None:
        settings, verify, log = self._surroundings.settings, self._verify, self._log
        if settings.runner is not None:
            engine = self._new_engine()
            runs = RunPasses(
                self._surroundings,
                kube,
                self._record(engine),
                environ=os.environ,
                verify=verify,
                log=log,
                placements=lambda: self._config().pipelines,
            )
            self._cluster.append(runs)
            self.scopes.append(_scope_of_cluster(runs, engine, settings.runs_scale_seconds))
        if settings.runtimes_namespace is not None:
            engine = self._new_engine()
            runtimes = RuntimePasses(self._surroundings, kube, self._record(engine), verify=verify, log=log)
            self._cluster.append(runtimes)
            self.scopes.append(_scope_of_cluster(runtimes, engine, settings.runtimes_scale_seconds))

    def _new_engine(self) -> Engine:
        kubeconfig = self._surroundings.settings.kubeconfig
        # The provider reads the same file as this program's own client.
        self._engines.append(Engine(self._surroundings.engine, {"KUBECONFIG": str(kubeconfig)} if kubeconfig else {}))
        return self._engines[-1]

    def _record(self, engine: Engine) -> RecordedEngine:
        return RecordedEngine(
            engine,
            self._surroundings.database,
            backend_url=self._surroundings.engine.backend_url,
            verify=self._verify,
            deadline_seconds=self._surroundings.settings.engine_seconds,
        )


def _scope_of_machines(
    passes: MachinePasses, engine: Engine, config: Callable[[], Config], period_seconds: float
) -> Scope:
    def make() -> PassEnd:
        result = passes.run(config())
        return PassEnd(changed=result.changed, next_in_seconds=result.next_in_seconds)

    def cut_short() -> None:
        passes.cut_short()
        engine.interrupt(for_good=False)

    return Scope(name=passes.scope, period_seconds=period_seconds, make=make, prune=passes.prune, cut_short=cut_short)


def _scope_of_cluster(passes: RunPasses | RuntimePasses, engine: Engine, period_seconds: float) -> Scope:
    """The standing loop's passes over runtimes wait for no cohort."""
    runtimes = passes if isinstance(passes, RuntimePasses) else None
    run = passes.run if runtimes is None else runtimes.run_beside

    def make() -> PassEnd:
        changed = run()
        return PassEnd(changed=changed, next_in_seconds=passes.next_in_seconds)

    return Scope(
        name=passes.scope,
        period_seconds=period_seconds,
        make=make,
        prune=passes.prune,
        cut_short=lambda: engine.interrupt(for_good=False),
        beside=None if runtimes is None else runtimes.beside,
    )
