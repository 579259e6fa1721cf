"""The lock server put together: socket, store, service, application, monitor; and taken apart in the right order.

Must never read a setting from anywhere but its arguments, and never install a signal handler: that is left to the
program.
"""

import asyncio
import socket
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote

from pgleaderlock._base.aio import cancel_and_wait, within
from pgleaderlock._base.logging import get_logger
from pgleaderlock._http.access import HostCheck, Tokens
from pgleaderlock._http.answers import Receive, Scope, Send
from pgleaderlock._http.openapi import Operation
from pgleaderlock._http.server import (
    HttpServer,
    InFlight,
    ServingLimits,
    Tls,
    Waits,
    address_of,
    check_exposure,
    listen,
)
from pgleaderlock.errors import ConfigurationError, PgLeaderLockError
from pgleaderlock.server import wire
from pgleaderlock.server.app import LockApp
from pgleaderlock.server.description import openapi_bytes
from pgleaderlock.server.metrics import Metrics
from pgleaderlock.server.service import Service, ServiceLimits
from pgleaderlock.server.store import LOCKS_MAX, WAITERS_MAX, Store, StoreError

__all__ = ["Front", "Inside", "LockServer", "Mount", "ServerError", "ServerSettings", "store_from_url"]

_MOMENT_S = 0.1
_ANSWER_S = 15.0
"""How long a stop waits for requests in flight: longer than any statement of a store."""


class ServerError(PgLeaderLockError):
    """The server could not start or go on. The text says what to do."""


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
        """Raises `ConfigurationError` for settings that are unsafe or cannot work."""
        check_exposure(self.host, self.token_file, self.tls)
        waiters, connections = self.service.waiters_max, self.serving.connections_max
        if waiters >= connections:
            raise ConfigurationError(
                f"--max-waiters {waiters} leaves no connection of --max-connections {connections} to the holders of "
                "locks, who have to renew and release: lower it, or raise --max-connections"
            )


def store_from_url(url: str, *, locks_max: int = LOCKS_MAX, waiters_max: int = WAITERS_MAX) -> Store:
    """`sqlite:///relative.db`, `sqlite:////absolute.db` or `postgresql://…`. The store is not opened yet."""
    scheme, separator, rest = url.partition("://")
    if separator and scheme == "sqlite":
        if not rest.startswith("/") or len(rest) < 2:
            raise ConfigurationError("--store: write sqlite:///locks.db, or sqlite:////var/lib/locks.db (four slashes)")
        if rest == "/:memory:":
            raise ConfigurationError("--store: locks have to outlive the server: give a file, sqlite:///locks.db")
        from pgleaderlock.server.sqlite.store import SqliteStore  # noqa: PLC0415 - needs apsw, which PostgreSQL does not.

        return SqliteStore(unquote(rest[1:]), locks_max=locks_max, waiters_max=waiters_max)
    if separator and scheme in ("postgresql", "postgres"):
        from pgleaderlock.server.postgres.store import PostgresStore  # noqa: PLC0415 - only where it is asked for.

        return PostgresStore(url, locks_max=locks_max, waiters_max=waiters_max)
    # The message does not repeat the URL: it may be a DSN of another form, with a password in it.
    raise ConfigurationError("--store must be sqlite:///path/to/locks.db or postgresql://user@host/dbname")


@dataclass(frozen=True)
class Inside:
    """What an application in front of the lock API gets from the server."""

    app: LockApp
    hosts: HostCheck
    tokens: Tokens | None
    waits: Waits
    connections_max: int
    access_log: bool


class Front(Protocol):
    """An application in front of the lock API: it passes on the requests that are not its own."""

    in_flight: InFlight

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]: ...

    def stop(self) -> None: ...


class Mount(Protocol):
    """Creates a `Front`."""

    async def open(self) -> Sequence[Operation]:
        """Called when the store is open; returns the operations to add to the OpenAPI description."""
        ...

    def wrap(self, inside: Inside) -> Front: ...

    async def close(self) -> None: ...


class LockServer:
    """The lock server. Call `start`, then `stop`, each once. `mount` adds an application in front, such as a
    dashboard."""

    def __init__(
        self, store: Store, settings: ServerSettings, mount: Mount | None = None, *, import_go: Path | None = None
    ) -> None:
        settings.check()
        self._store = store
        self._settings = settings
        self._mount = mount
        self._import_go = import_go
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
                if self._import_go is not None:
                    await self._take_over(self._import_go)
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

    async def _take_over(self, path: Path) -> None:
        """Take over another server's locks before serving requests, so that no lower token is ever granted."""
        from pgleaderlock.server.sqlite.original import read_original  # noqa: PLC0415 - needs apsw, as above.

        found = await asyncio.to_thread(read_original, path)
        adopted = await self._store.adopt(found)
        self._log.info("taken_over", file=str(path), found=len(found), adopted=adopted)

    def _assemble(self, listening: socket.socket, more: Sequence[Operation]) -> None:
        settings = self._settings
        metrics = Metrics(self._store.found)
        service = Service(self._store, metrics, settings.service, log_operations=settings.access_log)
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
        identity = (wire.STORE_HEADER, self._store.found.store_id.encode())
        self._http = HttpServer(
            self._apps[-1], listening, settings.serving, settings.tls, locks.at_once, headers=(identity,)
        )
        self._http.start()
        self._background = [asyncio.ensure_future(service.monitor()), asyncio.ensure_future(waits.run())]

    async def reload(self) -> None:
        """Reads tokens and certificate again. If one of them cannot be used, raises `ConfigurationError` and changes
        neither."""
        await self._http.reload(self._tokens)

    async def ended(self) -> None:
        """Returns if serving, or one of its background tasks, ends by itself."""
        await self._http.ended(*self._background)

    async def stop(self) -> None:
        """Stops accepting, answers the requests in flight and those that wait, and closes the store."""
        await self._http.stop(self._answered)
        await cancel_and_wait(*self._background)
        if self._mount is not None:
            await self._mount.close()
        await self._store.close()

    async def _answered(self) -> None:
        # A complete request is answered within a moment. The others wait for a lock, or for the rest of their body.
        deadline = time.monotonic() + _MOMENT_S
        # Polling, because every request would have to set and clear an event.
        while any(app.in_flight.count for app in self._apps) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_MOMENT_S / 20)
        for app in self._apps:
            app.stop()
        if not await within(_ANSWER_S, asyncio.gather(*(app.in_flight.answered() for app in self._apps))):
            self._log.warning("requests_unanswered", after_s=_ANSWER_S)
