"""The lock store in one SQLite file, for one server. Every answer is durable before it is sent.

Requests go to the writer (`writer`), the rules are in `locks`, the waiting requests in `waiting`, the file in `file`.
Reads have their own connections: they see everything that has been answered, and never wait for the writer. One lock is
read on the event loop's thread, everything else in a thread for reads.

Time is the boot-time clock. After a restart, every lease that was held is valid for its full duration again, from the
moment the file was opened: no lease ends early, whatever the wall clock says.

Must never import HTTP, and never grant anything by itself.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pgleaderlock._base.clock import BOOT_CLOCK, Clock
from pgleaderlock._base.logging import get_logger
from pgleaderlock.server.sqlite import file
from pgleaderlock.server.sqlite.file import (
    Claim,
    described,
    open_copier,
    open_reader,
    open_to_look,
    open_writer,
    refuse_bad_place,
    sql,
)
from pgleaderlock.server.sqlite.locks import FIND, FIND_TOKEN, MS, Locks, Run, view
from pgleaderlock.server.sqlite.mark import Left, Mark, begin_run, checksum_of, examine
from pgleaderlock.server.sqlite.waiting import Ticket
from pgleaderlock.server.sqlite.writer import Answers, Call, Cancel, Log, Tick, Writer
from pgleaderlock.server.store import (
    LOCKS_MAX,
    WAITERS_MAX,
    Acquire,
    Adopted,
    Broken,
    Found,
    LockView,
    Operation,
    Page,
    Reply,
    StoreBusy,
    StoreError,
    Sweep,
)

if TYPE_CHECKING:
    import apsw

__all__ = ["SqliteStore"]

S = 1_000_000_000
QUEUE_MAX = 20_000
READS_MAX = 1_000
FREE_KEPT_S = 24 * 60 * 60.0
WALK_STEP = 10_000
"""How many rows the sweep reads at a time, in the reader's thread."""
WALK_MAX = 100_000
"""How many rows one sweep reads at most. The next sweep continues from there."""
ADOPT_STEP = 1_000
TIDY_STEP = 200
"""How many rows the sweep changes in one transaction."""

_T = TypeVar("_T")


class SqliteStore:
    """Locks in a file. `locks_max` bounds the locks that are held or were held within `free_kept_s`. A lock that is
    free for longer is pruned, but its token and version are kept permanently."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        locks_max: int = LOCKS_MAX,
        waiters_max: int = WAITERS_MAX,
        queue_max: int = QUEUE_MAX,
        free_kept_s: float = FREE_KEPT_S,
        clock: Clock = BOOT_CLOCK,
        vfs: str | None = None,
    ) -> None:
        for name, number in (("locks_max", locks_max), ("waiters_max", waiters_max), ("queue_max", queue_max)):
            if number < 1:
                raise ValueError(f"{name} must be at least 1, not {number}")
        self._path = Path(path).resolve()  # the log and the other files beside it are those of the file, not of a link
        self._locks_max = locks_max
        self._waiters_max = waiters_max
        self._queue_max = queue_max
        self._free_kept_ns = int(free_kept_s * S)
        self._clock = clock
        self._vfs = vfs
        self._writer: Writer | None = None
        self._mark: Mark | None = None
        self._timer: asyncio.Task[None] | None = None
        self._timer_ns: int | None = None
        self._walked_to = ""
        self._reads = 0
        self._waits = 0
        self._pid = 0
        self._closing: asyncio.Future[Any] | None = None
        self.found = Found("")

    # --- Opening and closing

    async def open(self) -> None:
        if self._writer is not None:
            raise StoreError(f"{self._path} is open already")
        self._loop = asyncio.get_running_loop()
        self._readers = ThreadPoolExecutor(1, "pgleaderlock lock reader")
        self._closing = None
        try:
            await self._loop.run_in_executor(self._readers, self._open)
        except BaseException:
            self._readers.shutdown(wait=True)
            if self._writer is not None:  # cancelled, but the thread has opened the file
                self._looker.close(True)
                self._reader.close(True)
                self._writer.stop(self._loop.create_future())
                self._writer.join()
                self._claim.give_up()
                self._writer = None
            raise

    def _open(self) -> None:
        with described(self._path):
            refuse_bad_place(self._path)
            self._claim = Claim(self._path)
        opened: list[apsw.Connection] = []
        self._mark = None
        try:
            with described(self._path):
                checksum = checksum_of(self._path)
                connection = open_writer(self._path, self._vfs)
                opened.append(connection)
                left = examine(connection, self._path, checksum)
                self._tell(left)
                self._mark, number = begin_run(connection, self._path, left)
                # Wait until the previous owner's cached check of these names has expired.
                time.sleep(2 * file.LOOK_AGAIN_S)
                self._run = Run(number, self._now_ns(), time.time_ns())
                self._locks = Locks(connection, self._run, self._locks_max, self._mark)
                self._reader = open_reader(self._path, self._vfs)
                opened.append(self._reader)
                self._looker = open_reader(self._path, self._vfs)
                opened.append(self._looker)
                self._looker.set_busy_timeout(0)
                copier = open_copier(self._path, self._vfs)
                self._pid = os.getpid()
                writer = Writer(
                    connection,
                    self._locks,
                    Log(connection, copier, self._mark, file.LOG_PAGES),
                    run=number,
                    path=self._path,
                    clock=self._clock,
                    loop=self._loop,
                    settle=self._settle,
                )
        except BaseException:
            for connection in reversed(opened):
                connection.close(True)
            if self._mark is not None:
                self._mark.close()
            self._claim.give_up()
            raise
        writer.start()
        self._writer = writer

    async def examine(self) -> Found:
        return await asyncio.to_thread(self._examine)

    def _examine(self) -> Found:
        with described(self._path):
            refuse_bad_place(self._path)
            if not self._path.exists():
                raise StoreError(f"there is no store in {self._path}: a server makes it when it starts")
            claim = Claim(self._path)
            try:
                checksum = checksum_of(self._path)
                connection = open_to_look(self._path, self._vfs)
                try:
                    return _found(examine(connection, self._path, checksum))
                finally:
                    connection.close(True)
            finally:
                claim.give_up()

    def _tell(self, left: Left) -> None:
        """Log, for the operator, how the last run has ended."""
        self.found = _found(left)
        log = get_logger("pgleaderlock.server").bind(store=str(self._path))
        if left.lost is not None:
            remedy = "look at the disk: leases that were granted before may be forgotten, tokens go on above them"
            log.error("store_damaged", lost=left.lost, tokens_above=left.floor, remedy=remedy)
        elif left.unclean:
            log.warning("store_ended_unclean", tokens_above=left.floor)

    async def close(self) -> None:
        writer = self._writer
        if writer is None or os.getpid() != self._pid:
            return
        if self._closing is not None:
            await asyncio.shield(self._closing)
            return
        self._closing = self._loop.create_task(self._close(writer))
        await asyncio.shield(self._closing)

    async def _close(self, writer: Writer) -> None:
        if self._timer is not None:
            self._timer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._timer
            self._timer = self._timer_ns = None
        # Close the readers first: the last connection to close must be the writer's, which removes the log.
        self._looker.close(True)
        await self._loop.run_in_executor(self._readers, self._reader.close, True)
        self._readers.shutdown(wait=False)
        done = self._loop.create_future()
        writer.stop(done)
        await done
        writer.join()
        self._claim.give_up()
        self._writer = None

    # --- Writing

    def submit(self, operations: Sequence[Operation], wait_ms: int = 0) -> Reply:
        reply: Reply = self._loop.create_future() if self._pid else asyncio.Future()
        try:
            writer = self._usable()
            if wait_ms and self._waits >= self._waiters_max:
                raise StoreBusy(f"{self._waiters_max} requests wait for a lock already: try again later")
        except StoreError as error:
            reply.set_exception(error)
            return reply
        writer.submit(self._ticket(writer, reply, operations, wait_ms) if wait_ms else (reply, operations))
        return reply

    def _ticket(self, writer: Writer, reply: Reply, operations: Sequence[Operation], wait_ms: int) -> Ticket:
        (acquire,) = operations
        assert isinstance(acquire, Acquire)
        start_ns = self._now_ns()
        ticket = Ticket(acquire, start_ns, start_ns + wait_ms * MS, reply)
        self._waits += 1
        reply.add_done_callback(lambda _: self._waited(writer, ticket))
        return ticket

    def _waited(self, writer: Writer, ticket: Ticket) -> None:
        self._waits -= 1
        if ticket.reply.cancelled():
            # The ticket may still be in its line, or may just have been granted. The writer finds out.
            writer.put(Cancel(ticket))
        elif ticket.share is not None:
            self._locks.fresh.pop(ticket.share.granted.lease_id, None)

    async def break_lock(self, lock_name: str, by: str) -> Broken:
        return await self._call(lambda locks: locks.break_lock(lock_name, by))

    async def adopt(self, locks: Sequence[Adopted]) -> int:
        adopted = 0
        for first in range(0, len(locks), ADOPT_STEP):
            step = locks[first : first + ADOPT_STEP]
            adopted += await self._call(lambda found, step=step: found.adopt(step))  # type: ignore[misc]
        return adopted

    async def check(self) -> None:
        await self._call(lambda locks: locks.check())

    async def sweep(self) -> Sweep:
        expired, walked = 0, 0
        while walked < WALK_MAX:
            names, end = await self._read(self._walk)
            for first in range(0, len(names), TIDY_STEP):
                expired += await self._tidy(names[first : first + TIDY_STEP])
            walked += WALK_STEP
            self._walked_to = end or ""
            if end is None:
                break
        return Sweep(expired, self._locks.held)

    async def _tidy(self, names: list[str]) -> int:
        free_before_ns = self._now_ns() - self._free_kept_ns
        return await self._call(lambda locks: locks.tidy(names, free_before_ns))

    async def _call(self, do: Callable[[Locks], _T]) -> _T:
        writer = self._usable()
        future: asyncio.Future[_T] = self._loop.create_future()
        writer.put(Call(future, do))
        return await future

    # --- Reading

    async def get(self, lock_name: str) -> LockView:
        """On the event loop's thread, because reading one row takes less time than waking another thread; in the thread
        for reads if the file is locked, or if the disk was slow a moment ago."""
        writer = self._usable()
        if not writer.disk_is_slow:
            with contextlib.suppress(StoreBusy):
                return writer.here(lambda: self._described(lambda: self._get(self._looker, lock_name)))
        return await self._read(lambda: self._get(self._reader, lock_name))

    def _get(self, connection: "apsw.Connection", lock_name: str) -> LockView:
        connection.execute("BEGIN")  # one snapshot: between the two statements, the row may be pruned to its token
        try:
            row: Any = connection.execute(FIND, (lock_name,)).get
            token: Any = None if row is not None else connection.execute(FIND_TOKEN, (lock_name,)).get
        finally:
            if connection.in_transaction:  # a failure of the disk has ended it
                connection.execute("COMMIT")
        found = view(self._run, lock_name, row, token, self._now_ns())
        return self._with_waiters(found)

    async def list_locks(self, prefix: str, cursor: str | None, limit: int) -> Page:
        return await self._read(lambda: self._list(prefix, cursor, limit))

    def _list(self, prefix: str, cursor: str | None, limit: int) -> Page:
        begin = prefix if cursor is None else max(prefix, cursor + "\0")  # the first name after the cursor
        end = _end_of(prefix)
        with self._reader:
            rows: list[Any] = self._reader.execute(sql("list"), (begin, end, limit + 1)).fetchall()
            if len(rows) > limit:
                end = rows[-1][0]  # otherwise the statement would search all tokens behind the page
            tokens: list[Any] = self._reader.execute(sql("list_tokens"), (begin, end, limit + 1)).fetchall()
        now_ns = self._now_ns()
        found = [view(self._run, row[0], (*row[1:], None), None, now_ns) for row in rows]
        found += [view(self._run, row[0], None, (row[1], row[2]), now_ns) for row in tokens]
        found.sort(key=lambda lock: lock.lock_name)
        page = [self._with_waiters(lock) for lock in found[:limit]]
        return Page(page, page[-1].lock_name if len(found) > limit else None)

    def _with_waiters(self, lock: LockView) -> LockView:
        line = self._locks.room.lines.get(lock.lock_name)
        if line is None:
            return lock
        return LockView(
            lock.lock_name, lock.held, lock.owner_id, lock.lease_id, lock.fencing_token, lock.lease_expiry_ms,
            lock.version, len(line.tickets),
        )  # fmt: skip

    def _walk(self) -> tuple[list[str], str | None]:
        """The locks that the sweep's next step must check, and the name at which it ends (None: at the last lock)."""
        after = self._walked_to
        now_ns = self._now_ns()
        end: str | None = self._reader.execute(sql("walk_end"), (after, WALK_STEP)).get
        if end is None:
            return [], None
        run = self._run
        names: Any = self._reader.execute(
            sql("walk"), (after, end, run.number, run.start_ns, now_ns, now_ns - self._free_kept_ns)
        )
        return [row[0] for row in names], end

    async def _read(self, read: Callable[[], _T]) -> _T:
        self._usable()
        if self._reads >= READS_MAX:
            raise StoreBusy(f"{READS_MAX} reads wait already: try again later")
        self._reads += 1
        try:
            return await self._loop.run_in_executor(self._readers, self._described, read)
        finally:
            self._reads -= 1

    def _described(self, read: Callable[[], _T]) -> _T:
        with described(self._path):
            return read()

    # --- Between the threads

    def _usable(self) -> Writer:
        writer = self._writer
        if writer is None or self._closing is not None:
            raise StoreError(f"{self._path} is not open")
        if os.getpid() != self._pid:
            raise StoreError(f"{self._path} was opened before a fork: each process must open a store of its own")
        if not writer.alive:
            raise writer.ended_by_defect()
        if writer.queued >= self._queue_max:
            raise StoreBusy(f"{self._queue_max} operations wait for the disk already: try again in a moment")
        return writer

    def _settle(self, answers: Answers, due_ns: int | None) -> None:
        """Sets the replies of one transaction, on the event loop, and the timer that wakes the writer next."""
        if due_ns != self._timer_ns and self._closing is None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._timer_ns = due_ns
            if due_ns is not None:
                self._timer = self._loop.create_task(self._tick_at(due_ns))
        for reply, outcome in answers:
            if reply.done():
                continue  # cancelled
            if isinstance(outcome, Exception):
                reply.set_exception(outcome)
            else:
                reply.set_result(outcome)

    async def _tick_at(self, due_ns: int) -> None:
        # The loop's clock uses floats, so a sleep may end slightly too early: then nothing would be due.
        while (left_ns := due_ns - self._now_ns()) > 0:
            await self._clock.sleep(left_ns / S)
        self._timer = self._timer_ns = None
        if self._writer is not None:
            self._writer.put(Tick())

    def _now_ns(self) -> int:
        return int(self._clock.now() * S)


def _found(left: Left) -> Found:
    return Found(f"{left.store_id:016x}", left.unclean, left.lost)


def _end_of(prefix: str) -> str | bytes:
    """The end of the range of names that start with `prefix`: a name, or bytes, which SQLite sorts after every text."""
    for at in range(len(prefix) - 1, -1, -1):
        following = ord(prefix[at]) + 1
        if following == 0xD800:  # skip the surrogates, which UTF-8 cannot encode
            following = 0xE000
        if following <= 0x10FFFF:
            return prefix[:at] + chr(following)
    return b""
