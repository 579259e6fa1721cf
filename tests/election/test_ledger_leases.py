"""The ledger's leases, call by call: what opening, beating and ending change, and that they change nothing else.

Quick, for the same reason as `test_ledger_functions.py`. No election and no pooler: leases that are played by hand,
beside the sessions of `World`.
"""

import contextlib
import uuid
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import ANY

import psycopg
import pytest
from psycopg import IsolationLevel
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgleaderlock.embedded import EmbeddedPostgres
from pgleaderlock.keys import key_pair
from support.elections import fresh_database, ledger_dsns
from support.ledger_leases import Leases, exclusive, lock, locks
from support.ledger_node import LedgerNode

REFUSED, OVER, TOO_LATE = "PGL03", "PGL06", "PGL07"
KEYS = (11, 25)


@pytest.fixture(scope="module")
def ledger(postgres: EmbeddedPostgres) -> Iterator[str]:
    with fresh_database(postgres.dsn, ledger=True) as dsn:
        yield dsn


@pytest.fixture
def world(ledger: str, nothing_left: None) -> Iterator[Leases]:
    with contextlib.ExitStack() as nodes:
        yield Leases(ledger, nodes)


def refused(node: LedgerNode, query: str, *params: object) -> str | None:
    with pytest.raises(psycopg.Error) as error:
        node.ask(query, *params)
    return error.value.sqlstate


BEGIN = "SELECT pgleaderlock.lease_begin(%s, %s, %s)"
OPEN = "SELECT * FROM pgleaderlock.lease_open(%s, %s, %s, %s, 'new', 'h', 7, 'new-h', 1, 2, true, 'test', false)"


# --- What a message depends on


def begins(world: Leases, conn: psycopg.Connection[dict[str, Any]]) -> None:
    conn.execute(BEGIN, (world.lea.session_id, world.lea.key, world.lea.number + 1))


def opens(world: Leases, conn: psycopg.Connection[dict[str, Any]]) -> None:
    conn.execute(OPEN.encode(), (world.namespace, uuid.uuid4(), uuid.uuid4(), None))


both = pytest.mark.parametrize("call", [begins, opens])


@both
@pytest.mark.parametrize("level", [IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE])
def test_a_message_above_read_committed_is_refused_and_changes_nothing(
    world: Leases, call: Callable[..., None], level: IsolationLevel
) -> None:
    hand = world.hand()
    hand.isolation_level = level

    def act() -> None:
        with pytest.raises(psycopg.Error) as error, hand.transaction():
            call(world, hand)
        assert error.value.sqlstate == REFUSED

    assert world.changed(act) == {}


@both
@pytest.mark.parametrize(("was", "becomes"), [("off", "on"), ("local", "local"), ("on", "on")])
def test_what_a_message_depends_on_is_set_until_its_commit_and_no_longer(
    world: Leases, call: Callable[..., None], was: str, becomes: str
) -> None:
    """The commit is on disk, a cancelled wait for a standby is told, and no lock is waited for without a bound."""
    names = ("synchronous_commit", "client_min_messages", "lock_timeout")
    hand = world.hand()

    def settings() -> list[Any]:
        return [next(iter((hand.execute(f"SHOW {name}".encode()).fetchone() or {}).values())) for name in names]

    for name, value in zip(names, (was, "error", "0"), strict=True):
        hand.execute("SELECT set_config(%s, %s, false)", (name, value))
    with hand.transaction():
        call(world, hand)
        assert settings() == [becomes, "warning", "1s"]
    assert settings() == [was, "error", "0"]


# --- A lease is opened


def opened(world: Leases, previous: int | None = None, **other: Any) -> dict[str, Any]:
    conn = other.get("conn", world.two.conn)
    asked = (world.namespace, other.get("instance", world.lea.instance), other.get("key", uuid.uuid4()), previous)
    (row,) = conn.execute(OPEN.encode(), asked).fetchall()
    return dict(row)


def test_a_lease_is_recorded_once_however_often_its_message_comes(world: Leases) -> None:
    key = uuid.uuid4()
    answers: list[dict[str, Any]] = []
    changes = world.changed(lambda: answers.append(opened(world, key=key)))
    (((_, session_id), row),) = changes.items()
    assert answers[0] == {"session_id": session_id} | world.two.ask("SELECT * FROM pgleaderlock.history()")
    assert (row["namespace"], row["instance"], row["node_id"]) == (world.namespace, str(world.lea.instance), "new")
    assert (row["hold"], row["backend_pid"], row["beat"], row["number"], row["ended_at"]) == ("lease", 0, ANY, 0, None)
    assert (row["gate_s"], row["lease_s"], row["candidate"], row["draining"]) == (1, 2, True, False)
    assert str(key).replace("-", "") not in str(row).replace("-", ""), "who reads the table cannot act as the lease"
    assert world.events(lambda: answers.append(opened(world, key=key))) == []
    assert world.changed(lambda: answers.append(opened(world, key=key))) == {}
    assert answers[1:] == answers[:1] * 2


def test_the_lease_that_a_process_has_lost_ends_with_the_opening_of_the_next_one(world: Leases) -> None:
    changes = world.changed(lambda: opened(world, world.lea.session_id))
    del changes[max(changes)]
    assert changes == {("sessions", world.lea.session_id): {"ended_at": ANY}}
    common = {"namespace": world.namespace, "role": None, "epoch": None}
    assert world.events(lambda: opened(world, world.lou.session_id, instance=world.lou.instance)) == [
        {**common, "kind": "session_ended", "node_id": "lou", "detail": f"lease {world.lou.session_id} was lost"},
        {**common, "kind": "session_opened", "node_id": "new", "detail": ANY},
    ]


@pytest.mark.parametrize(
    "why", ["nothing was lost", "another process", "another database role", "a session", "one that has ended"]
)
def test_no_other_lease_ends_with_an_opening(world: Leases, dsn: str, why: str) -> None:
    other: dict[str, Any] = {}
    previous: int | None = world.lea.session_id
    if why == "nothing was lost":
        previous = None
    elif why == "another process":
        other["instance"] = world.lou.instance
    elif why == "another database role":
        plain = make_conninfo(ledger_dsns(dsn)["plain"], dbname=str(conninfo_to_dict(world.dsn)["dbname"]))
        world.write("GRANT USAGE ON SCHEMA pgleaderlock TO election_plain")
        world.write("GRANT EXECUTE ON FUNCTION pgleaderlock.lease_open TO election_plain")
        other["conn"] = world.hand(plain)
    elif why == "a session":
        previous, other["instance"] = world.one.session_id, world.one.instance
    else:
        world.end(world.lea)
    assert len(world.changed(lambda: opened(world, previous, **other))) == 1, "the new one alone"


def test_the_first_lease_of_a_history_notes_when_that_began(world: Leases) -> None:
    with world.two.conn.transaction(force_rollback=True):
        world.two.conn.execute(
            "CREATE OR REPLACE FUNCTION pgleaderlock.history(OUT system_identifier bigint, OUT timeline integer)"
            " LANGUAGE sql AS 'SELECT 77::bigint, 5'"
        )
        answers = [opened(world) for _ in range(2)]
        assert [(answer["system_identifier"], answer["timeline"]) for answer in answers] == [(77, 5)] * 2
        noted = "SELECT count(*) AS times FROM pgleaderlock.histories WHERE (system_identifier, timeline) = (77, 5)"
        assert world.two.ask(noted) == {"times": 1}


# --- A message begins and ends


def test_a_message_begins_with_a_beat_of_its_own_row_and_ends_without_a_backend(world: Leases) -> None:
    before = world.session(world.lea)
    changes = world.changed(world.lea.begin, beats=world.lea)
    pid = world.lea.conn.info.backend_pid
    assert changes == {("sessions", world.lea.session_id): {"number": before["number"] + 1, "backend_pid": pid}}
    assert world.changed(world.lea.done) == {("sessions", world.lea.session_id): {"backend_pid": 0}}


def test_the_end_of_a_message_is_told_with_the_key_of_that_very_lease(world: Leases) -> None:
    world.lea.begin()
    done = "SELECT pgleaderlock.lease_done(%s, %s)"
    assert world.changed(lambda: world.lea.ask(done, world.lou.session_id, world.lea.key)) == {}
    assert world.changed(lambda: world.lea.ask(done, world.lea.session_id, world.lou.key)) == {}


@pytest.mark.parametrize("later", [0, 1], ids=["a number that was used", "the next number"])
@pytest.mark.parametrize(
    "why",
    [
        "its own",
        "with the key of another",
        "of another lease",
        "of a lease that has ended",
        "of another system",
        "of another timeline",
    ],
)
def test_a_message_is_carried_out_once_and_only_for_a_lease_that_holds(world: Leases, why: str, later: int) -> None:
    session_id, key, number = world.lea.session_id, world.lea.key, world.lea.number + later
    over = why not in ("its own", "of another system", "of another timeline") or later == 1
    if why == "with the key of another":
        key = world.lou.key
    elif why == "of another lease":
        session_id, number = world.lou.session_id, world.lou.number + later
    elif why == "of a lease that has ended":
        world.end(world.lea)
    elif why.startswith("of another"):
        column = "system_identifier" if why.endswith("system") else "timeline"
        world.write(f"UPDATE pgleaderlock.sessions SET {column} = {column} + 1 WHERE session_id = %s", session_id)
    if why == "its own" and later:
        assert world.changed(lambda: world.lea.ask(BEGIN, session_id, key, number)) != {}
        return
    expected = OVER if over else TOO_LATE
    found: list[str | None] = []
    assert world.changed(lambda: found.append(refused(world.lea, BEGIN, session_id, key, number))) == {}
    assert found == [expected]


def test_a_message_that_was_overtaken_changes_nothing(world: Leases) -> None:
    session_id, key = world.lea.session_id, world.lea.key
    world.lea.ask(BEGIN, session_id, key, world.lea.number + 5)
    for late in (1, 4, 5):
        act = [BEGIN, session_id, key, world.lea.number + late]
        assert world.changed(lambda act=act: refused(world.lea, *act)) == {}  # type: ignore[misc]
    assert refused(world.lea, BEGIN, session_id, key, world.lea.number + 5) == TOO_LATE


# --- A silent lease is ended


END = "SELECT pgleaderlock.end_silent_leases(%s, %s::bigint[], %s::bigint[]) AS ended"


def ended(node: LedgerNode, silent: dict[int, int]) -> set[int]:
    rows = node.conn.execute(END, (node.session_id, list(silent), list(silent.values()))).fetchall()
    return {row["ended"] for row in rows}


def same_beats(world: Leases) -> int:
    """All sessions are at the same beat: a mistake in a join finds them all."""
    world.write("UPDATE pgleaderlock.sessions SET beat = 100")
    return 100


def test_a_silent_lease_is_ended_at_the_beat_that_was_seen_and_nobody_else_is(world: Leases) -> None:
    found: list[set[int]] = []
    seen = {world.lea.session_id: same_beats(world)}
    assert world.changed(lambda: found.append(ended(world.one, seen))) == {
        ("sessions", world.lea.session_id): {"ended_at": ANY}
    }
    assert found == [{world.lea.session_id}]
    assert refused(world.lea, BEGIN, world.lea.session_id, world.lea.key, world.lea.number + 1) == OVER


def test_a_lease_may_end_another_and_the_eviction_leaves_its_trace(world: Leases) -> None:
    seen = {world.lea.session_id: same_beats(world)}

    def act() -> None:
        with world.lou.message():
            assert ended(world.lou, seen) == set(seen)

    assert world.events(act) == [
        {
            "kind": "evicted",
            "namespace": world.namespace,
            "role": None,
            "node_id": "lea",
            "epoch": None,
            "detail": f"silent lease {world.lea.session_id} ended by lou",
        }
    ]


@pytest.mark.parametrize("why", ["heard since", "a session", "ended before", "another namespace", "the caller itself"])
def test_a_lease_that_is_not_silent_or_not_ours_to_end_stays(world: Leases, why: str) -> None:
    beat = same_beats(world)
    session_id = world.lea.session_id
    if why == "heard since":
        beat -= 1
    elif why == "a session":
        session_id = world.two.session_id
    elif why == "ended before":
        world.end(world.lea)
    elif why == "another namespace":
        session_id = world.lex.session_id
    else:
        session_id, beat = world.lou.session_id, beat + 1

    def act() -> None:
        with world.lou.message():
            assert ended(world.lou, {session_id: beat}) == set()

    assert world.changed_by_others(act, world.lou) == {}
    assert world.session(world.lou)["ended_at"] is None


def test_a_lease_whose_row_somebody_holds_is_not_silent_and_nobody_waits_for_it(world: Leases) -> None:
    """Its owner beats just now: in an instant its beat will be another one."""
    seen = {world.lea.session_id: same_beats(world)}
    with world.held("sessions", world.lea.session_id):
        assert ended(world.one, seen) == set()
    assert ended(world.one, seen) == set(seen)


def test_who_is_not_recorded_for_its_backend_ends_no_lease(world: Leases) -> None:
    seen = [[world.lea.session_id], [same_beats(world)]]

    def refuses(node: LedgerNode, session_id: int) -> None:
        assert refused(node, END, session_id, *seen) == REFUSED

    assert world.changed(lambda: refuses(world.two, world.one.session_id)) == {}
    assert world.changed(lambda: refuses(world.one, -1)) == {}
    assert world.changed(lambda: refuses(world.lou, world.lou.session_id)) == {}, "a lease acts in its messages only"
    world.one.ask("SELECT pgleaderlock.close_session(%s)", world.one.session_id)
    assert world.changed(lambda: refuses(world.one, world.one.session_id)) == {}


# --- The locks of a lease


def test_a_lease_has_the_locks_of_what_it_takes_exclusively_until_the_commit(world: Leases) -> None:
    """`r` is known here, under the key that is given, and elsewhere under another one; `new` is not."""
    pairs = {role: key_pair(role, world.namespace) for role in ("r", "new")}
    for node in (world.one, world.stranger):
        assert node.unlock("r")
    with world.lou.message():
        lock(world.lou, pairs)
        assert locks(world.lou) == exclusive(*pairs.values())
    assert locks(world.lou) == set()


def test_a_role_with_another_key_takes_the_recorded_lock_as_well(world: Leases) -> None:
    recorded = key_pair("r", world.namespace)
    assert world.one.unlock("r")
    with world.lou.message():
        lock(world.lou, {"r": KEYS})
        assert locks(world.lou) == exclusive(recorded, KEYS)


def test_what_somebody_else_has_locked_is_not_locked_and_not_waited_for(world: Leases) -> None:
    """`one` holds the lock that is recorded for `r`."""
    with world.lou.message():
        lock(world.lou, {"r": KEYS, "s": key_pair("s", world.namespace), "new": KEYS})
        assert locks(world.lou) == exclusive(KEYS), "that of `new`"
    with world.lou.message():
        lock(world.lou, {"r": KEYS})
        assert locks(world.lou) == set()


def test_only_a_lease_that_is_recorded_for_this_backend_gets_locks(world: Leases) -> None:
    pairs = {"new": KEYS}
    with world.lou.conn.transaction():
        lock(world.lou, pairs)
        assert locks(world.lou) == set(), "its message has not begun"
    with world.lou.message():
        lock(world.lou, pairs, session_id=-1)
        assert locks(world.lou) == set(), "another session"
    world.lou.begin()
    world.end(world.lou)
    with world.lou.conn.transaction():
        lock(world.lou, pairs)
        assert locks(world.lou) == set(), "it is over"
