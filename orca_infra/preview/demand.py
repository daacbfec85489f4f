"""The demand as a file: what the loop would decide from, so that a pull request needs no database.

`orca-infra snapshot` writes it where the database is; `orca-infra preview --demand FILE` reads it anywhere. It holds what
`decide` is given (machines, runs, objects, limits) and no secret: no token, no connection, no value of a variable.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from orca_infra.errors import UserError
from orca_infra.machines.decide import POOL_LABEL, STACK_LABEL
from orca_infra.machines.model import Limits, Snapshot
from orca_infra.runs.model import RunLimits, RunSnapshot
from orca_infra.runtimes.model import Environment, RuntimeLimits, RuntimeSnapshot

#: Raised whenever a file of before could be read wrongly; what only lacks a field that has a default is still read.
FORM = 1
_LARGEST_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What the loop's decisions are taken from; None: the stack has no run clusters, or no runtimes.

    Attributes:
        limits: as the settings had them where the file was made; what orca.toml says of them is taken from orca.toml.

    """

    form: int
    stack: str
    taken_at: datetime
    machines: Snapshot
    limits: Limits
    runs: RunSnapshot | None = None
    run_limits: RunLimits | None = None
    runtimes: RuntimeSnapshot | None = None
    runtime_limits: RuntimeLimits | None = None


def write_demand(demand: Demand, redact: Callable[[str], str]) -> str:
    """The file's text; what could be a secret in it is left out or masked."""
    text = json.dumps(_adapter().dump_python(_without_values(demand), mode="json"), ensure_ascii=False, indent=1)
    # Messages of providers and of the API server are their words.
    return redact(text) + "\n"


def read_demand(path: Path) -> Demand:
    """Read a file that `orca-infra snapshot` wrote. Raises UserError."""
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_BYTES + 1)
        found = json.loads(content)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); `orca-infra snapshot > {path.name}` makes it"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is not JSON ({error}); `orca-infra snapshot > {path.name}` makes it anew") from error
    if not isinstance(found, dict) or found.get("form") != FORM:
        form = found.get("form") if isinstance(found, dict) else None
        raise UserError(
            f"{path}: is no demand snapshot of this version (form {form!r}, and {FORM} is read); "
            f"`orca-infra snapshot > {path.name}` makes it anew"
        )
    try:
        # As JSON, in which a list is a tuple and a text a time.
        demand: Demand = _adapter().validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(
            f"{path}: {place}: {first['msg']}; `orca-infra snapshot > {path.name}` makes it anew"
        ) from error
    return demand


@cache
def _adapter() -> TypeAdapter[Any]:
    """Made at the first use: that takes a tenth of a second."""
    return TypeAdapter(Demand)


def _without_values(demand: Demand) -> Demand:
    """Only what decisions need: of labels those that are ours, of an environment's variables their names."""
    ours = (STACK_LABEL, POOL_LABEL)
    seen = tuple(
        (provider, replace(machine, labels={key: machine.labels[key] for key in ours if key in machine.labels}))
        for provider, machine in demand.machines.seen
    )
    demand = replace(demand, machines=replace(demand.machines, seen=seen))
    if demand.runtimes is None:
        return demand
    environments = {name: _masked(one) for name, one in demand.runtimes.environments.items()}
    return replace(demand, runtimes=replace(demand.runtimes, environments=environments))


def _masked(environment: Environment) -> Environment:
    env = tuple({key: value for key, value in one.items() if key != "value"} for one in environment.env)
    return replace(environment, env=env)
