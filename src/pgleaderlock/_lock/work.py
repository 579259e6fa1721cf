"""The works of a leader: coroutines that are started in a term and cancelled at its end.

A work stays on the list until it has ended, even if the caller of `run` is cancelled, because the lock is not released
while a work is running. This module also decides, for lock and election, what `lead` does when a work fails or a caller
is cancelled.
"""

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from pgleaderlock._base.aio import cancel_once
from pgleaderlock._base.clock import Clock
from pgleaderlock.errors import ConfigurationError
from pgleaderlock.retry import ExponentialBackoff

__all__ = ["Failure", "OnFailure", "Restarts", "Works", "error_of"]

T = TypeVar("T")
OnFailure = Literal["raise", "restart", "step_down"]
RESTART_BACK_OFF = ExponentialBackoff(base_s=0.2, max_s=30.0)
# The longest delay before a restart for which a leader keeps its role. Before a longer one it gives the role up, so
# that another node can do the work.
IDLE_S_MAX = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Failure:
    """A work has failed, and has not been started again."""

    error: BaseException
    delay_s: float | None
    """The delay until the restart; None: `lead` raises the error instead."""
    gives_up: bool
    """Whether this node gives the role up and does not compete for it until the restart."""


class Restarts:
    """The policy of one call of `lead` for failures, and the number of failures in a row."""

    def __init__(self, on_failure: OnFailure, clock: Clock) -> None:
        if on_failure not in get_args(OnFailure):
            raise ConfigurationError(f'on_failure={on_failure!r} is not usable: "raise", "restart" or "step_down"')
        self._on_failure = on_failure
        self._clock = clock
        self._in_a_row = 0
        self._began_at = 0.0

    def begin(self) -> None:
        """The work is about to be started."""
        self._began_at = self._clock.now()

    def after(self, error: BaseException) -> Failure:
        """What to do after this failure. A failure after a run longer than the longest delay starts a new row."""
        if self._on_failure == "raise":
            return Failure(error, delay_s=None, gives_up=True)
        if self._clock.now() - self._began_at >= RESTART_BACK_OFF.max_s:
            self._in_a_row = 0
        self._in_a_row += 1
        delay_s = RESTART_BACK_OFF.delay_s(self._in_a_row)
        return Failure(error, delay_s, gives_up=self._on_failure == "step_down" or delay_s > IDLE_S_MAX)


def error_of(task: "asyncio.Task[Any]") -> BaseException | None:
    """The error of a work that has ended; None if it returned. A work that cancelled itself has failed."""
    return asyncio.CancelledError("the work has cancelled itself") if task.cancelled() else task.exception()


class Works:
    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()
        self._interrupted: set[asyncio.Task[Any]] = set()
        self.failure: Failure | None = None
        """The failure that keeps the work from running, until the work is restarted or `lead` is called again."""
        self.left = False
        """The last caller of `lead` was cancelled, and `lead` has not been called again."""
        self._callers = 0

    @property
    def given_up(self) -> bool:
        """This node should not lead: its work has failed, or was left. May be read from another thread."""
        failure = self.failure
        return self.left or (failure is not None and failure.gives_up)

    def failed(self, failure: Failure) -> None:
        self.failure = failure

    def recover(self, failure: Failure | None = None) -> bool:
        """Forget this failure, or any if None; True if the role was given up and no longer is."""
        if failure is not None and self.failure is not failure:
            return False
        given_up, self.failure = self.given_up, None
        if failure is None:
            self.left = False
        return given_up and not self.given_up

    @contextlib.contextmanager
    def caller(self, left: Callable[[], None]) -> Iterator[None]:
        """Entered while a caller is in `lead`. If the last caller is cancelled, the role has no work left: it is given
        up, and `left` is called.
        """
        self._callers += 1
        try:
            yield
        except asyncio.CancelledError:
            if self._callers == 1 and not self.given_up:
                self.left = True
                left()
            raise
        finally:
            self._callers -= 1

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> "asyncio.Task[T] | None":
        """Run one work to its end. Returns its task; None if the work was interrupted and did not fail meanwhile."""
        task = asyncio.create_task(_called(work), name="pgleaderlock work")
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            await asyncio.wait([task])
            interrupted = task in self._interrupted
            return None if interrupted and (task.cancelled() or task.exception() is None) else task
        except asyncio.CancelledError:
            cancel_once(task)
            await asyncio.wait([task])
            raise
        finally:
            self._interrupted.discard(task)

    def interrupt(self) -> None:
        """Leadership ends: cancel all works at once, before anything else runs on the loop."""
        for task in self._running:
            if not task.done():  # a work that has just returned was not interrupted
                self._interrupted.add(task)
                cancel_once(task)

    async def ended(self) -> None:
        """Return once no work is running."""
        while self._running:
            await asyncio.wait(self._running)

    def inside(self) -> bool:
        """Whether the caller is one of these works."""
        return asyncio.current_task() in self._running


async def _called(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Call `work` inside the task, so that an exception of the call is treated like one of the coroutine."""
    coroutine = work()
    if not inspect.isawaitable(coroutine):
        raise ConfigurationError(f"lead takes an async function; this one returned {type(coroutine).__name__} at once")
    return await coroutine
