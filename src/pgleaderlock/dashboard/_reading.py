"""The dashboard's connections to the ledger's database: few, read-only, and given up as soon as they do not answer.

Nobody here waits for a database that is away: what cannot be asked is refused at once for a moment, and then tried
again.

Imports psycopg, `_connect`, `_conninfo`, `_sql` and `errors`. Must never write (the server is told so), and never put a
secret of the DSN into an error.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Mapping
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from pgleaderlock._connect import connect, sever
from pgleaderlock._conninfo import Dsn, check_dsn, resolve, scrub
from pgleaderlock._logging import get_logger
from pgleaderlock._sql import statement
from pgleaderlock.errors import ConnectionError

__all__ = ["Crowded", "Ledger", "Unspeakable"]

ANSWER_TIMEOUT_S = 5.0
SEVER_TIMEOUT_S = 1.0
CONNECT_TIMEOUT_S = 5
REFUSED_FOR_S = 0.5
"""After a failed connect nobody else tries for so long."""
IDLE_S = 30.0
LOG_INTERVAL_S = 5.0

_OPTIONS = f"-c default_transaction_read_only=on -c jit=off -c statement_timeout={ANSWER_TIMEOUT_S * 1000:.0f}"


class Crowded(ConnectionError):
    """Too many ask at the same time."""


class Unspeakable(ConnectionError):
    """The database cannot express what was asked for, such as a letter that its encoding does not have."""


class Ledger:
    """Runs named statements (`history.Asks`) on a few connections that are opened when they are needed."""

    def __init__(self, dsn: Dsn, *, connections_max: int = 4, waiting_max: int = 64) -> None:
        check_dsn(dsn)
        self._dsn = dsn
        self._turns = asyncio.Semaphore(connections_max)
        self._waiting_max = waiting_max
        self._waiting = 0
        self._idle: list[tuple[float, psycopg.AsyncConnection[dict[str, Any]]]] = []
        self._params: Mapping[str, str] = {}
        self._away: tuple[float, str] = (float("-inf"), "")
        self._logged_at = float("-inf")
        self._closed = False
        self._log = get_logger("pgleaderlock.dashboard")

    async def rows(self, name: str, **params: object) -> list[dict[str, Any]]:
        """The answer, or a `ConnectionError`."""
        if self._waiting >= self._waiting_max:
            raise Crowded(f"{self._waiting} questions wait for the database already")
        self._waiting += 1
        try:
            async with self._turns:
                return await self._rows(name, params)
        except psycopg.DataError as error:
            raise Unspeakable(f"the database cannot express this: {scrub(str(error), self._params)}") from None
        except psycopg.Error as error:
            text = scrub(str(error), self._params)
            self._complain(text)
            raise ConnectionError(f"the database failed: {text}") from None
        finally:
            self._waiting -= 1

    async def close(self) -> None:
        self._closed = True
        while self._idle:
            await self._idle.pop()[1].close()

    async def _rows(self, name: str, params: Mapping[str, object]) -> list[dict[str, Any]]:
        connection = self._kept()
        if connection is not None:
            try:
                return await self._asked(connection, name, params)
            except psycopg.OperationalError:
                if not connection.closed:
                    raise
                # It had ended since it was used last: only a new one's word counts.
        return await self._asked(await self._connect(), name, params)

    async def _asked(
        self, connection: psycopg.AsyncConnection[dict[str, Any]], name: str, params: Mapping[str, object]
    ) -> list[dict[str, Any]]:
        asking = asyncio.ensure_future(_execute(connection, name, params))
        try:
            done, _ = await asyncio.wait([asking], timeout=ANSWER_TIMEOUT_S + SEVER_TIMEOUT_S)
        except asyncio.CancelledError:
            await self._cut(connection, asking)
            raise
        if not done:
            await self._cut(connection, asking)
            self._away = (time.monotonic(), "the database does not answer")
            raise psycopg.OperationalError(f"no answer within {ANSWER_TIMEOUT_S + SEVER_TIMEOUT_S:g} s")
        error = asking.exception()
        usable = error is None or (isinstance(error, psycopg.Error) and not connection.broken)
        if self._closed or not usable:
            await connection.close()
        else:
            self._idle.append((time.monotonic(), connection))
            asyncio.get_running_loop().call_later(IDLE_S + 1, self._close_old)
        return asking.result()

    async def _cut(
        self, connection: psycopg.AsyncConnection[dict[str, Any]], asking: "asyncio.Future[list[dict[str, Any]]]"
    ) -> None:
        sever(connection)
        await asyncio.wait([asking], timeout=SEVER_TIMEOUT_S)
        asking.cancel()
        with contextlib.suppress(psycopg.Error, asyncio.CancelledError):
            await asking
        await connection.close()

    def _kept(self) -> psycopg.AsyncConnection[dict[str, Any]] | None:
        while self._idle:
            _, connection = self._idle.pop()
            if not connection.closed:
                return connection
        return None

    def _close_old(self) -> None:
        old = [entry for entry in self._idle if entry[0] < time.monotonic() - IDLE_S]
        self._idle = [entry for entry in self._idle if entry not in old]
        for _, connection in old:
            connection.pgconn.finish()

    async def _connect(self) -> psycopg.AsyncConnection[dict[str, Any]]:
        since, text = self._away
        if time.monotonic() - since < REFUSED_FOR_S:
            raise psycopg.OperationalError(text)
        self._params = _params(await resolve(self._dsn))
        try:
            return await connect(self._params)
        except psycopg.Error as error:
            self._away = (time.monotonic(), str(error))
            raise

    def _complain(self, text: str) -> None:
        # A database that is away fails every question: one line every few seconds says as much.
        if time.monotonic() - self._logged_at >= LOG_INTERVAL_S:
            self._logged_at = time.monotonic()
            self._log.warning("ledger_failed", error=text)


async def _execute(
    connection: psycopg.AsyncConnection[dict[str, Any]], name: str, params: Mapping[str, object]
) -> list[dict[str, Any]]:
    cursor = await connection.execute(statement(name), params)
    return await cursor.fetchall()


def _params(dsn: str) -> dict[str, str]:
    check_dsn(dsn)
    given = {key: str(value) for key, value in conninfo_to_dict(dsn.strip()).items() if value is not None}
    ours = {
        "application_name": os.environ.get("PGAPPNAME") or "pgleaderlock dashboard",
        "connect_timeout": os.environ.get("PGCONNECT_TIMEOUT") or str(CONNECT_TIMEOUT_S),
        "client_encoding": "UTF8",
        "keepalives_idle": "5",
        "keepalives_interval": "2",
        "keepalives_count": "3",
    }
    if "," in given.get("host", "") + given.get("hostaddr", ""):
        ours["target_session_attrs"] = "primary"
    options = given.pop("options", None) or os.environ.get("PGOPTIONS", "")
    return {**ours, **given, "options": f"{options} {_OPTIONS}".strip()}
