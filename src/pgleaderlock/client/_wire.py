"""The lock server's JSON: requests as bytes, replies as values, refusals as exceptions.

What the server says is checked field by field; fields that this client does not know are ignored, so that a newer
server can say more. An answer that makes no sense is `LockServerError`: whether something was done is unknown then.

Imports `_http1`, `errors` and the standard library. Must never wait, and knows nothing of leases or clocks.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import quote

from pgleaderlock.client._http1 import Reply, Request
from pgleaderlock.errors import ConfigurationError, LockHeld, LockServerError, LockServerRefused

__all__ = [
    "BATCH_MAX",
    "Granted",
    "LockInfo",
    "Page",
    "acquire_operation",
    "acquire_request",
    "answer",
    "batch_request",
    "batch_results",
    "break_request",
    "broken",
    "get_request",
    "list_request",
    "lock_info",
    "lock_page",
    "milliseconds",
    "outcome_of_acquire",
    "outcome_of_release",
    "outcome_of_renew",
    "refusal",
    "release_operation",
    "release_request",
    "renew_operation",
    "renew_request",
    "retry_after_s",
    "ttl_ms",
]

BATCH_MAX = 500
"""Operations that the server takes in one call."""
TTL_MS_MAX = 600_000
_SHOWN_CHARS_MAX = 300
_RETRY_AFTER_S_MAX = 3600.0

_decoder = json.JSONDecoder()
_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode
_quoted = json.encoder.encode_basestring


class Granted(NamedTuple):
    """The server's grant, before it becomes a lease of this process."""

    lock_name: str
    owner_id: str
    lease_id: str
    fencing_token: int
    waited_ms: int
    replayed: bool
    """It was granted to an earlier request with the same key."""


@dataclass(frozen=True, slots=True)
class LockInfo:
    """A lock as the server saw it. Informational: it may have changed before the answer came."""

    lock_name: str
    held: bool
    owner_id: str | None
    lease_id: str | None
    """Only for callers that may see it."""
    fencing_token: int
    """The highest that was ever granted for this lock."""
    lease_expiry_ms: int | None
    """Unix time, for people to read."""
    version: int
    waiters: int = 0


@dataclass(frozen=True, slots=True)
class Page:
    locks: list[LockInfo]
    next_cursor: str | None


# -- requests ---------------------------------------------------------------------------------------------------------


def milliseconds(what: str, duration_s: float, *, least_ms: int, most_ms: int) -> int:
    """Whole milliseconds, within bounds."""
    try:
        value = round(duration_s * 1000)
    except (TypeError, ValueError, OverflowError):
        raise ConfigurationError(f"{what} is {duration_s!r}: give seconds as a number") from None
    if not least_ms <= value <= most_ms:
        raise ConfigurationError(f"{what} is {duration_s!r} s: give {least_ms / 1000:g} to {most_ms / 1000:g} s")
    return value


def ttl_ms(ttl_s: float) -> int:
    return milliseconds("ttl_s", ttl_s, least_ms=1, most_ms=TTL_MS_MAX)


@lru_cache(maxsize=1024)  # the few locks of a program, again and again
def _path(lock_name: str, verb: bytes) -> bytes:
    # "." and ".." would be taken for steps in the path by everything between here and the server.
    if lock_name in {"", ".", ".."}:
        raise ConfigurationError(f"{lock_name!r} is no name for a lock")
    try:
        return b"/v1/locks/" + quote(lock_name, safe="").encode() + verb
    except (UnicodeEncodeError, TypeError):
        raise ConfigurationError(f"{lock_name!r} is no name for a lock: give text that is UTF-8") from None


def _body(fields: dict[str, Any]) -> bytes:
    try:
        return _encode(fields).encode()
    except UnicodeEncodeError:
        raise ConfigurationError("a name is not UTF-8") from None


# The next three are sent all the time, and an encoder of JSON takes longer than everything else about them.


def _post(lock_name: str, verb: bytes, body: str, headers: bytes = b"") -> Request:
    try:
        return Request(b"POST", _path(lock_name, verb), body.encode(), headers)
    except UnicodeEncodeError:
        raise ConfigurationError("a name is not UTF-8") from None


def acquire_request(lock_name: str, owner_id: str, ttl_ms: int, wait_ms: int, key: str) -> Request:
    waiting = f',"wait_ms":{wait_ms}' if wait_ms else ""
    body = f'{{"owner_id":{_quoted(owner_id)},"ttl_ms":{ttl_ms}{waiting}}}'
    return _post(lock_name, b"/acquire", body, b"Idempotency-Key: %s\r\n" % key.encode("ascii"))


def _proof(owner_id: str, lease_id: str, fencing_token: int) -> str:
    return f'"owner_id":{_quoted(owner_id)},"lease_id":{_quoted(lease_id)},"fencing_token":{fencing_token}'


def renew_request(lock_name: str, owner_id: str, lease_id: str, fencing_token: int, extend_by_ms: int) -> Request:
    proof = _proof(owner_id, lease_id, fencing_token)
    return _post(lock_name, b"/renew", f'{{{proof},"extend_by_ms":{extend_by_ms}}}')


def release_request(lock_name: str, owner_id: str, lease_id: str, fencing_token: int) -> Request:
    return _post(lock_name, b"/release", f"{{{_proof(owner_id, lease_id, fencing_token)}}}")


def get_request(lock_name: str) -> Request:
    return Request(b"GET", _path(lock_name, b""))


def list_request(prefix: str, cursor: str | None, limit: int) -> Request:
    query = f"?prefix={quote(prefix, safe='')}&limit={limit}"
    if cursor is not None:
        query += f"&cursor={quote(cursor, safe='')}"
    return Request(b"GET", b"/v1/locks" + query.encode("ascii"))


def break_request(lock_name: str) -> Request:
    return Request(b"POST", _path(lock_name, b"/break"), b"{}")


def acquire_operation(lock_name: str, owner_id: str, ttl_ms: int, key: str) -> dict[str, Any]:
    _path(lock_name, b"")
    return {"op": "acquire", "lock_name": lock_name, "owner_id": owner_id, "ttl_ms": ttl_ms, "idempotency_key": key}


def _proof_fields(owner_id: str, lease_id: str, fencing_token: int) -> dict[str, Any]:
    return {"owner_id": owner_id, "lease_id": lease_id, "fencing_token": fencing_token}


def renew_operation(
    lock_name: str, owner_id: str, lease_id: str, fencing_token: int, extend_by_ms: int
) -> dict[str, Any]:
    proof = _proof_fields(owner_id, lease_id, fencing_token)
    return {"op": "renew", "lock_name": lock_name, **proof, "extend_by_ms": extend_by_ms}


def release_operation(lock_name: str, owner_id: str, lease_id: str, fencing_token: int) -> dict[str, Any]:
    return {"op": "release", "lock_name": lock_name, **_proof_fields(owner_id, lease_id, fencing_token)}


def batch_request(operations: Sequence[dict[str, Any]]) -> Request:
    return Request(b"POST", b"/v1/batch", _body({"operations": list(operations)}))


# -- replies ----------------------------------------------------------------------------------------------------------


def _decoded(text: str) -> Any:
    """In one step if nothing is around the value, and else with care."""
    try:
        value, end = _decoder.raw_decode(text)
    except ValueError:
        return _decoder.decode(text)
    return value if end == len(text) else _decoder.decode(text)


def _json_object(reply: Reply) -> dict[str, Any]:
    try:
        value = _decoded(reply.body.decode())
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise LockServerError(f"not a lock server's answer (HTTP {reply.status}): {_shown(reply.body)}")
    return value


def _shown(body: bytes) -> str:
    return repr(body[:_SHOWN_CHARS_MAX].decode("utf-8", "replace"))


def _take(fields: dict[str, Any], name: str, kind: type) -> Any:
    value = fields.get(name)
    # bool is an int to Python; JSON tells them apart.
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise LockServerError(f"the server's answer has no {kind.__name__} {name!r}: {_shown(repr(fields).encode())}")
    return value


def _maybe(fields: dict[str, Any], name: str, kind: type) -> Any:
    return None if fields.get(name) is None else _take(fields, name, kind)


def retry_after_s(reply: Reply) -> float | None:
    """What the header Retry-After says in seconds; its form with a date is not for machines that have a clock each."""
    if reply.retry_after is None or not reply.retry_after.isdigit() or len(reply.retry_after) > 9:
        return None
    return min(float(reply.retry_after), _RETRY_AFTER_S_MAX)


def refusal(reply: Reply) -> LockServerRefused:
    """The exception for an answer in the range 4xx that is no answer to the question."""
    try:
        said = str(_json_object(reply).get("error", ""))[:_SHOWN_CHARS_MAX]
    except LockServerError:
        said = _shown(reply.body)
    return LockServerRefused(
        reply.status, f"the lock server refused (HTTP {reply.status}): {said}", retry_after_s=retry_after_s(reply)
    )


def outcome_of_acquire(status: int, fields: dict[str, Any]) -> Granted | LockHeld:
    if status == 200 and fields.get("acquired") is True:
        return Granted(
            _take(fields, "lock_name", str),
            _take(fields, "owner_id", str),
            _take(fields, "lease_id", str),
            _take(fields, "fencing_token", int),
            _maybe(fields, "waited_ms", int) or 0,
            # A server that does not say so may have replayed.
            _maybe(fields, "replayed", bool) is not False,
        )
    if fields.get("acquired") is not False:
        raise LockServerError(f"the server's answer says neither yes nor no: {_shown(repr(fields).encode())}")
    return LockHeld(
        _take(fields, "lock_name", str),
        current_owner_id=_maybe(fields, "current_owner_id", str),
        current_expiry_ms=_maybe(fields, "current_expiry_ms", int),
        recommended_retry_s=(_maybe(fields, "recommended_retry_ms", int) or 0) / 1000,
        reason=_maybe(fields, "reason", str) or "HELD",
    )


def outcome_of_renew(fields: dict[str, Any]) -> bool:
    return bool(_take(fields, "renewed", bool))


def outcome_of_release(fields: dict[str, Any]) -> bool:
    return bool(_take(fields, "released", bool))


def answer(reply: Reply, *, conflict: bool = False) -> dict[str, Any]:
    """The JSON object of a 200, or of a 409 where that is an answer; everything else is raised."""
    if reply.status == 200 or (conflict and reply.status == 409):
        return _json_object(reply)
    if 400 <= reply.status < 500:
        raise refusal(reply)
    raise LockServerError(f"not a lock server's answer (HTTP {reply.status}): {_shown(reply.body)}")


def lock_info(fields: dict[str, Any]) -> LockInfo:
    return LockInfo(
        _take(fields, "lock_name", str),
        bool(_take(fields, "held", bool)),
        _maybe(fields, "owner_id", str),
        _maybe(fields, "lease_id", str),
        _maybe(fields, "fencing_token", int) or 0,
        _maybe(fields, "lease_expiry_ms", int),
        _maybe(fields, "version", int) or 0,
        _maybe(fields, "waiters", int) or 0,
    )


def lock_page(fields: dict[str, Any]) -> Page:
    return Page([lock_info(entry) for entry in _take(fields, "locks", list)], _maybe(fields, "next_cursor", str))


def broken(fields: dict[str, Any]) -> LockInfo:
    """The lock as it was before it was broken."""
    return lock_info(_take(fields, "was", dict))


def batch_results(fields: dict[str, Any], wanted: int) -> list[tuple[int, dict[str, Any]]]:
    """Status and body of each operation, as if it had been asked alone."""
    results = _take(fields, "results", list)
    if len(results) != wanted:
        raise LockServerError(f"the server answered {len(results)} of {wanted} operations")
    checked = []
    for result in results:
        if not isinstance(result, dict):
            raise LockServerError("the server's answer to a batch is no list of objects")
        checked.append((_take(result, "status", int), _take(result, "body", dict)))
    return checked
