"""A session is ours only when proven: behind every pool that shares its sessions, nobody leads and nothing is left."""

import asyncio
import contextlib
import itertools
import random
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from conftest import StartPooler
from pgleaderlock import (
    LeaderElection,
    LeadershipGuard,
    LockError,
    LockNotAcquired,
    acquire_leadership,
    key_pair,
    sync,
)
from pgleaderlock._base.clock import BOOT_CLOCK
from pgleaderlock._base.logging import get_logger
from pgleaderlock._base.steps import Steps
from pgleaderlock._pg import connect as pg_connect
from pgleaderlock._pg.connect import SECOND_CLIENTS_MAX, Backend, _proof, _Step
from pgleaderlock._pg.conninfo import ConnectionSettings
from pgleaderlock._pg.listener import listen
from pgleaderlock._pg.session import DedicatedSession
from pgleaderlock.errors import ConnectionError, DatabaseError, UnsafeSessionError
from support.counts import count
from support.elections import STEADY, fresh_database, until
from support.fakes import captured_log
from support.pgbouncer import PoolMode
from support.recorder import WAIT_S
from support.server_side import holders, terminate

POOLED = ConnectionSettings("pooler-test", 5.0, 7.5, allow_pooler=True)
Connection = psycopg.AsyncConnection[tuple[Any, ...]]


@pytest.fixture
def name() -> str:
    return f"guard-pooler-{uuid.uuid4()}"


async def connected(through: str, **options: Any) -> Connection:
    return await psycopg.AsyncConnection.connect(through, autocommit=True, **options)


# --- A guard on the caller's connection


@pytest.mark.parametrize("pool_mode", ["transaction", "statement"])
async def test_a_guard_in_a_pool_that_shares_sessions_is_refused_though_poolers_are_allowed(
    dsn: str, pgbouncer: StartPooler, name: str, pool_mode: PoolMode
) -> None:
    async with await connected(pgbouncer(dsn, pool_mode)) as conn:
        with pytest.raises(DatabaseError, match="pool_mode=session"):
            await acquire_leadership(conn, name, allow_pooler=True)
        assert holders(dsn, key_pair(name)) == []
        assert not conn.closed


@pytest.mark.parametrize("pool_mode", ["transaction", "statement"])
def test_a_sync_guard_in_a_pool_that_shares_sessions_is_refused_though_poolers_are_allowed(
    dsn: str, pgbouncer: StartPooler, name: str, pool_mode: PoolMode
) -> None:
    with psycopg.connect(pgbouncer(dsn, pool_mode), autocommit=True) as conn:
        with pytest.raises(DatabaseError, match="pool_mode=session"):
            sync.acquire_leadership(conn, name, allow_pooler=True)
        assert holders(dsn, key_pair(name)) == []
        assert not conn.closed


@pytest.mark.parametrize("sessions", ["1", "2"])
async def test_in_session_mode_one_of_two_clients_leads_also_when_no_session_is_left(
    dsn: str, pgbouncer: StartPooler, name: str, sessions: str
) -> None:
    through = pgbouncer(dsn, "session", default_pool_size=sessions)
    async with await connected(through) as first, await acquire_leadership(first, name, allow_pooler=True) as held:
        assert await held.check()
        if sessions == "2":
            async with await connected(through) as second:
                with pytest.raises(LockNotAcquired):
                    await acquire_leadership(second, name, allow_pooler=True)
    assert holders(dsn, key_pair(name)) == []


@pytest.mark.parametrize("sessions", ["1", "2"])
def test_in_session_mode_one_of_two_blocking_clients_leads_also_when_no_session_is_left(
    dsn: str, pgbouncer: StartPooler, name: str, sessions: str
) -> None:
    through = pgbouncer(dsn, "session", default_pool_size=sessions)
    with (
        psycopg.connect(through, autocommit=True) as first,
        sync.acquire_leadership(first, name, allow_pooler=True) as held,
    ):
        assert held.check()
        if sessions == "2":
            with psycopg.connect(through, autocommit=True) as second, pytest.raises(LockNotAcquired):
                sync.acquire_leadership(second, name, allow_pooler=True)
    assert holders(dsn, key_pair(name)) == []


async def admitted(through: str) -> Connection:
    """Connect to a pooler that has room for one client only: it notices the end of the previous one unannounced."""
    async with asyncio.timeout(WAIT_S):
        while True:
            with contextlib.suppress(psycopg.OperationalError):
                return await connected(through)
            await asyncio.sleep(0.01)


async def test_a_session_that_cannot_be_proven_is_refused_with_the_reason(
    dsn: str, pgbouncer: StartPooler, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    through = pgbouncer(dsn, "session", max_client_conn="1")
    async with await admitted(through) as conn:
        for _ in range(2):  # the second try finds the claim of the first one free again
            with pytest.raises(DatabaseError, match=r"could not be proven .*no more connections allowed"):
                await acquire_leadership(conn, name, allow_pooler=True)
        assert not conn.closed
        monkeypatch.setattr("pgleaderlock._pg.session.connect", lambda _params: asyncio.sleep(0, conn))
        with pytest.raises(ConnectionError, match="could not be proven") as refused:
            await DedicatedSession.open(through, POOLED)
    assert not isinstance(refused.value, UnsafeSessionError)  # it is tried again: there may be room later
    assert str(psycopg.conninfo.conninfo_to_dict(dsn)["password"]) not in str(refused.value)
    assert holders(dsn, key_pair(name)) == []


async def test_a_blocking_session_that_cannot_be_proven_is_refused_with_the_reason(
    dsn: str, pgbouncer: StartPooler, name: str
) -> None:
    through = pgbouncer(dsn, "session", max_client_conn="2")
    async with await admitted(through):
        with psycopg.connect(through, autocommit=True) as conn:
            for _ in range(2):
                with pytest.raises(DatabaseError, match=r"could not be proven .*no more connections allowed"):
                    sync.acquire_leadership(conn, name, allow_pooler=True)
            assert not conn.closed
    assert holders(dsn, key_pair(name)) == []


@pytest.fixture
def fooled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof is taken out, as if a pool had fooled it: the statements themselves must still refuse."""

    def believe(_connection: object, sample: Callable[[], Steps[Backend]]) -> Steps[Backend]:
        return (yield from sample())

    monkeypatch.setattr("pgleaderlock._lock.guarding.prove", believe)


@pytest.mark.parametrize("pool_mode", ["transaction", "statement"])
async def test_a_lock_that_another_client_left_on_the_session_is_not_taken_a_second_time(
    dsn: str, pgbouncer: StartPooler, name: str, pool_mode: PoolMode, fooled: None
) -> None:
    through = pgbouncer(dsn, pool_mode, default_pool_size="1")
    async with await connected(through) as first, await connected(through) as second:
        held = await acquire_leadership(first, name, allow_pooler=True)
        with pytest.raises(DatabaseError, match="pool_mode=session"):
            await acquire_leadership(second, name, allow_pooler=True)
        await held.release()


async def led_at_last(through: str, name: str, opened: AsyncExitStack) -> LeadershipGuard:
    """Try until the pooler has noticed that a session was ended: until then it cuts off whom it gives the dead one."""
    async with asyncio.timeout(WAIT_S):
        while True:
            conn = await opened.enter_async_context(await connected(through))
            with contextlib.suppress(DatabaseError):
                return await acquire_leadership(conn, name, allow_pooler=True)


async def test_check_is_false_when_another_session_answers_even_if_that_one_holds_the_lock(
    dsn: str, pgbouncer: StartPooler, name: str, fooled: None
) -> None:
    through = pgbouncer(dsn, "transaction", default_pool_size="1")
    async with await connected(through) as first, AsyncExitStack() as opened:
        held = await acquire_leadership(first, name, allow_pooler=True)
        terminate(dsn, key_pair(name))
        successor = await led_at_last(through, name, opened)
        assert not await held.check()
        assert await successor.check()
        await successor.release()
        with pytest.raises(LockError, match="was not held"):
            await held.release()


@pytest.mark.parametrize("pool_mode", ["transaction", "statement"])
async def test_an_election_in_a_pool_that_shares_sessions_never_leads(
    dsn: str, pgbouncer: StartPooler, name: str, pool_mode: PoolMode
) -> None:
    with fresh_database(dsn, ledger=True) as own:
        async with LeaderElection(pgbouncer(own, pool_mode), name, allow_pooler=True, **STEADY) as election:
            await until(lambda: isinstance(election.last_error, UnsafeSessionError))
            assert holders(own, key_pair(name)) == []


# --- A busy pool


@asynccontextmanager
async def traffic(through: str, clients: int) -> AsyncIterator[None]:
    """Clients of the pool that do one transaction after the other."""
    running = asyncio.Barrier(clients + 1)

    async def work() -> None:
        async with await connected(through, prepare_threshold=None) as conn:
            await running.wait()
            while True:
                await conn.execute("SELECT 1")

    tasks = [asyncio.create_task(work()) for _ in range(clients)]
    await running.wait()
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("round_robin", ["0", "1"])
async def test_a_busy_pool_of_several_sessions_is_refused_at_every_try_and_keeps_nothing_of_ours(
    dsn: str, pgbouncer: StartPooler, name: str, round_robin: str
) -> None:
    through = pgbouncer(dsn, "transaction", default_pool_size="2", server_round_robin=round_robin)
    before = await left_in_the_pool(through)
    async with traffic(through, 2):
        for _ in range(count(10, 300)):
            # Prepares at the first execution what may be prepared.
            async with await connected(through, prepare_threshold=0) as conn:
                with pytest.raises(DatabaseError, match="pool_mode=session"):
                    await acquire_leadership(conn, name, allow_pooler=True)
            with pytest.raises(UnsafeSessionError):
                await DedicatedSession.open(through, POOLED)
    assert await left_in_the_pool(through) == before


async def left_in_the_pool(through: str) -> set[tuple[Any, ...]]:
    """Settings, prepared statements, advisory locks and channels of both backends of the pool."""
    async with AsyncExitStack() as stack:
        found: set[tuple[Any, ...]] = set()
        pids = set()
        for _ in range(2):  # two transactions at once: both backends
            client = await psycopg.AsyncConnection.connect(through, prepare_threshold=None)
            conn = await stack.enter_async_context(client)
            cursor = await conn.execute(
                "SELECT name, setting FROM pg_settings WHERE name ~ 'timeout$|^default_transaction'"
                " UNION ALL SELECT 'prepared', statement FROM pg_prepared_statements"
                " UNION ALL SELECT 'channel', c FROM pg_listening_channels() c"
                " UNION ALL SELECT 'lock', classid::text FROM pg_locks WHERE locktype = 'advisory'"
            )
            found.update(await cursor.fetchall())
            pids.add(await (await conn.execute("SELECT pg_backend_pid()")).fetchone())
        assert len(pids) == 2
        return found


async def test_a_listener_never_listens_on_a_session_that_others_use(dsn: str, pgbouncer: StartPooler) -> None:
    through = pgbouncer(dsn, "transaction", default_pool_size="2")
    before = await left_in_the_pool(through)
    with captured_log() as records:
        listening = asyncio.create_task(
            listen(
                through,
                POOLED,
                "a_channel",
                lambda _payload: None,
                clock=BOOT_CLOCK,
                rng=random.Random(1),
                log=get_logger("pgleaderlock.test"),
            )
        )
        async with asyncio.timeout(WAIT_S):
            while not any("UnsafeSessionError" in record.getMessage() for record in records):
                await asyncio.sleep(0.01)  # a log sends no event
        listening.cancel()
        await asyncio.wait([listening])
    assert await left_in_the_pool(through) == before


async def test_a_proof_that_is_cancelled_while_its_second_client_waits_closes_that_client(
    dsn: str, pgbouncer: StartPooler, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Connection] = []
    connect = psycopg.AsyncConnection.connect

    async def noted(*args: Any, **params: Any) -> Connection:
        opened.append(await connect(*args, **params))
        return opened[-1]

    through = pgbouncer(dsn, "session", default_pool_size="1")
    async with await connected(through) as conn:
        monkeypatch.setattr(pg_connect, "POOL_WAIT_S", 600.0)
        monkeypatch.setattr(psycopg.AsyncConnection, "connect", noted)
        proving = asyncio.create_task(acquire_leadership(conn, name, allow_pooler=True))
        async with asyncio.timeout(WAIT_S):
            while not opened:
                await asyncio.sleep(0.01)
        proving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await proving
        assert [each.closed for each in opened] == [True]
        monkeypatch.undo()
        async with await acquire_leadership(conn, name, allow_pooler=True) as held:  # its claim is free again
            assert await held.check()


# --- What decides, without a server

BACKENDS = [Backend(pid, f"{pid}.5", "10.0.0.1") for pid in range(100, 140)]
ELSEWHERE = Backend(7, "7.5", "10.0.0.2")


def decided(serve: Callable[[_Step], Backend | None]) -> Backend:
    """Drive the proof against a pool; `serve` says who gets which backend. A mark stays on its backend."""
    steps, answer = _proof(), None
    marks: dict[int, str] = {}
    while True:
        try:
            step = steps.send(answer)
        except StopIteration as proven:
            backend: Backend = proven.value
            return backend
        answer = serve(_Step.OURS if step in (_Step.MARK, _Step.UNMARK) else step)
        if answer is not None:
            if step in (_Step.MARK, _Step.UNMARK):
                marks[answer.pid] = "ours" if step is _Step.MARK else ""
            answer = answer._replace(mark=marks.get(answer.pid))


def shared_pool(choices: Iterator[Backend]) -> Callable[[_Step], Backend | None]:
    return lambda step: None if step is _Step.NEXT else next(choices)


@pytest.mark.parametrize("size", range(1, 12))
@pytest.mark.parametrize("others", range(4))
def test_a_pool_that_rotates_its_sessions_is_never_taken_for_one_in_session_mode(size: int, others: int) -> None:
    # Between two of our statements, `others` transactions of other clients move the rotation on.
    rotation = itertools.islice(itertools.cycle(BACKENDS[:size]), 0, None, others + 1)
    with pytest.raises(UnsafeSessionError):
        decided(shared_pool(rotation))


@pytest.mark.parametrize("size", [1, 2, 3, 10, 40])
def test_a_pool_that_gives_out_any_session_is_never_taken_for_one_in_session_mode(size: int) -> None:
    rng = random.Random(size)
    for _ in range(2000):
        with pytest.raises(UnsafeSessionError):
            decided(shared_pool(iter(lambda: rng.choice(BACKENDS[:size]), None)))


def test_in_session_mode_each_client_keeps_its_session_and_ours_is_proven() -> None:
    free = itertools.cycle(BACKENDS[1:])
    second: list[Backend] = []

    def serve(step: _Step) -> Backend | None:
        if step is _Step.NEXT:
            second.append(next(free))
            return None
        return BACKENDS[0] if step is _Step.OURS else second[-1]

    assert decided(serve).is_same(BACKENDS[0])


def test_a_pooler_that_shows_each_client_its_own_session_is_found_by_the_mark() -> None:
    steps, step, mark = _proof(), _Step.OURS, None

    def drive() -> None:
        nonlocal step, mark
        next(steps)
        while step is not _Step.UNMARK:
            mark = "ours" if step is _Step.MARK else mark
            shown = BACKENDS[1] if step is _Step.OTHER else BACKENDS[0]
            step = steps.send(None if step is _Step.NEXT else shown._replace(mark=mark))

    with pytest.raises(UnsafeSessionError):
        drive()
    assert mark == "ours", "it was found before the mark"


def test_a_pooler_that_gives_us_another_session_as_soon_as_ours_is_marked_is_found() -> None:
    marking = itertools.chain([BACKENDS[0]] * (1 + 3 * 3), itertools.repeat(BACKENDS[2]))
    with pytest.raises(UnsafeSessionError):
        decided(lambda step: next(marking) if step is _Step.OURS else BACKENDS[1])


async def test_nothing_is_left_of_the_mark_on_a_proven_session(dsn: str, name: str) -> None:
    async with await connected(dsn) as conn, await acquire_leadership(conn, name, allow_pooler=True):
        row = await (await conn.execute("SELECT current_setting('pgleaderlock.mark')")).fetchone()
        assert row == ("",)


def test_a_second_client_that_waits_proves_ours_only_as_long_as_ours_is_the_same() -> None:
    assert decided(lambda step: BACKENDS[0] if step is _Step.OURS else None).is_same(BACKENDS[0])
    moving = itertools.chain([BACKENDS[0]] * 6, itertools.repeat(BACKENDS[1]))
    with pytest.raises(UnsafeSessionError):
        decided(lambda step: next(moving) if step is _Step.OURS else None)


def test_second_clients_that_come_by_another_pooler_prove_nothing() -> None:
    served: list[_Step] = []

    def serve(step: _Step) -> Backend | None:
        served.append(step)
        return {_Step.OURS: BACKENDS[0], _Step.OTHER: ELSEWHERE, _Step.NEXT: None}[step]

    with pytest.raises(ConnectionError, match="the same pooler"):
        decided(serve)
    assert served.count(_Step.NEXT) == SECOND_CLIENTS_MAX


async def test_the_second_client_goes_to_the_very_server_that_ours_has_found(dsn: str, name: str) -> None:
    two_hosts = make_conninfo(
        dsn, host="127.0.0.1,127.0.0.1", port=f"1,{psycopg.conninfo.conninfo_to_dict(dsn)['port']}"
    )
    async with await connected(two_hosts) as conn, await acquire_leadership(conn, name, allow_pooler=True) as held:
        assert await held.check()
