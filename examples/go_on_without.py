"""Serve in any case; do the leader's part only if it can be had.

For a service whose main work needs no leader. Whether the role is taken, lost, or the database is away: it is said,
and the service goes on. Exit code: 0, ended by SIGTERM. Needs PG_DSN.
"""

import asyncio
import os
import signal
import sys

import psycopg

from pgleaderlock import CoordinationError, acquire_leadership


async def serve() -> None:
    print("serving")
    await asyncio.Event().wait()  # your service, for ever


async def refresh_statistics() -> None:
    print("leading: refreshing statistics too")
    await asyncio.Event().wait()  # what only one of all may do


# -- shown in docs/guard.md
async def lead_if_possible() -> None:
    try:
        async with (
            await psycopg.AsyncConnection.connect(os.environ["PG_DSN"], autocommit=True) as conn,
            await acquire_leadership(conn, "statistics") as guard,
            asyncio.TaskGroup() as tasks,
        ):
            work = tasks.create_task(refresh_statistics())
            await guard.lost()
            work.cancel()
    except (CoordinationError, psycopg.OperationalError) as error:
        print("going on without:", error)


async def run() -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(serve())
        tasks.create_task(lead_if_possible())


# -- until here


async def main() -> int:
    running = asyncio.create_task(run())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    try:
        await running
    except asyncio.CancelledError:
        print("stopped")
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
