"""One pass over the machine pools: settle what is unknown, observe, decide, apply."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from time import monotonic

from orca_infra.config import Config
from orca_infra.errors import SetupError
from orca_infra.health.facts import gauges_of
from orca_infra.log import Log
from orca_infra.loop.clocks import mend_clocks
from orca_infra.loop.drift import MachineDrift, say_labels_lost
from orca_infra.loop.strays import say_strays_held, strays_held
from orca_infra.machines import apply as hands_of_machines
from orca_infra.machines.account import claim_account, foreign_account
from orca_infra.machines.consoles import delete_consoles, saved_consoles
from orca_infra.machines.decide import decide
from orca_infra.machines.hands import MachineHands
from orca_infra.machines.model import Plan, Pool, Relabel, Snapshot
from orca_infra.machines.observe import SQL, observe
from orca_infra.machines.providers.gcp import GcpProvider
from orca_infra.machines.providers.local import LocalProvider
from orca_infra.machines.providers.port import MachineProvider
from orca_infra.machines.registry import ImageArchitectures, unknown_architectures
from orca_infra.metrics import METRICS
from orca_infra.record.decided import MachinesDecided, Scope
from orca_infra.record.passes import PassRecord
from orca_infra.stack.engine import Engine
from orca_infra.stack.operations import RecordedEngine
from orca_infra.surroundings import Surroundings

#: So many heartbeats less than the lost time is how long nobody may have read before silence counts anew: a shorter gap,
#: with the heartbeats missed around it, makes nobody look lost.
_MARGIN_HEARTBEATS = 2

ProvidersOf = Callable[[Config], Mapping[str, MachineProvider]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """What a pass came to.

    Attributes:
        changed: how many actions changed something.
        next_in_seconds: when the next pass has to be made at the latest, from the snapshot on; None: a whole period.

    """

    snapshot: Snapshot
    plan: Plan
    changed: int
    next_in_seconds: float | None


class MachinePasses:
    """The pool autoscaler. One thread makes passes; it remembers nothing between them."""

    scope = "machines"

    def __init__(
        self,
        surroundings: Surroundings,
        engine: Engine,
        verify: Callable[[], None],
        log: Log,
        *,
        providers: ProvidersOf | None = None,
        images: ImageArchitectures = unknown_architectures,
        seconds: Callable[[], float] = monotonic,
        parallel: int = 1,
    ) -> None:
        """What a simulation replaces: the machine providers for a configuration that was just read, and what seconds pass.

        `parallel`: how many pools are worked on at the same time.
        """
        self._surroundings = surroundings
        self._verify = verify
        self._log = log
        self._providers = providers or (lambda config: configure_providers(config, surroundings))
        self._images = images
        self._seconds = seconds
        self._stopping = threading.Event()
        self._cut_short = threading.Event()
        self.record = PassRecord.of(Scope.MACHINES, surroundings.database, surroundings.settings, log)
        self._parallel = parallel
        self.recorded = RecordedEngine(
            engine,
            surroundings.database,
            backend_url=surroundings.engine.backend_url,
            verify=verify,
            deadline_seconds=surroundings.settings.engine_seconds,
            parallel=parallel,
        )
        self._drift = MachineDrift(surroundings.settings, surroundings.database, self.recorded, log)

    def run(self, config: Config) -> PassResult:
        """Make one pass.

        Raises Transient when the database cannot be read (nothing was decided then), and NotLeader.
        """
        self._cut_short.clear()
        providers = self._providers(config)
        hands = self._hands(config, providers)
        self._verify()
        mend_clocks(self.scope, self._surroundings.database, self._log)
        self.recorded.say_whether_state_is_there()
        held = hands_of_machines.settle(hands)
        with METRICS.phase(self.scope, "observe"):
            snapshot = look(
                self._surroundings,
                providers,
                hearing_since=self._hear(),
                held=held,
                pools=config.pools,
                images=self._images,
            )
        read_at = self._seconds()
        limits = self._surroundings.settings.limits(config)
        rows_lost = strays_held(self._surroundings.database)
        if rows_lost:
            limits = replace(limits, stray_max=0)
        with METRICS.phase(self.scope, "decide"):
            plan = decide(snapshot, config.pools, limits)
        self._say_what_is_held(plan, rows_lost)
        decided = MachinesDecided(snapshot=snapshot, pools=config.pools, limits=limits, plan=plan)
        METRICS.set(self.scope, gauges_of(decided, METRICS.pool))
        if self._surroundings.settings.drift_is_reported:
            plan = self._without_relabels(plan)
        with METRICS.phase(self.scope, "apply"), self.record.keeping(decided) as kept:
            changed = kept.changed = hands_of_machines.apply(plan, snapshot, hands)
            if not self._is_ending():
                self._drift.look(plan, snapshot)
        # Read again at the end, so that a slow pass and what follows it are not one gap; but what was unheard within one long
        # operation stays a gap, since the database may have been away in it.
        self._hear()
        next_in = None
        if plan.next_due_at is not None:
            next_in = (plan.next_due_at - snapshot.now).total_seconds() - (self._seconds() - read_at)
        return PassResult(snapshot=snapshot, plan=plan, changed=changed, next_in_seconds=next_in)

    def stop(self) -> None:
        """Begin no further action, ever; a pass that is under way ends after the one that it is at."""
        self._stopping.set()

    def cut_short(self) -> None:
        """Begin no further action of the pass that is under way."""
        self._cut_short.set()

    def _is_ending(self) -> bool:
        return self._stopping.is_set() or self._cut_short.is_set()

    def _without_relabels(self, plan: Plan) -> Plan:
        relabels = [action for action in plan.actions if isinstance(action, Relabel)]
        say_labels_lost(self._surroundings.database, self.scope, [action.machine.name for action in relabels])
        return plan.without_relabels()

    def _say_what_is_held(self, plan: Plan, rows_lost: str) -> None:
        names = sorted([*(stray.name for stray in plan.strays_held), *plan.owned_held])
        say_strays_held(self._surroundings.database, self._log, "machines", names, rows_lost)

    def prune(self) -> None:
        """Delete the rows of what ended long ago, and what was kept beside them."""
        kept_seconds = self._surroundings.settings.ended_row_seconds
        saved = saved_consoles(self._surroundings.logs_folder)
        with self._surroundings.database.transaction() as transaction:
            transaction.run(SQL["prune_machines"], {"kept_seconds": kept_seconds})
            kept = {row["name"] for row in transaction.dicts(SQL["machines_named"], {"names": saved})}
        delete_consoles(self._surroundings.logs_folder, set(saved) - kept)
        self.recorded.prune(kept_seconds)
        self.record.prune()

    def _hear(self) -> datetime:
        """Since when workers could be heard without a gap; kept in the database, so that a new leader knows it too."""
        settings = self._surroundings.settings
        longest = settings.lost_seconds - _MARGIN_HEARTBEATS * settings.heartbeat_seconds
        # Passes have to come more often than that, or silence would never count.
        gap_seconds = max(longest, 1.5 * settings.scale_seconds)
        with self._surroundings.database.transaction() as transaction:
            since: datetime = transaction.value(SQL["hear"], {"gap_seconds": gap_seconds})
        return since

    def _hands(self, config: Config, providers: Mapping[str, MachineProvider]) -> MachineHands:
        return MachineHands(
            database=self._surroundings.database,
            engine=self.recorded,
            providers=providers,
            pools={pool.name: pool for pool in config.pools},
            family=self._surroundings.settings.stack,
            stack_id=self._surroundings.stack_id,
            token_key=self._surroundings.token_key,
            logs=self._surroundings.logs_folder,
            verify=self._verify,
            log=self._log,
            stopping=self._is_ending,
            grace_seconds=self._surroundings.settings.stray_grace_seconds,
            parallel=self._parallel,
        )


def make_providers(surroundings: Surroundings, config: Config | None = None) -> dict[str, MachineProvider]:
    """The providers by name. `local` is always there, since a pool that is gone from the file may still have machines.

    `gcp` is there as long as the file has `[gcp]`, which has to outlive the machines.
    """
    providers: dict[str, MachineProvider] = {
        "local": LocalProvider(surroundings.cloud_folder, config.local if config else None)
    }
    if config is not None and config.gcp is not None:
        kinds = [kind for pool in config.pools if pool.provider == "gcp" for kind in pool.types]
        providers["gcp"] = GcpProvider(
            config.gcp,
            endpoint=os.environ.get("GOOGLE_COMPUTE_CUSTOM_ENDPOINT", ""),  # Pulumi's provider reads the same
            types={kind.type for kind in kinds},
            zones={zone for kind in kinds for zone in kind.locations},
            refuses=foreign_account(surroundings.database, "gcp", config.gcp.project),
        )
    return providers


def configure_providers(config: Config, surroundings: Surroundings) -> dict[str, MachineProvider]:
    """The providers, told what the configuration says of their cloud; only the leading loop does that."""
    environment = {
        "ORCA_DB": surroundings.url,
        "ORCA_HEARTBEAT_SECONDS": f"{surroundings.settings.heartbeat_seconds:g}",
    }
    LocalProvider(surroundings.cloud_folder).configure(config.local, environment)
    return make_providers(surroundings, config)


def look(
    surroundings: Surroundings,
    providers: Mapping[str, MachineProvider],
    *,
    hearing_since: datetime | None = None,
    held: Mapping[str, str] | None = None,
    pools: Sequence[Pool] = (),
    images: ImageArchitectures = unknown_architectures,
) -> Snapshot:
    """What a pass would see now. Raises Transient."""
    return observe(
        surroundings.database,
        providers,
        family=surroundings.settings.stack,
        stack_id=surroundings.stack_id,
        grow_after_seconds=surroundings.settings.grow_after_seconds,
        hearing_since=hearing_since,
        held=held or {},
        stray_grace_seconds=surroundings.settings.stray_grace_seconds,
        pools=pools,
        images=images,
    )


def check_account(surroundings: Surroundings, config: Config) -> None:
    """Raises SetupError when this stack's machines are in another project than the file says."""
    if config.gcp is not None:
        claim_account(surroundings.database, "gcp", config.gcp.project, remember=False)


def check_base(surroundings: Surroundings, engine: Engine) -> None:
    """Raises SetupError when the base's state carries another id than the database: they belong to different stacks."""
    state = engine.state(surroundings.settings.stack)
    for resource in state.resources:
        if resource.type == "orca:index:Identity" and resource.id != surroundings.stack_id:
            raise SetupError(
                f"the base's state belongs to stack id {resource.id}, and the database to {surroundings.stack_id}: "
                "point ORCA_DB or PULUMI_BACKEND_URL to the one that belongs to it"
            )
