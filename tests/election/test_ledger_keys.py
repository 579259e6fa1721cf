"""One role, one key: two keys for one name never have two winners, and a key follows a name that was changed."""

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from support.elections import admin, fresh_database, one
from support.ledger_node import LedgerNode, eventually, leased_node, ledger_node

OLD_KEY, KEY, OTHER_KEY = (10, 7), (11, 7), (12, 7)
WAIT_MS = 20_000
"""A bound against hanging, never a measure."""


@pytest.fixture
def database(dsn: str) -> Iterator[str]:
    with fresh_database(dsn, ledger=True) as ledger:
        yield ledger


def row_of(database: str, role: str) -> dict[str, Any]:
    return one(database, "SELECT * FROM pgleaderlock.leaders WHERE role = %s", role)


def waits_for_the_fence(database: str, node: LedgerNode) -> bool:
    query = "SELECT count(*) AS n FROM pg_locks WHERE pid = %s AND locktype = 'advisory' AND NOT granted"
    return bool(one(database, query, node.conn.info.backend_pid)["n"])


# --- Two keys for one role


@pytest.mark.parametrize("led_before", [False, True])
def test_of_two_bumps_under_two_keys_one_wins_though_the_second_waited_for_the_fence(
    database: str, led_before: bool
) -> None:
    """When it began to wait, the first one's key was not recorded yet."""
    if led_before:
        with ledger_node(database, "zero") as zero:
            zero.end_term("r", zero.lead("r", OLD_KEY), clean=True)
    answers: list[dict[str, Any]] = []
    with ledger_node(database, "first") as first, ledger_node(database, "second") as second:
        assert first.lock("r", KEY)
        assert second.lock("r", OTHER_KEY)
        first.conn.execute("BEGIN")
        assert first.bump("r", KEY)["outcome"] == "won"
        waiting = threading.Thread(target=lambda: answers.append(second.bump("r", OTHER_KEY, WAIT_MS)))
        waiting.start()
        eventually(lambda: waits_for_the_fence(database, second))
        first.conn.execute("COMMIT")
        waiting.join()
        assert [answer["outcome"] for answer in answers] == ["collision"]
        row = row_of(database, "r")
        assert (row["key1"], row["key2"], row["session_id"]) == (*KEY, first.session_id)
        assert first.tick()["roles"] == 1


def test_a_role_takes_a_new_key_once_nobody_holds_the_lock_of_the_old_one(database: str) -> None:
    with ledger_node(database, "first") as first, ledger_node(database, "second") as second:
        first.lead("r", OLD_KEY)
        assert second.lock("r", KEY)
        assert second.bump("r", KEY)["outcome"] == "collision"
        first.conn.close()
        eventually(lambda: second.bump("r", KEY)["outcome"] == "won")
        assert (row_of(database, "r")["key1"], row_of(database, "r")["epoch"]) == (KEY[0], 2)


# --- Two names for one key


def test_a_keyed_role_can_be_renamed_when_the_node_that_led_it_is_gone(database: str) -> None:
    with ledger_node(database, "first") as first:
        epoch = first.lead("old", KEY)
        assert first.end_term("old", epoch, clean=True)
    with ledger_node(database, "second") as second:
        won = until_won(second, "new")
        assert (won["epoch"], won["prev_clean"]) == (1, True)
    assert (row_of(database, "new")["key1"], row_of(database, "new")["key2"]) == KEY
    old = row_of(database, "old")
    assert (old["key1"], old["key2"], old["epoch"]) == (None, None, 1), "the old name keeps its epoch, and has no key"


def test_who_leads_under_a_new_name_waits_for_a_leader_that_was_lost_under_the_old_one(database: str) -> None:
    with ledger_node(database, "first", gate_s=500, lease_s=600) as first:
        first.lead("old", KEY)
    with ledger_node(database, "second", gate_s=1, lease_s=2) as second:
        won = until_won(second, "new")
        assert (won["prev_clean"], won["prev_wait_t"], won["prev_session_id"]) == (False, 600.0, None)
        assert row_of(database, "new")["wait_t"] == 600.0
        # It has waited: whoever comes next has nothing to do with the old name any more.
        second.tick("new")
        assert second.end_term("new", won["epoch"], clean=True)
        second.unlock("new", KEY)
    with ledger_node(database, "third") as third:
        assert until_won(third, "new")["prev_clean"]


def test_a_name_whose_key_has_moved_is_led_again_under_another_key_with_a_higher_epoch(database: str) -> None:
    with ledger_node(database, "first") as first:
        first.end_term("old", first.lead("old", KEY), clean=True)
    with ledger_node(database, "second") as second, ledger_node(database, "third") as third:
        until_won(second, "new")
        assert third.lead("old", OTHER_KEY) == 2


def test_two_names_of_one_key_are_caught_while_nodes_of_both_are_running(database: str) -> None:
    with ledger_node(database, "first") as first, ledger_node(database, "second") as second:
        epoch = first.lead("a", KEY)
        first.end_term("a", epoch, clean=True)
        first.unlock("a", KEY)
        assert second.lock("b", KEY)
        assert second.bump("b", KEY)["outcome"] == "collision"
        assert row_of(database, "a")["key1"] == KEY[0]


@pytest.mark.parametrize("taker", ["session", "lease"])
def test_a_lease_that_slept_while_its_key_went_to_a_new_name_leads_nothing_when_it_wakes_up(
    database: str, taker: str
) -> None:
    """No lock of its own keeps the key: whoever takes it ends the lease, or two names of one key are led."""
    with leased_node(database, "sleeper") as sleeper:
        with sleeper.message():
            assert sleeper.take("old", KEY)["outcome"] == "won"
        asleep_for_an_hour(database)
        if taker == "session":
            with ledger_node(database, "second") as second:
                assert second.lock("new", KEY)
                assert second.bump("new", KEY)["outcome"] == "won"
        else:
            with leased_node(database, "second") as heir, heir.message():
                assert heir.take("new", KEY)["outcome"] == "won"
        with pytest.raises(psycopg.Error, match="is over"), sleeper.message():
            sleeper.tick()


def test_the_key_of_a_lease_that_beats_is_not_moved_to_a_new_name(database: str) -> None:
    with leased_node(database, "leads") as leads, ledger_node(database, "second") as second:
        with leads.message():
            assert leads.take("old", KEY)["outcome"] == "won"
        asleep_for_an_hour(database)
        assert second.lock("new", KEY)
        with leads.message():  # its beat is on the way when the other one looks
            assert second.bump("new", KEY)["outcome"] == "collision"
            assert leads.tick()["roles"] == 1
        assert second.bump("new", KEY)["outcome"] == "collision"
        with leads.message():
            assert leads.tick()["roles"] == 1


def asleep_for_an_hour(database: str) -> None:
    """By the record of the only lease."""
    asleep = (
        "UPDATE pgleaderlock.sessions SET last_heartbeat = now() - interval '1 hour' WHERE hold = 'lease' RETURNING 1"
    )
    one(database, asleep)


def until_won(node: LedgerNode, role: str) -> dict[str, Any]:
    """The bump, as soon as the server has noticed that the one before is gone."""
    eventually(lambda: node.lock(role, KEY))
    answers = (node.bump(role, KEY) for _ in itertools.count())
    won = eventually(lambda: next(answer if answer["outcome"] == "won" else None for answer in answers))
    assert won is not None
    return won


def test_a_node_that_is_refused_for_a_wrong_key_has_taken_nothing_from_anybody(database: str) -> None:
    """Neither the role from who leads it under the right key, nor the wait for whoever was lost under the wrong one."""
    with ledger_node(database, "lost", gate_s=500, lease_s=600) as lost:
        lost.lead("old", KEY)
    with ledger_node(database, "leads") as leads, ledger_node(database, "wrong") as wrong:
        leads.lead("r", OTHER_KEY)
        eventually(lambda: wrong.lock("r", KEY))
        eventually(lambda: not is_live(database, "lost"))
        assert wrong.bump("r", KEY)["outcome"] == "collision"
        assert row_of(database, "r")["session_id"] == leads.session_id
        assert leads.tick()["roles"] == 1
        wrong.unlock("r", KEY)
        with ledger_node(database, "heir", gate_s=1, lease_s=2) as heir:
            won = until_won(heir, "new")
            assert (won["prev_clean"], won["prev_wait_t"]) == (False, 600.0)


def test_a_key_that_moves_to_another_namespace_after_a_failover_brings_the_longest_wait_of_the_old_one(
    database: str,
) -> None:
    """Whoever led in the commits that were lost may have had the longest lease of that namespace."""
    with (
        ledger_node(database, "first", gate_s=500, lease_s=600, namespace="old") as first,
        ledger_node(database, "second", gate_s=5000, lease_s=6000, namespace="old"),
    ):
        first.end_term("r", first.lead("r", KEY), clean=True)
    with admin(database) as dba:
        dba.execute("UPDATE pgleaderlock.leaders SET timeline = 0")
    eventually(lambda: not is_live(database, "first"))
    with ledger_node(database, "third", gate_s=1, lease_s=2, namespace="new") as third:
        won = until_won(third, "r")
        assert (won["prev_clean"], won["prev_wait_t"]) == (False, 6000.0)


def is_live(database: str, node_id: str) -> bool:
    query = "SELECT bool_or(pgleaderlock.is_live(s)) AS live FROM pgleaderlock.sessions s WHERE node_id = %s"
    return bool(one(database, query, node_id)["live"])


# --- Rows that somebody holds


def test_a_row_that_somebody_holds_makes_one_role_busy_and_delays_no_other(database: str) -> None:
    with ledger_node(database, "node") as node, admin(database) as operator:
        node.end_term("held", node.lead("held"), clean=True)
        assert node.lock("free")
        operator.execute("BEGIN")
        operator.execute("SELECT FROM pgleaderlock.leaders WHERE role = 'held' FOR UPDATE")
        assert node.bump("held")["outcome"] == "busy"
        assert node.bump("free")["outcome"] == "won"
        operator.execute("ROLLBACK")
        assert node.bump("held")["outcome"] == "won"
