"""Defects of the one-shot guard that were found once, and stay found."""

import asyncio
import uuid
from collections.abc import Callable

import psycopg
import pytest

from pgleaderlock import (
    ConfigurationError,
    LockError,
    RetryContext,
    acquire_leadership,
    acquire_leadership_with_retry,
    guard,
    key_pair,
    sync,
)
from pgleaderlock._sql import statement
from pgleaderlock.errors import DatabaseError
from pgleaderlock.sync import acquire_leadership as acquire_leadership_sync
from support.recorder import WAIT_S
from support.server_side import holders, until_held_by


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


# --- A try that fails after the lock was granted


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes these statements fail after all that they do, as a statement_timeout can."""

    def failing(*names: str) -> None:
        def text(name: str) -> bytes:
            # pg_backend_pid() keeps the planner from dividing before anything is done.
            return statement(name) + (b", 1 / (pg_backend_pid() * 0)" if name in names else b"")

        monkeypatch.setattr(guard, "statement", text)
        monkeypatch.setattr(sync, "statement", text)

    return failing


@pytest.mark.parametrize("allow_pooler", [False, True])
async def test_a_lock_that_was_granted_before_the_error_is_given_back_and_the_connection_serves_on(
    dsn: str, name: str, fail: Callable[..., None], allow_pooler: bool
) -> None:
    fail("guard_take_pooled" if allow_pooler else "guard_take")
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        with pytest.raises(DatabaseError, match="taking the lock failed: division by zero"):
            await acquire_leadership(conn, name, allow_pooler=allow_pooler)
        assert holders(dsn, key_pair(name)) == []
        fail()
        async with await acquire_leadership(conn, name, allow_pooler=allow_pooler) as held:
            assert await held.check()
        assert holders(dsn, key_pair(name)) == []


@pytest.mark.parametrize("allow_pooler", [False, True])
def test_a_lock_that_was_granted_to_a_sync_guard_before_the_error_is_given_back_and_the_connection_serves_on(
    dsn: str, name: str, fail: Callable[..., None], allow_pooler: bool
) -> None:
    fail("guard_take_pooled" if allow_pooler else "guard_take")
    with psycopg.connect(dsn, autocommit=True) as conn:
        with pytest.raises(DatabaseError, match="taking the lock failed: division by zero"):
            acquire_leadership_sync(conn, name, allow_pooler=allow_pooler)
        assert holders(dsn, key_pair(name)) == []
        fail()
        with acquire_leadership_sync(conn, name, allow_pooler=allow_pooler) as held:
            assert held.check()
        assert holders(dsn, key_pair(name)) == []


async def test_a_connection_on_which_the_lock_cannot_be_given_back_is_closed(
    dsn: str, name: str, fail: Callable[..., None]
) -> None:
    fail("guard_take", "guard_give_back")
    conn = await psycopg.AsyncConnection.connect(dsn, autocommit=True)
    with pytest.raises(DatabaseError, match="taking the lock failed: division by zero"):
        await acquire_leadership(conn, name)
    assert conn.closed
    await until_held_by(dsn, key_pair(name), 0)


async def test_a_blocking_connection_on_which_the_lock_cannot_be_given_back_is_closed(
    dsn: str, name: str, fail: Callable[..., None]
) -> None:
    fail("guard_take", "guard_give_back")
    conn = psycopg.connect(dsn, autocommit=True)
    with pytest.raises(DatabaseError, match="taking the lock failed: division by zero"):
        acquire_leadership_sync(conn, name)
    assert conn.closed
    await until_held_by(dsn, key_pair(name), 0)


@pytest.mark.parametrize("take_by_hand", ["pg_advisory_lock", "pg_advisory_lock_shared"])
async def test_a_lock_that_the_caller_has_taken_by_hand_is_not_taken_a_second_time_and_stays(
    dsn: str, name: str, take_by_hand: str
) -> None:
    keys = key_pair(name)
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        await conn.execute(f"SELECT {take_by_hand}(%s, %s)", keys)
        with pytest.raises(LockError, match="holds the lock"):
            await acquire_leadership(conn, name)
        assert holders(dsn, keys) == [conn.info.backend_pid]
        await conn.execute(f"SELECT {take_by_hand.replace('lock', 'unlock', 1)}(%s, %s)", keys)
        assert holders(dsn, keys) == []


def test_a_lock_that_the_caller_of_a_sync_guard_has_taken_by_hand_is_not_taken_a_second_time_and_stays(
    dsn: str, name: str
) -> None:
    keys = key_pair(name)
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("SELECT pg_advisory_lock(%s, %s)", keys)
        with pytest.raises(LockError, match="holds the lock"):
            acquire_leadership_sync(conn, name)
        assert holders(dsn, keys) == [conn.info.backend_pid]
        conn.execute("SELECT pg_advisory_unlock(%s, %s)", keys)
        assert holders(dsn, keys) == []
