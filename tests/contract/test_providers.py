"""What every machine provider does, whichever cloud is behind it: run against `local` and the fake in memory.

A new provider is added as one more harness in `HARNESSES`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol

import pytest

from orca_infra.errors import AuthFailed, Conflict, NoCapacity, OrcaError, QuotaExceeded, Refused, Transient
from orca_infra.machines.model import MachineState, SeenMachine
from orca_infra.machines.providers.local import LocalProvider
from orca_infra.machines.providers.local_cloud import CODES, LocalCloud, MachineRequest
from orca_infra.machines.providers.local_config import LocalCloud as LocalConfig
from orca_infra.machines.providers.port import TOKEN_PLACEHOLDER, Birth, MachineProvider
from orca_infra.testing.fake_cloud import STOCK_OUTS, WORDS, CloudError, Effect, FakeCloud, FakeProvider, Fault
from orca_infra.testing.simulation_world import SimulatedClock

LABELS = {"orca-stack": "mystackmystackid", "orca-pool": "p"}
MEANINGS = (NoCapacity, QuotaExceeded, Refused, AuthFailed, Transient, Conflict)


class Harness(Protocol):
    """A provider with the cloud behind it, as a test arranges it."""

    provider: MachineProvider

    def make(self, name: str, location: str = "a", labels: Mapping[str, str] = LABELS) -> None:
        """Have the cloud make a machine, as the engine would. Raises what the provider makes of the cloud's words."""

    def sell_out(self, location: str) -> None: ...

    def fail(self, verb: str, meaning: type[OrcaError]) -> None:
        """Have the next call go wrong so."""

    def halt(self, name: str, state: MachineState) -> None: ...

    def words(self, meaning: type[OrcaError]) -> list[str]:
        """Every spelling in which the engine reports a failure of this meaning."""


class LocalHarness:
    def __init__(self, folder: Path) -> None:
        config = LocalConfig(architectures={"small": "arm64"})
        provider = LocalProvider(folder / "cloud", config)
        provider.configure(config, {})
        self.provider: MachineProvider = provider
        self.cloud = LocalCloud(folder / "cloud")

    def make(self, name: str, location: str = "a", labels: Mapping[str, str] = LABELS) -> None:
        self.cloud.create(
            MachineRequest(name=name, location=location, type="small", labels=labels, argv=("/bin/sleep", "600"))
        )

    def sell_out(self, location: str) -> None:
        self.cloud.configure({location: {"small": 0}, "b": {"small": 9}}, 0, {})

    def fail(self, verb: str, meaning: type[OrcaError]) -> None:
        self.cloud.arm(verb, next(code for code, error in CODES.items() if error is meaning))

    def halt(self, name: str, state: MachineState) -> None:
        (self.cloud.preempt if state is MachineState.PREEMPTED else self.cloud.stop)(name)

    def words(self, meaning: type[OrcaError]) -> list[str]:
        code = next(code for code, error in CODES.items() if error is meaning)
        return [f"{code}: as the cloud says", f"creating urn:pulumi:x: 1 error occurred: {code}: as the cloud says"]

    def close(self) -> None:
        for machine in self.cloud.list():
            self.cloud.delete(machine.name)


class FakeHarness:
    def __init__(self, _folder: Path) -> None:
        numbers = iter(range(1000))
        clock = SimulatedClock()
        clock.now = datetime.now(UTC)
        self.cloud = FakeCloud(clock=clock, new_uid=lambda: f"uid-{next(numbers)}")
        provider = FakeProvider(self.cloud)
        provider.stated["small"] = "arm64"
        self.provider: MachineProvider = provider

    def make(self, name: str, location: str = "a", labels: Mapping[str, str] = LABELS) -> None:
        request = {"name": name, "location": location, "type": "small", "labels": labels, "startup": ""}
        try:
            self.cloud.begin_create(request).result()
        except CloudError as error:
            raise self.provider.classify(str(error)) from error

    def sell_out(self, location: str) -> None:
        self.cloud.room[location, "small"] = 0

    def fail(self, verb: str, meaning: type[OrcaError]) -> None:
        self.cloud.arm(verb, Fault(says=self.words(meaning)[0], effect=Effect.NONE))

    def halt(self, name: str, state: MachineState) -> None:
        [machine] = self.cloud.named(name)
        self.cloud.halt(machine, state)

    def words(self, meaning: type[OrcaError]) -> list[str]:
        said = list(STOCK_OUTS) if meaning is NoCapacity else [WORDS[meaning]]
        return [*said, *(f"1 error occurred:\n\t* Error creating instance: {words}" for words in said)]

    def close(self) -> None: ...


HARNESSES: dict[str, Callable[[Path], Any]] = {"local": LocalHarness, "fake": FakeHarness}


@pytest.fixture(params=HARNESSES)
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    made = HARNESSES[request.param](tmp_path)
    yield made
    made.close()


def only(machines: Any) -> SeenMachine:
    [machine] = machines
    assert isinstance(machine, SeenMachine)
    return machine


def only_named(harness: Harness, name: str) -> SeenMachine:
    machine = harness.provider.get(name, "a")
    assert machine is not None
    return machine


def birth(**more: Any) -> Birth:
    values = {"name": "orca-p-1", "pool": "p", "type": "small", "location": "a", "spot": False, "image": "worker:1"}
    return Birth(**{**values, "labels": LABELS, **more})


def test_a_declaration_is_json_says_all_of_its_birth_and_has_the_placeholder_for_the_token(harness: Harness) -> None:
    declared = harness.provider.render(birth())
    text = json.dumps(declared)
    assert TOKEN_PLACEHOLDER in text
    assert all(word in text for word in ("orca-p-1", "small", *LABELS, *LABELS.values()))
    assert json.loads(text) == declared
    assert harness.provider.render(birth()) == declared
    assert harness.provider.render(birth(name="orca-p-2")) != declared
    assert harness.provider.resource_type.count(":") == 2


def test_a_machine_is_listed_and_shown_alike_with_its_own_uid_place_labels_and_birth(harness: Harness) -> None:
    harness.make("orca-p-1", "b")
    seen = only(harness.provider.list())
    assert (seen.name, seen.location, seen.type, seen.state) == ("orca-p-1", "b", "small", MachineState.RUNNING)
    assert seen.uid
    assert dict(seen.labels) == LABELS
    assert abs(datetime.now(UTC) - seen.created_at) < timedelta(minutes=1)
    assert harness.provider.get("orca-p-1", "b") == seen


def test_machines_of_others_are_listed_too(harness: Harness) -> None:
    harness.make("orca-p-1", labels={"orca-stack": "anotherstacksids"})
    harness.make("somebody-s", labels={})
    assert sorted(machine.name for machine in harness.provider.list()) == ["orca-p-1", "somebody-s"]


def test_none_is_the_answer_only_when_there_is_none(harness: Harness) -> None:
    assert harness.provider.get("orca-p-1", "a") is None
    harness.fail("get", Transient)
    with pytest.raises(Transient):
        harness.provider.get("orca-p-1", "a")


@pytest.mark.parametrize("meaning", [Transient, AuthFailed])
def test_a_list_that_cannot_be_had_is_an_error_and_not_empty(harness: Harness, meaning: type[OrcaError]) -> None:
    harness.make("orca-p-1")
    harness.fail("list", meaning)
    with pytest.raises(meaning):
        harness.provider.list()
    assert only(harness.provider.list()).name == "orca-p-1"


def test_a_machine_that_is_made_again_has_another_uid_and_outlives_the_deletion_of_the_first(harness: Harness) -> None:
    harness.make("orca-p-1")
    first = only(harness.provider.list())
    harness.provider.delete(first)
    assert harness.provider.get("orca-p-1", "a") is None
    assert list(harness.provider.list()) == []
    harness.provider.delete(first)
    harness.make("orca-p-1")
    second = only(harness.provider.list())
    assert second.uid != first.uid
    harness.provider.delete(first)
    assert only(harness.provider.list()) == second


def test_a_deletion_that_fails_says_so_and_leaves_the_machine(harness: Harness) -> None:
    harness.make("orca-p-1")
    machine = only(harness.provider.list())
    harness.fail("delete", Transient)
    with pytest.raises(Transient):
        harness.provider.delete(machine)
    assert only(harness.provider.list()) == machine


def test_labels_are_put_on_this_very_machine_beside_those_that_it_has(harness: Harness) -> None:
    harness.make("orca-p-1", labels={"orca-pool": "another", "team": "red"})
    first = only_named(harness, "orca-p-1")
    harness.provider.relabel(first, LABELS)
    labelled = only_named(harness, "orca-p-1")
    assert dict(labelled.labels) == {**LABELS, "team": "red"}
    assert (labelled.uid, labelled.state) == (first.uid, first.state)
    assert only(harness.provider.list()) == labelled
    harness.provider.relabel(first, LABELS)
    assert only_named(harness, "orca-p-1") == labelled


def test_labels_that_cannot_be_put_on_are_an_error_and_those_of_what_is_gone_are_none(harness: Harness) -> None:
    harness.make("orca-p-1", labels={"team": "red"})
    first = only_named(harness, "orca-p-1")
    harness.fail("label", Transient)
    with pytest.raises(Transient):
        harness.provider.relabel(first, LABELS)
    assert dict(only_named(harness, "orca-p-1").labels) == {"team": "red"}
    harness.provider.delete(first)
    harness.provider.relabel(first, LABELS)
    harness.make("orca-p-1", labels={"team": "blue"})
    harness.provider.relabel(first, LABELS)
    assert dict(only_named(harness, "orca-p-1").labels) == {"team": "blue"}


@pytest.mark.parametrize("state", [MachineState.PREEMPTED, MachineState.STOPPED])
def test_what_is_stopped_or_preempted_is_still_listed_and_says_so(harness: Harness, state: MachineState) -> None:
    harness.make("orca-p-1")
    harness.halt("orca-p-1", state)
    assert only(harness.provider.list()).state is state
    shown = harness.provider.get("orca-p-1", "a")
    assert shown is not None
    assert shown.state is state


def test_a_location_without_room_is_no_capacity_and_another_has_it(harness: Harness) -> None:
    harness.sell_out("a")
    with pytest.raises(NoCapacity):
        harness.make("orca-p-1", "a")
    harness.make("orca-p-1", "b")
    assert only(harness.provider.list()).location == "b"


def test_a_name_that_is_taken_is_a_conflict_and_the_first_is_untouched(harness: Harness) -> None:
    harness.make("orca-p-1")
    before = only(harness.provider.list())
    with pytest.raises(Conflict):
        harness.make("orca-p-1")
    assert only(harness.provider.list()) == before


@pytest.mark.parametrize("meaning", MEANINGS)
def test_the_engines_words_mean_what_they_say(harness: Harness, meaning: type[OrcaError]) -> None:
    for words in harness.words(meaning):
        error = harness.provider.classify(words)
        assert type(error) is meaning, words
        assert str(error)


def test_what_nobody_knows_is_transient_in_its_own_words(harness: Harness) -> None:
    error = harness.provider.classify("the moon is in the way")
    assert type(error) is Transient
    assert "the moon is in the way" in str(error)


def test_a_console_is_text_and_that_of_no_machine_is_empty(harness: Harness) -> None:
    harness.make("orca-p-1")
    assert isinstance(harness.provider.console("orca-p-1", "a"), str)
    assert harness.provider.console("orca-p-2", "a") == ""


def test_architectures_are_stated_by_type(harness: Harness) -> None:
    assert dict(harness.provider.architectures()) == {"small": "arm64"}
