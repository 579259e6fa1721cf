"""Every metric of an election, as data: its name, what it counts, its labels.

The exporters (`metrics`), the queries (`alerts`, the dashboard) and the documentation use this one table: a metric that
is not in it does not exist.
"""

import re
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "BUCKETS_S",
    "METRICS",
    "MS_NAMES",
    "PREFIX",
    "Metric",
    "metric_names",
    "unknown_names",
    "words_outside_strings",
]

PREFIX = "pgleaderlock_"
_SUFFIXES = ("_bucket", "_sum", "_count")
# A string, which may hold anything, or a word. Prometheus knows three kinds of quotes.
_WORDS = re.compile(r"""("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|`[^`]*`)|([a-zA-Z_:][a-zA-Z0-9_:]*)""")


@dataclass(frozen=True, slots=True)
class Metric:
    """One family of time series."""

    name: str
    """The full name in Prometheus, with prefix and suffix."""
    kind: Literal["gauge", "counter", "histogram"]
    labels: tuple[str, ...]
    help: str


METRICS = (
    Metric(f"{PREFIX}is_leader", "gauge", ("role",), "1 while this node holds the role's lock"),
    Metric(f"{PREFIX}gate_open", "gauge", ("role",), "1 while this node may act for the role"),
    Metric(f"{PREFIX}state", "gauge", ("role", "state"), "1 for the state that this node is in, 0 for the others"),
    Metric(
        f"{PREFIX}role_state", "gauge", ("role", "state"), "1 for how this node stands to the role: acting, or why not"
    ),
    Metric(f"{PREFIX}candidate", "gauge", ("role",), "1 while this node leads the role or would take it over"),
    Metric(f"{PREFIX}epoch", "gauge", ("role",), "The newest epoch of the role that this node has seen"),
    Metric(f"{PREFIX}heartbeat_age_seconds", "gauge", ("role",), "Time since the last acknowledged heartbeat was sent"),
    Metric(f"{PREFIX}tenure_seconds", "gauge", ("role",), "Time since this node's term began; 0 when it leads nothing"),
    Metric(f"{PREFIX}draining", "gauge", ("role",), "1 while the role is given up: no new work, old work ends"),
    Metric(f"{PREFIX}work_failed", "gauge", ("role",), "1 from a failure of the role's work until it is started again"),
    Metric(f"{PREFIX}work_failures_total", "counter", ("role",), "Works of lead that have failed here"),
    Metric(f"{PREFIX}elections_total", "counter", ("role",), "Attempts that the database has answered"),
    Metric(f"{PREFIX}failovers_total", "counter", ("role",), "Terms begun here after another node was lost"),
    Metric(f"{PREFIX}acquired_total", "counter", ("role",), "Terms begun here"),
    Metric(f"{PREFIX}lost_total", "counter", ("role", "reason"), "Terms ended here, by reason"),
    Metric(f"{PREFIX}acquire_attempts_total", "counter", ("role", "result"), "Attempts to lead, by result"),
    Metric(f"{PREFIX}gate_blocked_total", "counter", ("role", "reason"), "Acts that the gate has refused, by reason"),
    Metric(
        f"{PREFIX}acquire_latency_seconds", "histogram", ("role",), "From the winning attempt's send to the begun term"
    ),
    Metric(
        f"{PREFIX}failover_seconds",
        "histogram",
        ("role",),
        "Time in which nobody could act before this node's term could",
    ),
    Metric(f"{PREFIX}heartbeat_update_seconds", "histogram", (), "Time that an acknowledged heartbeat took"),
    Metric(
        f"{PREFIX}node_info",
        "gauge",
        ("role", "node", "namespace", "version", "hold"),
        "Always 1: which node answers here, for which namespace, in which version, and how it holds roles",
    ),
)
# Names of the same durations in milliseconds, as other designs have them. Nodes do not export these, because Prometheus
# recommends base units; recording rules can add them (`alerts export --ms-names`).
# The last one is the lock server's.
_TIMED = (f"{PREFIX}heartbeat_age", f"{PREFIX}acquire_latency", f"{PREFIX}heartbeat_update", "lock_op_latency")
MS_NAMES = {f"{name}_ms": f"{name}_seconds" for name in _TIMED}
BUCKETS_S = {
    f"{PREFIX}acquire_latency_seconds": (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 2.0, 10.0),
    f"{PREFIX}failover_seconds": (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
    f"{PREFIX}heartbeat_update_seconds": (
        0.0005,
        0.001,
        0.002,
        0.005,
        0.01,
        0.025,
        0.05,
        0.1,
        0.25,
        0.5,
        1.0,
        3.0,
        10.0,
    ),
    "lock_op_latency_seconds": (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 60.0),
}


def metric_names() -> frozenset[str]:
    """Every name that a query may use. A histogram has three names."""
    names = set()
    for metric in METRICS:
        names |= {metric.name + suffix for suffix in _SUFFIXES} if metric.kind == "histogram" else {metric.name}
    return frozenset(names)


def words_outside_strings(query: str) -> list[re.Match[str]]:
    """The words of a PromQL expression that may be names: those outside of quotes."""
    return [found for found in _WORDS.finditer(query) if found[2] is not None]


def unknown_names(query: str) -> list[str]:
    """The names in a PromQL expression that have our prefix and are not in the table."""
    ours = {found[2] for found in words_outside_strings(query) if found[2].startswith(PREFIX)}
    return sorted(ours - metric_names())
