"""What a DSN becomes before it is used: checked, completed with our settings, and kept out of every text.

Pure except for reading libpq's environment variables. Settings ride in the startup packet (`options`), so they
cost no round trip and beat what the DBA set for the role or the database. What the user writes into the DSN beats
ours, unless it would break a promise: then it is refused, before anything is opened.

Imports psycopg's parser, `errors` and the standard library only. No text made here may contain a password.
"""

import inspect
import os
import shlex
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import psycopg
from psycopg.conninfo import conninfo_to_dict

from pgleaderlock.errors import ConfigurationError

__all__ = [
    "LIBPQ_VARIABLES",
    "ConnectionSettings",
    "Dsn",
    "check_dsn",
    "connect_params",
    "default_application_name",
    "libpq_knows_where",
    "resolve",
    "scrub",
]

# A callable serves passwords that expire: it is asked before every connect.
Dsn = str | Callable[[], str | Awaitable[str]]

# With any of these libpq knows where to go; user, password and the rest only refine it.
LIBPQ_VARIABLES = ("PGHOST", "PGHOSTADDR", "PGSERVICE", "PGDATABASE")
CONNECT_TIMEOUT_S = 10
KEEPALIVE_S_MAX = 60.0
APPLICATION_NAME_BYTES_MAX = 63

# The session does not keep its promises unless these are exactly so: set at connect, and read back before any lock is
# taken. A DSN that asks for something else is refused.
REQUIRED = {
    "idle_session_timeout": "0",
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
}
# The same for what people set for their own statements, and no statement of theirs runs here: ours wins. A warning that
# the server does not send would be led on, and a function of the same name in another schema must not be found first.
FORCED = {"client_min_messages": "warning", "search_path": "pg_catalog"}
# Text from a database in SQL_ASCII would arrive as bytes. The protocol has a field of its own for this one.
CLIENT_ENCODING = "UTF8"
_STANDBY_ATTRS = ("standby", "prefer-standby", "read-only")
_SECRETS = ("password", "sslpassword", "oauth_client_secret", "passfile")


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """What a dedicated session is opened with."""

    application_name: str
    statement_timeout_s: float
    lease_s: float
    """T: the server drops the session of a leader that has been silent for this long."""
    allow_pooler: bool = False
    idle_timeout_s: float = 0.0
    """The lease from the beginning, for a session that is never silent; 0: it begins with the lock."""

    # What the server is told, and shows again: whole milliseconds, rounded once.

    @property
    def statement_timeout_ms(self) -> int:
        return max(1, round(self.statement_timeout_s * 1000))

    @property
    def lease_ms(self) -> int:
        return max(1, round(self.lease_s * 1000))

    @property
    def idle_timeout_ms(self) -> int:
        return round(self.idle_timeout_s * 1000)


def libpq_knows_where(environ: Mapping[str, str] | None = None) -> bool:
    """Does an empty DSN lead to a database that somebody has chosen?"""
    env = os.environ if environ is None else environ
    return any(env.get(name) for name in LIBPQ_VARIABLES)


async def resolve(dsn: Dsn) -> str:
    """The DSN as text, asked for anew if it is a callable."""
    if isinstance(dsn, str):
        return dsn
    given = dsn()
    text = await given if inspect.isawaitable(given) else given
    if not isinstance(text, str):
        raise ConfigurationError(f"the DSN callable returned {type(text).__name__}: it must return a string")
    return text


def check_dsn(dsn: object) -> None:
    """Raise a `ConfigurationError` for a DSN that can never work or would break a promise."""
    if callable(dsn):
        return
    if not isinstance(dsn, str):
        raise ConfigurationError(
            f"dsn must be a string such as postgresql://user@host/database, not {type(dsn).__name__}"
        )
    _parsed(dsn, os.environ.get("PGOPTIONS", ""))


def connect_params(dsn: str, settings: ConnectionSettings) -> dict[str, str]:
    """The user's DSN completed with ours: keyword parameters for `psycopg.AsyncConnection.connect`."""
    given = dict(_parsed(dsn, os.environ.get("PGOPTIONS", "")))
    keepalive_s = min(settings.lease_s, KEEPALIVE_S_MAX)
    ours = {
        "application_name": os.environ.get("PGAPPNAME") or settings.application_name,
        "connect_timeout": os.environ.get("PGCONNECT_TIMEOUT") or str(CONNECT_TIMEOUT_S),
        "keepalives": "1",
        "keepalives_idle": str(max(1, int(keepalive_s / 3))),
        "keepalives_interval": str(max(1, int(keepalive_s / 6))),
        "keepalives_count": "3",
        "tcp_user_timeout": str(int(keepalive_s * 1000 * 2 / 3)),
    }
    hosts = given.get("host") or os.environ.get("PGHOST", "")
    if "," in hosts + given.get("hostaddr", "") and "target_session_attrs" not in given:
        ours["target_session_attrs"] = os.environ.get("PGTARGETSESSIONATTRS") or "primary"
    if not settings.allow_pooler:
        # Later options win: the user's over ours, but for what we depend on.
        user_options = given.pop("options", None) or os.environ.get("PGOPTIONS", "")
        ours["options"] = " ".join(filter(None, [_options(settings), user_options, _as_options(FORCED)]))
    return {**ours, **given, "client_encoding": CLIENT_ENCODING}


def default_application_name(label: str) -> str:
    """Says in `pg_stat_activity` which lock and which node this is, in the 63 bytes that PostgreSQL keeps."""
    text = f"pgleaderlock {label} {socket.gethostname()}/{os.getpid()}"
    return "".join(char if " " <= char <= "~" else "?" for char in text)[:APPLICATION_NAME_BYTES_MAX]


def scrub(text: str, params: Mapping[str, str]) -> str:
    """The text without any secret of these parameters."""
    for key in _SECRETS:
        if secret := params.get(key):
            text = text.replace(secret, "***")
    return " ".join(text.split())


@lru_cache(maxsize=32)  # parsed when the lock is made, and again at each connect
def _parsed(dsn: str, environment_options: str) -> Mapping[str, str]:
    if "\0" in dsn:
        raise ConfigurationError("the DSN has a NUL character in it: remove it")
    try:
        params = {key: str(value) for key, value in conninfo_to_dict(dsn.strip()).items() if value is not None}
    except (psycopg.Error, UnicodeError):
        # libpq's own text quotes pieces of what it could not parse, and a piece may be the password.
        raise ConfigurationError(
            "the DSN cannot be parsed: write postgresql://user:password@host:5432/database or "
            "'host=… dbname=…', with special characters of the password percent-encoded (@ as %40, / as %2F)"
        ) from None
    stray_at = "@" in params.get("host", "") or ("@" in params.get("dbname", "") and "%40" not in dsn)
    if stray_at and dsn.strip().startswith(("postgresql://", "postgres://")):
        raise ConfigurationError(
            "the DSN has an '@' or '/' in its password: write them as %40 and %2F, or they end the password early"
        )
    if params.get("target_session_attrs") in _STANDBY_ATTRS:
        raise ConfigurationError(
            "target_session_attrs asks for a standby, where a lock excludes nobody: remove it or use 'primary'"
        )
    if params.get("replication", "false") not in ("false", "off", "no", "0"):
        raise ConfigurationError("the DSN asks for a replication connection, which cannot hold a lock: remove it")
    options = params.get("options") or environment_options
    if (len(options) - len(options.rstrip("\\"))) % 2:
        raise ConfigurationError("the DSN's options end with a backslash, which swallows what follows: remove it")
    for name, value in _assignments(options):
        if name in REQUIRED and value != REQUIRED[name]:
            raise ConfigurationError(
                f"the DSN's options set {name}={value}, which breaks a promise of the lock: remove it there"
            )
    return params


def _options(settings: ConnectionSettings) -> str:
    keepalive_s = min(settings.lease_s, KEEPALIVE_S_MAX)
    values = {
        **REQUIRED,
        "idle_session_timeout": str(settings.idle_timeout_ms),
        "statement_timeout": str(settings.statement_timeout_ms),
        "lock_timeout": str(settings.statement_timeout_ms),
        "idle_in_transaction_session_timeout": str(settings.lease_ms),
        "client_connection_check_interval": str(max(100, min(1000, settings.lease_ms // 4))),
        "tcp_keepalives_idle": str(max(1, int(keepalive_s / 3))),
        "tcp_keepalives_interval": str(max(1, int(keepalive_s / 6))),
        "tcp_keepalives_count": "3",
        "tcp_user_timeout": str(int(keepalive_s * 1000 * 2 / 3)),
    }
    return _as_options(values)


def _as_options(values: Mapping[str, str]) -> str:
    return " ".join(f"-c {name}={value.replace(' ', chr(92) + ' ')}" for name, value in values.items())


def _assignments(options: str) -> list[tuple[str, str]]:
    """The settings in an `options` string: `-c name=value`, `-cname=value` and `--name=value`."""
    try:
        words = shlex.split(options)
    except ValueError:
        words = options.split()
    found = []
    for before, word in zip(["", *words], words, strict=False):
        if before == "-c":
            text = word
        elif word.startswith(("-c", "--")):
            text = word[2:]
        else:
            continue
        name, equals, value = text.partition("=")
        if equals:
            found.append((name.strip().lower().replace("-", "_"), value.strip()))
    return found
