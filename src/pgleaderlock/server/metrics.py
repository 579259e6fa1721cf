"""The lock server's metrics: plain numbers that the event loop counts, shown to Prometheus when it asks.

prometheus-client's own counters take a lock for each step, on every request. Ours are counted by one thread only, so a
collector hands them over as they are. They live in a registry of their own: nothing global.

Must never carry the name of a lock or an owner: each would be a time series for ever.
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
# A parked acquire is measured on its own: it takes as long as its client asked for.
OPERATIONS = (*COUNTED, "acquire_wait", "batch", "get", "list", "break")
LATENCY = "lock_op_latency_seconds"
BOUNDS_S = BUCKETS_S[LATENCY]


class Metrics(Collector):
    """Counts, and shows. Every series is there from the start, at zero: a rate needs the step from nothing to one."""

    def __init__(self, found: Found | None = None) -> None:
        """`found`: what opening the store has found."""
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
