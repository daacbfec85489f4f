"""Launches: take a warm Pod that fits, or have one made, and give it the user's secrets.

Any process may launch, the loop's leader or not: a Pod is claimed in Postgres, in one statement, and given its Secret through
the Kubernetes API; the engine is never asked. What a launch that was cut short leaves, its retry with the same key completes,
or the loop ends as Abandoned.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from time import monotonic
from typing import Any
from uuid import UUID

from orca_infra.allowed import Allowed
from orca_infra.db.connection import Database
from orca_infra.errors import AuthFailed, Conflict, OrcaError, QuotaExceeded, Refused, Transient
from orca_infra.kube.client import Kube
from orca_infra.kube.kinds import RUNTIME_ENVIRONMENT, RUNTIME_POOL, SECRET, Ref
from orca_infra.log import Log
from orca_infra.metrics import METRICS
from orca_infra.runtimes.model import EndReason, Environment, Pool
from orca_infra.runtimes.observe import SQL, read_environment, read_pool
from orca_infra.runtimes.render import render_cold, render_secret
from orca_infra.runtimes.resources import amounts_of, placement_of
from orca_infra.runtimes.rows import next_numbers, record_pods
from orca_infra.runtimes.secrets import gather_secrets
from orca_infra.runtimes.touch import TOUCHES, PodLost, Touch, touch

#: Pods that may die one after the other in one launch's hands before it is given up.
_TRIES = 10
#: Both together are a key of an index, which takes no more; the API server's names of service accounts are much shorter.
_NAME_BYTES = 1000
#: Of environments or pools, to somebody who asked for one that is not there.
_NAMES_SHOWN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchHands:
    """What a launch needs. `namespace` is that of the runtimes; `allowed`: what the policies let a cold start be made of."""

    database: Database
    kube: Kube
    namespace: str
    stack_id: str
    log: Log
    allowed: Allowed = field(default_factory=Allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """What is asked for.

    Attributes:
        environment: by name.
        user: whose secrets it is given.
        requests: resources that the Pod has at least, as Kubernetes quantities.
        node_selector: labels of the node; None: whatever the pool has.
        pool: only of this one; None: any that fits.
        secrets: in addition to the user's.
        idempotency_key: of the user's; the same key gives the same runtime.

    """

    environment: str
    user: str
    requests: Mapping[str, str] | None = None
    node_selector: Mapping[str, str] | None = None
    pool: str | None = None
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    idempotency_key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A runtime that was launched.

    Attributes:
        warm: whether it runs already; else the loop makes its Pod.
        expires_at: when it is culled; None: never.
        address: of its Pod, where that is known.
        pool: that its Pod waited in; None for a cold start.
        burning_rate: credits a second.
        assigned_at: when it was taken.
        credits: what it has cost up to now.

    """

    id: UUID
    pod: str
    namespace: str
    warm: bool
    expires_at: datetime | None
    address: str | None = None
    pool: str | None = None
    burning_rate: float = 0.0
    assigned_at: datetime | None = None
    credits: float = field(default=0.0, compare=False)  # of one runtime it grows from one answer to the next


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cost:
    """What a launch says of its runtime beside the claim; read as the claim is settled, which costs no way of its own."""

    pool: str | None
    burning_rate: float
    assigned_at: datetime
    credits: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Claim:
    """A runtime's row with its Pod's, as the statements give it. `ended`: why, when it is ending or has ended."""

    id: UUID
    pod: str
    namespace: str
    uid: str | None
    address: str | None
    warm: bool
    environment: str
    expires_at: datetime | None
    secret_made: bool
    ended: str | None
    ended_detail: str

    def launch(self, cost: _Cost) -> Launch:
        return Launch(
            id=self.id,
            pod=self.pod,
            namespace=self.namespace,
            warm=self.warm,
            expires_at=self.expires_at,
            address=self.address,
            pool=cost.pool,
            burning_rate=cost.burning_rate,
            assigned_at=cost.assigned_at,
            credits=cost.credits,
        )


def launch(hands: LaunchHands, request: LaunchRequest) -> Launch:
    """Give the user a runtime: the smallest warm Pod that fits, else one of its own, which the loop makes.

    Raises:
        Refused: it can never be had so (no such environment or pool, too many secrets, a key of another launch), or the
            runtime of this key has ended; in the API server's words when that refused its Pod.
        Transient, AuthFailed, QuotaExceeded: Kubernetes or the database say so; with a key, the caller tries again.

    """
    asked = _checked(request)
    with TOUCHES.launching():
        try:
            return _launch(hands, request, asked)
        except OrcaError as error:
            METRICS.launch_failed(type(error).__name__)
            raise


def _launch(hands: LaunchHands, request: LaunchRequest, asked: Mapping[str, int]) -> Launch:
    began_at = monotonic()
    if (known := _known(hands, request, asked)) is not None and known.secret_made:
        return known.launch(_cost(hands, known))
    data = gather_secrets(hands.kube, hands.namespace, request.user, request.secrets)
    for _ in range(_TRIES):
        claim = _claim(hands, request, asked) or _start_cold(hands, request)
        if claim.secret_made:  # by another request with this key
            return claim.launch(_cost(hands, claim))
        try:
            cost = _give(hands, claim, data, keep=request.idempotency_key is not None)
        except PodLost as lost:
            _write(hands, "discard_runtime", claim, reason=str(EndReason.DISCARDED), detail=str(lost))
            hands.log.warning("runtime Pod discarded", pod=claim.pod, why=str(lost))
            continue
        METRICS.claimed(monotonic() - began_at, warm=claim.warm)
        hands.log.info("runtime launched", id=str(claim.id), pod=claim.pod, user=request.user, warm=claim.warm)
        return claim.launch(cost)
    raise Transient(f"{_TRIES} Pods of environment {request.environment} died while they were taken; try again")


def _checked(request: LaunchRequest) -> dict[str, int]:
    """What is asked for in thousandths."""
    for what, text in (("a user", request.user), ("an environment", request.environment)):
        if not text:
            raise Refused(f"a launch needs {what}")
    for what, text in (
        ("user", request.user),
        ("idempotency key", request.idempotency_key or ""),
        ("environment", request.environment),
        ("pool", request.pool or ""),
    ):
        _check_name(what, text)
    try:
        return amounts_of(request.requests or {})
    except ValueError as error:
        raise Refused(f"in the resources asked for, {error}") from None


def _check_name(what: str, text: str) -> None:
    """Raises Refused for what the database could not keep: it is no text, or too long for an index."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise Refused(f"the {what} of a launch holds halves of characters") from None
    if "\0" in text:
        raise Refused(f"the {what} of a launch holds a NUL character")
    if size > _NAME_BYTES:
        raise Refused(f"the {what} of a launch has {size} bytes, more than {_NAME_BYTES}")


def _known(hands: LaunchHands, request: LaunchRequest, asked: Mapping[str, int]) -> _Claim | None:
    """The runtime that this key stands for. Raises Refused when it is not what is asked for now."""
    if request.idempotency_key is None:
        return None
    with hands.database.statement() as statement:
        rows = statement.rows(_Claim, SQL["by_key"], {"user": request.user, "key": request.idempotency_key})
        if not rows:
            return None
        fits = statement.value(SQL["is_as_asked"], {"pod": rows[0].pod, **_wishes(request, asked)})
    claim = _usable(rows[0], request)
    if not fits:
        raise Refused(
            f"the key {request.idempotency_key!r} stands for runtime {claim.id} already, which has not the resources, the "
            f"node selection or the pool that this launch asks for"
        )
    return claim


def _wishes(request: LaunchRequest, asked: Mapping[str, int]) -> dict[str, Any]:
    """What a Pod has to fit, as the statements take it."""
    placement = None if request.node_selector is None else json.dumps(placement_of(request.node_selector, {}))
    return {"pool": request.pool, "requests": json.dumps(asked), "placement": placement}


def _usable(claim: _Claim, request: LaunchRequest) -> _Claim:
    if claim.environment != request.environment:
        raise Refused(
            f"the key {request.idempotency_key!r} stands for a runtime of environment {claim.environment} already"
        )
    if claim.ended:
        raise Refused(f"runtime {claim.id} has ended: {': '.join(filter(None, (claim.ended, claim.ended_detail)))}")
    return claim


def _claim(hands: LaunchHands, request: LaunchRequest, asked: Mapping[str, int]) -> _Claim | None:
    """A warm Pod that fits, taken for good; None when there is none."""
    parameters = {
        "environment": request.environment,
        "namespace": hands.namespace,
        "user": request.user,
        "key": request.idempotency_key,
        **_wishes(request, asked),
    }
    with hands.database.statement() as statement:
        rows = statement.rows(_Claim, SQL["claim"], parameters)
    return _usable(rows[0], request) if rows else None


def _start_cold(hands: LaunchHands, request: LaunchRequest) -> _Claim:
    """A row of its own: the loop's next `up` makes the Pod."""
    environment, pool = _environment_and_pool(hands, request)
    parameters = {"user": request.user, "key": request.idempotency_key, "namespace": hands.namespace}
    with hands.database.transaction() as transaction:
        if request.idempotency_key is not None:
            transaction.value(SQL["lock_key"], parameters)
            if known := transaction.rows(_Claim, SQL["by_key"], parameters):
                return _usable(known[0], request)
        [number] = next_numbers(transaction, 1)
        try:
            pod = render_cold(
                pool,
                environment,
                number,
                hands.stack_id,
                requests=request.requests or {},
                node_selector=request.node_selector,
            )
        except ValueError as error:
            raise Refused(f"pool {pool.name} cannot be used: in its resources, {error}") from None
        if transaction.value(SQL["is_family_paused"]):
            raise Refused("this stack is paused, and makes no runtime, until `orca-infra resume`")
        record_pods(transaction, [pod], taken=True)
        transaction.value(SQL["wake_loop"])
        return transaction.rows(_Claim, SQL["record_runtime"], {**parameters, "name": pod.name})[0]


def _environment_and_pool(hands: LaunchHands, request: LaunchRequest) -> tuple[Environment, Pool]:
    """The environment, and the pool whose rate and time hold: the one that is named, else the environment's first by name."""
    found = hands.kube.get(Ref(kind=RUNTIME_ENVIRONMENT, namespace=hands.namespace, name=request.environment))
    if found is None:
        others = hands.kube.list(RUNTIME_ENVIRONMENT, namespace=hands.namespace).items
        there = ", ".join(sorted(str(item["metadata"]["name"]) for item in others)[:_NAMES_SHOWN])
        said = f"; there are: {there}" if there else ", nor any other"
        raise Refused(f"there is no environment {request.environment} in namespace {hands.namespace}{said}")
    pools = (read_pool(item) for item in hands.kube.list(RUNTIME_POOL, namespace=hands.namespace).items)
    of_it = [pool for pool in pools if pool.environment == request.environment and not pool.deleting]
    if not of_it:
        raise Refused(f"environment {request.environment} has no pool, and so no burningRate and no time")
    fitting = [pool for pool in of_it if request.pool in {None, pool.name}]
    if not fitting:
        there = ", ".join(sorted(pool.name for pool in of_it)[:_NAMES_SHOWN])
        raise Refused(f"environment {request.environment} has no pool {request.pool}; it has: {there}")
    environment = read_environment(found)
    if not hands.allowed.has_image(environment.image):
        raise Refused(
            f"the policies (image-registries) do not allow image {environment.image} of environment {environment.name}"
        )
    return environment, min(fitting, key=lambda pool: pool.name)


def _give(hands: LaunchHands, claim: _Claim, data: Mapping[str, str], *, keep: bool) -> _Cost:
    """Make the Secret and have the kubelet read it. `keep`: what may pass leaves the claim to a retry."""
    secret = render_secret(
        claim.pod, claim.namespace, data, stack_id=hands.stack_id, owner_uid=claim.uid if claim.warm else None
    )
    try:
        _make_secret(hands, claim, dict(secret))
    except (AuthFailed, QuotaExceeded, Refused) as error:
        if claim.warm:  # nothing was made: somebody else may have the Pod
            _write(hands, "release_runtime", claim)
        else:
            _write(hands, "discard_runtime", claim, reason=str(EndReason.DISCARDED), detail=str(error))
        raise
    except Transient as error:
        if not keep:
            _write(hands, "discard_runtime", claim, reason=str(EndReason.DISCARDED), detail=str(error))
        raise
    touched = Touch(kube=hands.kube, namespace=claim.namespace, pod=claim.pod, uid=claim.uid, runtime=claim.id)
    if claim.warm:
        touch(touched)
    with hands.database.statement() as statement:
        given = statement.rows(_Cost, SQL["secret_made"], {"id": claim.id})
    if not given:
        raise PodLost("its Pod ended meanwhile")
    if claim.warm:
        TOUCHES.again(touched)
    return given[0]


def _cost(hands: LaunchHands, claim: _Claim) -> _Cost:
    """Of a runtime that its key stood for already."""
    with hands.database.statement() as statement:
        found = statement.rows(_Cost, SQL["cost"], {"id": claim.id})
    if not found:
        raise Refused(f"runtime {claim.id} has ended")
    return found[0]


def _make_secret(hands: LaunchHands, claim: _Claim, secret: dict[str, Any]) -> None:
    """Make it, or fill the one that an earlier try of the same launch made: no other has a Pod's name."""
    try:
        hands.kube.create(secret)
    except Conflict as taken:
        ref = Ref(kind=SECRET, namespace=claim.namespace, name=claim.pod)
        found = hands.kube.get(ref)
        if found is None or found["metadata"].get("labels") != secret["metadata"]["labels"]:
            raise PodLost(f"a Secret of another holds its name ({taken})") from None
        old = dict.fromkeys(found.get("data") or {})
        hands.kube.patch(ref, {"data": {**old, **secret["data"]}}, uid=found["metadata"]["uid"])


def _write(hands: LaunchHands, statement: str, claim: _Claim, **more: str) -> bool:
    with hands.database.statement() as one:
        return one.run(SQL[statement], {"id": claim.id, **more}) > 0
