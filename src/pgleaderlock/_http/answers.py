"""Responses: JSON with a few common headers, and `{"error": …}` for every refusal.

A check that fails raises `Refusal`; one place turns it into an answer.

Must never put text of a request into a header unchecked, nor an exception's text into an answer.
"""

import functools
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

import msgspec

__all__ = [
    "Answer",
    "ErrorReply",
    "Header",
    "Message",
    "Receive",
    "Refusal",
    "Scope",
    "Send",
    "answer_of",
    "defect",
    "echoed_request_id",
    "header_lines",
    "send_answer",
    "start_of",
]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Header = tuple[bytes, bytes]

_JSON = b"application/json"
# No cache may answer for the server: a stored state of a lock would be out of date.
_ON_EVERY_ANSWER: tuple[Header, ...] = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))

# Only characters without a special meaning in logs, terminals and headers.
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._~:/+=@-]{1,128}")


class ErrorReply(msgspec.Struct, frozen=True):
    """The body of every refusal: one sentence that says what is wrong and, where it is known, what to do."""

    error: str


class Refusal(Exception):
    """Raised to refuse a request. The client gets `error` as text."""

    def __init__(self, status: int, error: str, *headers: Header) -> None:
        super().__init__(error)
        self.status = status
        self.error = error
        self.headers = headers


class Answer(msgspec.Struct, frozen=True, gc=False):
    """A complete response. `headers` are added to those that every response has."""

    status: int
    body: bytes
    headers: tuple[Header, ...] = ()
    content_type: bytes = _JSON


def answer_of(refusal: Refusal) -> Answer:
    return Answer(refusal.status, msgspec.json.encode(ErrorReply(refusal.error)), refusal.headers)


def defect() -> Refusal:
    """The answer to a bug of the server (503). The details go to the log only."""
    text = "this request failed by a defect of the server: its log says more"
    return Refusal(503, text, (b"retry-after", b"1"))


def echoed_request_id(given: bytes | None) -> bytes | None:
    """The caller's X-Request-ID if it is safe to repeat in a header and a log line; otherwise None."""
    return given if given is not None and _REQUEST_ID.fullmatch(given) else None


def header_lines(headers: Iterable[Header]) -> bytes:
    """The headers as bytes to send. The connection adds its own `Connection` header."""
    return b"".join([b"%s: %s\r\n" % header for header in headers if header[0] != b"connection"])


def start_of(answer: Answer, request_id: bytes | None = None) -> Message:
    """The message that begins an answer."""
    if request_id is None and not answer.headers and answer.content_type is _JSON:
        return _usual_start(answer.status)
    named = () if request_id is None else ((b"x-request-id", request_id),)
    headers = ((b"content-type", answer.content_type), *_ON_EVERY_ANSWER, *answer.headers, *named)
    return {"type": "http.response.start", "status": answer.status, "headers": headers}


@functools.cache
def _usual_start(status: int) -> Message:
    """The start of a common response, cached per status together with its header lines."""
    headers = ((b"content-type", _JSON), *_ON_EVERY_ANSWER)
    lines = header_lines(headers)
    return {"type": "http.response.start", "status": status, "headers": headers, "lines": lines}


async def send_answer(send: Send, answer: Answer, request_id: bytes | None) -> None:
    await send(start_of(answer, request_id))
    await send({"type": "http.response.body", "body": answer.body})
