"""HTTP/1.1 on one connection: turns bytes into requests, and the application's answers into bytes.

httptools parses the syntax, strictly. This module adds what a server needs around it: requests are answered one after
the other in the order in which they arrived, everything has a bound, and a client gets to read its last answer.

A request that has arrived completely may be handled at once, without a task (`AtOnce`). Every other request is an ASGI
call in its own task. Everything runs on the event loop's thread (docs/adr/0007).

Must never keep more of a request than its bounds allow, never answer out of order, and never treat a line as known that
the parser has not read.
"""

import asyncio
import heapq
import operator
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, cast

import httptools

from pgleaderlock._base.logging import get_logger
from pgleaderlock._http.answers import (
    Answer,
    Header,
    Message,
    Receive,
    Refusal,
    Scope,
    Send,
    answer_of,
    header_lines,
    start_of,
)

__all__ = ["App", "AtOnce", "Connection", "Connections", "Exchange", "KnownHeads"]

HEADER_LINES_MAX = 100
BODY_BUFFER_BYTES_MAX = 256 * 1024
"""How much of a body is kept for an application that has not read it yet: the rest waits in the kernel."""
BODY_PIECE_BYTES = 64 * 1024
"""How much of a body must have arrived before the application is woken, unless the body has ended: waking it for each
byte would cost a turn of the loop per byte."""
CHUNKS_MAX = 256
CHUNK_BYTES_MIN = 64
"""A body may have `CHUNKS_MAX` chunks of any size, and one more per `CHUNK_BYTES_MIN` bytes: each chunk costs as much
time as a kilobyte."""
AT_ONCE_MAX = 4
"""How many requests of one connection are handled without a task (`AtOnce`) in one turn of the loop. The next request
waits for the next turn, so that other connections get theirs."""
PIPELINE_MAX = 64
PIECE_BYTES = 2 * 1024
"""How many bytes the parser gets at a time, because it cannot be stopped in between. Of pipelined requests that arrive
together, no more than this is parsed in one turn of the loop."""
TURN_BYTES_MAX = 64 * 1024
REST_S = 0.001
"""A connection that sends more than `TURN_BYTES_MAX` at once is not read for `REST_S`, so that others get their
turns."""
LINGER_S = 1.0
"""How long after its last answer the server reads on if the client still sends, so that the client gets the answer."""
GRACE_S = 0.1
"""How long a client has to send its next request before it counts as idle."""
UNKNOWN_IDLENESS = 10.0
"""The idle time of a client that has not sent a request yet counts this many times."""
STALL_S = 30.0
"""How long a client may take to read the answers in the write buffer."""
NEVER = float("inf")
KNOWN_MAX = 64
LINES_BYTES_MAX = 1024
LINES_MAX = 32

_ASGI = {"version": "3.0"}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
_FRAMING = (b"content-length", b"transfer-encoding")
_ONCE = (b"host", b"authorization", b"content-type", b"idempotency-key", b"x-lock-store")
"""Headers that a request may have only once: of two lines, a proxy might use the first, and this server the last."""
_STATUS_LINES = {int(status): f"HTTP/1.1 {int(status)} {status.phrase}\r\n".encode() for status in HTTPStatus}
_FIRST_LINE = re.compile(rb"POST (/[0-9A-Za-z._~%/-]{0,1000}) HTTP/1\.1(?=\r\n)")
_KEY_NAME = b"idempotency-key"
# A line that begins with a blank would belong to the value.
_KEY_LINE = re.compile(rb"\r\n[Ii]dempotency-[Kk]ey: ([!-~]{1,200})(?=\r\n[^ \t])")

# The states of a connection. They only advance, and what is true in a state stays true in the later ones.
_READING = 0
_DEAF = 1
"""Further bytes are discarded. Requests that arrived before are still answered."""
_ENDING = 2
"""The last answer has been written. The server waits for the client to close, or closes the transport."""
_LOST = 3
"""The transport is closed: nothing can be written."""

_log = get_logger("pgleaderlock.server")


class Connections:
    """All connections of a server, and what they share."""

    def __init__(
        self,
        app: "App",
        *,
        header_timeout_s: float,
        header_bytes_max: int,
        scheme: str,
        at_once: "AtOnce | None" = None,
        headers: Sequence[Header] = (),
    ) -> None:
        """`headers` are added to every answer."""
        self.app = app
        self._lines = header_lines(headers)
        self.at_once = at_once
        self.header_timeout_s = header_timeout_s
        self.header_bytes_max = header_bytes_max
        self.scheme = scheme
        self.loop = asyncio.get_running_loop()
        self.open: set[Connection] = set()
        self.arriving: dict[tuple[Any, ...], tuple[asyncio.Task[None], float]] = {}
        """Accepted clients whose connection has not begun, as during a TLS handshake: the task, and since when."""
        self.ending: set[Connection] = set()
        """Those of the open connections whose last answer has been written."""
        self.places_wanted = 0
        """How many new clients wait for a place while no connection is idle. As many connections end with their next
        answer."""
        self.heads = KnownHeads(header_bytes_max)
        self.stopping = False
        self.fewer = asyncio.Event()
        """Set whenever a connection has ended."""
        self._date_s = 0
        self._date = b""

    def sweep(self) -> None:
        """Ends the connections of clients that are late: with a header, with reading an answer, or with closing."""
        now = self.loop.time()
        for connection in [each for each in self.open if each.deadline <= now]:
            connection.abort()

    def count(self, address: str | None = None) -> int:
        """The number of clients: of all, or of those with this address."""
        if address is None:
            return len(self.open) + len(self.arriving)
        clients = [*self.arriving, *(connection.client for connection in self.open)]
        return sum(client is not None and client[0] == address for client in clients)

    def close_idlest(self, number: int, address: str | None = None) -> int:
        """Ends the `number` connections that were idle for longest, of one address if it is given; fewer if fewer are
        idle. Returns how many."""
        now = self.loop.time()
        found: list[tuple[float, tuple[Any, ...] | None, Callable[[], object]]] = [
            (_idleness(now, connection.idle_since, connection.weight), connection.client, connection.abort)
            for connection in self.open
            if not connection.has_request
        ]
        for client, (task, since) in self.arriving.items():
            found.append((_idleness(now, since, UNKNOWN_IDLENESS), client, task.cancel))
        idle = [
            (idleness, end)
            for idleness, client, end in found
            if idleness and (address is None or (client is not None and client[0] == address))
        ]
        chosen = heapq.nlargest(number, idle, key=operator.itemgetter(0))
        for _, end in chosen:
            end()
        return len(chosen)

    def stop(self) -> None:
        """Closes idle connections now, and every other connection when its current request is answered."""
        self.stopping = True
        for connection in list(self.open):
            connection.close_if_idle()

    def abort(self) -> None:
        for connection in list(self.open):
            connection.abort()

    def first_lines(self) -> bytes:
        """The header lines of every answer: the date, and the server's own headers."""
        now_s = int(time.time())
        if now_s != self._date_s:
            date = b"date: %s\r\n" % formatdate(now_s, usegmt=True).encode()
            self._date_s, self._date = now_s, date + self._lines
        return self._date


class Connection(asyncio.Protocol):
    """One connection: parses requests, and begins each when the one before it has been answered."""

    def __init__(self, shared: Connections) -> None:
        self.shared = shared
        self._state = _READING
        self._parser = httptools.HttpRequestParser(self)
        self._unparsed: bytes | memoryview = b""
        self._resting: asyncio.Handle | None = None
        """The callback that reads on, after other connections have had their turns."""
        self._alone: bytes | None = None
        """The bytes being parsed, if they arrived when nothing else was under way: they may be one whole request."""
        self._unread_bytes = 0
        """How many bytes the parser has got since it last returned something. It bounds endless lines of any kind."""
        self._head: list[Header] | None = None
        """The header lines of a head that has begun and is not complete."""
        self._url = b""
        self._chunks_left = 0.0
        """How many more chunks the body that is being parsed may have."""
        self._at_once_left = AT_ONCE_MAX
        self._arriving: Exchange | None = None
        """The request whose body is being parsed."""
        self._waiting: deque[Exchange] = deque()
        self._answering: Exchange | None = None
        self._task: asyncio.Task[None] | None = None
        self._refusal: Refusal | None = None
        """The refusal of the last bytes, which are no request. It is sent when the requests before are answered."""
        self.idle_since = shared.loop.time()
        self.weight = UNKNOWN_IDLENESS
        self._head_deadline = self.idle_since + shared.header_timeout_s
        self._write_deadline = NEVER
        self._writable: asyncio.Future[None] | None = None

    @property
    def deadline(self) -> float:
        return min(self._head_deadline, self._write_deadline)

    @property
    def has_request(self) -> bool:
        """Whether a request is being carried out. An incomplete request does not count, nor does a request whose answer
        the client does not read."""
        exchange = self._waiting[0] if self._answering is None and self._waiting else self._answering
        return exchange is not None and exchange.complete and self._writable is None and self._state < _ENDING

    # --- From the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername")
        self.client = tuple(peer[:2]) if isinstance(peer, tuple) else None
        self.shared.open.add(self)
        if self.client is not None:
            self.shared.arriving.pop(self.client, None)
        self.close_if_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        self._state = _LOST
        if self._resting is not None:
            self._resting.cancel()
        self._waiting.clear()
        self._refusal = None
        self._client_has_gone()
        self.resume_writing()
        shared = self.shared
        shared.open.discard(self)
        shared.ending.discard(self)
        shared.places_wanted = max(0, shared.places_wanted - 1)  # this place is free now
        shared.fewer.set()

    def data_received(self, data: bytes) -> None:
        if self._rests():  # after `pause_reading`, TLS still delivers what it has read before
            if self._state == _READING:
                self._unparsed = b"".join((self._unparsed, data))
            return
        self._at_once_left = AT_ONCE_MAX
        if self._answering is None and self._head is None and self._state == _READING:
            exchange = self.shared.heads.recall(data, self)
            if exchange is not None:
                self._unread_bytes = 0
                self._head_deadline = NEVER
                self._waiting.append(exchange)
                self._begin_next()
                return
            self._alone = data
        self._unparsed = b"".join((self._unparsed, data)) if self._unparsed else data
        self._parse()
        self._alone = None
        if len(data) > TURN_BYTES_MAX:
            self._rest(REST_S)

    def _parse(self) -> None:
        left = TURN_BYTES_MAX
        while self._unparsed and self._state == _READING and not self._is_enough():
            if len(piece := self._unparsed) <= PIECE_BYTES:
                self._unparsed = b""
            elif left <= 0:
                self._rest(REST_S)
                return
            elif self._waiting and left < TURN_BYTES_MAX:
                self._rest()
                return
            else:
                whole, size = memoryview(piece), self._piece_bytes()  # slicing it copies nothing
                piece, self._unparsed = whole[:size], whole[size:]
            left -= len(piece)
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
        if self._state >= _DEAF:
            self._unparsed = b""
        elif self._is_enough():
            self.transport.pause_reading()
            if self._answering is not None and self._answering.complete:
                # While reading is paused, the server cannot notice that the client leaves: end the request's wait now.
                self._answering.client_has_gone()

    def _piece_bytes(self) -> int:
        """How many bytes to parse at once: more if they belong to a body with a declared length that the application
        is reading."""
        arriving = self._arriving
        if arriving is None or arriving is not self._answering:
            return PIECE_BYTES
        return max(PIECE_BYTES, min(TURN_BYTES_MAX, arriving.missing_bytes))

    def _decline_upgrade(self, rest: bytes | memoryview) -> None:
        """The parser skips the body of a request that asks for another protocol. A new parser, which gets only the
        framing headers of that request, reads the body. Bytes after the body are discarded."""
        assert self._arriving is not None
        framing = [b"%s: %s\r\n" % header for header in self._arriving.headers if header[0] in _FRAMING]
        self._parser = httptools.HttpRequestParser(_BodyReader(self))
        self._unparsed = b"".join((b"POST / HTTP/1.1\r\n", *framing, b"\r\n", rest, self._unparsed))

    def eof_received(self) -> bool:
        # Close and half-close cannot be told apart here: the waits of the client's requests end, as if it had gone, but
        # the answers are still written. TLS has no half-close.
        self._client_has_gone()
        self._hear_no_more()
        return self._state < _ENDING and self.shared.scheme == "http"

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
        self._url = b""
        self._head = []
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
        if self._head is None:
            return  # a trailer, which is ignored
        if len(self._head) == HEADER_LINES_MAX:
            raise Refusal(431, f"there are more than {HEADER_LINES_MAX} header lines")
        self._head.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        headers, self._head = self._head or [], None
        self._unread_bytes = 0
        self._head_deadline = NEVER
        version = self._parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise Refusal(400, f"HTTP/1.1 is spoken here, not HTTP/{version}")
        exchange = Exchange(self, self._parser.get_method(), _origin_form(self._url), version, headers)
        if len(exchange.named) != len(headers):
            _check_once(headers)
        if exchange.named.get(b"transfer-encoding", b"chunked").lower() != b"chunked":
            raise _other_coding()
        self._chunks_left = CHUNKS_MAX
        exchange.missing_bytes = int(exchange.named.get(b"content-length", b"0"))  # the parser has checked it
        if version == "1.1":
            exchange.keep_alive = self._parser.should_keep_alive() and not self._parser.should_upgrade()
            exchange.expects = exchange.named.get(b"expect", b"").lower() == b"100-continue"
        self._arriving = exchange
        self._waiting.append(exchange)

    def on_chunk_header(self) -> None:
        self._chunks_left -= 1
        if self._chunks_left < 0:
            raise Refusal(400, f"the body has many chunks of less than {CHUNK_BYTES_MIN} bytes")

    def on_body(self, body: bytes) -> None:
        self._unread_bytes = 0
        self._chunks_left += len(body) / CHUNK_BYTES_MIN
        if self._arriving is not None:
            self._arriving.take(body)

    def on_message_complete(self) -> None:
        if not self._parser.should_upgrade():  # otherwise, `_decline_upgrade` has its body read
            self._complete()

    def on_declined_complete(self) -> None:
        """A request that asked for another protocol is complete: the bytes after it may not be HTTP."""
        self._complete()
        self._state = _DEAF

    def _complete(self) -> None:
        self._unread_bytes = 0
        exchange, self._arriving = self._arriving, None
        if exchange is not None:
            exchange.complete = True
            if self._alone is not None:
                self.shared.heads.learn(self._alone, exchange)
            exchange.wake()

    # --- One request after the other

    def _begin_next(self) -> None:
        """Begins the next request. If there is none, sends the refusal, ends the connection, or waits idle, depending
        on the state."""
        while self._waiting:
            if not self._at_once_left:
                self._rest()
                return
            exchange = self._waiting.popleft()
            if not self._begin_at_once(exchange):
                self._answering = exchange
                self._task = self.shared.loop.create_task(self._answer(exchange))
                return
            if not exchange.answered:
                self._answering = exchange
                return
            if self._was_the_last(exchange):
                return
        if self._refusal is not None:
            answer, self._refusal = answer_of(self._refusal), None
            self.write_whole(start_of(answer), answer.body, close=True)
            self._end(linger=True)
        elif self._state >= _DEAF:
            self._end(linger=False)
        else:
            self.idle_since = self.shared.loop.time()
            self.weight = 1.0
            self._head_deadline = self.idle_since + self.shared.header_timeout_s
            self.close_if_idle()

    def _begin_at_once(self, exchange: "Exchange") -> bool:
        """Handles a complete request without a task; False if it needs one. The requests of a client that does not read
        its answers always get a task, which waits for the client."""
        at_once = self.shared.at_once
        if at_once is None or not exchange.complete or self._writable is not None:
            return False
        self._at_once_left -= 1
        return at_once(exchange)

    async def _answer(self, exchange: "Exchange") -> None:
        try:
            await self.shared.app(exchange.scope, exchange.receive, exchange.send)
        except Exception as error:
            _log.error("application_failed", error, path=exchange.path)
        finally:
            self._go_on(exchange)

    def answered(self, exchange: "Exchange") -> None:
        """Called when a request without a task is answered. If that happens within the call of `at_once`, the request
        is not `_answering` yet, and `_begin_next` goes on by itself."""
        if exchange is self._answering:
            self._go_on(exchange)

    def _go_on(self, exchange: "Exchange") -> None:
        self._answering = None
        self._at_once_left = AT_ONCE_MAX
        if not exchange.answered:  # otherwise the client would wait for an answer that never comes
            self.abort()
        elif not self._was_the_last(exchange):
            self._begin_next()
            self.read_on()

    def _was_the_last(self, exchange: "Exchange") -> bool:
        if exchange.complete and exchange.keep_alive:
            return False
        # The rest of an unread body must not be parsed as a request.
        self._end(linger=not exchange.complete or bool(self._waiting or self._unparsed))
        return True

    def read_on(self) -> None:
        if not self._rests() and not self.transport.is_closing():
            self._parse()
            if not self._rests() and not self._is_enough():
                self.transport.resume_reading()

    def _rests(self) -> bool:
        return self._resting is not None

    def _rest(self, for_s: float = 0.0) -> None:
        """Stops reading until the next turn of the loop, or for `for_s`."""
        if self._resting is None and not self.transport.is_closing():
            self.transport.pause_reading()
            loop = self.shared.loop
            self._resting = loop.call_later(for_s, self._rested) if for_s else loop.call_soon(self._rested)

    def _rested(self) -> None:
        self._resting = None
        self._at_once_left = AT_ONCE_MAX
        if self._waiting and self._answering is None:
            self._begin_next()
        self.read_on()

    def _is_enough(self) -> bool:
        """Whether no more may be kept: the rest waits in the kernel."""
        if self._answering is None or self._state >= _DEAF:
            return False  # nothing is kept, or everything is read and discarded
        buffered = len(self._answering.body)
        if self._waiting:
            buffered += sum(len(exchange.body) for exchange in self._waiting)
        return buffered > BODY_BUFFER_BYTES_MAX or len(self._waiting) >= PIPELINE_MAX

    def _client_has_gone(self) -> None:
        for exchange in (self._answering, self._arriving, *self._waiting):
            if exchange is not None:
                exchange.client_has_gone()

    # --- Ending

    def _long_header(self) -> Refusal:
        return Refusal(431, f"the header is longer than {self.shared.header_bytes_max} bytes")

    def _hear_no_more(self, refusal: Refusal | None = None) -> None:
        if self._state >= _DEAF:
            return
        self._state = _DEAF
        self._refusal = refusal
        if self._arriving is not None:  # the rest of its body will not be read
            self._arriving.client_has_gone()
        if self._answering is None:
            self._begin_next()

    def _end(self, *, linger: bool) -> None:
        """Ends the connection after the last answer. With `linger`, the client may still be sending: closing now would
        send a RST, and the client could lose the answer. So only our side is closed, and the client has `LINGER_S` to
        close its own, or `GRACE_S` if its place is needed."""
        self._waiting.clear()
        if self._state == _LOST:
            return
        self._state = _ENDING
        self.shared.ending.add(self)
        self.idle_since = self.shared.loop.time()
        self._head_deadline = self.idle_since + (LINGER_S if linger else STALL_S)
        if linger and self.transport.can_write_eof():
            try:
                self.transport.write_eof()
            except OSError:  # the client has reset the connection a moment ago
                self.transport.abort()
            else:
                self.read_on()
        else:
            self.transport.close()

    def close_if_idle(self) -> None:
        """At a stop: ends the connection if it has no request, because the client has sent none or has all answers."""
        has_none = self._answering is None and self._head is None and not self._waiting
        if self.shared.stopping and has_none and self._state < _ENDING:
            self._end(linger=False)

    def abort(self) -> None:
        self.transport.abort()

    # --- Writing

    def write(self, data: bytes) -> None:
        if self._state < _LOST:  # uvloop would raise, asyncio warn
            self.transport.write(data)

    def write_whole(self, start: Message, body: bytes, *, close: bool, without_body: bool = False) -> None:
        head = self._head_of(start, close=close)
        head.append(b"content-length: %d\r\n\r\n" % len(body))
        if not without_body:
            head.append(body)
        self.write(b"".join(head))

    def write_head(self, start: Message, *, chunked: bool, close: bool) -> None:
        head = self._head_of(start, close=close)
        head.append(b"transfer-encoding: chunked\r\n\r\n" if chunked else b"\r\n")
        self.write(b"".join(head))

    def _head_of(self, start: Message, *, close: bool) -> list[bytes]:
        lines = start.get("lines") or header_lines(start["headers"])
        head = [_STATUS_LINES[start["status"]], self.shared.first_lines(), lines]
        if close:
            head.append(b"connection: close\r\n")
        return head

    async def writable(self) -> None:
        if self._writable is not None:
            await self._writable
        elif self._state == _LOST:
            await asyncio.sleep(0)  # an application that writes without end must not block the loop


class _BodyReader:
    """The callbacks of a parser that reads only the body of one request, for a connection."""

    def __init__(self, connection: Connection) -> None:
        self.on_chunk_header = connection.on_chunk_header
        self.on_body = connection.on_body
        self.on_message_complete = connection.on_declined_complete


class Exchange:
    """One request and its answer: `scope`, `receive` and `send` for an ASGI application, and `answer` for the `AtOnce`
    function that handles a complete request. A connection creates it when the head of the request has arrived."""

    __slots__ = (
        "_body_given", "_connection", "_start", "_streaming", "_when_gone", "_woken", "answered", "body", "complete",
        "expects", "gone", "headers", "keep_alive", "method", "missing_bytes", "named", "path", "query", "version",
    )  # fmt: skip

    def __init__(
        self,
        connection: Connection,
        method: bytes,
        target: bytes,
        version: str,
        headers: list[Header],
        *,
        body: bytes | None = None,
    ) -> None:
        """With `body`, the request is complete, and the connection is kept alive."""
        self.method = method
        self.path, _, self.query = target.partition(b"?")
        self.version = version
        self.headers = headers
        self.named = dict(headers)
        """The headers by name; of several with the same name, the last."""
        self.keep_alive = body is not None
        self.expects = False
        self.body = bytearray(body or b"")
        self.complete = body is not None
        """The whole request has arrived."""
        self.missing_bytes = 0
        """How many bytes of a body with a declared length have not arrived yet."""
        self.gone = False
        """The client sends nothing more, and may no longer read."""
        self.answered = False
        self._connection = connection
        self._body_given = False
        self._start: Message | None = None
        self._streaming = False
        self._when_gone: Callable[[], None] | None = None
        self._woken: asyncio.Future[None] | None = None

    @property
    def client(self) -> tuple[Any, ...] | None:
        return self._connection.client

    # --- From the connection

    def take(self, body: bytes) -> None:
        self.missing_bytes -= len(body)
        if not self.answered:
            self.body += body
            if len(self.body) >= BODY_PIECE_BYTES:
                self.wake()

    def client_has_gone(self) -> None:
        self.gone = True
        self.wake()
        if self._when_gone is not None:
            self._when_gone()

    def wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    # --- For an `AtOnce` function

    def when_gone(self, call: Callable[[], None]) -> None:
        """Registers `call`, to be called when the client has gone; calls it now if the client has gone already."""
        if self.gone:
            call()
        else:
            self._when_gone = call

    def answer(self, answer: Answer, request_id: bytes | None) -> None:
        """Sends the whole answer. Must be called only once."""
        self._answer_whole(start_of(answer, request_id), answer.body)
        self._connection.answered(self)

    def _answer_whole(self, start: Message, body: bytes) -> None:
        self._decide_to_keep(start)
        self._connection.write_whole(start, body, close=not self.keep_alive, without_body=self.method == b"HEAD")
        self.answered = True
        self.wake()

    def _decide_to_keep(self, start: Message) -> None:
        """Decides whether the connection is kept alive for another request."""
        shared = self._connection.shared
        makes_room = shared.places_wanted > len(shared.ending)  # those that end already give their places soon
        if not self.complete or shared.stopping or makes_room or (b"connection", b"close") in start["headers"]:
            self.keep_alive = False

    # --- For an ASGI application

    @property
    def scope(self) -> Scope:
        return {
            "type": "http",
            "asgi": _ASGI,
            "http_version": self.version,
            "method": self.method.decode("ascii"),
            "scheme": self._connection.shared.scheme,
            "path": self.path.decode("latin-1"),
            "raw_path": self.path,
            "query_string": self.query,
            "root_path": "",
            "headers": self.headers,
            "client": self._connection.client,
        }

    async def receive(self) -> Message:
        while not (len(self.body) >= BODY_PIECE_BYTES or self.complete or self.gone):
            if self.expects:
                self.expects = False
                self._connection.write(_CONTINUE)
            await self._change()
        if self.body or (self.complete and not self._body_given):
            body = bytes(self.body)
            self.body.clear()
            more = not self.complete
            self._body_given = self.complete
            if more:
                self._connection.read_on()  # this may complete the body, for the next call
            return {"type": "http.request", "body": body, "more_body": more}
        while not (self.gone or self.answered):
            await self._change()
        return {"type": "http.disconnect"}

    async def _change(self) -> None:
        self._woken = self._connection.shared.loop.create_future()
        await self._woken

    async def send(self, message: Message) -> None:
        if self._start is None:
            self._start = message
            self._decide_to_keep(message)
            return
        body, more = message["body"], message.get("more_body", False)
        if not self._streaming and not more:
            self._answer_whole(self._start, body)
        else:
            self._stream(self._start, body, more=more)
        await self._connection.writable()

    def _stream(self, start: Message, body: bytes, *, more: bool) -> None:
        chunked = self.version == "1.1"
        connection = self._connection
        if not self._streaming:
            self._streaming = True
            connection.write_head(start, chunked=chunked, close=not self.keep_alive)
        if self.method != b"HEAD":
            if body:
                connection.write(b"%x\r\n%s\r\n" % (len(body), body) if chunked else body)
            if chunked and not more:
                connection.write(_LAST_CHUNK)
        if not more:
            self.answered = True
            self.wake()


App = Callable[[Scope, Receive, Send], Awaitable[None]]
AtOnce = Callable[[Exchange], bool]
"""Handles a complete request without a task, and answers it with `Exchange.answer`, before it returns or later. Returns
False to leave the request to the application."""


class KnownHeads:
    """The heads of earlier requests, of all connections. A client sends the same head repeatedly, and parsing it costs
    more than any other step of an acquire except the sync to disk (docs/adr/0007).

    Only the parts that differ between requests are read here: a plain path, and the idempotency key. All other lines
    must equal, byte for byte, those of a request that the parser has read. Then they have the same meaning, and a body
    of the same length follows.
    """

    def __init__(self, header_bytes_max: int) -> None:
        self._header_bytes_max = header_bytes_max
        self._known: dict[bytes, tuple[tuple[Header, ...], int]] = {}
        """By the header lines as bytes: the parsed headers, and the length of the body."""

    def learn(self, data: bytes, exchange: Exchange) -> None:
        """Remembers a head. `data` arrived when nothing else was under way, and the parser has read this complete
        request from it."""
        first = _FIRST_LINE.match(data)
        if first is None or not exchange.keep_alive:
            return
        lines, body_at, key = _lines_of(data, first.end())
        # Otherwise `data` has more than this request, or the body is not framed by its length.
        if len(data) != body_at + len(exchange.body) or len(lines) > LINES_BYTES_MAX:
            return
        headers = tuple(header for header in exchange.headers if header[0] != _KEY_NAME)
        if len(exchange.headers) - len(headers) != (key is not None) or len(headers) > LINES_MAX:
            return  # the key is written differently, or more than once; or there are too many lines
        if len(self._known) >= KNOWN_MAX:
            self._known.clear()
        self._known[lines] = headers, len(exchange.body)

    def recall(self, data: bytes, connection: Connection) -> Exchange | None:
        """The request in `data`, if `data` is exactly one request with known lines; otherwise None."""
        first = _FIRST_LINE.match(data)
        if first is None:
            return None
        lines, body_at, key = _lines_of(data, first.end())
        known = self._known.get(lines)
        if known is None or len(data) != body_at + known[1] or body_at > self._header_bytes_max:
            return None
        headers = [*known[0]] if key is None else [*known[0], (_KEY_NAME, key)]
        return Exchange(connection, b"POST", first[1], "1.1", headers, body=data[body_at:])


def _lines_of(data: bytes, begin: int) -> tuple[bytes, int, bytes | None]:
    """The header lines from `begin` on without that of the key, the position of the body, and the key."""
    body_at = data.find(b"\r\n\r\n", begin) + 4
    lines = data[begin:body_at]
    line = _KEY_LINE.search(lines)
    if line is None:
        return lines, body_at, None
    return lines[: line.start()] + lines[line.end() :], body_at, line[1]


def _idleness(now: float, since: float, weight: float) -> float:
    return weight * (now - since) if now - since >= GRACE_S else 0.0


def _check_once(headers: list[Header]) -> None:
    """Refuses a repeated header that may be sent only once. Called if some headers have the same name."""
    names = [name for name, _ in headers]
    for name in _ONCE:
        if names.count(name) > 1:
            raise Refusal(400, f"there is more than one {name.decode().title()} header")
    if names.count(b"transfer-encoding") > 1:
        raise _other_coding()


def _other_coding() -> Refusal:
    return Refusal(501, "no transfer coding but chunked alone is understood here")


def _origin_form(target: bytes) -> bytes:
    """Path and query of a target, which may be in absolute form, as for a proxy: scheme and server come first then."""
    if target[:1] == b"/":
        return target
    scheme, separator, rest = target.partition(b"://")
    if not separator or scheme.lower() not in (b"http", b"https"):
        return target
    slash = rest.find(b"/")
    return rest[slash:] if slash >= 0 else b"/"
