"""Listens for wake-ups on a connection of its own. What it hears is a hint and never a fact.

A lost notification costs one tick, a forged or flooding one a tick too many. It is a second connection because a
listener that is stopped under a flood of notifications would never look idle to the server, and its lease never fire.

Imports psycopg, `_conninfo`, `_pool_check`, `_sql`, `_clock`, `_logging`, `errors` and the standard library.
"""

import asyncio
import contextlib
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import class_row

from pgleaderlock._clock import Clock
from pgleaderlock._conninfo import ConnectionSettings, Dsn, connect_params, resolve
from pgleaderlock._logging import StructuredLogger
from pgleaderlock._pool_check import Backend, prove
from pgleaderlock._sql import statement
from pgleaderlock.errors import ConnectionError
from pgleaderlock.retry import reconnect_jitter_s

__all__ = ["listen"]

RETRY_S_MIN, RETRY_S_MAX = 0.5, 5.0


async def listen(
    dsn: Dsn,
    settings: ConnectionSettings,
    channel: str,
    wake: Callable[[str], None],
    *,
    clock: Clock,
    rng: random.Random,
    log: StructuredLogger,
) -> None:
    """Call `wake` with the payload of every notification, for ever. Without it the election works all the same."""
    delay_s = RETRY_S_MIN
    while True:
        try:
            params = connect_params(await resolve(dsn), settings)
            connection = await psycopg.AsyncConnection.connect("", autocommit=True, **params)  # type: ignore[arg-type]
        except Exception as error:
            log.debug("listen_failed", error=type(error).__name__)
        else:
            try:
                if settings.allow_pooler:
                    await prove(connection, partial(_sample, connection))
                text = statement("ledger_listen").decode().format(channel=sql.Identifier(channel).as_string(None))
                await connection.execute(text.encode())
                delay_s = RETRY_S_MIN
                wake("")  # whatever was said while nobody listened
                async for notification in connection.notifies():
                    wake(notification.payload)
            except (psycopg.Error, ConnectionError) as error:
                log.debug("listen_lost", error=type(error).__name__)
            finally:
                with contextlib.suppress(Exception):
                    await asyncio.shield(connection.close())
        await clock.sleep(delay_s + reconnect_jitter_s(delay_s, rng))
        delay_s = min(delay_s * 2, RETRY_S_MAX)


async def _sample(connection: psycopg.AsyncConnection[Any]) -> Backend:
    cursor = await connection.cursor(row_factory=class_row(Backend)).execute(statement("same_backend"), prepare=False)
    (backend,) = await cursor.fetchall()
    return backend
