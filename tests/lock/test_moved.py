"""An answer proves leadership only if the backend that took the lock gives it: behind a proxy, any server answers."""

import asyncio
import contextlib
import socket
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import psycopg
import pytest

from conftest import StartServer
from pgleaderlock import (
    FixedInterval,
    LeaderElection,
    LeaderLock,
    UnsafeSessionError,
    acquire_leadership,
    acquire_leadership_with_retry,
    key_pair,
)
from pgleaderlock import guard as guard_module
from pgleaderlock._pg.conninfo import ConnectionSettings
from pgleaderlock._pg.session import DedicatedSession
from pgleaderlock.errors import ConnectionError
from pgleaderlock.keys import KeyPair
from support.elections import STEADY, fresh_database, until
from support.proxy import Proxy
from support.recorder import WAIT_S, Recorder
from support.server_side import holders

ProxyTo = Callable[[str], Awaitable[Proxy]]
SETTINGS = ConnectionSettings("moved", 5.0, 7.5)


@pytest.fixture
def name() -> str:
    return f"moved-{uuid.uuid4()}"


@contextlib.asynccontextmanager
async def elsewhere(dsn: str, *taken: KeyPair) -> AsyncIterator[socket.socket]:
    """An open session with another server, which may hold locks there: what a proxy moves its client to."""
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        for keys in taken:
            await conn.execute("SELECT pg_advisory_lock(%s, %s)", keys)
        yield socket.socket(fileno=socket.dup(conn.pgconn.socket))


async def test_a_lock_that_was_moved_to_another_server_stops_leading_at_its_next_probe(
    dsn: str, name: str, throwaway_postgres: StartServer, proxy_to: ProxyTo
) -> None:
    old = throwaway_postgres()
    proxy = await proxy_to(old.dsn)
    lock = LeaderLock.for_name(proxy.dsn_for(old.dsn), name, health_interval_s=0.2, retry_strategy=FixedInterval(600))
    story = Recorder(lock)
    async with elsewhere(dsn) as other, lock:
        assert await lock.wait_for_leadership(WAIT_S)
        await proxy.move(other)
        await story.heard("lost")
        assert isinstance(lock.last_error, UnsafeSessionError)
        assert not lock.is_leader


async def test_a_lock_that_was_moved_to_the_session_of_another_leader_stops_leading(
    dsn: str, name: str, throwaway_postgres: StartServer, proxy_to: ProxyTo
) -> None:
    """That session holds the lock, and has a prepared probe of its own: it is still not ours."""
    keys = key_pair(name)
    old = throwaway_postgres()
    proxy = await proxy_to(old.dsn)
    ours = await DedicatedSession.open(proxy.dsn_for(old.dsn), SETTINGS)
    theirs = await DedicatedSession.open(dsn, SETTINGS)
    try:
        for session in (ours, theirs):
            assert await session.take(keys)
            await session.probe(keys)
        theirs._unwatch()  # the proxy reads from its socket now
        ours._backend_pid = theirs._backend_pid  # two servers do have backends with one pid
        await proxy.move(socket.socket(fileno=socket.dup(theirs._connection.pgconn.socket)))
        with pytest.raises(UnsafeSessionError, match="no longer ours"):
            await ours.probe(keys)
    finally:
        await ours.close()
        await theirs.close()


async def test_a_session_that_was_moved_before_its_first_probe_is_not_taken_for_ours(
    dsn: str, name: str, proxy: Proxy
) -> None:
    keys = key_pair(name)
    session = await DedicatedSession.open(proxy.dsn_for(dsn), SETTINGS)
    try:
        assert await session.take(keys)
        async with elsewhere(dsn) as other:
            await proxy.move(other)
            with pytest.raises(UnsafeSessionError, match="no longer ours"):
                await session.probe(keys)
        assert session.identity is None
    finally:
        await session.close()


@pytest.mark.parametrize("how", ["pg_advisory_unlock_all()", "pg_advisory_unlock({}, {}), pg_advisory_unlock({}, {})"])
async def test_a_session_that_has_lost_the_lock_without_ending_does_not_lead(dsn: str, name: str, how: str) -> None:
    keys = key_pair(name)
    session = await DedicatedSession.open(dsn, SETTINGS)
    try:
        assert await session.take(keys)
        for _ in range(3):
            await session.probe(keys)
        assert len(holders(dsn, keys)) == 1
        await session._connection.execute(f"SELECT {how.format(*keys, *keys)}".encode())
        with pytest.raises(UnsafeSessionError, match="no longer ours"):
            await session.probe(keys)
    finally:
        await session.close()


@pytest.mark.parametrize("waiting", [False, True])
async def test_a_lock_that_is_held_twice_for_the_probe_is_free_after_one_release(
    dsn: str, name: str, waiting: bool
) -> None:
    keys = key_pair(name)
    session = await DedicatedSession.open(dsn, SETTINGS)
    try:
        for _ in range(3):  # a later term on the same session as well
            assert await (session.wait(keys, 1.0) if waiting else session.take(keys))
            for _ in range(3):
                await session.probe(keys)
            await session.unlock(keys)
            assert holders(dsn, keys) == []
            await session._connection.execute("SET idle_session_timeout = 0")
    finally:
        await session.close()


async def test_a_probe_never_lets_a_waiter_in(dsn: str, name: str) -> None:
    keys = key_pair(name)
    leader = await DedicatedSession.open(dsn, SETTINGS)
    waiter = await DedicatedSession.open(dsn, SETTINGS)
    try:
        assert await leader.take(keys)
        waiting = asyncio.ensure_future(waiter.wait(keys, 2.0))
        for _ in range(100):
            await leader.probe(keys)
        assert not await waiting
        assert len(holders(dsn, keys)) == 1
    finally:
        await leader.close()
        await waiter.close()


# --- Guards


async def test_check_is_false_on_another_server_whose_session_has_the_same_pid_and_holds_the_lock(
    dsn: str, name: str, throwaway_postgres: StartServer, proxy_to: ProxyTo, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = throwaway_postgres()
    proxy = await proxy_to(old.dsn)
    async with (
        await psycopg.AsyncConnection.connect(proxy.dsn_for(old.dsn), autocommit=True) as conn,
        elsewhere(dsn, key_pair(name)) as other,
    ):
        guard = await acquire_leadership(conn, name)
        assert await guard.check()
        await proxy.move(other)
        backing: Any = guard._backing
        (pid,) = holders(dsn, key_pair(name))
        backing._holder = backing._holder._replace(backend_pid=pid)  # two servers do have backends with one pid
        assert not await guard.check()
        await guard.release()


async def test_the_guard_of_a_helper_that_was_moved_to_another_server_is_lost(
    dsn: str, name: str, throwaway_postgres: StartServer, proxy_to: ProxyTo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard_module, "PROBE_INTERVAL_S", 0.2)
    old = throwaway_postgres()
    proxy = await proxy_to(old.dsn)
    async with elsewhere(dsn, key_pair(name)) as other:
        guard = await acquire_leadership_with_retry(proxy.dsn_for(old.dsn), name, FixedInterval(0.1))
        await proxy.move(other)
        async with asyncio.timeout(WAIT_S):
            await guard.lost()
        assert not guard.held
        assert not await guard.check()


# --- Elections


def _backend_of(election: LeaderElection) -> psycopg.AsyncConnection[Any]:
    engine = election._run.engine
    assert engine is not None
    session = engine._board.open_ledger().session
    assert isinstance(session, DedicatedSession)
    return session._connection


async def test_an_election_whose_session_has_lost_its_locks_shuts_its_gates(dsn: str, name: str) -> None:
    with fresh_database(dsn, ledger=True) as own:
        async with LeaderElection(own, [name, f"{name}-2"], **STEADY) as election:
            await until(lambda: all(election.gate(role).is_leader for role in (name, f"{name}-2")))
            epochs = {role: election.gate(role).current_epoch for role in (name, f"{name}-2")}
            await _backend_of(election).execute("SELECT pg_advisory_unlock_all()")
            await until(lambda: isinstance(election.last_error, UnsafeSessionError))
            await until(lambda: all(election.gate(role).current_epoch not in (None, epochs[role]) for role in epochs))


async def test_a_heartbeat_that_another_backend_answers_counts_for_nothing(dsn: str, name: str) -> None:
    """Same pid as far as the ledger can tell, and the role's lock held: only the mark of the session is missing."""
    with fresh_database(dsn, ledger=True) as own:
        async with LeaderElection(own, name, **STEADY) as election:
            await until(lambda: election.gate(name).is_leader)
            await _backend_of(election).execute("RESET pgleaderlock.session")
            await until(lambda: isinstance(election.last_error, ConnectionError))
            assert isinstance(election.last_error, UnsafeSessionError)
