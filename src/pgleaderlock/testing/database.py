"""A database in memory: advisory locks, sessions that end when they are silent, and the leader of each role.

It has only what an election and a lock need of PostgreSQL: no SQL, no fences, no operators' requests. A rival, which
stands for another node, may hold roles in it. Everything except `stall` runs on the loop of its elections.
"""

import asyncio
import itertools
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from pgleaderlock._base.aio import first_of, settle
from pgleaderlock._base.clock import Clock
from pgleaderlock._election.ledger import Beat, Bump, Identity, Ledger, Look, Member, Settled
from pgleaderlock._pg.explain import moved_error
from pgleaderlock._pg.session import DedicatedSession, SessionIdentity
from pgleaderlock.errors import ConnectionError, LockError
from pgleaderlock.keys import KeyPair
from pgleaderlock.migrate import LEDGER_VERSION
from pgleaderlock.testing.clock import ManualClock

__all__ = ["FakeDatabase", "FakeLedger", "FakeSession"]

RoleName = tuple[str, str]
"""Namespace and role."""

HISTORY = (1, 1)
WAIT_SLICE_S = 0.5


@dataclass(slots=True)
class Leader:
    """The ledger's row of a role: its last term."""

    epoch: int = 0
    session: "FakeSession | None" = None
    identity: Identity | None = None
    ended: bool = True
    clean: bool = True
    wait_t: float = 0.0


class FakeDatabase:
    """Pass it in place of a DSN: all elections and locks with the same object share it."""

    def __init__(self, *, clock: Clock | None = None, rival: bool = False) -> None:
        """An empty database.

        clock: the clock of all its sessions, locks and elections; None for a `ManualClock`.
        rival: another node leads every role and holds every lock until `win()`, and takes those of silent sessions.
        """
        self.clock: Clock = ManualClock() if clock is None else clock
        self.pids = itertools.count(1)
        self.locks: dict[KeyPair, FakeSession] = {}
        self.leaders: dict[RoleName, Leader] = {}
        self.gone = False
        self._stalled = False
        self._rival: FakeSession | None = None
        self._has_rival = rival
        self._met: set[KeyPair] = set()
        self._claimed: set[KeyPair] = set()
        self._sessions: set[FakeSession] = set()
        self._waiting: set[asyncio.Future[None]] = set()
        self._wakers: list[weakref.WeakMethod[Callable[[str], None]]] = []

    # --- Called by a test

    def stall(self) -> None:
        """Answer no statement until `unstall`. May be called from any thread."""
        self._stalled = True

    def unstall(self) -> None:
        """Answer statements again. Sessions that were silent for longer than their lease have ended."""
        self._stalled = False
        self._end_silent()
        self.changed()

    def answer(self) -> None:
        """Make the database reachable and let it answer."""
        self.gone = False
        self.unstall()

    def go(self) -> None:
        """Make the database unreachable: every session ends, and every lock is free."""
        self.gone = True
        for session in list(self._sessions):
            session.end("the database is gone")
        self.changed()

    def rival_takes(self, keys: KeyPair, role: RoleName | None = None) -> None:
        """The rival takes this lock as soon as it is free; with a role, it begins a new epoch now."""
        self._met.add(keys)
        self._claimed.add(keys)
        self.locks.setdefault(keys, self.rival)
        if role is not None:
            row = self.row(role)
            row.epoch += 1
            row.session, row.identity, row.ended, row.clean = self.rival, _rival_identity(role[0]), False, False

    def rival_leaves(self, keys: KeyPair, role: RoleName | None = None) -> None:
        """If the rival holds this lock, it releases it cleanly."""
        self._met.add(keys)
        self._claimed.discard(keys)
        if self._rival is not None and self.locks.get(keys) is self._rival:
            self._free(keys)
        if role is not None and self._rival is not None and (row := self.row(role)).session is self._rival:
            row.ended = row.clean = True
        self.changed()

    @property
    def rival(self) -> "FakeSession":
        if self._rival is None:
            self._rival = FakeSession(self, lease_s=float("inf"))
        return self._rival

    # --- Called by sessions

    def row(self, role: RoleName) -> Leader:
        return self.leaders.setdefault(role, Leader())

    def meet(self, keys: KeyPair, role: RoleName | None = None) -> None:
        """If there is a rival, it takes each lock or role when a session first asks for it."""
        if self._has_rival and keys not in self._met:
            self.rival_takes(keys, role)

    def take(self, keys: KeyPair, session: "FakeSession") -> bool:
        return self.locks.setdefault(keys, session) is session

    def unlock(self, keys: KeyPair, session: "FakeSession") -> bool:
        held = self.locks.get(keys) is session
        if held:
            self._free(keys)
        return held

    def _free(self, keys: KeyPair) -> None:
        self.locks.pop(keys, None)
        if keys in self._claimed:
            self.locks[keys] = self.rival
        self.changed()

    def opened(self, session: "FakeSession") -> None:
        if self.gone:
            raise ConnectionError("the database is gone")
        self._sessions.add(session)

    def closed(self, session: "FakeSession") -> None:
        self._sessions.discard(session)
        for keys in [keys for keys, holder in self.locks.items() if holder is session]:
            self._free(keys)
        self.changed()

    async def ready(self) -> None:
        """Return when the database answers statements."""
        await asyncio.sleep(0)
        while self._stalled and not self.gone:
            await self.next_change()
        self._end_silent()

    def changed(self) -> None:
        """Wake every task that waits for a change of this database."""
        waiting, self._waiting = self._waiting, set()
        for future in waiting:
            settle(future)

    async def next_change(self) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await future
        finally:
            self._waiting.discard(future)

    def listen(self, wake: Callable[[str], None]) -> None:
        self._wakers.append(weakref.WeakMethod(wake))

    def hint(self, hint: str) -> None:
        for reference in self._wakers:
            if (wake := reference()) is not None:
                wake(hint)

    def _end_silent(self) -> None:
        now = self.clock.now()
        for session in [session for session in self._sessions if now - session.heard_at > session.lease_s]:
            held = {keys for keys, holder in self.locks.items() if holder is session}
            if not held and not session.roles:
                continue  # a lock's lease begins when the lock is held
            led = {role: row for role, row in self.leaders.items() if row.session is session and not row.ended}
            session.end("the server has ended the session, which was silent for longer than its lease")
            if self._has_rival:
                for keys in held:
                    self.rival_takes(keys, next((role for role in led if session.roles.get(role) == keys), None))


class FakeSession:
    """A connection to the fake database, with the methods that a lock and an election use."""

    identified = True

    def __init__(self, database: FakeDatabase, lease_s: float) -> None:
        self.database = database
        self.lease_s = lease_s
        self.pid = next(database.pids)
        self.identity: SessionIdentity | None = SessionIdentity(self.pid, "0")
        self.beat = 0
        self.heard_at = database.clock.now()
        self.roles: dict[RoleName, KeyPair] = {}
        self._ended: ConnectionError | None = None

    @classmethod
    async def open(cls, database: FakeDatabase, lease_s: float) -> "FakeSession":
        await database.ready()
        session = cls(database, lease_s)
        database.opened(session)
        return session

    def end(self, why: str) -> None:
        """The server ends this session, and frees its locks."""
        if self._ended is None:
            self._ended = ConnectionError(why)
            self.database.closed(self)

    async def answered(self) -> None:
        """Wait for the answer to one statement."""
        await self.database.ready()
        if self._ended is not None:
            raise self._ended
        self.heard_at = self.database.clock.now()

    async def take(self, keys: KeyPair) -> bool:
        await self.answered()
        self.database.meet(keys)
        return self.database.take(keys, self)

    async def wait(self, keys: KeyPair, wait_s: float) -> bool:
        await self.answered()
        if self.database.take(keys, self):
            return True
        await first_of(self.database.next_change(), self.database.clock.sleep(min(wait_s, WAIT_SLICE_S)))
        await self.answered()
        return self.database.take(keys, self)

    async def probe(self, keys: KeyPair) -> None:
        await self.answered()
        self.prove(keys)

    def prove(self, keys: KeyPair) -> None:
        """End the session unless it holds the lock: only then does an answer count."""
        if self.database.locks.get(keys) is not self:
            self.end("the lock is not held by this session")
            raise moved_error()

    async def unlock(self, keys: KeyPair) -> None:
        await self.answered()
        if not self.database.unlock(keys, self):
            raise LockError(f"lock {keys[0]}/{keys[1]} was not held by this session")

    async def end_zombie(self, zombie: SessionIdentity) -> bool:
        await self.answered()
        return False

    async def lost(self) -> ConnectionError:
        while self._ended is None:
            await self.database.next_change()
        return self._ended

    async def close(self) -> None:
        self.end("the session was closed")


class FakeLedger(Ledger):
    """The ledger of an election in memory."""

    def __init__(self, session: FakeSession, identity: Identity) -> None:
        # The session has the methods that an engine uses, but is not a DedicatedSession, which has a real connection.
        super().__init__(cast("DedicatedSession", session), identity, "")
        self._fake = session
        self._database = session.database
        self._me = identity

    async def open(
        self, *, gate_s: float, lease_s: float, candidate: bool, draining: bool = False, balance: bool = False
    ) -> None:
        await self._fake.answered()
        self.version = LEDGER_VERSION
        self.session_id, self.history = self._fake.pid, HISTORY

    async def beat(self, settled: Sequence[str], draining: bool | None = None, held: KeyPair | None = None) -> Beat:
        await self._fake.answered()
        if held is not None:
            self._fake.prove(held)
        self._fake.beat += 1
        mine = self._mine()
        for role in settled:
            if role in mine:
                mine[role].wait_t = self._fake.lease_s
        return Beat(len(mine), sum(row.epoch for row in mine.values()), (), frozenset(settled) & mine.keys())

    async def try_and_look(
        self, roles: Mapping[str, KeyPair], wanted: Collection[str], *, look_closely: bool = False
    ) -> list[Look]:
        await self._fake.answered()
        looks = []
        for role, keys in roles.items():
            self._database.meet(keys, self._name(role))
            self._fake.roles[self._name(role)] = keys
            granted = role in wanted and self._database.take(keys, self._fake)
            looks.append(self._look(role, granted=granted))
        return looks

    async def bump(self, roles: Mapping[str, KeyPair], *, wait_ms: int = 0) -> list[Bump]:
        await self._fake.answered()
        self._fake.beat += 1
        return [self._begin(role, keys) for role, keys in roles.items()]

    async def rehearse(self) -> None:
        await self._fake.answered()

    async def end_terms(self, terms: Mapping[str, tuple[int, bool]], reason: str = "released") -> set[str]:
        await self._fake.answered()
        ended = {role for role, (epoch, _) in terms.items() if role in (m := self._mine()) and m[role].epoch == epoch}
        for role in ended:
            row = self._database.row(self._name(role))
            row.ended, row.clean = True, terms[role][1]
        return ended

    async def unlock(self, roles: Mapping[str, KeyPair]) -> set[str]:
        await self._fake.answered()
        unlocked = {role for role, keys in roles.items() if self._database.unlock(keys, self._fake)}
        await self.hint("released")
        return unlocked

    async def hint(self, hint: str) -> None:
        self._database.hint(hint)

    async def owned(self) -> dict[str, int]:
        await self._fake.answered()
        return {role: row.epoch for role, row in self._mine().items()}

    async def evict(self, look: Look) -> bool:
        return False

    async def end_silent_lease(self, look: Look) -> bool:
        return False

    async def settle_requests(self, settled: Sequence[Settled]) -> None:
        """There are no requests here."""

    async def reserve(self, request_ids: Sequence[int]) -> None:
        """There are no requests here."""

    async def note_drain(self, kind: str, details: Mapping[str, str | None]) -> None:
        await self._fake.answered()

    async def members(self) -> list[Member]:
        return []

    async def namesakes(self, own: Sequence[str]) -> list[str]:
        return []

    async def ask_step_down(self, role: str, to_node_id: str) -> bool:
        return False

    async def report_gates(self, reports: Sequence[Mapping[str, object]]) -> dict[str, float | None]:
        return {str(report["role"]): None for report in reports}

    async def declare_roles(self, roles: Sequence[str]) -> bool:
        return True

    async def prune(self, keep_s: float) -> bool:
        return False

    async def close(self) -> None:
        await self._fake.answered()

    # --- Inside

    def _name(self, role: str) -> RoleName:
        return self._me.namespace, role

    def _mine(self) -> dict[str, Leader]:
        return {
            role: row
            for (namespace, role), row in self._database.leaders.items()
            if row.session is self._fake and namespace == self._me.namespace and not row.ended
        }

    def _look(self, role: str, *, granted: bool) -> Look:
        row = self._database.row(self._name(role))
        holder, who = row.session, row.identity
        rival = holder is not None and holder.lease_s == float("inf")
        return Look(
            role=role,
            granted=granted,
            epoch=row.epoch or None,
            session_id=None if holder is None else holder.pid,
            # The rival's beat always changes, so that it never counts as silent.
            beat=None if holder is None else int(self._database.clock.now()) if rival else holder.beat,
            ended=row.ended,
            holder_identity=None if who is None else who.holder_identity,
            node_id=None if who is None else who.node_id,
            lease_s=self._fake.lease_s if rival else None if holder is None else holder.lease_s,
            backend_pid=None if holder is None else holder.pid,
            backend_start=None if holder is None else "0",
        )

    def _begin(self, role: str, keys: KeyPair) -> Bump:
        row, session = self._database.row(self._name(role)), self._fake
        won = self._database.locks.get(keys) is session
        before: dict[str, Any] = {
            "history": HISTORY,
            "prev_session_id": None if row.session is None else row.session.pid,
            "prev_beat": None if row.session is None else row.session.beat,
            "prev_wait_t": row.wait_t,
            "prev_clean": row.clean,
            "prev_instance": None if row.identity is None else row.identity.instance,
        }
        if won:
            row.wait_t = session.lease_s if row.clean else max(session.lease_s, row.wait_t)
            row.epoch += 1
            row.session, row.identity, row.ended, row.clean = session, self._me, False, False
        return Bump(role=role, outcome="won" if won else "not_held", epoch=row.epoch if won else None, **before)


def _rival_identity(namespace: str) -> Identity:
    return Identity(namespace, "rival", "rival", "elsewhere", 1, "rival-elsewhere-1", "")
