"""A connection from the caller's `connect_fn`: three statements, and nothing else is known about it.

No lease, no watch, no pooler check, no eviction: the caller owns its set-up, autocommit included. Used are only
`await execute(sql, params)`, the cursor's `await fetchone()`, `await close()` and `closed`, so that twenty lines
of a fake can serve in a test.

Imports `_session` for the types, `_sql`, `errors`, `keys` and the standard library.
"""

import asyncio
import contextlib
import inspect
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import psycopg

from pgleaderlock._conninfo import CONNECT_TIMEOUT_S
from pgleaderlock._session import SessionIdentity
from pgleaderlock._sql import statement
from pgleaderlock.errors import ConfigurationError, ConnectionError, LockError
from pgleaderlock.keys import KeyPair

__all__ = ["BorrowedSession"]

LATE_CLOSE_TIMEOUT_S = 1.0
CLOSE_S_MAX = 3.0


class BorrowedSession:
    """The caller's connection, as a session."""

    identity: SessionIdentity | None = None
    identified = True

    def __init__(self, connection: Any, timeout_s: float) -> None:
        self._connection = connection
        self._timeout_s = timeout_s
        self._owner_pid = os.getpid()

    @classmethod
    async def open(cls, connect_fn: Callable[[], Awaitable[Any]], timeout_s: float) -> "BorrowedSession":
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
            connection = opening.result()
        except ConnectionError:
            raise
        except Exception as error:
            # The text is not ours: a parser's error may quote the DSN, those of the network and the server do not.
            told = isinstance(error, OSError | psycopg.OperationalError)
            raise ConnectionError(f"connect_fn failed: {error if told else type(error).__name__}") from error
        if getattr(connection, "closed", True):
            raise ConnectionError("connect_fn returned a closed connection: it must return an open one, in autocommit")
        return cls(connection, timeout_s)

    async def take(self, keys: KeyPair) -> bool:
        return bool(await self._run("borrowed_take", keys))

    async def wait(self, keys: KeyPair, wait_s: float) -> bool:
        raise ConfigurationError("a connection from connect_fn cannot wait at the server")

    async def probe(self, keys: KeyPair) -> None:
        await self._run("borrowed_probe", None)

    async def unlock(self, keys: KeyPair) -> None:
        if not await self._run("borrowed_unlock", keys):
            raise LockError(f"the server says that lock {keys[0]}/{keys[1]} was not held by this session")

    async def end_zombie(self, zombie: SessionIdentity) -> bool:
        return False

    async def lost(self) -> ConnectionError:
        never: asyncio.Future[ConnectionError] = asyncio.get_running_loop().create_future()
        return await never  # nothing watches the socket: only a probe can tell

    async def close(self) -> None:
        if os.getpid() != self._owner_pid:
            return  # to close it in a forked child would end the parent's session
        with contextlib.suppress(Exception):
            async with asyncio.timeout(min(self._timeout_s, CLOSE_S_MAX)):
                await self._connection.close()

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
        except BaseException:
            await self.close()  # cancelled in mid-statement: the answer is unknown
            raise
        if not row:
            raise ConnectionError("the connection returned no row: it does not behave like a psycopg connection")
        return row[0] if not isinstance(row, Mapping) else next(iter(row.values()))


async def _awaited(connect_fn: Callable[[], Awaitable[Any]]) -> Any:
    opened: Any = connect_fn()
    if inspect.isawaitable(opened):
        return await opened
    if hasattr(opened, "close"):
        closing = opened.close()
        if inspect.isawaitable(closing):
            await closing
    raise ConnectionError("connect_fn must be an async function that returns an open connection")


def _forsake(opening: "asyncio.Future[Any]") -> None:
    """Cancel a connect_fn that is no longer wanted; what it opens all the same is closed when it comes."""

    def close_late(future: "asyncio.Future[Any]") -> None:
        if future.cancelled() or future.exception() is not None:
            return
        _late.add(task := asyncio.ensure_future(BorrowedSession(future.result(), LATE_CLOSE_TIMEOUT_S).close()))
        task.add_done_callback(_late.discard)

    opening.add_done_callback(close_late)
    opening.cancel()


_late: set["asyncio.Future[None]"] = set()
