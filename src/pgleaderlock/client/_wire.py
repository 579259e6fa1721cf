"""The lock server's JSON: requests as bytes, responses as values, refusals as exceptions.

Each field of a response is checked; unknown fields are ignored, so that a newer server can send more. A response that
cannot be understood raises `LockServerError`: whether the server has done anything is then unknown.

Must never wait, and must not depend on leases or clocks.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import quote

from pgleaderlock.client._http1 import HttpRequest, HttpResponse
from pgleaderlock.errors import ConfigurationError, LockHeld, LockServerError, LockServerRefused

BATCH_MAX = 500
"""Operations that the server takes in one call."""
TTL_MS_MAX = 600_000
_SHOWN_CHARS_MAX = 300
_RETRY_AFTER_S_MAX = 3600.0

_decoder = json.JSONDecoder()
_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode
_quoted = json.encoder.encode_basestring


class Proof(NamedTuple):
    """What identifies one lease to the server: every renewal and release must have all of it."""

    lock_name: str
    owner_id: str
    lease_id: str
    fencing_token: int

    @property
    def fields(self) -> dict[str, Any]:
        return self._asdict()

    @property
    def body(self) -> str:
        """The proof as JSON, without the lock's name, which is in the path."""
        owner_id, lease_id = _quoted(self.owner_id), _quoted(self.lease_id)
        return f'"owner_id":{owner_id},"lease_id":{lease_id},"fencing_token":{self.fencing_token}'


class Granted(NamedTuple):
    """The server's grant, before it becomes a lease of this process."""

    lock_name: str
    owner_id: str
    lease_id: str
    fencing_token: int
    waited_ms: int
    replayed: bool
    """The lease was granted to an earlier request with the same key."""
    remaining_ms: int | None = None
    """How long the lease was still valid when the server's transaction ran, before its sync to the disk. None: the
    server does not say."""

    @property
    def proof(self) -> Proof:
        return Proof(*self[:4])


@dataclass(frozen=True, slots=True)
class LockInfo:
    """A lock as the server saw it. Informational: it may have changed before the answer came."""

    lock_name: str
    held: bool
    owner_id: str | None
    lease_id: str | None
    """None unless the caller may see it."""
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


# --- Requests


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


@lru_cache(maxsize=1024)  # a program uses a few names repeatedly
def _path(lock_name: str, verb: bytes) -> bytes:
    # Proxies would resolve "." and ".." as steps in the path.
    if lock_name in {"", ".", ".."}:
        raise ConfigurationError(f"{lock_name!r} is no name for a lock")
    try:
        return b"/v1/locks/" + quote(lock_name, safe="").encode() + verb
    except (UnicodeEncodeError, TypeError):
        raise ConfigurationError(f"{lock_name!r} is no name for a lock: give text that is UTF-8") from None


# The next three requests are sent for every lease. They are formatted by hand, because a JSON encoder would take longer
# than all the rest of building them.


def _post(lock_name: str, verb: bytes, body: str, headers: bytes = b"") -> HttpRequest:
    try:
        return HttpRequest(b"POST", _path(lock_name, verb), body.encode(), headers)
    except UnicodeEncodeError:
        raise ConfigurationError("a name is not UTF-8") from None


def acquire_request(lock_name: str, owner_id: str, ttl_ms: int, wait_ms: int, key: str) -> HttpRequest:
    waiting = f',"wait_ms":{wait_ms}' if wait_ms else ""
    body = f'{{"owner_id":{_quoted(owner_id)},"ttl_ms":{ttl_ms}{waiting}}}'
    return _post(lock_name, b"/acquire", body, b"Idempotency-Key: %s\r\n" % key.encode("ascii"))


def renew_request(proof: Proof, extend_by_ms: int) -> HttpRequest:
    return _post(proof.lock_name, b"/renew", f'{{{proof.body},"extend_by_ms":{extend_by_ms}}}')


def release_request(proof: Proof) -> HttpRequest:
    return _post(proof.lock_name, b"/release", f"{{{proof.body}}}")


def get_request(lock_name: str) -> HttpRequest:
    return HttpRequest(b"GET", _path(lock_name, b""))


def list_request(prefix: str, cursor: str | None, limit: int) -> HttpRequest:
    query = f"?prefix={quote(prefix, safe='')}&limit={limit}"
    if cursor is not None:
        query += f"&cursor={quote(cursor, safe='')}"
    return HttpRequest(b"GET", b"/v1/locks" + query.encode("ascii"))


def break_request(lock_name: str) -> HttpRequest:
    return HttpRequest(b"POST", _path(lock_name, b"/break"), b"{}")


def acquire_operation(lock_name: str, owner_id: str, ttl_ms: int, key: str) -> dict[str, Any]:
    _path(lock_name, b"")
    return {"op": "acquire", "lock_name": lock_name, "owner_id": owner_id, "ttl_ms": ttl_ms, "idempotency_key": key}


def renew_operation(proof: Proof, extend_by_ms: int) -> dict[str, Any]:
    return {"op": "renew", **proof.fields, "extend_by_ms": extend_by_ms}


def release_operation(proof: Proof) -> dict[str, Any]:
    return {"op": "release", **proof.fields}


def batch_request(operations: Sequence[dict[str, Any]]) -> HttpRequest:
    try:
        body = _encode({"operations": list(operations)}).encode()
    except UnicodeEncodeError:
        raise ConfigurationError("a name is not UTF-8") from None
    return HttpRequest(b"POST", b"/v1/batch", body)


# --- Responses


def _decoded(text: str) -> Any:
    """Decode JSON, in one step if there is no whitespace around the value."""
    try:
        value, end = _decoder.raw_decode(text)
    except ValueError:
        return _decoder.decode(text)
    return value if end == len(text) else _decoder.decode(text)


def _json_object(response: HttpResponse) -> dict[str, Any]:
    try:
        value = _decoded(response.body.decode())
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise LockServerError(f"not a lock server's answer (HTTP {response.status}): {_shown(response.body)}")
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


def retry_after_s(response: HttpResponse) -> float | None:
    """The header Retry-After in seconds. A date in it is ignored, because the two clocks may differ."""
    if response.retry_after is None or not response.retry_after.isdigit() or len(response.retry_after) > 9:
        return None
    return min(float(response.retry_after), _RETRY_AFTER_S_MAX)


def refusal(response: HttpResponse) -> LockServerRefused:
    """The exception for a 4xx that refuses the request."""
    try:
        said = str(_json_object(response).get("error", ""))[:_SHOWN_CHARS_MAX]
    except LockServerError:
        said = _shown(response.body)
    return LockServerRefused(
        response.status,
        f"the lock server refused (HTTP {response.status}): {said}",
        retry_after_s=retry_after_s(response),
    )


def outcome_of_acquire(status: int, fields: dict[str, Any]) -> Granted | LockHeld:
    if status == 200 and fields.get("acquired") is True:
        return Granted(
            _take(fields, "lock_name", str),
            _take(fields, "owner_id", str),
            _take(fields, "lease_id", str),
            _take(fields, "fencing_token", int),
            _maybe(fields, "waited_ms", int) or 0,
            # Without the field, the server may have replayed a grant.
            _maybe(fields, "replayed", bool) is not False,
            _maybe(fields, "remaining_ms", int),
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


def answer(response: HttpResponse, *, conflict: bool = False) -> dict[str, Any]:
    """The JSON object of a 200, or of a 409 if `conflict`; raises for every other response."""
    if response.status == 200 or (conflict and response.status == 409):
        return _json_object(response)
    if 400 <= response.status < 500:
        raise refusal(response)
    raise LockServerError(f"not a lock server's answer (HTTP {response.status}): {_shown(response.body)}")


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
    """Status and body of each operation, as if it had been sent alone."""
    results = _take(fields, "results", list)
    if len(results) != wanted:
        raise LockServerError(f"the server answered {len(results)} of {wanted} operations")
    checked = []
    for result in results:
        if not isinstance(result, dict):
            raise LockServerError("the server's answer to a batch is no list of objects")
        checked.append((_take(result, "status", int), _take(result, "body", dict)))
    return checked
