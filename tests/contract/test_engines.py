"""What the recorded engine does: run against the real one with its local cloud, and against the simulation's.

So what the simulation proves is proven of an engine that behaves as the real one does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import pytest

from orca_infra.config import parse_config
from orca_infra.db.connection import Database
from orca_infra.errors import EngineFailed, NoCapacity, NotLeader, OutcomeUnknown, Transient
from orca_infra.loop.passes import configure_providers
from orca_infra.machines.program import machine_program
from orca_infra.machines.providers.local import LocalProvider
from orca_infra.machines.providers.local_cloud import LocalCloud
from orca_infra.machines.providers.port import Birth, MachineProvider
from orca_infra.stack.engine import Engine
from orca_infra.stack.operations import RecordedEngine
from orca_infra.testing.fake_cloud import STOCK_OUTS, WORDS, Effect, FakeCloud, FakeProvider, Fault
from orca_infra.testing.simulation_engine import FakeBackend, FakeEngine
from orca_infra.testing.simulation_world import SimulatedClock

STACK = "test.machines.p"
TOKEN = "0" * 64


class Bench:
    """A recorded engine, with its cloud arranged."""

    provider: MachineProvider

    def __init__(self, url: str) -> None:
        self.database = Database(url)
        self.leads = True

    def recorded(self, engine: Any, deadline_seconds: float) -> RecordedEngine:
        return RecordedEngine(
            engine,
            self.database,
            backend_url="file:///nowhere",
            verify=self.verify,
            deadline_seconds=deadline_seconds,
        )

    def verify(self) -> None:
        if not self.leads:
            raise NotLeader("not any more")

    def urn(self, name: str, stack: str = STACK) -> str:
        return f"urn:pulumi:{stack}::orca-infra::{self.provider.resource_type}::{name}"

    def up(self, name: str, *, stack: str = STACK, deadline_seconds: float = 180) -> Any:
        birth = Birth(
            name=name, pool="p", type="small", location="a", spot=False, image="worker:1", labels={"orca-stack": "s"}
        )
        declared: Mapping[str, Any] = dict(self.provider.render(birth))
        program = machine_program(self.provider.resource_type, {name: (declared, TOKEN)})
        return self.engine(deadline_seconds).up(stack, program, targets=(self.urn(name, stack),))

    def engine(self, deadline_seconds: float = 180) -> RecordedEngine:
        raise NotImplementedError

    def fail(self, verb: str, words: str) -> None:
        raise NotImplementedError

    def slow(self, verb: str, seconds: float) -> None:
        raise NotImplementedError

    def stock_out(self) -> str:
        raise NotImplementedError

    def owned(self) -> dict[str, str]:
        with self.database.snapshot() as transaction:
            return {
                row["name"]: row["uid"] for row in transaction.dicts("select name, uid from orca.owned order by name")
            }

    def outcomes(self) -> list[tuple[str, str]]:
        with self.database.snapshot() as transaction:
            rows = transaction.dicts("select kind, outcome from orca.engine_operations order by id")
        return [(row["kind"], row["outcome"]) for row in rows]

    def listed(self) -> dict[str, str]:
        return {machine.name: machine.uid for machine in self.provider.list()}


class RealBench(Bench):
    def __init__(self, surroundings: Any) -> None:
        super().__init__(surroundings.url)
        configure_providers(parse_config("[pools]", "contract"), surroundings)
        self.provider = LocalProvider(surroundings.cloud_folder)
        self._cloud = LocalCloud(surroundings.cloud_folder)
        self._engine = Engine(surroundings.engine)

    def engine(self, deadline_seconds: float = 180) -> RecordedEngine:
        return self.recorded(self._engine, deadline_seconds)

    def fail(self, verb: str, words: str) -> None:
        code, _, message = words.partition(": ")
        self._cloud.arm(verb, code, message)

    def slow(self, verb: str, seconds: float) -> None:
        self._cloud.arm(verb, "", seconds=seconds)

    def stock_out(self) -> str:
        return "LOCATION_OUT_OF_CAPACITY: none left"

    def fault(self) -> str:
        return "UNAVAILABLE: try again later"


class FakeBench(Bench):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        clock = SimulatedClock()
        numbers = iter(range(1000))
        self._cloud = FakeCloud(clock=clock, new_uid=lambda: f"uid-{next(numbers)}")
        self.provider = FakeProvider(self._cloud)
        self._engine = FakeEngine(FakeBackend(clock=clock, clouds={"a": self._cloud}))

    def engine(self, deadline_seconds: float = 180) -> RecordedEngine:
        return self.recorded(cast("Engine", self._engine), deadline_seconds)

    def fail(self, verb: str, words: str) -> None:
        self._cloud.arm(verb, Fault(says=words, effect=Effect.NONE))

    def slow(self, verb: str, seconds: float) -> None:
        self._cloud.arm(verb, Fault(seconds=seconds, effect=Effect.DONE))

    def stock_out(self) -> str:
        return STOCK_OUTS[0]

    def fault(self) -> str:
        return WORDS[Transient]


@pytest.fixture(
    params=[pytest.param("real", marks=pytest.mark.engine), pytest.param("fake", marks=pytest.mark.postgres)]
)
def bench(request: pytest.FixtureRequest, database_url: str) -> Iterator[Any]:
    made: Bench
    if request.param == "real":
        open_surroundings: Callable[..., Any] = request.getfixturevalue("surroundings")
        made = RealBench(open_surroundings())
    else:
        made = FakeBench(database_url)
    yield made
    made.database.close()


def test_an_up_makes_the_machine_says_its_uid_and_stores_what_the_stack_owns(bench: Any) -> None:
    changes = bench.up("orca-p-1")
    [uid] = [change.outputs["uid"] for change in changes if change.name == "orca-p-1"]
    assert bench.listed() == bench.owned() == {"orca-p-1": uid}
    assert bench.outcomes() == [("up", "Done")]
    assert bench.engine().unsettled() == []


def test_an_up_of_what_is_there_makes_no_other_and_one_of_another_leaves_it(bench: Any) -> None:
    bench.up("orca-p-1")
    before = bench.listed()
    bench.up("orca-p-1")
    assert bench.listed() == before
    bench.up("orca-p-2")
    assert bench.listed()["orca-p-1"] == before["orca-p-1"]
    assert bench.owned() == bench.listed()
    assert len(bench.listed()) == 2


def test_a_stock_out_is_a_failure_of_its_resource_in_the_providers_words_and_is_known(bench: Any) -> None:
    bench.fail("create", bench.stock_out())
    with pytest.raises(EngineFailed) as caught:
        bench.up("orca-p-1")
    [failure] = caught.value.failures
    assert failure.urn == bench.urn("orca-p-1")
    assert isinstance(bench.provider.classify(failure.message), NoCapacity)
    assert bench.listed() == bench.owned() == {}
    assert bench.outcomes() == [("up", "EngineFailed")]
    assert bench.engine().unsettled() == []
    assert bench.engine().settle(STACK).pending == ()


def test_a_destroy_removes_its_targets_alone_and_stores_what_is_left(bench: Any) -> None:
    bench.up("orca-p-1")
    bench.up("orca-p-2")
    bench.engine().destroy(STACK, targets=(bench.urn("orca-p-1"),))
    assert list(bench.listed()) == list(bench.owned()) == ["orca-p-2"]


def test_a_destroy_that_fails_leaves_the_machine_owned(bench: Any) -> None:
    bench.up("orca-p-1")
    bench.fail("delete", bench.fault())
    with pytest.raises(EngineFailed):
        bench.engine().destroy(STACK, targets=(bench.urn("orca-p-1"),))
    state = bench.engine().settle(STACK)
    assert [resource.name for resource in state.resources] == ["orca-p-1"]
    assert bench.owned() == bench.listed() != {}


def test_a_destroy_of_a_machine_that_is_gone_forgets_it(bench: Any) -> None:
    bench.up("orca-p-1")
    bench.provider.delete(bench.provider.list()[0])
    bench.engine().destroy(STACK, targets=(bench.urn("orca-p-1"),))
    assert bench.owned() == {}


def test_what_a_failed_operation_did_all_the_same_is_stored_without_reading_the_state(bench: Any) -> None:
    bench.up("orca-p-1")
    bench.up("orca-p-2")
    bench.fail("delete", bench.fault())
    with pytest.raises(EngineFailed):
        bench.engine().destroy(STACK, targets=(bench.urn("orca-p-1"), bench.urn("orca-p-2")))
    # One of the two met the fault; the other is gone, unless the engine stopped before it.
    assert bench.engine().unsettled() == []
    assert bench.owned() == bench.listed() != {}
    assert set(bench.owned()) == {resource.name for resource in bench.engine().settle(STACK).resources}


def test_what_is_forgotten_stays_where_it_is_and_the_stack_owns_it_no_more(bench: Any) -> None:
    bench.up("orca-p-1")
    bench.up("orca-p-2")
    before = bench.listed()
    operations = bench.outcomes()
    bench.engine().forget(STACK, targets=(bench.urn("orca-p-1"), bench.urn("orca-p-7")))
    assert bench.listed() == before
    assert list(bench.owned()) == ["orca-p-2"]
    assert bench.outcomes() == operations
    bench.engine().forget(STACK, targets=(bench.urn("orca-p-1"),))
    assert [resource.name for resource in bench.engine().settle(STACK).resources] == ["orca-p-2"]
    bench.engine().forget("test.machines.none", targets=(bench.urn("orca-p-1", "test.machines.none"),))


def test_a_refresh_stores_that_a_machine_is_gone_and_one_that_only_looks_says_it(bench: Any) -> None:
    bench.up("m-1")
    bench.up("m-2")
    [gone] = [machine for machine in bench.provider.list() if machine.name == "m-1"]
    bench.provider.delete(gone)
    ops = {change.name: change.op for change in bench.engine().refresh(STACK, only_look=True)}
    assert (ops["m-1"], ops["m-2"]) == ("delete", "same")
    assert sorted(bench.owned()) == ["m-1", "m-2"]
    bench.engine().refresh(STACK)
    assert sorted(bench.owned()) == ["m-2"]
    ops = {change.name: change.op for change in bench.engine().refresh(STACK)}
    assert (ops.get("m-1"), ops["m-2"]) == (None, "same")
    assert bench.outcomes()[-3:] == [("refresh", "Done")] * 3


def test_a_destroy_in_a_stack_that_the_state_has_lost_makes_the_state_read_again(bench: Any) -> None:
    """Or what it owned would be taken for deleted."""
    with pytest.raises(OutcomeUnknown):
        bench.engine().destroy(STACK, targets=(bench.urn("orca-p-1"),))
    assert bench.engine().unsettled() == [STACK]


def test_an_up_that_is_cut_short_is_unsettled_until_the_state_was_read(bench: Any) -> None:
    bench.slow("create", 4)
    with pytest.raises(OutcomeUnknown):
        bench.up("orca-p-1", deadline_seconds=2.5)
    assert bench.outcomes() == [("up", "OutcomeUnknown")]
    assert bench.engine().unsettled() == [STACK]
    state = bench.engine().settle(STACK)
    assert state.pending == () or state.resources == ()
    assert bench.engine().unsettled() == []
    assert set(bench.owned()) == {resource.name for resource in state.resources}
    assert set(bench.owned()) <= set(bench.listed())


def test_two_stacks_own_their_own(bench: Any) -> None:
    bench.up("orca-p-1")
    bench.up("orca-q-1", stack="test.machines.q")
    bench.engine().destroy(STACK, targets=(bench.urn("orca-p-1"),))
    assert list(bench.owned()) == list(bench.listed()) == ["orca-q-1"]


def test_who_does_not_lead_starts_nothing(bench: Any) -> None:
    bench.leads = False
    with pytest.raises(NotLeader):
        bench.up("orca-p-1")
    assert bench.listed() == {}
    assert bench.outcomes() == []


def test_a_destroy_of_what_the_state_does_not_hold_is_an_error_and_makes_the_state_read_again(bench: Any) -> None:
    bench.up("orca-p-1")
    with pytest.raises(EngineFailed):
        bench.engine().destroy(STACK, targets=(bench.urn("orca-p-7"), bench.urn("orca-p-1")))
    assert bench.engine().unsettled() == [STACK]
    assert set(bench.listed()) == {"orca-p-1"}
