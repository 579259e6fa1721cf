"""The state of one node: of each role (`Role`), and of its session and all roles together (`Board`).

The rule that says when a successor may act is `opens_at`, and is nowhere else. It is the rule of the model in
`tests/support/gate_model.py`. Each class writes its own fields; the parts of the engine call its methods. No I/O.
"""

import asyncio
import random
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

from pgleaderlock._base.clock import Clock
from pgleaderlock._base.logging import StructuredLogger
from pgleaderlock._election.ledger import Bump, History, Identity, Ledger, Look, Request
from pgleaderlock._election.settings import Setup
from pgleaderlock._lock.driver import Driver
from pgleaderlock._lock.fsm import Input, Rules
from pgleaderlock._lock.work import Works
from pgleaderlock.errors import ConnectionError
from pgleaderlock.gate import LeaderGate
from pgleaderlock.keys import KeyPair
from pgleaderlock.models import LeaderToken, LockState, RetryContext
from pgleaderlock.observer import Event, StateChanged

__all__ = [
    "STANDINGS",
    "Board",
    "LeaderInfo",
    "Owner",
    "Role",
    "Sight",
    "is_failover",
    "make_role",
    "opens_at",
    "standing",
]

NEVER = float("inf")
# The term has begun at the ledger, and has not ended there.
IN_TERM = (LockState.LEADER, LockState.RELEASING)
# Rate limits: a flood of notifications must not cause one try or one heartbeat per message.
TRY_GAP_S = 0.02
BEAT_GAP_S = 0.1


@dataclass(frozen=True, slots=True)
class LeaderInfo:
    """Who leads a role, as far as this node can see it in the ledger."""

    role: str
    epoch: int
    holder_identity: str | None
    node_id: str | None
    unchanged_s: float
    """How long this node has seen no new heartbeat of the holder, by its own clock."""
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
        self.tried_at = 0.0
        """When the last try for the lock was sent."""
        self.not_before = 0.0
        self.key_told_until = 0.0
        """Until then, do not report again that the role is led under another key than this node's."""
        self.began_at = 0.0
        """When the last term began, on this node's clock."""
        self.heard_epoch: int | None = None
        """The epoch of this process's last term of which it got the answer."""
        self.settled_at = 0.0
        """From when on no predecessor of the last term can act, on this node's clock."""
        self.settled_told = False
        """The ledger has recorded that the term is settled."""
        self.release_asked = False
        self.release_forced = False
        """The release does not wait for the work. May be set before the release begins."""
        self.requests: list[Request] = []
        """The requests to step down that the release of this term will answer."""
        self.released_clean = True
        """Whether the last term ended by a clean release."""
        self.drained_here = False
        """The application has drained this role by name."""
        self.node_drained = False
        """The node is drained: by its application, or by a request."""

    # --- Derived

    @property
    def epoch(self) -> int:
        """The epoch of the current term, or of the last one; 0 before the first."""
        return self.heard_epoch or 0

    @property
    def in_term(self) -> bool:
        """According to the ledger, this node leads: the term has begun and has not ended."""
        return self.driver.state in IN_TERM

    @property
    def drained(self) -> bool:
        """This node gives the role up and does not compete for it until it is resumed."""
        return self.drained_here or self.node_drained

    @property
    def given_up(self) -> bool:
        """This node should not lead the role now: it is drained, or its work has failed or was left."""
        return self.drained or self.works.given_up

    @property
    def competes(self) -> bool:
        """Does this node compete for the role while the node is not drained?"""
        return not self.drained_here and not self.works.given_up

    def wanted(self, now: float) -> bool:
        """Does this node compete for the role now?"""
        return not self.given_up and self.not_before <= now

    @property
    def free(self) -> bool:
        """This node has neither the lock nor a term of the role at the server."""
        return not self.in_term and not self.holds_lock

    def unchanged_s(self, now: float) -> float:
        return now - self.sight.first_seen if self.sight is not None else 0.0

    # --- The lock

    def trying(self, at: float) -> None:
        """A try for the lock is about to be sent."""
        self.tried_at = at

    def saw(self, look: Look, at: float, history: History) -> None:
        """Remember who holds the role; `at` is the clock after the reply that showed it."""
        self.look = look
        self.holds_lock = look.granted
        if look.session_id is None or look.beat is None:
            return
        seen = self.sight
        if seen is None or (seen.session_id, seen.beat, seen.history) != (look.session_id, look.beat, history):
            self.sight = Sight(look.session_id, look.beat, at, history)

    def locked(self) -> None:
        self.holds_lock = True

    def unlocked(self) -> None:
        """The lock was released, or its session is gone."""
        self.holds_lock = False

    def tell_key_again(self, at: float) -> None:
        """It was reported that the role is led under another key: do not report that again before this time."""
        self.key_told_until = at

    def rest_until(self, at: float) -> None:
        """Do not compete before this time."""
        self.not_before = at

    # --- The term

    def won(self, token: LeaderToken, *, at: float, settled_at: float, opens_at: float, deadline: float) -> None:
        """A term has begun. Its predecessors can no longer act from `settled_at` on; the gate opens at `opens_at`."""
        self.heard_epoch = token.epoch
        self.began_at = at
        self.settled_at = settled_at
        self.settled_told = False
        given_up = self.given_up
        self.release_asked = given_up  # a caller waits for it, even if the role is resumed before the next tick
        self.release_forced = False
        self.look = None  # it showed the previous holder
        self.gate.open(token, opens_at, deadline, draining=given_up)
        self.driver.feed(Input.ACQUIRE_ATTEMPT)
        self.driver.feed(Input.ACQUIRE_SUCCEEDED)

    def told_settled(self, recorded: bool) -> None:
        """The heartbeat named the term as settled; `recorded` is whether the ledger has recorded that."""
        self.settled_told = recorded

    def releasing(self, *, stopping: bool) -> None:
        """The release has begun; with `stopping` it ends in STOPPED."""
        if stopping:
            self.driver.request_stop()
        self.driver.feed(Input.STOP_REQUESTED if stopping else Input.RELEASE_REQUESTED)

    def released(self, *, clean: bool, rest_until: float = 0.0) -> None:
        """Term and lock were released; other nodes go first until `rest_until`."""
        self.released_clean = clean
        self.requests = []
        self.holds_lock = False
        self.not_before = rest_until
        self.driver.feed(Input.RELEASE_SUCCEEDED)

    def lost(self, error: Exception, *, stopping: bool, rest_until: float = 0.0) -> None:
        """The term is over without a release; other nodes go first until `rest_until`.

        The lock may still be held: see `unlocked`.
        """
        releasing = self.driver.state is LockState.RELEASING
        self.gate.close("lost")
        self.released_clean = False
        self.requests = []
        self.not_before = max(self.not_before, rest_until)
        if stopping:
            self.driver.request_stop()
        self.driver.feed(Input.DB_ERROR if releasing else Input.HEALTH_FAILED, error)

    def stopped(self) -> None:
        """Go from any state to STOPPED, by the table. Lock and term are gone, or about to be."""
        self.holds_lock = False
        self.driver.request_stop()
        if self.driver.state not in (LockState.STOPPED, LockState.RELEASING):
            self.driver.feed(Input.STOP_REQUESTED)
        if self.driver.state is LockState.RELEASING:
            self.driver.feed(Input.RELEASE_SUCCEEDED)

    # --- Giving up

    def ask_release(self, request: Request | None = None) -> None:
        """Give up the current term at the next tick, in answer to `request` if there is one."""
        self.release_asked = True
        if request is not None:
            self.requests.append(request)

    def force_release(self) -> None:
        """When the release of this term begins, do not wait for the work."""
        self.release_forced = True

    def drain(self, *, with_node: bool) -> None:
        """Give the role up, and do not compete until it is resumed: by name, or with the node as a whole."""
        self.drained_here |= not with_node
        self.node_drained |= with_node
        self.release_asked = True  # even if it is resumed before the release has begun

    def resume(self) -> None:
        """Compete for the role again, whether it was drained by name or with the node."""
        self.drained_here = self.node_drained = False

    def node_resumed(self, *, stays: bool) -> None:
        """The drain of the node has ended. A role that `stays` drained is drained by name from now on."""
        self.drained_here |= stays and self.node_drained
        self.node_drained = False


STANDINGS = ("acting", "waiting", "draining", "vetoed", "late", "work_failed", "follows")


def standing(state: LockState, shut_because: str | None, *, work_failed: bool) -> str:
    """This node's state for a role, from what it knows itself; `history` uses the same words for states in the
    ledger."""
    if state not in IN_TERM:
        return "follows"
    if shut_because in ("waiting", "draining", "vetoed"):
        return shut_because
    if shut_because is not None:
        return "late"
    return "work_failed" if work_failed else "acting"


def is_failover(role: Role, bump: Bump, *, own_instance: str, own_node_id: str) -> bool:
    """Did another node lose the previous term? Judged by the last look: good enough to count, but not to decide."""
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

    The predecessor may act until its deadline, which is G after it sent the last acknowledged beat. No node can see
    that beat before it was sent. So a successor acts later than the predecessor if it waits `wait_t` from its own first
    sight of the beat; `wait_t` exceeds any G by more than clocks drift. A successor that has never looked, or has
    looked at another history of this database, counts from the win.
    """
    if bump.prev_clean:
        return won_at
    if bump.prev_instance == own_instance and _is_next(bump.epoch, role.heard_epoch):
        # This process led the previous term, and its gate has been shut since. So it only has to finish the wait of
        # that term, if any is left. The epoch decides, not the session: the same session may have won another term in
        # between whose answer was lost, and this process does not know how long that term had to wait.
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


# --- What the parts of an engine share


class Owner(Protocol):
    """The election, as its engine sees it: everything that the engine, its parts and its roles call above
    themselves."""

    def notify(self, event: Event) -> None:
        """Tell the observers."""

    def emit(self, callback: str, /, *args: object) -> None:
        """Call the callbacks that were registered under this name."""

    async def quiet(self, role: Role) -> None:
        """End the work of a role that is being given up; return once none of it is in flight."""

    def failed(self, error: Exception) -> None:
        """Something went wrong: `last_error` and `on_error`."""

    def attempted(self) -> None:
        """A first connect has succeeded or failed: `start` may return."""

    def announce(self) -> None:
        """Gates or holders may have changed: report the changes to the log and the subscribers."""


class Schedule:
    """When the engine's next connect, beat and try are due, and the event that wakes the engine earlier."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.woken = asyncio.Event()
        self.connect_at = 0.0
        self.beat_at = 0.0
        self.try_at = 0.0
        self.beat_sent_at = 0.0
        self.try_sent_at = 0.0
        self.sent = 0
        """The number of beats and tries sent."""

    def connect_after(self, delay_s: float) -> None:
        self.connect_at = self._clock.now() + delay_s

    def connected(self, beat_at: float) -> None:
        """A new session: its first try is due at once."""
        self.beat_at = beat_at
        self.try_at = 0.0

    def beating(self) -> float:
        """A beat is about to be sent; returns the time."""
        self.sent += 1
        self.beat_sent_at = self._clock.now()
        return self.beat_sent_at

    def beat_next_at(self, at: float) -> None:
        self.beat_at = at

    def trying(self) -> None:
        """A try is about to be sent. The next one is due when `try_by` or `try_soon` says so."""
        self.sent += 1
        self.try_sent_at, self.try_at = self._clock.now(), NEVER

    def try_by(self, at: float) -> None:
        """The next try is due at this time, or earlier if something wakes the engine."""
        self.try_at = min(self.try_at, at)

    def try_soon(self) -> None:
        self.try_by(max(self._clock.now(), self.try_sent_at + TRY_GAP_S))
        self.woken.set()

    def beat_soon(self) -> None:
        """Send the next beat soon: it reads requests, and tells the ledger whether this node is drained."""
        self.beat_at = min(self.beat_at, max(self._clock.now(), self.beat_sent_at + BEAT_GAP_S))
        self.woken.set()


@dataclass(slots=True)
class Board:
    """Settings, roles, session and schedule of one engine. Decides nothing.

    The mapping of roles is replaced as a whole and never changed in place, because a part that iterates over it may
    await meanwhile, or run on another thread.
    """

    settings: Setup
    identity: Identity
    clock: Clock
    rng: random.Random
    log: StructuredLogger
    owner: Owner
    roles: dict[str, Role] = field(default_factory=dict)
    ledger: Ledger | None = None
    trying: Collection[Role] = ()
    """The roles for which a try or a bump is under way. If that statement fails, their attempts have failed."""
    stopping: bool = False
    forced: bool = False
    due: Schedule = field(init=False)

    def __post_init__(self) -> None:
        self.due = Schedule(self.clock)

    def add(self, role: Role) -> None:
        self.roles = {**self.roles, role.name: role}

    def drop(self, role: Role) -> None:
        self.roles = {name: other for name, other in self.roles.items() if other is not role}
        self.trying = [other for other in self.trying if other is not role]

    def opened(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def closed(self) -> Ledger | None:
        """The session is over; returns its ledger, which the caller must close."""
        ledger, self.ledger = self.ledger, None
        return ledger

    def open_ledger(self) -> Ledger:
        """The session's ledger, or `ConnectionError`: the session may have ended while a part awaited something."""
        if self.ledger is None:
            raise ConnectionError("there is no session")
        return self.ledger

    def tries(self, roles: Collection[Role] = ()) -> None:
        """A try or a bump for these roles is about to be sent; no roles: the last one was answered."""
        self.trying = roles

    def stop(self, *, force: bool) -> None:
        self.stopping = True
        self.forced |= force

    def led(self) -> list[Role]:
        """The roles in a term of this node. Called at every tick, with up to thousands of roles."""
        return [role for role in self.roles.values() if role.driver.state in IN_TERM]

    def nothing_held(self) -> bool:
        return not any(role.holds_lock for role in self.roles.values())


# --- How an election makes its roles


class _NoDelay:
    """The retry strategy of a role in an election: no delay, because the tick paces the tries."""

    def next_delay_s(self, ctx: RetryContext) -> float | None:
        return 0.0


class _RoleEmitter:
    """Passes on the events of a role's driver, with the role's name as first argument."""

    def __init__(self, name: str, owner: Owner) -> None:
        self._name = name
        self._owner = owner

    def emit(self, event: str, *args: object) -> None:
        if event in ("on_error", "on_stopped"):
            return  # the election emits these itself: once per error, not once per role
        match event, args:
            case "on_state_change", (LockState() as old, LockState() as new):
                self._owner.notify(StateChanged(self._name, old, new))
        self._owner.emit(event, self._name, *args)


def make_role(
    name: str,
    keys: KeyPair,
    gate: LeaderGate,
    owner: Owner,
    *,
    clock: Clock,
    rng: random.Random,
    log: StructuredLogger,
) -> Role:
    driver = Driver(
        rules=Rules(auto_reacquire=True, grace=False),
        grace_s=None,
        strategy=_NoDelay(),
        clock=clock,
        rng=rng,
        log=log.bind(role=name),
        dispatcher=_RoleEmitter(name, owner),
        left_leader=lambda: None,
    )
    return Role(name, keys, driver, gate, Works())
