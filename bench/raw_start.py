"""The raw limit for "start → leader": connect and try once, with psycopg and nothing else.

The same driver, cursor class, connection settings and event loop as ours; the shortest statement that takes the lock.
"""

import psycopg

from pgleaderlock._pg.conninfo import ConnectionSettings, connect_params

__all__ = ["connect_and_try"]

SETTINGS = ConnectionSettings(application_name="raw", statement_timeout_s=5.0, lease_s=15.0)


async def connect_and_try(dsn: str, key1: int, key2: int) -> psycopg.AsyncConnection[tuple[bool]]:
    connection = await psycopg.AsyncConnection.connect(
        "",
        autocommit=True,
        prepare_threshold=None,
        cursor_factory=psycopg.AsyncClientCursor,
        **connect_params(dsn, SETTINGS),  # type: ignore[arg-type]
    )
    cursor = await connection.execute("SELECT pg_try_advisory_lock(%s, %s)", (key1, key2))
    row = await cursor.fetchone()
    assert row == (True,)
    return connection
