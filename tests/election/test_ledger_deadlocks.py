"""No two functions of the ledger wait for each other: every pair, side by side, under a scheduler that is unkind.

Triggers on the ledger's tables make each row's change take a while, so that whatever can come between does. A deadlock
shows as SQLSTATE 40P01, and the server is told to look for one after a millisecond.
"""

import contextlib
import itertools
import json
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import psycopg
import pytest

from support.counts import count
from support.elections import fresh_database, one
from support.ledger_node import LeasedNode, LedgerNode, leased_node, ledger_node

ROLES = [f"role-{number}" for number in range(6)]
DEADLOCK = "40P01"
# What a function may say all the same: its session, its lease or its term was ended by the other one, an operator's
# patience is over, or two claim one slot at the same time.
EXPECTED = {"PGL02", "PGL03", "PGL06", "55P03", "23505"}
ASLEEP = "UPDATE pgleaderlock.sessions SET last_heartbeat = last_heartbeat - interval '1 day' WHERE session_id = %s"
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
        FOREACH ledger IN ARRAY ARRAY['sessions', 'leaders', 'terms', 'requests', 'slots'] LOOP
            EXECUTE format('CREATE TRIGGER dawdle BEFORE UPDATE OR DELETE ON pgleaderlock.%I'
                           ' FOR EACH ROW EXECUTE FUNCTION public.dawdle()', ledger);
        END LOOP;
    END $$;
"""


class Actor:
    """A session and a lease that call the ledger's functions with everything there is, in an order of their own."""

    def __init__(self, node: LedgerNode, lease: LeasedNode, seed: int) -> None:
        self.node, self.lease, self.rng = node, lease, random.Random(seed)

    def shuffled(self, values: list[Any]) -> list[Any]:
        return self.rng.sample(values, len(values))

    def requests(self) -> list[int]:
        rows = self.node.conn.execute("SELECT request_id FROM pgleaderlock.requests WHERE done_at IS NULL").fetchall()
        return self.shuffled([row["request_id"] for row in rows])

    def call(self, name: str) -> None:
        getattr(self, name)()

    def prepare(self, other: "Actor") -> None:
        """Lead everything, be asked for everything, and perhaps have given it up just now: so there is much to do.

        By the session or by the lease. A lease that has led may have fallen silent, and somebody wants its keys.
        """
        for actor in (self, other):
            for node in (actor.node, actor.lease):
                node.reopen_if_ended()
                node.ask("SELECT pg_advisory_unlock_all(), set_config('session_replication_role', 'replica', false)")
            actor.lease_end_term()
        by_lease = self.rng.random() < 0.5
        if by_lease:
            self.lease_take()
        else:
            self.bump()
        self.node.ask(
            "SELECT count(pgleaderlock.request_step_down(r, 'pgleaderlock', NULL, 'c')) FROM unnest(%s::text[]) r",
            self.shuffled(ROLES * 3),
        )
        if self.rng.random() < 0.7:
            self.lease_end_term() if by_lease else self.end_term()
        elif by_lease:
            self.lease.conn.execute(ASLEEP, (self.lease.session_id,))
        for actor in (self, other):
            for node in (actor.node, actor.lease):
                node.ask("SELECT set_config('session_replication_role', 'origin', false)")

    def try_locks(self) -> None:
        for role in self.shuffled(ROLES):
            self.node.lock(role)

    # --- The functions

    def bump(self) -> None:
        self.try_locks()
        self.node.ask("SELECT count(*) FROM pgleaderlock.bump(%s, %s, %s, %s, 0, 'c')", *self._wanted(self.node))

    def _wanted(self, node: LedgerNode) -> tuple[Any, ...]:
        """All roles with their keys. One of them has a new name, perhaps."""
        roles = self.shuffled(ROLES)
        keys = [node._keys(role, None) for role in roles]
        if self.rng.random() < 0.3:
            roles[0] = "renamed"
        return node.session_id, roles, [key for key, _ in keys], [key for _, key in keys]

    def tick(self) -> None:
        self.node.tick(*self.shuffled(ROLES))

    def end_term(self) -> None:
        self._end_terms(self.node)
        self.node.ask("SELECT pg_advisory_unlock_all()")

    def _end_terms(self, node: LedgerNode) -> None:
        leads = "SELECT role, epoch FROM pgleaderlock.leaders WHERE session_id = %s AND NOT ended"
        rows = self.shuffled(node.conn.execute(leads.encode(), (node.session_id,)).fetchall())
        roles, epochs = [row["role"] for row in rows], [row["epoch"] for row in rows]
        node.ask(
            "SELECT count(*) FROM pgleaderlock.end_term(%s, %s, %s, %s, 'released')",
            node.session_id, roles, epochs, [True for _ in roles],
        )  # fmt: skip

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

    def end_silent_leases(self) -> None:
        self._end_silent(self.node)

    def _end_silent(self, node: LedgerNode) -> None:
        """Every lease there is, at the beat that it has."""
        leases = "SELECT session_id, beat FROM pgleaderlock.sessions WHERE hold = 'lease' AND ended_at IS NULL"
        rows = self.shuffled(node.conn.execute(leases.encode()).fetchall())
        node.ask(
            "SELECT count(*) FROM pgleaderlock.end_silent_leases(%s, %s, %s)",
            node.session_id, [row["session_id"] for row in rows], [row["beat"] for row in rows],
        )  # fmt: skip

    def report_gates(self) -> None:
        self._report(self.node)

    def _report(self, node: LedgerNode) -> None:
        terms = "SELECT role, epoch, 'open' AS gate, 0 AS opened_age_s FROM pgleaderlock.leaders"
        reports = self.shuffled(node.conn.execute(terms.encode()).fetchall())
        node.ask("SELECT count(*) FROM pgleaderlock.report_gates(%s, %s)", node.session_id, json.dumps(reports))

    def declare_roles(self) -> None:
        self.node.ask("SELECT pgleaderlock.declare_roles(%s, %s)", self.node.session_id, self.shuffled(ROLES))

    def claim_slot(self) -> None:
        for row in self._terms():
            self.node.ask(
                "SELECT pgleaderlock.claim_slot('pgleaderlock', %s, 'tick', %s, %s, true)",
                row["role"], row["epoch"], row["holder_identity"],
            )  # fmt: skip

    def finish_slot(self) -> None:
        for row in self._terms():
            self.node.ask(
                "SELECT pgleaderlock.finish_slot('pgleaderlock', %s, 'tick', %s, %s, 'failed', NULL)",
                row["role"], row["epoch"], row["holder_identity"],
            )  # fmt: skip

    def _terms(self) -> list[Any]:
        """The current ones, whoever leads them."""
        terms = (
            "SELECT role, epoch, holder_identity FROM pgleaderlock.terms JOIN pgleaderlock.leaders USING (role, epoch)"
        )
        return self.shuffled(self.node.conn.execute(terms.encode()).fetchall())

    # --- Those of a lease, each in a message

    def lease_beat(self) -> None:
        with self.lease.message():
            self.lease.ask(
                "SELECT * FROM pgleaderlock.heartbeat(%s, %s, NULL)", self.lease.session_id, self.shuffled(ROLES)
            )

    def lease_take(self) -> None:
        with self.lease.message():
            self._take()

    def lease_evict_and_take(self) -> None:
        with self.lease.message():
            self._end_silent(self.lease)
            self._take()

    def _take(self) -> None:
        wanted = self._wanted(self.lease)
        self.lease.ask("SELECT pgleaderlock.lease_lock(%s, %s, %s, %s)", *wanted)
        self.lease.ask("SELECT count(*) FROM pgleaderlock.bump(%s, %s, %s, %s, 0, 'c')", *wanted)

    def lease_end_term(self) -> None:
        with self.lease.message():
            self._end_terms(self.lease)

    def lease_settle(self) -> None:
        with self.lease.message():
            self.lease.ask(
                "SELECT count(pgleaderlock.settle_request(%s, r, 'done', NULL)) FROM unnest(%s::bigint[]) r",
                self.lease.session_id, self.requests(),
            )  # fmt: skip

    def lease_report(self) -> None:
        with self.lease.message():
            self._report(self.lease)

    def lease_open(self) -> None:
        """The same process, after it has lost its lease: that one is over."""
        self.lease.open(previous=self.lease.session_id)


FUNCTIONS = (
    "bump", "tick", "end_term", "request_step_down", "request_of_node", "settle_requests", "reserve", "advance_epoch",
    "note_eviction", "open_session", "prune", "end_silent_leases", "report_gates", "declare_roles", "claim_slot",
    "finish_slot", "lease_beat", "lease_take", "lease_evict_and_take", "lease_end_term", "lease_settle",
    "lease_report", "lease_open",
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
    total = count(len(pairs), 10_000)
    rng = random.Random(3)
    with contextlib.ExitStack() as nodes:
        first, second = (
            Actor(
                nodes.enter_context(ledger_node(database, name)), nodes.enter_context(leased_node(database, name)), seed
            )
            for seed, name in ((1, "a"), (2, "b"))
        )
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
    for hold in ("session", "lease"):
        terms = (
            "SELECT count(*) AS n FROM pgleaderlock.terms JOIN pgleaderlock.sessions USING (session_id) WHERE hold = %s"
        )
        assert one(database, terms, hold)["n"] > total / 20, f"hardly any {hold} led: this shows nothing"
    assert one(database, "SELECT sum(attempts) AS n FROM pgleaderlock.slots")["n"] > total / 20


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
