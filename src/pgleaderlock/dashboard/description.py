"""The dashboard's API described for programs. The types come from `wire`; here is what a type cannot say.

Imports `wire`, `api` and the lock server's description. Must never describe a field.
"""

from typing import Any

import msgspec

from pgleaderlock._http.openapi import Operation, Reply, document
from pgleaderlock._version import VERSION
from pgleaderlock.dashboard import wire
from pgleaderlock.dashboard._queries import MS_MAX
from pgleaderlock.dashboard.api import LIMIT_MAX, NODE_CURSOR
from pgleaderlock.history import LAST_ID
from pgleaderlock.server.description import READ, STATUS_OPERATIONS, query_field

__all__ = ["OPERATIONS", "openapi_bytes"]

_TEXT: dict[str, Any] = {"type": "string", "pattern": r"^[^\u0000]*$"}
_NUMBER: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": LAST_ID}
_MOMENT: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": MS_MAX}
_LIMIT = query_field("limit", "Entries on a page.", {"type": "integer", "minimum": 1, "maximum": LIMIT_MAX})
_ROLE: dict[str, Any] = {
    "name": "role",
    "in": "path",
    "required": True,
    "description": "The role's name, percent-encoded.",
    "schema": {"type": "string", "minLength": 1, "pattern": r"^[^\u0000]+$"},
}
_NEXT = "`next_cursor` of the page before."

_TERMS = (
    query_field("from_ms", "Only terms that had not ended by then.", _MOMENT),
    query_field("to_ms", "Only terms that had begun by then.", _MOMENT),
    query_field("cursor", _NEXT, _NUMBER),
    _LIMIT,
)

OPERATIONS = (
    Operation(
        "GET",
        "/v1/leaders",
        "leaders",
        "The roles and who leads each, by name.",
        {**READ, 200: Reply("A page of roles.", wire.LeadersReply)},
        None,
        [
            query_field("prefix", "Only names that begin so.", _TEXT),
            query_field("cursor", _NEXT, _TEXT),
            _LIMIT,
        ],
    ),
    Operation(
        "GET",
        "/v1/leaders/{role}/terms",
        "terms",
        "Who led a role, the newest first.",
        {**READ, 200: Reply("A page of terms.", wire.TermsReply)},
        None,
        [_ROLE, *_TERMS],
    ),
    Operation(
        "GET",
        "/v1/leaders/terms",
        "terms_of_role",
        "The same, for names that a path cannot carry: on its way `..` would be taken for the folder above.",
        {**READ, 200: Reply("A page of terms.", wire.TermsReply)},
        None,
        [{**_ROLE, "in": "query", "description": "The role's name."}, *_TERMS],
    ),
    Operation(
        "GET",
        "/v1/events",
        "events",
        "What happened, the newest first; or after an event, the oldest first. Live with Accept: text/event-stream.",
        {**READ, 200: Reply("A page of events.", wire.EventsReply)},
        None,
        [
            query_field("after", "Only events after this one.", _NUMBER),
            query_field("cursor", _NEXT, _NUMBER),
            query_field("role", "Only of this role.", _TEXT),
            query_field("node", "Only of this node.", _TEXT),
            _LIMIT,
        ],
    ),
    Operation(
        "GET",
        "/v1/nodes",
        "nodes",
        "The nodes: those that live or lead, and those that were heard within the last hour.",
        {**READ, 200: Reply("A page of nodes.", wire.NodesReply)},
        None,
        [query_field("cursor", _NEXT, {"type": "string", "pattern": NODE_CURSOR}), _LIMIT],
    ),
)


def openapi_bytes() -> bytes:
    """Of a dashboard that stands alone."""
    info = {"title": "pgleaderlock dashboard", "version": VERSION}
    return msgspec.json.encode(document(info, [*OPERATIONS, *STATUS_OPERATIONS]))
