"""A session on a connection from the caller's `connect_fn`. It sends three statements and assumes nothing else.

It has no lease, no watch, no pooler check and no eviction: the caller sets the connection up, autocommit included. The
session uses only `await execute(sql, params)`, the cursor's `await fetchone()`, `await close()` and `closed`, so that a
test can use a fake of twenty lines. A connection from a context manager is returned to it, but never with a lock on it.
"""

import asyncio
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

import psycopg

from pgleaderlock._base.aio import being_cancelled
from pgleaderlock._base.logging import get_logger
from pgleaderlock._pg.conninfo import CONNECT_TIMEOUT_S
from pgleaderlock._pg.session import SessionIdentity
from pgleaderlock._pg.statements import statement
from pgleaderlock.errors import ConfigurationError, ConnectionError, LockError
from pgleaderlock.keys import KeyPair

__all__ = ["BorrowedSession"]

_log = get_logger("pgleaderlock")

LATE_CLOSE_TIMEOUT_S = 1.0
CLOSE_S_MAX = 3.0


class BorrowedSession:
    """The caller's connection, as a session."""

    identity: SessionIdentity | None = None
    identified = True

    def __init__(self, connection: Any, timeout_s: float, lender: Any = None) -> None:
        self._connection = connection
        self._timeout_s = timeout_s
        self._lender = lender
        self._given_back = False
        self._may_hold = False
        self._owner_pid = os.getpid()

    @classmethod
    async def open(cls, connect_fn: Callable[[], Any], timeout_s: float) -> "BorrowedSession":
        opening = asyncio.ensure_future(_awaited(connect_fn))
        try:
            done, _ = await asyncio.wait([opening], timeout=CONNECT_TIMEOUT_S)
        except BaseException:
            _forsake(opening)
            raise
        if not done:
            _forsake(opening)
            raise ConnectionError(f"connect_fn did not return within {CONNECT_TIMEOUT_S} s")
        try:
            connection, lender = opening.result()
        except ConnectionError:
            raise
        except (Exception, asyncio.CancelledError) as error:  # cancelled in its own task: the lock's task is not
            # The error of a parser may quote the DSN; errors of the network and the server do not.
            told = isinstance(error, OSError | psycopg.OperationalError)
            raise ConnectionError(f"connect_fn failed: {error if told else type(error).__name__}") from error
        session = cls(connection, timeout_s, lender)
        if wrong := _misfit(connection):
            await session.close()
            raise ConnectionError(wrong)
        return session

    async def take(self, keys: KeyPair) -> bool:
        self._may_hold = True  # until the answer says otherwise
        self._may_hold = bool(await self._run("borrowed_take", keys))
        return self._may_hold

    async def wait(self, keys: KeyPair, wait_s: float) -> bool:
        raise ConfigurationError("a connection from connect_fn cannot wait at the server")

    async def probe(self, keys: KeyPair) -> None:
        await self._run("borrowed_probe", None)

    async def unlock(self, keys: KeyPair) -> None:
        if not await self._run("borrowed_unlock", keys):
            raise LockError(f"the server says that lock {keys[0]}/{keys[1]} was not held by this session")
        self._may_hold = False

    async def end_zombie(self, zombie: SessionIdentity) -> bool:
        return False

    async def lost(self) -> ConnectionError:
        never: asyncio.Future[ConnectionError] = asyncio.get_running_loop().create_future()
        return await never  # the socket is not watched: only a probe notices

    async def close(self) -> None:
        if os.getpid() != self._owner_pid:
            return  # closing it in a forked child would end the parent's session
        try:
            async with asyncio.timeout(min(self._timeout_s, CLOSE_S_MAX)):
                await self._give_back()
        except Exception as error:
            _log.debug("close_failed", error=error)
        except asyncio.CancelledError:
            if being_cancelled():
                raise

    async def _give_back(self) -> None:
        """Return the connection to its context manager, only once: the pool may have lent it again by then. Close it
        first if its session may hold the lock."""
        if self._lender is None:
            await self._connection.close()
            return
        if self._given_back:
            return
        self._given_back = True
        try:
            if self._may_hold:
                await self._connection.close()
        finally:
            await self._lender.__aexit__(None, None, None)

    async def _run(self, name: str, params: KeyPair | None) -> Any:
        if os.getpid() != self._owner_pid:
            raise ConnectionError("the session belongs to the parent process: a forked child must start its own lock")
        try:
            async with asyncio.timeout(self._timeout_s):
                cursor = await self._connection.execute(statement(name).decode(), params)
                row = await cursor.fetchone()
        except TimeoutError:
            await self.close()
            raise ConnectionError(f"the server did not answer within {self._timeout_s:g} s") from None
        except Exception as error:
            await self.close()
            raise ConnectionError(f"the statement failed: {error}") from error
        except asyncio.CancelledError as error:
            await self.close()  # the statement was cancelled, here or in the caller's code: its outcome is unknown
            if being_cancelled():
                raise
            raise ConnectionError("the statement was cancelled by the connection itself") from error
        if not row:
            raise ConnectionError("the connection returned no row: it does not behave like a psycopg connection")
        return row[0] if not isinstance(row, Mapping) else next(iter(row.values()))


async def _awaited(connect_fn: Callable[[], Any]) -> tuple[Any, Any]:
    """The connection, and the context manager that lends it if `connect_fn` returns one."""
    opened: Any = connect_fn()
    if inspect.isawaitable(opened):
        return await opened, None
    if hasattr(opened, "__aenter__") and not hasattr(opened, "execute"):
        return await opened.__aenter__(), opened
    if hasattr(opened, "close"):
        closing = opened.close()
        if inspect.isawaitable(closing):
            await closing
    raise ConnectionError(
        "connect_fn must be an async function that returns an open connection, or return an async context manager"
    )


def _misfit(connection: Any) -> str | None:
    """Why no lock can be held on this connection."""
    if getattr(connection, "closed", True):
        return "connect_fn returned a closed connection: it must return an open one, in autocommit"
    if getattr(connection, "autocommit", True) is False:
        return (
            "connect_fn returned a connection without autocommit, which would hold the lock inside a transaction that "
            "stays open: connect with autocommit=True (of a pool: kwargs={'autocommit': True})"
        )
    return None


def _forsake(opening: "asyncio.Future[Any]") -> None:
    """Cancel a connect_fn that is no longer awaited, and close the connection if it opens one after all."""

    def close_late(future: "asyncio.Future[Any]") -> None:
        if future.cancelled() or future.exception() is not None:
            return
        _late.add(task := asyncio.ensure_future(_late_session(*future.result()).close()))
        task.add_done_callback(_late.discard)

    opening.add_done_callback(close_late)
    opening.cancel()


def _late_session(connection: Any, lender: Any) -> BorrowedSession:
    return BorrowedSession(connection, LATE_CLOSE_TIMEOUT_S, lender)


_late: set["asyncio.Future[None]"] = set()
