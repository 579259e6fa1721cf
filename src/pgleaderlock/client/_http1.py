"""HTTP/1.1 as the client speaks it: bytes in, one reply out. No socket, no clock, no waiting.

One `HttpConnection` belongs to one TCP connection and serves one request after the other. What a connection says is
believed only as far as h11 understands it, and no further than the bounds below; after anything odd it is not used
again.

Imports h11 and the standard library. Must never read, write or wait.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import h11

__all__ = ["BadReply", "HttpConnection", "Reply", "Request"]

# A page of a thousand locks is some 300 kB, a batch of 500 results less.
BODY_BYTES_MAX = 8 * 1024 * 1024
HEAD_BYTES_MAX = 16 * 1024

Headers = Sequence[tuple[bytes, bytes]]


class BadReply(Exception):
    """What came is no reply, or too much of one, or it ended in the middle."""


@dataclass(frozen=True, slots=True)
class Request:
    """`target` is path and query as they go over the wire; `body` is JSON, or empty."""

    method: bytes
    target: bytes
    body: bytes = b""
    headers: Headers = ()


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: bytes
    retry_after: bytes | None = None


class HttpConnection:
    """The state of one connection. `constant` are the headers that every request of it carries."""

    def __init__(self, constant: Headers) -> None:
        self._h11 = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES_MAX)
        self._constant = list(constant)
        self._response: h11.Response | None = None
        self._chunks: list[bytes] = []
        self._body_bytes = 0
        self.began = False
        """Some byte of the present reply has come."""

    @property
    def reusable(self) -> bool:
        """The last reply was complete, nothing came behind it, and both sides want to go on."""
        return self._h11.states == {h11.CLIENT: h11.IDLE, h11.SERVER: h11.IDLE} and not self._h11.trailing_data[0]

    def encode(self, request: Request) -> bytes:
        """The request as bytes. The connection must be new or `reusable`."""
        headers = [*self._constant, *request.headers]
        if request.body:
            headers.append((b"Content-Type", b"application/json"))
            headers.append((b"Content-Length", b"%d" % len(request.body)))
        elif request.method != b"GET":
            headers.append((b"Content-Length", b"0"))
        self._response = None
        self._chunks = []
        self._body_bytes = 0
        self.began = False
        head = self._h11.send(h11.Request(method=request.method, target=request.target, headers=headers)) or b""
        body = (self._h11.send(h11.Data(data=request.body)) or b"") if request.body else b""
        return head + body + (self._h11.send(h11.EndOfMessage()) or b"")

    def feed(self, data: bytes) -> Reply | None:
        """Takes what has come (b"" for the end of the stream); gives the reply once it is complete."""
        if data:
            self.began = True
        try:
            self._h11.receive_data(data)
            return self._next()
        except h11.RemoteProtocolError as error:
            raise BadReply(str(error)) from error

    def _next(self) -> Reply | None:
        while True:
            event = self._h11.next_event()
            if event is h11.NEED_DATA:
                return None
            if isinstance(event, h11.Response):
                self._response = event
            elif isinstance(event, h11.Data):
                self._body_bytes += len(event.data)
                if self._body_bytes > BODY_BYTES_MAX:
                    raise BadReply(f"the body is longer than {BODY_BYTES_MAX} bytes")
                self._chunks.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                return self._complete()
            elif isinstance(event, h11.InformationalResponse):
                continue
            else:  # the connection was closed, or switched to something else
                raise BadReply("the connection was closed before the reply was complete")

    def _complete(self) -> Reply:
        assert self._response is not None
        response = self._response
        # Anything that follows was not asked for: `trailing_data` keeps it, and the connection is not reused.
        if self._h11.our_state is h11.DONE and self._h11.their_state is h11.DONE:
            self._h11.start_next_cycle()
        retry_after = next((value for name, value in response.headers if name == b"retry-after"), None)
        return Reply(response.status_code, b"".join(self._chunks), retry_after)
