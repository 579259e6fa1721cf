"""The HTTP layer of our servers, byte by byte: what it lets through, in which order, and how a connection ends."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from pgleaderlock._http import http1
from pgleaderlock._http.serving import HttpServer, ServingLimits, listen

PATIENCE_S = 20.0
App = Callable[[Any, Any, Any], Any]


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

    async def rest(self) -> bytes:
        """Everything until the server closes."""
        return await asyncio.wait_for(self.reader.read(), PATIENCE_S)

    async def until(self, end: bytes) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(end), PATIENCE_S)


@contextlib.asynccontextmanager
async def serving(app: App, **limits: Any) -> AsyncIterator[Callable[..., Any]]:
    """Gives a function that connects and sends."""
    listening = listen("127.0.0.1", 0)
    address = listening.getsockname()
    server = HttpServer(app, listening, ServingLimits(**limits))
    server.start()
    clients: list[Client] = []

    async def connect(data: bytes = b"") -> Client:
        client = Client(*await asyncio.open_connection(*address))
        clients.append(client)
        client.send(data)
        return client

    async def answered() -> None:
        pass

    try:
        yield connect
    finally:
        await server.stop(answered)
        for client in clients:
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
        (get("/", version="1.0"), b"GET /? "),
        (get("/", "Connection: keep-alive", version="1.0"), b"GET /? "),
    ],
)  # fmt: skip
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
async def test_what_is_no_request_is_answered_and_ends_the_connection(sent: bytes, status: int, text: bytes) -> None:
    async with serving(echo) as connect:
        for before, answers in ((b"", []), (get("/good"), [(200, b"GET /good? ")])):
            client = await connect(before + sent)
            *earlier, (seen, body) = bodies(await client.rest())
            assert (earlier, seen) == (answers, status)
            assert text in body


async def test_a_header_that_never_ends_is_refused_when_it_is_too_long() -> None:
    async with serving(echo) as connect:
        client = await connect(b"GET / HTTP/1.1\r\nA: " + b"b" * 20_000)
        assert bodies(await client.rest())[0][0] == 431


async def test_a_chunk_that_is_none_ends_the_request_as_if_the_client_had_gone() -> None:
    async with serving(echo) as connect:
        client = await connect(get("/", "Transfer-Encoding: chunked", method="POST") + b"zz\r\n")
        (first, *_) = bodies(await client.rest())
        assert first == (200, b"POST /? "), "the application was told of the end"


async def test_a_client_that_waits_for_leave_to_send_its_body_gets_it() -> None:
    async with serving(echo) as connect:
        client = await connect(get("/", "Expect: 100-continue", "Content-Length: 3", CLOSE, method="POST"))
        assert await client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(b"abc")
        assert bodies(await client.rest()) == [(200, b"POST /? abc")]


async def test_a_client_that_still_sends_gets_to_read_why_it_is_refused() -> None:
    length = 3_000_000
    async with serving(deaf) as connect:
        client = await connect(get("/", f"Content-Length: {length}", method="POST") + b"x" * length)
        answer = await client.rest()
        assert bodies(answer) == [(413, b"too long")]
        assert b"connection: close" in answer


async def test_a_body_that_nobody_reads_does_not_fill_the_memory() -> None:
    began, go = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        began.set()
        await go.wait()
        await echo(scope, receive, send)

    length = 50_000_000
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


async def test_the_answer_to_head_has_no_body_and_the_next_one_is_read_right() -> None:
    async with serving(echo) as connect:
        client = await connect(get("/", method="HEAD") + get("/next", CLOSE))
        answers = await client.rest()
        head, _, rest = answers.partition(b"\r\n\r\n")
        assert b"content-length: 8" in head
        assert bodies(rest) == [(200, b"GET /next? ")]


async def test_a_client_that_sends_no_more_is_answered_all_the_same() -> None:
    async with serving(echo) as connect:
        client = await connect(get("/"))
        client.writer.write_eof()
        assert bodies(await client.rest()) == [(200, b"GET /? ")]


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
        client.writer.transport.pause_reading()
        await asyncio.wait_for(cut.wait(), PATIENCE_S)


async def test_an_application_that_fails_leaves_nobody_waiting() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("a defect")

    async with serving(app) as connect:
        client = await connect(get("/"))
        with contextlib.suppress(ConnectionResetError):
            assert await client.rest() == b""
