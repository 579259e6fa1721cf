"""Serving an ASGI application with granian inside our own event loop, with our own signals and our own end.

Traps of granian 2.x that this file is about:

- It listens with SO_REUSEPORT: two servers on one port would share the requests. We bind the socket, and hand it over.
- Its graceful stop waits for every connection, one with half a header too, and for every request. What our application
  waits for ends by itself (`bodies.Waits`); what is left after that is cut here.
- It takes the descriptor over and closes it, so our socket object must let go of it.

Imports granian. Must never touch signals: who serves decides when to stop.
"""

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from granian._granian import SocketHolder
from granian.constants import HTTPModes, Interfaces, SSLProtocols
from granian.http import HTTP1Settings
from granian.server.embed import Server

from pgleaderlock.errors import ConfigurationError, PgLeaderLockError

__all__ = ["HttpServer", "ListenError", "ServingLimits", "Tls", "check_tls", "is_loopback", "listen"]

_BACKLOG = 1024
_FLUSH_S = 0.5
"""How long granian has for writing out the last answers, before connections that say nothing are cut."""
_CUT_S = 2.0
_DESCRIPTORS = Path("/dev/fd")


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


class _Server(Server):
    """granian on a socket that is ours."""

    def __init__(self, listening: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._listening = listening

    def _init_shared_socket(self) -> None:
        self._ssp = None
        self._shd: Any = SocketHolder(self._listening.detach(), False, _BACKLOG)  # type: ignore[call-arg]


class HttpServer:
    """One application on one socket. `start`, then `stop`, each once."""

    def __init__(
        self,
        app: Callable[..., Awaitable[None]],
        listening: socket.socket,
        limits: ServingLimits | None = None,
        tls: Tls | None = None,
    ) -> None:
        limits = limits or ServingLimits()
        self._address = listening.getsockname()[:2]
        self._server = _Server(
            listening,
            app,
            interface=Interfaces.ASGINL,
            http=HTTPModes.http1,
            websockets=False,
            backlog=_BACKLOG,
            backpressure=limits.connections_max,
            http1_settings=HTTP1Settings(
                header_read_timeout=int(limits.header_timeout_s * 1000), max_buffer_size=limits.header_bytes_max
            ),
            log_enabled=False,
            **_tls_arguments(tls),
        )
        self._serving: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._serving = asyncio.ensure_future(self._server.serve())

    async def ended(self) -> None:
        """Returns when serving has ended by itself, which it never should."""
        assert self._serving is not None
        await asyncio.wait([self._serving])

    async def stop(self, answered: Callable[[], Awaitable[None]]) -> None:
        """Accepts nothing more, waits for `answered()`, and ends every connection."""
        assert self._serving is not None
        self._server.stop()  # type: ignore[no-untyped-call]
        await answered()
        # Idle connections have been closed by granian; those that are left wait for the rest of a header.
        done, _ = await asyncio.wait([self._serving], timeout=_FLUSH_S)
        if not done:
            self._cut_connections()
            await asyncio.wait([self._serving], timeout=_CUT_S)
        with contextlib.suppress(asyncio.CancelledError):
            self._serving.cancel()
            await self._serving

    def _cut_connections(self) -> None:
        """Shuts every socket of ours that was accepted here. granian gives no other way to end one."""
        for descriptor in list(_DESCRIPTORS.iterdir()):
            with contextlib.suppress(OSError, ValueError):
                copy = os.dup(int(descriptor.name))
                try:
                    accepted = socket.socket(fileno=copy)
                except OSError:  # no socket
                    os.close(copy)
                    continue
                with accepted:
                    if self._is_accepted(accepted):
                        accepted.shutdown(socket.SHUT_RDWR)

    def _is_accepted(self, candidate: socket.socket) -> bool:
        if candidate.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        candidate.getpeername()  # raises for the listening one
        host, port = candidate.getsockname()[:2]
        return port == self._address[1] and self._address[0] in (host, "0.0.0.0", "::")  # noqa: S104 - compared, not bound


def _tls_arguments(tls: Tls | None) -> dict[str, Any]:
    if tls is None:
        return {}
    return {"ssl_cert": tls.cert, "ssl_key": tls.key, "ssl_protocol_min": SSLProtocols.tls12}


def check_tls(tls: Tls) -> None:
    """Raises `ConfigurationError` unless certificate and key can be read and belong together."""
    import ssl  # noqa: PLC0415 - only needed with TLS.

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tls.cert, tls.key, password="")
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"--tls-cert {tls.cert} and --tls-key {tls.key} cannot be used: {error}") from error
