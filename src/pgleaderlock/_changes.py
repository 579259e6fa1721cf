"""Who hears of changes of leadership: each subscriber has a queue of its own, on the application's event loop.

Imports `models` and the standard library only.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable

from pgleaderlock.models import LeaderStateChanged

__all__ = ["Changes"]

# Whoever does not read for this many changes misses the oldest.
QUEUE_MAX = 10_000


class Changes:
    """Tells what has changed since it was last told, and nothing twice."""

    def __init__(self) -> None:
        self._known: dict[str, LeaderStateChanged] = {}
        self._queues: set[asyncio.Queue[LeaderStateChanged | None]] = set()

    def news(self, seen: Iterable[LeaderStateChanged]) -> list[LeaderStateChanged]:
        """Those that differ from what was known; they are known from now on."""
        changed = [now for now in seen if self._known.get(now.role) != now]
        for now in changed:
            self._known[now.role] = now
        return changed

    def tell(self, changes: Iterable[LeaderStateChanged]) -> None:
        for change in changes:
            for queue in self._queues:
                _offer(queue, change)

    def end(self) -> None:
        """Every subscription ends."""
        for queue in self._queues:
            _offer(queue, None)

    async def subscribe(self) -> AsyncIterator[LeaderStateChanged]:
        queue: asyncio.Queue[LeaderStateChanged | None] = asyncio.Queue(QUEUE_MAX)
        self._queues.add(queue)
        try:
            while (change := await queue.get()) is not None:
                yield change
        finally:
            self._queues.discard(queue)


def _offer(queue: "asyncio.Queue[LeaderStateChanged | None]", change: LeaderStateChanged | None) -> None:
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(change)
