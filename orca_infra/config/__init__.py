"""orca.toml: read strictly, every mistake reported at its line, handed on as frozen dataclasses."""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from orca_infra.config.lines import key_lines
from orca_infra.config.problems import (
    gcp_problems,
    name_problems,
    object_name_problems,
    pool_problems,
    problem_of,
    raw_pools,
    text_problems,
)
from orca_infra.config.report import placed, report
from orca_infra.config.shape import File
from orca_infra.errors import ConfigError
from orca_infra.machines.model import Pool
from orca_infra.machines.providers.gcp_config import GcpCloud
from orca_infra.machines.providers.local_config import LocalCloud
from orca_infra.runs.model import PodPlacement

_LARGEST_BYTES = 1024 * 1024
_MOST_EXPLAINED = 1000  # a file of nothing but mistakes must not take minutes
# A key of so many parts is none of ours, and tomllib takes minutes for one of thousands.
_LONG_KEY = re.compile(r"""(?<![\w.-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){20}""")
_TOML_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What orca.toml says.

    Attributes:
        pools: in the order of the file; names, machine names and stack names are all different.
        max_machines_total: the most machines over all pools; None for no such limit.
        local: the make-believe cloud of the provider `local`.
        gcp: the project of the provider `gcp`; None when the file has no [gcp].
        pipelines: where the Pods of a pipeline's run clusters go, for pipelines that have a table.
        environments, runtime_pools: the specs of RuntimeEnvironments and RuntimePools, by name, as Kubernetes spells them.

    """

    pools: tuple[Pool, ...]
    max_machines_total: int | None
    local: LocalCloud
    gcp: GcpCloud | None = None
    pipelines: Mapping[str, PodPlacement] = field(default_factory=dict)
    environments: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    runtime_pools: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


def load_config(path: Path) -> Config:
    """Read orca.toml from a file.

    Raises:
        ConfigError: the file cannot be read or used; the caller shows the message alone, and on a reload keeps the
            configuration it has.

    """
    source = str(path)
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"{source}: is a pipe or a device; write it to a file, and name that")
            content = file.read(_LARGEST_BYTES + 1)
    except FileNotFoundError as error:
        raise ConfigError(f"{source}: no such file; write it, or name another with ORCA_CONFIG") from error
    except IsADirectoryError as error:
        raise ConfigError(f"{source}: is a folder; name the file itself, such as {path / 'orca.toml'}") from error
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{source}: cannot be read ({why}); check the path and its permissions") from error
    _refuse_large(len(content), source)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{source}:{line}: the text is not UTF-8; save the file as UTF-8") from error
    return parse_config(text, source)


def parse_config(text: str, source: str) -> Config:
    """Read the text of an orca.toml; `source` is what messages call it.

    A text that says nothing at all is refused: it is what a file that is being written looks like, and a pool that is
    gone from the file is drained. `[pools]` alone says that there are no pools.

    Raises:
        ConfigError: one line for each mistake, in the file's order, at most 20 and how many more there are.

    """
    _refuse_large(len(text), source)
    text = text.removeprefix("\ufeff")  # some editors write a byte order mark
    document = _read_toml(text, source)
    if not document:
        raise ConfigError(f"{source}: says nothing; a file without pools says so with [pools]")
    problems = [problem for name, pool in raw_pools(document) for problem in pool_problems(name, pool)]
    problems += name_problems([name for name, _ in raw_pools(document)])
    problems += gcp_problems(document)
    problems += object_name_problems(document)
    file, unread = None, 0
    try:
        file = File.model_validate(document)
    except ValidationError as error:
        found = error.errors(include_url=False)
        problems += [problem_of(details) for details in found[:_MOST_EXPLAINED]]
        unread = len(found[_MOST_EXPLAINED:])
    said = {problem.path for problem in problems}
    problems += [problem for problem in text_problems(document) if problem.path not in said]
    if file is None or problems:
        raise ConfigError(report(placed(problems, document, key_lines(text)), source, unread))
    return Config(
        pools=tuple(pool.freeze(name) for name, pool in file.pools.items()),
        max_machines_total=file.max_machines_total,
        local=file.local.freeze(),
        gcp=file.gcp.freeze() if file.gcp else None,
        pipelines={name: pipeline.freeze() for name, pipeline in file.pipelines.items()},
        environments={name: environment.freeze() for name, environment in file.environments.items()},
        runtime_pools={name: pool.freeze() for name, pool in file.runtime_pools.items()},
    )


def _without_waiting(path: str, flags: int) -> int:
    """A pipe would keep the loop waiting for its writer, a terminal would become the process's own."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def _refuse_large(size: int, source: str) -> None:
    if size > _LARGEST_BYTES:
        raise ConfigError(f"{source}: is larger than 1 MiB; name the right file, or make it smaller")


def _read_toml(text: str, source: str) -> dict[str, object]:
    if long := _LONG_KEY.search(text):
        line = text.count("\n", 0, long.start()) + 1
        raise ConfigError(f"{source}:{line}: a key of more than 20 parts; no key here has more than five")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        what = str(error)
        place = _TOML_PLACE.search(what)
        what = what[:1].lower() + (what[1 : place.start()] if place else what[1:])
        if place is None:
            raise ConfigError(f"{source}: is not TOML: {what}") from error
        if place[1] is None:
            line = text.rstrip().count("\n") + 1
            raise ConfigError(f"{source}:{line}: is not TOML: {what} at the end; is the file cut short?") from error
        raise ConfigError(f"{source}:{place[1]}: is not TOML: {what} (column {place[2]}); mend this line") from error
    except RecursionError as error:
        raise ConfigError(f"{source}: is nested too deeply; orca.toml needs no such lists or tables") from error
    except ValueError as error:
        # tomllib lets through what int() says of a number of thousands of digits.
        raise ConfigError(f"{source}: holds a number with too many digits; write a shorter one") from error
