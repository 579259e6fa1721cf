"""How many requests have begun and are not answered yet: a graceful stop waits for the last of them.

Imports the standard library only.
"""

import asyncio

__all__ = ["InFlight"]


class InFlight:
    """`begin` and `end` for each request; `stop`, and then `answered`, for the end."""

    def __init__(self) -> None:
        self.count = 0
        self._stopping = False
        self._answered = asyncio.Event()

    def begin(self) -> None:
        self.count += 1

    def end(self) -> None:
        self.count -= 1
        if self._stopping and not self.count:
            self._answered.set()

    def stop(self) -> None:
        self._stopping = True
        if not self.count:
            self._answered.set()

    async def answered(self) -> None:
        """Returns, after `stop()`, when none is in flight."""
        await self._answered.wait()
