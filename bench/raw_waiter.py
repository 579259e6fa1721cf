"""The raw limit for hot standby: one session that waits in pg_advisory_lock, in a separate process.

    python -m bench.raw_waiter DSN KEY1 KEY2

It prints when it holds the lock, by the machine's monotonic clock. For each line that it reads, it releases the lock
and waits again.
"""

import asyncio
import sys
import time

import psycopg

from bench.raw_start import SETTINGS
from pgleaderlock._pg.conninfo import connect_params


async def main(dsn: str, key1: int, key2: int) -> None:
    words: asyncio.StreamReader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(words), sys.stdin)
    connection = await psycopg.AsyncConnection.connect(
        "",
        autocommit=True,
        prepare_threshold=None,
        cursor_factory=psycopg.AsyncClientCursor,
        **connect_params(dsn, SETTINGS),  # type: ignore[arg-type]
    )
    await connection.execute("SET statement_timeout = 0")
    await connection.execute("SET lock_timeout = 0")
    while await words.readline():
        await connection.execute("SELECT pg_advisory_lock(%s, %s)", (key1, key2))
        print(time.monotonic(), flush=True)
        await connection.execute("SELECT pg_advisory_unlock(%s, %s)", (key1, key2))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
