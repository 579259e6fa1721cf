"""What a guard knows without asking the database: is this connection fit, what went wrong, who holds what.

Shared by the async guard and its sync twin. Pure, except for the list of what each connection already holds. Imports
psycopg's types, `errors`, `keys` and the standard library only.
"""

import weakref
from typing import Any

import psycopg
from psycopg import pq

from pgleaderlock._refusals import pooler_error, standby_error
from pgleaderlock.errors import ConfigurationError, DatabaseError, LockError, LockNotAcquired
from pgleaderlock.keys import KeyPair, key_params

__all__ = [
    "AnyConnection",
    "check_fit",
    "check_releasable",
    "failed",
    "forget",
    "must_roll_back",
    "not_acquired",
    "not_fit",
    "not_held",
    "remember",
    "take_params",
]

AnyConnection = psycopg.AsyncConnection[Any] | psycopg.Connection[Any]

# Advisory locks are re-entrant, so a second take on one connection would succeed, and the first release would release
# nothing. What each connection holds is remembered here for as long as the connection lives.
_held: weakref.WeakKeyDictionary[AnyConnection, set[KeyPair]] = weakref.WeakKeyDictionary()


def check_fit(connection: object, kind: type[AnyConnection], name: str, keys: KeyPair) -> None:
    """Raise before anything is sent when this connection cannot carry a guard."""
    if not isinstance(connection, psycopg.AsyncConnection | psycopg.Connection):
        raise ConfigurationError(
            f"acquire_leadership takes an open psycopg connection, not {type(connection).__name__}"
            + (": with a DSN, use acquire_leadership_with_retry or _blocking" if isinstance(connection, str) else "")
        )
    if not isinstance(connection, kind):
        other = "pgleaderlock.sync.acquire_leadership" if kind is psycopg.AsyncConnection else "pgleaderlock"
        raise ConfigurationError(f"this is the other kind of connection: use acquire_leadership of {other}")
    if connection.closed:
        raise DatabaseError("the connection is closed: open one and keep it for as long as you lead")
    status = connection.pgconn.transaction_status
    if status == pq.TransactionStatus.INERROR:
        raise DatabaseError("the connection is in a failed transaction: roll it back first")
    if status != pq.TransactionStatus.IDLE:
        raise DatabaseError("the connection is in a transaction: commit it first, a leader must not sit in one")
    if not connection.autocommit:
        raise DatabaseError(
            "the connection is not in autocommit, so leading on it would mean to sit in a transaction: "
            "connect with autocommit=True, and use `with conn.transaction()` where you need one"
        )
    if keys in _held.get(connection, ()):
        raise LockError(f"this connection already leads {name!r}: a lock taken twice would not be free when released")


def must_roll_back(connection: AnyConnection, *, abandon: bool) -> bool:
    """A transaction that has failed, or that an exception has broken off, ends before leadership does."""
    status = connection.pgconn.transaction_status
    return status == pq.TransactionStatus.INERROR or (abandon and status == pq.TransactionStatus.INTRANS)


def check_releasable(connection: AnyConnection, name: str) -> None:
    """Raise when releasing now would let a successor start before this transaction has committed."""
    if connection.pgconn.transaction_status in (pq.TransactionStatus.INTRANS, pq.TransactionStatus.ACTIVE):
        raise LockError(
            f"leadership of {name!r} is not released while its connection is in a transaction: "
            "what it wrote would be committed after somebody else leads; commit or roll back first"
        )


def remember(connection: AnyConnection, keys: KeyPair) -> None:
    _held.setdefault(connection, set()).add(keys)


def forget(connection: AnyConnection, keys: KeyPair) -> None:
    _held.get(connection, set()).discard(keys)


def take_params(connection: AnyConnection, keys: KeyPair, *, allow_pooler: bool) -> dict[str, object]:
    return {**key_params(keys), "backend_pid": connection.pgconn.backend_pid, "allow_pooler": allow_pooler}


def not_acquired(name: str, holder: tuple[Any, ...] | None) -> LockNotAcquired:
    if holder is None:  # gone in between, or invisible
        return LockNotAcquired(name)
    return LockNotAcquired(name, holder_pid=holder[0], holder_application_name=holder[1] or None)


def not_fit(in_recovery: bool) -> DatabaseError:
    error = standby_error() if in_recovery else pooler_error("the server session behind this connection is not its own")
    result = DatabaseError(str(error))
    result.__cause__ = error
    return result


def not_held(name: str) -> LockError:
    return LockError(f"the server says that leadership of {name!r} was not held by this session")


def failed(what: str, error: Exception) -> DatabaseError:
    text = " ".join(str(error).split())
    return DatabaseError(f"{what} failed: {text}")
