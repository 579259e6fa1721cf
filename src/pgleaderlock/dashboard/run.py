"""Puts the dashboard together: in front of a lock server (`Mounted`), or as a separate server (`DashboardServer`).

Must never keep a lock server from starting because the ledger's database is unreachable.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pgleaderlock import history
from pgleaderlock._base.aio import cancel_and_wait, within
from pgleaderlock._base.logging import get_logger
from pgleaderlock._http.access import HostCheck, Tokens
from pgleaderlock._http.answers import Answer, Refusal
from pgleaderlock._http.openapi import Operation
from pgleaderlock._http.server import (
    HttpServer,
    Readiness,
    ServingLimits,
    Tls,
    Waits,
    address_of,
    check_exposure,
    listen,
)
from pgleaderlock._pg.reader import ReadPool
from pgleaderlock.dashboard.api import Api
from pgleaderlock.dashboard.app import DashboardApp, Rules
from pgleaderlock.dashboard.description import OPERATIONS, openapi_bytes
from pgleaderlock.dashboard.feed import Feed
from pgleaderlock.errors import ConnectionError, PgLeaderLockError, SchemaError
from pgleaderlock.server.run import Inside, ServerError
from pgleaderlock.server.wire import StatusReply, encode

__all__ = ["DashboardServer", "DashboardSettings", "LedgerSettings", "Mounted"]

_ANSWER_S = 10.0
_OTHER_CONNECTIONS = 16
"""Connections that streams may not use, so that pages can still be loaded."""


@dataclass(frozen=True)
class LedgerSettings:
    """The ledger that the dashboard shows."""

    dsn: str
    namespace: str
    channel: str
    required: bool = True
    """Whether it is an error if the database has no ledger, or one that may not be read."""

    def feed(self, streams_max: int) -> Feed:
        return Feed(self.dsn, self.namespace, self.channel, streams_max=streams_max)


class Mounted:
    """The dashboard in front of a lock server: call `open`, `wrap`, and at the end `close`."""

    def __init__(self, ledger: LedgerSettings | None) -> None:
        self._settings = ledger
        self._ledger: ReadPool | None = None
        self._feed: Feed | None = None
        self._log = get_logger("pgleaderlock.dashboard")

    async def open(self) -> Sequence[Operation]:
        """Looks for the ledger; returns the operations that are served in addition to the locks."""
        if self._settings is None:
            return ()
        ledger = ReadPool(self._settings.dsn)
        try:
            await history.ledger_facts(ledger)
        except ConnectionError as error:  # unreachable for now, which the pages show
            self._log.warning("ledger_away", error=str(error))
        except SchemaError as error:
            await ledger.close()
            if self._settings.required:
                raise ServerError(f"--dsn: {error}") from error
            self._log.info("dashboard_without_leaders", reason=str(error))
            return ()
        self._ledger = ledger
        return OPERATIONS

    def wrap(self, inside: Inside) -> DashboardApp:
        rules = Rules(inside.hosts, inside.tokens, inside.waits, access_log=inside.access_log)
        if self._ledger is None or self._settings is None:
            return DashboardApp(rules, api=None, feed=None, inner=inside.app)
        # Streams may use half of the connections: open pages must not keep a lease from being renewed.
        self._feed = self._settings.feed(max(1, inside.connections_max // 2))
        api = Api(self._ledger, self._settings.namespace)
        return DashboardApp(rules, api=api, feed=self._feed, inner=inside.app)

    async def close(self) -> None:
        if self._feed is not None:
            await self._feed.close()
        if self._ledger is not None:
            await self._ledger.close()


@dataclass(frozen=True)
class DashboardSettings:
    ledger: LedgerSettings
    host: str = "127.0.0.1"
    port: int = 7421
    token_file: Path | None = None
    allowed_hosts: tuple[str, ...] = ()
    tls: Tls | None = None
    access_log: bool = False
    serving: ServingLimits = field(default_factory=ServingLimits)

    def check(self) -> None:
        """Raises `ConfigurationError` for unsafe settings."""
        check_exposure(self.host, self.token_file, self.tls)


class DashboardServer:
    """A dashboard without a lock server. Call `start`, then `stop`, each once."""

    def __init__(self, settings: DashboardSettings, hopeless: Callable[[ConnectionError], bool]) -> None:
        """`hopeless` says whether it is pointless to wait for a database that cannot be reached at the start."""
        settings.check()
        self._settings = settings
        self._hopeless = hopeless
        self._log = get_logger("pgleaderlock.dashboard")
        self._hosts = HostCheck([settings.host, *settings.allowed_hosts])
        self._tokens = Tokens(settings.token_file) if settings.token_file is not None else None
        self._ready = Readiness(self._not_ready)
        self.url = ""

    async def start(self) -> None:
        """Starts serving. Raises `SchemaError` if there is no ledger."""
        settings = self._settings
        listening = listen(settings.host, settings.port)
        self._ledger = ReadPool(settings.ledger.dsn)
        try:
            self.url = address_of(listening, has_tokens=self._tokens is not None, tls=settings.tls)
            await self._look()
        except BaseException:
            listening.close()
            await self._ledger.close()
            raise
        limits = settings.serving
        self._feed = settings.ledger.feed(max(1, limits.connections_max - _OTHER_CONNECTIONS))
        waits = Waits(limits.header_timeout_s)
        self._app = DashboardApp(
            Rules(self._hosts, self._tokens, waits, access_log=settings.access_log),
            api=Api(self._ledger, settings.ledger.namespace),
            feed=self._feed,
            inner=None,
            alone={b"/healthz": self._health, b"/readyz": self._readiness, b"/openapi.json": self._describe},
        )
        self._http = HttpServer(self._app, listening, limits, settings.tls)
        self._http.start()
        self._sweeping = asyncio.ensure_future(waits.run())

    async def _look(self) -> None:
        try:
            await history.ledger_facts(self._ledger)
        except ConnectionError as error:
            if self._hopeless(error):
                raise
            self._log.warning("ledger_away", error=str(error))

    async def reload(self) -> None:
        """Reads tokens and certificate again. If one of them cannot be used, raises `ConfigurationError` and changes
        neither."""
        await self._http.reload(self._tokens)

    async def ended(self) -> None:
        """Returns if serving ends by itself."""
        await self._http.ended()

    async def stop(self) -> None:
        """Stops accepting, answers the requests in flight, and ends the streams."""
        await self._http.stop(self._answered)
        await cancel_and_wait(self._sweeping)
        await self._feed.close()
        await self._ledger.close()

    async def _answered(self) -> None:
        self._app.stop()
        if not await within(_ANSWER_S, self._app.in_flight.answered()):
            self._log.warning("requests_unanswered", after_s=_ANSWER_S)

    async def _health(self) -> Answer:
        return Answer(200, encode(StatusReply("ok")))

    async def _readiness(self) -> Answer:
        await self._ready.check()
        return Answer(200, encode(StatusReply("ready")))

    async def _not_ready(self) -> Refusal | None:
        try:
            await history.ledger_facts(self._ledger)
        except PgLeaderLockError:
            return Refusal(503, "the ledger cannot be read: the server's log says why", (b"retry-after", b"1"))
        return None

    async def _describe(self) -> Answer:
        return Answer(200, openapi_bytes())
