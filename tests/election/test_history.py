"""What the ledger tells: expected values by hand, on a ledger that was written by hand, of each version that is served.

Every test has a namespace of its own. All looks are those of a role with run-time rights alone.
"""

import asyncio
import contextlib
import datetime as dt
import functools
import json
import re
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from pgleaderlock import history
from pgleaderlock._pg.reader import PlainConnection
from pgleaderlock._pg.statements import statement
from pgleaderlock.dashboard import api
from pgleaderlock.errors import SchemaError
from pgleaderlock.migrate import LEDGER_VERSION, _migrations
from support.counts import count
from support.elections import fresh_database
from support.program import command

VERSIONS = [version for version in sorted(_migrations()) if version >= LEDGER_VERSION - 1]
READER = "history_reader"


@functools.cache
def ledger(superuser_dsn: str, version: int) -> str:
    """A database with a ledger of this version; made once a server, and gone with it."""
    with psycopg.connect(superuser_dsn, autocommit=True) as conn:
        conn.execute(f"CREATE DATABASE history_{version}")
        if not conn.execute("SELECT FROM pg_roles WHERE rolname = %s", (READER,)).fetchall():
            conn.execute(f"CREATE ROLE {READER} LOGIN PASSWORD 'x'")
    dsn = make_conninfo(superuser_dsn, dbname=f"history_{version}")
    with psycopg.connect(dsn, autocommit=True) as conn:
        for number, text in sorted(_migrations().items()):
            if number <= version:
                conn.execute(text.encode())
        conn.execute(f"GRANT USAGE ON SCHEMA pgleaderlock TO {READER}")
        conn.execute(
            "GRANT SELECT ON pgleaderlock.schema_version, pgleaderlock.sessions, pgleaderlock.leaders,"
            f" pgleaderlock.terms, pgleaderlock.events, pgleaderlock.requests TO {READER}"
        )
    return dsn


@pytest.fixture(params=VERSIONS, ids=lambda version: f"version {version}")
def version(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def owner(dsn: str, version: int) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
    """Writes into the ledger what no function would."""
    with psycopg.connect(ledger(dsn, version), autocommit=True) as conn:
        yield conn


@pytest.fixture
async def look(dsn: str, version: int) -> AsyncIterator[PlainConnection]:
    async with await PlainConnection.open(look_dsn(dsn, version), "history test") as look:
        yield look


def look_dsn(dsn: str, version: int) -> str:
    return make_conninfo(ledger(dsn, version), user=READER, password="x")


@pytest.fixture
def space() -> str:
    return f"space-{uuid.uuid4().hex[:12]}"


_SESSION = """
INSERT INTO pgleaderlock.sessions (
    namespace, instance, node_id, host, os_pid, holder_identity, backend_pid, backend_start, database_role, gate_s,
    lease_s, candidate, library_version, started_at, last_heartbeat, ended_at)
VALUES (%(space)s, gen_random_uuid(), %(node)s, 'h', 1, %(node)s || '-h-1', 1, now(), 'x', 5, %(lease_s)s,
    %(candidate)s, '1', now() - make_interval(secs => %(up_s)s), now() - make_interval(secs => %(age_s)s),
    CASE WHEN %(ended)s THEN now() END)
RETURNING session_id
"""


def session(
    owner: psycopg.Connection[Any],
    space: str,
    node: str,
    *,
    age_s: float = 0,
    up_s: float = 0,
    candidate: bool = True,
    ended: bool = False,
    lease_s: float = 6,
) -> int:
    values = {"space": space, "node": node, "age_s": age_s, "up_s": up_s, "candidate": candidate, "ended": ended}
    row = owner.execute(_SESSION, {**values, "lease_s": lease_s}).fetchone()
    assert row is not None
    return int(row[0])


def led(owner: psycopg.Connection[Any], space: str, role: str, session_id: int | None, *, ended: bool = False) -> None:
    owner.execute(
        "INSERT INTO pgleaderlock.leaders (namespace, role, key1, key2, epoch, session_id, ended, acquired_at) VALUES"
        " (%s, %s, hashtext(%s), hashtext(%s), 7, %s, %s, now() - interval '1 hour')",
        (space, role, f"{space} {role}", role, session_id, ended),
    )


Ended = tuple[str, str] | None


def term(owner: psycopg.Connection[Any], space: str, epoch: int, *, node: str, began: str, end: Ended) -> None:
    """A term of the role `r`, from and to moments of one day long ago."""
    owner.execute(
        "INSERT INTO pgleaderlock.terms (namespace, role, epoch, session_id, node_id, holder_identity, began_at,"
        " ended_at, reason) VALUES (%s, 'r', %s, 1, %s, 'x', %s, %s, %s)",
        (space, epoch, node, f"2026-01-01 {began}+00", *((f"2026-01-01 {end[0]}+00", end[1]) if end else (None, None))),
    )


async def test_a_failover_lasts_from_the_end_of_one_term_to_the_start_of_the_next(
    owner: psycopg.Connection[Any], look: PlainConnection, space: str
) -> None:
    term(owner, space, 1, node="a", began="10:00:00", end=("10:00:30", "released"))
    term(owner, space, 2, node="b", began="10:00:30.25", end=("10:10:00", "lost"))
    term(owner, space, 2**32, node="a", began="10:10:07", end=None)
    found = await history.terms(look, space, "r")
    assert [(t.epoch, t.node_id, t.reason, t.prev_node_id, t.prev_reason, t.failover_s) for t in found] == [
        (2**32, "a", None, "b", "lost", 7.0),
        (2, "b", "lost", "a", "released", 0.25),
        (1, "a", "released", None, None, None),
    ]
    assert [t.lasted_s for t in found[1:]] == [569.75, 30.0]
    assert found[0].lasted_s > 86400  # it goes on
    assert [t.prev_epoch for t in found] == [2, 1, None]
    # The term before is known also where a page begins or ends.
    assert await history.terms(look, space, "r", before_epoch=2**32, limit=1) == (found[1],)


async def test_since_leaves_out_what_had_ended_before(
    owner: psycopg.Connection[Any], look: PlainConnection, space: str
) -> None:
    for epoch, (began, ended) in enumerate([(90, 80), (50, 20), (19, 10)], start=1):
        owner.execute(
            "INSERT INTO pgleaderlock.terms VALUES (%s, 'r', %s, 1, 'a', 'x', now() - make_interval(mins => %s),"
            " now() - make_interval(mins => %s), 'released')",
            (space, epoch, began, ended),
        )
    assert [t.epoch for t in await history.terms(look, space, "r", since_s=30 * 60)] == [3, 2]
    assert [t.epoch for t in await history.terms(look, space, "r", since_s=1e12)] == [3, 2, 1]


async def test_every_term_is_read_once_over_many_pages(
    owner: psycopg.Connection[Any], look: PlainConnection, space: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "PAGE_SIZE", 10)
    owner.execute(
        "INSERT INTO pgleaderlock.terms SELECT %s, 'r', g, 1, 'a', 'x', now(), now(), 'lost'"
        " FROM generate_series(1, 40) g",
        (space,),
    )
    assert [t.epoch async for t in history.all_terms(look, space, "r")] == list(range(40, 0, -1))


async def test_for_a_role_somebody_acts_or_nobody(
    owner: psycopg.Connection[Any], look: PlainConnection, space: str
) -> None:
    alive = session(owner, space, "a")
    cut_off = session(owner, space, "b", age_s=7)
    gone = session(owner, space, "c", ended=True)
    session(owner, space, "observer", candidate=False)
    led(owner, space, "free", None, ended=True)
    led(owner, space, "given up", alive, ended=True)
    led(owner, space, "led", alive)
    led(owner, space, "silent", cut_off)
    led(owner, space, "without a goodbye", gone)
    found = await history.roles(look, space)
    assert [(r.role, r.state, r.node_id, r.epoch) for r in found] == [
        ("free", "nobody", None, 7),
        ("given up", "nobody", None, 7),
        ("led", "acting", "a", 7),
        ("silent", "nobody", "b", 7),
        ("without a goodbye", "nobody", None, 7),
    ]
    assert {r.candidates for r in found} == {1}, "neither the silent nor the ended one, nor who only observes"
    assert found[2].tenure_s == pytest.approx(3600, abs=300)
    assert (found[0].tenure_s, found[0].heartbeat_age_s, found[0].acquired_at) == (None, None, None)
    one = await history.role(look, space, "silent")
    assert one is not None
    assert (one.role, one.holder_identity) == ("silent", "b-h-1")
    assert await history.role(look, space, "no such role") is None
    assert await history.roles(look, f"{space} of somebody else") == ()


async def test_every_role_is_read_once_over_many_pages(
    owner: psycopg.Connection[Any], look: PlainConnection, space: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "PAGE_SIZE", 4)
    names = [f"role-{number:02}" for number in range(8)]
    for name in names:
        led(owner, space, name, None, ended=True)
    assert [r.role for r in await history.all_roles(look, space)] == names
    assert space in await history.namespaces(look)


async def test_nodes_are_alive_draining_silent_or_ended(
    owner: psycopg.Connection[Any], look: PlainConnection, space: str, version: int
) -> None:
    session(owner, space, "a", age_s=100)  # an earlier life of it
    alive = session(owner, space, "a")
    session(owner, space, "a")  # a second process under the same name
    silent_leader = session(owner, space, "b", age_s=9999)
    session(owner, space, "c", age_s=100)
    session(owner, space, "d", age_s=50, ended=True)
    session(owner, space, "long gone", age_s=9999, ended=True)
    led(owner, space, "r1", alive)
    led(owner, space, "r2", alive)
    led(owner, space, "r3", silent_leader)
    if version >= 3:
        owner.execute(
            "UPDATE pgleaderlock.sessions SET draining = true, balance = true WHERE session_id = %s", (alive,)
        )
    lately = await history.nodes(look, space, heard_within_s=3600)
    assert [(n.node_id, n.state, n.leads) for n in lately] == [
        ("a", "draining", 2),
        ("a", "alive", 0),
        ("b", "silent", 1),
        ("c", "silent", 0),
        ("d", "ended", 0),
    ]
    assert [(n.draining, n.balance) for n in lately] == [(version >= 3,) * 2, *([(False, False)] * 4)]
    assert [n.node_id for n in await history.nodes(look, space)] == ["a", "a", "b"]


async def test_who_drains_is_no_candidate(
    owner: psycopg.Connection[Any], look: PlainConnection, space: str, version: int
) -> None:
    if version < 3:
        assert not [name for name in ("draining", "balance") if name in await columns(look, "sessions")]
        return
    draining = session(owner, space, "a")
    session(owner, space, "b")
    led(owner, space, "r", draining)
    owner.execute("UPDATE pgleaderlock.sessions SET draining = true WHERE session_id = %s", (draining,))
    (role,) = await history.roles(look, space)
    assert (role.draining, role.candidates, role.state) == (True, 1, "draining")


async def test_a_drain_that_lasts_names_the_command_that_ends_the_work(
    owner: psycopg.Connection[Any], look: PlainConnection, space: str, version: int
) -> None:
    draining = session(owner, space, "a")
    led(owner, space, "r", draining)
    term(owner, space, 7, node="a", began="10:00", end=None)
    owner.execute("UPDATE pgleaderlock.sessions SET draining = true WHERE session_id = %s", (draining,))
    (lasting,) = await history.roles(look, space)
    owner.execute("UPDATE pgleaderlock.terms SET began_at = now() WHERE namespace = %s", (space,))
    (begun,) = await history.roles(look, space)
    assert lasting.command == f"pgleaderlock drain --work-timeout 30s --namespace {space} a"
    assert begun.command == f"pgleaderlock nodes --namespace {space}"


def test_roles_for_which_nobody_may_act_for_one_reason_are_told_together() -> None:
    lost, late = ("x was lost", "pgleaderlock nodes"), ("y is late", "pgleaderlock nodes")
    found = history.remedies([("b", *lost), ("d", *lost), ("a", *late), ("c", *lost), ("e", "x was lost", None)])
    assert found == [(["b", "d", "c"], *lost), (["a"], *late), (["e"], "x was lost", None)]


async def test_every_view_counts_the_same_live_candidates(
    dsn: str, owner: psycopg.Connection[Any], look: PlainConnection, space: str, version: int
) -> None:
    """One ledger, one answer: from `status`, for people and for programs, from `history` and from the dashboard."""
    written = functools.partial(session, owner, space, lease_s=600)
    led(owner, space, "r", written("leads"))
    written("twice", age_s=100)
    written("twice")  # a second process under the same name
    written("silent", age_s=900)  # for longer than its lease, for less than two
    written("ended", ended=True)
    written("observes", candidate=False)
    drains = written("drains")
    owner.execute("UPDATE pgleaderlock.sessions SET draining = true WHERE session_id = %s", (drains,))
    status = ("status", "--name", "r", "--namespace", space, "--dsn", look_dsn(dsn, version))
    shown = json.loads((await asyncio.to_thread(command, *status, "--json")).out)["ledger"]["candidates"]
    assert [row["node_id"] for row in shown] == ["leads", "twice", "twice"]
    text = (await asyncio.to_thread(command, *status)).out
    assert re.search(r"^candidates +3 \(leads, twice: 2 processes\)$", text, re.MULTILINE)
    assert [role.candidates for role in await history.roles(look, space)] == [3]
    assert [role.candidates for role in (await api.leaders(look, space, limit=10)).leaders] == [3]


async def test_processes_that_live_under_one_name_at_the_same_time_are_shown(
    dsn: str, owner: psycopg.Connection[Any], look: PlainConnection, space: str, version: int
) -> None:
    written = functools.partial(session, owner, space, lease_s=600)
    written("alone", up_s=300)
    written("restarted", up_s=300, age_s=200)  # not heard since its successor began
    written("restarted", up_s=100)
    written("shared", up_s=200, ended=True)
    written("shared", up_s=300)
    written("shared", up_s=100)
    expected = [("alone", False), ("restarted", False), ("restarted", False), ("shared", True), ("shared", True)]
    assert [(n.node_id, n.name_shared) for n in await history.nodes(look, space)] == expected
    shown = (await api.nodes(look, space, limit=10)).nodes
    assert [(node.node_id, node.name_shared) for node in shown] == expected
    listed = await asyncio.to_thread(command, "nodes", "--namespace", space, "--dsn", look_dsn(dsn, version))
    assert [line.split()[0] for line in listed.out.splitlines() if "shares its name" in line] == ["shared", "shared"]


async def columns(look: PlainConnection, table: str) -> set[str]:
    cursor = await look._connection.execute(
        "SELECT column_name FROM information_schema.columns WHERE table_name = %s", (table,)
    )
    return {row["column_name"] for row in await cursor.fetchall()}


# -- events -----------------------------------------------------------------------------------------------------------


def happened(conn: psycopg.Connection[Any], space: str, *roles: str) -> None:
    for role in roles:
        conn.execute(
            "INSERT INTO pgleaderlock.events (kind, namespace, role) VALUES ('acquired', %s, %s)", (space, role)
        )


def names(events: Any) -> list[str]:
    return [event.role for event in events]


async def test_events_come_in_pages_the_newest_first(
    owner: psycopg.Connection[Any], look: PlainConnection, space: str
) -> None:
    happened(owner, space, *"abcde")
    happened(owner, f"{space} of others", "x")
    first = await history.events(look, space, limit=2)
    assert names(first) == ["e", "d"]
    assert names(await history.events(look, space, before_id=first[-1].event_id)) == ["c", "b", "a"]
    assert names(await history.events(look, space, name="c")) == ["c"]
    owner.execute(
        "UPDATE pgleaderlock.events SET at = at - interval '1 hour' WHERE role = 'a' AND namespace = %s", (space,)
    )
    assert names(await history.events(look, space, since_s=600)) == ["e", "d", "c", "b"]


async def test_the_feed_tells_every_event_once(
    owner: psycopg.Connection[Any], look: PlainConnection, space: str
) -> None:
    feed = history.EventFeed(space)
    happened(owner, space, *"abc")
    assert names(await feed.begin(look, since_s=600, limit=2)) == ["b", "c"]
    assert await feed.more(look) == []
    happened(owner, space, *"de")
    happened(owner, f"{space} of others", "x")
    assert names(await feed.more(look)) == ["d", "e"]
    assert await feed.more(look) == []
    nothing_before = history.EventFeed(space, "f")
    assert await nothing_before.begin(look, since_s=0) == []
    happened(owner, space, *"efg")
    assert names(await nothing_before.more(look)) == ["f"]


async def test_an_event_whose_number_is_lower_and_whose_commit_is_later_is_not_missed(
    dsn: str, owner: psycopg.Connection[Any], look: PlainConnection, space: str, version: int
) -> None:
    feed, begun_between = history.EventFeed(space), history.EventFeed(space)
    await feed.begin(look, since_s=0)
    with psycopg.connect(ledger(dsn, version)) as slow:
        happened(slow, space, "slow")
        happened(owner, space, "quick")
        assert names(await feed.more(look)) == ["quick"]
        assert names(await begun_between.begin(look, since_s=600)) == ["quick"]
        slow.commit()
    assert names(await feed.more(look)) == ["slow"]
    assert names(await begun_between.more(look)) == ["slow"]
    assert await feed.more(look) == []


async def test_the_feed_forgets_what_can_no_longer_appear(
    owner: psycopg.Connection[Any], look: PlainConnection, space: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "PAGE_SIZE", 2)
    feed = history.EventFeed(space)
    await feed.begin(look, since_s=0)
    happened(owner, space, *"abcde")
    assert names(await feed.more(look)) == list("abcde"), "more than a page"
    owner.execute("UPDATE pgleaderlock.events SET at = at - interval '1 hour' WHERE namespace = %s", (space,))
    happened(owner, space, "f")
    assert names(await feed.more(look)) == ["f"]
    assert len(feed._seen) == 1


# -- slots -------------------------------------------------------------------------------------------------------------


def slot(owner: psycopg.Connection[Any], space: str, name: str, slot: str, epoch: int, **more: Any) -> None:
    values = {"outcome": None, "attempts": 1, "began_s": 60, "took_s": None, "detail": None, **more}
    owner.execute(
        "INSERT INTO pgleaderlock.slots (namespace, name, slot, epoch, holder_identity, attempts, claimed_at, ended_at,"
        " outcome, detail) SELECT %(space)s || '.once', %(name)s, %(slot)s, %(epoch)s, 'a-h-1', %(attempts)s, at,"
        " at + make_interval(secs => %(took_s)s), %(outcome)s, %(detail)s FROM (SELECT now() - make_interval(secs =>"
        " %(began_s)s)) x (at)",
        {"space": space, "name": name, "slot": slot, "epoch": epoch, **values},
    )


@pytest.fixture
async def superuser_look(dsn: str) -> AsyncIterator[PlainConnection]:
    async with await PlainConnection.open(ledger(dsn, LEDGER_VERSION), "history test") as look:
        yield look


@pytest.mark.parametrize("version", [LEDGER_VERSION], indirect=True)
async def test_a_slot_is_running_only_while_its_runner_is_alive(
    owner: psycopg.Connection[Any], superuser_look: PlainConnection, space: str
) -> None:
    runners = {
        "alive": (session(owner, f"{space}.once", "a"), False),
        "silent": (session(owner, f"{space}.once", "b", age_s=60), False),
        "gone": (session(owner, f"{space}.once", "c", ended=True), False),
        "released": (session(owner, f"{space}.once", "d"), True),
    }
    for name, (number, ended) in runners.items():
        led(owner, f"{space}.once", name, number, ended=ended)
        slot(owner, space, name, "s", 7)
    slot(owner, space, "alive", "of an earlier term", 6, began_s=120)
    slot(owner, space, "over", "s", 7, outcome="failed", took_s=2, attempts=3, detail="why")
    found = {each.name: each for each in await history.slots(superuser_look, space)}
    states = {"alive": "running", "silent": "lost", "gone": "lost", "released": "lost", "over": "failed"}
    assert {name: each.state for name, each in found.items()} == states
    assert (found["over"].took_s, found["over"].attempts, found["over"].detail) == (2.0, 3, "why")
    assert (found["alive"].namespace, found["silent"].took_s) == (space, None)
    took_s = found["alive"].took_s
    assert took_s is not None
    assert took_s >= 60
    of_one = await history.slots(superuser_look, space, "alive")
    assert [(each.slot, each.state) for each in of_one] == [("s", "running"), ("of an earlier term", "lost")]
    assert len(await history.slots(superuser_look, space, limit=2)) == 2
    assert await history.slots(superuser_look, space, "unknown") == ()


async def test_slots_that_cannot_be_read_are_not_taken_for_none(
    look: PlainConnection, space: str, version: int
) -> None:
    words = "not readable for this role.*--grant-reader-to" if version >= 5 else "come with version 5.*migrate"
    with pytest.raises(SchemaError, match=words):
        await history.slots(look, space)


# -- requests, and which ledger this is --------------------------------------------------------------------------------


async def test_a_request_says_what_became_of_it(
    owner: psycopg.Connection[Any], look: PlainConnection, space: str, version: int
) -> None:
    row = owner.execute("SELECT pgleaderlock.request_step_down('r', %s, 'b', 'channel')", (space,)).fetchone()
    number = row[0] if row else None
    if number is None:  # where nobody leads, nobody is asked
        row = owner.execute(
            "INSERT INTO pgleaderlock.requests (kind, namespace, role, to_node_id) VALUES ('step_down', %s, 'r', 'b')"
            " RETURNING request_id",
            (space,),
        ).fetchone()
        assert row is not None
        number = row[0]
    asked = await history.request(look, number)
    assert asked is not None
    assert (asked.kind, asked.role, asked.to_node_id, asked.done_at, asked.outcome) == (
        ("step_down", "r", "b", None, None)
    )
    set_outcome = ", outcome = 'refused', detail = 'why'" if version >= 3 else ""
    owner.execute(f"UPDATE pgleaderlock.requests SET done_at = now(){set_outcome} WHERE request_id = %s", (number,))
    done = await history.request(look, number)
    assert done is not None
    assert done.done_at is not None
    assert (done.outcome, done.detail) == (("refused", "why") if version >= 3 else (None, None))
    assert await history.request(look, 2**62) is None


async def test_the_facts_of_a_ledger(look: PlainConnection, version: int) -> None:
    assert await history.ledger_facts(look) == history.LedgerFacts(version, in_recovery=False)


async def test_what_is_wrong_with_a_ledger_is_said_with_the_remedy(dsn: str) -> None:
    with fresh_database(dsn) as empty:
        async with await PlainConnection.open(empty, "history test") as look:
            with pytest.raises(SchemaError, match="no ledger in this database: run `pgleaderlock migrate`"):
                await history.ledger_facts(look)
    with fresh_database(dsn, ledger=True) as full, psycopg.connect(full, autocommit=True) as conn:
        role = f"nobody_{uuid.uuid4().hex[:8]}"
        conn.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'x'")
        try:
            async with await PlainConnection.open(make_conninfo(full, user=role, password="x"), "history test") as look:
                with pytest.raises(SchemaError, match=r"not readable for this role.*--grant-to"):
                    await history.ledger_facts(look)
        finally:
            conn.execute(f"DROP ROLE {role}")
        async with await PlainConnection.open(full, "history test") as look:
            conn.execute("INSERT INTO pgleaderlock.schema_version (version) VALUES (99)")
            with pytest.raises(SchemaError, match="upgrade the library"):
                await history.ledger_facts(look)


def test_a_value_becomes_json() -> None:
    at = dt.datetime(2026, 1, 1, 12, tzinfo=dt.timezone(dt.timedelta(hours=2)))
    event = history.Event(1, at, "acquired", "n", "r", "a", 7, None, 0.5)
    assert json.loads(json.dumps(history.as_json(event))) == {
        "event_id": 1,
        "at": "2026-01-01T10:00:00.000+00:00",
        "kind": "acquired",
        "namespace": "n",
        "role": "r",
        "node_id": "a",
        "epoch": 7,
        "detail": None,
        "age_s": 0.5,
    }


# -- how much it costs ------------------------------------------------------------------------------------------------

EVENTS: dict[str, object] = {"role": None, "node": None, "from_ms": 0, "to_ms": history.MS_MAX, "page_size": 100}
BIG: dict[str, dict[str, object]] = {
    "history_roles": {"role": None, "prefix": "", "after": "role-500", "with_forgotten": False, "page_size": 100},
    "history_terms": {
        "role": "role-7",
        "since_s": 1e9,
        "before_epoch": 2**63 - 1,
        "to_ms": history.MS_MAX,
        "page_size": 100,
    },
    "history_events_before": {
        **EVENTS,
        "since_s": 1e9,
        "before_id": 2**63 - 1,
    },
    "history_events_after": {**EVENTS, "after_id": 10**9},
    "history_settled_event": {"late_s": 60},
    "history_slots": {"slot_name": None, "page_size": 100},
}


async def test_no_page_costs_more_than_what_it_shows(dsn: str) -> None:
    """Of 1,000 roles and 100,000 terms and events, a page reads a few hundred rows."""
    terms = count(20_000, 100_000)
    with fresh_database(dsn, ledger=True) as full, psycopg.connect(full, autocommit=True) as conn:
        conn.execute(
            "INSERT INTO pgleaderlock.leaders (namespace, role, key1, key2) SELECT 'n', 'role-' || g, g, g"
            " FROM generate_series(1, 1000) g"
        )
        conn.execute(
            "INSERT INTO pgleaderlock.terms SELECT 'n', 'role-' || (g %% 10), g, 1, 'a', 'x', now(), now(), 'lost'"
            " FROM generate_series(1, %s) g",
            (terms,),
        )
        conn.execute(
            "INSERT INTO pgleaderlock.events (kind, namespace, role, at) SELECT 'acquired', 'n', 'role', now() -"
            " interval '2 minutes' FROM generate_series(1, %s) g",
            (terms,),
        )
        conn.execute(
            "INSERT INTO pgleaderlock.slots (namespace, name, slot, epoch, holder_identity) SELECT 'n', 'name-' ||"
            " (g %% 20), g, 1, 'x' FROM generate_series(1, %s) g",
            (terms,),
        )
        conn.execute("ANALYZE")
        read = {}
        for name, params in BIG.items():
            with psycopg.ClientCursor(conn) as cursor:
                cursor.execute(b"EXPLAIN (ANALYZE, FORMAT JSON) " + statement(name), {"namespace": "n", **params})
                row = cursor.fetchone()
            assert row is not None
            read[name] = most_rows(row[0][0]["Plan"])
    assert {name: rows for name, rows in read.items() if rows > 1000} == {}


def most_rows(plan: dict[str, Any]) -> int:
    """The most rows that any step of the plan looked at, shown or thrown away."""
    here = (plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0)) * plan["Actual Loops"]
    return max([int(here), *(most_rows(below) for below in plan.get("Plans", ()))])


async def test_an_error_in_mid_feed_loses_nothing(
    owner: psycopg.Connection[Any], look: PlainConnection, space: str
) -> None:
    class Failing:
        async def rows(self, name: str, **params: object) -> list[dict[str, Any]]:
            await asyncio.sleep(0)
            raise ConnectionResetError

    feed = history.EventFeed(space)
    await feed.begin(look, since_s=0)
    happened(owner, space, "a")
    with contextlib.suppress(ConnectionResetError):
        await feed.more(Failing())
    assert names(await feed.more(look)) == ["a"]


async def test_the_example_of_the_page_runs_on_a_connection_of_the_readers_own(
    dsn: str, owner: psycopg.Connection[Any], space: str, version: int
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    example: dict[str, Any] = {}
    exec(code, example)
    reader_dsn = make_conninfo(ledger(dsn, version), user=READER, password="x")
    assert await example["longest_failover_s"](reader_dsn, "r", space) == 0.0
    owner.execute(
        "INSERT INTO pgleaderlock.terms VALUES"
        " (%(space)s, 'r', 1, 1, 'a', 'x', now() - interval '60 s', now() - interval '50 s', 'lost'),"
        " (%(space)s, 'r', 2, 1, 'b', 'x', now() - interval '43 s', NULL, NULL)",
        {"space": space},
    )
    assert await example["longest_failover_s"](reader_dsn, "r", space) == 7.0
