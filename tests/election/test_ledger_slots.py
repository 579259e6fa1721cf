"""The ledger's slots, call by call: who may claim one, who may say how it ended, and that nothing else changes.

Quick, for the same reason as `test_ledger_functions.py`. `one` leads r in its second term; a slot is one of r.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import ANY

import psycopg
import pytest

from pgleaderlock.embedded import EmbeddedPostgres
from support.elections import fresh_database, until
from support.ledger_node import LedgerNode
from support.ledger_world import Changes, World

HOLDER = "one-by-hand"
EPOCH = 2
STALE = "PGL02"
NEW = (True, 1, None)
KEPT = 1000
"""So many slots of a name are kept."""


@pytest.fixture(scope="module")
def ledger(postgres: EmbeddedPostgres) -> Iterator[str]:
    with fresh_database(postgres.dsn, ledger=True) as dsn:
        yield dsn


@pytest.fixture
def world(ledger: str, nothing_left: None) -> Iterator[World]:
    """There are slots that only look like the one of the tests: of other names, of other ticks, and elsewhere."""
    with contextlib.ExitStack() as nodes:
        world = World(ledger, nodes)
        for namespace, name, slot in (
            (world.elsewhere, "r", "tick"),
            (world.namespace, "q", "tick"),
            (world.namespace, "s", "tick"),
            (world.namespace, "r", "tock"),
        ):
            for outcome in ("done", None):
                record(world, namespace=namespace, name=name, slot=slot if outcome else f"{slot}-open", outcome=outcome)
        yield world


def record(world: World, **slot: Any) -> None:
    """A slot as it was left by somebody: of the term before, unless it is said otherwise."""
    row = {"namespace": world.namespace, "name": "r", "slot": "tick", "epoch": EPOCH, "outcome": None, "attempts": 3}
    row |= slot
    world.write(
        "INSERT INTO pgleaderlock.slots (namespace, name, slot, epoch, holder_identity, attempts, outcome, ended_at,"
        " detail, claimed_at) VALUES (%s, %s, %s, %s, %s, %s, %s::text, CASE WHEN %s::text IS NOT NULL THEN now() END,"
        " 'before', '2020-01-01')",
        *(row["namespace"], row["name"], row["slot"], row["epoch"], row.get("holder", HOLDER), row["attempts"]),
        *(row["outcome"], row["outcome"]),
    )


def claim(world: World, *, retry: bool = False, epoch: int = EPOCH, node: LedgerNode | None = None) -> tuple[Any, ...]:
    row = (node or world.one).ask(
        "SELECT * FROM pgleaderlock.claim_slot(%s, 'r', 'tick', %s, %s, %s)", world.namespace, epoch, HOLDER, retry
    )
    return row["claimed"], row["attempts"], row["outcome"]


def claimed(world: World, **how: Any) -> tuple[tuple[Any, ...], Changes]:
    """The answer, and what changed."""
    answers: list[tuple[Any, ...]] = []
    changes = world.changed(lambda: answers.append(claim(world, **how)))
    return answers[0], changes


def tick(world: World) -> tuple[str, str, str, str]:
    return ("slots", world.namespace, "r", "tick")


# --- A slot is claimed


def test_a_slot_that_nobody_has_claimed_is_claimed_and_nothing_else_changes(world: World) -> None:
    answer, changes = claimed(world)
    assert answer == NEW
    assert changes == {
        tick(world): {
            "namespace": world.namespace,
            "name": "r",
            "slot": "tick",
            "epoch": EPOCH,
            "holder_identity": HOLDER,
            "attempts": 1,
            "claimed_at": ANY,
            "ended_at": None,
            "outcome": None,
            "detail": None,
        }
    }


@pytest.mark.parametrize(
    ("outcome", "of_this_term", "retry", "again"),
    [
        pytest.param(None, True, False, True, id="open, of this term: the answer may have been lost"),
        pytest.param(None, True, True, True, id="open, of this term, retry"),
        pytest.param(None, False, False, False, id="open, of a term before: its runner was lost"),
        pytest.param(None, False, True, True, id="open, of a term before, retry"),
        pytest.param("failed", True, False, False, id="failed"),
        pytest.param("failed", True, True, True, id="failed, retry"),
        pytest.param("failed", False, False, False, id="failed in a term before"),
        pytest.param("failed", False, True, True, id="failed in a term before, retry"),
        pytest.param("done", True, False, False, id="done"),
        pytest.param("done", True, True, False, id="done, retry"),
        pytest.param("done", False, False, False, id="done in a term before"),
        pytest.param("done", False, True, False, id="done in a term before, retry"),
    ],
)
def test_a_slot_that_was_claimed_before_is_claimed_again_only_if_it_may_run_again(
    world: World, outcome: str | None, of_this_term: bool, retry: bool, again: bool
) -> None:
    record(world, outcome=outcome, epoch=EPOCH if of_this_term else EPOCH - 1, holder="another")
    answer, changes = claimed(world, retry=retry)
    if not again:
        assert (answer, changes) == ((False, 3, outcome), {})
        return
    assert answer == (True, 4, None)
    expected = {"attempts": 4, "holder_identity": HOLDER, "claimed_at": ANY, "detail": None}
    expected |= {} if of_this_term else {"epoch": EPOCH}
    expected |= {} if outcome is None else {"outcome": None, "ended_at": None}
    assert changes == {tick(world): expected}


def test_a_slot_is_claimed_in_the_current_term_only(world: World) -> None:
    def refused() -> None:
        with pytest.raises(psycopg.Error) as error:
            claim(world, epoch=EPOCH - 1)
        assert error.value.sqlstate == STALE

    assert world.changed(refused) == {}


def test_no_later_term_begins_before_a_claim_has_committed(world: World) -> None:
    assert world.one.unlock("r")
    assert world.two.lock("r")
    runner = world.node("runner")
    with runner.conn.transaction():
        assert claim(world, node=runner) == NEW
        assert world.two.bump("r")["outcome"] == "busy"
    assert world.two.bump("r")["outcome"] == "won"


@pytest.mark.parametrize("retry", [False, True], ids=["keep", "retry"])
@pytest.mark.parametrize(("commits", "answer"), [(True, (True, 2, None)), (False, NEW)], ids=["commits", "rolls back"])
async def test_a_claim_that_is_asked_again_while_the_first_one_commits_is_had(
    world: World, *, commits: bool, retry: bool, answer: tuple[Any, ...]
) -> None:
    """The session of the first one is gone for the client, and its statement still runs at the server."""
    first = world.node("first")
    with first.conn.transaction(force_rollback=not commits):
        assert claim(world, retry=retry, node=first) == NEW
        again = asyncio.create_task(asyncio.to_thread(claim, world, retry=retry))
        await until(lambda: world.waits(world.one), "the claim waits")
    assert await again == answer


async def test_a_claim_waits_for_a_runner_that_says_just_now_that_it_is_done(world: World) -> None:
    """The runner of a term before: it was thought lost, and a second run would be one too many."""
    record(world, epoch=EPOCH - 1)
    late = world.node("late")
    with late.conn.transaction():
        assert finish(world, "done", epoch=EPOCH - 1, node=late)
        claiming = asyncio.create_task(asyncio.to_thread(claim, world, retry=True))
        await until(lambda: world.waits(world.one), "the claim waits")
    assert await claiming == (False, 3, "done")


def test_of_each_name_the_newest_thousand_slots_are_kept(world: World) -> None:
    """Those of other names and namespaces count for nothing, though there are many and they are newer."""
    for namespace, name, since in (
        (world.namespace, "r", "2021-01-01"),
        (world.namespace, "s", "2022-01-01"),
        (world.elsewhere, "r", "2022-01-01"),
    ):
        world.write(
            "INSERT INTO pgleaderlock.slots (namespace, name, slot, epoch, holder_identity, outcome, claimed_at)"
            " SELECT %s, %s, 'n' || n, 1, 'h', 'done', %s::timestamptz + n * interval '1 minute'"
            " FROM generate_series(1, %s) n",
            namespace, name, since, KEPT,
        )  # fmt: skip
    before = {key for key in world.rows() if key[0] == "slots"}
    assert claim(world) == NEW
    after = {key for key in world.rows() if key[0] == "slots"}
    assert after - before == {tick(world)}
    mine = ("slots", world.namespace, "r")
    assert before - after == {(*mine, "tock"), (*mine, "tock-open"), (*mine, "n1")}


# --- A slot ends


def finish(
    world: World,
    outcome: str,
    *,
    epoch: int = EPOCH,
    holder: str = HOLDER,
    node: LedgerNode | None = None,
) -> bool:
    query = "SELECT pgleaderlock.finish_slot(%s, 'r', 'tick', %s, %s, %s, 'why') AS finished"
    return bool((node or world.two).ask(query, world.namespace, epoch, holder, outcome)["finished"])


def finished(world: World, outcome: str, **who: Any) -> tuple[bool, Changes]:
    answers: list[bool] = []
    changes = world.changed(lambda: answers.append(finish(world, outcome, **who)))
    return answers[0], changes


@pytest.mark.parametrize("outcome", ["done", "failed"])
@pytest.mark.parametrize("epoch", [EPOCH - 1, EPOCH], ids=["after its term", "in its term"])
def test_who_has_claimed_a_slot_says_how_it_ended_and_may_say_it_twice(world: World, outcome: str, epoch: int) -> None:
    record(world, epoch=epoch)
    assert finished(world, outcome, epoch=epoch) == (
        True,
        {tick(world): {"outcome": outcome, "detail": "why", "ended_at": ANY}},
    )
    assert finish(world, outcome, epoch=epoch), "the answer may have been lost"


@pytest.mark.parametrize("who", [{"epoch": EPOCH - 1}, {"holder": "another"}], ids=str)
def test_of_a_slot_that_another_has_claimed_nobody_else_says_how_it_ended(world: World, who: dict[str, Any]) -> None:
    record(world)
    assert finished(world, "done", **who) == (False, {})


def test_a_slot_that_has_ended_does_not_end_otherwise(world: World) -> None:
    record(world, outcome="done")
    assert finished(world, "failed") == (False, {})


def test_a_slot_that_nobody_has_claimed_does_not_end(world: World) -> None:
    assert finished(world, "done") == (False, {})
