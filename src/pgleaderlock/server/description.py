"""The OpenAPI description of the lock server: every path, every response, and the links between them.

The types come from `wire`; this module has what a type cannot express. The server sends no response that is not in this
table.

Must never describe a field.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from pgleaderlock._base.version import VERSION
from pgleaderlock._http.openapi import Operation, Response, document
from pgleaderlock.server import wire

__all__ = ["OPERATIONS", "READ", "STATUS_OPERATIONS", "openapi_bytes", "openapi_document", "query_field"]

_REFUSALS = {
    400: Response("The request is malformed: the error says where."),
    403: Response("Not with this token, or not by this Host name."),
    501: Response("A Transfer-Encoding other than chunked."),
}
_TOKEN = {401: Response("A token is needed, or this one is unknown.", headers=["WWW-Authenticate"])}
_BODY = {
    408: Response("The body did not arrive in time."),
    413: Response("The body is too long."),
    415: Response("The body is not declared as JSON."),
}
_STORE = {503: Response("The store is full, busy or away, or the server is stopping.", headers=["Retry-After"])}
_METHOD = {405: Response("This path knows other methods.", headers=["Allow"])}
_PATH = {404: Response("There is nothing at this path.")}

READ = {**_REFUSALS, **_TOKEN, **_STORE, **_METHOD, **_PATH}
"""The responses that every read may get."""
_WRITE = {**READ, **_BODY}

_LOCK: dict[str, Any] = {
    "name": "lock",
    "in": "path",
    "required": True,
    "description": "The lock's name, percent-encoded.",
    "schema": {"type": "string", "minLength": 1, "maxLength": wire.NAME_CHARS_MAX, "pattern": wire.NAME_PATTERN},
}
_KEY: dict[str, Any] = {
    "name": "Idempotency-Key",
    "in": "header",
    "description": "A repeated acquire with the same key and body gets the same lease while it is good.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 200, "pattern": wire.IDEMPOTENCY_KEY_PATTERN},
}
_STORE_HEADER: dict[str, Any] = {
    "name": "X-Lock-Store",
    "in": "header",
    "description": "The store that this is meant for, as an earlier answer has named it. Any, if it is left away.",
    "schema": {"type": "string"},
}
_PART_OF_NAME: dict[str, Any] = {
    "type": "string",
    "maxLength": wire.NAME_CHARS_MAX,
    "pattern": wire.NAME_PATTERN.replace("+$", "*$"),
}
_LEASE = {
    "owner_id": "$response.body#/owner_id",
    "lease_id": "$response.body#/lease_id",
    "fencing_token": "$response.body#/fencing_token",
}
_SAME_LOCK = {"lock": "$response.body#/lock_name"}


def query_field(name: str, text: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "description": text, "schema": schema}


_FROM_ACQUIRE: dict[str, dict[str, Any]] = {
    "renew": {
        "operationId": "renew",
        "parameters": _SAME_LOCK,
        "requestBody": {**_LEASE, "extend_by_ms": 5_000},
    },
    "release": {"operationId": "release", "parameters": _SAME_LOCK, "requestBody": dict(_LEASE)},
    "get": {"operationId": "get", "parameters": _SAME_LOCK},
}

STATUS_OPERATIONS = (
    Operation(
        "GET",
        "/healthz",
        "health",
        "The process runs.",
        {**_REFUSALS, **_METHOD, 200: Response("It does.", wire.StatusReply)},
        needs_token=False,
    ),
    Operation(
        "GET",
        "/readyz",
        "ready",
        "What it is there for would work now.",
        {**_REFUSALS, **_METHOD, **_STORE, 200: Response("It would.", wire.StatusReply)},
        needs_token=False,
    ),
    Operation(
        "GET",
        "/openapi.json",
        "describe",
        "This document.",
        {**_REFUSALS, **_METHOD, 200: Response("The document.", "application/json")},
        needs_token=False,
    ),
)
"""The operations that every server of ours has. They reveal nothing, and need no token."""

OPERATIONS = (
    Operation(
        "POST",
        "/v1/locks/{lock}/acquire",
        "acquire",
        "Take a lock, at once or when its turn has come.",
        {
            **_WRITE,
            200: Response("Granted.", wire.AcquireReply, links=_FROM_ACQUIRE),
            409: Response("Held by somebody else, or the store is busy.", wire.AcquireRefused),
            422: Response("The Idempotency-Key belongs to a lease that was asked for with another body."),
            429: Response("Too many requests wait for locks.", headers=["Retry-After"]),
        },
        wire.AcquireRequest,
        [_LOCK, _KEY],
    ),
    Operation(
        "POST",
        "/v1/locks/{lock}/renew",
        "renew",
        "Extend a lease, from now.",
        {
            **_WRITE,
            200: Response("Extended.", wire.RenewReply),
            409: Response("This lease is not, or no longer, the lock's.", wire.RenewRefused),
        },
        wire.RenewRequest,
        [_LOCK],
    ),
    Operation(
        "POST",
        "/v1/locks/{lock}/release",
        "release",
        "Give a lock back. A stale lease changes nothing.",
        {**_WRITE, 200: Response("Released, or not the lock's lease.", wire.ReleaseReply)},
        wire.ReleaseRequest,
        [_LOCK],
    ),
    Operation(
        "POST",
        "/v1/batch",
        "batch",
        f"Up to {wire.BATCH_MAX} acquires, renewals and releases in one transaction.",
        {**_WRITE, 200: Response("One result for each operation, in order.", wire.BatchReply)},
        wire.BatchRequest,
    ),
    Operation(
        "GET",
        "/v1/locks/{lock}",
        "get",
        "A lock as it is. One that nobody has ever taken is free.",
        {**READ, 200: Response("The lock.", wire.LockReply)},
        None,
        [_LOCK],
    ),
    Operation(
        "GET",
        "/v1/locks",
        "list",
        "Locks in the order of their names.",
        {**READ, 200: Response("A page of locks.", wire.ListReply)},
        None,
        [
            query_field("prefix", "Only names that begin so.", _PART_OF_NAME),
            query_field("cursor", "`next_cursor` of the page before.", _PART_OF_NAME),
            query_field("limit", "Locks on a page.", {"type": "integer", "minimum": 1, "maximum": wire.LIST_LIMIT_MAX}),
        ],
    ),
    Operation(
        "POST",
        "/v1/locks/{lock}/break",
        "break",
        "Free a lock by force. Needs an admin token; is audited.",
        {**_WRITE, 200: Response("What the lock was.", wire.BreakReply)},
        wire.BreakRequest,
        [_LOCK],
    ),
    Operation(
        "GET",
        "/metrics",
        "metrics",
        "For Prometheus.",
        {**_REFUSALS, **_METHOD, **_TOKEN, 200: Response("The metrics.", "text/plain")},
    ),
    *STATUS_OPERATIONS,
)


def _of_one_store(operation: Operation) -> Operation:
    """The operation with the headers for the store id: on every response, and optionally on a request."""
    replies = {**operation.replies, 421: Response("This server has another store: nothing was done.")}
    replies = {status: replace(reply, headers=[*reply.headers, "X-Lock-Store"]) for status, reply in replies.items()}
    return replace(operation, replies=replies, parameters=[*operation.parameters, _STORE_HEADER])


def openapi_document(more: Sequence[Operation] = ()) -> dict[str, Any]:
    """`more`: operations that are served in addition to the locks."""
    info = {"title": "pgleaderlock lock server", "version": VERSION}
    described = document(info, [*map(_of_one_store, OPERATIONS), *more])
    # A union of untagged types, which msgspec does not support as the type of a field.
    bodies = ("AcquireReply", "AcquireRefused", "RenewReply", "RenewRefused", "ReleaseReply", "ErrorReply")
    result = described["components"]["schemas"]["BatchResult"]
    result["properties"]["body"] = {"anyOf": [{"$ref": f"#/components/schemas/{name}"} for name in bodies]}
    return described


def openapi_bytes(more: Sequence[Operation] = ()) -> bytes:
    return msgspec.json.encode(openapi_document(more))
