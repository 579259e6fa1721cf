"""The one writer of the SQLite store: takes the requests that have gathered, carries them out in one transaction, and
answers when that is on the disk (group commit).

A group of releases alone does not wait for the disk. They are in the log, so they survive the process. If a power cut
loses them, the locks are held again until their leases end: that delays somebody and harms nobody. The next grant takes
them to the disk with it. A lost grant or renewal would be a lease that two clients believe in.
After a sync that failed, the kernel may report as written what it has lost: releases and, behind this gap in the log,
all that follows. So the log is first copied into the file, which is synced by itself, and then starts again.

A request that comes alone, while nothing else is to be done, is carried out on the event loop's thread: waking another
thread and being woken by it takes longer than the statements. So the loop may stand still for one sync. After a slow
one, and whenever there is more than one request, the thread does the work.

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
from pgleaderlock.server.sqlite.file import Identity, explained, sql, sync_commits
from pgleaderlock.server.sqlite.locks import Answer, Locks
from pgleaderlock.server.sqlite.mark import Mark
from pgleaderlock.server.sqlite.waiting import Ticket
from pgleaderlock.server.store import Operation, Release, Reply, StoreError

__all__ = ["Answers", "Apply", "Call", "Cancel", "Item", "Log", "Stop", "Tick", "Writer"]

META, END_RUN = sql("meta"), sql("end_run")
GROUP_OPERATIONS_MAX = 2_000
CANCELS_OWED_MAX = 10_000
RETRY_NS = 100_000_000
"""When to look again at the locks that have waiters, after a transaction that failed."""
SHORT_MAX = 16
"""A request of more operations than this is the thread's: it would hold up every other request of the loop."""
SLOW_S = 0.005
"""After a transaction that waited for the disk for longer than this, the thread does the work for a while."""
CROWD_REMEMBERED_S = 0.05
"""Where several requests come at once, more are to be expected: a sync for one of them would hold up all others."""
SLOW_FACTOR = 50
"""After a slow transaction, the loop waits this many times as long before it tries again, and so loses at most a
fiftieth of its time."""
COPY_S_MAX = 30.0
"""How long a writer that has to copy everything waits for the copier to end: two cannot copy at once."""
COPY_FACTOR = 4
"""The writer finishes the copying itself when the log is so many times longer than it should be."""
REST_FACTOR = 32
"""The writer also finishes it when no more than such a part of the usual length is left: what was written while the
copier worked. Otherwise the copier would copy and sync after nearly every commit, beside the writer's own syncs, and
seldom find the log at rest."""

_T = TypeVar("_T")
Apply = tuple[Reply, Sequence[Operation]]
"""A request of operations: the commonest item, and so the cheapest to make."""


class Call:
    """Any other work inside a transaction, all or nothing."""

    __slots__ = ("do", "future")

    def __init__(self, future: "asyncio.Future[Any]", do: Callable[[Locks], object]) -> None:
        self.future = future
        self.do = do


class Cancel:
    """A ticket whose client has gone. It is owed until a transaction with it has been committed."""

    __slots__ = ("ticket",)

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket


class Tick:
    """Something on the agenda is due."""


class Stop:
    __slots__ = ("future",)

    def __init__(self, future: "asyncio.Future[Any]") -> None:
        self.future = future


Item = Apply | Ticket | Call | Cancel | Tick | Stop
Answers = list[Answer]
Settle = Callable[[Answers, int | None], None]


class Writer:
    """Items come from the event loop's thread, and answers go back to it: one call per transaction."""

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
        """On the loop's clock: until then the thread does everything, because of a crowd or a slow transaction."""
        self._slow_until = 0.0
        """Until then the disk counts as slow."""
        self._sleep = SleepClock()
        self._turn = threading.Lock()
        """Held by the thread that uses the connection and the locks."""
        self._owed: list[Cancel] = []
        self._syncing = True
        self._synced_before = True
        """Whether the last but one commit on the loop's thread waited for the disk."""
        self._doing: list[Item] = []
        """What the thread has taken and has not answered yet."""
        self.alive = True
        self._thread = threading.Thread(target=self._work, name="pgleaderlock lock writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, done: "asyncio.Future[Any]") -> None:
        """Finishes what was put before; `done` is answered when the file is closed."""
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
        """Decides who carries out a request: the thread if it waits for a lock, this call if it comes alone, and
        otherwise the thread, together with all other requests that the loop has at hand."""
        if type(request) is not tuple:
            self.put(request)
        elif self._is_quiet() and _is_short(request) and self._turn.acquire(blocking=False):
            # A second request within the same turn of the loop means a crowd: those go to the thread.
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
        """What can wait until the client of a lone request has its answer."""
        self._one_was_here = False
        if not self.alive or not self._turn.acquire(blocking=False):
            return  # the thread has begun the next transaction, and does all this after it
        try:
            self._expect_next()
            if self._log.overdue:
                self.put(Tick())  # copying the log takes a while: the thread does it after its next transaction
            else:
                self._log.due()
        finally:
            self._turn.release()

    def _expect_next(self) -> None:
        """Switches the sync to what the next commit is likely to need, which takes time: to what the last but one
        needed. A client that takes a lock gives it back, and takes it again."""
        expected, self._synced_before = self._synced_before, self._syncing
        with contextlib.suppress(apsw.Error):  # the next transaction tries again
            self._sync_commits(expected)

    def _hand_over(self) -> None:
        gathered = [request for request in self._gathered if not request[0].cancelled()]  # nobody wants those
        self._gathered.clear()
        if len(gathered) > 1 or self._outstanding:
            self._leave_to_thread(CROWD_REMEMBERED_S)
        for request in gathered:
            self.put(request)

    def _is_quiet(self) -> bool:
        """Nothing is under way, there was no crowd a moment ago, and the log needs no copy by the writer."""
        if self._gathered or self._outstanding or self._one_was_here or self._log.doubtful or self._log.overdue:
            return False
        return self._loop.time() >= self._threads_until

    def _leave_to_thread(self, for_s: float) -> None:
        self._threads_until = max(self._threads_until, self._loop.time() + for_s)

    def _do_here(self, request: Apply) -> None:
        self._sleep.begin()
        answers = self._transact([request], closing=False)
        self._remember(self._sleep.slow_s())
        self._settle(answers, self._locks.room.next_due_ns)

    def here(self, do: Callable[[], _T]) -> _T:
        """Something short that may have to wait for the disk, on the loop's thread."""
        self._sleep.begin()
        try:
            return do()
        finally:
            self._remember(self._sleep.slow_s())

    @property
    def disk_is_slow(self) -> bool:
        """It was, a moment ago."""
        return self._loop.time() < self._slow_until

    def _remember(self, slow_s: float) -> None:
        """A disk that is slow in the thread would be slow in the loop, too."""
        if slow_s:
            self._leave_to_thread(SLOW_FACTOR * slow_s)
            self._slow_until = self._threads_until

    def _done(self, answers: Answers, due_ns: int | None, group: list[Item], slow_s: float) -> None:
        self._outstanding -= len(group)
        if len(group) == 1 and _is_short(group[0]):  # a long transaction says nothing about the disk
            self._remember(slow_s)
        self._settle(answers, due_ns)

    def ended_by_defect(self) -> StoreError:
        return StoreError(f"{self._path}: the writer has ended by a defect: restart the server; its log says more")

    def _give_up(self) -> None:
        """The thread has ended by a defect: everything that waits for it is answered."""
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
                with contextlib.suppress(RuntimeError):  # the application's loop is closed, and nobody waits
                    due_ns, slow_s = self._locks.room.next_due_ns, sleep.slow_s()
                    self._loop.call_soon_threadsafe(self._done, answers, due_ns, group, slow_s)
                self._doing = []
                if stop is None:
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
        """One transaction for the group. If it cannot be committed, all of the group is told so, and nothing else."""
        locks = self._locks
        before = locks.rows, locks.held
        try:
            if self._log.doubtful:
                self._log.start_again()
            self._sync_commits(closing or not self._only_frees(group))
            self._execute("BEGIN IMMEDIATE")
            self._verify()
            # Read after the last item was taken: no lease starts before its owner asked for it.
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
        except Exception as error:
            locks.rows, locks.held = before
            return self._undone(error, group, closing=closing)
        self._owed = []
        answers, locks.answers = locks.answers, []
        return answers

    def _undone(self, error: Exception, group: list[Item], *, closing: bool) -> Answers:
        """Nothing of this group is durable, whatever the error is."""
        self._roll_back()
        if isinstance(error, apsw.IOError):
            self._log.doubtful = True
        self._owed = [*self._owed, *(item for item in group if type(item) is Cancel)][-CANCELS_OWED_MAX:]
        told = explained(error, self._path)
        if not isinstance(told, StoreError):
            told = StoreError(f"{self._path}: {error!r}: this is a defect of the server; nothing was granted")
        return self._failed(group, told, closing=closing)

    def _sync_commits(self, wanted: bool) -> None:
        if wanted != self._syncing:
            sync_commits(self._connection, wanted)
            self._syncing = wanted

    def _only_frees(self, group: list[Item]) -> bool:
        """Releases alone, and no waiter to whom a freed lock would be granted in the same transaction."""
        if self._locks.room.lines or self._owed:
            return False
        for item in group:
            if type(item) is not tuple:
                return False
            for operation in item[1]:
                if type(operation) is not Release:
                    return False
        return True

    # One item. A failure of this item alone is its answer; one that has ended the transaction is raised.

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
        """Checks in two ways that nobody else writes: the claim may be lost with its file, the run number is data."""
        self._identity.verify()
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
            in_order = True
        with contextlib.suppress(apsw.Error):  # pages that could not be copied into the file stay in its log
            # Of a start that fails, the log is left as it is noted.
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
        # Each has an exception of its own: raising one adds a traceback to it.
        return [(future, type(error)(*error.args)) for future in dict.fromkeys(futures)]


def _is_short(item: Item) -> bool:
    return type(item) is not tuple or len(item[1]) <= SHORT_MAX


class SleepClock:
    """Tells whether its thread has slept for long in a transaction: for so long it waited for the disk. The time for
    which it worked does not count, nor does the time for which it waited for a processor: a busy machine is no slow
    disk. Where the system does not tell how long that was, it counts. To be called by one thread only.

    To ask the system takes longer than many a transaction. So it is asked after one that took long, and compared with
    what it said at most `SLOW_S` before that began. Work and waiting between the two count as if they were in it."""

    def __init__(self) -> None:
        self._fd: int | None = None
        self._began_s = self._asked_s = float("-inf")
        self._awake_s = 0.0
        """For how long the thread had worked, or waited for a processor, when the system was asked."""

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
    """Copies the write-ahead log back into the file, in a thread of its own, while the writer goes on.

    With a million locks nearly every grant changes a page of its own, and copying thousands of pages takes as long as
    thousands of grants. SQLite can copy from another connection, `copier`. Only the last step is the writer's: the log
    starts again at its beginning when all of it has been copied and nothing was written meanwhile.

    `due()` is called after each commit, by the thread that made it. It must not keep the writer waiting, unless the log
    is in doubt.
    """

    def __init__(self, writer: apsw.Connection, copier: apsw.Connection, mark: Mark, pages_max: int) -> None:
        self._mark = mark
        self._writer = writer
        self._copier = copier
        self._pages_max = pages_max
        self._pages = 0
        self._starts = 0
        """How often the log has started again."""
        self._copied = (0, 0)
        """How many pages of the log the copier has found copied, and since which start of it."""
        self.doubtful = False
        """A sync has failed in either thread: what was not on the disk may be lost without the kernel knowing."""
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
        self._mark.note(pages)
        return apsw.SQLITE_OK

    @property
    def overdue(self) -> bool:
        """The writer itself has to copy, which takes a while."""
        return self._pages >= COPY_FACTOR * self._pages_max

    def due(self) -> None:
        if self._pages < self._pages_max or not self._idle.is_set():
            return
        start, copied = self._copied
        if self.overdue or (start == self._starts and self._pages - copied <= self._pages_max // REST_FACTOR):
            # Nearly all of it has been copied by now. The next transaction starts the log again.
            self._copy(self._writer)
            self._mark.log_started_again()
        else:
            self._idle.clear()
            self._asked.put(self._starts)

    def start_again(self) -> None:
        """All of the log into the file, now, in the writer's thread and outside a transaction; raises if it cannot."""
        self._idle.wait(COPY_S_MAX)
        self.doubtful = False  # set before the copy: the other thread may set it again meanwhile
        try:
            self._writer.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_RESTART)
            self._mark.log_started_again()
        except BaseException:
            self.doubtful = True
            raise

    def close(self) -> None:
        """Ends the thread and its connection; the writer's own is the last, and copies what is left."""
        self._asked.put(None)
        self._thread.join()

    def end(self, *, in_order: bool) -> None:
        """When the writer's connection is closed, too."""
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
