"""Named statements outside the dedicated session: on one plain connection, or on a small shared pool.

A plain connection has no lease and none of a leader's settings, and may lead to a pooler or a standby. Every statement
has a deadline. A connection that does not answer in time, or whose caller is cancelled, is cut and closed.

Must never put a secret of the DSN into an error.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, Self

import psycopg
from psycopg.rows import dict_row

from pgleaderlock._base.logging import get_logger
from pgleaderlock._base.steps import Steps, run
from pgleaderlock._pg.connect import Backend, connect, prove, resolved, retrieve, sample_of, sever
from pgleaderlock._pg.conninfo import Dsn, check_dsn, plain_params, scrub
from pgleaderlock._pg.explain import unreachable
from pgleaderlock._pg.statements import statement
from pgleaderlock.errors import ConnectionError, UnsafeSessionError

__all__ = ["Crowded", "Inexpressible", "PlainConnection", "ReadPool", "Refused", "Unanswered", "execute"]

ANSWER_TIMEOUT_S = 10.0
SEVER_TIMEOUT_S = 1.0

POOL_CONNECT_TIMEOUT_S = 5
POOL_STATEMENT_TIMEOUT_S = 5.0
POOL_REFUSED_FOR_S = 0.5
"""After a failed connect, the pool does not connect again for this long."""
POOL_IDLE_S = 30.0
POOL_LOG_INTERVAL_S = 5.0
POOL_OPTIONS = (
    f"-c default_transaction_read_only=on -c jit=off -c statement_timeout={POOL_STATEMENT_TIMEOUT_S * 1000:.0f}"
)


class Unanswered(ConnectionError):
    """The server did not answer within the deadline."""


class Inexpressible(ConnectionError):
    """A parameter cannot be expressed in the database, such as a letter that its encoding does not have."""


class Refused(ConnectionError):
    """The statement has failed; `said` is what the server says, without secrets, and `sqlstate` why, in its code."""

    def __init__(self, name: str, error: psycopg.Error, said: str) -> None:
        super().__init__(f"the server refused {name!r}: {said}")
        self.sqlstate, self.said = error.sqlstate, said


class Crowded(ConnectionError):
    """Too many statements wait for a connection."""


async def execute(
    connection: psycopg.AsyncConnection[Any], name: str, params: Mapping[str, object]
) -> list[dict[str, Any]]:
    """The rows of one named statement; raises psycopg's errors.

    Parameters are bound on the client, so that the server can plan away a condition whose parameter is NULL.
    """
    async with psycopg.AsyncClientCursor(connection, row_factory=dict_row) as cursor:
        await cursor.execute(statement(name), params)
        return await cursor.fetchall()


class PlainConnection:
    """One plain connection, for a few named statements. Use as an async context manager."""

    def __init__(self, connection: psycopg.AsyncConnection[Any], params: Mapping[str, str]) -> None:
        self._connection = connection
        self.answer_timeout_s = ANSWER_TIMEOUT_S
        self.params = params
        """The connection parameters, secrets included: never show them."""

    @classmethod
    async def open(cls, dsn: str, application_name: str) -> Self:
        """Connect as the user's DSN says, or raise `Unreachable`."""
        check_dsn(dsn)
        return await cls.open_with(plain_params(dsn, application_name))

    @classmethod
    async def open_with(cls, params: Mapping[str, str]) -> Self:
        """Connect with exactly these parameters, or raise `Unreachable`."""
        try:
            return cls(await connect(params), params)
        except psycopg.Error as error:
            raise unreachable(error, params) from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._connection.close()

    def finish(self) -> None:
        """Close without waiting, for callbacks."""
        self._connection.pgconn.finish()

    @property
    def closed(self) -> bool:
        return self._connection.closed

    @property
    def protocol_pid(self) -> int:
        """The backend's pid from the protocol's start-up (behind a pooler, the pooler's own)."""
        return self._connection.pgconn.backend_pid

    @property
    def server_version(self) -> int:
        """A number such as 150004; a pooler passes on the server's."""
        return self._connection.pgconn.server_version

    @property
    def encrypted(self) -> bool:
        return bool(self._connection.pgconn.ssl_in_use)

    @property
    def address(self) -> str:
        """The numeric address of the server; empty for a Unix socket."""
        return self._connection.info.hostaddr

    async def rows(self, name: str, **params: object) -> list[dict[str, Any]]:
        """The rows of a named statement. Raises a `ConnectionError` that says why there is no answer."""
        asking = asyncio.ensure_future(execute(self._connection, name, params))
        asking.add_done_callback(retrieve)
        try:
            done, _ = await asyncio.wait([asking], timeout=self.answer_timeout_s)
        except asyncio.CancelledError:
            await self._cut(asking)
            raise
        if not done:
            await self._cut(asking)
            raise Unanswered(f"the server did not answer within {self.answer_timeout_s:g} s: is it frozen or cut off?")
        try:
            return asking.result()
        except psycopg.DataError as error:
            raise Inexpressible(f"the database cannot express this: {scrub(str(error), self.params)}") from None
        except psycopg.Error as error:
            raise Refused(name, error, scrub(str(error), self.params)) from None
        except BaseException:
            await self.close()  # the state of the connection is unknown
            raise

    @contextlib.asynccontextmanager
    async def rolled_back(self) -> AsyncIterator[None]:
        """A transaction that is rolled back: the statements in it leave nothing behind."""
        try:
            async with self._connection.transaction(force_rollback=True):
                yield
        except psycopg.Error as error:
            raise ConnectionError(f"the server ended the transaction: {scrub(str(error), self.params)}") from None

    async def row(self, name: str, **params: object) -> dict[str, Any]:
        """The same for a statement that has exactly one row."""
        (row,) = await self.rows(name, **params)
        return row

    async def backend_is_shared(self) -> bool | None:
        """Does a pooler share our server session with other clients? None if that cannot be found out."""

        def sample(mark: str | None = None) -> Steps[Backend]:
            name, params = sample_of(mark)
            return Backend(**(yield self.row(name, **params)))

        try:
            await run(prove(self._connection, sample))
        except UnsafeSessionError:
            return True
        except ConnectionError:
            return None
        return False

    async def _cut(self, asking: "asyncio.Future[list[dict[str, Any]]]") -> None:
        # Cancelling the call would make psycopg send a cancel request to a silent server, and wait for it.
        sever(self._connection)
        await asyncio.wait([asking], timeout=SEVER_TIMEOUT_S)
        asking.cancel()
        await self.close()


class ReadPool:
    """Runs named statements (`history.Asks`) on a few read-only connections, opened when they are needed.

    While the database is unreachable, callers do not wait: for a moment after a failed connect every statement is
    refused at once, then the next one connects again.
    """

    def __init__(self, dsn: Dsn, *, connections_max: int = 4, waiting_max: int = 64) -> None:
        check_dsn(dsn)
        self._dsn = dsn
        self._turns = asyncio.Semaphore(connections_max)
        self._waiting_max = waiting_max
        self._waiting = 0
        self._idle: list[tuple[float, PlainConnection]] = []
        self._failed_at = float("-inf")
        self._failure: ConnectionError | None = None
        self._logged_at = float("-inf")
        self._closed = False
        self._log = get_logger("pgleaderlock.dashboard")

    async def rows(self, name: str, **params: object) -> list[dict[str, Any]]:
        """The rows of a named statement, or a `ConnectionError`."""
        if self._waiting >= self._waiting_max:
            raise Crowded(f"{self._waiting} questions wait for the database already")
        self._waiting += 1
        try:
            async with self._turns:
                return await self._rows(name, params)
        except Inexpressible:
            raise
        except ConnectionError as error:
            self._complain(error)
            raise
        finally:
            self._waiting -= 1

    async def close(self) -> None:
        self._closed = True
        while self._idle:
            await self._idle.pop()[1].close()

    async def _rows(self, name: str, params: Mapping[str, object]) -> list[dict[str, Any]]:
        kept = self._kept()
        if kept is not None:
            try:
                return await self._asked(kept, name, params)
            except Unanswered:
                raise
            except ConnectionError:
                if not kept.closed:
                    raise
                # This connection had ended since its last use, so its error means nothing: use a new one.
        return await self._asked(await self._connect(), name, params)

    async def _asked(
        self, connection: PlainConnection, name: str, params: Mapping[str, object]
    ) -> list[dict[str, Any]]:
        try:
            return await connection.rows(name, **params)
        except Unanswered as error:
            self._failed_at, self._failure = time.monotonic(), error
            raise
        finally:
            if self._closed:
                await connection.close()
            elif not connection.closed:
                self._idle.append((time.monotonic(), connection))
                asyncio.get_running_loop().call_later(POOL_IDLE_S + 1, self._close_old)

    def _kept(self) -> PlainConnection | None:
        while self._idle:
            _, connection = self._idle.pop()
            if not connection.closed:
                return connection
        return None

    def _close_old(self) -> None:
        old = [entry for entry in self._idle if entry[0] < time.monotonic() - POOL_IDLE_S]
        self._idle = [entry for entry in self._idle if entry not in old]
        for _, connection in old:
            connection.finish()

    async def _connect(self) -> PlainConnection:
        if self._failure is not None and time.monotonic() - self._failed_at < POOL_REFUSED_FOR_S:
            raise self._failure.with_traceback(None)
        params = plain_params(
            await resolved(self._dsn),
            "pgleaderlock dashboard",
            connect_timeout_s=POOL_CONNECT_TIMEOUT_S,
            options=POOL_OPTIONS,
        )
        try:
            connection = await PlainConnection.open_with(params)
        except ConnectionError as error:
            self._failed_at, self._failure = time.monotonic(), error
            raise
        connection.answer_timeout_s = POOL_STATEMENT_TIMEOUT_S + SEVER_TIMEOUT_S
        return connection

    def _complain(self, error: ConnectionError) -> None:
        # While the database is unreachable, every statement fails: log one line every few seconds.
        if time.monotonic() - self._logged_at >= POOL_LOG_INTERVAL_S:
            self._logged_at = time.monotonic()
            self._log.warning("ledger_failed", error=str(error))
