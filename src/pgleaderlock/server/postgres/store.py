"""The lock store in PostgreSQL: any number of servers on one database.

Functions in the database decide every grant, by the database's clock and under row locks that are taken in a fixed
order: in effect, all transitions are serialisable. An outcome is reported only when it is durable. If an answer is
lost, the outcome is unknown: the reply is a `StoreError`, and a repeated acquire with the same idempotency key finds
the lease if it was granted.

`open` creates or upgrades the tables if this database role may do so; otherwise its error says that a role with the
privileges should run `pgleaderlock migrate`. The role of a server needs only `grants_lock_server` (docs/ledger.md).

Not promised: a step of the database's clock moves the end of every lease; a failover that lost acknowledged commits
also lost the leases in them (their tokens stay below the next ones).

Must never decide by its own clock whether a lease is valid.
"""

import asyncio
import uuid
from collections.abc import Callable, Sequence

import msgspec

from pgleaderlock._base.clock import BOOT_CLOCK, Clock
from pgleaderlock._base.logging import get_logger
from pgleaderlock._config.durations import positive_s
from pgleaderlock._pg.conninfo import ConnectionSettings, Dsn, check_dsn, default_application_name
from pgleaderlock._pg.listener import listen
from pgleaderlock._pg.session import DedicatedSession
from pgleaderlock.errors import ConfigurationError, PgLeaderLockError
from pgleaderlock.migrate import migrate, pending
from pgleaderlock.retry import JITTER
from pgleaderlock.server.postgres.pool import Pool, Row, closed, store_error
from pgleaderlock.server.postgres.waiting import ALIVE_MS, Waiting, encoded, outcome_of, view_of
from pgleaderlock.server.store import (
    LOCKS_MAX,
    WAITERS_MAX,
    Acquire,
    Adopted,
    Broken,
    Found,
    Granted,
    KeyReused,
    KnownKeys,
    LockView,
    Operation,
    Outcome,
    Page,
    Reply,
    StoreError,
    Sweep,
)

__all__ = ["PostgresStore"]

POOL_SIZE = 4
STATEMENT_TIMEOUT_S = 5.0
ADOPT_STEP = 1000
SWEEP_STEP = 1000
SWEEP_STEPS_MAX = 1000
SWEEP_S_CHEAP, SWEEP_PAUSE = 0.25, 20.0
FREE_KEPT_S = 86_400.0
# PostgreSQL ends a session of ours that is silent for this long within a transaction or a statement.
SILENCE_S = 15.0
# The prefix of the channels, as in lock_wake: each server has its own channel.
CHANNEL = "pgleaderlock_locks_"
_NO_TABLES = "the tables of the lock server are missing here: run `pgleaderlock migrate` on this database"


class PostgresStore:
    """Fulfils `store.Store`.

    `pool_size` dedicated connections share all work; one more listens once a request waits. `locks_max` bounds the
    locks that are held or were held within `free_kept_s`; several servers may together exceed it by the locks that they
    create between two counts. A lock that is free for longer is pruned, but its token and version are kept permanently.
    `clock` is for waiters only: the database's clock decides whether a lease is valid.
    """

    def __init__(
        self,
        dsn: Dsn,
        *,
        pool_size: int = POOL_SIZE,
        locks_max: int = LOCKS_MAX,
        waiters_max: int = WAITERS_MAX,
        free_kept_s: float = FREE_KEPT_S,
        statement_timeout_s: float = STATEMENT_TIMEOUT_S,
        allow_pooler: bool = False,
        auto_migrate: bool = True,
        clock: Clock = BOOT_CLOCK,
    ) -> None:
        check_dsn(dsn)
        for name, number in (("pool_size", pool_size), ("locks_max", locks_max), ("waiters_max", waiters_max)):
            if number < 1:
                raise ConfigurationError(f"{name} must be at least 1, not {number}")
        if not 0 < statement_timeout_s <= SILENCE_S:
            raise ConfigurationError(
                f"statement_timeout_s={statement_timeout_s} must be more than 0 and at most {SILENCE_S:g}"
            )
        positive_s("free_kept_s", free_kept_s)
        self._dsn = dsn
        self._pool_size, self._locks_max = pool_size, locks_max
        self._waiters_max = waiters_max
        self._free_kept_s = free_kept_s
        self._clock = clock
        self._auto_migrate = auto_migrate
        self._settings = ConnectionSettings(
            default_application_name("locks"), statement_timeout_s, SILENCE_S, allow_pooler=allow_pooler
        )
        self._pool: Pool | None = None
        self._waiting: Waiting | None = None
        self._server_id = ""
        self.found = Found("")
        self._sweep_not_before = 0.0
        self._held = 0
        self._keys = KnownKeys()

    # --- Opening and closing

    async def open(self) -> None:
        if self._pool is not None:
            return
        # A new id for each start: tickets of an earlier run are not ours.
        self._server_id = uuid.uuid4().hex
        pool = Pool(
            self._dsn, self._settings, server_id=self._server_id, size=self._pool_size, locks_max=self._locks_max
        )
        try:
            # Open a dedicated session first: it refuses poolers and standbys, and says what to do.
            await (await pool.connect()).close()
            await self._bring_up_to_date()
        except PgLeaderLockError as error:
            raise store_error(error) from error
        pool.start()
        self._pool = pool
        self._waiting = Waiting(pool, self._server_id, self._listen, clock=self._clock, waiters_max=self._waiters_max)
        try:
            (identity,) = await pool.query("locks_store_id")
            self.found = Found(identity["store_id"])
            await self.check()
            await self._count(pool)
        except BaseException:
            await self.close()
            raise

    async def examine(self) -> Found:
        try:
            session = await DedicatedSession.open(self._dsn, self._settings)
            try:
                await session.verify()
                if await pending(self._dsn):
                    raise StoreError(_NO_TABLES)
                (row,) = await session.rows("locks_store_id")
            finally:
                await session.close()
        except PgLeaderLockError as error:
            raise store_error(error) from error
        return Found(row["store_id"])

    async def _bring_up_to_date(self) -> None:
        todo = await pending(self._dsn)
        if todo and not self._auto_migrate:
            raise StoreError(_NO_TABLES)
        if todo:
            await migrate(self._dsn)

    async def close(self) -> None:
        waiting, pool = self._waiting, self._pool
        self._waiting = self._pool = None
        if waiting is not None:
            await waiting.close()
        if pool is not None:
            await pool.close()

    async def _listen(self, wake: Callable[[str], None]) -> None:
        await listen(
            self._dsn,
            self._settings,
            CHANNEL + self._server_id,
            wake,
            clock=BOOT_CLOCK,
            rng=JITTER,
            log=get_logger("pgleaderlock.server"),
        )

    def _opened(self) -> Pool:
        if self._pool is None:
            raise closed()
        return self._pool

    # --- The operations

    def submit(self, operations: Sequence[Operation], wait_ms: int = 0) -> Reply:
        if self._pool is None or self._waiting is None:
            return _settled(closed())
        if not operations:
            return _settled([])
        doubtful = self._doubtful(operations)
        if doubtful:
            return asyncio.ensure_future(self._checked(self._pool, doubtful, operations, wait_ms))
        return self._sent(operations, wait_ms)

    def _sent(self, operations: Sequence[Operation], wait_ms: int) -> Reply:
        if self._pool is None or self._waiting is None:
            return _settled(closed())
        if wait_ms:
            return asyncio.ensure_future(self._wait(self._waiting, operations, wait_ms))
        try:
            sent = [encoded(operation) for operation in operations]
        except ValueError as error:  # an unpaired surrogate, which UTF-8 cannot encode
            return _settled(error)

        def read(rows: list[Row]) -> list[Outcome]:
            outcomes = [outcome_of(asked, row, self._locks_max) for asked, row in zip(operations, rows, strict=True)]
            self._note(operations, outcomes)
            return outcomes

        acquires = sum(isinstance(operation, Acquire) for operation in operations)
        return self._pool.apply(sent, acquires=acquires, read=read)

    async def _wait(self, waiting: Waiting, operations: Sequence[Operation], wait_ms: int) -> list[Outcome]:
        (acquire,) = operations
        assert isinstance(acquire, Acquire)
        outcomes: list[Outcome] = [await waiting.wait(acquire, wait_ms)]
        self._note(operations, outcomes)
        return outcomes

    # --- Keys that may belong to another lock

    def _note(self, operations: Sequence[Operation], outcomes: Sequence[Outcome]) -> None:
        for operation, outcome in zip(operations, outcomes, strict=True):
            if isinstance(operation, Acquire) and isinstance(outcome, Granted):
                self._keys.note(operation)

    def _doubtful(self, operations: Sequence[Operation]) -> dict[int, str | None]:
        """By index, the operations whose idempotency key this server has seen with another lock, with the name of that
        lock; None if the other lock is in the same list."""
        found: dict[int, str | None] = {}
        here: dict[str, str] = {}
        for at, operation in enumerate(operations):
            if isinstance(operation, Acquire) and operation.idempotency_key is not None:
                if here.setdefault(operation.idempotency_key, operation.lock_name) != operation.lock_name:
                    found[at] = None
                elif (other := self._keys.other_lock(operation)) is not None:
                    found[at] = other
        return found

    async def _checked(
        self, pool: Pool, doubtful: dict[int, str | None], operations: Sequence[Operation], wait_ms: int
    ) -> list[Outcome]:
        """First checks whether the doubtful keys are still in use. All other operations are one transaction."""
        reused: set[int] = set()
        for at, other in doubtful.items():
            operation = operations[at]
            assert isinstance(operation, Acquire)
            if other is None or (
                await self._has_key(pool, other, operation)
                and not await self._has_key(pool, operation.lock_name, operation)
            ):
                reused.add(at)
        rest = [operation for at, operation in enumerate(operations) if at not in reused]
        outcomes = iter(await self._sent(rest, wait_ms) if rest else [])
        return [KeyReused("lock") if at in reused else next(outcomes) for at in range(len(operations))]

    async def _has_key(self, pool: Pool, lock_name: str, acquire: Acquire) -> bool:
        (row,) = await pool.query("locks_has_key", lock_name=lock_name, key=acquire.idempotency_key)
        return bool(row["has_key"])

    async def get(self, lock_name: str) -> LockView:
        (row,) = await self._opened().query("locks_get", lock_name=lock_name)
        return view_of(row)

    async def list_locks(self, prefix: str, cursor: str | None, limit: int) -> Page:
        # Read one row more than asked for, to see whether there is a next page.
        rows = await self._opened().query("locks_list", pattern=_pattern(prefix), cursor=cursor or "", limit=limit + 1)
        views = [view_of(row) for row in rows[:limit]]
        return Page(views, views[-1].lock_name if len(rows) > limit else None)

    async def break_lock(self, lock_name: str, by: str) -> Broken:
        (row,) = await self._opened().query("locks_break", lock_name=lock_name, by=by)
        return Broken(view_of(row))

    async def adopt(self, locks: Sequence[Adopted]) -> int:
        pool, adopted = self._opened(), 0
        for first in range(0, len(locks), ADOPT_STEP):
            step = msgspec.json.encode(locks[first : first + ADOPT_STEP]).decode()
            (row,) = await pool.query("locks_adopt", locks=step)
            adopted += row["adopted"]
        return adopted

    async def sweep(self) -> Sweep:
        pool, expired, began = self._opened(), 0, BOOT_CLOCK.now()
        if began < self._sweep_not_before:
            return Sweep(0, self._held)
        for _ in range(SWEEP_STEPS_MAX):
            (step,) = await pool.query("locks_sweep", step=SWEEP_STEP, free_kept_s=self._free_kept_s)
            expired += step["expired"]
            if not step["more"]:
                break
        self._held = await self._count(pool)
        took_s = BOOT_CLOCK.now() - began
        if took_s > SWEEP_S_CHEAP:
            # With so many locks that a sweep takes long, sweep less often.
            self._sweep_not_before = began + SWEEP_PAUSE * took_s
        return Sweep(expired, self._held)

    async def _count(self, pool: Pool) -> int:
        """The number of locks held. Also updates the pool's count of all stored locks."""
        (counted,) = await pool.query("locks_count")
        pool.room.counted(counted["stored"])
        return int(counted["held"])

    async def check(self) -> None:
        pool = self._opened()
        # A write that is durable like a grant, and the same function that grants.
        await pool.query("locks_tick", server_id=self._server_id, valid_ms=ALIVE_MS, heads="[]")
        await pool.query("locks_apply", server_id=self._server_id, operations="[]", room=0)


def _settled(outcomes: list[Outcome] | Exception) -> Reply:
    """A reply that is already done."""
    reply: Reply = asyncio.get_running_loop().create_future()
    if isinstance(outcomes, Exception):
        reply.set_exception(outcomes)
    else:
        reply.set_result(outcomes)
    return reply


def _pattern(prefix: str) -> str:
    """A LIKE pattern that matches names with this prefix, which is taken literally."""
    return "".join("\\" + char if char in "\\%_" else char for char in prefix) + "%"
