"""Rolling changes: of T, node by node under faults; and of the ledger's version, with libraries one version apart."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from conftest import StartServer
from pgleaderlock import LeaderElection, SchemaError, ledger, migrate
from support.counts import count
from support.election_node import SendLog
from support.election_storm import QUICK, SLOW, Storm

WAIT_S = 20.0
FAULTS = ("deaf", "numb", "cut", "terminate", "pause", "drop_replies")


@pytest.mark.timeout(900)
async def test_t_is_changed_node_by_node_under_faults_and_nobody_acts_twice(
    throwaway_postgres: StartServer, tmp_path: Path
) -> None:
    """Up and down again: on the way down each successor has a shorter T than the one that it has to wait for."""
    log = SendLog(tmp_path / "sends")
    storm = Storm(throwaway_postgres(), log, dict.fromkeys(("a", "b", "c"), QUICK))
    async with storm.running():
        for _ in range(count(1, 12)):
            for settings in (SLOW, QUICK):
                for name in ("a", "b", "c"):
                    await storm.fault(storm.rng.choice(FAULTS))
                    await storm.replace(name, settings, killed=storm.rng.random() < 0.5)
                    if storm.rng.random() < 0.7:
                        await storm.calm()
                    await asyncio.sleep(storm.rng.uniform(0, 0.6))
        await storm.calm()
        for name in set(storm.settings) - {send.node for send in log.read()}:
            await storm.lets_lead(name)
        await storm.judge()
        sends_a_second, changes = storm.figures()
        assert sends_a_second > 50, storm.about
        assert changes >= sum(storm.fired.values()) / 3, storm.about
        assert {send.node for send in log.read()} == {"a", "b", "c"}, storm.about


# --- The ledger's version


@pytest.fixture
async def database(dsn: str) -> AsyncIterator[str]:
    """A database of its own, with the ledger in it."""
    name = f"rolling_{uuid.uuid4().hex}"
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as dba:
        await dba.execute(f"CREATE DATABASE {name}".encode())
    try:
        there = make_conninfo(dsn, dbname=name)
        await migrate.migrate(there)
        yield there
    finally:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as dba:
            await dba.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


async def say_version(dsn: str, version: int | None) -> None:
    """Make the ledger say that it has this version, and nothing else: what serves it must not need more."""
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as dba:
        await dba.execute("DELETE FROM pgleaderlock.schema_version")
        if version is not None:
            await dba.execute("INSERT INTO pgleaderlock.schema_version (version) VALUES (%s)", (version,))


async def sessions(dsn: str) -> int:
    async with await psycopg.AsyncConnection.connect(dsn) as look:
        row = await (await look.execute("SELECT count(*) FROM pgleaderlock.sessions")).fetchone()
    assert row is not None
    return int(row[0])


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> int:
    """A library that was written for the third version, so that there are two on either side."""
    monkeypatch.setattr(migrate, "LEDGER_VERSION", 3)
    return 3


@pytest.mark.parametrize("apart", [-1, 0, 1])
async def test_a_ledger_at_most_one_version_apart_is_served(database: str, library: int, apart: int) -> None:
    await say_version(database, library + apart)
    async with LeaderElection(database, "role") as election:
        assert await election.gate("role").wait_open(WAIT_S)
        assert election.gate("role").current_epoch == 1


@pytest.mark.parametrize(
    ("version", "remedy"), [(1, "pgleaderlock migrate"), (None, "pgleaderlock migrate"), (5, "upgrade")]
)
async def test_a_ledger_two_versions_apart_is_refused_with_the_remedy_and_nothing_is_changed(
    database: str, library: int, version: int | None, remedy: str
) -> None:
    await say_version(database, version)
    election = LeaderElection(database, "role")
    with pytest.raises(SchemaError, match=remedy):
        await election.start()
    assert election.gate("role").token is None
    assert await sessions(database) == 0


@pytest.mark.parametrize("version", [2, 3, 4])
async def test_this_library_serves_a_ledger_of_the_version_before_and_after(database: str, version: int) -> None:
    """As it is today: the same without any pretence about the library."""
    await say_version(database, version)
    async with LeaderElection(database, "role") as election:
        assert await election.gate("role").wait_open(WAIT_S)


@pytest.fixture
async def second(database: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A ledger as a library of version 2 made it: without a column or a function of the third."""
    files = {number: text for number, text in migrate._migrations().items() if number < 3}
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as dba:
        await dba.execute("DROP SCHEMA pgleaderlock CASCADE")
    with monkeypatch.context() as older:
        older.setattr(migrate, "_migrations", lambda: files)
        older.setattr(migrate, "LEDGER_VERSION", 2)
        assert await migrate.migrate(database) == [1, 2]
    return database


async def test_an_election_needs_nothing_of_the_third_version(second: str) -> None:
    """It leads, hands over, drains and steps down by request; what the older ledger cannot record is left out."""
    async with LeaderElection(second, "role", node_id="a", **QUICK) as a:
        assert await a.gate("role").wait_open(WAIT_S)
        async with LeaderElection(second, "role", node_id="b", **QUICK) as b:
            assert await a.drain(timeout_s=WAIT_S)
            assert await b.gate("role").wait_open(WAIT_S)
            await a.resume()
            led = b.gate("role").token
            assert led is not None
            async with await psycopg.AsyncConnection.connect(second, autocommit=True) as dba:
                await dba.execute("SELECT pgleaderlock.request_step_down('role', 'pgleaderlock', NULL, 'pgleaderlock')")
            await asyncio.wait_for(b.gate("role").wait_over(led), WAIT_S)


async def test_a_library_of_the_second_version_works_on_a_ledger_of_the_third(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its statements are those that this library uses where the ledger is older; beside it is one of today."""
    async with LeaderElection(database, "role", node_id="today", **QUICK) as today:
        assert await today.gate("role").wait_open(WAIT_S)
        monkeypatch.setattr(ledger, "OPERATIONS", 99)
        async with LeaderElection(database, "role", node_id="older", **QUICK) as older:
            assert await today.drain(timeout_s=WAIT_S)  # so that it is not quicker
            assert await older.gate("role").wait_open(WAIT_S)
            led = older.gate("role").token
            assert led is not None
            async with await psycopg.AsyncConnection.connect(database, autocommit=True) as dba:
                await dba.execute("SELECT pgleaderlock.request_step_down('role', 'pgleaderlock', NULL, 'pgleaderlock')")
                await asyncio.wait_for(older.gate("role").wait_over(led), WAIT_S)
                done: list[tuple[str | None]] = [(None,)]
                async with asyncio.timeout(WAIT_S):
                    while done == [(None,)]:  # written down behind the release
                        await asyncio.sleep(0.01)
                        done = await (await dba.execute("SELECT outcome FROM pgleaderlock.requests")).fetchall()
    assert done == [("done",)]


async def test_an_upgrade_under_way_keeps_leader_history_and_the_rights_of_nodes(second: str, dsn: str) -> None:
    """The leader's record and its open term are upgraded in place, and a role that was a node before still is."""
    user = f"rolling_{uuid.uuid4().hex[:8]}"
    async with await psycopg.AsyncConnection.connect(second, autocommit=True) as dba:
        await dba.execute(f"CREATE ROLE {user} LOGIN PASSWORD 'x'".encode())
        older_grants = (
            "open_session",
            "beat",
            "bump",
            "end_term",
            "close_session",
            "note_eviction",
            "request_step_down",
            "finish_request",
            "fence",
            "fence_strictly",
            "fence_key",
        )
        functions = ", ".join(f"pgleaderlock.{name}" for name in older_grants)
        await dba.execute(f"GRANT USAGE ON SCHEMA pgleaderlock TO {user}".encode())
        await dba.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA pgleaderlock TO {user}".encode())
        await dba.execute(f"GRANT EXECUTE ON FUNCTION {functions} TO {user}".encode())
        node = make_conninfo(second, user=user, password="x")
        try:
            async with LeaderElection(node, "role", node_id="leads", **QUICK) as leader:
                assert await leader.gate("role").wait_open(WAIT_S)
                assert await migrate.migrate(second) == [3]
                async with LeaderElection(node, "role", node_id="late", **QUICK) as late:
                    await leader.step_down("role")
                    assert await late.gate("role").wait_open(WAIT_S)
                    assert await late.drain(timeout_s=WAIT_S)
            terms = await (await dba.execute("SELECT epoch, node_id, reason FROM pgleaderlock.terms")).fetchall()
            assert {("leads", "released"), ("late", "released")} <= {row[1:] for row in terms}
        finally:
            await dba.execute(f"DROP OWNED BY {user}".encode())
            await dba.execute(f"DROP ROLE {user}".encode())


async def test_this_library_refuses_a_ledger_that_is_two_versions_newer(database: str) -> None:
    await say_version(database, 5)
    with pytest.raises(SchemaError, match="upgrade"):
        await LeaderElection(database, "role").start()
    assert await sessions(database) == 0


async def test_a_leader_leads_on_while_the_ledger_is_upgraded_under_it_and_others_join(database: str) -> None:
    async with LeaderElection(database, "role", **QUICK) as leader:
        assert await leader.gate("role").wait_open(WAIT_S)
        await say_version(database, migrate.LEDGER_VERSION + 1)
        async with LeaderElection(database, "role", **QUICK) as late:
            epoch = leader.gate("role").current_epoch
            await leader.step_down("role")
            assert await late.gate("role").wait_open(WAIT_S)
            assert late.gate("role").current_epoch == (epoch or 0) + 1


async def test_library_and_migrations_agree_about_the_version() -> None:
    assert max(migrate._migrations()) == migrate.LEDGER_VERSION
