"""What an engine does with each answer of the ledger, statement by statement, on a clock that the test moves.

The ledger here is a script: it answers what the test has put in, takes as long as the test says, and writes down what
it was asked. So each moment that safety depends on (before the send, after the reply) is a number of its own.
"""

import asyncio
import functools
import random
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

import pytest

from pgleaderlock import FixedInterval, LeaderElection, LeaderGate, LockState
from pgleaderlock._base.logging import get_logger
from pgleaderlock._election.engine import Engine
from pgleaderlock._election.ledger import HOLD_S, Beat, Bump, Identity, Ledger, Look, Request
from pgleaderlock._election.role import BEAT_GAP_S, NEVER, Board, Role, Sight
from pgleaderlock._election.settings import Hold, Setup
from pgleaderlock._election.winning import BUSY_WAIT_MS, COLLISION_RETRY_S
from pgleaderlock._lock.driver import Driver
from pgleaderlock._lock.fsm import Input, Rules
from pgleaderlock._lock.work import Works
from pgleaderlock.errors import ConnectionError, LockError, NotLeader
from pgleaderlock.keys import KeyPair
from pgleaderlock.observer import Beaten, DrainEnded, Event, Lost
from support.fakes import FakeClock

HERE = (7_000_000_000, 1)
ME, OTHER = "11111111-1111-1111-1111-111111111111", "22222222-2222-2222-2222-222222222222"
GATE_S, LEASE_S, INTERVAL_S = 6.0, 7.0, 2.0
DELAY_S = (0.4, 0.6)
SETTINGS = LeaderElection(
    "host=x",
    "r",
    heartbeat_interval_s=INTERVAL_S,
    late_threshold_s=GATE_S,
    session_lease_s=LEASE_S,
    acquire_delay_s=DELAY_S,
    evict_stale=False,
    retention_s=None,
)._roster.setup
LOST = Bump(
    role="r",
    outcome="won",
    epoch=8,
    history=HERE,
    prev_session_id=40,
    prev_beat=17,
    prev_wait_t=LEASE_S,
    prev_clean=False,
    prev_instance=OTHER,
)
CLEAN = replace(LOST, prev_clean=True)
LOOK = Look(
    role="r",
    granted=False,
    epoch=7,
    session_id=40,
    beat=17,
    ended=False,
    holder_identity=None,
    node_id="other",
    lease_s=LEASE_S,
    backend_pid=1,
    backend_start="1",
)


class Session:
    closed = False

    async def close(self) -> None:
        self.closed = True

    async def wait(self, keys: KeyPair, wait_s: float) -> bool:
        return True


class Script:
    """A ledger that takes `takes_s` for each statement, on the test's clock."""

    history = HERE

    def __init__(self, clock: FakeClock) -> None:
        self.session = Session()
        self.asked: list[tuple[Any, ...]] = []
        self.looks: list[Look] = []
        self.bumps: list[list[Bump]] = []
        self.rehearsed = 0
        self.beats: list[Beat] = []
        self.asked_for: list[KeyPair | None] = []
        """The lock that each heartbeat asked for."""
        self.owns: dict[str, int] = {}
        self.unanswered: str | None = None
        self.silent_at = NEVER
        self.held: set[str] = set()
        """Roles whose rows somebody holds: their terms do not end."""
        self.takes_s = 0.0
        self.meanwhile: Callable[[], None] = lambda: None
        self._clock = clock

    def _answer(self, *asked: Any) -> None:
        self.asked.append(asked)
        self._clock.jump(self.takes_s)
        self.meanwhile()

    def said(self, name: str) -> list[tuple[Any, ...]]:
        return [asked[1:] for asked in self.asked if asked[0] == name]

    async def try_and_look(
        self, roles: Mapping[str, KeyPair], wanted: Collection[str], *, look_closely: bool
    ) -> list[Look]:
        self._answer("try", sorted(roles), sorted(wanted))
        return self.looks

    async def rehearse(self) -> None:
        self.rehearsed += 1

    async def bump(self, roles: Mapping[str, KeyPair], *, wait_ms: int) -> list[Bump]:
        self._answer("bump", sorted(roles), wait_ms)
        return self.bumps.pop(0)

    async def beat(self, settled: Iterable[str], draining: bool | None, held: KeyPair | None) -> Beat:
        self._answer("beat", list(settled), draining)
        self.asked_for.append(held)
        return self.beats.pop(0)

    async def work_timeout_s(self, request_id: int) -> float | None:
        return None

    async def owned(self) -> dict[str, int]:
        self._answer("owned")
        return self.owns

    async def unlock(self, roles: Mapping[str, KeyPair]) -> set[str]:
        self._answer("unlock", sorted(roles))
        return set(roles)

    async def hint(self, hint: str) -> None:
        self._answer("hint", hint)

    async def end_terms(self, terms: Mapping[str, tuple[int, bool]]) -> set[str]:
        self._answer("end_terms", dict(terms))
        return set(terms) - self.held

    async def reserve(self, request_ids: list[int]) -> None:
        self._answer("reserve", request_ids)

    async def settle_requests(self, settled: list[tuple[int, str, str | None]]) -> None:
        if settled:
            self._answer("settle", settled)

    async def note_drain(self, kind: str, details: Mapping[str, str | None]) -> None:
        self._answer("note_drain", kind, dict(details))

    async def evict(self, look: Look) -> bool:
        self._answer("evict", look.session_id)
        return True

    async def end_silent_lease(self, look: Look) -> bool:
        self._answer("end_silent_lease", look.session_id)
        return True


class Node:
    """An engine with the roles r and s, in the middle of its life, its owner, and the script that it talks to."""

    def __init__(self, settings: Setup) -> None:
        self.clock = FakeClock()
        self.ledger = Script(self.clock)
        log = get_logger("pgleaderlock")
        identity = Identity("ns", ME, "me", "host", 1, "me-here", "test")
        self.board = Board(settings, identity, self.clock, random.Random(1), log, self)
        self.errors: list[Exception] = []
        self.attempts = 0
        self.work: dict[str, asyncio.Future[None]] = {}
        self.told: list[tuple[Any, ...]] = []
        self.events: list[Event] = []
        self.announced: list[tuple[bool, int]] = []
        """Whether the gate of r was open, and how many hints had been sent."""
        self.engine = Engine(self._no_ledger, self.board)
        self.board.ledger = cast("Ledger", self.ledger)
        for number, name in enumerate("rs"):
            self.board.roles[name] = self._role(name, number)
        self.r, self.s = self.board.roles.values()
        self.winning = self.engine._winning
        self.releases = self.engine._releases

    def _role(self, name: str, number: int) -> Role:
        driver = Driver(
            rules=Rules(),
            grace_s=None,
            strategy=FixedInterval(1.0),
            clock=self.clock,
            rng=random.Random(1),
            log=get_logger("pgleaderlock"),
            dispatcher=self,
            left_leader=lambda: None,
        )
        driver.feed(Input.START)
        return Role(name, (number, number), driver, LeaderGate(name, clock=self.clock), Works())

    async def _no_ledger(self, _previous: int | None) -> Ledger:
        raise ConnectionError("there is no database here")

    def emit(self, event: str, *args: object) -> None:
        self.told.append((event, *args))

    def notify(self, event: Event) -> None:
        self.events.append(event)

    def failed(self, error: Exception) -> None:
        self.errors.append(error)

    def attempted(self) -> None:
        self.attempts += 1

    def announce(self) -> None:
        self.announced.append((self.r.gate.is_leader, len(self.ledger.said("hint"))))

    async def quiet(self, role: Role) -> None:
        await self.work.setdefault(role.name, asyncio.get_running_loop().create_future())

    def win(self, *bumps: Bump) -> Awaitable[None]:
        """The locks of these are held: begin their terms."""
        for bump in bumps:
            self.board.roles[bump.role].holds_lock = True
        self.ledger.bumps.append(list(bumps))
        return self.winning.begin_terms()

    async def leads(self, *names: str) -> None:
        """At once: the predecessors had released."""
        await self.win(*(replace(CLEAN, role=name) for name in names))
        self.ledger.asked.clear()
        self.told.clear()

    async def beats(
        self, *, roles: int, epochs: int, requests: tuple[Request, ...] = (), settled: Collection[str] = "rs"
    ) -> None:
        """One heartbeat, and what it brings is obeyed."""
        self.ledger.beats.append(Beat(roles, epochs, requests, frozenset(settled)))
        await self.engine._requests.obey(await self.engine._beat())

    def drain(self, role: Role) -> None:
        """As its application does."""
        self.engine.drain([role], everything=False)


@pytest.fixture
async def node() -> Node:
    return Node(SETTINGS)


def refusal(gate: LeaderGate) -> str:
    with pytest.raises(NotLeader) as refused:
        gate.require_leader()
    return refused.value.reason


# --- The bump


async def test_a_term_opens_when_its_predecessor_can_no_longer_act_and_shuts_g_after_the_send(node: Node) -> None:
    sent_at, node.ledger.takes_s = node.clock.now(), 1.0
    await node.win(LOST)
    gate = node.r.gate
    assert (gate.opens_at, gate.deadline) == (sent_at + 1.0 + LEASE_S, sent_at + GATE_S)
    assert (node.r.settled_at, node.r.began_at, node.r.heard_epoch) == (gate.opens_at, sent_at + 1.0, 8)
    assert (node.r.in_term, node.r.settled_told, node.r.release_asked) == (True, False, False)
    assert gate.token is not None
    assert (gate.token.epoch, gate.token.holder_identity, gate.token.namespace) == (8, "me-here", "ns")
    assert node.told[-1] == ("on_acquired",)


async def test_after_a_clean_release_it_opens_with_the_reply_and_shuts_g_after_the_send(node: Node) -> None:
    sent_at, node.ledger.takes_s = node.clock.now(), 1.0
    await node.win(CLEAN)
    assert (node.r.gate.opens_at, node.r.gate.deadline) == (sent_at + 1.0, sent_at + GATE_S)
    assert node.r.gate.require_leader().epoch == 8


async def test_an_instant_takeover_opens_at_once_and_is_settled_no_earlier() -> None:
    node = Node(replace(SETTINGS, takeover="instant"))
    now = node.clock.now()
    await node.win(LOST)
    assert (node.r.gate.opens_at, node.r.settled_at) == (now, now + LEASE_S)


@pytest.mark.parametrize(("takes_s", "leads"), [(GATE_S - 0.1, True), (GATE_S, False), (GATE_S * 2, False)])
async def test_an_answer_to_the_bump_that_comes_g_after_the_send_is_not_led_on(
    node: Node, takes_s: float, leads: bool
) -> None:
    node.ledger.takes_s = takes_s
    if leads:
        await node.win(CLEAN)
    else:
        with pytest.raises(ConnectionError, match="too late"):
            await node.win(CLEAN)
    assert node.r.in_term is leads


async def test_while_a_bump_is_on_its_way_its_roles_are_known_as_tried(node: Node) -> None:
    """If it fails, these attempts have."""
    seen: list[list[Role]] = []
    node.ledger.meanwhile = lambda: seen.append(list(node.board.trying))
    await node.win(CLEAN)
    assert node.ledger.asked[0][0] == "bump"
    assert seen[0] == [node.r]


async def test_who_held_it_before_is_forgotten_and_the_next_look_is_new(node: Node) -> None:
    node.ledger.looks = [replace_look(granted=True)]
    await node.winning.try_locks()
    assert node.r.look is not None
    followed = node.winning._followed
    await node.win(CLEAN)
    assert node.r.look is None
    node.r.holds_lock = False
    await node.winning.try_locks()
    assert node.winning._followed is not followed


def replace_look(**changes: Any) -> Look:
    return LOOK._replace(**changes)


async def test_a_term_that_begins_after_its_drain_was_asked_for_lets_nothing_in_and_is_given_up(node: Node) -> None:
    node.ledger.bumps.append([CLEAN])
    node.r.holds_lock = True
    node.ledger.meanwhile = functools.partial(node.drain, node.r)  # while the bump is on its way
    await node.winning.begin_terms()
    assert refusal(node.r.gate) == "draining"
    assert node.r.release_asked


async def test_what_was_asked_of_an_earlier_term_is_not_asked_of_the_next(node: Node) -> None:
    node.r.release_asked = node.r.settled_told = True
    await node.win(CLEAN)
    assert (node.r.release_asked, node.r.settled_told) == (False, False)


async def test_whoever_begins_terms_hints_it_to_the_others_once_and_only_then(node: Node) -> None:
    await node.win(CLEAN, replace(CLEAN, role="s"))
    assert [asked[0] for asked in node.ledger.asked] == ["bump", "hint"]
    assert node.ledger.said("hint") == [("acquired",)]
    other = Node(SETTINGS)
    await other.win(replace(LOST, outcome="not_held"))
    assert other.ledger.said("hint") == []


async def test_only_what_is_held_without_a_term_is_bumped(node: Node) -> None:
    await node.winning.begin_terms()
    assert node.ledger.asked == [], "nothing is held"
    await node.win(CLEAN)
    assert node.ledger.said("bump") == [(["r"], 0)]
    await node.winning.begin_terms()
    assert node.ledger.said("bump") == [(["r"], 0)], "it has its term"


async def test_a_lock_that_was_won_while_it_is_drained_is_not_bumped_but_soon_given_back(node: Node) -> None:
    node.r.drained_here = True
    node.engine._due.try_at = NEVER
    node.r.holds_lock = True
    await node.win(replace(CLEAN, role="s"))
    assert node.ledger.said("bump") == [(["s"], 0)]
    assert node.engine._due.try_at < NEVER


async def test_a_busy_role_is_queued_for_at_once_and_soon_tried_again(node: Node) -> None:
    node.engine._due.try_at = NEVER
    node.ledger.bumps = [[replace(CLEAN, outcome="busy")], [replace(CLEAN, outcome="busy")]]
    node.r.holds_lock = True
    await node.winning.begin_terms()
    assert node.ledger.said("bump") == [(["r"], 0), (["r"], BUSY_WAIT_MS)]
    assert (node.r.holds_lock, node.r.in_term) == (True, False)
    assert node.engine._due.try_at < NEVER
    node.engine._due.try_at = NEVER
    await node.win(CLEAN)
    assert node.engine._due.try_at == NEVER, "it leads: there is no hurry"


async def test_few_busy_roles_a_tick_are_queued_for_and_not_always_the_same(node: Node) -> None:
    """One that is stuck does not stand in front of one that is only busy."""
    names = [f"role-{number}" for number in range(6)]
    node.board.roles = {name: node._role(name, number) for number, name in enumerate(names)}
    queued: set[str] = set()
    for _ in range(20):
        busy = [replace(CLEAN, role=name, outcome="busy") for name in names]
        node.ledger.bumps = [busy, [], []]
        for role in node.board.roles.values():
            role.holds_lock = True
        await node.winning.begin_terms()
        *_, first, second = node.ledger.said("bump")
        assert (first[1], second[1]) == (BUSY_WAIT_MS, BUSY_WAIT_MS)
        queued |= {*first[0], *second[0]}
    assert queued == set(names)


async def test_a_role_whose_key_is_anothers_is_given_back_and_left_alone_for_a_while(node: Node) -> None:
    node.engine._due.try_at = NEVER
    await node.win(replace(LOST, outcome="collision"))
    assert node.ledger.said("unlock") == [(["r"],)]
    assert (node.r.holds_lock, node.r.in_term) == (False, False)
    assert node.r.not_before == node.clock.now() + COLLISION_RETRY_S
    assert [type(error) for error in node.errors] == [LockError]
    assert node.engine._due.try_at == NEVER


async def test_a_role_whose_lock_is_not_held_after_all_is_competed_for_again(node: Node) -> None:
    await node.win(replace(LOST, outcome="not_held"))
    assert (node.r.holds_lock, node.r.in_term, node.errors) == (False, False, [])


# --- The try


async def test_the_look_counts_from_after_the_reply_and_the_next_try_from_before_the_send(node: Node) -> None:
    node.ledger.looks = [LOOK]
    sent_at, node.ledger.takes_s = node.clock.now(), 0.1
    due_at = await node.winning.try_locks()
    assert node.r.sight == Sight(40, 17, sent_at + 0.1, HERE)
    assert sent_at + DELAY_S[0] <= due_at <= sent_at + DELAY_S[1]
    assert (node.r.tried_at, node.s.tried_at) == (sent_at, sent_at)
    assert (node.r.holds_lock, list(node.board.trying)) == (False, [])


async def test_what_is_granted_is_held_and_is_what_is_being_tried_from_then_on(node: Node) -> None:
    node.ledger.looks = [replace_look(granted=True), replace_look(role="s")]
    seen: list[list[Role]] = []
    node.ledger.meanwhile = lambda: seen.append(list(node.board.trying))
    await node.winning.try_locks()
    assert seen == [[node.r, node.s]]
    assert list(node.board.trying) == [node.r]
    assert (node.r.holds_lock, node.s.holds_lock) == (True, False)
    node.ledger.looks = []
    await node.winning.try_locks()
    assert node.ledger.said("try")[-1] == (["s"], ["s"])


async def test_drained_and_resting_roles_and_those_of_an_observer_are_looked_at_and_not_tried(node: Node) -> None:
    node.r.drained_here = True
    node.s.not_before = node.clock.now() + 1.0
    await node.winning.try_locks()
    assert node.ledger.said("try") == [(["r", "s"], [])]
    observer = Node(replace(SETTINGS, candidate=False))
    await observer.winning.try_locks()
    assert observer.ledger.said("try") == [(["r", "s"], [])]


async def test_with_everything_held_nothing_is_tried(node: Node) -> None:
    node.r.holds_lock = node.s.holds_lock = True
    assert await node.winning.try_locks() == NEVER
    assert node.ledger.asked == []


async def test_a_role_that_is_left_to_another_is_tried_again_when_that_moment_is_over() -> None:
    node = Node(replace(SETTINGS, acquire_delay_s=(100.0, 100.0)))
    node.ledger.takes_s = 0.5
    node.ledger.looks = [LOOK]
    assert await node.winning.try_locks() == node.clock.now() - 0.5 + 100.0
    node.ledger.looks = [replace_look(reserved=True)]
    assert await node.winning.try_locks() == node.clock.now() + HOLD_S
    hasty = Node(SETTINGS)
    hasty.ledger.looks = [replace_look(reserved=True)]
    assert await hasty.winning.try_locks() <= hasty.clock.now() + DELAY_S[1]


async def test_a_new_term_is_announced_before_other_nodes_are_told(node: Node) -> None:
    await node.win(CLEAN)
    assert node.announced == [(True, 0)]
    assert node.ledger.said("hint") == [("acquired",)]


async def test_a_standby_rehearses_the_bump_once_per_session(node: Node) -> None:
    """The server compiles and plans it at the first call, which takes longer than the rest of a takeover."""
    for _ in range(2):
        node.ledger.looks = [LOOK]
        await node.winning.try_locks()
        assert node.ledger.rehearsed == 1
    node.board.ledger = cast("Ledger", another := Script(node.clock))
    another.looks = [replace_look(granted=True)]
    await node.winning.try_locks()
    assert another.rehearsed == 0, "what it has won is bumped at once"


async def test_a_node_that_does_not_compete_rehearses_nothing() -> None:
    node = Node(replace(SETTINGS, candidate=False))
    node.ledger.looks = [LOOK]
    await node.winning.try_locks()
    assert node.ledger.said("try") == [(["r", "s"], [])]
    assert node.ledger.rehearsed == 0


@pytest.mark.parametrize(
    ("held_by", "look", "told"),
    [
        ("lease", {}, 1),
        ("session", {}, 0),
        ("lease", {"granted": True}, 0),
        ("lease", {"ended": True}, 0),
        ("lease", {"role": "s"}, 0),
        ("lease", {"other_key": False}, 0),
    ],
    ids=["led", "by a session, whose bump is refused", "won", "ended", "not tried", "the same key"],
)
async def test_a_lease_that_tries_a_role_says_that_it_is_led_under_another_key(
    held_by: Hold, look: dict[str, Any], told: int
) -> None:
    node = Node(replace(SETTINGS, hold=held_by))
    node.s.rest_until(NEVER)
    node.ledger.looks = [replace_look(**{"other_key": True} | look)]
    await node.winning.try_locks()
    assert [str(error).partition(":")[0] for error in node.errors] == [
        "role 'r' is led by other under another key"
    ] * told


@pytest.mark.parametrize(("other_key", "told"), [(True, 1), (False, 0)])
async def test_a_bump_that_is_refused_says_so_too_if_the_role_is_led_under_another_key(
    node: Node, other_key: bool, told: int
) -> None:
    node.ledger.looks = [replace_look(other_key=other_key)]
    await node.winning.try_locks()
    assert node.errors == []
    await node.win(replace(LOST, outcome="not_held"))
    assert len(node.errors) == told


async def test_that_a_role_is_led_under_another_key_is_said_once_a_minute() -> None:
    node = Node(replace(SETTINGS, hold="lease"))
    node.ledger.looks = [replace_look(other_key=True)]
    for after_s, told in ((0.0, 1), (COLLISION_RETRY_S - 1.0, 1), (1.0, 2)):
        node.clock.jump(after_s)
        await node.winning.try_locks()
        assert len(node.errors) == told


async def test_with_a_wait_at_the_server_the_next_try_is_due_at_once(node: Node) -> None:
    del node.board.roles["s"]
    node.ledger.looks = [LOOK]
    await node.winning.try_locks()
    assert not node.r.holds_lock
    parked = Node(replace(SETTINGS, standby_wait_s=0.5))
    del parked.board.roles["s"]
    parked.ledger.looks = [LOOK]
    assert await parked.winning.try_locks() == 0.0
    assert parked.r.holds_lock


async def test_a_silent_leader_is_ended_where_that_is_asked_for_and_not_before_twice_its_lease() -> None:
    for settings, evicted in ((SETTINGS, []), (replace(SETTINGS, evict_stale=True), [(40,)])):
        node = Node(settings)
        node.ledger.looks = [LOOK]
        await node.winning.try_locks()
        node.clock.jump(2 * LEASE_S)
        await node.winning.try_locks()
        assert node.ledger.said("evict") == []
        node.clock.jump(0.1)
        await node.winning.try_locks()
        assert node.ledger.said("evict") == evicted


async def test_a_silent_session_that_looked_free_is_ended_where_that_is_asked_for() -> None:
    """As it does to a lease, until the bump is refused."""
    for settings, evicted in ((SETTINGS, []), (replace(SETTINGS, evict_stale=True), [(40,)])):
        node = Node(settings)
        node.ledger.looks = [replace_look(granted=True)]
        await node.winning.try_locks()
        await node.win(replace(LOST, outcome="not_held"))
        node.clock.jump(2 * LEASE_S)
        await node.win(replace(LOST, outcome="not_held"))
        assert node.ledger.said("evict") == []
        node.clock.jump(0.1)
        await node.win(replace(LOST, outcome="not_held"))
        assert node.ledger.said("evict") == evicted


async def test_a_lease_that_has_the_role_is_ended_when_it_was_silent_for_its_t_and_not_before(node: Node) -> None:
    node.ledger.looks = [replace_look(hold="lease")]
    await node.winning.try_locks()
    node.clock.jump(LEASE_S - 0.1)
    await node.win(replace(LOST, outcome="not_held"))
    assert node.ledger.said("end_silent_lease") == []
    node.clock.jump(0.2)
    await node.win(replace(LOST, outcome="not_held"))
    assert node.ledger.said("end_silent_lease") == [(40,)]


async def test_who_was_cut_off_counts_the_silence_of_a_lease_anew(node: Node) -> None:
    node.ledger.looks = [replace_look(hold="lease")]
    await node.winning.try_locks()
    node.clock.jump(LEASE_S - 0.1)
    node.ledger = Script(node.clock)
    node.board.ledger = cast("Ledger", node.ledger)
    node.ledger.looks = [replace_look(hold="lease")]
    await node.winning.try_locks()
    node.clock.jump(LEASE_S - 0.1)
    await node.win(replace(LOST, outcome="not_held"))
    assert node.ledger.said("end_silent_lease") == []
    node.clock.jump(0.2)
    await node.win(replace(LOST, outcome="not_held"))
    assert node.ledger.said("end_silent_lease") == [(40,)]


async def test_the_next_try_is_due_when_a_role_has_rested_and_not_at_once_when_it_has(node: Node) -> None:
    node.s.not_before = node.clock.now() + DELAY_S[0] / 2
    assert await node.winning.try_locks() == node.s.not_before
    node.s.not_before = node.clock.now()
    assert await node.winning.try_locks() > node.clock.now()


async def test_a_standby_looks_again_when_a_lease_will_have_been_silent_for_its_t(node: Node) -> None:
    usual_at = await node.winning.try_locks()
    node.ledger.silent_at = usual_at - 0.01
    assert await node.winning.try_locks() == node.ledger.silent_at


async def test_looks_without_an_answer_are_told_after_t_and_once_until_one_is_answered(node: Node) -> None:
    first_at = node.clock.now()
    for _ in range(2):
        node.ledger.takes_s, node.ledger.unanswered = 1.0, "lost"
        while node.clock.now() + 1.0 < first_at + SETTINGS.lease_s:
            await node.winning.try_locks()
            assert node.errors == []
        for _ in range(3):
            await node.winning.try_locks()
        assert [type(error) for error in node.errors] == [ConnectionError]
        assert "lost" in str(node.errors.pop())
        node.ledger.unanswered = None
        await node.winning.try_locks()
        first_at = node.clock.now()


# --- The heartbeat


async def test_a_heartbeat_renews_until_g_after_the_send_however_late_the_answer_comes(node: Node) -> None:
    await node.leads("r", "s")
    node.clock.jump(1.0)
    sent_at, node.ledger.takes_s = node.clock.now(), 2.0
    await node.beats(roles=2, epochs=16)
    assert (node.r.gate.deadline, node.s.gate.deadline) == (sent_at + GATE_S, sent_at + GATE_S)
    assert node.engine.acked_at == sent_at
    assert 0.8 * INTERVAL_S <= node.engine._due.beat_at - sent_at <= 1.2 * INTERVAL_S
    assert node.ledger.said("owned") == []


async def test_heartbeats_ask_for_one_lock_after_the_other(node: Node) -> None:
    await node.beats(roles=0, epochs=0)
    await node.leads("r", "s")
    for _ in range(4):
        await node.beats(roles=2, epochs=16)
    first, *asked_for = node.ledger.asked_for
    assert first is None
    assert set(asked_for[:2]) == {node.r.keys, node.s.keys}
    assert asked_for[:2] == asked_for[2:]


async def test_the_moments_of_the_next_heartbeats_are_spread_around_the_interval(node: Node) -> None:
    waits = []
    for _ in range(200):
        await node.beats(roles=0, epochs=0)
        waits.append(node.engine._due.beat_at - node.clock.now())
    assert 0.8 * INTERVAL_S <= min(waits) < 0.85 * INTERVAL_S
    assert 1.15 * INTERVAL_S < max(waits) <= 1.2 * INTERVAL_S


async def test_a_term_is_told_as_settled_once_and_not_before_its_predecessor_was_waited_out(node: Node) -> None:
    await node.win(LOST)
    for jump_s, settled in ((LEASE_S - 0.1, []), (0.1, ["r"]), (0.1, [])):
        node.clock.jump(jump_s)
        await node.beats(roles=1, epochs=8)
        assert node.ledger.said("beat")[-1] == (settled, None)


async def test_a_term_that_the_ledger_could_not_settle_is_told_again(node: Node) -> None:
    """Somebody held its row."""
    await node.leads("r", "s")
    await node.beats(roles=2, epochs=16, settled="s")
    await node.beats(roles=2, epochs=16)
    await node.beats(roles=2, epochs=16)
    assert [settled for settled, _ in node.ledger.said("beat")] == [["r", "s"], ["r"], []]


async def test_a_term_that_the_ledger_could_not_end_when_it_was_given_up_is_ended_later_and_not_as_clean(
    node: Node,
) -> None:
    await node.leads("s")
    node.ledger.owns = {"r": 5, "s": 8}
    await node.beats(roles=2, epochs=13)
    assert node.ledger.said("end_terms") == [({"r": (5, False)},)]
    assert node.s.in_term
    assert node.ledger.said("unlock") == []


async def test_what_a_heartbeat_has_made_the_node_decide_is_told_with_the_next_one_and_soon(node: Node) -> None:
    await node.beats(roles=0, epochs=0)
    assert node.engine._due.beat_at > node.clock.now() + BEAT_GAP_S
    await node.beats(roles=0, epochs=0, requests=(Request(5, "drain", None),))
    assert node.engine._due.beat_at == node.clock.now() + BEAT_GAP_S
    await node.beats(roles=0, epochs=0, requests=(Request(5, "drain", None),))
    assert [draining for _, draining in node.ledger.said("beat")] == [None, None, True]


async def test_an_observer_hears_how_long_a_heartbeat_took(node: Node) -> None:
    node.ledger.takes_s = 0.5
    await node.beats(roles=0, epochs=0)
    assert node.events == [Beaten(0.5)]


async def test_a_heartbeat_that_fails_has_settled_nothing(node: Node) -> None:
    await node.leads("r")
    with pytest.raises(IndexError):
        await node.engine._beat()
    assert not node.r.settled_told


async def test_the_ledger_is_told_once_what_the_node_has_decided(node: Node) -> None:
    node.engine._requests.drain_node()
    await node.beats(roles=0, epochs=0)
    await node.beats(roles=0, epochs=0)
    assert [draining for _, draining in node.ledger.said("beat")] == [True, None]


async def test_what_a_heartbeat_brings_is_obeyed(node: Node) -> None:
    await node.leads("r")
    await node.beats(roles=1, epochs=8, requests=(Request(5, "step_down", "r"),))
    assert node.r.release_asked


@pytest.mark.parametrize(("roles", "epochs"), [(1, 8), (2, 15), (2, 17), (3, 16)])
async def test_a_role_that_the_ledger_says_is_anothers_is_lost_before_anything_is_renewed(
    node: Node, roles: int, epochs: int
) -> None:
    await node.leads("r", "s")
    until, node.ledger.owns = node.r.gate.deadline, {"r": 9, "s": 8}
    node.engine._due.try_at = NEVER
    node.clock.jump(1.0)
    await node.beats(roles=roles, epochs=epochs)
    assert (refusal(node.r.gate), node.r.in_term, node.r.holds_lock) == ("lost", False, False)
    assert node.s.gate.deadline == until + 1.0, "the other one is renewed"
    assert node.ledger.said("unlock") == [(["r"],)]
    assert node.engine._due.try_at < NEVER
    assert ("on_lost",) in node.told


async def test_when_the_ledger_agrees_after_all_nothing_is_lost(node: Node) -> None:
    await node.leads("r", "s")
    node.ledger.owns = {"r": 8, "s": 8}
    node.engine._due.try_at = NEVER
    await node.beats(roles=1, epochs=8)
    assert (node.r.in_term, node.s.in_term, node.ledger.said("unlock")) == (True, True, [])
    assert node.engine._due.try_at == NEVER


async def test_every_gate_is_shut_before_anybody_is_told_of_one_that_was_superseded(node: Node) -> None:
    await node.leads("r", "s")
    shut: list[bool] = []
    node.emit = lambda event, *args: shut.append(  # type: ignore[method-assign]
        not (node.r.gate.is_leader or node.s.gate.is_leader)
    )
    await node.beats(roles=0, epochs=0)
    assert shut
    assert all(shut)


# --- The end of a session


async def test_a_session_that_is_lost_takes_every_term_with_it_and_is_closed(node: Node) -> None:
    await node.leads("r", "s")
    node.board.trying = [node.r]
    attempts, error = node.attempts, ConnectionError("gone")
    shut: list[bool] = []
    node.emit = lambda event, *args: shut.append(  # type: ignore[method-assign]
        not (node.r.gate.is_leader or node.s.gate.is_leader)
    )
    node.engine.acked_at = node.clock.now()
    await node.engine._lose(error)
    for role in (node.r, node.s):
        assert (refusal(role.gate), role.in_term, role.holds_lock, role.released_clean) == ("lost", False, False, False)
        assert role.driver.last_error is error
    assert shut
    assert all(shut)
    assert node.board.ledger is None
    assert node.engine.acked_at is None
    assert not node.board.trying
    assert node.ledger.session.closed
    assert (node.errors, node.attempts) == ([error], attempts + 1)


async def test_a_role_that_was_lost_is_left_to_others_for_as_long_as_their_next_try_may_take(node: Node) -> None:
    await node.leads("r")
    others_first_until = node.clock.now() + DELAY_S[1]
    await node.engine._lose(ConnectionError("gone"))
    assert node.r.not_before == others_first_until
    node.board.opened(cast("Ledger", node.ledger))
    assert await node.winning.try_locks() <= others_first_until
    node.clock.jump(DELAY_S[1])
    await node.winning.try_locks()
    assert node.ledger.said("try") == [(["r", "s"], ["s"]), (["r", "s"], ["r", "s"])]


async def test_a_role_that_rests_longer_than_that_is_not_tried_earlier_because_it_was_lost(node: Node) -> None:
    await node.leads("r")
    node.r.rest_until(rests_until := node.clock.now() + 100.0)
    await node.engine._lose(ConnectionError("gone"))
    assert node.r.not_before == rests_until


async def test_a_lock_without_a_term_is_lost_with_its_session_too(node: Node) -> None:
    node.s.holds_lock = True
    await node.engine._lose(ConnectionError("gone"))
    assert not node.s.holds_lock


async def test_the_next_connect_waits_longer_after_each_error_up_to_a_bound(node: Node) -> None:
    for number, delay_s in enumerate((0.2, 0.4, 0.8, 1.6, 3.0, 3.0, 3.0, 3.0)):
        await node.engine._lose(ConnectionError("away"))
        waits_s = node.engine._due.connect_at - node.clock.now()
        assert delay_s < waits_s <= 2 * delay_s + 1.0, number


async def test_a_release_that_is_lost_is_over_and_nobody_waits_for_it(node: Node) -> None:
    await node.leads("r")
    node.drain(node.r)
    node.r.requests = [Request(5, "step_down", "r")]
    await node.releases.begin()
    (going_on,) = node.releases._going_on.values()
    told = node.releases.tell_when_free([node.r])
    await asyncio.sleep(0)
    await node.engine._lose(ConnectionError("gone"))
    node.releases.tell()
    assert (told.result(), node.r.released_clean, node.r.requests) == (False, False, [])
    assert node.releases._going_on == {}
    await asyncio.wait([going_on])
    assert going_on.cancelled()
    assert node.r.driver.state is LockState.FOLLOWER


async def test_a_term_that_is_lost_while_its_end_is_told_to_the_ledger_is_told_of_by_its_epoch(node: Node) -> None:
    """Its gate is shut by then, and knows no term any more."""
    await node.leads("r")
    node.drain(node.r)
    await node.releases.begin()
    await asyncio.sleep(0)
    node.work["r"].set_result(None)
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    def lost() -> None:
        raise error

    error, node.ledger.meanwhile = ConnectionError("gone"), lost
    with pytest.raises(ConnectionError):
        await node.releases.finish()
    await node.engine._lose(error)
    assert Lost("r", 8, "lost") in node.events


@pytest.mark.parametrize("stopping", [True, False])
async def test_a_role_that_is_lost_while_it_is_released_ends_as_the_release_would_have(
    node: Node, stopping: bool
) -> None:
    await node.leads("r", "s")
    node.drain(node.r)
    await node.releases.begin()
    assert node.r.driver.state is LockState.RELEASING
    node.board.stopping = stopping
    await node.engine._lose(ConnectionError("gone"))
    assert node.r.driver.state is (LockState.STOPPED if stopping else LockState.FOLLOWER)
    assert node.r.driver.last_input is Input.DB_ERROR
    assert node.s.driver.last_input is Input.HEALTH_FAILED
    assert node.s.driver.stopping is stopping
    assert [event for event in node.events if isinstance(event, DrainEnded)] == [DrainEnded("r", clean=False)]


# --- Giving up on purpose


async def released(node: Node, *, quiet: bool = True) -> dict[str, tuple[int, bool]]:
    """Drain r: its work ends, or is given up on. The terms as they are told to the ledger."""
    node.drain(node.r)
    await node.releases.begin()
    await asyncio.sleep(0)
    assert await node.releases.finish() is None, "its work has not ended"
    if quiet:
        node.work["r"].set_result(None)
    else:
        node.releases.stop_waiting(["r"])
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await node.releases.finish()
    ((terms,),) = node.ledger.said("end_terms")
    return cast("dict[str, tuple[int, bool]]", terms)


async def test_a_term_whose_work_has_ended_and_whose_predecessor_was_waited_out_ends_clean(node: Node) -> None:
    await node.leads("r", "s")
    told = node.releases.tell_when_free([node.r])
    assert await released(node) == {"r": (8, True)}
    node.releases.tell()
    assert told.result() is True
    assert (node.r.released_clean, node.r.holds_lock, refusal(node.r.gate)) == (True, False, "released")
    assert node.r.driver.state is LockState.FOLLOWER
    assert node.r.not_before == node.clock.now() + DELAY_S[1]
    assert [asked[0] for asked in node.ledger.asked] == ["note_drain", "end_terms", "unlock", "note_drain"]
    assert node.ledger.said("unlock") == [(["r"],)]
    assert node.ledger.said("note_drain") == [("drain_began", {"r": None}), ("drain_ended", {"r": "clean"})]
    assert node.s.in_term


async def test_a_term_whose_predecessor_was_not_waited_out_ends_not_clean(node: Node) -> None:
    await node.win(LOST)
    node.clock.jump(LEASE_S - 0.1)
    told = node.releases.tell_when_free([node.r])
    assert await released(node) == {"r": (8, False)}
    node.releases.tell()
    assert (told.result(), node.r.released_clean) == (False, False)


async def test_a_term_that_the_ledger_could_not_end_was_not_released_cleanly(node: Node) -> None:
    await node.leads("r")
    node.ledger.held = {"r"}
    told = node.releases.tell_when_free([node.r])
    assert await released(node) == {"r": (8, True)}
    node.releases.tell()
    assert (told.result(), node.r.released_clean, node.r.holds_lock) == (False, False, False)


async def test_a_term_that_ends_in_the_moment_in_which_it_is_settled_is_clean(node: Node) -> None:
    await node.win(LOST)
    node.clock.jump(LEASE_S)
    assert await released(node) == {"r": (8, True)}


async def test_a_term_whose_work_was_given_up_on_ends_not_clean(node: Node) -> None:
    await node.leads("r")
    assert await released(node, quiet=False) == {"r": (8, False)}


async def test_a_term_whose_work_has_failed_to_end_ends_not_clean(node: Node) -> None:
    await node.leads("r")
    failed = node.work["r"] = asyncio.get_running_loop().create_future()
    node.drain(node.r)
    await node.releases.begin()
    await asyncio.sleep(0)
    failed.set_exception(RuntimeError("of the work"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await node.releases.finish()
    assert node.ledger.said("end_terms") == [({"r": (8, False)},)]


async def test_a_term_with_work_in_flight_ends_not_clean(node: Node) -> None:
    await node.leads("r")
    with node.r.gate.acting():
        assert await released(node) == {"r": (8, False)}


async def test_a_drain_shuts_the_gate_at_once_and_wakes_the_engine_when_the_work_has_ended(node: Node) -> None:
    await node.leads("r")
    node.drain(node.r)
    node.engine._due.woken.clear()
    await node.releases.begin()
    assert (refusal(node.r.gate), node.r.driver.state) == ("draining", LockState.RELEASING)
    assert not node.r.driver.stopping
    await asyncio.sleep(0)
    node.work["r"].set_result(None)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert node.engine._due.woken.is_set()


async def test_a_caller_whose_time_is_over_before_the_release_has_begun_does_not_wait_for_the_work(node: Node) -> None:
    """The engine may be waiting for an answer for longer than that."""
    await node.leads("r", "s")
    node.engine._ask_release("r", 8, force=True)
    node.engine._ask_release("s", 8, force=False)
    await node.releases.begin()
    await asyncio.sleep(0)
    await node.releases.finish()
    assert node.ledger.said("end_terms") == [({"r": (8, False)},)]
    node.releases.stop_waiting(["s"])
    await asyncio.sleep(0)
    await node.releases.finish()
    # And it was that term which they had no time for: the next one's work is waited for.
    await node.win(replace(CLEAN, epoch=9))
    node.engine._ask_release("r", 9, force=False)
    await node.releases.begin()
    await asyncio.sleep(0)
    await node.releases.finish()
    assert node.ledger.said("end_terms")[2:] == []


async def test_a_release_for_the_end_of_the_election_ends_stopped(node: Node) -> None:
    await node.leads("r")
    node.board.stopping = True
    await node.releases.begin()
    assert (node.r.driver.state, node.r.driver.last_input) == (LockState.RELEASING, Input.STOP_REQUESTED)
    await asyncio.sleep(0)
    node.work["r"].set_result(None)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await node.releases.finish()
    assert node.r.driver.state is LockState.STOPPED
    assert node.ledger.said("note_drain") == [], "nobody has asked for a drain"


async def test_the_gate_is_shut_and_the_reservation_made_before_the_term_ends_and_the_lock_is_free(node: Node) -> None:
    await node.leads("r")
    node.r.requests = [Request(5, "step_down", "r", "two", to_is_live=True), Request(6, "step_down", "r")]
    shut: list[bool] = []
    node.ledger.meanwhile = lambda: shut.append(node.r.gate.current_epoch is None)
    await released(node)
    asked = [asked for asked in node.ledger.asked if asked[0] != "note_drain"]
    assert asked == [
        ("reserve", [5]),
        ("end_terms", {"r": (8, True)}),
        ("settle", [(6, "done", "clean")]),
        ("unlock", ["r"]),
    ], "the other one is settled by who leads next, which nobody can before the lock is free"
    assert shut == [False, True, True, True, True, True]
    assert node.r.requests == []


async def test_without_a_wish_for_another_node_nothing_is_reserved(node: Node) -> None:
    await node.leads("r")
    node.r.requests = [Request(6, "step_down", "r")]
    await released(node)
    assert node.ledger.said("reserve") == []


async def test_others_have_their_chance_before_the_releaser_tries_again(node: Node) -> None:
    node.ledger.takes_s = 0.25
    await node.leads("r")
    node.work["r"] = asyncio.get_running_loop().create_future()
    node.work["r"].set_result(None)
    node.r.release_asked = True
    await node.releases.begin()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    before = node.clock.now()
    assert await node.releases.finish() == before + 0.5 + DELAY_S[1]
