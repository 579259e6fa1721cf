"""The files of `examples/monitoring`, as tests read them, and a real Prometheus with alerting rules."""

import contextlib
import json
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from support.deps import debian_tool
from support.program import PATIENCE_S, Program, started

__all__ = ["MONITORING", "Prometheus", "prometheus_program", "queries"]

MONITORING = Path(__file__).parents[2] / "examples" / "monitoring"
POLL_S = 0.1


def queries() -> list[str]:
    """Every expression of the dashboard: of panels, annotations and variables."""
    board = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    of_panels = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    of_notes = [entry["expr"] for entry in board["annotations"]["list"]]
    of_variables = [
        re.findall(r"label_values\((.*), \w+\)", entry["definition"])[0]
        for entry in board["templating"]["list"]
        if entry["type"] == "query"
    ]
    return [*of_panels, *of_notes, *of_variables]


class Prometheus:
    """The server, as a test asks it."""

    def __init__(self, program: Program, targets: Path) -> None:
        self._targets = targets
        program.until("Server is ready to receive web requests")
        (self._port,) = re.findall(r'msg="Listening on" address=127\.0\.0\.1:(\d+)', program.err)

    def scrape_ports(self, ports: Iterable[int]) -> None:
        """From now on, these and no others."""
        written = self._targets.with_suffix(".new")
        written.write_text(json.dumps([{"targets": [f"127.0.0.1:{port}" for port in ports]}]))
        written.rename(self._targets)

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

    def firing_for(self) -> set[tuple[str, str]]:
        """Each alert that fires now, with its role or, if it has none, its node."""
        labels = [alert["labels"] for alert in self.ask("alerts")["alerts"] if alert["state"] == "firing"]
        return {(each["alertname"], each.get("role", each.get("node", ""))) for each in labels}

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
        assert re.fullmatch(summary, self.firing()[alert])

    def until_resolved(self, alert: str) -> None:
        self.until(lambda: alert not in self.firing(), f"the end of {alert}")


@contextlib.contextmanager
def prometheus_program(folder: Path, rules: str, *, scrape: str) -> Iterator[tuple[Program, Path]]:
    """The program, with these rules and job `app`; and the file with its targets, which is empty."""
    tool = debian_tool("prometheus")
    (folder / "rules.yml").write_text(rules)
    targets = folder / "targets.json"
    targets.write_text("[]")
    config = {
        "global": {"scrape_interval": scrape, "scrape_timeout": scrape, "evaluation_interval": scrape},
        "rule_files": [str(folder / "rules.yml")],
        "scrape_configs": [
            {"job_name": "app", "file_sd_configs": [{"files": [str(targets)], "refresh_interval": "1s"}]}
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    argv = [
        str(tool.path),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        "--web.listen-address=127.0.0.1:0",
    ]
    with started(argv, tool.env) as program:
        yield program, targets
