"""The same for threads and scripts: one-shot leadership on an ordinary, blocking psycopg connection.

Imports `_guarding`, `_hangup`, `_pool_check`, `_sql`, `keys`, `errors`, `_logging` and psycopg. Starts no thread and no
event loop.
"""

import os
import threading
import warnings
from typing import Any, Self

import psycopg
from psycopg.rows import tuple_row

from pgleaderlock import _guarding as guarding
from pgleaderlock._hangup import Hangup
from pgleaderlock._logging import get_logger
from pgleaderlock._pool_check import Backend, prove_sync
from pgleaderlock._sql import statement
from pgleaderlock.errors import ConnectionError, DatabaseError, PgLeaderLockError
from pgleaderlock.keys import DEFAULT_NAMESPACE, KeyPair, key_pair, key_params

__all__ = ["LeadershipGuard", "acquire_leadership"]

_log = get_logger("pgleaderlock")


class LeadershipGuard:
    """Leadership that was obtained. Release it, or leave its block; lose it, and `lost()` returns True.

    It belongs to the process that obtained it: in a forked child it is not held, and sends nothing.
    """

    def __init__(self, name: str, key: KeyPair, conn: psycopg.Connection[Any], backend_pid: int) -> None:
        self.name = name
        self.key = key
        self._conn: psycopg.Connection[Any] | None = conn
        self._backend_pid = backend_pid
        self._hung_up = False
        self._owner_pid = os.getpid()
        self._turn = threading.Lock()

    @property
    def held(self) -> bool:
        """Not released, and the connection not known to be closed. `check()` asks the server."""
        conn = self._conn
        return conn is not None and os.getpid() == self._owner_pid and not conn.closed and not self._hung_up

    def release(self) -> None:
        """Give leadership back. A second call does nothing, nor does any call in a forked child.

        Raises `DatabaseError` if the session had died before: somebody else may have led meanwhile.
        """
        self._release(abandon=False)

    def check(self) -> bool:
        """Ask the server for proof that this very session holds the lock. False when it does not."""
        if not self.held or self._conn is None:
            return False
        params = {**key_params(self.key), "backend_pid": self._backend_pid}
        return bool(_ask(self._conn, "checking the lock", "guard_check", params)[0])

    def lost(self, timeout_s: float | None = None) -> bool:
        """Block until the session has died, noticed at the socket; False when `timeout_s` is over first.

        Never reads from the connection, so that another thread may use it meanwhile. True at once if nothing is held.
        """
        if not self.held or self._conn is None:
            return True
        hangup = Hangup(self._conn.fileno())
        try:
            self._hung_up = hangup.wait(timeout_s)
            return self._hung_up
        finally:
            hangup.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        if exc_type is None:
            self.release()
            return
        try:
            self._release(abandon=True)
        except PgLeaderLockError as error:  # the exception that is on its way out says more than this one
            _log.warning("release_failed", lock=self.name, error=error)

    def _release(self, *, abandon: bool) -> None:
        if os.getpid() == self._owner_pid:
            # One at a time: the unlock of a second call would free what the connection has taken anew in between.
            with self._turn:
                self._release_once(abandon=abandon)

    def _release_once(self, *, abandon: bool) -> None:
        conn = self._conn
        if conn is None:
            return
        if not self.held:
            self._forget(conn)
            raise DatabaseError(f"leadership of {self.name!r} was lost before it was released: its session has ended")
        try:
            if guarding.must_roll_back(conn, abandon=abandon):
                conn.rollback()
            guarding.check_releasable(conn, self.name)
            row = _decisive(conn, "releasing the lock", "guard_unlock", key_params(self.key))
        except psycopg.Error as error:
            self._forget_if_closed(conn)
            raise guarding.failed("rolling back", error) from error
        except DatabaseError:
            self._forget_if_closed(conn)
            raise
        self._forget(conn)
        if not row[0]:
            raise guarding.not_held(self.name)

    def _forget_if_closed(self, conn: psycopg.Connection[Any]) -> None:
        if conn.closed:
            self._forget(conn)

    def _forget(self, conn: psycopg.Connection[Any]) -> None:
        self._conn = None
        guarding.forget(conn, self.key)

    def __del__(self) -> None:
        if getattr(self, "_conn", None) is not None and self.held:
            warnings.warn(
                f"the guard of {self.name!r} was dropped while it held leadership: release it, or use `with`",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )


def acquire_leadership(
    conn: psycopg.Connection[Any], name: str, *, namespace: str = DEFAULT_NAMESPACE, allow_pooler: bool = False
) -> LeadershipGuard:
    """Try once to lead `name` on this open connection, which must be in autocommit. Neither waits nor retries.

    Raises `LockNotAcquired` if somebody else leads, `DatabaseError` for everything else that can go wrong. If it is
    interrupted in mid-statement (Ctrl-C), the connection is closed: whether the lock was granted is unknown then.
    """
    keys = key_pair(name, namespace)
    guarding.check_kind(conn, psycopg.Connection)
    with guarding.claimed(conn, name, keys):
        guarding.check_fit(conn)
        backend_pid = _proven_pid(conn) if allow_pooler else conn.pgconn.backend_pid
        params = {**key_params(keys), "backend_pid": backend_pid}
        row = _take(conn, "guard_take_pooled" if allow_pooler else "guard_take", params)
        if row[0]:
            return LeadershipGuard(name, keys, conn, backend_pid)
        if row[0] is None:
            (in_recovery,) = _ask(conn, "looking at the session", "guard_diagnose", {})
            raise guarding.not_fit(in_recovery, allow_pooler=allow_pooler)
        raise guarding.not_acquired(name, _holder(conn, keys))


def _proven_pid(conn: psycopg.Connection[Any]) -> int:
    """The backend behind an allowed pooler, once it is proven to be ours alone."""

    def sample() -> Backend:
        # Not prepared: a prepared statement would stay behind on a backend that turns out to be shared.
        backend = Backend(*_ask(conn, "looking at the session", "same_backend", None, prepare=False))
        guarding.check_between_transactions(conn)
        return backend

    try:
        return prove_sync(conn, sample).pid
    except ConnectionError as error:
        raise guarding.refused(error) from error


def _ask(
    conn: psycopg.Connection[Any], what: str, name: str, params: dict[str, Any] | None, *, prepare: bool | None = None
) -> tuple[Any, ...]:
    """One statement on the caller's connection, whatever its own cursor and row types are."""
    try:
        cursor = psycopg.Cursor(conn, row_factory=tuple_row)
        cursor.execute(statement(name), params, prepare=prepare)
        return cursor.fetchone() or ()
    except psycopg.Error as error:
        raise guarding.failed(what, error) from error


def _take(conn: psycopg.Connection[Any], take: str, params: dict[str, Any]) -> tuple[Any, ...]:
    """Try once. A statement may fail after the lock was granted, and a session's locks outlive its errors.

    If the lock is held after an error, or nobody can tell, the session ends.
    """
    try:
        return _decisive(conn, "taking the lock", take, params)
    except DatabaseError:
        if not conn.closed and not _is_free(conn, params):
            conn.close()
        raise


def _is_free(conn: psycopg.Connection[Any], params: dict[str, Any]) -> bool:
    """Does this very session not hold the lock?"""
    try:
        return _decisive(conn, "looking at the lock", "guard_free", params)[0] is True
    except DatabaseError:
        return False


def _decisive(conn: psycopg.Connection[Any], what: str, name: str, params: dict[str, Any]) -> tuple[Any, ...]:
    """A statement whose outcome decides who leads: interrupted, the outcome is unknown, and the session ends."""
    try:
        return _ask(conn, what, name, params)
    except PgLeaderLockError:
        raise
    except BaseException:
        conn.close()
        raise


def _holder(conn: psycopg.Connection[Any], keys: KeyPair) -> tuple[int, str | None] | None:
    try:
        row = _ask(conn, "looking for the holder", "guard_holder", key_params(keys))
    except DatabaseError:
        return None  # that somebody holds it is known; who it is, is a courtesy
    return (row[0], row[1]) if row else None
