"""A lock server's store in a process of its own, to be killed: waits for a lock as often as it is told to.

Reads `wait LOCK OWNER` from its input, and says `granted OWNER` when that comes. Never releases anything.
"""

import asyncio
import sys

from pgleaderlock.server.postgres.store import PostgresStore
from pgleaderlock.server.store import Acquire, Granted


def _say(words: str) -> None:
    print(words, flush=True)  # noqa: T201


async def _wait(store: PostgresStore, lock_name: str, owner_id: str) -> None:
    (outcome,) = await store.submit([Acquire(lock_name, owner_id, 600_000)], 600_000)
    if isinstance(outcome, Granted):
        _say(f"granted {owner_id}")


async def main(dsn: str) -> None:
    words = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(words), sys.stdin)
    store = PostgresStore(dsn)
    await store.open()
    _say("ready")
    tasks = []
    while line := (await words.readline()).decode().split():
        tasks.append(asyncio.create_task(_wait(store, line[1], line[2])))
    await store.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
