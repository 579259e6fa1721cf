"""The dashboard's pages: whole HTML documents with their first data inside, useful without JavaScript.

    render(page, data, *, signed_in, locks, leaders) -> bytes

`data` is the API's answer that the page shows (`PAGES` says which list of it), with "query", the query parameters of
the page itself, and "error", a sentence, if there was no answer. Three more pages have no list: `sign-in`, whose "to"
is the page to go to afterwards; `refused` and `missing`, whose "error" says why.

The markup of a row is written once, here, and used twice: filled with the first data (`Row` with values), and blank in
a <template> (`Row` without), of which `static/rows.js` fills a copy for each later row. The script adds no element to a
row.

Must never do I/O, let a name become markup, or show a lease's id: anyone who has it can act as the holder. A page has
no inline script and no inline style, so that its Content-Security-Policy can forbid both.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from pgleaderlock.history import remedies

__all__ = ["PAGES", "Page", "ago", "duration", "render", "static_files"]

DEFAULT_NAMESPACE = "pgleaderlock"
DASH = "\u2013"
_AS_IN_SCRIPTS = "!'()*"
"""Characters that `encodeURIComponent` does not encode."""
_NEWEST_MS = 253_402_300_799_000
"""The last second that `datetime` supports."""

Values = Mapping[str, Any]


# --- HTML: everything that is not `Html` is escaped.

_VOID = frozenset({"input", "link", "meta"})


class Html(str):
    """Text that is markup already, and is not escaped again."""

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
    return Html(start if name in _VOID else f"{start}{_joined(children)}</{name}>")


def _joined(parts: Iterable[object]) -> Html:
    return Html(
        "".join(part if isinstance(part, Html) else escape(str(part)) for part in parts if part not in (None, ""))
    )


# --- Texts. `static/core.js` formats in the same way; there, ages are updated and times are in the reader's zone.


def number(value: int) -> str:
    """An integer with thin spaces between its thousands."""
    return f"{value:,}".replace(",", "\u202f")


def duration(ms: float | None) -> str:
    """A length of time in two units at most."""
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
    """How long ago, in the largest unit only."""
    if at_ms is None:
        return DASH
    words = duration(now_ms - at_ms).split(" ")
    return f"{' '.join(words[:2])} ago"


def _time(at_ms: float, kind: str) -> tuple[object, dict[str, object]]:
    """A `moment` (date and time of day) or a `clock` (time of day), in UTC."""
    at = datetime.fromtimestamp(min(max(at_ms, 0), _NEWEST_MS) / 1000, UTC)
    iso = at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    date = (tag("span", at.strftime("%Y-%m-%d"), class_="date"), " ") if kind == "moment" else ()
    return _joined((*date, at.strftime("%H:%M:%S"))), {"datetime": iso, "title": iso, "data_time": kind}


# --- Rows

# Forms: functions from a value and the current time to the text, and the attributes of its element. If the text depends
# on the time, an attribute holds the moment, from which the script updates it.
_FORMS: Mapping[str, Callable[[Any, int], tuple[object, dict[str, object]]]] = {
    "group": lambda _value, _now_ms: ("", {}),
    "text": lambda value, _now_ms: (value, {}),
    "name": lambda value, _now_ms: (value, {"title": value}),
    "link": lambda role, _now_ms: ("", {"href": f"/history?role={quote(role, safe=_AS_IN_SCRIPTS)}"}),
    "address": lambda address, _now_ms: ("", {"href": address}),
    "lane": lambda role, _now_ms: ("", {"aria_label": f"Terms of {role}"}),
    "badge": lambda word, _now_ms: (word.replace("_", " "), {"data_kind": word}),
    "number": lambda value, _now_ms: (number(value), {}),
    "duration": lambda ms, _now_ms: (duration(ms), {}),
    "age": lambda at_ms, now_ms: (duration(now_ms - at_ms), {"data_age": at_ms}),
    "ago": lambda at_ms, now_ms: (ago(at_ms, now_ms), {"data_ago": at_ms}),
    "left": lambda at_ms, now_ms: (
        duration(at_ms - now_ms) if at_ms > now_ms else "has run out",
        {"data_left": at_ms},
    ),
    "until": lambda at_ms, now_ms: (
        f"{duration(at_ms - now_ms)} left" if at_ms > now_ms else "any moment",
        {"data_until": at_ms},
    ),
    "moment": lambda at_ms, _now_ms: _time(at_ms, "moment"),
    "clock": lambda at_ms, _now_ms: _time(at_ms, "clock"),
}


class Row:
    """The parts of a row: filled with values, or blank for `static/rows.js` to fill."""

    def __init__(self, values: Values | None, now_ms: int = 0) -> None:
        self._values = values
        self._now_ms = now_ms

    def show(self, name: str, field: str, form: str, *children: object, **attributes: object) -> Html:
        """An element that shows a field in a form; left out if the field is None."""
        if self._values is None:
            return tag(name, *children, **attributes, data_field=field, data_form=form)
        value = self._values[field]
        if value is None:
            return Html("")
        content, more = _FORMS[form](value, self._now_ms)
        return tag(name, *(children or (content,)), **attributes, **more)

    def missing(self, name: str, field: str, *children: object, **attributes: object) -> Html:
        """An element that is present only if the field is None."""
        if self._values is None:
            return tag(name, *children, **attributes, data_missing=field)
        return tag(name, *children, **attributes) if self._values[field] is None else Html("")

    def data(self, *fields: str) -> dict[str, object]:
        """The fields that are attributes of the row itself."""
        if self._values is None:
            return {"data_fields": " ".join(fields)}
        return {f"data_{field}": self._values[field] for field in fields}

    def name(self, field: str) -> Html:
        """A name with its own text direction, and in full in the title."""
        return self.show("bdi", field, "name")

    def role(self) -> Html:
        return self.show("a", "role", "link", self.name("role"))

    def node(self, field: str) -> Html:
        return self.show("span", field, "group", tag("i", class_="chip"), self.name(field), class_="node")

    def leader(self) -> Html:
        return _joined((self.node("leader"), self.missing("strong", "leader", "nobody", class_="nobody")))

    def badge(self, field: str) -> Html:
        return self.show("span", field, "badge", class_="badge")

    def number(self, field: str) -> Html:
        return self.show("span", field, "number")

    def moment(self, field: str) -> Html:
        return self.show("time", field, "moment")

    def bar(self, field: str, kind: str) -> Html:
        """A bar. The script sets its length, because the page's policy forbids inline styles."""
        return self.show("span", field, "group", tag("i", data_keep=True), class_=kind, aria_hidden="true")


# Columns: class (which, in tables, also marks numbers and names), heading, and the contents of a cell.
Columns = Sequence[tuple[str, str, Callable[[Row], Iterable[Html]]]]

_LEADERS: Columns = (
    ("role", "Role", lambda row: (row.role(), row.show("small", "space", "group", row.name("space")))),
    (
        "leader",
        "Leader",
        lambda row: (
            row.leader(),
            tag(
                "small",
                "epoch ",
                row.show("span", "epoch", "text"),
                row.show("span", "leased", "group", ", by a lease"),
            ),
        ),
    ),
    (
        "tenure",
        "Leads for",
        lambda row: (
            row.show("span", "since_ms", "age"),
            row.missing("span", "since_ms", DASH),
            row.show("small", "since_ms", "group", "since ", row.show("time", "since_ms", "clock")),
        ),
    ),
    (
        "beat",
        "Heartbeat",
        lambda row: (
            tag(
                "span",
                row.show("span", "heard_ms", "age"),
                row.show("span", "late", "group", " late"),
                row.missing("span", "heard_ms", "none"),
                class_="beat",
            ),
        ),
    ),
    (
        "state",
        "State",
        lambda row: (
            row.show("span", "label", "text", class_="badge state"),
            row.show("small", "opens_ms", "until"),
            row.show(
                "small",
                "troubled_ms",
                "group",
                "for ",
                row.show("span", "troubled_ms", "age"),
                row.show("span", "in_flight", "group", ", ", row.show("span", "in_flight", "number"), " in flight"),
            ),
        ),
    ),
    ("cand", "Candidates", lambda row: (row.number("candidates"),)),
    (
        "change",
        "Last change",
        lambda row: (
            row.show("span", "changed", "text"),
            row.missing("span", "changed", DASH),
            row.show(
                "small",
                "changed_ms",
                "group",
                row.show("span", "after", "group", "after ", row.show("span", "after", "text"), ", "),
                row.show("span", "changed_ms", "ago"),
            ),
        ),
    ),
)
_TERMS: Columns = (
    ("name role", "Role", lambda row: (row.role(),)),
    ("num", "Epoch", lambda row: (row.number("epoch"),)),
    ("name node", "Node", lambda row: (row.node("node_id"),)),
    ("when", "Began", lambda row: (row.moment("began_ms"),)),
    (
        "when",
        "Ended",
        lambda row: (row.moment("ended_ms"), row.missing("span", "ended_ms", "leads", class_="leads")),
    ),
    ("num", "Lasted", lambda row: (row.show("span", "lasted_ms", "duration"),)),
    ("why", "Why it ended", lambda row: (row.badge("reason"),)),
    ("num", "Nobody acted before", lambda row: (row.show("span", "gap_ms", "duration"),)),
)
_CHANGES: Columns = (
    ("name role", "Role", lambda row: (row.role(),)),
    ("name node", "Leader", lambda row: (row.leader(),)),
    ("num", "Epoch", lambda row: (row.number("epoch"),)),
    ("why", "Last change", lambda row: (row.badge("kind"),)),
    ("when", "At", lambda row: (row.moment("at_ms"), row.missing("span", "at_ms", DASH))),
)
_EVENTS: Columns = (
    ("when", "At", lambda row: (row.moment("at_ms"),)),
    ("why", "What", lambda row: (row.badge("kind"),)),
    ("name role", "Role", lambda row: (row.role(),)),
    ("name node", "Node", lambda row: (row.node("node_id"),)),
    ("num", "Epoch", lambda row: (row.number("epoch"),)),
    ("detail", "Detail", lambda row: (row.show("bdi", "detail", "text"),)),
)
_INCIDENTS: Columns = (
    ("when", "Began", lambda row: (row.moment("began_ms"),)),
    ("name node", "Node", lambda row: (row.node("node_id"),)),
    ("why", "What", lambda row: (row.badge("reason"),)),
    ("num", "Roles", lambda row: (row.number("count"),)),
    ("num", "Longest without a leader", lambda row: (row.show("span", "longest_ms", "duration"),)),
    ("detail", "Taken over by", lambda row: (row.show("bdi", "taken", "text"),)),
    ("detail", "Which", lambda row: (row.show("bdi", "which", "text"),)),
    ("link", "Timeline", lambda row: (row.show("a", "around", "address", "show"),)),
)
_SLOTS: Columns = (
    ("name role", "Name", lambda row: (row.show("a", "all_of", "address", row.name("name")),)),
    ("name", "Slot", lambda row: (row.name("slot"),)),
    ("why", "State", lambda row: (row.badge("state"),)),
    ("num", "Attempts", lambda row: (row.number("attempts"),)),
    ("when", "Began", lambda row: (row.moment("began_ms"),)),
    ("num", "Took", lambda row: (row.show("span", "took_ms", "duration"),)),
    ("name node", "Node", lambda row: (row.node("node_id"),)),
    ("detail", "Detail", lambda row: (row.show("bdi", "detail", "text"),)),
)
_NODES: Columns = (
    ("name node", "Node", lambda row: (row.node("node_id"),)),
    ("why", "State", lambda row: (row.badge("state"),)),
    ("num", "Leads", lambda row: (row.bar("roles", "share"), row.number("roles"))),
    ("num", "Wants", lambda row: (row.number("wants"), row.missing("span", "wants", DASH))),
    ("num", "Heartbeat", lambda row: (row.show("span", "heard_ms", "age"),)),
    ("name", "Holds by", lambda row: (row.show("span", "hold", "text"),)),
    ("name", "Host", lambda row: (row.name("host"),)),
    ("name", "Version", lambda row: (row.name("version"),)),
    ("when", "Up since", lambda row: (row.moment("process_started_ms"),)),
    ("when", "Connected since", lambda row: (row.moment("started_ms"),)),
)
_LOCKS: Columns = (
    ("name lock", "Lock", lambda row: (row.name("lock_name"),)),
    (
        "name owner",
        "Owner",
        lambda row: (row.name("owner_id"), row.missing("span", "owner_id", "free", class_="free")),
    ),
    ("num", "Token", lambda row: (row.number("fencing_token"),)),
    ("left", "Time left", lambda row: (row.bar("expiry_ms", "bar"), row.show("span", "expiry_ms", "left"))),
    ("num", "Waiting", lambda row: (row.number("waiters"),)),
)


# --- The page of the leaders: one row per role, with its lane of the timeline, worst first.

_AROUND_MS = 60_000
_ROLES_NAMED = 8
_RANGES = (("15 min", 900), ("1 h", 3600), ("24 h", 86400), ("7 d", 604800))
_MOVES = (
    ("\u2212", "out", "Zoom out"),
    ("+", "in", "Zoom in"),
    ("\u2190", "back", "Earlier"),
    ("\u2192", "forth", "Later"),
    ("Now", "now", "Back to now"),
)
REMEDIES_MAX = 5
ROLES_TOGETHER = 5
# What to do next if there is nothing to show: without a filter, and with one.
_ELSEWHERE = "If nodes run already, compare their namespace and database with --namespace and --dsn of this dashboard."
_EMPTY = {
    "leaders": (
        f"No role has been led yet. Start a node: pgleaderlock run --fenced --name ROLE. {_ELSEWHERE}",
        "No role and no leader is called like that. Clear the field to see all.",
    ),
    "history": (
        f"No term yet. Terms appear here once a node leads a role. {_ELSEWHERE}",
        "No term of this role, node and time. Clear the fields to see all.",
    ),
    "events": (
        f"Nothing has happened yet. Events appear here once a node has started. {_ELSEWHERE}",
        "No event of this role, node and time. Clear the fields to see all.",
    ),
    "incidents": (
        "No term has ended in the last 24 hours.",
        "No incident of this role, node and time. Times are like 2026-11-15T03:00Z.",
    ),
    "slots": (
        "Nothing has run once per tick yet. Run something: pgleaderlock exec --once-per 1h --name NAME -- COMMAND.",
        "No slot of this name. Clear the field to see all names.",
    ),
    "nodes": (f"No node has been heard. Start one: pgleaderlock run --fenced --name ROLE. {_ELSEWHERE}", ""),
    "locks": (
        "No lock has been taken yet. Take one: pgleaderlock lock acquire NAME.",
        "No lock begins like that. Clear the field to see all.",
    ),
}


def _leaders_page(data: Values, now_ms: int) -> Html:
    rows = sorted((_leader(row, now_ms) for row in data.get("leaders", ())), key=_wrong_first)
    prefix, more = data["query"].get("prefix") or "", data.get("next_cursor")
    unknown = bool(data.get("error"))
    sentence = "Who leads is not known" if unknown else _sentence(rows, complete=not more and not prefix)
    filled = tag("div", *(_leader_row(Row(values, now_ms)) for values in rows), id="rows", role="rowgroup")
    history = tag("a", "the history", href="/history")
    return _joined(
        (
            tag("h1", sentence, id="state", class_="bad" if unknown else _mood(rows), aria_live="polite"),
            tag("p", id="facts", class_="facts"),
            _remedies(rows),
            _tools(prefix),
            tag("div", id="legend", class_="legend", hidden=True),
            tag("template", _leader_row(Row(None)), id="row"),
            tag("div", _heading(), filled, id="roles", class_="roles", role="table", aria_label="Roles"),
            _nothing("leaders", data, hidden=bool(rows) or unknown),
            tag(
                "p", "Times are UTC. The timeline needs JavaScript; ", history, " has the same as a table.", id="times"
            ),
            more and _more("/", "More roles", {"prefix": prefix, "cursor": more}),
        )
    )


def _leader(row: Values, now_ms: int) -> Values:
    change = row["last_change"] or {}
    ticks = row["state"] not in ("acting", "waiting")
    age_ms, space = row["heartbeat_age_ms"], row["namespace"]
    return {
        **row,
        "key": f"{space}\n{row['role']}",
        "space": None if space == DEFAULT_NAMESPACE else space,
        "troubled_ms": row["state_since_ms"] if ticks else None,
        "heard_ms": None if age_ms is None else now_ms - age_ms,
        "late": True if row["heartbeat"] == "late" else None,
        "leased": True if row["hold"] == "lease" else None,
        "changed": change.get("kind"),
        "changed_ms": change.get("at_ms"),
        "after": change.get("reason"),
    }


def _wrong_first(row: Values) -> tuple[int, str, str]:
    return row["rank"], row["role"], row["namespace"]


def _leader_row(row: Row) -> Html:
    cells = [
        tag("div", *cell(row), role="rowheader" if kind == "role" else "cell", class_=f"c-{kind}", data_label=heading)
        for kind, heading, cell in _LEADERS
    ]
    lane = row.show("div", "role", "lane", class_="lane", role="group", data_keep=True)
    more = row.data("key", "mood", "heartbeat")
    return tag("div", *cells, tag("div", lane, role="cell", class_="c-lane"), role="row", class_="row", **more)


def _remedies(rows: Sequence[Values]) -> Html:
    """Why no node may act for which roles, and what to run next: the worst few."""
    troubled = [row for row in rows if row["state"] != "acting"]
    moods = {(row["why"], row["command"]): row["mood"] for row in reversed(troubled)}
    causes = remedies((row["role"], row["why"], row["command"]) for row in troubled)
    lines = [
        tag(
            "li",
            tag("strong", *_names(roles)),
            tag("span", why),
            tag("code", command),
            data_mood=moods[why, command],
        )
        for roles, why, command in causes[:REMEDIES_MAX]
    ]
    more = sum(len(roles) for roles, _, _ in causes[REMEDIES_MAX:])
    lines += [tag("li", f"and {number(more)} more role{'' if more == 1 else 's'}")] if more else []
    return tag("ul", *lines, id="remedies", class_="remedies")


def _names(roles: Sequence[str]) -> Iterable[object]:
    for place, role in enumerate(roles[:ROLES_TOGETHER]):
        yield ", " if place else ""
        yield tag("bdi", role, title=role)
    yield f" and {number(len(roles) - ROLES_TOGETHER)} more" if len(roles) > ROLES_TOGETHER else ""


def _sentence(rows: Sequence[Values], *, complete: bool) -> str:
    """Whether a node may act for every role; otherwise how many roles are in which state, worst first."""
    which = f"{len(rows)} role{'' if len(rows) == 1 else 's'}"
    if not complete:
        which += " on this page"
    if not rows:
        return "No roles"
    counts = Counter(row["label"] for row in rows if row["state"] != "acting")  # in the order of rows: worst first
    if counts:
        who = f"{number(counts.total())} of {which} not acting" if len(rows) > 1 else "The one role is not acting"
        said = [f"{number(count)} {label}" for label, count in counts.items()] if len(counts) > 1 else counts
        return f"{who}: " + " \u00b7 ".join(said)
    return f"All {which} acting" if len(rows) > 1 else "The one role is acting"


def _mood(rows: Sequence[Values]) -> str:
    return rows[0]["mood"] if rows else "none"  # no rows may mean a wrong namespace: do not show that all is well


def _tab(data: Values) -> str:
    """The title for a tab in the background: for how many roles no node may act, or that nothing is known."""
    troubled = sum(row["state"] != "acting" for row in data.get("leaders", ()))
    return "(?) " if data.get("error") else f"({troubled}!) " if troubled else ""


def _tools(prefix: str) -> Html:
    find = tag(
        "form",
        tag("label", "Roles that begin with", for_="find"),
        _field("find", "prefix", prefix),
        tag("button", "Show"),
        id="finding",
        method="get",
        action="/",
        role="search",
    )
    ranges = [
        tag("button", text, type="button", data_range=seconds, aria_pressed="false", title=f"The last {text}")
        for text, seconds in _RANGES
    ]
    moves = [
        tag("button", sign, type="button", data_move=move, aria_label=words, title=words)
        for sign, move, words in _MOVES
    ]
    shown = tag(
        "div", *ranges, *moves, id="ranges", class_="ranges", role="group", aria_label="Time shown", hidden=True
    )
    return tag("div", find, shown, class_="tools")


def _heading() -> Html:
    """The heading of the table. That of the lane is the axis, which the script draws."""
    cells = [tag("div", heading, role="columnheader", class_=f"c-{kind}") for kind, heading, _ in _LEADERS]
    axis = tag("div", tag("span", "Timeline", class_="hush"), role="columnheader", class_="c-lane", id="axis")
    return tag("div", tag("div", *cells, axis, role="row", class_="row head"), role="rowgroup", class_="heads")


# --- The pages that are tables


def _history_page(data: Values, now_ms: int) -> Html:
    """The terms of one role; or, for all roles, the last change of each, and the script loads their terms."""
    role, node = data["query"].get("role") or data.get("role"), data["query"].get("node") or ""
    form = _form("/history", *_named(role or "", node), *_times(data))
    csv = tag("button", "CSV", type="button", id="csv", hidden=True, title="What is shown, as a file")
    single = role is not None and "terms" in data
    wanted = [term for term in data["terms"] if node in ("", term["node_id"])] if single else []
    terms = _table("terms", _TERMS, [_term(str(role), term, now_ms) for term in wanted], now_ms, hidden=not single)
    if single:
        older = _more_of(data, "/history", "Older terms", {**_given(data), "role": str(role)})
        return _page(data, "History and failovers", form, (terms,), older, tools=csv, page="history")
    changed = sorted((_change(row) for row in data.get("leaders", ())), key=lambda row: -(row["at_ms"] or 0))
    tables = (_table("changes", _CHANGES, changed, now_ms), terms)
    return _page(data, "History and failovers", form, tables, None, tools=csv, page="history")


def _term(role: str, term: Values, now_ms: int) -> Values:
    ended_ms = now_ms if term["ended_ms"] is None else term["ended_ms"]
    key = f"{role}\n{term['epoch']}"
    return {**term, "key": key, "role": role, "lasted_ms": ended_ms - term["began_ms"]}


def _change(row: Values) -> Values:
    return {**row, "key": row["role"], **(row["last_change"] or {"kind": None, "at_ms": None})}


def _events_page(data: Values, now_ms: int) -> Html:
    given = _given(data)
    form = _form("/events", *_named(given["role"], given["node"]), *_times(data))
    events = [{**event, "key": event["event_id"]} for event in data.get("events", ())]
    older = _more_of(data, "/events", "Older events", given)
    pause = tag("button", "Pause", type="button", id="pause", aria_pressed="false", hidden=True)
    table = _table("events", _EVENTS, events, now_ms)
    return _page(data, "Events", form, (table,), older, tools=pause, page="events")


def _incidents_page(data: Values, now_ms: int) -> Html:
    """The incidents at the time of loading. The page is not updated, because the past does not change."""
    given = _given(data)
    form = _form(
        "/incidents", ("role", "Role", given["role"], None), ("node", "Node", given["node"], None), *_times(data)
    )
    rows = [_incident(incident, now_ms) for incident in data.get("incidents", ())]
    left_out = tag("p", "Older ones were left out: give From and To.", class_="more") if data.get("more") else None
    table = _table("incidents", _INCIDENTS, rows, now_ms)
    return _page(data, "Incidents", form, (table,), left_out, page="incidents")


def _incident(incident: Values, now_ms: int) -> Values:
    """The incident with a link to the timeline of that time."""
    began_ms, ended_ms = incident["began_ms"], incident["ended_ms"] or now_ms
    around_ms = max(_AROUND_MS, ended_ms - began_ms)
    span = {"from": _iso(began_ms - around_ms), "to": _iso(ended_ms + around_ms)}
    open_ones, unnamed = len(incident["without_leader"]), len(incident["roles"]) - _ROLES_NAMED
    taken = [*incident["taken_over_by"], *([f"{open_ones} without a leader"] if open_ones else [])]
    return {
        **incident,
        "key": f"{incident['node_id']}\n{began_ms}",
        "count": len(incident["roles"]),
        "taken": ", ".join(taken),
        "which": ", ".join(incident["roles"][:_ROLES_NAMED]) + (f" and {unnamed} more" if unnamed > 0 else ""),
        "around": f"/?{urlencode(span)}",
    }


def _slots_page(data: Values, now_ms: int) -> Html:
    """The slots at the time of loading. The page is not updated: reload it to see the end of a work."""
    name = data["query"].get("name") or ""
    rows = [_slot(slot) for slot in data.get("slots", ())]
    left_out = tag("p", "Older ones were left out.", class_="more") if data.get("more") else None
    table = _table("slots", _SLOTS, rows, now_ms)
    return _page(data, "Once per tick", _form("/slots", ("name", "Name", name, None)), (table,), left_out, page="slots")


def _slot(slot: Values) -> Values:
    """The slot with a link to all slots of its name."""
    return {**slot, "key": f"{slot['name']}\n{slot['slot']}", "all_of": f"/slots?{urlencode({'name': slot['name']})}"}


def _iso(at_ms: float) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _nodes_page(data: Values, now_ms: int) -> Html:
    nodes = [_node(node, now_ms) for node in data.get("nodes", ())]
    nodes.sort(key=lambda node: (node["live"], node["node_id"], node["session_id"]))
    further = _more_of(data, "/nodes", "Further nodes", {})
    table = _table("nodes", _NODES, nodes, now_ms)
    return _page(data, "Nodes", None, (table,), further, page="nodes")


def _node(node: Values, now_ms: int) -> Values:
    state = node["state"]
    if state == "alive":
        state = "shares its name" if node["name_shared"] else "alive" if node["candidate"] else "observes"
    return {**node, "key": node["session_id"], "state": state, "heard_ms": now_ms - node["heartbeat_age_ms"]}


def _locks_page(data: Values, now_ms: int) -> Html:
    prefix = data["query"].get("prefix") or ""
    form = _form("/locks", ("prefix", "Locks that begin with", prefix, None))
    further = _more_of(data, "/locks", "Further locks", {"prefix": prefix})
    table = _table("locks", _LOCKS, [_lock(lock) for lock in data.get("locks", ())], now_ms)
    return _page(data, "Locks", form, (table,), further, page="locks")


def _lock(lock: Values) -> Values:
    expiry_ms = lock["lease_expiry_ms"] if lock["held"] else None
    return {**lock, "key": lock["lock_name"], "expiry_ms": expiry_ms, "waiters": lock["waiters"] or None}


def _page(
    data: Values,
    title: str,
    form: Html | None,
    tables: Sequence[Html],
    more: Html | None,
    *,
    page: str,
    tools: Html | None = None,
) -> Html:
    # Beside an error, "nothing" would be misread as an empty result.
    empty = all("<tbody></tbody>" in table for table in tables) and not data.get("error")
    return _joined(
        (
            tag("h1", title, id="state"),
            tag("p", id="facts", class_="facts"),
            tag("div", form, tools, class_="tools") if form or tools else None,
            *tables,
            _nothing(page, data, hidden=not empty),
            more,
            tag("p", "Times are UTC.", id="times"),
        )
    )


_UNFILLED = (_CHANGES, _INCIDENTS, _SLOTS)


def _table(name: str, columns: Columns, rows: Iterable[Values], now_ms: int, *, hidden: bool = False) -> Html:
    """A table, followed by the blank template of its rows, unless the script never fills it."""
    head = tag("thead", tag("tr", *(tag("th", heading, scope="col", class_=kind) for kind, heading, _ in columns)))
    body = tag("tbody", *(_table_row(columns, Row(values, now_ms)) for values in rows))
    blank = tag("template", _table_row(columns, Row(None)), id="row") if columns not in _UNFILLED else None
    return _joined((blank, tag("div", tag("table", head, body, id=name), class_="sheet", hidden=hidden)))


def _table_row(columns: Columns, row: Row) -> Html:
    cells = [tag("td", *cell(row), class_=kind, data_label=heading) for kind, heading, cell in columns]
    return tag("tr", *cells, **row.data("key"))


_Field = tuple[str, str, str, str | None]
"""A field of a form: its name, its label, its value, and the list of its suggestions."""


def _given(data: Values) -> dict[str, str]:
    return {name: data["query"].get(name) or "" for name in _FILTERS}


def _named(role: str, node: str) -> tuple[_Field, ...]:
    return ("role", "Role", role, "list-of-roles"), ("node", "Node", node, "list-of-nodes")


def _times(data: Values) -> tuple[_Field, ...]:
    given = _given(data)
    return ("from", "From", given["from"], None), ("to", "To", given["to"], None)


def _form(action: str, *fields: _Field) -> Html:
    shown = [
        tag(
            "div",
            tag("label", label, for_=f"find-{name}"),
            _field(f"find-{name}", name, value, listed),
            listed and tag("datalist", id=listed),
            class_="field",
        )
        for name, label, value, listed in fields
    ]
    return tag("form", *shown, tag("button", "Show"), id="finding", method="get", action=action, role="search")


def _field(field_id: str, name: str, value: str, listed: str | None = None) -> Html:
    plain = {"autocomplete": "off", "spellcheck": "false"}
    return tag("input", type="search", id=field_id, name=name, value=value, list=listed, **plain)


def _nothing(page: str, data: Values, *, hidden: bool) -> Html:
    """The text for an empty page. Both variants are present: the script switches between them when the filters
    change."""
    empty, filtered = _EMPTY[page]
    text = filtered if filtered and any(data["query"].values()) else empty
    return tag("p", text, id="nothing", class_="nothing", data_empty=empty, data_filtered=filtered, hidden=hidden)


def _more_of(data: Values, address: str, text: str, query: Mapping[str, str]) -> Html | None:
    cursor = data.get("next_cursor")
    given = {name: value for name, value in query.items() if value}
    return None if cursor is None else _more(address, text, {**given, "cursor": cursor})


def _more(address: str, text: str, query: Mapping[str, str]) -> Html:
    return tag("p", tag("a", text, href=f"{address}?{urlencode(query)}"), id="more", class_="more")


# --- The document around them


class Page(NamedTuple):
    address: str
    title: str
    about: str
    """Leaders or locks: what a visitor must be allowed to see to open the page."""
    fields: tuple[str, ...]
    """The parameters of its query."""
    shows: str
    """The list of the API that the page shows. The history of one role shows `/v1/leaders/{role}/terms` instead."""
    body: Callable[[Values, int], Html]


_FILTERS = ("role", "node", "from", "to")
PAGES: Mapping[str, Page] = {
    "leaders": Page("/", "Leaders", "leaders", ("prefix", "cursor", "from", "to"), "leaders", _leaders_page),
    "history": Page("/history", "History", "leaders", (*_FILTERS, "cursor"), "leaders", _history_page),
    "events": Page("/events", "Events", "leaders", (*_FILTERS, "cursor"), "events", _events_page),
    "incidents": Page("/incidents", "Incidents", "leaders", _FILTERS, "incidents", _incidents_page),
    "slots": Page("/slots", "Slots", "leaders", ("name",), "slots", _slots_page),
    "nodes": Page("/nodes", "Nodes", "leaders", ("cursor",), "nodes", _nodes_page),
    "locks": Page("/locks", "Locks", "locks", ("prefix", "cursor"), "locks", _locks_page),
}

_CONTENT_TYPES = {".js": b"text/javascript; charset=utf-8", ".css": b"text/css; charset=utf-8"}
_ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E"
    "%3Crect width='16' height='16' rx='3' fill='%230b6b4f'/%3E"
    "%3Cpath d='M3 4h7v2H3zM6 7h7v2H6zM3 10h5v2H3z' fill='%23fff'/%3E%3C/svg%3E"
)


_WITHOUT_LIST = {"refused": "Not for this token", "missing": "There is no such page"}


def render(page: str, data: Values, *, signed_in: bool, locks: bool, leaders: bool) -> bytes:
    """The document as UTF-8. `locks` and `leaders`: whether this visitor may see them."""
    if page == "sign-in":
        return _document(page, "Sign in", _sign_in(data.get("error"), data.get("to", "/")), top=Html(""))
    now_ms = data.get("now_ms") or int(time.time() * 1000)
    shown = {"leaders": leaders, "locks": locks}
    listed = {name: entry for name, entry in PAGES.items() if shown[entry.about]}
    top = _top(page, listed, now_ms, signed_in=signed_in)
    error = tag("p", data["error"], class_="error", role="alert") if data.get("error") else None
    if page in _WITHOUT_LIST:
        title = _WITHOUT_LIST[page]
        home = next(iter(listed.values()), None)
        back = tag("p", tag("a", f"Go to {home.title}", href=home.address)) if home is not None else None
        return _document(page, title, _joined((tag("h1", title), error, back)), top=top)
    content = PAGES[page].body({"query": {}, **data}, now_ms)
    title = f"{_tab(data) if page == 'leaders' else ''}{PAGES[page].title}"
    return _document(page, title, _joined((error, content)), top=top)


def _document(page: str, title: str, body: Html, *, top: Html) -> bytes:
    scripts = sorted(name for name in static_files() if name.endswith(".js")) if page in PAGES else ()
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{title} \u00b7 pgleaderlock"),
        tag("link", rel="icon", href=_ICON),
        tag("link", rel="stylesheet", href="/static/style.css"),
        # Load the modules in parallel: without this, a browser finds a module's imports only after it has loaded it.
        *(tag("link", rel="modulepreload", href=f"/static/{name}") for name in scripts),
        tag("script", type="module", src="/static/app.js") if scripts else None,
    )
    skip = tag("a", "Skip to the content", class_="skip", href="#main")
    main = tag("main", body, id="main", tabindex="-1")
    whole = tag("html", head, tag("body", skip, top, main, data_page=page), lang="en")
    return f"<!doctype html>\n{whole}\n".encode()


def _top(page: str, listed: Mapping[str, Page], now_ms: int, *, signed_in: bool) -> Html:
    links = [
        tag("li", tag("a", entry.title, href=entry.address, aria_current="page" if name == page else None))
        for name, entry in listed.items()
    ]
    now = Row({"now_ms": now_ms}).show("time", "now_ms", "clock")
    mark = tag("p", "as of ", now, " UTC", id="live", class_="live", role="status")
    leave = tag("form", tag("button", "Sign out", class_="quiet"), method="post", action="/sign-out")
    home = next(iter(listed.values())).address if listed else "/"
    brand = tag("a", tag("span", class_="mark", aria_hidden="true"), "pgleaderlock", class_="brand", href=home)
    menu = tag("nav", tag("ul", *links), aria_label="Pages") if links else None
    header = tag("header", brand, menu, mark, leave if signed_in else None, class_="top")
    return _joined((header, tag("p", id="stale", class_="stale", role="alert", hidden=True)))


def _sign_in(error: str | None, to: str) -> Html:
    field = tag(
        "input",
        type="password",
        name="token",
        id="token",
        required=True,
        autofocus=True,
        autocomplete="current-password",
        aria_describedby="why" if error else "hint",
        aria_invalid="true" if error else None,
    )
    form = tag(
        "form",
        tag("label", "Token", for_="token"),
        field,
        tag("p", error, id="why", class_="error", role="alert") if error else None,
        tag("p", "One of the tokens in the server\u2019s token file.", id="hint", class_="hint"),
        tag("input", type="hidden", name="to", value=to) if to != "/" else None,
        tag("button", "Sign in"),
        method="post",
        action="/sign-in",
    )
    return tag("div", tag("h1", "pgleaderlock"), form, class_="sign-in")


@cache
def static_files() -> Mapping[str, tuple[bytes, bytes]]:
    """The files below `/static/`: content type and body by name."""
    found = {}
    for file in files("pgleaderlock.dashboard").joinpath("static").iterdir():
        content_type = _CONTENT_TYPES.get(file.name[file.name.rfind(".") :])
        if content_type is not None:
            found[file.name] = (content_type, file.read_bytes())
    return found
