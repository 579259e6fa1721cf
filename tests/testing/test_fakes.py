"""What the fakes let happen, on a clock that only the test turns. What they share with real ones: `test_faces.py`."""

import asyncio
import threading
from typing import Any

import pytest

from pgleaderlock import ConfigurationError, LockState, NotLeader
from pgleaderlock._base.clock import BOOT_CLOCK
from pgleaderlock.testing import FakeDatabase, FakeElection, FakeLock
from pgleaderlock.testing import sync as sync_testing

WAIT_S = 30.0


# --- The election


async def test_an_election_follows_another_node_until_it_wins() -> None:
    async with FakeElection("", "billing") as election:
        gate = election.gate("billing")
        leader = election.leader("billing")
        assert leader is not None
        assert (leader.node_id, leader.epoch, gate.shut_because) == ("rival", 1, "never_led")
        await election.win("billing")
        assert gate.require_leader().epoch == 2


async def test_a_role_is_lost_alone_and_the_next_epoch_is_higher() -> None:
    async with FakeElection("", ["billing", "mail"]) as election:
        await election.win()
        before = election.gate("billing").current_epoch
        await election.lose("billing")
        assert election.gate("billing").shut_because == "lost"
        assert election.gate("mail").is_leader
        await election.win("billing")
        after = election.gate("billing").current_epoch
        assert before is not None
        assert after is not None
        assert after > before + 1  # the other node has had a term


async def test_a_late_heartbeat_shuts_the_gate_and_the_term_goes_on() -> None:
    async with FakeElection("", "billing") as election:
        await election.win()
        gate = election.gate("billing")
        token = gate.require_leader()
        election.late()
        with pytest.raises(NotLeader) as refused:
            gate.require_leader()
        assert refused.value.reason == "late_heartbeat"
        await election.recover()
        assert gate.require_leader() == token


@pytest.mark.parametrize("seconds", [7, 3600])
async def test_a_pause_is_seen_by_the_gate_before_anything_else_has_run(seconds: float) -> None:
    async with FakeElection("", "billing") as election:
        await election.win()
        election.pause(seconds)  # longer than G, which is 6 s
        assert not election.gate("billing").is_leader


async def test_after_a_pause_longer_than_its_lease_another_node_leads() -> None:
    async with FakeElection("", "billing") as election:
        await election.win()
        election.pause(60)
        await election.recover()
        assert election.gate("billing").shut_because == "lost"
        await election.advance(1)
        leader = election.leader("billing")
        assert leader is not None
        assert leader.node_id == "rival"


async def test_a_role_is_lost_with_the_database_and_won_again_after_it() -> None:
    async with FakeElection("", "billing") as election:
        await election.win()
        before = election.gate("billing").current_epoch
        await election.database_gone()
        assert election.gate("billing").shut_because == "lost"
        assert "gone" in str(election.last_error)
        await election.advance(60)
        assert election.state("billing") is not LockState.LEADER
        await election.recover()
        await election.win()
        assert before is not None
        assert election.gate("billing").current_epoch == before + 1


async def test_an_hour_passes_while_heartbeats_keep_the_gate_open() -> None:
    async with FakeElection("", "billing") as election:
        await election.win()
        gate = election.gate("billing")
        await election.advance(3600)
        assert gate.is_leader
        assert gate.lapses == 0
        tenure_s = election.tenure_s("billing")
        assert tenure_s is not None
        assert tenure_s >= 3600


async def test_the_work_of_lead_is_cancelled_by_a_loss_and_begins_again() -> None:
    begun: asyncio.Queue[int] = asyncio.Queue()
    ended: asyncio.Queue[int] = asyncio.Queue()

    async def work(token: object) -> None:
        epoch = election.gate("billing").require_leader().epoch
        begun.put_nowait(epoch)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.put_nowait(epoch)

    async with asyncio.timeout(WAIT_S), FakeElection("", "billing") as election:
        leading = asyncio.ensure_future(election.lead("billing", work))
        await election.win()
        first = await begun.get()
        await election.lose()
        assert await ended.get() == first
        await election.win()
        assert await begun.get() > first
        await election.shutdown()
        await leading


async def test_two_elections_of_one_database_have_one_leader_and_a_clean_handover() -> None:
    database = FakeDatabase()
    async with asyncio.timeout(WAIT_S), FakeElection(database, "r") as one, FakeElection(database, "r") as two:
        await one.win()
        assert [election.gate("r").is_leader for election in (one, two)] == [True, False]
        await one.shutdown()
        await two.win()
        assert two.gate("r").current_epoch == 2


async def test_a_crashed_leaders_successor_waits_out_its_lease() -> None:
    database = FakeDatabase()
    async with FakeElection(database, "r", node_id="one") as one:
        await one.win()
        (crashed,) = database.locks.values()
        async with FakeElection(database, "r", node_id="two") as two:
            crashed.end("its process was killed")
            database.hint("released")
            await two.advance(0.1)  # not as long as the other one needs to reconnect
            assert two.gate("r").shut_because == "waiting"
            await two.advance(10)
            assert [election.gate("r").is_leader for election in (one, two)] == [False, True]


async def test_a_shutdown_during_a_stall_ends() -> None:
    election = FakeElection("", "billing")
    await election.start()
    await election.win()
    election.late()
    async with asyncio.timeout(WAIT_S):
        await election.shutdown()
    assert election.state("billing") is LockState.STOPPED


async def test_what_a_fake_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="balance"):
        FakeElection("", "billing", balance=True)
    with pytest.raises(ConfigurationError, match="not running"):
        await FakeElection("", "billing").win()
    with pytest.raises(ConfigurationError, match="ManualClock"):
        FakeElection(FakeDatabase(clock=BOOT_CLOCK), "billing").pause(1)
    async with FakeElection("", "billing") as election:
        with pytest.raises(ConfigurationError, match="not one of this election's"):
            await election.win("mail")


async def test_what_cannot_be_won_is_said_with_its_reason() -> None:
    async with FakeElection("", "billing") as election:
        await election.win()
        election.gate("billing").disable()
        with pytest.raises(AssertionError, match="billing: vetoed"):
            await election.win()


async def test_settings_of_the_connection_have_no_effect() -> None:
    connect: Any = asyncio.sleep
    async with FakeLock(None, 1, 2, connect_fn=connect) as lock:
        await lock.win()
    async with FakeElection("", "billing", heartbeat_thread=True, allow_pooler=True) as election:
        await election.win()


def test_a_fake_is_made_as_the_application_makes_the_real_one() -> None:
    environ = {"PG_DSN": "host=nowhere"}
    election = sync_testing.FakeElection.from_env("billing", environ)
    with election:
        election.win()
        assert election.gate("billing").is_leader


# --- The lock


async def test_a_lock_wins_and_loses() -> None:
    async with FakeLock.for_name("", "billing") as lock:
        assert not lock.is_leader
        await lock.win()
        assert lock.is_leader
        await lock.lose()
        assert not lock.is_leader
        await lock.advance(60)
        assert not lock.is_leader
        await lock.win()
        assert lock.is_leader


async def test_a_late_lock_must_not_act_and_leads_on_afterwards() -> None:
    async with FakeLock.for_name("", "billing") as lock:
        await lock.win()
        lock.late()
        assert (lock.is_leader, lock.state) == (False, LockState.LEADER)
        await lock.recover()
        assert lock.is_leader


async def test_a_lock_that_pauses_longer_than_its_lease_is_lost_to_another() -> None:
    async with FakeLock.for_name("", "billing") as lock:
        await lock.win()
        lock.pause(60)
        assert not lock.is_leader
        await lock.recover()
        await lock.advance(60)
        assert not lock.is_leader


async def test_a_lock_is_lost_with_the_database() -> None:
    async with FakeLock.for_name("", "billing") as lock:
        await lock.win()
        await lock.database_gone()
        assert (lock.is_leader, str(lock.last_error)) == (False, "the database is gone")
        await lock.recover()
        await lock.win()


async def test_what_is_not_urgent_is_done_though_a_beat_was_sent_at_the_same_moment() -> None:
    async with FakeElection("", "billing") as election:
        await election.win()
        await election.advance(600)
        election.late()
        assert election._run.engine is not None
        election._run.engine._upkeep.due_at = election.database.clock.now()
        await election.recover()
        await election.lose()


# --- For threads


def test_the_fakes_for_threads_do_the_same() -> None:
    with sync_testing.FakeElection("", "billing") as election:
        gate = election.gate("billing")
        election.win()
        election.advance(600)
        assert gate.is_leader
        election.late()
        assert gate.shut_because == "late_heartbeat"
        election.recover()
        assert gate.is_leader
        election.lose()
        assert gate.shut_because == "lost"
        election.win()
        election.database_gone()
        assert gate.shut_because == "lost"
        election.recover()
    with sync_testing.FakeLock.for_name("", "billing") as lock:
        lock.win()
        lock.late()
        assert not lock.is_leader
        lock.recover()
        assert lock.is_leader
        lock.pause(60)
        lock.recover()
        assert not lock.is_leader
        lock.win()
        lock.lose()
        lock.win()
        lock.database_gone()
        lock.recover()
        lock.advance(1)


def test_a_work_in_a_thread_is_stopped_by_a_loss() -> None:
    begun, stopped = threading.Semaphore(0), threading.Semaphore(0)

    def work(token: object, stop: threading.Event) -> None:
        begun.release()
        assert stop.wait(WAIT_S)
        stopped.release()

    with sync_testing.FakeElection("", "billing") as election:
        leading = threading.Thread(target=election.lead, args=("billing", work))
        leading.start()
        election.win()
        assert begun.acquire(timeout=WAIT_S)
        election.lose()
        assert stopped.acquire(timeout=WAIT_S)
        election.shutdown()
        leading.join(WAIT_S)
    assert not leading.is_alive()
