"""The heads of requests that have come before: a client sends the same one again and again, and to take it apart anew
is a fifth of what an acquire costs beside its disk.

Only what differs from request to request is read here: a plain path, and the idempotency key. All other lines must be
those of a request that the parser has read, to the letter; then they mean what they meant to it, and are followed by as
many bytes as they were then.

Imports `exchange`. Must never make anything of a line that the parser has not seen, but for those two.
"""

import re
from typing import TYPE_CHECKING

from pgleaderlock._http.exchange import Exchange

if TYPE_CHECKING:
    from pgleaderlock._http.answers import Header
    from pgleaderlock._http.http1 import Connection

__all__ = ["KnownHeads"]

KNOWN_MAX = 64
LINES_BYTES_MAX = 1024
LINES_MAX = 32

_FIRST_LINE = re.compile(rb"POST (/[0-9A-Za-z._~%/-]{0,1000}) HTTP/1\.1(?=\r\n)")
_KEY_NAME = b"idempotency-key"
# A line that begins with a blank would belong to the value.
_KEY_LINE = re.compile(rb"\r\n[Ii]dempotency-[Kk]ey: ([!-~]{1,200})(?=\r\n[^ \t])")


class KnownHeads:
    """Those of all connections."""

    def __init__(self, header_bytes_max: int) -> None:
        self._header_bytes_max = header_bytes_max
        self._known: dict[bytes, tuple[tuple[Header, ...], int]] = {}
        """Lines: what they mean, and how many bytes of a body follow."""

    def learn(self, data: bytes, exchange: Exchange) -> None:
        """`data` came when nothing was under way, and what the parser has made of it is this request, as a whole."""
        first = _FIRST_LINE.match(data)
        if first is None or not exchange.keep_alive:
            return
        lines, body_at, key = _lines_of(data, first.end())
        # Else there is more than this one request, or its body is framed in another way than by its length.
        if len(data) != body_at + len(exchange.body) or len(lines) > LINES_BYTES_MAX:
            return
        headers = tuple(header for header in exchange.headers if header[0] != _KEY_NAME)
        if len(exchange.headers) - len(headers) != (key is not None) or len(headers) > LINES_MAX:
            return  # the key is written in another way, or more than once; or there are many lines
        if len(self._known) >= KNOWN_MAX:
            self._known.clear()
        self._known[lines] = headers, len(exchange.body)

    def recall(self, data: bytes, connection: "Connection") -> Exchange | None:
        """The request that is the whole of `data`, if its lines are known."""
        first = _FIRST_LINE.match(data)
        if first is None:
            return None
        lines, body_at, key = _lines_of(data, first.end())
        known = self._known.get(lines)
        if known is None or len(data) != body_at + known[1] or body_at > self._header_bytes_max:
            return None
        headers = [*known[0]] if key is None else [*known[0], (_KEY_NAME, key)]
        return Exchange(connection, b"POST", first[1], "1.1", headers, body=data[body_at:])


def _lines_of(data: bytes, begin: int) -> tuple[bytes, int, bytes | None]:
    """The lines from there on without the key, where the body begins, and the key."""
    body_at = data.find(b"\r\n\r\n", begin) + 4
    lines = data[begin:body_at]
    line = _KEY_LINE.search(lines)
    if line is None:
        return lines, body_at, None
    return lines[: line.start()] + lines[line.end() :], body_at, line[1]
