"""A plain, short connection for commands that only look; and why one could not be had, in words that help.

Not the dedicated session: no settings of ours, no lease, and a pooler or a standby may be in the way. Every question
has a deadline. What libpq says is kept and followed by what to do about it.

Imports psycopg, `errors`, `_conninfo`, `_sql` and the standard library. No text made here may contain a password.
"""

import asyncio
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import psycopg
from psycopg.conninfo import conninfo_to_dict

from pgleaderlock._connect import connect, retrieve, sever
from pgleaderlock._conninfo import CONNECT_TIMEOUT_S, check_dsn, scrub
from pgleaderlock._pool_check import Backend, prove
from pgleaderlock._sql import statement
from pgleaderlock.errors import ConnectionError, PgLeaderLockError, UnsafeSessionError

__all__ = ["Look", "Unreachable", "explained", "hopeless"]

ANSWER_TIMEOUT_S = 10.0
SEVER_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class _Reason:
    kind: str
    pattern: re.Pattern[str]
    remedy: str
    waiting_helps: bool = False
    """May the same call succeed later although nobody changes it?"""


def _reason(kind: str, pattern: str, remedy: str, *, waiting_helps: bool = False) -> _Reason:
    return _Reason(kind, re.compile(pattern, re.IGNORECASE), remedy, waiting_helps)


# libpq gives no code for a failed connect, only a text, in which the server's part may be in the server's language.
# The first that fits counts; one that fits nothing is shown as it is.
_REASONS = (
    _reason(
        "pooler",
        "unsupported startup parameter",
        "a connection pooler is in between and refuses our settings: connect to PostgreSQL itself",
    ),
    _reason(
        "dns",
        "failed to resolve|could not translate host name|name or service not known|name resolution",
        "check how the host is spelled, and that this machine can resolve it",
        waiting_helps=True,
    ),
    _reason(
        "password",
        "password authentication failed|SASL authentication failed|authentication failed",
        "check user and password (in the DSN, PGPASSWORD or the password file; @ : / in a URI as %40 %3A %2F)",
    ),
    _reason("password", "no password supplied", "give a password: in the DSN, in PGPASSWORD or in the password file"),
    _reason(
        "access",
        r"no pg_hba\.conf entry|pg_hba\.conf rejects",
        "the server's pg_hba.conf does not let this user in from here: add a line there, or change user or sslmode",
    ),
    _reason("database", 'database "[^"]*" does not exist|no such database', "check the database's name, or create it"),
    _reason("role", 'role "[^"]*" (does not exist|is not permitted to log in)|no such user', "check the user's name"),
    _reason("privilege", "permission denied for database", "GRANT CONNECT ON DATABASE to this user, or use another"),
    _reason(
        "connections",
        "too many (clients|connections)|remaining connection slots|connection limit",
        "the server takes no more connections: close some, or raise max_connections or the limit of role or database",
        waiting_helps=True,
    ),
    _reason(
        "standby",
        "session is (not read-write|read-only)|hot standby|in recovery",
        "no primary was found: name the primary, or list all hosts in the DSN",
        waiting_helps=True,
    ),
    _reason(
        "starting",
        "is starting up|is shutting down|not yet accepting|consistent recovery",
        "the server is starting or stopping: try again in a moment",
        waiting_helps=True,
    ),
    _reason(
        "refused",
        "connection refused|No such file or directory",
        "nothing listens there: check host and port, and that PostgreSQL is running and listens on that address",
        waiting_helps=True,
    ),
    _reason(
        "network",
        "network is unreachable|no route to host|connection reset|closed the connection unexpectedly",
        "check host and port, and the network or firewall in between",
        waiting_helps=True,
    ),
    _reason(
        "timeout",
        "timeout expired|timed out|did not answer",
        "the host does not answer: check host and port, and any firewall in between",
        waiting_helps=True,
    ),
    _reason(
        "tls",
        "SSL|certificate|TLS",
        "client and server do not agree on encryption: check sslmode, sslrootcert and the server's certificate",
    ),
)


class Unreachable(ConnectionError):
    """No connection; `kind` is one word for programs, the text says what to do."""

    def __init__(self, text: str, kind: str) -> None:
        super().__init__(text)
        self.kind = kind


def explained(error: PgLeaderLockError) -> PgLeaderLockError:
    """The same error with what to do about it, in the words of the command line."""
    if isinstance(error, UnsafeSessionError):
        return UnsafeSessionError(error.reason, str(error).replace("pass allow_pooler=True", "use --allow-pooler"))
    if isinstance(error, Unreachable) or not isinstance(error, ConnectionError):
        return error
    text = str(error)
    reason = _find(text)
    return error if reason is None else Unreachable(f"{text}; {reason.remedy}", reason.kind)


def hopeless(error: BaseException) -> bool:
    """Will it fail again and again until somebody changes the command, the server's set-up or its rights?"""
    if isinstance(error, UnsafeSessionError):
        return error.reason != "standby"  # a standby may be promoted
    reason = _find(str(error)) if isinstance(error, ConnectionError) else None
    return reason is not None and not reason.waiting_helps


def _find(text: str) -> _Reason | None:
    return next((reason for reason in _REASONS if reason.pattern.search(text)), None)


class Look:
    """A plain connection, for a few named statements. Use as an async context manager."""

    def __init__(self, connection: psycopg.AsyncConnection[Any], params: Mapping[str, str]) -> None:
        self._connection = connection
        self.answer_timeout_s = ANSWER_TIMEOUT_S
        self.params = params
        """What it was opened with, secrets included: never to be shown."""

    @classmethod
    async def open(cls, dsn: str, application_name: str) -> Self:
        """Connect as the user's DSN says, or raise `Unreachable`."""
        check_dsn(dsn)
        return await cls.open_with(_plain_params(dsn, application_name))

    @classmethod
    async def open_with(cls, params: Mapping[str, str]) -> Self:
        """Connect with exactly these parameters, or raise `Unreachable`."""
        try:
            connection = await connect(params)
        except psycopg.Error as error:
            text = f"cannot connect: {scrub(str(error), params)}"
            reason = _find(text)
            raise Unreachable(
                text if reason is None else f"{text}; {reason.remedy}", "other" if reason is None else reason.kind
            ) from None
        return cls(connection, params)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self._connection.close()

    @property
    def protocol_pid(self) -> int:
        """The backend's pid as the protocol told it."""
        return self._connection.pgconn.backend_pid

    @property
    def server_version(self) -> int:
        """As in 150004; a pooler passes on what the server said."""
        return self._connection.pgconn.server_version

    @property
    def encrypted(self) -> bool:
        return bool(self._connection.pgconn.ssl_in_use)

    @property
    def host(self) -> str:
        """Where it went: a name, an address, or the folder of a socket."""
        return self._connection.info.host

    @property
    def address(self) -> str:
        """The numeric address that was connected to; empty for a socket."""
        return self._connection.info.hostaddr

    async def rows(self, name: str, **params: object) -> list[dict[str, Any]]:
        """The answer to a named statement, or a `ConnectionError` that says why there is none."""
        inner = asyncio.ensure_future(self._execute(name, params))
        inner.add_done_callback(retrieve)  # at a Ctrl-C nobody asks for it any more
        done, _ = await asyncio.wait([inner], timeout=self.answer_timeout_s)
        if not done:
            sever(self._connection)
            await asyncio.wait([inner], timeout=SEVER_TIMEOUT_S)
            raise ConnectionError(
                f"the server did not answer within {self.answer_timeout_s:g} s: is it frozen or cut off?"
            )
        try:
            return inner.result()
        except psycopg.Error as error:
            raise ConnectionError(f"the server refused {name!r}: {scrub(str(error), self.params)}") from None

    async def row(self, name: str, **params: object) -> dict[str, Any]:
        """The same for a statement that has exactly one row."""
        (row,) = await self.rows(name, **params)
        return row

    async def backend_is_shared(self) -> bool | None:
        """Does a pooler give our server session to other clients, too? None if that cannot be found out."""

        async def sample() -> Backend:
            return Backend(**await self.row("same_backend"))

        try:
            await prove(self._connection, sample)
        except UnsafeSessionError:
            return True
        except ConnectionError:
            return None
        return False

    async def _execute(self, name: str, params: Mapping[str, object]) -> list[dict[str, Any]]:
        cursor = await self._connection.execute(statement(name), params)
        return await cursor.fetchall()


def _plain_params(dsn: str, application_name: str) -> dict[str, str]:
    given = {key: str(value) for key, value in conninfo_to_dict(dsn).items() if value is not None}
    ours = {
        "application_name": application_name,
        "connect_timeout": os.environ.get("PGCONNECT_TIMEOUT") or str(CONNECT_TIMEOUT_S),
    }
    if "," in given.get("host", "") + given.get("hostaddr", ""):
        # The session looks for the primary among several, so we look at the same server.
        ours["target_session_attrs"] = "primary"
    return {**ours, **given}
