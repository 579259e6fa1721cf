"""Serving an ASGI application on one socket: accepting, reading bodies within limits, and ending gracefully.

We accept connections ourselves, one at a time. When all places are taken, the idlest connection without a request is
closed for the next one that sends something; one that sends nothing gets no place, and so costs little. If all have a
request, the next one waits for its turn.

A graceful stop waits for every request that has begun, so a client that sends half a body would hold it up without end.
Every task that waits for a client does so through `Waits`, which interrupts the late ones, and all of them at a stop.
One table and one sweep serve all requests: a timer per request costs more than reading a small body.

Must never touch signals (the program decides when to stop), and never keep more of a body than its limit.
"""

import asyncio
import contextlib
import errno
import functools
import os
import socket
import ssl
import time
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
"""How long the last answers have to be written, before the connections that are left are aborted."""
_CUT_S = 2.0
_ACCEPT_AGAIN_S = 0.1
_ROOM_AGAIN_S = 0.02
"""When to look again for an idle connection, if there was none."""
_CLOSED_SHARE = 64
"""When all places are taken, one of so many is made free at once: finding the idlest takes longer than accepting."""
_SILENT_SHARE = 8
_SILENT_MIN = 64
"""When all places are taken, so many clients are kept who have sent nothing yet: one for every eight places, and no
fewer than 64, because a healthy client may connect a moment before it sends."""
_SWEEP_INTERVAL_S = 0.5
_JSON_TYPE = b"application/json"
# A client that is still sending when the connection is closed loses the answer. So a body that is too long, but not
# longer than this, is read to its end and thrown away.
_DISCARDED_BYTES_MAX = 8 * 1024 * 1024
_LATE = "late"
_STOPPING = "stopping"
READY_REMEMBERED_S = 1.0

_Peer = tuple[Any, ...]


class ListenError(PgLeaderLockError):
    """The address cannot be listened on. The text says what to do."""


@dataclass(frozen=True)
class Tls:
    cert: Path
    key: Path


@dataclass(frozen=True)
class ServingLimits:
    connections_max: int = 1024
    """For a further one, the idlest without a request is closed. If all have one, it waits."""
    connections_per_address_max: int | None = None
    """Behind a proxy, all clients have one address."""
    header_timeout_s: float = 10.0
    """For a header to be complete; also how long a connection may be idle between two requests."""
    header_bytes_max: int = 16 * 1024


class HttpServer:
    """One application on one socket. `start`, then `stop`, each once."""

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
        """`headers` are on every answer."""
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
        """Those for whom there was no place when they came, and who have sent nothing: their peers, and since when."""
        self._silent_max = max(_SILENT_MIN, self._limits.connections_max // _SILENT_SHARE)
        self._spoken: set[asyncio.Task[None]] = set()
        """Of those, who has sent something since, and waits for a place. No more of them are let in than
        `_silent_max`: then the next client waits in the kernel."""
        self._log = get_logger("pgleaderlock.server")
        self._warn_seldom = Seldom(self._log.warning)

    async def reload(self, tokens: Tokens | None) -> None:
        """Reads the tokens again and, for new connections, the certificate. Raises `ConfigurationError`, and then both
        stay as they were."""
        context = None if self._tls is None else await asyncio.to_thread(_usable_context, self._tls)
        if tokens is not None:
            tokens.replace(await asyncio.to_thread(tokens.read_again))
        self._context = context

    def start(self) -> None:
        self._tasks = [asyncio.ensure_future(self._accept()), asyncio.ensure_future(self._sweep())]

    async def ended(self, *also: "asyncio.Task[None]") -> None:
        """Returns when serving has ended, or one of the tasks `also`. That should never happen: the log says why."""
        try:
            await first_of(*map(asyncio.shield, (*self._tasks, *also)))
        except Exception as error:
            self._log.error("server_failed", error)

    async def stop(self, answered: Callable[[], Awaitable[None]]) -> None:
        """Accepts nothing more, waits for `answered()`, and ends every connection."""
        await cancel_and_wait(self._tasks[0])
        self._listening.close()
        for accepted in list(self._silent):
            self._forget_silent(accepted).close()
        for task in self._spoken:
            task.cancel()
        self._connections.stop()
        await answered()
        await within(_FLUSH_S, self._no_more_than(0))
        self._connections.abort()
        for task in (*self._handshakes, *self._tasks):
            task.cancel()
        await within(_CUT_S, self._no_more_than(0))

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, peer = await loop.sock_accept(self._listening)
            except OSError as error:  # too many open files, or a client that has left before its turn
                self._log.warning("accept_failed", error=error)
                await asyncio.sleep(_ACCEPT_AGAIN_S)
                continue
            accepted.setblocking(False)
            if self._may_keep_silent() and not _has_sent(accepted):
                self._keep_silent(accepted, peer)
                await asyncio.sleep(0)  # many may have come at once
            else:
                await self._admit(accepted, peer)

    async def _admit(self, accepted: socket.socket, peer: _Peer) -> None:
        try:
            has_room = await self._room_for(peer[0])
        except BaseException:
            accepted.close()
            raise
        if not has_room:
            accepted.close()
            return
        with contextlib.suppress(OSError):
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._begin(accepted))
        self._handshakes.add(task)
        client = tuple(peer[:2])
        self._connections.arriving[client] = task, loop.time()
        task.add_done_callback(functools.partial(self._begun, client, accepted))

    def _may_keep_silent(self) -> bool:
        return self._connections.count() >= self._limits.connections_max and len(self._spoken) < self._silent_max

    def _keep_silent(self, accepted: socket.socket, peer: _Peer) -> None:
        """Until it sends something, or newer ones have come."""
        loop = asyncio.get_running_loop()
        if len(self._silent) >= self._silent_max:
            self._forget_silent(next(iter(self._silent))).close()
        self._silent[accepted] = peer, loop.time()
        loop.add_reader(accepted, self._speaks, accepted)

    def _speaks(self, accepted: socket.socket) -> None:
        peer, _ = self._silent[accepted]
        self._forget_silent(accepted)
        if _has_sent(accepted):
            task = asyncio.get_running_loop().create_task(self._admit(accepted, peer))
            self._spoken.add(task)
            task.add_done_callback(functools.partial(self._admitted, accepted))
        else:
            accepted.close()  # the client has left

    def _admitted(self, accepted: socket.socket, task: "asyncio.Task[None]") -> None:
        self._spoken.discard(task)
        if task.cancelled():  # perhaps before its first step
            accepted.close()

    def _forget_silent(self, accepted: socket.socket) -> socket.socket:
        asyncio.get_running_loop().remove_reader(accepted)
        del self._silent[accepted]
        return accepted

    async def _room_for(self, address: str) -> bool:
        """Returns when this client may have a connection; False if it may not, because its address has too many. Room
        is made by closing what is idlest."""
        limits, connections = self._limits, self._connections
        most = limits.connections_per_address_max
        if most is not None and connections.count(address) >= most and not connections.close_idlest(1, address):
            self._warn_seldom("connection_refused", client=address, limit=most)
            return False
        while connections.count() >= limits.connections_max:
            connections.fewer.clear()
            connections.close_idlest(max(1, limits.connections_max // _CLOSED_SHARE))
            await within(_ROOM_AGAIN_S, connections.fewer.wait())
        return True

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
            # uvloop does not report the end of a connection that was cancelled while it began. Without this it would
            # keep its place without end, as the idlest of all, and be chosen each time that room is needed.
            connection.connection_lost(None)
            if not isinstance(error, OSError):  # a client that speaks no TLS, or has left; ssl.SSLError is one
                raise

    def _begun(self, client: tuple[Any, ...], accepted: socket.socket, task: "asyncio.Task[None]") -> None:
        self._handshakes.discard(task)
        if task.cancelled():  # perhaps before its first step
            accepted.close()
        if self._connections.arriving.get(client, (None, 0.0))[0] is task:  # it has failed
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
    """Raises `ConfigurationError` unless certificate and key can be read and belong together."""
    try:
        return _context(tls)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"--tls-cert {tls.cert} and --tls-key {tls.key} cannot be used: {error}") from error


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach this address. False for a name that cannot be looked up."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    addresses = {str(entry[4][0]) for entry in found}
    return all(address.startswith("127.") or address == "::1" for address in addresses)


def check_exposure(host: str, token_file: Path | None, tls: Tls | None) -> None:
    """Raises `ConfigurationError` for settings that would be unsafe, or cannot work."""
    if token_file is None and not is_loopback(host):
        raise ConfigurationError(
            f"--host {host} can be reached from other machines, so --token-file is needed: "
            "see docs/server.md for its form, or leave --host away to serve this machine only"
        )
    if tls is not None:
        _usable_context(tls)


def address_of(listening: socket.socket, *, has_tokens: bool, tls: Tls | None) -> str:
    """The URL of this socket. Raises `ListenError` where other machines could reach it without a token."""
    host, port = listening.getsockname()[:2]
    if not has_tokens and not is_loopback(host):  # the name may have changed its meaning since it was checked
        raise ListenError(f"{host} can be reached from other machines, so --token-file is needed")
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{shown}:{port}"


def listen(host: str, port: int) -> socket.socket:
    """A listening socket that shares its port with nobody. Port 0 takes a free one."""
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
    """How many requests have begun and are not answered yet. A graceful stop waits for the last of them.

    `begin` and `end` are called for each request; `stop`, and then `answered`, at the end.
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
        """Returns, after `stop()`, when none is in flight."""
        await self._answered.wait()


class Readiness:
    """Whether the service can work, found out at most once per second: a probe needs no token."""

    def __init__(self, find_out: Callable[[], Awaitable[Refusal | None]]) -> None:
        """`find_out` says why the service cannot work; None if it can."""
        self._find_out = find_out
        self._checking = asyncio.Lock()
        self._known: tuple[float, Refusal | None] = (float("-inf"), None)
        self._doubts = 0

    def doubt(self) -> None:
        """The service has just failed: that it could work a moment ago is forgotten."""
        self._doubts += 1
        if self._known[1] is None:
            self._known = (float("-inf"), None)

    async def check(self) -> None:
        """Raises `Refusal` unless the service can work."""
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
    """The client has closed the connection, or half of it."""


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
        """Ends the wait; says why it was interrupted, if it was."""
        self._deadlines.pop(task, None)
        return self._interrupted.pop(task, None)

    def stop(self) -> None:
        """Interrupts every task, and lets none begin."""
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
    """Refuses a body that a page of another site could send without asking (CORS), or that declares itself too long."""
    content_type = headers.get(b"content-type", b"")
    if content_type != _JSON_TYPE and content_type.partition(b";")[0].strip().lower() != _JSON_TYPE:
        raise Refusal(415, "the body must be JSON: send the header Content-Type: application/json")
    length = headers.get(b"content-length")
    if length is not None and (len(length) > 12 or not length.isdigit() or int(length) > _DISCARDED_BYTES_MAX):
        raise too_long(body_bytes_max)


async def read_body(
    receive: Receive, waits: Waits, body_bytes_max: int, look: Callable[[bytes], None] | None = None
) -> bytearray:
    """The whole body. Raises `Refusal` (408, 413, 503) or `ClientGone`. `look` is called with each part of it, and may
    raise a `Refusal`: then nothing is kept, and the rest is read and thrown away."""
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
    """For a request that cannot be served any more."""
    return Refusal(503, "the server is stopping: try again in a moment, or another server", (b"retry-after", b"1"))


def left() -> Refusal:
    """For a client that may only have half-closed its connection, and still listen."""
    text = "the connection ended, or too much was sent behind the request, before it was complete or its turn had come"
    return Refusal(400, text, (b"connection", b"close"))


def too_long(body_bytes_max: int) -> Refusal:
    return Refusal(413, f"the body is longer than {body_bytes_max} bytes", (b"connection", b"close"))


def _too_slow(timeout_s: float) -> Refusal:
    return Refusal(408, f"the body did not arrive within {timeout_s:g} s", (b"connection", b"close"))
