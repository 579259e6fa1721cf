"""Defects of the lock that were found once, and stay found."""

import asyncio
import traceback
from typing import Any

import pytest

from fakes import KEYS, FakeClock, FakeDatabase, Gate, Recorder, captured_log, fake_lock, leading, limit, until
from pgleaderlock import ConfigurationError, ExponentialBackoff, FixedInterval, LeaderLock, LockState, RetryContext
from pgleaderlock._conninfo import check_dsn

SECRET = "hunter2secret"


# --- test_lock_api.py


async def test_wait_for_leadership_answers_when_trust_comes_back() -> None:
    """After a pause the next probe restores trust without a change of state, and nobody wakes the waiter."""
    database, clock = FakeDatabase(), FakeClock()
    async with leading(database, clock) as lock:
        await clock.somebody_sleeps()
        clock.jump(11)
        assert not lock.is_leader
        waiting = asyncio.create_task(lock.wait_for_leadership())
        await asyncio.sleep(0)
        clock.advance(0)
        await database.seen("probe")
        await until(lambda: lock.is_leader)
        for _ in range(100):
            await asyncio.sleep(0)
        answered = waiting.done()
        waiting.cancel()
        assert answered


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


async def test_the_external_event_still_works_after_a_start_from_on_stopped() -> None:
    """The end of the old run cancels the relay of the new one, and its own relay is left for ever."""
    database, clock, event = FakeDatabase(), FakeClock(), asyncio.Event()
    before = asyncio.all_tasks()
    lock = fake_lock(database, clock, shutdown_event=event)
    recorder = Recorder(lock)
    again = [True]

    @lock.on_stopped
    async def restart() -> None:
        if again and again.pop():
            await lock.start()

    await lock.start()
    await recorder.seen("on_acquired")
    await lock.shutdown()
    await recorder.seen("on_acquired", 2)
    event.set()
    for _ in range(100):
        await asyncio.sleep(0)
    state = lock.state
    await lock.shutdown()
    assert state is LockState.STOPPED
    assert asyncio.all_tasks() == before


async def test_no_relay_is_left_when_a_lock_that_was_restarted_from_on_stopped_has_ended() -> None:
    database, clock, event = FakeDatabase(), FakeClock(), asyncio.Event()
    before = asyncio.all_tasks()
    lock = fake_lock(database, clock, shutdown_event=event)
    again = [True]

    @lock.on_stopped
    async def restart() -> None:
        if again and again.pop():
            await lock.start()

    await lock.start()
    await lock.wait_for_leadership()
    await lock.shutdown()
    await until(lambda: lock.is_leader)
    await lock.shutdown()
    for _ in range(20):
        await asyncio.sleep(0)
    left = asyncio.all_tasks() - before
    for task in left:
        task.cancel()
    assert left == set()


def test_the_callbacks_of_the_end_are_heard_when_the_program_ends() -> None:
    """`asyncio.run` cancels the dispatcher together with the lock, so on_released and on_stopped are never told."""
    lock = fake_lock(FakeDatabase())
    recorder = Recorder(lock)

    async def main() -> None:
        await lock.start()
        assert await lock.wait_for_leadership()

    asyncio.run(main())
    assert recorder.calls[-3:] == ["releasing>stopped", "on_released", "on_stopped"]


class _Fails(Gate):
    async def pass_through(self) -> None:
        await super().pass_through()
        raise OSError("gone")


@pytest.mark.parametrize("turns", range(30))
async def test_a_step_down_whose_term_was_lost_meanwhile_does_not_end_the_next_term(turns: int) -> None:
    """A force that comes just after the loss is not forgotten, and ends the next term at its first probe."""
    database, clock = FakeDatabase(), FakeClock()
    async with leading(database, clock, retry_strategy=FixedInterval(0)) as lock:
        gate = _Fails()
        database.script("probe", gate)
        await clock.somebody_sleeps()
        clock.advance(5)
        await gate.reached()
        gate.open()
        for _ in range(turns):
            await asyncio.sleep(0)
        async with limit():
            await lock.step_down(timeout_s=0)
        await until(lambda: bool(clock.waits_s()) or lock.is_leader)
        clock.advance(1)
        async with limit():
            assert await lock.wait_for_leadership()
        recorder = Recorder(lock)
        probes = database.log.count("probe")
        await clock.somebody_sleeps()
        clock.advance(5)
        await until(lambda: database.log.count("probe") > probes or lock.state is not LockState.LEADER)
        for _ in range(20):
            await asyncio.sleep(0)
        assert "leader>releasing" not in recorder.calls


# --- test_lead.py


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


# --- test_bad_input.py


@pytest.mark.parametrize("wrong", [None, "yes", "no", 2])
@pytest.mark.parametrize("setting", ["auto_reacquire", "allow_pooler"])
def test_a_switch_that_is_no_bool_is_refused(setting: str, wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match=setting):
        LeaderLock("host=h", 1, 2, **{setting: wrong})


async def test_a_switch_that_is_no_bool_does_not_kill_the_lock() -> None:
    """What follows from taking it: no row fits, the task dies of IllegalTransition, the state stands still."""
    database, clock = FakeDatabase(), FakeClock()
    try:
        lock = fake_lock(database, clock, auto_reacquire=None)  # type: ignore[arg-type]
    except ConfigurationError:
        return
    await lock.start()
    assert await lock.wait_for_leadership()
    database.script("probe", OSError("gone"))
    await clock.somebody_sleeps()
    clock.advance(5)
    await database.seen("probe")
    task = lock._task
    assert task is not None
    async with limit():
        await asyncio.wait([task])
    error = task.exception()
    assert error is None
    assert lock.state is LockState.STOPPED


@pytest.mark.parametrize("strategy", [ExponentialBackoff, FixedInterval])
def test_a_strategy_class_instead_of_a_strategy_is_refused(strategy: Any) -> None:
    with pytest.raises(ConfigurationError, match="retry_strategy"):
        LeaderLock("host=h", 1, 2, retry_strategy=strategy)


@pytest.mark.parametrize("method", ["shutdown", "step_down", "wait_for_leadership"])
async def test_a_timeout_that_is_no_number_is_refused_clearly(method: str) -> None:
    lock = fake_lock(FakeDatabase(), FakeClock())
    with pytest.raises(ConfigurationError, match="timeout_s"):
        await getattr(lock, method)(timeout_s="5")


async def test_a_connect_fn_that_is_not_async_leaves_no_connection() -> None:
    database, clock = FakeDatabase(), FakeClock()
    connection = await database.connect()
    lock = LeaderLock("", *KEYS, connect_fn=lambda: connection)
    lock._clock = clock
    recorder = Recorder(lock)
    async with lock:
        await recorder.seen("on_error")
    assert database.open_connections() == []


async def test_a_connection_whose_closed_is_not_exactly_false_is_not_left_open() -> None:
    database, clock = FakeDatabase(), FakeClock()

    async def connect() -> Any:
        connection = await database.connect()
        connection.closed = 0  # as psycopg2 says it
        return connection

    lock = fake_lock(database, clock, connect_fn=connect)
    recorder = Recorder(lock)
    async with lock:
        await until(lambda: bool(recorder.errors) or lock.is_leader)
    assert database.open_connections() == []


# --- test_retry.py


def test_a_base_of_zero_stays_zero() -> None:
    assert ExponentialBackoff(base_s=0).next_delay_s(RetryContext(2000, 0.0, None)) == 0


def test_a_number_too_large_for_a_float_is_refused_clearly() -> None:
    with pytest.raises(ConfigurationError):
        FixedInterval(10**400)


# --- test_conninfo.py


async def test_a_callable_dsn_that_raises_shows_no_secret() -> None:
    """Its text goes into ConnectionError, the cause and the log as it is."""

    def vault() -> str:
        raise RuntimeError(f"no lease for postgresql://u:{SECRET}@h/d")

    lock = LeaderLock(vault, *KEYS)
    lock._clock = FakeClock()
    recorder = Recorder(lock)
    with captured_log() as records:
        async with lock:
            await recorder.seen("on_error")
    shown = "".join(traceback.format_exception(recorder.errors[0])) + "".join(r.getMessage() for r in records)
    assert SECRET not in shown


async def test_a_callable_dsn_that_returns_none_is_told_so() -> None:
    lock = LeaderLock(lambda: None, *KEYS)  # type: ignore[arg-type, return-value]
    lock._clock = FakeClock()
    recorder = Recorder(lock)
    async with lock:
        await recorder.seen("on_error")
    assert "must return a string" in str(recorder.errors[0])


def test_a_dsn_with_a_slash_in_its_password_is_refused() -> None:
    """libpq takes the user for the host and the rest of the password for the database."""
    with pytest.raises(ConfigurationError):
        check_dsn(f"postgresql://u:pa/{SECRET}@h/d")


def test_a_dsn_that_is_no_utf_8_is_refused_and_shows_no_secret() -> None:
    """As it comes from an environment variable with other bytes in it; the repr of the error is the whole DSN."""
    with pytest.raises(ConfigurationError) as caught:
        check_dsn(f"host=h\udcff password={SECRET}")
    assert SECRET not in repr(caught.value)


def test_a_dsn_with_a_nul_is_refused() -> None:
    """libpq ends there: what follows, the password for one, is ignored without a word."""
    with pytest.raises(ConfigurationError):
        check_dsn("host=h\0 dbname=production")
