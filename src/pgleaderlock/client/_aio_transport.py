"""Connections for asyncio: each carries one request at a time, is kept alive for the next, and is closed when in doubt.

Must never reuse a connection whose last response is unknown, and never decide about a retry: the flow does.
"""

import asyncio

from pgleaderlock.client._core import ClientClosed, Core, Endpoint, NoAnswer, Send
from pgleaderlock.client._http1 import BadResponse, HttpConnection, HttpResponse

__all__ = ["AsyncPool"]


class _Connection(asyncio.Protocol):
    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.http = HttpConnection(endpoint.headers)
        self.closed = False
        self.used = False
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[HttpResponse] | None = None

    @property
    def reusable(self) -> bool:
        return not self.closed and self.http.reusable

    async def exchange(self, send: Send, core: Core) -> HttpResponse:
        assert self._transport is not None
        if self.closed:
            raise NoAnswer("the connection was closed", stale=True)
        data = self.http.encode(send.request)
        waiter: asyncio.Future[HttpResponse] = self._loop.create_future()
        self._waiter = waiter
        timer = self._loop.call_later(send.timeout_s, self._late, send.timeout_s)
        send.sent_at = core.clock.now()
        self._transport.write(data)
        try:
            return await waiter
        finally:
            timer.cancel()
            self._waiter = None
            self.used = True

    def abort(self) -> None:
        """Close at once, without a TLS or TCP goodbye: the outcome of what was sent is unknown."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    def _late(self, timeout_s: float) -> None:
        self._fail(f"no response within {timeout_s:g} s")

    def _fail(self, why: str, *, stale: bool = False) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(NoAnswer(why, stale=stale))

    # --- Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._waiter is None or self._waiter.done():
            self.abort()  # bytes that belong to no request
            return
        try:
            response = self.http.feed(data)
        except BadResponse as error:
            self._fail(f"not a valid HTTP response: {error}")
            self.abort()
            return
        if response is not None:
            self._waiter.set_result(response)

    def eof_received(self) -> bool:
        self.closed = True
        if self._waiter is not None and not self._waiter.done() and self.http.began:
            # The end of the stream may complete a response.
            self.data_received(b"")
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._fail(f"the connection ended ({exc or 'closed by the server'})", stale=self.used and not self.http.began)


class AsyncPool:
    """At most `connections_max` connections at a time, two of which requests that wait for a lock never use."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._idle: dict[Endpoint, list[_Connection]] = {endpoint: [] for endpoint in core.endpoints}
        self._slots = asyncio.Semaphore(core.connections_max)
        self._waiting = asyncio.Semaphore(core.connections_max - 2)
        self._closed = False

    async def exchange(self, send: Send) -> HttpResponse:
        if send.waits:
            async with self._waiting, self._slots:
                return await self._exchange(send)
        async with self._slots:
            return await self._exchange(send)

    async def _exchange(self, send: Send) -> HttpResponse:
        connection = (None if send.fresh else self._take(send.endpoint)) or await self._connect(send)
        try:
            response = await connection.exchange(send, self._core)
        except BaseException as error:
            connection.abort()
            if isinstance(error, NoAnswer) and error.stale:
                self._drop_idle(send.endpoint)  # the other idle ones are as old
            raise
        idle = self._idle[send.endpoint]
        if connection.reusable and not self._closed and len(idle) < self._core.connections_max:
            idle.append(connection)
        else:
            connection.abort()
        return response

    def _take(self, endpoint: Endpoint) -> _Connection | None:
        idle = self._idle[endpoint]
        while idle:
            connection = idle.pop()
            if connection.reusable:
                return connection
            connection.abort()
        return None

    async def _connect(self, send: Send) -> _Connection:
        self.check_open()
        endpoint = send.endpoint
        # A connect may not take longer than the response may: a renewal must have time to try the next server.
        timeout_s = min(self._core.connect_timeout_s, send.timeout_s)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(endpoint),
                    endpoint.host,
                    endpoint.port,
                    ssl=self._core.ssl_context if endpoint.tls else None,
                )
        except TimeoutError:
            raise NoAnswer(f"cannot connect within {timeout_s:g} s") from None
        except (OSError, UnicodeError) as error:
            raise NoAnswer(f"cannot connect: {error}") from error
        return connection

    def _drop_idle(self, endpoint: Endpoint) -> None:
        while self._idle[endpoint]:
            self._idle[endpoint].pop().abort()

    def check_open(self) -> None:
        if self._closed:
            raise ClientClosed

    async def close(self) -> None:
        self._closed = True
        for endpoint in self._idle:
            self._drop_idle(endpoint)
        await asyncio.sleep(0)  # the loop closes the sockets in its next iteration
