"""The sync twin of the one-shot guard, on a real server."""

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest

from pgleaderlock import ConfigurationError, LockError, LockNotAcquired, key_pair
from pgleaderlock._lock import guarding
from pgleaderlock.errors import DatabaseError
from pgleaderlock.sync import acquire_leadership
from support.fakes import failing_statements
from support.recorder import WAIT_S
from support.server_side import holders, terminate, until_held_by

Connect = Callable[..., "psycopg.Connection[tuple[Any, ...]]"]


@pytest.fixture
def name() -> str:
    return f"sync-guard-{uuid.uuid4()}"


@pytest.fixture
def connect(dsn: str) -> Iterator[Connect]:
    with ExitStack() as opened:

        def start(**options: Any) -> psycopg.Connection[tuple[Any, ...]]:
            return opened.enter_context(psycopg.connect(dsn, **{"autocommit": True, **options}))

        yield start


def test_the_first_gets_a_guard_and_the_second_learns_who_holds_it(connect: Connect, name: str, dsn: str) -> None:
    first, second = connect(application_name="the first"), connect()
    with acquire_leadership(first, name) as held:
        assert (held.name, held.key, held.held, held.check()) == (name, key_pair(name), True, True)
        with pytest.raises(LockNotAcquired) as refused:
            acquire_leadership(second, name)
        assert refused.value.holder_pid == first.info.backend_pid
        assert refused.value.holder_application_name == "the first"
    assert not held.held
    assert holders(dsn, key_pair(name)) == []
    with acquire_leadership(second, name) as later:
        assert later.check()


def test_the_same_name_twice_is_refused_and_release_is_idempotent(connect: Connect, name: str, dsn: str) -> None:
    conn = connect()
    held = acquire_leadership(conn, name)
    with pytest.raises(LockError, match="already leads"):
        acquire_leadership(conn, name)
    held.release()
    held.release()
    assert holders(dsn, key_pair(name)) == []


def test_lost_returns_true_when_the_session_is_ended_and_false_when_the_time_is_over(
    connect: Connect, name: str, dsn: str
) -> None:
    held = acquire_leadership(connect(), name)
    assert held.lost(timeout_s=0.01) is False
    heard: list[bool] = []
    listener = threading.Thread(target=lambda: heard.append(held.lost(WAIT_S)))
    listener.start()
    terminate(dsn, key_pair(name))
    listener.join(WAIT_S)
    assert heard == [True]
    assert not held.held
    assert held.check() is False
    with acquire_leadership(connect(), name) as successor:
        assert successor.check()
    with pytest.raises(DatabaseError, match="lost before it was released"):
        held.release()


def test_an_exception_rolls_back_and_releases(connect: Connect, name: str, dsn: str) -> None:
    conn = connect()

    def work() -> None:
        with acquire_leadership(conn, name):
            conn.execute("BEGIN")
            conn.execute("SELECT 1 / 0")

    with pytest.raises(psycopg.errors.DivisionByZero):
        work()
    assert holders(dsn, key_pair(name)) == []


def test_an_open_transaction_is_not_overtaken_by_the_release(connect: Connect, name: str) -> None:
    conn = connect()
    held = acquire_leadership(conn, name)
    conn.execute("BEGIN")
    with pytest.raises(LockError, match="commit or roll back"):
        held.release()
    conn.execute("ROLLBACK")
    held.release()


def test_a_dropped_guard_warns(connect: Connect, name: str) -> None:
    held = [acquire_leadership(connect(), name)]
    with pytest.warns(ResourceWarning, match="dropped while it held"):
        held.clear()


def test_interrupted_in_mid_statement_the_connection_is_closed(
    connect: Connect, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    conn = connect()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(psycopg.Cursor, "fetchone", interrupted)
    with pytest.raises(KeyboardInterrupt):
        acquire_leadership(conn, name)
    assert conn.closed


async def test_an_async_connection_is_sent_to_the_other_module(dsn: str, name: str) -> None:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        with pytest.raises(ConfigurationError, match="other kind"):
            acquire_leadership(conn, name)  # type: ignore[arg-type]


def test_releasing_in_a_failed_transaction_of_a_dead_session_is_a_database_error(dsn: str, name: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        held = acquire_leadership(conn, name)
        conn.execute("BEGIN")
        with pytest.raises(psycopg.errors.DivisionByZero):
            conn.execute("SELECT 1 / 0")
        with psycopg.connect(dsn, autocommit=True) as admin:
            admin.execute("SELECT pg_terminate_backend(%s, 5000)", (conn.info.backend_pid,))
        with pytest.raises(DatabaseError):
            held.release()
        held.release()
        assert not held.held


@pytest.mark.parametrize("allow_pooler", [False, True])
async def test_a_lock_that_was_granted_to_a_sync_guard_before_the_error_ends_with_the_connection(
    dsn: str, name: str, monkeypatch: pytest.MonkeyPatch, allow_pooler: bool
) -> None:
    taking = "guard_take_pooled" if allow_pooler else "guard_take"
    monkeypatch.setattr(guarding, "statement", failing_statements(taking))
    conn = psycopg.connect(dsn, autocommit=True)
    with pytest.raises(DatabaseError, match="taking the lock failed: division by zero"):
        acquire_leadership(conn, name, allow_pooler=allow_pooler)
    assert conn.closed
    await until_held_by(dsn, key_pair(name), 0)


def test_a_blocking_connection_serves_on_after_an_error_that_granted_nothing(dsn: str, name: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as leads, psycopg.connect(dsn, autocommit=True) as tries:
        with acquire_leadership(leads, name), pytest.MonkeyPatch.context() as broken:
            broken.setattr(guarding, "statement", failing_statements("guard_take"))
            with pytest.raises(DatabaseError, match="division by zero"):
                acquire_leadership(tries, name)
        with acquire_leadership(tries, name) as held:
            assert held.check()
