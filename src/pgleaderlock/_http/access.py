"""Access control: bearer tokens from a file, and the check of the Host header.

The token file is TOML:

    [[token]]
    name = "billing"                 # in logs and in the audit of a break, instead of the token
    token = "at least 16 characters"
    prefix = "billing/"              # optional: only locks whose names begin with this
    admin = true                     # optional: may break locks and see lease ids

Must never log or print a token, or compare one character by character. Must never resolve a name from a Host header: an
attacker may control the answer.
"""

import hashlib
import hmac
import ipaddress
import re
import secrets
import stat
import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from pgleaderlock._base.logging import get_logger
from pgleaderlock._http.answers import Refusal
from pgleaderlock.errors import ConfigurationError

__all__ = ["ANYONE", "Caller", "HostCheck", "Tokens"]

_TOKEN_CHARS_MIN = 16
_TOKEN_CHARS_MAX = 512
_TOKENS_MAX = 10_000
# The characters of a bearer token (RFC 6750): a header can carry them unquoted, and a person can copy them.
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+")
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_KEYS = ("name", "token", "prefix", "admin")
_BEARER = b"bearer "

_CHALLENGE = (b"www-authenticate", b"Bearer")
_ANY = "*"
_REMEMBERED_MAX = 256


@dataclass(frozen=True, slots=True)
class Caller:
    """The authenticated client, and which locks it may use."""

    name: str
    prefix: str = ""
    admin: bool = False

    def may_use(self, lock_name: str) -> bool:
        return lock_name.startswith(self.prefix)


Callers = dict[bytes, Caller]
ANYONE = Caller("anyone")
"""Every client of a server without tokens: may use all locks, but has no admin rights."""


class Tokens:
    """The tokens of one file. Raises `ConfigurationError` with the remedy."""

    def __init__(self, path: Path) -> None:
        # Tokens are looked up by a keyed hash with a secret key, so the time of a lookup reveals nothing about a token.
        self._key = secrets.token_bytes(32)
        self._path = path
        self.replace(self._read())

    def read_again(self) -> Callers:
        """Read the file again, for `replace`. Raises as the constructor does. May block: call it in a thread."""
        if not self._path.is_file():  # reading a pipe a second time would block without end
            raise ConfigurationError(f"the token file {self._path} is no file that can be read again")
        return self._read()

    def replace(self, callers: Callers) -> None:
        self._callers = callers

    def _read(self) -> Callers:
        callers = _parsed(_read(self._path), self._path)
        return {self._hash(token.encode()): caller for token, caller in callers.items()}

    def caller(self, authorization: bytes | None) -> Caller:
        """The caller that the Authorization header identifies. Raises `Refusal` 401."""
        if authorization is None:
            raise Refusal(401, "a bearer token is needed: send the header Authorization: Bearer TOKEN", _CHALLENGE)
        if authorization[:7].lower() != _BEARER:
            raise Refusal(401, "the Authorization header is not of the form: Bearer TOKEN", _CHALLENGE)
        caller = self.known(authorization)
        if caller is None:
            raise Refusal(401, "this token is unknown here", _CHALLENGE)
        return caller

    def known(self, authorization: bytes) -> Caller | None:
        """The caller whose token is in this header, which begins with `Bearer `; None for an unknown token."""
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
    except (ValueError, RecursionError) as error:
        # The error's text has a position, but no part of the file.
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


class HostCheck:
    """The defence against DNS rebinding. Call it with the Host header of a request; raises `Refusal`.

    An attacker's page can make its own host name resolve to 127.0.0.1, and then has the same origin as a server that
    listens there. It cannot change the Host header, which still has the attacker's name. So only our own names are
    accepted. An IP address is always accepted, because a page that was loaded from a name never sends one.
    """

    def __init__(self, allowed: Collection[str]) -> None:
        """Raises `ConfigurationError` for a name that no Host header can carry."""
        for name in allowed:
            if "/" in name:
                raise ConfigurationError(f"--allowed-host {name}: give the name alone, as in locks.example")
        names = {name.lower().rstrip(".") for name in allowed}
        self._any = _ANY in names
        self._names = names | {"localhost"}
        self._accepted: set[bytes] = set()
        """A cache of headers that were accepted: nearly every request has one of a few."""

    def __call__(self, host: bytes | None) -> None:
        if host in self._accepted:
            return
        if not host:
            raise Refusal(400, "the request has no Host header")
        if not self._any and not self._is_ours(host):
            raise Refusal(403, "the Host header names another server: if it is a name of this one, add --allowed-host")
        if len(self._accepted) < _REMEMBERED_MAX:
            self._accepted.add(host)

    def _is_ours(self, host: bytes) -> bool:
        try:
            text = host.decode("ascii").lower()
        except UnicodeDecodeError:
            return False
        if text.startswith("["):
            name, _, rest = text[1:].partition("]")
        else:
            name, colon, port = text.partition(":")
            rest = colon + port
        if rest and not (rest[0] == ":" and (rest[1:].isdigit() or rest == ":")):
            return False
        if name.rstrip(".") in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True
