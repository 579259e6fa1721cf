"""Who has signed in: sessions in this server's memory, found by a cookie that says nothing by itself.

A session stands for the token that it was opened with, and may do less: a browser sends the cookie along whatever page
has asked it to, so with it alone one can look, and never change anything. A restart ends every session.

Imports `_http` and the standard library. Must never write a token or a cookie into a log, nor compare one letter by
letter.
"""

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from pgleaderlock._http.answers import Refusal
from pgleaderlock._http.tokens import Caller, Tokens

__all__ = ["Session", "Sessions", "check_same_origin", "cookie_name", "secure_origin"]

COOKIE = "pgleaderlock_session"
LASTS_S = 12 * 3600.0
SESSIONS_MAX = 1_000
SESSIONS_EACH_MAX = 50
"""Of one token: whoever signs in again and again ends its own sessions, and nobody else's."""
_COOKIES_MAX = 4
_DEFAULT_PORTS = {"http": 80, "https": 443}
_PORT = re.compile(rb":([0-9]{1,5})\Z")


@dataclass(slots=True, eq=False)
class Session:
    """Lasts until `ends_at`, on the monotonic clock, and no longer than its token is that caller's."""

    caller: Caller
    authorization: bytes
    """The header that would have said the same: the lock API knows nothing of sessions."""
    ends_at: float
    tokens: Tokens

    @property
    def over(self) -> bool:
        if self.tokens.known(self.authorization) != self.caller:
            self.ends_at = float("-inf")  # for good, should the token come back
        return time.monotonic() >= self.ends_at


class Sessions:
    """All sessions of a server: at most `SESSIONS_MAX`, the oldest goes first."""

    def __init__(self) -> None:
        # Kept by a keyed hash: how long a search takes says nothing about any cookie.
        self._key = secrets.token_bytes(32)
        self._sessions: dict[bytes, Session] = {}

    def open(self, caller: Caller, authorization: bytes, tokens: Tokens) -> str:
        """A new session; what it gives is for the cookie."""
        for old in [key for key, session in self._sessions.items() if session.over]:
            del self._sessions[old]
        own = [key for key, session in self._sessions.items() if session.caller == caller]
        for key in own[: max(0, len(own) - SESSIONS_EACH_MAX + 1)]:
            self._sessions.pop(key).ends_at = float("-inf")
        while len(self._sessions) >= SESSIONS_MAX:
            self._sessions.pop(next(iter(self._sessions))).ends_at = float("-inf")
        secret = secrets.token_urlsafe(32)
        self._sessions[self._hash(secret)] = Session(caller, authorization, time.monotonic() + LASTS_S, tokens)
        return secret

    def find(self, headers: Mapping[bytes, bytes]) -> Session | None:
        """The session of a request, if it has one that still lasts."""
        for secret in _secrets(headers):
            session = self._sessions.get(self._hash(secret))
            if session is not None and not session.over:
                return session
        return None

    def close(self, headers: Mapping[bytes, bytes]) -> None:
        """Ends it, for whoever still holds it, too: an open stream."""
        for secret in _secrets(headers):
            session = self._sessions.pop(self._hash(secret), None)
            if session is not None:
                session.ends_at = float("-inf")

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
    """Refuses a form that another site's page has sent. Browsers say where it comes from; who says nothing is none."""
    origin = headers.get(b"origin")
    if origin is not None:
        same = _is_host(origin, headers.get(b"host", b""))
    else:
        same = headers.get(b"sec-fetch-site", b"same-origin") in (b"same-origin", b"none")
    if not same:
        raise Refusal(403, "this form was sent by a page of another site: open /sign-in of this server and use its own")


def secure_origin(headers: Mapping[bytes, bytes]) -> bool:
    """Whether the browser speaks TLS, be it to us or to a proxy in front."""
    return headers.get(b"origin", b"").startswith(b"https://")


def _is_host(origin: bytes, host: bytes) -> bool:
    """Schemes are not compared: a proxy in front of us may speak TLS where we do not."""
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
