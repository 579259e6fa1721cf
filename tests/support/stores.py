"""The stores that the conformance suite runs on: how each is opened, how its time passes, how it is opened again.

To add a store, write a `Place` for it and one line in `STORES`. Imports pytest, psycopg, the
stores and the fakes.
"""

import asyncio
import contextlib
import datetime as dt
import functools
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

import apsw
import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from pgleaderlock.migrate import migrate
from pgleaderlock.server.postgres.store import PostgresStore
from pgleaderlock.server.sqlite.store import SqliteStore
from pgleaderlock.server.store import Acquire, Granted, Held, Release, Renew, Store, StoreFull
from support.counts import proof_asked
from support.fakes import FakeClock
from support.fencing import database, ledger_template, plain_role

__all__ = [
    "OWNED",
    "PATIENCE_S",
    "STORES",
    "STORE_USER",
    "Blocked",
    "OpenPlace",
    "OpenStore",
    "Place",
    "acquired",
    "all_is_quiet",
    "held",
    "read",
    "release_of",
    "renew_of",
    "stand_still_until",
    "the_thread_rests",
    "turns_of_the_loop",
    "until_waiting",
    "waited",
    "write",
]

# Not asserted anywhere: only the bound after which a test gives up instead of hanging.
PATIENCE_S = 20.0

# A process that uses a store, to be killed.
STORE_USER = Path(__file__).parent / "store_user.py"

OpenStore = Callable[..., AbstractAsyncContextManager[SqliteStore]]


class Place(Protocol):
    """A store that is open, and what a test may do to it from outside."""

    @property
    def store(self) -> Store: ...

    restart_extends_leases: bool
    """Whether a lease counts for its full duration again after a restart, because the store's clock is gone."""

    async def pass_ms(self, passed_ms: int) -> None:
        """Time passes, for leases and for those who wait. Comes back at once or when it has."""

    async def reopen(self) -> None:
        """The server stops and starts again; `store` is a new one, on the same data."""


class OpenPlace(Protocol):
    """Opens a store with nothing in it, that holds so many locks at most."""

    def __call__(self, *, locks_max: int = 100_000) -> AbstractAsyncContextManager[Place]: ...


# --- SQLite


class SqlitePlace:
    restart_extends_leases = True

    def __init__(self, path: Any, **options: Any) -> None:
        self.clock = FakeClock()
        self._path = path
        self._options = options
        self.store = self._store()

    def _store(self) -> SqliteStore:
        return SqliteStore(self._path, clock=self.clock, **self._options)

    async def pass_ms(self, passed_ms: int) -> None:
        self.clock.advance(passed_ms / 1000)

    async def reopen(self) -> None:
        await self.store.close()
        self.store = self._store()
        await self.store.open()


def _sqlite(request: pytest.FixtureRequest) -> OpenPlace:
    folder = request.getfixturevalue("tmp_path")

    @contextlib.asynccontextmanager
    async def opened(*, locks_max: int = 100_000) -> AsyncIterator[Place]:
        place = SqlitePlace(folder / "locks.db", locks_max=locks_max)
        await place.store.open()
        try:
            yield place
        finally:
            await place.store.close()

    return opened


# --- PostgreSQL


# The database's clock cannot be moved, but everything that it is compared with can.
_PASS = """
UPDATE pgleaderlock.lock_leases SET lease_expiry = lease_expiry - %(passed)s, freed_at = freed_at - %(passed)s;
UPDATE pgleaderlock.lock_waiters SET deadline = deadline - %(passed)s
"""


class PostgresPlace:
    restart_extends_leases = False

    def __init__(self, owner_dsn: str, dsn: str, **options: Any) -> None:
        self.clock = FakeClock()
        self._owner_dsn = owner_dsn
        self._dsn = dsn
        self._options = options
        self.store = self._store()

    def _store(self) -> PostgresStore:
        return PostgresStore(self._dsn, clock=self.clock, **self._options)

    async def pass_ms(self, passed_ms: int) -> None:
        async with await psycopg.AsyncConnection.connect(
            self._owner_dsn, autocommit=True, cursor_factory=psycopg.AsyncClientCursor
        ) as owner:
            await owner.execute(_PASS, {"passed": dt.timedelta(milliseconds=passed_ms)})
        self.clock.advance(passed_ms / 1000)

    async def reopen(self) -> None:
        await self.store.close()
        self.store = self._store()
        await self.store.open()


def _postgres(request: pytest.FixtureRequest, *, plain: bool) -> OpenPlace:
    server: str = request.getfixturevalue("dsn")
    # The owner's store makes its tables by itself.
    template = ledger_template(server) if plain else "template1"

    @contextlib.asynccontextmanager
    async def opened(*, locks_max: int = 100_000) -> AsyncIterator[Place]:
        with contextlib.ExitStack() as made:
            owner = made.enter_context(database(server, template))
            dsn = owner
            if plain:
                dsn = made.enter_context(plain_role(owner))
                await migrate(owner, grant_lock_server_to=str(conninfo_to_dict(dsn)["user"]))
            place = PostgresPlace(owner, dsn, locks_max=locks_max)
            await place.store.open()
            try:
                yield place
            finally:
                await place.store.close()

    return opened


OWNED: dict[str, Callable[[pytest.FixtureRequest], OpenPlace]] = {
    "sqlite": _sqlite,
    "postgres": functools.partial(_postgres, plain=False),
}
"""By the one who may do everything."""
STORES: dict[str, Callable[[pytest.FixtureRequest], OpenPlace]] = {
    "sqlite": _sqlite,
    "postgres with its grants alone": functools.partial(_postgres, plain=True),
}
if proof_asked():
    # The owner may do all that the other may: at small counts the stricter one stands for both.
    STORES["postgres"] = OWNED["postgres"]


# --- What most tests say


async def acquired(store: Store, lock_name: str, owner_id: str = "alice", ttl_ms: int = 30_000) -> Granted:
    """An acquire that must be granted."""
    (outcome,) = await store.submit([Acquire(lock_name, owner_id, ttl_ms)])
    assert isinstance(outcome, Granted), outcome
    return outcome


async def held(store: Store, lock_name: str, owner_id: str = "bob") -> Held:
    """An acquire that must be refused."""
    (outcome,) = await store.submit([Acquire(lock_name, owner_id, 30_000)])
    assert isinstance(outcome, Held), outcome
    return outcome


async def waited(store: Store, acquire: Acquire, wait_ms: int) -> Granted | Held | StoreFull:
    """An acquire that waits, as a task that may be cancelled."""
    (outcome,) = await store.submit([acquire], wait_ms)
    assert isinstance(outcome, Granted | Held | StoreFull), outcome
    return outcome


def renew_of(lease: Granted, extend_by_ms: int = 30_000) -> Renew:
    return Renew(lease.lock_name, lease.owner_id, lease.lease_id, lease.fencing_token, extend_by_ms)


def release_of(lease: Granted) -> Release:
    return Release(lease.lock_name, lease.owner_id, lease.lease_id, lease.fencing_token)


async def until_waiting(store: Store, lock_name: str, waiters: int) -> None:
    """Returns once so many wait for this lock. The view is the only one who tells, and it must be asked."""
    async with asyncio.timeout(PATIENCE_S):
        while (await store.get(lock_name)).waiters != waiters:
            await asyncio.sleep(0.001)


def read(path: Path, query: str, *values: Any) -> Any:
    """One value out of a SQLite file, past its store."""
    connection = apsw.Connection(str(path))
    try:
        return connection.execute(query, values).get
    finally:
        connection.close()


def write(path: Path, statement: str) -> None:
    """Somebody changes a SQLite file while no store uses it."""
    connection = apsw.Connection(str(path))
    try:
        connection.execute(statement)
    finally:
        connection.close()


async def the_thread_rests(store: SqliteStore) -> None:
    """It has quite ended what it has answered."""
    assert store._writer is not None
    await asyncio.to_thread(store._writer._turn.acquire)
    store._writer._turn.release()


async def all_is_quiet(store: SqliteStore) -> None:
    """Nothing is under way, and whatever has been was long ago: what comes next is done on the loop's thread."""
    await the_thread_rests(store)
    await asyncio.sleep(0)
    store._writer._threads_until = 0.0  # type: ignore[union-attr] # however slow the disk, or large the crowd


class Blocked:
    """Holds up the writer's thread, inside a transaction, for as long as the block lasts."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store
        self._free = threading.Event()
        self._reached = threading.Event()

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._store._call(lambda locks: self._hold()))
        await asyncio.to_thread(self._reached.wait, PATIENCE_S)

    def _hold(self) -> None:
        self._reached.set()
        self._free.wait(PATIENCE_S)

    async def __aexit__(self, *error: object) -> None:
        self._free.set()
        await self._task


def stand_still_until(happened: Callable[[], bool]) -> None:
    """Waits for the writer's thread while the event loop does nothing: what it answers is not heard yet."""
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.001)


async def turns_of_the_loop(number: int) -> None:
    """A request gathers with others for one turn before it is handed over."""
    for _ in range(number):
        await asyncio.sleep(0)
