"""Nobody acts twice: nodes that are real processes, on a real server, under every fault there is a way to cause.

Each node acts through its gates and writes each act to a file outside the database, with the boot-time clock read
before and after the gate was asked. The judge (`SendLog.violations`) looks for an act that was certainly after one of
a newer epoch. A run that saw too little fails as well, and a run of a broken protocol must be caught.
"""

import asyncio
import gc
import signal
import uuid
from pathlib import Path
from typing import Any

import psycopg
import pytest

from conftest import StartServer
from pgleaderlock import LeaderElection
from pgleaderlock._base.clock import BOOT_CLOCK
from pgleaderlock._election.ledger import Ledger
from pgleaderlock.errors import ConnectionError
from pgleaderlock.migrate import migrate
from support.counts import count
from support.election_node import WAIT_S, ElectionNode, SendLog, election_node
from support.election_storm import KINDS, MIDDLE, QUICK, SLOW, Storm, end_sessions_of

PATIENT: dict[str, Any] = {"heartbeat_interval_s": 0.5, "late_threshold_s": 1.8, "session_lease_s": 2.2}


def fresh_role() -> str:
    return f"role-{uuid.uuid4()}"


@pytest.fixture
async def ledger(dsn: str) -> str:
    """The DSN of a server that has the ledger."""
    await migrate(dsn)
    return dsn


@pytest.fixture
def log(tmp_path: Path) -> SendLog:
    return SendLog(tmp_path / "sends")


# --- What was asked of the gate in the first place, one fault at a time


async def test_of_two_nodes_one_sends(ledger: str, log: SendLog) -> None:
    role = fresh_role()
    async with election_node(ledger, "a", role, log.path, **MIDDLE) as a:
        first = await log.until(lambda send: True)
        async with election_node(ledger, "b", role, log.path, **QUICK) as b:
            await b.hears("started")
            # Several times the longest T: whoever could act by mistake has had the time for it.
            await log.until(lambda send: send.before_ns > first.before_ns + 3 * 10**9)
            asked = await b.asked("ask")
            assert (asked["epoch"], asked["reason"], asked["state"]) == (None, "never_led", "follower")
            assert (await a.asked("ask"))["epoch"] == first.epoch
    assert {(send.node, send.epoch) for send in log.read()} == {("a", first.epoch)}
    assert len(log.sends) > 100


async def test_when_the_leader_is_killed_another_sends_under_a_newer_epoch(ledger: str, log: SendLog) -> None:
    role = fresh_role()
    async with election_node(ledger, "a", role, log.path, **MIDDLE) as a:
        first = await log.until(lambda send: True)
        async with election_node(ledger, "b", role, log.path, **QUICK) as b:
            await b.hears("started")
            a.signal(signal.SIGKILL)
            second = await log.until(lambda send: send.node == "b")
    assert second.epoch > first.epoch
    assert log.violations() == []


async def test_after_a_restart_of_the_database_one_sends_under_a_newer_epoch(
    throwaway_postgres: StartServer, log: SendLog
) -> None:
    server = throwaway_postgres()
    await migrate(server.dsn)
    role = fresh_role()
    async with (
        election_node(server.dsn, "a", role, log.path, **MIDDLE),
        election_node(server.dsn, "b", role, log.path, **QUICK),
    ):
        first = await log.until(lambda send: True)
        for mode in ("fast", "immediate"):
            await asyncio.to_thread(server.restart, mode)
            first = await log.until(lambda send, before=first: send.epoch > before.epoch)  # type: ignore[misc]
    assert log.violations() == []


async def test_a_frozen_leader_is_refused_by_its_gate_before_its_loop_has_run(ledger: str, log: SendLog) -> None:
    role = fresh_role()
    async with election_node(ledger, "a", role, log.path, **MIDDLE) as a:
        first = await log.until(lambda send: True)
        async with election_node(ledger, "b", role, log.path, **QUICK) as b:
            await b.hears("started")
            await log.until(lambda send: send.before_ns > first.before_ns + 10**9)  # it lives by its heartbeats now
            since = len(a.said)
            a.tell("freeze")
            await log.until(lambda send: send.node == "b")
            a.signal(signal.SIGCONT)
            thawed = await a.hears("freeze", since=since)
            assert (thawed["epoch"], thawed["reason"]) == (None, "late_heartbeat")
            await log.until(lambda send: send.node == "b")
    assert log.violations() == []


async def test_a_leader_with_a_blocked_loop_is_shut_out_by_the_clock(ledger: str, log: SendLog) -> None:
    """Its thread goes on asking, and nothing but the clock can tell it that it is no longer to act."""
    role = fresh_role()
    async with election_node(ledger, "a", role, log.path, **MIDDLE) as a:
        first = await log.until(lambda send: True)
        async with election_node(ledger, "b", role, log.path, **QUICK) as b:
            await b.hears("started")
            await log.until(lambda send: send.before_ns > first.before_ns + 10**9)  # it lives by its heartbeats now
            since = len(a.said)
            a.tell("block", 2)
            await log.until(lambda send: send.node == "b")
            blocked = await a.hears("block", since=since)
            assert (blocked["epoch"], blocked["reason"]) == (None, "late_heartbeat")
            await log.until(lambda send: send.node == "b")
    assert log.violations() == []


async def test_with_a_heartbeat_thread_a_blocked_loop_does_not_lose_the_term(ledger: str, log: SendLog) -> None:
    role = fresh_role()
    async with election_node(ledger, "a", role, log.path, **MIDDLE, heartbeat_thread=True) as a:
        first = await log.until(lambda send: True)
        async with election_node(ledger, "b", role, log.path, **QUICK) as b:
            await b.hears("started")
            blocked = await a.asked("block", 2.5)
            assert (blocked["epoch"], blocked["reason"]) == (first.epoch, None)
    assert {(send.node, send.epoch) for send in log.read()} == {("a", first.epoch)}


async def test_a_clean_handover_lets_the_next_one_send_and_nobody_act_twice(ledger: str, log: SendLog) -> None:
    role = fresh_role()
    async with election_node(ledger, "a", role, log.path, **MIDDLE) as a:
        first = await log.until(lambda send: True)
        async with election_node(ledger, "b", role, log.path, **QUICK) as b:
            await b.hears("started")
            await a.asked("step_down")
            second = await log.until(lambda send: send.node == "b")
            await b.asked("drain")
            await b.end(kill=False)
            third = await log.until(lambda send: send.node == "a")
    assert first.epoch < second.epoch < third.epoch
    assert log.violations() == []


# --- When the clock is read: before what a leader says is sent, and after what a standby hears has come


def slowly(monkeypatch: pytest.MonkeyPatch, name: str, delay_s: float) -> list[tuple[float, float]]:
    """Let each answer of the ledger to `name` come late; gives when it was asked and when it had answered."""
    asked: list[tuple[float, float]] = []
    whole = getattr(Ledger, name)

    async def late(self: Ledger, *args: Any, **options: Any) -> Any:
        before = BOOT_CLOCK.now()
        answer = await whole(self, *args, **options)
        after = BOOT_CLOCK.now()
        await asyncio.sleep(delay_s)
        asked.append((before, after))
        return answer

    monkeypatch.setattr(Ledger, name, late)
    return asked


async def test_a_leader_counts_from_before_it_sent_however_late_the_answer_comes(
    ledger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    role, gate_s = fresh_role(), MIDDLE["late_threshold_s"]
    bumps, beats = slowly(monkeypatch, "bump", 0.2), slowly(monkeypatch, "beat", 0.2)
    async with LeaderElection(ledger, role, **MIDDLE) as election:
        gate = election.gate(role)
        assert await gate.wait_open(WAIT_S)
        first = gate.deadline
        assert first <= (beats or bumps)[-1][0] + gate_s
        async with asyncio.timeout(WAIT_S):
            while gate.deadline == first:
                await asyncio.sleep(0.005)
        assert gate.deadline <= beats[-1][0] + gate_s


async def test_a_standby_counts_from_after_the_answer_however_early_it_asked(
    ledger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    role = fresh_role()
    async with LeaderElection(ledger, role, **MIDDLE) as leader:
        assert await leader.gate(role).wait_open(WAIT_S)
        looks = slowly(monkeypatch, "try_and_look", 0.2)
        async with LeaderElection(ledger, role, **QUICK) as standby:
            async with asyncio.timeout(WAIT_S):
                while (sight := standby._roster.roles[role].sight) is None:
                    await asyncio.sleep(0.005)
            assert sight.first_seen >= looks[0][1] + 0.19, "not before the answer was at hand"


async def test_a_beat_that_shows_that_the_epoch_is_anothers_renews_nothing(
    ledger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever took it counts from the beat before. The leader is asked at the last moment before it knows better."""
    role, before, looked = fresh_role(), list[float](), list[tuple[float, float]]()
    real_beat, real_owned = Ledger.beat, Ledger.owned

    async def beat(self: Ledger, *args: Any) -> Any:
        before.append(gate.deadline)
        return await real_beat(self, *args)

    async def owned(self: Ledger) -> dict[str, int]:
        looked.append((before[-1], gate.deadline))
        return await real_owned(self)

    async with LeaderElection(ledger, role, **PATIENT) as election:
        gate = election.gate(role)
        assert await gate.wait_open(WAIT_S)
        token = gate.require_leader()
        monkeypatch.setattr(Ledger, "beat", beat)
        monkeypatch.setattr(Ledger, "owned", owned)
        async with await psycopg.AsyncConnection.connect(ledger, autocommit=True) as conn:
            await conn.execute("SELECT pgleaderlock.advance_epoch(%s, 'pgleaderlock', 'nobody')", (role,))
        async with asyncio.timeout(WAIT_S):
            await gate.wait_over(token)
    ((deadline, when_looked),) = looked
    assert when_looked == deadline


async def test_a_drain_that_is_cancelled_before_its_first_step_leaves_nothing_behind(ledger: str) -> None:
    """The session is lost in the tick that began the release: seen in one of twenty shutdowns after a crash."""
    role = fresh_role()
    async with LeaderElection(ledger, role) as election:
        assert await election.gate(role).wait_open(WAIT_S)
        engine = election._run.engine
        assert engine is not None
        election._roster.roles[role].release_asked = True
        await engine._releases.begin()
        await engine._lose(ConnectionError("the session has ended"))
        gc.collect()  # what nobody awaits warns now, and a warning is an error


# --- What a leader leaves behind that cannot hear that it has lost


async def deafen(dsn: str, node: ElectionNode, duration_s: float) -> None:
    """Block its loop and end its session: its gate stays open until its deadline, and it does not know better."""
    node.tell("block", duration_s)
    await end_sessions_of(dsn, node.name)


@pytest.mark.parametrize("comes_back", ["started again", "on a new session"])
async def test_a_node_that_follows_itself_still_waits_for_whom_it_was_waiting(
    ledger: str, log: SendLog, comes_back: str
) -> None:
    role = fresh_role()
    async with election_node(ledger, "a", role, log.path, **PATIENT) as a:
        await log.until(lambda send: True)
        async with election_node(ledger, "b", role, log.path, **QUICK) as b:
            await b.hears("started")
            await deafen(ledger, a, PATIENT["session_lease_s"])
            await b.hears("acquired")
            assert (await b.asked("ask"))["reason"] == "waiting"
            since = len(b.said)
            if comes_back == "started again":
                await b.asked("again")
            else:
                await end_sessions_of(ledger, "b")
            await b.hears("acquired", since=since)
            await log.until(lambda send: send.node == "b")
            await a.hears("block")
    assert log.violations() == []


@pytest.mark.long
@pytest.mark.parametrize("handover", ["step_down", "kill"])
@pytest.mark.parametrize("takeover", ["safe", "instant"])
async def test_whoever_led_in_between_the_next_one_waits_for_the_first(
    ledger: str, log: SendLog, takeover: str, handover: str
) -> None:
    """The one between has not waited the first out, so neither its release nor its shorter T ends the wait for it.

    What an instant one does itself is its own affair: it is left out of the judgement.
    """
    role = fresh_role()
    async with (
        election_node(ledger, "first", role, log.path, **PATIENT) as first,
        election_node(ledger, "between", role, log.path, **QUICK, takeover=takeover) as between,
        election_node(ledger, "next", role, log.path, **QUICK, held=True) as last,
    ):
        await last.hears("held")
        await first.hears("started")
        await between.hears("started")
        while (await log.until(lambda send: True)).node != "first":
            await between.asked("step_down")
        since = len(between.said)
        await deafen(ledger, first, PATIENT["session_lease_s"])
        await between.hears("acquired", since=since)
        last.tell("go")
        await last.hears("started")
        if handover == "kill":
            between.signal(signal.SIGKILL)
        else:
            await between.asked("step_down")
        await log.until(lambda send: send.node == "next")
        await first.hears("block")
    assert log.violations(without="between" if takeover == "instant" else "") == []


# --- All of them at once


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_nobody_acts_after_a_newer_epoch_whatever_goes_wrong(
    throwaway_postgres: StartServer, log: SendLog
) -> None:
    total = count(len(KINDS), 200)
    settings = {"quick": QUICK, "middle": MIDDLE, "slow": {**SLOW, "heartbeat_thread": True}}
    storm = Storm(throwaway_postgres(), log, settings)
    async with storm.running():
        await storm.faults(KINDS, total)
        await storm.calm()
        for name in set(settings) - {send.node for send in log.read()}:
            await storm.lets_lead(name)
        await storm.judge()
        # Against an empty proof.
        sends_a_second, changes = storm.figures()
        assert sends_a_second > 50, storm.about
        assert changes >= sum(storm.fired.values()) / 3, storm.about
        assert set(storm.fired) == set(KINDS), storm.about
        assert {send.node for send in log.read()} == set(settings), storm.about


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_nobody_acts_after_a_newer_epoch_with_hot_standbys(throwaway_postgres: StartServer, log: SendLog) -> None:
    """Those who wait at the server are granted the lock before they have looked at anything."""
    kinds = KINDS if (total := count(6, 200)) > len(KINDS) else ("kill", "deaf", "numb", "cut", "restart", "step_down")
    hot = {"standby_wait_s": 0.4}
    settings = {"quick": {**QUICK, **hot}, "middle": {**MIDDLE, **hot}, "slow": SLOW}
    storm = Storm(throwaway_postgres(), log, settings, roles=["mail"])
    async with storm.running():
        await storm.faults(kinds, total)
        await storm.calm()
        # A few faults on one role leave little time to act: so let it be acted for in peace, too.
        last = log.read()[-1]
        await log.until(lambda send: send.before_ns > last.before_ns + 2 * 10**9)
        await storm.judge()
        sends_a_second, changes = storm.figures()
        assert sends_a_second > 50, storm.about
        assert changes >= sum(storm.fired.values()) / 3, storm.about


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_the_same_storm_catches_leaders_that_do_not_wait_for_their_predecessor(
    throwaway_postgres: StartServer, log: SendLog
) -> None:
    broken = {"takeover": "instant"}
    settings = {"quick": {**QUICK, **broken}, "middle": {**MIDDLE, **broken}, "slow": {**SLOW, **broken}}
    storm = Storm(throwaway_postgres(), log, settings)
    async with storm.running():
        for _ in range(5):
            await storm.faults(("deaf", "restart", "deaf"), 3)
            await storm.calm()
            if log.violations():
                return
        pytest.fail(f"nobody was seen to act twice: the judge is blind ({storm.about})")
