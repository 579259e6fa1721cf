"""The settings that our logic depends on: set whatever the DBA says, read back, and refused when they are not so."""

import pytest
from psycopg.conninfo import make_conninfo

from pgleaderlock import LeaderElection, UnsafeSessionError
from pgleaderlock._pg.conninfo import ConnectionSettings
from pgleaderlock._pg.session import DedicatedSession
from pgleaderlock.migrate import migrate
from support.elections import STEADY, admin, fresh_database, opens


@pytest.mark.parametrize(
    "dba_says",
    [
        "client_min_messages = error",
        "client_encoding = 'SQL_ASCII'",
        "search_path = shadows, pg_catalog",
        "default_transaction_isolation = serializable",
        "default_transaction_read_only = on",
        "idle_session_timeout = '1ms'",
        "synchronous_commit = off",
    ],
)
async def test_an_election_leads_whatever_the_dba_has_set_for_its_role(dsn: str, dba_says: str) -> None:
    with fresh_database(dsn, ledger=True) as ledger, admin(ledger) as dba:
        dba.execute("CREATE SCHEMA shadows")
        dba.execute(
            "CREATE FUNCTION shadows.pg_try_advisory_lock(integer, integer) RETURNS boolean"
            " LANGUAGE sql AS 'SELECT true'"
        )
        dba.execute("CREATE ROLE told SUPERUSER LOGIN PASSWORD 'told'")
        try:
            dba.execute(f"ALTER ROLE told SET {dba_says}".encode())
            told = make_conninfo(ledger, user="told", password="told")
            async with LeaderElection(told, "größe", node_id="nœud", **STEADY) as election:
                await opens(election, "größe")
            assert dba.execute("SELECT node_id FROM pgleaderlock.terms").fetchall() == [{"node_id": "nœud"}]
        finally:
            dba.execute("DROP ROLE told")


async def test_an_election_leads_in_a_database_that_has_no_encoding(dsn: str) -> None:
    with admin(dsn) as dba:
        dba.execute("CREATE DATABASE plain ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0")
        try:
            plain = make_conninfo(dsn, dbname="plain")
            await migrate(plain)
            async with LeaderElection(plain, "größe", **STEADY) as election:
                await opens(election, "größe")
                assert election.gate("größe").current_epoch == 1
        finally:
            dba.execute("DROP DATABASE plain WITH (FORCE)")


@pytest.mark.parametrize("setting", ["client_min_messages", "search_path", "client_encoding"])
async def test_a_session_without_the_settings_it_was_opened_with_is_refused(dsn: str, setting: str) -> None:
    """Something between us and the server drops them: here, a statement of our own."""
    settings = ConnectionSettings("changed", statement_timeout_s=5, lease_s=15)
    other = {"client_min_messages": "error", "search_path": "public", "client_encoding": "LATIN1"}[setting]
    for check in ("verify", "take"):
        session = await DedicatedSession.open(dsn, settings)
        try:
            await session._connection.execute(f"SET {setting} = {other}".encode())
            with pytest.raises(UnsafeSessionError, match=f"{setting}={other}") as refused:
                await (session.verify() if check == "verify" else session.take((4711, 1)))
            assert refused.value.reason == "settings"
        finally:
            await session.close()


@pytest.mark.parametrize("lease_ms", [1_400, 2_800, 3_300, 60_000, 90_000, 3_600_000, 86_400_001])
async def test_a_lease_of_any_length_is_what_the_server_shows_again(dsn: str, lease_ms: int) -> None:
    """2.8 s are 2800 ms, and 2800 times 0.001 is not 2.8."""
    lease_s = lease_ms / 1000
    settings = ConnectionSettings("leased", statement_timeout_s=5, lease_s=lease_s, idle_timeout_s=lease_s)
    session = await DedicatedSession.open(dsn, settings)
    try:
        await session.verify()
    finally:
        await session.close()
