"""Try once. A process that does not lead exits, and is started again by Kubernetes, systemd or cron.

Exit codes, the same as those of `pgleaderlock exec`: 0 ended by SIGTERM, 2 database, 75 somebody else leads, 76
leadership was lost. Needs PG_DSN.
"""

import asyncio
import os
import signal
import sys

import psycopg

from pgleaderlock import LockNotAcquired, acquire_leadership
from pgleaderlock.errors import DatabaseError

DATABASE, NOT_WON, LOST = 2, 75, 76


async def send_invoices() -> None:
    print("leading: sending invoices")
    await asyncio.Event().wait()  # your work: here it never ends


# -- shown in docs/guard.md
async def lead() -> int:
    async with await psycopg.AsyncConnection.connect(os.environ["PG_DSN"], autocommit=True) as conn:
        try:
            guard = await acquire_leadership(conn, "billing")
        except LockNotAcquired as no:
            print("not leading:", no)
            return NOT_WON
        try:
            async with guard, asyncio.TaskGroup() as tasks:
                work = tasks.create_task(send_invoices())
                await guard.lost()  # returns when the lock is lost
                work.cancel()  # the group waits for its end
        except DatabaseError as lost:  # leaving the block of a guard that has lost says so
            print("lost:", lost)
            return LOST
    return 0


# -- until here


async def main() -> int:
    leading = asyncio.create_task(lead())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, leading.cancel)
    try:
        return await leading
    except asyncio.CancelledError:
        print("stopped: released")
        return 0
    except (psycopg.OperationalError, DatabaseError) as error:
        print("database:", error)
        return DATABASE


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
