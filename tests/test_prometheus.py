"""A real Prometheus scrapes real nodes while their leaders are killed: the default alerts fire and resolve as promised.

One story in one test, because starting everything costs more than telling it. Nothing is timed: each step waits until
Prometheus itself says so, and what must never have fired is looked up in its memory.
"""

import contextlib
import json
import re
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.deps import debian_tool
from support.elections import fresh_database
from support.program import PATIENCE_S, Program, command, running
from test_deploy import port_of, queries

POLL_S = 0.1
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


class Prometheus:
    """The server, and the nodes that it is told to scrape."""

    def __init__(self, program: Program, targets: Path) -> None:
        self._targets = targets
        self._nodes: dict[int, Program] = {}
        program.until("Listening on")
        (self._port,) = re.findall(r'msg="Listening on" address=127\.0\.0\.1:(\d+)', program.err)

    def scrape(self, node: Program) -> Program:
        """From now on, this one too."""
        port = int(port_of(node))
        self._nodes[port] = node
        ports = [{"targets": [f"127.0.0.1:{port}" for port in self._nodes]}]
        written = self._targets.with_suffix(".new")
        written.write_text(json.dumps(ports))
        written.rename(self._targets)
        return node

    def forget(self, *gone: Program) -> None:
        self._nodes = {port: node for port, node in self._nodes.items() if node not in gone}

    def ask(self, path: str, **query: str) -> Any:
        address = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(address, timeout=PATIENCE_S) as answer:
            found = json.load(answer)
        assert found["status"] == "success", found
        return found["data"]

    def query(self, query: str) -> list[dict[str, Any]]:
        result: list[dict[str, Any]] = self.ask("query", query=query)["result"]
        return result

    def history(self, query: str) -> list[dict[str, Any]]:
        now = time.time()
        asked = {"query": query, "start": str(now - 300), "end": str(now), "step": "1"}
        result: list[dict[str, Any]] = self.ask("query_range", **asked)["result"]
        return result

    def value(self, query: str) -> float | None:
        found = self.query(query)
        return float(found[0]["value"][1]) if found else None

    def firing(self) -> dict[str, str]:
        """The alerts that fire now, and their summaries."""
        return {
            alert["labels"]["alertname"]: alert["annotations"]["summary"]
            for alert in self.ask("alerts")["alerts"]
            if alert["state"] == "firing"
        }

    def has_fired(self, alert: str) -> bool:
        return bool(self.query(f'count_over_time(ALERTS{{alertname="{alert}",alertstate="firing"}}[10m])'))

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Prometheus announces nothing: it is asked again and again."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not happen; firing: {self.firing()}"
            time.sleep(POLL_S)

    def until_sum(self, metric: str, wanted: float) -> None:
        self.until(lambda: self.value(f"sum({metric})") == wanted, f"sum({metric}) = {wanted}")

    def until_fires(self, alert: str, summary: str) -> None:
        self.until(lambda: alert in self.firing(), alert)
        assert self.firing()[alert] == summary

    def until_resolved(self, alert: str) -> None:
        self.until(lambda: alert not in self.firing(), f"the end of {alert}")

    def kill_leader(self) -> None:
        """Comes back when Prometheus has noticed: until then the dead one is shown as the leader."""
        (found,) = self.query("pgleaderlock_gate_open == 1")
        instance = found["metric"]["instance"]
        self._nodes[int(instance.rpartition(":")[2])].signal(signal.SIGKILL)
        series = f'pgleaderlock_gate_open{{instance="{instance}"}}'
        self.until(lambda: self.query(series) == [], f"the end of {series}")


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Prometheus]:
    tool = debian_tool("prometheus")
    (tmp_path / "pgleaderlock.toml").write_text(CONFIG)
    exported = command("alerts", "export", "--config", str(tmp_path / "pgleaderlock.toml"), *STORY)
    assert exported.code == 0, exported.err
    (tmp_path / "rules.yml").write_text(exported.out)
    (tmp_path / "targets.json").write_text("[]")
    config = {
        "global": {"scrape_interval": SCRAPE, "scrape_timeout": SCRAPE, "evaluation_interval": SCRAPE},
        "rule_files": [str(tmp_path / "rules.yml")],
        "scrape_configs": [
            {
                "job_name": "app",
                "file_sd_configs": [{"files": [str(tmp_path / "targets.json")], "refresh_interval": "1s"}],
            }
        ],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))
    process = subprocess.Popen(
        [
            tool.path,
            f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            "--web.listen-address=127.0.0.1:0",
        ],
        env=tool.env,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield Prometheus(Program(process), tmp_path / "targets.json")
    finally:
        process.kill()
        process.wait(PATIENCE_S)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def node(dsn: str, host: str) -> contextlib.AbstractContextManager[Program]:
    """A node that takes itself for another machine: one that follows itself is no failover."""
    options = ("--name", "billing", "--fenced", "--dsn", dsn, "--metrics-port", "0", *TIMING)
    return running("run", *options, code=f"import socket; socket.gethostname = lambda: {host!r}")


def test_the_leader_is_killed_and_the_alerts_fire_and_resolve_as_promised(prometheus: Prometheus, dsn: str) -> None:
    with contextlib.ExitStack() as at_end:
        ledger, other_ledger = (at_end.enter_context(fresh_database(dsn, ledger=True)) for _ in range(2))
        for host in ("node-1", "node-2", "node-3"):
            prometheus.scrape(at_end.enter_context(node(ledger, host)))
        prometheus.until_sum("pgleaderlock_gate_open", 1)
        prometheus.until(lambda: prometheus.value("count(pgleaderlock_heartbeat_age_ms)") == 3, "three nodes")
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
        prometheus.until_fires("PgleaderlockTwoLeaders", "2 nodes act for billing")
        # And one that reaches none.
        lost = prometheus.scrape(at_end.enter_context(node("postgresql://127.0.0.1:1/nobody", "lost")))
        prometheus.until(lambda: "PgleaderlockNoSession" in prometheus.firing(), "PgleaderlockNoSession")
        for gone in (stray, lost):
            gone.signal(signal.SIGKILL)
        prometheus.until_resolved("PgleaderlockTwoLeaders")
        prometheus.until_resolved("PgleaderlockNoSession")
        assert prometheus.firing() == {}


def every_query_of_the_dashboard_has_an_answer(prometheus: Prometheus) -> None:
    """The variables are filled in as Grafana would. At some moment of the last minutes: an alert may be over by now."""
    for query in queries():
        filled = query.replace("$__rate_interval", "10s").replace('"$job"', '".+"').replace('"$role"', '".+"')
        assert "$" not in filled, filled
        assert prometheus.history(filled) != [], filled
