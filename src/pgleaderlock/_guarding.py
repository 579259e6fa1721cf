"""What a guard knows without asking the database: is this connection fit, what went wrong, who holds what.

Shared by the async guard and its sync twin. Pure, except for the list of what each connection leads or is about to.
Imports psycopg's types, `errors`, `keys`, `_pool_check`, `_refusals` and the standard library only.
"""

import contextlib
import os
import weakref
from collections.abc import Iterator
from typing import Any

import psycopg
from psycopg import pq

from pgleaderlock._pool_check import shared_error
from pgleaderlock._refusals import pooler_error, standby_error
from pgleaderlock.errors import ConfigurationError, ConnectionError, DatabaseError, LockError, LockNotAcquired
from pgleaderlock.keys import KeyPair

__all__ = [
    "AnyConnection",
    "check_between_transactions",
    "check_fit",
    "check_kind",
    "check_releasable",
    "claimed",
    "failed",
    "forget",
    "must_roll_back",
    "not_acquired",
    "not_fit",
    "not_held",
    "refused",
]

AnyConnection = psycopg.AsyncConnection[Any] | psycopg.Connection[Any]


class _Claim:
    held = False


# Advisory locks are re-entrant: a second take on one connection would succeed, and the first release would not free the
# lock. So a key is claimed here before its statement is sent, and stays claimed until the lock is released. The claim
# is `dict.setdefault`, which is atomic: of several threads exactly one gets its own claim back.
_claims: weakref.WeakKeyDictionary[AnyConnection, dict[KeyPair, _Claim]] = weakref.WeakKeyDictionary()
# In a forked child: the connections on which the parent leads.
_inherited: weakref.WeakSet[AnyConnection] = weakref.WeakSet()


def check_kind(connection: object, kind: type[AnyConnection]) -> None:
    """Raise when this is no connection, or not one of this kind."""
    if not isinstance(connection, psycopg.AsyncConnection | psycopg.Connection):
        raise ConfigurationError(
            f"acquire_leadership takes an open psycopg connection, not {type(connection).__name__}"
            + (": with a DSN, use acquire_leadership_with_retry or _blocking" if isinstance(connection, str) else "")
        )
    if not isinstance(connection, kind):
        other = "pgleaderlock.sync.acquire_leadership" if kind is psycopg.AsyncConnection else "pgleaderlock"
        raise ConfigurationError(f"this is the other kind of connection: use acquire_leadership of {other}")


@contextlib.contextmanager
def claimed(connection: AnyConnection, name: str, keys: KeyPair) -> Iterator[None]:
    """Claim the key for the block, which takes the lock: one claim per connection and key, for all threads and tasks.

    Leaving the block without an exception keeps the claim until `forget`. Any exception frees it.
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


def check_fit(connection: AnyConnection) -> None:
    """Raise before anything is sent when this connection cannot carry a guard."""
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


def check_between_transactions(connection: AnyConnection) -> None:
    """Raise if a sample was taken inside a transaction, for the length of which every pooler keeps the session."""
    if connection.pgconn.transaction_status in (pq.TransactionStatus.INTRANS, pq.TransactionStatus.INERROR):
        raise DatabaseError("the connection was put into a transaction while its session was being proven: try again")


def must_roll_back(connection: AnyConnection, *, abandon: bool) -> bool:
    """A transaction that has failed, or that an exception has broken off, ends before leadership does."""
    status = connection.pgconn.transaction_status
    return status == pq.TransactionStatus.INERROR or (abandon and status == pq.TransactionStatus.INTRANS)


def check_releasable(connection: AnyConnection, name: str) -> None:
    """Raise when releasing now would let a successor start before this transaction has committed."""
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


def not_acquired(name: str, holder: tuple[Any, ...] | None) -> LockNotAcquired:
    if holder is None:  # gone in between, or invisible
        return LockNotAcquired(name)
    return LockNotAcquired(name, holder_pid=holder[0], holder_application_name=holder[1] or None)


def not_fit(in_recovery: bool, *, allow_pooler: bool) -> DatabaseError:
    if in_recovery:
        return refused(standby_error())
    if allow_pooler:
        return refused(shared_error())
    return refused(pooler_error("the server session behind this connection is not its own"))


def refused(error: ConnectionError) -> DatabaseError:
    """What the session's own refusal is called by a guard."""
    result = DatabaseError(str(error))
    result.__cause__ = error
    return result


def not_held(name: str) -> LockError:
    return LockError(f"the server says that leadership of {name!r} was not held by this session")


def failed(what: str, error: Exception) -> DatabaseError:
    text = " ".join(str(error).split())
    return DatabaseError(f"{what} failed: {text}")


def _disown_in_child() -> None:
    """In a forked child: what the parent leads on, or is about to, stays the parent's."""
    _inherited.update(connection for connection, claims in _claims.items() if claims)
    _claims.clear()


os.register_at_fork(after_in_child=_disown_in_child)
