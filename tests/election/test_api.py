"""`LeaderElection` on a real server: who leads, who may act, who hears of it, and what is left in the ledger.

Every test runs twice: as a superuser and as a plain role that has what `grants.sql` gives it and nothing else.
"""

import asyncio
import contextlib
import functools
import os
import re
import socket
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest

from pgleaderlock import (
    FixedInterval,
    LeaderElection,
    LeaderLock,
    LeaderToken,
    LockNotAcquired,
    LockState,
    NotLeader,
    acquire_leadership,
    key_pair,
)
from pgleaderlock._election.ledger import Bump, Ledger
from pgleaderlock.errors import ConnectionError
from support.counts import count
from support.elections import (
    HASTY,
    KEY_COLUMNS,
    PATIENT,
    STEADY,
    Story,
    admin,
    beat_turns,
    bounded,
    end_leader,
    holding,
    leader_row,
    ledger_dsns,
    one,
    opens,
    reading,
    running,
    somebody_acts,
    terms,
    until,
)
from support.ledger_node import ledger_node
from support.server_side import holders

pytestmark = pytest.mark.usefixtures("hold")

# One that has stepped down lets the others go first for so long that, on a busy machine too, it is they who win.
POLITE = {"acquire_delay_s": (4.0, 5.0)}


# The role with fewer rights is the harder case; `make proof` runs both.
@pytest.fixture(params=["plain", "superuser"][: count(1, 2)])
def node_dsn(request: pytest.FixtureRequest, dsn: str) -> str:
    """What the nodes connect with."""
    return ledger_dsns(dsn)[request.param]


# --- One leads


async def test_of_two_nodes_one_acts_and_the_other_sees_who(node_dsn: str, role: str) -> None:
    one_node, two = (LeaderElection(node_dsn, role, node_id=name, **STEADY) for name in ("one", "two"))
    async with running(one_node, two):
        leader = await somebody_acts([one_node, two], role)
        follower = two if leader is one_node else one_node
        token = leader.gate(role).require_leader()
        assert (token.role, token.epoch, token.namespace) == (role, 1, "pgleaderlock")
        assert holding(node_dsn, role) == 1
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
    assert re.fullmatch(rf"{re.escape(socket.gethostname())}(-\d+)?", LeaderElection(node_dsn, role).node_id)


class Worker:
    """A process of a host of its own, as a process manager keeps several; says the name that its election has."""

    def __init__(self, host: str) -> None:
        code = (
            f"import socket; socket.gethostname = lambda: {host!r}\n"
            "from pgleaderlock import LeaderElection\n"
            "names = {LeaderElection('host=h', role).node_id for role in ('one', 'two')}\n"
            "print(*names, flush=True)\n"
            "input()"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def name(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: elsewhere the name has the pid in it")
def test_processes_of_one_host_have_names_of_their_own_which_last_beyond_a_restart() -> None:
    host = f"host-{uuid.uuid4().hex[:8]}"
    with contextlib.ExitStack() as running:

        def started() -> Worker:
            worker = Worker(host)
            running.callback(worker.end)
            return worker

        workers = [started()]
        names = [workers[0].name()]
        for _ in range(2):
            workers.append(started())
            names.append(workers[-1].name())
        assert names == [host, f"{host}-2", f"{host}-3"]
        workers[1].end()
        assert started().name() == f"{host}-2"


@pytest.mark.of_sessions
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
        await until(lambda: watcher._roster.roles[role].look is not None)
        assert watcher.state(role) is LockState.FOLLOWER
        assert holding(node_dsn, role) == 0


@pytest.mark.of_sessions
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
        lost._roster.roles[role].not_before = float("inf")  # it does not compete again
        async with next_one:
            await until(lambda: next_one.leader(role) is not None)
            end_leader(node_dsn, role)
            await until(lambda: next_one.state(role) is LockState.LEADER)
            with pytest.raises(NotLeader) as refused:
                next_one.gate(role).require_leader()
            assert refused.value.reason == "waiting"
            assert next_one.gate(role).current_epoch == 2


async def test_a_release_while_still_waiting_is_not_clean(node_dsn: str, superuser: str, role: str) -> None:
    lost, waits = (LeaderElection(node_dsn, role, node_id=name, **PATIENT) for name in ("lost", "waits"))
    async with lost:
        await opens(lost, role)
        lost._roster.roles[role].not_before = float("inf")
        async with waits:
            end_leader(node_dsn, role)
            await until(lambda: waits.state(role) is LockState.LEADER)
        row = leader_row(superuser, role)
        assert (row["epoch"], row["ended"], row["clean"]) == (2, True, False)
        assert row["wait_t"] == 600.0


async def test_after_a_loss_the_successor_opens_when_the_predecessors_time_is_over(node_dsn: str, role: str) -> None:
    lost, next_one = (LeaderElection(node_dsn, role, node_id=name, **HASTY) for name in ("lost", "next"))
    async with running(lost, next_one):
        leader = await somebody_acts([lost, next_one], role)
        follower = next_one if leader is lost else lost
        before = leader.gate(role).current_epoch or 0
        leader._roster.roles[role].not_before = float("inf")
        end_leader(node_dsn, role)
        await opens(follower, role)
        assert (follower.gate(role).current_epoch or 0) > before
        assert not leader.gate(role).is_leader


async def test_a_leader_whose_session_was_ended_lets_a_follower_win_first(node_dsn: str, role: str) -> None:
    options = {**PATIENT, "acquire_delay_s": (0.5, 1.0), "takeover": "instant", "listen_channel": None}
    nodes = [LeaderElection(node_dsn, role, node_id=name, **options) for name in ("one", "two")]
    async with running(*nodes):
        leader = await somebody_acts(nodes, role)
        for epoch in range(1, count(3, 20) + 1):
            (follower,) = (node for node in nodes if node is not leader)
            await until(lambda: (seen := follower.leader(role)) is not None and seen.epoch == epoch)  # noqa: B023
            end_leader(node_dsn, role)
            await opens(follower, role)
            assert follower.gate(role).current_epoch == epoch + 1, "the old leader won again before its follower"
            leader = follower


async def test_a_takeover_that_is_instant_does_not_wait(node_dsn: str, role: str) -> None:
    lost = LeaderElection(node_dsn, role, **PATIENT)
    next_one = LeaderElection(node_dsn, role, takeover="instant", **PATIENT)
    async with lost:
        await opens(lost, role)
        lost._roster.roles[role].not_before = float("inf")
        async with next_one:
            end_leader(node_dsn, role)
            await opens(next_one, role)


async def test_a_node_whose_own_settled_session_was_ended_opens_again_at_once(node_dsn: str, role: str) -> None:
    election = LeaderElection(node_dsn, role, **PATIENT)
    story = Story(election)
    async with election:
        await opens(election, role)
        end_leader(node_dsn, role)
        await story.heard("on_lost", role)
        await opens(election, role)
        assert election.gate(role).current_epoch == 2


@pytest.mark.of_sessions
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
        frozen._roster.roles[role].not_before = float("inf")
        yield


async def test_a_node_that_is_restarted_while_it_waits_still_waits(node_dsn: str, superuser: str, role: str) -> None:
    waits = LeaderElection(node_dsn, role, node_id="waits", **PATIENT)
    async with a_predecessor_that_still_acts(node_dsn, role):
        async with waits:
            end_leader(node_dsn, role)
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
            end_leader(node_dsn, role)
            await opens(instant, role)
        async with safe:
            await until(lambda: safe.state(role) is LockState.LEADER)
            assert not safe.gate(role).is_leader, "it opened at once, while the frozen one may still act"


def lose_the_next_bump_of(node_id: str, kind: type[Ledger], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Committed, and never heard of. What is returned fills with the session in which it happened."""
    real = kind.bump
    lost: list[int] = []

    async def bump(self: Ledger, *args: Any, **kwargs: Any) -> list[Bump]:
        answer = await real(self, *args, **kwargs)
        if not lost and self._identity.node_id == node_id and any(bump.outcome == "won" for bump in answer):
            lost.append(self.session_id)
            raise ConnectionError("the answer was lost on its way")
        return answer

    monkeypatch.setattr(kind, "bump", bump)
    return lost


async def test_a_node_that_never_heard_of_its_own_bump_still_waits(
    node_dsn: str, role: str, ledger_kind: type[Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bump is committed, its answer lost: the next session of this process finds itself as the predecessor."""
    waits = LeaderElection(node_dsn, role, node_id="waits", **PATIENT)
    async with a_predecessor_that_still_acts(node_dsn, role):
        lost = lose_the_next_bump_of("waits", ledger_kind, monkeypatch)
        async with waits:
            end_leader(node_dsn, role)
            await until(lambda: waits.state(role) is LockState.LEADER)
            assert lost
            assert not waits.gate(role).is_leader, "it opened at once, while the frozen one may still act"


async def test_a_node_that_led_before_on_the_session_of_the_lost_answer_still_waits(
    node_dsn: str, role: str, ledger_kind: type[Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last term that it has heard of was on that very session, but somebody else has led since."""
    first = LeaderElection(node_dsn, role, node_id="first", **PATIENT)
    with ledger_node(node_dsn, "second") as second:
        async with first:
            await opens(first, role)
            session_id = first._run.engine._board.ledger.session_id  # type: ignore[union-attr]
            queued = asyncio.ensure_future(asyncio.to_thread(second.wait_for_lock, role))
            # Of a lease, nobody holds the lock: the second one has it before the role is given up.
            queues = functools.partial(waits_for_a_lock, node_dsn, second.conn.info.backend_pid)
            await until(lambda: queued.done() or queues(), "the second one to queue up")
            await bounded(first.step_down(role))
            await bounded(queued)
            assert second.bump(role)["prev_clean"]  # it may act from now on, and for minutes
            lost = lose_the_next_bump_of("first", ledger_kind, monkeypatch)
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
        end_leader(node_dsn, role)
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
        assert holding(node_dsn, role) == 1
        assert election.state(role) is LockState.RELEASING
        assert not stepping.done()
        may_end.set()
        await bounded(stepping)
        leading.cancel()
        await asyncio.wait([leading])


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
        lost._roster.roles[role].not_before = float("inf")
        async with next_one:
            leading = asyncio.ensure_future(next_one.lead(role, work))
            end_leader(node_dsn, role)
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
        await until(lambda: not election._roster.roles[role].works._running)
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
        end_leader(node_dsn, roles[0])
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
