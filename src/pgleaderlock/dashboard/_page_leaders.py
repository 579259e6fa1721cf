"""The page of the leaders: one row a role, with its lane of the timeline. What is wrong comes first.

Imports `_page_html`. Must never decide whether something is late: the API does, with the settings of the session.
"""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode

from pgleaderlock.dashboard._page_html import Html, ago, clock, duration, get, isolated, number, tag

__all__ = ["leaders_page"]

DEFAULT_NAMESPACE = "pgleaderlock"
# The columns: class, heading, and its explanation. The lane's heading is the axis, which the script draws.
_COLUMNS = (
    ("role", "Role"),
    ("leader", "Leader"),
    ("tenure", "Leads for"),
    ("beat", "Heartbeat"),
    ("gate", "Gate"),
    ("cand", "Candidates"),
    ("change", "Last change"),
)
_RANGES = (("15 min", 900), ("1 h", 3600), ("24 h", 86400), ("7 d", 604800))


def leaders_page(data: Mapping[str, Any], now_ms: int) -> Html:
    rows: Sequence[Mapping[str, Any]] = sorted(data.get("leaders", ()), key=_wrong_first)
    prefix = get(data, "query", "prefix") or ""
    more = data.get("next_cursor")
    unknown = bool(data.get("error"))
    sentence = "Who leads is not known" if unknown else _sentence(rows, complete=not more and not prefix)
    parts = [
        tag("h1", sentence, id="state", class_="bad" if unknown else _mood(rows), aria_live="polite"),
        tag("p", id="facts", class_="facts"),
        _tools(prefix),
        tag("div", id="legend", class_="legend", hidden=True),
        tag(
            "div",
            _heading(),
            tag("div", *(_row(row, now_ms) for row in rows), id="rows", role="rowgroup"),
            id="roles",
            class_="roles",
            role="table",
            aria_label="Roles",
        ),
        tag(
            "p",
            "No role begins like that." if prefix else _EMPTY,
            id="nothing",
            class_="nothing",
            hidden=bool(rows) or unknown,
        ),
        tag("p", "Times are UTC. The timeline needs JavaScript; ", _history(), " has the same as a table.", id="times"),
    ]
    if more:
        query = urlencode({"prefix": prefix, "cursor": more})
        parts.append(tag("p", tag("a", "More roles", href=f"/?{query}"), id="more", class_="more"))
    return Html("".join(parts))


_EMPTY = "No role has been led yet. Roles appear here once a node has won one."


def _history() -> Html:
    return tag("a", "the history", href="/history")


def _wrong_first(row: Mapping[str, Any]) -> tuple[int, str, str]:
    return _badness(row), str(row.get("role")), str(row.get("namespace"))


def _badness(row: Mapping[str, Any]) -> int:
    """0: nobody leads. 1: its leader is late. 2: it leads and may not act yet. 3: all is well."""
    if row.get("leader") is None:
        return 0
    if row.get("heartbeat") != "ok":
        return 1
    return 3 if row.get("gate") == "open" else 2


def _sentence(rows: Sequence[Mapping[str, Any]], *, complete: bool) -> str:
    free = sum(_badness(row) == 0 for row in rows)
    late = sum(_badness(row) == 1 for row in rows)
    which = f"{len(rows)} role{'' if len(rows) == 1 else 's'}"
    if not complete:
        which += " on this page"
    if not rows:
        return "No roles"
    if not (free or late):
        return f"All {which} led" if len(rows) > 1 else "The one role is led"
    said = [f"{free} without a leader"] if free else []
    said += [f"{late} with a late heartbeat"] if late else []
    return f"{', '.join(said)}, of {which}"


def _mood(rows: Sequence[Mapping[str, Any]]) -> str:
    worst = min(map(_badness, rows), default=3)
    return ("bad", "late", "well", "well")[worst]


def _tools(prefix: str) -> Html:
    find = tag(
        "form",
        tag("label", "Roles that begin with", for_="find"),
        tag("input", type="search", id="find", name="prefix", value=prefix, autocomplete="off", spellcheck="false"),
        tag("button", "Show"),
        id="finding",
        method="get",
        action="/",
        role="search",
    )
    ranges = tag(
        "div",
        *(
            tag("button", text, type="button", data_range=seconds, aria_pressed="false", title=f"The last {text}")
            for text, seconds in _RANGES
        ),
        *(
            tag("button", sign, type="button", data_move=move, aria_label=words, title=words)
            for sign, move, words in (
                ("\u2212", "out", "Zoom out"),
                ("+", "in", "Zoom in"),
                ("\u2190", "back", "Earlier"),
                ("\u2192", "forth", "Later"),
            )
        ),
        id="ranges",
        class_="ranges",
        role="group",
        aria_label="Time shown",
        hidden=True,
    )
    return tag("div", find, ranges, class_="tools")


def _heading() -> Html:
    cells = [tag("div", heading, role="columnheader", class_=f"c-{name}") for name, heading in _COLUMNS]
    axis = tag("div", tag("span", "Timeline", class_="hush"), role="columnheader", class_="c-lane", id="axis")
    return tag("div", tag("div", *cells, axis, role="row", class_="row head"), role="rowgroup", class_="heads")


def _row(row: Mapping[str, Any], now_ms: int) -> Html:
    role, namespace = row.get("role"), row.get("namespace")
    change = row.get("last_change")
    cells: dict[str, list[object]] = {
        "role": [
            tag("a", isolated(role), href=f"/history?role={quote(str(role), safe='')}"),
            tag("small", isolated(namespace)) if namespace not in (None, DEFAULT_NAMESPACE) else None,
        ],
        "leader": _leader(row),
        "tenure": [duration(row.get("tenure_ms")), _small("since ", row.get("since_ms"))],
        "beat": [tag("span", *_beat(row), class_="beat", data_beat=row.get("heartbeat"))],
        "gate": [tag("span", row.get("gate"), class_="badge", data_gate=row.get("gate"))],
        "cand": [number(row.get("candidates"))],
        "change": _change(change, now_ms),
        "lane": [tag("div", class_="lane")],
    }
    labels = dict(_COLUMNS)
    return tag(
        "div",
        *(
            tag(
                "div",
                *content,
                role="rowheader" if name == "role" else "cell",
                class_=f"c-{name}",
                data_label=labels.get(name),
            )
            for name, content in cells.items()
        ),
        role="row",
        class_="row",
        data_wrong=_badness(row),
    )


def _leader(row: Mapping[str, Any]) -> list[object]:
    epoch = tag("small", f"epoch {row.get('epoch')}")
    if row.get("leader") is None:
        return [tag("strong", "nobody", class_="nobody"), epoch]
    return [tag("span", tag("i", class_="chip"), isolated(row["leader"]), class_="node"), epoch]


def _beat(row: Mapping[str, Any]) -> list[object]:
    age_ms = row.get("heartbeat_age_ms")
    if age_ms is None:
        return ["none"]
    return [duration(age_ms), " late" if row.get("heartbeat") == "late" else ""]


def _change(change: Mapping[str, Any] | None, now_ms: int) -> list[object]:
    if change is None:
        return [Html("\u2013")]
    before = f"after {change['reason']}, " if change.get("reason") else ""
    words = str(change.get("kind")).replace("_", " ")
    return [tag("span", words), tag("small", f"{before}{ago(change.get('at_ms'), now_ms)}")]


def _small(words: str, at_ms: float | None) -> Html | None:
    return None if at_ms is None else tag("small", words, clock(at_ms))
