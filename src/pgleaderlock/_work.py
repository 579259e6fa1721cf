"""The coroutines that run because this node leads: started in a term, cancelled when it ends, waited for.

A work stays on the list until it has really ended, whatever happens to the caller who waits for it: the lock is not
released while one of them is running. Imports `errors` and the standard library only.
"""

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from pgleaderlock.errors import ConfigurationError

__all__ = ["Works"]

T = TypeVar("T")


class Works:
    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()
        self._interrupted: set[asyncio.Task[Any]] = set()

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> "asyncio.Task[T] | None":
        """Run one work to its end; None if it was interrupted and did not fail at that."""
        task = asyncio.create_task(_called(work), name="pgleaderlock work")
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            await asyncio.wait([task])
            interrupted = task in self._interrupted
            return None if interrupted and (task.cancelled() or task.exception() is None) else task
        except asyncio.CancelledError:
            _cancel_once(task)
            await asyncio.wait([task])
            raise
        finally:
            self._interrupted.discard(task)

    def interrupt(self) -> None:
        """Leadership ends: cancel everything, in the same turn of the loop."""
        for task in self._running:
            self._interrupted.add(task)
            _cancel_once(task)

    async def ended(self) -> None:
        """Return once nothing runs any more."""
        while self._running:
            await asyncio.wait(self._running)

    def inside(self) -> bool:
        """Is the caller itself one of them?"""
        return asyncio.current_task() in self._running


def _cancel_once(task: "asyncio.Task[Any]") -> None:
    """A second cancellation would strike the clean-up that the first one has begun."""
    if not task.cancelling():
        task.cancel()


async def _called(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Inside the task, so that what the call itself raises is treated like what the coroutine raises."""
    coroutine = work()
    if not inspect.isawaitable(coroutine):
        raise ConfigurationError(f"lead takes an async function; this one returned {type(coroutine).__name__} at once")
    return await coroutine
