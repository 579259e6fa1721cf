"""HTML that cannot be forgotten to be escaped: whatever is not `Html` already becomes text.

Imports the standard library. Must never take a string for markup because of how it looks.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from html import escape
from typing import Any

__all__ = ["Html", "ago", "clock", "duration", "get", "isolated", "moment", "number", "tag"]

_VOID = frozenset({"input", "link", "meta"})
DASH = "\u2013"
_NEWEST_MS = 253_402_300_799_000
"""The last second that `datetime` knows."""


class Html(str):
    """Markup that is ready."""

    __slots__ = ()


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """One element. Attributes that are None or False are left out; `class_` and `aria_label` lose their underscores."""
    shown = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        plain = key.rstrip("_").replace("_", "-")
        shown.append(f" {plain}" if value is True else f' {plain}="{escape(str(value))}"')
    start = f"<{name}{''.join(shown)}>"
    return Html(start if name in _VOID else f"{start}{_text(children)}</{name}>")


def _text(children: tuple[object, ...]) -> str:
    return "".join(
        child if isinstance(child, Html) else escape(str(child)) for child in children if child not in (None, "")
    )


def isolated(name: object, **attributes: object) -> Html:
    """A name of somebody's choosing: its direction of writing stays its own, and all of it is in the title."""
    return tag("bdi", name, title=name, **attributes)


def get(data: Mapping[str, Any], *path: str) -> Any:
    """The value at this path, None where the path ends early."""
    value: Any = data
    for step in path:
        value = value.get(step) if isinstance(value, Mapping) else None
    return value


def number(value: object) -> str:
    """An integer with thin spaces between its thousands; a dash for none."""
    return DASH if value is None else f"{value:,}".replace(",", "\u202f")


def duration(ms: float | None) -> str:
    """How long, as one says it: two units at most. The pages' script says it in the same words."""
    if ms is None:
        return DASH
    ms = max(ms, 0)
    if ms < 1000:
        return f"{ms:.0f} ms"
    seconds = ms / 1000
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    for unit, length, below, below_length in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if seconds >= length:
            rest = int(seconds % length // below_length)
            whole = f"{int(seconds // length)} {unit}"
            return f"{whole} {rest} {below}" if rest else whole
    return f"{int(seconds)} s"


def ago(at_ms: float | None, now_ms: float) -> str:
    """How long ago, roughly: the larger unit only."""
    if at_ms is None:
        return DASH
    words = duration(now_ms - at_ms).split(" ")
    return f"{' '.join(words[:2])} ago"


def moment(at_ms: float | None) -> Html:
    """Date and time of day. Without the script it is UTC, and the page says so."""
    return _time(at_ms, "moment")


def clock(at_ms: float | None) -> Html:
    """The time of day."""
    return _time(at_ms, "clock")


def _time(at_ms: float | None, kind: str) -> Html:
    if at_ms is None:
        return Html(DASH)
    at = datetime.fromtimestamp(min(max(at_ms, 0), _NEWEST_MS) / 1000, UTC)
    iso = at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    date = [tag("span", at.strftime("%Y-%m-%d"), class_="date"), " "] if kind == "moment" else []
    return tag("time", *date, at.strftime("%H:%M:%S"), datetime=iso, title=iso, data_time=kind)
