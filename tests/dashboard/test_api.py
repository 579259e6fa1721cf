"""The dashboard's JSON: expected values by hand, on a ledger written by hand, read by a role that may only read."""

import asyncio
import datetime as dt
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import psycopg
import pytest

from pgleaderlock import history
from pgleaderlock._http import server as http_server
from pgleaderlock._pg.reader import Crowded, ReadPool
from pgleaderlock.dashboard import api
from pgleaderlock.dashboard.description import OPERATIONS
from pgleaderlock.dashboard.run import DashboardServer, DashboardSettings, LedgerSettings
from pgleaderlock.server.description import STATUS_OPERATIONS
from support.counts import count, proof_asked
from support.dashboards import SPACE, UGLY, Book, dashboard, json_of, ledger
from support.lockserver import LockServerProcess, lock_server
from support.program import command
from support.proxy import Proxy


@pytest.fixture(scope="module")
def book() -> Iterator[Book]:
    with ledger() as written:
        yield written


@pytest.fixture(scope="module")
def server(book: Book) -> Iterator[LockServerProcess]:
    with dashboard(book.reader) as running:
        yield running


def named(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex[:8]}-"


def leaders(server: LockServerProcess, prefix: str) -> dict[str, Any]:
    rows = json_of(server.ask("GET", f"/v1/leaders?limit=1000&prefix={quote(prefix)}"))["leaders"]
    return {row["role"].removeprefix(prefix): row for row in rows}


# --- Leaders


def test_who_leads_and_whether_its_gate_can_be_open(book: Book, server: LockServerProcess) -> None:
    p = named("gate")
    alive, late, silent = book.session(p + "a"), book.session(p + "b", age_s=4000), book.session(p + "c", age_s=8000)
    gone, b = book.session(p + "d", ended=True), 999_999
    for role, session in {"led": alive, "late": late, "silent": silent, "no goodbye": gone}.items():
        book.led(p + role, session)
        book.term(p + role, 2, session, p + "x", "-9000 s")
    book.led(p + "free", alive, ended=True)
    book.term(p + "free", 2, alive, p + "a", "-50 s", "-40 s", "released")
    book.led(p + "never", None, epoch=0, ended=True)
    for role, (before, wait_s) in {
        "waits": ("lost", 7000),
        "waited": ("lost", 10),
        "clean": ("released", 7000),
        "evicted": ("evicted", 7000),
    }.items():
        book.led(p + role, alive, wait_s=wait_s)
        book.term(p + role, 1, b, p + "b", "-60 s", "-30 s", before)
        book.term(p + role, 2, alive, p + "a", "-20 s")
    found = leaders(server, p)
    assert {role: (row["leader"], row["heartbeat"], row["gate"]) for role, row in found.items()} == {
        "led": (p + "a", "ok", "open"),
        "late": (p + "b", "late", "shut"),
        "silent": (None, "none", "shut"),
        "no goodbye": (None, "none", "shut"),
        "free": (None, "none", "shut"),
        "never": (None, "none", "shut"),
        "waits": (p + "a", "ok", "waiting"),
        "waited": (p + "a", "ok", "open"),
        "clean": (p + "a", "ok", "open"),
        "evicted": (p + "a", "ok", "waiting"),
    }
    changes = {
        role: row["last_change"] and (row["last_change"]["kind"], row["last_change"]["reason"])
        for role, row in found.items()
    }
    assert changes == {
        "led": ("acquired", None),
        "late": ("acquired", None),
        "silent": ("lost", None),
        "no goodbye": ("lost", None),
        "free": ("released", None),
        "never": None,
        "waits": ("acquired", "lost"),
        "waited": ("acquired", "lost"),
        "clean": ("acquired", "released"),
        "evicted": ("acquired", "evicted"),
    }
    led, free = found["led"], found["free"]
    assert (led["namespace"], led["epoch"]) == (SPACE, 2)
    assert led["since_ms"] == led["last_change"]["at_ms"]
    assert 9_000_000 <= led["tenure_ms"] < 9_600_000
    assert (free["since_ms"], free["tenure_ms"], free["heartbeat_age_ms"]) == (None, None, None)


def test_what_a_leader_says_of_its_gate_counts(book: Book, server: LockServerProcess) -> None:
    p = named("told")
    a = book.session(p + "a")
    told = {
        "open": ("open", None, False),
        "waits": ("waiting", "1 hour", False),
        "has waited": ("waiting", "-1 s", False),
        "drains": ("draining", None, False),
        "vetoed": ("vetoed", None, False),
        "failed": ("open", None, True),
    }
    for role, (gate, opens_in, failed) in told.items():
        book.led(p + role, a, wait_s=3000)
        book.term(p + role, 1, 999_999, p + "b", "-60 s", "-1 s", "lost")
        book.term(p + role, 2, a, p + "a", "-1 s")
        book.conn.execute(
            "UPDATE pgleaderlock.terms SET gate = %s, opens_at = now() + %s::interval, in_flight = 3, work_failed = %s"
            " WHERE role = %s AND epoch = 2",
            (gate, opens_in, failed, p + role),
        )
    assert {role: (row["state"], row["gate"]) for role, row in leaders(server, p).items()} == {
        "open": ("acting", "open"),
        "waits": ("waiting", "waiting"),
        "has waited": ("acting", "open"),
        "drains": ("draining", "shut"),
        "vetoed": ("vetoed", "shut"),
        "failed": ("work_failed", "open"),
    }


def test_a_successor_by_hand_counts_from_its_own_win(book: Book, server: LockServerProcess) -> None:
    p = named("superseded")
    a = book.session(p + "a")
    for role, before in (("superseded", "superseded"), ("lost", "lost")):
        book.led(p + role, a, wait_s=3000)
        book.term(p + role, 1, 999_999, p + "b", "-9000 s", "-5000 s", before)
        book.term(p + role, 2, a, p + "a", "-20 s")
    # The last beat of one that was lost was seen 5000 s ago; of one that was superseded nobody has seen a last one.
    assert {role: row["gate"] for role, row in leaders(server, p).items()} == {"superseded": "waiting", "lost": "open"}


def test_while_its_node_is_drained_the_gate_of_a_role_is_shut(book: Book, server: LockServerProcess) -> None:
    p = named("drain")
    a, drained = book.session(p + "a"), book.session(p + "drained")
    book.conn.execute("UPDATE pgleaderlock.sessions SET draining = true WHERE session_id = %s", (drained,))
    for role, session in {"of its node": drained, "other role": a}.items():
        book.led(p + role, session)
        book.term(p + role, 2, session, p + "a", "-5 min")
    assert {role: (row["leader"], row["heartbeat"], row["gate"]) for role, row in leaders(server, p).items()} == {
        "of its node": (p + "drained", "ok", "shut"),
        "other role": (p + "a", "ok", "open"),
    }
    book.conn.execute("UPDATE pgleaderlock.sessions SET ended_at = now() WHERE session_id = %s", (drained,))


def test_whoever_led_before_itself_does_not_wait_and_a_late_starter_waits_longer(
    book: Book, server: LockServerProcess
) -> None:
    p = named("who")
    instance = str(uuid.uuid4())
    before = book.session(p + "a", ended=True, instance=instance)
    again = book.session(p + "a", instance=instance)
    newcomer = book.session(p + "n", up_s=50)
    for role, session, previous in (("again", again, before), ("new", newcomer, before), ("old", again, 999_999)):
        book.led(p + role, session, wait_s=100)
        book.term(p + role, 1, previous, p + "a", "-900 s", "-200 s", "lost")
        book.term(p + role, 2, session, p + "n", "-20 s")
    # 200 s since the last beat of the predecessor, of which the newcomer has been there for 50.
    assert {role: row["gate"] for role, row in leaders(server, p).items()} == {
        "again": "open",
        "new": "waiting",
        "old": "open",
    }


def test_candidates_are_nodes_that_live_would_lead_and_do_not_drain(throwaway_book: Book) -> None:
    book = throwaway_book
    for node in ("a", "a", "b"):
        book.session(node)
    drains = book.session("drains")
    book.conn.execute("UPDATE pgleaderlock.sessions SET draining = true WHERE session_id = %s", (drains,))
    book.session("observes", candidate=False)
    book.session("silent", age_s=8000)
    book.led("r", drains)
    book.led("stuck", book.session("silent, and nobody has taken over", age_s=8000))
    with dashboard(book.reader) as server:
        assert [row["candidates"] for row in leaders(server, "").values()] == [3, 3]
        nodes = json_of(server.ask("GET", "/v1/nodes"))["nodes"]
    assert [(n["node_id"], n["live"], n["candidate"], n["draining"], n["roles"]) for n in nodes] == [
        ("a", True, True, False, 0),
        ("a", True, True, False, 0),
        ("b", True, True, False, 0),
        ("drains", True, True, True, 1),
        ("observes", True, False, False, 0),
        ("silent, and nobody has taken over", False, True, False, 1),
    ]
    assert (nodes[2]["host"], nodes[2]["version"], nodes[2]["namespace"]) == ("host of b", "1.2", SPACE)


@pytest.fixture
def throwaway_book() -> Iterator[Book]:
    with ledger() as written:
        yield written


def pages(server: LockServerProcess, path: str, what: str, field: str = "cursor", **query: Any) -> list[Any]:
    """Every page, each with at most `limit` entries."""
    found: list[Any] = []
    while True:
        reply = json_of(server.ask("GET", f"{path}?{urlencode(query)}"))
        assert len(reply[what]) <= query["limit"]
        found += reply[what]
        if reply["next_cursor"] is None:
            return found
        query[field] = reply["next_cursor"]


def test_every_list_comes_in_pages_and_each_entry_once(book: Book, server: LockServerProcess) -> None:
    p = named("pages")
    names = [f"{p}{n:02}" for n in range(7)]
    for name in names:
        book.led(name, None, ended=True)
        book.event("acquired", p, name)
    for epoch in range(1, 8):
        book.term(p + "00", epoch, 1, "a", f"-{100 - epoch} s", f"-{100 - epoch} s", "lost")
    found = pages(server, "/v1/leaders", "leaders", prefix=p, limit=3)
    assert [row["role"] for row in found] == names
    terms = pages(server, f"/v1/leaders/{p}00/terms", "terms", limit=2)
    assert [term["epoch"] for term in terms] == [7, 6, 5, 4, 3, 2, 1]
    events = pages(server, "/v1/events", "events", role=p, limit=2)
    assert [event["node_id"] for event in events] == names[::-1]
    first = events[-1]["event_id"] - 1
    for field in ("after", "cursor"):  # either goes on from there
        assert pages(server, "/v1/events", "events", field, role=p, limit=2, after=first) == events[::-1]
    assert len(json_of(server.ask("GET", "/v1/events"))["events"]) <= 100
    nodes = pages(server, "/v1/nodes", "nodes", limit=1)
    assert len({node["session_id"] for node in nodes}) == len(nodes)


# --- Terms


def test_a_gap_lasts_from_the_end_of_one_term_to_the_start_of_the_next(book: Book, server: LockServerProcess) -> None:
    role = named("terms")
    silent = book.session(role + "c", age_s=8000)
    book.term(role, 1, 1, "a", "2026-01-01 10:00:00+00", "2026-01-01 10:00:30+00", "released")
    book.term(role, 2, 1, "b", "2026-01-01 10:00:30.25+00", "2026-01-01 10:10:00+00", "lost")
    book.term(role, 2**32, silent, "c", "2026-01-01 10:10:07+00")
    path = f"/v1/leaders/{role}/terms"
    at = 1_767_261_600_000  # 2026-01-01 10:00:00 UTC
    reply = json_of(server.ask("GET", path))
    newest, *older = reply["terms"]
    assert older == [
        {
            "epoch": 2,
            "node_id": "b",
            "began_ms": at + 30_250,
            "ended_ms": at + 600_000,
            "reason": "lost",
            "gap_ms": 250,
            "opened_ms": at + 30_250,
            "shut_ms": None,
            "gaps": [],
        },
        {
            "epoch": 1,
            "node_id": "a",
            "began_ms": at,
            "ended_ms": at + 30_000,
            "reason": "released",
            "gap_ms": None,
            "opened_ms": at,
            "shut_ms": None,
            "gaps": [],
        },
    ]
    assert (newest["epoch"], newest["gap_ms"], newest["reason"]) == (2**32, 7000, "lost")
    assert newest["ended_ms"] > newest["began_ms"], "silent for longer than its lease: lost at its last heartbeat"

    def within(from_ms: int, to_ms: int) -> list[int]:
        terms = json_of(server.ask("GET", f"{path}?from_ms={from_ms}&to_ms={to_ms}"))["terms"]
        return [term["epoch"] for term in terms]

    assert within(at + 30_100, at + 30_200) == []
    assert within(at * 2, 0) == []
    assert within(at + 29_000, at + 31_000) == [2, 1]
    assert within(at + 31_000, at + 32_000) == [2]
    assert within(at + 600_001, at * 2) == [2**32]


def test_a_term_that_goes_on_has_no_end(book: Book, server: LockServerProcess) -> None:
    role = named("open")
    book.term(role, 1, book.session(role), role, "-60 s")
    (term,) = json_of(server.ask("GET", f"/v1/leaders/{role}/terms"))["terms"]
    assert (term["ended_ms"], term["reason"]) == (None, None)


# --- Events


def test_events_are_filtered_by_role_and_by_node(book: Book, server: LockServerProcess) -> None:
    p = named("events")
    for role, node in (("r1", "n1"), ("r1", "n2"), ("r2", "n1"), (None, "n1")):
        book.event("acquired", role and p + role, p + node, epoch=7, detail="d")
    book.event("acquired", p + "r1", p + "n1", space="another namespace")

    def found(**query: str) -> list[tuple[str | None, str]]:
        events = json_of(server.ask("GET", f"/v1/events?{urlencode(query)}"))["events"]
        return [(event["role"] and event["role"].removeprefix(p), event["node_id"].removeprefix(p)) for event in events]

    assert found(role=p + "r1") == [("r1", "n2"), ("r1", "n1")]
    assert found(node=p + "n1") == [(None, "n1"), ("r2", "n1"), ("r1", "n1")]
    assert found(role=p + "r1", node=p + "n1") == [("r1", "n1")]
    assert found(role=p + "r2", node=p + "n2") == []


# --- What is refused, and what must come through


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/leaders/nobody-ever-led-this/terms", 404),
        ("GET", "/v1/leaders/terms?role=nobody-ever-led-this", 404),
        ("GET", "/v1/leaders/terms", 400),
        ("GET", "/v1/leaders/terms?role=", 400),
        ("GET", "/v1/leaders/a/terms?role=a", 400),
        ("GET", "/v1/leaders/nobody", 404),
        ("GET", "/v1/leaders/", 404),
        ("GET", "/v1/leaders/a/b/terms", 404),
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/locks", 404),
        ("GET", "/nothing", 404),
        ("GET", "/static/nothing.js", 404),
        ("GET", "/static/../pages.py", 404),
        ("GET", "/locks", 404),
        ("GET", "/v1/leaders/%ff/terms", 400),
        ("GET", "/v1/leaders/%00/terms", 400),
        ("GET", "/v1/leaders/%zz/terms", 400),
        ("GET", "/v1/leaders?limit=1001", 400),
        ("GET", "/v1/leaders?limit=0", 400),
        ("GET", "/v1/leaders?limit=-1", 400),
        ("GET", "/v1/leaders?limit=", 400),
        ("GET", "/v1/leaders?limit=99999999999999999999999", 400),
        ("GET", "/v1/leaders?limit=%D9%A1", 400),
        ("GET", "/v1/leaders?prefx=a", 400),
        ("GET", "/v1/leaders?prefix=a&prefix=b", 400),
        ("GET", "/v1/leaders?prefix=%00", 400),
        ("GET", "/v1/leaders?prefix=%ff", 400),
        ("GET", "/v1/leaders?prefix=%", 400),
        ("GET", "/v1/events?cursor=x", 400),
        ("GET", "/v1/events?cursor=9223372036854775808", 400),
        ("GET", "/v1/events?cursor=", 400),
        ("GET", "/v1/events?after=", 400),
        ("GET", "/v1/nodes?cursor=x", 400),
        ("GET", "/v1/nodes?cursor=1.%00", 400),
        ("GET", "/v1/leaders/a/terms?to_ms=253402300800000", 400),
        ("GET", "/v1/leaders/a/terms?cursor=-1", 400),
        *((method, "/v1/leaders", 405) for method in ("POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS")),
        ("POST", "/v1/leaders/a/terms", 405),
        ("POST", "/v1/leaders/terms", 405),
        ("POST", "/v1/leaders/a", 404),
        ("POST", "/v1/events", 405),
        ("POST", "/v1/nodes", 405),
        ("POST", "/", 405),
        ("DELETE", "/history", 405),
        ("POST", "/static/app.js", 405),
        ("GET", "/sign-out", 405),
        ("PUT", "/sign-in", 405),
        ("POST", "/healthz", 405),
    ],
)
def test_what_cannot_be_answered_is_refused(server: LockServerProcess, method: str, path: str, status: int) -> None:
    reply = server.ask(method, path)
    assert reply.status == status
    if method != "HEAD":
        assert list(reply.json()) == ["error"]
    if status == 405:
        assert reply.headers["allow"] in ("GET", "POST", "GET, POST")


def test_a_name_comes_through_as_it_is(book: Book, server: LockServerProcess) -> None:
    p = named("ugly")
    for name in UGLY:
        session = book.session(p + name)
        book.led(p + name, session)
        book.term(p + name, 1, session, p + name, "-1 s")
        book.event("acquired", p + name, p + name, detail=name)
    assert {name: row["leader"] for name, row in leaders(server, p).items()} == {name: p + name for name in UGLY}
    nodes = {node["node_id"] for node in json_of(server.ask("GET", "/v1/nodes"))["nodes"]}
    for name in UGLY:
        reply = json_of(server.ask("GET", f"/v1/leaders/{quote(p + name, safe='')}/terms"))
        assert (reply["role"], [term["node_id"] for term in reply["terms"]]) == (p + name, [p + name])
        assert json_of(server.ask("GET", f"/v1/leaders/terms?{urlencode({'role': p + name})}")) == reply
        (event,) = json_of(server.ask("GET", f"/v1/events?{urlencode({'role': p + name})}"))["events"]
        assert (event["role"], event["node_id"], event["detail"]) == (p + name, p + name, name)
        assert p + name in nodes
        page = server.ask("GET", f"/history?{urlencode({'role': p + name})}")
        assert page.status == 200
        assert b"<script>alert" not in page.body
    for path in ("/", "/events", "/nodes"):
        page = server.ask("GET", path)
        assert (page.status, b"<script>alert" in page.body) == (200, False)


def test_a_name_that_no_path_can_carry_has_its_terms_too(book: Book, server: LockServerProcess) -> None:
    for name in ("..", "."):
        book.term(name, 1, book.session("of " + name), "of " + name, "-1 s")
        assert (
            json_of(server.ask("GET", f"/v1/leaders/terms?role={name}&limit=1"))["terms"][0]["node_id"] == "of " + name
        )


def test_a_page_of_a_role_that_nobody_led_says_so(server: LockServerProcess) -> None:
    assert server.ask("GET", "/history?role=nobody-ever-led-this").status == 404
    assert server.ask("GET", "/events?cursor=x").status == 400


def test_a_page_may_run_no_script_but_its_own(server: LockServerProcess) -> None:
    for path in ("/", "/history", "/events", "/nodes", "/static/app.js", "/static/style.css"):
        reply = server.ask("GET", path)
        assert reply.status == 200, path
        assert reply.headers["content-security-policy"] == (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
            "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
        )
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert (reply.headers["referrer-policy"], reply.headers["x-frame-options"]) == ("same-origin", "DENY")
    assert server.ask("GET", "/").headers["content-type"] == "text/html; charset=utf-8"
    assert server.ask("GET", "/", headers={"Host": "evil.example"}).status == 403
    assert server.ask("GET", "/v1/leaders", headers={"Host": "evil.example"}).status == 403


# --- As a program


def test_it_reads_and_could_not_write(book: Book, server: LockServerProcess) -> None:
    json_of(server.ask("GET", "/v1/leaders"))
    with psycopg.connect(book.reader, autocommit=True) as conn, pytest.raises(psycopg.errors.InsufficientPrivilege):
        conn.execute("UPDATE pgleaderlock.leaders SET epoch = epoch + 1")
    assert server.ask("GET", "/readyz").json() == {"status": "ready"}
    assert server.ask("GET", "/healthz").json() == {"status": "ok"}


async def test_its_connections_cannot_write_and_no_question_lasts_long(book: Book) -> None:
    reading = ReadPool(book.dsn)  # the owner, who could
    plain = await reading._connect()
    async with plain:
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            await plain._connection.execute("UPDATE pgleaderlock.leaders SET epoch = epoch + 1")
        (row,) = await (await plain._connection.execute("SHOW statement_timeout")).fetchall()
    assert row == {"statement_timeout": "5s"}
    await reading.close()


async def test_only_so_many_questions_wait_for_the_database(book: Book) -> None:
    reading = ReadPool(book.reader, connections_max=1, waiting_max=2)
    asked = [api.leaders(reading, SPACE, limit=1) for _ in range(3)]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert [isinstance(answer, Crowded) for answer in answers] == [False, False, True]
    await api.leaders(reading, SPACE, limit=1)
    await reading.close()


async def test_probes_do_not_crowd_out_those_who_look(
    book: Book, proxy_to: Callable[[str], Awaitable[Proxy]], monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = await proxy_to(book.reader)
    server = DashboardServer(
        DashboardSettings(LedgerSettings(proxy.dsn_for(book.reader), SPACE, "pgleaderlock"), port=0), lambda _: False
    )
    asked: list[object] = []
    facts = history.ledger_facts

    async def counted(asks: history.Asks) -> Any:
        asked.append(asks)
        return await facts(asks)

    await server.start()
    monkeypatch.setattr(history, "ledger_facts", counted)
    proxy.cut()
    probes = [asyncio.ensure_future(server._readiness()) for _ in range(100)]
    await asyncio.sleep(0)
    assert len(asked) == 1
    proxy.heal()
    assert {answer.status for answer in await asyncio.gather(*probes)} == {200}
    assert len(asked) == 1, "and the others have its answer"
    monkeypatch.setattr(http_server, "READY_REMEMBERED_S", -1.0)
    await server._readiness()
    assert len(asked) == 2, "which is not remembered for long"
    await server.stop()


def test_a_connection_that_the_database_has_ended_is_nobodys_error(book: Book, server: LockServerProcess) -> None:
    json_of(server.ask("GET", "/v1/leaders"))  # leaves one behind, for the next question
    ended = book.conn.execute(
        "SELECT pg_terminate_backend(pid, 20000) FROM pg_stat_activity"
        " WHERE application_name = 'pgleaderlock dashboard'"
    ).fetchall()
    assert ended
    assert all(done for (done,) in ended)
    assert server.ask("GET", "/v1/leaders").status == 200


def test_what_cannot_work_is_one_line_with_the_remedy(book: Book) -> None:
    secret = "open-sesame-123456"
    cases = {
        ("--dsn", book.reader, "--host", "0.0.0.0"): "--token-file is needed",
        ("--dsn", book.reader, "--tls-cert", "x"): "belong together",
        ("--dsn", book.reader + " dbname=nowhere"): "nowhere",
        ("--dsn", book.dsn + f" user=nobody password={secret}"): "nobody",
        (): "no database given",
    }
    for given, said in cases.items():
        done = command("dashboard", "--port", "0", *given)
        assert (done.code, done.out) == (2, "")
        assert said in done.err
        assert "Traceback" not in done.err
        assert secret not in done.err


def test_without_a_ledger_it_says_what_to_do(book: Book) -> None:
    book.conn.execute("CREATE DATABASE empty")
    try:
        done = command("dashboard", "--port", "0", "--dsn", book.dsn + " dbname=empty")
    finally:
        book.conn.execute("DROP DATABASE empty WITH (FORCE)")
    assert (done.code, "pgleaderlock migrate" in done.err) == (2, True)


def test_it_starts_while_its_database_is_away() -> None:
    with dashboard("postgresql://nobody@127.0.0.1:1/none") as server:
        assert server.ask("GET", "/healthz").status == 200
        for path in ("/readyz", "/v1/leaders", "/v1/nodes", "/v1/events", "/v1/leaders/a/terms"):
            reply = server.ask("GET", path)
            assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        for path in ("/", "/history", "/events", "/nodes"):
            page = server.ask("GET", path)
            assert (page.status, b"<html" in page.body) == (503, True), "a page all the same, which says so"
            assert re.search(rb'<p id="nothing"[^>]* hidden>', page.body), "and does not say that there is nothing"
        assert server.stop() == 0


# --- In front of the lock server


def test_serve_shows_the_leaders_of_its_own_database(tmp_path: Path, book: Book) -> None:
    p = named("serve")
    book.led(p + "r", book.session(p + "a"))
    with lock_server(tmp_path, store=book.url) as server:
        assert leaders(server, p)["r"]["leader"] == p + "a"
        assert set(json_of(server.ask("GET", "/openapi.json"))["paths"]) >= {op.path for op in OPERATIONS}
        for path in ("/", "/locks", "/history", "/events", "/nodes"):
            assert server.ask("GET", path).status == 200, path
        assert server.stop() == 0


def test_serve_shows_the_leaders_of_another_database(tmp_path: Path, book: Book) -> None:
    p = named("other")
    book.led(p + "r", book.session(p + "a"))
    with lock_server(tmp_path, "--dsn", book.reader) as server:
        assert leaders(server, p)["r"]["leader"] == p + "a"
        server.ask("POST", "/v1/locks/held/acquire", {"owner_id": UGLY[0], "ttl_ms": 60_000})
        page = server.ask("GET", "/locks?prefix=he")
        assert page.status == 200
        assert b"held" in page.body
        assert b"<script>alert" not in page.body


def test_serve_without_a_ledger_shows_locks_alone(tmp_path: Path) -> None:
    with lock_server(tmp_path) as server:
        assert server.ask("GET", "/").headers["location"] == "/locks"
        assert server.ask("GET", "/locks").status == 200
        for path in ("/v1/leaders", "/v1/events", "/v1/nodes", "/v1/leaders/a/terms", "/history", "/events", "/nodes"):
            assert server.ask("GET", path).status == 404, path
        assert not {op.path for op in OPERATIONS} & set(json_of(server.ask("GET", "/openapi.json"))["paths"])


def test_a_lock_server_whose_role_may_not_read_the_ledger_serves_locks_all_the_same(
    tmp_path: Path, throwaway_book: Book
) -> None:
    from pgleaderlock.migrate import _grants

    book = throwaway_book
    book.conn.execute("CREATE ROLE locks_only LOGIN PASSWORD 'locks-only'")
    book.conn.execute(_grants("grants_lock_server", "locks_only").encode())
    url = re.sub(r"//[^@]*@", "//locks_only:locks-only@", book.url)
    with lock_server(tmp_path, store=url) as server:
        server.program.until("dashboard_without_leaders")
        assert server.ask("GET", "/v1/leaders").status == 404
        assert server.ask("GET", "/locks").status == 200
    done = command("serve", "--port", "0", "--store", f"sqlite:///{tmp_path}/locks.db", "--dsn", url)
    assert (done.code, "not readable for this role" in done.err) == (2, True), "asked for by name, it is an error"


# --- The description


def test_the_description_lists_the_questions() -> None:
    terms = {"/v1/leaders/{role}/terms", "/v1/leaders/terms"}
    others = {"/v1/events", "/v1/incidents", "/v1/slots", "/v1/nodes"}
    assert {op.path for op in OPERATIONS} == {"/v1/leaders", *terms, *others}
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    assert [op.path for op in OPERATIONS if f"\n| `{op.path}` |" not in page] == []
    assert {op.path for op in STATUS_OPERATIONS} == {"/healthz", "/readyz", "/openapi.json"}
    assert {op.method for op in OPERATIONS} == {"GET"}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_answer_is_one_that_the_description_promises(tmp_path: Path, server: LockServerProcess) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--checks", "all"),
            *("--phases", "coverage,fuzzing" if proof_asked() else "coverage", "--workers", "1"),
            *("--max-examples", str(count(4, 500))),
            *("--generation-database", "none", "--suppress-health-check", "all", "--warnings", "off", "--no-color"),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONWARNINGS": "default"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    found = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    assert found is not None, done.stdout[-3000:]
    assert int(found[1]) == int(found[2]) >= count(20, 1_000)
    assert "request_failed" not in server.program.err


def test_history_and_events_of_a_span_of_time(throwaway_book: Book) -> None:
    book = throwaway_book
    for epoch, began_s, ended_s in ((1, 900, 600), (2, 500, 300), (3, 200, 100)):
        book.conn.execute(
            "INSERT INTO pgleaderlock.terms (namespace, role, epoch, session_id, node_id, holder_identity, began_at,"
            " ended_at, reason) VALUES (%s, 'spans', %s, 0, 'n', 'h', now() - make_interval(secs => %s),"
            " now() - make_interval(secs => %s), 'lost')",
            (SPACE, epoch, began_s, ended_s),
        )
        book.conn.execute(
            "INSERT INTO pgleaderlock.events (kind, namespace, role, epoch, at) VALUES ('acquired', %s, 'spans', %s,"
            " now() - make_interval(secs => %s))",
            (SPACE, epoch, began_s),
        )
    now_ms = (book.conn.execute("SELECT (extract(epoch FROM now()) * 1000)::bigint").fetchone() or (0,))[0]
    from_ms, to_ms = now_ms - 550_000, now_ms - 250_000
    moments = [dt.datetime.fromtimestamp(ms / 1000, dt.UTC).isoformat() for ms in (from_ms, to_ms)]
    span = urlencode({"role": "spans", "from": moments[0], "to": moments[1]})
    in_ms = f"from_ms={from_ms}&to_ms={to_ms}"
    with dashboard(book.reader) as server:
        for way in ("", "&after=0"):
            events = json_of(server.ask("GET", f"/v1/events?role=spans&{in_ms}{way}"))["events"]
            assert [event["epoch"] for event in events] == [2], way
        for page in ("history", "events"):
            shown = server.ask("GET", f"/{page}?{span}")
            assert shown.status == 200
            epochs = re.findall(r'<td class="num" data-label="Epoch"><span>(\d+)</span>', shown.body.decode())
            assert epochs == ["2"], page
            assert f'value="{moments[0]}"' in shown.body.decode(), "the form keeps what was asked for"
            assert server.ask("GET", f"/{page}?from=yesterday").status == 400


def test_a_crash_is_one_incident_with_a_way_to_its_time(throwaway_book: Book) -> None:
    book = throwaway_book
    alive = book.session("node-1")
    for role, gap_s in (("a", 1), ("b", 4)):
        for epoch, node, began_s, ended_s, reason in (
            (1, "node-2", 900, 600, "lost"),
            (2, "node-1", 600 - gap_s, None, None),
        ):
            book.conn.execute(
                "INSERT INTO pgleaderlock.terms (namespace, role, epoch, session_id, node_id, holder_identity,"
                " began_at, ended_at, reason) VALUES (%s, %s, %s, %s, %s, 'h', now() - make_interval(secs => %s),"
                " now() - make_interval(secs => %s), %s)",
                (SPACE, role, epoch, alive if ended_s is None else 0, node, began_s, ended_s, reason),
            )
    with dashboard(book.reader) as server:
        (found,) = json_of(server.ask("GET", "/v1/incidents"))["incidents"]
        assert (found["node_id"], found["reason"], found["roles"]) == ("node-2", "lost", ["a", "b"])
        assert (found["taken_over_by"], found["without_leader"]) == (["node-1"], [])
        assert 3900 <= found["longest_ms"] <= 4100
        assert json_of(server.ask("GET", "/v1/incidents?node=node-3"))["incidents"] == []
        page = server.ask("GET", "/incidents?node=node-2")
        assert "/?from=" in page.body.decode()
        assert server.ask("GET", "/incidents?from=yesterday").status == 400


def test_of_each_name_the_newest_slot_is_shown_and_of_one_name_all(throwaway_book: Book) -> None:
    book = throwaway_book
    book.slot("nightly", "monday", "node-1", outcome="failed", began_s=86400)
    book.slot("nightly", "tuesday", "node-1", outcome="done", began_s=3600)
    book.slot("<b>hourly", "15:00", "node-2", began_s=10)
    with dashboard(book.reader) as server:

        def states(query: str = "") -> list[tuple[str, str, str]]:
            found = json_of(server.ask("GET", f"/v1/slots{query}"))["slots"]
            return [(each["name"], each["slot"], each["state"]) for each in found]

        assert states() == [("<b>hourly", "15:00", "lost"), ("nightly", "tuesday", "done")]
        assert states("?name=nightly") == [("nightly", "tuesday", "done"), ("nightly", "monday", "failed")]
        assert json_of(server.ask("GET", "/v1/slots?limit=1"))["more"] is True
        page = server.ask("GET", "/slots").body.decode()
        assert "/slots?name=nightly" in page
        assert "tuesday" in page
        assert "monday" not in page
        assert "<b>hourly" not in page
        assert "monday" in server.ask("GET", "/slots?name=nightly").body.decode()
        book.conn.execute("REVOKE SELECT ON pgleaderlock.slots FROM PUBLIC, dashboard_reader")
        refused = server.ask("GET", "/v1/slots")
        assert (refused.status, "--grant-reader-to" in refused.body.decode()) == (503, True)
