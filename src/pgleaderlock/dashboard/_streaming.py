"""One open stream over HTTP: written until it ends, its reader leaves, or its session is over.

Whoever waits for a reader here is interrupted when the server stops: a reader that does not read holds nothing up.

Imports `feed`, `sessions` and `_http`'s types. Must never write more at once than a slow reader may cost.
"""

import asyncio

from pgleaderlock._http.answers import Receive, Send
from pgleaderlock.dashboard._subscription import Subscription
from pgleaderlock.dashboard.feed import Feed
from pgleaderlock.dashboard.sessions import Session

__all__ = ["STREAM", "stream"]

STREAM = b"text/event-stream"
PING_S = 5.0
PIECE_BYTES = 64 * 1024

_HEADERS = [
    (b"content-type", STREAM),
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-accel-buffering", b"no"),  # a proxy that collects before it passes on would make a stream of nothing
]


async def stream(feed: Feed, told: Subscription, session: Session | None, receive: Receive, send: Send) -> None:
    writing = asyncio.ensure_future(_write(send, told, session))
    leaving = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({writing, leaving, told.cut}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        feed.unsubscribe(told)
        for task in (writing, leaving):
            task.cancel()
        await asyncio.wait({writing, leaving})


async def _write(send: Send, told: Subscription, session: Session | None) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
    chunk = b"retry: 1000\n\n"
    while session is None or not session.over:
        for start in range(0, len(chunk), PIECE_BYTES):
            piece = chunk[start : start + PIECE_BYTES]
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        if told.ending and told.empty:
            break
        chunk = await told.next(PING_S) or b": ping\n\n"
    await send({"type": "http.response.body", "body": b""})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
