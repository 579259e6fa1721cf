"""The public methods and properties of `LeaderLock`: what they do, twice, too early, too late and from two sides."""

import asyncio
import contextlib
import inspect
import re
import traceback
from typing import Any

import psycopg
import pytest

from pgleaderlock import (
    ConfigurationError,
    FixedInterval,
    LeaderLock,
    LockState,
    RetryContext,
    ShutdownError,
)
from pgleaderlock.client import AsyncLockClient, LockClient
from pgleaderlock.errors import ConnectionError as LostConnection
from support.fakes import KEYS, FakeClock, FakeDatabase, Gate, Recorder, fake_lock, leading, limit, until

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


def test_an_editor_can_show_every_parameter_with_its_default() -> None:
    for cls in (LeaderLock, LockClient, AsyncLockClient):
        shown = inspect.getdoc(cls.__init__) or ""
        for name, parameter in inspect.signature(cls).parameters.items():
            (said,) = re.findall(rf"^    {name}: ((?:.+\n?)(?:^        .+\n?)*)", shown, re.MULTILINE)
            if parameter.default is not inspect.Parameter.empty:
                assert "Default: " in " ".join(said.split()), (cls, name)
            if name.endswith("_s"):
                assert "in seconds" in " ".join(said.split()), (cls, name)


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


def test_the_default_strategy_backs_off_while_the_database_fails_and_only_then() -> None:
    strategy = LeaderLock("host=h", 1, 2)._settings.strategy
    down = LostConnection("down")
    assert [strategy.next_delay_s(RetryContext(attempt, 0.0, down)) for attempt in (1, 2, 6)] == [1.0, 2.0, 30.0]
    assert [strategy.next_delay_s(RetryContext(attempt, 0.0, None)) for attempt in (1, 2, 6)] == [1.0, 1.0, 1.0]


def test_a_lock_waits_at_the_server_by_default_where_the_session_is_its_own() -> None:
    assert LeaderLock("host=h", 1, 2)._settings.standby_wait_s == 10.0
    assert LeaderLock("host=h", 1, 2, standby_wait_s=0)._settings.standby_wait_s == 0
    assert LeaderLock("host=h", 1, 2, allow_pooler=True)._settings.standby_wait_s == 0
    assert LeaderLock("", 1, 2, connect_fn=FakeDatabase().connect)._settings.standby_wait_s == 0


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


@pytest.mark.parametrize("wrong", [-1, float("nan"), "5"])
@pytest.mark.parametrize("method", ["shutdown", "step_down", "wait_for_leadership"])
async def test_a_timeout_that_means_nothing_is_refused_and_nothing_happens(
    database: FakeDatabase, clock: FakeClock, method: str, wrong: object
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


async def test_an_event_of_another_loop_is_refused_at_the_start(database: FakeDatabase, clock: FakeClock) -> None:
    event = asyncio.Event()

    async def wait_elsewhere() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                await event.wait()

    await asyncio.to_thread(asyncio.run, wait_elsewhere())
    lock = fake_lock(database, clock, shutdown_event=event)
    recorder = Recorder(lock)
    with pytest.raises(ConfigurationError, match="shutdown_event belongs to another event loop"):
        await lock.start()
    assert (lock.state, recorder.calls, database.log) == (STOPPED, [], [])


@pytest.mark.parametrize("ending", ["cancelled", "end of the program"])
def test_a_lock_that_is_cancelled_before_its_first_turn_says_that_it_has_stopped(ending: str) -> None:
    lock = fake_lock(FakeDatabase())
    recorder = Recorder(lock)

    async def main() -> None:
        await lock.start()
        assert lock._task is not None
        if ending == "cancelled":
            lock._task.cancel()
            await asyncio.wait([lock._task])

    asyncio.run(main())
    assert lock.state is STOPPED
    assert recorder.calls == ["stopped>follower", "follower>stopped", "on_stopped"]


@pytest.mark.parametrize("leads", [False, True])
def test_a_lock_whose_loop_was_closed_under_it_starts_again_on_another(leads: bool) -> None:
    database = FakeDatabase()
    lock = fake_lock(database)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(lock.start())
    if leads:
        assert loop.run_until_complete(lock.wait_for_leadership())
    loop.close()

    async def again() -> None:
        async with limit(), lock:
            assert await lock.wait_for_leadership()
            assert len(database.open_connections()) == 1

    asyncio.run(again())
    assert lock.state is STOPPED
    assert database.open_connections() == []


@pytest.mark.parametrize("then", ["start", "shutdown"])
def test_at_the_server_the_lock_of_a_closed_loop_is_free_at_once(dsn: str, then: str) -> None:
    # The lease would free it after an hour.
    lock = LeaderLock(dsn, 30_031, 1, health_interval_s=3600)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(lock.start())
    assert loop.run_until_complete(lock.wait_for_leadership())
    loop.close()

    async def again() -> None:
        await lock.shutdown() if then == "shutdown" else await lock.start()
        async with limit(), LeaderLock(dsn, 30_031, 1) if then == "shutdown" else lock as free:
            assert await free.wait_for_leadership()

    asyncio.run(again())
    assert lock.state is STOPPED


async def test_a_lock_with_a_connect_fn_needs_no_dsn(database: FakeDatabase) -> None:
    async with limit(), LeaderLock.for_name(None, "billing", connect_fn=database.connect) as lock:
        assert await lock.wait_for_leadership()
    with pytest.raises(ConfigurationError, match="dsn is missing: give one, or connect_fn"):
        LeaderLock(None, 7, 11)


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

    with pytest.raises(KeyError) as caught:
        await block()
    assert "did not stop within 0.01 s" in "".join(traceback.format_exception(caught.value))
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
        ({"allow_pooler": True, "standby_wait_s": 1}, "behind a pooler"),
        ({"dsn": 5}, "dsn must be a string .*not int"),
        ({"dsn": None}, "dsn is missing"),
        ({"dsn": b"host=h"}, "dsn must be a string .*not bytes"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        LeaderLock(options.pop("dsn", "host=h"), 1, 2, **options)


def test_the_defaults_of_lease_and_timeout_follow_the_interval() -> None:
    lock = LeaderLock("host=h", 1, 2, health_interval_s=4)
    assert (lock._timing.health_timeout_s, lock._timing.lease_s, lock._settings.trust_s) == (4, 12, 8)


async def test_for_name_passes_its_options_on(database: FakeDatabase) -> None:
    lock = LeaderLock.for_name("", "billing", connect_fn=database.connect, health_interval_s=2, auto_reacquire=False)
    async with lock:
        assert await lock.wait_for_leadership()
        await lock.step_down()
        assert lock.state is STOPPED
    assert lock._settings.health_interval_s == 2


@pytest.mark.parametrize("wrong", [None, "yes", "no", 2])
@pytest.mark.parametrize("setting", ["auto_reacquire", "allow_pooler"])
def test_a_switch_that_is_no_bool_is_refused(setting: str, wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match=setting):
        LeaderLock("host=h", 1, 2, **{setting: wrong})


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
