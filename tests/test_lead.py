"""`lead(work)`: the work runs only while this node leads, and the lock is not released before it has ended."""

import asyncio
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from fakes import FakeClock, FakeDatabase, Gate, Recorder, fake_lock, leading, limit, until
from pgleaderlock import ConfigurationError, FixedInterval, LeaderLock, LockError, LockState, RetryContext


@pytest.fixture
def database() -> FakeDatabase:
    return FakeDatabase()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


async def _for_ever() -> str:
    never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    return await never


class Work:
    """Runs until it is cancelled, and says what happened to it in the server's own log."""

    def __init__(self, database: FakeDatabase) -> None:
        self.log = database.log
        self.begun = asyncio.Event()
        self.cleanup = Gate()
        self.cleanup.open()
        self.runs = 0
        self.task: asyncio.Task[object] | None = None

    async def __call__(self) -> str:
        self.runs += 1
        self.task = asyncio.current_task()
        self.log.append("work begins")
        self.begun.set()
        try:
            return await _for_ever()
        finally:
            self.log.append("work cancelled")
            await self.cleanup.pass_through()
            self.log.append("work ended")
            self.begun.clear()

    async def running(self) -> None:
        async with limit():
            await self.begun.wait()


async def _lose(database: FakeDatabase, clock: FakeClock) -> None:
    database.script("probe", OSError("gone"))
    await clock.somebody_sleeps()
    clock.advance(5)


async def test_the_value_of_the_work_is_returned_and_leadership_is_kept(
    database: FakeDatabase, clock: FakeClock
) -> None:
    async def work() -> str:
        assert lock.is_leader
        return "done"

    async with fake_lock(database, clock) as lock:
        assert await lock.lead(work) == "done"
        assert lock.is_leader
        assert database.log == ["connect", "try"]


async def test_the_work_waits_until_this_node_leads(database: FakeDatabase, clock: FakeClock) -> None:
    database.script("try", (False,))
    work = Work(database)
    async with fake_lock(database, clock, retry_strategy=FixedInterval(1)) as lock:
        leading_task = asyncio.create_task(lock.lead(work))
        await clock.somebody_sleeps()
        assert work.runs == 0
        clock.advance(1)
        await work.running()
        assert lock.is_leader
    assert await leading_task is None


@pytest.mark.parametrize("request_", ["step_down", "shutdown"])
async def test_the_work_has_ended_before_the_lock_is_released(
    database: FakeDatabase, clock: FakeClock, request_: str
) -> None:
    work = Work(database)
    async with leading(database, clock) as lock:
        leading_task = asyncio.create_task(lock.lead(work))
        await work.running()
        async with limit():
            await getattr(lock, request_)()
    await leading_task
    assert database.log == [
        "connect",
        "try",
        "work begins",
        "work cancelled",
        "work ended",
        "unlock",
        "close",
    ]


async def test_the_work_is_cancelled_in_the_turn_in_which_leadership_is_lost(
    database: FakeDatabase, clock: FakeClock
) -> None:
    work = Work(database)
    async with leading(database, clock) as lock:
        leading_task = asyncio.create_task(lock.lead(work))
        await work.running()
        cancelled: list[bool] = []
        lock.on_state_change(lambda *_: cancelled.append(work.task is not None and work.task.cancelling() > 0))
        await _lose(database, clock)
        await until(lambda: "work ended" in database.log)
        assert not lock.is_leader
        assert cancelled[0] is True  # before anybody else had heard of the loss
    assert await leading_task is None


async def test_the_work_is_cancelled_when_the_session_is_lost_even_if_grace_may_recover_it(
    database: FakeDatabase, clock: FakeClock
) -> None:
    work = Work(database)
    async with leading(database, clock, reconnect_grace_s=30) as lock:
        leading_task = asyncio.create_task(lock.lead(work))
        await work.running()
        await _lose(database, clock)
        await until(lambda: "work ended" in database.log)
        assert lock.state is LockState.RECONNECTING
        await clock.somebody_sleeps()
        clock.advance(1)
        await work.running()
        assert lock.is_leader
        assert work.runs == 2
    assert await leading_task is None


async def test_the_work_is_started_again_in_the_next_term(database: FakeDatabase, clock: FakeClock) -> None:
    work = Work(database)
    async with leading(database, clock, retry_strategy=FixedInterval(1)) as lock:
        leading_task = asyncio.create_task(lock.lead(work))
        for run in (1, 2, 3):
            await work.running()
            assert work.runs == run
            await lock.step_down()
            await clock.somebody_sleeps()
            clock.advance(1)
        await work.running()
    assert await leading_task is None
    assert work.runs == 4


async def test_what_the_work_raises_steps_down_and_is_raised(database: FakeDatabase, clock: FakeClock) -> None:
    error = RuntimeError("the work is broken")

    async def work() -> None:
        raise error

    async with leading(database, clock) as lock:
        recorder = Recorder(lock)
        with pytest.raises(RuntimeError) as caught:
            await lock.lead(work)
        assert caught.value is error
        assert database.holder() is None
        assert lock.state is LockState.FOLLOWER
        await recorder.seen("on_released")


async def test_work_that_fails_while_it_is_being_cancelled_is_not_swallowed(
    database: FakeDatabase, clock: FakeClock
) -> None:
    async def work() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            raise RuntimeError("could not clean up")

    async with leading(database, clock) as lock:
        leading_task = asyncio.create_task(lock.lead(work))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await lock.step_down()
        with pytest.raises(RuntimeError, match="could not clean up"):
            await leading_task


async def test_work_that_cancels_itself_steps_down(database: FakeDatabase, clock: FakeClock) -> None:
    async def work() -> None:
        raise asyncio.CancelledError

    async with leading(database, clock) as lock:
        with pytest.raises(asyncio.CancelledError):
            await lock.lead(work)
        assert database.holder() is None


async def test_when_the_caller_is_cancelled_the_work_ends_and_the_lock_goes_on(
    database: FakeDatabase, clock: FakeClock
) -> None:
    work = Work(database)
    async with leading(database, clock) as lock:
        leading_task = asyncio.create_task(lock.lead(work))
        await work.running()
        leading_task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leading_task
        assert database.log[-2:] == ["work cancelled", "work ended"]
        assert lock.is_leader


async def test_work_that_needs_long_to_clean_up_keeps_the_lock_and_the_probes_go_on(
    database: FakeDatabase, clock: FakeClock
) -> None:
    work = Work(database)
    work.cleanup = Gate()
    async with leading(database, clock, health_interval_s=5) as lock:
        leading_task = asyncio.create_task(lock.lead(work))
        await work.running()
        releasing = asyncio.create_task(lock.step_down())
        await work.cleanup.reached()
        for probes in (1, 2, 3):
            await clock.somebody_sleeps()
            clock.advance(5)
            await database.seen("probe", probes)
            assert lock.state is LockState.RELEASING
            assert database.holder() is not None
            assert not lock.is_leader
        work.cleanup.open()
        async with limit():
            await releasing
        assert database.log[-3:] == ["work ended", "unlock", "close"]
    await leading_task


async def test_when_the_session_dies_during_the_cleanup_the_release_ends_with_an_error(
    database: FakeDatabase, clock: FakeClock
) -> None:
    work = Work(database)
    work.cleanup = Gate()
    async with leading(database, clock) as lock:
        recorder = Recorder(lock)
        leading_task = asyncio.create_task(lock.lead(work))
        await work.running()
        releasing = asyncio.create_task(lock.step_down())
        await work.cleanup.reached()
        await _lose(database, clock)
        await recorder.seen("on_error")
        async with limit():
            await releasing
        assert "unlock" not in database.log
        assert lock.state is LockState.FOLLOWER
        work.cleanup.open()
    await leading_task


async def test_a_new_term_does_not_start_the_work_while_the_old_run_is_still_cleaning_up(
    database: FakeDatabase, clock: FakeClock
) -> None:
    work = Work(database)
    work.cleanup = Gate()
    async with leading(database, clock) as lock:
        leading_task = asyncio.create_task(lock.lead(work))
        await work.running()
        await _lose(database, clock)
        await work.cleanup.reached()
        await until(lambda: lock.state is LockState.FOLLOWER)
        await clock.somebody_sleeps()
        clock.advance(1)
        assert await lock.wait_for_leadership()
        for _ in range(50):
            await asyncio.sleep(0)
        assert work.runs == 1
        work.cleanup.open()
        await until(lambda: work.runs == 2)
    assert await leading_task is None


async def test_stubborn_work_cannot_keep_the_lock_beyond_the_timeout(database: FakeDatabase, clock: FakeClock) -> None:
    work = Work(database)
    work.cleanup = Gate()
    async with leading(database, clock) as lock:
        leading_task = asyncio.create_task(lock.lead(work))
        await work.running()
        async with limit():
            await lock.step_down(timeout_s=0.01)
        assert database.holder() is None
        assert "unlock" not in database.log
        work.cleanup.open()
    await leading_task


async def test_two_works_on_one_lock_run_side_by_side_and_both_end_before_the_release(
    database: FakeDatabase, clock: FakeClock
) -> None:
    one, two = Work(database), Work(database)
    async with leading(database, clock) as lock:
        tasks = [asyncio.create_task(lock.lead(work)) for work in (one, two)]
        await one.running()
        await two.running()
        await lock.step_down()
        assert database.log.count("work ended") == 2
        assert database.log[-3:] == ["work ended", "unlock", "close"]
    assert await asyncio.gather(*tasks) == [None, None]


async def test_lead_on_a_lock_that_does_not_run_raises_and_the_work_never_begins(
    database: FakeDatabase, clock: FakeClock
) -> None:
    work = Work(database)
    lock = fake_lock(database, clock)
    with pytest.raises(LockError, match="not running"):
        await lock.lead(work)
    async with lock:
        pass
    with pytest.raises(LockError, match="not running"):
        await lock.lead(work)
    assert work.runs == 0


@pytest.mark.parametrize("wrong", [None, 5, "work"])
async def test_lead_takes_only_a_function(database: FakeDatabase, clock: FakeClock, wrong: Callable[[], Any]) -> None:
    async with leading(database, clock) as lock:
        with pytest.raises(ConfigurationError, match="lead takes an async function"):
            await lock.lead(wrong)
        assert lock.is_leader


async def test_lead_takes_a_function_and_not_what_it_returned(database: FakeDatabase, clock: FakeClock) -> None:
    async def work() -> None: ...

    called = work()
    async with leading(database, clock) as lock:
        with pytest.raises(ConfigurationError, match="uncalled"):
            await lock.lead(called)  # type: ignore[arg-type]
    called.close()


async def test_lead_returns_none_when_the_lock_is_stopped_before_it_leads(
    database: FakeDatabase, clock: FakeClock
) -> None:
    database.script("try", (False,))
    work = Work(database)
    lock = fake_lock(database, clock)
    await lock.start()
    leading_task = asyncio.create_task(lock.lead(work))
    await clock.somebody_sleeps()
    await lock.shutdown()
    async with limit():
        assert await leading_task is None
    assert work.runs == 0


async def test_lead_raises_when_the_strategy_gives_up(database: FakeDatabase, clock: FakeClock) -> None:
    class GiveUp:
        def next_delay_s(self, ctx: RetryContext) -> float | None:
            return None

    database.script("connect", OSError("no route"))
    lock = fake_lock(database, clock, retry_strategy=GiveUp())
    await lock.start()
    async with limit():
        with pytest.raises(LockError, match="no route"):
            await lock.lead(Work(database))
    await lock.shutdown()


async def test_lead_raises_when_leadership_is_lost_without_auto_reacquire(
    database: FakeDatabase, clock: FakeClock
) -> None:
    work = Work(database)
    lock = fake_lock(database, clock, auto_reacquire=False)
    await lock.start()
    leading_task = asyncio.create_task(lock.lead(work))
    await work.running()
    await _lose(database, clock)
    async with limit():
        with pytest.raises(LockError, match="gone"):
            await leading_task
    assert "work ended" in database.log
    await lock.shutdown()


@pytest.mark.parametrize("request_", ["step_down", "shutdown"])
async def test_a_request_from_inside_the_work_only_makes_the_request(
    database: FakeDatabase, clock: FakeClock, request_: str
) -> None:
    returned = asyncio.Event()

    async def work() -> str:
        await getattr(lock, request_)()
        returned.set()
        return await _for_ever()

    async with leading(database, clock) as lock:
        leading_task = asyncio.create_task(lock.lead(work))
        async with limit():
            await returned.wait()
        await until(lambda: lock.state in (LockState.FOLLOWER, LockState.STOPPED))
    assert await leading_task is None


# --- From the server's side


async def test_at_the_server_the_lock_is_held_until_the_work_has_ended(dsn: str) -> None:
    seen: list[bool] = []
    begun = asyncio.Event()
    lock = LeaderLock.for_name(dsn, "test_lead", retry_strategy=FixedInterval(3600))

    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as admin:

        async def held() -> bool:
            row = await (await admin.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")).fetchone()
            return row == (1,)

        async def work() -> str:
            begun.set()
            try:
                return await _for_ever()
            finally:
                seen.append(await held())

        async with lock, limit():
            leading_task = asyncio.create_task(lock.lead(work))
            await begun.wait()
            await lock.step_down()
            seen.append(await held())
        assert await leading_task is None
    assert seen == [True, False]


async def test_at_the_server_a_killed_session_cancels_the_work_and_it_runs_again(dsn: str) -> None:
    begun = asyncio.Queue[int]()
    ended = asyncio.Event()
    lock = LeaderLock.for_name(dsn, "test_lead_killed", health_interval_s=3600)

    async def work() -> str:
        begun.put_nowait(1)
        try:
            return await _for_ever()
        finally:
            ended.set()

    kill = "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted"
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as admin:
        async with lock, limit():
            leading_task = asyncio.create_task(lock.lead(work))
            await begun.get()
            await admin.execute(kill)
            await ended.wait()
            await begun.get()
            assert lock.is_leader
        assert await leading_task is None
