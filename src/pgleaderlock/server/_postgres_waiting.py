"""Waiting for a lock in the PostgreSQL store: first in, first out, across servers.

The queue is a table: a ticket a waiter, in the order in which they came, whichever server they came to. A server asks
only for the first of its own waiters of a lock, and only when there is a reason: it was woken, the lease that it waits
for is over, or its heartbeat's answer says that it is next. A wake-up is a hint: a lost one costs a heartbeat, a forged
one a look.

A waiter chooses its lease's id before it asks. So a grant whose answer was lost is recognised when it asks again, and
one that nobody waits for any more is found and ended.

Imports `_postgres_pool`, `_postgres_queue`, `_postgres_wire`, `_clock`, `store` and the standard library. Must never
leave a lease behind for a caller that was cancelled.
"""

import asyncio
import contextlib
import itertools
import math
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from pgleaderlock._clock import BOOT_CLOCK, Clock
from pgleaderlock._connect import retrieve
from pgleaderlock._jitter import JITTER
from pgleaderlock.server._postgres_pool import BATCH_OPERATIONS_MAX, Pool, lasts, nothing_came_of
from pgleaderlock.server._postgres_queue import NEVER, NOW, Alarm, Queues, Waiter
from pgleaderlock.server._postgres_wire import outcome_of, waiting
from pgleaderlock.server.store import Acquire, Granted, Held, StoreBusy, StoreError, StoreFull, new_lease_id

__all__ = ["ALIVE_MS", "Waiting"]

TICK_S, TICK_S_MIN = 0.75, 0.05
ALIVE_MS = 3000
CLEAN_UP_S_MAX = 5.0
# A statement whose session was cut may still take effect for as long as the server lets it run, and a bit.
UNSURE_S = 15.0
ASK_AGAIN_S = (0.1, 0.5)

Answer = Granted | Held | StoreFull
_Listen = Callable[[Callable[[str], None]], Coroutine[Any, Any, None]]


class _Head(msgspec.Struct, frozen=True, gc=False):
    lock: str
    ticket: int


class Waiting:
    """All waiters of one server."""

    def __init__(self, pool: Pool, server_id: str, listen: _Listen, *, clock: Clock, waiters_max: int) -> None:
        self._pool, self._server_id, self._listen = pool, server_id, listen
        self._clock, self._waiters_max = clock, waiters_max
        self._alarm = Alarm(clock)
        self._queues = Queues()
        self._waiters: dict[Waiter, None] = {}
        self._unplaced: dict[Waiter, None] = {}
        self._gone: dict[Waiter, None] = {}
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._beating: asyncio.Task[None] | None = None
        self._listening: asyncio.Task[None] | None = None
        self._poked = asyncio.Event()
        self._ticking: asyncio.Task[None] | None = None
        self._ticked_at = NOW
        self._calls = 0
        self._quiet = asyncio.Event()
        self._closing = False
        self._rng = JITTER

    # --- One waiter

    async def wait(self, acquire: Acquire, wait_ms: int) -> Answer:
        if self._calls >= self._waiters_max:
            raise StoreBusy(f"{self._waiters_max} requests wait already: come back a little later")
        began = self._clock.now()
        waiter = Waiter(acquire, next(self._numbers), began, began + wait_ms / 1000)
        self._calls += 1
        try:
            return await self._wait(waiter)
        except asyncio.CancelledError:
            # Not before what is on its way has arrived: it would find nothing to clean up yet.
            await self._cleaned_up(waiter, keep_lease=False)
            raise
        except BaseException:
            # With a key, a repeated request is to find the lease; without one nobody ever could.
            await self._cleaned_up(waiter, keep_lease=acquire.idempotency_key is not None)
            raise
        finally:
            self._waiters.pop(waiter, None)
            self._calls -= 1
            if not self._calls:
                self._quiet.set()

    async def _wait(self, waiter: Waiter) -> Answer:
        answer = await self._ask(waiter, "acquire")  # most find the lock free, and need no ticket
        if not isinstance(answer, Held) or self._over(waiter):
            return answer
        waiter.held = answer
        await self._enliven()
        self._waiters[waiter] = self._unplaced[waiter] = None
        while True:
            try:
                answer = await self._ask(waiter, "wait")
            except StoreError as error:
                if lasts(error) or self._over(waiter):
                    raise
                # The ticket may still be there. It is asked for again, and the lease's id tells what came of this.
                await asyncio.sleep(self._rng.uniform(*ASK_AGAIN_S))
                if self._over(waiter):
                    raise
                continue
            if not isinstance(answer, Held):
                self._leave(waiter, self._clock.now() + waiter.acquire.ttl_ms / 1000)
                self._queues.stir_those_with_the_key_of(waiter.acquire)
                return answer
            waiter.held = answer
            while not self._over(waiter) and self._clock.now() < waiter.look_at:
                await self._sleep(waiter)
            if self._over(waiter):
                return await self._give_up(waiter)

    def _over(self, waiter: Waiter) -> bool:
        return self._closing or self._clock.now() >= waiter.deadline

    async def _sleep(self, waiter: Waiter) -> None:
        """Until it is time to look, or to go, or until stirred."""
        self._alarm.set(min(waiter.look_at, waiter.deadline), waiter)
        await waiter.stirred.wait()
        waiter.stirred.clear()

    async def _ask(self, waiter: Waiter, kind: str) -> Answer:
        waiter.heard = False
        earlier, lease_id = list(waiter.lease_ids), new_lease_id()
        waiter.lease_ids.append(lease_id)
        now = self._clock.now()
        # The lease runs from some moment after this one, so whoever counts from here never counts too far.
        sent = waiting(
            kind,
            waiter.acquire,
            lease_id,
            earlier,
            waiter=waiter.number,
            ticket=waiter.ticket,
            wait_ms=max(1, math.ceil((waiter.deadline - now) * 1000)),
            waited_ms=int((now - waiter.began) * 1000),
        )
        waiter.asking = self._pool.apply([sent], acquires=1)
        try:
            # A caller that is cancelled must not take the question back: it may have been asked already.
            (row,) = await asyncio.shield(waiter.asking)
        except StoreError as error:
            self._failed(waiter, error)
            raise
        waiter.asking = None
        # What this one came to is known. Of those before, one may have become the lease that it was given now.
        for known in (lease_id, row["lease_id"]):
            if known in waiter.lease_ids:
                waiter.lease_ids.remove(known)
        if row["ticket"] is not None:
            self._place(waiter, row["ticket"], row["remaining_ms"])
        answer = outcome_of(waiter.acquire, row, self._pool.room.locks_max)
        assert isinstance(answer, Granted | Held | StoreFull)
        return answer

    def _failed(self, waiter: Waiter, error: StoreError) -> None:
        """What the last question came to is not known, unless the error says that it came to nothing."""
        waiter.asking = None
        if not nothing_came_of(error):
            waiter.unsure_until = BOOT_CLOCK.now() + UNSURE_S
        elif waiter.lease_ids:
            waiter.lease_ids.pop()

    def _place(self, waiter: Waiter, ticket: int, remaining_ms: int | None) -> None:
        if waiter.ticket != ticket:
            self._queues.remove(waiter, NOW)
            waiter.ticket = ticket
            self._unplaced.pop(waiter, None)
        if not self._queues.put(waiter):
            waiter.look_at = NEVER
        elif waiter.heard:
            waiter.look_at = NOW
        else:
            # Free, and the turn of another server's waiter: the heartbeat tells when that has changed.
            waiter.look_at = NEVER if remaining_ms is None else self._clock.now() + remaining_ms / 1000

    def _leave(self, waiter: Waiter, look_at: float) -> None:
        waiter.alarm_at = NEVER
        self._queues.remove(waiter, look_at)
        self._waiters.pop(waiter, None)
        self._unplaced.pop(waiter, None)
        if waiter.unsure_until > BOOT_CLOCK.now():
            # Something that it asked may yet take effect, and is looked for until it cannot any more.
            self._gone[waiter] = None
            self._beat()

    # --- The end of a waiter that got nothing

    async def _give_up(self, waiter: Waiter) -> Held:
        self._leave(waiter, waiter.look_at)
        assert waiter.held is not None
        try:
            (row,) = await self._pool.apply([_abandon(waiter)], acquires=0)
        except StoreError:
            self._gone[waiter] = None
            if not self._closing:
                raise
            return waiter.held
        held = outcome_of(waiter.acquire, row, 0)
        assert isinstance(held, Held)
        return held if held.current_owner_id else waiter.held

    async def _cleaned_up(self, waiter: Waiter, *, keep_lease: bool) -> None:
        """Tear the ticket and end the lease, if there is any; a caller that will not wait for that need not."""
        self._leave(waiter, NOW)
        if keep_lease:
            waiter.lease_ids.clear()
        task = asyncio.create_task(self._clean_up(waiter), name="pgleaderlock-locks-clean-up")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(TimeoutError, asyncio.CancelledError):
            async with asyncio.timeout(CLEAN_UP_S_MAX):
                await asyncio.shield(task)

    async def _clean_up(self, waiter: Waiter) -> None:
        if waiter.asking is not None:
            try:
                await waiter.asking
            except StoreError as error:
                self._failed(waiter, error)
        if waiter.ticket is None and not waiter.lease_ids and waiter.unsure_until == NOW:
            return  # while the database is away, nothing is kept of those who asked in vain
        try:
            await self._pool.apply([_abandon(waiter)], acquires=0)
        except StoreError:
            waiter.unsure_until = max(waiter.unsure_until, BOOT_CLOCK.now())
        if waiter.unsure_until > NOW:
            self._gone[waiter] = None
            self._beat()

    # --- The heartbeat, which also asks whose turn it is

    async def _enliven(self) -> None:
        """The server must count as alive before it has a ticket, or the ticket would not count."""
        self._beat()
        if BOOT_CLOCK.now() > self._ticked_at + 2 * TICK_S:
            if self._ticking is None or self._ticking.done():
                self._ticking = asyncio.create_task(self._tick(), name="pgleaderlock-locks-tick")
                self._ticking.add_done_callback(retrieve)
            await asyncio.shield(self._ticking)

    def _beat(self) -> None:
        if self._beating is None or self._beating.done():
            self._beating = asyncio.create_task(self._beats(), name="pgleaderlock-locks-beats")
        if self._listening is None:
            self._listening = asyncio.create_task(self._listen(self.wake), name="pgleaderlock-locks-listen")

    async def _beats(self) -> None:
        """Goes on while anybody waits, or something is to be cleaned up."""
        while self._waiters or self._gone or self._calls:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._poked.wait()
            self._poked.clear()
            with contextlib.suppress(StoreError):  # the database is away: the next beat may find it again
                await self._tick()
                await self._clear_gone()
            await asyncio.sleep(TICK_S_MIN)  # however often it is poked

    async def _tick(self) -> None:
        firsts = {waiter.acquire.lock_name: waiter for waiter in self._queues.firsts()}
        heads = [_Head(name, waiter.ticket or 0) for name, waiter in firsts.items()]
        sent_at = BOOT_CLOCK.now()
        rows = await self._pool.query(
            "locks_tick", server_id=self._server_id, valid_ms=ALIVE_MS, heads=msgspec.json.encode(heads).decode()
        )
        self._ticked_at = sent_at
        now = self._clock.now()
        for row in rows:
            waiter = self._queues.first(row["lock_name"])
            if waiter is not None and waiter is firsts[row["lock_name"]]:
                waiter.look(now + row["remaining_ms"] / 1000)

    async def _clear_gone(self) -> None:
        gone = list(self._gone)
        for begin in range(0, len(gone), BATCH_OPERATIONS_MAX):
            step, now = gone[begin : begin + BATCH_OPERATIONS_MAX], BOOT_CLOCK.now()
            await self._pool.apply([_abandon(waiter) for waiter in step], acquires=0)
            for waiter in step:
                if now >= waiter.unsure_until:
                    self._gone.pop(waiter, None)

    def wake(self, payload: str) -> None:
        """What a notification says: a lock's name, or nothing in particular. Other names are nothing."""
        if not payload:
            self._poked.set()
            return
        first = self._queues.first(payload)
        if first is not None:
            first.heard = True
            first.look(NOW)
        # Those whose ticket is not known here yet may be meant as well.
        for waiter in self._unplaced:
            if waiter.acquire.lock_name == payload:
                waiter.heard = True

    # --- The end

    async def close(self) -> None:
        """Wake every waiter, and let each tear its own ticket."""
        self._closing = True
        for waiter in self._waiters:
            waiter.stirred.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLEAN_UP_S_MAX):
                while self._calls:
                    self._quiet.clear()
                    await self._quiet.wait()
                if self._tasks:
                    await asyncio.wait(self._tasks)
        known = (self._beating, self._listening, self._ticking, self._alarm.task, *self._tasks)
        ending = [task for task in known if task is not None]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        # A connect that is cancelled half-way ends when nobody refers to it any more: nobody does, from here on.
        self._beating = self._listening = self._ticking = self._alarm.task = None
        with contextlib.suppress(StoreError):  # it is only tidiness: whoever is silent is soon skipped
            await self._pool.query("locks_close", server_id=self._server_id)


def _abandon(waiter: Waiter) -> str:
    return waiting("abandon", waiter.acquire, None, waiter.lease_ids, waiter=waiter.number)
