"""The one thread that writes to the file of the SQLite store: takes what has gathered, does it in one transaction, and
answers when that is on the disk (group commit).

A group of mere releases does not wait for the disk. They are in the log, so they survive the process; if a power cut
takes them back, the locks are held again until their leases end, which delays somebody and harms nobody. The next grant
takes them to the disk with it. A grant or a renewal that was taken back would be a lease that two believe in.
After a sync that failed, the system may hold for written what it has lost: releases, and with this gap in the log all
that comes behind it. So the log is brought into the file first, which is synced by itself, and then starts again.

A request that comes alone, while nothing else is to be done, is done on the event loop's own thread: to wake another
one and to be woken by it takes longer than the rest. So the loop may stand still for one sync; after a slow one, and
whenever there is more than one request, the thread does it. If it is one operation that goes well, it is one statement:
what a transaction needs besides is a third of its time beside the disk's.

Imports apsw, the clock and its neighbours. Must never answer before the commit has returned, and never decide about a
lock: the rules are in `_sqlite_locks`.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw

from pgleaderlock._clock import Clock
from pgleaderlock.server._sqlite_file import Identity, explained, sql, sync_commits
from pgleaderlock.server._sqlite_items import Answers, Apply, Call, Cancel, Item, Stop, Tick
from pgleaderlock.server._sqlite_locks import Locks
from pgleaderlock.server._sqlite_log import Log
from pgleaderlock.server._sqlite_waiting import Ticket
from pgleaderlock.server.store import Release, Reply, StoreError

__all__ = ["Writer"]

META = sql("meta")
GROUP_OPERATIONS_MAX = 2_000
CANCELS_OWED_MAX = 10_000
RETRY_NS = 100_000_000
"""When to look again at the locks that somebody waits for, after a transaction that failed."""
SHORT_MAX = 16
"""A request of more operations than this is the thread's: it would keep the loop from everybody else."""
SLOW_S = 0.005
"""A transaction that took longer than this was not one for the loop's thread."""
CROWD_REMEMBERED_S = 0.05
"""Where several come at once, more are to be expected: a sync for one of them would hold up all others."""
SLOW_FACTOR = 50
"""After a transaction that hung, the loop tries again so many times later: it loses a fiftieth of its time at most."""

Settle = Callable[[Answers, int | None], None]


class Writer:
    """Items go in from the event loop's thread, answers come back to it: one call a transaction."""

    def __init__(
        self,
        connection: apsw.Connection,
        locks: Locks,
        log: Log,
        *,
        run: int,
        path: Path,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        settle: Settle,
    ) -> None:
        self._connection = connection
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
        """On the loop's clock: it was crowded or slow a moment ago, and until then the thread does everything."""
        self._synced_before = True
        self._followed_by = {True: True, False: True}
        """Whether the transaction after one that was synced, or was not, was synced the last time."""
        self._turn = threading.Lock()
        """Held by whichever thread uses the connection and the locks."""
        self._owed: list[Cancel] = []
        self._syncing = True
        self._doing: list[Item] = []
        """What the thread has taken, and nobody has been told of yet."""
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

    def apply(self, request: Apply) -> None:
        """At once, if nothing else is going on; else together with all other requests that the loop has at hand."""
        if self._is_quiet() and _is_short(request) and self._turn.acquire(blocking=False):
            # A second one within the same turn of the loop means that there are more: those go to the thread.
            self._one_was_here = True
            try:
                self._do_here(request)
            finally:
                self._loop.call_soon(self._next_turn)
                self._turn.release()
            return
        self._gathered.append(request)
        if len(self._gathered) == 1:
            self._loop.call_soon(self._hand_over)

    def _next_turn(self) -> None:
        self._one_was_here = False

    def _hand_over(self) -> None:
        # Whoever was cancelled meanwhile wants nothing any more.
        gathered = [request for request in self._gathered if not request[0].cancelled()]
        self._gathered.clear()
        if len(gathered) > 1 or self._outstanding:
            self._leave_to_thread(CROWD_REMEMBERED_S)
        for request in gathered:
            self.put(request)

    def _is_quiet(self) -> bool:
        """Nothing is under way, nor was it crowded a moment ago, and nothing but a short transaction is to be done."""
        if self._gathered or self._outstanding or self._one_was_here or self._log.doubtful or self._log.overdue:
            return False
        return self._loop.time() >= self._threads_until

    def _leave_to_thread(self, for_s: float) -> None:
        self._threads_until = max(self._threads_until, self._loop.time() + for_s)

    def _do_here(self, request: Apply) -> None:
        began = time.monotonic()
        answers = self._alone(request) or self._transact([request], closing=False)
        self._remember(time.monotonic() - began)
        self._settle(answers, self._locks.room.next_due_ns)
        self._prepare_for_next()
        if self._log.overdue:
            self.put(Tick())  # to copy the log takes a while: the thread does it after whatever it does
        else:
            self._log.due()

    def _prepare_for_next(self) -> None:
        """To switch the sync takes time, and there is more of it now than then: a grant is mostly followed by a
        release, and that by a grant. If not, the next transaction switches it itself."""
        synced = self._syncing
        self._followed_by[self._synced_before] = synced
        self._synced_before = synced
        with contextlib.suppress(apsw.Error):
            self._sync_commits(self._followed_by[synced])

    def _remember(self, took_s: float) -> None:
        """Whoever did it: a disk that is slow in the thread would be slow in the loop."""
        if took_s > SLOW_S:
            self._leave_to_thread(SLOW_FACTOR * took_s)

    def _done(self, answers: Answers, due_ns: int | None, group: list[Item], took_s: float) -> None:
        self._outstanding -= len(group)
        if len(group) == 1 and _is_short(group[0]):  # what is long says nothing about the disk
            self._remember(took_s)
        self._settle(answers, due_ns)

    def ended_by_defect(self) -> StoreError:
        return StoreError(f"{self._path}: the writer has ended by a defect: restart the server; its log says more")

    def _give_up(self) -> None:
        """The thread has ended by a defect: nobody is to wait for it."""
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
        while stop is None:
            group, stop = self._take()
            self._doing = group
            with self._turn:
                began = time.monotonic()
                answers = self._transact(group, closing=stop is not None)
                if stop is not None:
                    self._close_file()
                    answers.append((stop.future, None))
                with contextlib.suppress(RuntimeError):  # the application's loop is gone, and nobody waits
                    due_ns, took_s = self._locks.room.next_due_ns, time.monotonic() - began
                    self._loop.call_soon_threadsafe(self._done, answers, due_ns, group, took_s)
                self._doing = []
                if stop is None:
                    self._log.due()

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

    def _alone(self, request: Apply) -> Answers | None:
        """One operation is mostly one statement, and so a transaction by itself, which looks at the number of this run.
        None: it has changed nothing, and is done again after a closer look."""
        reply, operations = request
        if len(operations) != 1 or self._owed or self._locks.room.lines:
            return None
        operation = operations[0]
        try:
            if type(operation) is Release:  # it grants nothing, wherever the file is by now
                self._sync_commits(False)
            else:
                self._sync_commits(True)
                self._identity.verify()
            # Read after it came: no lease runs from before its owner asked for it.
            outcome = self._locks.alone(operation, int(self._clock.now() * 1e9), time.time_ns())
        except Exception as error:
            return self._undone(error, [request], [], closing=False)
        return None if outcome is None else [(reply, [outcome])]

    def _transact(self, group: list[Item], *, closing: bool) -> Answers:
        """One transaction for the group. If it cannot be committed, nobody of it is told of anything but that."""
        locks = self._locks
        before = locks.rows, locks.held
        cancels = self._owed + [item for item in group if type(item) is Cancel]
        try:
            if self._log.doubtful:
                self._log.start_again()
            self._sync_commits(closing or not self._only_frees(group))
            self._connection.execute("BEGIN IMMEDIATE")
            self._verify()
            # Read after the last item was taken: no lease runs from before its owner asked for it.
            locks.begin(int(self._clock.now() * 1e9), time.time_ns())
            for cancel in self._owed:
                locks.cancel(cancel.ticket)
            for item in group:  # in the order in which they came: a ticket before the word that its owner has gone
                self._do(item)
            if closing:
                locks.close()
            self._connection.execute("COMMIT")
        except Exception as error:
            locks.rows, locks.held = before
            return self._undone(error, group, cancels, closing=closing)
        self._owed = []
        answers, locks.answers = locks.answers, []
        return answers

    def _undone(self, error: Exception, group: list[Item], cancels: list[Cancel], *, closing: bool) -> Answers:
        """Whatever it is: nothing of this group is durable."""
        self._roll_back()
        if isinstance(error, apsw.IOError):
            self._log.doubtful = True
        self._owed = cancels[-CANCELS_OWED_MAX:]
        told = explained(error, self._path)
        if not isinstance(told, StoreError):
            told = StoreError(f"{self._path}: {error!r}: this is a defect of the server; nothing was granted")
        return self._failed(group, told, closing=closing)

    def _sync_commits(self, wanted: bool) -> None:
        if wanted != self._syncing:
            sync_commits(self._connection, wanted)
            self._syncing = wanted

    def _only_frees(self, group: list[Item]) -> bool:
        """Nothing but releases, and nobody to whom a freed lock would be granted in the same transaction."""
        if self._locks.room.lines or self._owed:
            return False
        for item in group:
            if type(item) is not tuple:
                return False
            for operation in item[1]:
                if type(operation) is not Release:
                    return False
        return True

    def _do(self, item: Item) -> None:
        """One item. What fails alone is answered alone; what has ended the transaction is raised."""
        locks = self._locks
        if type(item) is tuple:
            try:
                locks.answers.append((item[0], locks.apply(item[1])))
            except Exception as error:
                self._fail_alone(item[0], error)
        elif type(item) is Ticket:
            try:
                locks.wait(item)
            except Exception as error:
                self._fail_alone(item.future, error)
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

    def _fail_alone(self, future: Reply, error: Exception) -> None:
        if not self._connection.in_transaction or isinstance(error, apsw.FullError | apsw.IOError | apsw.CorruptError):
            raise error
        self._locks.answers.append((future, explained(error, self._path)))

    def _verify(self) -> None:
        """Twice sure that nobody else writes: the claim may be lost with its file, the run number is in the data."""
        self._identity.verify()
        if self._connection.execute(META, ("run",)).get != self._run_number:
            raise StoreError(
                f"{self._path} was opened by another lock server: this one grants nothing any more. Stop one of them, "
                "give it a file of its own, or let both share a PostgreSQL store"
            )

    def _close_file(self) -> None:
        self._log.close()
        with contextlib.suppress(apsw.Error):  # what could not be copied into the file stays in its log
            self._connection.close(True)

    def _roll_back(self) -> None:
        with contextlib.suppress(apsw.Error):  # it may have ended by itself, and then there is nothing to roll back
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
                futures.append(item.future)
            elif type(item) is Call:
                futures.append(item.future)
        if closing:
            for line in list(room.lines.values()):
                for ticket in list(line.tickets):
                    room.remove(ticket)
                    futures.append(ticket.future)
        room.look_at_all(int(self._clock.now() * 1e9) + RETRY_NS)
        # Each has an exception of its own: whoever raises it adds a traceback to it.
        return [(future, type(error)(*error.args)) for future in dict.fromkeys(futures)]


def _is_short(item: Item) -> bool:
    return type(item) is not tuple or len(item[1]) <= SHORT_MAX
