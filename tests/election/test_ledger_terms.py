"""The ledger's terms, call by call: what beginning, ending and advancing change, and that they change nothing else.

Every claim is about all rows of all tables (`World.changed`); see `test_ledger_functions.py`.
"""

import asyncio
import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import ANY

import psycopg
import pytest
from psycopg import IsolationLevel
from psycopg.conninfo import make_conninfo

from pgleaderlock.embedded import EmbeddedPostgres
from pgleaderlock.keys import KeyPair, key_pair
from support.elections import fresh_database, until
from support.ledger_node import LedgerNode
from support.ledger_world import LEASE_S, LONG_LEASE_S, World

HISTORY = 2**32
"""Epochs of two histories are at least this far apart."""
STRIDE = 2**20
"""How far an epoch is advanced by hand, within its history."""
SHORT_LEASE_S = 300.0
NOTHING_TOLD: dict[str, Any] = {
    **dict.fromkeys(("gate", "opened_at", "opens_at", "shut_at", "in_flight")),
    "work_failed": False,
    "gaps": [],
}
"""What a term's leader has said about its gate so far."""
PATIENCE_MS = 50
"""How long a bump queues up behind a fence that nobody lifts."""


@pytest.fixture(scope="module")
def ledger(postgres: EmbeddedPostgres) -> Iterator[str]:
    with fresh_database(postgres.dsn, ledger=True) as dsn:
        yield dsn


@pytest.fixture
def world(ledger: str, nothing_left: None) -> Iterator[World]:
    with contextlib.ExitStack() as nodes:
        yield World(ledger, nodes)


def bump(
    node: LedgerNode, roles: Sequence[str], *, keys: dict[str, KeyPair] | None = None, wait_ms: int = 0
) -> dict[str, dict[str, Any]]:
    """Several roles at once: what became of each."""
    pairs = [(keys or {}).get(role) or key_pair(role, node.namespace) for role in roles]
    rows = node.conn.execute(
        "SELECT * FROM pgleaderlock.bump(%s, %s, %s, %s, %s, 'pgleaderlock')",
        (node.session_id, list(roles), [pair[0] for pair in pairs], [pair[1] for pair in pairs], wait_ms),
    ).fetchall()
    assert len({row["role"] for row in rows}) == len(rows), "one answer a role"
    return {row["role"]: row for row in rows}


def outcomes(node: LedgerNode, roles: Sequence[str], **how: Any) -> dict[str, str]:
    return {role: row["outcome"] for role, row in bump(node, roles, **how).items()}


@contextlib.contextmanager
def fenced(
    world: World, role: str, epoch: int = 2, *, level: IsolationLevel = IsolationLevel.READ_COMMITTED
) -> Iterator[None]:
    """Somebody writes under this epoch, and does not end."""
    writer = world.hand()
    writer.isolation_level = level
    with writer.transaction():
        writer.execute("SELECT pgleaderlock.fence(%s, %s, %s)", (role, epoch, world.namespace))
        yield


@contextlib.contextmanager
def on_timeline(node: LedgerNode, timeline: int, system: int = 1) -> Iterator[None]:
    """For this one, and for now, the server writes another history."""
    with node.conn.transaction(force_rollback=True):
        node.conn.execute(
            "CREATE OR REPLACE FUNCTION pgleaderlock.history(OUT system_identifier bigint, OUT timeline integer)"
            f" LANGUAGE sql AS 'SELECT {system}::bigint, {timeline}'".encode()
        )
        yield


def hand_over(world: World, role: str = "r", *, clean: bool | None = None) -> None:
    """`one` lets go of the lock: it has lost the role, unless it is said how it ends its term."""
    if clean is not None:
        world.one.end_term(role, 2, clean=clean)
    world.one.unlock(role)


# --- A term begins


def test_a_bump_begins_a_term_and_touches_nothing_else(world: World) -> None:
    """The predecessor was lost: its term ends with its last sign of life."""
    world.one.tick()
    last = world.rows()["sessions", world.one.session_id]["last_heartbeat"]
    hand_over(world)
    assert world.two.lock("r")
    changes = world.changed(lambda: world.two.bump("r"), beats=world.two)
    leader = world.leader("r")
    assert changes == {
        ("leaders", world.namespace, "r"): {
            "epoch": 3,
            "session_id": world.two.session_id,
            "wait_t": LONG_LEASE_S,
            "acquired_at": leader["acquired_at"],
        },
        ("terms", world.namespace, "r", 2): {"ended_at": last, "reason": "lost"},
        ("terms", world.namespace, "r", 3): {
            "namespace": world.namespace,
            "role": "r",
            "epoch": 3,
            "session_id": world.two.session_id,
            "node_id": "two",
            "holder_identity": "two-by-hand",
            "began_at": ANY,
            "ended_at": None,
            "reason": None,
            **NOTHING_TOLD,
        },
    }
    assert (leader["clean"], leader["ended"]) == (False, False)


def test_a_term_does_not_end_before_it_began_whatever_was_heard_of_its_session(world: World) -> None:
    long_ago = (
        "UPDATE pgleaderlock.sessions SET last_heartbeat = last_heartbeat - interval '1 day' WHERE session_id = %s"
    )
    world.write(long_ago, world.one.session_id)
    hand_over(world)
    world.two.lead("r")
    term = world.rows()["terms", world.namespace, "r", 2]
    assert term["ended_at"] == term["began_at"]


def test_a_bump_tells_its_story_in_order(world: World) -> None:
    hand_over(world)
    common = {"namespace": world.namespace, "role": "r", "detail": None}
    assert world.events(lambda: world.two.lead("r")) == [
        {**common, "kind": "lost", "node_id": "one", "epoch": 2},
        {**common, "kind": "acquired", "node_id": "two", "epoch": 3},
    ]


def test_a_bump_answers_with_the_predecessor_as_it_was(world: World) -> None:
    world.one.tick()
    hand_over(world)
    beats = world.rows()["sessions", world.one.session_id]["beat"]
    assert world.two.lock("r")
    here = world.two.ask("SELECT * FROM pgleaderlock.history()")
    assert world.two.bump("r") == {
        "role": "r",
        "outcome": "won",
        "epoch": 3,
        **here,
        "prev_session_id": world.one.session_id,
        "prev_beat": beats,
        "prev_wait_t": LEASE_S,
        "prev_clean": False,
        "prev_instance": world.one.instance,
    }


def test_a_bump_of_the_leader_itself_counts_as_a_beat_and_answers_with_that_beat(world: World) -> None:
    """Whoever saw this session lead the role before must not take that for a look at the new term."""
    seen = world.rows()["sessions", world.one.session_id]["beat"]
    assert world.one.bump("r")["prev_beat"] == seen + 1
    assert world.rows()["sessions", world.one.session_id]["beat"] == seen + 1


@pytest.mark.parametrize(
    ("clean", "own_s", "wait_s"),
    [
        pytest.param(None, LONG_LEASE_S, LONG_LEASE_S, id="lost, its own is longer"),
        pytest.param(None, SHORT_LEASE_S, LEASE_S, id="lost, its own is shorter"),
        pytest.param(False, SHORT_LEASE_S, LEASE_S, id="not clean"),
        pytest.param(True, SHORT_LEASE_S, SHORT_LEASE_S, id="clean"),
    ],
)
def test_the_next_one_waits_for_this_term_and_for_whom_it_has_not_waited_out(
    world: World, clean: bool | None, own_s: float, wait_s: float
) -> None:
    hand_over(world, clean=clean)
    node = world.node("three", lease_s=own_s)
    assert node.lock("r")
    assert node.bump("r")["prev_clean"] is bool(clean)
    leader = world.leader("r")
    assert (leader["wait_t"], leader["clean"], leader["ended"]) == (wait_s, False, False)


def test_a_term_that_was_released_is_not_told_as_lost(world: World) -> None:
    hand_over(world, clean=True)
    assert world.two.lock("r")
    changes = world.changed(lambda: world.two.bump("r"))
    assert ("terms", world.namespace, "r", 2) not in changes


def test_the_first_epoch_of_a_role_is_one_and_of_a_later_timeline_far_ahead(world: World) -> None:
    assert world.two.lock("new")
    with on_timeline(world.two, 1):
        assert world.two.bump("new")["epoch"] == 1
    with on_timeline(world.two, 3):
        assert world.two.bump("new")["epoch"] == 2 * HISTORY + 1
    assert world.two.bump("new")["epoch"] == 1


def test_in_another_history_the_next_epoch_is_far_ahead_and_the_one_after_it_is_the_next(world: World) -> None:
    with on_timeline(world.one, 5, system=77):
        won = world.one.bump("r")
        assert (won["epoch"], won["system_identifier"], won["timeline"]) == (5 * HISTORY, 77, 5)
        row = world.one.ask(
            "SELECT system_identifier, timeline FROM pgleaderlock.leaders WHERE role = 'r' AND epoch > 2"
        )
        assert row == {"system_identifier": 77, "timeline": 5}
        assert world.one.bump("r")["epoch"] == 5 * HISTORY + 1


NUMBERS = [
    pytest.param(7, (1, 1), (1, 1), 8, id="the same history"),
    pytest.param(7, (1, 1), (1, 2), HISTORY, id="the next timeline"),
    pytest.param(7, (1, 1), (1, 4), 3 * HISTORY, id="three timelines later"),
    pytest.param(7, (1, 4), (1, 4), 8, id="the same later one"),
    pytest.param(7, (1, 4), (1, 2), 2 * HISTORY, id="an earlier timeline"),
    pytest.param(7, (1, 3), (2, 4), 4 * HISTORY, id="another system"),
    pytest.param(7, (1, 1), (2, 1), HISTORY, id="another system on the same timeline"),
    pytest.param(2 * HISTORY + 7, (1, 2), (1, 3), 3 * HISTORY, id="far ahead already"),
    pytest.param(20 * HISTORY + 7, (1, 2), (2, 3), 23 * HISTORY, id="far ahead, another system"),
]


@pytest.mark.parametrize(("last", "then", "here", "following"), NUMBERS)
def test_the_number_after_the_last_one_leaves_every_other_history_behind(
    world: World, last: int, then: tuple[int, int], here: tuple[int, int], following: int
) -> None:
    call = "SELECT pgleaderlock.next_number(%s, %s, %s, %s, %s) AS number"
    assert world.one.ask(call, last, *then, *here) == {"number": following}


def test_a_bump_above_read_committed_is_refused_and_changes_nothing(world: World) -> None:
    def above() -> None:
        world.one.conn.execute("SET default_transaction_isolation = 'repeatable read'")
        with pytest.raises(psycopg.Error, match="READ COMMITTED"):
            world.one.bump("r")

    assert world.changed(above) == {}


def test_a_bump_sends_no_hint_because_that_could_fail_at_its_commit(world: World) -> None:
    assert world.notices(lambda: world.one.bump("r")) == []


async def test_a_bump_reads_what_the_predecessor_commits_while_the_bump_waits_for_the_fence(world: World) -> None:
    """By the row, and not by a snapshot that is older than the wait."""
    world.one.unlock("r")
    assert world.two.lock("r")
    with fenced(world, "r"):
        won = asyncio.ensure_future(asyncio.to_thread(world.two.bump, "r", None, 10_000))
        await until(lambda: world.waits(world.two, for_="advisory"))
        world.one.end_term("r", 2, clean=True)
    assert (await won)["prev_clean"] is True
    assert world.leader("r")["epoch"] == 3


# --- Who may begin one


def test_of_several_roles_only_those_are_won_whose_locks_are_held(world: World) -> None:
    hand_over(world)
    assert world.two.lock("r")
    found: dict[str, str] = {}
    changes = world.changed(lambda: found.update(outcomes(world.two, ["r", "s", "t", "unknown"])), beats=world.two)
    assert found == {"r": "won", "s": "not_held", "t": "won", "unknown": "not_held"}
    assert set(changes) == {
        *(("leaders", world.namespace, role) for role in "rt"),
        *(("terms", world.namespace, role, epoch) for role in "rt" for epoch in (2, 3)),
    }


@pytest.mark.parametrize("wait_ms", [0, PATIENCE_MS])
def test_several_won_at_once_each_have_their_own_predecessor(world: World, wait_ms: int) -> None:
    world.one.tick()
    last = world.rows()["sessions", world.one.session_id]["last_heartbeat"]
    hand_over(world)
    assert world.two.lock("r")
    won = bump(world.two, ["r", "t"], wait_ms=wait_ms)
    assert {role: row["prev_session_id"] for role, row in won.items()} == {
        "r": world.one.session_id,
        "t": world.two.session_id,
    }
    assert {role: world.leader(role)["epoch"] for role in "rt"} == {"r": 3, "t": 3}
    ended_at = {role: world.rows()["terms", world.namespace, role, 2]["ended_at"] for role in "rt"}
    assert ended_at["r"] == last, "each by the last sign of life of its own leader"
    assert ended_at["t"] > last


def test_a_lock_in_the_space_of_single_keys_is_not_the_roles(world: World) -> None:
    node = world.node("three")
    key1, key2 = key_pair("new", world.namespace)
    node.ask("SELECT pg_advisory_lock((%s::bigint << 32) | (%s::bigint & 4294967295))", key1, key2)
    assert outcomes(node, ["new"]) == {"new": "not_held"}


@pytest.mark.parametrize("keys", [(-5, -7), (-5, 7), (5, -7)], ids=str)
def test_keys_may_be_negative(world: World, keys: KeyPair) -> None:
    assert world.two.lead("new", keys) == 1


@pytest.mark.parametrize("shared", [0, 1], ids=["the first half", "the second half"])
def test_half_a_key_is_no_key(world: World, shared: int) -> None:
    """Neither for the lock that is held, nor for the name that has it."""
    key = list(key_pair("new", world.namespace))
    key[1 - shared] = (key[1 - shared] + 1) // 2
    half = (key[0], key[1])
    node = world.node("three")
    assert node.lock("new")
    assert outcomes(node, ["half"], keys={"half": half}) == {"half": "not_held"}
    assert node.lock("half", half)
    assert outcomes(node, ["new"]) == {"new": "won"}
    assert outcomes(node, ["half"], keys={"half": half}) == {"half": "won"}
    assert node.lock("third", (half[1], half[0]))
    assert outcomes(node, ["absent"], keys={"absent": (key[1 - shared], 3)}) == {"absent": "not_held"}
    assert outcomes(node, ["absent"], keys={"absent": (key_pair("r", world.namespace)[0], 3)}) == {"absent": "not_held"}
    assert outcomes(node, ["absent"], keys={"absent": (3, key_pair("r", world.namespace)[1])}) == {"absent": "not_held"}


async def test_a_key_of_another_name_whose_last_leader_lives_is_a_collision_and_takes_nothing_from_it(
    world: World,
) -> None:
    await world.die(world.node("bystander"))
    hand_over(world)
    assert world.two.lock("r")
    mine = {"mine": key_pair("r", world.namespace)}
    found: list[dict[str, str]] = []
    changes = world.changed(lambda: found.append(outcomes(world.two, ["mine"], keys=mine)), beats=world.two)
    assert found == [{"mine": "collision"}]
    assert set(changes) == {("leaders", world.namespace, "mine")}, "only a row that nobody leads"
    mine_now = world.leader("mine")
    assert (mine_now["epoch"], mine_now["key1"], mine_now["key2"], mine_now["session_id"]) == (0, None, None, None)


def test_a_role_without_its_lock_is_not_held_though_another_holds_it(world: World) -> None:
    assert outcomes(world.two, ["r"]) == {"r": "not_held"}


@pytest.mark.parametrize("wait_ms", [0, PATIENCE_MS])
def test_a_role_in_front_of_which_a_writer_stands_is_busy_and_the_others_are_not(world: World, wait_ms: int) -> None:
    world.one.conn.execute("SET statement_timeout = '5s'")
    with fenced(world, "r"):
        found: list[dict[str, str]] = []
        ask = functools.partial(outcomes, world.one, ["r"], wait_ms=wait_ms)
        assert world.changed(lambda: found.append(ask()), beats=world.one) == {}
        assert found == [{"r": "busy"}]
        if not wait_ms:
            assert outcomes(world.one, ["r", "s"]) == {"r": "busy", "s": "won"}
    assert outcomes(world.one, ["r"], wait_ms=wait_ms) == {"r": "won"}
    assert world.one.ask("SHOW lock_timeout") == {"lock_timeout": "0"}


async def test_a_bump_that_queues_up_begins_when_the_writer_has_ended(world: World) -> None:
    with fenced(world, "r"):
        waiting = asyncio.ensure_future(asyncio.to_thread(outcomes, world.one, ["r"], wait_ms=10_000))
        await until(lambda: world.waits(world.one))
        assert world.leader("r")["epoch"] == 2
    assert await waiting == {"r": "won"}


def test_a_bump_waits_for_no_writer_of_a_role_that_it_does_not_hold(world: World) -> None:
    with fenced(world, "t"):
        assert outcomes(world.one, ["r", "t"], wait_ms=PATIENCE_MS) == {"r": "won", "t": "not_held"}


@pytest.mark.parametrize("level", [IsolationLevel.READ_COMMITTED, IsolationLevel.SERIALIZABLE], ids=lambda it: it.name)
@pytest.mark.parametrize("role", ["r", "t"])
def test_an_epoch_that_is_current_for_another_role_or_in_another_namespace_is_stale_here(
    world: World, role: str, level: IsolationLevel
) -> None:
    """Of this role there is a third term; of every other one, and of the r elsewhere, the second goes on."""
    node = world.one if role == "r" else world.two
    assert node.bump(role)["epoch"] == 3
    with pytest.raises(psycopg.Error) as error, fenced(world, role, epoch=2, level=level):
        pytest.fail("a stale epoch was fenced")
    assert error.value.sqlstate == "PGL02"
    with fenced(world, role, epoch=3, level=level), fenced(world, "s", epoch=2, level=level):
        pass


def test_the_strict_half_of_the_fence_holds_a_bump_back_by_itself(world: World) -> None:
    """Whoever may call the fence may call its half as well."""
    writer = world.hand()
    with writer.transaction():
        writer.execute("SELECT pgleaderlock.fence_strictly('r', 2, %s, NULL)", (world.namespace,))
        assert outcomes(world.one, ["r"]) == {"r": "busy"}
    assert outcomes(world.one, ["r"]) == {"r": "won"}


def test_who_won_an_epoch_is_read_of_that_very_term(world: World) -> None:
    """Terms before it, of other roles and of the r elsewhere were won by others."""
    hand_over(world)
    world.two.lead("r")
    holders = {
        key[3]: row["holder_identity"]
        for key, row in world.rows().items()
        if key[:3] == ("terms", world.namespace, "r")
    }
    assert holders[3] != holders[2] == holders[1]
    fence = "SELECT pgleaderlock.fence('r', 3, %s, %s)"
    world.hand().execute(fence, (world.namespace, holders[3]))
    with pytest.raises(psycopg.Error) as error:
        world.hand().execute(fence, (world.namespace, holders[2]))
    assert error.value.sqlstate == "PGL05"


# --- One name under two keys


NEW_KEY = (4711, 4712)


@pytest.fixture
def rekeyed(world: World) -> World:
    """`two` holds the lock of another key, which it takes for r's."""
    assert world.two.lock("r", NEW_KEY)
    return world


def test_while_the_recorded_key_is_held_another_one_wins_nothing(rekeyed: World) -> None:
    found: list[dict[str, str]] = []
    ask = functools.partial(outcomes, rekeyed.two, ["r", "s"], keys={"r": NEW_KEY})
    assert rekeyed.changed(lambda: found.append(ask()), beats=rekeyed.two) == {}
    assert found == [{"r": "collision", "s": "not_held"}]


def test_when_nobody_holds_the_recorded_key_the_new_one_is_recorded(rekeyed: World) -> None:
    """Whoever holds another role's lock, the same role's elsewhere, or half of the key in another space, is nobody."""
    hand_over(rekeyed)
    key1, key2 = key_pair("r", rekeyed.namespace)
    nobody = rekeyed.node("nobody")
    nobody.ask("SELECT pg_advisory_lock((%s::bigint << 32) | (%s::bigint & 4294967295))", key1, key2)
    nobody.ask("SELECT pg_advisory_lock(%s, %s)", key1, key2 // 2)
    nobody.ask("SELECT pg_advisory_lock(%s, %s)", key1 // 2, key2)
    other_database = rekeyed.hand(make_conninfo(rekeyed.dsn, dbname="postgres"))
    other_database.execute("SELECT pg_advisory_lock(%s, %s)", (key1, key2))
    changes = rekeyed.changed(lambda: outcomes(rekeyed.two, ["r", "t"], keys={"r": NEW_KEY}))
    new = changes["leaders", rekeyed.namespace, "r"]
    assert (new["epoch"], new["key1"], new["key2"]) == (3, *NEW_KEY)
    assert "key1" not in changes["leaders", rekeyed.namespace, "t"]
    assert {key for key in changes if key[0] == "leaders"} == {("leaders", rekeyed.namespace, role) for role in "rt"}


async def test_who_holds_both_keys_or_only_waits_for_one_is_in_nobodys_way(rekeyed: World) -> None:
    hand_over(rekeyed)
    assert rekeyed.two.lock("r")
    other = rekeyed.node("three")
    waiting = asyncio.ensure_future(asyncio.to_thread(other.wait_for_lock, "r"))
    await until(lambda: rekeyed.waits(other))
    try:
        assert outcomes(rekeyed.two, ["r"], keys={"r": NEW_KEY}) == {"r": "won"}
    finally:
        rekeyed.two.unlock("r")
        await waiting


def test_a_busy_role_keeps_its_key(rekeyed: World) -> None:
    hand_over(rekeyed)
    with fenced(rekeyed, "r"):
        ask = functools.partial(outcomes, rekeyed.two, ["r"], keys={"r": NEW_KEY})
        assert rekeyed.changed(ask, beats=rekeyed.two) == {}


# --- A role that was renamed


MINE = {"mine": key_pair("x", "x")}


@pytest.fixture
def renamed(world: World) -> World:
    """The role `old` has led under the key that is now for the role `mine`. Its last leader is `three`."""
    three = world.node("three", lease_s=SHORT_LEASE_S)
    three.lead("old", MINE["mine"])
    # What only looks like it: halves of the key, and the same names elsewhere.
    three.lead("half", (MINE["mine"][0], 7))
    three.lead("other half", (7, MINE["mine"][1]))
    for name in ("old", "mine"):
        world.stranger.lead(name)
    world.three = three
    return world


def rename(world: World, **how: Any) -> dict[str, Any]:
    return bump(world.two, ["mine", "t"], keys=MINE, **how)["mine"]


async def test_a_key_whose_last_leader_is_gone_moves_to_the_new_name_with_what_has_to_be_waited_for(
    renamed: World,
) -> None:
    await renamed.die(renamed.three)
    assert renamed.two.lock("mine", MINE["mine"])
    won: list[dict[str, Any]] = []
    changes = renamed.changed(lambda: won.append(rename(renamed)), beats=renamed.two)
    assert (won[0]["outcome"], won[0]["epoch"], won[0]["prev_clean"]) == ("won", 1, False)
    assert (won[0]["prev_wait_t"], won[0]["prev_session_id"]) == (SHORT_LEASE_S, None)
    assert changes["leaders", renamed.namespace, "old"] == {"key1": None, "key2": None}, "it keeps its epoch"
    assert {key for key in changes if key[0] == "leaders"} == {
        ("leaders", renamed.namespace, role) for role in ("old", "mine", "t")
    }
    leader = renamed.leader("mine")
    assert ((leader["key1"], leader["key2"]), leader["wait_t"]) == (MINE["mine"], LONG_LEASE_S)


async def test_of_a_renamed_role_that_was_known_before_the_longer_wait_counts(renamed: World) -> None:
    renamed.two.lead("mine", (1, 1))
    renamed.two.end_term("mine", 1, clean=True)
    renamed.two.unlock("mine", (1, 1))
    await renamed.die(renamed.three)
    assert renamed.two.lock("mine", MINE["mine"])
    won = rename(renamed)
    assert (won["prev_clean"], won["prev_wait_t"], won["prev_session_id"]) == (False, LONG_LEASE_S, None)


async def test_a_renamed_role_that_was_released_is_led_at_once(renamed: World) -> None:
    renamed.three.end_term("old", 1, clean=True)
    await renamed.die(renamed.three)
    assert renamed.two.lock("mine", MINE["mine"])
    won = rename(renamed)
    assert (won["outcome"], won["prev_clean"], won["prev_wait_t"]) == ("won", True, 0.0)


async def test_of_a_renamed_role_of_another_history_everybodys_wait_counts(renamed: World) -> None:
    """Though it was released: terms of which no trace is left may have followed."""
    renamed.three.end_term("old", 1, clean=True)
    await renamed.die(renamed.three)
    renamed.write("UPDATE pgleaderlock.leaders SET timeline = 99 WHERE role = 'old'")
    renamed.write("UPDATE pgleaderlock.sessions SET lease_s = 1200 WHERE session_id = %s", renamed.one.session_id)
    assert renamed.two.lock("mine", MINE["mine"])
    won = rename(renamed)
    assert (won["outcome"], won["prev_clean"], won["prev_wait_t"]) == ("won", False, 1200.0)


async def test_the_key_of_a_role_in_another_namespace_moves_too_and_so_does_the_wait_there(renamed: World) -> None:
    other = renamed.node("four", namespace=renamed.elsewhere, lease_s=SHORT_LEASE_S)
    other.lead("theirs", (5, 5))
    await renamed.die(other)
    renamed.write("UPDATE pgleaderlock.leaders SET timeline = 99 WHERE key1 = 5")
    renamed.write("UPDATE pgleaderlock.sessions SET lease_s = 1300 WHERE session_id = %s", renamed.stranger.session_id)
    assert renamed.two.lock("mine", (5, 5))
    (won,) = bump(renamed.two, ["mine"], keys={"mine": (5, 5)}).values()
    assert (won["outcome"], won["prev_wait_t"]) == ("won", 1300.0)
    assert renamed.rows()["leaders", renamed.elsewhere, "theirs"]["key1"] is None


def test_who_renames_its_own_role_must_have_ended_it(world: World) -> None:
    keys = {"mine": key_pair("t", world.namespace)}
    assert outcomes(world.two, ["mine"], keys=keys) == {"mine": "collision"}
    world.two.end_term("t", 2, clean=True)
    assert outcomes(world.two, ["mine"], keys=keys) == {"mine": "won"}
    assert world.leader("t")["key1"] is None


async def test_a_renamed_role_whose_old_row_somebody_holds_is_a_collision_for_now(renamed: World) -> None:
    await renamed.die(renamed.three)
    assert renamed.two.lock("mine", MINE["mine"])
    with renamed.held("leaders", renamed.namespace, "old"):
        assert rename(renamed)["outcome"] == "collision"
    assert rename(renamed)["outcome"] == "won"


async def test_who_does_not_hold_the_lock_takes_no_key_from_anybody(renamed: World) -> None:
    await renamed.die(renamed.three)
    found: list[dict[str, str]] = []
    ask = functools.partial(outcomes, renamed.two, ["mine"], keys=MINE)
    assert renamed.changed(lambda: found.append(ask()), beats=renamed.two) == {}
    assert found == [{"mine": "not_held"}]


async def test_the_role_of_a_leader_that_is_gone_keeps_its_key_and_its_predecessor(renamed: World) -> None:
    await renamed.die(renamed.three)
    assert renamed.two.lock("old", MINE["mine"])
    (won,) = bump(renamed.two, ["old"], keys={"old": MINE["mine"]}).values()
    assert (won["prev_session_id"], won["prev_wait_t"]) == (renamed.three.session_id, SHORT_LEASE_S)


async def test_who_is_refused_takes_no_key_from_anybody(renamed: World) -> None:
    """`r` is led under its own key: the one of `old` stays where it is."""
    await renamed.die(renamed.three)
    assert renamed.two.lock("r", MINE["mine"])
    found: list[dict[str, str]] = []
    ask = functools.partial(outcomes, renamed.two, ["r", "unheld"], keys={"r": MINE["mine"]})
    assert renamed.changed(lambda: found.append(ask()), beats=renamed.two) == {}
    assert found == [{"r": "collision", "unheld": "not_held"}]


# --- Rows that somebody holds, and rows of another history


def test_a_role_whose_row_somebody_holds_is_busy_and_nobody_waits_for_it(world: World) -> None:
    with world.held("leaders", world.namespace, "r"):
        assert outcomes(world.one, ["r", "s"]) == {"r": "busy", "s": "won"}
        assert world.one.end_term("r", 2, clean=True) is False
        assert world.one.end_term("s", 3, clean=True) is True
    assert world.leader("r")["epoch"] == 2


def test_a_role_whose_row_somebody_holds_is_busy_whatever_is_wrong_with_its_key(world: World) -> None:
    """`two` takes the key of t for the one of s, which is led under its own."""
    keys = {"s": key_pair("t", world.namespace)}
    with world.held("leaders", world.namespace, "s"):
        assert outcomes(world.two, ["s"], keys=keys) == {"s": "busy"}
    assert outcomes(world.two, ["s"], keys=keys) == {"s": "collision"}


def test_a_term_whose_row_somebody_holds_is_left_to_that_one(world: World) -> None:
    with world.held("terms", world.namespace, "s", 2):
        changes = world.changed(lambda: world.one.bump("s"), beats=world.one)
        assert ("terms", world.namespace, "s", 3) in changes
        assert ("terms", world.namespace, "s", 2) not in changes
    with world.held("terms", world.namespace, "r", 2):
        assert set(world.changed(lambda: world.one.end_term("r", 2, clean=True))) == {("leaders", world.namespace, "r")}
    with world.held("terms", world.namespace, "t", 2):
        assert set(world.changed(lambda: advance(world, "t"))) == {("leaders", world.namespace, "t")}


def test_a_request_whose_row_somebody_holds_is_settled_by_nobody_for_now(world: World) -> None:
    asked = world.ask_step_down("r")
    with world.held("requests", asked):
        assert ("requests", asked) not in world.changed(lambda: world.one.bump("r"))


def test_every_open_term_of_a_role_is_closed_by_the_next_one(world: World) -> None:
    world.write("UPDATE pgleaderlock.terms SET ended_at = NULL WHERE role = 'r' AND epoch = 1")
    changes = world.changed(lambda: world.one.bump("r"), beats=world.one)
    assert {key for key in changes if key[0] == "terms"} == {
        ("terms", world.namespace, "r", epoch) for epoch in (1, 2, 3)
    }


@pytest.mark.parametrize("column", ["system_identifier", "timeline"])
def test_a_row_of_another_history_is_not_trusted_to_have_ended_clean(world: World, column: str) -> None:
    hand_over(world, clean=True)
    hand_over(world, "s", clean=True)
    world.write(f"UPDATE pgleaderlock.leaders SET {column} = {column} + 1, wait_t = 10 WHERE role = 'r'")
    node = world.node("three", lease_s=SHORT_LEASE_S)
    assert node.lock("r")
    assert node.lock("s")
    won = bump(node, ["r", "s"])
    assert (won["r"]["prev_clean"], won["r"]["prev_wait_t"]) == (False, LONG_LEASE_S)
    assert (won["s"]["prev_clean"], won["s"]["prev_wait_t"]) == (True, LEASE_S)
    assert (world.leader("r")["wait_t"], world.leader("s")["wait_t"]) == (LONG_LEASE_S, SHORT_LEASE_S)


def test_who_wins_a_role_of_another_history_alone_waits_as_long_as_any_node_may_act(world: World) -> None:
    world.write("UPDATE pgleaderlock.leaders SET timeline = timeline + 1, wait_t = 10 WHERE role = 'r'")
    assert world.one.bump("r")["prev_wait_t"] == LONG_LEASE_S


def test_a_row_of_another_history_with_a_longer_wait_keeps_it(world: World) -> None:
    world.write("UPDATE pgleaderlock.leaders SET timeline = timeline + 1, wait_t = 5000 WHERE role = 'r'")
    assert world.one.bump("r")["prev_wait_t"] == 5000.0


@pytest.mark.parametrize(("ago_s", "clean"), [(LONG_LEASE_S - 30, False), (LONG_LEASE_S + 30, True)])
def test_in_a_young_history_a_role_that_was_never_led_may_have_been_led_in_the_one_before(
    world: World, ago_s: float, clean: bool
) -> None:
    here = world.two.ask("SELECT * FROM pgleaderlock.history()")
    history = (here["system_identifier"], here["timeline"])
    with world.one.conn.transaction(force_rollback=True):
        # Ours comes last, in the table as in its index: a lookup that matches another history as well finds that one.
        world.one.conn.execute("DELETE FROM pgleaderlock.histories")
        for system, timeline, ago in (
            (history[0] + 1, history[1], 10**9 if not clean else 0),
            (history[0], history[1] - 1, 10**9 if not clean else 0),
            (*history, ago_s),
        ):
            world.one.conn.execute(
                "INSERT INTO pgleaderlock.histories VALUES (%s, %s, clock_timestamp() - make_interval(secs => %s))",
                (system, timeline, ago),
            )
        assert world.one.lock("new")
        won = world.one.bump("new")
    world.one.unlock("new")
    assert (won["prev_clean"], won["prev_wait_t"]) == (clean, 0.0 if clean else LONG_LEASE_S)


@pytest.mark.parametrize(
    ("change", "longest_s"),
    [
        ("beat = beat", LONG_LEASE_S),
        ("last_heartbeat = clock_timestamp() - interval '59 minutes'", LONG_LEASE_S),
        ("last_heartbeat = clock_timestamp() - interval '61 minutes'", LEASE_S),
        ("last_heartbeat = clock_timestamp() - interval '61 minutes', lease_s = 1900", 1900.0),
        ("last_heartbeat = clock_timestamp() - interval '64 minutes', lease_s = 1900", LEASE_S),
        ("namespace = 'other'", LEASE_S),
    ],
)
def test_the_longest_wait_is_that_of_whoever_may_have_been_alive(world: World, change: str, longest_s: float) -> None:
    world.write(f"UPDATE pgleaderlock.sessions SET {change} WHERE session_id = %s", world.two.session_id)
    ask = "SELECT pgleaderlock.longest_wait_s(%s) AS s"
    assert world.one.ask(ask, world.namespace)["s"] == longest_s
    assert world.one.ask(ask, "unknown")["s"] == 0


# --- What was asked is done


def test_a_new_term_settles_what_was_asked_of_the_one_before_and_nothing_else(world: World) -> None:
    for_two, for_anybody, for_one = (world.ask_step_down("r", to) for to in ("two", None, "one"))
    done = world.ask_step_down("r")
    world.one.ask("SELECT pgleaderlock.settle_request(%s, %s, 'refused', 'no')", world.one.session_id, done)
    world.ask_step_down("s")
    world.ask_step_down("r", namespace=world.elsewhere)
    world.ask_node("drain", "one")
    hand_over(world)
    assert world.two.lock("r")
    changes = world.changed(lambda: world.two.bump("r"))
    assert {key[1]: row for key, row in changes.items() if key[0] == "requests"} == {
        for_two: {"done_at": ANY, "outcome": "done", "detail": "two leads it"},
        for_anybody: {"done_at": ANY, "outcome": "done", "detail": "two leads it"},
        for_one: {"done_at": ANY, "outcome": "done", "detail": "two leads it, and not one"},
    }


# --- A term ends


@pytest.mark.parametrize("clean", [True, False])
def test_the_end_of_a_term_says_whether_it_was_clean_and_touches_no_other(world: World, clean: bool) -> None:
    world.write("UPDATE pgleaderlock.terms SET ended_at = NULL WHERE role = 'r' AND epoch = 1")

    def end() -> None:
        assert world.one.end_term("r", 2, clean=clean)

    assert world.changed(end) == {
        ("leaders", world.namespace, "r"): {"ended": True, **({"clean": True} if clean else {})},
        ("terms", world.namespace, "r", 2): {"ended_at": ANY, "reason": "released"},
    }
    assert world.events(lambda: world.one.end_term("s", 2, clean=clean)) == [
        {
            "kind": "released",
            "namespace": world.namespace,
            "role": "s",
            "node_id": "one",
            "epoch": 2,
            "detail": "clean" if clean else "not clean",
        }
    ]


def test_a_term_ends_once_and_stays_as_it_ended(world: World) -> None:
    assert world.one.end_term("r", 2, clean=False)
    assert world.changed(lambda: world.one.end_term("r", 2, clean=True)) == {}


@pytest.mark.parametrize(("role", "epoch"), [("r", 1), ("r", 3), ("t", 2), ("unknown", 2)])
def test_a_term_of_another_epoch_or_of_another_session_does_not_end(world: World, role: str, epoch: int) -> None:
    def end() -> None:
        assert not world.one.end_term(role, epoch, clean=True)

    assert world.changed(end) == {}


# --- The epoch is advanced by hand


def advance(world: World, role: str = "r") -> dict[str, Any]:
    row = (
        world.hand()
        .execute("SELECT * FROM pgleaderlock.advance_epoch(%s, %s, 'pgleaderlock')", (role, world.namespace))
        .fetchone()
    )
    assert row is not None
    return row


def test_an_epoch_that_is_advanced_ends_the_term_and_resets_clean(world: World) -> None:
    assert world.changed(lambda: advance(world)) == {
        ("leaders", world.namespace, "r"): {"epoch": STRIDE, "session_id": None, "ended": True},
        ("terms", world.namespace, "r", 2): {"ended_at": ANY, "reason": "superseded"},
    }
    assert world.one.end_term("s", 2, clean=True)
    assert world.changed(lambda: advance(world, "s")) == {
        ("leaders", world.namespace, "s"): {"epoch": STRIDE, "session_id": None, "clean": False},
    }


def test_after_a_clean_release_and_an_advance_the_successor_waits_as_after_a_loss(world: World) -> None:
    hand_over(world, clean=True)
    advance(world)
    assert world.rows()["terms", world.namespace, "r", 2]["reason"] == "released"
    assert world.two.lock("r")
    won = world.two.bump("r")
    assert (won["epoch"], won["prev_clean"], won["prev_session_id"], won["prev_wait_t"]) == (
        STRIDE + 1,
        False,
        None,
        LEASE_S,
    )


def test_each_advance_leaves_the_epochs_before_it_far_behind_and_stays_in_its_history(world: World) -> None:
    assert advance(world) == {"old_epoch": 2, "new_epoch": STRIDE}
    assert world.one.bump("r")["epoch"] == STRIDE + 1
    assert advance(world) == {"old_epoch": STRIDE + 1, "new_epoch": 2 * STRIDE}


def test_an_advance_tells_its_story_and_leaves_the_hint_to_its_caller(world: World) -> None:
    common = {"namespace": world.namespace, "role": "r"}
    assert world.events(lambda: advance(world)) == [
        {**common, "kind": "superseded", "node_id": "one", "epoch": 2, "detail": None},
        {**common, "kind": "advanced", "node_id": None, "epoch": STRIDE, "detail": "by postgres"},
    ]
    assert world.notices(lambda: advance(world)) == []


def test_a_role_that_is_not_known_cannot_be_advanced(world: World) -> None:
    def unknown() -> None:
        with pytest.raises(psycopg.Error) as error:
            advance(world, "unknown")
        assert error.value.sqlstate == "PGL01"

    assert world.changed(unknown) == {}


def test_an_advance_waits_for_the_writer_of_the_epoch_that_it_ends(world: World) -> None:
    operator = world.hand()
    operator.execute("SET lock_timeout = '50ms'")
    with fenced(world, "r"), pytest.raises(psycopg.errors.LockNotAvailable):
        operator.execute("SELECT pgleaderlock.advance_epoch('r', %s, 'pgleaderlock')", (world.namespace,))
    with fenced(world, "s"):
        operator.execute("SELECT pgleaderlock.advance_epoch('r', %s, 'pgleaderlock')", (world.namespace,))


def test_an_epoch_is_not_advanced_into_the_numbers_of_the_next_history(world: World) -> None:
    world.write("UPDATE pgleaderlock.leaders SET epoch = %s WHERE role = 'r'", HISTORY - STRIDE - 1)
    assert advance(world) == {"old_epoch": HISTORY - STRIDE - 1, "new_epoch": HISTORY - STRIDE}

    def refused() -> None:
        with pytest.raises(psycopg.Error, match="no room") as error:
            advance(world)
        assert error.value.sqlstate == "PGL01"

    assert world.changed(refused) == {}
    world.write("UPDATE pgleaderlock.leaders SET epoch = %s WHERE role = 'r'", HISTORY)
    assert advance(world)["new_epoch"] == HISTORY + STRIDE, "in the next one there is room again"


@pytest.mark.parametrize(("was", "becomes"), [("off", "on"), ("local", "local")])
def test_an_advance_is_on_disk_before_it_is_acknowledged(world: World, was: str, becomes: str) -> None:
    operator = world.hand()
    operator.execute(f"SET synchronous_commit = {was}".encode())
    with operator.transaction():
        operator.execute("SELECT pgleaderlock.advance_epoch('r', %s, 'pgleaderlock')", (world.namespace,))
        assert operator.execute("SHOW synchronous_commit").fetchone() == {"synchronous_commit": becomes}
    assert operator.execute("SHOW synchronous_commit").fetchone() == {"synchronous_commit": was}
