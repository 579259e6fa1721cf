"""The dashboard's pages in a real browser: alive, honest when they are not, and usable by whoever comes."""

import csv
import io
import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from support.browser import PATIENCE_MS, browsing, serious_findings, until, watched
from support.counts import count
from support.dashboard_names import DURATIONS, NASTY
from support.dashboard_stand_in import StandIn, event, incident, leader, lock, node, now_ms, slot, stand_in, term

PAGES = ("/", "/history", "/events", "/nodes", "/locks")
MINUTE_MS = 60_000
expect.set_options(timeout=PATIENCE_MS)

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as started:
        yield started


@pytest.fixture
def board() -> Iterator[StandIn]:
    """Two roles and two nodes, one failover, a few locks."""
    with stand_in() as running:
        now = now_ms()
        began = now - 59 * MINUTE_MS // 2  # half a minute from any words that a slow test could run into
        lost = began + 20 * MINUTE_MS
        running.leaders = [
            leader("mailer", "node-b", epoch=2, tenure_ms=now - lost - 2000),
            leader("cron", "node-a", epoch=1, tenure_ms=now - began),
        ]
        running.terms = {
            "mailer": [term(2, "node-b", lost + 2000, gap_ms=2000), term(1, "node-a", began, lost)],
            "cron": [term(1, "node-a", began)],
        }
        running.nodes = [node("node-a", 1, roles=1), node("node-b", 2, roles=1)]
        running.events = [event(2, "acquired", "mailer", "node-b", epoch=2), event(1, "lost", "mailer", "node-a")]
        running.locks = [lock("invoice/1", "worker-1", token=7, waiters=2), lock("invoice/2", None, token=3)]
        yield running


def live(page: Page) -> None:
    until(page, "document.body.dataset.live === 'live'")


def row_of(page: Page, role: str) -> Any:
    return page.get_by_role("row").filter(has=page.get_by_role("rowheader", name=role, exact=True))


def news(board: StandIn, *rows: dict[str, Any]) -> None:
    board.leaders = [*rows, *(old for old in board.leaders if old["role"] not in [row["role"] for row in rows])]
    board.tell("leaders", {"now_ms": now_ms(), "leaders": list(rows)})


# --- Alive


def test_a_failover_appears_without_a_reload(browser: Browser, board: StandIn) -> None:
    with watched(browser, board.url) as page:
        page.goto("/")
        live(page)
        page.evaluate("window.same = true")
        expect(page.locator("h1")).to_have_text("All 2 roles acting")
        row = row_of(page, "cron")
        expect(row.locator(".c-leader")).to_contain_text("node-a")
        expect(row.locator(".span[data-kind=gap]")).to_have_count(0)
        lost = now_ms() - 3000
        board.terms["cron"] = [term(1, "node-a", now_ms() - 30 * MINUTE_MS, lost)]
        news(board, leader("cron", None, last_change={"at_ms": lost, "kind": "lost", "reason": None}))
        expect(page.locator("h1")).to_have_text("1 of 2 roles not acting: nobody")
        expect(page.locator("#rows .row").first.locator(".c-role")).to_have_text("cron")
        expect(row.locator(".c-leader")).to_contain_text("nobody")
        expect(row.locator(".span[data-kind=gap]")).to_have_count(1)
        assert page.title().startswith("(1!)")
        began = now_ms()
        board.terms["cron"] = [term(2, "node-b", began, gap_ms=began - lost), *board.terms["cron"]]
        news(board, leader("cron", "node-b", epoch=2, tenure_ms=0))
        expect(page.locator("h1")).to_have_text("All 2 roles acting")
        expect(row.locator(".c-leader")).to_contain_text("node-b")
        expect(row.locator(".span[data-kind=gap]")).to_have_count(1)
        expect(row.locator(".span[data-kind=term]")).to_have_count(2)
        assert page.evaluate("window.same")


def test_roles_with_one_reason_have_one_line_of_advice_at_first_and_in_the_news(
    browser: Browser, board: StandIn
) -> None:
    lost = [leader(f"role-{number}", None) for number in range(7)]
    told: dict[str, Any] = {"why": "node-b was not heard in time", "command": "pgleaderlock nodes"}
    board.leaders = [*lost, leader("late", "node-b", heartbeat="late", **told)]
    board.terms = {row["role"]: [term(1, "node-a", now_ms() - MINUTE_MS)] for row in board.leaders}
    wanted = [
        "role-0, role-1, role-2, role-3, role-4 and 2 more" + lost[0]["why"] + lost[0]["command"],
        "late" + told["why"] + told["command"],
    ]
    with watched(browser, board.url, java_script_enabled=False) as page:
        page.goto("/")
        expect(page.locator("#remedies li")).to_have_text(wanted)
    with watched(browser, board.url) as page:
        page.goto("/")
        live(page)
        expect(page.locator("#remedies li")).to_have_text(wanted)
        news(board, {**lost[0], "command": "pgleaderlock drain --resume node-a"})
        said = lost[0]["why"]
        expect(page.locator("#remedies li")).to_have_text(
            [
                f"role-0{said}pgleaderlock drain --resume node-a",
                f"role-1, role-2, role-3, role-4, role-5 and 1 more{said}pgleaderlock nodes",
                wanted[1],
            ]
        )


def test_a_late_heartbeat_is_shown_as_one_and_its_role_moves_up(browser: Browser, board: StandIn) -> None:
    with watched(browser, board.url) as page:
        page.goto("/")
        live(page)
        late = leader("mailer", "node-b", epoch=2, heartbeat="late", heartbeat_age_ms=60_000, gate="shut")
        news(board, late)
        row = row_of(page, "mailer")
        expect(row.locator(".beat")).to_have_text(re.compile(r"1 min( \d+ s)? late"))
        expect(row.locator(".c-state")).to_contain_text("late heartbeat")
        expect(page.locator("#rows .row").first.locator(".c-role")).to_have_text("mailer")
        # From the last heartbeat on, nobody may act: that is drawn as a gap.
        expect(row.locator(".span[data-kind=gap]")).to_have_count(2)


def test_a_page_that_is_cut_off_says_since_when_and_recovers_by_itself(browser: Browser, board: StandIn) -> None:
    with watched(browser, board.url, may_fail=True) as page:
        page.goto("/")
        live(page)
        page.evaluate("window.same = true")
        board.cut()
        expect(page.locator("#stale")).to_have_text(re.compile(r"Stale since \d\d:\d\d:\d\d: "))
        expect(page.locator("#live")).to_have_text(re.compile(r"stale since \d\d:\d\d:\d\d"))
        board.leaders.append(leader("new-role", "node-a"))
        board.come_back()
        live(page)
        expect(page.locator("#stale")).to_be_hidden()
        board.tell("leaders", {"now_ms": now_ms(), "leaders": board.leaders})
        expect(page.locator("#rows")).to_contain_text("new-role")
        assert page.evaluate("window.same")


def test_a_database_that_is_away_is_told_apart_from_a_server_that_is(browser: Browser, board: StandIn) -> None:
    with watched(browser, board.url) as page:
        page.goto("/")
        live(page)
        board.tell("stale", {"since_ms": now_ms() - 90_000})
        expect(page.locator("#stale")).to_contain_text("the server cannot reach its database")
        tenure = row_of(page, "cron").locator(".c-tenure span")
        before = tenure.inner_text()
        board.tell("ping", {})  # the server still talks, and that is no news
        expect(page.locator("#stale")).to_be_visible()
        assert tenure.inner_text() == before
        board.tell("fresh", {"now_ms": now_ms()})
        live(page)
        expect(page.locator("#stale")).to_be_hidden()


def test_events_come_by_themselves_and_wait_while_the_list_is_paused(browser: Browser, board: StandIn) -> None:
    with watched(browser, board.url) as page:
        page.goto("/events")
        live(page)
        rows = page.locator("#events tbody tr")
        expect(rows).to_have_count(2)
        board.tell("event", event(4, "acquired", "cron", "node-b"), 4)
        expect(rows.first).to_contain_text("cron")
        board.tell("event", event(3, "lost", "cron", "node-a"), 3)  # committed later, and it happened before
        expect(rows.nth(1)).to_contain_text("lost")
        page.get_by_role("button", name="Pause").click()
        board.tell("event", event(5, "released", "cron", "node-b"), 5)
        expect(page.locator("#facts")).to_contain_text("1 more since you paused")
        expect(rows).to_have_count(4)
        page.get_by_role("button", name="Go on").click()
        expect(rows.first).to_contain_text("released")
        page.get_by_label("Node").fill("node-a")
        expect(rows).to_have_count(1)
        board.tell("event", event(6, "acquired", "cron", "node-b"), 6)
        board.tell("event", event(7, "acquired", "cron", "node-a"), 7)
        expect(rows.first).to_contain_text("acquired")
        expect(rows).to_have_count(2)


def test_the_nodes_follow_the_news(browser: Browser, board: StandIn) -> None:
    with watched(browser, board.url) as page:
        page.goto("/nodes")
        live(page)
        expect(page.locator("#nodes tbody tr")).to_have_count(2)
        told = [
            node("node-a", 1, roles=2),
            node("node-b", 2, state="silent", live=False),
            node("node-c", 3, state="ended", live=False),
            node("node-d", 4, state="draining", draining=True, roles=1),
            node("node-e", 5, state="drained", draining=True),
        ]
        board.tell("nodes", {"now_ms": now_ms(), "nodes": told})
        rows = page.locator("#nodes tbody tr")
        expect(rows).to_have_count(5)
        for row, state in enumerate(("silent", "ended", "alive", "draining", "drained")):
            expect(rows.nth(row)).to_contain_text(state)
        expect(page.locator("#facts")).to_have_text("3 live nodes, 1 draining, 1 drained, 1 silent, 1 ended")


# --- One markup for the first paint and the news

HOUR_MS = 60 * MINUTE_MS
# Nothing of these ages changes its words while a test lasts.
OLD_MS = 5 * HOUR_MS + MINUTE_MS // 2
ROWS = "#rows .row, .sheet:not([hidden]) tbody tr"
# What the script alone knows: colours of nodes, lengths of bars, places in the list, lanes; and the moments of ages,
# which a server that is asked twice gives twice.
SCRIPT_ALONE = """(rows) => [...rows].map((given) => {
    const row = given.cloneNode(true);
    for (const lane of row.querySelectorAll('.lane')) lane.replaceChildren();
    for (const each of [row, ...row.querySelectorAll('*')]) {
        for (const name of ['style', 'data-low', 'data-state', 'aria-rowindex']) each.removeAttribute(name);
        for (const name of ['data-age', 'data-ago', 'data-left']) {
            if (each.hasAttribute(name)) each.setAttribute(name, '');
        }
        if (each.matches('.node')) each.className = 'node';
    }
    const sorted = (element) => [...element.attributes].map(({ name, value }) => `${name}=${value}`).sort().join(' ');
    const plain = (node) => node.nodeType === Node.TEXT_NODE
        ? node.textContent : `<${node.nodeName} ${sorted(node)}>${[...node.childNodes].map(plain).join('')}</>`;
    return plain(row);
})"""
PAINTED = f"""() => fetch(location).then((answer) => answer.text()).then((html) =>
    ({SCRIPT_ALONE})(new DOMParser().parseFromString(html, 'text/html').querySelectorAll('{ROWS}')))"""


@pytest.mark.parametrize("path", ["/", "/history?role=mailer", "/events", "/nodes", "/locks"])
def test_a_row_is_the_same_whether_the_server_or_the_script_has_filled_it(
    browser: Browser, board: StandIn, path: str
) -> None:
    well = {"tenure_ms": OLD_MS, "heartbeat_age_ms": OLD_MS}
    board.leaders = [leader(name, name, namespace=name, epoch=place, **well) for place, name in enumerate(NASTY)]
    board.leaders += [
        leader("mailer", "node-b", **well, heartbeat="late", gate="shut"),
        leader("waits", "node-b", **well, gate="waiting", candidates=1234),
        leader("nobody", None, tenure_ms=OLD_MS),
        leader("never", None, last_change=None),
        leader(
            "after", "node-a", **well, last_change={"at_ms": now_ms() - OLD_MS, "kind": "acquired", "reason": "lost"}
        ),
    ]
    for row in board.leaders:  # an age of seconds would change between the two looks
        row["state_since_ms"] = now_ms() - OLD_MS
    board.terms |= {row["role"]: [] for row in board.leaders}
    lasts = term(1235, NASTY[4], now_ms() - OLD_MS, gap_ms=2000)
    board.terms["mailer"] = [lasts, *(term(place, name, 0, 90_061_500) for place, name in enumerate(NASTY))]
    board.nodes = [
        node(name, place, host=name, version=name, heartbeat_age_ms=OLD_MS) for place, name in enumerate(NASTY)
    ]
    board.nodes += [
        node("drains", 1001, state="draining", draining=True, roles=1234, heartbeat_age_ms=OLD_MS),
        node("drained", 1004, state="drained", draining=True, heartbeat_age_ms=OLD_MS),
        node("silent", 1002, state="silent", live=False, heartbeat_age_ms=OLD_MS),
        node("ended", 1005, state="ended", live=False, heartbeat_age_ms=OLD_MS),
        node("looks-on", 1003, candidate=False, heartbeat_age_ms=OLD_MS),
    ]
    board.events = [event(99 - place, "session_ended", name, name, detail=name) for place, name in enumerate(NASTY)]
    board.events.append(event(7, "drain_ended", None, None, epoch=None))
    board.locks = [lock(name, name, left_ms=OLD_MS, waiters=1234) for name in NASTY]
    board.locks += [lock("free", None), lock("ran-out", "worker", left_ms=-5000)]
    with watched(browser, board.url, viewport={"width": 1280, "height": 3000}) as page:
        page.goto(path)
        live(page)
        until(page, "document.getElementById('facts').textContent !== ''")
        painted = page.evaluate(PAINTED)
        assert len(painted) >= len(NASTY)
        assert page.evaluate(f"({SCRIPT_ALONE})(document.querySelectorAll('{ROWS}'))") == painted


SELECT = """(name) => {
    const found = [...document.querySelectorAll('#rows bdi, tbody bdi')].find((each) => each.textContent === name);
    getSelection().selectAllChildren(found);
    found.closest('a')?.focus();
}"""


@pytest.mark.parametrize(
    ("path", "name"), [("/", "cron"), ("/history", "cron"), ("/nodes", "node-a"), ("/locks", "two")]
)
def test_news_leave_the_focus_and_a_selection_where_they_are(
    browser: Browser, board: StandIn, path: str, name: str
) -> None:
    board.locks = [lock("two", "worker-1")]
    board.terms["cron"] = [term(1, "node-a", now_ms() - 25 * MINUTE_MS)]
    with watched(browser, board.url) as page:
        page.goto(path)
        live(page)
        until(page, "document.getElementById('facts').textContent !== ''")
        page.evaluate(SELECT, name)
        focused = page.evaluate("document.activeElement.tagName")
        # One row more, above all others; and on each of the others something else.
        board.terms["a-new"] = [term(9, "node-new", now_ms())]
        board.locks = [lock("a-new", "worker-2"), lock("two", "worker-2", waiters=4)]
        board.nodes = [node("a-new", 9, live=False), node("node-a", 1, roles=7), node("node-b", 2)]
        board.tell("nodes", {"now_ms": now_ms(), "nodes": board.nodes})
        news(board, leader("a-new", None), leader("cron", "node-b", epoch=2))
        until(page, "document.querySelector('#rows .row, tbody tr').textContent.includes('a-new')")
        assert page.evaluate("getSelection().toString()") == name
        assert (
            page.evaluate("document.activeElement.tagName") == focused == ("A" if path in ("/", "/history") else "BODY")
        )


def test_the_rows_of_the_first_paint_stay_until_there_is_something_newer(browser: Browser, board: StandIn) -> None:
    board.muted = True
    board.failing = ("/v1/",)
    with watched(browser, board.url, may_fail=True) as page:
        page.goto("/")
        until(page, "document.body.dataset.live === 'stale'")
        page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        expect(page.locator("#rows .row")).to_have_count(2)


# --- Whatever it is called, whoever looks


@pytest.mark.parametrize("path", PAGES)
def test_names_are_shown_as_text_and_break_nothing(browser: Browser, board: StandIn, path: str) -> None:
    board.leaders = [leader(name, name, namespace=name) for name in NASTY]
    board.terms = {name: [term(2, name, now_ms() - 60_000), term(1, "x", 0, now_ms() - 90_000)] for name in NASTY}
    board.nodes = [node(name, place, host=name, version=name) for place, name in enumerate(NASTY)]
    board.events = [event(9 - place, "lost", name, name, detail=name) for place, name in enumerate(NASTY)]
    board.locks = [lock(name, name) for name in NASTY]
    with watched(browser, board.url, viewport={"width": 360, "height": 3000}) as page:
        page.goto(path)
        live(page)
        # The list has come, and each name is somewhere in it, letter for letter.
        until(page, "document.getElementById('facts').textContent !== ''")
        names = page.evaluate("[...document.querySelectorAll('bdi')].map((name) => name.textContent)")
        assert set(NASTY) <= set(names)
        assert "taken" not in page.title()
        assert page.evaluate("document.querySelectorAll('main script, main img').length") == 0
        assert page.evaluate("document.scrollingElement.scrollWidth <= innerWidth")


def test_an_incident_leads_to_its_time_on_the_timeline(browser: Browser, board: StandIn) -> None:
    board.incidents = [incident(NASTY[0], *NASTY), incident("node-a", *(f"role-{number}" for number in range(40)))]
    with watched(browser, board.url, viewport={"width": 360, "height": 3000}) as page:
        page.goto("/incidents")
        expect(page.locator("#incidents tbody tr")).to_have_count(2)
        for width in (2560, 1280, 900, 700, 360):
            page.set_viewport_size({"width": width, "height": 800})
            until(page, f"innerWidth === {width} && document.scrollingElement.scrollWidth <= innerWidth")
        page.get_by_role("link", name="show").first.click()
        live(page)
        assert "from=" in page.url
        expect(page.get_by_role("button", name="Back to now")).to_be_enabled()


def test_slots_are_shown_as_text_and_lead_to_those_of_their_name(browser: Browser, board: StandIn) -> None:
    board.slots = [slot(name) for name in NASTY]
    with watched(browser, board.url, viewport={"width": 360, "height": 3000}) as page:
        page.goto("/slots")
        expect(page.locator("#slots tbody tr")).to_have_count(len(NASTY))
        expect(page.locator("#slots .node").first).to_have_class(re.compile(r"\bn\d"))
        for width in (2560, 1280, 900, 700, 360):
            page.set_viewport_size({"width": width, "height": 800})
            until(page, f"innerWidth === {width} && document.scrollingElement.scrollWidth <= innerWidth")
        page.locator("#slots tbody a").first.click()
        page.wait_for_url("**/slots?name=*")


def test_no_page_is_wider_than_its_window(browser: Browser, board: StandIn) -> None:
    with watched(browser, board.url) as page:
        for path in PAGES:
            page.goto(path)
            live(page)
            for width in (2560, 1280, 900, 700, 360):
                page.set_viewport_size({"width": width, "height": 800})
                until(page, f"innerWidth === {width} && document.scrollingElement.scrollWidth <= innerWidth")


def test_every_page_shows_its_figures_without_javascript(browser: Browser, board: StandIn) -> None:
    wanted = {
        "/": "node-b",
        "/history?role=mailer": "lost",
        "/events": "acquired",
        "/nodes": "host-1",
        "/locks": "invoice/1",
    }
    with watched(browser, board.url, java_script_enabled=False) as page:
        for path, text in wanted.items():
            page.goto(path)
            expect(page.locator("main")).to_contain_text(text)
        page.goto("/history")
        page.get_by_label("Role").fill("cron")
        page.get_by_role("button", name="Show").click()
        expect(page.locator("#terms tbody tr")).to_have_count(1)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser: Browser, board: StandIn, scheme: Any) -> None:
    board.leaders += [
        leader("nobody-leads", None),
        leader("late", "node-b", heartbeat="late", gate="shut"),
        leader("waits", "node-b", gate="waiting"),
    ]
    board.terms |= {role: [] for role in ("nobody-leads", "late", "waits")}
    board.signed_in = True
    with watched(browser, board.url, color_scheme=scheme, may_fail=True) as page:
        for path in PAGES:
            page.goto(path)
            live(page)
            until(page, "document.getElementById('facts').textContent !== ''")
            assert serious_findings(page) == [], path
        page.goto("/")
        live(page)
        board.cut()
        expect(page.locator("#stale")).to_be_visible()
        assert serious_findings(page) == [], "cut off"


# --- The timeline


def test_by_keyboard_one_learns_who_led_from_when_to_when_and_why_it_ended(browser: Browser, board: StandIn) -> None:
    with watched(browser, board.url) as page:
        page.goto("/")
        live(page)
        lane = row_of(page, "mailer").locator(".lane")
        expect(lane.locator(".span")).to_have_count(3)
        page.get_by_role("link", name="mailer", exact=True).last.focus()
        page.keyboard.press("Tab")
        focus = page.locator(":focus")
        expect(focus).to_have_accessible_name(re.compile(r"^node-b\. leads since .*, for 9 min .*\. epoch 2$"))
        page.keyboard.press("ArrowLeft")
        expect(focus).to_have_accessible_name(re.compile(r"^Nobody could act\. .* for 2\.0 s\. .*node-a, ended: lost$"))
        expect(page.locator(".tip")).to_contain_text("Nobody could act")
        page.keyboard.press("Home")
        expect(focus).to_have_accessible_name(
            re.compile(r"^node-a\. led .* to .*, for 20 min\. ended: lost\. epoch 1$")
        )
        expect(page.locator(".tip")).to_contain_text("ended: lost")
        page.keyboard.press("ArrowUp")
        expect(focus).to_have_accessible_name(re.compile(r"^node-a\. leads since"))
        page.keyboard.press("Escape")
        expect(page.locator(".tip")).to_be_hidden()


def test_a_gap_of_a_moment_is_seen_in_a_week(browser: Browser, board: StandIn) -> None:
    with watched(browser, board.url) as page:
        page.goto("/")
        live(page)
        page.get_by_role("button", name="7 d").click()
        gap = row_of(page, "mailer").locator(".span[data-kind=gap]")
        expect(gap).to_have_count(1)
        box = gap.bounding_box()
        assert box is not None
        assert box["width"] >= 4


def test_gaps_that_stand_together_are_drawn_by_what_they_are(browser: Browser, board: StandIn) -> None:
    """In a week an hour is a few pixels wide: hand-overs in it are not red, and losses as red as they lasted."""

    def hour(reason: str, gap_ms: int) -> list[dict[str, Any]]:
        began_ms, found = now_ms() - 30 * HOUR_MS, []
        for epoch in range(1, 13):
            ends_ms = began_ms + 5 * MINUTE_MS - gap_ms
            before_ms = gap_ms if epoch > 1 else None
            found.append(term(epoch, "node-a", began_ms, ends_ms, reason=reason, gap_ms=before_ms))
            began_ms = ends_ms + gap_ms
        return [term(13, "node-b", began_ms, gap_ms=gap_ms), *reversed(found)]

    board.leaders = [leader("handed-over", "node-b", epoch=13), leader("lost", "node-b", epoch=13)]
    board.terms = {"handed-over": hour("released", 50), "lost": hour("lost", 6000)}
    with watched(browser, board.url) as page:
        page.goto("/")
        live(page)
        page.get_by_role("button", name="7 d").click()
        handed, lost = (row_of(page, name).locator(".span[data-kind=gap]") for name in ("handed-over", "lost"))
        expect(handed).to_have_attribute("data-handover", "true")
        expect(handed).to_have_attribute("data-several", "true")
        expect(lost).to_have_attribute("data-handover", "false")
        share = float(lost.evaluate("(gap) => gap.style.getPropertyValue('--share')"))
        assert 0.01 < share < 0.03, "72 s of an hour"


def test_a_label_that_would_be_cut_is_left_out(browser: Browser, board: StandIn) -> None:
    name = "a-node-with-a-rather-long-name"
    board.leaders = [leader("cron", name, epoch=2)]
    board.terms = {
        "cron": [
            term(2, name, now_ms() - 58 * MINUTE_MS),
            term(1, name, now_ms() - 59 * MINUTE_MS, now_ms() - 58 * MINUTE_MS),
        ]
    }
    with watched(browser, board.url) as page:
        page.goto("/")
        live(page)
        labels = row_of(page, "cron").locator(".span[data-kind=term] bdi")
        expect(labels).to_have_count(2)
        expect(labels.nth(0)).to_be_hidden()
        expect(labels.nth(1)).to_be_visible()


def test_the_address_says_which_time_is_shown_and_a_button_leads_to_now(browser: Browser, board: StandIn) -> None:
    with watched(browser, board.url) as page:
        page.goto("/")
        live(page)
        page.get_by_role("button", name="Earlier").click()
        until(page, "location.search.includes('from=')")
        sent = page.url
        page.goto(sent)
        live(page)
        now = page.get_by_role("button", name="Back to now")
        expect(now).to_be_enabled()
        assert page.url == sent
        now.click()
        expect(now).to_be_disabled()
        until(page, "location.search === ''")


def test_a_drag_zooms_in_and_a_button_leads_back(browser: Browser, board: StandIn) -> None:
    with watched(browser, board.url) as page:
        page.goto("/")
        live(page)
        spans = row_of(page, "mailer").locator(".span[data-kind=term]")
        expect(spans).to_have_count(2)
        box = row_of(page, "mailer").locator(".lane").bounding_box()
        assert box is not None
        y = box["y"] + box["height"] / 2
        page.mouse.move(box["x"] + 0.9 * box["width"], y)
        page.mouse.down()
        page.mouse.move(box["x"] + 0.98 * box["width"], y, steps=4)
        expect(page.locator(".band")).to_be_visible()
        page.mouse.up()
        expect(spans).to_have_count(1)  # the last minutes, of node-b alone
        expect(page.get_by_role("button", name="1 h")).to_have_attribute("aria-pressed", "false")
        page.get_by_role("button", name="1 h").click()
        expect(spans).to_have_count(2)


def test_what_is_not_looked_at_is_neither_built_nor_asked_for(browser: Browser, board: StandIn) -> None:
    roles = count(1000, 5000)
    board.leaders = [leader(f"role-{place:05}", f"node-{place % 9}") for place in range(roles)]
    board.terms = {row["role"]: [term(1, row["leader"], now_ms() - 60_000)] for row in board.leaders}
    with watched(browser, board.url, viewport={"width": 1280, "height": 900}) as page:
        page.goto("/")
        live(page)
        expect(page.locator("h1")).to_have_text(re.compile(r"All \d\u202f000 roles acting"))
        built = page.locator("#rows .row")
        assert built.count() < 60
        last = f"role-{roles - 1:05}"
        page.evaluate("scrollTo(0, document.body.scrollHeight)")
        expect(page.locator("#rows .row").last).to_contain_text(last)
        expect(row_of(page, last).locator(".span")).to_have_count(1)
        assert built.count() < 60
        assert len([path for path in board.asked if "/terms" in path]) < 120
        page.get_by_label("Find a role or a leader").fill("role-00500")
        expect(built).to_have_count(1)


# --- History and locks


def test_the_history_is_filtered_and_saved_as_a_file(browser: Browser, board: StandIn) -> None:
    formula = "=cmd|' /C calc'!A0"
    board.leaders.append(leader(formula, 'node, "b"'))
    board.terms[formula] = [term(1, 'node, "b"', 1_800_000_000_000, 1_800_000_061_500, reason="evicted")]
    with watched(browser, board.url) as page:
        page.goto("/history")
        live(page)
        rows = page.locator("#terms tbody tr")
        expect(rows).to_have_count(4)
        expect(page.locator("#facts")).to_contain_text("nobody could act: median 2.0 s, longest 2.0 s")
        page.get_by_label("Node").fill("node-a")
        expect(rows).to_have_count(2)
        page.get_by_label("Node").fill("")
        page.get_by_label("Role").fill(formula)
        expect(rows).to_have_count(1)
        with page.expect_download() as download:
            page.get_by_role("button", name="CSV").click()
        saved = download.value.path().read_bytes().decode()
        assert list(csv.reader(io.StringIO(saved, newline=""))) == [
            ["role", "epoch", "node_id", "began", "ended", "lasted_ms", "reason", "gap_ms"],
            [
                f"'{formula}",
                "1",
                'node, "b"',
                "2027-01-15T08:00:00.000Z",
                "2027-01-15T08:01:01.500Z",
                "61500",
                "evicted",
                "",
            ],
        ]


@pytest.mark.parametrize("path", ["/history", "/events"])
def test_the_address_says_of_which_time_a_list_is(browser: Browser, board: StandIn, path: str) -> None:
    old_ms = 1_800_000_000_000  # 2027-01-15T08:00Z
    board.terms["cron"] = [
        term(2, "node-b", old_ms + 60_000, old_ms + 120_000, reason="lost"),
        term(1, "node-a", old_ms, old_ms + 30_000, reason="lost"),
    ]
    board.events = [event(12, "lost", "cron", "node-b"), event(11, "lost", "cron", "node-a")]
    for row, at_ms in zip(board.events, (old_ms + 60_000, old_ms), strict=True):
        row["at_ms"] = at_ms
    with watched(browser, board.url) as page:
        page.goto(f"{path}?role=cron&from=2027-01-15T07:59Z&to=2027-01-15T08:00:45Z")
        live(page)
        rows = page.locator(f"#{'terms' if path == '/history' else 'events'} tbody tr")
        expect(rows).to_have_count(1)
        expect(rows).to_contain_text("node-a")
        page.get_by_label("To").fill("2027-01-15 08:0")  # not a moment yet: all that comes after From
        expect(rows).to_have_count(2)
        page.get_by_label("From").fill("2027-01-15T08:00:45")
        expect(rows).to_have_count(1)
        expect(rows).to_contain_text("node-b")
        page.wait_for_url("**from=2027-01-15T08%3A00%3A45**")


def test_locks_are_shown_page_by_page_with_the_time_they_have_left(browser: Browser, board: StandIn) -> None:
    board.locks = [lock(f"lock-{place:03}", "worker", token=place, left_ms=20_000_000) for place in range(120)]
    board.locks[60] |= {"waiters": 3}
    with watched(browser, board.url) as page:
        page.goto("/locks")
        live(page)
        rows = page.locator("#locks tbody tr")
        expect(rows).to_have_count(50)
        expect(rows.first.locator(".left")).to_contain_text("5 h 33 min")
        page.get_by_role("button", name="Next page").click()
        expect(rows.first).to_contain_text("lock-050")
        expect(rows.nth(10).locator("td").last).to_have_text("3")
        page.get_by_role("button", name="Page before").click()
        expect(rows.first).to_contain_text("lock-000")
        page.get_by_label("Locks that begin with").fill("lock-11")
        expect(rows).to_have_count(10)
        board.locks[110] |= {"held": False, "owner_id": None, "lease_expiry_ms": None}
        expect(rows.first).to_contain_text("free")


def test_the_scripts_say_durations_in_the_same_words_as_the_server(browser: Browser, board: StandIn) -> None:
    with watched(browser, board.url) as page:
        page.goto("/nodes")
        script = "(list) => import('/static/core.js').then((core) => list.map(core.duration))"
        assert page.evaluate(script, [ms for ms, _ in DURATIONS]) == [words for _, words in DURATIONS]
