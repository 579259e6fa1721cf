"""The dashboard's pages as the server makes them: names stay text, and what is wrong comes first."""

import re
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from typing import Any

import pytest

from pgleaderlock.dashboard.pages import ago, duration, render, static_files
from support.dashboard_names import DURATIONS, NASTY
from support.dashboard_stand_in import event, leader, lock, node, term

NOW_MS = 1_800_000_000_000


class Parsed(HTMLParser):
    """The elements of a page, each with its attributes, and its texts."""

    def __init__(self, html: bytes) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.titles: list[str] = []
        self.feed(html.decode())

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attributes)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)

    def all(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for element, attributes in self.elements if element == name]


def shown(page: str, data: Mapping[str, Any], **flags: bool) -> Parsed:
    flags = {"signed_in": False, "locks": True, "leaders": True, **flags}
    return Parsed(render(page, {"now_ms": NOW_MS, "query": {}, "next_cursor": None, **data}, **flags))


def pages_full_of(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every page, with this name wherever a name can stand."""
    query = {"prefix": name, "role": name, "node": name}
    more = {"query": query, "next_cursor": name}
    yield "leaders", {"leaders": [leader(name, name, namespace=name), leader(name + "2", None)], **more}
    yield "history", {"role": name, "terms": [term(1, name, NOW_MS - 5000, NOW_MS)], **more}
    yield "history", {"leaders": [leader(name, name)], "query": {}}
    yield "events", {"events": [event(1, "lost", name, name, detail=name)], **more}
    yield "nodes", {"nodes": [node(name, host=name, version=name)]}
    yield "locks", {"locks": [lock(name, name)], **more}
    yield "sign-in", {"error": name}
    yield "leaders", {"leaders": [], "error": name}


def test_a_name_is_shown_as_text_wherever_it_stands() -> None:
    for name in NASTY:
        for page, data in pages_full_of(name):
            seen = shown(page, data)
            plain = shown(
                page,
                next(other for known, other in pages_full_of("plain") if known == page and set(other) == set(data)),
            )
            assert any(name in text for text in seen.texts), (page, name)
            # Not one element more, and no attribute, than for a name without any meaning to HTML.
            assert [(kind, sorted(given)) for kind, given in seen.elements] == [
                (kind, sorted(given)) for kind, given in plain.elements
            ], (page, name)


def test_a_name_of_another_direction_of_writing_keeps_it_to_itself() -> None:
    for page, data in pages_full_of("\u202eevil"):
        html = render(page, {"now_ms": NOW_MS, **data}, signed_in=False, locks=True, leaders=True).decode()
        alone = re.sub(r"<bdi[^>]*>.*?</bdi>|<[^>]*>", "", html)
        if page != "sign-in" and "error" not in data:
            assert "\u202e" not in alone, page


def test_no_page_has_a_script_or_a_style_or_an_address_of_its_own() -> None:
    for page, data in pages_full_of("plain"):
        seen = shown(page, data, signed_in=True)
        assert [given for given in seen.all("script") if not (given.get("src") or "").startswith("/static/")] == []
        assert seen.all("style") == []
        for _, given in seen.elements:
            assert not [name for name in given if name == "style" or name.startswith("on")]
            for name in ("href", "src", "action"):
                assert re.match(r"/(?!/)|#|data:image/|$", given.get(name) or ""), given


def test_the_scripts_name_no_other_server_and_never_make_markup_of_text() -> None:
    assert {"app.js", "style.css"} <= set(static_files())
    for name, (content_type, body) in static_files().items():
        text = body.decode()
        assert content_type == (
            b"text/css; charset=utf-8" if name.endswith("css") else b"text/javascript; charset=utf-8"
        )
        assert not re.search(r"https?://|//[a-z]+\.[a-z]|@import|url\(", text), name
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser", text
        ), name


def test_what_is_wrong_comes_first() -> None:
    rows = [
        leader("a-well", "n1"),
        leader("b-waits", "n1", state="waiting"),
        leader("c-late", "n1", heartbeat="late"),
        leader("d-nobody", None),
        leader("e-nobody", None),
    ]
    seen = shown("leaders", {"leaders": rows})
    assert [given["title"] for given in seen.all("bdi") if re.match(r"[a-e]-", given.get("title") or "")] == [
        "d-nobody", "e-nobody", "c-late", "b-waits",
        "d-nobody", "e-nobody", "c-late", "b-waits", "a-well",
    ], "in the list of remedies, and in the rows"  # fmt: skip
    assert "4 of 5 roles not acting: 2 nobody · 1 late heartbeat · 1 waiting" in seen.texts
    assert [given["class"] for given in seen.all("h1")] == ["bad"]


@pytest.mark.parametrize(
    ("rows", "sentence", "mood"),
    [
        ([], "No roles", "none"),
        ([leader("a", "n")], "The one role is acting", "well"),
        ([leader("a", "n"), leader("b", "n")], "All 2 roles acting", "well"),
        ([leader("a", "n", heartbeat="late")], "The one role is not acting: late heartbeat", "late"),
        ([leader("a", None), leader("b", "n")], "1 of 2 roles not acting: nobody", "bad"),
    ],
)
def test_the_page_begins_with_what_it_comes_to(rows: list[dict[str, Any]], sentence: str, mood: str) -> None:
    seen = shown("leaders", {"leaders": rows})
    assert sentence in seen.texts
    assert seen.all("h1")[0]["class"] == mood


def test_a_part_of_the_roles_is_not_taken_for_all_of_them() -> None:
    rows = [leader("a", "n"), leader("b", "n")]
    assert "All 2 roles on this page acting" in shown("leaders", {"leaders": rows, "next_cursor": "b"}).texts
    assert "All 2 roles on this page acting" in shown("leaders", {"leaders": rows, "query": {"prefix": "a"}}).texts


@pytest.mark.parametrize(
    ("locks", "leaders", "wanted"),
    [
        (True, True, ["Leaders", "History", "Events", "Incidents", "Slots", "Nodes", "Locks"]),
        (False, True, ["Leaders", "History", "Events", "Incidents", "Slots", "Nodes"]),
        (True, False, ["Locks"]),
    ],
)
def test_only_pages_that_the_server_has_are_offered(locks: bool, leaders: bool, wanted: list[str]) -> None:
    page = "leaders" if leaders else "locks"
    html = render(page, {"now_ms": NOW_MS}, signed_in=False, locks=locks, leaders=leaders).decode()
    assert re.findall(r"<li><a [^>]*>(\w+)</a>", html) == wanted


def test_signing_out_is_offered_to_whoever_has_signed_in() -> None:
    for signed_in in (True, False):
        forms = shown("nodes", {"nodes": []}, signed_in=signed_in).all("form")
        assert [form for form in forms if form.get("action") == "/sign-out"] == (
            [{"method": "post", "action": "/sign-out"}] if signed_in else []
        )


@pytest.mark.parametrize("page", ["leaders", "history", "events", "nodes", "locks"])
def test_an_empty_page_says_what_to_do_next(page: str) -> None:
    html = render(page, {"now_ms": NOW_MS}, signed_in=False, locks=True, leaders=True).decode()
    (said,) = re.findall(r'<p id="nothing"[^>]*>(.*?)</p>', html)
    assert "pgleaderlock" in said or "--namespace" in said
    if page != "nodes":
        field = "prefix" if page in ("leaders", "locks") else "node"
        data = {"now_ms": NOW_MS, "query": {field: "x"}}
        html = render(page, data, signed_in=False, locks=True, leaders=True).decode()
        (said,) = re.findall(r'<p id="nothing"[^>]*>(.*?)</p>', html)
        assert "to see all." in said


def test_the_sign_in_page_sends_the_token_in_a_body_and_says_what_was_wrong() -> None:
    seen = shown("sign-in", {"error": "This token is unknown here."})
    assert {"method": "post", "action": "/sign-in"} in seen.all("form")
    assert [given["name"] for given in seen.all("input")] == ["token"]
    assert "This token is unknown here." in seen.texts
    assert seen.all("script") == []


@pytest.mark.parametrize(
    ("page", "data", "address"),
    [
        ("leaders", {"leaders": [leader("a b", "n")], "next_cursor": "a&b"}, "/?prefix=&cursor=a%26b"),
        ("locks", {"locks": [], "next_cursor": "x", "query": {"prefix": "a/"}}, "/locks?prefix=a%2F&cursor=x"),
        ("events", {"events": [], "next_cursor": "7", "query": {"node": "n"}}, "/events?node=n&cursor=7"),
        ("history", {"role": "r", "terms": [], "next_cursor": "3", "query": {"role": "r"}}, "/history?role=r&cursor=3"),
        ("nodes", {"nodes": [], "next_cursor": "4.n"}, "/nodes?cursor=4.n"),
    ],
)
def test_a_list_that_goes_on_says_where(page: str, data: dict[str, Any], address: str) -> None:
    assert address in [given.get("href") for given in shown(page, data).all("a")]


def test_the_id_of_a_lease_is_never_shown() -> None:
    row = {**lock("l", "o"), "lease_id": "secret-lease"}
    assert "secret-lease" not in shown("locks", {"locks": [row]}).text


def test_a_page_that_could_not_be_filled_says_why() -> None:
    for page, name in (("leaders", "leaders"), ("events", "events"), ("nodes", "nodes"), ("locks", "locks")):
        seen = shown(page, {name: [], "error": "the database cannot be reached"})
        assert "the database cannot be reached" in seen.texts, page


@pytest.mark.parametrize("page", ["leaders", "history", "events", "nodes", "locks"])
def test_a_page_says_that_there_is_nothing_only_where_it_knows(page: str) -> None:
    empty, seen = shown(page, {}), shown(page, {"error": "the database cannot be reached"})
    hidden = ["hidden" in given for each in (empty, seen) for given in each.all("p") if given.get("id") == "nothing"]
    assert hidden == [False, True]
    if page == "leaders":
        assert "No roles" not in seen.texts
        assert ("Who leads is not known" in seen.texts, seen.all("h1")[0]["class"]) == (True, "bad")


def test_who_may_see_nothing_is_told_why_and_can_leave() -> None:
    seen = shown("refused", {"error": "This token is limited."}, signed_in=True, locks=False, leaders=False)
    assert "This token is limited." in seen.texts
    assert {"method": "post", "action": "/sign-out"} in seen.all("form")
    assert seen.all("script") == []


def test_times_are_utc_and_say_so() -> None:
    seen = shown(
        "history", {"role": "r", "terms": [term(1, "n", 1_800_000_000_000, 1_800_000_061_500)], "query": {"role": "r"}}
    )
    assert [given.get("datetime") for given in seen.all("time")][-2:] == [
        "2027-01-15T08:00:00.000Z",
        "2027-01-15T08:01:01.500Z",
    ]
    assert "1 min 1 s" in seen.texts
    assert "Times are UTC." in seen.texts


@pytest.mark.parametrize(("ms", "words"), DURATIONS)
def test_a_duration_is_said_as_one_says_it(ms: float | None, words: str) -> None:
    assert duration(ms) == words


def test_how_long_ago_is_said_roughly() -> None:
    assert ago(NOW_MS - 3_725_000, NOW_MS) == "1 h ago"
    assert ago(None, NOW_MS) == "\u2013"
