"""An election's metrics for Prometheus: `ElectionMetrics(election)`, in any registry.

What happens is counted when the election tells of it; what *is* (the state, the age of the heartbeat) is read at the
moment of the scrape, so that a number is true when it is asked for. Several elections share one registry: each metric
is one family, with the roles of all of them. No label names the node: Prometheus adds `instance` itself.

Imports prometheus-client (the extra `metrics`), `observer`, `models`, `errors`, the table of metrics, and the election
for its type only. It must never slow an election down: counting is an addition, and rendering is the scraper's time.
"""

import threading
import weakref
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, get_args

from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from pgleaderlock._metric_table import METRICS, PREFIX, Metric
from pgleaderlock.errors import ConfigurationError
from pgleaderlock.models import LockState
from pgleaderlock.observer import AttemptResult, ElectionObserver, LossReason

if TYPE_CHECKING:
    from pgleaderlock.election import LeaderElection

__all__ = ["CONTENT_TYPE", "GATE_REASONS", "ElectionMetrics"]

CONTENT_TYPE = CONTENT_TYPE_LATEST
ACQUIRE_BUCKETS_MS = (2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 500.0, 2_000.0, 10_000.0)
HEARTBEAT_BUCKETS_MS = (0.5, 1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1_000.0, 3_000.0, 10_000.0)
# Why a gate refuses (docs/gate.md). Each is there from the start: a rate needs the step from nothing to one.
GATE_REASONS = (
    "disabled",
    "vetoed",
    "draining",
    "never_led",
    "lost",
    "released",
    "waiting",
    "late_heartbeat",
    "forked",
    "epoch_changed",
)

_Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
_Samples = list[tuple[tuple[str, ...], float]]


class _Histogram:
    """Counts by size. One thread observes; a reader may be one observation behind."""

    def __init__(self, bounds_ms: tuple[float, ...]) -> None:
        self._bounds_ms = bounds_ms
        self.counts = [0] * (len(bounds_ms) + 1)
        self.sum_ms = 0.0

    def observe(self, value_ms: float) -> None:
        self.counts[bisect_left(self._bounds_ms, value_ms)] += 1
        self.sum_ms += value_ms

    def add(self, other: "_Histogram") -> None:
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.sum_ms += other.sum_ms

    def buckets(self) -> list[tuple[str, float]]:
        """As Prometheus wants them: each counts those below it as well."""
        total = 0
        shown = []
        for bound, count in zip((*map(str, self._bounds_ms), "+Inf"), list(self.counts), strict=True):
            total += count
            shown.append((bound, float(total)))
        return shown


@dataclass(slots=True)
class _Counts:
    """What has happened to one role on this node. All of it begins at zero."""

    elections: int = 0
    failovers: int = 0
    acquired: int = 0
    epoch: int = 0
    lost: dict[str, int] = field(default_factory=lambda: dict.fromkeys(get_args(LossReason), 0))
    attempts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(get_args(AttemptResult), 0))
    latency: _Histogram = field(default_factory=lambda: _Histogram(ACQUIRE_BUCKETS_MS))


@dataclass(frozen=True, slots=True)
class _Reading:
    """One role at the moment of the scrape."""

    role: str
    counts: _Counts
    state: LockState
    gate_open: bool
    blocked: dict[str, int]
    heartbeat_age_s: float | None
    tenure_s: float
    draining: bool

    def samples(self, name: str) -> _Samples:
        """The values of one metric, by its labels."""
        counts, role = self.counts, self.role
        match name.removeprefix(PREFIX):
            case "state":
                return [((role, state.value), state is self.state) for state in LockState]
            case "lost_total":
                return [((role, reason), times) for reason, times in counts.lost.items()]
            case "acquire_attempts_total":
                return [((role, result), times) for result, times in counts.attempts.items()]
            case "gate_blocked_total":
                return [((role, reason), times) for reason, times in self.blocked.items()]
            case "heartbeat_age_ms":
                # Without a session there is no age: a number would be invented.
                return [] if self.heartbeat_age_s is None else [((role,), self.heartbeat_age_s * 1_000)]
            case plain:
                return [((role,), self._plain(plain))]

    def _plain(self, name: str) -> float:
        values = {
            "is_leader": self.state is LockState.LEADER,
            "gate_open": self.gate_open,
            "epoch": self.counts.epoch,
            "tenure_seconds": self.tenure_s,
            "draining": self.draining,
            "elections_total": self.counts.elections,
            "failovers_total": self.counts.failovers,
            "acquired_total": self.counts.acquired,
        }
        return float(values[name])


class ElectionMetrics(ElectionObserver):
    """Measures one election from now until `close()`, and shows it in a registry.

    Roles that are added appear, roles that are removed disappear. A role name can be measured once in a registry: two
    elections that share one need two registries.
    """

    def __init__(self, election: "LeaderElection", registry: CollectorRegistry = REGISTRY) -> None:
        self._election = election
        self._registry = registry
        self._roles: dict[str, _Counts] = {}
        self._beats = _Histogram(HEARTBEAT_BUCKETS_MS)
        self._closed = False
        self._shared = _Shared.joined(registry, self, election.roles)
        election.observe(self)

    def exposition(self) -> bytes:
        """Everything in the registry, in the text format of Prometheus; its content type is `CONTENT_TYPE`."""
        return generate_latest(self._registry)

    def close(self) -> None:
        """Measure no more, and take the roles out of the registry."""
        self._closed = True
        self._roles.clear()
        self._shared.leave(self)

    # --- Told by the election

    def role_added(self, role: str) -> None:
        if not self._closed and role not in self._roles:
            self._shared.refuse_taken(self, [role])
            self._roles[role] = _Counts()

    def role_removed(self, role: str) -> None:
        self._roles.pop(role, None)

    def attempted(self, role: str, result: AttemptResult) -> None:
        if counts := self._roles.get(role):
            counts.attempts[result] += 1
            # A database that was away has held no election.
            counts.elections += result != "error"

    def acquired(self, role: str, epoch: int, latency_s: float, from_other: bool) -> None:
        if counts := self._roles.get(role):
            counts.acquired += 1
            counts.failovers += from_other
            counts.epoch = max(counts.epoch, epoch)
            counts.latency.observe(latency_s * 1_000)

    def lost(self, role: str, epoch: int, reason: LossReason) -> None:
        if counts := self._roles.get(role):
            counts.lost[reason] += 1

    def beaten(self, took_s: float) -> None:
        self._beats.observe(took_s * 1_000)

    # --- Asked by the scraper

    def measured(self) -> frozenset[str]:
        """The roles that are shown."""
        return frozenset(self._roles)

    def readings(self) -> Iterator[_Reading]:
        election = self._election
        age_s = election.heartbeat_age_s()
        for role, counts in list(self._roles.items()):
            try:
                leader = election.leader(role)
                gate = election.gate(role)
                yield _Reading(
                    role,
                    counts,
                    state=election.state(role),
                    gate_open=gate.is_leader,
                    blocked={**dict.fromkeys(GATE_REASONS, 0), **gate.blocked},
                    heartbeat_age_s=age_s,
                    tenure_s=election.tenure_s(role) or 0.0,
                    draining=election.draining(role),
                )
            except ConfigurationError:  # removed since we began
                continue
            if leader is not None:
                counts.epoch = max(counts.epoch, leader.epoch)

    @property
    def beats(self) -> _Histogram:
        return self._beats


class _Shared(Collector):
    """The one collector of a registry: a family may stand in an exposition once, whoever contributes to it."""

    _all: ClassVar["weakref.WeakKeyDictionary[CollectorRegistry, _Shared]"] = weakref.WeakKeyDictionary()
    _lock = threading.Lock()

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = weakref.ref(registry)
        self._members: list[ElectionMetrics] = []

    @classmethod
    def joined(cls, registry: CollectorRegistry, member: ElectionMetrics, roles: Iterable[str]) -> "_Shared":
        """The registry's, with one more member; registered if it is the first."""
        with cls._lock:
            found = cls._all.get(registry)
            if found is None:
                found = cls(registry)
                registry.register(found)
                cls._all[registry] = found
            found.refuse_taken(member, roles)
            found._members = [*found._members, member]
            return found

    def leave(self, member: ElectionMetrics) -> None:
        """The last one takes the collector along."""
        with self._lock:
            self._members = [other for other in self._members if other is not member]
            registry = self._registry()
            if registry is not None and not self._members and self._all.pop(registry, None) is not None:
                registry.unregister(self)

    def refuse_taken(self, member: ElectionMetrics, roles: Iterable[str]) -> None:
        for other in self._members:
            taken = sorted(other.measured() & set(roles)) if other is not member else []
            if taken:
                raise ConfigurationError(
                    f"role {taken[0]!r} is measured in this registry already, by another election: give each of them a "
                    "registry of its own, or close() the other one's metrics"
                )

    def describe(self) -> Iterator[_Family]:
        """The names alone: a registry refuses others that would use them."""
        return (_family(metric) for metric in METRICS)

    def collect(self) -> Iterator[_Family]:
        readings = [reading for member in self._members for reading in member.readings()]
        for metric in METRICS:
            family = _family(metric)
            if isinstance(family, HistogramMetricFamily):
                self._add_histogram(family, metric, readings)
            else:
                for reading in readings:
                    for labels, value in reading.samples(metric.name):
                        family.add_metric(labels, value)
            yield family

    def _add_histogram(self, family: HistogramMetricFamily, metric: Metric, readings: Iterable[_Reading]) -> None:
        if metric.labels:
            for reading in readings:
                latency = reading.counts.latency
                family.add_metric([reading.role], latency.buckets(), latency.sum_ms)
            return
        together = _Histogram(HEARTBEAT_BUCKETS_MS)
        for member in self._members:
            together.add(member.beats)
        family.add_metric([], together.buckets(), together.sum_ms)


def _family(metric: Metric) -> _Family:
    kinds: dict[str, type[_Family]] = {
        "gauge": GaugeMetricFamily,
        "counter": CounterMetricFamily,
        "histogram": HistogramMetricFamily,
    }
    return kinds[metric.kind](metric.name, metric.help, labels=metric.labels)
