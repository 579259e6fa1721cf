"""The OpenAPI description of the dashboard's API: what the types of `api` cannot express.

Must never describe a field of a response: its type does.
"""

from typing import Any

import msgspec

from pgleaderlock._base.version import VERSION
from pgleaderlock._http.openapi import Operation, Response, document
from pgleaderlock.dashboard import api
from pgleaderlock.dashboard.api import LIMIT_MAX, MS_MAX, NODE_CURSOR
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
        {**READ, 200: Response("A page of roles.", api.LeadersReply)},
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
        {**READ, 200: Response("A page of terms.", api.TermsReply)},
        None,
        [_ROLE, *_TERMS],
    ),
    Operation(
        "GET",
        "/v1/leaders/terms",
        "terms_of_role",
        "The same, for names that a path cannot carry: on its way `..` would be taken for the folder above.",
        {**READ, 200: Response("A page of terms.", api.TermsReply)},
        None,
        [{**_ROLE, "in": "query", "description": "The role's name."}, *_TERMS],
    ),
    Operation(
        "GET",
        "/v1/events",
        "events",
        "What happened, the newest first; or after an event, the oldest first. Live with Accept: text/event-stream.",
        {**READ, 200: Response("A page of events.", api.EventsReply)},
        None,
        [
            query_field("after", "Only events after this one.", _NUMBER),
            query_field("cursor", _NEXT, _NUMBER),
            query_field("role", "Only of this role.", _TEXT),
            query_field("node", "Only of this node.", _TEXT),
            query_field("from_ms", "Only what happened at or after this time.", _MOMENT),
            query_field("to_ms", "Only what happened at or before this time.", _MOMENT),
            _LIMIT,
        ],
    ),
    Operation(
        "GET",
        "/v1/incidents",
        "incidents",
        "Terms of one node that ended together and for one reason, the newest first. Without from_ms, of the last day.",
        {**READ, 200: Response("The newest incidents of this time.", api.IncidentsReply)},
        None,
        [
            query_field("from_ms", "Only what began at or after this time.", _MOMENT),
            query_field("to_ms", "Only what began at or before this time.", _MOMENT),
            query_field("role", "Only of this role.", _TEXT),
            query_field("node", "Only what this node caused, or where it took over.", _TEXT),
            _LIMIT,
        ],
    ),
    Operation(
        "GET",
        "/v1/slots",
        "slots",
        "What ran once per tick: the newest slots of a name, or without one the newest slot of each name.",
        {**READ, 200: Response("The newest slots.", api.SlotsReply)},
        None,
        [query_field("name", "Only of this name.", _TEXT), _LIMIT],
    ),
    Operation(
        "GET",
        "/v1/nodes",
        "nodes",
        "The nodes: those that live or lead, and those that were heard within the last hour.",
        {**READ, 200: Response("A page of nodes.", api.NodesReply)},
        None,
        [query_field("cursor", _NEXT, {"type": "string", "pattern": NODE_CURSOR}), _LIMIT],
    ),
)


def openapi_bytes() -> bytes:
    """The OpenAPI document of a dashboard without a lock server."""
    info = {"title": "pgleaderlock dashboard", "version": VERSION}
    return msgspec.json.encode(document(info, [*OPERATIONS, *STATUS_OPERATIONS]))
