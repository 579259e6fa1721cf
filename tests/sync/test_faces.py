"""What the faces of lock, election and gate promise alike, on a real server and in memory. Guards need a server."""

import asyncio
import contextlib
import threading
import uuid
from typing import Any

import psycopg
import pytest

from pgleaderlock import ConfigurationError, LockNotAcquired, LockState, NotLeader, RetryContext, SchemaError, key_pair
from pgleaderlock.embedded import EmbeddedPostgres
from pgleaderlock.errors import DatabaseError
from pgleaderlock.retry import FixedInterval
from support.elections import PATIENT, fresh_database, ledger_dsns, until
from support.faces import FACES, SERVER_FACES, WAIT_S, Face, Work
from support.server_side import holders, terminate

QUICK: dict[str, Any] = {"retry_strategy": FixedInterval(0.05)}


@pytest.fixture(params=FACES, ids=lambda face: face.name)
def face(request: pytest.FixtureRequest) -> Face:
    found: Face = request.param
    return found


@pytest.fixture(params=SERVER_FACES, ids=lambda face: face.name)
def server_face(request: pytest.FixtureRequest) -> Face:
    """For what the fakes do not have."""
    found: Face = request.param
    return found


@pytest.fixture
def name() -> str:
    return f"face-{uuid.uuid4()}"


@pytest.fixture
def ledger(postgres: EmbeddedPostgres, nothing_left: None) -> str:
    return ledger_dsns(postgres.dsn)["superuser"]


async def ended(task: "asyncio.Task[Any]") -> Any:
    async with asyncio.timeout(WAIT_S):
        return await task


class Twice:
    """A policy that gives up after two attempts."""

    def next_delay_s(self, ctx: RetryContext) -> float | None:
        return 0.01 if ctx.attempt < 2 else None


# --- LeaderLock


async def test_one_leads_until_it_is_shut_down_and_then_the_other(face: Face, dsn: str, name: str) -> None:
    async with face.lock(dsn, name, **QUICK) as second:
        assert await second.wait_for_leadership(WAIT_S)
        async with face.lock(dsn, name, **QUICK) as first:
            assert await first.wait_for_leadership(0.01) is False
            assert (first.is_leader, second.is_leader, second.state) == (False, True, LockState.LEADER)
            await second.shutdown()
            assert await first.wait_for_leadership(WAIT_S)
        assert (first.state, second.is_leader) == (LockState.STOPPED, False)
    assert face.holders(dsn, key_pair(name)) == []


async def test_lead_returns_what_the_work_returns_and_leadership_is_kept(face: Face, dsn: str, name: str) -> None:
    async with face.lock(dsn, name) as lock:
        assert await ended(face.lead(lock, Work(lambda: "done"))) == "done"
        assert lock.is_leader


async def test_what_the_work_raises_is_raised_by_lead(face: Face, dsn: str, name: str) -> None:
    async with face.lock(dsn, name, auto_reacquire=False) as lock:
        with pytest.raises(ZeroDivisionError):
            await ended(face.lead(lock, Work(lambda: 1 // 0)))
        await until(lambda: not face.holders(dsn, key_pair(name)))


async def test_the_work_ends_before_a_step_down_does_and_runs_again_in_the_next_term(
    face: Face, dsn: str, name: str
) -> None:
    work = Work()
    async with face.lock(dsn, name, **QUICK) as lock:
        leading = face.lead(lock, work)
        await work.begun()
        await lock.step_down()
        await work.begun()
        assert len(work.terms) == 2
        await lock.shutdown()
        assert work.running == 0
        assert await ended(leading) is None


async def test_a_session_that_the_server_ends_ends_the_work_and_the_next_term_begins_it_anew(
    face: Face, dsn: str, name: str
) -> None:
    work = Work()
    async with face.lock(dsn, name, **QUICK) as lock:
        leading = face.lead(lock, work)
        await work.begun()
        face.terminate(dsn, key_pair(name))
        await work.begun()
        assert isinstance(lock.last_error, Exception)
    assert await ended(leading) is None


async def test_callbacks_hear_of_a_term_in_its_order(face: Face, dsn: str, name: str) -> None:
    heard: list[Any] = []
    lock = face.lock(dsn, name)
    for event in ("on_acquired", "on_released", "on_lost", "on_stopped"):
        getattr(lock, event)(lambda event=event: heard.append(event))
    lock.on_state_change(lambda old, new: heard.append(new))
    async with lock:
        assert await lock.wait_for_leadership(WAIT_S)
    assert [what for what in heard if isinstance(what, str)] == ["on_acquired", "on_released", "on_stopped"]
    assert heard.index(LockState.LEADER) < heard.index("on_acquired") < heard.index(LockState.STOPPED)


async def test_a_callback_may_ask_for_the_end_of_its_own_lock(face: Face, dsn: str, name: str) -> None:
    lock, stopped = face.lock(dsn, name), threading.Event()
    lock.on_acquired(lock.made.shutdown if face.blocking else lock.shutdown)
    lock.on_stopped(stopped.set)
    await lock.start()
    assert await asyncio.to_thread(stopped.wait, WAIT_S)
    await until(lambda: lock.state is LockState.STOPPED)


async def test_a_callback_that_raises_is_told_to_on_error_and_stops_nothing(face: Face, dsn: str, name: str) -> None:
    errors: list[Exception] = []
    lock = face.lock(dsn, name)
    lock.on_acquired(lambda: 1 // 0)
    lock.on_error(errors.append)
    async with lock:
        assert await lock.wait_for_leadership(WAIT_S)
        await until(lambda: errors)
        assert lock.is_leader
    assert isinstance(errors[0], ZeroDivisionError)


async def test_an_exception_in_the_block_leaves_it_and_the_lock_is_released(face: Face, dsn: str, name: str) -> None:
    async def body() -> None:
        async with face.lock(dsn, name) as lock:
            assert await lock.wait_for_leadership(WAIT_S)
            raise KeyError

    with pytest.raises(KeyError):
        await body()
    assert face.holders(dsn, key_pair(name)) == []


async def test_a_wrong_setting_is_refused_before_anything_is_connected(face: Face, dsn: str, name: str) -> None:
    with pytest.raises(ConfigurationError, match="health_interval_s"):
        face.lock(dsn, name, health_interval_s=-1)
    with pytest.raises(ConfigurationError, match="heartbeat_interval_s"):
        face.election(dsn, name, heartbeat_interval_s=-1)
    with pytest.raises(ConfigurationError, match="timeout_s"):
        await face.lock(dsn, name).shutdown(-1)


async def test_a_lock_is_started_again_after_its_end(face: Face, dsn: str, name: str) -> None:
    lock = face.lock(dsn, name)
    for _ in range(2):
        async with lock:
            assert await lock.wait_for_leadership(WAIT_S)
        assert lock.state is LockState.STOPPED


# --- LeaderElection and its gate


async def test_one_gate_is_open_and_the_other_says_why_not(face: Face, ledger: str, name: str) -> None:
    async with face.election(ledger, name, **PATIENT) as leader:
        gate = face.gate(leader, name)
        assert await gate.wait_open(WAIT_S)
        token = gate.require_leader()
        async with face.election(ledger, name, node_id="other", **PATIENT) as follower:
            await until(lambda: follower.leader(name))
            assert follower.leader(name).epoch == token.epoch == gate.current_epoch
            other = face.gate(follower, name)
            assert await other.wait_open(0.01) is False
            with pytest.raises(NotLeader) as refused:
                other.require_leader()
        assert (refused.value.reason, other.blocked) == ("never_led", {"never_led": 1})
        gate.ensure_epoch(token.epoch)
        with pytest.raises(NotLeader):
            gate.ensure_epoch(token.epoch + 1)
    assert (gate.is_leader, gate.shut_because) == (False, "released")


async def test_each_term_of_a_work_has_its_token_and_epochs_rise(face: Face, ledger: str, name: str) -> None:
    work = Work()
    async with face.election(ledger, name, **PATIENT) as election:
        leading = face.lead(election, name, work)
        await work.begun()
        await election.step_down(name)
        await work.begun()
        (first,), (second,) = work.terms
        assert (first.role, second.epoch) == (name, first.epoch + 1)
    assert await ended(leading) is None
    assert work.running == 0


async def test_a_drained_role_is_not_led_until_it_is_resumed(face: Face, ledger: str, name: str) -> None:
    async with face.election(ledger, name, **PATIENT) as election:
        gate = face.gate(election, name)
        assert await gate.wait_open(WAIT_S)
        assert await election.drain(name) is True
        assert (election.drained(name), gate.shut_because) == (True, "released")
        await election.resume(name)
        assert await gate.wait_open(WAIT_S)


async def test_a_drain_waits_for_what_is_acting(face: Face, ledger: str, name: str) -> None:
    async with face.election(ledger, name, **PATIENT) as election:
        gate = face.gate(election, name)
        assert await gate.wait_open(WAIT_S)
        with gate.acting():
            draining = asyncio.ensure_future(election.drain(name))
            await until(lambda: gate.shut_because == "draining")
            assert gate.in_flight == 1
            assert not draining.done()
        assert await ended(draining) is True


async def test_a_veto_shuts_the_gate_until_it_is_lifted(face: Face, ledger: str, name: str) -> None:
    async with face.election(ledger, name, **PATIENT) as election:
        gate = face.gate(election, name)
        assert await gate.wait_open(WAIT_S)
        token = gate.require_leader()
        gate.disable()
        assert gate.shut_because == "vetoed"
        gate.enable(token)
        assert gate.is_leader


async def test_every_change_is_told(face: Face, ledger: str, name: str) -> None:
    election = face.election(ledger, name, **PATIENT)
    async with contextlib.aclosing(election.changes()) as changes, asyncio.timeout(WAIT_S):
        first = asyncio.ensure_future(anext(changes))
        await asyncio.sleep(0)
        await election.start()
        try:
            seen = [await first]
            while not seen[-1].is_leader:
                seen.append(await anext(changes))
            assert (seen[-1].role, seen[-1].epoch) == (name, face.gate(election, name).current_epoch)
        finally:
            await election.shutdown()


async def test_a_database_without_a_ledger_is_refused_at_the_start(server_face: Face, dsn: str, name: str) -> None:
    with fresh_database(dsn) as empty, pytest.raises(SchemaError):
        await server_face.election(empty, name).start()


async def test_a_role_is_added_and_removed_while_it_runs(face: Face, ledger: str, name: str) -> None:
    async with face.election(ledger, name, **PATIENT) as election:
        await election.add_role(f"{name}-more")
        assert await face.gate(election, f"{name}-more").wait_open(WAIT_S)
        await election.remove_role(f"{name}-more")
        assert election.roles == (name,)
        with pytest.raises(ConfigurationError, match="not one of this election's"):
            election.gate(f"{name}-more")


async def test_an_election_hears_callbacks_with_the_role(face: Face, ledger: str, name: str) -> None:
    heard: list[Any] = []
    election = face.election(ledger, name, **PATIENT)
    election.on_acquired(lambda role: heard.append(("acquired", role)))
    election.on_released(lambda role: heard.append(("released", role)))
    election.on_stopped(lambda: heard.append("stopped"))
    async with election:
        assert await face.gate(election, name).wait_open(WAIT_S)
    assert heard == [("acquired", name), ("released", name), "stopped"]


# --- The guard


async def _borrowed(face: Face, stack: contextlib.AsyncExitStack, dsn: str) -> Any:
    if face.blocking:
        return stack.enter_context(psycopg.connect(dsn, autocommit=True))
    return await stack.enter_async_context(await psycopg.AsyncConnection.connect(dsn, autocommit=True))


async def test_a_guard_on_a_borrowed_connection_is_refused_to_a_second(server_face: Face, dsn: str, name: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        first, second = [await _borrowed(server_face, stack, dsn) for _ in range(2)]
        guard = await server_face.guard("acquire_leadership", first, name)
        assert (guard.held, await guard.check(), guard.name, guard.key) == (True, True, name, key_pair(name))
        with pytest.raises(LockNotAcquired) as refused:
            await server_face.guard("acquire_leadership", second, name)
        assert refused.value.holder_pid == first.info.backend_pid
        await guard.release()
        await guard.release()
        assert (guard.held, await guard.check()) == (False, False)
        async with await server_face.guard("acquire_leadership", second, name) as later:
            assert await later.check()


async def test_a_guard_of_its_own_connection_waits_and_is_released_with_it(
    server_face: Face, dsn: str, name: str
) -> None:
    guard = await server_face.guard("acquire_leadership_blocking", dsn, name, WAIT_S)
    with pytest.raises(LockNotAcquired):
        await server_face.guard("acquire_leadership_blocking", dsn, name, 0.01)
    waiting = asyncio.ensure_future(server_face.guard("acquire_leadership_blocking", dsn, name))
    await guard.release()
    async with await ended(waiting) as successor:
        assert await successor.check()
    assert holders(dsn, key_pair(name)) == []


async def test_a_policy_that_gives_up_says_who_leads(server_face: Face, dsn: str, name: str) -> None:
    async with await server_face.guard("acquire_leadership_with_retry", dsn, name, FixedInterval(0.01)):
        with pytest.raises(LockNotAcquired):
            await server_face.guard("acquire_leadership_with_retry", dsn, name, Twice())


async def test_the_loss_of_a_guards_session_is_noticed_and_told_at_its_release(
    server_face: Face, dsn: str, name: str
) -> None:
    guard = await server_face.guard("acquire_leadership_blocking", dsn, name)
    losing = asyncio.ensure_future(guard.lost())
    terminate(dsn, key_pair(name))
    await ended(losing)
    assert (guard.held, await guard.check()) == (False, False)
    with pytest.raises(DatabaseError, match="lost before it was released"):
        await guard.release()
