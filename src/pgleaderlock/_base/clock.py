"""The clock of every deadline, and the one place to fake it.

Boot time goes on while the machine sleeps, unlike the ordinary monotonic clock: a leader that was suspended for an hour
must see that hour. The wall clock is never used for a decision.
"""

import asyncio
import time
from typing import Protocol

__all__ = ["BOOT_CLOCK", "Clock"]


class Clock(Protocol):
    """The time, as the library uses it."""

    def now(self) -> float:
        """Seconds since some fixed moment; never steps back, counts through a suspend."""
        ...

    async def sleep(self, delay_s: float) -> None:
        """Return once `delay_s` seconds have passed."""
        ...


# Linux and the BSDs have boot time; elsewhere the monotonic clock is the best available (macOS counts no suspend).
_CLOCK_ID: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
LOOK_S = 1.0


class _BootClock:
    def now(self) -> float:
        return time.clock_gettime(_CLOCK_ID)

    async def sleep(self, delay_s: float) -> None:
        # The event loop's clock stops during a suspend, ours does not. So check ours every second: a deadline that
        # passed while the machine slept is then noticed within a second of its waking.
        until = self.now() + delay_s
        while (left_s := until - self.now()) > 0:  # noqa: ASYNC110 - a suspend raises no event
            await asyncio.sleep(min(left_s, LOOK_S))


BOOT_CLOCK: Clock = _BootClock()
