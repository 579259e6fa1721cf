"""Rolling changes: of T, node by node under faults; and of the ledger's version, with libraries one version apart."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from conftest import StartServer
from pgleaderlock import LeaderElection, SchemaError, history, migrate
from support.counts import count
from support.election_node import SendLog
from support.election_storm import QUICK, SLOW, Storm
from support.elections import SilentLeader, until

WAIT_S = 20.0
GRANTED_IN_VERSION_4 = (
    "open_session", "beat", "bump", "end_term", "close_session", "note_eviction", "request_step_down", "finish_request",
    "describe_session", "tick", "heartbeat", "note_drain", "request_drain", "request_resume", "reserve",
    "settle_request", "prune", "fence", "fence_strictly", "fence_key",
)  # fmt: skip
FAULTS = ("deaf", "numb", "cut", "terminate", "pause", "drop_replies")


@pytest.mark.long
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


@pytest.mark.parametrize("apart", [-1, 0, 1])
async def test_a_ledger_at_most_one_version_apart_is_served(database: str, apart: int) -> None:
    await say_version(database, migrate.LEDGER_VERSION + apart)
    async with LeaderElection(database, "role") as election:
        assert await election.gate("role").wait_open(WAIT_S)
        assert election.gate("role").current_epoch == 1


@pytest.mark.parametrize("version", [None, *range(1, migrate.LEDGER_VERSION - 1), migrate.LEDGER_VERSION + 2])
async def test_any_other_ledger_is_refused_with_the_remedy_and_nothing_is_changed(
    database: str, version: int | None
) -> None:
    await say_version(database, version)
    election = LeaderElection(database, "role")
    with pytest.raises(
        SchemaError, match="upgrade" if version == migrate.LEDGER_VERSION + 2 else "pgleaderlock migrate"
    ):
        await election.start()
    assert election.gate("role").token is None
    assert await sessions(database) == 0


@pytest.fixture
async def fourth(database: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A ledger as a library of version 4 made it: without a table or a function of the fifth."""
    files = {number: text for number, text in migrate._migrations().items() if number < 5}
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as dba:
        await dba.execute("DROP SCHEMA pgleaderlock CASCADE")
    with monkeypatch.context() as older:
        older.setattr(migrate, "_migrations", lambda: files)
        older.setattr(migrate, "LEDGER_VERSION", 4)
        assert await migrate.migrate(database) == [1, 2, 3, 4]
    return database


async def asked(dsn: str, query: str) -> str:
    """Ask something from afar, and answer what became of it."""
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as dba:
        row = await (await dba.execute(f"SELECT {query}".encode())).fetchone()
        assert row is not None
        assert row[0] is not None
        outcome: tuple[str | None] | None = (None,)
        async with asyncio.timeout(WAIT_S):
            while outcome == (None,):  # nobody announces it
                await asyncio.sleep(0.01)
                done = await dba.execute("SELECT outcome FROM pgleaderlock.requests WHERE request_id = %s", row)
                outcome = await done.fetchone()
    assert outcome is not None
    return str(outcome[0])


async def test_an_election_needs_nothing_of_the_fifth_version(fourth: str) -> None:
    """It leads, hands over, drains and steps down by request; and evicts a leader that has fallen silent."""
    silent = SilentLeader(fourth, "role", lease_s=0.2)
    async with LeaderElection(fourth, "role", node_id="a", **QUICK) as a:
        assert await a.gate("role").wait_open(WAIT_S)
        assert silent.conn.closed or not _answers(silent)
        async with LeaderElection(fourth, "role", node_id="b", **QUICK) as b:
            assert await a.drain(timeout_s=WAIT_S)
            assert await b.gate("role").wait_open(WAIT_S)
            await a.resume()
            step_down = "pgleaderlock.request_step_down('role', 'pgleaderlock', NULL, 'pgleaderlock')"
            assert await asked(fourth, step_down) == "done"
            assert await asked(fourth, "pgleaderlock.request_drain('b', 'pgleaderlock', 'pgleaderlock')") == "done"
            assert await a.gate("role").wait_open(WAIT_S)
    silent.conn.close()


def _answers(silent: SilentLeader) -> bool:
    try:
        silent.conn.execute("SELECT 1")
    except psycopg.OperationalError:
        return False
    return True


async def test_an_upgrade_under_way_keeps_leader_history_and_the_rights_of_nodes(fourth: str) -> None:
    """The leader's record and its open term are upgraded in place, and a role that was a node before still is.

    The leader notices without a new session: it serves a request of the new kind, which nobody but itself records.
    """
    user = f"rolling_{uuid.uuid4().hex[:8]}"
    async with await psycopg.AsyncConnection.connect(fourth, autocommit=True) as dba:
        await dba.execute(f"CREATE ROLE {user} LOGIN PASSWORD 'x'".encode())
        tables = ("schema_version", "sessions", "leaders", "terms", "events", "requests", "histories", "leader_state")
        for name in tables:
            await dba.execute(f"GRANT SELECT ON pgleaderlock.{name} TO {user}".encode())
        functions = ", ".join(f"pgleaderlock.{name}" for name in GRANTED_IN_VERSION_4)
        await dba.execute(f"GRANT USAGE ON SCHEMA pgleaderlock TO {user}".encode())
        await dba.execute(f"GRANT EXECUTE ON FUNCTION {functions} TO {user}".encode())
        node = make_conninfo(fourth, user=user, password="x")
        try:
            async with LeaderElection(node, "role", node_id="leads", **QUICK) as leader:
                assert await leader.gate("role").wait_open(WAIT_S)
                assert await migrate.migrate(fourth) == [5]
                await until(lambda: _ledger_version(leader) == 5, "the leader to notice")
                assert leader.gate("role").current_epoch == 1
                async with LeaderElection(node, "role", node_id="late", **QUICK) as late:
                    drain = "pgleaderlock.request_drain('leads', 'pgleaderlock', 'pgleaderlock')"
                    assert await asked(node, drain) == "done"
                    assert await late.gate("role").wait_open(WAIT_S)
                    assert await late.drain(timeout_s=WAIT_S)
            terms = await (await dba.execute("SELECT epoch, node_id, reason FROM pgleaderlock.terms")).fetchall()
            assert {("leads", "released"), ("late", "released")} <= {row[1:] for row in terms}
        finally:
            await dba.execute(f"DROP OWNED BY {user}".encode())
            await dba.execute(f"DROP ROLE {user}".encode())


async def test_an_upgrade_lets_those_read_slots_who_could_read_terms(fourth: str) -> None:
    user = f"reader_{uuid.uuid4().hex[:8]}"
    async with await psycopg.AsyncConnection.connect(fourth, autocommit=True) as dba:
        await dba.execute(f"CREATE ROLE {user} LOGIN PASSWORD 'x'".encode())
        try:
            await dba.execute(f"GRANT USAGE ON SCHEMA pgleaderlock TO {user}".encode())
            await dba.execute(
                f"GRANT SELECT ON pgleaderlock.sessions, pgleaderlock.leaders, pgleaderlock.terms TO {user}".encode()
            )
            assert await migrate.migrate(fourth) == [5]
            async with await psycopg.AsyncConnection.connect(make_conninfo(fourth, user=user, password="x")) as reader:
                assert await history.slots(history.Reader(reader), "pgleaderlock") == ()
        finally:
            await dba.execute(f"DROP OWNED BY {user}".encode())
            await dba.execute(f"DROP ROLE {user}".encode())


def _ledger_version(election: LeaderElection) -> int | None:
    engine = election._run.engine
    return None if engine is None or engine._board.ledger is None else engine._board.ledger.version


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
