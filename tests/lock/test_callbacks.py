"""What callbacks may rely on, and what they cannot break."""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from pgleaderlock import ConfigurationError, FixedInterval, LeaderLock, LockState, ShutdownError
from pgleaderlock._lock import callbacks
from support.fakes import FakeClock, FakeDatabase, Gate, Recorder, captured_log, fake_lock, leading, limit, until

EVENTS = ["on_acquired", "on_released", "on_lost", "on_acquire_failed", "on_state_change", "on_error", "on_stopped"]


@pytest.fixture
def database() -> FakeDatabase:
    return FakeDatabase()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


async def _lose(database: FakeDatabase, clock: FakeClock) -> None:
    database.script("probe", OSError("gone"))
    await clock.somebody_sleeps()
    clock.advance(5)


@pytest.mark.parametrize("event", EVENTS)
def test_a_decorator_returns_the_function_itself(event: str) -> None:
    lock = fake_lock(FakeDatabase())

    def plain(*_: object) -> None: ...

    async def coroutine(*_: object) -> None: ...

    register: Callable[[Callable[..., Any]], Callable[..., Any]] = getattr(lock, event)
    assert register(plain) is plain
    assert register(coroutine) is coroutine


async def test_sync_and_async_callbacks_run_in_the_order_of_registration(
    database: FakeDatabase, clock: FakeClock
) -> None:
    lock = fake_lock(database, clock)
    order: list[str] = []
    done = asyncio.Event()

    @lock.on_acquired
    def first() -> None:
        order.append("first")

    @lock.on_acquired
    async def second() -> None:
        order.append("second begins")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        order.append("second ends")

    @lock.on_acquired
    def third() -> None:
        order.append("third")

    lock.on_acquired(functools.partial(order.append, "fourth"))
    lock.on_acquired(done.set)
    async with lock, limit():
        await done.wait()
    assert order == ["first", "second begins", "second ends", "third", "fourth"]


async def test_a_callback_registered_twice_runs_twice(database: FakeDatabase, clock: FakeClock) -> None:
    lock = fake_lock(database, clock)
    heard: list[int] = []
    call = functools.partial(heard.append, 1)
    lock.on_acquired(call)
    lock.on_acquired(call)
    async with lock:
        await lock.wait_for_leadership()
    assert heard == [1, 1]


async def test_a_callback_can_be_added_while_the_lock_runs(database: FakeDatabase, clock: FakeClock) -> None:
    async with leading(database, clock) as lock:
        recorder = Recorder(lock)
        await lock.step_down()
        await recorder.seen("on_released")


async def test_the_change_of_state_is_told_with_from_and_to(database: FakeDatabase, clock: FakeClock) -> None:
    lock = fake_lock(database, clock)
    changes: list[tuple[LockState, LockState]] = []
    lock.on_state_change(lambda source, target: changes.append((source, target)))
    async with lock:
        await lock.wait_for_leadership()
    assert changes == [
        (LockState.STOPPED, LockState.FOLLOWER),
        (LockState.FOLLOWER, LockState.ACQUIRING),
        (LockState.ACQUIRING, LockState.LEADER),
        (LockState.LEADER, LockState.RELEASING),
        (LockState.RELEASING, LockState.STOPPED),
    ]


async def test_everything_was_told_when_shutdown_returns(database: FakeDatabase, clock: FakeClock) -> None:
    lock = fake_lock(database, clock)
    recorder = Recorder(lock)

    @lock.on_stopped
    async def slow() -> None:
        for _ in range(50):
            await asyncio.sleep(0)
        recorder.calls.append("the slow one has ended")

    async with lock:
        await lock.wait_for_leadership()
    assert recorder.calls[-3:] == ["on_released", "on_stopped", "the slow one has ended"]


# --- Exceptions


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("event", [event for event in EVENTS if event != "on_error"])
async def test_what_a_callback_raises_goes_to_on_error_and_the_rest_still_runs(
    database: FakeDatabase, clock: FakeClock, event: str, kind: str
) -> None:
    lock = fake_lock(database, clock, retry_strategy=FixedInterval(1))
    error = RuntimeError("the callback is broken")
    after: list[str] = []

    def broken(*_: object) -> None:
        raise error

    async def broken_async(*_: object) -> None:
        raise error

    register: Callable[[Callable[..., Any]], Callable[..., Any]] = getattr(lock, event)
    register(broken if kind == "sync" else broken_async)
    register(lambda *_: after.append(event))
    recorder = Recorder(lock)
    database.script("try", (False,))  # makes on_acquire_failed happen, too
    async with lock:
        await clock.somebody_sleeps()
        clock.advance(2)
        assert await lock.wait_for_leadership()
        await _lose(database, clock)
        await recorder.seen("on_lost")
        await clock.somebody_sleeps()
        clock.advance(2)
        assert await lock.wait_for_leadership()
        await lock.step_down()
    assert lock.state is LockState.STOPPED
    assert after
    assert recorder.errors.count(error) == len(after)
    assert recorder.calls[-1] == "on_stopped" or (
        event == "on_stopped" and recorder.calls[-2:] == ["on_stopped", "on_error"]
    )
    assert database.open_connections() == []


async def test_an_on_error_that_raises_is_only_logged_and_the_next_on_error_still_runs(
    database: FakeDatabase, clock: FakeClock
) -> None:
    lock = fake_lock(database, clock)
    heard: list[Exception] = []
    first = RuntimeError("the callback is broken")
    calls = 0

    @lock.on_error
    def broken(_: Exception) -> None:
        nonlocal calls
        calls += 1
        raise RuntimeError("and so is on_error")

    lock.on_error(heard.append)

    @lock.on_acquired
    def raises() -> None:
        raise first

    with captured_log() as records:
        async with lock:
            assert await lock.wait_for_leadership()
    assert heard == [first]
    assert calls == 1
    assert sum("and so is on_error" in record.getMessage() for record in records) == 1


async def test_a_callback_that_raises_cancelled_error_does_not_end_the_dispatch(
    database: FakeDatabase, clock: FakeClock
) -> None:
    lock = fake_lock(database, clock)

    @lock.on_acquired
    async def cancelled() -> None:
        raise asyncio.CancelledError

    @lock.on_acquired
    async def waits_for_something_cancelled() -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    recorder = Recorder(lock)
    with captured_log() as records:
        async with lock:
            assert await lock.wait_for_leadership()
            await recorder.seen("on_acquired")
    assert recorder.calls[-2:] == ["on_released", "on_stopped"]
    assert sum(vars(record)["event"] == "callback_cancelled" for record in records) == 2


def test_system_exit_in_a_callback_ends_the_program_and_leaves_nothing_held() -> None:
    database = FakeDatabase()

    async def main() -> None:
        lock = fake_lock(database)

        @lock.on_acquired
        def leave() -> None:
            raise SystemExit(3)

        async with lock:
            await asyncio.get_running_loop().create_future()

    with pytest.raises(SystemExit) as caught:
        asyncio.run(main())
    assert caught.value.code == 3
    assert database.open_connections() == []
    assert database.holder() is None


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


# --- Slow callbacks


async def test_a_slow_callback_delays_no_probe(database: FakeDatabase, clock: FakeClock) -> None:
    lock = fake_lock(database, clock)
    gate = Gate()
    lock.on_acquired(gate.pass_through)
    async with lock:
        await gate.reached()
        for probes in (1, 2, 3):
            await clock.somebody_sleeps()
            clock.advance(5)
            await database.seen("probe", probes)
        assert lock.is_leader
        gate.open()


async def test_a_slow_callback_delays_no_loss(database: FakeDatabase, clock: FakeClock) -> None:
    lock = fake_lock(database, clock)
    gate = Gate()
    lock.on_acquired(gate.pass_through)
    async with lock:
        await gate.reached()
        await _lose(database, clock)
        await until(lambda: lock.state is LockState.FOLLOWER)
        assert not lock.is_leader
        gate.open()


async def test_a_slow_callback_is_logged(database: FakeDatabase, clock: FakeClock) -> None:
    lock = fake_lock(database, clock)
    gate = Gate()

    @lock.on_acquired
    async def dawdle() -> None:
        await gate.pass_through()

    with captured_log() as records:
        async with lock:
            await gate.reached()
            clock.advance(2)
            gate.open()
    (slow,) = [record for record in records if vars(record)["event"] == "callback_slow"]
    assert "callback=on_acquired" in slow.getMessage()
    assert "dawdle" in slow.getMessage()
    assert "took_s=2" in slow.getMessage()


async def test_the_unlock_waits_for_the_callbacks_of_the_release(database: FakeDatabase, clock: FakeClock) -> None:
    gate = Gate()
    async with leading(database, clock) as lock:

        @lock.on_state_change
        async def stop_work(_: LockState, target: LockState) -> None:
            if target is LockState.RELEASING:
                await gate.pass_through()

        releasing = asyncio.create_task(lock.step_down())
        await gate.reached()
        for _ in range(100):
            await asyncio.sleep(0)
        assert "unlock" not in database.log
        assert database.holder() is not None
        gate.open()
        async with limit():
            await releasing
        assert database.log.count("unlock") == 1
        assert database.holder() is None


async def test_a_callback_that_never_returns_cannot_keep_the_lock_beyond_the_timeout(
    database: FakeDatabase, clock: FakeClock
) -> None:
    lock = fake_lock(database, clock)
    gate = Gate()
    lock.on_acquired(gate.pass_through)
    await lock.start()
    await gate.reached()
    async with limit():
        with pytest.raises(ShutdownError):
            await lock.shutdown(timeout_s=0.01)
    assert database.holder() is None
    assert database.open_connections() == []
    assert lock.state is LockState.STOPPED


async def test_a_callback_that_never_returns_cannot_eat_the_memory(
    database: FakeDatabase, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callbacks, "QUEUE_MAX", 3)
    lock = fake_lock(database, clock, retry_strategy=FixedInterval(1))
    gate = Gate()

    @lock.on_acquire_failed
    async def stuck() -> None:
        await gate.pass_through()

    database.script("try", *[(False,)] * 10)
    with captured_log() as records:
        async with lock:
            await gate.reached()
            for tries in range(2, 11):
                await clock.somebody_sleeps()
                clock.advance(2)
                await database.seen("try", tries)
            await until(lambda: any(vars(record)["event"] == "callback_dropped" for record in records))
            gate.open()


# --- Requests from inside


async def _inside(lock: LeaderLock, event: str, act: Callable[[], Awaitable[None]]) -> asyncio.Event:
    """Do something in a callback; the event says that it has returned."""
    returned = asyncio.Event()

    async def callback(*_: object) -> None:
        if not returned.is_set():
            await act()
            returned.set()

    getattr(lock, event)(callback)
    return returned


async def test_shutdown_in_a_callback_only_makes_the_request(database: FakeDatabase, clock: FakeClock) -> None:
    lock = fake_lock(database, clock)
    returned = await _inside(lock, "on_acquired", lock.shutdown)
    recorder = Recorder(lock)
    await lock.start()
    await recorder.seen("on_stopped")
    assert returned.is_set()
    assert recorder.calls[-3:] == ["releasing>stopped", "on_released", "on_stopped"]
    await lock.shutdown()


async def test_step_down_in_a_callback_only_makes_the_request(database: FakeDatabase, clock: FakeClock) -> None:
    lock = fake_lock(database, clock)
    returned = await _inside(lock, "on_acquired", lock.step_down)
    recorder = Recorder(lock)
    async with lock:
        await recorder.seen("on_released")
        assert returned.is_set()
        assert lock.state is LockState.FOLLOWER


async def test_shutdown_in_on_stopped_returns_at_once(database: FakeDatabase, clock: FakeClock) -> None:
    lock = fake_lock(database, clock)
    returned = await _inside(lock, "on_stopped", lock.shutdown)
    await lock.start()
    async with limit():
        await lock.shutdown()
    assert returned.is_set()


async def test_on_stopped_is_told_after_the_connection_was_closed(database: FakeDatabase, clock: FakeClock) -> None:
    lock = fake_lock(database, clock)
    recorder = Recorder(lock)
    await lock.start()
    assert await lock.wait_for_leadership()
    closing = database.gate("close")
    stopping = asyncio.create_task(lock.shutdown())
    await closing.reached()
    assert lock._run is not None
    await lock._run.dispatcher.drained()
    assert recorder.calls[-1] == "on_released"
    closing.open()
    await recorder.seen("on_stopped")
    await stopping


async def test_inside_on_lost_the_lock_is_a_follower_already(database: FakeDatabase, clock: FakeClock) -> None:
    lock = fake_lock(database, clock)
    inside: list[tuple[LockState, bool, str]] = []
    lock.on_lost(lambda: inside.append((lock.state, lock.is_leader, str(lock.last_error))))
    recorder = Recorder(lock)
    async with lock:
        assert await lock.wait_for_leadership()
        await _lose(database, clock)
        await recorder.seen("on_lost")
    assert inside == [(LockState.FOLLOWER, False, "the statement failed: gone")]


async def test_callbacks_never_overlap(database: FakeDatabase, clock: FakeClock) -> None:
    lock = fake_lock(database, clock)
    running = 0
    most = 0

    async def callback(*_: object) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _turn in range(5):
            await asyncio.sleep(0)
        running -= 1

    for event in EVENTS:
        getattr(lock, event)(callback)
    async with lock:
        assert await lock.wait_for_leadership()
        await _lose(database, clock)
        await until(lambda: lock.state is LockState.FOLLOWER)
    assert most == 1


async def test_a_callback_that_refuses_to_be_cancelled_does_not_hold_up_a_forced_end(
    database: FakeDatabase, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callbacks, "CLOSE_TIMEOUT_S", 0.01)
    lock = fake_lock(database, clock)
    ended = asyncio.Event()
    begun = asyncio.Event()

    @lock.on_acquired
    async def stubborn() -> None:
        begun.set()
        while not ended.is_set():
            try:
                await ended.wait()
            except asyncio.CancelledError:
                continue

    await lock.start()
    async with limit():
        await begun.wait()
        with pytest.raises(ShutdownError):
            await lock.shutdown(timeout_s=0.01)
    assert database.open_connections() == []
    ended.set()
    await asyncio.sleep(0)


async def test_callbacks_that_had_to_wait_run_in_the_order_of_the_transitions(
    database: FakeDatabase, clock: FakeClock
) -> None:
    lock = fake_lock(database, clock)
    gate = Gate()
    told: list[LockState] = []

    @lock.on_state_change
    async def note(_: LockState, target: LockState) -> None:
        if not told:
            await gate.pass_through()
        told.append(target)

    async with lock:
        assert await lock.wait_for_leadership()  # two more changes are waiting by now
        gate.open()
        await until(lambda: len(told) == 3)
    assert told[:3] == [LockState.FOLLOWER, LockState.ACQUIRING, LockState.LEADER]


def test_the_callbacks_of_the_end_are_heard_when_the_program_ends() -> None:
    """`asyncio.run` cancels the dispatcher together with the lock, so on_released and on_stopped are never told."""
    lock = fake_lock(FakeDatabase())
    recorder = Recorder(lock)

    async def main() -> None:
        await lock.start()
        assert await lock.wait_for_leadership()

    asyncio.run(main())
    assert recorder.calls[-3:] == ["releasing>stopped", "on_released", "on_stopped"]


async def _hang() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("failure", [KeyError("body"), TimeoutError("body"), asyncio.CancelledError("body")], ids=repr)
async def test_a_callback_that_hangs_at_the_exit_does_not_mask_what_the_block_raised(
    database: FakeDatabase, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    monkeypatch.setattr("pgleaderlock.lock.EXIT_TIMEOUT_S", 0.01)
    lock = fake_lock(database, clock)
    lock.on_released(_hang)

    async def block() -> None:
        async with limit(), lock:
            assert await lock.wait_for_leadership()
            raise failure

    with captured_log() as records, pytest.raises(type(failure)) as raised:
        await block()
    assert raised.value is failure
    assert any("did not stop within 0.01 s" in note for note in failure.__notes__)
    assert "shutdown_failed" in {record.event for record in records}  # type: ignore[attr-defined]
    assert database.open_connections() == []


async def test_a_callback_that_hangs_at_the_exit_does_not_undo_a_timeout_around_the_block(
    database: FakeDatabase, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgleaderlock.lock.EXIT_TIMEOUT_S", 0.01)
    lock = fake_lock(database, clock)
    lock.on_released(_hang)
    outer = asyncio.timeout(None)

    async def block() -> None:
        async with outer, lock:
            assert await lock.wait_for_leadership()
            outer.reschedule(0)
            await _hang()

    with pytest.raises(TimeoutError):
        await block()
    assert outer.expired()
