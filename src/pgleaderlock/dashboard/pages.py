"""The dashboard's pages: whole HTML documents with their first data inside, useful without JavaScript.

    render(page, data, *, signed_in, locks, leaders) -> bytes

`data` is the reply of the API call that the page shows; "query", the fields of its own address; "error", a sentence
where there was no reply:

| page | address | reply of | fields of its query |
|---|---|---|---|
| `leaders` | `/` | `/v1/leaders` | `prefix`, `cursor` |
| `history` | `/history` | `/v1/leaders/{role}/terms` with a role, else `/v1/leaders` | `role`, `node`, `cursor` |
| `events` | `/events` | `/v1/events` | `role`, `node`, `cursor` |
| `locks` | `/locks` | `/v1/locks` | `prefix`, `cursor` |
| `nodes` | `/nodes` | `/v1/nodes` | `cursor` |
| `sign-in` | `/sign-in` | nothing | |
| `refused` | any | nothing: "error" says why | |

What the script does with a page afterwards is in `static/`: it asks the same API and builds the same rows.

Imports its own parts and the standard library. Must never ask anybody for anything, nor let a name become markup; no
script and no style stands in a page itself, so that its Content-Security-Policy can forbid both.
"""

import time
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from pgleaderlock.dashboard._page_html import Html, clock, tag
from pgleaderlock.dashboard._page_leaders import leaders_page
from pgleaderlock.dashboard._page_tables import events_page, history_page, locks_page, nodes_page

__all__ = ["render", "static_files"]

_CONTENT_TYPES = {".js": b"text/javascript; charset=utf-8", ".css": b"text/css; charset=utf-8"}
_ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E"
    "%3Crect width='16' height='16' rx='3' fill='%230b6b4f'/%3E"
    "%3Cpath d='M3 4h7v2H3zM6 7h7v2H6zM3 10h5v2H3z' fill='%23fff'/%3E%3C/svg%3E"
)

_Body = Callable[[Mapping[str, Any], int], Html]
# Page: its address, its name in the list of pages, whether it is about leaders or about locks, and what it shows.
_PAGES: dict[str, tuple[str, str, str, _Body]] = {
    "leaders": ("/", "Leaders", "leaders", leaders_page),
    "history": ("/history", "History", "leaders", history_page),
    "events": ("/events", "Events", "leaders", events_page),
    "nodes": ("/nodes", "Nodes", "leaders", nodes_page),
    "locks": ("/locks", "Locks", "locks", locks_page),
}


def render(page: str, data: Mapping[str, Any], *, signed_in: bool, locks: bool, leaders: bool) -> bytes:
    """The document, as UTF-8."""
    if page == "sign-in":
        return _document(page, "Sign in", _sign_in(data), top=Html(""))
    now_ms = data.get("now_ms") or int(time.time() * 1000)
    shown = {"leaders": leaders, "locks": locks}
    listed = [(name, *entry[:2]) for name, entry in _PAGES.items() if shown[entry[2]]]
    error = tag("p", data["error"], class_="error", role="alert") if data.get("error") else Html("")
    if page == "refused":
        content = Html(tag("h1", "Not for this token") + error)
        return _document(page, "Not for this token", content, top=_top(page, listed, now_ms, signed_in=signed_in))
    _, title, _, body = _PAGES[page]
    content = Html(error + body(data, now_ms))
    return _document(page, title, content, top=_top(page, listed, now_ms, signed_in=signed_in))


def _document(page: str, title: str, body: Html, *, top: Html) -> bytes:
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{title} \u00b7 pgleaderlock"),
        tag("link", rel="icon", href=_ICON),
        tag("link", rel="stylesheet", href="/static/style.css"),
        # Side by side instead of one after the other: a module names those that it needs only when it is there.
        *(
            tag("link", rel="modulepreload", href=f"/static/{name}")
            for name in sorted(static_files())
            if name.endswith(".js") and page in _PAGES
        ),
        tag("script", type="module", src="/static/app.js") if page in _PAGES else None,
    )
    skip = tag("a", "Skip to the content", class_="skip", href="#main")
    main = tag("main", body, id="main", tabindex="-1")
    whole = tag("html", head, tag("body", skip, top, main, data_page=page), lang="en")
    return f"<!doctype html>\n{whole}\n".encode()


def _top(page: str, listed: list[tuple[str, str, str]], now_ms: int, *, signed_in: bool) -> Html:
    links = [
        tag("li", tag("a", title, href=address, aria_current="page" if name == page else None))
        for name, address, title in listed
    ]
    mark = tag("p", "as of ", clock(now_ms), " UTC", id="live", class_="live", role="status")
    leave = tag("form", tag("button", "Sign out", class_="quiet"), method="post", action="/sign-out")
    home = listed[0][1] if listed else "/"
    brand = tag("a", tag("span", class_="mark", aria_hidden="true"), "pgleaderlock", class_="brand", href=home)
    pages = tag("nav", tag("ul", *links), aria_label="Pages") if links else None
    header = tag("header", brand, pages, mark, leave if signed_in else None, class_="top")
    return Html(header + tag("p", id="stale", class_="stale", role="alert", hidden=True))


def _sign_in(data: Mapping[str, Any]) -> Html:
    error = data.get("error")
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
    return tag(
        "div",
        tag("h1", "pgleaderlock"),
        tag(
            "form",
            tag("label", "Token", for_="token"),
            field,
            tag("p", error, id="why", class_="error", role="alert") if error else None,
            tag("p", "One of the tokens in the server\u2019s token file.", id="hint", class_="hint"),
            tag("button", "Sign in"),
            method="post",
            action="/sign-in",
        ),
        class_="sign-in",
    )


@cache
def static_files() -> Mapping[str, tuple[bytes, bytes]]:
    """What lies below `/static/`: content type and body of each file, by its name."""
    found = {}
    for file in files("pgleaderlock.dashboard").joinpath("static").iterdir():
        content_type = _CONTENT_TYPES.get(file.name[file.name.rfind(".") :])
        if content_type is not None:
            found[file.name] = (content_type, file.read_bytes())
    return found
