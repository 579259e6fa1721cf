"""The clock on which every deadline is kept, and the one place to fake it.

Boot time goes on while the machine sleeps, which the ordinary monotonic clock does not: a leader that was
suspended for an hour must see that hour. The wall clock is never used for a decision.

Sits at the bottom: imports the standard library only.
"""

import asyncio
import time
from typing import Protocol

__all__ = ["BOOT_CLOCK", "Clock"]


class Clock(Protocol):
    """What the library asks of time."""

    def now(self) -> float:
        """Seconds since some fixed moment; never steps back, counts through a suspend."""
        ...

    async def sleep(self, delay_s: float) -> None:
        """Return once `delay_s` seconds have passed."""
        ...


# Linux and the BSDs have it; elsewhere monotonic is the best there is (macOS counts suspend in neither).
_CLOCK_ID: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class _BootClock:
    def now(self) -> float:
        return time.clock_gettime(_CLOCK_ID)

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)


BOOT_CLOCK: Clock = _BootClock()
