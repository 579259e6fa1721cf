"""Sessions on which a lock would exclude nobody are refused, with a text that says what to do."""

import asyncio
import uuid
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from conftest import StartPooler, StartServer
from pgleaderlock import (
    ConfigurationError,
    FixedInterval,
    LeaderLock,
    LockState,
    UnsafeSessionError,
    key_pair,
)
from pgleaderlock._base.steps import Steps
from pgleaderlock._pg.connect import Backend
from pgleaderlock._pg.conninfo import FORCED, ConnectionSettings
from pgleaderlock._pg.session import DedicatedSession
from support.pgbouncer import PoolMode
from support.recorder import WAIT_S, Recorder
from support.server_side import connections_named, holders
from support.servers import open_folder

QUICK = FixedInterval(0.1)


def fresh_name() -> str:
    return f"refusals-{uuid.uuid4()}"


async def refusal(lock: LeaderLock) -> Exception:
    """What the lock says when it is refused; and that it never led."""
    story = Recorder(lock)
    async with lock:
        await story.heard("error")
        error = lock.last_error
    assert "acquired" not in story.events
    assert error is not None
    return error


@pytest.mark.parametrize("pool_mode", ["session", "transaction", "statement"])
@pytest.mark.parametrize("settings", [{}, {"ignore_startup_parameters": "options,extra_float_digits"}])
async def test_a_pooler_is_refused_whatever_its_mode_and_however_quiet_it_is(
    dsn: str, pgbouncer: StartPooler, pool_mode: PoolMode, settings: dict[str, str]
) -> None:
    error = await refusal(LeaderLock.for_name(pgbouncer(dsn, pool_mode, **settings), fresh_name()))
    assert isinstance(error, UnsafeSessionError)
    assert error.reason == "pooler"
    assert "allow_pooler" in str(error)


async def test_a_pooler_is_refused_though_the_session_behind_it_has_every_setting(
    throwaway_postgres: StartServer, pgbouncer: StartPooler
) -> None:
    """The pooler drops our settings, and the DBA has chosen the same ones: only the backend's pid is not ours."""
    server = throwaway_postgres()
    with psycopg.connect(server.dsn, autocommit=True) as dba:
        for name, value in FORCED.items():
            dba.execute(f"ALTER ROLE postgres SET {name} = {value}".encode())
    through = pgbouncer(server.dsn, "transaction", ignore_startup_parameters="options,extra_float_digits")
    error = await refusal(LeaderLock.for_name(through, fresh_name()))
    assert isinstance(error, UnsafeSessionError)
    assert error.reason == "pooler"


async def test_a_pool_in_session_mode_serves_when_it_is_allowed(dsn: str, pgbouncer: StartPooler) -> None:
    through = pgbouncer(dsn, "session")
    name = fresh_name()
    first = LeaderLock.for_name(through, name, allow_pooler=True, retry_strategy=QUICK, health_interval_s=0.2)
    second = LeaderLock.for_name(through, name, allow_pooler=True, retry_strategy=QUICK, health_interval_s=0.2)
    story = Recorder(second)
    async with first:
        assert await first.wait_for_leadership(WAIT_S)
        async with second:
            await story.heard("acquire_failed", 3)
            assert len(holders(dsn, key_pair(name))) == 1
            await first.shutdown()
            await story.heard("acquired")
            assert len(holders(dsn, key_pair(name))) == 1


@pytest.mark.parametrize("pool_mode", ["transaction", "statement"])
async def test_a_pool_that_shares_sessions_is_refused_even_when_poolers_are_allowed(
    dsn: str, pgbouncer: StartPooler, pool_mode: PoolMode
) -> None:
    name = fresh_name()
    error = await refusal(LeaderLock.for_name(pgbouncer(dsn, pool_mode), name, allow_pooler=True))
    assert isinstance(error, UnsafeSessionError)
    assert "pool_mode=session" in str(error)
    assert holders(dsn, key_pair(name)) == []


async def test_behind_an_allowed_pooler_two_clients_of_one_backend_never_both_lead(
    dsn: str, pgbouncer: StartPooler, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The check at the start is taken out, as if a busy pool had fooled it: the statement itself must still refuse.
    monkeypatch.setattr("pgleaderlock._pg.session.prove", _fooled)
    through = pgbouncer(dsn, "transaction", default_pool_size="1")
    name = fresh_name()
    first = LeaderLock.for_name(through, name, allow_pooler=True, health_interval_s=3600)
    second = LeaderLock.for_name(through, name, allow_pooler=True, health_interval_s=3600, retry_strategy=QUICK)
    async with first:
        assert await first.wait_for_leadership(WAIT_S)
        error = await refusal(second)
        assert isinstance(error, UnsafeSessionError)


def _fooled(_connection: object, sample: Callable[[], Steps[Backend]]) -> Steps[Backend]:
    return (yield from sample())


async def test_a_standby_is_refused_and_a_list_of_hosts_finds_the_primary(throwaway_postgres: StartServer) -> None:
    primary = throwaway_postgres()
    name = fresh_name()
    with open_folder() as folder:
        replica = await asyncio.to_thread(primary.make_replica, Path(folder) / "replica")
        try:
            error = await refusal(LeaderLock.for_name(replica.dsn, name))
            assert isinstance(error, UnsafeSessionError)
            assert error.reason == "standby"
            assert "primary" in str(error)
            both = _both(replica.dsn, primary.dsn)
            async with LeaderLock.for_name(both, name) as lock:
                assert await lock.wait_for_leadership(WAIT_S)
                assert len(holders(primary.dsn, key_pair(name))) == 1
        finally:
            await asyncio.to_thread(replica.close)


def _both(first: str, second: str) -> str:
    one, two = psycopg.conninfo.conninfo_to_dict(first), psycopg.conninfo.conninfo_to_dict(second)
    assert one["password"] == two["password"]
    return make_conninfo(first, host=f"{one['host']},{two['host']}", port=f"{one['port']},{two['port']}")


async def test_after_a_failover_a_list_of_hosts_leads_on_the_promoted_server(throwaway_postgres: StartServer) -> None:
    primary = throwaway_postgres()
    name = fresh_name()
    with open_folder() as folder:
        replica = await asyncio.to_thread(primary.make_replica, Path(folder) / "replica")
        try:
            lock = LeaderLock.for_name(_both(primary.dsn, replica.dsn), name, retry_strategy=QUICK)
            story = Recorder(lock)
            async with lock:
                await story.heard("acquired")
                await asyncio.to_thread(primary.stop, "immediate")
                await story.heard("lost")
                await asyncio.to_thread(replica.promote)
                await story.heard("acquired", 2)
                assert len(holders(replica.dsn, key_pair(name))) == 1
        finally:
            await asyncio.to_thread(replica.close)


async def test_the_dbas_timeouts_do_not_reach_our_session(throwaway_postgres: StartServer) -> None:
    server = throwaway_postgres()
    with psycopg.connect(server.dsn, autocommit=True) as admin:
        admin.execute("ALTER ROLE postgres SET idle_session_timeout = '300ms'")
        admin.execute("ALTER ROLE postgres SET default_transaction_isolation = 'serializable'")
        admin.execute("ALTER DATABASE postgres SET default_transaction_read_only = on")
    # A follower that waits longer than the DBA's timeout between two tries must still have the same session.
    name = fresh_name()
    leader = LeaderLock.for_name(server.dsn, name, health_interval_s=1)
    follower = LeaderLock.for_name(server.dsn, name, standby_wait_s=0, retry_strategy=FixedInterval(1.0))
    story = Recorder(follower)
    async with leader:
        assert await leader.wait_for_leadership(WAIT_S)
        async with follower:
            await story.heard("acquire_failed", 3)
    assert story.errors == []


async def test_a_setting_that_was_changed_behind_our_back_is_refused(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Something between us and the server drops the startup options: simulated by not sending one of them.
    monkeypatch.setattr("pgleaderlock._pg.conninfo._options", lambda settings: "-c idle_session_timeout=12345")
    error = await refusal(LeaderLock.for_name(dsn, fresh_name()))
    assert isinstance(error, UnsafeSessionError)
    assert error.reason == "settings"
    assert "idle_session_timeout=12345ms" in str(error)


@pytest.mark.parametrize(
    "option",
    [
        "-c idle_session_timeout=1000",
        "-c default_transaction_read_only=on",
        "--default-transaction-isolation=serializable",
        "-cidle_session_timeout=5",
    ],
)
def test_an_option_in_the_dsn_that_breaks_a_promise_is_refused_at_once(dsn: str, option: str) -> None:
    with pytest.raises(ConfigurationError, match="breaks a promise"):
        LeaderLock.for_name(make_conninfo(dsn, options=option), "x")


@pytest.mark.parametrize("attrs", ["standby", "prefer-standby", "read-only"])
def test_a_dsn_that_asks_for_a_standby_is_refused_at_once(dsn: str, attrs: str) -> None:
    with pytest.raises(ConfigurationError, match="standby"):
        LeaderLock.for_name(make_conninfo(dsn, target_session_attrs=attrs), "x")


async def test_a_harmless_option_in_the_dsn_wins(dsn: str) -> None:
    with_option = make_conninfo(dsn, options="-c work_mem=7MB", application_name="mine")
    async with LeaderLock.for_name(with_option, fresh_name()) as lock:
        assert await lock.wait_for_leadership(WAIT_S)
        assert connections_named(dsn, "mine") == 1


async def test_a_full_lock_table_is_a_clear_error_and_passes(throwaway_postgres: StartServer) -> None:
    server = throwaway_postgres(max_locks_per_transaction="10", max_connections="20")
    lock = LeaderLock.for_name(server.dsn, fresh_name(), retry_strategy=QUICK)
    story = Recorder(lock)
    with psycopg.connect(server.dsn, autocommit=True) as hoarder:
        async with lock:
            await story.heard("acquired")
            await lock.step_down()
            taken = _hoard(hoarder)
            await story.until(lambda s: any("raise max_locks_per_transaction" in str(error) for error in s.errors))
            hoarder.execute("SELECT pg_advisory_unlock_all()")
            assert taken > 100
            await story.heard("acquired", 2)


def _hoard(connection: psycopg.Connection[tuple[int]]) -> int:
    taken = 0
    try:
        while True:
            connection.execute(
                "SELECT pg_advisory_lock(i) FROM generate_series(%s::bigint, %s::bigint) i", (taken, taken)
            )
            taken += 1
    except psycopg.errors.OutOfMemory:
        return taken


async def test_an_old_server_is_refused(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # No server before 14 is at hand: the bound is raised instead.
    monkeypatch.setattr("pgleaderlock._pg.session.VERSION_MIN", 990000)
    error = await refusal(LeaderLock.for_name(dsn, fresh_name()))
    assert isinstance(error, UnsafeSessionError)
    assert error.reason == "version"


async def test_a_role_without_access_gets_the_servers_reason_and_no_lock(dsn: str) -> None:
    role = f"nobody_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'x'")
        admin.execute(f"CREATE DATABASE {role}")
        admin.execute(f"REVOKE CONNECT ON DATABASE {role} FROM PUBLIC")
        try:
            error = await refusal(
                LeaderLock.for_name(make_conninfo(dsn, user=role, password="x", dbname=role), fresh_name())
            )
            assert "permission denied for database" in str(error)
        finally:
            admin.execute(f"DROP DATABASE {role}")
            admin.execute(f"DROP ROLE {role}")


async def test_a_refused_lock_goes_on_trying_and_leads_when_the_reason_is_gone(
    dsn: str, pgbouncer: StartPooler
) -> None:
    through = pgbouncer(dsn, "transaction")
    ways = iter([through, through])
    lock = LeaderLock.for_name(lambda: next(ways, dsn), fresh_name(), retry_strategy=QUICK)
    story = Recorder(lock)
    async with lock:
        await story.heard("acquired")
    assert len(story.errors) == 2
    assert lock.state is LockState.STOPPED


async def test_a_probe_behind_an_allowed_pooler_asks_for_the_lock_itself(dsn: str) -> None:
    keys = key_pair(fresh_name())
    session = await DedicatedSession.open(dsn, ConnectionSettings("refusals-probe", 5.0, 7.5, allow_pooler=True))
    try:
        assert await session.take(keys)
        for _ in range(3):  # the first one asks who we are
            await session.probe(keys)
        await session._connection.execute("SELECT pg_advisory_unlock_all()")
        with pytest.raises(UnsafeSessionError, match="no longer ours"):
            await session.probe(keys)
    finally:
        await session.close()


async def test_a_standby_is_refused_by_the_statement_itself(
    throwaway_postgres: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The look at the first message is taken out: a server can become a standby's successor behind one address.
    async def fit(_self: object) -> None: ...

    monkeypatch.setattr(DedicatedSession, "_check", fit)
    primary = throwaway_postgres()
    with open_folder() as folder:
        replica = await asyncio.to_thread(primary.make_replica, Path(folder) / "replica")
        try:
            error = await refusal(LeaderLock.for_name(replica.dsn, fresh_name()))
            assert isinstance(error, UnsafeSessionError)
            assert error.reason == "standby"
        finally:
            await asyncio.to_thread(replica.close)
