"""Strays on Kubernetes, for an operator: the loop deletes a few by itself, and leaves too many at once to a person."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime

from orca_infra.kube.claim import claim_cluster
from orca_infra.kube.client import Kube
from orca_infra.kube.kinds import JOB, POD, SECRET, SERVICE, Ref
from orca_infra.loop.cluster_passes import runtime_limits
from orca_infra.runs.decide import decide
from orca_infra.runs.limits import run_limits
from orca_infra.runs.model import SeenObject as RunObject
from orca_infra.runs.observe import observe
from orca_infra.runtimes.decide import decide as decide_runtimes
from orca_infra.runtimes.model import SeenObject as RuntimeObject
from orca_infra.runtimes.observe import observe as observe_runtimes
from orca_infra.surroundings import Surroundings

_KINDS = {kind.kind: kind for kind in (JOB, POD, SECRET, SERVICE)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStray:
    """An object that carries this stack's identity and a role, that nobody owns, and that is past its grace."""

    kind: str
    namespace: str
    name: str
    uid: str
    created_at: datetime


class ClusterStrays:
    """The strays of run clusters and runtime pools. `open_strays` makes it."""

    def __init__(self, surroundings: Surroundings, kube: Kube) -> None:
        self._surroundings, self._kube = surroundings, kube

    def find(self) -> list[ClusterStray]:
        """All of them, however many they are. Raises SetupError for another cluster, and what reading it raises."""
        claim_cluster(self._kube, self._surroundings.database)
        settings, database, stack_id = (
            self._surroundings.settings,
            self._surroundings.database,
            self._surroundings.stack_id,
        )
        found: list[RunObject | RuntimeObject] = []
        if settings.runner is not None:
            limits = replace(run_limits(settings), stray_max=sys.maxsize)
            seen = observe(database, self._kube, limits, stack_id=stack_id, namespace=settings.runs_namespace)
            found += decide(seen, limits).strays
        if settings.runtimes_namespace is not None:
            bounds = replace(runtime_limits(settings), stray_max=sys.maxsize)
            pods = observe_runtimes(database, self._kube, stack_id=stack_id, namespace=settings.runtimes_namespace)
            found += decide_runtimes(pods, bounds).strays
        return [
            ClusterStray(kind=s.kind, namespace=s.namespace, name=s.name, uid=s.uid, created_at=s.created_at)
            for s in found
        ]

    def delete(self, stray: ClusterStray) -> None:
        """This very one. Raises what the API server's answer means."""
        ref = Ref(kind=_KINDS[stray.kind], namespace=stray.namespace, name=stray.name)
        self._kube.delete(ref, uid=stray.uid, propagation="Background")


@contextmanager
def open_strays(surroundings: Surroundings) -> Iterator[ClusterStrays | None]:
    """None when no cluster is used. Raises SetupError when there is none to be had."""
    if not surroundings.settings.uses_cluster:
        yield None
        return
    with Kube.connect(kubeconfig=surroundings.settings.kubeconfig) as kube:
        yield ClusterStrays(surroundings, kube)
