"""Serving an ASGI application inside our own event loop, with our own signals and our own end.

We accept connections ourselves, one at a time, so that those beyond the limit wait in the kernel for their turn.

Imports `http1`, `connections` and `tokens`. Must never touch signals: who serves decides when to stop.
"""

import asyncio
import contextlib
import errno
import os
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from pgleaderlock._http.connections import App, AtOnce, Connections
from pgleaderlock._http.http1 import Connection
from pgleaderlock._http.tokens import Tokens
from pgleaderlock._logging import get_logger
from pgleaderlock.errors import ConfigurationError, PgLeaderLockError

__all__ = ["HttpServer", "ListenError", "ServingLimits", "Tls", "address_of", "check_exposure", "is_loopback", "listen"]

_BACKLOG = 1024
_FLUSH_S = 0.5
"""How long the last answers have for being written out, before what is left is cut."""
_CUT_S = 2.0
_ACCEPT_AGAIN_S = 0.1
_SWEEP_INTERVAL_S = 0.5


class ListenError(PgLeaderLockError):
    """The address cannot be listened on. The text says what to do."""


@dataclass(frozen=True)
class Tls:
    cert: Path
    key: Path


@dataclass(frozen=True)
class ServingLimits:
    connections_max: int = 1024
    """Further ones wait in the kernel until another ends."""
    header_timeout_s: float = 10.0
    """For a header to be complete; also how long a connection may be idle between two requests."""
    header_bytes_max: int = 16 * 1024


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens there. A name that cannot be looked up is not."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    addresses = {str(entry[4][0]) for entry in found}
    return all(address.startswith("127.") or address == "::1" for address in addresses)


def check_exposure(host: str, token_file: Path | None, tls: Tls | None) -> None:
    """Raises `ConfigurationError` for what would be unsafe, or cannot work."""
    if token_file is None and not is_loopback(host):
        raise ConfigurationError(
            f"--host {host} can be reached from other machines, so --token-file is needed: "
            "see docs/server.md for its form, or leave --host away to serve this machine only"
        )
    if tls is not None:
        _usable_context(tls)


def address_of(listening: socket.socket, *, has_tokens: bool, tls: Tls | None) -> str:
    """The URL of what listens. Raises `ListenError` where others could reach it without a token."""
    host, port = listening.getsockname()[:2]
    if not has_tokens and not is_loopback(host):  # a name may mean something else than a moment ago
        raise ListenError(f"{host} can be reached from other machines, so --token-file is needed")
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{shown}:{port}"


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens, alone. Port 0 takes a free one."""
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


class HttpServer:
    """One application on one socket. `start`, then `stop`, each once."""

    def __init__(
        self,
        app: App,
        listening: socket.socket,
        limits: ServingLimits | None = None,
        tls: Tls | None = None,
        at_once: AtOnce | None = None,
    ) -> None:
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
        )
        self._handshakes: set[asyncio.Task[None]] = set()
        self._log = get_logger("pgleaderlock.server")

    async def reload(self, tokens: Tokens | None) -> None:
        """Reads anew who may ask and, for connections to come, the certificate. Raises `ConfigurationError`, and then
        both stay as they were."""
        context = None if self._tls is None else await asyncio.to_thread(_usable_context, self._tls)
        if tokens is not None:
            tokens.replace(await asyncio.to_thread(tokens.read_again))
        self._context = context

    def start(self) -> None:
        self._tasks = [asyncio.ensure_future(self._accept()), asyncio.ensure_future(self._sweep())]

    async def ended(self) -> None:
        """Returns when serving has ended; raises what it has ended with, which should never happen."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if not task.cancelled():
                task.result()

    async def stop(self, answered: Callable[[], Awaitable[None]]) -> None:
        """Accepts nothing more, waits for `answered()`, and ends every connection."""
        self._tasks[0].cancel()
        await asyncio.wait(self._tasks[:1])
        self._listening.close()
        self._connections.stop()
        await answered()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_S):
                await self._no_more_than(0)
        self._connections.abort()
        for task in (*self._handshakes, *self._tasks):
            task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CUT_S):
                await self._no_more_than(0)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._no_more_than(self._limits.connections_max - 1)
            try:
                accepted, _ = await loop.sock_accept(self._listening)
            except OSError as error:  # too many open files, or a client that has gone before its turn
                self._log.warning("accept_failed", error=error)
                await asyncio.sleep(_ACCEPT_AGAIN_S)
                continue
            accepted.setblocking(False)
            with contextlib.suppress(OSError):
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = loop.create_task(self._begin(accepted))
            self._handshakes.add(task)
            task.add_done_callback(self._begun)

    async def _begin(self, accepted: socket.socket) -> None:
        timeouts: dict[str, float] = {}
        if self._context is not None:
            timeouts = {"ssl_handshake_timeout": self._limits.header_timeout_s, "ssl_shutdown_timeout": _CUT_S}
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: Connection(self._connections), accepted, ssl=self._context, **timeouts
            )
        except BaseException as error:
            accepted.close()
            if not isinstance(error, OSError):  # a client that speaks no TLS, or has gone; ssl.SSLError is one
                raise

    def _begun(self, task: "asyncio.Task[None]") -> None:
        self._handshakes.discard(task)
        self._connections.fewer.set()

    async def _no_more_than(self, number: int) -> None:
        connections = self._connections
        while len(connections.open) + len(self._handshakes) > number:
            connections.fewer.clear()
            await connections.fewer.wait()

    async def _sweep(self) -> None:
        interval_s = min(_SWEEP_INTERVAL_S, self._limits.header_timeout_s / 2)
        while True:
            await asyncio.sleep(interval_s)
            self._connections.sweep()


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
