"""The statements that a lease sends itself, on a server: its look at the ledger, and what it has ended.

Quick, for the same reason as `test_ledger_functions.py`. No election: leases and sessions that are played by hand.
"""

import contextlib
import random
from collections.abc import AsyncIterator, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest
from psycopg.rows import tuple_row

from pgleaderlock._base.clock import BOOT_CLOCK
from pgleaderlock._election.ledger import HOLD_S, Look, columns, looks
from pgleaderlock._pg.conninfo import ConnectionSettings
from pgleaderlock._pg.lease import LeaseSession
from pgleaderlock.embedded import EmbeddedPostgres
from pgleaderlock.keys import KeyPair, key_pair
from support.elections import fresh_database
from support.ledger_leases import Leases
from support.ledger_world import LEASE_S

SETTINGS = ConnectionSettings("pgleaderlock-test-lease", statement_timeout_s=30.0, lease_s=600.0)
RELEASED = (
    "UPDATE pgleaderlock.requests SET released_at = clock_timestamp() - make_interval(secs => %s) WHERE request_id = %s"
)


@pytest.fixture(scope="module")
def ledger_dsn(postgres: EmbeddedPostgres) -> Iterator[str]:
    with fresh_database(postgres.dsn, ledger=True) as dsn:
        yield dsn


@pytest.fixture
def world(ledger_dsn: str, nothing_left: None) -> Iterator[Leases]:
    with contextlib.ExitStack() as nodes:
        yield Leases(ledger_dsn, nodes)


@pytest.fixture
async def session(world: Leases) -> AsyncIterator[LeaseSession]:
    made = LeaseSession(world.dsn, SETTINGS, clock=BOOT_CLOCK, rng=random.Random(1))
    yield made
    await made.close()


async def look(
    session: LeaseSession, world: Leases, *roles: str, keys: Mapping[str, KeyPair] = MappingProxyType({})
) -> dict[str, Look]:
    """What node `me` sees of each role; `keys` are those that are not of the role's name."""
    asked = columns({role: keys.get(role, key_pair(role, world.namespace)) for role in roles})
    rows = await session.rows("lease_look", tuple_row, namespace=world.namespace, node_id="me", hold_s=HOLD_S, **asked)
    found = [each for row in rows for each in looks(row, roles)]
    assert sorted(each.role for each in found) == sorted(roles), "one look at each role"
    return {each.role: each for each in found}


async def test_a_look_shows_the_holder_of_each_role_in_its_own_namespace_and_how_it_holds(
    world: Leases, session: LeaseSession
) -> None:
    found = await look(session, world, "l", "n", "r", "new")
    beats = {node.session_id: world.session(node)["beat"] for node in (world.lea, world.lou, world.one)}
    held = (("l", world.lea, "lease", 1), ("n", world.lou, "lease", 1), ("r", world.one, "session", 2))
    for role, node, hold, epoch in held:
        seen = found[role]
        assert (seen.session_id, seen.epoch, seen.beat) == (node.session_id, epoch, beats[node.session_id])
        assert (seen.node_id, seen.hold, seen.ended, seen.gone) == (node.node_id, hold, False, False)
    assert found["l"].lease_s == LEASE_S
    new = found["new"]
    assert (new.session_id, new.epoch, new.beat, new.ended, new.gone) == (None, None, None, True, False)
    assert not any(each.granted or each.reserved or each.for_us for each in found.values())


async def test_a_role_that_was_released_has_ended_and_one_of_a_lease_that_was_ended_is_gone(
    world: Leases, session: LeaseSession
) -> None:
    with world.lea.message():
        world.lea.end_term("m", 1, clean=True)
    world.end(world.lou)
    world.one.ask("SELECT pgleaderlock.close_session(%s)", world.one.session_id)
    found = await look(session, world, "l", "m", "n", "r")
    assert {role: (each.ended, each.gone) for role, each in found.items() if role != "r"} == {
        "l": (False, False),
        "m": (True, False),
        "n": (False, True),
    }
    assert not found["r"].gone, "of a session, the lock tells"


@pytest.mark.parametrize(
    ("to", "ago_s", "reserved"),
    [
        pytest.param("two", 0.0, True, id="for another"),
        pytest.param("me", 0.0, False, id="for us"),
        pytest.param("two", HOLD_S * 2, False, id="for another, some time ago"),
        pytest.param("two", -60.0, False, id="for another, in the future"),
    ],
)
async def test_a_role_that_was_just_given_up_for_another_is_left_to_it(
    world: Leases, session: LeaseSession, to: str, ago_s: float, reserved: bool
) -> None:
    world.write(RELEASED, ago_s, world.ask_step_down("l", to))
    found = await look(session, world, "l", "m", "new")
    assert {role: each.reserved for role, each in found.items()} == {"l": reserved, "m": False, "new": False}
    assert {role: each.ended for role, each in found.items()} == {"l": False, "m": False, "new": True}
    assert not any(each.granted or each.for_us for each in found.values())


async def test_a_reservation_that_is_over_or_of_another_namespace_counts_for_nothing(
    world: Leases, session: LeaseSession
) -> None:
    over = world.ask_step_down("r", "two")
    world.write(RELEASED, 0.0, over)
    world.one.ask("SELECT pgleaderlock.settle_request(%s, %s, 'refused', NULL)", world.one.session_id, over)
    world.write(RELEASED, 0.0, world.ask_step_down("r", "two", namespace=world.elsewhere))
    assert not (await look(session, world, "r"))["r"].reserved


@pytest.mark.parametrize("half", [0, 1])
async def test_a_look_tells_which_roles_are_recorded_under_another_key(
    world: Leases, session: LeaseSession, half: int
) -> None:
    own = key_pair("l", world.namespace)
    found = await look(session, world, "l", "m", "new", keys={"l": (own[0] ^ half, own[1] ^ (1 - half))})
    assert {role: each.other_key for role, each in found.items()} == {"l": True, "m": False, "new": False}
    assert {role: each.ended for role, each in found.items()} == {"l": False, "m": False, "new": True}


async def test_a_role_whose_key_has_moved_to_another_name_has_no_other_key(
    world: Leases, session: LeaseSession
) -> None:
    world.write("UPDATE pgleaderlock.leaders SET key1 = NULL, key2 = NULL WHERE role = 'l'")
    assert not (await look(session, world, "l"))["l"].other_key


async def ended(session: LeaseSession, session_id: int, **asked: Any) -> set[str]:
    asked = {"roles": ["l", "m"], "epochs": [1, 1], "reason": "released"} | asked
    return {row["role"] for row in await session.rows("lease_ended", session_id=session_id, **asked)}


async def test_what_a_lease_has_ended_is_told_of_these_very_terms_and_this_very_end(
    world: Leases, session: LeaseSession
) -> None:
    mine = world.lea.session_id
    assert await ended(session, mine) == set()
    with world.lea.message():
        world.lea.end_term("l", 1, clean=True)
    assert await ended(session, mine) == {"l"}
    assert await ended(session, mine, epochs=[2, 1]) == set()
    assert await ended(session, mine, roles=["m", "x"]) == set()
    assert await ended(session, mine, reason="drained") == set()
    assert await ended(session, world.lou.session_id) == set()
