"""What a soak measures at rest."""

from __future__ import annotations

import time
from pathlib import Path

from soak_slopes import Sample
from soak_world import SoakWorld, size_of

_PASSES_AT_REST = 5
_REST_SECONDS = 60.0
_POLL_SECONDS = 0.1
#: Grows by design: what runtimes have cost stays.
_STAYS = "runtime_usage"
_TABLES = """
select table_name as name from information_schema.tables
where table_schema = 'orca' and table_type = 'BASE TABLE' and table_name <> %(stays)s order by 1"""


def sample(world: SoakWorld) -> Sample:
    """What the loop's process and its surroundings hold now, after some passes in which nothing is to be done."""
    seconds = _pass_seconds(world)
    tables = [row["name"] for row in world.rows(_TABLES, stays=_STAYS)]
    rows = sum(world.rows(f"select count(*) as n from orca.{name}")[0]["n"] for name in tables)
    state = world.state()
    [size] = world.rows("select pg_database_size(current_database()) as bytes")
    files = list(world.home.rglob("*"))
    process = Path(f"/proc/{world.pid}")
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    return {
        "memory_mib": int(status["VmRSS"].split()[0]) / 1024,
        "threads": float(status["Threads"]),
        "descriptors": float(sum(map(_is_held, (process / "fd").iterdir()))),
        "disk_mib": sum(map(size_of, files)) / 2**20,
        "files": float(len(files)),
        "database_mib": size["bytes"] / 2**20,
        # What the newest entries of a history hold is what there was then.
        "state_kib": sum(held for key, held in state.items() if "/history/" not in key) / 1024,
        "state_keys": float(len(state)),
        "rows": float(rows),
        "pass_seconds": seconds,
    }


def _is_held(descriptor: Path) -> bool:
    """Whether it is a file, a pipe or a connection: gRPC's own, which have no name, come and go by fours with its threads."""
    try:
        return not str(descriptor.readlink()).startswith("anon_inode:")
    except FileNotFoundError:
        return False


def _pass_seconds(world: SoakWorld) -> float:
    """What a pass takes in which nothing is to be done, all scopes together."""
    before, made = _phases(world), world.passes()
    deadline = time.monotonic() + _REST_SECONDS
    while any(count - made[scope] < _PASSES_AT_REST for scope, count in world.passes().items()):
        if time.monotonic() > deadline:
            raise AssertionError(f"no {_PASSES_AT_REST} passes within {_REST_SECONDS:g} s")
        time.sleep(_POLL_SECONDS)
    after = _phases(world)
    return sum((after[phase][0] - before[phase][0]) / max(after[phase][1] - before[phase][1], 1) for phase in after)


def _phases(world: SoakWorld) -> dict[str, tuple[float, float]]:
    """Seconds and number of each scope's phases so far."""
    values = world.metrics()
    prefix = "orca_infra_pass_seconds_"
    return {
        name.removeprefix(f"{prefix}sum"): (value, values[name.replace("_sum{", "_count{")])
        for name, value in values.items()
        if name.startswith(f"{prefix}sum{{")
    }
