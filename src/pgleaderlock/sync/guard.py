"""One-shot leadership for threads and scripts: `pgleaderlock.guard` for callers without an event loop.

On the caller's connection, no thread is started: each call blocks on that connection. With a DSN, the guard has a
separate connection, which the background loop probes and which has a lease at the server.
"""

import os
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any, Protocol, Self

import psycopg

from pgleaderlock import guard as aio
from pgleaderlock._base.aio import within
from pgleaderlock._base.logging import get_logger
from pgleaderlock._base.steps import run_blocking
from pgleaderlock._config.durations import check_timeout
from pgleaderlock._lock import guarding
from pgleaderlock._lock.guarding import Hangup, Holder
from pgleaderlock._pg.conninfo import Dsn
from pgleaderlock.errors import DatabaseError, LockNotAcquired, PgLeaderLockError
from pgleaderlock.keys import DEFAULT_NAMESPACE, KeyPair, key_pair
from pgleaderlock.retry import JITTER, RetryStrategy
from pgleaderlock.sync import background

__all__ = [
    "LeadershipGuard",
    "acquire_leadership",
    "acquire_leadership_blocking",
    "acquire_leadership_with_retry",
]

# The delay between two tries on a borrowed connection. Waiting at the server would change the connection's settings.
TRY_AGAIN_S = (0.05, 0.15)

_log = get_logger("pgleaderlock")


class _Backing(Protocol):
    """What holds a guard's lock: the caller's connection, or a session of our own."""

    @property
    def held(self) -> bool: ...
    def release(self, *, abandon: bool) -> None: ...
    def check(self) -> bool: ...
    def lost(self, timeout_s: float | None) -> bool: ...


class LeadershipGuard:
    """Leadership that was obtained. Call `release()` or leave the guard's block to end it; `lost()` reports a loss.

    It belongs to the process that obtained it: in a forked child it is not held, and sends nothing.
    """

    def __init__(self, name: str, key: KeyPair, backing: _Backing) -> None:
        self.name = name
        self.key = key
        self._backing = backing
        self._owner_pid = os.getpid()
        self._turn = threading.Lock()

    @property
    def held(self) -> bool:
        """True while leadership was not released and the connection is not known to be closed. `check()` asks the
        server."""
        return os.getpid() == self._owner_pid and self._backing.held

    def release(self) -> None:
        """Release leadership. A second call does nothing, and neither does a call in a forked child.

        Raises `DatabaseError` if the session had ended before: another node may have led in between.
        """
        self._release(abandon=False)

    def check(self) -> bool:
        """Ask the server for proof that this same session holds the lock. False if it does not."""
        return self.held and self._backing.check()

    def lost(self, timeout_s: float | None = None) -> bool:
        """Block until the session has ended, which is noticed at the socket; False on a timeout.

        Never reads from the connection, so that another thread may use it meanwhile. True at once if nothing is held.
        """
        return not self.held or self._backing.lost(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, leaving: BaseException | None, _trace: object) -> None:
        if leaving is None:
            self.release()
            return
        try:
            self._release(abandon=True)
        except PgLeaderLockError as error:
            _log.failed_at_exit("release_failed", error, leaving, lock=self.name)

    def _release(self, *, abandon: bool) -> None:
        if os.getpid() == self._owner_pid:
            # One at a time: the unlock of a second call would free a lock that the connection has taken again in
            # between.
            with self._turn:
                self._backing.release(abandon=abandon)

    def __del__(self) -> None:
        if getattr(self, "_backing", None) is not None and self.held:
            warnings.warn(
                f"the guard of {self.name!r} was dropped while it held leadership: release it, or use `with`",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )


def acquire_leadership(
    conn: "psycopg.Connection[Any] | Dsn",
    name: str,
    *,
    timeout_s: float | None = 0.0,
    namespace: str = DEFAULT_NAMESPACE,
    allow_pooler: bool = False,
) -> LeadershipGuard:
    """Lead `name` on this open connection, which must be in autocommit, or, with a DSN, on a separate connection.

    By default it tries once; with `timeout_s`, it tries for that many seconds, or without a limit if None. Raises
    `LockNotAcquired` if another session leads, and `DatabaseError` for every other failure. If it is interrupted
    (Ctrl-C), no lock is held: a borrowed connection is closed then, because it is unknown whether the lock was granted.
    """
    if isinstance(conn, str) or callable(conn):
        return acquire_leadership_blocking(conn, name, timeout_s, namespace=namespace, allow_pooler=allow_pooler)
    check_timeout(timeout_s)
    keys = key_pair(name, namespace)
    guarding.check_kind(conn, psycopg.Connection)
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        try:
            holder = run_blocking(guarding.take(conn, name, keys, allow_pooler=allow_pooler))
        except LockNotAcquired:
            delay_s = JITTER.uniform(*TRY_AGAIN_S)
            if deadline is not None and time.monotonic() + delay_s >= deadline:
                raise
            time.sleep(delay_s)
        else:
            return LeadershipGuard(name, keys, _OnConnection(conn, name, keys, holder))


def acquire_leadership_blocking(
    dsn: Dsn,
    name: str,
    timeout_s: float | None = None,
    *,
    namespace: str = DEFAULT_NAMESPACE,
    allow_pooler: bool = False,
) -> LeadershipGuard:
    """Wait at the server to lead `name`, on a separate connection. Raises `LockNotAcquired` after `timeout_s`."""
    return _obtained(
        lambda: aio.acquire_leadership_blocking(dsn, name, timeout_s, namespace=namespace, allow_pooler=allow_pooler)
    )


def acquire_leadership_with_retry(
    dsn: Dsn,
    name: str,
    policy: RetryStrategy,
    *,
    namespace: str = DEFAULT_NAMESPACE,
    allow_pooler: bool = False,
) -> LeadershipGuard:
    """Try repeatedly to lead `name` on a separate connection, with the policy's delays, until the policy gives up."""
    return _obtained(
        lambda: aio.acquire_leadership_with_retry(dsn, name, policy, namespace=namespace, allow_pooler=allow_pooler)
    )


def _obtained(acquire: Callable[[], Any]) -> LeadershipGuard:
    acquiring: background.Call[aio.LeadershipGuard] = background.submit(acquire)
    try:
        guard = acquiring.result()
        return LeadershipGuard(guard.name, guard.key, _OnSession(guard))
    except BaseException:
        # Interrupted just as the lock was granted: the caller never gets this guard, so release it.
        if acquiring.answer.done() and acquiring.answer.exception() is None:
            background.call(acquiring.answer.result().release)
        raise


class _OnConnection:
    """Holds the lock on the caller's connection, without a thread or a loop."""

    def __init__(self, conn: "psycopg.Connection[Any]", name: str, keys: KeyPair, holder: Holder) -> None:
        self._conn: psycopg.Connection[Any] | None = conn
        self._name, self._keys, self._holder = name, keys, holder
        self._hung_up = False

    @property
    def held(self) -> bool:
        conn = self._conn
        return conn is not None and not conn.closed and not self._hung_up

    def check(self) -> bool:
        conn = self._conn
        return conn is not None and run_blocking(guarding.check(conn, self._keys, self._holder))

    def lost(self, timeout_s: float | None) -> bool:
        if (conn := self._conn) is None:
            return True
        hangup = Hangup(conn.fileno())
        try:
            self._hung_up = hangup.wait(timeout_s)
            return self._hung_up
        finally:
            hangup.close()

    def release(self, *, abandon: bool) -> None:
        if (conn := self._conn) is None:
            return
        if not self.held:
            self._forget(conn)
            raise guarding.lost_before(self._name)
        try:
            unlocked = run_blocking(guarding.unlock(conn, self._name, self._keys, abandon=abandon))
        except DatabaseError:
            if conn.closed:
                self._forget(conn)
            raise
        self._forget(conn)
        if not unlocked:
            raise guarding.not_held(self._name)

    def _forget(self, conn: "psycopg.Connection[Any]") -> None:
        self._conn = None
        guarding.forget(conn, self._keys)


class _OnSession:
    """Holds the lock on a session of our own, with an async guard on the background loop."""

    def __init__(self, guard: aio.LeadershipGuard) -> None:
        self._guard = guard

    @property
    def held(self) -> bool:
        return self._guard.held

    def check(self) -> bool:
        return background.call(self._guard.check)

    def lost(self, timeout_s: float | None) -> bool:
        return background.call(lambda: within(timeout_s, self._guard.lost()))

    def release(self, *, abandon: bool) -> None:
        """Release. `abandon` makes no difference, because the session ends with the guard."""
        background.call(self._guard.release)
