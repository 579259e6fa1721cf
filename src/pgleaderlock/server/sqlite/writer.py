"""The one writer of the SQLite store: takes the requests that have gathered, carries them out in one transaction, and
answers when that is on the disk (group commit).

A group of releases alone does not wait for the disk. They are in the log, so they survive the end of the process, and
the next grant's sync writes them to the disk, too. If a power cut loses them, the locks are held again until their
leases end, which only delays the next holder. A lost grant or renewal, in contrast, could let two clients believe that
they hold the lock.

After a failed sync, the kernel may report pages as written that it has lost: releases and, behind this gap in the log,
everything that follows. So the writer first copies the whole log into the file, which is synced separately, and then
restarts the log.

A request that comes alone while nothing else is under way is carried out on the event loop's thread, because waking
another thread and being woken by it takes longer than the statements. This may block the loop for one sync. After a
slow sync, and whenever several requests come at once, the writer's thread does the work.

Must never answer before the commit has returned, and never decide about a lock: the rules are in `locks`.
"""

import asyncio
import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import apsw

from pgleaderlock._base.clock import Clock
from pgleaderlock.server.sqlite.file import Identity, explained, sql, sync_statement
from pgleaderlock.server.sqlite.locks import Answer, Locks
from pgleaderlock.server.sqlite.mark import Mark
from pgleaderlock.server.sqlite.waiting import Ticket
from pgleaderlock.server.store import Operation, Release, Reply, StoreError

__all__ = ["Answers", "Apply", "Call", "Cancel", "Item", "Log", "Stop", "Tick", "Writer"]

META, END_RUN = sql("meta"), sql("end_run")
GROUP_OPERATIONS_MAX = 2_000
CANCELS_OWED_MAX = 10_000
RETRY_NS = 100_000_000
"""How long after a failed transaction the locks with waiters are checked again."""
SHORT_MAX = 16
"""The thread carries out a request with more operations than this: on the loop, it would delay all other requests."""
SLOW_S = 0.005
"""After a transaction that waited for the disk for longer than this, the thread does the work for a while."""
CROWD_REMEMBERED_S = 0.05
"""How long the thread does the work after several requests at once: more are to be expected, and on the loop, a sync
for one of them would delay all others."""
SLOW_FACTOR = 50
"""After a slow transaction, the thread does the work for this many times as long, so the loop waits for the disk for at
most a fiftieth of its time."""
COPY_S_MAX = 30.0
"""How long the writer waits for the copier before it copies the whole log itself: two cannot copy at once."""
COPY_FACTOR = 4
"""The writer finishes the copying itself when the log is this many times longer than usual."""
REST_FACTOR = 32
"""The writer also finishes the copying when at most one part in this many of the usual length is left, which was
written while the copier worked. Otherwise the copier would copy and sync after nearly every commit, in addition to the
writer's own syncs, and would seldom find the log at rest."""

_T = TypeVar("_T")
Apply = tuple[Reply, Sequence[Operation]]
"""A request with operations. It is the most common item, so it is a plain tuple, which is cheap to create."""


class Call:
    """A function to call inside a transaction. All of its changes take effect, or none."""

    __slots__ = ("do", "future")

    def __init__(self, future: "asyncio.Future[Any]", do: Callable[[Locks], object]) -> None:
        self.future = future
        self.do = do


class Cancel:
    """The cancellation of a ticket whose client has gone. It is repeated until a transaction with it is committed."""

    __slots__ = ("ticket",)

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket


class Tick:
    """Wakes the thread: something on the agenda is due, or the log must be copied."""


class Stop:
    __slots__ = ("future",)

    def __init__(self, future: "asyncio.Future[Any]") -> None:
        self.future = future


Item = Apply | Ticket | Call | Cancel | Tick | Stop
Answers = list[Answer]
Settle = Callable[[Answers, int | None], None]


class Writer:
    """Takes items from the event loop's thread, and returns all answers of a transaction to it in one call."""

    def __init__(
        self,
        connection: apsw.Connection,
        locks: Locks,
        log: "Log",
        *,
        run: int,
        path: Path,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        settle: Settle,
    ) -> None:
        self._connection = connection
        self._execute = connection.cursor().execute
        self._locks = locks
        self._log = log
        self._run_number = run
        self._path = path
        self._clock = clock
        self._loop = loop
        self._settle = settle
        self._identity = Identity(path)
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._gathered: list[Apply] = []
        self._outstanding = 0
        self._one_was_here = False
        self._threads_until = 0.0
        """The time on the loop's clock until which the thread does everything, after a crowd or a slow transaction."""
        self._slow_until = 0.0
        """The time on the loop's clock until which the disk counts as slow."""
        self._sleep = SleepClock()
        self._version: int | None = None
        """SQLite's counter of the changes that this connection has made or noticed, after its last commit."""
        self._turn = threading.Lock()
        """Held by the thread that uses the connection and the locks."""
        self._owed: list[Cancel] = []
        self._syncing = True
        self._synced_before = True
        """Whether the last but one commit on the loop's thread waited for the disk."""
        self._doing: list[Item] = []
        """The items that the thread has taken and not answered yet."""
        self.alive = True
        self._thread = threading.Thread(target=self._work, name="pgleaderlock lock writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, done: "asyncio.Future[Any]") -> None:
        """Finishes the items that were put before, and closes the file; then `done` is set."""
        self._hand_over()
        self._enqueue(Stop(done))

    def join(self) -> None:
        self._thread.join()
        self._sleep.close()

    # --- In the event loop

    @property
    def queued(self) -> int:
        return len(self._gathered) + self._items.qsize()

    def put(self, item: Item) -> None:
        self._outstanding += 1
        self._enqueue(item)

    def _enqueue(self, item: Item) -> None:
        self._items.put(item)
        if not self.alive:
            self._loop.call_soon(self._give_up)

    def submit(self, request: Apply | Ticket) -> None:
        """Carries out a request in this call if it comes alone. Otherwise the thread gets it: at once if it waits for a
        lock, or else together with the other requests of this turn of the loop."""
        if type(request) is not tuple:
            self.put(request)
        elif self._is_quiet() and len(request[1]) <= SHORT_MAX and self._turn.acquire(blocking=False):
            # A second request within the same turn of the loop means a crowd, which the thread serves.
            self._one_was_here = True
            try:
                self._do_here(request)
            finally:
                self._loop.call_soon(self._after_one)
                self._turn.release()
        else:
            self._gathered.append(request)
            if len(self._gathered) == 1:
                self._loop.call_soon(self._hand_over)

    def _after_one(self) -> None:
        """The work that can wait until a request that came alone has its answer."""
        self._one_was_here = False
        if not self.alive or not self._turn.acquire(blocking=False):
            return  # the thread has begun the next transaction, and takes care of the log after it
        try:
            self._log.note()
            self._expect_next()
            if self._log.overdue:
                self.put(Tick())  # copying the log takes a while: the thread does it after its next transaction
            else:
                self._log.due()
        finally:
            self._turn.release()

    def _expect_next(self) -> None:
        """Switches syncing on or off in advance, because the switch takes time: the next commit is expected to need
        what the last but one needed, as a client alternates between acquire and release."""
        expected, self._synced_before = self._synced_before, self._syncing
        if expected != self._syncing:
            try:
                self._sync_commits(expected)
            except apsw.Error:
                return  # the next transaction tries again

    def _hand_over(self) -> None:
        gathered = [request for request in self._gathered if not request[0].cancelled()]
        self._gathered.clear()
        if len(gathered) > 1 or self._outstanding:
            self._leave_to_thread(CROWD_REMEMBERED_S)
        for request in gathered:
            self.put(request)

    def _is_quiet(self) -> bool:
        """True if nothing is under way, there was no crowd and no slow transaction a moment ago, and the writer need
        not copy the log."""
        if self._gathered or self._outstanding or self._one_was_here or self._log.doubtful or self._log.overdue:
            return False
        return self._loop.time() >= self._threads_until

    def _leave_to_thread(self, for_s: float) -> None:
        self._threads_until = max(self._threads_until, self._loop.time() + for_s)

    def _do_here(self, request: Apply) -> None:
        self._sleep.begin()
        answers = self._transact([request], closing=False)
        if slow_s := self._sleep.slow_s():
            self._remember(slow_s)
        self._settle(answers, self._locks.room.next_due_ns)

    def here(self, do: Callable[[], _T]) -> _T:
        """Calls a short function that may have to wait for the disk, on the loop's thread."""
        self._sleep.begin()
        try:
            return do()
        finally:
            if slow_s := self._sleep.slow_s():
                self._remember(slow_s)

    @property
    def disk_is_slow(self) -> bool:
        """True if the disk was slow a moment ago."""
        return self._loop.time() < self._slow_until

    def _remember(self, slow_s: float) -> None:
        """After a slow transaction in either thread, leaves the work to the writer's thread for a while."""
        self._leave_to_thread(SLOW_FACTOR * slow_s)
        self._slow_until = self._threads_until

    def _done(self, answers: Answers, due_ns: int | None, group: list[Item], slow_s: float) -> None:
        self._outstanding -= len(group)
        if slow_s and len(group) == 1 and _is_short(group[0]):  # a long transaction says nothing about the disk
            self._remember(slow_s)
        self._settle(answers, due_ns)

    def ended_by_defect(self) -> StoreError:
        return StoreError(f"{self._path}: the writer has ended by a defect: restart the server; its log says more")

    def _give_up(self) -> None:
        """A defect has ended the thread: answers every item that waits for it with an error."""
        self._roll_back()
        self._close_file()
        left, self._doing = self._doing, []
        with contextlib.suppress(queue.Empty):
            while True:
                left.append(self._items.get_nowait())
        answers = self._failed(left, self.ended_by_defect(), closing=True)
        answers += [(item.future, None) for item in left if type(item) is Stop]
        self._settle(answers, None)

    # --- In the thread

    def _work(self) -> None:
        try:
            self._work_until_stopped()
        except BaseException:
            self.alive = False
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._give_up)
            raise
        self.alive = False

    def _work_until_stopped(self) -> None:
        stop = None
        sleep = SleepClock()
        while stop is None:
            group, stop = self._take()
            self._doing = group
            with self._turn:
                sleep.begin()
                answers = self._transact(group, closing=stop is not None)
                if stop is not None:
                    self._close_file()
                    answers.append((stop.future, None))
                with contextlib.suppress(RuntimeError):  # the application has closed its loop: no caller waits
                    due_ns, slow_s = self._locks.room.next_due_ns, sleep.slow_s()
                    self._loop.call_soon_threadsafe(self._done, answers, due_ns, group, slow_s)
                self._doing = []
                if stop is None:
                    self._log.note()
                    self._log.due()
        sleep.close()

    def _take(self) -> tuple[list[Item], Stop | None]:
        """Waits for the first item; takes all that have gathered behind it, within bounds."""
        get_nowait = self._items.get_nowait
        item = self._items.get()
        group: list[Item] = []
        operations = 0
        try:
            while True:
                if type(item) is Stop:
                    return group, item
                group.append(item)
                operations += len(item[1]) if type(item) is tuple else 1
                if operations >= GROUP_OPERATIONS_MAX:
                    return group, None
                item = get_nowait()
        except queue.Empty:
            return group, None

    def _transact(self, group: list[Item], *, closing: bool) -> Answers:
        """Runs the group in one transaction. If that cannot be committed, every request in it gets the error."""
        locks = self._locks
        before = locks.rows, locks.held
        try:
            if self._log.doubtful:
                self._log.start_again()
            if (sync := closing or not self._only_frees(group)) != self._syncing:
                self._sync_commits(sync)
            self._execute("BEGIN IMMEDIATE")
            self._verify()
            # Read the clocks after the last item was taken: no lease may start before its owner asked for it.
            locks.begin(int(self._clock.now() * 1e9), time.time_ns())
            for cancel in self._owed:
                locks.cancel(cancel.ticket)
            for item in group:  # in the order in which they came: a ticket before its cancel
                if type(item) is tuple:
                    self._apply(item)
                else:
                    self._do(item)
            if closing:
                locks.close()
            self._execute("COMMIT")
            if self._syncing:
                self._log.note()
            self._version = self._connection.data_version()
        except Exception as error:
            locks.rows, locks.held = before
            return self._undone(error, group, closing=closing)
        self._owed = []
        answers, locks.answers = locks.answers, []
        return answers

    def _undone(self, error: Exception, group: list[Item], *, closing: bool) -> Answers:
        """Rolls back, and returns the error for each request: nothing of this group is durable, whatever the error."""
        self._roll_back()
        if isinstance(error, apsw.IOError):
            self._log.doubtful = True
        self._owed = [*self._owed, *(item for item in group if type(item) is Cancel)][-CANCELS_OWED_MAX:]
        told = explained(error, self._path)
        if not isinstance(told, StoreError):
            told = StoreError(f"{self._path}: {error!r}: this is a defect of the server; nothing was granted")
        return self._failed(group, told, closing=closing)

    def _sync_commits(self, wanted: bool) -> None:
        """Sets whether commits wait for the disk from now on. Must not be called inside a transaction."""
        self._execute(sync_statement(wanted))
        self._syncing = wanted

    def _only_frees(self, group: list[Item]) -> bool:
        """True if the group has only releases, and no waiter would be granted a freed lock in the same transaction."""
        if self._locks.room.lines or self._owed:
            return False
        for item in group:
            if type(item) is not tuple:
                return False
            for operation in item[1]:
                if type(operation) is not Release:
                    return False
        return True

    # One item. An error that affects only this item is its answer; an error that ends the transaction is raised.

    def _apply(self, request: Apply) -> None:
        locks = self._locks
        try:
            locks.answers.append((request[0], locks.apply(request[1])))
        except Exception as error:
            self._fail_alone(request[0], error)

    def _do(self, item: Item) -> None:
        locks = self._locks
        if type(item) is Ticket:
            try:
                locks.wait(item)
            except Exception as error:
                self._fail_alone(item.reply, error)
        elif type(item) is Call:
            self._call(item)
        elif type(item) is Cancel:
            locks.cancel(item.ticket)

    def _call(self, call: Call) -> None:
        locks = self._locks
        before = locks.rows, locks.held
        self._connection.execute("SAVEPOINT call")
        try:
            outcome = call.do(locks)
        except Exception as error:
            self._fail_alone(call.future, error)
            self._connection.execute("ROLLBACK TO call")
            locks.rows, locks.held = before
        else:
            locks.answers.append((call.future, outcome))
        self._connection.execute("RELEASE call")
        locks.serve_freed()

    def _fail_alone(self, future: "asyncio.Future[Any]", error: Exception) -> None:
        if not self._connection.in_transaction or isinstance(error, apsw.FullError | apsw.IOError | apsw.CorruptError):
            raise error
        self._locks.answers.append((future, explained(error, self._path)))

    def _verify(self) -> None:
        """Checks in two ways that no other server writes: by the files, because the claim on a replaced file protects
        nothing, and by the run number in the data. That is read only if another connection has written since this one
        last did: reading it takes as long as a release."""
        self._identity.verify()
        if self._connection.data_version() == self._version:
            return
        if self._execute(META, ("run",)).get != self._run_number:
            raise StoreError(
                f"{self._path} was opened by another lock server: this one grants nothing any more. Stop one of them, "
                "give it a file of its own, or let both share a PostgreSQL store"
            )

    def _close_file(self) -> None:
        self._log.close()
        in_order = False
        with contextlib.suppress(apsw.Error):
            self._connection.execute(END_RUN, (self._run_number,))
            self._log.note()
            in_order = True
        with contextlib.suppress(apsw.Error):  # pages that could not be copied into the file stay in its log
            # Copy the log at the close. `open_writer` has switched that off, for a start that fails.
            self._connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 0)
            self._connection.close(True)
        self._log.end(in_order=in_order)

    def _roll_back(self) -> None:
        with contextlib.suppress(apsw.Error):  # SQLite may have rolled back by itself
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")

    def _failed(self, group: list[Item], error: StoreError, *, closing: bool) -> Answers:
        room = self._locks.room
        futures = self._locks.forget_answers()
        for item in group:
            if type(item) is tuple:
                futures.append(item[0])
            elif type(item) is Ticket:
                room.remove(item)
                futures.append(item.reply)
            elif type(item) is Call:
                futures.append(item.future)
        if closing:
            for line in list(room.lines.values()):
                for ticket in list(line.tickets):
                    room.remove(ticket)
                    futures.append(ticket.reply)
        room.look_at_all(int(self._clock.now() * 1e9) + RETRY_NS)
        # Each future gets its own exception, because raising an exception adds a traceback to it.
        return [(future, type(error)(*error.args)) for future in dict.fromkeys(futures)]


def _is_short(item: Item) -> bool:
    return type(item) is not tuple or len(item[1]) <= SHORT_MAX


class SleepClock:
    """Measures how long its thread has slept in a transaction, which is how long it waited for the disk. The time in
    which the thread worked or waited for a processor does not count: a busy machine is not a slow disk. Where the
    system does not report the wait for a processor, that wait counts. Only one thread may call it.

    Asking the system takes longer than many transactions. So it is asked only after a long transaction, and its answer
    is compared with one from at most `SLOW_S` before the transaction began. Work and waits for a processor between that
    moment and the beginning are counted as if they were in the transaction."""

    def __init__(self) -> None:
        self._fd: int | None = None
        self._began_s = self._asked_s = float("-inf")
        self._awake_s = 0.0
        """How long the thread had worked or waited for a processor when `begin` last asked the system."""

    def begin(self) -> None:
        self._began_s = time.monotonic()
        if self._began_s - self._asked_s > SLOW_S:
            self._asked_s, self._awake_s = self._began_s, self._ask()

    def slow_s(self) -> float:
        """How long the thread has slept since `begin`, if that was longer than `SLOW_S`, and 0 otherwise."""
        took_s = time.monotonic() - self._began_s
        if took_s <= SLOW_S:
            return 0.0
        slept_s = took_s - (self._ask() - self._awake_s)
        return slept_s if slept_s > SLOW_S else 0.0

    def _ask(self) -> float:
        if self._fd is None:
            try:
                self._fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                self._fd = -1
        waited_s = int(os.pread(self._fd, 100, 0).split()[1]) / 1e9 if self._fd >= 0 else 0.0
        return time.thread_time() + waited_s

    def close(self) -> None:
        if self._fd is not None and self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


class Log:
    """Copies the write-ahead log back into the file, in a separate thread, while the writer goes on.

    With a million locks, nearly every grant changes a different page, and copying thousands of pages takes as long as
    thousands of grants. SQLite can copy over another connection, `copier`. Only the last step is left to the writer:
    the log restarts from its beginning when all of it has been copied and nothing was written meanwhile.

    `note()` and `due()` are called after each commit, by the thread that made it. They never wait for the copier.
    `start_again` does, when the log is in doubt.
    """

    def __init__(self, writer: apsw.Connection, copier: apsw.Connection, mark: Mark, pages_max: int) -> None:
        self._mark = mark
        self._writer = writer
        self._copier = copier
        self._pages_max = pages_max
        self._pages = 0
        self._noted = True
        self._starts = 0
        """How often the log has restarted from its beginning."""
        self._copied = (0, 0)
        """The restart count when the copier last worked, and how many pages of the log were then in the file."""
        self.doubtful = False
        """A sync has failed in either thread: the kernel may have lost pages and report them as written."""
        self._idle = threading.Event()
        self._idle.set()
        self._asked: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="pgleaderlock lock log", daemon=True)
        writer.set_wal_hook(self._committed)
        self._thread.start()

    def _committed(self, connection: apsw.Connection, database: str, pages: int) -> int:
        if pages <= self._pages:
            self._starts += 1
        self._pages = pages
        self._noted = False
        return apsw.SQLITE_OK

    def note(self) -> None:
        """Notes how long the log is, unless that has been noted: before a grant or a renewal is answered, and after a
        release is. If a release is lost, the lock only stays held until the lease ends."""
        if not self._noted:
            self._noted = True
            self._mark.note(self._pages)

    @property
    def overdue(self) -> bool:
        """True if the log is so long that the writer itself must copy it, which takes a while."""
        return self._pages >= COPY_FACTOR * self._pages_max

    def due(self) -> None:
        if self._pages < self._pages_max or not self._idle.is_set():
            return
        start, copied = self._copied
        if self.overdue or (start == self._starts and self._pages - copied <= self._pages_max // REST_FACTOR):
            # The writer copies what is left. Then the next transaction restarts the log.
            self._copy(self._writer)
        else:
            self._idle.clear()
            self._asked.put(self._starts)

    def start_again(self) -> None:
        """Copies all of the log into the file and restarts it. Called in the writer's thread, outside a transaction;
        raises if that fails."""
        self._idle.wait(COPY_S_MAX)
        self.doubtful = False  # set before the copy: the other thread may set it again meanwhile
        try:
            self._writer.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_RESTART)
        except BaseException:
            self.doubtful = True
            raise

    def close(self) -> None:
        """Ends the thread, and closes its connection. The writer's connection is closed last, and copies the rest."""
        self._asked.put(None)
        self._thread.join()

    def end(self, *, in_order: bool) -> None:
        """Called when the writer's connection is closed, too."""
        self._mark.end(in_order=in_order)

    def _work(self) -> None:
        while (start := self._asked.get()) is not None:
            self._copied = start, self._copy(self._copier)
            self._idle.set()
        with contextlib.suppress(apsw.Error):
            self._copier.close(True)

    def _copy(self, connection: apsw.Connection) -> int:
        """Returns how many pages of the log are in the file now, or 0 if that is not known."""
        try:
            return connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)[1]
        except apsw.IOError:
            self.doubtful = True
        except apsw.Error:
            pass  # the log still holds what was committed, and the copy is tried again after the next commit
        return 0
