"""The logins of the dashboard: kept in this server's memory, and found by a random cookie.

A login stands for the token with which it was opened, but with fewer rights: any page can make a browser send the
cookie, so a request with only the cookie may read, but never change anything. A restart ends every login.

Must never write a token or a cookie into a log, nor compare one character by character.
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
"""The most logins per token: repeated sign-ins end older logins of the same token only."""
_COOKIES_MAX = 4
_DEFAULT_PORTS = {"http": 80, "https": 443}
_PORT = re.compile(rb":([0-9]{1,5})\Z")
_ENDED = float("-inf")


@dataclass(slots=True, eq=False)
class Login:
    """A login, valid until `ends_at` on the monotonic clock, and only while its token belongs to the same caller."""

    caller: Caller
    authorization: bytes
    """The Authorization header with the same token, for the lock API, which has no logins."""
    ends_at: float
    tokens: Tokens

    @property
    def over(self) -> bool:
        if self.tokens.known(self.authorization) != self.caller:
            self.ends_at = _ENDED  # permanently, even if the token is added again
        return time.monotonic() >= self.ends_at


class Logins:
    """All logins of a server: at most `LOGINS_MAX`, of which the oldest is dropped first."""

    def __init__(self) -> None:
        # Logins are found by a keyed hash, so the time of a search reveals nothing about a cookie.
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
        """The valid login of an HTTP request, if it has one."""
        for secret in _secrets(headers):
            login = self._logins.get(self._hash(secret))
            if login is not None and not login.over:
                return login
        return None

    def close(self, headers: Mapping[bytes, bytes]) -> None:
        for secret in _secrets(headers):
            self._end(self._hash(secret))

    def _end(self, key: bytes) -> None:
        """End a login, and with it its open streams."""
        login = self._logins.pop(key, None)
        if login is not None:
            login.ends_at = _ENDED

    def _hash(self, secret: str) -> bytes:
        return hmac.digest(self._key, hashlib.sha256(secret.encode()).digest(), "sha256")


def cookie_name(headers: Mapping[bytes, bytes]) -> str:
    """The cookie's name contains the port: browsers share cookies between the ports of a host, each with its own
    server."""
    port = _PORT.search(headers.get(b"host", b""))
    return COOKIE if port is None else f"{COOKIE}_{port[1].decode()}"


def _secrets(headers: Mapping[bytes, bytes]) -> list[str]:
    """The values of our cookie. Other cookies are ignored, even malformed ones."""
    ours = cookie_name(headers)
    pairs = (pair.partition("=") for pair in headers.get(b"cookie", b"").decode("latin-1").split(";"))
    return [value.strip() for name, _, value in pairs if name.strip() == ours][:_COOKIES_MAX]


def check_same_origin(headers: Mapping[bytes, bytes]) -> None:
    """Refuses a form from a page of another site. A client that sends no Origin header is not a browser."""
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
    """Does this origin have this host? The scheme is not compared, because a proxy in front may add TLS."""
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
