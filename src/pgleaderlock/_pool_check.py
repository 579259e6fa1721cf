"""Whether a pooler between us and PostgreSQL shares its server sessions: where it does, a lock excludes nobody.

Imports psycopg, `_sql` and the standard library. Must never leave a transaction open, nor cut one off.
"""

import asyncio
import contextlib
from collections.abc import Mapping

import psycopg

from pgleaderlock._sql import statement

__all__ = ["backend_is_shared"]

POOL_CHECK_TIMEOUT_S = 1.0


async def backend_is_shared(params: Mapping[str, str], backend_pid: int) -> bool:
    """Does a second client of the pooler, inside a transaction, get the backend that is ours?

    A pool in session mode never does that. A pool that has no free session makes the second client wait, which
    shows as well that ours is not free; so no answer in time counts as "not shared". Every later probe looks again.
    """
    try:
        async with asyncio.timeout(POOL_CHECK_TIMEOUT_S):
            other = await psycopg.AsyncConnection.connect("", **params)  # type: ignore[arg-type]
    except (psycopg.Error, TimeoutError):
        return False
    try:
        async with asyncio.timeout(POOL_CHECK_TIMEOUT_S):
            # Not autocommit: psycopg opens a transaction first, which a pool in statement mode refuses.
            row = await (await other.execute(statement("same_backend"))).fetchone()
        return row is not None and row[0] == backend_pid
    except TimeoutError:
        return False
    except psycopg.Error as error:
        return "statement pooling" in str(error) or "transaction" in str(error)
    finally:
        # Rolled back, not cut: a pooler ends the server session of a client that vanishes inside a transaction, and
        # in a shared pool that session may be a leader's.
        try:
            with contextlib.suppress(psycopg.Error, TimeoutError):
                async with asyncio.timeout(POOL_CHECK_TIMEOUT_S):
                    await other.rollback()
        finally:
            await other.close()
