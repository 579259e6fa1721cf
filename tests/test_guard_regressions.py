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
from support.server_side import until_held_by


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


def failing(*names: str) -> Callable[[str], bytes]:
    """These statements fail after all that they do, as a statement_timeout can make them."""

    def text(name: str) -> bytes:
        # pg_backend_pid() keeps the planner from dividing before anything is done.
        return statement(name) + (b", 1 / (pg_backend_pid() * 0)" if name in names else b"")

    return text


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def patch(*names: str) -> None:
        for module in (guard, sync):
            monkeypatch.setattr(module, "statement", failing(*names))

    return patch


@pytest.mark.parametrize("allow_pooler", [False, True])
async def test_a_lock_that_was_granted_before_the_error_ends_with_the_connection(
    dsn: str, name: str, fail: Callable[..., None], allow_pooler: bool
) -> None:
    """A session's locks outlive its errors."""
    fail("guard_take_pooled" if allow_pooler else "guard_take")
    conn = await psycopg.AsyncConnection.connect(dsn, autocommit=True)
    with pytest.raises(DatabaseError, match="taking the lock failed: division by zero"):
        await acquire_leadership(conn, name, allow_pooler=allow_pooler)
    assert conn.closed
    await until_held_by(dsn, key_pair(name), 0)


@pytest.mark.parametrize("allow_pooler", [False, True])
async def test_a_lock_that_was_granted_to_a_sync_guard_before_the_error_ends_with_the_connection(
    dsn: str, name: str, fail: Callable[..., None], allow_pooler: bool
) -> None:
    fail("guard_take_pooled" if allow_pooler else "guard_take")
    conn = psycopg.connect(dsn, autocommit=True)
    with pytest.raises(DatabaseError, match="taking the lock failed: division by zero"):
        acquire_leadership_sync(conn, name, allow_pooler=allow_pooler)
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
                broken.setattr(guard, "statement", failing("guard_take"))
                with pytest.raises(DatabaseError, match="division by zero"):
                    await acquire_leadership(tries, name)
        async with await acquire_leadership(tries, name) as held:
            assert await held.check()


def test_a_blocking_connection_serves_on_after_an_error_that_granted_nothing(dsn: str, name: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as leads, psycopg.connect(dsn, autocommit=True) as tries:
        with acquire_leadership_sync(leads, name), pytest.MonkeyPatch.context() as broken:
            broken.setattr(sync, "statement", failing("guard_take"))
            with pytest.raises(DatabaseError, match="division by zero"):
                acquire_leadership_sync(tries, name)
        with acquire_leadership_sync(tries, name) as held:
            assert held.check()
