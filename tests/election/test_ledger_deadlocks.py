"""No two functions of the ledger wait for each other: every pair, side by side, under a scheduler that is unkind.

Triggers on the ledger's tables make each row's change take a while, so that whatever can come between does. A deadlock
shows as SQLSTATE 40P01, and the server is told to look for one after a millisecond.
"""

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import psycopg
import pytest

from support.counts import count
from support.elections import fresh_database, one
from support.ledger_node import LedgerNode, ledger_node

ROLES = [f"role-{number}" for number in range(6)]
DEADLOCK = "40P01"
# What a function may say all the same: its session was ended by the other one, or an operator's patience is over.
EXPECTED = {"PGL03", "55P03"}
SLOW_DOWN = """
    CREATE FUNCTION public.dawdle() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        PERFORM pg_sleep(random() * 0.003);
        RETURN coalesce(NEW, OLD);
    END $$;
    DO $$
    DECLARE
        ledger text;
    BEGIN
        FOREACH ledger IN ARRAY ARRAY['sessions', 'leaders', 'terms', 'requests'] LOOP
            EXECUTE format('CREATE TRIGGER dawdle BEFORE UPDATE OR DELETE ON pgleaderlock.%I'
                           ' FOR EACH ROW EXECUTE FUNCTION public.dawdle()', ledger);
        END LOOP;
    END $$;
"""


class Actor:
    """One connection that calls the ledger's functions with everything there is, in an order of its own."""

    def __init__(self, node: LedgerNode, seed: int) -> None:
        self.node, self.rng = node, random.Random(seed)

    def shuffled(self, values: list[Any]) -> list[Any]:
        return self.rng.sample(values, len(values))

    def requests(self) -> list[int]:
        rows = self.node.conn.execute("SELECT request_id FROM pgleaderlock.requests WHERE done_at IS NULL").fetchall()
        return self.shuffled([row["request_id"] for row in rows])

    def call(self, name: str) -> None:
        getattr(self, name)()

    def prepare(self, other: "Actor") -> None:
        """Lead everything, be asked for everything, and perhaps have given it up just now: so there is much to do."""
        for actor in (self, other):
            actor.node.reopen_if_ended()
            actor.node.ask("SELECT pg_advisory_unlock_all(), set_config('session_replication_role', 'replica', false)")
        self.bump()
        self.node.ask(
            "SELECT count(pgleaderlock.request_step_down(r, 'pgleaderlock', NULL, 'c')) FROM unnest(%s::text[]) r",
            self.shuffled(ROLES * 3),
        )
        if self.rng.random() < 0.7:
            self.end_term()
        for actor in (self, other):
            actor.node.ask("SELECT set_config('session_replication_role', 'origin', false)")

    def try_locks(self) -> None:
        for role in self.shuffled(ROLES):
            self.node.lock(role)

    # --- The functions

    def bump(self) -> None:
        self.try_locks()
        roles = self.shuffled(ROLES)
        keys = [self.node._keys(role, None) for role in roles]
        self.node.ask(
            "SELECT count(*) FROM pgleaderlock.bump(%s, %s, %s, %s, 0, 'c')",
            self.node.session_id, roles, [key for key, _ in keys], [key for _, key in keys],
        )  # fmt: skip

    def tick(self) -> None:
        self.node.tick(*self.shuffled(ROLES))

    def end_term(self) -> None:
        leads = "SELECT role, epoch FROM pgleaderlock.leaders WHERE session_id = %s AND NOT ended"
        rows = self.shuffled(self.node.conn.execute(leads.encode(), (self.node.session_id,)).fetchall())
        roles, epochs = [row["role"] for row in rows], [row["epoch"] for row in rows]
        self.node.ask(
            "SELECT count(*) FROM pgleaderlock.end_term(%s, %s, %s, %s, 'released')",
            self.node.session_id, roles, epochs, [True for _ in roles],
        )  # fmt: skip
        self.node.ask("SELECT pg_advisory_unlock_all()")

    def request_step_down(self) -> None:
        for role in self.shuffled(ROLES):
            self.node.ask("SELECT pgleaderlock.request_step_down(%s, 'pgleaderlock', 'b', 'c')", role)

    def request_of_node(self) -> None:
        for kind, node in itertools.product(("drain", "resume"), ("a", "b")):
            self.node.ask(f"SELECT pgleaderlock.request_{kind}(%s, 'pgleaderlock', 'c')", node)

    def settle_requests(self) -> None:
        self.node.ask(
            "SELECT count(pgleaderlock.settle_request(%s, r, 'done', NULL)) FROM unnest(%s::bigint[]) r",
            self.node.session_id, self.requests(),
        )  # fmt: skip

    def reserve(self) -> None:
        self.node.ask("SELECT pgleaderlock.reserve(%s, %s)", self.node.session_id, self.requests())

    def advance_epoch(self) -> None:
        self.node.ask("SELECT set_config('lock_timeout', '2s', false)")
        self.node.ask("SELECT pgleaderlock.advance_epoch(%s, 'pgleaderlock', 'c')", self.rng.choice(ROLES))

    def note_eviction(self) -> None:
        gone = "SELECT session_id FROM pgleaderlock.sessions WHERE node_id = 'gone' ORDER BY random() LIMIT 3"
        for row in self.node.conn.execute(gone).fetchall():
            self.node.ask("SELECT pgleaderlock.note_eviction(%s, %s)", self.node.session_id, row["session_id"])

    def open_session(self) -> None:
        """The same process, on a new session of the same backend: the one before is over."""
        self.node.open()

    def prune(self) -> None:
        self.node.ask("SELECT pgleaderlock.prune('pgleaderlock', '1 hour', 1000)")


FUNCTIONS = (
    "bump", "tick", "end_term", "request_step_down", "request_of_node", "settle_requests", "reserve", "advance_epoch",
    "note_eviction", "open_session", "prune",
)  # fmt: skip


@pytest.fixture
def database(dsn: str) -> Iterator[str]:
    with fresh_database(dsn, ledger=True) as ledger:
        with psycopg.connect(ledger, autocommit=True) as dba:
            dba.execute(SLOW_DOWN)
            dba.execute("ALTER ROLE postgres SET deadlock_timeout = '1ms'")
        try:
            # Terms that nobody has closed, of sessions that are gone.
            for _ in range(3):
                with ledger_node(ledger, "gone") as gone:
                    for role in ROLES[:2]:
                        if gone.lock(role):
                            gone.bump(role)
            yield ledger
        finally:
            with psycopg.connect(dsn, autocommit=True) as dba:
                dba.execute("ALTER ROLE postgres RESET deadlock_timeout")


@pytest.mark.timeout(3600)
def test_no_pair_of_functions_of_the_ledger_deadlocks(database: str) -> None:
    pairs = list(itertools.combinations_with_replacement(FUNCTIONS, 2))
    total = count(2 * len(pairs), 10_000)
    rng = random.Random(3)
    with ledger_node(database, "a") as a, ledger_node(database, "b") as b:
        first, second = Actor(a, 1), Actor(b, 2)
        for number in range(total):
            leader, other = rng.sample([first, second], 2)
            leader.prepare(other)
            names = pairs[number % len(pairs)]
            calls = [
                partial(actor.call, name) for actor, name in zip(rng.sample([first, second], 2), names, strict=True)
            ]
            for error in side_by_side(*calls):
                assert error.sqlstate != DEADLOCK, f"{names[0]} and {names[1]} wait for each other: {error}"
                assert error.sqlstate in EXPECTED, f"{names[0]} beside {names[1]}: {error}"
    terms = one(database, "SELECT count(*) AS n FROM pgleaderlock.terms")["n"]
    assert terms > total / 20, "hardly anybody led: this shows nothing"


def side_by_side(*calls: Callable[[], None]) -> list[psycopg.Error]:
    """Run them at once; answers what the server refused."""
    errors: list[psycopg.Error] = []
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], None]) -> None:
        barrier.wait()
        try:
            call()
        except psycopg.Error as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors
