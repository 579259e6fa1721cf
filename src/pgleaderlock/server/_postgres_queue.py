"""This server's own waiters: who they are, in which order they came, and when each has to look again. No database.

Imports `_clock`, `store` and the standard library. Must never decide whose turn it is: that is up to
the tickets of all servers, in the database.
"""

import asyncio
import bisect
import heapq
import itertools
import math
from dataclasses import dataclass, field
from typing import Any

from pgleaderlock._clock import Clock
from pgleaderlock.server.store import Acquire, Held

__all__ = ["NEVER", "NOW", "Alarm", "Queues", "Waiter"]

NEVER, NOW = math.inf, -math.inf
ALARMS_KEPT_MIN = 1000


@dataclass(eq=False, slots=True)
class Waiter:
    acquire: Acquire
    number: int
    began: float
    deadline: float
    lease_ids: list[str] = field(default_factory=list)
    """One for each time it asked and has not heard what came of it."""
    ticket: int | None = None
    look_at: float = NEVER
    """When to ask again, unless woken. Only the first of this server's waiters of a lock has a time here."""
    heard: bool = False
    """Woken while the last question was on its way: its answer may be older than that."""
    stirred: asyncio.Event = field(default_factory=asyncio.Event)
    asking: "asyncio.Future[list[dict[str, Any]]] | None" = None
    unsure_until: float = NOW
    held: Held | None = None
    alarm_at: float = NEVER

    def look(self, at: float) -> None:
        self.look_at = at
        self.stirred.set()


class Queues:
    """This server's own waiters, by lock and ticket."""

    def __init__(self) -> None:
        self._by_lock: dict[str, list[Waiter]] = {}

    def put(self, waiter: Waiter) -> bool:
        """Give the waiter its place; True if it is the first one."""
        queue = self._by_lock.setdefault(waiter.acquire.lock_name, [])
        if waiter not in queue:
            bisect.insort(queue, waiter, key=lambda other: other.ticket or 0)
            if queue[0] is waiter and len(queue) > 1:
                queue[1].look_at = NEVER
        return queue[0] is waiter

    def remove(self, waiter: Waiter, look_at: float) -> None:
        """Whoever comes first now looks when the one before would have, or at `look_at`."""
        queue = self._by_lock.get(waiter.acquire.lock_name, [])
        if waiter not in queue:
            return
        first = queue[0] is waiter
        queue.remove(waiter)
        if not queue:
            del self._by_lock[waiter.acquire.lock_name]
        elif first:
            queue[0].look(look_at)

    def first(self, lock_name: str) -> Waiter | None:
        return self._by_lock.get(lock_name, [None])[0]

    def stir_those_with_the_key_of(self, acquire: Acquire) -> None:
        """A lease was granted to this one: whoever repeats its request is to be given the same."""
        if acquire.idempotency_key is not None:
            for waiter in self._by_lock.get(acquire.lock_name, ()):
                same = waiter.acquire.idempotency_key == acquire.idempotency_key
                if same and waiter.acquire.owner_id == acquire.owner_id:
                    waiter.look(NOW)

    def firsts(self) -> list[Waiter]:
        return [queue[0] for queue in self._by_lock.values()]


class Alarm:
    """One sleeper for all waiters: it stirs each when its time has come, and each looks by itself what time it is."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._due: list[tuple[float, int, Waiter]] = []
        self._kept_max = ALARMS_KEPT_MIN
        self._numbers = itertools.count()
        self._sooner = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def set(self, at: float, waiter: Waiter) -> None:
        """Only the last one that was set for a waiter counts."""
        if waiter.alarm_at == at:
            return
        waiter.alarm_at = at
        heapq.heappush(self._due, (at, next(self._numbers), waiter))
        if len(self._due) > self._kept_max:
            self._due = [entry for entry in self._due if entry[2].alarm_at == entry[0]]
            heapq.heapify(self._due)
            self._kept_max = max(ALARMS_KEPT_MIN, 2 * len(self._due))
        if self._due[0][0] == at:
            self._sooner.set()
        if self.task is None or self.task.done():
            self.task = asyncio.create_task(self._run(), name="pgleaderlock-locks-alarm")

    async def _run(self) -> None:
        while self._due:
            self._sooner.clear()
            await self._slept(self._due[0][0])
            while self._due and self._due[0][0] <= self._clock.now():
                at, _, waiter = heapq.heappop(self._due)
                if waiter.alarm_at == at:
                    waiter.alarm_at = NEVER
                    waiter.stirred.set()

    async def _slept(self, until: float) -> None:
        """Until then, or until there is something sooner."""
        if until <= self._clock.now():
            return
        either = [
            asyncio.ensure_future(self._clock.sleep(until - self._clock.now())),
            asyncio.ensure_future(self._sooner.wait()),
        ]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in either:
                one.cancel()
