"""Roles that a lease leads, and who may begin a term of them: the lock is free, and they are not.

Quick, for the same reason as `test_ledger_functions.py`.
"""

import contextlib
from collections.abc import Iterator
from unittest.mock import ANY

import pytest

from pgleaderlock.embedded import EmbeddedPostgres
from pgleaderlock.keys import KeyPair, key_pair
from support.elections import fresh_database
from support.ledger_leases import Leases, exclusive, lock, locks, take
from support.ledger_node import LedgerNode
from support.ledger_world import LEASE_S

KEYS = (11, 25)


@pytest.fixture(scope="module")
def ledger(postgres: EmbeddedPostgres) -> Iterator[str]:
    with fresh_database(postgres.dsn, ledger=True) as dsn:
        yield dsn


@pytest.fixture
def world(ledger: str, nothing_left: None) -> Iterator[Leases]:
    with contextlib.ExitStack() as nodes:
        yield Leases(ledger, nodes)


def bumped(node: LedgerNode, roles: dict[str, KeyPair | None]) -> dict[str, str]:
    """What became of each role; no statement warned."""
    warnings: list[str | None] = []
    node.conn.add_notice_handler(lambda notice: warnings.append(notice.message_primary))
    pairs = [node._keys(role, keys) for role, keys in roles.items()]
    rows = node.conn.execute(
        "SELECT role, outcome FROM pgleaderlock.bump(%s, %s, %s, %s, 0, 'pgleaderlock')",
        (node.session_id, list(roles), [pair[0] for pair in pairs], [pair[1] for pair in pairs]),
    ).fetchall()
    assert warnings == []
    assert len({row["role"] for row in rows}) == len(rows), "one answer per role"
    return {row["role"]: row["outcome"] for row in rows}


# --- What a lease leads is not free


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("keys", [KEYS, (-(2**31) + 9, -1)], ids=str)
def test_a_session_with_the_lock_of_what_a_lease_leads_wins_nothing_and_loses_the_lock(
    world: Leases, keys: KeyPair, times: int
) -> None:
    """Older libraries hold a lock once, newer ones twice. What it has won besides keeps its lock."""
    assert take(world.lea, "x", keys)["outcome"] == "won"
    for _ in range(times):
        assert world.one.lock("x", keys)
    assert world.one.lock("new")
    before = locks(world.one)
    found: list[dict[str, str]] = []
    changes = world.changed_by_others(lambda: found.append(bumped(world.one, {"x": keys, "new": None})), world.one)
    assert found == [{"x": "not_held", "new": "won"}]
    assert {key[2] for key in changes} == {"new"}
    assert locks(world.one) == before - exclusive(keys)


def test_a_lease_with_the_lock_of_what_another_leads_wins_nothing(world: Leases) -> None:
    found: list[dict[str, str]] = []

    def act() -> None:
        with world.lou.message():
            lock(world.lou, {role: key_pair(role, world.namespace) for role in ("l", "n")})
            found.append(bumped(world.lou, {"l": None, "n": None}))

    changes = world.changed_by_others(act, world.lou)
    assert found == [{"l": "not_held", "n": "won"}], "what it leads itself it may begin anew"
    assert {key[2] for key in changes} == {"n"}


@pytest.mark.parametrize("why", ["it was released", "the lease has ended", "it is led elsewhere", "a session led it"])
def test_what_no_live_lease_leads_here_is_free(world: Leases, why: str) -> None:
    role = "l"
    if why == "it was released":
        with world.lea.message():
            world.lea.end_term("l", 1, clean=True)
    elif why == "the lease has ended":
        world.end(world.lea)
    elif why == "it is led elsewhere":
        take(world.lex, "theirs")
        role = "theirs"
    else:
        role = "t"
        assert world.two.unlock(role)
    assert world.one.lock(role)
    assert bumped(world.one, {role: None}) == {role: "won"}
    assert locks(world.one) >= exclusive(key_pair(role, world.namespace))


@pytest.mark.parametrize("what", ["half a key", "the other half", "single keys", "the lock of another"])
def test_a_lock_that_only_looks_like_the_one_of_a_lease_is_left_alone(world: Leases, what: str) -> None:
    assert take(world.lea, "x", KEYS)["outcome"] == "won"
    if what == "single keys":
        world.one.ask("SELECT pg_advisory_lock(%s)", (KEYS[0] << 32) | KEYS[1])
    elif what == "the lock of another":
        assert world.two.lock("x", KEYS)
    else:
        assert world.one.lock("other", (KEYS[0], 1) if what == "half a key" else (1, KEYS[1]))
    before = locks(world.one)
    assert bumped(world.one, {"x": KEYS}) == {"x": "not_held"}
    assert locks(world.one) == before


# --- A key that has another name


def test_a_key_under_which_a_live_lease_leads_goes_to_no_other_name(world: Leases) -> None:
    keys = key_pair("l", world.namespace)
    assert world.one.lock("new", keys)
    assert world.one.lock("free")
    found: list[dict[str, str]] = []
    changes = world.changed_by_others(lambda: found.append(bumped(world.one, {"new": keys, "free": None})), world.one)
    assert found == [{"new": "collision", "free": "won"}]
    assert {key[2] for key in changes} == {"free"}


def test_a_lease_that_sleeps_is_ended_before_its_key_goes_to_another_name(world: Leases) -> None:
    world.sleep(world.lea, world.lou)
    keys = key_pair("l", world.namespace)
    assert world.one.lock("new", keys)
    found: list[dict[str, str]] = []
    changes = world.changed_by_others(lambda: found.append(bumped(world.one, {"new": keys})), world.one)
    assert found == [{"new": "won"}]
    sessions = {key: row for key, row in changes.items() if key[0] == "sessions"}
    assert sessions == {("sessions", world.lea.session_id): {"ended_at": ANY}}
    assert changes["leaders", world.namespace, "l"] == {"key1": None, "key2": None}
    assert world.leader("new")["wait_t"] == LEASE_S


def test_the_end_of_a_lease_that_slept_on_a_key_is_told(world: Leases) -> None:
    world.sleep(world.lea)
    keys = key_pair("l", world.namespace)
    assert world.one.lock("new", keys)
    told = world.events(lambda: bumped(world.one, {"new": keys}))
    assert [(event["kind"], event["node_id"]) for event in told] == [("evicted", "lea"), ("acquired", "one")]
    assert told[0]["detail"] == f"silent lease {world.lea.session_id} ended: its key has a new name"


def test_a_lease_that_sleeps_on_a_key_and_whose_row_somebody_holds_keeps_it_for_now(world: Leases) -> None:
    world.sleep(world.lea)
    keys = key_pair("l", world.namespace)
    assert world.one.lock("new", keys)
    with world.held("sessions", world.lea.session_id):
        assert bumped(world.one, {"new": keys}) == {"new": "collision"}
    assert bumped(world.one, {"new": keys}) == {"new": "won"}


def test_a_lease_that_sleeps_is_not_ended_by_who_wants_its_role_under_its_own_name(world: Leases) -> None:
    """That takes the beat that it stopped at."""
    world.sleep(world.lea)
    assert world.one.lock("l")
    found: list[dict[str, str]] = []
    assert world.changed_by_others(lambda: found.append(bumped(world.one, {"l": None})), world.one) == {}
    assert found == [{"l": "not_held"}]


@pytest.mark.parametrize("sleeps", [False, True], ids=["awake", "asleep"])
@pytest.mark.parametrize("half", [0, 1])
def test_half_of_the_key_of_a_lease_is_not_its_key(world: Leases, half: int, sleeps: bool) -> None:
    keys = key_pair("l", world.namespace)
    other = (keys[0], 1) if half == 0 else (1, keys[1])
    if sleeps:
        world.sleep(world.lea)
    assert world.one.lock("new", other)
    found: list[dict[str, str]] = []
    changes = world.changed_by_others(lambda: found.append(bumped(world.one, {"new": other})), world.one)
    assert found == [{"new": "won"}]
    assert {key[2] for key in changes} == {"new"}


@pytest.mark.parametrize("why", ["the role was released", "the lease has ended"])
def test_of_a_lease_that_no_longer_leads_under_a_key_nothing_is_ended(world: Leases, why: str) -> None:
    if why == "the role was released":
        with world.lea.message():
            world.lea.end_term("l", 1, clean=True)
    world.sleep(world.lea)
    if why == "the lease has ended":
        world.end(world.lea)
    keys = key_pair("l", world.namespace)
    assert world.one.lock("new", keys)
    found: list[dict[str, str]] = []
    changes = world.changed_by_others(lambda: found.append(bumped(world.one, {"new": keys})), world.one)
    assert found == [{"new": "won"}]
    assert not [key for key in changes if key[0] == "sessions"]


async def test_a_key_of_a_session_that_is_gone_goes_to_another_name_whatever_leases_there_are(world: Leases) -> None:
    world.sleep(world.lou)
    keys = key_pair("t", world.namespace)
    await world.die(world.two)
    assert world.one.lock("new", keys)
    found: list[dict[str, str]] = []
    changes = world.changed_by_others(lambda: found.append(bumped(world.one, {"new": keys})), world.one)
    assert found == [{"new": "won"}]
    assert not [key for key in changes if key[0] == "sessions"]


def test_a_lease_that_renames_its_own_role_must_have_ended_it(world: Leases) -> None:
    keys = key_pair("l", world.namespace)
    assert take(world.lea, "new", keys)["outcome"] == "collision"
    assert world.one.lock("l")
    assert take(world.lea, "new", keys)["outcome"] == "not_held", "somebody tries it just now"
    world.one.unlock("l")
    with world.lea.message():
        world.lea.end_term("l", 1, clean=True)
    assert take(world.lea, "new", keys)["outcome"] == "won"


def test_a_role_that_a_lease_leads_is_answered_once_though_its_new_key_is_another_leases(world: Leases) -> None:
    assert bumped(world.one, {"l": key_pair("n", world.namespace)}) == {"l": "not_held"}
