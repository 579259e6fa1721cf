"""A process that uses a store, to be killed. Says in lines of JSON what it was told.

Run as a script: `store_user.py hammer|hold|fork|try PATH|DSN [SEED]`. Each line carries the boot-time clock, which is
the same for all processes of one run of the machine. Imports the store and the standard library.
"""

import asyncio
import json
import os
import random
import signal
import sys
from typing import Any

from pgleaderlock._base.clock import BOOT_CLOCK
from pgleaderlock.server.postgres.store import PostgresStore
from pgleaderlock.server.sqlite.store import SqliteStore
from pgleaderlock.server.store import Acquire, Granted, Release, Store, StoreError

LOCKS = 8
CLIENTS = 16
TTL_MS = 100


def say(what: str, **fields: Any) -> None:
    # One write a line: what was said before a kill has arrived, and no line is cut in two.
    os.write(1, (json.dumps({"what": what, **fields}) + "\n").encode())


async def client(store: Store, number: int, seed: int) -> None:
    chance = random.Random(seed * 1000 + number)
    while True:
        name = f"lock-{chance.randrange(LOCKS)}"
        asked_s = BOOT_CLOCK.now()
        if chance.random() < 0.3:
            outcome: Any = (await store.submit([Acquire(name, f"owner-{number}", TTL_MS)], 50))[0]
        else:
            (outcome,) = await store.submit([Acquire(name, f"owner-{number}", TTL_MS)])
        if not isinstance(outcome, Granted):
            continue
        say(
            "granted", lock=name, token=outcome.fencing_token, lease=outcome.lease_id, ttl_s=TTL_MS / 1000,
            from_s=asked_s + outcome.waited_ms / 1000, told_s=BOOT_CLOCK.now(),
        )  # fmt: skip
        if chance.random() < 0.7:
            say("releasing", lock=name, token=outcome.fencing_token)
            await store.submit([Release(name, outcome.owner_id, outcome.lease_id, outcome.fencing_token)])


async def main(mode: str, path: str, seed: int) -> None:
    store: Store = SqliteStore(path) if path.startswith("/") else PostgresStore(path)
    try:
        await store.open()
    except StoreError as error:
        say("refused", why=str(error))
        return
    say("open")
    if mode == "try":
        await store.close()
        return
    if mode == "hammer":
        await asyncio.gather(*(client(store, number, seed) for number in range(CLIENTS)))
    elif mode == "fork":
        if os.fork() == 0:
            signal.alarm(60)  # outlives its parent, but not the test's failure
            for use in (store.get("job"), store.submit([]), store.close()):
                try:
                    await use
                    say("child used it")
                except StoreError as error:
                    say("child was refused", why=str(error))
            say("child", pid=os.getpid())
        signal.pause()
    else:
        await store.submit([Acquire("job", "holder", 600_000)])
        say("held")
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 0))
