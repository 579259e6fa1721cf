"""How a request is answered: JSON, with the same few headers on every answer, and `{"error": …}` for every refusal.

A check that fails raises `Refusal`; one place turns it into an answer. Start messages are built once and sent again and
again: they are a part of the cost of every request.

Imports msgspec. Must never put text of a request into a header unchecked, nor an exception's text into an answer.
"""

import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

__all__ = [
    "Answer",
    "ErrorReply",
    "Message",
    "Receive",
    "Refusal",
    "Scope",
    "Send",
    "answer_of",
    "echoed_request_id",
    "send_answer",
    "start_of",
]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Header = tuple[bytes, bytes]

_JSON = b"application/json"
# What is asked twice must be answered twice: the state of a lock is old when it has been stored somewhere.
_ON_EVERY_ANSWER: tuple[Header, ...] = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))

# Letters that mean nothing to a log reader, a terminal or a header parser.
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._~:/+=@-]{1,128}")


class ErrorReply(msgspec.Struct, frozen=True):
    """The body of every refusal: one sentence that says what is wrong and, where it is known, what to do."""

    error: str


class Refusal(Exception):
    """This request is not carried out. `error` is for the caller to read."""

    def __init__(self, status: int, error: str, *headers: Header) -> None:
        super().__init__(error)
        self.status = status
        self.error = error
        self.headers = headers


class Answer(msgspec.Struct, frozen=True, gc=False):
    """A complete answer. `headers` come on top of those that every answer has."""

    status: int
    body: bytes
    headers: tuple[Header, ...] = ()
    content_type: bytes = _JSON


def answer_of(refusal: Refusal) -> Answer:
    return Answer(refusal.status, msgspec.json.encode(ErrorReply(refusal.error)), refusal.headers)


def echoed_request_id(given: bytes | None) -> bytes | None:
    """The caller's X-Request-ID if it may be repeated in a header and a log line; otherwise it is left out."""
    return given if given is not None and _REQUEST_ID.fullmatch(given) else None


def _start(status: int, *more: Header, content_type: bytes = _JSON) -> dict[str, Any]:
    headers = [(b"content-type", content_type), *_ON_EVERY_ANSWER, *more]
    return {"type": "http.response.start", "status": status, "headers": headers}


_PLAIN_STARTS = {status: _start(status) for status in (200, 409)}


def start_of(answer: Answer, request_id: bytes | None = None) -> Message:
    """The message that begins an answer."""
    start = _PLAIN_STARTS.get(answer.status)
    if request_id is not None or start is None or answer.headers or answer.content_type is not _JSON:
        more = answer.headers if request_id is None else (*answer.headers, (b"x-request-id", request_id))
        start = _start(answer.status, *more, content_type=answer.content_type)
    return start


async def send_answer(send: Send, answer: Answer, request_id: bytes | None) -> None:
    await send(start_of(answer, request_id))
    await send({"type": "http.response.body", "body": answer.body})
