"""What stands in for PostgreSQL and for time in the tests that need a scripted world, and a notebook for callbacks.

The fake connection has what `connect_fn` must bring and no more: `execute`, `fetchone`, `close` and `closed`. It is
trusted only because `test_table_live.py` runs it through the suite that a real psycopg connection passes as well.
Imports pgleaderlock, psycopg and the standard library.
"""

import asyncio
import contextlib
import heapq
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Unpack

import psycopg

from pgleaderlock import LeaderLock, LockState
from pgleaderlock._pg.statements import statement
from pgleaderlock.lock import LockOptions

__all__ = [
    "KEYS",
    "FakeClock",
    "FakeConnection",
    "FakeDatabase",
    "Gate",
    "Recorder",
    "captured_log",
    "fake_lock",
    "leading",
    "limit",
    "until",
    "until_answer",
]

KEYS = (7, 11)
# No test waits for time to pass; this only bounds how long a broken one may hang.
LIMIT_S = 20.0

_KINDS = {
    "SELECT pg_try_advisory_lock(%s, %s)": "try",
    "SELECT pg_advisory_unlock(%s, %s)": "unlock",
    "SELECT 1": "probe",
}


def limit() -> asyncio.Timeout:
    """The bound on every wait for a signal."""
    return asyncio.timeout(LIMIT_S)


async def until(condition: Callable[[], bool]) -> None:
    """Give the loop turns until something that has no signal of its own is so."""
    async with limit():
        while not condition():  # what is looked at has no event to wait for
            await asyncio.sleep(0)


async def until_answer(ask: Callable[[], Awaitable[object]]) -> None:
    """Ask a server until it says yes: it notices the end of a session a moment later, unannounced."""
    async with limit():
        while not await ask():  # a server sends no event for this
            await asyncio.sleep(0)


@contextlib.contextmanager
def captured_log() -> Iterator[list[logging.LogRecord]]:
    """Every record of the library, down to DEBUG."""
    records: list[logging.LogRecord] = []

    class Notebook(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    handler = Notebook()
    logger = logging.getLogger("pgleaderlock")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield records
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class Gate:
    """A scripted stop: the statement that comes to it waits here until it is opened."""

    def __init__(self) -> None:
        self._reached = asyncio.Event()
        self._open = asyncio.Event()

    async def pass_through(self) -> None:
        self._reached.set()
        await self._open.wait()

    async def reached(self) -> None:
        async with limit():
            await self._reached.wait()

    def open(self) -> None:
        self._open.set()


class FakeConnection:
    """Twenty lines, as promised: a session of a `FakeDatabase`, and a cursor with one row at the same time."""

    def __init__(self, database: "FakeDatabase") -> None:
        self.closed = False
        self._database = database
        self._row: Any = None

    async def execute(self, sql: str, params: tuple[int, int] | None = None) -> "FakeConnection":
        if self.closed:
            raise psycopg.OperationalError("the connection is closed")
        self._row = await self._database.answer(self, _KINDS[sql], params)
        return self

    async def fetchone(self) -> Any:
        return self._row

    async def close(self) -> None:
        if not self.closed:
            self.closed = True
            await self._database.forget(self)


class FakeDatabase:
    """Who holds which lock, what was said in which order, and what goes wrong next.

    Without a script it answers as PostgreSQL does. `script(kind, what)` changes the next answer to `connect`, `try`,
    `probe` or `unlock`: an exception is raised, a `Gate` is waited at, anything else is the row that comes back.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.connections: list[FakeConnection] = []
        self._holds: dict[tuple[int, int], list[FakeConnection]] = {}
        self._script: dict[str, deque[Any]] = {kind: deque() for kind in ("connect", "try", "probe", "unlock", "close")}
        self._grown = asyncio.Event()

    async def connect(self) -> Any:
        await self._next("connect")
        self.connections.append(FakeConnection(self))
        return self.connections[-1]

    def script(self, kind: str, *what: Any) -> None:
        self._script[kind].extend(what)

    def gate(self, kind: str) -> Gate:
        self.script(kind, gate := Gate())
        return gate

    def holder(self, keys: tuple[int, int] = KEYS) -> FakeConnection | None:
        holds = self._holds.get(keys)
        return holds[-1] if holds else None

    def open_connections(self) -> list[FakeConnection]:
        return [connection for connection in self.connections if not connection.closed]

    async def seen(self, kind: str, times: int = 1) -> None:
        """Return once that was said so often."""
        async with limit():
            while self.log.count(kind) < times:
                self._grown.clear()
                await self._grown.wait()

    async def answer(self, session: FakeConnection, kind: str, keys: tuple[int, int] | None) -> Any:
        scripted = await self._next(kind)
        if scripted is not None:
            return scripted
        if keys is None:
            return (1,)
        holds = self._holds.setdefault(keys, [])
        if kind == "unlock":
            held = session in holds
            if held:
                holds.remove(session)
            return (held,)
        free = all(holder is session for holder in holds)
        if free:
            holds.append(session)
        return (free,)

    async def forget(self, session: FakeConnection) -> None:
        for keys, holds in self._holds.items():
            self._holds[keys] = [holder for holder in holds if holder is not session]
        await self._next("close")

    async def _next(self, kind: str) -> Any:
        self.log.append(kind)
        self._grown.set()
        scripted = self._script[kind].popleft() if self._script[kind] else None
        if isinstance(scripted, Gate):
            await scripted.pass_through()
            return None
        if isinstance(scripted, BaseException):
            raise scripted
        return scripted


class FakeClock:
    """Time that passes only when the test says so."""

    def __init__(self) -> None:
        self._now = 1_000.0
        self._number = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self._now

    async def sleep(self, delay_s: float) -> None:
        if delay_s <= 0:
            await asyncio.sleep(0)
            return
        wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + delay_s, next(self._number), wake))
        await wake

    def jump(self, by_s: float) -> None:
        """Time passes and nobody has woken up yet: what a process sees in its first instruction after a pause."""
        self._now += by_s

    def advance(self, by_s: float) -> None:
        """Time passes, and whoever slept for so long wakes up."""
        self.jump(by_s)
        while self._sleepers and self._sleepers[0][0] <= self._now:
            _, _, wake = heapq.heappop(self._sleepers)
            if not wake.done():
                wake.set_result(None)

    def waits_s(self) -> list[float]:
        """How long each of those who sleep now still has to."""
        return sorted(due - self._now for due, _, wake in self._sleepers if not wake.done())

    async def somebody_sleeps(self) -> float:
        """Return once somebody waits for time to pass, with the shortest wait."""
        await until(lambda: bool(self.waits_s()))
        return self.waits_s()[0]


class Recorder:
    """Writes down every callback of a lock, in order. `follower>acquiring` is a change of state."""

    def __init__(self, lock: LeaderLock) -> None:
        self.calls: list[str] = []
        self.errors: list[Exception] = []
        self._grown = asyncio.Event()
        lock.on_state_change(lambda source, target: self._note(f"{source.value}>{target.value}"))
        lock.on_acquired(lambda: self._note("on_acquired"))
        lock.on_acquire_failed(lambda: self._note("on_acquire_failed"))
        lock.on_lost(lambda: self._note("on_lost"))
        lock.on_released(lambda: self._note("on_released"))
        lock.on_stopped(lambda: self._note("on_stopped"))
        lock.on_error(self._note_error)

    async def seen(self, what: str, times: int = 1) -> None:
        """Return once that callback has run so often."""
        async with limit():
            while self.calls.count(what) < times:
                self._grown.clear()
                await self._grown.wait()

    def _note(self, what: str) -> None:
        self.calls.append(what)
        self._grown.set()

    def _note_error(self, error: Exception) -> None:
        self.errors.append(error)
        self._note("on_error")


def fake_lock(database: FakeDatabase, clock: FakeClock | None = None, **options: Unpack[LockOptions]) -> LeaderLock:
    """A lock in the scripted world. With a clock of ours nothing happens by itself after the first attempt."""
    options.setdefault("connect_fn", database.connect)
    lock = LeaderLock("", *KEYS, **options)
    if clock is not None:
        lock._clock = clock
    return lock


@contextlib.asynccontextmanager
async def leading(
    database: FakeDatabase, clock: FakeClock, **options: Unpack[LockOptions]
) -> AsyncIterator[LeaderLock]:
    """A lock of the scripted world that leads already."""
    lock = fake_lock(database, clock, **options)
    async with lock:
        assert await lock.wait_for_leadership()
        assert lock.state is LockState.LEADER
        yield lock


def failing_statements(*names: str) -> Callable[[str], bytes]:
    """These statements fail after all that they do, as a statement_timeout can make them."""

    def text(name: str) -> bytes:
        # pg_backend_pid() keeps the planner from dividing before anything is done.
        return statement(name) + (b", 1 / (pg_backend_pid() * 0)" if name in names else b"")

    return text
