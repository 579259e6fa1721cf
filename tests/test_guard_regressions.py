"""Defects of the one-shot guard that were found once, and stay found."""

import asyncio
import uuid

import psycopg
import pytest

from pgleaderlock import ConfigurationError, LockError, RetryContext, acquire_leadership, acquire_leadership_with_retry
from pgleaderlock.errors import DatabaseError
from pgleaderlock.sync import acquire_leadership as acquire_leadership_sync
from support.recorder import WAIT_S


@pytest.fixture
def name() -> str:
    return f"guard-regression-{uuid.uuid4()}"


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


async def test_the_sync_twin_does_the_same(dsn: str, name: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        held = acquire_leadership_sync(conn, name)
        conn.execute("BEGIN")
        with pytest.raises(psycopg.errors.DivisionByZero):
            conn.execute("SELECT 1 / 0")
        await _end_session(dsn, conn.info.backend_pid)
        with pytest.raises(DatabaseError):
            held.release()
        held.release()
        assert not held.held


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
