"""No write of an older epoch commits after a newer one began: thousands of attempts, while leaders come and go.

The order is read from the database and not from a clock, in two ways. With leaders played by hand, each bump counts in
its own transaction the writes of older epochs that are committed by then; at the end there must be exactly as many.
With real elections under faults, the server's write-ahead log gives the commits in their order. Each harness is also
run with a fence that was broken on purpose, and must see it: else its silence would prove nothing.
"""

import asyncio
import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import IsolationLevel

from conftest import StartServer
from pgleaderlock.embedded import EmbeddedPostgres
from pgleaderlock.errors import StaleEpoch
from pgleaderlock.fence import fenced
from pgleaderlock.migrate import migrate
from pgleaderlock.models import LeaderToken
from support.commit_order import WRITES_TABLE, CommitOrder
from support.counts import count
from support.election_node import SendLog
from support.election_storm import MIDDLE, QUICK, SLOW, Storm
from support.elections import until
from support.fencing import Leader, ledger_database, take_out
from support.storm_writers import INSERT, LEVELS, StormWriters, write_after_a_look, write_by_fenced, write_by_sql

WRITERS = 6
# How long a writer dawdles between its fence and its commit, and a bump before its own: others shall come between.
DAWDLE_S = 0.002
# A term lasts until enough has been written in it, or for this long: all writers may be waiting for its end.
TERM_S = 0.05

_OLDER = "SELECT count(*) FROM writes WHERE epoch < %s"


@pytest.fixture
def ledger(postgres: EmbeddedPostgres, nothing_left: None) -> Iterator[str]:
    with ledger_database(postgres.dsn) as dsn:
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute(WRITES_TABLE)
        yield dsn


@dataclass
class Outcome:
    """What a run has seen."""

    refused: int = 0
    """Attempts by leaders that were known to be stale when they asked, and were refused."""
    accepted: list[str] = field(default_factory=list)
    """Such attempts that were committed all the same: none is allowed."""
    committed: int = 0
    """Attempts with a token that was current when they began, and were committed."""
    overtaken: int = 0
    """The same, but refused because a bump came first."""
    late: list[str] = field(default_factory=list)
    """Writes that were committed after a newer epoch had begun: none is allowed."""
    bumps: int = 0

    @property
    def violations(self) -> list[str]:
        return self.accepted + self.late


class Harness:
    """Two nodes that take the lock from each other, and writers that hold tokens of all ages."""

    def __init__(self, dsn: str, level: IsolationLevel, attempts: int) -> None:
        self.dsn, self.level, self.attempts = dsn, level, attempts
        self.outcome = Outcome()
        self.tokens: list[LeaderToken] = []
        """Every token whose bump was acknowledged; the last one is current, as far as anybody can know."""
        self.bumped = asyncio.Event()
        self.committed_before: dict[int, int] = {}

    @property
    def done(self) -> bool:
        enough = self.outcome.refused >= self.attempts and self.outcome.committed >= self.outcome.refused
        return enough or bool(self.outcome.accepted)

    async def run(self) -> Outcome:
        with Leader(self.dsn, "writer", node="one") as one, Leader(self.dsn, "writer", node="two") as two:
            await asyncio.to_thread(self._bump, one)
            async with asyncio.TaskGroup() as tasks:
                for number in range(WRITERS):
                    tasks.create_task(self._write(random.Random(number)))
                await self._lead([one, two])
        self._compare()
        return self.outcome

    async def _lead(self, leaders: list[Leader]) -> None:
        while not self.done:
            old, new = leaders
            before = self.outcome.committed
            old.unlock()
            await asyncio.to_thread(self._bump, new)
            self.bumped.set()
            self.bumped = asyncio.Event()
            leaders = [new, old]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TERM_S):
                    while self.outcome.committed < before + WRITERS and not self.done:
                        await asyncio.sleep(DAWDLE_S)
        self.bumped.set()

    def _bump(self, leader: Leader) -> None:
        leader.lock()
        with leader.conn.transaction():
            token = leader.win(wait_ms=20000)
            self.committed_before[token.epoch] = leader.one(_OLDER, token.epoch)
            leader.conn.execute("SELECT pg_sleep(%s)", (DAWDLE_S,))
        self.tokens.append(token)  # acknowledged
        self.outcome.bumps += 1

    def _compare(self) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            for epoch, before in self.committed_before.items():
                row = conn.execute(_OLDER, (epoch,)).fetchone()
                assert row is not None
                if row[0] != before:
                    self.outcome.late.append(f"{row[0] - before} writes of epochs before {epoch}")

    async def _write(self, chance: random.Random) -> None:
        async with await psycopg.AsyncConnection.connect(self.dsn, autocommit=True) as conn:
            await conn.set_isolation_level(self.level)
            while not self.done:
                kinds = ["current", "joined"]
                if self.outcome.refused <= self.outcome.committed:
                    kinds += ["stale", "waited"]
                kind = chance.choice(kinds)
                if kind == "stale" and len(self.tokens) > 1:
                    token = chance.choice(self.tokens[-5:-1])
                    await self._attempt(conn, token, joined=False, wait_for_bump=False)
                else:
                    await self._attempt(conn, self.tokens[-1], joined=kind != "current", wait_for_bump=kind == "waited")

    async def _attempt(
        self, conn: psycopg.AsyncConnection[Any], token: LeaderToken, *, joined: bool, wait_for_bump: bool
    ) -> None:
        """One write. `joined`: in a transaction that is open already, above READ COMMITTED with an older snapshot."""
        bumped = self.bumped
        known_stale = token.epoch < self.tokens[-1].epoch
        try:
            async with conn.transaction() if joined else contextlib.nullcontext():
                if joined:
                    await conn.execute("SELECT 1")
                if wait_for_bump:
                    await bumped.wait()
                known_stale = token.epoch < self.tokens[-1].epoch
                async with fenced(conn, token):
                    await conn.execute(INSERT, (token.role, token.epoch))
                    await asyncio.sleep(DAWDLE_S)
        except StaleEpoch:
            if known_stale:
                self.outcome.refused += 1
            else:
                self.outcome.overtaken += 1
        else:
            if known_stale:
                self.outcome.accepted.append(f"epoch {token.epoch}, when {self.tokens[-1].epoch} was known")
            else:
                self.outcome.committed += 1


LOCK = "PERFORM pg_catalog.pg_advisory_xact_lock_shared(pgleaderlock.fence_key(p_namespace, p_role));"
STRICT_LOCK = "PERFORM pg_advisory_xact_lock_shared(key);"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
async def test_each_stale_write_is_refused_while_as_many_current_ones_commit(
    ledger: str, level: IsolationLevel
) -> None:
    attempts = count(150, 2000)
    seen = await Harness(ledger, level, attempts).run()
    assert seen.violations == []
    assert seen.refused >= attempts
    assert seen.committed >= seen.refused
    # Against an empty proof: there was something to be overtaken by.
    assert seen.bumps >= 5
    assert seen.overtaken > 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("level", "taken_out"),
    [
        (IsolationLevel.READ_COMMITTED, {"fence": LOCK, "fence_strictly": STRICT_LOCK}),
        (IsolationLevel.REPEATABLE_READ, {"fence_strictly": "FOR KEY SHARE"}),
        (IsolationLevel.SERIALIZABLE, {"fence_strictly": "FOR KEY SHARE"}),
    ],
    ids=["without the shared lock", "plain read at REPEATABLE READ", "plain read at SERIALIZABLE"],
)
async def test_the_harness_sees_a_fence_that_is_broken(
    ledger: str, level: IsolationLevel, taken_out: dict[str, str]
) -> None:
    for function, text in taken_out.items():
        take_out(ledger, function, text)
    seen = await Harness(ledger, level, 150).run()
    assert seen.violations


# --- Real elections under faults, judged by the write-ahead log

STORM_KINDS = ("kill", "drain", "step_down", "terminate", "deaf", "pause", "cut", "restart")


async def storm_of_writers(server: EmbeddedPostgres, folder: Path) -> tuple[Storm, CommitOrder]:
    await migrate(server.dsn)
    async with await psycopg.AsyncConnection.connect(server.dsn, autocommit=True) as conn:
        await conn.execute(WRITES_TABLE)
    order = CommitOrder(server.dsn)
    await order.begin()
    return Storm(server, SendLog(folder / "sends"), {"quick": QUICK, "middle": MIDDLE, "slow": SLOW}), order


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_in_the_order_of_commits_no_write_follows_the_bump_of_a_newer_epoch(
    throwaway_postgres: StartServer, tmp_path: Path
) -> None:
    storm, order = await storm_of_writers(throwaway_postgres(wal_level="logical"), tmp_path)
    writers = StormWriters(storm, (write_by_fenced, write_by_sql))
    async with storm.running():
        async with writers.writing():
            for _ in range(count(1, 25)):
                await storm.faults(STORM_KINDS, len(STORM_KINDS))
                await storm.calm()
                await order.read()
            await until(lambda: writers.all_have_done_both, "each kind of writer writes and is refused")
        await order.read()
        storm.figures()
        print(f"{order.writes} writes, {order.changes} epochs; {writers.written}; {writers.refused}")  # noqa: T201
        assert order.violations == [], storm.about
        # Against an empty proof: nothing escaped the judge, and there was something to judge.
        async with await psycopg.AsyncConnection.connect(storm.server.dsn) as look:
            row = await (await look.execute("SELECT count(*) FROM writes")).fetchone()
        assert row == (order.writes,), storm.about
        faults = sum(storm.fired.values())
        assert order.writes >= writers.written.total() >= 20 * faults, storm.about
        assert order.changes >= faults / 3, storm.about


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_the_same_storm_catches_writers_that_only_look_at_the_epoch(
    throwaway_postgres: StartServer, tmp_path: Path
) -> None:
    storm, order = await storm_of_writers(throwaway_postgres(wal_level="logical"), tmp_path)
    async with storm.running(), StormWriters(storm, (write_after_a_look,)).writing():
        for _ in range(20):
            await storm.faults(("terminate", "step_down"), 2)
            await storm.calm()
            await order.read()
            if order.violations:
                return
        pytest.fail(f"no late write was seen: the judge is blind ({storm.about})")


@pytest.mark.long
def test_a_crash_of_the_server_makes_the_judge_neither_miss_nor_repeat_a_commit(
    throwaway_postgres: StartServer, tmp_path: Path
) -> None:
    server = throwaway_postgres(wal_level="logical")
    _, order = asyncio.run(storm_of_writers(server, tmp_path))
    with psycopg.connect(server.dsn, autocommit=True) as conn, Leader(server.dsn, "mail") as leader:
        epoch = leader.win().epoch
        conn.execute(INSERT, ("mail", epoch))
        asyncio.run(order.read())
        conn.execute(INSERT, ("mail", epoch - 1))
    server.restart("immediate")
    asyncio.run(order.read())
    assert (order.changes, order.writes, len(order.violations)) == (1, 2, 1)
