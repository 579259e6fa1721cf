"""Who hears of changes of leadership: each subscriber has a queue of its own, on the application's event loop.

Imports `models` and the standard library only.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable

from pgleaderlock.models import LeaderStateChanged

__all__ = ["Changes", "Seen"]

# Whoever does not read for this many changes misses the oldest.
QUEUE_MAX = 10_000

Seen = tuple[str, bool, int | None, str | None]
"""Role, whether this node may act, epoch and holder: what a `LeaderStateChanged` is made of."""


class Changes:
    """Tells what has changed since it was last told, and nothing twice."""

    def __init__(self) -> None:
        self._known: dict[str, Seen] = {}
        self._queues: set[asyncio.Queue[LeaderStateChanged | None]] = set()

    def news(self, seen: Iterable[Seen]) -> list[LeaderStateChanged]:
        """Those that differ from what was known; they are known from now on. Asked for every role at every tick."""
        changed = [now for now in seen if self._known.get(now[0]) != now]
        for now in changed:
            self._known[now[0]] = now
        return [LeaderStateChanged(*now) for now in changed]

    def forget(self, role: str) -> None:
        """Nothing is known of it any more: one of the same name is another one."""
        self._known.pop(role, None)

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
