"""The lock server's metrics: plain numbers that the event loop counts, exported at Prometheus's scrape.

prometheus-client's own counters take a mutex for each increment, on every request. Only one thread counts ours, so a
collector exports the numbers directly. They have their own registry, not the global one.

Must never have the name of a lock or an owner as a label: each name would create a time series that never ends.
"""

from bisect import bisect_left
from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from pgleaderlock._election.metric_table import BUCKETS_S
from pgleaderlock.server.store import Found

__all__ = ["CONTENT_TYPE", "OPERATIONS", "RESULTS", "Metrics"]

CONTENT_TYPE = CONTENT_TYPE_LATEST.encode()
COUNTED = ("acquire", "renew", "release")
RESULTS = ("success", "fail", "busy")
# A waiting acquire is measured separately: it takes as long as its client asked for.
OPERATIONS = (*COUNTED, "acquire_wait", "batch", "get", "list", "break")
LATENCY = "lock_op_latency_seconds"
BOUNDS_S = BUCKETS_S[LATENCY]


class Metrics(Collector):
    """Counts and exports. Every series exists from the start, at zero: a rate needs the step from 0 to 1."""

    def __init__(self, found: Found | None = None) -> None:
        """`found`: the result of opening the store."""
        self._found = found or Found("")
        self._results = {(op, result): 0 for op in COUNTED for result in RESULTS}
        self._db_busy = dict.fromkeys(OPERATIONS, 0)
        self._latency_buckets = {op: [0] * (len(BOUNDS_S) + 1) for op in OPERATIONS}
        self._latency_sum_s = dict.fromkeys(OPERATIONS, 0.0)
        self.locks_held = 0
        self.lock_expired = 0
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def count(self, op: str, result: str) -> None:
        self._results[op, result] += 1

    def count_busy(self, op: str) -> None:
        self._db_busy[op] += 1

    def observe(self, op: str, latency_s: float) -> None:
        self._latency_buckets[op][bisect_left(BOUNDS_S, latency_s)] += 1
        self._latency_sum_s[op] += latency_s

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]:
        for op in COUNTED:
            family = CounterMetricFamily(f"lock_{op}", f"Requests to {op}, by result", labels=["result"])
            for result in RESULTS:
                family.add_metric([result], self._results[op, result])
            yield family
        yield self._latency()
        busy = CounterMetricFamily("lock_db_busy", "Operations refused because the store was contended", labels=["op"])
        for op, times in self._db_busy.items():
            busy.add_metric([op], times)
        yield busy
        yield GaugeMetricFamily("locks_held", "Leases that are good, as of the last sweep", self.locks_held)
        yield CounterMetricFamily("lock_expired", "Leases that ended by expiry", self.lock_expired)
        unclean, lost = self._found.unclean, self._found.lost is not None
        yield GaugeMetricFamily("lock_store_unclean", "Whether the run before this one did not end in order", unclean)
        yield GaugeMetricFamily("lock_store_damaged", "Whether the store was damaged when it was opened", lost)

    def _latency(self) -> HistogramMetricFamily:
        family = HistogramMetricFamily(LATENCY, "Time an operation took in the server", labels=["op"])
        bounds = [*(str(bound) for bound in BOUNDS_S), "+Inf"]
        for op, counts in self._latency_buckets.items():
            total = 0
            buckets = []
            for bound, count in zip(bounds, counts, strict=True):
                total += count
                buckets.append((bound, float(total)))
            family.add_metric([op], buckets, self._latency_sum_s[op])
        return family
