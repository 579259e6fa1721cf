"""What the async and the sync guard share: one-shot leadership on a connection that the caller owns and goes on using.

The statements are steps (`_base.steps`), written once for both guards. This module records which connection leads, or
is about to lead, with which key. `Hangup` notices the end of a session without reading from its socket.

Must never leave a lock behind that no guard holds: if the outcome of a statement is unknown, the connection is closed.
"""

import contextlib
import os
import select
import threading
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import psycopg
from psycopg import pq

from pgleaderlock._base.steps import Steps
from pgleaderlock._pg.connect import AnyConnection, Backend, plain_cursor, prove, sampled
from pgleaderlock._pg.explain import pooler_error, shared_error, standby_error
from pgleaderlock._pg.statements import statement
from pgleaderlock.errors import (
    ConfigurationError,
    ConnectionError,
    DatabaseError,
    LockError,
    LockNotAcquired,
    PgLeaderLockError,
)
from pgleaderlock.keys import KeyPair, key_params

__all__ = [
    "Hangup",
    "Holder",
    "check",
    "check_kind",
    "forget",
    "lost_before",
    "not_acquired",
    "not_held",
    "take",
    "unlock",
]


# --- The statements


class Holder(NamedTuple):
    """The backend that took a lock: its pid, and when its server was started."""

    backend_pid: int
    server_start: str


def take(conn: AnyConnection, name: str, keys: KeyPair, *, allow_pooler: bool) -> Steps[Holder]:
    """Try once; returns the backend that took the lock. Raises `LockNotAcquired` or `DatabaseError`."""
    with _claimed(conn, name, keys):
        _check_fit(conn)
        backend_pid = (yield from _proven_pid(conn)) if allow_pooler else conn.pgconn.backend_pid
        params = {**key_params(keys), "backend_pid": backend_pid}
        granted, server_start = yield from _take(conn, "guard_take_pooled" if allow_pooler else "guard_take", params)
        if granted:
            return Holder(backend_pid, server_start)
        if granted is None:
            (in_recovery,) = yield from _ask(conn, "looking at the session", "guard_diagnose", {})
            raise _not_fit(in_recovery, allow_pooler=allow_pooler)
        raise not_acquired(name, (yield from _holder(conn, keys)))


def check(conn: AnyConnection, keys: KeyPair, holder: Holder) -> Steps[bool]:
    """Ask the server for proof that this same session holds the lock."""
    params = {**key_params(keys), **holder._asdict()}
    return bool((yield from _ask(conn, "checking the lock", "guard_check", params))[0])


def unlock(conn: AnyConnection, name: str, keys: KeyPair, *, abandon: bool) -> Steps[bool]:
    """Release the lock; False if this session did not hold it. `abandon`: first roll back an open transaction.

    Raises `LockError` without releasing if a successor could start before this transaction has committed.
    """
    status = conn.pgconn.transaction_status
    if status == pq.TransactionStatus.INERROR or (abandon and status == pq.TransactionStatus.INTRANS):
        try:
            yield conn.rollback()
        except psycopg.Error as error:
            raise _failed("rolling back", error) from error
    _check_releasable(conn, name)
    (unlocked,) = yield from _decisive(conn, "releasing the lock", "guard_unlock", key_params(keys))
    return bool(unlocked)


def _take(conn: AnyConnection, statement_name: str, params: dict[str, Any]) -> Steps[tuple[Any, ...]]:
    """Send the try. It may fail after the lock was granted, and a session's locks survive its errors.

    After an error, closes the connection if the session holds the lock or if that cannot be found out.
    """
    try:
        return (yield from _decisive(conn, "taking the lock", statement_name, params))
    except DatabaseError:
        if not conn.closed and not (yield from _is_free(conn, params)):
            yield conn.close()
        raise


def _is_free(conn: AnyConnection, params: dict[str, Any]) -> Steps[bool]:
    """Does the server say that this session does not hold the lock?"""
    try:
        return (yield from _decisive(conn, "looking at the lock", "guard_free", params))[0] is True
    except DatabaseError:
        return False


def _holder(conn: AnyConnection, keys: KeyPair) -> Steps[tuple[Any, ...] | None]:
    try:
        return (yield from _ask(conn, "looking for the holder", "guard_holder", key_params(keys))) or None
    except DatabaseError:
        return None  # the holder is only for the message


def _proven_pid(conn: AnyConnection) -> Steps[int]:
    """The pid of the backend behind an allowed pooler, proven to serve this connection only."""

    def sample(mark: str | None = None) -> Steps[Backend]:
        try:
            backend = yield from sampled(conn, mark)
        except psycopg.Error as error:
            raise _failed("looking at the session", error) from error
        # Within a transaction, every pooler keeps the backend: such a sample proves nothing.
        if conn.pgconn.transaction_status in (pq.TransactionStatus.INTRANS, pq.TransactionStatus.INERROR):
            raise DatabaseError(
                "the connection was put into a transaction while its session was being proven: try again"
            )
        return backend

    try:
        return (yield from prove(conn, sample)).pid
    except ConnectionError as error:
        raise DatabaseError(str(error)) from error


def _decisive(conn: AnyConnection, what: str, name: str, params: dict[str, Any]) -> Steps[tuple[Any, ...]]:
    """A statement that decides who leads. If it is cancelled or interrupted, its outcome is unknown: close the
    connection."""
    try:
        return (yield from _ask(conn, what, name, params))
    except PgLeaderLockError:
        raise
    except BaseException:
        yield conn.close()
        raise


def _ask(conn: AnyConnection, what: str, name: str, params: dict[str, Any]) -> Steps[tuple[Any, ...]]:
    """The first row of a statement; an empty one if there is none."""
    cursor = plain_cursor(conn)
    try:
        yield cursor.execute(statement(name), params)
        return (yield cursor.fetchone()) or ()
    except psycopg.Error as error:
        raise _failed(what, error) from error


# --- Which connection leads with which key


class _Claim:
    held = False


# Advisory locks are re-entrant: a second take on one connection would succeed, and the first release would not free the
# lock. So a key is claimed here before its statement is sent, and stays claimed until the lock is released. The claim
# is `dict.setdefault`, which is atomic: of several threads exactly one gets its own claim back.
_claims: weakref.WeakKeyDictionary[AnyConnection, dict[KeyPair, _Claim]] = weakref.WeakKeyDictionary()
# In a forked child: the connections on which the parent leads.
_inherited: weakref.WeakSet[AnyConnection] = weakref.WeakSet()


@contextlib.contextmanager
def _claimed(connection: AnyConnection, name: str, keys: KeyPair) -> Iterator[None]:
    """Claim the key for the block, which takes the lock. All threads and tasks share one claim per connection and key.

    If the block ends without an exception, the claim stays until `forget`. An exception removes it.
    """
    claim = _Claim()
    try:
        first = _claims.setdefault(connection, {}).setdefault(keys, claim)
        if first is not claim:
            raise _claimed_before(first, name)
        yield
        claim.held = True
    except BaseException:
        if _claims.get(connection, {}).get(keys) is claim:
            forget(connection, keys)
        raise


def _claimed_before(claim: _Claim, name: str) -> LockError | LockNotAcquired:
    if claim.held:
        return LockError(f"this connection already leads {name!r}: a lock taken twice would not be free when released")
    return LockNotAcquired(name)  # another thread or task is taking it on this connection right now


def forget(connection: AnyConnection, keys: KeyPair) -> None:
    _claims.get(connection, {}).pop(keys, None)


def _disown_in_child() -> None:
    """In a forked child: no connection on which the parent leads, or is about to lead, may be used."""
    _inherited.update(connection for connection, claims in _claims.items() if claims)
    _claims.clear()


os.register_at_fork(after_in_child=_disown_in_child)


# --- What a connection must be like


def check_kind(connection: object, kind: type[AnyConnection]) -> None:
    """Raise unless this is a connection of this kind."""
    if not isinstance(connection, psycopg.AsyncConnection | psycopg.Connection):
        raise ConfigurationError(
            f"acquire_leadership takes an open psycopg connection, not {type(connection).__name__}"
            + (": with a DSN, use acquire_leadership_with_retry or _blocking" if isinstance(connection, str) else "")
        )
    if not isinstance(connection, kind):
        other = "pgleaderlock.sync.acquire_leadership" if kind is psycopg.AsyncConnection else "pgleaderlock"
        raise ConfigurationError(f"this is the other kind of connection: use acquire_leadership of {other}")


def _check_fit(connection: AnyConnection) -> None:
    """Raise, before anything is sent, if a guard cannot use this connection."""
    if connection.closed:
        raise DatabaseError("the connection is closed: open one and keep it for as long as you lead")
    if connection in _inherited:
        raise DatabaseError("the parent process leads on this connection: a forked child must open one of its own")
    status = connection.pgconn.transaction_status
    if status == pq.TransactionStatus.INERROR:
        raise DatabaseError("the connection is in a failed transaction: roll it back first")
    if status == pq.TransactionStatus.ACTIVE:
        raise DatabaseError(
            "the connection is busy with a statement of another thread or task: let them take turns, "
            "or give each a connection of its own"
        )
    if status != pq.TransactionStatus.IDLE:
        raise DatabaseError("the connection is in a transaction: commit it first, a leader must not sit in one")
    if not connection.autocommit:
        raise DatabaseError(
            "the connection is not in autocommit, so leading on it would mean to sit in a transaction: "
            "connect with autocommit=True, and use `with conn.transaction()` where you need one"
        )


def _check_releasable(connection: AnyConnection, name: str) -> None:
    """Raise if releasing now would let a successor start before this transaction has committed."""
    status = connection.pgconn.transaction_status
    if status == pq.TransactionStatus.ACTIVE:
        raise LockError(
            f"leadership of {name!r} is not released while its connection is busy with a statement of another thread "
            "or task: wait for its end first"
        )
    if status == pq.TransactionStatus.INTRANS:
        raise LockError(
            f"leadership of {name!r} is not released while its connection is in a transaction: "
            "what it wrote would be committed after somebody else leads; commit or roll back first"
        )


# --- What went wrong


def not_acquired(name: str, holder: tuple[Any, ...] | None) -> LockNotAcquired:
    if holder is None:  # it has released the lock meanwhile, or this database role may not see it
        return LockNotAcquired(name)
    return LockNotAcquired(name, holder_pid=holder[0], holder_application_name=holder[1] or None)


def _not_fit(in_recovery: bool, *, allow_pooler: bool) -> DatabaseError:
    if in_recovery:
        reason = standby_error()
    elif allow_pooler:
        reason = shared_error()
    else:
        reason = pooler_error("the server session behind this connection is not its own")
    error = DatabaseError(str(reason))
    error.__cause__ = reason
    return error


def not_held(name: str) -> LockError:
    return LockError(f"the server says that leadership of {name!r} was not held by this session")


def lost_before(name: str) -> DatabaseError:
    return DatabaseError(f"leadership of {name!r} was lost before it was released: its session has ended")


def _failed(what: str, error: Exception) -> DatabaseError:
    return DatabaseError(f"{what} failed: {' '.join(str(error).split())}")


# --- The end of a session, noticed without reading a byte of its socket
#
# The caller uses the connection, so we cannot read from it. Even peeking would not help: a server that ends a session
# sends its reason first, so the end of the stream is hidden behind bytes that the caller has not read. Linux reports
# the hang-up by itself (EPOLLRDHUP), and an epoll descriptor can be waited for like any other.


class Hangup:
    """Its `fileno` becomes readable once the peer of the descriptor has hung up. Holds a duplicate until closed."""

    def __init__(self, descriptor: int) -> None:
        with _making:
            self._duplicate = os.dup(descriptor)
            self._epoll = select.epoll()
            # EPOLLHUP and EPOLLERR are always reported; EPOLLIN is not asked for.
            self._epoll.register(self._duplicate, select.EPOLLRDHUP)
            _watched.add(self)

    @property
    def closed(self) -> bool:
        return self._epoll.closed

    def fileno(self) -> int:
        return self._epoll.fileno()

    def wait(self, timeout_s: float | None) -> bool:
        """Block until the hang-up; False on a timeout."""
        return bool(self._epoll.poll(timeout_s, 1))

    def close(self) -> None:
        if not self._epoll.closed:
            self._epoll.close()
            os.close(self._duplicate)


_watched: weakref.WeakSet[Hangup] = weakref.WeakSet()
# Held while a `Hangup` is made, and by a thread that forks: a child must not inherit a duplicate that is not recorded.
_making = threading.Lock()


def _let_go_in_child() -> None:
    """In a forked child: close its duplicates. They would keep the parent's connections open after the parent's end."""
    _making.release()
    for hangup in list(_watched):
        hangup.close()


os.register_at_fork(before=_making.acquire, after_in_parent=_making.release, after_in_child=_let_go_in_child)
