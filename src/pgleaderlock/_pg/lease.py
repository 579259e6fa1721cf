"""What stands in for a dedicated session where there is none: single messages through any pooler, each under a number.

It has the methods of `DedicatedSession` that a ledger uses. A broken connection is no lost lease. Each write is one
message and one transaction, which begins with the owner's own row. If its answer is lost, the same is asked again under
the next number: the server carries a message out only if its number is higher than the last, so what was asked before
has happened by then, or never will.

Must never leave anything behind in a backend: no lock, no setting, no prepared statement, no LISTEN. A `fork()`ed child
must not keep the socket: its copy is replaced by /dev/null.
"""

import asyncio
import contextlib
import math
import os
import random
import uuid
import weakref
from collections.abc import Mapping
from typing import Any

import psycopg
from psycopg.rows import dict_row

from pgleaderlock._base.clock import Clock
from pgleaderlock._pg.connect import connect, resolved, retrieve, sever
from pgleaderlock._pg.conninfo import ConnectionSettings, Dsn, plain_params, scrub
from pgleaderlock._pg.explain import connect_error, safe_cause, statement_error
from pgleaderlock._pg.session import SEVER_TIMEOUT_S, UNKNOWN_OUTCOME
from pgleaderlock._pg.statements import statement
from pgleaderlock.errors import ConnectionError, PgLeaderLockError
from pgleaderlock.keys import KeyPair
from pgleaderlock.retry import ExponentialBackoff

__all__ = ["LeaseSession"]

# The same for every node: a pooler sends a SET whenever a backend's next client has another one.
APPLICATION_NAME = "pgleaderlock lease"
AGAIN = ExponentialBackoff(base_s=0.05, max_s=0.8)
# Reads name the session, too, and need no number.
READS = frozenset({"ledger_owned", "ledger_namesakes", "lease_ended"})
OVER = "PGL06"
# The same message will be refused again: a missing table, schema, function or grant, a standby, a full lock table, an
# isolation level that a lease cannot have.
HOPELESS = frozenset({"42P01", "3F000", "42883", "42501", "25006", "53200", "PGL03"})


class _Unknown(Exception):
    """The message was carried out, or was not, or will be."""


class LeaseSession:
    """The connection of one lease, opened anew as often as needed, and the numbers of its messages."""

    def __init__(self, dsn: Dsn, settings: ConnectionSettings, *, clock: Clock, rng: random.Random) -> None:
        self._dsn = dsn
        self._settings = settings
        self._clock, self._rng = clock, rng
        self._connection: psycopg.AsyncConnection[Any] | None = None
        self._params: Mapping[str, str] = {}
        self._warnings: list[str] = []
        self._number = 0
        self.key = str(uuid.uuid4())
        """Known to the owner alone: who has it can act as the lease."""
        self.opened = False
        """The lease is recorded. Before that, a failure is told at once."""
        self.asked_again = False
        """The last rows answer a repetition: an earlier message may have done it, and its answer was lost."""
        self.unanswered: str | None = None
        """Why what was last asked once got no answer; None if it did."""
        self.doubts: list[str] = []
        """Always empty: what leaves the outcome open is asked again."""

    def recorded(self) -> None:
        self.opened = True

    async def lost(self) -> ConnectionError:
        """Never: the next message finds out, and opens another connection."""
        never: asyncio.Future[ConnectionError] = asyncio.get_running_loop().create_future()
        return await never

    async def verify(self) -> None:
        """Any backend will do. What a message depends on is set or checked by the message itself."""

    async def wait(self, keys: KeyPair, wait_s: float) -> bool:
        """There is no lock to wait for."""
        return False

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def rows(self, name: str, row_factory: Any = dict_row, /, *lead_in: str, **params: object) -> list[Any]:
        """The rows of a named statement, asked for until they are there; `lead_in` comes before it in the message.

        Raises when the lease is over, or when there was no answer for T: by then others may have ended it.
        """
        until = self._clock.now() + self._settings.lease_s
        attempt = 0
        while True:
            self.asked_again = attempt > 0
            try:
                return await self._once(name, row_factory, lead_in, params)
            except _Unknown as unknown:
                attempt += 1
                delay_s = AGAIN.delay_s(attempt) * self._rng.uniform(0.5, 1.5)
                if not self.opened or self._clock.now() + delay_s >= until:
                    raise ConnectionError(str(unknown)) from None
            await self._clock.sleep(delay_s)

    async def rows_if_answered(self, name: str, row_factory: Any = dict_row, /, **params: object) -> list[Any]:
        """The same, asked once, and no rows without an answer. Raises what the server would refuse again."""
        try:
            found = await self._once(name, row_factory, (), params)
        except _Unknown as unknown:
            self.unanswered = str(unknown)
            return []
        self.unanswered = None
        return found

    async def rows_or_none(self, name: str, row_factory: Any = dict_row, /, **params: object) -> list[Any]:
        """The same for what may fail: asked once, and no rows if that failed."""
        try:
            return await self.rows_if_answered(name, row_factory, **params)
        except PgLeaderLockError:
            return []

    # --- One message

    async def _once(
        self, name: str, row_factory: Any, lead_in: tuple[str, ...], params: dict[str, object]
    ) -> list[Any]:
        connection = await self._connected()
        self._warnings.clear()
        message, place, given = self._message(name, lead_in, params)
        running = asyncio.ensure_future(_execute(connection, message, given, row_factory))
        running.add_done_callback(retrieve)
        try:
            done, _ = await asyncio.wait([running], timeout=self._settings.statement_timeout_s)
            if not done:
                raise _Unknown(f"the server did not answer {name!r} within {self._settings.statement_timeout_s:g} s")
            found = running.result()[place]
        except psycopg.Error as error:
            await self.close()
            raise self._failed(name, error) from safe_cause(error, self._params)
        except BaseException:
            # Cancelled or too late: the outcome is unknown, whatever is answered.
            await self._abandon(connection, running)
            raise
        if self._warnings:
            await self.close()
            raise _Unknown(f"the server warned, so the outcome of {name!r} is unknown: {'; '.join(self._warnings)}")
        return found

    def _message(
        self, name: str, lead_in: tuple[str, ...], params: dict[str, object]
    ) -> tuple[bytes, int, dict[str, object]]:
        """The statement with what goes before and after it, and its place among them."""
        if "session_id" not in params or name in READS:
            return statement(name), 0, params
        self._number += 1
        names = ("lease_begin", *lead_in, name, "lease_done")
        message = b";\n".join(statement(part) for part in names)
        return message, len(lead_in) + 1, {**params, "key": self.key, "number": self._number}

    async def _connected(self) -> psycopg.AsyncConnection[Any]:
        if self._connection is None or self._connection.closed:
            await self.close()
            timeout_s = math.ceil(self._settings.statement_timeout_s)  # a pooler that stands keeps a client waiting
            try:
                self._params = plain_params(await resolved(self._dsn), APPLICATION_NAME, connect_timeout_s=timeout_s)
                self._connection = await connect(self._params)
            except ConnectionError as error:  # of a DSN that is a callable
                if self.opened:
                    raise _Unknown(str(error)) from None
                raise
            except psycopg.Error as error:
                if self.opened:
                    raise _Unknown(f"cannot connect: {scrub(str(error), self._params)}") from None
                # Any pooler will do: what one refuses is something else.
                raise connect_error(error, self._params, allow_pooler=True) from safe_cause(error, self._params)
            self._connection.add_notice_handler(self._remember_warning)
            _sessions.add(self)
        return self._connection

    def _let_go_in_child(self, null: int) -> None:
        if self._connection is not None:
            # libpq closes the socket of a broken connection, and its number may be that of another file by now.
            with contextlib.suppress(psycopg.OperationalError):
                os.dup2(null, self._connection.pgconn.socket)

    def _remember_warning(self, diagnostic: psycopg.errors.Diagnostic) -> None:
        if diagnostic.severity_nonlocalized == "WARNING" and diagnostic.sqlstate in UNKNOWN_OUTCOME:
            self._warnings.append(diagnostic.message_primary or "a warning without a text")

    def _failed(self, name: str, error: psycopg.Error) -> Exception:
        text = scrub(str(error), self._params)
        if error.sqlstate == OVER:
            return ConnectionError(f"the lease has ended: {text}")
        if error.sqlstate in HOPELESS:
            return statement_error(name, error, text)
        return _Unknown(f"{name!r} failed: {text}")

    async def _abandon(
        self, connection: psycopg.AsyncConnection[Any], running: "asyncio.Future[list[list[Any]]]"
    ) -> None:
        self._connection = None
        sever(connection)
        if not running.done():
            await asyncio.wait([running], timeout=SEVER_TIMEOUT_S)
        running.cancel()
        await connection.close()


async def _execute(
    connection: psycopg.AsyncConnection[Any], message: bytes, params: Mapping[str, object], row_factory: Any
) -> list[list[Any]]:
    """The rows of each statement of a message."""
    cursor = connection.cursor(row_factory=row_factory)
    await cursor.execute(message, params)
    found = [await cursor.fetchall()]
    while cursor.nextset():
        found.append(await cursor.fetchall())
    return found


_sessions: "weakref.WeakSet[LeaseSession]" = weakref.WeakSet()
"""Those that have had a connection."""


def _let_go_in_child() -> None:
    """In a forked child: what it sends or closes must not reach the parent's connections."""
    null = os.open(os.devnull, os.O_RDWR)
    for session in list(_sessions):
        session._let_go_in_child(null)  # noqa: SLF001 - it is our own
    os.close(null)


os.register_at_fork(after_in_child=_let_go_in_child)
