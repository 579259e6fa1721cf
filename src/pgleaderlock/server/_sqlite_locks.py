"""The rules of the lock store on SQLite: what becomes of each operation, inside a transaction that somebody else opens.

Imports apsw, the store's protocol and its neighbours of the file. Must never begin or end a
transaction, never read a clock (the moment of the transaction is given), never answer anybody by itself (answers are
collected, and given when they are durable) and never leave a statement half read: `get` reads to the end, `fetchone`
does not. A read that is still open when the transaction ends keeps the log from starting again and, once another
program has written, this connection from writing ever again.
"""

from collections.abc import Sequence
from typing import Any

import apsw

from pgleaderlock.server._sqlite_file import sql
from pgleaderlock.server._sqlite_rows import MS, Row, Run, view
from pgleaderlock.server._sqlite_waiting import Share, Ticket, WaitingRoom
from pgleaderlock.server.store import (
    Acquire,
    Broken,
    Granted,
    Held,
    NotReleased,
    NotRenewed,
    Operation,
    Outcome,
    Release,
    Released,
    Renew,
    Renewed,
    Reply,
    StoreFull,
    new_lease_id,
)

__all__ = ["Locks"]

BREAKS_KEPT = 10_000

# The texts are looked up once: they are the keys of the connection's cache of prepared statements.
FIND, FIND_TOKEN, INSERT, GRANT = sql("find"), sql("find_token"), sql("insert"), sql("grant")
GRANT_FREE = sql("grant_free")
RENEW, RELEASE, BREAK, EXPIRE, PRUNE = sql("renew"), sql("release"), sql("break"), sql("expire"), sql("prune")
RECORD_BREAK, FORGET_BREAKS, CHECK = sql("record_break"), sql("forget_breaks"), sql("check")

RENEWED_NOT, RELEASED, RELEASED_NOT = NotRenewed(), Released(), NotReleased()

Answer = tuple[Reply, Any]


class Locks:
    """The locks as the one writer sees them."""

    def __init__(self, connection: apsw.Connection, run: Run, locks_max: int) -> None:
        self._connection = connection
        self._execute = connection.cursor().execute
        self._changes = connection.changes
        self._run = run
        self._locks_max = locks_max
        self.rows, self.held = connection.execute(sql("count")).get
        self.room = WaitingRoom()
        self.answers: list[Answer] = []
        self.fresh: dict[str, Share] = {}
        """Leases with a key, from their grant to the moment their waiter has them: a replay counts as a receiver."""
        self._freed: list[str] = []
        self._now_ns = 0
        self._wall_ns = 0

    # --- One statement

    def alone(self, operation: Operation, now_ns: int, wall_ns: int) -> Outcome | None:
        """One operation outside a transaction, while nobody waits for anything: its statement is one by itself, and is
        committed when this returns. None: nothing was changed, and it takes a transaction to say why."""
        self._now_ns, self._wall_ns = now_ns, wall_ns
        if isinstance(operation, Acquire):
            return self._grant_free(operation)
        if isinstance(operation, Release):
            released = self._release(operation)
            return released if released is RELEASED else None
        renewed = self._renew(operation)
        return renewed if renewed is not RENEWED_NOT else None

    def _grant_free(self, acquire: Acquire) -> Granted | None:
        name, owner_id, ttl_ns = acquire.lock_name, acquire.owner_id, acquire.ttl_ms * MS
        lease_id = new_lease_id()
        expiry_ns = self._wall_ns + ttl_ns
        token = self._execute(
            GRANT_FREE,
            (
                name, owner_id, lease_id, acquire.ttl_ms, self._run.number, self._now_ns + ttl_ns, expiry_ns,
                acquire.idempotency_key,
            ),
        ).get  # fmt: skip
        if token is None:
            return None
        self.held += 1
        return Granted(name, owner_id, lease_id, token, expiry_ns // MS)

    # --- A transaction

    def begin(self, now_ns: int, wall_ns: int) -> None:
        """The moment of the transaction: everything in it happens now. What is due comes first."""
        self._now_ns, self._wall_ns = now_ns, wall_ns
        self._freed.clear()
        while (due := self.room.due(now_ns)) is not None:
            name, ticket = due
            if ticket is None:
                self._serve(name)
            elif self.room.remove(ticket):
                try:
                    self.answers.append((ticket.future, self._refusal(name)))
                except Exception as error:
                    self.answers.append((ticket.future, error))  # it is in no line any more: this is how it is told
                    raise

    def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        """One request: all of it, or none, with an exception. Alone, an operation is one statement that writes."""
        if len(operations) == 1:
            outcomes = [self._one(operations[0])]
        else:
            before = self.rows, self.held
            self._execute("SAVEPOINT request")
            try:
                outcomes = [self._one(operation) for operation in operations]
            except Exception:
                if self._connection.in_transaction:
                    self._execute("ROLLBACK TO request")
                    self._execute("RELEASE request")
                self.rows, self.held = before
                self._freed.clear()
                raise
            self._execute("RELEASE request")
        if self._freed:
            self.serve_freed()
        return outcomes

    def _one(self, operation: Operation) -> Outcome:
        if isinstance(operation, Acquire):
            return self._acquire(operation)
        if isinstance(operation, Renew):
            return self._renew(operation)
        return self._release(operation)

    def _acquire(self, acquire: Acquire) -> Granted | Held | StoreFull:
        name = acquire.lock_name
        row = self._execute(FIND, (name,)).get
        if row is not None and row[0] is not None and self._run.deadline_ns(row) > self._now_ns:
            return self._replay(acquire, row) or self._held(name, row)
        line = self.room.lines.get(name) if self.room.lines else None
        if line is not None:  # it was freed by this very request, and is theirs at the end of it
            first = line.first.acquire
            return Held(name, first.owner_id, self._wall_ns // MS + first.ttl_ms, first.ttl_ms)
        return self._grant(acquire, row)

    def _grant(self, acquire: Acquire, row: Row | None, waited_ms: int = 0) -> Granted | StoreFull:
        name, ttl_ms = acquire.lock_name, acquire.ttl_ms
        lease_id = new_lease_id()
        expiry_ns = self._wall_ns + ttl_ms * MS
        if row is None:
            if self.rows >= self._locks_max:
                return StoreFull(self._locks_max)
            last_token, version = self._execute(FIND_TOKEN, (name,)).get or (0, 0)
            write = INSERT
        else:
            last_token, version = row[2], row[7]
            write = GRANT
        token = last_token + 1
        self._execute(
            write,
            (
                name, acquire.owner_id, lease_id, token, ttl_ms, self._run.number, self._now_ns + ttl_ms * MS,
                expiry_ns, version + 1, acquire.idempotency_key,
            ),
        )  # fmt: skip
        if row is None:
            self.rows += 1
            self.held += 1
        elif row[0] is None:
            self.held += 1
        return Granted(name, acquire.owner_id, lease_id, token, expiry_ns // MS, waited_ms)

    def _replay(self, acquire: Acquire, row: Row, waited_ms: int = 0) -> Granted | None:
        key = acquire.idempotency_key
        if key is None or row[8] != key or row[0] != acquire.owner_id:
            return None
        share = self.fresh.get(row[1])
        if share is not None:
            share.receivers += 1
        return Granted(acquire.lock_name, row[0], row[1], row[2], self._run.expiry_ms(row), waited_ms, True)

    def _renew(self, renew: Renew) -> Renewed | NotRenewed:
        run = self._run
        expiry_ns = self._wall_ns + renew.extend_by_ms * MS
        deadline_ns = self._now_ns + renew.extend_by_ms * MS
        self._execute(
            RENEW,
            (
                renew.lock_name, renew.owner_id, renew.lease_id, renew.fencing_token, run.number, run.start_ns,
                self._now_ns, renew.extend_by_ms, deadline_ns, expiry_ns,
            ),
        )  # fmt: skip
        if not self._changes():
            return RENEWED_NOT
        if self.room.lines:
            self.room.look_at(renew.lock_name, deadline_ns)
        return Renewed(expiry_ns // MS)

    def _release(self, release: Release) -> Released | NotReleased:
        run = self._run
        self._execute(
            RELEASE,
            (
                release.lock_name, release.owner_id, release.lease_id, release.fencing_token, run.number, run.start_ns,
                self._now_ns,
            ),
        )  # fmt: skip
        if not self._changes():
            return RELEASED_NOT
        self.held -= 1
        if release.lock_name in self.room.lines:
            self._freed.append(release.lock_name)
        return RELEASED

    def break_lock(self, lock_name: str, by: str) -> Broken:
        row = self._execute(FIND, (lock_name,)).get
        token = None if row is not None else self._execute(FIND_TOKEN, (lock_name,)).get
        was = view(self._run, lock_name, row, token, self._now_ns)
        was_held = was.owner_id, was.lease_id, was.fencing_token
        self._execute(RECORD_BREAK, (self._wall_ns, lock_name, by, *was_held))
        self._execute(FORGET_BREAKS, (BREAKS_KEPT,))
        self._execute(BREAK, (lock_name, self._run.number, self._now_ns))
        if self._changes():
            self.held -= 1
            if lock_name in self.room.lines:
                self._freed.append(lock_name)
        return Broken(was)

    # --- Waiting

    def wait(self, ticket: Ticket) -> None:
        """Grants at once what is free, or puts the ticket in line."""
        acquire = ticket.acquire
        name = acquire.lock_name
        if name in self.room.lines:  # after a transaction that failed the lock may be free, and theirs
            self._serve(name)
        row = self._execute(FIND, (name,)).get
        if row is not None and row[0] is not None and (ends_ns := self._run.deadline_ns(row)) > self._now_ns:
            replay = self._replay(acquire, row)
            if replay is not None:
                self.answers.append((ticket.future, replay))
            elif ticket.until_ns <= self._now_ns:
                self.answers.append((ticket.future, self._held(name, row)))
            else:
                self.room.add(ticket, ends_ns)
            return
        self._answer(ticket, self._grant(acquire, row, (self._now_ns - ticket.start_ns) // MS))

    def cancel(self, ticket: Ticket) -> None:
        """The one who waited has gone: out of the line or, if the grant was faster, back with the lease."""
        if self.room.remove(ticket) or ticket.share is None:
            return
        share, granted = ticket.share, ticket.share.granted
        if not ticket.gone:  # it comes again when the transaction with it has failed
            ticket.gone = True
            share.receivers -= 1
            share.tickets -= 1
        if share.tickets == 0:
            self.fresh.pop(granted.lease_id, None)
        if share.receivers == 0:
            self._release(Release(granted.lock_name, granted.owner_id, granted.lease_id, granted.fencing_token))
            self.serve_freed()

    def serve_freed(self) -> None:
        """What this request has freed goes to those who wait for it, in the same transaction."""
        freed = self._freed[:]
        self._freed.clear()
        for name in freed:
            self._serve(name)

    def _serve(self, name: str) -> None:
        """Gives a lock to the first in its line, if it is free, and has it looked at when that lease ends."""
        while (line := self.room.lines.get(name)) is not None:
            row = self._execute(FIND, (name,)).get
            if row is not None and row[0] is not None and (ends_ns := self._run.deadline_ns(row)) > self._now_ns:
                self.room.look_at(name, ends_ns)
                return
            ticket = line.first
            self.room.remove(ticket)
            try:
                outcome = self._grant(ticket.acquire, row, (self._now_ns - ticket.start_ns) // MS)
            except Exception as error:
                self.answers.append((ticket.future, error))  # it is in no line any more: this is how it is told
                if isinstance(error, apsw.Error) or not self._connection.in_transaction:
                    raise  # not the fault of this ticket: the whole transaction fails
                continue
            self._answer(ticket, outcome)
            if ticket.share is not None:  # else each is told by itself that the store is full
                for twin in line.twins(ticket):
                    self.room.remove(twin)
                    self._answer_twin(ticket.share, twin)

    def _answer(self, ticket: Ticket, outcome: Granted | StoreFull) -> None:
        if isinstance(outcome, Granted):
            ticket.share = Share(outcome)
            if ticket.acquire.idempotency_key is not None:
                self.fresh[outcome.lease_id] = ticket.share
        self.answers.append((ticket.future, outcome))

    def _answer_twin(self, share: Share, twin: Ticket) -> None:
        share.receivers += 1
        share.tickets += 1
        twin.share = share
        got = share.granted
        waited_ms = (self._now_ns - twin.start_ns) // MS
        again = Granted(
            got.lock_name, got.owner_id, got.lease_id, got.fencing_token, got.lease_expiry_ms, waited_ms, True
        )
        self.answers.append((twin.future, again))

    def forget_answers(self) -> list[Reply]:
        """Nothing of this transaction is true. Gives those who would have been told of it."""
        for _, outcome in self.answers:
            if isinstance(outcome, Granted) and not outcome.replayed:
                self.fresh.pop(outcome.lease_id, None)
        futures = [future for future, _ in self.answers]
        self.answers = []
        return futures

    def close(self) -> None:
        """Everybody who waits is told how things stand."""
        for name, line in list(self.room.lines.items()):
            refusal = self._refusal(name)
            for ticket in list(line.tickets):
                self.room.remove(ticket)
                self.answers.append((ticket.future, refusal))

    def _refusal(self, name: str) -> Held:
        row = self._execute(FIND, (name,)).get
        if row is None or row[0] is None:
            return Held(name, "", self._wall_ns // MS, 0)
        return self._held(name, row)

    def _held(self, name: str, row: Row) -> Held:
        left_ms = max(0, -((self._now_ns - self._run.deadline_ns(row)) // MS))  # rounded up: not back too early
        return Held(name, row[0], self._run.expiry_ms(row), left_ms)

    def check(self) -> None:
        self._execute(CHECK)

    # --- The sweep

    def tidy(self, names: Sequence[str], free_before_ns: int) -> int:
        """Clears those of these leases that have expired, and prunes those locks that have been free for so long."""
        run, expired = self._run, 0
        for name in names:
            self._execute(EXPIRE, (name, run.number, run.start_ns, self._now_ns))
            if self._changes():
                expired += 1
                self.held -= 1
                if name in self.room.lines:
                    self._freed.append(name)
                continue
            self._execute(PRUNE, (name, run.number, run.start_ns, free_before_ns))
            self.rows -= self._changes()
        return expired
