"""A notification wakes and decides nothing: elections and locks go on while the server's notifications do not.

PostgreSQL has one queue for all databases. A full one refuses the commit of whoever notifies, one that is half full
warns of it, and commits that notify wait for each other, also for one that waits for a standby in another database.
"""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Iterator

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from conftest import StartServer
from pgleaderlock import LeaderElection
from pgleaderlock._pg.conninfo import ConnectionSettings
from pgleaderlock._pg.session import DedicatedSession
from pgleaderlock._pg.statements import statement
from pgleaderlock.embedded import EmbeddedPostgres
from pgleaderlock.migrate import advance_epoch, migrate
from pgleaderlock.server.postgres.store import PostgresStore
from pgleaderlock.server.store import Acquire, Granted, Release, Released
from support.elections import STEADY, admin, bounded, one, opens
from support.ledger_node import eventually

PAGES = 64
"""The smallest queue that a server can be given, of 8 kB each."""
PAYLOAD = "x" * 7000


@contextlib.contextmanager
def queue_filled(dsn: str, share: float) -> Iterator[None]:
    """Notifications that nobody can read yet: whoever listens sits in a transaction."""
    with admin(dsn) as listener, admin(dsn) as sender:
        listener.execute("LISTEN crowd")
        listener.execute("BEGIN")
        listener.execute("SELECT 1")
        for payload in (PAYLOAD, ""):  # a large one may not fit any more where a small one does
            with contextlib.suppress(psycopg.errors.ProgramLimitExceeded):
                while one(dsn, "SELECT pg_notification_queue_usage() AS share")["share"] < share:
                    sender.execute("SELECT pg_notify('crowd', %s || clock_timestamp())", (payload,))
        yield
        listener.execute("ROLLBACK")


@contextlib.contextmanager
def commit_that_waits_for_a_standby(server: EmbeddedPostgres) -> Iterator[None]:
    """It has notified in another database, and holds up every other commit that notifies."""
    with admin(server.dsn) as dba:
        dba.execute("CREATE DATABASE beside")
        dba.execute("ALTER DATABASE postgres SET synchronous_commit = local")
        dba.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
        dba.execute("SELECT pg_reload_conf()")
    beside = make_conninfo(server.dsn, dbname="beside", options="-c synchronous_commit=on")
    with psycopg.connect(make_conninfo(server.dsn, dbname="beside", options="-c synchronous_commit=off")) as conn:
        conn.execute("CREATE TABLE written (number integer)")
    with psycopg.connect(beside, autocommit=True) as stuck:
        eventually(lambda: _notifies_and_waits(server.dsn, stuck))  # the server takes the new setting when it has time
        yield
        with admin(server.dsn) as dba:
            dba.execute("ALTER SYSTEM RESET synchronous_standby_names")
            dba.execute("SELECT pg_reload_conf()")
        while stuck.pgconn.get_result() is not None:
            pass


def _notifies_and_waits(dsn: str, conn: psycopg.Connection[tuple[object, ...]]) -> bool:
    """Send a notification; True once its commit waits for a standby, False if it did not have to."""
    waiting = "SELECT count(*) AS n FROM pg_stat_activity WHERE pid = %s AND wait_event = 'SyncRep'"
    # One transaction; without the write there would be nothing for a standby to have.
    conn.pgconn.send_query(b"INSERT INTO written VALUES (1); SELECT pg_notify('crowd', 'x')")
    while not one(dsn, waiting, conn.info.backend_pid)["n"]:
        conn.pgconn.consume_input()
        if not conn.pgconn.is_busy():
            while conn.pgconn.get_result() is not None:
                pass
            return False
    return True


def server_version(server: EmbeddedPostgres) -> int:
    with admin(server.dsn) as conn:
        return conn.info.server_version


@pytest.fixture(params=["full", "half full", "blocked"])
async def crowded(
    request: pytest.FixtureRequest, postgres: EmbeddedPostgres, throwaway_postgres: StartServer
) -> AsyncIterator[str]:
    """A server with a ledger, whose notifications fail, warn or wait."""
    if request.param == "blocked":
        server = throwaway_postgres()
        await migrate(server.dsn)
        with commit_that_waits_for_a_standby(server):
            yield server.dsn
        return
    if server_version(postgres) < 170000:
        # Before that, the queue has 8 GB.
        pytest.skip("needs PostgreSQL 17 or later, for max_notify_queue_pages: run `make test`")
    server = throwaway_postgres(max_notify_queue_pages=str(PAGES))
    await migrate(server.dsn)
    with queue_filled(server.dsn, 1.1 if request.param == "full" else 0.6):
        yield server.dsn


async def test_elections_go_on_whatever_becomes_of_notifications(crowded: str) -> None:
    """Terms begin, end, are handed over by request and by hand, in the sessions in which they began."""
    role = f"role-{uuid.uuid4()}"
    async with LeaderElection(crowded, role, node_id="a", **STEADY) as a:
        await opens(a, role)
        async with LeaderElection(crowded, role, node_id="b", **STEADY) as b:
            await bounded(a.drain())
            await opens(b, role)
            await a.resume()
            asked = one(crowded, "SELECT pgleaderlock.request_drain('b', 'pgleaderlock', 'pgleaderlock') AS id")["id"]
            await opens(a, role)
            assert asked is not None
            old, new = await advance_epoch(crowded, role, namespace="pgleaderlock", channel="pgleaderlock")
            assert (old, new > old) == (3, True)
    sessions = "SELECT count(*) AS n FROM pgleaderlock.sessions"
    assert one(crowded, sessions)["n"] == 2, "a notification has cost somebody its session"


async def test_locks_of_the_server_go_on_whatever_becomes_of_notifications(crowded: str) -> None:
    """One waits at one server for what is released at another: the hint does not come, and its turn does."""
    async with contextlib.AsyncExitStack() as stack:
        here, there = PostgresStore(crowded), PostgresStore(crowded)
        for store in (here, there):
            await store.open()
            stack.push_async_callback(store.close)
        (held,) = await here.submit([Acquire("l", "one", 60_000)])
        assert isinstance(held, Granted)
        waiting = there.submit([Acquire("l", "two", 60_000)], 20_000)
        async with asyncio.timeout(20):
            while not one(crowded, "SELECT count(*) AS n FROM pgleaderlock.lock_waiters")["n"]:
                await asyncio.sleep(0.01)
        (released,) = await here.submit([Release("l", "one", held.lease_id, held.fencing_token)])
        assert isinstance(released, Released)
        (granted,) = await bounded(waiting)
        assert isinstance(granted, Granted)
        assert granted.fencing_token > held.fencing_token


# --- Warnings


@pytest.mark.parametrize(
    ("sqlstate", "doubtful"), [("01000", True), ("57P01", True), ("01007", False), ("42P07", False)]
)
async def test_only_warnings_about_the_outcome_put_it_in_doubt(
    dsn: str, monkeypatch: pytest.MonkeyPatch, sqlstate: str, doubtful: bool
) -> None:
    """01000 is what the server calls a cancelled wait for a standby; 57P01, one that its shutdown has ended."""
    text = f"DO $$ BEGIN RAISE WARNING 'so it is' USING ERRCODE = '{sqlstate}'; END $$; SELECT 1 AS one"
    monkeypatch.setattr(
        "pgleaderlock._pg.session.statement", lambda name: text.encode() if name == "probe" else statement(name)
    )
    settings = ConnectionSettings("warned", statement_timeout_s=5, lease_s=15)
    session = await DedicatedSession.open(dsn, settings)
    try:
        assert await session.rows("probe") == [{"one": 1}]
        assert bool(session.doubts) is doubtful
    finally:
        await session.close()
