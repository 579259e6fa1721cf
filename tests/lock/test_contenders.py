"""Several nodes, one lock, a real server: who leads, who follows, and how it passes from one to the next."""

import asyncio
import contextlib
import uuid

import pytest

from conftest import StartPooler
from pgleaderlock import FixedInterval, LeaderLock, LockState, key_pair
from support.counts import count
from support.proxy import Proxy
from support.recorder import WAIT_S, Recorder, identified, somebody_leads
from support.server_side import holders, terminate, until_waited_for

QUICK = FixedInterval(0.05)


def fresh_name() -> str:
    return f"contenders-{uuid.uuid4()}"


@pytest.mark.parametrize("contenders", [2, 5])
async def test_of_several_contenders_exactly_one_leads_and_each_leads_in_turn(dsn: str, contenders: int) -> None:
    name = fresh_name()
    locks = [LeaderLock.for_name(dsn, name, retry_strategy=QUICK) for _ in range(contenders)]
    stories = [Recorder(lock) for lock in locks]
    async with contextlib.AsyncExitStack() as running:
        for lock in locks:
            await running.enter_async_context(lock)
        for _ in range(contenders):
            leader = await somebody_leads(locks)
            assert len(holders(dsn, key_pair(name))) == 1
            await leader.shutdown()
            assert leader.state is LockState.STOPPED
    assert all(story.events.count("acquired") == 1 for story in stories), "somebody never led"
    assert all(story.events[-2:] == ["released", "stopped"] for story in stories)


async def test_a_session_ended_by_the_server_is_noticed_at_the_socket(dsn: str) -> None:
    # No probe for an hour: only the socket can tell.
    name = fresh_name()
    lock = LeaderLock.for_name(dsn, name, health_interval_s=3600, retry_strategy=QUICK)
    story = Recorder(lock)
    async with lock:
        for round_ in range(1, count(3, 30) + 1):
            await story.heard("acquired", round_)
            await identified(lock)
            terminate(dsn, key_pair(name))
            await story.heard("lost", round_)
    assert "terminating connection" in str(story.errors[0])


async def test_the_standby_leads_after_the_leaders_session_was_ended(dsn: str) -> None:
    name = fresh_name()
    leader = LeaderLock.for_name(dsn, name, health_interval_s=3600, auto_reacquire=False)
    standby = LeaderLock.for_name(dsn, name, standby_wait_s=30)
    story = Recorder(leader)
    async with leader:
        assert await leader.wait_for_leadership(WAIT_S)
        async with standby:
            await Recorder(standby).reached(LockState.ACQUIRING)
            terminate(dsn, key_pair(name))
            assert await standby.wait_for_leadership(WAIT_S)
            await story.heard("stopped")
            assert leader.state is LockState.STOPPED
            assert not await leader.wait_for_leadership()
            assert "terminating connection" in str(leader.last_error)


async def test_a_standby_with_default_settings_waits_at_the_server(dsn: str) -> None:
    name = fresh_name()
    async with LeaderLock.for_name(dsn, name) as leader:
        assert await leader.wait_for_leadership(WAIT_S)
        standby = LeaderLock.for_name(dsn, name)
        story = Recorder(standby)
        async with standby:
            await story.heard("acquire_failed")  # the first attempt only tries, so this is told at once
            await until_waited_for(dsn, key_pair(name))
            await leader.shutdown()
            assert await standby.wait_for_leadership(WAIT_S)


async def test_a_leader_whose_session_was_ended_lets_a_follower_win_first(dsn: str) -> None:
    """Neither waits at the server: only the order of their tries decides."""
    name = fresh_name()
    tries = FixedInterval(1.0)
    locks = [LeaderLock.for_name(dsn, name, standby_wait_s=0, retry_strategy=tries) for _ in range(2)]
    stories = {lock: Recorder(lock) for lock in locks}
    async with locks[0], locks[1]:
        leader = await somebody_leads(locks)
        for _ in range(count(4, 30)):
            (follower,) = (lock for lock in locks if lock is not leader)
            await stories[follower].heard("acquire_failed", stories[follower].events.count("acquire_failed") + 1)
            await identified(leader)
            terminate(dsn, key_pair(name))
            assert await follower.wait_for_leadership(WAIT_S)
            leader = follower
        terms = [story.events.count("acquired") for story in stories.values()]
    assert abs(terms[0] - terms[1]) <= 1, "a leader won again before its follower"


async def test_step_down_lets_a_competitor_win(dsn: str) -> None:
    name = fresh_name()
    first = LeaderLock.for_name(dsn, name, retry_strategy=FixedInterval(1.0))
    second = LeaderLock.for_name(dsn, name, standby_wait_s=30)
    async with first:
        assert await first.wait_for_leadership(WAIT_S)
        async with second:
            await Recorder(second).reached(LockState.ACQUIRING)
            await first.step_down()
            assert await second.wait_for_leadership(WAIT_S)
            assert not first.is_leader


async def test_grace_that_recovers_tells_nobody_but_does_not_lead_meanwhile(dsn: str) -> None:
    name = fresh_name()
    lock = LeaderLock.for_name(dsn, name, health_interval_s=3600, reconnect_grace_s=WAIT_S, retry_strategy=QUICK)
    story = Recorder(lock)
    led_while_reconnecting: list[bool] = []

    @lock.on_state_change
    def look(_old: LockState, new: LockState) -> None:
        if new is LockState.RECONNECTING:
            led_while_reconnecting.append(lock.is_leader)

    async with lock:
        assert await lock.wait_for_leadership(WAIT_S)
        terminate(dsn, key_pair(name))
        await story.until(lambda s: (LockState.RECONNECTING, LockState.LEADER) in s.changes)
        assert lock.is_leader
    assert led_while_reconnecting == [False]
    assert story.events == ["acquired", "released", "stopped"]


async def test_grace_is_lost_to_a_competitor_and_then_announced(dsn: str) -> None:
    name = fresh_name()
    lock = LeaderLock.for_name(dsn, name, health_interval_s=3600, reconnect_grace_s=WAIT_S, retry_strategy=QUICK)
    rival = LeaderLock.for_name(dsn, name, standby_wait_s=30)
    story = Recorder(lock)
    async with lock:
        assert await lock.wait_for_leadership(WAIT_S)
        async with rival:
            await Recorder(rival).reached(LockState.ACQUIRING)
            terminate(dsn, key_pair(name))
            await story.heard("lost")
            assert (LockState.LEADER, LockState.RECONNECTING) in story.changes
            assert (LockState.RECONNECTING, LockState.FOLLOWER) in story.changes
            assert await rival.wait_for_leadership(WAIT_S)
            assert not lock.is_leader


# --- Behind a pooler that was allowed


async def test_behind_an_allowed_pooler_a_returning_node_does_not_end_the_backend_of_another(
    dsn: str, pgbouncer: StartPooler
) -> None:
    """The pooler gives A's server session to B, pid and start and all; A comes back and must not end it."""
    through = pgbouncer(dsn, "session", default_pool_size="3")
    name = f"review-{uuid.uuid4()}"
    back = asyncio.Event()
    async with Proxy.to(through) as proxy:
        ways = iter([proxy.dsn_for(through)])

        async def way_of_a() -> str:
            if (first := next(ways, None)) is not None:
                return first
            await back.wait()
            return through

        a = LeaderLock.for_name(way_of_a, name, allow_pooler=True, retry_strategy=QUICK, health_interval_s=0.3)
        b = LeaderLock.for_name(through, name, allow_pooler=True, retry_strategy=QUICK, health_interval_s=0.3)
        story_a, story_b = Recorder(a), Recorder(b)
        async with a:
            await story_a.heard("acquired")
            async with b:
                await story_b.heard("acquire_failed")
                proxy.reset()
                await story_b.heard("acquired")
                back.set()
                await story_a.heard("acquire_failed", 2)
                assert "lost" not in story_b.events
                assert b.is_leader
                assert len(holders(dsn, key_pair(name))) == 1


@pytest.mark.parametrize("round_robin", ["0", "1"])
async def test_in_a_shared_pool_that_was_allowed_no_two_lead_at_once(
    dsn: str, pgbouncer: StartPooler, round_robin: str
) -> None:
    """Refusing is fine and leading alone is fine; leading together is not."""
    through = pgbouncer(dsn, "transaction", default_pool_size="2", server_round_robin=round_robin)
    name = f"review-{uuid.uuid4()}"
    locks = [
        LeaderLock.for_name(through, name, allow_pooler=True, retry_strategy=FixedInterval(0.03), health_interval_s=0.2)
        for _ in range(4)
    ]
    stories = [Recorder(lock) for lock in locks]
    leading: list[int] = []
    for lock in locks:
        lock.on_state_change(lambda _old, _new: leading.append(sum(each.is_leader for each in locks)))
        await lock.start()
    for story in stories:
        await story.heard("error", count(3, 30))
    for lock in locks:
        await lock.shutdown(WAIT_S)
    assert max(leading) <= 1
