"""The client's HTTP/1.1 parser: bytes in, one response out. No socket, no clock, no waiting.

One `HttpConnection` belongs to one TCP connection and serves one request after the other. It parses strictly what RFC
9112 allows a server to send: ambiguous input is refused, everything has a bound, and after any irregularity the
connection is not used again. A test compares it with h11 on valid and on damaged responses. h11 itself is not used,
because it took a quarter of a whole acquire and release cycle.

Must never read, write or wait, and never guess.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["BadResponse", "HttpConnection", "HttpRequest", "HttpResponse"]

# A page of a thousand locks takes some 300 kB, a batch of 500 results less.
BODY_BYTES_MAX = 8 * 1024 * 1024
HEAD_BYTES_MAX = 16 * 1024
CHUNK_LINE_BYTES_MAX = 256
INTERIM_MAX = 8
KNOWN_HEADS_MAX = 8

_VALUE = rb"[\t\x20-\x7e\x80-\xff]*"
_LINE = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:" + _VALUE
_HEADER = re.compile(_LINE)
# Checks the whole head at once; afterwards only the lines that matter here are parsed.
_HEAD = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: " + _VALUE + rb")?(?:\r\n" + _LINE + rb")*")
# The head of nearly every response of our own server: only status and length matter.
_USUAL_HEAD = re.compile(
    rb"HTTP/1\.1 (200|409) [A-Za-z]+\r\n"
    rb"(?:(?:date|content-type|cache-control|x-content-type-options): [\x20-\x7e]{0,200}\r\n"
    rb"|x-lock-store: ([0-9a-f]{1,64})\r\n){0,8}"
    rb"content-length: ([0-9]{1,6})\r\n\r\n"
)
_MEANT = re.compile(
    rb"\r\n(content-length|transfer-encoding|connection|retry-after|x-lock-store):(" + _VALUE + rb")", re.IGNORECASE
)
_STORE = re.compile(rb"[0-9a-f]{1,64}")
_LENGTH = re.compile(rb"[0-9]{1,15}")
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?")


class BadResponse(Exception):
    """The bytes are not a valid response, are too many, or ended too early."""


class HttpRequest(NamedTuple):
    """`target` is path and query as they go over the wire; `headers` are whole lines; `body` is JSON, or empty."""

    method: bytes
    target: bytes
    body: bytes = b""
    headers: bytes = b""

    def with_header(self, line: bytes) -> "HttpRequest":
        return HttpRequest(self.method, self.target, self.body, self.headers + line)


class HttpResponse(NamedTuple):
    status: int
    body: bytes
    retry_after: bytes | None = None
    store: bytes | None = None
    """The store id of the server, if it sends one."""


@dataclass(slots=True)
class _Head:
    status: int
    keep_alive: bool
    length: int | None
    """None: the body is chunked, or goes on until the end of the stream."""
    chunked: bool
    retry_after: bytes | None
    store: bytes | None = None


class HttpConnection:
    """The state of one connection. `constant` are the header lines that every request of it carries."""

    def __init__(self, constant: bytes) -> None:
        self._constant = constant
        self._known_heads: dict[bytes, tuple[int, int, bytes | None]] = {}
        self._buffer = bytearray()
        self._head: _Head | None = None
        self._chunks = bytearray()
        self._chunk_left = 0
        self._interim = 0
        self._in_trailers = False
        self.began = False
        """At least one byte of the current response has arrived."""
        self.reusable = True
        """The last response was complete, nothing followed it, and both sides keep the connection."""

    def encode(self, request: HttpRequest) -> bytes:
        """The request as bytes. The connection must be `reusable`."""
        assert self.reusable
        self.reusable = self.began = self._in_trailers = False
        self._head = None
        self._chunk_left = self._interim = 0
        body = request.body
        if body:
            length = b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(body)
        else:
            length = b"" if request.method == b"GET" else b"Content-Length: 0\r\n"
        return b"%s %s HTTP/1.1\r\n%s%s%s\r\n%s" % (
            request.method,
            request.target,
            self._constant,
            request.headers,
            length,
            body,
        )

    def feed(self, data: bytes) -> HttpResponse | None:
        """Take received bytes (b"" for the end of the stream); returns the response once it is complete."""
        if not self.began and (response := self._usual(data)) is not None:
            self.began = self.reusable = True
            return response
        if data:
            self.began = True
            self._buffer += data
        while self._head is None:
            head = self._read_head()
            if head is None:
                return self._not_yet(data)
            if head.status >= 200:
                self._head = head
            elif head.status == 101 or (count := self._interim + 1) > INTERIM_MAX:
                raise BadResponse("it answers with something else than a response")
            else:
                self._interim = count
        return self._read_body(self._head, data)

    def _usual(self, data: bytes) -> HttpResponse | None:
        """Parse a complete response with a usual head, which is mostly identical to the previous one."""
        end = data.find(b"\r\n\r\n") + 4
        head = data[:end]
        known = self._known_heads.get(head)
        if known is None:
            usual = _USUAL_HEAD.fullmatch(head)
            if usual is None:
                return None
            if len(self._known_heads) >= KNOWN_HEADS_MAX:
                self._known_heads.clear()
            known = self._known_heads[head] = int(usual[1]), int(usual[3]), usual[2]
        status, length, store = known
        return HttpResponse(status, data[end:], None, store) if len(data) == end + length else None

    def _not_yet(self, data: bytes) -> HttpResponse | None:
        if not data:
            raise BadResponse("the stream ended before the response did")
        return None

    # --- The head

    def _read_head(self) -> _Head | None:
        end = self._buffer.find(b"\r\n\r\n")
        if end > HEAD_BYTES_MAX or (end < 0 and len(self._buffer) > HEAD_BYTES_MAX):
            raise BadResponse(f"the head is longer than {HEAD_BYTES_MAX} bytes")
        if end < 0:
            return None
        text = bytes(self._buffer[:end])
        del self._buffer[: end + 4]
        found = _HEAD.fullmatch(text)
        if found is None:
            raise BadResponse("its status line or a header line cannot be read")
        head = _Head(int(found[2]), found[1] == b"1", None, False, None)
        for name, value in _MEANT.findall(text):
            _take_header(head, name.lower(), value.strip(b" \t"))
        if head.chunked and head.length is not None:
            raise BadResponse("it has two lengths: chunked, and Content-Length")
        if head.status in (204, 304):
            head.length, head.chunked = 0, False
        return head

    # --- The body

    def _read_body(self, head: _Head, data: bytes) -> HttpResponse | None:
        buffer = self._buffer
        if head.chunked:
            return self._complete(head, bytes(self._chunks)) if self._read_chunks() else self._not_yet(data)
        if head.length is None:
            if len(buffer) > BODY_BYTES_MAX:
                raise BadResponse(f"the body is longer than {BODY_BYTES_MAX} bytes")
            if data:
                return None
            head.keep_alive = False
            body = bytes(buffer)
            buffer.clear()
            return self._complete(head, body)
        if len(buffer) < head.length:
            return self._not_yet(data)
        body = bytes(buffer[: head.length])
        del buffer[: head.length]
        return self._complete(head, body)

    def _read_chunks(self) -> bool:
        """Move complete chunks from the buffer to the body. True at the end of the last chunk."""
        buffer = self._buffer
        while True:
            if self._in_trailers:
                return self._read_trailers()
            if self._chunk_left:
                if len(buffer) < self._chunk_left:
                    return False
                if buffer[self._chunk_left - 2 : self._chunk_left] != b"\r\n":
                    raise BadResponse("a chunk is not followed by the end of a line")
                self._chunks += buffer[: self._chunk_left - 2]
                del buffer[: self._chunk_left]
                self._chunk_left = 0
            line = self._line(CHUNK_LINE_BYTES_MAX)
            if line is None:
                return False
            found = _CHUNK_LINE.fullmatch(line)
            if found is None:
                raise BadResponse("the length of a chunk cannot be read")
            size = int(found[1], 16)
            if len(self._chunks) + size > BODY_BYTES_MAX:
                raise BadResponse(f"the body is longer than {BODY_BYTES_MAX} bytes")
            self._chunk_left = size + 2 if size else 0
            self._in_trailers = size == 0

    def _read_trailers(self) -> bool:
        """Skip the trailers up to the empty line: nothing in them matters here."""
        while (line := self._line(HEAD_BYTES_MAX)) is not None:
            if not line:
                return True
            self._interim += 1
            if _HEADER.fullmatch(line) is None or self._interim > INTERIM_MAX:
                raise BadResponse("what follows the last chunk cannot be read")
        return False

    def _line(self, bytes_max: int) -> bytes | None:
        end = self._buffer.find(b"\r\n", 0, bytes_max)
        if end < 0:
            if len(self._buffer) >= bytes_max:
                raise BadResponse("a line is too long")
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        return line

    def _complete(self, head: _Head, body: bytes) -> HttpResponse:
        self._chunks.clear()
        # Bytes after the response belong to no request.
        self.reusable = head.keep_alive and not self._buffer
        return HttpResponse(head.status, body, head.retry_after, head.store)


def _take_header(head: _Head, name: bytes, value: bytes) -> None:
    if name == b"content-length":
        length = int(value) if _LENGTH.fullmatch(value) else -1
        if length < 0 or head.length not in (None, length):
            raise BadResponse("its Content-Length cannot be read")
        if length > BODY_BYTES_MAX:
            raise BadResponse(f"the body is longer than {BODY_BYTES_MAX} bytes")
        head.length = length
    elif name == b"transfer-encoding":
        if value.lower() != b"chunked" or head.chunked:
            raise BadResponse("it is encoded in a way that was not asked for")
        head.chunked = True
    elif name == b"connection":
        if b"close" in (word.strip().lower() for word in value.split(b",")):
            head.keep_alive = False
    elif name == b"retry-after":
        head.retry_after = value
    elif name == b"x-lock-store":
        head.store = value if _STORE.fullmatch(value) else None
