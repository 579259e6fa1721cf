"""Waiting for a lock in the PostgreSQL store: first in, first out, across servers.

The queue is a table with one ticket per waiter, in the order of their arrival at the database. The waiters of one
server get their tickets in the order of their arrival at that server (`Entrance`). For each lock, a server asks only
for the first of its own waiters, and only when there is a reason: the waiter was woken, the lease in the way is over,
or the answer to the server's heartbeat says that the waiter is next. A wake-up is a hint: a lost one costs the wait
until the next heartbeat, a forged one a query. The tickets of all servers, in the database, decide whose turn it is.

A waiter chooses the id of its lease before it asks. So a grant whose answer was lost is recognised when the waiter asks
again, and a grant whose waiter has gone is found and ended.

Must never leave a lease behind for a caller that was cancelled.
"""

import asyncio
import bisect
import contextlib
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pgleaderlock._base.aio import cancel_and_wait, first_of, settle, within
from pgleaderlock._base.clock import BOOT_CLOCK, Clock
from pgleaderlock._pg.connect import retrieve
from pgleaderlock.retry import JITTER
from pgleaderlock.server.postgres.pool import BATCH_OPERATIONS_MAX, Pool, cannot_be_written, lasts, nothing_came_of
from pgleaderlock.server.store import (
    Acquire,
    Granted,
    Held,
    KeyReused,
    LockView,
    NotReleased,
    NotRenewed,
    Operation,
    Outcome,
    Released,
    Renew,
    Renewed,
    StoreBusy,
    StoreError,
    StoreFull,
    new_lease_id,
    stored_key,
)

__all__ = [
    "ALIVE_MS",
    "NEVER",
    "NOW",
    "Alarm",
    "Entrance",
    "Queues",
    "Waiter",
    "Waiting",
    "encoded",
    "outcome_of",
    "view_of",
    "waiting",
]

NEVER, NOW = math.inf, -math.inf
ALARMS_KEPT_MIN = 1000
TICK_S, TICK_S_MIN = 0.75, 0.05
ALIVE_MS = 3000
CLEAN_UP_S_MAX = 5.0
# For how long a statement may still take effect after its session was cut: as long as the server lets it run, and a
# little longer.
UNSURE_S = 15.0
ASK_AGAIN_S = (0.1, 0.5)

Answer = Granted | Held | KeyReused | StoreFull
_Listen = Callable[[Callable[[str], None]], Coroutine[Any, Any, None]]
_Question = tuple[str, "asyncio.Future[list[dict[str, Any]]]"]
"""The encoded operation, and the future that gets its row."""
_encode = msgspec.json.Encoder().encode


@dataclass(eq=False, slots=True)
class Waiter:
    acquire: Acquire
    number: int
    began: float
    deadline: float
    lease_ids: list[str] = field(default_factory=list)
    """The ids of leases that it asked for and whose outcome is unknown."""
    ticket: int | None = None
    look_at: float = NEVER
    """When to ask again, unless woken earlier. Set only for the first of this server's waiters of a lock."""
    heard: bool = False
    """It was woken while it was asking: the answer may be older than the reason for waking it."""
    key_granted: bool = False
    """Its idempotency key got a lease while it was asking: the answer may be older than that, too."""
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
        """Remove the waiter. If it was the first, the new first one asks at `look_at`."""
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

    def stir_those_with_the_key_of(self, acquire: Acquire, unplaced: Iterable[Waiter]) -> None:
        """A lease was granted to this acquire. Wake the waiters with the same idempotency key: those that repeat the
        request get the same lease, and those with another body are refused. `unplaced` waiters have no ticket yet."""
        if acquire.idempotency_key is not None:
            for waiter in (*self._by_lock.get(acquire.lock_name, ()), *unplaced):
                other = waiter.acquire
                if (other.lock_name, other.idempotency_key) == (acquire.lock_name, acquire.idempotency_key):
                    waiter.key_granted = True
                    waiter.look(NOW)

    def firsts(self) -> list[Waiter]:
        return [queue[0] for queue in self._by_lock.values()]


class Entrance:
    """Where waiters ask for their tickets. The waiters of one lock do so one statement after the other, in the order of
    their arrival, because two statements on two sessions could overtake each other. Waiters that arrive during a
    statement share the next one."""

    def __init__(self, pool: Pool, before: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._pool, self._before = pool, before
        self._lines: dict[str, deque[_Question]] = {}
        self._openers: dict[str, Waiter] = {}
        self.tasks: set[asyncio.Task[None]] = set()

    def open(self, waiter: Waiter) -> bool:
        """True if no other waiter of this lock is at the entrance. The waiter then asks directly, and calls `leave`
        afterwards."""
        lock_name = waiter.acquire.lock_name
        if lock_name in self._lines:
            return False
        self._lines[lock_name] = deque()
        self._openers[lock_name] = waiter
        return True

    def leave(self, waiter: Waiter) -> None:
        """The waiter leaves the entrance. If `open` was True for it, the waiters that came meanwhile now ask. May be
        called repeatedly."""
        lock_name = waiter.acquire.lock_name
        if self._openers.get(lock_name) is waiter:
            del self._openers[lock_name]
            self._go_on(lock_name)

    def ask(self, lock_name: str, sent: str) -> "asyncio.Future[list[dict[str, Any]]]":
        question: _Question = (sent, asyncio.get_running_loop().create_future())
        if lock_name in self._lines:
            self._lines[lock_name].append(question)
        else:
            self._lines[lock_name] = deque([question])
            self._go_on(lock_name)
        return question[1]

    def _go_on(self, lock_name: str) -> None:
        if not self._lines[lock_name]:
            del self._lines[lock_name]
            return
        task = asyncio.create_task(self._serve(lock_name), name="pgleaderlock-locks-entrance")
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _serve(self, lock_name: str) -> None:
        line = self._lines[lock_name]
        group: list[_Question] = []
        try:
            while line:
                group = [line.popleft() for _ in range(min(len(line), BATCH_OPERATIONS_MAX))]
                await self._send(group)
                group = []
        finally:
            del self._lines[lock_name]
            _fail([*group, *line], StoreError("the store is closing, and it is not known what came of this"))

    async def _send(self, group: "list[_Question]") -> None:
        try:
            await self._before()
            rows = await self._pool.apply([sent for sent, _ in group], acquires=len(group))
        except StoreError as error:
            if len(group) == 1 or not cannot_be_written(error):
                _fail(group, error)
                return
            for question in group:  # one operation cannot be stored: send each by itself
                await self._send([question])
        else:
            for (_, answer), row in zip(group, rows, strict=True):
                settle(answer, [row])


def _fail(questions: "Sequence[_Question]", error: StoreError) -> None:
    for _, answer in questions:
        if not answer.done():
            answer.set_exception(error)
            answer.exception()  # a cancelled waiter does not retrieve it: without this, asyncio would warn


class Alarm:
    """One timer for all waiters. It stirs each waiter at its time; the waiter then checks the clock itself."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._due: list[tuple[float, int, Waiter]] = []
        self._kept_max = ALARMS_KEPT_MIN
        self._numbers = itertools.count()
        self._sooner = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def set(self, at: float, waiter: Waiter) -> None:
        """Set the alarm of a waiter, in place of an earlier one."""
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
        """Sleep until this time, or until an earlier alarm is set."""
        if until <= self._clock.now():
            return
        await first_of(self._clock.sleep(until - self._clock.now()), self._sooner.wait())


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
        self._entrance = Entrance(pool, self._enliven)
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
            # It first waits for the statement under way: before that, there may be nothing to clean up yet.
            await self._cleaned_up(waiter, keep_lease=False)
            raise
        except BaseException:
            # With a key, a repeated request must find the lease; without one, no request could.
            await self._cleaned_up(waiter, keep_lease=acquire.idempotency_key is not None)
            raise
        finally:
            self._entrance.leave(waiter)
            self._waiters.pop(waiter, None)
            self._calls -= 1
            if not self._calls:
                self._quiet.set()

    async def _wait(self, waiter: Waiter) -> Answer:
        opened = self._queues.first(waiter.acquire.lock_name) is None and self._entrance.open(waiter)
        if opened:
            answer = await self._ask(waiter, "acquire")  # most find the lock free, and need no ticket
            if not isinstance(answer, Held) or self._over(waiter):
                return answer
            waiter.held = answer
            await self._enliven()
        self._waiters[waiter] = self._unplaced[waiter] = None
        while True:
            try:
                answer = await self._ask(waiter, "wait", in_turn=not opened)
            except StoreError as error:
                if lasts(error) or self._over(waiter):
                    raise
                self._entrance.leave(waiter)
                opened = False
                # The ticket may exist. Ask again: the lease's id shows whether this request was granted.
                await asyncio.sleep(self._rng.uniform(*ASK_AGAIN_S))
                if self._over(waiter):
                    raise
                continue
            self._entrance.leave(waiter)
            opened = False
            if isinstance(answer, KeyReused):
                await self._cleaned_up(waiter, keep_lease=False)  # deletes its ticket, if it had one
                return answer
            if not isinstance(answer, Held):
                self._leave(waiter, self._clock.now() + waiter.acquire.ttl_ms / 1000)
                self._queues.stir_those_with_the_key_of(waiter.acquire, self._unplaced)
                return answer
            waiter.held = answer
            while not self._over(waiter) and self._clock.now() < waiter.look_at:
                await self._sleep(waiter)
            if self._over(waiter):
                return await self._give_up(waiter)

    def _over(self, waiter: Waiter) -> bool:
        return self._closing or self._clock.now() >= waiter.deadline

    async def _sleep(self, waiter: Waiter) -> None:
        """Sleep until it is time to ask or to give up, or until stirred."""
        self._alarm.set(min(waiter.look_at, waiter.deadline), waiter)
        await waiter.stirred.wait()
        waiter.stirred.clear()

    async def _ask(self, waiter: Waiter, kind: str, *, in_turn: bool = False) -> Answer:
        """`in_turn`: behind all waiters that are already waiting for a ticket of this lock."""
        waiter.heard = waiter.key_granted = False
        earlier, lease_id = list(waiter.lease_ids), new_lease_id()
        waiter.lease_ids.append(lease_id)
        now = self._clock.now()
        # The lease begins after this moment, so a client that counts from here never counts too long.
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
        if in_turn and waiter.ticket is None:
            waiter.asking = self._entrance.ask(waiter.acquire.lock_name, sent)
        else:
            waiter.asking = self._pool.apply([sent], acquires=1)
        try:
            # A cancelled caller must not cancel the statement, which may have been sent already.
            (row,) = await asyncio.shield(waiter.asking)
        except StoreError as error:
            self._failed(waiter, error)
            raise
        waiter.asking = None
        # The outcome of this request is known. The lease that it was given may be that of an earlier request.
        for known in (lease_id, row["lease_id"]):
            if known in waiter.lease_ids:
                waiter.lease_ids.remove(known)
        if row["ticket"] is not None:
            self._place(waiter, row["ticket"], row["remaining_ms"])
        answer = outcome_of(waiter.acquire, row, self._pool.room.locks_max)
        assert isinstance(answer, Answer)
        return answer

    def _failed(self, waiter: Waiter, error: StoreError) -> None:
        """The outcome of the last request is unknown, unless the error proves that it changed nothing."""
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
        is_first = self._queues.put(waiter)
        if waiter.key_granted or (is_first and waiter.heard):
            waiter.look_at = NOW
        elif not is_first:
            waiter.look_at = NEVER
        else:
            # The lock is free, and it is the turn of another server's waiter: the heartbeat will show when that
            # changes.
            waiter.look_at = NEVER if remaining_ms is None else self._clock.now() + remaining_ms / 1000

    def _leave(self, waiter: Waiter, look_at: float) -> None:
        waiter.alarm_at = NEVER
        self._queues.remove(waiter, look_at)
        self._waiters.pop(waiter, None)
        self._unplaced.pop(waiter, None)
        if waiter.unsure_until > BOOT_CLOCK.now():
            # One of its requests may still take effect: look for its lease until that is impossible.
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
        """Delete the ticket and end the lease, if there is one. It goes on in a task if the caller is cancelled."""
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
            return  # nothing was sent for this waiter: while the database is unreachable, keep no record of it
        try:
            await self._pool.apply([_abandon(waiter)], acquires=0)
        except StoreError:
            waiter.unsure_until = max(waiter.unsure_until, BOOT_CLOCK.now())
        if waiter.unsure_until > NOW:
            self._gone[waiter] = None
            self._beat()

    # --- The heartbeat, which also asks whose turn it is

    async def _enliven(self) -> None:
        """Make this server count as alive before it gets a ticket: tickets of other servers are skipped."""
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
        """Send heartbeats while a request waits or something is to be cleaned up."""
        while self._waiters or self._gone or self._calls:
            await within(TICK_S, self._poked.wait())
            self._poked.clear()
            with contextlib.suppress(StoreError):  # the database is unreachable: the next heartbeat tries again
                await self._tick()
                await self._clear_gone()
            await asyncio.sleep(TICK_S_MIN)  # bounds the rate, however often it is woken

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
        """Handle a notification: its payload is a lock's name, or empty for all locks. Unknown names are ignored."""
        if not payload:
            self._poked.set()
            return
        first = self._queues.first(payload)
        if first is not None:
            first.heard = True
            first.look(NOW)
        # It may concern waiters whose ticket is not known here yet.
        for waiter in self._unplaced:
            if waiter.acquire.lock_name == payload:
                waiter.heard = True

    # --- The end

    async def close(self) -> None:
        """Wake every waiter, and let each delete its own ticket."""
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
        known = (self._beating, self._listening, self._ticking, self._alarm.task, *self._tasks, *self._entrance.tasks)
        await cancel_and_wait(*(task for task in known if task is not None))
        # A connect that was cancelled half-way is closed when the last reference to it is dropped: drop ours.
        self._beating = self._listening = self._ticking = self._alarm.task = None
        with contextlib.suppress(StoreError):  # optional: other servers soon skip the tickets of a silent one
            await self._pool.query("locks_close", server_id=self._server_id)


def _abandon(waiter: Waiter) -> str:
    return waiting("abandon", waiter.acquire, None, waiter.lease_ids, waiter=waiter.number)


class _Sent(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    kind: str
    lock: str
    owner: str | None = None
    lease: str | None = None
    token: int | None = None
    ms: int | None = None
    key: str | None = None
    waiter: int | None = None
    ticket: int | None = None
    wait_ms: int | None = None
    waited_ms: int | None = None
    earlier: list[str] | None = None


def encoded(operation: Operation) -> str:
    op = operation
    if isinstance(op, Acquire):
        sent = _Sent("acquire", op.lock_name, op.owner_id, new_lease_id(), ms=op.ttl_ms, key=stored_key(op))
    elif isinstance(op, Renew):
        sent = _Sent("renew", op.lock_name, op.owner_id, op.lease_id, op.fencing_token, op.extend_by_ms)
    else:
        sent = _Sent("release", op.lock_name, op.owner_id, op.lease_id, op.fencing_token)
    return _encode(sent).decode()


def waiting(kind: str, acquire: Acquire, lease_id: str | None, earlier: list[str] | None, **waiter: int | None) -> str:
    """The encoded operation for a waiter's acquire (`acquire`, `wait`), or for its end (`abandon`)."""
    sent = _Sent(
        kind,
        acquire.lock_name,
        acquire.owner_id,
        lease_id,
        ms=acquire.ttl_ms,
        key=None if kind == "abandon" else stored_key(acquire),
        earlier=earlier or None,
        **waiter,
    )
    return _encode(sent).decode()


def _ttl_ms(operation: Operation) -> int:
    match operation:
        case Acquire():
            return operation.ttl_ms
        case Renew():
            return operation.extend_by_ms
    raise AssertionError(f"a lease for {operation!r}")


def outcome_of(operation: Operation, row: Mapping[str, Any], locks_max: int) -> Outcome:
    match row["outcome"]:
        case "granted" | "replayed" as how:
            return Granted(
                operation.lock_name,
                operation.owner_id,
                row["lease_id"],
                row["fencing_token"],
                row["expiry_ms"],
                _ttl_ms(operation),
                row["remaining_ms"],
                waited_ms=row["waited_ms"],
                replayed=how == "replayed",
            )
        case "held":
            held = Held(operation.lock_name, row["owner_id"] or "", row["expiry_ms"] or 0, row["remaining_ms"] or 0)
            return held if row["reused"] is None else KeyReused(row["reused"])
        case "full":
            return StoreFull(locks_max)
        case "renewed":
            return Renewed(row["expiry_ms"], _ttl_ms(operation))
        case "released":
            return Released()
        case _:
            return NotRenewed() if isinstance(operation, Renew) else NotReleased()


def view_of(row: Mapping[str, Any]) -> LockView:
    held = row["held"]
    return LockView(
        row["lock_name"],
        held,
        row["owner_id"] if held else None,
        row["lease_id"] if held else None,
        row["fencing_token"],
        row["expiry_ms"] if held else None,
        row["version"],
        row["waiters"],
    )
