"""The server's own view of a lock, and what an operator can do to its sessions."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg

from pgleaderlock.embedded import EmbeddedPostgres
from pgleaderlock.keys import KeyPair

__all__ = [
    "backends",
    "connections_named",
    "frozen",
    "holders",
    "settings_of",
    "terminate",
    "until_held_by",
    "until_waited_for",
]

_HOLDERS = """
SELECT pid FROM pg_locks
 WHERE locktype = 'advisory' AND granted AND classid::bigint = %s AND objid::bigint = %s AND objsubid = 2
   AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
POLL_S = 0.02
WAIT_S = 20.0


def _look(dsn: str) -> psycopg.Connection[tuple[int]]:
    return psycopg.connect(dsn, autocommit=True, application_name="pgleaderlock-test-look", connect_timeout=5)


def holders(dsn: str, keys: KeyPair) -> list[int]:
    """The backends that hold this lock: none or one, or the promise is broken."""
    with _look(dsn) as look:
        return [row[0] for row in look.execute(_HOLDERS, (keys[0] & 0xFFFFFFFF, keys[1] & 0xFFFFFFFF)).fetchall()]


async def until_held_by(dsn: str, keys: KeyPair, wanted: int) -> list[int]:
    """Poll until `wanted` backends hold the lock: nothing announces a change in pg_locks."""
    deadline = time.monotonic() + WAIT_S
    while len(found := await asyncio.to_thread(holders, dsn, keys)) != wanted and time.monotonic() < deadline:
        await asyncio.sleep(POLL_S)
    assert len(found) == wanted, f"{len(found)} sessions hold the lock, not {wanted}"
    return found


async def until_waited_for(dsn: str, keys: KeyPair, waiters: int = 1) -> None:
    """Poll until so many sessions wait at the server for this lock: nothing announces that."""
    async with (
        asyncio.timeout(WAIT_S),
        await psycopg.AsyncConnection.connect(dsn, autocommit=True, application_name="test-look") as look,
    ):
        while True:
            cursor = await look.execute(
                "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND classid::bigint = %s",
                (keys[0] & 0xFFFFFFFF,),
            )
            row = await cursor.fetchone()
            if row is not None and row[0] >= waiters:
                return
            await asyncio.sleep(POLL_S)


def terminate(dsn: str, keys: KeyPair) -> int:
    """End the session that holds the lock, as a DBA would."""
    (pid,) = holders(dsn, keys)
    with _look(dsn) as look:
        look.execute("SELECT pg_terminate_backend(%s)", (pid,))
    return pid


def backends(dsn: str) -> list[int]:
    with _look(dsn) as look:
        return [row[0] for row in look.execute("SELECT pid FROM pg_stat_activity").fetchall()]


def connections_named(dsn: str, pattern: str) -> int:
    with _look(dsn) as look:
        row = look.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE %s", (pattern,)
        ).fetchone()
    assert row is not None
    return row[0]


def settings_of(dsn: str, name: str) -> str:
    with _look(dsn) as look:
        row = look.execute("SELECT current_setting(%s)", (name,)).fetchone()
    assert row is not None
    return str(row[0])


@contextlib.contextmanager
def frozen(server: EmbeddedPostgres) -> Iterator[None]:
    """The whole server stands still: the postmaster and everything it has started."""
    pids = [server.postmaster_pid, *_children(server.postmaster_pid)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _children(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
