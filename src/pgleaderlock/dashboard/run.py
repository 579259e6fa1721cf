"""The dashboard put together: in front of a lock server (`Mounted`), or as a server of its own (`DashboardServer`).

Imports everything of `dashboard`, and what `server` and `_http` have for it. Must never keep a lock server from
starting because a database is away.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pgleaderlock import history
from pgleaderlock._http.answers import Answer, Refusal
from pgleaderlock._http.bodies import Waits
from pgleaderlock._http.hosts import HostCheck
from pgleaderlock._http.openapi import Operation
from pgleaderlock._http.serving import HttpServer, ServingLimits, Tls, address_of, check_exposure, listen
from pgleaderlock._http.tokens import Tokens
from pgleaderlock._logging import get_logger
from pgleaderlock.dashboard._reading import Ledger
from pgleaderlock.dashboard.api import Api
from pgleaderlock.dashboard.app import DashboardApp, Rules
from pgleaderlock.dashboard.description import OPERATIONS, openapi_bytes
from pgleaderlock.dashboard.feed import Feed
from pgleaderlock.errors import ConnectionError, PgLeaderLockError, SchemaError
from pgleaderlock.server.run import Inside, ServerError
from pgleaderlock.server.wire import StatusReply, encode

__all__ = ["DashboardServer", "DashboardSettings", "LedgerSettings", "Mounted"]

_MOMENT_S = 0.1
_ANSWER_S = 10.0
_READY_REMEMBERED_S = 1.0
_OTHER_CONNECTIONS = 16
"""Kept free of streams, so that pages can still be asked for."""


@dataclass(frozen=True)
class LedgerSettings:
    """Where leaders are looked for."""

    dsn: str
    namespace: str
    channel: str
    required: bool = True
    """Whether a database without a ledger, or one that is not readable, is an error."""


class Mounted:
    """The dashboard of a lock server: `open`, `wrap`, and then as an application; `stop`, `answered`, `close`."""

    def __init__(self, ledger: LedgerSettings | None) -> None:
        self._settings = ledger
        self._ledger: Ledger | None = None
        self._feed: Feed | None = None
        self._log = get_logger("pgleaderlock.dashboard")

    async def open(self) -> Sequence[Operation]:
        """Looks for the ledger; gives what is served beside the locks."""
        if self._settings is None:
            return ()
        ledger = Ledger(self._settings.dsn)
        try:
            await history.ledger_facts(ledger)
        except ConnectionError as error:  # away for now: the pages say so
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
        api = None
        if self._ledger is not None and self._settings is not None:
            settings = self._settings
            # Half of the connections are for locks: open pages must not keep a lease from being renewed.
            streams_max = max(1, inside.connections_max // 2)
            self._feed = Feed(settings.dsn, settings.namespace, settings.channel, streams_max=streams_max)
            api = Api(self._ledger, settings.namespace)
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
        """Raises `ConfigurationError` for what would be unsafe."""
        check_exposure(self.host, self.token_file, self.tls)


class DashboardServer:
    """A dashboard alone. `start`, then `stop`, each once."""

    def __init__(self, settings: DashboardSettings, hopeless: Callable[[ConnectionError], bool]) -> None:
        """`hopeless` says whether a database that cannot be reached at the start is worth waiting for."""
        settings.check()
        self._settings = settings
        self._hopeless = hopeless
        self._log = get_logger("pgleaderlock.dashboard")
        self._hosts = HostCheck([settings.host, *settings.allowed_hosts])
        self._tokens = Tokens(settings.token_file) if settings.token_file is not None else None
        self._ready: tuple[float, Refusal | None] = (float("-inf"), None)
        self._checking = asyncio.Lock()
        self.url = ""

    async def start(self) -> None:
        """Raises `SchemaError` without a ledger."""
        settings = self._settings
        listening = listen(settings.host, settings.port)
        self._ledger = Ledger(settings.ledger.dsn)
        try:
            self.url = address_of(listening, has_tokens=self._tokens is not None, tls=settings.tls)
            await self._look()
        except BaseException:
            listening.close()
            await self._ledger.close()
            raise
        ledger, limits = settings.ledger, settings.serving
        streams_max = max(1, limits.connections_max - _OTHER_CONNECTIONS)
        self._feed = Feed(ledger.dsn, ledger.namespace, ledger.channel, streams_max=streams_max)
        waits = Waits(limits.header_timeout_s)
        self._app = DashboardApp(
            Rules(self._hosts, self._tokens, waits, access_log=settings.access_log),
            api=Api(self._ledger, ledger.namespace),
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
        """Reads tokens and certificate anew. Raises `ConfigurationError`, and then both stay as they were."""
        await self._http.reload(self._tokens)

    async def ended(self) -> None:
        """Returns if serving ends by itself."""
        await self._http.ended()

    async def stop(self) -> None:
        """Accepts nothing more, answers what is in flight, ends the streams."""
        await self._http.stop(self._answered)
        self._sweeping.cancel()
        await asyncio.wait([self._sweeping])
        await self._feed.close()
        await self._ledger.close()

    async def _answered(self) -> None:
        self._app.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                await self._app.in_flight.answered()
                return
        self._log.warning("requests_unanswered", after_s=_ANSWER_S)

    # --- What probes and tools ask

    async def _health(self) -> Answer:
        return Answer(200, encode(StatusReply("ok")))

    async def _readiness(self) -> Answer:
        # Everybody may ask, so the database is asked once a second at most.
        async with self._checking:
            checked_at, refusal = self._ready
            if time.monotonic() - checked_at > _READY_REMEMBERED_S:
                refusal = None
                try:
                    await history.ledger_facts(self._ledger)
                except PgLeaderLockError:
                    text = "the ledger cannot be read: the server's log says why"
                    refusal = Refusal(503, text, (b"retry-after", b"1"))
                self._ready = (time.monotonic(), refusal)
        if refusal is not None:
            raise Refusal(refusal.status, refusal.error, *refusal.headers)
        return Answer(200, encode(StatusReply("ready")))

    async def _describe(self) -> Answer:
        return Answer(200, openapi_bytes())
