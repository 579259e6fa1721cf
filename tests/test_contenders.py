"""Several nodes, one lock, a real server: who leads, who follows, and how it passes from one to the next."""

import contextlib
import uuid

import pytest

from pgleaderlock import FixedInterval, LeaderLock, LockState, key_pair
from support.counts import count
from support.recorder import WAIT_S, Recorder, identified, somebody_leads
from support.server_side import holders, terminate

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
