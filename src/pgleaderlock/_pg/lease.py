"""The lease in place of a dedicated session: single messages through any pooler, each with a number.

It has the methods of `DedicatedSession` that a ledger uses. A lease survives a broken connection. Each write is one
message and one transaction, which begins by updating the lease's own row. If the answer is lost, the message is sent
again with the next number. The server carries out a message only if its number is higher than the last one, so by then
the earlier message has been carried out, or never will be.

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

# The same for every node: a pooler sends a SET whenever the next client of a backend has another application name.
APPLICATION_NAME = "pgleaderlock lease"
AGAIN = ExponentialBackoff(base_s=0.05, max_s=0.8)
# Reads with a session_id, which need no number.
READS = frozenset({"ledger_owned", "ledger_namesakes", "lease_ended"})
OVER = "PGL06"
# Errors for which a retry is pointless: a missing table, schema, function or grant, a standby, a full lock table, an
# isolation level that a lease cannot use.
HOPELESS = frozenset({"42P01", "3F000", "42883", "42501", "25006", "53200", "PGL03"})


class _Unknown(Exception):
    """The outcome is unknown: the server may have carried out the message, may never do so, or may do so later."""


class LeaseSession:
    """The connection of one lease, reopened as often as needed, and the numbers of its messages."""

    def __init__(self, dsn: Dsn, settings: ConnectionSettings, *, clock: Clock, rng: random.Random) -> None:
        self._dsn = dsn
        self._settings = settings
        self._clock, self._rng = clock, rng
        self._connection: psycopg.AsyncConnection[Any] | None = None
        self._params: Mapping[str, str] = {}
        self._warnings: list[str] = []
        self._number = 0
        self.key = str(uuid.uuid4())
        """A secret of the owner: any client that has it can act as the lease."""
        self.opened = False
        """The lease is recorded. Until then, a failure is raised at once."""
        self.asked_again = False
        """The last rows answer a repeated message: an earlier one, whose answer was lost, may have done the work."""
        self.unanswered: str | None = None
        """Why the last message that is sent only once got no answer; None if it got one."""
        self.doubts: list[str] = []
        """Always empty: a message with an unknown outcome is sent again."""

    def recorded(self) -> None:
        self.opened = True

    async def lost(self) -> ConnectionError:
        """Never returns: the next message notices a broken connection, and opens another one."""
        never: asyncio.Future[ConnectionError] = asyncio.get_running_loop().create_future()
        return await never

    async def verify(self) -> None:
        """Nothing to check: any backend will do, and each message sets or checks what it depends on."""

    async def wait(self, keys: KeyPair, wait_s: float) -> bool:
        """There is no lock to wait for."""
        return False

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def rows(self, name: str, row_factory: Any = dict_row, /, *lead_in: str, **params: object) -> list[Any]:
        """The rows of a named statement, sent until there is an answer; `lead_in` comes before it in the message.

        Raises when the lease is over, or when there was no answer for T: by then other nodes may have ended the lease.
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
        """The same, sent only once; no rows if there is no answer. Raises errors for which a retry is pointless."""
        try:
            found = await self._once(name, row_factory, (), params)
        except _Unknown as unknown:
            self.unanswered = str(unknown)
            return []
        self.unanswered = None
        return found

    async def rows_or_none(self, name: str, row_factory: Any = dict_row, /, **params: object) -> list[Any]:
        """The same for a statement that may fail: sent only once, and no rows after any failure."""
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
            # Cancelled or too late: the outcome is unknown, whatever the server still answers.
            await self._abandon(connection, running)
            raise
        if self._warnings:
            await self.close()
            raise _Unknown(f"the server warned, so the outcome of {name!r} is unknown: {'; '.join(self._warnings)}")
        return found

    def _message(
        self, name: str, lead_in: tuple[str, ...], params: dict[str, object]
    ) -> tuple[bytes, int, dict[str, object]]:
        """The message: the statement between those that must come before and after it, and its position among them."""
        if "session_id" not in params or name in READS:
            return statement(name), 0, params
        self._number += 1
        names = ("lease_begin", *lead_in, name, "lease_done")
        message = b";\n".join(statement(part) for part in names)
        return message, len(lead_in) + 1, {**params, "key": self.key, "number": self._number}

    async def _connected(self) -> psycopg.AsyncConnection[Any]:
        if self._connection is None or self._connection.closed:
            await self.close()
            timeout_s = math.ceil(self._settings.statement_timeout_s)  # a frozen pooler would keep us waiting
            try:
                self._params = plain_params(await resolved(self._dsn), APPLICATION_NAME, connect_timeout_s=timeout_s)
                self._connection = await connect(self._params)
            except ConnectionError as error:  # the DSN is a callable, which has failed
                if self.opened:
                    raise _Unknown(str(error)) from None
                raise
            except psycopg.Error as error:
                if self.opened:
                    raise _Unknown(f"cannot connect: {scrub(str(error), self._params)}") from None
                # Poolers are allowed, so do not blame the pooler: the error has another cause.
                raise connect_error(error, self._params, allow_pooler=True) from safe_cause(error, self._params)
            self._connection.add_notice_handler(self._remember_warning)
            _sessions.add(self)
        return self._connection

    def _let_go_in_child(self, null: int) -> None:
        if self._connection is not None:
            # libpq closes the socket of a broken connection, and another file may have its descriptor number by now.
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
    """Run a message; returns the rows of each of its statements."""
    cursor = connection.cursor(row_factory=row_factory)
    await cursor.execute(message, params)
    found = [await cursor.fetchall()]
    while cursor.nextset():
        found.append(await cursor.fetchall())
    return found


_sessions: "weakref.WeakSet[LeaseSession]" = weakref.WeakSet()
"""The leases that have had a connection."""


def _let_go_in_child() -> None:
    """In a forked child: nothing that it sends or closes may reach the parent's connections."""
    null = os.open(os.devnull, os.O_RDWR)
    for session in list(_sessions):
        session._let_go_in_child(null)  # noqa: SLF001 - it is our own
    os.close(null)


os.register_at_fork(after_in_child=_let_go_in_child)
