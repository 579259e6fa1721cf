"""A connection from `connect_fn`: a clear error for each way to fail, and no task, lock or connection left behind."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import psycopg
import pytest

from pgleaderlock import ConfigurationError, FixedInterval, LeaderLock, LockState
from pgleaderlock._lock import borrowed
from pgleaderlock.errors import ConnectionError as LostConnection
from support.fakes import (
    KEYS,
    FakeClock,
    FakeConnection,
    FakeDatabase,
    Gate,
    Recorder,
    fake_lock,
    leading,
    limit,
    until,
)


@pytest.fixture
def database() -> FakeDatabase:
    return FakeDatabase()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(autouse=True)
async def no_task_is_left() -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield
    await until(lambda: asyncio.all_tasks() - before <= {asyncio.current_task()})


Connect = Callable[[], Awaitable[Any]]


async def _first_error(clock: FakeClock, connect_fn: Connect) -> Exception:
    """The first thing that on_error hears, after which the lock still stops as asked."""
    lock = LeaderLock("", *KEYS, connect_fn=connect_fn)
    lock._clock = clock
    recorder = Recorder(lock)
    before = asyncio.all_tasks()
    async with lock:
        await recorder.seen("on_error")
        assert lock.last_error is recorder.errors[0]
        await clock.somebody_sleeps()  # before the next attempt: it goes on competing
    assert lock.state is LockState.STOPPED
    assert recorder.calls[-2:] == ["follower>stopped", "on_stopped"]
    assert asyncio.all_tasks() == before
    return recorder.errors[0]


async def test_a_connect_fn_that_returns_a_closed_connection_is_told_so(
    database: FakeDatabase, clock: FakeClock
) -> None:
    async def closed() -> Any:
        connection = await database.connect()
        await connection.close()
        return connection

    error = await _first_error(clock, closed)
    assert isinstance(error, LostConnection)
    assert "closed connection" in str(error)
    assert "try" not in database.log


async def test_a_connect_fn_that_returns_a_closed_real_connection_is_told_so(dsn: str, clock: FakeClock) -> None:
    async def closed() -> Any:
        connection = await psycopg.AsyncConnection.connect(dsn, autocommit=True)
        await connection.close()
        return connection

    assert "closed connection" in str(await _first_error(clock, closed))


async def test_a_connect_fn_that_raises_is_reported_with_its_error(database: FakeDatabase, clock: FakeClock) -> None:
    problem = OSError("no route to host")
    database.script("connect", problem)
    error = await _first_error(clock, database.connect)
    assert isinstance(error, LostConnection)
    assert "connect_fn failed: no route to host" in str(error)
    assert error.__cause__ is problem


async def test_a_connect_fn_that_hangs_is_given_up(
    database: FakeDatabase, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(borrowed, "CONNECT_TIMEOUT_S", 0.01)
    gate = database.gate("connect")
    error = await _first_error(clock, database.connect)
    await gate.reached()
    assert "did not return within 0.01 s" in str(error)


@pytest.mark.parametrize("how", ["given up", "stopped"])
async def test_a_connect_fn_that_refuses_to_be_cancelled_leaves_no_connection(
    database: FakeDatabase, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    gate = Gate()

    async def stubborn() -> Any:
        connecting = asyncio.ensure_future(gate.pass_through())
        while not connecting.done():
            try:
                await asyncio.shield(connecting)
            except asyncio.CancelledError:
                continue
        return await database.connect()

    if how == "given up":
        monkeypatch.setattr(borrowed, "CONNECT_TIMEOUT_S", 0.01)
    lock = fake_lock(database, clock, connect_fn=stubborn)
    recorder = Recorder(lock)
    await lock.start()
    await gate.reached()
    if how == "given up":
        await recorder.seen("on_error")
    async with limit():
        await lock.shutdown()
    assert database.connections == []
    gate.open()
    await database.seen("close")
    assert database.open_connections() == []


async def test_a_connect_fn_that_returns_nothing_is_told_so(database: FakeDatabase, clock: FakeClock) -> None:
    async def nothing() -> Any:
        return None

    error = await _first_error(clock, nothing)
    assert isinstance(error, LostConnection)
    assert "it must return an open one" in str(error)


async def test_a_connect_fn_that_is_not_async_is_reported(clock: FakeClock) -> None:
    error = await _first_error(clock, lambda: 5)  # type: ignore[arg-type, return-value]
    assert isinstance(error, LostConnection)
    assert "connect_fn must be an async function" in str(error)


@pytest.mark.parametrize("wrong", [5, "connect", object(), FakeConnection(FakeDatabase)])  # type: ignore[arg-type]
def test_a_connect_fn_that_cannot_be_called_is_refused_at_once(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="connect_fn must be an async function"):
        LeaderLock("", *KEYS, connect_fn=wrong)


async def test_a_connect_fn_that_recovers_leads(database: FakeDatabase, clock: FakeClock) -> None:
    database.script("connect", OSError("one"), RuntimeError("two"), ValueError("three"))
    lock = fake_lock(database, clock, retry_strategy=FixedInterval(1))
    recorder = Recorder(lock)
    async with lock:
        for errors in (1, 2, 3):
            await recorder.seen("on_error", errors)
            await clock.somebody_sleeps()
            clock.advance(2)
        async with limit():
            assert await lock.wait_for_leadership()


@pytest.mark.parametrize("step", ["connect", "try", "close"])
async def test_a_cancellation_from_the_callers_connection_is_an_error_and_not_the_end(
    database: FakeDatabase, clock: FakeClock, step: str
) -> None:
    # A timeout or a pool of the caller's may raise it; nobody has cancelled the lock.
    database.script(step, asyncio.CancelledError())
    if step == "close":
        database.script("try", OSError("gone"))
    lock = fake_lock(database, clock, retry_strategy=FixedInterval(1))
    recorder = Recorder(lock)
    async with lock:
        await recorder.seen("on_error")
        assert isinstance(recorder.errors[0], LostConnection)
        await clock.somebody_sleeps()
        clock.advance(2)
        async with limit():
            assert await lock.wait_for_leadership()


@pytest.mark.parametrize("row", [(), [], 42, "row"], ids=repr)
async def test_a_connection_that_answers_nonsense_is_not_believed(
    database: FakeDatabase, clock: FakeClock, row: object
) -> None:
    async with leading(database, clock) as lock:
        recorder = Recorder(lock)
        database.script("probe", row)
        await clock.somebody_sleeps()
        clock.advance(5)
        if row == "row":  # has a first element, as an answer has: what a probe answers does not matter
            await database.seen("probe")
            assert lock.is_leader
        else:
            await recorder.seen("on_lost")
            await until(lambda: not database.open_connections())


async def test_a_server_that_does_not_answer_is_given_up_and_its_connection_closed(
    database: FakeDatabase, clock: FakeClock
) -> None:
    database.gate("try")
    lock = fake_lock(database, clock, health_interval_s=0.02)
    recorder = Recorder(lock)
    async with lock:
        await recorder.seen("on_error")
        assert "did not answer within 0.02 s" in str(recorder.errors[0])
        assert database.open_connections() == []


async def test_a_connection_that_fails_to_close_does_no_harm(database: FakeDatabase, clock: FakeClock) -> None:
    database.script("close", OSError("already gone"))
    lock = fake_lock(database, clock)
    recorder = Recorder(lock)
    async with lock:
        assert await lock.wait_for_leadership()
    assert recorder.calls[-2:] == ["on_released", "on_stopped"]


async def test_a_connection_that_hangs_while_closing_does_not_hold_up_the_end(
    database: FakeDatabase, clock: FakeClock
) -> None:
    database.gate("close")
    lock = fake_lock(database, clock, health_interval_s=0.05)
    async with limit(), lock:
        assert await lock.wait_for_leadership()
    assert lock.state is LockState.STOPPED


async def test_a_driver_whose_rows_are_mappings_is_understood(database: FakeDatabase, clock: FakeClock) -> None:
    database.script("try", {"pg_try_advisory_lock": False}, {"pg_try_advisory_lock": True})
    lock = fake_lock(database, clock, retry_strategy=FixedInterval(1))
    recorder = Recorder(lock)
    async with lock:
        await recorder.seen("on_acquire_failed")
        await clock.somebody_sleeps()
        clock.advance(1)
        async with limit():
            assert await lock.wait_for_leadership()
        database.script("unlock", {"pg_advisory_unlock": True})


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


# --- Real connections


async def test_a_connection_without_autocommit_is_refused_with_the_remedy_and_closed(
    dsn: str, clock: FakeClock
) -> None:
    opened: list[psycopg.AsyncConnection[Any]] = []

    async def connect() -> Any:
        opened.append(await psycopg.AsyncConnection.connect(dsn))
        return opened[-1]

    error = await _first_error(clock, connect)
    assert isinstance(error, LostConnection)
    assert "connect with autocommit=True" in str(error)
    assert [connection.closed for connection in opened] == [True]


class Pool:
    """One connection, lent by `connection()` as psycopg_pool does it: a broken one is replaced when it comes back."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._free = asyncio.Semaphore(1)
        self._kept: psycopg.AsyncConnection[Any] | None = None
        self.opened = 0

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        async with self._free:
            if self._kept is None or self._kept.closed:
                self._kept = await psycopg.AsyncConnection.connect(self._dsn, autocommit=True)
                self.opened += 1
            yield self._kept

    async def close(self) -> None:
        if self._kept is not None:
            await self._kept.close()


@pytest.fixture
async def pool(dsn: str) -> AsyncIterator[Pool]:
    lending = Pool(dsn)
    yield lending
    await lending.close()


async def test_a_connection_of_a_pool_is_given_back_at_each_stop(pool: Pool) -> None:
    lock = LeaderLock(None, 30_021, 1, connect_fn=pool.connection)
    for _ in range(3):
        async with limit(), lock:
            assert await lock.wait_for_leadership()
    assert pool.opened == 1
    async with limit(), pool.connection() as connection:
        row = await (await connection.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")).fetchone()
    assert row == (0,)


async def test_a_connection_that_may_hold_the_lock_is_closed_before_its_pool_gets_it_back(
    pool: Pool, clock: FakeClock
) -> None:
    lock = LeaderLock(None, 30_021, 2, connect_fn=pool.connection)
    lock._clock = clock
    await lock.start()
    async with limit():
        assert await lock.wait_for_leadership()
    assert lock._task is not None
    lock._task.cancel()  # as at the end of a program: nothing is unlocked
    await asyncio.wait([lock._task])
    async with limit(), pool.connection() as connection:
        row = await (await connection.execute("SELECT pg_try_advisory_lock(30021, 2)")).fetchone()
        assert row == (True,)
        await connection.execute("SELECT pg_advisory_unlock(30021, 2)")
    assert pool.opened == 2
