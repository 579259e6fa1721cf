"""Winning takes two statements: one tries the locks and looks at the holders of the rest, a later one begins the terms.

One statement cannot do both: its snapshot is older than the grant of the lock, and may show a stale predecessor.
"""

from collections.abc import Mapping

from pgleaderlock._election.balancing import Balancing
from pgleaderlock._election.ledger import HOLD_S, Bump, Ledger
from pgleaderlock._election.role import NEVER, Board, Role, is_failover, opens_at
from pgleaderlock.errors import ConnectionError, LockError
from pgleaderlock.keys import KeyPair
from pgleaderlock.models import LeaderToken
from pgleaderlock.observer import Acquired, Attempted

__all__ = ["Winning"]

# How long a bump waits for a fence that a writer still holds, and for how many roles per tick it waits.
BUSY_WAIT_MS = 100
BUSY_ROLES_A_TICK = 2
# A role whose key belongs to another role is tried again after this time: the other role may be gone by then.
COLLISION_RETRY_S = 60.0


class Winning:
    """Tries locks and begins terms. Used by the engine's task, on its loop."""

    def __init__(self, board: Board, balancing: Balancing) -> None:
        self._board, self._due, self._owner = board, board.due, board.owner
        self._settings, self._identity = board.settings, board.identity
        self._clock, self._rng = board.clock, board.rng
        self._balancing = balancing
        self._evicted: set[int] = set()
        self._of: Ledger | None = None
        self._since = 0.0
        self._tell_unanswered_at: float | None = None
        """When to warn that looks get no answer; None if the last look was answered."""
        self._followed: Mapping[str, Role] = {}
        self._keys = dict[str, KeyPair]()

    # --- The locks

    def wanted(self) -> list[Role]:
        """The roles that this node competes for now."""
        now = self._clock.now()
        if not self._settings.candidate:
            return []
        return [role for role in self._board.roles.values() if not role.holds_lock and role.wanted(now)]

    async def try_locks(self) -> float:
        """Try all wanted locks in one statement; returns when the next try is due."""
        now = self._clock.now()
        followed = self._follow()
        if not followed:
            return NEVER
        due_at = now + self._rng.uniform(*self._settings.acquire_delay_s)
        due_at = min([due_at, *(role.not_before for role in followed.values() if role.not_before > now)])
        trying = self._balancing.allowed(self.wanted(), now)
        self._board.tries(trying)
        for role in trying:
            role.trying(now)
        ledger = self._board.open_ledger()
        first = self._of is not ledger
        if first:
            self._of, self._since = ledger, now
        tried = {role.name for role in trying}
        looks = await ledger.try_and_look(self._keys, tried, look_closely=self._balancing.on)
        seen_at = self._clock.now()
        leased = self._settings.hold == "lease"  # a lease does not bump a led role, so no bump reports a collision
        self._unanswered(ledger.unanswered, now, seen_at)
        for look in looks:
            role = followed[look.role]
            role.saw(look, seen_at, ledger.history)
            if look.other_key and leased and not look.granted and look.role in tried:
                self._tell_key(role, seen_at)
            if look.reserved:  # left to another node for HOLD_S only, which is shorter than our delay
                due_at = min(due_at, seen_at + HOLD_S)
        for role in trying:
            if not role.holds_lock:
                self._owner.notify(Attempted(role.name, "held"))
        self._board.tries([role for role in trying if role.holds_lock])
        if first and trying and not self._board.trying:
            await ledger.rehearse()
        due_at = min(due_at, ledger.silent_at, self._balancing.saw(self.wanted, seen_at))
        if self._settings.standby_wait_s > 0:
            due_at = await self._wait_at_the_server(ledger, due_at)
        if self._settings.evict_stale:
            await self._evict_silent(list(followed.values()))
        return due_at

    def _unanswered(self, why: str | None, asked_at: float, now: float) -> None:
        """Warn when looks got no answer for T. A lease's heartbeats go on without looks, but it could never win a
        role."""
        if why is None:
            self._tell_unanswered_at = None
        elif self._tell_unanswered_at is None:
            self._tell_unanswered_at = asked_at + self._settings.lease_s
        if self._tell_unanswered_at is not None and now >= self._tell_unanswered_at:
            self._tell_unanswered_at = NEVER
            self._board.log.warning("looks_unanswered", error=why)
            self._owner.failed(ConnectionError(f"nothing was heard of the roles of other nodes for T: {why}"))

    def _follow(self) -> Mapping[str, Role]:
        """The roles whose holders this node looks at. While they stay the same, the ledger returns only what is new."""
        followed = {name: role for name, role in self._board.roles.items() if not role.holds_lock}
        if followed != self._followed:
            self._followed, self._keys = followed, {name: role.keys for name, role in followed.items()}
        return self._followed

    async def _wait_at_the_server(self, ledger: Ledger, due_at: float) -> float:
        """Wait for the lock of the only role for one slice. The next slice begins at once, without a delay here."""
        for role in self.wanted():
            if not self._board.stopping:
                self._board.tries([role])
                role.trying(self._clock.now())
                if await ledger.session.wait(role.keys, self._settings.standby_wait_s):
                    role.locked()
                due_at = 0.0
        return due_at

    async def _evict_silent(self, followed: list[Role]) -> None:
        """End the session of a holder without a heartbeat for 2 T: the server should have dropped it after T."""
        now = self._clock.now()
        for role in followed:
            look, sight = role.look, role.sight
            if role.holds_lock or look is None or sight is None or look.ended or look.lease_s is None:
                continue
            if now - sight.first_seen > 2 * look.lease_s and look.session_id not in self._evicted:
                self._evicted.add(sight.session_id)  # once per session, whatever the number of its roles
                if await self._board.open_ledger().evict(look):
                    self._board.log.warning("silent_leader_evicted", role=role.name, pid=look.backend_pid)
                    self._due.try_soon()

    async def _end_silent_leases(self, refused: list[Role]) -> None:
        """The locks of these roles were free, but leases hold the roles: end each lease that was silent for its T.

        Silence counts from the start of this session at the earliest: before it, this node may have been cut off too.
        """
        ledger, now = self._board.open_ledger(), self._clock.now()
        silent = {}  # once per lease, whatever the number of its roles
        for role in refused:
            look, sight = role.look, role.sight
            if look is None or sight is None or look.ended or look.lease_s is None:
                continue
            if now - max(sight.first_seen, self._since) >= look.lease_s:
                silent[look.session_id] = role, look
        for role, look in silent.values():
            if await ledger.end_silent_lease(look):
                self._board.log.warning("silent_leader_evicted", role=role.name, lease=look.session_id)
                self._due.try_soon()

    # --- The terms

    async def begin_terms(self) -> None:
        """The second statement: begin a term for every lock that is held without one."""
        won = {name: role for name, role in self._board.roles.items() if role.holds_lock and not role.in_term}
        if any(role.given_up for role in won.values()):
            self._due.try_soon()  # a role was given up while it was being won: the next tick releases its lock
            won = {name: role for name, role in won.items() if not role.given_up}
        if not won:
            return
        busy = await self._bump(won, wait_ms=0)
        # Fenced transactions of the predecessor still hold these fences: wait briefly behind them.
        self._rng.shuffle(busy)  # so that roles with a stuck transaction do not always come before the others
        for name in busy[:BUSY_ROLES_A_TICK]:
            await self._bump({name: won[name]}, wait_ms=BUSY_WAIT_MS)
        if any(role.holds_lock and not role.in_term for role in won.values()):
            self._due.try_soon()
        if any(role.in_term for role in won.values()):
            self._owner.announce()  # before the hint, which takes a round trip
            await self._board.open_ledger().hint("acquired")

    async def _bump(self, won: Mapping[str, Role], *, wait_ms: int) -> list[str]:
        self._board.tries(tuple(won.values()))
        sent_at = self._clock.now()
        bumps = await self._board.open_ledger().bump({name: role.keys for name, role in won.items()}, wait_ms=wait_ms)
        won_at = self._clock.now()
        if won_at >= sent_at + self._settings.gate_s:
            raise ConnectionError("the answer to the bump came too late to lead on")
        busy, refused = [], []
        for bump in bumps:
            role = won[bump.role]
            match bump.outcome:
                case "won":
                    self._owner.notify(Attempted(role.name, "won"))
                    self._begin_term(role, bump, sent_at, won_at)
                case "busy":
                    self._owner.notify(Attempted(role.name, "busy"))
                    busy.append(bump.role)
                case "collision":
                    await self._board.open_ledger().unlock({role.name: role.keys})
                    role.unlocked()
                    role.rest_until(self._clock.now() + COLLISION_RETRY_S)
                    self._owner.failed(
                        LockError(
                            f"the key of role {role.name!r} belongs to another role of this database, or the role is "
                            "led under another key: give every node the same one, or rename it"
                        )
                    )
                case _:  # the server says that this session does not hold the lock, or that a lease holds the role
                    role.unlocked()
                    refused.append(role)
        if refused:
            for role in refused:
                if role.look is not None and role.look.other_key:
                    self._tell_key(role, won_at)
            await self._end_silent_leases(refused)
            if self._settings.evict_stale:
                # To a lease, a role held by a session looks free until it tries the lock, so its holder was not
                # followed.
                await self._evict_silent(refused)
        return busy

    def _tell_key(self, role: Role, now: float) -> None:
        """Report a role that is led under another key: a lease holds no lock, so only the record shows it."""
        look = role.look
        if look is None or look.ended or now < role.key_told_until:
            return
        role.tell_key_again(now + COLLISION_RETRY_S)
        leader = look.node_id or "another node"
        self._owner.failed(
            LockError(
                f"role {role.name!r} is led by {leader} under another key: give every node the same one, or rename it"
            )
        )

    def _begin_term(self, role: Role, bump: Bump, sent_at: float, won_at: float) -> None:
        assert bump.epoch is not None
        token = LeaderToken(role.name, bump.epoch, self._identity.holder_identity, self._identity.namespace)
        # An instant takeover opens its gate at once, without waiting its predecessor out: its own successor must wait.
        settled_at = opens_at(role, bump, won_at, own_instance=self._identity.instance)
        from_other = is_failover(role, bump, own_instance=self._identity.instance, own_node_id=self._identity.node_id)
        role.won(
            token,
            at=won_at,
            settled_at=settled_at,
            opens_at=won_at if self._settings.instant else settled_at,
            # With or without a wait, the gate shuts at the latest G after the bump was sent.
            deadline=sent_at + self._settings.gate_s,
        )
        self._followed = {}  # start a new mapping, so that the ledger returns all holders again
        self._owner.notify(Acquired(role.name, bump.epoch, won_at - role.tried_at, from_other))
