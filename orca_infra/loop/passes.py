"""One pass over the machine pools: settle what is unknown, observe, decide, apply."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from time import monotonic

from orca_infra.config import Config
from orca_infra.errors import OrcaError, SetupError
from orca_infra.log import Log
from orca_infra.machines import apply as hands_of_machines
from orca_infra.machines.decide import decide
from orca_infra.machines.model import Plan, Pool, Snapshot
from orca_infra.machines.observe import SQL, observe
from orca_infra.machines.providers.local import LocalProvider
from orca_infra.machines.providers.port import MachineProvider
from orca_infra.stack.engine import Engine
from orca_infra.stack.operations import RecordedEngine
from orca_infra.surroundings import Surroundings

#: A gap this many heartbeats long between two passes that could read: who was silent in it may just not have been heard.
_DEAF_HEARTBEATS = 6


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
    """The pool autoscaler. One thread makes passes; between them it remembers only since when it could hear workers."""

    def __init__(self, surroundings: Surroundings, engine: Engine, verify: Callable[[], None], log: Log) -> None:
        self._surroundings = surroundings
        self._verify = verify
        self._log = log
        self.recorded = RecordedEngine(
            engine,
            surroundings.database,
            backend_url=surroundings.engine.backend_url,
            verify=verify,
            deadline_seconds=surroundings.settings.engine_seconds,
        )
        self._hearing_since: datetime | None = None
        self._read_at: float | None = None

    def run(self, config: Config) -> PassResult:
        """Make one pass.

        Raises Transient when the database cannot be read (nothing was decided then), and NotLeader.
        """
        providers = configure_providers(config, self._surroundings)
        hands = self._hands(config, providers)
        try:
            held = hands_of_machines.settle(hands)
            snapshot = look(self._surroundings, providers, hearing_since=self._hearing(), held=held, pools=config.pools)
        except OrcaError:
            self._hearing_since = self._read_at = None
            raise
        read_at = monotonic()
        self._hearing_since, self._read_at = snapshot.hearing_since, read_at
        plan = decide(snapshot, config.pools, self._surroundings.settings.limits(config))
        for stray in plan.strays_held:
            self._log.warning("strays held: too many at once, an operator has to look", machine=stray.name)
        changed = hands_of_machines.apply(plan, snapshot, hands)
        next_in = None
        if plan.next_due_at is not None:
            next_in = (plan.next_due_at - snapshot.now).total_seconds() - (monotonic() - read_at)
        return PassResult(snapshot=snapshot, plan=plan, changed=changed, next_in_seconds=next_in)

    def prune(self) -> None:
        """Delete the rows of what ended long ago."""
        kept = {"kept_seconds": self._surroundings.settings.ended_row_seconds}
        with self._surroundings.database.transaction() as transaction:
            transaction.run(SQL["prune_machines"], kept)
        self.recorded.prune(self._surroundings.settings.ended_row_seconds)

    def _hearing(self) -> datetime | None:
        """Since when workers could be heard without a gap; None: from this pass on."""
        deaf_seconds = _DEAF_HEARTBEATS * self._surroundings.settings.heartbeat_seconds
        deaf_seconds = max(deaf_seconds, 2 * self._surroundings.settings.scale_seconds)
        if self._read_at is None or monotonic() - self._read_at > deaf_seconds:
            return None
        return self._hearing_since

    def _hands(self, config: Config, providers: Mapping[str, MachineProvider]) -> hands_of_machines.MachineHands:
        return hands_of_machines.MachineHands(
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
        )


def make_providers(surroundings: Surroundings) -> dict[str, MachineProvider]:
    """The providers by name. `local` is always there, since a pool that is gone from the file may still have machines."""
    return {"local": LocalProvider(surroundings.cloud_folder)}


def configure_providers(config: Config, surroundings: Surroundings) -> dict[str, MachineProvider]:
    """The providers, told what the configuration says of their cloud; only the leading loop does that."""
    environment = {
        "ORCA_DB": surroundings.url,
        "ORCA_HEARTBEAT_SECONDS": f"{surroundings.settings.heartbeat_seconds:g}",
    }
    LocalProvider(surroundings.cloud_folder).configure(config.local, environment)
    return make_providers(surroundings)


def look(
    surroundings: Surroundings,
    providers: Mapping[str, MachineProvider],
    *,
    hearing_since: datetime | None = None,
    held: Mapping[str, str] | None = None,
    pools: Sequence[Pool] = (),
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
        wanted={pool.provider for pool in pools},
    )


def check_base(surroundings: Surroundings, engine: Engine) -> None:
    """Raises SetupError when the base's state carries another id than the database: they belong to different stacks."""
    state = engine.state(surroundings.settings.stack)
    for resource in state.resources:
        if resource.type == "orca:index:Identity" and resource.id != surroundings.stack_id:
            raise SetupError(
                f"the base's state belongs to stack id {resource.id}, and the database to {surroundings.stack_id}: "
                "point ORCA_DB or PULUMI_BACKEND_URL to the one that belongs to it"
            )
