"""The hand-written table once more, driven through a whole `LeaderLock`: in a scripted world, and on a real PostgreSQL.

A scenario brings a lock into a row's source state, says `mark()`, makes the row's input happen and waits for the signal
that it did. What must follow from it is in the row. The clock is ours on both kinds of server: nothing else happens.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Unpack

import psycopg
import pytest

from pgleaderlock import LeaderLock, LockState, RetryContext
from pgleaderlock._lock.fsm import Action
from pgleaderlock._pg.session import DedicatedSession
from pgleaderlock.lock import LockOptions
from support.fakes import FakeClock, FakeDatabase, Gate, Recorder, limit, until, until_answer
from support.lock_table import ACQUIRING, FOLLOWER, LEADER, RECONNECTING, RELEASING, ROWS, STOPPED, Expected

KEYS = (20_011, 7)
DOWN = psycopg.OperationalError("the server is down")
INTERVAL_S = 5.0
GRACE_S = 30.0
DELAY_S = 60.0

# --- The fake is trusted only after it has passed the suite that the real one passes


@pytest.fixture(params=["fake", "psycopg"])
async def connect(request: pytest.FixtureRequest) -> AsyncIterator[Callable[[], Awaitable[Any]]]:
    opened: list[Any] = []
    if request.param == "fake":
        opening: Callable[[], Awaitable[Any]] = FakeDatabase().connect
    else:
        dsn: str = request.getfixturevalue("dsn")

        async def opening() -> Any:
            return await psycopg.AsyncConnection.connect(dsn, autocommit=True)

    async def connect_and_remember() -> Any:
        opened.append(await opening())
        return opened[-1]

    yield connect_and_remember
    for connection in opened:
        await connection.close()


async def _ask(connection: Any, sql: str, params: tuple[int, int] | None = KEYS) -> Any:
    cursor = await connection.execute(sql, params)
    return await cursor.fetchone()


TRY, UNLOCK, PROBE = "SELECT pg_try_advisory_lock(%s, %s)", "SELECT pg_advisory_unlock(%s, %s)", "SELECT 1"


async def test_conformance_a_lock_is_held_by_one_session_at_a_time(connect: Callable[[], Awaitable[Any]]) -> None:
    one, two = await connect(), await connect()
    assert await _ask(one, TRY) == (True,)
    assert await _ask(two, TRY) == (False,)
    assert await _ask(two, TRY, (KEYS[0], KEYS[1] + 1)) == (True,)
    assert await _ask(two, UNLOCK, (KEYS[0], KEYS[1] + 1)) == (True,)
    assert await _ask(one, UNLOCK) == (True,)
    assert await _ask(two, TRY) == (True,)


async def test_conformance_a_lock_counts_its_holds(connect: Callable[[], Awaitable[Any]]) -> None:
    one, two = await connect(), await connect()
    assert [await _ask(one, TRY), await _ask(one, TRY), await _ask(one, UNLOCK)] == [(True,)] * 3
    assert await _ask(two, TRY) == (False,)
    assert await _ask(one, UNLOCK) == (True,)
    assert await _ask(two, TRY) == (True,)


async def test_conformance_only_the_holder_can_unlock(connect: Callable[[], Awaitable[Any]]) -> None:
    one, two = await connect(), await connect()
    assert await _ask(one, UNLOCK) == (False,)
    assert await _ask(one, TRY) == (True,)
    assert await _ask(two, UNLOCK) == (False,)
    assert await _ask(two, TRY) == (False,)


async def test_conformance_a_closed_session_holds_nothing_and_answers_nothing(
    connect: Callable[[], Awaitable[Any]],
) -> None:
    one, two = await connect(), await connect()
    assert one.closed is False
    assert await _ask(one, PROBE, None) == (1,)
    assert await _ask(one, TRY) == (True,)
    await one.close()
    await one.close()
    assert one.closed is True

    async def free() -> bool:
        return bool(await _ask(two, TRY) == (True,))

    await until_answer(free)
    with pytest.raises(psycopg.OperationalError):
        await _ask(one, PROBE, None)


# --- The stage on which a scenario plays


class Patience:
    """Waits for `delay_s`, or gives up when told to."""

    def __init__(self) -> None:
        self.delay_s: float | None = DELAY_S

    def next_delay_s(self, ctx: RetryContext) -> float | None:
        return self.delay_s


class Stage:
    """A lock, its clock, and what it has told since the mark."""

    lock: LeaderLock
    recorder: Recorder

    def __init__(self, row: Expected) -> None:
        self.row = row
        self.clock = FakeClock()
        self.patience = Patience()
        self.options: LockOptions = {
            "retry_strategy": self.patience,
            "health_interval_s": INTERVAL_S,
            "standby_wait_s": 0,
            "auto_reacquire": row.when.get("auto_reacquire", True),
            "reconnect_grace_s": GRACE_S if row.when.get("grace", row.source is RECONNECTING) else None,
        }
        self._marked: int | None = None
        self._asked: list[asyncio.Task[None]] = []
        self.gates: list[Gate] = []

    def build(self, dsn: Any, **options: Unpack[LockOptions]) -> None:
        self.options.update(options)
        self.lock = LeaderLock(dsn, *KEYS, **self.options)
        self.lock._clock = self.clock
        self.recorder = Recorder(self.lock)

    def mark(self) -> None:
        """The source state is reached, and everything about the way here has been told."""
        assert self.lock.state is self.row.source
        self._marked = len(self.recorder.calls)

    def mark_after(self, *calls: str) -> None:
        """The same for a source state that is passed through at once: these calls led to it."""
        assert tuple(self.recorder.calls[: len(calls)]) == calls
        self._marked = len(calls)

    def since_mark(self) -> list[str]:
        assert self._marked is not None, "the scenario must say when it has reached the source state"
        return self.recorder.calls[self._marked :]

    async def told(self) -> None:
        """Return once every callback so far has run."""
        if self.lock._run is not None:
            async with limit():
                await self.lock._run.dispatcher.drained()

    async def reach(self, state: LockState) -> None:
        await until(lambda: self.lock.state is state)
        if state is STOPPED is not self.row.source:
            await self.recorder.seen("on_stopped")  # once the connection is closed
        await self.told()

    async def lead(self) -> None:
        await self.lock.start()
        async with limit():
            assert await self.lock.wait_for_leadership()
        await self.told()

    def ask(self, request: Coroutine[Any, Any, None]) -> None:
        """Make a request that returns only when it was carried out; the scenario goes on meanwhile."""
        self._asked.append(asyncio.create_task(request))

    def ask_for_release(self) -> None:
        self.ask(self.lock.shutdown() if self.row.when.get("stopping", False) else self.lock.step_down())

    async def end(self) -> None:
        for gate in self.gates:
            gate.open()
        async with limit():
            await self.lock.shutdown()
            await asyncio.gather(*self._asked)

    def check_calls(self, *, passes: bool) -> None:
        change = [] if self.row.source is self.row.target else [f"{self.row.source.value}>{self.row.target.value}"]
        expected = [*change, *self.row.emits]
        heard = self.since_mark()
        if passes:  # the target state lasts for a round trip only, so more may have been told by now
            assert heard[: len(expected)] == expected
        else:
            assert heard == expected
            assert self.lock.state is self.row.target

    async def check_delay(self) -> None:
        """What the row says about the next attempt is what the clock is asked for."""
        if Action.ATTEMPT_SOON in self.row.does:
            assert 0 < await self.clock.somebody_sleeps() <= 0.1
        if Action.BACK_OFF in self.row.does:
            assert await self.clock.somebody_sleeps() == DELAY_S
        if Action.BACK_OFF_JITTERED in self.row.does and self.row.target is FOLLOWER:
            assert DELAY_S < await self.clock.somebody_sleeps() <= DELAY_S * 1.2
        if self.row.target is LEADER is not self.row.source:
            assert await self.clock.somebody_sleeps() == INTERVAL_S
        if Action.START_GRACE in self.row.does:
            await until(lambda: len(self.clock.waits_s()) == 2)
            assert self.clock.waits_s()[1] == GRACE_S


# --- The scripted world


class FailsWhenOpened(Gate):
    async def pass_through(self) -> None:
        await super().pass_through()
        raise DOWN


class FakeStage(Stage):
    def __init__(self, row: Expected) -> None:
        super().__init__(row)
        self.db = FakeDatabase()
        self.build("", connect_fn=self.db.connect)

    def gate(self, kind: str, gate: Gate | None = None) -> Gate:
        gate = gate or Gate()
        self.gates.append(gate)
        self.db.script(kind, gate)
        return gate

    async def follow(self) -> None:
        """FOLLOWER, after an attempt that somebody else was in the way of."""
        self.db.script("try", (False,))
        await self.lock.start()
        await self.recorder.seen("on_acquire_failed")
        await self.clock.somebody_sleeps()
        await self.told()

    async def acquire(self, gate: Gate | None = None) -> Gate:
        """ACQUIRING, with the try on its way."""
        gate = self.gate("try", gate)
        await self.lock.start()
        await gate.reached()
        await self.told()
        return gate

    async def fail_probe(self, how: object = DOWN) -> None:
        self.db.script("probe", how)
        await self.clock.somebody_sleeps()
        self.clock.advance(INTERVAL_S)

    async def reconnect(self, *connects: object) -> None:
        """RECONNECTING, before the first connect; what becomes of the connects is scripted."""
        await self.lead()
        self.db.script("connect", *connects)
        await self.fail_probe()
        await self.reach(RECONNECTING)
        await until(lambda: len(self.clock.waits_s()) == 2)  # the first connect's delay, and the end of the grace

    async def release(self, gate: Gate | None = None) -> Gate:
        """RELEASING, with the unlock on its way."""
        await self.lead()
        gate = self.gate("unlock", gate)
        self.ask_for_release()
        await gate.reached()
        await self.told()
        return gate

    async def somebody_else_leads(self) -> Any:
        other = await self.db.connect()
        await other.execute("SELECT pg_try_advisory_lock(%s, %s)", KEYS)
        return other


FakeScenario = Callable[[FakeStage], Awaitable[None]]
FAKE: dict[str, FakeScenario] = {}


def fake(*row_ids: str) -> Callable[[FakeScenario], FakeScenario]:
    def register(scenario: FakeScenario) -> FakeScenario:
        FAKE.update(dict.fromkeys(row_ids, scenario))
        return scenario

    return register


@fake("STOPPED x Start")
async def _start(stage: FakeStage) -> None:
    stage.gate("connect")
    stage.mark()
    await stage.lock.start()
    assert stage.lock.state is FOLLOWER  # before the task has had its first turn
    await stage.db.seen("connect")


@fake("FOLLOWER x AcquireAttempt")
async def _attempt(stage: FakeStage) -> None:
    await stage.follow()
    gate = stage.gate("try")
    stage.mark()
    stage.clock.advance(DELAY_S)
    await gate.reached()
    assert stage.db.log == ["connect", "try", "try"]


@fake("FOLLOWER x StopRequested")
async def _stop_follower(stage: FakeStage) -> None:
    await stage.follow()
    stage.mark()
    await stage.lock.shutdown()


@fake("ACQUIRING x AcquireSucceeded")
async def _acquire_succeeds(stage: FakeStage) -> None:
    gate = await stage.acquire()
    stage.mark()
    gate.open()


@fake("ACQUIRING x AcquireFailed, no standby_wait")
async def _acquire_fails(stage: FakeStage) -> None:
    other = await stage.somebody_else_leads()
    gate = await stage.acquire()
    stage.mark()
    gate.open()
    await stage.reach(FOLLOWER)
    assert len(stage.db.open_connections()) == 2  # ours is kept for the next attempt
    await other.close()


@fake("ACQUIRING x DbError, auto_reacquire", "ACQUIRING x DbError, no auto_reacquire")
async def _acquire_breaks(stage: FakeStage) -> None:
    gate = await stage.acquire(FailsWhenOpened())
    stage.mark()
    gate.open()


@fake("ACQUIRING x StopRequested")
async def _stop_acquiring(stage: FakeStage) -> None:
    await stage.acquire()
    stage.mark()
    await stage.lock.shutdown()


@fake("LEADER x HealthOk")
async def _healthy(stage: FakeStage) -> None:
    await stage.lead()
    stage.mark()
    assert await stage.clock.somebody_sleeps() == INTERVAL_S
    stage.clock.advance(INTERVAL_S)
    await stage.db.seen("probe")
    assert await stage.clock.somebody_sleeps() == INTERVAL_S  # and the next one is due


@fake(
    "LEADER x HealthFailed, grace",
    "LEADER x HealthFailed, no grace, auto_reacquire",
    "LEADER x HealthFailed, no grace, no auto_reacquire",
)
async def _unhealthy(stage: FakeStage) -> None:
    await stage.lead()
    stage.mark()
    await stage.fail_probe()


@fake(
    "LEADER x DbError, grace",
    "LEADER x DbError, no grace, auto_reacquire",
    "LEADER x DbError, no grace, no auto_reacquire",
)
async def _leader_meets_nonsense(stage: FakeStage) -> None:
    await stage.lead()
    stage.mark()
    await stage.fail_probe(how=42)  # no row at all: neither an answer nor a broken connection


@fake("LEADER x StopRequested")
async def _stop_leader(stage: FakeStage) -> None:
    await stage.lead()
    gate = stage.gate("unlock")
    stage.mark()
    stage.ask(stage.lock.shutdown())
    await gate.reached()
    assert stage.lock.is_leader is False


@fake("LEADER x ReleaseRequested")
async def _release_leader(stage: FakeStage) -> None:
    await stage.lead()
    gate = stage.gate("unlock")
    stage.mark()
    stage.ask(stage.lock.step_down())
    await gate.reached()
    assert stage.lock.is_leader is False


@fake("RECONNECTING x ReacquireSucceeded")
async def _recover(stage: FakeStage) -> None:
    await stage.reconnect()
    assert stage.lock.is_leader is False
    stage.mark()
    stage.clock.advance(1)
    await stage.reach(LEADER)
    assert stage.lock.is_leader is True
    assert stage.db.log == ["connect", "try", "probe", "close", "connect", "try"]


@fake("RECONNECTING x ReacquireFailed, auto_reacquire", "RECONNECTING x ReacquireFailed, no auto_reacquire")
async def _overtaken(stage: FakeStage) -> None:
    await stage.reconnect()
    other = await stage.somebody_else_leads()
    stage.mark()
    stage.clock.advance(1)
    await stage.reach(stage.row.target)
    await other.close()


@fake("RECONNECTING x GraceExpired, auto_reacquire", "RECONNECTING x GraceExpired, no auto_reacquire")
async def _grace_runs_out(stage: FakeStage) -> None:
    gate = stage.gate("connect")
    stage.db._script["connect"].clear()
    await stage.reconnect(gate)
    stage.clock.advance(1)
    await gate.reached()
    stage.mark()
    stage.clock.advance(GRACE_S)


@fake("RECONNECTING x StopRequested")
async def _stop_reconnecting(stage: FakeStage) -> None:
    await stage.reconnect()
    stage.mark()
    await stage.lock.shutdown()


@fake(
    "RELEASING x ReleaseSucceeded, stopping",
    "RELEASING x ReleaseSucceeded, no stopping, no auto_reacquire",
    "RELEASING x ReleaseSucceeded, no stopping, auto_reacquire",
)
async def _released(stage: FakeStage) -> None:
    gate = await stage.release()
    stage.mark()
    gate.open()
    await stage.db.seen("close")
    assert stage.db.log == ["connect", "try", "unlock", "close"]


@fake(
    "RELEASING x ReleaseFailed, stopping",
    "RELEASING x ReleaseFailed, no stopping, no auto_reacquire",
    "RELEASING x ReleaseFailed, no stopping, auto_reacquire",
)
async def _not_released(stage: FakeStage) -> None:
    gate = await stage.release()
    stage.db._holds[KEYS].clear()  # somebody called pg_advisory_unlock_all() behind our back
    stage.mark()
    gate.open()


@fake(
    "RELEASING x DbError, stopping",
    "RELEASING x DbError, no stopping, no auto_reacquire",
    "RELEASING x DbError, no stopping, auto_reacquire",
)
async def _release_breaks(stage: FakeStage) -> None:
    gate = await stage.release(FailsWhenOpened())
    stage.mark()
    gate.open()


@fake("FOLLOWER x DbError")
async def _connect_fails(stage: FakeStage) -> None:
    gate = stage.gate("connect", FailsWhenOpened())
    await stage.lock.start()
    await gate.reached()
    await stage.told()
    stage.mark()
    gate.open()
    await stage.recorder.seen("on_error")


@fake("FOLLOWER x GaveUp")
async def _give_up(stage: FakeStage) -> None:
    stage.db.script("connect", DOWN)
    stage.patience.delay_s = None
    await stage.lock.start()
    await stage.recorder.seen("on_stopped")
    stage.mark_after("stopped>follower", "on_error")


@fake("RECONNECTING x DbError")
async def _reconnect_fails(stage: FakeStage) -> None:
    await stage.reconnect(DOWN, DOWN)
    stage.patience.delay_s = 2.0
    stage.mark()
    for connects in (2, 3):
        stage.clock.advance(3)
        await stage.db.seen("connect", connects)
        await until(lambda: len(stage.clock.waits_s()) == 2)
    assert 2.0 < stage.clock.waits_s()[0] <= 2.4  # the strategy's delay, jittered


@fake("RECONNECTING x GaveUp")
async def _give_up_reconnecting(stage: FakeStage) -> None:
    await stage.reconnect(DOWN)
    stage.patience.delay_s = None
    stage.mark()
    stage.clock.advance(1)


@fake("RELEASING x StopRequested")
async def _stop_while_releasing(stage: FakeStage) -> None:
    await stage.release()
    stage.mark()
    stage.ask(stage.lock.shutdown())
    await until(lambda: stage.lock._run is not None and stage.lock._run.driver.stopping)


@fake("STOPPED x StopRequested")
async def _stop_stopped(stage: FakeStage) -> None:
    stage.mark()
    await stage.lock.shutdown()


@fake("STOPPED x ReleaseRequested")
async def _release_stopped(stage: FakeStage) -> None:
    stage.mark()
    await stage.lock.step_down()


async def _bring_to_source(stage: FakeStage) -> None:
    match stage.row.source:
        case LockState.FOLLOWER:
            await stage.follow()
        case LockState.ACQUIRING:
            await stage.acquire()
        case LockState.LEADER:
            await stage.lead()
        case LockState.RECONNECTING:
            await stage.reconnect()
        case LockState.RELEASING:
            await stage.release()


@fake("FOLLOWER x Start", "ACQUIRING x Start", "LEADER x Start", "RECONNECTING x Start", "RELEASING x Start")
async def _start_again(stage: FakeStage) -> None:
    await _bring_to_source(stage)
    said = list(stage.db.log)
    stage.mark()
    await stage.lock.start()
    assert stage.db.log == said


@fake("FOLLOWER x ReleaseRequested", "ACQUIRING x ReleaseRequested", "RECONNECTING x ReleaseRequested")
async def _step_down_without_leading(stage: FakeStage) -> None:
    await _bring_to_source(stage)
    stage.mark()
    await stage.lock.step_down()


@fake("RELEASING x ReleaseRequested")
async def _step_down_twice(stage: FakeStage) -> None:
    await stage.release()
    stage.mark()
    stage.ask(stage.lock.step_down())
    await asyncio.sleep(0)
    assert stage.db.log.count("unlock") == 1


# A connection from connect_fn cannot wait at the server.
IN_THE_SCRIPTED_WORLD = [row for row in ROWS if not row.when.get("standby_wait", False)]


def test_every_row_of_the_table_has_a_scenario() -> None:
    assert set(FAKE) == {row.id for row in IN_THE_SCRIPTED_WORLD}
    assert {row.id for row in ROWS} - set(FAKE) == {"ACQUIRING x AcquireFailed, standby_wait"} <= set(ON_POSTGRES)


@pytest.mark.parametrize("row", IN_THE_SCRIPTED_WORLD, ids=lambda row: row.id)
async def test_a_lock_in_a_scripted_world_follows_the_table(row: Expected) -> None:
    stage = FakeStage(row)
    await FAKE[row.id](stage)
    await stage.reach(row.target)
    stage.check_calls(passes=False)
    await stage.check_delay()
    if Action.CLOSE in row.does:
        await until(lambda: not stage.db.open_connections())
    if row.target is ACQUIRING is not row.source:
        assert stage.db.log[-1] == "try"
    if row.target is RELEASING is not row.source:
        assert stage.db.log[-1] == "unlock"
    await stage.end()
    assert stage.lock.state is STOPPED
    assert stage.db.open_connections() == []


async def test_stop_while_releasing_ends_in_stopped_although_a_step_down_began_it() -> None:
    stage = FakeStage(next(row for row in ROWS if row.id == "RELEASING x StopRequested"))
    await _stop_while_releasing(stage)
    await stage.end()
    assert stage.since_mark() == ["releasing>stopped", "on_released", "on_stopped"]


async def test_a_forced_release_counts_as_released() -> None:
    stage = FakeStage(next(row for row in ROWS if row.id == "LEADER x ReleaseRequested"))
    await stage.lead()
    stage.mark()
    stage.gate("unlock")
    await stage.lock.step_down(timeout_s=0)
    await stage.told()
    assert stage.since_mark() == ["leader>releasing", "releasing>follower", "on_released"]
    assert stage.db.open_connections() == []
    assert await stage.clock.somebody_sleeps() == DELAY_S
    await stage.end()


# --- The same on a real server


class RealStage(Stage):
    """On a real PostgreSQL, where the target state may last for one round trip only."""

    passes = False

    def __init__(self, row: Expected, dsn: str, admin: psycopg.AsyncConnection[Any]) -> None:
        super().__init__(row)
        self.dsn = dsn
        self.admin = admin
        self.build(dsn)

    async def follow(self) -> None:
        await self.somebody_else_leads()
        await self.lock.start()
        await self.recorder.seen("on_acquire_failed")
        await self.clock.somebody_sleeps()
        await self.told()

    async def somebody_else_leads(self) -> None:
        await until_answer(lambda: self._admin("SELECT pg_try_advisory_lock(%s, %s)", *KEYS))

    async def nobody_else_leads(self) -> None:
        assert await self._admin("SELECT pg_advisory_unlock(%s, %s)", *KEYS)

    async def cut(self) -> None:
        """End the lock's session at the server."""
        pid = self.session()._backend_pid
        assert await self._admin("SELECT pg_terminate_backend(%s, 5000)", pid)

    async def park(self, standby_wait_s: float = 5.0) -> None:
        """ACQUIRING, waiting at the server behind somebody else."""
        self.build(self.dsn, standby_wait_s=standby_wait_s)
        await self.somebody_else_leads()
        await self.lock.start()
        await until_answer(
            lambda: self._admin("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
        )
        await self.told()

    async def reconnect(self) -> None:
        await self.lead()
        await self.cut()
        await self.reach(RECONNECTING)
        await until(lambda: len(self.clock.waits_s()) == 2)

    async def hold_release(self) -> Gate:
        """RELEASING, with the unlock waiting for a callback."""
        gate = Gate()
        self.gates.append(gate)

        @self.lock.on_state_change
        async def hold(_: LockState, target: LockState) -> None:
            if target is RELEASING:
                await gate.pass_through()

        await self.lead()
        self.ask_for_release()
        await gate.reached()
        return gate

    def session(self) -> DedicatedSession:
        assert self.lock._run is not None
        session = self.lock._run._session
        assert isinstance(session, DedicatedSession)
        return session

    async def locked_by_us(self) -> bool:
        return bool(
            await self._admin(
                "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted AND pid <> pg_backend_pid()"
            )
        )

    async def no_session(self) -> bool:
        mine = "SELECT count(*) = 0 FROM pg_stat_activity WHERE application_name LIKE 'pgleaderlock 20011/%%'"
        return bool(await self._admin(mine))

    async def _admin(self, sql: Any, *params: object) -> Any:
        row = await (await self.admin.execute(sql, params)).fetchone()
        assert row is not None
        return row[0]


@dataclass
class Unreachable:
    """A DSN that leads to the server until it is told not to."""

    dsn: str
    gone: bool = False

    def __call__(self) -> str:
        return "host=127.0.0.1 port=1 dbname=nowhere" if self.gone else self.dsn


RealScenario = Callable[[RealStage], Awaitable[None]]
ON_POSTGRES: dict[str, RealScenario] = {}


def real(*row_ids: str) -> Callable[[RealScenario], RealScenario]:
    def register(scenario: RealScenario) -> RealScenario:
        ON_POSTGRES.update(dict.fromkeys(row_ids, scenario))
        return scenario

    return register


@real("STOPPED x Start")
async def _real_start(stage: RealStage) -> None:
    stage.passes = True
    stage.mark()
    await stage.lead()


@real("FOLLOWER x AcquireAttempt")
async def _real_attempt(stage: RealStage) -> None:
    stage.passes = True
    await stage.follow()
    await stage.nobody_else_leads()
    stage.mark()
    stage.clock.advance(DELAY_S)
    await stage.recorder.seen("on_acquired")
    assert await stage.locked_by_us()


@real("FOLLOWER x StopRequested")
async def _real_stop_follower(stage: RealStage) -> None:
    await stage.follow()
    stage.mark()
    await stage.lock.shutdown()


@real("ACQUIRING x AcquireSucceeded")
async def _real_acquire(stage: RealStage) -> None:
    await stage.lead()
    stage.mark_after("stopped>follower", "follower>acquiring")
    assert await stage.locked_by_us()


@real("ACQUIRING x AcquireFailed, no standby_wait")
async def _real_acquire_fails(stage: RealStage) -> None:
    await stage.follow()
    stage.mark_after("stopped>follower", "follower>acquiring")


@real("ACQUIRING x AcquireFailed, standby_wait")
async def _real_wait_at_the_server_ends(stage: RealStage) -> None:
    stage.passes = True
    await stage.park(standby_wait_s=0.05)
    stage.mark()
    stage.clock.jump(1)
    await stage.recorder.seen("follower>acquiring", 3)  # at once: the clock stands still


@real("ACQUIRING x DbError, auto_reacquire", "ACQUIRING x DbError, no auto_reacquire")
async def _real_acquire_breaks(stage: RealStage) -> None:
    await stage.park()
    stage.mark()
    await stage.cut()


@real("ACQUIRING x StopRequested")
async def _real_stop_acquiring(stage: RealStage) -> None:
    await stage.park()
    stage.mark()
    await stage.lock.shutdown()


@real("LEADER x HealthOk")
async def _real_healthy(stage: RealStage) -> None:
    await stage.lead()
    run = stage.lock._run
    assert run is not None
    stage.mark()
    assert await stage.clock.somebody_sleeps() == INTERVAL_S
    stage.clock.advance(INTERVAL_S)
    await until(lambda: run.trusted_until == stage.clock.now() + 2 * INTERVAL_S)
    assert await stage.clock.somebody_sleeps() == INTERVAL_S


@real(
    "LEADER x HealthFailed, grace",
    "LEADER x HealthFailed, no grace, auto_reacquire",
    "LEADER x HealthFailed, no grace, no auto_reacquire",
)
async def _real_unhealthy(stage: RealStage) -> None:
    await stage.lead()
    stage.mark()
    await stage.cut()


@real("LEADER x StopRequested")
async def _real_stop_leader(stage: RealStage) -> None:
    stage.passes = True
    await stage.lead()
    stage.mark()
    await stage.lock.shutdown()


@real("LEADER x ReleaseRequested")
async def _real_release(stage: RealStage) -> None:
    stage.passes = True
    await stage.lead()
    stage.mark()
    await stage.lock.step_down()
    assert not await stage.locked_by_us()


@real("RECONNECTING x ReacquireSucceeded")
async def _real_recover(stage: RealStage) -> None:
    await stage.reconnect()
    stage.mark()
    stage.clock.advance(1)
    await stage.reach(LEADER)
    assert await stage.locked_by_us()


@real("RECONNECTING x ReacquireFailed, auto_reacquire", "RECONNECTING x ReacquireFailed, no auto_reacquire")
async def _real_overtaken(stage: RealStage) -> None:
    await stage.reconnect()
    await stage.somebody_else_leads()
    stage.mark()
    stage.clock.advance(1)


@real("RECONNECTING x GraceExpired, auto_reacquire", "RECONNECTING x GraceExpired, no auto_reacquire")
async def _real_grace_runs_out(stage: RealStage) -> None:
    stage.build(dsn := Unreachable(stage.dsn))
    await stage.reconnect()
    dsn.gone = True
    stage.mark()
    stage.clock.advance(1)
    await until(lambda: "refused" in str(stage.lock.last_error))
    assert stage.lock.state is RECONNECTING
    await until(lambda: len(stage.clock.waits_s()) == 2)  # the next connect's delay, and the end of the grace
    stage.clock.advance(GRACE_S)


@real("RECONNECTING x GaveUp")
async def _real_give_up_reconnecting(stage: RealStage) -> None:
    stage.build(dsn := Unreachable(stage.dsn))
    await stage.reconnect()
    dsn.gone = True
    stage.patience.delay_s = None
    stage.mark()
    stage.clock.advance(1)


@real("RECONNECTING x StopRequested")
async def _real_stop_reconnecting(stage: RealStage) -> None:
    await stage.reconnect()
    stage.mark()
    await stage.lock.shutdown()


@real(
    "RELEASING x ReleaseSucceeded, stopping",
    "RELEASING x ReleaseSucceeded, no stopping, no auto_reacquire",
    "RELEASING x ReleaseSucceeded, no stopping, auto_reacquire",
)
async def _real_released(stage: RealStage) -> None:
    gate = await stage.hold_release()
    stage.mark()
    assert await stage.locked_by_us()
    gate.open()
    await stage.recorder.seen("on_released")
    assert not await stage.locked_by_us()


@real(
    "RELEASING x ReleaseFailed, stopping",
    "RELEASING x ReleaseFailed, no stopping, no auto_reacquire",
    "RELEASING x ReleaseFailed, no stopping, auto_reacquire",
)
async def _real_not_released(stage: RealStage) -> None:
    gate = await stage.hold_release()
    await stage.session()._connection.execute("SELECT pg_advisory_unlock_all()")
    stage.mark()
    gate.open()


@real(
    "RELEASING x DbError, stopping",
    "RELEASING x DbError, no stopping, no auto_reacquire",
    "RELEASING x DbError, no stopping, auto_reacquire",
)
async def _real_release_breaks(stage: RealStage) -> None:
    gate = await stage.hold_release()
    stage.mark()
    await stage.cut()
    gate.open()


@real("FOLLOWER x DbError")
async def _real_follower_is_cut_off(stage: RealStage) -> None:
    await stage.follow()
    stage.mark()
    await stage.cut()
    await stage.recorder.seen("on_error")


@real("FOLLOWER x GaveUp")
async def _real_give_up(stage: RealStage) -> None:
    stage.patience.delay_s = None
    await stage.somebody_else_leads()
    await stage.lock.start()
    await stage.recorder.seen("on_stopped")
    stage.mark_after("stopped>follower", "follower>acquiring", "acquiring>follower", "on_acquire_failed")


@pytest.mark.parametrize("row", [row for row in ROWS if row.id in ON_POSTGRES], ids=lambda row: row.id)
async def test_a_lock_on_postgresql_follows_the_table(row: Expected, dsn: str) -> None:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as admin:
        stage = RealStage(row, dsn, admin)
        await ON_POSTGRES[row.id](stage)
        if not stage.passes:
            await stage.reach(row.target)
            await stage.check_delay()
        stage.check_calls(passes=stage.passes)
        if Action.CLOSE in row.does:
            await until_answer(stage.no_session)
        await stage.end()
        assert stage.lock.state is STOPPED
        assert not await stage.locked_by_us()


def test_the_rows_that_involve_a_server_are_driven_on_one() -> None:
    """Left out: nonsense from a driver, a failed reconnect that is tried again, and requests that do nothing."""
    without = {row.id for row in ROWS} - set(ON_POSTGRES)
    idle = {row.id for row in ROWS if row.source is row.target and not row.does and row.input != "HealthOk"}
    nonsense = {row.id for row in ROWS if row.source is LEADER and row.input == "DbError"}
    assert without == idle | nonsense | {"RECONNECTING x DbError"}
