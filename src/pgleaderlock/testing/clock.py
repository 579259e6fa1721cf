"""A clock whose time passes only when the test moves it."""

import asyncio
import contextlib
import threading

from pgleaderlock._base.aio import settle

__all__ = ["ManualClock"]


class ManualClock:
    """The clock of gates, heartbeats and retries in a test. Any thread may move it."""

    def __init__(self) -> None:
        self._now = 1_000.0
        self._lock = threading.Lock()
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def now(self) -> float:
        """Seconds since some fixed moment."""
        return self._now

    async def sleep(self, delay_s: float) -> None:
        """Return once the test has let `delay_s` seconds pass."""
        if delay_s <= 0:
            await asyncio.sleep(0)
            return
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        sleeper = (self._now + delay_s, woken)
        with self._lock:
            self._sleepers.append(sleeper)
        try:
            await woken
        finally:
            with self._lock:
                self._sleepers = [other for other in self._sleepers if other is not sleeper]

    def jump(self, by_s: float) -> None:
        """Let time pass without waking any task, as a process sees it in its first instruction after a pause."""
        with self._lock:
            self._now += by_s

    def jump_to(self, moment: float) -> None:
        """The same up to a moment. Does nothing if that has passed."""
        with self._lock:
            self._now = max(self._now, moment)

    def wake(self) -> None:
        """Wake every task whose time has come."""
        with self._lock:
            due = [woken for at, woken in self._sleepers if at <= self._now]
        for woken in due:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                woken.get_loop().call_soon_threadsafe(settle, woken)

    def advance(self, by_s: float) -> None:
        """Let time pass, and wake every task whose time has come."""
        self.jump(by_s)
        self.wake()

    def next_s(self) -> float | None:
        """Seconds until the next task wakes; None if no task sleeps."""
        with self._lock:
            moments = [at for at, woken in self._sleepers if not woken.done()]
        return max(0.0, min(moments) - self._now) if moments else None
