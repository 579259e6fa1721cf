"""HTTP/1.1 on one connection: bytes become ASGI calls, and what the application sends becomes bytes.

httptools reads the syntax, strictly. This module adds what a server needs around it: requests are answered one after
the other in the order in which they came, everything has a bound, and a client gets to read its last answer.

All of it happens on the event loop's own thread. A server that speaks HTTP in threads of its own costs every request
two changes of thread, and one with a body four: more than an acquire takes beside its disk.

Imports httptools, `connections`, `exchange`, `answers` and the standard library. Must never keep more of a request than
its bounds allow, and never answer out of turn.
"""

import asyncio
from collections import deque
from http import HTTPStatus
from typing import cast

import httptools

from pgleaderlock._http.answers import Message, Refusal, answer_of, header_lines, start_of
from pgleaderlock._http.connections import Connections
from pgleaderlock._http.exchange import Exchange
from pgleaderlock._logging import get_logger

__all__ = ["Connection"]

HEADER_LINES_MAX = 100
BODY_BUFFER_BYTES_MAX = 256 * 1024
"""How much of a body is kept for an application that has not read it yet: the rest waits in the kernel."""
PIPELINE_MAX = 64
PIECE_BYTES = 8 * 1024
"""How much is parsed at once: the parser itself cannot be stopped when enough has come."""
LINGER_S = 1.0
"""How long a client that still sends is listened to after its last answer, so that it gets to read that."""
STALL_S = 30.0
"""How long a client may take to read what has been written."""
NEVER = float("inf")

_FRAMING = (b"content-length", b"transfer-encoding")
_STATUS_LINES = {int(status): f"HTTP/1.1 {int(status)} {status.phrase}\r\n".encode() for status in HTTPStatus}

_log = get_logger("pgleaderlock.server")


class Connection(asyncio.Protocol):
    """One connection: takes requests apart, and begins each when the one before it has been answered."""

    def __init__(self, shared: Connections) -> None:
        self.shared = shared
        self.deaf = False
        """Nothing that comes is read any more."""
        self._parser = httptools.HttpRequestParser(self)
        self._unparsed = b""
        self._alone: bytes | None = None
        """What is being parsed and came when nothing else was under way: perhaps one request, and all of it."""
        self._in_head = False
        self._unread_bytes = 0
        """What the parser was given since it last gave something: a line without an end, of whatever kind."""
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._declining = False
        self._arriving: Exchange | None = None
        self._answering: Exchange | None = None
        self._beginning = False
        self._task: asyncio.Task[None] | None = None
        self._waiting: deque[Exchange] = deque()
        self._refusal: Refusal | None = None
        """What came last is no request: said when those before it have been answered."""
        self._ending = False
        self._lost = False
        self._head_deadline = shared.loop.time() + shared.header_timeout_s
        self._write_deadline = NEVER
        self._writable: asyncio.Future[None] | None = None

    @property
    def deadline(self) -> float:
        return min(self._head_deadline, self._write_deadline)

    # --- From the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername")
        self.client = tuple(peer[:2]) if isinstance(peer, tuple) else None
        self.shared.open.add(self)
        self.close_if_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ending = self.deaf = self._lost = True
        self._waiting.clear()
        self._refusal = None
        self._client_has_gone()
        self.resume_writing()
        self.shared.open.discard(self)
        self.shared.fewer.set()

    def data_received(self, data: bytes) -> None:
        if self._answering is None and not self._in_head and not self.deaf:
            exchange = self.shared.heads.recall(data, self)
            if exchange is not None:
                self._unread_bytes = 0
                self._head_deadline = NEVER
                self._waiting.append(exchange)
                self._begin_next()
                return
            self._alone = data
        self._unparsed = self._unparsed + data if self._unparsed else data
        self._parse()
        self._alone = None

    def _parse(self) -> None:
        while self._unparsed and not self.deaf and not self._is_enough():
            if len(piece := self._unparsed) <= PIECE_BYTES:
                self._unparsed = b""
            else:
                piece, self._unparsed = piece[:PIECE_BYTES], piece[PIECE_BYTES:]
            self._unread_bytes += len(piece)
            try:
                self._parser.feed_data(piece)
            except httptools.HttpParserUpgrade as upgrade:
                self._decline_upgrade(piece[upgrade.args[0] :])
            except httptools.HttpParserError as error:
                ours = error.__context__
                other = Refusal(400, "this is not an HTTP/1.1 request")
                self._hear_no_more(ours if isinstance(ours, Refusal) else other)
            if self._unread_bytes > self.shared.header_bytes_max:
                self._hear_no_more(self._long_header())
            if self._waiting and self._answering is None:
                self._begin_next()
        if self.deaf:
            self._unparsed = b""
        elif self._is_enough():
            self.transport.pause_reading()

    def _decline_upgrade(self, rest: bytes) -> None:
        """The parser leaves out the body of a request that asks for another protocol. A new one, which knows nothing of
        it but its framing, reads that; what comes behind it is left out indeed."""
        framing = [b"%s: %s\r\n" % header for header in self._headers if header[0] in _FRAMING]
        self._parser = httptools.HttpRequestParser(_BodyReader(self))
        self._unparsed = b"".join((b"POST / HTTP/1.1\r\n", *framing, b"\r\n", rest, self._unparsed))

    def eof_received(self) -> bool:
        # Who has closed and who only sends no more look the same: whoever waits for the client is told that it has
        # gone, and the answer is written all the same. TLS knows no half of an end.
        self._client_has_gone()
        self._hear_no_more()
        return not self._ending and self.shared.scheme == "http"

    def pause_writing(self) -> None:
        self._writable = self.shared.loop.create_future()
        self._write_deadline = self.shared.loop.time() + STALL_S

    def resume_writing(self) -> None:
        self._write_deadline = NEVER
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

    # --- From the parser

    def on_message_begin(self) -> None:
        self._in_head = True
        self._url = b""
        self._headers = []
        self._head_left = self.shared.header_bytes_max
        if self._answering is None and not self._waiting:
            self._head_deadline = self.shared.loop.time() + self.shared.header_timeout_s

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._head_left -= len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_left -= len(name) + len(value) + 4
        if self._head_left < 0:
            raise self._long_header()
        if not self._in_head:
            return  # a trailer: nobody here reads it
        if len(self._headers) == HEADER_LINES_MAX:
            raise Refusal(431, f"there are more than {HEADER_LINES_MAX} header lines")
        self._headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._unread_bytes = 0
        self._head_deadline = NEVER
        version = self._parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise Refusal(400, f"HTTP/1.1 is spoken here, not HTTP/{version}")
        exchange = Exchange(self, self._parser.get_method(), _origin_form(self._url), version, self._headers)
        if len(exchange.named) != len(self._headers) and sum(name == b"host" for name, _ in self._headers) > 1:
            raise Refusal(400, "there is more than one Host header")
        self._declining = self._parser.should_upgrade()
        exchange.keep_alive = version == "1.1" and self._parser.should_keep_alive() and not self._declining
        exchange.expects = version == "1.1" and exchange.named.get(b"expect", b"").lower() == b"100-continue"
        self._arriving = exchange
        self._waiting.append(exchange)

    def on_body(self, body: bytes) -> None:
        self._unread_bytes = 0
        if self._arriving is not None:
            self._arriving.take(body)

    def on_message_complete(self) -> None:
        if not self._declining:
            self.complete()

    def complete(self) -> None:
        self._unread_bytes = 0
        exchange, self._arriving = self._arriving, None
        if exchange is not None:
            exchange.complete = True
            if self._alone is not None:
                self.shared.heads.learn(self._alone, exchange)
            exchange.wake()

    # --- One after the other

    def _begin_next(self) -> None:
        """The next request, or whatever this connection has come to."""
        while self._waiting:
            self._answering = exchange = self._waiting.popleft()
            if not self._begin_at_once(exchange):
                self._task = self.shared.loop.create_task(self._answer(exchange))
                return
            if not exchange.answered:
                return
            self._answering = None
            if self._was_the_last(exchange):
                return
        if self._refusal is not None:
            answer, self._refusal = answer_of(self._refusal), None
            self.write_whole(start_of(answer), answer.body, close=True)
            self._end(linger=True)
        elif self.deaf:
            self._end(linger=False)
        else:
            self._head_deadline = self.shared.loop.time() + self.shared.header_timeout_s
            self.close_if_idle()

    def _begin_at_once(self, exchange: Exchange) -> bool:
        """Without a task. A client that does not read its answers gets one, which waits for it."""
        at_once = self.shared.at_once
        if at_once is None or not exchange.complete or self._writable is not None:
            return False
        self._beginning = True
        try:
            return at_once(exchange)
        finally:
            self._beginning = False

    async def _answer(self, exchange: Exchange) -> None:
        try:
            await self.shared.app(exchange.scope, exchange.receive, exchange.send)
        except Exception as error:
            _log.error("application_failed", error, path=exchange.path)
        finally:
            self._go_on(exchange)

    def answered(self, exchange: Exchange) -> None:
        """By `at_once`. If it is still at it, whoever has called it goes on."""
        if not self._beginning:
            self._go_on(exchange)

    def _go_on(self, exchange: Exchange) -> None:
        self._answering = None
        if not exchange.answered:  # else a client would wait for ever
            self.abort()
        elif not self._was_the_last(exchange):
            self._begin_next()
            self.read_on()

    def _was_the_last(self, exchange: Exchange) -> bool:
        if exchange.complete and exchange.keep_alive:
            return False
        # The rest of a body that nobody wants is no request.
        self._end(linger=not exchange.complete or bool(self._waiting or self._unparsed))
        return True

    def read_on(self) -> None:
        if not self.transport.is_closing():
            self._parse()
            if not self._is_enough():
                self.transport.resume_reading()

    def _is_enough(self) -> bool:
        """As much has come as is kept: the rest waits in the kernel."""
        if self._answering is None or self.deaf:
            return False  # nothing is kept; or read to its end, and thrown away
        buffered = len(self._answering.body)
        if self._waiting:
            buffered += sum(len(exchange.body) for exchange in self._waiting)
        return buffered > BODY_BUFFER_BYTES_MAX or len(self._waiting) >= PIPELINE_MAX

    def _client_has_gone(self) -> None:
        for exchange in (self._answering, self._arriving, *self._waiting):
            if exchange is not None:
                exchange.gone = True
                exchange.wake()

    # --- Ending

    def _long_header(self) -> Refusal:
        return Refusal(431, f"the header is longer than {self.shared.header_bytes_max} bytes")

    def _hear_no_more(self, refusal: Refusal | None = None) -> None:
        if self.deaf:
            return
        self.deaf = True
        self._refusal = refusal
        if self._arriving is not None:  # its body ends in the middle
            self._arriving.gone = True
            self._arriving.wake()
        if self._answering is None:
            self._begin_next()

    def _end(self, *, linger: bool) -> None:
        """After the last answer. If the client still sends, the system would take that back from it at a mere close."""
        self._ending = self.deaf = True
        self._waiting.clear()
        if self._lost:
            return
        self._head_deadline = self.shared.loop.time() + (LINGER_S if linger else STALL_S)
        if linger and self.transport.can_write_eof():
            try:
                self.transport.write_eof()
            except OSError:  # the client has cut it a moment ago
                self.transport.abort()
            else:
                self.read_on()
        else:
            self.transport.close()

    def close_if_idle(self) -> None:
        """At a stop: whoever has sent nothing, or has had its answer."""
        if self.shared.stopping and self._answering is None and not self._in_head and not self._ending:
            self._end(linger=False)

    def abort(self) -> None:
        self.transport.abort()

    # --- Writing

    def write(self, data: bytes) -> None:
        if not self._lost:  # to a client that has gone there is nothing to say; uvloop would raise, asyncio warn
            self.transport.write(data)

    def write_whole(self, start: Message, body: bytes, *, close: bool, without_body: bool = False) -> None:
        head = self._head(start, close=close)
        head.append(b"content-length: %d\r\n\r\n" % len(body))
        if not without_body:
            head.append(body)
        self.write(b"".join(head))

    def write_head(self, start: Message, *, chunked: bool, close: bool) -> None:
        head = self._head(start, close=close)
        head.append(b"transfer-encoding: chunked\r\n\r\n" if chunked else b"\r\n")
        self.write(b"".join(head))

    def _head(self, start: Message, *, close: bool) -> list[bytes]:
        lines = start.get("lines") or header_lines(start["headers"])
        head = [_STATUS_LINES[start["status"]], self.shared.date(), lines]
        if close:
            head.append(b"connection: close\r\n")
        return head

    async def writable(self) -> None:
        if self._writable is not None:
            await self._writable
        elif self._lost:
            await asyncio.sleep(0)  # who writes on and on must not keep the loop to itself


class _BodyReader:
    """What a parser is given that reads the body of one request for a connection, and nothing behind it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.on_body = connection.on_body

    def on_message_complete(self) -> None:
        self._connection.complete()
        self._connection.deaf = True


def _origin_form(target: bytes) -> bytes:
    """Path and query of a target that may name the server too, as one sent to a proxy does."""
    if target[:1] == b"/":
        return target
    scheme, separator, rest = target.partition(b"://")
    if not separator or scheme.lower() not in (b"http", b"https"):
        return target
    slash = rest.find(b"/")
    return rest[slash:] if slash >= 0 else b"/"
