"""The sessions of the PostgreSQL store: a few dedicated connections that share all work in batches.

Operations that arrive while every session is busy are sent together in the next statement, up to a bound: one round
trip and one flush to disk for all of them. If the outcome of a statement is unknown, its session is closed and its
callers get an error that says so.

Must never send a statement again that may have taken effect, and never report a grant that came with a warning.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import psycopg

from pgleaderlock._base.aio import settle
from pgleaderlock._base.clock import BOOT_CLOCK
from pgleaderlock._pg.conninfo import ConnectionSettings, Dsn
from pgleaderlock._pg.session import DedicatedSession
from pgleaderlock.errors import PgLeaderLockError, SchemaError, UnsafeSessionError
from pgleaderlock.retry import JITTER, ExponentialBackoff, reconnect_jitter_s
from pgleaderlock.server.store import StoreBusy, StoreError

__all__ = [
    "BATCH_OPERATIONS_MAX",
    "Pool",
    "Row",
    "cannot_be_written",
    "closed",
    "lasts",
    "nothing_came_of",
    "store_error",
]

Row = dict[str, Any]

BATCH_OPERATIONS_MAX = 500
QUEUED_OPERATIONS_MAX = 50_000
RECONNECT_BACK_OFF = ExponentialBackoff(base_s=0.05, max_s=1.0)
# Before an acquire is refused as `StoreFull`, the count of stored locks must not be older than this.
COUNT_AGE_S_MAX = 0.2

_BUSY = frozenset({"55P03", "57014", "40P01", "40001"})
# SQLSTATE classes of errors after which the server has certainly rolled back.
_ROLLED_BACK = frozenset({"22", "23", "25", "42", "53", "55"})
_GRANTS = "see the GRANTs of a lock server in docs/ledger.md"
_NO_POOLER = (
    "there is a connection pooler between the lock server and PostgreSQL. The lock server needs sessions of its own, "
    "for its statements and one that listens: give it the address of PostgreSQL itself (or allow_pooler=True, if the "
    "pool is in session mode)"
)


class _NotSent(StoreError):
    """There was no session, so nothing was sent to the database."""


class _QueueFull(StoreBusy):
    pass


def store_error(error: PgLeaderLockError) -> StoreError:
    """The store's error for a failure of the session."""
    sqlstate = getattr(error.__cause__, "sqlstate", None)
    if sqlstate in _BUSY:
        found: StoreError = StoreBusy(f"the database is busy: {error}")
    elif sqlstate == "42501":  # insufficient_privilege
        found = StoreError(f"{error}; {_GRANTS}")
    elif isinstance(error, UnsafeSessionError) and error.reason == "pooler":
        found = StoreError(_NO_POOLER)
    else:
        found = StoreError(str(error))
    found.__cause__ = error
    return found


def lasts(error: StoreError) -> bool:
    """True for an error that lasts until an operator removes its cause."""
    cause = error.__cause__
    return isinstance(cause, SchemaError | UnsafeSessionError) or (
        getattr(getattr(cause, "__cause__", None), "sqlstate", None) == "42501"
    )


def nothing_came_of(error: StoreError) -> bool:
    """True if a statement with this error has certainly changed nothing, and never will."""
    sqlstate = _sqlstate(error)
    return isinstance(error, _NotSent | _QueueFull) or sqlstate in _BUSY or sqlstate[:2] in _ROLLED_BACK


def cannot_be_written(error: StoreError) -> bool:
    """True if a value of one operation cannot be stored in this database. None of the operations was carried out."""
    return _sqlstate(error).startswith("22")


def _sqlstate(error: StoreError) -> str:
    return getattr(getattr(error.__cause__, "__cause__", None), "sqlstate", None) or ""


@dataclass(eq=False, slots=True)
class _Job:
    """The operations of one caller, already encoded, or one named statement."""

    answer: "asyncio.Future[Any]"
    operations: Sequence[str] = ()
    acquires: int = 0
    read: Callable[[list[Row]], Any] | None = None
    """Turns the rows of the operations into the caller's answer."""
    name: str = ""
    params: dict[str, object] = field(default_factory=dict)


class Room:
    """How many locks with new names there is still room for. Other servers create locks too, so the locks are counted
    again near the limit and with every sweep; far from the limit an old count will do."""

    def __init__(self, locks_max: int) -> None:
        self.locks_max = locks_max
        self._stored: int | None = None
        self._counted_at = 0.0
        self._margin = max(100, locks_max // 100)

    def unsure(self, wanted: int) -> bool:
        """Must the locks be counted before this many are created?"""
        if self._stored is None:
            return wanted > 0
        near = self._stored + wanted > self.locks_max - self._margin
        return wanted > 0 and near and BOOT_CLOCK.now() > self._counted_at + COUNT_AGE_S_MAX

    def counted(self, stored: int) -> None:
        self._stored, self._counted_at = stored, BOOT_CLOCK.now()

    def take(self, wanted: int) -> int:
        """Reserve room for up to this many; returns for how many there is room."""
        stored = self._stored or 0
        reserved = max(0, min(wanted, self.locks_max - stored))
        if self._stored is not None:
            self._stored += reserved
        return reserved

    def give_back(self, unused: int) -> None:
        if self._stored is not None:
            self._stored -= unused

    def forget(self) -> None:
        """The outcome of the last reservation is unknown: count again before the next one."""
        self._stored = None


class _Link:
    """One session, opened when it is needed and reopened after a loss."""

    def __init__(self, pool: "Pool") -> None:
        self._pool = pool
        self._session: DedicatedSession | None = None
        self._lost: asyncio.Task[Any] | None = None

    async def session(self) -> DedicatedSession:
        if self._session is not None and self._lost is not None and not self._lost.done():
            return self._session
        await self.close()
        self._session = await self._pool.connect()
        self._lost = asyncio.create_task(self._session.lost(), name="pgleaderlock-locks-lost")
        return self._session

    async def rows(self, name: str, **params: object) -> list[Row]:
        """Run one statement. Any failure closes the session."""
        try:
            session = await self.session()
        except PgLeaderLockError as error:
            raise _NotSent(str(store_error(error))) from error
        try:
            rows = await session.rows(name, **params)
        except BaseException:
            await self.close()
            raise
        if session.doubts:
            # For a cancelled wait for a synchronous standby, the server sends only a warning and then a normal answer.
            text = "; ".join(session.doubts)
            await self.close()
            raise StoreError(f"the database answered with a warning, so it is not known what is durable: {text}")
        return rows

    async def hint(self, rows: list[Row]) -> None:
        """Wake the servers that a decision has named, in a separate statement. If the hint is lost, they notice at
        their next heartbeat."""
        hints = rows[0].get("hints") if rows else None
        if not hints or self._session is None:
            return
        wake = [msgspec.json.decode(line, type=tuple[str, str]) for line in hints.split("\n") if line]
        try:
            await self._session.rows_or_none(
                "locks_hint", server_ids=[server_id for server_id, _ in wake], lock_names=[name for _, name in wake]
            )
        except PgLeaderLockError:
            await self.close()

    async def close(self) -> None:
        if self._lost is not None:
            self._lost.cancel()
            self._lost = None
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()


class Pool:
    """Takes operations and statements from any number of tasks, and serves them on a few sessions."""

    def __init__(self, dsn: Dsn, settings: ConnectionSettings, *, server_id: str, size: int, locks_max: int) -> None:
        self._dsn, self._settings = dsn, settings
        self._server_id = server_id
        self._size = size
        self.room = Room(locks_max)
        self._jobs: deque[_Job] = deque()
        self._queued = 0
        self._idle: list[asyncio.Future[None]] = []
        self._workers: list[asyncio.Task[None]] = []
        self._stopping = False
        self._rng = JITTER
        self._not_before = 0.0
        self._failures = 0
        self._last_failure: PgLeaderLockError | None = None

    def start(self) -> None:
        self._stopping = False
        self._workers = [
            asyncio.create_task(self._work(), name=f"pgleaderlock-locks-{number}") for number in range(self._size)
        ]

    async def close(self) -> None:
        """Finish what is queued, then close every session."""
        self._stopping = True
        while self._idle:
            settle(self._idle.pop())
        workers, self._workers = self._workers, []
        await asyncio.gather(*workers, return_exceptions=True)
        for job in self._jobs:
            _refuse(job, closed())
        self._jobs.clear()
        self._queued = 0

    # --- For callers

    def apply(
        self, operations: Sequence[str], *, acquires: int, read: Callable[[list[Row]], Any] | None = None
    ) -> "asyncio.Future[Any]":
        """Queue operations. The answer has one row for each, in order, or what `read` makes of the rows."""
        return self._submit(_Job(asyncio.get_running_loop().create_future(), operations, acquires, read))

    def query(self, name: str, **params: object) -> "asyncio.Future[list[Row]]":
        """Queue one statement, which runs in its own transaction."""
        return self._submit(_Job(asyncio.get_running_loop().create_future(), name=name, params=params))

    def _submit(self, job: _Job) -> "asyncio.Future[Any]":
        if self._stopping or not self._workers:
            _refuse(job, closed())
        elif self._queued > QUEUED_OPERATIONS_MAX:
            _refuse(job, _QueueFull(f"{self._queued} operations wait for the database: try again a little later"))
        else:
            self._jobs.append(job)
            self._queued += len(job.operations)
            if self._idle:
                settle(self._idle.pop())
        return job.answer

    # --- The sessions

    async def connect(self) -> DedicatedSession:
        """Open a session. After a failure it waits before the next try, so as not to flood a restarting database."""
        if self._last_failure is not None and BOOT_CLOCK.now() < self._not_before:
            raise self._last_failure.with_traceback(None)
        session = None
        try:
            session = await DedicatedSession.open(self._dsn, self._settings)
            await session.verify()
            await session.rows("locks_set_up")
        except BaseException as error:
            if session is not None:
                await session.close()
            if isinstance(error, PgLeaderLockError):
                self._last_failure = error
                self._failures += 1
                delay_s = RECONNECT_BACK_OFF.delay_s(self._failures)
                self._not_before = BOOT_CLOCK.now() + delay_s + reconnect_jitter_s(delay_s, self._rng)
            raise
        self._last_failure = None
        self._failures = 0
        return session

    async def _work(self) -> None:
        link = _Link(self)
        try:
            while batch := await self._next():
                if batch[0].name:
                    await self._query(link, batch[0])
                else:
                    await self._apply(link, batch)
        finally:
            await link.close()

    async def _next(self) -> list[_Job]:
        """The jobs to send next: one statement, or as many operations as are waiting. Empty when the pool is closing
        and nothing is left."""
        while True:
            while not self._jobs:
                if self._stopping:
                    return []
                turn = asyncio.get_running_loop().create_future()
                self._idle.append(turn)
                await turn
            if batch := self._batch():
                return batch

    def _batch(self) -> list[_Job]:
        """Jobs from the queue, without those whose caller has been cancelled. May be empty."""
        batch: list[_Job] = []
        size = 0
        while self._jobs and (not batch or (not self._jobs[0].name and not batch[0].name)):
            if batch and size + len(self._jobs[0].operations) > BATCH_OPERATIONS_MAX:
                break
            job = self._jobs.popleft()
            self._queued -= len(job.operations)
            if not job.answer.done():  # otherwise its caller was cancelled before it was served
                batch.append(job)
                size += len(job.operations)
        return batch

    async def _query(self, link: _Link, job: _Job) -> None:
        try:
            rows = await link.rows(job.name, **job.params)
        except Exception as error:  # an error must not affect the next job
            _refuse(job, _as_store_error(error))
        except BaseException:
            _refuse(job, StoreError("the store is closing, and it is not known what came of this"))
            raise
        else:
            settle(job.answer, rows)
            await link.hint(rows)

    async def _apply(self, link: _Link, batch: list[_Job]) -> None:
        try:
            rows = await self._applied(link, batch)
        except Exception as error:  # an error must not affect the next batch
            if len(batch) > 1 and _one_of_them_is_wrong(error):
                # One operation cannot be stored, so the whole batch was rolled back. Send each job by itself.
                for job in batch:
                    await self._apply(link, [job])
                return
            for job in batch:
                _refuse(job, _as_store_error(error))
        except BaseException:
            for job in batch:
                _refuse(job, StoreError("the store is closing, and it is not known what came of this"))
            raise
        else:
            begin = 0
            for job in batch:
                end = begin + len(job.operations)
                _answer(job, rows[begin:end])
                begin = end
            await link.hint(rows)

    async def _applied(self, link: _Link, batch: list[_Job]) -> list[Row]:
        """The rows of all operations, in order; one transaction."""
        wanted = sum(job.acquires for job in batch)
        if self.room.unsure(wanted):
            (row,) = await link.rows("locks_count")
            self.room.counted(row["stored"])
        reserved = self.room.take(wanted)
        try:
            rows = await link.rows(
                "locks_apply",
                server_id=self._server_id,
                operations="[" + ",".join([operation for job in batch for operation in job.operations]) + "]",
                room=reserved,
            )
        except BaseException:
            self.room.forget()
            raise
        self.room.give_back(reserved - sum(row["created"] for row in rows))
        rows.sort(key=_by_number)
        return rows


def _by_number(row: Row) -> int:
    return int(row["n"])


def _one_of_them_is_wrong(error: Exception) -> bool:
    """Did the database refuse a value? Then the transaction was certainly rolled back."""
    cause = error.__cause__
    if isinstance(cause, psycopg.Error):
        return (cause.sqlstate or "").startswith("22")
    return isinstance(cause, UnicodeError)


def _as_store_error(error: Exception) -> StoreError:
    if isinstance(error, StoreError):
        return error
    if isinstance(error, PgLeaderLockError):
        return store_error(error)
    found = StoreError(f"the store failed with {type(error).__name__}, and it is not known what came of this")
    found.__cause__ = error
    return found


def closed() -> StoreError:
    return StoreError("the store is closed: open it first")


def _answer(job: _Job, rows: list[Row]) -> None:
    try:
        settle(job.answer, rows if job.read is None else job.read(rows))
    except Exception as error:  # unexpected rows must not end the session's worker
        _refuse(job, _as_store_error(error))


def _refuse(job: _Job, error: StoreError) -> None:
    if not job.answer.done():
        job.answer.set_exception(error)
        # A cancelled caller does not retrieve the exception: retrieve it here, so that asyncio does not warn.
        with contextlib.suppress(asyncio.CancelledError):
            job.answer.exception()
