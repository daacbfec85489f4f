"""What can go away under a loop, how it is taken away from a StandingWorld, and what is then seen."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from orca_infra.testing.standing import LOST_SECONDS, StandingWorld

_SHORT_SECONDS = 3.0
#: Longer than a worker may be silent: on the database's return every heartbeat is older than that.
_LONG_SECONDS = LOST_SECONDS + 3.0
_CREATE_SECONDS = 4.0
_Act = Callable[[StandingWorld], None]


def _nothing(_: StandingWorld) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """One thing that goes wrong.

    Attributes:
        name: as the table has it.
        says: words that the log or the status has meanwhile; empty: there is nothing to say.
        begin: takes it away.
        end: gives it back.
        seconds: for how long it lasts at least, in a test.
        state: where the engine's state has to be for it, `file` or `postgres`; empty: anywhere.

    """

    name: str
    says: str
    begin: _Act
    end: _Act
    seconds: float = _SHORT_SECONDS
    state: str = ""


def _server(name: str, says: str, **faults: Any) -> Outage:
    """The API server with these faults of the proxy before it."""

    def begin(world: StandingWorld) -> None:
        for fault, value in faults.items():
            setattr(world.server, fault, value)
        if "silent" not in faults:
            world.server.hang_up()

    def end(world: StandingWorld) -> None:
        for fault, value in faults.items():
            setattr(world.server, fault, type(value)())

    return Outage(name=name, says=says, begin=begin, end=end)


def _database(name: str, says: str, *, seconds: float = _SHORT_SECONDS, **faults: Any) -> Outage:
    """The database with these faults of the proxy before it."""

    def begin(world: StandingWorld) -> None:
        for fault, value in faults.items():
            setattr(world.postgres, fault, value)

    def end(world: StandingWorld) -> None:
        for fault, value in faults.items():
            setattr(world.postgres, fault, type(value)())

    return Outage(name=name, says=says, begin=begin, end=end, seconds=seconds)


def _make_read_only(world: StandingWorld) -> None:
    _set_read_only(world, "on")
    world.end_connections()


def _set_read_only(world: StandingWorld, value: str) -> None:
    name = world.rows("select current_database() as name")[0]["name"]
    world.execute(f"alter database {name} set default_transaction_read_only = {value}")


def _make_writable(world: StandingWorld) -> None:
    _set_read_only(world, "off")
    world.end_connections()  # as a failover ends the connections to what was a replica


def _terminate(world: StandingWorld) -> None:
    for _ in range(3):
        world.end_connections()
        time.sleep(0.7)


def _take_cloud(world: StandingWorld) -> None:
    for verb in ("list", "get", "create", "delete", "label"):
        world.cloud.arm(verb, "UNAVAILABLE", "the cloud does not answer", times=10**6)


def _shorten_list(world: StandingWorld) -> None:
    [busy] = [machine for machine in world.cloud.list() if machine.name == world.busy]
    world.cloud.arm("list", "", location=busy.location, times=10**6)


def _give_cloud(world: StandingWorld) -> None:
    (world.cloud.folder / "faults.json").unlink(missing_ok=True)


def _state(name: str, says: str, take: _Act, give: _Act, *, where: str) -> Outage:
    """The engine's state, taken away in the middle of a create, when one comes."""

    def begin(world: StandingWorld) -> None:
        world.cloud.arm("create", "", seconds=_CREATE_SECONDS)
        with suppress(AssertionError):
            world.until(lambda: not (world.cloud.folder / "faults.json").exists(), 10, "a create")
        take(world)

    def end(world: StandingWorld) -> None:
        _give_cloud(world)
        give(world)

    return Outage(name=name, says=says, begin=begin, end=end, seconds=_CREATE_SECONDS + 4, state=where)


def _take_folder(world: StandingWorld) -> None:
    """Nothing can be read or written there, and nothing begun anew: it is a file."""
    (world.home / "state").rename(world.home / "state.away")
    (world.home / "state").touch()


def _give_folder(world: StandingWorld) -> None:
    (world.home / "state").unlink()
    (world.home / "state.away").rename(world.home / "state")


def _unmount_folder(world: StandingWorld) -> None:
    """An empty folder stands where one was mounted."""
    (world.home / "state").rename(world.home / "state.unmounted")
    (world.home / "state").mkdir()


def _mount_folder(world: StandingWorld) -> None:
    (world.home / "state").rename(world.home / "state.of_nobody")
    (world.home / "state.unmounted").rename(world.home / "state")
    shutil.rmtree(world.home / "state.of_nobody")


def _take_state_database(world: StandingWorld) -> None:
    world.state_postgres.away = True


def _give_state_database(world: StandingWorld) -> None:
    world.state_postgres.away = False


def _fill_disk(world: StandingWorld) -> None:
    assert world.has_small_disk, "without a disk of its own this would fill everybody's"
    with suppress(OSError), (world.home / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 2**16)
    with suppress(OSError), (world.home / "filler").open("ab", buffering=0) as file:
        while True:
            file.write(b"x" * 64)


def _empty_disk(world: StandingWorld) -> None:
    (world.home / "filler").unlink()


def _shift(seconds: float) -> _Act:
    return lambda world: world.execute("update clock.shift set seconds = %(s)s", s=seconds)


#: In the order of the table.
OUTAGES = (
    _database("the database is away", "the database is away", seconds=_LONG_SECONDS, away=True),
    _database("the database hangs", "", seconds=_LONG_SECONDS, hangs=True),
    Outage(
        name="the database is read-only",
        says="read-only",
        begin=_make_read_only,
        end=_make_writable,
        seconds=_LONG_SECONDS,
    ),
    Outage(
        name="the database's connections are ended, three times",
        says="the lead was lost",
        begin=_terminate,
        end=_nothing,
        seconds=0,
    ),
    _database("the database is slow: 50 ms each way", "", delay_seconds=0.05),
    _server("the API server is away", "closed connection without response", away=True),
    _server("the API server does not answer", "", hangs=True),
    _server("the API server throttles: 429 with Retry-After", "429", throttled=1.0),
    _server("the API server answers 401", "401", refuses=401),
    _server("the API server answers 403", "403", refuses=403),
    _server("the API server's lists are cut short", "IncompleteRead", halves=True),
    _server("the API server's watches go silent", "", silent=True),
    Outage(name="the cloud is away", says="provider local could not be read", begin=_take_cloud, end=_give_cloud),
    Outage(name="the cloud lists one zone short", says="", begin=_shorten_list, end=_give_cloud),
    _state("the state's folder is away from the middle of an `up` on", "", _take_folder, _give_folder, where="file"),
    _state(
        "the state's folder is unmounted in the middle of an `up`",
        "does not hold stack",
        _unmount_folder,
        _mount_folder,
        where="file",
    ),
    _state(
        "the state's database is away from the middle of an `up` on",
        "the database is away",
        _take_state_database,
        _give_state_database,
        where="postgres",
    ),
    Outage(name="the disk is full", says="No space left on device", begin=_fill_disk, end=_empty_disk),
    Outage(name="the database's clock is an hour ahead, then right again", says="", begin=_shift(3600), end=_shift(0)),
    Outage(
        name="the database's clock is an hour behind, then right again", says="", begin=_shift(-3600), end=_shift(0)
    ),
)
