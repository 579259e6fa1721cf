"""The fence for SQLAlchemy: connections and sessions, async and sync. Needs the extra `sqlalchemy`.

    async with fenced(session, token):
        session.add(Invoice(…))

`pgleaderlock.fence` says what it promises and what it does not. Tested with the driver psycopg; another driver must
provide the SQLSTATE of an error, as psycopg2 and asyncpg do.
"""

import re
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar, overload

from pgleaderlock._base.steps import Steps
from pgleaderlock._pg.statements import statement
from pgleaderlock.errors import ConfigurationError
from pgleaderlock.fence import (
    IDLE_TIMEOUT_S,
    TRIES_MAX,
    Block,
    fence_lost,
    fence_params,
    fenced_async,
    fenced_sync,
    meaning,
    still_fenced,
)
from pgleaderlock.models import LeaderToken

try:
    from sqlalchemy import Connection, text
    from sqlalchemy.exc import DBAPIError
    from sqlalchemy.orm import Session
except ImportError as error:
    raise ImportError(
        "pgleaderlock.contrib.sqlalchemy needs sqlalchemy: pip install 'pgleaderlock[sqlalchemy]'", name=error.name
    ) from error

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

__all__ = ["fenced"]

_FENCE = text(re.sub(r"%\((\w+)\)s", r":\1", statement("fence").decode()))
_MARKS = text(statement("fence_marks").decode())
_IDLE, _IN_TRANSACTION = 0, 2  # libpq's PQTRANS_IDLE and PQTRANS_INTRANS, which psycopg and psycopg2 pass on

AsyncTarget = TypeVar("AsyncTarget", bound="AsyncConnection | AsyncSession")
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
    """A block in which the transaction of this connection or session is fenced: `async with` for async ones, or `with`.

    It begins a transaction and commits it at the end of the block, or joins the open transaction, which you then end
    yourself. Raises `StaleEpoch`, before the block is entered, if the token's epoch is no longer the current one, and
    `FenceLost` at the end of the block if the open transaction is not the fenced one.
    """
    block = _SqlalchemyBlock(target, token, fence_params(token, idle_timeout_s))
    if _is_async(target):
        return fenced_async(block)
    if isinstance(target, Connection | Session):
        return fenced_sync(block)
    raise ConfigurationError(
        f"fenced takes a Connection, Session, AsyncConnection or AsyncSession, not {type(target).__name__}"
    )


def _is_async(target: object) -> bool:
    """Is it an async connection or session? SQLAlchemy's asyncio part needs greenlet, so it is not imported here: if it
    has not been imported, the target cannot be async."""
    aio = sys.modules.get("sqlalchemy.ext.asyncio")
    return aio is not None and isinstance(target, aio.AsyncConnection | aio.AsyncSession)


class _SqlalchemyBlock(Block):
    def tries(self) -> int:
        target = self.target
        self._joins = target.in_transaction()
        if not self._joins:
            return TRIES_MAX
        if _is_async(target):
            target = target.sync_session if hasattr(target, "sync_session") else target.sync_connection
        return 0 if _guarded(target) else 1

    def begin(self) -> Any:
        return self.target.begin_nested() if self._joins else self.target.begin()

    def send(self) -> Steps[None]:
        yield self._carried_out(_send)

    def check(self) -> Steps[None]:
        yield self._carried_out(_check)

    def _carried_out(self, act: Callable[..., None]) -> Any:
        if _is_async(self.target):
            return self.target.run_sync(act, self.token, self.params)
        return act(self.target, self.token, self.params)


def _guarded(target: Connection | Session | None) -> bool:
    """Is this transaction a `with` block, in which SQLAlchemy refuses statements after a `commit()` or `rollback()`?

    Otherwise, writes after a `commit()` within our block would not be fenced: then we open a savepoint as a block,
    which makes SQLAlchemy refuse them.
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


def _check(target: Connection | Session, token: LeaderToken, params: dict[str, object]) -> None:
    if not target.in_transaction():
        return  # SQLAlchemy's own commit() or rollback() has ended it, and refuses further statements in the block
    connection = target.connection() if isinstance(target, Session) else target
    driver = connection.connection.driver_connection
    info: Any = getattr(driver, "info", None)
    status = getattr(info, "transaction_status", _IN_TRANSACTION if _in_transaction(connection) else _IDLE)
    reported = info.parameter_status("application_name") if hasattr(info, "parameter_status") else None
    is_fenced = still_fenced(status, reported, params)
    if is_fenced is None:
        is_fenced = str(params["mark"]) in (connection.execute(_MARKS).scalar() or "")
    if not is_fenced:
        raise fence_lost(token)


def _in_transaction(connection: Connection) -> bool:
    """Is a transaction open, according to the driver, or else according to SQLAlchemy?"""
    driver = connection.connection.driver_connection
    status = getattr(getattr(driver, "info", None), "transaction_status", None)
    if status is not None:
        return bool(status == _IN_TRANSACTION)
    asked = getattr(driver, "is_in_transaction", None)  # asyncpg
    if callable(asked):
        return bool(asked())
    return connection.get_execution_options().get("isolation_level") != "AUTOCOMMIT"
