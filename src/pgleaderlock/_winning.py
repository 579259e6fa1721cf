"""Winning, in its two statements: one takes the locks and looks at who holds the rest, a later one begins the terms.

Two, because only a later one sees the last predecessor. Imports `_balancing`, `_board`, `_roles`, `ledger`, `keys`,
`_fsm`, `models` and `errors`.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from pgleaderlock._balancing import Balancing
from pgleaderlock._board import Board
from pgleaderlock._fsm import Input
from pgleaderlock._roles import Role, is_failover, opens_at
from pgleaderlock.errors import ConnectionError, LockError
from pgleaderlock.ledger import HOLD_S, Bump, Ledger
from pgleaderlock.models import LeaderToken

if TYPE_CHECKING:
    from pgleaderlock.keys import KeyPair

__all__ = ["Winning"]

NEVER = float("inf")
# A fence that is held by a stuck writer may hold one bump up this long, and all of them together not much longer.
BUSY_WAIT_MS = 100
BUSY_ROLES_A_TICK = 2
# Whose key is somebody else's tries again now and then: the other one may be gone.
COLLISION_RETRY_S = 60.0


class Winning:
    """Used by the engine's task, on its loop."""

    def __init__(
        self, board: Board, balancing: Balancing, hurry: Callable[[], None], failed: Callable[[Exception], None]
    ) -> None:
        self._board = board
        self._settings, self._identity = board.settings, board.identity
        self._clock, self._rng = board.clock, board.rng
        self._balancing = balancing
        self._hurry = hurry
        self._failed = failed
        self._evicted: set[int] = set()
        self._followed: Mapping[str, Role] = {}
        self._keys: Mapping[str, KeyPair] = {}

    # --- The locks

    def wanted(self) -> list[Role]:
        """What this node competes for now."""
        now = self._clock.now()
        if not self._settings.candidate:
            return []
        return [role for role in self._board.roles.values() if not role.holds_lock and role.wanted(now)]

    async def try_locks(self) -> float:
        """One statement for all of them; answers when the next one is due."""
        now = self._clock.now()
        followed = self._follow()
        if not followed:
            return NEVER
        due_at = now + self._rng.uniform(*self._settings.acquire_delay_s)
        self._board.trying = trying = self._balancing.allowed(self.wanted, now)
        for role in trying:
            role.tried_at = now
        ledger = self._board.there()
        looks = await ledger.try_and_look(self._keys, {role.name for role in trying}, look_closely=self._balancing.on)
        seen_at = self._clock.now()
        for look in looks:
            role = followed[look.role]
            role.saw(look, seen_at, ledger.history)
            role.holds_lock = look.granted
            if look.reserved:  # left to another node, for a moment and not for a whole delay of ours
                due_at = min(due_at, seen_at + HOLD_S)
        for role in trying:
            if not role.holds_lock:
                self._board.observers.tell("attempted", role.name, "held")
        self._board.trying = [role for role in trying if role.holds_lock]
        due_at = min(due_at, self._balancing.saw(self.wanted, seen_at))
        if self._settings.standby_wait_s > 0:
            due_at = await self._wait_at_the_server(ledger, due_at)
        if self._settings.evict_stale:
            await self._evict_silent(list(followed.values()))
        return due_at

    def _follow(self) -> Mapping[str, Role]:
        """The roles whose holders are looked at. While they are the same, the ledger answers with what is new only."""
        followed = {name: role for name, role in self._board.roles.items() if not role.holds_lock}
        if followed != self._followed:
            self._followed, self._keys = followed, {name: role.keys for name, role in followed.items()}
        return self._followed

    async def _wait_at_the_server(self, ledger: Ledger, due_at: float) -> float:
        """One slice, for the only role there is. It is parked again at once: the attempt has done its waiting there."""
        for role in self.wanted():
            if not self._board.stopping:
                self._board.trying = [role]
                role.tried_at = self._clock.now()
                role.holds_lock = await ledger.session.wait(role.keys, self._settings.standby_wait_s)
                due_at = 0.0
        return due_at

    async def _evict_silent(self, followed: list[Role]) -> None:
        """A recorded holder that has not beaten for 2 T should have been dropped by its lease: something keeps it."""
        now = self._clock.now()
        for role in followed:
            look, sight = role.look, role.sight
            if role.holds_lock or look is None or sight is None or look.ended or look.lease_s is None:
                continue
            if now - sight.first_seen > 2 * look.lease_s and look.session_id not in self._evicted:
                self._evicted.add(sight.session_id)  # once a session, whatever the number of its roles
                if await self._board.there().evict(look):
                    self._board.log.warning("silent_leader_evicted", role=role.name, pid=look.backend_pid)
                    self._hurry()

    # --- The terms

    async def begin_terms(self) -> None:
        """The second statement of winning, for every lock that is held without a term."""
        won = {name: role for name, role in self._board.roles.items() if role.holds_lock and not role.in_term}
        if any(role.drained for role in won.values()):
            self._hurry()  # drained while it was being won: the next tick gives it back
            won = {name: role for name, role in won.items() if not role.drained}
        if not won:
            return
        busy = await self._bump(won, wait_ms=0)
        # Those in front of which fenced transactions of the predecessor still run: queue up behind them, briefly.
        self._rng.shuffle(busy)  # so that those which are stuck do not stand in front of those which are only busy
        for name in busy[:BUSY_ROLES_A_TICK]:
            await self._bump({name: won[name]}, wait_ms=BUSY_WAIT_MS)
        if any(role.holds_lock and not role.in_term for role in won.values()):
            self._hurry()
        if any(role.in_term for role in won.values()):
            await self._board.there().hint("acquired")

    async def _bump(self, won: Mapping[str, Role], *, wait_ms: int) -> list[str]:
        self._board.trying = tuple(won.values())
        sent_at = self._clock.now()
        bumps = await self._board.there().bump({name: role.keys for name, role in won.items()}, wait_ms=wait_ms)
        won_at = self._clock.now()
        if won_at >= sent_at + self._settings.gate_s:
            raise ConnectionError("the answer to the bump came too late to lead on")
        busy = []
        for bump in bumps:
            role = won[bump.role]
            if bump.outcome in ("won", "busy"):
                self._board.observers.tell("attempted", role.name, bump.outcome)
            match bump.outcome:
                case "won":
                    self._begin_term(role, bump, sent_at, won_at)
                case "busy":
                    busy.append(bump.role)
                case "collision":
                    await self._board.there().unlock({role.name: role.keys})
                    role.holds_lock = False
                    role.not_before = self._clock.now() + COLLISION_RETRY_S
                    self._failed(
                        LockError(
                            f"the key of role {role.name!r} belongs to another role of this database, or the role is "
                            "led under another key: give every node the same one, or rename it"
                        )
                    )
                case _:  # the server says that the lock is not ours after all
                    role.holds_lock = False
        return busy

    def _begin_term(self, role: Role, bump: Bump, sent_at: float, won_at: float) -> None:
        assert bump.epoch is not None
        token = LeaderToken(role.name, bump.epoch, self._identity.holder_identity, self._identity.namespace)
        # An instant takeover opens at once, but it has not waited anybody out: whoever follows it still has to.
        role.settled_at = opens_at(role, bump, won_at, own_instance=self._identity.instance)
        role.heard_epoch = bump.epoch
        opening = won_at if self._settings.instant else role.settled_at
        role.settled_told = False
        role.release_asked = role.drained  # though it may be resumed before the next tick: somebody waits for it
        from_other = is_failover(role, bump, own_instance=self._identity.instance, own_node_id=self._identity.node_id)
        role.look = None  # who held it before is no longer who holds it
        self._followed = {}  # and what is seen of it next is new, whatever was seen before
        role.began_at = won_at
        # Whether there is a wait or not, the gate never outlives G from before the bump was sent.
        role.gate.open(token, opening, sent_at + self._settings.gate_s, draining=role.drained)
        role.driver.feed(Input.ACQUIRE_ATTEMPT)
        role.driver.feed(Input.ACQUIRE_SUCCEEDED)
        self._board.observers.tell("acquired", role.name, bump.epoch, won_at - role.tried_at, from_other)
