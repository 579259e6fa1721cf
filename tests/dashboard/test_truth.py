"""One truth for operators: in each state that a role can be in, every view says the same.

A cluster of three node processes is brought into a state. What must be shown then stands in one table, written by hand:
by `roles --json` and its exit code, by the page and its data, by `/readyz` and the metrics of the node concerned, and
which alerts a real Prometheus fires.
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
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from pgleaderlock._pg.reader import PlainConnection
from pgleaderlock.alerts import Expected, default_alerts, rules_yaml
from pgleaderlock.dashboard import api
from pgleaderlock.dashboard.pages import render
from support.election_node import ElectionNode, SendLog, start_node
from support.elections import HASTY, STEADY, admin, fresh_database
from support.monitoring import Prometheus, prometheus_program
from support.program import command
from support.proxy import Proxy

WAIT_S = 60.0
ROLE = "role"
LASTING: dict[str, Any] = {**STEADY, "late_threshold_s": 50.0, "session_lease_s": 60.0}
"""What is looked at lasts as long as the test looks."""
EASILY_LATE: dict[str, Any] = {**STEADY, "late_threshold_s": 0.5, "session_lease_s": 60.0}


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
"""The default alerts, for a state that lasts a few seconds."""
SEEN_FOR = "8s"
"""Longer than any of them waits."""


class Cluster:
    def __init__(self, dsn: str, log: SendLog, options: dict[str, Any]) -> None:
        self.dsn, self.log = dsn, log
        self.nodes: dict[str, ElectionNode] = {}
        self._options = options
        self.scraped = Event()
        """The nodes have been scraped once: a counter needs the step from 0. Set where nobody scrapes them."""

    async def start(self, name: str) -> None:
        self.nodes[name] = await start_node(self.dsn, name, [ROLE], self.log.path, self._options)
        await self.nodes[name].hears("started")

    def ports(self) -> list[int]:
        return [self.port(node) for node in self.nodes.values() if node.process.returncode is None]

    async def leader(self, *, after: int = 0) -> ElectionNode:
        send = await self.log.until(lambda send: send.epoch > after)
        return self.nodes[send.node]

    def port(self, node: ElectionNode) -> int:
        return int(next(said["port"] for said in node.said if said["what"] == "probed"))


@contextlib.asynccontextmanager
async def cluster(dsn: str, tmp_path: Path, settings: dict[str, Any]) -> AsyncIterator[Cluster]:
    here = Cluster(dsn, SendLog(tmp_path / "sends"), {**settings, "probed": True})
    try:
        for name in ("node-1", "node-2", "node-3"):
            await here.start(name)
        yield here
    finally:
        for node in here.nodes.values():
            await node.end()


# --- How the states come about: each answers which node is asked for its probes, if there is one


async def nothing(here: Cluster) -> ElectionNode | None:
    return await here.leader()


async def stuck_drain(here: Cluster) -> ElectionNode | None:
    leader = await here.leader()
    await leader.asked("hold")
    leader.tell("step_down")
    return leader


async def waiting_successor(here: Cluster) -> ElectionNode | None:
    leader = await here.leader()
    await leader.end()
    left = [node for node in here.nodes.values() if node is not leader]
    async with asyncio.timeout(WAIT_S):
        while not any(node.acquired() for node in left):
            await asyncio.sleep(0.02)
    return next(node for node in left if node.acquired())


async def veto(here: Cluster) -> ElectionNode | None:
    leader = await here.leader()
    await leader.asked("veto")
    return leader


async def stopped(here: Cluster) -> ElectionNode | None:
    (await here.leader()).signal(signal.SIGSTOP)
    return None


async def all_drained(here: Cluster) -> ElectionNode | None:
    await here.leader()
    with admin(here.dsn) as conn:
        for name in here.nodes:
            conn.execute(
                "SELECT pgleaderlock.request_drain(%s, 'pgleaderlock', 'pgleaderlock')",
                (name,),
            )
    return here.nodes["node-1"]


async def all_killed(here: Cluster) -> ElectionNode | None:
    await here.leader()
    for node in here.nodes.values():
        node.signal(signal.SIGKILL)
    return None


async def failed_work(here: Cluster) -> ElectionNode | None:
    await here.leader()
    for node in here.nodes.values():
        await node.asked("fail")
    async with asyncio.timeout(WAIT_S):  # one after the other wins it, fails and gives it up
        for node in here.nodes.values():
            while (await asyncio.to_thread(probed, here.port(node)))[0] != 503:
                await asyncio.sleep(0.05)
    return here.nodes["node-1"]


async def retired(here: Cluster) -> ElectionNode | None:
    """A role that no node has in its list any more."""
    leader = await here.leader()
    with admin(here.dsn) as conn:
        conn.execute(
            "INSERT INTO pgleaderlock.leaders (namespace, role, key1, key2, epoch)"
            " VALUES ('pgleaderlock', 'old', 1, 2, 7)"
        )
        conn.execute(
            "INSERT INTO pgleaderlock.terms (namespace, role, epoch, session_id, node_id, holder_identity, began_at,"
            " ended_at, reason) VALUES ('pgleaderlock', 'old', 7, 1, 'node-9', 'x', now() - interval '2 d',"
            " now() - interval '1 d', 'released')"
        )
    return leader


async def forgotten(here: Cluster) -> ElectionNode | None:
    leader = await retired(here)
    done = await asyncio.to_thread(command, "roles", "forget", "old", "--dsn", here.dsn)
    assert done.code == 0, done
    return leader


async def crash_loop(here: Cluster) -> ElectionNode | None:
    """One node leads, dies and comes back, twice."""
    looping = (await here.leader()).name
    await here.scraped.wait()
    for _ in range(2):
        acts = await here.log.until(lambda send: send.node == looping)
        await here.nodes[looping].end()
        await here.leader(after=acts.epoch)
        await here.start(looping)
        async with asyncio.timeout(WAIT_S):  # a preference, and no promise: another one may win it
            while (await asyncio.to_thread(command, "step-down", ROLE, "--to", looping, "--dsn", here.dsn)).code:
                await asyncio.sleep(0.1)
    return here.nodes[looping]


async def restart_in_a_row(here: Cluster) -> ElectionNode | None:
    await here.leader()
    await here.scraped.wait()
    for name in list(here.nodes):
        here.nodes[name].tell("drain")
        await here.nodes[name].end(kill=False)
        await here.leader()
        await here.start(name)
    return await here.leader()


class Shown(NamedTuple):
    """What every view must say."""

    state: str
    exit_code: int
    why: str
    command: str | None
    title: str
    mood: str
    ready: tuple[int, str] | None
    """Of the node that is asked: the status, and what its body contains."""
    metric: str | None
    alerts: tuple[str, ...] = ()
    """Which fire, without their common prefix."""


TABLE = {
    # how            settings      what is shown
    nothing: (LASTING, Shown("acting", 0, "", None, "The one role is acting", "well", (200, "ready"), "acting")),
    stuck_drain: (LASTING, Shown(
        "draining", 1, r"node-\d gives it up: .*in flight", "pgleaderlock nodes",
        "The one role is not acting: draining", "late",
        (200, "role: draining, 1 in flight"), "draining", ("DrainStuck", "NoLeader"))),
    waiting_successor: (LASTING, Shown(
        "waiting", 1, r"node-\d leads, and waits until node-\d can no longer act", "pgleaderlock history role",
        "The one role is not acting: waiting", "late", (200, "role: waiting"), "waiting", ("NoLeader",))),
    veto: (LASTING, Shown(
        "vetoed", 1, r"node-\d leads, and its application holds the gate shut", "pgleaderlock step-down role",
        "The one role is not acting: leads, gate vetoed", "late", (200, "role: vetoed"), "vetoed", ("NoLeader",))),
    stopped: (EASILY_LATE, Shown(
        "late", 1, r"node-\d was not heard in time: .*", "pgleaderlock nodes",
        "The one role is not acting: late heartbeat", "late",
        None, None, ("NoLeader",))),
    all_drained: (LASTING, Shown(
        "nobody", 1, r"node-\d gave it up; drained, and not competing: node-1, node-2, node-3",
        "pgleaderlock drain --resume node-1",
        "The one role is not acting: nobody", "bad", (200, "ready"), "follows", ("NoLeader",))),
    all_killed: (HASTY, Shown(
        "nobody", 1, r"node-\d was (lost|not heard .*); no node that would lead is alive", "pgleaderlock nodes",
        "The one role is not acting: nobody", "bad", None, None, ("NoLeader",))),
    failed_work: (LASTING, Shown(
        "nobody", 1, r"its work has failed on node-\d, which gave it up; .*", None,
        "The one role is not acting: nobody", "bad",
        (503, "the work of 'role' has failed"), "follows", ("NoLeader",))),
    forgotten: (LASTING, Shown("acting", 0, "", None, "The one role is acting", "well", (200, "ready"), "acting")),
    crash_loop: (STEADY, Shown(
        "acting", 0, "", None, "The one role is acting", "well", (200, "ready"), "acting", ("FrequentFailovers",))),
    restart_in_a_row: (STEADY, Shown(
        "acting", 0, "", None, "The one role is acting", "well", (200, "ready"), "acting")),
}  # fmt: skip


@pytest.mark.parametrize("bring_about", TABLE, ids=lambda how: how.__name__)
@pytest.mark.timeout(300)
async def test_every_view_shows_the_state_of_a_role(bring_about: Any, dsn: str, tmp_path: Path) -> None:
    settings, wanted = TABLE[bring_about]
    with fresh_database(dsn, ledger=True) as database:
        async with cluster(database, tmp_path, settings) as here:
            here.scraped.set()
            asked = await bring_about(here)
            await until_shown(database, wanted)
            done = await asyncio.to_thread(command, "roles", "--dsn", database, "--json")
            (role,) = json.loads(done.out)["roles"]
            data = await leaders(database)
            page = html.unescape(render("leaders", data, signed_in=False, locks=False, leaders=True).decode())
            probes = await asyncio.to_thread(probed, here.port(asked)) if asked is not None else None
    (row,) = data["leaders"]
    heading = re.search(r'<h1 id="state" class="(\w+)" [^>]*>([^<]*)', page)
    assert heading is not None
    command_wanted = wanted.command or role["command"]  # a candidate may be about to take it, or not
    assert (role["state"], done.code, row["state"]) == (wanted.state, wanted.exit_code, wanted.state)
    assert re.fullmatch(wanted.why, role["why"]), role["why"]
    assert (role["command"], row["command"]) == (command_wanted, command_wanted)
    assert (heading[2], heading[1]) == (wanted.title, wanted.mood)
    assert wanted.command is None or wanted.command in page
    if probes is not None and wanted.ready is not None:
        assert (probes[0], wanted.ready[1] in probes[1]) == (wanted.ready[0], True), probes
        assert probes[2] == wanted.metric


@pytest.mark.long
@pytest.mark.parametrize("bring_about", TABLE, ids=lambda how: how.__name__)
@pytest.mark.timeout(300)
async def test_prometheus_fires_what_the_state_of_a_role_asks_for(bring_about: Any, dsn: str, tmp_path: Path) -> None:
    settings, wanted = TABLE[bring_about]
    alerts = {f"Pgleaderlock{name}" for name in wanted.alerts}
    with fresh_database(dsn, ledger=True) as database:
        async with cluster(database, tmp_path, settings) as here:
            with prometheus_program(tmp_path, RULES, scrape="1s") as (program, targets):
                prometheus = Prometheus(program, targets)
                prometheus.scrape_ports(here.ports())
                three = "count(pgleaderlock_gate_open) == 3 and sum(pgleaderlock_gate_open) == 1"
                await asyncio.to_thread(prometheus.until, lambda: prometheus.query(three) != [], "three nodes")
                here.scraped.set()
                await bring_about(here)
                prometheus.scrape_ports(here.ports())
                await until_shown(database, wanted)
                await asyncio.to_thread(prometheus.until, lambda: set(prometheus.firing()) == alerts, f"{alerts}")
                if wanted.state == "acting":
                    # For longer than any alert waits, one of the nodes acts: nothing else is to come.
                    lasting = f"min_over_time(sum(pgleaderlock_gate_open)[{SEEN_FOR}:1s]) == 1 and count_over_time("
                    lasting += f"sum(pgleaderlock_gate_open)[{SEEN_FOR}:1s]) >= 7"
                    await asyncio.to_thread(prometheus.until, lambda: prometheus.query(lasting) != [], "a quiet time")
                    assert set(prometheus.firing()) == alerts


async def test_a_role_that_nobody_wants_is_told_from_one_that_is_about_to_be_taken(dsn: str, tmp_path: Path) -> None:
    with fresh_database(dsn, ledger=True) as database:
        async with cluster(database, tmp_path, LASTING) as here:
            await retired(here)
            rows = {row["role"]: row for row in (await leaders(database))["leaders"]}
    assert (rows["old"]["state"], rows[ROLE]["state"]) == ("nobody", "acting")
    assert rows["old"]["why"] == "node-9 gave it up; no live node competes for it: start one, or forget the role"
    assert rows["old"]["command"] == "pgleaderlock roles forget old"


async def test_without_its_database_a_cluster_is_unknown_everywhere(dsn: str, tmp_path: Path) -> None:
    with fresh_database(dsn, ledger=True) as database:
        async with Proxy.to(database) as proxy, cluster(proxy.dsn_for(database), tmp_path, STEADY) as here:
            leader = await here.leader()
            proxy.refuse()
            proxy.reset()
            await leader.hears("lost")
            done = await asyncio.to_thread(command, "roles", "--dsn", proxy.dsn_for(database))
            probes = await asyncio.to_thread(probed, here.port(leader))
    assert done.code == 2
    assert probes == (503, "no session with the database\n", "follows")
    page = render("leaders", {"error": "away"}, signed_in=False, locks=False, leaders=True).decode()
    assert re.search(r'<h1 id="state" class="bad" [^>]*>Who leads is not known', page)


# --- How the views are asked


async def leaders(dsn: str) -> dict[str, Any]:
    async with await PlainConnection.open(dsn, "truth test") as look:
        reply = await api.leaders(look, "pgleaderlock", limit=10)
    found: dict[str, Any] = msgspec.to_builtins(reply)
    return found


async def until_shown(dsn: str, wanted: Shown) -> None:
    """The ledger hears of a state at the next heartbeat, or when a lease is over."""
    seen: Any = None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(WAIT_S):
            while True:
                (seen,) = (await leaders(dsn))["leaders"]
                if seen["state"] == wanted.state and re.fullmatch(wanted.why, seen["why"] or ""):
                    return
                await asyncio.sleep(0.05)
    raise AssertionError(f"not shown: {seen}")


def probed(port: int) -> tuple[int, str, str]:
    """`/readyz`: status and body; and how the node stands to the role by its metrics."""
    status, body = _get(port, "/readyz")
    metrics = _get(port, "/metrics")[1]
    found = re.findall(r'^pgleaderlock_role_state\{role="role",state="(\w+)"\} 1\.0$', metrics, re.MULTILINE)
    return status, body, " ".join(found)


def _get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
