"""The fence: a transaction that can only commit while its leader's epoch is the current one.

    async with fenced(conn, token):
        await conn.execute("UPDATE jobs SET …")

The fence is one more statement in your own transaction. From then until the transaction ends, no newer epoch can begin,
so your writes are committed before the next leader starts, or not at all. It needs no clock, and works at every
isolation level.

What it does not promise: anything about writes outside this transaction, in another database or to another system; or
about writes after a COMMIT or ROLLBACK of your own inside the block, or after a rollback to a savepoint that is older
than the fence. The fence ends there, and the end of the block raises `FenceLost`. A transaction that stays open delays
the next leader; if it is idle for too long, the server ends it.

Must never write anything itself, and never send a notification: it runs in the caller's transaction.
"""

import contextlib
import math
import secrets
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, TypeVar, overload

import psycopg
from psycopg import pq

from pgleaderlock._base.steps import Steps, run, run_blocking
from pgleaderlock._pg.connect import AnyConnection, plain_cursor
from pgleaderlock._pg.statements import statement
from pgleaderlock.errors import (
    ConfigurationError,
    ConnectionError,
    FenceLost,
    NotFenced,
    NotLeader,
    PgLeaderLockError,
    SchemaError,
    StaleEpoch,
)
from pgleaderlock.models import LeaderToken

__all__ = [
    "IDLE_TIMEOUT_S",
    "Block",
    "fence_lost",
    "fence_params",
    "fenced",
    "fenced_async",
    "fenced_sync",
    "meaning",
    "raced",
    "still_fenced",
]

IDLE_TIMEOUT_S = 10.0
# PostgreSQL keeps this setting as milliseconds in 32 bits.
IDLE_TIMEOUT_S_MAX = 2_147_483.0
EPOCH_MAX = 2**63 - 1
# A bump may overtake a transaction that we have begun, between its snapshot and its fence. A second transaction then
# sees the outcome; the third one is for a second bump at that moment.
TRIES_MAX = 3

Row = TypeVar("Row")

# Two databases may have issued the same epoch, so a token's holder is checked against this database, once per
# connection: a connection cannot change its database.
_accepted: weakref.WeakKeyDictionary[AnyConnection, LeaderToken] = weakref.WeakKeyDictionary()


@overload
def fenced(
    conn: psycopg.AsyncConnection[Row], token: LeaderToken, *, idle_timeout_s: float = IDLE_TIMEOUT_S
) -> AbstractAsyncContextManager[psycopg.AsyncConnection[Row]]: ...


@overload
def fenced(
    conn: psycopg.Connection[Row], token: LeaderToken, *, idle_timeout_s: float = IDLE_TIMEOUT_S
) -> AbstractContextManager[psycopg.Connection[Row]]: ...


def fenced(conn: Any, token: LeaderToken, *, idle_timeout_s: float = IDLE_TIMEOUT_S) -> Any:
    """A block in which this connection's transaction is fenced: `async with` or `with`, depending on the connection.

    It begins a transaction and commits it at the end of the block, or joins the open transaction, which you then end
    yourself. With autocommit off and no open transaction, it cannot know which of the two you mean, and raises
    `ConfigurationError`. Raises `StaleEpoch`, before the block is entered, if the token's epoch is no longer the
    current one, and `FenceLost` at the end of the block if the open transaction is not the fenced one.

    `idle_timeout_s`: the server ends the session when it has been silent for this long inside the transaction.
    """
    block = _PsycopgBlock(conn, token, fence_params(token, idle_timeout_s))
    if isinstance(conn, psycopg.AsyncConnection):
        return fenced_async(block)
    if isinstance(conn, psycopg.Connection):
        return fenced_sync(block)
    hint = ": use pgleaderlock.contrib.sqlalchemy.fenced" if type(conn).__module__.startswith("sqlalchemy") else ""
    raise ConfigurationError(f"fenced takes an open psycopg connection, not {type(conn).__name__}{hint}")


class Block:
    """A fenced block, for every kind of connection: enters a fenced transaction, and checks the fence at the end.

    A subclass implements what differs between kinds of connections: `tries`, `begin`, `send` and `check`.
    """

    def __init__(self, target: Any, token: LeaderToken, params: dict[str, object]) -> None:
        self.target, self.token, self.params = target, token, params
        self._transaction: Any = None

    def tries(self) -> int:
        """How often a transaction may be begun; 0: the fence joins the open one, which the caller ends."""
        raise NotImplementedError

    def begin(self) -> Any:
        """A context manager that begins and ends a transaction or a savepoint."""
        raise NotImplementedError

    def send(self) -> Steps[None]:
        """Take the fence. Raises if it is refused."""
        raise NotImplementedError

    def check(self) -> Steps[None]:
        """Raise `FenceLost` unless the open transaction is the fenced one."""
        raise NotImplementedError

    def enter(self) -> Steps[Any]:
        tries = self.tries()
        if not tries:
            yield from self.send()
            return self.target
        while True:
            tries -= 1
            transaction = self.begin()
            yield transaction.__aenter__() if hasattr(transaction, "__aenter__") else transaction.__enter__()
            try:
                yield from self.send()
            except BaseException as error:
                yield _ended(transaction, error)
                if not tries or not raced(error):
                    raise
            else:
                self._transaction = transaction
                return self.target

    def leave(self, error: BaseException | None) -> Steps[bool | None]:
        """End what `enter` has begun; true if that handles the error, such as `psycopg.Rollback`."""
        transaction = self._transaction
        if error is None:
            try:
                yield from self.check()
            except BaseException as lost:
                if transaction is not None:
                    with contextlib.suppress(Exception):  # the savepoint may be gone as well
                        yield _ended(transaction, lost)
                raise
        if transaction is None:
            return None
        return (yield _ended(transaction, error))  # type: ignore[no-any-return]


def _ended(transaction: Any, error: BaseException | None) -> Any:
    leave = getattr(transaction, "__aexit__", None) or transaction.__exit__
    return leave(type(error), error, error.__traceback__) if error is not None else leave(None, None, None)


@contextlib.asynccontextmanager
async def fenced_async(block: Block) -> AsyncIterator[Any]:
    target = await run(block.enter())
    try:
        yield target
    except BaseException as error:
        if not await run(block.leave(error)):
            raise
    else:
        await run(block.leave(None))


@contextlib.contextmanager
def fenced_sync(block: Block) -> Iterator[Any]:
    target = run_blocking(block.enter())
    try:
        yield target
    except BaseException as error:
        if not run_blocking(block.leave(error)):
            raise
    else:
        run_blocking(block.leave(None))


class _PsycopgBlock(Block):
    def tries(self) -> int:
        """Raises if the connection is not usable.

        Inside a `conn.transaction()` block psycopg refuses `commit()` and `rollback()`, so the fence lasts as long as
        our block. In a transaction that psycopg has begun implicitly, it allows them, and writes after a `commit()`
        within the block would not be fenced: so we open a savepoint block there, which makes psycopg refuse them. A
        transaction that was open before keeps its snapshot, and only the caller can begin a new one: so there is one
        try.
        """
        conn = self.target
        if conn.closed:
            raise ConnectionError("the connection is closed: nothing can be fenced on it")
        if conn.pgconn.pipeline_status != pq.PipelineStatus.OFF:
            raise ConfigurationError(
                "the connection is in pipeline mode, where a refusal comes too late: leave it first"
            )
        status = conn.pgconn.transaction_status
        if status == pq.TransactionStatus.INERROR:
            raise ConfigurationError("the connection is in a failed transaction: roll it back first")
        if status == pq.TransactionStatus.ACTIVE:
            raise ConfigurationError("the connection is busy with another statement: a transaction is fenced before it")
        if status == pq.TransactionStatus.IDLE:
            if not conn.autocommit:
                raise _whose_transaction(conn)
            return TRIES_MAX
        return 0 if getattr(conn, "_num_transactions", 0) else 1

    def begin(self) -> Any:
        return self.target.transaction()

    def send(self) -> Steps[None]:
        known = _accepted.get(self.target) == self.token
        try:
            yield plain_cursor(self.target).execute(
                statement("fence"), {**self.params, "holder": None} if known else self.params
            )
        except psycopg.Error as error:
            refusal = meaning(error, self.token)
            if refusal is None:
                raise
            raise refusal from error
        _accepted[self.target] = self.token

    def check(self) -> Steps[None]:
        pgconn = self.target.pgconn
        reported = pgconn.parameter_status(b"application_name")
        still = still_fenced(pgconn.transaction_status, None if reported is None else reported.decode(), self.params)
        if still is None:
            cursor = yield plain_cursor(self.target).execute(statement("fence_marks"))
            still = str(self.params["mark"]) in ((yield cursor.fetchone())[0] or "")
        if not still:
            raise fence_lost(self.token)


def _whose_transaction(conn: AnyConnection) -> ConfigurationError:
    """The error for autocommit off without an open transaction: it is unclear who commits, `fenced` or the owner.

    If `fenced` committed, it might keep changes that the owner means to roll back. If it did not, although the owner
    expects it to, the writes would be lost and the open transaction would delay the next leader.
    """
    remedy = (
        "connect with autocommit=True, and fenced begins and commits; or begin your own transaction first, as in "
        "`with conn.transaction(), fenced(conn, token):`"
    )
    if conn.cursor_factory.__module__.startswith("django."):
        remedy = "use pgleaderlock.contrib.django.fenced(token), which joins atomic()"
    return ConfigurationError(
        f"autocommit is off and no transaction is open: the connection's owner commits it, and not fenced; {remedy}"
    )


# --- Shared with contrib


def fence_params(token: LeaderToken, idle_timeout_s: float) -> dict[str, object]:
    """The parameters of the statement `fence`, or a `ConfigurationError`."""
    if not isinstance(token, LeaderToken):
        raise ConfigurationError(
            f"fenced takes the LeaderToken of the term (gate.require_leader() gives it), not {type(token).__name__}"
        )
    if type(token.epoch) is not int or not 0 <= token.epoch <= EPOCH_MAX:
        raise ConfigurationError(f"the token's epoch is {token.epoch!r}: it must be the number that the ledger issued")
    if not (math.isfinite(idle_timeout_s) and 0.001 <= idle_timeout_s <= IDLE_TIMEOUT_S_MAX):
        raise ConfigurationError(
            f"idle_timeout_s={idle_timeout_s} is out of range: give 0.001 to {IDLE_TIMEOUT_S_MAX:.0f} seconds"
        )
    return {
        "role": token.role,
        "epoch": token.epoch,
        "namespace": token.namespace,
        "holder": token.holder_identity or None,
        "idle_timeout": f"{int(idle_timeout_s * 1000)}ms",
        "mark": f"[fence {secrets.token_hex(4)}]",
    }


def still_fenced(status: int, application_name: str | None, params: dict[str, object]) -> bool | None:
    """Is the open transaction the fenced one, by what the server has reported so far? None: the server must be
    asked."""
    if status == pq.TransactionStatus.IDLE:
        return False
    if status != pq.TransactionStatus.INTRANS:
        return True  # the transaction has failed, or the connection is broken or busy: nothing will be committed
    return True if application_name is not None and str(params["mark"]) in application_name else None


def fence_lost(token: LeaderToken) -> FenceLost:
    return FenceLost(
        f"the transaction that was fenced for role {token.role!r}, epoch {token.epoch}, ended inside the block, by a "
        "COMMIT or ROLLBACK or a rollback to an older savepoint: what was written after that was not fenced; let the "
        "end of the block end the transaction"
    )


def meaning(error: BaseException, token: LeaderToken | None = None) -> PgLeaderLockError | None:
    """The library's error for a driver's error in a fenced transaction; None if the error is unrelated to the fence.

    It also takes errors of your own statements: a write to a fenced table without a fence is `NotFenced`. With a
    `token`, the error counts as one of the fence's own statement, where a serialization failure also means
    `StaleEpoch`.
    """
    sqlstate = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    diagnostic = getattr(error, "diag", None)
    text = " ".join((getattr(diagnostic, "message_primary", None) or str(error)).split())
    if sqlstate == "PGL02":
        return StaleEpoch(f"{text}; nothing of this transaction was committed")
    if sqlstate == "PGL04":
        return NotFenced(text)
    explain = _REFUSALS.get(sqlstate or "")
    return None if token is None or explain is None else explain(text, token)


def _changed(text: str, token: LeaderToken) -> StaleEpoch:
    return StaleEpoch(
        f"the epoch of role {token.role!r} has changed since this transaction began ({text}): epoch {token.epoch} is "
        "over, or the transaction is older than it; begin a new one to know"
    )


def _never_led(text: str, token: LeaderToken) -> NotLeader:
    return NotLeader(token.role, "never_led", f"{text}: is this the database that elected the leader?")


def _elsewhere(text: str, _token: LeaderToken) -> ConfigurationError:
    return ConfigurationError(f"{text}: connect to the database that elected the leader")


def _read_only(text: str, _token: LeaderToken) -> ConfigurationError:
    return ConfigurationError(f"{text}; make the transaction READ WRITE, and connect to the primary")


def _no_ledger(text: str, _token: LeaderToken) -> SchemaError:
    return SchemaError(f"the ledger is missing or too old ({text}): run `pgleaderlock migrate` on this database")


def _no_privilege(text: str, _token: LeaderToken) -> SchemaError:
    return SchemaError(f"this database role may not use the fence ({text}): see the GRANTs in docs/ledger.md")


_REFUSALS: dict[str, Callable[[str, LeaderToken], PgLeaderLockError]] = {
    "40001": _changed,  # serialization failure
    "PGL01": _never_led,
    "PGL05": _elsewhere,
    "25006": _read_only,
    "42P01": _no_ledger,  # undefined table
    "3F000": _no_ledger,  # undefined schema
    "42883": _no_ledger,  # undefined function
    "42501": _no_privilege,
}


def raced(error: BaseException) -> bool:
    """Did the fence fail only because of a change after the snapshot? A new transaction would get a definite answer."""
    cause = error.__cause__
    return (getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)) == "40001"
