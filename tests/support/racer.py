"""One of many processes that race for a name. Tries when told to, says how it went, lets go when told to."""

import asyncio
import sys

import psycopg

from pgleaderlock import LeadershipGuard, LockNotAcquired, acquire_leadership


def _say(word: str) -> None:
    print(word, flush=True)  # noqa: T201


async def main(dsn: str, name: str) -> None:
    words: asyncio.StreamReader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(words), sys.stdin)
    held: LeadershipGuard | None = None
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True, application_name="racer") as conn:
        _say("ready")
        while word := (await words.readline()).strip():
            if word == b"try":
                try:
                    held = await acquire_leadership(conn, name)
                    _say("won")
                except LockNotAcquired:
                    _say("not")
            elif held is not None:
                await held.release()
                held = None
                _say("released")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
