"""OpenTelemetry: spans for terms, works and fenced transactions, metrics of an election. Needs the extra `otel`.

    telemetry = ElectionTelemetry(election)
    async with telemetry.fence(fenced(conn, token), token): …

A term and a work may last for months, so each is a separate trace and never the current span: the operations within a
work have their own traces, which are complete when they end. The span of a fenced transaction belongs to the trace in
which it is created, and is linked to its term. A span is exported when it has ended; the metrics show what is going on.

Must never slow an election down: hooks start and end spans, which a batch processor exports on its own thread.
"""

import threading
import weakref
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from typing import Any, ClassVar, TypeVar, overload

from pgleaderlock._base.version import VERSION
from pgleaderlock._election.measuring import Measured, Members
from pgleaderlock._election.metric_table import BUCKETS_S, METRICS, PREFIX, Metric
from pgleaderlock.election import LeaderElection
from pgleaderlock.models import LeaderToken
from pgleaderlock.observer import LossReason

try:
    from opentelemetry import context, metrics, trace
    from opentelemetry.metrics import CallbackOptions, Histogram, Meter, MeterProvider, Observation
    from opentelemetry.trace import Link, Span, Status, StatusCode, TracerProvider
except ImportError as error:
    raise ImportError(
        "pgleaderlock.contrib.otel needs opentelemetry: pip install 'pgleaderlock[otel]'", name=error.name
    ) from error

__all__ = ["ElectionTelemetry", "instrument_name"]

SCOPE = "pgleaderlock"
T = TypeVar("T")


def instrument_name(metric: Metric) -> str:
    """The name of a metric in OpenTelemetry. A Prometheus exporter turns it into the name in `docs/metrics.md`
    again."""
    name = metric.name.removeprefix(PREFIX).removesuffix("_total").removesuffix("_seconds")
    return f"{SCOPE}.{name}"


class ElectionTelemetry(Measured):
    """Reports one election to OpenTelemetry until `close()`.

    Without providers, it uses the global ones: set these first. Each role name can be measured once per meter provider.
    """

    def __init__(
        self,
        election: LeaderElection,
        *,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
    ) -> None:
        super().__init__(election)
        self._tracer = trace.get_tracer(SCOPE, VERSION, tracer_provider)
        self._instruments = _Instruments.of(meter_provider or metrics.get_meter_provider())
        self._terms: dict[tuple[str, int], Span] = {}
        self._works: defaultdict[tuple[str, int], list[Span]] = defaultdict(list)
        self._closed = False
        self._instruments.members.join(self, election.roles)
        election.observe(self)

    def close(self) -> None:
        """Stop reporting, and end the open spans."""
        self._closed = True
        self._roles.clear()
        self._instruments.members.leave(self)
        works, self._works = self._works, defaultdict(list)
        terms, self._terms = self._terms, {}
        for span in (*(span for spans in works.values() for span in spans), *terms.values()):
            span.end()

    @overload
    def fence(self, block: AbstractAsyncContextManager[T], token: LeaderToken) -> AbstractAsyncContextManager[T]: ...

    @overload
    def fence(self, block: AbstractContextManager[T], token: LeaderToken) -> AbstractContextManager[T]: ...

    def fence(self, block: Any, token: LeaderToken) -> Any:
        """A span around a `fenced` block of any driver: `async with` or `with`, depending on the block.

        It begins before the transaction, ends after its commit, and is current meanwhile, so that the spans of
        statements belong to it. An exception, such as `StaleEpoch`, is recorded.
        """
        term = self._terms.get((token.role, token.epoch))
        span = self._tracer.start_as_current_span(
            "pgleaderlock.fenced",
            attributes={**_named(token.role, token.epoch), "pgleaderlock.namespace": token.namespace},
            links=[Link(term.get_span_context())] if term is not None else [],
        )
        return (_within_async if isinstance(block, AbstractAsyncContextManager) else _within)(span, block)

    # --- Hooks

    def role_added(self, role: str) -> None:
        if not self._closed:
            self._instruments.members.refuse_taken(self, [role])
            super().role_added(role)

    def acquired(self, role: str, epoch: int, latency_s: float, from_other: bool) -> None:
        super().acquired(role, epoch, latency_s, from_other)
        if self._closed:
            return
        self._instruments.latency.record(latency_s, {"role": role})
        attributes = {
            **_named(role, epoch),
            "pgleaderlock.namespace": self._election.namespace,
            "pgleaderlock.node_id": self._election.node_id,
            "pgleaderlock.failover": from_other,
        }
        self._terms[role, epoch] = self._tracer.start_span(
            "pgleaderlock.term", context.Context(), attributes=attributes
        )

    def failed_over(self, role: str, epoch: int, failover_s: float) -> None:
        super().failed_over(role, epoch, failover_s)
        if not self._closed:
            self._instruments.failover.record(failover_s, {"role": role})

    def lost(self, role: str, epoch: int, reason: LossReason) -> None:
        super().lost(role, epoch, reason)
        if (span := self._terms.pop((role, epoch), None)) is not None:
            span.set_attribute("pgleaderlock.end_reason", reason)
            if reason == "lost":
                span.set_status(Status(StatusCode.ERROR, "the session was lost"))
            span.end()

    def work_began(self, role: str, epoch: int) -> None:
        if self._closed:
            return
        term = self._terms.get((role, epoch))
        parent = context.Context() if term is None else trace.set_span_in_context(term, context.Context())
        span = self._tracer.start_span("pgleaderlock.work", parent, attributes=_named(role, epoch))
        self._works[role, epoch].append(span)

    def work_ended(self, role: str, epoch: int, error: BaseException | None) -> None:
        spans = self._works.get((role, epoch))
        if not spans:
            return
        _end(spans.pop(0), error)
        if not spans:
            del self._works[role, epoch]

    def drain_began(self, role: str) -> None:
        for (name, _), span in list(self._terms.items()):
            if name == role:
                span.add_event("drain_began")

    def beaten(self, took_s: float) -> None:
        super().beaten(took_s)
        if not self._closed:
            self._instruments.beats.record(took_s)


@asynccontextmanager
async def _within_async(span: AbstractContextManager[Span], block: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
    with span:
        async with block as target:
            yield target


@contextmanager
def _within(span: AbstractContextManager[Span], block: AbstractContextManager[T]) -> Iterator[T]:
    with span, block as target:
        yield target


def _named(role: str, epoch: int) -> dict[str, str | int]:
    return {"pgleaderlock.role": role, "pgleaderlock.epoch": epoch}


def _end(span: Span, error: BaseException | None) -> None:
    if error is not None:
        span.record_exception(error)
        span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))
    span.end()


class _Instruments:
    """The instruments of one meter provider, created once for all elections that report to it."""

    _all: ClassVar["weakref.WeakKeyDictionary[MeterProvider, _Instruments]"] = weakref.WeakKeyDictionary()
    _lock = threading.Lock()

    def __init__(self, provider: MeterProvider) -> None:
        self.members = Members()
        meter = metrics.get_meter(SCOPE, VERSION, provider)
        self._observed = [self._made(meter, metric) for metric in METRICS if metric.kind != "histogram"]
        self.latency = _histogram(meter, f"{PREFIX}acquire_latency_seconds")
        self.failover = _histogram(meter, f"{PREFIX}failover_seconds")
        self.beats = _histogram(meter, f"{PREFIX}heartbeat_update_seconds")

    @classmethod
    def of(cls, provider: MeterProvider) -> "_Instruments":
        with cls._lock:
            found = cls._all.get(provider)
            if found is None:
                found = cls._all[provider] = cls(provider)
            return found

    def _made(self, meter: Meter, metric: Metric) -> object:
        make = meter.create_observable_counter if metric.kind == "counter" else meter.create_observable_gauge

        def observe(_: CallbackOptions) -> Iterable[Observation]:
            return self._samples(metric)

        return make(instrument_name(metric), callbacks=[observe], unit=_unit(metric), description=metric.help)

    def _samples(self, metric: Metric) -> Iterator[Observation]:
        for reading in self.members.readings():
            for labels, value in reading.samples(metric.name):
                yield Observation(value, dict(zip(metric.labels, labels, strict=True)))


def _histogram(meter: Meter, name: str) -> Histogram:
    (metric,) = (metric for metric in METRICS if metric.name == name)
    return meter.create_histogram(
        instrument_name(metric),
        unit=_unit(metric),
        description=metric.help,
        explicit_bucket_boundaries_advisory=BUCKETS_S[name],
    )


def _unit(metric: Metric) -> str:
    """The unit of an instrument. A Prometheus exporter turns it into a suffix, and would turn "1" into `_ratio`."""
    return "s" if metric.name.endswith("_seconds") else ""
