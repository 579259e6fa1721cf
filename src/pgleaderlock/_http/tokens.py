"""Who may ask: bearer tokens from a file, each with a name, a prefix of lock names and perhaps the rights of an admin.

The file is TOML:

    [[token]]
    name = "billing"                 # in logs and in the audit of a break, instead of the token
    token = "at least 16 characters"
    prefix = "billing/"              # optional: only locks whose names begin so
    admin = true                     # optional: may break locks and see lease ids

Imports `answers` and the standard library. Must never log, print or compare a token character by character.
"""

import hashlib
import hmac
import re
import secrets
import stat
import tomllib
from dataclasses import dataclass
from pathlib import Path

from pgleaderlock._http.answers import Refusal
from pgleaderlock._logging import get_logger
from pgleaderlock.errors import ConfigurationError

__all__ = ["ANYONE", "Caller", "Tokens"]

_TOKEN_CHARS_MIN = 16
_TOKEN_CHARS_MAX = 512
_TOKENS_MAX = 10_000
# What a header can carry in one piece (RFC 6750), and a person can copy.
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+")
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_KEYS = ("name", "token", "prefix", "admin")
_BEARER = b"bearer "

_CHALLENGE = (b"www-authenticate", b"Bearer")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and what for."""

    name: str
    prefix: str = ""
    admin: bool = False

    def may_use(self, lock_name: str) -> bool:
        return lock_name.startswith(self.prefix)


Callers = dict[bytes, Caller]
ANYONE = Caller("anyone")
"""Everybody, where no tokens are configured: all locks, nothing of an admin."""


class Tokens:
    """The tokens of one file. Raises `ConfigurationError` with the remedy."""

    def __init__(self, path: Path) -> None:
        # Found by a keyed hash whose key nobody else knows: how long the search takes says nothing about any token.
        self._key = secrets.token_bytes(32)
        self._path = path
        self.replace(self._read())

    def read_again(self) -> Callers:
        """What is in the file now, for `replace`. Raises as at first. May take long: for a thread of its own."""
        if not self._path.is_file():  # who reads a pipe a second time waits for ever
            raise ConfigurationError(f"the token file {self._path} is no file that can be read again")
        return self._read()

    def replace(self, callers: Callers) -> None:
        self._callers = callers

    def _read(self) -> Callers:
        callers = _parsed(_read(self._path), self._path)
        return {self._hash(token.encode()): caller for token, caller in callers.items()}

    def caller(self, authorization: bytes | None) -> Caller:
        """Whose token it is. Raises `Refusal` 401."""
        if authorization is None:
            raise Refusal(401, "a bearer token is needed: send the header Authorization: Bearer TOKEN", _CHALLENGE)
        if authorization[:7].lower() != _BEARER:
            raise Refusal(401, "the Authorization header is not of the form: Bearer TOKEN", _CHALLENGE)
        caller = self.known(authorization)
        if caller is None:
            raise Refusal(401, "this token is unknown here", _CHALLENGE)
        return caller

    def known(self, authorization: bytes) -> Caller | None:
        """Whose token is in this header, which begins as it should; None if it is nobody's any more."""
        return self._callers.get(self._hash(authorization[7:].strip()))

    def _hash(self, token: bytes) -> bytes:
        return hmac.digest(self._key, hashlib.sha256(token).digest(), "sha256")


def _read(path: Path) -> str:
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the token file {path} cannot be read: {error}") from error
    if stat.S_ISREG(mode) and mode & (stat.S_IRWXG | stat.S_IRWXO):
        get_logger("pgleaderlock.http").warning(
            "token_file_readable_by_others",
            path=str(path),
            mode=oct(stat.S_IMODE(mode)),
            remedy=f"chmod 600 {path}",
        )
    return text


def _parsed(text: str, path: Path) -> dict[str, Caller]:
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number or a nesting that nobody could mean, too
        # Its text holds a position and no part of the file.
        raise ConfigurationError(f"the token file {path} is not TOML: {error}") from error
    entries = document.get("token")
    if set(document) != {"token"} or not isinstance(entries, list) or not entries:
        raise ConfigurationError(f"the token file {path} needs one [[token]] section a token, and nothing else")
    if len(entries) > _TOKENS_MAX:
        raise ConfigurationError(f"the token file {path} holds more than {_TOKENS_MAX} tokens")
    callers: dict[str, Caller] = {}
    for number, entry in enumerate(entries, 1):
        token, caller = _entry(entry, f"the token file {path}, [[token]] number {number}")
        if token in callers:
            raise ConfigurationError(f"the token file {path} has one token twice: that of {caller.name!r}")
        callers[token] = caller
    return callers


def _entry(entry: object, where: str) -> tuple[str, Caller]:
    if not isinstance(entry, dict):
        raise ConfigurationError(f"{where}: write [[token]] with two brackets, and the keys below it")
    for key in entry:
        if key not in _KEYS:
            raise ConfigurationError(f"{where}: unknown key {key!r}: known are {', '.join(_KEYS)}")
    name, token = entry.get("name"), entry.get("token")
    prefix, admin = entry.get("prefix", ""), entry.get("admin", False)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigurationError(f"{where}: name must be 1 to 64 letters, digits or any of . _ @ -")
    if not isinstance(token, str) or not _TOKEN.fullmatch(token) or len(token) > _TOKEN_CHARS_MAX:
        raise ConfigurationError(f"{where}: token must be letters, digits or any of . _ ~ + / = -")
    if len(token) < _TOKEN_CHARS_MIN:
        raise ConfigurationError(
            f"{where}: token is shorter than {_TOKEN_CHARS_MIN} characters: "
            "make one with python3 -c 'import secrets; print(secrets.token_urlsafe(32))'"
        )
    if not isinstance(prefix, str):
        raise ConfigurationError(f"{where}: prefix must be a text")
    if not isinstance(admin, bool):
        raise ConfigurationError(f"{where}: admin must be true or false")
    return token, Caller(name, prefix, admin)
