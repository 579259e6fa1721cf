"""One request and its answer: as `scope`, `receive` and `send` of ASGI or, where it has come as a whole, in one word.

Imports `answers` and the standard library. Must never parse, and never write but by its connection.
"""

from typing import TYPE_CHECKING

from pgleaderlock._http.answers import Answer, Header, Message, Scope, start_of

if TYPE_CHECKING:
    import asyncio

    from pgleaderlock._http.http1 import Connection

__all__ = ["Exchange"]

_ASGI = {"version": "3.0"}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"


class Exchange:
    """Made by a connection when the header of a request has come."""

    __slots__ = (
        "_body_given", "_connection", "_start", "_streaming", "_woken", "answered", "body", "complete", "expects",
        "gone", "headers", "keep_alive", "method", "named", "path", "query", "version",
    )  # fmt: skip

    def __init__(
        self,
        connection: "Connection",
        method: bytes,
        target: bytes,
        version: str,
        headers: list[Header],
        *,
        body: bytes | None = None,
    ) -> None:
        """With `body`, all of it has come, and the connection goes on."""
        self.method = method
        self.path, _, self.query = target.partition(b"?")
        self.version = version
        self.headers = headers
        self.named = dict(headers)
        """By their names; of several with one name, the last."""
        self.keep_alive = body is not None
        self.expects = False
        self.body = bytearray(body or b"")
        self.complete = body is not None
        """All of the request has come."""
        self.gone = False
        """Nothing more comes, and perhaps nobody listens."""
        self.answered = False
        self._connection = connection
        self._body_given = False
        self._start: Message | None = None
        self._streaming = False
        self._woken: asyncio.Future[None] | None = None

    def take(self, body: bytes) -> None:
        if not self.answered:
            self.body += body
            self.wake()

    def wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    # --- In one word

    def answer(self, answer: Answer, request_id: bytes | None) -> None:
        """By whoever has taken it on at once: all of the answer."""
        self._answer_whole(start_of(answer, request_id), answer.body)
        self._connection.answered(self)

    def _answer_whole(self, start: Message, body: bytes) -> None:
        self._decide_to_keep(start)
        self._connection.write_whole(start, body, close=not self.keep_alive, without_body=self.method == b"HEAD")
        self.answered = True
        self.wake()

    def _decide_to_keep(self, start: Message) -> None:
        """Whether the connection is good for another request."""
        if not self.complete or self._connection.shared.stopping or (b"connection", b"close") in start["headers"]:
            self.keep_alive = False

    # --- As an application of ASGI sees it

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
        while not (self.body or self.complete or self.gone):
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
                self._connection.read_on()  # which may bring the rest, for the next call
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
