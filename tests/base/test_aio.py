"""The one way to wait for the first of several things: the others have ended, and nothing of theirs is lost."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from pgleaderlock._base.aio import any_done, cancel_and_wait, first_of, within
from support.fakes import limit, until


@pytest.fixture(autouse=True)
async def no_task_is_left() -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield
    assert asyncio.all_tasks() - before <= {asyncio.current_task()}


class Thing:
    """Waits until it is told to end, and says what has become of it."""

    def __init__(self, result: object = None, *, on_cancel: object = None) -> None:
        self.go = asyncio.Event()
        self.began = asyncio.Event()
        self.cancelled = 0
        self.clean = asyncio.Event()
        self.clean.set()
        self._result = result
        self._on_cancel = on_cancel

    async def run(self) -> object:
        self.began.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            await self.clean.wait()
            if self._on_cancel is None:
                raise
            return _outcome(self._on_cancel)
        return _outcome(self._result)


def _outcome(value: object) -> object:
    if isinstance(value, BaseException):
        raise value
    return value


async def test_the_first_gives_its_result_and_the_others_have_ended_when_it_returns() -> None:
    slow, quick = Thing(), Thing("won")
    slow.clean.clear()
    racing = asyncio.ensure_future(first_of(slow.run(), quick.run()))
    await quick.began.wait()
    quick.go.set()
    await until(lambda: slow.cancelled == 1)
    assert not racing.done()
    slow.clean.set()
    async with limit():
        loser, winner = await racing
    assert loser.cancelled()
    assert winner.result() == "won"


async def test_two_that_end_in_one_turn_both_give_their_results() -> None:
    one, two = Thing(1), Thing(2)
    one.go.set()
    two.go.set()
    assert [future.result() for future in await first_of(one.run(), two.run())] == [1, 2]


async def test_one_that_returns_although_it_was_cancelled_gives_its_result() -> None:
    late, quick = Thing(on_cancel="late"), Thing("quick")
    quick.go.set()
    assert [future.result() for future in await first_of(late.run(), quick.run())] == ["late", "quick"]


@pytest.mark.parametrize("when", ["first", "when it is cancelled"])
async def test_an_exception_is_raised_whether_it_ended_the_wait_or_came_of_the_cancellation(when: str) -> None:
    error = OSError("gone")
    failing = Thing(error) if when == "first" else Thing(on_cancel=error)
    quick = Thing("quick")
    (failing if when == "first" else quick).go.set()
    with pytest.raises(OSError, match="gone") as caught:
        await first_of(failing.run(), quick.run())
    assert caught.value is error


async def test_two_exceptions_are_both_raised() -> None:
    one, two = OSError("one"), ValueError("two")
    first, second = Thing(one), Thing(on_cancel=two)
    first.go.set()
    with pytest.raises(ExceptionGroup) as caught:
        await first_of(first.run(), second.run())
    assert caught.value.exceptions == (one, two)


async def test_one_that_was_cancelled_by_somebody_else_ends_the_wait() -> None:
    other = Thing()
    alone = asyncio.ensure_future(Thing().run())
    racing = asyncio.ensure_future(first_of(alone, other.run()))
    await other.began.wait()
    alone.cancel()
    async with limit():
        assert all(future.cancelled() for future in await racing)


async def test_a_shielded_future_goes_on() -> None:
    shared: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    quick = Thing()
    quick.go.set()
    await first_of(asyncio.shield(shared), quick.run())
    assert not shared.done()


async def test_a_caller_that_is_cancelled_waits_for_all_of_them_and_a_result_stays_with_its_future() -> None:
    late, other = Thing(on_cancel="got it all the same"), Thing()
    late.clean.clear()
    future = asyncio.ensure_future(late.run())
    racing = asyncio.ensure_future(first_of(future, other.run()))
    await other.began.wait()
    racing.cancel()
    await until(lambda: late.cancelled == 1)
    assert not racing.done()
    late.clean.set()
    async with limit():
        await asyncio.wait([racing])
    assert racing.cancelled()
    assert future.result() == "got it all the same"
    assert other.cancelled == 1


async def test_a_second_cancellation_of_the_caller_reaches_what_is_still_cleaning_up() -> None:
    stuck = Thing()
    stuck.clean.clear()  # its clean-up never ends by itself
    task = asyncio.ensure_future(stuck.run())
    await stuck.began.wait()
    ending = asyncio.ensure_future(cancel_and_wait(task))
    await until(lambda: stuck.cancelled == 1)
    assert not ending.done()
    ending.cancel()
    async with limit():
        await asyncio.wait([ending])
    assert ending.cancelled()
    assert task.cancelled()


async def test_what_has_ended_keeps_its_result_and_its_exception() -> None:
    error = OSError("gone")
    things = [Thing("result"), Thing(error), Thing()]
    tasks = [asyncio.ensure_future(thing.run()) for thing in things]
    for thing in things[:2]:
        thing.go.set()
    await until(lambda: [task.done() for task in tasks] == [True, True, False])
    await cancel_and_wait(*tasks)
    assert (tasks[0].result(), tasks[1].exception(), tasks[2].cancelled()) == ("result", error, True)


async def test_any_done_returns_at_the_first_end_or_when_the_time_is_up_and_cancels_nothing() -> None:
    slow, quick = Thing("slow"), Thing("quick")
    futures = [asyncio.ensure_future(slow.run()), asyncio.ensure_future(quick.run())]
    assert not await any_done(*futures, timeout_s=0.01)
    quick.go.set()
    async with limit():
        assert await any_done(*futures)
    assert not futures[0].done()
    slow.go.set()
    async with limit():
        assert [await future for future in futures] == ["slow", "quick"]


async def test_a_caller_that_is_cancelled_in_any_done_leaves_the_futures_running() -> None:
    thing = Thing("done")
    future = asyncio.ensure_future(thing.run())
    waiting = asyncio.ensure_future(any_done(future))
    await thing.began.wait()
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    thing.go.set()
    async with limit():
        assert await future == "done"
    assert thing.cancelled == 0


async def test_within_tells_an_end_from_a_time_that_is_up_and_leaves_nothing_running() -> None:
    quick, slow = Thing(), Thing()
    quick.go.set()
    assert await within(60.0, quick.run())
    assert not await within(0.01, slow.run())
    assert slow.cancelled == 1


async def test_within_raises_a_timeout_that_is_not_its_own() -> None:
    failing = Thing(TimeoutError("of a socket"))
    failing.go.set()
    with pytest.raises(TimeoutError, match="of a socket"):
        await within(60.0, failing.run())
