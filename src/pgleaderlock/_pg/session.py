"""The dedicated session: opens and checks a connection, runs named statements on it, and notices its end.

One connection, autocommit, never from a pool. Three rules hold it together:

* Every statement has a deadline on the client. After a timeout, a cancellation or an error in mid-statement the
  answer is unknown, so the connection is cut and never used again; the server frees what it held.
* While no statement runs, a duplicate of the descriptor is watched, so the end of the session is noticed when the
  socket closes and not at the next probe. (psycopg itself uses `add_reader` on the original.)
* A `fork()`ed child must not keep the socket alive: its copies are replaced by /dev/null.

Must never use a connection again whose state it does not know.
"""

import asyncio
import contextlib
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, overload

import psycopg
from psycopg import pq
from psycopg.rows import BaseRowFactory, class_row, dict_row, scalar_row

from pgleaderlock._base.steps import Steps, run
from pgleaderlock._pg.connect import Backend, connect, prove, resolved, retrieve, sample_of, sever
from pgleaderlock._pg.conninfo import (
    CLIENT_ENCODING,
    FORCED,
    REQUIRED,
    ConnectionSettings,
    Dsn,
    connect_params,
    scrub,
)
from pgleaderlock._pg.explain import (
    connect_error,
    moved_error,
    pooler_error,
    safe_cause,
    shared_error,
    standby_error,
    statement_error,
)
from pgleaderlock._pg.statements import statement
from pgleaderlock.errors import ConnectionError, LockError, PgLeaderLockError, UnsafeSessionError
from pgleaderlock.keys import KeyPair, key_params

__all__ = ["DedicatedSession", "Session", "SessionIdentity"]

Row = TypeVar("Row")

VERSION_MIN = 140000
SEVER_TIMEOUT_S = 1.0
ZOMBIE_WAIT_MS = 1000
# The server only warns when a wait for a synchronous standby was cancelled, or ended by a shutdown: the transaction is
# committed on this server, but perhaps not on the standby. Other warnings do not concern the outcome.
UNKNOWN_OUTCOME = frozenset({"01000", "57P01"})


@dataclass(frozen=True, slots=True)
class SessionIdentity:
    """One backend, identified by its pid and its start time: another backend may have the same pid by now."""

    pid: int
    started: str


class Session(Protocol):
    """The session that a lock works on."""

    identity: SessionIdentity | None
    """The backend, known after the first probe; None for a session that cannot find it out."""

    @property
    def identified(self) -> bool:
        """False until the first probe has identified the backend: that probe is due at once."""
        ...

    async def take(self, keys: KeyPair) -> bool:
        """Try the lock once."""
        ...

    async def wait(self, keys: KeyPair, wait_s: float) -> bool:
        """Wait for the lock at the server, for one slice of at most `wait_s`."""
        ...

    async def probe(self, keys: KeyPair) -> None:
        """Return if the session is alive and holds the lock; raise if not, or if it does not answer in time."""
        ...

    async def unlock(self, keys: KeyPair) -> None:
        """Release the lock; raise `LockError` if the server says that this session did not hold it."""
        ...

    async def end_zombie(self, zombie: SessionIdentity) -> bool:
        """End a session of ours that was left over from a lost connection; True if it existed and has ended."""
        ...

    async def lost(self) -> ConnectionError:
        """Return, with the reason, when the session has ended while idle."""
        ...

    async def close(self) -> None:
        """Close the connection. Never raises, never waits for the server."""
        ...


class DedicatedSession:
    """A session on our own connection, with the lease, the checks and the watch on its socket."""

    def __init__(
        self, connection: psycopg.AsyncConnection[Any], params: Mapping[str, str], settings: ConnectionSettings
    ) -> None:
        self._connection = connection
        self._params = params
        self._settings = settings
        self._backend_pid = connection.pgconn.backend_pid
        self._loss: asyncio.Future[ConnectionError] = asyncio.get_running_loop().create_future()
        self._last_fatal: str | None = None
        self._running: asyncio.Future[list[Any]] | None = None
        self._deadlock_timeout_s = 1.0
        self._watched_fd = os.dup(connection.pgconn.socket)
        self.identity: SessionIdentity | None = None
        self._probe_name = secrets.token_hex(8)
        self._probed: KeyPair | None = None
        """The lock that the prepared probe checks."""
        self.doubts: list[str] = []
        """Warnings of the last statement after which it is unknown whether its commit is durable."""
        _open.add(self)
        connection.add_notice_handler(self._remember_notice)

    # --- Opening

    @classmethod
    async def open(cls, dsn: Dsn, settings: ConnectionSettings) -> "DedicatedSession":
        """Connect. Raises `ConnectionError`, whose text says what to do and contains no secret."""
        params = connect_params(await resolved(dsn), settings)
        try:
            connection = await connect(params)
        except psycopg.Error as error:
            raise connect_error(error, params, allow_pooler=settings.allow_pooler) from safe_cause(error, params)
        except Exception as error:  # resolving a host name may raise something else
            raise ConnectionError(f"cannot connect: {scrub(str(error), params)}") from safe_cause(error, params)
        session = cls(connection, params, settings)
        try:
            await session._check()
        except BaseException:
            await session.close()
            raise
        session._watch()
        return session

    async def _check(self) -> None:
        pgconn = self._connection.pgconn
        if pgconn.server_version < VERSION_MIN:
            raise UnsafeSessionError(
                "version",
                f"PostgreSQL {pgconn.server_version // 10000} cannot end a silent session (idle_session_timeout): "
                "use PostgreSQL 14 or newer",
            )
        if pgconn.parameter_status(b"in_hot_standby") == b"on":
            raise standby_error()
        if self._settings.allow_pooler:
            await self._set_up_behind_pooler()

    async def _set_up_behind_pooler(self) -> None:
        self._backend_pid = (await run(prove(self._connection, self._backend))).pid
        if not await self._run("set_up_pooled", **self._timeouts_ms(), backend_pid=self._backend_pid):
            raise shared_error()

    def _backend(self, mark: str | None = None) -> Steps[Backend]:
        name, params = sample_of(mark)
        (backend,) = yield self.rows(name, class_row(Backend), **params)
        return backend  # type: ignore[no-any-return]  # a step's answer has no type

    # --- The statements

    @property
    def identified(self) -> bool:
        return self.identity is not None

    async def take(self, keys: KeyPair) -> bool:
        row = await self._run(
            "take_pooled" if self._settings.allow_pooler else "take",
            **key_params(keys),
            **self._timeouts_ms(),
            backend_pid=self._backend_pid,
        )
        self._deadlock_timeout_s = _milliseconds(row["deadlock_timeout"]) / 1000
        if row["lease"] is None:
            refusal = self._refusal(await self._run("diagnose"))
            await self.close()
            raise refusal
        return bool(row["lease"])

    async def wait(self, keys: KeyPair, wait_s: float) -> bool:
        # A slice lasts at most half of deadlock_timeout: only after that timeout does the server run its deadlock check
        # and log a waiter. And a CREATE INDEX CONCURRENTLY that waits for our snapshot can go on between two slices.
        slice_s = min(wait_s, self._deadlock_timeout_s / 2, self._settings.statement_timeout_s / 2)
        row = await self._run(
            "wait_for_lock",
            **key_params(keys),
            **self._timeouts_ms(),
            slice_ms=max(1, int(slice_s * 1000)),
        )
        return bool(row["granted"])

    async def probe(self, keys: KeyPair) -> None:
        if not await self.held(keys):
            await self.close()
            raise moved_error()

    async def unlock(self, keys: KeyPair) -> None:
        row = await self._run("unlock", **key_params(keys))
        if not row["unlocked"]:
            raise LockError(
                f"the server says that lock {keys[0]}/{keys[1]} was not held by this session: "
                "somebody released it with pg_advisory_unlock_all(), or a pooler is in between"
            )

    async def held(self, keys: KeyPair) -> bool:
        """Ask the server: is this the backend that took the lock, on a primary, and does it still hold the lock?"""
        if self._probed is None:
            await self._identify(keys)
        assert self._probed == keys, "a session is probed for one lock"
        return await self._rows("probe", {}, scalar_row) == [self._probe_name]

    async def _identify(self, keys: KeyPair) -> None:
        row = await self._run("identify", **key_params(keys), backend_pid=self._backend_pid, session=self._probe_name)
        if row["backend_pid"] != self._backend_pid:
            await self.close()
            raise moved_error()  # do not record it as our identity: our zombies are terminated
        self.identity = SessionIdentity(row["backend_pid"], row["backend_start"])
        self._probed = keys

    async def holder(self, keys: KeyPair) -> tuple[int, str | None] | None:
        """Pid and application name of the session that holds the lock, as far as this role may see."""
        row = await self._run("guard_holder", **key_params(keys))
        return (row["pid"], row["application_name"]) if row else None

    async def end_zombie(self, zombie: SessionIdentity) -> bool:
        if self._settings.allow_pooler:
            return False  # the pooler may have given that backend to another client, which may lead on it now
        row = await self._run(
            "end_own_zombie", zombie_pid=zombie.pid, zombie_start=zombie.started, wait_ms=ZOMBIE_WAIT_MS
        )
        return bool(row.get("ended"))

    async def verify(self) -> None:
        """Check, before any lock is tried, that a lock on this session excludes other sessions; raise if not."""
        row = await self._run("diagnose")
        if row["backend_pid"] != self._backend_pid or row["in_recovery"] or self._wrong_settings(row):
            await self.close()
            raise self._refusal(row)
        self._deadlock_timeout_s = _milliseconds(row["deadlock_timeout"]) / 1000

    async def _run(self, name: str, **params: object) -> dict[str, Any]:
        """The first row of a statement; an empty one if there is none."""
        rows = await self.rows(name, **params)
        return rows[0] if rows else {}

    @overload
    async def rows(self, name: str, /, **params: object) -> list[dict[str, Any]]: ...

    @overload
    async def rows(self, name: str, row_factory: BaseRowFactory[Row], /, **params: object) -> list[Row]: ...

    async def rows(self, name: str, row_factory: Any = dict_row, /, **params: object) -> list[Any]:
        """Run one named statement as one simple-query message. Any failure ends the session."""
        return await self._rows(name, params, row_factory)

    async def rows_or_none(self, name: str, /, **params: object) -> list[dict[str, Any]]:
        """The same for a statement that may fail: if the server refuses it, returns no rows, and the session goes
        on."""
        return await self._rows(name, params, dict_row, may_fail=True)

    async def _rows(
        self, name: str, params: Mapping[str, object], row_factory: Any, *, may_fail: bool = False
    ) -> list[Any]:
        self._unwatch()
        self.doubts.clear()
        if self._loss.done():
            raise self._loss.result()
        timeout_s = self._settings.statement_timeout_s
        inner = self._running = asyncio.ensure_future(self._execute(name, params, row_factory))
        inner.add_done_callback(retrieve)
        try:
            done, _ = await asyncio.wait([inner], timeout=timeout_s)
            if not done:
                await self._abandon(inner)
                raise self._lose(ConnectionError(f"the server did not answer {name!r} within {timeout_s:g} s"))
            rows = inner.result()
        except ConnectionError:
            raise
        except Exception as error:
            if may_fail and self._is_answer(error):
                self._watch()
                return []
            await self.close()
            raise self._lose(self._statement_error(name, error)) from safe_cause(error, self._params)
        except BaseException:
            # Cancelled during the statement. psycopg would send a cancel request and wait for it. The outcome is
            # unknown whatever the server answers, so close the connection instead.
            self._lose(ConnectionError(f"{name!r} was cancelled while the server was at it"))
            await self._abandon(inner)
            raise
        self._watch()
        return rows

    def _is_answer(self, error: Exception) -> bool:
        """Did the server refuse the statement, and is it ready for the next one?"""
        pgconn = self._connection.pgconn
        refused = isinstance(error, psycopg.Error) and error.sqlstate is not None
        return refused and pgconn.status == pq.ConnStatus.OK and pgconn.transaction_status == pq.TransactionStatus.IDLE

    async def _execute(self, name: str, params: Mapping[str, object], row_factory: Any) -> list[Any]:
        cursor = self._connection.cursor(row_factory=row_factory)
        await cursor.execute(statement(name), params)
        while cursor.nextset():
            pass
        return await cursor.fetchall()

    async def _abandon(self, inner: "asyncio.Future[list[Any]]") -> None:
        sever(self._connection)
        if not inner.done():
            await asyncio.wait([inner], timeout=SEVER_TIMEOUT_S)
        inner.cancel()
        await self.close()

    # --- The end

    async def lost(self) -> ConnectionError:
        return await asyncio.shield(self._loss)

    async def close(self) -> None:
        self._unwatch()
        if self in _open:
            _open.remove(self)
            os.close(self._watched_fd)
        if self._running is not None and not self._running.done():
            # A task was cancelled while it abandoned a statement, and that statement still uses libpq. Cut the
            # connection now; libpq's memory is freed once the statement has ended.
            sever(self._connection)
            self._running.add_done_callback(lambda _: self._connection.pgconn.finish())
            return
        await self._connection.close()

    def _let_go_in_child(self, null: int) -> None:
        os.dup2(null, self._watched_fd)
        # libpq closes the socket of a broken connection, and another file may have its descriptor number by now.
        with contextlib.suppress(psycopg.OperationalError):
            os.dup2(null, self._connection.pgconn.socket)

    def _watch(self) -> None:
        if self._connection.closed:
            self._lose(ConnectionError(f"the session has ended: {self._last_fatal or 'the connection is broken'}"))
        else:
            asyncio.get_running_loop().add_reader(self._watched_fd, self._readable)

    def _unwatch(self) -> None:
        if self in _open:
            asyncio.get_running_loop().remove_reader(self._watched_fd)

    def _readable(self) -> None:
        """The socket is readable: it may be the end of the session, or only a notice. Read it, then check."""
        pgconn = self._connection.pgconn
        try:
            pgconn.consume_input()
            while pgconn.notifies() is not None:
                pass
        except psycopg.Error as error:
            self._unwatch()
            self._lose(ConnectionError(f"the session has ended: {self._last_fatal or scrub(str(error), self._params)}"))
            return
        if pgconn.status != pq.ConnStatus.OK:
            self._unwatch()
            self._lose(ConnectionError(f"the session has ended: {self._last_fatal or 'the connection is broken'}"))

    def _lose(self, error: PgLeaderLockError) -> PgLeaderLockError:
        if not self._loss.done():
            self._loss.set_result(error if isinstance(error, ConnectionError) else ConnectionError(str(error)))
        return error

    def _remember_notice(self, diagnostic: psycopg.errors.Diagnostic) -> None:
        if diagnostic.severity_nonlocalized in ("FATAL", "PANIC"):
            self._last_fatal = diagnostic.message_primary
        elif diagnostic.severity_nonlocalized == "WARNING" and diagnostic.sqlstate in UNKNOWN_OUTCOME:
            self.doubts.append(diagnostic.message_primary or "a warning without a text")

    # --- What went wrong

    def _timeouts_ms(self) -> dict[str, int]:
        settings = self._settings
        return {
            "lease_ms": settings.lease_ms,
            "idle_timeout_ms": settings.idle_timeout_ms,
            "statement_timeout_ms": settings.statement_timeout_ms,
        }

    def _statement_error(self, name: str, error: Exception) -> PgLeaderLockError:
        return statement_error(name, error, scrub(self._last_fatal or str(error), self._params))

    def _wrong_settings(self, row: Mapping[str, Any]) -> str:
        required = {
            **REQUIRED,
            **FORCED,
            "client_encoding": CLIENT_ENCODING,
            "idle_session_timeout": self._settings.idle_timeout_ms,
        }
        return ", ".join(
            f"{name}={row[name]}"
            for name, wanted in required.items()
            if (_milliseconds(row[name]) if isinstance(wanted, int) else row[name]) != wanted
        )

    def _refusal(self, row: Mapping[str, Any]) -> UnsafeSessionError:
        if row["in_recovery"]:
            return standby_error()
        wrong = self._wrong_settings(row)
        if row["backend_pid"] != self._backend_pid or not wrong:
            return pooler_error("the server session behind this connection is not ours alone")
        return UnsafeSessionError(
            "settings",
            f"the session does not have the settings it was opened with ({wrong}): something between us and "
            "PostgreSQL drops them, or they were changed afterwards; connect to PostgreSQL itself",
        )


# --- Helpers


_UNITS_MS = {"": 1, "ms": 1, "s": 1000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}


def _milliseconds(setting: str) -> int:
    """Parse a time as `current_setting` shows it: `500ms`, `1s`, `2min`."""
    match = re.fullmatch(r"(\d+)(ms|s|min|h|d|)", setting)
    return int(match[1]) * _UNITS_MS[match[2]] if match else 1000


_open: set[DedicatedSession] = set()


def _let_go_in_child() -> None:
    """In a forked child: the parent's sessions must end with the parent."""
    if not _open:
        return
    null = os.open(os.devnull, os.O_RDWR)
    for session in _open:
        session._let_go_in_child(null)  # noqa: SLF001 - it is our own
    os.close(null)


os.register_at_fork(after_in_child=_let_go_in_child)
