"""What is so at this moment of a run, a machine, a runtime's Pod or a pool, in sentences: read from the database alone."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from orca_infra.db.connection import Transaction
from orca_infra.machines.model import MachineRow
from orca_infra.machines.observe import SQL as MACHINES
from orca_infra.quantity import duration_text
from orca_infra.record.passes import SQL
from orca_infra.runs.model import RunLimits
from orca_infra.runs.status import what_queued_wait_for

_WORKER = "worker:"


def about_now(transaction: Transaction, name: str, *, limits: RunLimits | None, at: datetime) -> list[str]:
    """Sentences about what has this name; none when nothing has. `limits`: of the run clusters; None: there are none."""
    if name.isascii() and name.isdigit() and len(name) < 19:
        rows = transaction.dicts(SQL["run_for_people"], {"run": int(name)})
        if rows:
            return _of_run(transaction, rows[0], limits, at)
    sentences: list[str] = []
    for row in transaction.dicts(SQL["machine_for_people"], {"name": name}):
        sentences += _of_machine(transaction, row, at)
    for row in transaction.dicts(SQL["runtime_pod_for_people"], {"name": name}):
        sentences += _of_pod(row, at)
    for row in transaction.dicts(SQL["pool_for_people"], {"pool": name}):
        sentences += _of_pool(row, at)
    return sentences


def _ago(then: datetime, at: datetime) -> str:
    return duration_text(max(0.0, round((at - then).total_seconds())))


def _of_machine(transaction: Transaction, row: dict[str, Any], at: datetime) -> list[str]:
    name, place = row["name"], f"{row['type']} in {row['location']}"
    if row["ended_at"] is not None:
        return [f"{name} ({place}) ended {_ago(row['ended_at'], at)} ago: {row['reason']}"]
    live = {one.name: one for one in transaction.rows(MachineRow, MACHINES["live_machines"])}
    machine = live[name]
    said = f"{name} ({place}) is {machine.state}, made {_ago(row['created_at'], at)} ago"
    if machine.removal_reason is not None:
        said += f", and goes: {machine.removal_reason}"
    elif machine.running:
        said += f", and runs {machine.running} of {machine.slots}"
    elif machine.idle_since is not None:
        said += f", and has run nothing for {_ago(machine.idle_since, at)}"
    pool = transaction.dicts(SQL["pool_for_people"], {"pool": row["pool"]})
    return [said, *(_of_pool(pool[0], at) if pool else [])]


def _of_pool(row: dict[str, Any], at: datetime) -> list[str]:
    runs = "1 run waits" if row["demand"] == 1 else f"{row['demand']} runs wait" if row["demand"] else "no run waits"
    sentences = [f"pool {row['pool']}: {runs} for a machine: {row['message'] or 'no pass has judged it yet'}"]
    if row["next_try_at"] is not None and row["next_try_at"] > at:
        sentences.append(f"its next try comes in {_ago(at, row['next_try_at'])}")
    if row["tried_at"] is not None:
        sentences.append(f"its last try, {_ago(row['tried_at'], at)} ago: {row['last_attempt']}")
    return [*sentences, *([row["skipped"]] if row["skipped"] else [])]


def _of_pod(row: dict[str, Any], at: datetime) -> list[str]:
    of = f"pool {row['pool']}" if row["pool"] else "a cold start"
    said = f"{row['name']} of {of}, environment {row['environment']}, made {_ago(row['created_at'], at)} ago, "
    if row["ended_at"] is not None:
        return [f"{said}ended {_ago(row['ended_at'], at)} ago: {row['reason']}: {row['ending_detail']}"]
    if row["ending_reason"] is not None:
        return [f"{said}ends: {row['ending_reason']}: {row['ending_detail']}"]
    if row["taken_at"] is None:
        return [said + ("is warm" if row["ready_at"] else f"is not Ready: {row['problem'] or 'it was not seen yet'}")]
    until = f", and is culled in {_ago(at, row['expires_at'])}" if row["expires_at"] else ""
    ready = "" if row["ready_at"] else f", and is not Ready: {row['problem'] or 'it was not seen yet'}"
    return [f"{said}is runtime {row['runtime'] or 'none any more'} since {_ago(row['taken_at'], at)}{until}{ready}"]


def _of_run(transaction: Transaction, row: dict[str, Any], limits: RunLimits | None, at: datetime) -> list[str]:
    since = {"queued": row["queued_at"], "running": row["started_at"]}.get(row["state"], row["ended_at"])
    said = f"run {row['run']} of {row['pipeline']} is {row['state']}" + (f" since {_ago(since, at)}" if since else "")
    if row["worker"]:
        said += f", on {row['worker']}"
    if row["start"]:
        said += f"; started {'once' if row['start'] == 1 else str(row['start']) + ' times'}"
    if row["reason"]:
        said += f"; reason: {row['reason']}"
    return [said] if row["state"] != "queued" else [said, *_why_queued(transaction, row, limits, at)]


def _why_queued(transaction: Transaction, row: dict[str, Any], limits: RunLimits | None, at: datetime) -> list[str]:
    if row["paused"]:
        return ["its pipeline is paused"]
    if not row["fill"] and row["max_runs"] is not None and row["running"] >= row["max_runs"]:
        return [f"its pipeline runs max_runs ({row['max_runs']}) already"]
    placement = row["placement"] or ""
    if placement.startswith(_WORKER):
        pool = placement.removeprefix(_WORKER)
        found = transaction.dicts(SQL["pool_for_people"], {"pool": pool})
        return _of_pool(found[0], at) if found else [f"it waits for pool {pool}, and no pass has seen such a pool"]
    if limits is None:
        return ["ORCA_RUNNER is not set: no run clusters are made, and its pipeline is placed on no pool"]
    waiting = what_queued_wait_for(transaction, limits, asked=row["run"])
    return [one["waiting"] for one in waiting if one["run"] == row["run"]]
