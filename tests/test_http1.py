"""The HTTP layer of our servers, byte by byte: what it lets through, in which order, and how a connection ends."""

import asyncio
import contextlib
import inspect
import re
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop

from pgleaderlock._http import http1
from pgleaderlock._http.answers import Answer
from pgleaderlock._http.exchange import Exchange
from pgleaderlock._http.serving import HttpServer, ServingLimits, Tls, listen

PATIENCE_S = 20.0
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
        self._address = address

    async def __call__(self, data: bytes = b"") -> Client:
        client = Client(*await asyncio.open_connection(*self._address))
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
    monkeypatch.setattr(http1, "STALL_S", 0.2)
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
    async with serving(echo, header_timeout_s=0.2) as connect:
        client = await connect(get("/"))
        assert bodies(await client.rest()) == [(200, b"GET /? ")]


@both_loops
async def test_a_request_that_takes_its_time_is_not_cut_off_by_the_headers_limit() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.8)  # there is no signal for a sweep that does nothing: longer than two of them
        await echo(scope, receive, send)

    async with serving(app, header_timeout_s=0.2) as connect:
        client = await connect(get("/", CLOSE))
        assert bodies(await client.rest()) == [(200, b"GET /? ")]


@both_loops
async def test_who_is_refused_and_does_not_leave_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "LINGER_S", 0.2)
    async with serving(deaf) as connect:
        client = await connect(get("/", "Content-Length: 100", method="POST") + b"the rest never comes")
        await client.until(b"too long")
        await connect.nobody_left()


@both_loops
async def test_who_does_not_read_a_short_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "STALL_S", 0.2)

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
        assert len(connection._waiting) <= http1.PIPELINE_MAX + http1.PIECE_BYTES // len(get("/"))
        assert kept <= http1.BODY_BUFFER_BYTES_MAX + http1.PIECE_BYTES
        go.set()
        answers = bodies(await client.rest())
        await sending
        assert [len(answer[1]) for answer in answers] == [7] * 1_000 + [8 + len(body)] * 100 + [7]


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
    monkeypatch.setattr("pgleaderlock._http.serving.asyncio.get_running_loop", Loop)
    async with serving(echo) as connect:
        monkeypatch.undo()
        client = await connect(get("/", CLOSE))
        assert bodies(await client.rest()) == [(200, b"GET /? ")]


@both_loops
async def test_a_handshake_that_never_ends_takes_nobodys_place(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    subprocess.run([*made, "-subj", "/CN=here", "-keyout", key, "-out", cert], check=True, capture_output=True)  # noqa: ASYNC221
    async with serving(echo, Tls(cert, key), header_timeout_s=0.3, connections_max=1) as connect:
        silent = await connect()
        assert await silent.rest() == b""
        no_tls = await connect(get("/"))
        with contextlib.suppress(ConnectionResetError):
            await no_tls.rest()
        await connect.nobody_left()


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
        assert connection.deadline == http1.NEVER
        go.set()
        client.send(b"ond HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
        assert [body for _, body in bodies(await client.rest())] == [b"GET /first? ", b"GET /second? "]


# --- Answered at once, without a task


async def begun(connect: Connect) -> None:
    """Its one connection has begun a request."""
    while not any(connection._answering for connection in connect.server._connections.open):
        await asyncio.sleep(0)


def text(body: bytes) -> Answer:
    return Answer(200, body)


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
