"""A leader that falls silent loses the lock at the server after T, in every way in which it can fall silent."""

import asyncio
import os
import random
import re
import signal
import uuid
from collections.abc import Awaitable, Callable

import psycopg
import pytest

from conftest import StartPooler, StartServer
from pgleaderlock import FixedInterval, LeaderLock, LockState, key_pair
from pgleaderlock._pg import session as _session
from pgleaderlock._pg.conninfo import ConnectionSettings
from pgleaderlock._pg.session import DedicatedSession
from pgleaderlock._pg.statements import statement
from support.counts import count
from support.node import node
from support.proxy import Proxy
from support.recorder import WAIT_S, Recorder
from support.server_side import holders, until_held_by, until_waited_for

# G = 0.6 s, T = 1 s.
SHORT = {"health_interval_s": 0.3, "health_timeout_s": 0.3, "session_lease_s": 1.0}


def fresh_name() -> str:
    return f"lease-{uuid.uuid4()}"


async def test_a_frozen_leader_is_replaced_and_knows_it_at_its_first_instruction(dsn: str) -> None:
    name = fresh_name()
    async with node(dsn, name, **SHORT) as frozen_leader:
        await frozen_leader.hears("acquired")
        frozen_leader.tell("freeze")
        successor = LeaderLock.for_name(dsn, name, retry_strategy=FixedInterval(0.05))
        async with successor:
            assert await successor.wait_for_leadership(WAIT_S)
            frozen_leader.signal(signal.SIGCONT)
            thawed = await frozen_leader.hears("thawed")
            assert thawed == {"what": "thawed", "before": True, "is_leader": False, "state": "leader"}
            assert successor.is_leader


async def test_a_frozen_parked_waiter_does_not_keep_the_lock_it_is_granted(dsn: str) -> None:
    """It is granted while nobody is there to hear it: the lease was set with the grant, so T still frees it."""
    name = fresh_name()
    holder = LeaderLock.for_name(dsn, name)
    await holder.start()
    assert await holder.wait_for_leadership(WAIT_S)
    async with node(dsn, name, standby_wait_s=60, **SHORT) as parked:
        await parked.hears("state", new="acquiring")
        await until_waited_for(dsn, key_pair(name))
        parked.signal(signal.SIGSTOP)
        await holder.shutdown()
        async with LeaderLock.for_name(dsn, name, retry_strategy=FixedInterval(0.05)) as successor:
            assert await successor.wait_for_leadership(WAIT_S)


# --- The four cases in which idle_session_timeout would not fire by itself


async def test_case_one_nothing_is_sent_but_whole_simple_queries(
    throwaway_postgres: StartServer, proxy_to: Callable[[str], Awaitable[Proxy]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Parse without its Sync leaves the backend active, where the lease never fires; a simple query cannot."""
    server = throwaway_postgres()
    proxy = await proxy_to(server.dsn)
    sent: list[bytes] = []
    pump = Proxy._pump

    async def listening(self: Proxy, source: object, sink: object, *, to_server: bool) -> None:
        if to_server:
            source = _Tapped(source, sent)
        await pump(self, source, sink, to_server=to_server)  # type: ignore[arg-type]

    monkeypatch.setattr(Proxy, "_pump", listening)
    loop = asyncio.get_running_loop()
    receive = loop.sock_recv

    async def tapped(source: object, size: int) -> bytes:
        if isinstance(source, _Tapped):
            chunk = await receive(source.socket, size)  # type: ignore[arg-type]
            source.sent.append(chunk)
            return chunk
        return await receive(source, size)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "sock_recv", tapped)
    name = fresh_name()
    lock = LeaderLock.for_name(proxy.dsn_for(server.dsn), name, standby_wait_s=60, **SHORT)  # type: ignore[arg-type]
    async with LeaderLock.for_name(server.dsn, name) as holder:
        assert await holder.wait_for_leadership(WAIT_S)
        await lock.start()
        await until_waited_for(server.dsn, key_pair(name))
    assert await lock.wait_for_leadership(WAIT_S)
    probes = len(re.findall(rb"EXECUTE pgleaderlock_probe", b"".join(sent)))
    await proxy.until(lambda _: len(re.findall(rb"EXECUTE pgleaderlock_probe", b"".join(sent))) > probes + 1)
    await lock.shutdown()
    kinds = _message_kinds(b"".join(sent))
    assert kinds.count("Q") >= 5, "take, wait, identify, probe, unlock"
    assert set(kinds) <= {"p", "Q", "X"}, "password messages, simple queries and Terminate, and nothing else"


class _Tapped:
    def __init__(self, socket: object, sent: list[bytes]) -> None:
        self.socket, self.sent = socket, sent

    def __getattr__(self, name: str) -> object:
        return getattr(self.socket, name)


def _message_kinds(stream: bytes) -> list[str]:
    """The type bytes of the client's messages; the first one, the startup packet, has none."""
    kinds, at = [], int.from_bytes(stream[:4], "big")
    while at + 5 <= len(stream):
        kinds.append(chr(stream[at]))
        at += 1 + int.from_bytes(stream[at + 1 : at + 5], "big")
    return kinds


async def test_case_two_a_flood_of_notifications_does_not_keep_a_stopped_leader(dsn: str) -> None:
    """The lock's session never listens, so nothing is ever sent to it that could fill its socket."""
    name = fresh_name()
    async with (
        node(dsn, name, **SHORT) as leader,
        await psycopg.AsyncConnection.connect(dsn, autocommit=True, application_name="test-flood") as flood,
    ):
        await leader.hears("acquired")
        cursor = await flood.execute("SELECT count(*) FROM pg_stat_activity WHERE query ILIKE 'listen%'")
        assert await cursor.fetchone() == (0,)
        leader.signal(signal.SIGSTOP)
        async with asyncio.timeout(WAIT_S):
            while await asyncio.to_thread(holders, dsn, key_pair(name)):
                for channel in ("pgleaderlock", "leader", "postgres"):
                    await flood.execute(
                        "SELECT pg_notify(%s, repeat('x', 7000)) FROM generate_series(1, 20)", (channel,)
                    )


async def test_case_three_lock_and_lease_come_into_force_together(dsn: str) -> None:
    """Whoever holds the lock has the lease: looked at from inside the session, after both ways to a grant."""
    keys = key_pair(fresh_name())
    for waits in (False, True):
        session = await DedicatedSession.open(dsn, ConnectionSettings("lease-case-three", 5.0, 7.5))
        try:
            assert await (session.wait(keys, 1.0) if waits else session.take(keys))
            cursor = await session._connection.execute("SELECT current_setting('idle_session_timeout')")
            assert await cursor.fetchone() == {"current_setting": "7500ms"}
        finally:
            await session.close()
        await until_held_by(dsn, keys, 0)


async def test_case_four_no_statement_of_ours_waits_for_synchronous_replication(
    throwaway_postgres: StartServer,
) -> None:
    """The standby that commits must wait for does not exist: a statement that writes would hang for ever."""
    server = throwaway_postgres(synchronous_standby_names="nobody")
    name = fresh_name()
    async with node(server.dsn, name, **SHORT) as leader:
        await leader.hears("acquired")
        leader.tell("freeze")
        async with LeaderLock.for_name(server.dsn, name, retry_strategy=FixedInterval(0.05)) as successor:
            assert await successor.wait_for_leadership(WAIT_S)


# --- Waiting at the server


async def test_a_slice_that_ends_as_it_is_granted_is_a_grant(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The timeout strikes after the grant: made certain here by raising the timeout's error right behind the grant."""
    whole = statement("wait_for_lock")
    grant = b"PERFORM pg_advisory_lock(%(key1)s, %(key2)s);"
    assert grant in whole
    late = whole.replace(grant, grant + b" RAISE EXCEPTION 'late' USING ERRCODE = 'lock_not_available';", 1)
    monkeypatch.setattr(_session, "statement", lambda name: late if name == "wait_for_lock" else statement(name))
    keys = key_pair(fresh_name())
    session = await DedicatedSession.open(dsn, ConnectionSettings("lease-late-grant", 5.0, 7.5))
    try:
        assert await session.wait(keys, 0.1)
        assert len(holders(dsn, keys)) == 1
        cursor = await session._connection.execute("SELECT current_setting('idle_session_timeout')")
        assert await cursor.fetchone() == {"current_setting": "7500ms"}, "a late grant must have its lease too"
        await session.unlock(keys)
        assert holders(dsn, keys) == [], "it must be held once"
    finally:
        await session.close()


@pytest.mark.timeout(600)
async def test_the_answer_of_a_slice_is_the_truth_when_the_release_races_its_end(dsn: str) -> None:
    keys = key_pair(fresh_name())
    rng = random.Random(20)
    slice_s = 0.02
    answers: list[bool] = []
    settings = ConnectionSettings("lease-race", 5.0, 7.5)
    holder = await DedicatedSession.open(dsn, settings)
    waiter = await DedicatedSession.open(dsn, settings)
    try:
        for _ in range(count(150, 3000)):
            assert await holder.take(keys)
            waiting = asyncio.ensure_future(waiter.wait(keys, slice_s))
            await asyncio.sleep(slice_s + rng.uniform(-0.003, 0.002))
            await holder.unlock(keys)
            granted = await waiting
            assert len(holders(dsn, keys)) == granted
            answers.append(granted)
            if granted:
                await waiter.unlock(keys)
            # The lease of the last grant would end an idle session: both begin anew, as a lock's session does.
            for session in (holder, waiter):
                await session._connection.execute("SET idle_session_timeout = 0")
    finally:
        await holder.close()
        await waiter.close()
    assert len(set(answers)) == 2, "the race was always won by the same side: it was none"


async def test_a_parked_waiter_holds_no_snapshot_longer_than_a_slice(throwaway_postgres: StartServer) -> None:
    """CREATE INDEX CONCURRENTLY waits for every older snapshot: it ends while a waiter is parked."""
    server = throwaway_postgres()
    name = fresh_name()
    async with LeaderLock.for_name(server.dsn, name) as holder:
        assert await holder.wait_for_leadership(WAIT_S)
        async with LeaderLock.for_name(server.dsn, name, standby_wait_s=60) as parked:
            await until_waited_for(server.dsn, key_pair(name))
            async with await psycopg.AsyncConnection.connect(server.dsn, autocommit=True) as dba:
                await dba.execute("CREATE TABLE t (i int)")
                await dba.execute("SET statement_timeout = '20s'")
                for number in range(count(2, 10)):
                    await dba.execute(f"CREATE INDEX CONCURRENTLY t{number} ON t (i)".encode())
            assert parked.state is LockState.ACQUIRING


@pytest.mark.parametrize("standby_wait_s", [0.0, 60.0])
@pytest.mark.timeout(180)
async def test_an_idle_standby_writes_no_error_into_the_servers_log(
    throwaway_postgres: StartServer, standby_wait_s: float
) -> None:
    server = throwaway_postgres(log_min_messages="error", log_lock_waits="on")
    name = fresh_name()
    async with LeaderLock.for_name(server.dsn, name) as holder:
        assert await holder.wait_for_leadership(WAIT_S)
        lock = LeaderLock.for_name(
            server.dsn, name, standby_wait_s=standby_wait_s, retry_strategy=FixedInterval(0.5), session_lease_s=11
        )
        story = Recorder(lock)
        async with lock:
            quiet = server.log_path.read_text()
            # The minute is the claim itself: a standby that is idle for that long.
            await asyncio.sleep(count(3, 60))
            assert lock.state in (LockState.ACQUIRING, LockState.FOLLOWER)
            assert story.errors == []
            written = server.log_path.read_text().removeprefix(quiet)
    assert not re.findall(r"\b(?:ERROR|FATAL|PANIC|still waiting)\b.*", written)


async def test_a_forked_child_does_not_keep_the_session_and_leads_nothing(dsn: str) -> None:
    # The lease would free the lock after five minutes: that it is free at once shows that the child has let go.
    name = fresh_name()
    async with node(dsn, name, **{**SHORT, "session_lease_s": 300}) as parent:
        await parent.hears("acquired")
        parent.tell("fork")
        child = await parent.hears("child")
        assert child["is_leader"] is False
        try:
            parent.signal(signal.SIGKILL)
            await until_held_by(dsn, key_pair(name), 0)
        finally:
            os.kill(child["pid"], signal.SIGKILL)


async def test_behind_an_allowed_pooler_lock_and_lease_come_into_force_together(
    dsn: str, pgbouncer: StartPooler
) -> None:
    settings = ConnectionSettings("lease-pooled", 5.0, 7.5, allow_pooler=True)
    session = await DedicatedSession.open(pgbouncer(dsn, "session"), settings)
    try:
        assert await session.take(key_pair(fresh_name()))
        cursor = await session._connection.execute("SELECT current_setting('idle_session_timeout')")
        assert await cursor.fetchone() == {"current_setting": "7500ms"}
    finally:
        await session.close()
