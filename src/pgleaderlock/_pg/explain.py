"""Maps a failed connect, a refused statement or an unfit session to an error, with what the user can do about it.

Pure. No text made here may contain a secret of a DSN.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import psycopg

from pgleaderlock._pg.conninfo import scrub
from pgleaderlock.errors import (
    ConnectionError,
    LockError,
    PgLeaderLockError,
    SchemaError,
    UnsafeSessionError,
)

__all__ = [
    "Unreachable",
    "connect_error",
    "explained",
    "hopeless",
    "moved_error",
    "pooler_error",
    "safe_cause",
    "shared_error",
    "standby_error",
    "statement_error",
    "unreachable",
    "version_error",
]


# --- The dedicated session: errors for programs


# Poolers that refuse the settings which we send at connect: PgBouncer and products built on it, RDS Proxy.
_REFUSES_SETTINGS = "unsupported startup parameter|RDS Proxy currently doesn.t support"
# Errors that only poolers send. Errors quote names of databases and roles, so a product name alone proves nothing. The
# tests check the messages of PgBouncer. Those of RDS Proxy and Supavisor come from their documentation, those of pgcat,
# Odyssey and PgDog from their source code: none of these was run.
_POOLER = (
    f"{_REFUSES_SETTINGS}|this RDS Proxy has no credentials"
    "|no pool configured for database: "  # pgcat
    "|odyssey: [cs][0-9a-f]+: "
    "|tenant or user not found|no tenant identifier provided|MaxClientsInSessionMode"  # Supavisor
    '|password for user ".*" and database ".*" is wrong, or the database does not exist'  # PgDog
)


def connect_error(error: psycopg.Error, params: Mapping[str, str], *, allow_pooler: bool = False) -> ConnectionError:
    text = scrub(str(error), params)
    if allow_pooler and re.search(_REFUSES_SETTINGS, text, re.IGNORECASE):
        return UnsafeSessionError(
            "pooler",
            f"the pooler refuses the settings that are sent at connect ({text}): where a pooler is allowed these are "
            "yours alone, so remove `options` from the DSN and PGOPTIONS from the environment",
        )
    if not allow_pooler and re.search(_POOLER, text, re.IGNORECASE):
        return pooler_error(text)
    if "hot standby" in text:
        return standby_error()
    if "out of shared memory" in text:
        return ConnectionError(f"cannot connect: {lock_table_full(text)}")
    return ConnectionError(f"cannot connect: {text}")


def statement_error(name: str, error: Exception, text: str) -> PgLeaderLockError:
    """The error for a failed statement; `text` is the server's message, without secrets."""
    sqlstate = getattr(error, "sqlstate", None)
    if sqlstate == "53200":  # out_of_memory: for us it is always the shared lock table
        return LockError(lock_table_full(text))
    # The probe exists on our own backend only (else invalid_sql_statement_name), and only after we have prepared it
    # (else duplicate_prepared_statement): either error means another backend.
    if (name, sqlstate) in (("probe", "26000"), ("ledger_heartbeat", "26000"), ("identify", "42P05")):
        return moved_error()
    if sqlstate in ("42P01", "3F000", "42883"):  # undefined table, schema, function
        return SchemaError(f"the ledger is missing or too old ({text}): run `pgleaderlock migrate` on this database")
    if sqlstate == "42501" and name.startswith(("ledger_", "lease_", "slot_")):  # insufficient_privilege
        return SchemaError(f"this database role may not use the ledger ({text}): see the GRANTs in docs/ledger.md")
    return ConnectionError(f"{name!r} failed: {text}")


def lock_table_full(detail: str) -> str:
    return f"the server's lock table is full ({detail}): raise max_locks_per_transaction, or hold fewer locks"


def safe_cause(error: Exception, params: Mapping[str, str]) -> Exception | None:
    """The original error as the cause, unless its text would put a secret into a traceback."""
    text = str(error)
    return error if " ".join(text.split()) == scrub(text, params) else None


def pooler_error(detail: str) -> UnsafeSessionError:
    return UnsafeSessionError(
        "pooler",
        f"there is a connection pooler between us and PostgreSQL ({detail}): connect to PostgreSQL itself, or, if the "
        'pool is in session mode, pass allow_pooler=True. An election works through any pool with hold="lease"',
    )


def shared_error() -> UnsafeSessionError:
    return UnsafeSessionError(
        "pooler",
        "the pooler hands one server session to several clients (pool_mode transaction or statement), where a "
        "lock excludes nobody: use pool_mode=session or connect to PostgreSQL itself. An election works through such a "
        'pool with hold="lease"',
    )


def moved_error() -> UnsafeSessionError:
    return UnsafeSessionError(
        "pooler",
        "the server session that answers is not the one that took the lock, or has lost it, so the lock is no longer "
        "ours: a pooler or proxy in between has moved this client or reset its session; connect to PostgreSQL itself",
    )


def standby_error() -> UnsafeSessionError:
    return UnsafeSessionError(
        "standby",
        "this server is a standby, where a lock excludes nobody: connect to the primary, or list all hosts in the DSN",
    )


def version_error(server_version: int) -> UnsafeSessionError:
    return UnsafeSessionError(
        "version", f"PostgreSQL {server_version // 10000} is too old for pgleaderlock: use 14 or newer"
    )


# --- A failed connect on the command line: libpq's text, and what to do about it


class Unreachable(ConnectionError):
    """No connection; `kind` is one word for programs, the text says what to do."""

    def __init__(self, text: str, kind: str, *, waiting_helps: bool) -> None:
        super().__init__(text)
        self.kind = kind
        self.waiting_helps = waiting_helps


def unreachable(error: psycopg.Error, params: Mapping[str, str]) -> Unreachable:
    text = f"cannot connect: {scrub(str(error), params)}"
    reason = _find(text)
    return Unreachable(text, "other", waiting_helps=True) if reason is None else reason.told(text)


def explained(error: PgLeaderLockError) -> PgLeaderLockError:
    """The same error with what to do about it on the command line."""
    if isinstance(error, UnsafeSessionError):
        return UnsafeSessionError(error.reason, _in_flags(str(error)))
    if isinstance(error, Unreachable) or not isinstance(error, ConnectionError):
        return error
    reason = _find(str(error))
    return error if reason is None else reason.told(str(error))


def _in_flags(text: str) -> str:
    text = text.replace("pass allow_pooler=True", "use --allow-pooler")
    return text.replace("An election works", "With --fenced it works").replace('hold="lease"', "--hold lease")


def hopeless(error: BaseException) -> bool:
    """Will every retry fail unless the command, the server's configuration or its privileges are changed?"""
    if isinstance(error, UnsafeSessionError):
        return error.reason != "standby"  # a standby may be promoted
    told = explained(error) if isinstance(error, ConnectionError) else error
    return isinstance(told, Unreachable) and not told.waiting_helps


@dataclass(frozen=True, slots=True)
class _Reason:
    kind: str
    pattern: re.Pattern[str]
    remedy: str
    waiting_helps: bool = False
    """Could the same call succeed later without any change?"""

    def told(self, text: str) -> Unreachable:
        return Unreachable(f"{text}; {self.remedy}", self.kind, waiting_helps=self.waiting_helps)


def _reason(kind: str, pattern: str, remedy: str, *, waiting_helps: bool = False) -> _Reason:
    return _Reason(kind, re.compile(pattern, re.IGNORECASE), remedy, waiting_helps)


# libpq gives only a text for a failed connect, no code, and the server's part of it may be in the server's language.
# The first matching pattern counts; a text that matches none is shown unchanged.
_REASONS = (
    _reason(
        "pooler",
        _REFUSES_SETTINGS,
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
        "password authentication failed|SASL authentication failed|authentication failed"
        "|is wrong, or the database does not exist",
        "check user and password (in the DSN, PGPASSWORD or the password file; @ : / in a URI as %40 %3A %2F)",
    ),
    _reason("password", "no password supplied", "give a password: in the DSN, in PGPASSWORD or in the password file"),
    _reason(
        "access",
        r"no pg_hba\.conf entry|pg_hba\.conf rejects",
        "the server's pg_hba.conf does not let this user in from here: add a line there, or change user or sslmode",
    ),
    _reason(
        "database",
        'database "[^"]*" does not exist|no such database|no pool configured for database',
        "check the database's name, or create it",
    ),
    _reason(
        "role",
        'role "[^"]*" (does not exist|is not permitted to log in)|no such user|tenant or user not found',
        "check the user's name",
    ),
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


def _find(text: str) -> _Reason | None:
    return next((reason for reason in _REASONS if reason.pattern.search(text)), None)
