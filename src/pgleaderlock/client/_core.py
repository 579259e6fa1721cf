"""What both clients share: settings, servers, numbers that are used once; and the steps that a flow asks for.

Imports `_http1`, `errors`, `_clock`, `_jitter` and the standard library. Must never wait or speak to a server.
"""

import itertools
import math
import os
import re
import socket
import ssl
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from pgleaderlock._clock import BOOT_CLOCK, Clock
from pgleaderlock._jitter import JITTER
from pgleaderlock.client._http1 import Request
from pgleaderlock.errors import ConfigurationError, LockServerError

__all__ = ["ClientClosed", "Core", "Endpoint", "NoAnswer", "Pause", "Send", "positive_s", "whole_number"]

DEFAULT_PORT = {"http": 80, "https": 443}
_VISIBLE = re.compile(r"[\x21-\x7e]+")
ENDPOINTS_MAX = 32


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One address of a server, and the headers that every request to it carries."""

    host: str
    port: int
    tls: bool
    headers: bytes = field(repr=False)
    """Whole lines, among them the token: never shown."""

    def __str__(self) -> str:
        shown = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{shown}:{self.port}"


class ClientClosed(LockServerError):
    """Nobody was asked, and nobody will be."""

    def __init__(self) -> None:
        super().__init__("this client is closed: make a new one")


class NoAnswer(Exception):
    """No reply to what was sent, or nothing could be sent. `stale`: a kept connection turned out to be closed."""

    def __init__(self, message: str, *, stale: bool = False) -> None:
        super().__init__(message)
        self.stale = stale


@dataclass(slots=True, eq=False)
class Send:
    """A step of a flow: send this, and come back with the reply, or throw `NoAnswer` into the flow."""

    request: Request
    endpoint: Endpoint
    timeout_s: float
    """For the reply, from the send."""
    waits: bool = False
    """The server may take its time: this must not use up the last connections."""
    fresh: bool = False
    """Over a new connection: a server takes those in the order in which they came, so this comes after whatever was
    sent before. On one that was kept it might overtake a request whose connection has not been accepted yet."""
    sent_at: float | None = None
    """Set by the transport just before the first byte goes out. None: nothing has been sent."""


@dataclass(frozen=True, slots=True)
class Pause:
    """A step of a flow: come back after this long."""

    delay_s: float


def _checked_token(token: str | None) -> str | None:
    if token is None:
        return None
    token = token.strip()
    if not _VISIBLE.fullmatch(token):
        raise ConfigurationError("the token must be one word of visible ASCII characters")
    return token


def _endpoint(url: str, token: str | None) -> Endpoint:
    try:
        url = url.strip()
        if not _VISIBLE.fullmatch(url):  # urlsplit drops line feeds without a word
            raise ValueError(url)
        parts = urlsplit(url)
        port = parts.port
    except (AttributeError, ValueError):
        raise ConfigurationError("a server's URL cannot be read: give http://host:port or https://host:port") from None
    if parts.scheme not in DEFAULT_PORT or not parts.hostname or not _VISIBLE.fullmatch(parts.hostname):
        raise ConfigurationError("a server's URL looks like http://host:port or https://host:port")
    if parts.username is not None or parts.path not in {"", "/"} or parts.query or parts.fragment:
        # Not repeated: it may hold a password.
        raise ConfigurationError(
            "a server's URL is scheme, host and port only, as in http://host:7420: no path, no query, no password"
        )
    if port == 0:
        raise ConfigurationError("a server's URL needs its real port, not 0")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    shown = host if port is None else f"{host}:{port}"
    headers = f"Host: {shown}\r\nUser-Agent: pgleaderlock\r\n"
    if token is not None:
        headers += f"Authorization: Bearer {token}\r\n"
    return Endpoint(
        parts.hostname, port or DEFAULT_PORT[parts.scheme], parts.scheme == "https", headers.encode("ascii")
    )


def positive_s(what: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ConfigurationError(f"{what} is {value!r}: give seconds above 0")
    return float(value)


def whole_number(what: str, value: object, *, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{what} is {value!r}: give a whole number, {least} or more")
    return value


class Core:
    """The settings of a client, checked; and which server is asked next."""

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        token: str | None,
        owner_id: str | None,
        connect_timeout_s: float,
        request_timeout_s: float,
        connections_max: int,
        ssl_context: ssl.SSLContext | None,
        clock: Clock | None,
    ) -> None:
        given = [urls] if isinstance(urls, str) else list(urls)
        if not 1 <= len(given) <= ENDPOINTS_MAX:
            raise ConfigurationError(f"give 1 to {ENDPOINTS_MAX} server URLs, not {len(given)}")
        token = _checked_token(token)
        self.endpoints = tuple(_endpoint(url, token) for url in given)
        self.connect_timeout_s = positive_s("connect_timeout_s", connect_timeout_s)
        self.request_timeout_s = positive_s("request_timeout_s", request_timeout_s)
        # One may wait for a lock while others renew and release.
        self.connections_max = whole_number("connections_max", connections_max, least=3)
        self.ssl_context = ssl_context
        if ssl_context is None and any(endpoint.tls for endpoint in self.endpoints):
            self.ssl_context = ssl.create_default_context()
        self.clock = BOOT_CLOCK if clock is None else clock
        self.random = JITTER
        self._instance = uuid.uuid4().hex
        if owner_id is not None and not isinstance(owner_id, str):
            raise ConfigurationError(f"owner_id is {owner_id!r}: give text")
        self.owner_id = owner_id or f"{socket.gethostname()}-{os.getpid()}-{self._instance[:8]}"
        self._numbers = itertools.count(1)
        self._turn = 0

    @property
    def endpoint(self) -> Endpoint:
        """The server to ask: the last one that answered."""
        return self.endpoints[self._turn % len(self.endpoints)]

    def failed(self, endpoint: Endpoint) -> None:
        """From now on the next one is asked, unless somebody else has found out already."""
        if self.endpoint is endpoint:
            self._turn += 1

    def unique(self) -> str:
        """Used once, by one process: a forked child has our counter, but not our pid."""
        return f"{self._instance}-{os.getpid()}-{next(self._numbers)}"
