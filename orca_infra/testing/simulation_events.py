"""What people and clouds do in a simulation while the loop is not looking."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, LiteralString

from orca_infra.config import Config
from orca_infra.machines.model import MachineState, MachineType, Pool
from orca_infra.machines.providers.local_config import LocalCloud

if TYPE_CHECKING:
    from orca_infra.testing.simulation import World

PLACES = {"one": ("a", "b"), "two": ("c", "d")}
PIPELINES = (("w1", "p"), ("w2", "p"), ("w3", "q"))
_CANCEL_ONE: LiteralString = (
    "update orca.runs set state = 'canceled' where id = (select min(id) from orca.runs where state = 'queued')"
)


@dataclass(slots=True)
class Events:
    """Makes things happen in a world, as often as its chaos says."""

    world: World

    def new_config(self) -> Config:
        rng = self.world.rng
        pools = [self._new_pool("p", "one")]
        if rng.random() < 0.7:
            pools.append(self._new_pool("q", rng.choice(["one", "two"])))
        return Config(pools=tuple(pools), max_machines_total=rng.choice([None, None, 2, 4]), local=LocalCloud())

    def _new_pool(self, name: str, provider: str) -> Pool:
        rng = self.world.rng
        places = PLACES[provider]
        types = tuple(
            MachineType(
                type=kind,
                locations=tuple(rng.sample(places, rng.randint(1, 2))),
                wait_seconds=rng.choice([0, 30, 60]),
                spot=rng.random() < 0.3,
            )
            for kind in rng.sample(["small", "large", "huge"], rng.randint(1, 3))
        )
        return Pool(
            name=name,
            provider=provider,
            image="worker:1",
            max_machines=rng.randint(1, 4),
            idle_seconds=rng.choice([10.0, 30.0, 60.0]),
            max_booting=rng.randint(1, 3),
            types=types,
        )

    def people(self) -> None:
        rng, chaos = self.world.rng, self.world.chaos
        names = [pool for _, pool in PIPELINES]
        for _ in range(rng.choice([0, 0, 0, 1, 3])):
            # Some come while a pass is at work.
            self.world.clock.after(rng.choice([0, 0, 5, 30]), self._queue_run)
        with self.world.watcher.transaction() as transaction:
            if chaos.happens("run canceled"):
                transaction.run(_CANCEL_ONE)
            if chaos.happens("pipeline paused"):
                transaction.run(
                    "update orca.pipelines set paused = not paused where name = %(name)s",
                    {"name": rng.choice(PIPELINES)[0]},
                )
            if chaos.happens("pause"):
                transaction.run(
                    "insert into orca.pool_pauses (pool) values (%(pool)s) on conflict do nothing",
                    {"pool": rng.choice([*names, ""])},
                )
            if chaos.happens("resume"):
                transaction.run("delete from orca.pool_pauses")
        if chaos.happens("drain"):
            self._drain()
        if chaos.happens("pool changed"):
            self.world.config = replace(
                self.world.config,
                pools=tuple(self._new_pool(pool.name, pool.provider) for pool in self.world.config.pools),
            )
            self.world.note_idle_seconds()
            self.world.say("PEOPLE orca.toml changed")
        if chaos.happens("pool gone"):
            self.world.pools_once_gone |= {pool.name for pool in self.world.config.pools[1:]}
            self.world.config = replace(self.world.config, pools=self.world.config.pools[:1])
            self.world.say("PEOPLE only pool p is left")
        if chaos.happens("database away"):
            # Between two passes, or while one is at work.
            self.world.clock.after(rng.choice([0, 0, 3, 10, 30]), self._database_away)

    def _database_away(self) -> None:
        seconds = self.world.rng.choice([10, 70, 85, 120, 300])
        self.world.away_until = self.world.clock.now + timedelta(seconds=seconds)
        self.world.say(f"AWAY database for {seconds} s")

    def _queue_run(self) -> None:
        if self.world.is_away:
            return
        rng = self.world.rng
        self.world.execute(
            "insert into orca.runs (pipeline, fill) values (%(name)s, %(fill)s)",
            name=rng.choice(PIPELINES)[0],
            fill=rng.random() < 0.2,
        )

    def _drain(self) -> None:
        rows = self.world.rows(
            "select name, uid from orca.pool_machines where ended_at is null and uid is not null order by name"
        )
        if not rows:
            return
        row, at_once = self.world.rng.choice(rows), self.world.rng.random() < 0.3
        self.world.say(f"PEOPLE drain {row['name']}{' now' if at_once else ''}")
        with self.world.watcher.transaction() as transaction:
            transaction.run(
                "update orca.pool_machines set drain_at = coalesce(drain_at, now()), drain_now = drain_now or %(at_once)s "
                "where name = %(name)s",
                {"name": row["name"], "at_once": at_once},
            )
        life = self.world.workers.lives.get(row["uid"])
        if life is not None:
            life.excuses.add("Drained")

    def clouds(self) -> None:
        """What happens to machines behind the loop's back."""
        chaos = self.world.chaos
        for life in self.world.workers.lives.values():
            machine = life.machine
            if not self.world.exists(machine) or machine.state is not MachineState.RUNNING:
                continue
            cloud = self.world.cloud_of(machine.location)
            if chaos.happens("preempted"):
                self.world.say(f"CLOUD preempts {machine.name}")
                life.excuses.add("Preempted")
                cloud.halt(machine, MachineState.PREEMPTED)
            elif chaos.happens("stopped"):
                self.world.say(f"CLOUD stops {machine.name}")
                life.excuses.add("Stopped")
                cloud.halt(machine, MachineState.STOPPED)
            elif chaos.happens("deleted behind"):
                self.world.say(f"CLOUD loses {machine.name}")
                life.excuses.add("Vanished")
                cloud.remove(machine.location, machine.name, machine.uid)
                if chaos.happens("name taken"):
                    self._plant_at(machine.location, machine.name)
            elif chaos.happens("worker silent"):
                self.world.say(f"CLOUD {machine.name} goes silent")
                life.is_silent = True
            elif chaos.happens("state lost"):
                self.world.say(f"CLOUD {machine.name} is lost by its stack's state")
                for stack in self.world.backend.stacks.values():
                    for urn in [urn for urn in stack.resources if urn.endswith(f"::{machine.name}")]:
                        del stack.resources[urn]
                self.world.execute("delete from orca.owned where name = %(name)s", name=machine.name)
            elif chaos.happens("label lost") and self._is_confirmed(machine.uid):
                self.world.say(f"CLOUD {machine.name} loses a label")
                machine.labels = self.world.rng.choice([{}, {**machine.labels, "orca-pool": "another"}])
        if chaos.happens("foreign"):
            self._plant()

    def _is_confirmed(self, uid: str) -> bool:
        """Whether its row lives and knows it: one that nobody knows is only found by its labels."""
        return bool(self.world.rows("select from orca.pool_machines where uid = %(uid)s and ended_at is null", uid=uid))

    def _plant(self) -> None:
        """Another stack's machine, or a person's, under a name that could be ours."""
        location = self.world.rng.choice([place for places in PLACES.values() for place in places])
        name = f"orca-{self.world.rng.choice('pq')}-{self.world.rng.randint(1, 40)}"
        cloud = self.world.cloud_of(location)
        namesakes = [machine for machine in self.world.ours() if machine.location != location]
        if namesakes and self.world.rng.random() < 0.3:
            name = self.world.rng.choice(namesakes).name  # names are unique in a location only
        elif name in self.world.checks.names:
            return
        if (location, name) in cloud.machines:
            return
        self._plant_at(location, name)

    def _plant_at(self, location: str, name: str) -> None:
        cloud = self.world.cloud_of(location)
        labels = self.world.rng.choice([{"orca-stack": "anotherstacksids", "orca-pool": "p"}, {}])
        machine = cloud.plant(name, location, labels)
        self.world.say(f"CLOUD another's {name} in {location}")
        if self.world.rng.random() < 0.3:
            cloud.halt(machine, MachineState.PREEMPTED)
        self.world.checks.foreign.append((machine, machine.uid))
