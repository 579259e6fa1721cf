"""The statements that a session sends itself, on a server: the lock, its lease, and the looks at the ledger.

Quick, for the same reason as `test_ledger_functions.py`. No election: a `Ledger` on a session of its own, in a world of
nodes that are played by hand.
"""

import contextlib
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgleaderlock._election.ledger import HOLD_S, Identity, Ledger, Look
from pgleaderlock._pg.conninfo import ConnectionSettings
from pgleaderlock._pg.session import DedicatedSession
from pgleaderlock.embedded import EmbeddedPostgres
from pgleaderlock.errors import UnsafeSessionError
from pgleaderlock.keys import KeyPair, key_pair
from support.elections import fresh_database, ledger_dsns
from support.ledger_world import LEASE_S, World

SETTINGS = ConnectionSettings("pgleaderlock-test-session", statement_timeout_s=10.0, lease_s=600.0)
LEASE = "10min"
KEYS = (4711, 4712)
WAIT_S = 0.05


@pytest.fixture(scope="module")
def ledger_dsn(postgres: EmbeddedPostgres) -> Iterator[str]:
    with fresh_database(postgres.dsn, ledger=True) as dsn:
        yield dsn


@pytest.fixture
def world(ledger_dsn: str, nothing_left: None) -> Iterator[World]:
    with contextlib.ExitStack() as nodes:
        yield World(ledger_dsn, nodes)


@pytest.fixture
def plain(dsn: str, ledger_dsn: str) -> str:
    """The same database for another database role."""
    return make_conninfo(ledger_dsns(dsn)["plain"], dbname=str(conninfo_to_dict(ledger_dsn)["dbname"]))


@contextlib.asynccontextmanager
async def opened(dsn: str) -> AsyncIterator[DedicatedSession]:
    session = await DedicatedSession.open(dsn, SETTINGS)
    try:
        yield session
    finally:
        await session.close()


@contextlib.asynccontextmanager
async def recorded(world: World, dsn: str | None = None) -> AsyncIterator[Ledger]:
    """A ledger as an election opens it, as node `me`."""
    async with opened(dsn or world.dsn) as session:
        ledger = Ledger(
            session, Identity(world.namespace, str(uuid.uuid4()), "me", "h", 1, "me-h", "test"), "pgleaderlock"
        )
        await ledger.open(gate_s=500.0, lease_s=LEASE_S, candidate=True)
        yield ledger


async def ask(session: object, query: str, *params: object) -> Any:
    """The first column of the only row, on the session's own connection."""
    assert isinstance(session, DedicatedSession)
    cursor = await session._connection.execute(query.encode(), params)
    ((value,),) = [tuple(row.values()) for row in await cursor.fetchall()]
    return value


async def looks(
    ledger: Ledger,
    world: World,
    *roles: str,
    wanted: str = "",
    keys: Mapping[str, KeyPair] = MappingProxyType({}),
    closely: bool = False,
) -> dict[str, Look]:
    asked = {role: keys.get(role, key_pair(role, world.namespace)) for role in roles}
    found = await ledger.try_and_look(asked, set(wanted), look_closely=closely)
    assert sorted(look.role for look in found) == sorted(roles), "one look at each role"
    return {look.role: look for look in found}


# --- The session is recorded


@pytest.mark.parametrize(("was", "becomes"), [("off", "on"), ("local", "local"), ("on", "on")])
async def test_the_commits_of_a_ledger_are_durable_and_stay_so_for_this_session(
    world: World, was: str, becomes: str
) -> None:
    dsn = make_conninfo(world.dsn, options=f"-c synchronous_commit={was}")
    async with recorded(world, dsn) as ledger:
        source = "SELECT setting || ' ' || source FROM pg_settings WHERE name = 'synchronous_commit'"
        assert await ask(ledger.session, source) == f"{becomes} session"


async def test_a_rehearsed_bump_changes_nothing_and_leaves_the_session_as_it_was(world: World) -> None:
    async with recorded(world) as ledger:
        before = world.rows()
        await ledger.rehearse()
        assert world.rows() == before, "no beat either"
        assert (await ledger.beat([])).roles == 0


# --- The look


async def test_a_lock_that_is_free_is_granted_if_it_is_wanted_and_to_one_only(world: World) -> None:
    async with recorded(world) as first, recorded(world) as second:
        assert {role: look.granted for role, look in (await looks(first, world, "x", "y", wanted="x")).items()} == {
            "x": True,
            "y": False,
        }
        assert {role: look.granted for role, look in (await looks(second, world, "x", "y", wanted="xy")).items()} == {
            "x": False,
            "y": True,
        }


async def test_a_look_shows_the_holder_of_each_role_in_its_own_namespace(world: World) -> None:
    world.two.end_term("t", 2, clean=True)
    async with recorded(world) as ledger:
        found = await looks(ledger, world, "r", "t", "new")
    beats = {node.session_id: world.rows()["sessions", node.session_id]["beat"] for node in (world.one, world.two)}
    r, t, new = found["r"], found["t"], found["new"]
    assert (r.epoch, r.session_id, r.beat, r.ended) == (2, world.one.session_id, beats[world.one.session_id], False)
    assert (r.node_id, r.holder_identity, r.lease_s) == ("one", "one-by-hand", LEASE_S)
    assert (t.epoch, t.session_id, t.ended) == (2, world.two.session_id, True)
    assert (new.epoch, new.session_id, new.beat, new.ended) == (None, None, None, True)
    assert not any(look.granted or look.reserved for look in found.values())


@pytest.mark.parametrize("closely", [False, True])
@pytest.mark.parametrize("half", [0, 1])
async def test_a_look_tells_which_roles_are_recorded_under_another_key(world: World, half: int, closely: bool) -> None:
    own = key_pair("r", world.namespace)
    keys = {"r": (own[0] ^ half, own[1] ^ (1 - half))}
    async with recorded(world) as ledger:
        found = await looks(ledger, world, "r", "s", "new", wanted="r", keys=keys, closely=closely)
        assert {role: look.other_key for role, look in found.items()} == {"r": True, "s": False, "new": False}
        assert (found["r"].granted, found["r"].ended, found["r"].reserved) == (True, False, False)


@pytest.mark.parametrize("closely", [False, True])
async def test_a_role_whose_key_has_moved_to_another_name_has_no_other_key(world: World, closely: bool) -> None:
    world.write("UPDATE pgleaderlock.leaders SET key1 = NULL, key2 = NULL WHERE role = 'r'")
    async with recorded(world) as ledger:
        assert not (await looks(ledger, world, "r", closely=closely))["r"].other_key


RELEASED = (
    "UPDATE pgleaderlock.requests SET released_at = clock_timestamp() - make_interval(secs => %s) WHERE request_id = %s"
)


@pytest.mark.parametrize(
    ("to", "ago_s", "reserved"),
    [
        pytest.param("two", 0.0, True, id="for another"),
        pytest.param("me", 0.0, False, id="for us"),
        pytest.param(None, 0.0, False, id="for nobody"),
        pytest.param("two", HOLD_S * 2, False, id="for another, some time ago"),
        pytest.param("two", -60.0, False, id="for another, in the future"),
    ],
)
async def test_a_role_that_was_just_given_up_for_another_is_not_tried(
    world: World, to: str | None, ago_s: float, reserved: bool
) -> None:
    world.write(RELEASED, ago_s, world.ask_step_down("r", to))
    world.one.unlock("r")
    world.one.unlock("s")
    async with recorded(world) as ledger:
        found = await looks(ledger, world, "r", "s", wanted="rs")
    assert (found["r"].reserved, found["r"].granted) == (reserved, not reserved)
    assert not any(look.ended or look.for_us for look in found.values())
    assert (found["s"].reserved, found["s"].granted) == (False, True), "the other role is not"


async def test_a_reservation_that_is_over_or_of_another_namespace_counts_for_nothing(world: World) -> None:
    over = world.ask_step_down("r", "two")
    world.write(RELEASED, 0.0, over)
    world.one.ask("SELECT pgleaderlock.settle_request(%s, %s, 'refused', NULL)", world.one.session_id, over)
    world.write(RELEASED, 0.0, world.ask_step_down("r", "two", namespace=world.elsewhere))
    async with recorded(world) as ledger:
        assert not (await looks(ledger, world, "r"))["r"].reserved


async def test_what_a_session_leads_by_the_ledger_is_its_own_and_not_over(world: World) -> None:
    async with recorded(world) as ledger:
        for role in ("x", "y"):
            await looks(ledger, world, role, wanted=role)
        keys = {role: key_pair(role, world.namespace) for role in ("x", "y")}
        assert {bump.outcome for bump in await ledger.bump(keys)} == {"won"}
        await ledger.end_terms({"y": (1, True)})
        assert await ledger.owned() == {"x": 1}


async def test_an_unlock_frees_the_locks_and_wakes_who_listens(world: World) -> None:
    keys = key_pair("x", world.namespace)
    async with recorded(world) as ledger:
        await looks(ledger, world, "x", wanted="x")
        listener = world.hand()
        listener.execute("LISTEN pgleaderlock")
        assert await ledger.unlock({"x": keys}) == {"x"}
        assert [heard.payload for heard in listener.notifies(timeout=5.0, stop_after=1)] == ["released"]
        assert world.two.lock("x", keys)
        assert await ledger.unlock({"x": keys}) == set()


@pytest.mark.parametrize("keys", [(11, 22), (-(2**31), 2**31 - 1)], ids=str)
async def test_a_heartbeat_counts_only_while_the_lock_that_it_asks_for_is_held(
    world: World, keys: tuple[int, int]
) -> None:
    async with recorded(world) as ledger:
        await ledger.session.wait(keys, 1.0)
        for held in (None, keys, keys):
            await ledger.beat([], held=held)
        await ask(ledger.session, "SELECT pg_advisory_unlock_all()")
        with pytest.raises(UnsafeSessionError, match="no longer ours"):
            await ledger.beat([], held=keys)


async def test_a_heartbeat_leaves_the_lock_that_it_asks_for_as_it_was(world: World) -> None:
    """A lock that each heartbeat turned into a shared one would not be found by the third."""
    modes = "SELECT string_agg(mode, ' ') AS modes FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory'"
    async with recorded(world) as ledger:
        assert await ledger.session.wait(KEYS, 1.0)
        for _ in range(3):
            await ledger.beat([], held=KEYS)
            assert await ask(ledger.session, modes) == "ExclusiveLock"
        await ledger.unlock({"x": KEYS})
        assert await ask(ledger.session, modes) is None, "it is held as often as before"


async def test_a_heartbeat_counts_only_on_the_backend_that_was_recorded(world: World) -> None:
    async with recorded(world) as ledger:
        await ledger.beat([])
        assert isinstance(ledger.session, DedicatedSession)
        await ledger.session._connection.execute("RESET pgleaderlock.session")
        with pytest.raises(UnsafeSessionError, match="no longer ours"):
            await ledger.beat([])


async def test_a_hint_leaves_the_session_as_it_was(world: World) -> None:
    async with recorded(world) as ledger:
        await ledger.hint("acquired")
        assert await ask(ledger.session, "SHOW lock_timeout") == "10s"
        assert await ask(ledger.session, "SHOW synchronous_commit") == "on"


async def test_several_requests_are_settled_with_one_statement(world: World) -> None:
    async with recorded(world) as ledger:
        await looks(ledger, world, "x", wanted="x")
        await ledger.bump({"x": key_pair("x", world.namespace)})
        first, second = world.ask_step_down("x"), world.ask_step_down("x")
        await ledger.settle_requests([(first, "done", "yes"), (second, "refused", None)])
        rows = world.rows()
    assert [(rows["requests", r]["outcome"], rows["requests", r]["detail"]) for r in (first, second)] == [
        ("done", "yes"),
        ("refused", None),
    ]


# --- The eviction


OTHERS = {
    "one with another start": "backend_start = backend_start - interval '1 day'",
    "one that has ended": "ended_at = clock_timestamp()",
    "one of another system": "system_identifier = system_identifier + 1",
    "one of another timeline": "timeline = timeline + 1",
    "one of before version 4": "system_identifier = NULL, timeline = NULL",
}


@pytest.mark.parametrize("whose", ["the recorded one", *OTHERS, "one of another database role"])
async def test_exactly_the_recorded_session_of_the_same_database_role_is_ended(
    world: World, plain: str, whose: str
) -> None:
    pid = world.one.conn.info.backend_pid
    other = plain if whose == "one of another database role" else None
    if whose in OTHERS:
        world.write(f"UPDATE pgleaderlock.sessions SET {OTHERS[whose]} WHERE session_id = %s", world.one.session_id)
    history = world.two.ask("SELECT * FROM pgleaderlock.history()")
    async with opened(other or world.dsn) as session, contextlib.AsyncExitStack() as undone:
        if other is not None:
            world.write("GRANT USAGE ON SCHEMA pgleaderlock TO election_plain")
            world.write("GRANT SELECT ON pgleaderlock.sessions TO election_plain")
            # It sees the other's session, as a monitoring role does, and leaves it alone all the same.
            world.write("GRANT pg_read_all_stats TO election_plain")
            undone.callback(world.write, "REVOKE pg_read_all_stats FROM election_plain")
        rows = await session.rows("ledger_evict", evicted_session_id=world.one.session_id, **history, wait_ms=5000)
    evicted = whose in ("the recorded one", "one of before version 4")
    assert bool(rows and rows[0]["ended"]) is evicted
    assert world.runs(pid) is not evicted
    assert world.runs(world.two.conn.info.backend_pid)


# --- The lock and its lease


async def lease(session: DedicatedSession) -> Any:
    return await ask(session, "SHOW idle_session_timeout")


async def test_a_lock_is_granted_with_its_lease_and_to_one_session_only(world: World) -> None:
    async with opened(world.dsn) as first, opened(world.dsn) as second:
        assert await first.take(KEYS)
        assert not await second.take(KEYS)
        assert (await lease(first), await lease(second)) == (LEASE, "0")
        await first.unlock(KEYS)
        assert await second.take(KEYS)


UNFIT = {
    "another lease": "SET idle_session_timeout = '1h'",
    "another isolation level": "SET default_transaction_isolation = 'serializable'",
    "read-only": "SET default_transaction_read_only = on",
    "warnings that are hidden": "SET client_min_messages = 'error'",
    "another search path": "SET search_path = 'public'",
    "another encoding": "SET client_encoding = 'LATIN1'",
}


@pytest.mark.parametrize("why", [*UNFIT, "another backend"])
async def test_a_session_that_is_not_fit_takes_no_lock(world: World, why: str) -> None:
    async with opened(world.dsn) as session:
        if why in UNFIT:
            await session._connection.execute(UNFIT[why].encode())
        else:
            session._backend_pid += 1
        with pytest.raises(UnsafeSessionError):
            await session.take(KEYS)
    async with opened(world.dsn) as other:
        assert await other.take(KEYS)


async def test_a_wait_that_is_granted_comes_with_its_lease_and_to_one_session_only(world: World) -> None:
    async with opened(world.dsn) as first, opened(world.dsn) as second:
        assert await first.wait(KEYS, WAIT_S)
        assert not await second.wait(KEYS, WAIT_S)
        assert (await lease(first), await lease(second)) == (LEASE, "0")
        assert await ask(second, "SHOW lock_timeout") == await ask(first, "SHOW lock_timeout") == "10s"
        await first.unlock(KEYS)
        assert await second.wait(KEYS, WAIT_S), "the answer of the wait before is forgotten"
        assert not await first.wait(KEYS, WAIT_S), "and so is this one's"


@pytest.mark.parametrize("other", [(KEYS[0], 1), (1, KEYS[1]), None], ids=["one half", "the other half", "single keys"])
async def test_a_wait_in_vain_is_no_grant_though_the_session_holds_what_looks_like_it(
    world: World, other: KeyPair | None
) -> None:
    async with opened(world.dsn) as holder, opened(world.dsn) as session:
        assert await holder.take(KEYS)
        if other is None:
            await session._connection.execute("SELECT pg_advisory_lock(%s)", ((KEYS[0] << 32) | KEYS[1],))
        else:
            await session._connection.execute("SELECT pg_advisory_lock(%s, %s)", other)
        assert not await session.wait(KEYS, WAIT_S)
