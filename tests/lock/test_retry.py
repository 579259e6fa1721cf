"""Retry strategies: the formulas of the specification by hand, their bounds by search, and broken ones."""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgleaderlock import (
    ConfigurationError,
    DecorrelatedJitter,
    ExponentialBackoff,
    FixedInterval,
    LeaderLock,
    LockState,
    RetryContext,
    RetryStrategy,
)
from support.fakes import FakeClock, FakeDatabase, Recorder, fake_lock, leading, limit, until

seconds = st.floats(0.0, 1e6)
attempts = st.integers(1, 100_000)


def ctx(attempt: int) -> RetryContext:
    return RetryContext(attempt, 0.0)


@pytest.mark.parametrize(
    ("strategy", "delays"),
    [
        (ExponentialBackoff(), [1, 2, 4, 8, 16, 30, 30]),
        (ExponentialBackoff(base_s=0.5, max_s=5, multiplier=3), [0.5, 1.5, 4.5, 5, 5]),
        (ExponentialBackoff(base_s=3, max_s=3), [3, 3, 3]),
        (ExponentialBackoff(multiplier=1), [1, 1, 1]),
        (FixedInterval(), [5, 5, 5]),
        (FixedInterval(0), [0, 0]),
        (FixedInterval(interval_s=0.25), [0.25, 0.25]),
    ],
    ids=repr,
)
def test_the_delays_are_those_of_the_formula(strategy: RetryStrategy, delays: list[float]) -> None:
    assert [strategy.next_delay_s(ctx(attempt)) for attempt in range(1, len(delays) + 1)] == delays


def test_the_defaults_are_those_of_the_specification() -> None:
    backoff, jitter = ExponentialBackoff(), DecorrelatedJitter()
    assert (backoff.base_s, backoff.max_s, backoff.multiplier) == (1.0, 30.0, 2.0)
    assert FixedInterval().interval_s == 5.0
    assert (jitter.base_s, jitter.max_s) == (1.0, 30.0)


@given(bounds=st.tuples(seconds, seconds).map(sorted), multiplier=st.floats(1.0, 1e6), attempt=attempts)
def test_exponential_delays_stay_between_base_and_max(bounds: list[float], multiplier: float, attempt: int) -> None:
    base_s, max_s = bounds
    delay_s = ExponentialBackoff(base_s, max_s, multiplier).next_delay_s(ctx(attempt))
    assert delay_s is not None
    assert base_s <= delay_s <= max_s


@given(bounds=st.tuples(seconds, seconds).map(sorted), seed=st.integers())
def test_jittered_delays_stay_between_base_and_max_and_below_three_times_the_previous(
    bounds: list[float], seed: int
) -> None:
    base_s, max_s = bounds
    strategy = DecorrelatedJitter(base_s, max_s, rng=random.Random(seed))
    previous_s = base_s
    for attempt in range(1, 30):
        delay_s = strategy.next_delay_s(ctx(attempt))
        assert delay_s is not None
        assert base_s <= delay_s <= max_s
        assert delay_s <= max(base_s, previous_s * 3)
        previous_s = delay_s


def test_jitter_draws_between_base_and_three_times_the_previous_delay() -> None:
    drawn: list[tuple[float, float]] = []

    class Highest(random.Random):
        def uniform(self, a: float, b: float) -> float:
            drawn.append((a, b))
            return b

    strategy = DecorrelatedJitter(1.0, 20.0, rng=Highest())
    assert [strategy.next_delay_s(ctx(attempt)) for attempt in (1, 2, 3, 4)] == [3.0, 9.0, 20.0, 20.0]
    assert drawn == [(1.0, 3.0), (1.0, 9.0), (1.0, 27.0), (1.0, 60.0)]


def test_jitter_starts_anew_at_attempt_1() -> None:
    strategy = DecorrelatedJitter(1.0, 1000.0, rng=random.Random(4))
    for attempt in range(1, 20):
        strategy.next_delay_s(ctx(attempt))
    for _ in range(200):
        first = strategy.next_delay_s(ctx(1))
        assert first is not None
        assert first <= 3.0


def test_each_lock_gets_a_jitter_with_a_memory_of_its_own() -> None:
    given_to_both = DecorrelatedJitter(1.0, 1000.0)
    one = fake_lock(FakeDatabase(), retry_strategy=given_to_both)._settings.strategy
    two = fake_lock(FakeDatabase(), retry_strategy=given_to_both)._settings.strategy
    assert isinstance(one, DecorrelatedJitter)
    assert isinstance(two, DecorrelatedJitter)
    assert len({id(given_to_both), id(one), id(two)}) == 3
    assert (one.base_s, one.max_s) == (1.0, 1000.0)
    for attempt in range(1, 20):
        one.next_delay_s(ctx(attempt))
    assert one._previous_s != 1.0
    assert two._previous_s == given_to_both._previous_s == 1.0


WRONG = [-1, -0.001, math.nan, math.inf, -math.inf, True, "1", None, [1]]


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
@pytest.mark.parametrize(
    ("named", "build"),
    [
        ("base_s", lambda value: ExponentialBackoff(base_s=value)),
        ("max_s", lambda value: ExponentialBackoff(max_s=value)),
        ("multiplier", lambda value: ExponentialBackoff(multiplier=value)),
        ("interval_s", lambda value: FixedInterval(interval_s=value)),
        ("base_s", lambda value: DecorrelatedJitter(base_s=value)),
        ("max_s", lambda value: DecorrelatedJitter(max_s=value)),
    ],
)
def test_a_parameter_that_is_no_usable_number_is_refused_by_name(
    named: str, build: Callable[[object], object], wrong: object
) -> None:
    with pytest.raises(ConfigurationError, match=f"^{named}"):
        build(wrong)


@pytest.mark.parametrize("multiplier", [0, 0.5, 0.999])
def test_a_multiplier_that_shrinks_the_delay_is_refused(multiplier: float) -> None:
    with pytest.raises(ConfigurationError, match="multiplier"):
        ExponentialBackoff(multiplier=multiplier)


@pytest.mark.parametrize("build", [ExponentialBackoff, DecorrelatedJitter])
def test_a_base_longer_than_the_maximum_is_refused(build: Callable[[float, float], object]) -> None:
    with pytest.raises(ConfigurationError, match=r"base_s=31.* longer than max_s=30"):
        build(31, 30)


def test_a_base_of_zero_stays_zero() -> None:
    assert ExponentialBackoff(base_s=0).next_delay_s(RetryContext(2000, 0.0, None)) == 0


def test_a_number_too_large_for_a_float_is_refused_clearly() -> None:
    with pytest.raises(ConfigurationError):
        FixedInterval(10**400)


@pytest.mark.parametrize("strategy", [ExponentialBackoff, FixedInterval])
def test_a_strategy_class_instead_of_a_strategy_is_refused(strategy: Any) -> None:
    with pytest.raises(ConfigurationError, match="retry_strategy"):
        LeaderLock("host=h", 1, 2, retry_strategy=strategy)


# --- In a lock


class Scripted:
    """Answers what it is told to, and remembers what it was asked."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)
        self.asked: list[RetryContext] = []

    def next_delay_s(self, context: RetryContext) -> float | None:
        self.asked.append(context)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[return-value]


async def test_a_strategy_that_gives_up_stops_the_lock() -> None:
    database, clock = FakeDatabase(), FakeClock()
    database.script("try", (False,), (False,))
    lock = fake_lock(database, clock, retry_strategy=Scripted(3.0, None))
    recorder = Recorder(lock)
    await lock.start()
    assert await clock.somebody_sleeps() == 3.0
    clock.advance(3.0)
    await recorder.seen("on_stopped")
    assert lock.state is LockState.STOPPED
    assert recorder.calls[-4:] == ["acquiring>follower", "on_acquire_failed", "follower>stopped", "on_stopped"]
    assert database.open_connections() == []


async def test_a_strategy_is_told_attempt_time_and_error_and_begins_again_after_leadership() -> None:
    database, clock = FakeDatabase(), FakeClock()
    strategy = Scripted(4.0, 8.0, 16.0, 32.0)
    database.script("connect", OSError("no route"))
    database.script("try", (False,))
    lock = fake_lock(database, clock, retry_strategy=strategy)
    async with lock:
        await until(lambda: len(strategy.asked) == 1)
        await clock.somebody_sleeps()
        clock.advance(10)
        await until(lambda: len(strategy.asked) == 2)
        await clock.somebody_sleeps()
        clock.advance(8)
        assert await lock.wait_for_leadership()
        await lock.step_down()
        await until(lambda: len(strategy.asked) == 3)
    first, second, third = strategy.asked
    assert (first.attempt, first.elapsed_s) == (1, 0.0)
    assert "no route" in str(first.last_error)
    assert (second.attempt, second.elapsed_s, second.last_error) == (2, 10.0, None)
    assert (third.attempt, third.elapsed_s, third.last_error) == (1, 0.0, None)


@pytest.mark.parametrize(
    "nonsense", [math.nan, math.inf, -1.0, "5", [], RuntimeError("the strategy is broken")], ids=repr
)
async def test_a_strategy_that_fails_is_reported_and_the_lock_goes_on(nonsense: object) -> None:
    database, clock = FakeDatabase(), FakeClock()
    database.script("try", (False,))
    lock = fake_lock(database, clock, retry_strategy=Scripted(nonsense))
    recorder = Recorder(lock)
    async with lock:
        await recorder.seen("on_error")
        assert 0 < await clock.somebody_sleeps() <= 5.0
        clock.advance(5)
        async with limit():
            assert await lock.wait_for_leadership()
    if isinstance(nonsense, Exception):
        assert recorder.errors == [nonsense]
    else:
        assert len(recorder.errors) == 1


async def test_a_reconnect_is_jittered_whatever_the_strategy() -> None:
    delays = set()
    for _ in range(8):
        database, clock = FakeDatabase(), FakeClock()
        database.script("connect", OSError("down"))
        async with fake_lock(database, clock, retry_strategy=FixedInterval(10)):
            delays.add(await clock.somebody_sleeps())
    assert len(delays) > 1
    assert all(10 <= delay <= 12 for delay in delays)


async def test_after_a_step_down_at_least_one_delay_passes_before_the_next_attempt() -> None:
    database, clock = FakeDatabase(), FakeClock()
    lock = fake_lock(database, clock, retry_strategy=FixedInterval(9))
    async with lock:
        assert await lock.wait_for_leadership()
        await lock.step_down()
        assert await clock.somebody_sleeps() == 9.0
        assert database.log.count("try") == 1
        clock.advance(9)
        async with limit():
            assert await lock.wait_for_leadership()


async def test_by_default_a_lock_that_another_session_holds_is_tried_once_a_second() -> None:
    database, clock = FakeDatabase(), FakeClock()
    database.script("try", *[(False,)] * 9)
    lock = fake_lock(database, clock)
    recorder = Recorder(lock)
    async with lock:
        for failures in range(1, 10):
            await recorder.seen("on_acquire_failed", failures)
            assert await clock.somebody_sleeps() == 1.0
            clock.advance(1)
        async with limit():
            assert await lock.wait_for_leadership()


@pytest.mark.parametrize("strategy", [None, ExponentialBackoff()], ids=["default", "exponential"])
async def test_after_a_long_stand_by_the_first_error_has_the_shortest_delay(strategy: RetryStrategy | None) -> None:
    database, clock = FakeDatabase(), FakeClock()
    database.script("try", *[(False,)] * 9, OSError("gone"), OSError("still gone"))
    lock = fake_lock(database, clock, retry_strategy=strategy)
    recorder = Recorder(lock)
    async with lock:
        for failures in range(1, 10):
            await recorder.seen("on_acquire_failed", failures)
            await clock.somebody_sleeps()
            clock.advance(30)
        await recorder.seen("on_error")
        assert 1.0 <= await clock.somebody_sleeps() <= 1.2
        clock.advance(1.2)
        await recorder.seen("on_error", 2)
        assert 2.0 <= await clock.somebody_sleeps() <= 2.4


@pytest.mark.parametrize("strategy", [None, FixedInterval(9)], ids=["default", "every nine seconds"])
async def test_after_a_loss_a_node_waits_as_long_as_a_follower_between_two_tries(
    strategy: RetryStrategy | None,
) -> None:
    turn_s = 1.0 if strategy is None else 9.0
    database, clock = FakeDatabase(), FakeClock()
    async with leading(database, clock, retry_strategy=strategy) as lock:
        recorder = Recorder(lock)
        database.script("probe", OSError("terminating connection due to administrator command"))
        await clock.somebody_sleeps()
        clock.advance(5)
        await recorder.seen("on_lost")
        assert turn_s <= await clock.somebody_sleeps() <= 1.2 * turn_s


def test_anything_with_a_next_delay_s_is_a_strategy() -> None:
    assert isinstance(Scripted(), RetryStrategy)
    assert not isinstance(object(), RetryStrategy)
