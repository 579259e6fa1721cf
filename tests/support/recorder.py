"""Writes down what a lock tells its callbacks, and lets a test wait for it instead of sleeping."""

import asyncio
from collections.abc import Callable, Sequence

from pgleaderlock import LeaderLock, LockState

__all__ = ["WAIT_S", "Recorder", "identified", "somebody_leads"]

# How long a test waits for something that must happen. A bound against hanging, never a measure.
WAIT_S = 20.0


class Recorder:
    """The story of one lock: its events, its changes of state and its errors, in order."""

    def __init__(self, lock: LeaderLock) -> None:
        self.lock = lock
        self.events: list[str] = []
        self.changes: list[tuple[LockState, LockState]] = []
        self.errors: list[Exception] = []
        self._news = asyncio.Event()
        lock.on_acquired(lambda: self._note("acquired"))
        lock.on_released(lambda: self._note("released"))
        lock.on_lost(lambda: self._note("lost"))
        lock.on_acquire_failed(lambda: self._note("acquire_failed"))
        lock.on_stopped(lambda: self._note("stopped"))
        lock.on_error(self._error)
        lock.on_state_change(self._change)

    async def until(self, condition: Callable[["Recorder"], bool], timeout_s: float = WAIT_S) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition(self):
                self._news.clear()
                await self._news.wait()

    async def heard(self, event: str, times: int = 1) -> None:
        await self.until(lambda story: story.events.count(event) >= times)

    async def reached(self, state: LockState) -> None:
        await self.until(lambda story: story.lock.state is state)

    def _note(self, event: str) -> None:
        self.events.append(event)
        self._news.set()

    def _error(self, error: Exception) -> None:
        self.errors.append(error)
        self._note("error")

    def _change(self, old: LockState, new: LockState) -> None:
        self.changes.append((old, new))
        self._news.set()


async def somebody_leads(locks: Sequence[LeaderLock]) -> LeaderLock:
    """The first of these locks that leads."""
    running = [lock for lock in locks if lock.state is not LockState.STOPPED]
    waits = [asyncio.ensure_future(lock.wait_for_leadership(WAIT_S)) for lock in running]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    leading = [lock for lock in locks if lock.is_leader]
    assert len(leading) == 1, f"{len(leading)} lead"
    return leading[0]


async def identified(lock: LeaderLock) -> None:
    """Until the first probe of a term was answered. It follows the grant at once, and would see a loss by itself."""
    async with asyncio.timeout(WAIT_S):
        while lock._run is None or lock._run._session is None or not lock._run._session.identified:
            await asyncio.sleep(0.01)
