"""Cohorts: all that one pass makes on Kubernetes is one stack, upped exactly once.

What an `up` failed to make, or what a killed one left unknown, goes with the next pass's cohort as long as its row lives:
the provider's server-side apply makes an object or adopts it by its name, from the same manifest and as the same field
manager. So no cohort is ever changed, retried or repaired, and one that declares nothing any more is dropped from the state.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orca_infra.db.connection import Database, load_queries
from orca_infra.errors import EngineFailed, OrcaError, OutcomeUnknown, SetupError, StackLocked, StateBroken
from orca_infra.kube.answers import Refusal, refusal_of
from orca_infra.kube.labels import JOB_UID_PLACEHOLDER
from orca_infra.log import Log
from orca_infra.names import derived_stack
from orca_infra.stack.operations import RecordedEngine
from orca_infra.stack.outcome import ResourceChange
from orca_infra.stack.program import Program, Registered, Registrar

SQL = load_queries("cohorts")
#: Rows that a cohort makes at the most: a run has about five objects, a runtime Pod is one. An `up` costs about 2 s and 20 ms
#: an object, so that small cohorts make few Pods a second.
COHORT_ROWS = {"runs": 100, "runtimes": 1000}
#: Cohorts dropped in one pass at the most: each is a call of the engine's program.
DROPS_MAX = 5
# The provider's own limits on its requests are far below what a cohort needs.
_CLIENT = json.dumps({"qps": 400, "burst": 800, "timeout": 60})
_TYPES = {
    "Job": "kubernetes:batch/v1:Job",
    "Pod": "kubernetes:core/v1:Pod",
    "Service": "kubernetes:core/v1:Service",
    "Secret": "kubernetes:core/v1:Secret",
}
_MESSAGE_LIMIT = 2000

Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenObject:
    """An object that is to be made, as its row has it. `job_uid` is of the Job that owns it, once that is confirmed."""

    namespace: str
    kind: str
    name: str
    rendered: Mapping[str, Any]
    run: int | None
    start: int | None
    pod: str | None
    job_uid: str | None

    @property
    def resource(self) -> str:
        """The Pulumi name: unique in a cohort, and telling in its diffs."""
        return f"{self.kind.lower()}:{self.namespace}:{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A cohort that is written down with its objects, and that `make` is to be called with."""

    stack: str
    objects: Sequence[OpenObject]


class Cohorts:
    """The cohorts of one scope, `runs` or `runtimes`, of one family."""

    def __init__(
        self, scope: str, family: str, stack_id: str, *, database: Database, engine: RecordedEngine, log: Log
    ) -> None:
        self._scope = scope
        self._prefix = derived_stack(family, scope, "0").removesuffix("0")
        self._stack_id = stack_id
        self._database = database
        self._engine = engine
        self._log = log
        #: Cohorts that this process has begun, until what came of them is written down.
        self._under_way: set[str] = set()
        self._lock = threading.Lock()

    def abandon(self) -> None:
        """Close the books of cohorts whose `up` was cut short: of all that this process has not under way itself."""
        with self._lock:
            under_way = sorted(self._under_way)
        with self._database.transaction() as transaction:
            transaction.run(SQL["abandon_cohorts"], {"scope": self._scope, "under_way": under_way})

    def up(self) -> int:
        """Make what is open, in one new cohort; gives how many objects were made or adopted.

        Raises OutcomeUnknown when the `up` was cut short (the next cohort adopts what it made), and what the engine raises.
        """
        begun = self.begin()
        return 0 if begun is None else self.make(begun)

    def begin(self, *, only_awaited: bool = False) -> Begun | None:
        """Write down a cohort of what is open, but for what is being made already; None when there is nothing.

        `only_awaited`: only what somebody waits for, as for the Pod of a cold start. Raises SetupError and Transient.
        """
        chosen = {"scope": self._scope, "limit": COHORT_ROWS[self._scope], "only_awaited": only_awaited}
        with self._database.snapshot() as transaction:
            transaction.join_many()
            objects = transaction.rows(OpenObject, SQL["open_objects"], chosen)
        if not objects:
            return None
        self._engine.require_state()  # or a new cohort would be begun in vain at each try, and each be dropped one day
        with self._database.transaction() as transaction:
            stack = str(transaction.value(SQL["begin_cohort"], {"prefix": self._prefix, "scope": self._scope}))
            transaction.run(SQL["put_in_cohort"], {"stack": stack, **_columns(objects)})
        with self._lock:
            self._under_way.add(stack)
        return Begun(stack=stack, objects=objects)

    def make(self, begun: Begun) -> int:
        """Make what was begun, and write down what came of it; raises as `up` does. On any thread."""
        try:
            return self._make(begun)
        finally:
            self._forget(begun)

    def forsake(self, begun: Begun) -> None:
        """Nothing will be made of it."""
        try:
            self._end(begun.stack, SetupError.__name__, nothing_made=True)
        finally:
            self._forget(begun)

    def _forget(self, begun: Begun) -> None:
        with self._lock:
            self._under_way.discard(begun.stack)

    def _make(self, begun: Begun) -> int:
        stack, objects = begun.stack, begun.objects
        failures: dict[str, str] = {}
        try:
            changes = self._engine.up_new(stack, cohort_program(objects, self._stack_id))
        except EngineFailed as error:
            changes = tuple(change for change in error.changes if isinstance(change, ResourceChange))
            failures = {failure.urn.rpartition("::")[2]: failure.message for failure in error.failures}
            if not failures:
                self._end(stack, OutcomeUnknown.__name__)
                raise OutcomeUnknown(str(error)) from error
        except OrcaError as error:
            # Only these two say that the engine never came to make anything.
            self._end(stack, type(error).__name__, nothing_made=isinstance(error, SetupError | StackLocked))
            raise
        return self._confirm(stack, objects, changes, failures)

    def next_try_seconds(self) -> float | None:
        """In how long something that was refused is to be tried again; None when nothing is."""
        with self._database.snapshot() as transaction:
            seconds = transaction.value(SQL["next_try"], {"scope": self._scope})
        return None if seconds is None else float(seconds)

    def drop_empty(self, most: int = DROPS_MAX) -> int:
        """Forget cohorts that declare nothing any more, so many at the most; gives how many."""
        with self._database.snapshot() as transaction:
            rows = transaction.dicts(SQL["empty_cohorts"], {"scope": self._scope, "limit": most})
        dropped = 0
        for row in rows:
            try:
                self._engine.drop(row["stack"], even_torn=True)
            except StateBroken as error:
                # Nothing is declared in it any more; it only stays until somebody looks, and keeps no other.
                self._end(row["stack"], StateBroken.__name__)
                self._log.warning("cohort not dropped", pulumi_stack=row["stack"], why=str(error))
                continue
            with self._database.transaction() as transaction:
                transaction.run(SQL["forget_cohort"], {"stack": row["stack"]})
            dropped += 1
        return dropped

    def _confirm(
        self, stack: str, objects: Sequence[OpenObject], changes: Iterable[ResourceChange], failures: Mapping[str, str]
    ) -> int:
        uids = {
            change.name: str(change.outputs.get("metadata", {}).get("uid") or "") for change in changes if change.id
        }
        confirmed = [item for item in objects if uids.get(item.resource)]
        failed = [item for item in objects if not uids.get(item.resource) and item.resource in failures]
        refused: dict[Key, str] = {}
        with self._database.transaction() as transaction:
            made = transaction.run(
                SQL["confirm_objects"], {**_columns(confirmed), "uids": [uids[item.resource] for item in confirmed]}
            )
            for item in failed:
                key = {"namespace": item.namespace, "kind": item.kind, "name": item.name}
                message = failures[item.resource][:_MESSAGE_LIMIT]
                absent = refusal_of(message) is not Refusal.UNKNOWN
                transaction.run(SQL["refuse_object"], {**key, "message": message, "absent": absent})
                refused[item.namespace, item.kind, item.name] = message
            transaction.run(SQL["end_cohort"], {"stack": stack, "outcome": "Done"})
        for (namespace, kind, name), message in refused.items():
            self._log.warning("object refused", kind=kind, object=f"{namespace}/{name}", said=message)
        self._log.info("cohort made", pulumi_stack=stack, objects=made, refused=len(refused))
        return made

    def _end(self, stack: str, outcome: str, *, nothing_made: bool = False) -> None:
        with self._database.transaction() as transaction:
            if nothing_made:
                transaction.run(SQL["nothing_made"], {"stack": stack})
            transaction.run(SQL["end_cohort"], {"stack": stack, "outcome": outcome})


def cohort_program(objects: Sequence[OpenObject], stack_id: str) -> Program:
    """A program that declares these objects: each run's Job first, then what it owns, with the Job's uid filled in."""

    def program(registrar: Registrar) -> None:
        provider = registrar.register(
            "pulumi:providers:kubernetes",
            "cluster",
            {"clusterIdentifier": stack_id, "enableServerSideApply": "true", "kubeClientSettings": _CLIENT},
        ).result()
        if provider is None:
            return
        jobs = {(item.run, item.start): _register(registrar, item, provider) for item in objects if item.kind == "Job"}
        made = {key: job.result() for key, job in jobs.items()}
        pending = []
        for item in objects:
            if item.kind == "Job":
                continue
            job = made.get((item.run, item.start))
            uid = job.outputs["metadata"]["uid"] if job else item.job_uid
            if item.run is not None and not uid:
                continue  # its Job was refused: it goes with a later cohort, or ends with its run
            pending.append(_register(registrar, item, provider, owner=job, uid=uid))
        for registration in pending:
            registration.result()

    return program


def _register(
    registrar: Registrar,
    item: OpenObject,
    provider: Registered,
    *,
    owner: Registered | None = None,
    uid: str | None = None,
) -> Any:
    return registrar.register(
        _TYPES[item.kind],
        item.resource,
        fill(item.rendered, uid) if uid else item.rendered,
        provider=provider,
        depends_on=[owner] if owner else [],
        protect=True,
    )


def fill(value: Any, job_uid: str) -> Any:
    """The manifest with the Job's uid wherever its placeholder stands."""
    if isinstance(value, Mapping):
        return {key: fill(inner, job_uid) for key, inner in value.items()}
    if isinstance(value, list):
        return [fill(inner, job_uid) for inner in value]
    return job_uid if value == JOB_UID_PLACEHOLDER else value


def _columns(objects: Sequence[OpenObject]) -> dict[str, list[str]]:
    return {
        "namespaces": [item.namespace for item in objects],
        "kinds": [item.kind for item in objects],
        "names": [item.name for item in objects],
    }
