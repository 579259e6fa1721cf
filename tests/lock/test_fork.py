"""A lock across `fork()`, as gunicorn with `--preload` and multiprocessing use it; and what every child draws anew."""

import asyncio
import contextlib
import gc
import os
import random
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pgleaderlock import (
    ConfigurationError,
    DecorrelatedJitter,
    FixedInterval,
    LeaderElection,
    LeaderLock,
    LockState,
    guard,
    key_pair,
)
from pgleaderlock._pg.conninfo import ConnectionSettings
from pgleaderlock._pg.session import DedicatedSession
from pgleaderlock.client import LockClient
from support.background import Background, background
from support.forked import Child, forked, in_child
from support.recorder import WAIT_S, Recorder
from support.server_side import holders

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")

OFTEN = FixedInterval(0.05)


@pytest.fixture
def name() -> str:
    return f"lock-fork-{uuid.uuid4()}"


@pytest.fixture
def parent() -> Iterator[Background]:
    with background() as loop:
        yield loop


def connecting(dsn: str) -> Callable[[], Any]:
    return lambda: psycopg.AsyncConnection.connect(dsn, autocommit=True)


@pytest.mark.parametrize("borrowed", [False, True])
def test_a_running_lock_is_stopped_in_the_child_until_it_is_started_there_and_its_parent_leads_on(
    dsn: str, name: str, parent: Background, borrowed: bool
) -> None:
    connect_fn = connecting(dsn) if borrowed else None
    lock = LeaderLock.for_name(dsn, name, retry_strategy=OFTEN, connect_fn=connect_fn)

    async def compete(child: Child) -> None:
        child.say([lock.is_leader, lock.state.value, lock.last_error])
        await lock.shutdown()
        recorder = Recorder(lock)
        async with lock:
            gc.collect()  # what is left of the parent's run must not be cleaned up here
            await recorder.heard("acquire_failed")
            child.say(lock.is_leader)
            child.say(await lock.wait_for_leadership(WAIT_S))
            await child.released()

    with parent.within(lock):
        assert parent.do(lock.wait_for_leadership(WAIT_S))
        (backend,) = holders(dsn, key_pair(name))
        with forked(compete) as child:
            assert child.hears() == [False, LockState.STOPPED.value, None]
            assert child.hears() is False
            assert lock.is_leader
            assert holders(dsn, key_pair(name)) == [backend]
            parent.do(lock.shutdown())
            assert child.hears() is True
            assert holders(dsn, key_pair(name)) not in ([], [backend])
            assert not lock.is_leader


async def test_a_child_that_was_forked_inside_the_running_loop_starts_the_lock_on_a_loop_of_its_own(
    dsn: str, name: str
) -> None:
    lock = LeaderLock.for_name(dsn, name, retry_strategy=OFTEN)

    async def compete(child: Child) -> None:
        recorder = Recorder(lock)
        async with lock:
            await recorder.heard("acquire_failed")
            child.say(lock.is_leader)

    async with lock:
        assert await lock.wait_for_leadership(WAIT_S)
        held_by = await asyncio.to_thread(holders, dsn, key_pair(name))
        with forked(compete) as child:
            assert await asyncio.to_thread(child.hears) is False
        assert lock.is_leader
        assert await asyncio.to_thread(holders, dsn, key_pair(name)) == held_by


def test_a_lock_whose_shutdown_event_belongs_to_the_parents_loop_is_not_started_in_the_child_and_says_why(
    dsn: str, name: str, parent: Background
) -> None:
    lock = LeaderLock.for_name(dsn, name, retry_strategy=OFTEN, shutdown_event=asyncio.Event())

    async def compete(child: Child) -> None:
        try:
            await lock.start()
        except ConfigurationError as error:
            child.say(str(error))

    with parent.within(lock):
        assert parent.do(lock.wait_for_leadership(WAIT_S))
        with forked(compete) as child:
            assert "shutdown_event belongs to another event loop" in child.hears()
        assert lock.is_leader


async def test_a_child_keeps_a_file_that_has_the_number_of_a_broken_sessions_socket(dsn: str, tmp_path: Path) -> None:
    unrelated = tmp_path / "unrelated"
    unrelated.touch()
    session = await DedicatedSession.open(dsn, ConnectionSettings("broken", statement_timeout_s=5, lease_s=15))
    number = session._connection.pgconn.socket
    with unrelated.open() as file:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as admin:
            await admin.execute("SELECT pg_terminate_backend(%s, 5000)", (session._connection.info.backend_pid,))
        async with asyncio.timeout(WAIT_S):
            await session.lost()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)  # libpq has closed it, while the session is not closed yet
        os.dup2(file.fileno(), number)
        try:
            assert in_child(lambda: str(Path(f"/proc/self/fd/{number}").readlink())) == str(unrelated)
        finally:
            os.close(number)
    await session.close()


# --- Chance


def rng_of_a_lock() -> random.Random:
    return LeaderLock("", 1, 2)._rng


def rng_of_an_election() -> random.Random:
    return LeaderElection("", "role")._rng


def rng_of_a_helper() -> random.Random:
    return guard._Seeker("", "name", "namespace", allow_pooler=False).rng


def rng_of_a_strategy() -> random.Random:
    return DecorrelatedJitter().copy()._rng


def rng_of_a_client() -> random.Random:
    with contextlib.closing(LockClient("http://127.0.0.1:1")) as client:
        return client._core.random


@pytest.mark.parametrize(
    "made", [rng_of_a_lock, rng_of_an_election, rng_of_a_helper, rng_of_a_strategy, rng_of_a_client]
)
def test_two_children_of_one_parent_do_not_draw_the_same_delays(made: Callable[[], random.Random]) -> None:
    rng = made()

    def drawn() -> str:
        return in_child(lambda: str([rng.random() for _ in range(4)]))

    first, second = drawn(), drawn()
    assert first.startswith("[")
    assert first != second
