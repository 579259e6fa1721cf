"""Bad input: a clear error each time, and no task, lock or connection left behind."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import psycopg
import pytest

from fakes import KEYS, FakeClock, FakeConnection, FakeDatabase, Gate, Recorder, fake_lock, leading, limit, until
from pgleaderlock import ConfigurationError, FixedInterval, LeaderLock, LockState, _borrowed
from pgleaderlock.errors import ConnectionError as LostConnection

EVENTS = ["on_acquired", "on_released", "on_lost", "on_acquire_failed", "on_state_change", "on_error", "on_stopped"]


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


# --- connect_fn


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
    monkeypatch.setattr(_borrowed, "CONNECT_TIMEOUT_S", 0.01)
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
        monkeypatch.setattr(_borrowed, "CONNECT_TIMEOUT_S", 0.01)
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


# --- Callbacks


@pytest.mark.parametrize("wrong", [None, 5, "print", object()], ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("event", EVENTS)
def test_a_callback_that_cannot_be_called_is_refused_at_once_and_by_name(event: str, wrong: object) -> None:
    lock = fake_lock(FakeDatabase())
    with pytest.raises(ConfigurationError, match=rf"{event} takes a function, not {type(wrong).__name__}"):
        getattr(lock, event)(wrong)
    assert lock._registry.of(event) == ()


async def test_a_callback_with_the_wrong_number_of_arguments_is_reported(
    database: FakeDatabase, clock: FakeClock
) -> None:
    lock = fake_lock(database, clock)
    lock.on_acquired(lambda too_many: None)  # type: ignore[type-var]
    recorder = Recorder(lock)
    async with lock:
        await recorder.seen("on_error")
        assert isinstance(recorder.errors[0], TypeError)
        assert lock.is_leader


# --- A real server


async def test_a_role_without_permission_is_reported_and_leaves_nothing(dsn: str, clock: FakeClock) -> None:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as admin:
        await admin.execute("CREATE ROLE stranger LOGIN PASSWORD 'stranger'")
        await admin.execute("CREATE DATABASE walled")
        try:
            await admin.execute("REVOKE CONNECT ON DATABASE walled FROM PUBLIC")
            wrong = psycopg.conninfo.make_conninfo(dsn, user="stranger", password="stranger", dbname="walled")
            lock = LeaderLock(wrong, *KEYS)
            lock._clock = clock
            recorder = Recorder(lock)
            async with lock:
                await recorder.seen("on_error")
            assert "permission denied" in str(recorder.errors[0])
        finally:
            await admin.execute("DROP DATABASE walled")
            await admin.execute("DROP ROLE stranger")


@pytest.mark.parametrize("wrong", [{"port": "1"}, {"host": "nosuch.invalid"}, {"dbname": "nosuch"}], ids=str)
async def test_a_server_that_cannot_be_reached_is_reported_and_tried_again(
    dsn: str, clock: FakeClock, wrong: dict[str, Any]
) -> None:
    lock = LeaderLock(psycopg.conninfo.make_conninfo(dsn, **wrong), *KEYS, retry_strategy=FixedInterval(1))
    lock._clock = clock
    recorder = Recorder(lock)
    async with lock:
        for errors in (1, 2):
            await recorder.seen("on_error", errors)
            assert isinstance(recorder.errors[-1], LostConnection)
            assert str(recorder.errors[-1]).startswith("cannot connect: ")
            await clock.somebody_sleeps()
            clock.advance(2)
    assert lock.state is LockState.STOPPED
