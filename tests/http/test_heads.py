"""A head that is known means what it means to the parser: every request is answered as by a server that knows none."""

import asyncio
import re
from collections.abc import Callable, Iterator
from typing import Any, Self

import pytest
import uvloop
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pgleaderlock._http import protocol
from pgleaderlock._http.protocol import NEVER, Connection, Exchange
from pgleaderlock._http.server import HttpServer, ServingLimits, listen

BODY = b'{"owner_id":"me"}'
KEY = b"Idempotency-Key: 0123-abc-1\r\n"


def request(*lines: bytes, path: bytes = b"/v1/locks/job/acquire", body: bytes = BODY) -> bytes:
    head = b"POST %s HTTP/1.1\r\nHost: here\r\n%s" % (path, b"".join(lines))
    return head + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


go_on = asyncio.Event()


async def tell_all(scope: Any, receive: Any, send: Any) -> None:
    """Answers with what an application is told: to /slow when it may go on, to /deaf before the body."""
    body, more = b"", scope["path"] != "/deaf"
    if scope["path"] == "/slow":
        await go_on.wait()
    while more:
        message = await receive()
        more = message.get("more_body", False)
        body += message.get("body", b"<gone>")
    told = {name: scope[name] for name in ("http_version", "method", "path", "raw_path", "query_string")}
    said = repr((told, sorted(scope["headers"]), body)).encode()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": said})


async def _answered() -> None:
    pass


def _without_date(answer: bytes) -> bytes:
    return re.sub(rb"\r\ndate: [^\r]*", b"", answer)


class Servers:
    """Two of them: `taught` has seen the usual requests, `fresh` forgets each as soon as it has come."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self.recalled = 0
        self.runner.run(self._start())

    async def _start(self) -> None:
        listening = [listen("127.0.0.1", 0) for _ in range(2)]
        self._servers = [HttpServer(tell_all, each, ServingLimits(), None, None) for each in listening]
        self._addresses = [each.getsockname() for each in listening]
        for server in self._servers:
            server.start()
        taught, fresh = (server._connections.heads for server in self._servers)
        recall = taught.recall

        def counted(data: bytes, connection: Any) -> Exchange | None:
            found = recall(data, connection)
            self.recalled += found is not None
            return found

        taught.recall = counted  # type: ignore[method-assign]
        fresh.learn = lambda data, exchange: None  # type: ignore[method-assign]

    async def _ask(self, server: int, data: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(*self._addresses[server])
        writer.write(data)
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        return _without_date(answer)

    def taught(self, data: bytes) -> bytes:
        return self.runner.run(self._ask(0, data))

    def fresh(self, data: bytes) -> bytes:
        return self.runner.run(self._ask(1, data))

    def close(self) -> None:
        for server in self._servers:
            self.runner.run(server.stop(_answered))
        self.runner.close()


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    made = Servers()
    yield made
    made.close()


def test_the_next_request_of_a_kind_is_known_whatever_its_path_key_and_body(servers: Servers) -> None:
    servers.taught(request(KEY))
    before = servers.recalled
    other = request(b"Idempotency-Key: another\r\n", path=b"/v1/locks/a%20b/renew", body=b'{"owner_id":"us"}')
    assert servers.taught(other) == servers.fresh(other)
    assert servers.recalled == before + 1


CHUNKED = b"POST / HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (request(KEY), request(KEY, KEY)),
        (request(KEY, KEY), request(KEY, KEY)),
        (request(KEY), request(b"Idempotency-Key: a\r\n and more\r\n")),
        (request(b"X: 1\r\n"), request(b"X: 1\r\n", KEY)),
        (request(KEY), request(b"Idempotency-Key: two words\r\n")),
        (request(b"idempotency-KEY: 1\r\n"), request(b"idempotency-KEY: 1\r\n", KEY)),
        (request(KEY), request(KEY)[:-3]),
        (request(KEY), request(KEY) + b"more"),
        (request(KEY), request(KEY) + request(KEY)),
        (request(KEY) + request(KEY), request(KEY)),
        (request(b"X: 1\r\n") + request(b"X: 2\r\n"), request(b"X: 1\r\n")),
        (CHUNKED, CHUNKED),
        (CHUNKED, CHUNKED[:-5]),
        (request(b"X: 1\n"), request(b"X: 1\n")),
        (request(b"Connection: close\r\n"), request(b"Connection: close\r\n") + request()),
        (request(b"Expect: 100-continue\r\n"), request(b"Expect: 100-continue\r\n")),
        (request(b"Upgrade: h2c\r\nConnection: upgrade\r\n"), request(b"Upgrade: h2c\r\nConnection: upgrade\r\n")),
        (request(path=b"/?a=b"), request(path=b"/?a=c")),
        (request(path=b"http://there/x"), request(path=b"http://there/y")),
        (request(), request().replace(b"POST", b"PUT", 1)),
        (request(), request().replace(b"HTTP/1.1", b"HTTP/1.0", 1)),
        (request(), request().replace(b" HTTP/1.1\r\n", b" HTTP/1.1\n", 1)),
        (request(body=b"\r\n\r\n"), request(body=b"\r\n\r\n")),
        (b"\r\n" + request(), b"\r\n" + request()),
    ],
)
def test_what_only_resembles_a_known_request_is_read_as_if_it_were_the_first(
    servers: Servers, first: bytes, then: bytes
) -> None:
    servers.taught(first)
    assert servers.taught(then) == servers.fresh(then)


@given(
    places=st.lists(st.integers(0, 160), min_size=1, max_size=3),
    bytes_=st.lists(st.sampled_from(list(b"\r\n\0 :;,01279aHP/%?\t\xff")), min_size=3, max_size=3),
    inserts=st.booleans(),
)
@example(places=[400], bytes_=[0, 0, 0], inserts=False)
@settings(max_examples=400, deadline=None)
def test_a_damaged_request_is_never_taken_for_a_known_one(
    servers: Servers, places: list[int], bytes_: list[int], inserts: bool
) -> None:
    servers.taught(request(KEY))
    damaged = bytearray(request(KEY))
    for place, byte in zip(places, bytes_, strict=False):
        if place < len(damaged):
            damaged[place : place if inserts else place + 1] = bytes([byte])
    assert servers.taught(bytes(damaged)) == servers.fresh(bytes(damaged))


def test_the_bounds_of_a_head_are_those_of_one_that_is_not_known(servers: Servers) -> None:
    lines = b"".join(b"a%d:b\r\n" % number for number in range(97))
    for with_key in (request(lines), request(lines, KEY)):  # 100 lines, and 101
        assert servers.taught(with_key) == servers.fresh(with_key)
    servers.taught(request(KEY))
    for server in servers._servers:
        server._connections.header_bytes_max = server._connections.heads._header_bytes_max = 512
    long = request(KEY, path=b"/" + b"a" * 900)
    try:
        assert servers.taught(long) == servers.fresh(long)
        assert b" 431 " in servers.taught(long)
    finally:
        for server in servers._servers:
            server._connections.header_bytes_max = server._connections.heads._header_bytes_max = 16 * 1024


def test_an_application_that_changes_the_headers_it_was_given_changes_nobody_elses(servers: Servers) -> None:
    plain = request(b"Z: 1\r\n")
    servers.taught(plain)
    heads_ = servers._servers[0]._connections.heads
    for _ in range(2):
        exchange = heads_.recall(plain, None)  # type: ignore[arg-type]
        assert exchange is not None
        assert len(exchange.headers) == 4
        exchange.headers.append((b"x", b"y"))


def test_a_connection_keeps_nothing_of_what_was_answered_and_blank_lines_between_requests_do_not_add_up(
    servers: Servers,
) -> None:
    async def ask() -> None:
        async with Talk(servers, 0) as talk:
            for data in (request(), request(body=b"a" * 100_000), request()):
                talk.writer.write(data)
                head = await asyncio.wait_for(talk.reader.readuntil(b"\r\n\r\n"), 20)
                await talk.reader.readexactly(int(head.partition(b"content-length: ")[2]))
                connection = await talk.say(b"", until=lambda connection: not connection._answering)
                assert connection._alone is None
                assert not connection._unparsed
                assert connection._unread_bytes == 0
                await talk.say(b"\r\n", until=lambda connection: connection._unread_bytes == 2)

    servers.taught(request())
    servers.runner.run(ask())


def test_however_many_kinds_there_are_only_a_few_are_kept(servers: Servers) -> None:
    known = servers._servers[0]._connections.heads._known
    for number in range(3 * protocol.KNOWN_MAX):
        servers.taught(request(b"X: %d\r\n" % number))
        assert len(known) <= protocol.KNOWN_MAX
    before = len(known)
    servers.taught(request(b"X: %s\r\n" % (b"a" * protocol.LINES_BYTES_MAX)))
    assert len(known) == before


class Talk:
    """With the taught server, over one connection."""

    def __init__(self, servers: Servers, server: int) -> None:
        self._servers, self._server = servers, server

    async def __aenter__(self) -> Self:
        self.reader, self.writer = await asyncio.open_connection(*self._servers._addresses[self._server])
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    async def say(self, data: bytes, until: Callable[[Connection], object]) -> Connection:
        """Returns when that is so at the server's end."""
        self.writer.write(data)
        opened = self._servers._servers[self._server]._connections.open
        async with asyncio.timeout(20):
            while True:
                for connection in opened:
                    if connection.client == self.writer.get_extra_info("sockname") and until(connection):
                        return connection
                await asyncio.sleep(0)

    async def rest(self) -> bytes:
        self.writer.write_eof()
        return _without_date(await asyncio.wait_for(self.reader.read(), 20))


@pytest.mark.parametrize("outer", [b"Content-Length: %d\r\n\r\n" % len(request(KEY)), b"X: "], ids=["body", "head"])
def test_what_comes_in_the_middle_of_a_request_is_not_mistaken_for_the_beginning_of_another(
    servers: Servers, outer: bytes
) -> None:
    servers.taught(request(KEY))

    async def ask(server: int) -> bytes:
        async with Talk(servers, server) as talk:
            await talk.say(b"POST /outer HTTP/1.1\r\n", until=lambda connection: connection._head is not None)
            await talk.say(outer, until=lambda connection: connection._arriving or connection._unread_bytes >= 25)
            talk.writer.write(request(KEY))
            return await talk.rest()

    said = servers.runner.run(ask(0))
    assert said == servers.runner.run(ask(1))
    assert b"/outer" in said


@pytest.mark.parametrize("known", [True, False])
def test_one_that_comes_while_another_is_answered_waits_for_its_turn_and_both_are_learnt_as_what_they_are(
    servers: Servers, known: bool
) -> None:
    slow, other = request(b"X: slow %d\r\n" % known, path=b"/slow"), request(b"Y: other %d\r\n" % known)
    go_on.set()
    if known:
        servers.taught(slow)
        servers.taught(other)
    go_on.clear()

    async def ask() -> bytes:
        async with Talk(servers, 0) as talk:
            connection = await talk.say(slow, until=lambda connection: connection._answering)
            assert connection.deadline == NEVER, "it takes its time, and its head has come"
            await talk.say(other, until=lambda connection: connection._waiting)
            assert connection._answering is not None
            assert connection._answering.path == b"/slow"
            go_on.set()
            return await talk.rest()

    said = servers.runner.run(ask())
    assert said.index(b"/slow") < said.index(b"/v1/locks/job/acquire")
    for each in (slow, other):
        assert servers.taught(each) == servers.fresh(each)


def test_the_rest_of_a_body_that_nobody_wanted_is_no_request(servers: Servers) -> None:
    servers.taught(request(KEY))
    recalled = servers.recalled

    async def ask() -> bytes:
        async with Talk(servers, 0) as talk:
            head = b"POST /deaf HTTP/1.1\r\nHost: here\r\nContent-Length: 100000\r\n\r\n"
            await talk.say(head, until=lambda connection: connection._state >= protocol._DEAF)
            talk.writer.write(request(KEY))
            return await talk.rest()

    assert servers.runner.run(ask()).count(b"HTTP/1.1 200 ") == 1
    assert servers.recalled == recalled
