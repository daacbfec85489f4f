"""Put a preview together: the base's diff and the machine stacks' from the engine, the decisions from a demand."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from orca_infra.config import Config, load_config
from orca_infra.db.connection import load_queries
from orca_infra.errors import OrcaError, UserError
from orca_infra.kube.client import Kube
from orca_infra.loop.cluster_passes import runtime_limits
from orca_infra.loop.passes import look, make_providers
from orca_infra.machines.observe import SQL, machine_stack
from orca_infra.policy.folder import pack_folder
from orca_infra.preview.cost import price_at_most
from orca_infra.preview.decisions import cost_at_most, decide_all
from orca_infra.preview.demand import FORM, Demand, read_demand
from orca_infra.preview.events import read_preview
from orca_infra.preview.model import Cost, Decisions, Preview, StackPreview
from orca_infra.preview.secrets import Redactor, passwords_of
from orca_infra.quantity import duration_text
from orca_infra.runs.limits import run_limits
from orca_infra.runs.observe import observe as observe_runs
from orca_infra.runtimes.observe import observe as observe_runtimes
from orca_infra.settings import Settings
from orca_infra.stack.engine import Engine
from orca_infra.stack.outcome import STACK_NOT_FOUND
from orca_infra.stack.presence import require_state
from orca_infra.surroundings import Surroundings, open_surroundings

ENGINE = load_queries("engine")
LIVE, NONE = "live", "none"
#: Previews that run side by side; each takes a core for seconds.
_AT_ONCE = 2
_PREVIEW_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a preview is asked for.

    Attributes:
        demand: `live`, `none`, or a file's path.
        stacks: whether the engine previews the stacks; None: unless the demand is a file and ORCA_DB is not set.
        before: the orca.toml of before, for what there could be at most then.
        project: the folder with Pulumi.yaml.

    """

    demand: str = LIVE
    stacks: bool | None = None
    before: Path | None = None
    project: Path = Path()


def redactor(settings: Settings, environ: Mapping[str, str]) -> Redactor:
    """Takes out what this process knows as secret."""
    values = [settings.db or "", settings.backend_url or "", *passwords_of(settings.db or "")]
    values += passwords_of(settings.backend_url or "")
    values.append(settings.token_key.decode(errors="surrogateescape") if settings.token_key else "")
    values += [environ.get(name, "") for name in ("PULUMI_CONFIG_PASSPHRASE", "GITHUB_TOKEN", "GH_TOKEN")]
    for file in (settings.passphrase_file, settings.home / "passphrase", settings.home / "token-key"):
        try:
            values.append(file.read_text(errors="surrogateescape") if file else "")
        except OSError:
            continue
    return Redactor(values)


def gather(asked: Asked, settings: Settings, say: Callable[[str], None]) -> Preview:
    """All of a preview.

    Raises UserError for what the caller has to mend; what goes wrong with a stack, or with the decisions, is in the preview.
    """
    if not asked.demand:
        raise UserError("--demand is empty: say live, none, or the file of `orca-infra snapshot`")
    redact = redactor(settings, os.environ)
    config = load_config(settings.config_path)
    before = load_config(asked.before) if asked.before else None
    file = asked.demand if asked.demand not in {LIVE, NONE} else None
    stacks = asked.stacks if asked.stacks is not None else not (file and settings.db is None)
    notes: list[str] = []
    if not stacks and asked.stacks is None:
        notes.append("The stacks are not previewed: ORCA_DB is not set, so that their state is not within reach.")
    demand = read_demand(Path(file)) if file else None
    if demand is not None and demand.stack != settings.stack:
        raise UserError(
            f"{file} is of stack {demand.stack!r}, and ORCA_STACK is {settings.stack!r}: set it to that stack, "
            f"or take a snapshot of this one"
        )
    if stacks:
        _check_project(asked.project)
    previews: tuple[StackPreview, ...] = ()
    decisions: Decisions | None = None
    cost = cost_at_most(config, settings.limits(config))
    if stacks or asked.demand == LIVE:
        surroundings = open_surroundings(settings, say=say)
        try:
            # Made in ORCA_HOME where they were not set: known only now.
            redact = redactor(replace(settings, db=surroundings.url, token_key=surroundings.token_key), os.environ)
            if stacks:
                previews = _preview_stacks(asked.project, surroundings, redact, say)
            if asked.demand == LIVE:
                decisions, cost = _decide_live(surroundings, config, redact)
        finally:
            surroundings.close()
    if demand is not None:
        age = duration_text(max(0.0, round((datetime.now(UTC) - demand.taken_at).total_seconds())))
        source = f"the demand of {demand.taken_at:%Y-%m-%d %H:%M} UTC ({age} ago)"
        decisions, cost = decide_all(demand, config, source, settings.allowed if settings.policies else None)
    if before is not None:
        most = price_at_most(before.pools, settings.limits(before), before.max_machines_total)
        cost = replace(cost, most_before=most)
    return Preview(stack=settings.stack, stacks=previews, decisions=decisions, cost=cost, notes=tuple(notes))


def take(surroundings: Surroundings, config: Config) -> Demand:
    """What a pass would see now, of everything that this stack has. Raises as observing does."""
    settings, stack_id = surroundings.settings, surroundings.stack_id
    held = _held(surroundings, config)
    machines = look(surroundings, make_providers(surroundings, config), pools=config.pools, held=held)
    demand = Demand(
        form=FORM,
        stack=settings.stack,
        taken_at=machines.now,
        machines=machines,
        limits=settings.limits(config),
    )
    if not settings.uses_cluster:
        return demand
    with Kube.connect(kubeconfig=settings.kubeconfig) as kube:
        if settings.runner:
            limits, namespace = run_limits(settings), settings.runs_namespace
            runs = observe_runs(surroundings.database, kube, limits, stack_id=stack_id, namespace=namespace)
            demand = replace(demand, runs=runs, run_limits=limits)
        if settings.runtimes_namespace:
            namespace = settings.runtimes_namespace
            runtimes = observe_runtimes(surroundings.database, kube, stack_id=stack_id, namespace=namespace)
            demand = replace(demand, runtimes=runtimes, runtime_limits=runtime_limits(settings))
    return demand


def _held(surroundings: Surroundings, config: Config) -> dict[str, str]:
    """Pools whose machines the loop is at: what is half done there is no fault to be decided about."""
    family = surroundings.settings.stack
    with surroundings.database.snapshot() as transaction:
        busy = {row["stack"] for row in transaction.dicts(ENGINE["unsettled_stacks"])}
        pools = {row["pool"] for row in transaction.dicts(SQL["declared_machines"])}
    pools.update(pool.name for pool in config.pools)
    why = "the loop is making or removing machines of it at this moment"
    return {pool: why for pool in sorted(pools) if machine_stack(family, pool) in busy}


def _decide_live(surroundings: Surroundings, config: Config, redact: Callable[[str], str]) -> tuple[Decisions, Cost]:
    settings = surroundings.settings
    try:
        demand = take(surroundings, config)
    except OrcaError as error:
        failed = Decisions(source="the demand of now", error=redact(str(error)))
        return failed, cost_at_most(config, settings.limits(config))
    return decide_all(demand, config, "the demand of now", settings.allowed)


def _check_project(project: Path) -> None:
    if not (project / "Pulumi.yaml").is_file():
        raise UserError(
            f"{project.absolute()} has no Pulumi.yaml, which says what the base stack's program is: name its folder with "
            "--project, or leave the stacks out with --no-stacks"
        )


def _preview_stacks(
    project: Path, surroundings: Surroundings, redact: Callable[[str], str], say: Callable[[str], None]
) -> tuple[StackPreview, ...]:
    """The base's preview first, then those of the machine stacks that have rows."""
    settings = surroundings.settings
    engine = Engine(surroundings.engine, _program_environment(surroundings))
    with surroundings.database.snapshot() as transaction:
        rows = transaction.dicts(SQL["declared_machines"])
    derived = sorted({machine_stack(settings.stack, row["pool"]) for row in rows})
    say(f"previewing {', '.join([settings.stack, *derived])} …")
    options = ["--policy-pack", str(pack_folder())]
    if settings.policies is not None:
        options += ["--policy-pack-config", str(settings.policies.path)]
    require_state(surroundings.database, surroundings.engine.backend_url, engine)

    def preview(stack: str) -> StackPreview:
        return _preview_stack(engine, stack, project.absolute(), options, redact)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return tuple(pool.map(preview, [settings.stack, *derived]))


def _preview_stack(
    engine: Engine, stack: str, project: Path, options: list[str], redact: Callable[[str], str]
) -> StackPreview:
    is_base = "." not in stack
    try:
        completed, log = engine.preview_project(stack, project, options, deadline_seconds=_PREVIEW_SECONDS)
        if completed.code == STACK_NOT_FOUND and is_base:
            # Only now: making a stack takes its lock, which a deploy job may hold.
            engine.init(stack)
            completed, log = engine.preview_project(stack, project, options, deadline_seconds=_PREVIEW_SECONDS)
    except OrcaError as error:
        return StackPreview(stack=stack, error=redact(str(error)))
    if completed.code == STACK_NOT_FOUND:
        return StackPreview(stack=stack, note="it has no state yet")
    read = read_preview(log, redact)
    failure = ""
    if completed.code != 0 and (read.errors or not any(breach.mandatory for breach in read.breaches)):
        last = completed.stderr.strip() or completed.stdout.strip() or "the engine gave no reason"
        failure = "\n".join(read.errors) or redact(last)[-2000:]
    return StackPreview(stack=stack, changes=read.changes, breaches=read.breaches, error=failure)


def _program_environment(surroundings: Surroundings) -> dict[str, str]:
    """What the program needs to be this stack's, as `orca-infra env` gives it to a shell."""
    settings = surroundings.settings
    return {
        "ORCA_STACK": settings.stack,
        "ORCA_DB": surroundings.url,
        "ORCA_HOME": str(settings.home.absolute()),
        "ORCA_CONFIG": str(settings.config_path.absolute()),
        "ORCA_TOKEN_KEY": surroundings.token_key.decode(errors="surrogateescape"),
    }
