"""What the client decides, without a network: its HTTP, its deadlines, its retries, its heartbeat.

The network is played by the test: it runs a flow step by step and says what came back, on a clock of its own.
"""

import inspect
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import h11
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pgleaderlock import client as public
from pgleaderlock.client import _flows as flows
from pgleaderlock.client import _http1 as http1
from pgleaderlock.client._core import BaseClient, Core, NoAnswer, Pause, RetryDelays, Send
from pgleaderlock.client._flows import renew_together
from pgleaderlock.client._http1 import BadResponse, HttpConnection, HttpRequest, HttpResponse
from pgleaderlock.client._lease import BaseLease, HeartbeatPlan, LeaseState, margin_s
from pgleaderlock.client._wire import Granted
from pgleaderlock.errors import (
    ConfigurationError,
    LeaseLost,
    LockHeld,
    LockServerError,
    LockServerUnreachable,
)

T = TypeVar("T")
DOCS = Path(__file__).parents[2] / "docs" / "client.md"


class StillClock:
    """Moves only when the test says so."""

    def __init__(self) -> None:
        self.at = 1000.0

    def now(self) -> float:
        return self.at

    async def sleep(self, delay_s: float) -> None:
        self.at += delay_s


def make_core(clock: StillClock, *urls: str, retries: RetryDelays | None = None) -> Core:
    return Core(
        urls or ("http://one:1",),
        token=None,
        owner_id="me",
        connect_timeout_s=1.0,
        request_timeout_s=5.0,
        connections_max=8,
        retries=retries or RetryDelays(),
        ssl_context=None,
        clock=clock,
    )


@dataclass
class Network:
    """Plays servers: each answer is a reply, a lost one, or a function that looks at the send first."""

    clock: StillClock
    answers: list[Any]
    sends: list[Send] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)

    def play(self, flow: "flows.Flow[T]") -> T:
        try:
            step = next(flow)
            while True:
                if isinstance(step, Pause):
                    self.pauses.append(step.delay_s)
                    self.clock.at += step.delay_s
                    step = flow.send(None)
                    continue
                step.sent_at = self.clock.now()
                self.sends.append(step)
                answer = self.answers.pop(0)
                if callable(answer):
                    answer = answer(step)
                step = flow.throw(answer) if isinstance(answer, NoAnswer) else flow.send(answer)
        except StopIteration as done:
            value: T = done.value
            return value

    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(send.request.body) for send in self.sends]


def reply(status: int, **fields: Any) -> HttpResponse:
    return HttpResponse(status, json.dumps(fields).encode())


def granted(*, token: int = 7, waited_ms: int = 0, replayed: bool = False, **more: int) -> HttpResponse:
    return reply(
        200,
        acquired=True,
        lock_name="job",
        owner_id="me",
        lease_id="L",
        fencing_token=token,
        lease_expiry_ms=1,
        waited_ms=waited_ms,
        replayed=replayed,
        **more,
    )


def held(retry_ms: int = 500) -> HttpResponse:
    return reply(
        409, acquired=False, lock_name="job", current_owner_id="you", current_expiry_ms=5, recommended_retry_ms=retry_ms
    )


def later(clock: StillClock, by_s: float, answer: Any) -> Callable[[Send], Any]:
    def play(_send: Send) -> Any:
        clock.at += by_s
        return answer

    return play


def make_lease(clock: StillClock, ttl_s: float = 10.0, counted_from: float | None = None) -> BaseLease:
    grant = Granted("job", "me", "L", 7, 0, False)
    return BaseLease(grant, ttl_s, clock.now() if counted_from is None else counted_from, clock)


def acquire(core: Core, network: Network, ttl_s: float = 10.0, wait_s: float = 0.0) -> BaseLease:
    attempt = flows.new_attempt(core, "job", ttl_s, wait_s)
    return network.play(flows.acquire(attempt, lambda g, t, at: BaseLease(g, t, at, core.clock), wait_s))


@pytest.fixture
def clock() -> StillClock:
    return StillClock()


# -- HTTP -------------------------------------------------------------------------------------------------------------


def read(data: bytes, cuts: Sequence[int] = (), *, ends: bool = True) -> tuple[int, bytes, bool] | None:
    """What our side makes of it, in pieces. None: no complete reply. The last is whether the connection stays."""
    connection = HttpConnection(b"Host: x\r\n")
    connection.encode(HttpRequest(b"GET", b"/"))
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    pieces = [data[a:b] for a, b in itertools.pairwise(places)] + ([b""] if ends else [])
    for number, piece in enumerate(pieces):
        found = connection.feed(piece)
        if found is not None:
            whole = number == len(pieces) - 1 - int(ends)
            return found.status, found.body, connection.reusable and whole
    return None


def read_by_h11(data: bytes) -> tuple[int, bytes] | None:
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
    connection.send(h11.EndOfMessage())
    status, body = 0, b""
    try:
        connection.receive_data(data)
        connection.receive_data(b"")
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                return status, body
            elif event is h11.NEED_DATA or isinstance(event, h11.ConnectionClosed) or event is h11.PAUSED:
                return None
    except h11.RemoteProtocolError:
        return None


@st.composite
def sound_replies(draw: st.DrawFn) -> bytes:
    server = h11.Connection(h11.SERVER)
    server.receive_data(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    server.next_event()
    server.next_event()
    out = b""
    if draw(st.booleans()):
        out += server.send(h11.InformationalResponse(status_code=103, headers=[("X-A", "b")])) or b""
    headers = [("X-Thing", draw(st.text("ab c,;=", max_size=8)).strip()), ("Retry-After", "3")]
    body = draw(st.lists(st.binary(min_size=1, max_size=40), max_size=4))
    if draw(st.booleans()):
        headers.append(("Content-Length", str(sum(map(len, body)))))
    status = draw(st.sampled_from([200, 201, 204, 400, 409, 503]))
    if status == 204:
        body, headers = [], headers[:2]
    out += server.send(h11.Response(status_code=status, headers=headers)) or b""
    for part in body:
        out += server.send(h11.Data(data=part)) or b""
    return out + (server.send(h11.EndOfMessage()) or b"")


@given(data=sound_replies(), cuts=st.lists(st.integers(0, 400), max_size=6))
@settings(max_examples=300, deadline=None)
def test_a_sound_reply_is_read_as_h11_reads_it_in_whatever_pieces_it_comes(data: bytes, cuts: list[int]) -> None:
    found = read(data, cuts)
    assert found is not None
    assert found[:2] == read_by_h11(data)


@given(
    data=sound_replies(),
    places=st.lists(st.integers(0, 300), min_size=1, max_size=3),
    bytes_=st.lists(st.sampled_from(list(b"\r\n\0 :;,0129afHTP/\xff")), min_size=3, max_size=3),
)
@example(data=b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", places=[400], bytes_=[0, 0, 0])
@settings(max_examples=600, deadline=None)
def test_a_damaged_reply_is_never_read_in_another_way_than_h11_reads_it(
    data: bytes, places: list[int], bytes_: list[int]
) -> None:
    damaged = bytearray(data)
    for place, byte in zip(places, bytes_, strict=False):
        if place < len(damaged):
            damaged[place] = byte
    try:
        found = read(bytes(damaged))
    except BadResponse:
        return
    assert found is not None
    assert found[:2] == read_by_h11(bytes(damaged))


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * http1.HEAD_BYTES_MAX,
        b"HTTP/1.1 200 OK\r\ndate: " + b"a" * http1.HEAD_BYTES_MAX + b"\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (http1.BODY_BYTES_MAX + 1),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % (http1.BODY_BYTES_MAX + 1),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"a" * http1.CHUNK_LINE_BYTES_MAX,
        b"HTTP/1.1 200 OK\r\n\r\n" + b"a" * (http1.BODY_BYTES_MAX + 1),
        b"HTTP/1.1 100 Continue\r\n\r\n" * (http1.INTERIM_MAX + 1),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"A: b\r\n" * (http1.INTERIM_MAX + 1),
    ],
    ids=["head", "usual head", "length", "chunk", "chunk line", "until the end", "interim", "trailers"],
)
def test_a_server_cannot_make_the_client_keep_more_than_its_bounds(data: bytes) -> None:
    with pytest.raises(BadResponse):
        read(data, ends=False)


@pytest.mark.parametrize(
    "headers",
    [
        b"Content-Length: 2\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: gzip, chunked",
        b"Content-Length: 2\r\nContent-Length: 3",
        b"Content-Length: 2, 2",
        b"Content-Length: +2",
        b"Content-Length: 0x2",
        b"Content-Length:",
        b"X: a\r\n folded",
        b"X: a\nContent-Length: 2",
        b"X : a",
    ],
    ids=repr,
)
def test_a_head_that_can_be_read_in_two_ways_is_refused(headers: bytes) -> None:
    with pytest.raises(BadResponse):
        read(b"HTTP/1.1 200 OK\r\n" + headers + b"\r\n\r\n2\r\n{}\r\n0\r\n\r\n")


@pytest.mark.parametrize(
    ("data", "stays"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}HTTP/1.1 200 OK\r\n\r\n", False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: x, Close\r\n\r\n{}", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}", False),
        (b"HTTP/1.1 200 OK\r\n\r\n{}", False),
    ],
    ids=["plain", "more than asked for", "close", "HTTP/1.0", "until the end"],
)
def test_a_connection_is_reused_only_after_a_reply_that_ends_for_certain(data: bytes, stays: bool) -> None:
    assert read(data) == (200, b"{}", stays)


USUAL = b"HTTP/1.1 200 OK\r\ndate: today\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n"


@pytest.mark.parametrize(
    ("pieces", "body", "stays"),
    [
        ([USUAL + b"[]"], b"[]", True),
        ([USUAL + b"[", b"]"], b"[]", True),
        ([USUAL, b"[]"], b"[]", True),
        ([USUAL[:-1], b"\n[]"], b"[]", True),
        ([USUAL + b"[]" + USUAL], b"[]", False),
        ([USUAL.replace(b": 2", b": 3") + b"[ ]"], b"[ ]", True),
        ([USUAL.replace(b"date: today", b"connection: close") + b"[]"], b"[]", False),
    ],
    ids=["whole", "in the body", "after the head", "in the head", "and more", "another length", "and close"],
)
def test_a_reply_whose_head_has_come_before_is_read_like_the_first(
    pieces: list[bytes], body: bytes, stays: bool
) -> None:
    connection = HttpConnection(b"")
    for _ in range(2):
        connection.encode(HttpRequest(b"GET", b"/"))
        assert connection.feed(USUAL + b"{}") == HttpResponse(200, b"{}")
    connection.encode(HttpRequest(b"GET", b"/"))
    replies = [connection.feed(piece) for piece in pieces]
    assert replies == [*[None] * (len(pieces) - 1), HttpResponse(200, body)]
    assert connection.reusable is stays


@pytest.mark.parametrize("split", [False, True], ids=["in one piece", "in two"])
@pytest.mark.parametrize(("sent", "read"), [(b"0af1", b"0af1"), (b"", None), (b"a b", None), (b"0" * 65, None)])
def test_the_store_of_a_reply_is_read_however_the_reply_comes(sent: bytes, read: bytes | None, split: bool) -> None:
    reply = USUAL.replace(b"content-type", b"x-lock-store: %s\r\ncontent-type" % sent) + b"{}"
    connection = HttpConnection(b"")
    connection.encode(HttpRequest(b"GET", b"/"))
    pieces = [reply[:30], reply[30:]] if split else [reply]
    assert [connection.feed(piece) for piece in pieces][-1] == HttpResponse(200, b"{}", None, read)


def test_a_server_whose_heads_all_differ_cannot_make_the_client_keep_them() -> None:
    connection = HttpConnection(b"")
    for number in range(100):
        connection.encode(HttpRequest(b"GET", b"/"))
        assert connection.feed(USUAL.replace(b"today", b"%d" % number) + b"{}") == HttpResponse(200, b"{}")
    assert len(connection._known_heads) <= http1.KNOWN_HEADS_MAX


# -- what a grant is worth --------------------------------------------------------------------------------------------


def test_a_lease_counts_from_before_its_request_was_sent(clock: StillClock) -> None:
    core = make_core(clock)
    sent = clock.now()
    lease = acquire(core, Network(clock, [later(clock, 3.0, granted())]), ttl_s=10.0)
    assert lease.deadline == sent + 10.0 - margin_s(10.0)
    assert lease.remaining_s == pytest.approx(7.0 - margin_s(10.0))


def test_the_time_a_request_has_waited_is_added_to_its_deadline(clock: StillClock) -> None:
    core = make_core(clock)
    sent = clock.now()
    lease = acquire(core, Network(clock, [later(clock, 8.0, granted(waited_ms=8000))]), ttl_s=2.0, wait_s=30.0)
    assert lease.deadline == sent + 8.0 + 2.0 - margin_s(2.0)
    assert lease.valid


@pytest.mark.parametrize("around", [b"%s", b" %s", b"\n%s", b"%s\r\n ", b"\t%s\t"])
def test_blanks_around_an_answer_mean_nothing(clock: StillClock, around: bytes) -> None:
    answer = granted()
    network = Network(clock, [later(clock, 0.0, HttpResponse(200, around % answer.body))])
    assert acquire(make_core(clock), network).fencing_token == 7
    assert b'"ttl_ms":10000}' in network.sends[0].request.body


@pytest.mark.parametrize("body", [b"%s{}", b"{}%s", b"%s,", b"[%s]", b"\xff%s", b""])
def test_more_than_an_answer_is_none(clock: StillClock, body: bytes) -> None:
    answer = body.replace(b"%s", granted().body)
    with pytest.raises(LockServerError, match="not a lock server's answer"):
        acquire(make_core(clock), Network(clock, [later(clock, 0.0, HttpResponse(200, answer))]))


def test_a_replay_counts_from_the_first_send_and_carries_the_same_key(clock: StillClock) -> None:
    core = make_core(clock)
    first = clock.now()
    network = Network(clock, [later(clock, 1.0, NoAnswer("cut")), granted(replayed=True, waited_ms=900)])
    lease = acquire(core, network, ttl_s=10.0)
    assert lease.deadline == first + 10.0 - margin_s(10.0)
    keys = [re.search(rb"Idempotency-Key: (\S+)", send.request.headers) for send in network.sends]
    assert len(keys) == 2
    assert keys[0] is not None
    assert keys[1] is not None
    assert keys[0][1] == keys[1][1]


@pytest.mark.parametrize("left_ms", [3_000, 9_500])
def test_of_a_replay_as_much_is_left_as_the_server_says(clock: StillClock, left_ms: int) -> None:
    network = Network(clock, [later(clock, 4.0, NoAnswer("cut")), granted(replayed=True, remaining_ms=left_ms)])
    lease = acquire(make_core(clock), network, ttl_s=10.0)
    assert lease.deadline == pytest.approx(network.sends[1].sent_at + left_ms / 1000 - margin_s(10.0))  # type: ignore[operator]


def test_a_retry_that_was_not_replayed_counts_from_its_own_send(clock: StillClock) -> None:
    core = make_core(clock)
    network = Network(clock, [later(clock, 4.0, NoAnswer("cut")), granted()])
    lease = acquire(core, network, ttl_s=10.0)
    assert lease.deadline == network.sends[1].sent_at + 10.0 - margin_s(10.0)  # type: ignore[operator]


def test_a_grant_that_was_read_after_its_deadline_is_good_only_if_a_renewal_says_so(clock: StillClock) -> None:
    core = make_core(clock)
    network = Network(clock, [later(clock, 20.0, granted()), reply(200, renewed=True, lease_expiry_ms=1)])
    lease = acquire(core, network, ttl_s=10.0)
    assert lease.valid
    assert network.sends[1].request.target == b"/v1/locks/job/renew"
    assert lease.deadline == clock.now() + 10.0 - margin_s(10.0)

    refused = Network(clock, [later(clock, 20.0, granted()), reply(409, renewed=False, reason="NOT_OWNER_OR_EXPIRED")])
    with pytest.raises(LeaseLost) as lost:
        acquire(core, refused, ttl_s=10.0)
    assert lost.value.reason == "deadline"


def test_the_client_waits_longer_for_a_reply_than_the_server_waits_for_the_lock(clock: StillClock) -> None:
    core = make_core(clock)
    network = Network(clock, [granted()])
    acquire(core, network, wait_s=12.0)
    assert network.bodies()[0]["wait_ms"] == 12_000
    assert network.sends[0].timeout_s == 12.0 + core.request_timeout_s


def test_a_wait_longer_than_the_server_allows_is_asked_for_in_slices(clock: StillClock) -> None:
    core = make_core(clock)
    network = Network(clock, [later(clock, 60.0, held()), later(clock, 60.0, held()), granted()])
    assert acquire(core, network, wait_s=150.0).valid
    waits = [body["wait_ms"] for body in network.bodies()]
    assert waits[:2] == [60_000, 60_000]
    assert waits[2] < 30_000


def test_a_wait_that_is_over_says_who_holds_the_lock(clock: StillClock) -> None:
    core = make_core(clock)
    with pytest.raises(LockHeld) as no:
        acquire(core, Network(clock, [later(clock, 2.0, held(500))]), wait_s=2.0)
    assert (no.value.current_owner_id, no.value.recommended_retry_s, no.value.reason) == ("you", 0.5, "HELD")


# -- trying again -----------------------------------------------------------------------------------------------------


def test_the_next_server_is_asked_when_one_does_not_answer_and_stays_the_one_that_is_asked(clock: StillClock) -> None:
    core = make_core(clock, "http://one:1", "http://two:2")
    network = Network(clock, [NoAnswer("refused"), granted(), granted()])
    acquire(core, network)
    acquire(core, network)
    assert [send.endpoint.host for send in network.sends] == ["one", "two", "two"]


def test_a_kept_connection_that_was_closed_is_no_reason_to_leave_the_server(clock: StillClock) -> None:
    core = make_core(clock, "http://one:1", "http://two:2")
    network = Network(clock, [NoAnswer("closed", stale=True), granted()])
    acquire(core, network)
    assert [send.endpoint.host for send in network.sends] == ["one", "one"]


def test_the_tries_of_one_call_are_bounded(clock: StillClock) -> None:
    core = make_core(clock)
    network = Network(clock, [NoAnswer("cut")] * 50)
    with pytest.raises(LockServerUnreachable, match="cut"):
        acquire(core, network)
    assert len(network.sends) == flows.TRIES_LEAST


def test_a_server_error_leaves_open_what_was_done_and_a_refusal_does_not(clock: StillClock) -> None:
    core = make_core(clock)
    attempt = flows.new_attempt(core, "job", 10.0, 0.0)
    with pytest.raises(LockServerUnreachable) as no:
        Network(clock, [HttpResponse(503, b"{}", b"7")] * 3).play(_acquire_flow(core, attempt))
    assert no.value.retry_after_s == 7.0
    assert attempt.may_hold

    attempt = flows.new_attempt(core, "job", 10.0, 0.0)
    with pytest.raises(LockHeld):
        Network(clock, [held()]).play(_acquire_flow(core, attempt))
    assert not attempt.may_hold


def _acquire_flow(core: Core, attempt: flows.AcquireAttempt) -> "flows.Flow[BaseLease]":
    return flows.acquire(attempt, lambda g, t, at: BaseLease(g, t, at, core.clock), 0.0)


def test_an_answer_that_makes_no_sense_leaves_open_what_was_done(clock: StillClock) -> None:
    core = make_core(clock)
    for body in (b"<html>", b"[]", b'{"acquired": true}', b'{"acquired": 1}', b"\xff", b"[" * 100_000):
        attempt = flows.new_attempt(core, "job", 10.0, 0.0)
        with pytest.raises(LockServerError):
            Network(clock, [HttpResponse(200, body)]).play(_acquire_flow(core, attempt))
        assert attempt.may_hold


def test_what_a_cancelled_acquire_may_have_got_is_found_by_its_key_and_released(clock: StillClock) -> None:
    core = make_core(clock)
    attempt = flows.new_attempt(core, "job", 10.0, 0.0)
    flow = _acquire_flow(core, attempt)
    send = next(flow)
    assert isinstance(send, Send)
    send.sent_at = clock.now()
    flow.close()  # cancelled while the answer was on its way
    assert attempt.may_hold
    network = Network(clock, [granted(replayed=True), reply(200, released=True)])
    network.play(attempt.clean_up())
    assert attempt.key.encode() in network.sends[0].request.headers
    assert network.sends[1].request.target == b"/v1/locks/job/release"
    assert network.bodies()[1] == {"owner_id": "me", "lease_id": "L", "fencing_token": 7}


def _with_retry(core: Core, network: Network, **bounds: Any) -> BaseLease:
    attempt = flows.new_attempt(core, "job", 10.0, 0.0)
    plan = flows.RetryPlan(core, **bounds)
    return network.play(flows.acquire_with_retry(attempt, lambda g, t, at: BaseLease(g, t, at, core.clock), plan))


def test_a_retry_comes_no_sooner_than_recommended_and_no_later_than_half_as_much_again(clock: StillClock) -> None:
    core = make_core(clock)
    network = Network(clock, [held(400)] * 20 + [granted()])
    assert _with_retry(core, network, max_retries=20, max_total_wait_s=60.0).valid
    assert len(network.pauses) == 20
    assert all(0.4 <= pause <= 0.6 for pause in network.pauses)
    assert len(set(network.pauses)) > 1, "without jitter all come back at once"


@pytest.mark.parametrize(
    ("delays", "least_s", "most_s"),
    [((1.0, 2.0, 0.0), 1.0, 1.0), ((0.0, 0.1, 0.0), 0.1, 0.1), ((0.0, 60.0, 3.0), 0.4, 1.6)],
    ids=["a minimum", "a maximum", "a jitter"],
)
def test_a_retry_comes_within_the_bounds_of_the_client(
    clock: StillClock, delays: tuple[float, float, float], least_s: float, most_s: float
) -> None:
    network = Network(clock, [held(400)] * 20 + [granted()])
    core = make_core(clock, retries=RetryDelays(*delays))
    assert _with_retry(core, network, max_retries=20, max_total_wait_s=60.0).valid
    assert all(least_s <= pause <= most_s for pause in network.pauses)


@pytest.mark.parametrize("client", [public.AsyncLockClient, public.LockClient])
@pytest.mark.parametrize(
    ("setting", "least_s", "most_s"),
    [
        ({"retry_delay_s_min": 5.0, "retry_jitter": 0.0}, 5.0, 5.0),
        ({"retry_delay_s_max": 0.1, "retry_jitter": 0.0}, 0.1, 0.1),
        ({"retry_jitter": 0.0}, 0.4, 0.4),
        ({}, 0.4, 0.6),
    ],
    ids=str,
)
def test_the_bounds_given_to_a_client_are_those_of_its_retries(
    clock: StillClock, client: type[BaseClient], setting: dict[str, float], least_s: float, most_s: float
) -> None:
    given: Any = setting
    network = Network(clock, [held(400)] * 20 + [granted()])
    core = client("http://one:1", clock=clock, **given)._core
    assert _with_retry(core, network, max_retries=20, max_total_wait_s=600.0).valid
    assert all(least_s <= pause <= most_s for pause in network.pauses)
    if not setting:
        assert len(set(network.pauses)) > 1


@pytest.mark.parametrize("delays", [(-1.0, 2.0, 0.5), (3.0, 2.0, 0.5), (0.0, float("inf"), 0.5), (0.0, 2.0, -0.1)])
def test_bounds_that_cannot_be_kept_are_refused(delays: tuple[float, float, float]) -> None:
    with pytest.raises(ConfigurationError, match="retry_"):
        RetryDelays(*delays)


def test_retries_end_with_their_number_or_with_their_time_and_raise_the_last_reason(clock: StillClock) -> None:
    core = make_core(clock)
    network = Network(clock, [held(10)] * 50)
    with pytest.raises(LockHeld):
        _with_retry(core, network, max_retries=4, max_total_wait_s=60.0)
    assert len(network.sends) == 5

    began = clock.now()
    with pytest.raises(LockHeld):
        _with_retry(core, Network(clock, [held(700)] * 50), max_retries=1000, max_total_wait_s=3.0)
    assert clock.now() - began <= 3.0


def test_all_retries_carry_one_key_so_that_a_late_grant_is_found(clock: StillClock) -> None:
    core = make_core(clock)
    lost = NoAnswer("cut")
    network = Network(clock, [lost, lost, lost, held(10), granted(replayed=True)])
    first = clock.now()
    lease = _with_retry(core, network, max_retries=5, max_total_wait_s=5.0)
    headers = [re.search(rb"Idempotency-Key: (\S+)", send.request.headers) for send in network.sends]
    assert len({found[1] for found in headers if found is not None}) == 1
    assert lease.deadline == first + 10.0 - margin_s(10.0)


# -- a lease that lives -----------------------------------------------------------------------------------------------


def test_a_renewal_counts_from_its_send(clock: StillClock) -> None:
    core, lease = make_core(clock), make_lease(clock)
    clock.at += 4.0
    sent = clock.now()
    Network(clock, [later(clock, 2.0, reply(200, renewed=True, lease_expiry_ms=1))]).play(
        flows.renew(core, lease, None)
    )
    assert lease.deadline == sent + 10.0 - margin_s(10.0)


def test_a_renewal_that_is_answered_after_the_deadline_revives_nothing(clock: StillClock) -> None:
    core, lease = make_core(clock), make_lease(clock)
    network = Network(clock, [later(clock, 11.0, reply(200, renewed=True, lease_expiry_ms=1))])
    with pytest.raises(LeaseLost) as lost:
        network.play(flows.renew(core, lease, None))
    assert lost.value.reason == "deadline"
    assert lease.state is LeaseState.LOST


def test_a_refused_renewal_is_a_loss(clock: StillClock) -> None:
    core, lease = make_core(clock), make_lease(clock)
    with pytest.raises(LeaseLost) as lost:
        Network(clock, [reply(409, renewed=False)]).play(flows.renew(core, lease, None))
    assert lost.value.reason == "not_owner"


def test_a_shorter_renewal_counts_from_its_send_and_an_older_longer_one_counts_no_more(clock: StillClock) -> None:
    lease = make_lease(clock, ttl_s=10.0)
    long_ago = lease._about_to_renew(10.0, clock.now())
    clock.at += 1.0
    lease._about_to_renew(2.0, clock.now())  # its answer is lost: the server may have shortened the lease
    assert lease.deadline == clock.now() + 2.0 - margin_s(2.0)
    assert lease._renewed(long_ago, clock.now() - 1.0)
    assert lease.deadline == clock.now() + 2.0 - margin_s(2.0)


def test_a_lease_is_judged_by_the_clock_at_the_moment_it_is_asked(clock: StillClock) -> None:
    lease = make_lease(clock, ttl_s=10.0)
    assert lease.valid
    clock.at += 3600.0  # suspended
    assert not lease.valid
    assert lease.remaining_s == 0.0
    with pytest.raises(LeaseLost):
        lease.raise_if_lost()


def test_without_a_heartbeat_a_loss_shows_to_whoever_looks_and_a_renewal_tells_the_others(clock: StillClock) -> None:
    core, lease = make_core(clock), make_lease(clock, ttl_s=10.0)
    told: list[bool] = []
    lease._watch(lambda: told.append(True))
    clock.at += 10.0
    assert lease.state is LeaseState.LOST
    assert not told, "nobody watches the clock"
    with pytest.raises(LeaseLost):
        Network(clock, []).play(flows.renew(core, lease, None))
    assert told == [True]


def test_a_forked_child_does_not_have_its_parents_lease(clock: StillClock, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = make_lease(clock)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert not lease.valid
    assert lease.loss().reason == "forked"


def test_a_release_is_sent_once_and_repeating_it_is_no_error(clock: StillClock) -> None:
    core, lease = make_core(clock), make_lease(clock)
    assert Network(clock, [reply(200, released=True)]).play(flows.release(core, lease)) is True
    assert Network(clock, []).play(flows.release(core, lease)) is False


def test_a_release_whose_first_answer_was_lost_has_released(clock: StillClock) -> None:
    core, lease = make_core(clock), make_lease(clock)
    network = Network(clock, [NoAnswer("cut"), reply(200, released=False, reason="NOT_OWNER")])
    assert network.play(flows.release(core, lease)) is True


def test_a_release_of_what_had_expired_says_so(clock: StillClock) -> None:
    core, lease = make_core(clock), make_lease(clock)
    clock.at += 11.0
    assert Network(clock, [reply(200, released=False, reason="NOT_OWNER")]).play(flows.release(core, lease)) is False


# -- the heartbeat ----------------------------------------------------------------------------------------------------


def beat(plan: HeartbeatPlan, core: Core, network: Network) -> None:
    for batch in plan.due().batches:
        network.play(renew_together(core, plan, batch))


def all_renewed(send: Send) -> HttpResponse:
    operations = json.loads(send.request.body)["operations"]
    return reply(200, results=[{"status": 200, "body": {"renewed": True, "lease_expiry_ms": 1}} for _ in operations])


def test_a_thousand_leases_are_renewed_in_two_calls(clock: StillClock) -> None:
    core = make_core(clock)
    plan = HeartbeatPlan(core)
    leases = []
    first_due = clock.now() + 10.0
    for _ in range(1000):
        leases.append(make_lease(clock, ttl_s=30.0))
        plan.add(leases[-1], None)
        clock.at += 0.001  # they were not taken at the same moment
    clock.at = first_due  # of one of them
    network = Network(clock, [all_renewed] * 10)
    beat(plan, core, network)
    assert len(network.sends) == 2
    assert all(lease.deadline == clock.now() + 30.0 - margin_s(30.0) for lease in leases)


def test_nothing_is_renewed_before_it_is_due(clock: StillClock) -> None:
    core = make_core(clock)
    plan = HeartbeatPlan(core)
    plan.add(make_lease(clock, ttl_s=30.0), None)
    due = plan.due()
    assert due.batches == []
    assert due.wake_at == clock.now() + 10.0


def test_a_heartbeat_that_is_refused_is_a_loss_at_once(clock: StillClock) -> None:
    core = make_core(clock)
    plan = HeartbeatPlan(core)
    lost, kept = make_lease(clock), make_lease(clock)
    plan.add(lost, None)
    plan.add(kept, None)
    clock.at += 4.0

    def answer(_send: Send) -> HttpResponse:
        no = {"status": 409, "body": {"renewed": False, "reason": "NOT_OWNER_OR_EXPIRED"}}
        yes = {"status": 200, "body": {"renewed": True, "lease_expiry_ms": 1}}
        return reply(200, results=[no, yes])

    beat(plan, core, Network(clock, [answer]))
    assert (lost.state, lost.loss().reason) == (LeaseState.LOST, "not_owner")
    assert kept.valid


def test_one_heartbeat_without_an_answer_loses_nothing_and_is_tried_again_soon(clock: StillClock) -> None:
    core = make_core(clock)
    plan = HeartbeatPlan(core)
    lease = make_lease(clock, ttl_s=10.0)
    plan.add(lease, None)
    clock.at += 4.0
    beat(plan, core, Network(clock, [NoAnswer("cut")]))
    assert lease.valid
    wake_at = plan.due().wake_at
    assert wake_at is not None
    assert wake_at < clock.now() + 1.0
    clock.at = wake_at
    beat(plan, core, Network(clock, [reply(200, renewed=True, lease_expiry_ms=1)]))
    assert lease.deadline == clock.now() + 10.0 - margin_s(10.0)


def test_the_deadline_is_a_loss_while_a_heartbeat_is_still_on_its_way(clock: StillClock) -> None:
    core = make_core(clock)
    plan = HeartbeatPlan(core)
    lease = make_lease(clock, ttl_s=10.0)
    plan.add(lease, None)
    clock.at += 4.0
    (batch,) = plan.due().batches
    flow = renew_together(core, plan, batch)
    send = next(flow)
    assert isinstance(send, Send)
    send.sent_at = clock.now()
    due = plan.due()
    assert due.wake_at == lease.deadline
    clock.at = lease.deadline
    plan.due()
    assert (lease.state, lease.loss().reason) == (LeaseState.LOST, "deadline")
    # The late answer, good as it is, changes nothing.
    with pytest.raises(StopIteration):
        flow.send(reply(200, renewed=True, lease_expiry_ms=1))
    assert lease.state is LeaseState.LOST


def test_a_late_heartbeat_after_a_release_reports_no_loss(clock: StillClock) -> None:
    core = make_core(clock)
    plan = HeartbeatPlan(core)
    lease = make_lease(clock)
    plan.add(lease, None)
    clock.at += 4.0
    (batch,) = plan.due().batches
    flow = renew_together(core, plan, batch)
    send = next(flow)
    assert isinstance(send, Send)
    send.sent_at = clock.now()
    Network(clock, [reply(200, released=True)]).play(flows.release(core, lease))
    with pytest.raises(StopIteration):
        flow.send(reply(409, renewed=False, reason="NOT_OWNER_OR_EXPIRED"))
    assert lease.state is LeaseState.RELEASED
    assert plan.due().wake_at is None


def test_a_heartbeat_leaves_time_for_a_second_try_before_the_deadline(clock: StillClock) -> None:
    core = make_core(clock)
    plan = HeartbeatPlan(core)
    lease = make_lease(clock, ttl_s=3.0)
    plan.add(lease, None)
    clock.at += 1.0
    (batch,) = plan.due().batches
    assert plan.timeout_s(batch) <= lease.remaining_s / 2


# -- settings, names, imports -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"urls": []},
        {"urls": "ftp://x"},
        {"urls": "http://x/path"},
        {"urls": "http://user:pw@x"},
        {"urls": "http://x:99999"},
        {"urls": "http://x\r\ny"},
        {"token": "two words"},
        {"token": "line\nfeed"},
        {"request_timeout_s": 0},
        {"connect_timeout_s": float("nan")},
        {"connections_max": 2},
    ],
    ids=repr,
)
def test_a_wrong_setting_is_refused_before_anything_is_opened(wrong: dict[str, Any]) -> None:
    arguments = {"urls": "http://x:1", **wrong}
    for cls in (public.AsyncLockClient, public.LockClient):
        with pytest.raises(ConfigurationError):
            cls(**arguments)


@pytest.mark.parametrize("ttl_s", [0, -1, 0.0001, 601, float("nan"), float("inf"), "x", None])
def test_a_wrong_ttl_is_refused_before_anything_is_sent(clock: StillClock, ttl_s: Any) -> None:
    with pytest.raises(ConfigurationError, match="ttl_s"):
        flows.new_attempt(make_core(clock), "job", ttl_s, 0.0)


@pytest.mark.parametrize("name", ["", ".", "..", "\udc80", 5])
def test_a_name_that_cannot_be_in_a_path_is_refused(clock: StillClock, name: Any) -> None:
    core = make_core(clock)
    with pytest.raises(ConfigurationError):
        Network(clock, []).play(flows.get(core, name))


def test_a_token_is_never_shown(clock: StillClock) -> None:
    core = Core(
        "http://x:1",
        token="secret-of-mine",
        owner_id=None,
        connect_timeout_s=1.0,
        request_timeout_s=1.0,
        connections_max=3,
        retries=RetryDelays(),
        ssl_context=None,
        clock=clock,
    )
    assert "secret-of-mine" not in repr(core.endpoint) + str(core.endpoint)


def test_every_public_name_and_every_setting_is_documented() -> None:
    page = DOCS.read_text(encoding="utf-8")
    wanted = set(public.__all__) | set(inspect.signature(public.AsyncLockClient).parameters)
    for cls in (BaseClient, public.AsyncLockClient, public.LockClient, public.AsyncLease, public.Lease, BaseLease):
        wanted |= {name for name in vars(cls) if not name.startswith("_")}
    for method in ("acquire", "acquire_with_retry", "lock", "list_locks", "start_heartbeat"):
        wanted |= set(inspect.signature(getattr(public.LockClient, method)).parameters) - {"self"}
    code = set(re.findall(r"\w+", " ".join(re.findall(r"```.*?```|`[^`\n]+`", page, re.DOTALL))))
    assert sorted(wanted - code) == []


def test_the_two_clients_have_the_same_methods_and_settings() -> None:
    asynchronous, blocking = public.AsyncLockClient, public.LockClient
    assert inspect.signature(asynchronous) == inspect.signature(blocking)
    names = {name for name in vars(asynchronous) if not name.startswith("_")}
    assert names - {"aclose"} == {name for name in vars(blocking) if not name.startswith("_")} - {"close"}
    for name in names - {"aclose", "owner_id"}:
        ours = inspect.signature(getattr(asynchronous, name)).parameters
        theirs = inspect.signature(getattr(blocking, name)).parameters
        assert list(ours) == list(theirs), name
        assert [each.default for each in ours.values()] == [each.default for each in theirs.values()], name


def test_the_client_needs_nothing_but_the_standard_library_and_the_package_itself() -> None:
    code = """
import sys
for name in ("h11", "msgspec", "httptools", "apsw", "uvloop", "click", "rich", "loguru", "httpx"):
    sys.modules[name] = None
import pgleaderlock.client
assert not [name for name in sys.modules if name.startswith(("pgleaderlock.server", "pgleaderlock._http"))]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_an_owner_is_text() -> None:
    with pytest.raises(ConfigurationError, match="owner_id is 7: give text"):
        public.LockClient("http://127.0.0.1:1", owner_id=7)  # type: ignore[arg-type]
