"""The JSON of the lock server: its requests and replies, and the checks of each.

The structs define what is valid: requests are decoded into them, replies are encoded from them, and the OpenAPI
document is generated from them. Unknown fields and duplicate fields are refused. An integer may be written as 5713.0,
which is an integer in JSON Schema.

Must never wait, never see a socket, and never run Python code for each element of a body: a hostile body of 2 MiB would
hold the event loop for seconds.
"""

import random
import re
import time
import unicodedata
from typing import Annotated, Any, Literal, Protocol, TypeVar
from urllib.parse import unquote_to_bytes

import msgspec
from msgspec import Meta

from pgleaderlock._http.answers import Refusal
from pgleaderlock.server.store import (
    Acquire,
    Granted,
    Held,
    LockView,
    NotReleased,
    NotRenewed,
    Operation,
    Outcome,
    Release,
    Released,
    Renew,
    Renewed,
)

__all__ = [
    "BATCH_MAX",
    "IDEMPOTENCY_KEY_PATTERN",
    "LIST_LIMIT_DEFAULT",
    "LIST_LIMIT_MAX",
    "NAME_CHARS_MAX",
    "NAME_PATTERN",
    "STORE_HEADER",
    "STRINGS_MAX",
    "WAIT_MS_MAX",
    "AcquireRefused",
    "AcquireReply",
    "AcquireRequest",
    "BatchAcquire",
    "BatchRelease",
    "BatchReply",
    "BatchRequest",
    "BatchResult",
    "BreakReply",
    "BreakRequest",
    "ListReply",
    "LockReply",
    "ReleaseReply",
    "ReleaseRequest",
    "RenewRefused",
    "RenewReply",
    "RenewRequest",
    "Scan",
    "StatusReply",
    "busy_reply",
    "checked_name",
    "decode",
    "decoder",
    "encode",
    "idempotency_key_of",
    "lock_name_of",
    "lock_reply",
    "misleading",
    "operation_of",
    "recommended_retry_ms",
    "reply_of",
]

STORE_HEADER = b"x-lock-store"
"""On every response: the store id of the server. On a request: the store that it is meant for."""
NAME_CHARS_MAX = 200
TTL_MS_MAX = 600_000
WAIT_MS_MAX = 60_000
BATCH_MAX = 500
LIST_LIMIT_MAX = 1_000
LIST_LIMIT_DEFAULT = 100
TOKEN_MAX = 2**63 - 1
STRINGS_MAX = 1 + BATCH_MAX * 10
"""The most strings, field names included, that a body can have: "operations", and ten per renewal."""
OBJECT_BYTES_MAX = 16 * 1024
"""The longest body per object in it. Three names of 200 characters, all escaped, take 7 KiB."""
ERROR_CHARS_MAX = 300
"""How much of the decoder's error text is repeated: it quotes the body, which may be long."""

# No control characters and no line separators. It is published as a regular expression of ECMAScript; in Python, `$`
# would also match before a final line feed.
NAME_PATTERN = r"^[^\u0000-\u001f\u007f-\u009f\u2028\u2029]+$"
IDEMPOTENCY_KEY_PATTERN = r"^[\u0021-\u007e]+$"


def _exact(pattern: str) -> str:
    return pattern.removesuffix("$") + r"\Z"


_NAME = re.compile(_exact(NAME_PATTERN))
_NAME_RULE = f"1 to {NAME_CHARS_MAX} characters, none of them a control character"
_IDEMPOTENCY_KEY = re.compile(rb"[\x21-\x7e]{1,200}")

Name = Annotated[str, Meta(min_length=1, max_length=NAME_CHARS_MAX, pattern=_exact(NAME_PATTERN))]
Ttl = Annotated[int, Meta(ge=1, le=TTL_MS_MAX)]
Wait = Annotated[int, Meta(ge=0, le=WAIT_MS_MAX)]
Token = Annotated[int, Meta(ge=1, le=TOKEN_MAX)]
Key = Annotated[str, Meta(min_length=1, max_length=NAME_CHARS_MAX, pattern=_exact(IDEMPOTENCY_KEY_PATTERN))]

# --- Requests. Each has the number of strings in its JSON: the names of its fields, and its texts.


class AcquireRequest(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """`wait_ms`: how long to wait for the lock, first in, first out. The lease runs from the grant."""

    owner_id: Name
    ttl_ms: Ttl
    wait_ms: Annotated[Wait | msgspec.UnsetType, Meta(extra_json_schema={"default": 0})] = msgspec.UNSET

    @property
    def strings(self) -> int:
        return 3 if self.wait_ms is msgspec.UNSET else 4


class RenewRequest(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """The lease is valid for `extend_by_ms` from the moment of the renewal."""

    owner_id: Name
    lease_id: Name
    fencing_token: Token
    extend_by_ms: Ttl

    @property
    def strings(self) -> int:
        return 6


class ReleaseRequest(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    owner_id: Name
    lease_id: Name
    fencing_token: Token

    @property
    def strings(self) -> int:
        return 5


class BreakRequest(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """An empty object: the lock is in the path, and the token identifies the caller."""

    @property
    def strings(self) -> int:
        return 0


class BatchAcquire(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, tag_field="op", tag="acquire"):
    lock_name: Name
    owner_id: Name
    ttl_ms: Ttl
    idempotency_key: Annotated[Key | msgspec.UnsetType | None, Meta(extra_json_schema={"default": None})] = (
        msgspec.UNSET
    )

    @property
    def strings(self) -> int:
        if self.idempotency_key is msgspec.UNSET:
            return 7
        return 8 if self.idempotency_key is None else 9


class BatchRenew(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, tag_field="op", tag="renew"):
    lock_name: Name
    owner_id: Name
    lease_id: Name
    fencing_token: Token
    extend_by_ms: Ttl

    @property
    def strings(self) -> int:
        return 10


class BatchRelease(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, tag_field="op", tag="release"):
    lock_name: Name
    owner_id: Name
    lease_id: Name
    fencing_token: Token

    @property
    def strings(self) -> int:
        return 9


BatchOperation = BatchAcquire | BatchRenew | BatchRelease


class BatchRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One transaction. An acquire does not wait here."""

    operations: Annotated[list[BatchOperation], Meta(min_length=1, max_length=BATCH_MAX)]

    @property
    def strings(self) -> int:
        return 1 + sum([item.strings for item in self.operations])


# --- Replies


class AcquireReply(msgspec.Struct, frozen=True, gc=False):
    """`ttl_ms`: the duration that was granted. `remaining_ms`: how much of it is left; less than `ttl_ms` if
    `replayed`."""

    acquired: bool
    lock_name: str
    owner_id: str
    lease_id: str
    fencing_token: int
    lease_expiry_ms: int
    ttl_ms: int
    remaining_ms: int
    waited_ms: int
    replayed: bool


class AcquireRefused(msgspec.Struct, frozen=True, gc=False):
    """With BUSY_RETRY the server does not know the owner: `current_owner_id` and `current_expiry_ms` are null."""

    acquired: bool
    lock_name: str
    current_owner_id: str | None
    current_expiry_ms: int | None
    recommended_retry_ms: int
    reason: Literal["HELD", "BUSY_RETRY"]


class RenewReply(msgspec.Struct, frozen=True, gc=False):
    renewed: bool
    lease_expiry_ms: int
    ttl_ms: int
    remaining_ms: int


class RenewRefused(msgspec.Struct, frozen=True, gc=False):
    renewed: bool
    reason: Literal["NOT_OWNER_OR_EXPIRED"]


class ReleaseReply(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """`reason` is present if nothing was released."""

    released: bool
    reason: Literal["NOT_OWNER"] | msgspec.UnsetType = msgspec.UNSET


class LockReply(msgspec.Struct, frozen=True, gc=False):
    """`lease_id` is null unless the caller is an admin."""

    lock_name: str
    held: bool
    owner_id: str | None
    lease_id: str | None
    fencing_token: int
    lease_expiry_ms: int | None
    version: int
    waiters: int


def _wall_ms() -> int:
    return int(time.time() * 1000)


class ListReply(msgspec.Struct, frozen=True):
    """`now_ms`: the server's clock, for clients that show how much time is left."""

    locks: list[LockReply]
    next_cursor: str | None
    now_ms: int = msgspec.field(default_factory=_wall_ms)


class BreakReply(msgspec.Struct, frozen=True):
    """`was`: the lock as it was before."""

    broken: bool
    was: LockReply


class BatchResult(msgspec.Struct, frozen=True):
    """The answer that the single operation would have had."""

    status: int
    body: Any


class BatchReply(msgspec.Struct, frozen=True):
    results: list[BatchResult]


class StatusReply(msgspec.Struct, frozen=True):
    status: str


encode = msgspec.json.Encoder().encode


class _Request(Protocol):
    @property
    def strings(self) -> int: ...


_T = TypeVar("_T")
_R = TypeVar("_R", bound=_Request)
_REGEX_IN_MESSAGE = re.compile(r"matching regex '.*?'(?= - at|$)")


def decoder(of: type[_T]) -> "msgspec.json.Decoder[_T]":
    """A decoder for `decode`. It is not strict, so that msgspec accepts 5713.0 as an integer. That would also accept
    "5713", but `decode` refuses it, because the body then has one string too many."""
    return msgspec.json.Decoder(of, strict=False)


def decode(decoder: "msgspec.json.Decoder[_R]", body: bytes | bytearray, scan: "Scan | None" = None) -> _R:
    """The request in `body`. Raises `Refusal` 400, which names the wrong field.

    Decoding is expensive for long bodies and many strings, so both are bounded before, by `scan` if it has seen the
    body. After decoding, the number of strings also shows a duplicate field, which msgspec does not notice."""
    if scan is None and len(body) > OBJECT_BYTES_MAX:
        scan = Scan()
        scan.take(body)
    quotes = _string_quotes(body) if scan is None else scan.quotes
    try:
        asked = decoder.decode(body)
    except (ValueError, RecursionError) as error:  # msgspec's errors and UnicodeDecodeError are ValueErrors
        raise _malformed(error) from None
    if quotes != 2 * asked.strings:
        raise Refusal(400, "a field is given twice, or a number is written as a text")
    return asked


def _string_quotes(body: bytes | bytearray) -> int:
    """The number of quotes around strings. Exact for JSON and, for any other body, for the part that the decoder would
    read: the decoder stops at a backslash outside of a string."""
    if b"\\" not in body:
        return body.count(b'"')
    unescaped = body.replace(b"\\\\", b"..")
    return unescaped.count(b'"') - unescaped.count(b'\\"')


class Scan:
    """Counts what makes a body expensive to decode. A long body is counted part by part as it arrives, so that it is
    refused before most of it is kept, and no part takes long."""

    __slots__ = ("_bytes", "_escape", "_objects", "quotes")

    def __init__(self) -> None:
        self.quotes = 0
        self._bytes = 0
        self._objects = 0
        self._escape = False
        """The last part ended with a backslash, which escapes the first byte of the next part."""

    def take(self, part: bytes | bytearray) -> None:
        """The next part. Raises `Refusal` 400 when the body is too expensive."""
        self._bytes += len(part)
        self._objects += part.count(b"{")
        if self._bytes > OBJECT_BYTES_MAX * max(1, self._objects):
            raise Refusal(400, f"the body has more than {OBJECT_BYTES_MAX} bytes for each operation in it")
        if self._escape:
            part, self._escape = part[1:], not part
        self.quotes += _string_quotes(part)
        if part.endswith(b"\\"):
            self._escape = bool((len(part) - len(part.rstrip(b"\\"))) % 2)
        if self.quotes > 2 * STRINGS_MAX:
            raise Refusal(400, f"the body has more strings than {BATCH_MAX} operations have")


def _malformed(error: Exception) -> Refusal:
    if isinstance(error, UnicodeDecodeError):
        return Refusal(400, "the body is not UTF-8")
    if isinstance(error, RecursionError):
        return Refusal(400, "the body is nested too deeply")
    text = str(error)
    if len(text) > ERROR_CHARS_MAX:
        text = f"{text[: ERROR_CHARS_MAX // 2]} … {text[-ERROR_CHARS_MAX // 2 :]}"
    return Refusal(400, _REGEX_IN_MESSAGE.sub(f"of {_NAME_RULE}", text))


def lock_name_of(segment: bytes) -> str:
    """A lock's name from its segment of the path, percent-decoded once. Raises `Refusal` 400."""
    if b"%" in segment:
        if re.search(rb"%(?![0-9A-Fa-f]{2})", segment):
            raise Refusal(400, "the lock name in the path has a % that begins no escape: write %25")
        segment = unquote_to_bytes(segment)
    try:
        name = segment.decode()
    except UnicodeDecodeError:
        raise Refusal(400, "the lock name in the path is not UTF-8") from None
    return checked_name(name)


def checked_name(name: str) -> str:
    if len(name) > NAME_CHARS_MAX or not _NAME.match(name):
        raise Refusal(400, f"a lock name has {_NAME_RULE}")
    return name


def misleading(name: str) -> str | None:
    """Why a name could be mistaken for another one that looks the same; None if it cannot."""
    if name.isascii() and name[0] != " " and name[-1] != " ":
        return None
    if name != name.strip():
        return "this server is strict about names (--strict-names): this one begins or ends with a blank"
    if not unicodedata.is_normalized("NFC", name):
        return "this server is strict about names (--strict-names): this one is not in Unicode's normal form NFC"
    return None


def idempotency_key_of(header: bytes | None) -> str | None:
    if header is None:
        return None
    if not _IDEMPOTENCY_KEY.fullmatch(header):
        raise Refusal(400, "Idempotency-Key must be 1 to 200 printable ASCII characters without blanks")
    return header.decode("ascii")


def operation_of(item: BatchOperation) -> Operation:
    """The store's operation for one item of a batch."""
    if isinstance(item, BatchAcquire):
        return Acquire(item.lock_name, item.owner_id, item.ttl_ms, item.idempotency_key or None)
    if isinstance(item, BatchRenew):
        return Renew(item.lock_name, item.owner_id, item.lease_id, item.fencing_token, item.extend_by_ms)
    return Release(item.lock_name, item.owner_id, item.lease_id, item.fencing_token)


RETRY_MS_MIN = 10
RETRY_MS_SPREAD_MIN = 50
RETRY_MS_TARGET_MAX = 400


def recommended_retry_ms(remaining_ms: int) -> int:
    """When the client should try again: at the end of the lease if that is near, and within 0.6 s in any case, because
    most leases are released earlier. On average, a lock stays free for half of this time. The delay is randomised, so
    that clients that were refused together do not return together."""
    target = min(max(remaining_ms, 0), RETRY_MS_TARGET_MAX)
    return max(RETRY_MS_MIN, target + int(random.random() * max(RETRY_MS_SPREAD_MIN, target / 2)))


def reply_of(outcome: Outcome) -> tuple[int, msgspec.Struct]:
    """Status and body of an outcome. `StoreFull` and `KeyReused` are not among them: they are refusals."""
    match outcome:
        case Granted():
            return 200, AcquireReply(
                True,
                outcome.lock_name,
                outcome.owner_id,
                outcome.lease_id,
                outcome.fencing_token,
                outcome.lease_expiry_ms,
                outcome.ttl_ms,
                outcome.remaining_ms,
                outcome.waited_ms,
                outcome.replayed,
            )
        case Held():
            retry_ms = recommended_retry_ms(outcome.remaining_ms)
            return 409, AcquireRefused(
                False, outcome.lock_name, outcome.current_owner_id, outcome.current_expiry_ms, retry_ms, "HELD"
            )
        case Renewed():
            return 200, RenewReply(True, outcome.lease_expiry_ms, outcome.ttl_ms, outcome.ttl_ms)
        case NotRenewed():
            return 409, RenewRefused(False, "NOT_OWNER_OR_EXPIRED")
        case Released():
            return 200, ReleaseReply(True)
        case NotReleased():
            return 200, ReleaseReply(False, "NOT_OWNER")
    raise AssertionError(f"no reply for {outcome!r}")


def busy_reply(lock_name: str) -> AcquireRefused:
    return AcquireRefused(False, lock_name, None, None, recommended_retry_ms(0), "BUSY_RETRY")


def lock_reply(view: LockView, *, show_lease_id: bool) -> LockReply:
    return LockReply(
        view.lock_name,
        view.held,
        view.owner_id,
        view.lease_id if show_lease_id else None,
        view.fencing_token,
        view.lease_expiry_ms,
        view.version,
        view.waiters,
    )
