"""Every metric of an election, as data: what it is called, what it counts, which labels it carries.

One table for those who count (`metrics`), those who ask (`alerts`, the dashboard) and the page that explains: a name
that is not here does not exist.

Imports the standard library only.
"""

import re
from dataclasses import dataclass
from typing import Literal

__all__ = ["METRICS", "PREFIX", "Metric", "metric_names", "unknown_names", "words_outside_strings"]

PREFIX = "pgleaderlock_"
_SUFFIXES = ("_bucket", "_sum", "_count")
# A string, which may hold anything, or a word. Prometheus knows three kinds of quotes.
_WORDS = re.compile(r"""("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|`[^`]*`)|([a-zA-Z_:][a-zA-Z0-9_:]*)""")


@dataclass(frozen=True, slots=True)
class Metric:
    """One family of time series."""

    name: str
    """As Prometheus shows it, prefix and suffix included."""
    kind: Literal["gauge", "counter", "histogram"]
    labels: tuple[str, ...]
    help: str


METRICS = (
    Metric(f"{PREFIX}is_leader", "gauge", ("role",), "1 while this node holds the role's lock"),
    Metric(f"{PREFIX}gate_open", "gauge", ("role",), "1 while this node may act for the role"),
    Metric(f"{PREFIX}state", "gauge", ("role", "state"), "1 for the state that this node is in, 0 for the others"),
    Metric(f"{PREFIX}epoch", "gauge", ("role",), "The newest epoch of the role that this node has seen"),
    Metric(f"{PREFIX}heartbeat_age_ms", "gauge", ("role",), "Time since the last acknowledged heartbeat was sent"),
    Metric(f"{PREFIX}tenure_seconds", "gauge", ("role",), "Time since this node's term began; 0 when it leads nothing"),
    Metric(f"{PREFIX}draining", "gauge", ("role",), "1 while the role is given up: no new work, old work ends"),
    Metric(f"{PREFIX}elections_total", "counter", ("role",), "Attempts that the database has answered"),
    Metric(f"{PREFIX}failovers_total", "counter", ("role",), "Terms begun here after another node was lost"),
    Metric(f"{PREFIX}acquired_total", "counter", ("role",), "Terms begun here"),
    Metric(f"{PREFIX}lost_total", "counter", ("role", "reason"), "Terms ended here, by reason"),
    Metric(f"{PREFIX}acquire_attempts_total", "counter", ("role", "result"), "Attempts to lead, by result"),
    Metric(f"{PREFIX}gate_blocked_total", "counter", ("role", "reason"), "Acts that the gate has refused, by reason"),
    Metric(f"{PREFIX}acquire_latency_ms", "histogram", ("role",), "From the winning attempt's send to the begun term"),
    Metric(f"{PREFIX}heartbeat_update_ms", "histogram", (), "Time that an acknowledged heartbeat took"),
)


def metric_names() -> frozenset[str]:
    """Every name that a query may use: a histogram has three."""
    names = set()
    for metric in METRICS:
        names |= {metric.name + suffix for suffix in _SUFFIXES} if metric.kind == "histogram" else {metric.name}
    return frozenset(names)


def words_outside_strings(query: str) -> list[re.Match[str]]:
    """The words of a PromQL expression that may be names; what stands in quotes is none."""
    return [found for found in _WORDS.finditer(query) if found[2] is not None]


def unknown_names(query: str) -> list[str]:
    """The names with our prefix in a PromQL expression that are no metrics of ours."""
    ours = {found[2] for found in words_outside_strings(query) if found[2].startswith(PREFIX)}
    return sorted(ours - metric_names())
