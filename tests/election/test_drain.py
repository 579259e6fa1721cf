"""Giving up without stopping: in which order, what is waited for, what is cancelled, and until when nobody competes."""

import asyncio
import contextlib
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import psycopg
import pytest

from pgleaderlock import (
    ConfigurationError,
    ElectionObserver,
    LeaderElection,
    LeaderToken,
    LockState,
    NotLeader,
)
from pgleaderlock._election.ledger import Beat, Bump, Ledger, Look
from pgleaderlock._lock.driver import Driver
from pgleaderlock._lock.fsm import Input
from support.elections import (
    HASTY,
    PATIENT,
    STEADY,
    WAIT_S,
    admin,
    bounded,
    end_leader,
    end_session,
    holding,
    last_session,
    one,
    opens,
    until,
)

pytestmark = pytest.mark.usefixtures("hold")


def leader_row(superuser: str, role: str) -> dict[str, Any]:
    return one(superuser, "SELECT epoch, ended, clean FROM pgleaderlock.leaders WHERE role = %s", role)


async def looks(election: LeaderElection, role: str, times: int = 3) -> None:
    """Let it look at the role so often: for claims that something does NOT happen meanwhile."""
    await until(lambda: election._roster.roles[role].look is not None)
    for _ in range(times + 1):  # the last one of them may still be on its way
        engine = election._run.engine
        assert engine is not None
        before = engine._due.try_sent_at
        await until(lambda engine=engine, before=before: engine._due.try_sent_at > before)  # type: ignore[misc]


@contextlib.contextmanager
def thread_that_acts(election: LeaderElection, role: str) -> Iterator[Callable[[], None]]:
    """Work that nobody can cancel; call what is given to let it end."""
    began, may_end = threading.Event(), threading.Event()

    def act() -> None:
        with election.gate(role).acting():
            began.set()
            may_end.wait(WAIT_S)

    thread = threading.Thread(target=act)
    thread.start()
    assert began.wait(WAIT_S)
    try:
        yield may_end.set
    finally:
        may_end.set()
        thread.join()


# --- The order


@pytest.mark.parametrize("threaded", [False, True])
async def test_nothing_is_released_before_the_work_has_stopped(
    node_dsn: str, role: str, threaded: bool, ledger_kind: type[Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal is the claim: each line is written by the one who did it."""
    journal: list[str] = []
    real_end, real_unlock = ledger_kind.end_terms, ledger_kind.unlock

    async def end_terms(self: Ledger, terms: Any, reason: str = "released") -> set[str]:
        answer = await real_end(self, terms, reason)
        journal.append(f"term ended as {reason}, clean: {terms[role][1]}")
        return answer

    async def unlock(self: Ledger, roles: Any) -> set[str]:
        journal.append("unlock is sent")
        return await real_unlock(self, roles)

    async def lead(token: LeaderToken) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            journal.append("the led work has stopped")

    election = LeaderElection(node_dsn, role, heartbeat_thread=threaded, **PATIENT)
    async with election, await psycopg.AsyncConnection.connect(node_dsn, autocommit=True) as ear:
        await ear.execute("LISTEN pgleaderlock")
        await opens(election, role)
        leading = asyncio.ensure_future(election.lead(role, lead))
        await until(lambda: election._roster.roles[role].works._running)
        monkeypatch.setattr(ledger_kind, "end_terms", end_terms)
        monkeypatch.setattr(ledger_kind, "unlock", unlock)
        with thread_that_acts(election, role) as let_end:
            draining = asyncio.ensure_future(election.drain(role, timeout_s=WAIT_S))
            await until(lambda: not election.gate(role).is_leader)
            with pytest.raises(NotLeader) as refused, election.gate(role).acting():
                pytest.fail("new work was let in")
            journal.append(f"new work is refused: {refused.value.reason}")
            await until(lambda: "the led work has stopped" in journal)
            deadline = election.gate(role).deadline
            await until(lambda: election.gate(role).deadline > deadline, "a heartbeat that goes on meanwhile")
            assert holding(node_dsn, role) == 1
            journal.append("the other work has stopped")
            let_end()
        assert await bounded(draining) is True
        async with asyncio.timeout(WAIT_S):
            async for notification in ear.notifies():
                if notification.payload == "released":
                    journal.append("the others are woken")
                    break
        await election.shutdown()
        assert await bounded(leading) is None
    assert sorted(journal[:2]) == ["new work is refused: draining", "the led work has stopped"]
    assert journal[2:] == [
        "the other work has stopped",
        "term ended as released, clean: True",
        "unlock is sent",
        "the others are woken",
    ]


async def test_after_a_clean_drain_another_acts_at_once(node_dsn: str, role: str) -> None:
    """T is ten minutes: whoever had to wait for it would not open within this test."""
    async with LeaderElection(node_dsn, role, **PATIENT) as first, LeaderElection(node_dsn, role, **PATIENT) as second:
        await opens(first, role)
        await until(lambda: second.leader(role) is not None)
        assert await bounded(first.drain())
        await opens(second, role)


async def test_a_role_that_was_given_up_while_somebody_held_its_row_is_led_by_another(
    node_dsn: str, superuser: str, role: str
) -> None:
    await given_up_while_somebody_holds_its_row(node_dsn, superuser, role, balance=False)


@pytest.mark.of_sessions
async def test_whoever_balances_sees_that_a_role_was_given_up_though_somebody_held_its_row(
    node_dsn: str, superuser: str, role: str
) -> None:
    await given_up_while_somebody_holds_its_row(node_dsn, superuser, role, balance=True)


async def given_up_while_somebody_holds_its_row(node_dsn: str, superuser: str, role: str, *, balance: bool) -> None:
    """The term cannot be ended then; it is as soon as the row is free."""
    settings = {**HASTY, "balance": balance, "namespace": role}
    async with LeaderElection(node_dsn, role, node_id="first", **settings) as first:
        await opens(first, role)
        with admin(superuser) as operator:
            operator.execute("BEGIN")
            operator.execute("SELECT FROM pgleaderlock.leaders WHERE role = %s FOR UPDATE", (role,))
            assert not await bounded(first.drain())
            operator.execute("ROLLBACK")
        await until(lambda: leader_row(superuser, role)["ended"])
        assert not leader_row(superuser, role)["clean"]
        async with LeaderElection(node_dsn, role, node_id="second", **settings) as second:
            await opens(second, role)


# --- Out of time


async def test_work_that_cannot_be_cancelled_makes_a_drain_out_of_time_not_clean(
    node_dsn: str, superuser: str, role: str
) -> None:
    first, second = (LeaderElection(node_dsn, role, **PATIENT) for _ in range(2))
    async with first:
        await opens(first, role)
        async with second:
            await until(lambda: second.leader(role) is not None)
            with thread_that_acts(first, role):
                assert await bounded(first.drain(role, timeout_s=0.05)) is False
                assert leader_row(superuser, role)["epoch"] >= 1
                await until(lambda: second.state(role) is LockState.LEADER)
                with pytest.raises(NotLeader) as refused:
                    second.gate(role).require_leader()
                assert refused.value.reason == "waiting", "the first may still be at work"


async def test_a_task_inside_acting_is_cancelled_when_the_time_is_over_and_its_end_makes_it_clean(
    node_dsn: str, superuser: str, role: str
) -> None:
    ended: list[str] = []

    async def act() -> None:
        with election.gate(role).acting():
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                ended.append("act")

    async with LeaderElection(node_dsn, role, **STEADY) as election:
        await opens(election, role)
        acting = asyncio.ensure_future(act())
        await until(lambda: election.gate(role).in_flight)
        assert await bounded(election.drain(role, timeout_s=0.05)) is True
        assert ended == ["act"]
        assert acting.cancelled()
        assert leader_row(superuser, role) == {"epoch": 1, "ended": True, "clean": True}


async def test_whoever_drains_inside_its_own_acting_is_not_cancelled_and_not_clean(
    node_dsn: str, superuser: str, role: str
) -> None:
    async with LeaderElection(node_dsn, role, **STEADY) as election:
        await opens(election, role)
        with election.gate(role).acting():
            assert await bounded(election.drain(role, timeout_s=0.05)) is False
        assert leader_row(superuser, role) == {"epoch": 1, "ended": True, "clean": False}


async def test_a_led_work_that_does_not_end_in_time_makes_it_not_clean(
    node_dsn: str, superuser: str, role: str
) -> None:
    may_end = asyncio.Event()

    async def stubborn(token: LeaderToken) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await may_end.wait()

    async with LeaderElection(node_dsn, role, **STEADY) as election:
        leading = asyncio.ensure_future(election.lead(role, stubborn))
        await until(lambda: role in election._roster.roles and election._roster.roles[role].works._running)
        assert await bounded(election.drain(role, timeout_s=0.05)) is False
        assert leader_row(superuser, role) == {"epoch": 1, "ended": True, "clean": False}
        may_end.set()
    assert await bounded(leading) is None


async def test_a_release_out_of_time_makes_every_drain_that_waits_for_it_not_clean(node_dsn: str, role: str) -> None:
    """Whatever is asked of the role in between: what is not led is drained cleanly, and must not speak for the rest."""
    other = f"{role}-other"
    async with LeaderElection(node_dsn, [role, other], **STEADY) as election:
        await opens(election, role)
        await opens(election, other)
        with thread_that_acts(election, role), thread_that_acts(election, other) as let_other_end:
            everything = asyncio.ensure_future(election.drain())
            await until(lambda: election.draining(role))
            await bounded(election.step_down(role, timeout_s=0.05))
            assert await bounded(election.drain(role)) is True, "nothing was led"
            let_other_end()
            assert await bounded(everything) is False


async def test_an_end_by_force_makes_a_drain_that_waits_not_clean(node_dsn: str, role: str) -> None:
    async with LeaderElection(node_dsn, role, **STEADY) as election:
        await opens(election, role)
        with thread_that_acts(election, role):
            draining = asyncio.ensure_future(election.drain())
            await until(lambda: election.draining(role))
            assert election._run.task is not None
            election._run.task.cancel()
            assert await bounded(draining) is False


async def test_work_that_is_cancelled_already_is_not_cancelled_again(node_dsn: str, role: str) -> None:
    """A second cancellation would strike its clean-up."""
    cleaning, may_end, ended = asyncio.Event(), asyncio.Event(), list[str]()

    async def act() -> None:
        with election.gate(role).acting():
            try:
                await asyncio.Event().wait()
            finally:
                cleaning.set()
                await may_end.wait()
                ended.append("cleaned up")

    async with LeaderElection(node_dsn, role, **STEADY) as election:
        await opens(election, role)
        acting = asyncio.ensure_future(act())
        await until(lambda: election.gate(role).in_flight)
        election.gate(role).cancel_acting()
        await bounded(cleaning.wait())
        election.gate(role).cancel_acting()
        await asyncio.sleep(0)
        may_end.set()
        await asyncio.wait([acting])
        assert ended == ["cleaned up"]


# --- Until it is resumed


@pytest.mark.parametrize("threaded", [False, True])
async def test_a_drained_role_is_not_competed_for_until_it_is_resumed(node_dsn: str, role: str, threaded: bool) -> None:
    kept = f"{role}-kept"
    async with LeaderElection(node_dsn, [role, kept], heartbeat_thread=threaded, **STEADY) as election:
        await opens(election, role)
        await opens(election, kept)
        assert await bounded(election.drain(role))
        assert (election.drained(role), election.draining(role), election.drained(kept)) == (True, False, False)
        await looks(election, role)
        assert holding(node_dsn, role) == 0
        with pytest.raises(NotLeader) as refused:
            election.gate(role).require_leader()
        assert refused.value.reason == "released"
        await election.resume(role)
        await opens(election, role)
        assert (election.gate(role).current_epoch, election.gate(kept).current_epoch) == (2, 1)


async def test_a_drain_of_everything_is_recorded_and_covers_what_is_added_later(
    node_dsn: str, superuser: str, role: str
) -> None:
    node = f"node-{uuid.uuid4().hex[:6]}"
    recorded = "SELECT draining FROM pgleaderlock.sessions WHERE node_id = %s AND ended_at IS NULL"
    async with LeaderElection(node_dsn, [role, f"{role}-b"], node_id=node, **STEADY) as election:
        await opens(election, role)
        await opens(election, f"{role}-b")
        assert await bounded(election.drain())
        await until(lambda: one(superuser, recorded, node)["draining"])
        await election.add_role(f"{role}-late")
        assert election.drained(f"{role}-late")
        await looks(election, f"{role}-late")
        assert [election.state(name) for name in election.roles] == [LockState.FOLLOWER] * 3
        await election.resume()
        for name in election.roles:
            await opens(election, name)
        await until(lambda: not one(superuser, recorded, node)["draining"])


async def test_a_drained_node_stays_so_over_a_reconnect_and_not_over_a_start(
    node_dsn: str, superuser: str, role: str
) -> None:
    node = f"node-{uuid.uuid4().hex[:6]}"
    live = "SELECT session_id, draining FROM pgleaderlock.sessions WHERE node_id = %s AND ended_at IS NULL"
    election = LeaderElection(node_dsn, role, node_id=node, **STEADY)
    async with election:
        await opens(election, role)
        assert await bounded(election.drain())
        before = one(superuser, live, node)["session_id"]
        end_session(superuser, before)
        await until(lambda: last_session(superuser, node) > before)
        assert one(superuser, live, node)["draining"], "from the first moment of the new session"
        await looks(election, role)
        assert holding(node_dsn, role) == 0
    async with election:
        await opens(election, role)


async def test_a_lock_that_is_won_while_the_drain_is_asked_for_is_given_back(
    node_dsn: str, superuser: str, role: str, ledger_kind: type[Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer that grants it is on its way when the drain begins: no term begins on it."""
    real = ledger_kind.try_and_look
    granted, go_on = asyncio.Event(), asyncio.Event()

    async def try_and_look(self: Ledger, *args: Any, **options: Any) -> list[Look]:
        answer = await real(self, *args, **options)
        if any(look.granted for look in answer):
            granted.set()
            await go_on.wait()
        return answer

    monkeypatch.setattr(ledger_kind, "try_and_look", try_and_look)
    async with LeaderElection(node_dsn, role, **STEADY) as election:
        await bounded(granted.wait())
        draining = asyncio.ensure_future(election.drain(role))
        await asyncio.sleep(0)
        go_on.set()
        assert await bounded(draining) is True
        assert holding(node_dsn, role) == 0
        assert one(superuser, "SELECT count(*) AS n FROM pgleaderlock.terms WHERE role = %s", role)["n"] == 0


async def test_a_drain_that_is_resumed_before_it_has_begun_is_done_all_the_same(node_dsn: str, role: str) -> None:
    """Whoever waits for it must not wait for ever, and the gate must not stay shut."""
    async with LeaderElection(node_dsn, role, **STEADY) as election:
        await opens(election, role)
        draining = asyncio.ensure_future(election.drain(role))
        await asyncio.sleep(0)
        await election.resume(role)
        assert await bounded(draining) is True
        await opens(election, role)
        assert election.gate(role).current_epoch == 2


class Acquired(ElectionObserver):
    """Does something the moment a term has begun, before the engine does anything else."""

    def __init__(self, then: Callable[[], object]) -> None:
        self.then = then

    def acquired(self, role: str, epoch: int, latency_s: float, from_other: bool) -> None:
        self.then()


@contextlib.asynccontextmanager
async def winning(
    monkeypatch: pytest.MonkeyPatch, kind: type[Ledger], dsn: str, role: str
) -> AsyncIterator[tuple[LeaderElection, Callable[[], None]]]:
    """An election whose term has begun at the server, and does not know it before it is let go on."""
    real, won, go_on = kind.bump, asyncio.Event(), asyncio.Event()

    async def bump(self: Ledger, *args: Any, **options: Any) -> list[Bump]:
        answer = await real(self, *args, **options)
        won.set()
        await go_on.wait()
        return answer

    monkeypatch.setattr(kind, "bump", bump)
    async with LeaderElection(dsn, role, **STEADY) as election:
        await bounded(won.wait())
        yield election, go_on.set


@pytest.mark.parametrize("resumed", ["before the answer", "after the answer"])
async def test_a_drain_that_is_resumed_while_the_role_is_being_won_returns_and_the_gate_opens(
    node_dsn: str, role: str, resumed: str, ledger_kind: type[Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks: list[asyncio.Future[Any]] = []
    async with winning(monkeypatch, ledger_kind, node_dsn, role) as (election, go_on):
        draining = asyncio.ensure_future(election.drain(role))
        await asyncio.sleep(0)
        if resumed == "before the answer":
            await election.resume(role)
        else:
            resume = Acquired(lambda: tasks.append(asyncio.ensure_future(election.resume(role))) if not tasks else None)
            election.observe(resume)
        go_on()
        assert await bounded(draining) is True
        await opens(election, role)
        await asyncio.gather(*tasks)


async def test_a_term_that_begins_after_its_drain_was_asked_for_lets_nothing_in(
    node_dsn: str, role: str, ledger_kind: type[Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_gates: list[bool] = []
    async with winning(monkeypatch, ledger_kind, node_dsn, role) as (election, go_on):
        draining = asyncio.ensure_future(election.drain(role))
        await asyncio.sleep(0)
        election.observe(Acquired(lambda: open_gates.append(election.gate(role).is_leader)))
        go_on()
        assert await bounded(draining) is True
    assert open_gates == [False]


async def test_a_drain_ends_though_one_of_its_roles_is_led_again_before_the_others_end(
    node_dsn: str, role: str
) -> None:
    busy = f"{role}-busy"
    async with LeaderElection(node_dsn, [role, busy], **STEADY) as election:
        await opens(election, role)
        await opens(election, busy)
        with thread_that_acts(election, busy):
            draining = asyncio.ensure_future(election.drain())
            await until(lambda: election.gate(role).token is None)
            await election.resume(role)
            await opens(election, role)
        assert await bounded(draining) is True
        assert election.gate(role).current_epoch == 2


# --- The rest


async def test_a_drain_shuts_the_gate_at_once_whatever_the_engine_is_waiting_for(
    node_dsn: str, role: str, ledger_kind: type[Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, on_its_way, go_on = ledger_kind.beat, asyncio.Event(), asyncio.Event()

    async def beat(self: Ledger, *args: Any) -> Beat:
        on_its_way.set()
        await go_on.wait()
        return await real(self, *args)

    async with LeaderElection(node_dsn, role, **STEADY) as election:
        await opens(election, role)
        monkeypatch.setattr(ledger_kind, "beat", beat)
        await bounded(on_its_way.wait())
        draining = asyncio.ensure_future(election.drain(role))
        await asyncio.sleep(0)
        assert not election.gate(role).is_leader
        go_on.set()
        assert await bounded(draining) is True


async def test_a_step_down_is_obeyed_as_soon_as_the_gate_is_open(
    node_dsn: str, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a heartbeat thread, which loses the processor between the gate's opening and the state's change."""
    real, go_on = Driver.feed, threading.Event()

    def feed(self: Driver, what: Input, *args: Any) -> Any:
        if what is Input.ACQUIRE_ATTEMPT:
            go_on.wait(WAIT_S)
        return real(self, what, *args)

    monkeypatch.setattr(Driver, "feed", feed)
    async with LeaderElection(node_dsn, role, heartbeat_thread=True, **STEADY) as election:
        try:
            await opens(election, role)
            assert election.state(role) is LockState.FOLLOWER
            token = election.gate(role).token
            stepping = asyncio.ensure_future(election.step_down(role))
            await asyncio.sleep(0)
        finally:
            go_on.set()
        await bounded(stepping)
        assert election.gate(role).token is not token


async def test_a_drain_of_what_is_not_led_is_clean_and_of_what_is_unknown_an_error(node_dsn: str, role: str) -> None:
    election = LeaderElection(node_dsn, role, **STEADY)
    assert await election.drain() is True
    with pytest.raises(ConfigurationError):
        await election.drain("unknown")
    with pytest.raises(ConfigurationError):
        await election.resume("unknown")
    async with LeaderElection(node_dsn, role, **STEADY) as leader:
        await opens(leader, role)
        async with election:
            assert await bounded(election.drain(role)) is True
            assert leader.gate(role).is_leader
    assert await election.drain() is True


async def test_a_drain_whose_caller_gives_up_goes_on(node_dsn: str, role: str) -> None:
    async with LeaderElection(node_dsn, role, **STEADY) as election:
        await opens(election, role)
        with election.gate(role).acting():
            draining = asyncio.ensure_future(election.drain(role))
            await until(lambda: election.draining(role))
            draining.cancel()
            await asyncio.wait([draining])
        await until(lambda: holding(node_dsn, role) == 0)
        assert election.drained(role)


async def test_a_session_that_is_lost_during_a_drain_ends_it_and_is_not_clean(node_dsn: str, role: str) -> None:
    async with LeaderElection(node_dsn, role, **STEADY) as election:
        await opens(election, role)
        with election.gate(role).acting():
            draining = asyncio.ensure_future(election.drain(role))
            await until(lambda: election.draining(role))
            end_leader(node_dsn, role)
            assert await bounded(draining) is False
        await looks(election, role)
        assert holding(node_dsn, role) == 0


async def test_a_shutdown_ends_a_drain_that_waits(node_dsn: str, role: str) -> None:
    election = LeaderElection(node_dsn, role, **STEADY)
    await election.start()
    await opens(election, role)
    with election.gate(role).acting():
        draining = asyncio.ensure_future(election.drain(role))
        await until(lambda: election.draining(role))
        stopping = asyncio.ensure_future(election.shutdown())
        await asyncio.sleep(0)
    await bounded(stopping)
    assert await bounded(draining) is True
    assert election.state(role) is LockState.STOPPED


@pytest.mark.timeout(30)
async def test_a_shutdown_leaves_the_loop_to_the_work_that_it_waits_for(node_dsn: str, role: str) -> None:
    """A notification comes while it stops. The next heartbeat is minutes away: until then nothing is to be done."""
    slow = {**PATIENT, "heartbeat_interval_s": 400.0}
    async with LeaderElection(node_dsn, role, **slow) as election:
        await opens(election, role)
        with election.gate(role).acting():
            stopping = asyncio.ensure_future(election.shutdown())
            await until(lambda: election.draining(role))
            turns: list[int] = []
            assert election._run.engine is not None
            tick = election._run.engine._tick

            async def counted() -> None:
                turns.append(1)
                await tick()

            election._run.engine._tick = counted  # type: ignore[method-assign]
            election._run.engine.wake("released")
            await until(lambda: turns)
            for _ in range(100):
                await asyncio.sleep(0)
            assert len(turns) < 10
        await bounded(stopping)


async def test_a_drain_inside_a_work_only_asks(node_dsn: str, role: str) -> None:
    async def work(token: LeaderToken) -> bool:
        answers.append(await election.drain(role))
        await asyncio.Event().wait()
        return True

    answers: list[bool] = []
    async with LeaderElection(node_dsn, role, **STEADY) as election:
        leading = asyncio.ensure_future(election.lead(role, work))
        await until(lambda: election.drained(role) and election.state(role) is LockState.FOLLOWER)
        assert answers == [False]
    assert await bounded(leading) is None


async def test_without_a_database_a_drain_shuts_the_gate_until_it_is_resumed() -> None:
    async with LeaderElection("", ["a", "b"], standalone=True, **STEADY) as election:
        await opens(election, "b")
        assert await bounded(election.drain("a")) is True
        assert [election.gate(name).is_leader for name in ("a", "b")] == [False, True]
        await election.resume()
        assert election.gate("a").is_leader
        with election.gate("a").acting():
            assert await bounded(election.drain(timeout_s=0.01)) is False
