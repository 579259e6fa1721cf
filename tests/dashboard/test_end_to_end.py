"""The dashboard from end to end: real nodes, a real server, a real browser."""

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from support.background import background
from support.browser import PATIENCE_MS, browsing, serious_findings, until, watched
from support.dashboards import dashboard, ledger
from support.election_node import election_node
from support.elections import STEADY
from support.lockserver import PLAIN_TOKEN, acquire, lock_server

pytestmark = pytest.mark.long

expect.set_options(timeout=PATIENCE_MS)

GAPS = """
document.querySelectorAll('#rows .span[data-kind=gap]').length === 2
|| / 2 gaps/.test(document.querySelector('#rows .span[data-kind=gap]')?.ariaLabel)
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as started:
        yield started


def live(page: Page) -> None:
    until(page, "document.body.dataset.live === 'live'")


def row_of(page: Page, role: str) -> Any:
    return page.get_by_role("row").filter(has=page.get_by_role("rowheader", name=role, exact=True))


def test_when_the_leader_is_killed_the_page_shows_the_gap_and_the_successor(browser: Browser, tmp_path: Path) -> None:
    """Three nodes and a dashboard, each a process. How soon it shows is printed; no time is asserted."""
    with ledger() as book, background() as loop, contextlib.ExitStack() as stack:
        nodes = {}
        for name in ("node-a", "node-b", "node-c"):
            started = election_node(book.dsn, name, "mailer", tmp_path / "sends", acts=False, **STEADY)
            nodes[name] = stack.enter_context(loop.within(started))
            loop.do(nodes[name].hears("acquired" if name == "node-a" else "started"))
        served = stack.enter_context(contextlib.ExitStack())
        server = served.enter_context(dashboard(book.reader))
        page = stack.enter_context(watched(browser, server.url, may_fail=True))
        page.goto("/")
        live(page)
        page.evaluate("window.same = true")
        row = row_of(page, "mailer")
        expect(row.locator(".c-leader")).to_contain_text("node-a")
        expect(page.locator(".legend button")).to_have_count(3)
        expect(row.locator(".span[data-kind=term]")).to_have_count(1)

        began = time.monotonic()
        loop.do(nodes["node-a"].end())
        until(page, "/node-[bc]/.test(document.querySelector('#rows .c-leader').textContent)")
        until(page, "document.querySelectorAll('#rows .span[data-kind=gap]').length === 1")
        shown_ms = 1000 * (time.monotonic() - began)
        sys.stderr.write(f"SIGKILL of the leader to gap and successor on the page: {shown_ms:.0f} ms\n")
        expect(row.locator(".c-leader")).to_contain_text("epoch 2")
        expect(row.locator(".c-change")).to_contain_text("after lost")
        assert page.evaluate("window.same"), "without a reload"

        # A term is drawn from when its leader may act. One that ends before leaves a single gap.
        until(page, "document.querySelectorAll('#rows .span[data-kind=term]').length === 2")
        served.close()  # the server is killed
        expect(page.locator("#stale")).to_contain_text("Stale since")
        second = row.locator(".c-leader bdi").inner_text()
        loop.do(nodes[second].end())
        third = ({"node-b", "node-c"} - {second}).pop()
        loop.do(nodes[third].hears("acquired"))
        stack.enter_context(dashboard(book.reader, "--port", str(server.port)))
        live(page)
        expect(row.locator(".c-leader")).to_contain_text(third)
        # Two gaps, drawn as one when they are too close to be seen apart.
        until(page, GAPS)
        expect(page.locator("#stale")).to_be_hidden()
        assert page.evaluate("window.same"), "without a reload"


def test_whoever_signs_in_sees_the_pages_and_signs_out_again(browser: Browser, tmp_path: Path) -> None:
    with lock_server(tmp_path, tokens=True) as server, watched(browser, server.url, may_fail=True) as page:
        acquire(server, "invoice%2F1")
        page.goto("/")
        expect(page).to_have_url(f"{server.url}/sign-in")
        assert serious_findings(page) == []
        page.get_by_label("Token").fill("not a token of this server")
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("alert")).to_have_text("This token is unknown here.")
        page.get_by_label("Token").fill(PLAIN_TOKEN)
        page.get_by_role("button", name="Sign in").click()
        expect(page.locator("#locks")).to_contain_text("invoice/1")
        live(page)
        page.get_by_role("button", name="Sign out").click()
        expect(page).to_have_url(f"{server.url}/sign-in")
        page.goto("/locks?prefix=inv")
        expect(page).to_have_url(f"{server.url}/sign-in?to=%2Flocks%3Fprefix%3Dinv")
        page.get_by_label("Token").fill(PLAIN_TOKEN)
        page.get_by_role("button", name="Sign in").click()
        expect(page).to_have_url(f"{server.url}/locks?prefix=inv")
        page.goto("/nowhere")
        expect(page.get_by_role("heading", level=1)).to_have_text("There is no such page")
        assert serious_findings(page) == []
