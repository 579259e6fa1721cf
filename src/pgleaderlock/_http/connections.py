"""All connections of a server: what they share, which of them are late, and the end of all.

Imports `heads`, `exchange`, `answers` and the standard library. Must never read or write a byte: a connection does.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from email.utils import formatdate
from typing import TYPE_CHECKING

from pgleaderlock._http.answers import Receive, Scope, Send
from pgleaderlock._http.exchange import Exchange
from pgleaderlock._http.heads import KnownHeads

if TYPE_CHECKING:
    from pgleaderlock._http.http1 import Connection

__all__ = ["App", "AtOnce", "Connections"]

App = Callable[[Scope, Receive, Send], Awaitable[None]]
AtOnce = Callable[[Exchange], bool]
"""Takes a request that has come as a whole, and answers it by `Exchange.answer`, now or later, without a task of its
own. False leaves it to the application."""


class Connections:
    """All connections of a server, and what they share."""

    def __init__(
        self,
        app: App,
        *,
        header_timeout_s: float,
        header_bytes_max: int,
        scheme: str,
        at_once: AtOnce | None = None,
    ) -> None:
        self.app = app
        self.at_once = at_once
        self.header_timeout_s = header_timeout_s
        self.header_bytes_max = header_bytes_max
        self.scheme = scheme
        self.loop = asyncio.get_running_loop()
        self.open: set[Connection] = set()
        self.heads = KnownHeads(header_bytes_max)
        self.stopping = False
        self.fewer = asyncio.Event()
        """Set whenever a connection has ended."""
        self._date_s = 0
        self._date = b""

    def sweep(self) -> None:
        """Ends those that are late: with a header, with reading their answer, or with leaving after the last one."""
        now = self.loop.time()
        for connection in [each for each in self.open if each.deadline <= now]:
            connection.abort()

    def stop(self) -> None:
        """What has begun is answered, and then its connection is closed; the others are closed now."""
        self.stopping = True
        for connection in list(self.open):
            connection.close_if_idle()

    def abort(self) -> None:
        for connection in list(self.open):
            connection.abort()

    def date(self) -> bytes:
        now_s = int(time.time())
        if now_s != self._date_s:
            self._date_s, self._date = now_s, b"date: %s\r\n" % formatdate(now_s, usegmt=True).encode()
        return self._date
