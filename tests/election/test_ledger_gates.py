"""What a leader tells of its gates, call by call: it is recorded for its own open terms, and waits for nobody.

Quick, for the same reason as `test_ledger_functions.py`. `one` leads r and s, each in its second term, since a day ago.
"""

import contextlib
import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any
from unittest.mock import ANY

import psycopg
import pytest

from pgleaderlock.embedded import EmbeddedPostgres
from support.elections import fresh_database
from support.ledger_leases import Leases
from support.ledger_node import LedgerNode
from support.ledger_world import Changes, World

REFUSED = "PGL03"
GAPS_KEPT = 100
REPORT = "SELECT * FROM pgleaderlock.report_gates(%s, %s::jsonb)"


@pytest.fixture(scope="module")
def ledger(postgres: EmbeddedPostgres) -> Iterator[str]:
    with fresh_database(postgres.dsn, ledger=True) as dsn:
        yield dsn


@pytest.fixture
def world(ledger: str, nothing_left: None) -> Iterator[World]:
    with contextlib.ExitStack() as nodes:
        world = World(ledger, nodes)
        world.write("UPDATE pgleaderlock.terms SET began_at = began_at - interval '1 day'")
        yield world


def report(node: LedgerNode, *reports: dict[str, Any]) -> dict[str, float | None]:
    """For which roles it was recorded, and the time without a leader before it."""
    rows = node.conn.execute(REPORT, (node.session_id, json.dumps(reports))).fetchall()
    assert len({row["role"] for row in rows}) == len(rows), "one answer per role"
    return {row["role"]: row["failover_s"] for row in rows}


def of(role: str = "r", epoch: int = 2, **told: Any) -> dict[str, Any]:
    return {"role": role, "epoch": epoch, "gate": "open", **told}


def reported(node: LedgerNode, world: World, *reports: dict[str, Any]) -> tuple[set[str], Changes]:
    found: list[dict[str, float | None]] = []
    changes = world.changed(lambda: found.append(report(node, *reports)))
    return set(found[0]), changes


def term(world: World, role: str = "r", epoch: int = 2) -> dict[str, Any]:
    return world.rows()["terms", world.namespace, role, epoch]


class Between:
    """The server's clock before and after: a moment that is told as an age lies that long before one in between."""

    def __init__(self, node: LedgerNode) -> None:
        self._node = node
        self._before = self._now()

    def _now(self) -> datetime:
        now: datetime = self._node.ask("SELECT clock_timestamp() AS now")["now"]
        return now

    def end(self) -> "Between":
        self._after = self._now()
        return self

    def is_ago(self, moment: str | float, ago_s: float) -> bool:
        """Milliseconds since 1970 are rounded, so one may be missing."""
        ago, slack = timedelta(seconds=ago_s), timedelta(milliseconds=1)
        if isinstance(moment, str):
            at = datetime.fromisoformat(moment)
        else:
            at = datetime.fromtimestamp(moment / 1000, self._after.tzinfo)
        return self._before - ago - slack <= at <= self._after - ago + slack


# --- What is recorded


def test_what_a_leader_tells_is_recorded_for_that_term_and_for_no_other(world: World) -> None:
    between = Between(world.two)
    roles, changes = reported(
        world.one,
        world,
        of("r", in_flight=3, work_failed=True, opened_age_s=50, opens_in_s=7, gaps=[[30, 20, "vetoed"]]),
        of("s", gate="draining", in_flight=4, opened_age_s=90, shut_age_s=60),
    )
    between.end()
    assert roles == {"r", "s"}
    r, s = (changes.pop(("terms", world.namespace, role, 2)) for role in "rs")
    assert changes == {}
    ((began_ms, ended_ms, why),) = r.pop("gaps")
    assert (between.is_ago(began_ms, 30), between.is_ago(ended_ms, 20), why) == (True, True, "vetoed")
    assert between.is_ago(r.pop("opened_at"), 50)
    assert between.is_ago(r.pop("opens_at"), -7)
    assert r == {"gate": "open", "in_flight": 3, "work_failed": True}
    assert between.is_ago(s.pop("opened_at"), 90)
    assert between.is_ago(s.pop("shut_at"), 60)
    assert s == {"gate": "draining", "in_flight": 4}


def test_what_is_told_next_replaces_what_was_told_but_for_the_first_opening_and_the_gaps(world: World) -> None:
    report(
        world.one, of(work_failed=True, in_flight=3, opened_age_s=50, shut_age_s=20, opens_in_s=7, gaps=[[3, 2, "a"]])
    )
    first = term(world)
    assert report(world.one, of(gate="waiting", opened_age_s=10, gaps=[[1, 0, "b"]])) == {"r": None}
    second = term(world)
    assert (second["opened_at"], second["gate"]) == (first["opened_at"], "waiting")
    assert (second["in_flight"], second["work_failed"], second["opens_at"], second["shut_at"]) == (
        None,
        False,
        None,
        None,
    )
    assert [gap[2] for gap in second["gaps"]] == ["a", "b"]
    report(world.one, of())
    assert [gap[2] for gap in term(world)["gaps"]] == ["a", "b"]


def test_the_newest_hundred_gaps_are_kept_in_their_order(world: World) -> None:
    for first in (0, 60):
        report(world.one, of(gaps=[[2, 1, str(number)] for number in range(first, first + 60)]))
    assert [gap[2] for gap in term(world)["gaps"]] == [str(number) for number in range(120 - GAPS_KEPT, 120)]


@pytest.mark.parametrize("age_s", [None, -1.0])
def test_an_age_before_the_send_is_none_if_there_is_none(world: World, age_s: float | None) -> None:
    report(world.one, of(opened_age_s=age_s, shut_age_s=age_s))
    assert (term(world)["opened_at"], term(world)["shut_at"]) == (None, None)


@pytest.mark.parametrize("age_s", [0.0, 1.0])
def test_an_age_may_be_nothing(world: World, age_s: float) -> None:
    between = Between(world.two)
    report(world.one, of(opened_age_s=age_s, shut_age_s=age_s))
    between.end()
    assert between.is_ago(term(world)["opened_at"], age_s)
    assert between.is_ago(term(world)["shut_at"], age_s)


def test_a_gate_did_not_open_or_shut_before_its_term_began(world: World) -> None:
    report(world.one, of(opened_age_s=10**6, shut_age_s=10**6))
    found = term(world)
    assert found["opened_at"] == found["shut_at"] == found["began_at"]


# --- Of whom


def test_a_report_of_another_term_or_of_anothers_or_of_one_that_has_ended_is_not_recorded(world: World) -> None:
    world.one.end_term("s", 2, clean=True)
    told = [of("r", 1), of("r", 3), of("s", 2), of("t", 2), of("unknown")]
    assert reported(world.one, world, *told) == (set(), {})
    assert reported(world.two, world, of("r"), of("t")) == ({"t"}, {("terms", world.namespace, "t", 2): ANY})


@pytest.mark.parametrize("late", [False, True])
def test_of_two_terms_of_a_role_only_what_is_told_of_the_open_one_counts(world: World, late: bool) -> None:
    """The report of the term before may come in the same message."""
    told = [of("r", 1, gate="released"), of("r", 2, opened_age_s=0)]
    (failover_s,) = report(world.one, *(reversed(told) if late else told)).values()
    assert failover_s is not None, "the open one opens for the first time"
    assert (term(world)["gate"], term(world, epoch=1)["gate"]) == ("open", None)


def test_who_is_not_recorded_for_its_backend_reports_nothing(world: World) -> None:
    def refused(node: LedgerNode, session_id: int) -> None:
        with pytest.raises(psycopg.Error) as error:
            node.conn.execute(REPORT, (session_id, json.dumps([of()])))
        assert error.value.sqlstate == REFUSED

    assert world.changed(lambda: refused(world.two, world.one.session_id)) == {}
    assert world.changed(lambda: refused(world.one, -1)) == {}
    world.one.ask("SELECT pgleaderlock.close_session(%s)", world.one.session_id)
    assert world.changed(lambda: refused(world.one, world.one.session_id)) == {}


def test_a_report_waits_for_nobody_who_holds_a_term(world: World) -> None:
    with world.held("terms", world.namespace, "r", 2):
        assert reported(world.one, world, of("r"), of("s"))[0] == {"s"}


@pytest.mark.parametrize("hold_kind", ["session", "lease"])
def test_nobody_waits_for_a_report_but_the_beat_of_a_lease_is_on_disk(
    ledger: str, nothing_left: None, hold_kind: str
) -> None:
    with contextlib.ExitStack() as nodes:
        world = Leases(ledger, nodes)
        node = world.one if hold_kind == "session" else world.lea
        names = ("lock_timeout", "synchronous_commit")

        def settings() -> list[Any]:
            return [next(iter(node.ask(f"SHOW {name}").values())) for name in names]

        before = settings()
        with world.lea.message() if hold_kind == "lease" else node.conn.transaction():
            report(node, of())
            assert settings() == ["50ms", "off" if hold_kind == "session" else "on"]
        assert settings() == before


# --- How long nobody could act


PREDECESSORS = {
    "it said nothing about its gate": ({}, "ended_at"),
    "its gate was shut": ({"gate": "'released'", "opened_at": "began_at", "shut_at": "began_at + '1 min'"}, "shut_at"),
    "its gate was open to its end": ({"gate": "'open'", "opened_at": "began_at"}, "ended_at"),
    "its gate opened after the end on record": ({"gate": "'open'", "opened_at": "ended_at + '1 min'"}, "opened_at"),
}


def predecessor(world: World, epoch: int, namespace: str, role: str, told: dict[str, str]) -> None:
    """A term that ended an hour ago, more or less, after an hour."""
    world.write(
        "INSERT INTO pgleaderlock.terms (namespace, role, epoch, session_id, node_id, holder_identity, began_at,"
        " ended_at, reason) VALUES (%s, %s, %s, -1, 'n', 'h', now() - interval '3 hours',"
        " now() - interval '2 hours' + %s * interval '1 minute', 'lost')",
        namespace, role, epoch, epoch,
    )  # fmt: skip
    for column, value in told.items():
        world.write(
            f"UPDATE pgleaderlock.terms SET {column} = {value} WHERE namespace = %s AND role = %s AND epoch = %s",
            namespace, role, epoch,
        )  # fmt: skip


@pytest.mark.parametrize("how", PREDECESSORS)
def test_when_a_gate_opens_for_the_first_time_it_is_told_how_long_nobody_could_act(world: World, how: str) -> None:
    """Since the last moment of the term before that could act; terms elsewhere and of other roles are not before it."""
    told, since = PREDECESSORS[how]
    world.write("DELETE FROM pgleaderlock.terms WHERE epoch = 1")
    predecessor(world, -5, world.namespace, "r", {})
    predecessor(world, -1, world.namespace, "r", told)
    predecessor(world, 0, world.namespace, "r", {"gate": "'waiting'"})  # it never opened
    predecessor(world, 1, world.elsewhere, "r", {})
    predecessor(world, 1, world.namespace, "t", {})
    found = report(world.one, of(opened_age_s=0), of("s", gate="waiting"))
    opened_at, last = term(world)["opened_at"], term(world, epoch=-1)[since]
    lasted = datetime.fromisoformat(opened_at) - datetime.fromisoformat(last)
    assert found == {"r": pytest.approx(lasted.total_seconds()), "s": None}
    assert report(world.one, of(opened_age_s=0)) == {"r": None}, "it is told once"
