"""One truth for operators: in each situation that a cluster can be in, every view says the same.

A cluster of three node processes and five roles is brought into a situation. What must be shown then stands in one
table, written by hand: by `roles --json` and its exit code, by the page and its tab in a real browser, by `/readyz` and
the metrics of the nodes, and which alerts a real Prometheus fires for which role.
"""

import asyncio
import contextlib
import html
import json
import re
import signal
import urllib.error
import urllib.request
from asyncio import Event
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psycopg
import pytest
from playwright.sync_api import Browser, Page, expect

from pgleaderlock._pg.reader import PlainConnection
from pgleaderlock.alerts import Expected, default_alerts, rules_yaml
from pgleaderlock.dashboard import api
from pgleaderlock.dashboard.pages import render
from pgleaderlock.embedded import EmbeddedPostgres
from pgleaderlock.errors import PgLeaderLockError
from pgleaderlock.migrate import sql
from support.background import Background, background
from support.browser import PATIENCE_MS, browsing, watched
from support.dashboards import dashboard
from support.election_node import ElectionNode, SendLog, start_node
from support.elections import STEADY, admin, fresh_database
from support.monitoring import Prometheus, prometheus_program
from support.program import command
from support.servers import throwaway

WAIT_S = 60.0
BROUGHT_ABOUT_S = 240.0
SPACE = "pgleaderlock"
ROLES = ("billing", "cron", "mailer", "outbox", "reports")
LED = {"node-1": ("billing", "reports"), "node-2": ("cron", "mailer"), "node-3": ("outbox",)}
"""Who leads what before anything happens. Every node competes for every role."""
KEPT = ROLES[:-1]
"""What is left in the nodes' list when the last role is retired."""

LASTING: dict[str, Any] = {**STEADY, "late_threshold_s": 50.0, "session_lease_s": 60.0}
"""What is looked at lasts as long as the test looks."""
EASILY_LATE: dict[str, Any] = {**STEADY, "late_threshold_s": 4.0, "session_lease_s": 60.0}
BRIEF: dict[str, Any] = {**STEADY, "late_threshold_s": 2.5, "session_lease_s": 3.0}
"""A T that the test waits for."""

RULES = rules_yaml(
    default_alerts(
        Expected(
            scrape_interval_s=1.0,
            session_lease_s=1.0,
            late_threshold_s=600.0,  # a busy machine is not what is tested here
            failovers_max=1,
            failover_window_s=600.0,
            drain_s=2.0,
        )
    )
)
"""The default alerts, for a situation that lasts a few seconds."""
SEEN_FOR = "8s"
"""Longer than any of them waits."""

expect.set_options(timeout=PATIENCE_MS)


class Cluster:
    def __init__(self, dsn: str, server: EmbeddedPostgres, log: SendLog, options: dict[str, Any]) -> None:
        self.dsn, self.server, self.log = dsn, server, log
        self.nodes: dict[str, ElectionNode] = {}
        self._options = options
        self.scraped = Event()
        """The nodes have been scraped once: a counter needs the step from 0. Set where nobody scrapes them."""
        self.discovered: Callable[[list[int]], None] = lambda _ports: None
        """Told which ports to scrape, whenever a node has started."""

    async def start(self, name: str, roles: tuple[str, ...] = ROLES) -> None:
        self.nodes[name] = await start_node(self.dsn, name, roles, self.log.path, self._options)
        await self.nodes[name].hears("started")
        self.discovered([self.port(node) for node in self.live()])

    async def restart(self, name: str, roles: tuple[str, ...] = ROLES) -> None:
        self.nodes[name].tell("drain")
        await self.nodes[name].end(kill=False)
        await self.acting()
        await self.start(name, roles)

    async def acting(self, roles: tuple[str, ...] = KEPT, *, by: str = "") -> None:
        """Return when somebody, or the named node, has acted for each of the roles."""
        for role in roles:
            await self.log.until(lambda send, role=role: send.role == role and send.node.startswith(by), WAIT_S)  # type: ignore[misc]

    async def move(self, role: str, to: str) -> None:
        """To be led by a certain node is a preference, and no promise: another one may win it."""
        async with asyncio.timeout(WAIT_S):
            while (send := await self.log.until(lambda send: send.role == role)).node != to:
                ask(self.dsn, "request_step_down(%s, %s, %s, %s)", role, SPACE, to, SPACE)
                await self.log.until(lambda later, epoch=send.epoch: later.role == role and later.epoch > epoch, WAIT_S)  # type: ignore[misc]

    def live(self) -> list[ElectionNode]:
        return [node for node in self.nodes.values() if node.process.returncode is None]

    def port(self, node: ElectionNode) -> int:
        return int(next(said["port"] for said in node.said if said["what"] == "probed"))


@contextlib.asynccontextmanager
async def cluster(dsn: str, server: EmbeddedPostgres, folder: Path, settings: dict[str, Any]) -> AsyncIterator[Cluster]:
    here = Cluster(dsn, server, SendLog(folder / "sends"), {**settings, "probed": True})
    try:
        for name in LED:
            await here.start(name)
        for name, roles in LED.items():
            for role in roles:
                await here.move(role, name)
        yield here
    finally:
        for node in here.nodes.values():
            await node.end()


def ask(dsn: str, function: str, *values: str) -> None:
    with admin(dsn) as conn:
        conn.execute(f"SELECT pgleaderlock.{function}".encode(), values)


# --- How the situations come about: each answers which node is asked for its readiness, if there is one


async def nothing(here: Cluster) -> ElectionNode | None:
    return here.nodes["node-1"]


async def stuck_drain(here: Cluster) -> ElectionNode | None:
    await here.nodes["node-1"].asked("hold", "billing")
    ask(here.dsn, "request_drain(%s, %s, %s)", "node-1", SPACE, SPACE)
    return here.nodes["node-1"]


async def waiting_successor(here: Cluster) -> ElectionNode | None:
    left = [node for node in here.nodes.values() if node.name != "node-1"]
    since = {node.name: len(node.said) for node in left}
    await here.nodes["node-1"].end()

    def winners(role: str) -> list[ElectionNode]:
        return [
            node
            for node in left
            if any((said["what"], said.get("role")) == ("acquired", role) for said in node.said[since[node.name] :])
        ]

    async with asyncio.timeout(WAIT_S):
        while not all(winners(role) for role in LED["node-1"]):
            await asyncio.sleep(0.02)
    return winners("billing")[0]


async def veto(here: Cluster) -> ElectionNode | None:
    await here.nodes["node-1"].asked("veto", "billing")
    return here.nodes["node-1"]


async def stopped(here: Cluster) -> ElectionNode | None:
    here.nodes["node-1"].signal(signal.SIGSTOP)
    return None


async def database_stopped(here: Cluster) -> ElectionNode | None:
    await asyncio.to_thread(here.server.stop)
    for name, roles in LED.items():
        for role in roles:
            await here.nodes[name].hears("lost", role=role)
    return here.nodes["node-1"]


async def all_drained(here: Cluster) -> ElectionNode | None:
    for name in here.nodes:
        ask(here.dsn, "request_drain(%s, %s, %s)", name, SPACE, SPACE)
    return here.nodes["node-1"]


async def all_killed(here: Cluster) -> ElectionNode | None:
    for node in here.nodes.values():
        await node.end()
    return None


async def failed_work(here: Cluster) -> ElectionNode | None:
    for node in here.nodes.values():
        await node.asked("fail", "billing")
    async with asyncio.timeout(WAIT_S):  # one after the other wins it, fails and gives it up
        for node in here.nodes.values():
            while (await asyncio.to_thread(get, here.port(node), "/readyz"))[0] != 503:
                await asyncio.sleep(0.05)
    return here.nodes["node-1"]


async def retired(here: Cluster) -> ElectionNode | None:
    """All nodes are restarted, one after the other, with a role less in their lists."""
    await here.scraped.wait()
    for name in list(here.nodes):
        await here.restart(name, KEPT)
    await here.acting()
    return here.nodes["node-1"]


async def forgotten(here: Cluster) -> ElectionNode | None:
    node = await retired(here)
    done = await asyncio.to_thread(command, "roles", "forget", "reports", "--dsn", here.dsn)
    assert done.code == 0, done
    return node


async def crash_loop(here: Cluster) -> ElectionNode | None:
    """One node leads a role, dies and comes back, twice."""
    await here.scraped.wait()
    for _ in range(2):
        await here.nodes["node-1"].end()
        await here.acting(ROLES)
        await here.start("node-1")
        await here.move("billing", "node-1")
    await here.acting(ROLES)
    return here.nodes["node-1"]


async def restart_in_a_row(here: Cluster) -> ElectionNode | None:
    await here.scraped.wait()
    for name in list(here.nodes):
        await here.restart(name)
    await here.acting(ROLES)
    return here.nodes["node-1"]


class Shown(NamedTuple):
    """What every view must say."""

    settings: dict[str, Any]
    roles: str
    """Which roles nobody may act for. Somebody may for all others."""
    state: str
    """Of those roles, in `roles --json`."""
    badge: tuple[str, str]
    """Of those roles, on the page: the words, and how bad they are."""
    why: str
    command: str | None
    exit_code: int
    headline: str
    tab: str
    mood: str
    ready: tuple[int, str] | None
    """Of the node that is asked: the status, and what its body contains."""
    metric: str | None
    """How their leader stands to those roles by its metrics. None: every node says that it follows."""
    alerts: dict[str, str]
    """Which fire, without their common prefix, and for which roles or nodes."""


def well(settings: dict[str, Any], many: int = 5, **alerts: str) -> Shown:
    well_said = f"All {many} roles acting"
    return Shown(settings, "", "", ("", ""), "", None, 0, well_said, "", "well", (200, "ready\n"), None, alerts)


TABLE: dict[Callable[[Cluster], Awaitable[ElectionNode | None]], Shown] = {
    # settings, roles, state, badge, why, command; exit code, headline, tab, mood; readiness, metric, alerts
    nothing: well(LASTING),
    stuck_drain: Shown(
        LASTING, "billing", "draining", ("draining", "late"), r"node-1 gives it up: .*in flight", "pgleaderlock nodes",
        1, "1 of 5 roles not acting: draining", "(1!) ", "late",
        (200, "\nbilling: draining, 1 in flight\n"), "draining", {"DrainStuck": "billing", "NoLeader": "billing"}),
    waiting_successor: Shown(
        LASTING, "billing reports", "waiting", ("waiting", "late"),
        r"node-[23] leads, and waits until node-1 can no longer act", "pgleaderlock watch",
        1, "2 of 5 roles not acting: waiting", "(2!) ", "late",
        (200, "\nbilling: waiting\n"), "waiting", {"NoLeader": "billing reports"}),
    veto: Shown(
        LASTING, "billing", "vetoed", ("leads, gate vetoed", "late"),
        r"node-1 leads, and its application holds the gate shut", "pgleaderlock step-down {role}",
        1, "1 of 5 roles not acting: leads, gate vetoed", "(1!) ", "late",
        (200, "\nbilling: vetoed\n"), "vetoed", {"NoLeader": "billing"}),
    stopped: Shown(
        EASILY_LATE, "billing reports", "late", ("late heartbeat", "late"), r"node-1 was not heard in time: .*",
        "pgleaderlock nodes",
        1, "2 of 5 roles not acting: late heartbeat", "(2!) ", "late",
        None, None, {"NoLeader": "billing reports"}),
    database_stopped: Shown(
        LASTING, "billing cron mailer outbox reports", "unknown", ("", ""), "", None,
        2, "Unknown: no data for ", "(?) ", "bad",
        (503, "no session with the database\n"), None,
        {"NoLeader": "billing cron mailer outbox reports", "NoSession": "node-1 node-2 node-3"}),
    all_drained: Shown(
        LASTING, "billing cron mailer outbox reports", "nobody", ("nobody", "bad"),
        r"node-\d gave it up; drained, and not competing: node-1, node-2, node-3", "pgleaderlock drain --resume node-1",
        1, "5 of 5 roles not acting: nobody", "(5!) ", "bad",
        (200, "ready\n"), None, {"NoLeader": "billing cron mailer outbox reports"}),
    all_killed: Shown(
        BRIEF, "billing cron mailer outbox reports", "nobody", ("nobody", "bad"),
        r"node-\d was (lost|not heard .*); no node that would lead is alive", "pgleaderlock nodes",
        1, "5 of 5 roles not acting: nobody", "(5!) ", "bad",
        None, None, {"NoLeader": "billing cron mailer outbox reports"}),
    failed_work: Shown(
        LASTING, "billing", "nobody", ("nobody", "bad"), r"its work has failed on node-\d, which gave it up; .*", None,
        1, "1 of 5 roles not acting: nobody", "(1!) ", "bad",
        (503, "the work of 'billing' has failed\n"), None, {"NoLeader": "billing"}),
    # No node measures a role that no node wants: no alert can miss it.
    retired: Shown(
        LASTING, "reports", "nobody", ("nobody", "bad"),
        r"node-\d gave it up; no live node competes for it: start one, or forget the role",
        "pgleaderlock roles forget {role}",
        1, "1 of 5 roles not acting: nobody", "(1!) ", "bad",
        (200, "ready\n"), None, {}),
    forgotten: well(LASTING, many=4),
    crash_loop: well(BRIEF, FrequentFailovers="billing"),
    restart_in_a_row: well(STEADY),
}  # fmt: skip


TAKES_LONGER = (nothing, all_killed, retired, crash_loop, restart_in_a_row)
"""Shown by the long test alone."""


@contextlib.contextmanager
def situation(
    bring_about: Callable[..., Any], postgres: EmbeddedPostgres, folder: Path
) -> Iterator[tuple[Background, Cluster]]:
    """The cluster before anything happens, on a loop of its own."""
    with contextlib.ExitStack() as stack:
        if bring_about is database_stopped:
            server = stack.enter_context(throwaway())
            database = server.dsn
            with psycopg.connect(database, autocommit=True) as conn:
                conn.execute(sql().encode())
        else:
            server = postgres
            database = stack.enter_context(fresh_database(postgres.dsn, ledger=True))
        loop = stack.enter_context(background())
        here = stack.enter_context(loop.within(cluster(database, server, folder, TABLE[bring_about].settings)))
        yield loop, here


@pytest.mark.parametrize("bring_about", [how for how in TABLE if how not in TAKES_LONGER], ids=lambda how: how.__name__)
@pytest.mark.timeout(300)
def test_the_command_line_and_the_probes_show_the_situation(
    bring_about: Any, postgres: EmbeddedPostgres, nothing_left: None, tmp_path: Path
) -> None:
    wanted = TABLE[bring_about]
    with situation(bring_about, postgres, tmp_path) as (loop, here):
        loop.loop.call_soon_threadsafe(here.scraped.set)
        asked = loop.do(bring_about(here), BROUGHT_ABOUT_S)
        until_in_ledger(loop, here, wanted)
        check_command(here, wanted)
        check_probes(here, wanted, asked)
        data = loop.do(leaders(here.dsn))
    page = html.unescape(render("leaders", data, signed_in=False, locks=False, leaders=True).decode())
    heading = re.search(r'<h1 id="state" class="(\w+)" [^>]*>([^<]*)', page)
    assert heading is not None
    assert (heading[2], heading[1]) == (first_headline(wanted), wanted.mood)
    assert f"<title>{wanted.tab}Leaders \u00b7 pgleaderlock</title>" in page


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as started:
        yield started


@pytest.mark.long
@pytest.mark.parametrize("bring_about", TABLE, ids=lambda how: how.__name__)
@pytest.mark.timeout(400)
def test_every_view_shows_the_situation_and_prometheus_fires(
    bring_about: Any, browser: Browser, postgres: EmbeddedPostgres, nothing_left: None, tmp_path: Path
) -> None:
    wanted = TABLE[bring_about]
    alerts = {(f"Pgleaderlock{name}", of) for name, whom in wanted.alerts.items() for of in whom.split()}
    with situation(bring_about, postgres, tmp_path) as (loop, here), contextlib.ExitStack() as stack:
        server = stack.enter_context(dashboard(here.dsn))
        prometheus = Prometheus(*stack.enter_context(prometheus_program(tmp_path, RULES, scrape="1s")))
        page = stack.enter_context(watched(browser, server.url, may_fail=True))
        here.discovered = prometheus.scrape_ports
        here.discovered([here.port(node) for node in here.live()])
        page.goto("/")
        expect(page.locator("h1")).to_have_text("All 5 roles acting")
        all_seen = "count(pgleaderlock_gate_open) == 15 and sum(pgleaderlock_gate_open) == 5"
        prometheus.until(lambda: prometheus.query(all_seen) != [], "three nodes")
        loop.loop.call_soon_threadsafe(here.scraped.set)

        asked = loop.do(bring_about(here), BROUGHT_ABOUT_S)
        here.discovered([here.port(node) for node in here.live()])
        until_in_ledger(loop, here, wanted)
        prometheus.until(lambda: prometheus.firing_for() == alerts, f"{alerts}")
        if "NoLeader" not in wanted.alerts:
            quiet(prometheus, many=list(states_wanted(wanted).values()).count("acting"))
            prometheus.until(lambda: prometheus.firing_for() == alerts, f"{alerts}")
        check_command(here, wanted)
        check_probes(here, wanted, asked)
        check_page(page, wanted)
        first = stack.enter_context(watched(browser, server.url, may_fail=True, java_script_enabled=False))
        first.goto("/")
        check_page(first, wanted, headline=first_headline(wanted))


def quiet(prometheus: Prometheus, many: int) -> None:
    """For longer than any alert waits, there was one node for each role that acted: nothing else is to come."""
    acts = f"sum(pgleaderlock_gate_open)[{SEEN_FOR}:1s]"
    lasting = f"min_over_time({acts}) == {many} and count_over_time({acts}) >= 7"
    prometheus.until(lambda: prometheus.query(lasting) != [], "a quiet time")


# --- How the views are asked


async def leaders(dsn: str) -> dict[str, Any]:
    try:
        async with await PlainConnection.open(dsn, "truth test") as look:
            reply = await api.leaders(look, SPACE, limit=10)
    except PgLeaderLockError as away:
        return {"error": str(away)}
    found: dict[str, Any] = msgspec.to_builtins(reply)
    return found


def first_headline(wanted: Shown) -> str:
    """Of a page as it is loaded: it has had no data yet."""
    return "Who leads is not known" if wanted.state == "unknown" else wanted.headline


def states_wanted(wanted: Shown) -> dict[str, str]:
    """The state of each role that is shown."""
    there = KEPT if wanted.headline.startswith("All 4") else ROLES
    return {role: wanted.state if role in wanted.roles.split() else "acting" for role in there}


def until_in_ledger(loop: Background, here: Cluster, wanted: Shown) -> None:
    """The ledger hears of a state at the next heartbeat, or when a lease is over."""
    states = states_wanted(wanted)

    async def look() -> None:
        seen: Any = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                while True:
                    seen = (await leaders(here.dsn)).get("leaders", [])
                    troubled = [row for row in seen if row["role"] in wanted.roles.split()]
                    if {row["role"]: row["state"] for row in seen} == states and all(
                        re.fullmatch(wanted.why, row["why"]) for row in troubled
                    ):
                        return
                    await asyncio.sleep(0.05)
        raise AssertionError(f"not shown: {seen}")

    if wanted.state != "unknown":
        loop.do(look(), WAIT_S + 10)


def check_command(here: Cluster, wanted: Shown) -> None:
    done = command("roles", "--dsn", here.dsn, "--json")
    assert done.code == wanted.exit_code, done
    if wanted.state == "unknown":
        return
    found = {row["role"]: row for row in json.loads(done.out)["roles"]}
    assert {role: row["state"] for role, row in found.items()} == states_wanted(wanted)
    for role, row in found.items():
        if role not in wanted.roles.split():
            assert (row["why"], row["command"]) == ("", None)
            continue
        assert re.fullmatch(wanted.why, row["why"]), row["why"]
        assert wanted.command is None or row["command"] == wanted.command.format(role=role)


def check_probes(here: Cluster, wanted: Shown, asked: ElectionNode | None) -> None:
    """Of the node that is asked, its readiness; of all that answer, how they stand to each role."""
    answering = [node for node in here.live() if wanted.state != "late" or node.name != "node-1"]
    said: dict[str, list[str]] = {role: [] for role in states_wanted(wanted)}
    for node in answering:
        metrics = get(here.port(node), "/metrics")[1]
        found = re.findall(r'^pgleaderlock_role_state\{role="(\w+)",state="(\w+)"\} 1\.0$', metrics, re.MULTILINE)
        for role, state in found:
            said[role] += [state] if state != "follows" else []
    troubled = [] if wanted.metric is None else [wanted.metric]
    assert said == {role: troubled if role in wanted.roles.split() else ["acting"] for role in said}
    if asked is not None:
        assert wanted.ready is not None
        status, body = get(here.port(asked), "/readyz")
        assert (status, wanted.ready[1] in f"\n{body}") == (wanted.ready[0], True), body


READ = """() => {
    const text = (element, inside) => element.querySelector(inside)?.textContent;
    return {
        mood: document.getElementById("state").className,
        badges: Object.fromEntries([...document.querySelectorAll("#rows .row")].map(
            (row) => [text(row, ".c-role bdi"), [text(row, ".badge.state"), row.dataset.mood]])),
        advice: [...document.querySelectorAll("#remedies strong bdi")].map((role) => {
            const line = role.closest("li");
            return [role.textContent, text(line, "span"), text(line, "code")];
        }),
    };
}"""


def check_page(page: Page, wanted: Shown, headline: str | None = None) -> None:
    """The page and its tab, as a visitor sees them."""
    exactly = headline is not None or wanted.state != "unknown"
    said = re.escape(headline or wanted.headline)
    expect(page.locator("h1")).to_have_text(re.compile(f"^{said}$" if exactly else f"^{said}"))
    expect(page).to_have_title(f"{wanted.tab}Leaders \u00b7 pgleaderlock")
    found = page.evaluate(READ)
    assert found["mood"] == wanted.mood
    if wanted.state == "unknown":
        assert found["advice"] == []
        return
    troubled = wanted.roles.split()
    assert found["badges"] == {
        role: [*(wanted.badge if role in troubled else ("acting", "well"))] for role in states_wanted(wanted)
    }
    assert sorted(role for role, _, _ in found["advice"]) == sorted(troubled)
    for role, why, to_run in found["advice"]:
        assert re.fullmatch(wanted.why, why), why
        assert wanted.command is None or to_run == wanted.command.format(role=role)


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
