"""Checks a DSN, completes it with our settings, and keeps its secrets out of every text.

Pure except for reading libpq's environment variables. Settings are sent in the startup packet (`options`): that needs
no round trip, and overrides what the DBA has set for the role or the database. Settings in the user's DSN override
ours. A setting that would break a promise is refused before anything is opened.

No text made here may contain a password.
"""

import inspect
import os
import re
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
    "plain_params",
    "resolve",
    "scrub",
    "whole_ms",
]

# A callable is for passwords that expire: it is called before every connect.
Dsn = str | Callable[[], str | Awaitable[str]]

# Any of these tells libpq which server or database to connect to; the other variables only refine that.
LIBPQ_VARIABLES = ("PGHOST", "PGHOSTADDR", "PGSERVICE", "PGDATABASE")
CONNECT_TIMEOUT_S = 10
KEEPALIVE_S_MAX = 60.0
APPLICATION_NAME_BYTES_MAX = 63

# The session keeps its promises only with these values. They are set at connect and read back before any lock is taken;
# a DSN with other values is refused.
REQUIRED = {
    "idle_session_timeout": "0",
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
}
# The session also needs these values. Users set them for their own statements, none of which runs here, so our values
# override theirs: a leader must get the server's warnings, and the search path must not lead to functions of the same
# name in another schema.
FORCED = {"client_min_messages": "warning", "search_path": "pg_catalog"}
# Without it, text from an SQL_ASCII database arrives as bytes. It has its own parameter in the startup packet.
CLIENT_ENCODING = "UTF8"
_STANDBY_ATTRS = ("standby", "prefer-standby", "read-only")
_SECRETS = ("password", "sslpassword", "oauth_client_secret", "passfile")


def whole_ms(duration_s: float) -> int:
    """A timeout in the milliseconds that the server takes and shows. Never zero, which would switch it off."""
    return max(1, round(duration_s * 1000))


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """The settings with which a dedicated session is opened."""

    application_name: str
    statement_timeout_s: float
    lease_s: float
    """T: the server drops the session of a leader that has been silent for this long."""
    allow_pooler: bool = False
    idle_timeout_s: float = 0.0
    """The lease from the connect on, for a session with heartbeats from its start; 0: the lease begins with the
    lock."""

    @property
    def statement_timeout_ms(self) -> int:
        return whole_ms(self.statement_timeout_s)

    @property
    def lease_ms(self) -> int:
        return whole_ms(self.lease_s)

    @property
    def idle_timeout_ms(self) -> int:
        return round(self.idle_timeout_s * 1000)


def libpq_knows_where(environ: Mapping[str, str] | None = None) -> bool:
    """Do libpq's environment variables say where an empty DSN connects to?"""
    env = os.environ if environ is None else environ
    return any(env.get(name) for name in LIBPQ_VARIABLES)


async def resolve(dsn: Dsn) -> str:
    """The DSN as text. A callable is called each time."""
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
    """The parameters of `psycopg.AsyncConnection.connect` for a dedicated session: the user's DSN and our settings."""
    given = dict(_parsed(dsn, os.environ.get("PGOPTIONS", "")))
    keepalive_s = min(settings.lease_s, KEEPALIVE_S_MAX)
    ours = {
        **_ours(given, settings.application_name, CONNECT_TIMEOUT_S),
        "keepalives": "1",
        "keepalives_idle": str(max(1, int(keepalive_s / 3))),
        "keepalives_interval": str(max(1, int(keepalive_s / 6))),
        "keepalives_count": "3",
        "tcp_user_timeout": str(int(keepalive_s * 1000 * 2 / 3)),
    }
    if not settings.allow_pooler:
        # Later options win: the user's options override ours, except for those that we depend on.
        user_options = given.pop("options", None) or os.environ.get("PGOPTIONS", "")
        ours["options"] = " ".join(filter(None, [_options(settings), user_options, _as_options(FORCED)]))
    return {**ours, **given, "client_encoding": CLIENT_ENCODING}


def plain_params(
    dsn: str, application_name: str, *, connect_timeout_s: int = CONNECT_TIMEOUT_S, options: str = ""
) -> dict[str, str]:
    """The parameters of a plain connection, which may lead to a pooler or a standby.

    `options` are settings that override the user's. Without them, none of ours is sent: some poolers refuse them.
    """
    given = dict(_parsed(dsn, os.environ.get("PGOPTIONS", "")))
    if options:
        given["options"] = f"{given.get('options') or os.environ.get('PGOPTIONS', '')} {options}".strip()
    keepalives = {"keepalives_idle": "5", "keepalives_interval": "2", "keepalives_count": "3"}
    ours = _ours(given, application_name, connect_timeout_s)
    return {**ours, **keepalives, **given, "client_encoding": CLIENT_ENCODING}


def _ours(given: Mapping[str, str], application_name: str, connect_timeout_s: int) -> dict[str, str]:
    """The parameters of every connection of ours, unless the user gives them."""
    ours = {
        "application_name": os.environ.get("PGAPPNAME") or application_name,
        "connect_timeout": os.environ.get("PGCONNECT_TIMEOUT") or str(connect_timeout_s),
    }
    hosts = given.get("host") or os.environ.get("PGHOST", "")
    if "," in hosts + given.get("hostaddr", ""):
        ours["target_session_attrs"] = os.environ.get("PGTARGETSESSIONATTRS") or "primary"
    return ours


def default_application_name(label: str) -> str:
    """An application name that shows lock and node in `pg_stat_activity`, in the 63 bytes that PostgreSQL keeps."""
    text = f"pgleaderlock {label} {socket.gethostname()}/{os.getpid()}"
    return "".join(char if " " <= char <= "~" else "?" for char in text)[:APPLICATION_NAME_BYTES_MAX]


def scrub(text: str, params: Mapping[str, str]) -> str:
    """The text in one line, without the secrets of these parameters and without libpq's hints: we add our own."""
    text = re.sub(r"\n\t(?:Is the server running|This probably means)[^\n]*(?:\n\t[^\n]*)*", "", text)
    for key in _SECRETS:
        if secret := params.get(key):
            text = text.replace(secret, "***")
    return " ".join(text.split())


@lru_cache(maxsize=32)  # parsed when a lock is created, and again at each connect
def _parsed(dsn: str, environment_options: str) -> Mapping[str, str]:
    if "\0" in dsn:
        raise ConfigurationError("the DSN has a NUL character in it: remove it")
    if re.match(r"\s*postgres(ql)?\+\w+://", dsn):
        raise ConfigurationError(
            "the DSN is a URL of SQLAlchemy, with the name of a driver in it: write postgresql://… without it, as "
            "engine.url.set(drivername='postgresql').render_as_string(hide_password=False) does"
        )
    try:
        params = {key: str(value) for key, value in conninfo_to_dict(dsn.strip()).items() if value is not None}
    except (psycopg.Error, UnicodeError):
        # libpq's error quotes parts of the text that it could not parse, and a part may be the password.
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
