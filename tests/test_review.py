"""Defects that a review has found, each proven once and kept here."""

import asyncio
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from conftest import StartPooler
from fakes import FakeClock, FakeDatabase, fake_lock, until
from pgleaderlock import ConfigurationError, FixedInterval, LeaderLock, LockState, key_pair
from proxy import Proxy
from support.counts import count
from support.recorder import WAIT_S, Recorder
from support.server_side import holders

QUICK = FixedInterval(0.05)


async def test_behind_an_allowed_pooler_a_returning_node_does_not_end_the_backend_of_another(
    dsn: str, pgbouncer: StartPooler
) -> None:
    """The pooler gives A's server session to B, pid and start and all; A comes back and must not end it."""
    through = pgbouncer(dsn, "session", default_pool_size="3")
    name = f"review-{uuid.uuid4()}"
    back = asyncio.Event()
    async with Proxy.to(through) as proxy:
        ways = iter([proxy.dsn_for(through)])

        async def way_of_a() -> str:
            if (first := next(ways, None)) is not None:
                return first
            await back.wait()
            return through

        a = LeaderLock.for_name(way_of_a, name, allow_pooler=True, retry_strategy=QUICK, health_interval_s=0.3)
        b = LeaderLock.for_name(through, name, allow_pooler=True, retry_strategy=QUICK, health_interval_s=0.3)
        story_a, story_b = Recorder(a), Recorder(b)
        async with a:
            await story_a.heard("acquired")
            async with b:
                await story_b.heard("acquire_failed")
                proxy.reset()
                await story_b.heard("acquired")
                back.set()
                await story_a.heard("acquire_failed", 2)
                assert "lost" not in story_b.events
                assert b.is_leader
                assert len(holders(dsn, key_pair(name))) == 1


@pytest.mark.parametrize("round_robin", ["0", "1"])
async def test_in_a_shared_pool_that_was_allowed_no_two_lead_at_once(
    dsn: str, pgbouncer: StartPooler, round_robin: str
) -> None:
    """Refusing is fine and leading alone is fine; leading together is not."""
    through = pgbouncer(dsn, "transaction", default_pool_size="2", server_round_robin=round_robin)
    name = f"review-{uuid.uuid4()}"
    locks = [
        LeaderLock.for_name(through, name, allow_pooler=True, retry_strategy=FixedInterval(0.03), health_interval_s=0.2)
        for _ in range(4)
    ]
    stories = [Recorder(lock) for lock in locks]
    leading: list[int] = []
    for lock in locks:
        lock.on_state_change(lambda _old, _new: leading.append(sum(each.is_leader for each in locks)))
        await lock.start()
    for story in stories:
        await story.heard("error", count(3, 30))
    for lock in locks:
        await lock.shutdown(WAIT_S)
    assert max(leading) <= 1


def test_waiting_at_the_server_behind_a_pooler_is_refused_at_once() -> None:
    with pytest.raises(ConfigurationError, match="behind a pooler"):
        LeaderLock("host=h", 1, 2, allow_pooler=True, standby_wait_s=1)


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


async def test_the_clean_up_of_a_work_is_not_cancelled_a_second_time() -> None:
    lock = fake_lock(FakeDatabase(), FakeClock())
    cleaned: list[str] = []
    cleaning, go_on = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaning.set()
            await go_on.wait()
            cleaned.append("to the end")

    await lock.start()
    assert await lock.wait_for_leadership()
    leading = asyncio.ensure_future(lock.lead(work))
    await asyncio.sleep(0)
    await until(lambda: lock._run is not None and bool(lock._run.works._running))
    leading.cancel()
    await cleaning.wait()
    stopping = asyncio.ensure_future(lock.shutdown())
    await until(lambda: lock.state is LockState.RELEASING)
    go_on.set()
    async with asyncio.timeout(WAIT_S):
        await stopping
    assert cleaned == ["to the end"]


async def test_a_cancelled_lifecycle_says_that_it_does_not_lead_before_the_lock_is_free() -> None:
    database = FakeDatabase()
    lock = fake_lock(database, FakeClock())
    await lock.start()
    assert await lock.wait_for_leadership()
    run = lock._run
    assert run is not None
    assert run._session is not None
    seen: list[bool] = []
    close = run._session.close

    async def looking() -> None:
        seen.append(lock.is_leader)
        await close()

    run._session.close = looking  # type: ignore[method-assign]
    assert lock._task is not None
    lock._task.cancel()
    await asyncio.wait([lock._task])
    assert seen == [False]
