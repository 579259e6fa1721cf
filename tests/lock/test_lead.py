"""`lead(work)`: the work runs only while this node leads, and the lock is not released before it has ended."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from pgleaderlock import (
    ConfigurationError,
    FixedInterval,
    LeaderLock,
    LockError,
    LockState,
    RetryContext,
)
from support.counts import count
from support.fakes import (
    KEYS,
    FakeClock,
    FakeDatabase,
    Gate,
    Recorder,
    captured_log,
    fake_lock,
    leading,
    limit,
    until,
)
from support.recorder import WAIT_S


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


async def _as_time_passes(clock: FakeClock, condition: Callable[[], bool]) -> None:
    async with limit():
        while not condition():
            clock.advance(0.1)
            await asyncio.sleep(0)


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
        clock.advance(2)
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
        clock.advance(2)
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
            clock.advance(2)
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


@pytest.mark.parametrize("where", ["in the work", "before it leads", "before a restart", "before a late restart"])
async def test_when_the_caller_is_cancelled_the_lock_is_left_alone_until_lead_is_entered_again(
    database: FakeDatabase, clock: FakeClock, where: str
) -> None:
    work = Flaky(fails={"before a restart": 1, "before a late restart": 4}.get(where, 0))
    if where == "before it leads":
        database.script("try", (False,))
    async with fake_lock(database, clock, retry_strategy=FixedInterval(1)) as lock:
        leading_task = asyncio.create_task(lock.lead(work, on_failure="restart"))
        if where == "in the work":
            async with limit():
                await work.running.wait()
        elif where == "before it leads":
            await clock.somebody_sleeps()
        else:
            await _as_time_passes(clock, lambda: work.runs == work.fails and lock.work_error is work.error)
        leading_task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leading_task
        work.running.clear()
        await until(lambda: lock.state is LockState.FOLLOWER)
        tries = database.log.count("try")
        await _turns_of_time(clock)
        assert database.holder() is None
        assert database.log.count("try") == tries
        assert lock.work_error is None
        leading_task = asyncio.create_task(lock.lead(work))
        await _as_time_passes(clock, work.running.is_set)
        assert lock.is_leader
    assert await leading_task is None


async def test_while_another_caller_leads_a_cancelled_one_leaves_the_lock_as_it_is(
    database: FakeDatabase, clock: FakeClock
) -> None:
    one, two = Work(database), Work(database)
    async with leading(database, clock) as lock:
        tasks = [asyncio.create_task(lock.lead(work)) for work in (one, two)]
        await one.running()
        await two.running()
        tasks[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        await _turns_of_time(clock)
        assert lock.is_leader
        assert (one.runs, two.runs, "unlock" in database.log) == (1, 1, False)
    assert await tasks[1] is None


async def test_a_lead_belongs_to_the_run_in_which_it_was_entered(database: FakeDatabase, clock: FakeClock) -> None:
    """`on_stopped` starts the lock again before the waiting `lead` has had a turn."""
    work = Work(database)
    again = asyncio.Event()

    async def start_again() -> None:
        if not again.is_set():
            again.set()
            await lock.start()

    async with leading(database, clock) as lock:
        lock.on_stopped(start_again)
        leading_task = asyncio.create_task(lock.lead(work))
        await work.running()
        await lock.shutdown()
        async with limit():
            await again.wait()
            assert await leading_task is None
            assert await lock.wait_for_leadership()
        assert work.runs == 1


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
        clock.advance(2)
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


async def test_lead_goes_on_when_trust_comes_back() -> None:
    """The same through `lead`: called after a pause, it never starts its work although this node leads."""
    database, clock = FakeDatabase(), FakeClock()

    async def work() -> str:
        return "done"

    async with leading(database, clock) as lock:
        await clock.somebody_sleeps()
        clock.jump(11)
        task = asyncio.create_task(lock.lead(work))
        await asyncio.sleep(0)
        clock.advance(0)
        await until(lambda: lock.is_leader)
        for _ in range(100):
            await asyncio.sleep(0)
        started = task.done()
        task.cancel()
        assert started


async def test_lead_returns_none_after_a_step_down_that_was_asked_for_without_auto_reacquire() -> None:
    """It raises that the lock stopped by itself because the strategy gave up, which is not so."""
    database, clock = FakeDatabase(), FakeClock()
    lock = fake_lock(database, clock, auto_reacquire=False)

    async def work() -> str:
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never

    await lock.start()
    task = asyncio.create_task(lock.lead(work))
    assert await lock.wait_for_leadership()
    await lock.step_down()
    assert await task is None


@pytest.mark.parametrize("problem", ["returns", "raises"])
async def test_work_that_is_not_async_is_refused_clearly_and_steps_down(problem: str) -> None:
    database, clock = FakeDatabase(), FakeClock()

    def work() -> Any:
        if problem == "raises":
            raise KeyError("the work is broken")

    async with leading(database, clock) as lock:
        with pytest.raises(ConfigurationError if problem == "returns" else KeyError):
            await lock.lead(work)
        assert database.holder() is None


async def test_a_work_that_returns_in_the_turn_of_a_step_down_is_not_run_again(
    database: FakeDatabase, clock: FakeClock
) -> None:
    """It has returned, and what announces that has not had its turn of the loop yet."""
    runs: list[int] = []

    async def work() -> str:
        runs.append(1)
        assert lock._run is not None
        asyncio.get_running_loop().call_soon(lock._run.works.interrupt)
        return "done"

    async with leading(database, clock) as lock, limit():
        assert await lock.lead(work) == "done"
    assert runs == [1]


@pytest.mark.parametrize("turns", range(12))
async def test_a_work_that_returns_around_a_step_down_is_run_once(turns: int) -> None:
    database, clock = FakeDatabase(), FakeClock()
    finish = asyncio.Event()
    returned: list[int] = []

    async def work() -> str:
        await finish.wait()
        returned.append(1)
        return "done"

    async with leading(database, clock, retry_strategy=FixedInterval(0)) as lock:
        leading_task = asyncio.create_task(lock.lead(work))
        await until(lambda: lock._run is not None and bool(lock._run.works._running))
        stepping = asyncio.create_task(lock.step_down())
        for _ in range(turns):
            await asyncio.sleep(0)
        finish.set()
        async with limit():
            await stepping
            await _as_time_passes(clock, leading_task.done)
            assert await leading_task == "done"
    assert returned == [1]


# --- When the work fails


class Flaky:
    """A work that fails in its first runs, and then goes on until it is cancelled."""

    def __init__(self, fails: int) -> None:
        self.fails = fails
        self.error = RuntimeError("the work is broken")
        self.runs = 0
        self.running = asyncio.Event()

    async def __call__(self) -> str:
        self.runs += 1
        if self.runs <= self.fails:
            raise self.error
        self.running.set()
        return await _for_ever()


async def _sleeps(clock: FakeClock, delay_s: float) -> None:
    """Return once something waits for this long."""
    await until(lambda: any(wait_s == pytest.approx(delay_s) for wait_s in clock.waits_s()))


async def _turns_of_time(clock: FakeClock, times: int = 20) -> None:
    for _ in range(times):
        for _ in range(20):
            await asyncio.sleep(0)
        clock.advance(5)


async def test_after_the_work_has_raised_the_lock_is_left_alone_until_lead_is_entered_again(
    database: FakeDatabase, clock: FakeClock
) -> None:
    work = Flaky(fails=1)
    async with leading(database, clock, retry_strategy=FixedInterval(1)) as lock:
        with pytest.raises(RuntimeError):
            await lock.lead(work)
        assert lock.work_error is work.error
        await _turns_of_time(clock)
        assert database.log == ["connect", "try", "unlock", "close"]
        assert lock.state is LockState.FOLLOWER
        leading_task = asyncio.create_task(lock.lead(work))
        async with limit():
            await work.running.wait()
        assert lock.work_error is None
    assert await leading_task is None


async def test_a_lock_that_is_left_alone_can_be_stopped(database: FakeDatabase, clock: FakeClock) -> None:
    async with leading(database, clock) as lock:
        with pytest.raises(RuntimeError):
            await lock.lead(Flaky(fails=1))
        await _turns_of_time(clock)
        async with limit():
            await lock.shutdown()
        assert lock.state is LockState.STOPPED


async def test_a_lock_that_was_lost_and_won_again_before_the_work_failed_is_given_back(
    database: FakeDatabase, clock: FakeClock
) -> None:
    won_again = asyncio.Event()

    async def work() -> None:
        try:
            await _for_ever()
        finally:
            await won_again.wait()
            raise RuntimeError("could not clean up")

    async with leading(database, clock) as lock:
        leading_task = asyncio.create_task(lock.lead(work))
        await until(lambda: lock._run is not None and bool(lock._run.works._running))
        await _lose(database, clock)
        await until(lambda: lock.state is LockState.FOLLOWER)
        await clock.somebody_sleeps()
        clock.advance(2)  # a follower's turn, and its jitter
        async with limit():
            assert await lock.wait_for_leadership()
        won_again.set()
        with pytest.raises(RuntimeError):
            await leading_task
        assert database.holder() is None
        await _turns_of_time(clock)
        assert database.holder() is None


async def test_a_failed_work_is_logged_as_an_error_with_its_lock(database: FakeDatabase, clock: FakeClock) -> None:
    with captured_log() as records:
        async with leading(database, clock) as lock:
            with pytest.raises(RuntimeError):
                await lock.lead(Flaky(fails=1))
    (line,) = [vars(record) for record in records if vars(record).get("event") == "work_failed"]
    assert (line["levelname"], line["key1"], line["key2"], line["term"]) == ("ERROR", *KEYS, 1)
    assert line["exc_info"] is not None


async def test_a_failed_work_is_restarted_in_its_term_until_the_delay_is_too_long_to_lead_idly(
    database: FakeDatabase, clock: FakeClock
) -> None:
    work = Flaky(fails=5)
    async with leading(database, clock, retry_strategy=FixedInterval(0)) as lock:
        leading_task = asyncio.create_task(lock.lead(work, on_failure="restart"))
        for delay_s, leads in ((0.2, True), (0.4, True), (0.8, True), (1.6, False), (3.2, False)):
            await _sleeps(clock, delay_s)
            assert lock.work_error is work.error
            assert (database.holder() is not None) == lock.is_leader == leads
            clock.advance(delay_s)
            await until(lambda: lock.work_error is None)
        async with limit():
            await work.running.wait()
        assert work.runs == 6
    assert await leading_task is None


async def test_with_step_down_a_failed_work_runs_again_in_a_new_term(database: FakeDatabase, clock: FakeClock) -> None:
    work = Flaky(fails=2)
    async with leading(database, clock, retry_strategy=FixedInterval(0)) as lock:
        leading_task = asyncio.create_task(lock.lead(work, on_failure="step_down"))
        await _as_time_passes(clock, work.running.is_set)
        assert database.log.count("unlock") == 2
    assert await leading_task is None


@pytest.mark.parametrize("on_failure", ["restart", "step_down"])
async def test_lead_ends_when_the_lock_stops_while_a_failed_work_waits(
    database: FakeDatabase, clock: FakeClock, on_failure: Any
) -> None:
    async with leading(database, clock) as lock:
        leading_task = asyncio.create_task(lock.lead(Flaky(fails=9), on_failure=on_failure))
        await _sleeps(clock, 0.2)
        async with limit():
            await lock.shutdown()
            assert await leading_task is None


@pytest.mark.parametrize(("on_failure", "runs"), [("restart", 4), ("step_down", 1)])
async def test_without_a_next_term_to_restart_it_in_the_failure_of_the_work_is_raised(
    database: FakeDatabase, clock: FakeClock, on_failure: Any, runs: int
) -> None:
    work = Flaky(fails=9)
    async with leading(database, clock, auto_reacquire=False) as lock:
        leading_task = asyncio.create_task(lock.lead(work, on_failure=on_failure))
        await _as_time_passes(clock, leading_task.done)
        with pytest.raises(RuntimeError):
            await leading_task
    assert work.runs == runs


async def test_lead_refuses_what_it_cannot_do_about_a_failure(database: FakeDatabase, clock: FakeClock) -> None:
    async with leading(database, clock) as lock:
        with pytest.raises(ConfigurationError, match='"raise", "restart" or "step_down"'):
            await lock.lead(Flaky(fails=0), on_failure="ignore")  # type: ignore[arg-type]


# --- All of it at once


class Trial:
    """One node whose work fails, asks whether it leads, is paused, stepped down and cancelled at random, by its seed.

    It is idle while `is_leader` is True, no work runs, and it does not say that its work has failed. Time passes in
    steps of a tenth of a second, after so many turns of the loop that whatever can happen in it has happened.
    """

    STEPS = 60
    STEP_S = 0.1
    TURNS = 40
    IDLE_S_MAX = 1.0

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.clock, self.database = FakeClock(), FakeDatabase()
        grace_s = rng.choice([None, None, 4.0])
        self.lock = fake_lock(
            self.database, self.clock, retry_strategy=FixedInterval(rng.choice([0, 0.3, 1])), reconnect_grace_s=grace_s
        )
        self.story: list[str] = []
        self.running = 0
        self.idle_s = 0.0
        self.calm = False
        self.asked: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        async with asyncio.timeout(100), self.lock:
            leading: asyncio.Future[None] = asyncio.ensure_future(self._lead_at_random())
            try:
                await self._time_passes(1)  # into `lead`
                for _ in range(self.STEPS):
                    leading = await self._disturb(leading)
                    await self._time_passes(self.rng.randint(1, 8))
                self.calm = True
                await self._time_passes(int(2 * self.IDLE_S_MAX / self.STEP_S))
                if leading.done() and not leading.cancelled():
                    leading.result()
            finally:
                leading.cancel()
                await asyncio.wait([leading])
        await asyncio.gather(*self.asked)

    async def _time_passes(self, steps: int) -> None:
        for _ in range(steps):
            for _ in range(self.TURNS):
                await asyncio.sleep(0)
            idle = self.lock.is_leader and not self.running and self.lock.work_error is None
            self.idle_s = self.idle_s + self.STEP_S if idle else 0.0
            assert self.idle_s <= self.IDLE_S_MAX, f"led without work for {self.idle_s:.1f} s"
            self.clock.advance(self.STEP_S)

    async def _lead_at_random(self) -> None:
        """As a program does: enters `lead` again after what its work has raised, or never. Nothing else is raised."""
        while True:
            on_failure: Any = self.rng.choice(["raise", "raise", "restart", "step_down"])
            try:
                await self.lock.lead(self._work, on_failure=on_failure)
            except ZeroDivisionError:
                self.story.append(f"raised with {on_failure}")
            if self.rng.random() < 0.2:
                return
            await self.clock.sleep(self.rng.uniform(0, 0.5))

    async def _work(self) -> None:
        self.running += 1
        try:
            while True:
                await self.clock.sleep(self.rng.uniform(0, 0.5))
                match self.rng.choice(["ask", "ask", "pause", "raise", "raise", *["work"] * 6]):
                    case "ask":
                        while not self.lock.is_leader:
                            await self.clock.sleep(0.1)
                    case "pause" if not self.calm:
                        self.story.append("paused")
                        self.clock.jump(self.rng.uniform(0, 20))
                        assert self.lock.state is not LockState.STOPPED
                    case "raise" if not self.calm:
                        self.story.append("raises")
                        raise ZeroDivisionError
        finally:
            if self.rng.random() < 0.3:
                await asyncio.sleep(0)  # a clean-up that needs a turn
            self.running -= 1

    async def _disturb(self, leading: "asyncio.Future[None]") -> "asyncio.Future[None]":
        what = self.rng.choice(
            ["step down", "hasty step down", "lose", "held", "down", "cancel", "second", *["nothing"] * 7]
        )
        match what:
            case "step down":
                self.asked.append(asyncio.create_task(self.lock.step_down()))
            case "hasty step down":
                self.asked.append(asyncio.create_task(self.lock.step_down(timeout_s=1e-6)))
            case "lose":
                self.database.script("probe", OSError("gone"))
            case "held":
                self.database.script("try", (False,))
            case "down":
                self.database.script("connect", OSError("no route"))
            case "cancel":
                leading.cancel()
                await asyncio.wait([leading])
                if self.rng.random() < 0.7:
                    leading = asyncio.create_task(self._lead_at_random())
            case "second" if leading.done():
                leading = asyncio.create_task(self._lead_at_random())
            case _:
                return leading
        self.story.append(what)
        return leading


@pytest.mark.parametrize("batch", range(count(1, 20)))
async def test_no_node_leads_without_a_running_work_unless_it_says_so(batch: int) -> None:
    """Ten runs at a time; each is repeated by its seed."""
    for seed in range(10 * batch, 10 * batch + 10):
        trial = Trial(seed)
        try:
            await trial.run()
        except BaseException as error:
            error.add_note(f"seed {seed}: {trial.story}")
            raise


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
