"""One stream as the feed sees it: what is still to be written to its reader, and a bound for it.

Imports `wire`. Must never wait for a reader, nor keep more for a slow one than `QUEUE_MAX` messages.
"""

import asyncio
import contextlib
from collections import deque

from pgleaderlock.dashboard import wire

__all__ = ["RELOAD", "Subscription", "message"]

QUEUE_MAX = 32


def message(kind: str, data: bytes, number: int | None = None) -> bytes:
    """One message of a stream. JSON of msgspec has no line feed in it."""
    head = b"" if number is None else b"id: %d\n" % number
    return b"%sevent: %s\ndata: %s\n\n" % (head, kind.encode(), data)


RELOAD = message("reload", b"{}")
END = message("end", b"{}")


class Subscription:
    """One stream: what is still to be written, and never more than `QUEUE_MAX` of it."""

    def __init__(self, role: str | None, node: str | None, after: int | None) -> None:
        self.role = role
        self.node = node
        self.after = after
        self.primed = False
        """It has been told how everything is: from then on it is told what changes."""
        self.told: frozenset[int] = frozenset()
        """Events that it was told when it came back."""
        self.ending = False
        self.cut: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when nobody waits for its reader any more."""
        self._queue: deque[bytes] = deque()
        self._grown = asyncio.Event()

    def push(self, chunk: bytes) -> None:
        if len(self._queue) >= QUEUE_MAX:
            self._queue.clear()
            self._queue.append(RELOAD)
        self._queue.append(chunk)
        self._grown.set()

    def end(self) -> None:
        self.ending = True
        self._queue.append(END)
        self._grown.set()

    async def next(self, timeout_s: float) -> bytes:
        """What is to be written next; nothing if there was nothing for so long."""
        if not self._queue:
            self._grown.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._grown.wait()
        return self._queue.popleft() if self._queue else b""

    @property
    def empty(self) -> bool:
        return not self._queue

    def wants(self, event: wire.Event) -> bool:
        return (
            (self.role is None or event.role == self.role)
            and (self.node is None or event.node_id == self.node)
            and event.event_id not in self.told
        )
