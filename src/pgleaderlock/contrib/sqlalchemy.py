"""The fence for SQLAlchemy: connections and sessions, async and sync. Needs the extra `sqlalchemy`.

    async with fenced(session, token):
        session.add(Invoice(…))

What it promises and what it does not is said in `pgleaderlock.fence`. Tested with the driver psycopg; others have to
say the SQLSTATE of an error, as psycopg2 and asyncpg do.

Imports SQLAlchemy and `fence`. The core must never import this.
"""

import contextlib
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, TypeVar, overload

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from pgleaderlock._sql import statement
from pgleaderlock.errors import ConfigurationError, FenceLost, StaleEpoch
from pgleaderlock.fence import IDLE_TIMEOUT_S, TRIES_MAX, fence_lost, fence_params, meaning, raced, still_fenced
from pgleaderlock.models import LeaderToken

__all__ = ["fenced"]

_FENCE = text(re.sub(r"%\((\w+)\)s", r":\1", statement("fence").decode()))
_MARKS = text(statement("fence_marks").decode())
_IDLE, _IN_TRANSACTION = 0, 2  # libpq's PQTRANS_IDLE and PQTRANS_INTRANS, which psycopg and psycopg2 pass on

AsyncTarget = TypeVar("AsyncTarget", bound=AsyncConnection | AsyncSession)
SyncTarget = TypeVar("SyncTarget", bound=Connection | Session)


@overload
def fenced(
    target: AsyncTarget, token: LeaderToken, *, idle_timeout_s: float = IDLE_TIMEOUT_S
) -> AbstractAsyncContextManager[AsyncTarget]: ...


@overload
def fenced(
    target: SyncTarget, token: LeaderToken, *, idle_timeout_s: float = IDLE_TIMEOUT_S
) -> AbstractContextManager[SyncTarget]: ...


def fenced(target: Any, token: LeaderToken, *, idle_timeout_s: float = IDLE_TIMEOUT_S) -> Any:
    """A block in which the transaction of this connection or session is fenced: `async with` or `with`, as it is.

    Begins a transaction and commits it at the end of the block, or joins the one that is open and leaves the end of it
    to you. Raises `StaleEpoch`, before the block is entered, when the token's epoch is no longer the current one, and
    `FenceLost` at the end of the block when the transaction that is open then is not the one that was fenced.
    """
    params = fence_params(token, idle_timeout_s)
    if isinstance(target, AsyncConnection | AsyncSession):
        return _fenced_async(target, token, params)
    if isinstance(target, Connection | Session):
        return _fenced_sync(target, token, params)
    raise ConfigurationError(
        f"fenced takes a Connection, Session, AsyncConnection or AsyncSession, not {type(target).__name__}"
    )


@contextlib.asynccontextmanager
async def _fenced_async(
    target: AsyncConnection | AsyncSession, token: LeaderToken, params: dict[str, object]
) -> AsyncIterator[AsyncConnection | AsyncSession]:
    joined = target.in_transaction()
    if joined and _guarded(target.sync_session if isinstance(target, AsyncSession) else target.sync_connection):
        await target.run_sync(_send, token, params)
        yield target
        await target.run_sync(_check, token, params)
        return
    retries = 0 if joined else TRIES_MAX - 1
    entered = False
    while True:
        try:
            with _unmasked() as losses:
                async with target.begin_nested() if joined else target.begin():
                    await target.run_sync(_send, token, params)
                    entered = True
                    yield target
                    await target.run_sync(_check, token, params, losses)
            return
        except StaleEpoch as error:
            if entered or not retries or not raced(error):
                raise
            retries -= 1


@contextlib.contextmanager
def _fenced_sync(
    target: Connection | Session, token: LeaderToken, params: dict[str, object]
) -> Iterator[Connection | Session]:
    joined = target.in_transaction()
    if joined and _guarded(target):
        _send(target, token, params)
        yield target
        _check(target, token, params)
        return
    retries = 0 if joined else TRIES_MAX - 1
    entered = False
    while True:
        try:
            with _unmasked() as losses, target.begin_nested() if joined else target.begin():
                _send(target, token, params)
                entered = True
                yield target
                _check(target, token, params, losses)
            return
        except StaleEpoch as error:
            if entered or not retries or not raced(error):
                raise
            retries -= 1


@contextlib.contextmanager
def _unmasked() -> Iterator[list[FenceLost]]:
    """The loss of a fence comes through, though the rollback after it fails: its savepoint has gone as well."""
    losses: list[FenceLost] = []
    try:
        yield losses
    except SQLAlchemyError as error:
        if losses:
            raise losses[0] from error
        raise


def _guarded(target: Connection | Session | None) -> bool:
    """Is this transaction a `with` block, in which SQLAlchemy lets nothing follow a `commit()` or `rollback()`?

    Where it is not, what is written after a `commit()` within our block would be fenced by nothing: a savepoint of
    ours, as a block, makes SQLAlchemy refuse that.
    """
    return getattr(target, "_trans_context_manager", None) is not None


def _send(target: Connection | Session, token: LeaderToken, params: dict[str, object]) -> None:
    connection = target.connection() if isinstance(target, Session) else target
    try:
        connection.execute(_FENCE, params)
    except DBAPIError as error:
        refusal = None if error.orig is None else meaning(error.orig, token)
        if refusal is None:
            raise
        raise refusal from error.orig
    if not _in_transaction(connection):
        raise ConfigurationError(
            "this connection is in AUTOCOMMIT, where a fence is over before anything is written: "
            "choose another isolation level for it"
        )


def _check(
    target: Connection | Session, token: LeaderToken, params: dict[str, object], losses: list[FenceLost] | None = None
) -> None:
    """Raise `FenceLost`, and note it in `losses`, unless the transaction that is open is the fenced one."""
    if not target.in_transaction():
        return  # ended by SQLAlchemy's own commit() or rollback(), after which it lets nothing follow in the block
    connection = target.connection() if isinstance(target, Session) else target
    driver = connection.connection.driver_connection
    info: Any = getattr(driver, "info", None)
    status = getattr(info, "transaction_status", _IN_TRANSACTION if _in_transaction(connection) else _IDLE)
    reported = info.parameter_status("application_name") if hasattr(info, "parameter_status") else None
    is_fenced = still_fenced(status, reported, params)
    if is_fenced is None:
        is_fenced = str(params["mark"]) in (connection.execute(_MARKS).scalar() or "")
    if not is_fenced:
        lost = fence_lost(token)
        if losses is not None:
            losses.append(lost)
        raise lost


def _in_transaction(connection: Connection) -> bool:
    """What the driver says about the open transaction, or else what SQLAlchemy was told."""
    driver = connection.connection.driver_connection
    status = getattr(getattr(driver, "info", None), "transaction_status", None)
    if status is not None:
        return bool(status == _IN_TRANSACTION)
    asked = getattr(driver, "is_in_transaction", None)  # asyncpg
    if callable(asked):
        return bool(asked())
    return connection.get_execution_options().get("isolation_level") != "AUTOCOMMIT"
