"""Listens for notifications on a separate connection. A notification is a hint, never a fact.

A lost hint delays the node until its next tick; a forged one causes one tick too many. The connection is separate from
the session that holds the locks: while notifications flood in, the server never sees a frozen listener as idle, so the
lease of such a session would not end.
"""

import asyncio
import contextlib
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import psycopg
from psycopg import sql

from pgleaderlock._base.clock import Clock
from pgleaderlock._base.logging import StructuredLogger
from pgleaderlock._base.steps import run
from pgleaderlock._pg.connect import prove, resolved, sampled
from pgleaderlock._pg.conninfo import ConnectionSettings, Dsn, connect_params
from pgleaderlock._pg.explain import pooler_error
from pgleaderlock._pg.statements import statement
from pgleaderlock.errors import ConnectionError
from pgleaderlock.retry import ExponentialBackoff, reconnect_jitter_s

__all__ = ["listen", "listen_statement"]

BACK_OFF = ExponentialBackoff(base_s=0.5, max_s=5.0)


def listen_statement(channel: str) -> bytes:
    return statement("ledger_listen").decode().format(channel=sql.Identifier(channel).as_string(None)).encode()


async def listen(
    dsn: Dsn,
    settings: ConnectionSettings,
    channel: str,
    wake: Callable[[str], None],
    *,
    clock: Clock,
    rng: random.Random,
    log: StructuredLogger,
    opened: Callable[[psycopg.AsyncConnection[Any]], None] | None = None,
) -> None:
    """Call `wake` with the payload of every notification, until cancelled. The election works without it, too.

    opened: called with each connection, for an owner that must close it when this task can no longer run.
    """
    failures = 0
    while True:
        try:
            params = connect_params(await resolved(dsn), settings)
            connection = await psycopg.AsyncConnection.connect("", autocommit=True, **params)  # type: ignore[arg-type]
        except Exception as error:
            log.debug("listen_failed", error=type(error).__name__)
        else:
            try:
                if opened is not None:
                    opened(connection)
                if settings.allow_pooler:
                    await run(prove(connection, partial(sampled, connection)))
                elif (await run(sampled(connection))).pid != connection.pgconn.backend_pid:
                    raise pooler_error("the server session behind this connection is not ours alone")
                await connection.execute(listen_statement(channel))
                failures = 0
                wake("")  # notifications may have been missed while it was not listening
                async for notification in connection.notifies():
                    wake(notification.payload)
            except (psycopg.Error, ConnectionError) as error:
                log.debug("listen_lost", error=type(error).__name__)
            finally:
                with contextlib.suppress(Exception):
                    await asyncio.shield(connection.close())
        failures += 1
        delay_s = BACK_OFF.delay_s(failures)
        await clock.sleep(delay_s + reconnect_jitter_s(delay_s, rng))
