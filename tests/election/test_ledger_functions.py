"""The ledger's sessions, call by call: what opening, beating and evicting change, and that they change nothing else.

Every claim is about all rows of all tables (`World.changed`). Quick, because it is what shows that a small mistake in
the SQL does not go unnoticed (`make mutants`); so is `test_ledger_terms.py`.
"""

import contextlib
import functools
import json
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


def test_a_session_is_told_in_which_history_it_was_opened(world: World) -> None:
    opened = world.one.ask(
        "SELECT * FROM pgleaderlock.open_session(%s, gen_random_uuid(), 'new', 'h', 1, 'new', 1, 2, true, 'test')",
        world.namespace,
    )
    here = world.one.ask("SELECT * FROM pgleaderlock.history()")
    assert {name: opened[name] for name in here} == here


def test_a_session_whose_row_somebody_holds_is_not_ended_and_nobody_waits_for_it(world: World) -> None:
    with world.held("sessions", world.one.session_id):
        assert len(world.changed(lambda: open_again(world, world.one.instance))) == 1


@pytest.mark.parametrize("history", [(77, 5), (None, 5), (77, None)], ids=str)
def test_the_first_session_of_a_history_notes_when_that_began(
    world: World, history: tuple[int | None, int | None]
) -> None:
    here = world.two.ask("SELECT * FROM pgleaderlock.history()")
    system, timeline = history[0] or here["system_identifier"], history[1] or here["timeline"]
    with world.two.conn.transaction(force_rollback=True):
        world.two.conn.execute(
            "CREATE OR REPLACE FUNCTION pgleaderlock.history(OUT system_identifier bigint, OUT timeline integer)"
            f" LANGUAGE sql AS 'SELECT {system}::bigint, {timeline}'".encode()
        )
        for _ in range(2):
            world.two.open()
        found = world.two.ask(
            "SELECT count(*) AS times, min(seen_at) > now() AS since FROM pgleaderlock.histories"
            " WHERE system_identifier = %s AND timeline = %s",
            system,
            timeline,
        )
        assert found == {"times": 1, "since": True}
        session = world.two.ask(
            "SELECT system_identifier, timeline FROM pgleaderlock.sessions WHERE session_id = %s", world.two.session_id
        )
        assert session == {"system_identifier": system, "timeline": timeline}


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


def test_a_heartbeat_tells_the_roles_that_it_has_settled_and_the_ledgers_version(world: World) -> None:
    answer = beat(world.one, "heartbeat", "s", "t", "unknown")
    version = world.one.ask("SELECT max(version) AS version FROM pgleaderlock.schema_version")["version"]
    assert (answer["settled"], answer["version"]) == (["s"], version)
    assert beat(world.one, "heartbeat")["settled"] == []


def test_a_role_whose_row_somebody_holds_is_not_settled_and_nobody_waits_for_it(world: World) -> None:
    with world.held("leaders", world.namespace, "r"):
        assert beat(world.one, "heartbeat", "r", "s")["settled"] == ["s"]
    assert beat(world.one, "heartbeat", "r")["settled"] == ["r"]


AT_EPOCH = "UPDATE pgleaderlock.requests SET epoch = %s WHERE request_id = %s"


def test_a_step_down_is_told_to_the_term_that_it_was_asked_of_and_is_over_with_it(world: World) -> None:
    old, current, unknown, later = (world.ask_step_down("r") for _ in range(4))
    anothers, done = world.ask_step_down("t"), world.ask_step_down("r")
    elsewhere = world.ask_step_down("r", namespace=world.elsewhere)
    world.one.ask(SETTLE, world.one.session_id, done, "refused", "no")
    for request, epoch in ((old, 1), (unknown, None), (later, 3), (anothers, 1), (done, 1), (elsewhere, 1)):
        world.write(AT_EPOCH, epoch, request)
    told: list[dict[str, Any]] = []
    assert world.changed(lambda: told.append(beat(world.one, "heartbeat")), beats=world.one) == {
        ("requests", old): {"done_at": ANY, "outcome": "done", "detail": "the term that was asked for has ended"},
    }
    assert [request["request_id"] for request in told[0]["requests"]] == [current, unknown]
    world.write(AT_EPOCH, 1, current)
    with world.held("requests", current):
        assert world.changed(lambda: beat(world.one, "heartbeat"), beats=world.one) == {}
    world.one.end_term("r", 2, clean=True)
    assert world.changed(lambda: beat(world.one, "heartbeat"), beats=world.one) == {}, "it leads it no more"


def test_a_request_to_a_node_is_no_step_down_whatever_its_row_says(world: World) -> None:
    drain = world.ask_node("drain", "one")
    world.write("UPDATE pgleaderlock.requests SET role = 'r', epoch = 1 WHERE request_id = %s", drain)
    assert world.changed(lambda: beat(world.one, "heartbeat"), beats=world.one) == {}


# --- Who lives


def is_(world: World, what: str, node: LedgerNode) -> bool:
    query = f"SELECT pgleaderlock.{what}(s) AS so FROM pgleaderlock.sessions s WHERE s.session_id = %s"
    return bool(world.two.ask(query, node.session_id)["so"])


@pytest.mark.parametrize(
    ("change", "there", "live"),
    [
        ("beat = beat", True, True),
        ("backend_start = '-infinity'", True, True),
        ("backend_start = backend_start - interval '1 day'", False, False),
        ("backend_pid = 0", False, False),
        ("ended_at = clock_timestamp()", True, False),
        ("last_heartbeat = last_heartbeat - make_interval(secs => 1.9 * lease_s)", True, True),
        ("last_heartbeat = last_heartbeat - make_interval(secs => 2.1 * lease_s)", True, False),
    ],
)
def test_a_session_lives_by_its_record_and_by_its_backend(world: World, change: str, there: bool, live: bool) -> None:
    world.write(f"UPDATE pgleaderlock.sessions SET {change} WHERE session_id = %s", world.one.session_id)
    assert (is_(world, "is_there", world.one), is_(world, "is_live", world.one)) == (there, live)
    assert is_(world, "is_live", world.stranger)
    asked = world.ask_node("drain", "one")
    assert bool(asked) is live
    assert bool(beat(world.stranger, "heartbeat")["requests"]) is False


def test_a_backend_of_another_database_is_not_there(world: World) -> None:
    """A dump that was restored beside its original has the original's records."""
    other = world.hand(make_conninfo(world.dsn, dbname="postgres"))
    same = "UPDATE pgleaderlock.sessions SET backend_pid = %s, backend_start = '-infinity' WHERE session_id = %s"
    world.write(same, other.info.backend_pid, world.one.session_id)
    assert not is_(world, "is_there", world.one)


@pytest.mark.parametrize("change", ["candidate = false", "draining = true", "ended_at = clock_timestamp()"])
def test_a_node_that_does_not_compete_is_no_candidate(world: World, change: str) -> None:
    ask = "SELECT pgleaderlock.is_live_candidate(%s, %s) AS so"
    assert world.two.ask(ask, world.namespace, "one")["so"]
    world.write(f"UPDATE pgleaderlock.sessions SET {change} WHERE session_id = %s", world.one.session_id)
    assert not world.two.ask(ask, world.namespace, "one")["so"], "neither for the node two nor the one elsewhere"
    assert world.two.ask(ask, world.elsewhere, "one")["so"]
    assert world.two.ask(ask, world.namespace, "two")["so"]


# --- What is asked from afar


SETTLE = "SELECT pgleaderlock.settle_request(%s, %s, %s, %s)"


def targets(world: World, request_id: int) -> set[int]:
    query = "SELECT t FROM pgleaderlock.requests r, pgleaderlock.request_targets(r) t WHERE r.request_id = %s"
    return {row["t"] for row in world.two.conn.execute(query, (request_id,)).fetchall()}


def test_a_request_to_step_down_names_the_term_and_leaves_its_trace(world: World) -> None:
    made: list[int] = []
    changes = world.changed(lambda: made.append(world.ask_step_down("r", "two")))
    (request,) = changes.values()
    assert set(changes) == {("requests", made[0])}
    assert (request["kind"], request["namespace"], request["role"], request["epoch"], request["to_node_id"]) == (
        "step_down", world.namespace, "r", 2, "two",
    )  # fmt: skip
    common = {"kind": "step_down_requested", "namespace": world.namespace, "role": "r", "node_id": None, "epoch": None}
    assert world.events(lambda: world.ask_step_down("r", "two")) == [
        {**common, "detail": "by postgres, in favour of two"}
    ]
    assert world.events(lambda: world.ask_step_down("r")) == [{**common, "detail": "by postgres"}]


@pytest.mark.parametrize("role", ["r", "unknown"])
def test_what_nobody_leads_nobody_is_asked_to_give_up(world: World, role: str) -> None:
    world.one.end_term("r", 2, clean=True)
    assert world.changed(lambda: world.ask_step_down(role)) == {}
    assert world.events(lambda: world.ask_step_down(role)) == []


def test_a_request_to_a_node_names_its_live_sessions_and_leaves_its_trace(world: World) -> None:
    second, dead = world.node("one"), world.node("one")
    world.write("UPDATE pgleaderlock.sessions SET ended_at = clock_timestamp() WHERE session_id = %s", dead.session_id)
    made: list[int] = []
    changes = world.changed(lambda: made.append(world.ask_node("drain", "one")))
    (request,) = changes.values()
    assert set(changes) == {("requests", made[0])}
    assert (request["kind"], request["namespace"], request["node_id"], sorted(request["sessions"])) == (
        "drain", world.namespace, "one", [world.one.session_id, second.session_id],
    )  # fmt: skip
    common = {"namespace": world.namespace, "role": None, "node_id": "one", "epoch": None, "detail": "by postgres"}
    assert world.events(lambda: world.ask_node("resume", "one")) == [{**common, "kind": "resume_requested"}]
    assert world.changed(lambda: world.ask_node("drain", "unknown")) == {}
    assert world.events(lambda: world.ask_node("drain", "unknown")) == []


def test_a_request_is_for_the_sessions_that_it_names_and_what_their_processes_open_later(world: World) -> None:
    named = world.ask_node("drain", "one")
    assert targets(world, named) == {world.one.session_id}
    successor = world.node("one")
    assert targets(world, named) == {world.one.session_id}
    copied = "UPDATE pgleaderlock.sessions SET instance = %s, database_role = %s WHERE session_id = %s"
    world.write(copied, world.one.instance, "somebody", successor.session_id)
    assert targets(world, named) == {world.one.session_id}, "the instance alone can be copied"
    world.write(copied, world.one.instance, "postgres", successor.session_id)
    assert targets(world, named) == {world.one.session_id, successor.session_id}
    world.write(
        "UPDATE pgleaderlock.sessions SET ended_at = clock_timestamp() WHERE session_id = %s", world.one.session_id
    )
    assert targets(world, named) == {successor.session_id}
    for change in ("node_id = 'other'", "namespace = 'other'"):
        with world.two.conn.transaction(force_rollback=True):
            query = f"UPDATE pgleaderlock.sessions SET {change} WHERE session_id = %s"
            world.two.conn.execute(query.encode(), (successor.session_id,))
            assert targets(world, named) == set(), change


def test_a_request_from_before_version_4_is_for_the_processes_of_its_time(world: World) -> None:
    asked = world.ask_node("drain", "one")
    world.write("UPDATE pgleaderlock.requests SET sessions = NULL WHERE request_id = %s", asked)
    world.node("one")
    assert targets(world, asked) == {world.one.session_id}


def test_a_step_down_is_answered_by_the_session_that_leads_the_role_or_led_it_last(world: World) -> None:
    asked = world.ask_step_down("r")

    def settle(node: LedgerNode, outcome: str = "done", session_id: int | None = None) -> None:
        node.ask(SETTLE, session_id or node.session_id, asked, outcome, "so")

    for wrong in (
        lambda: settle(world.two),
        lambda: settle(world.stranger),
        lambda: settle(world.two, session_id=world.one.session_id),
        lambda: settle(world.one, "expired"),
    ):
        assert world.changed(wrong) == {}
    with world.held("requests", asked):
        assert world.changed(lambda: settle(world.one)) == {}
    world.ask_step_down("s")
    world.one.end_term("r", 2, clean=True)
    assert world.changed(lambda: settle(world.one)) == {
        ("requests", asked): {"done_at": ANY, "outcome": "done", "detail": "so"}
    }
    assert world.changed(lambda: settle(world.one, "refused")) == {}, "once"


def test_a_session_that_has_ended_answers_nothing(world: World) -> None:
    asked = world.ask_step_down("r")
    world.one.ask("SELECT pgleaderlock.close_session(%s)", world.one.session_id)
    assert world.changed(lambda: world.one.ask(SETTLE, world.one.session_id, asked, "done", None)) == {}


@pytest.mark.parametrize(
    ("first", "last", "outcome"),
    [("done", "done", "done"), ("refused", "done", "refused"), ("done", "refused", "refused")],
)
def test_what_was_asked_of_a_node_is_settled_when_the_last_of_its_sessions_has_answered(
    world: World, first: str, last: str, outcome: str
) -> None:
    second = world.node("one")
    world.ask_node("resume", "two")
    asked = world.ask_node("drain", "one")
    late = world.node("one")
    assert world.changed(lambda: late.ask(SETTLE, late.session_id, asked, "done", "not asked")) == {}
    assert world.changed(lambda: world.one.ask(SETTLE, world.one.session_id, asked, first, "one")) == {
        ("requests", asked): {"answers": {str(world.one.session_id): first}}
    }
    assert world.changed(lambda: second.ask(SETTLE, second.session_id, asked, last, "two")) == {
        ("requests", asked): {
            "answers": {str(world.one.session_id): first, str(second.session_id): last},
            "done_at": ANY,
            "outcome": outcome,
            "detail": "two",
        }
    }


RESERVE = "SELECT pgleaderlock.reserve(%s, %s)"


def test_of_several_wishes_for_a_role_the_last_one_is_reserved_and_by_its_leader_alone(world: World) -> None:
    early, late, unasked = (world.ask_step_down("r", "two") for _ in range(3))
    other, anothers = world.ask_step_down("s", "two"), world.ask_step_down("t", "one")
    done = world.ask_step_down("s", "two")
    elsewhere = world.ask_step_down("r", "two", namespace=world.elsewhere)
    asked = [early, late, other, anothers, elsewhere]
    assert world.changed(lambda: world.two.ask(RESERVE, world.one.session_id, asked)) == {}
    with world.held("requests", late):
        assert set(world.changed(lambda: world.one.ask(RESERVE, world.one.session_id, asked))) == {("requests", other)}
    assert world.changed(lambda: world.one.ask(RESERVE, world.one.session_id, asked)) == {
        ("requests", late): {"released_at": ANY}
    }, "the other one is as it was"
    world.one.ask(SETTLE, world.one.session_id, done, "refused", None)
    assert world.changed(lambda: world.one.ask(RESERVE, world.one.session_id, [done])) == {}
    world.one.end_term("r", 2, clean=True)
    assert world.changed(lambda: world.one.ask(RESERVE, world.one.session_id, [unasked])) == {}
    world.one.ask("SELECT pgleaderlock.close_session(%s)", world.one.session_id)
    more = world.ask_step_down("s", "two")
    assert world.changed(lambda: world.one.ask(RESERVE, world.one.session_id, [more])) == {}


# --- A lock is free: who is woken


def wake(world: World, except_: str | None = None) -> list[Any]:
    """The hints that it leaves for its caller."""
    with world.two.conn.transaction():
        world.two.ask("SELECT pgleaderlock.lock_wake('lock', %s)", except_)
        noted = world.two.ask("SELECT current_setting('pgleaderlock.hints', true) AS hints")["hints"]
    return [json.loads(line) for line in (noted or "").splitlines()]


@pytest.fixture
def waiters(world: World) -> World:
    """`gone` has died, `late` waits no longer, `first` is the first of the rest; `other` waits for another lock."""
    for table in ("lock_waiters", "lock_servers"):
        world.write(f"DELETE FROM pgleaderlock.{table}")
    for server, alive_s in (("gone", -60), ("late", 60), ("first", 60), ("second", 60), ("other", 60)):
        world.write(
            "INSERT INTO pgleaderlock.lock_servers VALUES (%s, clock_timestamp() + make_interval(secs => %s))",
            server,
            alive_s,
        )
    for lock, server, left_s in (
        ("other", "other", 60),
        ("lock", "gone", 60),
        ("lock", "late", -60),
        ("lock", "first", 60),
        ("lock", "second", 60),
    ):
        world.write(
            "INSERT INTO pgleaderlock.lock_waiters (lock_name, owner_id, ttl_ms, server_id, waiter, deadline)"
            " VALUES (%s, 'o', 1, %s, 1, clock_timestamp() + make_interval(secs => %s))",
            lock,
            server,
            left_s,
        )
    return world


def test_the_server_of_the_first_waiter_that_lives_and_still_waits_is_woken(waiters: World) -> None:
    assert wake(waiters) == wake(waiters, "second") == [["first", "lock"]]
    assert wake(waiters, "first") == []
    assert waiters.two.ask("SELECT current_setting('pgleaderlock.hints', true) AS h")["h"] in (None, "")
    waiters.write("DELETE FROM pgleaderlock.lock_waiters WHERE server_id IN ('first', 'second')")
    assert wake(waiters) == wake(waiters, "first") == []


# --- A silent session was ended


def note(world: World, session_id: int) -> None:
    world.two.ask("SELECT pgleaderlock.note_eviction(%s, %s)", world.two.session_id, session_id)


def test_the_eviction_of_a_session_that_the_ledger_no_longer_knows_is_not_noted(world: World) -> None:
    assert world.changed(lambda: note(world, -1)) == {}


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


async def test_what_somebody_holds_of_a_session_that_was_ended_is_left_to_that_one(world: World) -> None:
    await world.die(world.one)
    note_it = functools.partial(note, world, world.one.session_id)
    with world.held("terms", world.namespace, "r", 2):
        changes = world.changed(note_it)
    assert set(changes) == {("sessions", world.one.session_id), ("terms", world.namespace, "s", 2)}
    assert set(world.changed(note_it)) == {("terms", world.namespace, "r", 2)}


async def test_a_session_that_was_ended_and_whose_row_somebody_holds_keeps_it(world: World) -> None:
    await world.die(world.one)
    with world.held("sessions", world.one.session_id):
        changes = world.changed(lambda: note(world, world.one.session_id))
    assert set(changes) == {("terms", world.namespace, role, 2) for role in "rs"}
