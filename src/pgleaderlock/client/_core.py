"""What both clients share: the constructor, the checked settings, the servers, and the steps that a flow yields.

Must never wait or speak to a server.
"""

import abc
import itertools
import math
import os
import random
import re
import socket
import ssl
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from pgleaderlock._base.clock import BOOT_CLOCK, Clock
from pgleaderlock.client._http1 import HttpRequest
from pgleaderlock.errors import ConfigurationError, LockServerError
from pgleaderlock.retry import JITTER

__all__ = [
    "BaseClient",
    "ClientClosed",
    "Core",
    "Endpoint",
    "NoAnswer",
    "Pause",
    "RetryDelays",
    "Send",
    "positive_s",
    "whole_number",
]

DEFAULT_PORT = {"http": 80, "https": 443}
_VISIBLE = re.compile(r"[\x21-\x7e]+")
ENDPOINTS_MAX = 32


class BaseClient(abc.ABC):
    """The base of `AsyncLockClient` and `LockClient`: constructor and owner id."""

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        token: str | None = None,
        owner_id: str | None = None,
        connect_timeout_s: float = 2.0,
        request_timeout_s: float = 5.0,
        connections_max: int = 64,
        retry_delay_s_min: float = 0.0,
        retry_delay_s_max: float = 60.0,
        retry_jitter: float = 0.5,
        ssl_context: ssl.SSLContext | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Check the settings. Nothing is sent before the first call.

        Args:
            urls: One address of a server or 1 to 32, as `http://host:port` or `https://host:port`. The client uses one
                until that fails, and then the next.
            token: The bearer token. Default: None, for a server without tokens.
            owner_id: The name under which the server shows the holder of a lease. Default: host, pid and a random part.
            connect_timeout_s: The longest time for a connect, in seconds. Default: 2.
            request_timeout_s: The longest time for a response, in seconds, on top of the time that an acquire waits at
                the server. Default: 5.
            connections_max: The most connections at a time, 3 or more. Two of them are never used by a waiting acquire.
                Default: 64.
            retry_delay_s_min: The shortest delay between two tries of `acquire_with_retry`, in seconds, whatever the
                server recommends. Default: 0.
            retry_delay_s_max: The longest one, before the jitter. Default: 60.
            retry_jitter: The share by which each delay is extended at random, at most. Default: 0.5.
            ssl_context: For https. Default: None, for the certificates that the system trusts.
            clock: For tests. Default: None, for the boot-time clock of this machine.

        Raises:
            ConfigurationError: A setting cannot be used.
        """
        self._core = Core(
            urls,
            token=token,
            owner_id=owner_id,
            connect_timeout_s=connect_timeout_s,
            request_timeout_s=request_timeout_s,
            connections_max=connections_max,
            retries=RetryDelays(retry_delay_s_min, retry_delay_s_max, retry_jitter),
            ssl_context=ssl_context,
            clock=clock,
        )
        self._open()

    @abc.abstractmethod
    def _open(self) -> None:
        """Create the parts that do I/O: connections, heartbeat, background work."""

    @property
    def owner_id(self) -> str:
        """The name under which the server shows this client; by default host, pid and a random part."""
        return self._core.owner_id


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One address of a server, and the headers that every request to it carries."""

    host: str
    port: int
    tls: bool
    headers: bytes = field(repr=False)
    """Complete header lines. They contain the token: never show them."""

    def __str__(self) -> str:
        shown = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{shown}:{self.port}"


class ClientClosed(LockServerError):
    """The client is closed: no server was asked, and none will be."""

    def __init__(self) -> None:
        super().__init__("this client is closed: make a new one")


class NoAnswer(Exception):
    """There was no response, or nothing could be sent. `stale`: the server had closed a kept-alive connection."""

    def __init__(self, message: str, *, stale: bool = False) -> None:
        super().__init__(message)
        self.stale = stale


@dataclass(slots=True, eq=False)
class Send:
    """A step of a flow: the client sends this request, and passes the response to the flow or throws `NoAnswer` into
    it."""

    request: HttpRequest
    endpoint: Endpoint
    timeout_s: float
    """The time for the response, from the send on."""
    waits: bool = False
    """The server may wait before it answers, so the request must not use the last connections."""
    fresh: bool = False
    """Use a new connection. The server accepts connections in order, so it reads this request after all that were sent
    before. On a kept-alive connection, it could overtake a request whose connection has not been accepted yet."""
    sent_at: float | None = None
    """Set by the transport just before it sends the first byte. None: nothing has been sent."""


@dataclass(frozen=True, slots=True)
class Pause:
    """A step of a flow: the client waits for this time."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class RetryDelays:
    """The bounds of a client's retry delays."""

    delay_s_min: float = 0.0
    delay_s_max: float = 60.0
    jitter: float = 0.5

    def __post_init__(self) -> None:
        for what, value in (
            ("retry_delay_s_min", self.delay_s_min),
            ("retry_delay_s_max", self.delay_s_max),
            ("retry_jitter", self.jitter),
        ):
            _check_not_negative(what, value)
        if self.delay_s_min > self.delay_s_max:
            raise ConfigurationError(
                f"retry_delay_s_min={self.delay_s_min} is longer than retry_delay_s_max={self.delay_s_max}: lower one "
                "or raise the other"
            )

    def delay_s(self, wanted_s: float, rng: random.Random) -> float:
        return min(max(wanted_s, self.delay_s_min), self.delay_s_max) * rng.uniform(1.0, 1.0 + self.jitter)


class Core:
    """The checked settings of a client, and the server that it asks next."""

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        token: str | None,
        owner_id: str | None,
        connect_timeout_s: float,
        request_timeout_s: float,
        connections_max: int,
        retries: "RetryDelays",
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
        # At least one for an acquire that waits, besides the two for renewals and releases.
        self.connections_max = whole_number("connections_max", connections_max, least=3)
        self.retries = retries
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
        self._store: dict[str, bytes] = {}
        self.refused: set[Endpoint] = set()
        """The servers that turned out to have another store."""

    @property
    def endpoint(self) -> Endpoint:
        """The server to ask: the last one that answered."""
        return self.endpoints[self._turn % len(self.endpoints)]

    def failed(self, endpoint: Endpoint) -> None:
        """This server has failed: use the next one from now on, unless another request has switched already."""
        if self.endpoint is endpoint:
            self._turn += 1

    @property
    def store(self) -> bytes | None:
        """The id of the store that has our leases: that of the first server that answered. None: not known yet."""
        return self._store.get("first")

    def is_our_store(self, store: bytes | None) -> bool:
        """Is this the store that has our leases? A server that does not send its store id is trusted to have it."""
        return store is None or self._store.setdefault("first", store) == store  # atomic, for threads

    def unique(self) -> str:
        """A key that is never used again. It contains the pid, because a forked child has a copy of the counter."""
        return f"{self._instance}-{os.getpid()}-{next(self._numbers)}"


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
        if not _VISIBLE.fullmatch(url):  # urlsplit silently drops line feeds
            raise ValueError(url)
        parts = urlsplit(url)
        port = parts.port
    except (AttributeError, ValueError):
        raise ConfigurationError("a server's URL cannot be read: give http://host:port or https://host:port") from None
    if parts.scheme not in DEFAULT_PORT or not parts.hostname or not _VISIBLE.fullmatch(parts.hostname):
        raise ConfigurationError("a server's URL looks like http://host:port or https://host:port")
    if parts.username is not None or parts.path not in {"", "/"} or parts.query or parts.fragment:
        # The message does not repeat the URL: it may contain a password.
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


def _check_not_negative(what: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ConfigurationError(f"{what} is {value!r}: give a number, 0 or more")


def whole_number(what: str, value: object, *, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{what} is {value!r}: give a whole number, {least} or more")
    return value
