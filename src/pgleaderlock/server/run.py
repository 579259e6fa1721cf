"""The lock server put together: socket, store, service, application, monitor; and taken apart in the right order.

Imports everything of `server` and `_http`; a store's module only when its URL asks for it. Must never read a setting
from anywhere but its arguments, and never install a signal handler: that is the program's business.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote

from pgleaderlock._http.answers import Receive, Scope, Send
from pgleaderlock._http.bodies import Waits
from pgleaderlock._http.hosts import HostCheck
from pgleaderlock._http.in_flight import InFlight
from pgleaderlock._http.openapi import Operation
from pgleaderlock._http.serving import HttpServer, ServingLimits, Tls, address_of, check_exposure, listen
from pgleaderlock._http.tokens import Tokens
from pgleaderlock._logging import get_logger
from pgleaderlock.errors import ConfigurationError, PgLeaderLockError
from pgleaderlock.server.app import LockApp
from pgleaderlock.server.description import openapi_bytes
from pgleaderlock.server.metrics import Metrics
from pgleaderlock.server.service import Service, ServiceLimits
from pgleaderlock.server.store import LOCKS_MAX, WAITERS_MAX, Store, StoreError

__all__ = ["Front", "Inside", "LockServer", "Mount", "ServerError", "ServerSettings", "store_from_url"]

_MOMENT_S = 0.1
_ANSWER_S = 15.0
"""How long requests in flight have to be answered in at the end: longer than any statement of a store."""


class ServerError(PgLeaderLockError):
    """The server cannot start, or could not go on. The text says what to do."""


@dataclass(frozen=True)
class ServerSettings:
    host: str = "127.0.0.1"
    port: int = 7420
    token_file: Path | None = None
    allowed_hosts: tuple[str, ...] = ()
    tls: Tls | None = None
    body_timeout_s: float = 10.0
    access_log: bool = False
    serving: ServingLimits = field(default_factory=ServingLimits)
    service: ServiceLimits = field(default_factory=ServiceLimits)

    def check(self) -> None:
        """Raises `ConfigurationError` for what would be unsafe."""
        check_exposure(self.host, self.token_file, self.tls)


def store_from_url(url: str, *, locks_max: int = LOCKS_MAX, waiters_max: int = WAITERS_MAX) -> Store:
    """`sqlite:///relative.db`, `sqlite:////absolute.db` or `postgresql://…`. The store is not opened yet."""
    scheme, separator, rest = url.partition("://")
    if separator and scheme == "sqlite":
        if not rest.startswith("/") or len(rest) < 2:
            raise ConfigurationError("--store: write sqlite:///locks.db, or sqlite:////var/lib/locks.db (four slashes)")
        if rest == "/:memory:":
            raise ConfigurationError("--store: locks have to outlive the server: give a file, sqlite:///locks.db")
        from pgleaderlock.server.store_sqlite import SqliteStore  # noqa: PLC0415 - needs apsw, which PostgreSQL does not.

        return SqliteStore(unquote(rest[1:]), locks_max=locks_max, waiters_max=waiters_max)
    if separator and scheme in ("postgresql", "postgres"):
        from pgleaderlock.server.store_postgres import PostgresStore  # noqa: PLC0415 - only where it is asked for.

        return PostgresStore(url, locks_max=locks_max, waiters_max=waiters_max)
    # Not repeated in the message: it may be a DSN of another form, with a password in it.
    raise ConfigurationError("--store must be sqlite:///path/to/locks.db or postgresql://user@host/dbname")


@dataclass(frozen=True)
class Inside:
    """What an application that stands in front of the locks is given."""

    app: LockApp
    hosts: HostCheck
    tokens: Tokens | None
    waits: Waits
    connections_max: int
    access_log: bool


class Front(Protocol):
    """An application in front of the locks: it passes on what is not its own."""

    in_flight: InFlight

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]: ...

    def stop(self) -> None: ...


class Mount(Protocol):
    """Brings a `Front`."""

    async def open(self) -> Sequence[Operation]:
        """Called when the store is open; gives what it adds to the description."""
        ...

    def wrap(self, inside: Inside) -> Front: ...

    async def close(self) -> None: ...


class LockServer:
    """`start`, then `stop`, each once. `mount` brings what stands in front of the locks, such as a dashboard."""

    def __init__(self, store: Store, settings: ServerSettings, mount: Mount | None = None) -> None:
        settings.check()
        self._store = store
        self._settings = settings
        self._mount = mount
        self._hosts = HostCheck([settings.host, *settings.allowed_hosts])
        self._tokens = Tokens(settings.token_file) if settings.token_file is not None else None
        self._log = get_logger("pgleaderlock.server")
        self._background: list[asyncio.Task[None]] = []
        self.url = ""

    async def start(self) -> None:
        settings = self._settings
        listening = listen(settings.host, settings.port)
        try:
            self.url = address_of(listening, has_tokens=self._tokens is not None, tls=settings.tls)
            try:
                await self._store.open()
            except StoreError as error:
                raise ServerError(str(error)) from error
            more = await self._mount.open() if self._mount is not None else ()
            self._assemble(listening, more)
        except BaseException:
            listening.close()
            if self._mount is not None:
                await self._mount.close()
            await self._store.close()
            raise

    def _assemble(self, listening: socket.socket, more: Sequence[Operation]) -> None:
        settings = self._settings
        metrics = Metrics()
        service = Service(self._store, metrics, settings.service)
        waits = Waits(settings.body_timeout_s)
        locks = LockApp(
            service,
            metrics,
            waits,
            hosts=self._hosts,
            tokens=self._tokens,
            openapi=openapi_bytes(more),
            access_log=settings.access_log,
        )
        self._apps: list[Front] = [locks]
        if self._mount is not None:
            inside = Inside(
                locks,
                self._hosts,
                self._tokens,
                waits,
                settings.serving.connections_max,
                access_log=settings.access_log,
            )
            self._apps.append(self._mount.wrap(inside))
        self._http = HttpServer(self._apps[-1], listening, settings.serving, settings.tls, locks.at_once)
        self._http.start()
        self._background = [asyncio.ensure_future(service.monitor()), asyncio.ensure_future(waits.run())]

    async def reload(self) -> None:
        """Reads tokens and certificate anew. Raises `ConfigurationError`, and then both stay as they were."""
        await self._http.reload(self._tokens)

    async def ended(self) -> None:
        """Returns if serving ends by itself, or one of the tasks behind it."""
        tasks = [asyncio.ensure_future(self._http.ended()), *self._background]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if not task.cancelled() and task.exception() is not None:
                    self._log.error("server_failed", task.exception())
        finally:
            tasks[0].cancel()

    async def stop(self) -> None:
        """Accepts nothing more, answers what is in flight, wakes who waits, closes the store."""
        await self._http.stop(self._answered)
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        if self._mount is not None:
            await self._mount.close()
        await self._store.close()

    async def _answered(self) -> None:
        # Who has sent a whole request needs no more than a moment. The others wait, for a lock or for their own client.
        deadline = time.monotonic() + _MOMENT_S
        # An event in its place would have to be set and cleared by every request.
        while any(app.in_flight.count for app in self._apps) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_MOMENT_S / 20)
        for app in self._apps:
            app.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                for app in self._apps:
                    await app.in_flight.answered()
                return
        self._log.warning("requests_unanswered", after_s=_ANSWER_S)
