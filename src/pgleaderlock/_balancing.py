"""Shares roles between the nodes that balance: which free ones to go for, and which led one to give away.

The plan itself is pure and lives in `balance`; here are the facts it needs. Free roles are left to those below their
share for a bounded moment, so that few have to be moved afterwards. A move is a request to step down in favour of
another node, sent by the giver to itself: durable, visible, and one at a time. A ledger too old for requests has no
balance. Imports `balance`, `_board`, `_roles`, `ledger`, `models`.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from pgleaderlock import balance
from pgleaderlock._board import Board
from pgleaderlock._roles import Role
from pgleaderlock.ledger import HOLD_S, Member
from pgleaderlock.models import LockState

__all__ = ["Balancing"]

NEVER = float("inf")
# While something is to be moved, the next look comes sooner than at the next heartbeat.
BUSY_S = 0.05
# Nothing is moved before the members have been the same for so many heartbeats.
SETTLED_BEATS = 2.0
# A node that did not take what was given up for it does not compete for the same roles: it is left out for so long.
UNWILLING_S = 300.0


@dataclass(frozen=True, slots=True)
class _Seen:
    """A member's last beat, and when this node first saw it, on its own clock."""

    node_id: str
    beat: int
    at: float
    lease_s: float
    beats_on: bool
    """Its beat was seen to change: it is not only a record that somebody left behind."""


class Balancing:
    """Used by the engine's task, on its loop."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self.due_at = NEVER
        self._seen: dict[int, _Seen] = {}
        self._members: frozenset[str] = frozenset()
        self._same_since = 0.0
        self._free_since: dict[str, float] = {}
        self._asked: balance.Move | None = None
        self._unwilling: dict[str, float] = {}
        self._barred: set[balance.Move] = set()
        """What came to nothing: the same role is not offered to the same node again while the members are the same."""

    @property
    def on(self) -> bool:
        ledger = self._board.ledger
        return self._board.settings.balance and ledger is not None

    # --- Free roles

    def allowed(self, wanted_now: Callable[[], list[Role]], now: float) -> list[Role]:
        """Which of them this node may try now: those of its share, and those that others have left for too long."""
        if not self.on:
            return wanted_now()
        free = [role for role in wanted_now() if role.name in self._free_since] if self._free_since else []
        if not free:
            return []
        mine = set(balance.choose(self._held(now), self._me, [role.name for role in free]))
        mine |= {role.name for role in free if role.look is not None and role.look.for_us}
        return [role for role in free if role.name in mine or self._held_back_until(role) <= now]

    def saw(self, wanted_now: Callable[[], list[Role]], now: float) -> float:
        """Take note of what is free; answers when the next try should come."""
        if not self.on:
            return NEVER
        before = self._free_since
        self._free_since = {
            name: before.get(name, now) for name, role in self._board.roles.items() if self._is_free(role, now)
        }
        if not self._free_since:
            return NEVER
        wanted = wanted_now()
        allowed = {role.name for role in self.allowed(lambda: wanted, now)}
        if any(name in allowed for name in self._free_since.keys() - before.keys()):
            return now  # it was only looked at this time
        return min((self._held_back_until(role) for role in wanted if role.name not in allowed), default=NEVER)

    def _is_free(self, role: Role, now: float) -> bool:
        look = role.look
        if role.holds_lock or look is None:
            return False
        if look.ended or look.gone:
            return True
        sight = role.sight
        return sight is not None and now - sight.first_seen > (look.lease_s or 0.0)

    def _held_back_until(self, role: Role) -> float:
        return self._free_since.get(role.name, NEVER) + HOLD_S

    # --- Moves

    async def begin(self) -> None:
        """A new session: who is there?"""
        self._seen = {}
        self._free_since = {}
        self.due_at = NEVER
        if self.on:
            await self._look()

    async def run(self) -> bool:
        """Called when nothing else was sent in this tick; True if a move was asked for."""
        if self._board.clock.now() < self.due_at or not self.on:
            return False
        moving = await self._look()
        now = self._board.clock.now()
        self._judge_last_move(now, moving=moving)
        held = self._held(now)
        on_their_way = self._on_their_way(now)
        due = balance.next_move(held, on_their_way, self._barred)
        if due is not None or moving or on_their_way:
            self.due_at = min(self.due_at, now + BUSY_S)
        if due is None or moving or due.from_node != self._me or not self._is_settled(now):
            return False
        role = self._board.roles[due.role]
        if role.driver.state is not LockState.LEADER or role.requests or role.drained:
            return False
        self._board.log.info("balance_move", role=due.role, to=due.to_node)
        if not await self._board.there().ask_step_down(due.role, due.to_node):
            return False
        self._asked = due
        return True

    async def _look(self) -> bool:
        """Who shares the roles out; answers whether one is on its way."""
        members = await self._board.there().members()
        now = self._board.clock.now()
        self._seen = {member.session_id: self._saw_member(member, now) for member in members}
        here = frozenset(seen.node_id for seen in self._seen.values() if now - seen.at <= seen.lease_s)
        if here != self._members:
            self._members, self._same_since = here, now
            self._unwilling.clear()
            self._barred.clear()
        interval_s = self._board.settings.heartbeat_interval_s
        self.due_at = now + interval_s * self._board.rng.uniform(0.8, 1.2)
        return any(member.moving for member in members)

    def _saw_member(self, member: Member, now: float) -> _Seen:
        before = self._seen.get(member.session_id)
        if before is not None and before.beat == member.beat:
            return before
        return _Seen(member.node_id, member.beat, now, member.lease_s, before is not None)

    def _is_settled(self, now: float) -> bool:
        settled_s = SETTLED_BEATS * self._board.settings.heartbeat_interval_s
        return now - self._same_since >= settled_s and all(seen.beats_on for seen in self._seen.values())

    def _judge_last_move(self, now: float, *, moving: bool) -> None:
        """A role that came to somebody else, or back, was not wanted there: nothing is offered there for a while."""
        move = self._asked
        role = self._board.roles.get(move.role) if move is not None else None
        if move is None or moving or (role is not None and (role.requests or role.name in self._on_their_way(now))):
            return
        self._asked = None
        if role is not None and (role.in_term or (role.look is not None and role.look.node_id != move.to_node)):
            self._board.log.info("balance_move_not_taken", role=move.role, to=move.to_node)
            self._unwilling[move.to_node] = now + UNWILLING_S
            self._barred.add(move)

    # --- Facts

    def _on_their_way(self, now: float) -> set[str]:
        """Roles that have just become free, or whose new leader was not seen yet. What nobody wins is none of them."""
        freed = {name for name, since in self._free_since.items() if now - since < 2 * HOLD_S}
        return freed | {name for name, role in self._board.roles.items() if not role.in_term and role.look is None}

    @property
    def _me(self) -> str:
        return self._board.identity.node_id

    def _held(self, now: float) -> dict[str, Collection[str]]:
        """Every member and what it leads, by what was last seen. A session whose backend is gone is none any more."""
        looks = {name: role.look for name, role in self._board.roles.items() if role.look is not None}
        gone = {look.session_id for look in looks.values() if look.gone}
        held: dict[str, set[str]] = {
            seen.node_id: set()
            for session_id, seen in self._seen.items()
            if session_id not in gone
            and now - seen.at <= seen.lease_s
            and self._unwilling.get(seen.node_id, 0.0) <= now
        }
        for name, role in self._board.roles.items():
            leader = self._me if role.in_term else looks[name].node_id if name in looks else None
            if leader in held and (role.in_term or not self._is_free(role, now)):
                held[leader].add(name)
        return dict(held)
