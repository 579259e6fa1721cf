"""The ledger's sessions, call by call: what opening, beating and evicting change, and that they change nothing else.

Every claim is about all rows of all tables (`World.changed`). Quick, because it is what shows that a small mistake in
the SQL does not go unnoticed (`make mutants`); so is `test_ledger_terms.py`.
"""

import contextlib
import uuid
from collections.abc import Iterator
from typing import Any
from unittest.mock import ANY

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgleaderlock.embedded import EmbeddedPostgres
from pgleaderlock.keys import key_pair
from support.elections import fresh_database, ledger_dsns, until
from support.ledger_node import LedgerNode
from support.ledger_world import LEASE_S, World

REFUSED = "PGL03"


@pytest.fixture(scope="module")
def ledger(postgres: EmbeddedPostgres) -> Iterator[str]:
    with fresh_database(postgres.dsn, ledger=True) as dsn:
        yield dsn


@pytest.fixture
def world(ledger: str, nothing_left: None) -> Iterator[World]:
    with contextlib.ExitStack() as nodes:
        yield World(ledger, nodes)


# --- A session is opened


def open_again(world: World, instance: uuid.UUID, dsn: str | None = None) -> int:
    row = (
        world.hand(dsn)
        .execute(
            "SELECT session_id FROM pgleaderlock.open_session(%s, %s, 'one', 'h', 1, 'again', 1, 2, true, 'test')",
            (world.namespace, instance),
        )
        .fetchone()
    )
    assert row is not None
    return int(row["session_id"])


def test_a_process_that_connects_again_ends_its_earlier_session_and_no_other(world: World) -> None:
    before = world.rows()
    changes = world.changed(lambda: open_again(world, world.one.instance))
    new = changes.pop(max(changes))
    assert (new["namespace"], new["instance"], new["candidate"], new["beat"]) == (
        world.namespace,
        str(world.one.instance),
        True,
        1,
    )
    assert changes == {("sessions", world.one.session_id): {"ended_at": ANY}}
    again = {"kind", "namespace", "node_id"}
    new_events = [row for key, row in world.rows().items() if key[0] == "events" and key not in before]
    assert [{name: row[name] for name in again} for row in sorted(new_events, key=lambda row: row["event_id"])] == [
        {"kind": "session_ended", "namespace": world.namespace, "node_id": "one"},
        {"kind": "session_opened", "namespace": world.namespace, "node_id": "one"},
    ]
    assert open_again(world, world.one.instance) > max(key[1] for key in before if key[0] == "sessions")


def test_what_has_ended_stays_ended_as_it_was(world: World) -> None:
    open_again(world, world.one.instance)
    second = world.rows()
    changes = world.changed(lambda: open_again(world, world.one.instance))
    assert ("sessions", world.one.session_id) not in changes
    assert len(changes) == 2, second.keys()


def test_a_session_of_another_database_role_is_not_ended_by_who_says_the_same_instance(world: World, dsn: str) -> None:
    plain = make_conninfo(ledger_dsns(dsn)["plain"], dbname=str(conninfo_to_dict(world.dsn)["dbname"]))
    world.write("GRANT USAGE ON SCHEMA pgleaderlock TO election_plain")
    world.write("GRANT EXECUTE ON FUNCTION pgleaderlock.open_session TO election_plain")
    changes = world.changed(lambda: open_again(world, world.one.instance, plain))
    assert len(changes) == 1


def test_a_backend_that_is_used_anew_serves_nobody_else(world: World) -> None:
    changes = world.changed(
        lambda: world.one.ask(
            "SELECT * FROM pgleaderlock.open_session(%s, gen_random_uuid(), 'new', 'h', 1, 'new', 1, 2, true, 'test')",
            world.namespace,
        )
    )
    del changes[max(changes)]
    assert changes == {("sessions", world.one.session_id): {"ended_at": ANY}}


# --- Who is asked, and who asks


def calls(node: LedgerNode, session_id: int) -> dict[str, tuple[str, tuple[object, ...]]]:
    keys = [[key] for key in key_pair("r", node.namespace)]
    return {
        "beat": ("SELECT pgleaderlock.beat(%s, '{}')", (session_id,)),
        "heartbeat": ("SELECT pgleaderlock.heartbeat(%s, '{}', true)", (session_id,)),
        "tick": ("SELECT pgleaderlock.tick(%s, '{}', true)", (session_id,)),
        "bump": ("SELECT pgleaderlock.bump(%s, '{r}', %s, %s, 0, 'c')", (session_id, *keys)),
        "end_term": ("SELECT pgleaderlock.end_term(%s, '{r}', '{2}', '{t}', 'released')", (session_id,)),
        "note_eviction": ("SELECT pgleaderlock.note_eviction(%s, -1)", (session_id,)),
    }


@pytest.mark.parametrize("name", ["beat", "heartbeat", "tick", "bump", "end_term", "note_eviction"])
def test_a_session_that_is_anothers_or_over_is_refused(world: World, name: str) -> None:
    def refused(node: LedgerNode, session_id: int) -> None:
        query, params = calls(node, session_id)[name]
        with pytest.raises(psycopg.Error) as error:
            node.conn.execute(query.encode(), params)
        assert error.value.sqlstate == REFUSED

    assert world.changed(lambda: refused(world.two, world.one.session_id)) == {}
    assert world.changed(lambda: refused(world.one, -1)) == {}
    world.one.ask("SELECT pgleaderlock.close_session(%s)", world.one.session_id)
    assert world.changed(lambda: refused(world.one, world.one.session_id)) == {}


# --- A heartbeat: `heartbeat`, `tick` for libraries of the third version, and `beat` for those of the second


def beat(node: LedgerNode, name: str, *settled: str) -> dict[str, Any]:
    if name == "heartbeat":
        return node.ask("SELECT * FROM pgleaderlock.heartbeat(%s, %s, NULL)", node.session_id, list(settled))
    if name == "tick":
        return node.tick(*settled)
    return node.ask("SELECT * FROM pgleaderlock.beat(%s, %s)", node.session_id, list(settled))


both = pytest.mark.parametrize("name", ["heartbeat", "tick", "beat"])


@both
def test_a_heartbeat_counts_for_its_own_session_alone(world: World, name: str) -> None:
    answers: list[dict[str, Any]] = []
    assert world.changed(lambda: answers.append(beat(world.one, name)), beats=world.one) == {}
    assert answers[0]["beat"] == world.rows()["sessions", world.one.session_id]["beat"]


@both
def test_a_heartbeat_settles_only_the_roles_that_it_names(world: World, name: str) -> None:
    for role in ("r", "s"):
        world.write("UPDATE pgleaderlock.leaders SET wait_t = 7000 WHERE role = %s", role)
    assert world.changed(lambda: beat(world.one, name, "r", "t"), beats=world.one) == {
        ("leaders", world.namespace, "r"): {"wait_t": LEASE_S},
    }


@both
def test_a_term_that_has_ended_is_settled_by_nobody(world: World, name: str) -> None:
    world.write("UPDATE pgleaderlock.leaders SET wait_t = 7000")
    world.one.end_term("r", 2, clean=False)
    assert world.changed(lambda: beat(world.one, name, "r"), beats=world.one) == {}


@both
def test_a_heartbeat_says_what_the_session_leads_and_the_sum_of_its_epochs(world: World, name: str) -> None:
    answer = beat(world.one, name)
    assert (answer["roles"], answer["epochs"]) == (2, 4)
    world.one.end_term("s", 2, clean=True)
    answer = beat(world.one, name)
    assert (answer["roles"], answer["epochs"]) == (1, 2)
    world.one.end_term("r", 2, clean=True)
    answer = beat(world.one, name)
    assert (answer["roles"], answer["epochs"]) == (0, 0)


@both
def test_a_leader_hears_what_is_asked_of_its_own_terms_and_of_nobody_elses(world: World, name: str) -> None:
    asked = world.ask_step_down("r")
    world.ask_step_down("t")
    world.ask_step_down("r", namespace=world.elsewhere)
    done = world.ask_step_down("s")
    world.one.ask("SELECT pgleaderlock.settle_request(%s, %s, 'refused', NULL)", world.one.session_id, done)
    requests = beat(world.one, name)["requests"]
    assert [(request["request_id"], request["role"]) for request in requests] == [(asked, "r")]
    world.one.end_term("r", 2, clean=True)
    assert beat(world.one, name)["requests"] is None


def test_only_a_request_to_step_down_is_told_to_a_library_of_the_second_version(world: World) -> None:
    """The kinds that it does not know are about a node, and never about a role."""
    world.ask_node("drain", "one")
    assert beat(world.one, "beat")["requests"] is None


async def test_a_request_is_told_with_the_node_that_is_to_lead_next_and_whether_it_lives(world: World) -> None:
    dead = world.node("dead")
    pid = dead.conn.info.backend_pid
    dead.conn.close()
    await until(lambda: not world.runs(pid), "its backend ends")
    for to in ("two", "dead", None):
        world.ask_step_down("r", to)
    told = world.one.tick()["requests"]
    assert [(request["kind"], request["to_node_id"], request["to_is_live"]) for request in told] == [
        ("step_down", "two", True),
        ("step_down", "dead", False),
        ("step_down", None, False),
    ]


def test_a_node_hears_what_is_asked_of_it_and_each_of_its_sessions_does(world: World) -> None:
    neighbour = world.node("three", namespace=world.elsewhere)
    neighbour.lead("q")
    world.ask_step_down("q", namespace=world.elsewhere)  # so that a node there looks at requests at all
    drain = world.ask_node("drain", "one")
    assert [request["request_id"] for request in world.one.tick()["requests"]] == [drain]
    assert world.two.tick()["requests"] is None
    assert world.stranger.tick()["requests"] is None
    resume = world.ask_node("resume", "one")
    assert [request["request_id"] for request in world.one.tick()["requests"]] == [drain, resume], "in their order"


def test_what_a_node_was_asked_is_for_the_process_of_then_in_whatever_session(world: World) -> None:
    drain = world.ask_node("drain", "one")
    successor = world.node("one")
    assert successor.tick()["requests"] is None
    session_id = open_again(world, world.one.instance)
    world.write(
        "UPDATE pgleaderlock.sessions SET backend_pid = %s WHERE session_id = %s",
        successor.conn.info.backend_pid,
        session_id,
    )
    told = successor.ask("SELECT * FROM pgleaderlock.tick(%s, '{}', NULL)", session_id)["requests"]
    assert [request["request_id"] for request in told] == [drain]


@pytest.mark.parametrize("decided", [True, False])
def test_a_node_records_whether_it_drains_and_leaves_it_when_it_has_not_decided(world: World, decided: bool) -> None:
    tick = "SELECT * FROM pgleaderlock.tick(%s, '{}', %s)"
    world.write(
        "UPDATE pgleaderlock.sessions SET draining = %s WHERE session_id = %s", not decided, world.one.session_id
    )
    assert world.one.ask(tick, world.one.session_id, None)["draining"] is not decided
    answers: list[dict[str, Any]] = []
    changes = world.changed(lambda: answers.append(world.one.ask(tick, world.one.session_id, decided)), beats=world.one)
    assert changes == {("sessions", world.one.session_id): {"draining": decided}}
    assert answers[0]["draining"] is decided


def test_a_request_that_is_too_old_is_over_and_told_to_nobody(world: World) -> None:
    old, young, done = world.ask_step_down("r"), world.ask_step_down("s"), world.ask_step_down("s")
    theirs = world.ask_step_down("r", namespace=world.elsewhere)
    world.one.ask("SELECT pgleaderlock.settle_request(%s, %s, 'refused', NULL)", world.one.session_id, done)
    age = "UPDATE pgleaderlock.requests SET at = at - %s::interval WHERE request_id = %s"
    for request, minutes in ((old, 6), (young, 4), (done, 6), (theirs, 6)):
        world.write(age, f"{minutes} minutes", request)
    told: list[dict[str, Any]] = []
    assert world.changed(lambda: told.append(world.one.tick()), beats=world.one) == {
        ("requests", old): {"done_at": ANY, "outcome": "expired", "detail": "nobody has done it within 5 minutes"},
    }
    assert [request["request_id"] for request in told[0]["requests"]] == [young]


def test_a_heartbeat_waits_for_nobody_who_is_at_an_old_request(world: World) -> None:
    old = world.ask_step_down("t")
    world.write("UPDATE pgleaderlock.requests SET at = at - interval '6 minutes' WHERE request_id = %s", old)
    other = world.hand()
    world.one.conn.execute("SET lock_timeout = '2s'")
    with other.transaction():
        other.execute("SELECT FROM pgleaderlock.requests WHERE request_id = %s FOR UPDATE", (old,))
        assert world.changed(world.one.tick, beats=world.one) == {}


# --- A silent session was ended


def note(world: World, session_id: int) -> None:
    world.two.ask("SELECT pgleaderlock.note_eviction(%s, %s)", world.two.session_id, session_id)


def test_a_session_whose_backend_runs_was_not_ended_whoever_says_so(world: World) -> None:
    def refused() -> None:
        with pytest.raises(psycopg.Error) as error:
            note(world, world.one.session_id)
        assert error.value.sqlstate == REFUSED

    assert world.changed(refused) == {}


def test_a_backend_whose_start_is_hidden_from_the_ledgers_owner_counts_as_running(world: World, dsn: str) -> None:
    ledger_dsns(dsn)  # makes the plain role
    with world.two.conn.transaction(force_rollback=True):
        for grant in (
            "GRANT USAGE, CREATE ON SCHEMA pgleaderlock TO election_plain",
            "ALTER FUNCTION pgleaderlock.is_there OWNER TO election_plain",
        ):
            world.two.conn.execute(grant.encode())
        with pytest.raises(psycopg.Error) as error:
            note(world, world.one.session_id)
        assert error.value.sqlstate == REFUSED


async def test_the_terms_of_a_session_that_was_ended_end_with_its_last_sign_of_life(world: World) -> None:
    pid = world.one.conn.info.backend_pid
    world.one.tick()
    last = world.rows()["sessions", world.one.session_id]["last_heartbeat"]
    world.one.end_term("s", 2, clean=True)
    world.one.conn.close()
    await until(lambda: not world.runs(pid), "its backend ends")
    assert world.changed(lambda: note(world, world.one.session_id)) == {
        ("sessions", world.one.session_id): {"ended_at": ANY},
        ("terms", world.namespace, "r", 2): {"ended_at": last, "reason": "evicted"},
    }
    assert world.changed(lambda: note(world, world.one.session_id)) == {}, "what has ended stays as it ended"
    assert world.events(lambda: note(world, world.one.session_id)) == [
        {
            "kind": "evicted",
            "namespace": world.namespace,
            "role": None,
            "node_id": "one",
            "epoch": None,
            "detail": f"silent session {world.one.session_id} ended by two",
        }
    ]


async def test_of_several_sessions_that_were_ended_each_has_its_own_last_sign_of_life(world: World) -> None:
    for node in (world.one, world.stranger):
        pid = node.conn.info.backend_pid
        node.tick()
        node.conn.close()
        await until(lambda pid=pid: not world.runs(pid), "its backend ends")  # type: ignore[misc]
        note(world, node.session_id)
        rows = world.rows()
        last = rows["sessions", node.session_id]["last_heartbeat"]
        assert rows["terms", node.namespace, "r", 2]["ended_at"] == last


def test_a_backend_that_only_has_the_pid_of_the_ended_one_is_another(world: World) -> None:
    other = "UPDATE pgleaderlock.sessions SET backend_start = backend_start - interval '1 day' WHERE session_id = %s"
    world.write(other, world.one.session_id)
    changes = world.changed(lambda: note(world, world.one.session_id))
    assert {key for key in changes if key[0] == "sessions"} == {("sessions", world.one.session_id)}
