"""The database goes away: restarted, stopped, frozen, cut off. Nobody leads on memory, and everybody comes back."""

import asyncio
import threading
import uuid
from collections.abc import Awaitable, Callable, Iterator

import psycopg
import pytest

from pgleaderlock import FixedInterval, LeaderLock, LockState, ShutdownError, key_pair
from pgleaderlock._pg.conninfo import ConnectionSettings
from pgleaderlock._pg.session import DedicatedSession, SessionIdentity
from pgleaderlock.embedded import EmbeddedPostgres
from support.proxy import Proxy
from support.recorder import WAIT_S, Recorder, identified, somebody_leads
from support.server_side import backends, connections_named, frozen, holders, until_held_by
from support.servers import throwaway

QUICK = FixedInterval(0.05)


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    """To be stopped, frozen and cut off. Each test leaves it running, and uses a lock of its own."""
    with throwaway() as running:
        yield running


def fresh_name() -> str:
    return f"outages-{uuid.uuid4()}"


async def test_after_a_restart_of_the_server_somebody_leads_again(server: EmbeddedPostgres) -> None:
    name = fresh_name()
    locks = [LeaderLock.for_name(server.dsn, name, retry_strategy=QUICK) for _ in range(2)]
    stories = [Recorder(lock) for lock in locks]
    async with locks[0], locks[1]:
        leading = await somebody_leads(locks)
        leader = stories[locks.index(leading)]
        await asyncio.to_thread(server.restart, "immediate")
        await leader.heard("lost")
        await somebody_leads(locks)
        assert len(holders(server.dsn, key_pair(name))) == 1


async def test_a_grace_that_is_long_enough_outlasts_a_restart(server: EmbeddedPostgres) -> None:
    lock = LeaderLock.for_name(server.dsn, fresh_name(), retry_strategy=QUICK, reconnect_grace_s=60)
    story = Recorder(lock)
    async with lock:
        assert await lock.wait_for_leadership(WAIT_S)
        await asyncio.to_thread(server.restart)
        await story.until(lambda s: (LockState.RECONNECTING, LockState.LEADER) in s.changes)
    assert story.events == ["acquired", "released", "stopped"]


async def test_while_the_server_is_down_nobody_says_that_it_leads(server: EmbeddedPostgres) -> None:
    name = fresh_name()
    locks = [
        LeaderLock.for_name(server.dsn, name, retry_strategy=QUICK, reconnect_grace_s=grace) for grace in (None, 60)
    ]
    stories = [Recorder(lock) for lock in locks]
    async with locks[0], locks[1]:
        leading = await somebody_leads(locks)
        leader = stories[locks.index(leading)]
        await asyncio.to_thread(server.stop)
        await leader.until(lambda s: s.changes[-1][0] is LockState.LEADER or s.lock.state is not LockState.LEADER)
        for story in stories:
            before = len(story.errors)
            if story.lock.state is not LockState.RECONNECTING:  # it keeps quiet until the grace is over
                await story.until(lambda s, before=before: len(s.errors) > before + 2)  # type: ignore[misc]
        assert not any(lock.is_leader for lock in locks)
        assert all(lock.state is not LockState.LEADER for lock in locks)
        await asyncio.to_thread(server.start)
        await somebody_leads(locks)
        assert len(holders(server.dsn, key_pair(name))) == 1


async def test_a_frozen_server_costs_leadership_after_the_probes_timeout(server: EmbeddedPostgres) -> None:
    lock = LeaderLock.for_name(
        server.dsn, fresh_name(), retry_strategy=QUICK, health_interval_s=0.2, health_timeout_s=0.5, session_lease_s=2
    )
    story = Recorder(lock)
    async with lock:
        assert await lock.wait_for_leadership(WAIT_S)
        with frozen(server):
            await story.heard("lost")
            assert not lock.is_leader
            assert "did not answer" in str(lock.last_error)
        await story.heard("acquired", 2)


async def test_shutdown_with_a_timeout_ends_even_while_the_server_is_frozen(server: EmbeddedPostgres) -> None:
    lock = LeaderLock.for_name(server.dsn, fresh_name(), health_interval_s=3600)
    await lock.start()
    assert await lock.wait_for_leadership(WAIT_S)
    with frozen(server):
        with pytest.raises(ShutdownError, match="connection was cut"):
            await lock.shutdown(timeout_s=0.2)
        assert lock.state is LockState.STOPPED


async def test_a_cut_leader_ends_its_own_zombie_and_leads_again(
    server: EmbeddedPostgres, proxy_to: Callable[[str], Awaitable[Proxy]]
) -> None:
    # The lease would free the lock after five minutes: that it is free at once shows the eviction.
    proxy = await proxy_to(server.dsn)
    name = fresh_name()
    ways = iter([proxy.dsn_for(server.dsn)])
    lock = LeaderLock.for_name(
        lambda: next(ways, server.dsn),  # the first connection can be cut, the later ones go around the cut
        name,
        retry_strategy=QUICK,
        health_interval_s=0.2,
        health_timeout_s=0.5,
        session_lease_s=300,
    )
    story = Recorder(lock)
    async with lock:
        assert await lock.wait_for_leadership(WAIT_S)
        (zombie,) = holders(server.dsn, key_pair(name))
        await _identified(lock)
        proxy.cut()
        await story.heard("acquired", 2)
        (current,) = holders(server.dsn, key_pair(name))
        assert current != zombie
        assert zombie not in backends(server.dsn)


async def _identified(lock: LeaderLock) -> None:
    """Until the first probe of the term has told which backend this is. It follows the grant at once, unannounced."""
    async with asyncio.timeout(WAIT_S):
        while lock._run is None or lock._run._session is None or lock._run._session.identity is None:
            await asyncio.sleep(0.01)


async def test_a_lost_reply_to_the_winning_statement_leaves_no_lock_behind(
    server: EmbeddedPostgres, proxy_to: Callable[[str], Awaitable[Proxy]]
) -> None:
    # The grant happens at the server and nobody hears of it: the connection goes, and the lock with it.
    proxy = await proxy_to(server.dsn)
    name = fresh_name()
    blocker = LeaderLock.for_name(server.dsn, name)
    lock = LeaderLock.for_name(
        proxy.dsn_for(server.dsn),
        name,
        standby_wait_s=0,
        retry_strategy=FixedInterval(0.3),
        health_interval_s=1,
        health_timeout_s=0.5,
    )
    story = Recorder(lock)
    async with blocker:
        assert await blocker.wait_for_leadership(WAIT_S)
        await lock.start()
        await story.heard("acquire_failed")
        proxy.drop_replies()
    await until_held_by(server.dsn, key_pair(name), 1)
    await story.heard("error")
    assert not lock.is_leader
    proxy.heal()
    await story.heard("acquired")
    assert len(holders(server.dsn, key_pair(name))) == 1
    await lock.shutdown()


async def test_reset_and_half_closed_connections_are_noticed_without_a_probe(
    server: EmbeddedPostgres, proxy_to: Callable[[str], Awaitable[Proxy]]
) -> None:
    proxy = await proxy_to(server.dsn)
    lock = LeaderLock.for_name(proxy.dsn_for(server.dsn), fresh_name(), health_interval_s=3600, retry_strategy=QUICK)
    story = Recorder(lock)
    async with lock:
        await story.heard("acquired", 1)
        await identified(lock)
        proxy.reset()
        await story.heard("lost", 1)
        await story.heard("acquired", 2)
        await identified(lock)
        proxy.half_close()
        await story.heard("lost", 2)
        await story.heard("acquired", 3)


async def test_a_blocked_event_loop_is_not_trusted_past_the_window(dsn: str) -> None:
    """A thread asks while the loop is blocked: the clock decides, not the loop."""
    lock = LeaderLock.for_name(dsn, fresh_name(), health_interval_s=0.1, health_timeout_s=0.1, session_lease_s=60)
    async with lock:
        assert await lock.wait_for_leadership(WAIT_S)
        run = lock._run
        assert run is not None
        answers: list[bool] = []
        past = threading.Event()

        def ask_once_untrusted() -> None:
            while lock._clock.now() < run.trusted_until:
                pass
            answers.append(lock.is_leader)
            past.set()

        asker = threading.Thread(target=ask_once_untrusted)
        asker.start()
        assert past.wait(WAIT_S)  # blocks this loop: no probe can be sent meanwhile
        asker.join()
        assert answers == [False]
    assert connections_named(dsn, "pgleaderlock outages%") == 0


async def test_a_backend_that_only_has_the_zombies_pid_is_left_alone(dsn: str) -> None:
    session = await DedicatedSession.open(dsn, ConnectionSettings("outages-zombie", 5.0, 7.5))
    try:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as other:
            reused = SessionIdentity(other.info.backend_pid, "1700000000.123456")
            assert not await session.end_zombie(reused)
            await other.execute("SELECT 1")
    finally:
        await session.close()
