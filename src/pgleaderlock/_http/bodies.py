"""Reading what a client sends, and waiting for it, within limits: of size, of time, and until the server stops.

A graceful stop waits for every request that has begun, so a client that sends half a body would hold it up for ever.
Whoever waits for a client does it through `Waits`: it interrupts those that are late, and all of them at a stop.
One table and a sweep instead of a timer for each request: a timer costs more than the rest of reading a small body.

Imports `answers`. Must never keep more of a body than the limit.
"""

import asyncio
import time
from collections.abc import Mapping

from pgleaderlock._http.answers import Receive, Refusal

__all__ = ["ClientGone", "Waits", "check_json", "read_body", "stopping"]

_SWEEP_INTERVAL_S = 0.5
_JSON_TYPE = b"application/json"
# A client that is still sending when the connection is closed never sees the answer: what is a little too long is read
# to its end and thrown away, so that it does.
_DISCARDED_BYTES_MAX = 8 * 1024 * 1024
_LATE = "late"
_STOPPING = "stopping"


class ClientGone(Exception):
    """The connection has ended: there is nobody to answer."""


class Waits:
    """The tasks that wait for their clients, each until a deadline on the monotonic clock."""

    def __init__(self, body_timeout_s: float) -> None:
        self.body_timeout_s = body_timeout_s
        self.stopping = False
        self._deadlines: dict[asyncio.Task[object], float] = {}
        self._interrupted: dict[asyncio.Task[object], str] = {}

    def begin(self, task: "asyncio.Task[object]") -> None:
        if self.stopping:
            raise stopping()
        self._deadlines[task] = time.monotonic() + self.body_timeout_s

    def end(self, task: "asyncio.Task[object]") -> str | None:
        """Ends the wait; says why it was interrupted, if it was."""
        self._deadlines.pop(task, None)
        return self._interrupted.pop(task, None)

    def stop(self) -> None:
        """Interrupts everyone, and lets nobody begin."""
        self.stopping = True
        self._interrupt(list(self._deadlines), _STOPPING)

    async def run(self) -> None:
        """Interrupts those that are late, until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_INTERVAL_S)
            now = time.monotonic()
            self._interrupt([task for task, deadline in self._deadlines.items() if deadline <= now], _LATE)

    def _interrupt(self, tasks: "list[asyncio.Task[object]]", why: str) -> None:
        for task in tasks:
            del self._deadlines[task]
            self._interrupted[task] = why
            task.cancel()


def check_json(headers: Mapping[bytes, bytes], body_bytes_max: int) -> None:
    """Refuses what no browser page may send without being asked, and what is too long by its own account."""
    content_type = headers.get(b"content-type", b"")
    if content_type != _JSON_TYPE and content_type.partition(b";")[0].strip().lower() != _JSON_TYPE:
        raise Refusal(415, "the body must be JSON: send the header Content-Type: application/json")
    length = headers.get(b"content-length")
    if length is not None and (len(length) > 12 or not length.isdigit() or int(length) > _DISCARDED_BYTES_MAX):
        raise _too_long(body_bytes_max)


async def read_body(receive: Receive, waits: Waits, body_bytes_max: int) -> bytes:
    """The whole body. Raises `Refusal` (408, 413, 503) or `ClientGone`."""
    task = asyncio.current_task()
    assert task is not None
    waits.begin(task)
    try:
        message = await receive()
        body: bytes = message.get("body", b"")
        seen_bytes = len(body)
        if message.get("more_body", False):
            collected = bytearray(body)
            while message.get("more_body", False) and seen_bytes <= _DISCARDED_BYTES_MAX:
                message = await receive()
                part: bytes = message.get("body", b"")
                seen_bytes += len(part)
                if seen_bytes <= body_bytes_max:
                    collected += part
            body = bytes(collected)
    except asyncio.CancelledError:
        why = waits.end(task)
        if why is None:
            raise
        task.uncancel()
        raise (stopping() if why == _STOPPING else _too_slow(waits.body_timeout_s)) from None
    finally:
        waits.end(task)
    if message["type"] == "http.disconnect":
        raise ClientGone
    if seen_bytes > body_bytes_max:
        raise _too_long(body_bytes_max)
    return body


def stopping() -> Refusal:
    """For whoever cannot be served any more."""
    return Refusal(503, "the server is stopping: try again in a moment, or another server", (b"retry-after", b"1"))


def _too_long(body_bytes_max: int) -> Refusal:
    return Refusal(413, f"the body is longer than {body_bytes_max} bytes", (b"connection", b"close"))


def _too_slow(timeout_s: float) -> Refusal:
    return Refusal(408, f"the body did not arrive within {timeout_s:g} s", (b"connection", b"close"))
