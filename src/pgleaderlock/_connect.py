"""One way to open a connection of our own and one to cut it, for the session, the migration, commands and pages.

Client-side cursors send each statement as one simple-query message, and nothing is ever prepared: a statement is never
half known to the server, and a pooler may give the next one to another backend.

Imports psycopg, `_conninfo`, `errors` and the standard library. Must never explain an error: whoever connects knows who
will read it.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Mapping
from typing import Any

import psycopg
from psycopg.rows import dict_row

from pgleaderlock._conninfo import CONNECT_TIMEOUT_S, Dsn, resolve
from pgleaderlock.errors import ConfigurationError, ConnectionError

__all__ = ["connect", "patience_s", "resolved", "retrieve", "sever"]

UNLIMITED_CONNECT_S = 130.0


async def connect(params: Mapping[str, str]) -> psycopg.AsyncConnection[dict[str, Any]]:
    return await psycopg.AsyncConnection.connect(
        "",
        autocommit=True,
        prepare_threshold=None,
        cursor_factory=psycopg.AsyncClientCursor,
        row_factory=dict_row,
        **params,  # type: ignore[arg-type]  # every value is text, which is one of the accepted types
    )


def sever(connection: psycopg.AsyncConnection[Any]) -> None:
    """End the stream in both directions without closing the descriptor, so that whoever waits on it wakes up.

    To cancel instead would make psycopg ask a silent server to cancel, and wait for that.
    """
    with contextlib.suppress(psycopg.Error, OSError), socket.socket(fileno=os.dup(connection.pgconn.socket)) as twin:
        twin.shutdown(socket.SHUT_RDWR)


def retrieve(future: "asyncio.Future[Any]") -> None:
    """As a callback: nobody is told on the standard error that nobody asked how it ended."""
    if not future.cancelled():
        future.exception()


async def resolved(dsn: Dsn) -> str:
    """The DSN as text; a callable that fails or hangs is named, but never quoted: its text may hold the secret."""
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            return await resolve(dsn)
    except ConfigurationError:
        raise
    except TimeoutError:
        raise ConnectionError(f"the DSN callable did not return within {CONNECT_TIMEOUT_S} s") from None
    except Exception as error:
        raise ConnectionError(f"the DSN callable failed with {type(error).__name__}") from None


def patience_s(params: Mapping[str, str]) -> float:
    """psycopg gives each host its connect_timeout; names may resolve to several addresses."""
    hosts = max(params.get(key, "").count(",") + 1 for key in ("host", "hostaddr"))
    try:
        each_s = float(params.get("connect_timeout", CONNECT_TIMEOUT_S))
    except ValueError:
        each_s = CONNECT_TIMEOUT_S
    if each_s <= 0:  # libpq's word for "no limit", which psycopg bounds at about two minutes
        each_s = UNLIMITED_CONNECT_S
    return max(2.0, each_s) * hosts + 1.0
