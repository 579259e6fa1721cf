"""Leading: `step_down`, `wait_for_leadership`, the trust window of `is_leader`, and what follows a loss."""

import asyncio
import os
import warnings

import pytest

from pgleaderlock import FixedInterval, LeaderLock, LockState, RetryContext
from pgleaderlock._pg.session import SessionIdentity
from pgleaderlock.errors import ConnectionError as LostConnection
from pgleaderlock.keys import KeyPair
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


# --- step_down and losses


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
            clock.advance(2)
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
        clock.advance(2)
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
            clock.advance(2)
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


async def test_the_force_of_a_step_down_does_not_reach_the_next_term(database: FakeDatabase, clock: FakeClock) -> None:
    async with leading(database, clock, retry_strategy=FixedInterval(1)) as lock:
        database.gate("unlock")  # never opened
        async with limit():
            await lock.step_down(timeout_s=0.01)
        await clock.somebody_sleeps()
        clock.advance(2)
        async with limit():
            assert await lock.wait_for_leadership()
        recorder = Recorder(lock)
        await clock.somebody_sleeps()
        clock.advance(5)
        await database.seen("probe")
        await clock.somebody_sleeps()
        assert lock.is_leader
        assert recorder.calls == []


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
        clock.advance(2)
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
        clock.advance(2)
        async with limit():
            assert await two is True


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


async def test_a_connect_that_hangs_does_not_outlast_the_grace(
    database: FakeDatabase, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgleaderlock._lock.borrowed.CONNECT_TIMEOUT_S", 3600)  # only the grace can end it
    async with leading(database, clock, reconnect_grace_s=30) as lock:
        recorder = Recorder(lock)
        gate = database.gate("connect")
        await _fail_probe(database, clock)
        await recorder.seen("leader>reconnecting")
        await clock.somebody_sleeps()
        clock.advance(2)
        await gate.reached()
        clock.advance(30)
        await recorder.seen("on_lost")
        gate.open()
