"""What standbys cost the server: connections, CPU, and the age of the oldest snapshot. The figures of ADR 13."""

import asyncio
import contextlib
import resource
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path

import psycopg

from bench.harness import Figure
from pgleaderlock import LeaderLock, LockState
from pgleaderlock.embedded import EmbeddedPostgres

__all__ = ["standbys"]

COUNTS = (1, 10, 100, 500)
MEASURE_S = 6.0
STARTS_AT_ONCE = 20
LOOK_S = 0.25
OLDEST = """
SELECT coalesce(max(extract(epoch FROM clock_timestamp() - xact_start)), 0)::float8
FROM pg_stat_activity WHERE backend_xmin IS NOT NULL AND pid <> pg_backend_pid()
"""


async def standbys(_: str) -> Figure:
    """Standbys that wait at the server, against those that try once a second, on a separate server."""
    with _many_descriptors(), _server() as server:
        waiting = [await _cost(server, count, None) for count in COUNTS]
        trying = [await _cost(server, count, 0.0) for count in COUNTS]
    oldest_s = max(age_s for _, age_s in waiting)
    table = ", ".join(
        f"{count}: {waits:.1f} % / {tries:.1f} %"
        for count, (waits, _), (tries, _) in zip(COUNTS, waiting, trying, strict=True)
    )
    return Figure(
        "standbys that wait at the server: oldest snapshot",
        f"server CPU in % of a core, waiting / trying once a second: {table}",
        "one connection per standby either way",
        oldest_s,
        1.0,
        "s",
    )


@contextlib.contextmanager
def _many_descriptors() -> Iterator[None]:
    """Raise the limit of open files: each lock needs three descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def _server() -> Iterator[EmbeddedPostgres]:
    with tempfile.TemporaryDirectory(prefix="pgl-standbys-", dir="/tmp") as folder:
        Path(folder).chmod(0o711)  # the server's account needs access to what is inside
        settings = {"max_connections": str(max(COUNTS) + 20)}
        with EmbeddedPostgres(Path(folder) / "pg", port=0, settings=settings) as server:
            yield server


async def _cost(server: EmbeddedPostgres, count: int, standby_wait_s: float | None) -> tuple[float, float]:
    """The server's CPU in percent of a core, and the age of the oldest snapshot seen, while so many standbys wait."""
    name = f"bench-standbys-{count}-{standby_wait_s}"
    starts = asyncio.Semaphore(STARTS_AT_ONCE)
    async with contextlib.AsyncExitStack() as running:
        leader = await running.enter_async_context(LeaderLock.for_name(server.dsn, name))
        await leader.wait_for_leadership()
        locks = [LeaderLock.for_name(server.dsn, name, standby_wait_s=standby_wait_s) for _ in range(count)]
        running.push_async_callback(_all, [lock.shutdown for lock in locks])
        await asyncio.gather(*(_stands_by(lock, starts) for lock in locks))
        look = await running.enter_async_context(await psycopg.AsyncConnection.connect(server.dsn, autocommit=True))
        began_at, began_cpu_s, oldest_s = time.monotonic(), _cpu_s(server), 0.0
        while time.monotonic() < began_at + MEASURE_S:
            await look.execute("SELECT pg_current_xact_id()")  # so that the snapshots differ
            row = await (await look.execute(OLDEST)).fetchone()
            assert row is not None
            oldest_s = max(oldest_s, row[0])
            await asyncio.sleep(LOOK_S)
        return (_cpu_s(server) - began_cpu_s) / (time.monotonic() - began_at) * 100, oldest_s


async def _all(calls: Iterable[Callable[[], Awaitable[None]]]) -> None:
    await asyncio.gather(*(call() for call in calls))


async def _stands_by(lock: LeaderLock, starts: asyncio.Semaphore) -> None:
    connected = asyncio.Event()
    lock.on_state_change(lambda _, state: connected.set() if state is LockState.ACQUIRING else None)
    async with starts:
        await lock.start()
        await connected.wait()


def _cpu_s(server: EmbeddedPostgres) -> float:
    """The CPU time of the postmaster and of its children that still run."""
    parent = server.postmaster_pid
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    spent_ns = 0
    for pid in (str(parent), *children):
        with contextlib.suppress(OSError):
            spent_ns += int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])
    return spent_ns / 1e9
