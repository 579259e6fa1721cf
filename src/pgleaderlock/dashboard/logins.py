"""Who has signed in: logins in this server's memory, found by a cookie that says nothing by itself.

A login stands for the token that it was opened with, and may do less: a browser sends the cookie along whichever page
has asked it to, so a request with the cookie alone can look, and never change anything. A restart ends every login.

Must never write a token or a cookie into a log, nor compare one letter by letter.
"""

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from pgleaderlock._http.access import Caller, Tokens
from pgleaderlock._http.answers import Refusal

__all__ = ["LASTS_S", "Login", "Logins", "check_same_origin", "cookie_name", "secure_origin"]

COOKIE = "pgleaderlock_session"
LASTS_S = 12 * 3600.0
LOGINS_MAX = 1_000
LOGINS_EACH_MAX = 50
"""Per token: signing in again and again ends the logins of that token, and no other's."""
_COOKIES_MAX = 4
_DEFAULT_PORTS = {"http": 80, "https": 443}
_PORT = re.compile(rb":([0-9]{1,5})\Z")
_ENDED = float("-inf")


@dataclass(slots=True, eq=False)
class Login:
    """Lasts until `ends_at`, on the monotonic clock, and no longer than its token is that caller's."""

    caller: Caller
    authorization: bytes
    """The header that would have said the same: the lock API knows nothing of logins."""
    ends_at: float
    tokens: Tokens

    @property
    def over(self) -> bool:
        if self.tokens.known(self.authorization) != self.caller:
            self.ends_at = _ENDED  # for good, even if the token comes back
        return time.monotonic() >= self.ends_at


class Logins:
    """All logins of a server: at most `LOGINS_MAX`, the oldest goes first."""

    def __init__(self) -> None:
        # Kept by a keyed hash: how long a search takes says nothing about any cookie.
        self._key = secrets.token_bytes(32)
        self._logins: dict[bytes, Login] = {}

    def open(self, caller: Caller, authorization: bytes, tokens: Tokens) -> str:
        """Opens a login; returns the secret for its cookie."""
        self._logins = {key: login for key, login in self._logins.items() if not login.over}
        own = [key for key, login in self._logins.items() if login.caller == caller]
        for key in own[: max(0, len(own) - LOGINS_EACH_MAX + 1)]:
            self._end(key)
        while len(self._logins) >= LOGINS_MAX:
            self._end(next(iter(self._logins)))
        secret = secrets.token_urlsafe(32)
        self._logins[self._hash(secret)] = Login(caller, authorization, time.monotonic() + LASTS_S, tokens)
        return secret

    def find(self, headers: Mapping[bytes, bytes]) -> Login | None:
        """The login of an HTTP request, if it has one that still lasts."""
        for secret in _secrets(headers):
            login = self._logins.get(self._hash(secret))
            if login is not None and not login.over:
                return login
        return None

    def close(self, headers: Mapping[bytes, bytes]) -> None:
        for secret in _secrets(headers):
            self._end(self._hash(secret))

    def _end(self, key: bytes) -> None:
        """An open stream holds its login, and ends with it."""
        login = self._logins.pop(key, None)
        if login is not None:
            login.ends_at = _ENDED

    def _hash(self, secret: str) -> bytes:
        return hmac.digest(self._key, hashlib.sha256(secret.encode()).digest(), "sha256")


def cookie_name(headers: Mapping[bytes, bytes]) -> str:
    """With the port that was asked: a browser keeps one jar for a host, and there may be a server at each port."""
    port = _PORT.search(headers.get(b"host", b""))
    return COOKIE if port is None else f"{COOKIE}_{port[1].decode()}"


def _secrets(headers: Mapping[bytes, bytes]) -> list[str]:
    """Ours among the cookies, whatever the others look like."""
    ours = cookie_name(headers)
    pairs = (pair.partition("=") for pair in headers.get(b"cookie", b"").decode("latin-1").split(";"))
    return [value.strip() for name, _, value in pairs if name.strip() == ours][:_COOKIES_MAX]


def check_same_origin(headers: Mapping[bytes, bytes]) -> None:
    """Refuses a form that a page of another site has sent. A client that names no origin is not a browser."""
    origin = headers.get(b"origin")
    if origin is not None:
        same = _is_host(origin, headers.get(b"host", b""))
    else:
        same = headers.get(b"sec-fetch-site", b"same-origin") in (b"same-origin", b"none")
    if not same:
        raise Refusal(403, "this form was sent by a page of another site: open /sign-in of this server and use its own")


def secure_origin(headers: Mapping[bytes, bytes]) -> bool:
    """Whether the browser speaks TLS, to this server or to a proxy in front of it."""
    return headers.get(b"origin", b"").startswith(b"https://")


def _is_host(origin: bytes, host: bytes) -> bool:
    """Schemes are not compared: a proxy in front of this server may speak TLS where it does not."""
    try:
        parts = urlsplit(origin.decode("ascii"))
        port = parts.port
        called = urlsplit(f"{parts.scheme}://{host.decode('ascii')}")
        called_port = called.port
    except ValueError:  # UnicodeDecodeError is one
        return False
    default = _DEFAULT_PORTS.get(parts.scheme)
    return (
        default is not None
        and parts.hostname is not None
        and (parts.hostname, port or default) == (called.hostname, called_port or default)
    )
