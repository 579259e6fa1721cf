"""The HTTP layer of our servers, byte by byte: what it lets through, in which order, and how a connection ends."""

import asyncio
import collections
import contextlib
import inspect
import re
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop

from pgleaderlock._http import protocol
from pgleaderlock._http import server as http_server
from pgleaderlock._http.answers import Answer
from pgleaderlock._http.protocol import Exchange
from pgleaderlock._http.server import HttpServer, ServingLimits, Tls, listen
from support.lockserver import certificate

PATIENCE_S = 60.0
App = Callable[[Any, Any, Any], Any]


def both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Our servers run on uvloop; a program of somebody else's may not."""

    def run(loop_factory: Callable[[], asyncio.AbstractEventLoop], **given: Any) -> None:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(test(**given))

    asked = inspect.signature(test)
    loop = inspect.Parameter("loop_factory", inspect.Parameter.KEYWORD_ONLY)
    run.__name__, run.__doc__ = test.__name__, test.__doc__
    run.__signature__ = asked.replace(parameters=[*asked.parameters.values(), loop])  # type: ignore[attr-defined]
    run.pytestmark = getattr(test, "pytestmark", [])  # type: ignore[attr-defined]
    loops = [pytest.param(asyncio.new_event_loop, id="asyncio"), pytest.param(uvloop.new_event_loop, id="uvloop")]
    both: Callable[..., None] = pytest.mark.parametrize("loop_factory", loops)(run)
    return both


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with method, path, query and body."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            break
        body += message["body"]
        more = message["more_body"]
    told = b"%s %s?%s %s" % (scope["method"].encode(), scope["raw_path"], scope["query_string"], body)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": told})


async def deaf(scope: Any, receive: Any, send: Any) -> None:
    """Answers without reading the body."""
    await send({"type": "http.response.start", "status": 413, "headers": []})
    await send({"type": "http.response.body", "body": b"too long"})


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def deafen(self) -> None:
        """Reads nothing any more."""
        cast("asyncio.Transport", self.writer.transport).pause_reading()

    async def rest(self) -> bytes:
        """Everything until the server closes."""
        return await asyncio.wait_for(self.reader.read(), PATIENCE_S)

    async def until(self, end: bytes) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(end), PATIENCE_S)


class Connect:
    """Connects to a server, and sends."""

    def __init__(self, server: HttpServer, address: tuple[str, int]) -> None:
        self.server = server
        self.clients: list[Client] = []
        self.address = address

    async def __call__(self, data: bytes = b"", address: str = "127.0.0.1") -> Client:
        client = Client(*await asyncio.open_connection(*self.address, local_addr=(address, 0)))
        self.clients.append(client)
        client.send(data)
        return client

    async def nobody_left(self) -> None:
        await asyncio.wait_for(self.server._no_more_than(0), PATIENCE_S)


async def answered() -> None:
    pass


@contextlib.asynccontextmanager
async def serving(
    app: App, tls: Tls | None = None, at_once: Callable[[Exchange], bool] | None = None, **limits: Any
) -> AsyncIterator[Connect]:
    listening = listen("127.0.0.1", 0)
    connect = Connect(HttpServer(app, listening, ServingLimits(**limits), tls, at_once), listening.getsockname())
    connect.server.start()
    try:
        yield connect
    finally:
        await connect.server.stop(answered)
        for client in connect.clients:
            client.writer.close()
            with contextlib.suppress(OSError):
                await client.writer.wait_closed()


def bodies(answers: bytes) -> list[tuple[int, bytes]]:
    """Status and body of each answer in a row."""
    found = []
    while answers:
        head, _, rest = answers.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        assert length is not None, head
        found.append((int(head.split(b" ")[1]), rest[: int(length[1])]))
        answers = rest[int(length[1]) :]
    return found


def get(path: str, *lines: str, method: str = "GET", version: str = "1.1") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/{version}", "Host: here", *lines, "", ""]).encode()


def text(body: bytes) -> Answer:
    return Answer(200, body)


def now(exchange: Exchange) -> bool:
    exchange.answer(text(exchange.path), None)
    return True


CLOSE = "Connection: close"
CHUNKED = "Transfer-Encoding: chunked"
# As Java's HttpClient asks by default.
H2C = "Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA"


@both_loops
async def test_requests_sent_in_one_go_are_answered_in_their_order() -> None:
    turns: list[str] = []
    first_may_end = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        turns.append(scope["path"])
        if scope["path"] == "/1":
            await first_may_end.wait()
        await echo(scope, receive, send)

    async with serving(app) as connect:
        client = await connect(get("/1") + get("/2") + get("/3", CLOSE))
        other = await connect(get("/other", CLOSE))
        await other.rest()
        assert turns == ["/1", "/other"], "the second has to wait for the first, and nobody else has"
        first_may_end.set()
        assert [body for _, body in bodies(await client.rest())] == [b"GET /1? ", b"GET /2? ", b"GET /3? "]


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (get("/a?b=c", CLOSE), b"GET /a?b=c "),
        (get("/%2F%41?%3F", CLOSE), b"GET /%2F%41?%3F "),
        (get("http://elsewhere/a?b", CLOSE), b"GET /a?b "),
        (get("http://elsewhere", CLOSE), b"GET /? "),
        (get("*", CLOSE, method="OPTIONS"), b"OPTIONS *? "),
        (get("/", CLOSE, "Content-Length: 3", method="POST") + b"abc", b"POST /? abc"),
        (get("/", CLOSE, CHUNKED, method="POST") + b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n", b"POST /? abcde"),
        (get("/", CLOSE, CHUNKED, method="POST") + b"1\r\na\r\n0\r\nHost: there\r\n\r\n", b"POST /? a"),
        (get("/", "Upgrade: h2c", "Connection: Upgrade, close"), b"GET /? "),
        (get("/", H2C, "Content-Length: 3", method="POST") + b"abc", b"POST /? abc"),
        (get("/", H2C, CHUNKED, method="POST") + b"3\r\nabc\r\n0\r\n\r\n", b"POST /? abc"),
        (get("/", version="1.0"), b"GET /? "),
        (get("/", "Connection: keep-alive", version="1.0"), b"GET /? "),
    ],
)  # fmt: skip
@both_loops
async def test_what_is_a_request_is_understood(sent: bytes, told: bytes) -> None:
    async with serving(echo) as connect:
        whole = await connect(sent)
        assert bodies(await whole.rest()) == [(200, told)]
        dribbled = await connect()
        for at in range(len(sent)):
            dribbled.send(sent[at : at + 1])
            await dribbled.writer.drain()
            await asyncio.sleep(0)
        assert bodies(await dribbled.rest()) == [(200, told)]


@pytest.mark.parametrize(
    ("sent", "status", "text"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, b"not an HTTP/1.1 request"),
        (b"GET / HTTP/2.0\r\n\r\n", 400, b"HTTP/1.1 is spoken here"),
        (b"GET / HTTP/1.1\nHost: here\n\n", 400, b"not an HTTP/1.1 request"),
        (get("/", "Host: there"), 400, b"more than one Host header"),
        (get("/", "Authorization: a", "authorization: a"), 400, b"more than one Authorization header"),
        (get("/", "Idempotency-Key: a", "Idempotency-Key: b"), 400, b"more than one Idempotency-Key header"),
        (get("/", "Content-Type: a", "Content-Type: b"), 400, b"more than one Content-Type header"),
        (get("/", "X-Lock-Store: a", "X-Lock-Store: b"), 400, b"more than one X-Lock-Store header"),
        (get("/", "Transfer-Encoding: gzip, chunked", method="POST") + b"0\r\n\r\n", 501, b"chunked alone"),
        (get("/", "Transfer-Encoding: gzip", CHUNKED, method="POST") + b"0\r\n\r\n", 501, b"chunked alone"),
        (get("/", " folded"), 400, b"not an HTTP/1.1 request"),
        (get("/", "Name : value"), 400, b"not an HTTP/1.1 request"),
        (get("/", "Content-Length: 3", "Content-Length: 4", method="POST"), 400, b"not an HTTP/1.1 request"),
        (get("/", "Content-Length: 3", "Transfer-Encoding: chunked", method="POST"), 400, b"not an HTTP/1.1 request"),
        (get("/", "Content-Length: -3", method="POST"), 400, b"not an HTTP/1.1 request"),
        (get("/", *[f"A{number}: b" for number in range(100)]), 431, b"more than 100 header lines"),
        (get("/", "A: " + "b" * 20_000), 431, b"the header is longer than 16384 bytes"),
        (get("/" + "a" * 20_000), 431, b"the header is longer than 16384 bytes"),
    ],
)
@both_loops
async def test_what_is_no_request_is_answered_and_ends_the_connection(sent: bytes, status: int, text: bytes) -> None:
    async with serving(echo) as connect:
        for before, answers in ((b"", []), (get("/good"), [(200, b"GET /good? ")])):
            client = await connect(before + sent)
            *earlier, (seen, body) = bodies(await client.rest())
            assert (earlier, seen) == (answers, status)
            assert text in body


@both_loops
async def test_what_comes_behind_a_request_for_another_protocol_is_no_request() -> None:
    async with serving(echo) as connect:
        client = await connect(get("/", H2C) + get("/behind"))
        answer = await client.rest()
        assert bodies(answer) == [(200, b"GET /? ")]
        assert b"connection: close" in answer


@both_loops
async def test_a_header_that_never_ends_is_refused_when_it_is_too_long() -> None:
    async with serving(echo) as connect:
        client = await connect(b"GET / HTTP/1.1\r\nA: " + b"b" * 20_000)
        assert bodies(await client.rest())[0][0] == 431


@pytest.mark.parametrize("trailer", [b"A: " + b"b" * 40_000, b"A: b\r\n" * 5_000])
@both_loops
async def test_what_follows_a_body_in_chunks_has_a_bound_too(trailer: bytes) -> None:
    async with serving(echo) as connect:
        client = await connect(get("/", CHUNKED, method="POST") + b"1\r\na\r\n0\r\n" + trailer)
        assert bodies(await client.rest())[-1][0] in (200, 431)
        await connect.nobody_left()


@both_loops
async def test_a_chunk_that_is_none_ends_the_request_as_if_the_client_had_gone() -> None:
    async with serving(echo) as connect:
        client = await connect(get("/", "Transfer-Encoding: chunked", method="POST") + b"zz\r\n")
        (first, *_) = bodies(await client.rest())
        assert first == (200, b"POST /? "), "the application was told of the end"


@both_loops
async def test_a_body_in_tiny_chunks_ends_as_if_the_client_had_gone() -> None:
    async with serving(echo) as connect:
        for chunk, many, all_of_it in (
            (b"1\r\na\r\n", 200, True),
            (b"1\r\na\r\n", 5_000, False),
            (b"40\r\n" + b"a" * 64 + b"\r\n", 5_000, True),
        ):
            client = await connect(get("/", CHUNKED, CLOSE, method="POST"))
            client.send(chunk * many + b"0\r\n\r\n")
            (_, body), *_ = bodies(await client.rest())
            assert (body.count(b"a") == chunk.count(b"a") * many) == all_of_it


@both_loops
async def test_an_application_is_not_woken_for_each_byte_of_a_body() -> None:
    pieces: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        more = True
        while more:
            message = await receive()
            pieces.append(message["body"])
            more = message["more_body"]
        await deaf(scope, receive, send)

    async with serving(app) as connect:
        client = await connect(get("/", "Content-Length: 100", CLOSE, method="POST"))
        for _ in range(100):
            client.send(b"a")
            await client.writer.drain()
            await asyncio.sleep(0.001)
        await client.rest()
    assert pieces == [b"a" * 100]


@both_loops
async def test_a_client_that_waits_for_leave_to_send_its_body_gets_it() -> None:
    async with serving(echo) as connect:
        client = await connect(get("/", "Expect: 100-continue", "Content-Length: 3", CLOSE, method="POST"))
        assert await client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(b"abc")
        assert bodies(await client.rest()) == [(200, b"POST /? abc")]


@both_loops
async def test_a_client_that_still_sends_gets_to_read_why_it_is_refused() -> None:
    length = 3_000_000
    async with serving(deaf) as connect:
        client = await connect(get("/", f"Content-Length: {length}", method="POST") + b"x" * length)
        answer = await client.rest()
        assert bodies(answer) == [(413, b"too long")]
        assert b"connection: close" in answer


@both_loops
async def test_a_body_that_nobody_reads_does_not_fill_the_memory() -> None:
    began, go = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        began.set()
        await go.wait()
        await echo(scope, receive, send)

    length = 20_000_000
    async with serving(app) as connect:
        client = await connect(get("/", f"Content-Length: {length}", CLOSE, method="POST"))
        sending = asyncio.create_task(_send_all(client, length))
        await began.wait()
        done, _ = await asyncio.wait([sending], timeout=0.3)
        assert not done, "the rest waits at the client"
        go.set()
        (answer,) = bodies(await client.rest())
        assert len(answer[1]) == length + len(b"POST /? ")
        await sending


async def _send_all(client: Client, length: int) -> None:
    for _ in range(length // 1_000_000):
        client.send(b"x" * 1_000_000)
        await client.writer.drain()


@both_loops
async def test_the_answer_to_head_has_no_body_and_the_next_one_is_read_right() -> None:
    async with serving(echo) as connect:
        client = await connect(get("/", method="HEAD") + get("/next", CLOSE))
        answers = await client.rest()
        head, _, rest = answers.partition(b"\r\n\r\n")
        assert b"content-length: 8" in head
        assert bodies(rest) == [(200, b"GET /next? ")]


@both_loops
async def test_a_client_that_sends_no_more_is_answered_all_the_same() -> None:
    async with serving(echo) as connect:
        client = await connect(get("/"))
        client.writer.write_eof()
        assert bodies(await client.rest()) == [(200, b"GET /? ")]


@both_loops
async def test_who_waits_for_the_client_is_told_that_it_has_gone() -> None:
    gone = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "http.request"
        assert (await receive())["type"] == "http.disconnect"
        gone.set()
        await echo(scope, receive, send)

    async with serving(app) as connect:
        client = await connect(get("/"))
        client.writer.close()
        await asyncio.wait_for(gone.wait(), PATIENCE_S)


@both_loops
async def test_a_stream_arrives_piece_by_piece() -> None:
    pieces: asyncio.Queue[bytes] = asyncio.Queue()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while piece := await pieces.get():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async with serving(app) as connect:
        client = await connect(get("/", CLOSE))
        pieces.put_nowait(b"one")
        assert (await client.until(b"3\r\none\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")
        pieces.put_nowait(b"two")
        assert await client.until(b"3\r\ntwo\r\n")
        pieces.put_nowait(b"")
        assert await client.rest() == b"0\r\n\r\n"


@both_loops
async def test_who_does_not_read_its_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "STALL_S", 0.2)
    cut = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        watching = asyncio.create_task(receive())
        watching.add_done_callback(lambda _: cut.set())
        while not watching.done():
            await send({"type": "http.response.body", "body": b"x" * 1_000_000, "more_body": True})

    async with serving(app) as connect:
        client = await connect(get("/"))
        client.deafen()
        await asyncio.wait_for(cut.wait(), PATIENCE_S)


@both_loops
async def test_an_application_that_fails_leaves_nobody_waiting() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("a defect")

    async with serving(app) as connect:
        client = await connect(get("/"))
        with contextlib.suppress(ConnectionResetError):
            assert await client.rest() == b""


@both_loops
async def test_a_connection_on_which_nothing_more_comes_is_closed() -> None:
    async with serving(echo, header_timeout_s=1.0) as connect:  # enough for the head, on a busy machine too
        client = await connect(get("/"))
        assert bodies(await client.rest()) == [(200, b"GET /? ")]


@both_loops
async def test_a_request_that_takes_its_time_is_not_cut_off_by_the_headers_limit() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(1.6)  # there is no signal for a sweep that does nothing: longer than two of them
        await echo(scope, receive, send)

    async with serving(app, header_timeout_s=0.8) as connect:
        client = await connect(get("/", CLOSE))
        assert bodies(await client.rest()) == [(200, b"GET /? ")]


@both_loops
async def test_who_is_refused_and_does_not_leave_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "LINGER_S", 0.2)
    async with serving(deaf) as connect:
        client = await connect(get("/", "Content-Length: 100", method="POST") + b"the rest never comes")
        await client.until(b"too long")
        await connect.nobody_left()


@both_loops
async def test_who_does_not_read_a_short_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "STALL_S", 0.2)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * 200_000})

    async with serving(app) as connect:
        client = await connect()
        client.deafen()
        client.send(get("/") * 60 + get("/", CLOSE))
        await connect.nobody_left()


@both_loops
async def test_a_stream_ends_when_its_client_has_gone() -> None:
    ended = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(100):  # much more than is kept for a client that does not read
            await send({"type": "http.response.body", "body": b"x" * 1_000_000, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        ended.set()

    async with serving(app) as connect:
        client = await connect(get("/"))
        await client.until(b"\r\n\r\n")
        client.writer.transport.abort()
        await asyncio.wait_for(ended.wait(), PATIENCE_S)
        await connect.nobody_left()


@both_loops
async def test_a_client_that_has_gone_is_no_failure_of_the_application(caplog: pytest.LogCaptureFixture) -> None:
    told, ended = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        told.set()
        assert (await receive())["type"] == "http.disconnect"
        await asyncio.sleep(0)
        await echo(scope, receive, send)
        ended.set()

    async with serving(app) as connect:
        client = await connect(get("/"))
        await told.wait()
        client.writer.transport.abort()
        await asyncio.wait_for(ended.wait(), PATIENCE_S)
        await connect.nobody_left()
    assert [record.message for record in caplog.records if record.levelname in ("ERROR", "WARNING")] == []


@both_loops
async def test_many_requests_and_bodies_behind_one_that_waits_are_kept_within_bounds() -> None:
    go = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await go.wait()
        await echo(scope, receive, send)

    body = b"x" * 100_000
    sent = get("/", f"Content-Length: {len(body)}", method="POST") + body
    async with serving(app) as connect:
        client = await connect()
        sending = asyncio.create_task(_send_each(client, [get("/")] * 1_000 + [sent] * 100 + [get("/", CLOSE)]))
        await asyncio.wait([sending], timeout=0.3)
        (connection,) = connect.server._connections.open
        kept = sum(len(exchange.body) for exchange in connection._waiting)
        assert len(connection._waiting) <= protocol.PIPELINE_MAX + protocol.PIECE_BYTES // len(get("/"))
        assert kept <= protocol.BODY_BUFFER_BYTES_MAX + protocol.PIECE_BYTES
        go.set()
        answers = bodies(await client.rest())
        await sending
        assert [len(answer[1]) for answer in answers] == [7] * 1_000 + [8 + len(body)] * 100 + [7]


@both_loops
@pytest.mark.parametrize("refused", [False, True])
async def test_a_connection_that_sends_much_at_once_is_read_no_further_before_others_have_had_their_turns(
    monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    monkeypatch.setattr(protocol, "REST_S", 3600.0)
    seen, enough = 0, asyncio.Event()
    received = protocol.Connection.data_received

    def counted(connection: protocol.Connection, data: bytes) -> None:
        nonlocal seen
        seen += len(data)
        received(connection, data)
        if connection._resting is not None:
            enough.set()

    monkeypatch.setattr(protocol.Connection, "data_received", counted)
    body = b"x" * 4_000_000
    async with serving(echo) as connect:
        head = b"no HTTP\r\n\r\n" if refused else get("/", f"Content-Length: {len(body)}", method="POST")
        await connect(head + body)
        await asyncio.wait_for(enough.wait(), PATIENCE_S)
        before = seen
        for _ in range(3):
            assert (await (await connect(get("/", CLOSE))).rest()).startswith(b"HTTP/1.1 200")
        assert seen - before == 3 * len(get("/", CLOSE))
        connect.server._connections.abort()


@both_loops
@pytest.mark.parametrize("framing", ["Content-Length: 500000", "Transfer-Encoding: chunked"])
async def test_no_more_than_a_part_of_what_has_come_is_parsed_in_one_turn(framing: str) -> None:
    body = b"x" * 500_000
    framed = body if framing.startswith("Content-Length") else b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    sent = get("/", framing, CLOSE, method="POST") + framed
    async with serving(echo) as connect:
        client = await connect(get("/"))
        await client.until(b"GET /? ")
        (connection,) = connect.server._connections.open
        connection.data_received(sent)
        assert len(sent) - len(connection._unparsed) <= protocol.TURN_BYTES_MAX + protocol.PIECE_BYTES
        ((_, answered),) = bodies(await client.rest())
        assert answered == b"POST /? " + body


@both_loops
async def test_a_connection_that_has_rested_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    rests = 0
    rest = protocol.Connection._rest

    def counted(connection: protocol.Connection, *for_s: float) -> None:
        nonlocal rests
        rests += connection._resting is None
        rest(connection, *for_s)

    monkeypatch.setattr(protocol.Connection, "_rest", counted)
    body = b"0123456789" * 100_000
    async with serving(echo) as connect:
        client = await connect(get("/", f"Content-Length: {len(body)}", CLOSE, method="POST") + body)
        ((_, answered),) = bodies(await client.rest())
        assert answered.endswith(body)
    assert rests > 0


async def _send_each(client: Client, parts: list[bytes]) -> None:
    for part in parts:
        client.send(part)
        await client.writer.drain()


@both_loops
async def test_an_accept_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    real = asyncio.get_running_loop().sock_accept
    failures = iter([OSError(24, "Too many open files"), OSError(103, "Software caused connection abort")])

    class Loop:
        async def sock_accept(self, listening: Any) -> Any:
            error = next(failures, None)
            if error is not None:
                raise error
            return await real(listening)

        def __getattr__(self, name: str) -> Any:
            return getattr(loop, name)

    loop = asyncio.get_running_loop()
    monkeypatch.setattr("pgleaderlock._http.server.asyncio.get_running_loop", Loop)
    async with serving(echo) as connect:
        monkeypatch.undo()
        client = await connect(get("/", CLOSE))
        assert bodies(await client.rest()) == [(200, b"GET /? ")]


@both_loops
async def test_a_handshake_that_never_ends_takes_nobodys_place(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "here")
    async with serving(echo, Tls(cert, key), header_timeout_s=0.3, connections_max=1) as connect:
        silent = await connect()
        assert await silent.rest() == b""
        no_tls = await connect(get("/"))
        with contextlib.suppress(ConnectionResetError):
            await no_tls.rest()
        await connect.nobody_left()


# --- When all places are taken


class Patient:
    """An application whose requests to /wait end when they may."""

    def __init__(self) -> None:
        self.begun = asyncio.Semaphore(0)
        self.go = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/wait":
            self.begun.release()
            await self.go.wait()
        await echo(scope, receive, send)

    async def have_begun(self, number: int) -> None:
        for _ in range(number):
            await asyncio.wait_for(self.begun.acquire(), PATIENCE_S)


@both_loops
async def test_the_idlest_connection_without_a_request_is_closed_for_a_new_one() -> None:
    app = Patient()
    async with serving(app, connections_max=3, header_timeout_s=600) as connect:
        waiting = await connect(get("/wait"))
        await app.have_begun(1)
        idlest, idle = await connect(), await connect()
        for client in (idlest, idle):
            client.send(get("/"))
            await client.until(b"GET /? ")
            await asyncio.sleep(2 * protocol.GRACE_S)
        newcomer = await connect(get("/new"))
        assert await idlest.rest() == b""
        await newcomer.until(b"GET /new? ")
        idle.send(get("/still"))
        await idle.until(b"GET /still? ")
        app.go.set()
        await waiting.until(b"GET /wait? ")


@both_loops
async def test_who_has_never_sent_a_request_counts_as_idler_than_who_has() -> None:
    async with serving(echo, connections_max=2, header_timeout_s=600) as connect:
        known = await connect(get("/"))
        await known.until(b"GET /? ")
        (connection,) = connect.server._connections.open
        silent = await connect()
        while len(connect.server._connections.open) < 2:
            await asyncio.sleep(0)
        (other,) = connect.server._connections.open - {connection}
        other.idle_since -= 2
        connection.idle_since = other.idle_since - 2
        await (await connect(get("/new"))).until(b"GET /new? ")
        assert await silent.rest() == b""
        known.send(get("/still"))
        await known.until(b"GET /still? ")


@both_loops
async def test_where_all_places_are_taken_who_sends_nothing_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_NEW_MIN", 1)
    async with serving(echo, connections_max=2, header_timeout_s=600) as connect:
        known = [await connect(get("/")) for _ in range(2)]
        for client in known:
            await client.until(b"GET /? ")
        for connection in connect.server._connections.open:
            connection.idle_since -= 10
        silent = [await connect() for _ in range(5)]
        for client in silent[:-1]:
            assert await client.rest() == b"", "newer ones have come"
        for client in known:
            client.send(get("/still"))
            await client.until(b"GET /still? ")
        for connection in connect.server._connections.open:
            connection.idle_since -= 10
        silent[-1].send(get("/at-last"))
        await silent[-1].until(b"GET /at-last? ")


@both_loops
async def test_no_more_wait_for_a_place_than_there_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_NEW_MIN", 1)
    app = Patient()
    async with serving(app, connections_max=1, header_timeout_s=600) as connect:
        busy = await connect(get("/wait"))
        await app.have_begun(1)
        server = connect.server
        clients = [await connect()]
        while not server._silent:
            await asyncio.sleep(0)
        clients[0].send(get("/0"))
        while not server._line:
            await asyncio.sleep(0)
        clients += [await connect() for _ in range(9)]
        for number, client in enumerate(clients[1:], 1):
            client.send(get(f"/{number}"))
            await asyncio.sleep(0)
            assert len(server._silent) + len(server._line) <= 2
        app.go.set()
        for number, client in enumerate(clients):
            await client.until(b"GET /%d? " % number)
        await busy.until(b"GET /wait? ")


@both_loops
async def test_who_leaves_without_a_place_or_a_word_is_forgotten() -> None:
    async with serving(echo, connections_max=1, header_timeout_s=600) as connect:
        known = await connect(get("/"))
        await known.until(b"GET /? ")
        silent = await connect()
        while not connect.server._silent:
            await asyncio.sleep(0)
        silent.writer.close()
        while connect.server._silent:
            await asyncio.sleep(0)
        known.send(get("/still"))
        await known.until(b"GET /still? ")


@both_loops
async def test_who_sends_nothing_without_a_place_is_closed_in_time_and_at_a_stop() -> None:
    async with serving(echo, connections_max=1, header_timeout_s=1.0) as connect:
        waiting = await connect(get("/"))
        await waiting.until(b"GET /? ")
        assert await (await connect()).rest() == b""
    async with serving(echo, connections_max=1, header_timeout_s=600) as connect:
        known = await connect(get("/"))
        await known.until(b"GET /? ")
        silent = await connect()
        while not connect.server._silent:
            await asyncio.sleep(0)
        await connect.server.stop(answered)
        assert await silent.rest() == b""


@both_loops
async def test_who_sends_something_in_the_turn_of_a_stop_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(echo, connections_max=1, header_timeout_s=600) as connect:
        known = await connect(get("/"))
        await known.until(b"GET /? ")
        await connect()
        server = connect.server
        while not server._silent:
            await asyncio.sleep(0)
        (accepted,) = server._silent
        monkeypatch.setattr(http_server, "_has_sent", lambda _accepted: True)
        server._speaks(accepted)
        await server.stop(answered)
        assert accepted.fileno() == -1


@both_loops
async def test_who_is_turned_away_before_its_handshake_has_begun_is_closed() -> None:
    async with serving(echo) as connect:
        ours, accepted = socket.socketpair()
        with ours:
            connect.server._let_in(accepted, ("127.0.0.1", 1))
            (task,) = connect.server._handshakes
            task.cancel()
            await asyncio.wait([task])
            assert accepted.fileno() == -1


@both_loops
async def test_where_all_have_a_request_a_new_connection_waits_for_its_turn() -> None:
    app = Patient()
    async with serving(app, connections_max=2, header_timeout_s=600) as connect:
        first, second = await connect(get("/wait")), await connect(get("/wait"))
        await app.have_begun(2)
        third = await connect(get("/third"))
        app.go.set()
        for client, told in ((first, b"GET /wait? "), (second, b"GET /wait? "), (third, b"GET /third? ")):
            await client.until(told)
        app.go.clear()
        busy = [await connect(get("/wait")) for _ in range(2)]
        await app.have_begun(2)
        late = await connect(get("/late"))
        await connect.server.stop(answered)
        with contextlib.suppress(ConnectionResetError):
            assert await late.rest() == b"", "its turn never came"
        assert [await client.rest() for client in busy] == [b"", b""]


async def _wanted(connect: Connect, number: int) -> None:
    """Returns when so many new clients wait for a place."""
    while connect.server._connections.places_wanted != number:
        await asyncio.sleep(0)


@both_loops
@pytest.mark.parametrize("at_once", [None, now], ids=["by the application", "at once"])
async def test_where_no_connection_is_ever_idle_the_next_that_is_answered_gives_its_place_to_a_new_one(
    monkeypatch: pytest.MonkeyPatch, at_once: Callable[[Exchange], bool] | None
) -> None:
    monkeypatch.setattr(protocol, "GRACE_S", float("inf"))
    async with serving(echo, at_once=at_once, connections_max=2, header_timeout_s=600) as connect:
        first, second = [await connect(get("/")) for _ in range(2)]
        for client in (first, second):
            assert b"connection: close" not in await client.until(b"\r\n\r\n")
        newcomer = await connect(get("/new"))
        await asyncio.wait_for(_wanted(connect, 1), PATIENCE_S)
        first.send(get("/last"))
        answers = await first.rest()
        assert b"connection: close" in answers
        assert b"/last" in answers, "the request is not lost"
        assert b"connection: close" not in await newcomer.until(b"\r\n\r\n")
        second.send(get("/still"))
        assert b"connection: close" not in await second.until(b"/still"), "only one was wanted"


@both_loops
async def test_a_full_server_keeps_its_connections_alive_while_no_new_one_waits() -> None:
    async with serving(echo, connections_max=1, header_timeout_s=600) as connect:
        client = await connect()
        for path in ("/1", "/2", "/3"):
            client.send(get(path))
            assert b"connection: close" not in await client.until(b"GET %s? " % path.encode())


@both_loops
@pytest.mark.parametrize("when", ["at once", "later"])
async def test_as_many_connections_end_with_their_answer_as_there_are_new_ones(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.setattr(protocol, "GRACE_S", float("inf"))
    async with serving(echo, at_once=now, connections_max=3, header_timeout_s=600) as connect:
        known = [await connect(get("/")) for _ in range(3)]
        for client in known:
            await client.until(b"\r\n\r\n/")
        if when == "at once":  # as on a busy server, which accepts long after the client has sent
            monkeypatch.setattr(http_server, "_has_sent", lambda _accepted: True)
        newcomers = [await connect(get("/new") if when == "at once" else b"") for _ in range(2)]
        if when == "later":
            while len(connect.server._silent) < 2:
                await asyncio.sleep(0)
            for client in newcomers:
                client.send(get("/new"))
        await asyncio.wait_for(_wanted(connect, 2), PATIENCE_S)
        for connection in list(connect.server._connections.open):  # in one turn: no place is free in between
            connection.data_received(get("/last"))
        answers = [await client.until(b"\r\n\r\n/last") for client in known]
        assert sorted(b"connection: close" in each for each in answers) == [False, True, True]
        for client in newcomers:
            await client.until(b"\r\n\r\n/new")


@both_loops
async def test_a_place_that_is_free_already_is_not_taken_from_another_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "GRACE_S", float("inf"))
    handed_out = asyncio.Event()

    async def within(_timeout_s: float, waiting: Coroutine[Any, Any, Any]) -> None:
        waiting.close()
        await handed_out.wait()

    async with serving(echo, at_once=now, connections_max=2, header_timeout_s=600) as connect:
        first, second = [await connect(get("/")) for _ in range(2)]
        for client in (first, second):
            await client.until(b"\r\n\r\n/")
        with monkeypatch.context() as patched:
            patched.setattr(http_server, "within", within)
            newcomer = await connect(get("/new"))
            await asyncio.wait_for(_wanted(connect, 1), PATIENCE_S)
            first.send(get("/last"))
            assert b"connection: close" in await first.rest()
            second.send(get("/still"))
            assert b"connection: close" not in await second.until(b"\r\n\r\n/still")
            handed_out.set()
            await newcomer.until(b"\r\n\r\n/new")


@both_loops
@pytest.mark.parametrize(("per_address_max", "most"), [(None, http_server._NEW_PER_TURN), (99, 1)])
async def test_places_are_handed_out_in_small_parts(
    monkeypatch: pytest.MonkeyPatch, per_address_max: int | None, most: int
) -> None:
    async with serving(echo, connections_max=200, connections_per_address_max=per_address_max) as connect:
        server, turn, in_a_turn = connect.server, 0, collections.Counter[int]()
        monkeypatch.setattr(server, "_let_in", lambda _accepted, _peer: in_a_turn.update([turn]))
        with socket.socket() as client:
            server._line.extend([(client, ("127.0.0.1", 1))] * 100)
            server._longer.set()
            while server._line:
                turn += 1
                await asyncio.sleep(0)
        assert sum(in_a_turn.values()) == 100
        assert max(in_a_turn.values()) == most


@both_loops
async def test_a_client_that_keeps_its_ended_connection_open_keeps_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "LINGER_S", 600)
    async with serving(deaf, connections_max=1, header_timeout_s=600) as connect:
        refused = await connect(get("/", "Content-Length: 9", method="POST"))
        await refused.until(b"too long")  # its body is missing, so the server waits for the client to close
        (connection,) = connect.server._connections.open
        assert connect.server._connections.ending == {connection}
        await (await connect(get("/new"))).until(b"too long")


@both_loops
async def test_who_does_not_read_its_answer_loses_its_place() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send(
            {"type": "http.response.body", "body": bytes(16 * 1024 * 1024) if scope["path"] == "/long" else b"short"}
        )

    async with serving(app, connections_max=1, header_timeout_s=600) as connect:
        deaf_one = await connect()
        deaf_one.deafen()
        deaf_one.send(get("/long"))
        await (await connect(get("/"))).until(b"short")


class _CancelledInArrival(dict[Any, Any]):
    """Cancels the first client's task after its first step, just before its protocol is told of the connection."""

    cancels = 1

    def __setitem__(self, client: Any, begun: Any) -> None:
        super().__setitem__(client, begun)
        if self.cancels:
            self.cancels -= 1
            asyncio.get_running_loop().call_soon(begun[0].cancel)


@both_loops
async def test_a_client_that_is_closed_while_it_arrives_keeps_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvloop does not tell a protocol that its connection has ended if that was cancelled while it began."""
    async with serving(echo, connections_max=1, header_timeout_s=600) as connect:
        monkeypatch.setattr(connect.server._connections, "arriving", _CancelledInArrival())
        first = await connect()
        assert await first.rest() == b""
        await connect.nobody_left()
        second = await connect(get("/next"))
        assert b" 200 " in await second.until(b"\r\n")


@both_loops
async def test_a_handshake_that_takes_long_loses_its_place(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "here")
    async with serving(echo, Tls(cert, key), header_timeout_s=600, connections_max=1) as connect:
        silent = await connect()
        trusting = ssl.create_default_context(cafile=str(cert))
        reader, writer = await asyncio.open_connection(*connect.address, ssl=trusting, server_hostname="127.0.0.1")
        client = Client(reader, writer)
        connect.clients.append(client)
        client.send(get("/"))
        await client.until(b"GET /? ")
        assert await silent.rest() == b""


@both_loops
async def test_a_client_whose_address_has_too_many_connections_does_not_wait_in_line() -> None:
    app = Patient()
    async with serving(app, connections_max=2, connections_per_address_max=1, header_timeout_s=600) as connect:
        busy = [await connect(get("/wait"), f"127.0.0.{number}") for number in (1, 2)]
        await app.have_begun(2)
        with contextlib.suppress(ConnectionResetError):
            assert await (await connect(get("/"), "127.0.0.1")).rest() == b"", "it is closed while no place is free"
        patient = await connect(get("/third"), "127.0.0.3")
        app.go.set()
        for client, told in zip((*busy, patient), (b"GET /wait? ", b"GET /wait? ", b"GET /third? "), strict=True):
            await client.until(told)


@both_loops
async def test_an_address_has_as_many_connections_as_it_may(caplog: pytest.LogCaptureFixture) -> None:
    app = Patient()
    async with serving(app, connections_per_address_max=2, header_timeout_s=600) as connect:
        silent = [await connect() for _ in range(2)]
        while len(connect.server._connections.open) < 2:
            await asyncio.sleep(0)
        for connection in connect.server._connections.open:
            connection.idle_since -= 1
        busy = [await connect(get("/wait")) for _ in range(2)]
        await app.have_begun(2)
        assert [await client.rest() for client in silent] == [b"", b""]
        assert await (await connect()).rest() == b"", "it is one too many, and no other of this address is idle"
        assert "connection_refused client=127.0.0.1 limit=2" in caplog.text
        await (await connect(get("/other"), address="127.0.0.2")).until(b"GET /other? ")
        app.go.set()
        for client in busy:
            await client.until(b"GET /wait? ")


@both_loops
async def test_half_of_the_next_request_sets_no_deadline_for_the_one_before_it() -> None:
    asked, go = asyncio.Event(), asyncio.Event()

    async def patient(scope: Any, receive: Any, send: Any) -> None:
        asked.set()
        await go.wait()
        await echo(scope, receive, send)

    async with serving(patient) as connect:
        client = await connect(get("/first") + b"GET /sec")
        await asyncio.wait_for(asked.wait(), PATIENCE_S)
        (connection,) = connect.server._connections.open
        assert connection.deadline == protocol.NEVER
        go.set()
        client.send(b"ond HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
        assert [body for _, body in bodies(await client.rest())] == [b"GET /first? ", b"GET /second? "]


# --- Answered at once, without a task


async def begun(connect: Connect) -> None:
    """Its one connection has begun a request."""
    while not any(connection._answering for connection in connect.server._connections.open):
        await asyncio.sleep(0)


@both_loops
async def test_what_is_answered_at_once_later_and_by_the_application_comes_in_the_order_of_the_requests() -> None:
    later: list[Exchange] = []

    def at_once(exchange: Exchange) -> bool:
        if exchange.path == b"/later":
            later.append(exchange)
            asyncio.get_running_loop().call_soon(exchange.answer, text(b"later"), None)
        elif exchange.path == b"/now":
            exchange.answer(text(b"now"), None)
        return exchange.path != b"/app"

    paths = ["/now", "/later", "/app", "/now", "/later", "/now", "/app"]
    async with serving(echo, at_once=at_once) as connect:
        client = await connect(b"".join(get(path) for path in paths) + get("/now", CLOSE))
        answers = [body for _, body in bodies(await client.rest())]
        assert answers == [
            b"now", b"later", b"GET /app? ", b"now", b"later", b"now", b"GET /app? ", b"now",
        ]  # fmt: skip
        assert len(later) == 2
        await connect.nobody_left()


@both_loops
async def test_hundreds_of_requests_answered_at_once_in_one_go_need_no_deeper_stack() -> None:
    deepest = 0

    def at_once(exchange: Exchange) -> bool:
        nonlocal deepest
        deepest = max(deepest, len(inspect.stack(0)))
        exchange.answer(text(b"now"), None)
        return True

    async with serving(echo, at_once=at_once) as connect:
        await (await connect(get("/", CLOSE))).rest()
        alone = deepest
        answers = bodies(await (await connect(get("/") * 300 + get("/", CLOSE))).rest())
        assert len(answers) == 301
        assert deepest <= alone + 2


@both_loops
async def test_of_requests_in_one_go_no_more_is_parsed_in_a_turn_than_a_piece() -> None:
    sent = get("/") * 1_000 + get("/", CLOSE)
    async with serving(echo, at_once=now) as connect:
        client = await connect(get("/"))
        await client.until(b"\r\n\r\n/")
        (connection,) = connect.server._connections.open
        connection.data_received(sent)
        assert len(sent) - len(connection._unparsed) <= protocol.PIECE_BYTES
        assert len(bodies(await client.rest())) == 1_001


@contextlib.asynccontextmanager
async def with_requests_left() -> AsyncIterator[tuple[Connect, Client, protocol.Connection]]:
    """One client has sent two requests more than are begun in one turn, and that turn is over."""
    async with serving(echo, at_once=now) as connect:
        client = await connect(get("/"))
        await client.until(b"\r\n\r\n/")
        (connection,) = connect.server._connections.open
        connection.data_received(get("/") * (protocol.AT_ONCE_MAX + 2))
        assert len(connection._waiting) == 2
        yield connect, client, connection


@both_loops
async def test_a_connection_whose_requests_wait_for_the_next_turn_is_not_idle_at_a_stop() -> None:
    async with with_requests_left() as (connect, client, _):
        connect.server._connections.stop()
        answers = await client.rest()
        assert len(bodies(answers)) == protocol.AT_ONCE_MAX + 1
        assert b"connection: close" in answers, "the next one is answered, and told that it is the last"


@both_loops
async def test_a_connection_whose_requests_wait_for_the_next_turn_is_not_closed_for_another_client() -> None:
    async with with_requests_left() as (connect, client, connection):
        connection.idle_since = float("-inf")
        assert connect.server._connections.close_idlest(1) == 0
        client.send(get("/", CLOSE))
        assert len(bodies(await client.rest())) == protocol.AT_ONCE_MAX + 3


@both_loops
async def test_what_comes_while_a_connection_rests_is_answered_last() -> None:
    """TLS may still give what it has read: here a request whose head is known, and that needs no parser."""
    last = get("/last", "Content-Length: 0", method="POST")
    async with serving(echo, at_once=now) as connect:
        client = await connect(last)
        await client.until(b"\r\n\r\n/last")
        (connection,) = connect.server._connections.open
        padding = "A: " + "b" * (128 - len(get("/", "A: ")))
        connection.data_received(get("/", padding) * 100)  # a piece ends where a request ends
        connection.data_received(last)
        client.send(get("/close", CLOSE))
        assert [body for _, body in bodies(await client.rest())] == [b"/"] * 100 + [b"/last", b"/close"]


@both_loops
async def test_hundreds_of_requests_in_one_go_let_others_have_their_turn() -> None:
    loop = asyncio.get_running_loop()
    turn = 0
    in_a_turn: collections.Counter[int] = collections.Counter()

    def tick() -> None:
        nonlocal turn
        turn += 1
        loop.call_soon(tick)

    def at_once(exchange: Exchange) -> bool:
        in_a_turn[turn] += 1
        exchange.answer(text(b"now"), None)
        return True

    async with serving(echo, at_once=at_once) as connect:
        tick()
        answers = bodies(await (await connect(get("/", "A: " + "b" * 400) * 1_000 + get("/", CLOSE))).rest())
    assert len(answers) == 1_001
    # The end of a rest, and a read that follows it, may come between two ticks: between those two others are read, too.
    assert max(in_a_turn.values()) <= 2 * protocol.AT_ONCE_MAX


@both_loops
async def test_who_waits_with_more_behind_it_than_is_kept_is_told_that_its_client_has_gone() -> None:
    """Reading has stopped, so that nobody could see the client leave."""
    for behind in (get("/") * 80, get("/", f"Content-Length: {2**20}", method="POST") + bytes(2**20)):
        told = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any, told: asyncio.Event = told) -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            told.set()
            await send({"type": "http.response.start", "status": 400, "headers": [(b"connection", b"close")]})
            await send({"type": "http.response.body", "body": b"left"})

        async with serving(app) as connect:
            client = await connect(get("/waits"))
            client.send(behind)
            await asyncio.wait_for(told.wait(), PATIENCE_S)


@both_loops
async def test_who_does_not_read_is_answered_by_a_task_that_waits_for_it() -> None:
    by_a_task = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        by_a_task.set()
        await echo(scope, receive, send)

    def at_once(exchange: Exchange) -> bool:
        exchange.answer(text(bytes(8 * 1024 * 1024)), None)
        return True

    async with serving(app, at_once=at_once) as connect:
        client = await connect()
        client.deafen()
        client.send(get("/") * 3)
        await asyncio.wait_for(by_a_task.wait(), PATIENCE_S)


@both_loops
async def test_a_body_that_has_not_come_as_a_whole_is_the_applications() -> None:
    def at_once(exchange: Exchange) -> bool:
        raise AssertionError("half of a request")

    async with serving(echo, at_once=at_once) as connect:
        client = await connect(b"POST /half HTTP/1.1\r\nHost: here\r\nConnection: close\r\nContent-Length: 4\r\n\r\nab")
        await asyncio.wait_for(begun(connect), PATIENCE_S)
        client.send(b"cd")
        assert [body for _, body in bodies(await client.rest())] == [b"POST /half? abcd"]
