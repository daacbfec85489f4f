"""What has to hold in a simulation: at every create and delete, after every pass, and at the end.

Each is judged by what is really so, not by what the loop believes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, LiteralString

from orca_infra.machines.model import EVERY_POOL, DeleteStray, Make, Pool, Relabel
from orca_infra.testing.fake_cloud import FakeMachine
from orca_infra.testing.invariants import AT_EVERY_INSTANT, LIVE, Found, disagreements

if TYPE_CHECKING:
    from orca_infra.loop.passes import PassResult
    from orca_infra.testing.simulation import World

_LIVE = """
select m.name, m.pool, m.uid, m.created_at, m.confirmed_at, m.revoked_at, m.drain_at, m.drain_now, w.first_seen_at
from orca.pool_machines m left join orca.workers w on w.name = m.name where m.ended_at is null"""
_ENDED = """
select name, pool, uid, created_at, confirmed_at, revoked_at, ended_at, reason from orca.pool_machines
where ended_at is not null and not name = any(%(known)s) order by name"""
_REQUEUED = "select id, reason from orca.runs where state = 'queued' and reason is not null"


class Broken(AssertionError):
    """Something that has to hold does not."""


@dataclass(slots=True)
class Checks:
    """The invariants of one world."""

    world: World
    names: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    foreign: list[tuple[FakeMachine, str]] = field(default_factory=list)
    paused: frozenset[str] = frozenset()
    created: set[str] = field(default_factory=set)

    def that(self, holds: object, what: str) -> None:
        if not holds:
            raise Broken(what)

    # While the loop acts.

    def before_create(self, name: str) -> None:
        """Never over the limits, never a name twice, never while paused, and the row is there first."""
        world = self.world
        self.that(not world.database.is_open, "a transaction is open across a call to the cloud")
        self.that(name not in self.names, f"{name} is asked for twice")
        self.names.add(name)
        # Another stack's may have it: where that is so, the cloud refuses, and the next number is taken.
        named = [machine for cloud in world.clouds.values() for machine in cloud.named(name) if world.is_ours(machine)]
        listed = [machine.location for machine in named if machine.listed_at < world.began_at]
        self.that(not listed, f"{name} is asked for, and there is one in {listed}")
        rows = world.rows(_LIVE)
        mine = next((row for row in rows if row["name"] == name), None)
        self.that(mine is not None and mine["uid"] is None and mine["revoked_at"] is None, f"{name} has no open row")
        assert mine is not None
        pool = world.pool(mine["pool"])
        of_pool = [row for row in rows if row["pool"] == pool.name]
        self.that(
            len(of_pool) <= pool.max_machines, f"{pool.name} has {len(of_pool)} machines, max {pool.max_machines}"
        )
        total = world.config.max_machines_total
        self.that(total is None or len(rows) <= total, f"{len(rows)} machines in all, max_machines_total {total}")
        booting = [row for row in of_pool if self._boots(row)]
        self.that(len(booting) <= pool.max_booting, f"{pool.name}: {len(booting)} booting, max {pool.max_booting}")
        self.that(self.paused.isdisjoint((pool.name, EVERY_POOL)), f"{pool.name} is paused, and {name} is made")
        if pool.name not in self.created:  # within one pass a try goes on from place to place
            [tried] = world.rows("select tried_at from orca.pool_status where pool = %(pool)s", pool=pool.name)
            since = world.settings.try_seconds
            if tried["tried_at"] is not None:
                since = (world.clock.now - tried["tried_at"]).total_seconds()
            self.that(since >= world.settings.try_seconds, f"{pool.name} tries again after {since:g} s")
        self.created.add(pool.name)

    def _boots(self, row: dict[str, Any]) -> bool:
        """Whether a row counts as booting, or as being made; what is on its way out does not."""
        if row["revoked_at"] or row["first_seen_at"] or row["drain_at"]:
            return False
        if row["uid"] is None:
            return True
        now = self.world.clock.now
        life = self.world.workers.lives.get(row["uid"])
        is_well = life is not None and not life.excuses and self.world.exists(life.machine)
        return is_well and (now - row["confirmed_at"]).total_seconds() < self.world.settings.boot_seconds - 30

    def before_delete(self, machine: FakeMachine | None, name: str) -> None:
        """Never another's machine, never one whose token is good, never a busy one."""
        world = self.world
        self.that(not world.database.is_open, "a transaction is open across a call to the cloud")
        if machine is None:
            return
        self.that(world.is_ours(machine), f"{name} is another's, and is deleted")
        rows = world.rows("select uid, revoked_at from orca.pool_machines where name = %(name)s", name=name)
        for row in rows:
            self.that(row["revoked_at"], f"{name} is deleted, and its token is good")
        running = world.rows("select id from orca.runs where worker = %(name)s and state = 'running'", name=name)
        self.that(not running, f"{name} is deleted while it runs {running}")

    def nobodys(self, machine: FakeMachine) -> None:
        """What is deleted past the engine is owned by no state, and is an old stray or on its way out by its row."""
        world = self.world
        owned = [r.outputs["uid"] for stack in world.backend.stacks.values() for r in stack.resources.values()]
        self.that(machine.uid not in owned, f"{machine.name} is deleted, and its stack owns it")
        is_old = (world.clock.now - machine.created_at).total_seconds() > world.settings.stray_grace_seconds
        query: LiteralString = (
            "select from orca.pool_machines where name = %(name)s and uid = %(uid)s and ended_at is null"
        )
        removed = world.rows(query, name=machine.name, uid=machine.uid)
        self.that(is_old or removed, f"{machine.name} is deleted as a stray, and is young")

    # After a pass.

    def begin_pass(self) -> None:
        self.paused = frozenset(row["pool"] for row in self.world.rows("select pool from orca.pool_pauses"))
        self.created.clear()

    def after_pass(self, result: PassResult | None) -> None:
        """`result` is None for a pass that was cut short or given up."""
        if result is not None:
            self._strays_are_seen(result)
            self._nothing_is_decided_blindly(result)
        self._names_are_unique()
        self._ends_have_their_reasons()
        self._runs_are_where_they_may_be()
        for machine, uid in self.foreign:
            there = self.world.cloud_of(machine.location).machines.get((machine.location, machine.name))
            self.that(there is not None and there.uid == uid, f"another's machine {machine.name} is gone")

    def _names_are_unique(self) -> None:
        ours = [machine.name for machine in self.world.ours()]
        self.that(len(ours) == len(set(ours)), f"two machines of one name: {sorted(ours)}")

    def _strays_are_seen(self, result: PassResult) -> None:
        """Each labelled machine is owned, desired, or a stray within its grace, or its deletion was decided."""
        snapshot, plan = result.snapshot, result.plan
        if snapshot.held or plan.strays_held:
            return
        known = {row.name for row in snapshot.machines}.union(*snapshot.owned.values())
        decided = {action.machine.uid for action in plan.actions if isinstance(action, DeleteStray)}
        grace = timedelta(seconds=self.world.settings.stray_grace_seconds)
        for provider, machine in snapshot.seen:
            if machine.labels.get("orca-stack") != self.world.stack_id or provider in snapshot.unreadable:
                continue
            young = snapshot.now - machine.created_at <= grace
            lately = (machine.name, machine.uid) in snapshot.ended_lately
            self.that(
                machine.name in known or machine.uid in decided or young or lately,
                f"{machine.name} is nobody's, and nothing is done about it",
            )

    def _nothing_is_decided_blindly(self, result: PassResult) -> None:
        """Not for a pool that an operation holds, nor for what is at a provider that could not be read."""
        snapshot = result.snapshot
        of_name = {row.name: row.provider for row in snapshot.machines}
        for action in result.plan.actions:
            if isinstance(action, Relabel):
                pool, provider = action.pool, action.provider
            elif isinstance(action, DeleteStray):
                pool, provider = str(action.machine.labels.get("orca-pool")), action.provider
            elif isinstance(action, Make):
                pool, provider = action.pool, self.world.pool(action.pool).provider
            else:
                pool, provider = action.pool, of_name.get(action.name, "")
            self.that(pool not in snapshot.held, f"{action} while {pool} is held")
            self.that(provider not in snapshot.unreadable, f"{action} while {provider} cannot be read")

    def _ends_have_their_reasons(self) -> None:
        for row in self.world.rows(_ENDED, known=list(self.ended)):
            self.ended.add(row["name"])
            self.that(row["revoked_at"], f"{row['name']} has ended, and its token is good")
            life = self.world.workers.lives.get(row["uid"] or "")
            if life is not None:
                self._reason_is_true(row, life)
                # Unless its cloud said that it is gone.
                lied = life.machine.uid in self.world.cloud_of(life.machine.location).lied
                self.that(
                    lied or "Vanished" in life.excuses or not self.world.exists(life.machine),
                    f"{row['name']} has ended, and is still there",
                )

    def _reason_is_true(self, row: dict[str, Any], life: Any) -> None:
        name, reason, settings = row["name"], row["reason"], self.world.settings
        match reason:
            case "Idle":
                since = max((at for at in (life.first_hello_at, life.last_end_at) if at), default=row["confirmed_at"])
                idle = (row["revoked_at"] - since).total_seconds()
                least = min(self.world.idle_seconds(row["pool"]))
                self.that(
                    life.first_hello_at and idle >= least, f"{name} ended {reason} after {idle:g} s, idle {least:g}"
                )
                begun_before = row["revoked_at"] < self.world.began_at
                paused = not self.paused.isdisjoint((row["pool"], EVERY_POOL))
                self.that(begun_before or not paused, f"{name} ended {reason} in a paused pool")
            case "PoolGone":
                self.that(row["pool"] in self.world.pools_once_gone, f"{name} ended {reason}")
            case "BootTimeout":
                booted = (row["revoked_at"] - row["confirmed_at"]).total_seconds()
                self.that(booted >= settings.boot_seconds, f"{name} ended {reason} after {booted:g} s")
            case "Preempted" | "Stopped" | "Vanished" | "Lost" | "Drained":
                self.that(reason in life.excuses, f"{name} ended {reason}, and is not so: {life.excuses}")

    def _runs_are_where_they_may_be(self) -> None:
        """No run is taken from a machine that is well, and none runs where the token is revoked."""
        for row in self.world.rows(_REQUEUED):
            life = self.world.workers.takers.get(row["id"])
            # A machine whose creation was not seen to end well is given up, even if its worker was quick.
            given_up = row["reason"] in {"Interrupted", "Failed", "NoCapacity"}
            self.that(
                life is None or life.excuses or (given_up and not self._was_confirmed(life.machine)),
                f"run {row['id']} was taken from {life and life.machine.name}: {row['reason']}",
            )
        for what, query in AT_EVERY_INSTANT.items():
            broken = self.world.rows(query)
            self.that(not broken, f"{what}: {broken}")

    def _was_confirmed(self, machine: FakeMachine) -> bool:
        query: LiteralString = "select from orca.pool_machines where name = %(name)s and uid is not null"
        return bool(self.world.rows(query, name=machine.name))

    # At the end.

    def at_the_end(self, pools: tuple[Pool, ...]) -> None:
        """The clouds, the states and the rows agree, and nothing is left of what ended."""
        world = self.world
        stacks = world.backend.stacks.values()
        found = Found(
            rows=world.rows(LIVE),
            machines=world.ours(),
            owned=[resource.name for stack in stacks for resource in stack.resources.values()],
            noted=[row["name"] for row in world.rows("select name from orca.owned")],
            pending=[urn for stack in stacks for urn in stack.pending],
        )
        for what in disagreements(found, world.stack_id, pools):
            self.that(False, what)
        left = world.rows("select id, state, pipeline from orca.runs where state in ('queued', 'running') order by id")
        waiting = [row for row in left if not world.may_wait(row["pipeline"])]
        self.that(not waiting, f"runs still wait: {waiting}")
