"""Shares roles between the nodes that balance, so that their counts differ by at most one.

All nodes look at the same facts (`held`: every live candidate that balances, and what it leads) and come to the same
answer without talking to each other. Two rules do it:

- **A free role goes to a node below its share** (`choose`). The others hold back, so the roles of a dead node are
  spread while they are won, and nothing has to be moved afterwards. Holding back is bounded by time, because a role
  without a leader is worse than an uneven share.
- **A led role moves only if two counts differ by more than one** (`plan`): one role, from the fullest node to the
  emptiest, and none while a role is still on its way. Each such move is one that every plan would have to make, and
  after the last one nothing moves until a node comes or goes.

The functions of the plan are pure: no I/O, no clock, no random choice, no memory. `Balancing` gathers the facts that
they need and asks for the moves: a move is a request to step down in favour of another node, sent by the giver to
itself; durable, visible, and one at a time.
"""

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from pgleaderlock._election.ledger import HOLD_S, Member
from pgleaderlock._election.role import NEVER, Board, Role
from pgleaderlock.models import LockState

__all__ = ["Balancing", "Held", "Move", "choose", "fair_share", "moves_needed", "next_move", "plan"]

# While something is to be moved, the next look comes sooner than at the next heartbeat.
BUSY_S = 0.05
# Nothing is moved before the members have been the same for this many heartbeats.
SETTLED_BEATS = 2.0
# A node that does not take a role given up for it does not compete for the same roles: it is left out for this time.
UNWILLING_S = 300.0

Held = Mapping[str, Collection[str]]
"""Node → the roles it leads. It has every live candidate, including those that lead nothing, and no other node."""


@dataclass(frozen=True, slots=True)
class Move:
    """One role that is to change hands. Only `from_node` acts: it drains the role, and `to_node` wins it."""

    role: str
    from_node: str
    to_node: str


def plan(held: Held, me: str, free: Collection[str] = (), barred: Collection[Move] = ()) -> Move | None:
    """The move that `me` has to make now; None if there is none, or if it is another node's turn."""
    move = next_move(held, free, barred)
    return move if move is not None and move.from_node == me else None


def next_move(held: Held, free: Collection[str] = (), barred: Collection[Move] = ()) -> Move | None:
    """The one move that is due, the same on every node; None once the counts differ by at most one.

    `free`: roles that have just become free. While there is one, nothing moves: a move may be under way, or winning
    that role may even out the counts. Leave out roles that no node wins, or nothing would ever be moved.
    `barred`: moves that the giver has tried without success, because `to_node` does not compete for that role.
    """
    if free or len(held) < 2:
        return None
    from_node = min(held, key=lambda node: (-len(held[node]), node))
    for to_node in sorted(held, key=lambda node: (len(held[node]), node)):
        if len(held[from_node]) - len(held[to_node]) < 2:
            return None
        for role in sorted(held[from_node]):
            move = Move(role, from_node, to_node)
            if move not in barred:
                return move
    return None


def fair_share(held: Held, me: str, free: Collection[str] = ()) -> int:
    """How many roles `me` should lead when all that are led or free have been shared out.

    Where they do not divide evenly, the odd ones belong to the nodes that lead most already (then by name), so that no
    role moves without need.
    """
    return _shares(held if me in held else {**held, me: ()}, len(free))[me]


def choose(held: Held, me: str, free: Collection[str]) -> list[str]:
    """The free roles that `me` should try for: as many as it lacks to its share. The rest is for the other nodes.

    Each node prefers different ones, so that two nodes seldom try for the same role. Empty: hold back.
    """
    room = fair_share(held, me, free) - len(held.get(me, ()))
    if room <= 0:
        return []
    return sorted(free, key=lambda role: _rank(me, role))[:room]


def moves_needed(held: Held, free: Collection[str] = ()) -> int:
    """How many roles have to change hands at least until the counts differ by at most one."""
    shares = _shares(held, len(free))
    return sum(max(0, len(roles) - shares[node]) for node, roles in held.items())


def _shares(held: Held, free: int) -> dict[str, int]:
    if not held:
        return {}
    each, odd = divmod(sum(map(len, held.values())) + free, len(held))
    fullest_first = sorted(held, key=lambda node: (-len(held[node]), node))
    return {node: each + (place < odd) for place, node in enumerate(fullest_first)}


def _rank(node: str, role: str) -> bytes:
    # Not hash(): it differs from process to process, and so would the answer.
    return hashlib.blake2b(f"{node}\0{role}".encode(), digest_size=8).digest()


@dataclass(frozen=True, slots=True)
class _Seen:
    """A member's last beat, and when this node first saw it, on its own clock."""

    node_id: str
    beat: int
    at: float
    lease_s: float
    beats_on: bool
    """This node has seen its beat change, so it is not a record left behind by a dead node."""


class Balancing:
    """Gathers the facts for the plan and asks for the moves. Used by the engine's task, on its loop."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self.due_at = NEVER
        self._seen: dict[int, _Seen] = {}
        self._members: frozenset[str] = frozenset()
        self._same_since = 0.0
        self._free_since: dict[str, float] = {}
        self._asked: Move | None = None
        self._unwilling: dict[str, float] = {}
        self._barred: set[Move] = set()
        """Moves that failed: not asked for again while the members are the same."""

    @property
    def on(self) -> bool:
        return self._board.settings.balance and self._board.ledger is not None

    # --- Free roles

    def allowed(self, wanted: list[Role], now: float) -> list[Role]:
        """The wanted roles that this node may try now: those of its share, and those that stayed free for too long."""
        if not self.on:
            return wanted
        free = [role for role in wanted if role.name in self._free_since]
        if not free:
            return []
        mine = set(choose(self._held(now), self._me, [role.name for role in free]))
        mine |= {role.name for role in free if role.look is not None and role.look.for_us}
        return [role for role in free if role.name in mine or self._held_back_until(role) <= now]

    def saw(self, wanted_now: Callable[[], list[Role]], now: float) -> float:
        """Note which roles are free; returns when the next try is due."""
        if not self.on:
            return NEVER
        before = self._free_since
        self._free_since = {
            name: before.get(name, now) for name, role in self._board.roles.items() if self._is_free(role, now)
        }
        if not self._free_since:
            return NEVER
        wanted = wanted_now()
        allowed = {role.name for role in self.allowed(wanted, now)}
        if any(name in allowed for name in self._free_since.keys() - before.keys()):
            return now  # this tick has only looked at it
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
        """A new session: find the members."""
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
        due = next_move(held, on_their_way, self._barred)
        if due is not None or moving or on_their_way:
            self.due_at = min(self.due_at, now + BUSY_S)
        if due is None or moving or due.from_node != self._me or not self._is_settled(now):
            return False
        role = self._board.roles[due.role]
        if role.driver.state is not LockState.LEADER or role.requests or role.given_up:
            return False
        self._board.log.info("balance_move", role=due.role, to=due.to_node)
        if not await self._board.open_ledger().ask_step_down(due.role, due.to_node):
            return False
        self._asked = due
        return True

    async def _look(self) -> bool:
        """Read the members; returns whether a role is being moved to one of them."""
        members = await self._board.open_ledger().members()
        now = self._board.clock.now()
        self._seen = {member.session_id: self._saw_member(member, now) for member in members}
        here = frozenset(seen.node_id for seen in self._seen.values() if now - seen.at <= seen.lease_s)
        if here != self._members:
            self._members, self._same_since = here, now
            self._unwilling.clear()
            self._barred.clear()
        self.due_at = now + self._board.settings.jittered_interval_s(self._board.rng)
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
        """If the role went to a third node or came back, its target does not compete for it: leave that node out for a
        while."""
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
        """Roles that have just become free, or whose new leader was not seen yet; none of those that no node wins."""
        freed = {name for name, since in self._free_since.items() if now - since < 2 * HOLD_S}
        return freed | {name for name, role in self._board.roles.items() if not role.in_term and role.look is None}

    @property
    def _me(self) -> str:
        return self._board.identity.node_id

    def _held(self, now: float) -> dict[str, Collection[str]]:
        """Every member and the roles it leads, as last seen. A session whose backend is gone is not a member."""
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
