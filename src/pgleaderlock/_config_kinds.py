"""What a value of a setting may be: how it is read, how an editor checks it, and how it is shown.

Imports the standard library, `errors`, `keys` and `_config_duration` only. Pure. It must never guess: a number without
a unit may be seconds or milliseconds, and is refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pgleaderlock._config_duration import DURATION_PATTERN, format_duration, parse_duration_s
from pgleaderlock.errors import ConfigurationError
from pgleaderlock.keys import BIGINT_MAX, BIGINT_MIN

__all__ = [
    "CHANNEL",
    "DELAYS",
    "DURATION",
    "DURATION_OR_NEVER",
    "DURATION_OR_ZERO",
    "INTEGER",
    "SWITCH",
    "TEXT",
    "TEXTS",
    "Kind",
    "Mistake",
    "choice",
]

SHOWN_CHARS_MAX = 40


class Mistake(Exception):
    """A value cannot be taken: what is wrong, and what to do. Becomes a `Problem` once it is known where."""

    def __init__(self, text: str, remedy: str) -> None:
        super().__init__(text)
        self.text = text
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class Kind:
    """What a value may be: how it is read, how an editor checks it, and how it is shown."""

    unit: str
    read: Callable[[str, object], Any]
    """From the key and what the file says to what the program uses. Raises `Mistake`."""
    schema: Mapping[str, Any]
    show: Callable[[Any], str] = str

    @property
    def json_unit(self) -> str | None:
        """Of the value as programs use it."""
        return "s" if self.unit.startswith("duration") else None


def _given(value: object) -> str:
    shown = repr(value) if not isinstance(value, bool) else str(value).lower()
    if isinstance(value, str):
        shown = f'"{value}"'
    return shown if len(shown) <= SHOWN_CHARS_MAX else shown[:SHOWN_CHARS_MAX] + "…"


# --- Reading


def _duration(key: str, value: object, *, zero_allowed: bool = False) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        # 5000 may be meant as milliseconds. Nobody writes a unit that was not meant.
        raise Mistake(f"{key} = {_given(value)} has no unit", f'write it as a text with one, such as "{value}s"')
    if not isinstance(value, str):
        raise Mistake(f"{key} must be a duration, not {_type(value)}", 'write a text with a unit, such as "5s"')
    remedy = 'write a number and one of ms, s, m, h, d, such as "200ms", "5s", "1m"'
    if value[-1:].isdigit():
        raise Mistake(f"{key} = {_given(value)} has no unit", remedy)
    try:
        duration_s = parse_duration_s(value)
    except ConfigurationError:
        raise Mistake(f"{key} = {_given(value)} is no duration", remedy) from None
    if duration_s == 0 and not zero_allowed:
        raise Mistake(f"{key} = {_given(value)} is no time at all", 'give a duration above zero, such as "5s"')
    return duration_s


def _duration_or_never(key: str, value: object) -> float | bool:
    return False if value is False else _duration(key, value)


def _duration_or_zero(key: str, value: object) -> float:
    return _duration(key, value, zero_allowed=True)


def _delays(key: str, value: object) -> tuple[float, float]:
    if not isinstance(value, list):
        middle_s = _duration(key, value)
        return middle_s * 0.8, middle_s * 1.2
    if len(value) != 2:
        raise Mistake(f"{key} has {len(value)} durations", 'give one ("5s") or two, shortest and longest ["4s", "6s"]')
    low_s, high_s = (_duration(key, one) for one in value)
    if low_s > high_s:
        raise Mistake(f"{key} = [{_given(value[0])}, {_given(value[1])}] is upside down", "put the shorter one first")
    return low_s, high_s


def _switch(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise Mistake(f"{key} = {_given(value)} is no switch", f"write {key} = true or {key} = false, without quotes")
    return value


def _text(key: str, value: object) -> str:
    if not isinstance(value, str):
        raise Mistake(f"{key} must be a text, not {_type(value)}", f'write {key} = "…"')
    if not value.strip():
        raise Mistake(f"{key} is empty", "give it a value, or remove the line")
    return value


def _channel(key: str, value: object) -> str | bool:
    if value is False:
        return False
    if not isinstance(value, str):
        raise Mistake(f"{key} must be a text, not {_type(value)}", f'write {key} = "…", or false to do without')
    return _text(key, value)


def _integer(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise Mistake(f"{key} must be a whole number, not {_type(value)}", "write it without quotes: 42 or 0x2A")
    if not BIGINT_MIN <= value <= BIGINT_MAX:
        raise Mistake(f"{key} does not fit into 64 bits", f"give a number from {BIGINT_MIN} to {BIGINT_MAX}")
    return value


def _texts(key: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        raise Mistake(f"{key} must be a list", f"write {key} = [{_given(value)}]")
    if not isinstance(value, list):
        raise Mistake(f"{key} must be a list of texts, not {_type(value)}", f'write {key} = ["one", "two"]')
    return tuple(_text(key, one) for one in value)


def _one_of(*words: str) -> Callable[[str, object], str]:
    def read(key: str, value: object) -> str:
        if value not in words:
            text = f"{key} = {_given(value)} is unknown" if isinstance(value, str) else f"{key} must be a text"
            raise Mistake(text, f"give one of {', '.join(words)}")
        return str(value)

    return read


def _type(value: object) -> str:
    names = {
        dict: "a section",
        list: "a list",
        str: "a text",
        bool: "true or false",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), "a date or time")


# --- Kinds

_DURATION_SCHEMA = {"$ref": "#/$defs/duration"}


def _show_delays(delays_s: tuple[float, float]) -> str:
    return " to ".join(format_duration(round(delay_s, 6)) for delay_s in delays_s)


def _show_switch(value: bool) -> str:
    return str(value).lower()


def choice(*words: str) -> Kind:
    return Kind(" or ".join(f'"{word}"' for word in words), _one_of(*words), {"enum": list(words)})


_TEXT_SCHEMA = {"type": "string", "pattern": r"\S"}
DURATION = Kind("duration", _duration, _DURATION_SCHEMA, format_duration)
DURATION_OR_ZERO = Kind("duration", _duration_or_zero, {"type": "string", "pattern": DURATION_PATTERN}, format_duration)
DURATION_OR_NEVER = Kind(
    "duration, or false",
    _duration_or_never,
    {"anyOf": [_DURATION_SCHEMA, {"const": False}]},
    lambda value: "false" if value is False else format_duration(value),
)
DELAYS = Kind(
    "duration, or two",
    _delays,
    {"anyOf": [_DURATION_SCHEMA, {"type": "array", "items": _DURATION_SCHEMA, "minItems": 2, "maxItems": 2}]},
    _show_delays,
)
SWITCH = Kind("true or false", _switch, {"type": "boolean"}, _show_switch)
TEXT = Kind("text", _text, _TEXT_SCHEMA)
CHANNEL = Kind(
    "text, or false",
    _channel,
    {"anyOf": [_TEXT_SCHEMA | {"maxLength": 63}, {"const": False}]},
    lambda value: value or "false",
)
INTEGER = Kind("64-bit number", _integer, {"type": "integer", "minimum": BIGINT_MIN, "maximum": BIGINT_MAX})
TEXTS = Kind("list of texts", _texts, {"type": "array", "items": _TEXT_SCHEMA}, ", ".join)
