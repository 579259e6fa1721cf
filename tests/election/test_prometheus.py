"""A real Prometheus scrapes real nodes while their leaders are killed: the default alerts fire and resolve as promised.

One story in one test, because starting everything costs more than telling it. Nothing is timed: each step waits until
Prometheus itself says so, and what must never have fired is looked up in its memory.
"""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.elections import fresh_database
from support.monitoring import Prometheus, prometheus_program, queries
from support.program import Program, command, port_of, running

pytestmark = pytest.mark.long

SCRAPE = "500ms"
# The nodes' own timing, from which the thresholds follow; and a story of seconds instead of a quarter of an hour.
CONFIG = """
[cluster.leader_election]
refresh_interval = "200ms"
late_threshold = "1s"
lease_duration = "1500ms"
"""
TIMING = ("--health-interval", "200ms", "--late-threshold", "1s", "--session-lease", "1500ms")
STORY = ("--scrape-interval", SCRAPE, "--failovers", "1", "--failover-window", "8s")


class Scraped(Prometheus):
    """The server, and the nodes that it is told to scrape."""

    def __init__(self, program: Program, targets: Path) -> None:
        super().__init__(program, targets)
        self._nodes: dict[int, Program] = {}

    def scrape(self, node: Program) -> Program:
        """From now on, this one too."""
        self._nodes[int(port_of(node))] = node
        self.scrape_ports(self._nodes)
        return node

    def kill_leader(self) -> None:
        """Comes back when Prometheus has noticed: until then the dead one is shown as the leader."""
        (found,) = self.query("pgleaderlock_gate_open == 1")
        instance = found["metric"]["instance"]
        self._nodes[int(instance.rpartition(":")[2])].signal(signal.SIGKILL)
        series = f'pgleaderlock_gate_open{{instance="{instance}"}}'
        self.until(lambda: self.query(series) == [], f"the end of {series}")


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Scraped]:
    (tmp_path / "pgleaderlock.toml").write_text(CONFIG)
    exported = command("alerts", "export", "--config", str(tmp_path / "pgleaderlock.toml"), *STORY)
    assert exported.code == 0, exported.err
    with prometheus_program(tmp_path, exported.out, scrape=SCRAPE) as (program, targets):
        yield Scraped(program, targets)


def node(dsn: str, host: str) -> contextlib.AbstractContextManager[Program]:
    """A node that takes itself for another machine: one that follows itself is no failover."""
    options = ("--name", "billing", "--fenced", "--dsn", dsn, "--metrics-port", "0", *TIMING)
    return running("run", *options, code=f"import socket; socket.gethostname = lambda: {host!r}")


def test_the_leader_is_killed_and_the_alerts_fire_and_resolve_as_promised(prometheus: Scraped, dsn: str) -> None:
    with contextlib.ExitStack() as at_end:
        ledger, other_ledger = (at_end.enter_context(fresh_database(dsn, ledger=True)) for _ in range(2))
        for host in ("node-1", "node-2", "node-3"):
            prometheus.scrape(at_end.enter_context(node(ledger, host)))
        prometheus.until_sum("pgleaderlock_gate_open", 1)
        prometheus.until(lambda: prometheus.value("count(pgleaderlock_heartbeat_age_seconds)") == 3, "three nodes")
        assert prometheus.firing() == {}

        # One leader is lost: somebody else takes over, and nobody is told.
        prometheus.kill_leader()
        prometheus.until_sum("pgleaderlock_failovers_total", 1)
        prometheus.until_sum("pgleaderlock_gate_open", 1)
        assert prometheus.firing() == {}

        # Two within the window are too many.
        prometheus.kill_leader()
        prometheus.until_fires("PgleaderlockFrequentFailovers", "billing changes hands too often")
        prometheus.until_sum("pgleaderlock_gate_open", 1)
        assert not prometheus.has_fired("PgleaderlockNoLeader"), "a failover is no outage"
        every_query_of_the_dashboard_has_an_answer(prometheus)

        # The last one: nobody is left who could say that nobody leads.
        prometheus.kill_leader()
        prometheus.until_fires("PgleaderlockNoLeader", "Nobody leads billing")
        prometheus.until(lambda: prometheus.query("pgleaderlock_gate_open") == [], "the end of all series")
        prometheus.until_resolved("PgleaderlockFrequentFailovers")
        assert "PgleaderlockNoLeader" in prometheus.firing()
        assert not prometheus.has_fired("PgleaderlockTwoLeaders"), "what the dead had shown is no second leader"
        assert not prometheus.has_fired("PgleaderlockHeartbeatLate")

        # Another machine comes up.
        prometheus.scrape(at_end.enter_context(node(ledger, "node-4")))
        prometheus.until_resolved("PgleaderlockNoLeader")

        # A second database, as after a failover of which the old primary knows nothing: two lead.
        stray = prometheus.scrape(at_end.enter_context(node(other_ledger, "stray")))
        prometheus.until_fires("PgleaderlockTwoLeaders", r"2 nodes act for billing, (stray|node-4) is one of them")
        # And one that reaches none.
        lost = prometheus.scrape(at_end.enter_context(node("postgresql://127.0.0.1:1/nobody", "lost")))
        prometheus.until(lambda: "PgleaderlockNoSession" in prometheus.firing(), "PgleaderlockNoSession")
        for gone in (stray, lost):
            gone.signal(signal.SIGKILL)
        prometheus.until_resolved("PgleaderlockTwoLeaders")
        prometheus.until_resolved("PgleaderlockNoSession")
        assert prometheus.firing() == {}


def every_query_of_the_dashboard_has_an_answer(prometheus: Scraped) -> None:
    """The variables are filled in as Grafana would. At some moment of the last minutes: an alert may be over by now."""
    for query in queries():
        filled = query.replace("$__rate_interval", "10s").replace('"$job"', '".+"').replace('"$role"', '".+"')
        assert "$" not in filled, filled
        assert prometheus.history(filled) != [], filled
