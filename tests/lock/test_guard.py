"""One-shot leadership on a real server: a guard or a clear no, and nothing in between."""

import asyncio
import contextlib
import gc
import random
import uuid
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row

from conftest import StartPooler, StartServer
from pgleaderlock import (
    ConfigurationError,
    CoordinationError,
    DecorrelatedJitter,
    FixedInterval,
    LeaderLock,
    LeadershipGuard,
    LockError,
    LockNotAcquired,
    PgLeaderLockError,
    RetryContext,
    acquire_leadership,
    acquire_leadership_blocking,
    acquire_leadership_with_retry,
    key_pair,
)
from pgleaderlock import guard as guard_module
from pgleaderlock._lock import guarding
from pgleaderlock.errors import DatabaseError
from support.counts import count
from support.fakes import failing_statements
from support.proxy import Proxy
from support.recorder import WAIT_S
from support.server_side import holders, terminate, until_held_by, until_waited_for
from support.servers import open_folder

WHOLE_TEST_S = 100.0
"""Not asserted anywhere: only the bound after which a test gives up instead of hanging."""
Connection = psycopg.AsyncConnection[tuple[Any, ...]]


@pytest.fixture
def name() -> str:
    return f"guard-{uuid.uuid4()}"


@pytest.fixture
async def connect(dsn: str) -> AsyncIterator[Callable[..., Awaitable[Connection]]]:
    """Opens connections in autocommit, and closes them with the test."""
    async with contextlib.AsyncExitStack() as opened:

        async def start(**options: Any) -> Connection:
            options = {"autocommit": True, **options}
            return await opened.enter_async_context(await psycopg.AsyncConnection.connect(dsn, **options))

        yield start


Connect = Callable[..., Awaitable[Connection]]


# --- A guard or a no


async def test_the_first_gets_a_guard_and_the_second_learns_who_holds_it(connect: Connect, name: str, dsn: str) -> None:
    first, second = await connect(application_name="the first"), await connect()
    async with await acquire_leadership(first, name) as held:
        assert (held.name, held.key, held.held) == (name, key_pair(name), True)
        assert await held.check()
        with pytest.raises(LockNotAcquired) as refused:
            await acquire_leadership(second, name)
        assert refused.value.name == name
        assert refused.value.holder_pid == first.info.backend_pid
        assert refused.value.holder_application_name == "the first"
        assert name in str(refused.value)
    assert not held.held
    assert holders(dsn, key_pair(name)) == []
    async with await acquire_leadership(second, name) as later:
        assert await later.check()


async def test_both_errors_belong_to_one_tree() -> None:
    assert issubclass(LockNotAcquired, CoordinationError)
    assert issubclass(DatabaseError, CoordinationError)
    assert issubclass(CoordinationError, PgLeaderLockError)


async def test_a_guard_a_lock_and_a_helper_exclude_each_other(connect: Connect, name: str, dsn: str) -> None:
    async with LeaderLock.for_name(dsn, name) as lock:
        assert await lock.wait_for_leadership(WAIT_S)
        with pytest.raises(LockNotAcquired):
            await acquire_leadership(await connect(), name)
        with pytest.raises(LockNotAcquired):
            await acquire_leadership_blocking(dsn, name, timeout_s=0.05)
        with pytest.raises(LockNotAcquired):
            await acquire_leadership_with_retry(dsn, name, GiveUpAfter(2))


async def test_two_namespaces_do_not_collide(connect: Connect, name: str) -> None:
    conn = await connect()
    async with (
        await acquire_leadership(conn, name, namespace="one"),
        await acquire_leadership(conn, name, namespace="two") as second,
    ):
        assert await second.check()


async def test_the_same_name_twice_on_one_connection_is_refused_and_not_counted(
    connect: Connect, name: str, dsn: str
) -> None:
    conn = await connect()
    held = await acquire_leadership(conn, name)
    with pytest.raises(LockError, match="already leads"):
        await acquire_leadership(conn, name)
    await held.release()
    assert holders(dsn, key_pair(name)) == [], "one release must free what was taken once"
    async with await acquire_leadership(conn, name) as again:
        assert await again.check()


async def test_release_is_idempotent_and_checks_the_servers_answer(connect: Connect, name: str) -> None:
    conn = await connect()
    held = await acquire_leadership(conn, name)
    await held.release()
    await held.release()
    held = await acquire_leadership(conn, name)
    await conn.execute("SELECT pg_advisory_unlock_all()")
    assert not await held.check()
    with pytest.raises(LockError, match="was not held"):
        await held.release()
    await conn.close()


async def test_an_exception_in_the_block_releases_too(connect: Connect, name: str, dsn: str) -> None:
    conn = await connect()
    with pytest.raises(ZeroDivisionError):
        async with await acquire_leadership(conn, name):
            raise ZeroDivisionError
    assert holders(dsn, key_pair(name)) == []


@pytest.mark.parametrize("failing", [True, False])
async def test_an_exception_with_an_open_or_failed_transaction_rolls_back_and_releases(
    connect: Connect, name: str, dsn: str, failing: bool
) -> None:
    conn = await connect()

    async def work() -> None:
        async with await acquire_leadership(conn, name):
            await conn.execute("BEGIN")
            await conn.execute("SELECT 1 / 0" if failing else "SELECT 1")
            raise ZeroDivisionError

    with pytest.raises((psycopg.errors.DivisionByZero, ZeroDivisionError)):
        await work()
    assert holders(dsn, key_pair(name)) == []
    assert conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


async def test_leadership_is_not_released_before_the_transaction_has_ended(
    connect: Connect, name: str, dsn: str
) -> None:
    conn = await connect()
    held = await acquire_leadership(conn, name)
    await conn.execute("BEGIN")
    with pytest.raises(LockError, match="commit or roll back"):
        await held.release()
    assert len(holders(dsn, key_pair(name))) == 1
    await conn.execute("COMMIT")
    await held.release()


async def test_a_dropped_guard_warns_and_a_released_one_does_not(connect: Connect, name: str, dsn: str) -> None:
    conn = await connect()
    held = [await acquire_leadership(conn, name)]
    with pytest.warns(ResourceWarning, match="dropped while it held"):
        held.clear()
    await conn.close()
    await until_held_by(dsn, key_pair(name), 0)  # the server may take a moment to see the end of a session
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        released = await acquire_leadership(await connect(), name)
        await released.release()
        del released
        gc.collect()


async def test_the_callers_own_row_and_cursor_types_do_not_matter(connect: Connect, name: str) -> None:
    conn = await connect(row_factory=dict_row, cursor_factory=psycopg.AsyncRawCursor)
    async with await acquire_leadership(conn, name) as held:
        assert await held.check()


# --- The end of the session


async def test_lost_returns_when_the_session_is_ended_and_another_can_lead(
    connect: Connect, name: str, dsn: str
) -> None:
    for _ in range(count(3, 30)):
        held = await acquire_leadership(await connect(), name)
        losing = asyncio.ensure_future(held.lost())
        await asyncio.sleep(0)  # it has begun to listen
        terminate(dsn, key_pair(name))
        async with asyncio.timeout(WAIT_S):
            await losing
        assert not held.held
        assert not await held.check()
        async with await acquire_leadership(await connect(), name) as successor:
            assert await successor.check()
        with pytest.raises(DatabaseError, match="lost before it was released"):
            await held.release()


async def test_waiting_for_the_loss_does_not_disturb_the_callers_use(connect: Connect, name: str) -> None:
    """Statements, notifications that nobody reads, and a large result, while `lost()` waits."""
    conn = await connect()
    async with await acquire_leadership(conn, name) as held:
        losing = asyncio.ensure_future(held.lost())
        await conn.execute("LISTEN c")
        other = await connect()
        for number in range(50):
            await other.execute("SELECT pg_notify('c', repeat('x', 1000))")
            row = await (await conn.execute("SELECT %s, repeat('y', 100000)", (number,))).fetchone()
            assert row is not None
            assert row[0] == number
        got = [notification async for notification in conn.notifies(timeout=0.1)]
        assert not losing.done()
        losing.cancel()
        await asyncio.wait([losing])
        assert len(got) <= 50


async def test_unread_bytes_do_not_hide_the_end(connect: Connect, name: str, dsn: str) -> None:
    """Notifications fill the socket and nobody reads them; then the session is ended behind them."""
    conn = await connect()
    await conn.execute("LISTEN c")
    held = await acquire_leadership(conn, name)
    losing = asyncio.ensure_future(held.lost())
    other = await connect()
    for _ in range(5):
        await other.execute("SELECT pg_notify('c', repeat('x', 1000))")
    assert not losing.done()
    terminate(dsn, key_pair(name))
    async with asyncio.timeout(WAIT_S):
        await losing


async def test_closing_the_connection_counts_as_its_end(connect: Connect, name: str) -> None:
    conn = await connect()
    held = await acquire_leadership(conn, name)
    losing = asyncio.ensure_future(held.lost())
    await asyncio.sleep(0)
    await conn.close()
    async with asyncio.timeout(WAIT_S):
        await losing
    assert not held.held
    await held.lost()


async def test_an_owned_guard_notices_a_cut_by_its_probe(
    throwaway_postgres: StartServer,
    proxy_to: Callable[[str], Awaitable[Proxy]],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guard_module, "PROBE_INTERVAL_S", 0.1)
    monkeypatch.setattr(guard_module, "STATEMENT_TIMEOUT_S", 0.3)
    server = throwaway_postgres()
    proxy = await proxy_to(server.dsn)
    held = await acquire_leadership_blocking(proxy.dsn_for(server.dsn), name)
    assert await held.check()
    proxy.cut()
    async with asyncio.timeout(WAIT_S):
        await held.lost()
    assert not held.held
    with pytest.raises(DatabaseError, match="lost before"):
        await held.release()


async def test_an_owned_guard_outlives_its_lease_while_it_is_alive(
    dsn: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three leases long, probes keep it; the mechanism is shown by taking the probes away."""
    monkeypatch.setattr(guard_module, "LEASE_S", 0.4)
    for interval_s, survives in ((0.1, True), (3600.0, False)):
        monkeypatch.setattr(guard_module, "PROBE_INTERVAL_S", interval_s)
        held = await acquire_leadership_blocking(dsn, name)
        losing = asyncio.ensure_future(held.lost())
        await asyncio.wait([losing], timeout=1.2 if survives else WAIT_S)
        assert losing.done() is not survives
        losing.cancel()
        with contextlib.suppress(DatabaseError):
            await held.release()


# --- The helpers


class GiveUpAfter:
    """A policy that tries a number of times, and remembers what it was told."""

    def __init__(self, attempts: int, delay_s: float = 0.01) -> None:
        self.attempts, self.delay_s = attempts, delay_s
        self.told: list[RetryContext] = []

    def next_delay_s(self, ctx: RetryContext) -> float | None:
        self.told.append(ctx)
        return self.delay_s if ctx.attempt < self.attempts else None


async def test_with_retry_gives_up_with_the_reason(dsn: str, name: str) -> None:
    policy = GiveUpAfter(3)
    async with await acquire_leadership_blocking(dsn, name):
        with pytest.raises(LockNotAcquired, match="held by backend"):
            await acquire_leadership_with_retry(dsn, name, policy)
    assert [ctx.attempt for ctx in policy.told] == [1, 2, 3]
    assert all(ctx.last_error is None for ctx in policy.told), "held by another is no error"
    policy = GiveUpAfter(2)
    with pytest.raises(DatabaseError, match="cannot connect"):
        await acquire_leadership_with_retry("host=127.0.0.1 port=1 user=x", name, policy)
    assert policy.told[0].last_error is not None


async def test_with_retry_wins_once_the_holder_has_gone(dsn: str, name: str) -> None:
    holder = await acquire_leadership_blocking(dsn, name)
    waiting = asyncio.ensure_future(acquire_leadership_with_retry(dsn, name, FixedInterval(0.02)))
    await asyncio.wait([waiting], timeout=0.1)
    assert not waiting.done()
    await holder.release()
    async with asyncio.timeout(WAIT_S):
        async with await waiting as held:
            assert await held.check()


async def test_with_retry_survives_a_restart_of_the_server(throwaway_postgres: StartServer, name: str) -> None:
    server = throwaway_postgres()
    await asyncio.to_thread(server.stop)
    waiting = asyncio.ensure_future(acquire_leadership_with_retry(server.dsn, name, FixedInterval(0.05)))
    await asyncio.to_thread(server.start)
    async with asyncio.timeout(WAIT_S):
        async with await waiting as held:
            assert await held.check()


async def test_the_policy_of_one_call_is_not_shared_with_another(dsn: str, name: str) -> None:
    policy = DecorrelatedJitter(0.01, 0.02)
    previous = policy._previous_s
    async with await acquire_leadership_blocking(dsn, name):
        waiting = asyncio.ensure_future(acquire_leadership_with_retry(dsn, name, policy))
        await asyncio.wait([waiting], timeout=0.2)
        waiting.cancel()
        await asyncio.wait([waiting])
    assert policy._previous_s == previous


async def test_blocking_waits_until_the_holder_goes(dsn: str, name: str) -> None:
    holder = await acquire_leadership_blocking(dsn, name)
    waiting = asyncio.ensure_future(acquire_leadership_blocking(dsn, name))
    await asyncio.wait([waiting], timeout=0.8)  # longer than a slice
    assert not waiting.done()
    await holder.release()
    async with asyncio.timeout(WAIT_S):
        async with await waiting as held:
            assert await held.check()


async def test_blocking_with_a_timeout_says_who_holds_it(connect: Connect, dsn: str, name: str) -> None:
    async with await acquire_leadership(await connect(application_name="somebody"), name):
        with pytest.raises(LockNotAcquired) as refused:
            await acquire_leadership_blocking(dsn, name, timeout_s=0.1)
        assert refused.value.holder_application_name == "somebody"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("helper", ["blocking", "with_retry"])
async def test_cancelling_at_any_moment_leaves_no_lock_and_no_connection(dsn: str, name: str, helper: str) -> None:
    """`dsn` fails the test if anything is left. Every other round the lock is granted at about the same moment."""
    rng = random.Random(7)
    outcomes = {"cancelled": 0, "granted": 0}
    for round_ in range(count(30, 200)):
        holder = await acquire_leadership_blocking(dsn, name) if round_ % 2 else None
        seeking: asyncio.Future[LeadershipGuard] = asyncio.ensure_future(
            acquire_leadership_blocking(dsn, name)
            if helper == "blocking"
            else acquire_leadership_with_retry(dsn, name, FixedInterval(0.002))
        )
        if holder is not None:
            await asyncio.sleep(0.02)
            releasing = asyncio.ensure_future(holder.release())
            await asyncio.sleep(rng.uniform(0, 0.004))
        else:
            releasing = None
            await asyncio.sleep(rng.uniform(0, 0.015))
        seeking.cancel()
        await asyncio.wait([seeking])
        if releasing is not None:
            await releasing
        if seeking.cancelled():
            outcomes["cancelled"] += 1
        else:
            outcomes["granted"] += 1
            await seeking.result().release()
    assert outcomes["cancelled"] > 0
    await until_held_by(dsn, key_pair(name), 0)


async def test_ten_waiters_that_come_back_for_more_take_turns(
    dsn: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First come is first served within a slice. Here a slice lasts for the whole test, on a machine of any speed."""
    monkeypatch.setattr(guard_module, "STATEMENT_TIMEOUT_S", 2 * WHOLE_TEST_S)
    patient = make_conninfo(dsn, options=f"-c deadlock_timeout={2 * WHOLE_TEST_S:.0f}s")
    waiters, rounds = 10, count(3, 20)
    served: list[int] = []
    finished = asyncio.Event()

    async def come_back(who: int) -> None:
        while not finished.is_set():
            async with await acquire_leadership_blocking(patient, name):
                served.append(who)
                if len(served) >= waiters * rounds:
                    finished.set()
                elif not finished.is_set():  # whoever is in line again counts, and not who connects sooner
                    await until_waited_for(dsn, key_pair(name), waiters - 1)

    async with asyncio.timeout(WHOLE_TEST_S):
        first = await acquire_leadership_blocking(patient, name)
        coming = [asyncio.ensure_future(come_back(who)) for who in range(waiters)]
        await until_waited_for(dsn, key_pair(name), waiters)
        await first.release()
        await asyncio.gather(*coming)
    turns = served[: waiters * rounds]
    assert sorted(turns[:waiters]) == list(range(waiters))
    assert turns == turns[:waiters] * rounds


async def test_a_waiter_takes_a_new_snapshot_for_each_slice(dsn: str, name: str) -> None:
    """A slice is half of deadlock_timeout, so none gets as old as that: each is a statement of its own."""
    slices: set[Any] = set()
    holder = await acquire_leadership_blocking(dsn, name)
    waiting = asyncio.ensure_future(acquire_leadership_blocking(dsn, name))
    async with (
        asyncio.timeout(WAIT_S),
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as look,
    ):
        while len(slices) < 3:
            cursor = await look.execute(
                "SELECT query_start FROM pg_stat_activity WHERE backend_xmin IS NOT NULL AND state = 'active'"
                " AND application_name LIKE 'pgleaderlock guard-%%' AND wait_event = 'advisory'"
            )
            slices.update(row[0] for row in await cursor.fetchall())
            await asyncio.sleep(0.02)
    assert not waiting.done()
    await holder.release()
    await (await waiting).release()


# --- Bad input: a clear error, and nothing locked


async def test_a_connection_that_cannot_carry_a_guard_is_refused_before_anything_is_locked(
    connect: Connect, name: str, dsn: str
) -> None:
    closed = await connect()
    await closed.close()
    with pytest.raises(DatabaseError, match="closed"):
        await acquire_leadership(closed, name)
    in_transaction = await connect()
    await in_transaction.execute("BEGIN")
    with pytest.raises(DatabaseError, match="in a transaction"):
        await acquire_leadership(in_transaction, name)
    failed = await connect()
    with pytest.raises(psycopg.errors.DivisionByZero):
        async with failed.transaction():
            await failed.execute("SELECT 1 / 0")
    await failed.execute("BEGIN")
    with pytest.raises(psycopg.errors.DivisionByZero):
        await failed.execute("SELECT 1 / 0")
    with pytest.raises(DatabaseError, match="failed transaction"):
        await acquire_leadership(failed, name)
    with pytest.raises(DatabaseError, match="autocommit=True"):
        await acquire_leadership(await connect(autocommit=False), name)
    assert holders(dsn, key_pair(name)) == []


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("", "must not be empty"),
        ("x" * 513, "shorten"),
        ("a\0b", "NUL"),
        (7, "must be a string"),
        (None, "must be a string"),
    ],
)
async def test_a_bad_name_is_refused(connect: Connect, dsn: str, bad: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        await acquire_leadership(await connect(), bad)
    with pytest.raises(ConfigurationError, match=says):
        await acquire_leadership_blocking(dsn, bad)
    with pytest.raises(ConfigurationError, match=says):
        await acquire_leadership_with_retry(dsn, bad, FixedInterval())


async def test_wrong_types_are_named(dsn: str, name: str) -> None:
    with pytest.raises(ConfigurationError, match="acquire_leadership_with_retry"):
        await acquire_leadership(dsn, name)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="not NoneType"):
        await acquire_leadership(None, name)  # type: ignore[arg-type]
    with (
        psycopg.connect(dsn, autocommit=True) as sync,
        pytest.raises(ConfigurationError, match=r"pgleaderlock\.sync"),
    ):
        await acquire_leadership(sync, name)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="next_delay_s"):
        await acquire_leadership_with_retry(dsn, name, 5)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="timeout_s"):
        await acquire_leadership_blocking(dsn, name, timeout_s=float("nan"))


@pytest.mark.parametrize("pool_mode", ["transaction", "session"])
async def test_a_connection_through_a_pooler_is_refused_before_anything_is_locked(
    dsn: str, pgbouncer: StartPooler, name: str, pool_mode: Any
) -> None:
    through = pgbouncer(dsn, pool_mode)
    async with await psycopg.AsyncConnection.connect(through, autocommit=True, prepare_threshold=None) as conn:
        with pytest.raises(DatabaseError, match="pooler"):
            await acquire_leadership(conn, name)
        assert holders(dsn, key_pair(name)) == []
    with pytest.raises(DatabaseError, match="pooler"):
        await acquire_leadership_with_retry(through, name, FixedInterval(0.01))


async def test_a_standby_is_refused(throwaway_postgres: StartServer, name: str) -> None:
    primary = throwaway_postgres()
    with open_folder() as folder:
        replica = await asyncio.to_thread(primary.make_replica, Path(folder) / "replica")
        try:
            async with await psycopg.AsyncConnection.connect(replica.dsn, autocommit=True) as conn:
                with pytest.raises(DatabaseError, match="standby"):
                    await acquire_leadership(conn, name)
        finally:
            await asyncio.to_thread(replica.close)


async def test_cancelled_in_mid_statement_the_connection_is_closed(
    throwaway_postgres: StartServer, proxy_to: Callable[[str], Awaitable[Proxy]], name: str
) -> None:
    """The answer is lost on its way: the lock may have been granted, so the session must not live on."""
    server = throwaway_postgres()
    proxy = await proxy_to(server.dsn)
    conn = await psycopg.AsyncConnection.connect(proxy.dsn_for(server.dsn), autocommit=True)
    proxy.drop_replies()
    taking = asyncio.ensure_future(acquire_leadership(conn, name))
    await until_held_by(server.dsn, key_pair(name), 1)
    taking.cancel()
    await asyncio.wait([taking])
    assert taking.cancelled()
    assert conn.closed
    await until_held_by(server.dsn, key_pair(name), 0)


async def _end_session(dsn: str, pid: int) -> None:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as admin:
        await admin.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))


async def test_a_session_that_died_in_a_transaction_does_not_replace_the_callers_exception(dsn: str, name: str) -> None:
    conn = await psycopg.AsyncConnection.connect(dsn, autocommit=True)

    async def work() -> None:
        async with await acquire_leadership(conn, name):
            await conn.execute("BEGIN")
            await _end_session(dsn, conn.info.backend_pid)
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await work()
    await conn.close()


async def test_releasing_in_a_failed_transaction_of_a_dead_session_is_a_database_error(dsn: str, name: str) -> None:
    conn = await psycopg.AsyncConnection.connect(dsn, autocommit=True)
    held = await acquire_leadership(conn, name)
    await conn.execute("BEGIN")
    with pytest.raises(psycopg.errors.DivisionByZero):
        await conn.execute("SELECT 1 / 0")
    await _end_session(dsn, conn.info.backend_pid)
    with pytest.raises(DatabaseError):
        await held.release()
    await held.release()
    assert not held.held
    await conn.close()


async def test_a_guard_whose_lock_was_taken_from_it_is_over_and_the_name_can_be_led_again(dsn: str, name: str) -> None:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        held = await acquire_leadership(conn, name)
        await conn.execute("SELECT pg_advisory_unlock_all()")
        with pytest.raises(LockError, match="was not held"):
            await held.release()
        assert not held.held
        await held.release()
        async with await acquire_leadership(conn, name) as again:
            assert await again.check()


async def test_waiting_for_a_loss_ends_with_the_release(dsn: str, name: str) -> None:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        held = await acquire_leadership(conn, name)
        losing = asyncio.ensure_future(held.lost())
        await asyncio.sleep(0)
        await held.release()
        async with asyncio.timeout(WAIT_S):
            await losing


@pytest.mark.parametrize("nonsense", [float("nan"), -1, "soon", float("inf")])
async def test_a_policy_that_returns_nonsense_is_named(dsn: str, name: str, nonsense: object) -> None:
    class Policy:
        def next_delay_s(self, ctx: RetryContext) -> float | None:
            return nonsense  # type: ignore[return-value]

    async with (
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn,
        await acquire_leadership(conn, name),
    ):
        with pytest.raises(ConfigurationError, match="must return seconds"):
            await acquire_leadership_with_retry(dsn, name, Policy())


@pytest.mark.parametrize("allow_pooler", [False, True])
async def test_a_lock_that_was_granted_before_the_error_ends_with_the_connection(
    dsn: str, name: str, monkeypatch: pytest.MonkeyPatch, allow_pooler: bool
) -> None:
    """A session's locks outlive its errors."""
    taking = "guard_take_pooled" if allow_pooler else "guard_take"
    monkeypatch.setattr(guarding, "statement", failing_statements(taking))
    conn = await psycopg.AsyncConnection.connect(dsn, autocommit=True)
    with pytest.raises(DatabaseError, match="taking the lock failed: division by zero"):
        await acquire_leadership(conn, name, allow_pooler=allow_pooler)
    assert conn.closed
    await until_held_by(dsn, key_pair(name), 0)


async def test_a_connection_serves_on_after_an_error_that_granted_nothing(dsn: str, name: str) -> None:
    """Somebody else leads, and the try fails all the same."""
    async with (
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as leads,
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as tries,
    ):
        async with await acquire_leadership(leads, name):
            with pytest.MonkeyPatch.context() as broken:
                broken.setattr(guarding, "statement", failing_statements("guard_take"))
                with pytest.raises(DatabaseError, match="division by zero"):
                    await acquire_leadership(tries, name)
        async with await acquire_leadership(tries, name) as held:
            assert await held.check()
