"""Whom a standby may end: exactly the session that its own ledger recorded, in this database and in this history."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from pgleaderlock import LeaderElection
from pgleaderlock._election.ledger import Ledger, Look
from support.elections import HASTY, SilentLeader, admin, bounded, fresh_database, until

ROLE = "billing"


@pytest.fixture
def production(dsn: str) -> Iterator[str]:
    with fresh_database(dsn, ledger=True) as database:
        yield database


@pytest.fixture
def evictions(monkeypatch: pytest.MonkeyPatch) -> "asyncio.Queue[bool]":
    """What came of each attempt to end a silent session."""
    real, told = Ledger.evict, asyncio.Queue[bool]()

    async def evict(self: Ledger, look: Look) -> bool:
        ended = await real(self, look)
        told.put_nowait(ended)
        return ended

    monkeypatch.setattr(Ledger, "evict", evict)
    return told


@pytest.fixture
async def silent(production: str) -> AsyncIterator[SilentLeader]:
    """It leads, and has not beaten for longer than anybody waits."""
    leader = SilentLeader(production, ROLE, lease_s=0.1)
    yield leader
    leader.conn.close()


def lives(dsn: str, leader: SilentLeader) -> bool:
    with admin(dsn) as conn:
        return bool(conn.execute("SELECT FROM pg_stat_get_activity(%s)", (leader.conn.info.backend_pid,)).fetchall())


def restored(production: str, dsn: str) -> None:
    """The rows of one ledger in another database, as a dump has them."""
    with admin(production) as source, admin(dsn) as target:
        for table in ("sessions", "leaders", "terms"):
            for row in source.execute(f"SELECT * FROM pgleaderlock.{table}".encode()).fetchall():
                insert(target, table, row)


def insert(conn: Any, table: str, row: dict[str, Any]) -> None:
    columns = ", ".join(row)
    places = ", ".join(f"%({column})s" for column in row)
    conn.execute(
        f"INSERT INTO pgleaderlock.{table} ({columns}) OVERRIDING SYSTEM VALUE VALUES ({places})".encode(), row
    )


async def test_a_silent_session_is_ended(
    production: str, silent: SilentLeader, evictions: "asyncio.Queue[bool]"
) -> None:
    async with LeaderElection(production, ROLE, candidate=False, **HASTY):
        assert await bounded(evictions.get())
        await until(lambda: not lives(production, silent))


async def test_a_restored_copy_beside_its_original_ends_nobody(
    dsn: str, production: str, silent: SilentLeader, evictions: "asyncio.Queue[bool]"
) -> None:
    """The pid and the start in its records are those of a session that lives, in another database."""
    with fresh_database(dsn, ledger=True) as copy:
        restored(production, copy)
        async with LeaderElection(copy, ROLE, candidate=False, **HASTY):
            assert not await bounded(evictions.get())
            assert lives(production, silent)
        # Whoever competes there is not held up by it either.
        async with LeaderElection(copy, ROLE, balance=True, **HASTY) as election:
            assert await election.gate(ROLE).wait_open(20)
        assert lives(production, silent)


@pytest.mark.parametrize("column", ["system_identifier", "timeline"])
async def test_a_session_that_was_recorded_in_another_history_is_not_ended(
    production: str, silent: SilentLeader, evictions: "asyncio.Queue[bool]", column: str
) -> None:
    with admin(production) as conn:
        conn.execute(f"UPDATE pgleaderlock.sessions SET {column} = {column} + 1".encode())
    async with LeaderElection(production, ROLE, candidate=False, **HASTY):
        assert not await bounded(evictions.get())
        assert lives(production, silent)
