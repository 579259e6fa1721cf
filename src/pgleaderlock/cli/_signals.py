"""Ending on request: the first SIGINT or SIGTERM asks for a clean end, the second one is obeyed at once.

Plain handlers instead of the event loop's own: they also work before the loop runs, after it, and while it waits for
something that does not end, such as a frozen server. A handler only sets a flag, wakes the loop, or leaves.

Imports the standard library and `_output` only. Must be entered in the main thread.
"""

import asyncio
import os
import signal
from types import FrameType
from typing import Any, Self

from pgleaderlock.cli._output import exit_code_for_signal

__all__ = ["Stopper"]

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopper:
    """While entered, catches the signals that ask for the end."""

    def __init__(self) -> None:
        self.signum: int | None = None
        """The signal that asked, or None."""
        self._previous: dict[int, Any] = {}
        self._waiting: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def __enter__(self) -> Self:
        self._previous = {signum: signal.signal(signum, self._on_signal) for signum in SIGNALS}
        return self

    def __exit__(self, *_exception: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    async def asked(self) -> int:
        """Returns the signal once one has asked."""
        event = asyncio.Event()
        # In this order: a signal between the two lines is seen by one of them.
        self._waiting = (asyncio.get_running_loop(), event)
        if self.signum is None:
            await event.wait()
        assert self.signum is not None
        return self.signum

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        if self.signum is not None:
            # No clean-up of any kind: whatever hangs must not hold this up. The server frees the lock by itself.
            os._exit(exit_code_for_signal(signum))
        self.signum = signum
        if self._waiting is not None:
            loop, event = self._waiting
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)
