"""One connection in several threads or tasks, and in a forked child: a lock is taken once, and by its own process."""

import asyncio
import contextlib
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.pq import TransactionStatus

from pgleaderlock import (
    LeadershipGuard,
    LockError,
    LockNotAcquired,
    acquire_leadership,
    acquire_leadership_blocking,
    guard,
    key_pair,
    sync,
)
from pgleaderlock._base.steps import Steps
from pgleaderlock._lock import guarding
from pgleaderlock._lock.borrowed import BorrowedSession
from pgleaderlock._pg import connect as pg_connect
from pgleaderlock._pg.connect import Backend
from pgleaderlock.errors import ConnectionError, DatabaseError
from support.counts import count
from support.fakes import until
from support.forked import at_once, in_child
from support.recorder import WAIT_S
from support.server_side import holders, terminate

Connection = psycopg.AsyncConnection[tuple[Any, ...]]
SyncConnection = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture
def name() -> str:
    return f"guard-sharing-{uuid.uuid4()}"


@pytest.fixture
async def conn(dsn: str) -> AsyncIterator[Connection]:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as opened:
        yield opened


@pytest.fixture
def blocking(dsn: str) -> Iterator[SyncConnection]:
    with psycopg.connect(dsn, autocommit=True) as opened:
        yield opened


class Held:
    """Lets the first statement of this name wait just before it is sent; those that follow pass."""

    def __init__(self, statement: str) -> None:
        self._statement = statement
        self._once = threading.Lock()
        self.reached = threading.Event()
        self.let_go = threading.Event()

    def waits(self, statement: str) -> bool:
        return statement == self._statement and self._once.acquire(blocking=False)


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Held]:
    """Holds a statement of the sync or the async guard."""
    ask = guarding._ask

    def start(statement: str) -> Held:
        held = Held(statement)

        def reached(conn: Any) -> Steps[None]:
            held.reached.set()
            if isinstance(conn, psycopg.AsyncConnection):
                yield until(held.let_go.is_set)
            else:
                assert held.let_go.wait(WAIT_S)

        def asked(conn: Any, what: str, name: str, params: dict[str, Any]) -> Steps[tuple[Any, ...]]:
            if held.waits(name):
                yield from reached(conn)
            return (yield from ask(conn, what, name, params))

        def sampled(conn: Any, mark: str | None) -> Steps[Backend]:
            if held.waits("same_backend"):
                yield from reached(conn)
            return (yield from pg_connect.sampled(conn, mark))

        monkeypatch.setattr(guarding, "_ask", asked)
        monkeypatch.setattr(guarding, "sampled", sampled)
        return held

    return start


# --- Threads and tasks


def test_while_one_thread_takes_a_lock_another_one_on_the_same_connection_is_told_no(
    blocking: SyncConnection, name: str, dsn: str, hold: Callable[[str], Held]
) -> None:
    held = hold("guard_take")
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(sync.acquire_leadership, blocking, name)
        assert held.reached.wait(WAIT_S)
        try:
            with pytest.raises(LockNotAcquired):
                sync.acquire_leadership(blocking, name)
        finally:
            held.let_go.set()
        winner = first.result(WAIT_S)
        with pytest.raises(LockError, match="already leads"):
            sync.acquire_leadership(blocking, name)
        winner.release()
    assert holders(dsn, key_pair(name)) == [], "one release must free what was taken once"


async def test_while_one_task_takes_a_lock_another_one_on_the_same_connection_is_told_no(
    conn: Connection, name: str, dsn: str, hold: Callable[[str], Held]
) -> None:
    held = hold("guard_take")
    first = asyncio.create_task(acquire_leadership(conn, name))
    await until(held.reached.is_set)
    try:
        with pytest.raises(LockNotAcquired):
            await acquire_leadership(conn, name)
    finally:
        held.let_go.set()
    await (await first).release()
    assert holders(dsn, key_pair(name)) == [], "one release must free what was taken once"


def test_of_threads_that_race_on_one_connection_exactly_one_gets_a_guard(
    blocking: SyncConnection, name: str, dsn: str
) -> None:
    racers = 4
    start = threading.Barrier(racers)

    def race() -> sync.LeadershipGuard | None:
        start.wait(WAIT_S)
        try:
            return sync.acquire_leadership(blocking, name)
        except (LockNotAcquired, LockError, DatabaseError):  # the last one: another one's statement is under way
            return None

    with ThreadPoolExecutor(racers) as threads:
        for _ in range(count(20, 300)):
            attempts: list[Future[sync.LeadershipGuard | None]] = [threads.submit(race) for _ in range(racers)]
            guards = [won for each in attempts if (won := each.result(WAIT_S)) is not None]
            assert len(guards) == 1
            guards[0].release()
    assert holders(dsn, key_pair(name)) == []


async def test_of_tasks_that_race_on_one_connection_exactly_one_gets_a_guard(
    conn: Connection, name: str, dsn: str
) -> None:
    for _ in range(count(10, 100)):
        results = await asyncio.gather(*(acquire_leadership(conn, name) for _ in range(4)), return_exceptions=True)
        guards = [each for each in results if isinstance(each, LeadershipGuard)]
        assert len(guards) == 1
        assert sum(isinstance(each, LockNotAcquired) for each in results) == 3
        await guards[0].release()
    assert holders(dsn, key_pair(name)) == []


async def test_a_refused_a_failed_and_a_cancelled_try_leave_the_name_free_to_try_again(
    conn: Connection, name: str, dsn: str, hold: Callable[[str], Held]
) -> None:
    async with await acquire_leadership_blocking(dsn, name):
        with pytest.raises(LockNotAcquired):
            await acquire_leadership(conn, name)
    await conn.execute("BEGIN")
    with pytest.raises(DatabaseError, match="in a transaction"):
        await acquire_leadership(conn, name)
    await conn.execute("ROLLBACK")
    held = hold("same_backend")
    proving = asyncio.create_task(acquire_leadership(conn, name, allow_pooler=True))
    await until(held.reached.is_set)
    proving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await proving
    async with await acquire_leadership(conn, name) as again:
        assert await again.check()


def test_an_interrupted_try_leaves_the_name_free_to_try_again(
    blocking: SyncConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_args: object, **_options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(guarding, "prove", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sync.acquire_leadership(blocking, name, allow_pooler=True)
    with sync.acquire_leadership(blocking, name) as again:
        assert again.check()


def test_two_threads_that_release_one_guard_release_it_once(
    blocking: SyncConnection, name: str, hold: Callable[[str], Held]
) -> None:
    obtained = sync.acquire_leadership(blocking, name)
    held = hold("guard_unlock")
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(obtained.release)
        assert held.reached.wait(WAIT_S)
        second = threads.submit(obtained.release)
        held.let_go.set()
        first.result(WAIT_S)
        second.result(WAIT_S)
    assert not obtained.held


async def test_two_tasks_that_release_one_guard_release_it_once(
    conn: Connection, name: str, hold: Callable[[str], Held]
) -> None:
    obtained = await acquire_leadership(conn, name)
    held = hold("guard_unlock")
    first = asyncio.create_task(obtained.release())
    await until(held.reached.is_set)
    second = asyncio.create_task(obtained.release())
    await asyncio.sleep(0)  # it has begun
    held.let_go.set()
    await asyncio.gather(first, second)
    assert not obtained.held


class Busy:
    """A session that holds a lock for which a statement on another connection waits, until it is let go."""

    def __init__(self, dsn: str, name: str) -> None:
        self._keys = key_pair(f"{name}-busy")
        self._holder = psycopg.connect(dsn, autocommit=True)
        self._holder.execute("SELECT pg_advisory_lock(%s, %s)", self._keys)

    @property
    def statement(self) -> tuple[str, tuple[int, int]]:
        return "SELECT pg_advisory_xact_lock(%s, %s)", self._keys

    def let_go(self) -> None:
        self._holder.close()


@pytest.fixture
def busy(dsn: str, name: str) -> Iterator[Busy]:
    made = Busy(dsn, name)
    yield made
    made.let_go()


async def test_a_connection_that_is_busy_in_another_task_is_called_busy_and_not_in_a_transaction(
    conn: Connection, name: str, busy: Busy
) -> None:
    held = await acquire_leadership(conn, f"{name}-held")
    running = asyncio.create_task(conn.execute(*busy.statement))
    await until(lambda: conn.pgconn.transaction_status == TransactionStatus.ACTIVE)
    with pytest.raises(DatabaseError, match="busy with a statement"):
        await acquire_leadership(conn, name)
    with pytest.raises(LockError, match="busy with a statement"):
        await held.release()
    busy.let_go()
    await running
    await held.release()
    await (await acquire_leadership(conn, name)).release()


async def test_a_connection_that_is_busy_in_another_thread_is_called_busy_and_not_in_a_transaction(
    blocking: SyncConnection, name: str, busy: Busy
) -> None:
    held = sync.acquire_leadership(blocking, f"{name}-held")
    with ThreadPoolExecutor(1) as threads:
        try:
            running = threads.submit(lambda: blocking.execute(*busy.statement))
            await until(lambda: blocking.pgconn.transaction_status == TransactionStatus.ACTIVE)
            with pytest.raises(DatabaseError, match="busy with a statement"):
                sync.acquire_leadership(blocking, name)
            with pytest.raises(LockError, match="busy with a statement"):
                held.release()
        finally:
            busy.let_go()
        running.result(WAIT_S)
    held.release()
    sync.acquire_leadership(blocking, name).release()


# --- A forked child


def link(descriptor: int | str) -> str:
    """What a descriptor of this process leads to; empty if it is closed."""
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/self/fd/{descriptor}").readlink())
    return ""


def descriptors_of(socket: str) -> int:
    """How many descriptors of this process lead to this socket."""
    return sum(link(path.name) == socket for path in Path("/proc/self/fd").iterdir())


def refused_in_child(take: Callable[[], object]) -> bool:
    try:
        take()
    except DatabaseError as error:
        return "parent process leads" in str(error)
    return False


async def test_in_a_forked_child_a_guard_on_the_callers_connection_is_not_held_and_sends_nothing(
    conn: Connection, name: str
) -> None:
    async with await acquire_leadership(conn, name) as held:

        def ask() -> str:
            told = [held.held, at_once(held.check()), at_once(held.lost()), at_once(held.release())]
            told.append(refused_in_child(lambda: at_once(acquire_leadership(conn, name))))
            return str(told)

        assert in_child(ask) == str([False, False, None, None, True])
        assert held.held
        assert await held.check(), "the child has released the parent's lock"


def test_in_a_forked_child_a_sync_guard_is_not_held_and_sends_nothing(blocking: SyncConnection, name: str) -> None:
    with sync.acquire_leadership(blocking, name) as held:

        def ask() -> str:
            held.release()
            refused = refused_in_child(lambda: sync.acquire_leadership(blocking, name))
            return str([held.held, held.check(), held.lost(), refused])

        assert in_child(ask) == str([False, False, True, True])
        assert held.held
        assert held.check(), "the child has released the parent's lock"


async def test_in_a_forked_child_a_helpers_guard_is_not_held_and_its_socket_is_let_go(dsn: str, name: str) -> None:
    async with await acquire_leadership_blocking(dsn, name) as held:
        backing = held._backing
        assert isinstance(backing, guard._OnSession)
        socket = link(backing._session._connection.fileno())

        def ask() -> str:
            return str([held.held, at_once(held.check()), at_once(held.release()), descriptors_of(socket)])

        assert in_child(ask) == str([False, False, None, 0])
        assert await held.check(), "the child has released the parent's lock"


def test_a_forked_child_keeps_no_duplicate_of_a_socket_whose_loss_the_parent_waits_for(
    blocking: SyncConnection, name: str, dsn: str
) -> None:
    held = sync.acquire_leadership(blocking, name)
    socket = link(blocking.fileno())
    with ThreadPoolExecutor(1) as threads:
        losing = threads.submit(held.lost, WAIT_S)
        while descriptors_of(socket) < 2 and not losing.done():  # the wait sends no event when it begins
            time.sleep(0.01)
        kept = in_child(lambda: str(descriptors_of(socket)))
        terminate(dsn, key_pair(name))
        assert losing.result(WAIT_S)
    assert kept == "1"  # the caller's own descriptor, which is not ours to close


async def test_a_forked_child_that_drops_its_copy_of_a_wait_does_not_end_the_parents(
    conn: Connection, name: str, dsn: str
) -> None:
    held = await acquire_leadership(conn, name)
    losing = asyncio.create_task(held.lost())
    await asyncio.sleep(0)  # it has begun to listen

    def drop() -> str:
        coroutine = losing.get_coro()
        assert coroutine is not None
        coroutine.close()  # what the garbage collector does at the end of the child
        return "dropped"

    assert in_child(drop) == "dropped"
    terminate(dsn, key_pair(name))
    async with asyncio.timeout(WAIT_S):
        await losing
    assert not held.held


async def test_in_a_forked_child_the_session_of_a_connect_fn_sends_nothing_and_is_not_closed(
    conn: Connection, name: str
) -> None:
    session, keys = BorrowedSession(conn, WAIT_S), key_pair(name)
    assert await session.take(keys)

    def ask() -> str:
        told = []
        for statement in (session.probe, session.unlock, session.take):
            try:
                at_once(statement(keys))
            except ConnectionError as error:
                told.append("parent process" in str(error))
        at_once(session.close())
        return str(told)

    assert in_child(ask) == str([True, True, True])
    await session.probe(keys)
    await session.unlock(keys)
