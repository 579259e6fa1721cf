"""The numbers behind the metrics of an election on this node.

`metrics` exports them to Prometheus, `contrib.otel` to OpenTelemetry: both read the same table (`metric_table`) and the
same numbers. Events are counted as the election reports them; gauges are read at the scrape.

Must never slow an election down: counting is an addition.
"""

import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import get_args

from pgleaderlock._base.version import VERSION
from pgleaderlock._election.metric_table import BUCKETS_S, METRICS, PREFIX
from pgleaderlock._election.role import STANDINGS, standing
from pgleaderlock.election import LeaderElection
from pgleaderlock.errors import ConfigurationError
from pgleaderlock.gate import REASONS
from pgleaderlock.models import LockState
from pgleaderlock.observer import AttemptResult, ElectionObserver, LossReason

__all__ = ["Histogram", "Measured", "Members", "Reading"]

Samples = list[tuple[tuple[str, ...], float]]


class Histogram:
    """A histogram. One thread observes; a reader may be one observation behind."""

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self._bounds_s = bounds_s
        self.counts = [0] * (len(bounds_s) + 1)
        self.sum_s = 0.0

    def observe(self, value_s: float) -> None:
        self.counts[bisect_left(self._bounds_s, value_s)] += 1
        self.sum_s += value_s

    def add(self, other: "Histogram") -> None:
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.sum_s += other.sum_s

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative buckets, as in Prometheus: each one counts the smaller ones as well."""
        total = 0
        shown = []
        for bound, count in zip((*map(str, self._bounds_s), "+Inf"), list(self.counts), strict=True):
            total += count
            shown.append((bound, float(total)))
        return shown


@dataclass(slots=True)
class _Counts:
    """The counters of one role on this node."""

    elections: int = 0
    failovers: int = 0
    acquired: int = 0
    epoch: int = 0
    work_failures: int = 0
    lost: dict[str, int] = field(default_factory=lambda: dict.fromkeys(get_args(LossReason), 0))
    attempts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(get_args(AttemptResult), 0))
    histograms: dict[str, Histogram] = field(
        default_factory=lambda: {
            metric.name: Histogram(BUCKETS_S[metric.name])
            for metric in METRICS
            if metric.kind == "histogram" and metric.labels
        }
    )

    def attempted(self, result: AttemptResult) -> None:
        self.attempts[result] += 1
        # A try that did not reach the database is not an election.
        self.elections += result != "error"

    def won(self, epoch: int, latency_s: float, from_other: bool) -> None:
        self.acquired += 1
        self.failovers += from_other
        self.saw(epoch)
        self.observe("acquire_latency_seconds", latency_s)

    def saw(self, epoch: int) -> None:
        self.epoch = max(self.epoch, epoch)

    def observe(self, name: str, value_s: float) -> None:
        self.histograms[PREFIX + name].observe(value_s)

    def failed(self) -> None:
        self.work_failures += 1


@dataclass(frozen=True, slots=True)
class Reading:
    """One role at the moment of the scrape."""

    role: str
    node: str
    namespace: str
    hold: str
    counts: _Counts
    state: LockState
    gate_open: bool
    candidate: bool
    standing: str
    blocked: dict[str, int]
    heartbeat_age_s: float | None
    tenure_s: float
    draining: bool
    work_failed: bool

    def samples(self, name: str) -> Samples:
        """The values of one metric, by its labels."""
        counts, role = self.counts, self.role
        found: Samples
        match name.removeprefix(PREFIX):
            case "state":
                found = [((role, state.value), state is self.state) for state in LockState]
            case "role_state":
                found = [((role, name), name == self.standing) for name in STANDINGS]
            case "lost_total":
                found = [((role, reason), times) for reason, times in counts.lost.items()]
            case "acquire_attempts_total":
                found = [((role, result), times) for result, times in counts.attempts.items()]
            case "gate_blocked_total":
                found = [((role, reason), times) for reason, times in self.blocked.items()]
            case "heartbeat_age_seconds":
                # Without a session there is no age.
                found = [] if self.heartbeat_age_s is None else [((role,), self.heartbeat_age_s)]
            case "node_info":
                found = [((role, self.node, self.namespace, VERSION, self.hold), 1.0)]
            case plain:
                found = [((role,), self._plain(plain))]
        return found

    def _plain(self, name: str) -> float:
        values = {
            "is_leader": self.state is LockState.LEADER,
            "gate_open": self.gate_open,
            "candidate": self.candidate,
            "epoch": self.counts.epoch,
            "tenure_seconds": self.tenure_s,
            "draining": self.draining,
            "work_failed": self.work_failed,
            "work_failures_total": self.counts.work_failures,
            "elections_total": self.counts.elections,
            "failovers_total": self.counts.failovers,
            "acquired_total": self.counts.acquired,
        }
        return float(values[name])


class Measured(ElectionObserver):
    """Counts the events of one election. A subclass registers and exports the numbers."""

    def __init__(self, election: LeaderElection) -> None:
        self._election = election
        self._roles: dict[str, _Counts] = {}
        self._beats = Histogram(BUCKETS_S[f"{PREFIX}heartbeat_update_seconds"])

    # --- Hooks

    def role_added(self, role: str) -> None:
        self._roles.setdefault(role, _Counts())

    def role_removed(self, role: str) -> None:
        self._roles.pop(role, None)

    def attempted(self, role: str, result: AttemptResult) -> None:
        if counts := self._roles.get(role):
            counts.attempted(result)

    def acquired(self, role: str, epoch: int, latency_s: float, from_other: bool) -> None:
        if counts := self._roles.get(role):
            counts.won(epoch, latency_s, from_other)

    def failed_over(self, role: str, epoch: int, failover_s: float) -> None:
        if counts := self._roles.get(role):
            counts.observe("failover_seconds", failover_s)

    def lost(self, role: str, epoch: int, reason: LossReason) -> None:
        if counts := self._roles.get(role):
            counts.lost[reason] += 1

    def work_failed(self, role: str, epoch: int, error: BaseException) -> None:
        if counts := self._roles.get(role):
            counts.failed()

    def beaten(self, took_s: float) -> None:
        self._beats.observe(took_s)

    # --- At a scrape

    def measured(self) -> frozenset[str]:
        """The roles that are exported."""
        return frozenset(self._roles)

    def readings(self) -> Iterator[Reading]:
        election = self._election
        age_s = election.heartbeat_age_s()
        for role, counts in list(self._roles.items()):
            try:
                leader = election.leader(role)
                gate, state = election.gate(role), election.state(role)
                failed = election.work_error(role) is not None
                yield Reading(
                    role,
                    election.node_id,
                    election.namespace,
                    election.hold,
                    counts,
                    state=state,
                    standing=standing(state, gate.shut_because, work_failed=failed),
                    gate_open=gate.is_leader,
                    candidate=election.competes(role),
                    blocked={**dict.fromkeys(REASONS, 0), **gate.blocked},
                    heartbeat_age_s=age_s,
                    tenure_s=election.tenure_s(role) or 0.0,
                    draining=election.draining(role),
                    work_failed=failed,
                )
            except ConfigurationError:  # removed since we began
                continue
            if leader is not None:
                counts.saw(leader.epoch)

    @property
    def beats(self) -> Histogram:
        return self._beats


class Members:
    """The elections that are exported in one place, where each role can appear once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.all: tuple[Measured, ...] = ()

    def join(self, member: Measured, roles: Iterable[str]) -> None:
        with self._lock:
            self.refuse_taken(member, roles)
            self.all = (*self.all, member)

    def leave(self, member: Measured) -> None:
        with self._lock:
            self.all = tuple(other for other in self.all if other is not member)

    def refuse_taken(self, member: Measured, roles: Iterable[str]) -> None:
        for other in self.all:
            taken = sorted(other.measured() & set(roles)) if other is not member else []
            if taken:
                raise ConfigurationError(
                    f"role {taken[0]!r} is measured in this registry already, by another election: give each of them a "
                    "registry of its own, or close() the other one's metrics"
                )

    def readings(self) -> list[Reading]:
        return [reading for member in self.all for reading in member.readings()]
