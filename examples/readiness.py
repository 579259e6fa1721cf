"""A readiness endpoint: /ready is 200 while this process leads and 503 otherwise; /healthz is 200 while it runs.

Exit codes: 0 ended by SIGTERM, 2 a DSN that cannot be used, 76 leadership was lost. A database that is away is waited
for. Needs PG_DSN; READY_HOST (127.0.0.1) and READY_PORT (8080; 0 takes any) say where it listens.
"""

import asyncio
import contextlib
import os
import signal
import sys

from pgleaderlock import (
    ConfigurationError,
    FixedInterval,
    LeadershipGuard,
    acquire_leadership_with_retry,
)
from pgleaderlock.errors import DatabaseError

DATABASE, LOST = 2, 76
REQUEST_S_MAX = 5.0


async def send_invoices() -> None:
    print("leading: sending invoices")
    await asyncio.Event().wait()  # your work: here it never ends


# -- shown in docs/guard.md
class Readiness:
    """Answers probes. Says ready only while the guard is held."""

    guard: LeadershipGuard | None = None

    def status(self, path: str) -> str:
        if path == "/healthz":
            return "200 OK"
        if path == "/ready":
            return "200 OK" if self.guard is not None and self.guard.held else "503 Service Unavailable"
        return "404 Not Found"

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hopeless = (asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError, OSError)
        with contextlib.closing(writer), contextlib.suppress(*hopeless):
            request = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), REQUEST_S_MAX)
            words = request.decode("latin-1").split(" ")
            status = self.status(words[1]) if len(words) > 2 else "400 Bad Request"
            writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
            await writer.drain()


async def lead(readiness: Readiness) -> int:
    guard = await acquire_leadership_with_retry(os.environ["PG_DSN"], "billing", FixedInterval(1.0))
    readiness.guard = guard
    try:
        async with guard, asyncio.TaskGroup() as tasks:
            work = tasks.create_task(send_invoices())
            await guard.lost()
            work.cancel()
    except DatabaseError as lost:
        print("lost:", lost)
        return LOST
    return 0


# -- until here


async def main() -> int:
    readiness = Readiness()
    host, port = os.environ.get("READY_HOST", "127.0.0.1"), int(os.environ.get("READY_PORT", "8080"))
    server = await asyncio.start_server(readiness.answer, host, port)
    print("listening on port", server.sockets[0].getsockname()[1])
    leading = asyncio.create_task(lead(readiness))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, leading.cancel)
    try:
        return await leading
    except asyncio.CancelledError:
        print("stopped: nothing is held")
        return 0
    except (ConfigurationError, DatabaseError) as error:
        print("database:", error)
        return DATABASE
    finally:
        server.close()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
