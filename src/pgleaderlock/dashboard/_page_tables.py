"""The pages that are tables: history, events, nodes, locks. Each with its form, and a link to what is older or further.

Imports `_page_html`. Must never show a lease's id: whoever has it can act as the holder.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode

from pgleaderlock.dashboard._page_html import Html, duration, get, isolated, moment, number, tag

__all__ = ["events_page", "history_page", "locks_page", "nodes_page"]

Rows = Sequence[Mapping[str, Any]]
# Column: class (which also makes it a number or a name), heading.
Columns = Sequence[tuple[str, str]]

_HISTORY: Columns = (
    ("name role", "Role"),
    ("num", "Epoch"),
    ("name node", "Node"),
    ("when", "Began"),
    ("when", "Ended"),
    ("num", "Lasted"),
    ("why", "Why it ended"),
    ("num", "Nobody led before"),
)
_CHANGES: Columns = (
    ("name role", "Role"),
    ("name node", "Leader"),
    ("num", "Epoch"),
    ("why", "Last change"),
    ("when", "At"),
)
_EVENTS: Columns = (
    ("when", "At"),
    ("why", "What"),
    ("name role", "Role"),
    ("name node", "Node"),
    ("num", "Epoch"),
    ("detail", "Detail"),
)
_NODES: Columns = (
    ("name node", "Node"),
    ("why", "State"),
    ("num", "Leads"),
    ("num", "Heartbeat"),
    ("name", "Host"),
    ("name", "Version"),
    ("when", "Up since"),
)
_LOCKS: Columns = (
    ("name lock", "Lock"),
    ("name owner", "Owner"),
    ("num", "Token"),
    ("left", "Time left"),
    ("num", "Waiting"),
)


# --- History


def history_page(data: Mapping[str, Any], now_ms: int) -> Html:
    query = data.get("query") or {}
    role, node = query.get("role") or data.get("role"), query.get("node") or ""
    form = _form(
        "/history",
        ("role", "Role", role or "", "list-of-roles"),
        ("node", "Node", node, "list-of-nodes"),
    )
    if "terms" in data and role:
        terms = [term for term in data["terms"] if node in ("", term.get("node_id"))]
        table = _table("terms", _HISTORY, (_term(role, term, now_ms) for term in terms))
        older = _more(data, "/history", "Older terms", {"role": role, "node": node})
    else:
        changed = sorted(data.get("leaders", ()), key=lambda row: -(get(row, "last_change", "at_ms") or 0))
        table = _table("terms", _CHANGES, (_changed(row) for row in changed))
        older = None
    tools = tag("button", "CSV", type="button", id="csv", hidden=True, title="What is shown, as a file")
    return _page(data, "History and failovers", form, table, older, tools=tools, nothing="No term here.")


def _term(role: str, term: Mapping[str, Any], now_ms: int) -> Iterable[object]:
    began_ms, ended_ms = term.get("began_ms"), term.get("ended_ms")
    yield _role(role)
    yield number(term.get("epoch"))
    yield _node(term.get("node_id"))
    yield moment(began_ms)
    yield tag("span", "leads", class_="leads") if ended_ms is None else moment(ended_ms)
    yield duration((ended_ms or now_ms) - began_ms) if began_ms is not None else None
    yield _badge(term.get("reason")) if ended_ms is not None else None
    yield duration(term["gap_ms"]) if term.get("gap_ms") is not None else None


def _changed(row: Mapping[str, Any]) -> Iterable[object]:
    change = row.get("last_change") or {}
    yield _role(row.get("role"))
    yield _node(row.get("leader")) if row.get("leader") is not None else tag("strong", "nobody", class_="nobody")
    yield number(row.get("epoch"))
    yield _badge(change.get("kind"))
    yield moment(change.get("at_ms"))


# --- Events


def events_page(data: Mapping[str, Any], _now_ms: int) -> Html:
    query = data.get("query") or {}
    role, node = query.get("role") or "", query.get("node") or ""
    form = _form("/events", ("role", "Role", role, "list-of-roles"), ("node", "Node", node, "list-of-nodes"))
    table = _table("events", _EVENTS, (_event(event) for event in data.get("events", ())))
    older = _more(data, "/events", "Older events", {"role": role, "node": node})
    pause = tag("button", "Pause", type="button", id="pause", aria_pressed="false", hidden=True)
    return _page(data, "Events", form, table, older, tools=pause, nothing="Nothing has happened here.")


def _event(event: Mapping[str, Any]) -> Iterable[object]:
    yield moment(event.get("at_ms"))
    yield _badge(event.get("kind"))
    yield _role(event["role"]) if event.get("role") is not None else None
    yield _node(event["node_id"]) if event.get("node_id") is not None else None
    yield number(event["epoch"]) if event.get("epoch") is not None else None
    yield tag("bdi", event["detail"]) if event.get("detail") is not None else None


# --- Nodes


def nodes_page(data: Mapping[str, Any], _now_ms: int) -> Html:
    nodes: Rows = data.get("nodes", ())
    table = _table("nodes", _NODES, (_node_row(node) for node in nodes))
    further = _more(data, "/nodes", "Further nodes", {})
    return _page(data, "Nodes", None, table, further, nothing="No node has been heard.")


def _node_row(node: Mapping[str, Any]) -> Iterable[object]:
    yield _node(node.get("node_id"))
    yield _badge(node_state(node))
    yield number(node.get("roles"))
    yield duration(node.get("heartbeat_age_ms"))
    yield isolated(node.get("host"))
    yield isolated(node.get("version"))
    yield moment(node.get("started_ms"))


def node_state(node: Mapping[str, Any]) -> str:
    if not node.get("live"):
        return "silent"
    if node.get("draining"):
        return "draining"
    return "live" if node.get("candidate", True) else "looks on"


# --- Locks


def locks_page(data: Mapping[str, Any], now_ms: int) -> Html:
    prefix = get(data, "query", "prefix") or ""
    form = _form("/locks", ("prefix", "Locks that begin with", prefix, None))
    table = _table("locks", _LOCKS, (_lock(lock, now_ms) for lock in data.get("locks", ())))
    further = _more(data, "/locks", "Further locks", {"prefix": prefix})
    return _page(data, "Locks", form, table, further, nothing="No lock here.")


def _lock(lock: Mapping[str, Any], now_ms: int) -> Iterable[object]:
    yield isolated(lock.get("lock_name"))
    yield isolated(lock["owner_id"]) if lock.get("owner_id") is not None else tag("span", "free", class_="free")
    yield number(lock.get("fencing_token"))
    expiry_ms = lock.get("lease_expiry_ms") if lock.get("held") else None
    yield duration(expiry_ms - now_ms) if expiry_ms is not None else None
    yield number(lock["waiters"]) if lock.get("waiters") else None


# --- What they share


def _page(
    data: Mapping[str, Any],
    title: str,
    form: Html | None,
    table: Html,
    more: Html | None,
    *,
    nothing: str,
    tools: Html | None = None,
) -> Html:
    # Beside an error "nothing" would be taken for what there is.
    empty = "<tbody></tbody>" in table and not data.get("error")
    parts = (
        tag("h1", title, id="state"),
        tag("p", id="facts", class_="facts"),
        tag("div", form, tools, class_="tools") if form or tools else None,
        table,
        tag("p", nothing, id="nothing", class_="nothing", hidden=not empty),
        more,
        tag("p", "Times are UTC.", id="times"),
    )
    return Html("".join(part for part in parts if part))


def _form(action: str, *fields: tuple[str, str, str, str | None]) -> Html:
    shown = [
        tag("label", label, for_=f"find-{name}")
        + tag(
            "input",
            type="search",
            id=f"find-{name}",
            name=name,
            value=value,
            list=listed,
            autocomplete="off",
            spellcheck="false",
        )
        + (tag("datalist", id=listed) if listed else "")
        for name, label, value, listed in fields
    ]
    return tag(
        "form", *map(Html, shown), tag("button", "Show"), id="finding", method="get", action=action, role="search"
    )


def _table(name: str, columns: Columns, rows: Iterable[Iterable[object]]) -> Html:
    head = tag("thead", tag("tr", *(tag("th", heading, scope="col", class_=kind) for kind, heading in columns)))
    body = tag(
        "tbody",
        *(
            tag(
                "tr",
                *(
                    tag("td", cell, class_=kind, data_label=heading)
                    for (kind, heading), cell in zip(columns, cells, strict=True)
                ),
            )
            for cells in rows
        ),
    )
    # A table that is wider than the screen scrolls by itself, also by keyboard.
    return tag("div", tag("table", head, body, id=name), class_="sheet")


def _more(data: Mapping[str, Any], address: str, text: str, query: Mapping[str, str]) -> Html | None:
    cursor = data.get("next_cursor")
    if cursor is None:
        return None
    given = urlencode({**{name: value for name, value in query.items() if value}, "cursor": cursor})
    return tag("p", tag("a", text, href=f"{address}?{given}"), id="more", class_="more")


def _role(role: object) -> Html:
    return tag("a", isolated(role), href=f"/history?role={quote(str(role), safe='')}")


def _node(node: object) -> Html:
    return tag("span", tag("i", class_="chip"), isolated(node), class_="node")


def _badge(word: object) -> Html | None:
    return None if word is None else tag("span", str(word).replace("_", " "), class_="badge", data_kind=word)
