"""Blocking connections: each carries one request at a time, is kept alive for the next, and is closed when in doubt.

Safe for any number of threads. A forked child does not use its parent's connections.

Must never reuse a connection whose last response is unknown, and never decide about a retry: the flow does.
"""

import contextlib
import select
import socket
import threading
import time

from pgleaderlock.client._core import ClientClosed, Core, Endpoint, NoAnswer, Send
from pgleaderlock.client._http1 import BadResponse, HttpConnection, HttpResponse

__all__ = ["SyncPool"]

CHUNK_BYTES = 64 * 1024
# Setting a timeout is a system call: it is only set if it is longer than before, or shorter by more than this.
TIMEOUT_SLACK_S = 0.001


class _Connection:
    def __init__(self, endpoint: Endpoint, sock: socket.socket) -> None:
        self.endpoint = endpoint
        self.http = HttpConnection(endpoint.headers)
        self.used = False
        self._sock = sock
        self._timeout_s = -1.0
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN | select.POLLHUP | select.POLLERR)

    @property
    def reusable(self) -> bool:
        return self.http.reusable

    @property
    def silent(self) -> bool:
        """Has nothing arrived since the last response, neither the end of the stream nor stray bytes?"""
        return not self._poll.poll(0)

    def exchange(self, send: Send, core: Core) -> HttpResponse:
        data = self.http.encode(send.request)
        send.sent_at = core.clock.now()
        until = time.monotonic() + send.timeout_s
        try:
            self._wait_at_most(send.timeout_s)
            self._sock.sendall(data)
            while True:
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError
                self._wait_at_most(left_s)
                chunk = self._sock.recv(CHUNK_BYTES)
                if not chunk and not self.http.began:
                    raise NoAnswer("the connection was closed by the server", stale=self.used)
                response = self.http.feed(chunk)
                if response is not None:
                    self.used = True
                    return response
        except TimeoutError:
            raise NoAnswer(f"no response within {send.timeout_s:g} s") from None
        except BadResponse as error:
            raise NoAnswer(f"not a valid HTTP response: {error}") from error
        except OSError as error:
            raise NoAnswer(f"the connection ended ({error})", stale=self.used and not self.http.began) from error

    def _wait_at_most(self, timeout_s: float) -> None:
        if not timeout_s <= self._timeout_s <= timeout_s + TIMEOUT_SLACK_S:
            self._timeout_s = timeout_s
            self._sock.settimeout(timeout_s)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.close()


class _Slots:
    """Bounds the requests under way. Two semaphores of the standard library would be four times as slow."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._mutex = threading.Lock()
        self._freed = threading.Condition(self._mutex)
        self._taken = 0
        self._taken_by_waiting = 0
        self._in_line = 0

    def take(self, *, waits: bool) -> None:
        with self._mutex:
            if self._is_full(waits):
                self._in_line += 1
                try:
                    self._freed.wait_for(lambda: not self._is_full(waits))
                finally:
                    self._in_line -= 1
            self._taken += 1
            self._taken_by_waiting += waits

    def give(self, *, waits: bool) -> None:
        with self._mutex:
            self._taken -= 1
            self._taken_by_waiting -= waits
            if self._in_line:
                self._freed.notify_all()

    def _is_full(self, waits: bool) -> bool:
        return self._taken >= self._most or (waits and self._taken_by_waiting >= self._most - 2)


class SyncPool:
    """At most `connections_max` connections at a time, two of which requests that wait for a lock never use."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._closed = False
        self._begin()

    def _begin(self) -> None:
        self._idle: dict[Endpoint, list[_Connection]] = {endpoint: [] for endpoint in self._core.endpoints}
        self._mutex = threading.Lock()
        self._slots = _Slots(self._core.connections_max)

    def begin_anew(self) -> None:
        """In a forked child: close its copies of the connections, which stay open in the parent."""
        idle = self._idle
        self._begin()
        for connections in idle.values():
            for connection in connections:
                connection.close()

    def exchange(self, send: Send) -> HttpResponse:
        slots = self._slots
        slots.take(waits=send.waits)
        try:
            return self._exchange(send)
        finally:
            slots.give(waits=send.waits)

    def _exchange(self, send: Send) -> HttpResponse:
        connection = (None if send.fresh else self._take(send.endpoint)) or self._connect(send)
        try:
            response = connection.exchange(send, self._core)
        except BaseException as error:
            connection.close()
            if isinstance(error, NoAnswer) and error.stale:
                self._drop_idle(send.endpoint)  # the other idle ones are as old
            raise
        if not self._keep(connection):
            connection.close()
        return response

    def _keep(self, connection: _Connection) -> bool:
        with self._mutex:
            idle = self._idle[connection.endpoint]
            if self._closed or not connection.reusable or len(idle) >= self._core.connections_max:
                return False
            idle.append(connection)
            return True

    def _take(self, endpoint: Endpoint) -> _Connection | None:
        while True:
            with self._mutex:
                if not self._idle[endpoint]:
                    return None
                connection = self._idle[endpoint].pop()
            if connection.silent:
                return connection
            connection.close()

    def _connect(self, send: Send) -> _Connection:
        self.check_open()
        endpoint = send.endpoint
        # A connect may not take longer than the response may: a renewal must have time to try the next server.
        timeout_s = min(self._core.connect_timeout_s, send.timeout_s)
        try:
            sock = socket.create_connection((endpoint.host, endpoint.port), timeout_s)
        except TimeoutError:
            raise NoAnswer(f"cannot connect within {timeout_s:g} s") from None
        except (OSError, UnicodeError) as error:
            raise NoAnswer(f"cannot connect: {error}") from error
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if endpoint.tls:
                assert self._core.ssl_context is not None
                sock = self._core.ssl_context.wrap_socket(sock, server_hostname=endpoint.host)
        except OSError as error:  # includes ssl.SSLError and a timeout of the handshake
            sock.close()
            raise NoAnswer(f"cannot connect: {error}") from error
        except BaseException:
            sock.close()
            raise
        return _Connection(endpoint, sock)

    def _drop_idle(self, endpoint: Endpoint) -> None:
        with self._mutex:
            dropped, self._idle[endpoint] = self._idle[endpoint], []
        for connection in dropped:
            connection.close()

    def check_open(self) -> None:
        if self._closed:
            raise ClientClosed

    def close(self) -> None:
        self._closed = True
        for endpoint in self._core.endpoints:
            self._drop_idle(endpoint)
