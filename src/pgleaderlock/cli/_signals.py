"""Ending on request: the first SIGINT or SIGTERM asks for a clean end, the second one is obeyed at once. And reading
files again on request, for servers.

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

__all__ = ["Reloader", "Stopper"]

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_Waiting = tuple[asyncio.AbstractEventLoop, asyncio.Event]


class Stopper:
    """While entered, catches the signals that ask for the end."""

    def __init__(self) -> None:
        self.signum: int | None = None
        """The signal that asked, or None."""
        self._previous: dict[int, Any] = {}
        self._waiting: _Waiting | None = None

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
            if signum == signal.SIGHUP:
                return  # the end of a terminal is told by the shell and by the system
            # No clean-up of any kind: whatever hangs must not hold this up. The server frees the lock by itself.
            os._exit(exit_code_for_signal(signum))
        self.signum = signum
        _wake(self._waiting)


class Reloader(Stopper):
    """A `Stopper` that also catches SIGHUP: it asks for files to be read again. To a program that was started in a
    terminal it says that this is gone, and asks for the end; unless it was to be ignored, as by nohup."""

    def __init__(self) -> None:
        super().__init__()
        self._again = False
        self._waiting_again: _Waiting | None = None

    def __enter__(self) -> Self:
        super().__enter__()
        ends = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and _in_terminal()
        handler = self._on_signal if ends else self._on_hangup
        self._previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, handler)
        return self

    async def asked_again(self) -> None:
        """Returns once it was asked to read files again, since the last return."""
        event = asyncio.Event()
        self._waiting_again = (asyncio.get_running_loop(), event)
        if not self._again:
            await event.wait()
        self._again = False

    def _on_hangup(self, _signum: int, _frame: FrameType | None) -> None:
        self._again = True
        _wake(self._waiting_again)


def _wake(waiting: _Waiting | None) -> None:
    if waiting is not None:
        loop, event = waiting
        if not loop.is_closed():
            loop.call_soon_threadsafe(event.set)


def _in_terminal() -> bool:
    try:
        return os.isatty(0)
    except OSError:
        return False
