"""The pictures of docs/dashboard.md, taken in Debian's Chromium of pages with made-up figures: `make screenshots`.

`--states FOLDER` takes every page in three widths and two colour schemes, and the page of the leaders in every state of
a role: for a review, not for the repository. `--measure` takes no pictures. It prints how soon a page of a thousand
roles and a hundred thousand terms is painted, how many elements it has, and how much memory it takes while it scrolls.

Imports the tests' browser and stand-in: run it with the folder `tests` on the path, as the Makefile does.
"""

import argparse
import random
import statistics
import sys
from pathlib import Path
from typing import Any

import psycopg
from playwright.sync_api import Browser, Page

from support.browser import browsing, until, watched
from support.dashboard_stand_in import StandIn, event, incident, leader, lock, node, now_ms, slot, stand_in, term
from support.dashboards import Book, dashboard, ledger

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS

ROLES = (
    "billing-close", "cache-warmer", "cron", "log-compactor", "mailer", "metrics-aggregator", "outbox-relay",
    "partition-manager", "payout-batch", "report-builder", "search-reindex", "session-sweeper", "thumbnailer",
    "webhook-retry",
)  # fmt: skip
NODES = ("eu-west-1a", "eu-west-1b", "eu-west-1c", "eu-west-1d")

# Picture: address, width and height, colour scheme.
PICTURES: dict[str, tuple[str, tuple[int, int], str]] = {
    "leaders-light": ("/", (1280, 860), "light"),
    "leaders-dark": ("/", (1280, 860), "dark"),
    "leaders-narrow-dark": ("/", (360, 780), "dark"),
    "leaders-wide-dark": ("/", (2560, 1000), "dark"),
    "history-light": ("/history", (1280, 620), "light"),
    "events-dark": ("/events", (1280, 620), "dark"),
    "locks-light": ("/locks", (1280, 520), "light"),
    "locks-narrow-dark": ("/locks", (360, 640), "dark"),
    "nodes-dark": ("/nodes", (1280, 400), "dark"),
    "timeline-light": ("/", (1280, 560), "light"),
    "stale-light": ("/", (1280, 420), "light"),
}

SIZES = ((360, 780), (1280, 860), (2560, 1000))
SCHEMES = ("light", "dark")
PAGES = ("/history", "/incidents", "/slots", "/events", "/nodes", "/locks")
AS_LOADED = ("/incidents", "/slots")  # they show the moment when they were loaded
# The texts of `history` for each state: why no node may act, and which command to run next.
STATES: dict[str, tuple[str, str]] = {
    "nobody": ("eu-west-1b was lost; no node that would lead is alive", "pgleaderlock nodes"),
    "drained": (
        "eu-west-1c gave it up; drained, and not competing: eu-west-1a, eu-west-1b, eu-west-1c and others",
        "pgleaderlock drain --resume eu-west-1a",
    ),
    "retired": (
        "eu-west-1c gave it up; no live node competes for it: start one, or forget the role",
        "pgleaderlock roles forget webhook-retry",
    ),
    "work_failed": ("eu-west-1c leads, and is idle: its work has failed", "pgleaderlock step-down webhook-retry"),
    "late": ("eu-west-1c was not heard in time: its gate is shut until it is heard again", "pgleaderlock nodes"),
    "draining": (
        "eu-west-1c gives it up: no new work, and it waits for the end of what is in flight",
        "pgleaderlock nodes",
    ),
    "vetoed": ("eu-west-1c leads, and its application holds the gate shut", "pgleaderlock step-down webhook-retry"),
    "waiting": (
        "eu-west-1c leads, and waits until eu-west-1b can no longer act",
        "pgleaderlock watch",
    ),
    "acting": ("", ""),
    "stale": ("", ""),
    "empty": ("", ""),
}
UNKNOWN = "document.getElementById('state').textContent.startsWith('Unknown')"
UNLED = {"nobody", "drained", "retired"}


def in_state(board: StandIn, name: str) -> None:
    """Put every role into this state."""
    night(board)
    why, command = STATES[name]
    state = {**dict.fromkeys(UNLED, "nobody"), "stale": "acting"}.get(name, name)
    rows, board.leaders = board.leaders, []
    for row in [] if name == "empty" else rows:
        words: dict[str, Any] = {"state": state, "last_change": row["last_change"], "epoch": row["epoch"]}
        words |= {"why": why, "command": command.replace("webhook-retry", row["role"])} if why else {}
        words |= {"heartbeat": "late", "heartbeat_age_ms": 11_400} if state == "late" else {}
        board.leaders.append(leader(row["role"], None if name in UNLED else "eu-west-1c", **words))
    if name == "empty":
        board.nodes, board.events, board.incidents, board.locks, board.terms = [], [], [], [], {}
        board.slots = []


def take_states(browser: Browser, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    pages = [(name, "/") for name in STATES] + [("night", path) for path in ("/", *PAGES)]
    pages += [("empty", path) for path in PAGES]
    for name, path in pages:
        for width, height in SIZES:
            for scheme in SCHEMES:
                with stand_in() as board:
                    night(board) if name == "night" else in_state(board, name)
                    size: Any = {"width": width, "height": height}
                    options: Any = {"viewport": size, "color_scheme": scheme}
                    with watched(browser, board.url, may_fail=True, **options) as page:
                        page.goto(path)
                        if path not in AS_LOADED:
                            until(page, "document.body.dataset.live === 'live'")
                        if path not in AS_LOADED and name != "empty":
                            settled(page)
                        if name == "stale":
                            board.cut()
                            until(page, UNKNOWN)
                        page.screenshot(path=folder / f"{path[1:] or 'leaders'}-{name}-{width}-{scheme}.png")


def night(board: StandIn) -> None:
    """A night with a crash, a rolling restart and one role that no node leads."""
    chance = random.Random(7)
    now = now_ms()
    crash, restart = now - 21 * MINUTE_MS, now - 47 * MINUTE_MS
    for place, role in enumerate(ROLES):
        first, second, third = (NODES[(place * 3 + step * (1 + place % 3)) % len(NODES)] for step in range(3))
        base = 11 + place
        began = now - 26 * HOUR_MS - place * 9 * MINUTE_MS
        handed = restart + place * 20_000
        terms = [term(base, first, began, handed, reason="released")]
        gap = 40 + chance.randrange(400)
        if second == "eu-west-1b":
            gap_after = 1200 + chance.randrange(40_000)
            terms.append(term(base + 1, second, handed + gap, crash, gap_ms=gap))
            terms.append(term(base + 2, third, crash + gap_after, gap_ms=gap_after))
        else:
            terms.append(term(base + 1, second, handed + gap, gap_ms=gap))
        board.terms[role] = terms[::-1]
        last = board.terms[role][0]
        change = {"at_ms": last["began_ms"], "kind": "acquired", "reason": terms[-2]["reason"]}
        board.leaders.append(
            leader(role, last["node_id"], epoch=last["epoch"], tenure_ms=now - last["began_ms"], last_change=change)
        )
    _trouble(board, now)
    for place, name in enumerate(NODES):
        led = sum(row["leader"] == name for row in board.leaders)
        more: dict[str, Any] = {
            "roles": led,
            "wants": len(ROLES),
            "host": f"ip-10-0-{place}-17",
            "started_ms": restart + place * 30_000,
            "process_started_ms": restart + place * 30_000,
        }
        more["heartbeat_age_ms"] = 11_400 if name == "eu-west-1d" else 180 + 210 * place
        if name == "eu-west-1b":
            more |= {"live": False, "heartbeat_age_ms": now - crash, "started_ms": now - 70 * HOUR_MS}
            more["process_started_ms"] = more["started_ms"]
        board.nodes.append(node(name, 41 + place, **more))
    _events(board, crash, restart)
    _incidents(board, crash, restart)
    _locks(board, chance)
    _slots(board, now)


def _trouble(board: StandIn, now: int) -> None:
    rows = {row["role"]: row for row in board.leaders}
    ended = now - 95_000
    gone = board.terms["thumbnailer"][0]
    gone |= {"ended_ms": ended, "reason": "lost"}
    nobody = {"at_ms": ended, "kind": "lost", "reason": None}
    why = f"{gone['node_id']} was lost; the live nodes that compete for it do not take it"
    lost: dict[str, Any] = {"last_change": nobody, "why": why, "state_since_ms": ended}
    rows["thumbnailer"] |= leader("thumbnailer", None, epoch=gone["epoch"], **lost)
    for row in board.leaders:
        if row["leader"] == "eu-west-1d":
            why, command = STATES["late"]
            words: dict[str, Any] = {"why": why.replace("eu-west-1c", "eu-west-1d"), "command": command}
            late = leader(row["role"], "eu-west-1d", heartbeat="late", **words)
            row |= {"heartbeat_age_ms": 11_400, "state_since_ms": now - 6_400}
            row |= {
                name: late[name] for name in ("heartbeat", "gate", "state", "label", "mood", "rank", "why", "command")
            }
        elif row["leader"] is not None:
            row["heartbeat_age_ms"] = 180 + 210 * NODES.index(row["leader"])


def _events(board: StandIn, crash: int, restart: int) -> None:
    found = []
    for role, terms in board.terms.items():
        for each in terms:
            began = event(0, "acquired", role, each["node_id"], at_ms=each["began_ms"], epoch=each["epoch"])
            found.append(began)
            if each["ended_ms"] is not None:
                found.append(
                    event(0, each["reason"], role, each["node_id"], at_ms=each["ended_ms"], epoch=each["epoch"])
                )
    for place, name in enumerate(NODES):
        at = restart + place * 30_000
        found.append(event(0, "session_opened", None, name, at_ms=at, epoch=None))
        found.append(event(0, "drain_ended", None, name, at_ms=at - 4000, epoch=None, detail="clean"))
    found.append(event(0, "session_ended", None, "eu-west-1b", at_ms=crash + 900, epoch=None, detail="not heard"))
    found.sort(key=lambda each: -each["at_ms"])
    for place, each in enumerate(found):
        each["event_id"] = 5000 - place
    board.events = found


def _incidents(board: StandIn, crash: int, restart: int) -> None:
    lost = [role for role, terms in board.terms.items() if any(each["ended_ms"] == crash for each in terms)]
    others = [name for name in NODES if name != "eu-west-1b"]
    open_: dict[str, Any] = {"began_ms": now_ms() - 95_000, "ended_ms": None, "longest_ms": 95_000, "taken_over_by": []}
    crashed = {"began_ms": crash, "ended_ms": crash + 41_000, "longest_ms": 41_000, "taken_over_by": others}
    board.incidents = [
        incident("eu-west-1c", "thumbnailer", without_leader=["thumbnailer"], **open_),
        incident("eu-west-1b", *lost, **crashed),
    ]
    for place, name in reversed([*enumerate(NODES)]):
        drained = {"began_ms": restart + place * 30_000, "longest_ms": 380, "taken_over_by": [NODES[place - 1]]}
        board.incidents.append(incident(name, *ROLES[place::4], reason="released", **drained))


def _slots(board: StandIn, now: int) -> None:
    """One slot of each kind: running, done, failed, and lost with its node."""
    hour = now - now % HOUR_MS
    usual = {"began_ms": hour + 1200, "ended_ms": hour + 74_000, "took_ms": 72_800, "attempts": 1, "detail": None}
    lost = {"node_id": "eu-west-1b", "state": "lost", "attempts": 2, "took_ms": None, "ended_ms": None}
    rows: dict[str, dict[str, Any]] = {
        "invoice-run": {"state": "done"},
        "nightly-backup": {"state": "running", "ended_ms": None},
        "quota-report": {"state": "failed", "detail": "exit code 3"},
        "warehouse-export-to-the-partners-bucket": lost,
    }
    board.slots = [slot(name, **{**usual, "node_id": "eu-west-1a", **more}) for name, more in rows.items()]


def _locks(board: StandIn, chance: random.Random) -> None:
    for place in range(140):
        owner = None if place % 9 == 4 else f"worker-{chance.randrange(40):02}"
        left = chance.randrange(1_000, 58_000)
        waiters = chance.choice((0, 0, 0, 0, 2, 5))
        board.locks.append(
            lock(f"invoice/2026-11/{place:05}", owner, token=place * 7 + 3, left_ms=left, waiters=waiters)
        )


# The largest installation that the pages promise to show: a thousand roles with a hundred terms each, of nine nodes,
# over a day.
ROLES_MANY, TERMS_EACH, LOCKS_MANY = 1000, 100, 100_000
_CROWD = """
INSERT INTO pgleaderlock.leaders (namespace, role, key1, key2, epoch, session_id, ended, acquired_at, wait_t)
SELECT 'pgleaderlock', 'role-' || lpad(r::text, 4, '0'), r, r, %(terms)s, %(first)s + (r + %(terms)s) %% 9, false,
       now(), 1
FROM generate_series(1, %(roles)s) r;
INSERT INTO pgleaderlock.terms (
    namespace, role, epoch, session_id, node_id, holder_identity, began_at, ended_at, reason)
SELECT 'pgleaderlock', 'role-' || lpad(r::text, 4, '0'), t, %(first)s + (r + t) %% 9, 'node-' || (r + t) %% 9, 'x',
       now() - make_interval(mins => 14 * (%(terms)s - t), secs => r %% 600),
       CASE WHEN t < %(terms)s
            THEN now() - make_interval(mins => 14 * (%(terms)s - t - 1), secs => r %% 600) - interval '2 s' END,
       CASE WHEN t < %(terms)s THEN 'lost' END
FROM generate_series(1, %(roles)s) r, generate_series(1, %(terms)s) t;
ANALYZE;
"""


def crowd(book: Book) -> None:
    first, *_ = [book.session(f"node-{place}") for place in range(9)]
    values = {"roles": ROLES_MANY, "terms": TERMS_EACH, "first": first}
    psycopg.ClientCursor(book.conn).execute(_CROWD, values)


def settled(page: Page) -> None:
    """Wait until the page is live and everything in view has loaded."""
    until(page, "document.body.dataset.live === 'live'")
    until(page, "document.getElementById('facts').textContent !== ''")
    until(page, "![...document.querySelectorAll('.lane')].some((lane) => lane.dataset.state !== 'there')")


def take(browser: Browser, names: list[str]) -> None:
    IMAGES.mkdir(exist_ok=True)
    with stand_in() as board:
        night(board)
        for name in names:
            address, (width, height), scheme = PICTURES[name]
            size: Any = {"width": width, "height": height}
            with watched(browser, board.url, may_fail=True, viewport=size, color_scheme=scheme) as page:
                page.goto(address)
                settled(page)
                if name.startswith("timeline"):
                    _zoomed(page)
                if name.startswith("stale"):
                    board.cut()
                    until(page, UNKNOWN)
                page.screenshot(path=IMAGES / f"{name}.png")
                sys.stdout.write(f"{IMAGES / name}.png\n")


def _zoomed(page: Page) -> None:
    """Zoom to the minutes around the crash, and show the text for the element in focus."""
    page.get_by_role("button", name="15 min").click()
    page.get_by_role("button", name="Earlier").click()
    page.get_by_role("button", name="Earlier").click()
    settled(page)
    page.mouse.move(0, 0)
    page.locator(".row", has_text="cron").locator(".span[data-kind=gap]").focus()


def measure(browser: Browser) -> None:
    window: Any = {"width": 1280, "height": 900}
    with ledger() as book:
        crowd(book)
        with dashboard(book.reader) as server:
            paints = []
            for _ in range(5):
                with watched(browser, server.url, viewport=window) as page:
                    page.goto("/")
                    settled(page)
                    paints.append(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
            sys.stdout.write(
                f"{ROLES_MANY:,} roles, {ROLES_MANY * TERMS_EACH:,} terms: first paint after "
                f"{statistics.median(paints):.0f} ms (median of 5; longest {max(paints):.0f} ms)\n"
            )
            with watched(browser, server.url, viewport=window) as page:
                page.goto("/")
                settled(page)
                page.get_by_role("button", name="24 h").click()
                settled(page)
                _scroll(page)
    with stand_in() as board:
        board.locks = [lock(f"lock-{place:06}", "worker", token=place + 1) for place in range(LOCKS_MANY)]
        with watched(browser, board.url, viewport=window) as page:
            page.goto("/locks")
            settled(page)
            rows = page.evaluate("document.querySelectorAll('#locks tbody tr').length")
            sys.stdout.write(f"{LOCKS_MANY:,} locks: {rows} rows on a page\n")


def _scroll(page: Page) -> None:
    devtools = page.context.new_cdp_session(page)
    devtools.send("Performance.enable")
    for _ in range(3):
        frames = page.evaluate(SCROLL)
        devtools.send("HeapProfiler.collectGarbage")
        used = {each["name"]: each["value"] for each in devtools.send("Performance.getMetrics")["metrics"]}
        elements = page.evaluate("document.getElementsByTagName('*').length")
        sys.stdout.write(
            f"scrolled from top to bottom: {len(frames)} frames, median {statistics.median(frames):.0f} ms, slowest "
            f"{max(frames):.0f} ms; {elements:,} elements, {used['JSHeapUsedSize'] / 2**20:.1f} MB for scripts\n"
        )


# Scrolls from top to bottom in steps; returns the times between frames.
SCROLL = """
async () => {
  const frames = [];
  let before = performance.now();
  for (let top = 0; top < document.body.scrollHeight; top += 300) {
    scrollTo(0, top);
    await new Promise(requestAnimationFrame);
    frames.push(performance.now() - before);
    before = performance.now();
  }
  scrollTo(0, 0);
  return frames;
}
"""


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("pictures", nargs="*", choices=[*PICTURES, []], help="only these")
    asked.add_argument("--measure", action="store_true", help="print figures instead of taking pictures")
    asked.add_argument("--states", type=Path, metavar="FOLDER", help="every page in every state and size, into FOLDER")
    given = asked.parse_args()
    with browsing() as browser:
        if given.states is not None:
            take_states(browser, given.states)
        elif given.measure:
            measure(browser)
        else:
            take(browser, given.pictures or list(PICTURES))
    return 0


if __name__ == "__main__":
    sys.exit(main())
