import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca_infra.quantity import cpu_millis, duration_text, seconds_of


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (0, 0),
        (90, 90),
        (0.5, 0.5),
        ("90", 90),
        ("0.5", 0.5),
        ("45s", 45),
        ("10m", 600),
        ("10min", 600),
        ("1h30m", 5400),
        ("1 h 30 min", 5400),
        (" 2d ", 172800),
        ("500ms", 0.5),
        ("1s500ms", 1.5),
        ("1.5h", 5400),
        ("1d2h3m4s5ms", 93784.005),
    ],
)
def test_reads_numbers_and_text_with_units(value: float | str, seconds: float) -> None:
    assert seconds_of(value) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "value",
    [
        "",
        " ",
        "m",
        "ten",
        "1h30",
        "30m1h",
        "1m1m",
        "1x",
        "+5",
        "1e3",
        "0x10",
        "1_000",
        "nan",
        "inf",
        "5 5",
        "٣s",
        "1,5h",
    ],
)
def test_refuses_text_that_is_no_duration_and_says_how_to_write_one(value: str) -> None:
    with pytest.raises(ValueError, match=r"is not a duration; write seconds \(90\) or text such as 45s, 10m"):
        seconds_of(value)


@pytest.mark.parametrize("value", [-1, -0.5, "-1", "-10m", -(10**400)])
def test_refuses_negatives(value: float | str) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        seconds_of(value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_refuses_what_is_not_finite(value: float) -> None:
    with pytest.raises(ValueError, match="must be a finite duration"):
        seconds_of(value)


@pytest.mark.parametrize("value", [True, False, None, [], {}])
def test_refuses_other_kinds_of_values(value: object) -> None:
    with pytest.raises(ValueError, match="must be a duration"):
        seconds_of(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [10**400, 1e300, "99999999d", "9" * 99])
def test_refuses_more_than_a_century(value: float | str) -> None:
    with pytest.raises(ValueError, match="must be at most 100 years"):
        seconds_of(value)


def test_a_long_text_is_cut_in_the_message() -> None:
    with pytest.raises(ValueError) as caught:
        seconds_of("x" * 100_000)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.0001, "0 s"),
        (0.5, "500 ms"),
        (0.9999, "1 s"),
        (1.25, "1.2 s"),
        (9.96, "10 s"),
        (45, "45 s"),
        (59.9, "1 min"),
        (60, "1 min"),
        (90, "1 min 30 s"),
        (600, "10 min"),
        (3599.9, "1 h"),
        (5400, "1 h 30 min"),
        (86400, "1 d"),
        (97200, "1 d 3 h"),
        (30 * 86400, "30 d"),
        (-5, "-5 s"),
    ],
)
def test_writes_durations_in_their_two_largest_units(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@given(st.floats(min_value=0, max_value=36_500 * 86400.0))
def test_what_is_written_is_read_back_about_the_same(seconds: float) -> None:
    assert seconds_of(duration_text(seconds)) == pytest.approx(seconds, rel=0.06, abs=0.001)


@given(st.text(max_size=30) | st.from_regex(r"[0-9. dhms]{0,30}", fullmatch=True))
def test_any_text_is_read_or_refused_in_one_sentence(text: str) -> None:
    try:
        seconds = seconds_of(text)
    except ValueError as error:
        assert "duration" in str(error) or "must" in str(error)
    else:
        assert 0 <= seconds < math.inf


@pytest.mark.parametrize(
    ("text", "millis"),
    [
        ("500m", 500),
        ("2", 2000),
        ("1.5", 1500),
        ("0.1", 100),
        ("1e3", 1_000_000),
        ("2k", 2_000_000),
        (".5", 500),
        ("0", 0),
    ],
)
def test_a_cpu_quantity_is_read_exactly(text: str, millis: int) -> None:
    assert cpu_millis(text) == millis


@pytest.mark.parametrize("text", ["", "-1", "1.5x", "one", "1 2", "1m5", "0.0001", "1e", "NaN", "٣"])
def test_what_is_no_cpu_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a CPU quantity|is finer than"):
        cpu_millis(text)
