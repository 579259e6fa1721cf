"""What the ledger tells: roles, nodes, terms with their failovers, events, and what was asked from afar. Frozen values.

Read-only, for people and for programs that show something to people: the command line, the dashboard. Each answer is a
look and not a promise. A run-time role's rights are enough. Every list comes in pages that an index finds, so that a
thousand roles and a hundred thousand terms cost no more than what is shown. Ledgers of this version and of the one
before are understood.

The functions take whoever can run a named statement (`Asks`): `Reader` does so on a connection of yours. Imports
psycopg, `migrate` for the version, `_sql`, `errors` and the standard library. Must never write, and never decide.
"""

import dataclasses
import datetime as dt
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import psycopg
from psycopg.rows import dict_row

from pgleaderlock._sql import statement
from pgleaderlock.errors import SchemaError
from pgleaderlock.migrate import check_schema

__all__ = [
    "PAGE_SIZE",
    "Asks",
    "Event",
    "EventFeed",
    "LedgerFacts",
    "NodeView",
    "Reader",
    "RequestView",
    "RoleView",
    "Term",
    "all_roles",
    "all_terms",
    "as_json",
    "events",
    "ledger_facts",
    "namespaces",
    "nodes",
    "request",
    "role",
    "roles",
    "terms",
]

PAGE_SIZE = 1000
NODES_MAX = 1000
LAST_ID = 2**63 - 1
EVER_S = 1e9  # about thirty years: make_interval takes no infinity
LATE_COMMIT_S = 60.0

RoleState = Literal["led", "silent", "free"]
NodeState = Literal["alive", "silent", "ended"]


class Asks(Protocol):
    """Whoever can run a named statement on the database of the ledger."""

    async def rows(self, name: str, **params: object) -> list[dict[str, Any]]: ...


class Reader:
    """Asks on a psycopg connection of the caller's. Best in autocommit mode, or it leaves a transaction open."""

    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        self._connection = connection

    async def rows(self, name: str, **params: object) -> list[dict[str, Any]]:
        # Bound here and not at the server, so that a condition which is not asked for costs nothing.
        async with psycopg.AsyncClientCursor(self._connection, row_factory=dict_row) as cursor:
            await cursor.execute(statement(name), params)
            return await cursor.fetchall()


@dataclass(frozen=True, slots=True)
class LedgerFacts:
    """Which ledger this is."""

    version: int
    in_recovery: bool


@dataclass(frozen=True, slots=True)
class RoleView:
    """One role: who leads it by the ledger, and since when."""

    namespace: str
    role: str
    state: RoleState
    """`free`: nobody leads. `silent`: its leader has not been heard for longer than its lease."""
    epoch: int
    node_id: str | None
    holder_identity: str | None
    acquired_at: dt.datetime | None
    tenure_s: float | None
    last_heartbeat: dt.datetime | None
    heartbeat_age_s: float | None
    lease_s: float | None
    draining: bool
    """Its leader drains."""
    candidates: int
    """Live nodes of the namespace that would lead. Which roles each of them is after, no table says."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """One session of a node."""

    namespace: str
    node_id: str
    state: NodeState
    """`silent`: not heard for longer than its lease, and it has not said goodbye."""
    leads: int
    candidate: bool
    draining: bool
    balance: bool
    session_id: int
    host: str
    os_pid: int
    holder_identity: str
    library_version: str
    gate_s: float
    lease_s: float
    beat: int
    started_at: dt.datetime
    last_heartbeat: dt.datetime
    heartbeat_age_s: float
    ended_at: dt.datetime | None


@dataclass(frozen=True, slots=True)
class Term:
    """One term of a role, and how long the role had no leader before it."""

    namespace: str
    role: str
    epoch: int
    node_id: str
    holder_identity: str
    began_at: dt.datetime
    ended_at: dt.datetime | None
    """None: it has not ended. Of a term that was lost, the last heartbeat: nobody knows better."""
    reason: str | None
    lasted_s: float
    """Up to now, if it has not ended."""
    prev_epoch: int | None
    prev_node_id: str | None
    prev_reason: str | None
    failover_s: float | None
    """From the end of the term before to the start of this one; None for the first."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened."""

    event_id: int
    at: dt.datetime
    kind: str
    namespace: str
    role: str | None
    node_id: str | None
    epoch: int | None
    detail: str | None
    age_s: float


@dataclass(frozen=True, slots=True)
class RequestView:
    """Something that was asked from afar, and what became of it."""

    request_id: int
    at: dt.datetime
    kind: str
    namespace: str
    role: str | None
    node_id: str | None
    to_node_id: str | None
    asked_by: str
    done_at: dt.datetime | None
    outcome: str | None
    """`done`, `refused` or `expired`; None while it is open, and always in a ledger of version 2."""
    detail: str | None


def as_json(view: Any) -> dict[str, Any]:
    """A value of this module as JSON can carry it: times in UTC, ISO 8601, milliseconds."""
    return {
        field.name: _iso(value) if isinstance(value := getattr(view, field.name), dt.datetime) else value
        for field in dataclasses.fields(view)
    }


def _iso(moment: dt.datetime) -> str:
    return moment.astimezone(dt.UTC).isoformat(timespec="milliseconds")


async def ledger_facts(asks: Asks) -> LedgerFacts:
    """Which ledger this is; `SchemaError` says what to do if there is none, or none that this role may read."""
    (found,) = await asks.rows("history_ledger")
    if not found["present"]:
        check_schema(None)
    if not found["readable"]:
        raise SchemaError(
            "there is a ledger, not readable for this role: let its owner run `pgleaderlock migrate --grant-to ROLE`"
        )
    version = (await asks.rows("ledger_version"))[0]["version"]
    check_schema(version)
    return LedgerFacts(version, found["in_recovery"])


async def namespaces(asks: Asks, *, limit: int = PAGE_SIZE) -> tuple[str, ...]:
    """The namespaces that have a role, by name."""
    return tuple(row["namespace"] for row in await asks.rows("history_namespaces", page_size=limit))


async def roles(asks: Asks, namespace: str, *, after: str = "", limit: int = PAGE_SIZE) -> tuple[RoleView, ...]:
    """One page of the roles of a namespace, as the database sorts them; `after` is the last name of the page before."""
    rows = await asks.rows("history_roles", namespace=namespace, role=None, after=after, page_size=limit)
    return tuple(_role(row) for row in rows)


async def all_roles(asks: Asks, namespace: str) -> list[RoleView]:
    """Every role of a namespace, read page by page."""
    found: list[RoleView] = []
    while True:
        page = await roles(asks, namespace, after=found[-1].role if found else "", limit=PAGE_SIZE)
        found += page
        if len(page) < PAGE_SIZE:
            return found


async def role(asks: Asks, namespace: str, name: str) -> RoleView | None:
    """One role; None if nobody has ever led it in this ledger."""
    rows = await asks.rows("history_roles", namespace=namespace, role=name, after="", page_size=1)
    return _role(rows[0]) if rows else None


def _role(row: dict[str, Any]) -> RoleView:
    row = dict(row)
    led = row.pop("led")
    silent = led and row["heartbeat_age_s"] > row["lease_s"]
    return RoleView(state="silent" if silent else "led" if led else "free", **row)


async def nodes(
    asks: Asks, namespace: str, *, heard_within_s: float = 0.0, limit: int = NODES_MAX
) -> tuple[NodeView, ...]:
    """The nodes that live or lead, by name; and those that were heard within so many seconds and live no more."""
    rows = await asks.rows("history_nodes", namespace=namespace, heard_within_s=heard_within_s, page_size=limit)
    return tuple(_node(row) for row in rows)


def _node(row: dict[str, Any]) -> NodeView:
    row = dict(row)
    del row["latest"]
    silent = row["heartbeat_age_s"] > row["lease_s"]
    state: NodeState = "ended" if row["ended_at"] is not None else "silent" if silent else "alive"
    return NodeView(state=state, **row)


async def terms(
    asks: Asks,
    namespace: str,
    name: str,
    *,
    since_s: float | None = None,
    before_epoch: int = LAST_ID,
    limit: int = PAGE_SIZE,
) -> tuple[Term, ...]:
    """One page of a role's terms, the newest first; `before_epoch` is the last epoch of the page before.

    `since_s`: only terms that went on or ended within so many seconds. A page shorter than `limit` is the last.
    """
    rows = await asks.rows(
        "history_terms",
        namespace=namespace,
        role=name,
        since_s=_ever(since_s),
        before_epoch=before_epoch,
        page_size=limit,
    )
    return tuple(Term(**row) for row in rows)


async def all_terms(asks: Asks, namespace: str, name: str, *, since_s: float | None = None) -> AsyncIterator[Term]:
    """Every term, the newest first, read page by page."""
    before_epoch = LAST_ID
    while True:
        page = await terms(asks, namespace, name, since_s=since_s, before_epoch=before_epoch, limit=PAGE_SIZE)
        for term in page:
            yield term
        if len(page) < PAGE_SIZE:
            return
        before_epoch = page[-1].epoch


async def events(
    asks: Asks,
    namespace: str,
    *,
    name: str | None = None,
    since_s: float | None = None,
    before_id: int = LAST_ID,
    limit: int = PAGE_SIZE,
) -> tuple[Event, ...]:
    """One page of events (of the role `name`), the newest first; `before_id` is the last one of the page before."""
    rows = await asks.rows(
        "history_events_before",
        namespace=namespace,
        role=name,
        since_s=_ever(since_s),
        before_id=before_id,
        page_size=limit,
    )
    return tuple(Event(**row) for row in rows)


async def request(asks: Asks, request_id: int) -> RequestView | None:
    """What became of a request."""
    rows = await asks.rows("history_request", request_id=request_id)
    return RequestView(**rows[0]) if rows else None


def _ever(since_s: float | None) -> float:
    return EVER_S if since_s is None else min(since_s, EVER_S)


class EventFeed:
    """Every event once, from some moment on; it outlives the connection that it is read through.

    Numbers are given out before a commit, so a lower one may appear after a higher one: the last minute is read again
    each time, and what was seen is left out. What takes longer than that to commit is missed; nothing in the ledger
    does.
    """

    def __init__(self, namespace: str, name: str | None = None) -> None:
        self._namespace = namespace
        self._name = name
        self._floor: int | None = None
        """No event up to this number will appear any more."""
        self._seen: set[int] = set()
        """Those above it that have."""

    async def begin(self, asks: Asks, *, since_s: float, limit: int = PAGE_SIZE) -> list[Event]:
        """What has happened lately, the oldest first, at most `limit`; from here on `more` goes on."""
        (settled,) = await asks.rows("history_settled_event", late_s=LATE_COMMIT_S)
        self._floor = settled["event_id"]
        await self.more(asks)
        wanted = await events(asks, self._namespace, name=self._name, since_s=since_s, limit=limit)
        self._seen |= {event.event_id for event in wanted if event.event_id > self._floor}
        return list(reversed(wanted))

    async def more(self, asks: Asks) -> list[Event]:
        """What has happened since, in the order of its numbers. Empty if nothing has."""
        assert self._floor is not None, "call begin first"
        fresh: list[Event] = []
        seen = set(self._seen)
        floor = after = self._floor
        while True:
            rows = await asks.rows(
                "history_events_after", namespace=self._namespace, role=self._name, after_id=after, page_size=PAGE_SIZE
            )
            page = [Event(**row) for row in rows]
            fresh += [event for event in page if event.event_id not in seen]
            seen |= {event.event_id for event in page}
            floor = max([floor, *(event.event_id for event in page if event.age_s > LATE_COMMIT_S)])
            if len(page) < PAGE_SIZE:
                break
            after = page[-1].event_id
        # Only now: whatever fails before this line is read again.
        self._floor, self._seen = floor, {number for number in seen if number > floor}
        return fresh
