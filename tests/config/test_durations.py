"""Durations mean what people mean by them, and nothing else is accepted."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgleaderlock.config import parse_duration_s
from pgleaderlock.errors import ConfigurationError


@pytest.mark.parametrize(
    ("text", "expected_s"),
    [
        ("5", 5.0),
        ("5s", 5.0),
        ("200ms", 0.2),
        ("1m", 60.0),
        ("1.5h", 5400.0),
        ("2d", 172800.0),
        ("0", 0.0),
        ("0.25", 0.25),
        (5, 5.0),
        (0.5, 0.5),
        (0, 0.0),
    ],
)
def test_a_number_is_seconds_unless_a_unit_says_otherwise(text: str | float, expected_s: float) -> None:
    assert parse_duration_s(text) == pytest.approx(expected_s, rel=1e-12)


@pytest.mark.parametrize(
    "text",
    [
        "", " ", " 5", "5 ", "5 s", "5\n", "-1", "-1s", "+5", "nan", "inf", "1e3", "1_000", ".5", "5.", "5.s", "s",
        "ms", "5S", "5sec", "5w", "5us", "1h30m", "1,5", "\N{ARABIC-INDIC DIGIT FIVE}", "0x5", "9" * 400, True, False,
        -1, -0.5, math.nan, math.inf, 10**400, 10**5000, None, b"5", [5],
    ],
    ids=lambda given_value: type(given_value).__name__,  # Python refuses to print some of these integers.
)  # fmt: skip
def test_anything_that_is_no_duration_is_refused_with_what_is_accepted(text: object) -> None:
    with pytest.raises(ConfigurationError, match=r"is not a duration: give .*5s") as caught:
        parse_duration_s(text)  # type: ignore[arg-type]
    assert isinstance(caught.value, ValueError)


def test_the_refusal_says_what_was_given() -> None:
    with pytest.raises(ConfigurationError, match=r"^'5 parsecs' is not"):
        parse_duration_s("5 parsecs")


def test_the_refusal_of_a_long_text_stays_short() -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_duration_s("x" * 10_000)
    assert len(str(caught.value)) < 200


@given(st.text(max_size=20) | st.floats() | st.integers())
def test_the_result_is_always_finite_and_not_negative(given_value: str | float) -> None:
    try:
        duration_s = parse_duration_s(given_value)
    except ConfigurationError:
        return
    assert math.isfinite(duration_s)
    assert duration_s >= 0
