"""Our hot standby in a separate process, with the same input and output as `raw_waiter`.

python -m bench.our_waiter DSN KEY1 KEY2
"""

import asyncio
import sys
import time

from pgleaderlock import FixedInterval, LeaderLock


async def main(dsn: str, key1: int, key2: int) -> None:
    words: asyncio.StreamReader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(words), sys.stdin)
    while await words.readline():
        async with LeaderLock(dsn, key1, key2, standby_wait_s=60, retry_strategy=FixedInterval(0.1)) as lock:
            await lock.wait_for_leadership()
            print(time.monotonic(), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
