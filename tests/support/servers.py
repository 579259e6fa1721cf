"""Throw-away servers, and looks into them from outside.

Imports pgleaderlock.embedded, psycopg and the standard library. Each server lives in a temporary folder of its own and
is gone, folder and all, when its context ends.
"""

import contextlib
import functools
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psycopg
from psycopg.sql import SQL, Identifier

from pgleaderlock.embedded import EmbeddedPostgres

__all__ = [
    "FAST_SETTINGS",
    "hash_quickly",
    "left_behind",
    "open_folder",
    "remove_template",
    "replica_of",
    "throwaway",
    "wait_until_nothing_left",
]

# Durability means nothing to a server that lives for one test.
FAST_SETTINGS = {"fsync": "off", "full_page_writes": "off", "max_connections": "200"}
# A bound for a busy machine: it is waited for only where something is left.
NOTHING_LEFT_TIMEOUT_S = 20.0
POLL_S = 0.02
MEMORY = Path("/dev/shm")
MEMORY_BYTES_MIN = 4 * 1024**3

_LEFT = """
SELECT 'session ' || a.pid || ' (' || coalesce(nullif(a.application_name, ''), 'no name') || ', '
       || coalesce(a.state, '?') || ', last statement: ' || left(a.query, 80) || ')'
  FROM pg_stat_activity a
 WHERE a.backend_type = 'client backend' AND a.pid <> pg_backend_pid()
UNION ALL
SELECT 'advisory lock ' || l.classid || '/' || l.objid || ' of ' || coalesce(l.pid::text, 'a prepared transaction')
       || CASE WHEN l.granted THEN '' ELSE ' (waiting)' END
  FROM pg_locks l
 WHERE l.locktype = 'advisory' AND l.pid IS DISTINCT FROM pg_backend_pid()
"""


@contextlib.contextmanager
def open_folder() -> Iterator[Path]:
    """A temporary folder that every account may pass through, which pytest's own are not."""
    folder = _made_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def throwaway(settings: Mapping[str, str] | None = None) -> Iterator[EmbeddedPostgres]:
    """A running server with a port of its own, from a copy of this process's template: initdb takes ten times as long.

    So the servers of one test process have the same system identifier and password.
    """
    with open_folder() as folder:
        subprocess.run(["cp", "-a", str(_template()), str(folder / "pg")], check=True)
        with EmbeddedPostgres(folder / "pg", port=0, settings={**FAST_SETTINGS, **(settings or {})}) as server:
            yield server


def _made_folder() -> Path:
    """In memory, where there is room: a data directory has a thousand files, and a disk's file system takes most of the
    time that it takes to copy them and to remove them again."""
    in_memory = MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= MEMORY_BYTES_MIN
    folder = Path(tempfile.mkdtemp(prefix="pgl-test-", dir=MEMORY if in_memory else "/tmp"))
    folder.chmod(0o711)
    return folder


@functools.cache
def _template() -> Path:
    folder = _made_folder()
    with (
        EmbeddedPostgres(folder / "pg", port=0, settings=FAST_SETTINGS) as server,
        psycopg.connect(server.dsn, autocommit=True) as conn,
    ):
        hash_quickly(conn)
        password = {"role": Identifier(conn.info.user), "password": conn.info.password}
        conn.execute(SQL("ALTER ROLE {role} PASSWORD {password}").format(**password))
    return folder / "pg"


def remove_template() -> None:
    """At the end of a test process."""
    if _template.cache_info().currsize:
        shutil.rmtree(_template().parent)
        _template.cache_clear()


@contextlib.contextmanager
def replica_of(primary: EmbeddedPostgres) -> Iterator[EmbeddedPostgres]:
    """A streaming replica with a port of its own."""
    with open_folder() as folder:
        replica = primary.make_replica(folder / "pg")
        try:
            yield replica
        finally:
            replica.close()


def hash_quickly(conn: psycopg.Connection[Any]) -> None:
    """Passwords that are set on this connection cost next to nothing to check: half of what a connection takes."""
    if conn.info.server_version >= 160000:
        conn.execute("SET scram_iterations = 1")


def left_behind(dsn: str) -> list[str]:
    """Every client session and advisory lock in the server, except our own look."""
    with psycopg.connect(dsn, autocommit=True, application_name="pgleaderlock-test-look", connect_timeout=5) as look:
        return [row[0] for row in look.execute(_LEFT).fetchall()]


def wait_until_nothing_left(dsn: str, timeout_s: float = NOTHING_LEFT_TIMEOUT_S) -> list[str]:
    """What is still there when the time is up. A server notices a closed connection a moment later, unannounced."""
    deadline = time.monotonic() + timeout_s
    while (left := left_behind(dsn)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return left
