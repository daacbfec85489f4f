import hashlib
import re
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca_infra.names import derived_stack, fit_name, label_value, machine_name, machine_number, new_stack_id

VALID = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
FIELD_NAMES = ["Jane.Doe", "jane.doe", "jane-doe", "gpu_A100", "gpu-a100", "a.b", "a-b", "a_b", "A-B", "x" * 70]
FIELD_NAMES += ["x" * 71, "x" * 63, "", " ", "-", "1", "x-1", "é", "e", "\ud800", "a\n", "a"]
NUMBERS = st.integers(min_value=0, max_value=9_999_999_999)
# Few characters, so that near misses (same letters, other case or separator) are common.
CLOSE_NAMES = st.text(alphabet="abAB01.-_ é", max_size=6) | st.text(max_size=80)


def hash_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def test_a_valid_name_stays_as_it_is() -> None:
    assert fit_name("orca", "gpu-east") == "orca-gpu-east"
    assert label_value("a" * 63) == "a" * 63


def test_a_changed_name_carries_the_hash_of_the_original() -> None:
    assert label_value("Jane.Doe") == f"jane-doe-{hash_of('Jane.Doe')}"
    assert label_value("gpu_A100") == f"gpu-a100-{hash_of('gpu_A100')}"
    assert label_value("x" * 70) == f"{'x' * 54}-{hash_of('x' * 70)}"
    assert label_value("1") == f"x-1-{hash_of('1')}"
    assert label_value("") == f"x-{hash_of('')}"


def test_the_names_of_the_field_never_collide() -> None:
    for one, other in combinations(FIELD_NAMES, 2):
        assert label_value(one) != label_value(other)
        assert machine_name(one, 1) != machine_name(other, 1)
        assert derived_stack("dev", "machines", one) != derived_stack("dev", "machines", other)


@given(CLOSE_NAMES, st.integers(min_value=10, max_value=63))
def test_a_fitted_name_is_always_valid_and_within_its_limit(text: str, limit: int) -> None:
    name = fit_name(text, limit=limit)
    assert VALID.fullmatch(name)
    assert len(name) <= limit


@given(CLOSE_NAMES, CLOSE_NAMES)
def test_two_names_never_become_one(one: str, other: str) -> None:
    assert (label_value(one) == label_value(other)) == (one == other)
    assert (derived_stack("dev", "machines", one) == derived_stack("dev", "machines", other)) == (one == other)


@given(CLOSE_NAMES)
def test_a_name_that_copies_a_changed_one_does_not_meet_it(text: str) -> None:
    changed = label_value(text)
    assert (label_value(changed) == changed) == (text == changed)
    assert machine_name(changed, 1) != machine_name(text, 1) or text == changed


@pytest.mark.parametrize("limit", [0, 9, 64])
def test_a_limit_without_room_for_the_hash_is_refused(limit: int) -> None:
    with pytest.raises(ValueError, match="limit from 10 to 63"):
        fit_name("a", limit=limit)


@given(CLOSE_NAMES, NUMBERS)
def test_a_machine_name_is_valid_and_gives_its_number_back(pool: str, number: int) -> None:
    name = machine_name(pool, number)
    assert VALID.fullmatch(name)
    assert len(name) <= 63
    assert name.endswith(f"-{number}")
    assert machine_number(pool, name) == number


@given(CLOSE_NAMES, CLOSE_NAMES, NUMBERS)
def test_a_machine_of_one_pool_is_never_taken_for_another_pools(one: str, other: str, number: int) -> None:
    assert machine_number(other, machine_name(one, number)) == (number if one == other else None)


def test_a_machine_name_reads_like_its_pool() -> None:
    assert machine_name("gpu", 7) == "orca-gpu-7"
    assert machine_number("gpu", "orca-gpu-7") == 7


@pytest.mark.parametrize(
    "name", ["orca-gpu", "orca-gpu-", "orca-gpu-07", "orca-gpu--1", "orca-gpu-1-2", "orca-gpu-x", "gpu-1", "orca-gpu-٣"]
)
def test_a_name_that_is_no_machines_has_no_number(name: str) -> None:
    assert machine_number("gpu", name) is None


@pytest.mark.parametrize("number", [-1, 10**10])
def test_a_machine_number_out_of_range_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match="a machine's number is from 0 to 9999999999"):
        machine_name("gpu", number)


def test_a_derived_stack_reads_like_its_parts() -> None:
    assert derived_stack("prod", "machines", "gpu") == "prod.machines.gpu"
    assert derived_stack("prod", "machines", "GPU_east-1") == "prod.machines.GPU_east-1"
    assert derived_stack("prod", "machines", "a.b") == f"prod.machines.a-b-{hash_of('a.b')}"


@given(st.from_regex(r"[A-Za-z0-9_-]{1,40}", fullmatch=True), CLOSE_NAMES)
def test_a_derived_stack_is_valid_for_pulumi_and_splits_at_its_dots(family: str, pool: str) -> None:
    name = derived_stack(family, "machines", pool)
    assert re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", name)
    assert name.split(".")[:2] == [family, "machines"]
    assert len(name.split(".")) == 3


@given(st.lists(CLOSE_NAMES, min_size=1, max_size=6))
def test_a_derived_stack_of_many_parts_fits_or_is_refused(parts: list[str]) -> None:
    try:
        name = derived_stack("f" * 40, *parts)
    except ValueError as error:
        assert "too many parts" in str(error)
    else:
        assert len(name) <= 100


@pytest.mark.parametrize("family", ["", "a.b", "a b", "x" * 41, "dev\n"])
def test_a_family_that_is_no_family_name_is_refused(family: str) -> None:
    with pytest.raises(ValueError, match="a derived stack needs a family"):
        derived_stack(family, "machines")


def test_a_stack_id_is_valid_in_every_name_and_never_the_same() -> None:
    ids = {new_stack_id() for _ in range(500)}
    assert len(ids) == 500
    assert all(re.fullmatch(r"[a-z][a-z2-7]{15}", one) for one in ids)
    assert all(label_value(one) == one for one in ids)
