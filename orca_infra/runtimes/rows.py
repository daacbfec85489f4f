"""Writes to the runtimes' rows that need no engine, for the API process and the loop alike."""

from __future__ import annotations

import json
from dataclasses import asdict

from orca_infra.db.connection import Database, Transaction
from orca_infra.kube.kinds import Object
from orca_infra.runtimes.model import Mark
from orca_infra.runtimes.observe import SQL, read_object
from orca_infra.runtimes.render import RenderedPod
from orca_infra.runtimes.resources import size_of


def note_pod(database: Database, item: Object) -> bool:
    """Write what a watch shows of a Pod in its row, so that it can be taken as soon as it is Ready. For the leader only.

    Gives whether anything was new. A Pod without a row, or that ends, is nobody's to note.
    """
    seen = read_object({"kind": "Pod", **item})
    mark = Mark(
        namespace=seen.namespace,
        name=seen.name,
        uid=seen.uid,
        ready=seen.can_serve,
        address=seen.address,
        problem=seen.problem,
    )
    with database.transaction() as transaction:
        return transaction.run(SQL["mark_pod"], asdict(mark)) > 0


def record_pod(transaction: Transaction, pod: RenderedPod, *, taken: bool) -> None:
    """Write a Pod's row and its object: from here on a cohort makes it."""
    transaction.run(
        SQL["record_pod"],
        {
            "name": pod.name,
            "namespace": pod.namespace,
            "pool": pod.pool,
            "environment": pod.environment,
            "requests": json.dumps(pod.requests),
            "size": list(size_of(pod.requests)),
            "placement": json.dumps(pod.placement),
            "burning_rate": pod.burning_rate,
            "cull_seconds": pod.cull_seconds,
            "taken": taken,
        },
    )
    transaction.run(
        SQL["record_object"], {"namespace": pod.namespace, "name": pod.name, "rendered": json.dumps(pod.manifest)}
    )


def prune(database: Database, kept_seconds: float) -> None:
    """Delete the rows of what ended long ago."""
    with database.transaction() as transaction:
        transaction.run(SQL["prune_runtimes"], {"kept_seconds": kept_seconds})
        transaction.run(SQL["prune_pods"], {"kept_seconds": kept_seconds})
