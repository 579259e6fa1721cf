"""A plain role with `grants.sql` and nothing else can do everything at run time, and change no epoch by hand.

That it can do everything is shown by `test_election_api.py`, which runs each test with it. Here: what it cannot.
"""

import contextlib
import uuid
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgleaderlock import LeaderElection, LockState, key_pair
from pgleaderlock._pg.statements import statement
from support.elections import HASTY, PATIENT, STEADY, SilentLeader, admin, ledger_dsns, one, opens, until
from support.ledger_node import ledger_node
from support.server_side import holders

TABLES = ("schema_version", "sessions", "leaders", "terms", "events", "requests", "histories", "leader_state")
WRITES = {
    "insert": "INSERT INTO pgleaderlock.{table} DEFAULT VALUES",
    "update": "UPDATE pgleaderlock.{table} SET {column} = {column}",
    "delete": "DELETE FROM pgleaderlock.{table}",
    "truncate": "TRUNCATE pgleaderlock.{table}",
    "lock": "SELECT FROM pgleaderlock.{table} FOR UPDATE",
    "alter": "ALTER TABLE pgleaderlock.{table} ADD COLUMN mine integer",
    "trigger": "CREATE TRIGGER mine BEFORE UPDATE ON pgleaderlock.{table} EXECUTE FUNCTION pgleaderlock.check_fence()",
    "drop": "DROP TABLE pgleaderlock.{table}",
}
COLUMN = {
    "schema_version": "version",
    "sessions": "beat",
    "leaders": "epoch",
    "terms": "epoch",
    "events": "kind",
    "histories": "timeline",
}


@pytest.fixture
def plain(dsn: str) -> str:
    return ledger_dsns(dsn)["plain"]


@pytest.fixture
def hand(plain: str) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
    """The plain role's own psql, so to say."""
    with psycopg.connect(plain, autocommit=True, application_name="pgleaderlock-test-hand") as conn:
        yield conn


def epochs(superuser: str) -> dict[str, int]:
    with admin(superuser) as conn:
        rows = conn.execute("SELECT role, epoch FROM pgleaderlock.leaders").fetchall()
    return {row["role"]: row["epoch"] for row in rows}


def open_session(conn: psycopg.Connection[tuple[Any, ...]]) -> int:
    row = conn.execute(
        "SELECT session_id FROM pgleaderlock.open_session("
        "'pgleaderlock', gen_random_uuid(), 'hand', 'h', 1, 'hand-h-1', 6, 7, true, 'test')"
    ).fetchone()
    assert row is not None
    return int(row[0])


def test_the_role_is_really_a_plain_one(plain: str) -> None:
    found = one(
        plain,
        "SELECT rolsuper, rolcreaterole, rolcreatedb, rolreplication, rolbypassrls,"
        " (SELECT count(*) FROM pg_auth_members m WHERE m.member = r.oid) AS memberships"
        " FROM pg_roles r WHERE rolname = current_user",
    )
    assert not any(found.values())
    assert conninfo_to_dict(plain)["user"] == "election_plain"


def test_it_may_call_exactly_the_functions_of_the_grants(plain: str, superuser: str) -> None:
    with admin(superuser) as conn:
        rows = conn.execute(
            "SELECT proname, has_function_privilege('election_plain', oid, 'EXECUTE') AS allowed"
            " FROM pg_proc WHERE pronamespace = 'pgleaderlock'::regnamespace"
        ).fetchall()
    granted = statement("grants").decode()
    assert {row["proname"] for row in rows if row["allowed"]} == {
        row["proname"] for row in rows if f"pgleaderlock.{row['proname']}\n" in granted.replace(",", "\n")
    }
    forbidden = {row["proname"] for row in rows if not row["allowed"]}
    assert {"advance_epoch", "history", "fence_table", "unfence_table", "check_fence"} <= forbidden


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("how", WRITES)
def test_it_may_read_every_table_and_write_none(
    hand: psycopg.Connection[tuple[Any, ...]], table: str, how: str
) -> None:
    hand.execute(f"SELECT * FROM pgleaderlock.{table} LIMIT 1".encode())
    refusals = (
        psycopg.errors.InsufficientPrivilege,
        psycopg.errors.WrongObjectType,  # the view is no table
        psycopg.errors.ObjectNotInPrerequisiteState,  # and nobody can write through it
    )
    with pytest.raises(refusals):
        hand.execute(WRITES[how].format(table=table, column=COLUMN.get(table, "namespace")).encode())


@pytest.mark.parametrize(
    "call",
    [
        "SELECT pgleaderlock.advance_epoch('{role}', 'pgleaderlock', 'c')",
        "CREATE TABLE pgleaderlock.mine (a integer)",
        "CREATE FUNCTION pgleaderlock.mine() RETURNS integer LANGUAGE sql AS 'SELECT 1'",
        "CREATE OR REPLACE FUNCTION pgleaderlock.fence_key(text, text) RETURNS bigint LANGUAGE sql AS 'SELECT 1'",
        "ALTER SCHEMA pgleaderlock RENAME TO mine",
        "DROP SCHEMA pgleaderlock CASCADE",
        "SELECT setval('pgleaderlock.sessions_session_id_seq', 1)",
        "SET ROLE postgres",
    ],
)
async def test_no_hand_of_it_moves_an_epoch(
    plain: str, superuser: str, hand: psycopg.Connection[tuple[Any, ...]], role: str, call: str
) -> None:
    async with LeaderElection(plain, role, **STEADY) as election:
        await opens(election, role)
    before = epochs(superuser)
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        hand.execute(call.format(role=role).encode())
    assert epochs(superuser) == before


async def test_the_functions_it_may_call_check_who_is_asking(
    plain: str, superuser: str, hand: psycopg.Connection[tuple[Any, ...]], role: str
) -> None:
    """Another session's number, a lock that is not held, another epoch: nothing of the leader's is touched."""
    keys = key_pair(role)
    bump = "SELECT outcome FROM pgleaderlock.bump(%s, ARRAY[%s], ARRAY[%s], ARRAY[%s], 0, 'c')"
    async with LeaderElection(plain, role, **PATIENT) as election:
        await opens(election, role)
        leader = one(superuser, "SELECT * FROM pgleaderlock.leaders WHERE role = %s", role)
        theirs, own = leader["session_id"], open_session(hand)
        for statement_, params in (
            ("SELECT pgleaderlock.beat(%s, '{}')", (theirs,)),
            (bump, (theirs, role, *keys)),
            ("SELECT pgleaderlock.end_term(%s, ARRAY[%s], ARRAY[1::bigint], ARRAY[true], 'released')", (theirs, role)),
            ("SELECT pgleaderlock.note_eviction(%s, %s)", (theirs, own)),
        ):
            with pytest.raises(psycopg.errors.Error) as refused:
                hand.execute(statement_.encode(), params)
            assert refused.value.sqlstate == "PGL03"
        assert hand.execute(bump.encode(), (own, role, *keys)).fetchall() == [("not_held",)]
        ended = "SELECT pgleaderlock.end_term(%s, ARRAY[%s], ARRAY[1::bigint], ARRAY[true], 'released')"
        assert hand.execute(ended.encode(), (own, role)).fetchall() == []
        hand.execute("SELECT pgleaderlock.close_session(%s)", (theirs,))
        assert one(superuser, "SELECT * FROM pgleaderlock.leaders WHERE role = %s", role) == leader
        assert one(superuser, "SELECT ended_at FROM pgleaderlock.sessions WHERE session_id = %s", theirs) == {
            "ended_at": None
        }
        assert election.gate(role).require_leader().epoch == 1


@pytest.fixture
def leads(hand: psycopg.Connection[tuple[Any, ...]], role: str) -> int:
    """The hand's own session leads the role, by the book."""
    own, keys = open_session(hand), key_pair(role)
    hand.execute("SELECT pg_advisory_lock(%s, %s)", keys)
    bump = "SELECT outcome FROM pgleaderlock.bump(%s, ARRAY[%s], ARRAY[%s], ARRAY[%s], 0, 'c')"
    assert hand.execute(bump.encode(), (own, role, *keys)).fetchall() == [("won",)]
    return own


def ask(conn: psycopg.Connection[tuple[Any, ...]], role: str, to: str | None = None) -> int:
    row = conn.execute("SELECT pgleaderlock.request_step_down(%s, 'pgleaderlock', %s, 'c')", (role, to)).fetchone()
    assert row is not None
    return int(row[0])


def request(superuser: str, request_id: int) -> dict[str, Any]:
    query = "SELECT outcome, released_at FROM pgleaderlock.requests WHERE request_id = %s"
    return one(superuser, query, request_id)


UNTOUCHED = {"outcome": None, "released_at": None}


def test_what_is_asked_of_a_leader_is_settled_and_reserved_by_nobody_else(
    plain: str, superuser: str, hand: psycopg.Connection[tuple[Any, ...]], leads: int, role: str
) -> None:
    """A session of its own is not enough."""
    asked = ask(hand, role, "ghost")
    with psycopg.connect(plain, autocommit=True) as stranger:
        own = open_session(stranger)
        stranger.execute("SELECT pgleaderlock.settle_request(%s, %s, 'done', 'all went well')", (own, asked))
        stranger.execute("SELECT pgleaderlock.finish_request(%s, %s)", (own, asked))
        stranger.execute("SELECT pgleaderlock.reserve(%s, ARRAY[%s])", (own, asked))
    assert request(superuser, asked) == UNTOUCHED
    hand.execute("SELECT pgleaderlock.settle_request(%s, %s, 'refused', NULL)", (leads, asked))
    assert request(superuser, asked)["outcome"] == "refused", "but by the leader"


def test_what_is_asked_of_a_node_is_settled_by_no_other_node(
    plain: str, superuser: str, hand: psycopg.Connection[tuple[Any, ...]], role: str
) -> None:
    own, node = open_session(hand), f"node-{role}"
    with psycopg.connect(plain, autocommit=True) as conn:
        conn.execute(
            "SELECT pgleaderlock.open_session('pgleaderlock', gen_random_uuid(), %s, 'h', 1, 'n', 6, 7, true, 'test')",
            (node,),
        )
        for kind in ("drain", "resume"):
            row = hand.execute(
                f"SELECT pgleaderlock.request_{kind}(%s, 'pgleaderlock', 'c')".encode(), (node,)
            ).fetchone()
            assert row is not None
            for outcome in ("done", "refused"):
                hand.execute("SELECT pgleaderlock.settle_request(%s, %s, %s, NULL)", (own, row[0], outcome))
            assert request(superuser, row[0]) == UNTOUCHED


@pytest.mark.parametrize("when", ["before the request", "after the request"])
def test_what_is_asked_of_a_node_is_not_settled_by_another_role_that_copies_its_name_and_instance(
    plain: str, superuser: str, role: str, when: str
) -> None:
    """A session is asked for itself: one that has the same name answers for no other."""
    node_id, stranger_role = f"node-{role}", f"stranger_{uuid.uuid4().hex[:8]}"
    with admin(superuser) as dba, contextlib.ExitStack() as stack:
        dba.execute(f"CREATE ROLE {stranger_role} LOGIN PASSWORD 'x'".encode())
        dba.execute(f"GRANT CONNECT ON DATABASE elections TO {stranger_role}".encode())
        dba.execute(statement("grants").replace(b"{role}", stranger_role.encode()))
        stack.callback(dba.execute, f"DROP ROLE {stranger_role}".encode())
        stack.callback(dba.execute, f"DROP OWNED BY {stranger_role}".encode())
        victim = stack.enter_context(ledger_node(plain, node_id))

        def ask() -> int:
            return int(victim.ask("SELECT pgleaderlock.request_drain(%s, 'pgleaderlock', 'c') AS id", node_id)["id"])

        asked = ask() if when == "after the request" else 0
        copy = stack.enter_context(ledger_node(make_conninfo(plain, user=stranger_role, password="x"), node_id))
        copy.instance = victim.instance
        copy.open()
        asked = asked or ask()
        for outcome in ("done", "refused"):
            copy.ask("SELECT pgleaderlock.settle_request(%s, %s, %s, NULL)", copy.session_id, asked, outcome)
        assert request(superuser, asked) == UNTOUCHED
        assert not victim.ask("SELECT ended_at FROM pgleaderlock.sessions WHERE session_id = %s", victim.session_id)[
            "ended_at"
        ]
        victim.ask("SELECT pgleaderlock.settle_request(%s, %s, 'done', NULL)", victim.session_id, asked)
        if when == "after the request":
            assert request(superuser, asked)["outcome"] == "done", "but by who was asked"


def test_a_role_is_reserved_once_and_for_the_last_node_that_was_named(
    superuser: str, hand: psycopg.Connection[tuple[Any, ...]], leads: int, role: str
) -> None:
    """Reserved again and again, it would have no leader for ever; for two, each would leave it to the other."""
    first, last = ask(hand, role, "one"), ask(hand, role, "two")
    reserve = "SELECT pgleaderlock.reserve(%s, ARRAY[%s, %s])"
    hand.execute(reserve.encode(), (leads, first, last))
    reserved = request(superuser, last)
    assert (request(superuser, first)["released_at"], reserved["released_at"] is None) == (None, False)
    hand.execute(reserve.encode(), (leads, first, last))
    assert request(superuser, last) == reserved


def test_who_has_given_a_role_up_reserves_it_for_nobody(
    superuser: str, hand: psycopg.Connection[tuple[Any, ...]], leads: int, role: str
) -> None:
    asked = ask(hand, role, "ghost")
    hand.execute(
        "SELECT pgleaderlock.end_term(%s, ARRAY[%s], ARRAY[1::bigint], ARRAY[true], 'released')", (leads, role)
    )
    hand.execute("SELECT pgleaderlock.reserve(%s, ARRAY[%s])", (leads, asked))
    assert request(superuser, asked) == UNTOUCHED


def test_who_has_given_a_role_up_does_not_shorten_the_wait_of_the_next(
    plain: str, superuser: str, hand: psycopg.Connection[tuple[Any, ...]], role: str
) -> None:
    """The one before it may still act: its successor waits for that, whatever is said afterwards."""
    SilentLeader(plain, role, lease_s=600.0).conn.close()
    own, keys = open_session(hand), key_pair(role)
    hand.execute("SELECT pg_advisory_lock(%s, %s)", keys)
    bump = "SELECT outcome FROM pgleaderlock.bump(%s, ARRAY[%s], ARRAY[%s], ARRAY[%s], 0, 'c')"
    assert hand.execute(bump.encode(), (own, role, *keys)).fetchall() == [("won",)]
    end = "SELECT pgleaderlock.end_term(%s, ARRAY[%s], ARRAY[2::bigint], ARRAY[false], 'released')"
    hand.execute(end.encode(), (own, role))
    hand.execute("SELECT pgleaderlock.tick(%s, ARRAY[%s], NULL)", (own, role))
    assert one(superuser, "SELECT ended, wait_t FROM pgleaderlock.leaders WHERE role = %s", role) == {
        "ended": True,
        "wait_t": 600.0,
    }


def test_a_bump_under_an_old_snapshot_is_refused(hand: psycopg.Connection[tuple[Any, ...]], role: str) -> None:
    own, keys = open_session(hand), key_pair(role)
    hand.execute("SELECT pg_advisory_lock(%s, %s)", keys)
    hand.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    with pytest.raises(psycopg.errors.Error, match="READ COMMITTED"):
        hand.execute(b"SELECT pgleaderlock.bump(%s, ARRAY[%s], ARRAY[%s], ARRAY[%s], 0, 'c')", (own, role, *keys))


def test_every_function_with_its_owners_rights_has_a_fixed_search_path(superuser: str) -> None:
    """Or a table or an operator of the caller's own could be slipped in."""
    with admin(superuser) as conn:
        rows = conn.execute(
            "SELECT proname, prosecdef, proconfig FROM pg_proc WHERE pronamespace = 'pgleaderlock'::regnamespace"
        ).fetchall()
    definers = [row for row in rows if row["prosecdef"]]
    assert len(definers) >= 10
    assert {tuple(row["proconfig"] or ()) for row in definers} == {("search_path=pg_catalog, pg_temp",)}


async def test_a_silent_session_of_another_database_role_is_not_ended(plain: str, superuser: str, role: str) -> None:
    silent = SilentLeader(superuser, role, lease_s=0.1)
    try:
        async with LeaderElection(plain, role, stale_threshold_s=0.5, **HASTY) as election:

            def silent_for_long() -> bool:
                leader = election.leader(role)
                return leader is not None and leader.stale

            await until(silent_for_long)
            silent.conn.execute("SELECT 1")
            assert holders(superuser, key_pair(role)) == [silent.conn.info.backend_pid]
            assert election.state(role) is LockState.FOLLOWER
    finally:
        silent.conn.close()
