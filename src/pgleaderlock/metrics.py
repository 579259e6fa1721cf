"""An election's metrics for Prometheus: `ElectionMetrics(election)`, in any registry.

Events are counted as the election reports them; gauges (the state, the age of the heartbeat) are read at the moment of
the scrape, so that they are up to date. Several elections can share one registry: each metric is one family, with the
roles of all of them. Prometheus adds `instance`; `node_info` maps it to the node.

It must never slow an election down: counting is an addition, and rendering is done at the scrape.
"""

import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import ClassVar

from pgleaderlock._election.measuring import Histogram, Measured, Members, Reading
from pgleaderlock._election.metric_table import BUCKETS_S, METRICS, PREFIX, Metric
from pgleaderlock.election import LeaderElection
from pgleaderlock.gate import REASONS

try:
    from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError(
        "pgleaderlock.metrics needs prometheus_client: pip install 'pgleaderlock[metrics]'", name=error.name
    ) from error

__all__ = ["CONTENT_TYPE", "GATE_REASONS", "ElectionMetrics"]

CONTENT_TYPE = CONTENT_TYPE_LATEST
# Each series exists from the start, at 0: a rate needs the step from 0 to 1.
GATE_REASONS = REASONS

_Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class ElectionMetrics(Measured):
    """Measures one election until `close()`, and exports it in a registry.

    Roles that are added appear, roles that are removed disappear. A role name can be measured once per registry: two
    elections that share one need two registries.
    """

    def __init__(self, election: LeaderElection, registry: CollectorRegistry = REGISTRY) -> None:
        super().__init__(election)
        self._registry = registry
        self._closed = False
        self._shared = _Shared.joined(registry, self, election.roles)
        election.observe(self)

    def exposition(self) -> bytes:
        """Everything in the registry, in the text format of Prometheus; its content type is `CONTENT_TYPE`."""
        return generate_latest(self._registry)

    def close(self) -> None:
        """Stop measuring, and take the roles out of the registry."""
        self._closed = True
        self._roles.clear()
        self._shared.leave(self)

    def role_added(self, role: str) -> None:
        if not self._closed:
            self._shared.members.refuse_taken(self, [role])
            super().role_added(role)


class _Shared(Collector):
    """The one collector of a registry: an exposition may contain each family only once, even with several elections."""

    _all: ClassVar["weakref.WeakKeyDictionary[CollectorRegistry, _Shared]"] = weakref.WeakKeyDictionary()
    _lock = threading.Lock()

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = weakref.ref(registry)
        self.members = Members()

    @classmethod
    def joined(cls, registry: CollectorRegistry, member: ElectionMetrics, roles: Iterable[str]) -> "_Shared":
        """The registry's collector, with one more member; registered with the first."""
        with cls._lock:
            found = cls._all.get(registry)
            if found is None:
                found = cls(registry)
                registry.register(found)
                cls._all[registry] = found
            found.members.join(member, roles)
            return found

    def leave(self, member: ElectionMetrics) -> None:
        """The last member unregisters the collector."""
        with self._lock:
            self.members.leave(member)
            registry = self._registry()
            if registry is not None and not self.members.all and self._all.pop(registry, None) is not None:
                registry.unregister(self)

    def describe(self) -> Iterator[_Family]:
        """The names only: the registry then refuses other collectors with the same names."""
        return (_family(metric) for metric in METRICS)

    def collect(self) -> Iterator[_Family]:
        readings = self.members.readings()
        for metric in METRICS:
            family = _family(metric)
            if isinstance(family, HistogramMetricFamily):
                self._add_histogram(family, metric, readings)
            else:
                for reading in readings:
                    for labels, value in reading.samples(metric.name):
                        family.add_metric(labels, value)
            yield family

    def _add_histogram(self, family: HistogramMetricFamily, metric: Metric, readings: Iterable[Reading]) -> None:
        if metric.labels:
            for reading in readings:
                found = reading.counts.histograms[metric.name]
                family.add_metric([reading.role], found.buckets(), found.sum_s)
            return
        together = Histogram(BUCKETS_S[f"{PREFIX}heartbeat_update_seconds"])
        for member in self.members.all:
            together.add(member.beats)
        family.add_metric([], together.buckets(), together.sum_s)


def _family(metric: Metric) -> _Family:
    kinds: dict[str, type[_Family]] = {
        "gauge": GaugeMetricFamily,
        "counter": CounterMetricFamily,
        "histogram": HistogramMetricFamily,
    }
    return kinds[metric.kind](metric.name, metric.help, labels=metric.labels)
