"""Serving an ASGI application on one socket: accepting, reading bodies within limits, and ending gracefully.

The server accepts connections itself. At the limit of connections, a new client that sends something waits in line for
a place. The connection that has been idle for longest is closed for it. If none is idle, as when every client polls,
the next connection that is answered ends with its answer, one for each client in line. If every connection has a
request, the new client waits for its turn. A new client that sends nothing gets no place, and so costs little.

A graceful stop waits for every request that has begun, so a client that sends half a body would delay it without limit.
Every task that waits for a client does so through `Waits`, which interrupts tasks that are late, and all of them at a
stop. One table and one sweep serve all requests: a timer per request costs more than reading a small body.

Must never handle signals (the program decides when to stop), and never keep more of a body than its limit.
"""

import asyncio
import contextlib
import errno
import functools
import os
import socket
import ssl
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pgleaderlock._base.aio import cancel_and_wait, first_of, within
from pgleaderlock._base.logging import Seldom, get_logger
from pgleaderlock._http.access import Tokens
from pgleaderlock._http.answers import Header, Receive, Refusal
from pgleaderlock._http.protocol import App, AtOnce, Connection, Connections
from pgleaderlock.errors import ConfigurationError, PgLeaderLockError

__all__ = [
    "ClientGone",
    "HttpServer",
    "InFlight",
    "ListenError",
    "Readiness",
    "ServingLimits",
    "Tls",
    "Waits",
    "address_of",
    "check_exposure",
    "check_json",
    "is_loopback",
    "left",
    "listen",
    "read_body",
    "stopping",
    "too_long",
]

_BACKLOG = 4096
_FLUSH_S = 0.5
"""How long a stop waits for the last responses to be written before it aborts the remaining connections."""
_CUT_S = 2.0
_ACCEPT_AGAIN_S = 0.1
_ROOM_AGAIN_S = 0.02
"""At the limit of connections: how long to wait before looking for an idle one again."""
_CLOSED_SHARE = 64
"""At the limit of connections, this share of them is closed at once: finding the idlest takes longer than accepting."""
_NEW_SHARE = 8
_NEW_MIN = 64
"""At the limit of connections, this many new clients are kept that have sent nothing yet, and this many in line: one
for every eight places, and no fewer than 64, because a healthy client may connect a moment before it sends. The others
wait in the kernel. The line is longer by those that were silent and have sent something since."""
_NEW_PER_TURN = 32
"""How many new clients are accepted, and how many get a place, in one turn of the event loop. Where a client takes
milliseconds, it is one: for a TLS handshake, and to look at all connections of its address."""
_SWEEP_INTERVAL_S = 0.5
_JSON_TYPE = b"application/json"
# Closing while the client still sends would reset the connection, and the client could lose the response. So a body
# that is too long, but not longer than this, is read to its end and discarded.
_DISCARDED_BYTES_MAX = 8 * 1024 * 1024
_LATE = "late"
_STOPPING = "stopping"
READY_REMEMBERED_S = 1.0

_Peer = tuple[Any, ...]


class ListenError(PgLeaderLockError):
    """Listening on the address failed. The text says what to do."""


@dataclass(frozen=True)
class Tls:
    cert: Path
    key: Path


@dataclass(frozen=True)
class ServingLimits:
    connections_max: int = 1024
    """Beyond it, the connection without a request that was idle for longest is closed. If there is none, the next one
    that is answered ends with its answer."""
    connections_per_address_max: int | None = None
    """Behind a proxy, all clients have one address."""
    header_timeout_s: float = 10.0
    """The time for a header to be complete; also how long a connection may be idle between two requests."""
    header_bytes_max: int = 16 * 1024


class HttpServer:
    """Serves one application on one socket. Call `start`, then `stop`, each once."""

    def __init__(
        self,
        app: App,
        listening: socket.socket,
        limits: ServingLimits | None = None,
        tls: Tls | None = None,
        at_once: AtOnce | None = None,
        *,
        headers: Sequence[Header] = (),
    ) -> None:
        """`headers` are added to every response."""
        self._limits = limits or ServingLimits()
        self._listening = listening
        self._tls = tls
        self._context = None if tls is None else _context(tls)
        self._connections = Connections(
            app,
            header_timeout_s=self._limits.header_timeout_s,
            header_bytes_max=self._limits.header_bytes_max,
            scheme="http" if tls is None else "https",
            at_once=at_once,
            headers=headers,
        )
        self._handshakes: set[asyncio.Task[None]] = set()
        self._silent: dict[socket.socket, tuple[_Peer, float]] = {}
        """New clients beyond the limit of connections that have sent nothing yet: their peers, and since when."""
        self._line: deque[tuple[socket.socket, _Peer]] = deque()
        """New clients beyond the limit of connections that have sent something, in the order in which they did."""
        self._new_max = max(_NEW_MIN, self._limits.connections_max // _NEW_SHARE)
        costly = tls is not None or self._limits.connections_per_address_max is not None
        self._new_per_turn = 1 if costly else _NEW_PER_TURN
        self._longer, self._shorter = asyncio.Event(), asyncio.Event()
        """Set when clients have joined the line, and when some have left it."""
        self._log = get_logger("pgleaderlock.server")
        self._warn_seldom = Seldom(self._log.warning)

    async def reload(self, tokens: Tokens | None) -> None:
        """Reads the tokens again and, for new connections, the certificate. If one of them cannot be used, raises
        `ConfigurationError` and changes neither."""
        context = None if self._tls is None else await asyncio.to_thread(_usable_context, self._tls)
        if tokens is not None:
            tokens.replace(await asyncio.to_thread(tokens.read_again))
        self._context = context

    def start(self) -> None:
        self._tasks = [asyncio.ensure_future(each) for each in (self._accept(), self._hand_out(), self._sweep())]

    async def ended(self, *also: "asyncio.Task[None]") -> None:
        """Returns when serving, or one of the tasks `also`, has ended. That should never happen: the reason is
        logged."""
        try:
            await first_of(*map(asyncio.shield, (*self._tasks, *also)))
        except Exception as error:
            self._log.error("server_failed", error)

    async def stop(self, answered: Callable[[], Awaitable[None]]) -> None:
        """Stops accepting, waits for `answered()`, and ends every connection."""
        accepting, handing_out, _ = self._tasks
        await cancel_and_wait(accepting)
        await cancel_and_wait(handing_out)
        self._listening.close()
        for accepted in list(self._silent):
            self._forget_silent(accepted).close()
        for accepted, _ in self._line:
            accepted.close()
        self._connections.stop()
        await answered()
        await within(_FLUSH_S, self._no_more_than(0))
        self._connections.abort()
        for task in (*self._handshakes, *self._tasks):
            task.cancel()
        await within(_CUT_S, self._no_more_than(0))

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        accepted_in_turn = 0
        while True:
            while len(self._line) >= self._new_max:
                self._shorter.clear()
                await self._shorter.wait()
            try:
                accepted, peer = await loop.sock_accept(self._listening)
            except OSError as error:  # too many open files, or the client has closed the connection already
                self._log.warning("accept_failed", error=error)
                await asyncio.sleep(_ACCEPT_AGAIN_S)
                continue
            accepted.setblocking(False)
            if not self._line and self._connections.count() < self._limits.connections_max:
                self._let_in(accepted, peer)
            elif _has_sent(accepted):
                self._put_in_line(accepted, peer)
            else:
                self._keep_silent(accepted, peer)
            accepted_in_turn += 1
            if accepted_in_turn >= self._new_per_turn:  # `sock_accept` does not wait if many have come at once
                accepted_in_turn = 0
                await asyncio.sleep(0)

    def _keep_silent(self, accepted: socket.socket, peer: _Peer) -> None:
        """Keep a client without a place until it sends something, or until newer ones replace it."""
        loop = asyncio.get_running_loop()
        if len(self._silent) >= self._new_max:
            self._forget_silent(next(iter(self._silent))).close()
        self._silent[accepted] = peer, loop.time()
        loop.add_reader(accepted, self._speaks, accepted)

    def _speaks(self, accepted: socket.socket) -> None:
        peer, _ = self._silent[accepted]
        self._forget_silent(accepted)
        if _has_sent(accepted):
            self._put_in_line(accepted, peer)
        else:
            accepted.close()  # the client has left

    def _forget_silent(self, accepted: socket.socket) -> socket.socket:
        asyncio.get_running_loop().remove_reader(accepted)
        del self._silent[accepted]
        return accepted

    def _put_in_line(self, accepted: socket.socket, peer: _Peer) -> None:
        if self._may_have_more(accepted, peer):
            self._line.append((accepted, peer))
            self._longer.set()

    async def _hand_out(self) -> None:
        """Gives places to the clients in line. Makes room by closing connections that were idle for longest; if too few
        are idle, those that are answered next."""
        limits, connections = self._limits, self._connections
        while True:
            await self._longer.wait()
            left_in_turn = self._new_per_turn
            while self._line and left_in_turn and connections.count() < limits.connections_max:
                left_in_turn -= 1
                self._let_in(*self._line.popleft())
            self._shorter.set()
            connections.places_wanted = 0
            if not self._line:
                self._longer.clear()
            elif not left_in_turn:
                await asyncio.sleep(0)
            else:
                connections.fewer.clear()
                wanted = len(self._line)
                wanted -= connections.close_idlest(max(wanted, limits.connections_max // _CLOSED_SHARE))
                connections.places_wanted = max(0, wanted)
                await within(_ROOM_AGAIN_S, connections.fewer.wait())

    def _may_have_more(self, accepted: socket.socket, peer: _Peer) -> bool:
        """Whether the client's address may have one more connection. Closes the client if not."""
        most = self._limits.connections_per_address_max
        if most is None or self._connections.count(peer[0]) < most or self._connections.close_idlest(1, peer[0]):
            return True
        self._warn_seldom("connection_refused", client=peer[0], limit=most)
        accepted.close()
        return False

    def _let_in(self, accepted: socket.socket, peer: _Peer) -> None:
        """Begins a connection."""
        if not self._may_have_more(accepted, peer):  # others of its address may have come in since it was put in line
            return
        connections = self._connections
        with contextlib.suppress(OSError):
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._begin(accepted))
        self._handshakes.add(task)
        client = tuple(peer[:2])
        connections.arriving[client] = task, loop.time()
        task.add_done_callback(functools.partial(self._begun, client, accepted))

    async def _begin(self, accepted: socket.socket) -> None:
        timeouts: dict[str, float] = {}
        if self._context is not None:
            timeouts = {"ssl_handshake_timeout": self._limits.header_timeout_s, "ssl_shutdown_timeout": _CUT_S}
        connection = Connection(self._connections)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection, accepted, ssl=self._context, **timeouts
            )
        except BaseException as error:
            accepted.close()
            # uvloop does not report the end of a connection that was cancelled while it began. Without this call, the
            # connection would keep its place permanently, and be chosen as the idlest each time that room is needed.
            connection.connection_lost(None)
            if not isinstance(error, OSError):  # no TLS, or the client has left (ssl.SSLError is an OSError)
                raise

    def _begun(self, client: tuple[Any, ...], accepted: socket.socket, task: "asyncio.Task[None]") -> None:
        self._handshakes.discard(task)
        if task.cancelled():  # perhaps before its first step
            accepted.close()
        if self._connections.arriving.get(client, (None, 0.0))[0] is task:  # the handshake has failed
            del self._connections.arriving[client]
        self._connections.fewer.set()

    async def _no_more_than(self, number: int) -> None:
        connections = self._connections
        while connections.count() > number:
            connections.fewer.clear()
            await connections.fewer.wait()

    async def _sweep(self) -> None:
        interval_s = min(_SWEEP_INTERVAL_S, self._limits.header_timeout_s / 2)
        while True:
            await asyncio.sleep(interval_s)
            self._connections.sweep()
            late = asyncio.get_running_loop().time() - self._limits.header_timeout_s
            for accepted in [each for each, (_, since) in self._silent.items() if since <= late]:
                self._forget_silent(accepted).close()


def _has_sent(accepted: socket.socket) -> bool:
    try:
        return bool(accepted.recv(1, socket.MSG_PEEK))
    except OSError:  # nothing yet, or it has reset the connection
        return False


def _context(tls: Tls) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(tls.cert, tls.key, password="")
    return context


def _usable_context(tls: Tls) -> ssl.SSLContext:
    """The TLS context. Raises `ConfigurationError` unless certificate and key can be read and match."""
    try:
        return _context(tls)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"--tls-cert {tls.cert} and --tls-key {tls.key} cannot be used: {error}") from error


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach this address. False for a name that cannot be resolved."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    addresses = {str(entry[4][0]) for entry in found}
    return all(address.startswith("127.") or address == "::1" for address in addresses)


def check_exposure(host: str, token_file: Path | None, tls: Tls | None) -> None:
    """Raises `ConfigurationError` for settings that are unsafe or cannot work."""
    if token_file is None and not is_loopback(host):
        raise ConfigurationError(
            f"--host {host} can be reached from other machines, so --token-file is needed: "
            "see docs/server.md for its form, or leave --host away to serve this machine only"
        )
    if tls is not None:
        _usable_context(tls)


def address_of(listening: socket.socket, *, has_tokens: bool, tls: Tls | None) -> str:
    """The URL of this socket. Raises `ListenError` if other machines could reach it without a token."""
    host, port = listening.getsockname()[:2]
    if not has_tokens and not is_loopback(host):  # the name may resolve to another address than when it was checked
        raise ListenError(f"{host} can be reached from other machines, so --token-file is needed")
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{shown}:{port}"


def listen(host: str, port: int) -> socket.socket:
    """A listening socket that does not share its port. Port 0 takes a free one."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_ADDRCONFIG
        )[0]
    except (OSError, UnicodeError) as error:
        raise ListenError(f"the host {host!r} is unknown: give an address or a name of this machine") from error
    try:
        listening = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ListenError(f"cannot listen on {host} port {port}: {_remedy(error)}") from error
    listening.setblocking(False)
    return listening


def _remedy(error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return "another program uses this port: stop it, or give another --port"
        case errno.EACCES:
            return "this user may not use this port: take one above 1023"
        case errno.EADDRNOTAVAIL:
            return "this machine does not have that address: give one of its own as --host"
        case _:
            return os.strerror(error.errno) if error.errno else str(error)


class InFlight:
    """Counts the requests that have begun and are not answered yet. A graceful stop waits for the last of them.

    Call `begin` and `end` for each request; at the end, `stop` and then `answered`.
    """

    def __init__(self) -> None:
        self.count = 0
        self._stopping = False
        self._answered = asyncio.Event()

    def begin(self) -> None:
        self.count += 1

    def end(self) -> None:
        self.count -= 1
        if self._stopping and not self.count:
            self._answered.set()

    def stop(self) -> None:
        self._stopping = True
        if not self.count:
            self._answered.set()

    async def answered(self) -> None:
        """Returns when no request is in flight. Call `stop()` first."""
        await self._answered.wait()


class Readiness:
    """Whether the service works, checked at most once per second: a probe needs no token, so anyone may send many."""

    def __init__(self, find_out: Callable[[], Awaitable[Refusal | None]]) -> None:
        """`find_out` returns why the service does not work; None if it works."""
        self._find_out = find_out
        self._checking = asyncio.Lock()
        self._known: tuple[float, Refusal | None] = (float("-inf"), None)
        self._doubts = 0

    def doubt(self) -> None:
        """The service has just failed: forget the last result."""
        self._doubts += 1
        if self._known[1] is None:
            self._known = (float("-inf"), None)

    async def check(self) -> None:
        """Raises `Refusal` unless the service works."""
        async with self._checking:
            checked_at, refusal = self._known
            if time.monotonic() - checked_at > READY_REMEMBERED_S:
                doubts = self._doubts
                refusal = await self._find_out()
                if refusal is not None or doubts == self._doubts:
                    self._known = (time.monotonic(), refusal)
        if refusal is not None:
            raise Refusal(refusal.status, refusal.error, *refusal.headers)


class ClientGone(Exception):
    """The client has closed the connection, or half-closed it."""


class Waits:
    """The tasks that wait for their clients, each until its deadline on the monotonic clock."""

    def __init__(self, body_timeout_s: float) -> None:
        self.body_timeout_s = body_timeout_s
        self.stopping = False
        self._deadlines: dict[asyncio.Task[object], float] = {}
        self._interrupted: dict[asyncio.Task[object], str] = {}

    def begin(self, task: "asyncio.Task[object]") -> None:
        if self.stopping:
            raise stopping()
        self._deadlines[task] = time.monotonic() + self.body_timeout_s

    def end(self, task: "asyncio.Task[object]") -> str | None:
        """Ends the wait; returns why it was interrupted, or None."""
        self._deadlines.pop(task, None)
        return self._interrupted.pop(task, None)

    def stop(self) -> None:
        """Interrupts every task, and refuses new ones."""
        self.stopping = True
        self._interrupt(list(self._deadlines), _STOPPING)

    async def run(self) -> None:
        """Interrupts the tasks that are late, until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_INTERVAL_S)
            now = time.monotonic()
            self._interrupt([task for task, deadline in self._deadlines.items() if deadline <= now], _LATE)

    def _interrupt(self, tasks: "list[asyncio.Task[object]]", why: str) -> None:
        for task in tasks:
            del self._deadlines[task]
            self._interrupted[task] = why
            task.cancel()


def check_json(headers: Mapping[bytes, bytes], body_bytes_max: int) -> None:
    """Refuses a content type that another site's page could send without a CORS preflight, and a declared length that
    is far too long."""
    content_type = headers.get(b"content-type", b"")
    if content_type != _JSON_TYPE and content_type.partition(b";")[0].strip().lower() != _JSON_TYPE:
        raise Refusal(415, "the body must be JSON: send the header Content-Type: application/json")
    length = headers.get(b"content-length")
    if length is not None and (len(length) > 12 or not length.isdigit() or int(length) > _DISCARDED_BYTES_MAX):
        raise too_long(body_bytes_max)


async def read_body(
    receive: Receive, waits: Waits, body_bytes_max: int, look: Callable[[bytes], None] | None = None
) -> bytearray:
    """The whole body. Raises `Refusal` (408, 413, 503) or `ClientGone`. `look` is called with each part and may raise a
    `Refusal`: then nothing is kept, and the rest of the body is read and discarded."""
    task = asyncio.current_task()
    assert task is not None
    waits.begin(task)
    try:
        body = bytearray()
        refusal: Refusal | None = None
        seen_bytes, more, gone = 0, True, False
        while more and seen_bytes <= _DISCARDED_BYTES_MAX:
            message = await receive()
            part: bytes = message.get("body", b"")
            more, gone = message.get("more_body", False), message["type"] == "http.disconnect"
            seen_bytes += len(part)
            if seen_bytes > body_bytes_max:
                refusal, body = too_long(body_bytes_max), bytearray()
            if refusal is None:
                try:
                    if look is not None:
                        look(part)
                    body += part
                except Refusal as error:
                    refusal, body = error, bytearray()
    except asyncio.CancelledError:
        why = waits.end(task)
        if why is None:
            raise
        task.uncancel()
        raise (stopping() if why == _STOPPING else _too_slow(waits.body_timeout_s)) from None
    finally:
        waits.end(task)
    if gone:
        raise ClientGone
    if refusal is not None:
        raise refusal
    return body


def stopping() -> Refusal:
    """The answer to a request that arrives while the server stops."""
    return Refusal(503, "the server is stopping: try again in a moment, or another server", (b"retry-after", b"1"))


def left() -> Refusal:
    """The answer to a client that has left: it may have half-closed its connection, and still read."""
    text = "the connection ended, or too much was sent behind the request, before it was complete or its turn had come"
    return Refusal(400, text, (b"connection", b"close"))


def too_long(body_bytes_max: int) -> Refusal:
    return Refusal(413, f"the body is longer than {body_bytes_max} bytes", (b"connection", b"close"))


def _too_slow(timeout_s: float) -> Refusal:
    return Refusal(408, f"the body did not arrive within {timeout_s:g} s", (b"connection", b"close"))
