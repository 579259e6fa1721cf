"""`LeaderElection` on a real server: who leads, who may act, who hears of it, and what is left in the ledger.

Every test runs twice: as a superuser and as a plain role that has what `grants.sql` gives it and nothing else.
"""

import asyncio
import contextlib
import gc
import os
import re
import socket
import sys
import threading
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from conftest import StartServer
from pgleaderlock import (
    FixedInterval,
    LeaderElection,
    LeaderLock,
    LeaderToken,
    LockError,
    LockNotAcquired,
    LockState,
    NotLeader,
    PgLeaderLockError,
    SchemaError,
    ShutdownError,
    acquire_leadership,
    key_pair,
)
from pgleaderlock.errors import ConnectionError
from pgleaderlock.ledger import Bump, Ledger
from pgleaderlock.migrate import LEDGER_VERSION, migrate
from support.counts import count
from support.elections import (
    HASTY,
    PATIENT,
    STEADY,
    WAIT_S,
    SilentLeader,
    Story,
    admin,
    bounded,
    fresh_database,
    ledger_dsns,
    one,
    opens,
    reading,
    somebody_acts,
    until,
)
from support.ledger_node import ledger_node
from support.server_side import holders, terminate

# One that has stepped down lets the others go first for so long that, on a busy machine too, it is they who win.
POLITE = {"acquire_delay_s": (4.0, 5.0)}
KEY_COLUMNS = "l.namespace = 'pgleaderlock' AND l.role = %s"


@pytest.fixture
def superuser(dsn: str) -> str:
    """The database with the ledger, for looks and for an operator's hand."""
    return ledger_dsns(dsn)["superuser"]


# The role with fewer rights is the harder case; `make proof` runs both.
@pytest.fixture(params=["plain", "superuser"][: count(1, 2)])
def node_dsn(request: pytest.FixtureRequest, dsn: str) -> str:
    """What the nodes connect with."""
    return ledger_dsns(dsn)[request.param]


@pytest.fixture
def role() -> str:
    return f"role-{uuid.uuid4().hex[:12]}"


@contextlib.asynccontextmanager
async def running(*elections: LeaderElection) -> AsyncIterator[None]:
    async with contextlib.AsyncExitStack() as stack:
        for election in elections:
            await stack.enter_async_context(election)
        yield


def leader_row(superuser: str, role: str) -> dict[str, Any]:
    return one(superuser, f"SELECT * FROM pgleaderlock.leaders l WHERE {KEY_COLUMNS}", role)


def terms(superuser: str, role: str) -> list[dict[str, Any]]:
    with admin(superuser) as conn:
        return conn.execute("SELECT * FROM pgleaderlock.terms WHERE role = %s ORDER BY epoch", (role,)).fetchall()


def beat(superuser: str, role: str) -> int:
    found = one(
        superuser,
        f"SELECT beat FROM pgleaderlock.leaders l JOIN pgleaderlock.sessions USING (session_id) WHERE {KEY_COLUMNS}",
        role,
    )
    return int(found["beat"])


async def beats_on(superuser: str, role: str, beats: int = 2) -> None:
    """Return once the leader has been heard again."""
    before = beat(superuser, role)
    await until(lambda: beat(superuser, role) >= before + beats, "the leader's heartbeat")


# --- One leads


async def test_of_two_nodes_one_acts_and_the_other_sees_who(node_dsn: str, role: str) -> None:
    one_node, two = (LeaderElection(node_dsn, role, node_id=name, **STEADY) for name in ("one", "two"))
    async with running(one_node, two):
        leader = await somebody_acts([one_node, two], role)
        follower = two if leader is one_node else one_node
        token = leader.gate(role).require_leader()
        assert (token.role, token.epoch, token.namespace) == (role, 1, "pgleaderlock")
        assert len(holders(node_dsn, key_pair(role))) == 1
        await until(lambda: follower.leader(role) is not None)
        seen = follower.leader(role)
        assert seen is not None
        assert (seen.epoch, seen.holder_identity, seen.node_id) == (1, token.holder_identity, leader.node_id)
        assert not seen.stale
        assert (leader.state(role), follower.state(role)) == (LockState.LEADER, LockState.FOLLOWER)
        with pytest.raises(NotLeader) as refused:
            follower.gate(role).require_leader()
        assert refused.value.reason == "never_led"


async def test_the_holder_identity_names_node_host_process_and_a_number_used_once(node_dsn: str, role: str) -> None:
    async with LeaderElection(node_dsn, role, node_id="web-1", **STEADY) as election:
        await opens(election, role)
        identity = election.gate(role).holder_identity
    assert identity is not None
    assert re.fullmatch(rf"web-1-{re.escape(socket.gethostname())}-{os.getpid()}-[0-9a-f-]{{36}}", identity)
    assert LeaderElection(node_dsn, role).node_id == socket.gethostname()


async def test_many_roles_need_one_session_and_one_listener(node_dsn: str, superuser: str) -> None:
    roles = [f"many-{uuid.uuid4().hex[:8]}-{number}" for number in range(5)]
    node = f"node-{uuid.uuid4().hex[:6]}"
    async with LeaderElection(node_dsn, roles, node_id=node, **STEADY) as election:
        for role in roles:
            await opens(election, role)
        count = "SELECT count(*) AS n FROM pg_stat_activity WHERE application_name LIKE %s"
        await until(lambda: one(superuser, count, f"%{node}%")["n"] == 2)
        sessions = {leader_row(superuser, role)["session_id"] for role in roles}
        assert len(sessions) == 1
        await election.step_down(roles[2])
        assert [election.state(role) for role in roles].count(LockState.LEADER) >= 4
        assert all(election.gate(role).is_leader for role in roles if role != roles[2])


async def test_a_node_that_is_no_candidate_never_leads_and_sees_who_does(node_dsn: str, role: str) -> None:
    watcher = LeaderElection(node_dsn, role, candidate=False, **STEADY)
    async with watcher:
        await asyncio.sleep(0)
        async with LeaderElection(node_dsn, role, node_id="leads", **STEADY) as leader:
            await opens(leader, role)
            await until(lambda: watcher.leader(role) is not None)
        await until(lambda: watcher.leader(role) is None, "the leader has gone")
        await until(lambda: watcher._roles[role].look is not None)
        assert watcher.state(role) is LockState.FOLLOWER
        assert holders(node_dsn, key_pair(role)) == []


async def test_an_election_a_lock_and_a_guard_of_one_name_exclude_each_other(node_dsn: str, role: str) -> None:
    async with LeaderElection(node_dsn, role, **STEADY) as election:
        await opens(election, role)
        async with await psycopg.AsyncConnection.connect(node_dsn, autocommit=True) as conn:
            with pytest.raises(LockNotAcquired):
                await acquire_leadership(conn, role)
        lock = LeaderLock.for_name(node_dsn, role, retry_strategy=FixedInterval(0.01))
        refused = asyncio.Event()
        lock.on_acquire_failed(refused.set)
        async with lock:
            await bounded(refused.wait())
            await election.step_down(role)
            await until(lambda: lock.is_leader or election.gate(role).is_leader)
            assert len(holders(node_dsn, key_pair(role))) == 1


# --- Handing over


async def test_after_a_clean_release_the_other_opens_at_once(node_dsn: str, superuser: str, role: str) -> None:
    """T is ten minutes here: one who had to wait for it would not open within this test."""
    leader = LeaderElection(node_dsn, role, node_id="leads", **{**PATIENT, **POLITE})
    async with leader:
        await opens(leader, role)
        async with LeaderElection(node_dsn, role, node_id="follows", **PATIENT) as follower:
            await bounded(leader.step_down(role))
            with pytest.raises(NotLeader) as refused:
                leader.gate(role).require_leader()
            assert refused.value.reason == "released"
            await opens(follower, role)
            assert follower.gate(role).require_leader().epoch == 2
    assert [term["reason"] for term in terms(superuser, role)] == ["released", "released"]


async def test_after_a_loss_the_successor_leads_but_waits(node_dsn: str, role: str) -> None:
    """The lock was lost, so the predecessor's gate may still be open for all that the ledger knows."""
    lost, next_one = (LeaderElection(node_dsn, role, node_id=name, **PATIENT) for name in ("lost", "next"))
    async with lost:
        await opens(lost, role)
        lost._roles[role].not_before = float("inf")  # it does not compete again
        async with next_one:
            await until(lambda: next_one.leader(role) is not None)
            terminate(node_dsn, key_pair(role))
            await until(lambda: next_one.state(role) is LockState.LEADER)
            with pytest.raises(NotLeader) as refused:
                next_one.gate(role).require_leader()
            assert refused.value.reason == "waiting"
            assert next_one.gate(role).current_epoch == 2


async def test_a_release_while_still_waiting_is_not_clean(node_dsn: str, superuser: str, role: str) -> None:
    lost, waits = (LeaderElection(node_dsn, role, node_id=name, **PATIENT) for name in ("lost", "waits"))
    async with lost:
        await opens(lost, role)
        lost._roles[role].not_before = float("inf")
        async with waits:
            terminate(node_dsn, key_pair(role))
            await until(lambda: waits.state(role) is LockState.LEADER)
        row = leader_row(superuser, role)
        assert (row["epoch"], row["ended"], row["clean"]) == (2, True, False)
        assert row["wait_t"] == 600.0


async def test_after_a_loss_the_successor_opens_when_the_predecessors_time_is_over(node_dsn: str, role: str) -> None:
    lost, next_one = (LeaderElection(node_dsn, role, node_id=name, **HASTY) for name in ("lost", "next"))
    async with running(lost, next_one):
        leader = await somebody_acts([lost, next_one], role)
        follower = next_one if leader is lost else lost
        leader._roles[role].not_before = float("inf")
        terminate(node_dsn, key_pair(role))
        await opens(follower, role)
        assert follower.gate(role).current_epoch == 2
        assert not leader.gate(role).is_leader


async def test_a_takeover_that_is_instant_does_not_wait(node_dsn: str, role: str) -> None:
    lost = LeaderElection(node_dsn, role, **PATIENT)
    next_one = LeaderElection(node_dsn, role, takeover="instant", **PATIENT)
    async with lost:
        await opens(lost, role)
        lost._roles[role].not_before = float("inf")
        async with next_one:
            terminate(node_dsn, key_pair(role))
            await opens(next_one, role)


async def test_a_node_whose_own_settled_session_was_ended_opens_again_at_once(node_dsn: str, role: str) -> None:
    election = LeaderElection(node_dsn, role, **PATIENT)
    story = Story(election)
    async with election:
        await opens(election, role)
        terminate(node_dsn, key_pair(role))
        await story.heard("on_lost", role)
        await opens(election, role)
        assert election.gate(role).current_epoch == 2


async def test_a_hot_standby_waits_at_the_server_and_takes_over(node_dsn: str, role: str) -> None:
    """Its own next try is ten minutes away: only the wait at the server can have won."""
    leader = LeaderElection(node_dsn, role, **{**PATIENT, **POLITE})
    waits = {**PATIENT, "acquire_delay_s": (500.0, 550.0), "standby_wait_s": 5.0, "listen_channel": None}
    waiting = "SELECT count(*) AS n FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND objid = %s"
    async with leader:
        await opens(leader, role)
        async with LeaderElection(node_dsn, role, **waits) as standby:
            await until(lambda: one(node_dsn, waiting, key_pair(role)[1] & 0xFFFFFFFF)["n"] == 1)
            await bounded(leader.step_down(role))
            await opens(standby, role)


async def test_the_gate_shuts_at_its_deadline_and_opens_again_in_the_same_term(
    node_dsn: str, superuser: str, role: str
) -> None:
    """A heartbeat that hangs at the server (its row is locked): the clock shuts the gate, the answer opens it again."""
    async with LeaderElection(node_dsn, role, **{**HASTY, "late_threshold_s": 0.3}) as election:
        await opens(election, role)
        gate = election.gate(role)
        with admin(superuser) as conn:
            conn.execute("BEGIN")
            conn.execute(
                "SELECT FROM pgleaderlock.sessions WHERE session_id = "
                f"(SELECT session_id FROM pgleaderlock.leaders l WHERE {KEY_COLUMNS}) FOR UPDATE",
                (role,),
            )
            await until(lambda: not gate.is_leader)
            with pytest.raises(NotLeader) as refused:
                gate.require_leader()
            conn.execute("ROLLBACK")
        assert refused.value.reason == "late_heartbeat"
        await opens(election, role)
        assert gate.current_epoch == 1


@contextlib.asynccontextmanager
async def a_predecessor_that_still_acts(dsn: str, role: str) -> AsyncIterator[None]:
    """Its gate was open for ten minutes when its session was ended, and it does not compete again."""
    async with LeaderElection(dsn, role, node_id="frozen", **PATIENT) as frozen:
        await opens(frozen, role)
        frozen._roles[role].not_before = float("inf")
        yield


async def test_a_node_that_is_restarted_while_it_waits_still_waits(node_dsn: str, superuser: str, role: str) -> None:
    waits = LeaderElection(node_dsn, role, node_id="waits", **PATIENT)
    async with a_predecessor_that_still_acts(node_dsn, role):
        async with waits:
            terminate(node_dsn, key_pair(role))
            await until(lambda: waits.state(role) is LockState.LEADER)
            assert not waits.gate(role).is_leader
        async with waits:
            await until(lambda: waits.state(role) is LockState.LEADER)
            assert not waits.gate(role).is_leader, "it opened at once, while the frozen one may still act"


async def test_an_instant_takeover_does_not_make_the_next_safe_one_forget_the_first(
    node_dsn: str, superuser: str, role: str
) -> None:
    instant = LeaderElection(node_dsn, role, node_id="instant", takeover="instant", **PATIENT)
    safe = LeaderElection(node_dsn, role, node_id="safe", **PATIENT)
    async with a_predecessor_that_still_acts(node_dsn, role):
        async with instant:
            terminate(node_dsn, key_pair(role))
            await opens(instant, role)
        async with safe:
            await until(lambda: safe.state(role) is LockState.LEADER)
            assert not safe.gate(role).is_leader, "it opened at once, while the frozen one may still act"


def lose_the_next_bump_of(node_id: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Committed, and never heard of. What is returned fills with the session in which it happened."""
    real = Ledger.bump
    lost: list[int] = []

    async def bump(self: Ledger, *args: Any, **kwargs: Any) -> list[Bump]:
        answer = await real(self, *args, **kwargs)
        if not lost and self._identity.node_id == node_id and any(bump.outcome == "won" for bump in answer):
            lost.append(self.session_id)
            raise ConnectionError("the answer was lost on its way")
        return answer

    monkeypatch.setattr(Ledger, "bump", bump)
    return lost


async def test_a_node_that_never_heard_of_its_own_bump_still_waits(
    node_dsn: str, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bump is committed, its answer lost: the next session of this process finds itself as the predecessor."""
    waits = LeaderElection(node_dsn, role, node_id="waits", **PATIENT)
    async with a_predecessor_that_still_acts(node_dsn, role):
        lost = lose_the_next_bump_of("waits", monkeypatch)
        async with waits:
            terminate(node_dsn, key_pair(role))
            await until(lambda: waits.state(role) is LockState.LEADER)
            assert lost
            assert not waits.gate(role).is_leader, "it opened at once, while the frozen one may still act"


async def test_a_node_that_led_before_on_the_session_of_the_lost_answer_still_waits(
    node_dsn: str, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last term that it has heard of was on that very session, but somebody else has led since."""
    first = LeaderElection(node_dsn, role, node_id="first", **PATIENT)
    with ledger_node(node_dsn, "second") as second:
        async with first:
            await opens(first, role)
            session_id = first._engine._board.ledger.session_id  # type: ignore[union-attr]
            queued = asyncio.ensure_future(asyncio.to_thread(second.wait_for_lock, role))
            await until(lambda: waits_for_a_lock(node_dsn, second.conn.info.backend_pid), "the second one to queue up")
            await bounded(first.step_down(role))
            await bounded(queued)
            assert second.bump(role)["prev_clean"]  # it may act from now on, and for minutes
            lost = lose_the_next_bump_of("first", monkeypatch)
            second.conn.close()
            await until(lambda: first.state(role) is LockState.LEADER)
            assert lost == [session_id]
            assert not first.gate(role).is_leader, "it opened at once, while the second one may still act"


def waits_for_a_lock(dsn: str, pid: int) -> bool:
    query = "SELECT EXISTS (SELECT FROM pg_locks WHERE pid = %s AND locktype = 'advisory' AND NOT granted) AS waits"
    return bool(one(dsn, query, pid)["waits"])


# --- The stream of changes


async def test_changes_tell_both_nodes_in_order_who_leads(node_dsn: str, role: str) -> None:
    one_node = LeaderElection(node_dsn, role, node_id="one", **{**PATIENT, "acquire_delay_s": (0.2, 5.0)})
    two = LeaderElection(node_dsn, role, node_id="two", **PATIENT)
    async with reading(one_node) as first, reading(two) as second:
        async with one_node:
            await opens(one_node, role)
            async with two:
                await second.until(lambda change: change.epoch == 1)
                await bounded(one_node.step_down(role))
                await second.until(lambda change: change.is_leader)
                await first.until(lambda change: change.epoch == 2)
            await second.ended()
        await first.ended()
    mine = [(change.is_leader, change.epoch) for change in first.seen if change.epoch is not None]
    assert mine[0] == (True, 1)
    assert (False, 2) in mine
    assert [epoch for _, epoch in mine] == sorted(epoch for _, epoch in mine)
    theirs = [(change.is_leader, change.epoch) for change in second.seen if change.epoch is not None]
    assert theirs[0] == (False, 1)
    assert (True, 2) in theirs
    assert {change.role for change in first.seen + second.seen} == {role}
    assert not first.seen[-1].is_leader
    assert not second.seen[-1].is_leader
    holder = next(change.holder for change in second.seen if change.epoch == 1)
    assert holder is not None
    assert holder.startswith("one-")


async def test_changes_of_a_stopped_election_end(node_dsn: str, role: str) -> None:
    election = LeaderElection(node_dsn, role, **STEADY)
    async with election:
        await opens(election, role)
    async with asyncio.timeout(2):
        async for _ in election.changes():
            pass


# --- Leading a work


async def test_lead_runs_the_work_with_the_token_and_returns_what_it_returns(node_dsn: str, role: str) -> None:
    async def work(token: LeaderToken) -> int:
        return token.epoch * 100

    async with LeaderElection(node_dsn, role, **STEADY) as election:
        assert await bounded(election.lead(role, work)) == 100
        assert election.gate(role).is_leader, "leadership is kept"


async def test_lead_is_cancelled_by_a_loss_and_started_again_in_the_next_term(node_dsn: str, role: str) -> None:
    began: list[int] = []
    cancelled: list[int] = []
    again = asyncio.Event()

    async def work(token: LeaderToken) -> str:
        began.append(token.epoch)
        if len(began) == 2:
            again.set()
            return "done"
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(token.epoch)
            raise
        return "never"

    async with LeaderElection(node_dsn, role, **STEADY) as election:
        leading = asyncio.ensure_future(election.lead(role, work))
        await until(lambda: began)
        terminate(node_dsn, key_pair(role))
        assert await bounded(leading) == "done"
    assert (began, cancelled) == ([1, 2], [1])


async def test_a_step_down_waits_for_the_end_of_the_work(node_dsn: str, role: str) -> None:
    """Whatever the work does with its cancellation: the lock is not given back while it runs."""
    began, told, may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work(token: LeaderToken) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            told.set()
            await may_end.wait()

    async with LeaderElection(node_dsn, role, **STEADY) as election:
        leading = asyncio.ensure_future(election.lead(role, work))
        await bounded(began.wait())
        stepping = asyncio.ensure_future(election.step_down(role))
        await bounded(told.wait())
        await beat_turns(election, role)
        assert len(holders(node_dsn, key_pair(role))) == 1
        assert election.state(role) is LockState.RELEASING
        assert not stepping.done()
        may_end.set()
        await bounded(stepping)
        leading.cancel()
        await asyncio.wait([leading])


async def beat_turns(election: LeaderElection, role: str) -> None:
    """Let the engine take a few turns: for claims that something does NOT happen in them."""
    deadline = election.gate(role).deadline
    await until(lambda: election.gate(role).deadline > deadline or election.gate(role).token is None)


async def test_what_the_work_raises_makes_the_node_step_down_and_is_raised(
    node_dsn: str, superuser: str, role: str
) -> None:
    async def work(token: LeaderToken) -> None:
        raise ZeroDivisionError("bad work")

    election = LeaderElection(node_dsn, role, **STEADY)
    story = Story(election)
    async with election:
        with pytest.raises(ZeroDivisionError, match="bad work"):
            await bounded(election.lead(role, work))
        assert ("on_released", role) in story.events
        assert terms(superuser, role)[0]["reason"] == "released"


async def test_lead_returns_none_when_the_election_is_stopped(node_dsn: str, role: str) -> None:
    ended: list[str] = []

    async def work(token: LeaderToken) -> str:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")
        return "never"

    election = LeaderElection(node_dsn, role, **STEADY)
    async with election:
        leading = asyncio.ensure_future(election.lead(role, work))
        await opens(election, role)
    assert await bounded(leading) is None
    assert ended == ["cancelled"]


async def test_work_waits_for_the_gate_and_not_only_for_the_lock(node_dsn: str, role: str) -> None:
    lost, next_one = (LeaderElection(node_dsn, role, **PATIENT) for _ in range(2))

    async def work(token: LeaderToken) -> None:
        pytest.fail("ran behind a gate that waits")

    async with lost:
        await opens(lost, role)
        lost._roles[role].not_before = float("inf")
        async with next_one:
            leading = asyncio.ensure_future(next_one.lead(role, work))
            terminate(node_dsn, key_pair(role))
            await until(lambda: next_one.state(role) is LockState.LEADER)
            await beat_turns(next_one, role)
            assert not leading.done()
        assert await bounded(leading) is None


async def test_a_veto_interrupts_the_work_and_lifting_it_starts_it_again(node_dsn: str, role: str) -> None:
    began: list[LeaderToken] = []

    async def work(token: LeaderToken) -> None:
        began.append(token)
        await asyncio.Event().wait()

    async with LeaderElection(node_dsn, role, **STEADY) as election:
        leading = asyncio.ensure_future(election.lead(role, work))
        await until(lambda: began)
        election.gate(role).disable()
        await until(lambda: not election._roles[role].works._running)
        election.gate(role).enable(began[0])
        await until(lambda: len(began) == 2)
        assert election.gate(role).current_epoch == 1
        leading.cancel()
        await asyncio.wait([leading])


# --- Callbacks


async def test_callbacks_are_told_the_role_and_the_end_comes_last(node_dsn: str, role: str) -> None:
    roles = [role, f"{role}-b"]
    election = LeaderElection(node_dsn, roles, **STEADY)
    story = Story(election)
    async with election:
        for name in roles:
            await opens(election, name)
        await bounded(election.step_down(role))
        await story.heard("on_released", role)
    assert {call[1] for call in story.events if call[0] == "on_acquired"} == set(roles)
    assert ("on_released", f"{role}-b") in story.events
    assert story.calls[-1] == ("on_stopped",)
    assert story.events.count(("on_stopped",)) == 1
    assert story.states(f"{role}-b") == [
        LockState.FOLLOWER,
        LockState.ACQUIRING,
        LockState.LEADER,
        LockState.RELEASING,
        LockState.STOPPED,
    ]
    assert story.errors == []


async def test_a_loss_is_told_to_each_role_and_its_error_once(node_dsn: str, role: str) -> None:
    roles = [f"{role}-{number}" for number in range(3)]
    election = LeaderElection(node_dsn, roles, **STEADY)
    story = Story(election)
    async with election:
        for name in roles:
            await opens(election, name)
        terminate(node_dsn, key_pair(roles[0]))
        for name in roles:
            await story.heard("on_lost", name)
            await opens(election, name)
        assert [type(error) for error in story.errors] == [ConnectionError]
        assert election.last_error is story.errors[0]


async def test_an_async_callback_is_awaited_and_one_that_fails_stops_nothing(node_dsn: str, role: str) -> None:
    election = LeaderElection(node_dsn, role, **STEADY)
    story = Story(election)
    heard: list[str] = []

    @election.on_acquired
    async def acquired(name: str) -> None:
        await asyncio.sleep(0)
        heard.append(name)
        raise ZeroDivisionError("a callback's own")

    async with election:
        await story.heard("on_error")
        await opens(election, role)
    assert heard == [role]
    assert [str(error) for error in story.errors] == ["a callback's own"]


async def test_step_down_and_shutdown_inside_a_callback_only_ask(node_dsn: str, role: str) -> None:
    election = LeaderElection(node_dsn, role, **STEADY)
    story = Story(election)

    @election.on_acquired
    async def acquired(name: str) -> None:
        if len([call for call in story.events if call[0] == "on_acquired"]) == 1:
            await election.step_down(name)
        else:
            await election.shutdown()

    await election.start()
    await story.heard("on_stopped")
    assert story.events.count(("on_acquired", role)) == 2
    await bounded(election.shutdown())


# --- Starting and stopping


async def test_start_twice_is_start_once_and_an_election_can_be_started_again(
    node_dsn: str, superuser: str, role: str
) -> None:
    election = LeaderElection(node_dsn, role, **STEADY)
    await election.start()
    task = election._task
    await election.start()
    assert election._task is task
    await opens(election, role)
    await election.shutdown()
    await election.shutdown()
    assert election.state(role) is LockState.STOPPED
    async with election:
        await opens(election, role)
        assert election.gate(role).current_epoch == 2
    assert [term["epoch"] for term in terms(superuser, role)] == [1, 2]


async def test_a_start_that_is_cancelled_leaves_nothing_running(node_dsn: str, role: str) -> None:
    before = asyncio.all_tasks()
    for turns in (1, 2, 3, 5, 10, 50):
        election = LeaderElection(node_dsn, role, **STEADY)
        starting = asyncio.ensure_future(election.start())
        for _ in range(turns):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait([starting])
        if starting.cancelled():
            await until(lambda: asyncio.all_tasks() == before, f"cancelled after {turns} turns")
        assert holders(node_dsn, key_pair(role)) == [] or not starting.cancelled()
        await election.shutdown()
        del election, starting
    gc.collect()  # the driver gives the socket of a connect that was broken off back when it is collected


async def test_a_shutdown_leaves_a_clean_ledger(node_dsn: str, superuser: str, role: str) -> None:
    async with LeaderElection(node_dsn, role, node_id="tidy", **STEADY) as election:
        await opens(election, role)
    row = leader_row(superuser, role)
    assert (row["epoch"], row["clean"], row["ended"]) == (1, True, True)
    (term,) = terms(superuser, role)
    assert (term["reason"], term["node_id"]) == ("released", "tidy")
    assert term["ended_at"] >= term["began_at"]
    session = one(superuser, "SELECT * FROM pgleaderlock.sessions WHERE session_id = %s", row["session_id"])
    assert session["ended_at"] is not None
    with admin(superuser) as conn:
        events = conn.execute(
            "SELECT kind, detail FROM pgleaderlock.events WHERE role = %s ORDER BY event_id", (role,)
        ).fetchall()
        state = conn.execute(
            "SELECT epoch, holder_identity FROM pgleaderlock.leader_state WHERE role = %s", (role,)
        ).fetchone()
    assert [(event["kind"], event["detail"]) for event in events] == [("acquired", None), ("released", "clean")]
    assert state == {"epoch": 1, "holder_identity": ""}


async def test_a_shutdown_waits_for_the_work_in_flight(node_dsn: str, superuser: str, role: str) -> None:
    election = LeaderElection(node_dsn, role, **STEADY)
    await election.start()
    await opens(election, role)
    with election.gate(role).acting():
        stopping = asyncio.ensure_future(election.shutdown())
        await until(lambda: election.state(role) is LockState.RELEASING)
        await beats_on(superuser, role)
        assert not stopping.done()
        assert len(holders(node_dsn, key_pair(role))) == 1
    await bounded(stopping)
    assert leader_row(superuser, role)["clean"] is True


async def test_a_shutdown_that_runs_out_of_time_says_so_and_is_not_clean(
    node_dsn: str, superuser: str, role: str
) -> None:
    election = LeaderElection(node_dsn, role, **STEADY)
    await election.start()
    await opens(election, role)
    with election.gate(role).acting():
        with pytest.raises(ShutdownError):
            await bounded(election.shutdown(timeout_s=0.05))
        assert election.state(role) is LockState.STOPPED
        assert holders(node_dsn, key_pair(role)) == []
    row = leader_row(superuser, role)
    assert (row["ended"], row["clean"]) == (True, False)


async def test_a_step_down_that_runs_out_of_time_is_not_clean(node_dsn: str, superuser: str, role: str) -> None:
    election = LeaderElection(node_dsn, role, **{**STEADY, "acquire_delay_s": (4.0, 5.0)})
    story = Story(election)
    async with election:
        await opens(election, role)
        with election.gate(role).acting():
            await bounded(election.step_down(role, timeout_s=0.05))
            await story.heard("on_released", role)
            row = leader_row(superuser, role)
            assert (row["epoch"], row["ended"], row["clean"]) == (1, True, False)


async def test_a_step_down_of_a_role_that_is_not_led_does_nothing(node_dsn: str, role: str) -> None:
    one_node, two = (LeaderElection(node_dsn, role, **STEADY) for _ in range(2))
    async with one_node:
        await opens(one_node, role)
        async with two:
            await bounded(two.step_down(role))
            assert one_node.gate(role).is_leader


async def test_a_database_that_is_away_is_tried_again_until_it_is_there(throwaway_postgres: StartServer) -> None:
    server = throwaway_postgres()
    await migrate(server.dsn)
    dsn = server.dsn
    await asyncio.to_thread(server.stop)
    election = LeaderElection(dsn, "away", **STEADY)
    story = Story(election)
    await bounded(election.start())
    await story.heard("on_error")
    assert isinstance(election.last_error, ConnectionError)
    await asyncio.to_thread(server.start)
    await opens(election, "away")
    await election.shutdown()


# --- The schema


async def test_without_a_ledger_start_says_migrate_and_leaves_nothing(dsn: str) -> None:
    with fresh_database(dsn) as empty:
        election = LeaderElection(empty, "r", **STEADY)
        story = Story(election)
        with pytest.raises(SchemaError, match="pgleaderlock migrate"):
            await bounded(election.start())
        assert election.state("r") is LockState.STOPPED
        assert story.calls[-1] == ("on_stopped",)
        assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        # And the same object works once the ledger is there.
        await migrate(empty)
        async with election:
            await opens(election, "r")


@pytest.mark.parametrize(
    ("sql", "remedy"),
    [
        ("DELETE FROM pgleaderlock.schema_version", "pgleaderlock migrate"),
        ("UPDATE pgleaderlock.schema_version SET version = version - 2", "pgleaderlock migrate"),
        ("INSERT INTO pgleaderlock.schema_version SELECT max(version) + 2 FROM pgleaderlock.schema_version", "upgrade"),
        ("DROP FUNCTION pgleaderlock.open_session", "pgleaderlock migrate"),
    ],
)
async def test_a_ledger_that_does_not_fit_is_refused_with_the_remedy(dsn: str, sql: str, remedy: str) -> None:
    with fresh_database(dsn, ledger=True) as own:
        with admin(own) as conn:
            conn.execute(sql.encode())
        with pytest.raises(SchemaError, match=remedy):
            await bounded(LeaderElection(own, "r", **STEADY).start())
        assert one(own, "SELECT count(*) AS n FROM pgleaderlock.sessions")["n"] == 0


async def test_a_ledger_one_version_newer_or_older_serves(dsn: str) -> None:
    with fresh_database(dsn, ledger=True) as own:
        for version in (LEDGER_VERSION + 1, LEDGER_VERSION - 1):
            with admin(own) as conn:
                conn.execute("DELETE FROM pgleaderlock.schema_version")
                conn.execute("INSERT INTO pgleaderlock.schema_version (version) VALUES (%s)", (version,))
            async with LeaderElection(own, f"r{version}", **STEADY) as election:
                await opens(election, f"r{version}")


async def test_without_the_grants_start_says_so(dsn: str, superuser: str) -> None:
    with fresh_database(dsn, ledger=True) as own:
        with admin(own) as conn:
            conn.execute("GRANT CONNECT ON DATABASE " + conn.info.dbname + " TO election_plain")
        stranger = psycopg.conninfo.make_conninfo(own, user="election_plain", password="plain")
        with pytest.raises(SchemaError, match="GRANT"):
            await bounded(LeaderElection(stranger, "r", **STEADY).start())


# --- Asked from afar


@pytest.mark.parametrize("channel", ["pgleaderlock", "nobody_listens_here"], ids=["notified", "notification lost"])
async def test_a_step_down_asked_through_sql_is_done_and_marked(
    node_dsn: str, superuser: str, role: str, channel: str
) -> None:
    election = LeaderElection(node_dsn, role, **STEADY)
    story = Story(election)
    async with election:
        await opens(election, role)
        asked = one(
            node_dsn, "SELECT pgleaderlock.request_step_down(%s, 'pgleaderlock', NULL, %s) AS id", role, channel
        )
        await story.heard("on_released", role)
        query = "SELECT done_at FROM pgleaderlock.requests WHERE request_id = %s"
        await until(lambda: one(superuser, query, asked["id"])["done_at"] is not None)
        await opens(election, role)
        await beats_on(superuser, role)
        assert election.gate(role).current_epoch == 2, "it was obeyed once"
        assert terms(superuser, role)[0]["reason"] == "released"


async def test_a_request_of_another_namespace_is_not_for_this_leader(node_dsn: str, superuser: str, role: str) -> None:
    async with LeaderElection(node_dsn, role, **STEADY) as election:
        await opens(election, role)
        one(node_dsn, "SELECT pgleaderlock.request_step_down(%s, 'elsewhere', NULL, 'pgleaderlock')", role)
        await beats_on(superuser, role, 3)
        assert election.gate(role).current_epoch == 1


async def test_an_advanced_epoch_is_noticed_and_a_higher_term_begins(node_dsn: str, superuser: str, role: str) -> None:
    election = LeaderElection(node_dsn, role, **HASTY)
    story = Story(election)
    async with election:
        await opens(election, role)
        old = election.gate(role).require_leader()
        moved = one(superuser, "SELECT * FROM pgleaderlock.advance_epoch(%s, 'pgleaderlock', 'pgleaderlock')", role)
        assert (moved["old_epoch"], moved["new_epoch"]) == (1, 2**20)
        await story.heard("on_lost", role)
        await story.heard("on_acquired", role, times=2)
        await opens(election, role)
        assert election.gate(role).require_leader().epoch == 2**20 + 1
        with pytest.raises(NotLeader) as refused:
            election.gate(role).ensure_epoch(old.epoch)
        assert refused.value.reason == "epoch_changed"
    assert [term["reason"] for term in terms(superuser, role)] == ["superseded", "released"]


async def test_a_request_to_step_down_wakes_the_leader_at_once(node_dsn: str, superuser: str, role: str) -> None:
    slow = {**PATIENT, "heartbeat_interval_s": 400.0}
    election = LeaderElection(node_dsn, role, **slow)
    story = Story(election)
    async with election:
        await opens(election, role)
        one(superuser, "SELECT pgleaderlock.request_step_down(%s, 'pgleaderlock', NULL, 'pgleaderlock')", role)
        one(superuser, "SELECT pg_notify('pgleaderlock', 'requested')")
        await story.heard("on_released", role)


async def test_without_a_listener_a_superseded_leader_competes_again(node_dsn: str, superuser: str, role: str) -> None:
    election = LeaderElection(node_dsn, role, listen_channel=None, **HASTY)
    story = Story(election)
    async with election:
        await opens(election, role)
        await until(lambda: election._engine is not None and election._engine._try_due_at == float("inf"))
        one(superuser, "SELECT pgleaderlock.advance_epoch(%s, 'pgleaderlock', 'pgleaderlock')", role)
        await story.heard("on_lost", role)
        await story.heard("on_acquired", role, times=2)


async def test_an_epoch_advanced_during_a_drain_is_a_loss_of_that_role_only(
    node_dsn: str, superuser: str, role: str
) -> None:
    roles = [role, f"{role}-other"]
    election = LeaderElection(node_dsn, roles, **STEADY)
    story = Story(election)
    async with election:
        for name in roles:
            await opens(election, name)
        with election.gate(role).acting():
            stepping = asyncio.ensure_future(election.step_down(role))
            await until(lambda: election.state(role) is LockState.RELEASING)
            one(superuser, "SELECT pgleaderlock.advance_epoch(%s, 'pgleaderlock', 'pgleaderlock')", role)
            await until(lambda: election.gate(role).current_epoch != 1)
        await bounded(stepping)
        await story.heard("on_acquired", role, times=2)
        assert election.gate(roles[1]).current_epoch == 1, "the other role was lost with it"
        assert [error for error in story.errors if not isinstance(error, PgLeaderLockError)] == []


# --- Notifications are hints


async def test_a_flood_of_forged_notifications_only_costs_time(node_dsn: str, superuser: str, role: str) -> None:
    leader, standby = (LeaderElection(node_dsn, role, node_id=name, **STEADY) for name in ("leads", "stands by"))
    async with running(leader, standby):
        acting = await somebody_acts([leader, standby], role)
        with admin(superuser) as conn:
            conn.execute(
                "SELECT pg_notify('pgleaderlock', (ARRAY['released', 'acquired', 'requested', '', %s])[1 + n %% 5]"
                " || repeat('x', n %% 7)) FROM generate_series(1, 5000) n",
                (role,),
            )
        await beats_on(superuser, role, 3)
        assert acting.gate(role).require_leader().epoch == 1
        assert len(holders(node_dsn, key_pair(role))) == 1


async def test_without_its_listener_an_election_still_works_and_gets_it_back(
    node_dsn: str, superuser: str, role: str
) -> None:
    node = f"ears-{uuid.uuid4().hex[:6]}"
    leader, follower = (
        LeaderElection(node_dsn, role, node_id=node, **timing) for timing in ({**PATIENT, **POLITE}, PATIENT)
    )
    listeners = "SELECT pid FROM pg_stat_activity WHERE application_name LIKE %s AND pid <> ALL (%s)"

    def listening(but: list[int]) -> list[int]:
        with admin(superuser) as conn:
            return [row["pid"] for row in conn.execute(listeners, (f"pgleaderlock listen {node}%", but)).fetchall()]

    async with leader, follower:
        await opens(leader, role)
        await until(lambda: len(listening([])) == 2)
        deaf = listening([])
        with admin(superuser) as conn:
            for pid in deaf:
                conn.execute("SELECT pg_terminate_backend(%s)", (pid,))
        await bounded(leader.step_down(role))
        await opens(follower, role)
        await until(lambda: len(listening(deaf)) == 2, "the listeners are back")


async def test_an_election_that_listens_to_nothing_still_hands_over(node_dsn: str, superuser: str, role: str) -> None:
    leader = LeaderElection(node_dsn, role, listen_channel=None, **{**PATIENT, **POLITE})
    async with leader, LeaderElection(node_dsn, role, listen_channel=None, **PATIENT) as follower:
        await opens(leader, role)
        await bounded(leader.step_down(role))
        await opens(follower, role)
        listening = "SELECT count(*) AS n FROM pg_stat_activity WHERE application_name LIKE 'pgleaderlock listen%%'"
        assert one(superuser, listening)["n"] == 0


async def test_a_release_wakes_a_standby_that_would_not_look_for_long(node_dsn: str, superuser: str, role: str) -> None:
    """Only the notification can have woken it: its own next look is ten minutes away."""
    leader = LeaderElection(node_dsn, role, **{**PATIENT, **POLITE})
    sleepy = {**PATIENT, "acquire_delay_s": (500.0, 550.0), "node_id": f"sleepy-{uuid.uuid4().hex[:6]}"}
    async with leader:
        await opens(leader, role)
        async with LeaderElection(node_dsn, role, **sleepy) as standby:
            listens = (
                "SELECT count(*) AS n FROM pg_stat_activity WHERE application_name LIKE %s AND query LIKE 'LISTEN%%'"
            )
            await until(lambda: one(superuser, listens, f"%listen {standby.node_id}%")["n"] == 1)
            await bounded(leader.step_down(role))
            await opens(standby, role)


# --- A leader that is silent but still there


@pytest.fixture
def silent_leader(node_dsn: str, role: str) -> Iterator[SilentLeader]:
    silent = SilentLeader(node_dsn, role, lease_s=0.2)
    yield silent
    silent.conn.close()


async def test_a_session_silent_for_twice_its_lease_is_ended_and_noted(
    node_dsn: str, superuser: str, role: str, silent_leader: SilentLeader
) -> None:
    async with LeaderElection(node_dsn, role, node_id="watchful", **STEADY) as election:
        await opens(election, role)
        assert election.gate(role).current_epoch == 2
    with pytest.raises(psycopg.OperationalError):
        silent_leader.conn.execute("SELECT 1")
    (evicted, after) = terms(superuser, role)
    assert (evicted["reason"], after["reason"]) == ("evicted", "released")
    note = one(
        superuser,
        "SELECT * FROM pgleaderlock.events WHERE kind = 'evicted' AND detail LIKE %s",
        f"silent session {silent_leader.session_id} %",
    )
    assert (note["node_id"], note["detail"].endswith("ended by watchful")) == ("silent", True)


async def test_without_eviction_a_silent_session_is_left_alone_and_reported_stale(
    node_dsn: str, superuser: str, role: str, silent_leader: SilentLeader
) -> None:
    async with LeaderElection(node_dsn, role, evict_stale=False, stale_threshold_s=0.5, **STEADY) as election:

        def silent_for_long() -> bool:
            leader = election.leader(role)
            return leader is not None and leader.stale and leader.unchanged_s > 0.8

        await until(silent_for_long)
        silent_leader.conn.execute("SELECT 1")
        assert holders(superuser, key_pair(role)) == [silent_leader.conn.info.backend_pid]
        assert election.state(role) is LockState.FOLLOWER


async def test_a_leader_that_beats_is_neither_stale_nor_evicted(node_dsn: str, superuser: str, role: str) -> None:
    """The leader's lease is short, and the standby watches it for many times that."""
    async with LeaderElection(node_dsn, role, node_id="lives", **HASTY) as leader:
        await opens(leader, role)
        async with LeaderElection(node_dsn, role, node_id="watches", **STEADY) as standby:
            await until(lambda: standby.leader(role) is not None)
            await beats_on(superuser, role, 25)
            seen = standby.leader(role)
            assert seen is not None
            assert not seen.stale
        assert leader.gate(role).current_epoch == 1


# --- Names and keys


async def test_a_role_whose_key_is_another_names_is_refused_and_not_merged(
    node_dsn: str, superuser: str, role: str
) -> None:
    key = int(uuid.uuid4().int % 2**62)
    second = f"{role}-second"
    election = LeaderElection(node_dsn, {second: key}, **STEADY)
    story = Story(election)
    async with LeaderElection(node_dsn, {role: key}, **STEADY) as first:
        await opens(first, role)
        await election.start()
        await bounded(first.drain())
        await story.heard("on_error")
        (error,) = story.errors
        assert isinstance(error, LockError)
        assert second in str(error)
        assert election.state(second) is LockState.FOLLOWER
        assert not election.gate(second).is_leader
        await until(lambda: holders(superuser, election._setup.keys[second]) == [])
    assert leader_row(superuser, role)["epoch"] == 1


async def test_a_keyed_role_that_was_renamed_is_led_under_its_new_name(node_dsn: str, role: str) -> None:
    """T is ten minutes: it opens at once, because the old name was given up cleanly."""
    key, renamed = int(uuid.uuid4().int % 2**62), f"{role}-renamed"
    async with LeaderElection(node_dsn, {role: key}, **PATIENT) as election:
        await opens(election, role)
    async with LeaderElection(node_dsn, {renamed: key}, **PATIENT) as election:
        await opens(election, renamed)


async def test_equal_names_in_two_namespaces_are_two_roles(node_dsn: str, role: str) -> None:
    one_node, two = (LeaderElection(node_dsn, role, namespace=name, **STEADY) for name in ("shop", "bank"))
    async with running(one_node, two):
        await opens(one_node, role)
        await opens(two, role)
        assert one_node.gate(role).require_leader().namespace == "shop"


# --- The heartbeat in a thread of its own, and the watchdog


async def test_with_a_heartbeat_thread_a_blocked_loop_keeps_the_term(node_dsn: str, superuser: str, role: str) -> None:
    election = LeaderElection(node_dsn, role, heartbeat_thread=True, **STEADY)
    story = Story(election)
    async with election:
        await opens(election, role)
        token = election.gate(role).require_leader()
        heard_again = threading.Event()

        def watch() -> None:
            before = beat(superuser, role)
            while beat(superuser, role) < before + 5:
                pass
            heard_again.set()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        assert heard_again.wait(WAIT_S), "no heartbeat came while the loop was blocked"
        assert election.gate(role).require_leader() is token
        thread.join()
    await story.heard("on_stopped")
    assert [call[0] for call in story.events] == ["on_acquired", "on_released", "on_stopped"]
    assert leader_row(superuser, role)["clean"] is True


async def test_with_a_heartbeat_thread_the_rest_works_as_without(node_dsn: str, superuser: str, role: str) -> None:
    timing = {**STEADY, "late_threshold_s": 1.5, "session_lease_s": 2.0}
    elections = [LeaderElection(node_dsn, role, heartbeat_thread=True, **timing) for _ in range(2)]
    began: list[int] = []

    async def work(token: LeaderToken) -> None:
        began.append(token.epoch)
        await asyncio.Event().wait()

    async with running(*elections):
        leader = await somebody_acts(elections, role)
        leading = [asyncio.ensure_future(election.lead(role, work)) for election in elections]
        await until(lambda: began == [1])
        async with reading(leader) as changes:
            await bounded(leader.step_down(role, timeout_s=WAIT_S))
            await until(lambda: began == [1, 2])
            await changes.until(lambda change: change.epoch == 2)
        terminate(node_dsn, key_pair(role))
        await until(lambda: len(began) == 3)
    assert await bounded(asyncio.gather(*leading)) == [None, None]
    assert [term["reason"] for term in terms(superuser, role)] == ["released", "lost", "released"]


async def test_with_a_heartbeat_thread_a_missing_ledger_is_raised_by_start(dsn: str) -> None:
    with fresh_database(dsn) as empty, pytest.raises(SchemaError):
        await bounded(LeaderElection(empty, "r", heartbeat_thread=True, **STEADY).start())
    await until(lambda: not [thread for thread in threading.enumerate() if "pgleaderlock" in thread.name])


STUCK = """
import asyncio, sys, threading
from pgleaderlock import LeaderElection

async def main():
    election = LeaderElection(sys.argv[1], "stuck", heartbeat_interval_s=0.1, late_threshold_s=0.5,
                              session_lease_s=1.0, hard_stop_after_s=0.3)
    await election.start()
    await election.gate("stuck").wait_open()
    with election.gate("stuck").acting():
        print("acting", flush=True)
        if sys.argv[2] == "blocked":
            threading.Event().wait()   # the loop never runs again, and the gate shuts by its deadline
        election.gate("stuck").disable()
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["blocked", "vetoed"])
async def test_a_process_that_goes_on_acting_behind_a_shut_gate_is_ended(dsn: str, how: str) -> None:
    with fresh_database(dsn, ledger=True) as own:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", STUCK, own, how, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, err = await bounded(process.communicate())
    assert (out, process.returncode) == (b"acting\n", 70), err.decode()
    assert b"hard_stop" in err


async def test_the_watchdog_leaves_those_alone_who_act_behind_an_open_gate(node_dsn: str, role: str) -> None:
    """If it did not, this test process would end."""
    async with LeaderElection(node_dsn, role, hard_stop_after_s=0.05, **STEADY) as election:
        await opens(election, role)
        with election.gate(role).acting():
            await beat_turns(election, role)
            await beat_turns(election, role)
        election.gate(role).disable()  # shut, but nobody acts
        await beat_turns(election, role)
    await until(lambda: not [thread for thread in threading.enumerate() if "watchdog" in thread.name])


# --- Nothing is left


def descriptors() -> set[str]:
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists the folder is gone by now
            found.add(f"{descriptor.name} {descriptor.readlink()}")
    return found


@pytest.mark.parametrize("threaded", [False, True])
async def test_a_run_leaves_no_task_no_descriptor_and_no_session(node_dsn: str, role: str, threaded: bool) -> None:
    """`dsn` looks for sessions and locks in the server."""

    async def cycle() -> None:
        elections = [LeaderElection(node_dsn, role, heartbeat_thread=threaded, **STEADY) for _ in range(2)]
        async with running(*elections):
            leader = await somebody_acts(elections, role)
            await bounded(leader.step_down(role, timeout_s=WAIT_S))

    await cycle()  # whatever is loaded once, is loaded now
    gc.collect()
    before = descriptors()
    for _ in range(3):
        await cycle()
    gc.collect()
    await until(lambda: not [thread for thread in threading.enumerate() if "pgleaderlock" in thread.name])
    for _ in range(10):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert descriptors() - before == set()
