"""The JSON of the dashboard: leaders, terms, events and nodes. The OpenAPI document is made of these types.

Every time is in milliseconds since 1970, by the database's clock. Imports msgspec. Must never wait, nor decide.
"""

from typing import Literal

import msgspec

__all__ = [
    "Event",
    "EventsReply",
    "LastChange",
    "Leader",
    "LeadersReply",
    "Node",
    "NodesReply",
    "Term",
    "TermsReply",
    "encode",
]

ChangeKind = Literal["acquired", "released", "lost", "evicted", "superseded"]
EndReason = Literal["released", "lost", "evicted", "superseded"]


class LastChange(msgspec.Struct, frozen=True, gc=False):
    """`reason`: of an acquired role, why the term before had ended; null for the first."""

    at_ms: int
    kind: ChangeKind
    reason: EndReason | None


class Leader(msgspec.Struct, frozen=True, gc=False):
    """A role. `leader` is null when nobody leads: given back, or not heard of for longer than its lease.

    `heartbeat` is late when it is older than what the leader's own gate allows. `gate` is derived from the ledger: shut
    without a fresh heartbeat and while the role or its node is drained, waiting while a new leader sits its predecessor
    out, open otherwise.
    """

    namespace: str
    role: str
    leader: str | None
    epoch: int
    since_ms: int | None
    tenure_ms: int | None
    heartbeat_age_ms: int | None
    heartbeat: Literal["ok", "late", "none"]
    gate: Literal["open", "waiting", "shut"]
    candidates: int
    last_change: LastChange | None


class LeadersReply(msgspec.Struct, frozen=True):
    now_ms: int
    leaders: list[Leader]
    next_cursor: str | None


class Term(msgspec.Struct, frozen=True, gc=False):
    """`ended_ms` is null while it lasts. `gap_ms`: how long nobody led before it; null for the first.

    The term of a leader that has fallen silent for longer than its lease is shown as lost at its last heartbeat, as the
    next winner will write it down.
    """

    epoch: int
    node_id: str
    began_ms: int
    ended_ms: int | None
    reason: EndReason | None
    gap_ms: int | None


class TermsReply(msgspec.Struct, frozen=True):
    role: str
    terms: list[Term]
    next_cursor: str | None


class Event(msgspec.Struct, frozen=True, gc=False):
    event_id: int
    at_ms: int
    kind: str
    role: str | None
    node_id: str | None
    epoch: int | None
    detail: str | None


class EventsReply(msgspec.Struct, frozen=True):
    events: list[Event]
    next_cursor: str | None


class Node(msgspec.Struct, frozen=True, gc=False):
    """One session of a node: two processes under one name are two. `live`: heard of within its lease."""

    node_id: str
    namespace: str
    session_id: int
    host: str
    version: str
    started_ms: int
    heartbeat_age_ms: int
    live: bool
    candidate: bool
    draining: bool
    roles: int


class NodesReply(msgspec.Struct, frozen=True):
    now_ms: int
    nodes: list[Node]
    next_cursor: str | None


encode = msgspec.json.Encoder().encode
