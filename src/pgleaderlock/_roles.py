"""One role of an election on this node: its keys, its place in the table, its gate, and what was seen of its holder.

The rule by which a successor may act lives here (`opens_at`), and nowhere else; it is the one of the model in
`tests/gate_model.py`. Imports `_driver`, `_fsm`, `gate`, `ledger`, `_work`, `models`, `keys` and the standard library.
No I/O.
"""

from dataclasses import dataclass

from pgleaderlock._driver import Driver
from pgleaderlock._fsm import Input
from pgleaderlock._work import Works
from pgleaderlock.gate import LeaderGate
from pgleaderlock.keys import KeyPair
from pgleaderlock.ledger import Bump, History, Look, Request
from pgleaderlock.models import LockState

__all__ = ["IN_TERM", "LeaderInfo", "Role", "Sight", "is_failover", "opens_at"]

# The term has begun at the ledger, and has not ended there.
IN_TERM = (LockState.LEADER, LockState.RELEASING)


@dataclass(frozen=True, slots=True)
class LeaderInfo:
    """Who leads a role, as far as this node can see it in the ledger."""

    role: str
    epoch: int
    holder_identity: str | None
    node_id: str | None
    unchanged_s: float
    """How long this node has not seen a new heartbeat of the holder, on its own clock."""
    stale: bool


@dataclass(frozen=True, slots=True)
class Sight:
    """The holder's latest (session, beat), and when this node first saw it, on its own clock, after the reply."""

    session_id: int
    beat: int
    first_seen: float
    history: History


class Role:
    """What this node knows and does about one role. Used by the election's own task only, except for the gate."""

    def __init__(self, name: str, keys: KeyPair, driver: Driver, gate: LeaderGate, works: Works) -> None:
        self.name = name
        self.keys = keys
        self.driver = driver
        self.gate = gate
        self.works = works
        self.sight: Sight | None = None
        self.look: Look | None = None
        self.holds_lock = False
        """The lock is held at the server, whether its term has begun or not."""
        self.settled_told = False
        self.not_before = 0.0
        self.release_asked = False
        self.drained_here = False
        """This role alone was drained, by its application. Set at home, read by the engine."""
        self.node_drained = False
        """The node as a whole was drained: by its application, or by a request."""
        self.released_clean = True
        """Whether the last term ended by a clean release."""
        self.requests: list[Request] = []
        self.tried_at = 0.0
        """When the last try for the lock was sent."""
        self.began_at = 0.0
        """When the last term began, on this node's clock."""
        self.heard_epoch: int | None = None
        """The epoch of the last term of its own that this process has heard of."""
        self.settled_at = 0.0
        """When the predecessors of the last term could no longer act, on this node's clock."""

    @property
    def epoch(self) -> int | None:
        return self.gate.current_epoch

    @property
    def in_term(self) -> bool:
        """Leading by the ledger: the term has begun and has not ended."""
        return self.driver.state in IN_TERM

    @property
    def drained(self) -> bool:
        """Given up, and not competed for until it is resumed."""
        return self.drained_here or self.node_drained

    def wanted(self, now: float) -> bool:
        """Is it competed for?"""
        return not self.drained and self.not_before <= now

    @property
    def free(self) -> bool:
        """Nothing of it is held at the server, by lock or by term."""
        return not self.in_term and not self.holds_lock

    def walk_to_stopped(self) -> None:
        """By the table, from wherever it is. What it held is gone, or about to be."""
        self.driver.request_stop()
        if self.driver.state not in (LockState.STOPPED, LockState.RELEASING):
            self.driver.feed(Input.STOP_REQUESTED)
        if self.driver.state is LockState.RELEASING:
            self.driver.feed(Input.RELEASE_SUCCEEDED)

    def saw(self, look: Look, at: float, history: History) -> None:
        """Remember who holds the role; `at` is the clock after the reply that showed it."""
        self.look = look
        if look.session_id is None or look.beat is None:
            return
        seen = self.sight
        if seen is None or (seen.session_id, seen.beat, seen.history) != (look.session_id, look.beat, history):
            self.sight = Sight(look.session_id, look.beat, at, history)

    def unchanged_s(self, now: float) -> float:
        return now - self.sight.first_seen if self.sight is not None else 0.0


def is_failover(role: Role, bump: Bump, *, own_instance: str, own_node_id: str) -> bool:
    """Was the term before another node's, and lost? By what was last seen: for whoever counts, never for a decision."""
    if bump.prev_clean or bump.prev_instance in (None, own_instance):
        return False
    look = role.look
    if look is None or look.session_id != bump.prev_session_id:
        return True
    return not look.ended and look.node_id != own_node_id


def _is_next(epoch: int | None, heard: int | None) -> bool:
    return epoch is not None and heard is not None and epoch == heard + 1


def opens_at(role: Role, bump: Bump, won_at: float, *, own_instance: str) -> float:
    """When the gate of a new term may open, on this node's clock; `won_at` is the clock after the bump's reply.

    The predecessor may act until its deadline, which it counts from before it sent the last beat that was acknowledged.
    Nobody has seen that beat earlier than it was sent, so whoever waits `wait_t` from its own first sight of it, with
    `wait_t` longer than any G by more than clocks drift, acts later. One who has never looked, or looked at another
    history of this database, counts from the win.
    """
    if bump.prev_clean:
        return won_at
    if bump.prev_instance == own_instance and _is_next(bump.epoch, role.heard_epoch):
        # This very process led the term before, and its gate has been shut since: only what it was itself waiting for
        # remains. The epoch decides, not the session: one session can win a second term whose answer is lost, and of
        # what that term had to wait for this process knows nothing.
        return max(won_at, role.settled_at)
    seen = role.sight
    first_seen = won_at
    if seen is not None and (seen.session_id, seen.beat, seen.history) == (
        bump.prev_session_id,
        bump.prev_beat,
        bump.history,
    ):
        first_seen = seen.first_seen
    return max(won_at, first_seen + (bump.prev_wait_t or 0.0))
