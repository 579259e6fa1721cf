"""Nothing is left behind, wherever a start, a wait or a shutdown is cancelled."""

import asyncio
import contextlib
import gc
import random
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from conftest import StartServer
from pgleaderlock import FixedInterval, LeaderLock, LockState, ShutdownError
from pgleaderlock._pg.conninfo import ConnectionSettings
from pgleaderlock._pg.session import DedicatedSession
from pgleaderlock.errors import ConnectionError as LostConnection
from support.counts import count
from support.server_side import frozen

SEED = 4711


def open_descriptors() -> set[str]:
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists the folder is gone by now
            found.add(f"{descriptor.name} {descriptor.readlink()}")
    return found


async def one_cycle(dsn: str, name: str, rng: random.Random) -> str:
    """Start a lock, do something with it, and break it off at a random moment in a random way."""
    lock = LeaderLock.for_name(
        dsn,
        name,
        retry_strategy=FixedInterval(0.005),
        reconnect_grace_s=rng.choice([None, 1.0]),
        standby_wait_s=rng.choice([0.0, 0.0, 5.0]),
    )

    async def use() -> None:
        async with lock:
            async with asyncio.timeout(5):
                await lock.wait_for_leadership()
                if rng.random() < 0.3:
                    await lock.step_down()
                await lock.lead(lambda: asyncio.sleep(rng.uniform(0, 0.005)))

    task = asyncio.ensure_future(use())
    await asyncio.sleep(rng.choice([0.0, rng.uniform(0, 0.004), rng.uniform(0, 0.03)]))
    way = rng.choice(["cancel", "cancel twice", "shutdown", "forced", "lifecycle", "let be"])
    match way:
        case "cancel":
            task.cancel()
        case "cancel twice":
            task.cancel()
            await asyncio.sleep(rng.uniform(0, 0.002))
            task.cancel()
        case "shutdown":
            await lock.shutdown()
        case "forced":
            with contextlib.suppress(ShutdownError):
                await lock.shutdown(rng.uniform(0, 0.002))
        case "lifecycle" if lock._task is not None:
            lock._task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()  # that lead was broken off is no surprise here
    if lock._task is not None:
        await asyncio.wait([lock._task])
    assert lock.state is LockState.STOPPED
    return way


@pytest.mark.timeout(600)
@pytest.mark.parametrize("rivals", [1, 3])
async def test_start_stop_cycles_broken_off_at_random_points_leave_nothing(dsn: str, rivals: int) -> None:
    """`dsn` fails the test if a session or an advisory lock is left in the server."""
    rng = random.Random(SEED + rivals)
    name = f"leaks-{uuid.uuid4()}"
    await one_cycle(dsn, name, rng)  # whatever is loaded once, is loaded now
    gc.collect()
    before, tasks_before = open_descriptors(), asyncio.all_tasks()
    ways = set()
    for _ in range(count(60, 1000) // rivals):
        ways |= set(await asyncio.gather(*(one_cycle(dsn, name, rng) for _ in range(rivals))))
    assert len(ways) == 6, "not every way of breaking off was tried"
    gc.collect()
    # The dispatcher of a lock ends within a turn or two of the loop.
    for _ in range(10):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == tasks_before
    assert open_descriptors() - before == set()


async def test_a_statement_that_timed_out_leaves_no_task_and_no_descriptor(throwaway_postgres: StartServer) -> None:
    server = throwaway_postgres()
    before, tasks_before = open_descriptors(), asyncio.all_tasks()
    session = await DedicatedSession.open(server.dsn, ConnectionSettings("leaks-timeout", 0.2, 7.5))
    with frozen(server):
        with pytest.raises(LostConnection, match="did not answer"):
            await session.probe((1, 2))
        await session.close()
        assert asyncio.all_tasks() == tasks_before
        assert open_descriptors() - before == set()


CANCELLED_TWICE = """
import asyncio, logging, sys
from pgleaderlock import LeaderLock
logging.getLogger("pgleaderlock").setLevel(logging.CRITICAL)
async def main():
    for number in range(60):
        lock = LeaderLock(sys.argv[1], 71, 72)
        await lock.start()
        await asyncio.sleep((number % 13) * 0.001)
        lock._task.cancel()
        await asyncio.sleep(0)
        lock._task.cancel()
        await asyncio.wait([lock._task])
    await asyncio.sleep(0.05)
asyncio.run(main())
"""


def test_a_lifecycle_that_is_cancelled_twice_does_not_crash_the_process(dsn: str) -> None:
    for _ in range(count(3, 30)):
        ended = subprocess.run(
            [sys.executable, "-c", CANCELLED_TWICE, dsn],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=Path("/"),
            check=False,
        )
        assert ended.returncode == 0, ended.stderr[-2000:]
