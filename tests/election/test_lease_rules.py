"""What a lease makes of the ledger's answers: who is silent, what seems free, what was really ended.

No server, and no time passes but what the test says. The session here answers from a list, and remembers what it was
asked.
"""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from pgleaderlock._election.lease import LeaseLedger
from pgleaderlock._election.ledger import ENDED, RESERVED, Beat, Identity, Look, Request
from pgleaderlock.errors import SchemaError
from pgleaderlock.keys import KeyPair
from support.fakes import FakeClock

ME, OTHER = 40, 50
LEASE_S, GAP_S = 9.0, 4.0
ROLES: dict[str, KeyPair] = {"r": (1, 2), "s": (3, 4)}


class Session:
    """Answers each question with the next of `answers`, and with nothing when there are none left."""

    def __init__(self) -> None:
        self.answers: list[list[Any]] = []
        self.asked: list[tuple[tuple[str, ...], dict[str, Any]]] = []
        self.key, self.asked_again, self.opened = "secret", False, False
        self.doubts: list[str] = []
        self.unanswered: str | None = None

    async def rows(self, name: str, *how: Any, **params: Any) -> list[Any]:
        self.asked.append(((*(word for word in how if isinstance(word, str)), name), params))
        return self.answers.pop(0) if self.answers else []

    rows_if_answered = rows_or_none = rows

    def recorded(self) -> None:
        self.opened = True


class Node:
    """A lease's ledger, as session 40, that looks at r and s."""

    def __init__(
        self, heartbeat_interval_s: float = 1.0, longest_pause_s: float = 2.0, lease_s: float = LEASE_S
    ) -> None:
        self.session, self.clock = Session(), FakeClock()
        setup = SimpleNamespace(
            channel="channel",
            heartbeat_interval_s=heartbeat_interval_s,
            acquire_delay_s=(0.5, longest_pause_s),
            lease_s=lease_s,
        )
        self.ledger = LeaseLedger(
            cast("Any", self.session),
            Identity("ns", "i", "me", "h", 1, "me-here", "test"),
            cast("Any", setup),
            self.clock,
            previous=30,
        )
        self.ledger.session_id = ME

    async def look(self, *rows: tuple[Any, ...], wanted: str = "rs", roles: dict[str, KeyPair] = ROLES) -> list[Look]:
        self.session.answers = [list(rows)]
        return await self.ledger.try_and_look(roles, set(wanted))

    async def free(self, *rows: tuple[Any, ...], wanted: str = "rs") -> set[str]:
        """Which roles it would try to take."""
        return {look.role for look in await self.look(*rows, wanted=wanted) if look.granted}

    async def bumps(self) -> dict[int, int]:
        """Which leases a message that takes a role would end, and at which beat."""
        await self.ledger.bump({"r": (1, 2)})
        _, params = self.session.asked[-1]
        return dict(zip(params["silent"], params["beats"], strict=True))


def row(session_id: int | None = OTHER, marks: int = 0, roles: str = "1:5", **holder: Any) -> tuple[Any, ...]:
    """How a holder stands: a lease at beat 7, unless it is said otherwise."""
    about = {
        "beat": 7,
        "holder_identity": "other-there",
        "node_id": "other",
        "lease_s": LEASE_S,
        "backend_pid": 0,
        "backend_start": "0",
        "hold": "lease",
        "gone": False,
    }
    return (session_id, marks, roles, about | holder)


def unrecorded(session_id: int | None, marks: int = 0, roles: str = "1:5") -> tuple[Any, ...]:
    """Of the holder there is no record."""
    return (session_id, marks, roles, None)


@pytest.fixture
def node() -> Node:
    return Node()


# --- Silence


async def test_a_lease_is_silent_for_its_own_t_after_the_first_look_that_showed_its_beat(node: Node) -> None:
    for after_s in (0.0, 3.0, 3.0, 2.9):
        node.clock.jump(after_s)
        assert await node.free(row()) == set()
        assert await node.bumps() == {}
    node.clock.jump(0.1)
    assert await node.free(row()) == {"r"}
    assert await node.bumps() == {OTHER: 7}


async def test_the_next_look_is_due_when_the_first_of_the_leases_will_have_been_silent_for_its_t(node: Node) -> None:
    seen_at = node.clock.now()
    await node.look(row(61, lease_s=1.0, hold="session"))
    assert node.ledger.silent_at == float("inf")
    rows = [row(), row(60, roles="2:5", lease_s=LEASE_S + 1)]
    await node.look(*rows)
    assert node.ledger.silent_at == seen_at + LEASE_S
    assert await silent(node, *rows) == {OTHER: 7}
    assert node.ledger.silent_at == seen_at + LEASE_S + 1
    await node.look(row(beat=8, gone=True))
    assert node.ledger.silent_at == float("inf")


async def silent(node: Node, *rows: tuple[Any, ...]) -> dict[int, int]:
    """What is silent after three looks that show the same, over T."""
    for after_s in (0.0, GAP_S, GAP_S, LEASE_S - 2 * GAP_S):
        node.clock.jump(after_s)
        await node.look(*rows)
    return await node.bumps()


async def test_of_several_leases_each_has_a_silence_of_its_own(node: Node) -> None:
    rows = [row(), row(60, roles="2:5", beat=9, lease_s=LEASE_S + 1)]
    assert await silent(node, *rows) == {OTHER: 7}
    node.clock.jump(1.0)
    assert await node.free(*rows) == {"r", "s"}
    assert await node.bumps() == {OTHER: 7, 60: 9}


async def test_a_beat_that_was_not_seen_before_ends_the_silence(node: Node) -> None:
    assert await silent(node, row()) == {OTHER: 7}
    assert await node.free(row(beat=8)) == set()
    assert await node.bumps() == {}
    assert await silent(node, row(beat=8)) == {OTHER: 8}


async def test_a_lease_that_was_out_of_sight_has_to_be_silent_anew(node: Node) -> None:
    await silent(node, row())
    await node.look(unrecorded(None, ENDED))
    assert await node.free(row()) == set()
    assert await node.bumps() == {}


@pytest.mark.parametrize(
    ("timing", "gap_s"),
    [
        pytest.param((5.0, 2.0, 9.0), 5.0, id="the time between heartbeats"),
        pytest.param((1.0, 2.0, 9.0), 4.0, id="twice the longest pause between looks"),
        pytest.param((1.0, 1.0, 9.0), 3.0, id="a third of T"),
    ],
)
@pytest.mark.parametrize("too_long_s", [0.0, 0.01])
async def test_only_time_in_which_the_looks_were_answered_counts(
    timing: tuple[float, float, float], gap_s: float, too_long_s: float
) -> None:
    node = Node(*timing)
    await node.look(row(lease_s=gap_s))
    node.clock.jump(gap_s + too_long_s)
    assert await node.free(row(lease_s=gap_s)) == (set() if too_long_s else {"r"})


async def test_a_look_without_an_answer_shows_nothing_and_is_no_look(node: Node) -> None:
    await node.look(row(lease_s=GAP_S + 1))
    node.clock.jump(GAP_S)
    node.session.unanswered = "lost"
    assert await node.look() == []
    assert node.ledger.unanswered == "lost"
    node.clock.jump(1.0)
    assert await node.free(row(lease_s=GAP_S + 1)) == set(), "the silence begins anew"


@pytest.mark.parametrize(
    "whose",
    [
        pytest.param(row(hold="session", backend_pid=7), id="a session: its lock tells"),
        pytest.param(row(gone=True), id="a lease that has ended"),
        pytest.param(row(ME), id="its own"),
        pytest.param(unrecorded(OTHER), id="one without a record"),
    ],
)
async def test_nobody_but_a_silent_lease_is_ended_by_a_take(node: Node, whose: tuple[Any, ...]) -> None:
    assert await silent(node, whose) == {}
    assert await silent(node, whose, row(60, roles="2:5")) == {60: 7}


# --- What seems free


@pytest.mark.parametrize(
    ("held", "free"),
    [
        pytest.param(row(), False, id="by a lease"),
        pytest.param(row(marks=ENDED), True, id="by a lease, which has released it"),
        pytest.param(row(gone=True), True, id="by a lease that has ended"),
        pytest.param(row(ME), True, id="by this one, and it does not know"),
        pytest.param(row(hold="session"), True, id="by a session: the lock tells"),
        pytest.param(unrecorded(OTHER), True, id="by one without a record"),
        pytest.param(unrecorded(None, ENDED), True, id="by nobody, ever"),
        pytest.param(unrecorded(None, ENDED | RESERVED), False, id="by nobody, and left to another node"),
    ],
)
async def test_what_no_live_lease_leads_seems_free_unless_it_is_left_to_another(
    node: Node, held: tuple[Any, ...], free: bool
) -> None:
    assert await node.free(held) == ({"r"} if free else set())
    assert await node.free(held, wanted="s") == set(), "it does not take what it does not want"


async def test_a_look_tells_only_what_is_new_or_free_or_left_to_another(node: Node) -> None:
    led, free = row(), unrecorded(None, ENDED, "2:")
    assert {look.role: look.epoch for look in await node.look(led, free, wanted="")} == {"r": 5, "s": None}
    assert await node.look(led, free, wanted="") == []
    assert [look.role for look in await node.look(led, free)] == ["s"], "free and wanted"
    assert [look.role for look in await node.look(row(beat=8), free, wanted="")] == ["r"], "new"
    left = unrecorded(None, ENDED | RESERVED, "2:")
    for _ in range(2):
        assert [(look.role, look.granted) for look in await node.look(row(beat=8), left)] == [("s", False)]


async def test_a_look_at_other_roles_tells_everything(node: Node) -> None:
    await node.look(row())
    assert await node.look(row()) == []
    (found,) = await node.look(row(), roles={"x": (1, 2)})
    assert found.role == "x"
    assert node.session.asked[-1][1]["roles"] == '{"x"}'


# --- What it asks


async def test_a_take_ends_what_is_silent_and_gets_the_locks_before_it_begins_terms(node: Node) -> None:
    await node.ledger.bump({"r": (1, 2)}, wait_ms=5)
    names, params = node.session.asked[-1]
    assert names == ("lease_end_silent", "lease_lock", "ledger_bump")
    assert (params["session_id"], params["roles"], params["wait_ms"]) == (ME, '{"r"}', 5)


async def test_a_heartbeat_brings_what_was_asked_and_the_ledgers_version(node: Node) -> None:
    asked: dict[str, Any] = {"request_id": 5, "kind": "step_down", "role": "r", "to_node_id": "two", "to_is_live": True}
    answer = {"roles": 2, "epochs": 16, "settled": ["r"], "requests": [asked], "version": 6}
    node.session.answers = [[answer], [{**answer, "requests": None}]]
    assert await node.ledger.beat(["r"]) == Beat(2, 16, (Request(**asked),), frozenset({"r"}))
    assert node.ledger.version == 6
    assert (await node.ledger.beat([])).requests == ()


@pytest.mark.parametrize(
    ("ended", "asked_again", "looks", "found"),
    [
        pytest.param("rs", False, False, "rs", id="all"),
        pytest.param("rs", True, False, "rs", id="all, at the second asking"),
        pytest.param("r", False, False, "r", id="not all: the other is not ours"),
        pytest.param("r", True, True, "rs", id="not all, at the second asking: the first one may have ended it"),
    ],
)
async def test_a_term_that_an_unanswered_message_has_ended_is_told_as_ended(
    node: Node, ended: str, asked_again: bool, looks: bool, found: str
) -> None:
    node.session.asked_again = asked_again
    node.session.answers = [[{"role": role} for role in ended], [{"role": "s"}]]
    assert await node.ledger.end_terms({"r": (5, True), "s": (6, True)}) == set(found)
    assert [names[-1] for names, _ in node.session.asked] == ["ledger_end_term"] + ["lease_ended"] * looks


async def test_there_is_no_lock_to_release_but_the_others_are_woken(node: Node) -> None:
    assert await node.ledger.unlock(ROLES) == {"r", "s"}
    ((names, params),) = node.session.asked
    assert (names, params["hint"]) == (("ledger_hint",), "released")


@pytest.mark.parametrize("kind", ["session", "lease"])
async def test_only_a_session_is_evicted_by_its_backend(node: Node, kind: str) -> None:
    (look,) = await node.look(row(hold=kind), wanted="")
    node.session.asked, node.session.answers = [], [[{"ended": True}]]
    assert await node.ledger.evict(look) is (kind == "session")
    assert bool(node.session.asked) is (kind == "session")
    assert await node.ledger.evict(look) is False, "there was nobody to end"


async def test_a_lease_is_recorded_with_the_one_that_was_lost(node: Node) -> None:
    opened = {"session_id": 41, "system_identifier": 7, "timeline": 2}
    node.session.answers = [[{"version": 5}], [opened]]
    await node.ledger.open(gate_s=1, lease_s=2, candidate=True)
    names, params = node.session.asked[-1]
    assert (names, params["previous"], params["key"]) == (("lease_open",), 30, "secret")
    assert (node.ledger.session_id, node.ledger.history, node.session.opened) == (41, (7, 2), True)


@pytest.mark.parametrize(("version", "says"), [(4, "hold=lease needs 5"), (99, "99")])
async def test_a_ledger_that_does_not_know_leases_records_none(node: Node, version: int, says: str) -> None:
    node.session.answers = [[{"version": version}]]
    with pytest.raises(SchemaError, match=says):
        await node.ledger.open(gate_s=1, lease_s=2, candidate=True)
    assert len(node.session.asked) == 1
    assert not node.session.opened
