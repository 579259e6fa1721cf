"""The public methods and properties of `LeaderLock`: what they do, twice, too early, too late and from two sides."""

import asyncio
import inspect
import os
import traceback
import warnings
from typing import Any

import psycopg
import pytest

from fakes import KEYS, FakeClock, FakeDatabase, Gate, Recorder, fake_lock, leading, limit, until
from pgleaderlock import (
    ConfigurationError,
    ExponentialBackoff,
    FixedInterval,
    LeaderLock,
    LockState,
    PgLeaderLockError,
    RetryContext,
    ShutdownError,
)
from pgleaderlock._session import SessionIdentity
from pgleaderlock.errors import ConnectionError as LostConnection
from pgleaderlock.keys import KeyPair

STOPPED, FOLLOWER, LEADER = LockState.STOPPED, LockState.FOLLOWER, LockState.LEADER


@pytest.fixture
def database() -> FakeDatabase:
    return FakeDatabase()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


async def _fail_probe(database: FakeDatabase, clock: FakeClock) -> None:
    database.script("probe", OSError("gone"))
    await clock.somebody_sleeps()
    clock.advance(5)


# --- The contract of the specification


def test_the_constructor_has_the_names_and_defaults_of_the_specification() -> None:
    parameters = inspect.signature(LeaderLock).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    assert list(parameters)[:3] == ["dsn", "key1", "key2"]
    expected = {
        "retry_strategy": None,
        "health_interval_s": 5.0,
        "reconnect_grace_s": None,
        "auto_reacquire": True,
        "shutdown_event": None,
        "connect_fn": None,
    }
    assert {name: defaults[name] for name in expected} == expected
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in expected)


def test_the_default_strategy_is_exponential_backoff() -> None:
    assert LeaderLock("host=h", 1, 2)._settings.strategy == ExponentialBackoff(1.0, 30.0, 2.0)


def test_the_states_have_the_values_of_the_specification() -> None:
    assert {state.name: state.value for state in LockState} == {
        "STOPPED": "stopped",
        "FOLLOWER": "follower",
        "ACQUIRING": "acquiring",
        "LEADER": "leader",
        "RECONNECTING": "reconnecting",
        "RELEASING": "releasing",
    }


@pytest.mark.parametrize("name", ["state", "is_leader", "last_error"])
def test_the_properties_are_read_only(database: FakeDatabase, name: str) -> None:
    with pytest.raises(AttributeError):
        setattr(fake_lock(database), name, None)


def test_a_lock_can_be_made_outside_of_any_event_loop() -> None:
    lock = LeaderLock("host=h", *KEYS)
    assert (lock.state, lock.is_leader, lock.last_error) == (STOPPED, False, None)


# --- start


async def test_start_is_idempotent(database: FakeDatabase, clock: FakeClock) -> None:
    async with leading(database, clock) as lock:
        task = lock._task
        await lock.start()
        await lock.start()
        assert lock._task is task
        assert database.log == ["connect", "try"]


async def test_start_from_two_tasks_at_once_starts_one_life(database: FakeDatabase, clock: FakeClock) -> None:
    lock = fake_lock(database, clock)
    recorder = Recorder(lock)
    await asyncio.gather(*(lock.start() for _ in range(5)))
    assert await lock.wait_for_leadership()
    await lock.shutdown()
    assert database.log == ["connect", "try", "unlock", "close"]
    assert recorder.calls.count("stopped>follower") == 1


async def test_start_after_stopped_starts_again(database: FakeDatabase, clock: FakeClock) -> None:
    lock = fake_lock(database, clock)
    recorder = Recorder(lock)
    for _ in range(3):
        async with lock:
            assert await lock.wait_for_leadership()
        assert lock.state is STOPPED
    assert recorder.calls.count("on_acquired") == recorder.calls.count("on_stopped") == 3
    assert database.open_connections() == []


async def test_start_from_two_tasks_while_the_last_life_is_ending_starts_one_life(
    database: FakeDatabase, clock: FakeClock
) -> None:
    lock = fake_lock(database, clock)
    gate = Gate()
    lock.on_stopped(gate.pass_through)
    await lock.start()
    ending = asyncio.create_task(lock.shutdown())
    await gate.reached()
    assert lock.state is STOPPED
    starting = [asyncio.create_task(lock.start()) for _ in range(3)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert lock.state is STOPPED
    gate.open()
    async with limit():
        await asyncio.gather(ending, *starting)
        assert await lock.wait_for_leadership()
        assert len(database.open_connections()) == 1
        await lock.shutdown()


async def test_start_from_on_stopped_starts_again(database: FakeDatabase, clock: FakeClock) -> None:
    lock = fake_lock(database, clock)
    recorder = Recorder(lock)
    again = [True]

    @lock.on_stopped
    async def restart() -> None:
        if again and again.pop():
            await lock.start()

    await lock.start()
    assert await lock.wait_for_leadership()
    await lock.shutdown()
    await recorder.seen("on_acquired", 2)
    assert lock.is_leader
    await lock.shutdown()
    assert lock.state is STOPPED
    assert database.open_connections() == []


async def test_last_error_is_forgotten_at_the_next_start(database: FakeDatabase, clock: FakeClock) -> None:
    lock = fake_lock(database, clock)
    recorder = Recorder(lock)
    database.script("connect", OSError("no route"))
    async with lock:
        await recorder.seen("on_error")
        assert "no route" in str(lock.last_error)
    assert "no route" in str(lock.last_error)
    async with lock:
        assert lock.last_error is None


# --- shutdown


async def test_shutdown_before_start_does_nothing(database: FakeDatabase) -> None:
    lock = fake_lock(database)
    recorder = Recorder(lock)
    await lock.shutdown()
    await lock.shutdown(timeout_s=0)
    assert lock.state is STOPPED
    assert recorder.calls == []


async def test_shutdown_is_idempotent_one_after_the_other_and_side_by_side(
    database: FakeDatabase, clock: FakeClock
) -> None:
    lock = fake_lock(database, clock)
    recorder = Recorder(lock)
    await lock.start()
    assert await lock.wait_for_leadership()
    async with limit():
        await asyncio.gather(*(lock.shutdown() for _ in range(5)))
        await lock.shutdown()
    assert recorder.calls.count("on_stopped") == recorder.calls.count("on_released") == 1
    assert database.log == ["connect", "try", "unlock", "close"]


async def test_shutdown_right_after_start_leaves_nothing(database: FakeDatabase, clock: FakeClock) -> None:
    before = asyncio.all_tasks()
    lock = fake_lock(database, clock)
    await lock.start()
    await lock.shutdown()
    assert lock.state is STOPPED
    assert database.open_connections() == []
    assert asyncio.all_tasks() == before


async def test_a_shutdown_that_runs_out_of_time_raises_and_holds_nothing(
    database: FakeDatabase, clock: FakeClock
) -> None:
    lock = fake_lock(database, clock)
    recorder = Recorder(lock)
    await lock.start()
    assert await lock.wait_for_leadership()
    before = asyncio.all_tasks() - {lock._task}
    database.gate("unlock")  # never opened: the server does not answer
    with pytest.raises(ShutdownError, match=r"0\.01 s"):
        await lock.shutdown(timeout_s=0.01)
    assert lock.state is STOPPED
    assert database.open_connections() == []
    assert database.holder() is None
    assert recorder.calls[-3:] == ["releasing>stopped", "on_released", "on_stopped"]
    assert asyncio.all_tasks() <= before


async def test_a_cancelled_shutdown_still_stops_the_lock(database: FakeDatabase, clock: FakeClock) -> None:
    async with leading(database, clock) as lock:
        recorder = Recorder(lock)
        gate = database.gate("unlock")
        asking = asyncio.create_task(lock.shutdown())
        await gate.reached()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        gate.open()
        await recorder.seen("on_stopped")
    assert database.open_connections() == []


@pytest.mark.parametrize("kind", ["connect", "try"])
async def test_shutdown_does_not_wait_for_a_server_that_does_not_answer(
    database: FakeDatabase, clock: FakeClock, kind: str
) -> None:
    gate = database.gate(kind)
    lock = fake_lock(database, clock)
    await lock.start()
    await gate.reached()
    async with limit():
        await lock.shutdown()
    assert lock.state is STOPPED
    assert database.open_connections() == []


def test_a_lock_that_is_running_when_the_program_ends_lets_go(database: FakeDatabase) -> None:
    lock = fake_lock(database)

    async def main() -> None:
        await lock.start()
        assert await lock.wait_for_leadership()

    asyncio.run(main())
    assert lock.state is STOPPED
    assert database.open_connections() == []


def test_a_lock_can_be_used_again_in_another_event_loop() -> None:
    async def main() -> bool:
        async with lock:
            return await lock.wait_for_leadership()

    databases = [FakeDatabase(), FakeDatabase()]
    current = iter(databases)

    async def connect() -> Any:
        return await next(current).connect()

    lock = LeaderLock("", *KEYS, connect_fn=connect)
    assert asyncio.run(main())
    assert asyncio.run(main())
    assert [database.log for database in databases] == [["connect", "try", "unlock", "close"]] * 2


# --- step_down


async def test_step_down_when_not_leading_does_nothing(database: FakeDatabase, clock: FakeClock) -> None:
    lock = fake_lock(database, clock)
    await lock.step_down()
    database.script("try", (False,))
    recorder = Recorder(lock)
    async with lock:
        await recorder.seen("on_acquire_failed")
        await clock.somebody_sleeps()
        await lock.step_down()
        clock.advance(5)
        assert await lock.wait_for_leadership()  # the request of a follower does not end a later term
        for _ in range(50):
            await asyncio.sleep(0)
        assert lock.is_leader


async def test_step_down_returns_when_the_lock_is_free(database: FakeDatabase, clock: FakeClock) -> None:
    async with leading(database, clock) as lock:
        await lock.step_down()
        assert database.holder() is None
        assert lock.state is FOLLOWER


async def test_step_down_lets_another_node_win(database: FakeDatabase, clock: FakeClock) -> None:
    async with leading(database, clock, retry_strategy=FixedInterval(10)) as one:
        two = fake_lock(database, clock, retry_strategy=FixedInterval(1))
        async with two:
            await until(lambda: two.state is FOLLOWER and 1.0 in clock.waits_s())
            await one.step_down()
            clock.advance(1)
            async with limit():
                assert await two.wait_for_leadership()
            assert not one.is_leader


async def test_a_step_down_that_runs_out_of_time_frees_the_lock_by_force(
    database: FakeDatabase, clock: FakeClock
) -> None:
    async with leading(database, clock, retry_strategy=FixedInterval(1)) as lock:
        database.gate("unlock")  # never opened
        async with limit():
            await lock.step_down(timeout_s=0.01)
        assert database.holder() is None
        assert database.open_connections() == []
        assert lock.state is FOLLOWER
        await clock.somebody_sleeps()
        clock.advance(1)
        async with limit():
            assert await lock.wait_for_leadership()  # and it competes again
        await clock.somebody_sleeps()
        clock.advance(5)
        await database.seen("probe")  # the force was meant for the last term only: this probe is not cut off
        await clock.somebody_sleeps()
        assert lock.is_leader


async def test_a_step_down_during_a_probe_that_hangs_frees_the_lock_by_force(
    database: FakeDatabase, clock: FakeClock
) -> None:
    async with leading(database, clock) as lock:
        gate = database.gate("probe")
        await clock.somebody_sleeps()
        clock.advance(5)
        await gate.reached()
        async with limit():
            await lock.step_down(timeout_s=0.01)
        assert database.holder() is None


async def test_step_down_without_auto_reacquire_stops(database: FakeDatabase, clock: FakeClock) -> None:
    lock = fake_lock(database, clock, auto_reacquire=False)
    recorder = Recorder(lock)
    await lock.start()
    assert await lock.wait_for_leadership()
    await lock.step_down()
    assert lock.state is STOPPED
    await recorder.seen("on_stopped")
    assert recorder.calls[-3:] == ["releasing>stopped", "on_released", "on_stopped"]
    await lock.shutdown()


async def test_a_loss_without_auto_reacquire_stops_and_says_why(database: FakeDatabase, clock: FakeClock) -> None:
    lock = fake_lock(database, clock, auto_reacquire=False)
    recorder = Recorder(lock)
    await lock.start()
    assert await lock.wait_for_leadership()
    await _fail_probe(database, clock)
    await recorder.seen("on_stopped")
    assert lock.state is STOPPED
    assert "gone" in str(lock.last_error)
    assert database.open_connections() == []


async def test_a_lock_without_auto_reacquire_still_waits_for_its_first_turn(
    database: FakeDatabase, clock: FakeClock
) -> None:
    database.script("try", (False,), (False,))
    async with fake_lock(database, clock, auto_reacquire=False, retry_strategy=FixedInterval(1)) as lock:
        for tries in (1, 2):
            await database.seen("try", tries)
            await clock.somebody_sleeps()
            clock.advance(1)
        async with limit():
            assert await lock.wait_for_leadership()


async def test_a_leader_never_takes_the_lock_a_second_time(database: FakeDatabase, clock: FakeClock) -> None:
    async with leading(database, clock) as lock:
        for probes in range(1, 6):
            await clock.somebody_sleeps()
            clock.advance(5)
            await database.seen("probe", probes)
        await lock.start()
        assert database.log == ["connect", "try", *["probe"] * 5]


# --- wait_for_leadership


async def test_wait_for_leadership_says_no_when_its_time_is_over(database: FakeDatabase, clock: FakeClock) -> None:
    database.script("try", (False,))
    async with fake_lock(database, clock) as lock:
        assert await lock.wait_for_leadership(timeout_s=0.01) is False
        assert await lock.wait_for_leadership(timeout_s=0) is False


async def test_wait_for_leadership_says_yes_at_once_when_leading(database: FakeDatabase, clock: FakeClock) -> None:
    async with leading(database, clock) as lock:
        assert await lock.wait_for_leadership(timeout_s=0) is True


async def test_wait_for_leadership_says_no_as_soon_as_the_lock_stops(database: FakeDatabase, clock: FakeClock) -> None:
    lock = fake_lock(database, clock)
    async with limit():
        assert await lock.wait_for_leadership() is False  # it never began
        database.script("try", (False,))
        await lock.start()
        waiting = [asyncio.create_task(lock.wait_for_leadership()) for _ in range(3)]
        await clock.somebody_sleeps()
        await lock.shutdown()
        assert await asyncio.gather(*waiting) == [False] * 3


async def test_wait_for_leadership_says_no_when_the_strategy_gives_up(database: FakeDatabase, clock: FakeClock) -> None:
    class GiveUp:
        def next_delay_s(self, ctx: RetryContext) -> float | None:
            return None

    database.script("connect", OSError("no route"))
    lock = fake_lock(database, clock, retry_strategy=GiveUp())
    await lock.start()
    async with limit():
        assert await lock.wait_for_leadership() is False
    assert "no route" in str(lock.last_error)
    await lock.shutdown()


async def test_a_cancelled_wait_does_not_disturb_the_others(database: FakeDatabase, clock: FakeClock) -> None:
    database.script("try", (False,))
    async with fake_lock(database, clock, retry_strategy=FixedInterval(1)) as lock:
        one, two = (asyncio.create_task(lock.wait_for_leadership()) for _ in range(2))
        await clock.somebody_sleeps()
        one.cancel()
        await asyncio.wait([one])
        clock.advance(1)
        async with limit():
            assert await two is True


@pytest.mark.parametrize("wrong", [-1, float("nan")])
@pytest.mark.parametrize("method", ["shutdown", "step_down", "wait_for_leadership"])
async def test_a_timeout_that_means_nothing_is_refused_and_nothing_happens(
    database: FakeDatabase, clock: FakeClock, method: str, wrong: float
) -> None:
    async with leading(database, clock) as lock:
        with pytest.raises(ConfigurationError, match="timeout_s"):
            await getattr(lock, method)(timeout_s=wrong)
        assert lock.is_leader


# --- shutdown_event


async def test_the_external_event_stops_a_leader(database: FakeDatabase, clock: FakeClock) -> None:
    event = asyncio.Event()
    lock = fake_lock(database, clock, shutdown_event=event)
    recorder = Recorder(lock)
    await lock.start()
    assert await lock.wait_for_leadership()
    event.set()
    await recorder.seen("on_stopped")
    assert recorder.calls[-4:] == ["leader>releasing", "releasing>stopped", "on_released", "on_stopped"]
    assert database.log == ["connect", "try", "unlock", "close"]


async def test_the_external_event_interrupts_a_wait(database: FakeDatabase, clock: FakeClock) -> None:
    event = asyncio.Event()
    database.script("try", (False,))
    lock = fake_lock(database, clock, shutdown_event=event)
    recorder = Recorder(lock)
    await lock.start()
    await clock.somebody_sleeps()
    event.set()
    await recorder.seen("on_stopped")
    assert lock.state is STOPPED


async def test_an_external_event_that_was_set_before_start_stops_at_once(
    database: FakeDatabase, clock: FakeClock
) -> None:
    event = asyncio.Event()
    event.set()
    lock = fake_lock(database, clock, shutdown_event=event)
    recorder = Recorder(lock)
    await lock.start()
    await recorder.seen("on_stopped")
    assert "on_acquired" not in recorder.calls
    assert database.holder() is None
    assert database.open_connections() == []


async def test_shutdown_does_not_set_the_external_event(database: FakeDatabase, clock: FakeClock) -> None:
    event = asyncio.Event()
    async with leading(database, clock, shutdown_event=event):
        pass
    assert not event.is_set()


async def test_no_task_is_left_when_shutdown_of_a_lock_with_an_external_event_returns(
    database: FakeDatabase, clock: FakeClock
) -> None:
    before = asyncio.all_tasks()
    async with leading(database, clock, shutdown_event=asyncio.Event()):
        assert len(asyncio.all_tasks() - before) >= 3
    assert asyncio.all_tasks() == before


async def test_one_event_stops_many_locks(database: FakeDatabase, clock: FakeClock) -> None:
    event = asyncio.Event()
    locks = [fake_lock(database, clock, shutdown_event=event) for _ in range(5)]
    recorders = [Recorder(lock) for lock in locks]
    for lock in locks:
        await lock.start()
    await database.seen("try", 5)
    event.set()
    for recorder in recorders:
        await recorder.seen("on_stopped")
    assert database.open_connections() == []


# --- is_leader


async def test_a_leader_whose_trust_window_is_past_says_no_in_its_first_instruction(
    database: FakeDatabase, clock: FakeClock
) -> None:
    async with leading(database, clock, health_interval_s=5, health_timeout_s=2) as lock:
        clock.jump(6.999)
        assert lock.is_leader
        clock.jump(0.001)
        assert lock.state is LEADER
        assert not lock.is_leader


async def test_a_probe_extends_trust_from_before_it_was_sent(database: FakeDatabase, clock: FakeClock) -> None:
    async with leading(database, clock, health_interval_s=5, health_timeout_s=2) as lock:
        gate = database.gate("probe")
        await clock.somebody_sleeps()
        clock.advance(5)
        await gate.reached()
        clock.jump(1.5)  # the answer is on its way for so long
        gate.open()
        await clock.somebody_sleeps()
        assert lock.is_leader
        clock.jump(5.499)
        assert lock.is_leader
        clock.jump(0.001)
        assert not lock.is_leader


async def test_an_answer_that_comes_after_the_trust_window_is_no_answer(
    database: FakeDatabase, clock: FakeClock
) -> None:
    async with leading(database, clock, health_interval_s=5, health_timeout_s=2) as lock:
        recorder = Recorder(lock)
        gate = database.gate("probe")
        await clock.somebody_sleeps()
        clock.advance(5)
        await gate.reached()
        clock.jump(7)
        gate.open()
        await recorder.seen("on_lost")
        assert "later than 7 s" in str(lock.last_error)


async def test_a_grant_that_comes_after_the_trust_window_is_not_believed(
    database: FakeDatabase, clock: FakeClock
) -> None:
    gate = database.gate("try")
    lock = fake_lock(database, clock, health_interval_s=5, health_timeout_s=2)
    recorder = Recorder(lock)
    async with lock:
        await gate.reached()
        clock.jump(7)
        gate.open()
        await recorder.seen("on_error")
        assert "on_acquired" not in recorder.calls
        await until(lambda: database.holder() is None)


async def test_a_forked_child_leads_nothing(database: FakeDatabase, clock: FakeClock) -> None:
    async with leading(database, clock) as lock:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # test processes have threads; the child only exits
            child = os.fork()
        if child == 0:
            os._exit(17 if not lock.is_leader and lock.state is STOPPED else 18)
        _, status = os.waitpid(child, 0)  # noqa: ASYNC222  # the child has exited by its next instruction
        assert os.waitstatus_to_exitcode(status) == 17
        assert lock.is_leader


# --- async with


async def test_an_exception_of_the_block_comes_through_and_the_lock_is_released(
    database: FakeDatabase, clock: FakeClock
) -> None:
    error = RuntimeError("the block is broken")
    lock = fake_lock(database, clock)

    async def block() -> None:
        async with lock as entered:
            assert entered is lock
            await lock.wait_for_leadership()
            raise error

    with pytest.raises(RuntimeError) as caught:
        await block()
    assert caught.value is error
    assert lock.state is STOPPED
    assert database.log == ["connect", "try", "unlock", "close"]


async def test_an_exception_of_the_block_is_not_held_up_for_ever(
    database: FakeDatabase, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgleaderlock.lock.EXIT_TIMEOUT_S", 0.01)
    lock = fake_lock(database, clock)

    async def block() -> None:
        async with limit(), lock:
            await lock.wait_for_leadership()
            database.gate("unlock")
            raise KeyError("the block is broken")

    with pytest.raises(PgLeaderLockError) as caught:
        await block()
    assert "the block is broken" in "".join(traceback.format_exception(caught.value))
    assert database.open_connections() == []


async def test_a_cancelled_block_releases_the_lock(database: FakeDatabase, clock: FakeClock) -> None:
    lock = fake_lock(database, clock)

    async def block() -> None:
        async with lock:
            await asyncio.get_running_loop().create_future()

    task = asyncio.create_task(block())
    await database.seen("try")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert lock.state is STOPPED
    assert database.open_connections() == []


# --- Settings that contradict each other


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"health_interval_s": 0}, "health_interval_s=0"),
        ({"health_interval_s": -1}, "health_interval_s=-1"),
        ({"health_interval_s": float("nan")}, "health_interval_s=nan"),
        ({"health_interval_s": float("inf")}, "health_interval_s=inf"),
        ({"health_interval_s": "5"}, "health_interval_s must be a number"),
        ({"health_interval_s": True}, "health_interval_s must be a number"),
        ({"health_interval_s": None}, "health_interval_s must be a number"),
        ({"health_timeout_s": 0}, "health_timeout_s=0"),
        ({"health_timeout_s": "1"}, "health_timeout_s must be a number"),
        ({"reconnect_grace_s": 0}, "reconnect_grace_s=0"),
        ({"reconnect_grace_s": -3}, "reconnect_grace_s=-3"),
        ({"reconnect_grace_s": "3"}, "reconnect_grace_s must be a number"),
        ({"session_lease_s": 10}, "session_lease_s=10 must be longer than health_interval_s"),
        ({"session_lease_s": 4, "health_interval_s": 2, "health_timeout_s": 2}, "session_lease_s=4 must be longer"),
        ({"session_lease_s": 3_000_000}, "session_lease_s=3e[+]06 is too long"),
        ({"health_timeout_s": 10}, "session_lease_s=15 must be longer than .* health_timeout_s = 15"),
        ({"standby_wait_s": -1}, "standby_wait_s=-1"),
        ({"standby_wait_s": "1"}, "standby_wait_s must be a number"),
        ({"retry_strategy": 5}, "retry_strategy"),
        ({"retry_strategy": object()}, "retry_strategy"),
        ({"shutdown_event": object()}, "shutdown_event must be an asyncio.Event"),
        ({"connect_fn": 5}, "connect_fn must be an async function, not int"),
        ({"connect_fn": FakeDatabase.connect, "standby_wait_s": 1}, "standby_wait_s"),
        ({"dsn": 5}, "dsn must be a string .*not int"),
        ({"dsn": None}, "dsn must be a string .*not NoneType"),
        ({"dsn": b"host=h"}, "dsn must be a string .*not bytes"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        LeaderLock(options.pop("dsn", "host=h"), 1, 2, **options)


def test_the_defaults_of_lease_and_timeout_follow_the_interval() -> None:
    lock = LeaderLock("host=h", 1, 2, health_interval_s=4)
    assert (lock._timeout_s, lock._lease_s, lock._settings.trust_s) == (4, 12, 8)


async def test_for_name_passes_its_options_on(database: FakeDatabase) -> None:
    lock = LeaderLock.for_name("", "billing", connect_fn=database.connect, health_interval_s=2, auto_reacquire=False)
    async with lock:
        assert await lock.wait_for_leadership()
        await lock.step_down()
        assert lock.state is STOPPED
    assert lock._settings.health_interval_s == 2


# --- On a real server


async def test_a_named_lock_and_its_keys_exclude_each_other(dsn: str) -> None:
    async with LeaderLock.for_name(dsn, "test_lock_api") as one, limit():
        assert await one.wait_for_leadership()
        two = LeaderLock.for_name(dsn, "test_lock_api")
        recorder = Recorder(two)
        async with two:
            await recorder.seen("on_acquire_failed")
            assert not two.is_leader


async def test_a_shutdown_that_runs_out_of_time_frees_the_lock_at_the_server(dsn: str) -> None:
    lock = LeaderLock.for_name(dsn, "test_forced")
    gate = Gate()
    lock.on_acquired(gate.pass_through)
    await lock.start()
    await gate.reached()
    with pytest.raises(ShutdownError):
        await lock.shutdown(timeout_s=0.01)
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as admin:

        async def free() -> bool:
            row = await (await admin.execute("SELECT pg_try_advisory_lock(%s, %s)", lock._settings.keys)).fetchone()
            return row == (True,)

        async with limit():
            while not await free():  # a server sends no event for this
                await asyncio.sleep(0)


async def test_a_connect_that_hangs_does_not_outlast_the_grace(
    database: FakeDatabase, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgleaderlock._borrowed.CONNECT_TIMEOUT_S", 3600)  # only the grace can end it
    async with leading(database, clock, reconnect_grace_s=30) as lock:
        recorder = Recorder(lock)
        gate = database.gate("connect")
        await _fail_probe(database, clock)
        await recorder.seen("leader>reconnecting")
        await clock.somebody_sleeps()
        clock.advance(1)
        await gate.reached()
        clock.advance(30)
        await recorder.seen("on_lost")
        gate.open()


class SlowGrant:
    """A session whose lock is granted at the server three seconds after the slice was sent."""

    identity: SessionIdentity | None = None
    identified = True

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock

    async def take(self, keys: KeyPair) -> bool:
        return False

    async def wait(self, keys: KeyPair, wait_s: float) -> bool:
        self._clock.jump(3)
        return True

    async def probe(self, keys: KeyPair) -> None: ...

    async def unlock(self, keys: KeyPair) -> None: ...

    async def end_zombie(self, zombie: SessionIdentity) -> bool:
        return False

    async def lost(self) -> LostConnection:
        never: asyncio.Future[LostConnection] = asyncio.get_running_loop().create_future()
        return await never

    async def close(self) -> None: ...


async def test_a_grant_at_the_server_is_trusted_from_before_its_slice_was_sent(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = LeaderLock("host=h", *KEYS, health_interval_s=5, health_timeout_s=2, standby_wait_s=60)
    lock._clock = clock

    async def connect() -> SlowGrant:
        return SlowGrant(clock)

    monkeypatch.setattr(lock, "_connect", connect)
    async with lock:
        assert await lock.wait_for_leadership()
        clock.jump(3.999)
        assert lock.is_leader
        clock.jump(0.001)
        assert not lock.is_leader


async def test_the_force_of_a_step_down_does_not_reach_the_next_term(database: FakeDatabase, clock: FakeClock) -> None:
    async with leading(database, clock, retry_strategy=FixedInterval(1)) as lock:
        database.gate("unlock")  # never opened
        async with limit():
            await lock.step_down(timeout_s=0.01)
        await clock.somebody_sleeps()
        clock.advance(1)
        async with limit():
            assert await lock.wait_for_leadership()
        recorder = Recorder(lock)
        await clock.somebody_sleeps()
        clock.advance(5)
        await database.seen("probe")
        await clock.somebody_sleeps()
        assert lock.is_leader
        assert recorder.calls == []
