"""The JSON API of the dashboard: its types, its reads of the ledger, and what their rows mean.

`Api.answer` takes a path and a query; the functions `leaders`, `terms`, `events_before`, `events_after` and `nodes`
take any object that runs a named statement (`history.Asks`), and also serve the live feed. The OpenAPI document is
generated from the types. Every time is in milliseconds since 1970, by the database's clock.

Must never write, return an unbounded list, ignore an unknown query parameter (a misspelt filter would show everything),
or decide by itself in which state a role is: `history` does that.
"""

import datetime as dt
import re
import time
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Literal, cast
from urllib.parse import parse_qsl, unquote_to_bytes

import msgspec

from pgleaderlock import history
from pgleaderlock._http.answers import Refusal
from pgleaderlock._pg.reader import Crowded, Inexpressible, ReadPool
from pgleaderlock.errors import ConnectionError, SchemaError
from pgleaderlock.history import EVER_S, LAST_ID, STATES, Asks, NodeState, RoleState, SlotState, node_state, role_view

__all__ = [
    "Api",
    "Event",
    "EventsReply",
    "Incident",
    "IncidentsReply",
    "LastChange",
    "Leader",
    "LeadersReply",
    "Node",
    "NodesReply",
    "Slot",
    "SlotsReply",
    "Term",
    "TermsReply",
    "encode",
    "events_after",
    "events_before",
    "incidents",
    "leaders",
    "nodes",
    "number_of",
    "query_of",
    "slots",
    "terms",
    "wall_ms",
]

LIMIT_DEFAULT = 100
LIMIT_MAX = 1_000
MS_MAX = 253_402_300_799_999
"""The end of the year 9999, the last that every database can express."""
NODE_CURSOR = r"^([0-9]{1,18}\.[^\u0000]+)?$"
HEARD_WITHIN_S = 3600.0
NO_SESSION = 0
DAY_MS = 86_400_000
RANKS = {state: place for place, state in enumerate(STATES)}

_FIELDS_MAX = 8
_DIGITS_MAX = 19
_NUL = "\0"
_NODE_CURSOR = re.compile(NODE_CURSOR.removesuffix("$") + r"\Z")

Query = Mapping[str, str]
ChangeKind = Literal["acquired", "released", "lost", "evicted", "superseded"]
EndReason = Literal["released", "lost", "evicted", "superseded"]


class LastChange(msgspec.Struct, frozen=True, gc=False):
    """`reason`: for an acquired role, why the previous term had ended; null for the first term."""

    at_ms: int
    kind: ChangeKind
    reason: EndReason | None


class Leader(msgspec.Struct, frozen=True, gc=False):
    """A role. `leader` is null when no node leads: the role was released, or its leader was not heard within its lease.

    `state` says whether a node may act; `gate` and `heartbeat` follow from it. `why` and `command` are null while a
    node may act. `label` is the state in words, `mood` how bad it is, `rank` its place in the order, worst first.
    `hold`: how the leader holds the role, by a session or a lease; null when no node leads. `opens_ms`: when a waiting
    leader may act. `in_flight`: the work that a draining leader waits for.
    """

    namespace: str
    role: str
    leader: str | None
    hold: Literal["session", "lease"] | None
    epoch: int
    since_ms: int | None
    tenure_ms: int | None
    heartbeat_age_ms: int | None
    heartbeat: Literal["ok", "late", "none"]
    gate: Literal["open", "waiting", "shut"]
    state: RoleState
    label: str
    mood: Literal["well", "late", "bad"]
    rank: int
    state_since_ms: int | None
    opens_ms: int | None
    in_flight: int | None
    why: str | None
    command: str | None
    candidates: int
    last_change: LastChange | None


class LeadersReply(msgspec.Struct, frozen=True):
    now_ms: int
    leaders: list[Leader]
    next_cursor: str | None


class Term(msgspec.Struct, frozen=True, gc=False):
    """`ended_ms` is null for an open term. `gap_ms`: how long no node could act before its leader; null for the first.

    `opened_ms`: when its leader could first act, null if never. `shut_ms`: when it could last act, if before the end.
    `gaps`: when it could not act in between, each as from, to and why.

    The term of a leader that was silent for longer than its lease is shown as lost at its last heartbeat, as the next
    winner will record it.
    """

    epoch: int
    node_id: str
    began_ms: int
    ended_ms: int | None
    reason: EndReason | None
    gap_ms: int | None
    opened_ms: int | None
    shut_ms: int | None
    gaps: list[tuple[int, int, str]]


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
    """One session or lease of a node: `hold` says which. `live`: it was heard within its lease T.

    `name_shared`: another live node has the same `node_id`.

    `state`: starting until its first heartbeat; draining while it is drained but still leads, drained when it no longer
    leads; silent if it was not heard within its lease; ended if its session was closed; otherwise alive. `started_ms`
    is when its session began, `process_started_ms` when its process opened the first one. `roles` is how many roles it
    leads, `wants` how many it competes for, null if it has not declared them.
    """

    node_id: str
    namespace: str
    session_id: int
    hold: Literal["session", "lease"]
    host: str
    version: str
    state: NodeState
    process_started_ms: int
    started_ms: int
    heartbeat_age_ms: int
    live: bool
    name_shared: bool
    candidate: bool
    draining: bool
    roles: int
    wants: int | None


class Incident(msgspec.Struct, frozen=True, gc=False):
    """Terms of one node that ended together and for the same reason. `ended_ms`: when the last role was led again.

    `longest_ms`: the longest time for which one of the roles had no leader, up to now for those of `without_leader`.
    """

    node_id: str
    reason: EndReason
    began_ms: int
    ended_ms: int | None
    roles: list[str]
    without_leader: list[str]
    longest_ms: int
    taken_over_by: list[str]


class IncidentsReply(msgspec.Struct, frozen=True):
    """`more`: older ones were left out."""

    now_ms: int
    incidents: list[Incident]
    more: bool


class Slot(msgspec.Struct, frozen=True, gc=False):
    """The work of one tick. `state`: running while its runner lives, done or failed as reported, lost if the runner is
    gone.

    `attempts`: how often it was begun; `began_ms`, `node_id` and `took_ms` are those of the last attempt, `took_ms` up
    to now while it runs. `detail`: why it failed.
    """

    name: str
    slot: str
    state: SlotState
    attempts: int
    node_id: str
    began_ms: int
    ended_ms: int | None
    took_ms: int | None
    detail: str | None


class SlotsReply(msgspec.Struct, frozen=True):
    """`more`: older ones were left out."""

    now_ms: int
    slots: list[Slot]
    more: bool


class NodesReply(msgspec.Struct, frozen=True):
    now_ms: int
    nodes: list[Node]
    next_cursor: str | None


encode = msgspec.json.Encoder().encode


# --- Reads


def wall_ms() -> int:
    return int(time.time() * 1000)


async def leaders(asks: Asks, namespace: str, *, prefix: str = "", after: str = "", limit: int) -> LeadersReply:
    """One page of the roles, sorted by name as in the database."""
    rows = await asks.rows(
        "history_roles",
        namespace=namespace,
        role=None,
        prefix=prefix,
        after=after,
        with_forgotten=False,
        page_size=limit + 1,
    )
    found = [_leader(row) for row in rows[:limit]]
    now_ms = rows[0]["now_ms"] if rows else wall_ms()
    return LeadersReply(now_ms, found, found[-1].role if len(rows) > limit else None)


def _leader(row: Mapping[str, Any]) -> Leader:
    view, live, now_ms = role_view(row), row["live"], row["now_ms"]
    label, mood = STATES[view.state]
    gates: dict[str, Literal["open", "waiting", "shut"]] = {
        "acting": "open",
        "work_failed": "open",
        "waiting": "waiting",
    }
    return Leader(
        namespace=view.namespace,
        role=view.role,
        leader=view.node_id if live else None,
        hold=row["hold"] if live else None,
        epoch=view.epoch,
        since_ms=row["began_ms"] if live else None,
        tenure_ms=_span_ms(now_ms, row["began_ms"]) if live else None,
        heartbeat_age_ms=max(0, int(row["heartbeat_age_s"] * 1000)) if live else None,
        heartbeat="none" if not live else "late" if view.state == "late" else "ok",
        gate=gates.get(view.state, "shut"),
        state=view.state,
        label=label,
        mood=mood,
        rank=RANKS[view.state],
        state_since_ms=None if view.state_age_s is None else now_ms - int(view.state_age_s * 1000),
        opens_ms=None if view.opens_in_s is None else now_ms + int(view.opens_in_s * 1000),
        in_flight=view.in_flight if view.state == "draining" else None,
        why=view.why or None,
        command=view.command,
        candidates=view.candidates,
        last_change=_last_change(row, live=live),
    )


def _last_change(row: Mapping[str, Any], *, live: bool) -> LastChange | None:
    if row["began_ms"] is None:  # its terms were pruned, or none has begun
        return None
    if row["reason"] is not None:
        return LastChange(row["ended_ms"], row["reason"], None)
    if live:
        return LastChange(row["began_ms"], "acquired", row["prev_reason"])
    return LastChange(row["last_sign_ms"], "lost", None)


def _span_ms(now_ms: int, then_ms: int | None) -> int | None:
    return None if then_ms is None else max(0, now_ms - then_ms)


async def terms(
    asks: Asks, namespace: str, role: str, *, from_ms: int = 0, to_ms: int = MS_MAX, before: int = LAST_ID, limit: int
) -> TermsReply | None:
    """One page of a role's terms that overlap a period, newest first; None if there is no such role."""
    rows = await asks.rows(
        "history_terms",
        namespace=namespace,
        role=role,
        since_s=EVER_S,
        before_epoch=before,
        to_ms=to_ms,
        page_size=limit + 1,
    )
    if not rows and not (await asks.rows("dashboard_role_known", namespace=namespace, role=role))[0]["known"]:
        return None
    page = [_term(row) for row in rows[:limit]]
    found = [term for term in page if term.ended_ms is None or term.ended_ms >= from_ms]
    more = len(rows) > limit and len(found) == len(page)
    return TermsReply(role, found, str(page[-1].epoch) if more else None)


def _term(row: Mapping[str, Any]) -> Term:
    ended_ms, reason, gap_ms = row["ended_ms"], row["reason"], row["gap_ms"]
    if ended_ms is None and not row["live"]:
        # Without the session's record, only the beginning is known.
        ended_ms, reason = row["last_sign_ms"], "lost"
    gap_ms = None if gap_ms is None else max(0, gap_ms)
    times = row["opened_ms"], row["shut_ms"], [tuple(gap) for gap in row["gaps"]]
    return Term(row["epoch"], row["node_id"], row["began_ms"], ended_ms, reason, gap_ms, *times)


class EventFilter(msgspec.Struct, frozen=True, kw_only=True):
    """The filter for events."""

    role: str | None = None
    node: str | None = None
    from_ms: int = 0
    to_ms: int = MS_MAX


ANY_EVENT = EventFilter()


async def events_before(
    asks: Asks, namespace: str, *, before: int = LAST_ID, wanted: EventFilter = ANY_EVENT, limit: int
) -> EventsReply:
    """One page of events, newest first."""
    place = {"since_s": EVER_S, "before_id": before, "page_size": limit + 1}
    rows = await asks.rows("history_events_before", namespace=namespace, **msgspec.structs.asdict(wanted), **place)
    return _events(rows, limit)


async def events_after(
    asks: Asks, namespace: str, *, after: int, wanted: EventFilter = ANY_EVENT, limit: int
) -> EventsReply:
    """One page of events, oldest first."""
    place = {"after_id": after, "page_size": limit + 1}
    rows = await asks.rows("history_events_after", namespace=namespace, **msgspec.structs.asdict(wanted), **place)
    return _events(rows, limit)


def _events(rows: Sequence[Mapping[str, Any]], limit: int) -> EventsReply:
    found = [Event(*(row[name] for name in Event.__struct_fields__)) for row in rows[:limit]]
    return EventsReply(found, str(found[-1].event_id) if len(rows) > limit else None)


async def nodes(asks: Asks, namespace: str, *, after: tuple[str, int] = ("", NO_SESSION), limit: int) -> NodesReply:
    """One page of the nodes by name: those that live or lead, and those heard lately."""
    rows = await asks.rows(
        "history_nodes",
        namespace=namespace,
        heard_within_s=HEARD_WITHIN_S,
        after_node_id=after[0],
        after_session_id=after[1],
        page_size=limit + 1,
    )
    found = [
        Node(
            node_id=row["node_id"],
            namespace=row["namespace"],
            session_id=row["session_id"],
            hold=row["hold"],
            host=row["host"],
            version=row["library_version"],
            state=node_state(row),
            process_started_ms=_ms(row["process_started_at"]),
            started_ms=row["started_ms"],
            heartbeat_age_ms=max(0, int(row["heartbeat_age_s"] * 1000)),
            live=row["live"],
            name_shared=row["name_shared"],
            candidate=row["candidate"],
            draining=row["draining"],
            roles=row["leads"],
            wants=row["wants"],
        )
        for row in rows[:limit]
    ]
    now_ms = rows[0]["now_ms"] if rows else wall_ms()
    last = found[-1] if len(rows) > limit else None
    return NodesReply(now_ms, found, None if last is None else f"{last.session_id}.{last.node_id}")


async def incidents(
    asks: Asks, namespace: str, *, from_ms: int, to_ms: int, role: str | None, node: str | None, limit: int
) -> IncidentsReply:
    """The newest incidents of this period."""
    since, until = (dt.datetime.fromtimestamp(ms / 1000, dt.UTC) for ms in (from_ms, to_ms))
    found = await history.incidents(asks, namespace, name=role, since=since, until=until)
    wanted = [each for each in found if node is None or node in (each.node_id, *each.taken_over_by)]
    shown = [
        Incident(
            node_id=each.node_id,
            reason=cast("EndReason", each.reason),
            began_ms=_ms(each.began_at),
            ended_ms=None if each.ended_at is None else _ms(each.ended_at),
            roles=list(each.roles),
            without_leader=list(each.without_leader),
            longest_ms=int(each.longest_s * 1000),
            taken_over_by=list(each.taken_over_by),
        )
        for each in wanted[:limit]
    ]
    return IncidentsReply(wall_ms(), shown, more=len(wanted) > limit)


async def slots(asks: Asks, namespace: str, *, name: str | None, limit: int) -> SlotsReply:
    """The newest slots of a name; without a name, the newest slot of each."""
    found = await history.slots(asks, namespace, name, limit=limit + 1)
    shown = [
        Slot(
            name=each.name,
            slot=each.slot,
            state=each.state,
            attempts=each.attempts,
            node_id=each.node_id or each.holder_identity,
            began_ms=_ms(each.claimed_at),
            ended_ms=None if each.ended_at is None else _ms(each.ended_at),
            took_ms=None if each.took_s is None else int(each.took_s * 1000),
            detail=each.detail,
        )
        for each in found[:limit]
    ]
    return SlotsReply(wall_ms(), shown, more=len(found) > limit)


def _ms(moment: dt.datetime) -> int:
    return int(moment.timestamp() * 1000)


# --- Paths and queries


class Api:
    """The reads by path, each with its query parameters. Raises `Refusal`."""

    def __init__(self, ledger: ReadPool, namespace: str) -> None:
        self._ledger = ledger
        self._namespace = namespace

    async def answer(self, path: bytes, query: bytes) -> msgspec.Struct:
        """The answer to GET /v1/{path}?{query}."""
        try:
            return await self._asked(path, query)
        except Inexpressible:
            raise Refusal(400, "the database cannot express a name in this request") from None
        except SchemaError as error:
            raise Refusal(503, str(error)) from None
        except Crowded:
            raise Refusal(503, "too many questions wait for the database: try again", (b"retry-after", b"1")) from None
        except ConnectionError:
            text = "the database of the ledger is away: the server's log says why"
            raise Refusal(503, text, (b"retry-after", b"1")) from None

    def _asked(self, path: bytes, query: bytes) -> Awaitable[msgspec.Struct]:
        match path.split(b"/"):
            case [b"leaders"]:
                answer = self.leaders(query_of(query, ("prefix", "cursor", "limit")))
            case [b"leaders", role, b"terms"]:
                answer = self.terms(_text_of(role), query_of(query, ("from_ms", "to_ms", "cursor", "limit")))
            case [b"leaders", b"terms"]:
                given = query_of(query, ("role", "from_ms", "to_ms", "cursor", "limit"))
                if not given.get("role"):
                    raise Refusal(400, "say of which role: /v1/leaders/terms?role=NAME")
                answer = self.terms(given["role"], given)
            case [b"events"]:
                answer = self.events(query_of(query, ("after", "cursor", "limit", "role", "node", "from_ms", "to_ms")))
            case [b"incidents"]:
                answer = self.incidents(query_of(query, ("from_ms", "to_ms", "role", "node", "limit")))
            case [b"slots"]:
                answer = self.slots(query_of(query, ("name", "limit")))
            case [b"nodes"]:
                answer = self.nodes(query_of(query, ("cursor", "limit")))
            case _:
                raise Refusal(404, "there is nothing at this path")
        return answer

    async def leaders(self, query: Query) -> msgspec.Struct:
        prefix, after = query.get("prefix", ""), query.get("cursor", "")
        return await leaders(self._ledger, self._namespace, prefix=prefix, after=after, limit=_limit_of(query))

    async def terms(self, role: str, query: Query) -> msgspec.Struct:
        from_ms = number_of(query, "from_ms", 0, MS_MAX, 0)
        to_ms = number_of(query, "to_ms", 0, MS_MAX, MS_MAX)
        page = {"before": number_of(query, "cursor", 0, LAST_ID, LAST_ID), "limit": _limit_of(query)}
        found = await terms(self._ledger, self._namespace, role, from_ms=from_ms, to_ms=to_ms, **page)
        if found is None:
            raise Refusal(404, "nobody has ever led a role of this name here")
        return found

    async def events(self, query: Query) -> msgspec.Struct:
        from_ms, to_ms = number_of(query, "from_ms", 0, MS_MAX, 0), number_of(query, "to_ms", 0, MS_MAX, MS_MAX)
        role, node, limit = query.get("role") or None, query.get("node") or None, _limit_of(query)
        wanted = EventFilter(role=role, node=node, from_ms=from_ms, to_ms=to_ms)
        if "after" in query:
            # The cursor of this page is the event after which the next page begins.
            after = max(number_of(query, name, 0, LAST_ID, 0) for name in ("after", "cursor"))
            return await events_after(self._ledger, self._namespace, after=after, wanted=wanted, limit=limit)
        before = number_of(query, "cursor", 0, LAST_ID, LAST_ID)
        return await events_before(self._ledger, self._namespace, before=before, wanted=wanted, limit=limit)

    async def incidents(self, query: Query) -> msgspec.Struct:
        to_ms = number_of(query, "to_ms", 0, MS_MAX, wall_ms() + DAY_MS)  # the database's clock may be ahead
        from_ms = number_of(query, "from_ms", 0, MS_MAX, wall_ms() - DAY_MS)
        role, node = query.get("role") or None, query.get("node") or None
        return await incidents(
            self._ledger,
            self._namespace,
            from_ms=from_ms,
            to_ms=to_ms,
            role=role,
            node=node,
            limit=_limit_of(query),
        )

    async def slots(self, query: Query) -> msgspec.Struct:
        return await slots(self._ledger, self._namespace, name=query.get("name") or None, limit=_limit_of(query))

    async def nodes(self, query: Query) -> msgspec.Struct:
        after = ("", NO_SESSION)
        if cursor := query.get("cursor"):
            if not _NODE_CURSOR.match(cursor):
                raise Refusal(400, "cursor must be next_cursor of the page before")
            session_id, _, node_id = cursor.partition(".")
            after = (node_id, int(session_id))
        return await nodes(self._ledger, self._namespace, after=after, limit=_limit_of(query, LIMIT_MAX))


def query_of(raw: bytes, known: Sequence[str]) -> dict[str, str]:
    """The parameters of a query. Refuses unknown and repeated ones."""
    try:
        text = raw.decode("ascii")
        if re.search(r"%(?![0-9A-Fa-f]{2})", text):
            raise ValueError
        pairs = parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=_FIELDS_MAX)
    except ValueError:  # UnicodeDecodeError is one
        raise Refusal(400, "the query is not percent-encoded UTF-8, or has too many fields") from None
    given = dict(pairs)
    if len(given) != len(pairs):
        raise Refusal(400, "each field of the query may be given once")
    for name, value in pairs:
        if name not in known:
            raise Refusal(400, f"unknown field in the query: known are {', '.join(known)}")
        if _NUL in value:
            raise Refusal(400, f"{name} has a NUL character in it")
    return given


def _text_of(segment: bytes) -> str:
    """A name from its segment of the path, percent-decoded once."""
    if re.search(rb"%(?![0-9A-Fa-f]{2})", segment):
        raise Refusal(400, "the name in the path has a % that begins no escape: write %25")
    try:
        text = unquote_to_bytes(segment).decode()
    except UnicodeDecodeError:
        raise Refusal(400, "the name in the path is not UTF-8") from None
    if not text or _NUL in text:
        raise Refusal(400, "the name in the path is empty or has a NUL character in it")
    return text


def number_of(query: Query, name: str, low: int, high: int, default: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX and low <= int(text) <= high):
        raise Refusal(400, f"{name} must be an integer from {low} to {high}")
    return int(text)


def _limit_of(query: Query, default: int = LIMIT_DEFAULT) -> int:
    return number_of(query, "limit", 1, LIMIT_MAX, default)
