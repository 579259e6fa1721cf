"""The dashboard's pages in a real browser when answers are slow, old, refused or missing: nothing is shown as truth."""

import csv
import io
import re
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from support.browser import PATIENCE_MS, browsing, until, watched
from support.dashboard_stand_in import StandIn, event, leader, lock, node, now_ms, stand_in, term

MINUTE_MS = 60_000
expect.set_options(timeout=PATIENCE_MS)

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as started:
        yield started


@pytest.fixture
def board() -> Iterator[StandIn]:
    """One role that is led, and what belongs to it."""
    with stand_in() as running:
        running.leaders = [leader("cron", "node-a", tenure_ms=30 * MINUTE_MS)]
        running.terms = {"cron": [term(1, "node-a", now_ms() - 30 * MINUTE_MS)]}
        running.nodes = [node("node-a", 1, roles=1)]
        running.events = [event(1, "acquired", "cron", "node-a")]
        running.locks = [lock("first", "worker-1")]
        yield running


def live(page: Page) -> None:
    until(page, "document.body.dataset.live === 'live'")


class Held:
    """Answers that the server has given, and that are on their way until they are let go."""

    def __init__(self, page: Page, pattern: str) -> None:
        self._page = page
        self._open = False
        self._routes: list[Callable[[], None]] = []
        page.route(pattern, self._hold)

    def _hold(self, route: Route) -> None:
        if self._open or "event-stream" in route.request.headers.get("accept", ""):
            route.continue_()
            return
        answer = route.fetch()
        self._routes.append(lambda: route.fulfill(response=answer))

    def until_asked(self) -> None:
        for _ in range(PATIENCE_MS // 10):
            if self._routes:
                return
            self._page.wait_for_timeout(10)  # lets playwright hear about the request
        raise AssertionError("nothing was asked")

    @property
    def asked(self) -> int:
        return len(self._routes)

    def let_go(self) -> None:
        routes, self._routes = self._routes, []
        for go in routes:
            go()

    def let_everything_go(self) -> None:
        self._open = True
        self.let_go()


# --- Old answers


def test_an_old_answer_does_not_undo_newer_news(browser: Browser, board: StandIn) -> None:
    with watched(browser, board.url) as page:
        held = Held(page, "**/v1/leaders?*")
        page.goto("/")
        live(page)
        held.until_asked()
        page.wait_for_timeout(5)  # the news are of a later millisecond
        board.leaders = [leader("cron", "node-b", epoch=2), leader("new", "node-b")]
        board.terms["new"] = []
        board.nodes = [node("node-b", 2, roles=2)]
        board.tell("leaders", {"now_ms": now_ms(), "leaders": board.leaders})
        cron = page.locator("#rows .row").filter(has_text="cron").locator(".c-leader")
        expect(cron).to_contain_text("node-b")
        with page.expect_response("**/v1/nodes?*"):
            held.let_everything_go()
        page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        expect(cron).to_contain_text("node-b")
        expect(page.locator("#rows .row")).to_have_count(2)


def test_an_old_answer_does_not_undo_newer_news_of_the_nodes(browser: Browser, board: StandIn) -> None:
    with watched(browser, board.url) as page:
        held = Held(page, "**/v1/nodes")
        page.goto("/nodes")
        live(page)
        held.until_asked()
        page.wait_for_timeout(5)  # the news are of a later millisecond
        board.tell("nodes", {"now_ms": now_ms(), "nodes": [node("node-a", 1, live=False)]})
        expect(page.locator("#facts")).to_have_text("0 live nodes, 1 silent")
        with page.expect_response("**/v1/nodes"):
            held.let_everything_go()
        page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        expect(page.locator("#facts")).to_have_text("0 live nodes, 1 silent")


def test_a_role_that_is_gone_leaves_when_everything_is_loaded_again(browser: Browser, board: StandIn) -> None:
    board.leaders.append(leader("gone", "node-a"))
    board.terms["gone"] = []
    with watched(browser, board.url) as page:
        page.goto("/")
        live(page)
        expect(page.locator("#rows .row")).to_have_count(2)
        board.leaders.pop()
        board.tell("reload", {})
        expect(page.locator("#rows .row")).to_have_count(1)


def test_an_event_that_comes_while_the_list_is_loaded_is_not_lost(browser: Browser, board: StandIn) -> None:
    with watched(browser, board.url) as page:
        held = Held(page, "**/v1/events?*")
        page.goto("/events")
        live(page)
        held.until_asked()
        rows = page.locator("#events tbody tr")
        board.tell("event", event(2, "lost", "cron", "node-a"), 2)
        expect(rows).to_have_count(2)
        page.evaluate("document.querySelector('#events tbody tr:last-child').dataset.old = 'yes'")
        held.let_everything_go()
        expect(page.locator("#events tbody tr[data-old]")).to_have_count(0)  # the list has come
        expect(rows).to_have_count(2)
        expect(rows.first).to_contain_text("lost")


def test_a_page_has_one_question_on_its_way_and_one_that_waits(browser: Browser, board: StandIn) -> None:
    with watched(browser, board.url) as page:
        page.goto("/events")
        live(page)
        expect(page.locator("#facts")).to_contain_text("1 event")
        held = Held(page, "**/v1/events?*")
        board.asked.clear()
        for number in range(20):
            board.tell("reload", {})
            board.tell("event", event(100 + number, "acquired", "cron", "node-a"), 100 + number)
        expect(page.locator("#events tbody tr")).to_have_count(21)  # so it has heard all twenty
        held.until_asked()
        assert held.asked == 1
        held.let_go()
        held.until_asked()
        held.let_everything_go()
        expect(page.locator("#facts")).to_contain_text("1 event")
        assert len([path for path in board.asked if "limit" in path]) == 2


# --- Whether it is live


def test_a_stream_that_has_told_nothing_is_not_called_live(browser: Browser, board: StandIn) -> None:
    board.muted = True
    board.failing = ("/v1/",)
    with watched(browser, board.url, may_fail=True) as page:
        page.clock.install()
        page.goto("/")
        until(page, "document.body.dataset.live === 'stale'")  # the questions failed
        expect(page.locator("h1")).not_to_have_text("No roles")
        page.get_by_label("Find a role or a leader").fill("x")
        expect(page.locator("h1")).not_to_have_text("No roles")
        page.goto("/nodes")
        until(page, "document.body.dataset.live === 'stale'")
        board.failing = ()
        page.goto("/nodes")
        expect(page.locator("#facts")).to_have_text("1 live node")  # answered; and whether it stays true nobody knows
        expect(page.locator("#live")).to_have_text("connecting")
        page.clock.fast_forward(12_500)
        expect(page.locator("#stale")).to_contain_text("the server is silent")
        board.muted = False
        page.clock.fast_forward(12_500)
        live(page)
        expect(page.locator("#stale")).to_be_hidden()


def test_a_list_that_could_not_be_loaded_is_not_called_live(browser: Browser, board: StandIn) -> None:
    with watched(browser, board.url, may_fail=True) as page:
        page.goto("/events")
        live(page)
        board.failing = ("/v1/events",)
        board.tell("reload", {})
        expect(page.locator("#stale")).to_contain_text("the database of the ledger is away")
        board.tell("event", event(2, "lost", "cron", "node-a"), 2)
        expect(page.locator("#events tbody tr")).to_have_count(2)
        assert page.locator("#stale").is_visible(), "news of one event are not the list"
        board.failing = ()
        live(page)  # it has asked again by itself
        expect(page.locator("#stale")).to_be_hidden()


def test_a_server_that_falls_silent_is_noticed(browser: Browser, board: StandIn) -> None:
    with watched(browser, board.url, may_fail=True) as page:
        page.clock.install()
        page.goto("/nodes")
        live(page)
        board.muted = True
        page.clock.fast_forward(12_500)
        expect(page.locator("#stale")).to_contain_text("the server is silent")


def test_whoever_is_signed_out_is_led_to_the_sign_in(browser: Browser, board: StandIn) -> None:
    with watched(browser, board.url, may_fail=True) as page:
        page.goto("/locks")  # which asks again and again
        live(page)
        board.signed_out = True
        page.wait_for_url("**/sign-in?to=%2Flocks")
        board.signed_out = False
        page.goto("/nodes")  # which has only a stream
        live(page)
        board.signed_out = True
        board.cut()
        board.come_back()
        page.wait_for_url("**/sign-in?to=%2Fnodes")


def test_a_stream_goes_on_after_the_last_event_that_it_told(browser: Browser, board: StandIn) -> None:
    with watched(browser, board.url, may_fail=True) as page:
        page.goto("/events")
        live(page)
        board.events.insert(0, event(7, "lost", "cron", "node-a"))
        board.tell("event", board.events[0], 7)
        expect(page.locator("#events tbody tr")).to_have_count(2)
        board.cut()
        expect(page.locator("#stale")).to_be_visible()
        board.events.insert(0, event(8, "acquired", "cron", "node-b"))
        board.come_back()
        live(page)
        assert (board.resumed[0], board.resumed[-1]) == ("", "7")
        expect(page.locator("#events tbody tr")).to_have_count(3)  # what it missed is loaded as well


def test_a_lane_that_could_not_be_loaded_is_asked_for_again(browser: Browser, board: StandIn) -> None:
    board.failing = ("/v1/leaders/terms",)
    with watched(browser, board.url, may_fail=True) as page:
        page.clock.install()
        page.goto("/")
        live(page)
        expect(page.locator("#rows .lane")).to_have_attribute("data-state", "failed")
        board.failing = ()
        page.clock.fast_forward(3_500)
        expect(page.locator("#rows .lane")).to_have_attribute("data-state", "there")
        expect(page.locator("#rows .span")).to_have_count(1)


# --- Locks


def test_locks_that_come_slowly_are_shown_or_said_to_be_old(browser: Browser, board: StandIn) -> None:
    with watched(browser, board.url) as page:
        page.clock.install()
        page.goto("/locks")
        live(page)
        board.locks = [lock("second", "worker-2")]
        held = Held(page, "**/v1/locks?*")
        page.clock.fast_forward(2_100)
        held.until_asked()
        for _ in range(3):
            page.clock.fast_forward(2_100)
        expect(page.locator("#stale")).to_contain_text("the server is slow to answer")
        assert held.asked == 1, "asked again it would only be slower"
        held.let_everything_go()
        expect(page.locator("#locks tbody tr")).to_contain_text("second")
        live(page)


@pytest.mark.parametrize("wrong_ms", [-20 * MINUTE_MS, 20 * MINUTE_MS])
def test_the_time_left_is_that_of_the_servers_clock(browser: Browser, board: StandIn, wrong_ms: int) -> None:
    board.locks = [lock("first", "worker-1", left_ms=9 * MINUTE_MS)]
    with watched(browser, board.url) as page:
        page.add_init_script(f"const real = Date.now; Date.now = () => real() + ({wrong_ms});")
        page.goto("/locks")
        live(page)
        expect(page.locator("#locks td.left")).to_have_text(re.compile(r"^(9 min|8 min \d+ s)$"))


# --- Numbers, names, times


def test_numbers_beyond_what_javascript_counts_exactly_are_exact(browser: Browser, board: StandIn) -> None:
    big = 2**53 + 1
    shown = f"{big:,}".replace(",", "\u202f")
    board.leaders = [leader("cron", "node-a", epoch=big)]
    board.terms = {"cron": [term(big, "node-a", now_ms() - MINUTE_MS)]}
    board.events = [event(1, "acquired", "cron", "node-a", epoch=big)]
    board.locks = [lock("first", "worker-1", token=big)]
    with watched(browser, board.url) as page:
        page.goto("/")
        live(page)
        expect(page.locator("#rows .c-leader")).to_contain_text(f"epoch {big}")
        for path, table in (("/history", "#terms"), ("/locks", "#locks")):
            page.goto(path)
            live(page)
            until(page, "document.getElementById('facts').textContent !== ''")
            expect(page.locator(f"{table} tbody")).to_contain_text(shown)
        page.goto("/events")
        live(page)
        board.tell("event", event(2, "lost", "cron", "node-a", epoch=big), 2)
        expect(page.locator("#events tbody tr").first).to_contain_text("lost")
        expect(page.locator("#events tbody tr").first).to_contain_text(shown)


@pytest.mark.parametrize("name", ["two\nlines", " blanks ", "..", ".", "a\tb"])
def test_the_history_of_a_role_of_any_name_is_shown(browser: Browser, board: StandIn, name: str) -> None:
    board.leaders.append(leader(name, "node-b"))
    board.terms[name] = [term(1, "node-b", now_ms() - MINUTE_MS)]
    with watched(browser, board.url) as page:
        page.goto("/")
        live(page)
        expect(page.locator("#rows .span")).to_have_count(2)  # its lane, too
        page.locator("#rows .row").filter(has_text="node-b").locator(".c-role a").click()
        live(page)
        expect(page.locator("#facts")).to_have_text("1 term \u00b7 1 node")
        assert page.locator("#terms tbody td.role").all_text_contents() == [name]


def test_no_program_for_tables_takes_a_name_for_a_formula(browser: Browser, board: StandIn) -> None:
    names = [f"{first}1+1" for first in "=+-@\t\r"]
    board.leaders = [leader(name, "node-a") for name in names]
    board.terms = {name: [term(1, "node-a", place, place + 1)] for place, name in enumerate(names)}
    with watched(browser, board.url) as page:
        page.goto("/history")
        live(page)
        expect(page.locator("#facts")).to_contain_text("6 roles")
        with page.expect_download() as download:
            page.get_by_role("button", name="CSV").click()
        saved = download.value.path().read_bytes().decode()
    assert {row[0] for row in csv.reader(io.StringIO(saved, newline=""))} == {"role", *(f"'{name}" for name in names)}


HOUR_MS = 3_600_000
FORTH_MS = 1_806_195_600_000  # 2027-03-28 01:00 UTC, when clocks in Berlin go from 02:00 to 03:00
BACK_MS = 1_824_944_400_000  # 2027-10-31 01:00 UTC, when they go from 03:00 back to 02:00


@pytest.mark.parametrize(
    ("changed_ms", "hours", "wanted_h", "span_h"),
    [
        # Seven days, with a mark at each midnight on the wall: hours after noon UTC, four days before the change.
        (FORTH_MS, (1, 2), [11, 35, 59, 83, 106, 130, 154], (-85, 83)),
        (BACK_MS, (2, 1), [10, 34, 58, 82, 107, 131, 155], (-85, 83)),
        # A few hours go on evenly, and none is left out.
        (FORTH_MS, (1, 2), [0, 1, 2, 3, 4], (-2, 2)),
        (BACK_MS, (2, 1), [0, 0.5, 1, 1.5, 2], (-1, 1)),
    ],
)
def test_the_axis_has_its_marks_at_round_times_also_when_the_clocks_change(
    page_of_scripts: Page, changed_ms: int, hours: tuple[int, int], wanted_h: list[float], span_h: tuple[int, int]
) -> None:
    from_ms, to_ms = (changed_ms + each * HOUR_MS for each in span_h)
    script = f"""import('/static/terms.js').then(({{ ticks }}) => {{
        const offset = (ms) => (ms < {changed_ms} ? {hours[0]} : {hours[1]}) * {HOUR_MS};
        const {{ marks }} = ticks({from_ms}, {to_ms}, {100 * len(wanted_h)}, 76, offset);
        return marks.map((ms) => (ms - {from_ms}) / {HOUR_MS});
    }})"""
    assert page_of_scripts.evaluate(script) == wanted_h


@pytest.fixture(scope="module")
def page_of_scripts(browser: Browser) -> Iterator[Page]:
    with stand_in() as running, watched(browser, running.url) as page:
        page.goto("/nodes")
        yield page
