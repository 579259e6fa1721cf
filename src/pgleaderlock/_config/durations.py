"""Durations as people write them, on the command line, in a file and as keywords.

It must never guess: a text that can be read in two ways is refused, with what was given and what is accepted.
"""

import math
import re

from pgleaderlock.errors import ConfigurationError

__all__ = ["DURATION_PATTERN", "SPREAD", "check_timeout", "format_duration", "parse_duration_s", "positive_s"]

_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

# ASCII digits only: float() would also take digits of other scripts, underscores and exponents.
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)([a-z]*)", re.ASCII)

DURATION_PATTERN = rf"^[0-9]+(\.[0-9]+)?({'|'.join(_UNIT_S)})$"
"""A duration with its unit, for JSON schemas."""

SPREAD = (0.8, 1.2)
"""The factors of a duration that is taken ± 20 %."""

_ACCEPTED = "a number of seconds such as 5 or 0.5, or a number with a unit: 200ms, 5s, 1m, 1.5h, 2d"

# An error message must not repeat a whole file.
_SHOWN_CHARS_MAX = 40


def positive_s(what: str, value: object) -> float:
    """A setting that is a number of seconds above zero, or a `ConfigurationError` that names it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigurationError(f"{what} must be a number of seconds, not {type(value).__name__}")
    if not math.isfinite(value) or value <= 0:
        raise ConfigurationError(f"{what}={value} is not usable: give a positive number of seconds")
    return float(value)


def check_timeout(timeout_s: object) -> None:
    """`ConfigurationError` unless it is a number of seconds, or None."""
    if timeout_s is None:
        return
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s >= 0:  # NaN, too
        raise ConfigurationError(f"timeout_s={timeout_s!r} is not usable: give a number of seconds, or None to wait")


def parse_duration_s(text: str | float) -> float:
    """Seconds as a float, from `5`, `"5"`, `"5s"`, `"200ms"`, `"1m"`, `"1.5h"` or `"2d"`.

    Zero is a duration; whether it makes sense is for the setting to say. Raises `ConfigurationError` (a `ValueError`)
    for everything else: nothing, a negative number, NaN, infinity, a bool, an unknown unit, spaces.
    """
    # bool is an int to Python, but a duration of True is always a mistake.
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise _refused(text)
    try:
        duration_s = _from_text(text) if isinstance(text, str) else float(text)
    except OverflowError:  # an integer beyond every float
        raise _refused(text) from None
    if not math.isfinite(duration_s) or duration_s < 0:
        raise _refused(text)
    return duration_s


def format_duration(duration_s: float) -> str:
    """The duration in the largest unit that needs no fraction: `90s`, `2h`, `200ms`; otherwise `1.5s`."""
    for unit, unit_s in reversed(_UNIT_S.items()):
        count = duration_s / unit_s
        if round(count) and (unit != "ms" or duration_s < 1) and math.isclose(count, round(count), rel_tol=1e-9):
            return f"{round(count)}{unit}"
    return f"{duration_s:g}s"


def _from_text(text: str) -> float:
    match = _DURATION.fullmatch(text)
    if match is None:
        raise _refused(text)
    number, unit = match.groups()
    if unit and unit not in _UNIT_S:
        raise _refused(text)
    return float(number) * _UNIT_S[unit or "s"]


def _refused(given: object) -> ConfigurationError:
    try:
        shown = repr(given)
    except ValueError:  # Python refuses to print an integer of thousands of digits.
        shown = f"a huge {type(given).__name__}"
    if len(shown) > _SHOWN_CHARS_MAX:
        shown = shown[:_SHOWN_CHARS_MAX] + "…"
    return ConfigurationError(f"{shown} is not a duration: give {_ACCEPTED}")
