"""The rules of the lock store on SQLite: what becomes of each operation, inside a transaction that the writer opens.

Must never begin or end a transaction, read a file or a clock (the moment of the transaction is given), or set a reply
(answers are collected, and sent after the commit). Must never leave a statement half read: `get` reads to the end,
`fetchone` does not. A read that is still open when the transaction ends keeps the log from restarting and, once another
program has written, makes every later write of this connection fail.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import apsw
import msgspec

from pgleaderlock.server.sqlite.file import sql
from pgleaderlock.server.sqlite.mark import Mark
from pgleaderlock.server.sqlite.waiting import Share, Ticket, WaitingRoom
from pgleaderlock.server.store import (
    Acquire,
    Adopted,
    Broken,
    Granted,
    Held,
    KeyReused,
    KnownKeys,
    LockView,
    NotReleased,
    NotRenewed,
    Operation,
    Outcome,
    Release,
    Released,
    Renew,
    Renewed,
    StoreError,
    StoreFull,
    new_lease_id,
    stored_key,
)

__all__ = ["FIND", "FIND_TOKEN", "MS", "Locks", "Row", "Run", "view"]

MS = 1_000_000
BREAKS_KEPT = 10_000

# The texts are looked up once: they are the keys of the connection's cache of prepared statements.
FIND, FIND_TOKEN, INSERT, GRANT = sql("find"), sql("find_token"), sql("insert"), sql("grant")
RENEW, RELEASE, BREAK, EXPIRE, PRUNE = sql("renew"), sql("release"), sql("break"), sql("expire"), sql("prune")
RECORD_BREAK, FORGET_BREAKS, CHECK = sql("record_break"), sql("forget_breaks"), sql("check")
ADOPT_TOKEN = sql("adopt_token")

RENEWED_NOT, RELEASED, RELEASED_NOT = NotRenewed(), Released(), NotReleased()

Answer = tuple[asyncio.Future[Any], Any]
"""A reply with its outcomes or its exception; or the future of a `Call` with the call's result or exception."""

# A row as sqlite_find returns it:
# owner_id, lease_id, fencing_token, ttl_ms, run, deadline_ns, lease_expiry_ns, version, idempotency_key
Row = tuple[Any, ...]


class Run:
    """One opening of the file: its number, and its start on the boot-time clock and on the wall clock."""

    __slots__ = ("number", "start_ns", "start_wall_ns")

    def __init__(self, number: int, start_ns: int, start_wall_ns: int) -> None:
        self.number = number
        self.start_ns = start_ns
        self.start_wall_ns = start_wall_ns

    def deadline_ns(self, row: Row) -> int:
        """When the lease of a held row ends. A lease of an earlier run lasts for its `ttl_ms` from this run's start."""
        deadline_ns: int = row[5] if row[4] == self.number else self.start_ns + row[3] * MS
        return deadline_ns

    def expiry_ms(self, row: Row) -> int:
        """The same moment as Unix time in milliseconds, for people."""
        expiry_ns: int = row[6] if row[4] == self.number else self.start_wall_ns + row[3] * MS
        return expiry_ns // MS


def view(run: Run, lock_name: str, row: Row | None, token: tuple[int, int] | None, now_ns: int) -> LockView:
    """The state of a lock at `now_ns`, from its row; if the row was pruned, from its `token` and version."""
    if row is None:
        last_token, version = token or (0, 0)
        return LockView(lock_name, False, None, None, last_token, None, version)
    if row[0] is None or run.deadline_ns(row) <= now_ns:
        return LockView(lock_name, False, None, None, row[2], None, row[7])
    return LockView(lock_name, True, row[0], row[1], row[2], run.expiry_ms(row), row[7])


def _has_key(row: Row, key: str | None) -> bool:
    return key is not None and row[8] is not None and row[8].partition(" ")[0] == key


class Locks:
    """The locks, as the one writer reads and changes them."""

    def __init__(self, connection: apsw.Connection, run: Run, locks_max: int, mark: Mark) -> None:
        self._connection = connection
        self._execute = connection.cursor().execute
        self._changes = connection.changes
        self._run = run
        self._locks_max = locks_max
        self._mark = mark
        self._ceiling = mark.ceiling
        self._floor: int = connection.execute(sql("meta"), ("token_floor",)).get
        self.rows, self.held = connection.execute(sql("count")).get
        self.room = WaitingRoom()
        self.answers: list[Answer] = []
        self.fresh: dict[str, Share] = {}
        """Leases with a key, from the grant until the waiter has its reply: until then, a replay counts as receiver."""
        self._freed: list[str] = []
        self._keys = KnownKeys()
        self._now_ns = 0
        self._wall_ns = 0

    # --- A transaction

    def begin(self, now_ns: int, wall_ns: int) -> None:
        """Sets the time that counts for the whole transaction, and first handles everything that is due by then."""
        self._now_ns, self._wall_ns = now_ns, wall_ns
        self._freed.clear()
        while (due := self.room.due(now_ns)) is not None:
            name, ticket = due
            if ticket is None:
                self._serve(name)
            elif self.room.remove(ticket):
                try:
                    self.answers.append((ticket.reply, [self._refusal(name)]))
                except Exception as error:
                    # The ticket has left its line, so only this entry makes the writer answer it.
                    self.answers.append((ticket.reply, error))
                    raise

    def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        """Carries out one request: all of it, or nothing and an exception. A single operation needs no savepoint,
        because only one of its statements writes."""
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

    def _acquire(self, acquire: Acquire) -> Granted | Held | KeyReused | StoreFull:
        name = acquire.lock_name
        row = self._execute(FIND, (name,)).get
        held = row is not None and row[0] is not None and self._run.deadline_ns(row) > self._now_ns
        if acquire.idempotency_key is not None:
            known = (self._replay(acquire, row) if held else None) or self._reused(acquire)
            if known is not None:
                return known
        if held:
            return self._held(name, row)
        line = self.room.lines.get(name) if self.room.lines else None
        if line is not None:  # this request has freed the lock: the first waiter gets it at the end of the request
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
        token = max(last_token, self._floor) + 1
        if token > self._ceiling:
            self._keep_below_ceiling(token)
        self._execute(
            write,
            (
                name, acquire.owner_id, lease_id, token, ttl_ms, self._run.number, self._now_ns + ttl_ms * MS,
                expiry_ns, version + 1, stored_key(acquire),
            ),
        )  # fmt: skip
        if row is None:
            self.rows += 1
            self.held += 1
        elif row[0] is None:
            self.held += 1
        self._keys.note(acquire)
        return Granted(name, acquire.owner_id, lease_id, token, expiry_ns // MS, ttl_ms, ttl_ms, waited_ms)

    def _replay(self, acquire: Acquire, row: Row) -> Granted | KeyReused | None:
        """The answer to an acquire that repeats the key of the valid lease in this row: the same grant again, or a
        refusal. None if the lease has another key, or none."""
        if not _has_key(row, acquire.idempotency_key):
            return None
        if row[0] != acquire.owner_id:
            return KeyReused("owner_id")
        if row[8] != stored_key(acquire):
            return KeyReused("ttl_ms")
        share = self.fresh.get(row[1])
        if share is not None:
            share.receivers += 1
        left_ms = (self._run.deadline_ns(row) - self._now_ns) // MS
        return Granted(
            acquire.lock_name, row[0], row[1], row[2], self._run.expiry_ms(row), acquire.ttl_ms, left_ms, 0, True
        )

    def _reused(self, acquire: Acquire) -> KeyReused | None:
        """The refusal of a key that another lock's valid lease has, or a waiter of this lock with another owner or
        `ttl_ms`. None if the key is not in use in this way."""
        other = self._keys.other_lock(acquire)
        if other is not None:
            row = self._execute(FIND, (other,)).get
            good = row is not None and row[0] is not None and self._run.deadline_ns(row) > self._now_ns
            if good and _has_key(row, acquire.idempotency_key):
                return KeyReused("lock")
        line = self.room.lines.get(acquire.lock_name) if self.room.lines else None
        first = None if line is None else line.with_key(acquire.idempotency_key)
        if first is not None and first.owner_id != acquire.owner_id:
            return KeyReused("owner_id")
        return KeyReused("ttl_ms") if first is not None and first.ttl_ms != acquire.ttl_ms else None

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
        return Renewed(expiry_ns // MS, renew.extend_by_ms)

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

    def _keep_below_ceiling(self, token: int) -> None:
        """Raises the mark's ceiling before a token above it is stored: if the log is lost, the ceiling still says how
        far tokens may have gone."""
        if token > self._ceiling:
            self._ceiling = self._mark.reserve(token)

    def adopt(self, locks: Sequence[Adopted]) -> int:
        return sum(self._adopt(lock) for lock in locks)

    def _adopt(self, lock: Adopted) -> bool:
        name = lock.lock_name
        row = self._execute(FIND, (name,)).get
        known, version = row[2:8:5] if row is not None else self._execute(FIND_TOKEN, (name,)).get or (0, 0)
        if known >= lock.fencing_token:
            return False
        self._keep_below_ceiling(lock.fencing_token)
        if row is not None and row[0] is not None and self._run.deadline_ns(row) > self._now_ns:
            raise StoreError(
                f"the lock {name!r} is held here with token {known}, below {lock.fencing_token} of the server to take "
                "over from: start again when it is free"
            )
        if row is None and lock.owner_id is None:
            self._execute(ADOPT_TOKEN, (name, lock.fencing_token, max(version, lock.version)))
            return True
        if row is None and self.rows >= self._locks_max:
            raise StoreError(f"{self._locks_max} locks are stored, which is the limit: raise --max-locks")
        left_ns = lock.remaining_ms * MS
        self._execute(
            INSERT if row is None else GRANT,
            (
                name, lock.owner_id, lock.lease_id, lock.fencing_token, lock.remaining_ms, self._run.number,
                self._now_ns + left_ns, self._wall_ns + left_ns, max(version, lock.version) + 1, None,
            ),
        )  # fmt: skip
        self.rows += row is None
        self.held += (lock.owner_id is not None) - (row is not None and row[0] is not None)
        return True

    # --- Waiting

    def wait(self, ticket: Ticket) -> None:
        """Grants the lock if it is free. Otherwise puts the ticket in line, or refuses it if its wait is over."""
        acquire = ticket.acquire
        name = acquire.lock_name
        if name in self.room.lines:  # after a failed transaction, the lock may be free: earlier waiters come first
            self._serve(name)
        row = self._execute(FIND, (name,)).get
        ends_ns = 0 if row is None or row[0] is None else self._run.deadline_ns(row)
        if acquire.idempotency_key is not None:
            known = (self._replay(acquire, row) if ends_ns > self._now_ns else None) or self._reused(acquire)
            if known is not None:
                self.answers.append((ticket.reply, [known]))
                return
        if ends_ns > self._now_ns:
            if ticket.until_ns <= self._now_ns:
                self.answers.append((ticket.reply, [self._held(name, row)]))
            else:
                self.room.add(ticket, ends_ns)
            return
        self._answer(ticket, self._grant(acquire, row, (self._now_ns - ticket.start_ns) // MS))

    def cancel(self, ticket: Ticket) -> None:
        """The client of this ticket has gone: takes the ticket out of its line. If it was granted a lease already,
        releases that, unless another request got the same lease."""
        if self.room.remove(ticket) or ticket.share is None:
            return
        share, granted = ticket.share, ticket.share.granted
        if not ticket.gone:  # after a failed transaction, the cancel is repeated: count it once
            ticket.gone = True
            share.receivers -= 1
            share.tickets -= 1
        if share.tickets == 0:
            self.fresh.pop(granted.lease_id, None)
        if share.receivers == 0:
            self._release(Release(granted.lock_name, granted.owner_id, granted.lease_id, granted.fencing_token))
            self.serve_freed()

    def serve_freed(self) -> None:
        """Grants the locks that this request has freed to their first waiters, in the same transaction."""
        freed = self._freed[:]
        self._freed.clear()
        for name in freed:
            self._serve(name)

    def _serve(self, name: str) -> None:
        """Grants a lock that is free to the first ticket in its line. For the tickets behind it, schedules a check at
        the end of the lease."""
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
                # The ticket has left its line, so only this entry makes the writer answer it.
                self.answers.append((ticket.reply, error))
                if isinstance(error, apsw.Error) or not self._connection.in_transaction:
                    raise  # not the fault of this ticket: the whole transaction fails
                continue
            self._answer(ticket, outcome)
            if ticket.share is not None:  # otherwise the store is full, and the loop refuses each twin separately
                for twin in line.twins(ticket):
                    self.room.remove(twin)
                    self._answer_twin(ticket.share, twin)

    def _answer(self, ticket: Ticket, outcome: Granted | StoreFull) -> None:
        if isinstance(outcome, Granted):
            ticket.share = Share(outcome)
            if ticket.acquire.idempotency_key is not None:
                self.fresh[outcome.lease_id] = ticket.share
        self.answers.append((ticket.reply, [outcome]))

    def _answer_twin(self, share: Share, twin: Ticket) -> None:
        share.receivers += 1
        share.tickets += 1
        twin.share = share
        got = share.granted
        waited_ms = (self._now_ns - twin.start_ns) // MS
        again = msgspec.structs.replace(got, waited_ms=waited_ms, replayed=True)
        self.answers.append((twin.reply, [again]))

    def forget_answers(self) -> list[asyncio.Future[Any]]:
        """Drops the answers of a transaction that was rolled back. Returns their futures, which must get an error."""
        for _, outcomes in self.answers:
            for outcome in outcomes if isinstance(outcomes, list) else ():
                if isinstance(outcome, Granted) and not outcome.replayed:
                    self.fresh.pop(outcome.lease_id, None)
        told = [reply for reply, _ in self.answers]
        self.answers = []
        return told

    def close(self) -> None:
        """Answers every waiter with `Held`."""
        for name, line in list(self.room.lines.items()):
            refusal = self._refusal(name)
            for ticket in list(line.tickets):
                self.room.remove(ticket)
                self.answers.append((ticket.reply, [refusal]))

    def _refusal(self, name: str) -> Held:
        row = self._execute(FIND, (name,)).get
        if row is None or row[0] is None:
            return Held(name, "", self._wall_ns // MS, 0)
        return self._held(name, row)

    def _held(self, name: str, row: Row) -> Held:
        # Rounded up, so that no client returns too early.
        left_ms = max(0, -((self._now_ns - self._run.deadline_ns(row)) // MS))
        return Held(name, row[0], self._run.expiry_ms(row), left_ms)

    def check(self) -> None:
        self._execute(CHECK)

    # --- The sweep

    def tidy(self, names: Sequence[str], free_before_ns: int) -> int:
        """Clears the expired leases of these locks, and prunes those that have been free since `free_before_ns`.
        Returns how many leases were cleared."""
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
