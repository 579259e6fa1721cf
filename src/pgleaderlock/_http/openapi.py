"""An OpenAPI 3.1 document from a table of operations and the msgspec types that they decode and encode.

Must never describe by hand what a type already says.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pgleaderlock._http.answers import ErrorReply

__all__ = ["Operation", "Response", "document"]

_REF = "#/components/schemas/{name}"

Schema = dict[str, Any]


@dataclass(frozen=True)
class Response:
    """One possible response: its meaning and its body. `links` name operations that may follow."""

    text: str
    body: type[msgspec.Struct] | str = ErrorReply
    """A type, or the media type of a body that is not JSON."""
    headers: Sequence[str] = ()
    """Names of headers in `_HEADERS`."""
    links: Mapping[str, Schema] = field(default_factory=dict)


@dataclass(frozen=True)
class Operation:
    method: str
    path: str
    name: str
    summary: str
    replies: Mapping[int, Response]
    request: type[msgspec.Struct] | None = None
    parameters: Sequence[Schema] = ()
    needs_token: bool = True


_HEADERS: dict[str, Schema] = {
    "Retry-After": {"description": "Seconds until it is worth trying again.", "schema": {"type": "integer"}},
    "Allow": {"description": "The methods that this path knows.", "schema": {"type": "string"}},
    "WWW-Authenticate": {"description": "Bearer.", "schema": {"type": "string"}},
    "X-Lock-Store": {
        "description": "The identity of the store that has answered.",
        "required": True,
        "schema": {"type": "string"},
    },
}


def document(info: Schema, operations: Sequence[Operation]) -> Schema:
    types: dict[str, type[msgspec.Struct]] = {}
    for operation in operations:
        bodies = [operation.request, *(reply.body for reply in operation.replies.values())]
        types |= {body.__name__: body for body in bodies if isinstance(body, type)}
    _, schemas = msgspec.json.schema_components(list(types.values()), ref_template=_REF)
    paths: dict[str, Schema] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _described(operation)
    return {
        "openapi": "3.1.0",
        "info": info,
        "paths": paths,
        "components": {
            "schemas": _for_ecmascript(schemas),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _for_ecmascript(schema: Any) -> Any:
    """The schema with each `\\Z` of Python replaced by the `$` of JSON Schema, which never matches before a line
    feed."""
    if isinstance(schema, dict):
        shown = {key: _for_ecmascript(value) for key, value in schema.items()}
        if isinstance(shown.get("pattern"), str):
            shown["pattern"] = shown["pattern"].replace(r"\Z", "$")
        return shown
    return [_for_ecmascript(value) for value in schema] if isinstance(schema, list) else schema


def _described(operation: Operation) -> Schema:
    described: Schema = {
        "operationId": operation.name,
        "summary": operation.summary,
        "responses": {str(status): _response(response) for status, response in sorted(operation.replies.items())},
    }
    if operation.parameters:
        described["parameters"] = list(operation.parameters)
    if operation.request is not None:
        described["requestBody"] = {"required": True, "content": _content(operation.request)}
    if operation.needs_token:
        # A token, or nothing on a server without tokens.
        described["security"] = [{"token": []}, {}]
    return described


def _response(response: Response) -> Schema:
    described: Schema = {"description": response.text, "content": _content(response.body)}
    if response.headers:
        described["headers"] = {name: _HEADERS[name] for name in response.headers}
    if response.links:
        described["links"] = dict(response.links)
    return described


def _content(body: type[msgspec.Struct] | str) -> Schema:
    if isinstance(body, str):
        return {body: {"schema": {"type": "object" if body == "application/json" else "string"}}}
    return {"application/json": {"schema": {"$ref": _REF.format(name=body.__name__)}}}
