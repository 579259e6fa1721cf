"""OpenTelemetry: the metrics of the table, and the spans of terms, works and fenced transactions, by the real SDK."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import psycopg
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from pgleaderlock import ConfigurationError, LeaderElection, LeaderToken, StaleEpoch, fenced, key_pair
from pgleaderlock._election.metric_table import BUCKETS_S, METRICS
from pgleaderlock.contrib.otel import ElectionTelemetry, instrument_name
from pgleaderlock.testing import FakeElection
from support.elections import STEADY, WAIT_S, ledger_dsns, opens, until
from support.server_side import terminate


class Telemetry:
    """What the SDK was told."""

    def __init__(self) -> None:
        self._exporter, self._reader = InMemorySpanExporter(), InMemoryMetricReader()
        self.tracers, self.meters = TracerProvider(), MeterProvider([self._reader])
        self.tracers.add_span_processor(SimpleSpanProcessor(self._exporter))

    def of(self, election: LeaderElection) -> ElectionTelemetry:
        return ElectionTelemetry(election, tracer_provider=self.tracers, meter_provider=self.meters)

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == f"pgleaderlock.{name}"]

    def metrics(self) -> dict[str, Any]:
        data = self._reader.get_metrics_data()
        scopes = [scope for resource in data.resource_metrics for scope in resource.scope_metrics] if data else []
        return {metric.name: metric for scope in scopes for metric in scope.metrics}

    def values(self, name: str) -> dict[tuple[str, ...], Any]:
        """By the values of the labels, sorted."""
        points = self.metrics()[f"pgleaderlock.{name}"].data.data_points
        return {tuple(sorted(map(str, point.attributes.values()))): point.value for point in points}


@pytest.fixture
def told() -> Iterator[Telemetry]:
    telemetry = Telemetry()
    yield telemetry
    telemetry.tracers.shutdown()
    telemetry.meters.shutdown()


@pytest.fixture
async def fake() -> AsyncIterator[FakeElection]:
    async with FakeElection("", "billing", node_id="node-1") as election:
        yield election


@pytest.fixture
def node_dsn(dsn: str) -> str:
    return ledger_dsns(dsn)["plain"]


async def test_every_metric_of_the_table_is_exported_with_its_labels(told: Telemetry, fake: FakeElection) -> None:
    telemetry = told.of(fake)
    await fake.win()
    telemetry.beaten(0.01)
    telemetry.failed_over("r", 1, 0.2)
    found = told.metrics()
    assert set(found) == {instrument_name(metric) for metric in METRICS}
    for metric in METRICS:
        shown = found[instrument_name(metric)]
        assert (shown.description, shown.unit) == (metric.help, "s" if metric.name.endswith("_seconds") else "")
        assert {tuple(point.attributes) for point in shown.data.data_points} == {metric.labels}
        if metric.kind == "histogram":
            assert {tuple(point.explicit_bounds) for point in shown.data.data_points} == {BUCKETS_S[metric.name]}
        assert getattr(shown.data, "is_monotonic", False) == (metric.kind == "counter")
    assert told.values("gate_open") == {("billing",): 1}
    assert told.values("acquired") == {("billing",): 1}
    assert told.values("lost")["billing", "released"] == 0
    telemetry.close()
    assert "pgleaderlock.gate_open" not in told.metrics()


async def test_elections_share_a_provider_and_a_role_stands_in_it_once(told: Telemetry, fake: FakeElection) -> None:
    first = told.of(fake)
    second = told.of(LeaderElection("", "mail", standalone=True))
    assert told.values("gate_open") == {("billing",): 0, ("mail",): 0}
    with pytest.raises(ConfigurationError, match="'mail' is measured"):
        told.of(LeaderElection("", "mail", standalone=True))
    second.close()
    told.of(LeaderElection("", "mail", standalone=True)).close()
    first.close()


async def worked(election: LeaderElection, end: Callable[[], Any]) -> "asyncio.Task[None]":
    """A work that runs until something else ends it."""
    begun = asyncio.Event()

    async def work(_: LeaderToken) -> None:
        begun.set()
        await asyncio.Event().wait()

    leading = asyncio.ensure_future(election.lead("billing", work))
    async with asyncio.timeout(WAIT_S):
        await begun.wait()
        await end()
    return leading


async def test_a_term_is_a_span_and_the_work_in_it_another(told: Telemetry, fake: FakeElection) -> None:
    telemetry = told.of(fake)
    await fake.win()
    epoch = fake.gate("billing").current_epoch
    leading = await worked(fake, lambda: fake.drain("billing"))
    (term,), (work,) = told.spans("term"), told.spans("work")
    leading.cancel()
    assert term.attributes == {
        "pgleaderlock.role": "billing",
        "pgleaderlock.epoch": epoch,
        "pgleaderlock.namespace": "pgleaderlock",
        "pgleaderlock.node_id": "node-1",
        "pgleaderlock.failover": False,
        "pgleaderlock.end_reason": "released",
    }
    assert (term.parent, term.status.status_code) == (None, StatusCode.UNSET)
    assert [event.name for event in term.events] == ["drain_began"]
    assert work.parent == term.context
    assert work.status.status_code == StatusCode.UNSET, "stopped with its term: no failure"
    telemetry.close()


async def test_a_work_that_fails_is_a_span_with_its_error(told: Telemetry, fake: FakeElection) -> None:
    telemetry = told.of(fake)
    await fake.win()

    async def fails(_: LeaderToken) -> None:
        raise KeyError("why")

    with pytest.raises(KeyError):
        await fake.lead("billing", fails)
    (work,) = told.spans("work")
    assert work.status.status_code == StatusCode.ERROR
    assert [event.name for event in work.events] == ["exception"]
    telemetry.close()


async def test_a_term_that_was_lost_says_so(told: Telemetry, node_dsn: str) -> None:
    role = "otel-lost"
    election = LeaderElection(node_dsn, role, **STEADY)
    telemetry = told.of(election)
    async with election:
        await opens(election, role)
        terminate(node_dsn, key_pair(role))
        await until(lambda: told.spans("term"))
    term = told.spans("term")[0]
    assert term.attributes is not None
    assert term.attributes["pgleaderlock.end_reason"] == "lost"
    assert term.status.status_code == StatusCode.ERROR
    telemetry.close()


async def test_what_is_open_ends_when_telling_ends(told: Telemetry, fake: FakeElection) -> None:
    telemetry = told.of(fake)
    await fake.win()

    async def close() -> None:
        telemetry.close()

    leading = await worked(fake, close)
    assert (len(told.spans("term")), len(told.spans("work"))) == (1, 1)
    leading.cancel()
    await fake.drain("billing")
    assert (len(told.spans("term")), len(told.spans("work"))) == (1, 1)


@pytest.mark.parametrize("how", ["async", "sync"])
async def test_a_fenced_transaction_is_a_span_of_its_callers_trace_linked_to_its_term(
    told: Telemetry, node_dsn: str, how: str
) -> None:
    role = f"otel-fenced-{how}"
    election = LeaderElection(node_dsn, role, **STEADY)
    telemetry = told.of(election)
    tracer = told.tracers.get_tracer("test")
    async with election:
        await opens(election, role)
        token = election.gate(role).require_leader()
        stale = LeaderToken(role, token.epoch + 1, token.holder_identity, token.namespace)
        with tracer.start_as_current_span("request") as request:
            if how == "async":
                async with await psycopg.AsyncConnection.connect(node_dsn, autocommit=True) as conn:
                    async with telemetry.fence(fenced(conn, token), token) as inside:
                        await inside.execute("SELECT 1")
                    with pytest.raises(StaleEpoch):
                        async with telemetry.fence(fenced(conn, stale), stale):
                            pass
            else:
                with psycopg.connect(node_dsn, autocommit=True) as blocking:
                    with telemetry.fence(fenced(blocking, token), token) as within:
                        within.execute("SELECT 1")
                    with pytest.raises(StaleEpoch), telemetry.fence(fenced(blocking, stale), stale):
                        pass
    (term,) = told.spans("term")
    done, refused = told.spans("fenced")
    assert done.parent is not None
    assert done.parent.span_id == request.get_span_context().span_id
    assert [link.context for link in done.links] == [term.context]
    assert done.attributes == {
        "pgleaderlock.role": role,
        "pgleaderlock.epoch": token.epoch,
        "pgleaderlock.namespace": "pgleaderlock",
    }
    assert (done.status.status_code, refused.status.status_code) == (StatusCode.UNSET, StatusCode.ERROR)
    assert refused.status.description is not None
    assert refused.status.description.startswith("StaleEpoch")
    telemetry.close()
