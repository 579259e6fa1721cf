"""Ordered dispatch: callbacks run one after the other, in the order of the transitions that caused them.

A separate task runs them, so a slow callback delays only the next callback: never a probe, and never a release beyond
its timeout. An exception of a callback is logged and passed to `on_error`; it cannot stop the lock.
"""

import asyncio
import inspect
from collections import deque
from collections.abc import Callable
from typing import Any

from pgleaderlock._base.aio import being_cancelled, first_of
from pgleaderlock._base.clock import Clock
from pgleaderlock._base.logging import StructuredLogger
from pgleaderlock.errors import ConfigurationError

__all__ = ["CallbackRegistry", "Dispatcher"]

# Bounds the memory if a callback never returns: beyond this many waiting calls, new ones are dropped.
QUEUE_MAX = 10_000
SLOW_S = 1.0
CLOSE_TIMEOUT_S = 1.0


class CallbackRegistry:
    """The callbacks of each event, in the order of registration."""

    EVENTS = (
        "on_acquired",
        "on_released",
        "on_lost",
        "on_acquire_failed",
        "on_state_change",
        "on_error",
        "on_stopped",
    )

    def __init__(self) -> None:
        self._callbacks: dict[str, list[Callable[..., Any]]] = {event: [] for event in self.EVENTS}

    def add(self, event: str, callback: Callable[..., Any]) -> None:
        if not callable(callback):
            raise ConfigurationError(f"{event} takes a function, not {type(callback).__name__}: {callback!r}")
        self._callbacks[event].append(callback)

    def of(self, event: str) -> tuple[Callable[..., Any], ...]:
        return tuple(self._callbacks[event])


class Dispatcher:
    """Runs the callbacks of emitted events, in order, from `start` to `close`."""

    def __init__(self, registry: CallbackRegistry, clock: Clock, log: StructuredLogger) -> None:
        self._registry = registry
        self._clock = clock
        self._log = log
        self._queue: deque[tuple[str, tuple[object, ...]] | asyncio.Future[None]] = deque()
        self._arrived = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="pgleaderlock callbacks")

    def emit(self, event: str, *args: object) -> None:
        """Queue an event; no callback runs before the caller yields to the event loop."""
        if not self._registry.of(event):
            return
        if len(self._queue) >= QUEUE_MAX:
            self._log.error("callback_dropped", callback=event, waiting=len(self._queue))
            return
        self._queue.append((event, args))
        self._arrived.set()

    async def drained(self) -> None:
        """Return once everything emitted before this call has run."""
        if self._task is None or not (self._queue or self._arrived.is_set()):
            return
        barrier: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(barrier)
        self._arrived.set()
        await first_of(barrier, asyncio.shield(self._task))
        if barrier.cancelled():
            # The dispatcher was cancelled with all other tasks, as at the end of asyncio.run: run the queue from here.
            await self._run_queue()

    def inside(self) -> bool:
        """Whether the caller is a callback. It must not wait for callbacks that run after it."""
        return self._task is not None and asyncio.current_task() is self._task

    async def close(self) -> None:
        """End the task and drop what has not run yet. Call `drained` first to let everything run."""
        if self._task is None:
            return
        self.cancel()
        await asyncio.wait([self._task], timeout=CLOSE_TIMEOUT_S)  # a callback may refuse to be cancelled
        self._task = None

    def cancel(self) -> None:
        """The part of `close` that does not wait."""
        if self._task is not None:
            self._task.cancel()
        for entry in self._queue:
            if isinstance(entry, asyncio.Future) and not entry.done():
                entry.cancel()
        self._queue.clear()

    async def _run(self) -> None:
        while True:
            await self._arrived.wait()
            await self._run_queue()
            self._arrived.clear()

    async def _run_queue(self) -> None:
        while self._queue:
            entry = self._queue.popleft()
            if isinstance(entry, asyncio.Future):
                if not entry.done():
                    entry.set_result(None)
            else:
                await self._call_all(*entry)

    async def _call_all(self, event: str, args: tuple[object, ...]) -> None:
        for callback in self._registry.of(event):
            await self._call(event, callback, args)

    async def _call(self, event: str, callback: Callable[..., Any], args: tuple[object, ...]) -> None:
        began = self._clock.now()
        name = getattr(callback, "__qualname__", repr(callback))
        try:
            outcome = callback(*args)
            if inspect.isawaitable(outcome):
                await outcome
        except asyncio.CancelledError:
            # Re-raised if the dispatcher is being closed. Otherwise something inside the callback was cancelled, which
            # must not end the dispatcher.
            if being_cancelled():
                raise
            self._log.error("callback_cancelled", callback=event, function=name)
        except Exception as error:
            self._log.error("callback_failed", exc_info=error, callback=event, function=name, error=error)
            # An on_error that fails is only logged: calling on_error for it would never end.
            if event != "on_error":
                await self._call_all("on_error", (error,))
        took_s = self._clock.now() - began
        if took_s > SLOW_S:
            self._log.warning("callback_slow", callback=event, function=name, took_s=took_s)
